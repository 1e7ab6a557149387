# cython: language_level=3, freethreading_compatible=True
"""The operating system layer: system calls, and nothing else.

What lives here: mappings, placement, locking, descriptors, memfds and leases; `populate`, which
fills pages and asks about them, and `reserved_space`, which reserves address space: this module
shows their names as its own. What may not: policy. Which option leads to which call, and how a
failure is explained, is said in `memory/sources.py`; here it is an `OSError`.

Constants are defined here where the C library's headers may be older than the kernel: a wheel is
built on an old system and runs on a new one. Calls that old C libraries lack go through `syscall`.

Thread-safety: every function may be called from any thread; the GIL is released in system calls
that may take long.
"""

import os
import sys

cimport cython
from cpython.bytes cimport PyBytes_AsStringAndSize
from cpython.exc cimport (
    PyErr_CheckSignals, PyErr_SetFromErrno, PyErr_SetFromErrnoWithFilenameObject,
)
from libc.errno cimport EACCES, EAGAIN, EBADF, EFBIG, EINTR, ENAMETOOLONG, errno
from libc.stdint cimport int64_t, uint64_t
from posix.fcntl cimport O_CLOEXEC, O_CREAT, O_EXCL, O_RDONLY, O_RDWR, open as c_open
from posix.mman cimport (
    MAP_ANONYMOUS, MAP_FAILED, MAP_FIXED, MAP_NORESERVE, MAP_PRIVATE, MAP_SHARED, MS_ASYNC,
    PROT_NONE, PROT_READ, PROT_WRITE, madvise, mmap, msync, munlock, munmap,
)
from posix.unistd cimport close, ftruncate, getpid

from arenapy.base.atomic cimport arenapy_finalizing
from arenapy.base.sealed cimport seal
from arenapy.linux.populate import (
    can_populate, can_scan_pages, huge_bytes, inject_populate_error, prefault, smaps_huge_bytes,
)
from arenapy.linux.reserved_space import commit, decommit, give_back, protect, reserve
from arenapy.linux.reserved_space cimport Mapping, vm_reserve_within

__all__ = [
    "PAGE_SIZE", "Descriptor", "address_of", "advise", "areas", "bind", "bundle", "can_populate",
    "can_scan_pages", "commit", "decommit", "duplicate_socket", "file_nbytes", "first_lease",
    "foreign_lock", "give_back", "huge_bytes", "huge_page", "identity", "inject_populate_error",
    "lease", "lock",
    "lock_file", "map_memory", "memfd", "minor_faults", "open_file", "prefault", "protect",
    "read_areas", "receive", "renewal", "reopen", "reserve", "reserve_blocks", "smaps_huge_bytes",
    "soft_limit", "unbundled", "unlock",
]

