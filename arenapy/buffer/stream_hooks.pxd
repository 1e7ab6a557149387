# What kind of memory an owner has, where others than this processor's threads work on it.
from cpython.object cimport PyObject


# Memory that streams use. Abstract: arenapy.cuda has the ones there are; an owner of plain host
# memory has none. Each allocator has one of its own. `stream` is what `named` gave; blocks are
# arenapy.buffer.block.Block, owners MemoryOwner, holds Hold*. All with the GIL, which they release
# to call the driver; never under a lock.
cdef class StreamHooks:
    cdef readonly str kind
    cdef readonly int device_id              # -1: the host
    cdef readonly bint host_accessible
    cdef readonly bint device_accessible
    cdef readonly Py_ssize_t align           # of blocks by default
    # The stream whose order blocks need no event for; None: there is none.
    cdef readonly object own

    # One for blocks that belong to `stream`, as the user gave it; the same for an allocator, of
    # which some streams cannot be.
    cdef StreamHooks bound(self, object stream)
    cdef StreamHooks of_allocator(self, object stream)
    # What a user's argument names; None: no stream but the allocator's own, or none at all.
    cdef object named(self, object stream)
    # Before a block is allocated for a stream, as the user gave it: what it names, if its blocks
    # are to come from a pool of their own, whose source `stream_cache_source` is; else None.
    cdef object stream_cache(self, object stream)
    # Does that object name the same stream for as long as it is kept?
    cdef bint always(self, object stream, object named)
    cdef object stream_cache_source(self, object pool, object stream)
    # May a block be allocated for `stream` now? One is.
    cdef int may_begin(self, object stream) except -1
    cdef int begin(self, object block, object stream) except -1
    # Once it is released, a block waits until `stream` has done what it was given before.
    cdef int use(self, object block, object stream) except -1
    # A hold with uses has ended: `owner.finish_free` will be called with it.
    cdef void defer_hold(self, PyObject* owner, void* hold) noexcept
    # Call `owner.finish_free` for what no stream uses any more; `wait`: for all, once that is so.
    # How many those were.
    cdef Py_ssize_t collect(self, PyObject* owner, bint wait) noexcept
    # Let what uses the memory next wait for `stream`: its own stream, or else this thread.
    cdef int fence(self, object stream) except -1
    # What DLPack's number for a stream names; None: the consumer sees to the order itself.
    cdef object consumer(self, object stream)
    # Another library is to use a block, on that stream: which waits for those that used it before.
    cdef int lend(self, object block, object stream) except -1
    # This thread is to use a block: it waits for those, and for `stream`, if it is not None.
    cdef int ready(self, object block, object stream) except -1
    # The same for readers of the CUDA array interface: the number they are to wait for, or None.
    cdef object offer(self, object block)
    # The owner ends: wait for the streams that use it, and free the holds. If that cannot be, keep
    # `memory`, which has its bytes, until they are done.
    cdef void finish(self, PyObject* owner, object memory) noexcept
    # An allocator lets go of regions, which may outlive it and its stream.
    cdef void leave(self, tuple regions) noexcept
    # Copy a block, which its user is going to release, to the beginning of another one of this
    # memory, in the order of the streams that use it; those may then use the other one.
    cdef int move(self, object to, object source) except -1
    # Copy between blocks, or a block and another object, of one size; one of them is of this kind.
    # Set all bytes of a block.
    cdef int copy(self, object to, object source, object stream) except -1
    cdef int fill(self, object block, int byte, object stream) except -1
