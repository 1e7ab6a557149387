# The C surface of the bump algorithm. BumpCore is what Buffers keep alive; Bump (bump.pyx) is
# what the user holds. The layout is baked into downstream inlines: see ARENAPY_ABI.
from cpython.object cimport PyObject
from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from arenapy.base.assertion cimport arenapy_assert
from arenapy.buffer.block cimport Hold
from arenapy.base.interval_set cimport Extent, Extents
from arenapy.memory.children cimport Seen
from arenapy.memory.region cimport Region
from arenapy.allocator.allocator_core cimport AllocatorCore


# -- the arena
# The parts of an arena's regions that it may not hand out.

cdef class Arena(AllocatorCore):
    cdef bint unrecorded     # what other processes see could not be: it hands out nothing
    cdef Extents free        # what is free, but for what the allocator has taken to hand out next
    cdef Extents holes       # of the one region, which grows in place: there is no memory
    cdef Hold* retired       # held blocks that outlived a reset
    cdef Hold* ask_next      # in the leased list; NULL: begin with the first
    cdef size_t retired_bytes

    cdef int add_region(self, Region region, tuple regions, bint known) except -1
    cdef Py_ssize_t in_use(self, Py_ssize_t keep) noexcept nogil
    cdef list drop_regions(self, Py_ssize_t keep)
    cdef void free_or_lease(self, Hold* hold) noexcept nogil
    cdef void lease(self, Hold* hold) noexcept nogil
    cdef void carve_leases(self, uintptr_t start, uintptr_t end, Py_ssize_t region) noexcept nogil
    cdef void settle_leases(self, Py_ssize_t most) noexcept nogil
    cdef void settle_region(self, Py_ssize_t index) noexcept nogil
    cdef void count_as_free(self, Py_ssize_t index, bint yes) noexcept nogil
    cdef void poison_free(self, uintptr_t start, uintptr_t end, Py_ssize_t region) noexcept nogil


# -- core

# The allocations since a mark (the base frame: since the last full reset).
cdef struct Frame:
    uint64_t content         # tag of the Buffers allocated in it; new after every reset to it
    uint64_t id              # carried by its marks; grows along the frames
    Py_ssize_t run           # the run that was current at the mark, and where the cursor stood
    uintptr_t cursor
    size_t live              # BumpCore.live at the mark
    Hold* holds              # held blocks allocated in it, not retired
    # Serials: of its newest C mark, of its newest Mark; or of an older mark of the other kind, to
    # which it was reset since, so that newer ones have ended. 0: none, for nobody tells when C
    # marks end.
    uint64_t c_marks
    uint64_t python_marks


# The figures of stats() and of the properties; bytes.
cdef struct Figures:
    size_t capacity, used, live, free, largest_free, retired, leased, peak, metadata
    Py_ssize_t held, marks, regions
    uint64_t total, bytes    # allocations ever


