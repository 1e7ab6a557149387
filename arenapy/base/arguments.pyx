"""Sizes and alignments as Python gives them, checked; errors name the value and the range."""
import os

cdef extern from "Python.h":
    object PyNumber_Index(object o)
    Py_ssize_t PyLong_AsSsize_t(object o) except? -1


cdef Py_ssize_t as_size(object value, str what) except -1:
    """A count of bytes: an integer from 0 to the largest Py_ssize_t."""
    cdef object index
    cdef Py_ssize_t n
    try:
        index = PyNumber_Index(value)
    except TypeError:
        raise TypeError(
            f"{what}={value!r} is of type {type(value).__name__}; give a whole number of bytes"
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
