"""When memory of CUDA is used again: streams, events, lanes, captures. On the simulated driver."""

import gc
import itertools
import sys
import weakref

import pytest
from cuda_support import (
    HOST_VISIBLE,
    LEGACY,
    MIB,
    PER_THREAD,
    SOURCES,
    content,
    new_stream,
    only_one,
    slowly_fill,
    take,
)
from helpers import in_threads
from stream_wrappers import Protocol

from arenapy import Bump, Pool, Slab, cuda

# The own stream ------------------------------------------------------------------------------


def test_the_own_stream_gets_its_blocks_back_at_once(gpu, reusing):
    b = take(reusing)
    address = b.address
    slowly_fill(gpu, LEGACY, b, 1)
    calls = sum(gpu.calls.values())
    del b
    again = take(reusing)
    assert again.address == address
    assert sum(gpu.calls.values()) == calls, "the driver was asked"
    assert reusing.stats().pending_bytes == 0


def test_another_stream_of_an_allocator(gpu):
    s = new_stream(gpu)
    pool = Pool(2 * MIB, cuda.Device(), stream=s)
    b = pool.alloc(MIB)
    slowly_fill(gpu, s, b, 1)
    del b
    assert pool.alloc(MIB, stream=s).nbytes == MIB
    assert pool.stats().pending_bytes == 0
    b = pool.alloc(4096)  # a small part of all: no event is recorded at once
    b.record_stream(LEGACY)
    del b
    pool.stats(), gpu.drain()
    assert pool.stats().pending_bytes == 0, "nothing was queued there"


def test_a_region_is_nobodys_else_after_its_allocator(gpu):
    """Nobody knows any more which stream may be at work there."""
    bump = Bump(MIB, cuda.Device(), stream=new_stream(gpu))
    (region,) = bump.regions
    del bump
    gc.collect()
    with pytest.raises(ValueError, match="a stream may still use it"):
        region.buffer()


@pytest.mark.parametrize("name", HOST_VISIBLE)
@pytest.mark.parametrize("allocator", ["slab", "pool"])
def test_memory_that_the_host_sees_has_no_own_stream(gpu, name, allocator):
    one = only_one(allocator, SOURCES[name]())
    b = take(one)
    b.record_stream(LEGACY)
    slowly_fill(gpu, LEGACY, b, 1)
    del b
    assert one.stats().pending_bytes
    b = take(one)  # waits for the stream, as there is nothing else
    assert content(b)[:1] == b"\1" and one.stats().pending_bytes == 0
    with_stream = SOURCES[name]()
    one = only_one(allocator, with_stream)
    del b
    b = one.alloc(100, stream=LEGACY)
    slowly_fill(gpu, LEGACY, b, 2)
    b.release()
    assert one.stats().pending_bytes
    gpu.drain()
    assert one.stats().pending_bytes == 0


# Other streams -------------------------------------------------------------------------------


def test_a_recorded_block_waits(gpu, reusing):
    s = new_stream(gpu)
    b = take(reusing)
    b.record_stream(s)
    slowly_fill(gpu, s, b, 1)
    address = b.address
    del b
    assert reusing.stats().pending_bytes and reusing.stats().active_allocations == 0
    reusing.check()
    assert [block.state for block in reusing.blocks() if block.address == address] == ["pending"]
    gpu.drain()
    assert reusing.stats().pending_bytes == 0
    assert take(reusing).address == address


def test_at_the_limit_the_own_stream_waits_and_not_the_caller(gpu, reusing):
    s = new_stream(gpu)
    b = take(reusing)
    b.record_stream(s)
    slowly_fill(gpu, s, b, 1)
    b.release()
    again = take(reusing)  # its bytes may still be written
    assert gpu.queue, "nobody waited"
    slowly_fill(gpu, LEGACY, again, 2)
    while gpu.step(1):
        pass
    assert set(content(again)) == {2}


def test_several_streams_have_to_be_done(gpu, reusing):
    streams = [new_stream(gpu) for _ in range(3)]
    b = take(reusing)
    for s in streams:
        b.record_stream(s)
        slowly_fill(gpu, s, b, 1)
    b.release(LEGACY)
    for s in streams:
        assert reusing.stats().pending_bytes, s
        gpu.call("cuStreamSynchronize", s.handle_)
    assert reusing.stats().pending_bytes == 0


@pytest.mark.parametrize("source", HOST_VISIBLE)
def test_a_refused_release_tells_nobody_of_its_stream(gpu, source):
    pool = Pool(4 * MIB, SOURCES[source]())
    b, s = pool.alloc(4096), new_stream(gpu)
    view = memoryview(b)
    slowly_fill(gpu, s, b, 1)
    with pytest.raises(BufferError, match="exports"):
        b.release(stream=s)
    del view, b  # as nobody was told of the stream, it serves again at once
    assert pool.stats().pending_bytes == 0
    gpu.drain()


