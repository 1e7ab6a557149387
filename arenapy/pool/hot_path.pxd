# The quick way of a Pool, from the thread cache and back to it.
#
# `cache_alloc` rounds the request up to a step. It pops the block of this step that was freed last.
# `cache_free` pushes a block. `heap_alloc` asks the page heap when the cache has no such block, and
# `full_free` empties the cache when it is full. The quick way calls no Python code, and the only
# lock that it takes is the cache's.
#
# The tag of a block, also called its name, leads to the byte of the block's descriptor that says
# whether the block is live. A second free finds that it is not, so it is noticed. (Unless two
# threads free a block at the same moment, which in C nothing forbids them. That is one of the uses
# of a raw pointer that nobody sees.)
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t

from arenapy.allocator.allocator_core cimport forbid, permit
from arenapy.base.assertion cimport arenapy_assert
from arenapy.base.atomic cimport is_no_null, likely
from arenapy.base.biased_lock cimport biased_enter, biased_leave
from arenapy.base.sanitizer cimport POISONS
from arenapy.base.thread_slot cimport slot_at
from arenapy.base.sizes cimport (
    N_EXACT, N_SMALL, ROUND_LINES, ROUND_STEP, SMALL_MOST, rounded, step_of,
)
from arenapy.buffer.block cimport GONE_CLOSED
from arenapy.pool.page_heap cimport (
    BLOCK, ODD, PAGE_BITS, SPAN, Descriptor, block_name, earlier, id_of, scatter, segment_of,
    slot_name, slot_number,
)
from arenapy.pool.thread_cache cimport (
    Count, MAGAZINE_MOST, Entry, LARGE_MOST, Level, Magazine, SKEW, SLOTS_MOST, ThreadCache,
    ThreadCaches,
)

cdef extern from *:
    """
    /* offset / size, by inverse = ceil(2**64 / size); 0: the offset is no multiple. This is exact
       for offsets below 2**49. For larger ones, such as the difference to a span that begins later,
       the quotient is larger than the number of any slot.
       (Lemire, Kaser and Kurz, "Faster Remainder by Direct Computation", 2019.) */
    static inline int arenapy_slot_of(uint64_t offset, uint64_t inverse, uint64_t *slot) {
        unsigned __int128 product = (unsigned __int128)offset * inverse;
        *slot = (uint64_t)(product >> 64);
        return (uint64_t)product < inverse;
    }
    /* The same pointer. Compilers do not know how it was made, so they use it, and do not compute
       it again for each field. */
    static inline void *arenapy_opaque(void *p) {
        __asm__("" : "+r"(p));
        return p;
    }
    """
    void* opaque "arenapy_opaque" (void* p) noexcept nogil
    bint slot_of "arenapy_slot_of" (
        uint64_t offset, uint64_t inverse, uint64_t* slot) noexcept nogil


cdef inline void rise(Level* level, size_t size) noexcept nogil:
    level.slack -= size
    if level.slack < 0:
        level.peak -= level.slack
        level.slack = 0


cdef inline void fall(Level* level, size_t size) noexcept nogil:
    level.slack += size


# A block above 32 KiB that is handed out, or was freed.
cdef inline void count_block(ThreadCache* f, Descriptor* d) noexcept nogil:
    cdef Count* count = &f.counts[d.size_class]
    count.allocations += 1
    rise(&count.level, d.size)
    rise(&f.level, d.size)


cdef inline void discount_block(ThreadCache* f, Descriptor* d) noexcept nogil:
    cdef Count* count = &f.counts[d.size_class]
    count.frees += 1
    f.freed += d.size
    fall(&count.level, d.size)
    fall(&f.level, d.size)


cdef inline Magazine* magazine_of(ThreadCache* f, int s) noexcept nogil:
    # They begin where the second one would if the cache began with one. The offset is then part of
    # each instruction.
    return <Magazine*>opaque(<Magazine*>f + s) + 1


# What a block's name names.
cdef inline Descriptor* named(ThreadCaches c, uint64_t block_id) noexcept nogil:
    return &c.descriptors[id_of(block_id)]


