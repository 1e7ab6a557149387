"""Copies: moving bytes into memory of CUDA, out of it and inside it.

What lives here: what both sides of a copy are, who does it, and what lives until it is done. What
does not: when released memory may be used again (ordering, fence).

With a stream the driver copies in that stream's order, and the call returns before: blocks of
arenapy are then used by the stream (`Ordering.use`), other objects are kept until it is done. The
host's ordinary (pageable) memory is an exception, of which the driver makes a copy first, or for
which it waits. Without a stream the call returns when it is done, and it comes after all streams
that were told of a block; between two sides that the host sees, the processor does it.

Other code runs during a call: other threads at each call of the driver, and a user's object that is
asked for its stream or its memory may do anything. So blocks are pinned from the check to the end.

The driver is told addresses alone: all CUDA memory has addresses of its own (unified addressing).
"""
cimport cython
from cpython.buffer cimport PyObject_CheckBuffer
from libc.stdint cimport uint64_t

from arenapy.buffer.block cimport (
    Block, is_readonly, name_of, pin, root_of, unpin, uses_of, writable,
)
from arenapy.buffer.dlpack cimport KIND_CPU, as_pair
from arenapy.buffer.buffer cimport copy_bytes, move_bytes
from arenapy.cuda.driver cimport (
    SUCCESS, Location, checked, driver, enter, forget, leave, need, primary,
)
from arenapy.cuda.foreign cimport Foreign, of_dlpack, of_interface
from arenapy.cuda.ordering cimport told_to
from arenapy.cuda.peers cimport Relay, give_relay_back, goes_by_host, take_relay
from arenapy.cuda.stream_ref cimport (
    CAPTURING, FREE_TO_USE, StreamRef, free_to_use, handle_here, not_closed, refuse_unless_free,
    says_captured, spread,
)
from arenapy.cuda.fence cimport (
    Retained, follow, follow_as, give_up, look, park, refuse_other_capture, retain, retain_until,
    synchronize, wait_outside,
)
from arenapy.base.sealed cimport seal

from arenapy.buffer.buffer import as_bytes, refuse_objects
from arenapy.cuda.errors import CudaError
from arenapy.memory.host_request import checked_index


cdef enum:
    INVALID_VALUE = 1
    MAX_VIEWS = 16           # of one another that are looked through
    MEMORY_TYPE = 2          # CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    HOST = -1                # as arenapy and CUDA 12 have it
    AT_DEVICE = 1            # CU_MEM_LOCATION_TYPE_*
    AT_HOST = 2


@cython.final
@cython.no_gc_clear                  # the block is unpinned to the last
cdef class Side:
    """One side of a copy. Internal."""

    def __dealloc__(self):
        if self.pinned:
            unpin(<Block>self.thing)


seal(Side)


