# The regions of an allocator: what Arena (Bump), Pages (Pool) and SlabCore have in common.
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t, uintptr_t

from arenapy.base.atomic cimport arenapy_load_ptr
from arenapy.buffer.block cimport Block, Hold, MemoryOwner, StreamHooks
from arenapy.diagnostics.ledger cimport Ledger
from arenapy.base.sanitizer cimport POISONS, poison, unpoison
from arenapy.memory.region cimport Region


cdef class AllocatorCore(MemoryOwner):
    cdef size_t block_align  # of blocks by default, bytes
    cdef Hold* leased        # ranges that only another process still sees
    cdef size_t leased_bytes
    cdef size_t capacity     # bytes of all regions
    cdef tuple regions       # in order of growth; keeps them (the collector cannot empty a tuple)
    cdef PyObject** region   # the same n_regions, borrowed, for use without the GIL
    cdef Py_ssize_t n_regions, cap_regions
    cdef bint shut           # a forked child, or a closed region: refuses every call
    cdef Ledger ledger       # debug mode, else None; what debug mode verifies with
    cdef object verifier
    cdef bint files          # a region is of a file, which may shrink
    # A forked child is to have none of its source's memory, even if there is no region now: the
    # next one may have the bytes that the last one had.
    cdef bint parents
    cdef str what            # for messages: "arena", "pool", "slab"
    cdef object allocator    # weakref to what the user holds
    cdef object __weakref__
    cdef PyObject* recorder  # of `recorders`, the last one; NULL: not recording
    cdef uint64_t n_recording    # atomic: threads that may have read `recorder`, and are using it
    cdef list recorders      # unseen: all that such a thread may be using

    # Note the kind of the source's memory, and the stream of blocks that name no other.
    cdef int adopt(self, object source, object stream) except -1
    # Give back what streams were at work on; False: nothing. Wait for `wait` blocks.
    cdef bint settle_streams(self, Py_ssize_t wait) except -1
    # The first step when a core ends, while it is still whole.
    cdef void finish(self) noexcept
    # Take a region over, as the last one.
    cdef int take_region(self, Region region, tuple regions) except -1
    # The same, and the reverse, while other threads may do so too.
    cdef int share_region(self, Region region) except -1
    cdef int drop_region(self, Region region) except -1
    cdef void list_regions(self, tuple regions) noexcept
    # The regions as they are now; another thread may replace the tuple.
    cdef bint belongs_to_stream(self) noexcept
    cdef tuple listed(self)
    cdef Py_ssize_t region_of(self, uintptr_t at) noexcept nogil
    cdef int open_check(self) except -1
    cdef bint leased_part(self, uintptr_t start, uintptr_t end, Py_ssize_t region,
                          uintptr_t* at, uintptr_t* stop) noexcept nogil
    cdef int settle_sends(self) except -1
    # Begin to record into a Recorder, or (None) end: the recording into `ended`, or (None) any.
    cdef int record_into(self, object recorder, object ended) except -1
    cdef int change_recorder(self, object recorder, object ended) except -1
    cdef void recording_ends(self) noexcept nogil
    cdef void record_now(self, int op, void* block, size_t nbytes) noexcept nogil
    # Debug mode, if that is wanted: is it? Nothing below is called without it, but for `poison`,
    # `forget`, `tell`, `refuse`, `born_at` and `check_free`.
    cdef bint watch(self, object debug, object verifier) except -1
    # A block was handed out; [start, end) is free from now on (where builds poison, they do it).
    cdef void began(self, void* ptr, size_t size, size_t nbytes) noexcept nogil
    cdef void poison(self, uintptr_t start, uintptr_t end) noexcept nogil
    # Raise what was found; after an operation also what is wrong with the bookkeeping; after an
    # allocation let Buffers know where that was, too. After a drop, which cannot raise. After a C
    # call: say on stderr what was found, or why it was refused.
    cdef int raise_damage(self) except -1
    cdef int operated(self) except -1
    cdef int allocated(self, list blocks) except -1
    cdef void verify_dropped(self) noexcept
    cdef void tell(self) noexcept nogil
    cdef void refuse(self, const char* call, void* ptr) noexcept nogil
    # To follow the name of a block in a message.
    cdef str born_at(self, uintptr_t block)
    # Look at all free memory.
    cdef int check_free(self) except -1
    # internal
    cdef void take_hooks(self, StreamHooks hooks) noexcept
    cdef void forget(self, Region region) noexcept nogil
    cdef void verify_quietly(self) noexcept
    # Would touching it all be a SIGBUS?
    cdef bint shrunk(self) noexcept nogil
    cdef void warn_of_leaks(self) noexcept


