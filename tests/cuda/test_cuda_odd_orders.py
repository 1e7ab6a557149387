"""Captures, integer streams, memory that cannot go back now. On the simulated driver."""

import gc

import pytest
from cuda_machine import Wrapped
from cuda_support import ALLOCATORS, LEGACY, MIB, content, new_stream, only_one, slowly_fill, take

from arenapy import Pool, cuda


def backwards(driver):
    while driver.step(-1):
        pass


# 1. What a stream did before its capture -----------------------------------------------------


@pytest.mark.parametrize("used", [False, True])
def test_work_from_before_the_capture_in_which_a_block_is_dropped(gpu, reusing, used):
    """Of an integer this is not known: docs/cuda.md."""
    s = new_stream(gpu)
    b = take(reusing)
    b.record_stream(s)
    slowly_fill(gpu, s, b, 1)
    gpu.begin_capture(s.handle_)
    if used:
        b.fill(3, stream=s)
    del b
    graph = gpu.end_capture(s.handle_)
    assert reusing.stats().pending_bytes
    gpu.destroy_graph(graph)
    assert reusing.stats().pending_bytes, "the kernel from before is still to run"
    gpu.drain()
    assert reusing.stats().pending_bytes == 0


def test_a_lane_whose_stream_captures(gpu):
    s, pool = new_stream(gpu), Pool(8 * MIB, cuda.Device())
    b = pool.alloc(7 * MIB, stream=s)
    slowly_fill(gpu, s, b, 1)
    gpu.begin_capture(s.handle_)
    del b
    with pytest.raises(MemoryError):
        pool.alloc(7 * MIB)
    gpu.destroy_graph(gpu.end_capture(s.handle_))
    b = pool.alloc(7 * MIB)
    slowly_fill(gpu, LEGACY, b, 2)
    backwards(gpu)
    assert set(content(b)[::512]) == {2}


# 2. The driver's pool ------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["drop", "trim"])
@pytest.mark.parametrize("who", ["integer", "captured"])
def test_the_drivers_pool_waits_for_an_own_stream(gpu, way, who):
    s = new_stream(gpu)
    own = s.handle_ if who == "integer" else s
    pool = Pool(8 * MIB, cuda.DriverPool(release_threshold=0), stream=own)
    b = pool.alloc(2 * MIB)
    slowly_fill(gpu, s, b, 1)
    if who == "captured":
        gpu.begin_capture(s.handle_)
    del b
    if way == "trim":
        pool.trim()
    else:
        del pool
    gc.collect()
    backwards(gpu)
    if who == "captured":
        gpu.destroy_graph(gpu.end_capture(s.handle_))
    assert not gpu.errors


def test_what_the_drivers_pool_has_left_when_its_source_goes(gpu):
    source, s = cuda.DriverPool(), new_stream(gpu, 0)
    region = source.region(2 * MIB)
    gpu.begin_capture(s.handle_)  # bars the legacy stream
    del region, source
    gc.collect()
    gpu.destroy_graph(gpu.end_capture(s.handle_))
    other = cuda.DriverPool()
    other.region(MIB).close()
    other.trim()
    gc.collect()
    gpu.drain()
    assert gpu.memory.used[0] == 0, "it was never given back"


def test_a_free_that_fails_once(gpu):
    source = cuda.DriverPool(release_threshold=0)
    region = source.region(2 * MIB)
    gpu.fail_at("cuMemFreeAsync", 1, 900)
    del region
    gc.collect()
    source.trim()
    assert gpu.memory.used[0] == 0


# 3. Own streams ------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["object", "integer"])
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_an_allocator_made_for_a_stream_that_captures(gpu, allocator, how):
    """Refused, or as good as any other: now its stream is one that there never is again."""
    s, other = new_stream(gpu), new_stream(gpu)
    gpu.begin_capture(s.handle_, 2)
    try:
        one = ALLOCATORS[allocator](cuda.Device(), stream=s if how == "object" else s.handle_)
    except cuda.CudaError:
        one = None
    graph = gpu.end_capture(s.handle_)
    assert graph
    gpu.destroy_graph(graph)
    if one is not None:
        assert one.alloc(100, stream=other).nbytes == 100


class Closing(Wrapped):
    def __cuda_stream__(self):
        return 0, self.handle_

    def close(self):
        self.handle_ = None


@pytest.mark.parametrize("name", ["slab", "pool"])
def test_a_closed_own_stream_at_the_limit(gpu, name):
    """It cannot be told to wait; this thread can, as it does while the own stream captures."""
    own, other = Closing(new_stream(gpu).handle_), new_stream(gpu)
    one = only_one(name, cuda.Device(), stream=own)
    b = take(one)
    b.record_stream(other)
    slowly_fill(gpu, other, b, 1)
    handle = own.handle_
    own.close()
    assert gpu.call("cuStreamDestroy", handle) == 0
    del b
    take(one)
    assert not gpu.queue
