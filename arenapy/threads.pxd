# The numbers of threads, for what is kept by thread.

cdef enum:
    MOST_FRONTS = 8          # caches by thread of an allocator: those of numbers below it

# Of this thread: 0 and up, no other living thread's below 64. The lowest free one when it is first
# asked for; another thread may have it, and what is kept under it, once this one has ended.
cdef int thread_number() noexcept nogil


cdef inline int front_number() noexcept nogil:
    return thread_number() % MOST_FRONTS
