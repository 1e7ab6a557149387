"""Region: one contiguous range of addresses, and what ends it.

What lives here: who owns a range (a mapping, a file descriptor, a user's object), when it is
given back, and what a fork does to it. What does not: how it was mapped (source, vm) and how
it is carved up (allocators).

A region is unmapped when the last object that needs it is gone: every Buffer and every
allocator core holds a reference to it. `close()` does it earlier, if nobody is looking.

Fork. Registries of live regions and of allocators' cores are walked by pthread_atfork
handlers, which hold the cores' locks meanwhile. In the child, regions that are not its own copy
are marked gone, and so are the allocators over them. For shared memory the handlers take a
lease in the child's name on every byte that is not free: a read lock on those bytes of the
memfd, through an open file description that only the child keeps. The kernel drops it when the
child exits, however it ends.
"""
cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport uintptr_t
from posix.unistd cimport close as close_fd

from arenapy.atomic cimport arenapy_add, arenapy_finalizing, arenapy_load, arenapy_sub
from arenapy.atomic cimport arenapy_lock_acquire, arenapy_lock_release
from arenapy.arguments cimport as_size
from arenapy.block cimport GONE_CLOSED, GONE_FORKED, GONE_NOT, Block, Hold, Keeper
from arenapy.buffer cimport new_range
from arenapy.poison cimport POISONS
from arenapy.vm cimport vm_file_nbytes, vm_first_lease, vm_reopen, vm_unmap
from arenapy.vm_reserve cimport vm_occupy
from libc.stdlib cimport free

cdef extern from "<pthread.h>" nogil:
    int pthread_atfork(
        void (*prepare)() noexcept nogil, void (*parent)() noexcept nogil,
        void (*child)() noexcept nogil,
    )

cdef extern from *:
    """
    #include <pthread.h>
    /* The registry's own lock: held for a few pointer writes, and across fork. */
    static pthread_mutex_t arenapy_registry = PTHREAD_MUTEX_INITIALIZER;
    #define arenapy_registry_lock() pthread_mutex_lock(&arenapy_registry)
    #define arenapy_registry_unlock() pthread_mutex_unlock(&arenapy_registry)
    """
    void arenapy_registry_lock() noexcept nogil
    void arenapy_registry_unlock() noexcept nogil

cdef dict FORKS = {"inherit": FORK_INHERIT, "skip": FORK_SKIP, "closed": FORK_CLOSED}
cdef PyObject* regions = NULL       # heads of the registries
cdef PyObject* cores = NULL


@cython.auto_pickle(False)
cdef class Backing:
    """What a region's memory is, where it is no mapping of its own. Internal."""

    def __init__(self):
        raise TypeError("a Backing is internal; make a source's region")


