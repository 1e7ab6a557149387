# cython: language_level=3, freethreading_compatible=True
"""Filling pages before they are needed, and asking the kernel which ones it gave.

MADV_POPULATE_WRITE reports as an errno what a touch would turn into a SIGBUS, and makes the kernel
fill a range without returning to user space for each page. It is called for slices that threads
pull from a counter, so that a signal is noticed soon and no thread waits long for another.

What may not live here: mappings (`vm`) and policy (`source.py`).

Thread-safety: every function may be called from any thread; the GIL is released in system calls.
"""

import os
from os import sched_getaffinity

from arenapy.base.system_errors import is_of_system

from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport EAGAIN, EINTR, EINVAL, errno
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memset
from posix.fcntl cimport O_CLOEXEC, O_RDONLY, open as c_open
from posix.mman cimport madvise
from posix.unistd cimport close

from arenapy.base.atomic cimport arenapy_add, arenapy_cas, arenapy_load, arenapy_store

cdef extern from * nogil:
    """
    #include <pthread.h>
    #include <sched.h>
    #include <signal.h>
    #include <stdint.h>
    #include <sys/ioctl.h>
    #include <sys/mman.h>
    #include <time.h>

    #ifndef MADV_POPULATE_READ          /* Linux 5.14 */
    #define MADV_POPULATE_READ 22
    #define MADV_POPULATE_WRITE 23
    #endif

    /* PAGEMAP_SCAN, Linux 6.7: the layout and number of <linux/fs.h>. */
    struct arenapy_extent { uint64_t start, end, categories; };
    struct arenapy_scan {
        uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
        uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
    };
    static int arenapy_scan_pages(int fd, struct arenapy_scan *scan) {
        return ioctl(fd, _IOWR('f', 16, struct arenapy_scan), scan);
    }
    /* Write to a page without changing it, even while others write: exchange a byte for itself. A
       read and a write back would lose a store in between. */
    static void arenapy_touch_write(volatile unsigned char *p) {
        unsigned char value = __atomic_load_n(p, __ATOMIC_RELAXED);
        while (!__atomic_compare_exchange_n(p, &value, value, 0,
                                            __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    }
    static void arenapy_touch_read(volatile unsigned char *p) { (void)*p; }
    static long long arenapy_now_ns(void) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return t.tv_sec * 1000000000LL + t.tv_nsec;
    }
    """
    const int MADV_POPULATE_READ, MADV_POPULATE_WRITE, SIG_SETMASK
    struct Extent "arenapy_extent":
        uint64_t start, end
    struct Scan "arenapy_scan":
        uint64_t size, start, end, walk_end, vec, vec_len
        uint64_t category_inverted, category_mask, return_mask
    ctypedef unsigned long pthread_t
    ctypedef struct sigset_t:
        pass
    int sched_yield()
    int sigfillset(sigset_t* signals)
    int pthread_sigmask(int how, const sigset_t* new, sigset_t* old)
    int pthread_create(pthread_t* thread, const void* attributes,
                       void* (*work)(void*) noexcept nogil, void* argument)
    int pthread_join(pthread_t thread, void** result)
    int scan_pages "arenapy_scan_pages"(int fd, Scan* scan)
    void touch_write "arenapy_touch_write"(unsigned char* p)
    void touch_read "arenapy_touch_read"(unsigned char* p)
    long long now_ns "arenapy_now_ns"()

cdef enum:
    HUGE_PAGE = 2 << 20              # slices are whole multiples of it
    SLICE_MAX = 64 << 20             # bytes between two looks at the stop flag
    SLICES_PER_THREAD = 4            # so that a slow thread leaves the others little to wait for
    THREADS_MAX = 64
    THREADS_DEFAULT = 8
    SIGNAL_CHECK_NS = 50_000_000     # taking the GIL more often would wait for busy threads
    EXTENTS = 64                     # found by one PAGEMAP_SCAN
    # The kernel's, for PAGEMAP_SCAN.
    PAGE_IS_PRESENT = 1 << 3
    PAGE_IS_PFNZERO = 1 << 5
    PAGE_IS_HUGE = 1 << 6

cdef size_t BASE_PAGE = os.sysconf("SC_PAGESIZE")
cdef uint64_t NO_SLICE = <uint64_t>-1


