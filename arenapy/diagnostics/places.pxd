# Places in a program, as numbers that C code without the GIL can keep.
from libc.stdint cimport uint32_t

cdef enum:
    NOWHERE = 0              # the number of no place
    IN_C = 1                 # a thread that ran no Python then
    MOST_PLACES = 1 << 16

# Where the running thread is. With or without the GIL, and with an exception on its way; under no
# lock of arenapy.
cdef uint32_t here() noexcept nogil
# What a number stands for, NUL-terminated, for good.
cdef const char* text_of(uint32_t place) noexcept nogil
# " (allocated at ...)", to follow the name of a block; nothing for NOWHERE.
cdef str said(uint32_t place)
