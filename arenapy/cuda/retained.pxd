# Objects that live until streams are done with their memory.
from arenapy.cuda.stream_ref cimport StreamRef


cdef class Retained:
    cdef object thing
    cdef list waits                  # Tickets, and Streams whose fence is still to be made
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
# Let go of what is over. A few are looked at, others next time; or all.
cdef void look(bint all) noexcept
