"""Streams as users name them, and events on them.

What lives here: which stream an object, an integer or None names; events, of which a few are kept;
waiting. What does not: which memory they protect (ordering).

Streams are told apart by the driver's id, not by their handle, which a later stream may get. Two
objects for one stream are one stream. The two default streams have no id of their own: the legacy
one is one a device, the per-thread one is one a thread and device.

While some stream is being captured into a graph, other threads may not ask about events, unless
they say that they know (``cuThreadExchangeStreamCaptureMode``): `relax` and `restore`.

Thread-safety: everything here may be called from any thread.
"""
cimport cython
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport free, malloc

import itertools
import threading
import weakref

from arenapy.atomic cimport arenapy_load, arenapy_store, arenapy_sub
from arenapy.cuda.driver cimport (
    SUCCESS, callable_, checked, driver, enter, forget, generation, leave, need, primary,
)

from arenapy.cuda.errors import CudaError

cdef enum:
    LEGACY = 1               # CU_STREAM_LEGACY; 0 is taken for it, too
    PER_THREAD = 2           # CU_STREAM_PER_THREAD
    DISABLE_TIMING = 2       # CU_EVENT_DISABLE_TIMING
    RELAXED = 2              # CU_STREAM_CAPTURE_MODE_RELAXED
    NO_DESTRUCTOR_SYNC = 1   # CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
    CAPTURE_IMPLICIT = 906   # CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    INVALID_HANDLE = 400     # CUDA_ERROR_INVALID_HANDLE
    MOVE = 1                 # CU_GRAPH_USER_OBJECT_MOVE
    DEINITIALIZED = 4        # CUDA_ERROR_DEINITIALIZED
    # From CUDA_ERROR_ILLEGAL_ADDRESS to CUDA_ERROR_LAUNCH_FAILED: the context is lost, and so is
    # all that ran in it.
    LOST_FIRST = 700
    LOST_LAST = 719
    EVENTS_KEPT = 256        # of a context

cdef object known = weakref.WeakValueDictionary()
cdef object knowing = threading.RLock()      # the collector may run code that names a stream
cdef object this_thread = threading.local()
cdef object threads = itertools.count(1)
cdef dict spare_events = {}          # by context: lists of those that nobody uses


# ---- the driver's calls ------------------------------------------------------------------

cdef int relax(void* context, int* mode) noexcept nogil:
    cdef int result = enter(context)
    mode[0] = RELAXED
    if result == SUCCESS:
        forget(driver.cuThreadExchangeStreamCaptureMode(mode))
    return result


cdef void restore(int* mode) noexcept nogil:
    forget(driver.cuThreadExchangeStreamCaptureMode(mode))
    leave()


cdef bint is_over(int result) noexcept nogil:
    """What a query said. In a context that is lost, nothing runs any more."""
    return (result == SUCCESS or result == DEINITIALIZED
            or LOST_FIRST <= result <= LOST_LAST)


# ---- streams -----------------------------------------------------------------------------

@cython.auto_pickle(False)
@cython.final
cdef class Stream:
    """A stream. Internal."""

    def __repr__(self):
        return f"<stream {<uintptr_t>self.handle:#x} of device {self.device_id}>"

    cdef int state(self) noexcept:
        """The question disturbs no capture. A stream that cannot be asked fails when it is used."""
        cdef int status = 0, result
        with nogil:
            result = enter(self.context)
            if result == SUCCESS:
                result = driver.cuStreamIsCapturing(self.handle, &status)
                leave()
            forget(result)
        if result == CAPTURE_IMPLICIT:
            return BARRED
        return CAPTURING if result == SUCCESS and status else FREE_TO_USE

    cdef bint captures(self) noexcept:
        return self.state() == CAPTURING

    cdef bint idle(self) noexcept:
        cdef int result, mode = RELAXED
        # Of one that may be gone, the handle may be another's: an event is asked, which tells.
        # A fence is not asked what other streams have done.
        if self.fence or not self.lasting or self.state() != FREE_TO_USE:
            return False
        with nogil:
            result = relax(self.context, &mode)
            if result == SUCCESS:
                result = driver.cuStreamQuery(self.handle)
                restore(&mode)
            forget(result)
        return is_over(result)


cdef object handle_of(object stream):
    """The handle that an object stands for, as an int; and whether the object keeps it alive.

    Of libraries' own types, those named ExternalStream do not.
    """
    kind = type(stream).__name__
    owns = not kind.startswith("External")
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream, False
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        _, handle = protocol() if callable(protocol) else protocol
        return int(handle), owns
    for name in ("cuda_stream", "ptr", "handle"):       # torch, CuPy, numba-cuda
        handle = getattr(stream, name, None)
        if hasattr(handle, "value"):                    # a ctypes pointer, whose 0 is None
            handle = handle.value or 0
        if isinstance(handle, int) and "stream" in kind.lower():
            return handle, owns
    raise TypeError(
        f"stream={stream!r} is no stream: give an object with __cuda_stream__, such as one of "
        "cuda.core, CuPy, torch or numba, or a handle as an int"
    )


