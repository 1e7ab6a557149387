"""The requests of a trace to an allocator, as two arrays that a loop in C can follow.

What lives here: telling which allocation a free, a reset or a reused address ends, and the figures
of a trace that no allocator changes. What does not: running it (worker.py, loop.pyx).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from arenapy.trace import OPERATIONS, Trace
from arenapy.trace.trace import no_allocation

__all__ = ["ALIGN", "DEVICE_ALIGN", "Program", "program", "save_array"]

ALIGN, DEVICE_ALIGN = 64, 256  # of arenapy's allocators by default


def save_array(path: Path, array: npt.NDArray[Any]) -> None:
    """As `np.save`, which does not say why it cannot write, for instance that the disk is full."""
    with open(path, "wb") as file:
        np.save(SimpleNamespace(write=file.write), array)  # and not to a file, as far as it sees


@dataclass(frozen=True, eq=False, slots=True)
class Program:
    """Steps: slot i >= 0 is filled with a block, slot ~i is freed.

    Attributes
    ----------
    slots : ndarray of int32
    sizes : ndarray of uint64
        Bytes of the block of each step.
    count : int
        More than any slot.
    ignored : int
        Frees of blocks whose allocation is not in the trace.
    """

    slots: npt.NDArray[np.int32]
    sizes: npt.NDArray[np.uint64]
    count: int
    ignored: int

    def __len__(self) -> int:
        return len(self.slots)

    def live(self) -> npt.NDArray[np.int64]:
        """Bytes that are live after each step."""
        sizes = self.sizes.astype("i8")
        return np.cumsum(np.where(self.slots >= 0, sizes, -sizes), dtype="i8")

    def bump_bytes(self, align: int = ALIGN) -> int:
        """The room that a Bump needs: it frees its newest block, or all if none is live."""
        start: dict[int, int] = {}
        cursor = most = 0
        for slot, size in zip(self.slots.tolist(), self.sizes.tolist(), strict=True):
            if slot >= 0:
                start[slot] = -(-cursor // align) * align
                cursor = start[slot] + max(1, size)
                most = max(most, cursor)
            else:
                at = start.pop(~slot)
                if not start:
                    cursor = 0
                elif at + max(1, size) == cursor:
                    cursor = at
        return most

    def slab_items(self) -> tuple[int, int]:
        """The items that a Slab needs: bytes of the largest block, most blocks live at once."""
        return max(1, int(self.sizes.max())), int(np.cumsum(np.where(self.slots >= 0, 1, -1)).max())

    def slab_bytes(self, align: int = ALIGN) -> int:
        """The room of these items."""
        item_size, count = self.slab_items()
        return -(-item_size // align) * align * count

    def first(self, n: int) -> Program:
        """The first n steps."""
        return Program(self.slots[:n], self.sizes[:n], self.count, self.ignored)

    def save(self, folder: Path) -> None:
        """For `load` in another process."""
        save_array(folder / "slots.npy", self.slots)
        save_array(folder / "sizes.npy", self.sizes)
        save_array(folder / "counts.npy", np.array([self.count, self.ignored]))

    @classmethod
    def load(cls, folder: Path) -> Program:
        """Read a program that `save` wrote."""
        count, ignored = np.load(folder / "counts.npy").tolist()
        return cls(np.load(folder / "slots.npy"), np.load(folder / "sizes.npy"), count, ignored)


class _Blocks:
    """The blocks that are live as the trace is read, each in a slot."""

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.sizes: list[int] = []
        self.live: dict[int, tuple[int, int]] = {}  # by address, oldest first: slot, bytes
        self.spare: list[int] = []
        self.count = 0

    def start(self, address: int, nbytes: int) -> None:
        if address in self.live:  # its end was not recorded: a reset of a held block, say
            self.end(*self.live.pop(address))
        if self.spare:
            slot = self.spare.pop()
        else:
            slot = self.count
            self.count += 1
        self.live[address] = slot, nbytes
        self.slots.append(slot)
        self.sizes.append(nbytes)

    def end(self, slot: int, nbytes: int) -> None:
        self.spare.append(slot)
        self.slots.append(~slot)
        self.sizes.append(nbytes)


def program(trace: Trace) -> Program:
    """The requests of a trace to an allocator.

    A reset becomes the frees of what was allocated since its mark, newest first. Threads are
    not told apart: everything happens in the order of the trace.

    Parameters
    ----------
    trace : Trace

    Raises
    ------
    ValueError
        If the trace has no allocation.
    """
    blocks = _Blocks()
    marks: dict[int, int] = {}  # by number: allocations before it
    serials: dict[int, int] = {}  # by address: how many allocations there were before
    allocated = ignored = 0
    events: Any = trace.events
    codes = {code: name for name, code in OPERATIONS.items()}
    for code, address, nbytes in zip(
        events["operation"].tolist(),
        events["address"].tolist(),
        events["nbytes"].tolist(),
        strict=True,
    ):
        match codes[code]:
            case "alloc":
                blocks.start(address, nbytes)
                serials[address] = allocated
                allocated += 1
            case "free":
                if address in blocks.live:
                    blocks.end(*blocks.live.pop(address))
                else:
                    ignored += 1
            case "mark":
                marks[address] = allocated
            case "reset":
                since = marks.get(address, 0) if address else 0
                while blocks.live:
                    # (What reversed() returns walks over all that was ended: that is quadratic.)
                    newest, block = blocks.live.popitem()
                    if serials[newest] < since:
                        blocks.live[newest] = block
                        break
                    blocks.end(*block)
    if not allocated:
        raise no_allocation(trace, "replay")
    return Program(
        np.array(blocks.slots, "i4"), np.array(blocks.sizes, "u8"), blocks.count, ignored
    )
