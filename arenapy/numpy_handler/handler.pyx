"""The handler (NEP 49) over a Pool, which NumPy calls for the data of arrays.

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
cimport cython
from posix.mman cimport (
    MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE, madvise, mmap, munmap,
)

from arenapy.base.atomic cimport arenapy_add, arenapy_finalizing, arenapy_load, arenapy_sub, likely
from arenapy.buffer.block cimport GONE_CLOSED, GONE_FORKED, Block, MemoryOwner, root_of
from arenapy.buffer.buffer cimport Buffer
from arenapy.pool.page_heap cimport Descriptor, id_of, segment_of
from arenapy.pool.memory cimport begin_at_once, end_at_once, is_at_once
from arenapy.pool.pool cimport Pool
from arenapy.pool.core cimport PoolCore, try_cache_alloc, try_cache_free, try_give, try_take
from arenapy.memory.region cimport Region
from arenapy.allocator.allocator_core cimport AllocatorCore, forbid, permit
from arenapy.allocator.allocator cimport grown_in_c, is_refusal
from arenapy.pool.thread_cache cimport ThreadCache
from arenapy.base.biased_lock cimport biased_acquire, biased_release
from arenapy.base.sanitizer cimport POISONS

from arenapy.memory.sources import Existing, File, Host, Shared


# ---- blocks ------------------------------------------------------------------------------
# The blocks of NumPy's arrays, but for the short way: growth, libc's blocks, zeros, new sizes.
#
# What lives here: what the handler does when the pool's thread cache has nothing, or is not to be
# asked. What does not: the callbacks, which try that first (handler).
#
# They stand in a module of their own so that compilers leave them out of the callbacks, whose
# registers would be theirs to save. All run with or without the GIL, on any thread, and never
# raise; only growth, which asks the source, needs the interpreter. A block is known by its address:
# NumPy's idea of its size is not asked. A block in no region of the pool is libc's, and says in
# front of itself what it is.

cdef extern from "Python.h":
    """
    #include <sys/mman.h>
    #ifndef MADV_HUGEPAGE
    #define MADV_HUGEPAGE 14
    #endif
    static inline int arenapy_times(size_t a, size_t b, size_t *product) {
        return !__builtin_mul_overflow(a, b, product);
    }
    """
    void PyErr_Fetch(PyObject** kind, PyObject** value, PyObject** trace) noexcept
    void PyErr_Restore(PyObject* kind, PyObject* value, PyObject* trace) noexcept
    const int MADV_HUGEPAGE
    bint times "arenapy_times" (size_t a, size_t b, size_t* product) noexcept nogil

cdef enum:
    ALIGN = 64               # of every block
    LAZY = 32 << 20          # zeros of this much and more come when they are touched
    HUGE_PAGE = 2 << 20
    BASE_PAGE = 4096
    LARGE = 16 << 20         # what is larger and grows gets an eighth more than it asks for

# The header in front of a block of libc's.
cdef struct Header:
    void* base
    size_t nbytes            # of the block
    size_t mapped            # bytes from `base` on, if it is lazy; else 0
    uint64_t unused[5]


@cython.final
cdef class Counts:
    """The counters of a handler. Internal."""

    def as_dict(self):
        """The figures by name, as NumpyMemoryStats has them."""
        cdef Fallbacks* s = &self.system
        cdef Fallbacks* z = &self.lazy
        return {
            "system_allocations": arenapy_load(&s.count),
            "system_bytes": arenapy_load(&s.nbytes),
            "system_live": arenapy_load(&s.live),
            "lazy_allocations": arenapy_load(&z.count),
            "lazy_bytes": arenapy_load(&z.nbytes),
            "lazy_live": arenapy_load(&z.live),
        }


# ---- blocks of libc ----------------------------------------------------------------------

cdef inline Header* header_of(void* block) noexcept nogil:
    return <Header*>(<char*>block - sizeof(Header))


cdef void* system_block(Handler* h, size_t n, bint lazy) noexcept nogil:
    """A block of libc's, or (lazy) a mapping of zeros; NULL if there is none."""
    cdef Fallbacks* counts
    cdef size_t room = n + sizeof(Header) + (BASE_PAGE if lazy else ALIGN)
    cdef void* base
    cdef uintptr_t at
    if room < n:
        return NULL
    if lazy:
        base = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
        if base == MAP_FAILED:
            return NULL
        at = (<uintptr_t>base + HUGE_PAGE - 1) & ~<uintptr_t>(HUGE_PAGE - 1)
        madvise(<void*>at, (<uintptr_t>base + room - at) & ~<size_t>(BASE_PAGE - 1), MADV_HUGEPAGE)
    else:
        base = malloc(room)
        if base == NULL:
            return NULL
    at = (<uintptr_t>base + sizeof(Header) + ALIGN - 1) & ~<uintptr_t>(ALIGN - 1)
    header_of(<void*>at).base = base
    header_of(<void*>at).nbytes = n
    header_of(<void*>at).mapped = room if lazy else 0
    counts = &(<Counts>h.counts).lazy if lazy else &(<Counts>h.counts).system
    arenapy_add(&counts.count, 1)
    arenapy_add(&counts.nbytes, n)
    arenapy_add(&counts.live, 1)
    return <void*>at


