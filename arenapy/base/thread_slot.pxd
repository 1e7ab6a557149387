# The numbers of threads, for what is kept by thread; in assertion builds, the locks that a thread
# holds.
from libc.stdint cimport int64_t, uint64_t

cdef enum:
    N_SLOTS = 64             # threads that have a number of their own at once

# The number of this thread, from 1 up, which no other living thread has. It is the lowest one up to
# N_SLOTS that is free when the thread first asks. Once the thread has ended, another one gets the
# number and what is kept under it.
cdef uint64_t thread_number() noexcept nogil
# Where the thread's slot lies, from its thread pointer: the same for all threads.
cdef int64_t slot_offset() noexcept nogil

cdef extern from "Python.h":
    # `threading.get_ident()`. In a forked child, the thread that forked has the same.
    uint64_t this_thread "PyThread_get_thread_ident"() noexcept nogil

cdef extern from *:
    """
    #ifndef ARENAPY_SLOT_H
    #define ARENAPY_SLOT_H
    #include <stdint.h>
    static inline uint64_t arenapy_slot_at(int64_t offset) {
    #ifdef __x86_64__
        uint64_t slot;
        __asm__("movq %%fs:(%1), %0" : "=r"(slot) : "r"(offset));
        return slot;
    #else
        return *(uint64_t *)((char *)__builtin_thread_pointer() + offset);
    #endif
    }
    #endif
    """
    # The slot of this thread: its number, or 0 if that is above N_SLOTS or was never asked for.
    # `offset` is slot_offset(), which whoever asks often keeps. (Two instructions. A function of
    # another module would be called by a pointer, and ask the dynamic linker.)
    uint64_t slot_at "arenapy_slot_at" (int64_t offset) noexcept nogil


# The slot that a thread shares if it has none of its own.
cdef inline int cache_number() noexcept nogil:
    return <int>((thread_number() - 1) % N_SLOTS + 1)


# All locks, in their order: who holds one takes only those below it. docs/internals.md says what
# each guards and what may run under it. A lock that was given no rank is as the last one.
cdef enum:
    RANK_REGISTRY = 1
    RANK_CLAIMS = 2
    RANK_OWNER = 3
    RANK_LEDGER = 4
    RANK_GROWTH = 5          # of an array
    RANK_BIRTHS = 6
    RANK_CACHE = 7           # a thread's cache or stack; several only under RANK_BIRTHS, as
    RANK_DEPOT = 8           # of these
    RANK_HEAP = 9
    RANK_STREAMS = 10        # what other streams of a device's pool have
    RANK_CHILDREN = 11       # what forked children see
    RANK_LAST = 15           # nothing is taken under it: a recording's

# Called in assertion builds, where they abort with a message if the order is not kept.
cdef void lock_taken(int rank) noexcept nogil
cdef void lock_released(int rank) noexcept nogil
# A fork takes the locks of one core after the other's: from here on as if it held the registry and
# the claims alone.
cdef void next_core_locks() noexcept nogil
# No lock is held, before what may take long or run other code.
cdef void no_lock_is_held() noexcept nogil
