"""How an arena grows: by a further region, twice as large as the one before.

What lives here: how large it is, and that it has room for the request. What does not: where blocks
go in it (core).
"""
from libc.stdint cimport uintptr_t

from arenapy.allocator.allocator cimport make_region
from arenapy.base.atomic cimport arenapy_lock_acquire, arenapy_lock_release
from arenapy.buffer.block cimport Hold, born_held, drop_hold
from arenapy.buffer.buffer cimport Buffer
from arenapy.bump.hot_path cimport take
from arenapy.bump.core cimport BumpCore
from arenapy.diagnostics.recorder cimport EVENT_GROW
from arenapy.memory.region cimport Region
from arenapy.allocator.allocator_core cimport record

from arenapy.errors import OutOfMemory

cdef enum:
    GROWTH = 2               # each further region is this many times the one before


cdef int grow_arena(
    BumpCore c, object source, object max_bytes, size_t n, size_t align
) except -1:
    cdef size_t page = 4096
    cdef size_t least = (n + align - 1 + page) & ~(page - 1)
    cdef size_t left = 0
    cdef size_t known = c.capacity
    cdef size_t size
    cdef uintptr_t start
    cdef Region region
    cdef tuple before, after
    cdef bint grown
    c.open_check()
    if max_bytes is not None and <size_t>max_bytes > known:
        left = <size_t>max_bytes - known
    least = min(least, max(left, n + (n == 0)))
    if least > left:
        raise OutOfMemory(c.full(n, align, max_bytes))
    size = min(max(least, GROWTH * (<Region>c.regions[c.n_regions - 1]).size), left)
    try:
        region = make_region(c, source, size)
    except OutOfMemory:
        if least == size:
            raise
        region = make_region(c, source, least)  # not twice the last one, then
    start = (<uintptr_t>region.ptr + (align - 1)) & ~<uintptr_t>(align - 1)
    if start + n + (n == 0) > <uintptr_t>region.ptr + region.size:
        # max_bytes left no room to align in, and this one does not lie well.
        raise OutOfMemory(c.full(n, align, max_bytes))
    before = c.listed()
    after = before + (region,)
    arenapy_lock_acquire(&c.lock)
    try:
        # Else other code grew it, in the source or in a collection of garbage: try again.
        grown = c.regions is before and c.capacity == known
        if grown:
            c.add_region(region, after)
    finally:
        arenapy_lock_release(&c.lock)
    if grown:
        record(c, EVENT_GROW, region.ptr, region.size)
    return 0


cdef int grow_for(
    BumpCore c, object source, object max_bytes, Buffer b, Py_ssize_t n, Py_ssize_t align,
    Hold* hold,
) except -1:
    """Memory for a new Buffer, which `hold` (or NULL) makes a held one, if need be from the source.

    The hold is taken over, also in vain.
    """
    cdef void* start = NULL
    cdef bint tried = False
    cdef object error = None
    try:
        while start == NULL:
            if error is not None:
                raise error
            if tried or not (c.may_lease or c.hooks is not None):
                try:
                    grow_arena(c, source, max_bytes, n, align)
                except MemoryError as e:
                    error = None if c.settle_streams(True) else e
            c.settle()                       # others may have let go meanwhile
            tried = True
            arenapy_lock_acquire(&c.lock)
            start = take(c, n, align, &b.pad)
            b.ptr = <char*>start
            b.tag = c.tag
            if start != NULL:
                b.word = 0
                if hold != NULL:
                    born_held(b, hold)
                    hold = NULL
            arenapy_lock_release(&c.lock)
    finally:
        if hold != NULL:
            arenapy_lock_acquire(&c.lock)
            drop_hold(c, hold)
            arenapy_lock_release(&c.lock)
    return 0
