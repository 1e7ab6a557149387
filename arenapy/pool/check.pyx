"""The invariants of a pool's bookkeeping, listings of its memory, and its figures for users.

What lives here: reading all of it under all locks, then telling. Nothing is changed. The figures
are counted again from the descriptors, and compared with those that are kept.
"""
cimport cython
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, realloc
from libc.string cimport memset

from arenapy.base.atomic cimport arenapy_spin_acquire, arenapy_spin_release
from arenapy.buffer.block cimport Hold
from arenapy.pool.hot_path cimport block_is_live
from arenapy.pool.thread_cache cimport (
    SLOTS_MOST, Entry, ThreadCache, Total, live_slots, tick_now,
)
from arenapy.pool.page_heap cimport (
    BLOCK, BUSY, FREE, ODD, PAGE_BITS, SPAN, VOID, Bins, Descriptor, Segment, earlier, has_live,
    id_of, scatter, slot_number, trimmable_of,
)
from arenapy.pool.core cimport (
    BUCKETS, ClassFigures, Lent, Node, PoolCore, PoolFigures, lent_bucket, lent_enter, lent_leave,
)
from arenapy.base.sealed cimport seal
from arenapy.base.sizes cimport (
    N_CLASSES, N_EXACT, N_SMALL, N_STEPS, class_of, floor_step,
)

from arenapy.base.sizes import SIZE_CLASSES

cdef enum:
    LIVE = 0
    IDLE = 1
    PENDING = 2

STATES = ("live", "idle", "pending")

cdef struct Found:
    uintptr_t address
    size_t nbytes
    uint32_t age
    uint32_t state

cdef struct List:
    Found* items
    Py_ssize_t n, capacity
    bint full                # no memory for more

# An error and its place; `why` NULL: none.
cdef struct Fault:
    const char* why
    uintptr_t address
    uint64_t was, expected


# ---- the listing -------------------------------------------------------------------------

cdef void add(
    List* found, uintptr_t address, size_t nbytes, uint32_t age, int state
) noexcept nogil:
    cdef Found* items
    if found.n == found.capacity:
        items = <Found*>realloc(found.items, max(2 * found.capacity, 1024) * sizeof(Found))
        if items == NULL:
            found.full = True
            return
        found.items = items
        found.capacity = max(2 * found.capacity, 1024)
    found.items[found.n] = Found(address, nbytes, age, state)
    found.n += 1


cdef inline uint32_t age(uint32_t now, uint32_t tick) noexcept nogil:
    """With `trim_after`, a block that was handed out may have a tick of the future."""
    return 0 if earlier(now, tick) else now - tick


cdef void collect(PoolCore c, List* found) noexcept nogil:
    """All blocks, by address; all locks held."""
    cdef uint32_t page, slot, now = 0
    cdef int i, k, shift = c.timed >= 0  # two ticks are one then
    cdef Segment* s
    cdef Descriptor* d
    for i in range(1, c.top_slot + 1):
        if c.caches[i] != NULL:
            now = max(now, tick_now(c, c.caches[i]) | shift)
    for i in range(c.n_segments):
        s = &c.segments[c.order[i]]
        page = 0
        while page < s.pages and not (s.frontier and page == c.descriptors[s.frontier].page):
            d = &c.descriptors[s.map[scatter(page)]]
            if d.state == SPAN:
                for slot in range(c.steps[d.step].slots):
                    k = LIVE if d.slots[slot] else IDLE
                    add(found, d.address + slot * c.steps[d.step].size, c.steps[d.step].size,
                        age(now, d.tick) >> shift, k)
            elif d.state in (BLOCK, ODD, FREE):
                add(found, d.address, <size_t>d.pages << PAGE_BITS, age(now, d.tick) >> shift,
                    LIVE if d.live else IDLE)
            page += d.pages


