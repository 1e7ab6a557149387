# Slab in C: nogil calls for modules that `cimport arenapy`.
#
# Thread-safety: any thread may call these, with or without the GIL, and free what another
# allocated.
#
# What these hand out is raw, and is the caller's to free, once. Not to dangle is what Buffers are
# for; their items are not to be freed here.
from libc.stdint cimport uint64_t

from arenapy.slab.slab cimport Slab
from arenapy.slab.core cimport SlabCore
from arenapy.slab.hot_path cimport cache_free_at, cache_alloc

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
