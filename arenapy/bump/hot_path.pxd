# The quick way of a Bump: `take` moves the cursor forward, `rewind` moves it back.
#
# Requests that do not fit go to `arena_alloc_slow`, which looks for another extent. Blocks that
# are held, or were moved since the mark, go to `rewind_slow`, which retires the survivors.
from libc.stdint cimport uint32_t, uintptr_t

from arenapy.allocator.allocator_core cimport forbid, permit
from arenapy.base.assertion cimport arenapy_assert
from arenapy.base.atomic cimport arenapy_load_ptr
from arenapy.bump.core cimport BumpCore, Frame, bump_is_valid


# Bytes of the runs: live blocks and padding.
cdef inline size_t used(BumpCore c) noexcept nogil:
    return c.before + (c.cursor - c.runs[c.n_runs - 1].start)


cdef inline void note_peak(BumpCore c) noexcept nogil:
    if used(c) > c.peak_bytes:
        c.peak_bytes = used(c)


# Before anything is freed, and now and then: what ended on other threads, and forks.
cdef inline void catch_up(BumpCore c) noexcept nogil:
    if arenapy_load_ptr(&c.ended_list) != NULL:
        c.drain()


# The hot path: everything a hit needs, and nothing else.
cdef inline void* arena_alloc(BumpCore c, size_t n, size_t align, uint32_t* pad) noexcept nogil:
    cdef uintptr_t start = (c.cursor + (align - 1)) & ~<uintptr_t>(align - 1)
    cdef size_t size = n + (n == 0)      # a 0-byte block has an address of its own
    arenapy_assert(bump_is_valid(c), b"the arena is valid")
    if start <= c.limit and size <= c.limit - start:
        pad[0] = <uint32_t>(start - c.cursor)
        c.live += n
        c.total += 1
        c.cursor = start + size
        permit(c, start, n)
        arenapy_assert(start & (align - 1) == 0, b"a block is aligned as asked")
        arenapy_assert(bump_is_valid(c), b"the arena is valid")
        return <void*>start
    return c.arena_alloc_slow(n, align, pad)


# Rewind to frame `f`: by moving the cursor, if nothing held or moved since. 0, or -1 (no memory
# for the bookkeeping; nothing changed).
cdef inline int rewind(BumpCore c, Py_ssize_t f) noexcept nogil:
    cdef Frame* frame = &c.frames[f]
    arenapy_assert(bump_is_valid(c), b"the arena is valid")
    arenapy_assert(f < c.n_frames, b"a reset is to a frame that is there")
    if (c.fast_rewind and frame == c.top and frame.holds == NULL and frame.run == c.n_runs - 1
            and c.ended_list == NULL):
        if c.cursor != frame.cursor:         # else nothing is there to free, or to close
            note_peak(c)
            forbid(c, frame.cursor, c.cursor)
            c.cursor = frame.cursor
            c.freed += c.live - frame.live
            c.live = frame.live
            c.stamp += 1
            c.content = frame.content = c.stamp
        arenapy_assert(bump_is_valid(c), b"the arena is valid")
        arenapy_assert(c.cursor == frame.cursor, b"a reset moves the cursor to the mark")
        arenapy_assert(c.live == frame.live, b"a reset leaves what was live at the mark")
        return 0
    return c.rewind_slow(f)
