# cython: language_level=3, freethreading_compatible=True
"""Blocks of a Pool or a Slab taken and given back without the GIL, by several threads at once.

Every block says in its first bytes whose it is, and all of its bytes (of a long one, its ends) say
it again, so that memory which two owners were given, or which went to the wrong one, is found.
"""
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memset

from arenapy cimport Pool, Slab, pool_alloc, pool_free, pool_usable_size, slab_alloc, slab_free

cdef extern from *:
    """
    #define traffic_swap(p, v) __atomic_exchange_n(p, v, __ATOMIC_ACQ_REL)
    #define traffic_load(p) __atomic_load_n(p, __ATOMIC_ACQUIRE)
    #define traffic_store(p, v) __atomic_store_n(p, v, __ATOMIC_RELEASE)
    """
    char* swap "traffic_swap" (char** p, char* v) noexcept nogil
    bint load "traffic_load" (bint* p) noexcept nogil
    void store "traffic_store" (bint* p, bint v) noexcept nogil

cdef enum:
    ENDS = 256               # bytes at each end of a block that are written and read

# The first bytes of every block.
cdef struct Label:
    uintptr_t address
    uint64_t nbytes
    uint64_t number          # of the thread and the block

cdef extern from *:
    const char* NO_MEMORY "\"no memory\""
    const char* MISALIGNED "\"misaligned\""
    const char* TOO_SMALL "\"a usable size below what was asked for\""
    const char* OVERWRITTEN "\"another's bytes\""
    const char* REFUSED "\"a free of a live block was refused\""


cdef class Shop:
    """One allocator, and `cells` where threads leave blocks for each other."""

    cdef Pool pool           # exactly one of these two is there
    cdef Slab slab
    cdef char** cells
    cdef readonly Py_ssize_t n_cells
    cdef bint stopped

    def __cinit__(self, allocator, Py_ssize_t n_cells=0):
        if isinstance(allocator, Slab):
            self.slab = allocator
        else:
            self.pool = allocator
        self.n_cells = n_cells
        self.cells = <char**>calloc(max(n_cells, 1), sizeof(char*))
        if self.cells == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.cells)

    def stop(self):
        """Let all that `trade` without an end come to it."""
        store(&self.stopped, True)

    def drain(self):
        """Give back what is in the cells; how many blocks that were."""
        cdef Py_ssize_t i
        cdef int count = 0
        cdef char* block
        for i in range(self.n_cells):
            block = swap(&self.cells[i], NULL)
            if block != NULL:
                judge(check(block))
                judge(give(self, block))
                count += 1
        return count

    def trade(self, uint64_t seed, long rounds, size_t most, size_t aligns=1, bint patient=False):
        """Take `rounds` blocks (0: until `stop`), each labelled and put into a random cell.

        What was there before, from whichever thread, is checked and given back. Blocks of a Pool
        have up to `most` bytes, log-uniform, aligned to a power of two below `aligns` times 2.
        Without a cell each block is given back at once. If `patient`, there may be no memory.
        Returns how many blocks were taken. Raises AssertionError saying what was wrong.
        """
        cdef uint64_t draw = seed * 2 + 1
        cdef long taken = 0, i = 0
        cdef size_t nbytes, align
        cdef char* block
        cdef const char* wrong = NULL
        with nogil:
            while wrong == NULL and (i < rounds or (rounds == 0 and not load(&self.stopped))):
                i += 1
                nbytes = size_from(next_of(&draw), most)
                align = <size_t>1 << (next_of(&draw) % 32)
                align = align if align <= aligns else 1
                block = take(self, nbytes, align)
                if block == NULL:
                    if not patient:
                        wrong = NO_MEMORY
                    continue
                taken += 1
                if <uintptr_t>block % align:
                    wrong = MISALIGNED
                    break
                if self.pool is not None and pool_usable_size(self.pool, block) < nbytes:
                    wrong = TOO_SMALL
                    break
                label(block, nbytes, seed << 32 | <uint64_t>i)
                if self.n_cells:
                    block = swap(&self.cells[next_of(&draw) % self.n_cells], block)
                if block != NULL:
                    wrong = check(block)
                    if wrong == NULL:
                        wrong = give(self, block)
        judge(wrong)
        return taken

    def take_all(self, size_t nbytes):
        """Addresses of blocks, until NULL. They are labelled."""
        cdef char* block
        found = []
        while True:
            block = take(self, nbytes, 1)
            if block == NULL:
                return found
            label(block, nbytes, len(found))
            found.append(<uintptr_t>block)

    def take_one(self, size_t nbytes, size_t align=1):
        """An address; 0 if that is refused."""
        return <uintptr_t>take(self, nbytes, align)

    def give_one(self, uintptr_t block):
        """What the call returns."""
        if self.pool is not None:
            return pool_free(self.pool, <void*>block)
        return slab_free(self.slab, <void*>block)

    def give_checked(self, uintptr_t block):
        """The same, of a labelled block."""
        judge(check(<char*>block))
        return self.give_one(block)

    def give_all(self, list blocks):
        """Give back, without the GIL, what may be refused; how many were accepted."""
        cdef Py_ssize_t i, n = len(blocks)
        cdef int accepted = 0
        cdef char** at = <char**>calloc(max(n, 1), sizeof(char*))
        if at == NULL:
            raise MemoryError
        for i in range(n):
            at[i] = <char*><uintptr_t>blocks[i]
        with nogil:
            for i in range(n):
                accepted += give(self, at[i]) == NULL
        free(at)
        return accepted

    def usable_size(self, uintptr_t block):
        return pool_usable_size(self.pool, <void*>block)


