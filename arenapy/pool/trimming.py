"""A thread that trims a pool by age while nobody uses it. Only for pools that ask for one."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from arenapy.pool.pool import Pool

__all__ = ["start_trimming"]

TIMES = 4  # that it looks in the seconds after which something is given back


def start_trimming(pool: Pool, seconds: float) -> threading.Thread:
    """Trim the pool until it is gone, or closed. The thread keeps neither it nor the process."""
    # The callback is no Python code, in which a signal's exception would be lost. Not an Event,
    # whose set() waits for a lock: the collector may end the pool in this very thread while it has
    # that lock, and would collect nothing ever after.
    gone: queue.SimpleQueue[weakref.ref[Pool]] = queue.SimpleQueue()
    reference = weakref.ref(pool, gone.put)
    thread = threading.Thread(
        target=_trim, args=(reference, gone, seconds / TIMES), name="arenapy-trim", daemon=True
    )
    thread.start()
    return thread


def _trim(
    reference: weakref.ref[Pool], gone: queue.SimpleQueue[weakref.ref[Pool]], seconds: float
) -> None:
    while True:
        with contextlib.suppress(queue.Empty):
            gone.get(timeout=min(max(seconds, 0.001), threading.TIMEOUT_MAX))
            return
        pool = reference()
        if pool is None:
            return
        try:
            pool._trim_stale()
        except ValueError:  # closed
            return
        del pool
