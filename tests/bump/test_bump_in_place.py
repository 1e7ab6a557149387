"""A Bump over a source with ``grow=True``: one region, which grows in place and shrinks."""

import contextlib
import gc
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar

import pytest
from helpers import PAGE, peek, poke, round_up, unchanged_view
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_view import resident
from sources import GRANULE, Given, Granules, GranulesReserved

from arenapy import Bump, Host, OutOfMemory, Pool, Region, Shared, Slab

MIB = 1 << 20
SMALL_PAGES = {"huge_pages": None}


@pytest.fixture(params=[Host, Shared])
def arena_of(request):
    def make(nbytes=PAGE, max_bytes=64 * MIB, **options):
        if request.param is Shared:
            options.pop("guard", None)  # it has none
        return Bump(nbytes, request.param(grow=True, **options), max_bytes)

    return make


@pytest.mark.parametrize("options", [{}, SMALL_PAGES, {"guard": True}, {"prefault": False}])
@pytest.mark.sampled
def test_blocks_lie_side_by_side_across_growth(arena_of, options):
    arena = arena_of(10_000, **options)
    (region,) = arena.regions
    assert region.nbytes == arena.capacity == 10_000
    start = region.address
    blocks = []
    for i in range(100):
        blocks.append(arena.alloc(64 * 1024))
        assert blocks[-1].address == start + i * 64 * 1024
        poke(blocks[-1].address, 64 * 1024, i)
    assert arena.regions == (region,)
    assert arena.used == 100 * 64 * 1024 <= region.nbytes == arena.capacity <= 64 * MIB
    for i, block in enumerate(blocks):
        assert set(peek(block.address, 64 * 1024)) == {i}
    arena.check()


def test_growth_takes_little_more_than_it_needs(arena_of):
    arena = arena_of(MIB)
    while arena.used < 48 * MIB:
        arena.alloc(MIB)
    assert arena.capacity - arena.used <= 2 * MIB
    block = arena.alloc(10 * MIB)  # in one piece with what is free at the end
    assert arena.capacity == arena.used <= 60 * MIB
    assert block.address + block.nbytes == arena.regions[0].address + arena.capacity


def test_up_to_max_bytes_to_the_byte(arena_of):
    arena = arena_of(PAGE, 10 * PAGE + 1)
    first = arena.alloc(10 * PAGE + 1, align=1)
    poke(first.address, first.nbytes, 1)
    before = unchanged_view(arena)
    with pytest.raises(OutOfMemory, match="max_bytes"):
        arena.alloc(1, align=1)
    assert unchanged_view(arena) == before
    assert arena.capacity == 10 * PAGE + 1


def test_without_max_bytes_it_does_not_grow():
    arena = Bump(PAGE, Host(grow=True))
    for _ in range(2):
        arena.alloc(PAGE)
        with pytest.raises(OutOfMemory):
            arena.alloc(1)
        assert arena.capacity == PAGE
        arena.reset()
        assert arena.trim() == PAGE - 1  # which it can have again


def test_a_block_grows_in_place_as_far_as_the_addresses_go(arena_of):
    arena = arena_of()
    block = arena.alloc(100)
    view = memoryview(block)  # it need not move
    poke(block.address, 100, 7)
    at = block.address
    for nbytes in (PAGE, PAGE + 1, 3 * MIB, 64 * MIB):
        assert arena.grow(block, nbytes) is block
        assert (block.address, block.nbytes) == (at, nbytes)
        poke(at + nbytes - 1, 1, 9)
    assert peek(at, 100) == b"\x07" * 100 and len(view) == 100
    before = unchanged_view(arena)
    view.release()
    with pytest.raises(OutOfMemory):
        arena.grow(block, 64 * MIB + 1)
    assert unchanged_view(arena) == before
    arena.check()


@pytest.mark.parametrize("nbytes", [0, 1])
def test_a_small_block_grows_to_the_end(arena_of, nbytes):
    arena = arena_of(PAGE, 16 * MIB)
    block = arena.alloc(nbytes)
    assert arena.grow(block, 16 * MIB) is block


def test_a_block_grows_over_memory_that_came_back_behind_it(arena_of):
    arena = arena_of(4 * PAGE)
    first, kept = arena.alloc(PAGE), arena.zeros(PAGE, "u1")
    rest = arena.alloc(PAGE)
    del rest
    mark = arena.mark()
    array = arena.zeros(PAGE, "u1")
    arena.reset(mark)  # it is retired
    del mark
    block = first
    del kept, array
    assert arena.retired == 0
    arena.check()
    with pytest.raises(ValueError, match="less"):
        arena.grow(block, 1)