def listing(PoolCore c not None):
    """The blocks as they are now."""
    from arenapy.stats import BlockInfo

    cdef List blocks = List(NULL, 0, 0, False)
    cdef List held = List(NULL, 0, 0, False)
    cdef List idle = List(NULL, 0, 0, False)
    cdef Hold* hold
    cdef Lent* lent
    cdef Py_ssize_t i
    with nogil:
        c.lock_all()
        collect(c, &blocks)
        for i in range(2):
            hold = c.aside if i else c.leased.first
            while hold != NULL:
                add(&held, hold.start - c.descriptors[id_of(hold.tag)].skew, 0, 0, PENDING)
                hold = hold.next
        lent_enter(c)
        lent = c.lent
        while lent != NULL:
            hold = lent.aside
            while hold != NULL:
                add(&held, hold.start, 0, 0, PENDING)
                hold = hold.next
            add_idle(lent, &held if lent.of_graph else &idle)
            lent = lent.next
        lent_leave(c)
        c.unlock_all()
    pending = {held.items[i].address for i in range(held.n)}
    unused = {idle.items[i].address for i in range(idle.n)}
    free(held.items)
    free(idle.items)
    if blocks.full or held.full or idle.full:
        free(blocks.items)
        raise MemoryError("no memory for a list of all blocks")
    cdef Listing found = Listing.__new__(Listing)
    found.info = BlockInfo
    found.blocks = blocks
    found.pending, found.idle = pending, unused
    return iter(found)


cdef void add_idle(Lent* lent, List* idle) noexcept nogil:
    cdef uint32_t at
    cdef int i
    for i in range(BUCKETS):
        at = lent.heads[i]
        while at:
            add(idle, <uintptr_t>lent.nodes[at].ptr, 0, 0, IDLE)
            at = lent.nodes[at].next


def extents(PoolCore c not None):
    """(address, bytes) of what has memory, each as large as it goes."""
    cdef List found = List(NULL, 0, 0, False)
    cdef uintptr_t end = 0
    cdef uint32_t page
    cdef int i
    cdef Segment* s
    cdef Descriptor* d
    c.lock_all()
    for i in range(c.n_segments):
        s = &c.segments[c.order[i]]
        page = 0
        while page < s.pages and not (s.frontier and page == c.descriptors[s.frontier].page):
            d = &c.descriptors[s.map[scatter(page)]]
            page += d.pages
            if d.state in (VOID, BUSY):
                continue
            if d.address == end:
                found.items[found.n - 1].nbytes += <size_t>d.pages << PAGE_BITS
            else:
                add(&found, d.address, <size_t>d.pages << PAGE_BITS, 0, 0)
            end = 0 if found.full else d.address + (<size_t>d.pages << PAGE_BITS)
    c.unlock_all()
    try:
        if found.full:
            raise MemoryError("no memory for a list of all blocks")
        return [(found.items[i].address, found.items[i].nbytes) for i in range(found.n)]
    finally:
        free(found.items)


@cython.final
cdef class Listing:
    """Yields what was collected; frees it at the end."""
    cdef List blocks
    cdef Py_ssize_t at
    cdef object pending, idle            # addresses of blocks that the pool takes for live
    cdef object info         # the class BlockInfo

    def __iter__(self):
        return self

    def __next__(self):
        cdef Py_ssize_t at
        cdef Found* f
        at = self.at                         # another thread may change it
        if at >= self.blocks.n:
            raise StopIteration
        f = &self.blocks.items[at]
        self.at = at + 1
        state = f.state
        if f.address in self.pending:
            state = PENDING
        elif f.address in self.idle:
            state = IDLE
        return self.info(f.address, f.nbytes, class_of(f.nbytes), STATES[state], f.age)

    def __dealloc__(self):
        free(self.blocks.items)


seal(Listing)


# ---- figures -----------------------------------------------------------------------------

def figures_of(PoolCore core not None):
    """The figures of this moment by name, as PoolStats has them; the classes are dicts, too."""
    cdef PoolFigures f = core.figures()
    cdef int k
    return {
        **counts_of(&f.all),
        "reserved_bytes": f.reserved,
        "metadata_bytes": f.metadata,
        "regions": f.regions,
        "classes": [
            {"index": k, "upper_bound": SIZE_CLASSES[k], **counts_of(&f.classes[k])}
            for k in range(N_CLASSES)
        ],
    }


