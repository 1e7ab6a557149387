"""Blocks that are allocated in a capture belong to the graph. On the simulated driver."""

import gc
import os

import pytest
from capsules import Consumer
from cuda_machine import Wrapped
from cuda_support import (
    ALLOCATORS,
    LEGACY,
    MIB,
    NON_BLOCKING,
    PER_THREAD,
    SOURCES,
    a_gpu,
    backwards,
    content,
    graph_of,
    let_wait,
    new_stream,
    sample,
    samples,
    slowly_fill,
)
from helpers import in_threads, poke
from simulated_driver import OUT_OF_MEMORY, UNKNOWN
from simulated_gpu import GLOBAL, RELAXED
from stream_wrappers import Protocol

from arenapy import OutOfMemory, Pool, cuda

KIB = 1 << 10
LAUNCHES = 300
MODES = [GLOBAL, 1, RELAXED]
NAMES = {
    "object": lambda stream: stream,
    "another object each time": lambda stream: Wrapped(stream.handle_),
    "external": lambda stream: Protocol(stream.handle_),
    "integer": lambda stream: stream.handle_,
}


def big_pool(**options):
    return Pool(48 * MIB, cuda.Device(), **options)


def chain(gpu, pool, s, n, nbytes=64 * KIB, name=lambda stream: stream):
    """n temporaries, each of them written and read in the capture; where, and what was seen."""
    addresses, seen = [], []
    for i in range(n):
        block = pool.alloc(nbytes, stream=name(s))
        addresses.append(block.address)
        slowly_fill(gpu, s, block, i + 1)
        seen.append(samples(gpu, s, block))
        del block
    return addresses, seen


def taken(gpu):
    """Bytes of the device, and bytes of the host that are pinned."""
    return gpu.memory.used[0] + sum(host.nbytes for host in gpu.memory.registered.values())


def expect(seen, launches=1):
    assert seen == [[{i + 1}] * launches for i in range(len(seen))]


# What a graph has ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_temporaries_of_a_capture_share_memory(gpu, name, mode):
    """Which takes no more than one of them, though the stream is named in another way each time."""
    pool, s = big_pool(), new_stream(gpu)
    gpu.begin_capture(s.handle_, mode)
    addresses, seen = chain(gpu, pool, s, 50, name=NAMES[name])
    assert len(set(addresses)) == 1
    graph = graph_of(gpu, s)
    assert pool.stats().pending_bytes == 64 * KIB
    gpu.replay(graph, s.handle_)
    backwards(gpu)
    expect(seen)
    gpu.destroy_graph(graph)
    assert pool.stats().pending_bytes == 0
    pool.check()


@pytest.mark.parametrize("call", ["cuUserObjectCreate", "cuGraphRetainUserObject"])
def test_threads_that_allocate_in_one_capture_share_its_memory(gpu, call):
    """Another thread does so for the first time just when this one does."""
    pool, s = big_pool(), new_stream(gpu)
    gpu.begin_capture(s.handle_, RELAXED)
    theirs = []

    def allocate():
        with gpu.on(0):
            return pool.alloc(64 * KIB, stream=s).address

    def between(name):
        if name == call:
            gpu.before_call = None
            theirs.extend(in_threads(allocate))

    gpu.before_call = between
    block = pool.alloc(64 * KIB, stream=s)
    assert theirs == [block.address]
    del block
    gpu.destroy_graph(graph_of(gpu, s))
    assert pool.stats().pending_bytes == 0


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.no_sanitizer  # a long count; other tests run the same code there
@pytest.mark.full
def test_many_launches_beside_other_streams(gpu, safe):
    """They get the bytes that are free, again and again. Of memory that was allocated without the
    captured stream's name nobody knows that a graph has it, and they get that, too."""
    pool, s = Pool(8 * MIB, cuda.Device()), new_stream(gpu)
    others = [new_stream(gpu), new_stream(gpu, 0), LEGACY]
    former = [pool.alloc(64 * KIB, stream=one) for one in others]
    del former
    gpu.begin_capture(s.handle_, RELAXED)
    blocks = [pool.alloc(64 * KIB, stream=s if safe else others[0]) for _ in range(4)]
    seen = []
    for i, block in enumerate(blocks):
        slowly_fill(gpu, s, block, i + 1)
    for block in blocks:
        seen.append(samples(gpu, s, block))
    del block, blocks
    graph = graph_of(gpu, s)
    for i in range(LAUNCHES):
        gpu.replay(graph, s.handle_)
        for k, other in enumerate(others):
            block = pool.alloc(64 * KIB, stream=other)
            slowly_fill(gpu, other, block, 100 + k)
            gpu.step(i)
            del block
        if i % 100 == 0:
            backwards(gpu)
            if safe:  # or the graph would touch memory that the driver has
                pool.trim()
            pool.check()
    gpu.drain()
    right = seen == [[{i + 1}] * LAUNCHES for i in range(4)]
    assert right == safe
    gpu.destroy_graph(graph)
    pool.stats()


