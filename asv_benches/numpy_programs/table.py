"""The table of NumPy beside every malloc: an expression on threads, library calls, short programs.

What an expression gets done in a program's first 50 ms, in which memory grows, and afterwards; what
calls of the library take once they are warm; how long a short program takes from the start of its
interpreter to its end. By the clock, in processes that take turns: each row has some of its own for
each rival, and after all rows all begin again, until the time is over. Medians are compared.

What this does not show: more than a table can; programs are in bench_workloads.
"""

import random
import time
from dataclasses import dataclass

from asv_benches.numpy_programs.bench_libc import MATRIX, STRINGS
from asv_benches.numpy_programs.bench_numpy import geometric_mean
from asv_benches.numpy_programs.rivals import OURS, Program, Ratios, here, programs
from asv_benches.support.rounds import Line, samples
from asv_benches.support.sizes import KIB, MIB, text

EXPRESSION = "c = a * b + a - b / 2"
ARRAYS = "a, b = np.random.default_rng(0).random((2, {}), 'f4')"
SIZES = (256 * KIB, MIB, 4 * MIB, 16 * MIB)
THREADS = (1, 4, 8)
MOMENT = 0.05  # seconds of a program's start, and of any turn
WARM_UP = 0.1
SECONDS = {True: 80, False: 440}  # of --quick and without it; the last pass is begun before
LEAST = 0.97  # of the default's speed


@dataclass(frozen=True)
class Row:
    """A statement of a process that ran `setup` first."""

    setup: str
    statement: str
    threads: int = 1
    fresh: bool = False  # its first moment has a row, too