@pytest.mark.parametrize("options", [{}, SMALL_PAGES])
@pytest.mark.no_sanitizer
def test_trim_gives_the_end_back_to_the_system(arena_of, options):
    arena = arena_of(MIB, **options)
    kept = arena.alloc(3 * MIB)
    poke(kept.address, kept.nbytes, 5)
    mark = arena.mark()
    arena.alloc(40 * MIB)
    at = arena.regions[0].address
    assert resident(at, 64 * MIB) >= 43 * MIB
    arena.reset(mark)
    before = arena.capacity
    freed = arena.trim()
    assert freed == before - arena.capacity >= 40 * MIB
    assert arena.used == kept.nbytes == arena.capacity
    assert resident(at, 64 * MIB) <= 4 * MIB
    assert set(peek(kept.address, kept.nbytes)) == {5}
    again = arena.alloc(20 * MIB)
    poke(again.address, again.nbytes, 6)
    assert arena.trim() == arena.capacity - arena.used == 0
    arena.check()


def test_trim_keeps_what_is_held_at_the_end(arena_of):
    arena = arena_of(PAGE)
    mark = arena.mark()
    arena.alloc(8 * MIB)
    array = arena.zeros(PAGE, "u1")
    arena.alloc(8 * MIB)
    arena.reset(mark)
    arena.trim()
    assert region_end(arena) == array.ctypes.data + PAGE
    assert arena.retired == PAGE and not array.any()
    del array
    gc.collect()
    arena.trim()
    assert arena.capacity == 1
    arena.check()


def region_end(arena):
    (region,) = arena.regions
    return region.address + region.nbytes


@pytest.mark.no_sanitizer
def test_trim_gives_back_what_lies_between_blocks(arena_of):
    arena = arena_of(MIB, **SMALL_PAGES)
    arrays = [arena.empty(10 * MIB, "u1") for _ in range(5)]
    for i, array in enumerate(arrays):
        array[:] = i
    at = arena.regions[0].address
    del array, arrays[1::2]
    arena.reset()
    assert resident(at, 50 * MIB) == 50 * MIB == arena.capacity
    assert arena.trim(47 * MIB) == 2 * MIB and arena.capacity == 48 * MIB
    assert arena.trim() == 18 * MIB and arena.trim() == 0
    assert resident(at, 50 * MIB) == 30 * MIB == arena.capacity
    assert arena.regions[0].nbytes == 50 * MIB and arena.remaining == 0
    arena.check()
    again = arena.empty(7 * MIB, "u1")  # fits in a hole, which gets no more memory than that
    again[:] = 9
    assert again.ctypes.data == at + 10 * MIB and arena.capacity == 38 * MIB
    large = arena.zeros(12 * MIB, "u1")  # does not, so the region becomes longer
    assert large.ctypes.data == at + 50 * MIB and not large.any()
    assert [set(peek(one.ctypes.data, one.nbytes)) for one in arrays] == [{0}, {2}, {4}]
    assert (again == 9).all()
    arena.check()


@pytest.mark.parametrize("nbytes", [MIB, 10 * MIB])
def test_a_mark_may_stand_where_all_is_free(arena_of, nbytes):
    arena = arena_of()
    array = arena.zeros(nbytes, "u1")
    arena.reset()
    arena.trim()
    with arena.scope():
        del array
        arena.trim()
        arena.check()
        block = arena.alloc(3 * MIB)
        arena.check()
        arena.trim()
        arena.check()
        block.fill(1)
    del block
    arena.trim()
    arena.check()
    assert arena.regions[0].nbytes == 1


def test_a_block_may_lie_over_several_holes(arena_of):
    """An empty arena has room for whatever fits in max_bytes, whatever was trimmed before."""
    arena = arena_of(2 * MIB, 32 * MIB)
    low = arena.empty(12 * MIB - PAGE, "u1")
    middle = arena.zeros(100, "u1")
    high, last = arena.empty(14 * MIB, "u1"), arena.zeros(100, "u1")
    arena.reset()
    at = low.ctypes.data
    del low, high
    assert arena.trim() > 20 * MIB
    del middle, last
    arena.reset()
    before = unchanged_view(arena)
    with pytest.raises(OutOfMemory):
        arena.alloc(32 * MIB + 1)
    assert unchanged_view(arena) == before
    block = arena.alloc(30 * MIB)
    assert block.address == at
    block.fill(5)
    arena.check()
    assert arena.grow(block, 32 * MIB) is block and arena.capacity == 32 * MIB