# What the fields of a cache promise, as far as that takes a few instructions; its lock held.
cdef inline bint cache_is_valid(ThreadCache* f) noexcept nogil:
    arenapy_assert(f.n_large <= LARGE_MOST, b"a cache has LARGE_MOST large blocks at most")
    arenapy_assert(f.level.slack >= 0, b"peak is the most that was live")
    return True


cdef inline bint magazine_is_valid(Magazine* m) noexcept nogil:
    arenapy_assert(m.depth <= MAGAZINE_MOST, b"depth <= MAGAZINE_MOST of a magazine")
    arenapy_assert(m.n <= m.depth, b"n <= depth of a magazine")
    return True


# The same of a block in a cache, or on its way out or in.
cdef inline bint block_is_valid(ThreadCaches c, char* ptr, uint64_t block_id) noexcept nogil:
    cdef Descriptor* d = named(c, block_id)
    arenapy_assert(
        d.state == SPAN or d.state == BLOCK or d.state == ODD, b"a block is in an extent of blocks")
    arenapy_assert(<uintptr_t>ptr >= d.address, b"a block begins in its extent")
    arenapy_assert(
        d.state != SPAN or <uintptr_t>ptr == d.address + slot_number(block_id) * d.size,
        b"a slot begins at a multiple of its size")
    arenapy_assert(
        <uintptr_t>ptr - d.address + d.size - (d.skew if d.state != SPAN else 0)
        <= <uint64_t>d.pages << PAGE_BITS, b"a block ends in its extent")
    return True


# Where it says whether a block is live: 1 or 0. (For a BLOCK, the low byte of `live`.)
cdef inline uint8_t* live_byte(ThreadCaches c, uint64_t block_id) noexcept nogil:
    return <uint8_t*>c.descriptors + block_id


cdef inline bint block_is_live(ThreadCaches c, uint64_t block_id) noexcept nogil:
    return live_byte(c, block_id)[0]


# The name of the block that begins at an address, live or not; 0: none does. Under a cache's lock,
# which whoever adds or removes a segment takes, too. `of` is then what the name names: to find that
# from the name again would wait for a multiplication.
cdef inline uint64_t tag_at(ThreadCaches c, void* ptr, Descriptor** of) noexcept nogil:
    cdef uint64_t at = <uintptr_t>ptr - c.hot.base
    cdef uint64_t page = at >> PAGE_BITS
    cdef uint64_t slot
    cdef int i = c.hot_index
    cdef uint32_t id
    cdef Descriptor* d
    if likely(page < c.hot.mapped):
        id = c.hot.map[scatter(page)]
    else:
        i = segment_of(c, <uintptr_t>ptr)
        if i < 0 or c.gone == GONE_CLOSED:   # whose addresses are others' now
            return 0
        page = (<uintptr_t>ptr - c.segments[i].base) >> PAGE_BITS
        if page >= c.segments[i].mapped:
            return 0
        id = c.segments[i].map[scatter(page)]
    # The map is out of date within a BLOCK, so what it says is checked.
    of[0] = d = &c.descriptors[id]
    at = <uintptr_t>ptr - d.address
    if likely(d.state == SPAN):
        slot = at * d.inverse >> 32
        if likely(slot * d.size == at and at < <uint64_t>d.pages << PAGE_BITS):
            return slot_name(id, slot)
    elif (d.state == BLOCK or d.state == ODD) and at == d.skew:
        return block_name(id)
    return 0


# Where in its pages a block above 32 KiB begins, if so many of its bytes are not asked for. Blocks
# that all begin on a page push each other out of the caches where many are read side by side. Half
# a page, since a load waits for a store just before it whose address ends in the same 12 bits.
cdef inline char* skewed(Descriptor* d, uint64_t block_id, size_t slack) noexcept nogil:
    d.skew = <uint16_t>(block_id << 4 & SKEW) if slack >= SKEW else 0
    return <char*>d.address + d.skew


# In builds that poison: a block is free, all of it.
cdef inline void forbid_block(ThreadCaches c, Descriptor* d, char* ptr) noexcept nogil:
    if POISONS:
        if d.state != SPAN:                  # which may begin before it, skewed
            ptr = <char*>d.address
        forbid(c, <uintptr_t>ptr, <uintptr_t>ptr + d.size)


