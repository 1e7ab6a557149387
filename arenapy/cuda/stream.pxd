# A stream of our own.
from arenapy.cuda.stream_ref cimport OwnStream


cdef class Stream(OwnStream):
    cdef object __weakref__
