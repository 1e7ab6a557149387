"""Streams as users name them.

What lives here: which stream an object, an integer or None names, and whether it is capturing. What
does not: events and waiting (fence), which memory they protect (ordering).

Streams are told apart by the driver's id, not by their handle, which a later stream may get. Two
objects for one stream are one stream. The two default streams have no id of their own: the legacy
one is one a device, the per-thread one is one a thread and device.

While a stream is being captured into a graph, a question for its id, or for what it has done, makes
the capture invalid, whatever its mode. (Seen with driver 580; ``cuStreamIsCapturing`` does not, and
neither do calls about other streams, if this thread says that it knows of the capture: `relax` and
`restore_capture_mode`, by ``cuThreadExchangeStreamCaptureMode``.)

The driver crashes on the handle of a stream that was destroyed, and gives it to a later one. So a
handle is used whenever needed only while an object is kept that is known to keep its stream
(`owns`, `shared`, or one of our own). Any other object, and an integer, stands for its stream when
it is named, and when the block that was named for it is released. Such an object is kept until
then, as it may own its stream without saying so; each stands for a stream of its own here, whose
work then comes in order by events.

The per-thread default stream exists as long as its thread. Each thread keeps its StreamRefs
(`thread_stream`), so their end is the end of the thread. Other threads use the legacy stream
instead, which waits for it (`handle_here`).

Thread-safety: everything here may be called from any thread.
"""
cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t, uintptr_t

from arenapy.allocator.allocator cimport raise_later
from arenapy.base.atomic cimport ARENAPY_GIL
from arenapy.base.dicts cimport found_in

import functools
import itertools
import sys
import threading
import weakref

from arenapy.cuda.driver cimport (
    SUCCESS, callable_, checked, devices_in_use, driver, enter, forget, generation, leave, need,
    primary,
)
from arenapy.base.sealed cimport seal
from arenapy.base.turns cimport begin_turn, end_turn

from arenapy.cuda.errors import CudaError

cdef extern from *:
    """
    struct arenapy_core_stream {             /* cuda.core's Stream, 1.2 */
        PyObject_HEAD
        void *functions;
        const uintptr_t *handle;             /* a shared_ptr, as the next one */
        void *handle_count, *context, *context_count;
        int device_id, nonblocking, priority;
        PyObject *weak;
    };
    """
    cdef struct CoreStream "arenapy_core_stream":
        const uintptr_t* handle

cdef extern from *:
    """
    /* The default stream that this thread named last: borrowed from `this_thread`, which drops it
       in this thread, so that its end finds it here. */
    static __thread struct { PyObject *stream; void *context; int generation; } arenapy_mine;
    static __thread uint64_t arenapy_thread_number;
    """
    ctypedef struct Mine:
        PyObject* stream
        void* context
        int generation
    Mine arenapy_mine
    uint64_t arenapy_thread_number

cdef enum:
    LEGACY = 1               # CU_STREAM_LEGACY; 0 is taken for it, too
    PER_THREAD = 2           # CU_STREAM_PER_THREAD
    RELAXED = 2              # CU_STREAM_CAPTURE_MODE_RELAXED
    UNCHANGED = -1           # no such mode
    INVALID_CONTEXT = 201    # CUDA_ERROR_INVALID_CONTEXT
    INVALID_HANDLE = 400     # CUDA_ERROR_INVALID_HANDLE
    CONTEXT_GONE = 709       # CUDA_ERROR_CONTEXT_IS_DESTROYED
    CAPTURE_IMPLICIT = 906   # CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    DEINITIALIZED = 4        # CUDA_ERROR_DEINITIALIZED
    # From CUDA_ERROR_ILLEGAL_ADDRESS to CUDA_ERROR_LAUNCH_FAILED: the context is lost, and so is
    # all that ran in it.
    LOST_FIRST = 700
    LOST_LAST = 719

# StreamRefs, by what tells them apart, `generation` first.
cdef WeakValues known = WeakValues.__new__(WeakValues)
cdef object this_thread = threading.local()
cdef object threads = itertools.count(1)


