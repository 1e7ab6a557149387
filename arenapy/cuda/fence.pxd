# What has to be over before memory is used again.
from arenapy.cuda.stream_ref cimport StreamRef


# Something that has to be over before memory is used again.
cdef class Fence:
    cdef void* context
    # Is it? Then it stays so. Asks the driver, without the GIL.
    cdef bint passed(self) noexcept
    # Wait until it is; or let `stream`, if it is not None, and not closed, wait. False: that cannot
    # be.
    cdef bint wait(self, StreamRef stream) noexcept


# All that the stream was given so far.
cdef class EventFence(Fence):
    cdef int generation              # the driver's
    cdef void* event
    cdef object of                   # what tells its stream from others; None: it is not known

    cdef int asked(self) noexcept    # what the driver says of it


# The graph that a stream is capturing, as long as it lives. One for each stream of a capture.
cdef class GraphFence(Fence):
    cdef void* shared                # a SharedFlag; NULL: nobody knows, and it is never over
    cdef object __weakref__


cdef void* create_event(void* context, unsigned int flags) except NULL
cdef Fence new_event(StreamRef stream)
cdef Fence new_graph_fence(StreamRef stream)
# The same; where that fails, one that is never over.
cdef Fence graph_fence_or_never(StreamRef stream)
# Let a stream wait for all that another was given so far. Both may be in one capture.
cdef int join_streams(StreamRef stream, StreamRef other) except -1
# The same for streams that the caller knows to be free; `use`: a StreamRef or a Fence.
cdef int let_wait(StreamRef stream, object use) except -1
# The same, where one of both may be being captured; `use` is a StreamRef, or what `work_of` made of
# one. While `stream` is captured, this thread waits in its place. CudaError if `use` is, since
# nobody can wait for what it was given before; but if not `strict`, nothing is waited for then.
# Only `__cuda_array_interface__` is not strict: it cannot know who reads. A reader in the same
# capture needs no wait, and to refuse would refuse that reader, too.
cdef int follow(StreamRef stream, object use, bint strict) except -1
# The same, of another stream than `stream`, whose state the caller has asked for.
cdef int follow_as(StreamRef stream, int state, object use, bint strict) except -1
# Before `stream` follows the stream of another library's array. CudaError if that one is captured
# and `stream` is not in the same capture. Nothing is changed.
cdef int refuse_other_capture(StreamRef stream, StreamRef producer) except -1
# The same for this thread.
cdef int wait_here(object use, bint strict) except -1
# CudaError: nobody can wait now for what it was given before its capture.
cdef int refuse_captured(StreamRef stream) except -1
cdef int synchronize(StreamRef stream) except -1
# This thread waits for all that a stream was given outside of captures, also while it is captured,
# or barred by a capture.
cdef int wait_outside(StreamRef stream) except -1
# An event that is no part of a capture; None: nobody can wait for the stream now. CudaError.
cdef Fence event_outside(StreamRef stream)
# An event. If the stream was destroyed, `work_of_context`.
cdef Fence work_of(StreamRef stream)
# For a stream whose handle may name another one by now: this thread waits for all streams of its
# context, and a plain Fence, which is over, comes back. OutOfMemory or CudaError: not now.
cdef Fence work_of_context(StreamRef stream)
# The same as `work_of` for a block, an array or an allocator that is gone: a stream that was only
# to exist for so long is not asked. None, OutOfMemory or CudaError: not now. If the stream is
# captured and `wait` is set, this thread waits as in `work_of_context`.
cdef Fence late_work_of(StreamRef stream, bint wait)
# A program that captures a stream again and again may ask only in captures of it. So who needs
# memory waits, once so many looks were in vain.
cdef enum:
    PATIENCE = 8


# -- objects that live until streams are done with their memory

cdef class Retained:
    cdef object thing
    cdef list waits                  # Tickets, and Streams whose fence is still to be made
    cdef int looks                   # how often it was not over when memory was needed
    cdef bint queueing               # the call that uses it has not returned
    cdef void* by                    # whose end waits for it
    cdef int generation              # of the driver


# Keep an object, for which nothing is queued so far.
cdef Retained retain(object thing, void* by)
# Wait for all that `by` has kept.
cdef void wait_for_those(void* by) noexcept
# Until the stream has done what it was given by now; or nothing uses it after all.
cdef void retain_until(Retained one, StreamRef stream) noexcept
cdef void give_up(Retained one) noexcept
# Keep memory that had to go while all that is in `waits` uses it.
cdef void park(object memory, list waits) noexcept
# Let go of what is over. A few are looked at, others next time; or all. False: a thread is at it.
cdef bint look(bint all, bint needed) noexcept
# Does a thread drop objects that it has taken out?
cdef bint somebody_drops() noexcept
