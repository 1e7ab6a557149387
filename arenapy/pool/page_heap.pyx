"""Pages: a heap of whole pages, in the regions or the reserved address space of a Pool.

What lives here: descriptors, splitting and merging of extents, finding one that is large enough.
What does not: where pages have memory (segments); small blocks, caches, counting (thread_cache).

Each segment (a region, or a reservation that gets its memory piece by piece) is tiled exactly by
extents. A FREE or VOID extent has no neighbour of its own kind in its segment: `join` sees to
it whenever one becomes so. Extents of different segments are never merged, even where they touch.

Why it is fast: extents are listed by size in bins with a bitmap over them (TLSF), so that finding,
splitting and merging take a bounded number of steps however many extents there are. Neighbours are
found through a map from pages to descriptors. Nothing is written into the memory itself.
"""
cimport cython
from libc.stdint cimport uint16_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memmove

from arenapy.base.assertion cimport arenapy_assert
from arenapy.base.atomic cimport (
    arenapy_glance, arenapy_set_glanced, arenapy_spin_acquire, arenapy_spin_release, rank_spin,
)
from arenapy.base.thread_slot cimport RANK_GROWTH, RANK_HEAP, this_thread
from arenapy.pool.page_heap cimport (
    extent_is_valid, granule_down, granule_up, heap_is_valid, is_listed, next_bin, trimmable_of,
)
from arenapy.allocator.allocator_core cimport AllocatorCore, forbid, forbid_new, permit
from arenapy.base.sealed cimport seal
from arenapy.base.sizes cimport N_EXACT, N_SMALL, class_of, floor_step, step_of
from arenapy.linux.reserved_space cimport ReservedArray, array_close, array_grow, array_open
from arenapy.base.sanitizer cimport POISONS
from arenapy.memory.region cimport Region


cdef enum:
    ARRAY_STEP = 64 << 10    # bytes that the descriptor array grows by, or an eighth of it
    MAP_AHEAD = 32 << 8      # pages: 32 MiB of them, whose part of a map is 32 KiB
    # Where memory comes by the granule, a block is cut from the far end of an extent that has so
    # many times its pages, so that those on the other side stay together for a large block.
    FAR_END = 5


