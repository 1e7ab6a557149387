# Streams as users name them, and events on them.
from libc.stdint cimport uint64_t


# The base of our own stream objects, which keep their stream to the last.
cdef class Kept:
    pass


cdef enum:
    FREE_TO_USE = 0                  # states of a stream
    CAPTURING = 1                    # into a graph
    BARRED = 2                       # the legacy default stream, while a blocking one is capturing


# A stream. There is one of these for each that is in use: they are compared by identity.
cdef class Stream:
    cdef void* handle
    cdef void* context
    cdef uint64_t id                 # the driver's, never that of another one; 0: a default stream
    cdef readonly int device_id
    # It is sure to exist for as long as this: the legacy default stream, or `owner` sees to that.
    cdef bint lasting
    cdef bint of_allocator           # the own one, which its user keeps for so long
    cdef object owner
    cdef object tells                # if the owner may destroy it before its own end: its protocol
    cdef bint fence                  # see fence_of
    cdef uint64_t thread             # whose per-thread default stream it is; 0: no such one
    cdef object graph                # the Ticket of the capture in which it last used a block
    cdef uint64_t capture            # whose number this is
    cdef object __weakref__

    cdef bint gone(self) noexcept
    cdef int state(self) noexcept
    cdef bint captures(self) noexcept
    # Has it done all that it was given? Not sure: no.
    cdef bint idle(self) noexcept


# The stream that `stream`, of a user, names. `device_id`: of a default stream; -1: the current one.
cdef Stream stream_of(object stream, int device_id)
# The handle that an object stands for, as an int; and whether the object keeps it alive.
cdef tuple handle_of(object stream)
# The ordinal of the current context's device; 0 if there is none.
cdef int current_device() except -1
# The legacy stream, for what is used on nobody knows which of the blocking streams: an event on it
# comes after them all, and a question to it would only be about its own work.
cdef Stream fence_of(int device_id)
# Its number in DLPack and in the CUDA array interface.
cdef object number_of(Stream stream)
# Raise if its object has closed it.
cdef int not_closed(Stream stream) except -1
# Raise, saying what to do, unless a stream can be given work, and be waited for, now. `other`: for
# the braces in `what`.
cdef int free_to_use(Stream stream, str what, object other) except -1
# Enter a context for what is not to disturb anybody's capture, and leave it.
cdef int relax(void* context, int* mode) noexcept nogil
cdef void restore(int* mode) noexcept nogil
# Did a query say that it is? In a context that is lost, nothing runs any more.
cdef bint is_over(int result) noexcept nogil
# What a capturing stream is captured into, and the number of the capture.
cdef int captured_graph(void* handle, uint64_t* id, void** graph) noexcept nogil
# Its handle; of another thread's default stream the legacy one's, which waits for that.
cdef void* handle_here(Stream stream) noexcept
# Those of a context that are known now, and sure to exist.
cdef list streams_in(void* context)
