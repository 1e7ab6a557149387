"""`numpy_memory`: the data of ordinary NumPy arrays from a Pool, and `handles`, where it is.

What lives here: which handler is in force where: contexts, decorators, threads. What does not: the
handler itself (numpy_handler).

NumPy keeps the handler in a context variable. Those that are in force in a context are a stack in
one of ours, the newest last: whoever leaves takes itself out of it, wherever it is, since the
`with` of a generator may end after one that was entered later.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from arenapy.buffer import Buffer
from arenapy.numpy_blocks import Counts
from arenapy.numpy_handler import (
    buffer_block,
    get_handler,
    handler_block,
    make_handler,
    set_handler,
)
from arenapy.pool import Pool
from arenapy.region import Region
from arenapy.stats import Bytes, Figures

__all__ = ["Handle", "NumpyMemoryStats", "handles", "numpy_memory"]

F = TypeVar("F", bound=Callable[..., Any])
POLICIES = ("system", "error")

_lock = threading.RLock()
# A child must not find it taken by a thread that stayed with the parent.
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)


@dataclass(frozen=True, slots=True)
class NumpyMemoryStats(Figures):
    """What a pool did not serve of the arrays made under its handler.

    Attributes
    ----------
    system_allocations, system_bytes
        Ever served by libc: the pool was exhausted, or closed (in a forked child).
    lazy_allocations, lazy_bytes
        Zeros of 32 MiB or more, which get their memory when they are touched.
    system_live, lazy_live
        Blocks of each that are alive now.
    """

    system_allocations: int
    system_bytes: Bytes
    system_live: int
    lazy_allocations: int
    lazy_bytes: Bytes
    lazy_live: int


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
    """

    allocator: Any
    region: Region
    address: int
    nbytes: Bytes
    offset: int


class _Handler:
    """One for each pool and policy, and gone with the pool; arrays keep the capsule longer."""

    def __init__(self, pool: Pool, on_full: str) -> None:
        self.capsule: object
        self.counts: Counts
        self.capsule, self.counts = make_handler(pool, on_full == "system")
        # How often it is in force in a thread, by ident; which may be another thread's later.
        self.threads: dict[int, tuple[threading.Thread, int]] = {}

    def count(self, by: int) -> None:
        thread = threading.current_thread()
        assert thread.ident is not None
        with _lock:
            before = self.threads.get(thread.ident)
            times = by + (before[1] if before and before[0] is thread else 0)
            if times > 0:
                self.threads[thread.ident] = (thread, times)
            else:
                self.threads.pop(thread.ident, None)

    def reached(self) -> set[int]:
        """Idents of the threads that have it, after forgetting those that ended."""
        alive = {thread.ident: thread for thread in threading.enumerate()}
        with _lock:
            for ident, (thread, _) in list(self.threads.items()):
                if alive.get(ident) is not thread:
                    del self.threads[ident]
            return set(self.threads)


