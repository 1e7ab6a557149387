"""The streams that a block was told of: what comes after them by itself, how long they are kept.

Copies and fills without a stream, and readers of the CUDA array interface, whatever they do with
the stream that it names. On the simulated driver.
"""

import contextlib
import ctypes
import functools
import gc
import random
import sys
import types
import weakref
from functools import partial

import hypothesis
import pytest
from capsules import Consumer
from cuda_machine import NON_BLOCKING, Wrapped
from cuda_support import (
    ALLOCATORS,
    HOST_VISIBLE,
    LEGACY,
    MIB,
    PER_THREAD,
    SOURCES,
    a_gpu,
    backwards,
    content,
    let_wait,
    new_stream,
    reads,
    slowly_fill,
)
from helpers import in_threads, peek, poke
from hypothesis import given
from hypothesis import strategies as st
from stream_wrappers import KNOWN_OWNERS, NOT_OWNERS, new_handle

from arenapy import OutOfMemory, Pool, Slab, cuda
from arenapy.cuda.stream_ref import OWNERS

N = 4096
OLD, NEW = 1, 7


# ---- how a block is told of a stream, which then writes ----


def by_a_copy(gpu, block, stream):
    source = cuda.Device().region(N).buffer()
    poke(source.address, N, NEW)
    block.copy_from(source, stream=stream)
    return source


def by_a_fill(gpu, block, stream):
    block.fill(NEW, stream=stream)


def by_recording(gpu, block, stream):
    block.record_stream(stream)
    slowly_fill(gpu, stream, block, NEW)


def by_dlpack(gpu, block, stream):
    consumer = Consumer(block.__dlpack__(stream=stream.handle_))
    slowly_fill(gpu, stream, block, NEW)
    consumer.delete()


WAYS = (by_a_copy, by_a_fill, by_recording, by_dlpack)
EACH_WAY = pytest.mark.parametrize("tell", WAYS, ids=[one.__name__ for one in WAYS])


# ---- without a stream ----


def copied_to_the_host(block):
    got = bytearray(N)
    block.copy_to(got)
    return bytes(got)


def copied_to_a_block(block):
    other = Pool(4 * MIB, cuda.Device()).alloc(N)
    other.copy_from(block)
    return peek(other.address, N)


def copied_to_pinned_memory(block):
    other = Pool(4 * MIB, cuda.Pinned(huge_pages=None)).alloc(N)
    block.copy_to(other)
    return peek(other.address, N)


def copied_in_a_batch(block):
    got = bytearray(N)
    cuda.copy_batch([(memoryview(got)[:100], block[:100]), (memoryview(got)[100:], block[100:])])
    return bytes(got)


LOOKS = (copied_to_the_host, copied_to_a_block, copied_to_pinned_memory, copied_in_a_batch)


@pytest.mark.parametrize("look", LOOKS, ids=[one.__name__ for one in LOOKS])
@EACH_WAY
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("own", ["legacy", "an object"])
@pytest.mark.sampled
def test_a_copy_without_a_stream_comes_after_them(own, source, tell, look):
    with a_gpu() as gpu:
        options = {} if own == "legacy" or source in HOST_VISIBLE else {"stream": new_stream(gpu)}
        for make in ALLOCATORS.values():
            block = make(SOURCES[source](), **options).alloc(N)
            poke(block.address, N, OLD)
            kept = [tell(gpu, block, new_stream(gpu)) for _ in range(2)]
            assert set(look(block)) == {NEW}
            del block, kept
            backwards(gpu)


@EACH_WAY
@pytest.mark.parametrize("source", SOURCES)
def test_what_is_written_without_a_stream_stays(source, tell):
    """It comes after what they still write, or read."""
    with a_gpu() as gpu:
        block = Pool(4 * MIB, SOURCES[source]()).alloc(N)
        for fill in (True, False):
            stream = new_stream(gpu)
            kept = tell(gpu, block, stream)
            seen = reads(gpu, stream.handle_, block.address, N)
            block.fill(OLD) if fill else block.copy_from(bytes([OLD]) * N)
            backwards(gpu)
            assert seen == [bytes([NEW]) * N]
            assert set(peek(block.address, N)) == {OLD}
            del kept
        del block