@cython.final
@cython.no_gc_clear
cdef class CudaMemory(Ordering):
    """Memory of CUDA. Internal."""

    cdef Ordering another(self):
        return CudaMemory.__new__(CudaMemory)

    cdef int copy(self, object to, object source, object stream) except -1:
        cdef CudaMemory one = leader(self, to, source)
        cdef Side target = side_of(to, True, one, stream)
        cdef Side origin = side_of(source, False, one, stream)
        cdef Side side
        cdef StreamRef s
        if target.nbytes != origin.nbytes:
            raise ValueError(
                f"{said(to)} has {target.nbytes} bytes and {said(source)} has {origin.nbytes}; "
                "slice the larger one"
            )
        if stream is None and target.on_host and origin.on_host:
            # One of them is a block of arenapy, and the other one has a buffer.
            for side in (target, origin):
                if memory_under(side) is not None:
                    memory_under(side).ready(block_of(side), None)
            if target.block:
                return copy_bytes(<Block>to, origin.thing, True)
            return copy_bytes(<Block>source, target.thing, False)
        not_overlapping(target, origin)
        s = one.own_stream() if stream is None else <StreamRef>one.named(stream)
        one.transfer(target, origin, s, stream is None, set())
        return wait_or_keep(s, [target, origin]) if stream is None and target.nbytes else 0

    cdef int extend(self, object block) except -1:
        cdef StreamRef one
        if self.own is None:
            return 0
        try:
            # A fence is of what was exported, which is as long as it was.
            for one in streams_of(spread(uses_of(<Block>block))):
                if not one.fence:
                    follow(one, self.own, True)
        except CudaError:                    # amid a capture, perhaps: this thread waits, then
            wait_outside(<StreamRef>self.own)
        return 0

    cdef int movable(self, object source) except -1:
        cdef StreamRef one
        # Also one of whose capture the block is: `told_to` has only what is done before that.
        for one in users_of(source, self.own) + streams_of(spread(uses_of(<Block>source))):
            free_to_use(
                one, "the block cannot move to grow; do this before the capture, or after it", None)
        return 0

    cdef int move(self, object to, object source) except -1:
        cdef StreamRef own = <StreamRef>self.own
        cdef list streams = users_of(source, own)
        cdef StreamRef one
        self.movable(source)                 # a capture may have begun since
        self.after_told(source, own)         # also what a stream did that is closed now
        self.copy(to[:(<Block>source).size], source, own)
        if own is not None and own.shut:     # its owner can make nothing wait for it any more
            wait_outside(own)
        for one in streams:
            # A fence is of what was exported: the old one.
            if one is not own and not one.fence and not one.gone():
                self.begin(to, one)
        return 0

    cdef int transfer(self, Side to, Side source, StreamRef s, bint now, set joined) except -1:
        cdef Side side
        cdef list kept = []
        cdef void* to_context = NULL
        cdef void* source_context = NULL
        cdef void* handle = handle_here(s)
        cdef Relay relay = None
        cdef bint by_host = False
        cdef int state, result
        if to.nbytes == 0:
            return 0
        state = can_be_used(s, now)
        if to.device_id >= 0 and source.device_id >= 0 and to.device_id != source.device_id:
            to_context, source_context = primary(to.device_id), primary(source.device_id)
            by_host = state == FREE_TO_USE and goes_by_host(
                source.device_id, to.device_id, to.nbytes)    # a graph's would need slots for good
        for side in (to, source):
            prepare(side, s, state, now, joined)
        for side in (to, source):
            if side.foreign and not now:
                kept.append((side, retain((side.thing, side.view), <void*>self)))
        try:
            relay = take_relay(s, source.device_id, to.device_id) if by_host else None
            if relay is not None:
                relay.copy(s, to.address, source.address, to.nbytes)
            else:
                with nogil:
                    result = enter(s.context)
                    if result == SUCCESS:
                        if to_context != NULL:
                            result = driver.cuMemcpyPeerAsync(
                                to.address, to_context, source.address, source_context, to.nbytes,
                                handle)
                        else:
                            result = driver.cuMemcpyAsync(
                                to.address, source.address, to.nbytes, handle)
                        leave()
                checked(result, "cuMemcpyAsync")
        except BaseException:
            for side, one in kept:
                if relay is None:
                    give_up(<Retained>one)   # nobody uses it
                else:
                    retain_until(<Retained>one, stream_on(relay, side.device_id))
            if relay is not None:            # what it had queued may go on
                note_sides(to, relay.far, source, relay.near)
            raise
        for side, one in kept:
            if relay is None or side.device_id == s.device_id:
                retain_until(<Retained>one, s)
            else:
                retain_until(<Retained>one, stream_on(relay, side.device_id))
        if relay is not None:
            try:
                # `s` covers only what its own device does: it is over at once if that one fails.
                note_sides(to, None if to.device_id == s.device_id else relay.over,
                           source, None if source.device_id == s.device_id else relay.read)
            finally:
                give_relay_back(relay)
        return 0

    cdef int fill(self, object block, int byte, object stream) except -1:
        cdef Side side
        cdef Block b = <Block>block
        cdef StreamRef s
        cdef void* handle
        cdef int state, result
        if stream is None and self.host_accessible:
            writable(b)
            self.ready(b, None)
            return move_bytes(b, b.ptr, NULL, b.size, byte)
        side = side_of(b, True, self, stream)
        s = self.own_stream() if stream is None else <StreamRef>self.named(stream)
        if side.nbytes == 0:
            return 0
        state = can_be_used(s, stream is None)
        prepare(side, s, state, stream is None, set())
        handle = handle_here(s)
        with nogil:
            result = enter(s.context)
            if result == SUCCESS:
                result = driver.cuMemsetD8Async(
                    side.address, <unsigned char>byte, side.nbytes, handle)
                leave()
        checked(result, "cuMemsetD8Async")
        return wait_or_keep(s, [side]) if stream is None else 0


