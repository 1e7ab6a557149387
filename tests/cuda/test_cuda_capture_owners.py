"""A block that a capture uses has had other owners. On the simulated driver.

A graph runs after the work that its blocks' earlier owners had under way when it was captured: a
stream that is captured cannot wait for that, so the host does. Where that cannot be, the call is
refused, and the capture stays valid.
"""

import pytest
from capsules import Array, Consumer
from cuda_machine import Wrapped
from cuda_support import (
    ALLOCATORS,
    LEGACY,
    MIB,
    a_gpu,
    backwards,
    content,
    graph_of,
    let_wait,
    new_stream,
)
from helpers import poke

from arenapy import Pool, cuda

N = 4096
FORMER, OURS = 1, 3

#: The allocator's own stream, and which kind of stream is captured.
OWN = ["legacy", "blocking", "object", "integer"]
USES = {}


def use(function):
    USES[function.__name__] = function
    return function


@use
def copied_to(gpu, block, source, s):
    block.copy_from(source, stream=s)


@use
def copied_to_from_another_library(gpu, block, source, s):
    block.copy_from(Array(source.address, (N,)), stream=s)


@use
def copied_in_a_batch(gpu, block, source, s):
    halves = slice(0, N // 2), slice(N // 2, N)
    cuda.copy_batch([(block[half], source[half]) for half in halves], stream=s)


@use
def filled(gpu, block, source, s):
    block.fill(OURS, stream=s)


@use
def lent(gpu, block, source, s):
    consumer = Consumer(block.__dlpack__(stream=s.handle_))
    address = block.address
    gpu.launch(s.handle_, lambda: poke(address, N, OURS), [(address, N)])
    consumer.delete()


def own_stream(gpu, own):
    if own == "legacy":
        return None, LEGACY
    stream = new_stream(gpu, 0 if own == "blocking" else 1)
    return (stream.handle_ if own == "integer" else stream), stream.handle_


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("use", USES.values(), ids=list(USES))
@pytest.mark.sampled
def test_a_graph_comes_after_the_blocks_earlier_owner(use, own, allocator):
    with a_gpu() as gpu:
        for blocking in (True, False):
            make = lambda s: ALLOCATORS[allocator](cuda.Device(), stream=s)  # noqa: E731
            after_an_earlier_owner(gpu, use, own, make, blocking)


def after_an_earlier_owner(gpu, use, own, make, blocking):
    given, handle = own_stream(gpu, own)
    one, other = make(given), make(given)
    origin, former = other.alloc(N), one.alloc(N)
    poke(origin.address, N, OURS)
    address = former.address
    gpu.launch(handle, lambda: poke(address, N, FORMER), [(address, N)])
    former.release()
    block = one.alloc(N)
    assert block.address == address
    s = Wrapped(new_stream(gpu, not blocking).handle_)
    gpu.begin_capture(s.handle_)
    refused = False
    try:
        use(gpu, block, origin, s)
    except cuda.CudaError as error:
        refused = True
        assert blocking and own == "legacy" and "legacy default stream" in str(error)
    graph = graph_of(gpu, s)
    gpu.replay(graph, s.handle_)
    backwards(gpu)
    assert set(content(block)) == {FORMER if refused else OURS}
    gpu.destroy_graph(graph)
    del block, former, origin
    gpu.drain()
    one.stats(), other.stats()


@pytest.mark.parametrize("use", USES.values(), ids=list(USES))
@pytest.mark.parametrize("how", ["own", "told"])
def test_what_a_captured_stream_did_before(gpu, use, how):
    """Nobody can wait for that during the capture: it is said, and nothing is queued."""
    own, s = new_stream(gpu), new_stream(gpu)
    pool = Pool(2 * MIB, cuda.Device(), 2 * MIB, stream=own)
    origin = cuda.Device().region(N).buffer()
    captured = own if how == "own" else new_stream(gpu)
    block = pool.alloc(2 * MIB)[:N]
    if how == "told":
        block.fill(FORMER, stream=captured)
    before = gpu.calls["cuMemcpyAsync"], gpu.calls["cuMemsetD8Async"]
    gpu.begin_capture(captured.handle_)
    explicit = use is not lent and how == "told"  # this order is the user's to say
    if explicit:
        use(gpu, block, origin, s)
    else:
        with pytest.raises(cuda.CudaError, match=r"captured.*before the capture, or after"):
            use(gpu, block, origin, s)
        assert (gpu.calls["cuMemcpyAsync"], gpu.calls["cuMemsetD8Async"]) == before
    for act in (lambda: block.copy_to(bytearray(N)), lambda: block.fill(1)):
        with pytest.raises(cuda.CudaError, match="is being captured"):
            act()
    gpu.destroy_graph(graph_of(gpu, captured))
    use(gpu, block, origin, s)
    gpu.drain()


def test_streams_of_one_capture(gpu):
    """One that was forked from the other waits for it within the graph."""
    own, s = new_stream(gpu), new_stream(gpu)
    pool = Pool(2 * MIB, cuda.Device(), 2 * MIB, stream=own)
    block = pool.alloc(2 * MIB)[:N]
    gpu.begin_capture(own.handle_)
    address = block.address
    gpu.launch(own.handle_, lambda: poke(address, N, FORMER), [(address, N)])
    let_wait(gpu, s, own)
    block.fill(OURS, stream=s)
    let_wait(gpu, own, s)
    graph = graph_of(gpu, own)
    gpu.replay(graph, own.handle_)
    backwards(gpu)
    assert set(content(block)) == {OURS}
    gpu.destroy_graph(graph)


def test_a_batch_in_a_capture_waits_once(gpu):
    own, s = new_stream(gpu), new_stream(gpu)
    pool = Pool(4 * MIB, cuda.Device(), stream=own)
    blocks = [pool.alloc(N) for _ in range(8)]
    gpu.begin_capture(s.handle_)
    before = gpu.calls["cuEventSynchronize"]
    cuda.copy_batch(list(zip(blocks[:4], blocks[4:], strict=True)), stream=s)
    assert gpu.calls["cuEventSynchronize"] - before == 1
    gpu.destroy_graph(gpu.end_capture(s.handle_))
