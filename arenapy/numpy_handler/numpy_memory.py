"""`numpy_memory`: the data of ordinary NumPy arrays from a Pool, and `handles`, where it is.

What lives here: arguments, decorators, questions. What does not: the handler itself
(handler), and entering and leaving (contexts).
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from arenapy.buffer.buffer import Buffer
from arenapy.linux.libc_malloc import foreign_malloc
from arenapy.memory.host_request import check_flag
from arenapy.memory.region import Region
from arenapy.memory.sources import BASES
from arenapy.numpy_handler.contexts import Context, PoolHandler, begin_unseen
from arenapy.numpy_handler.handler import buffer_block, handler_block, make_handler, refuse_closed
from arenapy.pool.pool import Pool

if TYPE_CHECKING:  # they are slow to import, and a program's start waits for this module
    from numpy.typing import NDArray

    from arenapy.stats import NumpyMemoryStats

__all__ = ["Handle", "handles", "numpy_memory"]

F = TypeVar("F", bound=Callable[..., Any])
POLICIES = ("system", "error")


@dataclass(frozen=True, slots=True)
class Handle:
    """The block that holds the memory of an array.

    Attributes
    ----------
    allocator
        The allocator in this process. None if it is gone, or if the block is a Buffer of a region.
    region
        The region of the block.
    address, nbytes
        Address and size of the block.
    offset
        Position of the array's first element in the block, in bytes.

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


