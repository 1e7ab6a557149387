"""What a pool keeps for streams other than its own: time takes it, and so do newer streams."""

import contextlib
import gc
import random
import threading
import time

import pytest
from capsules import Array
from cuda_support import (
    MIB,
    PER_THREAD,
    backwards,
    content,
    graph_of,
    new_stream,
    samples,
    slowly_fill,
    until,
)
from helpers import in_threads
from simulated_gpu import RELAXED

from arenapy import Pool, cuda

KIB = 1 << 10
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


@pytest.mark.parametrize("current", [True, False])
def test_a_hit_on_a_threads_default_stream_costs_no_event(gpu, current):
    """A default stream is that of the current context, so the pool's is made current if need be."""
    pool = Pool(16 * MIB, cuda.Device())
    address = pool.alloc(5000, stream=PER_THREAD).address
    asked = {"cuCtxGetCurrent": 10, "cuStreamIsCapturing": 10}
    with contextlib.nullcontext() if current else gpu.on(1):
        before = gpu.calls.copy()
        for _ in range(10):
            assert pool.alloc(5000, stream=PER_THREAD).address == address
        made = {} if current else {"cuCtxPushCurrent": 10, "cuCtxPopCurrent": 10}
        assert gpu.calls - before == asked | made


def test_a_block_that_another_stream_has_used_is_the_streams_again_once_that_is_done(gpu):
    pool, s, other = Pool(16 * MIB, cuda.Device()), new_stream(gpu), new_stream(gpu)
    block = pool.alloc(MIB, stream=s)
    at = block.address
    block.record_stream(other)
    slowly_fill(gpu, other, block, 1)
    del block
    idle = pool.alloc(MIB, stream=s)
    assert idle.address != at, "the other stream is at work"
    gpu.drain()
    again = pool.alloc(MIB, stream=s)
    assert again.address == at
    again.record_stream(other)
    slowly_fill(gpu, other, again, 2)
    place = idle.address
    del again, idle
    gpu.drain()
    idle = pool.alloc(MIB, stream=s)  # from what was idle, though more is so by now
    assert idle.address == place
    del idle
    pool.trim()
    assert pool.stats().active_allocations == pool.stats().reserved_bytes == 0


@pytest.mark.parametrize("heir", ["thread", "stream", "own stream"])
@pytest.mark.parametrize("alive", [False, True])
def test_what_a_threads_default_stream_keeps_is_others_after_its_work(gpu, heir, alive):
    """Whether the thread has ended or not: there is no other memory."""
    pool, first, ended = Pool(2 * MIB, cuda.Device(), 2 * MIB), threading.Event(), threading.Event()
    seen = []

    def work():
        try:
            with gpu.on(0):
                block = pool.alloc(2 * MIB, stream=PER_THREAD)
                slowly_fill(gpu, PER_THREAD, block, 1)
                seen.extend([samples(gpu, PER_THREAD, block), block.address])
                del block
        finally:
            first.set()
        if alive:
            ended.wait()

    thread = threading.Thread(target=work)
    thread.start()
    first.wait()
    if not alive:
        thread.join()

    def take():
        with gpu.on(0):
            other = {"thread": PER_THREAD, "stream": new_stream(gpu), "own stream": 1}[heir]
            block = pool.alloc(2 * MIB, stream=other)
            assert block.address == seen[1]
            slowly_fill(gpu, other, block, 2)
        return block

    try:
        (block,) = in_threads(take)
    finally:
        ended.set()
        thread.join()
    backwards(gpu)
    assert seen[0] == [{1}] and set(content(block)) == {2}
    del block
    for _ in range(3):  # the last stream's work, and an event after it
        gpu.drain()
        pool.trim()
    assert pool.stats().reserved_bytes == 0
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


def test_seldom_requests_give_it_back(gpu):
    pool = Pool(None, cuda.Device(), trim_after=0.05)
    pool.alloc(4 * MIB, stream=cuda.Stream()).release()
    gpu.drain()
    for _ in range(4):
        time.sleep(0.1)
        pool.alloc(256).release()
    assert pool.stats().reserved_bytes <= 2 * MIB


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