cdef extern from * nogil:
    """
    #include <errno.h>
    #include <fcntl.h>
    #include <sched.h>
    #include <stdio.h>
    #include <string.h>
    #include <sys/ioctl.h>
    #include <sys/mman.h>
    #include <sys/resource.h>
    #include <sys/socket.h>
    #include <sys/stat.h>
    #include <sys/statfs.h>
    #include <sys/syscall.h>
    #include <sys/sysmacros.h>
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

    /* A file's number that is not 0, 1 or 2. These are free if a standard file was closed, and any
       C code writes to it: that would go into this file. */
    static int arenapy_above_standard(int fd) {
        if (fd < 0 || fd > 2) return fd;
        int above = fcntl(fd, F_DUPFD_CLOEXEC, 3), error = errno;
        close(fd);
        errno = error;
        return above;
    }
    /* If the table is full but for 0, 1 or 2, no file is made that nobody can have. */
    static int arenapy_open(const char *name, int flags, int mode) {
        int taken[3], n = 0, i, fd, error;
        for (i = 0; i < 3; i++)
            if (fcntl(i, F_GETFD) < 0 && (taken[n] = open("/dev/null", O_RDWR | O_CLOEXEC)) >= 0)
                n++;
        fd = arenapy_above_standard(open(name, flags | O_CLOEXEC, mode));
        error = errno;
        while (n) close(taken[--n]);
        errno = error;
        return fd;
    }
    static int arenapy_memfd_create(const char *name, unsigned flags) {
        return arenapy_above_standard((int)syscall(SYS_memfd_create, name, flags));
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
    #define ARENAPY_FILES 64            /* descriptors that are looked for in one message */
    /* What is there of a message; of the descriptors that came with it, the first `most`. */
    static ssize_t arenapy_receive(int sock, void *data, size_t nbytes, int *files, int most,
                                   int *lost) {
        union {
            struct cmsghdr head;
            char room[CMSG_SPACE((ARENAPY_FILES + 1) * sizeof(int))];
        } control;
        struct iovec part = {data, nbytes};
        struct msghdr message = {0};
        struct cmsghdr *one;
        ssize_t got;
        int k = 0;
        message.msg_iov = &part;
        message.msg_iovlen = 1;
        message.msg_control = &control;
        message.msg_controllen = sizeof control;
        got = recvmsg(sock, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
        if (got < 0) return got;
        *lost = !!(message.msg_flags & MSG_CTRUNC);
        for (one = CMSG_FIRSTHDR(&message); one; one = CMSG_NXTHDR(&message, one)) {
            size_t i, n = (one->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            if (one->cmsg_level != SOL_SOCKET || one->cmsg_type != SCM_RIGHTS) continue;
            for (i = 0; i < n; i++) {
                int fd;
                memcpy(&fd, CMSG_DATA(one) + i * sizeof fd, sizeof fd);
                if (k == most) close(fd);
                else if ((fd = arenapy_above_standard(fd)) < 0) *lost = 1;
                else files[k++] = fd;
            }
        }
        return got;
    }
    static ssize_t arenapy_send_files(int sock, int *files, int n) {
        union {
            struct cmsghdr head;
            char room[CMSG_SPACE(ARENAPY_FILES * sizeof(int))];
        } control;
        char byte = 0;
        struct iovec part = {&byte, 1};
        struct msghdr message = {0};
        struct cmsghdr *one;
        message.msg_iov = &part;
        message.msg_iovlen = 1;
        message.msg_control = &control;
        message.msg_controllen = CMSG_SPACE(n * sizeof(int));
        memset(&control, 0, sizeof control);
        one = CMSG_FIRSTHDR(&message);
        one->cmsg_level = SOL_SOCKET;
        one->cmsg_type = SCM_RIGHTS;
        one->cmsg_len = CMSG_LEN(n * sizeof(int));
        memcpy(CMSG_DATA(one), files, n * sizeof(int));
        return sendmsg(sock, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    /* PROCMAP_QUERY of Linux 6.11, see proc_pid_maps(5) and the kernel's linux/fs.h. */
    struct arenapy_procmap_query {
        uint64_t size, query_flags, query_addr;
        uint64_t vma_start, vma_end, vma_flags, vma_page_size, vma_offset, inode;
        uint32_t dev_major, dev_minor, vma_name_size, build_id_size;
        uint64_t vma_name_addr, build_id_addr;
    };
    #define ARENAPY_PROCMAP_QUERY _IOWR('f', 17, struct arenapy_procmap_query)
    #define ARENAPY_VMA_SHARED 8
    typedef struct {
        uint64_t start, end, offset, device, inode;
        int shared;
    } arenapy_area;
    /* Of the mapping that has `address`; up to `room` bytes of its name, if that is not 0. */
    static int arenapy_query_area(int maps, uint64_t address, arenapy_area *area, char *name,
                                  unsigned room) {
        struct arenapy_procmap_query query = {0};
        query.size = sizeof(query);
        query.query_addr = address;
        query.vma_name_addr = room ? (uint64_t)(uintptr_t)name : 0;
        query.vma_name_size = room;
        if (ioctl(maps, ARENAPY_PROCMAP_QUERY, &query)) return -errno;
        area->start = query.vma_start;
        area->end = query.vma_end;
        area->offset = query.vma_offset;
        area->device = (uint64_t)makedev(query.dev_major, query.dev_minor);
        area->inode = query.inode;
        area->shared = (query.vma_flags & ARENAPY_VMA_SHARED) != 0;
        if (room) name[query.vma_name_size ? query.vma_name_size - 1 : 0] = 0;
        return 0;
    }
    static int arenapy_fstat(int fd, uint64_t *device, uint64_t *inode, long long *nbytes) {
        struct stat status;
        if (fstat(fd, &status)) return -1;
        *device = (uint64_t)status.st_dev;
        *inode = (uint64_t)status.st_ino;
        *nbytes = (long long)status.st_size;
        return 0;
    }
    static long long arenapy_minor_faults(void) {
        struct rusage usage;
        getrusage(RUSAGE_SELF, &usage);
        return usage.ru_minflt;
    }
    /* -1: there is no such limit. */
    static long long arenapy_soft_limit(int kind) {
        struct rlimit limit;
        if (getrlimit(kind, &limit) || limit.rlim_cur == RLIM_INFINITY) return -1;
        return (long long)limit.rlim_cur;
    }
    /* Of files on hugetlbfs, which maps whole huge pages; 0: an ordinary file system. */
    static long long arenapy_huge_page(int fd) {
        struct statfs status;
        if (fstatfs(fd, &status)) return -1;
        return (unsigned long)status.f_type == 0x958458f6ul ? (long long)status.f_bsize : 0;
    }
    static int arenapy_is_tmpfs(int fd) {
        struct statfs status;
        if (fstatfs(fd, &status)) return -1;
        return status.f_type == 0x01021994;
    }
    static int arenapy_fallocate(int fd, long long offset, long long nbytes) {
        return fallocate(fd, 0, (off_t)offset, (off_t)nbytes);
    }
    static void arenapy_set_errno(int error) { errno = error; }
    """
    const int MAP_HUGETLB
    const int F_DUPFD_CLOEXEC, F_ADD_SEALS, F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW
    const int F_OFD_GETLK, F_OFD_SETLK, F_RDLCK, F_WRLCK, F_UNLCK
    struct flock:
        short l_type
        int64_t l_start
        int64_t l_len
        int l_pid
    int fcntl(int fd, int command, int flags)
    int c_posix_fallocate "posix_fallocate"(int fd, long long offset, long long nbytes)
    int snprintf(char* out, size_t nbytes, const char* form, int value)
    int sched_yield()
    int above_standard "arenapy_above_standard"(int fd)
    int open_above_standard "arenapy_open"(const char* name, int flags, int mode)
    int memfd_create "arenapy_memfd_create"(const char* name, unsigned flags)
    long mlock2 "arenapy_mlock2"(size_t address, size_t nbytes, int flags)
    long mbind "arenapy_mbind"(
        size_t address, size_t nbytes, int mode, const unsigned long* nodes, unsigned long bits)
    const int ARENAPY_FILES, AF_UNIX, SOCK_STREAM, SOCK_CLOEXEC
    int socketpair(int domain, int kind, int protocol, int* pair)
    ssize_t arenapy_send_files(int sock, int* files, int n)
    ssize_t arenapy_receive(int sock, void* data, size_t nbytes, int* files, int most, int* lost)
    int lock_range "arenapy_lock_range"(
        int fd, int command, int type, long long offset, long long nbytes, flock* out)
    int c_fstat "arenapy_fstat"(int fd, uint64_t* device, uint64_t* inode, long long* nbytes)
    long long c_huge_page "arenapy_huge_page"(int fd)
    int c_is_tmpfs "arenapy_is_tmpfs"(int fd)
    int c_fallocate "arenapy_fallocate"(int fd, long long offset, long long nbytes)
    long long c_minor_faults "arenapy_minor_faults"()
    long long c_soft_limit "arenapy_soft_limit"(int kind)
    int RLIMIT_AS, RLIMIT_DATA, RLIMIT_FSIZE, RLIMIT_MEMLOCK
    ctypedef struct Area "arenapy_area":
        uint64_t start, end, offset, device, inode
        bint shared
    int query_area "arenapy_query_area"(
        int maps, uint64_t address, Area* area, char* name, unsigned room)
    void set_errno "arenapy_set_errno"(int error)

