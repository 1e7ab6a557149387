"""The inner loop of a replay: allocations and frees, without the interpreter.

What lives here: heaps (what is asked for memory, behind two virtual calls, 1 ns each) and `run`,
which drives one through a program. What does not: traces, and what the figures mean (replay.py).

A program is two arrays: slot i >= 0 is filled with a new block of sizes[i] bytes, slot ~i is
freed. Which block a free means was looked up before, so that between two calls of the allocator
there are a few instructions and no search.
"""
cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from arenapy.bump.bump cimport Bump, BumpMark, bump_alloc, bump_free, bump_mark, bump_reset
from arenapy.pool.c_api cimport pool_alloc, pool_free
from arenapy.pool.pool cimport Pool
from arenapy.slab.slab cimport Slab, slab_alloc, slab_free
from arenapy.diagnostics.recorder cimport EVENT_ALLOC, EVENT_FREE, Recorder, record_event
from arenapy.base.sealed cimport seal

cdef extern from *:
    """
    #include <fcntl.h>
    #include <errno.h>
    #include <stdint.h>
    #include <stdio.h>
    #include <time.h>
    #include <unistd.h>
    /* By the wall, or of all threads of this process on the processor. */
    static uint64_t now_ns(int cpu) {
        struct timespec t;
        clock_gettime(cpu ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
        return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
    }
    /* Resident bytes of this process that no file has. */
    static long anonymous_bytes(int statm) {
        char text[128];
        long all, shared;
        ssize_t n;
        do n = pread(statm, text, sizeof text - 1, 0); while (n < 0 && errno == EINTR);
        if (n <= 0) return -1;
        text[n] = 0;
        if (sscanf(text, "%*d %ld %ld", &all, &shared) != 2) return -1;
        return (all - shared) * sysconf(_SC_PAGESIZE);
    }
    static void touch_pages(char *p, size_t n) {
        volatile char *at = p;
        for (size_t i = 0; i < n; i += 4096) at[i] = 1;
        if (n) at[n - 1] = 1;
    }
    static void touch_first(char *p) { *(volatile char *)p = 1; }
    """
    uint64_t now_ns(bint cpu) noexcept nogil
    long anonymous_bytes(int statm) noexcept nogil
    void touch_pages(char* p, size_t n) noexcept nogil
    void touch_first(char* p) noexcept nogil

ctypedef void* (*malloc_call)(size_t) noexcept nogil
ctypedef void (*free_call)(void*) noexcept nogil

cdef enum:
    ALIGN = 64               # of arenapy's allocators by default
    NOTHING = 0
    FIRST_BYTE = 1
    EVERY_PAGE = 2

TOUCH = {"nothing": NOTHING, "first": FIRST_BYTE, "pages": EVERY_PAGE}


cdef class Heap:
    """An allocator as the loop calls it. This one does nothing."""

    cdef void* take(self, size_t n) noexcept nogil:
        return <void*>ALIGN

    cdef int give(self, void* p, size_t n) noexcept nogil:
        """0: done; -1: refused."""
        return 0


seal(Heap)


@cython.final
cdef class NoHeap(Heap):
    """It gives the same address always: the loop's own cost."""


@cython.final
cdef class MallocHeap(Heap):
    """The malloc and free at two addresses."""

    cdef malloc_call get
    cdef free_call put

    def __cinit__(self, get, put):
        self.get = <malloc_call><void*><uintptr_t>get
        self.put = <free_call><void*><uintptr_t>put

    cdef void* take(self, size_t n) noexcept nogil:
        return self.get(n)

    cdef int give(self, void* p, size_t n) noexcept nogil:
        self.put(p)
        return 0


@cython.final
cdef class BumpHeap(Heap):
    """An arena: it frees its newest block, and everything when nothing is live."""

    cdef Bump arena
    cdef BumpMark base
    cdef size_t live

    def __cinit__(self, Bump arena):
        self.arena = arena
        self.base = bump_mark(arena)

    cdef void* take(self, size_t n) noexcept nogil:
        cdef void* p = bump_alloc(self.arena, n, ALIGN)
        self.live += p != NULL
        return p

    cdef int give(self, void* p, size_t n) noexcept nogil:
        self.live -= 1
        if self.live == 0:
            return bump_reset(self.arena, self.base)
        return -1 if bump_free(self.arena, p, n) < 0 else 0


@cython.final
cdef class PoolHeap(Heap):
    """A pool."""

    cdef Pool pool

    def __cinit__(self, Pool pool):
        self.pool = pool

    cdef void* take(self, size_t n) noexcept nogil:
        return pool_alloc(self.pool, n, ALIGN)

    cdef int give(self, void* p, size_t n) noexcept nogil:
        return pool_free(self.pool, p)


