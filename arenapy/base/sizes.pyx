"""Sizes: as Python gives them, the 21 size classes of a Pool, and the steps of its blocks.

What lives here: checks of sizes and alignments, whose errors name the value and the range; the
table of the design and arithmetic on it. What does not: free lists (pool/page_heap,
pool/thread_cache).

The steps are the bins of TLSF (Masmano, Ripoll, Crespo and Real, "TLSF: a new dynamic memory
allocator for real-time systems", 2004) with eight to a doubling.
"""
import os

cdef extern from "Python.h":
    object PyNumber_Index(object o)
    Py_ssize_t PyLong_AsSsize_t(object o) except? -1

cdef enum:
    KIB = 1 << 10
    MIB = 1 << 20

cdef size_t bounds[N_CLASSES]

SIZE_CLASSES = (
    4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, 768 * KIB,
    1 * MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB, 128 * MIB, 256 * MIB,
    384 * MIB, 512 * MIB, None,
)
for _i in range(N_CLASSES):
    bounds[_i] = <size_t>-1 if SIZE_CLASSES[_i] is None else SIZE_CLASSES[_i]


def size_class(nbytes):
    """The size class of a request, from 0 to 20.

    Parameters
    ----------
    nbytes : int
        Size in bytes.

    Returns
    -------
    int
        Index in ``arenapy.SIZE_CLASSES`` of the first bound that is at least `nbytes`.

    Raises
    ------
    ValueError, TypeError
        If `nbytes` is not a valid size.

    Notes
    -----
    Thread-safety: may be called from any thread.

    Examples
    --------
    >>> import arenapy
    >>> arenapy.size_class(4096), arenapy.size_class(4097), arenapy.size_class(1 << 40)
    (0, 1, 20)
    """
    return class_of(as_size(nbytes, "nbytes"))


cdef int class_of(size_t n) noexcept nogil:
    cdef int c = 0
    while n > bounds[c]:
        c += 1
    return c


cdef size_t rounded(size_t n, int rounding) noexcept nogil:
    if rounding == ROUND_LINES:
        return (n + (n == 0) + (DEVICE_LINE - 1)) & ~<size_t>(DEVICE_LINE - 1)
    return class_bytes(n) if rounding == ROUND_CLASS else n


cdef size_t class_bytes(size_t n) noexcept nogil:
    cdef int c = class_of(n)
    if c < N_CLASSES - 1:
        return bounds[c]
    return (n + (COARSE - 1)) & ~<size_t>(COARSE - 1)

# ---- arguments --------------------------------------------------------------------------------

cdef str _shown(object value):
    """A wrong argument, for a message: not all of the data that somebody gave for its size."""
    try:
        if len(value) > 100:
            return f"<{len(value)} items>"
    except TypeError:
        pass
    return repr(value)


cdef Py_ssize_t as_size(object value, str what) except -1:
    """A count of bytes: an integer from 0 to the largest Py_ssize_t."""
    cdef object index
    cdef Py_ssize_t n
    try:
        index = PyNumber_Index(value)
    except TypeError:
        raise TypeError(
            f"{what}={_shown(value)} is of type {type(value).__name__}; give a whole number of "
            "bytes"
        ) from None
    if index < 0:
        raise ValueError(f"{what}={index} is negative; give 0 or more bytes")
    try:
        n = PyLong_AsSsize_t(index)
    except OverflowError:
        raise ValueError(
            f"{what}={index} is more than any address space holds; "
            f"the largest possible is {<Py_ssize_t>((<size_t>-1) >> 1)}"
        ) from None
    return n


cdef Py_ssize_t as_align(object value) except -1:
    cdef Py_ssize_t n = as_size(value, "align")
    if n <= 0 or n & (n - 1) or n > MAX_ALIGN:
        raise ValueError(f"align={value} is not a power of two from 1 to {MAX_ALIGN}")
    return n


cdef bint debug_wanted(object debug) except -1:
    if debug is None:
        return os.environ.get("ARENAPY_DEBUG", "0") not in ("", "0")
    return debug
