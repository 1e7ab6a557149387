"""The invariants of a slab's bookkeeping, and a listing of its items.

What lives here: reading all of it under all locks, then telling. Nothing is changed. Every figure
that is kept is counted again.
"""
cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc

from arenapy.base.atomic cimport arenapy_load
from arenapy.buffer.block cimport Hold
from arenapy.memory.region cimport Region
from arenapy.base.sealed cimport seal
from arenapy.base.sizes cimport class_of
from arenapy.slab.core cimport (
    BATCH, STACK_DEPTH, Group, Part, SlabCore, Stack, names_of, nth_group,
)


# ---- the listing -------------------------------------------------------------------------

cdef struct Copied:
    char* base
    uint64_t items
    Group* groups            # of a copy of all parts' groups


@cython.final
cdef class Listing:
    """Yields the items as they were when it was made, by address."""
    cdef Copied* parts
    cdef Group* groups
    cdef uint32_t n_parts, part
    cdef uint64_t item, now
    cdef size_t stride
    cdef set pending
    cdef object info         # the class BlockInfo
    cdef int size_class

    def __iter__(self):
        return self

    def __next__(self):
        cdef uint32_t part
        cdef uint64_t item
        cdef Copied* p
        cdef Group* group
        part, item = self.part, self.item    # another thread may change them
        while part < self.n_parts and item >= self.parts[part].items:
            part += 1
            item = 0
        self.part, self.item = part, item + 1
        if part >= self.n_parts:
            raise StopIteration
        p = &self.parts[part]
        group = &p.groups[item >> 6]
        address = <uintptr_t>p.base + item * self.stride
        if group.live[item & 63]:
            state = "live"
        else:
            state = "pending" if address in self.pending else "idle"
        return self.info(
            address, self.stride, self.size_class, state, max(self.now, group.tick) - group.tick)

    def __dealloc__(self):
        free(self.parts)
        free(self.groups)


seal(Listing)


cdef bint copy_parts(SlabCore c, Listing found) noexcept nogil:
    """False: no memory for a copy. All locks held."""
    cdef uint64_t i, w, n = 0
    cdef Part* p
    cdef Stack* s
    for i in range(c.n_parts):
        n += (c.parts[c.parts[i].by_address].items + 63) >> 6
    found.parts = <Copied*>malloc((c.n_parts + 1) * sizeof(Copied))
    found.groups = <Group*>malloc((n + 1) * sizeof(Group))
    if found.parts == NULL or found.groups == NULL:
        return False
    n = 0
    for i in range(c.n_parts):
        p = &c.parts[c.parts[i].by_address]
        found.parts[i] = Copied(p.base, p.items, found.groups + n)
        for w in range((p.items + 63) >> 6):
            found.groups[n] = nth_group(p, w)[0]
            n += 1
    found.n_parts = c.n_parts
    for i in range(c.top_slot + 1):
        s = c.caches[i] if i else c.depot
        if s != NULL:
            found.now = max(found.now, s.tick)
    return True


def listing(SlabCore c not None):
    """The items as they are now."""
    from arenapy.stats import BlockInfo

    cdef Listing found = Listing.__new__(Listing)
    cdef uintptr_t* pending
    cdef Hold* hold
    cdef uint64_t i, n = 0
    cdef bint done = False
    cdef int k
    found.pending = set()
    found.info = BlockInfo
    found.stride = c.stride
    found.size_class = class_of(c.stride)
    with nogil:
        c.lock_all()
        pending = <uintptr_t*>malloc((c.n_pending + 1) * sizeof(uintptr_t))
        if pending != NULL:
            done = copy_parts(c, found)
            for k in range(2):
                hold = c.aside if k else c.leased.first
                while hold != NULL and n < c.n_pending:
                    pending[n] = <uintptr_t>(
                        c.parts[hold.tag >> 32].base + <uint32_t>hold.tag * c.stride)
                    hold = hold.next
                    n += 1
        c.unlock_all()
    for i in range(n):
        found.pending.add(pending[i])
    free(pending)
    if not done:
        raise MemoryError("no memory for a list of all items")
    return found


# ---- the check ---------------------------------------------------------------------------

# An error and its place; `why` NULL: none.
cdef struct Fault:
    const char* why
    uintptr_t address
    int64_t was, expected


cdef bint fault(
    Fault* f, bint wrong, const char* why, uintptr_t address, int64_t was, int64_t expected
) noexcept nogil:
    """Note the first thing that is wrong."""
    if wrong and f.why == NULL:
        f.why, f.address, f.was, f.expected = why, address, was, expected
    return f.why != NULL