# ---- what is found by a key ---------------------------------------------------------------

@cython.final
cdef class WeakValues:
    """Objects by key, for as long as somebody has them. Internal.

    Unlike weakref's class this is no Python code, in which a signal's exception could come.
    """

    def __cinit__(self):
        self.refs = {}

    cdef object get(self, object key):
        ref = found_in(self.refs, key)
        return None if ref is None else ref()

    cdef int put(self, object key, object value) except -1:
        cdef object ref = weakref.ref(value, functools.partial(self.forget, key))
        cdef bint begun = begin_turn(&self.busy)
        try:
            self.refs[key] = ref
        finally:
            end_turn(&self.busy, begun)
        return 0

    cdef object first(self, object key, object made, object old=None):
        # Made before the turn, in which no garbage is collected and no object ends.
        cdef object ref = weakref.ref(made, functools.partial(self.forget, key))
        cdef object found
        cdef bint begun = begin_turn(&self.busy)
        try:
            found = self.get(key)
            if found is None or found is old:
                self.refs[key] = ref
                found = made
        finally:
            end_turn(&self.busy, begun)
        return found

    def forget(self, key, ref):
        cdef bint begun = begin_turn(&self.busy)
        try:
            if found_in(self.refs, key) is ref:
                self.refs.pop(key, None)
        finally:
            end_turn(&self.busy, begun)


seal(WeakValues)


# ---- the driver's calls ------------------------------------------------------------------

cdef int relax(void* context, int* mode) noexcept nogil:
    cdef int result = enter(context), refused
    mode[0] = RELAXED
    if result == SUCCESS:
        refused = driver.cuThreadExchangeStreamCaptureMode(mode)
        if refused != SUCCESS:
            mode[0] = UNCHANGED              # or `restore_capture_mode` would relax it for good
            forget(refused)
    return result


cdef void restore_capture_mode(int* mode) noexcept nogil:
    if mode[0] != UNCHANGED:
        forget(driver.cuThreadExchangeStreamCaptureMode(mode))
    leave()


cdef bint is_done(int result) noexcept nogil:
    """What a query said. In a context that is lost, nothing runs any more."""
    return (result == SUCCESS or result == DEINITIALIZED
            or LOST_FIRST <= result <= LOST_LAST)


cdef bint is_gone(int result) noexcept nogil:
    return result == INVALID_HANDLE or result == INVALID_CONTEXT or result == CONTEXT_GONE


# ---- streams -----------------------------------------------------------------------------

@cython.no_gc_clear                  # nor does a stream name what could name it
cdef class OwnStream:
    """A stream object of arenapy. Internal."""

    def __dealloc__(self):
        if arenapy_mine.stream == <PyObject*>self:
            arenapy_mine.stream = NULL
        if self.stream is not None:          # the driver may have refused to make it
            self.stream.ended = True

    cdef StreamRef open_stream(self):
        if self.stream.shut:
            raise ValueError(f"{self!r} is closed; make another one")
        return self.stream


seal(OwnStream)


