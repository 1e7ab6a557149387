"""Bump, section 6 of the design: buffers that grow, arenas that grow, faults, one per thread."""

import itertools
import resource

import pytest
from helpers import PAGE, Pages, exact, peek, poke, unchanged_view

from arenapy import Bump, Host, OutOfMemory


@pytest.fixture
def arena():
    return exact(1 << 20)


# Growing a buffer ------------------------------------------------------------------------------


def test_the_last_block_grows_in_place(arena):
    block = arena.alloc(100)
    poke(block.address, 100, 3)
    where, used = block.address, arena.used
    grown = arena.grow(block, 5000)
    assert grown is block and block.address == where and block.nbytes == len(block) == 5000
    assert peek(where, 100) == b"\x03" * 100 and arena.used == used + 4900
    assert arena.alloc(1, 1).address == where + 5000


@pytest.mark.parametrize("why", ["newer block", "newer mark", "no room", "old frame"])
def test_other_blocks_grow_by_moving(why):
    arena = exact(1 << 16, max_bytes=1 << 20)
    block = arena.alloc(1 << 15 if why == "no room" else 100)
    poke(block.address, block.nbytes, 3)
    old, nbytes = block.nbytes, block.nbytes * 3 if why == "no room" else 5000
    if why == "newer block":
        arena.alloc(8)
    elif why == "newer mark":
        mark = arena.mark()  # noqa: F841 (alive: a mark that is dropped has ended)
    elif why == "old frame":
        with arena.scope():
            arena.alloc(8)
            arena.mark()
            grown = arena.grow(block, nbytes)
            assert grown is not block
            assert bytes(grown[:old]) == b"\x03" * old
        return
    grown = arena.grow(block, nbytes)
    assert grown is not block and grown.nbytes == nbytes and grown.address % 64 == 0
    assert block.closed and peek(grown.address, old) == b"\x03" * old
    arena.check()


def test_growing_past_a_mark_does_not_lose_the_tail_to_a_reset(arena):
    block = arena.alloc(64)
    mark = arena.mark()
    grown = arena.grow(block, 256)
    poke(grown.address, 256, 4)
    view = memoryview(grown)
    arena.reset(mark)
    other = arena.alloc(1000)
    poke(other.address, 1000, 0)
    assert bytes(view) == b"\x04" * 256


def test_a_block_with_live_exports_does_not_move(arena):
    block = arena.alloc(64)
    view = memoryview(block)
    arena.alloc(8)
    before = unchanged_view(arena)
    with pytest.raises(BufferError):
        arena.grow(block, 128)
    assert unchanged_view(arena) == before and not block.closed and len(view) == 64


def test_a_growth_that_does_not_fit_changes_nothing(arena):
    block = arena.alloc(64)
    for nbytes, error in ((arena.capacity + 1, OutOfMemory), (-1, ValueError), (2**63, ValueError)):
        before = unchanged_view(arena)
        with pytest.raises(error):
            arena.grow(block, nbytes)
        assert unchanged_view(arena) == before and not block.closed and block.nbytes == 64
    with pytest.raises((ValueError, TypeError)):
        arena.grow(exact(PAGE).alloc(8), 16)
    with pytest.raises(TypeError):
        arena.grow(b"bytes", 16)
    block.release()
    with pytest.raises(ValueError, match="closed"):
        arena.grow(block, 100)


# Growing an arena ------------------------------------------------------------------------------


def test_regions_double_up_to_max_bytes():
    source = Pages()
    arena = Bump(PAGE, source=source, max_bytes=16 * PAGE)
    while arena.capacity < 16 * PAGE:
        poke(arena.alloc(PAGE).address, PAGE, 1)
    sizes = [region.nbytes for region in arena.regions]
    assert sizes[0] == PAGE and sum(sizes) == 16 * PAGE and len(sizes) == source.calls <= 6
    assert all(later >= earlier for earlier, later in itertools.pairwise(sizes[:-1]))
    while arena.remaining >= PAGE:
        arena.alloc(PAGE)
    before = unchanged_view(arena)
    with pytest.raises(OutOfMemory):
        arena.alloc(arena.remaining + 1)
    assert unchanged_view(arena) == before


def test_a_large_request_gets_a_large_region():
    arena = exact(PAGE, max_bytes=64 * PAGE)
    block = arena.alloc(50 * PAGE)
    poke(block.address, block.nbytes, 1)
    assert arena.stats().regions == len(arena.regions) == 2 and arena.capacity <= 64 * PAGE


def test_marks_reach_over_regions():
    arena = exact(PAGE, max_bytes=64 * PAGE)
    arena.alloc(100)
    mark, used = arena.mark(), arena.used
    blocks = [arena.alloc(PAGE - 8) for _ in range(10)]
    assert len(arena.regions) > 1
    arena.reset(mark)
    assert arena.used == used and all(block.closed for block in blocks)
    arena.reset()
    assert arena.used == 0 and arena.remaining == arena.capacity


