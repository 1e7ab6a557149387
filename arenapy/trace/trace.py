"""Traces: what allocators did, in files, and made-up traces of the same form.

`record` has an allocator write its operations to a file while a ``with`` block runs; `load` reads
such a file; `from_torch` takes what torch recorded itself; `synthetic` makes a trace from a seed.
``arenapy replay`` runs them against allocators. The file's form is described in docs/traces.md.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from arenapy.base.text import format_bytes
from arenapy.diagnostics.recorder import Recording
from arenapy.trace.format import EVENT, OPERATIONS, Contents, read, write
from arenapy.trace.synthetic import PHASES, Phase, draw
from arenapy.trace.torch_snapshot import Snapshot, history

if TYPE_CHECKING:
    from arenapy.diagnostics.recorder import Recordable

__all__ = [
    "Summary",
    "Trace",
    "from_torch",
    "load",
    "record",
    "synthetic",
]


def record(allocator: Recordable, path: str | os.PathLike[str], *, sites: int = 0) -> Recording:
    """Record the operations of an allocator while a ``with`` block runs.

    Parameters
    ----------
    allocator : Bump, Slab or Pool
    path : path-like
        The file. An empty file and an earlier trace are overwritten. Any other file is refused.
    sites : int
        The number of callers to record for each allocation, the innermost first, 0 to 64. 16 are
        enough to reach through a library into the program that uses it.

    Returns
    -------
    Recording
        A context manager. ``as`` gives the `Recorder`, whose `flush` writes the events so far.
        Blocks that are live at the start appear only with their frees.

    Raises
    ------
    ValueError
        On entry, if the allocator is already being recorded. At once, if `sites` is out of range.
    OSError
        On entry, if the file cannot be made, exists and is not a trace, or is in use by another
        recording, in this process or another one. On exit, if a write failed, for example because
        the disk is full: the file then has the events before that. (If the block raised an
        exception, that exception is passed on, with a note.)

    Notes
    -----
    An event costs less than 60 ns and 24 bytes. With `sites`, an allocation by a thread that holds
    the GIL costs 0.1 µs (one caller) to 0.3 µs (16 callers) and 24 bytes more. The code objects on
    its stack live as long as the recorder. Only the first 65,536 call stacks are distinguished.

    A thread writes the file once in 10,921 events. If the process is killed, unwritten events are
    lost. A forked child records nothing.

    Thread-safety: any thread may use the allocator during the recording.

    Examples
    --------
    >>> import arenapy, tempfile
    >>> from arenapy import trace
    >>> pool = arenapy.Pool()
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     with trace.record(pool, file.name):
    ...         pool.alloc(100).release()
    ...     trace.load(file.name).summary().operations
    {'alloc': 1, 'free': 1, 'mark': 0, 'reset': 0, 'trim': 0, 'grow': 1, 'keep': 0}
    """
    return Recording(allocator, path, sites)


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a trace.

    Attributes
    ----------
    kind : str
        The kind of the allocator.
    operations : dict of str to int
        The number of each operation.
    threads : int
        The number of threads.
    streams : int
        The number of streams.
    seconds : float
        The time from the beginning to the last event.
    allocated_bytes : int
        Bytes of all allocations together.
    smallest, largest : int
        Bytes of the smallest and the largest allocation.
    complete : bool
        False if the recording did not end normally. The last events may then be missing.
    earlier : int
        Frees of blocks that were allocated before the recording. A replay leaves them out.

    Examples
    --------
    >>> from arenapy import trace
    >>> print(trace.synthetic(seed=1, allocations=100).summary())
    synthetic, seed 1: 100 alloc, 100 free; ...
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
    earlier: int = 0

    def __str__(self) -> str:
        counts = ", ".join(f"{n:,} {name}" for name, n in self.operations.items() if n)
        text = (
            f"{self.kind or 'trace'}: {counts or 'nothing'}; threads: {self.threads}, "
            f"{self.seconds:.3g} s; {format_bytes(self.smallest)} to {format_bytes(self.largest)}, "
            f"{format_bytes(self.allocated_bytes)} in all"
        )
        if self.earlier:
            text += f"; {self.earlier:,} frees of blocks from before"
        return text if self.complete else f"{text}; cut: the last events are missing"


def no_allocation(trace: Trace, purpose: str) -> ValueError:
    """The error for a trace that is of no use."""
    why = "" if trace.complete else (
        ", and it was cut: the program ended before its last events were written"
    )  # fmt: skip
    return ValueError(f"the trace has no allocation{why}; there is nothing to {purpose}")


@dataclass(frozen=True, eq=False, repr=False)
class Trace(Contents):
    """The events of a recording, in their order.

    Attributes
    ----------
    events : ndarray of EVENT
        Fields ``time`` (ns since the beginning), ``address``, ``nbytes``, ``stream`` (0: none),
        ``site`` (an index in `sites`), ``thread`` (numbered from 1; 65535 stands for this and all
        later ones), ``operation`` (a value of `OPERATIONS`). For marks and resets ``address`` is
        the number of the mark.
    kind : str
        Name of the allocator's class, or of the program that made the trace. A file keeps its
        first 31 bytes of UTF-8.
    complete : bool
        False if the recording did not end normally.
    started : int
        Time of the beginning, in ns since 1970.
    process : int
        The process id.
    clock : str
        The clock: ``"tsc"``, ``"cntvct"`` or ``"kernel"``.
    sites : tuple of tuple of Frame
        The callers of allocations, the innermost first. The first entry is empty and means that
        the callers are not known.

    Examples
    --------
    >>> from arenapy import trace
    >>> made = trace.synthetic(seed=1, allocations=100)
    >>> made
    <Trace of synthetic, seed 1: 200 events>
    >>> made.events.dtype.names
    ('time', 'address', 'nbytes', 'stream', 'site', 'thread', 'operation')
    """

    def __len__(self) -> int:
        return len(self.events)

    def __repr__(self) -> str:
        cut = "" if self.complete else ", cut: the last events are missing"
        return f"<Trace of {self.kind or 'events'}: {len(self.events):,} events{cut}>"

    def summary(self) -> Summary:
        """The figures of the trace.

        Returns
        -------
        Summary

        Examples
        --------
        >>> arenapy.trace.synthetic(seed=1, allocations=100).summary().operations["free"]
        100
        """
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
            earlier=self._earlier(),
        )

    def _earlier(self) -> int:
        """Frees at an address where nothing was allocated since the last one, or ever."""
        alloc, free = OPERATIONS["alloc"], OPERATIONS["free"]
        moves = self.events[np.isin(self.events["operation"], [alloc, free])]
        moves = moves[np.argsort(moves["address"], kind="stable")]
        is_free = moves["operation"] == free
        allocated = np.zeros(len(moves), bool)
        allocated[1:] = ~is_free[:-1] & (moves["address"][1:] == moves["address"][:-1])
        return int(np.count_nonzero(is_free & ~allocated))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to a file, for `load` and ``arenapy replay``.

        An earlier trace is replaced when the new one is completely on the disk.

        Parameters
        ----------
        path : path-like
            The file.

        Raises
        ------
        OSError
            If it cannot be written, exists and is not a trace, or is in use by a recording.

        Examples
        --------
        >>> arenapy.trace.synthetic(seed=1, allocations=100).save("made.trace")
        >>> len(arenapy.trace.load("made.trace"))
        200
        """
        write(os.fspath(path), self)