def test_figures(gpu):
    """A graph's blocks are live, and pending once they are released: nobody gets them."""
    pool, s = big_pool(), new_stream(gpu)
    gpu.begin_capture(s.handle_)
    kept = pool.alloc(MIB, stream=s)
    released = pool.alloc(2 * MIB, stream=s)
    address = released.address
    released.release()
    for _ in range(2):
        stats = pool.stats()
        assert (stats.allocated_bytes, stats.pending_bytes) == (MIB, 2 * MIB)
        assert (stats.active_allocations, stats.total_allocations) == (1, 2)
        states = {block.address: block.state for block in pool.blocks()}
        assert (states[kept.address], states[address]) == ("live", "pending")
        assert stats.idle_bytes + 3 * MIB == stats.reserved_bytes
        pool.check()
        if s is not None:
            graph, s = graph_of(gpu, s), None
    del kept
    gpu.drain()
    assert pool.stats().pending_bytes == 3 * MIB
    assert pool.stats().largest_free_block == pool.stats().idle_bytes == MIB
    gpu.destroy_graph(graph)
    stats = pool.stats()
    assert (stats.allocated_bytes, stats.pending_bytes, stats.active_allocations) == (0, 0, 0)
    assert pool.trim() == stats.reserved_bytes
    pool.check()


def test_memory_of_a_graph_does_not_make_a_pool_take_what_streams_keep(gpu):
    """It counts as idle in the stream's cache, but nobody may have it."""
    pool, s, other = Pool(None, cuda.Device()), new_stream(gpu), new_stream(gpu)
    gpu.begin_capture(s.handle_)
    pool.alloc(36 * MIB, stream=s).release()
    graph = graph_of(gpu, s)
    address = pool.alloc(4 * MIB, stream=other).address
    for nbytes in (6 * MIB, 6 * MIB):
        pool.alloc(nbytes, stream=new_stream(gpu))  # the pool grows
    assert pool.alloc(4 * MIB, stream=other).address == address
    gpu.destroy_graph(graph)
    pool.check()


@pytest.mark.parametrize("when", ["in it", "after it"])
@pytest.mark.parametrize("name", NAMES)
def test_a_block_that_outlives_the_capture(gpu, name, when):
    """The graph has it until it is gone, and so has the stream what it is given afterwards."""
    pool, s, other = Pool(2 * MIB, cuda.Device(), 2 * MIB), new_stream(gpu), new_stream(gpu)
    named = NAMES[name](s)
    gpu.begin_capture(s.handle_)
    block = pool.alloc(2 * MIB, stream=named)
    slowly_fill(gpu, s, block, 7)
    if when == "in it":
        del block
    graph = graph_of(gpu, s)
    if when == "after it":
        gpu.replay(graph, other.handle_)
        let_wait(gpu, s, other)
        late = samples(gpu, s, block)
        gpu.destroy_graph(graph)
        del block
        with pytest.raises(OutOfMemory, match="wait, outside of captures, for the streams"):
            pool.alloc(2 * MIB, stream=other)
    else:
        with pytest.raises(OutOfMemory):
            pool.alloc(2 * MIB)
        gpu.destroy_graph(graph)
    backwards(gpu)
    again = pool.alloc(2 * MIB)
    slowly_fill(gpu, LEGACY, again, 1)
    backwards(gpu)
    assert when == "in it" or late == [{7}]
    pool.check()


# Who had the bytes before --------------------------------------------------------------------


@pytest.mark.parametrize("own", ["legacy", "blocking", "object", "the captured one"])
@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_graph_comes_after_who_had_its_bytes(gpu, allocator, blocking, own):
    """Whatever state that one's stream is in: the call waits for it on the host."""
    s = new_stream(gpu, 0 if blocking else NON_BLOCKING)
    stream = {
        "legacy": None, "blocking": new_stream(gpu, 0), "object": new_stream(gpu),
        "the captured one": s,
    }[own]  # fmt: skip
    one = ALLOCATORS[allocator](cuda.Device(), stream=stream)
    former = one.alloc(4 * KIB)
    address = former.address
    slowly_fill(gpu, stream or LEGACY, former, 1)
    former.release()
    gpu.begin_capture(s.handle_)
    block = one.alloc(4 * KIB, stream=s)
    assert block.address == address
    slowly_fill(gpu, s, block, 2)
    graph = graph_of(gpu, s)
    gpu.replay(graph, new_stream(gpu).handle_)
    backwards(gpu)
    assert set(content(block)) == {2}
    gpu.destroy_graph(graph)
    del block
    gpu.drain(), one.stats(), gpu.drain()
    assert one.stats().pending_bytes == 0 if allocator != "bump" else True
    one.check()


