"""The bump algorithm: where blocks go, what a reset frees, what outlives it.

What lives here: address arithmetic over regions, without the GIL and without Python objects
but for the region list. What does not: argument parsing, marks as objects, growth (bump.pyx);
how regions come to be (memory/sources); streams.

The state. The regions are tiled exactly by six kinds of range, which `verify` checks. The capacity
is what is in the first five:

* runs: what was handed out contiguously, in order; the newest one ends at the cursor. Each of the
  others has bytes in it, or a frame stands at it: so there are no more of them than frames and
  allocations that were not freed since;
* the current extent [cursor, limit): free, and next to be handed out;
* other free extents, ordered by address within their region, coalesced;
* retired: held blocks that outlived a reset of their frame;
* leased: bytes that only another process still sees;
* holes: what `trim` took the memory of, in a region that grows in place (growth).

Blocks themselves are not recorded, which is why an allocation costs a few instructions: what
is recorded is a *held* block, from its first export to the death of its Buffer. A reset turns
the runs of its frames into free extents, less the held blocks, which it retires.

A frame is what was allocated since a mark. Its `content` stamp is the tag of its Buffers, and
a reset gives it a new one: so a Buffer is valid if its tag is still some frame's content, or
if it is held. Stamps only grow, hence along the frames too, and are found by bisection.

Holds end on any thread: `hold_ended` pushes onto a lock-free list, which the owner drains.

Forks happen on any thread too, also without the GIL, while the owner is anywhere in here. So a fork
reads nothing of this. It writes down that the child sees whole regions, and pushes a note. The
owner drains before it frees anything. So what is free when it finds the note was free at the fork,
and it takes that out of the child's record (`settle_forks`).

What bounds the bookkeeping: frames are at most the live marks, and those that something was
allocated in since; free extents at most the other ranges, and the regions; holds the Buffers
that are held at once. Arrays and spare holds keep the room that was needed at most. Each operation
takes logarithmic time, and a reset that for each block that it retires and each run that it frees.
"""
cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free
from libc.string cimport memset

from arenapy.bump.core cimport bump_is_valid
from arenapy.bump.hot_path cimport catch_up, note_peak, used
from arenapy.base.assertion cimport arenapy_assert
from arenapy.base.atomic cimport (
    arenapy_cas, arenapy_cas_ptr, arenapy_load_ptr, arenapy_lock_acquire, arenapy_lock_release,
    arenapy_store, arenapy_take_ptr,
)
from arenapy.buffer.block cimport (
    GONE_FORKED, GONE_NOT, HOLD_EMPTY, HOLD_RETIRED, HOLD_UNSETTLED, KEPT_OBJECTS, Block, Hold,
    drop_hold, drop_kept, new_hold,
)
from arenapy.base.interval_set cimport (
    Extent, Node, extents_above, extents_below, extents_carve, extents_first, extents_fit,
    extents_from, extents_insert, extents_last, extents_most, extents_room, extents_take, make_room,
)
from arenapy.memory.region cimport Region
from arenapy.diagnostics.recorder cimport EVENT_FREE, EVENT_KEEP
from arenapy.base.sanitizer cimport POISONS
from arenapy.allocator.allocator_core cimport (
    LEASES_ASKED, AllocatorCore, forbid, forbid_new, link_hold, permit, record, unlink_hold,
)
from arenapy.base.sealed cimport seal
from arenapy.base.thread_slot cimport this_thread
from arenapy.memory.children cimport (
    Seen, children_nbytes, children_settle, children_unsettled, seen_add, seen_drop, seen_new,
)


