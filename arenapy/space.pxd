# The regions of an allocator and the ranges of them that it may not hand out.
from cpython.object cimport PyObject
from libc.stdint cimport uintptr_t

from arenapy.block cimport Hold, Keeper
from arenapy.extents cimport Extents
from arenapy.region cimport Region


cdef class Space(Keeper):
    cdef Extents free        # what is free, but for what the allocator has taken to hand out next
    cdef Hold* retired       # held blocks that outlived a reset
    cdef Hold* leased        # ranges that only another process still sees
    cdef size_t retired_bytes, leased_bytes
    cdef size_t capacity     # bytes of all regions
    cdef tuple regions       # in order of growth; keeps them (the collector cannot empty a tuple)
    cdef PyObject** region   # the same n_regions, borrowed, for use without the GIL
    cdef Py_ssize_t n_regions, cap_regions
    cdef bint shut           # a forked child, or a closed region: refuses every call
    cdef bint debug
    cdef object allocator    # weakref to what the user holds

    cdef int add_region(self, Region region) except -1
    cdef int drop_regions(self, Py_ssize_t keep, list dropped) except -1
    cdef Py_ssize_t region_of(self, uintptr_t at) noexcept nogil
    cdef int open_check(self) except -1
    cdef void free_or_lease(self, Hold* hold) noexcept nogil
    cdef bint leased_part(self, uintptr_t start, uintptr_t end, Py_ssize_t region,
                          uintptr_t* at, uintptr_t* stop) noexcept nogil
    cdef void carve_leases(self, uintptr_t start, uintptr_t end, Py_ssize_t region) noexcept nogil
    cdef void settle_leases(self) noexcept nogil
    cdef int settle_sends(self) except -1
    cdef int lease_all(self, PyObject* region, int fd) noexcept nogil
    cdef void poison(self, uintptr_t start, uintptr_t end) noexcept nogil
    cdef void poison_free(self, uintptr_t start, uintptr_t end, Py_ssize_t region) noexcept nogil


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
