"""What a pool keeps for streams other than its own: time takes it, and so do newer streams."""

import gc

import pytest
from cuda_support import MIB, backwards, content, new_stream, slowly_fill, until

from arenapy import Pool, cuda

MANY = 120  # streams
SOURCES = {"device": cuda.Device, "driver pool": lambda: cuda.DriverPool(release_threshold=0)}
USES = {
    "own stream": lambda pool, stream: pool.alloc(4096),
    "another stream": lambda pool, stream: pool.alloc(4096, stream=stream),
    "array": lambda pool, stream: pool.empty(1000),
    "many": lambda pool, stream: pool.alloc_many([4096, 4096]),
    "thread": lambda pool, stream: pool._trim_stale(),
}


@pytest.fixture
def large(gpu):
    gpu.memory.sizes = (8 << 30, 8 << 30)
    return gpu


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("use", USES)
def test_what_streams_keep_is_given_back_in_time(gpu, use, source):
    """Whoever uses the pool, on whatever stream."""
    pool, streams = Pool(None, SOURCES[source](), trim_after=0.01), [cuda.Stream() for _ in "abc"]
    kept = pool.alloc(MIB, stream=streams[0])
    slowly_fill(gpu, streams[0].handle, kept, 7)
    for stream in streams:
        block = pool.alloc(4 * MIB, stream=stream)
        slowly_fill(gpu, stream.handle, block, 1)
    del block
    before, other = pool.stats().reserved_bytes, cuda.Stream()
    assert before >= 13 * MIB
    gpu.drain()

    def given_back():
        USES[use](pool, other)
        gpu.drain()
        return pool.stats().reserved_bytes <= 8 * MIB  # with what `use` takes

    until(given_back)
    assert set(content(kept)) == {7}
    assert pool.stats().active_allocations == 1
    pool.check()


def test_a_closed_stream_gets_nothing(gpu):
    pool, stream = Pool(8 * MIB, cuda.Device()), cuda.Stream()
    block = pool.alloc(MIB, stream=stream)
    stream.close()
    for _ in range(2):
        with pytest.raises(ValueError, match="of device 0, closed> is closed; make another one"):
            pool.alloc(MIB, stream=stream)
    assert pool.stats().active_allocations == 1
    block.release()
    pool.check()


def test_a_thread_gives_it_back(gpu):
    pool = Pool(None, cuda.Device(), trim_after=0.01, trim_thread=True)
    for _ in range(3):
        pool.alloc(4 * MIB, stream=cuda.Stream()).release()

    def given_back():
        gpu.drain()
        in_a_call = sum(map(len, gpu.stacks.values())) > 1  # the thread, beside this one
        return gpu.memory.used[0] == 0 and not in_a_call

    until(given_back)
    assert pool.stats().reserved_bytes == 0


@pytest.mark.parametrize("what", ["at work", "live"])
def test_what_is_in_use_is_not(gpu, what):
    pool, stream = Pool(None, cuda.Device(), trim_after=0), new_stream(gpu)
    block = pool.alloc(4 * MIB, stream=stream)
    slowly_fill(gpu, stream, block, 1)
    if what == "at work":
        del block
    for _ in range(3):
        pool._trim_stale()
        pool.alloc(4096, stream=cuda.Stream()).release()
    pool._trim_stale()
    assert gpu.memory.used[0] >= 4 * MIB
    backwards(gpu)
    assert not gpu.errors
    if what == "live":
        assert set(content(block)) == {1}
        del block

    def given_back():
        pool._trim_stale()
        gpu.drain()
        return pool.stats().reserved_bytes == 0

    until(given_back)


def figures_add_up(pool):
    stats = pool.stats()
    assert stats.pool_hits + stats.pool_misses == stats.total_allocations
    assert stats.allocated_bytes + stats.pending_bytes + stats.idle_bytes == stats.reserved_bytes
    for name in ("total_allocations", "pool_hits", "pool_misses", "splits", "active_allocations"):
        assert sum(getattr(one, name) for one in stats.classes) == getattr(stats, name)
    return stats


@pytest.mark.parametrize("source", SOURCES)
def test_streams_that_come_and_go(large, source):
    """By the hundred: a pool keeps a few of them, and not what each of them took."""
    pool, seen = Pool(None, SOURCES[source]()), []
    kept, allocated, nbytes, totals = pool.alloc(5000), 1, 5000, [0]
    before = pool.stats()
    for i in range(MANY):
        stream = cuda.Stream()
        block = pool.alloc(40_000 + i, stream=stream)
        slowly_fill(large, stream.handle, block, i % 250)
        large.step(i)
        if i % 10 == 0:
            backwards(large)
        if i % 50 == 0:
            seen.append((block, i % 250))
        allocated, nbytes = allocated + 1, nbytes + 40_000 + i
        del block, stream
        if i % 8 == 0:
            total = figures_add_up(pool).total_allocations
            assert total >= allocated and total >= totals[-1], "some were forgotten"
            totals.append(total)
    backwards(large)
    gc.collect()
    for block, byte in seen:
        assert set(content(block)) == {byte}
    alive = large.calls["cuStreamCreate"] - large.calls["cuStreamDestroy"]
    stats = pool.stats()
    assert alive < MANY * 2 / 3, "streams that nobody has are kept"
    assert stats.metadata_bytes < before.metadata_bytes * MANY * 2 / 3
    assert stats.reserved_bytes < 2 * MIB * MANY * 2 / 3
    assert pool._tally()[0] >= allocated and pool._tally()[1] >= nbytes
    pool.check()
    seen.clear()
    del block, kept


def test_streams_that_stay_keep_what_they_have(large):
    """As many as there are: a hit of each asks for nothing but whether it captures."""
    pool, streams = Pool(None, cuda.Device()), [cuda.Stream() for _ in range(50)]
    blocks = [pool.alloc(4096, stream=stream) for stream in streams]
    where = [block.address for block in blocks]
    blocks.clear()
    before = large.calls.copy()
    for _ in range(3):
        for stream, address in zip(streams, where, strict=True):
            assert pool.alloc(4096, stream=stream).address == address
    assert set(large.calls - before) == {"cuStreamIsCapturing"}
