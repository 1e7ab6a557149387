"""Random programs in debug mode: the right blocks are live, and every planted write is found."""

from bump_machine import BumpMachine, GrowingMachine
from helpers import Pages, poke
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from machines import DEFAULT_ALIGN, step
from pool_machine import PoolMachine
from slab_machine import SlabMachine

import arenapy
from arenapy.debug import live_blocks
from arenapy.errors import MemoryCorruption

FREED = 0xDB
MOST = 4096  # bytes of a planted write


class Planting:
    """For a machine: a rule that writes to free memory."""

    def free_memory(self):
        """(address, bytes) of memory that is free after it was allocated, in the order of freeing:
        where regions lie is not the same in every run."""
        raise NotImplementedError

    @precondition(lambda self: self.allocator is not None and self.free_memory())
    @rule(
        which=st.integers(0, 99),
        first=st.integers(0, 1 << 20),
        length=st.integers(1, MOST),
        value=st.integers(0, 255).filter(lambda value: value != FREED),
    )
    @step
    def write_after_free(self, which, first, length, value):
        free = self.free_memory()
        address, nbytes = free[which % len(free)]
        first %= nbytes
        length = min(length, nbytes - first)
        before = self.snapshot()
        poke(address + first, length, value)
        found = 0
        while True:  # it may have been of several blocks
            try:
                self.allocator.check()
                break
            except MemoryCorruption as error:
                assert f" is {value:#04x}, and not the {FREED:#x} " in str(error)
                found += int(str(error).partition("(damaged bytes: ")[2].partition(")")[0])
        assert found == length, f"of {length} bytes at {address + first:#x} {found} were seen"
        assert self.snapshot() == before
        event("found")


class Recycling(Planting):
    """For Pool and Slab."""

    def make(self, **config):
        self.given, self.calls = {}, 0
        return super().make(**config, debug=True)

    def went_back(self, block):
        super().went_back(block)
        self.given[block.start, block.size] = None

    def free_memory(self):
        if self.calls != self.source.calls:  # a new region may lie where another one was
            self.given.clear()
            self.calls = self.source.calls
        idle = {(b.address, b.nbytes) for b in self.allocator.blocks() if b.state == "idle"}
        return [span for span in self.given if span in idle]

    def look(self):
        super().look()
        found = sorted((block.address, block.nbytes) for block in live_blocks(self.allocator))
        assert found == sorted((block.start, block.nbytes) for block in self.mine())


class DebugPoolMachine(Recycling, PoolMachine):
    pass


class DebugSlabMachine(Recycling, SlabMachine):
    pass


class DebugBumpMachine(Planting, BumpMachine):
    def make(self, nbytes, skew, fail_on=None, growth=None):
        self.given = []
        super().make(nbytes, skew, None, growth)
        self.source = Pages(skew, fail_on)
        return arenapy.Bump(nbytes, self.source, self.max_bytes, self.strict, debug=True)

    def admit(self, handle, nbytes, align, start=None):
        serial = super().admit(handle, nbytes, align, start)
        block = self.live[serial]
        first = block.start - (align or DEFAULT_ALIGN)  # padding is not free, nor looked at
        self.given = [(a, n) for a, n in self.given if a + n <= first or block.end <= a]
        return serial

    def end_blocks(self, serial):
        before = dict(self.live)
        super().end_blocks(serial)
        ended = [block for key, block in before.items() if key not in self.live]
        self.given += [(block.start, block.nbytes) for block in ended if block.nbytes]

    def free_memory(self):
        spans = self.given
        for block in self.live.values():  # some grew
            spans = [(a, n) for a, n in spans if a + n <= block.start or block.end <= a]
        return list(dict.fromkeys(spans))

    def look(self):
        super().look()
        found = [(b.address, b.address + max(b.nbytes, 1)) for b in live_blocks(self.allocator)]
        for block in self.live.values():  # several arrays may be of one block
            inside = [a <= block.start and block.end <= b for a, b in found]
            assert block.orphan or sum(inside) == 1


class DebugGrowingMachine(DebugBumpMachine, GrowingMachine):
    pass


TestDebugPool = DebugPoolMachine.TestCase
TestDebugSlab = DebugSlabMachine.TestCase
TestDebugBump = DebugBumpMachine.TestCase
TestDebugGrowingBump = DebugGrowingMachine.TestCase