@cython.final
# The collector sees no owner, whose finalizer may destroy the stream: it would run it before the
# end of an allocator that still needs the stream.
@cython.no_gc
cdef class StreamRef:
    """A stream. Internal."""

    def __dealloc__(self):
        if self.made and callable_(self.generation):
            with nogil:
                if enter(self.context) == SUCCESS:
                    forget(driver.cuStreamDestroy(self.handle))
                    leave()

    def __repr__(self):
        return f"<stream {<uintptr_t>self.handle:#x} of device {self.device_id}>"

    cdef int named_by(self, object stream) except -1:
        if self.namer_is_gone() and is_core_stream(stream):
            namer = weakref.ref(stream)
            with cython.critical_section(self):
                self.namer = namer
        return 0

    cdef bint namer_is_gone(self):
        with cython.critical_section(self):
            namer = self.namer
        return namer is not None and namer() is None

    cdef bint gone(self) noexcept:
        """Has somebody closed it? The driver crashes on the handle of a destroyed stream."""
        cdef object first
        cdef bint answer
        if self.tells is None and self.ends_by is None:
            return False
        try:
            return says_gone(self)
        except BaseException as error:
            first = error
        # A closed one may raise, and does so each time. An error that came once may be a signal's:
        # it is raised where it can be raised.
        try:
            answer = says_gone(self)
        except BaseException as second:
            if is_signals(first):
                raise_later(first)
            if is_signals(second):
                raise_later(second)
            return True
        if not isinstance(first, MemoryError):
            raise_later(first)
        return answer

    cdef int state(self) noexcept:
        """The question disturbs no capture. A stream that is gone fails when it is used."""
        return FREE_TO_USE if self.gone() else state_of(self.context, handle_here(self))

    cdef bint captures(self) except -1:
        return says_captured(self.state(), handle_here(self))

    cdef bint idle(self) noexcept:
        return self.tells_idle() and self.state() == FREE_TO_USE and self.has_nothing_to_do()

    cdef bint tells_idle(self) noexcept:
        """May `has_nothing_to_do` be asked, if it is free to use?"""
        # Of one that may be gone, the handle may be another's: an event is asked, which tells. So
        # is one for another thread's default stream.
        if self.thread:
            return not elsewhere(self)
        return self.id != 0 and self.lasting and not self.gone()

    cdef bint has_nothing_to_do(self) noexcept:
        cdef int result, mode = RELAXED
        with nogil:
            result = relax(self.context, &mode)
            if result == SUCCESS:
                result = driver.cuStreamQuery(self.handle)
                restore_capture_mode(&mode)
            forget(result)
        return is_done(result)


seal(StreamRef)


cdef bint is_signals(object error) noexcept:
    """Does a signal's handler raise such errors, and a closed stream does not?"""
    return not isinstance(error, Exception) or isinstance(error, TimeoutError)


cdef bint says_gone(StreamRef stream) except -1:
    if stream.ends_by is not None and not stream.ends_by.alive:
        return True
    if stream.tells is None:
        return False
    _, handle = stream.tells()
    return handle != <uintptr_t>stream.handle


cdef bint is_current(void* context) noexcept:
    cdef void* current = NULL
    cdef int result = driver.cuCtxGetCurrent(&current)   # of this thread: it waits for nobody
    forget(result)
    return result == SUCCESS and current == context


cdef int state_of(void* context, void* handle) noexcept:
    # The one question to the driver that is asked with the GIL, which costs three times as much to
    # let go as this takes. It waits for nobody who may want the GIL: not for host functions, stream
    # callbacks or user objects' destructors that run, nor for threads that allocate, free or
    # synchronize (driver 580; tests/gpu/test_gpu_gil.py).
    cdef int status = 0, result
    cdef bint may_go = <uintptr_t>handle > PER_THREAD    # a default stream is always there
    if may_go or is_current(context):        # it has its context; a default stream, the current one
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
    if not is_done(result) and not (may_go and is_gone(result)):
        return UNKNOWN
    return CAPTURING if result == SUCCESS and status else FREE_TO_USE


cdef bint says_captured(int state, void* handle) except -1:
    if state == UNKNOWN:
        raise CudaError(
            f"cuStreamIsCapturing failed: the stream {<uintptr_t>handle:#x} may be captured into "
            "a graph, and the graph would then contain this use; try again"
        )
    return state == CAPTURING


