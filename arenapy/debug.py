"""Debug mode, seen from Python: which blocks are live, and where they were allocated.

What lives here: listing live blocks. What does not: keeping account of them (diagnostics/ledger),
the summary when the interpreter exits (diagnostics/leaks).
"""

from __future__ import annotations

from dataclasses import dataclass

from arenapy.allocator.allocator import Allocator

__all__ = ["LiveBlock", "live_blocks"]


@dataclass(frozen=True, slots=True)
class LiveBlock:
    """A block that was allocated in debug mode and not freed.

    Attributes
    ----------
    address : int
        Address of its first byte.
    nbytes : int
        The requested bytes.
    place : str
        The place of its allocation: file, line and function of the innermost frames outside
        arenapy.

    Examples
    --------
    >>> import arenapy
    >>> from arenapy.debug import live_blocks
    >>> pool = arenapy.Pool(debug=True)
    >>> x = pool.empty(100, "u1")
    >>> block = live_blocks(pool)[0]
    >>> block.nbytes, block.address == x.ctypes.data
    (100, True)
    """

    address: int
    nbytes: int
    place: str


def live_blocks(allocator: Allocator) -> list[LiveBlock]:
    """All live blocks of an allocator in debug mode.

    Parameters
    ----------
    allocator : Allocator
        An allocator made with ``debug=True``, or under ``ARENAPY_DEBUG=1``.

    Returns
    -------
    list of LiveBlock
        Sorted by address. For a Bump, blocks whose Buffers are gone are included until a reset.
        Blocks that C calls took from a Bump are not included.

    Raises
    ------
    ValueError
        If `allocator` is not in debug mode.
    TypeError
        If `allocator` is not an allocator.

    Notes
    -----
    Thread-safety: may be called from any thread.

    Examples
    --------
    >>> import arenapy
    >>> from arenapy.debug import live_blocks
    >>> pool = arenapy.Pool(debug=True)
    >>> x = pool.empty(100, "u1")
    >>> [block.nbytes for block in live_blocks(pool)]
    [100]
    """
    if not isinstance(allocator, Allocator):
        raise TypeError(f"{allocator!r} is not an allocator; give a Bump, Slab or Pool")
    ledger = allocator._ledger()
    if ledger is None:
        raise ValueError(
            f"{allocator!r} is not in debug mode; make it with debug=True, or set ARENAPY_DEBUG=1"
        )
    return [LiveBlock(*found) for found in ledger.live()]
