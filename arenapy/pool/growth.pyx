"""PoolGrowth: what a pool does for a request that the memory it has cannot serve.

What lives here: the order of what is tried, and the error in the end. What does not: the source
and the limit (memory), what the user calls (pool).
"""
from libc.stdint cimport uint64_t

from arenapy.allocator.allocator cimport Allocator
from arenapy.base.atomic cimport arenapy_glance
from arenapy.pool.core cimport BlockBatch, PoolCore, PoolFigures
from arenapy.pool.page_heap cimport (
    HUGE_PAGES, MOST_PAGES, MOST_SEGMENTS, PAGE_BITS, STOCK, have_spare,
)
from arenapy.base.sealed cimport seal

from arenapy.errors import OutOfMemory

cdef enum:
    GROWTH_SHARE = 64        # a pool grows by this part of what it has, or by a huge page;
    MOST_GROWTH = 8          # on a device, where memory is scarcer, by so many of those at most,
    DEVICE_SHARE = 256       # or by this part


cdef class PoolGrowth(Allocator):
    """A Pool as far as it grows. Internal."""

    cdef char* slow_get(self, size_t n, size_t align, bint hooks, uint64_t* tag) except NULL:
        cdef char* ptr = NULL
        cdef bint miss
        while ptr == NULL:
            try:
                miss = self.more(n, align, hooks)
            except OutOfMemory:
                ptr = self.core.get(n, align, False, tag)    # others may have let go meanwhile
                if ptr == NULL:
                    raise
                return ptr
            ptr = self.core.get(n, align, miss, tag)
        return ptr

    cdef bint more(self, size_t n, size_t align, bint hooks) except -1:
        cdef PoolCore c = self.core
        cdef size_t missing = 0, wished, before
        cdef size_t pages = c.pages_for(n, align)
        cdef object error = None
        c.open_check()
        if n > <size_t>MOST_PAGES << PAGE_BITS:
            raise OutOfMemory(self.full(n, "no address space holds it"))
        if c.may_lease:
            c.settle_sends()
        if c.settle_streams(False):
            return False
        wished = max(pages, <size_t>HUGE_PAGES, self.growth())
        if c.merges_first:                   # the driver takes so much, and nobody had the rest
            wished = (wished + HUGE_PAGES - 1) // HUGE_PAGES * HUGE_PAGES
        self.memory.recycle(pages, n)
        before = c.reserved_pages
        while True:
            if not have_spare(c):
                raise OutOfMemory(self.full(n, "there is no memory for more bookkeeping"))
            try:
                if self.memory.grow(pages, wished, &missing):
                    return True
            except MemoryError as e:
                error = e
                missing = pages
            # The blocks that were unused longest make room, in the limit or in the machine.
            if missing > self.memory.trimmable() or self.memory.shrink(missing, True) == 0:
                break
            wished = pages
        # Another thread that grows has the room meanwhile, and may have had more than it needs.
        if error is None and (c.reserved_pages > before or self.memory.wait_for_growth()):
            return False
        # What other streams keep, or are still at work on; in the order of the pool's own.
        if trim_lanes(self.lanes, False) or c.settle_streams(True) or trim_lanes(
                self.lanes, True) or (hooks and self.on_oom is not None and self.on_oom(n)):
            c.settle_streams(True)
            return False
        if error is not None:
            raise OutOfMemory(self.full(n, f"its source has no more ({error})")) from error
        raise OutOfMemory(self.full(n, "it may not reserve more"))

    cdef size_t growth(self) noexcept:
        """Pages that a pool takes at once, though a request wants fewer."""
        cdef PoolCore c = self.core
        cdef size_t part = c.reserved_pages // GROWTH_SHARE
        cdef int share
        if not c.merges_first:
            return part
        # There are not many regions in the end: the last ones double what there is.
        share = max(1, min(<int>DEVICE_SHARE, MOST_SEGMENTS - c.n_segments))
        return max(min(part, <size_t>MOST_GROWTH * HUGE_PAGES), c.reserved_pages // share)

    def full(self, n, why):
        """Why a request failed, and what to do."""
        cdef PoolFigures f = self.core.figures()
        limit = "no limit" if self.max_bytes is None else f"max_bytes={self.max_bytes}"
        return (
            f"{n} bytes do not fit into the pool, and {why}: it has reserved {f.reserved} bytes "
            f"({limit}), {f.all.live} live, {f.all.pending} pending, {f.all.idle} idle, of which "
            f"{f.all.largest} in the largest free block. Release blocks, "
            "give a larger max_bytes, or free memory in on_oom"
        )

    cdef int take_batch(self, BlockBatch batch) except -1:
        """All blocks, or an exception and nothing was taken."""
        cdef PoolCore c = self.core
        cdef bint miss = False
        cdef Py_ssize_t got
        c.open_check()
        batch.begin(c)
        try:
            while batch.done < batch.n:
                got = batch.take(c, miss)
                miss = False
                if got == 0:                 # what is free may do once it is merged
                    c.flush_all()
                    got = batch.take(c, False)
                if got == 0 and (
                        arenapy_glance(&c.spare) >= STOCK or not c.more_descriptors(STOCK)):
                    miss = self.more(batch.sizes[batch.done], c.block_align, True)
        except BaseException:
            batch.undo(c)
            raise
        return 0


seal(PoolGrowth)


cdef bint trim_lanes(dict lanes, bint wait) except -1:
    """Let the pools of other streams give back what is idle, or will be. False: nothing."""
    cdef PoolGrowth lane
    cdef size_t pages = 0
    for lane in list(lanes.values()) if lanes else []:
        lane.core.settle_streams(wait)
        pages += lane.memory.shrink(lane.memory.trimmable(), False)
    return pages > 0
