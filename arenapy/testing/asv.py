"""Figures of memory that your own asv suite can track: page faults, peaks, hit rates.

asv's ``mem_`` benchmarks see Python objects, and its ``peakmem_`` a process's peak since it began:
neither sees what a C library, NumPy or an allocator does in the body of a benchmark. The functions
here give numbers for ``track_`` benchmarks, and `MemorySuite` makes benchmarks of a method. Neither
asv nor Hypothesis is needed to import this module.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any, ClassVar, TypeVar

# Public names alone: asv_benches loads this file beside an arenapy of another commit.
from arenapy import Allocator, Pool, measure

__all__ = [
    "MemorySuite",
    "allocated_peak_bytes",
    "hit_rate",
    "page_faults",
    "peak_bytes",
    "tracked",
]

_Function = TypeVar("_Function", bound=Callable[..., object])
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # see proc(5): the peak is then what is resident now
_STATUS = Path("/proc/self/status")


def tracked(unit: str, pretty_name: str | None = None, **attributes: object) -> Callable[..., Any]:
    """Give a benchmark function its unit and other attributes for asv.

    Parameters
    ----------
    unit : str
        The unit on the axis: ``"faults"``, ``"bytes"``, ``"1"``.
    pretty_name : str, optional
        The title on asv's pages, instead of the function's name.
    **attributes
        Further attributes, such as ``timeout`` or ``version``.

    Returns
    -------
    callable
        A decorator that returns the function itself.

    Examples
    --------
    >>> from arenapy.testing.asv import tracked
    >>> @tracked("faults", "Page faults of a step", timeout=120)
    ... def track_faults():
    ...     return 0
    >>> track_faults.unit, track_faults.timeout
    ('faults', 120)
    """
    named = {} if pretty_name is None else {"pretty_name": pretty_name}

    def decorate(function: _Function) -> _Function:
        for name, value in ({"unit": unit} | named | attributes).items():
            setattr(function, name, value)
        return function

    return decorate


def page_faults(function: Callable[[], object], *, repeat: int = 20, warmup: int = 3) -> float:
    """Count the page faults of a call after warm-up.

    Parameters
    ----------
    function : callable
        Called without arguments. Its result is dropped before the next call.
    repeat : int, default 20
        The number of counted calls.
    warmup : int, default 3
        The number of uncounted calls before them. They warm up the interpreter's own memory and
        the thresholds of malloc.

    Returns
    -------
    float
        Minor page faults for each call, of all threads of the process.

    Raises
    ------
    ValueError
        If there is no call to count.

    Notes
    -----
    Thread-safety: faults of other threads count too.

    Examples
    --------
    >>> import arenapy
    >>> from arenapy.testing.asv import page_faults
    >>> arena = arenapy.Bump(1 << 20)
    >>> def frame():
    ...     with arena.scope():
    ...         arena.empty(1 << 19, "u1").fill(1)
    >>> round(page_faults(frame))  # other threads may cause one
    0
    """
    if repeat < 1 or warmup < 0:
        raise ValueError(f"repeat is {repeat} and warmup {warmup}: at least 1 and 0 are needed")
    for _ in range(warmup):
        function()
    before = getrusage(RUSAGE_SELF).ru_minflt
    for _ in range(repeat):
        function()
    return (getrusage(RUSAGE_SELF).ru_minflt - before) / repeat


def peak_bytes(function: Callable[[], object]) -> int:
    """Measure how much a call increases the resident memory of the process.

    The kernel counts this, so memory of C libraries is included, but only if it is touched. Memory
    that was resident before the call does not count. This includes prefaulted memory: see
    `allocated_peak_bytes`.

    Parameters
    ----------
    function : callable
        Called once, without arguments. Memory that is allocated on first use is included. To
        exclude it, call the function before.

    Returns
    -------
    int
        Bytes, with an error of some hundred KiB, because the kernel counts in batches.

    Raises
    ------
    NotImplementedError
        If the kernel does not let a process reset its peak.

    Notes
    -----
    Thread-safety: memory of other threads counts, too. The kernel's peak of the process
    (``VmHWM``) is reset.

    Examples
    --------
    >>> from arenapy.testing.asv import peak_bytes
    >>> peak_bytes(lambda: b"x" * (64 << 20)) > 48 << 20
    True
    """
    gc.collect()
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError as error:
        raise NotImplementedError(f"{_CLEAR_REFS} cannot be written: {error}") from None
    before = _status("VmRSS")
    function()
    return max(0, _status("VmHWM") - before)


def _status(field: str) -> int:
    """Bytes that the kernel reports for this process."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise NotImplementedError(f"{_STATUS} has no {field}")


def allocated_peak_bytes(allocator: Allocator, function: Callable[[], object]) -> int:
    """Measure the peak of an allocator's live bytes during a call.

    Parameters
    ----------
    allocator : Allocator
        A Bump, Slab or Pool.
    function : callable
        Called once, without arguments.

    Returns
    -------
    int
        Bytes of live blocks, including blocks that were live before. A Pool and a Slab include
        padding.

    Raises
    ------
    TypeError
        If `allocator` is not an allocator.

    See Also
    --------
    arenapy.measure : The same and more, for a block of code.

    Examples
    --------
    >>> import arenapy
    >>> from arenapy.testing.asv import allocated_peak_bytes
    >>> pool = arenapy.Pool()
    >>> allocated_peak_bytes(pool, lambda: [pool.alloc(4096) for _ in range(3)])
    12288
    """
    with measure(allocator) as measured:
        function()
    return measured.peak


