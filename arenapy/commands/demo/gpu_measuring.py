"""How the demo's pipeline is measured: calibration, runs of the three ways, comparison, a trace.

Times of the ways are the host's, from before the first batch is filled until the device has done
the last one. Times of a stage alone, and of what overlaps, are the device's own, by events.

A kernel of the demo's own can be as long as one likes. It is given as many rounds as make it as
long as it takes to fill and copy a batch in the pipeline: a shorter one leaves the device nothing
to do meanwhile, a longer one hides what copies cost. This is also where a pipeline gains most over
doing one thing after the other, which the report says.
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import numpy as np

from arenapy import cuda
from arenapy.buffer.buffer import Buffer

from .gpu_device import Gpu
from .gpu_kernel import checksum
from .gpu_overlap import Notes, Span, common, length
from .gpu_ways import Batches, Pinned, Plain, Pooled, Way, Words, fill
from .measuring import ResultsDiffer, minor_faults, no_collection

__all__ = ["Alone", "Pipeline", "Traced", "WayTiming", "measure", "rounds_for"]

MILLISECONDS = 1e3
WARM_UP = 8  # batches
PACE = 48  # batches from which the pace of filling and copying is taken,
PACE_RUNS = 7  # so often: one run alone was seen to be 1.5x another
REPEATS = 15  # of what is timed alone
TRACED = 100  # batches, at most, whose copies and kernels are timed one by one
PINNED_SHARE = 10  # pinning for each batch is slow: a tenth of the batches do
FEW_ROUNDS, MANY_ROUNDS = 256, 1024  # of the kernel, whose time is a straight line in them
RISE_SECONDS = 0.2  # of kernels, in which a device that was idle raises its clock
MAX_ROUNDS = 1 << 14


@dataclass
class WayTiming:
    """The times and page faults of one way, a figure for each round."""

    name: str
    batches: int
    seconds: list[float] = field(default_factory=list)
    faults: list[int] = field(default_factory=list)

    @property
    def median_seconds(self) -> float:
        return median(self.seconds)

    @property
    def ms(self) -> float:
        """Milliseconds a batch."""
        return self.median_seconds * MILLISECONDS / self.batches

    @property
    def faults_a_batch(self) -> float:
        return median(self.faults) / self.batches


@dataclass(frozen=True)
class Alone:
    """Milliseconds a batch of each stage, with nothing beside it, from and in pinned memory."""

    fill: float
    copy: float
    kernel: float

    @property
    def stages(self) -> dict[str, float]:
        return {"filling": self.fill, "copying": self.copy, "computing": self.kernel}

    @property
    def total(self) -> float:
        """One after the other."""
        return self.fill + self.copy + self.kernel

    @property
    def longest(self) -> str:
        """The stage that no pipeline can be faster than."""
        return max(self.stages, key=self.stages.__getitem__)


@dataclass(frozen=True)
class Traced:
    """When the device was at what, in milliseconds since the start of a run of its own."""

    copies: Sequence[Span]
    kernels: Sequence[Span]

    @property
    def copying(self) -> float:
        return length(self.copies)

    @property
    def computing(self) -> float:
        return length(self.kernels)

    @property
    def both(self) -> float:
        return common(self.copies, self.kernels)

    @property
    def share(self) -> float:
        """The part of the copying during which a kernel ran."""
        return self.both / self.copying if self.copying > 0 else 0.0


@dataclass
class Pipeline:
    """All that one run of the demo measured."""

    device: str
    driver_version: int
    batches: int
    nbytes: int
    runs: int
    rounds: int
    pace_ms: float
    setup_ms: float
    alone: Alone
    plain: WayTiming
    pinned: WayTiming
    pooled: WayTiming
    traced: Traced
    checked: int = 0
    compared: int = 0

    @property
    def timings(self) -> tuple[WayTiming, WayTiming, WayTiming]:
        return self.plain, self.pinned, self.pooled

    def speedup(self, timing: WayTiming) -> float:
        """Return how many times as fast as plain, by batch."""
        return self.plain.ms / timing.ms

    @property
    def paid_after(self) -> int | None:
        """The batch after which setting up has paid for itself; None: never."""
        saved = self.plain.ms - self.pooled.ms
        return max(1, math.ceil(self.setup_ms / saved)) if saved > 0 else None


def rounds_for(wanted: float, few: tuple[int, float], many: tuple[int, float]) -> int:
    """Return the rounds with which a kernel takes `wanted`, from (rounds, time) of two others."""
    slope = (many[1] - few[1]) / (many[0] - few[0])
    if slope <= 0:  # noise: nothing can be told from it
        return many[0]
    return min(max(1, round(few[0] + (wanted - few[1]) / slope)), MAX_ROUNDS)


class _Measurement:
    """The state that the steps of a measurement share: ways, batches, expected checksums."""

    def __init__(self, gpu: Gpu, count: int, nbytes: int) -> None:
        self.gpu = gpu
        self.count = count
        self.batches = Batches(gpu, nbytes, max(count, PACE))
        start = time.perf_counter()
        self.pooled = Pooled(nbytes)
        self.setup_ms = (time.perf_counter() - start) * MILLISECONDS
        self.expected: Words | None = None
        self.compared = 0

    def run(self, way: Way, count: int) -> tuple[float, int]:
        """Return seconds and page faults of the first `count` batches."""
        self.batches.forget()
        self.gpu.synchronize()
        with no_collection():
            faults = minor_faults()
            start = time.perf_counter()
            way.run(self.batches, range(count))
            self.gpu.synchronize()
            elapsed = time.perf_counter() - start
            faults = minor_faults() - faults
        return elapsed, faults

    def calibrate(self) -> tuple[float, Alone]:
        """Choose the rounds; return the pace of filling and copying, and each stage alone."""
        self.batches.rounds = 0
        self.run(self.pooled, WARM_UP)
        paces = [self.run(self.pooled, PACE)[0] for _ in range(PACE_RUNS)]
        pace = median(paces) * MILLISECONDS / PACE
        items = self.pooled.items()
        filling = median(self._fill(items, number) for number in range(REPEATS))
        block = self.pooled.pool.alloc(self.batches.nbytes)
        copying = self._timed(
            self.pooled.copying, lambda: block.copy_from(items[0], stream=self.pooled.copying)
        )
        self.gpu.synchronize()
        end = time.perf_counter() + RISE_SECONDS
        while time.perf_counter() < end:
            self._kernel(block, MANY_ROUNDS)
        few, many = (self._kernel(block, rounds) for rounds in (FEW_ROUNDS, MANY_ROUNDS))
        rounds = rounds_for(pace, (FEW_ROUNDS, few), (MANY_ROUNDS, many))
        return pace, Alone(filling, copying, self._kernel(block, rounds))

    def _fill(self, items: Sequence[Buffer], number: int) -> float:
        words = items[number % len(items)].array(dtype=np.uint32)
        start = time.perf_counter()
        fill(words, number)
        return (time.perf_counter() - start) * MILLISECONDS

    def _kernel(self, block: Buffer, rounds: int) -> float:
        self.batches.rounds = rounds
        computing = self.pooled.computing
        return self._timed(computing, lambda: self.batches.launch(computing, block.address, 0))

    def _timed(self, stream: cuda.Stream, work: Callable[[], object]) -> float:
        """Return the milliseconds that work takes the stream."""
        events = [self.gpu.record(stream)]
        for _ in range(REPEATS + 1):
            work()
            events.append(self.gpu.record(stream))
        self.gpu.synchronize()
        pairs = pairwise(events[1:])  # without the first, which warms up
        return median(self.gpu.milliseconds(start, end) for start, end in pairs)

    def compare(self, name: str, count: int) -> None:
        """Compare the checksums of the last run with those of the first one."""
        found = self.batches.sums()[:count]
        if self.expected is None:
            self.expected = found
            return
        differ = np.flatnonzero(found != self.expected[:count])
        if differ.size:
            first = int(differ[0])
            raise ResultsDiffer(
                f"{name}: {differ.size} of {count} batches have another checksum than with plain, "
                f"first batch {first} ({found[first]:#x}, not {self.expected[first]:#x}). No "
                "figure is shown, because none would be valid. This is a bug in arenapy or in "
                "the driver: please report it."
            )
        self.compared += count

    def check(self, numbers: Sequence[int]) -> None:
        """Compute these batches by NumPy, and compare their checksums."""
        assert self.expected is not None
        words = np.empty(self.batches.nbytes // np.uint32().nbytes, np.uint32)
        for number in numbers:
            fill(words, number)
            right = checksum(words, self.batches.rounds)
            if right != self.expected[number]:
                raise ResultsDiffer(
                    f"batch {number}: the device has the checksum {self.expected[number]:#x}, and "
                    f"NumPy {right:#x}. No figure is shown, because none would be valid."
                )

    def trace(self, count: int) -> Traced:
        """Run once more, with events around each copy and each kernel."""
        self.batches.forget()
        self.gpu.synchronize()
        notes = Notes(self.gpu, self.pooled.copying)
        self.pooled.run(self.batches, range(count), notes.noted)
        self.gpu.synchronize()
        self.compare("arenapy, traced", count)
        return Traced(notes.spans("copy"), notes.spans("kernel"))


def measure(
    gpu: Gpu,
    device: str,
    count: int,
    nbytes: int,
    runs: int,
    step: Callable[[str], None] = lambda what: None,
) -> Pipeline:
    """Measure the pipeline in three ways.

    Parameters
    ----------
    gpu : Gpu
        The device, in use.
    device : str
        Its name.
    count : int
        Batches.
    nbytes : int
        Bytes of each, a multiple of `ROW_BYTES`.
    runs : int
        Runs of each way, in shuffled order; the median counts.
    step : callable, optional
        Called before each step with what it is: ``3 * runs + 3`` times.

    Returns
    -------
    Pipeline

    Raises
    ------
    ResultsDiffer
        If a checksum differs by one bit from another way's, or from NumPy's.
    OutOfMemory, Unavailable, CudaError
        As by the sources of `arenapy.cuda`.
    """
    step("calibrating")
    this = _Measurement(gpu, count, nbytes)
    pace, alone = this.calibrate()
    plain, pinned = Plain(), Pinned()
    few = max(1, count // PINNED_SHARE)
    ways: list[tuple[Way, WayTiming]] = [
        (plain, WayTiming(plain.name, count)),
        (pinned, WayTiming(pinned.name, few)),
        (this.pooled, WayTiming(this.pooled.name, count)),
    ]
    timings = [timing for _, timing in ways]
    this.run(plain, count=min(count, WARM_UP))
    order, shuffle = list(ways), random.Random(0).shuffle
    for number in range(runs):
        if number:
            shuffle(order)
        for way, timing in order:  # plain is the first of all, with which the others are compared
            step(way.name)
            seconds, faults = this.run(way, timing.batches)
            timing.seconds.append(seconds)
            timing.faults.append(faults)
            this.compare(f"{way.name}, run {number + 1} of {runs}", timing.batches)
    step("tracing")
    traced = this.trace(min(count, TRACED))
    step("checking")
    checked = sorted({0, count // 2, count - 1})
    this.check(checked)
    return Pipeline(
        device=device,
        driver_version=gpu.driver_version,
        batches=count,
        nbytes=nbytes,
        runs=runs,
        rounds=this.batches.rounds,
        pace_ms=pace,
        setup_ms=this.setup_ms,
        alone=alone,
        plain=timings[0],
        pinned=timings[1],
        pooled=timings[2],
        traced=traced,
        checked=len(checked),
        compared=this.compared,
    )