cdef object device_of(object stream):
    """The ordinal of the device that an object says it is on; None: it does not say."""
    for name in ("device_index", "device_id", "device"):     # torch, CuPy, cuda.core
        device = getattr(stream, name, None)
        device = getattr(device, "device_id", device)
        if isinstance(device, int) and device >= 0:
            return device
    return None


cdef uint64_t number_of_thread() except 0:
    """Never that of another thread, dead or alive, unlike its ident."""
    number = getattr(this_thread, "number", None)
    if number is None:
        number = this_thread.number = next(threads)
    return number


cdef int current_device() except -1:
    """That of the current context; 0 if there is none."""
    cdef int device = 0
    need()
    with nogil:
        if driver.cuCtxGetDevice(&device) != SUCCESS:
            device = 0
    return device


cdef Stream stream_of(object stream, int device_id):
    cdef Stream found
    cdef void* context = NULL
    cdef void* handle
    cdef uint64_t id = 0, thread = 0
    cdef int result, device = device_id
    if isinstance(stream, Stream):
        return <Stream>stream
    number, owns = handle_of(stream)
    if not 0 <= number < 1 << 64:
        raise ValueError(f"stream={stream!r} is no handle of a stream")
    handle = <void*><uintptr_t>number
    if <uintptr_t>handle <= PER_THREAD:
        said = device_of(stream)
        if said is not None:
            device = said
        elif device < 0:
            device = current_device()
        context = primary(device)
        if <uintptr_t>handle == PER_THREAD:
            thread = number_of_thread()
        else:
            handle = <void*><uintptr_t>LEGACY
    else:
        need()
        with nogil:
            result = driver.cuStreamGetCtx(handle, &context)
            if result == SUCCESS:
                result = enter(context)
                if result == SUCCESS:
                    result = driver.cuStreamGetId(handle, &id)
                    if result == SUCCESS:
                        result = driver.cuCtxGetDevice(&device)
                    leave()
        checked(result, "cuStreamGetId")
    key = (<uintptr_t>context, <uintptr_t>handle if id == 0 else 0, id, thread, generation)
    found = Stream.__new__(Stream)
    found.handle, found.context, found.id = handle, context, id
    found.device_id, found.thread = device, thread
    found.lasting = <uintptr_t>handle == LEGACY
    with knowing:
        found = known.setdefault(key, found)
    if owns and id and found.owner is None:
        found.owner = stream
        found.lasting = True
    return found


cdef Stream fence_of(int device_id):
    cdef Stream legacy = stream_of(LEGACY, device_id)
    cdef Stream found
    key = (<uintptr_t>legacy.context, "fence", generation)
    with knowing:
        found = known.get(key)
        if found is None:
            found = Stream.__new__(Stream)
            found.handle, found.context, found.device_id = (
                legacy.handle, legacy.context, legacy.device_id)
            found.lasting = found.fence = True
            known[key] = found
    return found


cdef int join_streams(Stream stream, Stream other) except -1:
    if stream is not other:
        free_to_use(stream, f"it cannot wait for {other!r}; do this before the capture")
        free_to_use(other, f"{stream!r} cannot wait for it; do this before the capture")
        let_wait(stream, other)
    return 0


cdef int let_wait(Stream stream, Stream other) except -1:
    if not new_event(other).wait(stream):
        raise CudaError(f"cuStreamWaitEvent failed: {stream!r} cannot wait for {other!r}")
    return 0


cdef int free_to_use(Stream stream, str what) except -1:
    cdef int state = stream.state()
    if state == CAPTURING:
        raise CudaError(
            f"{stream!r} is being captured into a graph: {what}"
        )
    if state == BARRED:
        raise CudaError(
            f"{stream!r}, the legacy default stream, cannot be used while a blocking stream is "
            f"being captured into a graph: {what}; an allocator made with stream= does without it"
        )
    return 0


cdef int follow(Stream stream, Stream other) except -1:
    cdef bint captured = stream.captures()
    if stream is other or captured != other.captures():
        return 0
    return let_wait(stream, other) if captured else join_streams(stream, other)


cdef void* handle_here(Stream stream) noexcept:
    """Its handle; of another thread's default one the legacy stream, which waits for that."""
    if stream.thread and stream.thread != number_of_thread():
        return <void*><uintptr_t>LEGACY
    return stream.handle


cdef object number_of(Stream stream):
    return <uintptr_t>handle_here(stream)


cdef int synchronize(Stream stream) except -1:
    cdef void* handle = handle_here(stream)
    cdef int result
    with nogil:
        result = enter(stream.context)
        if result == SUCCESS:
            result = driver.cuStreamSynchronize(handle)
            leave()
    return checked(result, "cuStreamSynchronize")