@cython.no_gc_clear               # the end of a Buffer's streams needs `medium`
cdef class Region(Keeper):
    """One contiguous address range that allocators carve up.

    Made by a source's ``region(nbytes)``; sources of your own use :meth:`from_address`.
    It is unmapped when the last Buffer and allocator over it are gone.

    Attributes
    ----------
    address, nbytes : int
        Where it starts, and its size in bytes.
    kind : str
        "host", "shared", "file", "existing", or what a user's source calls it.
    device_id : int
        Ordinal of the device it is on; -1 for the host.
    page_size : int
        Bytes of a page as it was mapped (huge pages given by THP are in `huge_fraction`).
    readonly, host_accessible, device_accessible : bool
        What may be done with the memory, and from where.

    Notes
    -----
    Thread-safety: all methods may be called from any thread.
    """

    def __cinit__(self):
        self.descriptor = -1
        self.fork_descriptor = -1
        self.gone = GONE_CLOSED          # until from_address opens it

    def __init__(self):
        raise TypeError(
            "a Region is made by a source's region(nbytes), or by Region.from_address(...)"
        )

    @classmethod
    def from_address(
        cls, address, nbytes, *, str kind not None="host", owner=None, readonly=False,
        int device_id=-1, host_accessible=True, device_accessible=False, page_size=4096,
        str fork="inherit", int fd=-1, long long file_offset=0, map_address=0, map_nbytes=0,
    ):
        """Make a region of memory that something else has allocated: how sources are written.

        Parameters
        ----------
        address, nbytes : int
            The range, in bytes; it must stay valid until the region is gone.
        kind : str
            What Buffers report as their kind.
        owner : object, optional
            Kept alive until the region is gone.
        readonly : bool
            Whether allocators and exports have to leave it alone.
        device_id : int
            Ordinal of the device, -1 for the host.
        host_accessible, device_accessible : bool
            From where it may be read and written.
        page_size : int
            Bytes of a page.
        fork : {"inherit", "skip", "closed"}
            What a forked child has: its own copy; nothing; the same memory, whose allocators
            are closed there.
        fd : int
            A file descriptor that the region takes over and closes at its end.
        file_offset : int
            Offset of the first byte in that file.
        map_address, map_nbytes : int
            The range to munmap at the end, if `map_nbytes` is not 0.

        Raises
        ------
        ValueError, TypeError
            For a value out of range. Nothing is taken over then.
        """
        cdef Region self
        cdef size_t start = _address(address)
        cdef Py_ssize_t n = as_size(nbytes, "nbytes")
        cdef size_t map_start, map_size
        if fork not in FORKS:
            raise ValueError(f"fork={fork!r} is not one of {', '.join(FORKS)}")
        if n == 0 or start == 0 or start + <size_t>n < start:
            raise ValueError(f"no region of {n} bytes can lie at address {start:#x}")
        self = Region.__new__(Region)
        map_start = _address(map_address)
        map_size = as_size(map_nbytes, "map_nbytes")
        self.page_size = as_size(page_size, "page_size")
        if self.page_size == 0:
            raise ValueError("page_size=0 is no size of a page; give 4096, or what it is")
        self.ptr = <char*>start
        self.size = n
        self.kind = kind
        self.owner = owner
        self.foreign = owner is not None and not isinstance(owner, Backing)
        if POISONS:                          # the caller may look at every byte
            self.foreign = self.foreign or (owner is None and map_size == 0)
        self.readonly = readonly
        self.device_id = device_id
        self.host_accessible = host_accessible
        self.device_accessible = device_accessible
        self.fork = FORKS[fork]
        self.file_offset = file_offset
        self.checked = kind == "file" and fd >= 0
        self.map_ptr, self.map_size = map_start, map_size   # from here on it is the region's
        self.descriptor = fd
        self.gone = GONE_NOT
        _register(self)
        return self

    def __dealloc__(self):
        if self.medium is not None:
            self.medium.finish(<PyObject*>self)
        _unregister(self)
        self._unmap()

    cdef int _unmap(self) noexcept:
        """Give the range back. Not once the interpreter ends: somebody may still be writing."""
        cdef size_t start = self.map_ptr
        cdef size_t n = self.map_size
        if arenapy_finalizing():
            return 0
        self.map_size = 0
        if n and not (self.gone == GONE_FORKED and self.fork == FORK_SKIP):
            with nogil:                        # a gigabyte takes milliseconds
                vm_unmap(start, n)
        if self.descriptor >= 0:
            close_fd(self.descriptor)
            self.descriptor = -1
        return 0

    # -- facts

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return <uintptr_t>self.ptr

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size

    @property
    def fd(self) -> int:
        """The file descriptor behind it, owned by the region; -1 if there is none."""
        return self.descriptor

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called, or the memory stayed behind in a fork."""
        return self.gone != GONE_NOT

    @property
    def huge_fraction(self) -> float:
        """The part of it that huge pages back now, from 0 to 1, as the kernel says.

        Raises
        ------
        OSError
            If the kernel does not say.
        """
        from arenapy import vm
        if self.gone:
            return 0.0
        huge = vm.huge_bytes(<uintptr_t>self.ptr, self.size)
        if huge is None:
            raise OSError("this kernel does not say which pages are huge")
        return huge / <double>self.size

    def __repr__(self):
        state = ", closed" if self.gone else ""
        return f"<Region {self.kind} {self.size} bytes at {<uintptr_t>self.ptr:#x}{state}>"

    # -- use

    def buffer(self, offset=0, nbytes=None):
        """A Buffer over a part of the region, without an allocator.

        Parameters
        ----------
        offset : int
            First byte, counted from the start of the region.
        nbytes : int, optional
            Size; by default all that follows.

        Raises
        ------
        ValueError
            If the range is not inside the region, or the region is closed.
        BufferError
            If an allocator manages the region: its bytes may be handed out again.
        """
        cdef Py_ssize_t at = as_size(offset, "offset")
        cdef Py_ssize_t n
        if self.gone:
            raise ValueError(f"{self!r} is closed; make a new region from its source")
        if <size_t>at > self.size:
            raise ValueError(f"offset={at} is beyond the region's {self.size} bytes")
        n = <Py_ssize_t>self.size - at if nbytes is None else as_size(nbytes, "nbytes")
        if n > <Py_ssize_t>self.size - at:
            raise ValueError(
                f"nbytes={n} from offset={at} is beyond the region's {self.size} bytes"
            )
        if self.user != NULL:
            raise BufferError(
                f"{self!r} is managed by an allocator, which hands its bytes out; "
                "use that allocator's alloc()"
            )
        self.check()
        if self.received and n:
            from arenapy.shared import leased_window
            return new_range(leased_window(self, at, n), self.ptr + at, n)
        return new_range(self, self.ptr + at, n)

    def close(self):
        """Unmap now. A second close does nothing.

        Buffers over it that were never exported are closed with it, and so is an allocator.

        Raises
        ------
        BufferError
            If a Buffer that was ever exported is alive. Nothing changes.
        """
        cdef Keeper user = <Keeper>self.user if self.user != NULL else None
        cdef Keeper guard = self if user is None else user
        cdef bint held
        if self.gone:
            return
        if guard.medium is not None:
            guard.medium.settle(<PyObject*>guard, False)
        arenapy_lock_acquire(&guard.lock)
        held = arenapy_load(&self.holds) != 0 or (user is not None and user.has_holds())
        if not held:
            self.gone = GONE_CLOSED
            if user is not None:
                user.disable(GONE_CLOSED)
        arenapy_lock_release(&guard.lock)
        if held:
            raise BufferError(
                f"{self!r} has Buffers that were exported and are alive, or that streams still "
                "use; drop them first"
            )
        self._unmap()
        self.owner = None

    def __reduce__(self):
        raise TypeError(
            "a Region is not pickled by value; pickle a Buffer of it, or send a Shared region "
            "through multiprocessing"
        )

    # -- as the keeper of Buffers made by buffer()

    cdef bint alive(self, Block root) noexcept nogil:
        """Unheld Buffers end when an allocator takes the region, or its parent is closed."""
        return self.user == NULL and (self.parent is None or not self.parent.gone)

    cdef void enlist(self, Hold* hold) noexcept nogil:
        arenapy_add(&self.holds, 1)
        if self.parent is not None:
            arenapy_add(&self.parent.holds, 1)

    cdef void ended(self, Hold* hold) noexcept nogil:
        arenapy_sub(&self.holds, 1)
        if self.parent is not None:
            arenapy_sub(&self.parent.holds, 1)
        free(hold)

    cdef int check(self) except -1:
        """A file that shrank below its mapping kills whoever touches it: refuse before."""
        cdef long long now
        if not self.checked or self.descriptor < 0:
            return 0
        now = vm_file_nbytes(self.descriptor)
        if now < 0:
            raise OSError(-now, f"cannot ask for the size of the file behind {self!r}")
        if now < self.file_offset + <long long>self.size:
            raise BufferError(
                f"the file behind {self!r} has shrunk to {now} bytes, and "
                f"{self.file_offset + <long long>self.size} are mapped; touching the rest would "
                "be a SIGBUS: map the file again"
            )
        return 0

    # -- as what an allocator manages

    cdef int attach(self, Keeper core) except -1:
        if self.user != NULL:
            raise ValueError(f"{self!r} already belongs to an allocator; give each its own region")
        if self.gone:
            raise ValueError(f"{self!r} is closed; make a new region from its source")
        if self.received:
            raise ValueError(
                f"{self!r} belongs to the process that sent it, which alone allocates from it; "
                "view it with Region.buffer()"
            )
        if self.readonly:
            raise ValueError(
                f"{self!r} is read-only, and an allocator hands out writable memory; view it with "
                "Region.buffer(), or map the file with mode='r+' or 'c'"
            )
        if arenapy_load(&self.holds):
            raise ValueError(f"{self!r} has Buffers of its own that are held; give another region")
        self.user = <PyObject*>core
        return 0

    cdef void detach(self) noexcept:
        arenapy_registry_lock()
        self.user = NULL
        arenapy_registry_unlock()

    cdef int leases(
        self, uintptr_t start, uintptr_t end, uintptr_t* at, uintptr_t* stop
    ) noexcept nogil:
        """Does another process still see bytes of [start, end)? 1, with a part in at, stop."""
        cdef long long first = 0, n = 0
        cdef long long base = <long long>(start - <uintptr_t>self.ptr) + self.file_offset
        cdef int found = vm_first_lease(self.descriptor, base, <long long>(end - start), &first, &n)
        at[0], stop[0] = start, end
        if self.lease_lost:
            return 1
        if found == 0:
            return 0
        if found == 1:
            if first > base:
                at[0] = start + <uintptr_t>(first - base)
            if n > 0 and first + n - base < <long long>(end - start):
                stop[0] = start + <uintptr_t>(first + n - base)
        return 1                              # an error counts as leased: never hand out


cdef size_t _address(object value) except? 0:
    try:
        n = value.__index__()
    except AttributeError:
        raise TypeError(f"{value!r} is not an address: give an integer") from None
    if n < 0 or n >= 1 << 64:
        raise ValueError(f"{value!r} is not an address")
    return n


# ---- the registry, and fork --------------------------------------------------------------

cdef void _register(Region region) noexcept:
    global regions
    arenapy_registry_lock()
    region.next = regions
    if regions != NULL:
        (<Region>regions).prev = <PyObject*>region
    regions = <PyObject*>region
    arenapy_registry_unlock()


cdef void _unregister(Region region) noexcept:
    global regions
    arenapy_registry_lock()
    if region.prev != NULL:
        (<Region>region.prev).next = region.next
    elif regions == <PyObject*>region:
        regions = region.next
    if region.next != NULL:
        (<Region>region.next).prev = region.prev
    region.next = region.prev = NULL
    arenapy_registry_unlock()


cdef void register_core(Keeper core) noexcept:
    global cores
    arenapy_registry_lock()
    core.next_core = cores
    if cores != NULL:
        (<Keeper>cores).prev_core = <PyObject*>core
    cores = <PyObject*>core
    arenapy_registry_unlock()


cdef void unregister_core(Keeper core) noexcept:
    global cores
    arenapy_registry_lock()
    if core.prev_core != NULL:
        (<Keeper>core.prev_core).next_core = core.next_core
    elif cores == <PyObject*>core:
        cores = core.next_core
    if core.next_core != NULL:
        (<Keeper>core.next_core).prev_core = core.prev_core
    core.next_core = core.prev_core = NULL
    arenapy_registry_unlock()


cdef void _before_fork() noexcept nogil:
    cdef PyObject* p
    arenapy_registry_lock()
    p = cores
    while p != NULL:
        (<Keeper>p).fork_lock()
        p = (<Keeper>p).next_core
    p = regions
    while p != NULL:
        if ((<Region>p).fork == FORK_CLOSED and (<Region>p).user != NULL
                and (<Region>p).descriptor >= 0 and not (<Region>p).checked):
            (<Region>p).fork_descriptor = vm_reopen((<Region>p).descriptor)
            if ((<Region>p).fork_descriptor < 0
                    or (<Keeper>(<Region>p).user).lease_live(p, (<Region>p).fork_descriptor) < 0):
                (<Region>p).lease_lost = True
        p = (<Region>p).next


cdef void _after_fork(bint child) noexcept nogil:
    cdef PyObject* p = regions
    while p != NULL:
        if not child and (<Region>p).fork_descriptor >= 0:
            close_fd((<Region>p).fork_descriptor)     # the child's copy stays open until it ends
        (<Region>p).fork_descriptor = -1
        if child and (<Region>p).fork != FORK_INHERIT:
            if (<Region>p).fork == FORK_SKIP:
                (<Region>p).gone = GONE_FORKED
                # An address that somebody kept is a segfault then, and not somebody else's memory.
                if (<Region>p).map_size:
                    vm_occupy(<uintptr_t>(<Region>p).ptr, (<Region>p).size)
            if (<Region>p).user != NULL:
                (<Keeper>(<Region>p).user).forked((<Region>p).fork == FORK_SKIP)
        p = (<Region>p).next
    p = cores
    while p != NULL:
        (<Keeper>p).fork_unlock(child)
        p = (<Keeper>p).next_core
    arenapy_registry_unlock()


cdef void _in_parent() noexcept nogil:
    _after_fork(False)


cdef void _in_child() noexcept nogil:
    _after_fork(True)


if pthread_atfork(_before_fork, _in_parent, _in_child) != 0:       # it fails for want of memory
    raise MemoryError("pthread_atfork failed: arenapy could not keep forks safe")