seal(CudaMemory)


cdef list streams_of(list uses):
    return [one for one in uses if isinstance(one, StreamRef) and not (<StreamRef>one).gone()]


cdef list users_of(object block, StreamRef own):
    cdef list streams = streams_of(told_to(<Block>block))
    if own is not None and own not in streams:
        streams.append(own)
    return streams


cdef CudaMemory new_memory(
    str kind, int device_id, bint host_accessible, bint device_accessible, Py_ssize_t align
):
    cdef CudaMemory m = CudaMemory.__new__(CudaMemory)
    m.kind, m.device_id, m.align = kind, device_id, align
    m.host_accessible, m.device_accessible = host_accessible, device_accessible
    return m


# ---- sides -------------------------------------------------------------------------------

cdef str said(object thing):
    if isinstance(thing, tuple) and thing:   # an array, and what keeps its memory
        thing = thing[0]
    return name_of(<Block>thing) if isinstance(thing, Block) else f"this {type(thing).__name__}"


cdef int refuse_readonly(Block block) except -1:
    if is_readonly(block):
        raise BufferError(f"{name_of(block)} is read-only; copy it to a writable Buffer")
    return 0


cdef Side side_of(object thing, bint to, CudaMemory leading, object stream):
    """Describe one side of a copy. This changes nothing."""
    cdef Side side = Side.__new__(Side)
    cdef Foreign array
    cdef Block b
    side.thing = thing
    side.device_id = -1
    if isinstance(thing, Block):
        b = <Block>thing
        pin(b)
        side.pinned = True
        if to:
            refuse_readonly(b)
        side.block = True
        side.address, side.nbytes = <uint64_t>b.ptr, b.size
        side.on_host = b.owner.host_accessible
        side.device_id = b.owner.device_id
        side.foreign = b.owner.hooks is None
        return side
    side.foreign = True
    used_by = None
    if not PyObject_CheckBuffer(thing):      # else it is the host's, most likely
        used_by = leading.own_stream() if stream is None else leading.named(stream)
    array = of_interface(thing, used_by)
    if array is not None:
        of_array(side, array, to)
        if side.producer is not None:
            if used_by is None:
                used_by = leading.own_stream() if stream is None else leading.named(stream)
            refuse_other_capture(used_by, side.producer)
        return side
    if PyObject_CheckBuffer(thing) or not hasattr(thing, "__dlpack__"):
        of_buffer(side, to)
    else:
        of_tensor(side, to, used_by)
    return side


cdef int of_buffer(Side side, bint to) except -1:
    """Describe a side that is an object of the host with a buffer."""
    side.on_host = True
    try:
        side.view = memoryview(as_bytes(side.thing))
    except TypeError:
        raise TypeError(
            f"{said(side.thing)} is not a Buffer, and has neither a buffer nor "
            "__cuda_array_interface__ nor __dlpack__"
        ) from None
    refuse_objects(side.view.format, side.thing)
    if to and side.view.readonly:
        raise BufferError(
            f"{said(side.thing)} is read-only; pass a writable object, like a bytearray"
        )
    if not side.view.contiguous:
        raise BufferError(f"{said(side.thing)} is not contiguous; give a contiguous copy of it")
    side.nbytes = side.view.nbytes
    if side.nbytes:
        from arenapy.linux import vm
        side.address = vm.address_of(side.view)
    side.under = block_under(side)
    return 0


cdef Block block_under(Side side):
    """The block of CUDA memory that an array or memoryview is a view of; None: there is none."""
    cdef int depth = 0
    cdef Block b
    thing = side.thing
    while thing is not None and depth < MAX_VIEWS:
        if isinstance(thing, Block):
            b = <Block>thing
            # Anything may have an attribute of that name.
            inside = (side.address >= <uint64_t>b.ptr
                      and side.address + side.nbytes <= <uint64_t>b.ptr + <uint64_t>b.size)
            return b if inside and b.owner.hooks is not None else None
        thing = getattr(thing, "obj" if isinstance(thing, memoryview) else "base", None)
        depth += 1
    return None