# ---- the arena ---------------------------------------------------------------------------
# Arena: which ranges of an arena's regions nobody here may use.
#
# What lives here: free extents, held blocks that outlived their frame (retired), ranges that only
# another process sees (leased), growth by regions. What does not: how free extents are handed out
# (core).

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
        free(self.holes.nodes)

    cdef int add_region(self, Region region, tuple regions, bint known) except -1:
        """Grow (or begin): the region becomes a free extent behind all others.

        `regions` is all of them; see take_region. `known`: others saw it before it was this one's.
        """
        cdef uintptr_t start = <uintptr_t>region.ptr
        if not extents_room(&self.free, 1):
            raise MemoryError("no memory for the bookkeeping of an arena")
        self.take_region(region, regions)
        extents_insert(&self.free, start, start + region.size, self.n_regions - 1)
        forbid_new(self, start, start + region.size)
        self.settle_region(self.n_regions - 1)
        if known:
            self.expect_leases(False)
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

    # -- ranges that come back

    cdef void free_or_lease(self, Hold* hold) noexcept nogil:
        """A range that nobody here sees any more: free, unless another process sees it."""
        cdef uintptr_t at, stop
        cdef bint leased = self.may_lease and self.leased_part(
            hold.start, hold.end, hold.region, &at, &stop)
        if leased or not extents_room(&self.free, 3):
            self.lease(hold)
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
                self.shut = self.unrecorded = True   # hand out nothing
                return
            extents_carve(&self.free, at, stop, region)
            hold.start, hold.end, hold.region, hold.flags = at, stop, region, 0
            self.lease(hold)

    cdef void lease(self, Hold* hold) noexcept nogil:
        """A range is not free: other processes see it, and nobody here does."""
        hold.flags &= ~<uint32_t>HOLD_UNSETTLED
        if children_unsettled(&(<Region>self.region[hold.region]).seens):
            hold.flags |= HOLD_UNSETTLED
        self.leased_bytes += hold.end - hold.start
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

    cdef void settle_region(self, Py_ssize_t index) noexcept nogil:
        """The children since the last time see what is not in `free`, and was not leased before.

        So a range that only earlier children see is not kept for each later one, too.
        """
        cdef PyObject* region = self.region[index]
        cdef uintptr_t at = <uintptr_t>(<Region>region).ptr
        cdef uintptr_t end = at + (<Region>region).size
        cdef uintptr_t upto
        cdef Seen* seen
        cdef Extent* e
        cdef Hold* hold
        cdef Py_ssize_t n = 0
        cdef bint apart
        if not children_unsettled(&(<Region>region).seens):
            return
        seen = seen_new()
        if seen == NULL:                     # they keep us from all of it
            return
        hold = self.leased
        while hold != NULL:
            n += hold.region == index
            hold = hold.next
        apart = extents_room(&self.free, 2 * (n + self.holes.n))
        if apart:
            self.count_as_free(index, True)
        while at < end:
            e = extents_from(&self.free, index, at)
            if e != NULL and e.region != index:
                e = NULL
            upto = e.start if e != NULL else end
            if upto > at:
                seen_add(seen, at, upto)
            at = e.end if e != NULL else end
        if apart:
            self.count_as_free(index, False)
        hold = self.leased
        while hold != NULL:
            if hold.region == index:
                hold.flags &= ~<uint32_t>HOLD_UNSETTLED
            hold = hold.next
        children_settle(&(<Region>region).seens, seen)
        seen_drop(seen)

    cdef void count_as_free(self, Py_ssize_t index, bint yes) noexcept nogil:
        """Put holes, and what was leased before, into `free`, or take it out again. There is room.
        """
        cdef Extent* hole = extents_from(&self.holes, index, 0)
        cdef Hold* hold = self.leased
        while hole != NULL:
            if yes:
                extents_insert(&self.free, hole.start, hole.end, index)
            else:
                extents_carve(&self.free, hole.start, hole.end, index)
            hole = extents_above(&self.holes, index, hole.start)
        while hold != NULL:
            if hold.region != index or hold.flags & HOLD_UNSETTLED:
                pass
            elif yes:
                extents_insert(&self.free, hold.start, hold.end, index)
            else:
                extents_carve(&self.free, hold.start, hold.end, index)
            hold = hold.next


seal(Arena)


# ---- core ---------------------------------------------------------------------------

