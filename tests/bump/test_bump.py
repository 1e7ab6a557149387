"""Bump, section 6 of the design, sentence by sentence."""

import random

import pytest
from helpers import PAGE, exact, poke, unchanged_view

from arenapy import BumpStats, OutOfMemory


@pytest.fixture
def arena():
    return exact(1 << 20)


def start(array):
    return array.ctypes.data


# Allocating ------------------------------------------------------------------------------------


def test_a_new_arena_is_all_free():
    arena = exact(3 * PAGE)
    assert arena.used == arena.peak == arena.retired == 0
    assert arena.remaining == arena.capacity == 3 * PAGE
    (region,) = arena.regions
    assert region.nbytes == 3 * PAGE and region.kind == "host"
    stats = arena.stats()
    assert isinstance(stats, BumpStats)
    assert (stats.capacity, stats.free_bytes, stats.largest_free_extent) == (3 * PAGE,) * 3
    assert stats.live_bytes == stats.held_buffers == stats.marks == stats.total_allocations == 0
    with pytest.raises(AttributeError):
        stats.capacity = 1


def test_the_whole_arena_is_usable():
    arena = exact(3 * PAGE)
    blocks = [arena.alloc(1, 1) for _ in range(3 * PAGE)]
    assert len({block.address for block in blocks}) == 3 * PAGE
    assert arena.remaining == 0
    for refuse in (lambda: arena.alloc(1, 1), lambda: arena.alloc(0), lambda: arena.empty(1)):
        before = unchanged_view(arena)
        with pytest.raises(OutOfMemory):
            refuse()
        assert unchanged_view(arena) == before
    arena.reset()
    assert arena.alloc(3 * PAGE).nbytes == 3 * PAGE
    assert arena.peak == 3 * PAGE


def test_empty_blocks_are_valid_and_distinct(arena):
    blocks = [arena.alloc(0) for _ in range(10)] + [arena.alloc(1, 1)]
    assert len({block.address for block in blocks}) == len(blocks)
    empty = blocks[0]
    assert (empty.nbytes, len(empty), bytes(empty), empty.closed) == (0, 0, b"", False)
    empty.fill(1)
    empty.copy_from(b"")
    empty.release()
    first = exact(PAGE)
    first.alloc(0)
    stats = first.stats()
    assert (stats.padding_bytes, stats.live_bytes, stats.free_bytes) == (1, 0, PAGE - 1)
    assert arena.empty((3, 0)).shape == (3, 0)


# Moving back -----------------------------------------------------------------------------------


def test_releasing_the_newest_moves_the_cursor_back(arena):
    arena.alloc(64)
    used = arena.used
    first, second = arena.alloc(64), arena.alloc(640)
    where = second.address
    second.release()
    assert arena.used == used + 64
    again = arena.alloc(64)
    assert again.address == where
    again.release()
    first.release()
    assert arena.used == used


def test_dropping_an_unheld_buffer_leaves_it_to_the_next_reset(arena):
    where = arena.alloc(64).address
    used = arena.used
    assert used >= 64 and arena.stats().live_bytes >= 64
    assert arena.alloc(64).address != where
    arena.reset()
    assert arena.used == 0 and arena.alloc(64).address == where


@pytest.mark.parametrize("give_back", ["release", "drop"])
def test_the_cursor_never_moves_back_over_a_mark(arena, give_back):
    block = arena.alloc(64)
    if give_back == "drop":
        memoryview(block)
    where = block.address
    mark = arena.mark()
    if give_back == "release":
        block.release()
    del block
    array = arena.empty(8)
    array[:] = 5
    assert start(array) != where
    arena.reset(mark)
    arena.alloc(64).fill(1)
    assert (array == 5).all()
    arena.check()


# Marks -----------------------------------------------------------------------------------------


