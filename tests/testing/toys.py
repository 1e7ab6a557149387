"""Toy allocators over a bytearray, right as they stand, and with one planted bug each.

`Toy(bug)` is right for every method but the one that the bug is in; `BUMP_BUGS`, `HEAP_BUGS` and
`THREAD_BUGS` say what there is to be found.
"""

import ctypes
import time

from hypothesis import strategies as st

from arenapy.testing import AllocatorMachine, TwoThreadMachine, alignments, sizes

PAGE = 4096
SLACK = 512  # bytes after the end that nobody may have, so that a bug hurts nobody else
GRAIN = 16  # what a heap rounds to


def up(value, align):
    return -(-value // align) * align


class Toy:
    """Memory that starts on a page, wherever the bytearray does."""

    def __init__(self, nbytes, bug=None):
        self.backing = bytearray(nbytes + PAGE + SLACK)
        self.base = up(ctypes.addressof(ctypes.c_char.from_buffer(self.backing)), PAGE)
        self.nbytes = nbytes
        self.bug = bug

    def clear(self, start, nbytes):
        ctypes.memset(start, 0, nbytes)


class ToyBump(Toy):
    def __init__(self, nbytes, bug=None):
        super().__init__(nbytes, bug)
        self.cursor = 0
        self.marks = []

    def alloc(self, nbytes, align=1):
        if nbytes < 0:
            raise ValueError(nbytes)
        start = self.cursor
        if self.bug != "alignment ignored" and not (
            self.bug == "alignments above 64 ignored" and align > 64
        ):
            start = up(start, align)
        if self.bug == "alignment rounds down" and start != self.cursor:
            start -= align
            start = max(start, 0)
        end = start + max(nbytes, 1)
        if self.bug == "size 0 shares an address" and not nbytes:
            end = start
        if self.bug == "a refusal moves the cursor":
            self.cursor = start
        limit = self.nbytes + (self.bug == "runs past the end by one")
        if end > limit:
            if self.bug != "wraps at the end" or nbytes > self.nbytes:
                raise MemoryError(nbytes)
            start, end = 0, max(nbytes, 1)
        self.cursor = end - (self.bug == "overlap by one byte" and nbytes > 1)
        if self.bug == "writes a header before the block" and start >= 8:
            ctypes.memset(self.base + start - 8, 0, 8)
        return self.base + start

    def zeros(self, nbytes):
        start = self.alloc(nbytes)
        if self.bug == "zeros of large blocks are not":
            self.clear(start, min(nbytes, 1024))
        elif self.bug != "zeros are not":
            self.clear(start, nbytes)
        return start

    def mark(self):
        self.marks.append(self.cursor)
        return self.cursor - (self.bug == "a mark is off by one" and self.cursor > 0)

    def reset(self, mark=None):
        cursor = 0 if mark is None else mark
        if self.bug == "a reset forgets a block" and self.cursor - cursor > 64:
            cursor += 64
        if self.bug == "a stale mark moves forward" or cursor <= self.cursor:
            self.cursor = cursor
        else:
            raise ValueError("a stale mark")

    def used(self):
        return self.cursor

    def remaining(self):
        return max(self.nbytes - self.cursor + (self.bug == "remaining is one too many"), 0)


class ToyHeap(Toy):
    """First fit; free extents (offset, nbytes) sorted by offset, blocks {start: nbytes}."""

    def __init__(self, nbytes, bug=None):
        super().__init__(nbytes, bug)
        self.free_list = [(0, nbytes)]
        self.blocks = {}

    def alloc(self, nbytes, align=1):
        if nbytes < 0:
            raise ValueError(nbytes)
        size = max(up(nbytes, GRAIN), GRAIN)
        if self.bug == "rounds down to the grain" and nbytes > GRAIN:
            size = nbytes // GRAIN * GRAIN
        least = size - GRAIN if self.bug == "fits what is too small" else size
        for index, (offset, length) in enumerate(self.free_list):  # noqa: B007
            start = up(offset, align)
            if start + max(least, 1) <= offset + length:
                break
        else:
            raise MemoryError(nbytes)
        rest = [(offset, start - offset), (start + size, offset + length - start - size)]
        if self.bug == "an exact fit stays on the list" and length == size:
            rest = [(offset, length)]
        if self.bug == "padding before a block is lost":
            rest = rest[1:]
        self.free_list[index : index + 1] = [part for part in rest if part[1] > 0]
        self.blocks[start] = size
        if self.bug == "writes metadata after the block":
            ctypes.memset(self.base + start + size, 0, 8)
        return self.base + start

    def free(self, address):
        start = address - self.base
        if self.bug == "a double free is accepted":
            size = self.blocks.get(start, GRAIN)
        else:
            size = self.blocks.pop(start, None)
            if size is None:
                raise ValueError("no such block")
        if self.bug == "writes its links beyond the block" and size == GRAIN:
            ctypes.memset(self.base + start, 0, 2 * GRAIN)
        if self.bug == "gives back more than it took":
            size += GRAIN
        self.free_list.append((start, size))
        if self.bug == "puts a block on the list twice":
            self.free_list.append((start, size))
        self.free_list.sort()
        if self.bug != "free extents never merge":
            self.merge()
        if self.bug == "loses the last extent" and len(self.free_list) > 2:
            self.free_list.pop()

    def merge(self):
        gap = 2 * GRAIN if self.bug == "merges over a small live block" else 0
        merged = []
        for offset, length in self.free_list:
            if self.bug == "puts a block on the list twice":
                merged.append((offset, length))
            elif merged and sum(merged[-1]) + gap >= offset:
                merged[-1] = (merged[-1][0], offset + length - merged[-1][0])
            else:
                merged.append((offset, length))
        self.free_list = merged

    def reset(self, mark=None):
        self.blocks.clear()
        stale = self.free_list if self.bug == "a stale free list after a reset" else []
        self.free_list = [(0, self.nbytes), *stale]


class ToySlots(Toy):
    """Slots of a page, for two threads; another thread comes in where it sleeps."""

    def __init__(self, nbytes, bug=None):
        super().__init__(nbytes, bug)
        self.free_slots = list(range(nbytes // PAGE))
        self.taken = 0

    def alloc(self, nbytes, align=1):
        if not 0 <= nbytes <= PAGE:
            raise MemoryError(nbytes)
        slots = self.free_slots
        if not slots:
            raise MemoryError(nbytes)
        if self.bug == "two take the same slot":
            slot = slots[-1]
            time.sleep(1e-6)
            self.free_slots = slots[:-1]
            return self.base + slot * PAGE
        try:
            return self.base + slots.pop() * PAGE
        except IndexError:
            raise MemoryError(nbytes) from None

    def free(self, address):
        slot = (address - self.base) // PAGE
        if self.bug == "one of two frees is lost":
            slots = self.free_slots
            time.sleep(1e-6)
            self.free_slots = [*slots, slot]
        else:
            self.free_slots.append(slot)


class ToyMachine(AllocatorMachine):
    bug = None
    configs = st.fixed_dictionaries(
        {"nbytes": st.integers(1, 16).map(lambda n: n * PAGE // 2) | st.integers(64, 3000)}
    )
    sizes = sizes(2 * PAGE, classes=())
    alignments = st.none() | alignments(PAGE)

    def make(self, nbytes):
        return self.toy(nbytes, self.bug)

    def allocate(self, state, nbytes, align):
        return state.alloc(nbytes, align or 1)

    def address(self, block):
        return block

    def bounds(self, state):
        return [(state.base, state.nbytes)]

    def reset(self, state, mark=None):
        state.reset(mark)


class BumpToy(ToyMachine):
    toy = ToyBump
    refills = ("reset",)
    contiguous = True

    def mark(self, state):
        return state.mark()

    def used(self, state):
        return state.used()

    def remaining(self, state):
        return state.remaining()

    def zeroed(self, state, nbytes):
        return state.zeros(nbytes)


class HeapToy(ToyMachine):
    toy = ToyHeap
    refills = ("free", "reset")
    double_free = (ValueError,)

    def free(self, state, block):
        state.free(block)


class SlotsToy(TwoThreadMachine, ToyMachine):
    toy = ToySlots
    reset = None
    refills = ("free",)
    alignments = st.none()
    configs = st.fixed_dictionaries({"nbytes": st.integers(4, 20).map(lambda n: n * PAGE)})

    def free(self, state, block):
        state.free(block)


BUMP_BUGS = [
    "alignment ignored",
    "alignments above 64 ignored",
    "alignment rounds down",
    "size 0 shares an address",
    "a refusal moves the cursor",
    "runs past the end by one",
    "wraps at the end",
    "overlap by one byte",
    "writes a header before the block",
    "zeros are not",
    "zeros of large blocks are not",
    "a mark is off by one",
    "a reset forgets a block",
    "remaining is one too many",
]
HEAP_BUGS = [
    "rounds down to the grain",
    "fits what is too small",
    "an exact fit stays on the list",
    "padding before a block is lost",
    "writes metadata after the block",
    "a double free is accepted",
    "writes its links beyond the block",
    "gives back more than it took",
    "puts a block on the list twice",
    "free extents never merge",
    "loses the last extent",
    "merges over a small live block",
    "a stale free list after a reset",
]
THREAD_BUGS = ["two take the same slot", "one of two frees is lost"]
MACHINES = {
    **dict.fromkeys(BUMP_BUGS, BumpToy),
    **dict.fromkeys(HEAP_BUGS, HeapToy),
    **dict.fromkeys(THREAD_BUGS, SlotsToy),
}


def planted(bug):
    """A machine over the toy with this bug."""
    return type("Planted", (MACHINES[bug],), {"bug": bug, "__module__": __name__})