def test_a_block_grows_into_a_hole(arena_of):
    arena = arena_of()
    block, array = arena.alloc(2 * MIB), None
    with arena.scope():
        arena.alloc(10 * MIB)
        array = arena.empty(MIB, "u1")
    assert arena.trim() == 11 * MIB  # and one at the end
    at = block.address
    assert arena.grow(block, 12 * MIB) is block and block.address == at
    assert arena.capacity == 13 * MIB
    arena.check()
    larger = arena.grow(block, 12 * MIB + 1)  # no further, so it moves
    assert larger.address == array.ctypes.data + MIB
    arena.check()


def test_a_region_ends_before_a_hole(arena_of):
    arena = arena_of()
    first = arena.empty(3 * MIB, "u1")
    arena.alloc(20 * MIB)
    last = arena.empty(MIB, "u1")
    arena.reset()
    assert arena.trim() == 19 * MIB and arena.regions[0].nbytes == 24 * MIB
    del last
    assert arena.trim() == 3 * MIB and arena.regions[0].nbytes == arena.capacity == 3 * MIB
    del first
    arena.reset()
    assert arena.trim() == 3 * MIB - 1
    arena.check()


def kib(most):
    return st.integers(1, most).map(lambda n: n << 10)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("array"), kib(6 << 10)),
        st.tuples(st.just("drop"), st.integers(0, 20)),
        st.tuples(st.just("reset"), st.none()),
        st.tuples(st.just("mark"), st.none()),
        st.tuples(st.just("pop"), st.none()),
        st.tuples(st.just("grow"), kib(4 << 10)),
        st.tuples(st.just("trim"), st.just(0) | kib(20 << 10)),
    ),
    max_size=40,
)


