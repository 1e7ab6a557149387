# An array that grows in place, in address space of its own: allocators' metadata. What is ready
# was faulted in, so that using it faults no more, and nothing that points into it ever moves.

cdef struct ReservedArray:
    char* at                 # NULL: closed
    size_t ready             # bytes that may be used
    size_t reserved          # bytes; 0 if closed

# Reserve room for nbytes; False: there is no such address space.
cdef bint array_open(ReservedArray* t, size_t nbytes) noexcept nogil
# Make the first nbytes ready, by one thread at a time. (A system call: under no lock that an
# allocation or a free may wait for.)
# False: no memory, or more than reserved.
cdef bint array_grow(ReservedArray* t, size_t nbytes) noexcept nogil
cdef void array_close(ReservedArray* t) noexcept nogil