cdef int of_array(Side side, Foreign array, bint to) except -1:
    """Another library's array, for a device to copy."""
    if to and array.readonly:
        raise BufferError(f"{said(side.thing)} is read-only; give a writable array")
    side.thing = array.owner
    side.address, side.nbytes = array.address, array.nbytes
    side.device_id = array.device_id
    side.producer = array.producer
    return 0


cdef int of_tensor(Side side, bint to, object used_by) except -1:
    """An array that has DLPack alone, of which the producer wants to know who is to use it."""
    kind, _ = as_pair(
        side.thing.__dlpack_device__(), f"{said(side.thing)}.__dlpack_device__()")
    if kind == KIND_CPU:
        from arenapy.cuda.foreign import from_dlpack
        side.thing = from_dlpack(side.thing)
        return of_buffer(side, to)
    return of_array(side, of_dlpack(side.thing, used_by), to)


cdef Block block_of(Side side):
    """The block that it is, or is an array in."""
    return <Block>side.thing if side.block else side.under


cdef CudaMemory memory_under(Side side):
    cdef Block block = block_of(side)
    return None if block is None else <CudaMemory>root_of(block).owner.hooks


cdef int note_side(Side side, object use) except -1:
    cdef CudaMemory m = memory_under(side)
    return 0 if m is None else m.note(block_of(side), use)


cdef int note_sides(Side to, object written, Side source, object read) except -1:
    """Note the uses of both sides, also if the first note fails. None: that side has no use."""
    try:
        if written is not None:
            note_side(to, written)
    finally:
        if read is not None:
            note_side(source, read)
    return 0


cdef StreamRef stream_on(Relay relay, int device_id):
    return relay.near if relay.near.device_id == device_id else relay.far


cdef int can_be_used(StreamRef s, bint now) except -1:
    cdef int state
    need()
    state = s.state()
    if now:
        not_closed(s)
        refuse_unless_free(
            s, state, "a call without stream= waits for it; name another one, or do this before "
            "the capture", None)
    elif not says_captured(state, handle_here(s)):     # else it becomes a part of the graph
        not_closed(s)
        refuse_unless_free(s, state, "name another one, or do this before the capture", None)
    return state


cdef int wait_or_keep(StreamRef s, list sides) except -1:
    """The device uses the sides until it has done all, also where nobody can wait for that."""
    cdef Side side
    cdef CudaMemory m
    try:
        synchronize(s)
    except BaseException:
        for side in sides:
            m = memory_under(side)
            if m is not None:                # the next owner comes after its own stream anyway
                if s is not m.own or m.host_accessible or m.borrowed:
                    m.note(block_of(side), s)
            elif not (side.on_host and pageable(side.address, s.context)):
                park((side.thing, memoryview(side.thing) if side.block else side.view), [s])
        raise
    look(False, False)
    return 0


cdef int prepare(Side side, StreamRef s, int state, bint now, set joined) except -1:
    """The stream is about to use it: let it wait, and take note of that."""
    cdef Block block = block_of(side)
    cdef CudaMemory m = memory_under(side)
    if m is not None:
        # The former owner of these bytes used them on the allocator's own stream.
        if m.own is not None and m.own not in joined:
            if m.own is not s:
                follow_as(s, state, m.own, True)
            joined.add(m.own)
        if now:
            m.after_told(block, s)
        elif state == FREE_TO_USE:
            m.use_free(block, s)
        else:
            m.use(block, s)
    elif side.producer is not None:
        follow(s, side.producer, True)
    if side.under is not None:
        side.foreign = False                 # its block waits, and is not kept from its allocator
    if not now and side.foreign and side.on_host:
        if pageable(side.address, s.context) and state != CAPTURING:
            side.foreign = False             # the driver has done with it when it returns
        elif side.block:
            side.view = memoryview(side.thing)
    return 0


cdef CudaMemory leader(CudaMemory one, object to, object source):
    """The memory whose default streams are meant: a device's, if there is one."""
    cdef object hooks
    for thing in (to, source):
        if isinstance(thing, Block) and (<Block>thing).owner is not None:
            hooks = (<Block>thing).owner.hooks
            if isinstance(hooks, CudaMemory) and (<CudaMemory>hooks).own is not None:
                return <CudaMemory>hooks
    return one


