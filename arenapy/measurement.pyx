# cython: language_level=3, freethreading_compatible=True
"""The cost of a block of code: page faults, bytes, allocations, peak.

What lives here: the differences between the beginning and the end of a block. What does not: the
counting. An allocator counts from when it is made (`_tally`), and keeps one peak, which can be
exchanged (`_exchange_peak`): no allocation is slower because somebody measures.

That one peak has to serve blocks that nest or overlap, in any number of threads. So each allocator
that is being measured has a `_Watch`: a list of peaks, the first one the allocator's own from
before, then one for each measurement that runs, the newest last. The allocator shows the
newest one. Whenever it is read, all of them are raised: the newest began last, so all it has seen
is in everybody's block.

It is compiled so that a signal's exception comes before a block is entered or left, or after that,
and not in the middle: see numpy_handler/contexts.
"""

from __future__ import annotations

from posix.unistd cimport getpid

from arenapy.base.identity cimport id_of

import os
import threading
from collections.abc import Sequence
from time import perf_counter
from types import TracebackType
from typing import NamedTuple, Self

from arenapy.linux import vm
from arenapy.allocator.allocator import Allocator, call_at_end, call_at_reset, live_allocators
from arenapy.base.text import format_bytes, html_table

cdef extern from "Python.h":
    int PyGC_Disable()
    int PyGC_Enable()

__all__ = ["Measurement", "measure"]


class _Figures(NamedTuple):
    seconds: float
    faults: int
    allocations: int
    bytes: int
    peak: int


class Measurement:
    """The figures of a block of code, from :func:`measure`, up to now or at its end.

    Attributes
    ----------
    faults : int
        Minor page faults of the process, of all its threads.
    seconds : float
        Elapsed time.
    allocations : int
        Blocks that the allocators handed out.
    bytes : int
        Bytes of these blocks. A Pool and a Slab include their padding.
    peak : int
        The sum of the allocators' peaks of live bytes during the block; of a Bump, of used bytes,
        which include padding. Bytes that were live at its beginning count, too. The peaks need not
        be at the same moment.

    Notes
    -----
    A copy, or a pickle, has the figures so far, and they are final.

    Thread-safety: may be read from any thread.

    Examples
    --------
    >>> import arenapy
    >>> pool = arenapy.Pool()
    >>> with arenapy.measure(pool) as m:
    ...     block = pool.alloc(1000)
    >>> m.allocations, m.bytes
    (1, 1024)
    """

    __slots__ = ("_allocators", "_at_first", "_began", "_faults", "_figures", "_gone", "_thread")

    def __init__(self, allocators: tuple[Allocator, ...] | None) -> None:
        self._allocators = allocators  # None: all there are
        self._at_first: dict[int, tuple[int, int]] = {}  # allocations and bytes, by id
        self._gone = (0, 0, 0)  # allocations, bytes and peaks of those that ended in the block
        self._began: float | None = None
        self._faults = 0
        self._figures: _Figures | None = None  # final
        self._thread = 0  # that began it

    def __enter__(self) -> Self:
        """Begin."""
        with _Section(must=False):
            if self._began is not None:
                raise RuntimeError(f"{self!r} has already begun; call measure() for another one")
            self._thread = threading.get_ident()
            # First: allocators that a collection of garbage makes meanwhile are younger than it.
            _running.append(self)
            try:
                measured = self._measured()
                for allocator in measured:
                    _watch(allocator, self).begin(allocator, self)
                    self._at_first[id_of(allocator)] = allocator._tally()[:2]
            except BaseException:
                self._forget()
                raise
            self._faults = vm.minor_faults()
            self._began = perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End; an exception passes."""
        with _Section(must=True):
            if self._figures is not None:    # in a forked child, which has ended it
                return
            self._must_have_begun()
            measured = self._measured()
            _given = self._allocators        # an end of one would run other code
            try:
                self._figures = self._now(measured)
            finally:
                self._forget()
                self._allocators = ()  # whoever keeps the figures does not keep the memory

    @property
    def faults(self) -> int:
        """Minor page faults of the process, of all its threads."""
        return self._read().faults

    @property
    def seconds(self) -> float:
        """Elapsed time."""
        return self._read().seconds

    @property
    def allocations(self) -> int:
        """Blocks that the allocators handed out."""
        return self._read().allocations

    @property
    def bytes(self) -> int:
        """Bytes of the blocks that the allocators handed out."""
        return self._read().bytes

    @property
    def peak(self) -> int:
        """The sum of the allocators' peaks of live bytes."""
        return self._read().peak

    def __reduce__(self) -> tuple[object, _Figures]:
        """Make a copy, or a pickle, of the figures so far."""
        return _ended, self._read()

    def __repr__(self) -> str:
        """Say all figures, and whether they are final."""
        if self._began is None:
            return "<Measurement that has not begun>"
        seconds, faults, allocations, nbytes, peak = self._read()
        return (
            f"<Measurement {seconds:.6f} s, {faults:,} faults, {allocations:,} allocations of "
            f"{format_bytes(nbytes)}, peak {format_bytes(peak)}"
            f"{', running' if self._figures is None else ''}>"
        )

    def _repr_html_(self) -> str:
        """Lay out a table for a notebook."""
        if self._began is None:
            return html_table("Measurement", [("has not begun", "")])
        seconds, faults, allocations, nbytes, peak = self._read()
        return html_table(
            "Measurement" if self._figures else "Measurement, running",
            [
                ("seconds", f"{seconds:.6f}"),
                ("page faults", f"{faults:,}"),
                ("allocations", f"{allocations:,}"),
                ("bytes allocated", format_bytes(nbytes)),
                ("peak", format_bytes(peak)),
            ],
        )

    def _measured(self) -> Sequence[Allocator]:
        return live_allocators() if self._allocators is None else self._allocators

    def _must_have_begun(self) -> None:
        if self._began is None:
            raise RuntimeError("nothing is measured yet; write `with arenapy.measure() as m:`")

    def _read(self) -> _Figures:
        with _Section(must=False):
            self._must_have_begun()
            measured = self._measured()
            return self._figures or self._now(measured)

    def _now(self, measured: Sequence[Allocator]) -> _Figures:
        seconds = perf_counter() - (self._began or 0)
        faults = vm.minor_faults() - self._faults
        allocations = nbytes = peak = 0
        for allocator in measured:
            watch = _watch(allocator)
            watch.read(allocator)
            count, size = _since(allocator, self._at_first.get(id_of(allocator)))
            allocations += count
            nbytes += size
            peak += watch.peaks[self]
        gone = self._gone  # only now: one may have gone meanwhile
        # The class of a NamedTuple makes one in Python code, where a section would be left.
        return tuple.__new__(_Figures, (
            seconds, faults, allocations + gone[0], nbytes + gone[1], peak + gone[2]))

    def _forget(self) -> None:
        """Measure no longer, and give the allocators back the peaks that they show."""
        if self in _running:
            _running.remove(self)
        for allocator in self._measured():   # also those that were made since the figures were read
            watch = _watches.get(id_of(allocator))
            if watch is not None:
                watch.end(allocator, self)


