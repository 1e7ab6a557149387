"""numba-cuda with arenapy's memory: its External Memory Management plugin.

Contents: numba's side. The memory, and the decision when it is used again, are the Pool's.

numba names no stream when it allocates, and an array may be dropped while a kernel on any stream
still uses it. So a block waits for all blocking streams of its device before it is used again. The
cuMemFree of numba's own manager waits in the same way.

numba calls `initialize` in each call that takes no context from an outer one, so also for each
array. It must not ask the driver every time: cuMemGetInfo takes longer than the rest of the call.
"""

import ctypes
import gc
import importlib
import weakref
from typing import Any

from arenapy.cuda.ordering import used_untold
from arenapy.cuda.sources import Device
from arenapy.errors import OutOfMemory
from arenapy.interop.device_pools import by_device, library
from arenapy.pool.pool import Pool

__all__ = ["manager", "use"]

OLDEST = (0, 20)
LEGACY = 1  # the default stream, after which all blocking streams come
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


def manager(*pools: Pool) -> type:
    """Make an External Memory Management plugin of Pools.

    Parameters
    ----------
    *pools : Pool
        One for each device that the program uses, over ``cuda.Device(n)`` or ``cuda.DriverPool``.

    Returns
    -------
    type
        A subclass of ``numba.cuda.HostOnlyCUDAMemoryManager``, for
        ``numba.cuda.set_memory_manager``. The class and each array keep the Pools alive.

    Raises
    ------
    ImportError
        If numba-cuda is missing or too old. The message says what to install.
    TypeError, ValueError
        If an argument is not a Pool over memory of a device, or two Pools are of one device.

    Notes
    -----
    Device arrays (``device_array``, ``to_device``) are blocks of the Pool. Pinned, mapped and
    managed memory stay numba's own. Views of an array keep its block. The bytes of a dropped array
    are reused when all blocking streams have done the work that they had received before the
    drop. All streams that numba makes are blocking. If an external non-blocking stream uses an
    array, synchronize before you drop it.

    A request that does not fit raises numba's ``CudaAPIError`` of code 2 with the Pool's figures.
    ``get_memory_info()`` counts idle bytes of the Pool as free. ``get_ipc_handle`` raises
    NotImplementedError.

    Examples
    --------
    >>> import arenapy
    >>> from arenapy import cuda
    >>> from arenapy.interop import numba as arenapy_numba
    >>> pool = arenapy.Pool(source=cuda.Device())
    >>> plugin = arenapy_numba.manager(pool)                               # doctest: +SKIP
    >>> numba.cuda.set_memory_manager(plugin)                              # doctest: +SKIP
    """
    pools_of = by_device(pools)
    base = _numba().HostOnlyCUDAMemoryManager
    fields = {"pools": pools_of, "driver": _numba().cudadrv.driver}
    return type("ArenapyMemoryManager", (_Manager, base), fields)


def use(*pools: Pool) -> None:
    """Let numba-cuda allocate its device arrays from Pools.

    Parameters
    ----------
    *pools : Pool
        As for :func:`manager`.

    Raises
    ------
    ImportError, TypeError, ValueError
        As :func:`manager` does. Nothing has changed then.

    Notes
    -----
    You can call it at any time. Arrays that exist keep their memory. To leave a program unchanged,
    set ``NUMBA_CUDA_MEMORY_MANAGER=arenapy.interop.numba`` in its environment. This does the same
    with one Pool for each device.

    Examples
    --------
    >>> arenapy_numba.use(pool)                                            # doctest: +SKIP
    >>> x = numba.cuda.to_device(np.arange(1000))                          # doctest: +SKIP
    """
    plugin = manager(*pools)
    numba_cuda = _numba()
    numba_cuda.set_memory_manager(plugin)
    for device in numba_cuda.cudadrv.driver.driver.devices.values():
        context = device.primary_context
        if context is not None:
            context.memory_manager = plugin(context=context)
            context.memory_manager.initialize()


def __getattr__(name: str) -> Any:
    if name != "_numba_memory_manager":  # for NUMBA_CUDA_MEMORY_MANAGER=arenapy.interop.numba
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    count = _numba().cudadrv.driver.driver.get_device_count()
    return manager(*(Pool(source=Device(ordinal)) for ordinal in range(count)))


def _numba() -> Any:
    library("numba_cuda", OLDEST)
    return importlib.import_module("numba.cuda")


class _Manager:
    """Methods that `manager` adds to numba's base class."""

    pools: dict[int, Pool]
    driver: Any
    context: Any
    deallocations: Any

    def memalloc(self, size: int) -> Any:
        """Return numba's pointer to a new block, which it keeps."""
        pool = self._pool()
        try:
            block = pool.alloc(size, stream=LEGACY)
        except OutOfMemory:
            gc.collect()  # arrays may be in cycles
            try:
                block = pool.alloc(size, stream=LEGACY)
            except OutOfMemory as error:
                raise self.driver.CudaAPIError(OUT_OF_MEMORY, str(error)) from error
        used_untold(block)
        address = ctypes.c_void_p(block.address)
        return self.driver.MemoryPointer(
            weakref.proxy(self.context), address, size, finalizer=block.release
        )

    def initialize(self) -> None:
        """Set the size of the device once. numba calls this again for each array."""
        if not self.deallocations.memory_capacity:
            self.deallocations.memory_capacity = self.get_memory_info().total

    def get_memory_info(self) -> Any:
        """Return the total bytes of the device, and the free ones."""
        numba_cuda = _numba()
        free, total = numba_cuda.cudadrv.driver.driver.cuMemGetInfo()
        return numba_cuda.MemoryInfo(free=free + self._pool().stats().idle_bytes, total=total)

    def get_ipc_handle(self, memory: Any) -> Any:
        """Refuse, because another process would also see the blocks around this one."""
        raise NotImplementedError(
            f"{self._pool()!r} has no IPC handles; copy to an array of numba's own memory manager"
        )

    def _pool(self) -> Pool:
        device = self.context.device
        device = int(getattr(device, "id", device))  # of an attached context, the driver's object
        if device not in self.pools:
            raise RuntimeError(
                f"numba's current device is {device}, and no pool was given for it, only for "
                f"{sorted(self.pools)}; give one for each device that the program uses"
            )
        return self.pools[device]

    @property
    def interface_version(self) -> int:
        """Return the version of numba's plugin interface."""
        return 1
