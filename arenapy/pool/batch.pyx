"""BlockBatch: blocks of many sizes at once, all or none, for Pool.alloc_many and Pool.prewarm."""
cimport cython
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from arenapy.base.biased_lock cimport biased_acquire, biased_release
from arenapy.pool.hot_path cimport cache_of
from arenapy.pool.thread_cache cimport Asked, ThreadCache

cdef enum:
    BATCH = 4096             # blocks that are taken under one lock


@cython.final
cdef class BlockBatch:
    """Sizes in bytes, and the blocks that were taken for them. Internal."""

    def __cinit__(self, Py_ssize_t n):
        self.n = n
        self.sizes = <size_t*>malloc(max(n, 1) * sizeof(size_t))
        self.entries = <Entry*>malloc(max(n, 1) * sizeof(Entry))
        if self.sizes == NULL or self.entries == NULL:
            raise MemoryError(f"no memory for a list of {n} blocks")

    cdef void repeat(self, size_t size, Py_ssize_t count) noexcept nogil:
        while count:
            self.sizes[self.filled] = size
            self.filled += 1
            count -= 1

    def __dealloc__(self):
        free(self.sizes)
        free(self.entries)

    cdef void begin(self, PoolCore core) noexcept nogil:
        cdef ThreadCache* f = cache_of(core)
        cdef int k
        memset(&self.asked, 0, sizeof(Asked))
        biased_acquire(&f.lock)
        self.peak = f.peak
        for k in range(N_CLASSES):
            self.peaks[k] = f.counts[k].peak
        biased_release(&f.lock)

    cdef Py_ssize_t take(self, PoolCore core, bint miss) noexcept nogil:
        cdef Py_ssize_t got = core.take_batch(
            self.sizes + self.done, min(self.n - self.done, <Py_ssize_t>BATCH), miss,
            self.entries + self.done, &self.asked)
        self.done += got
        return got

    cdef void undo(self, PoolCore core) noexcept nogil:
        core.untake(self.done, self.entries, &self.asked, self.peak, self.peaks)
        self.done = 0
