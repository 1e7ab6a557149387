# The C surface of the blocks of NumPy's arrays.
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t

# Counters of allocations that fell back to libc, all atomic.
cdef struct Fallbacks:
    uint64_t count           # ever
    uint64_t nbytes          # ever
    uint64_t live            # blocks that are alive

# The data of the callbacks: the pool and the policy.
cdef struct Handler:
    PyObject* core           # the PoolCore, owned
    PyObject* counts         # the Counts, owned
    bint fallback            # on_full="system"


cdef class Counts:
    cdef Fallbacks system    # the pool was exhausted, or closed
    cdef Fallbacks lazy      # large zeros


# A block, or NULL, whatever that takes; the end of one, whoever's it is.
cdef void* general_alloc(Handler* h, size_t n) noexcept nogil
cdef void general_free(Handler* h, void* block) noexcept nogil
cdef void* zeros(Handler* h, size_t count, size_t size) noexcept nogil
cdef void* resized(Handler* h, void* block, size_t n) noexcept nogil
