# Moving bytes into blocks and out of them.
from arenapy.buffer.block cimport Block

# Copy the whole block from, or to, another object of the same size; set all its bytes.
cdef int copy_in(Block block, object source, object stream) except -1
cdef int copy_out(Block block, object target, object stream) except -1
cdef int fill_bytes(Block block, object value, object stream) except -1
# The same by this processor, at once. `inward`: from the other object.
cdef int copy_bytes(Block block, object other, bint inward) except -1
# Move n bytes (without a source: set them to `byte`) in or out of an open block.
cdef int move_bytes(Block block, char* to, const char* source, Py_ssize_t n, int byte) except -1