def test_a_device_that_has_no_room_for_the_wait(gpu):
    """It is said, nothing has changed, and the capture stays valid."""
    s = new_stream(gpu, 0)
    pool = Pool(4 * MIB, cuda.Device(), 4 * MIB)
    before = pool.stats()
    gpu.begin_capture(s.handle_)
    gpu.fails["cuMemAlloc"] = OUT_OF_MEMORY
    with pytest.raises(OutOfMemory, match=r"takes 2 MiB of its device.*before the capture"):
        pool.alloc(MIB, stream=s)
    gpu.fails.clear()
    assert pool.stats().allocated_bytes == before.allocated_bytes
    assert pool.stats().pending_bytes == 0
    assert pool.alloc(MIB, stream=s).nbytes == MIB
    pool.check()
    gpu.destroy_graph(graph_of(gpu, s))


# Growth, trim and the end --------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("source", ["device", "driver pool", "managed", "pinned"])
@pytest.mark.parametrize("blocking", [False, True])
def test_a_pool_grows_in_a_capture(gpu, blocking, source, mode):
    pool, s = Pool(16 * MIB, SOURCES[source]()), new_stream(gpu, 0 if blocking else NON_BLOCKING)
    gpu.begin_capture(s.handle_, mode)
    blocks = [pool.alloc(3 * MIB, stream=s) for _ in range(3)]
    for i, block in enumerate(blocks):
        slowly_fill(gpu, s, block, i)
    graph = graph_of(gpu, s)
    gpu.replay(graph, s.handle_)
    gpu.drain()
    assert [sample(content(block)) for block in blocks] == [{0}, {1}, {2}]
    del block, blocks
    gpu.drain()
    with pytest.raises(OutOfMemory):
        pool.alloc(12 * MIB)
    gpu.destroy_graph(graph)
    gpu.drain()
    assert pool.alloc(12 * MIB).nbytes == 12 * MIB
    pool.check()


@pytest.mark.parametrize("how", ["trim", "defragment", "trim_after", "memory is short"])
@pytest.mark.parametrize("during", [True, False])
def test_a_pool_that_is_trimmed_leaves_a_graphs_blocks(gpu, during, how):
    pool = Pool(8 * MIB, cuda.Device(), trim_after=0.001 if how == "trim_after" else None)
    s, other = new_stream(gpu), new_stream(gpu)

    def trim():
        if how == "trim_after":
            pool.alloc(4 * KIB, stream=other), pool._trim_stale()
        elif how == "memory is short":
            with pytest.raises(OutOfMemory):
                pool.alloc(7 * MIB)
        else:
            getattr(pool, how)()

    gpu.begin_capture(s.handle_)
    kept = pool.alloc(MIB, stream=s)
    addresses, seen = chain(gpu, pool, s, 2, MIB)
    slowly_fill(gpu, s, kept, 3)
    seen.append(samples(gpu, s, kept))
    if during:
        trim()
        more, _ = chain(gpu, pool, s, 1, MIB)
        assert len({*addresses, *more}) == 1, "what is free for the capture stays so"
    graph = graph_of(gpu, s)
    for i in range(3):
        trim()
        gpu.replay(graph, other.handle_)
        with_others = pool.alloc(MIB, stream=other)
        slowly_fill(gpu, other, with_others, 99)
        del with_others
        backwards(gpu)
        expect(seen, i + 1)
    pool.check()
    gpu.destroy_graph(graph)
    del kept
    gpu.drain()
    pool.stats(), gpu.drain()
    assert pool.stats().pending_bytes == 0


