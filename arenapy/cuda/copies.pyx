"""Copies: moving bytes into memory of CUDA, out of it and inside it.

What lives here: what both sides of a copy are, who does it, and what lives until it is done. What
does not: when released memory may be used again (ordering).

With a stream the driver copies in that stream's order, and the call returns before: blocks of
arenapy are then used by the stream (`Ordering.use`), other objects are kept until it is done. The
host's ordinary (pageable) memory is an exception, of which the driver makes a copy first, or for
which it waits. Without a stream the call returns when it is done; between two sides that the host
sees, the processor does it.

The driver is told addresses alone: all CUDA memory has addresses of its own (unified addressing).
"""
cimport cython
from cpython.buffer cimport PyObject_CheckBuffer
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t

from arenapy.block cimport (
    Block, acquire, check_open, is_readonly, name_of, root_of, unacquire, writable,
)
from arenapy.dlpack cimport KIND_CPU
from arenapy.transfer cimport copy_bytes, move_bytes

from arenapy.cuda.driver cimport SUCCESS, checked, driver, enter, forget, generation, leave, primary
from arenapy.cuda.foreign cimport Foreign, of_dlpack, of_interface
from arenapy.cuda.ordering cimport Batch
from arenapy.cuda.stream cimport Stream
from arenapy.cuda.ticket cimport follow, synchronize

cdef enum:
    INVALID_VALUE = 1
    PEER_ALREADY_ENABLED = 704
    MOST_VIEWS = 16          # of one another that are looked through
    MEMORY_TYPE = 2          # CU_POINTER_ATTRIBUTE_MEMORY_TYPE

cdef set peers = set()       # pairs of devices that were asked for access


@cython.auto_pickle(False)
@cython.final
cdef class Side:
    """One side of a copy. Internal."""

    def __init__(self):
        raise TypeError("a Side is internal")


@cython.auto_pickle(False)
@cython.final
@cython.no_gc_clear
cdef class CudaMemory(Ordering):
    """Memory of CUDA. Internal."""

    cdef int copy(self, object to, object source, object stream) except -1:
        cdef CudaMemory one = leader(self, to, source)
        cdef Side target = side_of(to, True, one, stream)
        cdef Side origin = side_of(source, False, one, stream)
        if target.nbytes != origin.nbytes:
            raise ValueError(
                f"{said(to)} has {target.nbytes} bytes and {said(source)} has {origin.nbytes}; "
                "slice the larger one"
            )
        if stream is None and target.on_host and origin.on_host:
            # One of them is a block of arenapy, and the other one has a buffer.
            if target.block:
                return copy_bytes(<Block>to, origin.thing, True)
            return copy_bytes(<Block>source, target.thing, False)
        return one.transfer(target, origin, stream, None)

    cdef int transfer(self, Side to, Side source, object stream, set joined) except -1:
        cdef Stream s = self.own_stream() if stream is None else <Stream>self.named(stream)
        cdef Side side
        cdef list held = [], kept = []
        cdef void* to_context = NULL
        cdef void* source_context = NULL
        cdef int result
        cdef bint begun = False
        if to.nbytes == 0:
            return 0
        if to.address - source.address < to.nbytes or source.address - to.address < to.nbytes:
            raise ValueError(
                f"{said(to.thing)} and {said(source.thing)} overlap, which no device copies; copy "
                "by way of another Buffer"
            )
        if to.device_id >= 0 and source.device_id >= 0 and to.device_id != source.device_id:
            to_context, source_context = primary(to.device_id), primary(source.device_id)
            allow_access(to_context, to.device_id, source_context, source.device_id)
        try:
            for side in (to, source):
                if prepare(side, s, stream is None, joined):
                    held.append(side.thing)
                if stream is not None and side.foreign:
                    kept.append(self.keep((side.thing, side.view)))
            with nogil:
                result = enter(s.context)
                if result == SUCCESS:
                    if to_context != NULL:
                        result = driver.cuMemcpyPeerAsync(
                            to.address, to_context, source.address, source_context, to.nbytes,
                            s.handle)
                    else:
                        result = driver.cuMemcpyAsync(
                            to.address, source.address, to.nbytes, s.handle)
                    leave()
            checked(result, "cuMemcpyAsync")
            begun = True
            for batch in kept:
                self.keep_until(<Batch>batch, s)
            for side in (to, source):
                if kept and side.block and (<Block>side.thing).keeper.medium is self:
                    self.look(<PyObject*>(<Block>side.thing).keeper)
            if stream is None:
                synchronize(s)
        finally:
            if not begun:
                for batch in kept:
                    (<Batch>batch).kept = False      # nobody uses it
            for thing in held:
                unacquire(<Block>thing)
        return 0

    cdef int fill(self, object block, int byte, object stream) except -1:
        cdef Block b = <Block>block
        cdef Stream s
        cdef uint64_t address
        cdef size_t n = b.size
        cdef int result, held
        if stream is None and self.host_accessible:
            writable(b)
            return move_bytes(b, b.ptr, NULL, b.size, byte)
        check_open(b)
        refuse_readonly(b)
        s = self.own_stream() if stream is None else <Stream>self.named(stream)
        if n == 0:
            return 0
        address = <uint64_t>b.ptr
        held = use_block(b, s, stream is None, None)
        try:
            with nogil:
                result = enter(s.context)
                if result == SUCCESS:
                    result = driver.cuMemsetD8Async(address, <unsigned char>byte, n, s.handle)
                    leave()
            checked(result, "cuMemsetD8Async")
            if stream is None:
                synchronize(s)
        finally:
            if held:
                unacquire(b)
        return 0


