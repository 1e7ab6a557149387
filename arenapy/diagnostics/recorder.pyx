"""Recorder: what an allocator did, as a compact binary file.

What lives here: the hook that allocators' cores call (`record_event`), the clock, the two
buffers, the file and its header. What does not: who records what (trace.py), reading files (too).

An event is 24 bytes: operation and time, address, thread and bytes. It is stored, under a
lock of the recorder's own, into one of two buffers; the thread that fills one takes the other
and writes the full one to the file after letting go of the lock, so that others go on recording.
Buffers and write() and not a mapped file, because a full disk is then an error code and never a
SIGBUS, and because an event then causes no page fault.

Time is the processor's counter (TSC where the kernel trusts it, CNTVCT on arm), 10 ns a reading
where clock_gettime takes 28. A clock event, which pairs ticks with CLOCK_MONOTONIC, ends every
buffer and the header holds the first pair: so whatever part of a file there is says how long its
ticks are.

Allocation sites, if they are wanted: an allocation by a thread that may look at Python's stack is
preceded by the number of that stack, and a new number by its text, in records of its own. Who is
on the stack is for call_sites.pyx to say.

All state that changes lies in pages that fork() gives the child zeroed (MADV_WIPEONFORK): there
the lock is free and nothing is running, so a child neither hangs nor writes into its parent's file.
"""
cimport cython
from cpython.object cimport PyObject
from posix.types cimport pid_t
from posix.unistd cimport SEEK_END, ftruncate, getpid, lseek, pread, pwrite
from libc.errno cimport EBADF, EINTR, ENOMEM, ENOSPC, errno
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset, strncpy
import operator
import os
from time import time_ns

from arenapy.base.system_errors import is_of_system

from arenapy.diagnostics.call_sites cimport CallStacks, attached
from arenapy.base.assertion cimport ASSERTS
from arenapy.base.biased_lock cimport biased_acquire, biased_release
from arenapy.base.thread_slot cimport no_lock_is_held
from arenapy.linux.vm cimport Descriptor, OpenFile, vm_close, vm_file_nbytes, vm_is_open

cdef extern from *:
    """
    #include <errno.h>
    #include <sched.h>
    #include <string.h>
    #include <sys/file.h>
    #include <sys/mman.h>
    #include <time.h>
    #include <unistd.h>

    enum { CLOCK_OF_KERNEL, CLOCK_TSC, CLOCK_CNTVCT };

    static inline uint64_t kernel_ns(void) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
    }
    static inline uint64_t ticks_of(int clock) {
    #if defined(__x86_64__)
        if (clock == CLOCK_TSC) return __builtin_ia32_rdtsc();
    #elif defined(__aarch64__)
        uint64_t t;
        if (clock == CLOCK_CNTVCT) { __asm__ volatile("mrs %0, cntvct_el0" : "=r"(t)); return t; }
    #endif
        return kernel_ns();
    }
    /* The number of this thread: 1, 2, ... in the order in which they first recorded. */
    static uint32_t threads_seen;
    static __thread uint32_t thread_number;
    static inline uint32_t this_thread(void) {
        if (!thread_number)
            thread_number = __atomic_add_fetch(&threads_seen, 1, __ATOMIC_RELAXED);
        return thread_number;
    }
    /* Resident pages of its own, which a child finds zeroed or does not have. */
    static void *pages_of(size_t n, int on_fork) {
        void *p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) return 0;
        if (madvise(p, n, on_fork)) { int e = errno; munmap(p, n); errno = e; return 0; }
        memset(p, 0, n);
        return p;
    }
    /* How many bytes were written: all, or *error says why not. */
    static size_t write_all(int fd, const char *p, size_t n, int *error) {
        size_t done = 0;
        *error = 0;
        while (done < n && !*error) {
            ssize_t more = write(fd, p + done, n - done);
            if (more > 0) done += (size_t)more;
            else if (more == 0) *error = ENOSPC;
            else if (errno != EINTR) *error = errno;
        }
        return done;
    }
    static inline void set_errno(int error) { errno = error; }
    /* Call what may use the interpreter, from code that does not know that it may. */
    static uint32_t call_attached(void *function, PyObject *argument) {
        int kept = errno;
        uint32_t found = ((uint32_t (*)(PyObject *))function)(argument);
        errno = kept;
        return found;
    }
    """
    uint32_t call_attached(void* function, PyObject* argument) noexcept nogil
    const int CLOCK_OF_KERNEL, CLOCK_TSC, CLOCK_CNTVCT
    uint64_t kernel_ns() noexcept nogil
    uint64_t ticks_of(int clock) noexcept nogil
    uint32_t this_thread() noexcept nogil
    const int MADV_DONTFORK, MADV_WIPEONFORK
    void* pages_of(size_t n, int on_fork) noexcept nogil
    int munmap(void* p, size_t n) noexcept nogil
    int sched_yield() nogil
    void set_errno(int error) noexcept nogil
    size_t write_all(int fd, const char* p, size_t n, int* error) noexcept nogil
    const int LOCK_UN
    int flock(int fd, int operation) noexcept nogil

