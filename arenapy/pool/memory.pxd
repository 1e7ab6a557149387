# How a pool gets memory from its source and gives it back.
from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from arenapy.pool.core cimport PoolCore
from arenapy.pool.page_heap cimport Place
from arenapy.memory.region cimport Region

cdef enum:
    RECURRENCE_BITS = 6

# Memory was recycled for requests of n bytes so many times before.
cdef struct Recurrence:
    size_t n
    int times


cdef class PoolMemory:
    cdef object __weakref__
    cdef PoolCore core
    cdef object source
    cdef bint unaligned              # the source's regions may not begin on a page
    cdef bint may_reserve            # the source reserves address space
    cdef dict reservations           # its Reservations, by address
    cdef uint64_t n_reserved         # Reservations that were ever made
    cdef size_t min_reservation      # bytes of address space that one takes at least
    cdef size_t most_pages           # the most that were reserved since the last trim
    cdef double leases_due           # when `trim_stale` asks about leases next
    cdef size_t idle_allowed         # idle pages that growth leaves alone
    cdef size_t recycled             # pages recycled since slack grew
    cdef Recurrence[1 << RECURRENCE_BITS] seen
    # For growth at once, see below: the newest Reservation of a Host; its addresses that are
    # accessible, with memory or without; the bytes that may get it without a look at the limits.
    cdef object ready
    cdef uintptr_t ready_from
    cdef uintptr_t ready_end
    cdef size_t ready_bytes
    cdef size_t ready_least          # if there is less, more is made ready
    cdef bint ready_asked            # that is on its way
    cdef object weak                 # a weak reference to this
    cdef bint prefaults              # its memory is faulted in
    # Of all growth: bytes that were got at once, seconds by the clock and of the processor. Those
    # of several threads at the same time all count. Under the lock of the heap.
    cdef size_t grown_bytes
    cdef double grown_seconds
    cdef double grown_cpu
    cdef size_t peak_pages           # the most that were ever reserved
    cdef str refusal                 # why the source refused its last request, or None
    cdef size_t only                 # bytes of the region of a source that has one; else 0
    cdef uint64_t turn               # atomic: who gets that region or gives it back, or 0
    cdef size_t max_pages            # that may be reserved; the largest size_t: no limit

    # The first memory: whole pages of about so many bytes.
    cdef int begin(self, size_t nbytes) except -1
    # Reserve `pages` in one piece, or `wished` if that works. False: that is beyond the limit, by
    # `missing` pages. MemoryError: the source has no more. Where address space gets its memory by
    # the granule, this may have been one of several parts of `place`: call it again.
    cdef bint grow(self, size_t pages, size_t wished, size_t* missing, Place* place) except -1
    # Get memory, so that a live block of the caller's has `pages` free ones behind it. False: no.
    cdef bint grow_behind(self, uint64_t block_id, uint32_t pages) except -1
    # Wait until another thread's growth, if one is under way, has ended. False: there was none.
    cdef bint wait_for_growth(self) except -1
    cdef int note_refusal(self, str why) except -1
    cdef str refused(self)
    cdef int add_region(self, Region region) except -1
    # The same for a source that has one region. It gives one as large after a trim.
    cdef int add_only(self, Region region) except -1
    # Make ready what growth at once takes, if the source can.
    cdef int prepare(self) except -1
    # Pages that could be given back now. Merges everything that is free.
    cdef size_t trimmable(self) noexcept
    # Give back free pages, longest unused first: so many, or what there is. Regions go as a whole:
    # not one that makes it more, or (`enough`) one rather than too little. Those in a place where
    # growth wants them stay. How many it were.
    cdef size_t shrink(self, size_t pages, bint enough, const Place* spared) except? 0
    # The same for a user, who wants less reserved from now on.
    cdef size_t trim(self, size_t pages) except? 0
    # Before growth by so many pages for a request of n bytes: give idle ones back instead of
    # reserving more.
    cdef int recycle(self, size_t pages, size_t n) except -1
    # Give back what was freed so many seconds ago and not used since; how many pages.
    cdef size_t trim_stale(self, double seconds) except? 0
    # internal
    cdef size_t left(self) noexcept
    cdef size_t excess(self, size_t pages, Place* place) noexcept
    cdef bint grow_reservation(
        self, size_t pages, size_t wished, size_t* missing, Place* place) except -1
    cdef bint grow_only(self, size_t pages, size_t* missing) except -1
    cdef bint take_turn(self) except -1
    cdef int expect(self, size_t nbytes) except -1
    cdef int commit(self, uint32_t id) except -1
    cdef object commit_by_source(self, uint32_t id)
    cdef bint at_once(self) noexcept
    cdef void note_growth(self, size_t nbytes, double seconds, double cpu) noexcept
    cdef bint commit_at_once(self, uintptr_t address, size_t nbytes, bint* lazily) noexcept
    cdef int note_ready(self, object reservation) except -1
    cdef bint add_reservation(self, size_t pages) except -1
    cdef int drop_room(self, int segment) except -1
    cdef bint decommit(self, uint32_t id) except -1
    cdef bint grow_region(self, size_t pages, size_t wished, size_t* missing) except -1


cdef object checked_limit(object max_bytes, size_t initial_bytes)

# This thread asks for memory in the middle of a function of NumPy's, until `end_at_once`: no other
# code is to run, if that can be. False: it does so already, and its source allocates.
cdef bint begin_at_once(PoolMemory memory) noexcept
cdef bint is_at_once() noexcept nogil
cdef void end_at_once() noexcept
