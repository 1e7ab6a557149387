"""The CUDA driver: its entry points, what its errors become, and the context of a call.

Entry points come from cuda-python (``cuda.bindings.cydriver``), which finds the driver's library,
at first use: nothing of CUDA is needed to build arenapy or to import it. Each entry point's C
signature is compared with the one that is called here, since a few of them have changed.

What lives here: getting them, calling them with the right context, and saying what went wrong. What
does not: what they are called for.

Rules for callers. No driver call with the GIL held, nor under a lock that others want, nor once the
interpreter is finalizing. An entry point of cuda-python may raise (if the installed driver lacks
it): it then returns NOT_FOUND with a Python exception set, which `fail` takes and `forget` drops.

Thread-safety: everything here may be called from any thread.
"""
from cpython.pycapsule cimport PyCapsule_GetName, PyCapsule_GetPointer
from libc.stdint cimport uintptr_t
from libc.string cimport memset

import threading

from arenapy.base.assertion cimport ASSERTS
from arenapy.base.atomic cimport arenapy_finalizing
from arenapy.base.thread_slot cimport no_lock_is_held

from arenapy.cuda.errors import CudaError, Unavailable
from arenapy.errors import OutOfMemory

cdef extern from "<pthread.h>" nogil:
    int pthread_atfork(
        void (*prepare)() noexcept nogil, void (*parent)() noexcept nogil,
        void (*child)() noexcept nogil,
    )

cdef extern from "Python.h":
    void* PyErr_Occurred() noexcept
    void PyErr_Clear() noexcept