cdef object handle_of(object stream):
    """The handle that an object stands for, as an int."""
    cdef str kind
    cdef uintptr_t number = core_handle(stream)
    if number:
        return number
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    if is_core_stream(stream):               # the same as below, without what it does not need
        said = stream.__cuda_stream__()
        if type(said) is tuple and len(<tuple>said) == 2:
            handle = (<tuple>said)[1]
            if type(handle) is int and handle != 0:
                return handle
    kind = type(stream).__name__
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        said = protocol() if callable(protocol) else protocol
        try:
            _, handle = said
            handle = int(handle)
        except (TypeError, ValueError):
            raise TypeError(
                f"stream: this {kind}.__cuda_stream__ gives {said!r}, which is not a pair of a "
                "version and a handle, like (0, 1)"
            ) from None
        # What cuda.core's has once it is closed. Work for it may not go to the default stream.
        if handle == 0 and hasattr(stream, "close") and getattr(stream, "is_closed", True):
            raise ValueError(
                f"stream: this {kind} has no handle, and so was closed; make another one, or "
                "name the legacy default stream by 1"
            )
        return handle
    # torch, CuPy, numba-cuda; torch's of any device, whose number may mean something else there.
    for name in ("cuda_stream", "ptr", "handle", "native_handle"):
        if name == "native_handle":
            device = getattr(stream, "device", None)
            if getattr(device, "type", None) != "cuda":
                continue
        handle = getattr(stream, name, None)
        if hasattr(handle, "value"):                    # a ctypes pointer, whose 0 is None
            handle = handle.value or 0
        if isinstance(handle, int) and "stream" in kind.lower():
            return handle
    raise TypeError(
        f"stream={stream!r} is not a stream: give an object with __cuda_stream__, such as one of "
        "cuda.core, CuPy, torch or numba, or a handle as an int"
    )


def described(stream):
    """What its ``__cuda_stream__`` would say."""
    return 0, handle_of(stream)


# ---- who owns its stream -----------------------------------------------------------------

def of_torchs_pool(stream):
    """torch never destroys a stream of its own, whose number is odd. That of another is even."""
    return stream.stream_id & 1


def cupy_made_it(stream):
    """It has what its constructor sets, and `from_external` has set no other owner."""
    attributes = vars(stream)
    return (
        attributes.keys() <= {"ptr", "device_id", "_graph_host_funcargs", "_foreign_stream_ref"}
        and attributes.get("_foreign_stream_ref") is None
    )


def numba_ends_it(stream):
    """The finalizer that destroys the stream; None: there is none."""
    found = None
    for ref in () if stream.external else weakref.getweakrefs(stream):
        # numba's is the oldest, and comes last. A proxy would look in the stream.
        if type(ref) is weakref.ref and isinstance(ref.__callback__, weakref.finalize):
            found = ref.__callback__
    return found


#: Classes, by module and name, some of whose objects keep their stream, and which of them do. Not
#: their subclasses. For objects of cuda.core, which can be closed, see `shared`.
OWNERS = {
    ("torch.cuda.streams", "Stream"): of_torchs_pool,
    ("torch", "Stream"): of_torchs_pool,
    ("cupy.cuda.stream", "Stream"): cupy_made_it,
    ("numba.cuda.cudadrv.driver", "Stream"): numba_ends_it,
}


cdef bint owns(object stream) noexcept:
    try:
        known_to = OWNERS.get((type(stream).__module__, type(stream).__qualname__))
        # The code of one that can be closed runs whenever it is asked whether it was.
        return known_to is not None and not hasattr(stream, "close") and bool(known_to(stream))
    except Exception:                        # a version of the library that is not known
        return False


@cython.final
cdef class Named:
    """An object that names a stream, for cuda.core."""
    cdef object handle
    cdef object __weakref__

    def __cuda_stream__(self):
        return 0, self.handle


seal(Named)

cdef object core_type = None         # cuda.core's Stream, once one was seen
cdef bint core_fields_known = False  # where this file expects them


cdef bint is_core_stream(object stream) noexcept:
    return type(stream) is core_type and core_type is not None


cdef uintptr_t core_handle(object stream) noexcept:
    """The handle of a stream of cuda.core's, read from the object; 0: ask the object.

    The call of its `__cuda_stream__` takes longer than all else that an allocation does.
    """
    cdef CoreStream* fields = <CoreStream*><PyObject*>stream
    if not core_fields_known or type(stream) is not core_type or fields.handle == NULL:
        return 0
    return fields.handle[0]


def knows_core_fields():
    """Are the handles of cuda.core's streams read here? For tests."""
    return core_fields_known


