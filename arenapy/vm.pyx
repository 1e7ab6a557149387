# cython: language_level=3, freethreading_compatible=True
"""The operating system layer: system calls, and nothing else.

What lives here: mappings, placement, locking, memfds and leases; `vm_pages`, which fills pages and
asks about them, and `vm_reserve`, which reserves address space: this module shows their names as
its own. What may not: policy. Which option leads to which call, and how a failure is explained, is
said in `source.py`; here it is an `OSError`.

Constants are defined here where the C library's headers may be older than the kernel: a wheel is
built on an old system and runs on a new one. Calls that old C libraries lack go through `syscall`.

Thread-safety: every function may be called from any thread; the GIL is released in system calls
that may take long.
"""

import os

from cpython.exc cimport PyErr_SetFromErrno
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport int64_t
from posix.fcntl cimport O_CLOEXEC, O_RDWR, open as c_open
from posix.mman cimport (
    MAP_ANONYMOUS, MAP_FAILED, MAP_FIXED, MAP_PRIVATE, MAP_SHARED, PROT_READ, PROT_WRITE, madvise,
    mmap, munlock, munmap,
)
from posix.unistd cimport close, ftruncate

from arenapy.vm_pages import (
    can_populate, can_scan_pages, huge_bytes, inject_populate_error, prefault, smaps_huge_bytes,
)
from arenapy.vm_reserve import commit, decommit, protect, reserve
from arenapy.vm_reserve cimport vm_reserve_within

__all__ = [
    "PAGE_SIZE", "address_of", "advise", "bind", "can_populate", "can_scan_pages", "commit",
    "decommit", "file_nbytes", "first_lease", "huge_bytes", "inject_populate_error", "lease",
    "lock", "map_memory", "memfd", "minor_faults", "prefault", "protect", "reopen", "reserve",
    "smaps_huge_bytes", "unlock", "unmap",
]

cdef extern from * nogil:
    """
    #include <fcntl.h>
    #include <sched.h>
    #include <stdio.h>
    #include <sys/mman.h>
    #include <sys/resource.h>
    #include <sys/stat.h>
    #include <sys/syscall.h>
    #include <unistd.h>

    #ifndef MAP_HUGETLB
    #define MAP_HUGETLB 0x40000
    #endif
    #ifndef F_ADD_SEALS
    #define F_ADD_SEALS 1033
    #define F_SEAL_SEAL 1
    #define F_SEAL_SHRINK 2
    #define F_SEAL_GROW 4
    #endif
    #ifndef F_OFD_GETLK
    #define F_OFD_GETLK 36
    #define F_OFD_SETLK 37
    #endif

    static long arenapy_memfd_create(const char *name, unsigned flags) {
        return syscall(SYS_memfd_create, name, flags);
    }
    static long arenapy_mlock2(size_t address, size_t nbytes, int flags) {
        return syscall(SYS_mlock2, address, nbytes, flags);
    }
    static long arenapy_mbind(size_t address, size_t nbytes, int mode,
                              const unsigned long *nodes, unsigned long bits) {
        return syscall(SYS_mbind, address, nbytes, mode, nodes, bits, 0u);
    }
    /* struct flock is filled in here: its fields' order and types are the C library's business. */
    static int arenapy_lock_range(int fd, int command, int type, long long offset,
                                  long long nbytes, struct flock *out) {
        struct flock lock = {0};
        int rc;
        lock.l_type = (short)type;
        lock.l_whence = SEEK_SET;
        lock.l_start = (off_t)offset;
        lock.l_len = (off_t)nbytes;
        rc = fcntl(fd, command, &lock);
        if (out) *out = lock;
        return rc;
    }
    static long long arenapy_file_nbytes(int fd) {
        struct stat status;
        return fstat(fd, &status) ? -1 : (long long)status.st_size;
    }
    static long long arenapy_minor_faults(void) {
        struct rusage usage;
        getrusage(RUSAGE_SELF, &usage);
        return usage.ru_minflt;
    }
    static void arenapy_set_errno(int error) { errno = error; }
    """
    const int MAP_HUGETLB
    const int F_ADD_SEALS, F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW
    const int F_OFD_GETLK, F_OFD_SETLK, F_RDLCK, F_WRLCK, F_UNLCK
    struct flock:
        short l_type
        int64_t l_start
        int64_t l_len
    int fcntl(int fd, int command, int flags)
    int snprintf(char* out, size_t nbytes, const char* form, int value)
    int sched_yield()
    long memfd_create "arenapy_memfd_create"(const char* name, unsigned flags)
    long mlock2 "arenapy_mlock2"(size_t address, size_t nbytes, int flags)
    long mbind "arenapy_mbind"(
        size_t address, size_t nbytes, int mode, const unsigned long* nodes, unsigned long bits)
    int lock_range "arenapy_lock_range"(
        int fd, int command, int type, long long offset, long long nbytes, flock* out)
    long long c_file_nbytes "arenapy_file_nbytes"(int fd)
    long long c_minor_faults "arenapy_minor_faults"()
    void set_errno "arenapy_set_errno"(int error)

