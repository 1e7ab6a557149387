"""Region: one contiguous range of addresses, and what ends it.

What lives here: who owns a range (a mapping, a file descriptor, a user's object), when it is
given back, and what a fork does to it. What does not: how it was mapped (sources, vm) and how
it is carved up (allocators).

A region is unmapped when the last object that needs it is gone: every Buffer and every
allocator core holds a reference to it. `close()` does it earlier, if nobody is looking.

Fork. Registries of live regions and of allocators' cores are walked by pthread_atfork
handlers, which hold the cores' locks meanwhile. In the child, regions that are not its own copy
are marked gone, and so are the allocators over them. For memory that parent and child both see,
the handlers write down every byte that is not free, and give the child a lease by which its end is
known (children). If any of this fails, the parent's allocator reuses nothing from then on.

C code forks without the GIL. Data that the GIL alone guards may then be half changed by another
thread, in the parent and in the child: the handlers call no Python, and read and write nothing of
that kind.
"""
import operator
import sys

cimport cython
from cpython.object cimport PyObject
from libc.errno cimport EBADF
from libc.limits cimport INT_MAX, LLONG_MAX
from libc.stdint cimport uintptr_t
from posix.unistd cimport getpid

from arenapy.base.assertion cimport ASSERTS
from arenapy.base.atomic cimport (
    ARENAPY_GIL, arenapy_add, arenapy_finalizing, arenapy_load, arenapy_sub,
)
from arenapy.base.atomic cimport arenapy_lock_acquire, arenapy_lock_release
from arenapy.base.sizes cimport as_size
from arenapy.buffer.block cimport (
    GONE_CLOSED, GONE_FORKED, GONE_NOT, Block, Hold, MemoryOwner, root_of,
)
from arenapy.buffer.buffer cimport new_range
from arenapy.memory.children cimport (
    Seen, child_expected, children_ask, children_ended, children_forget, children_forget_ended,
    children_lock, children_see, children_unlock, seen_add, seen_keep, seen_new,
)
from arenapy.memory.claims cimport Claim, claims_lock, claims_unlock
from arenapy.base.sanitizer cimport POISONS
from arenapy.base.sealed cimport seal
from arenapy.base.thread_slot cimport (
    RANK_REGISTRY, lock_released, lock_taken, next_core_locks, this_thread,
)
from arenapy.linux.vm cimport (
    Descriptor, OpenFile, vm_close, vm_file_nbytes, vm_first_lease, vm_identify, vm_is_mapped,
    vm_is_open, vm_reopen, vm_unmap,
)
from arenapy.linux.reserved_space cimport Mapping, vm_occupy, vm_protect
from libc.stdlib cimport free

from arenapy.base.text import format_bytes

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
    void lock_registry "arenapy_registry_lock" () noexcept nogil
    void unlock_registry "arenapy_registry_unlock" () noexcept nogil


cdef inline void arenapy_registry_lock() noexcept nogil:
    if ASSERTS:
        lock_taken(RANK_REGISTRY)
    lock_registry()


cdef inline void arenapy_registry_unlock() noexcept nogil:
    if ASSERTS:
        lock_released(RANK_REGISTRY)
    unlock_registry()


cdef dict FORKS = {"inherit": FORK_INHERIT, "skip": FORK_SKIP, "closed": FORK_CLOSED}
cdef PyObject* regions = NULL       # heads of the registries
cdef PyObject* cores = NULL
cdef uint64_t made = 0              # regions ever


cdef class Backing:
    """The memory behind a region that has no mapping of its own. Internal."""


seal(Backing, "a Backing is internal; make a source's region")