# ---- tickets -----------------------------------------------------------------------------

@cython.auto_pickle(False)
cdef class Ticket:
    """Something that has to be over before memory is used again. Internal."""

    cdef bint over(self) noexcept:
        return True

    cdef bint wait(self, Stream stream) noexcept:
        return True


@cython.auto_pickle(False)
@cython.final
cdef class Event(Ticket):
    """All that a stream was given before. Internal."""

    def __dealloc__(self):
        """Keep it for the next one; the driver need not be asked."""
        if self.event != NULL and callable_(self.generation):
            give_event(self.context, self.event)

    cdef bint over(self) noexcept:
        cdef int result, mode = RELAXED
        if self.event == NULL:
            return True
        with nogil:
            result = relax(self.context, &mode)
            if result == SUCCESS:
                result = driver.cuEventQuery(self.event)
                restore(&mode)
            forget(result)
        return is_over(result)

    cdef bint wait(self, Stream stream) noexcept:
        cdef int result, mode = RELAXED
        if self.event == NULL:
            return True
        with nogil:
            result = relax(self.context if stream is None else stream.context, &mode)
            if result == SUCCESS:
                if stream is None:
                    result = driver.cuEventSynchronize(self.event)
                else:
                    result = driver.cuStreamWaitEvent(stream.handle, self.event, 0)
                restore(&mode)
            forget(result)
        return is_over(result)


cdef void give_event(void* context, void* event) noexcept:
    spare = spare_events.get((<uintptr_t>context, generation))
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


cdef Ticket new_event(Stream stream):
    cdef Event ticket = Event.__new__(Event)
    cdef void* event = take_event(stream.context)
    cdef void* handle = handle_here(stream)
    cdef uint64_t id = stream.id
    cdef int result
    ticket.context, ticket.generation = stream.context, generation
    ticket.event = event
    with nogil:
        result = enter(stream.context)
        if result == SUCCESS:
            if id and not stream.lasting:    # the handle may be another stream's by now
                result = driver.cuStreamGetId(handle, &id)
                if result == SUCCESS and id != stream.id:
                    result = INVALID_HANDLE
            if result == SUCCESS:
                result = driver.cuEventRecord(event, handle)
            leave()
    checked(result, "cuEventRecord")
    return ticket


# ---- graphs ------------------------------------------------------------------------------

# Of two owners: the ticket, and the graph, which the driver may destroy in a thread of its own.
cdef struct SharedFlag:
    uint64_t owners
    uint64_t gone


cdef void drop_flag(SharedFlag* flag) noexcept nogil:
    if arenapy_sub(&flag.owners, 1) == 1:
        free(flag)


cdef void graph_is_gone(void* p) noexcept nogil:
    arenapy_store(&(<SharedFlag*>p).gone, 1)
    drop_flag(<SharedFlag*>p)


@cython.auto_pickle(False)
@cython.final
cdef class Graph(Ticket):
    """The graph that a stream was captured into, and what was made of it. Internal."""

    def __dealloc__(self):
        if self.shared != NULL:
            drop_flag(<SharedFlag*>self.shared)

    cdef bint over(self) noexcept:
        return arenapy_load(&(<SharedFlag*>self.shared).gone) != 0

    cdef bint wait(self, Stream stream) noexcept:
        return self.over()                   # nobody knows whether it will be launched again


cdef int captured_graph(void* handle, uint64_t* id, void** graph) noexcept nogil:
    cdef int status = 0, result
    if driver.cuStreamGetCaptureInfo != NULL:
        result = driver.cuStreamGetCaptureInfo(handle, &status, id, graph, NULL, NULL, NULL)
    else:
        result = driver.cuStreamGetCaptureInfo_12(handle, &status, id, graph, NULL, NULL)
    return result


cdef Ticket new_graph(Stream stream):
    cdef Graph ticket = Graph.__new__(Graph)
    cdef SharedFlag* flag = NULL
    cdef void* graph = NULL
    cdef void* thing = NULL
    cdef uint64_t id = 0
    cdef int result
    with nogil:
        result = enter(stream.context)
        if result == SUCCESS:
            result = captured_graph(stream.handle, &id, &graph)
            leave()
    checked(result, "cuStreamGetCaptureInfo")
    if stream.graph is not None and stream.capture == id and not stream.graph.over():
        return stream.graph                  # one is enough for all that a capture uses
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
    ticket.shared = flag
    checked(result, "cuGraphRetainUserObject")
    stream.graph, stream.capture = ticket, id
    return ticket


cdef Ticket ticket_of(Stream stream):
    return new_graph(stream) if stream.captures() else new_event(stream)


cdef Ticket last_resort(Stream stream):
    cdef int result
    with nogil:
        result = enter(stream.context)
        if result == SUCCESS:
            result = driver.cuCtxSynchronize()
            leave()
        forget(result)
    return Ticket.__new__(Ticket) if is_over(result) else None
