"""Devices: what memory they have, and the heap that kernels allocate from.

What lives here: questions to a device. What does not: memory of ours.
"""
import operator
from dataclasses import dataclass

from arenapy.base.sizes cimport as_size
from arenapy.cuda.driver cimport SUCCESS, checked, driver, enter, leave, primary

from arenapy.allocator.allocator import live_allocators
from arenapy.cuda.driver import device_count
from arenapy.cuda.ordering import memory_of

cdef enum:
    NAME_BYTES = 256
    MALLOC_HEAP_SIZE = 2     # CU_LIMIT_MALLOC_HEAP_SIZE


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of one device in bytes, as its driver counts it.

    Attributes
    ----------
    device_id : int
        Ordinal of the device.
    name : str
        The driver's name of the device.
    free_bytes, total_bytes : int
        Memory that is free for any process, and all memory of the device.
    reserved_bytes, allocated_bytes : int
        Memory that the allocators of arenapy in this process reserved (`Device`, `DriverPool`,
        `Managed`), and the part of it in blocks. The names are those of torch.

    Examples
    --------
    >>> from arenapy import cuda
    >>> memory = cuda.memory_info(0)
    >>> memory.free_bytes <= memory.total_bytes
    True
    """

    device_id: int
    name: str
    free_bytes: int
    total_bytes: int
    reserved_bytes: int = 0
    allocated_bytes: int = 0


cdef object ordinal_of(object device_id):
    try:
        return operator.index(device_id)
    except TypeError:
        raise TypeError(
            f"device_id={device_id!r} is not an ordinal of a device; give 0, 1, ..."
        ) from None


def memory_info(device_id=0):
    """Free and total memory of a device, and the memory of allocators in this process.

    Parameters
    ----------
    device_id : int
        Ordinal of the device.

    Returns
    -------
    DeviceMemory

    Raises
    ------
    Unavailable
        If there is no driver, no device or no cuda-python.
    ValueError, TypeError
        If `device_id` is not a device.
    CudaError
        If the driver refused.

    Notes
    -----
    Thread-safety: may be called from any thread. The first call makes the device's primary context,
    which takes some hundred MiB of its memory and some 100 ms.

    Examples
    --------
    >>> from arenapy import cuda
    >>> cuda.memory_info().reserved_bytes    # no allocator has any yet
    0
    """
    device_id = ordinal_of(device_id)
    name, free_bytes, total_bytes = driver_memory(device_id)
    return DeviceMemory(device_id, name, free_bytes, total_bytes, *in_use(device_id))


def in_use(int device_id):
    """Internal: bytes that allocators have reserved of a device, and that are in blocks."""
    reserved = allocated = 0
    for one in live_allocators():
        memory, _ = memory_of(one)
        if memory.device_id == device_id and memory.kind in ("device", "managed"):
            stats = one.stats()
            bump = hasattr(stats, "live_bytes")
            reserved += stats.capacity if bump else stats.reserved_bytes
            allocated += stats.live_bytes if bump else stats.allocated_bytes
    return reserved, allocated


def driver_memory(index):
    """Internal: the name of a device, free and total bytes, as its driver says."""
    cdef size_t free_bytes = 0, total_bytes = 0
    cdef void* context = primary(index)
    cdef int ordinal = index                 # one of a device, now
    cdef char[NAME_BYTES] name
    cdef int device = 0, result
    name[0] = 0
    with nogil:
        result = enter(context)
        if result == SUCCESS:
            result = driver.cuMemGetInfo(&free_bytes, &total_bytes)
            if result == SUCCESS:
                result = driver.cuDeviceGet(&device, ordinal)
            if result == SUCCESS:
                result = driver.cuDeviceGetName(name, NAME_BYTES, device)
            leave()
    checked(result, "cuMemGetInfo")
    return name.decode(errors="replace"), free_bytes, total_bytes


def device_heap_limit(nbytes=None, device_id=0):
    """The heap from which kernels' own ``malloc`` and ``new`` allocate, in bytes.

    Parameters
    ----------
    nbytes : int, optional
        The new size. It can only be set before the first kernel that uses the heap is loaded.
    device_id : int
        Ordinal of the device.

    Returns
    -------
    int
        The present size, which may be more than `nbytes`.

    Raises
    ------
    ValueError, TypeError
        If an argument is not a size or not a device.
    Unavailable, CudaError
        As :func:`memory_info`. CudaError also if it is too late to set the size.

    Notes
    -----
    Thread-safety: may be called from any thread. The limit applies to the process.

    Examples
    --------
    >>> from arenapy import cuda
    >>> cuda.device_heap_limit(64 << 20) >= 64 << 20
    True
    """
    cdef void* context
    cdef size_t limit = 0 if nbytes is None else as_size(nbytes, "nbytes")
    cdef bint change = nbytes is not None
    cdef int result
    context = primary(ordinal_of(device_id))
    with nogil:
        result = enter(context)
        if result == SUCCESS:
            if change:
                result = driver.cuCtxSetLimit(MALLOC_HEAP_SIZE, limit)
            if result == SUCCESS:
                result = driver.cuCtxGetLimit(&limit, MALLOC_HEAP_SIZE)
            leave()
    checked(result, "cuCtxSetLimit" if change else "cuCtxGetLimit")
    return limit


def devices():
    """The memory of every device.

    Errors are those of :func:`memory_info`.

    Returns
    -------
    list of DeviceMemory

    Examples
    --------
    >>> from arenapy import cuda
    >>> [memory.device_id for memory in cuda.devices()][0]
    0
    """
    return [memory_info(ordinal) for ordinal in range(device_count())]
