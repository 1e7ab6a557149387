"""Device memory that grows in place: `cuda.Device(grow=True)`, on the simulated driver."""

import gc
import random
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from cuda_support import (
    LEGACY,
    MIB,
    a_gpu,
    backwards,
    content,
    graph_of,
    new_stream,
    slowly_fill,
)

from arenapy import Bump, OutOfMemory, Pool, cuda, numpy_memory
from arenapy.commands.replay.device import HEAPS, Watch
from arenapy.commands.replay.program import program

sys.path.append(str(Path(__file__).parents[2]))  # behind what is installed

from asv_benches.gpu.traces import TRAINING, growing_sequences, random_trace, unpack

GRANULE = 2 * MIB
VIRTUAL_MEMORY, RDMA = 102, 110


@pytest.fixture
def gpu():
    with a_gpu() as driver:
        yield driver
        assert driver.errors == [] and driver.raised is None


def pool_of(max_bytes=48 * MIB, **options):
    return Pool(max_bytes, cuda.Device(grow=True), **options)


def filled(block, byte):
    block.fill(byte)
    return block


def used(gpu):
    """What the pool has of the device, but for the page that each reservation keeps."""
    return gpu.memory.used[0] - GRANULE


def test_a_pool_that_numpy_cannot_use_reserves_nothing(gpu):
    pool = pool_of()
    with pytest.raises(BufferError, match="device memory, which the host cannot access"):
        numpy_memory(pool)
    assert pool.regions == () and gpu.calls["cuMemAddressReserve"] == 0


def test_a_pool_has_one_region_and_maps_what_it_needs(gpu):
    before = cuda.memory_info().reserved_bytes  # pools that torch was given live on
    pool = pool_of()
    blocks = [pool.alloc(3 * MIB) for _ in range(10)]
    (region,) = pool.regions
    assert region.nbytes >= 48 * MIB and region.page_size == GRANULE
    assert used(gpu) == pool.stats().reserved_bytes == 30 * MIB
    assert cuda.memory_info().reserved_bytes - before == 30 * MIB
    for i, block in enumerate(blocks):
        block.fill(i)
    assert [content(block) for block in blocks] == [bytes([i]) * 3 * MIB for i in range(10)]
    pool.check()


def test_free_memory_merges_across_growth(gpu):
    pool = pool_of()
    small = [pool.alloc(4 * MIB) for _ in range(5)]  # each makes it grow
    assert used(gpu) == 20 * MIB
    at = small[0].address
    small.clear()
    large = pool.alloc(20 * MIB)
    assert large.address == at and used(gpu) == 20 * MIB and pool.stats().pool_misses == 5
    large.fill(1)
    assert set(content(large)) == {1}


def test_trim_gives_back_what_lies_between_live_blocks(gpu):
    pool = pool_of()
    blocks = [filled(pool.alloc(4 * MIB), i) for i in range(8)]
    free_before = cuda.memory_info().free_bytes
    del blocks[1:7:2]
    assert pool.trim() == 12 * MIB
    assert used(gpu) == 20 * MIB == pool.stats().reserved_bytes
    assert cuda.memory_info().free_bytes == free_before + 12 * MIB
    assert [content(one)[:1] for one in blocks] == [b"\0", b"\2", b"\4", b"\6", b"\7"]
    pool.check()
    again = [filled(pool.alloc(4 * MIB), 9) for _ in range(3)]  # in the holes
    assert used(gpu) == 32 * MIB and len(pool.regions) == 1
    assert {content(one)[:1] for one in again} == {b"\x09"}


def test_trim_leaves_parts_of_a_granule(gpu):
    pool = pool_of()
    a, b, c = pool.alloc(MIB), pool.alloc(4 * MIB), pool.alloc(MIB)
    assert used(gpu) == 6 * MIB
    start = pool.regions[0].address
    assert (b.address - start) % GRANULE == MIB
    b.release()
    assert pool.trim() == GRANULE and pool.stats().idle_bytes == 2 * MIB
    pool.check()
    assert pool.trim() == 0
    one = pool.alloc(MIB)  # what was left is still used
    assert used(gpu) == 4 * MIB
    del a, c, one
    assert pool.trim() == 4 * MIB and used(gpu) == 0
    pool.check()


def test_trim_keeps_as_much_as_it_is_told(gpu):
    pool = pool_of()
    pool.alloc(16 * MIB).release()
    assert pool.trim(7 * MIB) == 8 * MIB and pool.stats().idle_bytes == 8 * MIB
    pool.check()