def test_marks_nest(arena):
    seen = []
    for nbytes in (64, 128, 256):
        seen.append((arena.mark(), arena.used))
        arena.alloc(nbytes)
    assert arena.stats().marks == 3
    (outer, outer_used), (middle, middle_used), (inner, inner_used) = seen
    arena.reset(inner)
    assert arena.used == inner_used
    arena.alloc(10)
    arena.reset(middle)
    assert arena.used == middle_used
    before = unchanged_view(arena)
    with pytest.raises(ValueError, match="mark"):
        arena.reset(inner)
    assert unchanged_view(arena) == before
    arena.reset(middle)  # resetting leaves the mark itself valid
    arena.alloc(10)
    arena.reset(middle)
    arena.reset(outer)
    assert arena.used == outer_used == 0 and arena.stats().marks == 1
    with pytest.raises(ValueError, match="mark"):
        arena.reset(middle)
    arena.reset()
    assert arena.stats().marks == 0
    for mark in (outer, middle, inner):
        with pytest.raises(ValueError, match="mark"):
            arena.reset(mark)


def test_a_stale_mark_is_not_revived_by_a_new_one_at_its_place(arena):
    outer = arena.mark()
    stale = arena.mark()
    arena.reset(outer)
    arena.mark()
    kept = arena.alloc(64)
    poke(kept.address, 64, 1)
    with pytest.raises(ValueError, match="mark"):
        arena.reset(stale)
    assert not kept.closed


def test_a_mark_belongs_to_its_arena(arena):
    foreign = exact(PAGE).mark()
    arena.mark()
    before = unchanged_view(arena)
    for nonsense, error in ((foreign, ValueError), (3, TypeError), ("m", TypeError)):
        with pytest.raises((error, ValueError)):
            arena.reset(nonsense)
    assert unchanged_view(arena) == before


def test_deep_nesting(arena):
    marks = [(arena.mark(), arena.used, arena.alloc(8))[:2] for _ in range(1000)]
    for mark, used in reversed(marks):
        arena.reset(mark)
        assert arena.used == used
    arena.check()


# Scopes ----------------------------------------------------------------------------------------


def test_a_scope_gives_everything_back(arena):
    outside = arena.alloc(64)
    used = arena.used
    with arena.scope():
        inside = arena.alloc(1000)
        with arena.scope():
            innermost = arena.alloc(10)
        assert innermost.closed and not inside.closed
        assert arena.used > used
    assert inside.closed and not outside.closed
    assert arena.used == used and arena.stats().marks == 0


def test_a_scope_says_whose_it_is_and_whether_it_is_open(arena):
    scope = arena.scope()
    assert repr(scope) == f"<Scope of {arena!r}, not open>"
    with scope:
        arena.alloc(1000)
        assert repr(scope) == f"<Scope of {arena!r}, open>"
    assert repr(scope) == f"<Scope of {arena!r}, not open>"


def test_an_exception_passes_a_scope_unharmed(arena):
    error = KeyError("mine")
    with pytest.raises(KeyError) as caught, arena.scope(), arena.scope():
        kept = arena.empty(8)
        kept[:] = 1
        raise error
    assert caught.value is error
    assert arena.stats().marks == 0 and arena.retired == 64
    assert (kept == 1).all()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("to_mark", [True, False])
def test_a_scope_that_an_outer_reset_ended_does_nothing(strict, to_mark):
    arena = exact(1 << 16, strict=strict)
    mark = arena.mark()
    with arena.scope():
        arena.reset(mark if to_mark else None)
        kept = arena.alloc(64)
        view = memoryview(kept)
        before = unchanged_view(arena)
    assert unchanged_view(arena) == before and not kept.closed
    assert len(view) == 64


def test_a_reset_to_a_mark_inside_a_scope(arena):
    with arena.scope():
        block = arena.alloc(64)
        inner = arena.mark()
        arena.alloc(64)
        arena.reset(inner)
        assert not block.closed
    assert block.closed and arena.used == 0
    with pytest.raises(ValueError, match="mark"):
        arena.reset(inner)


# Survivors -------------------------------------------------------------------------------------


@pytest.mark.full
def test_exactly_the_survivors_bytes_are_retired(arena):
    arrays = [arena.empty(100, "u1") for _ in range(10)]
    for number, array in enumerate(arrays):
        array[:] = number
    kept = {number: arrays[number] for number in (0, 3, 4, 9)}
    del arrays, array
    arena.reset()
    assert arena.retired == 400 and arena.remaining == arena.capacity - 400
    assert arena.stats().padding_bytes == 0
    # Everything between them can be had again, byte by byte, and nothing of them.
    seen = set()
    while arena.remaining:
        block = arena.alloc(min(28, arena.stats().largest_free_extent), 1)
        poke(block.address, block.nbytes, 255)
        span = range(block.address, block.address + block.nbytes)
        assert seen.isdisjoint(span)
        seen.update(span)
    assert len(seen) == arena.capacity - 400
    assert all((array == number).all() for number, array in kept.items())


