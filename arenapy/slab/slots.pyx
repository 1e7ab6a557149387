"""Items of one size: which are free, in what order, and where they lie.

What lives here: stacks of free items, the bitmap of live ones, parts (the items of one region).
What does not: whom an item concerns besides (core), getting memory from a source, errors.

Why it is fast: to allocate is to pop a name from a stack and to set a bit, to give back is the
reverse. Items that were never handed out are in no stack: a part remembers how far it was used, and
refills an empty stack by the batch, so that growth does not touch them. All of it lies in arrays
out of band, faulted in beforehand, which never move.

Locks: `births`, a stack's own, the depot's, in this order. Parts, which every path reads, change
under all of them.
"""
cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memmove

from arenapy.slab.hot_path cimport pop, push, push_at, stack_of
from arenapy.base.atomic cimport (
    ARENAPY_GIL, arenapy_cas_ptr, arenapy_load_ptr, arenapy_spin_acquire, arenapy_spin_release,
)
from arenapy.buffer.block cimport Block
from arenapy.base.biased_lock cimport biased_acquire, biased_release
from arenapy.diagnostics.recorder cimport EVENT_GROW, EVENT_TRIM
from arenapy.base.sanitizer cimport POISON_UNIT, POISONS
from arenapy.memory.region cimport Region
from arenapy.allocator.allocator_core cimport AllocatorCore, forbid_new, record
from arenapy.base.sealed cimport seal
from arenapy.linux.reserved_space cimport ReservedArray, array_close, array_grow, array_open
from arenapy.base.thread_slot cimport MOST_CACHES, cache_number

cdef extern from "<pthread.h>" nogil:
    uint64_t this_thread "(uint64_t)pthread_self" ()

cdef enum:
    MOST_PARTS = 1 << 16

cdef Stack no_stack       # empty, and never locked