@pytest.mark.parametrize("buffers", [True, False])
@pytest.mark.parametrize("launched", [True, False])
def test_a_graph_that_outlives_its_pool(launched, buffers):
    """Its memory is the driver's when the graph is gone."""
    with a_gpu() as gpu:
        pool, s = Pool(None, cuda.Device()), new_stream(gpu)
        other = Pool(None, cuda.Device())
        gpu.begin_capture(s.handle_)
        _, seen = chain(gpu, pool, s, 5, MIB)
        kept = pool.alloc(MIB, stream=s)
        slowly_fill(gpu, s, kept, 6)
        seen.append(samples(gpu, s, kept))
        graph = graph_of(gpu, s)
        if not buffers:
            del kept
        del pool
        gc.collect()
        kept = None
        gc.collect()
        for i in range(10):
            block = other.alloc(MIB)
            slowly_fill(gpu, LEGACY, block, 99)
            if launched:
                gpu.replay(graph, s.handle_)
                backwards(gpu)
                expect(seen, i + 1)
        used = gpu.memory.used[0]
        gpu.destroy_graph(graph)
        gpu.drain()
        other.stats()
        assert gpu.memory.used[0] < used, "it was given back"
        del block, other


@pytest.mark.parametrize("how", ["copy", "clone", "update"])
def test_what_is_made_of_a_graph_has_its_blocks(gpu, how):
    """An executable one, which is launched; a clone; not what was replaced by an update."""
    pool, s = Pool(4 * MIB, cuda.Device(), 4 * MIB), new_stream(gpu)
    graphs, seen = [], []
    for value in (1, 2):
        gpu.begin_capture(s.handle_)
        block = pool.alloc(2 * MIB, stream=s)
        slowly_fill(gpu, s, block, value)
        seen.append(samples(gpu, s, block))
        del block
        graphs.append(graph_of(gpu, s))
    executable = gpu.copy_of(graphs[0])
    if how == "clone":
        executable = gpu.copy_of(executable)
    gpu.replay(executable, s.handle_)
    if how == "update":
        gpu.update(executable, graphs[1])
        gpu.replay(executable, s.handle_)
    pending = lambda: pool.stats().pending_bytes  # noqa: E731
    gpu.destroy_graph(graphs[0])
    assert pending() == 4 * MIB
    gpu.destroy_graph(graphs[1])
    gpu.drain()
    assert seen == ([[{1}], [{2}]] if how == "update" else [[{1}], []])
    if how == "clone":
        assert pending() == 2 * MIB
        for handle in list(gpu.graph_handles.things):
            gpu.destroy_graph(handle)
    else:
        assert pending() == 2 * MIB
        gpu.destroy_graph(executable)
    assert pending() == 0
    pool.check()


def test_one_capture_after_another_needs_no_more_memory(gpu):
    """As of a program that captures again for each shape of its input."""
    pool, s = Pool(None, cuda.Device()), new_stream(gpu)
    reserved = set()
    for _ in range(20):
        gpu.begin_capture(s.handle_)
        chain(gpu, pool, s, 3, 5 * MIB)
        graph = graph_of(gpu, s)
        gpu.replay(graph, s.handle_)
        gpu.destroy_graph(graph)
        gpu.drain()
        reserved.add(pool.stats().reserved_bytes)
    assert len(reserved) == 1


RECAPTURING = {**ALLOCATORS, "growing pool": lambda source: Pool(None, source)}


@pytest.mark.sampled
@pytest.mark.parametrize("of", ["the stream", "another one"])
@pytest.mark.parametrize("library", ["ours", "another one"])
@pytest.mark.parametrize("source", [*SOURCES.values(), lambda: cuda.Device(grow=True)])
@pytest.mark.parametrize("allocator", RECAPTURING)
@pytest.mark.parametrize(
    "when",
    ["before the launch", "before the graph goes", "afterwards", "in the next capture", "replaced"],
)
def test_a_program_that_asks_only_in_captures_needs_no_more_memory_or_time(
    gpu, when, allocator, source, library, of
):
    """All are of one stream, so it is captured whenever the allocator looks for what is over."""
    one = RECAPTURING[allocator](source())
    s = cuda.Stream() if library == "ours" else new_stream(gpu)
    handle = s.handle if library == "ours" else s.handle_
    name = s if of == "the stream" else new_stream(gpu)
    calls, used, block = [], [], None
    for _ in range(600):
        before = gpu.calls.total()
        if allocator == "bump":
            one.reset()
        gpu.begin_capture(handle, RELAXED)
        if when == "in the next capture":
            block = None
        block = one.alloc(60_000, stream=name)
        block.record_stream(s)
        block.fill(1, stream=s)
        graph = gpu.end_capture(handle)
        if when == "before the launch":
            block = None
        gpu.replay(graph, handle)
        if when == "before the graph goes":
            block = None
        gpu.destroy_graph(graph)
        gpu.drain()
        if when == "afterwards":
            block = None
        calls.append(gpu.calls.total() - before)
        used.append(taken(gpu))
    assert max(used) <= 24 * MIB  # 36 MB were allocated
    assert sum(calls[500:]) <= 1.3 * sum(calls[300:400])
    one.check()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_program_that_has_an_allocator_for_each_capture_needs_no_more_memory(
    gpu, allocator, source
):
    """The memory of each is given back, or kept until it may be, while the stream is captured."""
    s, one, block, calls = cuda.Stream(), None, None, []
    for _ in range(100):
        before = gpu.calls.total()
        gpu.begin_capture(s.handle, RELAXED)
        one = ALLOCATORS[allocator](SOURCES[source]())
        block = one.alloc(60_000, stream=s)
        block.fill(1, stream=s)
        graph = gpu.end_capture(s.handle)
        gpu.replay(graph, s.handle)
        gpu.destroy_graph(graph)
        gpu.drain()
        assert taken(gpu) <= 48 * MIB
        calls.append(gpu.calls.total() - before)
    assert sum(calls[80:]) <= 1.3 * sum(calls[40:60])
    del one, block


