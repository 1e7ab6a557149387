# Bump in C: nogil calls for modules that `cimport arenapy`.
#
# Thread-safety: none. Whoever calls these owns the arena for the time, as with any bump
# allocator; only Buffers may die on other threads meanwhile.
#
# What these hand out is raw: a reset takes it back whoever still looks. Not to dangle is what
# Buffers are for.
from libc.stdint cimport uint32_t, uint64_t

from arenapy.bump cimport Bump
from arenapy.bump_core cimport Frame, rewind, take

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
    cdef void* block = take(arena.core, nbytes, align, &pad)
    return block if block != NULL else bump_alloc_slow(arena, nbytes, align)


cdef inline BumpMark bump_mark(Bump arena) noexcept nogil:
    """The current position. id 0 (never valid): no memory for it."""
    cdef Frame* frame = arena.core.top
    if (arena.core.plain and frame.cursor == arena.core.cursor and frame.holds == NULL
            and frame.run == arena.core.n_runs - 1 and frame.id):
        arena.core.stamp += 1        # the frame is empty: one more mark of it
        frame.c_marks = arena.core.stamp
        return BumpMark(frame.id, frame.c_marks)
    return bump_mark_slow(arena)


cdef inline int bump_reset(Bump arena, BumpMark mark) noexcept nogil:
    """Free all since the mark that nobody holds. 0: done; -1: a stale mark, nothing changed."""
    cdef Frame* frame = arena.core.top
    if (mark.id and frame.id == mark.id and frame.c_marks == mark.serial
            and arena.core.live_mark <= mark.id and not arena.core.shut):
        return rewind(arena.core, arena.core.n_frames - 1)
    return bump_reset_slow(arena, mark)
