# The order in which streams use memory of CUDA.
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t

from arenapy.block cimport Hold
from arenapy.medium cimport Medium

from arenapy.cuda.stream cimport Stream


# Released blocks that wait for the same, and objects that are to live until then.
cdef class Batch:
    cdef Hold* first                 # linked by ended_next, in order of release
    cdef Hold* last
    cdef size_t nbytes
    cdef list objects
    cdef list tickets                # all have to be over
    cdef bint kept                   # for ever, as yet
    cdef object stream               # a Stream whose ticket is still to be made, or None


cdef class Ordering(Medium):
    cdef int generation              # of the driver: see there
    cdef void* arrived               # atomic: Holds that ended, newest first, linked by ended_next
    cdef uint64_t busy               # atomic: the thread that is at work on all below, or 0
    cdef size_t room                 # bytes that the allocator has
    cdef list open                   # Batches without a ticket, one a stream
    cdef list batches                # others, oldest first
    cdef list done                   # objects that need not live any more
    cdef Py_ssize_t most             # batches: with more, it is looked whether some are over
    # The memory is another library's, which may use it anew at once when it is gone: what the own
    # stream does counts, too.
    cdef bint borrowed
    cdef list recent                 # what was named last, and what it is; replaced, never changed

    # The stream of what names none.
    cdef Stream own_stream(self)
    # Let an object live for ever; until the stream has done what it was given so far.
    cdef Batch keep(self, object thing)
    cdef int keep_until(self, Batch batch, Stream stream) except -1
    cdef void look(self, PyObject* keeper) noexcept
    # internal
    cdef int fenced(self, object block) except -1
    cdef list users(self, object block)
    cdef void sort_arrived(self) noexcept
    cdef void take_arrived(self) noexcept
    cdef void wait_for(self, Hold* hold) noexcept
    cdef Batch open_batch(self, Stream stream)
    cdef bint close(self, Batch batch) noexcept
    cdef Py_ssize_t advance(self, PyObject* keeper, bint wait, Stream waiter) noexcept
    cdef Py_ssize_t pass_on(self, PyObject* keeper, Batch batch) noexcept