def load(path: str | os.PathLike[str]) -> Trace:
    """Read a trace file.

    Parameters
    ----------
    path : path-like

    Returns
    -------
    Trace
        If the file was cut off because the process was killed or the disk was full, the part that
        exists. ``complete`` is False then.

    Raises
    ------
    ValueError
        If it is not a trace file, has an unknown version, or is damaged.
    OSError
        If it cannot be read.

    Examples
    --------
    >>> from arenapy import trace
    >>> pool = arenapy.Pool()
    >>> with trace.record(pool, "pool.trace"):
    ...     x = pool.empty(1000)
    >>> trace.load("pool.trace").summary().allocated_bytes
    8000
    """
    return read(path, Trace)


def from_torch(snapshot: Snapshot, device: int | None = None) -> Trace:
    """The operations of torch's caching allocator, as torch recorded them.

    Parameters
    ----------
    snapshot : dict or path-like
        The result of ``torch.cuda.memory._snapshot()`` after ``_record_memory_history()``, or the
        file that ``_dump_snapshot()`` writes.
    device : int, optional
        The device. It may be None if there is only one.

    Returns
    -------
    Trace
        Sizes are the requested bytes. A block is freed at torch's ``free_completed``, when the
        streams of `record_stream` are done with it. Blocks from before the history appear only with
        their frees, and ``summary().earlier`` counts them. Streams are their handles, and torch's
        default stream counts as no stream. All events are of thread 1. Times are 0 if torch has
        none. torch's segments become "grow" and "trim". There are sites if torch recorded stacks.

    Raises
    ------
    TypeError, ValueError
        If it is not a snapshot or has no allocation, or if there are several devices and `device`
        is None. A file with more than plain data is refused, and none of its code is run.
    OSError
        If the file cannot be read.

    Notes
    -----
    torch need not be installed. Thread-safety: may be called from any thread.

    Examples
    --------
    >>> from arenapy import trace
    >>> block = {"addr": 0x7F0000000000, "size": 4096, "stream": 0}
    >>> history = [block | {"action": "alloc"}, block | {"action": "free_completed"}]
    >>> snapshot = {"device_traces": [history]}              # as torch.cuda.memory._snapshot() has
    >>> trace.from_torch(snapshot)
    <Trace of torch, device 0: 2 events>
    """
    found = history(snapshot, device)
    events = np.zeros(len(found.operations), EVENT)
    events["time"] = found.columns["time_us"] * np.uint64(1000)
    events["address"] = found.columns["addr"]
    events["nbytes"] = found.columns["size"]
    events["stream"] = found.columns["stream"]
    events["thread"] = 1
    events["operation"] = [OPERATIONS[name] for name in found.operations]
    events["site"] = found.numbers
    return Trace(events, f"torch, device {found.device}", started=found.started, sites=found.sites)


