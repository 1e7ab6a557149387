# Fault in a range once, for writing or reading: 0 or a negative errno, of which EINTR and EAGAIN
# want it done again.
cdef int vm_populate(size_t address, size_t nbytes, bint writable) noexcept nogil