@cython.no_gc_clear
cdef class Pages(AllocatorCore):
    """A heap of pages. Internal."""

    def __cinit__(self):
        # Now: a fork takes the locks of an allocator that is still being made.
        rank_spin(&self.heap_lock, RANK_HEAP)
        rank_spin(&self.array_growth, RANK_GROWTH)

    def __dealloc__(self):
        cdef int i
        cdef ReservedArray array
        if self.segments != NULL:
            for i in range(self.n_segments):
                array_close(&self.segments[self.order[i]].array)
            array.at = <char*>self.segments
            array.reserved = MAX_SEGMENTS * (sizeof(Segment) + sizeof(uint16_t))
            array_close(&array)
        array_close(&self.descriptor_array)

    cdef bint open_arrays(self, size_t pages) noexcept nogil:
        """Reserve room for the metadata of so many pages; of fewer under a limit."""
        cdef ReservedArray array
        cdef size_t most = min(<size_t>MAX_DESCRIPTORS, pages + 64) * sizeof(Descriptor)
        cdef size_t wanted = most
        cdef bint done
        cdef size_t order = MAX_SEGMENTS * sizeof(Segment)
        if not array_open(&array, order + MAX_SEGMENTS * sizeof(uint16_t)):
            return False
        done = array_grow(&array, array.reserved)
        while done and not array_open(&self.descriptor_array, most):
            most //= 2
            done = most >= ARRAY_STEP
        if done and most < wanted:
            # RLIMIT_AS, as a rule. Less than 2 * most bytes are left for everything. Even if no
            # two pages of them belong together, an eighth of `most` has descriptors for them.
            array_close(&self.descriptor_array)
            done = array_open(&self.descriptor_array, max(most // 8, <size_t>ARRAY_STEP))
        if not done:
            array_close(&array)
            return False
        self.segments = <Segment*>array.at
        self.order = <uint16_t*>(array.at + order)
        self.descriptors = <Descriptor*>self.descriptor_array.at
        self.n_descriptors = 1
        return self.more_descriptors(STOCK)

    cdef bint more_descriptors(self, uint32_t wanted) noexcept nogil:
        """Make `wanted` descriptors spare; no cache's lock held. False: no memory for them."""
        cdef size_t ready, before
        cdef bint grown = True
        arenapy_spin_acquire(&self.array_growth)
        while arenapy_glance(&self.spare) < wanted and grown:
            before = self.descriptor_array.ready
            ready = before + max(<size_t>ARRAY_STEP, before // 8, wanted * sizeof(Descriptor))
            grown = array_grow(&self.descriptor_array, min(ready, self.descriptor_array.reserved))
            ready = self.descriptor_array.ready
            grown = grown and ready > before
            arenapy_spin_acquire(&self.heap_lock)
            arenapy_set_glanced(&self.spare, self.spare - (before == 0) + <uint32_t>(
                ready // sizeof(Descriptor) - before // sizeof(Descriptor)))
            arenapy_spin_release(&self.heap_lock)
        arenapy_spin_release(&self.array_growth)
        return grown

    # -- descriptors

    cdef uint32_t new_descriptor(self) noexcept nogil:
        """One that is not in use; there is a spare one."""
        cdef uint32_t id = self.unused
        arenapy_assert(self.spare > 0, b"a descriptor is spare")
        if id:
            self.unused = self.descriptors[id].next
        else:
            id = self.n_descriptors
            self.n_descriptors += 1
        arenapy_set_glanced(&self.spare, self.spare - 1)
        arenapy_assert(
            self.descriptors[id].state == UNUSED, b"a spare descriptor is not in use")
        return id

    cdef void drop_descriptor(self, uint32_t id) noexcept nogil:
        self.descriptors[id].state = UNUSED
        self.descriptors[id].next = self.unused
        self.unused = id
        arenapy_set_glanced(&self.spare, self.spare + 1)

    cdef uint32_t new_extent(
        self, int segment, uint32_t page, uint32_t pages, int state
    ) noexcept nogil:
        """A descriptor; there is a spare one."""
        cdef uint32_t id = self.new_descriptor()
        cdef Descriptor* d = &self.descriptors[id]
        arenapy_assert(not has_live(d), b"a spare descriptor has no live block")
        d.live = d.detail.slots = 0
        d.page, d.pages = page, pages
        d.next = d.prev = 0
        d.segment = <uint16_t>segment
        d.address = self.segments[segment].base + (<uintptr_t>page << PAGE_BITS)
        d.state = <uint8_t>state
        return id

    cdef void drop(self, uint32_t id) noexcept nogil:
        arenapy_assert(
            self.descriptors[id].state != UNUSED, b"a descriptor is given back once")
        self.descriptors[id].live = 0
        self.drop_descriptor(id)

    cdef void set_boundary_tags(self, uint32_t id) noexcept nogil:
        """Let the map say so at both ends, where neighbours and pointers look it up."""
        cdef Descriptor* d = &self.descriptors[id]
        cdef Segment* s = &self.segments[d.segment]
        s.map[scatter(d.page)] = id
        if d.state == VOID and d.page + d.pages == s.pages:
            s.frontier = id                  # the map's end may have no memory yet
        else:
            s.map[scatter(d.page + d.pages - 1)] = id

    cdef uint32_t cut(self, uint32_t id, uint32_t pages) noexcept nogil:
        """Leave an extent so many pages; the rest, of the same state, is a new one. Untagged."""
        cdef Descriptor* d = &self.descriptors[id]
        cdef uint32_t end = d.page + d.pages
        arenapy_assert(0 < pages < d.pages, b"a cut leaves pages on both sides")
        cdef uint32_t rest = self.new_extent(
            d.segment, d.page + pages, d.pages - pages, d.state)
        self.descriptors[rest].tick = d.tick
        d.pages = pages
        arenapy_assert(extent_is_valid(self, id), b"the extent is valid")
        arenapy_assert(extent_is_valid(self, rest), b"the extent is valid")
        arenapy_assert(
            d.page + d.pages == self.descriptors[rest].page, b"the parts of a cut touch")
        arenapy_assert(
            self.descriptors[rest].page + self.descriptors[rest].pages == end,
            b"the parts of a cut have the pages of the whole")
        return rest

    cdef uint32_t join(self, uint32_t id, int state) noexcept nogil:
        """Merge an unlisted extent with its neighbours of that state; it takes them in."""
        cdef Descriptor* d = &self.descriptors[id]
        cdef Segment* s = &self.segments[d.segment]
        cdef uint32_t other
        cdef uint32_t end = d.page + d.pages
        if d.page > 0:
            other = s.map[scatter(d.page - 1)]
            if self.descriptors[other].state == state:
                self.remove(other)
                arenapy_assert(
                    self.descriptors[other].page + self.descriptors[other].pages == d.page,
                    b"extents that are merged touch")
                d.page -= self.descriptors[other].pages
                d.address = self.descriptors[other].address
                d.pages += self.descriptors[other].pages
                d.tick = later(d.tick, self.descriptors[other].tick)
                self.drop(other)
        if end < s.pages:
            other = s.map[scatter(end)]
            if self.descriptors[other].state == state:
                self.remove(other)
                arenapy_assert(
                    self.descriptors[other].page == end, b"extents that are merged touch")
                d.pages += self.descriptors[other].pages
                d.tick = later(d.tick, self.descriptors[other].tick)
                self.drop(other)
        arenapy_assert(d.page + d.pages >= end, b"a merged extent has the pages of its parts")
        arenapy_assert(extent_is_valid(self, id), b"the extent is valid")
        return id

    # -- lists: a FREE extent is in a bin and, if it could lose memory, in the age list

    cdef void enter(self, uint32_t id) noexcept nogil:
        """List a FREE or VOID extent in its bin."""
        cdef Descriptor* d = &self.descriptors[id]
        cdef size_t nbytes = <size_t>d.pages << PAGE_BITS
        cdef Bins* bins = &self.free_bins if d.state == FREE else &self.void_bins
        cdef int s = floor_step(nbytes)
        d.prev = 0
        d.next = bins.heads[s]
        if d.next:
            self.descriptors[d.next].prev = id
        bins.heads[s] = id
        bins.words[s >> 6] |= <uint64_t>1 << (s & 63)
        bins.summary |= <uint64_t>1 << (s >> 6)
        if d.state == FREE:
            self.free_pages[class_of(nbytes)] += d.pages
        self.set_boundary_tags(id)
        arenapy_assert(extent_is_valid(self, id), b"the extent is valid")
        arenapy_assert(is_listed(self, id), b"the extent is listed")

    cdef void remove(self, uint32_t id) noexcept nogil:
        """Unlist it, from the age list too."""
        cdef Descriptor* d = &self.descriptors[id]
        cdef size_t nbytes = <size_t>d.pages << PAGE_BITS
        cdef Bins* bins = &self.free_bins if d.state == FREE else &self.void_bins
        cdef int s
        arenapy_assert(extent_is_valid(self, id), b"the extent is valid")
        arenapy_assert(is_listed(self, id), b"the extent is listed")
        if d.next:
            self.descriptors[d.next].prev = d.prev
        if d.prev:
            self.descriptors[d.prev].next = d.next
        else:
            s = floor_step(nbytes)
            bins.heads[s] = d.next
            if d.next == 0:
                bins.words[s >> 6] &= ~(<uint64_t>1 << (s & 63))
                if bins.words[s >> 6] == 0:
                    bins.summary &= ~(<uint64_t>1 << (s >> 6))
        if d.state == FREE:
            arenapy_assert(
                self.free_pages[class_of(nbytes)] >= d.pages, b"free pages were counted")
            self.free_pages[class_of(nbytes)] -= d.pages
            self.age_remove(id)
        elif self.segments[d.segment].frontier == id:
            self.segments[d.segment].frontier = 0

    cdef void age_insert(self, uint32_t id, uint32_t older) noexcept nogil:
        """Into the age list, as the next after `older` (0: as the oldest)."""
        cdef uint32_t newer
        cdef uint32_t pages = trimmable_of(self, &self.descriptors[id])
        if pages == 0:
            return
        self.aged_pages += pages
        newer = self.descriptors[older].detail.age.newer if older else self.oldest
        self.descriptors[id].detail.age = Links(newer, older)
        if older:
            self.descriptors[older].detail.age.newer = id
        else:
            self.oldest = id
        if newer:
            self.descriptors[newer].detail.age.older = id
        else:
            self.newest = id

    cdef void age_remove(self, uint32_t id) noexcept nogil:
        cdef Links age = self.descriptors[id].detail.age
        cdef uint32_t pages = trimmable_of(self, &self.descriptors[id])
        if pages == 0:
            return
        arenapy_assert(self.aged_pages >= pages, b"aged pages were counted")
        self.aged_pages -= pages
        if age.older:
            self.descriptors[age.older].detail.age.newer = age.newer
        else:
            self.oldest = age.newer
        if age.newer:
            self.descriptors[age.newer].detail.age.older = age.older
        else:
            self.newest = age.older

    # -- blocks

    cdef uint32_t alloc_extent(self, size_t pages, size_t align, bint* split) noexcept nogil:
        """An extent of exactly so many pages, as a BLOCK; 0: no free extent has them."""
        cdef size_t align_pages = max(align >> PAGE_BITS, <size_t>1)
        cdef uint32_t id, rest, older = 0
        cdef uint32_t lead
        cdef Descriptor* d
        cdef Segment* s
        if self.spare < SPARE or pages >= <size_t>1 << 36:
            return 0
        arenapy_assert(heap_is_valid(self), b"the heap is valid")
        id = roomy(self, &self.free_bins, pages + align_pages - 1)
        if id == 0:
            return 0
        d = &self.descriptors[id]
        s = &self.segments[d.segment]
        if s.granule > 1 and d.pages >= FAR_END * pages:
            lead = d.pages - <uint32_t>pages
            lead -= <uint32_t>((s.base >> PAGE_BITS) + d.page + lead & (align_pages - 1))
        else:
            lead = <uint32_t>(-((s.base >> PAGE_BITS) + d.page) & (align_pages - 1))
        if trimmable_of(self, d):
            older = d.detail.age.older
        self.remove(id)
        split[0] = d.pages > pages
        if lead:                             # what is left keeps its age and its place
            rest = self.cut(id, lead)
            self.enter(id)
            self.age_insert(id, older)
            id = rest
            d = &self.descriptors[id]
        if d.pages > pages:
            rest = self.cut(id, <uint32_t>pages)
            self.enter(rest)
            self.age_insert(rest, older)
        d.live = 0
        d.skew = 0
        d.size = pages << PAGE_BITS
        d.step = <uint16_t>step_of(d.size)
        d.size_class = <uint8_t>class_of(d.size)
        d.state = BLOCK if N_SMALL <= d.step < N_EXACT else ODD
        self.set_boundary_tags(id)
        arenapy_assert(heap_is_valid(self), b"the heap is valid")
        arenapy_assert(extent_is_valid(self, id), b"the extent is valid")
        arenapy_assert(d.pages == pages, b"an extent has exactly the pages that were asked for")
        arenapy_assert(
            d.address & ((align_pages << PAGE_BITS) - 1) == 0, b"an extent is aligned as asked")
        return id

    cdef void free_extent(self, uint32_t id, uint32_t tick) noexcept nogil:
        """A BLOCK or SPAN without blocks in use, freed last at `tick`, becomes free."""
        arenapy_assert(
            not has_live(&self.descriptors[id]), b"an extent that becomes free has no live block")
        self.descriptors[id].tick = tick
        self.join(id, FREE)
        self.descriptors[id].state = FREE
        self.enter(id)
        self.age_insert(id, self.newest)
        arenapy_assert(heap_is_valid(self), b"the heap is valid")

    cdef uint32_t neighbour(self, uint32_t id, bint after) noexcept nogil:
        """The extent before or after one, if that is FREE or VOID; else 0."""
        cdef Descriptor* d = &self.descriptors[id]
        cdef Segment* s = &self.segments[d.segment]
        cdef uint32_t other
        if d.page + d.pages == s.pages if after else d.page == 0:
            return 0
        other = s.map[scatter(d.page + d.pages if after else d.page - 1)]
        return other if self.descriptors[other].state in (FREE, VOID) else 0

    cdef uint32_t free_behind(self, uint32_t id) noexcept nogil:
        """The FREE extent that begins where this one ends, or 0."""
        cdef uint32_t other = self.neighbour(id, True)
        return other if other and self.descriptors[other].state == FREE else 0

    cdef void extend(self, uint32_t id, uint32_t pages) noexcept nogil:
        """Add so many pages to an extent, from the FREE one behind it, which has them."""
        cdef Descriptor* d = &self.descriptors[id]
        cdef uint32_t other = self.free_behind(id)
        cdef uint32_t rest, older = 0
        arenapy_assert(other != 0, b"what a block grows into is free")
        arenapy_assert(self.descriptors[other].pages >= pages, b"a block grows into free pages")
        if trimmable_of(self, &self.descriptors[other]):
            older = self.descriptors[other].detail.age.older
        self.remove(other)
        if self.descriptors[other].pages > pages:
            rest = self.cut(other, pages)
            self.enter(rest)
            self.age_insert(rest, older)
        self.drop(other)
        d.pages += pages
        self.set_boundary_tags(id)
        arenapy_assert(heap_is_valid(self), b"the heap is valid")
        arenapy_assert(extent_is_valid(self, id), b"the extent is valid")

    # A Pool's ThreadCaches override both: they take the locks of caches and depots before this one.
    cdef void lock_all(self) noexcept nogil:
        arenapy_spin_acquire(&self.heap_lock)

    cdef void unlock_all(self) noexcept nogil:
        arenapy_spin_release(&self.heap_lock)


seal(Pages)


# ---- segments: memory for the pages, and back --------------------------------------------
# Segments: memory for the pages of a heap, and back.
#
# What lives here: regions and reservations as segments, which of their pages have memory, what was
# unused longest. What does not: blocks (page_heap), the system calls and the source (memory), which
# run without a lock between begin_* and end_*.

@cython.no_gc_clear
cdef class Segments(Pages):
    """The segments of a heap of pages. Internal."""

    cdef uint32_t find_place(
        self, size_t pages, Place* place, uint32_t* page, uint32_t* n
    ) noexcept nogil:
        """Of all places for so many pages, the one to which the least memory has to be added.

        FREE and VOID extents take turns in a run between two others. Some best place begins where
        an extent of a run begins, or ends where one ends. Two fingers go along each run.

        Returns a VOID extent that lies there in whole or part, and this part; 0: there is no place.
        """
        cdef Bins* bins = &self.void_bins
        cdef Descriptor* first
        cdef Descriptor* last
        cdef Segment* s
        cdef size_t size, bare, over, lacking, least = <size_t>-1
        cdef uint32_t head, id, i, j, best = 0, best_i = 0, best_j = 0
        cdef bint at_left = False
        cdef int k, b = next_bin(bins, 0)
        place.lacking = place.start = place.end = 0
        for k in range(self.n_segments):
            if self.segments[self.order[k]].granule > 1:
                break
        else:
            return 0
        while b >= 0:
            head = bins.heads[b]
            while head:
                id = head
                head = self.descriptors[id].next
                s = &self.segments[self.descriptors[id].segment]
                if s.granule <= 1:
                    continue
                i = self.neighbour(id, False)
                if i and self.neighbour(i, False):
                    continue                 # the run has a VOID extent before this one
                i = j = i if i else id
                size = bare = 0              # from i to j: pages, and those without memory
                while j:
                    last = &self.descriptors[j]
                    size += last.pages
                    bare += last.pages if last.state == VOID else 0
                    while size >= pages:
                        first = &self.descriptors[i]
                        over = size - pages
                        if over < last.pages:            # from where i begins
                            lacking = bare
                            if last.state == VOID:
                                lacking -= granule_down(s, <uint32_t>over)
                            if 0 < lacking < least:
                                least, best_i, best_j, at_left = lacking, i, j, True
                        if over < first.pages:           # to where j ends
                            lacking = bare
                            if first.state == VOID:
                                lacking -= granule_down(s, <uint32_t>over)
                            if 0 < lacking < least and j != s.frontier:
                                least, best_i, best_j, at_left = lacking, i, j, False
                            break
                        size -= first.pages
                        bare -= first.pages if first.state == VOID else 0
                        i = self.neighbour(i, True)
                    j = self.neighbour(j, True)
            b = next_bin(bins, b + 1)
        if best_i == 0:
            return 0
        first, last = &self.descriptors[best_i], &self.descriptors[best_j]
        s = &self.segments[first.segment]
        place.lacking = least
        if at_left:
            place.start = first.address
            place.end = place.start + (pages << PAGE_BITS)
        else:
            place.end = last.address + (<uintptr_t>last.pages << PAGE_BITS)
            place.start = place.end - (pages << PAGE_BITS)
        best = best_i if first.state == VOID else self.neighbour(best_i, True)
        first = &self.descriptors[best]
        page[0] = max(first.page, granule_down(
            s, <uint32_t>((place.start - s.base) >> PAGE_BITS)))
        n[0] = min(first.page + first.pages, granule_up(
            s, <uint32_t>((place.end - s.base) >> PAGE_BITS))) - page[0]
        return best

    cdef uint32_t begin_growth(
        self, size_t pages, size_t wished, size_t most, size_t* missing, Place* place
    ) noexcept nogil:
        """Make VOID pages BUSY, so that with free ones next to them `pages` come together.

        As many as wished if there are, and on to the end of a huge page. If the memory comes by the
        granule: no more than needed, and only one of the parts that lack it. 0: no segment has that
        address space, or, with `missing` set, it takes so many pages more than `most`.
        """
        cdef uint32_t id, rest, page = 0, part = 0
        cdef Descriptor* d
        cdef Segment* s
        cdef size_t need = pages, n
        cdef int i
        missing[0] = 0
        if self.spare < SPARE:
            return 0
        id = self.find_place(pages, place, &page, &part)
        if id:
            if place.lacking > most:
                missing[0] = place.lacking - most
                return 0
            d = &self.descriptors[id]
            s = &self.segments[d.segment]
            if d.page + d.pages == s.pages and page + part < s.pages and page + part >= s.mapped:
                return 0                     # the map has to say what begins there
            self.remove(id)
            if page > d.page:
                rest = self.cut(id, page - d.page)
                self.enter(id)
                id = rest
                d = &self.descriptors[id]
            need = n = part
        else:
            id = roomy(self, &self.void_bins, pages)
            for i in range(self.n_segments):
                s = &self.segments[self.order[i]]
                if s.frontier and (id == 0 or id == s.frontier):
                    # The end of the segment: free pages before it count.
                    d = &self.descriptors[s.frontier]
                    n = 0
                    if d.page > 0 and self.descriptors[s.map[scatter(d.page - 1)]].state == FREE:
                        n = self.descriptors[s.map[scatter(d.page - 1)]].pages
                    if n + d.pages >= pages:
                        id = s.frontier
                        need = pages - min(n, pages - 1)
                        break
            if id == 0:
                return 0
            d = &self.descriptors[id]
            s = &self.segments[d.segment]
            if need > most:
                missing[0] = need - most
                return 0
            n = min(<size_t>d.pages, max(need, min(wished, most)))
            if id == s.frontier and n >= HUGE_PAGES:
                # A huge page that is not whole when it is faulted in hardly ever becomes one.
                rest = -((s.base >> PAGE_BITS) + d.page + n) & (HUGE_PAGES - 1)
                if n + rest <= min(<size_t>d.pages, most):
                    n += rest
            if d.page + n < s.pages:         # the map has to say what begins there
                n = min(n, <size_t>(s.mapped - 1 - d.page))
                if n < need:
                    return 0
            self.remove(id)
        self.make_busy(id, <uint32_t>n)
        return id

    cdef uint32_t begin_growth_behind(
        self, uint32_t id, uint32_t pages, size_t most
    ) noexcept nogil:
        """Make VOID pages BUSY, so that `pages` come together behind an extent; 0: it is no use."""
        cdef uint32_t first = self.neighbour(id, True)
        cdef uint32_t free = 0, n
        cdef Descriptor* d
        cdef Segment* s
        if first and self.descriptors[first].state == FREE:
            free = self.descriptors[first].pages
            first = self.neighbour(first, True)
        if first == 0 or free >= pages or self.spare < SPARE:
            return 0
        d = &self.descriptors[first]
        s = &self.segments[d.segment]
        n = granule_up(s, d.page + pages - free) - d.page
        if n > d.pages or n > most or d.page + n < s.pages and d.page + n >= s.mapped:
            return 0
        self.remove(first)
        self.make_busy(first, n)
        return first

    cdef void make_busy(self, uint32_t id, uint32_t pages) noexcept nogil:
        """The first pages of a removed extent are about to get memory."""
        cdef Descriptor* d = &self.descriptors[id]
        cdef uint32_t rest
        if d.pages > pages:
            rest = self.cut(id, pages)
            self.enter(rest)
        d.state, d.size, d.skew = BUSY, this_thread(), True
        self.set_boundary_tags(id)
        self.busy_pages += pages
        arenapy_assert(extent_is_valid(self, id), b"the extent is valid")
        arenapy_assert(d.pages == pages, b"an extent has exactly the pages that were asked for")

    cdef bint grow_map(self, size_t pages) noexcept nogil:
        """Make the map of the growing segments ready for so many pages beyond their frontier.

        Not under a lock. False: no memory for it.
        """
        cdef bint grown = True
        cdef size_t upto
        cdef Segment* s
        cdef int i
        arenapy_spin_acquire(&self.array_growth)
        for i in range(MAX_SEGMENTS):
            s = &self.segments[i]
            arenapy_spin_acquire(&self.heap_lock)
            upto = 0
            if s.base and s.granule and s.frontier:
                upto = min(self.descriptors[s.frontier].page + pages + 2, <size_t>s.pages)
            arenapy_spin_release(&self.heap_lock)
            if upto * sizeof(uint32_t) > s.array.ready:
                # More than that: mprotect waits for all threads that are faulting pages in.
                upto = min(upto + MAP_AHEAD, <size_t>s.pages)
                grown = grown and array_grow(&s.array, upto * sizeof(uint32_t))
                s.mapped = mapped(s)
                if i == self.hot_index:
                    self.hot.mapped = s.mapped
            if i + 1 >= self.n_slots:
                break
        arenapy_spin_release(&self.array_growth)
        return grown

    cdef void end_growth(self, uint32_t id, bint grown, uint32_t tick) noexcept nogil:
        cdef Descriptor* d = &self.descriptors[id]
        arenapy_assert(d.state == BUSY, b"an extent that gets memory is BUSY")
        arenapy_assert(self.busy_pages >= d.pages, b"busy pages were counted")
        self.busy_pages -= d.pages
        if grown:
            forbid_new(self, d.address, d.address + (<size_t>d.pages << PAGE_BITS))
            self.reserved_pages += d.pages
            self.free_extent(id, tick)
        else:
            self.join(id, VOID)
            d.state = VOID
            self.enter(id)

    cdef uint32_t begin_trim(self, size_t most, bint enough, const Place* spared) noexcept nogil:
        """Make the free pages that were unused longest BUSY, in whole granules; 0: none are.

        At most so many; or (`enough`) no granule more than it takes for so many. Pages in a
        spared place stay.
        """
        cdef uint32_t id = self.oldest
        cdef uint32_t rest, older, start = 0, end = 0, n, low, high
        cdef Descriptor* d
        cdef Segment* s
        if most == 0 or self.spare < SPARE:
            return 0
        while id:
            d = &self.descriptors[id]
            s = &self.segments[d.segment]
            start, end = granule_up(s, d.page), granule_down(s, d.page + d.pages)
            if s.base <= spared.start < s.base + (<uintptr_t>s.pages << PAGE_BITS):
                low = granule_down(s, <uint32_t>((spared.start - s.base) >> PAGE_BITS))
                high = granule_up(s, <uint32_t>((spared.end - s.base) >> PAGE_BITS))
                if high < end:               # behind it, as a rule; or before it
                    start = max(start, high)
                elif low < end:
                    end = max(start, low)
            if start < end:
                break
            id = d.detail.age.newer
        if id == 0:
            return 0
        n = <uint32_t>min(most, <size_t>end - start)
        n = granule_up(s, n) if enough else granule_down(s, n)
        if n == 0:
            return 0
        start = end - n
        older = d.detail.age.older
        self.remove(id)
        if end < d.page + d.pages:           # a part of a granule, which has no age, or is spared
            rest = self.cut(id, end - d.page)
            self.enter(rest)
            self.age_insert(rest, older)
        if start > d.page:
            rest = self.cut(id, start - d.page)
            self.enter(id)
            self.age_insert(id, older)
            id = rest
        d = &self.descriptors[id]
        d.state, d.size, d.skew = BUSY, this_thread(), False
        self.set_boundary_tags(id)
        arenapy_assert(
            self.reserved_pages >= self.descriptors[id].pages, b"reserved pages were counted")
        self.reserved_pages -= self.descriptors[id].pages
        permit(self, self.descriptors[id].address,
               <size_t>self.descriptors[id].pages << PAGE_BITS)
        return id

    cdef void end_trim(self, uint32_t id, bint trimmed) noexcept nogil:
        cdef Descriptor* d = &self.descriptors[id]
        arenapy_assert(d.state == BUSY, b"an extent that loses its memory is BUSY")
        if trimmed:
            self.join(id, VOID)
            d.state = VOID
            self.enter(id)
        else:
            self.reserved_pages += d.pages
            if POISONS:
                forbid(self, d.address, d.address + (<size_t>d.pages << PAGE_BITS))
            self.free_extent(id, d.tick)

    cdef uint32_t forget_growth(self) noexcept nogil:
        cdef Segment* s
        cdef Descriptor* d
        cdef uint32_t id, page, kept = 0
        cdef int i
        self.busy_pages = 0
        self.forks += 1                      # for `busy_pages` of growth by a region
        for i in range(self.n_segments):
            s = &self.segments[self.order[i]]
            page = 0
            while page < s.pages and not (
                    s.frontier and page == self.descriptors[s.frontier].page):
                id = s.map[scatter(page)]
                d = &self.descriptors[id]
                if d.state == BUSY and d.size == this_thread():
                    kept += 1
                    self.busy_pages += d.pages if d.skew else 0
                elif d.state == BUSY:
                    self.join(id, VOID)
                    d.state = VOID
                    self.enter(id)
                page = d.page + d.pages
        return kept

    cdef int add_segment(
        self, Region region, uint32_t granule, size_t most, uint32_t tick
    ) except -1:
        """Take a region over: free, or address space without memory as yet, of such granules."""
        cdef uintptr_t base = (<uintptr_t>region.ptr + PAGE - 1) & ~<uintptr_t>(PAGE - 1)
        cdef uintptr_t end = <uintptr_t>region.ptr + region.size
        cdef size_t pages = (end - base) >> PAGE_BITS if end > base else 0
        cdef Segment segment
        cdef int i, at
        cdef uint32_t id
        pages = min(pages, most)
        if pages == 0 or pages > MAX_PAGES:
            raise ValueError(
                f"{region!r} has {pages} whole pages of {PAGE} bytes, and a pool needs from 1 to "
                f"{MAX_PAGES} in a region: give a larger one, or several smaller"
            )
        segment = Segment(
            base, <uint32_t>pages, granule, NULL, 0, ReservedArray(NULL, 0, 0, 0), 0, NULL)
        if not (self.more_descriptors(STOCK) and array_open(&segment.array, pages * 4)):
            raise MemoryError("no memory for the bookkeeping of a pool")
        if not array_grow(&segment.array, min(pages * 4, <size_t>PAGE) if granule else pages * 4):
            array_close(&segment.array)
            raise MemoryError("no memory for the bookkeeping of a pool")
        segment.map = <uint32_t*>segment.array.at
        segment.mapped = mapped(&segment)
        segment.region = <void*>region
        try:
            if self.n_segments == MAX_SEGMENTS:
                raise MemoryError(f"a pool has at most {MAX_SEGMENTS} regions")
            self.share_region(region)
        except BaseException:
            array_close(&segment.array)
            raise
        if granule == 0:
            forbid_new(self, base, base + (pages << PAGE_BITS))
        self.lock_all()
        i = 0
        while self.segments[i].base:
            i += 1
        self.segments[i] = segment
        self.n_slots = max(self.n_slots, i + 1)
        at = 0
        while at < self.n_segments and self.segments[self.order[at]].base < base:
            at += 1
        memmove(&self.order[at + 1], &self.order[at], (self.n_segments - at) * sizeof(uint16_t))
        self.order[at] = <uint16_t>i
        self.n_segments += 1
        self.note_hot()
        id = self.new_extent(i, 0, <uint32_t>pages, VOID if granule else FREE)
        self.descriptors[id].tick = tick
        self.enter(id)
        if granule == 0:
            self.reserved_pages += pages
        self.unlock_all()
        return 0

    cdef int idle_segment(self, size_t most) noexcept nogil:
        """The region of at most so many pages that was entirely unused longest, or -1."""
        cdef int i, found = -1
        cdef Descriptor* d
        cdef Segment* s
        for i in range(self.n_segments):
            s = &self.segments[self.order[i]]
            d = &self.descriptors[s.map[0]]
            if not is_idle(self, s) or s.pages > most:
                continue
            if found < 0 or earlier(d.tick, self.descriptors[self.segments[found].map[0]].tick):
                found = self.order[i]
        return found

    cdef size_t idle_pages(self) noexcept nogil:
        """Pages that could be given back now."""
        cdef size_t pages = self.aged_pages
        cdef Segment* s
        cdef int i
        for i in range(self.n_segments):
            s = &self.segments[self.order[i]]
            if is_idle(self, s):
                pages += s.pages
        return pages

    cdef void remove_segment(self, int segment) noexcept nogil:
        """Forget a region that is entirely free, or without memory; all locks held.

        Its array is the caller's to close.
        """
        cdef Segment* s = &self.segments[segment]
        cdef uint32_t id = s.frontier if s.frontier else s.map[0]
        cdef int i = 0
        if self.descriptors[id].state == FREE:
            self.reserved_pages -= s.pages
        self.remove(id)
        self.drop(id)
        while self.order[i] != segment:
            i += 1
        self.n_segments -= 1
        memmove(&self.order[i], &self.order[i + 1], (self.n_segments - i) * sizeof(uint16_t))
        s.base = 0
        self.note_hot()

    cdef void note_hot(self) noexcept nogil:
        """After the first segment, or what its map says, has changed."""
        self.hot_index = self.order[0]
        self.hot = self.segments[self.hot_index]
        if self.n_segments == 0:
            self.hot.mapped = 0


seal(Segments)


cdef uint32_t mapped(Segment* s) noexcept nogil:
    return <uint32_t>min(<size_t>s.pages, s.array.ready // sizeof(uint32_t))
