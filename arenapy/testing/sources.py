"""A source of memory that fails when it is told to."""

from __future__ import annotations

import threading

from arenapy.errors import OutOfMemory
from arenapy.memory.region import Region
from arenapy.memory.sources import Host, Source

__all__ = ["FailingSource"]


class FailingSource:
    """A source whose regions work until one fails.

    Parameters
    ----------
    after : int
        The number of regions before the first failure.
    source : Source, optional
        The source of the regions. By default `Host`, without prefaulting and huge pages.
    error : exception, optional
        The exception to raise. By default an `OutOfMemory` that names the planned failure.
    times : int, optional
        The number of failing calls, after which it works again. None: all later calls fail.

    Attributes
    ----------
    calls, failures : int
        The number of calls, and the number of failures.

    Raises
    ------
    ValueError
        If a number is negative.

    Notes
    -----
    Thread-safety: may be used from any thread.

    Examples
    --------
    >>> import arenapy
    >>> from arenapy.testing import FailingSource
    >>> arena = arenapy.Bump(4096, FailingSource(after=1), max_bytes=1 << 20)
    >>> try:
    ...     arena.alloc(8192)
    ... except arenapy.OutOfMemory as error:
    ...     print(str(error).partition(":")[0])
    planned failure of region 2
    >>> arena.alloc(8192).nbytes    # it fails once
    8192
    """

    def __init__(
        self,
        after: int = 0,
        source: Source | None = None,
        error: BaseException | None = None,
        times: int | None = 1,
    ) -> None:
        if after < 0 or (times is not None and times < 0):
            raise ValueError(f"after={after}, times={times}: need 0 or more")
        self.after = after
        self.source = Host(huge_pages=None, prefault=False) if source is None else source
        self.error = error
        self.times = times
        self.calls = self.failures = 0
        self._lock = threading.Lock()  # two threads may find an allocator full at once

    def region(self, nbytes: int) -> Region:
        """A region of the source, or the planned failure."""
        with self._lock:
            self.calls += 1
            call = self.calls
            fails = call > self.after and (self.times is None or call <= self.after + self.times)
            self.failures += fails
        if not fails:
            return self.source.region(nbytes)
        if self.error is not None:
            raise self.error
        raise OutOfMemory(f"planned failure of region {call}: {nbytes} bytes were asked for")
