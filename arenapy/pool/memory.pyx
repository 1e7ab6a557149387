"""PoolMemory: how a pool gets memory from its source and gives it back.

What lives here: reservations and regions, the limit, trimming. What does not: what a request does
when there is no more (pool), which pages are free (page_heap).

Over Host, and other sources that can, a pool reserves address space and gives it memory piece by
piece, so that blocks merge across growth; else it takes region after region. Sources and system
calls run without any lock: pages are marked BUSY meanwhile, and are nobody else's.
"""
cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.mem cimport PyObject_Free, PyObject_Malloc
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF
from libc.errno cimport EAGAIN, EINTR
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from posix.time cimport (
    CLOCK_MONOTONIC, CLOCK_PROCESS_CPUTIME_ID, clock_gettime, clockid_t, timespec,
)

from arenapy.allocator.allocator cimport check_unseen, is_refusal, make_region, make_reservation
from arenapy.base.sizes cimport N_CLASSES, as_size
from arenapy.base.atomic cimport (
    arenapy_add, arenapy_cas, arenapy_load, arenapy_spin_acquire, arenapy_spin_release,
    arenapy_store, arenapy_sub,
)
from arenapy.pool.page_heap cimport (
    HUGE_PAGES, PAGE, PAGE_BITS, Descriptor, Place, Segment, have_spare, id_of,
)
from arenapy.pool.core cimport Grower, PoolCore
from arenapy.pool.thread_cache cimport tick_now
from arenapy.base.thread_slot cimport this_thread
from arenapy.diagnostics.recorder cimport EVENT_GROW, EVENT_TRIM
from arenapy.memory.region cimport Region
from arenapy.allocator.allocator_core cimport LEASES_ASKED, record
from arenapy.linux.populate cimport vm_populate
from arenapy.linux.reserved_space cimport ReservedArray, array_close, vm_decommit

import weakref

from arenapy.base.text import reason_of
from arenapy.errors import OutOfMemory
from arenapy.linux.limits import free_addresses
from arenapy.memory.reservation import Reservation
from arenapy.memory.sources import Host

cdef extern from "Python.h":
    """
    /* Of this interpreter, this thread's left out. The GIL is held. */
    static int arenapy_other_threads(void) {
    #ifdef Py_GIL_DISABLED
        return 1;
    #else
        PyThreadState *first = PyInterpreterState_ThreadHead(PyInterpreterState_Get());
        return first != NULL && PyThreadState_Next(first) != NULL;
    #endif
    }
    /* The PoolMemory that this thread grows amid a function of NumPy's, or NULL. */
    static __thread void *arenapy_grown_at_once;
    /* Pending calls are the main interpreter's. The function takes over a reference. */
    static int arenapy_make_ready_later(int (*act)(void *), PyObject *weak_memory) {
        if (PyInterpreterState_Get() != PyInterpreterState_Main()) return 0;
        Py_INCREF(weak_memory);
        if (Py_AddPendingCall(act, weak_memory) == 0) return 1;
        Py_DECREF(weak_memory);
        return 0;
    }
    """
    void* grown_at_once "arenapy_grown_at_once"
    bint other_threads "arenapy_other_threads" () noexcept
    bint make_ready_later "arenapy_make_ready_later" (
        int (*act)(void*) except -1, PyObject* weak_memory) noexcept

cdef extern from "<unistd.h>":
    int usleep(unsigned int microseconds) nogil

cdef enum:
    MOMENT = 200             # microseconds
    PATIENCE = 50_000        # moments
    NO_LIMIT = 1 << 30
    LARGE_PAGES = 64 << 10   # 256 MiB, of which the map has 256 KiB
    AHEAD_LEAST = 128 << 20  # bytes: half of what a reservation makes accessible
    AT_ONCE_MOST = 64 << 20  # bytes
    ADDRESSES_SHARE = 32     # a share: of those that are left, which a pool reserves at once
    LEAST_ADDRESSES = 256 << 20      # bytes
    RECYCLED_FIRST = 8       # in units of what is reserved, as is
    RECYCLED_AGAIN = 1
    IDLE_SHARE = 16          # a share: of what is reserved, so much may lie idle at first
    REPEATS = 5
    SLACK_SHARE = 40         # of what is live: memory that growth by the granule adds to it
    # `trim_stale` asks the kernel about so many leases at once, in such a share of all time. The
    # kernel takes longer for each one the more there are.
    LEASES_MOST = 500
    LEASES_SHARE = 16
    GOLDEN = 0x9E3779B97F4A7C15      # 2 ** 64 by the golden ratio: Knuth's multiplicative hashing


