# Memory of CUDA as owners have it: its order, and copies in it.
from libc.stdint cimport uint64_t

from arenapy.buffer.block cimport Block

from arenapy.cuda.ordering cimport Ordering
from arenapy.cuda.stream_ref cimport StreamRef


cdef class CudaMemory(Ordering):
    # Queue a copy. `now`: the caller will wait for it before it lets go of the sides. `joined`:
    # streams that `s` has waited for in this call.
    cdef int transfer(self, Side to, Side source, StreamRef s, bint now, set joined) except -1


# One side of a copy: a Block, which is pinned meanwhile, or another object's memory, exported.
cdef class Side:
    cdef object thing
    cdef bint pinned
    cdef object view                 # of other objects on the host: a memoryview; else None
    cdef uint64_t address
    cdef size_t nbytes
    cdef int device_id               # -1: the host
    cdef bint on_host, block, foreign
    cdef Block under                 # of an array in a block of CUDA memory: that block
    cdef object producer             # of a foreign array on a device: its stream, or None


cdef CudaMemory new_memory(
    str kind, int device_id, bint host_accessible, bint device_accessible, Py_ssize_t align)
# Describe one side, whose memory is to be written to or read by `stream` of `leading`, as
# the user gave it; nothing is changed.
cdef Side side_of(object thing, bint to, CudaMemory leading, object stream)
# Of a block's uses the streams that nobody has closed.
cdef list streams_of(list uses)
# The state of a stream that is to copy. Raises, saying what to do, if it cannot be used now.
cdef int can_be_used(StreamRef s, bint now) except -1
# Wait for what a call without a stream has queued; if that raises, the sides are used until then.
cdef int wait_or_keep(StreamRef s, list sides) except -1
# The memory whose default streams are meant: a device's, if there is one.
cdef CudaMemory leader(CudaMemory one, object to, object source)
