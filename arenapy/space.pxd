# What of an arena's regions it may not hand out.
from cpython.object cimport PyObject
from libc.stdint cimport uintptr_t

from arenapy.block cimport Hold
from arenapy.extents cimport Extents
from arenapy.region cimport Region
from arenapy.regions cimport RegionSet


cdef class Space(RegionSet):
    cdef Extents free        # what is free, but for what the allocator has taken to hand out next
    cdef Hold* retired       # held blocks that outlived a reset
    cdef size_t retired_bytes

    cdef int add_region(self, Region region) except -1
    cdef int record_into(self, object recorder) except -1
    cdef int drop_regions(self, Py_ssize_t keep, list dropped) except -1
    cdef void free_or_lease(self, Hold* hold) noexcept nogil
    cdef void carve_leases(self, uintptr_t start, uintptr_t end, Py_ssize_t region) noexcept nogil
    cdef void settle_leases(self) noexcept nogil
    cdef int lease_all(self, PyObject* region, int fd) noexcept nogil
    cdef void poison_free(self, uintptr_t start, uintptr_t end, Py_ssize_t region) noexcept nogil
