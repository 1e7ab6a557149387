# How an arena grows.
from arenapy.buffer.block cimport Hold
from arenapy.buffer.buffer cimport Buffer
from arenapy.bump.core cimport BumpCore

# Add a region with room for the request, or raise OutOfMemory. `max_bytes` None: it may not grow.
cdef int grow_arena(BumpCore c, object source, object max_bytes, size_t n, size_t align) except -1
# The same until there is room, then complete the block's Buffer, held if there is a hold, which is
# taken over in any case.
cdef int grow_for(BumpCore c, object source, object max_bytes, Buffer b, Py_ssize_t n,
                  Py_ssize_t align, Hold* hold) except -1
