"""On a real GPU: what a kernel or a copy is at work on is nobody else's, whoever dropped it.

Each test has a twin with the safety disabled, in which arenapy is told of no stream: it has to
find corruption, or the test could not fail.
"""

import gc
import itertools

import numpy as np
import pytest
from helpers import poke
from real_gpu import done, judge

from arenapy import Bump, OutOfMemory, Pool, Slab, cuda

KIB, MIB = 1 << 10, 1 << 20
ROUNDS = 10_000
BLOCK = 64 * KIB
SLOW = 20  # microseconds that a kernel waits before it writes

SOURCES = {"device": cuda.Device, "driver pool": cuda.DriverPool}
EVERY_SOURCE = {**SOURCES, "pinned": cuda.Pinned, "managed": cuda.Managed}
#: Of one or two blocks, so that a stream gets what another one has just let go.
ALLOCATORS = {
    "pool": lambda source: Pool(2 * MIB, source, 2 * MIB),
    "slab": lambda source: Slab(BLOCK, 2, source),
    "bump": lambda source: Bump(2 * BLOCK, source),
}


def take(allocator, stream, safe):
    """A block for a stream, of which the allocator is told or not."""
    if isinstance(allocator, Bump):
        block = allocator.alloc(BLOCK, stream=stream if safe else None)
    elif isinstance(allocator, Pool):
        block = allocator.alloc(2 * MIB, stream=stream if safe else None)
    else:
        block = allocator.alloc(stream=stream if safe else None)
    return block


def rounds(gpu, allocator, safe, n, streams):
    """Write slowly, drop, let another stream have it; how many words were wrong."""
    for i, stream in enumerate(itertools.islice(itertools.cycle(streams), n)):
        block = take(allocator, stream, safe)
        address = block.address
        gpu.write_slowly(stream, address, BLOCK, i, SLOW if i % 2 else 0)
        gpu.count_wrong(stream, address, BLOCK, i)
        if isinstance(allocator, Bump):
            block.release(stream if safe else None)
        del block
    return gpu.how_many_wrong()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", ALLOCATORS)
def test_a_block_dropped_under_a_kernel_is_not_overwritten(gpu, name, source):
    streams = [cuda.Stream(), cuda.Stream(), gpu.stream(), 1]
    allocator = ALLOCATORS[name](SOURCES[source]())
    assert rounds(gpu, allocator, True, ROUNDS, streams) == 0
    allocator.check()
    allocator.stats(), gpu.synchronize()  # of the legacy stream an event tells
    assert allocator.stats().pending_bytes == 0


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", ALLOCATORS)
def test_without_the_safety_it_is_overwritten(gpu, name, source):
    streams = [cuda.Stream(), cuda.Stream(), gpu.stream(), 1]
    assert rounds(gpu, ALLOCATORS[name](SOURCES[source]()), False, 1000, streams) > 0


def write_at_once(gpu, source, address, value):
    """As the host does where it can, else by the stream that everybody's is without one."""
    if source in ("pinned", "managed"):
        poke(address, BLOCK, value)
    else:
        gpu.write_slowly(1, address, BLOCK, value * 0x01010101)
        gpu.synchronize(1)


@pytest.mark.parametrize("source", EVERY_SOURCE)
def test_a_stream_that_was_recorded(gpu, source):
    """A block of the allocator's own stream, or nobody's, that a kernel of another one reads."""
    work = cuda.Stream()
    allocator = Pool(2 * MIB, EVERY_SOURCE[source](), 2 * MIB)
    for i in range(2000):
        block = allocator.alloc(2 * MIB)
        address = block.address
        write_at_once(gpu, source, address, i % 256)
        gpu.write_slowly(work, address + BLOCK, BLOCK, i, SLOW)  # which takes its time
        gpu.count_wrong(work, address, BLOCK, i % 256 * 0x01010101)
        gpu.count_wrong(work, address + BLOCK, BLOCK, i)
        block.record_stream(work)
        del block
    assert gpu.how_many_wrong() == 0


