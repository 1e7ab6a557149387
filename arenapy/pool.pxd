# The C surface of Pool. Its calls for other packages are in pool_calls.pxd.
from libc.stdint cimport uint64_t

from arenapy.allocator cimport Allocator
from arenapy.buffer cimport Buffer
from arenapy.many cimport Many
from arenapy.pool_core cimport PoolCore
from arenapy.pool_memory cimport PoolMemory

cdef class Pool(Allocator):
    cdef PoolCore core
    cdef PoolMemory memory
    cdef readonly object max_bytes
    cdef readonly object on_oom
    cdef readonly object trim_after
    cdef readonly str rounding
    cdef readonly bint debug

    cdef Buffer careful_alloc(self, object nbytes, object align, object stream)
    # pool_alloc but for its short way.
    cdef void* alloc_c(self, size_t nbytes, size_t align) noexcept nogil
    cdef void* grown_c(self, size_t nbytes, size_t align) noexcept
    # A block for which the source is asked. `hooks`: on_oom may be called.
    cdef char* slow_get(self, size_t n, size_t align, bint hooks, uint64_t* tag) except NULL
    # Get memory for a request. False: none, but the hook says that something was freed.
    cdef bint more(self, size_t n, size_t align, bint hooks) except -1
    cdef int take_many(self, Many many) except -1