cdef bint look_at_fields(object stream, object handle) noexcept:
    """Is the handle of this stream of cuda.core's where `core_handle` reads it?

    The file reads this process's memory as the code below would, without the risk of a crash.
    """
    cdef CoreStream* fields = <CoreStream*><PyObject*>stream
    try:
        # On builds without the GIL, another thread may close the stream during a read.
        if not ARENAPY_GIL or type(stream).__basicsize__ != sizeof(CoreStream):
            return False
        with open("/proc/self/mem", "rb", 0) as memory:
            memory.seek(<uintptr_t>fields.handle)
            return int.from_bytes(memory.read(sizeof(uintptr_t)), sys.byteorder) == handle
    except Exception:
        return False


cdef object shared(object stream, object handle):
    """A cuda.core Stream that keeps a stream of cuda.core's own, and that no user can close; None.

    cuda.core counts the objects of a stream that it made: the driver's stream is destroyed with the
    last of them. It makes another one for whatever names the handle of such a stream. If cuda.core
    did not make the stream, its new object keeps the one that named it instead, which is looked at.
    """
    global core_type, core_fields_known
    cdef Named one
    if type(stream).__qualname__ != "Stream" or type(stream).__module__ != "cuda.core._stream":
        return None
    if core_type is not type(stream):
        core_type, core_fields_known = type(stream), look_at_fields(stream, handle)
    one = Named.__new__(Named)
    one.handle = handle
    try:
        found = core_type._init(one)
        kept = weakref.ref(one)
        one = None
        return None if kept() is not None or handle_of(found) != handle else found
    except Exception:                        # a version of cuda.core that is not known
        return None


cdef object finalizer_of(object stream):
    """numba's, which also runs when the interpreter exits, though somebody keeps the stream."""
    try:
        if OWNERS.get((type(stream).__module__, type(stream).__qualname__)) is numba_ends_it:
            return numba_ends_it(stream)
    except Exception:
        pass                                 # as in `owns`
    return None


cdef bint ends_with(object stream) noexcept:
    """Does nobody give its stream any more work when the object, which owns it, is gone?"""
    return OWNERS[type(stream).__module__, type(stream).__qualname__] is not of_torchs_pool


cdef object device_of(object stream):
    # Not `device`: cuda.core's default streams say there which context was current at first.
    if is_core_stream(stream):
        return None
    for name in ("device_index", "device_id"):               # torch, CuPy
        device = getattr(stream, name, None)
        if isinstance(device, int) and device >= 0:
            return device
    return None


cdef uint64_t number_of_thread() except 0:
    """Never that of another thread, dead or alive, unlike its ident."""
    global arenapy_thread_number
    if arenapy_thread_number == 0:
        arenapy_thread_number = next(threads)
    return arenapy_thread_number


cdef int current_device() except -1:
    """That of the current context; 0 if there is none."""
    cdef int device = 0
    need()
    with nogil:
        if driver.cuCtxGetDevice(&device) != SUCCESS:
            device = 0
    return device


def device_meant(stream):
    """Internal: the ordinal of a stream's device; None: that of the current context."""
    return current_device() if stream is None else stream_of(stream, -1).device_id