@pytest.mark.parametrize("dropped", ["here", "in another thread"])
def test_the_default_stream_of_a_thread(gpu, reusing, dropped):
    """The other thread has the ident of the first one, which has ended."""
    blocks = [take(reusing)]

    def use():
        with gpu.on(0):
            blocks[0].record_stream(PER_THREAD)
            slowly_fill(gpu, PER_THREAD, blocks[0], 1)

    def drop():
        with gpu.on(0):
            blocks.clear()

    in_threads(use)
    drop() if dropped == "here" else in_threads(drop)
    assert reusing.stats().pending_bytes, "another thread's stream of that name counts"
    gpu.drain()
    assert reusing.stats().pending_bytes == 0


@pytest.mark.parametrize("what", ["text", 1.5, object(), True, None])
def test_what_is_no_stream(gpu, reusing, what):
    b = take(reusing)
    with pytest.raises((TypeError, ValueError), match="stream="):
        b.record_stream(what)
    assert not b.closed
    for number in (-1, 1 << 64):
        with pytest.raises(ValueError, match=f"stream={number}"):
            b.release(number)
    assert not b.closed
    b.release()
    assert reusing.stats().pending_bytes == 0


NAMES = {
    "an object": lambda s: s,
    "an integer": lambda s: s.handle_,
    "somebody's": lambda s: Protocol(s.handle_),
    **{
        name: lambda s, name=name: type("Stream", (), {name: s.handle_})()
        for name in ("cuda_stream", "ptr", "handle")
    },
}


@pytest.mark.parametrize("name", NAMES)
def test_release_with_a_stream(gpu, reusing, name):
    """Nobody waits, whether it is known to live on or not: it is asked at once."""
    s = new_stream(gpu)
    named = NAMES[name](s)
    b = take(reusing)
    slowly_fill(gpu, s, b, 1)
    b.release(named)
    assert b.closed and reusing.stats().pending_bytes
    b.release(named)  # the second one does nothing
    gpu.drain()
    assert reusing.stats().pending_bytes == 0


def test_host_memory_has_no_streams():
    b = Pool().alloc(10)
    for call in (b.record_stream, b.release, lambda s: b.fill(0, stream=s)):
        with pytest.raises(ValueError, match="host memory is not ordered by a stream"):
            call(7)


# Bump ----------------------------------------------------------------------------------------


def test_a_bump_keeps_what_streams_use(gpu):
    s = new_stream(gpu)
    arena = Bump(MIB, cuda.Device())
    b = arena.alloc(1000)
    start = b.address
    b.record_stream(s)
    slowly_fill(gpu, s, b, 1)
    del b
    arena.reset()
    assert arena.alloc(1000).address != start
    gpu.drain()
    arena.reset()
    assert arena.stats().retired_bytes == 0
    arena.reset()
    assert arena.alloc(1000).address == start


@pytest.mark.parametrize("name", ["device", "pinned"])
def test_a_reset_that_names_a_stream(gpu, name):
    s = new_stream(gpu)
    arena = Bump(MIB, SOURCES[name]())
    b = arena.alloc(1000)
    slowly_fill(gpu, s, b, 1)
    address = b.address
    arena.reset(stream=s)
    again = arena.alloc(1000)
    assert again.address == address and b.closed
    slowly_fill(gpu, LEGACY, again, 2)
    while gpu.step(1):
        pass
    assert set(content(again)) == {2}
    with pytest.raises(TypeError, match="stream='x'"):
        arena.reset(stream="x")


# Stream caches ------------------------------------------------------------------------------


def test_a_streams_blocks_are_its_own_again_at_once(gpu):
    pool = Pool(16 * MIB, cuda.Device())
    s, t = new_stream(gpu), new_stream(gpu)
    for n in (100, 5000, 100_000, 3 * MIB):
        b = pool.alloc(n, stream=s)
        assert b.allocator is pool
        slowly_fill(gpu, s, b, 1)
        address = b.address
        del b
        other = pool.alloc(n, stream=t)
        assert other.address != address
        again = pool.alloc(n, stream=s)
        assert again.address == address, n
    pool.check()


