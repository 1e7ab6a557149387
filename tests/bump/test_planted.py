"""Bugs that were planted in the sources, one at a time, and that no other test caught.

Each test failed with its bug and passes without.
"""

import ctypes
from types import SimpleNamespace

import pytest
from helpers import MAX_ALIGN, PAGE, Pages, exact, peek, poke, unchanged_view

from arenapy import Bump, OutOfMemory, Region


@pytest.mark.parametrize("log2", range(1, 22))
@pytest.mark.parametrize("growing", [False, True])
def test_alignment_where_rounding_short_would_show(log2, growing):
    """From an odd multiple of half the alignment, a mask of fewer bits gives another address."""
    align = 1 << log2
    if growing:  # served from an extent that is not the current one, which begins there
        arena = Bump(PAGE, source=Pages(skew=align // 2), max_bytes=8 * MAX_ALIGN)
        arena.alloc(PAGE)
        block = arena.alloc(3 * PAGE, align)
    else:
        arena = exact(4 * MAX_ALIGN)
        arena.alloc(align + align // 2, 1)
        block = arena.alloc(5, align)
    assert block.address % align == 0
    arena.check()


@pytest.mark.parametrize("retired", [False, True])
def test_the_count_of_held_buffers_falls(retired):
    arena = exact(1 << 16)
    arrays = [arena.empty(8) for _ in range(3)]
    if retired:
        arena.reset()
    assert arena.stats().held_buffers == 3
    del arrays[1]
    assert arena.stats().held_buffers == 2
    arrays.clear()
    assert arena.stats().held_buffers == 0


@pytest.mark.parametrize("give_back", ["release", "drop", "reset", "scope", "survive", "grow"])
def test_an_empty_block_leaves_the_figures_as_they_were(give_back):
    """It occupies one byte of padding; every way back counts that byte."""
    arena = exact(1 << 16)
    first = arena.alloc(10, 1)
    before = arena.stats()
    mark = arena.mark()
    if give_back == "release":
        arena.alloc(0, 1).release()
    elif give_back == "drop":
        memoryview(arena.alloc(0, 1)).release()
    elif give_back == "reset":
        block = arena.alloc(0, 1)
        arena.reset(mark)
        assert block.closed
    elif give_back == "scope":
        with arena.scope():
            arena.alloc(0, 1)
    elif give_back == "survive":
        view = memoryview(arena.alloc(0, 1))
        arena.reset(mark)
        assert arena.retired == 1
        view.release()
    else:
        block = arena.alloc(0, 1)
        held = memoryview(block)
        assert arena.grow(block, 20) is block and len(held) == 0
        assert arena.stats().live_bytes == 30 and arena.stats().padding_bytes == 0
        held.release()
        del block
    after = arena.stats()
    figures = ("live_bytes", "padding_bytes", "retired_bytes", "held_buffers")
    assert [getattr(after, f) for f in figures] == [getattr(before, f) for f in figures]
    assert not first.closed
    arena.check()


class Adjacent:
    """A source whose regions touch, in the order of their making or against it."""

    def __init__(self, nbytes, upwards):
        self.keep = ctypes.create_string_buffer(nbytes)
        self.left = [ctypes.addressof(self.keep), ctypes.addressof(self.keep) + nbytes]
        self.upwards = upwards

    def region(self, nbytes):
        if self.upwards:
            self.left[0] += nbytes
            start = self.left[0] - nbytes
        else:
            self.left[1] -= nbytes
            start = self.left[1]
        assert self.left[0] <= self.left[1]
        return Region.from_address(start, nbytes, owner=self.keep)


@pytest.mark.parametrize("upwards", [True, False])
@pytest.mark.parametrize("survivors", [False, True])
def test_regions_that_touch_stay_apart(upwards, survivors):
    """A block across two regions would outlive the one that is unmapped first."""
    arena = Bump(PAGE, source=Adjacent(3 * PAGE, upwards), max_bytes=3 * PAGE)
    blocks = [arena.alloc(PAGE, 1), arena.alloc(2 * PAGE, 1)]
    first, second = arena.regions
    assert abs(first.address - second.address) in (PAGE, 2 * PAGE)
    views = [memoryview(block) for block in blocks] if survivors else []
    arena.reset()
    del blocks
    views.clear()
    assert arena.remaining == 3 * PAGE
    assert arena.stats().largest_free_extent == 2 * PAGE
    with pytest.raises(OutOfMemory):
        arena.alloc(2 * PAGE + 1, 1)
    arena.check()
    assert {arena.alloc(PAGE, 1).address, arena.alloc(2 * PAGE, 1).address} == {
        first.address,
        second.address,
    }


@pytest.mark.parametrize("n", [2, 5])
def test_blocks_dropped_newest_first_between_two_calls_all_come_back(n):
    """The deaths are accounted for later, in the order in which they were."""
    arena = exact(1 << 16)
    arrays = [arena.empty(8) for _ in range(n)]
    while arrays:
        arrays.pop()
    assert arena.used == 0
    arrays = [arena.empty(8) for _ in range(n)]
    while arrays:
        del arrays[0]
    assert arena.used == 64 * (n - 1)  # only the last to go was the newest


@pytest.mark.parametrize("give_back", ["release", "drop", "reset", "mark", "scope", "survive"])
def test_the_peak_is_remembered_however_the_bytes_go_back(give_back):
    arena = exact(1 << 16)
    arena.alloc(64)
    mark = arena.mark()
    if give_back == "scope":
        with arena.scope():
            arena.alloc(1000, 1)
    else:
        block = arena.alloc(1000, 1)
        view = memoryview(block) if give_back in ("drop", "survive") else None
        if give_back == "release":
            block.release()
        elif give_back == "reset":
            arena.reset()
        elif give_back != "drop":
            arena.reset(mark)
        del view, block
    assert arena.used <= 64
    assert arena.peak == arena.stats().peak_bytes == 1064


def test_between_survivors_the_cursor_takes_the_lowest_gap():
    arena = exact(1 << 16)
    kept = [arena.empty(8)]
    gap = arena.alloc(640)
    where = gap.address
    kept.append(arena.empty(8))
    arena.reset()
    assert gap.closed and arena.retired == 128
    assert arena.alloc(64).address == where
    arena.check()


def test_a_block_first_exported_under_a_newer_mark_is_of_its_own_frame():
    arena = exact(1 << 16)
    block = arena.alloc(64)
    poke(block.address, 64, 7)
    with arena.scope():
        arena.alloc(100)
        view = memoryview(block)
    assert arena.retired == 0 and arena.used == 64
    arena.check()
    arena.reset()
    assert arena.retired == 64
    poke(arena.alloc(1000).address, 1000, 0)
    assert bytes(view) == b"\x07" * 64
    arena.check()


@pytest.mark.parametrize("side", ["behind", "before"])
def test_what_joins_the_current_extent_counts_with_it(side):
    arena = exact(1 << 16)
    if side == "behind":
        arena.alloc(640)
    kept = arena.empty(8)
    arena.reset()
    del kept
    assert arena.stats().largest_free_extent == arena.remaining == arena.capacity
    assert arena.alloc(arena.capacity).nbytes == arena.capacity


def test_once_something_was_retired_a_reset_to_a_mark_takes_the_lowest_gap():
    arena = exact(1 << 16)
    kept = arena.empty(80)
    arena.reset()
    arena.alloc(64)
    mark = arena.mark()
    del kept
    assert arena.alloc(64).address > arena.regions[0].address + 640
    arena.reset(mark)
    assert arena.alloc(64).address == arena.regions[0].address
    arena.check()


@pytest.mark.parametrize("nbytes", [1000, (1 << 18) + 3])
def test_moving_bytes_of_any_size_leaves_no_export_behind(nbytes):
    """Large moves run without the GIL, as an export of their own."""
    arena = exact(1 << 20)
    block, other = arena.alloc(nbytes), arena.alloc(nbytes)
    block.fill(7)
    other.copy_from(block)
    target = bytearray(nbytes)
    assert other.copy_to(target) is target and target == b"\x07" * nbytes
    assert "0 live exports" in repr(other) or "not held" in repr(other)
    for buffer in (other, block):
        buffer.release()
        assert buffer.closed
        with pytest.raises(ValueError, match="closed"):
            buffer.fill(1)
    del block, other, buffer
    assert arena.used == 0


def test_debug_filling_spares_survivors_and_fills_the_rest():
    arena = exact(1 << 16, debug=True)
    arrays = [arena.zeros(100, "u1") for _ in range(3)]
    base = arrays[0].ctypes.data
    kept = arrays[1]
    arrays.clear()
    arena.reset()
    assert not kept.any() and arena.retired == 100
    given_back = {*peek(base, 100), *peek(base + 256, 100)}
    assert len(given_back) == 1 and given_back != {0}
    where = kept.ctypes.data
    del kept
    assert arena.retired == 0 and set(peek(where, 100)) == given_back
    block = arena.alloc(100)
    block.fill(0)
    where = block.address
    block.release()
    assert set(peek(where, 100)) == given_back
    arena.reset()
    mark = arena.mark()
    block = arena.alloc(100)
    block.fill(0)
    arena.reset(mark)  # nothing was held, so this could be short
    assert block.closed and set(peek(where, 100)) == given_back


@pytest.mark.parametrize("sizes", [[100, 100], [PAGE, 2 * PAGE, 4 * PAGE], [0, PAGE, 1]])
def test_alloc_many_that_fails_late_gives_everything_back(sizes):
    arena = Bump(PAGE, source=Pages(), max_bytes=16 * PAGE)
    arena.alloc(10, 1)
    before = unchanged_view(arena)
    with pytest.raises(OutOfMemory):
        arena.alloc_many([*sizes, 17 * PAGE])
    assert unchanged_view(arena) == before
    arena.check()


def test_a_reset_retires_the_survivors_of_newer_frames_too():
    arena = exact(1 << 16)
    mark = arena.mark()
    kept = []
    for number in range(3):
        arena.alloc(8)
        kept.append(arena.empty(100, "u1"))
        kept[-1][:] = number
        arena.mark()
    arena.reset(mark)
    assert arena.retired == 300
    while arena.remaining:
        block = arena.alloc(min(100, arena.stats().largest_free_extent), 1)
        poke(block.address, block.nbytes, 255)
    assert [set(array.tolist()) for array in kept] == [{0}, {1}, {2}]
    arena.check()


@pytest.mark.parametrize("dropped", [0, 1, 2])
def test_marks_may_be_dropped_in_any_order(dropped):
    """The live ones form a list; what leaves its middle must leave no loose end."""
    arena = exact(1 << 16)
    marks = []
    for _ in range(4):
        marks.append(arena.mark())
        arena.alloc(8)
    del marks[dropped]
    others = [arena.mark() for _ in range(100)]  # where the dropped one was
    arena.reset(marks[1])
    for stale in (marks[2], *others):
        with pytest.raises(ValueError, match="ended"):
            arena.reset(stale)
    arena.reset(marks[0])
    with pytest.raises(ValueError, match="ended"):
        arena.reset(marks[1])
    assert arena.used == (0 if dropped else 8)
    arena.check()


def test_a_block_grows_in_place_once_the_newer_one_is_gone():
    arena = exact(1 << 16)
    block, newer = arena.alloc(64), arena.empty(8)
    del newer  # noted at the next call, which this is
    assert arena.grow(block, 1000) is block


@pytest.mark.parametrize("debug", [False, True])
def test_a_block_grows_where_a_held_one_was(debug):
    """The cursor stood behind that one, and came back as if other memory began there."""
    arena = exact(4096, debug=debug)
    block = arena.alloc(64, 1)
    mark = arena.mark()
    held = arena.empty(64, "u1")
    arena.reset(mark)
    del mark
    assert arena.stats().retired_bytes == 64
    later = arena.mark()
    del held
    arena.alloc(4000, 1).release()
    del later
    memoryview(block).release()
    assert arena.grow(block, 100) is block
    arena.check()
    del block
    assert arena.used == arena.stats().live_bytes == 0
    arena.check()


@pytest.mark.parametrize("how", ["release", "drop", "drop an array"])
@pytest.mark.parametrize("full", [False, True])
def test_the_newest_block_goes_back_with_what_aligned_it(how, full):
    """Also where it opened a run of its own, in another region."""
    arena = Bump(PAGE, source=Pages(), max_bytes=16 * PAGE)
    arena.alloc(PAGE if full else 1, 1)
    used = arena.used
    if how == "release":
        arena.alloc(64, 1024).release()
    elif how == "drop":
        memoryview(arena.alloc(64, 1024)).release()
    else:
        assert arena.empty(8).size == 8
    assert arena.used == used and arena.stats().padding_bytes == 0
    arena.check()


def test_a_held_block_that_grew_in_place_is_held_whole():
    arena = exact(1 << 16)
    block = arena.alloc(64)
    memoryview(block).release()
    assert arena.grow(block, 1000) is block
    poke(block.address, 1000, 7)
    arena.reset()
    assert arena.retired == 1000
    poke(arena.alloc(4000, 1).address, 4000, 0)
    assert bytes(block) == b"\x07" * 1000
    arena.check()


def test_an_empty_block_that_opens_a_region_is_padding():
    arena = Bump(PAGE, source=Pages(), max_bytes=4 * PAGE)
    arena.alloc(PAGE, 1)
    empty = arena.alloc(0)
    assert len(arena.regions) == 2 and empty.nbytes == 0
    stats = arena.stats()
    assert (stats.live_bytes, stats.padding_bytes) == (PAGE, 1)


# Regions ---------------------------------------------------------------------------------------


def test_bytes_that_an_arena_hands_out_are_not_viewed_past_it():
    region = Pages().region(PAGE)
    arena = Bump(PAGE, source=SimpleNamespace(region=lambda nbytes: region))
    with pytest.raises(BufferError, match="allocator"):
        region.buffer()
    del arena
    assert region.buffer().nbytes == PAGE


def test_a_region_that_somebody_looks_at_is_not_carved_up():
    region = Pages().region(PAGE)
    view = memoryview(region.buffer())
    with pytest.raises(ValueError, match="held"):
        Bump(PAGE, source=SimpleNamespace(region=lambda nbytes: region))
    view.release()
    assert Bump(PAGE, source=SimpleNamespace(region=lambda nbytes: region)).capacity == PAGE


def test_leases_that_end_leave_room_for_a_resets_own_extents(run_script):
    """A bug found beside the planted ones: the array of extents was overrun."""
    run_script(
        """
        import os
        from multiprocessing import reduction
        from arenapy import Bump, Shared
        from arenapy.linux import vm

        arena = Bump(1 << 20, source=Shared())
        (region,) = arena.regions
        sent = arena.alloc(64)
        reduction.ForkingPickler.dumps(sent)  # from here on the arena asks for leases
        mark = arena.mark()
        blocks = arena.alloc_many([64] * 600)
        kept = [memoryview(block) for block in blocks[1::2]]  # between the leases
        leases = []
        for block in blocks[::2]:
            leases.append(vm.reopen(region.fd))
            offset = block.address - region.address + region.file_offset
            vm.lease(leases[-1].fileno(), offset, 64)
        arena.reset(mark)
        assert arena.stats().pending_bytes == 300 * 64
        for _ in range(250):
            kept.append(arena.empty(8))
            arena.alloc(64)
        for lease in leases:
            lease.close()
        arena.reset(mark)  # makes 300 extents of the leases, and 250 more between survivors
        arena.check()
        assert arena.stats().pending_bytes == 0 and arena.retired == 550 * 64
        """
    )