cdef CudaMemory new_memory(
    str kind, int device_id, bint host_accessible, bint device_accessible, Py_ssize_t align
):
    cdef CudaMemory m = CudaMemory.__new__(CudaMemory)
    m.kind, m.device_id, m.align = kind, device_id, align
    m.host_accessible, m.device_accessible = host_accessible, device_accessible
    return m


# ---- sides -------------------------------------------------------------------------------

cdef str said(object thing):
    return name_of(<Block>thing) if isinstance(thing, Block) else f"this {type(thing).__name__}"


cdef int refuse_readonly(Block block) except -1:
    if is_readonly(block):
        raise BufferError(f"{name_of(block)} is read-only; copy it to a writable Buffer")
    return 0


cdef Side side_of(object thing, bint to, CudaMemory leading, object stream):
    """What is known of one side; nothing is changed."""
    cdef Side side = Side.__new__(Side)
    cdef Block b
    side.thing = thing
    side.device_id = -1
    if isinstance(thing, Block):
        b = <Block>thing
        check_open(b)
        if to:
            refuse_readonly(b)
        side.block = True
        side.address, side.nbytes = <uint64_t>b.ptr, b.size
        side.on_host = b.keeper.host_accessible
        side.device_id = b.keeper.device_id
        side.foreign = b.keeper.medium is None
        return side
    side.foreign = True
    described = getattr(thing, "__cuda_array_interface__", None)
    if described is not None:
        of_array(side, of_interface(thing, described), to)
        return side
    if PyObject_CheckBuffer(thing) or not hasattr(thing, "__dlpack__"):
        of_buffer(side, to)
    else:
        of_tensor(side, to, leading, stream)
    return side


cdef int of_buffer(Side side, bint to) except -1:
    """What the host has."""
    side.on_host = True
    try:
        side.view = memoryview(side.thing)
    except TypeError:
        raise TypeError(
            f"{said(side.thing)} is no Buffer, and has neither a buffer nor "
            "__cuda_array_interface__ nor __dlpack__"
        ) from None
    if to and side.view.readonly:
        raise BufferError(
            f"{said(side.thing)} is read-only; give something writable, like a bytearray"
        )
    if not side.view.contiguous:
        raise BufferError(f"{said(side.thing)} is not contiguous; give a contiguous copy of it")
    side.nbytes = side.view.nbytes
    if side.nbytes:
        from arenapy import vm
        side.address = vm.address_of(side.view)
    side.under = block_under(side.thing)
    return 0


