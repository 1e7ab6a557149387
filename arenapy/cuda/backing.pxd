# Regions of CUDA memory.
from libc.stdint cimport uint64_t

from arenapy.memory.region cimport Backing, Region

from arenapy.cuda.copies cimport CudaMemory

cdef Region region_of(
    uint64_t address, size_t nbytes, Backing backing, CudaMemory memory, Py_ssize_t page_size)
