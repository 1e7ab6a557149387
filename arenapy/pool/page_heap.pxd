# The C surface of the page heap: whole pages of an allocator's memory, split and merged.
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t

from arenapy.base.assertion cimport arenapy_assert
from arenapy.base.atomic cimport arenapy_glance, arenapy_spin
from arenapy.memory.region cimport Region
from arenapy.allocator.allocator_core cimport AllocatorCore
from arenapy.base.sizes cimport N_CLASSES, N_STEPS, floor_step, step_bytes, step_of
from arenapy.linux.reserved_space cimport ReservedArray


cdef extern from *:
    """
    #define arenapy_low_bit(w) __builtin_ctzll(w)
    """
    int low_bit "arenapy_low_bit" (uint64_t w) noexcept nogil

cdef enum:
    SPARE = 5                # descriptors that one operation on extents uses at most
    STOCK = 16               # that there are before one begins
    FIT_LOOKS = 32           # extents of a list that are looked at for one that fits
    PAGE_BITS = 12
    PAGE = 4096
    HUGE_PAGES = 512         # of a huge page
    MAX_SEGMENTS = 1024
    MAX_PAGES = 1 << 30      # of a segment: 4 TiB
    MAX_DESCRIPTORS = 1 << 26
    BIN_WORDS = (N_STEPS + 63) >> 6

    # States of an extent
    UNUSED = 0               # the descriptor describes nothing
    FREE = 1                 # in a bin, merged with its neighbours
    VOID = 2                 # address space without memory
    BUSY = 3                 # being given memory, or deprived of it, by one thread
    BLOCK = 4                # one block above 32 KiB, of an exact step: live, or in a thread cache
    SPAN = 5                 # slots of one step
    ODD = 6                  # one block of another size; it is never in a thread cache

    # A block is named by where the byte lies, counted from `descriptors`, that says whether it is
    # live. So the name needs no descriptor to find that byte. 0 names nothing.
    NAME_BITS = 7            # of a name: the byte in its descriptor, which has 128
    SLOTS_AT = 64            # there: `slots`

cdef struct Links:
    uint32_t newer, older

cdef union Detail:
    uint64_t slots           # SPAN: bit i: slot i is neither live nor in a thread cache
    Links age                # FREE, with a whole granule: neighbours in the age list, 0 at its ends
    uint32_t taken           # BLOCK, in a thread cache: the tick when it was handed out

# One extent: pages of one segment. Two cache lines, the second for the slots of a SPAN. An extent
# is named by the index of its descriptor; 0 is nothing.
cdef struct Descriptor:
    uint64_t live            # BLOCK, ODD: 1 if it is handed out; others: 0
    Detail detail
    uintptr_t address        # of its first byte
    # Of a block, bytes. BLOCK: as many as its pages have. SPAN: a slot's. BUSY: the thread at work.
    uint64_t size
    uint32_t page            # the first one, counted in its segment
    uint32_t pages           # >= 1
    uint32_t next, prev      # FREE, VOID: in the bin. SPAN: with others of its step that have slots
    uint32_t tick            # when it, or the block freed last of it, was freed or handed out
    uint16_t segment
    uint16_t step            # BLOCK, SPAN
    uint8_t state
    uint8_t size_class       # BLOCK, SPAN: that of its blocks
    uint16_t skew            # BLOCK: bytes that are skipped before the block. BUSY: 1 if it grows
    uint32_t inverse         # SPAN: ceil(2 ** 32 / size), to divide offsets by the slot's size
    # SPAN: byte i: 1 if slot i is handed out. Others: 0. Each slot has a byte of its own, so that
    # threads that have slots of one span need no atomic instruction.
    uint8_t slots[64]

# One region, or one reservation, tiled exactly by extents.
cdef struct Segment:
    uintptr_t base           # of page 0; 0: the segment is unused
    uint32_t pages
    # A reservation: so many pages, a power of two, get memory and lose it together. VOID and BUSY
    # extents begin and end where such a granule does. 0: a region, which has all its memory.
    uint32_t granule
    uint32_t* map            # [scatter(page)]: descriptor; right at an extent's ends, and in a SPAN
    uint64_t mapped          # pages for which `map` may be read, whole 4 KiB of it but at the end
    ReservedArray array      # where `map` lies
    uint32_t frontier        # the VOID extent at its end, which has no entry in `map` there
    void* region             # borrowed

