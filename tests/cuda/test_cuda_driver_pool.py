"""The driver's own pool as a source: when its memory goes back. On the simulated driver.

The driver waits for nobody here: what `cuMemFreeAsync` frees is somebody else's at once. So it has
to come after whatever uses the memory, and may neither wait for the context nor disturb a capture.
"""

import gc

import pytest
from cuda_machine import Wrapped
from cuda_support import (
    ALLOCATORS,
    LEGACY,
    MIB,
    backwards,
    graph_of,
    new_stream,
    refused_in_a_child,
    slowly_fill,
)
from helpers import in_threads
from stream_wrappers import OldCoreStream, core_own, destroy, new_handle

from arenapy import Pool, Slab, cuda


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("later", ["region", "trim", "another source", "grown in place"])
def test_a_region_that_is_freed_during_a_capture(gpu, known, later):
    source, stream = cuda.DriverPool(release_threshold=0), new_stream(gpu)
    if known:
        Pool(MIB, cuda.Device()).alloc(1).record_stream(stream)
    regions = [source.region(2 * MIB) for _ in range(3)]
    gpu.begin_capture(stream.handle_)
    regions.clear()
    gc.collect()
    assert gpu.calls["cuCtxSynchronize"] == 0
    gpu.destroy_graph(graph_of(gpu, stream))
    if later == "region":
        region = source.region(MIB)
        gpu.drain()
        source.trim()
        assert gpu.memory.used[0] == MIB
        del region
    elif later == "another source":
        cuda.Device().region(MIB)
        assert gpu.calls["cuMemFreeAsync"] == 3
    elif later == "grown in place":
        Pool(source=cuda.Device(grow=True)).alloc(MIB).release()
        gc.collect()
        assert gpu.calls["cuMemFreeAsync"] == 3
    source.trim()
    assert gpu.memory.used[0] == 0, "it was never given back"
    assert gpu.calls["cuMemFreeAsync"] == 3 + (later == "region")
    assert gpu.calls["cuCtxSynchronize"] == 0


@pytest.mark.parametrize("later", ["region", "trim"])
def test_while_the_legacy_stream_is_barred(gpu, later):
    """By a blocking stream that is captured: who could use the memory there cannot be asked."""
    source, stream = cuda.DriverPool(), new_stream(gpu, 0)
    region = source.region(2 * MIB)
    slowly_fill(gpu, LEGACY, region, 1)
    gpu.begin_capture(stream.handle_)
    del region
    gc.collect()
    assert gpu.calls["cuMemFreeAsync"] == 0
    gpu.destroy_graph(graph_of(gpu, stream))
    if later == "region":
        kept = source.region(MIB)
        assert gpu.calls["cuMemFreeAsync"] == 1
        assert not gpu.queue, "the kernel is over, and so is the free"
        del kept
    source.trim()
    assert gpu.memory.used[0] == 0 and not gpu.queue


def test_trimmed_memory_is_free_when_the_call_returns(gpu):
    source = cuda.DriverPool()
    regions = [source.region(2 * MIB) for _ in range(3)]
    regions.clear()
    source.trim()
    assert gpu.memory.used[0] == 0
    pool = Pool(8 * MIB, source)
    b = pool.alloc(MIB)
    b.fill(1)
    del b
    pool.trim()
    source.trim()
    assert gpu.memory.used[0] == 0
    kept = source.region(2 * MIB)
    source.region(2 * MIB).close()
    source.trim(4 * MIB)
    assert gpu.memory.used[0] == 4 * MIB
    source.trim()
    assert gpu.memory.used[0] == kept.nbytes


@pytest.mark.parametrize("who", ["an object", "the legacy stream", "cuda.Stream", "blocking"])
def test_a_kernel_that_still_uses_a_region(gpu, who):
    """Of which arenapy was not told; but the stream it knows, and the free comes after it."""
    stream = {
        "an object": lambda: new_stream(gpu),
        "the legacy stream": lambda: LEGACY,
        "cuda.Stream": cuda.Stream,
        "blocking": lambda: new_stream(gpu, 0),
    }[who]()
    other = cuda.Device().region(MIB).buffer()
    other.fill(0, stream=stream)  # now it is known
    source = cuda.DriverPool(release_threshold=0)
    region = source.region(2 * MIB)
    slowly_fill(gpu, getattr(stream, "handle", stream), region, 1)
    del region
    assert gpu.queue, "nobody waited"
    assert gpu.calls["cuMemFreeAsync"] == 1
    backwards(gpu)
    assert not gpu.errors
    source.trim()
    assert gpu.memory.used[0] == other.nbytes


def test_memory_is_not_used_again_while_a_known_stream_is_at_work(gpu):
    """The next region of the same pool is not there before the kernel is done."""
    source, stream, done = cuda.DriverPool(), new_stream(gpu), []
    other = cuda.Device().region(MIB).buffer()
    other.fill(0, stream=stream)
    region = source.region(2 * MIB)
    gpu.launch(stream.handle_, lambda: done.append(1), [(region.address, region.nbytes)])
    del region
    again = source.region(2 * MIB)
    assert done, "it was handed out while a kernel was at work on what was freed"
    del again


