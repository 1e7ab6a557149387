"""ThreadCaches: blocks of all sizes from the page heap, through thread caches.

What lives here: where a block of so many bytes comes from and goes to. What does not: pages
(page_heap), what a block belongs to and who else sees it (core), getting memory (memory).

A freed block enters a thread cache unmerged, under the step that it was rounded to. The next
request of that step takes the newest of these blocks, in a few instructions. The cache is bounded.
It is flushed when it overflows, on a miss, and for trim and defragment. A flush returns slots to
their spans. It returns empty spans and larger blocks to the page heap, which merges them at once.
If every free merged, every iteration of a loop would have to split a block again.

A block of up to 32 KiB is a slot of a span. A span is an extent that is cut into up to 64 slots of
one step, and its size is chosen so that the slots fill it. For each slot a byte says whether it is
live. A bit of the descriptor says whether it is free in the span. A slot that is neither is in a
thread cache or a depot. A larger block is an extent of its own.

Each thread has a cache of its own, and a block enters the cache of the thread that frees it. A
thread that frees what another one allocated would fill its cache, and empty it into the spans under
the heap's lock, again and again. Instead, half a magazine at a time goes to the depot of its step,
where the other thread finds it. (The transfer cache of Ghemawat and Menage's TCMalloc.)

Locks: a thread cache's, a depot's, then the heap's. Only `lock_all` holds those of several caches
and depots.
"""
cimport cython
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memmove

from arenapy.pool.hot_path cimport (
    block_is_valid, count_block, discount_block, forbid_block, magazine_is_valid, magazine_of,
    named, pop, push, skewed, tag_at,
)
from arenapy.base.assertion cimport arenapy_assert
from arenapy.base.atomic cimport arenapy_load_ptr, arenapy_store_ptr
from arenapy.base.atomic cimport arenapy_spin_acquire, arenapy_spin_release, rank_spin
from arenapy.base.biased_lock cimport (
    NOBODY, BiasedLock, biased_acquire, biased_release, rank_biased,
)
from arenapy.pool.page_heap cimport (
    BLOCK, FIT_LOOKS, ODD, PAGE, PAGE_BITS, SPAN, SPARE, STOCK, Descriptor, Segments, block_name,
    earlier, has_live, have_spare, id_of, later, low_bit, scatter, slot_name, slot_number,
)
from arenapy.base.sanitizer cimport POISONS
from arenapy.allocator.allocator_core cimport permit
from arenapy.base.sealed cimport seal
from arenapy.base.sizes cimport (
    MAX_BYTES, N_CLASSES, N_EXACT, N_SMALL, N_STEPS, ROUND_LINES, SMALL_MOST, class_of, round_bytes,
    rounded, step_bytes, step_of,
)
from arenapy.linux.reserved_space cimport (
    ReservedArray, array_close, array_open, vm_fill, vm_protect,
)
from arenapy.base.thread_slot cimport (
    N_SLOTS, RANK_BIRTHS, RANK_CACHE, RANK_DEPOT, cache_number, slot_offset,
)

cdef extern from *:
    """
    #include <time.h>
    /* The clock of the last timer interrupt: a few milliseconds off, and cheap. */
    static inline double arenapy_coarse_seconds(void) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
        return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
    }
    """
    double coarse_seconds "arenapy_coarse_seconds" () noexcept nogil

cdef enum:
    # What a thread cache holds of one step up to 32 KiB; or MAGAZINE_MOST slots if that is less.
    # docs/pool.md has this number.
    MAGAZINE_BYTES = 256 << 10
    STAGGER = 1024           # not on the cache lines that other arrays begin on
    # Before a pool grows for one thread, others keep what is free in their caches if it is no more
    # than this part of what is live, and so many bytes for each cache.
    KEPT_SHARE = 8
    KEPT_EACH = 8 << 20

# In the place of a cache that is not there. Nobody enters its lock, and no more of it is read.
cdef BiasedLock no_cache
no_cache.owner = NOBODY


cdef void make_cache(ThreadCaches c, ThreadCache* f) noexcept nogil:
    """In fresh pages, which are zero."""
    cdef int s
    arenapy_assert(
        <uintptr_t>f & 63 == 0 and sizeof(Magazine) == 64, b"a magazine is a cache line")
    arenapy_assert(&f.small[0] == <Magazine*>f + 1, b"magazines begin where magazine_of says")
    rank_biased(&f.lock, RANK_CACHE)
    for s in range(N_SMALL):
        f.small[s].depth = c.steps[s].depth
        f.small[s].inverse = c.steps[s].inverse
        f.small[s].size = c.steps[s].size
        f.small[s].count = &f.counts[c.class_at[s]]
        f.small[s].items = &f.items[s * MAGAZINE_PITCH]


cdef bint is_empty(ThreadCache* f) noexcept nogil:
    """A glance, so that who looks for memory does not take the locks of caches that have none."""
    cdef int s
    if f.n_large:
        return False
    for s in range(N_SMALL):
        if f.small[s].n:
            return False
    return True


