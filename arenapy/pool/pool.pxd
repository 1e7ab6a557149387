# The C surface of Pool. Its calls for other packages are in c_api.pxd.
from libc.stdint cimport uint64_t

from arenapy.buffer.buffer cimport Buffer
from arenapy.allocator.allocator cimport Allocator
from arenapy.pool.core cimport BlockBatch, PoolCore
from arenapy.pool.memory cimport PoolMemory

cdef class Pool(Allocator):
    cdef PoolCore core
    cdef PoolMemory memory
    cdef readonly object max_bytes
    cdef readonly object on_oom
    # Pools of the streams of a device that are not the pool's own, by stream; None: it has none.
    cdef dict stream_caches
    cdef readonly object trim_after
    cdef readonly str rounding
    cdef readonly bint debug
    # Streams of the user that were named last, each with its Stream and the pool of its blocks. It
    # is replaced, and never changed.
    cdef list recent_streams
    cdef Py_ssize_t max_stream_caches    # with more, those that nobody has asked lately may go
    cdef double streams_due              # when `trim_after` looks at stream caches and streams next
    cdef object past                  # what stream caches had done that are gone: see stream_caches
    cdef uint64_t asked              # of a stream cache: its allocations when it was looked at last

    cdef Pool stream_cache_of(self, object stream)
    # Stream caches without memory are forgotten. `unused`: those that nobody has asked since the
    # last look give back what is idle before.
    cdef int forget_stream_caches(self, bint unused) except -1
    # What `trim_after` means, now: pages that were given back.
    cdef size_t trim_old(self) except? 0
    cdef Buffer general_alloc(self, object nbytes, object align, object stream)
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