def test_a_pool_that_ends_keeps_only_regions_that_a_graph_has_blocks_in(gpu):
    pool, s = Pool(None, cuda.Device()), new_stream(gpu)
    gpu.begin_capture(s.handle_)
    blocks = [pool.alloc(16 * MIB), pool.alloc(2 * MIB, stream=s), pool.alloc(16 * MIB)]
    graph = graph_of(gpu, s)
    assert gpu.memory.used[0] == 34 * MIB
    del blocks, pool
    gc.collect()
    assert gpu.memory.used[0] == 2 * MIB
    gpu.destroy_graph(graph)
    gpu.drain()
    Pool(None, cuda.Device()).stats()
    assert gpu.memory.used[0] == 0


# Captures of several streams -----------------------------------------------------------------


def test_streams_of_one_capture_have_blocks_of_their_own(gpu):
    """A stream that joined does not get what another one of the capture is done with: they may run
    at the same time."""
    pool, s, joined = big_pool(), new_stream(gpu), new_stream(gpu)
    gpu.begin_capture(s.handle_)
    first, seen = chain(gpu, pool, s, 3)
    let_wait(gpu, joined, s)
    for _ in range(2):
        mine, one = chain(gpu, pool, s, 3)
        theirs, other = chain(gpu, pool, joined, 3)
        assert {*mine} == {*first} and len({*theirs}) == 1 and not {*mine} & {*theirs}
        seen += one + other
    let_wait(gpu, s, joined)
    again, one = chain(gpu, pool, s, 1)
    assert again[0] == first[0]
    graph = graph_of(gpu, s)
    gpu.replay(graph, new_stream(gpu).handle_)
    backwards(gpu)
    assert all(len(found) == 1 and len(found[0]) == 1 for found in seen + one)
    expect(seen[:3])
    gpu.destroy_graph(graph)
    assert pool.stats().pending_bytes == 0
    pool.check()


def test_a_block_that_two_streams_of_a_capture_use(gpu):
    """It is nobody's until the graph is gone: they may run at the same time."""
    pool, s, joined = big_pool(), new_stream(gpu), new_stream(gpu)
    gpu.begin_capture(s.handle_)
    block = pool.alloc(64 * KIB, stream=s)
    slowly_fill(gpu, s, block, 5)
    let_wait(gpu, joined, s)
    seen, address = samples(gpu, joined, block), block.address
    block.record_stream(joined)
    del block
    addresses, _ = chain(gpu, pool, s, 5)
    assert address not in addresses
    let_wait(gpu, s, joined)
    graph = graph_of(gpu, s)
    gpu.replay(graph, s.handle_)
    backwards(gpu)
    assert seen == [{5}]
    gpu.destroy_graph(graph)
    assert pool.stats().pending_bytes == 0


def test_two_captures_at_once(gpu):
    pool, streams = big_pool(), [new_stream(gpu), new_stream(gpu)]
    for s in streams:
        gpu.begin_capture(s.handle_, RELAXED)
    found = [chain(gpu, pool, s, 2) for s in streams * 2]
    addresses = [{*one} for one, _ in found]
    assert addresses[0] == addresses[2] and addresses[1] == addresses[3]
    assert not addresses[0] & addresses[1]
    graphs = [graph_of(gpu, s) for s in streams]
    for graph in graphs:
        gpu.replay(graph, new_stream(gpu).handle_)
    backwards(gpu)
    for _, seen in found:
        expect(seen)
    for k, graph in enumerate(graphs):
        gpu.destroy_graph(graph)
        assert pool.stats().pending_bytes == (1 - k) * 64 * KIB