cdef extern from "Python.h":
    Py_buffer* PyMemoryView_GET_BUFFER(object view)

# Files are locked here, beyond any byte of theirs. An enum would shift an int, which is undefined.
cdef long long LOCK_AT = 0x4000000000000000

# Fixed by the kernel's interface.
cdef enum:
    HUGE_SHIFT = 26                  # where MAP_HUGETLB and MFD_HUGETLB want log2 of the page size
    MFD_CLOEXEC = 1
    MFD_ALLOW_SEALING = 2
    MFD_HUGETLB = 4
    MPOL_BIND = 2
    MLOCK_ONFAULT = 1
    NAME_BYTES = 4096                # of a mapping's name, which is a path at most
    RESERVE_SLICE = 64 << 20         # of a file, after which a signal is looked at
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
               bint writable=True, size_t align=0, bint guard=False, size_t page_size=0,
               bint accessible=True):
    """Map `nbytes` (rounded up to pages): anonymous memory, or a file's bytes from `offset`.

    Address space is reserved first, aligned, and then mapped over; the first and last page stay
    ``PROT_NONE`` if `guard`. A `page_size` above the base page's asks for hugetlbfs pages, which
    the kernel reserves now (never ``MAP_NORESERVE``), or, with `fd`, says that this is what the
    file is made of. If not `accessible`, all of it stays ``PROT_NONE``: see `protect`.

    Returns
    -------
    Mapping
        The owner of what is mapped.
    """
    cdef Mapping mapping = Mapping.__new__(Mapping)      # before there is anything to own
    cdef size_t page = max(page_size, BASE_PAGE)
    cdef size_t margin = BASE_PAGE if guard else 0
    cdef size_t address = 0
    cdef int protection = PROT_READ | (PROT_WRITE if writable else 0) if accessible else PROT_NONE
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
    mapping.own(address, nbytes, margin)
    return mapping


