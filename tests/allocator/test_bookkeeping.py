"""The tables that allocators keep beside the memory: they grow to their end, and go with it."""

import gc
from pathlib import Path

import pytest
from helpers import PAGE, in_threads
from sources import Adjacent, Regions

from arenapy import Bump, Pool, Slab, trace

PLACES = 4096 // 8  # of a table of words, one in so many lengths ends with a page


def address_space():
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE


def used(allocator):
    """It has grown, and all is free again."""
    kept = [allocator.alloc(PAGE) for _ in range(20)]
    kept.clear()


ALLOCATORS = {
    "bump": lambda source: Bump(4 * PAGE, source, max_bytes=1 << 20),
    "slab": lambda source: Slab(PAGE, 4, source, max_count=256),
    "pool": lambda source: Pool(1 << 20, source, 4 * PAGE),
}


@pytest.mark.no_sanitizer  # which maps memory of its own
@pytest.mark.parametrize("kind", ALLOCATORS)
def test_nothing_is_left_of_a_dropped_allocator(kind):
    growth = []
    for _ in range(4):  # malloc may take some memory once
        before = address_space()
        for _ in range(40):
            used(ALLOCATORS[kind](Regions()))
        gc.collect()
        growth.append(address_space() - before)
    assert min(growth) < 40 * PAGE


class GivesAnothers(Regions):
    """Every region but the first is one that another allocator has."""

    def __init__(self):
        super().__init__()
        self.other = Pool(source=Regions(), initial_bytes=4 << 20)

    def region(self, nbytes):
        return self.other.regions[0] if self.calls else super().region(nbytes)


@pytest.mark.no_sanitizer
@pytest.mark.parametrize(("kind", "first", "nbytes"), [("slab", 4, PAGE), ("pool", 0, 16 * PAGE)])
def test_nothing_is_left_of_a_region_that_is_refused(kind, first, nbytes):
    allocator = ALLOCATORS[kind](GivesAnothers())
    kept = [allocator.alloc(nbytes) for _ in range(first)]
    growth = []
    for _ in range(3):
        before = address_space()
        for _ in range(40):
            with pytest.raises(ValueError, match="already"):
                allocator.alloc(nbytes)
        growth.append(address_space() - before)
    assert min(growth) < 40 * PAGE
    del kept


@pytest.mark.parametrize("kind", ["slab", "pool"])
def test_every_threads_table_counts(kind):
    allocator = ALLOCATORS[kind](Regions())
    used(allocator)
    before = allocator.stats().metadata_bytes
    in_threads(*[lambda: allocator.alloc(PAGE)] * 8)
    assert allocator.stats().metadata_bytes >= before + 5 * PAGE


@pytest.mark.no_sanitizer  # a long count; other tests run the same code there
def test_a_slabs_tables_end_anywhere_in_a_page():
    for count in range(600, 600 + PLACES):
        slab = Slab(16, count)
        for _ in range(2):
            slab.alloc_many(count).clear()
            slab.check()


def test_a_bump_in_many_pieces():
    """Held Buffers split its memory, and each piece in use is an entry of a table."""
    arena = Bump(64 * PAGE)
    blocks = [arena.alloc(64) for _ in range(200)]
    kept = [memoryview(block) for block in blocks[::2]]
    del blocks
    arena.reset()
    for _ in range(100):
        arena.alloc(64)
        arena.check()
    kept.clear()
    arena.reset()
    arena.check()
    assert arena.alloc(64 * PAGE)


@pytest.mark.parametrize("first", range(3))
def test_the_region_that_was_idle_longest_goes_first(first):
    pool = Pool(64 << 20, Adjacent(), 2 << 20)
    blocks = [pool.alloc(2 << 20) for _ in range(3)]
    begins = [block.address for block in blocks]
    small = pool.alloc(64)
    for i in range(3):
        blocks[(first + i) % 3].release()
        pool.alloc(64).release()
    assert len(pool.regions) == 4, small
    pool.trim(pool.stats().idle_bytes - (2 << 20))
    left = [region.address for region in pool.regions]
    gone = [begin for begin in begins if not any(at <= begin < at + (2 << 20) for at in left)]
    assert gone == [begins[first]]


def test_a_pools_growth_is_recorded(tmp_path):
    pool = Pool(16 << 20, Regions(), 2 << 20)
    with trace.record(pool, tmp_path / "trace"):
        kept = pool.alloc(4 << 20)
    events = trace.load(tmp_path / "trace").events
    grown = events[events["operation"] == trace.OPERATIONS["grow"]]
    assert sorted(grown["address"].tolist()) == sorted(one.address for one in pool.regions), kept


@pytest.mark.parametrize("how", [{}, {"debug": True}, {"trim_after": 100.0}], ids=str)
def test_every_free_of_a_pool_is_recorded(tmp_path, how):
    pool = Pool(16 << 20, **how)
    with trace.record(pool, tmp_path / "trace"):
        for nbytes in (100, 100_000):
            pool.alloc(nbytes).release()  # by a call, and when it is dropped
            pool.alloc(nbytes)
            memoryview(pool.alloc(nbytes)).release()
    events = trace.load(tmp_path / "trace").events
    for name in ("alloc", "free"):
        assert sum(events["operation"] == trace.OPERATIONS[name]) == 6, name


@pytest.mark.parametrize("held", [False, True])
def test_a_free_of_a_bump_is_recorded_with_its_bytes(tmp_path, held):
    arena = Bump(1 << 20)
    with trace.record(arena, tmp_path / "trace"):
        block = arena.alloc(1000)
        if held:
            memoryview(block).release()
            del block
        else:
            block.release()
    events = trace.load(tmp_path / "trace").events
    (free,) = events[events["operation"] == trace.OPERATIONS["free"]]
    assert free["nbytes"] == 1000


def test_a_thread_keeps_the_blocks_that_it_frees():
    """Sixty small ones fit into its magazine, so that another thread gets none of them."""
    pool = Pool(1 << 20)
    blocks = [pool.alloc(64) for _ in range(60)]
    places = {block.address for block in blocks}
    blocks.clear()
    [[*others]] = in_threads(lambda: [pool.alloc(64) for _ in range(60)])
    assert not places & {block.address for block in others}
    assert {pool.alloc(64).address for _ in range(60)} <= places
