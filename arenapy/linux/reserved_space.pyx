# cython: language_level=3, freethreading_compatible=True
"""Address space first, memory later: reserve, commit, decommit.

What lives here: `Mapping`, which owns a mapped range; ranges that are mapped without access
(`PROT_NONE`) and cost nothing but their addresses, and the calls by which parts of them get pages
and lose them again. Tables that grow in place stand on them, and `Reservation`. What does not: how
pages are filled (`vm_pages`), placed or locked (`vm`), and policy (`source.py`).

A decommitted part stays accessible and reads as zeros: taking the access away and giving it again
would split the mapping each time, and a process has some 65,000 mappings (`vm.max_map_count`).
Committing from one end upwards keeps a reservation at two.

Thread-safety: every function may be called from any thread, on parts that do not overlap; the GIL
is released in system calls.
"""
import os

cimport cython
from libc.errno cimport EAGAIN, EEXIST, EINTR, EINVAL, errno
from posix.mman cimport (
    MADV_DONTNEED, MAP_ANONYMOUS, MAP_FAILED, MAP_NORESERVE, MAP_PRIVATE, PROT_NONE, PROT_READ,
    PROT_WRITE, madvise, mmap, mprotect, munlock, munmap,
)

from posix.unistd cimport getpid

from arenapy.base.atomic cimport arenapy_finalizing
from arenapy.base.sealed cimport seal
from arenapy.linux.populate cimport vm_populate
from arenapy.linux.vm cimport vm_is_mapped, vm_unmap

cdef extern from * nogil:
    """
    #include <sched.h>
    #include <sys/mman.h>
    #ifndef MADV_REMOVE
    #define MADV_REMOVE 9
    #endif
    #ifndef MAP_FIXED_NOREPLACE         /* Linux 4.17 */
    #define MAP_FIXED_NOREPLACE 0x100000
    #endif
    #ifndef MADV_DONTNEED_LOCKED        /* Linux 5.18 */
    #define MADV_DONTNEED_LOCKED 24
    #endif
    """
    const int MADV_REMOVE, MADV_DONTNEED_LOCKED, MAP_FIXED_NOREPLACE
    int sched_yield()

cdef size_t BASE_PAGE = os.sysconf("SC_PAGESIZE")


cdef void* vm_reserve_within(size_t nbytes, size_t align, size_t margin) noexcept nogil:
    cdef size_t room, base, address, end
    cdef void* at
    align = max(align, BASE_PAGE)
    nbytes = (nbytes + BASE_PAGE - 1) & ~(BASE_PAGE - 1)
    room = nbytes + 2 * margin + (align - BASE_PAGE)
    if nbytes == 0 or room < nbytes:
        room = <size_t>-1                      # too much, as it was asked: ENOMEM
    at = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    if at == MAP_FAILED:
        return NULL
    base = <size_t>at
    address = (base + margin + align - 1) & ~(align - 1)
    end = address + nbytes + margin
    if address - margin > base:
        munmap(at, address - margin - base)
    if base + room > end:
        munmap(<void*>end, base + room - end)
    return <void*>address


cdef void* vm_reserve(size_t nbytes, size_t align) noexcept nogil:
    return vm_reserve_within(nbytes, align, 0)