cdef enum:
    VERSION = 2
    PLACES = 10922                       # events in a buffer: a quarter of a MiB
    BUFFERS = 2 * PLACES * 24            # bytes
    TIME_BITS = 56
    SIZE_BITS = 48
    KIND = 32                            # bytes of a name
    MAX_THREADS = (1 << 16) - 1          # further threads share this number
    TEXT = 16                            # bytes of it in a record: two words

cdef uint64_t TIME_MASK = (<uint64_t>1 << TIME_BITS) - 1
cdef uint64_t SIZE_MASK = (<uint64_t>1 << SIZE_BITS) - 1

cdef struct Header:
    char magic[8]
    uint32_t version
    uint32_t header_nbytes
    uint32_t event_nbytes
    uint32_t clock           # CLOCK_*
    int64_t started          # CLOCK_REALTIME, ns
    uint64_t ticks           # these two at the same moment; ticks count from here
    uint64_t monotonic       # CLOCK_MONOTONIC, ns
    uint64_t events          # valid if complete
    uint32_t complete        # 1: stopped in good order
    uint32_t process
    char kind[KIND]          # of allocator, NUL-terminated
    char reserved[32]

OPERATIONS = {"alloc": EVENT_ALLOC, "free": EVENT_FREE, "mark": EVENT_MARK,
              "reset": EVENT_RESET, "trim": EVENT_TRIM, "grow": EVENT_GROW,
              "keep": EVENT_KEEP}


cdef uint64_t as_word(object value, str what) except? 0:
    try:
        n = operator.index(value)
    except TypeError:
        raise TypeError(f"{what}={value!r}: need an int, not {type(value).__name__}") from None
    if not 0 <= n < 1 << 64:
        raise ValueError(f"{what}={n}: need a number from 0 to 2**64 - 1")
    return n


cdef int best_clock() except -1:
    """The cheapest clock that runs evenly and alike on all processors."""
    from pathlib import Path

    if os.uname().machine == "aarch64":
        return CLOCK_CNTVCT
    try:
        about = Path("/proc/cpuinfo").read_text()
        flags = about.partition("\nflags")[2].partition("\n")[0].split()
        # The kernel takes the TSC off this list when it finds processors to disagree.
        trusted = Path("/sys/devices/system/clocksource/clocksource0/available_clocksource")
        if {"constant_tsc", "nonstop_tsc"} <= {*flags} and "tsc" in trusted.read_text().split():
            return CLOCK_TSC
    except OSError as error:
        if not is_of_system(error):
            raise
    return CLOCK_OF_KERNEL


cdef object no_pages(int error):
    """The exception to raise where `pages_of` failed."""
    text = f"cannot have memory to record in: {os.strerror(error)}"
    return MemoryError(text) if error == ENOMEM else OSError(error, text)


cdef inline void put(Tape* tape, Event* place, int op, uint64_t time, uint64_t block,
                     size_t nbytes, uint32_t thread) noexcept nogil:
    place.time = (time - tape.begun) & TIME_MASK | <uint64_t>op << TIME_BITS
    place.block = block
    place.size = (min(<uint64_t>nbytes, SIZE_MASK)
                  | <uint64_t>min(thread, <uint32_t>MAX_THREADS) << SIZE_BITS)


cdef uint64_t tick(Tape* tape, int clock) noexcept nogil:
    """Now, and not before the last event: processors may differ by a few ticks; lock held."""
    cdef uint64_t now = ticks_of(clock)
    tape.latest = max(tape.latest, now)
    return tape.latest


