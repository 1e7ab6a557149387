"""The C interface, called from a package that was compiled against the installed one."""

import sys

import pytest
from downstream_of_arenapy import use

import arenapy

MIB = 1 << 20


@pytest.mark.parametrize("align", [1, 64, 4096])
@pytest.mark.parametrize("nbytes", [1, 100, 4096])
def test_frames_without_the_gil(nbytes, align):
    arena = arenapy.Bump(MIB)
    rounds = 10_000
    assert use.frames(arena, rounds, nbytes, align) == rounds * nbytes * 3
    assert arena.used == 0
    arena.check()


def test_c_calls_leave_python_blocks_alone():
    arena = arenapy.Bump(MIB)
    kept = arena.alloc(1000)
    memoryview(kept)[:] = b"\x07" * 1000
    used = arena.used
    use.frames(arena, 1000, 500, 64)
    assert bytes(kept) == b"\x07" * 1000
    assert arena.used == used
    arena.check()


def test_exhaustion_is_null_and_changes_nothing():
    arena = arenapy.Bump(MIB)
    assert use.until_exhausted(arena, 4096) == arena.capacity // 4096
    assert arena.used == 0
    assert use.until_exhausted(arena, arena.capacity + 1) == 0
    assert use.until_exhausted(arena, sys.maxsize * 2 + 1) == 0
    arena.check()


GROWING = {
    "bump": lambda: arenapy.Bump(4096, max_bytes=MIB),
    "slab": lambda: arenapy.Slab(4096, 1, max_count=100),
    "pool": lambda: arenapy.Pool(MIB),
}


@pytest.mark.parametrize("kind", GROWING)
def test_growth_keeps_the_callers_exception(kind):
    """Cleanup code allocates while an exception is on its way."""
    allocator = GROWING[kind]()
    assert [use.alloc_while_raising(allocator, 4096) for _ in range(20)] == [(True, True)] * 20
    for _ in range(500):  # until there is no more
        got, kept = use.alloc_while_raising(allocator, 4096)
        assert kept
    assert not got
    allocator.check()


def test_double_free_is_detected():
    arena = arenapy.Bump(MIB)
    assert use.free_twice(arena, 128) == (0, -1)
    arena.check()


def test_stale_mark_is_refused():
    arena = arenapy.Bump(MIB)
    assert use.reset_to_stale_mark(arena) != 0
    arena.check()


def test_stale_mark_of_an_ended_frame_is_refused():
    arena = arenapy.Bump(MIB)
    assert use.reset_to_stale_mark_of_an_older_frame(arena) != 0
    assert arena.used == 0
    arena.check()


def test_marks_of_c_and_of_python_at_one_place_end_each_other():
    arena = arenapy.Bump(MIB)
    for _ in range(2):
        older = arena.mark()
        newer = use.mark_in_c(arena)
        arena.reset(older)
        block = arena.alloc(100)
        assert use.reset_in_c(arena, newer) == -1 and not block.closed
        arena.check()
        arena.reset()
        older = use.mark_in_c(arena)
        newer = arena.mark()
        assert use.reset_in_c(arena, older) == 0
        block = arena.alloc(100)
        with pytest.raises(ValueError, match="ended by a reset"):
            arena.reset(newer)
        assert not block.closed
        arena.check()
        arena.reset()


def test_marks_of_c_and_of_python_in_turn_take_no_memory():
    arena = arenapy.Bump(MIB)
    kept = None
    for i in range(2000):
        mark = arena.mark()
        arena.alloc(100)
        arena.reset(mark)
        kept = mark if i % 2 else None
        mark = use.mark_in_c(arena)
        arena.alloc(100)
        assert use.reset_in_c(arena, mark) == 0
        if i == 10:
            before = arena.stats().metadata_bytes
    assert arena.stats().metadata_bytes == before
    del kept


def test_a_free_does_not_move_back_over_a_mark():
    arena = arenapy.Bump(MIB)
    assert use.free_under_a_mark(arena, 100) == (1, 0)
    assert arena.used == 100
    arena.empty(8)
    arena.reset()
    arena.check()


def test_a_request_beyond_the_address_space_does_not_grow_the_arena():
    arena = arenapy.Bump(4096, max_bytes=1 << 20)
    assert use.until_exhausted(arena, sys.maxsize * 2 + 1) == 0
    assert arena.capacity == 4096
    arena.check()


def test_a_release_does_not_move_back_over_a_mark():
    arena = arenapy.Bump(MIB)
    block = arena.alloc(100)
    assert use.reset_after_release(arena, block) == 0
    assert arena.used == 100
    arena.check()


def test_buffer_from_typed_code():
    arena = arenapy.Bump(MIB)
    buffer = use.take(arena, 100)
    assert type(buffer) is arenapy.Buffer
    assert buffer.nbytes == 100
    assert buffer.address % 64 == 0
    assert buffer.allocator is arena
    memoryview(buffer)[:] = bytes(range(100))
    assert bytes(buffer) == bytes(range(100))


def test_wrong_type_is_refused():
    with pytest.raises(TypeError, match="Bump"):
        use.take(bytearray(10), 1)
