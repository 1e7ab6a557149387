"""Slab's side of the Buffer protocol: an item whose Buffer is dropped, exported, leased or forked.

What lives here: dropped Buffers, bytes that other processes see, fork, figures. What does not:
which items are free (slots), getting memory from a source, errors (slab).

An item that is given back the long way is claimed first: its bit is cleared, and it is in no stack
until all is done that takes time. So nothing is done twice, and nothing under a lock.
"""
cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memmove, memset

from arenapy.base.assertion cimport arenapy_assert
from arenapy.base.atomic cimport (
    arenapy_add, arenapy_count, arenapy_load, arenapy_load_ptr, arenapy_lock_acquire,
    arenapy_lock_release, arenapy_spin_acquire, arenapy_spin_release, arenapy_store_ptr,
    arenapy_sub, rank_spin,
)
from arenapy.buffer.block cimport HELD, Block, Hold
from arenapy.diagnostics.recorder cimport EVENT_ALLOC, EVENT_FREE, EVENT_GROW, EVENT_TRIM
from arenapy.base.biased_lock cimport (
    NOBODY, biased_acquire, biased_alone, biased_release, rank_biased,
)
from arenapy.base.sanitizer cimport POISON_UNIT, POISONS
from arenapy.memory.region cimport Region
from arenapy.allocator.allocator_core cimport (
    LEASES_ASKED, AllocatorCore, add_leased, forbid_new, link_hold, record, take_leased,
    unlink_hold,
)
from arenapy.base.sealed cimport seal
from arenapy.slab.hot_path cimport cache_free, forbid_from, pop, push, push_at, stow
from arenapy.base.thread_slot cimport (
    N_SLOTS, RANK_BIRTHS, RANK_CACHE, RANK_DEPOT, cache_number, slot_offset,
)
from arenapy.slab.core cimport Group, item_is_live, name_is_valid, nth_group, stack_is_valid
from arenapy.memory.children cimport Seen, children_ask, seen_add
from arenapy.linux.reserved_space cimport ReservedArray, array_close, array_grow, array_open


# ---- items: stacks, caches and parts -----------------------------------------------------
# Items of one size: which are free, in what order, and where they lie.
#
# What lives here: stacks of free items, the bitmap of live ones, parts (the items of one region).
# What does not: Buffers, leases and forks (core), getting memory from a source, errors.
#
# Why it is fast: to allocate is to pop a name from a stack and to set a bit, to give back is the
# reverse. Items that were never handed out are in no stack: a part remembers how far it was used,
# and refills an empty stack by the batch, so that growth does not touch them. All of it lies in
# arrays out of band, faulted in beforehand, which never move.
#
# Locks: `births`, a stack's own, the depot's, in this order. Parts, which every path reads, change
# under all of them.

cdef extern from "<pthread.h>" nogil:
    uint64_t this_thread "(uint64_t)pthread_self" ()

cdef enum:
    MAX_PARTS = 1 << 16

# In the place of a stack that is not there, or is not to be used. Nobody enters its lock.
cdef Stack no_stack
no_stack.lock.owner = NOBODY


cdef Stack* new_stack(uint64_t most, uint64_t now, int rank) noexcept nogil:
    """A stack of at most so many names, with room for some of them now; NULL without memory."""
    cdef ReservedArray array
    cdef Stack* s
    if not array_open(&array, sizeof(Stack) + most * sizeof(uint64_t)):
        return NULL
    if not array_grow(&array, sizeof(Stack) + now * sizeof(uint64_t)):
        array_close(&array)
        return NULL
    s = <Stack*>array.at                     # fresh pages are zero
    s.array = array
    rank_biased(&s.lock, rank)
    return s


cdef void drop_stack(Stack* s) noexcept nogil:
    cdef ReservedArray array
    if s != NULL:
        array = s.array
        array_close(&array)


cdef inline void shift(Stack* s, int64_t n) noexcept nogil:
    """So many names more are here, which says nothing of what is live."""
    s.n += n
    s.least += n
    s.out += n