cdef inline void let_others(Tape* tape) noexcept nogil:
    """While another thread writes to the file."""
    biased_release(&tape.lock)
    sched_yield()
    biased_acquire(&tape.lock)


cdef inline int cannot_see(OpenFile* file) noexcept nogil:
    """0: the descriptor is still that of the file; else an errno, EBADF for another's."""
    return <int>-min(vm_file_nbytes(file), <int64_t>0)


cdef void write_out(Tape* tape, int clock) noexcept nogil:
    """Write the current buffer; the lock is held, but for the writing. Nobody else may write."""
    cdef Event* full = tape.first
    cdef Py_ssize_t n = tape.at - full
    cdef Py_ssize_t written = 0
    cdef int error
    cdef int kept = errno                # may be a malloc's
    if n == 0:
        return
    put(tape, tape.at, EVENT_CLOCK, tick(tape, clock), kernel_ns(), 0, 0)
    n += 1
    tape.first = tape.at = tape.spare
    tape.last = tape.first + (PLACES - 1)
    tape.spare = full
    tape.writing = 1
    biased_release(&tape.lock)
    # A program may close every descriptor, and then open a file that gets the same number.
    error = cannot_see(&tape.file)
    if not error:
        written = write_all(tape.file.fd, <char*>full, n * sizeof(Event), &error) // sizeof(Event)
    set_errno(kept)
    biased_acquire(&tape.lock)
    tape.writing = 0
    tape.events += written
    if error:
        tape.error = error
        tape.running = 0
        tape.lost += n - 1 - min(written, n - 1) + (tape.at - tape.first)


cdef void write_all_out(Tape* tape, int clock) noexcept nogil:
    """Everything recorded before the call is in the file after it; the lock is held."""
    while tape.running and tape.writing:
        let_others(tape)
    if tape.running:
        write_out(tape, clock)


cdef void drop_buffers(Tape* tape) noexcept nogil:
    """After the last event; the lock is held, and nobody is writing."""
    if tape.buffers != NULL:
        munmap(tape.buffers, BUFFERS)
        tape.buffers = NULL


cdef void end_file(Tape* tape, OpenFile* file) noexcept:
    """Close it, and let others write it, though forked children have it open for longer. They
    share the lock, and may not release it: in them `begun` is 0."""
    if tape.begun and vm_is_open(file):
        flock(file.fd, LOCK_UN)
    vm_close(file)


cdef bint have_places(Tape* tape, int clock, int places) noexcept nogil:
    """Make room in the current buffer, the lock held. False: events are not wanted any more."""
    while tape.running and tape.last - tape.at < places:
        if tape.writing:
            let_others(tape)
        else:
            write_out(tape, clock)
    return tape.running != 0


cdef void record_text(Tape* tape, int clock, const char* text, size_t n) noexcept nogil:
    """The last record is filled up with NUL. One text at a time: events may come between."""
    cdef size_t part
    biased_acquire(&tape.lock)
    while n and have_places(tape, clock, 1):
        put(tape, tape.at, EVENT_TEXT, tick(tape, clock), 0, 0, 0)
        part = min(n, <size_t>TEXT)
        memset(&tape.at.block, 0, TEXT)
        memcpy(&tape.at.block, text, part)
        text += part
        n -= part
        tape.at += 1
    biased_release(&tape.lock)


cdef uint32_t site_of_call(PyObject* recorder) noexcept:
    """The number of the stack that is calling, 0: none."""
    cdef Recorder r = <Recorder>recorder
    cdef uint32_t number = 0
    cdef bytes text
    if ASSERTS:
        no_lock_is_held()
    with cython.critical_section(r.stacks):
        text = r.stacks.number_of_this(&number)
        if text is not None:
            record_text(r.tape, r.clock, text, len(text))
    return number