@cython.no_gc_clear               # the end of a Buffer's streams needs `hooks`
@cython.trashcan(True)            # owners in chains, of any length, end one after the other
cdef class Region(MemoryOwner):
    """One contiguous address range, which an allocator divides into blocks.

    A source makes it with ``region(nbytes)``. Your own sources use :meth:`from_address`.
    It is unmapped when the last Buffer and allocator over it are gone.

    Attributes
    ----------
    address, nbytes : int
        Where it starts, and its size in bytes.
    kind : str
        "host", "shared", "file", "existing", or the name that a user's source gives.
    device_id : int
        Ordinal of the device it is on; -1 for the host.
    page_size : int
        Bytes of a page as it was mapped (`huge_fraction` covers transparent huge pages).
    readonly, host_accessible, device_accessible : bool
        Allowed access to the memory.

    Notes
    -----
    Thread-safety: all methods may be called from any thread.

    Examples
    --------
    >>> import arenapy
    >>> region = arenapy.Host().region(1 << 20)
    >>> region.kind, region.nbytes, region.host_accessible
    ('host', 1048576, True)
    """

    def __cinit__(self):
        self.file.fd = -1
        self.gone = GONE_CLOSED          # until from_address opens it

    @classmethod
    def from_address(
        cls, address, nbytes, *, str kind not None="host", owner=None, readonly=False,
        device_id=-1, host_accessible=True, device_accessible=False, page_size=4096,
        str fork="inherit", fd=-1, file_offset=0, map_address=0, map_nbytes=0,
        Mapping mapping=None, Descriptor descriptor=None,
    ):
        """Make a region of memory from another allocator. Your own sources use this.

        Parameters
        ----------
        address, nbytes : int
            The range, in bytes. It must stay valid until the region is gone.
        kind : str
            The `kind` of its Buffers.
        owner : object, optional
            Kept alive until the region is gone.
        readonly : bool
            If True, allocators refuse it, and exports are read-only.
        device_id : int
            Ordinal of the device, -1 for the host.
        host_accessible, device_accessible : bool
            Whether the host and devices may read and write it.
        page_size : int
            Bytes of a page.
        fork : {"inherit", "skip", "closed"}
            The memory in a forked child: "inherit" is its own copy, "skip" is nothing, and "closed"
            is the same memory with closed allocators.
        fd : int
            A file descriptor that the region takes over and closes at its end.
        file_offset : int
            Offset of the first byte in that file.
        map_address, map_nbytes : int
            The range to munmap at the end, if `map_nbytes` is not 0.
        mapping, descriptor
            Internal: owners to take the range and the file descriptor over from.

        Raises
        ------
        ValueError, TypeError
            If a value is out of range. Nothing is taken over then.
        OSError
            If `fd` is not open. Nothing is taken over then.

        Notes
        -----
        An integer owns nothing. If a signal handler raises an exception between the system call
        and this call (for example ``KeyboardInterrupt``), the range or the descriptor leaks. To
        avoid this, pass an `owner` that exists before the memory, and that frees it at its end.

        Examples
        --------
        >>> import ctypes
        >>> class Heap:
        ...     def region(self, nbytes):
        ...         memory = ctypes.create_string_buffer(nbytes)
        ...         return arenapy.Region.from_address(
        ...             ctypes.addressof(memory), nbytes, kind="heap", owner=memory)
        >>> arenapy.Bump(4096, Heap()).alloc(100).kind
        'heap'
        """
        cdef Region self
        cdef OpenFile file
        cdef size_t start = _address(address)
        cdef Py_ssize_t n = as_size(nbytes, "nbytes")
        cdef size_t map_start, map_size
        cdef int number_of_file = <int>_integer(fd, "fd", INT_MAX)
        cdef int device = <int>_integer(device_id, "device_id", INT_MAX)
        cdef long long offset = _integer(file_offset, "file_offset", LLONG_MAX)
        if fork not in FORKS:
            raise ValueError(f"fork={fork!r} is not one of {', '.join(FORKS)}")
        if n == 0 or start == 0 or start + <size_t>n < start:
            raise ValueError(f"no region of {n} bytes can lie at address {start:#x}")
        if (fork == "closed" and descriptor is not None
                and descriptor.process != 0 and descriptor.process != getpid()):
            raise ValueError(
                "this process was forked while its parent made this region, and both would hand "
                "out its bytes; make another one"
            )
        file.fd = -1
        if number_of_file >= 0:
            number = vm_identify(number_of_file, &file)
            if number < 0:
                raise OSError(-number, f"fd={fd} is not an open file")
        self = Region.__new__(Region)
        map_start = _address(map_address)
        map_size = as_size(map_nbytes, "map_nbytes")
        self.page_size = as_size(page_size, "page_size")
        if self.page_size == 0:
            raise ValueError("page_size=0 is not the size of a page; give its size, like 4096")
        self.ptr = <char*>start
        self.size = n
        # Interned, it never ends without a GIL: other threads read an allocator's without a lock.
        self.kind = kind if ARENAPY_GIL or type(kind) is not str else sys.intern(kind)
        self.owner = owner
        self.foreign = owner is not None and not isinstance(owner, Backing)
        if isinstance(owner, Claim):
            self.foreign = self.borrowed = (<Claim>owner).view is not None
            self.shared = (<Claim>owner).shared
            (<Claim>owner).taken = True
            if not self.foreign:             # a file's, mapped by the region itself
                (<Claim>owner).place(start, n)
        if POISONS:                          # the caller may look at every byte
            self.foreign = self.foreign or kind == "file" or (
                owner is None and map_size == 0 and mapping is None)
        self.readonly = readonly
        self.device_id = device
        self.host_accessible = host_accessible
        self.device_accessible = device_accessible
        self.fork = FORKS[fork]
        self.file_offset = offset
        # From here on both are the region's: in C, so that no signal's exception comes between.
        if mapping is not None:
            mapping.take(&map_start, &map_size)
        if descriptor is not None:
            descriptor.take(&file)
        self.map_ptr, self.map_size = map_start, map_size
        self.file = file
        self.checked = kind == "file" and file.fd >= 0
        self.messages = kind == "shared" and file.fd >= 0
        self.gone = GONE_NOT
        _register(self)
        return self

    def __dealloc__(self):
        if self.hooks is not None:
            self.hooks.finish(<PyObject*>self, self.owner)
        _unregister(self)
        self._unmap()

    cdef int _unmap(self) noexcept:
        """Give the range back. Not once the interpreter ends: somebody may still be writing."""
        cdef size_t start = self.map_ptr
        cdef size_t n = self.map_size
        cdef OpenFile file = self.file
        if arenapy_finalizing():
            return 0
        self._end_claim()
        children_forget(&self.seens)
        self.map_size = 0
        self.file.fd = -1
        if n and not (self.gone == GONE_FORKED and self.fork == FORK_SKIP):
            with nogil:                        # a gigabyte takes milliseconds
                vm_unmap(start, n)
        if self.file_owner is None:
            vm_close(&file)
        self.file_owner = None
        return 0

    cdef int _end_claim(self) noexcept:
        """If others see the bytes on, whoever claims them next has to wait for that."""
        cdef Claim claim = <Claim>self.owner if isinstance(self.owner, Claim) else None
        if claim is None or claim.holding == NULL or self.fork != FORK_CLOSED:
            return 0
        if self.readonly and not self.borrowed:
            return 0                         # a file, which the child's own lock protects
        if self.messages:
            return 0                         # its file goes when nobody sees it
        if self.inherited or self.lease_lost:
            claim.outlive(NULL)
        elif not children_ended(&self.seens):
            claim.outlive(&self.seens)
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
        return self.file.fd

    @property
    def closed(self) -> bool:
        """True after :meth:`close`, and in a forked child that does not have the memory."""
        return self.gone != GONE_NOT

    @property
    def huge_fraction(self) -> float:
        """The share of the region's addresses in huge pages, from 0 to 1, as the kernel reports it.

        Addresses without memory, as in a region that grows in place, are not in huge pages.

        Raises
        ------
        OSError
            If the kernel does not report it.
        """
        from arenapy.linux import vm
        if self.gone:
            return 0.0
        huge = vm.huge_bytes(<uintptr_t>self.ptr, self.size)
        if huge is None:
            raise OSError("this kernel does not say which pages are huge")
        return min(huge / <double>self.size, 1.0)        # a page may have more than the region

    def __repr__(self):
        state = ", closed" if self.gone else ""
        return (
            f"<Region {self.kind} {format_bytes(self.size)} at {<uintptr_t>self.ptr:#x}{state}>"
        )

    # -- use

    def buffer(self, offset=0, nbytes=None):
        """A Buffer over a part of the region, without an allocator.

        Parameters
        ----------
        offset : int
            First byte, counted from the start of the region.
        nbytes : int, optional
            Size. The default is the rest of the region.

        Raises
        ------
        ValueError
            If the range is not inside the region, or the region is closed; or if its allocator is
            gone, and it is memory of a device or grew in place.
        BufferError
            If an allocator manages the region, because it may reuse the bytes.

        Examples
        --------
        >>> region = arenapy.Host().region(1 << 20)
        >>> region.buffer(4096, 100).address - region.address
        4096
        """
        cdef Py_ssize_t at = as_size(offset, "offset")
        cdef Py_ssize_t n
        self.check_usable()
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
        self.viewed, self.newborn = True, False
        if self.received and n:
            from arenapy.memory.shared import leased_window
            return new_range(leased_window(self, at, n), self.ptr + at, n)
        return new_range(self, self.ptr + at, n)

    def close(self):
        """Unmap now. A second close does nothing.

        Its allocator and its Buffers that were never exported are closed, too.

        Raises
        ------
        BufferError
            If a Buffer that was ever exported is alive, or a call uses one. Nothing has changed
            then.

        Examples
        --------
        >>> region = arenapy.Host().region(1 << 20)
        >>> region.close()
        >>> region.closed
        True
        """
        cdef MemoryOwner user, guard
        cdef object _owner
        cdef bint held, closed, known = False
        while not known:
            user = self.living_user()
            guard = self if user is None else user
            if guard.hooks is not None:
                guard.hooks.collect(<PyObject*>guard, False)
            arenapy_lock_acquire(&guard.lock)
            closed = self.gone != 0
            known = closed or self.user == (NULL if user is None else <PyObject*>user)
            held = not known and user is None            # by an allocator that ends just now
            if known and not closed:
                held = (arenapy_load(&self.holds) != 0 or self.pinned_by != 0
                        or (user is not None and user.has_holds()))
                if not held:
                    self.gone = GONE_CLOSED
                    if user is not None:
                        user.disable(GONE_CLOSED)
            arenapy_lock_release(&guard.lock)
            if closed:                       # by another thread, or before
                return
            known = known or held and self.living_user() is None
        if held:
            raise BufferError(
                f"{self!r} has Buffers that were exported and are alive, or that calls or streams "
                "still use, or a Pool keeps some for streams, or its memory is growing or "
                "shrinking now; drop them first, let calls return, and trim() the Pool"
            )
        self._unmap()
        with cython.critical_section(self):
            _owner, self.owner = self.owner, None    # it ends after the section

    def _make_accessible(self, size_t offset, size_t nbytes):
        """Make a part of a reservation accessible. False: it is closed, or a limit is reached.

        Internal. Nobody closes it meanwhile, as `close` takes the same lock.
        """
        cdef MemoryOwner guard = self if self.user == NULL else <MemoryOwner>self.user
        cdef bint done
        arenapy_lock_acquire(&guard.lock)
        done = not self.gone and vm_protect(self.ptr + offset, nbytes, True) == 0
        arenapy_lock_release(&guard.lock)
        return done

    def __reduce__(self):
        raise TypeError(
            "a Region is not pickled by value; pickle a Buffer of it, or send a Shared region "
            "through multiprocessing"
        )

    # -- as the owner of Buffers made by buffer()

    cdef bint alive(self, Block root) noexcept nogil:
        """Unheld Buffers end when an allocator takes the region, or its parent is closed."""
        return self.user == NULL and (self.parent is None or not self.parent.gone)

    cdef void enlist(self, Hold* hold) noexcept nogil:
        arenapy_add(&self.holds, 1)
        if self.parent is not None:
            arenapy_add(&self.parent.holds, 1)

    cdef void delist(self, Hold* hold) noexcept nogil:
        arenapy_sub(&self.holds, 1)
        if self.parent is not None:
            arenapy_sub(&self.parent.holds, 1)

    cdef void hold_ended(self, Hold* hold) noexcept nogil:
        self.delist(hold)
        free(hold)

    cdef int check(self) except -1:
        """A file that shrank below its mapping kills whoever touches it: refuse before."""
        cdef long long now
        if not self.checked or self.file.fd < 0:
            return 0
        now = vm_file_nbytes(&self.file)
        if now < 0:
            raise OSError(
                -now, f"cannot ask for the size of the file behind {self!r}: its descriptor "
                f"{self.file.fd} was closed by other code; do not close it, or map the file again"
            )
        if now < self.file_offset + <long long>self.size:
            raise BufferError(
                f"the file behind {self!r} has shrunk to {now} bytes, and "
                f"{self.file_offset + <long long>self.size} are mapped; touching the rest would "
                "be a SIGBUS: map the file again"
            )
        return 0

    cdef bint shrunk(self) noexcept nogil:
        return self.checked and self.file.fd >= 0 and (
            vm_file_nbytes(&self.file) < self.file_offset + <long long>self.size)

    # -- as what an allocator manages

    cdef object region_at(self, char* ptr):
        return self if self.parent is None else self.parent

    cdef int check_unused(self) except -1:
        if self.user != NULL:
            raise ValueError(f"{self!r} already belongs to an allocator; give each its own region")
        self.check_usable()
        if self.inherited:
            raise ValueError(
                f"{self!r} belongs to the process that made it, and this is a forked child; make a "
                "new region here"
            )
        if self.received:
            raise ValueError(
                f"{self!r} belongs to the process that sent it, and only that one allocates; "
                "view it with Region.buffer()"
            )
        if self.readonly:
            raise ValueError(
                f"{self!r} is read-only, and an allocator hands out writable memory; view it with "
                "Region.buffer(), or map the file with mode='r+' or 'c'"
            )
        if self.shared:
            raise ValueError(
                f"{self!r} was unpickled or received, and others may see its bytes: it can be "
                "viewed, but not allocated from; use another source for an allocator"
            )
        if arenapy_load(&self.holds):
            raise ValueError(f"{self!r} has held Buffers of its own; pass another region")
        return 0

    cdef int check_usable(self) except -1:
        if self.gone:
            raise ValueError(f"{self!r} is closed; make a new region from its source")
        if self.spent:
            raise ValueError(
                f"{self!r} belonged to an allocator that is gone: parts of it may have no memory, "
                "or a stream may still use it; make a new region from its source"
            )
        return 0

    cdef MemoryOwner living_user(self):
        cdef object found
        if ARENAPY_GIL:
            if self.user == NULL or (<MemoryOwner>self.user).ending:
                return None
            return <MemoryOwner>self.user
        # Other threads get no reference from this while it is ending. (The collector clears it
        # before it runs the finalizers of a cycle: those cannot close the region.)
        arenapy_lock_acquire(&self.lock)
        found = self.user_ref if self.user != NULL else None
        arenapy_lock_release(&self.lock)
        found = None if found is None else found()
        return None if found is None or (<MemoryOwner>found).ending else <MemoryOwner>found

    cdef int attach(self, MemoryOwner core) except -1:
        cdef object _before
        cdef bint taken
        self.check_unused()
        arenapy_lock_acquire(&self.lock)     # again: another thread may use it since
        taken = self.user != NULL or self.gone or arenapy_load(&self.holds) != 0
        if not taken:
            _before = self.user_ref          # it ends when the lock is free
            self.user_ref = core.weak
            self.user = <PyObject*>core
        arenapy_lock_release(&self.lock)
        if taken:
            self.check_unused()
            raise ValueError(f"{self!r} was used by another thread; give each its own region")
        if self.newborn:                     # of forks from here on, the allocator is told
            self.newborn = self.lease_lost = False
            children_forget(&self.seens)
        return 0

    cdef int pin(self) except -1:
        """For the allocator that has it."""
        cdef MemoryOwner guard = <MemoryOwner>self.user if self.user != NULL else self
        cdef bint gone
        arenapy_lock_acquire(&guard.lock)
        gone = self.gone != 0
        if not gone:
            self.pinned_by = this_thread()
        arenapy_lock_release(&guard.lock)
        if gone:
            raise ValueError(f"{self!r} is closed; make a new region from its source")
        return 0

    cdef int pin_unused(self) except -1:
        """For an allocator that is about to take it: nobody closes it, or takes it, meanwhile."""
        cdef bint unused
        arenapy_lock_acquire(&self.lock)
        unused = self.user == NULL and not self.gone and self.pinned_by == 0
        if unused:
            self.pinned_by = this_thread()
        arenapy_lock_release(&self.lock)
        if not unused:
            self.check_unused()
            raise ValueError(
                f"{self!r} is used by another call; give each allocator its own region")
        return 0

    cdef void unpin(self) noexcept:
        self.pinned_by = 0

    cdef bint seen_elsewhere(self) noexcept nogil:
        cdef uintptr_t at, stop, start = <uintptr_t>self.ptr
        return self.sent or (not self.newborn and (
            self.lease_lost or not children_ended(&self.seens)
            # A child that has ended may have sent some of it. (Whoever only views it has leases.)
            or (not (self.received or self.shared)
                and self.leases(start, start + self.size, &at, &stop))))

    cdef void detach(self, bint streams) noexcept:
        arenapy_registry_lock()
        self.user = NULL
        self.spent = self.partial or streams or arenapy_load(&self.holds) != 0
        arenapy_registry_unlock()

    cdef Descriptor reopened(self):
        cdef Descriptor file = Descriptor.__new__(Descriptor)      # before there is anything to own
        cdef int fd = vm_reopen(&self.file)
        if fd == -EBADF:
            raise OSError(
                EBADF, f"{self!r} cannot be sent any more: its descriptor {self.file.fd} was "
                "closed by other code; do not close it, or send from a new region"
            )
        if fd < 0:
            raise OSError(-fd, f"cannot open the memory of {self!r} again, to lease it")
        file.own(fd)
        return file

    cdef int leases(
        self, uintptr_t start, uintptr_t end, uintptr_t* at, uintptr_t* stop
    ) noexcept nogil:
        children_ask()
        return self.leases_by_now(start, end, at, stop)

    cdef int leases_by_now(
        self, uintptr_t start, uintptr_t end, uintptr_t* at, uintptr_t* stop
    ) noexcept nogil:
        cdef long long first = 0, n = 0
        cdef long long base = <long long>(start - <uintptr_t>self.ptr) + self.file_offset
        cdef int found
        at[0], stop[0] = start, end
        if self.lease_lost:
            return 1
        if children_see(&self.seens, start, end, at, stop):
            return 1
        if not self.messages:
            return 0
        if not vm_is_open(&self.file):
            return 1                          # nobody can be asked any more
        found = vm_first_lease(self.file.fd, base, <long long>(end - start), &first, &n)
        if found == 0:
            return 0
        if found == 1:
            if first > base:
                at[0] = start + <uintptr_t>(first - base)
            if n > 0 and first + n - base < <long long>(end - start):
                stop[0] = start + <uintptr_t>(first + n - base)
        return 1                              # an error counts as leased: never hand out