def test_pieces_are_given_back_for_one_large_block_at_the_limit(gpu):
    pool = pool_of(24 * MIB)
    blocks = [pool.alloc(2 * MIB) for _ in range(12)]
    del blocks[::2]
    large = pool.alloc(12 * MIB)  # no hole has as much: it lies behind
    assert used(gpu) == 24 * MIB == pool.stats().reserved_bytes
    assert len(pool.regions) == 1
    large.fill(3)
    assert set(content(large)) == {3}
    with pytest.raises(OutOfMemory, match="max_bytes=25165824"):
        pool.alloc(2 * MIB)
    pool.check()


def test_a_limit_that_is_no_multiple_is_rounded_up(gpu):
    pool = pool_of(MIB)
    blocks = [pool.alloc(MIB), pool.alloc(MIB)]
    with pytest.raises(OutOfMemory):
        pool.alloc(4096)
    assert used(gpu) == GRANULE
    del blocks


def test_memory_is_unmapped_when_the_stream_has_done_its_work(gpu):
    """cuMemUnmap waits for nobody."""
    pool = pool_of()
    block = pool.alloc(8 * MIB)
    slowly_fill(gpu, LEGACY, block, 1)
    block.release()  # free, in the order of the pool's own stream
    assert gpu.queue
    assert pool.trim() == 8 * MIB
    assert not gpu.queue and gpu.errors == []


@pytest.mark.parametrize("end", ["pool", "region"])
def test_the_end_waits_for_all_streams(gpu, end):
    pool, s = pool_of(), new_stream(gpu)
    block = pool.alloc(8 * MIB)
    slowly_fill(gpu, LEGACY, block, 1)
    slowly_fill(gpu, s, block, 2)  # of which nobody was told
    block.release()
    if end == "region":
        pool.regions[0].close()
    del block, pool
    gc.collect()
    assert gpu.errors == [] and not any(gpu.memory.used.values())


def test_memory_of_a_stream_of_its_own(gpu):
    s = new_stream(gpu)
    pool = pool_of(stream=s)
    block = pool.alloc(8 * MIB)
    slowly_fill(gpu, s, block, 1)
    block.release()
    assert pool.trim() == 8 * MIB and gpu.errors == []


def test_blocks_of_other_streams_stay_while_those_work(gpu):
    pool, s = pool_of(), new_stream(gpu)
    block = pool.alloc(8 * MIB)
    block.record_stream(s)
    slowly_fill(gpu, s, block, 1)
    block.release()
    kept = pool.alloc(4 * MIB, stream=s)
    slowly_fill(gpu, s, kept, 1)
    kept.release()
    assert pool.trim() == 0
    backwards(gpu)
    assert pool.trim() == 12 * MIB and used(gpu) == 0


def test_nothing_is_unmapped_while_the_stream_may_be_captured(gpu):
    s = new_stream(gpu)
    pool = pool_of(stream=s)
    pool.alloc(8 * MIB).release()
    gpu.begin_capture(s.handle_)
    assert pool.trim() == 0 and used(gpu) == 8 * MIB
    graph = graph_of(gpu, s)
    assert pool.trim() == 8 * MIB
    gpu.destroy_graph(graph)
    pool.check()


