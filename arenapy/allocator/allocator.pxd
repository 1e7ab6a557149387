# Common parts of all allocators, for the modules that implement one.
from arenapy.buffer.block cimport MemoryOwner
from arenapy.buffer.buffer cimport Buffer
from arenapy.buffer.ndarray cimport Spec
from arenapy.memory.region cimport Region
from arenapy.allocator.allocator_core cimport AllocatorCore

cdef class Allocator:
    cdef object __weakref__
    cdef AllocatorCore base      # its core
    cdef list shards         # of its core, to live as long as this

    # The block of alloc(), with a stream or without.
    cdef Buffer buffer_for(self, Py_ssize_t n, Py_ssize_t align, object stream)
    # The same for a stream, as the hooks name it, that is being captured into a graph.
    cdef Buffer captured_block(self, Py_ssize_t n, Py_ssize_t align, object stream)
    # A block of n bytes, held from birth if asked; raises OutOfMemory, and then changes nothing.
    cdef Buffer block(self, Py_ssize_t n, Py_ssize_t align, bint held)
    # The same of an owner, which may be a part of the allocator's.
    cdef Buffer block_of(self, MemoryOwner owner, Py_ssize_t n, Py_ssize_t align)
    # A block for a C call that found none free: the source is asked. NULL, or an exception: none.
    cdef void* slow_c(self, size_t nbytes, size_t align) except? NULL
    # The result of empty() on a device.
    cdef Buffer device_array(self, object shape, object descr, object order, Spec* spec)


# Raise TypeError unless it is one.
cdef int check_source(object source) except -1
# A region with nbytes that begin aligned. None: only one that would have, were it aligned.
cdef Region aligned_region(AllocatorCore c, object source, size_t nbytes, size_t align)
# The region that a source makes, checked to have at least n bytes, of the kind that `c` has.
cdef Region make_region(AllocatorCore c, object source, Py_ssize_t n)
# (reservation, region): what a source reserves, checked likewise. None: it has reserved nothing.
cdef object make_reservation(object source, size_t nbytes)
# Raise ValueError if other processes may see a region that an allocator is about to take.
cdef int check_unseen(AllocatorCore c, Region region) except -1
# Does the exception say that there is no memory? What a signal's handler raises does not.
cdef bint is_refusal(object error) noexcept
# `slow_c` for a nogil caller, whose own exception stays pending.
cdef void* grown_in_c(Allocator one, size_t nbytes, size_t align) noexcept nogil
# The last step of the constructor of an allocator.
cdef int complete(Allocator one) except -1
# A new block, of which its owner's hooks take note that a stream, as they name it, has it. What
# fails there gives the block back.
cdef Buffer begun(MemoryOwner owner, Buffer b, object stream)
# Raise ValueError unless `old` is open and has at most n bytes.
cdef int check_growth(Buffer old, Py_ssize_t n) except -1
# The result of `one` for a block that cannot grow in place to n bytes: a new block of `owner`, the
# allocator's core or a part of it, with the contents. The old one is released.
cdef Buffer moved(Allocator one, MemoryOwner owner, Buffer old, Py_ssize_t n)
# For callers that cannot raise: Python raises it soon in the main thread, like the exception of a
# signal's handler. In another thread it is reported.
cdef void raise_later(object error) noexcept
# Not to be listed among the allocators of this process: it is a part of another one.
cdef int hide(Allocator one) except -1