cdef Place NOWHERE = Place(0, 0, 0)


cdef object checked_limit(object max_bytes, size_t initial_bytes):
    """The limit that a user gives a pool, as an int or None."""
    if max_bytes is None:
        return None
    max_bytes = as_size(max_bytes, "max_bytes")
    if max_bytes < PAGE:
        raise ValueError(
            f"max_bytes={max_bytes} is less than a page of {PAGE} bytes; give more, or None for "
            "no limit"
        )
    if initial_bytes > <size_t>max_bytes:
        raise ValueError(
            f"initial_bytes={initial_bytes} is more than max_bytes={max_bytes}; give less"
        )
    return max_bytes


cdef double now(clockid_t clock) noexcept:
    """Seconds."""
    cdef timespec t
    clock_gettime(clock, &t)
    return t.tv_sec + 1e-9 * t.tv_nsec


cdef Grower* enter(PoolCore c) except NULL:
    """From now on the source is at work for this thread."""
    # Not in the caller's frame: a greenlet's stack moves, and a thread may end amid the call.
    cdef Grower* me = <Grower*>PyObject_Malloc(sizeof(Grower))
    if me == NULL:
        raise MemoryError("no memory for the bookkeeping of a pool")
    me.thread = this_thread()
    arenapy_spin_acquire(&c.heap_lock)
    me.next = c.growers
    c.growers = me
    arenapy_spin_release(&c.heap_lock)
    return me


cdef void leave(PoolCore c, Grower* me) noexcept:
    """Under the lock of the heap."""
    cdef Grower** at = &c.growers
    while at[0] != me:
        at = &at[0].next
    at[0] = me.next
    PyObject_Free(me)


cdef bint is_growing(PoolCore c) noexcept:
    """Is the source at work for this thread?"""
    cdef Grower* one
    arenapy_spin_acquire(&c.heap_lock)
    one = c.growers
    while one != NULL and one.thread != this_thread():
        one = one.next
    arenapy_spin_release(&c.heap_lock)
    return one != NULL


