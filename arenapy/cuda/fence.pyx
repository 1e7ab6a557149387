"""Fences: what has to be over before memory is used again, and waiting for it.

What lives here: events, of which a few are kept; what a stream is captured into; which stream waits
for which; what lives until a stream is done with it. What does not: which stream a user names
(stream_ref), which released blocks wait (ordering).

Thread-safety: everything here may be called from any thread.
"""
cimport cython
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport free, malloc

from arenapy.base.atomic cimport (
    arenapy_add, arenapy_cas, arenapy_load, arenapy_store, arenapy_sub,
)
from arenapy.base.dicts cimport found_in
from arenapy.cuda.driver cimport (
    SUCCESS, callable_, checked, driver, enter, forget, generation, leave, need,
)
from arenapy.cuda.stream_ref cimport (
    CAPTURING, FREE_TO_USE, UNKNOWN, StreamRef, WeakValues, capture_of, elsewhere, free_to_use,
    handle_here, is_done, is_gone, not_closed, refuse_unless_free, relax, restore_capture_mode,
    says_captured,
)
from arenapy.base.sealed cimport seal

from arenapy.cuda.errors import CudaError
from arenapy.errors import OutOfMemory

cdef enum:
    DISABLE_TIMING = 2       # CU_EVENT_DISABLE_TIMING
    RELAXED = 2              # CU_STREAM_CAPTURE_MODE_RELAXED
    NO_DESTRUCTOR_SYNC = 1   # CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
    INVALID_HANDLE = 400     # CUDA_ERROR_INVALID_HANDLE
    MOVE = 1                 # CU_GRAPH_USER_OBJECT_MOVE
    EVENTS_KEPT = 256        # of a context
    DEVICE_PAGE = 2 << 20    # bytes
    CAPTURED_EVENT = 907     # CUDA_ERROR_CAPTURED_EVENT
    FEW = 16                 # retained objects that are looked at each time

cdef dict spare_events = {}          # by context: lists of those that nobody uses
cdef WeakValues graphs = WeakValues.__new__(WeakValues)    # GraphFences, by capture and stream


cdef class Fence:
    """Something that has to be over before memory is used again. Internal."""

    cdef bint passed(self) noexcept:
        return True

    cdef bint wait(self, StreamRef stream) noexcept:
        return True


seal(Fence)


@cython.final
cdef class EventFence(Fence):
    """All that a stream was given before. Internal."""

    def __dealloc__(self):
        """Keep it for the next one; the driver need not be asked."""
        if self.event != NULL and callable_(self.generation):
            give_event(self.context, self.event)

    cdef bint passed(self) noexcept:
        return self.event == NULL or is_done(self.asked())

    cdef int asked(self) noexcept:
        cdef int result, mode = RELAXED
        with nogil:
            result = relax(self.context, &mode)
            if result == SUCCESS:
                result = driver.cuEventQuery(self.event)
                restore_capture_mode(&mode)
            forget(result)
        return result

    cdef bint wait(self, StreamRef stream) noexcept:
        cdef int result, mode = RELAXED
        cdef void* handle = NULL
        if self.event == NULL:
            return True
        if stream is not None:
            handle = handle_here(stream)
        with nogil:
            result = relax(self.context if stream is None else stream.context, &mode)
            if result == SUCCESS:
                if stream is None:
                    result = driver.cuEventSynchronize(self.event)
                else:
                    result = driver.cuStreamWaitEvent(handle, self.event, 0)
                restore_capture_mode(&mode)
            forget(result)
        return is_done(result)


seal(EventFence)


cdef void give_event(void* context, void* event) noexcept:
    spare = found_in(spare_events, (<uintptr_t>context, generation))
    if spare is not None and len(<list>spare) < EVENTS_KEPT:
        (<list>spare).append(<uintptr_t>event)
        return
    with nogil:
        if enter(context) == SUCCESS:
            forget(driver.cuEventDestroy(event))
            leave()


