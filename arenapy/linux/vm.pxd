# The C surface of the operating system layer: what the allocator core calls without the GIL.
# Every function returns a negative errno on failure; none raises, none allocates.

from libc.stdint cimport uint64_t
from posix.types cimport pid_t

# A descriptor, and the file that it was opened for. Programs close descriptors that they do not
# know (daemons call os.closerange), and the number is then given to another file.
cdef struct OpenFile:
    int fd                   # -1: none
    uint64_t device
    uint64_t inode


# A file descriptor and its owner: it is closed when this object goes, if nobody has taken it over.
cdef class Descriptor:
    cdef OpenFile file                 # none: there is none, or somebody else owns it
    cdef pid_t process                 # which opened it, if that was here
    cdef bint new                      # that made the file (O_EXCL)

    # Take a new descriptor over; if it fails, that is closed.
    cdef int own(self, int fd) except -1
    # Hand the descriptor over to the caller, whose it is from here on.
    cdef void take(self, OpenFile* file) noexcept
    cdef void end(self) noexcept


cdef long long vm_minor_faults() noexcept nogil
cdef int vm_unmap(size_t address, size_t nbytes) noexcept nogil
# Is every page of a range mapped?
cdef bint vm_is_mapped(size_t address, size_t nbytes) noexcept nogil
# Remember which file a descriptor is of; 0.
cdef int vm_identify(int fd, OpenFile* file) noexcept nogil
# Is the descriptor still of that file?
cdef bint vm_is_open(OpenFile* file) noexcept nogil
# Close it, unless it is another file's by now.
cdef void vm_close(OpenFile* file) noexcept nogil
# The size of the file now; -EBADF if the descriptor is no longer of that file.
cdef long long vm_file_nbytes(OpenFile* file) noexcept nogil
# An own open file description of that file: the new descriptor.
cdef int vm_reopen(OpenFile* file) noexcept nogil
# A file for leases alone, which has no bytes.
cdef int vm_lease_file(OpenFile* file) noexcept nogil
# Map a page of an open file description, which keeps its leases until the page is unmapped,
# whatever becomes of its descriptors. The page cannot be accessed. NULL: it could not be mapped.
cdef void* vm_keep_leases(int fd, size_t page_size) noexcept nogil
# Lease bytes through this open file description; 0.
cdef int vm_lease(int fd, long long offset, long long nbytes) noexcept nogil
# Does another description lease any of these bytes? 1 (where it lies in *at, *length) or 0.
cdef int vm_first_lease(
    int fd, long long offset, long long nbytes, long long* at, long long* length
) noexcept nogil
