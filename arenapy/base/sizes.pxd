# Sizes: as Python gives them, the 21 classes, and the finer steps that blocks are rounded to.
#
# A step is a block size. Up to 512 bytes they are the multiples of 64; then eight divide each
# doubling evenly, so that rounding wastes less than an eighth; from 16 MiB on they are the
# multiples of 2 MiB. Those up to 4 GiB have numbers. Beyond, a number stands for an eighth of a
# doubling, and the block size is not a function of it. Every step lies within one class.
from cpython.object cimport PyObject


cdef enum:
    N_CLASSES = 21
    N_SMALL = 56             # steps up to SMALL_MOST
    N_EXACT = 2168           # steps up to EXACT_MOST
    N_STEPS = 2168 + 8 * 16  # up to 2 ** 48 bytes
    SMALL_MOST = 32 << 10
    FINE_MOST = 16 << 20
    COARSE = 2 << 20         # the distance of steps above FINE_MOST

cdef extern from *:
    """
    #define arenapy_top_bit(n) (63 - __builtin_clzll(n))
    #define EXACT_MOST ((size_t)4 << 30)
    #define MAX_BYTES ((size_t)1 << 46)    /* no address space has more */
    """
    int top_bit "arenapy_top_bit" (size_t n) noexcept nogil
    size_t EXACT_MOST, MAX_BYTES

# The class that n bytes belong to.
cdef int class_of(size_t n) noexcept nogil
# How requests are rounded before their step is taken.
cdef enum:
    ROUND_STEP = 0           # not at all
    ROUND_CLASS = 1          # as many bytes as the class of n has, in class 20 the next 2 MiB
    ROUND_LINES = 2          # whole device lines, so that slots begin on one
    DEVICE_LINE = 256        # bytes

cdef size_t rounded(size_t n, int rounding) noexcept nogil


# The least step with room for n bytes (at most 2 ** 48).
cdef inline int step_of(size_t n) noexcept nogil:
    cdef size_t u = n - (n != 0)
    cdef int k
    if u < 512:
        return <int>(u >> 6)
    k = top_bit(u)
    if u < FINE_MOST:
        return (k << 3) - 64 + <int>((u >> (k - 3)) & 7)       # 8 + 8 (k - 9) + ...
    if u < EXACT_MOST:
        return 120 + <int>(u >> 21)
    return N_EXACT + ((k - 32) << 3) + <int>((u >> (k - 3)) & 7)


# Bytes of a step; of an inexact one, the most that it stands for.
cdef inline size_t step_bytes(int s) noexcept nogil:
    if s < 8:
        return <size_t>(s + 1) << 6
    if s < 128:
        return <size_t>((s & 7) + 9) << ((s >> 3) + 5)
    if s < N_EXACT:
        return <size_t>(s - 119) << 21
    return <size_t>((s & 7) + 9) << (((s - N_EXACT) >> 3) + 29)


# The block size for n bytes.
cdef inline size_t round_bytes(size_t n) noexcept nogil:
    if n <= EXACT_MOST:
        return step_bytes(step_of(n))
    return (n + (COARSE - 1)) & ~<size_t>(COARSE - 1)


# The last step that n bytes fill (n >= 64): where free memory is listed, and found from below.
cdef inline int floor_step(size_t n) noexcept nogil:
    return step_of(n + 1) - 1


# -- sizes and alignments as Python gives them

cdef extern from *:
    """
    /* A small non-negative int, else something negative: as_size() then looks closer. */
    static inline Py_ssize_t arenapy_quick_size(PyObject *o) {
        if (!PyLong_CheckExact(o)) return -1;
    #if PY_VERSION_HEX >= 0x030C0000
        return PyUnstable_Long_IsCompact((PyLongObject *)o)
            ? PyUnstable_Long_CompactValue((PyLongObject *)o) : -1;
    #else
        return Py_SIZE(o) == 1 ? (Py_ssize_t)((PyLongObject *)o)->ob_digit[0]
            : Py_SIZE(o) == 0 ? 0 : -1;
    #endif
    }
    """
    Py_ssize_t quick_size "arenapy_quick_size" (PyObject* o) noexcept

cdef enum:
    HOST_ALIGN = 64          # of blocks: a cache line, and an AVX-512 register
    MAX_ALIGN = 2 << 20

cdef Py_ssize_t as_size(object value, str what) except -1
cdef Py_ssize_t as_align(object value) except -1
# The value of a constructor's argument `debug`. None: as ARENAPY_DEBUG says.
cdef bint debug_wanted(object debug) except -1
