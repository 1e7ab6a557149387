# The order in which streams use memory of CUDA.
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t

from arenapy.buffer.block cimport Block, Hold, StreamHooks
from arenapy.buffer.buffer cimport Buffer

from arenapy.cuda.stream_ref cimport StreamRef


# Released blocks that wait for the same.
cdef class Batch:
    cdef Hold* first                 # linked by ended_next, in order of release
    cdef Hold* last
    cdef size_t nbytes
    cdef list fences                # all have to be over; those that are found to be are taken out
    cdef uint64_t asked              # in which call of `advance` the first one was not over
    cdef uint64_t number             # in order of the fences
    cdef object stream               # a StreamRef whose fence is still to be made, or None


# Closed batches. Who has asked about the first of a queue need not ask about later ones.
cdef class Queues:
    # Heaps of (number, Batch), none of which is empty, by the first fence of their Batches; if that
    # is an event, by `of`.
    cdef dict waiting

    cdef void add(self, Batch batch) noexcept
    cdef list oldest_first(self)     # keys and heaps


cdef class Parked:
    cdef object memory
    cdef tuple regions


cdef class Ordering(StreamHooks):
    cdef int generation              # of the driver: see there
    cdef void* arrived               # atomic: Holds that ended, newest first, linked by ended_next
    cdef uint64_t busy               # atomic: the thread that is at work on all below, or 0
    cdef size_t capacity             # bytes that the allocator has
    cdef list open                   # unseen: Batches without a fence, one a stream
    cdef Queues closed               # the others
    cdef Py_ssize_t n_batches        # of both
    cdef Py_ssize_t most             # with more, it is looked whether some are over
    cdef uint64_t n_closed           # batches, so far
    cdef uint64_t n_advances         # calls of `advance`
    # How often requests found an open batch's stream captured, since one last was not.
    cdef int vain
    # The memory is another library's, which may use it anew at once when it is gone: what the own
    # stream does counts, too.
    cdef bint borrowed
    # Of a region that has to be freed after the own streams of its allocators: for each that is
    # gone an event, or the stream, if none could be recorded. None: the free waits for all streams.
    cdef list earlier                # unseen
    # The memory is what a graph has of an allocator, which belongs to no stream; None: it is not.
    cdef object graph
    cdef list recent                 # what was named last, and what it is; replaced, never changed
    cdef Ordering names              # whose `recent` counts; None: this one's
    cdef bint keeps_own              # it counts in `own.of_allocator`

    # A new one of the same class.
    cdef Ordering another(self)
    # The stream of what names none.
    cdef StreamRef own_stream(self)
    # Let a stream, or this thread (None), wait for the streams that were told of a block, which is
    # pinned; not for the own one.
    cdef int after_told(self, object block, StreamRef stream) except -1
    # `use` of a stream of which the caller knows that it does not capture.
    cdef int use_free(self, object block, StreamRef s) except -1
    # internal
    cdef void let_own_go(self) noexcept
    cdef int fenced(self, object block) except -1
    cdef int after(self, object block, object use, StreamRef stream, bint strict) except -1
    cdef int note(self, object block, object use) except -1
    cdef int forget_finished(self, object block, Py_ssize_t most) except -1
    cdef list abandon(self, PyObject* owner)
    cdef void sort_arrived(self) noexcept
    cdef void take_arrived(self) noexcept
    cdef void wait_for(self, Hold* hold) noexcept
    cdef Batch new_batch(self, StreamRef stream)
    cdef void queue_up(self, Batch batch, list fences) noexcept
    cdef Batch open_batch(self, StreamRef stream)
    cdef list take_batches(self)
    cdef bint close(self, Batch batch, Py_ssize_t wait) noexcept
    cdef Py_ssize_t advance(self, PyObject* owner, Py_ssize_t wait, StreamRef waiter) noexcept
    cdef Py_ssize_t pass_on(self, PyObject* owner, Batch batch, list over) noexcept


# `block.release(stream)` for a stream that may be named by another object than at the allocation.
cdef int give_back(Buffer block, object stream) except -1
# The streams that were told of a block, and events of those that are gone.
cdef list told_to(Block block)


# Of a block's uses, the last so many: which it need not keep, and what to keep instead.
cdef int finished_uses(list uses, Py_ssize_t most, list over, list instead) except -1