# Raise ValueError unless a region may join these: Buffers say of all what the first one is.
cdef int check_alike(AllocatorCore c, tuple regions, Region region) except -1


# Blocks that were freed here, and that other processes may still see; linked by next. The kernel is
# asked about each one, and walks all leases of the region each time. So a request that finds no
# memory asks about the first ones only, until LEASES_ASKED in a row are seen. An allocator asks
# about all before it grows. If that freed less than a quarter of its memory, it does not do so
# again until it has grown or shrunk by as much.

cdef extern from *:
    """
    enum { LEASES_ASKED = 8 };
    #define ALL_LEASES PY_SSIZE_T_MAX
    """
    Py_ssize_t LEASES_ASKED, ALL_LEASES

cdef struct Leased:
    Hold* first
    Hold* last
    Py_ssize_t n
    size_t asked_at          # how large the allocator was when it asked about all in vain, or 0


cdef inline void add_leased(Leased* leased, Hold* hold) noexcept nogil:
    hold.next = NULL
    if leased.first == NULL:
        leased.first = hold
    else:
        leased.last.next = hold
    leased.last = hold
    leased.n += 1


cdef inline Hold* take_leased(Leased* leased) noexcept nogil:
    cdef Hold* hold = leased.first
    if hold != NULL:
        leased.first = hold.next
        leased.n -= 1
    return hold


cdef inline bint all_leases_due(Leased* leased, size_t size) noexcept nogil:
    cdef size_t part = leased.asked_at // 4
    return leased.n > 0 and not (leased.asked_at - part < size < leased.asked_at + part)


# They were asked about, which freed so much of that size.
cdef inline void all_leases_asked(Leased* leased, size_t size, size_t freed) noexcept nogil:
    leased.asked_at = 0 if freed >= size // 4 else size


cdef inline void unlink_hold(Hold** head, Hold* hold) noexcept nogil:
    if hold.prev != NULL:
        hold.prev.next = hold.next
    else:
        head[0] = hold.next
    if hold.next != NULL:
        hold.next.prev = hold.prev


cdef inline void link_hold(Hold** head, Hold* hold) noexcept nogil:
    hold.prev = NULL
    hold.next = head[0]
    if head[0] != NULL:
        head[0].prev = hold
    head[0] = hold


# In builds that poison: nobody may touch these bytes; somebody may again. Not a user's own memory,
# which he may look at anywhere, nor what a device's driver touches, too. Debug mode fills and
# reads what is free, so it does without.

cdef inline bint poisons(AllocatorCore c) noexcept nogil:
    return (POISONS and c.hooks is None and c.host_accessible and c.device_id < 0
            and not (c.debug or c.foreign))


cdef inline void forbid(AllocatorCore c, uintptr_t start, uintptr_t end) noexcept nogil:
    if POISONS and start < end and poisons(c) and not c.shut:
        poison(start, end - start)


# The first memory of an allocator, which allocates only after this.
cdef inline void forbid_new(AllocatorCore c, uintptr_t start, uintptr_t end) noexcept nogil:
    if POISONS and start < end and poisons(c):
        poison(start, end - start)


cdef inline void permit(AllocatorCore c, uintptr_t start, size_t nbytes) noexcept nogil:
    if POISONS and nbytes and c.host_accessible and c.device_id < 0:
        unpoison(start, nbytes)


# Now and then this writes to a file: under no lock, but that of a Bump whose block is released,
# where the event has to come before the next one of these bytes.
cdef inline void record(AllocatorCore c, int op, void* block, size_t nbytes) noexcept nogil:
    if arenapy_load_ptr(<void**>&c.recorder) != NULL:
        c.record_now(op, block, nbytes)
