# The C surface of Pool. Its calls for other packages are in pool_calls.pxd.
from arenapy.buffer cimport Buffer
from arenapy.pool_growth cimport PoolGrowth

cdef class Pool(PoolGrowth):
    cdef readonly object trim_after
    cdef readonly str rounding
    cdef readonly bint debug
    # Streams of the user that were named last, each with its Stream and the pool of its blocks. It
    # is replaced, and never changed.
    cdef list lanes_named

    cdef Pool lane_of(self, object stream)
    cdef Buffer careful_alloc(self, object nbytes, object align, object stream)
    # pool_alloc but for its short way.
    cdef void* alloc_c(self, size_t nbytes, size_t align) noexcept nogil
    cdef void* grown_c(self, size_t nbytes, size_t align) noexcept
