"""Captures into graphs, streams that are gone, and what keeps what. On the simulated driver."""

import contextlib
import gc

import pytest
from cuda_support import (
    ALLOCATORS,
    HOST_VISIBLE,
    LEGACY,
    MIB,
    PER_THREAD,
    SOURCES,
    backwards,
    content,
    graph_of,
    new_stream,
    sample,
    slowly_fill,
    take,
)
from helpers import in_threads

from arenapy import Pool, Slab, cuda
from arenapy.cuda.fence import GraphFence

# Captures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_allocating_for_a_capturing_stream_is_refused(gpu, allocator):
    """Zeros of the own stream, too: the graph would zero the block whenever it is launched, and
    nobody would before. Other blocks of that stream are served, and nothing is asked."""
    s = new_stream(gpu)
    own, other = (
        ALLOCATORS[allocator](cuda.Device(), stream=s),
        ALLOCATORS[allocator](cuda.Device()),
    )
    gpu.begin_capture(s.handle_)
    before = own.stats()
    for use in (
        lambda: other.alloc(100, stream=s),
        lambda: own.alloc(100, stream=s),
        lambda: own.zeros(4096, "u1"),
    ):
        with pytest.raises(cuda.CudaError, match=r"captured into a graph.*allocate before"):
            use()
    assert own.stats() == before
    calls = gpu.calls.copy()
    own.alloc(100).release()
    if allocator != "pool":  # which asks the driver for its first memory
        assert gpu.calls == calls
    gpu.destroy_graph(graph_of(gpu, s))
    assert other.alloc(100, stream=s).nbytes == 100
    block = own.zeros(4096, "u1")
    gpu.drain()
    assert set(content(block)) == {0}
    own.check(), other.check()


def most_uses():
    """Of any block whose uses have a graph among them."""
    return max(
        len(one)
        for one in gc.get_objects()
        if type(one) is list and any(isinstance(use, GraphFence) for use in one)
    )


@pytest.mark.parametrize("source", ["device", "pinned"])
@pytest.mark.parametrize("named", ["object", "integer", "own"])
def test_graphs_that_are_gone_do_not_pile_up_on_a_block(gpu, source, named):
    s = new_stream(gpu)
    own = s if (source, named) == ("device", "own") else None
    slab = Slab(MIB, 1, SOURCES[source](), stream=own)
    b, n = slab.alloc(), 200
    for i in range(n):
        gpu.begin_capture(s.handle_)
        b.fill(i, stream=s.handle_ if named == "integer" else s)
        graph = gpu.end_capture(s.handle_)
        if i < n - 1:
            gpu.destroy_graph(graph)
    assert most_uses() < 2 * 16 + 2
    slowly_fill(gpu, s, b, 1)
    del b
    gpu.drain()
    assert slab.stats().pending_bytes == MIB, "a graph is left that uses it"
    gpu.destroy_graph(graph)
    slab.stats(), gpu.drain()
    assert slab.stats().pending_bytes == 0


def test_nothing_disturbs_another_streams_capture(gpu):
    pool, captured, s = Pool(32 * MIB, cuda.Device()), new_stream(gpu), new_stream(gpu)
    blocks = [pool.alloc(3 * MIB) for _ in range(4)]
    gpu.begin_capture(captured.handle_)
    blocks[0].record_stream(s)
    slowly_fill(gpu, s, blocks[0], 1)
    blocks.pop(0)
    pool.stats()
    pool.alloc(6 * MIB, stream=s)  # takes memory from the driver
    blocks.clear()
    pool.trim()
    graph_of(gpu, captured)


def test_the_legacy_stream_while_a_blocking_one_captures(gpu, reusing):
    """Which would be an implicit dependency of the graph."""
    b, s = take(reusing), new_stream(gpu)
    b.record_stream(s)
    captured = new_stream(gpu, 0)
    gpu.begin_capture(captured.handle_)
    with pytest.raises(cuda.CudaError, match=r"legacy default stream, cannot be used while.*graph"):
        reusing.alloc(1, stream=1)
    del b
    reusing.stats()
    reusing.check()
    graph_of(gpu, captured)


