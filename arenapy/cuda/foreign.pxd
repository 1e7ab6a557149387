# Descriptions of memory by other libraries.
from libc.stdint cimport uint64_t

from arenapy.cuda.stream_ref cimport StreamRef


# An array of another library, in C order.
cdef class Foreign:
    cdef object owner                # keeps the memory, as far as its library lets it
    cdef uint64_t address            # of the first byte; 0 if there is none
    cdef size_t nbytes
    cdef tuple shape
    cdef object dtype                # anything that NumPy takes for one
    cdef bint readonly
    cdef str kind                    # "device", "managed", "pinned"; "existing": of the host
    cdef int device_id               # -1: the host
    cdef StreamRef producer             # what it is the work of, to be waited for; or None


# By the CUDA array interface, for use on `stream` (None: the legacy one). None: it has none.
cdef Foreign of_interface(object thing, object stream)
# By DLPack, for use on `stream` (None: the legacy one), which the producer lets wait.
cdef Foreign of_dlpack(object thing, object stream)
