# Marks as Python objects. (In C a mark is a struct: see c_api.pxd.)
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t

from arenapy.bump.core cimport BumpCore, Frame


cdef class Mark:
    cdef BumpCore core
    cdef uint64_t id          # of its frame
    cdef bint valid           # not ended; then it is in the list that starts at core.last_mark
    cdef PyObject* older      # borrowed, as a mark leaves the list before it dies
    cdef PyObject* newer


# With the core's lock held.
cdef void begin_mark(Mark mark, BumpCore core, Frame* frame) noexcept
cdef void end_mark(Mark mark) noexcept