#: Entry points and their signatures in cuda-python's words; "_12": as CUDA 12 has it.
ENTRIES = (
    ("cuInit", "CUresult (unsigned int)"),
    ("cuDriverGetVersion", "CUresult (int *)"),
    ("cuGetErrorName", "CUresult (CUresult, char const **)"),
    ("cuGetErrorString", "CUresult (CUresult, char const **)"),
    ("cuDeviceGet", "CUresult (CUdevice *, int)"),
    ("cuDeviceGetCount", "CUresult (int *)"),
    ("cuDeviceGetName", "CUresult (char *, int, CUdevice)"),
    ("cuDeviceGetAttribute", "CUresult (int *, CUdevice_attribute, CUdevice)"),
    ("cuDeviceGetUuid", "CUresult (CUuuid *, CUdevice)"),
    ("cuDeviceCanAccessPeer", "CUresult (int *, CUdevice, CUdevice)"),
    ("cuDevicePrimaryCtxRetain", "CUresult (CUcontext *, CUdevice)"),
    ("cuDevicePrimaryCtxGetState", "CUresult (CUdevice, unsigned int *, int *)"),
    ("cuCtxPushCurrent", "CUresult (CUcontext)"),
    ("cuCtxPopCurrent", "CUresult (CUcontext *)"),
    ("cuCtxGetCurrent", "CUresult (CUcontext *)"),
    ("cuCtxGetDevice", "CUresult (CUdevice *)"),
    ("cuCtxGetLimit", "CUresult (size_t *, CUlimit)"),
    ("cuCtxSetLimit", "CUresult (CUlimit, size_t)"),
    ("cuCtxEnablePeerAccess", "CUresult (CUcontext, unsigned int)"),
    ("cuCtxSynchronize", "CUresult (void)"),
    ("cuMemGetInfo", "CUresult (size_t *, size_t *)"),
    ("cuMemAlloc", "CUresult (CUdeviceptr *, size_t)"),
    ("cuMemFree", "CUresult (CUdeviceptr)"),
    ("cuMemAllocManaged", "CUresult (CUdeviceptr *, size_t, unsigned int)"),
    (
        "cuMemAddressReserve",
        "CUresult (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned PY_LONG_LONG)",
    ),
    ("cuMemAddressFree", "CUresult (CUdeviceptr, size_t)"),
    (
        "cuMemGetAllocationGranularity",
        "CUresult (size_t *, CUmemAllocationProp const *, CUmemAllocationGranularity_flags)",
    ),
    (
        "cuMemCreate",
        "CUresult (CUmemGenericAllocationHandle *, size_t, CUmemAllocationProp const *, "
        "unsigned PY_LONG_LONG)",
    ),
    ("cuMemRelease", "CUresult (CUmemGenericAllocationHandle)"),
    (
        "cuMemMap",
        "CUresult (CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, "
        "unsigned PY_LONG_LONG)",
    ),
    ("cuMemUnmap", "CUresult (CUdeviceptr, size_t)"),
    ("cuMemSetAccess", "CUresult (CUdeviceptr, size_t, CUmemAccessDesc const *, size_t)"),
    ("cuMemRetainAllocationHandle", "CUresult (CUmemGenericAllocationHandle *, void *)"),
    (
        "cuMemExportToShareableHandle",
        "CUresult (void *, CUmemGenericAllocationHandle, CUmemAllocationHandleType, "
        "unsigned PY_LONG_LONG)",
    ),
    (
        "cuMemImportFromShareableHandle",
        "CUresult (CUmemGenericAllocationHandle *, void *, CUmemAllocationHandleType)",
    ),
    ("cuMemHostRegister", "CUresult (void *, size_t, unsigned int)"),
    ("cuMemHostUnregister", "CUresult (void *)"),
    ("cuPointerGetAttribute", "CUresult (void *, CUpointer_attribute, CUdeviceptr)"),
    ("cuMemcpyAsync", "CUresult (CUdeviceptr, CUdeviceptr, size_t, CUstream)"),
    (
        "cuMemcpyPeerAsync",
        "CUresult (CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, size_t, CUstream)",
    ),
    ("cuMemsetD8Async", "CUresult (CUdeviceptr, unsigned char, size_t, CUstream)"),
    ("cuMemPoolCreate", "CUresult (CUmemoryPool *, CUmemPoolProps const *)"),
    ("cuMemPoolDestroy", "CUresult (CUmemoryPool)"),
    ("cuMemPoolSetAttribute", "CUresult (CUmemoryPool, CUmemPool_attribute, void *)"),
    ("cuMemPoolTrimTo", "CUresult (CUmemoryPool, size_t)"),
    ("cuMemPoolSetAccess", "CUresult (CUmemoryPool, CUmemAccessDesc const *, size_t)"),
    ("cuMemAllocFromPoolAsync", "CUresult (CUdeviceptr *, size_t, CUmemoryPool, CUstream)"),
    ("cuMemFreeAsync", "CUresult (CUdeviceptr, CUstream)"),
    ("cuStreamCreate", "CUresult (CUstream *, unsigned int)"),
    ("cuStreamDestroy", "CUresult (CUstream)"),
    ("cuStreamGetId", "CUresult (CUstream, unsigned PY_LONG_LONG *)"),
    ("cuStreamGetCtx", "CUresult (CUstream, CUcontext *)"),
    ("cuStreamQuery", "CUresult (CUstream)"),
    ("cuStreamSynchronize", "CUresult (CUstream)"),
    ("cuStreamWaitEvent", "CUresult (CUstream, CUevent, unsigned int)"),
    ("cuStreamIsCapturing", "CUresult (CUstream, CUstreamCaptureStatus *)"),
    ("cuThreadExchangeStreamCaptureMode", "CUresult (CUstreamCaptureMode *)"),
    ("cuEventCreate", "CUresult (CUevent *, unsigned int)"),
    ("cuEventDestroy", "CUresult (CUevent)"),
    ("cuEventRecord", "CUresult (CUevent, CUstream)"),
    ("cuEventQuery", "CUresult (CUevent)"),
    ("cuEventSynchronize", "CUresult (CUevent)"),
    ("cuEventElapsedTime", "CUresult (float *, CUevent, CUevent)"),
    (
        "cuUserObjectCreate",
        "CUresult (CUuserObject *, void *, CUhostFn, unsigned int, unsigned int)",
    ),
    ("cuUserObjectRelease", "CUresult (CUuserObject, unsigned int)"),
    ("cuGraphRetainUserObject", "CUresult (CUgraph, CUuserObject, unsigned int, unsigned int)"),
    (
        "cuStreamGetCaptureInfo_12",
        "CUresult (CUstream, CUstreamCaptureStatus *, cuuint64_t *, CUgraph *, "
        "CUgraphNode const **, size_t *)",
    ),
    (
        "cuStreamGetCaptureInfo",
        "CUresult (CUstream, CUstreamCaptureStatus *, cuuint64_t *, CUgraph *, "
        "CUgraphNode const **, CUgraphEdgeData const **, size_t *)",
    ),
    ("cuMemPrefetchAsync_12", "CUresult (CUdeviceptr, size_t, CUdevice, CUstream)"),
    (
        "cuMemPrefetchAsync",
        "CUresult (CUdeviceptr, size_t, CUmemLocation, unsigned int, CUstream)",
    ),
    ("cuMemAdvise_12", "CUresult (CUdeviceptr, size_t, CUmem_advise, CUdevice)"),
    ("cuMemAdvise", "CUresult (CUdeviceptr, size_t, CUmem_advise, CUmemLocation)"),
)