@given(steps=STEPS, source=st.sampled_from([Host, Shared]))
@settings(deadline=None)
@pytest.mark.no_sanitizer
def test_holes_come_and_go_beside_blocks(steps, source):
    """Blocks keep their bytes, and after a trim no free granule but the first has memory."""
    arena = Bump(PAGE, source(grow=True, **SMALL_PAGES), 48 * MIB)
    at, arrays, marks, block = arena.regions[0].address, [], [], None
    for serial, (step, value) in enumerate(steps):
        mark = serial % 251 + 1
        with contextlib.suppress(OutOfMemory):
            if step == "array":
                arrays.append((arena.empty(value, "u1"), mark))
                arrays[-1][0][:: PAGE // 4] = mark
            elif step == "drop" and arrays:
                del arrays[value % len(arrays)]
            elif step == "mark":
                marks.append(arena.mark())
                block = None  # it would move, and the reset would end it
            elif step == "pop" and marks:
                arena.reset(marks.pop())
                block = None
            elif step == "reset":
                arena.reset()
                block = None
                marks.clear()
            elif step == "grow" and block is not None:
                block = arena.grow(block, block.nbytes + value)
            elif step == "grow":
                block = arena.alloc(value)
        if step == "trim":
            before = arena.capacity
            assert arena.trim(value) == before - arena.capacity
            assert arena.capacity == before or arena.capacity >= value
            if value == 0:
                pieces = len(arrays) + 3
                assert arena.remaining <= 4 * MIB * pieces, "whole granules are free"
                assert resident(at, 48 * MIB) <= arena.capacity + 2 * MIB
        arena.check()
        for array, mark in arrays:
            assert (array[:: PAGE // 4] == mark).all()
    array = block = None
    arrays.clear(), marks.clear()
    arena.reset()
    assert arena.alloc(48 * MIB).address == at, "an empty arena has room for all that it may have"


def test_trim_keeps_as_much_as_it_is_told(arena_of):
    arena = arena_of(MIB)
    with arena.scope():
        arena.alloc(20 * MIB)
    assert arena.trim(5 * MIB) >= 15 * MIB and arena.capacity == 5 * MIB
    for bad in (-1, 1 << 64):
        with pytest.raises(ValueError, match="keep_bytes"):
            arena.trim(bad)


def test_trim_of_an_arena_of_many_regions_drops_the_free_ones_at_the_end():
    arena = Bump(PAGE, Host(huge_pages=None), 64 * MIB)
    with arena.scope():
        while len(arena.regions) < 5:
            arena.alloc(PAGE)
    second = arena.regions[1].nbytes
    assert arena.trim(PAGE + second) > 0 and len(arena.regions) == 2
    assert arena.trim() == second and len(arena.regions) == 1
    arena.check()


def test_a_batch_that_fails_gives_back_what_it_made_the_arena_grow(arena_of):
    arena = arena_of(PAGE, 8 * MIB)
    before = unchanged_view(arena)
    with pytest.raises(OutOfMemory):
        arena.alloc_many([MIB] * 9)
    assert unchanged_view(arena) == before
    assert len(arena.alloc_many([MIB] * 7)) == 7


def test_a_batch_that_fails_leaves_the_holes_as_they_were(arena_of):
    arena = arena_of()
    arrays = [arena.empty(nbytes, "u1") for nbytes in (100, 20 * MIB, 100)]
    arena.reset()
    del arrays[1]
    arena.trim()
    with arena.scope():
        arena.alloc(23 * MIB)  # behind the hole
    before = unchanged_view(arena), arena._reserved()
    with pytest.raises(OutOfMemory):
        arena.alloc_many([23 * MIB, 15 * MIB, 64 * MIB])
    assert (unchanged_view(arena), arena._reserved()) == before
    assert len(arena.alloc_many([23 * MIB, 15 * MIB])) == 2


class Meddling(Host):
    """Runs something while it gives memory."""

    during = None

    def reserve(self, nbytes):
        made = super().reserve(nbytes)
        return Meddled(made)


class Meddled:
    def __init__(self, made):
        self.made, self.region = made, made.region
        self.nbytes, self.page_size = made.nbytes, made.page_size
        self.decommit = made.decommit

    def commit(self, offset, nbytes):
        self.made.commit(offset, nbytes)
        if Meddling.during:
            Meddling.during()


def test_code_that_runs_while_it_grows_cannot_make_it_grow(monkeypatch):
    arena = Bump(PAGE, Meddling(grow=True), 64 * MIB)
    seen = []

    def during():
        Meddling.during = None
        with pytest.raises(OutOfMemory, match="growing just now"):
            arena.alloc(MIB)
        seen.append(arena.trim())
        seen.append(arena.alloc(64))

    monkeypatch.setattr(Meddling, "during", during)
    block = arena.alloc(3 * MIB)
    assert seen[0] == 0 and seen[1].address != block.address
    poke(block.address, block.nbytes, 1)
    poke(seen[1].address, 64, 2)
    assert set(peek(block.address, block.nbytes)) == {1}
    arena.check()
    arena.alloc(30 * MIB)  # and afterwards it grows again


def test_a_check_amid_which_the_arena_is_trimmed():
    """By a finalizer: where Python collects while C code allocates, so before 3.12."""
    arena = Bump(PAGE, Host(grow=True), 64 * MIB)

    class Cycle:
        def __init__(self):
            self.itself = self

        def __del__(self):
            arena.trim()

    kept = [memoryview(arena.alloc(100)) for _ in range(3000)]  # many ranges to look at
    mark = arena.mark()
    thresholds = gc.get_threshold()
    try:
        for i in range(20):
            arena.alloc(20 * MIB)
            arena.reset(mark)
            Cycle()
            gc.set_threshold(50 + i)
            arena.check()
            gc.set_threshold(*thresholds)
    finally:
        gc.set_threshold(*thresholds)
    assert len(kept) == 3000


@pytest.mark.parametrize(
    "make",
    [lambda one: Bump(PAGE, one), lambda one: Slab(64, 1, one), lambda one: Pool(MIB, one, PAGE)],
)
def test_who_is_refused_the_region_leaves_it_growing(monkeypatch, make):
    arena = Bump(PAGE, Meddling(grow=True), 64 * MIB)
    (region,) = arena.regions
    refused = []

    def during():
        Meddling.during = None
        with pytest.raises(ValueError, match="already belongs"):
            make(Given(region))
        with pytest.raises(BufferError, match="growing or shrinking"):
            region.close()
        refused.append(True)

    monkeypatch.setattr(Meddling, "during", during)
    block = arena.alloc(3 * MIB)
    assert refused and not region.closed
    poke(block.address, block.nbytes, 1)


@pytest.mark.parametrize("call", ["commit", "decommit"])
def test_nobody_closes_the_region_while_its_memory_changes(call):
    """What is unmapped may be mapped again by others, whose bytes the source would then change."""
    arena = Bump(PAGE, Offering(), 64 * MIB)
    (region,) = arena.regions
    arena.alloc(3 * MIB)
    arena.reset()
    refused = []

    def during():
        with pytest.raises(BufferError, match="growing or shrinking"):
            region.close()
        refused.append(region.closed)
        assert not closes_in_a_child()  # where this call goes on
        with ThreadPoolExecutor(1) as other:  # in whose child nobody is at work
            assert other.submit(closes_in_a_child).result()

    def closes_in_a_child():
        child = os.fork()
        if not child:
            with contextlib.suppress(BufferError):
                region.close()
            os._exit(region.closed)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1

    Offering.during = {call: during}
    try:
        arena.alloc(20 * MIB)
        arena.reset()
        assert arena.trim() > 19 * MIB
    finally:
        Offering.during = {}
    assert refused == [False]
    arena.check()
    region.close()  # afterwards it can be
    assert region.closed


class Offering:
    """A source of reservations as a test wants them: `during` their methods it calls something."""

    grow = True
    during: ClassVar = {}

    def __init__(self, room=None, wrong=None):
        self.room, self.wrong = room, wrong
        self.made = []

    def region(self, nbytes):
        return Host(prefault=False).region(nbytes)

    def reserve(self, nbytes):
        self.made.append(Offered(Host(grow=True).reserve(self.room or nbytes)))
        if self.wrong is not None:
            self.made[-1].region = self.wrong(self.made[-1].region)
        return self.made[-1]


class Offered:
    def __init__(self, made):
        self.made, self.region = made, made.region

    def commit(self, offset, nbytes):
        Offering.during.get("commit", int)()
        self.made.commit(offset, nbytes)

    def decommit(self, offset, nbytes, stream=None):
        Offering.during.get("decommit", int)()
        self.made.decommit(offset, nbytes)


class KeepsMemory(Granules):
    """Refuses memory behind an address, and then keeps what it gave before."""

    def reserve(self, nbytes):
        self.made = KeepsMemoryReserved(round_up(nbytes, GRANULE))
        return self.made


class KeepsMemoryReserved(GranulesReserved):
    refuses_from = None

    def commit(self, offset, nbytes):
        assert not self.part(offset, nbytes) & self.there, "it has memory already"
        if self.refuses_from is not None and offset >= self.refuses_from:
            raise OutOfMemory("the source has no more")
        super().commit(offset, nbytes)

    def decommit(self, offset, nbytes, stream=None):
        if self.refuses_from is not None:
            raise RuntimeError("a stream is captured")
        super().decommit(offset, nbytes, stream)


def test_a_hole_that_keeps_the_memory_of_growth_that_fails_is_no_hole():
    source = KeepsMemory()
    arena = Bump(2 * MIB, source, 64 * MIB)
    first, mark = arena.alloc(2 * MIB), arena.mark()
    blocks = [arena.alloc(4 * MIB), memoryview(arena.alloc(2 * MIB))]
    arena.reset(mark)
    arena.trim()
    blocks.clear()
    assert arena.capacity == 4 * MIB
    source.made.refuses_from = 8 * MIB
    with pytest.raises(OutOfMemory, match="the source has no more"):
        arena.alloc(12 * MIB)
    source.made.refuses_from = None
    assert arena.capacity == len(source.made.there) * GRANULE == 8 * MIB
    arena.check()
    block = arena.alloc(12 * MIB)
    poke(block.address, block.nbytes, 1)
    assert not first.closed


@pytest.mark.parametrize("make", [
    lambda source: Bump(8 * MIB, source),
    lambda source: Pool(64 * MIB, source, initial_bytes=8 * MIB),
])  # fmt: skip
@pytest.mark.parametrize(
    ("room", "wrong", "error", "message"),
    [
        (2 * MIB, None, ValueError, "gave only 2097152 bytes"),
        (80 * MIB, lambda r: window(r, 0, 64), ValueError, "page_size=64"),
        (80 * MIB, lambda r: window(r, 64, PAGE), ValueError, "begins on a page"),
        (None, lambda r: 7, TypeError, "not an arenapy.Region"),
        (None, lambda r: r.close() or r, ValueError, "closed"),
    ],
)
def test_a_reservation_that_no_arena_can_grow_in_is_refused(make, room, wrong, error, message):
    source = Offering(room, wrong)
    with pytest.raises(error, match=message):
        make(source)
    assert len(source.made) == 1


@pytest.mark.parametrize("arena", [Bump, partial(Pool, initial_bytes=8 * MIB)])
@pytest.mark.parametrize("name", ["commit", "decommit"])
def test_a_reservation_without_a_method_is_refused(arena, name):
    class Lacking(Offering):
        def reserve(self, nbytes):
            made = super().reserve(nbytes)
            setattr(made, name, None)
            return made

    with pytest.raises(TypeError, match=rf"has no {name}\(\) method"):
        arena(64 * MIB, Lacking())


def window(region, skip, page_size):
    return Region.from_address(
        region.address + skip, region.nbytes - PAGE, owner=region, page_size=page_size
    )


def test_a_source_may_reserve_nothing():
    class Nothing(Offering):
        def reserve(self, nbytes):
            return None

    with pytest.raises(TypeError, match="returned None"):
        Bump(MIB, Nothing())
    assert Pool(64 * MIB, Nothing(), initial_bytes=MIB).alloc(1).nbytes == 1  # region by region


@pytest.mark.parametrize("other", [
    lambda source: Bump(PAGE, source, 32 * MIB),
    lambda source: Pool(32 * MIB, source, initial_bytes=PAGE),
])  # fmt: skip
def test_one_reservation_is_not_for_two_arenas(other):
    """The second one must not change the region before it is refused."""

    class Same(Offering):
        def reserve(self, nbytes):
            return self.made[0] if self.made else super().reserve(nbytes)

    source = Same(64 * MIB)
    arena = Bump(MIB, source, 32 * MIB)
    block = arena.alloc(MIB - PAGE)
    poke(block.address, block.nbytes, 7)
    before = unchanged_view(arena)
    with pytest.raises(ValueError, match="already belongs to an allocator"):
        other(source)
    assert unchanged_view(arena) == before and arena.regions[0].nbytes == MIB
    for _ in range(8):
        fresh = arena.alloc(MIB // 2)
        poke(fresh.address, fresh.nbytes, 9)
    assert set(peek(block.address, block.nbytes)) == {7}
    arena.check()


def test_growth_that_fails_changes_nothing(monkeypatch):
    arena = Bump(PAGE, Meddling(grow=True), 64 * MIB)
    arena.alloc(100)
    before = unchanged_view(arena)

    def fail():
        raise OutOfMemory("planned")

    monkeypatch.setattr(Meddling, "during", fail)
    with pytest.raises(OutOfMemory, match="planned"):
        arena.alloc(MIB)
    assert unchanged_view(arena) == before
    monkeypatch.setattr(Meddling, "during", None)
    arena.alloc(MIB)


@pytest.mark.no_sanitizer  # which reserves terabytes of addresses
def test_a_limit_that_counts_addresses_is_named(run_script):
    run_script("""
        import resource
        from arenapy import Bump, Host, OutOfMemory, Pool
        resource.setrlimit(resource.RLIMIT_AS, (1 << 40,) * 2)
        for make in (lambda: Bump(4096, Host(grow=True), 1 << 20).alloc(8192),
                     lambda: Pool(1 << 20, Host(grow=True)).alloc(1)):
            try:
                make()
            except OutOfMemory as error:
                assert "grow=True" in str(error) and "RLIMIT_AS" in str(error), error
            else:
                raise AssertionError("it did not refuse")
        assert Pool(1 << 22, Host()).alloc(1).nbytes == 1
    """)


@pytest.mark.parametrize("source", [Host, Shared])
def test_options_that_do_not_go_together(source):
    for pages in ("2M", "1G"):
        with pytest.raises(ValueError, match=f"grow=True with huge_pages='{pages}'"):
            source(grow=True, huge_pages=pages)
    with pytest.raises(TypeError, match="grow=1"):
        source(grow=1)


@pytest.mark.parametrize("source", [Host, Shared])
def test_a_slab_and_a_region_take_it_in_one_piece(source):
    items = Slab(PAGE, 4, source(grow=True), max_count=8)
    assert len({items.alloc().address for _ in range(1)}) == 1
    assert source(grow=True).region(PAGE).nbytes == PAGE


def test_a_forked_child_grows_its_own_copy(run_script):
    run_script("""
        import os
        from arenapy import Bump, Host
        arena = Bump(4096, Host(grow=True), 64 << 20)
        block = arena.alloc(1 << 20)
        block.fill(1)
        pid = os.fork()
        if pid == 0:
            arena.alloc(8 << 20).fill(2)
            arena.check()
            os._exit(bytes(block[:1]) != b"\\1" or len(arena.regions) != 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        arena.alloc(4 << 20).fill(3)
        assert bytes(block[:1]) == b"\\1"
        arena.check()
    """)
