# Streams as users name them, and events on them.
from libc.stdint cimport uint64_t


cdef class Stream


# Something that has to be over before memory is used again.
cdef class Ticket:
    cdef void* context
    # Is it? Then it stays so. Asks the driver, without the GIL.
    cdef bint over(self) noexcept
    # Wait until it is; or let `stream`, if it is not None, wait. False: that cannot be.
    cdef bint wait(self, Stream stream) noexcept


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
    cdef object owner
    cdef bint fence                  # see fence_of
    cdef uint64_t thread             # whose per-thread default stream it is; 0: no such one
    cdef Ticket graph                # of the capture in which it was last told of a block
    cdef uint64_t capture            # whose number this is
    cdef object __weakref__

    cdef int state(self) noexcept
    cdef bint captures(self) noexcept
    # Has it done all that it was given? Not sure: no.
    cdef bint idle(self) noexcept


# All that the stream was given so far.
cdef class Event(Ticket):
    cdef int generation              # the driver's
    cdef void* event


# The graph that a stream is capturing, as long as it lives.
cdef class Graph(Ticket):
    cdef void* shared                # a SharedFlag


# The stream that `stream`, of a user, names. `device_id`: of a default stream; -1: the current one.
cdef Stream stream_of(object stream, int device_id)
# The ordinal of the current context's device; 0 if there is none.
cdef int current_device() except -1
# The legacy stream, for what is used on nobody knows which of the blocking streams: an event on it
# comes after them all, and a question to it would only be about its own work.
cdef Stream fence_of(int device_id)
cdef void* create_event(void* context, unsigned int flags) except NULL
cdef Ticket new_event(Stream stream)
cdef Ticket new_graph(Stream stream)
# Let a stream wait for all that another was given so far.
cdef int join_streams(Stream stream, Stream other) except -1
# The same, but for streams of which just one is being captured: neither can wait for the other.
cdef int follow(Stream stream, Stream other) except -1
# Its number in DLPack and in the CUDA array interface.
cdef object number_of(Stream stream)
cdef int synchronize(Stream stream) except -1
# What keeps memory from use once `stream` was told to use it: an event, or what it captures.
cdef Ticket ticket_of(Stream stream)
# The same for a stream that cannot be told anything any more: its context waits. None: it cannot.
cdef Ticket last_resort(Stream stream)
# Raise, saying what to do, unless a stream can be given work, and be waited for, now.
cdef int free_to_use(Stream stream, str what) except -1
# Enter a context for what is not to disturb anybody's capture, and leave it.
cdef int relax(void* context, int* mode) noexcept nogil
cdef void restore(int* mode) noexcept nogil
