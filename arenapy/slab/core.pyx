"""The slab algorithm as the owner of Buffers: what is to be done with an item besides.

What lives here: dropped Buffers, bytes that other processes see, fork, figures. What does not:
which items are free (slots), getting memory from a source, errors (slab).

An item that is given back the long way is claimed first: its bit is cleared, and it is in no stack
until all is done that takes time. So nothing is done twice, and nothing under a lock.
"""
cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from arenapy.base.assertion cimport arenapy_assert
from arenapy.base.atomic cimport arenapy_add, arenapy_load, arenapy_sub, clear_bit
from arenapy.buffer.block cimport HELD, Block, Hold
from arenapy.diagnostics.recorder cimport EVENT_ALLOC, EVENT_FREE
from arenapy.base.biased_lock cimport biased_acquire, biased_release
from arenapy.base.sanitizer cimport POISON_UNIT, POISONS
from arenapy.memory.region cimport Region
from arenapy.allocator.allocator_core cimport AllocatorCore, link_hold, record, unlink_hold
from arenapy.base.sealed cimport seal
from arenapy.slab.hot_path cimport forbid_from, cache_free, stack_of, stow
from arenapy.slab.slots cimport Items, Part, Stack, address_of, nth_word, word_of
from arenapy.base.thread_slot cimport MOST_CACHES
from arenapy.linux.vm cimport vm_lease