# Where growth for a request would put it: bytes from `start` up to `end`, of which so many pages
# have no memory. `end` is 0 if no address space holds it.
cdef struct Place:
    size_t lacking
    uintptr_t start, end

# Extents listed by size: bin s has those that fill step s and not the next.
cdef struct Bins:
    uint64_t summary
    uint64_t words[BIN_WORDS]
    uint32_t heads[N_STEPS]


cdef class Pages(AllocatorCore):
    # Guards all below, and the descriptors of extents that are not BLOCKs or SPANs in use. It may
    # be taken under a thread cache's lock, and none is taken under it.
    cdef arenapy_spin heap_lock
    cdef ReservedArray descriptor_array
    cdef Descriptor* descriptors
    cdef uint32_t n_descriptors      # indices used so far; [0] is nothing
    cdef uint32_t unused             # descriptors given back, linked by next
    cdef uint32_t spare              # how many more there are, given back or new
    cdef Segment* segments           # MAX_SEGMENTS; those in use are listed by base in `order`
    cdef uint16_t* order
    cdef int n_segments
    cdef int n_slots                 # of `segments` that were ever used
    cdef Segment hot         # a copy of the first of them, which mostly is the only one
    cdef int hot_index
    cdef Bins free_bins
    cdef Bins void_bins
    cdef uint32_t newest, oldest     # FREE extents that could lose memory, by when they were freed
    cdef size_t aged_pages           # that those could lose
    cdef size_t reserved_pages       # that have memory, BUSY ones not counted
    cdef size_t busy_pages           # on their way to have memory
    cdef uint32_t forks              # how many forks this process is from where the heap was made
    cdef size_t free_pages[N_CLASSES]    # of FREE extents, by class
    # Before a larger block is cut, what is free is merged, and what fits best is cut: where memory
    # is scarcer than time.
    cdef bint merges_first
    cdef arenapy_spin array_growth       # held while an array grows; taken before the caches'

    cdef bint open_arrays(self, size_t pages) noexcept nogil
    cdef bint more_descriptors(self, uint32_t wanted) noexcept nogil
    # With heap_lock held:
    cdef uint32_t alloc_extent(self, size_t pages, size_t align, bint* split) noexcept nogil
    cdef void free_extent(self, uint32_t id, uint32_t tick) noexcept nogil
    cdef uint32_t neighbour(self, uint32_t id, bint after) noexcept nogil
    cdef uint32_t free_behind(self, uint32_t id) noexcept nogil
    cdef void extend(self, uint32_t id, uint32_t pages) noexcept nogil
    # All locks: for what readers without the heap's lock look at.
    cdef void lock_all(self) noexcept nogil
    cdef void unlock_all(self) noexcept nogil
    # internal
    cdef uint32_t new_descriptor(self) noexcept nogil
    cdef void drop_descriptor(self, uint32_t id) noexcept nogil
    cdef uint32_t new_extent(
        self, int segment, uint32_t page, uint32_t pages, int state) noexcept nogil
    cdef void set_boundary_tags(self, uint32_t id) noexcept nogil
    cdef void drop(self, uint32_t id) noexcept nogil
    cdef uint32_t join(self, uint32_t id, int state) noexcept nogil
    cdef void enter(self, uint32_t id) noexcept nogil
    cdef void remove(self, uint32_t id) noexcept nogil
    cdef void age_insert(self, uint32_t id, uint32_t older) noexcept nogil
    cdef void age_remove(self, uint32_t id) noexcept nogil
    cdef uint32_t cut(self, uint32_t id, uint32_t pages) noexcept nogil


# Descriptors for what follows; under no lock. False: no memory for them. (A glance: others may have
# used them by then, which `take` looks after.)
cdef inline bint have_spare(Pages c) noexcept nogil:
    return arenapy_glance(&c.spare) >= STOCK or c.more_descriptors(STOCK)


# Ticks go round: of two, the one that is less than half a turn ahead is later.

cdef inline bint earlier(uint32_t a, uint32_t b) noexcept nogil:
    return <int>(a - b) < 0


cdef inline uint32_t later(uint32_t a, uint32_t b) noexcept nogil:
    return b if earlier(a, b) else a


