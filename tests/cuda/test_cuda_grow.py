"""A block that moves to grow, while streams use it. On the simulated driver."""

import contextlib

import pytest
from capsules import Consumer
from cuda_support import (
    ALLOCATORS,
    HOST_VISIBLE,
    LEGACY,
    MIB,
    SOURCES,
    backwards,
    content,
    graph_of,
    new_stream,
    reads,
    slowly_fill,
)
from helpers import in_threads, poke
from stream_wrappers import NOT_OWNERS

from arenapy import Bump, OutOfMemory, Pool, cuda

N = 4096
STREAMS = {
    "ours": lambda gpu: cuda.Stream(),
    "blocking": lambda gpu: new_stream(gpu, 0),
    "an integer": lambda gpu: new_stream(gpu).handle_,
    "somebody's": lambda gpu: NOT_OWNERS["protocol"](gpu, new_stream(gpu).handle_),
    "legacy": lambda gpu: LEGACY,
}
WAYS = ["allocated", "recorded", "copied"]


def handle_of(stream):
    return stream if isinstance(stream, int) else stream.__cuda_stream__()[1]


def written(gpu, arena, stream, way):
    """A block that a stream is going to write, of which it was told."""
    block = arena.alloc(N, stream=stream if way == "allocated" else None)
    poke(block.address, N, 9)
    if way == "copied":
        origin = cuda.Device().region(N).buffer()
        origin.fill(1)
        block.copy_from(origin, stream=stream)
        return block, origin
    slowly_fill(gpu, handle_of(stream), block, 1)
    if way == "recorded":
        block.record_stream(stream)
    return block, None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("who", STREAMS)
@pytest.mark.parametrize("source", SOURCES)
def test_its_contents_are_what_its_streams_write(gpu, source, who, way):
    arena, stream = Bump(MIB, SOURCES[source]()), STREAMS[who](gpu)
    block, kept = written(gpu, arena, stream, way)
    behind = arena.alloc(1)
    grown = arena.grow(block, 2 * N)
    assert grown is not block and block.closed and grown.nbytes == 2 * N
    backwards(gpu)
    assert set(content(grown)[:N]) == {1}
    arena.check()
    del behind, kept


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("who", STREAMS)
@pytest.mark.parametrize("source", SOURCES)
def test_its_streams_go_on_with_it(gpu, source, who, way):
    """They find the contents there, and nobody gets its bytes before they are done."""
    arena, stream = Bump(4 * N, SOURCES[source]()), STREAMS[who](gpu)
    block, kept = written(gpu, arena, stream, way)
    behind = arena.alloc(1)
    grown = arena.grow(block, 2 * N)
    start = grown.address
    del block
    seen = reads(gpu, handle_of(stream), start, N)
    del grown
    arena.reset()
    if source in HOST_VISIBLE and not seen:
        assert arena.alloc(2 * N).address != start
    else:
        while arena.remaining:
            other = arena.alloc(min(N, arena.remaining))
            if source in HOST_VISIBLE:
                poke(other.address, other.nbytes, 2)
            else:
                slowly_fill(gpu, LEGACY, other, 2)
    backwards(gpu)
    assert [set(one) for one in seen] == [{1}]
    del behind, kept


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("who", STREAMS)
@pytest.mark.parametrize("source", SOURCES)
def test_streams_of_a_pool_go_on_with_it(gpu, source, who, way):
    """Also the stream that the block was allocated for, of which the block has no note."""
    pool, stream = Pool(4 * MIB, SOURCES[source]()), STREAMS[who](gpu)
    block, kept = written(gpu, pool, stream, way)
    grown = pool.grow(block, MIB)
    assert grown is not block and block.closed and grown.nbytes == MIB
    start = grown.address
    seen = reads(gpu, handle_of(stream), start, N)
    del block, grown, kept
    others = []
    with pytest.raises(OutOfMemory):
        while True:
            others.append(pool.alloc(MIB))
            if source in HOST_VISIBLE:
                poke(others[-1].address, MIB, 2)
            else:
                slowly_fill(gpu, LEGACY, others[-1], 2)
    backwards(gpu)
    assert [set(one) for one in seen] == [{1}]
    pool.check()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("allocator", ["bump", "pool"])
