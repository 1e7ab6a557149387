# Arrays over Buffers. No NumPy name may appear here: a downstream `cimport arenapy` would
# then need NumPy's headers and import_array().
from arenapy.buffer.buffer cimport Buffer

cdef enum:
    MAX_DIMS = 64        # NumPy's limit, and the buffer protocol's

# The layout of an array to be made.
cdef struct Spec:
    Py_ssize_t nbytes    # product of dims and item size, overflow-checked
    int ndim
    bint fortran
    Py_ssize_t dims[64]

# Fills `spec` and returns the dtype; raises ValueError or TypeError and changes nothing else.
cdef object parse(object shape, object dtype, object order, Spec* spec)
# The array over an open Buffer that is already held, from `ptr` in it; its base is the Buffer.
cdef object wrap(Buffer buffer, char* ptr, object dtype, Spec* spec)
# numpy.asarray(array_like), and the layout of its copy; raises as `parse` does.
cdef object as_array(object array_like, Spec* spec)
# target[...] = source, of one shape.
cdef int assign(object target, object source) except -1
