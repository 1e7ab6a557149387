# The C surface of Pool. Its calls for other packages are in c_api.pxd.
from libc.stdint cimport uint32_t, uint64_t

from arenapy.buffer.buffer cimport Buffer
from arenapy.allocator.allocator cimport Allocator
from arenapy.pool.core cimport BlockBatch, PoolCore
from arenapy.pool.memory cimport PoolMemory
from arenapy.pool.stream_cache cimport StreamCache

cdef class Pool(Allocator):
    cdef PoolCore core
    cdef PoolMemory memory
    cdef readonly object max_bytes
    cdef readonly object on_oom
    # StreamCaches of the streams of a device that are not the pool's own; None: it has none.
    cdef dict stream_caches
    cdef dict graph_caches               # the same of graphs, which are None if those are
    cdef readonly object trim_after
    cdef readonly str rounding
    cdef readonly bint debug
    # Streams of the user that were named last, each with its cache; replaced, and never changed.
    cdef list recent_streams
    cdef Py_ssize_t streams_come         # since those that are gone were looked for
    cdef size_t idle_allowed             # bytes that streams may keep idle when a pool grows
    cdef double streams_due              # when `trim_after` looks at stream caches and streams next

    cdef object stream_cache_of(self, object stream)
    cdef Buffer stream_block(self, StreamCache cache, object nbytes, object alignment)
    cdef char* lend(self, StreamCache cache, size_t n, size_t align, uint64_t* block_id) except NULL
    cdef StreamCache graph_cache_of(self, object named)
    cdef bint settle_graphs(self) except -1
    cdef size_t settle_gone(self, StreamCache heir) except? 0
    cdef int forget_stream_cache(self, object named, StreamCache cache) except -1
    cdef bint reclaim(self) except -1
    # Only what is as old as `age` looks of `trim_after`. `wait`: also what other streams work on.
    # False: nothing.
    cdef bint give_back_all(self, bint wait, uint32_t age) except -1
    # What `trim_after` means, now: pages that were given back.
    cdef size_t trim_old(self) except? 0
    cdef Buffer general_alloc(self, object nbytes, object align, object stream)
    # Grow a block where it is. False: it has to move.
    cdef bint grow_here(self, Buffer buffer, Py_ssize_t n) except -1
    # pool_alloc but for its short way.
    cdef void* alloc_c(self, size_t nbytes, size_t align) noexcept nogil
    # A block for which the source is asked. `hooks`: on_oom may be called.
    cdef char* source_alloc(self, size_t n, size_t align, bint hooks,
                            uint64_t* block_id) except NULL
    # Get memory for a request. False: none, but something was freed.
    cdef bint more(self, size_t n, size_t align, bint hooks) except -1
    cdef size_t growth(self) noexcept
    cdef str full(self, size_t n, str why)
    cdef int take_batch(self, BlockBatch batch) except -1
    # Another thread asks streams whether they are done with blocks, which are in no list then: wait
    # until it has them where they belong. False: none does.
    cdef bint wait_for_chains(self) except -1
    # The usual allocation on the pool's own stream; None if it is not that.
    cdef object usual_alloc(self, object nbytes)
