"""Streams as users name them.

What lives here: which stream an object, an integer or None names, and whether it is capturing. What
does not: events and waiting (ticket), which memory they protect (ordering).

Streams are told apart by the driver's id, not by their handle, which a later stream may get. Two
objects for one stream are one stream. The two default streams have no id of their own: the legacy
one is one a device, the per-thread one is one a thread and device.

While a stream is being captured into a graph, a question for its id, or for what it has done, makes
the capture invalid, whatever its mode. (Seen with driver 580; ``cuStreamIsCapturing`` does not, and
neither do calls about other streams, if this thread says that it knows of the capture: `relax` and
`restore`, by ``cuThreadExchangeStreamCaptureMode``.)

The driver crashes on the handle of a stream that was destroyed. So handles are used while their
object is there and says that it still has them, or in the call that names them.

Thread-safety: everything here may be called from any thread.
"""
cimport cython
from libc.stdint cimport uint64_t, uintptr_t

import functools
import itertools
import threading
import weakref

from arenapy.cuda.driver cimport (
    SUCCESS, checked, driver, enter, forget, generation, leave, need, primary,
)

from arenapy.cuda.errors import CudaError

cdef enum:
    LEGACY = 1               # CU_STREAM_LEGACY; 0 is taken for it, too
    PER_THREAD = 2           # CU_STREAM_PER_THREAD
    RELAXED = 2              # CU_STREAM_CAPTURE_MODE_RELAXED
    UNCHANGED = -1           # no such mode
    INVALID_HANDLE = 400     # CUDA_ERROR_INVALID_HANDLE
    CAPTURE_IMPLICIT = 906   # CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    DEINITIALIZED = 4        # CUDA_ERROR_DEINITIALIZED
    # From CUDA_ERROR_ILLEGAL_ADDRESS to CUDA_ERROR_LAUNCH_FAILED: the context is lost, and so is
    # all that ran in it.
    LOST_FIRST = 700
    LOST_LAST = 719

cdef object known = weakref.WeakValueDictionary()    # by what tells them apart, `generation` first
cdef object knowing = threading.RLock()      # the collector may run code that names a stream
cdef object this_thread = threading.local()
cdef object threads = itertools.count(1)


# ---- the driver's calls ------------------------------------------------------------------

cdef int relax(void* context, int* mode) noexcept nogil:
    cdef int result = enter(context), refused
    mode[0] = RELAXED
    if result == SUCCESS:
        refused = driver.cuThreadExchangeStreamCaptureMode(mode)
        if refused != SUCCESS:
            mode[0] = UNCHANGED              # or `restore` would relax it for good
            forget(refused)
    return result


cdef void restore(int* mode) noexcept nogil:
    if mode[0] != UNCHANGED:
        forget(driver.cuThreadExchangeStreamCaptureMode(mode))
    leave()


cdef bint is_over(int result) noexcept nogil:
    """What a query said. In a context that is lost, nothing runs any more."""
    return (result == SUCCESS or result == DEINITIALIZED
            or LOST_FIRST <= result <= LOST_LAST)


# ---- streams -----------------------------------------------------------------------------

cdef class Kept:
    """A stream object whose stream is not destroyed while the object is there. Internal."""


@cython.auto_pickle(False)
@cython.final
cdef class Stream:
    """A stream. Internal."""

    def __repr__(self):
        return f"<stream {<uintptr_t>self.handle:#x} of device {self.device_id}>"

    cdef bint gone(self) noexcept:
        """Has somebody closed it? The driver crashes on the handle of a destroyed stream."""
        if self.tells is None:
            return False
        try:
            return self.tells()[1] != <uintptr_t>self.handle
        except Exception:
            return True

    cdef int state(self) noexcept:
        """The question disturbs no capture. A stream that cannot be asked fails when it is used."""
        return FREE_TO_USE if self.gone() else state_of(self.context, self.handle)

    cdef bint captures(self) noexcept:
        return self.state() == CAPTURING

    cdef bint idle(self) noexcept:
        cdef int result, mode = RELAXED
        # Of one that may be gone, the handle may be another's: an event is asked, which tells.
        # A fence is not asked what other streams have done.
        if self.fence or not self.lasting or self.gone() or self.state() != FREE_TO_USE:
            return False
        with nogil:
            result = relax(self.context, &mode)
            if result == SUCCESS:
                result = driver.cuStreamQuery(self.handle)
                restore(&mode)
            forget(result)
        return is_over(result)


