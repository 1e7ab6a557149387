"""The C calls of a Pool: what `cimport arenapy` gives. The short way is all that is here.

This is a module of its own for speed: beside the methods of Pool, which take the same way,
compilers inline less of it, and a pair of calls takes 9 % more instructions.
"""
from libc.stdint cimport uintptr_t

from arenapy.base.atomic cimport likely
from arenapy.pool.pool cimport Pool
from arenapy.pool.core cimport try_cache_alloc, try_cache_free, try_give, try_take
from arenapy.allocator.allocator_core cimport permit

cdef enum:
    USUAL_ALIGN = 64         # what every block has


cdef void* pool_alloc(Pool pool, size_t nbytes, size_t align) noexcept nogil:
    cdef void* block = try_take(pool.core, nbytes, False) if likely(align <= USUAL_ALIGN) else NULL
    return block if likely(block != NULL) else pool_alloc_slow(pool, nbytes, align)


cdef int pool_free(Pool pool, void* block) noexcept nogil:
    return 0 if likely(try_give(pool.core, block)) else pool_free_slow(pool, block)


cdef void* pool_alloc_slow(Pool pool, size_t nbytes, size_t align) noexcept nogil:
    cdef void* block = try_cache_alloc(pool.core, nbytes, False) if align <= USUAL_ALIGN else NULL
    return block if block != NULL else pool.alloc_c(nbytes, align)


cdef int pool_free_slow(Pool pool, void* block) noexcept nogil:
    # The fast path may be on again by now, or no live block begins here.
    if try_cache_free(pool.core, block) or pool.core.free_block_at(<char*>block):
        return 0
    pool.core.refuse(b"pool_free", block)
    return -1


cdef size_t pool_usable_size(Pool pool, void* block) noexcept nogil:
    cdef size_t size = pool.core.size_at(<char*>block)
    permit(pool.core, <uintptr_t>block, size)    # who asks may use them
    return size