@cython.final
@cython.no_gc_clear
cdef class BumpCore(Arena):
    """The memory and bookkeeping of a Bump. Internal; Buffers keep it alive."""

    def __cinit__(self):
        """Valid, empty and shut until `open`."""
        if not (make_room(<void**>&self.runs, &self.cap_runs, 16, sizeof(Extent))
                and make_room(<void**>&self.frames, &self.cap_frames, 16, sizeof(Frame))):
            raise MemoryError("no memory for the bookkeeping of an arena")
        memset(self.runs, 0, sizeof(Extent))
        memset(self.frames, 0, sizeof(Frame))
        self.n_runs = self.n_frames = 1
        self.top = self.frames
        self.stamp = self.content = self.frames[0].content = 1
        self.one_piece = self.shut = True

    def __dealloc__(self):
        if self.frames != NULL:
            self.settle_forks()
        self.finish()
        # No Buffer is left, so every hold has ended, drained or not; the memory may be gone.
        self.debug = self.may_lease = False
        if self.frames != NULL:
            self.drain()
        free(self.runs)
        free(self.frames)

    cdef int open(self, Region region) except -1:
        """Take the first region. Called once, before anything else."""
        cdef bint known = region.seen_elsewhere()
        region.pin_unused()                  # another thread may close it as soon as it is here
        try:
            region.attach(self)
            try:
                self.add_region(region, (region,), known)
            except BaseException:
                region.detach(False)
                raise
            self.runs[0].start = self.runs[0].end = self.frames[0].cursor = <uintptr_t>region.ptr
            self.continue_at(<uintptr_t>region.ptr, 0)
            self.one_piece = self.leased == NULL
            if self.unrecorded:
                self.open_check()
            self.shut = False
            self.update_fast_path()
        finally:
            region.unpin()
        return 0

    cdef void keep_dead_buffers(self, bint short) noexcept:
        drop_kept(self)
        self.freelist.n_kept = 0 if short else KEPT_OBJECTS

    cdef int check_free(self) except -1:
        """Not all that was given back: C calls may have it again, and tell the ledger nothing."""
        cdef Extent* e
        if self.debug:
            self.check()
            arenapy_lock_acquire(&self.lock)
            if not self.shut:
                self.ledger.scan(self.cursor, self.limit)
                e = extents_first(&self.free)
                while e != NULL:
                    self.ledger.scan(e.start, e.end)
                    e = extents_above(&self.free, e.region, e.start)
            arenapy_lock_release(&self.lock)
            self.raise_damage()
        return 0

    # -- figures

    cdef void update_fast_path(self) noexcept nogil:
        """After what it depends on has changed."""
        self.fast_rewind = self.one_piece and not (self.shut or self.debug or self.may_lease)

    cdef void expect_leases(self, bint forks) noexcept nogil:
        """From any thread."""
        cdef uint64_t no = 0
        if arenapy_cas(&self.noted, &no, 1):
            self.push_ended(&self.note)

    cdef size_t free_bytes(self) noexcept nogil:
        return self.capacity - used(self) - self.retired_bytes - self.leased_bytes

    cdef size_t largest_free(self) noexcept nogil:
        """The largest free range; what joins the current extent on a miss counts with it."""
        cdef size_t current = self.limit - self.cursor
        cdef Py_ssize_t here = self.runs[self.n_runs - 1].region
        cdef Extent* e = extents_below(&self.free, here, self.cursor)
        if e != NULL and e.region == here and e.end == self.cursor:
            current += e.end - e.start
        e = extents_above(&self.free, here, self.cursor)
        if e != NULL and e.region == here and e.start == self.limit:
            current += e.end - e.start
        return max(current, extents_most(&self.free))

    # -- runs

    cdef void push_run(self, uintptr_t start, Py_ssize_t region) noexcept nogil:
        """Begin another run behind the last one, whose end is right; there is room for it."""
        cdef Extent* last = &self.runs[self.n_runs - 1]
        self.before += last.end - last.start
        self.runs[self.n_runs] = Extent(start, start, region)
        self.n_runs += 1

    cdef void drop_run(self) noexcept nogil:
        cdef Extent* last
        self.n_runs -= 1
        last = &self.runs[self.n_runs - 1]
        self.before -= last.end - last.start

    cdef void continue_at(self, uintptr_t at, Py_ssize_t region) noexcept nogil:
        """Make the free bytes from `at` on, if any, the current extent of the current run."""
        cdef Extent* e = extents_below(&self.free, region, at)
        cdef uintptr_t end
        self.cursor = self.limit = at
        if e != NULL and e.region == region and e.end > at:
            end = e.end
            extents_carve(&self.free, at, end, region)
            self.limit = end

    cdef void place(self) noexcept nogil:
        """Put the cursor where it belongs when the last run has ended, and all that is free is in
        `free`: behind that run where nothing was ever retired; else at the lowest free extent, so
        that memory stays hot and gaps are used. There is room for one run more."""
        cdef Extent* last = &self.runs[self.n_runs - 1]
        cdef Extent* low = extents_first(&self.free)
        if self.retired != NULL or self.leased != NULL or self.holes.n:
            self.one_piece = False
        elif self.n_runs == 1:
            self.one_piece = True
        self.update_fast_path()
        if (self.one_piece or low == NULL
                or (low.region == last.region and low.start == last.end)):
            self.continue_at(last.end, last.region)
        else:
            self.push_run(low.start, low.region)
            self.cursor, self.limit = low.start, low.end
            extents_take(&self.free, low)
        if self.unrecorded:
            self.no_hits()

    # A spare run is an empty last run that no frame refers to.

    cdef bint run_is_spare(self) noexcept nogil:
        cdef Py_ssize_t last = self.n_runs - 1
        return self.cursor == self.runs[last].start and last > self.top.run

    cdef void pop_run(self) noexcept nogil:
        """Drop a spare run; all that is free is in `free` then. There is room for an extent."""
        extents_insert(&self.free, self.cursor, self.limit, self.runs[self.n_runs - 1].region)
        self.drop_run()

    # -- Python's side

    cdef Figures figures(self):
        """All figures of one moment."""
        self.reclaim(False)
        return self.figures_now()

    cdef Figures figures_now(self) noexcept:
        """The same, without asking streams and other processes, which may run other code."""
        cdef Figures f
        cdef Py_ssize_t i
        arenapy_lock_acquire(&self.lock)
        if not self.shut:
            self.drain()
        self.prune()                     # a Mark that dies leaves its frame to the next call
        f.capacity = self.capacity
        f.used = used(self)
        f.live = self.live
        f.free = self.free_bytes()
        f.largest_free = self.largest_free()
        f.retired = self.retired_bytes
        f.leased = self.leased_bytes
        f.peak = max(self.peak_bytes, f.used)
        f.metadata = (
            self.cap_runs * sizeof(Extent) + self.cap_frames * sizeof(Frame)
            + (self.free.capacity + self.holes.capacity) * sizeof(Node)
            + self.n_made * sizeof(Hold) + self.cap_regions * sizeof(PyObject*))
        for i in range(self.n_regions):
            f.metadata += children_nbytes(&(<Region>self.region[i]).seens)
        f.held = self.n_held
        f.marks = self.n_frames - 1
        f.regions = self.n_regions
        f.total = self.total
        f.bytes = self.freed + self.live
        arenapy_lock_release(&self.lock)
        return f

    cdef int reclaim(self, Py_ssize_t wait) except -1:
        """Take note of Buffers that died, and of bytes that others let go of."""
        self.settle_sends()
        self.settle_streams(wait)
        arenapy_lock_acquire(&self.lock)
        if not self.shut:
            self.drain()
            self.settle_leases(-1)
        arenapy_lock_release(&self.lock)
        return 0

    cdef str full(self, size_t n, size_t align, object max_bytes):
        """Why a request failed, and what to do."""
        cdef Figures f = self.figures()
        limit = (
            f"it may not grow beyond max_bytes={max_bytes}" if max_bytes is not None
            else "it does not grow unless max_bytes is given"
        )
        others = f", {f.leased} freed here that other processes still see" if f.leased else ""
        return (
            f"{n} bytes aligned to {align} do not fit: the arena has {f.capacity} bytes, "
            f"{f.used} used, {f.retired} retired (held across a reset), {f.free} free with "
            f"{f.largest_free} in one piece{others}, and {limit}. "
            "Reset it, drop arrays that hold memory, or make it larger"
        )

    # -- allocation

    cdef void* arena_alloc_slow(self, size_t n, size_t align, uint32_t* pad) noexcept nogil:
        """The current extent is too small: the first other that fits, else NULL."""
        cdef size_t size = n + (n == 0)
        cdef uintptr_t start
        cdef Py_ssize_t here
        cdef Extent* found
        cdef Extent e
        if self.shut or size > self.capacity:
            return NULL
        self.drain()
        if not (extents_room(&self.free, 3) and make_room(
                <void**>&self.runs, &self.cap_runs, self.n_runs + 1, sizeof(Extent))):
            return NULL
        here = self.runs[self.n_runs - 1].region
        # The rest of the current extent may join what was freed beside it.
        extents_insert(&self.free, self.cursor, self.limit, here)
        found = extents_fit(&self.free, size, align)
        if found == NULL and self.leased != NULL:
            self.settle_leases(LEASES_ASKED)
            found = extents_fit(&self.free, size, align)
        if found == NULL:
            self.continue_at(self.cursor, here)
            return NULL
        e = extents_take(&self.free, found)
        if e.region != here or e.start != self.cursor:
            self.runs[self.n_runs - 1].end = self.cursor
            if self.run_is_spare():
                self.drop_run()
            self.push_run(e.start, e.region)
        start = (e.start + (align - 1)) & ~<uintptr_t>(align - 1)
        self.limit = e.end
        self.cursor = start + size
        self.live += n
        self.total += 1
        pad[0] = <uint32_t>(start - e.start)
        permit(self, start, n)
        arenapy_assert(start & (align - 1) == 0, b"a block is aligned as asked")
        arenapy_assert(bump_is_valid(self), b"the arena is valid")
        return <void*>start

    # -- freeing by moving back

    cdef bint is_last(self, uintptr_t end, uint64_t content) noexcept nogil:
        return end == self.cursor and content == self.content

    cdef void rejoin_run(self, uintptr_t end) noexcept nogil:
        """Leave a spare run for the one before, if that ends here."""
        if (self.run_is_spare() and self.runs[self.n_runs - 2].end == end
                and extents_room(&self.free, 1)):
            self.pop_run()
            self.continue_at(end, self.runs[self.n_runs - 1].region)

    cdef bint move_back(self, uintptr_t start, uintptr_t end, uint64_t content, uint32_t pad,
                        bint empty) noexcept nogil:
        """Free the newest block by moving the cursor over it, unless a mark is newer."""
        cdef uintptr_t at, stop, lowest
        cdef Py_ssize_t last
        if self.shut or not extents_room(&self.free, 2):
            return False
        arenapy_assert(bump_is_valid(self), b"the arena is valid")
        if content != self.content:
            self.prune()
        self.rejoin_run(end)
        last = self.n_runs - 1
        lowest = self.top.cursor if last == self.top.run else self.runs[last].start
        # A block of C code comes without its tag: what lies before a mark is not moved over.
        if start - pad < lowest or not self.is_last(end, content):
            return False
        if self.may_lease and self.leased_part(start, end, self.runs[last].region, &at, &stop):
            return False
        note_peak(self)
        self.poison(start, end)
        self.cursor = start - pad
        self.freed += end - start - empty
        self.came_back += 1
        self.live -= end - start - empty
        if self.run_is_spare():
            self.pop_run()
            self.place()
        arenapy_assert(bump_is_valid(self), b"the arena is valid")
        return True

    # -- held blocks

    cdef bint alive(self, Block root) noexcept nogil:
        """Is the frame that an unheld Buffer was allocated in still there?"""
        cdef Py_ssize_t i = self.frame_of(root.tag)
        return i >= 0 and self.frames[i].content == root.tag

    cdef Py_ssize_t frame_of(self, uint64_t content) noexcept nogil:
        """Index of the last frame whose content stamp is at most this one."""
        cdef Py_ssize_t low = 0, high = self.n_frames, middle
        while low < high:
            middle = (low + high) // 2
            if self.frames[middle].content <= content:
                low = middle + 1
            else:
                high = middle
        return low - 1

    cdef void enlist(self, Hold* hold) noexcept nogil:
        self.n_held += 1
        link_hold(&self.frames[self.frame_of(hold.tag)].holds, hold)

    cdef void delist(self, Hold* hold) noexcept nogil:
        self.n_held -= 1
        unlink_hold(&self.frames[self.frame_of(hold.tag)].holds, hold)

    cdef void release_block(self, Block root) noexcept nogil:
        cdef uintptr_t start = <uintptr_t>root.ptr
        cdef bint empty = root.size == 0
        record(self, EVENT_FREE, root.ptr, root.size)
        catch_up(self)
        if not self.move_back(start, start + root.size + empty, root.tag, root.pad, empty):
            forbid(self, start, start + root.size)

    cdef void hold_ended(self, Hold* hold) noexcept nogil:
        if self.debug:
            self.leaving(<void*>hold.start)
        record(self, EVENT_FREE, <void*>hold.start, hold.end - hold.start)
        self.push_ended(hold)

    cdef void push_ended(self, Hold* hold) noexcept nogil:
        cdef void* head = arenapy_load_ptr(&self.ended_list)
        hold.ended_next = <Hold*>head
        while not arenapy_cas_ptr(&self.ended_list, &head, hold):
            hold.ended_next = <Hold*>head

    cdef void drain(self) noexcept nogil:
        """Account for the holds that ended, in the order in which they did."""
        cdef Hold* hold
        cdef Hold* other
        cdef Hold* queue = NULL
        cdef bint back = False, noted = False
        if arenapy_load_ptr(&self.ended_list) == NULL:
            return
        hold = <Hold*>arenapy_take_ptr(&self.ended_list)
        while hold != NULL:                  # newest first: reverse
            other = hold.ended_next
            if hold == &self.note:
                noted = True
            else:
                hold.ended_next = queue
                queue = hold
            hold = other
        if noted:
            # Before the records are looked at: a fork that finds 1 here has made its own by then.
            arenapy_store(&self.noted, 0)
            self.may_lease = True
            self.update_fast_path()
            self.settle_forks()
        while queue != NULL:
            hold = queue
            queue = hold.ended_next
            arenapy_assert(self.n_held > 0, b"a hold that ends was counted")
            arenapy_assert(hold.start < hold.end, b"a hold has bytes: start < end")
            self.n_held -= 1
            if hold.flags & HOLD_RETIRED:
                unlink_hold(&self.retired, hold)
                arenapy_assert(
                    self.retired_bytes >= hold.end - hold.start, b"retired bytes were counted")
                self.retired_bytes -= hold.end - hold.start
                self.free_or_lease(hold)
                self.came_back += 1
                back = True
            else:
                unlink_hold(&self.frames[self.frame_of(hold.tag)].holds, hold)
                # If it is not the newest, its bytes come back at the next reset.
                if not self.move_back(hold.start, hold.end, hold.tag, hold.pad,
                                      hold.flags & HOLD_EMPTY != 0):
                    forbid(self, hold.start, hold.end)
                drop_hold(self, hold)
        # Nothing was allocated since a reset put the cursor here: there may be a better place now.
        if back and not self.shut and self.run_is_spare() and extents_room(&self.free, 1):
            self.pop_run()
            self.place()

    cdef void settle_forks(self) noexcept nogil:
        cdef Py_ssize_t i, here = self.runs[self.n_runs - 1].region
        if not self.shut:
            if not extents_room(&self.free, 3):
                return                       # the children keep us from all of it
            extents_insert(&self.free, self.cursor, self.limit, here)
        for i in range(self.n_regions):
            self.settle_region(i)
        if not self.shut:
            self.continue_at(self.cursor, here)

    cdef void recording_ends(self) noexcept nogil:
        """Which of the blocks that resets ended are there still."""
        cdef Hold* hold
        arenapy_lock_acquire(&self.lock)
        self.drain()                         # some may have gone
        hold = self.retired
        while hold != NULL:
            record(self, EVENT_KEEP, <void*>hold.start, 0)
            hold = hold.next
        arenapy_lock_release(&self.lock)

    cdef bint has_holds(self) noexcept nogil:
        self.drain()
        return self.n_held > 0

    # -- frames

    cdef bint is_empty(self, Frame* frame) noexcept nogil:
        """Was nothing allocated since the mark, or everything since freed?"""
        cdef Py_ssize_t last = self.n_runs - 1
        if frame.holds != NULL:
            return False
        if last == frame.run:
            return self.cursor == frame.cursor
        return (last == frame.run + 1 and self.runs[frame.run].end == frame.cursor
                and self.cursor == self.runs[last].start)

    cdef Frame* push_frame(self) noexcept nogil:
        """The frame of a new mark: the last one if it is empty; NULL without memory."""
        cdef Frame* frame = self.top
        if self.n_frames > 1 and self.is_empty(frame):
            return frame
        if not make_room(<void**>&self.frames, &self.cap_frames, self.n_frames + 1, sizeof(Frame)):
            return NULL
        self.top = frame = &self.frames[self.n_frames]
        self.n_frames += 1
        self.stamp += 1
        frame.content = frame.id = self.content = self.stamp
        frame.run = self.n_runs - 1
        frame.cursor = self.cursor
        frame.live = self.live
        frame.holds = NULL
        frame.c_marks = frame.python_marks = 0
        arenapy_assert(bump_is_valid(self), b"the arena is valid")
        return frame

    cdef void prune(self) noexcept nogil:
        """Forget the last frames if they are empty and no mark refers to them any more."""
        cdef Frame* frame = self.top
        cdef Extent* run
        while (self.n_frames > 1 and frame.c_marks == 0 and frame.id > self.live_mark
                and self.is_empty(frame)):
            self.n_frames -= 1
            self.top = frame = frame - 1
            self.content = frame.content
            # An empty run that this frame alone stood at goes with it.
            if self.n_runs - 2 > frame.run:
                run = &self.runs[self.n_runs - 2]
                if run.start == run.end:
                    run[0] = run[1]
                    self.n_runs -= 1

    cdef Py_ssize_t find_frame(self, uint64_t id) noexcept nogil:
        """Index of the frame of a mark, -1 if that was ended."""
        cdef Py_ssize_t low = 0, high = self.n_frames - 1, middle
        while low < high:
            middle = (low + high + 1) // 2
            if self.frames[middle].id <= id:
                low = middle
            else:
                high = middle - 1
        return low if self.frames[low].id == id else -1

    cdef Py_ssize_t frame_of_mark(self, Mark mark) noexcept:
        """Index of the frame of a Mark, -1 if that was ended."""
        cdef Py_ssize_t f = self.find_frame(mark.id) if mark.valid else -1
        return f if f >= 0 and stands(&self.frames[f], <PyObject*>mark) else -1

    cdef Py_ssize_t survivors(self, Py_ssize_t f) noexcept nogil:
        """How many held blocks a reset to frame `f` would retire."""
        cdef Py_ssize_t n = 0
        cdef Hold* hold
        self.drain()
        for f in range(f, self.n_frames):
            hold = self.frames[f].holds
            while hold != NULL:
                n += 1
                hold = hold.next
        return n

    cdef int rewind_slow(self, Py_ssize_t f) noexcept nogil:
        cdef Frame* frame = &self.frames[f]
        cdef Hold* hold
        cdef Hold* next
        cdef Py_ssize_t held = self.survivors(f)
        cdef Py_ssize_t i, first = frame.run
        cdef uintptr_t start
        self.settle_leases(LEASES_ASKED)
        # All memory first: from here on nothing can fail, or take of this room.
        if not (extents_room(&self.free, self.n_runs - first + held + 4) and make_room(
                <void**>&self.runs, &self.cap_runs, self.n_runs + 1, sizeof(Extent))):
            return -1
        note_peak(self)
        extents_insert(&self.free, self.cursor, self.limit, self.runs[self.n_runs - 1].region)
        self.runs[self.n_runs - 1].end = self.cursor
        for i in range(first, self.n_runs):
            start = frame.cursor if i == first else self.runs[i].start
            extents_insert(&self.free, start, self.runs[i].end, self.runs[i].region)
        for i in range(f, self.n_frames):
            hold = self.frames[i].holds
            while hold != NULL:
                next = hold.next
                hold.region = self.region_of(hold.start)
                hold.flags |= HOLD_RETIRED
                extents_carve(&self.free, hold.start, hold.end, hold.region)
                self.retired_bytes += hold.end - hold.start
                link_hold(&self.retired, hold)
                hold = next
        for i in range(first, self.n_runs):
            start = frame.cursor if i == first else self.runs[i].start
            if self.may_lease:
                self.carve_leases(start, self.runs[i].end, self.runs[i].region)
            if POISONS or self.debug:
                self.poison_free(start, self.runs[i].end, self.runs[i].region)
        while self.n_runs - 1 > first:
            self.drop_run()
        self.runs[first].end = frame.cursor
        self.place()
        self.n_frames = f + 1
        self.top = frame
        frame.holds = NULL
        self.freed += self.live - frame.live
        self.live = frame.live
        self.stamp += 1
        self.content = frame.content = self.stamp
        arenapy_assert(bump_is_valid(self), b"the arena is valid")
        arenapy_assert(self.live == frame.live, b"a reset leaves what was live at the mark")
        return 0

    cdef void disable(self, int why) noexcept nogil:
        AllocatorCore.disable(self, why)
        self.no_hits()

    cdef void no_hits(self) noexcept nogil:
        """From now on no request is served of the current extent."""
        if extents_room(&self.free, 1):
            extents_insert(
                &self.free, self.cursor, self.limit, self.runs[self.n_runs - 1].region)
        self.limit = self.cursor
        self.update_fast_path()

    cdef int open_check(self) except -1:
        if self.unrecorded:
            raise ValueError(
                "there was no memory to record which bytes of this arena other processes see, so "
                "it hands out none any more: make a new arena")
        return Arena.open_check(self)

    cdef void fork_unlock(self, bint child) noexcept nogil:
        if child and self.growing != this_thread():
            self.growing = 0                 # another thread's call, which ended there
        Arena.fork_unlock(self, child)

    cdef void forked(self, bint unmapped) noexcept nogil:
        """As `disable`, while nothing can be relied on: what is free is not found any more."""
        AllocatorCore.disable(self, GONE_FORKED if unmapped else GONE_NOT)
        self.cursor = self.limit
        self.fast_rewind = False

    cdef int lease_live(self, PyObject* region, void* seen) noexcept nogil:
        cdef uintptr_t start = <uintptr_t>(<Region>region).ptr
        seen_add(<Seen*>seen, start, start + (<Region>region).size)
        (<Seen*>seen).unsettled = True
        return 0