cdef int vm_unmap(size_t address, size_t nbytes) noexcept nogil:
    return -errno if munmap(<void*>address, nbytes) else 0


cdef bint vm_is_mapped(size_t address, size_t nbytes) noexcept nogil:
    cdef size_t start = address & ~(BASE_PAGE - 1)
    # It only looks for gaps (msync(2): MS_ASYNC does nothing since Linux 2.6.19).
    return msync(<void*>start, address + nbytes - start, MS_ASYNC) == 0


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


@cython.final
cdef class Descriptor:
    """A file descriptor, and its owner: it is closed when this object goes. Internal.

    For descriptors what `Mapping` is for mapped ranges: who opens one gets its owner, and a Region
    takes it over in C.
    """

    def __cinit__(self):
        self.file.fd = -1

    cdef int own(self, int fd) except -1:
        cdef int rc = vm_identify(fd, &self.file)
        if rc < 0:
            close(fd)
            raise OSError(-rc, os.strerror(-rc))
        return 0

    cdef void take(self, OpenFile* file) noexcept:
        file[0] = self.file
        self.file.fd = -1

    cdef void end(self) noexcept:
        cdef OpenFile file
        self.take(&file)
        if file.fd >= 0 and not arenapy_finalizing():
            with nogil:
                vm_close(&file)

    @property
    def made(self):
        """Did this process make the file? A child that is forked meanwhile did not."""
        return self.new and self.process == getpid()

    def fileno(self):
        """Its number, which is this object's; -1 if it owns none."""
        return self.file.fd

    def close(self):
        """Close it now, if it is still its own. Done again, it does nothing."""
        self.end()

    def __enter__(self):
        return self

    def __exit__(self, *_details):
        self.end()

    def __dealloc__(self):
        self.end()


seal(Descriptor)


def soft_limit(str kind):
    """What `resource.getrlimit` says of "RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_FSIZE" or
    "RLIMIT_MEMLOCK"; None: no limit.

    Without `resource`: a program under ``arenapy run`` may have a module of that name.
    """
    cdef long long found = c_soft_limit({
        "RLIMIT_AS": RLIMIT_AS, "RLIMIT_DATA": RLIMIT_DATA,
        "RLIMIT_FSIZE": RLIMIT_FSIZE, "RLIMIT_MEMLOCK": RLIMIT_MEMLOCK,
    }[kind])
    return None if found < 0 else found


