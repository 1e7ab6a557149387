# Sizes and alignments as Python gives them.
cdef Py_ssize_t as_size(object value, str what) except -1
cdef Py_ssize_t as_align(object value) except -1
