# Copies between two devices: who reaches whose memory, and relays where nobody does.
from libc.stdint cimport uint64_t

from arenapy.cuda.fence cimport Fence
from arenapy.cuda.stream_ref cimport StreamRef

cdef enum:
    MAX_SLOTS = 16           # pieces that are on their way at once


# Pinned memory for pieces of a copy, a stream that fills it and one that empties it. One call at a
# time queues on it.
cdef class Relay:
    cdef StreamRef near              # of the source's device: it fills the slots
    cdef StreamRef far               # of the target's: it empties them
    cdef list filled, emptied        # of each slot, an EventFence on `near` and on `far`
    cdef void* filled_events[MAX_SLOTS]      # theirs
    cdef void* emptied_events[MAX_SLOTS]
    cdef object pinned               # the Buffer of the slots
    cdef uint64_t address            # where it is
    # The end of the last copy on `near`, and on `far`; None: there was none yet.
    cdef Fence read, over
    cdef object user                 # a weak reference to the stream that it was for

    # Queue a copy in the order of `s`. If it raises, both streams are idle, if one can wait for
    # them.
    cdef int copy(self, StreamRef s, uint64_t to, uint64_t source, size_t nbytes) except -1
    # Is it over?
    cdef bint passed(self) noexcept
    # internal
    cdef int queue(self, uint64_t to, uint64_t source, size_t nbytes) noexcept nogil


# Let two devices reach each other's memory, if they can; True: a copy is to go by the host.
cdef bint goes_by_host(int source, int to, size_t nbytes) except -1
# A Relay for a copy on `s`, which is then its caller's; None: the driver is to copy.
cdef Relay take_relay(StreamRef s, int source, int to)
# After a copy: another call may use it.
cdef int give_relay_back(Relay relay) except -1
