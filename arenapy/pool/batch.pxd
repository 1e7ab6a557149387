# A list of blocks that are taken from a pool, and put back if not all of them can be.
from libc.stdint cimport int64_t

from arenapy.pool.thread_cache cimport Asked, Entry
from arenapy.pool.core cimport PoolCore
from arenapy.base.size_classes cimport N_CLASSES


cdef class BlockBatch:
    cdef Py_ssize_t n
    cdef Py_ssize_t done                 # so many of the entries are blocks
    cdef size_t* sizes                   # the caller's to fill in
    cdef Py_ssize_t filled               # by `repeat`
    cdef Entry* entries
    cdef Asked asked                     # what taking them was counted as, and peaks from before
    cdef int64_t peak
    cdef int64_t peaks[N_CLASSES]

    cdef void repeat(self, size_t size, Py_ssize_t count) noexcept nogil
    cdef void begin(self, PoolCore core) noexcept nogil
    # Take more of them, as many as there is memory for; how many those were.
    cdef Py_ssize_t take(self, PoolCore core, bint miss) noexcept nogil
    # As if none had been taken.
    cdef void undo(self, PoolCore core) noexcept nogil
