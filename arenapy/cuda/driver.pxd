# The entry points of the CUDA driver that arenapy uses, as plain C function pointers.
#
# Types are the driver's, in words that need no CUDA header: handles (CUcontext, CUstream, CUevent,
# ...) are void*, device addresses uint64_t, enumerations int.
from libc.stdint cimport uint64_t

ctypedef void (*host_function)(void*) noexcept nogil

# A CUmemLocation.
cdef struct Location:
    int type                 # 1: a device, 2: the host
    int id                   # its ordinal

cdef enum:
    SUCCESS = 0              # CUresult
    OUT_OF_MEMORY = 2
    NOT_FOUND = 500          # also what an entry point says that raised an exception
    NOT_READY = 600

# In the order of ENTRIES in driver.pyx.
cdef struct Driver:
    int (*cuInit)(unsigned int) noexcept nogil
    int (*cuDriverGetVersion)(int*) noexcept nogil
    int (*cuGetErrorName)(int, const char**) noexcept nogil
    int (*cuGetErrorString)(int, const char**) noexcept nogil
    int (*cuDeviceGet)(int*, int) noexcept nogil
    int (*cuDeviceGetCount)(int*) noexcept nogil
    int (*cuDeviceGetName)(char*, int, int) noexcept nogil
    int (*cuDeviceGetAttribute)(int*, int, int) noexcept nogil
    int (*cuDeviceGetUuid)(void*, int) noexcept nogil
    int (*cuDeviceCanAccessPeer)(int*, int, int) noexcept nogil
    int (*cuDevicePrimaryCtxRetain)(void**, int) noexcept nogil
    int (*cuDevicePrimaryCtxGetState)(int, unsigned int*, int*) noexcept nogil
    int (*cuCtxPushCurrent)(void*) noexcept nogil
    int (*cuCtxPopCurrent)(void**) noexcept nogil
    int (*cuCtxGetCurrent)(void**) noexcept nogil
    int (*cuCtxGetDevice)(int*) noexcept nogil
    int (*cuCtxGetLimit)(size_t*, int) noexcept nogil
    int (*cuCtxSetLimit)(int, size_t) noexcept nogil
    int (*cuCtxEnablePeerAccess)(void*, unsigned int) noexcept nogil
    int (*cuCtxSynchronize)() noexcept nogil
    int (*cuMemGetInfo)(size_t*, size_t*) noexcept nogil
    int (*cuMemAlloc)(uint64_t*, size_t) noexcept nogil
    int (*cuMemFree)(uint64_t) noexcept nogil
    int (*cuMemAllocManaged)(uint64_t*, size_t, unsigned int) noexcept nogil
    int (*cuMemAddressReserve)(uint64_t*, size_t, size_t, uint64_t, uint64_t) noexcept nogil
    int (*cuMemAddressFree)(uint64_t, size_t) noexcept nogil
    int (*cuMemGetAllocationGranularity)(size_t*, const void*, int) noexcept nogil
    int (*cuMemCreate)(uint64_t*, size_t, const void*, uint64_t) noexcept nogil
    int (*cuMemRelease)(uint64_t) noexcept nogil
    int (*cuMemMap)(uint64_t, size_t, size_t, uint64_t, uint64_t) noexcept nogil
    int (*cuMemUnmap)(uint64_t, size_t) noexcept nogil
    int (*cuMemSetAccess)(uint64_t, size_t, const void*, size_t) noexcept nogil
    int (*cuMemRetainAllocationHandle)(uint64_t*, void*) noexcept nogil
    int (*cuMemExportToShareableHandle)(void*, uint64_t, int, uint64_t) noexcept nogil
    int (*cuMemImportFromShareableHandle)(uint64_t*, void*, int) noexcept nogil
    int (*cuMemHostRegister)(void*, size_t, unsigned int) noexcept nogil
    int (*cuMemHostUnregister)(void*) noexcept nogil
    int (*cuPointerGetAttribute)(void*, int, uint64_t) noexcept nogil
    int (*cuMemcpyAsync)(uint64_t, uint64_t, size_t, void*) noexcept nogil
    int (*cuMemcpyPeerAsync)(uint64_t, void*, uint64_t, void*, size_t, void*) noexcept nogil
    int (*cuMemsetD8Async)(uint64_t, unsigned char, size_t, void*) noexcept nogil
    int (*cuMemPoolCreate)(void**, const void*) noexcept nogil
    int (*cuMemPoolDestroy)(void*) noexcept nogil
    int (*cuMemPoolSetAttribute)(void*, int, void*) noexcept nogil
    int (*cuMemPoolTrimTo)(void*, size_t) noexcept nogil
    int (*cuMemPoolSetAccess)(void*, const void*, size_t) noexcept nogil
    int (*cuMemAllocFromPoolAsync)(uint64_t*, size_t, void*, void*) noexcept nogil
    int (*cuMemFreeAsync)(uint64_t, void*) noexcept nogil
    int (*cuStreamCreate)(void**, unsigned int) noexcept nogil
    int (*cuStreamDestroy)(void*) noexcept nogil
    int (*cuStreamGetId)(void*, uint64_t*) noexcept nogil
    int (*cuStreamGetCtx)(void*, void**) noexcept nogil
    int (*cuStreamQuery)(void*) noexcept nogil
    int (*cuStreamSynchronize)(void*) noexcept nogil
    int (*cuStreamWaitEvent)(void*, void*, unsigned int) noexcept nogil
    int (*cuStreamIsCapturing)(void*, int*) noexcept nogil
    int (*cuThreadExchangeStreamCaptureMode)(int*) noexcept nogil
    int (*cuEventCreate)(void**, unsigned int) noexcept nogil
    int (*cuEventDestroy)(void*) noexcept nogil
    int (*cuEventRecord)(void*, void*) noexcept nogil
    int (*cuEventQuery)(void*) noexcept nogil
    int (*cuEventSynchronize)(void*) noexcept nogil
    int (*cuEventElapsedTime)(float*, void*, void*) noexcept nogil
    int (*cuUserObjectCreate)(
        void**, void*, host_function, unsigned int, unsigned int) noexcept nogil
    int (*cuUserObjectRelease)(void*, unsigned int) noexcept nogil
    int (*cuGraphRetainUserObject)(void*, void*, unsigned int, unsigned int) noexcept nogil
    # Their signatures changed with CUDA 13; one of each is NULL.
    int (*cuStreamGetCaptureInfo_12)(
        void*, int*, uint64_t*, void**, const void***, size_t*) noexcept nogil
    int (*cuStreamGetCaptureInfo)(
        void*, int*, uint64_t*, void**, const void***, const void**, size_t*) noexcept nogil
    int (*cuMemPrefetchAsync_12)(uint64_t, size_t, int, void*) noexcept nogil
    int (*cuMemPrefetchAsync)(uint64_t, size_t, Location, unsigned int, void*) noexcept nogil
    int (*cuMemAdvise_12)(uint64_t, size_t, int, int) noexcept nogil
    int (*cuMemAdvise)(uint64_t, size_t, int, Location) noexcept nogil

cdef Driver driver
# In a forked child, where the driver may not be called: nothing of it is to be touched.
cdef bint forked
# Which driver it is, for what is remembered of one: tests have many. May that one still be called?
cdef int generation
cdef bint callable_(int of) noexcept nogil

# Raise Unavailable unless the driver is there. Before all else, with the GIL.
cdef int need() except -1
# Raise what a result says that is not SUCCESS; `what` was called.
cdef int checked(int result, str what) except -1
# After a call whose failure nobody is told.
cdef void forget(int result) noexcept nogil
# The primary context of a device; ValueError if `index`, an int of any size, is none's ordinal.
cdef void* primary(object index) except NULL
# Ordinals of the devices whose primary context is there, and of those that cannot be asked.
cdef list devices_in_use()
# SUCCESS, or why not: then there is nothing to leave.
cdef int enter(void* context) noexcept nogil
cdef void leave() noexcept nogil