cdef dict counts_of(ClassFigures* c):
    """The figures that the pool and each of its classes have."""
    return {
        "total_allocations": c.allocations,
        "pool_hits": c.hits,
        "pool_misses": c.misses,
        "splits": c.splits,
        "active_allocations": c.active,
        "allocated_bytes": c.live,
        "pending_bytes": c.pending,
        "idle_bytes": c.idle,
        "reserved_bytes": c.live + c.pending + c.idle,
        "peak_bytes": c.peak,
        "largest_free_block": c.largest,
    }


# ---- the check ---------------------------------------------------------------------------

cdef bint fault(
    Fault* f, bint wrong, const char* why, uintptr_t address, uint64_t was, uint64_t expected
) noexcept nogil:
    """Note the first thing that is wrong."""
    if wrong and f.why == NULL:
        f.why, f.address, f.was, f.expected = why, address, was, expected
    return f.why != NULL


cdef struct Tally:
    size_t reserved, busy, aged
    size_t free_pages[N_CLASSES]
    size_t taken[N_CLASSES]
    int64_t live[N_CLASSES]
    uint64_t active[N_CLASSES]
    uint64_t free_extents, void_extents, used, cached, partial


cdef void check_extents(PoolCore c, Tally* t, Fault* f) noexcept nogil:
    """Each segment is tiled by extents, and no two neighbours should have been merged."""
    cdef Segment* s
    cdef Descriptor* d
    cdef uint32_t page, id
    cdef uintptr_t at
    cdef int i, k, before
    for i in range(c.n_segments):
        s = &c.segments[c.order[i]]
        fault(f, i > 0 and s.base < c.segments[c.order[i - 1]].base
              + (<uintptr_t>c.segments[c.order[i - 1]].pages << PAGE_BITS),
              b"segments overlap, or are out of order", s.base, i, 0)
        page = 0
        before = 0
        while page < s.pages:
            id = s.map[scatter(page)] if page < s.mapped else 0
            if s.frontier and page == c.descriptors[s.frontier].page:
                id = s.frontier
            d = &c.descriptors[id]
            at = s.base + (<uintptr_t>page << PAGE_BITS)
            fault(f, d.address != at, b"an extent says that it lies elsewhere", at, d.address, at)
            if fault(f, id == 0 or id >= c.n_descriptors or d.page != page or d.pages == 0
                     or d.segment != c.order[i] or d.pages > s.pages - page,
                     b"no extent begins where the one before it ends", at, id, page):
                return
            if id != s.frontier:             # at whose end the map has no memory yet
                fault(f, s.map[scatter(page + d.pages - 1)] != id,
                      b"the map does not say which extent ends here", at,
                      s.map[scatter(page + d.pages - 1)], id)
            fault(f, d.state == before and (before == FREE or before == VOID),
                  b"two neighbours are free and not merged", at, d.state, 0)
            before = d.state
            page += d.pages
            t.used += 1
            k = class_of(<size_t>d.pages << PAGE_BITS)
            if d.state == VOID or d.state == BUSY:
                fault(f, s.granule == 0 or (d.page | d.pages) & (s.granule - 1) != 0,
                      b"a part of a granule has no memory", at, d.page, d.pages)
            if d.state == VOID:
                t.void_extents += 1
                continue
            if d.state == BUSY:
                t.busy += d.pages
                continue
            t.reserved += d.pages
            if d.state == FREE:
                t.free_extents += 1
                t.free_pages[k] += d.pages
                t.aged += trimmable_of(c, d)
                fault(f, has_live(d), b"a free extent is live", at, d.live, 0)
            elif d.state == BLOCK or d.state == ODD:
                t.taken[k] += d.pages
                t.active[k] += d.live
                t.live[k] += <int64_t>(d.live * d.pages) << PAGE_BITS
                t.cached += d.live == 0
                fault(f, d.size != <size_t>d.pages << PAGE_BITS or d.size_class != k,
                      b"a block has another size than its pages", at, d.size, d.pages)
                fault(f, d.live > 1, b"a block is live more than once", at, d.live, 1)
            elif d.state == SPAN:
                check_span(c, id, at, t, f)
            else:
                fault(f, True, b"an extent has no state", at, d.state, 0)


