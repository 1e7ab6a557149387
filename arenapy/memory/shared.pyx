"""Shared memory in other processes: handles, leases, and what keeps sent bytes from reuse.

What lives here: how a Buffer, an array or a Region over a memfd goes through multiprocessing's
pickler, and what the receiver makes of it. What does not: messages of our own (messages), the
mapping itself (sources, vm), fork (region), what a leased range means for an allocator (bump/core,
pool/page_heap, slab/core).

A lease is a read lock on the Buffer's bytes of the memfd, taken through an open file
description of its own, whose descriptor travels. A process that has that descriptor, or has
mapped it, holds the lease: first the message under way, then the receiver (and the children it
forks), which maps the bytes through it and so keeps the lease when it closes the descriptor. The
kernel ends it with the last descriptor and mapping, also when a process is killed. The owner
asks for foreign locks before it hands bytes out again (F_OFD_GETLK; see fcntl(2), "Open file
description locks").
"""
cimport cython
import copyreg
import importlib
import operator
import os
import sys
import warnings
import weakref
from functools import partial
from multiprocessing import context, reduction

import numpy as np

from arenapy.base.system_errors import is_of_system
from arenapy.linux import vm
from arenapy.buffer.buffer import View as _View
from arenapy.memory.claims import claim
from arenapy.memory.host_request import explain_map, refusal
from arenapy.memory.region import in_shared_memory
from libc.errno cimport EBADF, errno
from libc.stdint cimport uintptr_t
from arenapy.buffer.block cimport Block, MemoryOwner, acquire, check_open, is_open, root_of
from arenapy.buffer.buffer cimport Buffer
from arenapy.buffer.pickling import layout_of
from arenapy.memory.children cimport children_between, children_forks
from arenapy.memory.region cimport Region, region_behind
from arenapy.base.sealed cimport seal
from arenapy.linux.vm cimport Descriptor, vm_is_open, vm_keep_leases

# The files that this process has received parts of: (device, inode) to a weakref to ReceivedFile.
# Not a WeakValueDictionary: its callback is Python code, in which a signal's exception is lost.
_received = {}

# A child that is being spawned inherits the very descriptor, after the pickling: until it runs,
# the descriptor has to stay open here. (weakref to its Popen, Descriptor)
_under_way = []


@cython.final
cdef class ReceivedFile:
    """A descriptor of a file for all its regions here, which need one only to send bytes on."""

    cdef Descriptor file
    cdef object __weakref__


seal(ReceivedFile)


cdef ReceivedFile _file_of(Descriptor received):
    """The one descriptor of what was received; None: there can be none.

    Its open file description is none of those that were received, which have leases.
    """
    cdef ReceivedFile kept
    identity = vm.identity(received)
    reference = _received.get(identity)
    kept = None if reference is None else reference()
    if kept is None or not vm_is_open(&kept.file.file):
        kept = ReceivedFile.__new__(ReceivedFile)
        try:
            kept.file = vm.reopen(received.fileno())
        except OSError as error:               # there is no /proc, or no descriptor left
            if not is_of_system(error):
                raise
            return None
        _received[identity] = weakref.ref(kept, partial(_received.pop, identity))
    return kept


# How blocks of a device are sent and received, which only arenapy.cuda knows: see `share_devices`.
_of_devices = []


def share_devices(lend, reduce, receive):
    """Name what sends and receives memory of devices, which this folder knows nothing of."""
    _of_devices[:] = [lend, reduce, receive]
    install()


def is_on_device(Buffer buffer not None):
    """True if the host cannot access a Buffer's bytes, so that they are not sent as others are."""
    return not root_of(buffer).owner.host_accessible


def lend_of_device(buffer):
    """`lend` of arenapy.cuda.sharing."""
    return _devices()[0](buffer)


def receive_of_device(*arguments):
    """`receive_buffer` of arenapy.cuda.sharing."""
    return _devices()[2](*arguments)


cdef list _devices():
    if not _of_devices:
        importlib.import_module("arenapy.cuda.sharing")    # it calls `share_devices`
    return _of_devices