cdef uint64_t check_parts(SlabCore c, Fault* f) noexcept nogil:
    """Each part lies in its region and below the next one. How many items are live."""
    cdef uint64_t i, w, items = 0, fresh = 0, live = 0
    cdef int k
    cdef size_t reserved = 0
    cdef uintptr_t end = 0, at
    cdef uint32_t number
    cdef Part* p
    for i in range(c.n_parts):
        number = c.parts[i].by_address
        if fault(f, number == 0 or number > c.numbered or c.parts[number].items == 0,
                 b"the order of parts names one that is none", 0, number, c.numbered):
            return 0
        p = &c.parts[number]
        at = <uintptr_t>p.base
        fault(f, at < end, b"parts overlap, or are out of order", at, at, end)
        end = at + p.items * c.stride
        fault(f, at & (c.align - 1) != 0, b"a part is not aligned", at, at, c.align)
        fault(f, at < <uintptr_t>(<Region>p.region).ptr
              or end > <uintptr_t>(<Region>p.region).ptr + (<Region>p.region).size,
              b"a part is not within its region", at, p.items, (<Region>p.region).size)
        fault(f, p.used > p.items, b"more items were used than a part has", at, p.used, p.items)
        for w in range((p.items + 63) >> 6):
            for k in range(BATCH):
                live += nth_group(p, w).live[k]
        items += p.items
        fresh += p.items - p.used
        reserved += (<Region>p.region).size
    fault(f, items != c.items, b"items were miscounted", 0, c.items, items)
    fault(f, fresh != c.n_fresh, b"fresh items were miscounted", 0, c.n_fresh, fresh)
    fault(f, reserved != c.reserved, b"reserved bytes were miscounted", 0, c.reserved, reserved)
    number, w = c.fresh, 0
    while number and w <= c.n_parts:
        p = &c.parts[number]
        fault(f, p.used >= p.items, b"a part that is used up is listed as fresh",
              <uintptr_t>p.base, p.used, p.items)
        fresh -= p.items - p.used
        number = p.next
        w += 1
    fault(f, fresh != 0, b"fresh items are not all listed", 0, fresh, 0)
    return live


cdef uint64_t check_stack(
    SlabCore c, Stack* s, uint64_t** seen, Fault* f
) noexcept nogil:
    """Check that every item in it is free, and in no other stack. Returns the number of items."""
    cdef int64_t i
    cdef uint64_t name, bit
    cdef uint32_t number, index
    cdef Part* p
    cdef uintptr_t at
    fault(f, s.n < 0 or (s != c.depot and s.n > STACK_DEPTH), b"a stack is too long", 0, s.n,
          STACK_DEPTH)
    fault(f, s.least > s.n, b"a stack had more items at least than it has now", 0, s.least, s.n)
    fault(f, (s.tick + <uint64_t>(s.added + s.out - s.n)) & 1, b"operations were miscounted", 0,
          s.tick, s.added + s.out - s.n)
    for i in range(s.n):
        name = names_of(s)[i]
        number, index = <uint32_t>(name >> 32), <uint32_t>name
        if fault(f, number == 0 or number > c.numbered or index >= c.parts[number].used,
                 b"a stack has an item that never was handed out", 0, number, index):
            break
        p = &c.parts[number]
        at = <uintptr_t>p.base + index * c.stride
        bit = <uint64_t>1 << (index & 63)
        fault(f, nth_group(p, index >> 6).live[index & 63], b"a live item is in a stack", at, 1, 0)
        fault(f, seen[number][index >> 6] & bit, b"an item is in the stacks twice", at, 2, 1)
        seen[number][index >> 6] |= bit
    return <uint64_t>s.n


cdef void check_all(SlabCore c, uint64_t** seen, Fault* f) noexcept nogil:
    cdef uint64_t live, free_items = 0, claimed = arenapy_load(&c.claimed)
    cdef uint64_t pending = 0
    cdef Stack* s
    cdef Hold* hold
    cdef int k
    live = check_parts(c, f)
    if f.why != NULL:
        return
    for k in range(c.top_slot + 1):
        s = c.caches[k] if k else c.depot
        if s != NULL and f.why == NULL:
            free_items += check_stack(c, s, seen, f)
    for k in range(2):
        hold = c.aside if k else c.leased.first
        while hold != NULL:
            pending += 1
            hold = hold.next
    fault(f, pending > c.n_pending or c.n_pending > claimed, b"pending items were miscounted", 0,
          c.n_pending, pending)
    fault(f, live + free_items + c.n_fresh + claimed != c.items,
          b"items are neither live nor free", 0, live + free_items + c.n_fresh + claimed, c.items)
    fault(f, c.live != <int64_t>(live + claimed), b"live items were miscounted", 0, c.live,
          live + claimed)
    fault(f, c.peak < c.live, b"more is live than ever was", 0, c.peak, c.live)


def verify(SlabCore c not None):
    """Raise AssertionError, naming the first thing that is wrong; O(items)."""
    cdef Fault f = Fault(NULL, 0, 0, 0)
    cdef uint64_t** seen
    cdef uint32_t k
    cdef bint room
    if c.shut:
        return
    c.check()
    with nogil:
        c.lock_all()
        c.add_up_all()
        seen = <uint64_t**>calloc(c.numbered + 1, sizeof(uint64_t*))
        room = seen != NULL
        for k in range(1, c.numbered + 1):
            if room and c.parts[k].items:
                seen[k] = <uint64_t*>calloc((c.parts[k].items + 63) >> 6, sizeof(uint64_t))
                room = seen[k] != NULL
        if room:
            check_all(c, seen, &f)
        for k in range(1, c.numbered + 1):
            if seen != NULL:
                free(seen[k])
        free(seen)
        c.unlock_all()
    if not room:
        raise MemoryError("no memory to check a slab")
    if f.why != NULL:
        raise AssertionError(
            f"{f.why.decode()}: at {f.address:#x}, found {f.was}, expected {f.expected}"
        )