def open_file(path, int flags, int mode=0o666, list opened=None):
    """`os.open` that returns the owner of the descriptor, which is none of 0, 1 and 2.

    The owner is in `opened` before it owns anything: so a caller whom a signal's exception keeps
    from the result knows of a file that was made.
    """
    cdef Descriptor file = Descriptor.__new__(Descriptor)      # before there is anything to own
    cdef bytes encoded = os.fsencode(path)
    cdef char* name
    cdef int fd
    PyBytes_AsStringAndSize(encoded, &name, NULL)        # ValueError for a NUL in it
    sys.audit("open", path, None, flags)
    if opened is not None:
        opened.append(file)
    with nogil:
        fd = open_above_standard(name, flags, mode)
    while fd < 0 and errno == EINTR:
        PyErr_CheckSignals()
        with nogil:
            fd = open_above_standard(name, flags, mode)
    if fd < 0:
        PyErr_SetFromErrnoWithFilenameObject(OSError, os.fspath(path))
    file.process, file.new = getpid(), flags & O_CREAT and flags & O_EXCL
    file.own(fd)
    return file


def duplicate_socket(int sock):
    """A socket object of its own, of Python's basic type, over an open socket.

    Raises
    ------
    OSError
        If it is not a socket, or no descriptor is free.
    """
    from socket import SocketType
    cdef int fd = fcntl(sock, F_DUPFD_CLOEXEC, 3)        # not a standard file's number
    if fd < 0:
        fail()
    try:
        return SocketType(-1, -1, -1, fd)    # in C: no signal's exception before it owns fd
    except BaseException:
        close(fd)
        raise


def receive(int sock, size_t nbytes):
    """Bytes that a socket has, at most so many, and the owner of the descriptor with them.

    Does not wait. The third is True if a descriptor was lost, for which there was no room.
    """
    cdef Descriptor file = Descriptor.__new__(Descriptor)      # before there is anything to own
    cdef bytearray data = bytearray(nbytes)
    cdef char* at = data
    cdef int fd = -1, lost = 0
    cdef Py_ssize_t got
    with nogil:
        got = arenapy_receive(sock, at, nbytes, &fd, 1, &lost)
    while got < 0 and errno == EINTR:
        PyErr_CheckSignals()
        with nogil:
            got = arenapy_receive(sock, at, nbytes, &fd, 1, &lost)
    if got < 0:
        fail()
    if fd >= 0:
        file.own(fd)
    return bytes(data[:got]), file, bool(lost)


def bundle(list files not None):
    """One descriptor that has others with it, for `unbundled`: a socket with them on their way.

    They are there as long as somebody has it, and gone with it if nobody takes them out.

    Parameters
    ----------
    files : list of Descriptor
        They may be closed afterwards.

    Raises
    ------
    OSError
        ``ETOOMANYREFS`` or ``EMFILE`` if the process has no room for so many, ``EAGAIN`` if the
        socket has none.
    """
    cdef Descriptor ours = Descriptor.__new__(Descriptor)      # before there is anything to own
    cdef Descriptor theirs = Descriptor.__new__(Descriptor)
    cdef int pair[2]
    cdef int numbers[64]
    cdef int n = 0
    cdef Py_ssize_t first
    if socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair):
        fail()
    for n in range(2):
        pair[n] = above_standard(pair[n])
        if pair[n] < 0:
            close(pair[1 - n])
            fail()
    try:
        theirs.own(pair[1])
    except BaseException:
        close(pair[0])
        raise
    ours.own(pair[0])
    for first in range(0, len(files), ARENAPY_FILES):
        n = 0
        for file in files[first : first + ARENAPY_FILES]:
            numbers[n] = (<Descriptor?>file).file.fd
            n += 1
        while arenapy_send_files(pair[0], numbers, n) < 0:
            if errno != EINTR:
                fail()
            PyErr_CheckSignals()
    ours.close()
    return theirs


def unbundled(int sock):
    """The descriptors in a `bundle`. Does not wait, whatever the descriptor is.

    Returns
    -------
    list of Descriptor
        Fewer, if it was no bundle, or the process has no descriptor free.
    """
    cdef list made = []
    cdef int numbers[64]
    cdef int i, lost = 0
    cdef char byte
    cdef Py_ssize_t got = 1
    while got > 0:
        parts = [Descriptor.__new__(Descriptor) for _ in range(ARENAPY_FILES)]
        for i in range(ARENAPY_FILES):
            numbers[i] = -1
        got = arenapy_receive(sock, &byte, 1, numbers, ARENAPY_FILES, &lost)
        for i in range(ARENAPY_FILES):
            if numbers[i] >= 0 and vm_identify(numbers[i], &(<Descriptor>parts[i]).file) < 0:
                close(numbers[i])
        if got < 0 and errno == EINTR:
            PyErr_CheckSignals()
            got = 1
            continue
        found = [one for one in parts if (<Descriptor>one).file.fd >= 0]
        if not found:                        # no bundle: others may write into it without end
            break
        made += found
    return made


