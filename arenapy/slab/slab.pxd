# The C surface of Slab; at the end, the calls for other packages.
from libc.stdint cimport uint64_t

from arenapy.allocator.allocator cimport Allocator
from arenapy.buffer.buffer cimport Buffer
from arenapy.memory.region cimport Region
from arenapy.slab.core cimport SlabCore
from arenapy.slab.hot_path cimport cache_alloc, cache_free_at


cdef class Slab(Allocator):
    cdef SlabCore core
    cdef readonly object source
    cdef readonly object max_count
    cdef readonly bint debug
    cdef uint64_t most               # items

    cdef Buffer general_alloc(self, object nbytes, object align, object stream)
    cdef int fits(self, Py_ssize_t n, Py_ssize_t align) except -1
    # An item for which the source is asked.
    cdef char* source_alloc(self, size_t nbytes, uint64_t* name) except NULL
    # Get memory such that so many items are free, or some of them; or see another thread get it.
    cdef int more(self, uint64_t wanted) except -1
    cdef bint reclaim_all(self) noexcept
    cdef Region region_for(self, uint64_t items)


# -- in C
# nogil calls for modules that `cimport arenapy`.
#
# Thread-safety: any thread may call these, with or without the GIL, and free what another
# allocated.
#
# These hand out raw memory, which the caller frees, once. Only Buffers protect against dangling
# pointers; their items are not to be freed here.

# When the stack of the thread is empty (grows if it has to, and takes the GIL for that), and for
# slabs that do more on each call: the short ways do nothing there.
cdef void* slab_alloc_slow(Slab slab) noexcept nogil
cdef int slab_free_slow(Slab slab, void* item) noexcept nogil


# The core as an argument is loaded once; through the slab, after every store.

cdef inline void* take_from(SlabCore c) noexcept nogil:
    cdef uint64_t name
    return cache_alloc(c, &name)


cdef inline void* slab_alloc(Slab slab) noexcept nogil:
    """An item, aligned as the slab is. NULL: exhausted, and nothing has changed."""
    cdef void* item = take_from(slab.core)
    return item if item != NULL else slab_alloc_slow(slab)


cdef inline int slab_free(Slab slab, void* item) noexcept nogil:
    """0: done. -1: no live item begins there (freed twice, or another's); nothing has changed."""
    return 0 if cache_free_at(slab.core, <char*>item) else slab_free_slow(slab, item)
