# The C surface of a stream cache: blocks of a Pool that another stream, or a graph, keeps.
from cpython.object cimport PyObject
from libc.stdint cimport uint32_t, uint64_t

from arenapy.buffer.block cimport Hold, MemoryOwner
from arenapy.pool.core cimport Lent, PoolCore


cdef class StreamCache(MemoryOwner):
    cdef PoolCore core               # the pool's, whose blocks these are
    cdef Lent* lent
    cdef object stream               # as the hooks name it
    cdef uint64_t asked              # its allocations at the last look of `trim_after` or of growth
    cdef size_t reclaimed            # bytes that others have got of it since it missed last
    cdef list kept                   # what init_freelists gave
    cdef bint forgotten              # by the pool, when it had no block

    # The newest idle block that fits, or NULL.
    cdef char* pop(self, size_t n, size_t align, uint64_t* block_id) noexcept nogil
    # A live block of the pool is this stream's from now on, and its user's; or idle.
    cdef int own(self, char* ptr, uint64_t block_id) except -1
    cdef int add(self, char* ptr, uint64_t block_id) except -1
    # What is idle, in one chain, which nobody finds; only what is as old as `age` looks. `attach`
    # undoes it.
    cdef uint32_t detach(self, uint32_t age) noexcept nogil
    cdef void attach(self, uint32_t chain) noexcept nogil
    # Its blocks are free in the pool, whose streams all may use them at once; or once this stream
    # has done what it was given; or they are another stream's. Bytes.
    cdef size_t free_chain(self, uint32_t chain) noexcept
    cdef int defer_chain(self, uint32_t chain) except -1
    cdef int pass_chain(self, uint32_t chain, StreamCache other) except -1
    cdef size_t idle(self) noexcept nogil
    cdef uint64_t allocations(self) noexcept nogil
    # internal
    cdef void take_back(self, char* ptr, uint64_t block_id) noexcept nogil
    cdef int reserve(self, uint32_t more) except -1
    cdef uint32_t unlink(self, uint32_t chain, char** ptr, uint64_t* block_id) noexcept nogil


# The cache of a stream, as the hooks name it, or of a graph.
cdef StreamCache new_stream_cache(PoolCore core, object stream, bint of_graph)