@cython.no_gc_clear
cdef class Items(AllocatorCore):
    """Items of one size, in regions. Internal."""

    def __dealloc__(self):
        cdef uint32_t k
        for k in range(1, self.numbered + 1):
            array_close(&self.parts[k].array)
        array_close(&self.part_array)
        for k in range(1, self.top_slot + 1):
            drop_stack(self.caches[k])
        drop_stack(self.depot)

    cdef int open(self, size_t item_size, size_t align, uint64_t most) except -1:
        """Make ready for at most so many items; there is no memory yet."""
        cdef uint64_t odd
        self.item_size, self.align = item_size, align
        self.stride = odd = (max(item_size, <size_t>1) + align - 1) & ~(align - 1)
        while not odd & 1:
            odd >>= 1
            self.shift += 1
        self.inverse = odd                   # right in the last 3 bits, then in twice as many
        for _ in range(5):
            self.inverse *= 2 - odd * self.inverse
        self.depot = new_stack(most, 0, RANK_DEPOT)
        if (self.depot == NULL
                or not array_open(&self.part_array, PARTS_AT + (MAX_PARTS + 1) * sizeof(Part))
                or not array_grow(&self.part_array, PARTS_AT + sizeof(Part))):
            raise MemoryError(f"no memory for the bookkeeping of a slab of {most} items")
        self.parts = <Part*>(self.part_array.at + PARTS_AT)
        rank_spin(&self.births, RANK_BIRTHS)
        self.slot_offset = slot_offset()
        self.set_fast_path_off(self.fast_path_off)
        return 0

    # -- stacks

    cdef Stack* own_stack(self) noexcept nogil:
        """The stack of this thread; the depot if there is no memory for another one."""
        cdef int i = cache_number()
        cdef Stack* s = <Stack*>arenapy_load_ptr(<void**>&self.caches[i])
        cdef Stack* made
        if s != NULL:
            return s
        made = new_stack(STACK_DEPTH, STACK_DEPTH, RANK_CACHE)
        if made == NULL:
            return self.depot
        arenapy_spin_acquire(&self.births)
        s = self.caches[i]
        if s == NULL:
            self.top_slot = max(self.top_slot, i)
            arenapy_store_ptr(<void**>&self.caches[i], made)
            if not self.fast_path_off:
                arenapy_store_ptr(<void**>&self.quick[i], made)
        arenapy_spin_release(&self.births)
        if s == NULL:
            return made
        drop_stack(made)                     # of threads that share a slot, another was first
        return s

    cdef void add_up(self, Stack* s) noexcept nogil:
        """Add a stack's figures to those of all; its lock and the depot's are held."""
        self.peak = max(self.peak, self.live + s.out - s.least)
        self.live += s.out - s.n
        s.added += s.out - s.n
        s.out = s.least = s.n

    cdef void add_up_all(self) noexcept nogil:
        """All figures; all locks are held."""
        cdef int64_t live = 0, above = 0
        cdef int k
        cdef Stack* s
        for k in range(self.top_slot + 1):
            s = self.caches[k] if k else self.depot
            if s != NULL:
                live += s.out - s.n
                above = max(above, s.n - s.least)
                s.added += s.out - s.n
                s.out = s.least = s.n
        self.live += live
        self.peak = max(self.peak, self.live + above)

    cdef bint refill(self, Stack* s) noexcept nogil:
        """Move items to an empty stack, its lock and the depot's held. False: there are none."""
        cdef Stack* depot = self.depot
        cdef Part* p = &self.parts[self.fresh]
        cdef uint64_t n, i, last
        self.add_up(s)
        if s != depot and depot.n > 0:
            n = min(depot.n, <int64_t>BATCH)
            memcpy(names_of(s), names_of(depot) + depot.n - n, n * sizeof(uint64_t))
            shift(depot, -<int64_t>n)
        elif self.fresh:
            n = min(p.items - p.used, <uint64_t>BATCH)
            last = (<uint64_t>self.fresh << 32) + p.used + n - 1
            for i in range(n):               # the lowest address is handed out first
                names_of(s)[i] = last - i
            p.used += n
            arenapy_assert(p.used <= p.items, b"used <= items of a part")
            arenapy_assert(n <= self.n_fresh, b"fresh items were counted")
            self.n_fresh -= n
            if p.used == p.items:
                self.fresh = p.next
        else:
            return False
        shift(s, n)
        arenapy_assert(stack_is_valid(self, s), b"the stack is valid")
        arenapy_assert(stack_is_valid(self, depot), b"the stack is valid")
        arenapy_assert(name_is_valid(self, names_of(s)[0]), b"the name is valid")
        return True

    cdef void spill(self, Stack* s, int64_t keep) noexcept nogil:
        """Move all but the newest items of a stack to the depot. Both locks held."""
        cdef int64_t n = s.n - keep
        if n <= 0:
            return
        self.add_up(s)
        memcpy(names_of(self.depot) + self.depot.n, names_of(s), n * sizeof(uint64_t))
        memmove(names_of(s), names_of(s) + n, keep * sizeof(uint64_t))
        shift(s, -n)
        shift(self.depot, n)
        arenapy_assert(stack_is_valid(self, s), b"the stack is valid")
        arenapy_assert(stack_is_valid(self, self.depot), b"the stack is valid")

    cdef void make_place(self, Stack* s) noexcept nogil:
        """In a full stack, whose lock is held."""
        biased_acquire(&self.depot.lock)
        self.spill(s, STACK_DEPTH - BATCH)
        biased_release(&self.depot.lock)

    cdef bint gather(self, Stack* s) noexcept nogil:
        """Refill an empty stack also from those of other threads. All locks held."""
        cdef int i
        if self.refill(s):
            return True
        for i in range(1, self.top_slot + 1):
            if self.caches[i] != NULL:
                self.spill(self.caches[i], 0)
        return s.n > 0 or self.refill(s)

    cdef char* heap_alloc(self, uint64_t* name) noexcept nogil:
        cdef Stack* s = self.own_stack()
        cdef char* ptr = NULL
        biased_acquire(&s.lock)
        if s.n == 0:
            if s != self.depot:
                biased_acquire(&self.depot.lock)
            self.refill(s)
            if s != self.depot:
                biased_release(&self.depot.lock)
        if s.n > 0:
            ptr = pop(self, s, name)
        biased_release(&s.lock)
        if ptr == NULL:
            self.lock_all()
            if s.n > 0 or self.gather(s):
                ptr = pop(self, s, name)
            self.unlock_all()
        return ptr

    cdef void set_fast_path_off(self, bint fast_path_off) noexcept nogil:
        cdef int i
        self.fast_path_off = fast_path_off   # under `births`, or where no other thread runs
        for i in range(N_SLOTS + 1):
            arenapy_store_ptr(
                <void**>&self.quick[i],
                &no_stack if fast_path_off or self.caches[i] == NULL else self.caches[i])

    cdef char* shared_alloc(self, uint64_t* name) noexcept nogil:
        cdef Stack* s = self.own_stack()
        cdef char* ptr = NULL
        if self.fast_path_off:
            return NULL
        biased_acquire(&s.lock)
        if s.n > 0:
            ptr = pop(self, s, name)
        biased_release(&s.lock)
        return ptr

    cdef bint shared_free(self, uint64_t name) noexcept nogil:
        cdef Stack* s = self.own_stack()
        cdef bint was_live
        if self.fast_path_off:
            return False
        biased_acquire(&s.lock)
        was_live = push(self, s, group_of(self, name), name)
        biased_release(&s.lock)
        return was_live

    cdef bint shared_free_at(self, char* at) noexcept nogil:
        cdef Stack* s = self.own_stack()
        cdef bint was_live
        if self.fast_path_off:
            return False
        biased_acquire(&s.lock)
        was_live = push_at(self, s, at)
        biased_release(&s.lock)
        return was_live

    cdef bint take_batch(self, PyObject** buffers, Py_ssize_t n) noexcept nogil:
        cdef Stack* s = self.own_stack()
        cdef Py_ssize_t i
        cdef bint enough
        self.lock_all()
        enough = free_items(self) >= <uint64_t>n
        if enough:
            for i in range(n):
                if s.n == 0:
                    self.gather(s)
                (<Block>buffers[i]).ptr = pop(self, s, &(<Block>buffers[i]).tag)
                (<Block>buffers[i]).word = 0
        self.unlock_all()
        return enough

    cdef uint64_t find(self, Stack* s, char* at) noexcept nogil:
        cdef uint32_t low = 0, high = self.n_parts, middle, number
        cdef uint64_t index
        while low < high:                    # the first part that begins above
            middle = (low + high) // 2
            if self.parts[self.parts[middle].by_address].base <= at:
                low = middle + 1
            else:
                high = middle
        if low == 0:
            return 0
        number = self.parts[low - 1].by_address
        index = item_index(<uint64_t>(at - self.parts[number].base), self.inverse, self.shift)
        if index >= self.parts[number].items:
            return 0
        s.guess = number
        return <uint64_t>number << 32 | index

    cdef uint64_t idle(self) noexcept nogil:
        cdef uint64_t n
        self.lock_all()
        n = free_items(self)
        self.unlock_all()
        return n

    # -- parts

    cdef bint begin_growth(self) noexcept nogil:
        cdef bint mine
        biased_acquire(&self.depot.lock)
        mine = self.grower == 0 or self.grower == this_thread()
        if mine:
            self.grower = this_thread()
            self.growths += 1
        biased_release(&self.depot.lock)
        return mine

    cdef void end_growth(self) noexcept nogil:
        biased_acquire(&self.depot.lock)
        self.growths -= 1                    # greenlets may end them in any order
        if self.growths == 0:
            self.grower = 0
        biased_release(&self.depot.lock)

    cdef void forget_growth(self) noexcept nogil:
        """In a forked child: of threads that it does not have. All locks held."""
        if self.grower != this_thread():
            self.grower = self.growths = 0

    cdef bint add_part(self, Region region, uint64_t items, uint64_t most) except -1:
        """Take over the first `items` items of a region."""
        region.pin_unused()                  # another thread may close it as soon as it is here
        try:
            return self.add_pinned(region, items, most)
        finally:
            region.unpin()

    cdef bint add_pinned(self, Region region, uint64_t items, uint64_t most) except -1:
        cdef uint32_t number
        cdef Part* p
        cdef ReservedArray array
        cdef bint fits
        if not array_open(&array, GROUPS_AT + ((items + 63) >> 6) * sizeof(Group)):
            raise MemoryError("no address space for the bookkeeping of a slab")
        try:
            if not array_grow(&array, array.reserved):
                raise MemoryError("no memory for the bookkeeping of a slab")
            self.share_region(region)
        except BaseException:
            array_close(&array)
            raise
        # From here on no code of Python's runs, which might grow the slab too.
        fits = items + self.items <= most
        if (not fits or (self.unused == 0 and self.numbered == MAX_PARTS)
                or not array_grow(
                    &self.part_array,
                    PARTS_AT + (min(self.numbered + 1, <uint32_t>MAX_PARTS) + 1) * sizeof(Part))
                or not array_grow(
                    &self.depot.array, sizeof(Stack) + (self.items + items) * sizeof(uint64_t))):
            array_close(&array)
            self.drop_region(region)
            if fits:
                raise MemoryError("no memory for the bookkeeping of a slab")
            return False
        if POISONS:
            if self.align >= POISON_UNIT:
                forbid_new(self, <uintptr_t>region.ptr, <uintptr_t>region.ptr + region.size)
        self.lock_all()
        if self.unused:                      # another thread may have removed a part meanwhile
            number = self.unused
            self.unused = self.parts[number].next
        else:
            number = self.numbered = self.numbered + 1
        p = &self.parts[number]
        p.base = first_item(region, self.align)
        p.items, p.used = items, 0
        p.array = array
        p.region = <PyObject*>region
        self.link_part(number)
        self.items += items
        self.reserved += region.size
        self.unlock_all()
        record(self, EVENT_GROW, region.ptr, region.size)
        return True

    cdef void link_part(self, uint32_t number) noexcept nogil:
        """Into the list of those with fresh items, and the order of addresses."""
        cdef uint32_t i = self.n_parts
        cdef uint32_t* link = &self.fresh
        cdef Part* p = &self.parts[number]
        while i > 0 and self.parts[self.parts[i - 1].by_address].base > p.base:
            self.parts[i].by_address = self.parts[i - 1].by_address
            i -= 1
        self.parts[i].by_address = number
        self.n_parts += 1
        while link[0]:                       # last, so that items are used in the order of growth
            link = &self.parts[link[0]].next
        link[0] = number
        p.next = 0
        self.n_fresh += p.items

    cdef bint unlink_part(self, PyObject* region, Part* old) noexcept nogil:
        """Remove the part of a region, a copy of which is `old`. False: an item is not free."""
        cdef Stack* depot = self.depot
        cdef uint64_t* names = names_of(depot)
        cdef uint32_t* link = &self.fresh
        cdef uint32_t number, place
        cdef uint64_t i
        cdef int64_t n, kept = 0
        for place in range(self.n_parts):
            number = self.parts[place].by_address
            if self.parts[number].region == region:
                break
        else:
            return False
        old[0] = self.parts[number]
        for i in range((old.items + 63) >> 6):
            if has_live(nth_group(old, i)):
                return False
        for i in range(1, self.top_slot + 1):
            if self.caches[i] != NULL:
                self.spill(self.caches[i], 0)
        for n in range(depot.n):
            kept += names[n] >> 32 != number
        if depot.n - kept != <int64_t>old.used:
            return False                     # some are pending
        kept = 0
        for n in range(depot.n):
            if names[n] >> 32 != number:
                names[kept] = names[n]
                kept += 1
        shift(depot, kept - depot.n)
        if old.used < old.items:
            while link[0] != number:
                link = &self.parts[link[0]].next
            link[0] = old.next
            self.n_fresh -= old.items - old.used
        self.n_parts -= 1
        for place in range(place, self.n_parts):
            self.parts[place].by_address = self.parts[place + 1].by_address
        self.items -= old.items
        self.reserved -= (<Region>region).size
        self.parts[number].items = self.parts[number].used = 0
        self.parts[number].array.at = NULL
        self.parts[number].region = NULL
        self.parts[number].next = self.unused
        self.unused = number
        return True

    cdef bint remove_part(self, Region region) except -1:
        cdef Part old
        cdef bint done
        self.lock_all()
        done = self.unlink_part(<PyObject*>region, &old)
        self.unlock_all()
        if done:
            array_close(&old.array)
            record(self, EVENT_TRIM, region.ptr, region.size)
            self.drop_region(region)
        return done

    # -- all locks

    cdef void lock_all(self) noexcept nogil:
        cdef int i
        arenapy_spin_acquire(&self.births)
        for i in range(1, self.top_slot + 1):
            if self.caches[i] != NULL:
                biased_acquire(&self.caches[i].lock)
        biased_acquire(&self.depot.lock)

    cdef void unlock_all(self) noexcept nogil:
        cdef int i
        biased_release(&self.depot.lock)
        for i in range(1, self.top_slot + 1):
            if self.caches[i] != NULL:
                biased_release(&self.caches[i].lock)
        arenapy_spin_release(&self.births)


