# The C surface of stream caches: blocks of a Pool that other streams, or graphs, keep.
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

    # The newest idle block that fits, or NULL.
    cdef char* pop(self, size_t n, size_t align, uint64_t* block_id) noexcept nogil
    # A live block of the pool is this stream's from now on, and its user's; or idle.
    cdef int own(self, char* ptr, uint64_t block_id) except -1
    cdef int add(self, char* ptr, uint64_t block_id) except -1
    # Take out the idle blocks as old as `age` looks, in one chain, which nobody finds. `attach`
    # undoes it.
    cdef uint32_t detach(self, uint32_t age) noexcept nogil
    # So many looks pass. The idle blocks that have come since the last one are one look old then.
    cdef void grow_old(self, uint32_t looks) noexcept nogil
    cdef void attach(self, uint32_t chain) noexcept nogil
    # Its blocks are free in the pool, whose streams all may use them at once; or once this stream
    # has done what it was given; or they are another stream's. Bytes.
    cdef size_t free_chain(self, uint32_t chain) noexcept
    cdef int defer_chain(self, uint32_t chain) except -1
    cdef int pass_chain(self, uint32_t chain, StreamCache other) except -1
    cdef size_t idle(self) noexcept nogil
    cdef uint64_t allocations(self) noexcept nogil
    # internal
    cdef void pass_pending(self) noexcept
    cdef void defer(self, Hold* hold) noexcept
    cdef void take_back(self, char* ptr, uint64_t block_id) noexcept nogil
    cdef int reserve(self, uint32_t more) except -1
    cdef uint32_t unlink(self, uint32_t chain, char** ptr, uint64_t* block_id) noexcept nogil


# The cache of a stream, as the hooks name it, or of a graph.
cdef StreamCache new_stream_cache(PoolCore core, object stream, bint of_graph)


# Those of a Pool, which is over memory of a device alone.
cdef class StreamCaches:
    cdef PoolCore core
    cdef dict of_streams             # by the stream, as the hooks name it; not the pool's own
    cdef dict of_graphs              # by the graph
    # Streams of the user that were named last, each followed by its cache.
    cdef tuple recent
    cdef Py_ssize_t come             # streams, since those that are gone were looked for
    cdef size_t idle_allowed         # bytes that streams may keep idle when the pool grows

    # The owner of the blocks of a user's stream: its cache, or the pool's core if it is the pool's
    # own stream. Else the stream's name: it is being captured, or gets no cache.
    cdef object owner_of(self, object stream)
    # The cache of a graph for a stream that is being captured into it.
    cdef StreamCache graph_cache(self, object name)
    # A live block of the pool, and others like it, are a stream's, which waits for the pool's own.
    # If this fails, the block is freed.
    cdef int lend(
        self, StreamCache cache, char* ptr, uint64_t block_id, size_t n, size_t align
    ) except -1
    # Blocks of graphs that are gone are the pool's. `wait`, for those that streams still use, as in
    # `StreamHooks.collect`. False: there were none.
    cdef bint settle_graphs(self, Py_ssize_t wait) except -1
    # Blocks of streams that are gone are others' when their work is done. Bytes. Those of the first
    # go to `heir`, the cache of a new stream, or None. If others keep much, its stream waits for
    # some of them, and has their blocks.
    cdef size_t settle_gone(self, StreamCache heir) except? 0
    # Before the pool grows: what streams do not use any more. False: nothing.
    cdef bint reclaim(self) except -1
    # The pool takes back blocks of streams that have done their work. Only those that are as old
    # as `age` looks of `trim_after`. `wait`: also what other streams work on. False: nothing.
    cdef bint give_back_all(self, bint wait, uint32_t age) except -1
    # Blocks of dropped Buffers go from the hooks to the caches.
    cdef int collect(self) except -1
    # `looks` of `trim_after` at once: give back what is as old as `age` of them.
    cdef int trim_old(self, uint32_t looks, uint32_t age) except -1
    # Another thread asks streams whether they are done with blocks, which are in no list then: wait
    # until it has them where they belong. False: none does.
    cdef bint wait_for_chains(self) except -1
    # internal: a cache whose stream is gone, and that has no block
    cdef int forget(self, object name, StreamCache cache) except -1


cdef StreamCaches new_stream_caches(PoolCore core)
