# The C surface of the pool algorithm. PoolCore is what Buffers keep alive; Pool (pool.pyx) is what
# the user holds.
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t

from arenapy.base.atomic cimport arenapy_spin, arenapy_spin_acquire, arenapy_spin_release, likely
from arenapy.allocator.allocator_core cimport Leased
from arenapy.buffer.block cimport Hold
from arenapy.pool.hot_path cimport cache_free_at, cache_alloc, give, take
from arenapy.pool.thread_cache cimport Asked, Entry, ThreadCaches
from arenapy.base.sizes cimport MAX_BYTES, N_CLASSES


cdef struct ClassFigures:
    uint64_t allocations, hits, misses, splits, active
    size_t live, pending, idle, peak, largest

cdef struct PoolFigures:
    ClassFigures classes[N_CLASSES]
    ClassFigures all
    size_t reserved, metadata
    uint64_t bytes           # of all allocations ever
    Py_ssize_t regions

cdef enum:
    FINE_STEPS = 120         # the steps that have a bucket each; others share
    BUCKETS = 120 + 64

# An idle block of a stream.
cdef struct Node:
    char* ptr
    uint64_t block_id
    uint32_t next            # in its bucket, a chain or those unused; 0: it is the last
    uint32_t look            # Lent.look when it was given back

# Blocks of a device's pool that a stream or a graph has: see stream_cache. For the pool, all live.
cdef struct Lent:
    Lent* next
    Lent* prev
    void* owner              # the StreamCache
    Node* nodes              # n_nodes, and [0] is nothing: as many as `blocks`, and maybe more
    Hold* aside              # freed blocks that other streams are at work on
    uint32_t n_nodes
    uint32_t unused          # nodes, linked
    uint32_t blocks          # live, idle and pending ones
    uint32_t away            # idle ones in chains, while their stream is asked
    uint32_t look            # how often `trim_after` has looked at it
    uint32_t of_graph        # 1: idle blocks are the graph's as long as it exists, and so pending
    uint64_t bytes, taken_bytes
    uint64_t allocations[N_CLASSES]      # of the stream, and of the pool for it
    uint64_t taken[N_CLASSES]
    uint64_t idle_blocks[N_CLASSES]
    uint64_t pending_blocks[N_CLASSES]
    size_t idle_bytes[N_CLASSES]
    size_t pending_bytes[N_CLASSES]
    uint32_t heads[BUCKETS]  # of idle blocks, the one that was given back last first


# A thread that the source is at work for.
cdef struct Grower:
    uint64_t thread
    Grower* next


cdef class PoolCore(ThreadCaches):
    cdef bint in_arrays      # NumPy has blocks for arrays' data, or had
    cdef Leased leased               # under heap_lock
    cdef Hold* aside         # freed blocks that streams are at work on; under heap_lock
    cdef size_t pending_bytes[N_CLASSES]
    cdef uint64_t pending_blocks[N_CLASSES]

    cdef uint64_t in_transit         # atomic: threads that give pages memory, or take it away
    cdef Grower* growers     # under heap_lock
    cdef Lent* lent          # of each other stream; under lent_lock, as are the figures below it
    cdef arenapy_spin lent_lock
    cdef size_t lent_idle    # bytes of all that is idle there
    cdef uint64_t lent_before[N_CLASSES]     # allocations beyond `taken` of streams that are gone
    cdef uint64_t lent_bytes_before          # and their bytes

    cdef void ready(self) noexcept nogil
    cdef void update_fast_path(self) noexcept nogil
    # All that is to be done on either way, also when `fast_path_off`.
    cdef char* alloc_block(self, size_t n, size_t align, bint miss,
                           uint64_t* block_id) noexcept nogil
    cdef void handed_out(self, char* ptr, size_t n, uint64_t block_id) noexcept nogil
    cdef bint free_block(self, char* ptr, uint64_t block_id) noexcept nogil
    # The same by address, and the bytes of a live block from there on; 0: there is none.
    cdef bint free_block_at(self, char* ptr) noexcept nogil
    cdef size_t size_at(self, char* ptr) noexcept nogil
    cdef uint64_t find(self, char* ptr) noexcept nogil
    cdef size_t size_of(self, uint64_t block_id) noexcept nogil
    cdef bint claim(self, uint64_t block_id) noexcept nogil
    cdef void free_claimed(self, char* ptr, uint64_t block_id) noexcept nogil
    # Free what other processes have let go of, until `most` in a row are seen; the bytes.
    cdef size_t reclaim_leases(self, Py_ssize_t most) noexcept nogil
    cdef PoolFigures figures(self) noexcept nogil
    cdef size_t largest_of(self, int k) noexcept nogil
    # With `timed`: as if something was freed, so that `stale_tick` finds that in time.
    cdef void go_on_looking(self) noexcept nogil
    cdef size_t stale_pages(self, uint32_t tick) noexcept nogil
    cdef size_t exchange_peak(self, int64_t peak) noexcept nogil
    cdef void reset_peaks(self) noexcept nogil
    # A live block is pending until `finish_free` takes its hold. False: it is not live.
    cdef bint set_aside(self, Hold* hold) noexcept nogil
    cdef void add_lent(self, PoolFigures* r) noexcept nogil
    cdef bint lent_away(self) noexcept nogil     # are blocks of streams in chains?


