"""NumPy's own expressions and arrays under arenapy's handler, the default and tuned mallocs.

An element-wise expression of float32 matrices makes three temporaries and a result a run: it is
what an allocator can do for a NumPy program at best. Each side N has processes of its own for each
rival, more than once, since where a process happens to lie in memory counts, too. They take turns.
Empty arrays are the other end: nothing is touched, so that only the call counts. The handler and
the default take turns in this process.

What this does not show: programs that do something else than making temporaries; bench_workloads.
"""

import math
import statistics
from dataclasses import dataclass, field

import numpy as np

import arenapy
from asv_benches.numpy_programs.rivals import DEFAULT, OURS, Program, Ratios, here, programs
from asv_benches.support.process import Loop
from asv_benches.support.rounds import Line, Way, enough, named, samples, turns

SIDES = (200, 300, 500, 700, 1000, 1400, 2000, 2800, 4000, 6000)
QUICK_SIDES = (200, 1000, 3000)
MATRICES = "a, b = np.random.default_rng(0).random((2, {n}, {n}), 'f4')"
EXPRESSION = Way("c = a * b + a - b / 2")
TURN = 0.05  # seconds; of two runs at least
FAULT_RUNS = 20
EMPTY = {8: 1.10, 1000: 0.85}  # elements of float64: the most that the handler may take
CALLS = 10_000


@dataclass
class Figures:
    """Of one rival: seconds a run, in each round, and page faults a run once it is warm."""

    seconds: list[float] = field(default_factory=list)
    faults: float = 0.0


def expression(n, rivals, generations, rounds):
    """{rival: Figures} of the expression with sides of n."""
    found = {rival: Figures() for rival in rivals}
    for generation in range(generations):
        with programs(rivals, MATRICES.format(n=n)) as started:
            loops = {rival: Loop(program, EXPRESSION) for rival, program in started.items()}
            runs = max(2, enough(loops[DEFAULT], TURN))
            for rival, seconds in samples(loops, runs, rounds).items():
                found[rival].seconds += seconds
            for rival, program in started.items():
                if generation == 0:
                    faults = program.value(f"faults_of({EXPRESSION.statement!r}, {FAULT_RUNS})")
                    found[rival].faults = faults / FAULT_RUNS
    return found


def expressions(quick=False):
    """{n: {rival: Figures}}."""
    how = (1, 5) if quick else (5, 5)  # processes differ by more than rounds
    return {n: expression(n, here(), *how) for n in (QUICK_SIDES if quick else SIDES)}


def geometric_mean(values):
    """Of ratios."""
    return math.exp(statistics.fmean(map(math.log, values)))


class Under:
    """A loop that runs under a handler; `memory` may be None."""

    def __init__(self, loop, memory):
        self.loop = loop
        self.memory = memory

    def timeit(self, runs):
        """Seconds of so many runs."""
        if self.memory is None:
            return self.loop.timeit(runs)
        with self.memory:
            return self.loop.timeit(runs)


def empty_loops(elements):
    """{DEFAULT or OURS: what makes empty arrays of so many float64, and drops them}."""
    way = Way(f"empty(({elements},), 'f8')")
    memories = {DEFAULT: None, OURS: arenapy.numpy_memory(arenapy.Pool())}
    return {name: Under(way.loop({"empty": np.empty}), memory) for name, memory in memories.items()}


def empties(quick=False):
    """{elements: {DEFAULT or OURS: seconds}}."""
    rounds = 21 if quick else 201
    return {n: turns(empty_loops(n), CALLS, rounds) for n in EMPTY}


def expression_lines(found):
    """The report's lines about the expressions."""
    ratios = {}
    for n, figures in found.items():
        ratios[n] = Ratios.of({rival: one.seconds for rival, one in figures.items()})
        what = f"a*b + a - b/2, {n} x {n}"
        best = f"{what}: best rival ({ratios[n].who}) / arenapy"
        yield Line("numpy", best, ratios[n].best, "x", 0.97, at_least=True)
        yield Line("numpy", f"{what}: default / arenapy", ratios[n].default)
        faults = figures[OURS].faults
        yield Line("numpy", f"{what}: faults a run", faults, "faults", 0, timed=False)
    mean = geometric_mean([one.best for one in ratios.values()])
    yield Line("numpy", "geometric mean: best rival / arenapy", mean, "x", 1.0, at_least=True)
    mean = geometric_mean([one.default for one in ratios.values()])
    yield Line("numpy", "geometric mean: default / arenapy", mean, "x", 1.5, at_least=True)


def empty_lines(found):
    """The report's lines about empty arrays."""
    for n, seconds in found.items():
        for name, one in seconds.items():
            yield Line("numpy", f"np.empty(({n},), 'f8'): {name}", one * 1e9, "ns")
        ratio = seconds[OURS] / seconds[DEFAULT]
        yield Line("numpy", f"np.empty(({n},), 'f8'): arenapy / default", ratio, "x", EMPTY[n])


def lines(quick):
    """The report's lines."""
    yield from expression_lines(expressions(quick))
    yield from empty_lines(empties(quick))


class Expression:
    """asv: the element-wise expression, in a process for each rival."""

    params = (tuple(here()), QUICK_SIDES)
    param_names = ("memory", "n")
    timeout = 300

    @named("a*b + a - b/2 of n x n float32", "ms")
    def track_run(self, memory, n):
        """Steady state."""
        with Program(memory, MATRICES.format(n=n)) as program:
            loop = Loop(program, EXPRESSION)
            runs = max(2, enough(loop, TURN))
            return statistics.median(samples({"": loop}, runs, 11)[""]) * 1e3

    @named("Page faults of a*b + a - b/2, n x n float32, 20 runs", "faults")
    def track_faults(self, memory, n):
        """Once it is warm."""
        with Program(memory, MATRICES.format(n=n)) as program:
            program.value(f"faults_of({EXPRESSION.statement!r}, {FAULT_RUNS})")
            return program.value(f"faults_of({EXPRESSION.statement!r}, {FAULT_RUNS})")


class Empty:
    """asv: an empty array, made and dropped."""

    params = ((DEFAULT, OURS), tuple(EMPTY))
    param_names = ("memory", "elements")

    def setup(self, memory, elements):
        """A new pool."""
        self.loop = empty_loops(elements)[memory]

    @named("Allocate and free with np.empty, float64", "ns")
    def track_empty(self, memory, elements):
        """The median of rounds."""
        return turns({"": self.loop}, CALLS, 15)[""] * 1e9
