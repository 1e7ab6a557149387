"""numba-cuda with arenapy's memory: its External Memory Management plugin.

What lives here: numba's side. What does not: memory, and when it may be used again (the pool).

numba names no stream when it allocates, and an array may be dropped while a kernel on any stream
still uses it. So a block waits for all of its device's blocking streams before it is used again, as
it would behind numba's own cuMemFree.
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
        ``numba.cuda.set_memory_manager``. It keeps the Pools, and so does each array.

    Raises
    ------
    ImportError
        There is no numba-cuda, or it is too old; the message says what to install.
    TypeError, ValueError
        For what is no Pool, a Pool that is not over memory of a device, or two of one device.

    Notes
    -----
    It has the device arrays (``device_array``, ``to_device``). Pinned, mapped and managed memory
    stay numba's own. Views of an array keep its block. A dropped array's bytes are used again when
    all blocking streams have done what they were given by then, which includes all that numba
    makes; synchronize before an array is dropped that an external non-blocking stream uses.

    A request that does not fit raises numba's ``CudaAPIError`` of code 2 with the Pool's figures.
    ``get_memory_info()`` counts idle bytes of the Pool as free. Blocks have no IPC handles:
    ``get_ipc_handle`` raises NotImplementedError.

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
        As :func:`manager` does; nothing has changed then.

    Notes
    -----
    It can be called at any time: arrays that exist keep their memory. For a program that is not to
    be changed, ``NUMBA_CUDA_MEMORY_MANAGER=arenapy.interop.numba`` in its environment does the
    same, with one Pool for each device.

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
    """What `manager` gives, on top of numba's base class."""

    pools: dict[int, Pool]
    driver: Any
    context: Any
    deallocations: Any

    def memalloc(self, size: int) -> Any:
        """Numba's pointer to a block, which keeps it."""
        pool = self._pool()
        try:
            block = pool.alloc(size)
        except OutOfMemory:
            gc.collect()  # arrays may be in cycles
            try:
                block = pool.alloc(size)
            except OutOfMemory as error:
                raise self.driver.CudaAPIError(OUT_OF_MEMORY, str(error)) from error
        used_untold(block)
        address = ctypes.c_void_p(block.address)
        return self.driver.MemoryPointer(
            weakref.proxy(self.context), address, size, finalizer=block.release
        )

    def initialize(self) -> None:
        """A context begins to use it."""
        self.deallocations.memory_capacity = self.get_memory_info().total

    def get_memory_info(self) -> Any:
        """What the device has, and has free."""
        numba_cuda = _numba()
        free, total = numba_cuda.cudadrv.driver.driver.cuMemGetInfo()
        return numba_cuda.MemoryInfo(free=free + self._pool().stats().idle_bytes, total=total)

    def get_ipc_handle(self, memory: Any) -> Any:
        """Refuse: other processes would see the blocks around it, too."""
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
        """Of numba's plugins."""
        return 1