cdef Block block_under(object thing):
    """The block of CUDA memory that an array or memoryview is a view of; None: there is none."""
    cdef int depth = 0
    while thing is not None and depth < MOST_VIEWS:
        if isinstance(thing, Block):
            return <Block>thing if (<Block>thing).keeper.medium is not None else None
        thing = getattr(thing, "obj" if isinstance(thing, memoryview) else "base", None)
        depth += 1
    return None


cdef int of_array(Side side, Foreign array, bint to) except -1:
    """Another library's array, for a device to copy."""
    if to and array.readonly:
        raise BufferError(f"{said(side.thing)} is read-only; give a writable array")
    side.address, side.nbytes = array.address, array.nbytes
    side.device_id = array.device_id
    side.producer = array.producer
    return 0


cdef int of_tensor(Side side, bint to, CudaMemory leading, object stream) except -1:
    """An array that has DLPack alone, of which the producer wants to know who is to use it."""
    cdef Foreign array
    if int(side.thing.__dlpack_device__()[0]) == KIND_CPU:
        from arenapy.cuda.exchange import from_dlpack
        side.thing = from_dlpack(side.thing)
        return of_buffer(side, to)
    array = of_dlpack(
        side.thing, leading.own_stream() if stream is None else leading.named(stream))
    of_array(side, array, to)
    side.thing = array.owner                 # the tensor lives by it, and by nothing else
    return 0


cdef int use_block(Block block, Stream s, bint now, set joined) except -1:
    """The stream is about to use a block. `now`: while the caller waits; 1: unacquire it then.

    `joined`: streams that it has waited for in this call; None: nobody asks.
    """
    cdef CudaMemory m = None
    cdef Block root = root_of(block)
    if root.keeper.medium is not None:
        m = <CudaMemory>root.keeper.medium
        # Who had these bytes before used them on the own stream.
        if m.own is not None and (joined is None or m.own not in joined):
            follow(s, <Stream>m.own)
            if joined is not None:
                joined.add(m.own)
        if now and m.own is s and not m.borrowed:
            return 0                         # in the order of what its bytes are used for next
    if now:
        acquire(block, True)
        return 1
    if m is not None:
        return m.use(block, s)
    return 0


cdef int prepare(Side side, Stream s, bint now, set joined) except -1:
    cdef int held = 0
    if side.block:
        held = use_block(<Block>side.thing, s, now, joined)
    elif side.under is not None and not now:
        use_block(side.under, s, now, joined)
        side.foreign = False                 # its block waits, and is not kept from its allocator
    elif side.producer is not None:
        follow(s, <Stream>side.producer)
    if not now and side.foreign and side.on_host:
        if pageable(side.address, s.context) and not s.captures():
            side.foreign = False             # the driver has done with it when it returns
        elif side.block:
            side.view = memoryview(side.thing)
    return held


cdef CudaMemory leader(CudaMemory one, object to, object source):
    """The memory whose default streams are meant: a device's, if there is one."""
    cdef object medium
    for thing in (to, source):
        if isinstance(thing, Block) and (<Block>thing).keeper is not None:
            medium = (<Block>thing).keeper.medium
            if isinstance(medium, CudaMemory) and (<CudaMemory>medium).own is not None:
                return <CudaMemory>medium
    return one


cdef bint pageable(uint64_t address, void* context) noexcept:
    """Is it memory of the host that no device can reach?"""
    cdef int kind = 0, result
    with nogil:
        result = enter(context)
        if result == SUCCESS:
            result = driver.cuPointerGetAttribute(&kind, MEMORY_TYPE, address)
            leave()
        forget(result)
    return result == INVALID_VALUE or result == SUCCESS and kind == 0


cdef int allow_access(void* to, int to_device, void* source, int source_device) except -1:
    """Let the device that copies reach the other one's memory, if it can; else it is staged."""
    cdef int can = 0, result
    if (to_device, source_device, generation) in peers:
        return 0
    with nogil:
        result = driver.cuDeviceCanAccessPeer(&can, to_device, source_device)
        if result == SUCCESS and can:
            result = enter(to)
            if result == SUCCESS:
                result = driver.cuCtxEnablePeerAccess(source, 0)
                leave()
    if result != PEER_ALREADY_ENABLED:
        checked(result, "cuCtxEnablePeerAccess")
    peers.add((to_device, source_device, generation))
    return 0