# Of the two blocks of a list that were freed last, the one that was handed out later comes first.
# `x = f(x)` frees its temporaries, which are in the processor's caches, before what x was.
cdef inline void hotter_first(ThreadCaches c, uint32_t* head) noexcept nogil:
    cdef Descriptor* first = &c.descriptors[head[0]]
    cdef uint32_t id = first.next
    cdef Descriptor* second = &c.descriptors[id]
    if id and earlier(first.detail.taken, second.detail.taken):
        first.next = second.next
        second.next = head[0]
        head[0] = id


# From a magazine, its cache's lock held: the slot that was freed last, or NULL. (Who hands it out
# permits n bytes of it.)
cdef inline char* pop_slot(
    ThreadCaches c, ThreadCache* f, Magazine* m, uint64_t* block_id
) noexcept nogil:
    cdef uint32_t n = m.n
    cdef char* ptr
    cdef uint64_t id
    arenapy_assert(cache_is_valid(f), b"the cache is valid")
    arenapy_assert(magazine_is_valid(m), b"the magazine is valid")
    if not likely(n):
        return NULL
    n -= 1
    m.n = n
    ptr = m.items[n].ptr
    is_no_null(ptr)
    block_id[0] = id = m.items[n].block_id
    arenapy_assert(not block_is_live(c, id), b"a block in a cache is not live")
    arenapy_assert(
        not named(c, id).detail.slots >> slot_number(id) & 1,
        b"a slot is in a cache or in its span")
    live_byte(c, id)[0] = 1
    m.allocations += 1
    rise(&m.count.level, m.size)
    rise(&f.level, m.size)
    arenapy_assert(
        m == &f.small[named(c, id).step], b"a block is of the step that was asked for")
    arenapy_assert(m.size == named(c, id).size, b"a slot has the size of its step")
    arenapy_assert(block_is_live(c, id), b"a block that is handed out is live")
    arenapy_assert(block_is_valid(c, ptr, id), b"the block is valid")
    arenapy_assert(cache_is_valid(f), b"the cache is valid")
    return ptr


# The same of a step above 32 KiB, for n bytes. `hot`: or the one before.
cdef inline char* pop_block(
    ThreadCaches c, ThreadCache* f, int s, size_t n, bint hot, int rounding, uint64_t* block_id
) noexcept nogil:
    cdef Descriptor* d
    cdef uint32_t id
    arenapy_assert(cache_is_valid(f), b"the cache is valid")
    if s >= N_EXACT:
        return NULL
    if not likely(f.large[s - N_SMALL]):
        return NULL
    if hot:
        hotter_first(c, &f.large[s - N_SMALL])
    if rounding == ROUND_LINES and not c.fitting_first(&f.large[s - N_SMALL], n):
        return NULL
    id = f.large[s - N_SMALL]
    d = &c.descriptors[id]
    arenapy_assert(d.state == BLOCK, b"a large block in a cache is a BLOCK")
    arenapy_assert(d.step == s, b"a block is of the step that was asked for")
    arenapy_assert(d.live == 0, b"a block in a cache is not live")
    arenapy_assert(f.n_large > 0, b"large blocks in a cache were counted")
    arenapy_assert(n <= d.size, b"a block has the bytes that were asked for")
    f.large[s - N_SMALL] = d.next
    f.n_large -= 1
    f.tick += 1
    d.tick = f.tick
    block_id[0] = block_name(id)
    d.live = 1
    count_block(f, d)
    arenapy_assert(cache_is_valid(f), b"the cache is valid")
    # A device's blocks have no processor's cache lines to be skewed over.
    return <char*>d.address if rounding == ROUND_LINES else skewed(d, block_id[0], d.size - n)


cdef inline char* pop(
    ThreadCaches c, ThreadCache* f, int s, size_t n, bint hot, uint64_t* block_id
) noexcept nogil:
    if s < N_SMALL:
        return pop_slot(c, f, magazine_of(f, s), block_id)
    return pop_block(c, f, s, n, hot, c.rounding, block_id)


