"""The blocks of NumPy's arrays, but for the short way: growth, libc's blocks, zeros, new sizes.

What lives here: what the handler does when the pool's thread cache has nothing, or is not to be
asked. What does not: the callbacks, which try that first (handler).

They stand in a module of their own so that compilers leave them out of the callbacks, whose
registers would be theirs to save. All run with or without the GIL, on any thread, and never raise;
only growth, which asks the source, needs the interpreter. A block is known by its address: NumPy's
idea of its size is not asked. What is in no region of the pool is libc's, and says in front of
itself what it is.
"""
cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset
from posix.mman cimport (
    MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, PROT_READ, PROT_WRITE, madvise, mmap, munmap,
)

from arenapy.allocator.allocator cimport grown_in_c
from arenapy.base.atomic cimport arenapy_add, arenapy_finalizing, arenapy_load, arenapy_sub
from arenapy.buffer.block cimport GONE_FORKED
from arenapy.pool.hot_path cimport cache_of
from arenapy.pool.thread_cache cimport ThreadCache
from arenapy.base.biased_lock cimport biased_acquire, biased_release
from arenapy.pool.page_heap cimport segment_of
from arenapy.pool.pool cimport Pool
from arenapy.base.sanitizer cimport POISONS
from arenapy.pool.core cimport PoolCore, take_hit
from arenapy.allocator.allocator_core cimport forbid, permit

cdef extern from "Python.h":
    """
    #include <sys/mman.h>
    #ifndef MADV_HUGEPAGE
    #define MADV_HUGEPAGE 14
    #endif
    /* While this thread grows a pool: what its source allocates meanwhile is libc's. */
    static __thread int arenapy_growing = 0;
    static inline int arenapy_times(size_t a, size_t b, size_t *product) {
        return !__builtin_mul_overflow(a, b, product);
    }
    """
    void PyErr_Fetch(PyObject** kind, PyObject** value, PyObject** trace) noexcept
    void PyErr_Restore(PyObject* kind, PyObject* value, PyObject* trace) noexcept
    const int MADV_HUGEPAGE
    int growing "arenapy_growing"
    bint times "arenapy_times" (size_t a, size_t b, size_t* product) noexcept nogil

cdef enum:
    ALIGN = 64               # of every block
    LAZY = 32 << 20          # zeros of this much and more come when they are touched
    HUGE_PAGE = 2 << 20
    BASE_PAGE = 4096
    LARGE = 16 << 20         # what is larger and grows gets an eighth more than it asks for

# What lies in front of a block of libc's.
cdef struct Header:
    void* base
    size_t nbytes            # of the block
    size_t mapped            # bytes from `base` on, if it is lazy; else 0
    uint64_t unused[5]


@cython.final
cdef class Counts:
    """What a handler counts. Internal."""

    def as_tuple(self):
        """(allocations, bytes, live blocks) of libc's blocks, then of lazy zeros."""
        cdef Fallbacks* s = &self.system
        cdef Fallbacks* z = &self.lazy
        return (
            (arenapy_load(&s.count), arenapy_load(&s.nbytes), arenapy_load(&s.live)),
            (arenapy_load(&z.count), arenapy_load(&z.nbytes), arenapy_load(&z.live)),
        )


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

cdef void* take_slow(Handler* h, size_t n) noexcept nogil:
    """A block when the thread cache has none; if the pool is full, from libc, if that is wanted."""
    cdef void* block = take_from(<PoolCore>h.core, n)
    if block == NULL and h.fallback:
        block = system_block(h, n, False)
    return block


cdef void* take_from(PoolCore c, size_t n) noexcept nogil:
    cdef uint64_t tag
    cdef void* block = c.get(n, ALIGN, False, &tag)
    # Growth is Python's: not where a source makes arrays itself, nor at the interpreter's end.
    if block == NULL and not c.shut and not growing and not arenapy_finalizing():
        with gil:
            block = grown(c, n)
    c.tell()
    return block


cdef void* grown(PoolCore c, size_t n) noexcept:
    global growing
    cdef PyObject* kind = NULL
    cdef PyObject* value = NULL
    cdef PyObject* trace = NULL
    cdef void* block = NULL
    PyErr_Fetch(&kind, &value, &trace)       # the caller's own: nothing is called with it pending
    pool = c.allocator()
    PyErr_Restore(kind, value, trace)
    if pool is not None:                     # else there is nothing that knows the source
        growing = 1
        block = grown_in_c(<Pool>pool, n, ALIGN)
        growing = 0
    return block


cdef bint in_pool(PoolCore c, void* block) noexcept nogil:
    cdef ThreadCache* f = cache_of(c)
    cdef bint found
    biased_acquire(&f.lock)
    found = segment_of(c, <uintptr_t>block) >= 0
    biased_release(&f.lock)
    return found


cdef void give_slow(Handler* h, void* block) noexcept nogil:
    if not given_back(<PoolCore>h.core, block):
        system_free(h, block)


cdef bint given_back(PoolCore c, void* block) noexcept nogil:
    """Whether it was the pool's, to be freed or (a forked child, or freed twice) not any more."""
    if c.put_at(<char*>block):
        c.tell()
        return True
    if not in_pool(c, block):
        return False
    if not c.shut:
        c.refuse(b"NumPy's free", block)
    return True


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
    block = take_hit(<PoolCore>h.core, n, True)
    if block == NULL:
        block = take_slow(h, n)
    if block != NULL:
        memset(block, 0, n)                  # it may be recycled
    return block


cdef void* resized(Handler* h, void* block, size_t n) noexcept nogil:
    cdef size_t size
    cdef void* moved = NULL
    if block == NULL:
        return take_slow(h, n)
    size = (<PoolCore>h.core).size_at(<char*>block)
    if size and (<PoolCore>h.core).gone == GONE_FORKED:
        return NULL                          # its bytes are not here
    if POISONS:                              # all is read below, or n bytes are asked for here
        permit(<PoolCore>h.core, <uintptr_t>block, size)
        if size >= n > size // 2:
            forbid(<PoolCore>h.core, <uintptr_t>block + n, <uintptr_t>block + size)
    if size == 0:
        size = header_of(block).nbytes
    if size >= n > size // 2:
        return block
    if n > size > LARGE:                     # else one that grows byte by byte is always copied
        moved = take_slow(h, n + n // 8)
    if moved == NULL:
        moved = take_slow(h, n)
    if moved != NULL:
        memcpy(moved, block, min(size, n))
        give_slow(h, block)
    return moved