def install():
    """Teach multiprocessing's pickler Buffers, arrays and Regions.

    What the program has registered for a class itself stays. Again, it does nothing.
    """
    known = reduction.ForkingPickler._extra_reducers
    for kind in (Buffer, _View):
        known.setdefault(kind, reduce_buffer)
    known.setdefault(np.ndarray, reduce_array)
    # multiprocessing looks up the exact class. numpy.ma is not imported for this: it takes 10 ms.
    for kind in (np.matrix, np.recarray):
        known.setdefault(kind, reduce_subclass)
    if "numpy.ma" in sys.modules:
        known.setdefault(np.ma.MaskedArray, reduce_subclass)
    known.setdefault(Region, reduce_region)


cdef Region _region_of(Buffer buffer):
    """The shared region that a Buffer's bytes are in, or None."""
    cdef Region region = region_behind(buffer)
    if region is None or region.kind != "shared" or region.file.fd < 0:
        return None
    return region


def last_fork():
    """The number of the last fork. A child continues with the numbers of its parent.

    Only the forks count at which a child sees memory that this process allocates from.
    """
    return children_forks()


def child_lives(Region region not None, long long after, long long until):
    """True if a child that sees the region lives, from the forks after one number up to another."""
    return after < until and (
        region.lease_lost or children_between(&region.seens, after, until))


def leased_file(Buffer buffer not None):
    """The Buffer's memory, leased for as long as somebody has the descriptor.

    Returns
    -------
    tuple[Descriptor, int, Region] or None
        The descriptor, where the Buffer's bytes begin in the file, and their region. None if the
        memory is not shared, or there are no bytes.
    """
    cdef Region region
    cdef long long offset
    check_open(buffer)                         # else its region may be gone
    region = _region_of(buffer)
    if region is None or buffer.size == 0:
        return None
    acquire(buffer, False)
    root_of(buffer).owner.expect_leases(False)
    region.sent = True
    offset = buffer.ptr - region.ptr + region.file_offset
    file = region.reopened()
    try:
        vm.lease(file.fileno(), offset, buffer.size)
    except BaseException:
        file.close()
        raise
    return file, offset, region


def reduce_buffer(Buffer buffer not None):
    """A handle if the memory is shared (the bytes are leased from now on), else a copy."""
    if is_on_device(buffer):
        return _devices()[1](buffer)
    leased = leased_file(buffer)
    if leased is None:
        return buffer.__reduce_ex__(2)
    file, offset, region = leased
    with file:
        handle = handle_of(file)
    return receive_buffer, (
        handle, _identity(region), offset, buffer.size, region.page_size, buffer.readonly,
        layout_of(buffer),
    )


def bytes_of(array):
    """The Buffer of exactly the bytes that an array lies in, and where in it the first item is.

    Returns
    -------
    tuple[Buffer, int] or None
        None if they are not in a Buffer over shared memory: to send them, they are copied.
    """
    cdef Block root
    cdef uintptr_t low, high
    base = array
    while isinstance(base, (np.ndarray, memoryview)):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    if not isinstance(base, Buffer) or array.nbytes == 0:
        return None
    root = root_of(<Buffer>base)
    if not is_open(root) or _region_of(<Buffer>root) is None:
        return None
    # C code may give an array any base, to keep it alive.
    low, high = np.lib.array_utils.byte_bounds(array)
    if low < <uintptr_t>root.ptr or high > <uintptr_t>root.ptr + root.size:
        return None
    first = array.__array_interface__["data"][0]
    return (<Buffer>root)[low - <uintptr_t>root.ptr : high - <uintptr_t>root.ptr], first - low


_warned = False

_COPIED = (
    "an array of {1} bytes in Shared memory was copied into a message, so the receiver's writes "
    "are not seen here. No open Buffer keeps its memory: numpy_memory allocated it, or it was made "
    "by stride tricks or another library. To share it, allocate it with empty(), zeros() or copy() "
    "of an allocator over Shared(), and make such views in the receiver. This is said once"
)


class _AsItself:
    """An array that is pickled as if multiprocessing's pickler had no reducer of ours for it.

    A reducer does not know the protocol, on which the form of an array depends. This method does.
    """

    def __init__(self, array):
        self.array = array

    def __reduce_ex__(self, protocol):
        reduce = copyreg.dispatch_table.get(type(self.array))
        return reduce(self.array) if reduce else self.array.__reduce_ex__(protocol)