def test_a_block_that_was_lent(gpu, allocator, source):
    """Whoever had it does not tell on which stream, nor, of memory of the host, on which device."""
    one = ALLOCATORS[allocator](SOURCES[source]())
    block, behind = one.alloc(N), one.alloc(N)
    poke(block.address, N, 9)
    consumer = Consumer(block.__dlpack__())
    slowly_fill(gpu, LEGACY, block, 1)
    consumer.delete()
    grown = one.grow(block, 16 * N)
    assert grown is not block
    backwards(gpu)
    assert set(content(grown)[:N]) == {1}
    one.check()
    del behind


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("allocator", ["bump", "pool"])
def test_a_stream_that_captures(gpu, allocator, source):
    """It can neither wait nor be waited for: nothing changes, or all is as it should be."""
    arena, stream = ALLOCATORS[allocator](SOURCES[source]()), cuda.Stream()
    block, _ = written(gpu, arena, stream, "recorded")
    behind = arena.alloc(1)
    gpu.begin_capture(stream.handle)
    before = arena.stats()
    with pytest.raises(cuda.CudaError, match="captured"):
        arena.grow(block, 2 * N)
    assert not block.closed
    assert arena.stats() == before
    gpu.destroy_graph(graph_of(gpu, stream.handle))
    grown = arena.grow(block, 2 * N)
    backwards(gpu)
    assert set(content(grown)[:N]) == {1}
    del behind


@pytest.mark.parametrize("scope", [False, True])
@pytest.mark.parametrize("named", ["allocated", "recorded", "filled"])
@pytest.mark.parametrize("source", [one for one in SOURCES if one not in HOST_VISIBLE])
def test_what_a_block_gets_in_place_is_done_with_first(gpu, source, named, scope):
    """By the stream of the arena, after which all that uses its memory comes."""
    own, stream = cuda.Stream(), cuda.Stream()
    arena = Bump(MIB, SOURCES[source](), stream=own)
    block = arena.alloc(N, stream=stream if named == "allocated" else None)
    if named == "recorded":
        block.record_stream(stream)
    elif named == "filled":
        block.fill(0, stream=stream)
    mark = arena.mark()
    with arena.scope() if scope else contextlib.nullcontext():
        slowly_fill(gpu, own.handle, arena.alloc(N), 1)
    if not scope:
        arena.reset(mark)
    mark = None
    grown = arena.grow(block, 2 * N)
    assert grown is block, "in place"
    slowly_fill(gpu, stream.handle, grown, 2)
    backwards(gpu)
    assert set(content(grown)) == {2}


@pytest.mark.parametrize("captured", ["its stream", "another", "the arena's"])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_in_place_amid_a_capture(gpu, when, captured):
    """Of blocking streams, during which nobody can use the legacy one: this thread waits."""
    own = new_stream(gpu, 0) if captured == "the arena's" else None
    arena = Bump(2 * MIB, cuda.Device(grow=True), max_bytes=16 * MIB, stream=own)
    stream = new_stream(gpu, 0)
    named = {"its stream": stream, "another": new_stream(gpu, 0), "the arena's": own}[captured]
    mark, front = arena.mark(), LEGACY if own is None else own.handle_
    slowly_fill(gpu, front, arena.alloc(2 * MIB), 1)
    arena.reset(mark)
    block, calls = arena.alloc(N, stream=stream), []

    def capture(name):
        calls.append(name)
        if calls.count("cuMemMap") == 1 and name == "cuMemMap":
            gpu.begin_capture(named.handle_)

    if when == "before":
        capture("cuMemMap")
    gpu.before_call = capture
    grown = arena.grow(block, 4 * MIB)
    gpu.before_call = None
    assert grown is block, "in place"
    if when == "before":  # else the stream waits
        assert set(content(grown)[N : 2 * MIB]) == {1}, "what was written there first is over"
    gpu.destroy_graph(graph_of(gpu, named.handle_))
    arena.check()


@contextlib.contextmanager
def amid(gpu, call, act):
    """Another thread acts before the first such call of the driver, which has to come."""
    done = []

    def before(name):
        if name == call and not done:
            done.append(True)
            in_threads(act)

    gpu.before_call = before
    yield
    gpu.before_call = None
    assert done


