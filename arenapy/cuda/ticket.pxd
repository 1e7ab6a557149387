# What has to be over before memory is used again.
from arenapy.cuda.stream cimport Stream


# Something that has to be over before memory is used again.
cdef class Ticket:
    cdef void* context
    # Is it? Then it stays so. Asks the driver, without the GIL.
    cdef bint over(self) noexcept
    # Wait until it is; or let `stream`, if it is not None, and not closed, wait. False: that cannot
    # be.
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
# The same, where one of both may be being captured; `use` is a Stream, or what `work_of` made of
# one. While `stream` is captured, this thread waits in its place. CudaError if `use` is, since
# nobody can wait for what it was given before; but if not `strict`, nothing is waited for then.
cdef int follow(Stream stream, object use, bint strict) except -1
# The same for this thread.
cdef int wait_here(object use, bint strict) except -1
cdef int synchronize(Stream stream) except -1
# What keeps memory from use once `stream` was told to use it: an event, or what it captures.
cdef Ticket ticket_of(Stream stream)
# An event. If the stream was destroyed, `work_of_context`.
cdef Ticket work_of(Stream stream)
# For a stream whose handle may name another one by now: this thread waits for all streams of its
# context, and a plain Ticket, which is over, comes back. OutOfMemory or CudaError: not now.
cdef Ticket work_of_context(Stream stream)