# Whether any block of an extent is handed out.
cdef inline bint has_live(Descriptor* d) noexcept nogil:
    cdef uint64_t* words = <uint64_t*>d.slots
    cdef uint64_t some = d.live
    cdef int i
    for i in range(SLOTS_AT // 8):           # as many as there are slots
        some |= words[i]
    return some != 0


# The name of a slot of a SPAN, and of the one block of another extent.
cdef inline uint64_t slot_name(uint32_t id, uint64_t slot) noexcept nogil:
    return (<uint64_t>id << NAME_BITS) + SLOTS_AT + slot


cdef inline uint64_t block_name(uint32_t id) noexcept nogil:
    return <uint64_t>id << NAME_BITS


# The descriptor that a name names, and the slot of a SPAN.
cdef inline uint32_t id_of(uint64_t block_id) noexcept nogil:
    return <uint32_t>(block_id >> NAME_BITS)


cdef inline int slot_number(uint64_t block_id) noexcept nogil:
    return <int>(block_id & (SLOTS_AT - 1))


# Where a map has the entry of a page. Within every 1,024 of them the cache lines, of 16 entries,
# are permuted: those of blocks some power of two apart would else lie in one set of a cache, a few
# of which push each other out. The first page's is the first.
cdef inline uint64_t scatter(uint64_t page) noexcept nogil:
    return page ^ ((page ^ page >> 6) >> 6 & 0x3F0)


# Finding in bins.

cdef inline int next_bin(Bins* bins, int s) noexcept nogil:
    """The first bin from s on that is not empty, or -1."""
    cdef int w = s >> 6
    cdef uint64_t word
    if s >= N_STEPS:
        return -1
    word = bins.words[w] & (~<uint64_t>0 << (s & 63))
    if word == 0:
        # Twice by less than a word: w may be 63.
        word = (bins.summary >> w) >> 1 << 1 << w
        if word == 0:
            return -1
        w = low_bit(word)
        word = bins.words[w]
    return (w << 6) + low_bit(word)


cdef inline uint32_t roomy(Pages p, Bins* bins, size_t pages) noexcept nogil:
    """An extent of at least so many pages, of the smallest bin that surely has one."""
    cdef size_t nbytes = pages << PAGE_BITS
    cdef int s = step_of(nbytes)
    cdef int looks = 0
    cdef uint32_t id, best = 0
    if step_bytes(s) != nbytes:
        # The bin below may have one too, but not every one in it is large enough.
        id = bins.heads[s - 1]
        while id and looks < FIT_LOOKS:
            if p.descriptors[id].pages >= pages:
                if not p.merges_first:
                    return id
                if best == 0 or p.descriptors[id].pages < p.descriptors[best].pages:
                    best = id
            id = p.descriptors[id].next
            looks += 1
        if best:
            return best
    s = next_bin(bins, s)
    if s < 0:
        return 0
    id = best = bins.heads[s]
    while p.merges_first and id and looks < FIT_LOOKS:  # of a device, the one that fits best
        if p.descriptors[id].pages < p.descriptors[best].pages:
            best = id
        id = p.descriptors[id].next
        looks += 1
    return best


# A region no page of which is in use.
cdef inline bint is_idle(Pages p, Segment* s) noexcept nogil:
    cdef Descriptor* d = &p.descriptors[s.map[0]]
    return s.granule == 0 and d.state == FREE and d.pages == s.pages


# The first page at or behind `page` with which a granule begins, and the last at or before it.
cdef inline uint32_t granule_up(Segment* s, uint32_t page) noexcept nogil:
    return (page + s.granule - 1) & ~(s.granule - 1)


cdef inline uint32_t granule_down(Segment* s, uint32_t page) noexcept nogil:
    return page & ~(s.granule - 1)


# Pages of an extent in whole granules, which alone could lose their memory.
cdef inline uint32_t trimmable_of(Pages p, Descriptor* d) noexcept nogil:
    cdef Segment* s = &p.segments[d.segment]
    cdef uint32_t start, end
    if s.granule == 0:
        return 0
    start, end = granule_up(s, d.page), granule_down(s, d.page + d.pages)
    return end - start if end > start else 0


# Index of the segment that an address is in, -1 if it is not ours.
cdef inline int segment_of(Pages p, uintptr_t at) noexcept nogil:
    cdef int low = 0, high = p.n_segments, middle
    cdef Segment* s
    while high - low > 1:                    # the last one that does not begin beyond it
        middle = (low + high) >> 1
        if p.segments[p.order[middle]].base <= at:
            low = middle
        else:
            high = middle
    if high == 0:
        return -1
    s = &p.segments[p.order[low]]
    return p.order[low] if (at - s.base) >> PAGE_BITS < s.pages else -1


# The invariants of the fields above that take a few instructions to check. The heap's lock held.
cdef inline bint heap_is_valid(Pages p) noexcept nogil:
    arenapy_assert(
        p.n_descriptors <= p.descriptor_array.ready // sizeof(Descriptor),
        b"descriptors that are used have memory")
    arenapy_assert(p.n_segments <= p.n_slots, b"n_segments <= n_slots")
    arenapy_assert(p.n_slots <= MAX_SEGMENTS, b"n_slots <= MAX_SEGMENTS")
    arenapy_assert((p.newest == 0) == (p.oldest == 0), b"the age list has two ends, or none")
    arenapy_assert((p.newest == 0) == (p.aged_pages == 0), b"the age list has the aged pages")
    return True


cdef inline bint extent_is_valid(Pages p, uint32_t id) noexcept nogil:
    cdef Descriptor* d = &p.descriptors[id]
    cdef Segment* s = &p.segments[d.segment]
    arenapy_assert(0 < id < p.n_descriptors, b"an extent has a descriptor")
    arenapy_assert(d.state != UNUSED, b"the descriptor of an extent is in use")
    arenapy_assert(s.base != 0, b"the segment of an extent is in use")
    arenapy_assert(d.pages >= 1, b"an extent has pages")
    arenapy_assert(
        <uint64_t>d.page + d.pages <= s.pages, b"an extent ends within its segment")
    arenapy_assert(
        d.address == s.base + (<uintptr_t>d.page << PAGE_BITS),
        b"the address of an extent is that of its first page")
    return True


# In a bin, as FREE and VOID extents are.
cdef inline bint is_listed(Pages p, uint32_t id) noexcept nogil:
    cdef Descriptor* d = &p.descriptors[id]
    cdef int s = floor_step(<size_t>d.pages << PAGE_BITS)
    cdef Bins* bins = &p.free_bins if d.state == FREE else &p.void_bins
    arenapy_assert(d.state == FREE or d.state == VOID, b"what is in a bin is FREE or VOID")
    arenapy_assert(d.prev or bins.heads[s] == id, b"an extent is in the bin of its size")
    arenapy_assert(bins.words[s >> 6] >> (s & 63) & 1, b"a bin that is not empty has its bit")
    arenapy_assert(bins.summary >> (s >> 6) & 1, b"a word of bins that is not 0 has its bit")
    return True


# -- segments: memory for the pages, and back
# The segments of a page heap: where its address space and its memory begin and end.

cdef class Segments(Pages):
    # Growth and shrinking: begin_* and end_* with heap_lock held, the work between them without.
    # Of a reservation with granules: where `pages` lack the least memory, and a VOID part of it.
    cdef uint32_t find_place(
        self, size_t pages, Place* place, uint32_t* page, uint32_t* n) noexcept nogil
    cdef uint32_t begin_growth(
        self, size_t pages, size_t wished, size_t most, size_t* missing, Place* place
    ) noexcept nogil
    # The same right behind an extent, or behind what is free there.
    cdef uint32_t begin_growth_behind(
        self, uint32_t id, uint32_t pages, size_t most) noexcept nogil
    cdef void make_busy(self, uint32_t id, uint32_t pages) noexcept nogil
    cdef bint grow_map(self, size_t pages) noexcept nogil
    cdef void end_growth(self, uint32_t id, bint grown, uint32_t tick) noexcept nogil
    cdef uint32_t begin_trim(self, size_t most, bint enough, const Place* spared) noexcept nogil
    cdef void end_trim(self, uint32_t id, bint trimmed) noexcept nogil
    # In a forked child, all locks held: what was between begin and end on other threads is nobody's
    # here. How many extents are BUSY on this thread, whose calls go on.
    cdef uint32_t forget_growth(self) noexcept nogil
    cdef int add_segment(
        self, Region region, uint32_t granule, size_t most, uint32_t tick) except -1
    cdef int idle_segment(self, size_t most) noexcept nogil
    cdef size_t idle_pages(self) noexcept nogil
    cdef void remove_segment(self, int segment) noexcept nogil
    cdef void note_hot(self) noexcept nogil
