# The C surface of the operating system layer: what the allocator core calls without the GIL.
# Every function returns a negative errno on failure; none raises, none allocates.

cdef long long vm_minor_faults() noexcept nogil
cdef long long vm_file_nbytes(int fd) noexcept nogil
cdef int vm_unmap(size_t address, size_t nbytes) noexcept nogil
# An own open file description of what `fd` has open: the new descriptor.
cdef int vm_reopen(int fd) noexcept nogil
# Lease bytes through this open file description; 0.
cdef int vm_lease(int fd, long long offset, long long nbytes) noexcept nogil
# Does another description lease any of these bytes? 1 (where it lies in *at, *length) or 0.
cdef int vm_first_lease(
    int fd, long long offset, long long nbytes, long long* at, long long* length
) noexcept nogil
