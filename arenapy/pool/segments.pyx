"""Segments: memory for the pages of a heap, and back.

What lives here: regions and reservations as segments, which of their pages have memory, what was
unused longest. What does not: blocks (page_heap), the system calls and the source (memory), which
run without a lock between begin_* and end_*.
"""
cimport cython
from libc.stdint cimport uint16_t, uint32_t, uintptr_t
from libc.string cimport memmove

from arenapy.base.atomic cimport arenapy_spin_acquire, arenapy_spin_release
from arenapy.pool.page_heap cimport (
    BUSY, FREE, HUGE_PAGES, MOST_PAGES, MOST_SEGMENTS, PAGE, PAGE_BITS, SPARE, STOCK, VOID,
    Descriptor, Pages, Segment, earlier, is_idle, roomy, scatter,
)
from arenapy.base.sanitizer cimport POISONS
from arenapy.memory.region cimport Region
from arenapy.allocator.allocator_core cimport forbid, forbid_new, permit
from arenapy.base.sealed cimport seal
from arenapy.linux.reserved_space cimport ReservedArray, array_close, array_grow, array_open


@cython.no_gc_clear
cdef class Segments(Pages):
    """The segments of a heap of pages. Internal."""

    cdef uint32_t begin_growth(
        self, size_t pages, size_t wished, size_t most, size_t* missing
    ) noexcept nogil:
        """Make VOID pages BUSY, so that with free ones before them `pages` come together.

        As many as wished if there are, and on to the end of a huge page. 0: no segment has that
        address space, or, with `missing` set, it takes so many pages more than `most`.
        """
        cdef uint32_t id, rest
        cdef Descriptor* d
        cdef Segment* s
        cdef size_t need = pages, n
        cdef int i
        missing[0] = 0
        if self.spare < SPARE:
            return 0
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
        if need > most:
            missing[0] = need - most
            return 0
        d = &self.descriptors[id]
        s = &self.segments[d.segment]
        n = min(<size_t>d.pages, max(need, min(wished, most)))
        if id == s.frontier and n >= HUGE_PAGES:
            # A huge page that is not whole when it is faulted in hardly ever becomes one.
            rest = -((s.base >> PAGE_BITS) + d.page + n) & (HUGE_PAGES - 1)
            if n + rest <= min(<size_t>d.pages, most):
                n += rest
        if d.page + n < s.pages:             # the map has to say what begins there
            n = min(n, <size_t>s.mapped - 1 - d.page)
            if n < need:
                return 0
        self.remove(id)
        if d.pages > n:
            rest = self.cut(id, <uint32_t>n)
            self.enter(rest)
        d.state = BUSY
        self.tag(id)
        self.busy_pages += n
        return id

    cdef bint grow_map(self, size_t pages) noexcept nogil:
        """Make the map of the growing segments ready for so many pages beyond their frontier.

        Not under a lock. False: no memory for it.
        """
        cdef bint grown = True
        cdef size_t upto
        cdef Segment* s
        cdef int i
        arenapy_spin_acquire(&self.array_growth)
        for i in range(MOST_SEGMENTS):
            s = &self.segments[i]
            arenapy_spin_acquire(&self.heap_lock)
            upto = 0
            if s.base and s.growing and s.frontier:
                upto = min(self.descriptors[s.frontier].page + pages + 2, <size_t>s.pages)
            arenapy_spin_release(&self.heap_lock)
            if upto * sizeof(uint32_t) > s.array.ready:
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
        self.busy_pages -= d.pages
        if grown:
            forbid_new(self, d.address, d.address + (<size_t>d.pages << PAGE_BITS))
            self.reserved_pages += d.pages
            self.give(id, tick)
        else:
            self.join(id, VOID)
            d.state = VOID
            self.enter(id)

    cdef uint32_t begin_trim(self, size_t most) noexcept nogil:
        """Make the free pages that were unused longest BUSY, at most so many; 0: none are."""
        cdef uint32_t id = self.oldest
        cdef uint32_t older
        if id == 0 or most == 0 or self.spare < SPARE:
            return 0
        self.remove(id)
        if self.descriptors[id].pages > most:
            older = id
            id = self.cut(older, self.descriptors[older].pages - <uint32_t>most)
            self.enter(older)
            self.age_insert(older, 0)
        self.descriptors[id].state = BUSY
        self.tag(id)
        self.reserved_pages -= self.descriptors[id].pages
        permit(self, self.descriptors[id].address,
               <size_t>self.descriptors[id].pages << PAGE_BITS)
        return id

    cdef void end_trim(self, uint32_t id, bint trimmed) noexcept nogil:
        cdef Descriptor* d = &self.descriptors[id]
        if trimmed:
            self.join(id, VOID)
            d.state = VOID
            self.enter(id)
        else:
            self.reserved_pages += d.pages
            if POISONS:
                forbid(self, d.address, d.address + (<size_t>d.pages << PAGE_BITS))
            self.give(id, d.tick)

    cdef void forget_growth(self) noexcept nogil:
        cdef Segment* s
        cdef uint32_t id, page
        cdef int i
        self.busy_pages = 0
        self.forks += 1                      # whoever forked while growing sees by it
        for i in range(self.n_segments):
            s = &self.segments[self.order[i]]
            page = 0
            while page < s.pages and not (
                    s.frontier and page == self.descriptors[s.frontier].page):
                id = s.map[scatter(page)]
                if self.descriptors[id].state == BUSY:
                    self.join(id, VOID)
                    self.descriptors[id].state = VOID
                    self.enter(id)
                page = self.descriptors[id].page + self.descriptors[id].pages

    cdef int add_segment(
        self, Region region, bint growing, size_t most, uint32_t tick
    ) except -1:
        """Take a region over: free, or (growing) address space without memory as yet."""
        cdef uintptr_t base = (<uintptr_t>region.ptr + PAGE - 1) & ~<uintptr_t>(PAGE - 1)
        cdef uintptr_t end = <uintptr_t>region.ptr + region.size
        cdef size_t pages = (end - base) >> PAGE_BITS if end > base else 0
        cdef Segment segment
        cdef int i, at
        cdef uint32_t id
        pages = min(pages, most)
        if pages == 0 or pages > MOST_PAGES:
            raise ValueError(
                f"{region!r} has {pages} whole pages of {PAGE} bytes, and a pool needs from 1 to "
                f"{MOST_PAGES} in a region: give a larger one, or several smaller"
            )
        segment = Segment(
            base, <uint32_t>pages, growing, NULL, 0, ReservedArray(NULL, 0, 0), 0, NULL)
        if not (self.more_descriptors(STOCK) and array_open(&segment.array, pages * 4)):
            raise MemoryError("no memory for the bookkeeping of a pool")
        if not array_grow(&segment.array, min(pages * 4, <size_t>PAGE) if growing else pages * 4):
            array_close(&segment.array)
            raise MemoryError("no memory for the bookkeeping of a pool")
        segment.map = <uint32_t*>segment.array.at
        segment.mapped = mapped(&segment)
        segment.region = <void*>region
        try:
            if self.n_segments == MOST_SEGMENTS:
                raise MemoryError(f"a pool has at most {MOST_SEGMENTS} regions")
            self.share_region(region)
        except BaseException:
            array_close(&segment.array)
            raise
        if not growing:
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
        id = self.new_extent(i, 0, <uint32_t>pages, VOID if growing else FREE)
        self.descriptors[id].tick = tick
        self.enter(id)
        if not growing:
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