def small(nbytes):
    """The expression with small arrays, so often that they count and not the clock."""
    return Row(ARRAYS.format(nbytes // 4), f"for _ in range(200): {EXPRESSION}")


EXPRESSIONS = {
    f"a*b + a - b/2, {text(nbytes)}, {n} thread{'s'[: n > 1]}": Row(
        ARRAYS.format(nbytes // 4), EXPRESSION, n, fresh=True
    )
    for n in THREADS
    for nbytes in SIZES
}
NUMBERS = "x = np.random.default_rng(0).random({})"
WHOLE = "k = np.random.default_rng(0).integers(0, 1 << 20, {})"
CALLS = {
    "a*b + a - b/2, 80 B": small(80),
    "a*b + a - b/2, 16 KiB": small(16 * KIB),
    "solve, 600": Row(MATRIX.format(n=600), "np.linalg.solve(a, b)"),
    "cholesky, 800": Row(MATRIX.format(n=800) + "; a = a @ a.T", "np.linalg.cholesky(a)"),
    "qr, 500": Row(MATRIX.format(n=500), "np.linalg.qr(a)"),
    "svd, 300": Row(MATRIX.format(n=300), "np.linalg.svd(a)"),
    "eigh, 300": Row(MATRIX.format(n=300) + "; a += a.T", "np.linalg.eigh(a)"),
    "sort, 1 M numbers": Row(NUMBERS.format(1_000_000), "np.sort(x)"),
    "argsort, 500,000 numbers": Row(NUMBERS.format(500_000), "np.argsort(x)"),
    "unique, 2 M integers": Row(WHOLE.format(2_000_000), "np.unique(k)"),
    "rfft, 1 M numbers": Row(NUMBERS.format(1 << 20), "np.fft.rfft(x)"),
    "fft2, 512 x 512": Row(NUMBERS.format("(512, 512)"), "np.fft.fft2(x)"),
    "x[k], 1 M of 1 M": Row(NUMBERS.format(1 << 20) + "; " + WHOLE.format(1 << 20), "y = x[k]"),
    "x[x > 0.5], 4 M": Row(NUMBERS.format(1 << 22), "y = x[x > 0.5]"),
    "concatenate, 8 of 1 MiB": Row(NUMBERS.format("(8, 1 << 17)"), "y = np.concatenate([*x])"),
    "astype, 4 M f8 to f4": Row(NUMBERS.format(1 << 22), "y = x.astype('f4')"),
    "cumsum, 1 M": Row(NUMBERS.format(1 << 20), "y = np.cumsum(x)"),
    "upper of 50,000 strings": Row(STRINGS.format(n=50_000), "y = np.strings.upper(t)"),
    "50,000 strings joined": Row(STRINGS.format(n=50_000), "y = np.strings.add(t, t)"),
    "text of 50,000 numbers": Row(WHOLE.format(50_000), "y = k.astype('T')"),
}


def program(nbytes, times):
    """A program that evaluates the expression so many times."""
    return ARRAYS.format(nbytes // 4) + f"\nfor _ in range({times}): {EXPRESSION}"


#: From the start of the interpreter to its end; the work itself takes some 30 ms.
PROGRAMS = {
    "program: import numpy": "pass",
    "program: 20,000 expressions of 80 B": program(80, 20_000),
    "program: 300 expressions of 256 KiB": program(256 * KIB, 300),
    "program: 8 expressions of 4 MiB": program(4 * MIB, 8),
}


class Turn:
    """So many seconds of a row's statement in a process; timeit() as timeit.Timer has it."""

    def __init__(self, program, row, seconds=MOMENT):
        self.asked = f"rate({row.statement!r}, {row.threads}, {seconds})"
        self.program = program

    def timeit(self, runs):
        """Seconds a run."""
        return runs / self.program.value(self.asked)


def measure(name, row, rounds):
    """{name of a row: {rival: seconds}}: of the first moment, if wanted, and once it is warm."""
    found = {}
    with programs(here(), row.setup) as started:
        turns = {rival: Turn(program, row) for rival, program in started.items()}
        if row.fresh:
            order = random.sample(list(turns), len(turns))
            found[f"{name}, first 50 ms"] = {rival: [turns[rival].timeit(1)] for rival in order}
        for program in started.values():
            Turn(program, row, WARM_UP).timeit(1)
        found[name] = samples(turns, 1, rounds)
    return found


def short(setup):
    """{rival: seconds} of whole programs, one after the other."""
    found = {}
    for rival in random.sample(here(), len(here())):
        with Program(rival, setup) as program:
            program.close()
            found[rival] = [program.seconds]
    return found


def one_pass(rounds):
    """{name: {rival: seconds}} of every row."""
    found = {}
    for name, row in (EXPRESSIONS | CALLS).items():
        found |= measure(name, row, rounds)
    for name, setup in PROGRAMS.items():
        runs = [short(setup) for _ in range(rounds)]
        found[name] = {rival: [one[rival][0] for one in runs] for rival in here()}
    return found


def rows(quick=False):
    """{name: {rival: seconds}}: passes over all rows, as many as there is time for."""
    start = time.perf_counter()
    found, took = {}, 0.0
    while took == 0.0 or time.perf_counter() - start + took < SECONDS[quick]:
        begun = time.perf_counter()
        for name, seconds in one_pass(1 if quick else 3).items():
            of_row = found.setdefault(name, {rival: [] for rival in here()})
            for rival, more in seconds.items():
                of_row[rival] += more
        took = time.perf_counter() - begun
    return found


def summary(found):
    """({who: geometric mean of its seconds over ours, "the best" too}, rows slower than LEAST)."""
    ratios = {name: Ratios.of(seconds) for name, seconds in found.items()}
    means = {
        rival: geometric_mean([one.over[rival] for one in ratios.values()])
        for rival in here()
        if rival != OURS
    }
    means["the best"] = geometric_mean([one.best for one in ratios.values()])
    return means, [name for name, one in ratios.items() if one.default < LEAST]


def row_lines(found):
    """The report's lines about the table."""
    for name, seconds in found.items():
        ratio = Ratios.of(seconds).default
        yield Line("table", f"{name}: default / arenapy", ratio, "x", LEAST, at_least=True)
    for who, mean in summary(found)[0].items():
        limit = 1.0 if who == "the best" else 1.05
        yield Line("table", f"geometric mean: {who} / arenapy", mean, "x", limit, at_least=True)
