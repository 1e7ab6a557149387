# The quick way of a Pool, from the thread cache and back to it.
#
# `cache_alloc` rounds the request up to a step. It pops the block of this step that was freed last.
# `cache_free` pushes a block. `heap_alloc` asks the page heap when the cache has no such block, and
# `full_free` empties the cache when it is full. The quick way calls no Python code, and the only
# lock that it takes is the cache's.
#
# The tag of a block, also called its name, consists of two numbers: that of the block's descriptor
# and that of its slot. `live` of the descriptor says whether the block is live. A second free finds
# that it is not, so it is noticed. (Unless two threads free a block at the same moment, which in C
# nothing forbids them. That is one of the uses of a raw pointer that nobody sees.)
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t

from arenapy.allocator.allocator_core cimport forbid, permit
from arenapy.base.assertion cimport arenapy_assert
from arenapy.base.atomic cimport likely
from arenapy.base.biased_lock cimport biased_enter, biased_leave
from arenapy.base.sanitizer cimport POISONS
from arenapy.base.thread_slot cimport slot_at
from arenapy.base.sizes cimport N_EXACT, N_SMALL, ROUND_LINES, ROUND_STEP, rounded, step_of
from arenapy.pool.page_heap cimport (
    BLOCK, ODD, PAGE_BITS, SPAN, Descriptor, earlier, scatter, segment_of,
)
from arenapy.pool.thread_cache cimport (
    Count, MAGAZINE_MOST, Entry, LARGE_MOST, Magazine, SKEW, ThreadCache, ThreadCaches,
)


cdef inline void count_taken(ThreadCache* f, int k, size_t size) noexcept nogil:
    cdef Count* count = &f.counts[k]
    count.allocations += 1
    count.live += size
    if count.live > count.peak:
        count.peak = count.live
    f.live += size
    if f.live > f.peak:
        f.peak = f.live


cdef inline void count_given(ThreadCache* f, int k, size_t size) noexcept nogil:
    cdef Count* count = &f.counts[k]
    count.live -= size
    f.freed += size
    count.frees += 1
    f.live -= size


# What a block's name names: a descriptor has 64 bytes, and a span at most 64 slots.
cdef inline Descriptor* named(ThreadCaches c, uint64_t block_id) noexcept nogil:
    return <Descriptor*>(<char*>c.descriptors + (block_id & ~<uint64_t>63))


# What the fields of a cache promise, as far as that takes a few instructions; its lock held.
cdef inline bint cache_is_valid(ThreadCache* f) noexcept nogil:
    arenapy_assert(f.n_large <= LARGE_MOST, b"a cache has LARGE_MOST large blocks at most")
    arenapy_assert(f.live <= f.peak, b"peak is the most that was live")
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
        d.state != SPAN or <uintptr_t>ptr == d.address + (block_id & 63) * d.size,
        b"a slot begins at a multiple of its size")
    arenapy_assert(
        <uintptr_t>ptr - d.address + d.size - (d.skew if d.state != SPAN else 0)
        <= <uint64_t>d.pages << PAGE_BITS, b"a block ends in its extent")
    return True


# Where it says whether a block is live: 1 or 0. (The low byte of `block`, which is 1 or 0, too.)
cdef inline uint8_t* live_byte(Descriptor* d, uint64_t block_id) noexcept nogil:
    return &d.live.slots[block_id & 63] if d.state == SPAN else <uint8_t*>&d.live.block


cdef inline bint block_is_live(ThreadCaches c, uint64_t block_id) noexcept nogil:
    return live_byte(named(c, block_id), block_id)[0]


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
        if i < 0:
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
            return <uint64_t>id << 6 | slot
    elif (d.state == BLOCK or d.state == ODD) and at == d.skew:
        return <uint64_t>id << 6
    return 0


# Where in its pages a block above 32 KiB begins, if so many of its bytes are not asked for. Blocks
# that all begin on a page push each other out of the caches where many are read side by side. Half
# a page, since a load waits for a store just before it whose address ends in the same 12 bits.
cdef inline char* skewed(Descriptor* d, uint64_t block_id, size_t slack) noexcept nogil:
    d.skew = <uint16_t>(block_id << 5 & SKEW) if slack >= SKEW else 0
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