# To a magazine, its cache's lock held: a slot of a span of its step, whose state is at `live`.
# False: the magazine has no room, or the slot is not live; nothing has changed.
cdef inline bint push_slot(
    ThreadCaches c, ThreadCache* f, Magazine* m, Descriptor* d, uint8_t* live, char* ptr,
    uint64_t block_id
) noexcept nogil:
    cdef uint32_t n = m.n
    arenapy_assert(cache_is_valid(f), b"the cache is valid")
    arenapy_assert(magazine_is_valid(m), b"the magazine is valid")
    arenapy_assert(m == &f.small[d.step], b"a slot goes to the magazine of its step")
    if not likely(n < m.depth) or not likely(live[0]):
        return False
    live[0] = 0
    m.items[n] = Entry(ptr, block_id)
    m.n = n + 1
    fall(&m.count.level, m.size)
    fall(&f.level, m.size)
    forbid_block(c, d, ptr)
    arenapy_assert(magazine_is_valid(m), b"the magazine is valid")
    arenapy_assert(block_is_valid(c, ptr, block_id), b"the block is valid")
    arenapy_assert(not block_is_live(c, block_id), b"a block in a cache is not live")
    arenapy_assert(cache_is_valid(f), b"the cache is valid")
    return True


# To the list of its step, its cache's lock held: a BLOCK. False as above.
cdef inline bint push_block(
    ThreadCaches c, ThreadCache* f, Descriptor* d, char* ptr, uint32_t id
) noexcept nogil:
    cdef uint32_t* head
    arenapy_assert(cache_is_valid(f), b"the cache is valid")
    if not likely(f.n_large < LARGE_MOST) or not likely(d.live):
        return False
    d.live = 0
    f.tick += 1
    d.detail.taken = d.tick
    d.tick = f.tick
    head = &f.large[d.step - N_SMALL]
    d.next = head[0]
    head[0] = id
    f.n_large += 1
    discount_block(f, d)
    forbid_block(c, d, ptr)
    arenapy_assert(block_is_valid(c, ptr, block_name(id)), b"the block is valid")
    arenapy_assert(cache_is_valid(f), b"the cache is valid")
    return True


# To the thread cache, its lock held. False: the block is not live.
cdef inline bint push(
    ThreadCaches c, ThreadCache* f, Descriptor* d, char* ptr, uint64_t block_id
) noexcept nogil:
    if likely(d.state == SPAN):
        if likely(push_slot(c, f, magazine_of(f, d.step), d, live_byte(c, block_id), ptr,
                            block_id)):
            return True
    elif likely(d.state == BLOCK) and likely(push_block(c, f, d, ptr, id_of(block_id))):
        return True
    return c.full_free(f, ptr, block_id)


# The short ways. A thread that enters the lock of its cache as the owner need not look at
# `fast_path_off`: while that is set, `quick` has a lock that nobody owns.

# An entry may change at any time, and a compiler may read a plain field twice: `opaque` forbids it.
# (An atomic load would cost one more instruction, for its address.)
cdef inline ThreadCache* quick_cache(ThreadCaches c, uint64_t me) noexcept nogil:
    return <ThreadCache*>opaque(c.quick[me])


# A block from the thread cache. NULL: it has none for n bytes, or the fast path is off.
cdef inline char* cache_alloc(
    ThreadCaches c, size_t n, bint hot, uint64_t* block_id
) noexcept nogil:
    cdef uint64_t me = slot_at(c.slot_offset)
    cdef ThreadCache* f = quick_cache(c, me)
    cdef char* ptr
    cdef uint64_t other = 0                  # so that a tag which nobody reads stays in a register
    if not likely(biased_enter(&f.lock, me)):
        ptr = c.shared_alloc(n, hot, &other)
        block_id[0] = other
        return ptr
    if likely(n <= SMALL_MOST):
        ptr = pop_slot(c, f, magazine_of(f, c.step_at[(n + 63) >> 6]), block_id)
    elif likely(c.rounding == ROUND_STEP):
        ptr = pop_block(c, f, step_of(n), n, hot, ROUND_STEP, block_id)
    else:
        ptr = pop_block(
            c, f, step_of(rounded(n, c.rounding)), n, hot, c.rounding, block_id)
    biased_leave(&f.lock)
    if POISONS and ptr != NULL:
        permit(c, <uintptr_t>ptr, n)
    return ptr


