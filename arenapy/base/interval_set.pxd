# Ordered sets of address ranges: what is free in the regions of an allocator.
from libc.stdint cimport uint32_t, uintptr_t

# [start, end) of one region, named by its index. start <= end.
cdef struct Extent:
    uintptr_t start
    uintptr_t end
    Py_ssize_t region

# A node of a treap: ordered by (region, start), and a heap by `priority` of its index.
cdef struct Node:
    Extent extent
    size_t most              # bytes of the largest extent in this subtree
    uint32_t left, right     # indices; 0: none

# Disjoint, never empty, never adjacent. Zeroed memory is a valid empty set. Pointers to extents are
# valid until the next call that changes the set or its room.
cdef struct Extents:
    Node* nodes              # NULL, or `room` of them; nodes[0] stands for none: it is zero
    uint32_t root
    uint32_t unused          # nodes that were used before, linked by left
    uint32_t fresh           # nodes that were never used begin behind this one
    Py_ssize_t n             # extents, < room
    Py_ssize_t capacity

# Make an array of `item`-byte items hold `wanted` of them; False without memory, and nothing
# has changed then.
cdef bint make_room(
    void** items, Py_ssize_t* capacity, Py_ssize_t wanted, size_t item) noexcept nogil
# Room for `more` extents beside those there. These calls need it: insert one, carve one.
cdef bint extents_room(Extents* set, Py_ssize_t more) noexcept nogil
# NULL if there is none: the last extent that starts at or below (region, at); the first above it;
# the first of all; the last of all.
cdef Extent* extents_below(Extents* set, Py_ssize_t region, uintptr_t at) noexcept nogil
cdef Extent* extents_above(Extents* set, Py_ssize_t region, uintptr_t at) noexcept nogil
cdef Extent* extents_first(Extents* set) noexcept nogil
cdef Extent* extents_last(Extents* set) noexcept nogil
# The extent that has the byte at (region, at), or else the first above.
cdef Extent* extents_from(Extents* set, Py_ssize_t region, uintptr_t at) noexcept nogil
# The first in which `size` bytes fit at a multiple of `align`; NULL if they fit in none.
cdef Extent* extents_fit(Extents* set, size_t size, size_t align) noexcept nogil
# Bytes of the largest.
cdef size_t extents_most(Extents* set) noexcept nogil
cdef void extents_insert(
    Extents* set, uintptr_t start, uintptr_t end, Py_ssize_t region) noexcept nogil
# Remove an extent of the set; what it was.
cdef Extent extents_take(Extents* set, Extent* extent) noexcept nogil
cdef void extents_carve(
    Extents* set, uintptr_t start, uintptr_t end, Py_ssize_t region) noexcept nogil
# The validity check: NULL, or what is wrong with the tree.
cdef const char* extents_fault(Extents* set) noexcept nogil
