# cython: language_level=3, freethreading_compatible=True
"""What a user of the C interface writes: a loop without the GIL, and Buffers in typed code."""

from libc.stdint cimport uintptr_t
from libc.string cimport memset

from arenapy cimport (
    ARENAPY_ABI, Buffer, Bump, BumpMark, Pool, Slab, bump_alloc, bump_free, bump_mark, bump_reset,
    pool_alloc, slab_alloc,
)

cdef extern from "Python.h":
    void PyErr_SetString(object kind, const char* text) noexcept
    void* PyErr_Occurred() noexcept
    void PyErr_Clear() noexcept

COMPILED_FOR_ABI = ARENAPY_ABI


cdef unsigned long long sum_bytes(const unsigned char* start, size_t nbytes) noexcept nogil:
    cdef unsigned long long total = 0
    cdef size_t i
    for i in range(nbytes):
        total += start[i]
    return total


def alloc_while_raising(allocator, size_t nbytes):
    """Allocate with an exception on its way; whether there was a block, and the exception still."""
    cdef void* block
    cdef bint still
    PyErr_SetString(KeyError, b"the caller's own")
    if isinstance(allocator, Bump):
        block = bump_alloc(<Bump>allocator, nbytes, 64)
    elif isinstance(allocator, Slab):
        block = slab_alloc(<Slab>allocator)
    else:
        block = pool_alloc(<Pool>allocator, nbytes, 64)
    still = PyErr_Occurred() != NULL
    PyErr_Clear()
    return block != NULL, still


def frames(Bump arena not None, int rounds, size_t nbytes, size_t align):
    """Run `rounds` frames of two blocks each without the GIL; returns the bytes' sum.

    In each frame both blocks are filled and the second is given back and taken again. Raises
    AssertionError with the round at which a block was missing, misaligned, overlapping, or did
    not come back where it was.
    """
    cdef unsigned char* first
    cdef unsigned char* second
    cdef unsigned long long total = 0
    cdef BumpMark mark
    cdef int i = 0
    cdef const char* wrong = NULL
    with nogil:
        for i in range(rounds):  # no-cython-lint (named in the error below)
            mark = bump_mark(arena)
            first = <unsigned char*> bump_alloc(arena, nbytes, align)
            second = <unsigned char*> bump_alloc(arena, nbytes, align)
            if first == NULL or second == NULL:
                wrong = b"no memory"
                break
            if <uintptr_t> first % align or <uintptr_t> second % align:
                wrong = b"misaligned"
                break
            memset(first, 1, nbytes)
            memset(second, 2, nbytes)
            total += sum_bytes(first, nbytes)
            total += sum_bytes(second, nbytes)
            if bump_free(arena, second, nbytes) != 0:
                wrong = b"free refused"
                break
            if bump_alloc(arena, nbytes, align) != second:
                wrong = b"freed block did not come back"
                break
            if bump_reset(arena, mark) != 0:
                wrong = b"reset refused"
                break
    if wrong != NULL:
        raise AssertionError(f"round {i}: {wrong.decode()}")
    return total


def until_exhausted(Bump arena not None, size_t nbytes):
    """Take blocks without the GIL until NULL; returns how many there were."""
    cdef Py_ssize_t count = 0
    cdef BumpMark mark = bump_mark(arena)
    with nogil:
        while bump_alloc(arena, nbytes, 64) != NULL:
            count += 1
    if bump_reset(arena, mark) != 0:
        raise AssertionError("reset refused")
    return count


def free_twice(Bump arena not None, size_t nbytes):
    """What the two calls return."""
    cdef void* block = bump_alloc(arena, nbytes, 64)
    cdef int once = bump_free(arena, block, nbytes)
    return once, bump_free(arena, block, nbytes)


def reset_to_stale_mark(Bump arena not None):
    """What a reset returns whose mark an older one has ended."""
    cdef BumpMark older = bump_mark(arena)
    cdef BumpMark newer = bump_mark(arena)
    if bump_reset(arena, older) != 0:
        raise AssertionError("reset refused")
    return bump_reset(arena, newer)


def reset_to_stale_mark_of_an_older_frame(Bump arena not None):
    """The same, with blocks between the marks, and with a newer mark at the older one's place."""
    cdef BumpMark older = bump_mark(arena)
    cdef BumpMark newer
    bump_alloc(arena, 1, 1)
    newer = bump_mark(arena)
    if bump_reset(arena, older) != 0:
        raise AssertionError("reset refused")
    bump_mark(arena)
    return bump_reset(arena, newer)


def mark_in_c(Bump arena not None):
    """A mark, for `reset_in_c`."""
    return bump_mark(arena)


def reset_in_c(Bump arena not None, BumpMark mark):
    """What the reset returns."""
    return bump_reset(arena, mark)


def free_under_a_mark(Bump arena not None, size_t nbytes):
    """What freeing a block returns that is older than the newest mark, and a reset to that."""
    cdef void* block = bump_alloc(arena, nbytes, 64)
    cdef BumpMark mark = bump_mark(arena)
    cdef int freed = bump_free(arena, block, nbytes)
    return freed, bump_reset(arena, mark)


def reset_after_release(Bump arena not None, Buffer block not None):
    """What a reset returns when `block`, allocated before the mark, was released after it."""
    cdef BumpMark mark = bump_mark(arena)
    block.release()
    return bump_reset(arena, mark)


def take(Bump arena not None, Py_ssize_t nbytes):
    """A Buffer from typed code."""
    cdef Buffer buffer = arena.alloc(nbytes)
    return buffer
