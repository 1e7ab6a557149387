"""Bugs that were planted in the sources of Pool, one at a time, and that other tests missed.

Each test failed with its bug and passes without.
"""

import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
from children import another_process
from cuda_support import a_gpu
from every import fill_up
from helpers import PAGE, poke
from pool_rules import KIB, MIB
from sources import Adjacent, Regions

from arenapy import Host, OutOfMemory, Pool, Shared, cuda

HUGE = 2 * MIB
LAZY = {"regions": Regions, "host": lambda: Host(prefault=False)}


@pytest.fixture(params=LAZY)
def source(request):
    return LAZY[request.param]()


def fenced(pool, sizes):
    """A block of each size, which merge with nothing: between them, live ones that stay."""
    blocks, fences = [], []
    for nbytes in sizes:
        blocks.append(pool.alloc(nbytes))
        fences.append(pool.alloc(40 * KIB))
    return blocks, fences


def idle_blocks(pool, least=MIB):
    """{address: size} of the free blocks that are not small change."""
    return {
        info.address: info.nbytes
        for info in pool.blocks()
        if info.state == "idle" and info.nbytes >= least
    }


# What is given back --------------------------------------------------------------------------


def test_trim_takes_what_was_unused_longest_first(source):
    pool = Pool(source=source)
    blocks, fences = fenced(pool, [3 * MIB] * 8)
    addresses = [block.address for block in blocks]
    pool.trim()
    rest = pool.stats().idle_bytes
    order = [5, 1, 7, 3, 0]
    for index in order:
        blocks[index].release()
    for left in (3, 2, 1):
        pool.trim(rest + left * 3 * MIB)
        assert set(idle_blocks(pool, 3 * MIB)) == {addresses[index] for index in order[-left:]}
    pool.check()
    del fences


def test_what_is_left_of_a_split_is_as_old_as_it_was():
    pool = Pool(source=Host(prefault=False))
    (old, new), fences = fenced(pool, [3 * MIB, 4 * MIB])
    pool.trim()
    where = new.address
    old.release()
    new.release()
    pool.trim(64 * MIB)  # merges, and gives nothing back
    part = pool.alloc(MIB)
    assert pool.trim(4 * MIB) == 2 * MIB, "what was left of the older one"
    assert list(idle_blocks(pool)) == [where]
    del part, fences


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 2, 1), (2, 0, 1), (1, 2, 0)])
def test_a_merged_block_is_as_young_as_its_youngest_part(order):
    pool = Pool(source=Host(prefault=False))
    fences = [pool.alloc(40 * KIB)]
    blocks = [pool.alloc(3 * MIB) for _ in order]
    fences.append(pool.alloc(40 * KIB))
    where = blocks[0].address
    pool.trim()
    for index in order:
        blocks[index].release()
    pool.trim(64 * MIB)
    (merged,) = [info for info in pool.blocks() if info.address == where]
    assert (merged.nbytes, merged.age) == (len(order) * 3 * MIB, 0)


def test_growth_gives_idle_memory_back_and_no_more_than_it_takes():
    pool = Pool(source=Host(prefault=False))
    blocks, fences = fenced(pool, [3 * MIB] * 4)
    pool.trim()
    reserved = pool.stats().reserved_bytes
    blocks.clear()
    pool.alloc(6 * MIB).release()
    more = pool.stats().reserved_bytes - reserved
    assert 0 <= more < HUGE, "on to the end of a huge page"
    *small, large = sorted(idle_blocks(pool, 3 * MIB).values())
    assert small == [3 * MIB, 3 * MIB] and large >= 6 * MIB
    del fences


def test_growth_goes_on_to_the_end_of_a_huge_page():
    pool = Pool(source=Host(prefault=False))
    blocks = []
    for nbytes in (3 * MIB, 5 * MIB + 40 * KIB, 7 * MIB):
        blocks.append(pool.alloc(nbytes))
        ((start, reserved),) = pool._reserved()
        assert (start + reserved) % HUGE == 0