def test_with_a_stream_the_order_is_the_users(gpu):
    """Who names a stream has said what comes after what."""
    pool, s = Pool(4 * MIB, cuda.Device()), new_stream(gpu)
    block = pool.alloc(N)
    block.fill(NEW, stream=s)
    block.copy_to(pool.alloc(N), stream=new_stream(gpu))
    assert gpu.calls["cuStreamWaitEvent"] == 2, "of each stream for the own one"


# ---- readers of the CUDA array interface ----

READERS = {
    "legacy, waits": (True, LEGACY),
    "legacy": (False, LEGACY),
    "blocking": (False, 0),
    "non-blocking, waits": (True, NON_BLOCKING),
    "non-blocking": (False, NON_BLOCKING),
}


@pytest.mark.parametrize("reader", READERS)
@EACH_WAY
@pytest.mark.parametrize("source", [one for one in SOURCES if one != "driver pool"])
@pytest.mark.parametrize("how", ["own", "lane", "told"])
@pytest.mark.sampled
def test_a_reader_of_the_interface_comes_after_them(how, source, tell, reader):
    """Also one that does not wait for the stream that it names, as torch."""
    waits, kind = READERS[reader]
    with a_gpu() as gpu:
        s = new_stream(gpu)
        own = how == "own" and source not in HOST_VISIBLE
        pool = Pool(4 * MIB, SOURCES[source](), **({"stream": s} if own else {}))
        block = pool.alloc(N, stream=s if how == "lane" else None)
        poke(block.address, N, OLD)
        kept = tell(gpu, block, s)
        theirs = LEGACY if kind == LEGACY else new_stream(gpu, kind).handle_
        number = block.__cuda_array_interface__["stream"]
        if waits and number is not None:
            let_wait(gpu, theirs, number)
        seen = reads(gpu, theirs, block.address, N)
        backwards(gpu)
        assert seen == [bytes([NEW]) * N]
        del block, kept, pool


def test_the_interface_of_a_block_of_the_legacy_stream_waits_for_nothing(gpu):
    """Which is what most programs have: it is read on that stream, or on one that comes after."""
    pool = Pool(4 * MIB, cuda.Device())
    block = pool.alloc(N)
    block.fill(NEW)
    gpu.launch(LEGACY)
    gpu.launch(new_stream(gpu).handle_)
    before = gpu.calls.copy()
    assert block.__cuda_array_interface__["stream"] == 1
    assert gpu.calls == before
    assert len(gpu.queue) == 2


# ---- streams that come and go ----


class Object(Wrapped):
    """Of a library that destroys the stream with its object."""

    alive = 0

    def __init__(self, gpu, kind=NON_BLOCKING):
        super().__init__(gpu.got("cuStreamCreate", ctypes.c_void_p, kind))
        self.gpu = gpu
        Object.alive += 1

    def __del__(self):
        Object.alive -= 1
        if not self.gpu.closed:
            assert not self.gpu.call("cuStreamDestroy", self.handle_)


OWNERS[Object.__module__, Object.__qualname__] = lambda stream: True


def written_by_its_next_owner(gpu, slab):
    """The one block, on the legacy stream, before anything that does not keep it from that."""
    block = slab.alloc()
    slowly_fill(gpu, LEGACY, block, NEW)
    backwards(gpu)
    assert set(content(block)) == {NEW}


@pytest.mark.parametrize("done", ["at once", "later", "at the end"])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.sampled
def test_a_block_that_many_streams_used(source, done):
    """It keeps few of them, and waits for all."""
    with a_gpu() as gpu:
        slab = Slab(N, 1, SOURCES[source]())
        block = slab.alloc()
        poke(block.address, N, OLD)
        before, most, seen = Object.alive, 0, []
        for i in range(500):
            s = Object(gpu)
            block.record_stream(s)
            seen.append(reads(gpu, s.handle_, block.address, N))
            if done == "at once" or (done == "later" and i % 10 == 0):
                gpu.drain()
            s = None
            most = max(most, Object.alive - before)
        assert most < 50
        before = gpu.calls["cuEventRecord"]
        consumer = Consumer(block.__dlpack__(stream=1))
        events = gpu.calls["cuEventRecord"] - before
        assert events < 50
        address = consumer.tensor.data
        gpu.launch(LEGACY, lambda: poke(address, N, NEW), [(address, N)])
        backwards(gpu)
        assert all(one == [bytes([OLD]) * N] for one in seen)
        consumer.delete()
        del block
        gpu.drain()
        slab.stats(), gpu.drain()
        assert slab.stats().pending_bytes == 0
        slab.check()
        del slab, s


