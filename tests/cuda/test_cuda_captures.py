"""Captures into graphs, streams that are gone, and what keeps what. On the simulated driver."""

import contextlib
import gc

import pytest
from capsules import Array
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
    reads,
    sample,
    slowly_fill,
    take,
)
from helpers import in_threads, poke
from simulated_driver import UNKNOWN
from simulated_gpu import RELAXED
from stream_wrappers import KNOWN_OWNERS, NOT_OWNERS, new_handle

from arenapy import OutOfMemory, Pool, Slab, cuda
from arenapy.cuda.fence import GraphFence

# Captures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_zeros_of_a_stream_that_captures_are_refused(gpu, allocator):
    """The graph would zero the block whenever it is launched, and nobody would before. Other blocks
    of that stream are served, and nothing is asked."""
    s = new_stream(gpu)
    own = ALLOCATORS[allocator](cuda.Device(), stream=s)
    gpu.begin_capture(s.handle_)
    before = own.stats()
    with pytest.raises(cuda.CudaError, match=r"captured into a graph.*allocate before"):
        own.zeros(4096, "u1")
    assert own.stats() == before
    calls = gpu.calls.copy()
    own.alloc(100).release()
    if allocator != "pool":  # which asks the driver for its first memory
        assert gpu.calls == calls
    gpu.destroy_graph(graph_of(gpu, s))
    block = own.zeros(4096, "u1")
    gpu.drain()
    assert set(content(block)) == {0}
    own.check()


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


#: Ways to name a stream again and again by a new object each time.
RENAMED = {
    name: make
    for name, make in {"torch": KNOWN_OWNERS["torch"], **NOT_OWNERS}.items()
    if not hasattr(make(None, 1), "close")
}


@pytest.mark.parametrize("way", ["in captures", "in one capture", "outside"])
@pytest.mark.parametrize("named", RENAMED)
def test_the_objects_that_named_one_stream_do_not_pile_up_on_a_block(gpu, named, way):
    s = new_stream(gpu)
    slab = Slab(MIB, 1, cuda.Device())
    b = slab.alloc()
    if way == "in one capture":
        gpu.begin_capture(s.handle_)
    for i in range(200):
        if way == "in captures":
            gpu.begin_capture(s.handle_)
        b.fill(i, stream=RENAMED[named](gpu, s.handle_))
        if way == "in captures":
            gpu.destroy_graph(gpu.end_capture(s.handle_))
    if way == "in one capture":
        gpu.destroy_graph(gpu.end_capture(s.handle_))
    before = gpu.calls.total()
    b.copy_to(bytearray(MIB))
    assert gpu.calls.total() - before < 300
    slowly_fill(gpu, s, b, 1)  # the last object stands for all
    del b
    slab.stats()
    assert slab.stats().pending_bytes == MIB
    gpu.drain()
    assert slab.stats().pending_bytes == 0


@pytest.mark.parametrize("kept", [True, False], ids=["graphs kept", "graphs dropped"])
@pytest.mark.parametrize("n", [8, 13, 14, 21, 30, 46])
@pytest.mark.parametrize("named", [*RENAMED, "one object"])
@pytest.mark.sampled
def test_work_between_captures_counts_however_many_there_were(gpu, named, n, kept):
    """The block is named in captures alone, and the stream works with it before the last of them,
    in which the block is dropped."""
    s = new_stream(gpu)
    slab = Slab(MIB, 1, cuda.Device())
    b = slab.alloc()
    graphs = []
    for i in range(n):
        gpu.drain()
        ran = []
        gpu.launch(s.handle_, lambda ran=ran: ran.append(True), [(b.address, MIB)])
        gpu.begin_capture(s.handle_)
        b.fill(i, stream=s if named == "one object" else RENAMED[named](gpu, s.handle_))
        if i == n - 1:
            b = None
        graphs.append(gpu.end_capture(s.handle_))
        if not kept:
            gpu.destroy_graph(graphs.pop())
    for graph in graphs:
        gpu.destroy_graph(graph)
    slab.stats()
    assert ran or slab.stats().pending_bytes == MIB
    gpu.drain()
    assert slab.stats().pending_bytes == 0