def memfd(bytes name not None, size_t nbytes, size_t page_size=0):
    """A descriptor of `nbytes` of anonymous shared memory whose size is sealed for good."""
    cdef Descriptor file = Descriptor.__new__(Descriptor)      # before there is anything to own
    cdef unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING
    cdef const char* c_name = name
    cdef int fd, rc
    if page_size > BASE_PAGE:
        flags |= MFD_HUGETLB | <unsigned>size_bits(page_size)
    with nogil:
        fd = memfd_create(c_name, flags)
    if fd < 0:
        fail()
    file.process = getpid()
    file.own(fd)
    with nogil:
        rc = ftruncate(fd, nbytes)
        while rc and errno == EINTR:
            rc = ftruncate(fd, nbytes)
        if not rc:
            rc = fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
    if rc:
        fail()
    return file


# ---- what is mapped where --------------------------------------------------------------------

def areas(size_t address, size_t nbytes):
    """The mappings that a range of addresses lies in, as far as they lie in it.

    Asked by an ioctl that costs microseconds; a kernel before 6.11 is asked for all mappings.

    Returns
    -------
    list of tuple[bool, int, int, int, int, bytes]
        In order: whether forked children and other processes see what is written to it
        (``MAP_SHARED``); device and inode of the file, 0 if there is none; the part's first byte
        there and its size; and the file's path as the kernel has it.

    Raises
    ------
    OSError
        If there is no /proc.
    """
    cdef int maps = c_open("/proc/self/maps", O_RDONLY | O_CLOEXEC)
    cdef size_t end = address + nbytes
    cdef size_t at = address, stop
    cdef Area area
    cdef char name[NAME_BYTES]
    cdef int rc = 0
    while maps < 0 and errno == EINTR:
        PyErr_CheckSignals()
        maps = c_open("/proc/self/maps", O_RDONLY | O_CLOEXEC)
    if maps < 0:
        fail()
    found = []
    try:
        while at < end:
            name[0] = 0
            rc = query_area(maps, at, &area, name, 0)
            if rc == 0 and (area.device or area.inode):
                rc = query_area(maps, at, &area, name, NAME_BYTES)
                if rc == -ENAMETOOLONG:
                    rc = 0
            if rc:
                break
            stop = min(end, <size_t>area.end)
            found.append((
                area.shared, area.device, area.inode, area.offset + (at - area.start), stop - at,
                <bytes>name,
            ))
            at = stop
    finally:
        close(maps)
    return found if at >= end else read_areas(address, nbytes)


def read_areas(size_t address, size_t nbytes, path="/proc/self/maps"):
    """`areas` as the text of /proc/self/maps says."""
    cdef size_t start, end
    found = []
    with open(path, "rb") as lines:
        for line in lines:
            words = line.split(None, 5)
            first, _, last = words[0].partition(b"-")
            start, end = max(int(first, 16), address), min(int(last, 16), address + nbytes)
            if start < end:
                major, _, minor = words[3].partition(b":")
                device, inode = os.makedev(int(major, 16), int(minor, 16)), int(words[4])
                found.append((
                    words[1][3:4] == b"s", device, inode,
                    int(words[2], 16) + start - int(first, 16), end - start,
                    words[5].rstrip(b"\n") if (device or inode) and len(words) > 5 else b"",
                ))
    return found


def address_of(view not None: memoryview):
    """The address of a memoryview's first byte."""
    return <size_t>PyMemoryView_GET_BUFFER(view).buf


cdef long long vm_minor_faults() noexcept nogil:
    return c_minor_faults()


def minor_faults():
    """Page faults of this process so far, of all its threads, that needed no disk."""
    return c_minor_faults()


# ---- open files ----------------------------------------------------------------------------


