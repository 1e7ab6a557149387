"""Ordered sets of address ranges, as plain arrays.

What lives here: finding by bisection, inserting with coalescing, carving out. Extents of
different regions never merge, wherever they lie. An array beats a tree here: sets are small,
and a shift of a few kilobytes costs less than chasing pointers.

Nothing raises: room is made first (`extents_room`), and then nothing can fail.
"""
from libc.stdint cimport uintptr_t
from libc.stdlib cimport realloc
from libc.string cimport memmove


cdef bint make_room(
    void** items, Py_ssize_t* room, Py_ssize_t wanted, size_t item
) noexcept nogil:
    cdef Py_ssize_t more
    cdef void* new
    if wanted <= room[0]:
        return True
    more = max(wanted, 2 * room[0], 16)
    new = realloc(items[0], more * item)
    if new == NULL:
        return False
    items[0], room[0] = new, more
    return True


cdef bint extents_room(Extents* set, Py_ssize_t more) noexcept nogil:
    return make_room(<void**>&set.items, &set.room, set.n + more, sizeof(Extent))


cdef Py_ssize_t extents_after(Extents* set, Py_ssize_t region, uintptr_t at) noexcept nogil:
    """Index of the first extent that starts behind (region, at)."""
    cdef Py_ssize_t low = 0, high = set.n, middle
    while low < high:
        middle = (low + high) // 2
        if (set.items[middle].region < region
                or (set.items[middle].region == region and set.items[middle].start <= at)):
            low = middle + 1
        else:
            high = middle
    return low


cdef void extents_insert(
    Extents* set, uintptr_t start, uintptr_t end, Py_ssize_t region
) noexcept nogil:
    """Add a range that is not in the set, and coalesce it."""
    cdef Py_ssize_t i
    cdef bint left, right
    if start == end:
        return
    i = extents_after(set, region, start)
    left = i > 0 and set.items[i - 1].region == region and set.items[i - 1].end == start
    right = i < set.n and set.items[i].region == region and set.items[i].start == end
    if left and right:
        set.items[i - 1].end = set.items[i].end
        extents_remove(set, i)
    elif left:
        set.items[i - 1].end = end
    elif right:
        set.items[i].start = start
    else:
        memmove(&set.items[i + 1], &set.items[i], (set.n - i) * sizeof(Extent))
        set.items[i] = Extent(start, end, region)
        set.n += 1


cdef void extents_remove(Extents* set, Py_ssize_t i) noexcept nogil:
    set.n -= 1
    memmove(&set.items[i], &set.items[i + 1], (set.n - i) * sizeof(Extent))


cdef void extents_carve(
    Extents* set, uintptr_t start, uintptr_t end, Py_ssize_t region
) noexcept nogil:
    """Take [start, end) out of the extent around it, which must be there."""
    cdef Py_ssize_t i = extents_after(set, region, start) - 1
    cdef uintptr_t behind = set.items[i].end
    if set.items[i].start == start:
        extents_remove(set, i)
    else:
        set.items[i].end = start
    extents_insert(set, end, behind, region)


cdef size_t extents_bytes(Extents* set) noexcept nogil:
    cdef size_t n = 0
    cdef Py_ssize_t i
    for i in range(set.n):
        n += set.items[i].end - set.items[i].start
    return n