seal(BumpCore)


# ---- marks, as Python sees them ----------------------------------------------------------
# Mark: a position in a Bump, as Python sees it.
#
# Marks with nothing allocated between them share a frame of the core, and are told apart by their
# order in a list of the live ones, newest first: a reset ends those that are newer.

@cython.final
@cython.freelist(64)
@cython.no_gc_clear          # the core is needed to the last
cdef class Mark:
    """A position in a Bump, from :meth:`Bump.mark`, for :meth:`Bump.reset`.

    Examples
    --------
    >>> import arenapy
    >>> arena = arenapy.Bump(1 << 20)
    >>> outer = arena.mark()
    >>> inner = arena.mark()
    >>> arena.reset(outer)                   # ends the marks that are newer
    >>> arena.reset(inner)
    Traceback (most recent call last):
        ...
    ValueError: <Mark ..., ended> was ended by a reset to an older one; take a new mark
    """

    def __dealloc__(self):
        if self.core is not None:
            arenapy_lock_acquire(&self.core.lock)
            end_mark(<PyObject*>self)
            arenapy_lock_release(&self.core.lock)

    def __repr__(self):
        return f"<Mark {self.id}{'' if self.valid else ', ended'}>"


seal(Mark, "a Mark is made by Bump.mark(), not by calling the class")


