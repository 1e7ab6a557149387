# What of an arena's regions it may not hand out.
from cpython.object cimport PyObject
from libc.stdint cimport uintptr_t

from arenapy.buffer.block cimport Hold
from arenapy.base.interval_set cimport Extents
from arenapy.memory.region cimport Region
from arenapy.allocator.allocator_core cimport AllocatorCore


cdef class Arena(AllocatorCore):
    cdef Extents free        # what is free, but for what the allocator has taken to hand out next
    cdef Hold* retired       # held blocks that outlived a reset
    cdef Hold* ask_next      # in the leased list; NULL: begin with the first
    cdef size_t retired_bytes

    cdef int add_region(self, Region region, tuple regions) except -1
    cdef int record_into(self, object recorder) except -1
    cdef Py_ssize_t in_use(self, Py_ssize_t keep) noexcept nogil
    cdef list drop_regions(self, Py_ssize_t keep)
    cdef void free_or_lease(self, Hold* hold) noexcept nogil
    cdef void carve_leases(self, uintptr_t start, uintptr_t end, Py_ssize_t region) noexcept nogil
    cdef void settle_leases(self, Py_ssize_t most) noexcept nogil
    cdef int lease_all(self, PyObject* region, int fd) noexcept nogil
    cdef void poison_free(self, uintptr_t start, uintptr_t end, Py_ssize_t region) noexcept nogil
