# cython: language_level=3, boundscheck=False, wraparound=False, freethreading_compatible=True
from libc.stddef cimport size_t
from libc.string cimport memmove

from arenapy cimport Bump, BumpMark, bump_alloc, bump_mark, bump_reset


def running_median(const double[::1] values, double[::1] medians, Bump arena not None):
    """Write the median of each window of `values` into `medians`.

    The number of medians determines the width of the window. No other thread may use the arena
    during the call. At the end, all memory that the call took from the arena is free again.
    """
    cdef Py_ssize_t width = values.shape[0] - medians.shape[0] + 1
    cdef BumpMark mark
    cdef double* window
    if width < 1 or width > values.shape[0]:
        raise ValueError(f"medians={medians.shape[0]} elements for {values.shape[0]} values")
    with nogil:
        mark = bump_mark(arena)
        window = <double*> bump_alloc(arena, width * sizeof(double), 64)
        if window != NULL:               # NULL: the arena is full, and nothing has changed
            fill(&values[0], &medians[0], medians.shape[0], window, width)
            bump_reset(arena, mark)
    if window == NULL:
        raise MemoryError(f"{arena} has no room for a window of {width} values")


cdef void fill(const double* values, double* medians, Py_ssize_t n, double* window,
               Py_ssize_t width) noexcept nogil:
    """Keep the window sorted. At each step, one value leaves it and one value enters it."""
    cdef Py_ssize_t i
    for i in range(width):
        insert(window, i, values[i])
    for i in range(n):
        medians[i] = (window[width // 2] + window[(width - 1) // 2]) / 2
        if i + 1 < n:
            remove(window, width, values[i])
            insert(window, width - 1, values[i + width])


cdef Py_ssize_t place(const double* window, Py_ssize_t n, double value) noexcept nogil:
    """The index of the first element that is not less than `value`."""
    cdef Py_ssize_t low = 0, high = n, middle
    while low < high:
        middle = (low + high) // 2
        if window[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


cdef void insert(double* window, Py_ssize_t n, double value) noexcept nogil:
    cdef Py_ssize_t at = place(window, n, value)
    memmove(window + at + 1, window + at, <size_t>(n - at) * sizeof(double))
    window[at] = value


cdef void remove(double* window, Py_ssize_t n, double value) noexcept nogil:
    cdef Py_ssize_t at = min(place(window, n, value), n - 1)  # a NaN is nowhere in the order
    memmove(window + at, window + at + 1, <size_t>(n - at - 1) * sizeof(double))