def test_a_stream_that_somebody_still_has_is_not_forgotten(gpu):
    """What it is given until the block is released counts, too."""
    slab = Slab(N, 1, cuda.Device())
    block = slab.alloc()
    poke(block.address, N, OLD)
    mine = Object(gpu)
    block.record_stream(mine)
    for _ in range(200):
        block.record_stream(Object(gpu))
    gpu.drain()
    seen = reads(gpu, mine.handle_, block.address, N)
    del block
    written_by_its_next_owner(gpu, slab)
    assert seen == [bytes([OLD]) * N]


FOUND_BY = {
    "reference": weakref.ref,
    "table": lambda one: partial(weakref.WeakValueDictionary(one=one).get, "one"),
    "proxy": lambda one: partial(lambda proxy: proxy, weakref.proxy(one)),
    "finalizer": lambda one: partial(lambda end: end.peek()[0], weakref.finalize(one, bool)),
}


@pytest.mark.parametrize("found_by", FOUND_BY)
@pytest.mark.parametrize("source", SOURCES)
def test_a_stream_that_a_weak_reference_finds_is_not_forgotten(gpu, source, found_by):
    """Somebody has it again, since another block keeps it."""
    pool = Pool(4 * MIB, SOURCES[source]())
    block, other = pool.alloc(N), pool.alloc(N)
    poke(block.address, N, OLD)
    mine = Object(gpu)
    find = FOUND_BY[found_by](mine)
    other.record_stream(mine)
    block.record_stream(mine)
    del mine
    for _ in range(100):
        block.record_stream(Object(gpu))
    gpu.drain()
    seen = reads(gpu, find().handle_, block.address, N)
    del block
    assert pool.stats().pending_bytes == N  # and looks what is free
    slowly_fill(gpu, LEGACY, pool.alloc(N), NEW)
    backwards(gpu)
    assert seen == [bytes([OLD]) * N]


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("many", [16, 17, 40])
@pytest.mark.parametrize("name", ["torch", *list(NOT_OWNERS)[1:]])
@pytest.mark.sampled
def test_a_stream_that_does_not_end_with_its_object_is_not_forgotten(gpu, name, many, busy):
    """torch makes an object whenever it is asked for a stream of its pool, which lives on."""
    named = {**KNOWN_OWNERS, **NOT_OWNERS}[name]
    slab = Slab(N, 1, cuda.Device())
    block = slab.alloc()
    poke(block.address, N, OLD)
    handles = [new_handle(gpu) for _ in range(many)]
    for handle in handles:
        if busy:
            gpu.launch(handle)
        block.record_stream(named(gpu, handle))
    seen = [reads(gpu, handle, block.address, N) for handle in handles]
    del block
    written_by_its_next_owner(gpu, slab)
    assert seen == [[bytes([OLD]) * N]] * many


@pytest.mark.parametrize("busy", [False, True])
def test_streams_of_our_own_are_forgotten(gpu, busy):
    """The driver destroys them while the block lives; what they do is waited for."""
    slab = Slab(N, 1, cuda.Device())
    block = slab.alloc()
    poke(block.address, N, OLD)
    before, seen = gpu.calls["cuStreamDestroy"], []
    for _ in range(200):
        s = cuda.Stream()
        block.record_stream(s)
        if busy:
            seen.append(reads(gpu, s.handle, block.address, N))
    assert gpu.calls["cuStreamDestroy"] - before > 150
    seen.append(reads(gpu, s.handle, block.address, N))  # somebody still has it
    del block
    written_by_its_next_owner(gpu, slab)
    assert all(one == [bytes([OLD]) * N] for one in seen)


@pytest.mark.parametrize("name", ["object", "number", "legacy", "thread's", "another thread's"])
def test_a_look_asks_a_stream_once_however_many_blocks_wait_for_it(gpu, name):
    pool = Pool(64 * MIB, cuda.Pinned())
    stream = new_stream(gpu)
    numbers = {"number": stream.handle_, "legacy": LEGACY}
    stream = PER_THREAD if name.endswith("thread's") else numbers.get(name, stream)

    def used():
        with gpu.on(0):
            slowly_fill(gpu, stream, pool.alloc(1), 1)
        blocks = [pool.alloc(N) for _ in range(30)]
        for block in blocks:
            block.record_stream(stream)
        return blocks

    blocks = in_threads(used)[0] if name == "another thread's" else used()
    pending, questions = [], []
    while blocks:
        for _ in range(10):
            blocks.pop().release()
            pool.stats()  # so that each has an event of its own
        before = gpu.calls["cuEventQuery"]
        pending.append(pool.stats().pending_bytes)
        questions.append(gpu.calls["cuEventQuery"] - before)
    assert pending[0] < pending[1] < pending[2]
    assert len(set(questions)) == 1, questions


