# The C surface of recording: what the core of an allocator calls for every operation.
#
# A core holds a `PyObject* recorder`, NULL when not recording, and owns a reference to it, which it
# may give up once no thread is between reading that pointer and the end of `record_event`: see
# AllocatorCore.record_now. A free is recorded before another thread could get the block, and an
# allocation after: a file must not show it live twice.
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t, uintptr_t

from arenapy.diagnostics.call_sites cimport CallStacks
from arenapy.base.biased_lock cimport BiasedLock
from arenapy.linux.vm cimport OpenFile

cdef enum:
    EVENT_CLOCK = 0      # written by the recorder: `block` is CLOCK_MONOTONIC in ns at `time`
    EVENT_ALLOC = 1
    EVENT_FREE = 2       # nbytes may be 0: not known
    EVENT_MARK = 3       # `block` identifies the mark, uniquely among those that are valid
    EVENT_RESET = 4      # to mark `block`, whose later allocations end; 0: everything ends
    EVENT_TRIM = 5       # nbytes from `block` on went back to the source
    EVENT_STREAM = 6     # written by the recorder: `block` is the stream of the next event
    EVENT_GROW = 7       # nbytes from `block` on came from the source
    EVENT_SITE = 8       # written by the recorder: `block` is the number of the next event's site
    EVENT_TEXT = 9       # written by the recorder: 16 bytes of the text of sites
    EVENT_KEEP = 10      # the block outlived the resets so far, and may do so beyond the last event

# An event, which recorder.pyx describes; docs/traces.md describes it for readers of files.
cdef struct Event:
    uint64_t time        # ticks since the recording began, with the operation in the top 8 bits
    uint64_t block       # address
    uint64_t size        # bytes, with the thread's number in the top 16 bits

# All that changes while recording, in pages that a forked child finds zeroed: it records nothing.
cdef struct Tape:
    BiasedLock lock
    uint64_t here        # 0 in a forked child
    uint64_t running     # events are wanted
    uint64_t writing     # one buffer is on its way to the file, without the lock
    Event* buffers       # both; NULL before the start and after the end
    Event* at            # in the current buffer
    Event* last          # its last place, which a clock event takes
    Event* first         # its first place
    Event* spare         # the other buffer
    uint64_t begun       # ticks at the start
    uint64_t latest      # ticks of the last event
    uint64_t events      # in the file
    uint64_t lost        # that came after a failed write
    OpenFile file
    int error            # errno of the first failed write, 0: none


cdef class Recorder:
    cdef Tape* tape
    cdef OpenFile file
    cdef int clock
    cdef readonly str path
    cdef readonly str kind
    cdef bint used
    cdef CallStacks stacks    # None: allocation sites are not wanted, and `wants_sites` is 0
    cdef bint wants_sites

    cdef int check_started(self) except -1
    cdef int raise_failure(self) except -1


# Record one operation. From any thread, with or without the GIL, under any lock: it runs no Python
# code, takes its own lock, and writes to the file once in 10,921 events. `errno` is kept.
cdef void record_event(PyObject* recorder, int op, uintptr_t block, size_t nbytes,
                       uint64_t stream) noexcept nogil
