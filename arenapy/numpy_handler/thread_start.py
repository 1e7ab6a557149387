"""The `threading.Thread.start` of threads that are to have the handler: a function in Python.

`inspect`, and mocks that are made after a function, know no compiled ones. All that it does is
compiled, see contexts.pyx.
"""

from collections.abc import Callable
from threading import Thread
from typing import Any


def start_by(act: Callable[[Any, Thread], None], original: Any) -> Callable[[Thread], None]:
    """A method that calls `act(original, thread)`."""

    def start(self: Thread) -> None:
        act(original, self)

    return start
