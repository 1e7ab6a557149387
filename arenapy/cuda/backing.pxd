# Regions of CUDA memory.
from libc.stdint cimport uint64_t

from arenapy.linux.vm cimport Descriptor
from arenapy.memory.region cimport Backing, Region

from arenapy.cuda.copies cimport CudaMemory

cdef Region region_of(
    uint64_t address, size_t nbytes, Backing backing, CudaMemory memory, Py_ssize_t page_size)
# Descriptors of the pages that have these bytes of a region; None: it has none.
cdef list exported_pages(Region region, size_t offset, size_t nbytes)
# A region of pages that another process has exported: so many bytes, the first of them `skip` bytes
# from the beginning of the first page. It keeps the lease until the pages are unmapped.
cdef Region imported_region(
    CudaMemory memory, list files, Descriptor lease, size_t skip, size_t nbytes, bint readonly)
cdef enum:
    DEVICE_PAGE = 2 << 20            # bytes: what the driver maps device memory by