def _ended(*figures: float) -> Measurement:
    """A measurement with these figures."""
    made = Measurement(())
    made._began = 0.0
    made._figures = _Figures(*figures)
    return made


def measure(*allocators: Allocator) -> Measurement:
    """Measure what a block of code costs: page faults, bytes, allocations, peak, time.

    Parameters
    ----------
    *allocators : Allocator
        The allocators to measure. The default is all allocators of the process together,
        including those that are made or end in the block.

    Returns
    -------
    Measurement
        A context manager for one ``with`` statement. Its figures may be read in the block and
        after it. Exceptions are passed on. Until the block ends, it keeps the `allocators` alive.

    Raises
    ------
    TypeError
        If an argument is not an allocator.

    Notes
    -----
    Blocks may nest and overlap. While a block runs, the peak of an allocator itself
    (``Bump.peak``, ``stats().peak_bytes``) is that of the newest block. After the last block it is
    the overall peak, even if ``reset_peak()`` was called in a block.

    Thread-safety: may be used from any thread. It counts the allocations of all threads. To begin
    and to end, it turns Python's garbage collector off for a moment: on free-threaded builds, call
    ``gc.disable()`` before other threads measure.

    Examples
    --------
    >>> import arenapy
    >>> arena = arenapy.Bump(1 << 20)
    >>> with arenapy.measure(arena) as m:
    ...     for _ in range(3):
    ...         with arena.scope():
    ...             _ = arena.alloc(1000)
    >>> m.allocations, m.bytes, m.peak
    (3, 3000, 1000)
    """
    for allocator in allocators:
        if not isinstance(allocator, Allocator):
            raise TypeError(
                f"{allocator!r} is not an allocator; give a Bump, Slab or Pool "
                "(of a PerThread what its get() returns), or nothing for all of them"
            )
    unique = {id_of(allocator): allocator for allocator in allocators}
    return Measurement(tuple(unique.values()) or None)


_lock = threading.RLock()  # of `_process`; recursive for the end of an allocator
_process = os.getpid()
_running: list[Measurement] = []  # oldest first
_watches: dict[int, _Watch] = {}  # by id of the allocator
_faults_at_fork = 0
_collects_after = False  # a section has turned the collector off


def _begin_fork() -> None:
    global _faults_at_fork
    _faults_at_fork = vm.minor_faults()


def _begin_child() -> None:
    """End what other threads measured: the child does not have them. Its faults count from 0."""
    me = threading.get_ident()
    for one in _running.copy():
        one._faults -= _faults_at_fork
        if one._thread != me:
            one.__exit__(None, None, None)


os.register_at_fork(before=_begin_fork, after_in_child=_begin_child)


