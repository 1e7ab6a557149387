# Pools as far as they grow: what Pool adds is what users call.
from libc.stdint cimport uint64_t

from arenapy.allocator.allocator cimport Allocator
from arenapy.pool.core cimport BlockBatch, PoolCore
from arenapy.pool.memory cimport PoolMemory


cdef class PoolGrowth(Allocator):
    cdef PoolCore core
    cdef PoolMemory memory
    cdef readonly object max_bytes
    cdef readonly object on_oom
    # Pools of the streams of a device that are not the pool's own, by stream; None: it has none.
    cdef dict lanes

    # A block for which the source is asked. `hooks`: on_oom may be called.
    cdef char* slow_get(self, size_t n, size_t align, bint hooks, uint64_t* tag) except NULL
    # Get memory for a request. False: none, but something was freed.
    cdef bint more(self, size_t n, size_t align, bint hooks) except -1
    cdef size_t growth(self) noexcept
    cdef int take_batch(self, BlockBatch batch) except -1
