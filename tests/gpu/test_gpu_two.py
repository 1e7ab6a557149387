"""On two real GPUs: copies between them, blocks that streams of both use, contexts."""

import numpy as np
import pytest
from real_gpu import Gpu, content, current_in, done, two_gpus

from arenapy import Pool, Slab, cuda

KIB, MIB = 1 << 10, 1 << 20
BLOCK = 64 * KIB
SLOW = 20  # microseconds


@pytest.fixture
def gpus():
    with two_gpus() as both:
        yield both


def current():
    from cuda.bindings import driver

    return int(done(driver.cuCtxGetCurrent()))


def test_each_has_its_own_memory(gpus):
    before = current()
    pools = [Pool(64 * MIB, cuda.Device(i)) for i in range(2)]
    blocks = [pool.alloc(MIB) for pool in pools]
    for i, block in enumerate(blocks):
        assert block.device_id == i
        assert block.__dlpack_device__() == (2, i)
        block.fill(i + 1)
    for i, block in enumerate(blocks):
        assert (content(block) == i + 1).all()
    assert current() == before
    assert [one.device_id for one in cuda.devices()] == list(range(len(cuda.devices())))


@pytest.mark.parametrize("kind", [cuda.Device, cuda.DriverPool])
def test_copies_from_one_to_the_other(gpus, kind):
    """By whichever of them can reach the other, or staged; with and without streams."""
    data = np.random.default_rng(1).integers(0, 256, MIB, np.uint8)
    sources = [kind(0), kind(1), cuda.Pinned(), cuda.Managed(0), cuda.Managed(1)]
    regions = [source.region(MIB).buffer() for source in sources]
    streams = [None, cuda.Stream(0), cuda.Stream(1)]
    for origin in regions:
        for target in regions:
            if origin is target:
                continue
            for stream in streams:
                origin.copy_from(data)
                target.fill(0)
                target.copy_from(origin, stream=stream)
                if stream is not None:
                    stream.synchronize()
                assert np.array_equal(content(target), data), (origin.kind, target.kind, stream)


def test_a_block_that_the_other_device_copies(gpus):
    """It is dropped at once, and used anew on its own device."""
    first, _ = gpus
    there = cuda.Stream(1)
    pool = Pool(2 * MIB, cuda.Device(0), 2 * MIB)
    target = cuda.Device(1).region(BLOCK).buffer()
    with Gpu(1) as second:
        for i in range(1000):
            block = pool.alloc(2 * MIB)
            with current_in(first):
                first.write_slowly(1, block.address, BLOCK, i)
                first.synchronize(1)
            second.wait(there, SLOW)
            target.copy_from(block[:BLOCK], stream=there)
            del block
            second.count_wrong(there, target.address, BLOCK, i)
            with current_in(first):
                again = pool.alloc(2 * MIB)
                first.write_slowly(1, again.address, BLOCK, ~i)
            del again
        assert second.how_many_wrong() == 0


def test_pinned_memory_serves_both(gpus):
    staging = Slab(BLOCK, 4, cuda.Pinned())
    streams = [cuda.Stream(i) for i in range(2)]
    targets = [cuda.Device(i).region(BLOCK).buffer() for i in range(2)]
    for i in range(500):
        item = staging.alloc()
        item.array(dtype="u1")[:] = i % 256
        for stream, target in zip(streams, targets, strict=True):
            target.copy_from(item, stream=stream)
        del item
        if i % 50 == 0:
            for stream, target in zip(streams, targets, strict=True):
                stream.synchronize()
                assert (content(target) == i % 256).all()


def test_a_stream_of_the_other_device_cannot_be_the_own_one(gpus):
    with pytest.raises(ValueError, match="belongs to device 1"):
        Pool(MIB, cuda.Device(0), stream=cuda.Stream(1))
