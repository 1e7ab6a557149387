# The C surface of Bump. (Calls without the GIL: bump_calls.pxd.)
from arenapy.abi cimport ARENAPY_ABI
from libc.stdint cimport uint64_t

from arenapy.allocator cimport Allocator
from arenapy.buffer cimport Buffer
from arenapy.bump_core cimport BumpCore
from arenapy.mark cimport Mark


cdef class Bump(Allocator):
    cdef readonly bint strict
    cdef readonly bint debug
    cdef readonly object source
    cdef readonly object max_bytes
    cdef BumpCore core

    cdef Buffer careful_alloc(self, object nbytes, object align, object stream)
    cdef int rewind_to(self, Mark mark, bint strict) except -1
    cdef int rewind_watched(self, Mark mark, bint strict) except -1
