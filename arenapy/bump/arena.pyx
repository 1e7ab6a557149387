"""Arena: which ranges of an arena's regions nobody here may use.

What lives here: free extents, held blocks that outlived their frame (retired), ranges that
only another process sees (leased), growth by regions. What does not: how free extents are
handed out (core).
"""
cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport uintptr_t
from libc.stdlib cimport free

from arenapy.base.atomic cimport arenapy_lock_acquire, arenapy_lock_release
from arenapy.buffer.block cimport Hold, drop_hold, new_hold
from arenapy.base.interval_set cimport (
    Extent, extents_above, extents_carve, extents_from, extents_insert, extents_last,
    extents_room, extents_take,
)
from arenapy.diagnostics.recorder cimport EVENT_KEEP
from arenapy.memory.region cimport Region
from arenapy.allocator.allocator_core cimport (
    AllocatorCore, forbid_new, link_hold, record, unlink_hold,
)
from arenapy.base.sealed cimport seal
from arenapy.linux.vm cimport vm_lease


@cython.no_gc_clear
cdef class Arena(AllocatorCore):
    """The regions of an allocator. Internal; Buffers keep it alive."""

    def __dealloc__(self):
        cdef Hold* hold
        while self.retired != NULL:
            hold = self.retired
            self.retired = hold.next
            free(hold)
        free(self.free.nodes)

    cdef int add_region(self, Region region, tuple regions) except -1:
        """Grow (or begin): the region becomes a free extent behind all others.

        `regions` is all of them; see take_region.
        """
        cdef uintptr_t start = <uintptr_t>region.ptr
        if not extents_room(&self.free, 1):
            raise MemoryError("no memory for the bookkeeping of an arena")
        self.take_region(region, regions)
        extents_insert(&self.free, start, start + region.size, self.n_regions - 1)
        forbid_new(self, start, start + region.size)
        if region.sent:                      # before it had an allocator
            self.expect_leases()
            self.carve_leases(start, start + region.size, self.n_regions - 1)
        return 0

    cdef Py_ssize_t in_use(self, Py_ssize_t keep) noexcept nogil:
        """How many regions are there without the last ones that are free, but `keep` at least."""
        cdef Py_ssize_t n = self.n_regions
        cdef PyObject* region
        cdef Extent* e
        while n > keep:
            region = self.region[n - 1]
            e = extents_from(&self.free, n - 1, <uintptr_t>(<Region>region).ptr)
            if e == NULL or e.region != n - 1 or e.end - e.start != (<Region>region).size:
                break
            n -= 1
        return n

    cdef list drop_regions(self, Py_ssize_t keep):
        """Undo growth: give up the last regions, if they are free, but `keep` of all.

        The caller detaches and drops them. Lists are made without the lock, since to make them may
        run code that uses the allocator.
        """
        cdef tuple before, after
        cdef list dropped
        cdef Py_ssize_t n, _i
        cdef bint done = False
        while not done:
            arenapy_lock_acquire(&self.lock)
            n = self.in_use(keep)
            arenapy_lock_release(&self.lock)
            before = self.listed()
            after, dropped = before[:n], list(before[n:])
            arenapy_lock_acquire(&self.lock)
            done = self.regions is before and self.in_use(keep) == n
            if done:
                for _i in range(self.n_regions - n):
                    extents_take(&self.free, extents_last(&self.free))
                for region in dropped:
                    self.capacity -= (<Region>region).size
                    self.forget(<Region>region)
                self.list_regions(after)
            arenapy_lock_release(&self.lock)
        return dropped

    cdef int record_into(self, object recorder) except -1:
        """The end of a recording says which of the blocks that resets ended are there still."""
        cdef Hold* hold
        if recorder is None and self.recorder != NULL:
            arenapy_lock_acquire(&self.lock)
            hold = self.retired
            while hold != NULL:
                record(self, EVENT_KEEP, <void*>hold.start, 0)
                hold = hold.next
            arenapy_lock_release(&self.lock)
        return AllocatorCore.record_into(self, recorder)

    # -- ranges that come back

    cdef void free_or_lease(self, Hold* hold) noexcept nogil:
        """A range that nobody here sees any more: free, unless another process sees it."""
        cdef uintptr_t at, stop
        cdef bint leased = self.may_lease and self.leased_part(
            hold.start, hold.end, hold.region, &at, &stop)
        if leased or not extents_room(&self.free, 3):
            self.leased_bytes += hold.end - hold.start
            link_hold(&self.leased, hold)
            return
        self.poison(hold.start, hold.end)
        extents_insert(&self.free, hold.start, hold.end, hold.region)
        drop_hold(self, hold)

    cdef void carve_leases(
        self, uintptr_t start, uintptr_t end, Py_ssize_t region
    ) noexcept nogil:
        """Take what other processes see out of the free parts of [start, end)."""
        cdef uintptr_t at, stop, first, last
        cdef Extent* e
        cdef Hold* hold
        while start < end:
            e = extents_from(&self.free, region, start)
            if e == NULL or e.region != region or e.start >= end:
                return
            first, last = max(e.start, start), min(e.end, end)
            start = first                    # again after a find: the kernel names any one lease
            if not self.leased_part(first, last, region, &at, &stop):
                start = last
                continue
            hold = new_hold(self) if extents_room(&self.free, 3) else NULL
            if hold == NULL:
                self.shut = True             # the lease cannot be recorded: hand out nothing
                return
            extents_carve(&self.free, at, stop, region)
            hold.start, hold.end, hold.region = at, stop, region
            self.leased_bytes += stop - at
            link_hold(&self.leased, hold)

    cdef void settle_leases(self, Py_ssize_t most) noexcept nogil:
        """Free what other processes have let go of, of the next `most` ranges (-1: of all)."""
        cdef Hold* hold = self.leased if most < 0 or self.ask_next == NULL else self.ask_next
        cdef Hold* next
        while hold != NULL and most != 0:
            next = hold.next
            unlink_hold(&self.leased, hold)
            self.leased_bytes -= hold.end - hold.start
            self.free_or_lease(hold)         # which puts it first again if it is leased still
            hold = next
            most -= 1
        self.ask_next = hold

    cdef void poison_free(
        self, uintptr_t start, uintptr_t end, Py_ssize_t region
    ) noexcept nogil:
        """Poison the free parts of [start, end)."""
        cdef Extent* e = extents_from(&self.free, region, start)
        while e != NULL and e.region == region and e.start < end:
            self.poison(max(start, e.start), min(end, e.end))
            e = extents_above(&self.free, region, e.start)

    cdef int lease_all(self, PyObject* region, int fd) noexcept nogil:
        """Lease every byte of `region` that is not in `free` to whoever keeps `fd`."""
        cdef uintptr_t first = <uintptr_t>(<Region>region).ptr
        cdef long long base = (<Region>region).file_offset - <long long>first
        cdef uintptr_t at = first
        cdef uintptr_t end = at + (<Region>region).size
        cdef uintptr_t upto
        cdef Py_ssize_t index = 0
        cdef Extent* e
        cdef int status = 0
        self.expect_leases()
        while index < self.n_regions and self.region[index] != region:
            index += 1
        while at < end:
            e = extents_from(&self.free, index, at)
            if e != NULL and e.region != index:
                e = NULL
            upto = e.start if e != NULL else end
            if upto > at and vm_lease(fd, base + <long long>at, <long long>(upto - at)) < 0:
                status = -1
            at = e.end if e != NULL else end
        return status


seal(Arena)