def test_a_block_that_a_device_pool_keeps_is_never_too_small():
    """There blocks are not rounded, so those of one step have different numbers of pages."""
    with a_gpu():
        pool = Pool(source=cuda.Device())
        for pages in range(9, 130):
            for nbytes in (pages * PAGE, pages * PAGE + 1):
                block = pool.alloc(nbytes)
                at = block.address
                (info,) = [info for info in pool.blocks() if info.address == at]
                assert nbytes <= info.nbytes < nbytes + 8 * PAGE
                del block
        del pool


@pytest.mark.no_sanitizer  # it takes too long there
def test_a_batch_needs_memory_whatever_number_of_descriptors_is_spare():
    for shift in range(32):  # it grows by up to 18 blocks at a time
        pool = Pool(source=Host(prefault=False))
        sizes = [40 * KIB] * shift + [2 * MIB] * 1100  # the first descriptors are 512
        assert len(pool.alloc_many(sizes)) == len(sizes)


def test_a_program_that_repeats_itself_is_served_from_what_is_idle_in_the_end():
    pool = Pool(source=Host(prefault=False))
    misses, kept = [], []
    for number in range(300):
        kept.append(pool.alloc((1 + number * 7 % 5) * MIB))
        if len(kept) > 4:
            del kept[number * 3 % 5]
        pool.alloc(7 * MIB).release()
        misses.append(pool.stats().pool_misses)
    assert misses[-1] == misses[-100], "it asks its source for ever"
    assert pool.stats().reserved_bytes < 4 * 27 * MIB, "four times what was live at most"
    pool.check()


@pytest.mark.parametrize("less", [0, 1])
def test_only_the_same_size_for_the_sixth_time_is_a_repetition(less):
    pool = Pool(source=Host(prefault=False))
    misses, reserved = [], []
    for number in range(8):
        low, fence, high = pool.alloc(8 * MIB), pool.alloc(40 * KIB), pool.alloc(8 * MIB)
        low.release()
        high.release()
        large = pool.alloc(16 * MIB - number * less)  # more than either leaves
        fence.release()
        large.release()
        misses.append(pool.stats().pool_misses)
        reserved.append(pool.stats().reserved_bytes)
    expected = [1] * 7 if less else [1] * 5 + [0] * 2
    assert [after - before for before, after in pairwise(misses)] == expected
    assert len(set(reserved[:5])) == 1, "memory was to be recycled"
    more = reserved[-1] - reserved[0]
    assert 0 <= more < 2 * HUGE if less else 8 * MIB < more <= 16 * MIB + HUGE
    pool.check()


def test_time_takes_what_was_not_used_and_nothing_else():
    pool = Pool(source=Host(prefault=False), trim_after=0.3)
    kept = pool.alloc(100)  # so that others of its size come from its pages
    (old, new), fences = fenced(pool, [3 * MIB, 4 * MIB])
    pool.trim()
    where = new.address
    begun = time.monotonic()
    old.release()
    kept_for_now = pool._trim_stale() == 0 and idle_blocks(pool)
    assert kept_for_now or time.monotonic() > begun + 0.3, "it was used just now"
    freed = None  # unless other programs had the cores meanwhile
    while 3 * MIB in idle_blocks(pool).values():  # others come and go meanwhile
        assert time.monotonic() < begun + 20, "it is never given back"
        pool.alloc(100).release()
        time.sleep(0.01)
        if freed is None and time.monotonic() > begun + 0.2:
            freed = time.monotonic()
            new.release()
    assert time.monotonic() > begun + 0.2, "too early"
    if freed is not None:
        assert idle_blocks(pool) == {where: 4 * MIB} or time.monotonic() > freed + 0.3
    del fences, kept


def test_an_allocation_trims_by_time():
    pool = Pool(source=Host(prefault=False), trim_after=0.02)
    kept = pool.alloc(100)
    pool.alloc(4 * MIB).release()
    reserved = pool.stats().reserved_bytes
    time.sleep(0.1)
    kept = [kept, pool.alloc(100)]
    assert pool.stats().reserved_bytes <= reserved - 4 * MIB
    del kept


