# What has to be over before memory is used again.
from arenapy.cuda.stream cimport Stream


# Something that has to be over before memory is used again.
cdef class Ticket:
    cdef void* context
    # Is it? Then it stays so. Asks the driver, without the GIL.
    cdef bint over(self) noexcept
    # Wait until it is; or let `stream`, if it is not None, wait. False: that cannot be.
    cdef bint wait(self, Stream stream) noexcept


# All that the stream was given so far.
cdef class Event(Ticket):
    cdef int generation              # the driver's
    cdef void* event


# The graph that a stream is capturing, as long as it lives.
cdef class Graph(Ticket):
    cdef void* shared                # a SharedFlag


cdef void* create_event(void* context, unsigned int flags) except NULL
cdef Ticket new_event(Stream stream)
cdef Ticket new_graph(Stream stream)
# Let a stream wait for all that another was given so far.
cdef int join_streams(Stream stream, Stream other) except -1
# The same, but for streams of which just one is being captured: neither can wait for the other.
cdef int follow(Stream stream, Stream other) except -1
cdef int synchronize(Stream stream) except -1
# What keeps memory from use once `stream` was told to use it: an event, or what it captures.
cdef Ticket ticket_of(Stream stream)
# The same for a stream that cannot be told anything any more: its context waits. None: it cannot.
cdef Ticket last_resort(Stream stream)