def test_a_source_that_fails_changes_nothing():
    arena = Bump(PAGE, source=Pages(fail_on=2), max_bytes=64 * PAGE)
    block = arena.alloc(PAGE // 2)
    poke(block.address, block.nbytes, 1)
    before = unchanged_view(arena)
    with pytest.raises(OutOfMemory):
        arena.alloc(PAGE)
    assert unchanged_view(arena) == before
    assert arena.alloc(PAGE).nbytes == PAGE  # the next try is served
    assert peek(block.address, block.nbytes) == b"\x01" * block.nbytes


class Strange(Exception):
    pass


def test_a_source_that_raises_or_lies():
    class Source(Pages):
        answer = None

        def region(self, nbytes):
            if self.answer is None:
                return super().region(nbytes)
            return self.answer(nbytes)

    def boom(nbytes):
        raise Strange(nbytes)

    source = Source()
    arena = Bump(PAGE, source=source, max_bytes=64 * PAGE)
    arena.alloc(10)
    before = unchanged_view(arena)
    for answer, error in (
        (boom, Strange),
        (lambda n: b"no region", TypeError),
        (lambda n: Pages().region(16), (ValueError, MemoryError)),
    ):
        source.answer = answer
        with pytest.raises(error):
            arena.alloc(PAGE)
        assert unchanged_view(arena) == before
    source.answer = None
    arena.alloc(PAGE)


# Faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [4096, 1 << 20, 32 << 20])
@pytest.mark.no_sanitizer
def test_no_page_fault_once_prefaulted(nbytes):
    arena = Bump(nbytes + (2 << 20), source=Host())

    def faults(rounds):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(rounds):
            with arena.scope():
                arena.alloc(100)
                arena.empty(nbytes, "u1").fill(1)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    # The interpreter may fault for itself now and then: one clean run of several is the proof.
    assert min(faults(20) for _ in range(8)) == 0


# Per thread ------------------------------------------------------------------------------------


def meanwhile_grown(arena, block):
    arena.grow(block, 30 * PAGE)


def meanwhile_exported(arena, block):
    kept.append(memoryview(block))


def meanwhile_released(arena, block):
    block.release()


def meanwhile_reset(arena, block):
    arena.reset()


kept = []


@pytest.mark.parametrize(
    "meanwhile", [meanwhile_grown, meanwhile_exported, meanwhile_released, meanwhile_reset]
)
def test_a_block_that_changes_while_room_is_made_for_it(meanwhile):
    """The source is asked for room and runs code that uses the block: only what fits is copied."""
    guarded = Host(huge_pages=None, guard=True)
    acts = []

    class Source:
        def region(self, nbytes):
            for act in acts:
                act()
            return guarded.region(nbytes)

    arena = Bump(32 * PAGE, Source(), max_bytes=64 * PAGE)
    block, other = arena.alloc(PAGE), arena.alloc(30 * PAGE)

    def act():
        acts.clear()
        other.release()
        meanwhile(arena, block)

    acts.append(act)
    with pytest.raises((ValueError, BufferError)):
        arena.grow(block, 2 * PAGE)
    kept.clear()
    arena.check()
    arena.reset()
    assert arena.used == 0


@pytest.mark.full
def test_garbage_is_collected_while_the_list_of_regions_is_made(run_script):
    """The collector may run at any new object of the arena's own, and run code that grows it."""
    run_script("""
        import gc
        import sys
        from arenapy import Bump, Host, OutOfMemory

        gc.set_threshold(10**6)
        fill = [[tuple(range(k, k + n)) for k in range(3000)] for n in range(1, 19)]
        kept, ran = [], 0

        class Source:
            armed = None

            def region(self, nbytes):
                if nbytes > 300_000:
                    if act is refuse:
                        self.arm()
                    raise OutOfMemory("no more")
                region = Host(huge_pages=None).region(nbytes)
                if act is grow:
                    self.arm()
                return region

            def arm(self):
                # No dead tuple is left to be used again: the next one asks the collector.
                fill.append([[tuple(range(k, k + n)) for k in range(30)] for n in range(1, 19)])
                if self.armed is not None:
                    gc.set_threshold(max(gc.get_count()[0] - self.armed, 1))

        def use(phase, info):
            global ran
            if phase == "start" and source.armed is not None:
                source.armed, ran = None, ran + 1
                gc.set_threshold(10**6)
                kept.append(arena.empty(250_000, "u1"))
                kept[-1][:] = 7

        def grow():
            arena.alloc(200_000)

        def refuse():
            try:
                arena.alloc_many([60_000] * 8 + [2 << 20])
            except OutOfMemory:
                pass

        gc.callbacks.append(use)
        for act in grow, refuse:
            for late in range(-40, 2):
                source = Source()
                arena = Bump(1 << 16, source, max_bytes=1 << 24)
                first = [arena.alloc(65_000) for _ in range(9)]
                source.armed = late
                act()
                source.armed = None
                gc.set_threshold(10**6)
                arena.check()
                places = [(r.address, r.address + r.nbytes) for r in arena.regions]
                assert sum(end - start for start, end in places) == arena.capacity
                for array in kept:
                    at = array.ctypes.data
                    assert any(start <= at < end for start, end in places), (late, act)
                    assert (array == 7).all()
                array = None
                kept.clear()
        # Without a GIL, threads count new objects by the batch.
        assert ran > (20 if getattr(sys, "_is_gil_enabled", lambda: True)() else 0), ran
    """)


def test_blocks_that_other_code_took_are_counted():
    """Also where alloc_many fails, whose own are not."""
    taken = []

    class Source:
        def region(self, nbytes):
            if nbytes > 1 << 19:
                raise OutOfMemory("no more")
            if regions:
                taken.append(arena.alloc(100))
            regions.append(Host(huge_pages=None).region(nbytes))
            return regions[-1]

    regions = []
    arena = Bump(1 << 16, Source(), max_bytes=1 << 21)
    with pytest.raises(OutOfMemory):
        arena.alloc_many([60_000, 60_000, 1 << 20])
    assert len(taken) == arena.stats().total_allocations == 1
