"""What a call may fail with: `ERRORS`; what is documented to come of it: `TABLE`; and which calls
cannot fail: `CANNOT_FAIL`.
"""

import errno

from injection import ANY, FINE, Row

NO_MEMORY = "ENOMEM|ENOMEM, lasting"
AGAIN = "EINTR|EAGAIN"

EHWPOISON = 133
#: In ERRORS: from that call on all of them fail, as they do once memory is used up.
LASTS = "ENOMEM, lasting"
POPULATE = ("ENOMEM", LASTS, "EHWPOISON", "EINVAL", "EINTR", "EAGAIN")

#: What a call may fail with, as its manual page says.
ERRORS = {
    "mmap": ("ENOMEM", LASTS, "EACCES"),
    "munmap": ("ENOMEM", LASTS),
    "mprotect": ("ENOMEM", LASTS, "EACCES"),
    "madvise(DONTNEED)": ("ENOMEM", "EINVAL", "EAGAIN"),
    "madvise(DONTNEED_LOCKED)": ("EAGAIN", "EINVAL"),
    "madvise(REMOVE)": ("ENOMEM", "EINVAL", "EACCES", "EAGAIN"),
    "madvise(DONTFORK)": ("ENOMEM", "EAGAIN"),
    "madvise(HUGEPAGE)": ("ENOMEM", "EINVAL", "EAGAIN"),
    "madvise(WIPEONFORK)": ("ENOMEM", "EINVAL"),
    "madvise(POPULATE_READ)": POPULATE,
    "madvise(POPULATE_WRITE)": POPULATE,
    "mlock2": ("ENOMEM", "EPERM", "EAGAIN", "ENOSYS"),
    "munlock": ("ENOMEM",),
    "mbind": ("ENOMEM", "EPERM", "EINVAL", "ENOSYS"),
    "membarrier": ("EPERM", "ENOSYS"),
    "memfd_create": ("ENOMEM", "EMFILE", "ENFILE", "ENOSYS"),
    "ftruncate": ("ENOMEM", "EFBIG", "EINTR"),
    "fcntl(ADD_SEALS)": ("EPERM", "EBUSY"),
    "fcntl(GETFD)": ("EBADF",),
    "fcntl(DUPFD_CLOEXEC)": ("EMFILE",),
    "fcntl(OFD_GETLK)": ("EINVAL", "EINTR"),
    "fcntl(OFD_SETLK)": ("ENOLCK", "EINTR"),
    "open": ("EMFILE", "ENOENT", "EINTR"),
    "fstat": ("EIO",),
    "fstatfs": ("EIO",),
    "fallocate": ("ENOSPC", "EOPNOTSUPP", "EINTR"),
    "ioctl": ("ENOTTY", "EINVAL", "EINTR"),
    "pread": ("EIO", "EINTR"),
    "recvmsg": ("ECONNRESET", "EINTR"),
    "sendmsg": ("ETOOMANYREFS", "EAGAIN", "EINTR"),
    "socketpair": ("EMFILE",),
    "posix_fallocate": ("ENOSPC", "EOPNOTSUPP", "EINTR"),
    "pwrite": ("ENOSPC", "EIO"),
    "write": ("ENOSPC", "EIO", "EINTR"),
    "malloc": ("ENOMEM", LASTS),
    "calloc": ("ENOMEM", LASTS),
    "realloc": ("ENOMEM", LASTS),
    "strdup": ("ENOMEM", LASTS),
    "posix_memalign": ("ENOMEM", LASTS),
    "pthread_create": ("EAGAIN",),
    "pthread_key_create": ("EAGAIN", "ENOMEM"),
    "pthread_setspecific": ("ENOMEM",),
    "__register_atfork": ("ENOMEM",),
    "os.stat": ("EACCES",),
    "os.fstat": ("EIO",),
    "os.pwrite": ("EIO",),
    "os.dup": ("EMFILE",),
    "open()": ("EMFILE", "EACCES"),
}


