"""`numpy_memory`: the data of ordinary NumPy arrays from a Pool, and `handles`, where it is.

What lives here: arguments, decorators, questions. What does not: the handler itself
(handler), and entering and leaving (contexts).
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from arenapy.buffer.buffer import Buffer
from arenapy.linux.libc_malloc import foreign_malloc
from arenapy.memory.host_request import check_flag
from arenapy.memory.region import Region
from arenapy.memory.sources import BASES
from arenapy.numpy_handler.contexts import Context, PoolHandler
from arenapy.numpy_handler.handler import buffer_block, handler_block, make_handler
from arenapy.pool.pool import Pool

if TYPE_CHECKING:  # they are slow to import, and a program's start waits for this module
    from numpy.typing import NDArray

    from arenapy.stats import NumpyMemoryStats

__all__ = ["Handle", "handles", "numpy_memory"]

F = TypeVar("F", bound=Callable[..., Any])
POLICIES = ("system", "error")


@dataclass(frozen=True, slots=True)
class Handle:
    """Where the memory of an array is.

    Attributes
    ----------
    allocator
        Of this process; None if it is gone, or the memory is a region's own.
    region
        The region that the block lies in.
    address, nbytes
        Of the block.
    offset
        Of the array's first element in the block, in bytes.

    Examples
    --------
    >>> import arenapy
    >>> pool = arenapy.Pool()
    >>> x = pool.empty(100)
    >>> handle = arenapy.handles(x)
    >>> handle.allocator is pool, handle.address == x.ctypes.data
    (True, True)
    """

    allocator: Any
    region: Region
    address: int
    nbytes: int
    offset: int


# Not a WeakKeyDictionary: its callback is Python code, in which a signal's exception is lost, and
# with it the end of the handlers.
_handlers: dict[weakref.ref[Pool], dict[str, PoolHandler]] = {}


class numpy_memory(Context):
    """NumPy arrays made in a context have their data in a pool.

    Use it in a ``with`` statement, as a decorator of functions, generators and coroutines, or
    (``.install()``) for good. An array stays valid after the context and after the pool.

    Parameters
    ----------
    pool : Pool
        Of host-accessible memory.
    on_full : {"system", "error"}
        When the pool is exhausted, or over a file that shrank: take the memory from libc, and count
        it; or let NumPy raise ``MemoryError``.
    threads : bool
        A thread begins with NumPy's own handler. True: those that ``threading.Thread.start`` (and
        so an executor) starts in this context get this one.
    libc : {None, "keep"}
        What else the program takes from ``malloc``: workspaces of LAPACK, hash tables of pandas,
        strings. "keep": glibc is told (``mallopt``) to keep what is freed, in all threads, so that
        it is not faulted in anew. It does nothing where ``malloc`` is not glibc's: musl's, or
        another one that is preloaded; ``repr`` says so.

    Raises
    ------
    TypeError, BufferError
        `pool` is no Pool; the host cannot access its memory.
    ValueError
        For another policy, or a pool that is closed; `libc` is another word.

    Notes
    -----
    Thread-safety: one object may be used by any number of threads at once, and in itself.

    Every array is 64-byte aligned. ``np.zeros`` of 32 MiB or more is mapped lazily, outside the
    pool.

    ``libc="keep"`` holds for the process, from the first object that is entered or installed with
    it to the last that is left. Memory that is freed meanwhile stays with the process, however
    large it was. Leaving cannot undo all: glibc adapts its thresholds no longer, and has those that
    it adapts to at most, whatever was set before: blocks above 32 MiB are mapped, and the free end
    of the heap goes back if it is larger than 64 MiB. What was kept goes back as it comes to lie
    there, or by ``malloc_trim``. Enter it for long, not for each call.

    A generator whose ``with`` is suspended leaves the handler to its caller, as with
    ``numpy.errstate``; decorate the generator instead.

    NumPy's side of it is NEP 49.

    Examples
    --------
    >>> import arenapy, numpy as np
    >>> pool = arenapy.Pool(max_bytes=256 << 20)
    >>> with arenapy.numpy_memory(pool):
    ...     x = np.ones((1000, 1000), "f4")
    >>> arenapy.handles(x).allocator is pool
    True
    """

    __slots__ = ("__weakref__", "libc", "on_full", "pool")

    pool: Pool
    on_full: str
    libc: str | None

    def __init__(
        self,
        pool: Pool,
        *,
        on_full: str = "system",
        threads: bool = False,
        libc: str | None = None,
    ) -> None:
        if not isinstance(pool, Pool):
            raise TypeError(f"pool={pool!r} is not a Pool; make one, like arenapy.Pool()")
        if on_full not in POLICIES:
            raise ValueError(f"on_full={on_full!r} is neither 'system' nor 'error'")
        check_flag("threads", threads)
        if libc not in (None, "keep"):
            raise ValueError(f"libc={libc!r} is neither None nor 'keep'")
        super().__init__(_handler_of(pool, on_full), threads, libc == "keep")
        self.pool, self.on_full, self.libc = pool, on_full, libc

    def install(self) -> numpy_memory:
        """Put it in force in this context, below every ``with``, until :meth:`uninstall`.

        With ``threads=True`` it is the default of all threads that are started from now on.

        Returns
        -------
        numpy_memory
            Itself.

        Examples
        --------
        >>> memory = arenapy.numpy_memory(arenapy.Pool())
        >>> memory = memory.install()
        >>> arenapy.handles(np.ones(1000)) is not None
        True
        >>> memory.uninstall()
        """
        if not self._install():
            raise ValueError(f"{self!r} is installed already; uninstall it first")
        return self

    def uninstall(self) -> None:
        """End what :meth:`install` began, in the same context. Arrays stay valid.

        Examples
        --------
        >>> memory = arenapy.numpy_memory(arenapy.Pool()).install()
        >>> memory.uninstall()
        >>> print(arenapy.handles(np.ones(1000)))
        None
        """
        if not self._uninstall():
            raise ValueError(f"{self!r} is not installed in this context")

    # -- around functions

    def __call__(self, function: F) -> F:
        """Decorate a function, generator or coroutine: it is in force while its code runs."""
        if inspect.isasyncgenfunction(function):
            wrapped: Any = self._around_async_generator(function)
        elif inspect.iscoroutinefunction(function):

            async def wrapped(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return await function(*args, **kwargs)

        elif inspect.isgeneratorfunction(function):
            wrapped = self._around_generator(function)
        else:

            def wrapped(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return function(*args, **kwargs)

        decorated: Any = functools.update_wrapper(wrapped, function)
        return decorated  # type: ignore[no-any-return]

    def _around_generator(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            generator = function(*args, **kwargs)
            step, value = generator.send, None
            while True:
                try:
                    with self:
                        item = step(value)
                except StopIteration as stop:
                    return stop.value
                try:
                    value = yield item
                    step = generator.send
                except GeneratorExit:
                    with self:
                        generator.close()
                    raise
                except BaseException as error:  # what the caller throws in
                    step, value = generator.throw, error

        return wrapped

    def _around_async_generator(self, function: Callable[..., Any]) -> Callable[..., Any]:
        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            generator = function(*args, **kwargs)
            step, value = generator.asend, None
            while True:
                try:
                    with self:
                        item = await step(value)
                except StopAsyncIteration:
                    return
                try:
                    value = yield item
                    step = generator.asend
                except GeneratorExit:
                    with self:
                        await generator.aclose()
                    raise
                except BaseException as error:  # what the caller throws in
                    step, value = generator.athrow, error

        return wrapped

    # -- what happened

    def stats(self) -> NumpyMemoryStats:
        """Allocations that the pool did not serve, since a handler with this policy was first made.

        Returns
        -------
        NumpyMemoryStats

        Examples
        --------
        >>> memory = arenapy.numpy_memory(arenapy.Pool(max_bytes=1 << 20))
        >>> with memory:
        ...     x = np.ones(1_000_000)           # 8 MB do not fit
        >>> memory.stats().system_allocations
        1
        """
        from arenapy.stats import NumpyMemoryStats

        (count, nbytes, live), (lazy, lazy_nbytes, lazy_live) = self._handler.counts.as_tuple()
        return NumpyMemoryStats(count, nbytes, live, lazy, lazy_nbytes, lazy_live)

    def unreached(self) -> list[str]:
        """Names of the threads that run Python code without this handler now.

        Returns
        -------
        list of str

        Examples
        --------
        >>> memory = arenapy.numpy_memory(arenapy.Pool())
        >>> "MainThread" in memory.unreached()
        True
        >>> with memory:
        ...     "MainThread" in memory.unreached()
        False
        """
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        idents = sys._current_frames().keys() - self._handler.reached()
        return sorted(names.get(ident, f"thread {ident}") for ident in idents)

    def __repr__(self) -> str:
        threads = ", threads=True" if self.threads else ""
        libc = ""
        if self.libc is not None:
            foreign = foreign_malloc()
            libc = f", libc={self.libc!r}"
            libc += f" without effect: malloc is {foreign}'s" if foreign else ""
        return f"numpy_memory({self.pool!r}, on_full={self.on_full!r}{threads}{libc})"


def _handler_of(pool: Pool, on_full: str) -> PoolHandler:
    made = _handlers.setdefault(weakref.ref(pool, _handlers.pop), {})
    return made.get(on_full) or made.setdefault(
        on_full, PoolHandler(*make_handler(pool, on_full == "system"))
    )


def handles(array: NDArray[Any]) -> Handle | None:
    """Where the memory of an array is: which allocator, region and block.

    Parameters
    ----------
    array : numpy.ndarray
        An array or view, made by any allocator of arenapy, or by NumPy under its handler.

    Returns
    -------
    Handle or None
        None if its memory is none of arenapy's.

    Raises
    ------
    TypeError
        `array` is no ndarray.

    Notes
    -----
    Thread-safety: may be called from any thread. The array keeps its block alive, so that what
    is said stays true as long as the array lives.

    Examples
    --------
    >>> import arenapy
    >>> arena = arenapy.Bump(1 << 20)
    >>> x = arena.empty(100)
    >>> where = arenapy.handles(x[10:])
    >>> where.allocator is arena, where.nbytes, where.offset
    (True, 800, 80)
    """
    if not isinstance(array, np.ndarray):
        raise TypeError(f"array={array!r} is not a numpy.ndarray")
    start = array.__array_interface__["data"][0]
    owner: Any = array
    for _ in range(BASES):
        if isinstance(owner, Buffer):
            found = buffer_block(owner)
            return found and Handle(*found, start - found[2])
        if isinstance(owner, np.ndarray) and owner.base is None:
            found = handler_block(owner)
            return found and Handle(*found, start - found[2])
        # Whatever stands between an array and its memory calls that its base, as NumPy does.
        owner = owner.obj if isinstance(owner, memoryview) else getattr(owner, "base", None)
        if owner is None:
            break
    return None