@pytest.mark.parametrize("way", ["drop", "trim"])
@pytest.mark.parametrize(
    "who", ["object", "integer", "object, captured", "legacy", "cuda.Stream", "lane"]
)
def test_the_memory_of_a_pool_goes_after_its_own_streams_work(gpu, way, who):
    """A block that its own stream uses is recorded nowhere."""
    stream = {"integer": lambda: new_handle(gpu), "legacy": lambda: None, "lane": lambda: None,
              "cuda.Stream": cuda.Stream}.get(who, lambda: new_stream(gpu))()  # fmt: skip
    pool = Pool(8 * MIB, cuda.DriverPool(release_threshold=0), stream=stream)
    on = new_stream(gpu) if who == "lane" else stream
    b = pool.alloc(2 * MIB, stream=on)
    slowly_fill(gpu, LEGACY if on is None else getattr(on, "handle", on), b, 1)
    if "captured" in who:
        gpu.begin_capture(on.handle_)
    del b
    if way == "trim":
        pool.trim()
    del pool
    if "captured" in who:
        gc.collect()
        backwards(gpu)
        gpu.destroy_graph(graph_of(gpu, on))
    del stream, on
    gc.collect()
    backwards(gpu)
    assert not gpu.errors


def test_what_it_has_left_when_its_source_goes(gpu):
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


@pytest.mark.parametrize("later", ["region", "trim"])
@pytest.mark.parametrize("who", ["owner", "handle", "cuda.Stream"])
def test_memory_that_a_capture_kept_waits_for_the_stream_of_an_allocator_that_is_gone(
    gpu, who, later
):
    other, source = cuda.Stream(), cuda.DriverPool(release_threshold=0)
    handle = new_handle(gpu)
    stream = cuda.Stream() if who == "cuda.Stream" else handle
    stream = Wrapped(handle) if who == "owner" else stream
    slab = Slab(MIB, 1, source, stream=stream)
    b = slab.alloc()
    slowly_fill(gpu, getattr(stream, "handle", stream), b, 3)
    gpu.begin_capture(other.handle)
    del b, slab, stream
    gc.collect()
    assert gpu.calls["cuMemFreeAsync"] == 0
    gpu.destroy_graph(gpu.end_capture(other.handle))
    kept = source.region(MIB) if later == "region" else source.trim()
    backwards(gpu)
    assert not gpu.errors and gpu.calls["cuMemFreeAsync"] == 1
    del kept


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("way", ["drop", "trim", "close"])
@pytest.mark.parametrize("name", ["slab", "pool", "bump"])
def test_memory_whose_own_stream_was_closed_is_freed_after_its_work(gpu, name, way, capture):
    """Its handle cannot be asked, so the context is waited for; not during a capture."""
    source, handle = cuda.DriverPool(release_threshold=0), new_handle(gpu)
    stream, other = core_own(gpu, handle, OldCoreStream), cuda.Stream()
    allocator = ALLOCATORS[name](source, stream=stream)
    b = allocator.alloc(4096)
    slowly_fill(gpu, handle, b, 3)
    stream.close()
    if capture:
        gpu.begin_capture(other.handle)
    del b
    if way == "trim" and name != "bump":
        allocator.trim()
    if way == "close":
        allocator.regions[0].close()
    del allocator
    gc.collect()
    if capture:
        assert gpu.calls["cuMemFreeAsync"] == 0
        gpu.destroy_graph(graph_of(gpu, other.handle))
        source.trim()
    backwards(gpu)
    assert not gpu.errors
    source.trim()
    assert gpu.memory.used[0] == 0


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("name", ["slab", "pool", "trimmed pool", "bump"])
def test_a_region_that_outlives_the_allocator_and_its_stream(gpu, name, capture):
    """The number of a stream has to be good as long as the allocator, and no longer."""
    source, stream, other = cuda.DriverPool(release_threshold=0), new_handle(gpu), cuda.Stream()
    allocator = ALLOCATORS[name.split()[-1]](source, stream=stream)
    b = allocator.alloc(4096)
    slowly_fill(gpu, stream, b, 3)
    kept = allocator.regions[0]
    if name == "trimmed pool":
        b.release()
        assert allocator.trim()
    if capture:
        gpu.begin_capture(other.handle)
    del b, allocator
    gc.collect()
    destroy(gpu, stream)
    del kept
    if capture:
        gpu.destroy_graph(gpu.end_capture(other.handle))
        source.trim()
    assert gpu.calls["cuMemFreeAsync"] == 1
    backwards(gpu)
    assert not gpu.errors


@pytest.mark.parametrize("meanwhile", ["trim", "region"])
def test_a_free_that_another_thread_begins_while_one_has_to_be_put_off(gpu, meanwhile):
    source, stream = cuda.DriverPool(release_threshold=0), cuda.Stream()
    region, kept = source.region(2 * MIB), []

    def other():
        with gpu.on(0):
            kept.append(source.trim() if meanwhile == "trim" else source.region(MIB))

    def hook(name):
        if name == "cuEventRecord":
            gpu.before_call = None
            in_threads(other)
            gpu.begin_capture(stream.handle)

    gpu.before_call = hook
    del region
    gpu.before_call = None
    graph = gpu.end_capture(stream.handle)
    gpu.destroy_graph(graph)
    kept.clear()
    source.trim()
    assert gpu.memory.used[0] == 0, "it was never given back"
    assert not gpu.errors


@pytest.mark.parametrize("what", ["trim", "region"])
def test_a_forked_child_does_not_call_the_driver(gpu, what):
    source = cuda.DriverPool()
    kept = source.region(MIB)
    act = source.trim if what == "trim" else lambda: source.region(MIB)
    refused_in_a_child(gpu, act)
    del kept


def test_two_first_regions_at_once(gpu):
    """Of the two pools that they make, one is left."""
    source, regions = cuda.DriverPool(), []

    def before(name):
        if name == "cuMemPoolCreate" and not regions:
            regions.append(None)
            in_threads(lambda: regions.append(source.region(MIB)))

    gpu.before_call = before
    regions.append(source.region(MIB))
    gpu.before_call = None
    gc.collect()
    assert gpu.calls["cuMemPoolCreate"] == 2
    assert len(gpu.pool_handles.things) == 1