@cython.final
cdef class PoolMemory:
    """The memory and the address space that a Pool has reserved. Internal."""

    def __cinit__(
        self, PoolCore core not None, object source, size_t max_pages, size_t min_reservation
    ):
        self.core = core
        self.weak = weakref.ref(self)
        self.source = source
        self.max_pages = max_pages
        self.min_reservation = min_reservation
        # A Host whose region() is another one is to be asked like any other source. Others reserve
        # if they are to.
        if isinstance(source, Host):
            self.may_reserve = type(source).region is Host.region
        else:
            self.may_reserve = hasattr(source, "reserve") and getattr(source, "grow", True)
        if self.may_reserve and core.hooks is not None and max_pages < NO_LIMIT:
            # A device has memory by the huge page: the limit is the next one.
            self.max_pages = (max_pages + HUGE_PAGES - 1) // HUGE_PAGES * HUGE_PAGES
        self.reservations = {}

    cdef int begin(self, size_t nbytes) except -1:
        cdef size_t missing = 0
        cdef size_t pages = min((nbytes + PAGE - 1) >> PAGE_BITS, self.max_pages)
        cdef Place place
        if not self.may_reserve:
            region = make_region(self.core, self.source, pages << PAGE_BITS)
            if whole_pages(region) == 0:     # it does not begin on a page
                region = make_region(self.core, self.source, (pages + 1) << PAGE_BITS)
            self.add_region(region)
        elif not self.grow(pages, 0, &missing, &place):
            raise OutOfMemory(
                f"initial_bytes={nbytes} needs memory of the source, which has it in parts larger "
                "than max_bytes; give a larger max_bytes"
            )
        return 0

    cdef bint grow(self, size_t pages, size_t wished, size_t* missing, Place* place) except -1:
        """Reserve memory for `pages` in one piece. False: the limit, by `missing` pages."""
        wished = max(wished, pages)
        # Afterwards, that is.
        self.core.tight = self.left() <= self.core.reserved_pages + 2 * wished
        if self.only:
            return self.grow_only(pages, missing)
        if self.may_reserve:
            return self.grow_reservation(pages, wished, missing, place)
        return self.grow_region(pages, wished, missing)

    cdef bint grow_only(self, size_t pages, size_t* missing) except -1:
        """The one region of its source again, which a trim has given back."""
        cdef bint mine
        if self.core.n_segments or pages << PAGE_BITS > self.only:
            raise OutOfMemory(f"it has one region, of {self.only} bytes")
        mine = self.take_turn()
        try:
            # Another thread may have got it.
            return self.core.n_segments or self.grow_region(pages, pages, missing)
        finally:
            if mine:
                arenapy_store(&self.turn, 0)

    cdef bint take_turn(self) except -1:
        """Wait while another thread gets the only region, or gives it back.

        False: it takes too long, and may wait for this very thread; or it is this one.
        """
        cdef uint64_t me = <uint64_t>self.core.forks << 32 | <uint32_t>(this_thread() >> 12) | 1
        cdef uint64_t who = 0
        cdef int _n
        for _n in range(PATIENCE):
            # A thread from before a fork is not there.
            if (who >> 32 != self.core.forks or who == 0) and arenapy_cas(&self.turn, &who, me):
                return True
            if who == me:
                return False
            with nogil:
                usleep(MOMENT)
            PyErr_CheckSignals()
            who = arenapy_load(&self.turn)
        return False

    cdef bint grow_behind(self, uint64_t block_id, uint32_t pages) except -1:
        cdef PoolCore c = self.core
        cdef uint32_t id
        if not self.may_reserve or not have_spare(c) or not c.grow_map(
                min(<size_t>pages + HUGE_PAGES, self.left())):
            return False
        arenapy_spin_acquire(&c.heap_lock)
        id = c.begin_growth_behind(id_of(block_id), pages, self.left())
        arenapy_spin_release(&c.heap_lock)
        if id:
            self.commit(id)
        return id != 0

    cdef int note_refusal(self, str why) except -1:
        with cython.critical_section(self):
            self.refusal = why
        return 0

    cdef str refused(self):
        with cython.critical_section(self):
            return self.refusal

    cdef bint wait_for_growth(self) except -1:
        cdef size_t busy = self.core.busy_pages
        cdef int n = 0
        if busy == 0 or is_growing(self.core):
            return False
        while self.core.busy_pages == busy and n < PATIENCE:
            with nogil:
                usleep(MOMENT)
            PyErr_CheckSignals()
            n += 1
        return n < PATIENCE                  # the source may wait for this very thread

    cdef size_t left(self) noexcept:
        """Pages that may still be reserved."""
        cdef size_t used = self.core.reserved_pages + self.core.busy_pages
        return self.max_pages - used if self.max_pages > used else 0

    cdef bint grow_reservation(
        self, size_t pages, size_t wished, size_t* missing, Place* place
    ) except -1:
        cdef PoolCore c = self.core
        cdef uint32_t id
        cdef bint fresh = False              # the address space is of this call
        while True:
            if pages > LARGE_PAGES and not fresh:    # a map of that many takes memory itself
                self.expect(pages << PAGE_BITS)
            if not c.grow_map(min(wished + HUGE_PAGES, self.left())):
                raise MemoryError("no memory for the bookkeeping of a pool")
            arenapy_spin_acquire(&c.heap_lock)
            id = c.begin_growth(pages, wished, self.left(), missing, place)
            arenapy_spin_release(&c.heap_lock)
            if id:
                try:
                    self.commit(id)
                    return True
                except MemoryError:
                    if wished > pages:
                        wished = pages       # no more than has to be, then
                        continue
                    if fresh:
                        self.drop_room(c.descriptors[id].segment)
                    raise
            if missing[0]:
                return False
            if pages > self.left():
                missing[0] = pages - self.left()
                return False
            # No address space as large as that: get more of it.
            if not self.add_reservation(pages):
                self.may_reserve = c.n_segments > 0
                return self.grow_region(pages, wished, missing)
            fresh = True

    cdef int expect(self, size_t nbytes) except -1:
        """OutOfMemory: the system does not have that much now."""
        for reservation in self.reservations.copy().values():
            if type(reservation) is Reservation:
                reservation.expect(nbytes)
            break
        return 0

    cdef bint add_reservation(self, size_t pages) except -1:
        """Address space for so many pages, which have no memory. False: the source has none.

        True as well if other code, of another thread perhaps, has added some meanwhile.
        """
        cdef PoolCore c = self.core
        cdef uint64_t before = self.n_reserved
        cdef size_t wished = self.min_reservation
        if c.hooks is None:                  # many pools leave addresses for others
            wished = min(wished, max(
                <size_t>free_addresses() // ADDRESSES_SHARE, <size_t>LEAST_ADDRESSES,
                c.reserved_pages << PAGE_BITS))
        made = make_reservation(self.source, max(pages << PAGE_BITS, wished))
        if made is None:
            return False
        if self.n_reserved != before:
            return True
        reservation, region = made
        if pages > LARGE_PAGES and type(reservation) is Reservation:
            reservation.expect(pages << PAGE_BITS)
        self.n_reserved += 1
        self.reservations[region.address] = reservation
        try:
            c.add_segment(
                region, region.page_size >> PAGE_BITS, NO_LIMIT, tick_now(c, c.own_cache()))
        except BaseException:
            del self.reservations[region.address]
            raise
        return True

    cdef int commit(self, uint32_t id) except -1:
        """Give a BUSY extent memory, or make it VOID again. Nobody closes its region meanwhile."""
        cdef PoolCore c = self.core
        cdef Descriptor* d = &c.descriptors[id]
        cdef size_t nbytes = <size_t>d.pages << PAGE_BITS
        cdef bint done = False, lazily = False
        cdef double start = now(CLOCK_MONOTONIC), cpu = now(CLOCK_PROCESS_CPUTIME_ID)
        cdef double stop = start, cpu_stop = cpu
        cdef Grower* me = NULL
        cdef object reservation = None
        arenapy_add(&c.in_transit, 1)
        try:
            me = enter(c)
            if c.gone:
                c.open_check()
            if not self.at_once() or not self.commit_at_once(d.address, nbytes, &lazily):
                reservation = self.commit_by_source(id)
            self.note_refusal(None)
            record(c, EVENT_GROW, <void*>d.address, nbytes)
            stop, cpu_stop = now(CLOCK_MONOTONIC), now(CLOCK_PROCESS_CPUTIME_ID)
            done = True
        finally:                             # without a call of Python's, which may fail
            arenapy_spin_acquire(&c.heap_lock)
            c.end_growth(id, done, tick_now(c, c.own_cache()))
            self.most_pages = max(self.most_pages, c.reserved_pages)
            self.note_growth(0 if lazily or not done else nbytes, stop - start, cpu_stop - cpu)
            arenapy_sub(&c.in_transit, 1)
            if me != NULL:
                leave(c, me)
            arenapy_spin_release(&c.heap_lock)
        if reservation is not None:          # after the memory is the pool's, since code runs
            self.note_ready(reservation)
        return 0

    cdef bint at_once(self) noexcept:
        return grown_at_once == <void*>self

    cdef void note_growth(self, size_t nbytes, double seconds, double cpu) noexcept:
        self.grown_bytes += nbytes
        self.grown_seconds += seconds
        self.grown_cpu += cpu
        self.peak_pages = max(self.peak_pages, self.core.reserved_pages)

    cdef object commit_by_source(self, uint32_t id):
        cdef Descriptor* d = &self.core.descriptors[id]
        reservation = self.reservations[self.core.segments[d.segment].base]
        try:
            reservation.commit(<size_t>d.page << PAGE_BITS, <size_t>d.pages << PAGE_BITS)
        except BaseException as error:
            self.note_refusal(refusal_of(error))
            raise
        return reservation

    cdef bint commit_at_once(self, uintptr_t address, size_t nbytes, bint* lazily) noexcept:
        """The same, but no other code runs: no Python code, and this thread keeps the GIL.

        If there are other threads, the memory comes as it is touched: they all would wait.
        """
        cdef bint others = other_threads()
        cdef int rc = 0
        if (nbytes > self.ready_bytes
                or not self.ready_from <= address < address + nbytes <= self.ready_end):
            return False
        if self.prefaults and not others and nbytes > AT_ONCE_MOST:
            return False                     # several threads fault it in
        lazily[0] = others or not self.prefaults
        if not lazily[0]:
            rc = -EAGAIN
            while rc == -EAGAIN or rc == -EINTR:
                rc = vm_populate(address, nbytes, True)
            if rc != 0:
                return False
        self.ready_bytes -= nbytes
        if not self.ready_asked and (
                self.ready_bytes < self.ready_least
                or self.ready_end - address - nbytes < AHEAD_LEAST):
            self.ready_asked = make_ready_later(make_more_ready, <PyObject*>self.weak)
        return True

    cdef int note_ready(self, object reservation) except -1:
        """What is ready in a reservation that has just got memory."""
        if type(reservation) is not Reservation:
            return 0
        ready = reservation.ready()
        if ready is None:
            self.ready_end = 0
            return 0
        self.ready_from, self.ready_end, self.ready_bytes, self.prefaults = ready
        self.ready_least = self.ready_bytes // 2
        with cython.critical_section(self):
            self.ready = reservation
        return 0

    cdef int prepare(self) except -1:
        if not self.may_reserve or self.ready is not None or not isinstance(self.source, Host):
            return 0
        if self.source.fork == "skip":       # a child could not use a pool that has addresses
            return 0
        if not self.reservations and not self.add_reservation(1):
            return 0
        for reservation in list(self.reservations.values()):
            self.note_ready(reservation)
        with cython.critical_section(self):
            newest = self.ready
        if newest is not None:
            newest.look_ahead()
            self.note_ready(newest)
        return 0

    cdef int drop_room(self, int segment) except -1:
        """Give address space back that has no memory."""
        cdef PoolCore c = self.core
        cdef Segment* s = &c.segments[segment]
        cdef Region region = None
        cdef ReservedArray array
        self.ready_end = 0
        with cython.critical_section(self):
            self.ready = None
        c.lock_all()
        if s.frontier and c.descriptors[s.frontier].pages == s.pages:
            region = <Region><PyObject*>s.region
            array = s.array
            c.remove_segment(segment)
        c.unlock_all()
        if region is not None:
            array_close(&array)
            self.reservations.pop(region.address, None)
            c.drop_region(region)
        return 0

    cdef bint grow_region(self, size_t pages, size_t wished, size_t* missing) except -1:
        cdef PoolCore c = self.core
        cdef bint padded = self.unaligned    # another thread may set it meanwhile
        cdef size_t least = pages + (padded and not self.only)
        cdef size_t left, want
        cdef uint32_t forks
        cdef double start = now(CLOCK_MONOTONIC), cpu = now(CLOCK_PROCESS_CPUTIME_ID)
        cdef double stop = start, cpu_stop = cpu
        cdef Grower* me = NULL
        cdef Region region = None
        arenapy_spin_acquire(&c.heap_lock)
        forks = c.forks
        left = self.left()
        missing[0] = least - left if least > left else 0
        want = 0 if missing[0] else max(least, min(wished, left))
        c.busy_pages += want                 # others reckon with it
        arenapy_spin_release(&c.heap_lock)
        if missing[0]:
            return False
        try:
            me = enter(c)
            try:
                region = make_region(
                    self.core, self.source, self.only if self.only else want << PAGE_BITS)
            except MemoryError:
                if want == least:
                    raise
            if region is None:               # no more than has to be, then
                region = make_region(self.core, self.source, least << PAGE_BITS)
            if whole_pages(region) >= pages:
                self.add_region(region)
                stop, cpu_stop = now(CLOCK_MONOTONIC), now(CLOCK_PROCESS_CPUTIME_ID)
                self.note_refusal(None)
                return True
            if padded or self.only:
                raise OutOfMemory(f"{region!r} has less than {pages} whole pages")
        except BaseException as error:
            self.note_refusal(refusal_of(error))
            raise
        finally:
            arenapy_spin_acquire(&c.heap_lock)
            c.busy_pages -= want if c.forks == forks else 0
            self.note_growth(
                region.size if stop > start else 0, stop - start, cpu_stop - cpu)
            if me != NULL:
                leave(c, me)
            arenapy_spin_release(&c.heap_lock)
        self.unaligned = True                # ask for one page more from now on
        region = None
        return self.grow_region(pages, wished, missing)

    cdef int add_only(self, Region region) except -1:
        self.add_region(region)
        self.only = region.size
        return 0

    cdef int add_region(self, Region region) except -1:
        if region is None:
            raise TypeError(f"{self.source!r}.region() returned None, which is not a Region")
        check_unseen(self.core, region)
        region.pin_unused()                  # another thread may close it as soon as it is here
        try:
            self.core.add_segment(
                region, 0, self.max_pages, tick_now(self.core, self.core.own_cache()))
        finally:
            region.unpin()
        if region.checked:                   # a file may shrink
            self.core.update_fast_path()
        record(self.core, EVENT_GROW, region.ptr, region.size)
        return 0

    cdef size_t trimmable(self) noexcept:
        """Pages that could be given back now, once everything is merged."""
        cdef PoolCore c = self.core
        cdef size_t pages
        c.flush_all(True, NULL)
        c.lock_all()
        pages = c.idle_pages()
        c.unlock_all()
        return pages

    cdef int recycle(self, size_t pages, size_t n) except -1:
        """Before growth: give idle pages back, so that what is reserved does not grow.

        This moves free memory from small pieces into one large piece, which is then faulted in
        again. A loop would pay this on every iteration. We detect a loop by repeated requests of
        the identical size. After REPEATS of them the pool may keep that many more bytes idle. In
        other programs, the pool may keep some bytes idle once it has returned RECYCLED_FIRST times
        what it has reserved, and twice as many after each further RECYCLED_AGAIN times.

        Where memory comes by the granule, only the `excess` moves, and idle pages next to which the
        pool grows stay. Repetitions are not counted there: most programs settle without it.
        """
        cdef PoolCore c = self.core
        cdef size_t idle
        cdef bint by_granule = c.merges_first and self.may_reserve
        cdef Place place = NOWHERE
        cdef Recurrence* seen = &self.seen[n * <size_t>GOLDEN >> (64 - RECURRENCE_BITS)]
        arenapy_spin_acquire(&c.heap_lock)
        idle = c.aged_pages
        arenapy_spin_release(&c.heap_lock)
        if c.merges_first:                   # of a device, in regions or by the huge page
            idle = self.trimmable()
            if by_granule:
                pages = self.excess(pages, &place)
        if pages == 0 or idle <= max(self.idle_allowed, <size_t>HUGE_PAGES):
            return 0
        if seen.n != n:
            seen.n, seen.times = n, 0
        if not by_granule:
            if seen.times == REPEATS:
                self.idle_allowed = min(idle, self.idle_allowed + pages)
            else:
                seen.times += 1
        if idle == self.idle_allowed:
            return 0
        self.recycled += self.shrink(min(idle - self.idle_allowed, pages), False, &place)
        times = RECYCLED_AGAIN if self.idle_allowed else RECYCLED_FIRST
        if self.recycled > times * c.reserved_pages:
            self.recycled = 0
            self.idle_allowed = max(2 * self.idle_allowed, c.reserved_pages // IDLE_SHARE)
        return 0

    cdef size_t excess(self, size_t pages, Place* place) noexcept:
        """Whole granules that growth by `pages` would add to what may be reserved.

        That is what was reserved before, or a little more than what is live. With this little, a
        program that repeats itself soon finds every block a place that has memory.
        """
        cdef PoolCore c = self.core
        cdef size_t grown, live = pages, allowed
        cdef uint32_t page, part
        cdef int k
        arenapy_spin_acquire(&c.heap_lock)
        c.find_place(pages, place, &page, &part)
        grown = c.reserved_pages + c.busy_pages
        for k in range(N_CLASSES):
            live += c.taken[k]
        arenapy_spin_release(&c.heap_lock)
        grown += place.lacking if place.end else pages
        allowed = max(self.most_pages, live + live // SLACK_SHARE)
        if grown <= allowed:
            return 0
        return (grown - allowed + HUGE_PAGES - 1) // HUGE_PAGES * HUGE_PAGES

    cdef size_t trim(self, size_t pages) except? 0:
        cdef size_t freed = self.shrink(pages, False, &NOWHERE)
        self.most_pages = self.core.reserved_pages
        return freed

    cdef size_t shrink(self, size_t pages, bint enough, const Place* spared) except? 0:
        cdef PoolCore c = self.core
        cdef size_t freed = 0, n = 0
        cdef ReservedArray array
        cdef uint32_t id
        cdef int segment
        cdef Region region
        cdef bint mine, whole
        while freed < pages and not c.shut and have_spare(c):
            mine = self.only and self.take_turn()
            id = 0
            try:
                c.lock_all()
                segment = c.idle_segment(<size_t>-1 if enough else pages - freed)
                whole = segment >= 0
                if whole:
                    region = <Region><PyObject*>c.segments[segment].region
                    array = c.segments[segment].array
                    n = c.segments[segment].pages
                    c.remove_segment(segment)
                else:
                    id = c.begin_trim(pages - freed, enough, spared)
                    n = c.descriptors[id].pages
                c.unlock_all()
                if whole:
                    array_close(&array)
                    record(c, EVENT_TRIM, region.ptr, region.size)
                    c.drop_region(region)
                    region = None            # which may unmap it
            finally:
                if mine:
                    arenapy_store(&self.turn, 0)
            if not whole and (id == 0 or not self.decommit(id)):
                break
            freed += n
        if freed and c.debug and not self.at_once():
            c.operated()                     # which releases the GIL
        return freed

    cdef bint decommit(self, uint32_t id) except -1:
        """Take the memory of a BUSY extent away, and make it VOID. False: it stays, and is free.

        Memory of a device stays while a stream that is captured may use it.
        """
        cdef PoolCore c = self.core
        cdef Descriptor* d = &c.descriptors[id]
        cdef Segment* s = &c.segments[d.segment]
        cdef void* at = <void*>d.address
        cdef size_t nbytes = <size_t>d.pages << PAGE_BITS
        cdef bint shared, done = False
        if c.debug:
            c.ledger.forget(<uintptr_t>at, <uintptr_t>at + nbytes)
        arenapy_add(&c.in_transit, 1)
        try:
            reservation = self.reservations[s.base]
            if c.shut:
                pass
            elif type(reservation) is Reservation:       # what its `decommit` does
                shared = reservation.shared
                if self.at_once():
                    done = vm_decommit(at, nbytes, shared) >= 0
                else:
                    with nogil:
                        done = vm_decommit(at, nbytes, shared) >= 0
            else:
                try:
                    reservation.decommit(
                        <size_t>d.page << PAGE_BITS, nbytes,
                        None if c.hooks is None else c.hooks.own)
                    done = True
                except (RuntimeError, MemoryError):
                    pass
            if done:                         # before others may have it
                record(c, EVENT_TRIM, at, nbytes)
        finally:
            arenapy_spin_acquire(&c.heap_lock)
            c.end_trim(id, done)
            arenapy_sub(&c.in_transit, 1)
            arenapy_spin_release(&c.heap_lock)
        return done

    cdef size_t trim_stale(self, double seconds) except? 0:
        cdef PoolCore c = self.core
        cdef uint32_t tick
        cdef size_t pages
        cdef double start
        if not c.stale_tick(seconds, &tick):
            return 0
        if c.leased.n:                       # others may have let go, or will
            start = now(CLOCK_MONOTONIC)
            if start >= self.leases_due:
                c.reclaim_leases(LEASES_ASKED + min(c.leased.n // 4, LEASES_MOST))
                self.leases_due = start + (now(CLOCK_MONOTONIC) - start) * LEASES_SHARE
            c.go_on_looking()
        c.flush_all(True, &tick)
        pages = c.stale_pages(tick)
        return self.trim(pages) if pages else 0


cdef int make_more_ready(void* argument) except -1:
    """In the main thread, between two bytecodes."""
    weak = <object>argument
    Py_DECREF(weak)
    cdef PoolMemory memory = weak()          # the pool may have ended since it asked
    if memory is None:
        return 0
    memory.ready_asked = False
    try:
        with cython.critical_section(memory):
            reservation = memory.ready
        if memory.ready_end and reservation is not None:
            reservation.look_ahead()
            memory.note_ready(reservation)
    except (MemoryError, OSError) as error:
        if not is_refusal(error):            # a signal's: handlers run in this thread
            raise
    return 0                                 # refused, growth asks the source, which says why


cdef bint begin_at_once(PoolMemory memory) noexcept:
    global grown_at_once
    if grown_at_once != NULL:
        return False
    grown_at_once = <void*>memory
    return True


cdef bint is_at_once() noexcept nogil:
    return grown_at_once != NULL


cdef void end_at_once() noexcept:
    global grown_at_once
    grown_at_once = NULL


cdef str refusal_of(object error):
    """Why the source has no memory, for a report."""
    if is_refusal(error):
        return reason_of(error)
    return f"{type(error).__name__} interrupted the request for memory"


cdef size_t whole_pages(Region region) noexcept:
    cdef uintptr_t start = (<uintptr_t>region.ptr + PAGE - 1) & ~<uintptr_t>(PAGE - 1)
    cdef uintptr_t end = <uintptr_t>region.ptr + region.size
    return (end - start) >> PAGE_BITS if end > start else 0