cdef struct Job:
    size_t address
    size_t nbytes
    size_t slice_nbytes
    int writable
    # Atomic, shared by the threads.
    uint64_t next                    # offset of the next slice that nobody has taken
    uint64_t stop                    # somebody failed or was interrupted: take no more
    uint64_t error                   # the errno of a failure, or 0

# A test can make populating fail: this errno, this many times (no limit if negative).
cdef int injected_errno = 0
cdef uint64_t injected_count = 0


cdef bint injected() noexcept nogil:
    """True if a test wants this slice to fail."""
    cdef uint64_t n
    if not injected_errno:
        return False
    n = arenapy_load(&injected_count)
    while 0 < <int64_t>n and not arenapy_cas(&injected_count, &n, n - 1):
        pass
    return n != 0


cdef int vm_populate(size_t address, size_t nbytes, bint writable) noexcept nogil:
    cdef size_t page = address
    cdef size_t end = address + nbytes
    cdef int error
    if injected():
        error = injected_errno
        if error != EINVAL:    # of a failure, pages may remain
            madvise(<void*>address, BASE_PAGE, MADV_POPULATE_WRITE)
    elif madvise(<void*>address, nbytes,
                 MADV_POPULATE_WRITE if writable else MADV_POPULATE_READ) == 0:
        return 0
    else:
        error = errno
    if error != EINVAL:
        return -error
    while page < end:          # a kernel before 5.14
        if writable:
            touch_write(<unsigned char*>page)
        else:
            touch_read(<unsigned char*>page)
        page += BASE_PAGE
    return 0


cdef bint step(Job* job, uint64_t* mine) noexcept nogil:
    """Populate this thread's slice, or the next one; False once there is nothing left to do."""
    cdef int rc
    if arenapy_load(&job.stop):
        return False
    if mine[0] == NO_SLICE:
        mine[0] = arenapy_add(&job.next, job.slice_nbytes)
        if mine[0] >= job.nbytes:
            return False
    rc = vm_populate(
        job.address + mine[0], min(job.slice_nbytes, job.nbytes - mine[0]), job.writable)
    if rc == -EINTR or rc == -EAGAIN:
        sched_yield()
        return True
    if rc:
        arenapy_store(&job.error, -rc)
        arenapy_store(&job.stop, 1)
        return False
    mine[0] = NO_SLICE
    return True


cdef void* work(void* argument) noexcept nogil:
    cdef uint64_t mine = NO_SLICE
    while step(<Job*>argument, &mine):
        pass
    return NULL