def test_the_cursor_takes_the_lowest_free_extent(arena):
    base = arena.regions[0].address
    low = arena.alloc(640)
    kept = arena.empty(8)
    arena.alloc(6400)
    arena.reset()
    assert low.closed and arena.alloc(64).address == base
    arena.reset()
    assert arena.alloc(10_000).address > start(kept)  # the low one is too small for it
    arena.reset()
    del kept
    arena.reset()
    assert arena.alloc(arena.capacity).address == base


def test_extents_coalesce_in_every_order():
    for seed in range(20):
        order = list(range(8))
        random.Random(seed).shuffle(order)
        arena = exact(8 * 512)
        kept = {number: arena.empty(64) for number in order}
        arena.reset()
        assert arena.remaining == 0 and arena.retired == arena.capacity
        for count, number in enumerate(order, 1):
            del kept[number]
            stats = arena.stats()
            assert stats.free_bytes == 512 * count and stats.retired_bytes == 512 * (8 - count)
            arena.check()
        assert arena.stats().largest_free_extent == arena.capacity


def test_a_survivor_of_several_resets_is_retired_once(arena):
    kept = arena.empty(64, "u1")
    for _ in range(5):
        arena.alloc(64)
        arena.reset()
        assert arena.retired == 64
    del kept
    assert arena.retired == 0


def test_strict_refuses_and_names_the_survivors():
    arena = exact(1 << 16, strict=True)
    mark = arena.mark()
    kept = arena.empty(25, "f4")
    unheld = arena.alloc(10)
    before = unchanged_view(arena)
    for reset in (lambda: arena.reset(mark), arena.reset):
        with pytest.raises(BufferError) as caught:
            reset()
        assert hex(start(kept)) in str(caught.value) or "100" in str(caught.value)
        assert unchanged_view(arena) == before and not unheld.closed
    with pytest.raises(BufferError), arena.scope():
        view = memoryview(arena.alloc(10))
    del view
    # After an exception the scope retires instead: the exception is what the user must see.
    with pytest.raises(KeyError), arena.scope():
        other = arena.empty(3)
        raise KeyError
    assert arena.retired == other.nbytes
    del kept, other, caught
    arena.reset()
    assert arena.remaining == arena.capacity and unheld.closed


# The loops of section 6 --------------------------------------------------------------------------


def survive(arena, sizes):
    """The loop whose one array per scope outlives the scope, checked by content."""
    kept = None
    for number, nbytes in enumerate(sizes):
        with arena.scope():
            new = arena.empty(nbytes, "u1")
            new[0] = new[-1] = number % 251
        if kept is not None:
            assert kept[0] == kept[-1] == (number - 1) % 251
        kept = new
    assert arena.retired == kept.nbytes


@pytest.mark.parametrize("frame", [1000, 4096, 5000])
@pytest.mark.no_sanitizer  # a long count; other tests run the same code there
def test_equal_sizes_need_twice_a_frame(frame):
    arena = exact(2 * frame + 64)
    survive(arena, [frame] * 100_000)
    assert len(arena.regions) == 1 and arena.capacity <= 2 * frame + 64


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.no_sanitizer  # a long count; other tests run the same code there
def test_varying_sizes_need_three_times_a_frame(seed):
    draw, frame = random.Random(seed), 5000
    arena = exact(3 * frame + 128)
    survive(arena, [draw.choice((frame, draw.randint(1, frame))) for _ in range(100_000)])
    assert len(arena.regions) == 1 and arena.capacity <= 3 * frame + 128


def test_keeping_one_small_array_a_frame_keeps_only_those_bytes():
    arena = exact(4 << 20)  # less than half of what the frames take together
    kept = []
    for number in range(1000):
        with arena.scope():
            arena.alloc(5000)
            big = arena.empty(2000, "u1")
            small = arena.empty(16, "u1")
            small[:] = number % 256
            kept.append(small)
            arena.alloc(3000)
            del big
    assert arena.retired == 16 * 1000
    assert arena.remaining == arena.capacity - 16 * 1000
    assert all((small == number % 256).all() for number, small in enumerate(kept))
