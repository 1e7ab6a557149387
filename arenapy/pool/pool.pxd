# The C surface of Pool. Its calls for other packages are in c_api.pxd.
from libc.stdint cimport uint64_t

from arenapy.buffer.buffer cimport Buffer
from arenapy.allocator.allocator cimport Allocator
from arenapy.pool.core cimport BlockBatch, PoolCore
from arenapy.pool.memory cimport PoolMemory
from arenapy.pool.stream_cache cimport StreamCache, StreamCaches

cdef class Pool(Allocator):
    cdef PoolCore core
    cdef PoolMemory memory
    cdef readonly object max_bytes
    cdef readonly object on_oom
    cdef StreamCaches streams            # None: the memory is not a device's alone
    cdef readonly object trim_after
    cdef readonly str rounding
    cdef readonly bint debug
    cdef double streams_due              # when `trim_after` looks at stream caches and streams next

    cdef Buffer stream_block(self, StreamCache cache, object nbytes, object alignment)
    # Give back now what `trim_after` would give back; the number of pages.
    cdef size_t trim_old(self) except? 0
    cdef Buffer general_alloc(self, object nbytes, object align, object stream)
    # Grow a block where it is. False: it has to move.
    cdef bint grow_here(self, Buffer buffer, Py_ssize_t n) except -1
    cdef bint is_mostly_idle(self)
    cdef bint can_move(self, Buffer buffer, Py_ssize_t n)
    # pool_alloc but for its short way.
    cdef void* alloc_c(self, size_t nbytes, size_t align) noexcept nogil
    # A block for which the source is asked. `hooks`: on_oom may be called.
    cdef char* source_alloc(self, size_t n, size_t align, bint hooks,
                            uint64_t* block_id) except NULL
    # Get memory for a request. False: none, but something was freed.
    cdef bint more(self, size_t n, size_t align, bint hooks, int round) except -1
    cdef bint reclaim_all(self) noexcept
    cdef size_t growth(self) noexcept
    cdef str full(self, size_t n, bint read, str why)
    cdef int take_batch(self, BlockBatch batch) except -1
    # The usual allocation on the pool's own stream; None if it is not that.
    cdef object usual_alloc(self, object nbytes)
