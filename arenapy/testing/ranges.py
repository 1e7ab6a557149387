"""The oracle: which addresses belong to a block, and which bytes they must contain.

It keeps its own list of blocks, and never asks the allocator under test. Each block is filled with
one byte, which is not zero. Blocks that are allocated one after the other have different bytes, so
a block that lies in the memory of another one reads wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from arenapy.testing.faults import Fault

__all__ = ["Live"]

FILLS = 255  # bytes but zero
WHOLE = 1 << 14  # bytes of a block that are all filled and read; of a longer one, samples
SAMPLE = 1 << 12


@dataclass(eq=False, slots=True)
class Live:
    """The facts about one live block.

    Attributes
    ----------
    block : object
        The result of `allocate`.
    start, nbytes : int
        Its address and size.
    fill : int
        The byte that fills all of it.
    extent : int
        Bytes that no other block may have. For an empty block with its own address, one byte.
    survivor : bool
        Whether it was in use at a reset.
    extra : object
        For a subclass.

    Examples
    --------
    >>> from arenapy.testing import Live
    >>> Live(block=None, start=64, nbytes=16, fill=7, extent=16).end
    80
    """

    block: Any
    start: int
    nbytes: int
    fill: int
    extent: int
    survivor: bool = False
    extra: Any = None

    @property
    def end(self) -> int:
        """The first address that is not its own."""
        return self.start + self.extent

    def __str__(self) -> str:
        """Its range."""
        return f"[{self.start:#x}, {self.start + self.nbytes:#x})"


def fill_of(serial: int) -> int:
    """The byte of the block of this number."""
    return 1 + serial % FILLS


def windows(nbytes: int) -> list[tuple[int, int]]:
    """(offset, length) of the parts of a block that are filled and read.

    All of a small one; of a large one both ends, where neighbours and headers are, and the middle.
    """
    if nbytes == 0:
        return []
    if nbytes <= WHOLE:
        return [(0, nbytes)]
    return [(0, SAMPLE), (nbytes // 2, 64), (nbytes - SAMPLE, SAMPLE)]


def check_inside(new: Live, ranges: Sequence[tuple[int, int]]) -> None:
    """A block is within one of the ranges (start, nbytes) that its allocator has."""
    if not any(a <= new.start and new.start + new.nbytes <= a + n for a, n in ranges):
        owned = ", ".join(f"[{a:#x}, {a + n:#x})" for a, n in ranges)
        raise Fault("outside", f"{new} is outside of {owned}")


def check_apart(new: Live, others: Iterable[tuple[int, Live]]) -> None:
    """A block shares no byte with those that are live."""
    for serial, other in others:
        if new.nbytes and other.nbytes and not (new.end <= other.start or other.end <= new.start):
            raise Fault("overlap", f"{new} overlaps block {serial} at {other}, which is live")


def shared_by_empty(new: Live, others: Iterable[tuple[int, Live]]) -> str | None:
    """Which two blocks have one address although one of them is empty; None if no two have."""
    for serial, other in others:
        if (new.nbytes and other.nbytes) or new.end <= other.start or other.end <= new.start:
            continue
        if not new.nbytes and not other.nbytes:
            return f"two empty blocks, block {serial} and a new one, are both at {new.start:#x}"
        empty, full = (other, new) if new.nbytes else (new, other)
        return f"an empty block is at {empty.start:#x}, where {full} is live"
    return None


def check_reads(serial: int, known: Live, offset: int, length: int, seen: bytes) -> None:
    """Check that what was read at `offset` of a block is what was written there."""
    is_bytes = isinstance(seen, bytes | bytearray | memoryview)
    seen = bytes(seen) if is_bytes else seen
    if not is_bytes or len(seen) != length:
        told = f"{len(seen)} bytes" if is_bytes else f"an object of {type(seen)}"
        raise TypeError(
            f"read(block, {offset}, {length}) returned {told}: return the {length} bytes of the "
            f"block from byte {offset} on"
        )
    if seen != bytes([known.fill]) * len(seen):
        at = next(i for i, byte in enumerate(seen) if byte != known.fill)
        raise Fault(
            "contents",
            f"byte {offset + at} of block {serial} at {known} reads {seen[at]:#04x}, "
            f"and {known.fill:#04x} was written",
        )