cdef StreamRef stream_of(object stream, int device_id):
    cdef StreamRef found
    cdef void* context = NULL
    cdef void* handle
    cdef uint64_t id = 0
    cdef int result, device = device_id
    cdef object keeps = None                 # whether the object is known to keep the stream
    cdef object mine = None                  # one of ours that does
    if isinstance(stream, StreamRef):
        return <StreamRef>stream
    if isinstance(stream, OwnStream):
        need()
        return (<OwnStream>stream).open_stream()
    number = handle_of(stream)
    if not 0 <= number < 1 << 64:
        raise ValueError(f"stream={stream!r} is not a handle of a stream")
    handle = <void*><uintptr_t>number
    if <uintptr_t>handle <= PER_THREAD:
        said = device_of(stream)
        if said is not None:
            device = said
        elif device < 0:
            device = current_device()
        context = primary(device)
        if <uintptr_t>handle == PER_THREAD:
            return thread_stream(device, context)
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
        if says_captured(state_of(context, handle), handle):
            return capturing(stream, handle, context, device)
        with nogil:
            result = driver.cuStreamGetId(handle, &id)
        checked(result, "cuStreamGetId")
    key = (generation, <uintptr_t>context, <uintptr_t>handle if id == 0 else 0, id)
    found = known.get(key)
    if id and not isinstance(stream, int) and (found is None or not found.lasting):
        mine = shared(stream, number)
        keeps = mine is not None or owns(stream)
        if not keeps:                        # `found`, if any, is another object's, or nobody's
            key = (*key, <uintptr_t><void*>stream)
            found = known.get(key)
    if found is None:
        found = StreamRef.__new__(StreamRef)
        found.handle, found.context, found.id = handle, context, id
        found.device_id = device
        found.lasting = <uintptr_t>handle == LEGACY
        found = known.first(key, found)
    found.named_by(stream)
    if keeps is not None and found.owner is None:
        if mine is None:
            keep(found, stream, keeps, keeps and ends_with(stream))
            return found
        namer = weakref.ref(stream)
        with cython.critical_section(found):
            if found.owner is None:
                found.namer, found.lasting = namer, True
                found.owner = mine
    return found


cdef StreamRef thread_stream(int device, void* context):
    """The default stream of this thread, which keeps it."""
    cdef dict kept
    cdef OwnStream one
    cdef StreamRef made
    if (arenapy_mine.stream != NULL and arenapy_mine.context == context
            and arenapy_mine.generation == generation):
        return (<OwnStream>arenapy_mine.stream).stream
    kept = getattr(this_thread, "streams", None)
    if kept is None:
        kept = this_thread.streams = {}
    one = kept.get((generation, <uintptr_t>context))
    if one is None:
        made = StreamRef.__new__(StreamRef)
        made.handle, made.context, made.device_id = <void*><uintptr_t>PER_THREAD, context, device
        made.thread = number_of_thread()
        one = OwnStream.__new__(OwnStream)
        one.stream = made
        kept[generation, <uintptr_t>context] = one
    arenapy_mine.stream, arenapy_mine.context = <PyObject*>one, context
    arenapy_mine.generation = generation
    return one.stream


cdef int keep(StreamRef found, object stream, bint lasting, bint ends) except -1:
    """The object that named it, so that nothing else gets its address, by which it is found.

    Of two threads that name it at once the first one's stays, since others read it without a lock.
    """
    cdef object tells = None
    if hasattr(stream, "close"):
        tells = getattr(stream, "__cuda_stream__", None)
        tells = tells if callable(tells) else functools.partial(described, stream)
    cdef object ends_by = finalizer_of(stream)
    with cython.critical_section(found):
        if found.owner is None:
            found.tells, found.ends_by = tells, ends_by
            found.lasting, found.ends = lasting, ends
            found.owner = stream
    return 0


cdef list known_in(void* context):
    cdef list found = []
    cdef StreamRef one
    # A copy of the dict below: to look one up, in another thread or by the collector, may drop what
    # is gone, which is an error in a loop over the items.
    for key, ref in known.refs.copy().items():
        one = ref()
        if (one is not None and key[0] == generation and one.context == context
                and (one.lasting or one.of_allocator) and not one.fence):
            found.append(one)
    return found


cdef StreamRef made_stream(void* context, int device_id, unsigned int flags):
    cdef StreamRef made = StreamRef.__new__(StreamRef)
    cdef int result
    with nogil:
        result = enter(context)
        if result == SUCCESS:
            result = driver.cuStreamCreate(&made.handle, flags)
            leave()
    checked(result, "cuStreamCreate")
    made.context, made.device_id, made.generation = context, device_id, generation
    made.made = made.lasting = True
    with nogil:
        result = driver.cuStreamGetId(made.handle, &made.id)
    checked(result, "cuStreamGetId")
    known.put((generation, <uintptr_t>context, 0, made.id), made)
    return made


