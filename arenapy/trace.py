"""Traces: what allocators did, in files, and made-up traces of the same form.

`record` has an allocator write its operations to a file while a ``with`` block runs; `load` reads
such a file; `synthetic` makes one from a seed. ``arenapy replay`` runs them against allocators.
The form of the file is described in docs/traces.md.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from arenapy.memory_info import format_bytes
from arenapy.recorder import Recorder

__all__ = ["EVENT", "OPERATIONS", "Recording", "Summary", "Trace", "load", "record", "synthetic"]

#: Operation codes, by name.
OPERATIONS = {"alloc": 1, "free": 2, "mark": 3, "reset": 4, "trim": 5}
CLOCK, STREAM = 0, 6  # of records that are no operations

#: One event: times are ns since the recording began; threads are numbered from 1.
EVENT = np.dtype(
    [
        ("time", "u8"),
        ("address", "u8"),
        ("nbytes", "u8"),
        ("stream", "u8"),
        ("thread", "u2"),
        ("operation", "u1"),
    ]
)

MAGIC = b"arenatrc"
VERSION = 1
CLOCKS = ("kernel", "tsc", "cntvct")
HEADER = np.dtype(
    [
        ("magic", "V8"),
        ("version", "<u4"),
        ("header_nbytes", "<u4"),
        ("event_nbytes", "<u4"),
        ("clock", "<u4"),
        ("started", "<i8"),
        ("ticks", "<u8"),
        ("monotonic", "<u8"),
        ("events", "<u8"),
        ("complete", "<u4"),
        ("process", "<u4"),
        ("kind", "S32"),
        ("reserved", "V32"),
    ]
)
RECORD = np.dtype([("time", "<u8"), ("block", "<u8"), ("size", "<u8")])
TIME_BITS = 56
SIZE_BITS = 48


class Recordable(Protocol):
    """What `record` asks of an allocator."""

    def _record(self, recorder: Recorder | None, /) -> None:
        """Record into this from now on; None: no longer. ValueError if recording already."""


class Recording:
    """An allocator being recorded: what `record` returns.

    Notes
    -----
    Thread-safety: any thread may use the allocator meanwhile.
    """

    def __init__(self, allocator: Recordable, path: str | os.PathLike[str]) -> None:
        self._allocator = allocator
        self._recorder = Recorder(path, type(allocator).__name__)

    def __enter__(self) -> Recorder:
        # The file is made last: an allocator that is being recorded already, perhaps into this very
        # file, refuses first.
        self._allocator._record(self._recorder)
        try:
            self._recorder.start()
        except BaseException:
            self._allocator._record(None)
            raise
        return self._recorder

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._allocator._record(None)
        try:
            self._recorder.stop()
        except OSError as failure:
            if error is None:
                raise
            error.add_note(str(failure))


def record(allocator: Recordable, path: str | os.PathLike[str]) -> Recording:
    """Record what an allocator does while a ``with`` block runs.

    Parameters
    ----------
    allocator : Bump, Slab or Pool
    path : path-like
        The file, overwritten if there is one.

    Returns
    -------
    Recording
        A context manager; ``as`` gives the `Recorder`, whose `flush` writes what is recorded so
        far. Blocks that are live at the start are known by their frees only.

    Raises
    ------
    ValueError
        On entering, if the allocator is being recorded already.
    OSError
        On entering, if the file cannot be made; on leaving, if a write failed, because the disk
        is full, say. The file then has the events before that. (If the block raised, its exception
        goes on, with a note.)

    Notes
    -----
    An event costs less than 60 ns and 24 bytes. The file is written once in 10,921 events by the
    thread that has the last of them; what a process that is killed had not written is lost.
    A forked child records nothing.

    Thread-safety: any thread.

    Examples
    --------
    >>> import arenapy, tempfile
    >>> from arenapy import trace
    >>> pool = arenapy.Pool()
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     with trace.record(pool, file.name):
    ...         pool.alloc(100).release()
    ...     trace.load(file.name).summary().operations
    {'alloc': 1, 'free': 1, 'mark': 0, 'reset': 0, 'trim': 0}
    """
    return Recording(allocator, path)


@dataclass(frozen=True, slots=True)
class Summary:
    """What a trace holds, in figures.

    Attributes
    ----------
    kind : str
        Of the allocator.
    operations : dict of str to int
        How many of each there are.
    threads : int
        How many took part.
    streams : int
        How many there were, without none.
    seconds : float
        From the beginning to the last event.
    allocated_bytes : int
        Of all allocations together.
    smallest, largest : int
        Bytes of the smallest and the largest allocation.
    complete : bool
        False if the recording did not end in good order: the last events may be missing.
    """

    kind: str
    operations: dict[str, int]
    threads: int
    streams: int
    seconds: float
    allocated_bytes: int
    smallest: int
    largest: int
    complete: bool

    def __str__(self) -> str:
        counts = ", ".join(f"{n:,} {name}" for name, n in self.operations.items() if n)
        text = (
            f"{self.kind or 'trace'}: {counts or 'nothing'}; threads: {self.threads}, "
            f"{self.seconds:.3g} s; {format_bytes(self.smallest)} to {format_bytes(self.largest)}, "
            f"{format_bytes(self.allocated_bytes)} in all"
        )
        return text if self.complete else f"{text}; cut: the last events are missing"


@dataclass(frozen=True, eq=False)
class Trace:
    """Events, in the order in which they were recorded.

    Attributes
    ----------
    events : ndarray of EVENT
        Fields ``time`` (ns since the beginning), ``address``, ``nbytes``, ``stream`` (0: none),
        ``thread`` (numbered from 1; 65535 stands for all from there on), ``operation`` (a value of
        `OPERATIONS`). For marks and resets ``address`` is the number of the mark.
    kind : str
        Name of the allocator's class, or of what made the trace.
    complete : bool
        False if the recording did not end in good order.
    started : int
        ns since 1970.
    process : int
        Its id.
    clock : str
        What told the time: ``"tsc"``, ``"cntvct"`` or ``"kernel"``.
    """

    events: npt.NDArray[Any]
    kind: str = ""
    complete: bool = True
    started: int = 0
    process: int = 0
    clock: str = "kernel"

    def __len__(self) -> int:
        return len(self.events)

    def summary(self) -> Summary:
        """The figures of the trace."""
        events = self.events
        sizes = events["nbytes"][events["operation"] == OPERATIONS["alloc"]]
        counts = np.bincount(events["operation"], minlength=max(OPERATIONS.values()) + 1)
        return Summary(
            kind=self.kind,
            operations={name: int(counts[code]) for name, code in OPERATIONS.items()},
            threads=len(np.unique(events["thread"])),
            streams=len(np.unique(events["stream"][events["stream"] != 0])),
            seconds=float(events["time"][-1]) * 1e-9 if len(events) else 0.0,
            allocated_bytes=sum(map(int, sizes)),
            smallest=int(sizes.min(initial=np.iinfo("u8").max)) if len(sizes) else 0,
            largest=int(sizes.max(initial=0)),
            complete=self.complete,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to a file, for `load` and ``arenapy replay``.

        Raises
        ------
        OSError
            If it cannot be written.
        """
        events = self.events
        places = 1 + (events["stream"] != 0)
        ends = np.cumsum(places)
        records = np.zeros(int(ends[-1]) if len(ends) else 0, RECORD)
        high = np.uint64(TIME_BITS), np.uint64(SIZE_BITS)
        thread = events["thread"].astype("u8") << high[1]
        own = ends - 1
        records["time"][own] = events["time"] | events["operation"].astype("u8") << high[0]
        records["block"][own] = events["address"]
        records["size"][own] = events["nbytes"] | thread
        some = places == 2
        before = own[some] - 1
        records["time"][before] = events["time"][some] | np.uint64(STREAM << TIME_BITS)
        records["block"][before] = events["stream"][some]
        records["size"][before] = thread[some]
        header = np.zeros(1, HEADER)
        header["magic"] = np.void(MAGIC)
        header["version"] = VERSION
        header["header_nbytes"] = HEADER.itemsize
        header["event_nbytes"] = RECORD.itemsize
        header["started"] = self.started
        header["events"] = len(records)
        header["complete"] = self.complete
        header["process"] = self.process
        header["kind"] = self.kind.encode()
        with open(path, "wb") as file:
            file.write(header.tobytes())
            records.tofile(file)


