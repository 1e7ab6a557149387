"""How the demo measures: one process, rounds of the three ways in shuffled order, medians.

A round runs each way for the same number of iterations, so that the jobs stay in step and their
results can be compared, bit for bit, after every round. Faults are the process's own count
(``ru_minflt``), threads of the BLAS included. Nothing but the job runs between two readings of the
clock: the garbage collector is off, and the progress bar is drawn between the blocks.
"""

import gc
import hashlib
import math
import random
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

from arenapy import Bump

from .ways import Arena, Plain, Preallocated, Way
from .workloads import Array, Job, Workload

__all__ = ["Result", "ResultsDiffer", "Timing", "measure"]

MILLISECONDS = 1e3
CACHE_LINE = 64
PREFAULT_REPEATS = 3
CALIBRATIONS = 3
MAX_BLOCK_MS = 250.0
#: An iteration must get this much faster to be called a gain, and in this share of the rounds.
GAIN_AT_LEAST = 1.05
GAIN_IN_SHARE_OF_ROUNDS = 0.75


class ResultsDiffer(Exception):
    """Two ways gave different bits, so none of the figures means anything."""


@dataclass
class Timing:
    """The time and page faults of one way per iteration, a figure for each round."""

    name: str
    rounds_ms: list[float] = field(default_factory=list)
    rounds_faults: list[float] = field(default_factory=list)

    @property
    def ms(self) -> float:
        return median(self.rounds_ms)

    @property
    def faults(self) -> float:
        return median(self.rounds_faults)


@dataclass
class Result:
    """One workload, measured in all three ways."""

    name: str
    iterations: int
    planned_iterations: int
    arena_bytes: int
    prefault_ms: float
    plain: Timing
    arena: Timing
    preallocated: Timing
    digest: str = ""
    comparisons: int = 0
    accuracy: float | None = None

    @property
    def timings(self) -> tuple[Timing, Timing, Timing]:
        return self.plain, self.arena, self.preallocated

    def speedup(self, timing: Timing) -> float:
        """Return how many times as fast as plain NumPy."""
        return self.plain.ms / timing.ms

    @property
    def rounds_won(self) -> int:
        """In how many rounds the arena was faster than plain NumPy."""
        pairs = zip(self.plain.rounds_ms, self.arena.rounds_ms, strict=True)
        return sum(arena < plain for plain, arena in pairs)

    @property
    def gain(self) -> bool:
        """True if the arena was faster by more than the noise."""
        return self.speedup(
            self.arena
        ) >= GAIN_AT_LEAST and self.rounds_won >= GAIN_IN_SHARE_OF_ROUNDS * len(
            self.plain.rounds_ms
        )

    @property
    def paid_after(self) -> int | None:
        """The iteration at which the prefault has paid for itself; None: never."""
        if not self.gain:
            return None
        return math.ceil(self.prefault_ms / (self.plain.ms - self.arena.ms))


@contextmanager
def no_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def minor_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _time_block(way: Way, job: Job, iterations: int) -> tuple[float, float]:
    """Return milliseconds and minor faults per iteration."""
    with no_collection():
        faults = minor_faults()
        start = time.perf_counter()
        for _ in range(iterations):
            with way.scope():
                way.step(job)  # what it returns is dropped here, inside the scope
        elapsed = time.perf_counter() - start
        faults = minor_faults() - faults
    return elapsed * MILLISECONDS / iterations, faults / iterations


def _digest(way: Way, job: Job) -> str:
    """Do one more iteration and return a hash of every byte that it computed."""
    with way.scope():
        return _hash(way.step(job))


def _hash(arrays: tuple[Array, ...]) -> str:
    total = hashlib.blake2b(digest_size=16)
    for array in arrays:
        total.update(array.data)
    return total.hexdigest()


def _compare(workload: Workload, jobs: list[tuple[Way, Job]], when: str) -> str:
    """Advance every job by one iteration and return the hash that they share."""
    (first, first_job), *others = jobs
    expected = _digest(first, first_job)
    for way, job in others:
        found = _digest(way, job)
        if found != expected:
            raise ResultsDiffer(
                f"{workload.name}, {when}: the {way.name} way computed other bits than "
                f"{first.name} (hash {found}, not {expected}). No figure is shown, because none "
                "would be valid. This is a bug in arenapy or in NumPy: please report it."
            )
    return expected


def _prefaulted_arena(nbytes: int) -> tuple[Bump, float]:
    """Return an arena and the milliseconds that making one took, the median of a few."""
    taken = []
    for _ in range(PREFAULT_REPEATS):
        arena = None  # unmapped before the next is made
        start = time.perf_counter()
        arena = Bump(nbytes)
        taken.append((time.perf_counter() - start) * MILLISECONDS)
    assert arena is not None
    return arena, median(taken)


def _affordable(job: Job, iterations: int) -> int:
    """Return `iterations`, or fewer where they would make a block of plain NumPy take too long.

    On a busy machine the threads of a BLAS can wait for one another fifty times as long as they
    compute.
    """
    plain = Plain()
    fastest = min(_time_block(plain, job, 1)[0] for _ in range(CALIBRATIONS))
    return max(1, min(iterations, round(MAX_BLOCK_MS / fastest)))


def measure(
    workload: Workload,
    rounds: int,
    iterations: int,
    step: Callable[[], None] = lambda: None,
) -> tuple[Result, Job]:
    """Measure `workload` in three ways.

    Parameters
    ----------
    workload : Workload
        The computation.
    rounds : int
        Rounds, each of one block of iterations a way.
    iterations : int
        Iterations in a block; fewer are done where this many would take too long.
    step : callable, optional
        Called after each block: ``3 * rounds`` times.

    Returns
    -------
    Result, Job
        The figures, and the arena's job after its last iteration.

    Raises
    ------
    ResultsDiffer
        If any two ways differ by one bit in any round.
    OutOfMemory
        If there is no memory for the arena.
    """
    plain, preallocated = Plain(), Preallocated()
    prepared = workload.start()
    _digest(preallocated, prepared)  # makes its arrays, which says what an iteration needs
    needed = sum(-(-array.nbytes // CACHE_LINE) * CACHE_LINE for array in preallocated.arrays)
    bump, prefault_ms = _prefaulted_arena(needed)
    arena = Arena(bump)

    planned, iterations = iterations, _affordable(prepared, iterations)
    result = Result(
        name=workload.name,
        iterations=iterations,
        planned_iterations=planned,
        arena_bytes=bump.capacity,
        prefault_ms=prefault_ms,
        plain=Timing(plain.name),
        arena=Timing(arena.name),
        preallocated=Timing(preallocated.name),
    )
    ways: tuple[Way, ...] = (plain, arena, preallocated)
    jobs = [(way, workload.start()) for way in ways]
    result.digest = _compare(workload, jobs, "before the first round")  # warms up as well

    blocks = list(zip(jobs, result.timings, strict=True))
    shuffle = random.Random(0).shuffle
    for number in range(1, rounds + 1):
        shuffle(blocks)
        for (way, job), timing in blocks:
            ms, faults = _time_block(way, job, iterations)
            timing.rounds_ms.append(ms)
            timing.rounds_faults.append(faults)
            step()
        result.digest = _compare(workload, jobs, f"round {number} of {rounds}")
    result.comparisons = (rounds + 1) * (len(jobs) - 1)
    return result, jobs[1][1]