seal(Region, "a Region is made by a source's region(nbytes), or by Region.from_address(...)")


cdef size_t _address(object value) except? 0:
    try:
        n = operator.index(value)
    except TypeError:
        raise TypeError(f"{value!r} is not an address: give an integer") from None
    if n < 0 or n >= 1 << 64:
        raise ValueError(f"{value!r} is not an address")
    return n


cdef long long _integer(object value, str what, long long most) except? -1:
    try:
        n = operator.index(value)
    except TypeError:
        raise TypeError(f"{what}={value!r}: need an int, not {type(value).__name__}") from None
    if not -1 <= n <= most:
        raise ValueError(f"{what}={n}: need a number from -1 to {most}")
    return n


# ---- the registry, and fork --------------------------------------------------------------

cdef void _register(Region region) noexcept:
    global regions, made
    arenapy_registry_lock()
    made += 1
    region.number = made
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


cdef void register_core(MemoryOwner core) noexcept:
    global cores
    arenapy_registry_lock()
    core.next_core = cores
    if cores != NULL:
        (<MemoryOwner>cores).prev_core = <PyObject*>core
    cores = <PyObject*>core
    arenapy_registry_unlock()


cdef void unregister_core(MemoryOwner core) noexcept:
    global cores
    arenapy_registry_lock()
    if core.prev_core != NULL:
        (<MemoryOwner>core.prev_core).next_core = core.next_core
    elif cores == <PyObject*>core:
        cores = core.next_core
    if core.next_core != NULL:
        (<MemoryOwner>core.next_core).prev_core = core.prev_core
    core.next_core = core.prev_core = NULL
    arenapy_registry_unlock()