cdef Stack* new_stack(uint64_t most, uint64_t now) noexcept nogil:
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
        for k in range(MOST_CACHES):
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
        self.depot = new_stack(most, 0)
        if (self.depot == NULL
                or not array_open(&self.part_array, PARTS_AT + (MOST_PARTS + 1) * sizeof(Part))
                or not array_grow(&self.part_array, PARTS_AT + sizeof(Part))):
            raise MemoryError(f"no memory for the bookkeeping of a slab of {most} items")
        self.parts = <Part*>(self.part_array.at + PARTS_AT)
        return 0

    # -- stacks

    cdef Stack* own_stack(self) noexcept nogil:
        """The stack of this thread; the depot if there is no memory for another one."""
        cdef int i
        cdef Stack* s
        cdef void* none = NULL
        cdef bint first
        if ARENAPY_GIL:
            return self.depot
        i = cache_number()
        s = <Stack*>arenapy_load_ptr(<void**>&self.caches[i])
        if s == NULL:
            s = new_stack(DEPTH, DEPTH)
            if s == NULL:
                return self.depot
            arenapy_spin_acquire(&self.births)
            first = arenapy_cas_ptr(<void**>&self.caches[i], &none, s)
            arenapy_spin_release(&self.births)
            if not first:                    # another thread was
                drop_stack(s)
                s = <Stack*>none
        return s

    cdef bint refill(self, Stack* s) noexcept nogil:
        """Move items to an empty stack, its lock and the depot's held. False: there are none."""
        cdef Stack* depot = self.depot
        cdef Part* p = &self.parts[self.fresh]
        cdef uint64_t n, i, last
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
            self.n_fresh -= n
            if p.used == p.items:
                self.fresh = p.next
        else:
            return False
        shift(s, n)
        return True

    cdef void spill(self, Stack* s, int64_t keep) noexcept nogil:
        """Move all but the newest items of a stack to the depot. Both locks held."""
        cdef int64_t n = s.n - keep
        if n <= 0:
            return
        memcpy(names_of(self.depot) + self.depot.n, names_of(s), n * sizeof(uint64_t))
        memmove(names_of(s), names_of(s) + n, keep * sizeof(uint64_t))
        shift(s, -n)
        shift(self.depot, n)

    cdef void make_place(self, Stack* s) noexcept nogil:
        """In a full stack, whose lock is held."""
        biased_acquire(&self.depot.lock)
        self.spill(s, DEPTH - BATCH)
        biased_release(&self.depot.lock)

    cdef bint gather(self, Stack* s) noexcept nogil:
        """Refill an empty stack also from those of other threads. All locks held."""
        cdef int i
        if self.refill(s):
            return True
        if ARENAPY_GIL:
            return False
        for i in range(MOST_CACHES):
            if self.caches[i] != NULL:
                self.spill(self.caches[i], 0)
        return s.n > 0 or self.refill(s)

    cdef char* take(self, uint64_t* name) noexcept nogil:
        cdef Stack* s = stack_of(self)
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
        if ptr == NULL and not ARENAPY_GIL:
            self.lock_all()
            if s.n > 0 or self.gather(s):
                ptr = pop(self, s, name)
            self.unlock_all()
        return ptr

    cdef void bar(self, bint special) noexcept nogil:
        self.special = special
        self.quick = &no_stack if special else self.depot

    cdef char* shared_alloc(self, uint64_t* name) noexcept nogil:
        cdef Stack* s = stack_of(self)
        cdef char* ptr = NULL
        if self.special:
            return NULL
        biased_acquire(&s.lock)
        if s.n > 0:
            ptr = pop(self, s, name)
        biased_release(&s.lock)
        return ptr

    cdef bint shared_free(self, uint64_t name) noexcept nogil:
        cdef Stack* s = stack_of(self)
        cdef bint was_live
        if self.special:
            return False
        biased_acquire(&s.lock)
        was_live = push(self, s, word_of(self, name), name)
        biased_release(&s.lock)
        return was_live

    cdef bint shared_free_at(self, char* at) noexcept nogil:
        cdef Stack* s = stack_of(self)
        cdef bint was_live
        if self.special:
            return False
        biased_acquire(&s.lock)
        was_live = push_at(self, s, at)
        biased_release(&s.lock)
        return was_live

    cdef bint take_batch(self, PyObject** buffers, Py_ssize_t n) noexcept nogil:
        cdef Stack* s = stack_of(self)
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

    cdef int begin_growth(self) noexcept nogil:
        cdef int verdict = MAY_GROW
        biased_acquire(&self.depot.lock)
        if self.grower:
            verdict = SELF_GROWS if self.grower == this_thread() else OTHER_GROWS
        else:
            self.grower = this_thread()
        biased_release(&self.depot.lock)
        return verdict

    cdef void end_growth(self) noexcept nogil:
        biased_acquire(&self.depot.lock)
        self.grower = 0
        biased_release(&self.depot.lock)

    cdef void forget_growth(self) noexcept nogil:
        """In a forked child: of threads that it does not have. All locks held."""
        if self.grower != this_thread():
            self.grower = 0

    cdef int add_part(self, Region region, uint64_t items) except -1:
        """Take over the first `items` items of a region."""
        cdef uint32_t number = self.unused if self.unused else self.numbered + 1
        cdef Part* p = &self.parts[number]
        cdef ReservedArray array
        if not array_open(&array, WORDS_AT + ((items + 63) >> 6) * WORD_BYTES):
            raise MemoryError("no address space for the bookkeeping of a slab")
        if (number > MOST_PARTS or not array_grow(&array, array.reserved)
                or not array_grow(&self.part_array, PARTS_AT + (number + 1) * sizeof(Part))
                or not array_grow(
                    &self.depot.array, sizeof(Stack) + (self.items + items) * sizeof(uint64_t))):
            array_close(&array)
            raise MemoryError("no memory for the bookkeeping of a slab")
        try:
            self.share_region(region)
        except BaseException:
            array_close(&array)
            raise
        if POISONS:
            if self.align >= POISON_UNIT:
                forbid_new(self, <uintptr_t>region.ptr, <uintptr_t>region.ptr + region.size)
        self.lock_all()
        if number == self.unused:
            self.unused = p.next
        else:
            self.numbered = number
        p.base = first_item(region, self.align)
        p.items, p.used = items, 0
        p.array = array
        p.region = <PyObject*>region
        self.link_part(number)
        self.items += items
        self.reserved += region.size
        self.unlock_all()
        record(self, EVENT_GROW, region.ptr, region.size)
        return 0

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
            if nth_word(old, i).live:
                return False
        for i in range(MOST_CACHES):
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
        for i in range(MOST_CACHES):
            if self.caches[i] != NULL:
                biased_acquire(&self.caches[i].lock)
        biased_acquire(&self.depot.lock)

    cdef void unlock_all(self) noexcept nogil:
        cdef int i
        biased_release(&self.depot.lock)
        for i in range(MOST_CACHES):
            if self.caches[i] != NULL:
                biased_release(&self.caches[i].lock)
        arenapy_spin_release(&self.births)


seal(Items)


cdef char* first_item(Region region, size_t align) noexcept nogil:
    return <char*>((<uintptr_t>region.ptr + align - 1) & ~<uintptr_t>(align - 1))


cdef uint64_t free_items(Items c) noexcept nogil:
    """In all stacks and in none yet; all locks held."""
    cdef uint64_t n = c.n_fresh + <uint64_t>c.depot.n
    cdef int i
    for i in range(MOST_CACHES):
        if c.caches[i] != NULL:
            n += <uint64_t>c.caches[i].n
    return n
