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
    """Record what an allocator does while a ``with`` block runs.

    Parameters
    ----------
    allocator : Bump, Slab or Pool
    path : path-like
        The file. An empty one and an earlier trace are overwritten, anything else is refused.
    sites : int
        How many callers of each allocation to note, the innermost first, 0 to 64; 16 reach
        through a library into the program that uses it.

    Returns
    -------
    Recording
        A context manager; ``as`` gives the `Recorder`, whose `flush` writes what is recorded so
        far. Blocks that are live at the start are known by their frees only.

    Raises
    ------
    ValueError
        On entering, if the allocator is being recorded already. At once, for other `sites`.
    OSError
        On entering, if the file cannot be made, is there and no trace, or is being recorded into
        by somebody else, in this process or another one. On leaving, if a write failed, because the
        disk is full, say: the file then has the events before that. (If the block raised, its
        exception goes on, with a note.)

    Notes
    -----
    An event costs less than 60 ns and 24 bytes. With `sites`, an allocation by a thread that holds
    the GIL costs 0.1 µs (one caller) to 0.3 µs (16) and 24 bytes more; the code on its stack lives
    as long as the recorder. Call stacks beyond the first 65,536 different ones are not told apart.

    The file is written once in 10,921 events by the thread that has the last of them; what a
    process that is killed had not written is lost. A forked child records nothing.

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
    {'alloc': 1, 'free': 1, 'mark': 0, 'reset': 0, 'trim': 0, 'grow': 1, 'keep': 0}
    """
    return Recording(allocator, path, sites)


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
    earlier : int
        Frees of blocks that were allocated before the recording began; a replay leaves them out.

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


@dataclass(frozen=True, eq=False, repr=False)
class Trace(Contents):
    """Events, in the order in which they were recorded.

    Attributes
    ----------
    events : ndarray of EVENT
        Fields ``time`` (ns since the beginning), ``address``, ``nbytes``, ``stream`` (0: none),
        ``site`` (a place in `sites`), ``thread`` (numbered from 1; 65535 stands for all from there
        on), ``operation`` (a value of `OPERATIONS`). For marks and resets ``address`` is the number
        of the mark.
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
    sites : tuple of tuple of Frame
        The callers of allocations, the innermost first. The first one is empty: not known.

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

        An earlier trace is overwritten, once all of the new one is on the disk.

        Parameters
        ----------
        path : path-like
            The file.

        Raises
        ------
        OSError
            If it cannot be written; if the file is there and no trace, or is being recorded into.

        Examples
        --------
        >>> arenapy.trace.synthetic(seed=1, allocations=100).save("made.trace")
        >>> len(arenapy.trace.load("made.trace"))
        200
        """
        write(path, self)


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
        If it is no trace file, or of a version that is not known here, or damaged.
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
    """What torch's caching allocator was asked for, as torch recorded it.

    Parameters
    ----------
    snapshot : dict or path-like
        What ``torch.cuda.memory._snapshot()`` returns after ``_record_memory_history()``, or the
        file that ``_dump_snapshot()`` writes.
    device : int, optional
        Whose history. None: there is only one.

    Returns
    -------
    Trace
        Sizes are bytes as asked for. A block is freed where torch says ``free_completed``: once the
        streams that `record_stream` named are done with it. Blocks from before the history are
        known by their frees only; ``summary().earlier`` counts them. Streams are their handles, and
        torch's default stream is none; all is of thread 1. Times are 0 if torch gives none. Its
        segments come and go as "grow" and "trim". Sites are there if torch recorded stacks.

    Raises
    ------
    TypeError, ValueError
        If it is no snapshot, or has no allocation, or histories of several devices and none chosen.
        A file that holds more than plain data is refused, and nothing in it is run.
    OSError
        If the file cannot be read.

    Notes
    -----
    torch need not be installed. Thread-safety: any thread.

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
