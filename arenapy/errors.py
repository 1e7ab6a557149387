"""The exceptions of arenapy, in addition to Python's own."""

__all__ = ["MemoryCorruption", "OutOfMemory"]


class MemoryCorruption(RuntimeError):
    """The program wrote to freed memory. Debug mode raises this error.

    The message names the former block of the memory, the first damaged byte, and where the block
    was allocated and freed.

    Examples
    --------
    >>> import arenapy, ctypes
    >>> slab = arenapy.Slab(4096, count=4, debug=True)
    >>> item = slab.alloc()
    >>> address = item.address
    >>> item.release()
    >>> _ = ctypes.memset(address, 0, 1)     # a write after free
    >>> slab.alloc()
    Traceback (most recent call last):
        ...
    arenapy.errors.MemoryCorruption: write after free: byte 0 of the block of 4096 bytes at ...
    """


class OutOfMemory(MemoryError):
    """There is not enough memory for a request.

    The message names the request, the memory that there was, and the option to change.

    Examples
    --------
    >>> import arenapy
    >>> arena = arenapy.Bump(1 << 20)
    >>> try:
    ...     arena.alloc(2 << 20)
    ... except arenapy.OutOfMemory as error:
    ...     print("use less, or give max_bytes")
    use less, or give max_bytes
    """
