"""On a real GPU: streams that come and go, and many that stay. Twins of tests/cuda's."""

import gc

import pytest
from real_gpu import Gpu, content, need_gpu

from arenapy import Pool, cuda

KIB, MIB = 1 << 10, 1 << 20
REQUESTS = 3000
SOURCES = {"device": cuda.Device, "driver pool": cuda.DriverPool}


@pytest.fixture(scope="module")
def gpu():
    need_gpu()
    with Gpu() as one:
        yield one


@pytest.mark.parametrize("source", SOURCES)
def test_a_stream_for_each_request(gpu, source):
    """Each writes its block, reads it and is gone, with whatever is still at work."""
    pool, most = Pool(4 << 30, SOURCES[source]()), 0
    gpu.forget_wrong()
    for i in range(REQUESTS):
        stream = cuda.Stream()
        block = pool.alloc(MIB, stream=stream)
        gpu.write_slowly(stream, block.address, block.nbytes, i)
        gpu.count_wrong(stream, block.address, block.nbytes, i)
        del block, stream
        if i % 100 == 0:
            most = max(most, pool.stats().reserved_bytes)
    assert gpu.how_many_wrong() == 0
    stats = pool.stats()
    assert max(most, stats.reserved_bytes) <= 64 * MIB
    assert stats.metadata_bytes <= MIB
    pool.check()


def test_results_that_outlive_their_streams(gpu):
    pool, held = Pool(None, cuda.Device()), []
    for i in range(500):
        stream = cuda.Stream()
        work, result = pool.alloc(MIB, stream=stream), pool.alloc(4096, stream=stream)
        work.fill(i % 250, stream=stream)
        result.fill(i % 250, stream=stream)
        held.append(result)
        del work, result, stream
    gpu.synchronize()
    assert pool.stats().reserved_bytes <= 64 * MIB
    assert all((content(result) == i % 250).all() for i, result in enumerate(held))
    held.clear()
    pool.trim()
    gpu.synchronize()
    pool.trim()
    gc.collect()
    assert pool.stats().reserved_bytes == 0
    pool.check()


@pytest.mark.parametrize(("nbytes", "most"), [(256, 4), (4096, 8), (40_000, 24)])
def test_streams_that_stay_share_regions(gpu, nbytes, most):
    pool, streams = Pool(None, cuda.Device()), [cuda.Stream() for _ in range(200)]
    for _ in range(3):
        for i, stream in enumerate(streams):
            block = pool.alloc(nbytes, stream=stream)
            block.fill(i, stream=stream)
            del block
    gpu.synchronize()
    assert pool.stats().reserved_bytes <= most * MIB
    pool.check()