cdef bint pageable(uint64_t address, void* context) noexcept:
    """Is it memory of the host that no device can reach?"""
    cdef int kind = 0, entered, result = SUCCESS
    with nogil:
        entered = enter(context)
        if entered == SUCCESS:
            result = driver.cuPointerGetAttribute(&kind, MEMORY_TYPE, address)
            leave()
        forget(entered if entered != SUCCESS else result)
    # Only the second call says so of memory that the driver does not know.
    return entered == SUCCESS and (result == INVALID_VALUE or result == SUCCESS and kind == 0)


# ---- many copies as one ------------------------------------------------------------------
# Many copies as one: checked before the first, waited for after the last.
#
# What lives here: the list of pairs, and what is said about one of them. What does not: a copy
# (copies).
#
# A copy of a few KiB takes the driver less time than waiting for it does: a loop of `copy_from`
# without a stream waits after each, `copy_batch` once.

def copy_batch(pairs, stream=None):
    """Copy many pairs in their order, on one stream.

    Parameters
    ----------
    pairs : iterable of (target, source)
        Buffers, contiguous host buffers, and arrays with ``__cuda_array_interface__``, as for
        ``Buffer.copy_from``. Both members of a pair have the same number of bytes. One of them is a
        Buffer of memory of arenapy.cuda.
    stream : stream, optional
        The stream that copies. All memory is held until it has finished, as in ``copy_from``. By
        default, the stream of the first pair's memory copies, and all copies are done on return.

    Raises
    ------
    ValueError
        If the sizes of a pair differ, one of them is closed, or neither is memory of
        arenapy.cuda.
    BufferError
        If a target is read-only, or a member of a pair is not contiguous.
    TypeError
        If a member has no memory, or `pairs` does not contain pairs.
    CudaError
        If the driver refused.

    Notes
    -----
    All pairs are checked before the first is copied, and an error names the pair by its index.
    Thread-safety: may be called from any thread. Do not write to the sources and do not read the
    targets until the copies are done.

    Examples
    --------
    >>> import arenapy, numpy as np
    >>> from arenapy import cuda
    >>> blocks = arenapy.Pool(source=cuda.Device()).alloc_many([4000, 8000])
    >>> cuda.copy_batch(zip(blocks, [np.ones(1000, "f4"), np.ones(1000)]))
    """
    cdef list found = [], sides = []
    cdef set joined = set()
    cdef CudaMemory memory = None
    cdef StreamRef s = None
    cdef Side target, source
    cdef Py_ssize_t i = 0
    for pair in pairs:
        try:
            found.append(checked_pair(pair, stream))
        except (BufferError, TypeError, ValueError) as error:
            kind = [one for one in (BufferError, TypeError, ValueError) if isinstance(error, one)]
            raise kind[0](f"pairs[{i}]: {error}") from error
        i += 1
    for target, source, memory in found:
        if s is None:
            s = memory.own_stream() if stream is None else <StreamRef>memory.named(stream)
        try:
            memory.transfer(target, source, s, stream is None, joined)
        except BaseException:
            if stream is None and sides:     # nothing of it goes on once this has returned
                try:
                    wait_or_keep(s, sides)
                except Exception:
                    pass                     # the first reason counts
            raise
        sides += [target, source]
    if s is not None and stream is None:
        wait_or_keep(s, sides)


cdef tuple checked_pair(object pair, object stream):
    """Both sides, and the memory that leads; nothing is changed."""
    cdef Side target, source
    cdef CudaMemory memory
    try:
        to, origin = pair
    except (TypeError, ValueError):
        raise TypeError(f"{pair!r} is not a pair; give (target, source)") from None
    memory = memory_of(to)
    if memory is None:
        memory = memory_of(origin)
    if memory is None:
        raise ValueError(
            "neither the target nor the source is a Buffer of a source of arenapy.cuda; use "
            "Buffer.copy_from or NumPy"
        )
    memory = leader(memory, to, origin)
    target, source = side_of(to, True, memory, stream), side_of(origin, False, memory, stream)
    if target.nbytes != source.nbytes:
        raise ValueError(
            f"the target has {target.nbytes} bytes and the source has {source.nbytes}; slice the "
            "larger one"
        )
    not_overlapping(target, source)
    return target, source, memory