cdef void _before_fork() noexcept nogil:
    cdef PyObject* p
    arenapy_registry_lock()
    claims_lock()
    p = cores
    while p != NULL:
        if ASSERTS:
            next_core_locks()
        (<MemoryOwner>p).fork_lock()
        p = (<MemoryOwner>p).next_core
    children_ask()
    p = regions
    while p != NULL:
        if (<Region>p).seens != NULL:
            children_forget_ended(&(<Region>p).seens)
        if _child_writes_here(p) and not _lease_to_child(p):
            (<Region>p).lease_lost = True
        p = (<Region>p).next
    children_lock()
    # Now, so that an allocator that acts upon it at once waits in there until the fork is done.
    p = regions
    while p != NULL:
        if (<Region>p).user != NULL and ((<Region>p).seens != NULL or (<Region>p).lease_lost):
            (<MemoryOwner>(<Region>p).user).expect_leases(True)
        p = (<Region>p).next


cdef bint _child_writes_here(PyObject* p) noexcept nogil:
    """Will a forked child see what this process allocates here later?"""
    return (
        (<Region>p).fork == FORK_CLOSED
        and not ((<Region>p).inherited or (<Region>p).gone or (<Region>p).lease_lost)
        # A region without an allocator is viewed, and may get one later: an allocator
        # over this region, or over another one of the same bytes of a user's object.
        and ((<Region>p).user != NULL or (<Region>p).borrowed or not (
            (<Region>p).received or (<Region>p).shared or (<Region>p).readonly))
    )


