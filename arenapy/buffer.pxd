# The C surface of Buffer.
from arenapy.block cimport Block, Keeper


# A root Buffer is one block of an allocator, or one range of a region. It adds nothing to the
# state of a Block.
cdef class Buffer(Block):
    pass


# A slice or a typed view: shares the root's bytes and state, and adds a layout (C order).
cdef class View(Buffer):
    cdef int ndim
    cdef Py_ssize_t* dims                # ndim lengths, then ndim strides in bytes
    cdef readonly tuple shape
    cdef Py_ssize_t itemsize
    cdef object descr                    # the NumPy dtype; None: plain bytes
    cdef str typestr                     # NumPy's, e.g. "<f4"
    cdef bytes format                    # PEP 3118; None: the type has no such code


# An open, unheld root. The caller fills in ptr, tag and pad, at once: they are not set.
cdef Buffer new_block(Keeper keeper, Py_ssize_t size)
# An open, unheld root over a range of a region.
cdef Buffer new_range(Keeper keeper, char* ptr, Py_ssize_t size)