cdef class BumpCore(Arena):
    # The current run is [runs[n_runs - 1].start, cursor); [cursor, limit) is free and next.
    cdef uintptr_t cursor    # runs[n_runs - 1].start <= cursor <= limit
    cdef uintptr_t limit
    # live and total are kept apart: side by side, compilers make one vector of them, whose store
    # the next call's load waits for (2.8 ns a call instead of 1.4).
    cdef size_t live         # bytes of the blocks in the runs; what else is there is padding
    cdef uint64_t content    # frames[n_frames - 1].content
    cdef uint64_t total      # allocations ever
    cdef uint64_t freed      # bytes that were live and are no more
    cdef uint64_t came_back  # how often bytes came back, but for resets, which `stamp` counts
    cdef void* ended_list    # atomic: Holds whose Buffers died, newest first; and `note`
    cdef uint64_t stamp      # the last content or id given out
    # Bytes handed out contiguously, oldest first; n_runs >= 1. Of all but the last, those in which
    # there is nothing have a frame: frames[i].run. So n_runs <= n_frames + blocks not freed + 1.
    cdef Extent* runs
    cdef Py_ssize_t n_runs, cap_runs
    cdef size_t before       # bytes of all runs but the last
    cdef Frame* frames       # n_frames >= 1; frames[0] is the base
    cdef Frame* top          # &frames[n_frames - 1]
    cdef Py_ssize_t n_frames, cap_frames
    cdef size_t peak_bytes
    cdef Py_ssize_t n_held   # holds that have not been drained
    # Nothing was retired since all that is free was last in one piece: one run, and no gaps.
    cdef bint one_piece
    cdef bint fast_rewind    # one_piece, not shut, not debug, no leases: rewind() may be short
    cdef PyObject* last_mark   # the newest live Mark, borrowed: a list through Mark.older
    cdef uint64_t live_mark  # its id; 0: none
    cdef Hold note           # of no block: other processes may see bytes from now on
    cdef uint64_t noted      # atomic: 1 while that is in `ended_list`
    # The thread whose call grows or shortens the one region in place, or 0. The call may run code
    # that uses the arena, which then cannot grow: two calls would give the same bytes memory, and
    # the one that fails take it away. In a forked child, the call of the forking thread goes on.
    cdef uint64_t growing

    cdef int open(self, Region region) except -1
    # Take note of Buffers that died, and of bytes that other processes and streams let go of:
    # `wait` as in `StreamHooks.collect`. Takes the lock.
    cdef int reclaim(self, Py_ssize_t wait) except -1
    cdef Figures figures(self)
    cdef Figures figures_now(self) noexcept
    cdef str full(self, size_t n, size_t align, object max_bytes)
    cdef size_t free_bytes(self) noexcept nogil
    cdef size_t largest_free(self) noexcept nogil
    cdef void* arena_alloc_slow(self, size_t n, size_t align, uint32_t* pad) noexcept nogil
    cdef void drain(self) noexcept nogil
    cdef void push_ended(self, Hold* hold) noexcept nogil
    cdef void settle_forks(self) noexcept nogil
    cdef bint is_last(self, uintptr_t end, uint64_t content) noexcept nogil
    cdef void rejoin_run(self, uintptr_t end) noexcept nogil
    cdef bint move_back(self, uintptr_t start, uintptr_t end, uint64_t content, uint32_t pad,
                        bint empty) noexcept nogil
    cdef Frame* push_frame(self) noexcept nogil
    cdef void prune(self) noexcept nogil
    cdef Py_ssize_t find_frame(self, uint64_t id) noexcept nogil
    cdef Py_ssize_t frame_of_mark(self, Mark mark) noexcept
    cdef void no_hits(self) noexcept nogil
    cdef Py_ssize_t survivors(self, Py_ssize_t f) noexcept nogil
    cdef int rewind_slow(self, Py_ssize_t f) noexcept nogil
    # Shall alloc() take its short way? It does while there are dead Buffers to take.
    cdef void keep_dead_buffers(self, bint short) noexcept
    # internal
    cdef void push_run(self, uintptr_t start, Py_ssize_t region) noexcept nogil
    cdef void drop_run(self) noexcept nogil
    cdef void continue_at(self, uintptr_t at, Py_ssize_t region) noexcept nogil
    cdef void place(self) noexcept nogil
    cdef bint run_is_spare(self) noexcept nogil
    cdef void pop_run(self) noexcept nogil
    cdef bint is_empty(self, Frame* frame) noexcept nogil
    cdef void update_fast_path(self) noexcept nogil
    cdef Py_ssize_t frame_of(self, uint64_t content) noexcept nogil


# The invariants of the fields above that take a few instructions to check (`check` checks all).
# With the lock held, and between operations.
cdef inline bint bump_is_valid(BumpCore c) noexcept nogil:
    cdef uintptr_t start = c.runs[c.n_runs - 1].start
    arenapy_assert(1 <= c.n_runs, b"1 <= n_runs")
    arenapy_assert(c.n_runs <= c.cap_runs, b"n_runs <= cap_runs")
    arenapy_assert(1 <= c.n_frames, b"1 <= n_frames")
    arenapy_assert(c.n_frames <= c.cap_frames, b"n_frames <= cap_frames")
    arenapy_assert(start <= c.cursor, b"the current run begins at or before the cursor")
    arenapy_assert(c.cursor <= c.limit, b"cursor <= limit")
    arenapy_assert(c.top == &c.frames[c.n_frames - 1], b"top is the last frame")
    arenapy_assert(c.content == c.top.content, b"content is the content of the last frame")
    arenapy_assert(c.content <= c.stamp, b"stamp is the last content or id given out")
    arenapy_assert(c.top.run < c.n_runs, b"the run of the last frame is there")
    arenapy_assert(
        c.top.run < c.n_runs - 1 or c.top.cursor <= c.cursor,
        b"the cursor stands at or behind the last mark")
    arenapy_assert(c.top.live <= c.live, b"what was live at the last mark is")
    arenapy_assert(c.live <= c.before + (c.cursor - start), b"live bytes lie in the runs")
    arenapy_assert(c.one_piece or not c.fast_rewind, b"fast_rewind only if one_piece")
    return True


# -- marks, as Python sees them
# Marks as Python objects. (In C a mark is a struct: BumpMark in bump.pxd.)

cdef class Mark:
    cdef BumpCore core
    cdef uint64_t id          # of its frame
    cdef uint64_t serial      # among the marks of the frame, those in C included
    cdef bint valid           # not ended; then it is in the list that starts at core.last_mark
    cdef PyObject* older      # borrowed, as a mark leaves the list before it dies
    cdef PyObject* newer


# With the core's lock held.
cdef void begin_mark(Mark mark, BumpCore core, Frame* frame) noexcept
cdef void end_mark(PyObject* m) noexcept
