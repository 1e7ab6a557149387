"""One allocator for each thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, NoReturn, TypeVar

from arenapy.allocator.allocator import Allocator

__all__ = ["PerThread"]

A = TypeVar("A", bound=Allocator)


class PerThread(Generic[A]):
    """Gives every thread its own allocator, made at the thread's first use.

    Attributes and methods are those of the calling thread's allocator. When a thread ends, its
    allocator ends, too. The blocks of this allocator live until they are dropped.

    Parameters
    ----------
    factory : callable
        Makes an allocator. It is called once in each thread, or again if code that runs during the
        call uses the thread's allocator; the first result counts. Its exceptions are passed on.

    Notes
    -----
    Thread-safety: may be used from any thread.

    Examples
    --------
    >>> import arenapy
    >>> arena = arenapy.PerThread(lambda: arenapy.Bump(1 << 20))
    >>> with arena.scope():
    ...     total = float(arena.zeros(10).sum())
    >>> total
    0.0
    """

    __slots__ = ("_factory", "_local")

    def __init__(self, factory: Callable[[], A]) -> None:
        if not callable(factory):
            raise TypeError(
                f"factory={factory!r} is not callable; give one, like lambda: Bump(1 << 20)"
            )
        self._factory = factory
        self._local = threading.local()

    def get(self) -> A:
        """The calling thread's allocator.

        Examples
        --------
        >>> arena = arenapy.PerThread(lambda: arenapy.Bump(1 << 20))
        >>> arena.get() is arena.get()
        True
        """
        try:
            allocator: A = self._local.allocator
        except AttributeError:
            # A signal's handler, or a finalizer, may have made it while the factory ran.
            allocator = self._local.__dict__.setdefault("allocator", self._factory())
        return allocator

    def __getattr__(self, name: str) -> Any:
        """Look up `name` in the calling thread's allocator."""
        if name.startswith("_"):  # not ours to pass on: pickling and copying probe for these
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.get(), name)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a PerThread is not copied or pickled; make another one with its factory")

    def __repr__(self) -> str:
        """Say what this thread has."""
        made = getattr(self._local, "allocator", None)
        return f"<PerThread {'not made in this thread yet' if made is None else repr(made)}>"
