"""Debug mode at the end: how many blocks were never freed, and where they were allocated."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Iterable

from arenapy.diagnostics.ledger import Ledger

__all__ = ["remember", "summary"]

PLACES = 10  # that a summary names at most

# Of all allocators in debug mode; each lives as long as the last Buffer of its allocator.
_ledgers: dict[weakref.ref[Ledger], None] = {}


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
    _ledgers[weakref.ref(ledger, _ledgers.pop)] = None  # one step, whatever other threads do


def _alive() -> list[Ledger]:
    ledgers = [reference() for reference in _ledgers.copy()]
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
