# The C surface of the slab algorithm. SlabCore is what Buffers keep alive; Slab (slab.pyx) is what
# the user holds.
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t

from arenapy.buffer.block cimport Hold
from arenapy.slab.slots cimport Items

cdef struct SlabFigures:
    uint64_t items, active, pending, allocations, peak
    size_t reserved, metadata
    Py_ssize_t regions


cdef class SlabCore(Items):
    cdef uint64_t claimed    # atomic: items that are neither live nor in a stack, pending ones too
    cdef uint64_t n_pending  # under the depot's lock, as is:
    cdef Hold* pending       # items that only other processes see; linked by next
    cdef Hold* aside         # items that streams are at work on

    cdef void ready(self) noexcept nogil
    cdef void set_special(self) noexcept nogil
    # All that is to be done on either way, also when `special`. NULL: nothing is free.
    cdef char* get(self, size_t nbytes, uint64_t* name) noexcept nogil
    cdef bint put(self, uint64_t name) noexcept nogil
    # Items for n Buffers, or for none of them.
    cdef bint get_many(self, PyObject** buffers, Py_ssize_t n) noexcept nogil
    cdef void settle(self) noexcept nogil
    cdef SlabFigures figures(self) noexcept nogil
    cdef uint64_t exchange_peak(self, uint64_t peak) noexcept nogil
    # internal
    cdef bint claim(self, uint64_t name) noexcept nogil
    cdef void restore(self, uint64_t name) noexcept nogil
    cdef bint still_leased(self, uint64_t name) noexcept nogil
