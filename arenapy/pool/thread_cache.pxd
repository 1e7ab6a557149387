# The C surface of thread caches and spans: what they are. How they are used: hot_path.pxd.
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from arenapy.base.atomic cimport arenapy_spin
from arenapy.base.biased_lock cimport BiasedLock
from arenapy.pool.page_heap cimport Segments
from arenapy.base.sizes cimport N_CLASSES, N_EXACT, N_SMALL, N_STEPS
from arenapy.linux.reserved_space cimport ReservedArray
from arenapy.base.thread_slot cimport MAX_CACHES

cdef enum:
    # What a thread cache holds of one step up to 32 KiB: so many bytes, within two bounds.
    MAGAZINE_BYTES = 256 << 10
    MAGAZINE_LEAST = 8       # slots
    MAGAZINE_MOST = 64       # slots
    LARGE_MOST = 256         # blocks above 32 KiB in a thread cache, at most
    SLOTS_LEAST = 8          # in a span
    SLOTS_MOST = 64          # in a span: the bits of a word
    SKEW = 2048              # bytes
    FIT = 6                  # a device's block may have 1 / 2 ** FIT more than was asked for

# A free slot, and its name: descriptor << 6 | slot. Blocks above 32 KiB are named alike.
cdef struct Entry:
    char* ptr
    uint64_t block_id

cdef struct Magazine:
    uint32_t n               # <= depth
    uint32_t depth           # its step's
    Entry items[MAGAZINE_MOST]       # in the order in which they were freed

# What happened in one class through one thread cache.
cdef struct Count:
    uint64_t allocations
    int64_t live             # bytes handed out less bytes freed; may be negative
    int64_t peak             # the most that was
    uint64_t frees

# A cache of free blocks in front of the heap, newest first by step; its own lock guards it. One on
# builds with a GIL. On free-threaded ones threads are spread over several, and a block enters that
# of the thread that frees it. (Counters that change together are kept apart: of neighbours,
# compilers make vectors, whose loads wait for the scalar stores before them.)
cdef struct ThreadCache:
    BiasedLock lock
    uint32_t tick            # allocations and frees above 32 KiB through it; ages are told by it
    int64_t live             # of all classes, as are these:
    uint64_t freed           # bytes
    int64_t peak
    Count counts[N_CLASSES]
    uint32_t n_large
    uint32_t large[N_EXACT - N_SMALL]    # BLOCKs linked by next
    Magazine small[N_SMALL]
    ReservedArray array      # where this lies

cdef struct SmallStep:
    uint32_t size            # bytes of a slot
    uint32_t pages           # of a span
    uint32_t slots           # in a span, at most SLOTS_MOST; they fill it
    uint32_t depth           # of magazines


# What is counted by class where the heap is asked.
cdef struct Asked:
    uint64_t misses[N_CLASSES]
    uint64_t splits[N_CLASSES]


cdef class ThreadCaches(Segments):
    cdef ThreadCache* cache  # the first
    cdef ThreadCache* caches[MAX_CACHES]
    cdef arenapy_spin births             # held while one is added
    cdef int rounding        # ROUND_*
    cdef uint32_t partial[N_SMALL]       # SPANs with slots in the heap; by step, linked by next
    cdef size_t taken[N_CLASSES]         # pages of BLOCKs and SPANs; under heap_lock, as are these:
    cdef Asked asked
    cdef SmallStep steps[N_SMALL]
    cdef uint8_t class_at[N_STEPS]       # class of a step

    cdef int open(self, size_t pages, int rounding) except -1
    cdef size_t block_pages(self, size_t size) noexcept nogil
    cdef bint fitting_first(self, uint32_t* head, size_t n) noexcept nogil
    cdef ThreadCache* own_cache(self) noexcept nogil
    # A block, or NULL if the heap has none; `miss`: the heap has just got memory for it.
    cdef char* heap_alloc(self, size_t n, size_t align, bint miss,
                          uint64_t* block_id) noexcept nogil
    # Blocks of these sizes, as many as the heap has memory for; how many those are. `miss`: it has
    # just got memory for the first of them. What is counted as asked is added to `asked`, too.
    cdef Py_ssize_t take_batch(self, const size_t* sizes, Py_ssize_t n, bint miss, Entry* out,
                               Asked* asked) noexcept nogil
    # Free them as if they had never been taken.
    cdef void heap_alloc_undo(self, Py_ssize_t n, const Entry* blocks, const Asked* asked,
                              int64_t peak, const int64_t* peaks) noexcept nogil
    cdef bint full_free(self, ThreadCache* f, char* ptr, uint64_t block_id) noexcept nogil
    cdef size_t pages_for(self, size_t n, size_t align) noexcept nogil
    cdef void flush_all(self) noexcept nogil
    # The short ways, for a thread that does not own the lock of its cache.
    cdef char* shared_alloc(self, size_t n, int s, bint hot, uint64_t* block_id) noexcept nogil
    cdef bint shared_free(self, char* ptr, uint64_t block_id) noexcept nogil
    cdef bint shared_free_at(self, char* ptr) noexcept nogil
    # internal
    cdef char* from_heap(self, ThreadCache* f, int s, size_t n, size_t pages, size_t align,
                         bint miss, Asked* asked, uint64_t* block_id) noexcept nogil
    cdef bint refill(self, ThreadCache* f, int s, bint miss, Asked* asked) noexcept nogil
    cdef void count_asked(self, int k, bint miss, Asked* asked) noexcept nogil
    cdef void flush_small(self, ThreadCache* f, int s, uint32_t keep) noexcept nogil
    cdef void flush_large(self, ThreadCache* f) noexcept nogil
    cdef void heap_free(self, uint32_t id) noexcept nogil