cdef object copy_of(object array, str says):
    """A copy, which is what the class itself makes. Of shared memory it is told of, once."""
    global _warned
    if not _warned and array.nbytes and in_shared_memory(array.__array_interface__["data"][0]):
        _warned = True
        text = says.format(type(array).__name__, array.nbytes)
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    return operator.getitem, ((_AsItself(array),), 0)      # the array, without a function of ours


def reduce_array(array):
    """A handle if a Buffer over shared memory keeps the array's bytes, else a copy."""
    found = bytes_of(array)
    if found is None and array.dtype.hasobject:
        # All protocols have one form of it, in which it may contain itself. It is in no memory of
        # ours.
        return _AsItself(array).__reduce_ex__(2)
    if found is None:
        return copy_of(array, _COPIED)
    buffer, at = found
    received = reduce_buffer(buffer)[1]
    return receive_array, (
        received[:6], array.shape, array.strides, at, array.dtype, array.flags.writeable
    )


_SUBCLASS = (
    "a {} of {} bytes in Shared memory was copied into a message, so the receiver's writes are "
    "not seen here. Only arrays of the class numpy.ndarray are shared. Send x.view(numpy.ndarray), "
    "or x.data and x.mask of a masked array, and make such an array of it in the receiver. This is "
    "said once"
)


def reduce_subclass(array):
    """A copy: only arrays of the class numpy.ndarray go as handles."""
    return copy_of(array, _SUBCLASS)


def reduce_region(Region region not None):
    """A handle of the whole region. It leases nothing: Buffers made from it there do."""
    cdef MemoryOwner user
    if region.kind != "shared" or region.file.fd < 0 or region.gone:
        return region.__reduce_ex__(2)         # says why not
    region.sent = True
    user = region.living_user()
    if user is not None:
        user.expect_leases(False)
    with region.reopened() as file:
        handle = handle_of(file)
    return receive_region, (
        handle, _identity(region), region.file_offset, region.size, region.page_size,
    )


cdef tuple _identity(Region region):
    """Which file it is, in any process."""
    return region.file.device, region.file.inode


def handle_of(Descriptor file not None):
    """multiprocessing's handle of a descriptor, which it duplicates but for spawned children."""
    cdef Descriptor inherited = Descriptor.__new__(Descriptor)
    forget_arrived()
    popen = context.get_spawning_popen()
    if popen is None:
        return reduction.DupFd(file.file.fd)
    _under_way.append((weakref.ref(popen), inherited))
    file.take(&inherited.file)
    return reduction.DupFd(inherited.file.fd)


def forget_arrived():
    """Close our copies of descriptors whose receivers run by now (or never will).

    No Python code runs here: a scope that ends calls it.
    """
    for entry in list(_under_way):
        popen = entry[0]()
        if popen is None or getattr(popen, "pid", None) is not None:
            try:
                _under_way.remove(entry)
            except ValueError:                 # another thread was faster
                pass


def detached(handle, nbytes):
    """The descriptor of a handle, or of a message of our own: the caller's from here on."""
    cdef Descriptor file = Descriptor.__new__(Descriptor)      # before there is anything to own
    try:
        if isinstance(handle, Descriptor):
            (<Descriptor>handle).take(&file.file)
        else:
            file.own(handle.detach())
    except (ConnectionError, FileNotFoundError, EOFError) as error:
        raise ConnectionError(
            f"the {nbytes} bytes of memory in this message cannot be reached: their sender has "
            "ended, or is on another machine. It has to live until the message is read. "
            "arenapy.send() needs no living sender, nor does a copy (numpy.array(x))"
        ) from error
    return file


