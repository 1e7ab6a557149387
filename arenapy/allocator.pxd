# What every allocator has in common, for the modules that implement one.
from arenapy.buffer cimport Buffer
from arenapy.mark cimport Mark
from arenapy.region cimport Region

cdef enum:
    HOST_ALIGN = 64          # a cache line, and an AVX-512 register


cdef class Allocator:
    cdef object __weakref__
    cdef list anchors        # of its core, to live as long as this

    # A block of n bytes, held from birth if asked; raises OutOfMemory, and then changes nothing.
    cdef Buffer block(self, Py_ssize_t n, Py_ssize_t align, bint held)
    # The beginning of a scope
    cdef Mark enter(self)
    # The end of a scope that began with `mark` (an arenapy.mark.Mark), by an exception or not.
    cdef int leave(self, Mark mark, bint failed) except -1


# Raise TypeError unless it is one.
cdef int check_source(object source) except -1
# The region that a source makes, checked to be one of at least n bytes.
cdef Region make_region(object source, Py_ssize_t n)