cdef void* create_event(void* context, unsigned int flags) except NULL:
    cdef void* event = NULL
    cdef int result
    with nogil:
        result = enter(context)
        if result == SUCCESS:
            result = driver.cuEventCreate(&event, flags)
            leave()
    checked(result, "cuEventCreate")
    return event


cdef void* take_event(void* context) except NULL:
    spare = spare_events.setdefault((<uintptr_t>context, generation), [])
    try:
        return <void*><uintptr_t>(<list>spare).pop()
    except IndexError:
        return create_event(context, DISABLE_TIMING)


cdef Fence new_event(StreamRef stream):
    cdef EventFence fence = EventFence.__new__(EventFence)
    cdef void* event = take_event(stream.context)
    cdef void* handle = handle_here(stream)
    cdef uint64_t id = stream.id
    cdef bint asked
    cdef int result
    fence.context, fence.generation = stream.context, generation
    fence.event = event
    if stream.id == 0:                       # a default stream; `handle_here` has the legacy one
        fence.of = 0 if elsewhere(stream) else stream.thread, <uintptr_t>stream.context
    elif not stream.unnamed:
        fence.of = stream.id
    not_closed(stream)
    # The handle may be another stream's by now; of one that captures this is not to be asked.
    asked = id and not stream.lasting and not stream.captures()
    with nogil:
        if asked:
            result = driver.cuStreamGetId(handle, &id)
            if result == SUCCESS and id != stream.id:
                result = INVALID_HANDLE
        else:
            result = SUCCESS
        if result == SUCCESS and stream.id:  # it has its context
            result = driver.cuEventRecord(event, handle)
        elif result == SUCCESS:
            result = enter(stream.context)
            if result == SUCCESS:
                result = driver.cuEventRecord(event, handle)
                leave()
    checked(result, "cuEventRecord")
    return fence


# ---- graphs ------------------------------------------------------------------------------

# Of two owners: the fence, and the graph, which the driver may destroy in a thread of its own.
cdef struct SharedFlag:
    uint64_t owners
    uint64_t gone


cdef void drop_flag(SharedFlag* flag) noexcept nogil:
    if arenapy_sub(&flag.owners, 1) == 1:
        free(flag)


cdef void graph_is_gone(void* p) noexcept nogil:
    arenapy_store(&(<SharedFlag*>p).gone, 1)
    drop_flag(<SharedFlag*>p)


@cython.final
cdef class GraphFence(Fence):
    """The graph that a stream was captured into, and what was made of it. Internal."""

    def __dealloc__(self):
        if self.shared != NULL:
            drop_flag(<SharedFlag*>self.shared)

    cdef bint passed(self) noexcept:
        return self.shared != NULL and arenapy_load(&(<SharedFlag*>self.shared).gone) != 0

    cdef bint wait(self, StreamRef stream) noexcept:
        return self.passed()                 # nobody knows whether it will be launched again


seal(GraphFence)


cdef Fence new_graph_fence(StreamRef stream):
    cdef GraphFence fence = GraphFence.__new__(GraphFence)
    cdef SharedFlag* flag = NULL
    cdef void* graph = NULL
    cdef void* thing = NULL
    cdef uint64_t id = capture_of(stream, &graph)
    cdef int result
    if graph == NULL:                        # it is over, or was made invalid
        return Fence.__new__(Fence)
    with cython.critical_section(stream):
        known = stream.graph if stream.capture == id else None
    if known is not None and not (<Fence>known).passed():
        return <Fence>known                  # one is enough for all that a capture uses
    # Several objects may name a stream. Its handle is no other stream's while it is captured.
    key = (generation, id, <uintptr_t>stream.handle, stream.thread)
    known = graphs.get(key)
    if known is not None and not (<Fence>known).passed():
        with cython.critical_section(stream):
            stream.graph, stream.capture = <Fence>known, id
        return <Fence>known
    flag = <SharedFlag*>malloc(sizeof(SharedFlag))
    if flag == NULL:
        raise MemoryError("no memory for the record of a graph")
    flag.owners, flag.gone = 2, 0
    with nogil:
        result = enter(stream.context)
        if result == SUCCESS:
            result = driver.cuUserObjectCreate(&thing, flag, graph_is_gone, 1, NO_DESTRUCTOR_SYNC)
            if result == SUCCESS:
                result = driver.cuGraphRetainUserObject(graph, thing, 1, MOVE)
                if result != SUCCESS:
                    forget(driver.cuUserObjectRelease(thing, 1))     # which calls graph_is_gone
            leave()
    if result != SUCCESS and thing == NULL:
        free(flag)
        flag = NULL
    fence.shared = flag
    checked(result, "cuGraphRetainUserObject")
    fence = <GraphFence>graphs.first(key, fence, known)
    with cython.critical_section(stream):
        stream.graph, stream.capture = fence, id
    return fence