def test_a_request_waits_for_no_stream_of_a_block_that_a_graph_keeps(gpu):
    pool = Pool(4 * MIB, cuda.Pinned(huge_pages=None), 4 * MIB)
    blocks = pool.alloc(2 * MIB), pool.alloc(2 * MIB)
    captured, ran = new_stream(gpu), []
    for block in blocks:
        stream = new_stream(gpu)
        gpu.launch(stream.handle_, functools.partial(ran.append, block.address), [])
        block.record_stream(stream.handle_)
    kept, free = (block.address for block in blocks)
    gpu.begin_capture(captured.handle_)
    blocks[0].record_stream(captured)
    graph = gpu.end_capture(captured.handle_)
    for block in blocks:
        block.release()
    assert pool.alloc(2 * MIB).address == free
    assert ran == [free] and kept != free
    gpu.destroy_graph(graph)


@pytest.mark.parametrize("seed", range(12))
def test_a_block_is_pending_no_longer_than_its_own_streams(seed):
    """Whatever else they are given later, and whichever of them is done first."""
    chance = random.Random(seed)
    with a_gpu(leaks=True) as gpu:
        pool = Pool(64 * MIB, cuda.Device())
        streams = [new_stream(gpu) for _ in range(3)]
        ran, waits = set(), []
        for number in range(20):
            told = chance.sample(streams, chance.randint(1, 3))
            block = pool.alloc(MIB)
            for stream in told:
                block.record_stream(stream.handle_)
            block.release()
            waits.append({(number, stream.handle_) for stream in told})
            for one in waits[-1]:  # it runs after the event of the release
                gpu.launch(one[1], functools.partial(ran.add, one), [])
            for _ in range(chance.randint(0, 10)):
                gpu.step(chance.randint(0, 5))
            left = sum(not one <= ran for one in waits)
            assert pool.stats().pending_bytes <= left * MIB
        gpu.drain()
        assert pool.stats().pending_bytes == 0