# From the thread cache, its lock held: the block of the step that was freed last, for n bytes, or
# NULL. `hot`: or the one before. (Who hands it out permits n bytes of it.)
cdef inline char* pop(
    ThreadCaches c, ThreadCache* f, int s, size_t n, bint hot, uint64_t* block_id
) noexcept nogil:
    cdef Magazine* m
    cdef Descriptor* d
    cdef uint32_t id
    cdef char* ptr
    arenapy_assert(cache_is_valid(f), b"the cache is valid")
    if likely(s < N_SMALL):
        m = &f.small[s]
        if not likely(m.n):
            return NULL
        arenapy_assert(magazine_is_valid(m), b"the magazine is valid")
        m.n -= 1
        ptr = m.items[m.n].ptr
        block_id[0] = m.items[m.n].block_id
        d = named(c, block_id[0])
        arenapy_assert(not block_is_live(c, block_id[0]), b"a block in a cache is not live")
        arenapy_assert(
            not d.detail.slots >> (block_id[0] & 63) & 1, b"a slot is in a cache or in its span")
        d.live.slots[block_id[0] & 63] = 1
        count_taken(f, d.size_class, d.size)
        arenapy_assert(d.step == s, b"a block is of the step that was asked for")
        arenapy_assert(block_is_live(c, block_id[0]), b"a block that is handed out is live")
        arenapy_assert(block_is_valid(c, ptr, block_id[0]), b"the block is valid")
        arenapy_assert(cache_is_valid(f), b"the cache is valid")
        return ptr
    if s >= N_EXACT:
        return NULL
    if not likely(f.large[s - N_SMALL]):
        return NULL
    if hot:
        hotter_first(c, &f.large[s - N_SMALL])
    if c.rounding == ROUND_LINES and not c.fitting_first(&f.large[s - N_SMALL], n):
        return NULL
    id = f.large[s - N_SMALL]
    d = &c.descriptors[id]
    arenapy_assert(d.state == BLOCK, b"a large block in a cache is a BLOCK")
    arenapy_assert(d.step == s, b"a block is of the step that was asked for")
    arenapy_assert(d.live.block == 0, b"a block in a cache is not live")
    arenapy_assert(f.n_large > 0, b"large blocks in a cache were counted")
    arenapy_assert(n <= d.size, b"a block has the bytes that were asked for")
    f.large[s - N_SMALL] = d.next
    f.n_large -= 1
    f.tick += 1
    d.tick = f.tick
    block_id[0] = <uint64_t>id << 6
    d.live.block = 1
    count_taken(f, d.size_class, d.size)
    arenapy_assert(cache_is_valid(f), b"the cache is valid")
    # A device's blocks have no processor's cache lines to be skewed over.
    return <char*>d.address if c.rounding == ROUND_LINES else skewed(d, block_id[0], d.size - n)


# To the thread cache, its lock held. False: the block is not live.
cdef inline bint push(
    ThreadCaches c, ThreadCache* f, Descriptor* d, char* ptr, uint64_t block_id
) noexcept nogil:
    cdef uint32_t* head
    cdef Magazine* m
    arenapy_assert(cache_is_valid(f), b"the cache is valid")
    if likely(d.state == SPAN):
        m = &f.small[d.step]
        if not likely(m.n < m.depth):
            return c.full_free(f, ptr, block_id)
        if not likely(d.live.slots[block_id & 63]):
            return False
        d.live.slots[block_id & 63] = 0
        m.items[m.n] = Entry(ptr, block_id)
        m.n += 1
        arenapy_assert(magazine_is_valid(m), b"the magazine is valid")
    elif likely(d.state == BLOCK and f.n_large < LARGE_MOST):
        if not likely(d.live.block):
            return False
        d.live.block = 0
        f.tick += 1
        d.detail.taken = d.tick
        d.tick = f.tick
        head = &f.large[d.step - N_SMALL]
        d.next = head[0]
        head[0] = <uint32_t>(block_id >> 6)
        f.n_large += 1
    else:
        return c.full_free(f, ptr, block_id)
    forbid_block(c, d, ptr)
    count_given(f, d.size_class, d.size)
    arenapy_assert(block_is_valid(c, ptr, block_id), b"the block is valid")
    arenapy_assert(not block_is_live(c, block_id), b"a block in a cache is not live")
    arenapy_assert(cache_is_valid(f), b"the cache is valid")
    return True


# The short way: what the thread cache has, NULL if that is nothing. Not if `fast_path_off`.
cdef inline char* cache_alloc(
    ThreadCaches c, size_t n, bint hot, uint64_t* block_id
) noexcept nogil:
    cdef uint64_t me = slot_at(c.slot_offset)
    cdef ThreadCache* f = c.quick[me]
    cdef int s
    cdef char* ptr
    cdef uint64_t other = 0                  # so that a tag which nobody reads stays in a register
    if likely(c.rounding == ROUND_STEP):
        s = step_of(n)
    else:
        s = step_of(rounded(n, c.rounding))
    if not likely(biased_enter(&f.lock, me)):
        ptr = c.shared_alloc(n, s, hot, &other)
        block_id[0] = other
        return ptr
    ptr = pop(c, f, s, n, hot, block_id)
    biased_leave(&f.lock)
    if POISONS and ptr != NULL:
        permit(c, <uintptr_t>ptr, n)
    return ptr


cdef inline bint cache_free(ThreadCaches c, char* ptr, uint64_t block_id) noexcept nogil:
    cdef uint64_t me = slot_at(c.slot_offset)
    cdef ThreadCache* f = c.quick[me]
    cdef bint was_live
    if not likely(biased_enter(&f.lock, me)):
        return c.shared_free(ptr, block_id)
    was_live = push(c, f, named(c, block_id), ptr, block_id)
    biased_leave(&f.lock)
    return was_live


# The same for a block that is known by its address.
cdef inline bint cache_free_at(ThreadCaches c, char* ptr) noexcept nogil:
    cdef uint64_t me = slot_at(c.slot_offset)
    cdef ThreadCache* f = c.quick[me]
    cdef Descriptor* d
    cdef uint64_t block_id
    cdef bint was_live
    if not likely(biased_enter(&f.lock, me)):
        return c.shared_free_at(ptr)
    block_id = tag_at(c, ptr, &d)
    was_live = block_id != 0 and push(c, f, d, ptr, block_id)
    biased_leave(&f.lock)
    return was_live