cdef void record_event(PyObject* recorder, int op, uintptr_t block, size_t nbytes,
                       uint64_t stream) noexcept nogil:
    cdef Tape* tape = (<Recorder>recorder).tape
    cdef int clock = (<Recorder>recorder).clock
    cdef uint32_t thread = this_thread()
    cdef uint32_t site = 0
    cdef uint64_t now
    if (<Recorder>recorder).wants_sites and op == EVENT_ALLOC and tape.running and attached():
        site = call_attached(<void*>site_of_call, recorder)
    biased_acquire(&tape.lock)
    if have_places(tape, clock, 1 + (stream != 0) + (site != 0)):
        now = tick(tape, clock)
        if site:
            put(tape, tape.at, EVENT_SITE, now, site, 0, thread)
            tape.at += 1
        if stream:
            put(tape, tape.at, EVENT_STREAM, now, stream, 0, thread)
            tape.at += 1
        put(tape, tape.at, op, now, block, nbytes, thread)
        tape.at += 1
    elif tape.error:
        tape.lost += 1
    biased_release(&tape.lock)


cdef int begin_file(int fd, Header* header) noexcept nogil:
    """Let a header be all that is in a file. If that fails, the file is as it was: an errno."""
    cdef Header before
    cdef Py_ssize_t had = pread(fd, &before, sizeof(Header), 0)
    cdef Py_ssize_t done = pwrite(fd, header, sizeof(Header), 0)
    cdef int failed = errno if done < 0 else ENOSPC if done < <Py_ssize_t>sizeof(Header) else 0
    while failed == 0 and ftruncate(fd, sizeof(Header)):
        failed = errno if errno != EINTR else 0
    if failed == 0 and lseek(fd, 0, SEEK_END) < 0:
        failed = errno
    if failed and had > 0:
        pwrite(fd, &before, had, 0)
    return failed