@cython.final
@cython.no_gc_clear
cdef class SlabCore(Items):
    """The memory and bookkeeping of a Slab. Internal; Buffers keep it alive."""

    def __cinit__(self):
        self.what = "slab"
        self.recycles = True
        self.shut = True                     # until `ready`
        self.bar(True)

    def __dealloc__(self):
        cdef Hold* hold
        self.finish_streams()
        while self.pending != NULL:
            hold = self.pending
            self.pending = hold.next
            free(hold)

    cdef void ready(self) noexcept nogil:
        """There is a first region."""
        self.shut = False
        self.set_special()

    cdef void set_special(self) noexcept nogil:
        """After what it depends on has changed."""
        self.bar(self.shut or self.debug or self.may_lease or self.checked
                 or self.recorder != NULL)

    # -- items

    cdef char* get(self, size_t nbytes, uint64_t* name) noexcept nogil:
        cdef char* ptr
        if self.shut:
            return NULL
        ptr = self.take(name)
        if ptr == NULL and self.pending != NULL:
            self.settle()
            ptr = self.take(name)
        if ptr != NULL:
            if POISONS:
                forbid_from(self, ptr, nbytes, self.item_size)
            record(self, EVENT_ALLOC, ptr, nbytes)
            if self.debug:
                self.began(ptr, self.stride, nbytes)
        return ptr

    cdef bint get_many(self, PyObject** buffers, Py_ssize_t n) noexcept nogil:
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

    cdef bint put(self, uint64_t name) noexcept nogil:
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
        if self.may_lease and self.still_leased(name):
            hold = <Hold*>malloc(sizeof(Hold))
            if hold != NULL:                 # without this record it is never free again
                hold.tag = name
                biased_acquire(&self.depot.lock)
                hold.next = self.pending
                self.pending = hold
                self.n_pending += 1
                biased_release(&self.depot.lock)
            return True
        self.restore(name)
        return True

    cdef bint claim(self, uint64_t name) noexcept nogil:
        """Take a live item away: from now on it is this call's alone. False: it is not live."""
        cdef Stack* s = stack_of(self)
        cdef bint was_live
        biased_acquire(&s.lock)
        was_live = clear_bit(&word_of(self, name).live, name)
        if was_live:
            arenapy_add(&self.claimed, 1)
        biased_release(&s.lock)
        return was_live

    cdef bint set_aside(self, Hold* hold) noexcept nogil:
        if self.shut or not self.claim(hold.tag):
            return False
        record(self, EVENT_FREE, <void*>hold.start, 0)
        if self.debug:
            self.leaving(<void*>hold.start)
        arenapy_add(&self.n_held, 1)
        biased_acquire(&self.depot.lock)
        link_hold(&self.aside, hold)
        self.n_pending += 1
        biased_release(&self.depot.lock)
        return True

    cdef void over(self, Hold* hold) noexcept nogil:
        biased_acquire(&self.depot.lock)
        unlink_hold(&self.aside, hold)
        self.n_pending -= 1
        biased_release(&self.depot.lock)
        arenapy_sub(&self.n_held, 1)
        if not self.shut:
            self.restore(hold.tag)
        free(hold)

    cdef void restore(self, uint64_t name) noexcept nogil:
        """A claimed item is free again."""
        cdef Stack* s = stack_of(self)
        cdef uintptr_t start = <uintptr_t>address_of(self, name)
        if not POISONS or self.debug or self.align >= POISON_UNIT:
            self.poison(start, start + self.stride)
        biased_acquire(&s.lock)
        arenapy_assert(arenapy_load(&self.claimed) > 0, b"an item was claimed before it is free")
        arenapy_sub(&self.claimed, 1)
        stow(self, s, word_of(self, name), name)
        biased_release(&s.lock)

    cdef bint still_leased(self, uint64_t name) noexcept nogil:
        cdef uintptr_t start = <uintptr_t>address_of(self, name)
        cdef uintptr_t at, stop
        return (<Region>self.parts[name >> 32].region).leases(
            start, start + self.stride, &at, &stop) != 0

    cdef void settle(self) noexcept nogil:
        """Free what other processes have let go of."""
        cdef Hold* hold
        cdef Hold* next
        biased_acquire(&self.depot.lock)
        hold = self.pending
        self.pending = NULL
        biased_release(&self.depot.lock)
        while hold != NULL:
            next = hold.next
            if not self.shut and self.still_leased(hold.tag):
                biased_acquire(&self.depot.lock)
                hold.next = self.pending
                self.pending = hold
                biased_release(&self.depot.lock)
            else:
                biased_acquire(&self.depot.lock)
                self.n_pending -= 1
                biased_release(&self.depot.lock)
                self.restore(hold.tag)
                free(hold)
            hold = next

    # -- as the owner of Buffers

    cdef void dropped(self, PyObject* root) noexcept:
        cdef uint64_t name = (<Block>root).tag
        if (<Block>root).word & HELD:
            arenapy_assert(arenapy_load(&self.n_held) > 0, b"a hold that ends was counted")
            arenapy_sub(&self.n_held, 1)
        if name == 0:
            return                           # released before
        if not cache_free(self, name):
            self.put(name)
            if self.debug:
                self.verify_dropped()

    cdef void give_back(self, Block root) noexcept nogil:
        cdef uint64_t name = root.tag
        root.tag = 0
        if name and root.hold == NULL:       # else `set_aside` comes next
            self.put(name)

    cdef bint has_holds(self) noexcept nogil:
        return arenapy_load(&self.n_held) != 0

    # -- figures

    cdef SlabFigures figures(self) noexcept nogil:
        """All figures of one moment."""
        cdef SlabFigures r
        cdef int64_t out = 0, peak = 0
        cdef uint64_t claimed
        cdef uint32_t k
        cdef Stack* s
        memset(&r, 0, sizeof(r))
        self.lock_all()
        for k in range(MOST_CACHES + 1):
            s = self.caches[k] if k < MOST_CACHES else self.depot
            if s != NULL:
                out += s.out - s.n
                peak += s.out - s.least
                r.allocations += (s.tick + <uint64_t>(s.out - s.n)) // 2
                r.metadata += s.array.ready
        claimed = arenapy_load(&self.claimed)
        r.items = self.items
        r.active = <uint64_t>out - claimed
        r.pending = self.n_pending
        r.peak = <uint64_t>peak
        r.reserved = self.reserved
        r.regions = self.n_parts
        r.metadata += self.part_array.ready
        for k in range(1, self.numbered + 1):
            r.metadata += self.parts[k].array.ready if self.parts[k].items else 0
        self.unlock_all()
        return r

    cdef uint64_t exchange_peak(self, uint64_t peak) noexcept nogil:
        """The most items live so far. It is `peak` now, or what is live if that is more."""
        cdef int64_t before = 0, live = 0
        cdef int k
        cdef Stack* mine = stack_of(self)
        cdef Stack* s
        self.lock_all()
        for k in range(MOST_CACHES + 1):
            s = self.caches[k] if k < MOST_CACHES else self.depot
            if s != NULL:
                before += s.out - s.least
                live += s.out - s.n
                s.least = s.n
        mine.least -= max(<int64_t>peak - live, 0)
        self.unlock_all()
        return <uint64_t>before

    # -- the end of a region, fork

    cdef void fork_lock(self) noexcept nogil:
        AllocatorCore.fork_lock(self)
        if self.depot != NULL:
            self.lock_all()

    cdef void fork_unlock(self, bint child) noexcept nogil:
        if self.depot != NULL:
            if child:
                self.forget_growth()
            self.unlock_all()
        AllocatorCore.fork_unlock(self, child)

    cdef void disable(self, int why) noexcept nogil:
        AllocatorCore.disable(self, why)
        self.set_special()

    cdef void expect_leases(self) noexcept nogil:
        self.may_lease = True
        self.set_special()

    cdef int lease_live(self, PyObject* region, int fd) noexcept nogil:
        """A fork: lease every live item of `region` to whoever keeps `fd`."""
        cdef uint32_t k
        cdef uint64_t i, first = 0
        cdef Part* p
        cdef bint live, run = False
        cdef long long base = (
            (<Region>region).file_offset - <long long><uintptr_t>(<Region>region).ptr)
        cdef int status = 0
        self.expect_leases()
        for k in range(1, self.numbered + 1):
            p = &self.parts[k]
            if p.items == 0 or p.region != region:
                continue
            for i in range(p.used + 1):      # runs of live items, the last of which ends here
                live = i < p.used and nth_word(p, i >> 6).live >> (i & 63) & 1
                if live and not run:
                    first = i
                elif run and not live and vm_lease(
                        fd, base + <long long>(<uintptr_t>p.base + first * self.stride),
                        <long long>((i - first) * self.stride)) < 0:
                    status = -1
                run = live
        return status


seal(SlabCore)
