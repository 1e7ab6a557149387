"""Pool's side of the Buffer protocol: a block whose Buffer is dropped, exported, leased or forked.

What lives here: dropped Buffers, bytes that other processes see, fork, figures. What does not:
where blocks come from (thread_cache, page_heap), getting memory (memory), errors (pool).
"""
cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from arenapy.base.assertion cimport arenapy_assert
from arenapy.base.atomic cimport (
    arenapy_count, arenapy_load, arenapy_lock_acquire, arenapy_lock_release, arenapy_spin_acquire,
    arenapy_spin_release, rank_spin,
)
from arenapy.buffer.block cimport GONE_CLOSED, HELD, Block, Hold, MemoryOwner
from arenapy.pool.hot_path cimport block_is_live, cache_free, live_byte, named, push, tag_at
from arenapy.pool.thread_cache cimport Asked, ThreadCache, ThreadCaches, Total, live_slots
from arenapy.base.biased_lock cimport biased_acquire, biased_alone, biased_release
from arenapy.pool.page_heap cimport (
    MAX_SEGMENTS, PAGE, PAGE_BITS, SLOTS_AT, SPAN, Descriptor, Pages, Segment, earlier, has_live,
    is_idle, scatter, trimmable_of,
)
from arenapy.memory.region cimport Region
from arenapy.diagnostics.recorder cimport EVENT_ALLOC, EVENT_FREE
from arenapy.allocator.allocator_core cimport (
    LEASES_ASKED, AllocatorCore, add_leased, link_hold, record, take_leased, unlink_hold,
)
from arenapy.base.sealed cimport seal
from arenapy.base.thread_slot cimport RANK_STREAMS, this_thread
from arenapy.base.sizes cimport MAX_BYTES, N_CLASSES, N_EXACT, N_SMALL, N_STEPS, class_of
from arenapy.memory.children cimport Seen, children_ask, seen_add


cdef extern from *:
    """
    #include <string.h>
    """
    void* memrchr(const void* bytes, int byte, size_t n) noexcept nogil

cdef enum:
    LARGEST_LOOKS = 256      # free extents of one bin that are looked at for the largest