def prefault(size_t address, size_t nbytes, *, bint writable=True, int threads=0,
             size_t slice_nbytes=0):
    """Fault in every page of a range, contents unchanged, with the calling thread and helpers.

    Parameters
    ----------
    writable : bool
        Whether the range may be written to; if not, pages are faulted in for reading.
    threads : int
        How many threads; 0: the CPUs of this thread's affinity, at most 8, and at most one for
        each half slice.
    slice_nbytes : int
        Bytes populated by one system call; 0: up to 64 MiB.

    Raises
    ------
    OSError
        ``ENOMEM``, ``EFAULT`` (hugetlbfs pages ran out; a page behind the file's end) or
        ``EHWPOISON``. Some pages may be there.
    KeyboardInterrupt
        Or whatever a signal handler raises, after all threads have stopped.
    """
    cdef Job job
    cdef pthread_t helpers[THREADS_MAX]
    cdef int n_helpers = 0
    cdef uint64_t mine = NO_SLICE
    cdef size_t share
    cdef bint more = True
    cdef long long deadline
    cdef sigset_t everything, before
    nbytes = (nbytes + BASE_PAGE - 1) & ~(BASE_PAGE - 1)
    if threads <= 0:
        threads = min(len(sched_getaffinity(0)), THREADS_DEFAULT)
        threads = <int>min(<size_t>threads, nbytes // (SLICE_MAX // 2))
    threads = min(max(threads, 1), THREADS_MAX)
    if slice_nbytes == 0:
        share = <size_t>threads * SLICES_PER_THREAD * HUGE_PAGE
        slice_nbytes = min((nbytes + share - 1) // share * HUGE_PAGE, <size_t>SLICE_MAX)
    job.address, job.nbytes, job.slice_nbytes = address, nbytes, slice_nbytes
    job.next, job.writable, job.stop, job.error = 0, writable, 0, 0
    try:
        if threads > 1:
            with nogil:
                # Signals are for Python's threads; a helper would only delay their handling.
                sigfillset(&everything)
                pthread_sigmask(SIG_SETMASK, &everything, &before)
                # No thread to be had: fewer helpers, same result.
                while n_helpers < threads - 1 and not pthread_create(
                        &helpers[n_helpers], NULL, work, &job):
                    n_helpers += 1
                pthread_sigmask(SIG_SETMASK, &before, NULL)
        while more:
            with nogil:
                deadline = now_ns() + SIGNAL_CHECK_NS
                more = step(&job, &mine)
                while more and now_ns() < deadline:
                    more = step(&job, &mine)
            PyErr_CheckSignals()
    except BaseException:
        arenapy_store(&job.stop, 1)
        raise
    finally:
        with nogil:
            while n_helpers:
                n_helpers -= 1
                pthread_join(helpers[n_helpers], NULL)
    if job.error:
        raise OSError(job.error, os.strerror(job.error))


def inject_populate_error(int error, int count=-1):
    """For tests: the next `count` slices (all, if negative) fail with `error`; 0 ends it."""
    global injected_errno, injected_count
    injected_errno, injected_count = error, <uint64_t><int64_t>count


cdef int64_t scanned_huge_bytes(size_t address, size_t nbytes) noexcept nogil:
    """Bytes in huge pages by PAGEMAP_SCAN, or -errno."""
    cdef Extent extents[EXTENTS]
    cdef Scan scan
    cdef int64_t total = 0
    cdef int found, i, fd
    cdef size_t end = (address + nbytes + BASE_PAGE - 1) & ~(BASE_PAGE - 1)
    fd = c_open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC)
    if fd < 0:
        return -errno
    address &= ~(BASE_PAGE - 1)
    while address < end:
        memset(&scan, 0, sizeof(Scan))
        scan.size, scan.start, scan.end = sizeof(Scan), address, end
        scan.vec, scan.vec_len, scan.return_mask = <uint64_t>extents, EXTENTS, PAGE_IS_HUGE
        # Present, huge, and not the shared zero page: what reading untouched memory maps.
        scan.category_mask = PAGE_IS_PRESENT | PAGE_IS_HUGE | PAGE_IS_PFNZERO
        scan.category_inverted = PAGE_IS_PFNZERO
        found = scan_pages(fd, &scan)
        if found < 0:
            if errno == EINTR:
                continue
            total = -errno
            break
        for i in range(found):
            total += <int64_t>(extents[i].end - extents[i].start)
        address = scan.walk_end
    close(fd)
    return total


def smaps_huge_bytes(size_t address, size_t nbytes, path="/proc/self/smaps"):
    """`huge_bytes` from smaps.

    None where a mapping that reaches beyond the range is huge in part: smaps does not say which.
    """
    cdef size_t end = address + nbytes
    total = 0
    overlap = size = huge = 0
    with open(path, "rb") as lines:
        for line in lines:
            words = line.split(None, 5)
            if not words[0].endswith(b":"):          # the first line of a mapping
                start, stop = (int(word, 16) for word in words[0].split(b"-"))
                size, huge = stop - start, 0
                overlap = min(end, stop) - max(address, start)
            elif overlap <= 0:
                continue
            elif words[0] in (b"AnonHugePages:", b"ShmemPmdMapped:", b"FilePmdMapped:",
                              b"Shared_Hugetlb:", b"Private_Hugetlb:"):
                huge += int(words[1]) << 10
            elif words[0] == b"VmFlags:":            # the last line of a mapping
                if overlap < size and 0 < huge < size:
                    return None
                total += min(huge, overlap)
    return total


def huge_bytes(size_t address, size_t nbytes):
    """Bytes of a range that the kernel has backed by huge pages, or None if it does not say."""
    cdef int64_t found
    with nogil:
        found = scanned_huge_bytes(address, nbytes)
    if found >= 0:
        return found
    try:
        return smaps_huge_bytes(address, nbytes)
    except OSError as error:
        if not is_of_system(error):
            raise
        return None


def can_populate():
    """True if the kernel has ``MADV_POPULATE_WRITE``."""
    # Of nothing at all, which any kernel does that knows the advice.
    return madvise(NULL, 0, MADV_POPULATE_WRITE) == 0


def can_scan_pages():
    """True if the kernel has ``PAGEMAP_SCAN``, without which `huge_bytes` reads smaps."""
    return scanned_huge_bytes(<size_t>&BASE_PAGE, 1) >= 0