_handlers: weakref.WeakKeyDictionary[Pool, dict[str, _Handler]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class _Entry:
    """What is in force in a context; the first of a stack is what was before."""

    capsule: object
    memory: numpy_memory | None
    installed: bool = False


_stack: ContextVar[tuple[_Entry, ...]] = ContextVar("arenapy_numpy_memory", default=())


class numpy_memory:
    """NumPy arrays made in a context have their data in a pool.

    Use it in a ``with`` statement, as a decorator of functions, generators and coroutines, or
    (``.install()``) for good. An array stays valid after the context and after the pool.

    Parameters
    ----------
    pool : Pool
        Of host-accessible memory.
    on_full : {"system", "error"}
        When the pool is exhausted: take the memory from libc, and count it; or let NumPy raise
        ``MemoryError``.
    threads : bool
        A thread begins with NumPy's own handler. True: those that ``threading.Thread.start`` (and
        so an executor) starts in this context get this one.

    Raises
    ------
    TypeError, BufferError
        `pool` is no Pool; the host cannot access its memory.
    ValueError
        For another policy, or a pool that is closed.

    Notes
    -----
    Thread-safety: one object may be used by any number of threads at once, and in itself.

    Every array is 64-byte aligned. ``np.zeros`` of 32 MiB or more is mapped lazily, outside the
    pool.

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

    __slots__ = ("__weakref__", "_covers", "_handler", "on_full", "pool", "threads")

    pool: Pool
    on_full: str
    threads: bool

    def __init__(self, pool: Pool, *, on_full: str = "system", threads: bool = False) -> None:
        if not isinstance(pool, Pool):
            raise TypeError(f"pool={pool!r} is not a Pool; make one, like arenapy.Pool()")
        if on_full not in POLICIES:
            raise ValueError(f"on_full={on_full!r} is neither 'system' nor 'error'")
        self.pool, self.on_full, self.threads = pool, on_full, bool(threads)
        self._handler = _handler_of(pool, on_full)
        self._covers = 0  # how often it asked for threads to be covered

    # -- in a context

    def __enter__(self) -> Self:
        self._enter(installed=False)
        return self

    def __exit__(self, *_error: object) -> None:
        self._leave(installed=False)

    def install(self) -> numpy_memory:
        """Put it in force in this context, below every ``with``, until :meth:`uninstall`.

        With ``threads=True`` it is the default of all threads that are started from now on.
        """
        if any(entry.installed and entry.memory is self for entry in _stack.get()):
            raise ValueError(f"{self!r} is installed already; uninstall it first")
        self._enter(installed=True)
        return self

    def uninstall(self) -> None:
        """End what :meth:`install` began, in the same context. Arrays stay valid."""
        if not self._leave(installed=True):
            raise ValueError(f"{self!r} is not installed in this context")

    def _enter(self, installed: bool, thread: bool = False) -> None:
        stack = _stack.get() or (_Entry(get_handler(), None),)
        at = len(stack)
        while installed and at > 1 and not stack[at - 1].installed:
            at -= 1
        mine = _Entry(self._handler.capsule, self, installed)
        stack = (*stack[:at], mine, *stack[at:])
        set_handler(stack[-1].capsule)
        _stack.set(stack)
        self._handler.count(1)
        if self.threads and not thread:
            with _lock:
                self._covers += 1
                _starts.cover(self if installed else None)

    def _leave(self, installed: bool, thread: bool = False) -> bool:
        stack = _stack.get()
        at = len(stack) - 1
        while at > 0 and not (stack[at].memory is self and stack[at].installed == installed):
            at -= 1
        if at > 0:  # else this is another context than the one that was entered
            stack = (*stack[:at], *stack[at + 1 :])
            set_handler(stack[-1].capsule)
            _stack.set(stack if len(stack) > 1 else ())
            self._handler.count(-1)
        elif installed:
            return False
        with _lock:
            if self.threads and not thread and self._covers:
                self._covers -= 1
                _starts.uncover(self if installed else None)
        return True

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
        """What this pool did not serve, with this policy, since it was used so first."""
        (count, nbytes, live), (lazy, lazy_nbytes, lazy_live) = self._handler.counts.as_tuple()
        return NumpyMemoryStats(count, nbytes, live, lazy, lazy_nbytes, lazy_live)

    def unreached(self) -> list[str]:
        """Names of the threads that run Python code without this handler now."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        idents = sys._current_frames().keys() - self._handler.reached()
        return sorted(names.get(ident, f"thread {ident}") for ident in idents)

    def __repr__(self) -> str:
        threads = ", threads=True" if self.threads else ""
        return f"numpy_memory({self.pool!r}, on_full={self.on_full!r}{threads})"


class _Starts:
    """`threading.Thread.start`, wrapped while somebody wants threads covered."""

    def __init__(self) -> None:
        self.users = 0
        self.defaults: list[numpy_memory] = []
        self.original: Callable[[threading.Thread], None] | None = None

    def cover(self, default: numpy_memory | None) -> None:
        if default is not None:
            self.defaults.append(default)
        self.users += 1
        if self.users == 1:
            self.original = threading.Thread.start
            threading.Thread.start = self.wrapper(self.original)  # type: ignore[method-assign, assignment]

    def uncover(self, default: numpy_memory | None) -> None:
        if default is not None:
            self.defaults.remove(default)
        self.users -= 1
        # Somebody else may have wrapped ours meanwhile: then it stays, and does nothing.
        if self.users == 0 and getattr(threading.Thread.start, "_arenapy", False):
            assert self.original is not None
            threading.Thread.start = self.original  # type: ignore[method-assign, assignment]

    def wrapper(
        self, original: Callable[[threading.Thread], None]
    ) -> Callable[[threading.Thread], None]:
        @functools.wraps(original)
        def start(thread: threading.Thread) -> None:
            memory = self.of_new_thread()
            if memory is not None and "run" not in vars(thread):
                thread.run = _run_under(memory, thread)  # type: ignore[method-assign]
            try:
                original(thread)
            except BaseException:
                vars(thread).pop("run", None)
                raise

        start._arenapy = True  # type: ignore[attr-defined]
        return start

    def of_new_thread(self) -> numpy_memory | None:
        """The innermost of this context that wants threads, or else what is installed for all."""
        for entry in reversed(_stack.get()):
            if entry.memory is not None and entry.memory.threads:
                return entry.memory
        return self.defaults[-1] if self.defaults else None


def _run_under(memory: numpy_memory, thread: threading.Thread) -> Callable[[], None]:
    run = thread.run
    reference = weakref.ref(thread)  # `thread.run` is this closure: no cycle

    def wrapped() -> None:
        memory._enter(installed=False, thread=True)
        try:
            run()
        finally:
            memory._leave(installed=False, thread=True)
            mine = reference()
            if mine is not None:
                vars(mine).pop("run", None)

    return wrapped


_starts = _Starts()


def _handler_of(pool: Pool, on_full: str) -> _Handler:
    with _lock:
        made = _handlers.setdefault(pool, {})
        if on_full not in made:
            made[on_full] = _Handler(pool, on_full)
        return made[on_full]


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
    while not isinstance(owner, Buffer):
        if isinstance(owner, np.ndarray) and owner.base is None:
            found = handler_block(owner)
            return found and Handle(*found, start - found[2])
        # Whatever stands between an array and its memory calls that its base, as NumPy does.
        owner = owner.obj if isinstance(owner, memoryview) else getattr(owner, "base", None)
        if owner is None:
            return None
    found = buffer_block(owner)
    return found and Handle(*found, start - found[2])