cdef extern from "Python.h":
    Py_buffer* PyMemoryView_GET_BUFFER(object view)

# Fixed by the kernel's interface.
cdef enum:
    HUGE_SHIFT = 26                  # where MAP_HUGETLB and MFD_HUGETLB want log2 of the page size
    MFD_CLOEXEC = 1
    MFD_ALLOW_SEALING = 2
    MFD_HUGETLB = 4
    MPOL_BIND = 2
    MLOCK_ONFAULT = 1
    NODE_WORDS = 16                  # of a node mask: the kernel has at most 1024 nodes
    WORD_BITS = 64                   # of an unsigned long, on the platforms we support

PAGE_SIZE = os.sysconf("SC_PAGESIZE")
cdef size_t BASE_PAGE = PAGE_SIZE


cdef int fail() except -1:
    """Raise the OSError of the current errno."""
    PyErr_SetFromErrno(OSError)


# ---- mappings ------------------------------------------------------------------------------


cdef int size_bits(size_t page_size) noexcept nogil:
    """log2 of a huge page's size where MAP_HUGETLB and MFD_HUGETLB want it."""
    cdef int bits = 0
    while (<size_t>1 << bits) < page_size:
        bits += 1
    return bits << HUGE_SHIFT


def map_memory(size_t nbytes, *, int fd=-1, long long offset=0, bint shared=False,
               bint writable=True, size_t align=0, bint guard=False, size_t page_size=0):
    """Map `nbytes` (rounded up to pages): anonymous memory, or a file's bytes from `offset`.

    Address space is reserved first, aligned, and then mapped over; the first and last page stay
    ``PROT_NONE`` if `guard`. A `page_size` above the base page's asks for hugetlbfs pages, which
    the kernel reserves now (never ``MAP_NORESERVE``), or, with `fd`, says that this is what the
    file is made of.

    Returns
    -------
    tuple[int, int, int]
        Address of the memory; address and bytes of all that is mapped, guard pages included.
    """
    cdef size_t page = max(page_size, BASE_PAGE)
    cdef size_t margin = BASE_PAGE if guard else 0
    cdef size_t address = 0
    cdef int protection = PROT_READ | (PROT_WRITE if writable else 0)
    cdef int flags = MAP_FIXED | (MAP_SHARED if shared else MAP_PRIVATE)
    cdef void* at
    cdef int saved
    if nbytes == 0 or nbytes > <size_t>1 << 63:
        raise ValueError(f"cannot map {nbytes} bytes")
    nbytes = (nbytes + page - 1) & ~(page - 1)
    align = max(align, page)
    if fd < 0:
        flags |= MAP_ANONYMOUS
        if page > BASE_PAGE:
            flags |= MAP_HUGETLB | size_bits(page)
    with nogil:
        at = vm_reserve_within(nbytes, align, margin)
        if at != NULL:
            address = <size_t>at
            at = mmap(at, nbytes, protection, flags, fd, offset)
            if at == MAP_FAILED:
                saved = errno
                munmap(<void*>(address - margin), nbytes + 2 * margin)
                set_errno(saved)
                at = NULL
    if at == NULL:
        fail()
    return address, address - margin, nbytes + 2 * margin


cdef int vm_unmap(size_t address, size_t nbytes) noexcept nogil:
    return -errno if munmap(<void*>address, nbytes) else 0


def unmap(size_t address, size_t nbytes):
    """Unmap a range."""
    cdef int rc
    with nogil:
        rc = munmap(<void*>address, nbytes)
    if rc:
        fail()


def advise(size_t address, size_t nbytes, int advice):
    """``madvise`` with one of the `mmap` module's ``MADV_`` constants."""
    cdef int rc
    with nogil:
        rc = madvise(<void*>address, nbytes, advice)
        while rc and errno == EAGAIN:
            sched_yield()
            rc = madvise(<void*>address, nbytes, advice)
    if rc:
        fail()