cdef int not_overlapping(Side to, Side source) except -1:
    if to.address - source.address < to.nbytes or source.address - to.address < to.nbytes:
        raise ValueError(
            f"{said(to.thing)} and {said(source.thing)} overlap, which a device cannot copy; copy "
            "through another Buffer"
        )
    return 0


cdef CudaMemory memory_of(object thing):
    if isinstance(thing, Block) and (<Block>thing).owner is not None:
        if isinstance((<Block>thing).owner.hooks, CudaMemory):
            return <CudaMemory>(<Block>thing).owner.hooks
    return None

# ---- moving pages of managed memory: prefetches and advice ------------------------------------

# Both calls of the driver have other arguments since CUDA 13; of each, the one is there that the
# installed cuda-python has.

#: The advice that can be given, in the driver's numbers (CU_MEM_ADVISE_*).
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
        raise TypeError(f"{what}: this {type(buffer).__name__} is not a Buffer")
    block = <Block>buffer
    side = side_of(block, False, None, None)
    if root_of(block).owner.kind != "managed":
        raise BufferError(
            f"{name_of(block)} is {root_of(block).owner.kind} memory, which cannot move: "
            "copy its bytes with copy_to(), or use cuda.Managed, whose memory moves"
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
    """Move the pages of managed memory to the place of their next use.

    Without it, each page moves when it is first touched, which costs a page fault.

    Parameters
    ----------
    buffer : Buffer
        A Buffer of `Managed` memory. For a slice, all pages that it touches.
    device_id : int
        Ordinal of a device. -1 is the host.
    stream : stream, optional
        The stream that moves the pages. The Buffer is held until it has finished. By default, the
        move is done on return.

    Raises
    ------
    BufferError
        If the memory is not managed.
    ValueError, TypeError
        If it is closed or not a Buffer, or there is no such device.
    CudaError
        If the driver refused, for example because the device has no concurrent managed access
        (Windows, WSL).

    Notes
    -----
    Thread-safety: may be called from any thread.

    Examples
    --------
    >>> import arenapy
    >>> from arenapy import cuda
    >>> block = arenapy.Pool(source=cuda.Managed()).alloc(4096)
    >>> cuda.prefetch(block, 0)              # to the device
    >>> cuda.prefetch(block, -1)             # and back
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
    can_be_used(s, stream is None)
    if stream is not None:
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
    """Tell the driver how managed memory will be used, so that it places the pages well.

    Parameters
    ----------
    buffer : Buffer
        A Buffer of `Managed` memory. For a slice, all pages that it touches.
    advice : {"read_mostly", "preferred_location", "accessed_by"}
        "read_mostly": it is seldom written, so copies of its pages may be in several places.
        "preferred_location": its pages should stay at `device_id`. "accessed_by": `device_id`
        accesses it, so it should be mapped there. The prefix ``"unset_"`` ends an advice.
    device_id : int
        Ordinal of a device. -1 is the host. ``"read_mostly"`` ignores it.

    Raises
    ------
    BufferError
        If the memory is not managed.
    ValueError, TypeError
        If there is no such advice or device, or `buffer` is closed or not a Buffer.
    CudaError
        If the driver refused.

    Notes
    -----
    Thread-safety: may be called from any thread. The advice stays with the pages after the Buffer
    is released, until their region is gone or the advice is unset.

    Examples
    --------
    >>> import arenapy
    >>> from arenapy import cuda
    >>> block = arenapy.Pool(source=cuda.Managed()).alloc(4096)
    >>> cuda.advise(block, "preferred_location", device_id=-1)
    """
    cdef Side side = managed_block(buffer, "advise")
    cdef Location where
    cdef void* context
    cdef uint64_t address = side.address
    cdef size_t nbytes = side.nbytes
    cdef int number, result
    if not isinstance(advice, str) or advice not in ADVICE:
        raise ValueError(f"advice={advice!r} is not one of {', '.join(map(repr, ADVICE))}")
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