cdef Fence graph_fence_or_never(StreamRef stream):
    try:
        return new_graph_fence(stream)
    except Exception:
        return GraphFence.__new__(GraphFence)    # what it keeps is lost, and used by nobody else


cdef Fence event_outside(StreamRef stream):
    cdef EventFence fence
    while stream.state() == FREE_TO_USE:
        fence = <EventFence>new_event(stream)
        # Another thread may have begun a capture before the event was recorded. To ask for one
        # that is part of it would make it invalid.
        if stream.state() == FREE_TO_USE and fence.asked() != CAPTURED_EVENT:
            return fence
    return None


cdef Fence late_work_of(StreamRef stream, bint wait):
    cdef Fence fence
    if stream.lasting or stream.thread or stream.of_allocator:
        try:
            fence = event_outside(stream)
            if fence is not None or not wait:
                return fence
        except CudaError as error:
            if not is_gone(error.result):
                raise
    return work_of_context(stream)


cdef Fence work_of(StreamRef stream):
    try:
        return new_event(stream)
    except CudaError as error:
        if not is_gone(error.result):
            raise
    return work_of_context(stream)           # somebody has destroyed it


cdef Fence work_of_context(StreamRef stream):
    # cuCtxSynchronize would make invalid every capture in the context, also one that nobody here
    # knows of. cuMemFree waits for the same, since any stream may use the memory, and does not
    # disturb a capture. It has to be whole pages, which the driver unmaps: smaller allocations
    # share a page, and the driver need not wait before it gives one to the next.
    cdef uint64_t address = 0
    cdef int result, mode
    with nogil:
        result = relax(stream.context, &mode)
        if result == SUCCESS:
            result = driver.cuMemAlloc(&address, DEVICE_PAGE)
            if result == SUCCESS:
                result = driver.cuMemFree(address)
            restore_capture_mode(&mode)
        forget(result)
    if not is_done(result):
        checked(result, "cuMemFree")
    return Fence.__new__(Fence)


# ---- streams that wait --------------------------------------------------------------------

cdef int join_streams(StreamRef stream, StreamRef other) except -1:
    cdef int state
    cdef void* graph = NULL
    if stream is other:
        return 0
    need()
    not_closed(stream)
    state = stream.state()
    if (state != CAPTURING or other.state() != CAPTURING
            or capture_of(stream, &graph) != capture_of(other, &graph)):
        refuse_unless_free(
            stream, state, "it cannot wait for {!r}; do this before the capture", other)
        free_to_use(other, "{!r} cannot wait for it; do this before the capture", stream)
    return let_wait(stream, other)


cdef int let_wait(StreamRef stream, object use) except -1:
    cdef Fence fence = work_of(<StreamRef>use) if isinstance(use, StreamRef) else <Fence>use
    if not fence.wait(stream):
        raise CudaError(f"cuStreamWaitEvent failed: {stream!r} cannot wait for {use!r}")
    return 0


cdef int follow(StreamRef stream, object use, bint strict) except -1:
    return 0 if use is stream else follow_as(stream, stream.state(), use, strict)