# Growth --------------------------------------------------------------------------------------


def reserving():
    """A Host, and what says which of its commits fail, by bytes; it counts them."""
    plan = SimpleNamespace(failing=lambda nbytes: False, failures=0)

    class Reserving(Host):
        def reserve(self, nbytes):
            return Room(plan, super().reserve(nbytes))

    return Reserving(prefault=False), plan


class Room:
    def __init__(self, plan, inner):
        self.plan, self.inner, self.region = plan, inner, inner.region

    def commit(self, offset, nbytes):
        if self.plan.failing(nbytes):
            self.plan.failures += 1
            raise OutOfMemory(f"planned failure of {nbytes} bytes")
        self.inner.commit(offset, nbytes)

    def decommit(self, offset, nbytes, stream=None):
        self.inner.decommit(offset, nbytes, stream)


def test_growth_that_failed_is_undone():
    source, plan = reserving()
    pool = Pool(4 * MIB, source)
    kept = pool.alloc(100 * KIB)
    pool.trim()
    before = pool.stats()
    plan.failing = lambda nbytes: True
    for _ in range(3):
        with pytest.raises(OutOfMemory, match="planned failure"):
            pool.alloc(MIB)
        assert pool.stats() == before
        pool.check()
    plan.failing = lambda nbytes: False
    rest = [pool.alloc(MIB) for _ in range(3)]
    rest.append(pool.alloc(4 * MIB - 3 * MIB - 100 * KIB - 28 * KIB))
    assert pool.stats().reserved_bytes <= 4 * MIB
    for block in rest:
        poke(block.address, block.nbytes, 1)
    pool.check()
    del kept


def test_growth_takes_less_where_there_is_no_more():
    source, plan = reserving()
    pool = Pool(source=source)
    plan.failing = lambda nbytes: nbytes > 128 * KIB
    blocks = [pool.alloc(100 * KIB) for _ in range(3)]
    assert plan.failures >= 1 and pool.stats().reserved_bytes <= 3 * 128 * KIB
    limited = Regions()
    place = limited.place

    def little(nbytes):
        if nbytes > 128 * KIB:
            raise OutOfMemory("planned: that is more than there is")
        return place(nbytes)

    limited.place = little
    pool = Pool(source=limited)
    blocks += [pool.alloc(100 * KIB) for _ in range(3)]
    assert pool.stats().reserved_bytes <= 3 * 128 * KIB


def test_free_memory_before_the_frontier_counts():
    pool = Pool(4 * MIB, Host(prefault=False), initial_bytes=2 * MIB)
    block = pool.alloc(4 * MIB)
    assert pool.stats().reserved_bytes == 4 * MIB
    block.release()
    pool.trim()
    assert pool.alloc(4 * MIB - 100).nbytes, "nor is anything of the limit lost"


@pytest.mark.parametrize("skew", [0, 1, 64, PAGE - 64])
@pytest.mark.parametrize("initial", [1, PAGE, PAGE + 1, 5 * PAGE])
def test_the_first_memory_has_a_whole_page_wherever_it_begins(skew, initial):
    pool = Pool(source=Regions(skew), initial_bytes=initial)
    assert pool.stats().reserved_bytes >= PAGE
    assert pool.alloc(64).nbytes and pool.stats().pool_misses == 0
    pool.check()