def _map(handle, identity, offset, nbytes, page_size, readonly=False, holes=False):
    """Map a part of the file behind a handle, populated; the mapping keeps the lease.

    If it may have `holes` and has one, it stays as it is: a hole would take memory.
    """
    cdef Descriptor file
    cdef ReceivedFile kept
    cdef Region region
    install()                                  # so that it can be sent on
    file = detached(handle, nbytes)
    start = offset // page_size * page_size
    what = "received shared memory"
    with file:
        os.set_inheritable(file.fileno(), False)
        if identity is not None and (file.file.device, file.file.inode) != identity:
            raise OSError(
                EBADF, "the received memory is not the memory that was sent: code of the sender "
                "closed descriptors that it did not open, while the message was under way"
            )
        try:
            mapping = vm.map_memory(
                offset - start + nbytes, fd=file.fileno(), shared=True, offset=start,
                page_size=page_size,
            )
        except OSError as error:
            raise explain_map(error, what, nbytes) from error
        with mapping:
            try:
                if not (holes and os.lseek(file.fileno(), start, os.SEEK_HOLE) < offset + nbytes):
                    vm.prefault(mapping.address, offset - start + nbytes)
            except OSError as error:
                raise refusal(error, f"cannot fault in {what}: {error.strerror}") from error
            # Its leases keep the owner's allocator off, so that nobody need be asked, who may be in
            # this very process. Others are to keep off.
            first = file.file.device, file.file.inode, offset, offset + nbytes, False
            with claim([first], what, anyway=True, shared=True) as viewed:
                kept = _file_of(file)
                region = Region.from_address(
                    mapping.address + offset - start, nbytes, kind="shared", fork="closed",
                    owner=viewed, file_offset=offset, page_size=page_size, readonly=readonly,
                    mapping=mapping, descriptor=file if kept is None else None,
                )
                if kept is not None:
                    region.file_owner, region.file, region.messages = kept, kept.file.file, True
                return region


def receive_buffer(handle, identity, offset, nbytes, page_size, readonly, layout):
    """The receiver's Buffer over the same memory; its region's mapping keeps the lease."""
    cdef Buffer buffer = _map(handle, identity, offset, nbytes, page_size, readonly).buffer()
    if layout is not None:
        buffer = buffer.view(*layout)
    return buffer


def receive_array(received, shape, strides, at, dtype, writeable):
    """The receiver's array over the same memory."""
    _check_inside(shape, strides, at, np.dtype(dtype).itemsize, received[3])
    buffer = receive_buffer(*received, None)
    # Not the Buffer itself: if its export fails, NumPy asks again for one that is read-only.
    array = np.ndarray(shape, dtype, buffer.array(), at, strides)
    if not writeable:
        array.flags.writeable = False
    return array


def _check_inside(shape, strides, at, itemsize, nbytes):
    """NumPy's own check multiplies in 64 bits, and takes a stride of 2**62 for a small one."""
    spans = [(n - 1) * stride for n, stride in zip(shape, strides)]
    low = at + sum(min(span, 0) for span in spans)
    high = at + sum(max(span, 0) for span in spans) + itemsize
    if min(shape, default=0) < 0 or (0 not in shape and (low < 0 or high > nbytes)):
        raise ValueError(
            f"an array of shape {shape} and strides {strides}, whose first item is at byte {at}, "
            f"is not inside its memory of {nbytes} bytes; close the connection"
        )


def receive_region(handle, identity, offset, nbytes, page_size):
    """The receiver's Region over the same memory."""
    cdef Region region = _map(handle, identity, offset, nbytes, page_size, holes=True)
    region.received, region.shared = True, False
    return region


def leased_window(Region region not None, Py_ssize_t offset, Py_ssize_t nbytes):
    """A region for one Buffer of a received one: same mapping, own lease.

    The mapping made for it is a page that keeps the lease.
    """
    cdef Region window = Region.from_address(
        region.address + offset, nbytes, kind="shared", owner=region,
        file_offset=region.file_offset + offset, page_size=region.page_size,
    )
    with region.reopened() as file:
        vm.lease(file.fileno(), window.file_offset, nbytes)
        page = vm_keep_leases((<Descriptor>file).file.fd, region.page_size)
        if page == NULL:
            error = OSError(errno, os.strerror(errno))
            text = f"cannot lease {nbytes} bytes of {region!r}: {error.strerror}"
            raise refusal(error, text)
        window.map_ptr, window.map_size = <size_t>page, region.page_size
    window.parent, window.shared = region, True
    return window
