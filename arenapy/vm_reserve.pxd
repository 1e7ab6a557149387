# The C surface of reserved address space: what allocators keep their growing tables in.
# None of these raises or touches Python. Addresses are multiples of the page; sizes are rounded up
# to it. What is returned as int is 0 or a negative errno.

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
# Take a range that nothing is mapped in, so that nothing else comes to lie there.
cdef int vm_occupy(size_t address, size_t nbytes) noexcept nogil
# Give a part's pages back, locked or not; it stays accessible, and reads as zeros.
cdef int vm_decommit(void* at, size_t nbytes) noexcept nogil
