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
    """A block that was allocated in debug mode and not given back.

    Attributes
    ----------
    address : int
        Of its first byte.
    nbytes : int
        Bytes that were asked for.
    place : str
        Where it was allocated: file, line and function of the innermost frames outside arenapy.

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
    """All blocks of an allocator in debug mode that were not given back.

    Parameters
    ----------
    allocator : Allocator
        Made with ``debug=True``, or under ``ARENAPY_DEBUG=1``.

    Returns
    -------
    list of LiveBlock
        By address. Of a Bump also blocks whose Buffers are gone, until a reset; not what C calls
        took from a Bump.

    Raises
    ------
    ValueError
        If it is not in debug mode.
    TypeError
        If it is no allocator.

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
