"""The C calls of a Bump: what `cimport arenapy` gives, but for what is inline."""
from libc.stdint cimport uintptr_t

from arenapy.allocator.allocator cimport grown_in_c
from arenapy.bump.bump cimport Bump
from arenapy.bump.hot_path cimport rewind
from arenapy.bump.core cimport Frame
from arenapy.base.size_classes cimport MAX_BYTES


cdef void* bump_alloc_slow(Bump arena, size_t nbytes, size_t align) noexcept nogil:
    if arena.core.shut or nbytes > MAX_BYTES or align > MAX_BYTES:
        return NULL
    return grown_in_c(arena, nbytes, align)


cdef int bump_free(Bump arena, void* block, size_t nbytes) noexcept nogil:
    cdef uintptr_t start = <uintptr_t>block
    cdef uintptr_t end = start + nbytes + (nbytes == 0)
    cdef uintptr_t run_end
    cdef Py_ssize_t i
    if arena.core.move_back(start, end, arena.core.content, 0, nbytes == 0):
        return 0
    for i in range(arena.core.n_runs):
        run_end = arena.core.runs[i].end if i < arena.core.n_runs - 1 else arena.core.cursor
        if arena.core.runs[i].start <= start and end <= run_end:
            return 1
    arena.core.refuse(b"bump_free", block)
    return -1


cdef BumpMark bump_mark_slow(Bump arena) noexcept nogil:
    cdef Frame* frame = arena.core.push_frame() if not arena.core.shut else NULL
    if frame == NULL:
        return BumpMark(0, 0)
    arena.core.stamp += 1
    frame.c_marks = arena.core.stamp
    return BumpMark(frame.id, frame.c_marks)


cdef int bump_reset_slow(Bump arena, BumpMark mark) noexcept nogil:
    cdef Py_ssize_t f = arena.core.find_frame(mark.id)
    if arena.core.shut or mark.id == 0 or f < 0 or mark.serial > arena.core.frames[f].c_marks:
        return -1
    if rewind(arena.core, f) < 0:
        return -1
    arena.core.frames[f].c_marks = mark.serial
    return 0
