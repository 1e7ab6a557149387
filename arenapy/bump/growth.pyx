"""Growth of an arena: how much memory it gets from its source, and gives back.

An arena grows by a further region, twice as large as the one before; or in place, if its source
reserves addresses. Then the one region becomes longer, and what is free at its end is joined with
what is new. A trim makes it shorter again, and leaves holes between blocks: addresses without
memory, which are the first to get memory when the arena grows next.

What lives here: how large the growth is, and that it has room for the request. What does not: where
blocks go in it (core).
"""
cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc

from arenapy.allocator.allocator cimport make_region, make_reservation
from arenapy.allocator.allocator_core cimport forbid_new, permit, record
from arenapy.base.atomic cimport arenapy_lock_acquire, arenapy_lock_release
from arenapy.base.interval_set cimport (
    Extent, extents_above, extents_below, extents_carve, extents_first, extents_from,
    extents_insert, extents_last, extents_room, extents_take,
)
from arenapy.base.sanitizer cimport POISONS
from arenapy.base.sealed cimport seal
from arenapy.base.thread_slot cimport this_thread
from arenapy.buffer.block cimport (
    HOLD_EMPTY, NEEDED, Hold, born_held, drop_hold, is_open_locked,
)
from arenapy.buffer.buffer cimport Buffer
from arenapy.bump.core cimport BumpCore
from arenapy.bump.hot_path cimport arena_alloc, catch_up
from arenapy.diagnostics.recorder cimport EVENT_GROW, EVENT_TRIM
from arenapy.memory.region cimport Region

from arenapy.errors import OutOfMemory
from arenapy.linux.reserved_space import decommit as take_back
from arenapy.memory.reservation import Reservation


cdef enum:
    GROWTH = 2               # each further region is this many times the one before
    GROWTH_SHARE = 64        # in place, an arena grows by this part of what it has,
    HUGE = 2 << 20           # or by so many bytes


