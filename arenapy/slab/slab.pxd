# The C surface of Slab. Its calls for other packages are in c_api.pxd.
from libc.stdint cimport uint64_t

from arenapy.allocator.allocator cimport Allocator
from arenapy.buffer.buffer cimport Buffer
from arenapy.memory.region cimport Region
from arenapy.slab.core cimport SlabCore


cdef class Slab(Allocator):
    cdef SlabCore core
    cdef readonly object source
    cdef readonly object max_count
    cdef readonly bint debug
    cdef uint64_t most               # items

    cdef Buffer general_alloc(self, object nbytes, object align, object stream)
    cdef int fits(self, Py_ssize_t n, Py_ssize_t align) except -1
    # An item for which the source is asked.
    cdef char* source_alloc(self, size_t nbytes, uint64_t* name) except NULL
    # Get memory such that so many items are free, or some of them; or see another thread get it.
    cdef int more(self, uint64_t wanted) except -1
    cdef Region region_for(self, uint64_t items)
