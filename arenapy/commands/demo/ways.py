"""Where the temporaries of a job live: the three ways that the demo compares.

A way has a ``scope()`` to put around an iteration and a ``step(job)`` that does it. The result
of ``step`` belongs to the scope and is dropped before the scope ends.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np

from arenapy import Bump

from .workloads import Array, Job

__all__ = ["Arena", "Plain", "Preallocated", "Way"]


class Way(Protocol):
    """One of the three."""

    name: str

    def scope(self) -> AbstractContextManager[Any]:
        """Return the context manager that an iteration runs in."""

    def step(self, job: Job) -> tuple[Array, ...]:
        """Do one iteration of `job`."""


class Plain:
    """NumPy allocates each temporary and frees it: what everybody has today."""

    name = "plain NumPy"

    def scope(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def step(self, job: Job) -> tuple[Array, ...]:
        return job.plain()


class Arena:
    """Temporaries come from an arena, and the scope gives them back all at once."""

    name = "arena"

    def __init__(self, arena: Bump) -> None:
        self.scope = arena.scope
        self._empty = arena.empty

    def step(self, job: Job) -> tuple[Array, ...]:
        return job.placed(self._empty)


class Preallocated:
    """The limit: arrays made once by hand and written again in each iteration.

    The first iteration makes them; every later one is handed the same arrays in the same order.
    Nothing can be faster than not allocating, and nobody wants to write programs like this.
    """

    name = "preallocated"

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self._next = 0

    def scope(self) -> "Preallocated":
        return self

    def __enter__(self) -> None:
        self._next = 0

    def __exit__(self, *_: object) -> None:
        pass

    def _empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        index = self._next
        self._next = index + 1
        if index == len(self.arrays):
            self.arrays.append(np.empty(shape, dtype))
        return self.arrays[index]

    def step(self, job: Job) -> tuple[Array, ...]:
        return job.placed(self._empty)
