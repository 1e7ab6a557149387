# The segments of a page heap: where its address space and its memory begin and end.
from libc.stdint cimport uint32_t

from arenapy.pool.page_heap cimport Pages
from arenapy.memory.region cimport Region


cdef class Segments(Pages):
    # Growth and shrinking: begin_* and end_* with heap_lock held, the work between them without.
    cdef uint32_t begin_growth(
        self, size_t pages, size_t wished, size_t most, size_t* missing) noexcept nogil
    cdef bint grow_map(self, size_t pages) noexcept nogil
    cdef void end_growth(self, uint32_t id, bint grown, uint32_t tick) noexcept nogil
    cdef uint32_t begin_trim(self, size_t most) noexcept nogil
    cdef void end_trim(self, uint32_t id, bint trimmed) noexcept nogil
    # In a forked child, all locks held: what was between begin and end is nobody's here.
    cdef void forget_growth(self) noexcept nogil
    cdef int add_segment(
        self, Region region, bint growing, size_t most, uint32_t tick) except -1
    cdef int idle_segment(self, size_t most) noexcept nogil
    cdef size_t idle_pages(self) noexcept nogil
    cdef void remove_segment(self, int segment) noexcept nogil
    cdef void note_hot(self) noexcept nogil
