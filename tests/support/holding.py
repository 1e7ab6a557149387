"""What a test knows of allocators whose blocks go back as soon as nobody sees them: Slab and Pool.

A block is live until it is released and was never exported, or else until its Buffer object is
gone. The three kinds of export are those of `bump_model`. The model counts by itself (`Tally`) and
compares with the figures after every step; a subclass knows how large a block is (`size_of`).
"""

import contextlib
import gc
import threading
from dataclasses import dataclass, field

import numpy as np
from bump_model import EXPORTS, LIVE, UNSURE
from helpers import PAGE, peek
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import rule
from machines import AllocatorMachine, Block, choice, needs, step

import arenapy

WHOLE = 1 << 14  # bytes of a block that are all filled and read; of a longer one, samples


@dataclass(eq=False)
class HeldBlock(Block):
    """A live block: `handles` are Buffers, the root first, `exports` are (kind, object)."""

    size: int = 0  # its bytes in the allocator, padding included
    asked: int = 0  # the class that its request counts in
    size_class: int = 0  # the class of `size`
    root: object = None  # while the root Buffer is among the handles
    exports: list = field(default_factory=list)
    exported: bool = False
    released: bool = False
    orphan: bool = False  # its allocator is gone
    plain: bool = True  # the next request of its size can be served with it

    def has(self, kind):
        return any(kind == exported for exported, _ in self.exports)


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


class HoldingMachine(AllocatorMachine):
    """Attack an allocator that takes blocks back in any order."""

    def __init__(self):
        super().__init__()
        self.tally = Tally()
        self.last_freed = None  # (start, size) of the block freed last, if nothing happened since

    # Hooks -----------------------------------------------------------------------------------

    def allocate(self, allocator, nbytes, align):
        return allocator.alloc(nbytes) if align is None else allocator.alloc(nbytes, align)

    def address(self, block):
        return block.address

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
        """Take in a Buffer, or an array or dict of arrays, which hold theirs from birth."""
        serial = super().admit(handle, nbytes, align, start)
        plain = self.live[serial]
        block = HeldBlock(plain.start, plain.nbytes, plain.fill, plain.handles)
        block.size = self.size_of(nbytes)
        if isinstance(handle, arenapy.Buffer):
            assert handle.nbytes == len(handle) == nbytes
            assert not handle.held and not handle.closed
            self.names_its_allocator(handle, False)
            block.root = handle
        else:
            block.handles, block.exports, block.exported = [], [(UNSURE, handle)], True
        self.live[serial] = block
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

    def dropped(self, serial, other_thread=False):
        """Something of the block was dropped: see whether it was the last."""
        block = self.live[serial]
        if not (block.handles or block.exports):
            self.gone(serial, other_thread)

    def drop_everything(self, serial, other_thread):
        block = self.live[serial]
        block.root = None

        def drop():
            block.exports.clear()
            block.handles.clear()

        if other_thread:
            thread = threading.Thread(target=drop)
            thread.start()
            thread.join()
        drop()
        self.dropped(serial, other_thread)

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

    def handles_say_what_they_are(self):
        for block in self.live.values():
            for handle in block.handles:
                assert handle.closed == block.released
                if not block.released:
                    self.names_its_allocator(handle, block.orphan)
            if block.root is not None and not block.released:
                assert block.root.held == block.exported
                assert block.root.address == block.start

    def names_its_allocator(self, handle, orphan):
        assert handle.allocator is (None if orphan else self.allocator)

    # Rules: seeing ---------------------------------------------------------------------------

    def open_handles(self, serial):
        return [] if self.live[serial].released else self.live[serial].handles

    @needs("live")
    @rule(serial=choice("live"), kind=st.sampled_from(sorted(EXPORTS)), which=st.integers(0, 3))
    @step
    def export(self, serial, kind, which):
        handles = self.open_handles(serial)
        if handles:
            how, call = EXPORTS[kind]
            exported = call(handles[which % len(handles)])
            self.live[serial].exports.append((how, exported))
            self.live[serial].exported = True

    @needs("live")
    @rule(serial=choice("live"), ends=st.tuples(*[st.integers(-50, 50)] * 2))
    @step
    def slice(self, serial, ends):
        handles = self.open_handles(serial)
        if 0 < len(handles) < 4:
            part = handles[-1][slice(*ends)]
            start, stop, _ = slice(*ends).indices(len(handles[-1]))
            assert part.nbytes == max(0, stop - start)
            assert not part.nbytes or part.address == handles[-1].address + start
            handles.append(part)

    # Rules: letting go -----------------------------------------------------------------------

    @needs("live")
    @rule(serial=choice("live"), which=st.integers(0, 5))
    @step
    def drop_export(self, serial, which):
        exports = self.live[serial].exports
        if exports:
            del exports[which % len(exports)]
            self.dropped(serial)

    @needs("live")
    @rule(serial=choice("live"), which=st.integers(0, 5))
    @step
    def drop_handle(self, serial, which):
        block = self.live[serial]
        if block.handles:
            if block.handles[which % len(block.handles)] is block.root:
                block.root = None
            del block.handles[which % len(block.handles)]
            self.dropped(serial)

    @needs("live")
    @rule(serial=choice("live"), other_thread=st.booleans())
    @step
    def drop_all(self, serial, other_thread):
        self.drop_everything(serial, other_thread)

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
        self.allocator = None
        handles = [handle for block in self.live.values() for handle in block.handles]
        if any(handle.allocator is not None for handle in handles):
            gc.collect()  # a traceback may keep it, or (free-threaded) a count not yet merged
        for block in self.live.values():
            block.orphan = True
            assert block.released or all(handle.allocator is None for handle in block.handles)
        self.tally = Tally()
        self.last_freed = None
        self.allocator = self.make(**self.config)

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
