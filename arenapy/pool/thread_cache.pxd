# The C surface of thread caches and spans: what they are. How they are used: hot_path.pxd.
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from arenapy.base.atomic cimport arenapy_spin
from arenapy.base.biased_lock cimport BiasedLock
from arenapy.pool.page_heap cimport Descriptor, Segments
from arenapy.base.sizes cimport N_CLASSES, N_EXACT, N_SMALL, N_STEPS, SMALL_MOST
from arenapy.linux.reserved_space cimport ReservedArray
from arenapy.base.thread_slot cimport N_SLOTS

cdef enum:
    MAGAZINE_MOST = 64       # slots
    # Entries from those of a magazine to the next one's. Not a power of two: the entries of all
    # magazines would lie in the same sets of the processor's caches.
    MAGAZINE_PITCH = MAGAZINE_MOST + 4
    # Blocks above 32 KiB in a thread cache, at most. Callers have it compiled in: ARENAPY_ABI.
    LARGE_MOST = 256
    DEPOT_MOST = 4 * MAGAZINE_MOST   # slots
    SLOTS_LEAST = 8          # in a span
    SLOTS_MOST = 64          # in a span: the bits of a word
    SMALL_LINES = SMALL_MOST >> 6
    SKEW = 2048              # bytes
    # A new thread's first allocation may not wait for mmap and mprotect, which wait for all threads
    # that are faulting pages in. So the first of several threads asks for the caches of all.
    CACHE_ARRAYS = 8
    FIT = 6                  # a device's block may have 1 / 2 ** FIT more than was asked for

# A free slot, or a block above 32 KiB, and its name.
cdef struct Entry:
    char* ptr
    uint64_t block_id

# The bytes of one class, or of all, that are live through one thread cache: bytes handed out less
# bytes freed, which may be negative. Both fields begin anew at 0 when they are added to a Total. A
# cache keeps the difference, and not the live bytes: an allocation then subtracts from it, and its
# sign says whether there is a new peak.
cdef struct Level:
    int64_t slack            # peak less live bytes
    int64_t peak             # the most that was, at least 0

# What happened in one class through one thread cache.
cdef struct Count:
    Level level
    # Of blocks above 32 KiB. Magazines count the others.
    uint64_t allocations
    uint64_t frees

# The free slots of one step in a thread cache. The slots are elsewhere, so that a Magazine is a
# cache line: it is found by a shift.
cdef struct Magazine:
    uint32_t n               # <= depth
    uint32_t depth           # its step's
    uint64_t inverse         # its step's
    size_t size              # of a slot, bytes
    Count* count             # of the class
    uint64_t allocations     # ever. Frees are `allocations` + n - `arrived`.
    int64_t arrived          # slots from spans and depots, less slots moved there
    Entry* items             # MAGAZINE_MOST, in the order in which they were freed
    uint32_t tick            # with `trim_after`: that of the cache when a slot was freed last
    uint32_t unused

# What caches have added up, of a class or of all. All that is live is `live` and the caches' own.
cdef struct Total:
    int64_t live
    int64_t peak             # the most that ever was, as far as is known; at least what is live

# A cache of free blocks in front of the heap, newest first by step; its own lock guards it. Each
# slot of threads has one, from the first block on that its thread asks for. A block enters the
# cache of the thread that frees it. (Counters that change together are kept apart: of neighbours,
# compilers make vectors, whose loads wait for the scalar stores before them.)
cdef struct ThreadCache:
    BiasedLock lock
    # Ages are told by it: allocations and frees above 32 KiB through it. With `trim_after`, each
    # free begins with `ThreadCaches.latest` instead.
    uint32_t tick
    uint32_t n_large
    Level level              # of all classes
    uint64_t freed           # bytes of blocks above 32 KiB
    uint64_t unused
    Magazine small[N_SMALL]  # on cache lines
    Count counts[N_CLASSES]
    uint32_t large[N_EXACT - N_SMALL]    # BLOCKs linked by next
    Entry items[N_SMALL * MAGAZINE_PITCH]    # of the magazines

