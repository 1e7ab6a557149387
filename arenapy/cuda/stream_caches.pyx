"""Stream caches: where a pool's streams other than its own get their blocks.

What lives here: the source of a stream cache's memory. What does not: the stream caches (pool),
which are pools themselves, so that a block which its stream gives back is its stream's again at
once, without an event and as quickly as on the host.

A stream cache takes chunks from the pool that it belongs to, as a user of the pool would: a chunk
comes once the pool's own stream has done with it, and goes back when the stream cache's has. A
stream cache keeps what is idle until the pool runs out of memory, or is trimmed.
"""
cimport cython
from libc.stdint cimport uint64_t

import weakref

from arenapy.buffer.buffer cimport Buffer
from arenapy.buffer.stream_hooks cimport StreamHooks
from arenapy.memory.region cimport Backing

from arenapy.cuda.backing cimport region_of
from arenapy.cuda.copies cimport CudaMemory
from arenapy.cuda.stream_ref cimport StreamRef
from arenapy.base.sealed cimport seal

from arenapy.errors import OutOfMemory

cdef enum:
    DEVICE_PAGE = 2 << 20    # bytes


@cython.final
cdef class ChunkBacking(Backing):
    """A block of the pool that a stream cache belongs to. Internal."""

    cdef Buffer chunk


seal(ChunkBacking)


@cython.final
cdef class StreamCacheSource:
    """Chunks of a pool's memory for one of its streams. Internal."""

    cdef object pool                 # weakref: the pool has its stream caches
    cdef readonly StreamRef stream
    cdef readonly StreamHooks hooks
    cdef object __weakref__

    def __cinit__(self, pool, StreamHooks hooks, StreamRef stream):
        self.pool, self.hooks, self.stream = weakref.ref(pool), hooks, stream

    def region(self, size_t nbytes):
        """A chunk of so many bytes."""
        cdef ChunkBacking backing = ChunkBacking.__new__(ChunkBacking)
        pool = self.pool()
        if pool is None:
            raise OutOfMemory("the pool that this stream's memory comes from is gone")
        backing.chunk = pool._chunk(nbytes, self.stream)
        return region_of(
            <uint64_t>backing.chunk.ptr, nbytes, backing, <CudaMemory>self.hooks, DEVICE_PAGE)
