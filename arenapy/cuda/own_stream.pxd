# A stream of our own.
from arenapy.cuda.stream cimport OwnStream


cdef class Stream(OwnStream):
    cdef object __weakref__
