# Ordered sets of address ranges: what is free in the regions of an allocator.
from libc.stdint cimport uintptr_t

# [start, end) of one region, named by its index. start <= end.
cdef struct Extent:
    uintptr_t start
    uintptr_t end
    Py_ssize_t region

# Ordered by (region, start); disjoint, never empty, never adjacent. Zeroed memory is a valid
# empty set. n <= room, and items is NULL or has that room.
cdef struct Extents:
    Extent* items
    Py_ssize_t n
    Py_ssize_t room

# Make an array of `item`-byte items hold `wanted` of them; False without memory, and nothing
# has changed then.
cdef bint make_room(
    void** items, Py_ssize_t* room, Py_ssize_t wanted, size_t item) noexcept nogil
# Room for `more` extents beside those there. What follows needs it: insert one, carve one.
cdef bint extents_room(Extents* set, Py_ssize_t more) noexcept nogil
cdef Py_ssize_t extents_after(Extents* set, Py_ssize_t region, uintptr_t at) noexcept nogil
cdef void extents_insert(
    Extents* set, uintptr_t start, uintptr_t end, Py_ssize_t region) noexcept nogil
cdef void extents_remove(Extents* set, Py_ssize_t i) noexcept nogil
cdef void extents_carve(
    Extents* set, uintptr_t start, uintptr_t end, Py_ssize_t region) noexcept nogil
cdef size_t extents_bytes(Extents* set) noexcept nogil