cdef int vm_identify(int fd, OpenFile* file) noexcept nogil:
    cdef long long nbytes
    if c_fstat(fd, &file.device, &file.inode, &nbytes):
        return -errno
    file.fd = fd
    return 0


cdef long long vm_file_nbytes(OpenFile* file) noexcept nogil:
    cdef uint64_t device, inode
    cdef long long nbytes
    if c_fstat(file.fd, &device, &inode, &nbytes):
        return -errno
    return nbytes if device == file.device and inode == file.inode else -EBADF


cdef bint vm_is_open(OpenFile* file) noexcept nogil:
    return file.fd >= 0 and vm_file_nbytes(file) >= 0


cdef void vm_close(OpenFile* file) noexcept nogil:
    # Where the file cannot be asked (on NFS, say), it hardly is another one.
    if file.fd >= 0 and vm_file_nbytes(file) != -EBADF:
        close(file.fd)
    file.fd = -1


def identity(Descriptor file not None):
    """The device and inode of the file that it was opened for."""
    return file.file.device, file.file.inode


def huge_page(int fd):
    """The page size of the hugetlbfs that a file is on; 0: it is on another file system."""
    cdef long long nbytes = c_huge_page(fd)
    if nbytes < 0:
        fail()
    return nbytes


def is_tmpfs(int fd):
    """True if a file is on tmpfs, where reading a hole takes a page of memory."""
    cdef int answer = c_is_tmpfs(fd)
    if answer < 0:
        fail()
    return answer != 0


def reserve_blocks(int fd, long long nbytes):
    """Reserve the first bytes of a file on disk, which keeps what it has: ``fallocate(2)``.

    Not posix_fallocate: where a file system cannot, that writes to each block of the file.
    """
    cdef long long at = 0
    cdef int rc
    while at < nbytes:
        with nogil:
            rc = c_fallocate(fd, at, min(nbytes - at, <long long>RESERVE_SLICE))
        if rc == 0:
            at += RESERVE_SLICE
        elif errno == EINTR:
            PyErr_CheckSignals()
        else:
            fail()


@cython.final
cdef class Renewal:
    """A file that is to be emptied, and undone if that does not come about. Internal.

    A context: what `reserve` does, it undoes unless `renew` follows. It has a descriptor of its
    own, since a region may take the other one and be gone. In C, so that a signal's exception
    strikes before or after.
    """

    cdef OpenFile file
    cdef long long before                # bytes; -1: nothing is to be undone
    cdef pid_t process                   # which opened it; its children change nothing

    def __cinit__(self):
        self.file.fd = -1
        self.before = -1

    def __enter__(self):
        return self

    def reserve(self, long long nbytes):
        """Make the file as large as that, on disk, with what it has."""
        cdef long long before = file_nbytes(self.file.fd)
        cdef long long limit = c_soft_limit(RLIMIT_FSIZE)
        cdef int rc = EINTR
        if 0 <= limit < nbytes:              # the kernel asks only where the file grows
            checked(-EFBIG)
        self.before = before
        while rc == EINTR:
            PyErr_CheckSignals()
            with nogil:
                rc = c_posix_fallocate(self.file.fd, 0, nbytes)
        checked(-rc)

    def renew(self, long long nbytes):
        """Empty the file, and make it as large as that again. To be the last that may fail."""
        cdef int rc = EINTR if self.before > 0 else 0
        PyErr_CheckSignals()                 # and none from here on
        if self.process != getpid():
            raise ValueError(
                "this process was forked while its parent mapped a file with mode='w+', which only "
                "the parent may empty; map it anew"
            )
        with nogil:
            while rc == EINTR:
                rc = errno if ftruncate(self.file.fd, 0) else 0
            if self.before > 0 and rc == 0:
                rc = EINTR
            while rc == EINTR:
                rc = c_posix_fallocate(self.file.fd, 0, nbytes)
        checked(-rc)
        self.before = -1

    def __exit__(self, *_details):
        if self.before >= 0 and self.process == getpid():
            with nogil:
                ftruncate(self.file.fd, self.before)
            self.before = -1
        vm_close(&self.file)

    def __dealloc__(self):
        vm_close(&self.file)


seal(Renewal)