def test_a_later_capture_of_the_same_stream_has_others(gpu):
    """Both graphs can be launched at the same time."""
    pool, s = big_pool(), new_stream(gpu)
    found, graphs = [], []
    for _ in range(2):
        gpu.begin_capture(s.handle_)
        found.append(chain(gpu, pool, s, 2))
        graphs.append(graph_of(gpu, s))
        pool.stats()
    assert not {*found[0][0]} & {*found[1][0]}
    for graph in graphs:
        gpu.replay(graph, new_stream(gpu).handle_)
    backwards(gpu)
    for _, seen in found:
        expect(seen)
    for graph in graphs:
        gpu.destroy_graph(graph)


def test_a_block_of_one_graph_that_a_later_capture_uses(gpu):
    pool, s, other = Pool(2 * MIB, cuda.Device(), 2 * MIB), new_stream(gpu), new_stream(gpu)
    gpu.begin_capture(s.handle_)
    block = pool.alloc(2 * MIB, stream=s)
    slowly_fill(gpu, s, block, 1)
    first = graph_of(gpu, s)
    gpu.begin_capture(other.handle_)
    block.record_stream(other)
    seen = samples(gpu, other, block)
    del block
    second = graph_of(gpu, other)
    gpu.replay(first, s.handle_)
    let_wait(gpu, other, s)
    gpu.destroy_graph(first)
    gpu.drain()
    for _ in range(2):
        with pytest.raises(OutOfMemory):
            pool.alloc(2 * MIB)
        gpu.drain()
    gpu.replay(second, other.handle_)
    gpu.drain()
    assert seen == [{1}]
    gpu.destroy_graph(second)
    assert pool.alloc(2 * MIB).nbytes == 2 * MIB


def test_the_default_stream_of_a_thread(gpu):
    pool = big_pool(stream=new_stream(gpu))
    gpu.begin_capture(PER_THREAD, RELAXED)
    addresses, seen = chain(gpu, pool, PER_THREAD, 5)
    assert len({*addresses}) == 1

    def elsewhere():
        with gpu.on(0):
            return pool.alloc(64 * KIB, stream=PER_THREAD).address

    assert in_threads(elsewhere)[0] not in addresses
    graph = graph_of(gpu, PER_THREAD)
    gpu.replay(graph, PER_THREAD)
    backwards(gpu)
    expect(seen)
    gpu.destroy_graph(graph)
    assert pool.stats().pending_bytes == 0


# What a call does with such a block ----------------------------------------------------------


def test_copies_and_dlpack_in_the_capture(gpu):
    """They belong to the graph, wait for nothing, and keep no block from the next one."""
    pool, s = big_pool(), new_stream(gpu, 0)
    origin = pool.alloc(4 * KIB)
    poke(origin.address, 4 * KIB, 3)
    gpu.begin_capture(s.handle_)
    first = pool.alloc(4 * KIB, stream=s)
    calls = gpu.calls.copy()
    second = pool.alloc(4 * KIB, stream=s)
    first.fill(4, stream=s)
    second.copy_from(first, stream=s)
    assert gpu.calls["cuEventSynchronize"] == calls["cuEventSynchronize"]
    assert gpu.calls["cuMemAlloc"] == calls["cuMemAlloc"]
    consumer = Consumer(second.__dlpack__(stream=s.handle_))
    seen, addresses = samples(gpu, s, second), {first.address, second.address}
    consumer.delete()
    with pytest.raises(cuda.CudaError, match="captured"):
        first.fill(1)
    with pytest.raises(cuda.CudaError, match="captured"):
        first.copy_to(bytearray(4 * KIB))
    del first, second
    blocks = [pool.alloc(4 * KIB, stream=s) for _ in range(2)]
    assert {block.address for block in blocks} == addresses
    del blocks
    graph = graph_of(gpu, s)
    gpu.replay(graph, s.handle_)
    gpu.drain()
    assert seen == [{4}]
    gpu.destroy_graph(graph)
    assert pool.stats().pending_bytes == 0