cdef int follow_as(StreamRef stream, int state, object use, bint strict) except -1:
    cdef StreamRef other = <StreamRef>use if isinstance(use, StreamRef) else None
    cdef bint captured = says_captured(state, handle_here(stream))
    cdef int theirs = FREE_TO_USE if other is None else other.state()
    cdef void* graph = NULL
    if other is not None and says_captured(theirs, handle_here(other)):
        if captured and capture_of(stream, &graph) == capture_of(other, &graph):
            let_wait(stream, use)
        elif strict:
            refuse_captured(other)
        return 0
    if captured:                             # a graph is launched when all this is over
        return wait_here(use, strict)
    not_closed(stream)
    refuse_unless_free(
        stream, state, "it cannot wait for {!r}; do this before the capture", use)
    if other is not None:
        refuse_unless_free(
            other, theirs, "nobody can wait for it; do this before the capture", None)
        # One question takes less than an event and a wait, which the queue would have to do, too.
        if other.tells_idle() and other.has_nothing_to_do():
            return 0
    return let_wait(stream, use)


cdef int refuse_other_capture(StreamRef stream, StreamRef producer) except -1:
    cdef void* graph = NULL
    if (producer is stream or not producer.captures()
            or stream.captures()
            and capture_of(stream, &graph) == capture_of(producer, &graph)):
        return 0
    raise CudaError(
        f"{producer!r}, the stream that the array names, is being captured into a graph, and "
        f"{stream!r} is not part of this capture, so it cannot wait for the array: pass a stream "
        "of the capture as stream=, or do this before or after the capture"
    )


cdef int wait_here(object use, bint strict) except -1:
    cdef Fence fence
    if isinstance(use, StreamRef) and (<StreamRef>use).captures():
        return refuse_captured(<StreamRef>use) if strict else 0
    not_barred(use)
    fence = work_of(<StreamRef>use) if isinstance(use, StreamRef) else <Fence>use
    if not fence.wait(None):
        raise CudaError(f"waiting for {use!r} failed")
    return 0


cdef int not_barred(object use) except -1:
    if isinstance(use, StreamRef) and not (<StreamRef>use).gone():
        free_to_use(<StreamRef>use, "nobody can wait for it; do this before the capture", None)
    return 0


cdef int refuse_captured(StreamRef stream) except -1:
    raise CudaError(
        f"{stream!r} is being captured into a graph, so no code can wait for its earlier work "
        "now: do this before the capture, or after it"
    )


cdef int synchronize(StreamRef stream) except -1:
    cdef void* handle = handle_here(stream)
    cdef int result
    free_to_use(stream, "nobody can wait for it; do this before the capture, or after it", None)
    with nogil:
        result = enter(stream.context)
        if result == SUCCESS:
            result = driver.cuStreamSynchronize(handle)
            leave()
    return checked(result, "cuStreamSynchronize")


cdef int wait_outside(StreamRef stream) except -1:
    cdef Fence fence = None
    if stream.idle():
        return 0
    try:
        fence = event_outside(stream)
    except CudaError as error:
        if not is_gone(error.result):
            raise
    if fence is None:                        # nobody can wait for this stream alone now
        try:
            fence = work_of_context(stream)
        except OutOfMemory as error:
            raise OutOfMemory(
                f"waiting for {stream!r} during a capture takes 2 MiB of its device, which has not "
                f"that much left ({error}): allocate before the capture, or leave it some memory"
            ) from error
    if not fence.wait(None):
        raise CudaError(f"waiting for {stream!r} failed")
    return 0


# ---- objects that live until streams are done with their memory -------------------------------

# These are arrays of other libraries, and memory of our own that had to go, while a stream may
# still be at work on them. An object is kept before the driver is given work with it, so that
# nothing can fail in between. Nothing calls back when a stream is done. So objects are let go of
# when something else is kept, when an allocator of CUDA memory looks for memory, makes its
# statistics or ends, and by whatever has waited: `cuda.Stream.synchronize`, `cuda.Event`, and
# copies and fills without a stream. Dropping an object may run any code, which may end up here
# again.

