# How an arena grows.
from libc.stdint cimport uint64_t

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
cdef enum:
    GROWN
    GROWN_NOT                # it is not the newest, or has changed
    GROWN_TO_THE_END         # not grown: the memory ends there
    GROWN_TOO_LATE           # not grown: its streams are to be told again

# It changes when bytes become free.
cdef uint64_t times_freed(BumpCore c) noexcept
# Grow a block in place. If it has uses, they must be `told`, and nothing was freed since
# `times_freed` was `freed`: bytes that others used since are not free for its streams.
cdef int grow_last(BumpCore c, Buffer buffer, Py_ssize_t n, list told, uint64_t freed) noexcept
cdef list holes_of(BumpCore c)
# Give back free memory: see growth.pyx.
cdef int give_back_growth(
    BumpCore c, object source, Py_ssize_t regions, size_t capacity, size_t size, list holes
) except -1