cdef void system_free(Handler* h, void* block) noexcept nogil:
    cdef Header* header = header_of(block)
    if header.mapped:
        arenapy_sub(&(<Counts>h.counts).lazy.live, 1)
        munmap(header.base, header.mapped)
    else:
        arenapy_sub(&(<Counts>h.counts).system.live, 1)
        free(header.base)


# ---- blocks of the pool ------------------------------------------------------------------

cdef void* general_alloc(Handler* h, size_t n) noexcept nogil:
    """A block when the thread cache has none; if the pool is full, or over a file that shrank, from
    libc, if that is wanted, or if this is code amid growth, of which the caller knows nothing."""
    cdef void* block = NULL if (<PoolCore>h.core).shrunk() else take_from(<PoolCore>h.core, n)
    if block == NULL and (h.fallback or is_at_once()):
        block = system_block(h, n, False)
    return block


cdef void* take_from(PoolCore c, size_t n) noexcept nogil:
    cdef uint64_t block_id
    cdef void* block = c.alloc_block(n, ALIGN, False, &block_id)
    # Growth is Python's: not where a source makes arrays itself, which are libc's, nor at the
    # interpreter's end.
    if block == NULL and not c.shut and not is_at_once() and not arenapy_finalizing():
        with gil:
            block = grown(c, n)
    c.tell()
    return block


cdef void* grown(PoolCore c, size_t n) noexcept:
    cdef PyObject* kind = NULL
    cdef PyObject* value = NULL
    cdef PyObject* trace = NULL
    cdef void* block = NULL
    PyErr_Fetch(&kind, &value, &trace)       # the caller's own: nothing is called with it pending
    pool = c.allocator()
    PyErr_Restore(kind, value, trace)
    # Without a pool there is nothing that knows the source.
    if pool is not None and begin_at_once((<Pool>pool).memory):
        block = grown_in_c(<Pool>pool, n, ALIGN)
        end_at_once()
    return block


cdef bint in_pool(PoolCore c, void* block) noexcept nogil:
    cdef ThreadCache* f = c.own_cache()
    cdef bint found
    if c.gone == GONE_CLOSED:
        return False
    biased_acquire(&f.lock)
    found = segment_of(c, <uintptr_t>block) >= 0
    biased_release(&f.lock)
    return found


cdef void other_free(Handler* h, void* block) noexcept nogil:
    """Frees that `try_give` leaves, such as each block of a pool's second region. (Two callers, as
    other_alloc.)"""
    if not try_cache_free(<PoolCore>h.core, block):
        general_free(h, block)


cdef void general_free(Handler* h, void* block) noexcept nogil:
    if not given_back(<PoolCore>h.core, block):
        system_free(h, block)


cdef bint given_back(PoolCore c, void* block) noexcept nogil:
    """True if the block is of the pool's memory; a forked child, for one, does not free it."""
    if c.free_block_at(<char*>block):
        c.tell()
        return True
    if not in_pool(c, block):
        return False
    if not c.shut:
        c.refuse(b"NumPy's free", block)
    return True


cdef void* other_alloc(Handler* h, size_t n) noexcept nogil:
    """Allocations that `try_take` leaves. (Two callers, so that compilers do not inline it.)"""
    cdef void* block = try_cache_alloc(<PoolCore>h.core, n, True)
    return block if block != NULL else general_alloc(h, n)


# ---- zeros and new sizes -----------------------------------------------------------------

cdef void* zeros(Handler* h, size_t count, size_t size) noexcept nogil:
    cdef size_t n = 0
    cdef void* block
    if not times(count, size, &n):
        return NULL
    if n >= LAZY:
        block = system_block(h, n, True)
        if block != NULL:
            return block
    block = try_take(<PoolCore>h.core, n, True)
    if block == NULL:
        block = other_alloc(h, n)
    if block != NULL:
        memset(block, 0, n)                  # it may be recycled
    return block