def test_a_result_is_read_after_the_capture(gpu):
    pool, s, other = big_pool(), cuda.Stream(), cuda.Stream()
    gpu.begin_capture(s.handle)
    block = pool.alloc(4 * KIB, stream=s)
    block.fill(9, stream=s)
    graph = graph_of(gpu, s.handle)
    gpu.replay(graph, s.handle)
    got = bytearray(4 * KIB)
    block.copy_to(got)
    assert {*got} == {9}
    gpu.replay(graph, other.handle)
    target = pool.alloc(4 * KIB, stream=other)
    target.copy_from(block, stream=other)
    target.copy_to(got, stream=other)
    other.synchronize()
    assert {*got} == {9}
    block.__cuda_array_interface__, block.__dlpack__(stream=other.handle)
    gpu.destroy_graph(graph)
    del block, target
    gpu.drain(), pool.stats(), gpu.drain()
    assert pool.stats().pending_bytes == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("allocator", ["bump", "pool"])
def test_a_block_does_not_move_in_its_capture(gpu, allocator, source, mode):
    """It has its contents only when the graph runs. Nothing changes."""
    one, s = ALLOCATORS[allocator](SOURCES[source]()), new_stream(gpu)
    gpu.begin_capture(s.handle_, mode)
    block = one.alloc(64 * KIB, stream=s)
    behind = one.alloc(4 * KIB, stream=s)
    slowly_fill(gpu, s, block, 5)
    with pytest.raises(cuda.CudaError, match="cannot move to grow"):
        one.grow(block, 100 * KIB)
    seen = samples(gpu, s, block)
    graph = graph_of(gpu, s)
    gpu.replay(graph, s.handle_)
    backwards(gpu)
    assert seen == [{5}] and block.nbytes == 64 * KIB
    gpu.destroy_graph(graph)
    one.check()
    del behind


def test_a_block_that_grows_after_its_capture(gpu):
    """The graph writes to the bytes of its temporaries whenever it is launched."""
    pool, s = big_pool(), new_stream(gpu)
    gpu.begin_capture(s.handle_)
    (where,), _ = chain(gpu, pool, s, 1, 2 * MIB)
    block = pool.alloc(MIB, stream=s)
    slowly_fill(gpu, s, block, 7)
    graph = graph_of(gpu, s)
    gpu.replay(graph, s.handle_)
    block = pool.grow(block, 2 * MIB)
    assert block.address != where
    late = []
    for _ in range(2):
        gpu.replay(graph, s.handle_)
        gpu.drain()
        late.append(sample(content(block)[:MIB]))
    assert late == [{7}, {7}]
    gpu.destroy_graph(graph)
    del block
    gpu.drain(), pool.stats(), gpu.drain()
    assert pool.stats().pending_bytes == 0
    pool.check()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_every_allocator_serves_a_capture(gpu, allocator, source):
    """Only a Pool of a device has the same bytes for the next block of the capture."""
    one, s = ALLOCATORS[allocator](SOURCES[source]()), new_stream(gpu)
    gpu.begin_capture(s.handle_, RELAXED)
    block = one.alloc(4 * KIB, stream=s)
    slowly_fill(gpu, s, block, 5)
    seen = samples(gpu, s, block)
    address = block.address
    del block
    if hasattr(one, "reset"):
        one.reset()
    graph = graph_of(gpu, s)
    gpu.drain()
    other = one.alloc(4 * KIB)
    assert other.address != address
    poke(other.address, 4 * KIB, 1)
    gpu.replay(graph, s.handle_)
    gpu.drain()
    assert seen == [{5}]
    gpu.destroy_graph(graph)
    del other
    gpu.drain(), one.stats()
    if hasattr(one, "reset"):
        one.reset()
    assert one.alloc(4 * KIB).address == address
    one.check()


# Failures ------------------------------------------------------------------------------------


def test_a_capture_that_becomes_invalid(gpu):
    """Its graph never is; what it had is free."""
    pool, s = big_pool(), new_stream(gpu)
    gpu.begin_capture(s.handle_)
    block = pool.alloc(MIB, stream=s)
    chain(gpu, pool, s, 3, MIB)
    assert gpu.call("cuStreamQuery", s.handle_)  # which makes it invalid
    gpu.errors.clear()
    del block
    assert gpu.end_capture(s.handle_) == 0
    assert pool.stats().pending_bytes == 0
    assert pool.alloc(MIB, stream=s).nbytes == MIB
    pool.check()