# Retained, in the order of the work. Only the thread that is `looking` takes one out.
cdef list retained = []
cdef Py_ssize_t next_look = 0
cdef uint64_t looking = 0            # atomic: is a thread at it?
cdef uint64_t dropping = 0           # atomic: threads that drop what is over


@cython.final
cdef class Retained:
    """An object that a stream may be at work on. Internal."""

    def __cinit__(self):
        self.waits = []
        self.generation = generation


seal(Retained)


cdef Retained retain(object thing, void* by):
    cdef Retained one = Retained.__new__(Retained)
    one.thing, one.queueing, one.by = thing, True, by
    look(False, False)
    retained.append(one)
    return one


cdef void retain_until(Retained one, StreamRef stream) noexcept:
    cdef int state = stream.state()
    cdef object use = None
    if state in (CAPTURING, UNKNOWN):
        one.waits.append(graph_fence_or_never(stream))
    if state != CAPTURING:
        try:
            use = event_outside(stream)
        except Exception:
            pass
        one.waits.append(use or stream)      # `uses_done` tries again
    one.queueing = False


cdef void give_up(Retained one) noexcept:
    one.queueing = False


cdef void wait_for_those(void* by) noexcept:
    cdef Retained one
    for one in retained.copy():
        if one.by == by and callable_(one.generation):
            for use in list(one.waits):
                if isinstance(use, Fence):
                    (<Fence>use).wait(None)
    look(True, False)


cdef void park(object memory, list waits) noexcept:
    cdef Retained one = Retained.__new__(Retained)
    one.thing, one.waits = memory, waits
    retained.append(one)


cdef bint uses_done(Retained one, bint needed, set busy) noexcept:
    """`busy`: streams, an event of which is not over. Later ones are not asked."""
    cdef Py_ssize_t i
    cdef object stream
    if one.queueing or not callable_(one.generation):
        return one.generation != generation  # there is another driver, and nothing of that one
    for i in reversed(range(len(one.waits))):        # in place, since `wait_for_those` may read it
        use = one.waits[i]
        if isinstance(use, StreamRef):
            try:
                use = late_work_of(<StreamRef>use, needed and one.looks >= PATIENCE) or use
            except Exception:
                pass
        stream = (<EventFence>use).of if type(use) is EventFence else None
        if isinstance(use, StreamRef) or (
                stream is not None and stream in busy) or not (<Fence>use).passed():
            one.waits[i] = use
            if stream is not None:
                busy.add(stream)
        else:
            del one.waits[i]
    one.looks += needed
    return not one.waits


cdef Py_ssize_t look_at(Py_ssize_t first, Py_ssize_t stop, bint needed, list over) noexcept:
    """Take out those from `first` to `stop` that are over; where those behind begin then."""
    cdef Py_ssize_t at, kept = first
    cdef set busy = set()
    cdef Retained one
    for at in range(first, stop):            # meanwhile others only append
        one = <Retained>retained[at]
        if uses_done(one, needed, busy):
            over.append(one)
        else:
            retained[kept] = one
            kept += 1
    del retained[kept:stop]
    return kept


cdef bint look(bint all, bint needed) noexcept:
    global next_look
    cdef uint64_t nobody = 0
    cdef Py_ssize_t n, at
    cdef list over = []
    if len(retained) == 0:
        return True
    if not arenapy_cas(&looking, &nobody, 1):
        return False
    try:
        n, at = len(retained), 0 if all else next_look
        next_look = look_at(min(at, n), n if all else min(n, at + FEW), needed, over)
        if at + FEW > n and not all:         # and from the beginning on
            next_look = look_at(0, min(at, n, at + FEW - n), needed, over)
    finally:
        arenapy_add(&dropping, 1)
        arenapy_store(&looking, 0)
        over.clear()                         # which may run other code
        arenapy_sub(&dropping, 1)
    return True


cdef bint somebody_drops() noexcept:
    return arenapy_load(&dropping) != 0
