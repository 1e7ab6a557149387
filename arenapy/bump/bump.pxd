# The C surface of Bump; at the end, the calls for other packages.
from libc.stdint cimport uint32_t, uint64_t

from arenapy.base.abi cimport ARENAPY_ABI
from arenapy.allocator.allocator cimport Allocator
from arenapy.buffer.buffer cimport Buffer
from arenapy.bump.core cimport BumpCore, Frame, Mark
from arenapy.bump.hot_path cimport arena_alloc, rewind


cdef class Bump(Allocator):
    cdef readonly bint strict
    cdef readonly bint debug
    cdef readonly object source
    cdef readonly object max_bytes
    cdef BumpCore core
    cdef object grows_from        # its source, or the InPlace that stands for it

    cdef Buffer general_alloc(self, object nbytes, object align, object stream)
    cdef int rewind_to(self, Mark mark, bint strict) except -1
    cdef Mark enter(self)
    # The end of a scope that began with `mark`, by an exception or not.
    cdef int leave(self, Mark mark, bint failed) except -1
    cdef int rewind_watched(self, Mark mark, bint strict) except -1


cdef class Scope:
    cdef readonly Bump arena
    cdef Mark mark                # None: not entered


# -- in C
# nogil calls for modules that `cimport arenapy`.
#
# Thread-safety: none. The caller owns the arena for the time, as with any bump
# allocator; only Buffers may die on other threads meanwhile.
#
# These hand out raw memory: a reset takes it back although it is in use. Only Buffers protect
# against that.

# A position, valid until a reset to an older one.
cdef struct BumpMark:
    uint64_t id               # of its frame
    uint64_t serial           # among the marks of that frame

# Grows if max_bytes allows it (takes the GIL for that), else NULL.
cdef void* bump_alloc_slow(Bump arena, size_t nbytes, size_t align) noexcept nogil
# Free a block by moving back over it. 0: done. 1: it is not the newest, or a mark is newer; a
# reset will free it. -1: not a block in use (freed twice, or of another arena).
cdef int bump_free(Bump arena, void* block, size_t nbytes) noexcept nogil
cdef int bump_reset_slow(Bump arena, BumpMark mark) noexcept nogil
cdef BumpMark bump_mark_slow(Bump arena) noexcept nogil


cdef inline void* bump_alloc(Bump arena, size_t nbytes, size_t align) noexcept nogil:
    """nbytes at a multiple of align (a power of two up to 2 MiB); NULL: exhausted, unchanged."""
    cdef uint32_t pad
    cdef void* block = arena_alloc(arena.core, nbytes, align, &pad)
    return block if block != NULL else bump_alloc_slow(arena, nbytes, align)


# The core as an argument is loaded once; through the arena, after every store.

cdef inline bint mark_again(BumpCore c, BumpMark* mark) noexcept nogil:
    """One more mark of the last frame, if nothing was allocated since its newest."""
    cdef Frame* frame = c.top
    if not (c.fast_rewind and frame.cursor == c.cursor and frame.holds == NULL
            and frame.run == c.n_runs - 1 and frame.id):
        return False
    c.stamp += 1
    frame.c_marks = c.stamp
    mark[0] = BumpMark(frame.id, frame.c_marks)
    return True


cdef inline bint is_newest(BumpCore c, BumpMark mark) noexcept nogil:
    """Is this the newest mark of all, in C or Python?"""
    return (mark.id and c.top.id == mark.id and c.top.c_marks == mark.serial
            and c.top.python_marks <= mark.serial and not c.shut)


cdef inline BumpMark bump_mark(Bump arena) noexcept nogil:
    """The current position. id 0 (never valid): no memory for it."""
    cdef BumpMark mark
    if mark_again(arena.core, &mark):
        return mark
    return bump_mark_slow(arena)


cdef inline int bump_reset(Bump arena, BumpMark mark) noexcept nogil:
    """Free all since the mark that nobody holds. 0: done; -1: a stale mark, nothing changed."""
    if is_newest(arena.core, mark):
        return rewind(arena.core, arena.core.n_frames - 1)
    return bump_reset_slow(arena, mark)
