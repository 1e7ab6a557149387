"""The C calls of a Pool: what `cimport arenapy` gives. The short way is all that is here.

This is a module of its own for speed: beside the methods of Pool, which take the same way,
compilers inline less of it, and a pair of calls takes 9 % more instructions.
"""
from libc.stdint cimport uintptr_t

from arenapy.pool.pool cimport Pool
from arenapy.pool.core cimport PoolCore, try_cache_free, try_cache_alloc
from arenapy.allocator.allocator_core cimport permit

cdef enum:
    USUAL_ALIGN = 64         # what every block has


cdef void* pool_alloc(Pool pool, size_t nbytes, size_t align) noexcept nogil:
    cdef void* block = try_cache_alloc(pool.core, nbytes, False) if align <= USUAL_ALIGN else NULL
    return block if block != NULL else pool.alloc_c(nbytes, align)


cdef int pool_free(Pool pool, void* block) noexcept nogil:
    return 0 if try_cache_free(pool.core, block) else _given(pool.core, <char*>block)


cdef int _given(PoolCore c, char* block) noexcept nogil:
    """Not the short way, which may be off no more by now; or that found no live block."""
    if c.free_block_at(block):
        return 0
    c.refuse(b"pool_free", block)
    return -1


cdef size_t pool_usable_size(Pool pool, void* block) noexcept nogil:
    cdef size_t size = pool.core.size_at(<char*>block)
    permit(pool.core, <uintptr_t>block, size)    # who asks may use them
    return size
