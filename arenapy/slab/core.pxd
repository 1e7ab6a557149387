# The C surface of the slab algorithm. SlabCore is what Buffers keep alive; Slab (slab.pyx) is what
# the user holds.
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from arenapy.buffer.block cimport Hold
from arenapy.base.abi cimport ARENAPY_ABI
from arenapy.base.assertion cimport arenapy_assert
from arenapy.base.atomic cimport arenapy_spin
from arenapy.base.biased_lock cimport BiasedLock
from arenapy.memory.region cimport Region
from arenapy.allocator.allocator_core cimport AllocatorCore, Leased
from arenapy.linux.reserved_space cimport ReservedArray
from arenapy.base.thread_slot cimport N_SLOTS


# -- items: stacks, caches and parts
# The C surface of items of one size.

cdef enum:
    BATCH = 64               # items that move from one stack to another at once
    STACK_DEPTH = 2 * BATCH  # items in a cache's stack, at most
    # Where in their arrays these begin: not all on the first line of a page, which would be in the
    # same set of the cache.
    GROUPS_AT = 32 * 64
    PARTS_AT = 48 * 64

# Which of BATCH neighbouring items are live, and the tick at which one of them was last taken or
# given back. Each item has a byte of its own, so that threads need no atomic instruction. Two cache
# lines, since a thread mostly fetches a whole group.
cdef struct Group:
    uint8_t live[BATCH]      # 1, or 0
    uint64_t tick
    uint64_t unused[7]

# The items of one region. Parts are numbered from 1. An item's name is its part's number << 32 |
# its index there; 0 names none.
cdef struct Part:
    char* base               # of item 0
    uint64_t items           # at most 2 ** 31; 0: this part is not in use
    uint64_t used            # <= items; those from here on are fresh: never handed out
    ReservedArray array      # has, at GROUPS_AT, the Groups
    PyObject* region         # borrowed of AllocatorCore.regions
    uint32_t next            # in the list of those with fresh items, or of those not in use
    uint32_t by_address      # of parts[i]: the number of the i-th part in use, counted from 0

# Names of free items follow this struct, in the order in which they were given back.
cdef struct Stack:
    BiasedLock lock
    uint32_t guess           # the part that an address was in last
    int64_t n                # of names
    # Since this stack's figures were last added to those of all:
    int64_t least            # <= n; the most items were live when so many were here
    int64_t out              # moved here from elsewhere less moved away; out - n went live here
    int64_t added            # the sum of out - n that was added
    uint64_t tick            # items taken from here and given back to here, ever
    ReservedArray array      # where this lies


cdef class Items(AllocatorCore):
    cdef Part* parts         # in `part_array`, never moved; parts[0] is none
    cdef size_t stride       # bytes from item to item
    cdef uint64_t inverse    # of stride's odd factor, modulo 2 ** 64
    cdef int shift           # the other factor is 1 << shift
    cdef bint fast_path_off  # not the short ways: each call is to do more
    cdef size_t item_size
    cdef size_t align        # of items
    # Free items: newest first from the stack of the thread, a small one that the depot feeds.
    cdef Stack* depot
    # The stack for the short way, by the slot of the thread: the thread's own, or one that nobody
    # owns while there is none or the slab is off the fast path.
    cdef Stack* quick[N_SLOTS + 1]
    cdef int64_t slot_offset  # slot_offset()
    cdef Stack* caches[N_SLOTS + 1]      # by slot; NULL: there is none, as for slot 0
    cdef int top_slot        # no slot above it has a stack; under `births`, and grows only
    cdef arenapy_spin births  # held to add a stack, and by who holds all locks
    cdef int64_t live        # under the depot's lock: what stacks have added up
    cdef int64_t peak        # the most that ever was live, as far as is known
    # Under the depot's lock, but for changes of parts: those are made under all locks.
    cdef ReservedArray part_array
    cdef uint32_t n_parts    # in use
    cdef uint32_t numbered   # parts that ever were in use
    cdef uint32_t fresh      # the first with fresh items, or 0
    cdef uint32_t unused     # the first that is not in use any more, or 0
    cdef uint64_t items      # of all parts
    cdef uint64_t n_fresh
    cdef size_t reserved     # bytes of the parts' regions
    cdef uint64_t grower     # the thread that asks the source, or 0
    cdef uint32_t growths    # of that thread, one within the other

    cdef int open(self, size_t item_size, size_t align, uint64_t most) except -1
    # NULL: nothing is free.
    cdef char* heap_alloc(self, uint64_t* name) noexcept nogil
    # Items for n Buffers, or for none of them.
    cdef bint take_batch(self, PyObject** buffers, Py_ssize_t n) noexcept nogil
    # The name of the item at an address, live or not; 0: there is none. Any stack's lock held.
    cdef uint64_t find(self, Stack* s, char* at) noexcept nogil
    cdef uint64_t idle(self) noexcept nogil
    # Growth, by one thread at a time. It asks the source, and there runs code of anybody: a
    # finalizer or a signal handler may allocate, and so grow within the growth. False: another
    # thread grows.
    cdef bint begin_growth(self) noexcept nogil
    cdef void end_growth(self) noexcept nogil
    cdef void forget_growth(self) noexcept nogil
    # False: there would be more than `most` items, because something else has grown meanwhile.
    cdef bint add_part(self, Region region, uint64_t items, uint64_t most) except -1
    cdef bint add_pinned(self, Region region, uint64_t items, uint64_t most) except -1
    # Take a region that has no live item out. False: it has.
    cdef bint remove_part(self, Region region) except -1
    cdef void lock_all(self) noexcept nogil
    cdef void unlock_all(self) noexcept nogil
    # Not the short ways any more, or again.
    cdef void set_fast_path_off(self, bint fast_path_off) noexcept nogil
    # The short ways, for a thread that does not own the lock of its stack.
    cdef char* shared_alloc(self, uint64_t* name) noexcept nogil
    cdef bint shared_free(self, uint64_t name) noexcept nogil
    cdef bint shared_free_at(self, char* at) noexcept nogil
    cdef Stack* own_stack(self) noexcept nogil
    # internal
    cdef void add_up(self, Stack* s) noexcept nogil
    cdef void add_up_all(self) noexcept nogil
    cdef bint refill(self, Stack* s) noexcept nogil
    cdef bint gather(self, Stack* s) noexcept nogil
    cdef void spill(self, Stack* s, int64_t keep) noexcept nogil
    cdef void make_place(self, Stack* s) noexcept nogil
    cdef void link_part(self, uint32_t number) noexcept nogil
    cdef bint unlink_part(self, PyObject* region, Part* old) noexcept nogil