def hit_rate(pool: Pool, function: Callable[[], object], *, repeat: int = 1) -> float:
    """Measure the share of a call's allocations that a Pool served without its source.

    Parameters
    ----------
    pool : Pool
        The pool to measure.
    function : callable
        Called without arguments. In the first call of a program, most allocations miss.
    repeat : int, default 1
        Calls.

    Returns
    -------
    float
        From 0 to 1. NaN, which asv leaves out, if nothing was allocated.

    Raises
    ------
    TypeError
        If `pool` is not a Pool.

    Notes
    -----
    Thread-safety: allocations of other threads from the same pool count too.

    Examples
    --------
    >>> import arenapy
    >>> from arenapy.testing.asv import hit_rate
    >>> pool = arenapy.Pool()
    >>> def step():
    ...     a = pool.alloc(1 << 20)
    >>> hit_rate(pool, step, repeat=100) > 0.98
    True
    """
    if not isinstance(pool, Pool):
        raise TypeError(f"{pool!r} is not a Pool, and only a Pool has hits and misses")
    before = pool.stats()
    for _ in range(repeat):
        function()
    after = pool.stats()
    hits = after.pool_hits - before.pool_hits
    asked = hits + after.pool_misses - before.pool_misses
    return hits / asked if asked else float("nan")


class MemorySuite:
    """Base of an asv class that tracks the memory of its method ``work``.

    A subclass defines ``work(self, *params)``, and gets ``track_page_faults`` (unit "faults") and
    ``track_peak_bytes`` ("bytes"). It may also define ``allocator(self, *params)``, which returns
    the allocator of `work`. It then also gets ``track_allocated_peak_bytes`` ("bytes") and
    ``track_hit_rate`` ("1"), each of which calls it once, after ``setup``. ``params``,
    ``param_names``, ``setup`` and the rest are as in asv. To remove a benchmark, set it to None in
    the subclass, or in a class that it inherits from.

    What cannot be measured is NaN, which asv shows as "n/a": hits of an allocator that is no Pool,
    and resident bytes where `peak_bytes` is not implemented.

    The base class itself has no benchmark, because asv looks at every class in a module.

    Notes
    -----
    The peak is from the first call. The hit rate is from the `repeat` calls after it.

    Examples
    --------
    >>> import numpy as np
    >>> from arenapy.testing.asv import MemorySuite
    >>> class Sort(MemorySuite):
    ...     params = (1_000, 100_000)
    ...     param_names = ("n",)
    ...
    ...     def setup(self, n):
    ...         self.numbers = np.random.default_rng(0).random(n)
    ...
    ...     def work(self, n):
    ...         np.sort(self.numbers)
    >>> Sort.track_page_faults.unit, Sort.track_peak_bytes.unit
    ('faults', 'bytes')
    """

    #: Calls of `work` for a figure of page faults or hits.
    repeat: ClassVar[int] = 20

    def work(self, *params: Any) -> object:
        """Do the work that is measured."""
        raise NotImplementedError(f"{type(self).__name__} defines no work()")

    def __init_subclass__(cls, **options: Any) -> None:
        """Give the subclass its benchmarks: functions of its own, whose units asv reads."""
        super().__init_subclass__(**options)
        tracks = _TRACKS | (_ALLOCATOR_TRACKS if hasattr(cls, "allocator") else {})
        for name, (unit, title, body) in tracks.items():
            inherited = getattr(cls, name, _track)
            if inherited is _track or getattr(inherited, "is_default", False):
                setattr(cls, name, _track(name, body, unit, f"{cls.__name__}: {title}"))


def _track(
    name: str, body: Callable[..., float], unit: str, pretty_name: str
) -> Callable[..., float]:
    def track(self: MemorySuite, *params: Any) -> float:
        return body(self, lambda: self.work(*params), *params)

    track.__name__, track.__doc__ = name, body.__doc__
    decorated: Callable[..., float] = tracked(unit, pretty_name)(track)
    decorated.is_default = True  # type: ignore[attr-defined]
    return decorated


def _faults(suite: MemorySuite, work: Callable[[], object], *params: Any) -> float:
    """Page faults a call."""
    return page_faults(work, repeat=suite.repeat)


def _peak(suite: MemorySuite, work: Callable[[], object], *params: Any) -> float:
    """Resident bytes that a call adds at its peak."""
    try:
        return peak_bytes(work)
    except NotImplementedError:
        return float("nan")


def _allocated_peak(suite: Any, work: Callable[[], object], *params: Any) -> float:
    """Bytes that the allocator has handed out at its peak."""
    return allocated_peak_bytes(suite.allocator(*params), work)


def _hits(suite: Any, work: Callable[[], object], *params: Any) -> float:
    """Share of allocations that the pool serves from what it has."""
    pool = suite.allocator(*params)
    if not isinstance(pool, Pool):
        return float("nan")
    work()
    return hit_rate(pool, work, repeat=suite.repeat)


_TRACKS: dict[str, tuple[str, str, Callable[..., float]]] = {
    "track_page_faults": ("faults", "page faults a call", _faults),
    "track_peak_bytes": ("bytes", "resident bytes at the peak", _peak),
}
_ALLOCATOR_TRACKS: dict[str, tuple[str, str, Callable[..., float]]] = {
    "track_allocated_peak_bytes": ("bytes", "bytes of live blocks at the peak", _allocated_peak),
    "track_hit_rate": ("1", "share of allocations that are hits", _hits),
}