cdef void* alloc_at_once(Handler* h, size_t n) noexcept nogil:
    """As general_alloc, but rather libc's than growth, while which other code runs: NumPy has made
    sure before that nobody else sees the array, whose block this is to replace."""
    cdef void* block = NULL
    cdef uint64_t block_id
    if h.fallback:
        if not (<PoolCore>h.core).shrunk():
            block = (<PoolCore>h.core).alloc_block(n, ALIGN, False, &block_id)
        if block == NULL:
            block = system_block(h, n, False)
    return block if block != NULL else general_alloc(h, n)


cdef void* resized(Handler* h, void* block, size_t n) noexcept nogil:
    cdef size_t size
    cdef void* moved = NULL
    cdef bint exact                          # has no more than was asked for
    if block == NULL:
        return general_alloc(h, n)
    size = (<PoolCore>h.core).size_at(<char*>block)
    if size and ((<PoolCore>h.core).gone == GONE_FORKED or (<PoolCore>h.core).shrunk()):
        return NULL                          # its bytes are not here
    if POISONS:                              # all is read below, or n bytes are asked for here
        permit(<PoolCore>h.core, <uintptr_t>block, size)
        if size >= n > size // 2:
            forbid(<PoolCore>h.core, <uintptr_t>block + n, <uintptr_t>block + size)
    exact = size == 0 or size > LARGE        # libc's, or rounded to the next 2 MiB
    if size == 0:
        size = header_of(block).nbytes
    if size >= n > size // 2:
        return block
    if n > size and exact:                   # else one that grows byte by byte is always copied
        moved = alloc_at_once(h, n + n // 8)
    if moved == NULL:
        moved = alloc_at_once(h, n)
    if moved == NULL:
        return block if n <= size else NULL
    memcpy(moved, block, min(size, n))
    other_free(h, block)
    return moved


# ---- handler ------------------------------------------------------------------------------

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

# The struct that a capsule points to.
cdef struct Capsule:
    PyDataMem_Handler numpy  # first
    Handler handler


# ---- the callbacks -----------------------------------------------------------------------

cdef void* on_malloc(void* ctx, size_t n) noexcept nogil:
    cdef void* block = try_take(<PoolCore>(<Handler*>ctx).core, n, True)
    return block if likely(block != NULL) else other_alloc(<Handler*>ctx, n)


cdef void on_free(void* ctx, void* block, size_t size) noexcept nogil:
    if not likely(try_give(<PoolCore>(<Handler*>ctx).core, block)) and block != NULL:
        other_free(<Handler*>ctx, block)


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


def refuse_closed(Pool pool not None):
    """Raise ValueError if the pool no longer allocates."""
    pool.core.open_check()


def make_handler(Pool pool not None, bint fallback):
    """(the capsule that NumPy wants, its Counts)."""
    cdef Capsule* h
    cdef PoolCore core = pool.core
    counts = Counts()
    if (core.n_regions == 0 and not pool.memory.may_reserve
            and not isinstance(pool.memory.source, (Host, Shared, File, Existing))):
        try:
            pool.alloc(1).release()          # its source shows what memory it has
        except Exception as error:           # then there is nothing to be seen
            if not is_refusal(error):
                raise
    if not core.host_accessible:
        raise BufferError(
            f"pool={pool!r} has {core.kind} memory, which the host cannot access; give NumPy a "
            "pool over host memory"
        )
    try:
        pool.memory.prepare()
    except Exception as error:               # growth asks again, and says why
        if not is_refusal(error):
            raise
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
    cdef uint64_t block_id
    cdef Descriptor* d
    if (not array.flags.owndata or capsule == NULL
            or not PyCapsule_IsValid(<object>capsule, b"mem_handler")
            or PyCapsule_GetContext(<object>capsule) != &marker):
        return None
    c = <PoolCore>(<Capsule*>PyCapsule_GetPointer(<object>capsule, b"mem_handler")).handler.core
    block_id = c.find(<char*>cnp.PyArray_DATA(array))
    if block_id == 0:
        return None
    d = &c.descriptors[id_of(block_id)]
    region = <object><PyObject*>c.segments[d.segment].region
    return c.allocator(), region, <uintptr_t>cnp.PyArray_DATA(array), c.size_of(block_id)


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
