"""Space: the regions of an allocator, and which ranges of them nobody here may use.

What lives here: free extents, held blocks that outlived their frame (retired), ranges that
only another process sees (leased), growth by regions, the end of a region, fork. What does
not: how free extents are handed out (bump_core).
"""
cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from arenapy.block cimport GONE_CLOSED, GONE_FORKED, GONE_NOT, Hold, Keeper, drop_hold, drop_kept
from arenapy.extents cimport (
    Extent, extents_after, extents_carve, extents_insert, extents_room, make_room,
)
from arenapy.region cimport Region
from arenapy.vm cimport vm_lease

import sys

cdef enum:
    FREED_BYTE = 0xDB        # debug: what given-back memory is filled with


# no_gc_clear: `regions` is needed to the last, and a cycle through a space goes through a
# user's object too, which the collector can clear.
@cython.auto_pickle(False)
@cython.no_gc_clear
cdef class Space(Keeper):
    """The regions of an allocator. Internal; Buffers keep it alive."""

    def __cinit__(self):
        self.regions = ()

    def __dealloc__(self):
        cdef Hold* lists[2]
        cdef Hold* hold
        cdef Py_ssize_t i
        lists[0], lists[1] = self.retired, self.leased
        for i in range(2):
            while lists[i] != NULL:
                hold = lists[i]
                lists[i] = hold.next
                free(hold)
        for i in range(self.n_regions):
            (<Region>self.region[i]).detach()
        free(self.region)
        free(self.free.items)

    cdef int add_region(self, Region region) except -1:
        """Grow (or begin): the region becomes a free extent behind all others."""
        cdef uintptr_t start = <uintptr_t>region.ptr
        if not (extents_room(&self.free, 1) and make_room(
                <void**>&self.region, &self.cap_regions, self.n_regions + 1, sizeof(PyObject*))):
            raise MemoryError("no memory for the bookkeeping of an arena")
        region.attach(self, self.n_regions == 0)
        self.regions += (region,)
        self.region[self.n_regions] = <PyObject*>region
        if self.n_regions == 0:
            self.kind, self.device_id = region.kind, region.device_id
            self.host_accessible = region.host_accessible
            self.device_accessible = region.device_accessible
        if region.foreign and not self.foreign:
            drop_kept(self)
        self.foreign = self.foreign or region.foreign
        self.checked = self.checked or region.checked
        self.capacity += region.size
        extents_insert(&self.free, start, start + region.size, self.n_regions)
        self.n_regions += 1
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
            self.regions = self.regions[:self.n_regions]
        return 0

    cdef Py_ssize_t region_of(self, uintptr_t at) noexcept nogil:
        """Index of the region that `at`, an address of ours, is in."""
        cdef Py_ssize_t i
        for i in range(self.n_regions - 1):
            if at - <uintptr_t>(<Region>self.region[i]).ptr < (<Region>self.region[i]).size:
                return i
        return self.n_regions - 1

    cdef int open_check(self) except -1:
        """Raise ValueError if this allocator no longer allocates."""
        if not self.shut:
            return 0
        if not self.regions:
            raise ValueError("this arena was never made: call the class, not only its __new__")
        if self.gone == GONE_CLOSED:
            raise ValueError("a region of this arena was closed; make a new arena")
        raise ValueError(
            f"this arena over {self.kind} memory belongs to the process that made it, and this "
            "is a forked child: make a new arena here"
        )

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

    cdef void poison(self, uintptr_t start, uintptr_t end) noexcept nogil:
        """Debug mode: what was given back reads as FREED_BYTE."""
        if self.debug and self.host_accessible and not self.shut:
            memset(<void*>start, FREED_BYTE, end - start)

    cdef bint leased_part(self, uintptr_t start, uintptr_t end, Py_ssize_t region,
                          uintptr_t* at, uintptr_t* stop) noexcept nogil:
        return (<Region>self.region[region]).leases(start, end, at, stop) != 0

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

    cdef int settle_sends(self) except -1:
        """Messages that have arrived need not be kept open here any more."""
        if self.may_lease:
            shared = sys.modules.get("arenapy.shared")
            if shared is not None:
                shared.settle()
        return 0

    # -- the end of a region, and fork

    cdef void disable(self, int why) noexcept nogil:
        if why != GONE_NOT:
            self.gone = why
        self.shut = True

    cdef void forked(self, bint unmapped) noexcept nogil:
        self.disable(GONE_FORKED if unmapped else GONE_NOT)

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

    cdef int check(self) except -1:
        for region in self.regions:
            (<Region>region).check()
        return 0

    cdef object owner_of(self):
        return None if self.allocator is None else self.allocator()