@cython.final
@cython.no_gc
cdef class Recorder:
    """Recorder(path, kind="", sites=0)\n--\n
    Writes events to a trace file.

    `arenapy.trace.record` makes one and passes it to an allocator. To record another allocator than
    arenapy's in a file of the same format, call `add` yourself.

    Parameters
    ----------
    path : path-like
        A regular file. `start` makes it, or overwrites it if it is empty or a trace.
    kind : str
        The name of the allocator's class, at most 31 bytes.
    sites : int
        The number of callers to record for each allocation, the innermost first: 0 to 64.

    Notes
    -----
    Thread-safety: any thread may add events at any time. A forked child records nothing: its copy
    is stopped, and the file belongs to the parent.

    Examples
    --------
    >>> from arenapy import trace
    >>> recorder = trace.Recorder("mine.trace", "my allocator")
    >>> recorder.start()
    >>> recorder.add("alloc", 0x1000, 100)
    >>> recorder.add("free", 0x1000)
    >>> recorder.stop()
    >>> trace.load("mine.trace")
    <Trace of my allocator: 2 events>
    """

    def __cinit__(self, path, kind="", sites=0):
        self.file.fd = -1
        self.path = str.__str__(os.fsdecode(path))    # not one of a subclass, as NumPy's
        if not isinstance(kind, str):
            raise TypeError(f"kind={kind!r}: need a str, not {type(kind).__name__}")
        self.kind = str.__str__(kind)
        if len(kind.encode()) >= KIND or "\0" in kind:
            raise ValueError(f"kind={kind!r}: a name of at most {KIND - 1} bytes")
        if sites != 0:
            self.stacks = CallStacks(sites)
            self.wants_sites = True
        self.clock = best_clock()
        self.tape = <Tape*>pages_of(sizeof(Tape), MADV_WIPEONFORK)
        if self.tape == NULL:
            raise no_pages(errno)
        self.tape.here = 1

    def __dealloc__(self):
        if self.tape != NULL:
            biased_acquire(&self.tape.lock)
            write_all_out(self.tape, self.clock)
            drop_buffers(self.tape)
            biased_release(&self.tape.lock)
            end_file(self.tape, &self.file)
            munmap(self.tape, sizeof(Tape))

    def start(self):
        """Make the file, and begin to record.

        Raises
        ------
        OSError
            If the file cannot be made, is not a regular file, exists and is not a trace, or if
            another recorder writes it, in this process or another one.
        MemoryError
            If there is no memory for the buffers.
        ValueError
            If this recorder was started before.

        Examples
        --------
        >>> recorder = arenapy.trace.Recorder("mine.trace")
        >>> recorder.start()
        >>> recorder.recording
        True
        """
        cdef Tape* tape = self.tape
        cdef Header header
        cdef bytes kind = self.kind.encode()
        cdef Event* buffers
        from arenapy.linux import outputs

        cdef Descriptor file = None
        cdef pid_t process = getpid()        # a child that a handler forks below has no buffers
        biased_acquire(&tape.lock)
        used, self.used = self.used, True
        biased_release(&tape.lock)
        if used:
            raise ValueError(f"this recorder of {self.path!r} was started before; make another one")
        buffers = <Event*>pages_of(BUFFERS, MADV_DONTFORK)
        try:
            if buffers == NULL:
                raise no_pages(errno)
            file = outputs.begin(self.path, outputs.TRACE)
            if getpid() != process:
                raise ValueError(
                    f"this process was forked while its parent began to record into {self.path!r}; "
                    "record into another file"
                )
            fd = file.fileno()
            memset(&header, 0, sizeof(Header))
            memcpy(header.magic, b"arenatrc", 8)
            header.version = VERSION
            header.header_nbytes = sizeof(Header)
            header.event_nbytes = sizeof(Event)
            header.clock = self.clock
            header.process = process
            strncpy(header.kind, kind, KIND - 1)
            header.started = time_ns()
            header.monotonic = kernel_ns()
            header.ticks = ticks_of(self.clock)
            # Last, and in C: no signal's exception comes between, and an earlier trace stays.
            failed = begin_file(fd, &header)
            if failed:
                raise OSError(failed, os.strerror(failed), self.path)
        except BaseException:
            self.used = False
            if buffers != NULL and getpid() == process:
                munmap(buffers, BUFFERS)
            if file is not None:
                file.close()
            raise
        biased_acquire(&tape.lock)
        file.take(&self.file)
        tape.file = self.file
        tape.buffers = tape.first = tape.at = buffers
        tape.last = tape.first + (PLACES - 1)
        tape.spare = buffers + PLACES
        tape.begun = tape.latest = header.ticks
        tape.running = 1
        biased_release(&tape.lock)

    cdef int check_started(self) except -1:
        if not self.used:
            raise ValueError(f"this recorder of {self.path!r} was not started; call start()")
        return 0

    def add(self, operation, address, nbytes=0, stream=0):
        """Record one operation of this thread, with the present time.

        Parameters
        ----------
        operation : {"alloc", "free", "mark", "reset", "trim", "grow", "keep"}
        address : int
            The address of the block, or of the memory from or to the source. For a mark, and for a
            reset to it, the number of the mark, which is not 0.
        nbytes : int
            The requested size of the block, less than 2**48.
        stream : int
            Handle of the stream that orders the operation, 0 for none.

        Examples
        --------
        >>> recorder = arenapy.trace.Recorder("mine.trace")
        >>> recorder.start()
        >>> recorder.add("alloc", address=0x1000, nbytes=100)
        """
        if operation not in OPERATIONS:
            raise ValueError(f"operation={operation!r}: one of {', '.join(OPERATIONS)}")
        self.check_started()
        cdef uint64_t start = as_word(address, "address")
        cdef uint64_t size = as_word(nbytes, "nbytes")
        cdef uint64_t handle = as_word(stream, "stream")
        if start + size < start:
            raise ValueError(f"nbytes={nbytes} at address={address:#x} end beyond the last address")
        if size >> SIZE_BITS:
            raise ValueError(f"nbytes={nbytes} are more than a trace can store, {SIZE_MASK}")
        if operation == "mark" and start == 0:
            raise ValueError("address=0 is no mark's number: give your marks numbers from 1")
        record_event(<PyObject*>self, OPERATIONS[operation], start, size, handle)

    def flush(self):
        """Write all events so far to the file, so that they are kept if this process dies.

        Raises
        ------
        OSError
            If a write failed, now or before.

        Examples
        --------
        >>> recorder = arenapy.trace.Recorder("mine.trace")
        >>> recorder.start()
        >>> recorder.add("alloc", 0x1000, 100)
        >>> recorder.flush()
        >>> len(arenapy.trace.load("mine.trace"))
        1
        """
        self.check_started()
        with nogil:
            biased_acquire(&self.tape.lock)
            write_all_out(self.tape, self.clock)
            biased_release(&self.tape.lock)
        self.raise_failure()

    def stop(self):
        """Write the rest, and close the file. A second call does nothing.

        Raises
        ------
        OSError
            If a write failed, now or before. The file then has the events before that.

        Examples
        --------
        >>> recorder = arenapy.trace.Recorder("mine.trace")
        >>> recorder.start()
        >>> recorder.stop()
        >>> arenapy.trace.load("mine.trace").complete
        True
        """
        cdef Header header                   # where its fields are
        cdef uint32_t complete = 1
        cdef uint64_t mine
        cdef OpenFile file
        self.check_started()
        with nogil:
            biased_acquire(&self.tape.lock)
            write_all_out(self.tape, self.clock)
            mine = self.tape.running         # else forked, failed or stopped
            self.tape.running = 0
            drop_buffers(self.tape)          # a recorder that ended may be kept for long
            file = self.file
            self.file.fd = -1
            biased_release(&self.tape.lock)
        if file.fd < 0:
            return
        try:
            if mine:
                self.tape.error = cannot_see(&file)
            if mine and not self.tape.error:
                os.pwrite(file.fd, (<char*>&self.tape.events)[:8],
                          <char*>&header.events - <char*>&header)
                os.pwrite(file.fd, (<char*>&complete)[:4],
                          <char*>&header.complete - <char*>&header)
        finally:
            end_file(self.tape, &file)
        self.raise_failure()

    cdef int raise_failure(self) except -1:
        if self.tape.error:
            remedy = ("the program closed the trace's descriptor, and may close only its own"
                      if self.tape.error == EBADF
                      else "record less, or to a place with more room")
            raise OSError(
                self.tape.error,
                f"{os.strerror(self.tape.error)}: the trace {self.path!r} has the first "
                f"{self.tape.events} records, and {self.tape.lost} are lost; {remedy}")
        return 0

    @property
    def recording(self):
        """Are events written? False before the start, after the end, and in a forked child."""
        return self.tape.running != 0

    @property
    def lost(self):
        """Events that could not be written."""
        return self.tape.lost

    def __repr__(self):
        state = "recording" if self.recording else "stopped" if self.used else "not started"
        return f"<Recorder of {self.kind or 'events'} to {self.path!r}, {state}>"


