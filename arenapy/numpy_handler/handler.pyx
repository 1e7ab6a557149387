"""What NumPy calls for the data of arrays: a handler (NEP 49) over a Pool.

What lives here: the callbacks, the capsule that arrays keep. What does not: which handler is in
force where (contexts), what the short way cannot serve (blocks), the pool itself.

A capsule keeps the pool's core, and so its memory, but neither the Pool nor its source nor any
other object of the user: an array in a cycle with them would keep it for ever. Each array keeps the
capsule that it was made under, and gives its data back through it.
"""
from cpython.object cimport PyObject
from cpython.pycapsule cimport (
    PyCapsule_GetContext, PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New,
    PyCapsule_SetContext,
)
from cpython.ref cimport Py_INCREF, Py_XDECREF
from libc.stdint cimport uint8_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

cimport numpy as cnp

from arenapy.base.atomic cimport arenapy_finalizing, likely
from arenapy.buffer.block cimport Block, MemoryOwner, root_of
from arenapy.buffer.buffer cimport Buffer
from arenapy.numpy_handler.blocks cimport Counts, Handler, give_slow, resized, take_slow, zeros
from arenapy.pool.page_heap cimport Descriptor
from arenapy.pool.pool cimport Pool
from arenapy.pool.core cimport PoolCore, give_hit, take_hit
from arenapy.memory.region cimport Region
from arenapy.allocator.allocator_core cimport AllocatorCore

cdef extern from "numpy/arrayobject.h":
    ctypedef struct PyDataMemAllocator:
        void* ctx
        void* (*malloc)(void* ctx, size_t size) noexcept nogil
        void* (*calloc)(void* ctx, size_t nelem, size_t elsize) noexcept nogil
        void* (*realloc)(void* ctx, void* ptr, size_t size) noexcept nogil
        void (*free)(void* ctx, void* ptr, size_t size) noexcept nogil
    ctypedef struct PyDataMem_Handler:
        char name[127]
        uint8_t version
        PyDataMemAllocator allocator
    PyObject* PyArray_HANDLER(cnp.ndarray array)

cnp.import_array()

# What a capsule points to.
cdef struct Capsule:
    PyDataMem_Handler numpy  # first
    Handler handler


# ---- the callbacks -----------------------------------------------------------------------

cdef void* on_malloc(void* ctx, size_t n) noexcept nogil:
    cdef void* block = take_hit(<PoolCore>(<Handler*>ctx).core, n, True)
    return block if likely(block != NULL) else take_slow(<Handler*>ctx, n)


cdef void on_free(void* ctx, void* block, size_t size) noexcept nogil:
    if not likely(give_hit(<PoolCore>(<Handler*>ctx).core, block)) and block != NULL:
        give_slow(<Handler*>ctx, block)


cdef void* on_calloc(void* ctx, size_t count, size_t size) noexcept nogil:
    return zeros(<Handler*>ctx, count, size)


cdef void* on_realloc(void* ctx, void* block, size_t n) noexcept nogil:
    return resized(<Handler*>ctx, block, n)


# ---- capsules ----------------------------------------------------------------------------

cdef char marker             # its address tells our capsules from others


cdef void drop_handler(object capsule) noexcept:
    cdef Capsule* h
    if arenapy_finalizing():
        return                               # the core would unmap: leak
    h = <Capsule*>PyCapsule_GetPointer(capsule, b"mem_handler")
    Py_XDECREF(h.handler.core)
    Py_XDECREF(h.handler.counts)
    free(h)


def make_handler(Pool pool not None, bint fallback):
    """(the capsule that NumPy wants, its Counts)."""
    cdef Capsule* h
    cdef PoolCore core = pool.core
    counts = Counts()
    if core.n_regions == 0 and not pool.memory.may_reserve:
        try:
            pool.alloc(1).release()          # its source shows what memory it has
        except Exception:
            pass                             # then there is nothing to be seen
    if not core.host_accessible:
        raise BufferError(
            f"pool={pool!r} has {core.kind} memory, which the host cannot access; give NumPy a "
            "pool over host memory"
        )
    h = <Capsule*>malloc(sizeof(Capsule))
    if h == NULL:
        raise MemoryError("no memory for a NumPy handler")
    memset(h, 0, sizeof(Capsule))
    memcpy(h.numpy.name, b"arenapy", 8)
    h.numpy.version = 1
    h.numpy.allocator.ctx = &h.handler
    h.numpy.allocator.malloc = on_malloc
    h.numpy.allocator.calloc = on_calloc
    h.numpy.allocator.realloc = on_realloc
    h.numpy.allocator.free = on_free
    h.handler.fallback = fallback
    try:
        capsule = PyCapsule_New(h, b"mem_handler", drop_handler)
    except BaseException:
        free(h)
        raise
    h.handler.core, h.handler.counts = <PyObject*>pool.core, <PyObject*>counts
    Py_INCREF(pool.core)
    Py_INCREF(counts)
    PyCapsule_SetContext(capsule, &marker)
    pool.core.in_arrays = True
    return capsule, counts


def handler_block(cnp.ndarray array not None):
    """(Pool or None, Region, address, bytes) of the block of an array that owns its data, or None.

    None: the data is not a pool's.
    """
    cdef PyObject* capsule = PyArray_HANDLER(array)
    cdef PoolCore c
    cdef uint64_t tag
    cdef Descriptor* d
    if (not array.flags.owndata or capsule == NULL
            or not PyCapsule_IsValid(<object>capsule, b"mem_handler")
            or PyCapsule_GetContext(<object>capsule) != &marker):
        return None
    c = <PoolCore>(<Capsule*>PyCapsule_GetPointer(<object>capsule, b"mem_handler")).handler.core
    tag = c.find(<char*>cnp.PyArray_DATA(array))
    if tag == 0:
        return None
    d = &c.descriptors[tag >> 6]
    region = <object><PyObject*>c.segments[d.segment].region
    return c.allocator(), region, <uintptr_t>cnp.PyArray_DATA(array), c.size_of(tag)


def buffer_block(Buffer buffer not None):
    """(allocator or None, Region, address, bytes) of the block that a Buffer, or its root, is."""
    cdef Block root = root_of(buffer)
    cdef MemoryOwner owner = root.owner
    cdef uintptr_t at = <uintptr_t>root.ptr
    for region in (<AllocatorCore>owner).listed() if isinstance(owner, AllocatorCore) else (owner,):
        if (<uintptr_t>(<Region>region).ptr <= at
                < <uintptr_t>(<Region>region).ptr + (<Region>region).size):
            return owner.allocator_of(), region, at, root.size
    return None
