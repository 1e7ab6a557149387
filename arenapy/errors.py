"""The exceptions that arenapy raises beside Python's own."""

__all__ = ["MemoryCorruption", "OutOfMemory"]


class MemoryCorruption(RuntimeError):
    """Memory that nobody has was written to. Debug mode raises it.

    The message names the block that the memory was of, the first damaged byte, and where the
    block was allocated and given back.

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
    """A request that the memory behind it cannot serve.

    The message names what was asked, what there was, and which option to turn.

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
