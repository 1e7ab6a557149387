# Pool in C: nogil calls for modules that `cimport arenapy`.
#
# Thread-safety: any thread may call these, with or without the GIL, and free what another
# allocated.
#
# These hand out raw memory, which the caller frees, once. Only Buffers protect against dangling
# pointers; their blocks are not to be freed here.
from arenapy.base.abi cimport ARENAPY_ABI
from arenapy.pool.pool cimport Pool

# nbytes at a multiple of align (a power of two up to 2 MiB). NULL: exhausted, and nothing has
# changed. Grows if it has to (takes the GIL for that); on_oom is not called.
cdef void* pool_alloc(Pool pool, size_t nbytes, size_t align) noexcept nogil
# 0: done. -1: no live block of this pool begins there (freed twice, or another's); nothing changed.
cdef int pool_free(Pool pool, void* block) noexcept nogil
# Bytes that the block has, at least those asked for. 0: no live block of this pool begins there.
cdef size_t pool_usable_size(Pool pool, void* block) noexcept nogil

# Internal: the first two jump to these if the thread's cache has no block, or no room for one, and
# if the pool is off the fast path. They are declared here so that compilers do not inline them.
cdef void* pool_alloc_slow(Pool pool, size_t nbytes, size_t align) noexcept nogil
cdef int pool_free_slow(Pool pool, void* block) noexcept nogil