@cython.final
@cython.no_gc_clear
cdef class PoolCore(ThreadCaches):
    """The memory and bookkeeping of a Pool. Internal; Buffers keep it alive."""

    def __cinit__(self):
        self.what = "pool"
        self.recycles = True
        self.timed = -1
        rank_spin(&self.lent_lock, RANK_STREAMS)
        self.shut = True                     # until `ready`
        self.set_fast_path_off(True)

    def __dealloc__(self):
        self.finish()
        while self.leased.n:
            free(take_leased(&self.leased))

    cdef void ready(self) noexcept nogil:
        """Allocate from now on."""
        arenapy_lock_acquire(&self.lock)
        self.shut = self.gone != 0           # its first region was closed since, perhaps
        arenapy_lock_release(&self.lock)
        self.update_fast_path()

    cdef void update_fast_path(self) noexcept nogil:
        """After what it depends on has changed."""
        arenapy_spin_acquire(&self.births)   # no other thread, and no fork, changes it meanwhile
        self.set_fast_path_off(is_fast_path_off(self))
        arenapy_spin_release(&self.births)

    cdef char* alloc_block(
        self, size_t n, size_t align, bint miss, uint64_t* block_id
    ) noexcept nogil:
        cdef char* ptr
        if self.shut or n > MAX_BYTES:
            return NULL
        ptr = self.heap_alloc(n, align, miss, block_id)
        if ptr == NULL and self.leased.n and self.reclaim_leases(LEASES_ASKED):
            ptr = self.heap_alloc(n, align, miss, block_id)
        if ptr != NULL:
            self.handed_out(ptr, n, block_id[0])
        return ptr

    cdef void handed_out(self, char* ptr, size_t n, uint64_t block_id) noexcept nogil:
        """Take note of a block of n bytes."""
        record(self, EVENT_ALLOC, ptr, n)
        if self.debug:
            self.began(ptr, self.size_of(block_id), n)

    cdef bint free_block(self, char* ptr, uint64_t block_id) noexcept nogil:
        """Free a block, whatever that takes. False: it is not live."""
        cdef Hold* hold
        if self.shut:
            return False                     # the memory is not ours any more
        if not (self.debug or self.may_lease or self.timed >= 0):
            # The event comes before the next one of these bytes. (A block that two threads free at
            # once may be recorded twice; one of them is told.)
            if not block_is_live(self, block_id):
                return False
            record(self, EVENT_FREE, ptr, 0)
            return cache_free(self, ptr, block_id)
        if not self.claim(block_id):
            return False
        record(self, EVENT_FREE, ptr, 0)
        if self.debug:
            self.leaving(ptr)
        if self.may_lease:
            children_ask()
        if self.may_lease and leased(self, ptr, block_id):
            hold = <Hold*>malloc(sizeof(Hold))
            if hold != NULL:                 # without this record it is never free again
                hold.start, hold.tag = <uintptr_t>ptr, block_id
                arenapy_spin_acquire(&self.heap_lock)
                add_leased(&self.leased, hold)
                arenapy_spin_release(&self.heap_lock)
            if self.timed >= 0:
                self.go_on_looking()
        else:
            self.free_claimed(ptr, block_id)
        return True

    cdef bint claim(self, uint64_t block_id) noexcept nogil:
        """Make a live block pending: from now on it is this call's alone. False: it is not live."""
        cdef ThreadCache* f = self.own_cache()
        cdef Descriptor* d = named(self, block_id)
        cdef bint was_live
        biased_acquire(&f.lock)
        arenapy_spin_acquire(&self.heap_lock)
        was_live = block_is_live(self, block_id)
        if was_live:
            live_byte(self, block_id)[0] = 0
            self.pending_bytes[d.size_class] += d.size
            self.pending_blocks[d.size_class] += 1
        arenapy_spin_release(&self.heap_lock)
        biased_release(&f.lock)
        return was_live

    cdef void free_claimed(self, char* ptr, uint64_t block_id) noexcept nogil:
        """A pending block is free."""
        cdef ThreadCache* f = self.own_cache()
        cdef Descriptor* d = named(self, block_id)
        self.poison(<uintptr_t>ptr, <uintptr_t>ptr + self.size_of(block_id))
        biased_acquire(&f.lock)
        self.note_free(f, d)
        arenapy_spin_acquire(&self.heap_lock)
        arenapy_assert(
            self.pending_bytes[d.size_class] >= d.size, b"a block was pending before it is free")
        self.pending_bytes[d.size_class] -= d.size
        self.pending_blocks[d.size_class] -= 1
        arenapy_spin_release(&self.heap_lock)
        live_byte(self, block_id)[0] = 1    # as `push` expects it
        push(self, f, d, ptr, block_id)
        biased_release(&f.lock)

    cdef size_t reclaim_leases(self, Py_ssize_t most) noexcept nogil:
        cdef Py_ssize_t left = self.leased.n     # a glance: nobody asks about one twice
        cdef Py_ssize_t seen = 0
        cdef size_t freed = 0
        cdef Hold* hold
        children_ask()
        while left > 0 and seen < most:
            arenapy_spin_acquire(&self.heap_lock)
            hold = take_leased(&self.leased)
            arenapy_spin_release(&self.heap_lock)
            if hold == NULL:
                break
            if not self.shut and leased(self, <char*>hold.start, hold.tag):
                arenapy_spin_acquire(&self.heap_lock)
                add_leased(&self.leased, hold)
                arenapy_spin_release(&self.heap_lock)
                seen += 1
            else:
                freed += self.size_of(hold.tag)
                self.free_claimed(<char*>hold.start, hold.tag)
                free(hold)
                seen = 0
            left -= 1
        return freed

    cdef bint defer_free(self, Hold* hold) noexcept nogil:
        if not self.set_aside(hold):
            return False
        record(self, EVENT_FREE, <void*>hold.start, 0)
        if self.debug:
            self.leaving(<void*>hold.start)
        return True

    cdef bint set_aside(self, Hold* hold) noexcept nogil:
        if self.shut or not self.claim(hold.tag):
            return False
        arenapy_count(&self.n_held, 1)
        arenapy_spin_acquire(&self.heap_lock)
        link_hold(&self.aside, hold)
        arenapy_spin_release(&self.heap_lock)
        return True

    cdef void finish_free(self, Hold* hold) noexcept nogil:
        arenapy_spin_acquire(&self.heap_lock)
        unlink_hold(&self.aside, hold)
        arenapy_spin_release(&self.heap_lock)
        arenapy_count(&self.n_held, -1)
        if not self.shut:
            self.free_claimed(<char*>hold.start, hold.tag)
        free(hold)

    # -- as the owner of Buffers

    cdef void drop_block(self, PyObject* root) noexcept:
        cdef uint64_t block_id = (<Block>root).tag
        if (<Block>root).word & HELD:
            arenapy_assert(arenapy_load(&self.n_held) > 0, b"a hold that ends was counted")
            arenapy_count(&self.n_held, -1)
        if block_id == 0:
            return                           # released before
        if self.fast_path_off:
            self.free_block((<Block>root).ptr, block_id)
            if self.debug:
                self.verify_dropped()
        else:
            cache_free(self, (<Block>root).ptr, block_id)

    cdef void release_block(self, Block root) noexcept nogil:
        cdef uint64_t block_id = root.tag
        root.tag = 0
        if block_id and root.hold == NULL:   # else `defer_free` comes next
            self.free_block(root.ptr, block_id)

    cdef bint has_holds(self) noexcept nogil:
        return (arenapy_load(&self.n_held) != 0 or arenapy_load(&self.in_transit) != 0
                or self.in_arrays and self.figures().all.active != 0)

    # -- facts about a block

    cdef bint free_block_at(self, char* ptr) noexcept nogil:
        cdef uint64_t block_id = self.find(ptr)
        return block_id != 0 and self.free_block(ptr, block_id)

    cdef size_t size_at(self, char* ptr) noexcept nogil:
        cdef uint64_t block_id = self.find(ptr)
        if block_id and block_is_live(self, block_id):
            return self.size_of(block_id)
        return 0

    cdef uint64_t find(self, char* ptr) noexcept nogil:
        """tag_at under the lock that it needs. A live block of the caller's stays where it is."""
        cdef ThreadCache* f = self.own_cache()
        cdef Descriptor* d
        cdef uint64_t block_id
        biased_acquire(&f.lock)
        block_id = tag_at(self, ptr, &d)
        biased_release(&f.lock)
        return block_id

    cdef size_t size_of(self, uint64_t block_id) noexcept nogil:
        cdef Descriptor* d = named(self, block_id)
        return d.size - d.skew

    # -- figures

    cdef PoolFigures figures(self) noexcept nogil:
        """All figures of one moment."""
        cdef PoolFigures r
        cdef ClassFigures* c
        cdef ThreadCache* f
        cdef int i, k, s, caches = 0
        memset(&r, 0, sizeof(r))
        self.lock_all()
        self.add_up_all()
        r.all.peak = <size_t>self.totals[N_CLASSES].peak
        r.bytes = <uint64_t>self.totals[N_CLASSES].live
        for i in range(1, self.top_slot + 1):
            f = self.caches[i]
            if f == NULL:
                continue
            caches += 1
            r.bytes += f.freed
            for k in range(N_CLASSES):
                c = &r.classes[k]
                c.allocations += f.counts[k].allocations
                c.active += f.counts[k].allocations - f.counts[k].frees
            for s in range(N_SMALL):
                c = &r.classes[self.class_at[s]]
                c.allocations += f.small[s].allocations
                c.active += live_slots(&f.small[s])
                r.bytes += (f.small[s].allocations - live_slots(&f.small[s])) * f.small[s].size
        for k in range(N_CLASSES):
            c = &r.classes[k]
            c.live = <size_t>self.totals[k].live
            c.peak = <size_t>self.totals[k].peak
            c.misses = self.asked.misses[k]
            c.splits = self.asked.splits[k]
            c.hits = c.allocations - c.misses
            c.idle = ((self.free_pages[k] + self.taken[k]) << PAGE_BITS) - c.live
            c.pending = self.pending_bytes[k]
            c.live -= c.pending
            c.active -= self.pending_blocks[k]
            c.largest = self.largest_of(k)
            r.all.allocations += c.allocations
            r.all.hits += c.hits
            r.all.misses += c.misses
            r.all.splits += c.splits
            r.all.active += c.active
            r.all.live += c.live
            r.all.pending += c.pending
            r.all.idle += c.idle
            r.all.largest = max(r.all.largest, c.largest)
        r.reserved = self.reserved_pages << PAGE_BITS
        r.regions = self.n_segments
        r.metadata = (self.descriptor_array.ready + caches * whole_pages(sizeof(ThreadCache))
                      + self.depot_array.ready
                      + MAX_SEGMENTS * (sizeof(Segment) + sizeof(uint16_t)))
        for i in range(self.n_segments):
            r.metadata += self.segments[self.order[i]].array.ready
        self.add_lent(&r)
        self.unlock_all()
        return r

    cdef void add_lent(self, PoolFigures* r) noexcept nogil:
        """Correct `r` for blocks that streams and graphs have: it counts all of them as live."""
        cdef Lent* lent
        cdef Node* node
        cdef Descriptor* d
        cdef ClassFigures* c
        cdef uint32_t at
        cdef int i, k
        lent_enter(self)
        r.bytes += self.lent_bytes_before
        lent = self.lent
        for k in range(N_CLASSES):
            count_lent(r, k, self.lent_before[k], 0, 0, 0, 0)
        while lent != NULL:
            r.bytes += lent.bytes - lent.taken_bytes
            r.metadata += sizeof(Lent) + lent.n_nodes * sizeof(Node)
            for k in range(N_CLASSES):
                if lent.of_graph:
                    count_lent(
                        r, k, lent.allocations[k] - lent.taken[k], 0,
                        lent.idle_blocks[k] + lent.pending_blocks[k], 0,
                        lent.idle_bytes[k] + lent.pending_bytes[k])
                    continue
                count_lent(
                    r, k, lent.allocations[k] - lent.taken[k], lent.idle_blocks[k],
                    lent.pending_blocks[k], lent.idle_bytes[k], lent.pending_bytes[k])
            for i in range(0 if lent.of_graph else BUCKETS):
                at = lent.heads[i]
                while at:
                    node = &lent.nodes[at]
                    d = named(self, node.block_id)
                    c = &r.classes[d.size_class]
                    c.largest = max(c.largest, d.size)
                    r.all.largest = max(r.all.largest, d.size)
                    at = node.next
            lent = lent.next
        lent_leave(self)

    cdef bint lent_away(self) noexcept nogil:
        cdef Lent* lent
        cdef bint found = False
        lent_enter(self)
        lent = self.lent
        while lent != NULL and not found:
            found = lent.away != 0
            lent = lent.next
        lent_leave(self)
        return found

    cdef size_t largest_of(self, int k) noexcept nogil:
        """Bytes of the largest free block of a class, cached ones included; all locks held."""
        cdef size_t most = 0
        cdef ThreadCache* f
        cdef int i, s, looks = 0
        cdef uint32_t id
        for s in range(<int>(<uint8_t*>memrchr(self.class_at, k, N_STEPS) - self.class_at), -1, -1):
            # In the last bin of the class below, some free extents are of this one.
            id = self.free_bins.heads[s]
            while id and looks < LARGEST_LOOKS:
                if class_of(pages_bytes(self, id)) == k:
                    most = max(most, pages_bytes(self, id))
                id = self.descriptors[id].next
                looks += 1
            if self.class_at[s] != k:
                break
            if s < N_SMALL and self.depots != NULL and self.depots[s].n:
                most = max(most, <size_t>self.steps[s].size)
            for i in range(1, self.top_slot + 1):
                f = self.caches[i]
                if f != NULL and s < N_SMALL and f.small[s].n:
                    most = max(most, <size_t>self.steps[s].size)
                elif f != NULL and N_SMALL <= s < N_EXACT and f.large[s - N_SMALL]:
                    most = max(most, pages_bytes(self, f.large[s - N_SMALL]))
            if s < N_SMALL and self.partial[s]:
                most = max(most, <size_t>self.steps[s].size)
            if most:
                break
        return most

    cdef void go_on_looking(self) noexcept nogil:
        cdef ThreadCache* f = self.own_cache()
        biased_acquire(&f.lock)
        self.note_time(f)
        biased_release(&f.lock)

    cdef size_t stale_pages(self, uint32_t tick) noexcept nogil:
        """Free pages that were not used since `tick`; what is older is flushed."""
        cdef size_t pages = 0
        cdef uint32_t id
        cdef Descriptor* d
        cdef Segment* s
        cdef int i
        self.lock_all()
        id = self.oldest
        while id and not earlier(tick, self.descriptors[id].tick):
            pages += trimmable_of(self, &self.descriptors[id])
            id = self.descriptors[id].detail.age.newer
        for i in range(self.n_segments):
            s = &self.segments[self.order[i]]
            d = &self.descriptors[s.map[0]]
            if is_idle(self, s) and not earlier(tick, d.tick):
                pages += d.pages
        self.unlock_all()
        return pages

    cdef size_t exchange_peak(self, int64_t peak) noexcept nogil:
        """The peak of live bytes so far. It is `peak` now, or the live bytes if that is less."""
        cdef Total* all = &self.totals[N_CLASSES]
        cdef int64_t before
        if self.cache == NULL:
            return 0                         # never made
        self.lock_all()
        self.add_up_all()
        before = all.peak
        all.peak = max(peak, all.live)
        self.unlock_all()
        return <size_t>before

    cdef void reset_peaks(self) noexcept nogil:
        cdef int k
        self.lock_all()
        self.add_up_all()
        for k in range(N_CLASSES + 1):
            self.totals[k].peak = self.totals[k].live
        self.unlock_all()

    # -- the end of a region, fork

    cdef void fork_lock(self) noexcept nogil:
        Pages.fork_lock(self)
        arenapy_spin_acquire(&self.array_growth)
        self.lock_all()
        lent_enter(self)

    cdef void fork_unlock(self, bint child) noexcept nogil:
        cdef int i
        cdef Grower** at = &self.growers
        if child and (self.busy_pages or self.in_transit):
            self.in_transit = self.forget_growth()
        while child and at[0] != NULL:
            if at[0].thread == this_thread():
                at = &at[0].next
            else:                            # another thread's, which ended there
                at[0] = at[0].next
        for i in range(1, self.top_slot + 1 if child else 0):
            if self.caches[i] != NULL:
                biased_alone(&self.caches[i].lock)
        lent_leave(self)
        self.unlock_all()
        arenapy_spin_release(&self.array_growth)
        Pages.fork_unlock(self, child)

    cdef void disable(self, int why) noexcept nogil:
        cdef Lent* lent = self.lent          # a forked child: no other thread runs
        AllocatorCore.disable(self, why)
        self.set_fast_path_off(True)
        if why == GONE_CLOSED:               # others may map something there: see tag_at
            self.lock_all()
            self.hot.mapped = 0
            self.unlock_all()
        while lent != NULL:
            (<MemoryOwner>lent.owner).disable(why)
            lent = lent.next

    cdef void expect_leases(self, bint forks) noexcept nogil:
        self.may_lease = True
        if forks:                            # it has all locks
            self.set_fast_path_off(True)
        else:
            self.update_fast_path()

    cdef int lease_live(self, PyObject* region, void* seen) noexcept nogil:
        """A fork: the child sees every block of `region` that is not free."""
        cdef int i
        cdef Segment* s
        cdef Descriptor* d
        cdef uint32_t page = 0
        self.expect_leases(True)
        for i in range(self.n_segments):
            s = &self.segments[self.order[i]]
            if s.region != <void*>region:
                continue
            while page < s.pages:
                d = &self.descriptors[s.map[scatter(page)]]
                if d.state == SPAN:
                    see_slots(d, <Seen*>seen)
                elif has_live(d):
                    seen_add(<Seen*>seen, d.address,
                             d.address + (<uintptr_t>d.pages << PAGE_BITS))
                page += d.pages
        return 0


