"""Space: which ranges of an arena's regions nobody here may use.

What lives here: free extents, held blocks that outlived their frame (retired), ranges that
only another process sees (leased), growth by regions. What does not: how free extents are
handed out (bump_core).
"""
cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free

from arenapy.atomic cimport arenapy_lock_acquire, arenapy_lock_release
from arenapy.block cimport Hold, drop_hold
from arenapy.extents cimport (
    Extent, extents_after, extents_carve, extents_insert, extents_room,
)
from arenapy.recorder cimport EVENT_KEEP
from arenapy.region cimport Region
from arenapy.regions cimport RegionSet, forbid_new, link_hold, record, unlink_hold
from arenapy.vm cimport vm_lease


@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class Space(RegionSet):
    """The regions of an allocator. Internal; Buffers keep it alive."""

    def __dealloc__(self):
        cdef Hold* hold
        while self.retired != NULL:
            hold = self.retired
            self.retired = hold.next
            free(hold)
        free(self.free.items)

    cdef int add_region(self, Region region) except -1:
        """Grow (or begin): the region becomes a free extent behind all others."""
        cdef uintptr_t start = <uintptr_t>region.ptr
        if not extents_room(&self.free, 1):
            raise MemoryError("no memory for the bookkeeping of an arena")
        self.take_region(region)
        extents_insert(&self.free, start, start + region.size, self.n_regions - 1)
        forbid_new(self, start, start + region.size)
        if region.sent:                      # before it had an allocator
            self.expect_leases()
            self.carve_leases(start, start + region.size, self.n_regions - 1)
        return 0

    cdef int drop_regions(self, Py_ssize_t keep, list dropped) except -1:
        """Undo growth: move regions, from the last one to index `keep`, to `dropped`, if free.

        The caller detaches and drops them after it has released the lock: that runs other code.
        """
        cdef uintptr_t start
        cdef Extent e
        while self.n_regions > keep and self.free.n:
            e = self.free.items[self.free.n - 1]
            start = <uintptr_t>(<Region>self.region[self.n_regions - 1]).ptr
            if (e.region != self.n_regions - 1
                    or e.end - e.start != (<Region>self.region[self.n_regions - 1]).size):
                break
            self.capacity -= e.end - e.start
            extents_carve(&self.free, start, e.end, self.n_regions - 1)
            self.n_regions -= 1
            dropped.append(self.regions[self.n_regions])
            self.forget(<Region>self.regions[self.n_regions])
            self.list_regions(self.regions[:self.n_regions])
        return 0

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
        return RegionSet.record_into(self, recorder)

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
        cdef Py_ssize_t i
        cdef Hold* hold
        while start < end:
            i = extents_after(&self.free, region, start) - 1
            if i < 0 or self.free.items[i].region != region or self.free.items[i].end <= start:
                i += 1
            if (i == self.free.n or self.free.items[i].region != region
                    or self.free.items[i].start >= end):
                return
            first, last = max(self.free.items[i].start, start), min(self.free.items[i].end, end)
            start = first                    # again after a find: the kernel names any one lease
            if not self.leased_part(first, last, region, &at, &stop):
                start = last
                continue
            hold = <Hold*>calloc(1, sizeof(Hold))
            if hold == NULL or not extents_room(&self.free, 3):
                free(hold)
                self.shut = True             # the lease cannot be recorded: hand out nothing
                return
            extents_carve(&self.free, at, stop, region)
            hold.start, hold.end, hold.region = at, stop, region
            self.leased_bytes += stop - at
            link_hold(&self.leased, hold)

    cdef void settle_leases(self) noexcept nogil:
        """Free what other processes have let go of."""
        cdef Hold* hold = self.leased
        cdef Hold* next
        while hold != NULL:
            next = hold.next
            unlink_hold(&self.leased, hold)
            self.leased_bytes -= hold.end - hold.start
            self.free_or_lease(hold)
            hold = next

    cdef void poison_free(
        self, uintptr_t start, uintptr_t end, Py_ssize_t region
    ) noexcept nogil:
        """Poison the free parts of [start, end)."""
        cdef Py_ssize_t i
        for i in range(self.free.n):
            if (self.free.items[i].region == region and self.free.items[i].start < end
                    and start < self.free.items[i].end):
                self.poison(max(start, self.free.items[i].start), min(end, self.free.items[i].end))

    cdef int lease_all(self, PyObject* region, int fd) noexcept nogil:
        """Lease every byte of `region` that is not in `free` to whoever keeps `fd`."""
        cdef uintptr_t first = <uintptr_t>(<Region>region).ptr
        cdef long long base = (<Region>region).file_offset - <long long>first
        cdef uintptr_t at = first
        cdef uintptr_t end = at + (<Region>region).size
        cdef uintptr_t start
        cdef Py_ssize_t i
        cdef int status = 0
        self.expect_leases()
        for i in range(self.free.n + 1):
            if i < self.free.n and self.region[self.free.items[i].region] != region:
                continue
            start = self.free.items[i].start if i < self.free.n else end
            if start > at and vm_lease(
                    fd, base + <long long>at, <long long>(start - at)) < 0:
                status = -1
            at = self.free.items[i].end if i < self.free.n else end
        return status