@pytest.mark.parametrize(
    "name", ["cuUserObjectCreate", "cuGraphRetainUserObject", "cuStreamGetCaptureInfo"]
)
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_graph_that_the_driver_does_not_let_us_follow(gpu, allocator, name):
    """The call fails, and nothing has changed."""
    one, s = ALLOCATORS[allocator](cuda.Device()), new_stream(gpu)
    one.alloc(4 * KIB).release()
    before = one.stats()
    gpu.begin_capture(s.handle_)
    gpu.fails[name] = UNKNOWN
    with pytest.raises(cuda.CudaError):
        one.alloc(4 * KIB, stream=s)
    gpu.fails.clear()
    assert one.stats().allocated_bytes == before.allocated_bytes if allocator != "bump" else True
    one.check()
    assert one.alloc(4 * KIB, stream=s).nbytes == 4 * KIB
    gpu.destroy_graph(graph_of(gpu, s))


def test_a_capture_that_ends_within_the_call(gpu):
    """By another thread."""
    pool, s = big_pool(), new_stream(gpu)
    for point in range(1, 12):
        gpu.begin_capture(s.handle_, RELAXED)
        left, graphs = [point], []

        def before(name, left=left, graphs=graphs):
            left[0] -= 1
            if left[0] == 0:
                graphs.append(graph_of(gpu, s))

        gpu.before_call = before
        block = None
        try:
            block = pool.alloc(64 * KIB, stream=s)
        except cuda.CudaError as error:
            assert "ended" in str(error) or "any more" in str(error)
        gpu.before_call = None
        gpu.destroy_graph(graphs[0] if graphs else graph_of(gpu, s))
        del block
        gpu.drain(), pool.stats(), gpu.drain()
        assert pool.stats().pending_bytes == 0
        pool.check()


def test_a_forked_child(gpu):
    """It has nothing of the graph, and says so."""
    pool, s = big_pool(), new_stream(gpu)
    gpu.begin_capture(s.handle_)
    kept = pool.alloc(MIB, stream=s)
    chain(gpu, pool, s, 3, MIB)
    child = os.fork()
    if child == 0:
        try:
            pool.alloc(MIB, stream=s)
        except (cuda.Unavailable, ValueError):
            del kept
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    slowly_fill(gpu, s, kept, 1)
    gpu.destroy_graph(graph_of(gpu, s))
    del kept
    gpu.drain(), pool.stats(), gpu.drain()
    assert pool.stats().pending_bytes == 0


def test_threads_that_capture_and_allocate(gpu):
    pool = Pool(32 * MIB, cuda.Device())
    wrong = []

    def work():
        with gpu.on(0):
            s = new_stream(gpu)
            for i in range(20):
                gpu.begin_capture(s.handle_, RELAXED)
                addresses, _ = chain(gpu, pool, s, 5)
                if len({*addresses}) > 1:
                    wrong.append(addresses)
                graph = graph_of(gpu, s)
                beside = pool.alloc(64 * KIB, stream=s)
                if beside.address in addresses:
                    wrong.append(i)
                gpu.replay(graph, s.handle_)
                gpu.destroy_graph(graph)
                del beside

    in_threads(work, work, work)
    assert not wrong
    gpu.drain(), pool.stats(), gpu.drain()
    assert pool.stats().pending_bytes == 0
    pool.check()


@pytest.mark.full
def test_a_collection_of_garbage_that_allocates_for_a_further_capture(gpu):
    """It may come while the Pool looks at what its graphs have, and adds a graph to them."""
    pool = big_pool()
    seen, held = 0, []

    def captured():
        s = new_stream(gpu)
        gpu.begin_capture(s.handle_, RELAXED)
        held.append(pool.alloc(KIB, stream=s))

    def collected(phase, info):
        nonlocal seen
        seen += phase == "stop"
        if phase == "stop" and seen == at:
            captured()

    for _ in range(10):
        captured()
    pairs = [(i, i) for i in range(5000)]  # CPython keeps free ones, and takes those first
    thresholds = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.freeze()  # collections take no time
    try:
        for strike in range(1, 150):
            seen, at = 0, strike
            gc.set_threshold(1)
            captured()
            gc.set_threshold(*thresholds)
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(collected)
        gc.unfreeze()
    del pairs
    assert seen >= 150, "garbage was not collected"
    assert len({block.address for block in held}) == len(held)
    pool.check()


def test_debug_mode(gpu):
    pool, s = Pool(8 * MIB, cuda.Device(), debug=True), new_stream(gpu)
    gpu.begin_capture(s.handle_)
    _, seen = chain(gpu, pool, s, 5)
    kept = pool.alloc(64 * KIB, stream=s)
    graph = graph_of(gpu, s)
    gpu.replay(graph, s.handle_)
    gpu.drain()
    expect(seen)
    del kept
    gpu.destroy_graph(graph)
    gpu.drain(), pool.stats(), gpu.drain()
    assert pool.stats().pending_bytes == 0
    pool.check()
