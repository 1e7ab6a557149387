# The C surface of reserved address space: what allocators keep their growing tables in.
# None of these raises or touches Python. Addresses are multiples of the page; sizes are rounded up
# to it. A result of type int is 0 or a negative errno.
from posix.types cimport pid_t


# A mapped range and its owner: it is unmapped when this object goes, if nobody has taken it over.
cdef class Mapping:
    cdef readonly size_t address       # of the memory; guard pages may lie around it
    cdef readonly size_t map_address   # [map_address, map_address + map_nbytes) is unmapped
    cdef readonly size_t map_nbytes    # 0: nothing is mapped, or somebody else owns it
    cdef pid_t process                 # that mapped it

    cdef void own(self, size_t address, size_t nbytes, size_t margin) noexcept
    # Hand the range over to the caller, whose it is from here on.
    cdef void take(self, size_t* start, size_t* nbytes) noexcept
    cdef void end(self) noexcept


# `nbytes` of address space without access, aligned to `align` (a power of two; at least a page);
# NULL if there is none. vm_unmap ends it.
cdef void* vm_reserve(size_t nbytes, size_t align) noexcept nogil
# The same between two margins, multiples of the page, that belong to it and stay inaccessible.
cdef void* vm_reserve_within(size_t nbytes, size_t align, size_t margin) noexcept nogil
# Allow reading and writing, or neither.
cdef int vm_protect(void* at, size_t nbytes, bint accessible) noexcept nogil
# Make a part accessible and fault it in, so that using it faults no more. It must hold nothing: on
# failure the part has no page.
cdef int vm_commit(void* at, size_t nbytes) noexcept nogil
# The latter alone, of a part that is accessible; on failure some of its pages may be there.
cdef int vm_fill(void* at, size_t nbytes) noexcept nogil
# Take what nothing is mapped in of a range, so that nothing else comes to lie there.
cdef void vm_occupy(size_t address, size_t nbytes) noexcept nogil
# Give a part's pages back, locked or not; it stays accessible, and reads as zeros. Of shared memory
# (`shared`) they go for every process that has it mapped.
cdef int vm_decommit(void* at, size_t nbytes, bint shared) noexcept nogil


# -- arrays that grow in place
# An array that grows in place, in address space of its own: allocators' metadata. Ready memory was
# faulted in, so that using it faults no more, and nothing that points into it ever moves.

cdef struct ReservedArray:
    char* at                 # NULL: closed
    size_t ready             # bytes that may be used
    size_t accessible        # bytes, of which those that are not ready have no pages
    size_t reserved          # bytes; 0 if closed

# Reserve room for nbytes; False: there is no such address space.
cdef bint array_open(ReservedArray* t, size_t nbytes) noexcept nogil
# Make the first nbytes ready, by one thread at a time. (A system call: under no lock that an
# allocation or a free may wait for.)
# False: no memory, or more than reserved.
cdef bint array_grow(ReservedArray* t, size_t nbytes) noexcept nogil
cdef void array_close(ReservedArray* t) noexcept nogil