@pytest.mark.parametrize("make", LAZY)
def test_the_limit_is_met_to_the_page(make):
    for pages in (16, 17, 100):
        pool = Pool(pages * PAGE, LAZY[make]())
        with pytest.raises(OutOfMemory):
            pool.alloc((pages + 1) * PAGE)
        assert pool.stats().reserved_bytes == 0
        blocks = [pool.alloc(40 * KIB) for _ in range(pages * PAGE // (40 * KIB))]
        with pytest.raises(OutOfMemory):
            blocks += [pool.alloc(40 * KIB) for _ in range(2)]
        assert pool.stats().reserved_bytes <= pages * PAGE


def test_what_is_cached_is_merged_before_the_source_is_asked():
    source = Regions()
    pool = Pool(source=source, initial_bytes=2 * MIB)
    for whole in (lambda: [pool.alloc(2 * MIB)], lambda: pool.alloc_many([2 * MIB])):
        blocks = [pool.alloc(64 * KIB) for _ in range(32)]
        blocks.clear()
        kept = whole()
        assert source.calls == 1 and pool.stats().pool_misses == 0
        kept.clear()
        blocks = [pool.alloc(500) for _ in range(1000)]
        blocks.clear()
        kept = whole()
        assert source.calls == 1 and pool.stats().pool_misses == 0
        kept.clear()


@pytest.mark.parametrize("upwards", [True, False])
def test_free_memory_of_touching_regions_is_not_merged(upwards):
    """Either could be given back alone, and a block across both would lose half of itself."""
    source = Adjacent(upwards=upwards)
    pool = Pool(source=source)
    blocks = [pool.alloc(2 * MIB) for _ in range(4)]
    assert source.calls == 4 == len(pool.regions)
    blocks.clear()
    pool.trim(64 * MIB)
    pool.check()
    assert sorted(idle_blocks(pool).values()) == [2 * MIB] * 4
    assert pool.stats().largest_free_block == 2 * MIB
    kept = pool.alloc(3 * MIB)
    assert source.calls == 5, "it lies across two regions"
    pool.check()
    del kept


# The hook ------------------------------------------------------------------------------------


def test_the_hook_is_asked_once_for_each_time_that_nothing_helps():
    answers, asked = [], []

    def hook(nbytes):
        asked.append(nbytes)
        return answers.pop(0)

    pool = Pool(4 * MIB, Regions(), on_oom=hook)
    blocks = [pool.alloc(2 * MIB)]
    assert not asked
    for planned in ([False], [True, False], [True, True, True, False]):
        answers[:], asked[:] = planned, []
        with pytest.raises(OutOfMemory):
            pool.alloc(3 * MIB)
        assert asked == [3 * MIB] * len(planned)
    asked.clear()
    blocks.pop().release()  # a region that can be given back
    blocks.append(pool.alloc(3 * MIB))
    assert not asked, "there was room, and the hook was asked"

    def frees(nbytes):
        asked.append(nbytes)
        blocks.pop()
        return True

    answers, pool = [], Pool(4 * MIB, Regions(), on_oom=frees)
    blocks = [pool.alloc(2 * MIB), pool.alloc(2 * MIB)]
    assert pool.alloc(2 * MIB).nbytes and asked == [2 * MIB]


# Counting ------------------------------------------------------------------------------------


@pytest.mark.parametrize("many", [False, True])
def test_splits_are_counted_to_the_one(many):
    pool = Pool(source=Regions(), initial_bytes=2 * MIB)

    def take(nbytes):
        return pool.alloc_many([nbytes])[0] if many else pool.alloc(nbytes)

    def counted(index):
        stats = pool.stats()
        one = stats.classes[index]
        return (stats.pool_hits, stats.pool_misses, stats.splits), (
            one.pool_hits, one.pool_misses, one.splits,
        )  # fmt: skip

    kept = [take(100)]
    assert counted(0) == ((1, 0, 1), (1, 0, 1)), "a span of slots, split off the region"
    kept.append(take(100))
    assert counted(0) == ((2, 0, 1), (2, 0, 1))
    kept.append(take(MIB))
    assert counted(9) == ((3, 0, 2), (1, 0, 1))
    kept.pop().release()
    kept.append(take(MIB))
    assert counted(9) == ((4, 0, 2), (2, 0, 1)), "it was there as it was"
    kept.append(take(5 * MIB))
    assert counted(12) == ((4, 1, 2), (0, 1, 0)), "a miss is no split"


def test_what_failed_is_in_no_figure():
    pool = Pool(4 * MIB, Regions())
    kept = pool.alloc(100)
    before = pool._tally(), pool.stats().peak_bytes
    with pytest.raises(OutOfMemory):
        pool.alloc_many([MIB, MIB, 100, MIB, MIB])
    pool.prewarm({MIB: 1, 50: 3})
    assert (pool._tally(), pool.stats().peak_bytes) == before
    del kept


def test_the_peak_can_be_exchanged():
    pool = Pool(source=Regions())
    blocks = [pool.alloc(MIB) for _ in range(5)]
    del blocks[1:]
    assert pool._exchange_peak(None) == 5 * MIB and pool.stats().peak_bytes == MIB
    assert pool._exchange_peak(3 * MIB) == MIB and pool.stats().peak_bytes == 3 * MIB
    blocks += [pool.alloc(MIB) for _ in range(3)]
    assert pool._exchange_peak(0) == 4 * MIB == pool.stats().peak_bytes
    pool.check()


@pytest.mark.parametrize("flushed", [False, True])
def test_the_largest_free_block_is_seen_wherever_it_is(flushed):
    """In the thread cache, among the slots of a span, or in the heap."""
    for nbytes in (100, 5000, 20 * KIB, 100 * KIB, 2 * MIB):
        pool = Pool(4 * MIB, Regions(), initial_bytes=4 * MIB)
        blocks = fill_up(pool, nbytes)
        rest = fill_up(pool, 4 * KIB) + fill_up(pool, 64)
        assert pool.stats().idle_bytes == pool.stats().largest_free_block == 0
        size = pool.stats().allocated_bytes
        blocks.pop(len(blocks) // 2).release()
        size -= pool.stats().allocated_bytes
        if flushed:
            pool.trim(1 << 40)
        stats = pool.stats()
        assert stats.idle_bytes == stats.largest_free_block == size
        assert stats.fragmentation == 0.0
        del rest


def test_neighbours_in_time_are_neighbours_in_memory():
    pool = Pool(source=Regions())
    for nbytes in (64, 100, 4 * KIB, 40 * KIB):
        blocks = [pool.alloc(nbytes) for _ in range(4)]
        starts = [block.address for block in blocks]
        assert starts == sorted(starts) and starts[-1] - starts[0] < 5 * (nbytes + 64)


# Caches at their edges -----------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [64, 512, 4 * KIB, 32 * KIB, 40 * KIB, 5 << 30])
def test_more_blocks_than_a_cache_has_room_for(nbytes):
    pool = Pool(source=Regions())
    count = 3 if nbytes > MIB else 700
    for _ in range(2):
        blocks = pool.alloc_many([nbytes] * count)
        starts = {block.address for block in blocks}
        assert len(starts) == count
        for start in starts:
            poke(start, 64, 1)
        while blocks:
            blocks.pop(len(blocks) // 2)
            if len(blocks) % 50 == 0:
                pool.check()
    assert pool.stats().allocated_bytes == 0
    pool.trim()
    assert pool.stats().reserved_bytes == 0
    pool.check()


def test_what_another_process_let_go_of_serves_again():
    """Without anybody asking for figures in between."""
    pool = Pool(MIB, Shared(), initial_bytes=MIB)
    blocks = [pool.alloc(500 * KIB), pool.alloc(500 * KIB)]
    with another_process():
        blocks.clear()
        with pytest.raises(OutOfMemory, match="pending"):
            pool.alloc(500 * KIB)
    assert pool.alloc(500 * KIB).nbytes == 500 * KIB
    pool.check()


def test_of_many_blocks_only_those_that_the_source_was_asked_for_are_misses():
    pool = Pool(source=Regions())
    blocks = pool.alloc_many([MIB, 300 * KIB, 300 * KIB, 300 * KIB])
    pool_of_one = Pool(source=Regions())
    others = [pool_of_one.alloc(block.nbytes) for block in blocks]
    many, one = pool.stats(), pool_of_one.stats()
    assert (many.pool_misses, many.pool_hits) == (one.pool_misses, one.pool_hits)
    assert many.pool_misses < len(blocks) == len(others)
