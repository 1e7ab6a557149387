"""A thread that trims a pool by age while nobody uses it. Only for pools that ask for one."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from arenapy.pool.pool import Pool

__all__ = ["start_trimming"]

TIMES = 4  # that it looks in the seconds after which something is given back


def start_trimming(pool: Pool, seconds: float) -> threading.Thread:
    """Trim the pool until it is gone, or closed. The thread keeps neither it nor the process."""
    # Not an Event, whose set() waits for a lock: the collector may end the pool in this very thread
    # while it has that lock, and would collect nothing ever after.
    there = threading.Lock()
    there.acquire()
    reference = weakref.ref(pool, lambda _: there.release())
    thread = threading.Thread(
        target=_trim, args=(reference, there, seconds / TIMES), name="arenapy-trim", daemon=True
    )
    thread.start()
    return thread


def _trim(reference: weakref.ref[Pool], there: threading.Lock, seconds: float) -> None:
    while not there.acquire(timeout=min(max(seconds, 0.001), threading.TIMEOUT_MAX)):
        pool = reference()
        if pool is None:
            return
        try:
            pool._trim_stale()
        except ValueError:  # closed
            return
        del pool