@pytest.mark.parametrize("when", ["before", "in it", "used in it"])
def test_work_from_before_the_capture_around_which_a_block_is_dropped(gpu, reusing, when):
    """Of an integer this is not known: docs/cuda.md."""
    s = new_stream(gpu)
    b = take(reusing)
    b.record_stream(s)
    slowly_fill(gpu, s, b, 1)
    if when == "before":
        b = None
    gpu.begin_capture(s.handle_)
    if when == "used in it":
        b.fill(3, stream=s)
    b = None
    assert reusing.stats().pending_bytes
    gpu.destroy_graph(graph_of(gpu, s))
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
    assert sample(content(b)) == {2}


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
    gpu.destroy_graph(graph_of(gpu, s))
    if one is not None:
        assert one.alloc(100, stream=other).nbytes == 100


LOOKS = {
    "drop": None,
    "copy": lambda block: block.copy_to(bytearray(block.nbytes)),
    "dlpack": lambda block: block.__dlpack__(stream=LEGACY),
    "interface": lambda block: block.__cuda_array_interface__,
}


@pytest.mark.parametrize("on", [0, PER_THREAD])
@pytest.mark.parametrize("look", LOOKS)
def test_a_capture_beside_the_default_stream_of_another_thread(gpu, reusing, look, on):
    """The legacy stream stands for that one here, and may not be used, as the capture blocks it."""
    blocks = []

    def use():
        with gpu.on(0):
            blocks.append(take(reusing))
            blocks[0].record_stream(PER_THREAD)
            slowly_fill(gpu, PER_THREAD, blocks[0], 7)

    in_threads(use)
    s = on or new_stream(gpu, 0).handle_
    gpu.begin_capture(s, 2)
    if look != "drop":
        with contextlib.suppress(cuda.CudaError):
            LOOKS[look](blocks[0])
    blocks.clear()
    assert reusing.stats().pending_bytes
    graph = graph_of(gpu, s)
    assert reusing.stats().pending_bytes, "the kernel is still to run"
    gpu.destroy_graph(graph)
    gpu.drain()
    assert reusing.stats().pending_bytes == 0


# What an allocator can be made with ----------------------------------------------------------


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("name", HOST_VISIBLE)
def test_memory_that_the_host_sees_belongs_to_no_stream(gpu, allocator, name):
    with pytest.raises(ValueError, match=r"stream=.*belongs to no stream.*alloc\(stream"):
        ALLOCATORS[allocator](SOURCES[name](), stream=new_stream(gpu))


def test_own_streams_that_cannot_be(gpu):
    with pytest.raises(ValueError, match="default stream of a thread"):
        Pool(source=cuda.Device(), stream=PER_THREAD)
    with gpu.on(1):
        other = new_stream(gpu)
    with pytest.raises(ValueError, match="one of device 1, or of another context"):
        Pool(source=cuda.Device(0), stream=other)
    assert Pool(source=cuda.Device(1), stream=other).alloc(100).device_id == 1


# Handles and who owns them -------------------------------------------------------------------


def test_a_default_stream_says_its_device(gpu):
    pinned = Slab(4096, 1, cuda.Pinned(huge_pages=None))
    b = pinned.alloc()
    stream = type("Stream", (), {"cuda_stream": 0, "device_index": 1})()
    b.record_stream(stream)
    with gpu.on(1):
        slowly_fill(gpu, LEGACY, b, 1)
    del b
    assert pinned.stats().pending_bytes
    gpu.drain()
    assert pinned.stats().pending_bytes == 0


# What keeps what -----------------------------------------------------------------------------


def test_a_region_that_streams_use_is_not_closed(gpu):
    slab, s = Slab(4096, 4, cuda.Pinned(huge_pages=None)), new_stream(gpu)
    b = slab.alloc()
    b.record_stream(s)
    slowly_fill(gpu, s, b, 1)
    for _ in range(2):
        with pytest.raises(BufferError, match="streams still use"):
            slab.regions[0].close()
        b = None
    gpu.drain()
    slab.regions[0].close()
    assert not gpu.memory.registered


def test_a_buffer_of_a_region(gpu):
    region, s = cuda.Pinned(huge_pages=None).region(4096), new_stream(gpu)
    b = region.buffer()
    b.record_stream(s)
    slowly_fill(gpu, s, b, 1)
    del b
    with pytest.raises(BufferError, match="streams still use"):
        region.close()
    gpu.drain()
    region.close()
    region = cuda.Pinned(huge_pages=None).region(4096)
    b = region.buffer()
    b.record_stream(s)
    slowly_fill(gpu, s, b, 1)
    del b, region  # waits
    assert not gpu.queue and not gpu.memory.registered
