"""The C calls of a Slab: what `cimport arenapy` gives, but for what is inline."""
from libc.stdint cimport uint64_t

from arenapy.allocator.allocator cimport grown_in_c
from arenapy.base.biased_lock cimport biased_acquire, biased_release
from arenapy.slab.slab cimport Slab
from arenapy.slab.core cimport SlabCore, Stack
from arenapy.slab.hot_path cimport stack_of


cdef void* slab_alloc_slow(Slab slab) noexcept nogil:
    cdef uint64_t name
    cdef char* item = slab.core.alloc_block(slab.core.item_size, &name)
    if item == NULL and not slab.core.shut:
        item = <char*>grown_in_c(slab, slab.core.item_size, 1)
    slab.core.tell()
    return item


cdef int slab_free_slow(Slab slab, void* item) noexcept nogil:
    return _given(slab.core, item)


cdef int _given(SlabCore c, void* item) noexcept nogil:
    cdef Stack* s
    cdef uint64_t name
    if c.shut:
        return -1
    s = stack_of(c)
    biased_acquire(&s.lock)
    name = c.find(s, <char*>item)
    biased_release(&s.lock)
    if name and c.free_block(name):
        return 0
    c.refuse(b"slab_free", item)
    return -1