@pytest.mark.parametrize("other", ["grows it", "releases it"])
def test_another_thread_changes_a_block_that_grows_in_place(gpu, other):
    own, stream = cuda.Stream(), cuda.Stream()
    arena = Bump(MIB, cuda.Device(), stream=own)
    block = arena.alloc(N, stream=stream)
    slowly_fill(gpu, own.handle, block, 1)
    does = {"grows it": lambda: arena.grow(block, 8 * N), "releases it": block.release}[other]
    with amid(gpu, "cuEventRecord", does), pytest.raises(ValueError, match=r"less than the|closed"):
        arena.grow(block, 2 * N)
    assert block.closed if other == "releases it" else block.nbytes == 8 * N
    arena.check()


@pytest.mark.parametrize("came_free", ["retired", "released"])
def test_what_comes_free_while_a_block_grows_over_it(gpu, came_free):
    """For the arena's stream, in another thread, after the block's stream was told of that one."""
    own, stream, theirs = cuda.Stream(), cuda.Stream(), cuda.Stream()
    arena = Bump(MIB, cuda.Device(), stream=own)
    block = arena.alloc(N, stream=stream) if came_free == "released" else None
    before = arena.alloc(N) if block is None else None
    behind = arena.alloc(N, stream=theirs)
    slowly_fill(gpu, theirs.handle, behind, 1)
    address = behind.address
    if block is None:
        del before, behind
        arena.reset()
        block = arena.alloc(N, stream=stream)
    else:
        behind.release()
        del behind
    assert block.address + N <= address < block.address + 3 * N
    slowly_fill(gpu, own.handle, block, 0)

    def other():
        with pytest.raises(OutOfMemory):
            arena.alloc(MIB)

    with amid(gpu, "cuStreamWaitEvent", other):
        grown = arena.grow(block, 3 * N)
    assert grown is block
    slowly_fill(gpu, stream.handle, grown, 2)
    backwards(gpu)
    assert set(content(grown)) == {2}


def test_a_stream_that_is_named_while_a_block_grows(gpu):
    own, stream, theirs = cuda.Stream(), cuda.Stream(), cuda.Stream()
    arena = Bump(2 * MIB, cuda.Device(grow=True), max_bytes=8 * MIB, stream=own)
    block = arena.alloc(N)

    def other():
        behind = arena.alloc(N, stream=theirs)
        slowly_fill(gpu, theirs.handle, behind, 1)
        block.record_stream(stream)
        behind.release()
        del behind
        with pytest.raises(OutOfMemory):
            arena.alloc(64 * MIB)

    with amid(gpu, "cuMemMap", other):
        grown = arena.grow(block, 3 * MIB)
    assert grown is block
    slowly_fill(gpu, stream.handle, grown, 2)
    backwards(gpu)
    assert set(content(grown)) == {2}


def test_in_place_with_the_last_memory_of_the_device(gpu):
    """Amid a capture, in which a wait takes memory, too."""
    arena = Bump(2 * MIB, cuda.Device(grow=True), max_bytes=128 * MIB)
    stream = new_stream(gpu, 0)
    block = arena.alloc(N, stream=stream)
    gpu.begin_capture(stream.handle_)
    for n in range(56, 64):
        try:
            assert arena.grow(block, n * MIB) is block
        except OutOfMemory:
            assert block.nbytes in (N, (n - 1) * MIB), "an error changes nothing"
            break
    gpu.destroy_graph(graph_of(gpu, stream.handle_))
    arena.check()


@pytest.mark.parametrize("source", SOURCES)
def test_in_place_it_asks_nothing_if_no_stream_was_named(gpu, source):
    arena = Bump(MIB, SOURCES[source]())
    block = arena.alloc(N)
    calls = gpu.calls.copy()
    assert arena.grow(block, 2 * N) is block
    assert gpu.calls == calls


# On the stream of a Bump, of a Pool, and of a block of a Pool.
@pytest.mark.parametrize(("kind", "own"), [(Bump, True), (Pool, True), (Pool, False)])
def test_contents_of_a_block_whose_stream_was_closed(gpu, kind, own):
    """They are there on return: nobody can make another stream wait for that one."""
    stream, other = cuda.Stream(), cuda.Stream()
    arena = kind(MIB, cuda.Device(), stream=stream if own else None)
    block = arena.alloc(N, stream=None if own else stream)
    block.fill(7, stream=stream)
    stream.synchronize()
    behind = arena.alloc(1)
    stream.close()
    grown = arena.grow(block, 64 * N)
    assert grown is not block, "it did not move"
    seen = reads(gpu, handle_of(other), grown.address, N)
    backwards(gpu)
    assert set(seen[0]) == {7}
    del behind