@cython.final
cdef class InPlace:
    """A source whose one region grows in place, for one arena. Internal.

    The region begins with `ready` bytes of memory, and its addresses go on to `room`.
    """

    def region(self, nbytes):
        """The region, of so many bytes. It is asked for once."""
        if self.reservation is not None:
            raise ValueError("a source for one arena has given its region")
        made = make_reservation(self.source, self.room)
        if made is None:
            raise TypeError(f"{self.source!r}.reserve({self.room}) returned None")
        self.reservation, self.its_region = made
        self.nbytes, self.page = self.its_region.size, self.its_region.page_size
        self.extend(nbytes)
        self.its_region.check_unused()       # as before: the source may run any code
        self.its_region.size = nbytes
        return self.its_region

    cdef size_t with_memory(self, size_t nbytes) noexcept:
        """How much has memory if so many bytes are wanted: whole pages, and whole huge pages."""
        cdef size_t step = max(self.page, <size_t>HUGE) if nbytes >= HUGE else self.page
        return min((nbytes + step - 1) // step * step, self.nbytes)

    cdef int extend(self, size_t nbytes) except -1:
        cdef size_t ready = self.with_memory(nbytes)
        if ready > self.ready:
            self.commit(self.ready, ready - self.ready)
            self.ready = ready
        return 0

    cdef int shorten(self, size_t nbytes, object stream) except -1:
        cdef size_t ready = self.with_memory(nbytes)
        if ready < self.ready:
            self.decommit(ready, self.ready - ready, stream)
            self.ready = ready
        return 0

    # Pinned: others could map parts of it that are unmapped while the source works there.

    cdef int commit(self, size_t offset, size_t nbytes) except -1:
        self.its_region.pin()
        try:
            self.reservation.commit(offset, nbytes)
        finally:
            self.its_region.unpin()
        return 0

    cdef int decommit(self, size_t offset, size_t nbytes, object stream) except -1:
        self.its_region.pin()
        try:
            if type(self.reservation) is Reservation:        # the same, but no handler runs amid it
                take_back(<uintptr_t>self.its_region.ptr + offset, nbytes,
                          shared_by=self.reservation._shared_by)
            else:
                self.reservation.decommit(offset, nbytes, stream)
        finally:
            self.its_region.unpin()
        return 0


seal(InPlace)


cdef InPlace in_place(object source, size_t room):
    cdef InPlace place = InPlace.__new__(InPlace)
    place.source, place.room = source, room
    return place


cdef Region newest_region(BumpCore c):
    cdef tuple regions = c.listed()
    return <Region>regions[len(regions) - 1]


cdef uintptr_t last_position(BumpCore c) noexcept nogil:
    """The highest address where the cursor or a frame stands. The region does not end before it.

    Where nothing is allocated, such a position may lie in the midst of what is free, or of a hole.
    """
    cdef uintptr_t last = c.cursor
    cdef Py_ssize_t i
    for i in range(c.n_frames):
        last = max(last, c.frames[i].cursor)
    return last


cdef size_t free_end(BumpCore c) noexcept nogil:
    """Bytes at the end of the one region that are free, and behind all positions."""
    cdef uintptr_t end = <uintptr_t>(<Region>c.region[0]).ptr + (<Region>c.region[0]).size
    cdef Extent* e = extents_below(&c.free, 0, end - 1)
    cdef uintptr_t start = e.start if e != NULL and e.end == end else end
    return end - max(c.cursor if c.limit == start else start, last_position(c))


cdef uintptr_t reach(BumpCore c, uintptr_t at) noexcept nogil:
    """Where what is free from an address on ends, holes included."""
    cdef Extent* e = NULL
    cdef bint further = True
    while further:
        e = extents_from(&c.free, 0, at)
        if e == NULL or e.start > at:
            e = extents_from(&c.holes, 0, at)
        further = e != NULL and e.start <= at
        if further:
            at = e.end
    return at


cdef bint fits_at(Extent* room, size_t n, size_t align, uintptr_t* start) noexcept nogil:
    start[0] = (room.start + (align - 1)) & ~<uintptr_t>(align - 1)
    return start[0] <= room.end and n <= room.end - start[0]


cdef bint find_room(
    BumpCore c, uintptr_t stop, size_t left, size_t n, size_t align, bint here, uintptr_t* start,
    Extent* room,
) noexcept nogil:
    """The first place for n bytes in what is free, in holes, and in what lies behind the region's
    end; if `here`, at the cursor. What is all free is not looked at. There is room for extents."""
    cdef Extent* hole
    cdef Extent* e
    cdef bint found = False
    extents_insert(&c.free, c.cursor, c.limit, 0)
    hole = extents_first(&c.holes) if not here else NULL
    while hole != NULL and not found:
        e = extents_below(&c.free, 0, hole.start)
        room.start = e.start if e != NULL and e.end == hole.start else hole.start
        room.end = reach(c, hole.start)
        room.end += left if room.end == stop else 0
        found = fits_at(room, n, align, start)
        hole = extents_from(&c.holes, 0, room.end)
    if not found:
        e = extents_below(&c.free, 0, stop - 1)
        room.start = e.start if e != NULL and e.end == stop else stop
        room.start = c.cursor if here else room.start
        room.end = reach(c, room.start)
        room.end += left if room.end == stop else 0
        found = fits_at(room, n, align, start)
    c.continue_at(c.cursor, 0)
    return found


cdef size_t without_memory(
    BumpCore c, uintptr_t start, uintptr_t end, size_t granule, Extent* parts, Py_ssize_t* n
) noexcept nogil:
    """The parts of holes, in whole granules, that lie in [start, end); how many bytes these are."""
    cdef uintptr_t base = <uintptr_t>(<Region>c.region[0]).ptr
    cdef Extent* hole = extents_from(&c.holes, 0, start)
    cdef size_t nbytes = 0
    n[0] = 0
    while hole != NULL and hole.start < end:
        parts[n[0]].start = max(hole.start, base + (start - base) // granule * granule)
        parts[n[0]].end = min(hole.end, base + (end - base + granule - 1) // granule * granule)
        nbytes += parts[n[0]].end - parts[n[0]].start
        n[0] += 1
        hole = extents_above(&c.holes, 0, hole.start)
    return nbytes


cdef int give_memory(
    BumpCore c, InPlace place, Extent* parts, Py_ssize_t n, size_t size
) except -1:
    """Memory for parts of holes, and for a region of so many bytes. All of it, or an exception."""
    cdef Region region = <Region>c.regions[0]
    cdef uintptr_t base = <uintptr_t>region.ptr, end = base + region.size
    cdef size_t more = size - region.size
    cdef Py_ssize_t i, made = 0
    cdef bint room
    try:
        for i in range(n):
            place.commit(parts[i].start - base, parts[i].end - parts[i].start)
            made = i + 1
        place.extend(size)
        arenapy_lock_acquire(&c.lock)
        room = extents_room(&c.free, n + 1) and extents_room(&c.holes, n) and not c.shut
        if room:
            for i in range(n):
                fill(c, parts[i].start, parts[i].end)
            if more:
                lengthen(c, region, more)
        arenapy_lock_release(&c.lock)
        if not room:
            c.open_check()
            raise MemoryError("no memory for the bookkeeping of an arena")
    except BaseException:
        stream = c.hooks.own if c.hooks is not None else None
        try:
            place.shorten(region.size, stream)
        except (RuntimeError, MemoryError):
            pass                             # it stays ready
        for i in range(made):
            try:
                place.decommit(parts[i].start - base, parts[i].end - parts[i].start, stream)
            except (RuntimeError, MemoryError):      # it has kept its memory: no hole any more
                arenapy_lock_acquire(&c.lock)
                room = extents_room(&c.free, 1) and extents_room(&c.holes, 1) and not c.shut
                if room:
                    fill(c, parts[i].start, parts[i].end)
                arenapy_lock_release(&c.lock)
                if room:
                    record(c, EVENT_GROW, <void*>parts[i].start, parts[i].end - parts[i].start)
        raise
    for i in range(n):
        record(c, EVENT_GROW, <void*>parts[i].start, parts[i].end - parts[i].start)
    if more:
        record(c, EVENT_GROW, <void*>end, more)
    return 0


cdef int grow_in_place(
    BumpCore c, InPlace place, object max_bytes, size_t n, size_t align, bint here
) except -1:
    """As `grow_arena`: memory for holes, or behind the one region, so that n bytes fit.

    If `here`, they fit at the cursor.
    """
    cdef Region region = <Region>c.regions[0]
    cdef size_t granule = max(place.page, <size_t>HUGE)
    cdef size_t left, missing, spare
    cdef uintptr_t base = <uintptr_t>region.ptr, start = 0, end, most
    cdef Extent* parts = NULL
    cdef Extent room
    cdef Py_ssize_t n_parts
    cdef bint busy, found = False
    c.open_check()
    n += n == 0
    arenapy_lock_acquire(&c.lock)
    busy = c.growing != 0
    if not busy:
        c.growing = this_thread()            # nobody else changes the holes, and the size
    arenapy_lock_release(&c.lock)
    if busy:
        raise OutOfMemory(
            f"{n} bytes aligned to {align} do not fit, and the arena is growing just now, in "
            "another thread or for an allocation that this code interrupted: allocate afterwards, "
            "or from another arena")
    arenapy_lock_acquire(&c.lock)
    left = place.room - region.size if place.room > region.size else 0
    if extents_room(&c.free, 3):
        parts = <Extent*>malloc((c.holes.n + 1) * sizeof(Extent))
    if parts != NULL:
        found = find_room(c, base + region.size, left, n, align, here, &start, &room)
    arenapy_lock_release(&c.lock)
    try:
        if parts == NULL:
            raise MemoryError("no memory for the bookkeeping of an arena")
        if not found:
            raise OutOfMemory(c.full(n, align, max_bytes))
        end = most = start + n
        missing = without_memory(c, start, end, granule, parts, &n_parts)
        missing += end - base - region.size if end > base + region.size else 0
        spare = max(<size_t>HUGE, region.size // GROWTH_SHARE)
        if missing < spare:
            most = min(end + (spare - missing), room.end)
        without_memory(c, start, most, granule, parts, &n_parts)
        try:
            give_memory(c, place, parts, n_parts, max(most - base, region.size))
        except OutOfMemory:
            if most == end:
                raise
            without_memory(c, start, end, granule, parts, &n_parts)    # no more than has to be
            give_memory(c, place, parts, n_parts, max(end - base, region.size))
    finally:
        c.growing = 0
        free(parts)
    return 0


cdef void fill(BumpCore c, uintptr_t start, uintptr_t end) noexcept nogil:
    """Part of a hole has memory now, and is free; there is room for an extent in both sets."""
    extents_carve(&c.holes, start, end, 0)
    c.capacity += end - start
    made_free(c, start, end)


cdef void lengthen(BumpCore c, Region region, size_t nbytes) noexcept nogil:
    """The one region has so many bytes more, which have memory; there is room for an extent."""
    cdef uintptr_t end = <uintptr_t>region.ptr + region.size
    region.size += nbytes
    c.capacity += nbytes
    made_free(c, end, end + nbytes)


cdef void made_free(BumpCore c, uintptr_t start, uintptr_t end) noexcept nogil:
    if c.debug:
        c.ledger.forget(start, end)
    forbid_new(c, start, end)
    if c.limit == start:                     # the current extent goes on
        c.limit = end
    else:
        extents_insert(&c.free, start, end, 0)


cdef list holes_of(BumpCore c):
    """(start, end) of each hole."""
    cdef list holes = []
    cdef uintptr_t at = 0
    cdef Extent hole
    cdef Extent* found
    while True:
        arenapy_lock_acquire(&c.lock)
        found = extents_from(&c.holes, 0, at)
        if found != NULL:
            hole = found[0]
        arenapy_lock_release(&c.lock)
        if found == NULL:
            return holes
        holes.append((hole.start, hole.end))
        at = hole.end


cdef int give_back_growth(
    BumpCore c, object source, Py_ssize_t regions, size_t capacity, size_t size, list holes
) except -1:
    """Let go of free memory, but for so much capacity: of regions at the end, but for so many; or
    of the one that grows in place, at its end down to `size`, and in what is to be holes."""
    cdef InPlace place
    cdef Region region
    cdef uintptr_t start, end
    if not isinstance(source, InPlace):
        while c.n_regions > regions and c.capacity - newest_region(c).size >= capacity:
            dropped = c.drop_regions(c.n_regions - 1)
            if not dropped:
                break
            for region in dropped:
                record(c, EVENT_TRIM, region.ptr, region.size)
                if c.hooks is not None:
                    c.hooks.leave((region,))
                region.detach(c.belongs_to_stream())
        return 0
    place = <InPlace>source
    while cut_end(c, place, capacity, size):
        pass
    for start, end in holes or ():
        while dig_hole(c, place, capacity, start, &end):
            pass
    return 0


cdef bint cut_end(BumpCore c, InPlace place, size_t capacity, size_t size) except -1:
    """Give back free memory at the end of the one region. True: there may be more to give back."""
    cdef Region region = <Region>c.regions[0]
    cdef Extent* hole
    cdef size_t less
    cdef uintptr_t end
    cdef bint done = False
    arenapy_lock_acquire(&c.lock)
    if c.growing:
        arenapy_lock_release(&c.lock)
        return False
    catch_up(c)
    if c.run_is_spare() and extents_room(&c.free, 1):    # it may stand at the end, of all places
        c.pop_run()
        c.place()
    less = free_end(c) if extents_room(&c.free, 1) else 0
    less = min(less, c.capacity - min(capacity, c.capacity))
    less = min(less, region.size - min(size, region.size))
    if less:
        shorten(c, region, less)
        c.growing = this_thread()
    end = <uintptr_t>region.ptr + region.size
    arenapy_lock_release(&c.lock)
    if less:
        try:
            place.shorten(region.size, c.hooks.own if c.hooks is not None else None)
            done = True
        except (RuntimeError, MemoryError):  # of a device, which a captured stream may use
            pass
        finally:
            if not done:
                arenapy_lock_acquire(&c.lock)
                if extents_room(&c.free, 1):
                    lengthen(c, region, less)
                arenapy_lock_release(&c.lock)
            c.growing = 0
        if not done:
            return False
        record(c, EVENT_TRIM, <void*>end, less)
    # A hole at the end is no longer in the region.
    arenapy_lock_acquire(&c.lock)
    hole = extents_last(&c.holes)
    done = (hole != NULL and not c.growing
            and hole.end == <uintptr_t>region.ptr + region.size and hole.start >= last_position(c)
            and hole.start >= <uintptr_t>region.ptr + size)
    if done:
        region.size = place.ready = hole.start - <uintptr_t>region.ptr
        extents_take(&c.holes, hole)
    arenapy_lock_release(&c.lock)
    return done


cdef bint dig_hole(
    BumpCore c, InPlace place, size_t capacity, uintptr_t above, uintptr_t* below
) except -1:
    """Give back the last free granules between two addresses; the upper one moves down to them.
    False: there are none, or they have to stay."""
    cdef uintptr_t base = <uintptr_t>(<Region>c.regions[0]).ptr
    cdef size_t granule = max(place.page, <size_t>HUGE)
    cdef uintptr_t start = 0, end = 0
    cdef size_t most
    cdef Extent* e
    cdef bint done = False
    arenapy_lock_acquire(&c.lock)
    if c.growing:
        arenapy_lock_release(&c.lock)
        return False
    catch_up(c)
    most = (c.capacity - min(capacity, c.capacity)) // granule * granule
    if most and not c.shut and extents_room(&c.free, 3) and extents_room(&c.holes, 1):
        extents_insert(&c.free, c.cursor, c.limit, 0)
        e = extents_below(&c.free, 0, below[0] - 1)
        while e != NULL and start == end:
            end = base + (min(e.end, below[0]) - base) // granule * granule
            start = base + (e.start - base + granule - 1) // granule * granule
            # The first granule stays, so that the region has a byte.
            start = min(max(start, base + granule, above), end)
            start = max(start, end - min(most, <size_t>(end - start)))
            below[0] = e.start
            e = extents_below(&c.free, 0, e.start - 1)
        if start < end:
            dig(c, start, end)
            c.growing = this_thread()
        c.continue_at(c.cursor, 0)
    arenapy_lock_release(&c.lock)
    if start == end:
        return False
    try:
        place.decommit(start - base, end - start, c.hooks.own if c.hooks is not None else None)
        done = True
    except (RuntimeError, MemoryError):      # as in `cut_end`
        pass
    finally:
        if not done:
            arenapy_lock_acquire(&c.lock)
            if extents_room(&c.free, 1) and extents_room(&c.holes, 1):
                fill(c, start, end)
            arenapy_lock_release(&c.lock)
        c.growing = 0
    if done:
        record(c, EVENT_TRIM, <void*>start, end - start)
    return done


cdef void dig(BumpCore c, uintptr_t start, uintptr_t end) noexcept nogil:
    """The reverse of `fill`, of bytes in `free`; there is room for an extent in both sets."""
    extents_carve(&c.free, start, end, 0)
    extents_insert(&c.holes, start, end, 0)
    c.capacity -= end - start
    c.one_piece = False
    c.update_fast_path()
    if c.debug:
        c.ledger.forget(start, end)
    permit(c, start, end - start)


cdef void shorten(BumpCore c, Region region, size_t nbytes) noexcept nogil:
    """The reverse of `lengthen`, of bytes that are free; there is room for an extent."""
    cdef uintptr_t end = <uintptr_t>region.ptr + region.size
    cdef uintptr_t cut = end - nbytes
    cdef Extent* e = extents_below(&c.free, 0, end - 1)
    if e != NULL and e.end == end:
        extents_carve(&c.free, max(cut, e.start), end, 0)
    c.limit = min(c.limit, cut)
    region.size -= nbytes
    c.capacity -= nbytes
    if c.debug:
        c.ledger.forget(cut, end)
    permit(c, cut, nbytes)


cdef uint64_t times_freed(BumpCore c) noexcept:
    cdef uint64_t times
    arenapy_lock_acquire(&c.lock)
    c.drain()
    times = c.stamp + c.came_back
    arenapy_lock_release(&c.lock)
    return times


cdef int grow_last(BumpCore c, Buffer buffer, Py_ssize_t n, list told, uint64_t freed) noexcept:
    cdef uintptr_t start, end
    cdef Py_ssize_t here
    cdef Extent* e
    cdef int how = GROWN_NOT
    cdef bint newest, late
    arenapy_lock_acquire(&c.lock)
    c.drain()
    if buffer.tag != c.content:
        c.prune()
    start = <uintptr_t>buffer.ptr
    end = start + buffer.size + (buffer.size == 0)
    c.rejoin_run(end)
    here = c.runs[c.n_runs - 1].region
    newest = (is_open_locked(buffer) and n >= buffer.size and c.is_last(end, buffer.tag)
              and not c.run_is_spare())
    if newest:
        e = extents_above(&c.free, here, c.cursor)
        if e != NULL and e.region == here and e.start == c.limit:    # it came back since
            c.limit = extents_take(&c.free, e).end
    late = buffer.hold != NULL and buffer.hold.uses != NULL and n > buffer.size and (
        buffer.hold.uses != <PyObject*>told or c.stamp + c.came_back != freed)
    if newest and late:
        how = GROWN_TOO_LATE
    elif newest and <size_t>n <= c.limit - start:
        c.cursor = start + n + (n == 0)
        c.live += n - buffer.size
        if POISONS:
            permit(c, start, n)
        buffer.size = n
        if buffer.hold != NULL:
            buffer.hold.end = c.cursor
            if n > 0:
                buffer.hold.flags &= ~<uint32_t>HOLD_EMPTY
        how = GROWN
    elif newest:
        e = extents_from(&c.holes, here, c.limit)
        if (e != NULL and e.start == c.limit) or c.limit == (
                <uintptr_t>(<Region>c.region[here]).ptr + (<Region>c.region[here]).size):
            how = GROWN_TO_THE_END
    arenapy_lock_release(&c.lock)
    return how


cdef int grow_arena(
    BumpCore c, object source, object max_bytes, size_t n, size_t align
) except -1:
    cdef size_t page = 4096
    cdef size_t least = (n + align - 1 + page) & ~(page - 1)
    cdef size_t left = 0
    cdef size_t known = c.capacity
    cdef size_t size
    cdef uintptr_t start
    cdef Region region
    cdef tuple before, after
    cdef bint grown = False, others
    if isinstance(source, InPlace):
        return grow_in_place(c, <InPlace>source, max_bytes, n, align, False)
    c.open_check()
    if max_bytes is not None and <size_t>max_bytes > known:
        left = <size_t>max_bytes - known
    least = min(least, max(left, n + (n == 0)))
    if least > left:
        raise OutOfMemory(c.full(n, align, max_bytes))
    size = min(max(least, GROWTH * newest_region(c).size), left)
    try:
        region = make_region(c, source, size)
    except OutOfMemory:
        if least == size:
            raise
        region = make_region(c, source, least)  # not twice the last one, then
    start = (<uintptr_t>region.ptr + (align - 1)) & ~<uintptr_t>(align - 1)
    if start + n + (n == 0) > <uintptr_t>region.ptr + region.size:
        # max_bytes left no room to align in, and this one does not lie well.
        raise OutOfMemory(c.full(n, align, max_bytes))
    before = c.listed()
    after = before + (region,)
    others = region.seen_elsewhere()
    region.attach(c)
    arenapy_lock_acquire(&c.lock)
    try:
        # Else other code grew it, in the source or in a collection of garbage: try again.
        grown = c.regions is before and c.capacity == known and not c.shut
        if grown:
            grown = False
            c.add_region(region, after, others)
            grown = True
    finally:
        arenapy_lock_release(&c.lock)
        if not grown:
            region.detach(False)
    if grown:
        record(c, EVENT_GROW, region.ptr, region.size)
    return 0


cdef int grow_for(
    BumpCore c, object source, object max_bytes, Buffer b, Py_ssize_t n, Py_ssize_t align,
    Hold* hold,
) except -1:
    """Memory for a new Buffer, which `hold` (or NULL) makes a held one, if need be from the source.

    The hold is taken over, also in vain.
    """
    cdef void* start = NULL
    cdef bint tried = False
    cdef object error = None
    try:
        while start == NULL:
            if error is not None:
                raise error
            if tried or not (c.may_lease or c.hooks is not None):
                try:
                    grow_arena(c, source, max_bytes, n, align)
                except MemoryError as e:
                    error = None if c.settle_streams(True) else e
            c.reclaim(NEEDED)                # others may have let go meanwhile
            tried = True
            arenapy_lock_acquire(&c.lock)
            start = arena_alloc(c, n, align, &b.pad)
            b.ptr = <char*>start
            b.tag = c.content
            if start != NULL:
                b.word = 0
                if hold != NULL:
                    born_held(b, hold)
                    hold = NULL
            arenapy_lock_release(&c.lock)
    finally:
        if hold != NULL:
            arenapy_lock_acquire(&c.lock)
            drop_hold(c, hold)
            arenapy_lock_release(&c.lock)
    return 0