@pytest.mark.parametrize("source", EVERY_SOURCE)
def test_what_was_not_recorded_is_overwritten(gpu, source):
    work = cuda.Stream()
    allocator = Pool(2 * MIB, EVERY_SOURCE[source](), 2 * MIB)
    for i in range(20):
        block = allocator.alloc(2 * MIB)
        address = block.address
        write_at_once(gpu, source, address, i)
        gpu.hold(work)
        gpu.count_wrong(work, address, BLOCK, i * 0x01010101)
        del block
        block = allocator.alloc(2 * MIB)
        assert block.address == address
        write_at_once(gpu, source, address, 255 - i)
        gpu.let_go()
        gpu.synchronize(work)
        del block
    assert gpu.how_many_wrong() == 20 * BLOCK // 4


def test_a_pinned_item_refilled_by_the_processor_at_once(gpu):
    """It is dropped during its copy to the device."""
    stream = cuda.Stream()
    staging = Slab(BLOCK, 2, cuda.Pinned())
    target = cuda.Device().region(BLOCK).buffer()
    for i in range(ROUNDS):
        item = staging.alloc()
        poke(item.address, BLOCK, i % 256)
        gpu.wait(stream, SLOW)  # the copy starts late
        target.copy_from(item, stream=stream)
        gpu.count_wrong(stream, target.address, BLOCK, i % 256 * 0x01010101)
        del item
    assert gpu.how_many_wrong() == 0


def test_a_pinned_item_of_whose_copy_nobody_was_told_is_refilled_too_early(gpu):
    stream = cuda.Stream()
    staging = Slab(BLOCK, 1, cuda.Pinned())
    target = cuda.Device().region(BLOCK).buffer()
    for i in range(20):
        item = staging.alloc()
        poke(item.address, BLOCK, i)
        gpu.hold(stream)
        done(gpu.driver.cuMemcpyHtoDAsync(target.address, item.address, BLOCK, stream.handle))
        gpu.count_wrong(stream, target.address, BLOCK, i * 0x01010101)
        del item
        item = staging.alloc()
        poke(item.address, BLOCK, 255 - i)
        gpu.let_go()
        gpu.synchronize(stream)
        del item
    assert gpu.how_many_wrong() == 20 * BLOCK // 4


@pytest.mark.parametrize("safe", [True, False])
def test_a_pinned_item_filled_by_the_device_and_dropped(gpu, safe):
    """What the next one writes there is not overwritten by the copy that was under way."""
    stream = cuda.Stream()
    staging = Slab(BLOCK, 1, cuda.Pinned())
    origin = cuda.Device().region(BLOCK).buffer()
    origin.fill(7)
    overwritten = 0
    for _ in range(1000 if safe else 20):
        item = staging.alloc()
        if safe:
            gpu.wait(stream, 10 * SLOW)
            origin.copy_to(item, stream=stream)
        else:
            gpu.hold(stream)
            done(gpu.driver.cuMemcpyDtoHAsync(item.address, origin.address, BLOCK, stream.handle))
        del item
        item = staging.alloc()
        array = item.array(dtype="u1")
        array[:] = 9
        if not safe:
            gpu.let_go()
        gpu.synchronize()
        overwritten += not (array == 9).all()
        del array, item
        gc.collect()
    assert overwritten == (0 if safe else 20)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("safe", [True, False])
def test_neighbours_freed_on_different_streams_and_merged(gpu, source, safe):
    one, two, three = cuda.Stream(), cuda.Stream(), cuda.Stream()
    pool = Pool(2 * MIB, SOURCES[source](), 2 * MIB)
    for i in range(2000):
        halves = [pool.alloc(MIB, stream=one if safe else None) for _ in range(2)]
        low, high = sorted(half.address for half in halves)
        assert high == low + MIB
        if safe:
            halves[1].record_stream(two)
            two.wait(one)  # whose the bytes are: it has waited for who had them before
        for stream, half in zip((one, two), halves, strict=True):
            address = half.address
            gpu.write_slowly(stream, address, BLOCK, i, SLOW)
            gpu.count_wrong(stream, address, BLOCK, i)
        del half, halves
        whole = pool.alloc(2 * MIB, stream=three if safe else None)
        assert whole.address == low
        for address in (low, high):
            gpu.write_slowly(three, address, BLOCK, ~i)
        gpu.wait(three, 2 * SLOW)
        for address in (low, high):
            gpu.count_wrong(three, address, BLOCK, ~i)
        del whole
    judge(gpu, safe)