seal(Items)


cdef char* first_item(Region region, size_t align) noexcept nogil:
    return <char*>((<uintptr_t>region.ptr + align - 1) & ~<uintptr_t>(align - 1))


cdef bint has_live(Group* group) noexcept nogil:
    cdef uint64_t* words = <uint64_t*>&group.live[0]
    cdef int i
    for i in range(BATCH // 8):
        if words[i]:
            return True
    return False


cdef uint64_t free_items(Items c) noexcept nogil:
    """In all stacks and in none yet; all locks held."""
    cdef uint64_t n = c.n_fresh + <uint64_t>c.depot.n
    cdef int i
    for i in range(1, c.top_slot + 1):
        if c.caches[i] != NULL:
            n += <uint64_t>c.caches[i].n
    return n


# ---- core -----------------------------------------------------

@cython.final
@cython.no_gc_clear
cdef class SlabCore(Items):
    """The memory and bookkeeping of a Slab. Internal; Buffers keep it alive."""

    def __cinit__(self):
        self.what = "slab"
        self.recycles = True
        self.shut = True                     # until `ready`
        self.set_fast_path_off(True)

    def __dealloc__(self):
        self.finish()
        while self.leased.n:
            free(take_leased(&self.leased))

    cdef void ready(self) noexcept nogil:
        """There is a first region."""
        arenapy_lock_acquire(&self.lock)
        self.shut = self.gone != 0           # its first region was closed since, perhaps
        arenapy_lock_release(&self.lock)
        self.update_fast_path()

    cdef void update_fast_path(self) noexcept nogil:
        """After what it depends on has changed."""
        arenapy_spin_acquire(&self.births)   # no other thread, and no fork, changes it meanwhile
        self.set_fast_path_off(is_fast_path_off(self))
        arenapy_spin_release(&self.births)

    # -- items

    cdef char* alloc_block(self, size_t nbytes, uint64_t* name) noexcept nogil:
        cdef char* ptr
        if self.shut:
            return NULL
        ptr = self.heap_alloc(name)
        if ptr == NULL and self.leased.n and self.reclaim_leases(LEASES_ASKED):
            ptr = self.heap_alloc(name)
        if ptr != NULL:
            if POISONS:
                forbid_from(self, ptr, nbytes, self.item_size)
            record(self, EVENT_ALLOC, ptr, nbytes)
            if self.debug:
                self.began(ptr, self.stride, nbytes)
        return ptr

    cdef bint alloc_blocks(self, PyObject** buffers, Py_ssize_t n) noexcept nogil:
        cdef Py_ssize_t i
        if self.shut or not self.take_batch(buffers, n):
            return False
        for i in range(n):
            if POISONS:
                forbid_from(
                    self, (<Block>buffers[i]).ptr, (<Block>buffers[i]).size, self.item_size)
            record(self, EVENT_ALLOC, (<Block>buffers[i]).ptr, (<Block>buffers[i]).size)
            if self.debug:
                self.began((<Block>buffers[i]).ptr, self.stride, (<Block>buffers[i]).size)
        return True

    cdef bint free_block(self, uint64_t name) noexcept nogil:
        """Free an item, whatever that takes. False: it is not live."""
        cdef char* at = address_of(self, name)
        cdef Hold* hold
        if self.shut:
            return True                      # the memory is not ours any more
        if not self.claim(name):
            return False
        record(self, EVENT_FREE, at, 0)
        if self.debug:
            self.leaving(at)
        if self.may_lease:
            children_ask()
        if self.may_lease and self.still_leased(name):
            hold = <Hold*>malloc(sizeof(Hold))
            if hold != NULL:                 # without this record it is never free again
                hold.tag = name
                biased_acquire(&self.depot.lock)
                add_leased(&self.leased, hold)
                self.n_pending += 1
                biased_release(&self.depot.lock)
            return True
        self.free_claimed(name)
        return True

    cdef bint claim(self, uint64_t name) noexcept nogil:
        """Take a live item away: from now on it is this call's alone. False: it is not live."""
        cdef Stack* s = self.own_stack()
        cdef bint was_live
        biased_acquire(&s.lock)
        was_live = item_is_live(self, name)
        if was_live:
            group_of(self, name).live[name & 63] = 0
            arenapy_add(&self.claimed, 1)
        biased_release(&s.lock)
        return was_live

    cdef bint defer_free(self, Hold* hold) noexcept nogil:
        if self.shut or not self.claim(hold.tag):
            return False
        record(self, EVENT_FREE, <void*>hold.start, 0)
        if self.debug:
            self.leaving(<void*>hold.start)
        arenapy_count(&self.n_held, 1)
        biased_acquire(&self.depot.lock)
        link_hold(&self.aside, hold)
        self.n_pending += 1
        biased_release(&self.depot.lock)
        return True

    cdef void finish_free(self, Hold* hold) noexcept nogil:
        biased_acquire(&self.depot.lock)
        unlink_hold(&self.aside, hold)
        self.n_pending -= 1
        biased_release(&self.depot.lock)
        arenapy_count(&self.n_held, -1)
        if not self.shut:
            self.free_claimed(hold.tag)
        free(hold)

    cdef void free_claimed(self, uint64_t name) noexcept nogil:
        """A claimed item is free again."""
        cdef Stack* s = self.own_stack()
        cdef uintptr_t start = <uintptr_t>address_of(self, name)
        if not POISONS or self.debug or self.align >= POISON_UNIT:
            self.poison(start, start + self.stride)
        biased_acquire(&s.lock)
        arenapy_assert(arenapy_load(&self.claimed) > 0, b"an item was claimed before it is free")
        arenapy_sub(&self.claimed, 1)
        stow(self, s, group_of(self, name), name)
        biased_release(&s.lock)

    cdef bint still_leased(self, uint64_t name) noexcept nogil:
        """After `children_ask`."""
        cdef uintptr_t start = <uintptr_t>address_of(self, name)
        cdef uintptr_t at, stop
        return (<Region>self.parts[name >> 32].region).leases_by_now(
            start, start + self.stride, &at, &stop) != 0

    cdef size_t reclaim_leases(self, Py_ssize_t most) noexcept nogil:
        cdef Py_ssize_t left = self.leased.n     # a glance: nobody asks about one twice
        cdef Py_ssize_t seen = 0
        cdef size_t freed = 0
        cdef Hold* hold
        children_ask()
        while left > 0 and seen < most:
            biased_acquire(&self.depot.lock)
            hold = take_leased(&self.leased)
            biased_release(&self.depot.lock)
            if hold == NULL:
                break
            if not self.shut and self.still_leased(hold.tag):
                biased_acquire(&self.depot.lock)
                add_leased(&self.leased, hold)
                biased_release(&self.depot.lock)
                seen += 1
            else:
                biased_acquire(&self.depot.lock)
                self.n_pending -= 1
                biased_release(&self.depot.lock)
                self.free_claimed(hold.tag)
                free(hold)
                freed += 1
                seen = 0
            left -= 1
        return freed

    # -- as the owner of Buffers

    cdef void drop_block(self, PyObject* root) noexcept:
        cdef uint64_t name = (<Block>root).tag
        if (<Block>root).word & HELD:
            arenapy_assert(arenapy_load(&self.n_held) > 0, b"a hold that ends was counted")
            arenapy_count(&self.n_held, -1)
        if name == 0:
            return                           # released before
        if not cache_free(self, name):
            self.free_block(name)
            if self.debug:
                self.verify_dropped()

    cdef void release_block(self, Block root) noexcept nogil:
        cdef uint64_t name = root.tag
        root.tag = 0
        if name and root.hold == NULL:       # else `defer_free` comes next
            self.free_block(name)

    cdef bint has_holds(self) noexcept nogil:
        return arenapy_load(&self.n_held) != 0

    # -- figures

    cdef SlabFigures figures(self) noexcept nogil:
        """All figures of one moment."""
        cdef SlabFigures r
        cdef uint64_t claimed
        cdef int k
        cdef Stack* s
        memset(&r, 0, sizeof(r))
        self.lock_all()
        self.add_up_all()
        for k in range(self.top_slot + 1):
            s = self.caches[k] if k else self.depot
            if s != NULL:
                r.allocations += (s.tick + <uint64_t>s.added) // 2
                r.metadata += s.array.ready
        claimed = arenapy_load(&self.claimed)
        r.items = self.items
        r.active = <uint64_t>self.live - claimed
        r.pending = self.n_pending
        r.peak = <uint64_t>self.peak
        r.reserved = self.reserved
        r.regions = self.n_parts
        r.metadata += self.part_array.ready
        for k in range(1, <int>self.numbered + 1):
            r.metadata += self.parts[k].array.ready if self.parts[k].items else 0
        self.unlock_all()
        return r

    cdef uint64_t exchange_peak(self, uint64_t peak) noexcept nogil:
        """The most items live so far. It is `peak` now, or what is live if that is more."""
        cdef int64_t before
        self.lock_all()
        self.add_up_all()
        before = self.peak
        self.peak = max(<int64_t>peak, self.live)
        self.unlock_all()
        return <uint64_t>before

    # -- the end of a region, fork

    cdef void fork_lock(self) noexcept nogil:
        AllocatorCore.fork_lock(self)
        if self.depot != NULL:
            self.lock_all()

    cdef void fork_unlock(self, bint child) noexcept nogil:
        cdef int i
        if self.depot != NULL:
            if child:
                self.forget_growth()
                biased_alone(&self.depot.lock)
                for i in range(1, self.top_slot + 1):
                    if self.caches[i] != NULL:
                        biased_alone(&self.caches[i].lock)
            self.unlock_all()
        AllocatorCore.fork_unlock(self, child)

    cdef void disable(self, int why) noexcept nogil:
        AllocatorCore.disable(self, why)     # a forked child: no other thread runs
        self.set_fast_path_off(True)

    cdef void expect_leases(self, bint forks) noexcept nogil:
        self.may_lease = True
        if forks:                            # it has all locks
            self.set_fast_path_off(True)
        else:
            self.update_fast_path()

    cdef int lease_live(self, PyObject* region, void* seen) noexcept nogil:
        """A fork: the child sees every live item of `region`."""
        cdef uint32_t k
        cdef uint64_t i, first = 0
        cdef Part* p
        cdef bint live, run = False
        self.expect_leases(True)
        for k in range(1, self.numbered + 1):
            p = &self.parts[k]
            if p.items == 0 or p.region != region:
                continue
            for i in range(p.used + 1):      # runs of live items, the last of which ends here
                live = i < p.used and nth_group(p, i >> 6).live[i & 63]
                if live and not run:
                    first = i
                elif run and not live:
                    seen_add(<Seen*>seen, <uintptr_t>p.base + first * self.stride,
                             <uintptr_t>p.base + i * self.stride)
                run = live
        return 0


seal(SlabCore)


cdef bint is_fast_path_off(SlabCore c) noexcept nogil:
    return c.shut or c.debug or c.may_lease or c.checked or c.recorder != NULL