@pytest.mark.parametrize("name", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
@pytest.mark.parametrize("result", [1, 2])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.sampled
def test_growth_that_fails_half_way_is_undone(gpu, name, result, n):
    pool = pool_of()
    kept = filled(pool.alloc(2 * MIB), 1)
    before = used(gpu)
    gpu.fails[name] = 0
    if name == "cuMemSetAccess" or n == 1:
        gpu.fails[name] = result
    else:
        calls = gpu.calls[name]
        gpu.plan.update({(name, calls + i): result for i in range(n, 200)})
    with pytest.raises(OutOfMemory if result == 2 else cuda.CudaError):
        pool.alloc(8 * MIB)
    assert used(gpu) == before and gpu.errors == []
    gpu.fails.clear()
    gpu.plan.clear()
    pool.check()
    assert set(content(filled(pool.alloc(8 * MIB), 2))) == {2} and set(content(kept)) == {1}


def test_memory_that_cannot_be_unmapped_is_used_again(gpu):
    pool = pool_of()
    pool.alloc(8 * MIB).release()
    gpu.fails["cuMemUnmap"] = 1
    assert pool.trim() == 8 * MIB and used(gpu) == 8 * MIB
    gpu.fails.clear()
    block = filled(pool.alloc(8 * MIB), 1)
    assert used(gpu) == 8 * MIB and set(content(block)) == {1}
    block.release()
    assert pool.trim() == 8 * MIB and used(gpu) == 0


def test_a_full_device_gets_everything_back(gpu):
    pool = Pool(source=cuda.Device(grow=True))
    blocks = []
    with pytest.raises(OutOfMemory, match="cuMemCreate"):
        while True:
            blocks.append(pool.alloc(2 * MIB))
    assert gpu.memory.left(0) == 0
    slowly_fill(gpu, LEGACY, blocks[0], 1)
    blocks.clear()
    pool = None
    gc.collect()
    assert gpu.memory.used[0] == 0


def test_an_end_that_fails_is_tried_again(gpu):
    pool = pool_of()
    pool.alloc(4 * MIB)
    gpu.fails["cuMemAddressFree"] = 1
    del pool
    gc.collect()
    assert len(gpu.memory.reserved) == 1
    gpu.fails.clear()
    pool = pool_of()
    pool.alloc(4 * MIB)
    assert len(gpu.memory.reserved) == 1
    del pool


def test_other_devices_reach_it(gpu):
    gpu.peers.update({(1, 0), (0, 1)})
    pool = pool_of()
    block = pool.alloc(4 * MIB)
    with gpu.on(1):
        s = new_stream(gpu)
        slowly_fill(gpu, s, block, 5)
        gpu.drain()
    assert set(content(block)) == {5}
    gpu.peers.clear()
    other = pool_of().alloc(4 * MIB)
    with gpu.on(1):
        slowly_fill(gpu, new_stream(gpu), other, 5)
        gpu.drain()
    assert "no access" in gpu.errors.pop()


def test_a_device_that_cannot_do_so_is_named(gpu):
    gpu.attributes[VIRTUAL_MEMORY] = 0
    with pytest.raises(ValueError, match="grow=True: device 0 cannot"):
        pool_of().alloc(1)
    gpu.attributes[VIRTUAL_MEMORY] = 1
    gpu.granularity = 3 * MIB
    with pytest.raises(ValueError, match=f"maps memory by {3 * MIB} bytes"):
        pool_of().alloc(1)
    gpu.granularity = 64 << 10
    assert pool_of().alloc(1).nbytes == 1
    with pytest.raises(TypeError, match="grow=1"):
        cuda.Device(grow=1)


def test_growth_adds_memory_next_to_what_is_free(gpu):
    pool = pool_of()
    blocks = [pool.alloc(4 * MIB) for _ in range(8)]
    at = blocks[2].address
    blocks[3] = None
    pool.trim()
    blocks[2] = None  # free, and before addresses without memory
    created = gpu.calls["cuMemCreate"]
    large = filled(pool.alloc(7 * MIB), 5)
    assert large.address == at and gpu.calls["cuMemCreate"] == created + 2
    assert used(gpu) == 32 * MIB and set(content(large)) == {5}
    pool.check()


@pytest.mark.parametrize("free", [2, 4])  # before and behind the addresses without memory
def test_at_the_limit_memory_comes_from_elsewhere(gpu, free):
    """Though what is free next to the place was unused longer."""
    pool = pool_of(30 * MIB)
    blocks = [pool.alloc(4 * MIB) for _ in range(7)]
    places = [block.address for block in blocks]
    blocks[3] = None
    pool.trim()
    last = pool.alloc(6 * MIB)
    assert used(gpu) == 30 * MIB and last.address > places[6]
    blocks[free] = None
    blocks[0] = None
    calls = [gpu.calls["cuMemCreate"], gpu.calls["cuMemUnmap"]]
    large = filled(pool.alloc(8 * MIB), 5)
    assert large.address == places[min(free, 3)] and used(gpu) == 30 * MIB
    assert [gpu.calls["cuMemCreate"], gpu.calls["cuMemUnmap"]] == [calls[0] + 2, calls[1] + 2]
    with pytest.raises(OutOfMemory):
        pool.alloc(4 * MIB)
    assert set(content(large)) == {5}
    pool.check()


def least_to_add(pool, nbytes):
    """Granules without memory in the best place for so many bytes, by trying every one."""
    start, unit = pool.regions[0].address, MIB // 2
    taken, bare = set(), set()
    end = 0
    for block in pool.blocks():
        first, last = (
            (block.address - start) // unit,
            -(-(block.address - start + block.nbytes) // unit),
        )
        end = max(end, last)
        bare |= set(range(first, last))
        if block.state == "live":
            taken |= set(range(first, last))
    n = -(-nbytes // unit)
    mapped = {i // 4 for i in bare}
    return min(
        len({i // 4 for i in range(x, x + n)} - mapped)
        for x in range(end + 1)
        if not taken.intersection(range(x, x + n))
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.sampled
@pytest.mark.full
def test_growth_finds_the_place_that_lacks_least(gpu, seed):
    gpu.memory.sizes = gpu.MEMORY = (16 << 30, 1 << 30)
    chosen = random.Random(seed)
    pool, live, grown = Pool(source=cuda.Device(grow=True)), [], 0
    for _ in range(300):
        if live and chosen.random() < 0.5:
            live.pop(chosen.randrange(len(live))).release()
        elif chosen.random() < 0.1:
            pool.trim(chosen.randrange(20) * MIB)
        else:
            nbytes = chosen.randrange(1, 40) * MIB // 2
            pool.trim(1 << 50)  # nothing, but what is free is merged
            least = least_to_add(pool, nbytes) if pool.regions else None
            created = gpu.calls["cuMemCreate"]
            live.append(pool.alloc(nbytes))
            created = gpu.calls["cuMemCreate"] - created
            assert least is None or created == least
            grown += created > 0
        pool.check()
    assert grown > 30


class Replayed:
    """Passes over a trace by one pool."""

    def __init__(self, gpu, trace, source):
        steps = program(trace)
        self.gpu, self.pool = gpu, Pool(source=source)
        self.steps = list(zip(steps.slots.tolist(), steps.sizes.tolist(), strict=True))
        self.blocks = [None] * steps.count
        self.live, self.most = int(steps.live().max()), 0

    def run(self):
        """How often the driver was asked for memory."""
        before, blocks = self.gpu.calls["cuMemCreate"], self.blocks
        for slot, nbytes in self.steps:
            blocks[max(slot, ~slot)] = self.pool.alloc(nbytes) if slot >= 0 else None
            self.most = max(self.most, self.gpu.memory.used[0])
        for i in range(len(blocks)):
            blocks[i] = None
        self.pool.check()
        return self.gpu.calls["cuMemCreate"] - before


@pytest.fixture
def large_gpu(gpu):
    gpu.memory.sizes = gpu.MEMORY = (16 << 30, 1 << 30)
    gpu.memory.fresh = None
    return gpu


def test_growing_sequences_take_no_more_than_they_need(large_gpu):
    in_place = Replayed(large_gpu, growing_sequences(), cuda.Device(grow=True))
    passes = [in_place.run() for _ in range(4)]
    most = in_place.most / in_place.live
    # A few places are found once: those of the last batch, before which the pool was smaller.
    assert passes[1] < 0.01 * passes[0] and passes[2:] == [0, 0]
    del in_place
    gc.collect()
    regions = Replayed(large_gpu, growing_sequences(), cuda.Device())
    regions.run()
    assert most <= 1.03 < 1.15 < regions.most / regions.live


TRACES = {
    "torch training": lambda: unpack(TRAINING),
    "log-normal": lambda: random_trace(3, "log-normal"),
}


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.full
def test_a_trace_that_is_repeated_asks_the_driver_for_nothing(large_gpu, name):
    replayed = Replayed(large_gpu, TRACES[name](), cuda.Device(grow=True))
    passes = [replayed.run() for _ in range(3)]
    assert passes[0] > 800 and passes[1:] == [0, 0]
    assert replayed.most <= 1.03 * replayed.live


@pytest.mark.parametrize("name", ["arenapy", "arenapy-class", "arenapy-grow"])
def test_a_replay_counts_what_has_memory(gpu, name):
    """Not the addresses of a range that grows."""
    of_its_own = GRANULE if name == "arenapy-grow" else 0
    heap = HEAPS[name](0)
    watch = Watch(heap, lambda: gpu.memory.used[0])
    blocks = []
    for step, nbytes in enumerate([3 * MIB, 100, 7 * MIB]):
        blocks.append(heap.take(nbytes, None))
        watch(step)
        assert heap.reserved() == watch.most == watch.most_device - of_its_own > 0


def test_a_bump_grows_and_shrinks_in_place(gpu):
    arena = Bump(MIB, cuda.Device(grow=True), 40 * MIB)
    assert used(gpu) == GRANULE
    blocks = [filled(arena.alloc(3 * MIB), i) for i in range(10)]
    (region,) = arena.regions
    assert region.nbytes == arena.capacity and used(gpu) - arena.capacity < GRANULE
    assert [block.address - region.address for block in blocks] == [3 * MIB * i for i in range(10)]
    assert [content(block)[:1] for block in blocks] == [bytes([i]) for i in range(10)]
    at = blocks[-1].address
    assert arena.grow(blocks[-1], 9 * MIB).address == at
    slowly_fill(gpu, LEGACY, blocks[-1], 7)
    blocks.pop().release()
    assert arena.trim() >= 9 * MIB and not gpu.queue
    assert used(gpu) == 28 * MIB
    arena.check()
    filled(arena.alloc(10 * MIB), 1)


def figures(arena):
    return replace(arena.stats(), metadata_bytes=0)  # which may get room


def test_a_bump_gives_back_what_lies_between_blocks(gpu):
    s = new_stream(gpu)
    arena = Bump(MIB, cuda.Device(grow=True), 60 * MIB, stream=s)
    blocks = [filled(arena.alloc(10 * MIB), i) for i in range(5)]
    at = arena.regions[0].address
    held = [blocks[0].__dlpack__(), blocks[2].__dlpack__(), blocks[4].__dlpack__()]
    kept = blocks[::2]
    del blocks
    slowly_fill(gpu, s, arena.alloc(MIB), 9)  # the stream is done before its memory goes
    arena.reset()
    assert used(gpu) == 52 * MIB
    gpu.begin_capture(s.handle_)
    before = figures(arena)
    assert arena.trim() == 0 and figures(arena) == before
    gpu.destroy_graph(graph_of(gpu, s))
    freed = arena.trim()
    assert not gpu.queue and used(gpu) == arena.capacity == 30 * MIB and freed >= 20 * MIB
    arena.check()
    gpu.fails["cuMemCreate"] = 2  # out of memory
    before = figures(arena)
    with pytest.raises(OutOfMemory):
        arena.alloc(7 * MIB)
    assert figures(arena) == before
    arena.check()
    gpu.fails.clear()
    again = filled(arena.alloc(7 * MIB), 9)
    assert again.address == at + 10 * MIB and used(gpu) == 38 * MIB
    assert [content(block)[:1] for block in kept] == [b"\0", b"\2", b"\4"]
    assert set(content(again)) == {9}
    arena.check()
    del held[2], kept[2:], again
    arena.reset()
    arena.stats(), gpu.drain()  # LEGACY, for which the capsules were made
    assert arena.trim() == 38 * MIB - arena.capacity
    assert used(gpu) == arena.capacity == 20 * MIB and arena.regions[0].nbytes == 30 * MIB
    del held, kept
    arena.reset()
    arena.stats(), gpu.drain()
    arena.trim()
    assert used(gpu) == GRANULE and arena.capacity == 1
    assert set(content(filled(arena.alloc(60 * MIB), 8))) == {8}
    arena.check()


def test_a_failure_in_the_second_hole_leaves_the_first_empty(gpu):
    arena = Bump(MIB, cuda.Device(grow=True), 60 * MIB)
    blocks = [arena.alloc(nbytes) for nbytes in (12 * MIB - 4096, 100, 14 * MIB, 100)]
    held = [blocks[1].__dlpack__(), blocks[3].__dlpack__()]
    del blocks
    arena.reset()
    arena.stats(), gpu.drain()
    assert arena.trim() >= 20 * MIB
    held.clear()
    arena.reset()
    arena.stats(), gpu.drain()
    before, of_device = figures(arena), used(gpu)
    gpu.fail_at("cuMemCreate", 2, 2)
    with pytest.raises(OutOfMemory):
        arena.alloc(50 * MIB)
    assert figures(arena) == before and used(gpu) == of_device
    arena.check()
    block = filled(arena.alloc(50 * MIB), 8)
    assert set(content(block)) == {8} and used(gpu) == 50 * MIB


def test_a_bump_keeps_its_memory_while_its_stream_is_captured(gpu):
    s = new_stream(gpu)
    arena = Bump(MIB, cuda.Device(grow=True), 40 * MIB, stream=s)
    with arena.scope():
        arena.alloc(20 * MIB)
    before = figures(arena)
    gpu.begin_capture(s.handle_)
    assert arena.trim() == 0 and figures(arena) == before
    gpu.destroy_graph(graph_of(gpu, s))
    assert arena.trim() > 0
    arena.check()


def test_threads_that_give_a_range_its_first_memory_share_the_page_of_its_end(gpu):
    pool = pool_of()
    blocks = []

    def before(name):
        if name == "cuMemAlloc" and not blocks:
            blocks.append(None)
            other = threading.Thread(target=lambda: blocks.append(pool.alloc(3 * MIB)))
            other.start()
            other.join()

    gpu.before_call = before
    blocks.append(pool.alloc(3 * MIB))
    gpu.before_call = None
    assert len(blocks) == 3 and len(pool.regions) == 1
    assert used(gpu) == pool.stats().reserved_bytes
    blocks.clear()
    pool = None
    gc.collect()
    assert gpu.memory.used[0] == 0
