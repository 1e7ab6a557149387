"""Memory that is not NumPy's: LAPACK's workspaces, pandas' hash tables and strings use malloc.

Each call in processes of its own for each rival, as the expression of bench_numpy: they take turns,
more than once from the start. arenapy comes twice, as `arenapy run` has it, and with malloc as it
is (`--libc none`).

What this does not show: what it takes in memory that nothing of what was freed goes back.
"""

import statistics

from asv_benches.numpy_programs.bench_numpy import FAULT_RUNS, Figures
from asv_benches.numpy_programs.rivals import (
    ALONE,
    DEFAULT,
    OURS,
    Program,
    Ratios,
    here,
    programs,
)
from asv_benches.support.process import Loop
from asv_benches.support.rounds import Line, Way, enough, named, samples

MATRIX = "a = np.random.default_rng(0).random(({n}, {n})) + {n} * np.eye({n}); b = np.ones({n})"
JOIN = (
    "from asv_benches.numpy_programs.workloads import WORKLOADS; "
    "step = WORKLOADS['pandas_join']({scale})"
)
STRINGS = "t = np.array([f'the string {{i}}, a rather long one' for i in range({n})], 'T')"

#: The calls, as (setup, statement); of each a small one for --quick.
CALLS = {
    "solve, 600": (MATRIX.format(n=600), "np.linalg.solve(a, b)"),
    "solve, 8, 600,000 right sides": (
        "a = np.eye(8) + 1; b = np.ones((8, 600_000))",
        "np.linalg.solve(a, b)",
    ),
    "cholesky, 1500": (MATRIX.format(n=1500) + "; a = a @ a.T", "np.linalg.cholesky(a)"),
    "qr, 1000": (MATRIX.format(n=1000), "np.linalg.qr(a)"),
    "svd, 500": (MATRIX.format(n=500), "np.linalg.svd(a)"),
    "pandas join": (JOIN.format(scale=1.0), "step()"),
    "upper of strings": (STRINGS.format(n=100_000), "np.strings.upper(t)"),
}
QUICK = ("solve, 600", "svd, 500")
TURN = 0.05  # seconds; of two runs at least
MOST_FAULTS = 30  # a run: next to none


def call(setup, statement, rivals, generations, rounds):
    """{rival: Figures} of one of `CALLS`."""
    found = {rival: Figures() for rival in rivals}
    for generation in range(generations):
        with programs(rivals, setup) as started:
            loops = {rival: Loop(program, Way(statement)) for rival, program in started.items()}
            runs = max(2, enough(loops[DEFAULT], TURN))
            for rival, seconds in samples(loops, runs, rounds).items():
                found[rival].seconds += seconds
            for rival, program in started.items():
                if generation == 0:
                    faults = program.value(f"faults_of({statement!r}, {FAULT_RUNS})")
                    found[rival].faults = faults / FAULT_RUNS
    return found


def calls(quick=False):
    """{name: {rival: Figures}}."""
    how = (1, 5) if quick else (3, 5)  # processes differ by more than rounds
    return {
        name: call(*CALLS[name], [*here(), ALONE], *how) for name in (QUICK if quick else CALLS)
    }


def ratios(figures):
    """(beside default and the best malloc, seconds of the pool alone / arenapy)."""
    seconds = {rival: one.seconds for rival, one in figures.items()}
    alone = statistics.median(seconds.pop(ALONE)) / statistics.median(seconds[OURS])
    return Ratios.of(seconds), alone


def call_lines(found):
    """The report's lines about the calls."""
    for name, figures in found.items():
        ratio, alone = ratios(figures)
        best = f"{name}: best rival ({ratio.who}) / arenapy"
        yield Line("libc", best, ratio.best, "x", 0.97, at_least=True)
        yield Line("libc", f"{name}: default / arenapy", ratio.default)
        yield Line("libc", f"{name}: pool alone / arenapy", alone)
        faults = figures[OURS].faults
        yield Line("libc", f"{name}: faults a run", faults, "faults", MOST_FAULTS, timed=False)


class Calls:
    """asv: page faults of what takes memory from malloc, in a process for each rival."""

    params = ((*here(), ALONE), tuple(CALLS))
    param_names = ("memory", "call")
    timeout = 300

    @named("Page faults of C code that uses malloc, 20 runs", "faults")
    def track_faults(self, memory, call):
        """Once it is warm."""
        setup, statement = CALLS[call]
        with Program(memory, setup) as program:
            program.value(f"faults_of({statement!r}, {FAULT_RUNS})")
            return program.value(f"faults_of({statement!r}, {FAULT_RUNS})")