# ---- a stream for each request

PROGRESS = {  # requests, and what the device does after each
    "all done": (3000, lambda gpu, i: gpu.drain()),
    "a few behind": (500, lambda gpu, i: [gpu.step(0) for _ in range(2)] if i > 20 else None),
    "nothing done": (200, lambda gpu, i: None),
}


@pytest.mark.parametrize("progress", PROGRESS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.sampled
def test_a_stream_for_each_request(large, source, progress):
    """However many: memory, bookkeeping, streams and calls of the driver stay few."""
    pool = Pool(4 << 30, SOURCES[source]())
    seen, most = [], 0
    requests, go_on = PROGRESS[progress]
    for i in range(requests):
        if i == requests // 2:
            before = large.calls.copy()
        stream = cuda.Stream()
        block = pool.alloc(MIB, stream=stream)
        if i % 10 == 0:  # each byte that a sample sees is of its own request
            slowly_fill(large, stream.handle, block, i // 10 % 250)
            seen.append((i // 10 % 250, samples(large, stream.handle, block)))
        else:
            block.fill(251, stream=stream)
        del block, stream
        go_on(large, i)
        if i % 100 == 0:
            most = max(most, pool.stats().reserved_bytes)
    n = requests - requests // 2
    calls = {name: count / n for name, count in (large.calls - before).items()}
    assert calls.get("cuEventRecord", 0) < 2.1, "one of the pool's stream, one of one that is gone"
    assert calls.get("cuStreamQuery", 0) < 5.1
    assert sum(calls.get(name, 0) for name in ("cuMemAlloc", "cuMemAllocFromPoolAsync")) < 0.05
    stats = pool.stats()
    assert max(most, stats.reserved_bytes) <= 64 * MIB
    assert stats.metadata_bytes <= MIB
    assert large.calls["cuStreamCreate"] - large.calls["cuStreamDestroy"] <= 50
    pool.check()
    backwards(large)
    assert all(found == [{byte}] for byte, found in seen)
    assert not large.errors


def test_a_stream_waits_for_those_that_are_gone(large):
    """Whose blocks it gets, and whose work is not done: else one of them overwrites it."""
    pool, seen = Pool(None, cuda.Device()), []
    for i in range(200):
        stream = cuda.Stream()
        block = pool.alloc(MIB, stream=stream)
        slowly_fill(large, stream.handle, block, i)
        seen.append((i, samples(large, stream.handle, block)))
        del block, stream
    assert pool.stats().reserved_bytes <= 64 * MIB, "nobody has waited"
    order = random.Random(1)
    while large.step(order.randrange(1000)):
        pass
    assert all(found == [{byte}] for byte, found in seen)
    assert not large.errors


def test_results_that_outlive_their_streams(large):
    pool, held = Pool(None, cuda.Device()), []
    before = pool.stats()
    for i in range(500):
        stream = cuda.Stream()
        work, result = pool.alloc(MIB, stream=stream), pool.alloc(4096, stream=stream)
        slowly_fill(large, stream.handle, work, i % 250)
        slowly_fill(large, stream.handle, result, i % 250)
        held.append(result)
        del work, result, stream
        large.drain()
    stats = figures_add_up(pool)
    assert stats.reserved_bytes <= 64 * MIB
    assert stats.metadata_bytes - before.metadata_bytes <= 500 * 4 * KIB
    assert all(set(content(result)) == {i % 250} for i, result in enumerate(held))
    held.clear()
    pool.check()
    pool.trim()
    assert pool.stats().reserved_bytes == 0
    pool.alloc(4096, stream=cuda.Stream())
    gc.collect()
    assert large.calls["cuStreamCreate"] - large.calls["cuStreamDestroy"] <= 20


@pytest.mark.parametrize(("nbytes", "most"), [(256, 4), (4096, 8), (40_000, 24)])
def test_streams_that_stay_share_regions(large, nbytes, most):
    """200 of them, which had 2 MiB each once; then what each has is its own."""
    pool, streams = Pool(None, cuda.Device()), [cuda.Stream() for _ in range(200)]
    where = []
    for i, stream in enumerate(streams):
        block = pool.alloc(nbytes, stream=stream)
        where.append(block.address)
        slowly_fill(large, stream.handle, block, i)
        del block
    assert pool.stats().reserved_bytes <= most * MIB
    assert len(set(where)) == 200
    for stream, address in zip(streams, where, strict=True):
        assert pool.alloc(nbytes, stream=stream).address == address
    pool.check()
    backwards(large)
    assert not large.errors


def test_what_a_stream_costs(large):
    """A stream that has used one small block, and one that has given everything back."""
    pool, streams = Pool(None, cuda.Device()), [cuda.Stream() for _ in range(100)]
    before = pool.stats().metadata_bytes
    for stream in streams:
        pool.alloc(256, stream=stream)
    assert (pool.stats().metadata_bytes - before) / 100 <= 4 * KIB
    pool.trim()
    assert (pool.stats().metadata_bytes - before) / 100 <= 4 * KIB


def test_what_a_stream_does_not_use_serves_others(large):
    """When the pool would grow. It may keep more if it comes back for it."""
    pool = Pool(None, cuda.Device())
    busy, quiet = cuda.Stream(), cuda.Stream()
    block = pool.alloc(48 * MIB, stream=quiet)
    slowly_fill(large, quiet.handle, block, 1)
    del block
    reserved = pool.stats().reserved_bytes
    other = pool.alloc(40 * MIB)  # `quiet` was at work, and it has only just been asked
    assert pool.stats().reserved_bytes > reserved
    reserved = pool.stats().reserved_bytes
    backwards(large)
    third = pool.alloc(44 * MIB, stream=busy)
    assert pool.stats().reserved_bytes == reserved, "what is done was not taken"
    del other, third
    pool.trim()
    for _ in range(4):
        for stream in (busy, quiet):
            pool.alloc(48 * MIB, stream=stream)
            backwards(large)
    before = large.calls.copy()
    for stream in (busy, quiet):
        pool.alloc(48 * MIB, stream=stream)
    assert set(large.calls - before) == {"cuStreamIsCapturing"}, "they still rob each other"
    pool.check()


def test_what_a_stream_has_under_work_serves_nobody(large):
    """Its blocks stay its own until it is done, however short memory is; then it is waited for."""
    pool, stream, other = Pool(8 * MIB, cuda.Device()), cuda.Stream(), cuda.Stream()
    block = pool.alloc(6 * MIB, stream=stream)
    slowly_fill(large, stream.handle, block, 1)
    del block
    block = pool.alloc(6 * MIB, stream=other)
    slowly_fill(large, other.handle, block, 2)
    order = random.Random(1)
    while large.step(order.randrange(1000)):
        pass
    assert set(content(block)) == {2}, "the first one wrote last"
    assert not large.errors
    pool.check()


# ---- what is idle while a stream is captured, asked or gone


def trim(pool):
    pool.trim()


def need_it(pool):
    pool.alloc(6 * MIB, stream=cuda.Stream())


def let_time_pass(pool):
    for _ in range(20):
        pool._trim_stale()


WAYS = {"trim": (trim, None), "limit": (need_it, None), "trim_after": (let_time_pass, 0)}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_idle_is_not_the_graphs(gpu, way):
    """Taken from a stream that is captured, it is free after the capture, and not only after the
    graph."""
    take, trim_after = WAYS[way]
    pool = Pool(8 * MIB, cuda.Device(), trim_after=trim_after, stream=cuda.Stream())
    stream = cuda.Stream()
    graphs = []
    for _ in range(3):
        pool.alloc(6 * MIB, stream=stream).release()
        gpu.drain()
        gpu.begin_capture(stream.handle, RELAXED)
        take(pool)
        graphs.append(graph_of(gpu, stream.handle))
        pool.stats(), gpu.drain()
        assert pool.stats().pending_bytes == 0
    pool.check()
    for graph in graphs:
        gpu.destroy_graph(graph)


def test_what_is_idle_goes_with_its_pool(gpu):
    """Also in a capture of the stream that has it: after that, whatever becomes of the graph."""
    pool, stream, other = Pool(None, cuda.Device()), cuda.Stream(), Pool(None, cuda.Device())
    pool.alloc(6 * MIB, stream=stream).release()
    gpu.begin_capture(stream.handle, RELAXED)
    del pool
    graph = graph_of(gpu, stream.handle)
    for _ in range(2):
        other.stats(), gpu.drain()
    assert gpu.memory.used[0] == 0
    gpu.destroy_graph(graph)


@pytest.mark.parametrize("last", ["pool", "buffer"])
def test_what_a_graph_uses_of_a_streams_memory_outlives_the_pool(gpu, last):
    pool, stream, other = Pool(None, cuda.Device()), cuda.Stream(), cuda.Stream()
    kept, block = pool.alloc(100), pool.alloc(6 * MIB, stream=stream)
    slowly_fill(gpu, stream.handle, block, 7)
    gpu.drain()
    gpu.begin_capture(stream.handle, RELAXED)
    block.record_stream(stream)
    seen = samples(gpu, stream.handle, block)
    graph = graph_of(gpu, stream.handle)
    slowly_fill(gpu, other.handle, block, 7)
    block.record_stream(other)
    del block
    if last == "pool":
        del kept, pool
    else:
        del pool, kept
    looks = Pool(None, cuda.Device())
    looks.stats(), gpu.drain(), looks.stats()
    assert gpu.memory.used[0] >= 6 * MIB
    gpu.replay(graph, stream.handle)
    gpu.drain()
    assert seen == [{7}]
    gpu.destroy_graph(graph)
    looks.stats()
    assert gpu.memory.used[0] == 0


@pytest.mark.parametrize("point", range(1, 16))
@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("whose", ["its own", "another"])
@pytest.mark.full
def test_memory_is_there_while_another_thread_asks(gpu, whose, busy, point):
    """What a thread takes from a stream to ask for it is in no list: who needs it waits."""
    pool, stream = Pool(8 * MIB, cuda.Device(), stream=cuda.Stream()), cuda.Stream()
    block = pool.alloc(6 * MIB, stream=stream)
    if busy:
        slowly_fill(gpu, stream.handle, block, 1)
    del block
    user = stream if whose == "its own" else cuda.Stream()
    errors, left, main = [], [point], threading.get_ident()

    def elsewhere():
        try:
            with gpu.on(0):
                pool.alloc(6 * MIB, stream=user)
        except BaseException as error:
            errors.append(error)

    def interrupt(name):
        left[0] -= threading.get_ident() == main
        if left[0] == 0 and not threads[0].ident:
            threads[0].start()
            threads[0].join(0.02)

    threads = [threading.Thread(target=elsewhere)]
    gpu.before_call = interrupt
    pool.trim()
    gpu.before_call = None
    if threads[0].ident:
        threads[0].join()
    assert not errors
    pool.check()


def test_a_new_stream_waits_for_nobody_on_the_host(gpu):
    """Though streams that are gone copy arrays of other libraries, which are kept meanwhile."""
    gpu.memory.sizes = (8 << 30, 8 << 30)
    pool, far = Pool(None, cuda.Device()), cuda.Device().region(MIB).buffer()
    seen = []
    for i in range(40):
        stream = cuda.Stream()
        block = pool.alloc(MIB, stream=stream)
        block.copy_from(Array(far.address, (MIB,)), stream=stream)
        slowly_fill(gpu, stream.handle, block, i)
        seen.append((i, samples(gpu, stream.handle, block)))
        del block, stream
    assert not {"cuEventSynchronize", "cuStreamSynchronize"} & set(gpu.calls)
    assert pool.stats().reserved_bytes <= 32 * MIB, "nobody has waited"
    backwards(gpu)
    assert all(found == [{byte}] for byte, found in seen)


def test_a_region_of_what_is_idle_is_closed_once_the_pool_is_trimmed(gpu):
    pool, stream = Pool(2 * MIB, cuda.Device(), 2 * MIB), cuda.Stream()
    pool.alloc(4096, stream=stream).release()
    (region,) = pool.regions
    with pytest.raises(BufferError, match=r"keeps some for streams.*trim\(\) the Pool"):
        region.close()
    gpu.drain()
    pool.trim()
    region.close()
