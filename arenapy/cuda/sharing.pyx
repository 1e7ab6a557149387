"""Blocks of `Device(grow=True)` in other processes: what is sent, and what keeps it from reuse.

What lives here: the lease of a block that was sent, and the Buffer that a receiver makes. What does
not: the ways that a message takes (memory/shared, memory/messages), the driver's handles and
mappings (backing), and where released blocks wait (ordering).

A message has one descriptor: a bundle (`vm.bundle`) of the lease and of the pages that have the
block, each exported by the driver. So the kernel drops all of them with the message.

A lease is a read lock on one byte of a file without bytes, through an open file description of its
own, which travels. Whoever has it, or has mapped it, holds the lease: first the message under way,
then the receiver (and the children it forks), which maps a page of it until its mapping of the
block is gone. The kernel ends it with the last of them, also when a process is killed. To the
sender's allocator, the lease is one more use of the block, beside those of streams: a fence that is
over when nobody holds the lease. Released blocks wait for it as they wait for a graph. It is not a
range of the region as in Shared memory, since every way by which memory of a device becomes free
asks for the uses of a block, and only some ask for ranges.

Pages are sent as a whole, so a receiver could see what lies beside the block in them.
"""
cimport cython
import os
import struct
import threading

from libc.errno cimport EBADF

from arenapy.base.sealed cimport seal
from arenapy.buffer.block cimport check_open, pin, root_of, unpin, uses_of
from arenapy.buffer.buffer cimport Buffer
from arenapy.cuda.backing cimport DEVICE_PAGE, exported_pages, imported_region
from arenapy.cuda.copies cimport CudaMemory, streams_of
from arenapy.cuda.driver cimport SUCCESS, checked, driver, need
from arenapy.cuda.fence cimport Fence, refuse_captured
from arenapy.cuda.ordering cimport Ordering
from arenapy.cuda.stream_ref cimport StreamRef, spread
from arenapy.linux.vm cimport (
    Descriptor, OpenFile, vm_first_lease, vm_is_open, vm_lease, vm_lease_file, vm_reopen,
)
from arenapy.memory.region cimport Region, region_behind

from arenapy.buffer.pickling import layout_of
from arenapy.cuda.backing import device_memory
from arenapy.cuda.driver import device_count
from arenapy.cuda.errors import CudaError
from arenapy.linux import vm
from arenapy.memory import shared

cdef enum:
    UUID_BYTES = 16          # of a CUuuid
    MAX_PAGES = 1 << 20      # of a message: 2 TiB

#: What of a message says which bytes: the device's UUID, and where in the first page they begin.
PLACE = struct.Struct("<16sQ")

cdef object opening = threading.Lock()
cdef OpenFile lease_file             # once it is open, for good
cdef long long leases = 0            # ever: the byte of the last one
lease_file.fd = -1


# ---- leases ------------------------------------------------------------------------------

@cython.final
cdef class LeaseFence(Fence):
    """The lease of a block, which other processes hold. Internal."""

    cdef long long at                # the byte that is locked while somebody does
    cdef bint over

    cdef bint passed(self) noexcept:
        cdef long long first, n
        if not self.over:
            try:
                shared.forget_arrived()      # what has arrived need not be kept here as well
            except Exception:
                pass
            # If nobody can be asked any more, it is never over.
            self.over = vm_is_open(&lease_file) and vm_first_lease(
                lease_file.fd, self.at, 1, &first, &n) == 0
        return self.over

    cdef bint wait(self, StreamRef stream) noexcept:
        return self.passed()                 # nobody knows when the receiver lets go


seal(LeaseFence)


cdef Descriptor new_lease(LeaseFence fence):
    """What travels; `fence` is over when nobody has it any more."""
    global leases
    cdef Descriptor file = Descriptor.__new__(Descriptor)      # before there is anything to own
    cdef int fd, rc = 0
    with opening:
        if not vm_is_open(&lease_file):
            if leases:
                raise OSError(
                    EBADF, "blocks of a device cannot be sent any more: other code closed the "
                    "descriptor of their leases; do not close descriptors that you did not open"
                )
            rc = vm_lease_file(&lease_file)
        fd = vm_reopen(&lease_file) if rc == 0 else rc
        leases += fd >= 0
        fence.at = leases
    if fd < 0:
        raise OSError(-fd, f"cannot lease a block: {os.strerror(-fd)}")
    file.own(fd)
    rc = vm_lease(fd, fence.at, 1)
    if rc < 0:
        raise OSError(-rc, f"cannot lease a block: {os.strerror(-rc)}")
    return file


# ---- sending -----------------------------------------------------------------------------

