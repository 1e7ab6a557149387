# cython: language_level=3
"""Loops without the interpreter over whatever allocates and frees: our C calls, or a malloc.

native.py compiles this file against the installed arenapy, as any user of `cimport arenapy` would.
Each loop is written once and compiled three times, for a Pool, a Slab, and the malloc of the
process (workers.py preloads it): every one is called in the way its users call it, through the
table of pointers that a cimport fills in, and through the linker's.
"""
cimport cython
from libc.stdint cimport uint64_t
from libc.stdlib cimport free, malloc

from arenapy cimport Pool, Slab, pool_alloc, pool_free, slab_alloc, slab_free

cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    #include <dlfcn.h>
    #include <stdint.h>
    #include <stdlib.h>
    #include <time.h>
    /* Of its neighbour: a program that is not position-independent, as some Pythons are, has an
       address for malloc itself. */
    static const char *malloc_comes_from(void) {
        Dl_info info;
        return dladdr(dlsym(RTLD_DEFAULT, "aligned_alloc"), &info) ? info.dli_fname : "";
    }
    static inline uint64_t now(void) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return (uint64_t)t.tv_sec * 1000000000u + t.tv_nsec;
    }
    static inline void unseen(void) { __asm__ volatile("" : : : "memory"); }
    static inline void *swap(void **slot, void *block) {
        return __atomic_exchange_n(slot, block, __ATOMIC_ACQ_REL);
    }
    static inline void add_one(uint64_t *word) { __atomic_fetch_add(word, 1, __ATOMIC_ACQ_REL); }
    """
    const char* malloc_comes_from()
    uint64_t now() noexcept nogil
    void unseen() noexcept nogil
    void* swap(void** slot, void* block) noexcept nogil
    void add_one(uint64_t* word) noexcept nogil

cdef enum:
    ALIGN = 64
    DEPTH = 64                   # blocks that come and go on the stack


cdef class Malloc:
    """malloc() and free() of this process."""

    @property
    def file(self):
        """The library that has them."""
        return malloc_comes_from().decode()


ctypedef fused Heap:
    Malloc
    Pool
    Slab


cdef inline void* take(Heap heap, size_t nbytes) noexcept nogil:
    if Heap is Malloc:
        return malloc(nbytes)
    elif Heap is Pool:
        return pool_alloc(heap, nbytes, ALIGN)
    else:
        return slab_alloc(heap)


cdef inline int give(Heap heap, void* block) noexcept nogil:
    """0: done."""
    if Heap is Malloc:
        free(block)
        return 0
    elif Heap is Pool:
        return pool_free(heap, block)
    else:
        return slab_free(heap, block)


@cython.final
cdef class Blocks:
    """Slots for live blocks, and what to ask for next."""

    cdef void** slots
    cdef readonly Py_ssize_t count
    cdef const uint64_t[::1] sizes
    cdef uint64_t state              # of the random numbers; never 0

    def __cinit__(self, Py_ssize_t count, const uint64_t[::1] sizes not None, uint64_t seed=1):
        if count < 1 or sizes.shape[0] < 1 or seed == 0:
            raise ValueError("nothing to do")
        self.slots = <void**>malloc(count * sizeof(void*))
        if self.slots == NULL:
            raise MemoryError
        self.count = count
        self.sizes = sizes
        self.state = seed

    def __dealloc__(self):
        free(self.slots)


cdef inline uint64_t draw(Blocks live) noexcept nogil:
    """32 random bits (xorshift)."""
    cdef uint64_t x = live.state
    x ^= x << 13
    x ^= x >> 7
    x ^= x << 17
    live.state = x
    return x >> 32


cdef inline void* another(Heap heap, Blocks live) noexcept nogil:
    """A block of the next random size."""
    return take(heap, live.sizes[draw(live) * <uint64_t>live.sizes.shape[0] >> 32])


cdef inline void use(void* block, bint touch) noexcept nogil:
    if touch:
        (<volatile char*>block)[0] = 1


cdef int verdict(int status) except -1:
    if status:
        raise AssertionError("a block was refused, or could not be freed")
    return 0


# ---- blocks of one size, or of sizes in turn ---------------------------------------------

def fill(Heap heap, Blocks live not None):
    """Fill all slots, the sizes in turn."""
    cdef Py_ssize_t i, n_sizes = live.sizes.shape[0]
    cdef int status = 0
    with nogil:
        for i in range(live.count):
            live.slots[i] = take(heap, live.sizes[i % n_sizes])
            status |= live.slots[i] == NULL
    verdict(status)


def empty(Heap heap, Blocks live not None):
    """Free all slots."""
    cdef Py_ssize_t i
    cdef int status = 0
    with nogil:
        for i in range(live.count):
            status |= give(heap, live.slots[i])
    verdict(status)


def replace(Heap heap, Blocks live not None, Py_ssize_t passes, bint touch):
    """Free what is in a slot and allocate into it, slot after slot; the first size only."""
    cdef Py_ssize_t _pass, i
    cdef size_t nbytes = live.sizes[0]
    cdef void* block
    cdef int status = 0
    with nogil:
        for _pass in range(passes):
            for i in range(live.count):
                status |= give(heap, live.slots[i])
                block = take(heap, nbytes)
                live.slots[i] = block
                use(block, touch)
    verdict(status)


def fill_and_empty(Heap heap, Blocks live not None, Py_ssize_t passes, bint touch):
    """Free all slots, then allocate into all; the first size only."""
    cdef Py_ssize_t _pass, i
    cdef size_t nbytes = live.sizes[0]
    cdef void* block
    cdef int status = 0
    with nogil:
        for _pass in range(passes):
            for i in range(live.count):
                status |= give(heap, live.slots[i])
            for i in range(live.count):
                block = take(heap, nbytes)
                live.slots[i] = block
                use(block, touch)
    verdict(status)


# ---- random sizes ------------------------------------------------------------------------

def replace_any(Heap heap, Blocks live not None, Py_ssize_t operations):
    """Free a random slot and allocate a random size into it."""
    cdef Py_ssize_t _i
    cdef uint64_t slot
    cdef int status = 0
    with nogil:
        for _i in range(operations):
            slot = draw(live) * <uint64_t>live.count >> 32
            status |= give(heap, live.slots[slot])
            live.slots[slot] = another(heap, live)
            status |= live.slots[slot] == NULL
    verdict(status)


def replace_last(Heap heap, Blocks live not None, Py_ssize_t operations):
    """Last in, first out: 64 slots freed from the last down, and filled again, random sizes."""
    cdef Py_ssize_t _i, i, depth = min(<Py_ssize_t>DEPTH, live.count)
    cdef int status = 0
    with nogil:
        for _i in range(operations // depth):
            for i in range(live.count - 1, live.count - 1 - depth, -1):
                status |= give(heap, live.slots[i])
            for i in range(live.count - depth, live.count):
                live.slots[i] = another(heap, live)
                status |= live.slots[i] == NULL
    verdict(status)


def exchange(Heap heap, Blocks shared not None, Blocks live not None, Py_ssize_t operations):
    """Allocate into random slots of `shared` and free what was there: any thread's. The sizes and
    the random numbers are those of `live`, one for each thread."""
    cdef Py_ssize_t _i
    cdef uint64_t slot
    cdef void* block
    cdef int status = 0
    with nogil:
        for _i in range(operations):
            slot = draw(live) * <uint64_t>shared.count >> 32
            block = another(heap, live)
            status |= block == NULL
            status |= give(heap, swap(&shared.slots[slot], block))
    verdict(status)


# ---- each call by itself -----------------------------------------------------------------

def timed_fill(Heap heap, Blocks live not None, uint64_t[::1] least not None):
    """fill(); nanoseconds of each call, where they are less than what `least` has."""
    cdef Py_ssize_t i, n_sizes = live.sizes.shape[0]
    cdef uint64_t start, took
    cdef int status = least.shape[0] < live.count
    with nogil:
        for i in range(live.count if not status else 0):
            start = now()
            live.slots[i] = take(heap, live.sizes[i % n_sizes])
            took = now() - start
            least[i] = min(least[i], took)
            status |= live.slots[i] == NULL
    verdict(status)


def timed_empty(
    Heap heap, Blocks live not None, const uint64_t[::1] order not None,
    uint64_t[::1] least not None,
):
    """Free all slots in this order; nanoseconds as in timed_fill()."""
    cdef Py_ssize_t i
    cdef uint64_t start, took
    cdef int status = least.shape[0] < live.count or order.shape[0] != live.count
    with nogil:
        for i in range(live.count if not status else 0):
            start = now()
            status |= give(heap, live.slots[order[i]])
            took = now() - start
            least[i] = min(least[i], took)
    verdict(status)


# ---- cache lines -------------------------------------------------------------------------

def write(buffer, Py_ssize_t words):
    """Add to the first word of a buffer, each time in the cache: plain stores may wait in the
    processor, which makes one of many to the same line, and hides what the others cost."""
    cdef unsigned char[::1] view = buffer
    cdef uint64_t* word = <uint64_t*>&view[0]
    cdef Py_ssize_t _i
    with nogil:
        for _i in range(words):
            add_one(word)


# ---- what a look costs -------------------------------------------------------------------

cdef bint special = False


def look(Py_ssize_t times, bint look):
    """Look whether a flag is set; or, for comparison, only loop."""
    cdef Py_ssize_t _i
    with nogil:
        if look:
            for _i in range(times):
                unseen()
                if special:
                    break
        else:
            for _i in range(times):
                unseen()