@cython.final
cdef class SlabHeap(Heap):
    """A slab. It refuses a block that is larger than its items."""

    cdef Slab slab
    cdef size_t item_size

    def __cinit__(self, Slab slab not None):
        self.slab = slab
        self.item_size = slab.item_size

    cdef void* take(self, size_t n) noexcept nogil:
        return slab_alloc(self.slab) if n <= self.item_size else NULL

    cdef int give(self, void* p, size_t n) noexcept nogil:
        return slab_free(self.slab, p)


def resident(int statm):
    """Bytes of this process that are resident and no file's. statm: /proc/self/statm, open."""
    found = anonymous_bytes(statm)
    if found < 0:
        raise OSError("/proc/self/statm cannot be read: a replay needs it")
    return found


@cython.boundscheck(False)           # of the arrays: every slot is looked at before the first step
def run(Heap heap not None, const int32_t[::1] slots not None, const uint64_t[::1] sizes not None,
        Py_ssize_t n_slots, touch="nothing", int statm=-1, Recorder recorder=None,
        bint cpu=False):
    """Drive a heap through a program; what is live at its end is freed, off the record.

    Parameters
    ----------
    heap : Heap
    slots, sizes : array of int32 and of uint64
        The program, and n_slots, which is more than any slot in it.
    touch : {"nothing", "first", "pages"}
        The part of every new block that is written.
    statm : int
        /proc/self/statm, open: resident memory is read after every allocation. -1: it is not.
    recorder : Recorder, optional
        Every operation is recorded too.
    cpu : bool
        Seconds are those of all threads of this process on the processor.

    Returns
    -------
    seconds : float
    steps : int
        How many were done; less than all of them if an allocation or a free was refused.
    peak : int
        The most bytes that were resident, less those before.
    at : int
        The step at which they were; of several, the one at which the most was live.
    """
    cdef Py_ssize_t n = slots.shape[0], i = 0, at = 0
    cdef int writes = TOUCH[touch]
    cdef PyObject* tape = <PyObject*>recorder if recorder is not None else NULL
    cdef void** blocks
    cdef size_t* nbytes
    cdef void* p
    cdef int32_t s
    cdef long now, most = 0, before = 0
    cdef size_t live = 0, most_live = 0
    cdef bint unknown
    cdef unsigned char[::1] filled
    cdef uint64_t start, end
    if writes and type(heap) is NoHeap:
        raise ValueError(f"touch={touch!r}: this heap has no memory; touch nothing")
    if sizes.shape[0] != n:
        raise ValueError(f"{n} slots but {sizes.shape[0]} sizes")
    filled = bytearray(n_slots)
    for i in range(n):
        s = slots[i]
        if not -n_slots <= s < n_slots:
            raise ValueError(f"slot {s} of {n_slots}")
        if filled[max(s, ~s)] != (s < 0):
            raise ValueError(f"step {i} {'frees' if s < 0 else 'fills'} slot {max(s, ~s)} twice")
        filled[max(s, ~s)] = s >= 0
    blocks = <void**>calloc(n_slots + 1, sizeof(void*))
    nbytes = <size_t*>calloc(n_slots + 1, sizeof(size_t))
    if blocks == NULL or nbytes == NULL:
        free(blocks)
        free(nbytes)
        raise MemoryError(f"no memory for {n_slots} slots")
    memset(blocks, 1, n_slots * sizeof(void*))       # resident from now on
    memset(nbytes, 1, n_slots * sizeof(size_t))
    memset(blocks, 0, n_slots * sizeof(void*))
    if statm >= 0:
        before = anonymous_bytes(statm)
    unknown = before < 0
    with nogil:
        i = 0
        start = now_ns(cpu)
        while i < n:
            s = slots[i]
            if s >= 0:
                p = heap.take(sizes[i])
                if p == NULL:
                    break
                if writes == EVERY_PAGE:
                    touch_pages(<char*>p, sizes[i])
                elif writes == FIRST_BYTE and sizes[i]:
                    touch_first(<char*>p)
                blocks[s] = p
                nbytes[s] = sizes[i]
                if tape != NULL:
                    record_event(tape, EVENT_ALLOC, <uintptr_t>p, sizes[i], 0)
                if statm >= 0:
                    now = anonymous_bytes(statm)
                    unknown |= now < 0
                    live += sizes[i]
                    if now > most or now == most and live > most_live:
                        most, most_live, at = now, live, i
            else:
                s = ~s
                if tape != NULL:
                    record_event(tape, EVENT_FREE, <uintptr_t>blocks[s], nbytes[s], 0)
                live -= nbytes[s]            # which counts if there is a statm
                if heap.give(blocks[s], nbytes[s]):
                    break
                blocks[s] = NULL
            i += 1
        end = now_ns(cpu)
        for s in range(n_slots):             # so that the heap can be used for another run
            if blocks[s] != NULL:
                heap.give(blocks[s], nbytes[s])
    free(blocks)
    free(nbytes)
    if unknown:
        raise OSError("/proc/self/statm cannot be read: a replay needs it")
    return (end - start) * 1e-9, i, max(0, most - before), at