cdef void begin_mark(Mark mark, BumpCore core, Frame* frame) noexcept:
    while core.last_mark != NULL and not stands(frame, core.last_mark):
        end_mark(core.last_mark)
    core.stamp += 1
    mark.id, mark.serial = frame.id, core.stamp
    frame.python_marks = mark.serial
    mark.valid = True
    mark.older = core.last_mark
    if mark.older != NULL:
        (<Mark>mark.older).newer = <PyObject*>mark
    core.last_mark = <PyObject*>mark
    core.live_mark = mark.id


cdef bint stands(Frame* frame, PyObject* m) noexcept:
    """Has no reset in C ended it? It is of this frame, which may be the last one, or an older."""
    return (<Mark>m).id < frame.id or (
        (<Mark>m).id == frame.id and (<Mark>m).serial <= frame.python_marks)


cdef void end_mark(PyObject* m) noexcept:
    # Nothing is counted: it may be ending in another thread, which waits for the lock.
    cdef PyObject* older = (<Mark>m).older
    cdef PyObject* newer = (<Mark>m).newer
    if not (<Mark>m).valid:
        return
    (<Mark>m).valid = False
    if older != NULL:
        (<Mark>older).newer = newer
    if newer != NULL:
        (<Mark>newer).older = older
    else:
        (<Mark>m).core.last_mark = older
        (<Mark>m).core.live_mark = (<Mark>older).id if older != NULL else 0
    (<Mark>m).older = (<Mark>m).newer = NULL
