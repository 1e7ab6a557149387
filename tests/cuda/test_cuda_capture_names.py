"""Naming a stream while it is captured into a graph. On the simulated driver.

A question for the id of such a stream makes its capture invalid, and so does cuCtxSynchronize: the
driver has no capture mode that allows them.
"""

import pytest
from capsules import Array
from cuda_machine import Wrapped
from cuda_support import (
    MIB,
    backwards,
    content,
    graph_of,
    let_wait,
    new_stream,
    slowly_fill,
    take,
)
from helpers import in_threads
from simulated_gpu import GLOBAL, RELAXED
from simulated_memory import OUT_OF_MEMORY
from stream_wrappers import KNOWN_OWNERS, NOT_OWNERS, OTHER_OWNERS, Protocol, new_handle

from arenapy import OutOfMemory, Pool, Slab, cuda


def known(stream):
    """By this object, and not the one that was named last."""
    return stream


NAMES = {
    "a known object": known,
    "another object": lambda stream: Wrapped(stream.handle_),
    "an external one": lambda stream: Protocol(stream.handle_),
    "an integer": lambda stream: stream.handle_,
}
USES = {
    "fill": lambda block, stream: block.fill(3, stream=stream),
    "copy_from": lambda block, stream: block.copy_from(other_block(block.nbytes), stream=stream),
    "copy_to": lambda block, stream: block.copy_to(other_block(block.nbytes), stream=stream),
    "record_stream": lambda block, stream: block.record_stream(stream),
    "release": lambda block, stream: block.release(stream),
    "dlpack": lambda block, stream: block.__dlpack__(
        stream=stream if isinstance(stream, int) else stream.handle_
    ),
    "batch": lambda block, stream: cuda.copy_batch(
        [(block, other_block(block.nbytes))], stream=stream
    ),
}


def other_block(nbytes=2 * MIB):
    """Of another allocator."""
    return cuda.Device().region(nbytes).buffer()


@pytest.mark.parametrize(
    ("name", "before"), [(name, True) for name in NAMES] + [(name, False) for name in [*NAMES][1:]]
)
@pytest.mark.parametrize("use", USES)
def test_it_stays_valid_and_the_graph_has_the_block(gpu, reusing, use, name, before):
    """`before`: arenapy has known the stream by then, and since named another one."""
    s, last = new_stream(gpu), new_stream(gpu)
    b = take(reusing)
    address = b.address
    if before:
        b.record_stream(s)
        b.record_stream(last)
    named = NAMES[name](s)
    gpu.begin_capture(s.handle_)
    USES[use](b, named)
    del b
    reusing.stats()
    graph = graph_of(gpu, s)
    gpu.drain()
    assert reusing.stats().pending_bytes, "whenever the graph is launched it uses the block"
    with pytest.raises(OutOfMemory):
        take(reusing)
    reusing.check()
    gpu.replay(graph, last.handle_)
    gpu.destroy_graph(graph)
    assert reusing.stats().pending_bytes, "it still runs"
    gpu.drain()
    assert reusing.stats().pending_bytes == 0
    assert take(reusing).address == address


@pytest.mark.parametrize("name", NAMES)
def test_an_order_within_one_capture(gpu, name):
    """One stream of it waits for another, of which arenapy is to ask nothing either."""
    origin, joined = new_stream(gpu), new_stream(gpu)
    pool = Pool(4 * MIB, cuda.Device())
    b = pool.alloc(MIB)
    b.record_stream(NAMES[name](joined))
    gpu.drain()
    gpu.begin_capture(origin.handle_)
    let_wait(gpu, joined, origin)
    slowly_fill(gpu, joined, b, 1)
    b.record_stream(NAMES[name](joined))
    capsule = b.__dlpack__(stream=origin.handle_)  # comes after what `joined` does
    graph = graph_of(gpu, origin)
    del capsule, b
    gpu.destroy_graph(graph)
    gpu.drain()
    assert pool.stats().pending_bytes == 0


def test_streams_told_apart_in_captures(gpu):
    """What two integers capture are two graphs; each keeps its own block."""
    slab = Slab(MIB, 2, cuda.Device())
    streams = [new_stream(gpu), new_stream(gpu)]
    for s in streams:
        gpu.begin_capture(s.handle_, 2)
    for s in streams:
        slab.alloc().fill(1, stream=s.handle_)
    first, second = (gpu.end_capture(s.handle_) for s in streams)
    assert first and second
    gpu.destroy_graph(first)
    assert slab.stats().pending_bytes == MIB
    gpu.destroy_graph(second)
    assert slab.stats().pending_bytes == 0


EVERYBODY = {**KNOWN_OWNERS, **OTHER_OWNERS, **NOT_OWNERS}


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    ("use", "name"),
    [(use, "integer") for use in USES if use != "release"] + [("fill", name) for name in EVERYBODY],
)
@pytest.mark.sampled
def test_what_it_is_given_after_the_capture_counts(gpu, use, name, again):
    """Until the block is released, `again`: in another capture. The first graph is gone then."""
    own, handle = new_stream(gpu), new_handle(gpu)
    slab = Slab(2 * MIB, 1, cuda.Device(), stream=own)
    b = slab.alloc()
    named = EVERYBODY[name](gpu, handle)
    gpu.begin_capture(handle)
    USES[use](b, named)
    graph = graph_of(gpu, handle)
    if name in OTHER_OWNERS:
        del named  # it is kept, as it may own the stream
    gpu.destroy_graph(graph)
    slab.stats()  # lets go of the other side, which waits for all
    slowly_fill(gpu, handle, b, 7)
    if again:
        gpu.begin_capture(handle)
    del b
    assert slab.stats().pending_bytes
    if again:
        gpu.destroy_graph(gpu.end_capture(handle))
    victim = slab.alloc()
    slowly_fill(gpu, own, victim, 9)
    backwards(gpu)
    assert set(content(victim)) == {9}