#: What our modules import of the C library beside what is failed, and why it is not.
CANNOT_FAIL = {
    "it computes, or looks at memory": (
        *(
            "memcmp",
            "memcpy",
            "memmove",
            "memrchr",
            "memset",
            "strchr",
            "strlen",
            "strncmp",
            "strncpy",
        ),
        *("memchr", "strcmp", "strrchr", "stderr"),
        *("__errno_location", "__tls_get_addr", "sigfillset", "pthread_self"),
        *("sscanf", "snprintf", "vsnprintf", "__stack_chk_fail"),
    ),
    "it has no error": ("free", "getpid", "sched_yield", "pthread_once"),
    "it fails for arguments only that we never give": (
        *(
            "clock_gettime",
            "getrlimit64",
            "getrusage",
            "sysconf",
            "pthread_join",
            "pthread_sigmask",
        ),
        "pthread_detach",
        *("lseek64", "pthread_mutex_lock", "pthread_mutex_unlock"),
    ),
    "a wait that ends early is begun again, or was a courtesy": ("nanosleep", "usleep"),
    "the descriptor is closed whatever it says, and its lock goes with it": ("close", "flock"),
    "it does not return": ("__assert_fail",),
    "that it fails is the answer: there is a gap, another malloc, no torch, or no /proc": (
        *("msync", "dlopen", "dlsym", "dladdr1", "stat64"),
    ),
    "a message to stderr, of what is wrong anyway": ("fprintf",),
}


def number(name):
    """Of an error; with no name, none."""
    if name is None:
        return 0
    name = name.partition(",")[0]
    return EHWPOISON if name == "EHWPOISON" else getattr(errno, name)


def row(operations, calls, errors, *outcomes):
    return Row(operations, calls, errors, outcomes)


NO_ADDRESSES = "OutOfMemory: cannot be reserved"
NO_MAP = "OutOfMemory: the kernel refused to map"
NO_PAGES = "OutOfMemory: cannot fault in"
NO_LOCK = "OutOfMemory: RLIMIT_MEMLOCK"
POOL_FULL = "OutOfMemory: do not fit into the pool, and its source has no more"
SLAB_FULL = "OutOfMemory: do not fit into the slab, and its source has no more"
NO_TABLE = "MemoryError: bookkeeping of a"
NO_CLAIM = "MemoryError: no memory for the bookkeeping of a region"
NO_ATFORK = "MemoryError: pthread_atfork failed"
NO_LEASE_RECORD = "MemoryError: no memory to record which bytes"
NO_RECORD = "MemoryError: no memory for the record of an export"
NOT_MAPPED = "PermissionError: cannot map"
BAD_PAGE = "OSError: hardware error"
NUMPY_NONE = "MemoryError: Unable to allocate"
MEMORY = r"mmap|mprotect|madvise\(POPULATE_WRITE\)|madvise\(HUGEPAGE\)"