def bind(size_t address, size_t nbytes, unsigned node):
    """Take the pages of a range, which must not be there yet, from one NUMA node only."""
    cdef unsigned long nodes[NODE_WORDS]
    cdef int i
    cdef long rc
    if node >= NODE_WORDS * WORD_BITS:
        raise ValueError(f"NUMA node {node} is beyond the kernel's {NODE_WORDS * WORD_BITS}")
    for i in range(NODE_WORDS):
        nodes[i] = 0
    nodes[node // WORD_BITS] = <unsigned long>1 << (node % WORD_BITS)
    with nogil:
        # The kernel counts one bit less than it is told.
        rc = mbind(address, nbytes, MPOL_BIND, nodes, NODE_WORDS * WORD_BITS + 1)
    if rc:
        fail()


def lock(size_t address, size_t nbytes):
    """Keep every page of a range in memory from when it is faulted in (``MLOCK_ONFAULT``)."""
    cdef long rc
    with nogil:
        rc = mlock2(address, nbytes, MLOCK_ONFAULT)
    if rc:
        fail()


def unlock(size_t address, size_t nbytes):
    """Let every page of a range be swapped out again."""
    cdef int rc
    with nogil:
        rc = munlock(<void*>address, nbytes)
    if rc:
        fail()


def memfd(bytes name not None, size_t nbytes, size_t page_size=0):
    """A descriptor of `nbytes` of anonymous shared memory whose size is sealed for good."""
    cdef unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING
    cdef const char* c_name = name
    cdef long fd
    cdef int rc
    if page_size > BASE_PAGE:
        flags |= MFD_HUGETLB | <unsigned>size_bits(page_size)
    with nogil:
        fd = memfd_create(c_name, flags)
    if fd < 0:
        fail()
    try:
        with nogil:
            rc = ftruncate(<int>fd, nbytes)
            while rc and errno == EINTR:
                rc = ftruncate(<int>fd, nbytes)
            if not rc:
                rc = fcntl(<int>fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
        if rc:
            fail()
    except BaseException:
        close(<int>fd)
        raise
    return fd


def address_of(view not None: memoryview):
    """The address of a memoryview's first byte."""
    return <size_t>PyMemoryView_GET_BUFFER(view).buf


cdef long long vm_minor_faults() noexcept nogil:
    return c_minor_faults()


def minor_faults():
    """Page faults of this process so far, of all its threads, that needed no disk."""
    return c_minor_faults()


cdef long long vm_file_nbytes(int fd) noexcept nogil:
    cdef long long nbytes = c_file_nbytes(fd)
    return nbytes if nbytes >= 0 else -errno


def file_nbytes(int fd):
    """The size of an open file now."""
    cdef long long nbytes
    with nogil:
        nbytes = c_file_nbytes(fd)
    if nbytes < 0:
        fail()
    return nbytes


# ---- leases --------------------------------------------------------------------------------
#
# A byte-range lock of an open file description (OFD) says that somebody still sees these bytes. The
# kernel drops it when the last descriptor of that description closes, also when its process is
# killed: no protocol, nothing to clean up.

cdef int vm_reopen(int fd) noexcept nogil:
    cdef char path[32]
    cdef int new
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd)
    new = c_open(path, O_RDWR | O_CLOEXEC)
    while new < 0 and errno == EINTR:
        new = c_open(path, O_RDWR | O_CLOEXEC)
    return new if new >= 0 else -errno


cdef int vm_lease(int fd, long long offset, long long nbytes) noexcept nogil:
    cdef int rc = lock_range(fd, F_OFD_SETLK, F_RDLCK, offset, nbytes, NULL)
    while rc and errno == EINTR:
        rc = lock_range(fd, F_OFD_SETLK, F_RDLCK, offset, nbytes, NULL)
    return -errno if rc else 0


cdef int vm_first_lease(
    int fd, long long offset, long long nbytes, long long* at, long long* length
) noexcept nogil:
    cdef flock found
    cdef int rc = lock_range(fd, F_OFD_GETLK, F_WRLCK, offset, nbytes, &found)
    while rc and errno == EINTR:
        rc = lock_range(fd, F_OFD_GETLK, F_WRLCK, offset, nbytes, &found)
    if rc:
        return -errno
    if found.l_type == F_UNLCK:
        return 0
    at[0] = found.l_start
    length[0] = found.l_len
    return 1


cdef int checked(int rc) except -1:
    """The result of a function that returns -errno, as an exception if it is one."""
    if rc < 0:
        raise OSError(-rc, os.strerror(-rc))
    return rc


def reopen(int fd):
    """A new descriptor of the same file with an open file description of its own, read-write."""
    cdef int new = vm_reopen(fd)
    if new < 0:
        raise OSError(-new, os.strerror(-new), f"/proc/self/fd/{fd}")
    return new


def lease(int fd, long long offset, long long nbytes):
    """Mark bytes of a file as in use until this open file description is closed everywhere."""
    if offset < 0 or nbytes <= 0:
        raise ValueError(f"cannot lease {nbytes} bytes at {offset}: need offset >= 0, nbytes > 0")
    checked(vm_lease(fd, offset, nbytes))


def first_lease(int fd, long long offset, long long nbytes):
    """A lease of another open file description that overlaps these bytes.

    Returns
    -------
    tuple[int, int] or None
        Offset and bytes of the whole lease (adjacent leases of one description are one), not
        necessarily the lowest; None if nobody else holds any of these bytes.
    """
    cdef long long at, length
    return (at, length) if checked(vm_first_lease(fd, offset, nbytes, &at, &length)) else None