cdef void check_span(PoolCore c, uint32_t id, uintptr_t at, Tally* t, Fault* f) noexcept nogil:
    cdef Descriptor* d = &c.descriptors[id]
    cdef uint64_t every = ~<uint64_t>0 >> (64 - c.steps[d.step].slots)
    cdef int k = c.class_at[d.step]
    cdef int live = 0, slot
    cdef uint32_t page
    cdef bint free_here
    cdef uint8_t* line = d.slots
    fault(f, d.live != 0, b"a span is live as a block", at, d.live, 0)
    for slot in range(SLOTS_MOST):
        free_here = d.detail.slots >> slot & 1
        fault(f, line[slot] > 1, b"a slot is live more than once", at, line[slot], 1)
        fault(f, line[slot] and free_here, b"a slot is live and free", at, slot, 0)
        fault(f, not every >> slot & 1 and (line[slot] or free_here),
              b"a span has slots that are none", at, slot, every)
        live += line[slot]
        if every >> slot & 1 and not line[slot] and not free_here:
            t.cached += 1
    fault(f, d.pages != c.steps[d.step].pages, b"a span has not its size", at, d.pages,
          c.steps[d.step].pages)
    fault(f, d.detail.slots == every, b"an empty span was kept", at, every, 0)
    for page in range(d.page, d.page + d.pages):
        fault(f, c.segments[d.segment].map[scatter(page)] != id,
              b"the map has lost a page of a span", at, page, id)
    t.taken[k] += d.pages
    t.partial += d.detail.slots != 0
    t.active[k] += live
    t.live[k] += <int64_t>live * c.steps[d.step].size


cdef uint32_t check_entries(
    PoolCore c, int s, const Entry* items, uint32_t n, Fault* f
) noexcept nogil:
    """Slots of a magazine or a depot are of its step, and neither live nor in their span."""
    cdef uint32_t i
    cdef int slot
    cdef Descriptor* d
    for i in range(n):
        d = &c.descriptors[id_of(items[i].block_id)]
        slot = slot_number(items[i].block_id)
        if fault(f, d.state != SPAN or d.step != s
                 or <uintptr_t>items[i].ptr != d.address + slot * c.steps[s].size,
                 b"a cached slot is misplaced", <uintptr_t>items[i].ptr, d.step, s):
            break
        fault(f, d.slots[slot] or d.detail.slots >> slot & 1,
              b"a cached slot is live, or free in its span", <uintptr_t>items[i].ptr, slot, s)
    return n