#: Entry points that CUDA 13 has otherwise than CUDA 12.
CHANGED = ("cuStreamGetCaptureInfo", "cuMemPrefetchAsync", "cuMemAdvise")

cdef enum:
    MAX_DEVICES = 256
    NO_DEVICE = 100          # CUDA_ERROR_NO_DEVICE

cdef Driver driver
cdef bint ready = False
cdef bint starting = False           # `loading` is held, or the driver is being called first
cdef bint forked = False
cdef int generation = 0
cdef void* contexts[MAX_DEVICES]     # primary ones, retained for good
cdef int n_devices = 0
# A signal handler, or a `__del__` that the collector runs, may ask for the driver in here.
cdef object loading = threading.RLock()

cdef str INSTALL = "pip install 'arenapy-memory[cuda]', for which an NVIDIA driver must be there"


def entry_points():
    """{name: (address, signature)} of cuda-python's; raises Unavailable without it."""
    try:
        from cuda.bindings import cydriver
    except ImportError as error:
        raise Unavailable(f"CUDA needs cuda-python, which is not installed: {INSTALL}") from error
    found = {}
    for name, capsule in cydriver.__pyx_capi__.items():
        if name.startswith("cu"):
            signature = PyCapsule_GetName(capsule)
            found[name] = (<uintptr_t>PyCapsule_GetPointer(capsule, signature), signature.decode())
    return found


cdef int take_entries(dict found) except -1:
    """Fill `driver` from {name: (address, signature)}."""
    global driver
    cdef Driver taken
    cdef void** entry = <void**>&taken
    cdef Py_ssize_t i = 0
    memset(&taken, 0, sizeof(taken))
    for name, signature in ENTRIES:
        plain = name.removesuffix("_12")
        address, theirs = found.get(plain, (0, "nothing"))
        if theirs == signature:
            entry[i] = <void*><uintptr_t>address
        elif not (plain in CHANGED and address):
            raise Unavailable(
                f"{plain} of the installed cuda-python is {theirs}, and arenapy calls {signature}: "
                "install a version from 12.6 to 13"
            )
        i += 1
    driver = taken
    return 0


def use(found):
    """Internal: take {name: (address, signature)} for the driver, or None: what is installed.

    For tests that simulate one. Nothing of the one before may be in use.
    """
    global ready, n_devices, forked, generation
    with loading:
        generation += 1
        ready = forked = False
        n_devices = 0
        memset(contexts, 0, sizeof(contexts))
        if found is not None:
            take_entries(found)
            start()


cdef int start() except -1:
    """The first call of the driver, and what is there."""
    global ready, n_devices
    cdef int result, n = 0
    with nogil:
        result = driver.cuInit(0)
    if result == NO_DEVICE:
        raise Unavailable("the CUDA driver sees no device; see CUDA_VISIBLE_DEVICES, nvidia-smi")
    if result != SUCCESS:
        error = raised(result)
        if error is not None:
            raise Unavailable(f"no CUDA driver: {error} ({INSTALL})") from error
        fail(result, "cuInit")
    with nogil:
        result = driver.cuDeviceGetCount(&n)
    checked(result, "cuDeviceGetCount")
    n_devices = min(n, <int>MAX_DEVICES)
    ready = True
    return 0