class _Section:
    """With the lock, and without a collection of garbage: finalizers may wait for locks whose
    owners wait for this one. Nothing in a section lets go of the GIL, so only free-threaded builds
    ever wait. `must`: a signal's exception that ends the wait is raised at the end.
    """

    __slots__ = ("collects", "interrupted", "lock", "must")

    def __init__(self, must: bool) -> None:
        # The lock is not held over a fork, which waits for locks of others: their owners may be in
        # a finalizer that waits for this one. So a child has another lock, also before its hooks
        # run: the locals of threads that it does not have end earlier.
        global _lock, _process, _collects_after
        if _process != getpid():
            _lock, _process = threading.RLock(), getpid()
            if _collects_after:              # another thread's, of a free-threaded build
                _collects_after = False
                PyGC_Enable()
        self.must, self.lock, self.interrupted = must, _lock, None

    def __enter__(self) -> None:
        global _collects_after
        while True:
            try:
                self.lock.acquire()
                break
            except BaseException as error:
                if not self.must:
                    raise
                self.interrupted = error
        self.collects = PyGC_Disable()
        _collects_after = _collects_after or self.collects

    def __exit__(self, *_error: object) -> None:
        global _collects_after
        if self.collects:
            _collects_after = False
            PyGC_Enable()
        self.lock.release()
        if self.interrupted is not None:
            raise self.interrupted


class _Watch:
    """The peaks of one allocator by who measures it, the newest last; None: its own."""

    __slots__ = ("peaks",)

    def __init__(self) -> None:
        self.peaks: dict[Measurement | None, int] = {None: 0}

    def begin(self, allocator: Allocator, measurement: Measurement) -> None:
        self._raise(allocator._exchange_peak(None))
        self.peaks.pop(measurement, None)
        self.peaks[measurement] = 0          # the newest is the last

    def read(self, allocator: Allocator) -> None:
        """Bring all peaks up to date; the allocator goes on showing the newest."""
        self._raise(allocator._exchange_peak(None))
        # Others may allocate between two lines.
        while (seen := allocator._exchange_peak(shown := self._newest())) > shown:
            self._raise(seen)

    def end(self, allocator: Allocator, measurement: Measurement) -> None:
        self.read(allocator)
        self.peaks.pop(measurement, None)
        self.read(allocator)  # the one before is shown again, which is no less
        self._drop_unused(allocator)

    def note_reset(self, allocator: Allocator) -> None:
        self._raise(allocator._exchange_peak(None))
        self._drop_unused(allocator)

    def _drop_unused(self, allocator: Allocator) -> None:
        if len(self.peaks) == 1 and _watches.get(id_of(allocator)) is self:
            del _watches[id_of(allocator)]

    def _raise(self, seen: int) -> None:
        for owner, peak in self.peaks.items():
            self.peaks[owner] = max(peak, seen)

    def _newest(self) -> int:
        return self.peaks[next(reversed(self.peaks))]


def _watch(allocator: Allocator, beginning: Measurement | None = None) -> _Watch:
    """The watch of an allocator, with `beginning` among its peaks.

    A collection of garbage may run code that measures, too. Between the lookup and the end of this
    function is none: so there is one watch, and nobody drops it before `beginning` is in it.
    """
    if id_of(allocator) not in _watches:
        _watches.setdefault(id_of(allocator), _Watch())
    watch = _watches[id_of(allocator)]
    peaks: dict = watch.peaks
    for one in _running:
        # It knows all allocators that were there when it began: this one is younger, and all that
        # it ever did was in that block.
        if one._allocators is None and one not in peaks:
            peaks[one] = 0                   # until it is raised to the allocator's
    if beginning is not None:
        peaks[beginning] = 0
    return watch


def _since(allocator: Allocator, first: tuple[int, int] | None) -> tuple[int, int]:
    """Allocations and bytes; `first` is None for an allocator made in the block."""
    allocations, nbytes, _ = allocator._tally()
    before = first or (0, 0)
    return allocations - before[0], nbytes - before[1]


def _note_end(allocator: Allocator) -> None:
    """Add the figures of an allocator that is about to end to those who measure it."""
    if not (_running or _watches):
        return
    with _Section(must=True):
        watch = _watch(allocator)
        try:
            watch.read(allocator)
            for one, peak in watch.peaks.copy().items():     # a collection may begin another
                if one is not None:
                    count, nbytes = _since(allocator, one._at_first.pop(id_of(allocator), None))
                    gone = one._gone
                    one._gone = (gone[0] + count, gone[1] + nbytes, gone[2] + peak)
        finally:
            _watches.pop(id_of(allocator), None)
            for one in _running:             # another allocator gets its id
                one._at_first.pop(id_of(allocator), None)


def _note_reset(allocator: Allocator) -> None:
    """Add the peak that an allocator is about to forget to those who measure it."""
    if _running or _watches:
        with _Section(must=False):
            _watch(allocator).note_reset(allocator)


call_at_end(_note_end)
call_at_reset(_note_reset)
