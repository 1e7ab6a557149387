# cython: language_level=3
"""The C parts of the benchmarks: a floor for method calls, and loops without the interpreter.

native.py compiles this file against the installed arenapy, as any user of `cimport arenapy` would.
"""
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint32_t

from arenapy cimport Bump, BumpMark, bump_alloc, bump_mark, bump_reset

cdef extern from *:
    """
    /* The compiler must make the pointer ... */
    #define USE(p) __asm__ volatile("" : : "r"(p))
    /* ... and here must also keep all state in memory, as if it knew nothing of what follows. */
    #define USE_AND_STORE(p) __asm__ volatile("" : : "r"(p) : "memory")

    #if defined(__has_include)
    #if __has_include(<valgrind/callgrind.h>)
    #include <valgrind/callgrind.h>
    #define CAN_COUNT 1
    #endif
    #endif
    #ifndef CAN_COUNT
    #define CAN_COUNT 0
    #define CALLGRIND_START_INSTRUMENTATION
    #define CALLGRIND_STOP_INSTRUMENTATION
    #define CALLGRIND_ZERO_STATS
    #define CALLGRIND_DUMP_STATS_AT(name) ((void)(name))
    #endif
    static void count_begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
    static void count_end(const char *name) {
        CALLGRIND_DUMP_STATS_AT(name);
        CALLGRIND_STOP_INSTRUMENTATION;
    }
    """
    void USE(void* p) noexcept nogil
    void USE_AND_STORE(void* p) noexcept nogil
    bint CAN_COUNT
    void count_begin()
    void count_end(const char* name)

can_count = bool(CAN_COUNT)


@cython.final
cdef class Noop:
    """Methods with the signatures of Bump's that do nothing: what a call costs by itself."""

    def alloc(self, nbytes, align=None, stream=None):
        """As Bump.alloc."""

    def mark(self):
        """As Bump.mark."""

    def reset(self, mark=None, stream=None):
        """As Bump.reset."""


# ---- the arena's C calls -----------------------------------------------------------------

def alloc(Bump arena not None, Py_ssize_t calls, size_t nbytes, size_t align):
    """bump_alloc in a loop; the blocks are not touched."""
    cdef Py_ssize_t _i
    cdef void* block = NULL
    with nogil:
        for _i in range(calls):
            block = bump_alloc(arena, nbytes, align)
            USE(block)
    if block == NULL:
        raise MemoryError(f"the arena is too small for {calls} blocks of {nbytes} bytes")


def alloc_and_store(Bump arena not None, Py_ssize_t calls, size_t nbytes, size_t align):
    """The same among code that the compiler cannot see: each call loads and stores the cursor."""
    cdef Py_ssize_t _i
    cdef void* block = NULL
    with nogil:
        for _i in range(calls):
            block = bump_alloc(arena, nbytes, align)
            USE_AND_STORE(block)
    if block == NULL:
        raise MemoryError(f"the arena is too small for {calls} blocks of {nbytes} bytes")


def mark_reset(Bump arena not None, Py_ssize_t calls):
    """bump_mark and bump_reset to it in a loop."""
    cdef BumpMark mark
    cdef Py_ssize_t _i
    cdef int status = 0
    with nogil:
        for _i in range(calls):
            mark = bump_mark(arena)
            status |= bump_reset(arena, mark)
    if status:
        raise AssertionError("a reset to a new mark was refused")


def mark_alloc_reset(Bump arena not None, Py_ssize_t calls):
    """The same with a block of 64 bytes to free in between."""
    cdef BumpMark mark
    cdef Py_ssize_t _i
    cdef int status = 0
    with nogil:
        for _i in range(calls):
            mark = bump_mark(arena)
            USE(bump_alloc(arena, 64, 64))
            status |= bump_reset(arena, mark)
    if status:
        raise AssertionError("a reset to a new mark was refused")


# ---- layouts -----------------------------------------------------------------------------

cdef class Words:
    """The 32-bit words of any buffer."""

    cdef Py_buffer view
    cdef uint32_t* first
    cdef Py_ssize_t count

    def __cinit__(self, array, bint writable=False):
        PyObject_GetBuffer(array, &self.view, PyBUF_WRITABLE if writable else PyBUF_SIMPLE)
        self.first = <uint32_t*>self.view.buf
        self.count = self.view.len // sizeof(uint32_t)

    def __dealloc__(self):
        PyBuffer_Release(&self.view)


def stride_sum(array, Py_ssize_t stride):
    """The sum, modulo 2**32, of every stride-th word."""
    cdef Words words = Words(array)
    cdef const uint32_t* first = words.first
    cdef Py_ssize_t i, n = (words.count + stride - 1) // stride
    cdef uint32_t total = 0
    with nogil:
        if stride == 1:                  # the compiler makes vector code of this one
            for i in range(n):
                total += first[i]
        else:
            for i in range(n):
                total += first[i * stride]
    return total


def gather_sum(array, order, Py_ssize_t stride):
    """The sum, modulo 2**32, of the words that `order` (of uint32) names, `stride` apart."""
    cdef Words words = Words(array)
    cdef Words indices = Words(order)
    cdef const uint32_t* first = words.first
    cdef const uint32_t* index = indices.first
    cdef Py_ssize_t i, n = indices.count
    cdef uint32_t total = 0
    with nogil:
        for i in range(n):
            total += first[index[i] * stride]
    return total


def touch(array, Py_ssize_t step):
    """Write one word in every `step` bytes."""
    cdef Words words = Words(array, True)
    cdef uint32_t* first = words.first
    cdef Py_ssize_t i, apart = step // sizeof(uint32_t)
    with nogil:
        for i in range((words.count + apart - 1) // apart):
            first[i * apart] = 1


# ---- a driver of GPUs that is not there --------------------------------------------------

cdef int not_capturing(void* stream, int* status) noexcept nogil:
    status[0] = 0
    return 0


#: The address of a `cuStreamIsCapturing` that says no: a simulated driver's would be Python's.
NOT_CAPTURING = <size_t>&not_capturing


# ---- instruction counts ------------------------------------------------------------------

def begin_counting():
    """Let callgrind count from here."""
    count_begin()


def end_counting(bytes name):
    """Stop it, and dump the counts under a name."""
    count_end(name)


cdef extern from *:
    """
    static void count_plainly(volatile uint32_t *word, Py_ssize_t times) {
        for (; times; times--) *word = *word + 1;
    }
    static void count_atomically(uint32_t *word, Py_ssize_t times) {
        for (; times; times--) __atomic_fetch_add(word, 1, __ATOMIC_RELAXED);
    }
    """
    void count_plainly(uint32_t* word, Py_ssize_t times) noexcept nogil
    void count_atomically(uint32_t* word, Py_ssize_t times) noexcept nogil


def count_up(array, Py_ssize_t times, bint atomic):
    """Add to the first word so often: in memory each time, and not in a register."""
    cdef Words words = Words(array, True)
    with nogil:
        if atomic:
            count_atomically(words.first, times)
        else:
            count_plainly(words.first, times)
