"""Managed memory: where its pages are to be, said beforehand.

What lives here: prefetches and advice. What does not: getting the memory (source, backing).

Both calls of the driver have other arguments since CUDA 13; of each, the one is there that the
installed cuda-python has.
"""
from libc.stdint cimport uint64_t

from arenapy.buffer.block cimport Block, name_of, root_of

from arenapy.cuda.copies cimport CudaMemory, Side, can_be_waited_for, side_of, wait_or_keep
from arenapy.cuda.driver cimport SUCCESS, Location, checked, driver, enter, leave, primary
from arenapy.cuda.stream_ref cimport StreamRef, handle_here

from arenapy.memory.host_request import checked_index

cdef enum:
    HOST = -1                # as arenapy and CUDA 12 have it
    AT_DEVICE = 1            # CU_MEM_LOCATION_TYPE_*
    AT_HOST = 2

#: What may be advised, in the driver's numbers (CU_MEM_ADVISE_*).
ADVICE = {
    "read_mostly": 1,
    "unset_read_mostly": 2,
    "preferred_location": 3,
    "unset_preferred_location": 4,
    "accessed_by": 5,
    "unset_accessed_by": 6,
}


cdef Side managed_block(object buffer, str what):
    """A Buffer of managed memory, pinned for as long as this Side is there."""
    cdef Block block
    cdef Side side
    if not isinstance(buffer, Block):
        raise TypeError(f"{what}: this {type(buffer).__name__} is no Buffer")
    block = <Block>buffer
    side = side_of(block, False, None, None)
    if root_of(block).owner.kind != "managed":
        raise BufferError(
            f"{name_of(block)} is {root_of(block).owner.kind} memory, which stays where it is: "
            "copy_to() brings its bytes elsewhere; what comes of cuda.Managed moves by itself"
        )
    return side


cdef Location place(object device_id) except *:
    """Of a device, or the host; ValueError for what is neither."""
    cdef Location location
    index = checked_index("device_id", device_id)
    if index == HOST:
        location.type, location.id = AT_HOST, 0
    else:
        primary(index)
        location.type, location.id = AT_DEVICE, index
    return location


cdef int in_12(Location location) noexcept nogil:
    return location.id if location.type == AT_DEVICE else HOST


def prefetch(buffer, device_id, stream=None):
    """Move the pages of managed memory to where they are used next.

    Without it, each page moves when it is touched first, at the price of a fault.

    Parameters
    ----------
    buffer : Buffer
        Of `Managed` memory; of a slice, the pages that it has a part of.
    device_id : int
        Ordinal of a device; -1: the host.
    stream : stream, optional
        That does it, in its order; the Buffer is held until it has. By default it is done when
        this returns.

    Raises
    ------
    BufferError
        It is other memory.
    ValueError, TypeError
        It is closed or no Buffer, or there is no such device.
    CudaError
        The driver refused, as where a device has no concurrent managed access (Windows, WSL).

    Notes
    -----
    Thread-safety: may be called from any thread.
    """
    cdef Side side = managed_block(buffer, "prefetch")
    cdef Location to = place(device_id)
    cdef CudaMemory memory = <CudaMemory>root_of(<Block>buffer).owner.hooks
    cdef StreamRef s = memory.own_stream() if stream is None else <StreamRef>memory.named(stream)
    cdef uint64_t address = side.address
    cdef size_t nbytes = side.nbytes
    cdef void* handle = handle_here(s)
    cdef int result
    if nbytes == 0:
        return
    if stream is None:
        can_be_waited_for(s)
    else:
        memory.use(buffer, s)
    with nogil:
        result = enter(s.context)
        if result == SUCCESS:
            if driver.cuMemPrefetchAsync != NULL:
                result = driver.cuMemPrefetchAsync(address, nbytes, to, 0, handle)
            else:
                result = driver.cuMemPrefetchAsync_12(address, nbytes, in_12(to), handle)
            leave()
    checked(result, "cuMemPrefetchAsync")
    if stream is None:
        wait_or_keep(s, [side])


def advise(buffer, advice, device_id=0):
    """Say how managed memory is going to be used, so that the driver places it well.

    Parameters
    ----------
    buffer : Buffer
        Of `Managed` memory; of a slice, the pages that it has a part of.
    advice : {"read_mostly", "preferred_location", "accessed_by"}
        Copies of its pages may be everywhere at once, since it is seldom written to; its pages
        are to stay at `device_id`; `device_id` accesses it, and is to have it mapped. With
        ``"unset_"`` before it: no longer.
    device_id : int
        Ordinal of a device; -1: the host. Does not matter to ``"read_mostly"``.

    Raises
    ------
    BufferError
        It is other memory.
    ValueError, TypeError
        There is no such advice or device, or the Buffer is closed or none.
    CudaError
        The driver refused.

    Notes
    -----
    Thread-safety: may be called from any thread. It holds for the pages, also once the Buffer is
    released, until their region is gone or it is unset.
    """
    cdef Side side = managed_block(buffer, "advise")
    cdef Location where
    cdef void* context
    cdef uint64_t address = side.address
    cdef size_t nbytes = side.nbytes
    cdef int number, result
    if advice not in ADVICE:
        raise ValueError(f"advice={advice!r} is none of {', '.join(map(repr, ADVICE))}")
    number = ADVICE[advice]
    where = place(device_id)
    context = primary(side.device_id)
    if nbytes == 0:
        return
    with nogil:
        result = enter(context)
        if result == SUCCESS:
            if driver.cuMemAdvise != NULL:
                result = driver.cuMemAdvise(address, nbytes, number, where)
            else:
                result = driver.cuMemAdvise_12(address, nbytes, number, in_12(where))
            leave()
    checked(result, "cuMemAdvise")