def renewal(Descriptor file not None):
    """A new `Renewal` of an open file."""
    cdef Renewal self = Renewal.__new__(Renewal)       # before there is anything to own
    cdef int fd = fcntl(file.file.fd, F_DUPFD_CLOEXEC, 3)
    if fd < 0:
        fail()
    self.file = file.file
    self.file.fd = fd
    self.process = file.process
    return self


def lock_file(int fd, bint exclusive):
    """Lock an open file against other processes that do so, as long as it is open or mapped.

    One byte is locked, far beyond any of the file's, through the open file description: a forked
    child shares the lock together with the mapping. A program's lock on bytes of the file does not
    conflict with it. A program's lock on everything up to the end of any file does (``lockf``
    without a length), and then there is no lock of ours: whoever maps the file without one is not
    seen by the next process.

    Returns
    -------
    bool
        False if there is a lock, anybody's, that does not go together with this one. True also
        where the file system has no such locks.
    """
    cdef int kind = F_WRLCK if exclusive else F_RDLCK
    while lock_range(fd, F_OFD_SETLK, kind, LOCK_AT, 1, NULL):
        if errno != EINTR:
            return errno != EAGAIN and errno != EACCES
        PyErr_CheckSignals()
    return True


def foreign_lock(int fd, bint exclusive):
    """Whose lock `lock_file` meets, if not one of its own kind.

    Returns
    -------
    int or None
        The process; -1 if the lock is one of an open file description, which has no process. None:
        it is a lock of `lock_file`, or there is none any more.
    """
    cdef flock found
    cdef int kind = F_WRLCK if exclusive else F_RDLCK
    if lock_range(fd, F_OFD_GETLK, kind, LOCK_AT, 1, &found) or found.l_type == F_UNLCK:
        return None
    return None if found.l_start == LOCK_AT and found.l_len == 1 else found.l_pid


def file_nbytes(int fd):
    """The size of an open file now."""
    cdef uint64_t device, inode
    cdef long long nbytes
    cdef int rc
    with nogil:
        rc = c_fstat(fd, &device, &inode, &nbytes)
    if rc:
        fail()
    return nbytes


# ---- leases --------------------------------------------------------------------------------
#
# A byte-range lock of an open file description (OFD) says that somebody still sees these bytes. The
# kernel drops it with the last reference to that description, also when a process is killed: no
# protocol, nothing to clean up. Descriptors are such references, and so are mappings. Each process
# that sees them maps the description, so that the lock lasts when descriptors are closed.

cdef int reopened(int fd) noexcept nogil:
    cdef char path[32]
    cdef int new
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd)
    new = open_above_standard(path, O_RDWR, 0)
    while new < 0 and errno == EINTR:
        new = open_above_standard(path, O_RDWR, 0)
    return new if new >= 0 else -errno


cdef int vm_reopen(OpenFile* file) noexcept nogil:
    cdef OpenFile new
    cdef int fd
    if not vm_is_open(file):                   # to open another one may block, or do what it does
        return -EBADF
    fd = reopened(file.fd)
    if fd >= 0 and (vm_identify(fd, &new) or new.device != file.device
                    or new.inode != file.inode):
        close(fd)
        return -EBADF
    return fd


cdef int vm_lease_file(OpenFile* file) noexcept nogil:
    cdef int fd = memfd_create("arenapy leases", MFD_CLOEXEC)
    cdef int rc = -errno if fd < 0 else vm_identify(fd, file)
    if rc < 0 <= fd:
        close(fd)
    return rc


cdef void* vm_keep_leases(int fd, size_t page_size) noexcept nogil:
    cdef void* at = mmap(
        NULL, max(page_size, BASE_PAGE), PROT_NONE, MAP_SHARED | MAP_NORESERVE, fd, 0)
    return NULL if at == MAP_FAILED else at


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
    """A new Descriptor of the same file with an open file description of its own, read-write."""
    cdef Descriptor file = Descriptor.__new__(Descriptor)      # before there is anything to own
    cdef int new = reopened(fd)
    if new < 0:
        raise OSError(-new, os.strerror(-new), f"/proc/self/fd/{fd}")
    file.own(new)
    return file


def lease(int fd, long long offset, long long nbytes):
    """Mark bytes of a file as in use until nobody has this open file description."""
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