def test_streams_wait_for_those_of_the_same_capture_alone(gpu):
    a, b, outside, another = [cuda.Stream() for _ in range(4)]
    gpu.begin_capture(a.handle, RELAXED)
    gpu.begin_capture(another.handle, RELAXED)
    b.wait(a.record())  # so it is in the capture
    a.wait(b)
    b.wait(a)
    for other in outside, another:
        for one, two in ((a, other), (other, a)):
            with pytest.raises(cuda.CudaError, match="captured into a graph"):
                one.wait(two)
    a.wait(b)
    for one in a, another:
        gpu.destroy_graph(gpu.end_capture(one.handle))


@pytest.mark.parametrize("named", ["CuPy", "numba", "older numba"])
@pytest.mark.parametrize("way", ["copy", "record_stream", "captures of a block that stays"])
def test_streams_end_with_their_objects(gpu, named, way):
    pool = Pool(64 * MIB, cuda.Device())
    stays = pool.alloc(4096)
    for i in range(100):
        handle = new_handle(gpu)
        s = KNOWN_OWNERS[named](gpu, handle)
        if way == "captures of a block that stays":
            gpu.begin_capture(handle)
            stays.fill(i, stream=s)
            gpu.destroy_graph(gpu.end_capture(handle))
        else:
            b = pool.alloc(4096, stream=s)
            if way == "copy":
                b.copy_from(bytes(4096), stream=s)
            b.record_stream(s)
            del b
        del s
        gpu.drain()
    pool.trim()
    assert len(gpu.stream_handles.things) < 40


def calls_after_threads(gpu, block, work):
    """The driver's calls of a copy, after 200 threads that did some work and ended."""
    for _ in range(200):
        in_threads(work)
        gpu.drain()
    before = gpu.calls.total()
    block.copy_to(bytearray(block.nbytes))
    return gpu.calls.total() - before


def test_the_streams_of_threads_that_ended_do_not_pile_up_on_a_block(gpu):
    b = Slab(MIB, 1, cuda.Device()).alloc()

    def record():
        with gpu.on(0):
            b.record_stream(PER_THREAD)

    assert calls_after_threads(gpu, b, record) < 800


@pytest.mark.parametrize("where", ["in a capture", "outside"])
@pytest.mark.parametrize("first", [True, False], ids=["the owner first", "the owner last"])
@pytest.mark.parametrize("other", NOT_OWNERS)
@pytest.mark.parametrize("owner", ["CuPy", "numba"])
@pytest.mark.sampled
def test_no_name_of_a_stream_outlives_it(gpu, owner, other, first, where):
    """The block has forgotten the object that kept it."""
    b = Pool(32 * MIB, cuda.Device()).alloc(MIB)
    handle = new_handle(gpu)
    stream = gpu.stream_handles.things[handle]
    names = [KNOWN_OWNERS[owner](gpu, handle), NOT_OWNERS[other](gpu, handle)]
    if where == "in a capture":
        gpu.begin_capture(handle)
    for name in names if first else names[::-1]:
        b.record_stream(name)
    if where == "in a capture":
        graph = gpu.end_capture(handle)
        gpu.replay(graph, handle)
        gpu.destroy_graph(graph)
    del names, name
    gpu.drain()
    for _ in range(50):
        b.record_stream(KNOWN_OWNERS["CuPy"](gpu, new_handle(gpu)))
    b.copy_to(bytearray(MIB))
    b.release()
    assert stream not in gpu.stream_handles.things.values()
    assert not gpu.errors