@cython.no_gc_clear
cdef class ThreadCaches(Segments):
    """Blocks from pages, through thread caches. Internal."""

    def __cinit__(self):
        rank_spin(&self.births, RANK_BIRTHS)
        self.slot_offset = slot_offset()     # of pools that were never made, too

    def __dealloc__(self):
        cdef int i
        for i in range(CACHE_ARRAYS):
            array_close(&self.cache_arrays[i])
        array_close(&self.depot_array)

    cdef int open(self, size_t pages, int rounding) except -1:
        """Make ready, for about so many pages; there is no memory yet."""
        cdef int s, i
        cdef size_t size
        if not self.open_arrays(pages):
            raise MemoryError(
                "no address space for the bookkeeping of a pool, which takes some 800 KiB at "
                "least: raise RLIMIT_AS (`ulimit -v`) or RLIMIT_DATA (`ulimit -d`), or, if this "
                "process has very many mappings, vm.max_map_count"
            )
        for s in range(N_STEPS):
            self.class_at[s] = <uint8_t>class_of(step_bytes(s))
        for s in range(N_SMALL):
            size = step_bytes(s)
            self.steps[s].size = <uint32_t>size
            self.steps[s].slots = slots_of(size)
            self.steps[s].pages = <uint32_t>(self.steps[s].slots * size) >> PAGE_BITS
            self.steps[s].depth = min(<size_t>MAGAZINE_MOST, MAGAZINE_BYTES // size)
            self.steps[s].inverse = ~<uint64_t>0 // size + 1
        for i in range(SMALL_LINES + 1):
            self.step_at[i] = <uint8_t>step_of(rounded(<size_t>i << 6, rounding))
        self.rounding = rounding
        # Now, for the same reason as the caches (CACHE_ARRAYS). Without them it is only slower.
        if (array_open(&self.depot_array, N_SMALL * sizeof(Depot))
                and vm_protect(self.depot_array.at, self.depot_array.reserved, True) < 0):
            array_close(&self.depot_array)
        self.cache = self.own_cache()
        if self.cache == NULL:
            raise MemoryError("no memory for the bookkeeping of a pool")
        return 0

    cdef ThreadCache* own_cache(self) noexcept nogil:
        """The cache of this thread; the first one if there is no memory for another."""
        cdef int i = cache_number()
        cdef ThreadCache* f = <ThreadCache*>arenapy_load_ptr(<void**>&self.caches[i])
        if f != NULL:
            return f
        f = self.room_for_cache(i)
        if f == NULL:
            return self.cache
        if self.n_caches == 1:
            self.open_depots()
        arenapy_spin_acquire(&self.births)
        if self.caches[i] == NULL:           # else another thread of this slot was first
            make_cache(self, f)
            self.top_slot = max(self.top_slot, i)
            self.n_caches += 1
            arenapy_store_ptr(<void**>&self.caches[i], f)
            if not self.fast_path_off:
                arenapy_store_ptr(<void**>&self.quick[i], f)
        arenapy_spin_release(&self.births)
        return f

    cdef ThreadCache* room_for_cache(self, int i) noexcept nogil:
        """Where a slot's cache lies, with its pages. NULL: there is no memory."""
        cdef size_t nbytes = (STAGGER + sizeof(ThreadCache) + PAGE - 1) & ~<size_t>(PAGE - 1)
        cdef int together = N_SLOTS // CACHE_ARRAYS
        cdef ReservedArray* lie = &self.cache_arrays[(i - 1) // together]
        cdef ReservedArray made
        cdef char* at
        if arenapy_load_ptr(<void**>&lie.at) == NULL:
            if not array_open(&made, together * nbytes):
                return NULL
            if vm_protect(made.at, made.reserved, True) < 0:
                array_close(&made)
                return NULL
            arenapy_spin_acquire(&self.births)
            if lie.at == NULL:
                lie.reserved = made.reserved
                arenapy_store_ptr(<void**>&lie.at, made.at)
                made.at = NULL
            arenapy_spin_release(&self.births)
            array_close(&made)
        at = lie.at + (i - 1) % together * nbytes
        return NULL if vm_fill(at, nbytes) < 0 else <ThreadCache*>(at + STAGGER)

    cdef void open_depots(self) noexcept nogil:
        """From now on slots go from thread to thread, if there is memory for that."""
        cdef ReservedArray* array = &self.depot_array
        cdef int s
        biased_acquire(&self.cache.lock)     # which, while it was alone, added nothing up
        arenapy_spin_acquire(&self.heap_lock)
        self.add_up_own(self.cache)
        arenapy_spin_release(&self.heap_lock)
        biased_release(&self.cache.lock)
        if self.depots != NULL or array.at == NULL or vm_fill(array.at, array.reserved) < 0:
            return
        arenapy_spin_acquire(&self.births)
        if self.depots == NULL:
            for s in range(N_SMALL):
                rank_spin(&(<Depot*>array.at)[s].lock, RANK_DEPOT)
            array.ready = array.reserved
            arenapy_store_ptr(<void**>&self.depots, array.at)
        arenapy_spin_release(&self.births)

    # -- blocks of the thread caches

    cdef void set_fast_path_off(self, bint fast_path_off) noexcept nogil:
        cdef int i
        cdef void* f
        self.fast_path_off = fast_path_off   # under `births`, or where no other thread runs
        for i in range(N_SLOTS + 1):
            f = arenapy_load_ptr(<void**>&self.caches[i])
            arenapy_store_ptr(
                <void**>&self.quick[i], &no_cache if fast_path_off or f == NULL else f)

    cdef char* shared_alloc(self, size_t n, bint hot, uint64_t* block_id) noexcept nogil:
        cdef ThreadCache* f
        cdef char* ptr = NULL
        if self.fast_path_off:
            return NULL
        f = self.own_cache()
        biased_acquire(&f.lock)
        if not self.fast_path_off:           # still: a fork may have had the lock until now
            ptr = pop(self, f, step_of(rounded(n, self.rounding)), n, hot, block_id)
        biased_release(&f.lock)
        if POISONS and ptr != NULL:
            permit(self, <uintptr_t>ptr, n)
        return ptr

    cdef bint shared_free(self, char* ptr, uint64_t block_id) noexcept nogil:
        cdef ThreadCache* f = self.own_cache()
        cdef Descriptor* d = named(self, block_id)
        cdef bint was_live
        biased_acquire(&f.lock)
        self.note_free(f, d)
        was_live = push(self, f, d, ptr, block_id)
        biased_release(&f.lock)
        return was_live

    cdef bint shared_free_at(self, char* ptr) noexcept nogil:
        cdef ThreadCache* f = self.own_cache()
        cdef Descriptor* d
        cdef uint64_t block_id
        cdef bint was_live
        biased_acquire(&f.lock)
        block_id = tag_at(self, ptr, &d)
        was_live = block_id != 0
        if was_live:
            self.note_free(f, d)
            was_live = push(self, f, d, ptr, block_id)
        biased_release(&f.lock)
        return was_live

    # -- blocks from the heap

    cdef char* heap_alloc(
        self, size_t n, size_t align, bint miss, uint64_t* block_id
    ) noexcept nogil:
        cdef ThreadCache* f = self.own_cache()
        cdef size_t size = rounded(n, self.rounding) if self.rounding else n
        cdef size_t pages = max((size + PAGE - 1) >> PAGE_BITS, <size_t>1)
        cdef int s = step_of(size)
        cdef int attempt
        cdef char* ptr = NULL
        cdef bint cached
        if s >= N_SMALL:
            pages = self.block_pages(size)
        elif align > PAGE:
            s = N_STEPS                      # pages, not a slot
        else:
            while align > 64 and step_bytes(s) & (align - 1):
                s += 1
        cached = s < N_SMALL or align <= PAGE
        for attempt in range(2):
            if not have_spare(self):
                return NULL
            biased_acquire(&f.lock)
            if cached and s < N_SMALL and f.small[s].n == 0 and self.depots != NULL:
                self.from_depot(f, s)
            if cached:
                ptr = pop(self, f, s, n if align <= 64 or self.rounding == ROUND_LINES
                          else step_bytes(s), False, block_id)
            if ptr == NULL and attempt == 0 and self.merges_first and s >= N_SMALL:
                pass                         # what is free may do without a cut, once it is merged
            elif ptr == NULL:
                arenapy_spin_acquire(&self.heap_lock)
                ptr = self.from_heap(f, s, n, pages, align, miss, NULL, block_id)
                if ptr != NULL and miss:
                    self.count_asked(named(self, block_id[0]).size_class, True, NULL)
                arenapy_spin_release(&self.heap_lock)
            elif miss:
                arenapy_spin_acquire(&self.heap_lock)
                self.count_asked(self.class_at[s], True, NULL)
                arenapy_spin_release(&self.heap_lock)
            biased_release(&f.lock)
            if ptr != NULL:
                permit(self, <uintptr_t>ptr, n)
                return ptr
            if attempt == 0:
                self.flush_all(self.others_keep_much(), NULL)
        return NULL

    cdef bint grow_block(
        self, uint64_t block_id, size_t n, bint miss, uint32_t* missing
    ) noexcept nogil:
        cdef ThreadCache* f = self.own_cache()
        cdef Descriptor* d = named(self, block_id)
        cdef uint32_t id = id_of(block_id)
        cdef uint32_t behind
        cdef size_t size, pages
        cdef bint done
        missing[0] = 0
        if n > MAX_BYTES or not have_spare(self):
            return False
        biased_acquire(&f.lock)
        arenapy_spin_acquire(&self.heap_lock)
        done = n <= d.size - d.skew
        if not done and d.state != SPAN:
            size = n + d.skew
            size = rounded(size, self.rounding) if self.rounding else size
            pages = self.block_pages(size) - d.pages
            behind = self.free_behind(id)
            if pages >= <size_t>1 << 30:
                pass
            elif behind and self.descriptors[behind].pages >= pages and self.spare >= SPARE:
                self.add_up(f, d.size_class, False)
                discount_block(f, d)         # the figures are those of a free and an allocation
                self.taken[d.size_class] -= d.pages
                self.extend(id, <uint32_t>pages)
                d.size = <size_t>d.pages << PAGE_BITS
                d.step = <uint16_t>step_of(d.size)
                d.size_class = <uint8_t>class_of(d.size)
                d.state = BLOCK if N_SMALL <= d.step < N_EXACT else ODD
                self.taken[d.size_class] += d.pages
                if self.n_caches > 1:
                    self.add_up(f, d.size_class, True)
                count_block(f, d)
                if miss:
                    self.count_asked(d.size_class, True, NULL)
                f.tick += 1
                d.tick = tick_now(self, f)
                done = True
            else:
                missing[0] = <uint32_t>pages
        arenapy_spin_release(&self.heap_lock)
        biased_release(&f.lock)
        return done

    cdef char* uncached_alloc(self, size_t n, uint64_t* block_id) noexcept nogil:
        cdef ThreadCache* f = self.own_cache()
        cdef size_t size = rounded(n, self.rounding) if self.rounding else n
        cdef int s = step_of(size)
        cdef char* ptr
        if s < N_SMALL or not have_spare(self):
            return NULL
        biased_acquire(&f.lock)
        arenapy_spin_acquire(&self.heap_lock)
        ptr = self.from_heap(f, s, n, self.block_pages(size), 1, False, NULL, block_id)
        arenapy_spin_release(&self.heap_lock)
        biased_release(&f.lock)
        if ptr != NULL:
            permit(self, <uintptr_t>ptr, n)
        return ptr

    cdef bint uncached_free_at(self, char* ptr) noexcept nogil:
        cdef ThreadCache* f = self.own_cache()
        cdef Descriptor* d
        cdef uint64_t block_id
        cdef bint was_live
        biased_acquire(&f.lock)
        block_id = tag_at(self, ptr, &d)
        if block_id == 0:
            was_live = False
        elif d.state == SPAN:
            was_live = push(self, f, d, ptr, block_id)
        else:
            was_live = self.free_to_heap(f, d, ptr, block_id)
        biased_release(&f.lock)
        return was_live

    cdef Py_ssize_t take_batch(
        self, const size_t* sizes, Py_ssize_t n, bint miss, Entry* out, Asked* asked
    ) noexcept nogil:
        cdef ThreadCache* f = self.own_cache()
        cdef Py_ssize_t i = 0
        cdef size_t size
        cdef int s
        biased_acquire(&f.lock)
        arenapy_spin_acquire(&self.heap_lock)
        while i < n and sizes[i] <= MAX_BYTES and self.spare >= STOCK:
            size = rounded(sizes[i], self.rounding) if self.rounding else sizes[i]
            s = step_of(size)
            out[i].ptr = pop(self, f, s, sizes[i], False, &out[i].block_id)
            if out[i].ptr == NULL:
                out[i].ptr = self.from_heap(
                    f, s, sizes[i], self.block_pages(size), 1, miss and i == 0, asked,
                    &out[i].block_id)
            if out[i].ptr == NULL:
                break
            if miss and i == 0:
                self.count_asked(self.class_at[s], True, asked)
            permit(self, <uintptr_t>out[i].ptr, sizes[i])
            i += 1
        arenapy_spin_release(&self.heap_lock)
        biased_release(&f.lock)
        return i

    cdef void heap_alloc_undo(
        self, Py_ssize_t n, const Entry* blocks, const Asked* asked, const int64_t* peaks
    ) noexcept nogil:
        cdef ThreadCache* f = self.own_cache()
        cdef Count* count
        cdef Py_ssize_t i
        cdef size_t size
        cdef Descriptor* d
        cdef int k
        biased_acquire(&f.lock)
        for i in range(n - 1, -1, -1):
            d = &self.descriptors[id_of(blocks[i].block_id)]
            size = d.size
            self.note_free(f, d)
            if d.state == SPAN:
                push(self, f, d, blocks[i].ptr, blocks[i].block_id)
                f.small[d.step].allocations -= 1         # and so one free less
                continue
            count = &f.counts[d.size_class]
            push(self, f, d, blocks[i].ptr, blocks[i].block_id)
            count.allocations -= 1
            count.frees -= 1
            f.freed -= size
        arenapy_spin_acquire(&self.heap_lock)
        self.add_up_own(f)
        for k in range(N_CLASSES + 1):
            self.totals[k].peak = max(peaks[k], self.totals[k].live)
        for k in range(N_CLASSES):
            self.asked.misses[k] -= asked.misses[k]
            self.asked.splits[k] -= asked.splits[k]
        arenapy_spin_release(&self.heap_lock)
        biased_release(&f.lock)

    cdef char* from_heap(
        self, ThreadCache* f, int s, size_t n, size_t pages, size_t align, bint miss, Asked* asked,
        uint64_t* block_id
    ) noexcept nogil:
        """A slot or an extent for n bytes from the heap; both locks held."""
        cdef bint split = False
        cdef uint32_t id
        cdef Descriptor* d
        if s < N_SMALL:
            return pop(self, f, s, 0, False, block_id) if self.refill(f, s, miss, asked) else NULL
        id = self.alloc_extent(pages, align, &split)
        if id == 0:
            return NULL
        d = &self.descriptors[id]
        if split and not miss:
            self.count_asked(d.size_class, False, asked)
        self.taken[d.size_class] += pages
        f.tick += 1
        d.tick = tick_now(self, f)
        d.live = 1
        block_id[0] = block_name(id)
        if self.n_caches > 1:
            self.add_up(f, d.size_class, True)
        count_block(f, d)
        if d.state != BLOCK or align > 64 or self.rounding == ROUND_LINES:
            return <char*>d.address
        return skewed(d, block_id[0], d.size - n)

    cdef void count_asked(self, int k, bint miss, Asked* asked) noexcept nogil:
        """A miss or a split in a class; heap_lock held."""
        self.asked.misses[k] += miss
        self.asked.splits[k] += not miss
        if asked != NULL:
            asked.misses[k] += miss
            asked.splits[k] += not miss

    cdef bint refill(self, ThreadCache* f, int s, bint miss, Asked* asked) noexcept nogil:
        """Move slots from a span to the empty magazine of a step. Both locks held."""
        cdef SmallStep* step = &self.steps[s]
        cdef Magazine* m = &f.small[s]
        cdef uint32_t id = self.partial[s]
        cdef uint32_t batch = min(step.depth, step.slots)  # so that few spans serve two threads
        cdef uint32_t page, i
        cdef uint64_t free_slots
        cdef Descriptor* d
        cdef bint split = False
        cdef char* base
        cdef int slot
        arenapy_assert(m.n == 0, b"a magazine that is refilled is empty")
        if id == 0:
            id = self.alloc_extent(step.pages, 1, &split)
            if id == 0:
                return False
            d = &self.descriptors[id]
            d.state = SPAN
            d.step = <uint16_t>s
            d.size = step.size
            d.inverse = <uint32_t>(((<uint64_t>1 << 32) + step.size - 1) // step.size)
            d.size_class = self.class_at[s]
            d.detail.slots = all_slots(step.slots)
            d.next = d.prev = 0
            for page in range(d.page, d.page + d.pages):
                self.segments[d.segment].map[scatter(page)] = id
            self.partial[s] = id
            if split and not miss:
                self.count_asked(d.size_class, False, asked)
            self.taken[d.size_class] += d.pages
        d = &self.descriptors[id]
        d.tick = tick_now(self, f)
        if self.n_caches > 1:
            self.add_up(f, d.size_class, False)
        base = <char*>d.address
        free_slots = d.detail.slots
        while m.n < batch and free_slots:
            slot = low_bit(free_slots)
            free_slots &= free_slots - 1
            m.items[m.n] = Entry(base + slot * step.size, slot_name(id, slot))
            m.n += 1
        m.arrived += m.n
        d.detail.slots = free_slots
        if free_slots == 0:
            self.partial[s] = d.next
            if d.next:
                self.descriptors[d.next].prev = 0
        for i in range(m.n // 2):            # the lowest address is handed out first
            m.items[i], m.items[m.n - 1 - i] = m.items[m.n - 1 - i], m.items[i]
        arenapy_assert(magazine_is_valid(m), b"the magazine is valid")
        arenapy_assert(
            m.n == 0 or block_is_valid(self, m.items[0].ptr, m.items[0].block_id),
            b"the block is valid")
        return True

    # -- and back

    cdef void note_free(self, ThreadCache* f, Descriptor* d) noexcept nogil:
        if self.timed < 0:
            return
        self.note_time(f)
        if d.state == SPAN:
            magazine_of(f, d.step).tick = f.tick

    cdef void note_time(self, ThreadCache* f) noexcept nogil:
        cdef double now = coarse_seconds()
        cdef Sample* last
        cdef bint due
        arenapy_spin_acquire(&self.heap_lock)
        due = now - self.begun >= self.timed / 8 and now != self.begun
        if due:
            self.latest += 2
            self.begun = now
        if due or self.n_samples == 0:
            if self.n_samples == SAMPLES:    # the oldest is long stale
                memmove(self.samples, &self.samples[1], (SAMPLES - 1) * sizeof(Sample))
                self.n_samples -= 1
            self.samples[self.n_samples] = Sample(self.latest + 1, now)
            self.n_samples += 1
        last = &self.samples[self.n_samples - 1]
        last.seconds = max(last.seconds, now)    # another thread may have looked later
        f.tick = self.latest
        arenapy_spin_release(&self.heap_lock)

    cdef bint stale_tick(self, double seconds, uint32_t* tick) noexcept nogil:
        cdef double now = coarse_seconds()
        cdef int i = 0
        arenapy_spin_acquire(&self.heap_lock)
        while i < self.n_samples and self.samples[i].seconds <= now - seconds:
            i += 1
        if i:
            tick[0] = self.samples[i - 1].tick
            self.n_samples -= i
            memmove(self.samples, &self.samples[i], self.n_samples * sizeof(Sample))
        arenapy_spin_release(&self.heap_lock)
        return i > 0

    cdef bint full_free(self, ThreadCache* f, char* ptr, uint64_t block_id) noexcept nogil:
        """Free a block when its place in the thread cache is full, or it has none."""
        cdef Descriptor* d = named(self, block_id)
        cdef int s = d.step
        if d.state == SPAN:
            if not d.slots[slot_number(block_id)]:
                return False
            if self.depots == NULL or not self.to_depot(f, s):
                arenapy_spin_acquire(&self.heap_lock)
                if self.n_caches > 1:
                    self.add_up(f, d.size_class, False)
                self.flush_small(f, s, self.steps[s].depth // 2, f.tick)
                arenapy_spin_release(&self.heap_lock)
            return push(self, f, d, ptr, block_id)
        return self.free_to_heap(f, d, ptr, block_id)

    cdef bint free_to_heap(
        self, ThreadCache* f, Descriptor* d, char* ptr, uint64_t block_id
    ) noexcept nogil:
        """The same of a block above 32 KiB."""
        if not d.live:
            return False
        d.live = 0
        discount_block(f, d)
        f.tick += 1
        d.tick = f.tick
        forbid_block(self, d, ptr)
        arenapy_spin_acquire(&self.heap_lock)
        if f.n_large == LARGE_MOST:
            self.flush_large(f, NULL)
        elif self.n_caches > 1:
            self.add_up(f, d.size_class, False)
        self.heap_free(id_of(block_id))
        arenapy_spin_release(&self.heap_lock)
        return True

    cdef void heap_free(self, uint32_t id) noexcept nogil:
        cdef Descriptor* d = &self.descriptors[id]
        arenapy_assert(not has_live(d), b"an extent that becomes free has no live block")
        arenapy_assert(
            self.taken[d.size_class] >= d.pages, b"pages of blocks and spans were counted")
        self.taken[d.size_class] -= d.pages
        self.free_extent(id, d.tick)

    cdef void return_slots(self, const Entry* items, uint32_t n, uint32_t tick) noexcept nogil:
        """Give slots of one step back to their spans, and spans that are empty then to the heap."""
        cdef uint32_t i, id
        cdef uint64_t every
        cdef Descriptor* d
        for i in range(n):
            id = id_of(items[i].block_id)
            d = &self.descriptors[id]
            every = all_slots(self.steps[d.step].slots)
            if d.detail.slots == 0:          # it has slots again
                d.prev = 0
                d.next = self.partial[d.step]
                if d.next:
                    self.descriptors[d.next].prev = id
                self.partial[d.step] = id
            arenapy_assert(
                not d.detail.slots >> slot_number(items[i].block_id) & 1
                and not d.slots[slot_number(items[i].block_id)],
                b"a slot that goes back to its span is neither there nor live")
            d.detail.slots |= <uint64_t>1 << slot_number(items[i].block_id)
            d.tick = later(d.tick, tick)
            if d.detail.slots == every:
                if d.next:
                    self.descriptors[d.next].prev = d.prev
                if d.prev:
                    self.descriptors[d.prev].next = d.next
                else:
                    self.partial[d.step] = d.next
                self.heap_free(id)

    cdef void flush_small(self, ThreadCache* f, int s, uint32_t keep, uint32_t tick) noexcept nogil:
        """Return the slots of a magazine to their spans, but for those freed last."""
        cdef Magazine* m = &f.small[s]
        cdef uint32_t n = m.n - keep
        if m.n <= keep:
            return
        self.return_slots(&m.items[0], n, tick)
        memmove(&m.items[0], &m.items[n], keep * sizeof(Entry))
        m.n = keep
        m.arrived -= n

    # -- depots: from thread to thread. A cache's lock is held.

    cdef bint from_depot(self, ThreadCache* f, int s) noexcept nogil:
        """Fill half of a magazine, which is empty. False: the depot is, too."""
        cdef Depot* depot = &self.depots[s]
        cdef Magazine* m = &f.small[s]
        if depot.n == 0:                     # a glance
            return False
        arenapy_spin_acquire(&depot.lock)
        m.n = min(depot.n, max(self.steps[s].depth // 2, <uint32_t>1))
        m.tick = later(m.tick, depot.tick)
        depot.n -= m.n
        memcpy(&m.items[0], &depot.items[depot.n], m.n * sizeof(Entry))
        arenapy_spin_release(&depot.lock)
        m.arrived += m.n
        self.add_up_here(f, s)
        arenapy_assert(magazine_is_valid(m), b"the magazine is valid")
        return m.n != 0

    cdef bint to_depot(self, ThreadCache* f, int s) noexcept nogil:
        """Move the older half of a full magazine. False: there is no room for it."""
        cdef Depot* depot = &self.depots[s]
        cdef Magazine* m = &f.small[s]
        cdef uint32_t n = m.n - self.steps[s].depth // 2
        cdef bint room
        arenapy_spin_acquire(&depot.lock)
        room = depot.n + n <= min(<uint32_t>DEPOT_MOST, 4 * self.steps[s].depth)
        if room:
            memcpy(&depot.items[depot.n], &m.items[0], n * sizeof(Entry))
            depot.tick = later(depot.tick, f.tick) if depot.n else f.tick
            depot.n += n
        arenapy_spin_release(&depot.lock)
        if room:
            m.n -= n
            m.arrived -= n
            memmove(&m.items[0], &m.items[n], m.n * sizeof(Entry))
            self.add_up_here(f, s)
        return room

    cdef void add_up_here(self, ThreadCache* f, int s) noexcept nogil:
        """So that what a cache has not added up is never more than what it can hold."""
        arenapy_spin_acquire(&self.heap_lock)
        self.add_up(f, self.class_at[s], False)
        arenapy_spin_release(&self.heap_lock)

    # -- figures of caches

    cdef void add_up(self, ThreadCache* f, int k, bint others) noexcept nogil:
        """Add the figures of a class to the totals. Both locks are held. `others`: the peak is that
        with what other caches have handed out and not added up, of which this is a glance."""
        cdef int64_t here = 0, all = 0
        cdef ThreadCache* g
        cdef int i
        if others:
            for i in range(1, self.top_slot + 1):
                g = self.caches[i]
                if g != NULL and g != f:
                    here += live_at(&g.counts[k].level)
                    all += live_at(&g.level)
        add_to_total(&self.totals[k], &f.counts[k].level, here)
        add_to_total(&self.totals[N_CLASSES], &f.level, all)

    cdef void add_up_own(self, ThreadCache* f) noexcept nogil:
        """All figures of a cache; both locks are held."""
        cdef int k
        for k in range(N_CLASSES):
            self.add_up(f, k, False)

    cdef void add_up_all(self) noexcept nogil:
        """All figures of all caches; all locks are held."""
        cdef int64_t live, above
        cdef Level* level
        cdef ThreadCache* f
        cdef int i, k
        for k in range(N_CLASSES + 1):
            live = above = 0
            for i in range(1, self.top_slot + 1):
                f = self.caches[i]
                if f == NULL:
                    continue
                level = &f.level if k == N_CLASSES else &f.counts[k].level
                live += live_at(level)
                above = max(above, level.slack)
                level.slack = level.peak = 0
            self.totals[k].live += live
            self.totals[k].peak = max(self.totals[k].peak, self.totals[k].live + above)

    cdef void flush_large(self, ThreadCache* f, const uint32_t* until) noexcept nogil:
        """Give cached blocks to the heap, in the order in which they were freed: all, or those that
        were freed until that tick."""
        cdef uint32_t[LARGE_MOST] ids
        cdef uint32_t n = 0, kept = 0, gap, i, j, id
        cdef uint32_t* link
        cdef Descriptor* d
        cdef int s
        # Now and then, or the peak would rise by all that the cache of a thread has ever freed.
        if self.n_caches > 1:
            self.add_up_own(f)
        for s in range(N_EXACT - N_SMALL):
            if f.n_large == n + kept:
                break
            link = &f.large[s]
            while link[0]:
                d = &self.descriptors[link[0]]
                if until != NULL and earlier(until[0], d.tick):
                    kept += 1
                    link = &d.next
                else:
                    ids[n] = link[0]
                    n += 1
                    link[0] = d.next
        f.n_large = kept
        gap = n // 2                         # Shell's sort: oldest first
        while gap:
            for i in range(gap, n):
                id = ids[i]
                j = i
                while j >= gap and earlier(
                        self.descriptors[id].tick, self.descriptors[ids[j - gap]].tick):
                    ids[j] = ids[j - gap]
                    j -= gap
                ids[j] = id
            gap //= 2
        for i in range(n):
            self.heap_free(ids[i])

    cdef bint others_keep_much(self) noexcept nogil:
        """Whether growth would be a waste, since caches have so much that is free."""
        cdef int64_t taken = 0, live = 0
        cdef ThreadCache* f
        cdef int i
        if self.n_caches == 1 or self.tight or self.merges_first:
            return True
        arenapy_spin_acquire(&self.heap_lock)
        for i in range(N_CLASSES):
            taken += <int64_t>self.taken[i] << PAGE_BITS
        live = self.totals[N_CLASSES].live
        for i in range(1, self.top_slot + 1):
            f = self.caches[i]
            live += live_at(&f.level) if f != NULL else 0    # a glance: its thread counts on
        arenapy_spin_release(&self.heap_lock)
        return taken - live > live // KEPT_SHARE + self.n_caches * <int64_t>KEPT_EACH

    cdef void flush_all(self, bint others, const uint32_t* until) noexcept nogil:
        """Everything that is free goes to the heap and is merged there.

        With `until`, what was freed after that tick stays, and so do all slots of a magazine or a
        depot if one of them was: merged memory is as old as the part of it that was used last.

        If not `others`, what the caches of other threads have stays theirs: they are at work, would
        miss it at once, and their locks would be taken from them.
        """
        cdef ThreadCache* own = self.own_cache()
        cdef ThreadCache* f
        cdef Depot* depot
        cdef int i, s
        for i in range(1, self.top_slot + 1):
            f = <ThreadCache*>arenapy_load_ptr(<void**>&self.caches[i])
            if f == NULL or is_empty(f) or not (others or f == own):
                continue
            biased_acquire(&f.lock)
            arenapy_spin_acquire(&self.heap_lock)
            for s in range(N_SMALL):
                if until == NULL:
                    self.flush_small(f, s, 0, tick_now(self, f))
                elif not earlier(until[0], f.small[s].tick):
                    self.flush_small(f, s, 0, f.small[s].tick)
            self.flush_large(f, until)
            arenapy_spin_release(&self.heap_lock)
            biased_release(&f.lock)
        for s in range(N_SMALL if self.depots != NULL else 0):
            depot = &self.depots[s]
            if depot.n == 0:                 # a glance
                continue
            arenapy_spin_acquire(&depot.lock)
            if until == NULL or not earlier(until[0], depot.tick):
                arenapy_spin_acquire(&self.heap_lock)
                self.return_slots(&depot.items[0], depot.n, depot.tick)
                depot.n = 0
                arenapy_spin_release(&self.heap_lock)
            arenapy_spin_release(&depot.lock)

    cdef size_t pages_for(self, size_t n, size_t align) noexcept nogil:
        """Pages in one piece that are sure to have a block, wherever they lie."""
        cdef size_t size = rounded(n, self.rounding) if self.rounding else n
        cdef int s = step_of(size)
        if s < N_SMALL and align <= PAGE:
            while align > 64 and step_bytes(s) & (align - 1):
                s += 1
            return self.steps[s].pages
        return self.block_pages(size) + (max(align, <size_t>PAGE) >> PAGE_BITS) - 1

    cdef size_t block_pages(self, size_t size) noexcept nogil:
        """Of a block that is no slot. A device's is not rounded further, as memory is scarce."""
        if self.rounding == ROUND_LINES:
            return (size + PAGE - 1) >> PAGE_BITS
        return (round_bytes(size) + PAGE - 1) >> PAGE_BITS

    cdef bint fitting_first(self, uint32_t* head, size_t n) noexcept nogil:
        """Let one come first that has n bytes, and hardly more; lock held. False: none found."""
        cdef uint32_t* link = head
        cdef uint32_t id = head[0]
        cdef Descriptor* d
        cdef int looks = 0
        n = (n + PAGE - 1) & ~<size_t>(PAGE - 1)
        while id and looks < FIT_LOOKS:
            d = &self.descriptors[id]
            if n <= d.size and d.size - n <= d.size >> FIT:
                link[0] = d.next
                d.next = head[0] if link != head else d.next
                head[0] = id
                return True
            link = &d.next
            id = d.next
            looks += 1
        return False

    # -- all locks

    cdef void lock_all(self) noexcept nogil:
        cdef int i
        arenapy_spin_acquire(&self.births)   # there is none more until unlock_all
        for i in range(1, self.top_slot + 1):
            if self.caches[i] != NULL:
                biased_acquire(&self.caches[i].lock)
        for i in range(N_SMALL if self.depots != NULL else 0):
            arenapy_spin_acquire(&self.depots[i].lock)
        arenapy_spin_acquire(&self.heap_lock)

    cdef void unlock_all(self) noexcept nogil:
        cdef int i
        arenapy_spin_release(&self.heap_lock)
        for i in range(N_SMALL if self.depots != NULL else 0):
            arenapy_spin_release(&self.depots[i].lock)
        for i in range(1, self.top_slot + 1):
            if self.caches[i] != NULL:
                biased_release(&self.caches[i].lock)
        arenapy_spin_release(&self.births)


seal(ThreadCaches)


cdef inline uint64_t all_slots(uint32_t n) noexcept nogil:
    return ~<uint64_t>0 >> (64 - n)


cdef uint32_t slots_of(size_t size) noexcept nogil:
    """As few as fill whole pages, but at least SLOTS_LEAST, and SLOTS_MOST of up to 512 bytes."""
    cdef uint32_t slots = SLOTS_MOST
    while (slots > SLOTS_LEAST and size > 512 and (slots // 2 * size) % PAGE == 0
           and slots * size > SMALL_MOST):
        slots //= 2
    return slots