seal(PoolCore)


cdef void see_slots(Descriptor* d, Seen* seen) noexcept nogil:
    """Add the live slots of a span: a child that sees one does not see the others."""
    cdef int i, first = 0
    cdef bint live, run = False
    for i in range(SLOTS_AT + 1):            # runs, the last of which ends here
        live = i < SLOTS_AT and d.slots[i] != 0
        if live and not run:
            first = i
        elif run and not live:
            seen_add(seen, d.address + first * d.size, d.address + i * d.size)
        run = live


cdef bint is_fast_path_off(PoolCore c) noexcept nogil:
    return (c.shut or c.debug or c.may_lease or c.timed >= 0 or c.files
            or c.recorder != NULL)


cdef bint leased(PoolCore c, char* ptr, uint64_t block_id) noexcept nogil:
    # After `children_ask`.
    cdef uintptr_t start = <uintptr_t>ptr
    cdef uintptr_t at, stop
    return (<Region>c.segments[named(c, block_id).segment].region).leases_by_now(
        start, start + c.size_of(block_id), &at, &stop) != 0


# Add what a stream did in one class, whose blocks were counted as live.
cdef inline void count_lent(
    PoolFigures* r, int k, uint64_t allocations, uint64_t idle_blocks, uint64_t pending_blocks,
    size_t idle, size_t pending
) noexcept nogil:
    cdef ClassFigures* c
    cdef int i
    for i in range(2):
        c = &r.classes[k] if i == 0 else &r.all
        c.allocations += allocations
        c.hits += allocations
        c.active -= idle_blocks + pending_blocks
        c.live -= idle + pending
        c.idle += idle
        c.pending += pending


