# One thread at a time, for a few steps that wait for nobody and run no code of others.
from libc.stdint cimport uint64_t
from posix.unistd cimport getpid

from arenapy.base.atomic cimport (
    ARENAPY_GIL, arenapy_cas, arenapy_finalizing, arenapy_store,
)

cdef extern from "<sched.h>" nogil:
    int sched_yield()


# With a GIL, that is enough. Without one, a critical section would be given up while its thread
# waits for another lock, such as that of a dict or a class; and a lock of Python's would raise the
# exceptions of signals. `busy` is the process of the thread whose turn it is: a fork may leave that
# thread behind. False: the interpreter ends, and whoever has it may never run again.
cdef inline bint begin_turn(uint64_t* busy) noexcept:
    cdef uint64_t holder = 0, here
    if ARENAPY_GIL:
        return True
    here = getpid()
    while not arenapy_cas(busy, &holder, here):
        if holder != here:
            continue
        if arenapy_finalizing():
            return False
        holder = 0
        with nogil:
            sched_yield()
    return True


cdef inline void end_turn(uint64_t* busy, bint begun) noexcept:
    if not ARENAPY_GIL and begun:
        arenapy_store(busy, 0)
