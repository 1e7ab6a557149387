"""`Bump` and `Buffer` against the model of `machines.py`: who holds what, marks, scopes, growth.

Held means: a live export, or ever exported while the Buffer object is alive. The model knows three
kinds of export. LIVE ones forbid `release()`; a REFERENCE keeps the Buffer object and nothing else;
for the rest (UNSURE) the contract leaves open which of the two it is, and both are accepted.
"""

import ctypes
import threading
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from machines import AllocatorMachine, Block, MarkRecord, choice, needs, step
from support import PAGE, Pages, peek, poke, unchanged_view

import arenapy

LIVE, REFERENCE, UNSURE = "live", "reference", "unsure"
EXPORTS = {
    "memoryview": (LIVE, memoryview),
    "asarray": (LIVE, np.asarray),
    "ctypes": (LIVE, lambda b: (ctypes.c_char * len(b)).from_buffer(b)),
    "frombuffer": (LIVE, lambda b: np.frombuffer(b, "u1") if len(b) else memoryview(b)),
    "from_dlpack": (LIVE, np.from_dlpack),
    "capsule": (LIVE, lambda b: b.__dlpack__(max_version=(1, 0))),
    "old capsule": (LIVE, lambda b: b.__dlpack__()),
    "ndarray": (REFERENCE, lambda b: np.ndarray((len(b),), "u1", buffer=b)),
    "array": (UNSURE, lambda b: b.array((len(b),), "u1")),
}


@dataclass(eq=False)
class BumpBlock(Block):
    """A block of a Bump: `handles` are Buffers, the root first, `exports` are (kind, object)."""

    root: object = None  # while the root Buffer is among the handles
    exports: list = field(default_factory=list)
    exported: bool = False
    released: bool = False
    orphan: bool = False  # its arena is gone
    inexact: bool = False  # may share its Buffer with others, and so keep more than its bytes

    def has(self, kind):
        return any(kind == exported for exported, _ in self.exports)