@hypothesis.settings(max_examples=max(5, hypothesis.settings.default.max_examples // 4))
@given(st.data())
def test_any_order_of_streams_that_come_and_go(data):
    """Of streams that are done and not, kept and not, the last owner of the bytes comes last."""
    with a_gpu(leaks=True) as gpu:
        slab = Slab(N, 1, cuda.Device())
        block = slab.alloc()
        poke(block.address, N, OLD)
        mine, seen = [], []
        for _ in range(data.draw(st.integers(1, 60))):
            act = data.draw(st.sampled_from(["new", "new", "new", "again", "drop", "run"]))
            if act == "new":
                mine.append(Object(gpu))
                block.record_stream(mine[-1])
                seen.append(reads(gpu, mine[-1].handle_, block.address, N))
                if data.draw(st.booleans()):
                    mine.pop()
            elif act == "again" and mine:
                one = data.draw(st.sampled_from(mine))
                seen.append(reads(gpu, one.handle_, block.address, N))
                del one
            elif act == "drop" and mine:
                mine.pop(data.draw(st.integers(0, len(mine) - 1)))
            elif act == "run":
                for _ in range(data.draw(st.integers(1, 30))):
                    gpu.step(data.draw(st.integers(0, 3)))
        del block
        written_by_its_next_owner(gpu, slab)
        assert all(one == [bytes([OLD]) * N] for one in seen)


# ---- consumers that name a number ----


@pytest.fixture
def cupy(monkeypatch):
    """What arenapy asks of CuPy: the current stream, whose number its from_dlpack gives."""
    fake = types.ModuleType("cupy")
    fake.current = None
    fake.cuda = types.SimpleNamespace(get_current_stream=lambda: fake.current)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


class CupyStream(Object):
    @property
    def ptr(self):
        return self.handle_


@pytest.mark.parametrize("first", ["array", "stream"])
def test_cupys_stream_that_is_gone(gpu, cupy, first):
    """It ends with its object, before the array or after it, and its work goes on."""
    slab = Slab(N, 1, cuda.Device())
    block = slab.alloc()
    poke(block.address, N, OLD)
    seen = []
    for _ in range(3):
        cupy.current = CupyStream(gpu)
        handle = cupy.current.ptr
        consumer = Consumer(block.__dlpack__(stream=handle))
        seen.append(reads(gpu, handle, block.address, N))
        if first == "array":
            consumer.delete()
        cupy.current = None
        gc.collect()
        if first == "stream":
            consumer.delete()
    block.copy_to(bytearray(N))
    del block
    written_by_its_next_owner(gpu, slab)
    assert seen == [[bytes([OLD]) * N]] * 3
    assert not gpu.errors


@pytest.mark.parametrize("answer", [201, 400, 709])
def test_a_number_whose_stream_is_gone(gpu, answer):
    """Of another library: what it did is waited for, once. (A driver may also crash, then.)"""
    pool = Pool(4 * MIB, cuda.Device())
    block = pool.alloc(N)
    stream = new_stream(gpu).handle_
    Consumer(block.__dlpack__(stream=stream)).delete()
    poke(block.address, N, OLD)
    seen = reads(gpu, stream, block.address, N)
    assert not gpu.call("cuStreamDestroy", stream)
    gpu.fails["cuStreamGetId"] = answer
    for _ in range(3):
        Consumer(block.__dlpack__(stream=1)).delete()
    assert gpu.calls["cuMemFree"] == 1
    assert seen == [bytes([OLD]) * N]
    gpu.fails.clear()
    assert all("there is no stream" in error for error in gpu.errors)
    gpu.errors.clear()


@pytest.mark.parametrize("way", ["trim", "pressure"])
@pytest.mark.parametrize("tell", ["interface", "dlpack"])
def test_a_reader_of_what_a_pool_keeps_for_the_legacy_stream(gpu, tell, way):
    """The pool has a stream of its own. The reader's is a blocking one, and nothing says which."""
    own = new_stream(gpu)
    pool = Pool(48 << 20, cuda.Device(), 48 << 20, stream=own)
    live = pool.alloc(4096)
    block = pool.alloc(1 << 20, stream=LEGACY)
    address = block.address
    poke(address, N, OLD)
    gpu.drain()
    capsule = block.__dlpack__(stream=-1) if tell == "dlpack" else block.__cuda_array_interface__
    seen = reads(gpu, new_stream(gpu, 0).handle_, address, N)
    del block, capsule
    gc.collect()
    if way == "trim":
        pool.trim()
    blocks = []
    with contextlib.suppress(OutOfMemory):
        while True:
            blocks.append(pool.alloc(1 << 20))
            slowly_fill(gpu, own, blocks[-1], NEW)
    assert any(one.address <= address < one.address + one.nbytes for one in blocks)
    backwards(gpu)
    assert seen == [bytes([OLD]) * N]
    del live


def test_events_that_are_over_do_not_pile_up_on_a_block(gpu):
    """Streams were forgotten while they were at work, and the block lives on."""
    slab = Slab(N, 1, cuda.Device())
    block = slab.alloc()
    for _ in range(200):
        s = cuda.Stream()
        block.record_stream(s)
        gpu.launch(s.handle)
    assert len(gpu.event_handles.things) > 100
    gpu.drain()
    consumer = cuda.Stream()
    block.__dlpack__(stream=consumer.handle)
    before = gpu.calls.total()
    block.__dlpack__(stream=consumer.handle)
    assert gpu.calls.total() - before < 200


@pytest.mark.parametrize("kind", [Pool, Slab])
def test_a_request_that_waits_for_many_blocks_asks_about_each_a_few_times(gpu, kind):
    n, kib64 = 256, 64 << 10
    if kind is Pool:
        arena = Pool(n * kib64, cuda.Device())
        blocks = [arena.alloc(kib64) for _ in range(n)]
    else:
        arena = Slab(kib64, n, cuda.Device())
        blocks = arena.alloc_many(n)
    streams = [cuda.Stream() for _ in range(20)]
    for i, block in enumerate(blocks):
        block.record_stream(streams[i % 20])
        slowly_fill(gpu, streams[i % 20].handle, block, 1)
        block.release()
        if i % 4 == 3:
            arena.stats()  # which begins to wait for what was released so far
    gpu.calls.clear()
    again = [arena.alloc(n * kib64)] if kind is Pool else arena.alloc_many(n)
    assert gpu.calls["cuEventQuery"] < 30 * n
    del again
    gpu.drain()