# Free a block, also if the fast path is off. The caller has done everything else.
# False: the block is not live.
cdef inline bint cache_free(ThreadCaches c, char* ptr, uint64_t block_id) noexcept nogil:
    cdef uint64_t me = slot_at(c.slot_offset)
    cdef ThreadCache* f = quick_cache(c, me)
    cdef bint was_live
    if not likely(biased_enter(&f.lock, me)):
        return c.shared_free(ptr, block_id)
    was_live = push(c, f, named(c, block_id), ptr, block_id)
    biased_leave(&f.lock)
    return was_live


# The same for the block that begins at an address. False also if none does.
cdef inline bint cache_free_at(ThreadCaches c, char* ptr) noexcept nogil:
    cdef uint64_t me = slot_at(c.slot_offset)
    cdef ThreadCache* f = quick_cache(c, me)
    cdef Descriptor* d
    cdef uint64_t block_id
    cdef bint was_live
    if not likely(biased_enter(&f.lock, me)):
        return c.shared_free_at(ptr)
    block_id = tag_at(c, ptr, &d)
    was_live = block_id != 0 and push(c, f, d, ptr, block_id)
    biased_leave(&f.lock)
    return was_live


# -- for C code
# The common cases. These call no function, so a C function that begins with one of them, and jumps
# to another function for the rest, needs no frame.

# A block for n bytes. NULL: the general way is needed; nothing has changed.
cdef inline char* take(ThreadCaches c, size_t n, bint hot) noexcept nogil:
    cdef uint64_t me = slot_at(c.slot_offset)
    cdef ThreadCache* f = quick_cache(c, me)
    cdef uint64_t block_id
    cdef char* ptr
    if likely(n <= SMALL_MOST):
        if not likely(biased_enter(&f.lock, me)):
            return NULL
        ptr = pop_slot(c, f, magazine_of(f, c.step_at[(n + 63) >> 6]), &block_id)
    else:
        if not likely(c.rounding == ROUND_STEP) or not likely(biased_enter(&f.lock, me)):
            return NULL
        ptr = pop_block(c, f, step_of(n), n, hot, ROUND_STEP, &block_id)
    biased_leave(&f.lock)
    if POISONS and ptr != NULL:
        permit(c, <uintptr_t>ptr, n)
    return ptr


# A slot of a span, by its address; a cache's lock held. False: nothing has changed.
cdef inline bint give_slot(
    ThreadCaches c, ThreadCache* f, Descriptor* d, uint32_t id, char* ptr
) noexcept nogil:
    cdef Magazine* m = magazine_of(f, d.step)
    cdef uint64_t slot
    return (likely(slot_of(<uintptr_t>ptr - d.address, m.inverse, &slot))
            and likely(slot < SLOTS_MOST)    # of a span with fewer, those beyond are never live
            and push_slot(c, f, m, d, &d.slots[slot], ptr, slot_name(id, slot)))


# Free the block that begins at an address. False: the general way is needed, or no live block
# begins there; nothing has changed.
cdef inline bint give(ThreadCaches c, char* ptr) noexcept nogil:
    cdef uint64_t me = slot_at(c.slot_offset)
    cdef ThreadCache* f = quick_cache(c, me)
    cdef uint64_t page
    cdef uint32_t id
    cdef Descriptor* d
    cdef bint freed = False
    if not likely(biased_enter(&f.lock, me)):
        return False
    page = (<uintptr_t>ptr - c.hot.base) >> PAGE_BITS
    if likely(page < c.hot.mapped):
        id = c.hot.map[scatter(page)]
        d = &c.descriptors[id]               # what the map says is checked, as in tag_at
        if likely(d.state == SPAN):
            freed = give_slot(c, f, d, id, ptr)
        elif likely(d.state == BLOCK) and likely(<uintptr_t>ptr - d.address == d.skew):
            freed = push_block(c, f, d, ptr, id)
    biased_leave(&f.lock)
    return freed
