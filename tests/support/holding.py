"""What a test knows of allocators whose blocks go back as soon as nobody sees them: Slab and Pool.

A block is live until it is released and was never exported, or else until its Buffer object is
gone. The model counts by itself (`Tally`) and
compares with the figures after every step; a subclass knows how large a block is (`size_of`).
"""

import contextlib
from dataclasses import dataclass

import numpy as np
from exporting import LIVE, UNSURE, ExportingMachine, SeenBlock
from helpers import PAGE, peek
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import rule
from machines import choice, needs, step

import arenapy

WHOLE = 1 << 14  # bytes of a block that are all filled and read; of a longer one, samples


@dataclass(eq=False)
class HeldBlock(SeenBlock):
    """A live block."""

    size: int = 0  # its bytes in the allocator, padding included
    asked: int = 0  # the class that its request counts in
    size_class: int = 0  # the class of `size`
    plain: bool = True  # the next request of its size can be served with it


@dataclass
class Tally:
    """The model's own count."""

    total: int = 0
    active: int = 0
    allocated: int = 0
    peak: int = 0

    def took(self, size):
        self.allocated += size
        self.peak = max(self.peak, self.allocated)


class HoldingMachine(ExportingMachine):
    """Attack an allocator that takes blocks back in any order."""

    kind_of_block = HeldBlock

    def __init__(self):
        super().__init__()
        self.tally = Tally()
        self.last_freed = None  # (start, size) of the block freed last, if nothing happened since

    # Hooks -----------------------------------------------------------------------------------

    def windows(self, nbytes):
        if nbytes <= WHOLE:
            return [(0, nbytes)]
        return [(0, PAGE), (nbytes // 2, 64), (nbytes - PAGE, PAGE)]

    def size_of(self, nbytes):
        """The bytes of the block that serves `nbytes` at the default alignment."""
        raise NotImplementedError

    def took(self, block):
        """A block was handed out: count it."""
        self.tally.total += 1
        self.tally.active += 1
        self.tally.took(block.size)

    def went_back(self, block):
        self.tally.active -= 1
        self.tally.allocated -= block.size

    def snapshot(self):
        """All that the allocator says about itself."""
        regions = [(region.address, region.nbytes) for region in self.allocator.regions]
        blocks = [(b.address, b.nbytes, b.size_class, b.state) for b in self.allocator.blocks()]
        return self.allocator.stats(), regions, sorted(blocks)

    # The model -------------------------------------------------------------------------------

    def mine(self):
        """The blocks of the allocator that there is now."""
        return [block for block in self.live.values() if not block.orphan]

    def admit(self, handle, nbytes, align, start=None):
        serial = super().admit(handle, nbytes, align, start)
        block = self.live[serial]
        block.size = self.size_of(nbytes)
        self.took(block)
        return serial

    def check_reuse(self, start, size):
        """Last in, first out: what was freed last serves the next request of its size."""
        last, self.last_freed = self.last_freed, None
        if last is not None and last[1] == size:
            same = last[0] is None or self.same_block(last[0], start, size)
            assert same, f"{last[0]:#x} was freed last, and {start:#x} served"
            event("the block freed last serves again")

    def same_block(self, start, other, size):
        return start == other

    def gone(self, serial, other_thread=False):
        block = super().gone(serial)
        if not block.orphan:
            self.went_back(block)
            # Another thread may have a cache of its own: there, what is known is only the size.
            start = None if other_thread else block.start
            self.last_freed = (start, block.size) if block.plain else None
        return block

    @contextlib.contextmanager
    def only_bookkeeping(self):
        """The body, which allocates and frees nothing, leaves what is live as it was."""
        before = self.allocator.stats()
        self.last_freed = None
        yield
        after = self.allocator.stats()
        for name in ("total_allocations", "active_allocations", "allocated_bytes", "peak_bytes"):
            assert getattr(after, name) == getattr(before, name), name

    # Invariants ------------------------------------------------------------------------------

    def look(self):
        super().look()
        self.allocator.check()
        self.counts_are_the_models(self.allocator.stats(), self.tally)
        self.blocks_are_listed()
        self.handles_say_what_they_are()

    def counts_are_the_models(self, stats, tally):
        assert stats.total_allocations == tally.total
        assert stats.active_allocations == tally.active
        assert stats.allocated_bytes == tally.allocated
        assert stats.peak_bytes == tally.peak
        assert stats.pending_bytes == 0, "no other process has any of it"
        assert stats.idle_bytes >= 0 and stats.metadata_bytes >= 0

    def blocks_are_listed(self):
        """Every live block once, nothing overlaps, and no block lies across two regions."""
        listed = sorted(self.allocator.blocks(), key=lambda info: info.address)
        regions = [(r.address, r.address + r.nbytes) for r in self.allocator.regions]
        end = 0
        live, by_state = [], dict.fromkeys(("live", "idle", "pending"), 0)
        for info in listed:
            assert info.address >= end, f"{info} overlaps the block before"
            assert info.nbytes > 0 and info.age >= 0
            end = info.address + info.nbytes
            assert any(a <= info.address and end <= b for a, b in regions), f"{info} in no region"
            by_state[info.state] += info.nbytes
            if info.state == "live":
                live.append(info)
        stats = self.allocator.stats()
        assert len(regions) == stats.regions
        assert by_state["live"] == stats.allocated_bytes
        assert by_state["idle"] == stats.idle_bytes
        assert by_state["pending"] == stats.pending_bytes
        mine = sorted(self.mine(), key=lambda block: block.start)
        assert len(live) == len(mine), "live blocks are listed that are not, or the reverse"
        for info, block in zip(live, mine, strict=True):
            inside = info.address <= block.start and block.end <= info.address + info.nbytes
            assert inside, f"{block} is not {info}"
            assert info.nbytes == block.size
            self.listed_as(info, block)

    def listed_as(self, info, block):
        """Further things that `info` must say of `block`."""

    # Rules: letting go -----------------------------------------------------------------------

    @needs("live")
    @rule(serials=st.runner().flatmap(lambda m: st.permutations(sorted(m.live))))
    @step
    def drop_many(self, serials):
        for serial in serials[: (len(serials) + 1) // 2]:
            self.drop_everything(serial, False)

    @needs("live")
    @rule(serial=choice("live"))
    @step
    def release(self, serial):
        block = self.live[serial]
        if block.root is None:
            return
        if block.released:
            block.root.release()  # a no-op, as close() is on a file
            return
        before = None if block.orphan else self.snapshot()
        try:
            block.root.release()
        except BufferError:
            assert block.has(LIVE) or block.has(UNSURE), "refused a release that nothing forbids"
            assert not block.root.closed
            assert block.orphan or self.snapshot() == before, "a refused release changed something"
            return
        assert not block.has(LIVE), "released under a live export"
        assert all(handle.closed for handle in block.handles), "a release left a slice open"
        if block.exported:  # arrays may still see it, until the Buffer object is gone
            block.released = True
            block.handles[:] = [block.root]
        else:
            handle = block.root
            self.gone(serial)
            handle.release()
            handle.release()  # no second block of the same address is freed by it

    # Rules: the end of an allocator ------------------------------------------------------------

    @rule()
    @step
    def drop_the_allocator(self):
        self.tally = Tally()
        self.last_freed = None
        self.make_another()

    # Rules: arrays -----------------------------------------------------------------------------

    def request_array(self, call, nbytes):
        """`call()` makes one array; the model takes it in, or knows why there is none."""
        raise NotImplementedError

    @rule(
        shape=st.lists(st.integers(0, 12), max_size=3).map(tuple),
        dtype=st.sampled_from(["u1", "f4", "f8", "i2,f8"]),
        zeros=st.booleans(),
    )
    @step
    def array(self, shape, dtype, zeros):
        make = self.allocator.zeros if zeros else self.allocator.empty
        array = self.request_array(
            lambda: make(shape, dtype), int(np.prod(shape)) * np.dtype(dtype).itemsize
        )
        if array is not None:
            assert array.shape == shape and array.dtype == np.dtype(dtype)
            assert isinstance(array.base, arenapy.Buffer)
            if zeros:
                seen = peek(array.ctypes.data, array.nbytes)
                assert seen == bytes(array.nbytes), "zeros is dirty"
            self.admit(array, array.nbytes, None, array.ctypes.data)
