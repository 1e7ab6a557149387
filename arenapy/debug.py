"""Debug mode, seen from Python: which blocks are live, and where they were allocated.

What lives here: listing live blocks, and the summary of them when the interpreter exits. What does
not: keeping account of them (ledger), what an allocator does with it (regions).
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from arenapy.allocator import Allocator
from arenapy.ledger import Ledger

__all__ = ["LiveBlock", "live_blocks"]

PLACES = 10  # that a summary names at most


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
    """

    address: int
    nbytes: int
    place: str


# Of all allocators in debug mode; each lives as long as the last Buffer of its allocator.
_ledgers: list[weakref.ref[Ledger]] = []


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


def summary(blocks: Iterable[tuple[int, int, str]]) -> str:
    """How many blocks these are, and where most of their bytes were allocated."""
    places: dict[str, tuple[int, int]] = {}
    for _, nbytes, place in blocks:
        count, total = places.get(place, (0, 0))
        places[place] = count + 1, total + nbytes
    most = sorted(places.items(), key=lambda item: item[1][1], reverse=True)
    count, total = (sum(figures) for figures in zip(*places.values(), strict=True))
    text = f"{_blocks(count)} of {total} bytes"
    for place, (count, total) in most[:PLACES]:
        text += f"\n  {_blocks(count)} of {total} bytes allocated at {place}"
    if len(most) > PLACES:
        text += f"\n  ... and at {len(most) - PLACES} other places"
    return text


def remember(ledger: Ledger) -> None:
    """Report on this one when the interpreter exits."""
    _ledgers[:] = [one for one in _ledgers if one() is not None]
    _ledgers.append(weakref.ref(ledger))


def _alive() -> list[Ledger]:
    ledgers = [reference() for reference in list(_ledgers)]
    return [ledger for ledger in ledgers if ledger is not None]


def _report() -> None:
    """Print what is still live; in a forked child only what allocators have that it made."""
    for ledger in _alive():
        blocks = ledger.live() if ledger.process == os.getpid() else []
        if blocks and sys.stderr is not None:
            allocator = ledger.allocator()
            name = f"an allocator ({ledger.what}) that is gone" if allocator is None else allocator
            print(f"arenapy: at exit, {name} still has {summary(blocks)}", file=sys.stderr)


def _blocks(count: int) -> str:
    return f"{count} block{'s' if count != 1 else ''}"


atexit.register(_report)