cdef StreamRef capturing(object stream, void* handle, void* context, int device_id):
    """The stream of a handle that captures, whose id is not to be asked for."""
    cdef object owner = None if isinstance(stream, int) else stream
    cdef StreamRef found
    cdef void* graph = NULL
    cdef uint64_t id
    for found in known_in(context):
        # Under no lock: `gone` calls code of the user.
        if found.handle == handle and found.lasting and not found.gone():
            return found
    # For as long as it captures this is another stream, which costs no more than waiting for it.
    found = StreamRef.__new__(StreamRef)
    found.handle, found.context, found.device_id, found.unnamed = handle, context, device_id, True
    found.id = id = capture_of(found, &graph)
    # All streams of one capture have its number.
    key = (generation, <uintptr_t>context, "capture", id, <uintptr_t>handle,
           <uintptr_t><void*>owner)
    found = known.first(key, found)
    if owner is not None and found.owner is None:
        keep(found, owner, False, False)
    return found


cdef StreamRef named_now(StreamRef stream):
    if not stream.unnamed or stream.gone():
        return stream
    try:
        return stream_of(
            <uintptr_t>stream.handle if stream.owner is None else stream.owner, stream.device_id)
    except Exception:
        return stream                        # it is gone, which its use will show


cdef StreamRef barrier_stream(int device_id):
    cdef StreamRef legacy = stream_of(LEGACY, device_id) if device_id >= 0 else None
    cdef StreamRef found
    key = (generation, 0 if legacy is None else <uintptr_t>legacy.context, "fence")
    found = known.get(key)
    if found is None:
        found = StreamRef.__new__(StreamRef)
        found.device_id = device_id
        if legacy is not None:
            found.handle, found.context = legacy.handle, legacy.context
        found.lasting = found.fence = True
        found = known.first(key, found)
    return found


cdef list spread(list streams):
    cdef list found = []
    for one in streams:
        if isinstance(one, StreamRef) and (<StreamRef>one).fence and (<StreamRef>one).device_id < 0:
            found += [barrier_stream(ordinal) for ordinal in devices_in_use()]
        else:
            found.append(one)
    return found


cdef uint64_t capture_of(StreamRef stream, void** graph) except? 0:
    cdef void* handle = stream.handle
    cdef uint64_t id = 0
    cdef int status = 0, result
    with nogil:
        result = enter(stream.context)
        if result == SUCCESS:
            if driver.cuStreamGetCaptureInfo != NULL:
                result = driver.cuStreamGetCaptureInfo(
                    handle, &status, &id, graph, NULL, NULL, NULL)
            else:
                result = driver.cuStreamGetCaptureInfo_12(handle, &status, &id, graph, NULL, NULL)
            leave()
    checked(result, "cuStreamGetCaptureInfo")
    return id if status else 0


cdef int not_closed(StreamRef stream) except -1:
    if stream.gone():
        raise CudaError(f"{stream!r} was closed", INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE")
    return 0


cdef int free_to_use(StreamRef stream, str what, object other) except -1:
    need()
    not_closed(stream)
    return refuse_unless_free(stream, state_of(stream.context, handle_here(stream)), what, other)


cdef int refuse_unless_free(StreamRef stream, int state, str what, object other) except -1:
    if state != FREE_TO_USE:
        what = what.format(other)            # only now: most calls end here
    if says_captured(state, handle_here(stream)):
        raise CudaError(
            f"{stream!r} is being captured into a graph: {what}"
        )
    if state == BARRED:
        raise CudaError(
            f"{stream!r}, the legacy default stream, cannot be used while a blocking stream is "
            f"being captured into a graph: {what}; an allocator made with stream= does not need it"
        )
    return 0


cdef void* handle_here(StreamRef stream) noexcept:
    """Its handle; of another thread's default one the legacy stream, which waits for that."""
    return <void*><uintptr_t>LEGACY if elsewhere(stream) else stream.handle


cdef bint elsewhere(StreamRef stream) noexcept:
    return stream.thread and stream.thread != number_of_thread()


cdef object number_of(StreamRef stream):
    return <uintptr_t>handle_here(stream)