cdef void check_lists(PoolCore c, Tally* t, Fault* f) noexcept nogil:
    """Every extent is in the one list that it belongs to, and every cached block in one cache."""
    cdef uint64_t n_free = 0, n_void = 0, n_cached = 0, n_partial = 0, unused = 0
    cdef uint32_t id, before, i
    cdef size_t aged = 0
    cdef int s, w, k
    cdef Bins* bins
    cdef Descriptor* d
    cdef ThreadCache* cache
    for k in range(2):
        bins = &c.free_bins if k == 0 else &c.void_bins
        for s in range(N_STEPS):
            id = bins.heads[s]
            w = <int>(bins.words[s >> 6] >> (s & 63) & 1)
            fault(f, w != (id != 0), b"the bitmap of the bins is wrong", 0, w, s)
            before = 0
            while id:
                d = &c.descriptors[id]
                if fault(f, d.state != (FREE if k == 0 else VOID) or d.prev != before
                         or floor_step(<size_t>d.pages << PAGE_BITS) != s,
                         b"an extent is in the wrong bin", d.address, d.state, s):
                    return
                n_free += k == 0
                n_void += k == 1
                before = id
                id = d.next
    fault(f, n_free != t.free_extents, b"free extents are not all in bins", 0, n_free,
          t.free_extents)
    fault(f, n_void != t.void_extents, b"void extents are not all in bins", 0, n_void,
          t.void_extents)
    id, before = c.oldest, 0
    while id:
        d = &c.descriptors[id]
        if fault(f, d.state != FREE or d.detail.age.older != before,
                 b"the list by age is broken", d.address, d.detail.age.older, before):
            return
        aged += trimmable_of(c, d)
        fault(f, trimmable_of(c, d) == 0, b"an extent that could lose no memory has an age",
              d.address, d.page, d.pages)
        before, id = id, d.detail.age.newer
    fault(f, before != c.newest, b"the list by age ends elsewhere", 0, before, c.newest)
    fault(f, aged != t.aged or aged != c.aged_pages, b"free pages are not all in the list by age",
          0, aged, t.aged)
    for s in range(N_SMALL):
        id, before = c.partial[s], 0
        while id:
            d = &c.descriptors[id]
            if fault(f, d.state != SPAN or d.step != s or d.prev != before or d.detail.slots == 0,
                     b"a list of spans is broken", d.address, d.step, s):
                return
            n_partial += 1
            before, id = id, d.next
    fault(f, n_partial != t.partial, b"spans with free slots are not all listed", 0, n_partial,
          t.partial)
    for k in range(1, c.top_slot + 1):
        cache = c.caches[k]
        if cache == NULL:
            continue
        i = 0
        for s in range(N_EXACT - N_SMALL):
            id = cache.large[s]
            while id:
                d = &c.descriptors[id]
                if fault(f, d.state != BLOCK or d.step != s + N_SMALL or d.live != 0,
                         b"a cached block is live, or of another step", d.address, d.step, s):
                    return
                i += 1
                n_cached += 1
                if fault(f, i > cache.n_large, b"cached blocks were miscounted", 0, i,
                         cache.n_large):
                    return
                id = d.next
        fault(f, i != cache.n_large, b"cached blocks were miscounted", 0, i, cache.n_large)
        for s in range(N_SMALL):
            n_cached += check_entries(c, s, &cache.small[s].items[0], cache.small[s].n, f)
    for s in range(N_SMALL if c.depots != NULL else 0):
        n_cached += check_entries(c, s, &c.depots[s].items[0], c.depots[s].n, f)
    for k in range(N_CLASSES):
        n_cached += c.pending_blocks[k]      # neither live nor free
    fault(f, n_cached != t.cached, b"free blocks are in no list, or in two", 0, n_cached, t.cached)
    id = c.unused
    while id and unused <= c.n_descriptors:
        fault(f, c.descriptors[id].state != 0, b"a descriptor in use was given back", 0, id, 0)
        unused += 1
        id = c.descriptors[id].next
    fault(f, unused + t.used + 1 != c.n_descriptors, b"descriptors were lost", 0,
          unused + t.used + 1, c.n_descriptors)
    unused += c.descriptor_array.ready // sizeof(Descriptor) - c.n_descriptors
    fault(f, c.spare != unused, b"spare descriptors were miscounted", 0, c.spare, unused)