@pytest.mark.parametrize("name", EVERYBODY)
def test_a_copy_without_a_stream_comes_after_a_capture(gpu, name):
    """And after what the stream was given since; while it is on it waits for nothing."""
    handle, pool = new_handle(gpu), Pool(4 * MIB, cuda.Device())
    b = pool.alloc(4096)
    named = EVERYBODY[name](gpu, handle)
    gpu.begin_capture(handle)
    b.fill(1, stream=named)
    b.copy_to(bytearray(4096))
    gpu.destroy_graph(gpu.end_capture(handle))
    slowly_fill(gpu, handle, b, 7)
    got = bytearray(4096)
    b.copy_to(got)
    assert set(got) == {7}


@pytest.fixture
def fork(gpu):
    """Two streams that are captured into one graph."""
    origin, joined = new_stream(gpu), new_stream(gpu)
    gpu.begin_capture(origin.handle_, 2)
    let_wait(gpu, joined, origin)
    return origin, joined


@pytest.mark.parametrize("name", NAMES)
def test_streams_of_one_capture_come_after_each_other(gpu, fork, name):
    """An array of the one is copied on the other."""
    origin, joined = fork
    pool = Pool(4 * MIB, cuda.Device())
    b, source = pool.alloc(4096), other_block()
    slowly_fill(gpu, joined, source, 5)
    array = Array(source.address, (4096,))
    array.described["stream"] = joined.handle_
    b.copy_from(array, stream=NAMES[name](origin))
    let_wait(gpu, origin, joined)
    graph = gpu.end_capture(origin.handle_)
    gpu.replay(graph, new_stream(gpu).handle_)
    backwards(gpu)
    assert set(content(b)) == {5}
    gpu.destroy_graph(graph)


@pytest.mark.parametrize("name", NAMES)
def test_streams_of_one_capture_named_at_once(gpu, fork, name):
    """By two threads, of which the one is in the middle of a call."""
    origin, joined = fork
    blocks = other_block(), other_block()

    def meanwhile(call):
        if call == "cuMemsetD8Async":
            gpu.before_call = None
            named = NAMES[name](joined)
            in_threads(lambda: blocks[1].fill(2, stream=named))

    gpu.before_call = meanwhile
    blocks[0].fill(1, stream=NAMES[name](origin))
    done = [node.what for node in gpu.captures[0].graph.nodes if "memset" in node.what]
    assert len(set(done)) == 2, done
    let_wait(gpu, origin, joined)
    gpu.destroy_graph(gpu.end_capture(origin.handle_))


def test_a_handle_that_captures_for_the_second_time(gpu):
    """It is kept by the second graph, too, and by nothing else once that is gone."""
    slab, s = Slab(MIB, 2, cuda.Device()), new_stream(gpu)
    graphs = []
    for _ in range(2):
        gpu.begin_capture(s.handle_)
        slab.alloc().fill(1, stream=s.handle_)
        graphs.append(gpu.end_capture(s.handle_))
        assert graphs[-1]
    for graph, left in zip(graphs, (MIB, 0), strict=True):
        gpu.destroy_graph(graph)
        assert slab.stats().pending_bytes == left


def test_what_is_refused_disturbs_no_capture(gpu):
    stream, s = cuda.Stream(), new_stream(gpu)
    gpu.begin_capture(s.handle_)
    for name in (s, s.handle_):
        with pytest.raises(cuda.CudaError, match="captured into a graph"):
            stream.wait(name)
    gpu.destroy_graph(graph_of(gpu, s))


# The last resort -----------------------------------------------------------------------------


def gone(gpu, block):
    """Told of a stream that is destroyed, and whose handle another one has got; its kernels."""
    s, done = new_stream(gpu), []
    block.record_stream(s.handle_)
    gpu.launch(s.handle_, lambda: done.append(1), [(block.address, block.nbytes)])
    assert gpu.call("cuStreamDestroy", s.handle_) == 0
    assert new_stream(gpu).handle_ == s.handle_
    return done


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("mode", [GLOBAL, RELAXED])
def test_the_wait_for_a_stream_that_is_gone_spoils_no_capture(gpu, reusing, known, mode):
    """Nobody else can tell what it has done; the capture may be one that arenapy does not know."""
    captured = new_stream(gpu)
    b = take(reusing)
    if known:
        b.record_stream(captured)
        b.release()
        gpu.drain()
        assert reusing.stats().pending_bytes == 0
        b = take(reusing)
    done = gone(gpu, b)
    gpu.begin_capture(captured.handle_, mode)
    del b
    take(reusing)
    assert done, "it was handed out while a stream uses it"
    gpu.destroy_graph(graph_of(gpu, captured))


def test_a_device_without_room_for_that_wait(gpu, reusing):
    """The block is free later."""
    b = take(reusing)
    done = gone(gpu, b)
    gpu.fails["cuMemAlloc"] = OUT_OF_MEMORY
    del b
    for _ in range(3):
        assert reusing.stats().pending_bytes
        with pytest.raises(MemoryError):
            take(reusing)
    assert not done
    gpu.fails.clear()
    assert reusing.stats().pending_bytes == 0 and done
