# A stream of our own.
from arenapy.cuda.stream cimport Kept


cdef class Stream(Kept):
    cdef void* handle
    cdef void* context
    cdef int generation
    cdef readonly int device_id
    cdef bint shut                   # for users; the handle is good to the last
    cdef object __weakref__

    cdef object open_handle(self)