cdef void check_counts(PoolCore c, Tally* t, Fault* f) noexcept nogil:
    cdef uint64_t active, allocations
    cdef int64_t live, all_live = 0
    cdef Total* all = &c.totals[N_CLASSES]
    cdef int i, k, s
    fault(f, t.reserved != c.reserved_pages, b"reserved pages were miscounted", 0, c.reserved_pages,
          t.reserved)
    for k in range(N_CLASSES):
        active, live, allocations = 0, c.totals[k].live, 0
        for i in range(1, c.top_slot + 1):
            if c.caches[i] == NULL:
                continue
            allocations += c.caches[i].counts[k].allocations
            active += c.caches[i].counts[k].allocations - c.caches[i].counts[k].frees
            for s in range(N_SMALL):
                if c.class_at[s] == k:
                    allocations += c.caches[i].small[s].allocations
                    active += live_slots(&c.caches[i].small[s])
        all_live += live
        fault(f, c.totals[k].peak < live, b"more of a class is live than ever was", k,
              c.totals[k].peak, live)
        # Pending blocks count as live there, and are not.
        active -= c.pending_blocks[k]
        live -= <int64_t>c.pending_bytes[k]
        fault(f, active != t.active[k], b"live blocks of a class were miscounted", k, active,
              t.active[k])
        fault(f, live != t.live[k], b"live bytes of a class were miscounted", k, live, t.live[k])
        fault(f, c.taken[k] != t.taken[k], b"pages of a class were miscounted", k, c.taken[k],
              t.taken[k])
        fault(f, c.free_pages[k] != t.free_pages[k], b"free pages of a class were miscounted", k,
              c.free_pages[k], t.free_pages[k])
        fault(f, c.asked.misses[k] > allocations, b"a class has more misses than allocations", k,
              c.asked.misses[k], allocations)
    fault(f, all.live != all_live, b"live bytes were miscounted", 0, all.live, all_live)
    fault(f, all.peak < all_live, b"more is live than ever was", 0, all.peak, all_live)


cdef void check_lent(PoolCore c, Fault* f) noexcept nogil:
    """All that a stream has is live for the pool, and what is idle is counted."""
    cdef size_t idle[N_CLASSES]
    cdef uint64_t blocks[N_CLASSES]
    cdef Lent* lent = c.lent
    cdef size_t all_idle = 0
    cdef Node* node
    cdef Descriptor* d
    cdef uint32_t at, n
    cdef int i
    while lent != NULL:
        memset(idle, 0, sizeof(idle))
        memset(blocks, 0, sizeof(blocks))
        n = 0
        for i in range(BUCKETS):
            at = lent.heads[i]
            while at and n <= lent.blocks:
                node = &lent.nodes[at]
                d = &c.descriptors[id_of(node.block_id)]
                fault(f, not block_is_live(c, node.block_id),
                      b"a block of a stream is free in its pool", <uintptr_t>node.ptr, 0, 1)
                fault(f, lent_bucket(d.step) != i, b"a block of a stream is in the wrong bucket",
                      <uintptr_t>node.ptr, i, lent_bucket(d.step))
                idle[d.size_class] += d.size
                blocks[d.size_class] += 1
                n += 1
                at = node.next
        fault(f, n > lent.blocks, b"a stream has more idle blocks than blocks", 0, n, lent.blocks)
        for i in range(N_CLASSES):
            all_idle += lent.idle_bytes[i]
            fault(f, lent.away == 0 and (
                  idle[i] != lent.idle_bytes[i] or blocks[i] != lent.idle_blocks[i]),
                  b"idle blocks of a stream were miscounted", i, lent.idle_bytes[i], idle[i])
        lent = lent.next
    fault(f, all_idle != c.lent_idle, b"idle bytes of streams were miscounted", 0, c.lent_idle,
          all_idle)


def verify(PoolCore c not None):
    """Raise AssertionError, naming the first thing that is wrong; O(blocks)."""
    cdef Fault f
    cdef Tally t
    if c.shut:
        return
    c.check()
    memset(&f, 0, sizeof(f))
    memset(&t, 0, sizeof(t))
    with nogil:
        arenapy_spin_acquire(&c.array_growth)    # the array's size and `spare` change one by one
        c.lock_all()
        c.add_up_all()
        check_extents(c, &t, &f)
        if f.why == NULL:
            check_lists(c, &t, &f)
            check_counts(c, &t, &f)
            lent_enter(c)
            check_lent(c, &f)
            lent_leave(c)
        c.unlock_all()
        arenapy_spin_release(&c.array_growth)
    if f.why != NULL:
        raise AssertionError(
            f"{f.why.decode()}: at {f.address:#x}, found {f.was}, expected {f.expected}"
        )