TABLE = [
    # At the import, or when something is used for the first time.
    row("first use", "__register_atfork", NO_MEMORY, FINE, NO_ATFORK, "OSError: arenapy.cuda"),
    # A number less to give; without the GIL each thread gets one.
    row("first use|PerThread", "pthread_key_create|pthread_setspecific", ANY, FINE),
    row("first use", "strdup", NO_MEMORY, FINE),  # a place of which nothing is known
    row(ANY, "membarrier", ANY, FINE),  # locks are never owned then
    # What is tried again, or done in another way.
    row(ANY, r"fcntl\(GETFD\)", ANY, FINE),  # as if a standard file were closed
    row(ANY, r"madvise\(POPULATE_.*\)", f"{AGAIN}|EINVAL", FINE),
    row(ANY, r"madvise\(HUGEPAGE\)", "EAGAIN|EINVAL", FINE),
    row(ANY, r"madvise\((DONTNEED|DONTNEED_LOCKED)\)", "EAGAIN|EINVAL", FINE),
    row("region of .*|reserve", r"madvise\(DONTFORK\)", "EAGAIN", FINE),
    row(
        ANY,
        r"open|ftruncate|posix_fallocate|fcntl\(.*\)|ioctl|write|pread|recvmsg|sendmsg",
        "EINTR",
        FINE,
    ),
    row(ANY, "pthread_create", "EAGAIN", FINE),
    row("huge_fraction|can_scan_pages.*", "open|ioctl", ANY, FINE),  # smaps is asked then
    row("can_scan_pages.*", r"madvise\(POPULATE_WRITE\)", ANY, FINE),  # just that was the question
    row("reserve", "mmap", ANY, FINE),  # None: regions are made instead
    # What nobody is told: at an end, of bytes that are kept then, or of what is known later.
    row(ANY, "munmap", NO_MEMORY, FINE),
    # The bytes are not handed out again.
    row("fork", r"open|fcntl\(OFD_SETLK\)|memfd_create|mmap|malloc|calloc|realloc", ANY, FINE),
    row("Pool .*", r"madvise\(DONTNEED\)", "ENOMEM", FINE),  # the pool keeps the pages
    row("trace, while recording", "write", "ENOSPC|EIO", FINE),  # the end of the recording tells
    # Which file it is and what other processes see is asked in another way, or nothing is known.
    row("region of .*", "ioctl", ANY, FINE),
    row("region of .*", r"fcntl\(OFD_SETLK\)", "ENOLCK", FINE),  # a file system without locks
    row("region of Existing, mapped", "open", "EMFILE", "OSError: cannot find the file"),
    row("region of Existing, mapped", "open", "ENOENT", "FileNotFoundError: cannot find the file"),
    row("region of Existing, mapped", "open|os.stat", ANY, FINE),
    row("region of .*File.*", "open", "EMFILE", FINE, "OSError: Too many open files"),
    row("region of .*File.*", "open", "ENOENT", FINE, "FileNotFoundError: No such file"),
    row("region of .*File.*", "mmap", "ENOMEM", FINE, NO_MAP),
    row("region of .*File.*", "mmap", "EACCES", FINE, NOT_MAPPED),
    row("region of .*File.*", "fallocate", "EOPNOTSUPP|EINTR", FINE),
    # A limit that cannot be read is none.
    row(
        "(Bump|Slab|Pool|PerThread|NumPy memory|reserve|region of (Host|Shared)).*",
        "open",
        "EMFILE|ENOENT",
        FINE,
    ),
    # But what the machine has must be known.
    row("region of .*", r"open\(\)", "EMFILE", FINE, "OSError: /smaps"),
    row(
        "region of .*",
        r"open\(\)",
        "EACCES",
        FINE,
        "PermissionError: /proc/self/smaps",
    ),
    row("trace.*", r"open\(\)", ANY, FINE),  # which clock to read
    row("trace record.*", "open", "EMFILE", "OSError: Too many open files"),
    row("trace record.*", "open", "ENOENT", "FileNotFoundError: No such file"),
    # What the file was before is asked twice.
    row("trace record.*", r"os\.f?stat", ANY, FINE, "OSError: Input/output error"),
    # NumPy's arrays are libc's if the pool cannot grow, and lazy zeros a mapping of their own.
    row("NumPy malloc, no libc", MEMORY, f"{NO_MEMORY}|EACCES|EHWPOISON", NUMPY_NONE),
    row("NumPy malloc, libc's", "malloc", NO_MEMORY, NUMPY_NONE),
    row("NumPy memory, installed", "malloc", NO_MEMORY, "MemoryError: a NumPy handler"),
    row("NumPy realloc, growing", "malloc", NO_MEMORY, FINE),  # then the pool grows
    row("NumPy.*", f"{MEMORY}|realloc", ANY, FINE),
    # An arena that grows in place. Accessible is only the part, if the rest behind it cannot be.
    row("Bump in place, Host, made", "mmap", f"{NO_MEMORY}|EACCES", NO_ADDRESSES),
    row("Bump in place, Shared, made", r"mmap|madvise\(HUGEPAGE\)", NO_MEMORY, NO_ADDRESSES),
    row("Bump in place, Shared, made", "calloc|strdup", NO_MEMORY, NO_CLAIM),
    row("Bump in place, Shared, made", "memfd_create|ftruncate", "ENOMEM|EFBIG", NO_ADDRESSES),
    row("Bump in place.*", "mprotect", f"{NO_MEMORY}|EACCES", FINE, NO_MAP, NOT_MAPPED),
    row("Bump in place.*", MEMORY, "ENOMEM", FINE, NO_PAGES, NO_MAP),
    row("Bump in place.*", r"madvise\(DONTNEED\)", "ENOMEM", "OSError: Cannot allocate memory"),
    # Of shared memory, also before a part gets its memory. What is locked is unlocked first.
    row("Bump in place.*", "munlock", "ENOMEM", "OSError: Cannot allocate", NO_MAP),
    row(ANY, r"madvise\(REMOVE\)", "EAGAIN|EINVAL", FINE),
    row("Bump in place.*", r"madvise\(REMOVE\)", "ENOMEM", NO_MAP, FINE, "OSError: Cannot"),
    row("Bump in place.*", r"madvise\(REMOVE\)", "EACCES", "PermissionError: "),
    row("Pool .*", r"madvise\(REMOVE\)", "ENOMEM|EACCES", FINE, NOT_MAPPED, POOL_FULL),
    # Arenas and slabs ask for less before they give up.
    row("Bump alloc_many, growing", MEMORY, "ENOMEM", FINE),
    row("Bump .*growing|Bump grow", r"mmap|madvise\(HUGEPAGE\)", NO_MEMORY, NO_MAP),
    row("Slab .*", MEMORY, "ENOMEM", FINE, NO_TABLE),
    row("Slab .*", MEMORY, "ENOMEM, lasting", SLAB_FULL, NO_TABLE),
    row(r"Slab\(\)", "mprotect", "ENOMEM|EACCES", FINE, NO_MAP, NOT_MAPPED, NO_TABLE),
    row(r"Slab\(\)", MEMORY, NO_MEMORY, NO_MAP, NO_PAGES, NO_TABLE),
    row("Slab .*", "mprotect", "EACCES", FINE, NOT_MAPPED, NO_TABLE),  # tables ask for less
    row("Slab.*", MEMORY, "EACCES|EHWPOISON", NOT_MAPPED, BAD_PAGE, NO_TABLE),
    row("Pool prewarm|Pool alloc, first", MEMORY, "ENOMEM", FINE, POOL_FULL),
    row("Pool alloc, first", "mmap", "EACCES", FINE, POOL_FULL),  # regions, if none is reserved
    row("Pool alloc, first", "realloc", NO_MEMORY, "OutOfMemory: bookkeeping of an allocator"),
    row(r"Pool\(\).*", "mmap|mprotect", "ENOMEM|EACCES", FINE, NO_TABLE),  # it asks for less
    row(r"Pool\(\).*", MEMORY, f"{NO_MEMORY}|EACCES|EHWPOISON", NO_TABLE),
    row("Pool .*", "mprotect", "ENOMEM|EACCES", FINE, NOT_MAPPED, POOL_FULL),  # tables ask for less
    # Or it is served when what was idle is given back.
    row("Pool .*", MEMORY, NO_MEMORY, FINE, POOL_FULL),
    row("Pool .*", MEMORY, "EACCES|EHWPOISON", NOT_MAPPED, BAD_PAGE, POOL_FULL),
    # Shared memory that is sent.
    row("bundle.*", "socketpair", "EMFILE", "OSError: Too many open files"),
    row("bundle.*", "sendmsg", "ETOOMANYREFS", "OSError: Too many references"),
    row("bundle.*", "sendmsg", "EAGAIN", "BlockingIOError: "),
    row("bundle.*", "recvmsg", "ECONNRESET", FINE),  # its receiver counts them
    row("send.*", "open", "EMFILE", FINE, "OSError: again, to lease it"),  # fine: to send it on
    row("send.*", "open", "ENOENT", FINE, "FileNotFoundError: again, to lease it"),
    row("send.*", "fstat", "EIO", FINE, "OSError: cannot be sent any more", "OSError: Input/out"),
    row("send a Shared Region", "mmap", NO_MEMORY, NO_MAP, "OutOfMemory: cannot lease"),
    row("send a Shared Region", "mmap", "EACCES", NOT_MAPPED, "PermissionError: cannot lease"),
    row("send.*", r"os.dup|fcntl\(DUPFD_CLOEXEC\)", "EMFILE", "OSError: Too many open files"),
    row("send.*", r"fcntl\(OFD_SETLK\)", "ENOLCK", "OSError: No locks available"),
    row("send over a .*", "fstatfs", "EIO", "OSError: Input/output error"),
    row("send over a .*", "recvmsg", "ECONNRESET", "ConnectionResetError: reset by peer"),
    # Memory of the system's.
    row("trace .*", r"mmap|madvise\(.*FORK\)", NO_MEMORY, "MemoryError: memory to record in"),
    row("trace .*", "mmap", "EACCES", "PermissionError: memory to record in"),
    row("trace .*", r"madvise\(.*FORK\)", "EINVAL", "OSError: memory to record in"),
    row("trace .*", r"madvise\(.*FORK\)", "EAGAIN", "BlockingIOError: memory to record in"),
    row(ANY, r"mmap|madvise\((HUGEPAGE|DONTFORK)\)", NO_MEMORY, NO_MAP),
    row("commit.*", "mprotect", "ENOMEM|EACCES", FINE),  # it asks again, for the part
    row(ANY, "mprotect", NO_MEMORY, NO_MAP),
    row(ANY, r"madvise\(POPULATE_WRITE\)", NO_MEMORY, NO_PAGES),
    row(ANY, r"madvise\(POPULATE_WRITE\)", "EHWPOISON", BAD_PAGE),
    row(ANY, "mmap|mprotect", "EACCES", NOT_MAPPED),
    row("decommit.*", r"madvise\(DONTNEED\)", "ENOMEM", "OSError: Cannot allocate memory"),
    row("Pool .*", "mlock2", "ENOMEM|EAGAIN", FINE, POOL_FULL),
    row(ANY, "mlock2", "ENOMEM", NO_LOCK),
    row(ANY, "mlock2", "EPERM", "PermissionError: RLIMIT_MEMLOCK"),
    row(ANY, "mlock2", "EAGAIN", "BlockingIOError: RLIMIT_MEMLOCK"),
    row(ANY, "mlock2", "ENOSYS", "OSError: RLIMIT_MEMLOCK"),
    row(ANY, "mbind", "ENOMEM", "OutOfMemory: numa_node=0"),
    row(ANY, "mbind", "EPERM", "PermissionError: numa_node=0"),
    row(ANY, "mbind", "EINVAL|ENOSYS", "OSError: numa_node=0"),
    row("region of File.*", "ftruncate|posix_fallocate", ANY, "OSError: on disk"),
    row("region of File.*", r"fcntl\(DUPFD_CLOEXEC\)", "EMFILE", "OSError: Too many open files"),
    row("trace.*", "pread", ANY, FINE),  # an earlier header, to be put back
    row("trace.*", "ftruncate|pwrite", ANY, "OSError: "),
    row("Pool .*", "memfd_create|ftruncate", "ENOMEM", FINE, POOL_FULL),
    row(ANY, "memfd_create|ftruncate", "ENOMEM", NO_MAP),
    row(ANY, "memfd_create|ftruncate", ANY, "OSError: cannot map a Shared region"),
    row(ANY, r"fcntl\(ADD_SEALS\)", "EPERM", "PermissionError: cannot map a Shared region"),
    row(ANY, r"fcntl\(ADD_SEALS\)", "EBUSY", "OSError: cannot map a Shared region"),
    row("use of leased memory.*", r"fcntl\(OFD_GETLK\)", "EINVAL", FINE),  # as if it were leased
    row("use of leased memory by a Bump", "malloc|realloc", NO_MEMORY, FINE, NO_LEASE_RECORD),
    row("use of leased memory", "malloc", NO_MEMORY, FINE),  # they are not handed out again
    row("unlock", "munlock", "ENOMEM", "OSError: Cannot allocate memory"),
    # Files.
    row("region of .*File.*", "fstat|fstatfs|os.fstat", "EIO", FINE, "OSError: Input/output error"),
    row("region of .*File.*", "fallocate", "ENOSPC", "OSError: cannot reserve"),
    row("use of a file's region", "fstat", "EIO", "OSError: size of the file behind"),
    row("close .*|use of leased memory|fork", "fstat", "EIO", FINE),  # leased, and closed
    row(ANY, "fstat", "EIO", FINE, "OSError: Input/output error", "OSError: cannot map a Shared"),
    row(ANY, "os.(open|stat)", "EACCES", "PermissionError: Permission denied"),
    row("trace.*", "os.(fstat|pwrite)", ANY, "OSError: "),
    row("trace .*", "write", "ENOSPC|EIO", "OSError: the trace"),
    row("fault in, read-only", r"madvise\(POPULATE_READ\)", NO_MEMORY, "OSError: allocate memory"),
    row("fault in, read-only", r"madvise\(POPULATE_READ\)", "EHWPOISON", BAD_PAGE),
    row("replay", "pread", "EIO", "OSError: statm cannot be read"),
    row("replay", "calloc", NO_MEMORY, "MemoryError: no memory for 2 slots"),
    # What the C library has.
    row("region refused", "strdup", NO_MEMORY, FINE, NO_CLAIM),
    row("Pool .*", "calloc|strdup", NO_MEMORY, FINE, POOL_FULL),
    row("region .*|send.*|copy a Buffer|pickle a Buffer", "calloc|strdup", NO_MEMORY, NO_CLAIM),
    row(".* check|.* debug alloc|PerThread", "malloc|calloc", NO_MEMORY, "MemoryError: to check"),
    row("DLPack", "malloc", NO_MEMORY, "MemoryError: DLPack", NO_RECORD),
    row("Pool .*", "malloc", NO_MEMORY, "MemoryError: no memory for a list of"),
    row("Bump in place, a block", "malloc|realloc", NO_MEMORY, FINE, NO_TABLE, NO_RECORD),
    row("Bump in place.*", "malloc", NO_MEMORY, NO_TABLE, NO_RECORD),
    row(ANY, "malloc", NO_MEMORY, NO_RECORD),
    row("Pool blocks|trace.*", "realloc", NO_MEMORY, "MemoryError: a list of all blocks"),
    row(ANY, "posix_memalign", NO_MEMORY, "MemoryError: no memory for the bookkeeping of a"),
    row(ANY, "realloc", NO_MEMORY, "MemoryError: no memory for the bookkeeping of a"),
]