# Slots of one step that go from thread to thread, without a visit to their spans: a depot.
cdef struct Depot:
    arenapy_spin lock
    uint32_t n               # <= DEPOT_MOST
    uint32_t tick            # the latest of the magazines that its slots came from
    Entry items[DEPOT_MOST]  # in the order in which they came

cdef struct SmallStep:
    uint32_t size            # bytes of a slot
    uint32_t pages           # of a span
    uint32_t slots           # in a span, at most SLOTS_MOST; they fill it
    uint32_t depth           # of magazines
    uint64_t inverse         # ceil(2 ** 64 / size): see slot_of


cdef inline int64_t live_at(Level* level) noexcept nogil:
    return level.peak - level.slack


# Slots of a step that were handed out through a cache, less slots that were freed there.
cdef inline int64_t live_slots(Magazine* m) noexcept nogil:
    return m.arrived - <int64_t>m.n


# Adding a cache's figures to the totals.
cdef inline void add_to_total(Total* t, Level* level, int64_t elsewhere) noexcept nogil:
    t.peak = max(t.peak, t.live + elsewhere + level.peak)
    t.live += live_at(level)
    level.slack = level.peak = 0


# What is counted by class where the heap is asked.
cdef struct Asked:
    uint64_t misses[N_CLASSES]
    uint64_t splits[N_CLASSES]


cdef enum:
    SAMPLES = 16

# A tick of `trim_after`, and when something was freed last in it.
cdef struct Sample:
    uint32_t tick
    double seconds