cdef int state_of(void* context, void* handle) noexcept:
    # The one call of the driver that is made with the GIL, which costs three times as much to let
    # go as this takes. It waits for nobody who may want the GIL: not for host functions, stream
    # callbacks or user objects' destructors that run, nor for threads that allocate, free or
    # synchronize (driver 580; tests/test_gpu_gil.py).
    cdef int status = 0, result
    if <uintptr_t>handle > PER_THREAD:       # it has its context
        result = driver.cuStreamIsCapturing(handle, &status)
        forget(result)
    else:
        with nogil:
            result = enter(context)
            if result == SUCCESS:
                result = driver.cuStreamIsCapturing(handle, &status)
                leave()
            forget(result)
    if result == CAPTURE_IMPLICIT:
        return BARRED
    return CAPTURING if result == SUCCESS and status else FREE_TO_USE


cdef tuple handle_of(object stream):
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


def described(stream):
    """What its ``__cuda_stream__`` would say."""
    return 0, handle_of(stream)[0]


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
                    result = driver.cuCtxGetDevice(&device)
                    leave()
        checked(result, "cuStreamGetCtx")
        if state_of(context, handle) == CAPTURING:
            return capturing(handle, context, device)
        with nogil:
            result = driver.cuStreamGetId(handle, &id)
        checked(result, "cuStreamGetId")
    key = (generation, <uintptr_t>context, <uintptr_t>handle if id == 0 else 0, id, thread)
    found = Stream.__new__(Stream)
    found.handle, found.context, found.id = handle, context, id
    found.device_id, found.thread = device, thread
    found.lasting = <uintptr_t>handle == LEGACY
    with knowing:
        found = known.setdefault(key, found)
    if owns and id and found.owner is None:
        found.owner = stream
        if hasattr(stream, "close") and not isinstance(stream, Kept):
            tells = getattr(stream, "__cuda_stream__", None)
            found.tells = tells if callable(tells) else functools.partial(described, stream)
        found.lasting = True
    return found


cdef Stream capturing(void* handle, void* context, int device_id):
    """The stream of a handle that captures, whose id is not to be asked for."""
    cdef Stream found
    cdef void* graph = NULL
    cdef uint64_t id = 0
    cdef int result
    with knowing:
        for found in streams_in(context):
            if found.handle == handle and found.owner is not None:
                return found
    with nogil:
        result = enter(context)
        if result == SUCCESS:
            result = captured_graph(handle, &id, &graph)
            leave()
    checked(result, "cuStreamGetCaptureInfo")
    # For as long as it captures this is another stream, which costs no more than waiting for it.
    found = Stream.__new__(Stream)
    found.handle, found.context, found.id, found.device_id = handle, context, id, device_id
    with knowing:
        return known.setdefault((generation, <uintptr_t>context, "capture", id), found)


cdef Stream fence_of(int device_id):
    cdef Stream legacy = stream_of(LEGACY, device_id)
    cdef Stream found
    key = (generation, <uintptr_t>legacy.context, "fence")
    with knowing:
        found = known.get(key)
        if found is None:
            found = Stream.__new__(Stream)
            found.handle, found.context, found.device_id = (
                legacy.handle, legacy.context, legacy.device_id)
            found.lasting = found.fence = True
            known[key] = found
    return found


cdef int captured_graph(void* handle, uint64_t* id, void** graph) noexcept nogil:
    cdef int status = 0, result
    if driver.cuStreamGetCaptureInfo != NULL:
        result = driver.cuStreamGetCaptureInfo(handle, &status, id, graph, NULL, NULL, NULL)
    else:
        result = driver.cuStreamGetCaptureInfo_12(handle, &status, id, graph, NULL, NULL)
    return result


cdef int not_closed(Stream stream) except -1:
    if stream.gone():
        raise CudaError(f"{stream!r} was closed", INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE")
    return 0


cdef int free_to_use(Stream stream, str what, object other) except -1:
    cdef int state
    not_closed(stream)
    state = state_of(stream.context, stream.handle)
    if state != FREE_TO_USE:
        what = what.format(other)            # only now: most calls end here
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


cdef void* handle_here(Stream stream) noexcept:
    """Its handle; of another thread's default one the legacy stream, which waits for that."""
    if stream.thread and stream.thread != number_of_thread():
        return <void*><uintptr_t>LEGACY
    return stream.handle


cdef object number_of(Stream stream):
    return <uintptr_t>handle_here(stream)


cdef list streams_in(void* context):
    """Streams of a context that are known now, and sure to exist."""
    cdef list found = []
    cdef Stream one
    with knowing:
        for key, one in list(known.items()):
            if (key[0] == generation and one.context == context
                    and (one.lasting or one.of_allocator)
                    and not one.fence and not one.gone()):
                found.append(one)
    return found
