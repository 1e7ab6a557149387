"""The first word of a Buffer, which processes that share its memory change one at a time.

Contents: the two operations. The meaning of a word is in torch_batches.
"""
from libc.stdint cimport uint64_t

from arenapy.base.atomic cimport arenapy_cas, arenapy_load
from arenapy.buffer.block cimport Block
from arenapy.buffer.buffer cimport Buffer


cdef uint64_t* word_of(Buffer block) except NULL:
    if (<Block>block).size < <Py_ssize_t>sizeof(uint64_t):
        raise ValueError(f"{block!r} is too small for a word")
    return <uint64_t*>(<Block>block).ptr


def load(Buffer block not None):
    """The word."""
    return arenapy_load(word_of(block))


def swap(Buffer block not None, uint64_t old, uint64_t new):
    """Make it `new` if it is `old`; False: it is not."""
    return arenapy_cas(word_of(block), &old, new)
