"""Retained: objects that live until streams are done with their memory.

What lives here: arrays of other libraries, and memory of our own that had to go, that a stream may
still be at work on. What does not: blocks that are released (ordering), whose memory stays.

An object is kept before the driver is given work with it, so that nothing can fail in between. What
is over is let go of when something else is kept, when an allocator of CUDA memory looks for memory,
makes its statistics or ends, and by what has waited: `cuda.Stream.synchronize`, `cuda.Event`, and
copies and fills without a stream. Nothing calls back when a stream is done.

Thread-safety: everything here may be called from any thread, and by destructors. Dropping an object
may run any code, which may end up here again.
"""
cimport cython
from libc.stdint cimport uint64_t

from collections import deque

from arenapy.base.atomic cimport arenapy_cas, arenapy_store
from arenapy.cuda.driver cimport callable_, generation
from arenapy.cuda.stream_ref cimport FREE_TO_USE, StreamRef
from arenapy.cuda.fence cimport Fence, fence_of, work_of
from arenapy.base.sealed cimport seal

cdef enum:
    FEW = 16                 # objects that are looked at each time

cdef object retained = deque()       # Retained, roughly the oldest first
cdef uint64_t looking = 0            # atomic: is a thread at it?


@cython.final
cdef class Retained:
    """An object that a stream may be at work on. Internal."""

    def __cinit__(self):
        self.waits = []
        self.generation = generation


seal(Retained)


cdef Retained retain(object thing, void* by):
    cdef Retained one = Retained.__new__(Retained)
    one.thing, one.queueing, one.by = thing, True, by
    look(False)
    retained.append(one)
    return one


cdef void retain_until(Retained one, StreamRef stream) noexcept:
    try:
        one.waits.append(fence_of(stream))
    except Exception:
        one.waits.append(stream)             # `uses_done` tries again
    one.queueing = False


cdef void give_up(Retained one) noexcept:
    one.queueing = False


cdef void wait_for_those(void* by) noexcept:
    cdef Retained one
    for one in retained.copy():
        if one.by == by and callable_(one.generation):
            for use in one.waits:
                if isinstance(use, Fence):
                    (<Fence>use).wait(None)
    look(True)


cdef void park(object memory, list waits) noexcept:
    cdef Retained one = Retained.__new__(Retained)
    one.thing, one.waits = memory, waits
    retained.append(one)


cdef bint uses_done(Retained one) noexcept:
    cdef list left = []
    cdef StreamRef s
    if one.queueing or not callable_(one.generation):
        return one.generation != generation  # there is another driver, and nothing of that one
    for use in one.waits:
        if isinstance(use, StreamRef):
            s = <StreamRef>use
            if s.state() == FREE_TO_USE:     # else it, or what bars it, is being captured
                try:
                    use = work_of(s)
                except Exception:
                    pass
        if isinstance(use, StreamRef) or not (<Fence>use).passed():
            left.append(use)
    one.waits = left
    return not left


cdef void look(bint all) noexcept:
    cdef uint64_t nobody = 0
    cdef Py_ssize_t n = len(retained)
    cdef list over = []
    cdef Retained one
    if n == 0 or not arenapy_cas(&looking, &nobody, 1):
        return
    for _ in range(n if all else min(n, <Py_ssize_t>FEW)):
        try:
            one = <Retained>retained.popleft()
        except IndexError:
            break
        if uses_done(one):
            over.append(one)
        else:
            retained.append(one)
    arenapy_store(&looking, 0)
    over.clear()                             # which may run other code
