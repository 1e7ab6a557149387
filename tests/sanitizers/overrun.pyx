# cython: language_level=3
"""Writes and reads of single bytes by compiled code, and blocks by arenapy's C calls.

Built by test_overruns.py with the flags of the arenapy that is under test, so that a sanitizer sees
what this does as it sees a C user's program.
"""
from libc.stdint cimport uintptr_t

from arenapy cimport (
    Bump, BumpMark, Pool, Slab, bump_alloc, bump_free, bump_mark, bump_reset, pool_alloc, pool_free,
    pool_usable_size, slab_alloc, slab_free,
)


def write(uintptr_t address):
    (<volatile unsigned char*>address)[0] = 1


def read(uintptr_t address):
    return (<volatile unsigned char*>address)[0]


def fill(uintptr_t address, size_t nbytes):
    """Every byte of a block is its owner's."""
    cdef size_t i
    for i in range(nbytes):
        (<volatile unsigned char*>address)[i] = 1


def alloc(allocator, size_t nbytes, size_t align=64):
    cdef void* block
    if isinstance(allocator, Bump):
        block = bump_alloc(<Bump>allocator, nbytes, align)
    elif isinstance(allocator, Pool):
        block = pool_alloc(<Pool>allocator, nbytes, align)
    else:
        block = slab_alloc(<Slab>allocator)
    if block == NULL:
        raise MemoryError
    return <uintptr_t>block


def free(allocator, uintptr_t block, size_t nbytes=0):
    cdef int status
    if isinstance(allocator, Bump):
        status = bump_free(<Bump>allocator, <void*>block, nbytes)
    elif isinstance(allocator, Pool):
        status = pool_free(<Pool>allocator, <void*>block)
    else:
        status = slab_free(<Slab>allocator, <void*>block)
    if status < 0:
        raise ValueError("no block to be freed")


def usable(Pool pool, uintptr_t block):
    return pool_usable_size(pool, <void*>block)


def turn(Bump arena, size_t nbytes, int times):
    """Mark, allocate, fill and reset, as a loop in C does; the address of the last block."""
    cdef BumpMark mark
    cdef char* block = NULL
    cdef size_t i
    for _ in range(times):
        mark = bump_mark(arena)
        block = <char*>bump_alloc(arena, nbytes, 64)
        if block == NULL:
            raise MemoryError
        for i in range(nbytes):
            block[i] = 1
        if bump_reset(arena, mark) < 0:
            raise ValueError("a stale mark")
    return <uintptr_t>block