def load(path: str | os.PathLike[str]) -> Trace:
    """Read a trace file.

    Parameters
    ----------
    path : path-like

    Returns
    -------
    Trace
        Of a file that was cut, because the process was killed or the disk was full, what there
        is, and ``complete`` is False.

    Raises
    ------
    ValueError
        If it is no trace file, or of a version that is not known here.
    OSError
        If it cannot be read.
    """
    name = os.fspath(path)
    with open(path, "rb") as file:
        text = file.read(HEADER.itemsize)
        if text[: len(MAGIC)] != MAGIC or len(text) < HEADER.itemsize:
            raise ValueError(f"{name!r} is no trace: it does not begin as arenapy.trace files do")
        header = np.frombuffer(text, HEADER)[0]
        if header["version"] != VERSION:
            raise ValueError(
                f"{name!r} is a trace of version {header['version']}, and this arenapy reads "
                f"version {VERSION}: use the arenapy that recorded it, or a newer one"
            )
        found = os.fstat(file.fileno()).st_size - HEADER.itemsize
        records = np.fromfile(file, RECORD, max(0, found) // RECORD.itemsize)
    complete = bool(header["complete"] and len(records) == header["events"])
    operation = (records["time"] >> np.uint64(TIME_BITS)).astype("u1")
    if len(records) and operation.max() > STREAM:
        raise ValueError(f"{name!r} is damaged: operation {operation.max()} is not known")
    is_event = (operation != CLOCK) & (operation != STREAM)
    kept = records[is_event]
    events = np.empty(len(kept), EVENT)
    events["time"] = _nanoseconds(header, records, operation, kept["time"])
    events["address"] = kept["block"]
    events["nbytes"] = kept["size"] & np.uint64((1 << SIZE_BITS) - 1)
    events["thread"] = kept["size"] >> np.uint64(SIZE_BITS)
    events["operation"] = operation[is_event]
    has_stream = np.zeros(len(records), bool)
    has_stream[1:] = operation[:-1] == STREAM
    events["stream"] = np.where(has_stream, np.roll(records["block"], 1), 0)[is_event]
    return Trace(
        events,
        header["kind"].decode(errors="replace"),
        complete,
        int(header["started"]),
        int(header["process"]),
        CLOCKS[header["clock"]],
    )


def _nanoseconds(
    header: Any, records: npt.NDArray[Any], operation: npt.NDArray[Any], times: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Ticks as ns since the beginning: between two clock records the clock runs evenly."""
    ticks = times & np.uint64((1 << TIME_BITS) - 1)
    if CLOCKS[header["clock"]] == "kernel":
        return ticks
    clocks = records[operation == CLOCK]
    at = np.append(0, clocks["time"].astype("i8"))
    ns = np.append(0, (clocks["block"] - header["monotonic"]).astype("i8"))
    found: npt.NDArray[Any] = np.interp(ticks.astype("i8"), at, ns).astype("u8")
    return found


@dataclass(frozen=True, slots=True)
class Phase:
    """Part of a synthetic trace: sizes log-uniform between two bounds, in bytes."""

    smallest: int
    largest: int

    @property
    def mean(self) -> float:
        """Bytes of the average block."""
        if self.smallest == self.largest:
            return float(self.largest)
        return (self.largest - self.smallest) / float(np.log(self.largest / self.smallest))


#: Half of the allocations of `synthetic` each.
PHASES = (Phase(64, 64 << 20), Phase(64, 2 << 20))


def synthetic(
    seed: int,
    allocations: int = 12_000,
    live_bytes: int = 1 << 30,
    phases: Sequence[Phase] = PHASES,
) -> Trace:
    """A random trace, the same for the same arguments.

    Sizes are log-uniform, lifetimes exponential, in allocations. From phase to phase both change:
    the mean lifetime is what keeps half of `live_bytes` alive at the phase's mean size. Odd seeds
    take the phases in reverse order.

    Parameters
    ----------
    seed : int
    allocations : int
        How many, all phases together.
    live_bytes : int
        There are never more bytes live: blocks that would end soonest end earlier.
    phases : sequence of Phase

    Returns
    -------
    Trace
        Every block in it is freed.
    """
    if not phases or allocations < len(phases):
        raise ValueError(f"{allocations} allocations in {len(phases)} phases: nothing to do")
    if live_bytes < max(phase.largest for phase in phases):
        raise ValueError(f"live_bytes={live_bytes} has no room for the largest block of the phases")
    random = np.random.default_rng(seed)
    ordered = list(phases)[:: -1 if seed % 2 else 1]
    bounds = np.linspace(0, allocations, len(ordered) + 1).astype(int)
    out: list[tuple[int, int, int]] = []
    ends: list[tuple[float, int, int]] = []  # (when, number, nbytes) of live blocks
    live = 0
    for phase, begin, end in zip(ordered, bounds, bounds[1:], strict=False):
        low, high = np.log([phase.smallest, phase.largest])
        sizes = np.exp(random.uniform(low, high, end - begin)).astype("u8")
        lifetimes = random.exponential(live_bytes / 2 / phase.mean, end - begin)
        for number, nbytes, lifetime in zip(
            range(begin, end), sizes.tolist(), lifetimes.tolist(), strict=True
        ):
            while ends and (ends[0][0] <= number or live + nbytes > live_bytes):
                _, ended, size = heapq.heappop(ends)
                live -= size
                out.append((OPERATIONS["free"], ended, size))
            heapq.heappush(ends, (number + lifetime, number, nbytes))
            live += nbytes
            out.append((OPERATIONS["alloc"], number, nbytes))
    while ends:
        _, ended, size = heapq.heappop(ends)
        out.append((OPERATIONS["free"], ended, size))
    events = np.zeros(len(out), EVENT)
    operation, number, nbytes = np.array(out, "u8").T
    events["operation"] = operation
    events["address"] = (number + 1) << np.uint64(6)  # distinct: a name and no place
    events["nbytes"] = nbytes
    events["thread"] = 1
    return Trace(events, f"synthetic, seed {seed}"[:31])
