"""AllocatorCore: the regions of an allocator, whatever it does with them.

What lives here: taking regions over, finding the one that an address is in, what other
processes still see, the end of a region, fork, what debug mode does. What does not: which bytes
are free.
"""
cimport cython
from cpython.object cimport PyObject
from cpython.weakref cimport PyWeakref_NewRef
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free

from arenapy.base.sizes cimport HOST_ALIGN, debug_wanted
from arenapy.base.unseen cimport unseen_list
from arenapy.base.atomic cimport (
    ARENAPY_GIL, arenapy_finalizing, arenapy_lock_acquire, arenapy_lock_release,
    arenapy_spin_acquire, arenapy_spin_release, arenapy_store_ptr, arenapy_sub,
)
from arenapy.buffer.block cimport (
    GONE_CLOSED, GONE_FORKED, GONE_NOT, Block, Hold, MemoryOwner, StreamHooks, drop_kept,
    named_stream,
)
from arenapy.base.interval_set cimport make_room
from arenapy.diagnostics.ledger cimport Ledger
from arenapy.diagnostics.call_sites cimport NO_SITE, allocated_at, call_site
from arenapy.base.sanitizer cimport POISONS
from arenapy.diagnostics.recorder cimport Recorder, record_event
from arenapy.memory.claims cimport settle_claims
from arenapy.memory.region cimport FORK_CLOSED, Region, register_core, unregister_core
from arenapy.base.sealed cimport seal

import sys
import warnings

from arenapy.diagnostics.leaks import summary
from arenapy.errors import MemoryCorruption

cdef extern from *:
    """
    /* Sequentially consistent on both sides: whoever enters after `arenapy_nobody` has said yes
       reads what was in the pointer by then. */
    static inline void *arenapy_enter(uint64_t *inside, void **pointer) {
        __atomic_fetch_add(inside, 1, __ATOMIC_SEQ_CST);
        return __atomic_load_n(pointer, __ATOMIC_SEQ_CST);
    }
    static inline int arenapy_nobody(uint64_t *inside) {
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        return __atomic_load_n(inside, __ATOMIC_SEQ_CST) == 0;
    }
    """
    void* arenapy_enter(uint64_t* inside, void** pointer) noexcept nogil
    bint arenapy_nobody(uint64_t* inside) noexcept nogil

cdef extern from "Python.h":
    void PyErr_Fetch(PyObject** kind, PyObject** value, PyObject** trace) noexcept
    void PyErr_Restore(PyObject* kind, PyObject* value, PyObject* trace) noexcept