cdef int need() except -1:
    """The driver is there, or Unavailable is raised. Cheap once it is."""
    global starting
    if forked:
        raise Unavailable(
            "this process was forked from one that had used CUDA, so CUDA cannot be used here: "
            "start it with multiprocessing's 'spawn'"
        )
    if not ready:
        found = entry_points()               # which imports: other code runs, without the lock
        with loading:
            if not ready:
                starting = True
                try:
                    take_entries(found)
                    start()
                finally:
                    starting = False
    return 0


# ---- errors ------------------------------------------------------------------------------

cdef str told(const char* text):
    return text.decode() if text != NULL else "unknown"


cdef int raise_set() except -1:
    return -1


cdef object raised(int result):
    """The exception that an entry point has set, taken; None: it has only failed."""
    if result == NOT_FOUND and PyErr_Occurred() != NULL:
        try:
            raise_set()
        except Exception as error:
            return error
    return None


cdef int fail(int result, str what) except -1:
    """Raise what a result that is not SUCCESS means."""
    cdef const char* name = NULL
    cdef const char* text = NULL
    error = raised(result)
    if error is not None:
        raise CudaError(f"{what}: the driver does not have it ({error})", result, "") from error
    if driver.cuGetErrorName(result, &name) or driver.cuGetErrorString(result, &text):
        forget(result)
    message = f"{what} failed: {told(name)} ({told(text)})"
    if result == OUT_OF_MEMORY:
        raise OutOfMemory(message)
    raise CudaError(message, result, told(name))


cdef int checked(int result, str what) except -1:
    return 0 if result == SUCCESS else fail(result, what)


cdef void forget(int result) noexcept nogil:
    """After a call whose failure nobody is told."""
    if result == NOT_FOUND:
        with gil:
            PyErr_Clear()


# ---- devices and contexts ----------------------------------------------------------------

def device_count():
    """How many devices the driver shows."""
    need()
    return n_devices


cdef void* primary(object index) except NULL:
    """The primary context of a device, which is retained for as long as the process lives.

    A context that is given back while somebody's memory or stream is in it takes those along; the
    CUDA runtime, under every other library, keeps it for good too.
    """
    cdef void* context = NULL
    cdef int device = 0, ordinal, result
    need()
    if not 0 <= index < n_devices:
        raise ValueError(
            f"ordinal={index} is not a CUDA device; there {'is' if n_devices == 1 else 'are'} "
            f"{n_devices}, counted from 0"
        )
    ordinal = index
    if contexts[ordinal] == NULL:
        with nogil:
            result = driver.cuDeviceGet(&device, ordinal)
            if result == SUCCESS:
                result = driver.cuDevicePrimaryCtxRetain(&context, device)
        checked(result, "cuDevicePrimaryCtxRetain")
        contexts[ordinal] = context          # another thread would have got the same one
    return contexts[ordinal]


cdef list devices_in_use():
    cdef list found = []
    cdef unsigned int flags = 0
    cdef int device, ordinal, active, result
    for ordinal in range(device_count()):
        device, active = 0, 0
        with nogil:
            result = driver.cuDeviceGet(&device, ordinal)
            if result == SUCCESS:
                result = driver.cuDevicePrimaryCtxGetState(device, &flags, &active)
            forget(result)
        if active or result != SUCCESS:
            found.append(ordinal)
    return found


cdef int enter(void* context) noexcept nogil:
    """Make it current, until `leave`."""
    if ASSERTS:
        no_lock_is_held()
    return driver.cuCtxPushCurrent(context)


cdef void leave() noexcept nogil:
    """The context that was current before is so again."""
    cdef void* context = NULL
    forget(driver.cuCtxPopCurrent(&context))


cdef bint callable_(int of) noexcept nogil:
    """By a destructor: not in a forked child, nor once the interpreter ends."""
    return of == generation and ready and not forked and not arenapy_finalizing()


# ---- fork --------------------------------------------------------------------------------

cdef void in_child() noexcept nogil:
    global forked
    forked = forked or ready or starting


if pthread_atfork(NULL, NULL, in_child) != 0:
    raise OSError("pthread_atfork failed: arenapy.cuda could not keep forks safe")
