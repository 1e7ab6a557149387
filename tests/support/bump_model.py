"""What a test knows of a `Bump` and its `Buffer`s without asking them."""

import contextlib
import ctypes
from dataclasses import dataclass, replace

from exporting import ExportingMachine, SeenBlock
from helpers import PAGE, Pages, c_function, unchanged_view
from hypothesis import event
from hypothesis import strategies as st

import arenapy


class CMark(ctypes.Structure):
    """BumpMark of bump/bump.pxd."""

    _fields_ = (("id", ctypes.c_uint64), ("serial", ctypes.c_uint64))


c_mark = c_function("bump_mark_slow", CMark)
c_reset = c_function("bump_reset_slow", ctypes.c_int, CMark)


@contextlib.contextmanager
def marked(arena):
    mark = arena.mark()
    try:
        yield
    finally:
        arena.reset(mark)


@contextlib.contextmanager
def marked_in_c(arena):
    mark = c_mark(arena)
    assert mark.id
    try:
        yield
    finally:
        assert c_reset(arena, mark) == 0


@contextlib.contextmanager
def left_by_an_exception(arena):
    with contextlib.suppress(KeyError), arena.scope():
        yield
        raise KeyError


#: Frames of an arena that end in good order, by each way there is.
FRAMES = {
    "scope": lambda arena: arena.scope(),
    "exception": left_by_an_exception,
    "mark": marked,
    "C mark": marked_in_c,
}
NEVER_STRICT = ("C mark", "exception")  # these retire in a strict arena, too
ENTRY = 256  # bytes of bookkeeping that a block, a mark or a region needs, at most


def outlived(arena, frames, parts, nbytes, kept, which):
    """A plain function, in each of whose frames `parts` are made: its arrays end with it, after the
    frames, in any order; what it puts into `kept` ends with the next call that does."""
    arrays = []
    with contextlib.ExitStack() as stack:
        for depth, name in enumerate(frames):
            stack.enter_context(FRAMES[name](arena))
            for part in parts:
                made = arena.alloc(nbytes) if part == "block" else arena.empty(nbytes, "u1")
                made.fill(0xEE)
                if part == "array":
                    arrays.append(made)
                elif part == "kept":
                    kept[depth] = made
                del made
    while arrays:
        del arrays[which % len(arrays)]


def steady(view):
    """Of `unchanged_view`, what calls that leave nothing behind leave as it was."""
    used, remaining, retired, _, capacity, stats, _ = view
    return used, remaining - capacity, retired, stats.live_bytes, stats.held_buffers


@dataclass(eq=False)
class BumpBlock(SeenBlock):
    """A block of a Bump."""

    inexact: bool = False  # may share its Buffer with others, and so keep more than its bytes


class BumpModel(ExportingMachine):
    """The Bump of section 6 with the Buffers of section 5: the model and what must always hold."""

    kind_of_block = BumpBlock
    strict = False
    may_have_holes = False  # parts of a region that lost their memory
    frames = st.sampled_from(sorted(FRAMES))
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
        self.entries = 0  # the most blocks, marks and regions that there were at once

    # Hooks -----------------------------------------------------------------------------------

    def make(self, nbytes, skew, fail_on=None, growth=None):
        self.source = Pages(skew, fail_on)
        self.max_bytes = None if growth is None else nbytes + growth
        return arenapy.Bump(
            nbytes, source=self.source, max_bytes=self.max_bytes, strict=self.strict
        )

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

    def gone(self, serial, other_thread=False):
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

    def drop_everything(self, serial, other_thread):
        block = self.live[serial]
        before = None if block.orphan else self.allocator.stats()
        super().drop_everything(serial, other_thread)
        if block.survivor and before and not block.inexact:
            event("a survivor dies")
            after = self.allocator.stats()
            back = after.free_bytes - before.free_bytes
            assert block.nbytes <= back <= block.extent, "a survivor's range did not rejoin"

    def strict_outcome(self, serial):
        """Whether a strict reset of what is younger than `serial` must raise; None: it may."""
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
                before, after = (
                    [replace(x, marks=0) if isinstance(x, arenapy.BumpStats) else x for x in view]
                    for view in (before, after)
                )
            assert after == before, "a refused reset changed something"
            assert str(error)
            return False
        assert outcome is not True, "a strict arena did not refuse"
        if record is not None:
            self.end_frame(record, keep=keep)
        return True

    # Invariants --------------------------------------------------------------------------------

    def look(self):
        super().look()
        self.blocks_lie_in_regions()
        self.accounting_adds_up()
        self.handles_say_what_they_are()

    def blocks_lie_in_regions(self):
        regions = [(r.address, r.address + r.nbytes) for r in self.allocator.regions]
        addresses = sum(end - start for start, end in regions)
        assert self.allocator.capacity <= addresses
        assert self.allocator.capacity == addresses or self.may_have_holes
        assert self.max_bytes is None or self.allocator.capacity <= self.max_bytes
        for block in self.live.values():
            assert block.orphan or any(a <= block.start and block.end <= b for a, b in regions)

    def accounting_adds_up(self):
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
        self.bookkeeping_is_bounded(stats)
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

    def bookkeeping_is_bounded(self, stats, more=0):
        """By what there was at once, however long that goes on; arrays double, from 16."""
        held = len(self.live) + len(self.floating) + len(self.marks) + stats.regions
        self.entries = max(self.entries, held + more)
        assert stats.metadata_bytes <= ENTRY * (16 + 2 * self.entries), self.entries