cdef bint _lease_to_child(PyObject* p) noexcept nogil:
    """Note what is not free here, which the next child sees. False: that cannot be."""
    cdef Seen* seen
    cdef uintptr_t start = <uintptr_t>(<Region>p).ptr
    cdef bint noted = True
    seen = seen_new() if child_expected() else NULL
    if seen == NULL:
        return False
    if (<Region>p).user != NULL:
        noted = (<MemoryOwner>(<Region>p).user).lease_live(p, seen) == 0
    else:
        seen_add(seen, start, start + (<Region>p).size)
    seen_keep(seen, &(<Region>p).seens)
    return noted


cdef void _inherit(PyObject* p, bint mapped) noexcept nogil:
    """In a forked child: what is it to have of a region?"""
    if (<Region>p).pinned_by != this_thread():
        (<Region>p).pinned_by = 0            # another thread's call, which ended there
    if (<Region>p).fork == FORK_CLOSED:
        (<Region>p).inherited = True
    if (<Region>p).gone == GONE_NOT and ((<Region>p).fork == FORK_SKIP or not mapped):
        (<Region>p).gone = GONE_FORKED
    if (<Region>p).user != NULL and ((<Region>p).fork != FORK_INHERIT or not mapped):
        (<MemoryOwner>(<Region>p).user).forked((<Region>p).gone == GONE_FORKED)