@pytest.mark.parametrize("way", ["captures its stream", "while another captures"])
def test_threads_that_end_amid_captures_do_not_pile_up_on_a_block(gpu, way):
    b = Pool(32 * MIB, cuda.Device(), stream=cuda.Stream()).alloc(MIB)
    blocking = new_stream(gpu, 0)

    def record():
        with gpu.on(0):
            captured = PER_THREAD if way == "captures its stream" else blocking.handle_
            gpu.begin_capture(captured, RELAXED)
            b.record_stream(PER_THREAD)
            gpu.destroy_graph(gpu.end_capture(captured))

    assert calls_after_threads(gpu, b, record) < 800


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
    b = pool.alloc(7 * MIB)  # waits for what s was given before
    gpu.destroy_graph(graph_of(gpu, s))
    slowly_fill(gpu, LEGACY, b, 2)
    backwards(gpu)
    assert sample(content(b)) == {2}


@pytest.mark.parametrize("source", [cuda.Device, lambda: cuda.Pinned(huge_pages=None)])
@pytest.mark.parametrize("make", [Pool, lambda n, source: Slab(n // 32, 32, source)])
def test_nobody_waits_for_the_device_if_another_block_will_do(gpu, make, source):
    """Only an event is waited for: any other stream may wait for this thread."""
    captured, other, one = cuda.Stream(), cuda.Stream(), make(4 * MIB, source())
    blocks = []
    with contextlib.suppress(OutOfMemory):
        while True:
            blocks.append(one.alloc(100_000))
    for block, stream in zip(blocks, (captured, other), strict=False):
        block.record_stream(stream)
        slowly_fill(gpu, stream.handle, block, 1)
    del block, blocks[0]
    gpu.begin_capture(captured.handle, RELAXED)
    del blocks[0]
    before = gpu.calls["cuMemFree"]
    one.alloc(100_000)
    assert gpu.calls["cuMemFree"] == before
    gpu.destroy_graph(graph_of(gpu, captured.handle))


def test_who_only_asks_waits_for_nobody(gpu):
    """However often, while memory of a pool that has ended waits for the end of a capture."""
    captured, other = cuda.Stream(), Pool(4 * MIB, cuda.Device())
    pool = Pool(4 * MIB, cuda.Device())
    block = pool.alloc(100)
    block.record_stream(captured)
    event = cuda.Stream().record()
    gpu.begin_capture(captured.handle, RELAXED)
    del block, pool
    before = gpu.calls["cuMemFree"]
    for _ in range(20):
        event.done, other.stats(), other.trim()
    assert gpu.calls["cuMemFree"] == before
    gpu.destroy_graph(graph_of(gpu, captured.handle))


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
    with pytest.raises(ValueError, match="belongs to device 1, or to another context"):
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


# Refusals leave the capture valid -------------------------------------------------------------


REFUSED = {
    "copy_from the host": lambda b, c, s: b.copy_from(bytes(4096), stream=s),
    "copy_from": lambda b, c, s: b.copy_from(c, stream=s),
    "copy_to": lambda b, c, s: b.copy_to(bytearray(4096), stream=s),
    "fill": lambda b, c, s: b.fill(1, stream=s),
    "copy_batch": lambda b, c, s: cuda.copy_batch([(b, c)], stream=s),
    "copy_batch from the host": lambda b, c, s: cuda.copy_batch([(b, bytes(4096))], stream=s),
    "prefetch": lambda b, c, s: cuda.prefetch(b, 0, stream=s),
    "copy=True": lambda b, c, s: b.__dlpack__(copy=True, stream=s),
    "chunks": lambda b, c, s: next(cuda.chunks(bytes(8192), 4096, stream=s)),
    "wait": lambda b, c, s: cuda.Stream().wait(1 if s is None else s),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("stream", [None, 1])
@pytest.mark.parametrize("own", ["captured", "barred"])
@pytest.mark.sampled
def test_a_call_that_is_refused_leaves_the_capture_valid(gpu, own, stream, source, what):
    """The own stream is captured, or a blocking stream that the legacy one would wait for."""
    if what == "prefetch" and source != "managed":
        return
    s = new_stream(gpu, own == "captured")
    options = {"stream": s} if own == "captured" and source not in HOST_VISIBLE else {}
    pool = Pool(4 * MIB, SOURCES[source](), 4 * MIB, **options)
    b, c = pool.alloc(4096), pool.alloc(4096)
    gpu.begin_capture(s.handle_, RELAXED)
    with contextlib.suppress(cuda.CudaError):
        REFUSED[what](b, c, stream)
    gpu.destroy_graph(graph_of(gpu, s))
    assert not gpu.errors
    b.copy_from(bytes(4096))


@pytest.mark.parametrize("call", ["fill", "copy", "batch", "prefetch", "copy=True"])
def test_the_legacy_stream_is_refused_while_a_blocking_one_captures(gpu, call):
    pool, s = Pool(4 * MIB, cuda.Managed(), 4 * MIB), new_stream(gpu, 0)
    b, c = pool.alloc(4096), pool.alloc(4096)
    device = Pool(4 * MIB, cuda.Device())
    on_device = device.alloc(4096)
    gpu.begin_capture(s.handle_)
    before = gpu.calls["cuMemsetD8Async"] + gpu.calls["cuMemcpyAsync"]
    with pytest.raises(cuda.CudaError, match=r"legacy default stream, cannot be used while.*graph"):
        {
            "fill": lambda: b.fill(1, stream=1),
            "copy": lambda: b.copy_from(c, stream=1),
            "batch": lambda: cuda.copy_batch([(b, c)], stream=1),
            "prefetch": lambda: cuda.prefetch(b, 0, stream=1),
            "copy=True": lambda: on_device.__dlpack__(copy=True),
        }[call]()
    assert gpu.calls["cuMemsetD8Async"] + gpu.calls["cuMemcpyAsync"] == before
    gpu.destroy_graph(graph_of(gpu, s))


@pytest.mark.parametrize("use", ["dlpack", "copy"])
def test_two_captures_at_once(gpu, use):
    """Neither of them can wait for the other, and the call says so."""
    one, other, own = new_stream(gpu), new_stream(gpu), new_stream(gpu)
    pool = Pool(4 * MIB, cuda.Device(), 4 * MIB, stream=own)
    b, c = pool.alloc(4096), pool.alloc(4096)
    b.copy_from(c, stream=one)
    gpu.drain()
    first = one if use == "dlpack" else own
    gpu.begin_capture(first.handle_, RELAXED), gpu.begin_capture(other.handle_, RELAXED)
    with pytest.raises(cuda.CudaError, match=r"captured into.*do this before the capture, or"):
        if use == "dlpack":
            b.__dlpack__(stream=one.handle_)
            b.__dlpack__(stream=other.handle_)
        else:
            b.copy_from(c, stream=other)
    for s in (first, other):
        gpu.destroy_graph(graph_of(gpu, s))


@pytest.mark.parametrize("what", ["wait", "synchronize"])
def test_a_stream_of_our_own_that_captures(gpu, what):
    s, other = cuda.Stream(), cuda.Stream()
    event = other.record()
    gpu.begin_capture(s.handle, RELAXED)
    with pytest.raises(cuda.CudaError, match="captured into a graph"):
        s.wait(event) if what == "wait" else s.synchronize()
    gpu.destroy_graph(graph_of(gpu, s.handle))


def test_an_event_of_a_capture_joins_a_stream_to_it(gpu):
    """And back again."""
    s, other = cuda.Stream(), cuda.Stream()
    gpu.begin_capture(s.handle, RELAXED)
    other.wait(s.record())
    gpu.launch(other.handle)
    s.wait(other.record())
    gpu.destroy_graph(graph_of(gpu, s.handle))


@pytest.mark.parametrize("when", ["in the capture", "after it"])
def test_the_host_cannot_ask_for_an_event_of_a_capture(gpu, when):
    """It is told so, and the capture stays valid."""
    s = cuda.Stream()
    gpu.begin_capture(s.handle, RELAXED)
    event = s.record()
    graph = None if when == "in the capture" else graph_of(gpu, s.handle)
    assert not event.done
    with pytest.raises(cuda.CudaError, match="recorded during a capture"):
        event.synchronize()
    gpu.destroy_graph(graph or graph_of(gpu, s.handle))


@pytest.mark.parametrize("what", ["used", "in_use", "buffer"])
def test_memory_of_kernels_while_a_stream_captures(gpu, what):
    """What the host would wait for is refused, and nothing of it is in the graph."""
    s = cuda.Stream()
    memory = cuda.KernelSlab(64, 10) if what == "in_use" else cuda.KernelArena(MIB)
    gpu.begin_capture(s.handle, RELAXED)
    with pytest.raises(cuda.CudaError, match="is being captured into a graph"):
        if what == "buffer":
            memory.buffer(memory.address + 256, 64, stream=s)
        else:
            getattr(memory, what)(s)
    graph = graph_of(gpu, s.handle)
    nodes = gpu.graph_handles.get(graph).nodes
    assert not nodes
    gpu.destroy_graph(graph)
    gc.collect()


# The driver fails, or a capture begins between two of its calls --------------------------------


def held(gpu, slab, s, seen, graph):
    """Nobody gets the bytes while the graph could be launched."""
    gpu.fails = {}
    gpu.plan.clear()
    slab.stats()
    with pytest.raises(OutOfMemory):
        slab.alloc()
    gpu.replay(graph, s.handle_)
    gpu.drain()
    assert seen and sample(seen[0]) == {7}


@pytest.mark.parametrize(
    "name", ["cuUserObjectCreate", "cuGraphRetainUserObject", "cuStreamGetCaptureInfo"]
)
@pytest.mark.parametrize("when", ["told before", "told in it"])
def test_a_graph_that_the_driver_does_not_let_us_follow(gpu, name, when):
    s = new_stream(gpu)
    slab = Slab(MIB, 1, cuda.Device(), stream=new_stream(gpu))
    b = slab.alloc()
    poke(b.address, MIB, 7)
    b.record_stream(s)
    gpu.begin_capture(s.handle_, RELAXED)
    gpu.fails = {name: UNKNOWN}
    if when == "told in it":
        with pytest.raises(cuda.CudaError, match="failed"):
            b.record_stream(s)
    seen = reads(gpu, s, b.address, MIB)
    del b
    gpu.fails = {}
    held(gpu, slab, s, seen, graph_of(gpu, s))


@pytest.mark.parametrize("named", ["object", "integer"])
@pytest.mark.parametrize("n", range(1, 8))
def test_a_stream_that_does_not_say_whether_it_captures(gpu, named, n):
    """Nobody takes that for a no: the call fails, or the block waits for the graph."""
    s = new_stream(gpu)
    slab = Slab(MIB, 1, cuda.Device(), stream=new_stream(gpu))
    b = slab.alloc()
    poke(b.address, MIB, 7)
    gpu.begin_capture(s.handle_, RELAXED)
    gpu.fail_at("cuStreamIsCapturing", n, UNKNOWN)
    told = True
    try:
        b.record_stream(s if named == "object" else s.handle_)
    except cuda.CudaError as error:
        told = False
        assert "cuStreamIsCapturing failed" in str(error)
    if not told:
        b.record_stream(s if named == "object" else s.handle_)
    seen = reads(gpu, s, b.address, MIB)
    del b
    held(gpu, slab, s, seen, graph_of(gpu, s))


@pytest.mark.parametrize("ends", ["later", "at once"])
@pytest.mark.parametrize("named", ["object", "own", "integer"])
def test_a_capture_that_begins_before_an_event_is_recorded(gpu, named, ends):
    """By another thread, while this one is in the call."""
    s = cuda.Stream() if named == "own" else new_stream(gpu)
    handle = s.handle if named == "own" else s.handle_
    slab, graphs, began = Slab(MIB, 1, cuda.Device()), [], []
    b = slab.alloc()
    b.record_stream(handle if named == "integer" else s)
    slowly_fill(gpu, handle, b, 1)

    def before(name):
        if name == "cuEventRecord" and not began:
            began.append(1)
            gpu.begin_capture(handle, RELAXED)
        elif began and not graphs and ends == "at once" and name != "cuEventRecord":
            graphs.append(graph_of(gpu, handle))

    gpu.before_call = before
    del b
    slab.stats()
    gpu.before_call = None
    assert began
    gpu.destroy_graph(graphs[0] if graphs else graph_of(gpu, handle))
    slab.stats(), gpu.drain()
    slab.stats(), gpu.drain()
    assert slab.stats().pending_bytes == 0
    # A capture that is over is found by the event that was recorded in it.
    if ends == "at once":
        assert gpu.errors.count("cuEventQuery: the event was recorded in a capture") <= 1
        gpu.errors.clear()


@pytest.mark.parametrize("point", range(1, 9))
@pytest.mark.parametrize("result", [201, 400, UNKNOWN])
@pytest.mark.parametrize("use", ["released", "filled", "allocated", "lent"])
@pytest.mark.sampled
def test_the_legacy_stream_is_not_gone_if_its_context_cannot_be_entered(gpu, use, result, point):
    """Whether a capture bars it is not known then; to use it would make the capture invalid."""
    pool, other = Pool(4 * MIB, cuda.Device()), cuda.Stream()
    mine = Pool(4 * MIB, cuda.Device(), stream=cuda.Stream())
    block, told = pool.alloc(4096), mine.alloc(4096)
    told.record_stream(LEGACY)
    captured = new_stream(gpu, 0)
    gpu.begin_capture(captured.handle_, RELAXED)
    gpu.fail_at("cuCtxPushCurrent", point, result)
    with contextlib.suppress(cuda.CudaError):
        if use == "released":
            told.release(), mine.stats()
        elif use == "filled":
            block.fill(1)
        elif use == "allocated":
            pool.alloc(4096, stream=other)
        else:
            told.__dlpack__(stream=other.handle)
    gpu.plan.clear()
    gpu.destroy_graph(graph_of(gpu, captured))
    assert not gpu.errors


# A producer's stream that captures --------------------------------------------------------------

TAKES = {
    "asbuffer": lambda b, array, s: cuda.asbuffer(array, stream=s),
    "copy_from": lambda b, array, s: b.copy_from(array, stream=s),
    "copy_to": lambda b, array, s: b.copy_to(array, stream=s),
    "copy_batch": lambda b, array, s: cuda.copy_batch([(b, b"\2" * 4096), (b, array)], stream=s),
}


@pytest.mark.parametrize("mine", [None, "other", "of another capture"])
@pytest.mark.parametrize("take_it", TAKES)
def test_the_producers_stream_is_captured_and_ours_is_not_in_that_capture(gpu, take_it, mine):
    theirs, other = new_stream(gpu), new_stream(gpu)
    b, foreign = (Pool(4 * MIB, cuda.Device()).alloc(4096) for _ in range(2))
    b.fill(1), foreign.fill(1)
    gpu.begin_capture(theirs.handle_, RELAXED)
    if mine == "of another capture":
        gpu.begin_capture(other.handle_, RELAXED)
    array = Array(foreign.address, (4096,), stream=theirs.handle_)
    s = None if mine is None else other
    with pytest.raises(cuda.CudaError, match=r"stream that the array names.*stream of the capture"):
        TAKES[take_it](b, array, s)
    if mine == "of another capture":
        gpu.destroy_graph(graph_of(gpu, other))
    gpu.destroy_graph(graph_of(gpu, theirs))
    assert not gpu.errors and not gpu.queue
    assert set(content(b)) == set(content(foreign)) == {1}


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("take_it", TAKES)
def test_the_producers_stream_is_in_the_capture_of_ours(gpu, take_it, joined):
    theirs = cuda.Stream()
    s = cuda.Stream() if joined else theirs
    foreign = Pool(4 * MIB, cuda.Device()).alloc(4096)
    b = Pool(4 * MIB, cuda.Device(), stream=s).alloc(4096)
    gpu.begin_capture(theirs.handle, RELAXED)
    if joined:
        s.wait(theirs.record())
    taken = TAKES[take_it](b, Array(foreign.address, (4096,), stream=theirs.handle), s)
    if joined:
        theirs.wait(s.record())
    gpu.destroy_graph(graph_of(gpu, theirs.handle))
    assert not gpu.errors
    del taken
