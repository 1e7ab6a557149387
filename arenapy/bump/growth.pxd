# How an arena grows.
from arenapy.bump.core cimport BumpCore
from arenapy.buffer.block cimport Hold
from arenapy.buffer.buffer cimport Buffer
from arenapy.memory.region cimport Region


cdef class InPlace:
    cdef object source
    cdef object reservation
    cdef Region its_region
    cdef size_t room, ready, nbytes, page

    cdef size_t with_memory(self, size_t nbytes) noexcept
    cdef int extend(self, size_t nbytes) except -1
    cdef int shorten(self, size_t nbytes, object stream) except -1
    cdef int commit(self, size_t offset, size_t nbytes) except -1
    cdef int decommit(self, size_t offset, size_t nbytes, object stream) except -1


cdef InPlace in_place(object source, size_t room)

# Add room for the request, or raise OutOfMemory. `max_bytes` None: it may not grow.
cdef int grow_arena(BumpCore c, object source, object max_bytes, size_t n, size_t align) except -1
# In place; if `here`, for n bytes at the cursor.
cdef int grow_in_place(BumpCore c, InPlace place, object max_bytes, size_t n, size_t align,
                       bint here) except -1
# The same until there is room, then complete the block's Buffer, held if there is a hold, which is
# taken over in any case.
cdef int grow_for(BumpCore c, object source, object max_bytes, Buffer b, Py_ssize_t n,
                  Py_ssize_t align, Hold* hold) except -1
# Grow a block in place. False: it is not the newest, or (`at_end`) the memory ends there.
cdef bint grow_last(BumpCore c, Buffer buffer, Py_ssize_t n, bint* at_end) noexcept
cdef list holes_of(BumpCore c)
# Give back free memory: see growth.pyx.
cdef int give_back_growth(
    BumpCore c, object source, Py_ssize_t regions, size_t capacity, size_t size, list holes
) except -1
