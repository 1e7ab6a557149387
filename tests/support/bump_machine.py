"""Programs that a `Bump` must survive: who holds what, marks, scopes, growth, the arena's end."""

import numpy as np
import pytest
from bump_model import NEVER_STRICT, BumpModel, outlived, steady
from exporting import EXPORTS, LIVE, UNSURE
from helpers import PAGE, peek, poke
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from machines import MarkRecord, choice, drawn, needs, step
from sources import IN_PLACE

import arenapy


class BumpMachine(BumpModel):
    """The rules; the model has the invariants."""

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
        with self.refused(ValueError, MemoryError):  # whichever of its faults is seen first
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

    @rule(
        fields=st.dictionaries(
            st.sampled_from("xyz"), st.sampled_from(["u1", "f4", "f8"]), min_size=1
        ),
        count=st.integers(1, 200),
    )
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

    @needs("live")
    @rule(serial=choice("live"))
    @step
    def read_interface(self, serial):
        for handle in self.open_handles(serial)[-1:]:
            address, readonly = handle.__array_interface__["data"]
            assert address == handle.address and readonly is False
            self.live[serial].exported = True

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
                with pytest.raises(BufferError):
                    block.root.release()
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

    @rule(nbytes=st.integers(1, 300), below=st.booleans())
    @step
    def release_behind_an_array(self, nbytes, below):
        """The case that an export count misses: `np.ndarray(buffer=)` keeps only a reference."""
        serial = self.request(nbytes, None)
        if serial is not None:
            block = self.live[serial]
            if below:
                block.handles.append(block.root[: nbytes // 2])
            how, call = EXPORTS["ndarray"]
            block.exports.append((how, call(block.handles[-1])))
            block.exported = True
            block.root.release()
            self.was_released(serial)

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
        for use in (
            memoryview,
            lambda b: b[0:1],
            lambda b: b.__array_interface__,
            lambda b: b.fill(0),
        ):
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
            grown = block.root.grow(nbytes)
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
        leave = (
            (lambda: scope.__exit__(KeyError, error, None))
            if raising
            else (lambda: scope.__exit__(None, None, None))
        )
        if record not in self.marks:
            event("an outer reset ended the scope")
            with self.unchanged():
                assert not leave()
        elif raising:
            assert not leave(), "a scope swallowed an exception"
            self.end_frame(record, keep=False)
        elif not self.reset_or_refuse(
            record.serial, leave, record, keep=False, marks_may_change=True
        ):
            self.marks.remove(record)  # its blocks are the outer frame's now

    # What people write: an array ends with the function, after its frame.

    @rule(
        frames=st.lists(drawn("frames"), min_size=1, max_size=4),
        parts=st.lists(st.sampled_from(["array", "kept", "block"]), min_size=1, max_size=3),
        nbytes=st.integers(0, 40),
        times=st.sampled_from([1, 2, 3, 1000]),
        which=st.integers(0, 3),
    )
    @step
    def frames_that_arrays_outlive(self, frames, parts, nbytes, times, which):
        kept = {}
        before = self.snapshot()
        for _ in range(times):
            try:
                outlived(self.allocator, frames, parts, nbytes, kept, which)
            except MemoryError:
                event("frames that arrays outlive do not fit")
                break
        self.allocator.check()
        kept.clear()
        self.bookkeeping_is_bounded(self.allocator.stats(), 4 * len(frames) * len(parts))
        assert steady(self.snapshot()) == steady(before), "calls that left nothing left something"

    # Rules: the end of an arena ----------------------------------------------------------------

    @rule()
    @step
    def drop_the_arena(self):
        self.scopes.clear()
        self.marks.clear()
        self.stale.clear()
        self.make_another()
        self.floating.clear()
        self.retired_ever = False


class StrictMachine(BumpMachine):
    strict = True
    frames = st.sampled_from(NEVER_STRICT)


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


class InPlaceMachine(BumpMachine):
    """One region, which grows in place and shrinks."""

    may_have_holes = True
    configs = st.fixed_dictionaries(
        {
            "nbytes": st.one_of(st.integers(1, 4).map(lambda n: n * PAGE), st.integers(1, PAGE)),
            "growth": st.integers(0, 64 * PAGE) | st.integers(0, 12 << 20),
            "source": st.sampled_from(IN_PLACE),
        }
    )

    def make(self, nbytes, growth, source):
        self.max_bytes = nbytes + growth
        return arenapy.Bump(nbytes, source, self.max_bytes, self.strict)

    def most(self):
        stats = self.allocator.stats()
        return stats.free_bytes + self.max_bytes - stats.capacity

    @rule(keep=st.integers(0, 64 * PAGE))
    @step
    def trim(self, keep):
        before = self.allocator.stats()
        freed = self.allocator.trim(keep)
        after = self.allocator.stats()
        event("trimmed" if freed else "nothing to trim")
        assert after.capacity == before.capacity - freed and after.regions == 1
        assert after.live_bytes == before.live_bytes
        assert freed == 0 or after.capacity >= keep