def test_figures_are_of_all_streams(gpu):
    pool = Pool(32 * MIB, cuda.Device())
    streams = [new_stream(gpu) for _ in range(3)]
    kept = [pool.alloc(n, stream=s) for s in streams for n in (1000, 70_000, 2 * MIB)]
    kept.append(pool.alloc(4096))
    stats = pool.stats()
    assert stats.active_allocations == len(kept)
    assert stats.allocated_bytes + stats.pending_bytes + stats.idle_bytes == stats.reserved_bytes
    live = [block for block in pool.blocks() if block.state == "live"]
    assert {block.address for block in live} >= {b.address & ~4095 for b in kept if b.nbytes > MIB}
    assert len(live) == len(kept) and sum(b.nbytes for b in live) == stats.allocated_bytes
    blocks = list(pool.blocks())
    assert all(a.address + a.nbytes <= b.address for a, b in itertools.pairwise(blocks))
    for one in stats.classes:
        assert one.allocated_bytes + one.pending_bytes + one.idle_bytes == one.reserved_bytes
    kept.clear()
    assert pool.stats().active_allocations == 0 and pool.stats().allocated_bytes == 0
    gpu.drain()
    pool.trim()
    gpu.drain()
    pool.trim()
    assert pool.stats().reserved_bytes == 0 and gpu.memory.used[0] == 0


@pytest.mark.parametrize("lane", [False, True])
def test_there_is_bookkeeping_for_many_blocks(gpu, lane):
    pool, s = Pool(32 * MIB, cuda.Device()), new_stream(gpu) if lane else None
    blocks = [pool.alloc(4096, stream=s) for _ in range(2000)]
    assert pool.stats().active_allocations == 2000
    del blocks[::2]
    assert sum(block.state == "live" for block in pool.blocks()) == 1000
    blocks += pool.alloc_many([4096] * 2000)
    pool.check()


def test_a_pool_goes_with_its_lanes(gpu):
    pool, s = Pool(16 * MIB, cuda.Device()), new_stream(gpu)
    b = pool.alloc(MIB, stream=s)
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None and b.allocator is None
    b.fill(1, stream=s)
    gpu.drain()
    assert content(b)[:1] == b"\1"
    del b
    gc.collect()
    assert gpu.memory.used[0] == 0


def test_a_region_can_be_closed_after_streams_have_read_it(gpu, reusing):
    """A use of a stream's counts as one that holds the region, until it ends."""
    block = take(reusing)
    block.record_stream(new_stream(gpu))
    block.release()
    with pytest.raises(BufferError, match="streams still use"):
        reusing.regions[0].close()
    gpu.drain()
    (region,) = reusing.regions
    region.close()
    assert region.closed


@pytest.mark.parametrize("name", ["integer", "objects", "per thread"])
@pytest.mark.parametrize("items", [16, 128])
def test_a_full_ring_asks_each_stream_and_not_each_block(gpu, items, name):
    """This processor is ahead of the device: all items but one are always under work."""
    slab = Slab(4096, items, cuda.Pinned())
    streams = [cuda.Stream() for _ in range(2)]
    under_way = []

    def step(i):
        stream = streams[i % 2]
        handle = PER_THREAD if name == "per thread" else stream.handle
        item = slab.alloc()
        slowly_fill(gpu, handle, item, 1)
        item.release(stream if name == "objects" else handle)
        under_way.append(stream)
        if len(under_way) == items:
            del under_way[0]
            gpu.step()

    for i in range(10 * items):
        step(i)
    before = gpu.calls.total()
    for i in range(items):
        step(i)
    assert (gpu.calls.total() - before) / items < 100


# Interrupts ----------------------------------------------------------------------------------


def window_of_a_kernel_arena():
    arena = cuda.KernelArena(1 << 20)
    return [arena.buffer(arena.address + 256, 64)], lambda _: arena.reset()


def exported(source):
    pool = Pool(2 * MIB, source)
    block = pool.alloc(4096)
    assert block.__cuda_array_interface__

    def nothing_is_left(gpu):
        pool.trim(), gpu.drain()  # an event was recorded only then
        assert (pool.stats().active_allocations, pool.stats().pending_bytes) == (0, 0)

    return [block], nothing_is_left


def region_of_a_driver_pool():
    source = cuda.DriverPool()
    return [source.region(MIB)], lambda _: source.trim()


def last_name_of_a_stream():
    pool, stream = Pool(2 * MIB, cuda.Pinned()), cuda.Stream()
    return [stream, pool.alloc(100, stream=stream)], lambda _: pool.stats()


ENDS = {
    "kernel arena": window_of_a_kernel_arena,
    "pinned": lambda: exported(cuda.Pinned()),
    "managed": lambda: exported(cuda.Managed()),
    "device": lambda: exported(cuda.Device()),
    "driver pool": region_of_a_driver_pool,
    "stream": last_name_of_a_stream,
}


@pytest.mark.parametrize("end", ENDS)
def test_an_end_runs_no_python_code(gpu, end):
    """In which a signal's exception would be lost, and what it stopped with it."""
    things, check = ENDS[end]()
    came = []

    def interrupt(frame, event, argument):
        if event == "call" and frame.f_back is here and "simulated" not in frame.f_code.co_filename:
            came.append(frame.f_code)
            raise KeyboardInterrupt

    here = sys._getframe()
    sys.setprofile(interrupt)
    things.clear()
    sys.setprofile(None)
    assert not came
    gpu.drain()
    check(gpu)
