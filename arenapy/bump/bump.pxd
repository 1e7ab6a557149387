# The C surface of Bump. (Calls without the GIL: c_api.pxd.)
from arenapy.base.abi cimport ARENAPY_ABI
from libc.stdint cimport uint64_t

from arenapy.allocator.allocator cimport Allocator
from arenapy.buffer.buffer cimport Buffer
from arenapy.bump.core cimport BumpCore, Mark


cdef class Bump(Allocator):
    cdef readonly bint strict
    cdef readonly bint debug
    cdef readonly object source
    cdef readonly object max_bytes
    cdef BumpCore core

    cdef Buffer general_alloc(self, object nbytes, object align, object stream)
    cdef int rewind_to(self, Mark mark, bint strict) except -1
    cdef Mark enter(self)
    # The end of a scope that began with `mark`, by an exception or not.
    cdef int leave(self, Mark mark, bint failed) except -1
    cdef int rewind_watched(self, Mark mark, bint strict) except -1


cdef class Scope:
    cdef readonly Bump arena
    cdef Mark mark                # None: not entered