# Where the first item of a region lies.
cdef char* first_item(Region region, size_t align) noexcept nogil


cdef extern from *:
    """
    /* offset / stride, exact for multiples of it; for other offsets more than any index. For
       stride = odd << shift and inverse * odd = 1 (mod 2**64) this maps offsets one to one. */
    static inline uint64_t arenapy_item_index(uint64_t offset, uint64_t inverse, int shift) {
        uint64_t q = offset * inverse;
        return q >> shift | q << (-shift & 63);
    }
    /* Two threads with stacks of their own may say at once when an item of a group changed. */
    #define arenapy_note(p, tick) __atomic_store_n(p, tick, __ATOMIC_RELAXED)
    """
    uint64_t item_index "arenapy_item_index" (
        uint64_t offset, uint64_t inverse, int shift) noexcept nogil
    void note "arenapy_note" (uint64_t* p, uint64_t tick) noexcept nogil


cdef inline uint64_t* names_of(Stack* s) noexcept nogil:
    return <uint64_t*>(s + 1)


# The Group of the items from BATCH * i on.
cdef inline Group* nth_group(Part* p, uint64_t i) noexcept nogil:
    return <Group*>(p.array.at + GROUPS_AT) + i


cdef inline Group* group_of(Items c, uint64_t name) noexcept nogil:
    return nth_group(&c.parts[name >> 32], <uint32_t>name >> 6)


cdef inline char* address_of(Items c, uint64_t name) noexcept nogil:
    return c.parts[name >> 32].base + <uint32_t>name * c.stride


# The invariants of the fields above that take a few instructions to check. The stack's lock held.
cdef inline bint stack_is_valid(Items c, Stack* s) noexcept nogil:
    arenapy_assert(0 <= s.n, b"0 <= n of a stack")
    arenapy_assert(s.least <= s.n, b"least <= n of a stack")
    arenapy_assert(
        s == c.depot or s.n <= STACK_DEPTH, b"a thread's stack has STACK_DEPTH names at most")
    arenapy_assert(
        sizeof(Stack) + <size_t>s.n * sizeof(uint64_t) <= s.array.ready,
        b"a stack's names have memory")
    return True


# The same of a name that is in a stack, or was handed out.
cdef inline bint name_is_valid(Items c, uint64_t name) noexcept nogil:
    arenapy_assert(1 <= name >> 32, b"a name has a part")
    arenapy_assert(name >> 32 <= c.numbered, b"a name's part was in use")
    arenapy_assert(
        <uint32_t>name < c.parts[name >> 32].used, b"a name lies below its part's fresh items")
    return True


cdef inline bint item_is_live(Items c, uint64_t name) noexcept nogil:
    return group_of(c, name).live[name & 63]


# -- core

cdef struct SlabFigures:
    uint64_t items, active, pending, allocations, peak
    size_t reserved, metadata
    Py_ssize_t regions


cdef class SlabCore(Items):
    cdef uint64_t claimed    # atomic: items that are neither live nor in a stack, pending ones too
    cdef uint64_t n_pending  # under the depot's lock, as is:
    cdef Leased leased
    cdef Hold* aside         # items that streams are at work on

    cdef void ready(self) noexcept nogil
    cdef void update_fast_path(self) noexcept nogil
    # All that is to be done on either way, also when `fast_path_off`. NULL: nothing is free.
    cdef char* alloc_block(self, size_t nbytes, uint64_t* name) noexcept nogil
    cdef bint free_block(self, uint64_t name) noexcept nogil
    # Items for n Buffers, or for none of them.
    cdef bint alloc_blocks(self, PyObject** buffers, Py_ssize_t n) noexcept nogil
    # Free what other processes have let go of, until `most` in a row are seen; the items.
    cdef size_t reclaim_leases(self, Py_ssize_t most) noexcept nogil
    cdef SlabFigures figures(self) noexcept nogil
    cdef uint64_t exchange_peak(self, uint64_t peak) noexcept nogil
    # internal
    cdef bint claim(self, uint64_t name) noexcept nogil
    cdef void free_claimed(self, uint64_t name) noexcept nogil
    cdef bint still_leased(self, uint64_t name) noexcept nogil
