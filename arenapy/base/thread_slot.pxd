# The numbers of threads, for what is kept by thread.
from libc.stdint cimport int64_t

cdef enum:
    MOST_CACHES = 8          # caches by thread of an allocator: those of numbers below it

# Of this thread: 0 and up, and no other living thread's. The lowest free one below 64, if there is
# one, when it is first asked for; another thread gets it, and what is kept under it, once this one
# has ended.
cdef int64_t thread_number() noexcept nogil


cdef inline int cache_number() noexcept nogil:
    return <int>(thread_number() % MOST_CACHES)