cdef inline char* take(Shop shop, size_t nbytes, size_t align) noexcept nogil:
    if shop.pool is not None:
        return <char*>pool_alloc(shop.pool, nbytes, align)
    return <char*>slab_alloc(shop.slab)


cdef inline const char* give(Shop shop, char* block) noexcept nogil:
    if shop.pool is not None:
        return NULL if pool_free(shop.pool, block) == 0 else REFUSED
    return NULL if slab_free(shop.slab, block) == 0 else REFUSED


cdef inline uint64_t next_of(uint64_t* state) noexcept nogil:
    """xorshift64*"""
    state[0] ^= state[0] >> 12
    state[0] ^= state[0] << 25
    state[0] ^= state[0] >> 27
    return (state[0] * <uint64_t>2685821657736338717) >> 16


cdef inline size_t size_from(uint64_t draw, size_t most) noexcept nogil:
    """From the bytes of a label up to `most`; half of all below its square root, about."""
    cdef int bits = 0
    while most >> bits:
        bits += 1
    most = min(most, (<size_t>1 << (5 + (draw >> 32) % max(bits - 4, 1))) - 1)
    return sizeof(Label) + draw % (max(most, sizeof(Label)) - sizeof(Label) + 1)


cdef void label(char* block, size_t nbytes, uint64_t number) noexcept nogil:
    cdef Label mine = Label(<uintptr_t>block, nbytes, number)
    cdef int byte = <int>(number * 31 + 7) & 255
    memset(block, byte, min(nbytes, <size_t>ENDS))
    if nbytes > ENDS:
        memset(block + nbytes - min(nbytes - ENDS, <size_t>ENDS), byte,
               min(nbytes - ENDS, <size_t>ENDS))
    memcpy(block, &mine, sizeof(Label))


cdef const char* check(const char* block) noexcept nogil:
    """What is wrong with a labelled block, or NULL."""
    cdef Label mine
    cdef char[ENDS] expected
    cdef size_t front, tail
    memcpy(&mine, block, sizeof(Label))
    if mine.address != <uintptr_t>block:
        return OVERWRITTEN
    memset(expected, <int>(mine.number * 31 + 7) & 255, ENDS)
    front = min(<size_t>mine.nbytes, <size_t>ENDS) - sizeof(Label)
    tail = min(<size_t>mine.nbytes - ENDS, <size_t>ENDS) if mine.nbytes > ENDS else 0
    if (memcmp(block + sizeof(Label), expected, front) != 0
            or memcmp(block + mine.nbytes - tail, expected, tail) != 0):
        return OVERWRITTEN
    return NULL


cdef int judge(const char* wrong) except -1:
    if wrong != NULL:
        raise AssertionError(wrong.decode())
    return 0