cdef void vm_occupy(size_t address, size_t nbytes) noexcept nogil:
    cdef size_t start = address & ~(BASE_PAGE - 1)
    cdef size_t end = (address + nbytes + BASE_PAGE - 1) & ~(BASE_PAGE - 1)
    cdef size_t half = ((end - start) // 2 + BASE_PAGE - 1) & ~(BASE_PAGE - 1)
    cdef void* at = mmap(
        <void*>start, end - start, PROT_NONE,
        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0)
    if at == MAP_FAILED:
        if errno == EEXIST and end - start > BASE_PAGE and not vm_is_mapped(start, end - start):
            vm_occupy(start, half)
            vm_occupy(start + half, end - start - half)
    elif at != <void*>start:                   # Linux before 4.17: something is there
        munmap(at, end - start)


cdef int vm_protect(void* at, size_t nbytes, bint accessible) noexcept nogil:
    cdef int access = PROT_READ | PROT_WRITE if accessible else PROT_NONE
    return -errno if mprotect(at, nbytes, access) else 0


cdef int vm_fill(void* at, size_t nbytes) noexcept nogil:
    cdef int rc = vm_populate(<size_t>at, nbytes, True)
    while rc == -EINTR or rc == -EAGAIN:
        sched_yield()
        rc = vm_populate(<size_t>at, nbytes, True)
    return rc


cdef int vm_commit(void* at, size_t nbytes) noexcept nogil:
    cdef int rc = vm_protect(at, nbytes, True)
    if rc:
        return rc
    rc = vm_fill(at, nbytes)
    if rc:
        vm_decommit(at, nbytes, False)
    return rc


cdef int advise_all(void* at, size_t nbytes, int advice) noexcept nogil:
    cdef int rc = madvise(at, nbytes, advice)
    while rc and errno == EAGAIN:
        sched_yield()
        rc = madvise(at, nbytes, advice)
    return -errno if rc else 0


cdef int vm_decommit(void* at, size_t nbytes, bint shared) noexcept nogil:
    cdef int rc
    cdef int advice = MADV_REMOVE if shared else MADV_DONTNEED
    if <size_t>at & (BASE_PAGE - 1):
        return -EINVAL
    rc = advise_all(at, nbytes, advice)
    if rc == -EINVAL and not shared:           # locked
        rc = advise_all(at, nbytes, MADV_DONTNEED_LOCKED)
    if rc == -EINVAL:                          # shared and locked, or a kernel before 5.18
        rc = -errno if munlock(at, nbytes) else advise_all(at, nbytes, advice)
    return rc


# ---- the same for Python ---------------------------------------------------------------------


@cython.final
cdef class Mapping:
    """A mapped range, and its owner: it is unmapped when this object goes. Internal.

    A signal's exception may strike between any two bytecodes. So the call that maps memory returns
    its owner, which exists before the memory does, and a Region takes the range over in C: at no
    bytecode has the range no owner, or two. Leaving a ``with`` unmaps what was not taken over, at
    once even if a traceback keeps this object.

    Attributes
    ----------
    address : int
        Of the memory.
    map_address, map_nbytes : int
        All that is mapped, guard pages included; `map_nbytes` is 0 if this owns nothing.
    """

    cdef void own(self, size_t address, size_t nbytes, size_t margin) noexcept:
        self.address, self.process = address, getpid()
        self.map_address, self.map_nbytes = address - margin, nbytes + 2 * margin

    cdef void take(self, size_t* start, size_t* nbytes) noexcept:
        start[0], nbytes[0] = self.map_address, self.map_nbytes
        self.map_nbytes = 0

    cdef void end(self) noexcept:
        cdef size_t start, nbytes
        self.take(&start, &nbytes)
        # A forked child may not have had the range (MADV_DONTFORK), and have something else there.
        if nbytes and self.process == getpid() and not arenapy_finalizing():
            with nogil:
                munmap(<void*>start, nbytes)

    def unmap(self):
        """Unmap it now, if it is still its own. Done again, it does nothing."""
        self.end()

    def __enter__(self):
        return self

    def __exit__(self, *_details):
        self.end()

    def __dealloc__(self):
        self.end()


seal(Mapping)


cdef int checked(int rc) except -1:
    if rc < 0:
        raise OSError(-rc, os.strerror(-rc))
    return 0


def reserve(size_t nbytes, *, size_t align=0, bint guard=False):
    """Reserve `nbytes` (rounded up to pages) of address space that cannot be accessed yet.

    Parameters
    ----------
    align : int
        Of the address, a power of two; at least a page.
    guard : bool
        Reserve a page more on both ends, never to be committed.

    Returns
    -------
    Mapping
        The owner of what is reserved.
    """
    cdef Mapping mapping = Mapping.__new__(Mapping)      # before there is anything to own
    cdef size_t margin = BASE_PAGE if guard else 0
    cdef void* at
    if nbytes == 0 or nbytes > <size_t>1 << 63:
        raise ValueError(f"cannot reserve {nbytes} bytes")
    with nogil:
        at = vm_reserve_within(nbytes, align, margin)
    if at == NULL:
        checked(-errno)
    mapping.own(<size_t>at, (nbytes + BASE_PAGE - 1) & ~(BASE_PAGE - 1), margin)
    return mapping


def protect(size_t address, size_t nbytes, bint accessible):
    """Allow reading and writing a range, or neither."""
    cdef int rc
    with nogil:
        rc = vm_protect(<void*>address, nbytes, accessible)
    checked(rc)


def commit(size_t address, size_t nbytes):
    """Make a part of a reservation accessible and fault it in; in vain, it has no page at all."""
    cdef int rc
    with nogil:
        rc = vm_commit(<void*>address, nbytes)
    checked(rc)


def decommit(size_t address, size_t nbytes, *, int shared_by=0):
    """Give the pages of a part back, locked or not. It stays accessible, and reads as zeros.

    Of shared memory they go from the file (``MADV_REMOVE``), so for every process. Therefore only
    the process `shared_by` does so: a child may be forked while its parent makes this call.
    """
    cdef int rc = 0
    with nogil:
        if shared_by == 0 or shared_by == getpid():
            rc = vm_decommit(<void*>address, nbytes, shared_by != 0)
    checked(rc)


def give_back(size_t address, size_t nbytes, *, int shared_by=0, bint locked=False):
    """The same, and no longer locked, as far as the system does so: for what failed.

    No error, and one call: no signal's handler runs before it is done.
    """
    with nogil:
        if shared_by == 0 or shared_by == getpid():
            vm_decommit(<void*>address, nbytes, shared_by != 0)
        if locked:
            munlock(<void*>address, nbytes)


# ---- arrays that grow in place -----------------------------------------------------------
# Tables: arrays of metadata that grow in place. array.pxd says what for.

cdef enum:
    PAGE = 4096


cdef bint array_open(ReservedArray* t, size_t nbytes) noexcept nogil:
    nbytes = (nbytes + PAGE - 1) & ~<size_t>(PAGE - 1)
    t.ready = t.accessible = 0
    t.at = <char*>vm_reserve(nbytes, PAGE)
    t.reserved = nbytes if t.at != NULL else 0
    return t.at != NULL


cdef bint array_grow(ReservedArray* t, size_t nbytes) noexcept nogil:
    nbytes = (nbytes + PAGE - 1) & ~<size_t>(PAGE - 1)
    if nbytes <= t.ready:
        return True
    if nbytes > t.reserved or not make_accessible(t, nbytes):
        return False
    if vm_fill(t.at + t.ready, nbytes - t.ready) < 0:
        vm_decommit(t.at + t.ready, nbytes - t.ready, False)
        return False
    t.ready = nbytes
    return True


cdef bint make_accessible(ReservedArray* t, size_t nbytes) noexcept nogil:
    """At least so many bytes. Twice as many each time: mprotect waits for all threads that are
    faulting pages in, and they wait for it.
    """
    cdef size_t wished = min(max(nbytes, 2 * t.accessible), t.reserved)
    if nbytes <= t.accessible:
        return True
    if vm_protect(t.at + t.accessible, wished - t.accessible, True) < 0:
        wished = nbytes                      # a limit may leave room for no more than that
        if vm_protect(t.at + t.accessible, wished - t.accessible, True) < 0:
            return False
    t.accessible = wished
    return True


cdef void array_close(ReservedArray* t) noexcept nogil:
    if t.at != NULL:
        vm_unmap(<size_t>t.at, t.reserved)
        t.at = NULL
        t.ready = t.accessible = t.reserved = 0
