"""Transfer: moving bytes into a block and out of it, while nobody can take it away.

What lives here: copies by this processor, and the choice between them and a stream's. What does
not: the state that protects a block (block), copies by a stream (arenapy.cuda).
"""
import re

from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS, PyBUF_FORMAT, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from libc.string cimport memmove, memset, strchr

from arenapy.base.atomic cimport arenapy_lock_acquire, arenapy_lock_release
from arenapy.buffer.block cimport (
    Block, MemoryOwner, acquire, host_only, is_open_locked, name_of, named_stream, root_of,
    unacquire, why_closed, writable,
)
from arenapy.buffer.stream_hooks cimport StreamHooks

cdef enum:
    NOGIL_BYTES = 1 << 18     # a copy of this size and more runs without the GIL


def refuse_objects(str format not None, other):
    """Raise TypeError if a buffer of this format holds references: bytes over them would crash."""
    if "O" in re.sub(":[^:]*:", "", format):         # without the names of fields
        raise TypeError(
            f"this {type(other).__name__} holds Python objects (format {format!r}), and bytes are "
            "no references; give an array of numbers, like array.astype(float)"
        )


cdef int copy_in(Block block, object source, object stream) except -1:
    cdef StreamHooks hooks = either_hooks(block, source)
    if hooks is not None:
        return hooks.copy(block, source, stream)
    writable(block)
    named_stream(block.owner, stream)
    return copy_bytes(block, source, True)


cdef int copy_out(Block block, object target, object stream) except -1:
    cdef StreamHooks hooks = either_hooks(block, target)
    if hooks is not None:
        return hooks.copy(target, block, stream)
    host_only(block)
    named_stream(block.owner, stream)
    return copy_bytes(block, target, False)


cdef int fill_bytes(Block block, object value, object stream) except -1:
    cdef Py_ssize_t byte
    try:
        byte = value
    except (OverflowError, TypeError):
        byte = -1
    if not 0 <= byte <= 255:
        raise ValueError(f"value={value!r} is not a byte: give a number from 0 to 255")
    if block.owner.hooks is not None:
        return block.owner.hooks.fill(block, <int>byte, stream)
    writable(block)
    named_stream(block.owner, stream)
    return move_bytes(block, block.ptr, NULL, block.size, <int>byte)


cdef StreamHooks either_hooks(Block block, object other):
    """That of memory which streams use, if one of both is."""
    cdef StreamHooks hooks = block.owner.hooks
    if hooks is None and isinstance(other, Block):
        hooks = (<Block>other).owner.hooks
    return hooks


cdef int copy_bytes(Block block, object other, bint inward) except -1:
    """Copy between `block` and `other`, another object with a block, either way."""
    cdef Py_buffer o
    if not inward and isinstance(other, bytes):
        raise BufferError("target is bytes, which cannot be written; give a bytearray")
    PyObject_GetBuffer(
        other, &o, PyBUF_ANY_CONTIGUOUS | PyBUF_FORMAT | (0 if inward else PyBUF_WRITABLE))
    try:
        if o.format != NULL and strchr(o.format, c"O") != NULL:
            refuse_objects((<bytes>o.format).decode("utf-8", "replace"), other)
        if o.len != block.size:
            raise ValueError(
                f"{name_of(block)} has {block.size} bytes and the other side has {o.len}; "
                "slice the larger one"
            )
        if inward:
            move_bytes(block, block.ptr, <char*>o.buf, o.len, 0)
        else:
            move_bytes(block, <char*>o.buf, block.ptr, o.len, 0)
    finally:
        PyBuffer_Release(&o)
    return 0


cdef int move_bytes(Block block, char* to, const char* source, Py_ssize_t n, int byte) except -1:
    """Move n bytes (or set them, without a source), none of which `block` loses meanwhile.

    Small moves happen under the owner's lock; large ones without the GIL, for which the
    Buffer has to be held, and stays so as after an export.
    """
    cdef MemoryOwner owner = root_of(block).owner
    cdef bint valid
    if owner.checked:
        owner.check()
    if n < NOGIL_BYTES:
        arenapy_lock_acquire(&owner.lock)
        valid = is_open_locked(block)
        if valid:
            _move_or_set(to, source, n, byte)
        arenapy_lock_release(&owner.lock)
        if not valid:
            raise ValueError(why_closed(block))
        return 0
    acquire(block, True)
    with nogil:
        _move_or_set(to, source, n, byte)
    unacquire(block)
    return 0


cdef inline void _move_or_set(
    char* to, const char* source, Py_ssize_t n, int byte
) noexcept nogil:
    if source == NULL:
        memset(to, byte, n)
    else:
        memmove(to, source, n)
