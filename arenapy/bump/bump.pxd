# The C surface of Bump. (Calls without the GIL: c_api.pxd.)
from libc.stdint cimport uint64_t

from arenapy.base.abi cimport ARENAPY_ABI
from arenapy.allocator.allocator cimport Allocator
from arenapy.buffer.buffer cimport Buffer
from arenapy.bump.core cimport BumpCore, Mark
from arenapy.buffer.block cimport Hold


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


# -- growth
# How an arena grows.

# Add a region with room for the request, or raise OutOfMemory. `max_bytes` None: it may not grow.
cdef int grow_arena(BumpCore c, object source, object max_bytes, size_t n, size_t align) except -1
# The same until there is room, then complete the block's Buffer, held if there is a hold, which is
# taken over in any case.
cdef int grow_for(BumpCore c, object source, object max_bytes, Buffer b, Py_ssize_t n,
                  Py_ssize_t align, Hold* hold) except -1