# ---- contexts ----------------------------------------------------------------------------

@cython.final
cdef class Recording:
    """Recording(allocator, path, sites=0, kind=None)\n--\n
    The recording of an allocator, from :func:`arenapy.trace.record`.

    Parameters
    ----------
    allocator, path, sites
        As for :func:`arenapy.trace.record`.
    kind : str, optional
        The subject of the trace. By default the class of the allocator, with ", device" after
        it if its memory is a GPU's.

    Notes
    -----
    Thread-safety: any thread may use the allocator during the recording.

    Examples
    --------
    >>> from arenapy import trace
    >>> pool = arenapy.Pool()
    >>> with trace.record(pool, "pool.trace") as recorder:
    ...     pool.alloc(100).release()
    ...     recorder.flush()
    """

    # Compiled, as is all that these two call: a signal's exception comes before or after.
    cdef object allocator
    cdef Recorder recorder
    cdef bint entered

    def __cinit__(self, allocator, path, sites=0, kind=None):
        if not hasattr(allocator, "_record"):
            raise TypeError(f"{allocator!r} is not an allocator; pass a Bump, Slab or Pool")
        if kind is None:
            kind = type(allocator).__name__
            if getattr(allocator, "kind", None) == "device":
                kind += ", device"
        self.allocator = allocator
        self.recorder = Recorder(path, kind, sites)

    def __enter__(self):
        # The file is made last: an allocator that is being recorded already, perhaps into this very
        # file, refuses first.
        self.allocator._record(self.recorder)
        try:
            self.recorder.start()
            for address, nbytes in self.allocator._reserved():
                self.recorder.add("grow", address, nbytes)
        except BaseException:
            self.allocator._record(None, self.recorder)
            raise
        self.entered = True
        return self.recorder

    def __exit__(self, kind, error, traceback):
        if not self.entered:                 # the allocator may be recorded by another one
            raise ValueError("this recording is not entered; use it in a with statement")
        self.entered = False
        try:
            try:
                self.allocator._record(None, self.recorder)
            finally:
                self.recorder.stop()
        except OSError as failure:
            if error is None:
                raise
            error.add_note(str(failure))