@pytest.mark.parametrize("name", ALLOCATORS)
@pytest.mark.parametrize("how", ["handle", "object", "own", "cuda.core"])
def test_a_stream_that_is_destroyed_before_its_work_is_done(gpu, name, how):
    """The object may tell: by then it has another handle, or none."""

    class Wrapped:
        def __init__(self):
            self.handle = gpu.stream()

        def __cuda_stream__(self):
            return 0, self.handle

        def close(self):
            gpu.driver.cuStreamDestroy(self.handle)
            self.handle = None

    def make():
        if how == "cuda.core":
            core = pytest.importorskip("cuda.core")
            device = core.Device(0)
            device.set_current()
            return device.create_stream()
        return {"handle": gpu.stream, "object": Wrapped, "own": cuda.Stream}[how]()

    other = cuda.Stream()
    allocator = ALLOCATORS[name](cuda.Device())
    for i in range(300):
        stream = make()
        block = take(allocator, stream, True)
        address = block.address
        gpu.write_slowly(stream, address, BLOCK, i, 5 * SLOW)
        gpu.count_wrong(stream, address, BLOCK, i)
        block.release()
        del block
        if how == "handle":
            gpu.driver.cuStreamDestroy(stream)
        else:
            stream.close()
        block = take(allocator, other, True)
        address = block.address
        gpu.write_slowly(other, address, BLOCK, ~i)
        gpu.count_wrong(other, address, BLOCK, ~i)
        block.release()
        del block
    assert gpu.how_many_wrong() == 0
    allocator.check()


@pytest.mark.parametrize("source", EVERY_SOURCE)
def test_frames_of_a_bump_that_a_stream_is_at_work_on(gpu, source):
    """`reset(stream=)`: what is in the frame is used by kernels of which nothing else was told."""
    arena = Bump(2 * BLOCK, EVERY_SOURCE[source]())
    streams = itertools.cycle([cuda.Stream(), cuda.Stream(), gpu.stream()])
    for i, stream in enumerate(itertools.islice(streams, 3000)):
        block = arena.alloc(BLOCK, stream=stream)
        gpu.write_slowly(stream, block.address, BLOCK, i, SLOW)
        gpu.count_wrong(stream, block.address, BLOCK, i)
        arena.reset(stream=stream)
    assert gpu.how_many_wrong() == 0
    arena.check()


def test_random_programs(gpu):
    """Many blocks and streams; each block holds its pattern as long as it lives."""
    rng = np.random.default_rng(20)
    streams = [cuda.Stream() for _ in range(3)] + [gpu.stream(), 1]
    pool = Pool(16 * MIB, cuda.Device())
    live = []
    for i in range(20_000):
        stream = streams[rng.integers(len(streams))]
        if live and rng.random() < 0.5:
            block, value, nbytes, its = live.pop(rng.integers(len(live)))
            gpu.count_wrong(its, block.address, nbytes, value)
            if rng.random() < 0.5:
                block.record_stream(its)
            else:
                block.release(its)
            block = None
            continue
        nbytes = int(2 ** rng.uniform(8, 20)) // 4 * 4
        try:
            block = pool.alloc(nbytes, stream=stream)
        except OutOfMemory:
            live.clear()
            continue
        gpu.write_slowly(stream, block.address, nbytes, i, SLOW if rng.random() < 0.3 else 0)
        live.append((block, i, nbytes, stream))
        if i % 500 == 0:
            pool.check()
    block = None
    live.clear()
    assert gpu.how_many_wrong() == 0
    pool.check()
    pool.stats(), gpu.synchronize()
    assert pool.stats().pending_bytes == 0
