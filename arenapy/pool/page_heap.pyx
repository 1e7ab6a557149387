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
from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from arenapy.base.atomic cimport (
    arenapy_glance, arenapy_set_glanced, arenapy_spin_acquire, arenapy_spin_release,
)
from arenapy.allocator.allocator_core cimport AllocatorCore
from arenapy.base.sealed cimport seal
from arenapy.base.size_classes cimport N_EXACT, N_SMALL, class_of, floor_step, step_of
from arenapy.linux.reserved_space cimport ReservedArray, array_close, array_grow, array_open

cdef enum:
    ARRAY_STEP = 64 << 10    # bytes that the descriptor array grows by, or an eighth of it


@cython.no_gc_clear
cdef class Pages(AllocatorCore):
    """A heap of pages. Internal."""

    def __dealloc__(self):
        cdef int i
        cdef ReservedArray array
        if self.segments != NULL:
            for i in range(self.n_segments):
                array_close(&self.segments[self.order[i]].array)
            array.at = <char*>self.segments
            array.reserved = MOST_SEGMENTS * (sizeof(Segment) + sizeof(uint16_t))
            array_close(&array)
        array_close(&self.descriptor_array)

    cdef bint open_arrays(self, size_t pages) noexcept nogil:
        """Reserve room for the metadata of so many pages."""
        cdef ReservedArray array
        cdef size_t most = min(<size_t>MOST_DESCRIPTORS, pages + 64)
        cdef size_t order = MOST_SEGMENTS * sizeof(Segment)
        if not array_open(&array, order + MOST_SEGMENTS * sizeof(uint16_t)):
            return False
        if not (array_grow(&array, array.reserved)
                and array_open(&self.descriptor_array, most * sizeof(Descriptor))):
            array_close(&array)
            return False
        self.segments = <Segment*>array.at
        self.order = <uint16_t*>(array.at + order)
        self.descriptors = <Descriptor*>self.descriptor_array.at
        self.n_descriptors = 1
        return self.more_descriptors(STOCK)

    cdef bint more_descriptors(self, uint32_t wanted) noexcept nogil:
        """Make `wanted` descriptors spare. Not under a lock. False: no memory for them."""
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

    cdef uint32_t new_extent(
        self, int segment, uint32_t page, uint32_t pages, int state
    ) noexcept nogil:
        """A descriptor; there is a spare one."""
        cdef uint32_t id = self.unused
        cdef Descriptor* d
        if id:
            self.unused = self.descriptors[id].next
        else:
            id = self.n_descriptors
            self.n_descriptors += 1
        arenapy_set_glanced(&self.spare, self.spare - 1)
        d = &self.descriptors[id]
        d.live = d.detail.slots = 0
        d.page, d.pages = page, pages
        d.next = d.prev = 0
        d.segment = <uint16_t>segment
        d.address = self.segments[segment].base + (<uintptr_t>page << PAGE_BITS)
        d.state = <uint8_t>state
        return id

    cdef void drop(self, uint32_t id) noexcept nogil:
        self.descriptors[id].state = UNUSED
        self.descriptors[id].live = 0
        self.descriptors[id].next = self.unused
        self.unused = id
        arenapy_set_glanced(&self.spare, self.spare + 1)

    cdef void tag(self, uint32_t id) noexcept nogil:
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
        cdef uint32_t rest = self.new_extent(
            d.segment, d.page + pages, d.pages - pages, d.state)
        self.descriptors[rest].tick = d.tick
        d.pages = pages
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
                d.page -= self.descriptors[other].pages
                d.address = self.descriptors[other].address
                d.pages += self.descriptors[other].pages
                d.tick = later(d.tick, self.descriptors[other].tick)
                self.drop(other)
        if end < s.pages:
            other = s.map[scatter(end)]
            if self.descriptors[other].state == state:
                self.remove(other)
                d.pages += self.descriptors[other].pages
                d.tick = later(d.tick, self.descriptors[other].tick)
                self.drop(other)
        return id

    # -- lists: a FREE extent is in a bin and, in a growing segment, in the age list

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
        self.tag(id)

    cdef void remove(self, uint32_t id) noexcept nogil:
        """Unlist it, from the age list too."""
        cdef Descriptor* d = &self.descriptors[id]
        cdef size_t nbytes = <size_t>d.pages << PAGE_BITS
        cdef Bins* bins = &self.free_bins if d.state == FREE else &self.void_bins
        cdef int s
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
            self.free_pages[class_of(nbytes)] -= d.pages
            if self.segments[d.segment].growing:
                self.age_remove(id)
        elif self.segments[d.segment].frontier == id:
            self.segments[d.segment].frontier = 0

    cdef void age_insert(self, uint32_t id, uint32_t older) noexcept nogil:
        """Into the age list, as the next after `older` (0: as the oldest)."""
        cdef uint32_t newer
        if not self.segments[self.descriptors[id].segment].growing:
            return
        self.aged_pages += self.descriptors[id].pages
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
        self.aged_pages -= self.descriptors[id].pages
        if age.older:
            self.descriptors[age.older].detail.age.newer = age.newer
        else:
            self.oldest = age.newer
        if age.newer:
            self.descriptors[age.newer].detail.age.older = age.older
        else:
            self.newest = age.older

    # -- blocks

    cdef uint32_t take(self, size_t pages, size_t align, bint* split) noexcept nogil:
        """An extent of exactly so many pages, as a BLOCK; 0: no free extent has them."""
        cdef size_t align_pages = max(align >> PAGE_BITS, <size_t>1)
        cdef uint32_t id, rest, older = 0
        cdef uint32_t lead
        cdef Descriptor* d
        cdef Segment* s
        if self.spare < SPARE or pages >= <size_t>1 << 36:
            return 0
        id = roomy(self, &self.free_bins, pages + align_pages - 1)
        if id == 0:
            return 0
        d = &self.descriptors[id]
        s = &self.segments[d.segment]
        lead = <uint32_t>(-((s.base >> PAGE_BITS) + d.page) & (align_pages - 1))
        if s.growing:
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
        self.tag(id)
        return id

    cdef void give(self, uint32_t id, uint32_t tick) noexcept nogil:
        """A BLOCK or SPAN without blocks in use, freed last at `tick`, becomes free."""
        self.descriptors[id].tick = tick
        self.descriptors[id].live = 0
        self.join(id, FREE)
        self.descriptors[id].state = FREE
        self.enter(id)
        self.age_insert(id, self.newest)

    cdef void lock_all(self) noexcept nogil:
        arenapy_spin_acquire(&self.heap_lock)

    cdef void unlock_all(self) noexcept nogil:
        arenapy_spin_release(&self.heap_lock)


seal(Pages)