cdef void _after_fork(bint child) noexcept nogil:
    cdef PyObject* p = regions
    children_unlock(child)
    while child and p != NULL:
        _inherit(p, not (<Region>p).borrowed
                 or vm_is_mapped(<uintptr_t>(<Region>p).ptr, (<Region>p).size))
        p = (<Region>p).next
    p = regions
    while child and p != NULL:
        # An address that somebody kept is a segfault then, and not somebody else's memory.
        if (<Region>p).gone == GONE_FORKED and (<Region>p).host_accessible:
            vm_occupy(<uintptr_t>(<Region>p).ptr, (<Region>p).size)
        p = (<Region>p).next
    p = cores
    while p != NULL:
        (<MemoryOwner>p).fork_unlock(child)
        p = (<MemoryOwner>p).next_core
    claims_unlock()
    arenapy_registry_unlock()


cdef object ask_source(object source, object nbytes):
    cdef uint64_t before = made
    region = source.region(nbytes)
    if isinstance(region, Region):
        # Its source may have given it to others since, who then have viewed it or sent it.
        (<Region>region).newborn = (<Region>region).number > before and not (<Region>region).viewed
    return region


cdef Region region_behind(Block block):
    cdef Block root = root_of(block)
    return root.owner.region_at(root.ptr)


def in_shared_memory(uintptr_t at):
    """Is there an open region of shared memory that this process allocates from at an address?"""
    cdef PyObject* p
    cdef bint found = False
    arenapy_registry_lock()
    p = regions
    while p != NULL and not found:
        found = (<Region>p).messages and (<Region>p).user != NULL and not (<Region>p).gone and (
            at - <uintptr_t>(<Region>p).ptr < (<Region>p).size)
        p = (<Region>p).next
    arenapy_registry_unlock()
    return found


def claim_behind(Block block not None):
    """The claim on a user's object that a Buffer is a part of.

    Returns
    -------
    tuple[int, bool]
        Its number, 0 if there is none; and whether there may be others on the same bytes.
    """
    cdef Region region = region_behind(block)
    if region is None or not region.borrowed:
        return 0, False
    return (<Claim>region.owner).number, (<Claim>region.owner).shared


cdef void _in_parent() noexcept nogil:
    _after_fork(False)


cdef void _in_child() noexcept nogil:
    _after_fork(True)


if pthread_atfork(_before_fork, _in_parent, _in_child) != 0:       # it fails for want of memory
    raise MemoryError("pthread_atfork failed: arenapy could not keep forks safe")
