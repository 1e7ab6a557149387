# Sizes and alignments as Python gives them.
from cpython.object cimport PyObject

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
# What a constructor's debug=None means.
cdef bint debug_wanted(object debug) except -1
