# The numbers of threads, for what is kept by thread; in assertion builds, the locks that a thread
# holds.
from libc.stdint cimport int64_t

cdef enum:
    MAX_CACHES = 8           # caches by thread of an allocator: those of numbers below it

# Of this thread: 0 and up, and no other living thread's. The lowest free one below 64, if there is
# one, when it is first asked for; another thread gets it, and what is kept under it, once this one
# has ended.
cdef int64_t thread_number() noexcept nogil


cdef inline int cache_number() noexcept nogil:
    return <int>(thread_number() % MAX_CACHES)


# All locks, in their order: who holds one takes only those below it. docs/internals.md says what
# each guards and what may run under it. A lock that was given no rank is as the last one.
cdef enum:
    RANK_REGISTRY = 1
    RANK_CLAIMS = 2
    RANK_OWNER = 3
    RANK_LEDGER = 4
    RANK_GROWTH = 5          # of an array
    RANK_BIRTHS = 6
    RANK_CACHE = 7           # a thread's cache or stack; several only under RANK_BIRTHS
    RANK_DEPOT = 8
    RANK_HEAP = 9
    RANK_CHILDREN = 10       # what forked children see
    RANK_LAST = 15           # nothing is taken under it: a recording's

# Called in assertion builds, where they abort with a message if the order is not kept.
cdef void lock_taken(int rank) noexcept nogil
cdef void lock_released(int rank) noexcept nogil
# A fork takes the locks of one core after the other's: from here on as if it held the registry and
# the claims alone.
cdef void next_core_locks() noexcept nogil
# No lock is held, before what may take long or run other code.
cdef void no_lock_is_held() noexcept nogil
