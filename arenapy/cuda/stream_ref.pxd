# Streams as users name them, and events on them.
from libc.stdint cimport uint64_t, uintptr_t


cdef enum:
    FREE_TO_USE = 0                  # states of a stream
    CAPTURING = 1                    # into a graph
    BARRED = 2                       # the legacy default stream, while a blocking one is capturing
    UNKNOWN = 3                      # the driver does not say


cdef class WeakValues:
    cdef dict refs                   # weak ones
    cdef uint64_t busy               # see begin_turn

    cdef object get(self, object key)    # None: there is none
    cdef int put(self, object key, object value) except -1
    # The value of the key afterwards: `made`, if there was none, or `old`; or else what another
    # thread has put there.
    cdef object first(self, object key, object made, object old=*)


# A stream. There is one of these for each that is in use: they are compared by identity.
cdef class StreamRef:
    cdef void* handle
    cdef void* context
    cdef uint64_t id                 # the driver's, never that of another one; 0: a default stream
    cdef bint unnamed                # it was captured when it was named; `id` is that capture's
    cdef readonly int device_id
    # It is sure to exist for as long as this: the legacy default stream, one that was made here,
    # or one that `owner` keeps, and cannot close.
    cdef bint lasting
    cdef bint made                   # here, and it is destroyed with this
    cdef bint serves                 # a DriverPool: it uses no memory
    cdef int generation              # the driver's, if so
    cdef bint ended                  # the user's object for one that was made here is gone
    cdef bint shut                   # that object is closed; the stream is there to the last
    cdef uint64_t of_allocator       # atomic: how many, whose users keep it, have it as their own
    cdef object owner                # an object that stands for it, and may keep it
    cdef bint ends                   # when its owner does; a stream of a library's pool does not
    cdef object tells                # if the owner may destroy it before its own end: its protocol
    cdef object ends_by              # numba's finalizer of it, which may run before the owner's end
    cdef object namer                # weak, if the owner is not the user's: one that named it
    cdef bint fence                  # see barrier_stream
    cdef uint64_t thread             # whose per-thread default stream it is; 0: no such one
    cdef object graph                # the Fence of the capture in which it last used a block
    cdef uint64_t capture            # whose number this is
    cdef object __weakref__

    # If `namer` is gone, this object is it from now on.
    cdef bint namer_is_gone(self)
    cdef int named_by(self, object stream) except -1
    # Calls the code of the user, but for one that is `lasting`: not under a lock.
    cdef bint gone(self) noexcept
    cdef int state(self) noexcept
    # CudaError if the driver does not say.
    cdef bint captures(self) except -1
    # Has it done all that it was given? Not sure: no. Nor is the legacy stream: it would only tell
    # of its own work, and who uses its memory untold does so on any of the blocking streams.
    cdef bint idle(self) noexcept
    # Its parts, for whom `state` was FREE_TO_USE just now: may one ask, and the answer.
    cdef bint tells_idle(self) noexcept
    cdef bint has_nothing_to_do(self) noexcept


# The base of our own stream objects.
cdef class OwnStream:
    cdef StreamRef stream

    cdef StreamRef open_stream(self)    # ValueError once it is closed


# Of one that was captured when it was named, and is not any more, the stream that it is.
cdef StreamRef named_now(StreamRef stream)
# Those of a context that are known now, and exist until somebody closes them, if at all.
cdef list known_in(void* context)
# A new stream of the driver's, with its flags.
cdef StreamRef made_stream(void* context, int device_id, unsigned int flags)
# The stream that `stream`, of a user, names. `device_id`: of a default stream; -1: the current one.
cdef StreamRef stream_of(object stream, int device_id)
# The handle that an object stands for, as an int.
cdef object handle_of(object stream)
# The same of a stream of cuda.core's, if that takes no call; 0: it does.
cdef uintptr_t core_handle(object stream) noexcept
# The default stream of this thread.
cdef StreamRef thread_stream(int device, void* context)
# Is it known that a stream exists for as long as the object that names it?
cdef bint owns(object stream) noexcept
# The ordinal of the device that an object says it is on; None: it does not say.
cdef object device_of(object stream)
# The ordinal of the current context's device; 0 if there is none.
cdef int current_device() except -1
# The legacy stream, for what is used on nobody knows which of the blocking streams: an event on it
# comes after them all, and a question to it would only be about its own work. -1: of all devices,
# which is no stream, and has to be `spread` before it is used as one.
cdef StreamRef barrier_stream(int device_id)
# The same streams, with a fence of each device that is in use for the one of all devices.
cdef list spread(list streams)
# Its number in DLPack and in the CUDA array interface.
cdef object number_of(StreamRef stream)
# What it is captured into, and the number of the capture; 0: it is not.
cdef uint64_t capture_of(StreamRef stream, void** graph) except? 0
# Raise if its object has closed it.
cdef int not_closed(StreamRef stream) except -1
# Raise, saying what to do, unless a stream can be given work, and be waited for, now. `other`: for
# the braces in `what`.
cdef int free_to_use(StreamRef stream, str what, object other) except -1
# The same for a state that the caller has asked for. A question costs as much as a driver's call.
cdef int refuse_unless_free(StreamRef stream, int state, str what, object other) except -1
# Does a state say that the stream is being captured? CudaError if the driver does not say.
cdef bint says_captured(int state, void* handle) except -1
# Enter a context for what is not to disturb anybody's capture, and leave it.
cdef int relax(void* context, int* mode) noexcept nogil
cdef void restore_capture_mode(int* mode) noexcept nogil
# Is it what the driver says of a stream that was destroyed, if it does not crash?
cdef bint is_gone(int result) noexcept nogil
# Did a query say that it is? In a context that is lost, nothing runs any more.
cdef bint is_done(int result) noexcept nogil
# Its handle; of another thread's default stream the legacy one's, which waits for that.
cdef void* handle_here(StreamRef stream) noexcept
# Is it another thread's default stream?
cdef bint elsewhere(StreamRef stream) noexcept
