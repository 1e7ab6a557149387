"""Child processes that end with the code which started them, whenever a signal's exception strikes.

`subprocess` starts a process and returns it in two steps. An exception between them, by a signal
handler, loses the process, which then runs on.
"""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["child_process", "signals_later"]

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def child_process(
    command: Sequence[str],
    end: Callable[[subprocess.Popen[Any]], object] = subprocess.Popen.kill,
    **how: Any,
) -> Iterator[subprocess.Popen[Any]]:
    """Start a process, and wait for its end when the block is left.

    Parameters
    ----------
    command : sequence of str
    end : callable
        Ends the process if it still runs then.
    **how
        As for `subprocess.Popen`.
    """
    process = None
    try:
        with signals_later():
            process = subprocess.Popen(command, **how)
        yield process
    finally:
        if process is not None:
            end(process)
            process.__exit__(None, None, None)  # closes its pipes, and waits


@contextmanager
def signals_later() -> Iterator[None]:
    """Call the handlers of signals when the block has ended."""
    came: list[int] = []
    before = {}
    try:
        if threading.current_thread() is threading.main_thread():  # others run no handlers
            for number in ENDING:
                handler = signal.getsignal(number)
                if callable(handler):
                    before[number] = handler
                    signal.signal(number, lambda number, frame: came.append(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in came:
            signal.raise_signal(late)