def _can_be_awaited(function: Any) -> bool:
    """Whether ``types.coroutine`` made it."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    return code is not None and bool(code.co_flags & inspect.CO_ITERABLE_COROUTINE)


class numpy_memory(Context):
    """Put the data of NumPy arrays that are made in a context into a pool.

    Use it in a ``with`` statement, as a decorator of functions, generators and coroutines, or for
    the rest of the program with ``.install()``. An array stays valid after the context and after
    the pool.

    Parameters
    ----------
    pool : Pool
        A pool over host-accessible memory.
    on_full : {"system", "error"}
        If the pool is exhausted, or over a file that shrank, or has no block for an array that is
        resized: "system" takes the memory from libc and counts it. With "error" the pool grows for
        such an array, and else NumPy raises ``MemoryError``.
    threads : bool
        If True, threads that ``threading.Thread.start`` (and therefore an executor) starts in this
        context get this handler. Other threads begin with NumPy's own handler.
    libc : {None, "keep"}
        Treatment of other memory from ``malloc``: workspaces of LAPACK, hash tables of pandas,
        strings. "keep" tells glibc (``mallopt``) to keep freed memory in all threads, so that it is
        not faulted in again. This has no effect if ``malloc`` is not glibc's (musl, or a preloaded
        one). ``repr`` says so then.

    Raises
    ------
    TypeError, BufferError
        If `pool` is not a Pool, or the host cannot access its memory.
    ValueError
        If `on_full` or `libc` has another value, or the pool is closed.

    Notes
    -----
    Thread-safety: any number of threads may use one object at once, also nested in itself.

    While the pool grows, other code runs: see the guide about what must not be changed meanwhile.

    Every array is aligned to 64 bytes. ``np.zeros`` of 32 MiB or more is mapped lazily, outside
    the pool.

    ``libc="keep"`` applies to the process. It begins when the first such object is entered or
    installed, and ends when the last one is left. Memory that is freed in this time stays with the
    process, whatever its size. The end does not restore everything: glibc no longer adapts its
    thresholds, and keeps their highest values, whatever was set before. Blocks above 32 MiB are
    mapped, and the free end of the heap is returned if it is larger than 64 MiB. The kept memory is
    returned when it reaches that end, or by ``malloc_trim``. Enter the object once for a long time,
    not for each call.

    A generator that is suspended inside its ``with`` leaves the handler in force for its caller, as
    with ``numpy.errstate``. Decorate the generator instead.

    The interface of NumPy for this is NEP 49.

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
        refuse_closed(pool)
        super().__init__(_handler_of(pool, on_full), threads, libc == "keep")
        self.pool, self.on_full, self.libc = pool, on_full, libc

    def install(self) -> numpy_memory:
        """Use the pool in this context until :meth:`uninstall`. A ``with`` takes precedence.

        With ``threads=True`` it is the default of all threads that start from now on.

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
            raise ValueError(f"{self!r} is already installed; uninstall it first")
        return self

    def uninstall(self) -> None:
        """Undo :meth:`install`, in the same context. Arrays stay valid.

        Examples
        --------
        >>> memory = arenapy.numpy_memory(arenapy.Pool()).install()
        >>> memory.uninstall()
        >>> print(arenapy.handles(np.ones(1000)))
        None
        """
        if not self._uninstall():
            raise ValueError(f"{self!r} is not installed in this context")

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a numpy_memory is not pickled; in the other process, make one over a Pool of its own"
        )

    # -- around functions

    def __call__(self, function: F) -> F:
        """Decorate a function, generator or coroutine: it is in force while its code runs."""
        decorated: Any
        if isinstance(function, (staticmethod, classmethod)):
            decorated = type(function)(self(function.__func__))
            return decorated  # type: ignore[no-any-return]
        if not callable(function) or isinstance(function, type):
            raise TypeError(f"{function!r} is not a function; decorate functions and methods")

        def either(is_such: Callable[[Any], bool]) -> bool:
            return is_such(function) or is_such(type(function).__call__)

        if either(inspect.isasyncgenfunction):
            wrapped: Any = self._around_async_generator(function)
        elif either(inspect.iscoroutinefunction):

            async def wrapped(*args: Any, **kwargs: Any) -> Any:
                with self._turn():
                    return await function(*args, **kwargs)

        elif either(inspect.isgeneratorfunction):
            wrapped = self._around_generator(function)
            if either(_can_be_awaited):
                wrapped = types.coroutine(wrapped)
        else:

            def wrapped(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return function(*args, **kwargs)

        decorated = functools.update_wrapper(wrapped, function)
        return decorated  # type: ignore[no-any-return]

    def _around_generator(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            generator = function(*args, **kwargs)
            del args, kwargs  # this frame keeps no arrays: it lives long, and is in tracebacks
            step, value = generator.send, None
            while True:
                try:
                    with self:
                        item = [step(value)]
                except StopIteration as stop:
                    return stop.value
                finally:
                    value = None
                try:
                    value = yield item.pop()
                    step = generator.send
                except BaseException as error:  # what the caller throws in, or its close() does
                    step, value = generator.throw, error

        return wrapped

    def _around_async_generator(self, function: Callable[..., Any]) -> Callable[..., Any]:
        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            generator = function(*args, **kwargs)
            del args, kwargs  # as above
            ended: list[bool] = []
            step, value = functools.partial(begin_unseen, ended), generator
            try:
                while True:
                    try:
                        with self._turn():
                            item = [await step(value)]
                    except StopAsyncIteration:
                        return
                    finally:
                        value = None
                    try:
                        value = yield item.pop()
                        step = generator.asend
                    except BaseException as error:  # as above
                        step, value = generator.athrow, error
            finally:  # also by what a signal's handler raises here
                ended.append(True)

        return wrapped

    # -- what happened

    def stats(self) -> NumpyMemoryStats:
        """Allocations outside the pool since this handler was first made.

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

        return NumpyMemoryStats(**self._figures())

    def _figures(self) -> dict[str, int]:
        return self._handler.counts.as_dict()

    def unreached(self) -> list[str]:
        """Names of the threads that now run Python code without this handler.

        Returns
        -------
        list of str

        Notes
        -----
        A thread has the handler from where it enters the context to where it leaves it. What code
        gets or lacks with a copied context is not seen: `asyncio.to_thread` gives its thread the
        handler, and that thread is listed.

        Examples
        --------
        >>> memory = arenapy.numpy_memory(arenapy.Pool())
        >>> "MainThread" in memory.unreached()
        True
        >>> with memory:
        ...     "MainThread" in memory.unreached()
        False
        """
        names = {thread.ident: str(thread.name) for thread in threading.enumerate()}
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
    """Return the allocator, region and block of an array's memory.

    Parameters
    ----------
    array : numpy.ndarray
        An array or view, made by any allocator of arenapy, or by NumPy under :class:`numpy_memory`.

    Returns
    -------
    Handle or None
        None if its memory is not arenapy's.

    Raises
    ------
    TypeError
        If `array` is not an ndarray.

    Notes
    -----
    Thread-safety: may be called from any thread. The array keeps its block alive, so the result
    stays valid as long as the array lives.

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
        # Every object between an array and its memory calls the next one its base, as NumPy does.
        owner = owner.obj if isinstance(owner, memoryview) else getattr(owner, "base", None)
        if owner is None:
            break
    return None
