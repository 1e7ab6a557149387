"""CuPy with arenapy's memory: one line gives a program's arrays to a Pool.

Contents: the functions that CuPy's users call. The allocator that CuPy calls for each array is in
`cupy_blocks`.
"""

from collections.abc import Callable
from typing import Any

from arenapy.interop.device_pools import by_device, library
from arenapy.pool.pool import Pool

__all__ = ["allocator", "pinned_allocator", "use"]

OLDEST = (13, 0)


def allocator(*pools: Pool) -> Any:
    """Give CuPy an allocator of Pools' memory.

    Parameters
    ----------
    *pools : Pool
        One for each device that the program uses, over ``cuda.Device(n)`` or ``cuda.DriverPool``.
        The process keeps them.

    Returns
    -------
    callable
        For ``cupy.cuda.set_allocator`` or ``cupy.cuda.using_allocator``. It has the methods of
        ``cupy.cuda.MemoryPool`` (``used_bytes()``, ``total_bytes()``, ``free_bytes()``,
        ``n_free_blocks()``, ``free_all_blocks()``, ``get_limit()``), with the figures of the
        current device's Pool.

    Raises
    ------
    ImportError
        If CuPy is missing, too old or unknown. The message says what to install.
    TypeError, ValueError
        If an argument is not a Pool over memory of a device, or two Pools are of one device.

    Notes
    -----
    An array is allocated for CuPy's current stream, and this stream reuses its bytes at once after
    the array is dropped. If another stream works on an array, synchronize this stream, or let the
    array's stream wait for it, before you drop the array. (CuPy's own pool needs the same.)

    A request that does not fit raises ``cupy.cuda.memory.OutOfMemoryError`` with the Pool's
    figures, after a garbage collection and a second try. Arrays that are made while the current
    stream is captured belong to the graph. If the current device has no Pool, an allocation raises
    RuntimeError. Each array of a stream that CuPy did not make (``ExternalStream``) costs an event.
    CuPy's memory hooks are not called.

    Thread-safety: any thread may allocate.

    Examples
    --------
    >>> import arenapy
    >>> from arenapy import cuda
    >>> from arenapy.interop import cupy as arenapy_cupy
    >>> pool = arenapy.Pool(source=cuda.Device())
    >>> cupy.cuda.set_allocator(arenapy_cupy.allocator(pool))              # doctest: +SKIP
    """
    pools_of = by_device(pools)
    return _blocks().allocator_of(pools_of)


def use(*pools: Pool) -> None:
    """Let CuPy allocate all its arrays from Pools.

    Parameters
    ----------
    *pools : Pool
        As for :func:`allocator`.

    Raises
    ------
    ImportError, TypeError, ValueError
        As :func:`allocator` does. Nothing has changed then.

    Notes
    -----
    This calls ``cupy.cuda.set_allocator``. It also makes ``cupy.get_default_memory_pool()`` return
    that allocator, so code that prints its figures or calls ``free_all_blocks()`` uses the Pool.

    Examples
    --------
    >>> arenapy_cupy.use(pool)                                             # doctest: +SKIP
    >>> x = cupy.zeros(1000)                                               # doctest: +SKIP
    >>> cupy.get_default_memory_pool().used_bytes()                        # doctest: +SKIP
    8192
    """
    ours = allocator(*pools)
    cupy = library("cupy", OLDEST)
    cupy.cuda.set_allocator(ours)
    cupy._default_memory_pool = ours


def pinned_allocator(pool: Pool) -> Callable[[int], Any]:
    """Give CuPy an allocator of pinned host memory.

    Parameters
    ----------
    pool : Pool
        Over ``cuda.Pinned()``.

    Returns
    -------
    callable
        For ``cupy.cuda.set_pinned_memory_allocator``. It keeps the Pool.

    Raises
    ------
    ImportError
        As :func:`allocator` does.
    TypeError, ValueError
        If `pool` is not a Pool over pinned memory.

    Notes
    -----
    CuPy keeps the memory of its own copies until they are done. Memory that your program requested
    is freed when its last array is dropped. Synchronize before that.

    Examples
    --------
    >>> pinned = arenapy.Pool(source=cuda.Pinned())                        # doctest: +SKIP
    >>> set_allocator = cupy.cuda.set_pinned_memory_allocator              # doctest: +SKIP
    >>> set_allocator(arenapy_cupy.pinned_allocator(pinned))               # doctest: +SKIP
    """
    if not isinstance(pool, Pool):
        raise TypeError(f"{pool!r} is not a Pool; give arenapy.Pool(source=arenapy.cuda.Pinned())")
    if pool.kind != "pinned":
        raise ValueError(
            f"{pool!r} is over {pool.kind} memory, which is not pinned; give "
            "arenapy.Pool(source=arenapy.cuda.Pinned())"
        )
    cupy = library("cupy", OLDEST)
    from arenapy.interop import cupy_blocks

    return cupy_blocks.pinned_allocator_of(pool, cupy.cuda.PinnedMemoryPointer)


def _blocks() -> Any:
    cupy = library("cupy", OLDEST)
    from arenapy.interop import cupy_blocks

    try:
        cupy_blocks.connect()
    except (ImportError, AttributeError, LookupError) as error:
        raise ImportError(
            f"CuPy {cupy.__version__} is not known to arenapy.interop.cupy ({error}); install "
            "another version of CuPy, or one of arenapy"
        ) from error
    return cupy_blocks