def synthetic(
    seed: int,
    allocations: int = 12_000,
    live_bytes: int = 1 << 30,
    phases: Sequence[Phase] = PHASES,
) -> Trace:
    """A random trace. The same arguments give the same trace.

    Sizes are log-uniform. Lifetimes are exponential, measured in allocations. Both change from
    phase to phase: the mean lifetime keeps half of `live_bytes` live at the mean size of the phase.
    Odd seeds use the phases in reverse order.

    Parameters
    ----------
    seed : int
    allocations : int
        The number of allocations in all phases together.
    live_bytes : int
        The limit of live bytes. Blocks that would end soonest end earlier to keep it.
    phases : sequence of Phase

    Returns
    -------
    Trace
        A trace in which every block is freed.

    Raises
    ------
    ValueError, TypeError
        If an argument is not a number in its range.

    Examples
    --------
    >>> from arenapy import trace
    >>> trace.synthetic(seed=1, allocations=100).summary().operations["alloc"]
    100
    """
    out = draw(seed, allocations, live_bytes, phases)
    events = np.zeros(len(out), EVENT)
    is_alloc, number, nbytes = np.array(out, "u8").T
    events["operation"] = np.where(is_alloc, OPERATIONS["alloc"], OPERATIONS["free"])
    events["address"] = (number + 1) << np.uint64(6)  # distinct: a name and no place
    events["nbytes"] = nbytes
    events["thread"] = 1
    return Trace(events, f"synthetic, seed {seed}"[:31])