# The short ways, in C. The core is passed as an argument, so that it is loaded once, and not after
# every store. NULL, False: the thread cache has none, or the other way is to be taken.
# `hot`: not always the block freed last, but what is rather in the processor's caches.

cdef inline void* try_cache_alloc(PoolCore c, size_t n, bint hot) noexcept nogil:
    cdef uint64_t block_id
    if likely(not c.fast_path_off and n <= MAX_BYTES):
        return cache_alloc(c, n, hot, &block_id)
    return NULL


cdef inline bint try_cache_free(PoolCore c, void* block) noexcept nogil:
    return likely(not c.fast_path_off) and cache_free_at(c, <char*>block)


# The common cases of these, for functions without a frame. NULL, False: try those above.

cdef inline void* try_take(PoolCore c, size_t n, bint hot) noexcept nogil:
    return take(c, n, hot)


cdef inline bint try_give(PoolCore c, void* block) noexcept nogil:
    return give(c, <char*>block)


# -- blocks of streams

cdef inline int lent_bucket(int s) noexcept nogil:
    return s if s < FINE_STEPS else FINE_STEPS + (s & 63)


cdef inline void lent_enter(PoolCore c) noexcept nogil:
    arenapy_spin_acquire(&c.lent_lock)


cdef inline void lent_leave(PoolCore c) noexcept nogil:
    arenapy_spin_release(&c.lent_lock)


# -- batches of blocks
# A list of blocks that are taken from a pool, and put back if not all of them can be.

cdef class BlockBatch:
    cdef Py_ssize_t n
    cdef Py_ssize_t done                 # so many of the entries are blocks
    cdef size_t* sizes                   # the caller's to fill in
    cdef Py_ssize_t filled               # by `repeat`
    cdef Entry* entries
    cdef Asked asked                     # what taking them was counted as
    cdef int64_t peaks[N_CLASSES + 1]    # from before, or of others since
    cdef int64_t taken[N_CLASSES + 1]    # bytes of the first `counted` entries
    cdef Py_ssize_t counted

    cdef void repeat(self, size_t size, Py_ssize_t count) noexcept nogil
    cdef void begin(self, PoolCore core) noexcept nogil
    # Take more of them, as many as there is memory for; how many those were.
    cdef Py_ssize_t take(self, PoolCore core, bint miss) noexcept nogil
    # Other code has run, and may have allocated: what it reached stays when this is undone.
    cdef void note_others(self, PoolCore core) noexcept nogil
    # As if none had been taken.
    cdef void undo(self, PoolCore core) noexcept nogil