class BumpMachine(AllocatorMachine):
    """The Bump of section 6 with the Buffers of section 5."""

    strict = False
    configs = st.fixed_dictionaries(
        {
            "nbytes": st.one_of(
                st.integers(1, 24).map(lambda n: n * PAGE),
                st.integers(1, 3 * PAGE),
                st.just((2 << 20) + 3 * PAGE),
            ),
            "skew": st.sampled_from([0, 0, 64, 8, 1]),
        }
    )

    def __init__(self):
        super().__init__()
        self.scopes = []  # open: (context manager, record in marks or None once ended)
        self.closed = []  # handles that a reset or a release closed
        self.floating = {}  # serial: (bytes, exact) that nobody sees but no reset gave back yet

    # Hooks -----------------------------------------------------------------------------------

    def make(self, nbytes, skew, fail_on=None, growth=None):
        self.source = Pages(skew, fail_on)
        self.max_bytes = None if growth is None else nbytes + growth
        return arenapy.Bump(
            nbytes, source=self.source, max_bytes=self.max_bytes, strict=self.strict
        )

    def allocate(self, allocator, nbytes, align):
        return allocator.alloc(nbytes) if align is None else allocator.alloc(nbytes, align)

    def address(self, block):
        return block.address

    def mark(self, allocator):
        return allocator.mark()

    def reset(self, allocator, mark):
        allocator.reset(mark)

    def used(self, allocator):
        return allocator.used

    def remaining(self, allocator):
        return allocator.remaining

    def survives(self, block):
        return block.exported or block.orphan

    def sure_room(self):
        return self.allocator.stats().largest_free_extent

    def most(self):
        stats = self.allocator.stats()
        return max(stats.largest_free_extent, (self.max_bytes or 0) - stats.capacity)

    def snapshot(self):
        return unchanged_view(self.allocator)

    # The model -------------------------------------------------------------------------------

    def admit(self, handle, nbytes, align, start=None):
        serial = super().admit(handle, nbytes, align, start)
        plain = self.live[serial]
        block = BumpBlock(plain.start, plain.nbytes, plain.fill, plain.handles)
        if isinstance(handle, arenapy.Buffer):
            assert handle.nbytes == len(handle) == nbytes
            assert not handle.held and not handle.closed
            block.root = handle
        else:  # an array, or a dict of arrays, which holds its Buffer from birth
            block.handles, block.exports, block.exported = [], [(UNSURE, handle)], True
        self.live[serial] = block
        return serial

    def gone(self, serial):
        block = super().gone(serial)
        if not (block.survivor or block.orphan):
            self.floating[serial] = (block.nbytes, not block.inexact)
        return block

    def end_blocks(self, serial):
        for young, block in self.live.items():
            if young > serial and not self.survives(block):
                self.closed.extend(block.handles)
        super().end_blocks(serial)
        self.floating = {key: val for key, val in self.floating.items() if key <= serial}
        for handle in self.closed:
            assert handle.closed, "a reset left a Buffer open that nobody held"

    def dropped(self, serial):
        """Something of the block was dropped: see whether it was the last."""
        block = self.live[serial]
        if block.handles or block.exports:
            return
        survivor = block.survivor and not block.inexact
        self.gone(serial)
        if survivor and not block.orphan:
            event("a survivor dies")

    def drop_all_now(self, serial):
        block = self.live[serial]
        before = None if block.orphan else self.allocator.stats()
        block.root = None
        block.handles.clear()
        block.exports.clear()
        self.dropped(serial)
        if block.survivor and before and not block.inexact:
            after = self.allocator.stats()
            back = after.free_bytes - before.free_bytes
            assert block.nbytes <= back <= block.extent, "a survivor's range did not rejoin"

    def strict_outcome(self, serial):
        """What a strict reset of the blocks younger than `serial` does: True raises, None either."""
        held = [b for key, b in self.live.items() if key > serial and self.survives(b)]
        held = [block for block in held if not block.orphan]
        if not self.strict or not held:
            return False
        return True if any(not (b.survivor or b.released) for b in held) else None

    def reset_or_refuse(self, serial, call, record, *, keep, marks_may_change=False):
        """Run `call`, a reset to `serial`; in a strict arena it may have to refuse."""
        outcome = self.strict_outcome(serial)
        before = self.snapshot()
        try:
            call()
        except BufferError as error:
            assert outcome is not False, "refused a reset with nothing held"
            event("a strict arena refuses a reset")
            after = self.snapshot()
            if marks_may_change:
                before, after = ([replace(x, marks=0) if isinstance(x, arenapy.BumpStats) else x
                                  for x in view] for view in (before, after))
            assert after == before, "a refused reset changed something"
            assert str(error)
            return False
        assert outcome is not True, "a strict arena did not refuse"
        if record is not None:
            self.end_frame(record, keep=keep)
        return True

    # Rules: allocating -------------------------------------------------------------------------

    @rule(sizes=st.lists(st.one_of(st.integers(0, 200), st.integers(0, 3 * PAGE)), max_size=6))
    @step
    def alloc_many(self, sizes):
        before = self.snapshot()
        try:
            blocks = self.allocator.alloc_many(sizes)
        except MemoryError:
            event("alloc_many refused")
            assert self.snapshot() == before
            assert sum(sizes) + 64 * len(sizes) > self.sure_room()
            return
        assert [block.nbytes for block in blocks] == sizes
        while blocks:
            self.admit(blocks[0], sizes[0], None)
            del blocks[0], sizes[0]

    @rule(sizes=st.lists(st.sampled_from([8, 0, -1, 2**63, 2**64]), min_size=1, max_size=3))
    @step
    def alloc_many_with_an_impossible_one(self, sizes):
        with self.refused(ValueError):
            self.allocator.alloc_many([*sizes, -1])

    @rule(
        shape=st.lists(st.integers(0, 40), max_size=3).map(tuple),
        dtype=st.sampled_from(["u1", "f4", "f8", "c16", ">i4", "i2,f8", "?"]),
        order=st.sampled_from("CF"),
        zeros=st.booleans(),
    )
    @step
    def array(self, shape, dtype, order, zeros):
        make = self.allocator.zeros if zeros else self.allocator.empty
        before = self.snapshot()
        try:
            array = make(shape, dtype, order)
        except MemoryError:
            assert self.snapshot() == before
            return
        assert array.shape == shape and array.dtype == np.dtype(dtype)
        assert array.flags.writeable and array.flags[f"{order}_CONTIGUOUS"]
        assert isinstance(array.base, arenapy.Buffer)
        if zeros:
            assert peek(array.ctypes.data, array.nbytes) == bytes(array.nbytes), "zeros is dirty"
        self.admit(array, array.nbytes, None, array.ctypes.data)

    @rule(values=st.lists(st.integers(-100, 100), max_size=300))
    @step
    def copy(self, values):
        source = np.array(values, "i4")
        try:
            array = self.allocator.copy(source)
        except MemoryError:
            return
        assert array.dtype == source.dtype and (array == source).all()
        self.admit(array, array.nbytes, None, array.ctypes.data)

    @rule(fields=st.dictionaries(st.sampled_from("xyz"), st.sampled_from(["u1", "f4", "f8"])),
          count=st.integers(0, 200))
    @step
    def struct_of_arrays(self, fields, count):
        try:
            arrays = self.allocator.struct_of_arrays(fields, count)
        except MemoryError:
            return
        assert {name: array.dtype for name, array in arrays.items()} == {
            name: np.dtype(dtype) for name, dtype in fields.items()
        }
        for array in arrays.values():
            assert array.shape == (count,)
            serial = self.admit(arrays, array.nbytes, None, array.ctypes.data)
            self.live[serial].inexact = True

    # Rules: seeing -----------------------------------------------------------------------------

    def open_handles(self, serial):
        return [] if self.live[serial].released else self.live[serial].handles

    @needs("live")
    @rule(serial=choice("live"), kind=st.sampled_from(sorted(EXPORTS)), which=st.integers(0, 3))
    @step
    def export(self, serial, kind, which):
        handles = self.open_handles(serial)
        if not handles:
            return
        handle = handles[which % len(handles)]
        how, call = EXPORTS[kind]
        exported = call(handle)
        block = self.live[serial]
        block.exports.append((how, exported))
        block.exported = True
        if handle is not block.root:
            event("an export below the root")

    @needs("live")
    @rule(serial=choice("live"))
    @step
    def read_interface(self, serial):
        for handle in self.open_handles(serial)[-1:]:
            address, readonly = handle.__array_interface__["data"]
            assert address == handle.address and readonly is False
            self.live[serial].exported = True

    @needs("live")
    @rule(serial=choice("live"), which=st.integers(0, 3), ends=st.tuples(*[st.integers(-50, 50)] * 2))
    @step
    def slice(self, serial, which, ends):
        handles = self.open_handles(serial)
        if not handles or len(handles) > 4:
            return
        handle = handles[which % len(handles)]
        part = handle[slice(*ends)]
        start, stop, _ = slice(*ends).indices(handle.nbytes)
        assert part.nbytes == max(0, stop - start)
        assert not part.nbytes or part.address == handle.address + start
        handles.append(part)

    @needs("live")
    @rule(serial=choice("live"))
    @step
    def view(self, serial):
        handles = self.open_handles(serial)
        if handles and len(handles) <= 4 and handles[0].nbytes % 4 == 0:
            view = handles[0].view((2, handles[0].nbytes // 4), "i2")
            assert view.address == handles[0].address and view.nbytes == handles[0].nbytes
            handles.append(view)

    # Rules: letting go -------------------------------------------------------------------------

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
        if other_thread:
            thread = threading.Thread(target=self.drop_all_now, args=(serial,))
            thread.start()
            thread.join()
            assert serial not in self.live, "the thread failed"
        else:
            self.drop_all_now(serial)

    @needs("live")
    @rule(serial=choice("live"))
    @step
    def release(self, serial):
        block = self.live[serial]
        if block.root is None:
            return
        if block.released:
            block.root.release()  # a no-op, as close() is on a file
        elif block.has(LIVE):
            event("release with live exports")
            if block.orphan:
                pytest.raises(BufferError, block.root.release)
            else:
                with self.refused(BufferError):
                    block.root.release()
            assert not block.root.closed
        else:
            try:
                block.root.release()
            except BufferError:
                assert block.has(UNSURE), "refused a release that nothing forbids"
                return
            self.was_released(serial)

    def was_released(self, serial):
        block = self.live[serial]
        assert all(handle.closed for handle in block.handles), "a release left a slice open"
        if block.exported:
            # Arrays may still see it: the bytes stay until the Buffer object is gone. Whether a
            # closed slice keeps that object is nobody's business, so the slices are let go.
            block.released = True
            block.handles[:] = [block.root]
        else:
            self.closed.extend(block.handles)
            self.gone(serial)

    @needs("live")
    @rule(serial=choice("live"))
    @step
    def release_part(self, serial):
        block = self.live[serial]
        if block.released or block.has(LIVE) or block.has(UNSURE):
            return
        if not block.handles or block.handles[-1] is block.root:
            return
        part = block.handles.pop()
        part.release()
        assert part.closed and not any(handle.closed for handle in block.handles)
        self.closed.append(part)
        # The closed part may or may not keep its root, which decides whether the block is held.
        del part, self.closed[-1]
        self.dropped(serial)

    @needs("closed")
    @rule(index=choice("closed"))
    @step
    def use_closed(self, index):
        handle = self.closed[index]
        for use in (memoryview, lambda b: b[0:1], lambda b: b.__array_interface__,
                    lambda b: b.fill(0)):
            with self.refused(ValueError):
                use(handle)
        handle.release()
        assert "closed" in repr(handle) or "released" in repr(handle)

    @needs("closed")
    @rule()
    @step
    def drop_closed(self):
        self.closed.clear()

    # Rules: growing ----------------------------------------------------------------------------

    @needs("live")
    @rule(serial=choice("live"), more=st.one_of(st.integers(1, 300), st.integers(1, 3 * PAGE)))
    @step
    def grow(self, serial, more):
        block = self.live[serial]
        if block.root is None or block.released or block.orphan:
            return
        nbytes = block.nbytes + more
        newer = any(record.serial >= serial for record in self.marks) or any(
            key > serial and not (b.survivor or b.orphan) for key, b in self.live.items()
        )
        before = self.snapshot()
        fill = block.fill
        try:
            grown = self.allocator.grow(block.root, nbytes)
        except (BufferError, MemoryError) as error:
            assert self.snapshot() == before and not block.root.closed
            if isinstance(error, BufferError):
                assert block.has(LIVE) or block.has(UNSURE)
            return
        assert grown.nbytes == nbytes
        assert peek(grown.address, block.nbytes) == bytes([fill]) * block.nbytes, "contents lost"
        if grown is block.root:
            event("grown in place")
            assert not newer and not block.survivor, "grown in place past something newer"
            assert grown.address == block.start
            block.nbytes = nbytes
            poke(block.start, nbytes, fill)
        else:
            event("grown by moving")
            assert not block.has(LIVE), "moved away from under an export"
            self.was_released(serial)
            self.admit(grown, nbytes, 1)

    # Rules: resets and scopes ------------------------------------------------------------------

    @needs("marks")
    @rule(index=choice("marks"))
    @step
    def reset_to_mark(self, index):
        record = self.marks[index]
        if record.mark is not None:
            self.reset_or_refuse(
                record.serial, lambda: self.allocator.reset(record.mark), record, keep=True
            )

    @precondition(lambda self: any(mark is not None for mark in self.stale))
    @rule(index=choice("stale"))
    @step
    def reset_to_stale_mark(self, index):
        if self.stale[index] is not None:
            event("a stale mark")
            with self.refused(ValueError):
                self.allocator.reset(self.stale[index])

    @rule()
    @step
    def reset_everything(self):
        if not self.reset_or_refuse(0, self.allocator.reset, None, keep=False):
            return
        self.stale.extend(record.mark for record in self.marks)
        self.marks.clear()
        self.end_blocks(0)
        self.only_survivors_are_kept()

    def only_survivors_are_kept(self):
        stats = self.allocator.stats()
        kept = [block for block in self.live.values() if not block.orphan]
        if any(block.inexact for block in kept):
            return
        empty = sum(block.nbytes == 0 for block in kept)
        exact = stats.capacity - sum(block.nbytes for block in kept)
        assert exact - empty <= self.allocator.remaining <= exact, "more is kept than survivors"
        gaps, kept = [], sorted((block.start, block.end) for block in kept)
        for region in self.allocator.regions:
            at, end = region.address, region.address + region.nbytes
            for start, stop in kept:
                if at <= start < end:
                    gaps.append(start - at)
                    at = stop
            gaps.append(end - at)
        if not empty:
            assert stats.largest_free_extent == max(gaps), "the gaps are not coalesced"
        if not kept:
            assert self.allocator.used == 0
            self.retired_ever = False

    @rule()
    @step
    def enter_scope(self):
        record = MarkRecord(None, self.serial, self.allocator.used)
        scope = self.allocator.scope()
        scope.__enter__()
        self.marks.append(record)
        self.scopes.append((scope, record))

    @needs("scopes")
    @rule(index=choice("scopes"), raising=st.booleans())
    @step
    def exit_scope(self, index, raising):
        scope, record = self.scopes.pop(index)
        error = KeyError("on the way out") if raising else None
        leave = (lambda: scope.__exit__(KeyError, error, None)) if raising else (
            lambda: scope.__exit__(None, None, None))
        if record not in self.marks:
            event("an outer reset ended the scope")
            with self.unchanged():
                assert not leave()
        elif raising:
            assert not leave(), "a scope swallowed an exception"
            self.end_frame(record, keep=False)
        elif not self.reset_or_refuse(record.serial, leave, record, keep=False,
                                      marks_may_change=True):
            self.marks.remove(record)  # its blocks are the outer frame's now

    # Rules: the end of an arena ----------------------------------------------------------------

    @rule()
    @step
    def drop_the_arena(self):
        self.scopes.clear()
        self.marks.clear()
        self.stale.clear()
        self.allocator = None
        for block in self.live.values():
            block.orphan = True
            for handle in block.handles:
                assert block.released or handle.allocator is None
        self.floating.clear()
        self.retired_ever = False
        self.allocator = self.make(**self.config)

    # Invariants --------------------------------------------------------------------------------

    @invariant()
    def blocks_lie_in_regions(self):
        if self.allocator is None:
            return
        regions = [(r.address, r.address + r.nbytes) for r in self.allocator.regions]
        assert self.allocator.capacity == sum(end - start for start, end in regions)
        assert self.max_bytes is None or self.allocator.capacity <= self.max_bytes
        for block in self.live.values():
            assert block.orphan or any(a <= block.start and block.end <= b for a, b in regions)

    @invariant()
    def accounting_adds_up(self):
        if self.allocator is None:
            return
        self.allocator.check()
        stats = self.allocator.stats()
        assert stats.capacity == self.allocator.capacity
        assert stats.free_bytes == self.allocator.remaining
        assert stats.retired_bytes == self.allocator.retired
        assert stats.peak_bytes == self.allocator.peak >= self.allocator.used
        parts = ("live_bytes", "free_bytes", "retired_bytes", "pending_bytes", "padding_bytes")
        assert sum(getattr(stats, part) for part in parts) == stats.capacity, stats
        assert all(getattr(stats, part) >= 0 for part in parts), stats
        assert stats.pending_bytes == 0, "no stream was ever involved"
        mine = [block for block in self.live.values() if not block.orphan]
        survivors = [block for block in mine if block.survivor]
        live = [block for block in mine if not block.survivor]
        low = sum(block.nbytes for block in survivors)
        assert low <= stats.retired_bytes
        assert sum(block.nbytes for block in live) <= stats.live_bytes
        if any(block.inexact for block in mine):
            return
        assert stats.retired_bytes <= sum(block.extent for block in survivors)
        if all(exact for _, exact in self.floating.values()):
            floating = sum(nbytes + 1 for nbytes, _ in self.floating.values())
            assert stats.live_bytes <= sum(block.extent for block in live) + floating
        held = [block for block in mine if block.exported]
        sure = sum(not block.released for block in held)
        assert sure <= stats.held_buffers <= len(held), "who is held?"

    @invariant()
    def handles_say_what_they_are(self):
        for block in self.live.values():
            for handle in block.handles:
                assert handle.closed == block.released
            if block.root is not None and not block.released:
                assert block.root.held == block.exported
                assert block.root.address == block.start


class StrictMachine(BumpMachine):
    strict = True


class GrowingMachine(BumpMachine):
    """Small first regions, room to grow, and a source that may fail once."""

    configs = st.fixed_dictionaries(
        {
            "nbytes": st.one_of(st.integers(1, 4).map(lambda n: n * PAGE), st.integers(1, PAGE)),
            "skew": st.sampled_from([0, 64, 1]),
            "growth": st.integers(0, 64 * PAGE),
            "fail_on": st.none() | st.integers(2, 4),
        }
    )


TestBump = BumpMachine.TestCase
TestStrictBump = StrictMachine.TestCase
TestGrowingBump = GrowingMachine.TestCase