cdef inline size_t pages_bytes(PoolCore c, uint32_t id) noexcept nogil:
    return <size_t>c.descriptors[id].pages << PAGE_BITS


cdef inline size_t whole_pages(size_t n) noexcept nogil:
    return (n + PAGE - 1) & ~<size_t>(PAGE - 1)


# ---- batches of blocks -------------------------------------------------------------------
# BlockBatch: blocks of many sizes at once, all or none, for Pool.alloc_many and Pool.prewarm.

cdef enum:
    BATCH = 4096             # blocks that are taken under one lock


@cython.final
cdef class BlockBatch:
    """Sizes in bytes, and the blocks that were taken for them. Internal."""

    def __cinit__(self, Py_ssize_t n):
        self.n = n
        self.sizes = <size_t*>malloc(max(n, 1) * sizeof(size_t))
        self.entries = <Entry*>malloc(max(n, 1) * sizeof(Entry))
        if self.sizes == NULL or self.entries == NULL:
            raise MemoryError(f"no memory for a list of {n} blocks")

    cdef void repeat(self, size_t size, Py_ssize_t count) noexcept nogil:
        while count:
            self.sizes[self.filled] = size
            self.filled += 1
            count -= 1

    def __dealloc__(self):
        free(self.sizes)
        free(self.entries)

    cdef void begin(self, PoolCore core) noexcept nogil:
        cdef ThreadCache* f = core.own_cache()
        cdef int k
        memset(&self.asked, 0, sizeof(Asked))
        biased_acquire(&f.lock)
        arenapy_spin_acquire(&core.heap_lock)
        core.add_up_own(f)
        for k in range(N_CLASSES + 1):
            self.peaks[k] = core.totals[k].peak
        arenapy_spin_release(&core.heap_lock)
        biased_release(&f.lock)

    cdef Py_ssize_t take(self, PoolCore core, bint miss) noexcept nogil:
        cdef Py_ssize_t got = core.take_batch(
            self.sizes + self.done, min(self.n - self.done, <Py_ssize_t>BATCH), miss,
            self.entries + self.done, &self.asked)
        self.done += got
        return got

    cdef void note_others(self, PoolCore core) noexcept nogil:
        cdef Descriptor* d
        cdef int k
        while self.counted < self.done:
            d = named(core, self.entries[self.counted].block_id)
            self.taken[d.size_class] += d.size
            self.taken[N_CLASSES] += d.size
            self.counted += 1
        core.lock_all()
        core.add_up_all()
        for k in range(N_CLASSES + 1):       # these blocks were live meanwhile
            self.peaks[k] = max(self.peaks[k], core.totals[k].peak - self.taken[k])
        core.unlock_all()

    cdef void undo(self, PoolCore core) noexcept nogil:
        core.heap_alloc_undo(self.done, self.entries, &self.asked, self.peaks)
        self.done = 0
