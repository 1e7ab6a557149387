"""Child processes that end with the code which started them, whenever a signal's exception strikes.

`subprocess` starts a process and returns it in two steps. An exception between them, by a signal
handler, loses the process, which then runs on.
"""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["LATE", "child_process", "for_late_libraries", "signals_later"]

#: A tunable of glibc: room for the thread-local data of libraries that are loaded late.
LATE = "glibc.rtld.optional_static_tls=16384"
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


def for_late_libraries(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which a process can load any library later, such as jemalloc."""
    tunables = ":".join(filter(None, [environment.get("GLIBC_TUNABLES"), LATE]))
    return {**environment, "GLIBC_TUNABLES": tunables}


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
