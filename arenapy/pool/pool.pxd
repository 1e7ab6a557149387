# The C surface of Pool; at the end, the calls for other packages.
from libc.stdint cimport uint64_t

from arenapy.base.abi cimport ARENAPY_ABI
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


# -- in C
# nogil calls for modules that `cimport arenapy`.
#
# Thread-safety: any thread may call these, with or without the GIL, and free what another
# allocated.
#
# What these hand out is raw, and is the caller's to free, once. Not to dangle is what Buffers are
# for; their blocks are not to be freed here.

# nbytes at a multiple of align (a power of two up to 2 MiB). NULL: exhausted, and nothing has
# changed. Grows if it has to (takes the GIL for that); on_oom is not called.
cdef void* pool_alloc(Pool pool, size_t nbytes, size_t align) noexcept nogil
# 0: done. -1: no live block of this pool begins there (freed twice, or another's); nothing changed.
cdef int pool_free(Pool pool, void* block) noexcept nogil
# Bytes that the block has, at least those asked for. 0: no live block of this pool begins there.
cdef size_t pool_usable_size(Pool pool, void* block) noexcept nogil