# no_gc_clear: `regions` is needed to the last, and a cycle through a core goes through a
# user's object too, which the collector can clear.
@cython.no_gc_clear
cdef class AllocatorCore(MemoryOwner):
    """The regions of an allocator. Internal; Buffers keep it alive."""

    def __cinit__(self):
        self.weak = None if ARENAPY_GIL else PyWeakref_NewRef(self, None)
        self.regions = ()
        self.what = "arena"
        self.recorders = unseen_list()
        self.block_align = HOST_ALIGN
        register_core(self)

    def __dealloc__(self):
        cdef Hold* hold
        if self.debug and not (self.shut or arenapy_finalizing()):
            self.warn_of_leaks()
        unregister_core(self)                # of a base class made alone, which never finished
        permit_all(self)
        while self.leased != NULL:
            hold = self.leased
            self.leased = hold.next
            free(hold)
        free(self.region)

    cdef int adopt(self, object source, object stream) except -1:
        hooks = getattr(source, "hooks", None)
        if isinstance(hooks, StreamHooks):
            self.take_hooks((<StreamHooks>hooks).of_allocator(stream))
        elif stream is not None:
            named_stream(self, stream)       # which raises
        return 0

    cdef void take_hooks(self, StreamHooks hooks) noexcept:
        self.hooks, self.block_align = hooks, max(hooks.align, HOST_ALIGN)
        self.kind, self.device_id = hooks.kind, hooks.device_id
        self.host_accessible = hooks.host_accessible
        self.device_accessible = hooks.device_accessible

    cdef bint settle_streams(self, Py_ssize_t wait) except -1:
        return self.hooks is not None and self.hooks.collect(<PyObject*>self, wait) > 0

    cdef void finish(self) noexcept:
        cdef Py_ssize_t i
        self.ending = True
        if self.hooks is not None:
            self.hooks.finish(<PyObject*>self, self.regions)
            self.hooks.leave(self.regions)
        # Forks, which C code makes without the GIL, leave it alone from here on.
        for i in range(self.n_regions):
            (<Region>self.region[i]).detach(self.belongs_to_stream())
        unregister_core(self)

    cdef int take_region(self, Region region, tuple regions) except -1:
        """Add a region that is attached. `regions` is all of them: to make it may run code."""
        if not make_room(
                <void**>&self.region, &self.cap_regions, len(regions), sizeof(PyObject*)):
            raise MemoryError("no memory for the bookkeeping of an allocator")
        if self.hooks is None and region.hooks is not None:
            self.take_hooks(region.hooks.bound(None))
        self.forget(region)
        self.list_regions(regions)
        self.capacity += region.size
        return 0

    cdef int share_region(self, Region region) except -1:
        cdef StreamHooks hooks
        cdef tuple before = None
        cdef tuple after
        cdef bint done = False, room = True
        check_alike(self, self.listed(), region)
        region.attach(self)
        if self.hooks is None and region.hooks is not None:
            hooks = region.hooks.bound(None)
            with cython.critical_section(self):
                if self.hooks is None:       # another thread may have been first
                    self.take_hooks(hooks)
        self.forget(region)
        while room and not done:             # the tuple is made before the lock is taken
            before = self.listed()
            after = before + (region,)
            try:
                check_alike(self, before, region)    # another thread may have been first
            except BaseException:
                region.detach(False)
                raise
            arenapy_lock_acquire(&self.lock)
            room = make_room(<void**>&self.region, &self.cap_regions, len(after), sizeof(PyObject*))
            done = room and self.regions is before
            if done:
                self.list_regions(after)
                self.capacity += region.size
            arenapy_lock_release(&self.lock)
        if not room:
            region.detach(False)
            raise MemoryError("no memory for the bookkeeping of an allocator")
        return 0

    cdef int drop_region(self, Region region) except -1:
        cdef tuple before = None
        cdef tuple after
        cdef bint done = False
        while not done:
            before = self.listed()
            after = tuple([r for r in before if r is not region])
            arenapy_lock_acquire(&self.lock)
            done = self.regions is before
            if done:
                self.list_regions(after)
                self.capacity -= region.size
            arenapy_lock_release(&self.lock)
        self.forget(region)
        if self.hooks is not None:
            self.hooks.leave((region,))
        region.detach(self.belongs_to_stream())
        return 0

    cdef bint belongs_to_stream(self) noexcept:
        """Is its memory free in the order of a stream, of which regions know nothing?"""
        return self.hooks is not None and self.hooks.own is not None

    cdef tuple listed(self):
        cdef tuple regions
        arenapy_lock_acquire(&self.lock)
        regions = self.regions
        arenapy_lock_release(&self.lock)
        return regions

    cdef void list_regions(self, tuple regions) noexcept:
        cdef Region region
        cdef Py_ssize_t i
        self.regions = regions
        self.n_regions = len(regions)
        for i in range(self.n_regions):
            region = <Region>regions[i]
            self.region[i] = <PyObject*>region
            # Only what is new: other threads read these without a lock.
            if i == 0 and (
                    self.kind != region.kind or self.device_id != region.device_id
                    or self.host_accessible != region.host_accessible
                    or self.device_accessible != region.device_accessible):
                self.kind, self.device_id = region.kind, region.device_id
                self.host_accessible = region.host_accessible
                self.device_accessible = region.device_accessible
            if region.foreign and not self.foreign:
                drop_kept(self)
                self.foreign = True
            if region.checked:
                self.checked = self.files = True
            if region.fork == FORK_CLOSED:
                self.parents = True

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
        if self.gone == GONE_CLOSED:
            raise ValueError(
                f"a region of this {self.what} was closed; make a new {self.what}"
            )
        raise ValueError(
            f"this {self.what} over {self.kind} memory belongs to the process that made it, and "
            f"this is a forked child: make a new {self.what} here"
        )

    cdef bint leased_part(self, uintptr_t start, uintptr_t end, Py_ssize_t region,
                          uintptr_t* at, uintptr_t* stop) noexcept nogil:
        return (<Region>self.region[region]).leases(start, end, at, stop) != 0

    cdef int record_into(self, object recorder, object ended) except -1:
        with cython.critical_section(self):  # two may begin at once
            return self.change_recorder(recorder, ended)

    cdef int change_recorder(self, object recorder, object ended) except -1:
        if recorder is not None:             # a recording ends after a region too, and in a child
            self.open_check()
            if not isinstance(recorder, Recorder):
                raise TypeError(f"{recorder!r} is not a Recorder; use arenapy.trace.record()")
            if self.recorder != NULL and (<Recorder>self.recorder).tape.here:
                raise ValueError(f"this {self.what} is already being recorded; end that first")
            self.recorders.append(recorder)
            arenapy_store_ptr(<void**>&self.recorder, <PyObject*>recorder)
        elif ended is None or <PyObject*>ended == self.recorder:    # a child may have another one
            if self.recorder != NULL:
                self.recording_ends()
            arenapy_store_ptr(<void**>&self.recorder, NULL)
        # No thread can reach those that have ended. (If one is about to: next time.)
        if arenapy_nobody(&self.n_recording):
            self.recorders[:] = [one for one in self.recorders if <PyObject*>one == self.recorder]
        return 0

    cdef void recording_ends(self) noexcept nogil:
        """Write what only the end of a recording can say."""

    cdef void record_now(self, int op, void* block, size_t nbytes) noexcept nogil:
        cdef PyObject* recorder = <PyObject*>arenapy_enter(
            &self.n_recording, <void**>&self.recorder)
        if recorder != NULL:                 # else it has just ended
            record_event(recorder, op, <uintptr_t>block, nbytes, 0)
        arenapy_sub(&self.n_recording, 1)

    cdef int settle_sends(self) except -1:
        """Let go of messages that have arrived, and of blocks that children have left."""
        if self.may_lease:
            settle_claims()
            shared = sys.modules.get("arenapy.memory.shared")
            if shared is not None:
                shared.forget_arrived()
        return 0

    # -- debug mode

    cdef bint watch(self, object debug, object verifier) except -1:
        if not debug_wanted(debug):
            return False
        self.verifier = verifier
        self.ledger = Ledger(self.what)
        self.debug = self.checked = True     # `check` raises what was found
        return True

    cdef void forget(self, Region region) noexcept nogil:
        """No block lies there: the region is new, or about to go."""
        if self.debug:
            self.ledger.forget(<uintptr_t>region.ptr, <uintptr_t>region.ptr + region.size)
        if POISONS and not self.shut:
            permit(self, <uintptr_t>region.ptr, region.size)

    cdef void began(self, void* ptr, size_t size, size_t nbytes) noexcept nogil:
        self.ledger.begin(<uintptr_t>ptr, <uintptr_t>ptr + size, nbytes, call_site())

    cdef void leaving(self, void* ptr) noexcept nogil:
        if self.ledger.born_at(<uintptr_t>ptr):      # else it is known already
            self.ledger.leave(<uintptr_t>ptr, call_site())

    cdef void poison(self, uintptr_t start, uintptr_t end) noexcept nogil:
        if self.debug and not self.shut:
            self.ledger.end(start, end, self.host_accessible and not (
                self.ledger.over or arenapy_finalizing()
                or self.shrunk()))
        forbid(self, start, end)

    cdef bint shrunk(self) noexcept nogil:
        cdef Py_ssize_t i
        for i in range(self.n_regions if self.files else 0):
            if (<Region>self.region[i]).shrunk():
                return True
        return False

    cdef int raise_damage(self) except -1:
        damage = self.ledger.take_damage()
        if damage is not None:
            raise MemoryCorruption(damage)
        return 0

    cdef int verify(self) except -1:
        self.verifier(self)
        return 0

    cdef int operated(self) except -1:
        self.raise_damage()
        return self.verify()

    cdef int allocated(self, list blocks) except -1:
        cdef Block b
        for b in blocks:
            b.place = self.ledger.born_at(<uintptr_t>b.ptr)
        return self.operated()

    cdef void verify_dropped(self) noexcept:
        """An exception may be on its way already."""
        cdef PyObject* kind
        cdef PyObject* value
        cdef PyObject* trace
        if not arenapy_finalizing():
            PyErr_Fetch(&kind, &value, &trace)
            self.verify_quietly()
            PyErr_Restore(kind, value, trace)

    cdef void verify_quietly(self) noexcept:
        # Findings, and a file that shrank, are left to a call that can raise.
        if self.ledger.n_found == 0 and not self.shrunk():
            self.verify()                    # to sys.unraisablehook

    cdef void tell(self) noexcept nogil:
        if self.debug:
            self.ledger.tell()

    cdef void refuse(self, const char* call, void* ptr) noexcept nogil:
        if self.debug:
            self.ledger.refuse(call, <uintptr_t>ptr)

    cdef str born_at(self, uintptr_t block):
        """Where the live block that begins there was allocated, to follow its name."""
        cdef uint32_t place = self.ledger.born_at(block) if self.debug else <uint32_t>NO_SITE
        return allocated_at(place)

    cdef int check_free(self) except -1:
        if self.debug:
            self.check()                         # a file that shrank cannot be looked at
            arenapy_lock_acquire(&self.lock)     # with the GIL, so that nobody unmaps it meanwhile
            if not self.shut:
                self.ledger.scan(0, <uintptr_t>-1)
            arenapy_lock_release(&self.lock)
            self.raise_damage()
        return 0

    cdef void warn_of_leaks(self) noexcept:
        """All Buffers are gone: what is live is C code's, with nothing left to free it with."""
        leaks = self.ledger.live() if self.recycles else []
        if leaks:
            warnings.warn(
                f"a {self.what} over {self.kind} memory is gone, and {summary(leaks)} were never "
                "freed", ResourceWarning)

    # -- the end of a region, and fork

    cdef void fork_lock(self) noexcept nogil:
        MemoryOwner.fork_lock(self)
        if self.debug:
            arenapy_spin_acquire(&self.ledger.lock)

    cdef void fork_unlock(self, bint child) noexcept nogil:
        if child:
            self.n_recording = 0             # of threads that it does not have
        if child and self.parents:
            self.forked(False)
        if self.debug:
            if child:
                self.ledger.n_looking = 0
            arenapy_spin_release(&self.ledger.lock)
        MemoryOwner.fork_unlock(self, child)

    cdef void disable(self, int why) noexcept nogil:
        if why != GONE_NOT:
            self.gone = why
        if self.debug and why == GONE_CLOSED:
            self.ledger.close()
        permit_all(self)
        self.shut = True

    cdef void forked(self, bint unmapped) noexcept nogil:
        self.disable(GONE_FORKED if unmapped else GONE_NOT)

    cdef int check(self) except -1:
        for region in self.listed():
            (<Region>region).check()
        if self.debug:
            self.raise_damage()
        return 0

    cdef object allocator_of(self):
        return None if self.allocator is None else self.allocator()

    cdef object region_at(self, char* ptr):
        cdef Region region
        for region in self.listed():
            if <uintptr_t>ptr - <uintptr_t>region.ptr < region.size:
                return region
        return None


seal(AllocatorCore)


cdef int check_alike(AllocatorCore c, tuple regions, Region region) except -1:
    cdef Region first
    if not regions:
        return 0
    first = <Region>regions[0]
    if (first.kind != region.kind or first.device_id != region.device_id
            or first.host_accessible != region.host_accessible
            or first.device_accessible != region.device_accessible):
        raise ValueError(
            f"{region!r} is {_described(region)}, but this {c.what} has {_described(first)}; a "
            "source makes regions of one kind: make another allocator for the other kind"
        )
    return 0


cdef str _described(Region region):
    on = f" on device {region.device_id}" if region.device_id >= 0 else ""
    host, device = region.host_accessible, region.device_accessible
    place = ("the host and devices" if device else "the host") if host else (
        "devices" if device else "nowhere")
    return f"{region.kind} memory{on}, accessible from {place}"


cdef inline void permit_all(AllocatorCore c) noexcept nogil:
    """The memory is about to be somebody else's, or it was before (`shut`)."""
    cdef Py_ssize_t i
    if POISONS and not c.shut:
        for i in range(c.n_regions):
            permit(c, <uintptr_t>(<Region>c.region[i]).ptr, (<Region>c.region[i]).size)
