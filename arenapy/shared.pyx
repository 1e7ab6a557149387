"""Shared memory in other processes: handles, leases, and what keeps sent bytes from reuse.

What lives here: how a Buffer or a Region over a memfd goes through multiprocessing's pickler,
and what the receiver makes of it. What does not: the mapping itself (source, vm), fork
(region), what a leased range means for an allocator (space, pages, slab_core).

A lease is a read lock on the Buffer's bytes of the memfd, taken through an open file
description of its own, whose descriptor is what travels. Whoever has that descriptor holds the
lease: first the message under way, then the receiver (and the children it forks). The kernel
ends it with the last copy of the descriptor, also when a process is killed. The owner asks
for foreign locks before it hands bytes out again (F_OFD_GETLK; see fcntl(2), "Open file
description locks").
"""
import os
import weakref
from multiprocessing import context, reduction

from arenapy import vm
from arenapy.buffer import View as _View
from arenapy.request import explain_map, refusal
from arenapy.block cimport Keeper, acquire, check_open, root_of
from arenapy.buffer cimport Buffer
from arenapy.pickling import layout_of
from arenapy.region cimport Region
from arenapy.regions cimport RegionSet

# A child that is being spawned inherits the very descriptor, after the pickling: until it runs,
# the descriptor has to stay open here. (weakref to its Popen, descriptor)
_under_way = []


def install():
    """Teach multiprocessing's pickler Buffers and Regions. Done again, it does nothing."""
    for kind in (Buffer, _View):
        reduction.ForkingPickler.register(kind, reduce_buffer)
    reduction.ForkingPickler.register(Region, reduce_region)


cdef Region _region_of(Buffer buffer):
    """The shared region that a Buffer's bytes are in, or None."""
    cdef Keeper keeper = root_of(buffer).keeper
    cdef Region region
    cdef size_t at = <size_t>root_of(buffer).ptr
    if isinstance(keeper, RegionSet):
        for region in (<RegionSet>keeper).listed():
            if at - <size_t>region.ptr < region.size:
                break
    elif isinstance(keeper, Region):
        region = <Region>keeper
    else:
        return None
    return region if region.kind == "shared" and region.descriptor >= 0 else None


def reduce_buffer(Buffer buffer not None):
    """A handle if the memory is shared (the bytes are leased from now on), else a copy."""
    cdef Region region = _region_of(buffer)
    cdef Keeper keeper = root_of(buffer).keeper
    cdef long long offset
    check_open(buffer)
    if region is None or buffer.size == 0:
        return buffer.__reduce_ex__(2)
    acquire(buffer, False)
    keeper.expect_leases()
    region.sent = True
    offset = buffer.ptr - region.ptr + region.file_offset
    fd = vm.reopen(region.descriptor)
    try:
        vm.lease(fd, offset, buffer.size)
        handle = _send(fd)
    except BaseException:
        os.close(fd)
        raise
    return receive_buffer, (
        handle, offset, buffer.size, region.page_size, buffer.readonly, layout_of(buffer),
    )


def reduce_region(Region region not None):
    """A handle of the whole region. It leases nothing: Buffers made from it there do."""
    if region.kind != "shared" or region.descriptor < 0 or region.gone:
        return region.__reduce_ex__(2)         # says why not
    region.sent = True
    if region.user != NULL:
        (<Keeper>region.user).expect_leases()
    fd = vm.reopen(region.descriptor)
    try:
        handle = _send(fd)
    except BaseException:
        os.close(fd)
        raise
    return receive_region, (handle, region.file_offset, region.size, region.page_size)


cdef object _send(int fd):
    """multiprocessing's handle of a descriptor; takes the descriptor over."""
    settle()
    handle = reduction.DupFd(fd)
    popen = context.get_spawning_popen()
    if popen is None:
        os.close(fd)                           # the handle has made a duplicate
    else:
        _under_way.append((weakref.ref(popen), fd))
    return handle


def settle():
    """Close our copies of descriptors whose receivers run by now (or never will)."""
    for entry in list(_under_way):
        popen = entry[0]()
        if popen is None or getattr(popen, "pid", None) is not None:
            try:
                _under_way.remove(entry)
            except ValueError:
                continue                       # another thread was faster
            os.close(entry[1])


def _map(handle, offset, nbytes, page_size, readonly=False):
    """Map a part of the file behind a handle, populated; the region owns the descriptor."""
    cdef Region region
    install()                                  # so that it can be sent on
    fd = handle.detach()
    start = offset // page_size * page_size
    what = "received shared memory"
    try:
        try:
            address, map_address, map_nbytes = vm.map_memory(
                offset - start + nbytes, fd=fd, shared=True, offset=start, page_size=page_size
            )
        except OSError as error:
            raise explain_map(error, what, nbytes) from error
        try:
            try:
                vm.prefault(address, offset - start + nbytes)
            except OSError as error:
                raise refusal(error, f"cannot fault in {what}: {error.strerror}") from error
            region = Region.from_address(
                address + offset - start, nbytes, kind="shared", fork="closed", fd=fd,
                file_offset=offset, map_address=map_address, map_nbytes=map_nbytes,
                page_size=page_size, readonly=readonly,
            )
        except BaseException:
            vm.unmap(map_address, map_nbytes)
            raise
    except BaseException:
        os.close(fd)
        raise
    return region


def receive_buffer(handle, offset, nbytes, page_size, readonly, layout):
    """The receiver's Buffer over the same memory; its region's descriptor is the lease."""
    cdef Buffer buffer = _map(handle, offset, nbytes, page_size, readonly).buffer()
    if layout is not None:
        buffer = buffer.view(*layout)
    return buffer


def receive_region(handle, offset, nbytes, page_size):
    """The receiver's Region over the same memory."""
    cdef Region region = _map(handle, offset, nbytes, page_size)
    region.received = True
    return region


def leased_window(Region region not None, Py_ssize_t offset, Py_ssize_t nbytes):
    """A region for one Buffer of a received one: same mapping, own descriptor, own lease."""
    cdef Region window
    fd = vm.reopen(region.descriptor)
    try:
        vm.lease(fd, region.file_offset + offset, nbytes)
        window = Region.from_address(
            region.address + offset, nbytes, kind="shared", owner=region, fd=fd,
            file_offset=region.file_offset + offset, page_size=region.page_size,
        )
    except BaseException:
        os.close(fd)
        raise
    window.parent = region
    return window