def lend(Buffer buffer not None):
    """The Buffer's memory, leased for as long as somebody has the descriptor.

    Waits until the streams that were told of the block have done their work, and its own.

    Returns
    -------
    tuple[Descriptor, bytes]
        The descriptor of the message, and which bytes they are: what `receive_buffer` takes.

    Raises
    ------
    BufferError
        If the memory cannot be exported, or there are no bytes.
    CudaError
        If one of the streams is being captured into a graph, or the block is a graph's.
    OSError
        If there is no descriptor left, or no room for those of its pages (one for each 2 MiB).
    """
    cdef Region region
    cdef Ordering order
    cdef LeaseFence fence = LeaseFence.__new__(LeaseFence)
    cdef Descriptor lease
    cdef size_t offset
    check_open(buffer)
    if buffer.size == 0:
        raise BufferError("there is nothing to share: it has no bytes")
    pin(buffer)
    try:
        region = region_behind(buffer)
        offset = <size_t>(buffer.ptr - region.ptr)
        pages = exported_pages(region, offset, buffer.size)
        if pages is None:
            raise refusal(buffer, region)
        order = <Ordering?>root_of(buffer).owner.hooks
        if order.graph is not None:
            raise CudaError(
                "a block that was allocated in a capture is the graph's, so it cannot be sent: "
                "allocate it before the capture")
        order.ready(buffer, None)
        # Also one in whose capture it was named: `ready` waits for what was named before.
        for one in streams_of(spread(uses_of(buffer))):
            if (<StreamRef>one).captures():
                refuse_captured(<StreamRef>one)
        lease = new_lease(fence)
        order.note(buffer, fence)            # before anybody else has it
        message = vm.bundle([lease, *pages])
        return message, PLACE.pack(uuid_of(region.device_id), offset % DEVICE_PAGE)
    finally:
        unpin(buffer)


cdef object refusal(Buffer buffer, Region region):
    if region.shared:
        return BufferError(
            f"{buffer.size} bytes of a device were received from another process: let that one "
            "send them, or send a copy")
    return BufferError(
        f"{buffer.size} bytes are in memory of a device that cannot be shared: copy them to a "
        "block of a Bump or Pool over cuda.Device(grow=True), on a device and system that can "
        "export memory as a descriptor")


def reduce_buffer(Buffer buffer not None):
    """For multiprocessing's pickler: a handle."""
    file, place = lend(buffer)
    with file:
        handle = shared.handle_of(file)
    return receive_handle, (handle, place, buffer.size, buffer.readonly, layout_of(buffer))


# ---- receiving ---------------------------------------------------------------------------

def receive_handle(handle, bytes place not None, nbytes, readonly, layout):
    """The Buffer of a handle of multiprocessing's."""
    with shared.detached(handle, nbytes) as file:
        return receive_buffer(file, place, nbytes, readonly, layout)


def receive_buffer(Descriptor file not None, bytes place, size_t nbytes, bint readonly, layout):
    """The receiver's Buffer over the same bytes of the device; its mapping keeps the lease.

    What a sender has said may be anything.

    Raises
    ------
    ValueError
        If the message is not one of `lend`.
    CudaError, OutOfMemory, Unavailable
        If the driver cannot map the memory, or there is none.
    BufferError
        If this process does not see the device.
    """
    cdef Buffer buffer
    cdef size_t pages
    need()
    uuid, skip = PLACE.unpack(place)
    if skip >= DEVICE_PAGE or not 0 < nbytes <= <size_t>MAX_PAGES * DEVICE_PAGE - skip:
        raise ValueError(
            f"the message names {nbytes} bytes at {skip} of a page; close the connection")
    pages = (skip + nbytes + DEVICE_PAGE - 1) // DEVICE_PAGE
    parts = vm.unbundled(file.fileno())
    if len(parts) != 1 + pages:
        raise ValueError(
            f"the message has {len(parts)} descriptors, and {1 + pages} are needed for {nbytes} "
            "bytes; raise RLIMIT_NOFILE if this process has no more, or close the connection")
    memory = device_memory(ordinal_of(uuid))
    buffer = imported_region(
        <CudaMemory>memory, parts[1:], <Descriptor>parts[0], skip, nbytes, readonly).buffer()
    if layout is not None:
        buffer = buffer.view(*layout)
    return buffer


cdef bytes uuid_of(int ordinal):
    cdef char[UUID_BYTES] uuid
    cdef int device = 0, result
    with nogil:
        result = driver.cuDeviceGet(&device, ordinal)
        if result == SUCCESS:
            result = driver.cuDeviceGetUuid(uuid, device)
    checked(result, "cuDeviceGetUuid")
    return uuid[:UUID_BYTES]


cdef int ordinal_of(bytes uuid) except -1:
    for ordinal in range(device_count()):
        if uuid_of(ordinal) == uuid:
            return ordinal
    raise BufferError(
        "the memory in this message is on a device that this process does not see; set "
        "CUDA_VISIBLE_DEVICES so that it does"
    )


shared.share_devices(lend, reduce_buffer, receive_buffer)