cdef class ThreadCaches(Segments):
    # The cache that the short way takes, by the slot of the thread. While the thread has none, or
    # the fast path is off, a lock that nobody owns. (Not under a lock: read it by quick_cache.)
    cdef ThreadCache* quick[N_SLOTS + 1]
    cdef bint fast_path_off  # not the short ways: each call is to do more
    cdef int64_t slot_offset             # slot_offset()
    cdef ThreadCache* caches[N_SLOTS + 1]    # by slot; NULL: there is none, as for slot 0
    # Where they lie: those of the first N_SLOTS / CACHE_ARRAYS slots, of as many more, and so on.
    cdef ReservedArray cache_arrays[CACHE_ARRAYS]
    cdef int top_slot        # no slot above it has a cache; under `births`, and grows only, as
    cdef int n_caches        # of these
    # [N_SMALL], by step: from the second cache on. NULL: there are none.
    cdef Depot* depots
    cdef ReservedArray depot_array       # where they lie, or will
    cdef ThreadCache* cache  # the first that was made; of threads too, if there is no memory
    cdef Total totals[N_CLASSES + 1]     # by class, and of all; under heap_lock
    cdef arenapy_spin births             # held while one is added
    cdef int rounding        # ROUND_*
    cdef double timed        # trim_after, or -1
    # With it, two ticks are an eighth of that time in which something was freed. So ticks do not go
    # round while memory stays idle; those of operations would, in minutes. Each free begins with
    # the first of the two, and ends with the second one, if the block is above 32 KiB.
    cdef uint32_t latest     # the first, of all threads; under heap_lock, or a glance
    cdef double begun        # seconds: the beginning of it
    cdef Sample[SAMPLES] samples     # oldest first; under heap_lock
    cdef int n_samples
    cdef bint tight          # more than half of what may be reserved is; a glance
    cdef uint32_t partial[N_SMALL]       # SPANs with slots in the heap; by step, linked by next
    cdef size_t taken[N_CLASSES]         # pages of BLOCKs and SPANs; under heap_lock, as are these:
    cdef Asked asked
    cdef SmallStep steps[N_SMALL]
    cdef uint8_t class_at[N_STEPS]       # class of a step
    # [(n + 63) // 64]: the step of n bytes, at most SMALL_MOST, after rounding.
    cdef uint8_t step_at[SMALL_LINES + 1]

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
                              const int64_t* peaks) noexcept nogil
    # Before `push`, with the cache's lock: in the latest tick, or a new one.
    cdef void note_free(self, ThreadCache* f, Descriptor* d) noexcept nogil
    cdef void note_time(self, ThreadCache* f) noexcept nogil
    # The last tick that is over for so many seconds; False: none is.
    cdef bint stale_tick(self, double seconds, uint32_t* tick) noexcept nogil
    cdef bint full_free(self, ThreadCache* f, char* ptr, uint64_t block_id) noexcept nogil
    # Grow a live block in place, so that it has n bytes; `miss`: there was memory got for it. Else
    # nothing has changed, and `missing` is how many pages it needs behind it; 0: it is a small one.
    cdef bint grow_block(
        self, uint64_t block_id, size_t n, bint miss, uint32_t* missing) noexcept nogil
    # The same of blocks above 32 KiB, past the thread's cache: for those that another thread frees,
    # whose cache would keep what this one's misses. NULL: the heap has none, or it is a small one.
    cdef char* uncached_alloc(self, size_t n, uint64_t* block_id) noexcept nogil
    cdef bint uncached_free_at(self, char* ptr) noexcept nogil
    cdef size_t pages_for(self, size_t n, size_t align) noexcept nogil
    cdef bint others_keep_much(self) noexcept nogil
    cdef void flush_all(self, bint others, const uint32_t* until) noexcept nogil
    # Set the flag, and `quick` to match.
    cdef void set_fast_path_off(self, bint fast_path_off) noexcept nogil
    # The short ways, for a thread that does not own the lock of its cache. shared_alloc returns
    # NULL also if the fast path is off. The others free in any case, see cache_free.
    cdef char* shared_alloc(self, size_t n, bint hot, uint64_t* block_id) noexcept nogil
    cdef bint shared_free(self, char* ptr, uint64_t block_id) noexcept nogil
    cdef bint shared_free_at(self, char* ptr) noexcept nogil
    # internal
    cdef char* from_heap(self, ThreadCache* f, int s, size_t n, size_t pages, size_t align,
                         bint miss, Asked* asked, uint64_t* block_id) noexcept nogil
    cdef bint free_to_heap(self, ThreadCache* f, Descriptor* d, char* ptr,
                           uint64_t block_id) noexcept nogil
    cdef bint refill(self, ThreadCache* f, int s, bint miss, Asked* asked) noexcept nogil
    cdef void count_asked(self, int k, bint miss, Asked* asked) noexcept nogil
    cdef void add_up(self, ThreadCache* f, int k, bint others) noexcept nogil
    cdef void add_up_all(self) noexcept nogil
    cdef void add_up_here(self, ThreadCache* f, int s) noexcept nogil
    cdef void add_up_own(self, ThreadCache* f) noexcept nogil
    cdef void open_depots(self) noexcept nogil
    cdef ThreadCache* room_for_cache(self, int i) noexcept nogil
    cdef bint from_depot(self, ThreadCache* f, int s) noexcept nogil
    cdef bint to_depot(self, ThreadCache* f, int s) noexcept nogil
    cdef void return_slots(self, const Entry* items, uint32_t n, uint32_t tick) noexcept nogil
    cdef void flush_small(self, ThreadCache* f, int s, uint32_t keep, uint32_t tick) noexcept nogil
    cdef void flush_large(self, ThreadCache* f, const uint32_t* until) noexcept nogil
    cdef void heap_free(self, uint32_t id) noexcept nogil


# The tick of what happens now. A cache's own may be that of its thread's last free.
cdef inline uint32_t tick_now(ThreadCaches c, ThreadCache* f) noexcept nogil:
    return f.tick if c.timed < 0 else c.latest
