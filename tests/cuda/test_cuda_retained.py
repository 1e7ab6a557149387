"""Arrays of other libraries are kept while a copy reads them, and no longer. Simulated."""

import gc
import weakref
from functools import partial

import pytest
from capsules import Array, Tensor
from cuda_support import LEGACY, MIB, a_gpu, new_stream
from helpers import in_threads, peek, poke
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_driver import INVALID_VALUE
from test_cuda_foreign import memory

from arenapy import Bump, Pool, cuda, measure

N = 4096
OURS, FREED = 3, 0xEE


class Library:
    """Whose memory is used anew at once when an array ends."""

    def __init__(self, gpu):
        self.gpu, self.alive, self.address = gpu, weakref.WeakSet(), {}

    def array(self, byte=OURS):
        address = memory(self.gpu, nbytes=N)
        poke(address, N, byte)
        one = Array(address, (N,))
        one.on_delete = lambda: self.gpu.closed or poke(address, N, FREED)
        self.alive.add(one)
        return one


@pytest.fixture
def library(gpu):
    gpu.memory.sizes = 1 << 30, 1 << 30
    return Library(gpu)


@pytest.mark.parametrize("streams", [1, 5])
def test_a_loop_keeps_what_is_under_way(gpu, library, streams):
    """And not all that was."""
    block = Pool(4 * MIB, cuda.Device()).alloc(N)
    names, most = [new_stream(gpu) for _ in range(streams)], 0
    for i in range(300):
        block.copy_from(library.array(), stream=names[i % streams])
        if i >= 8:  # so many are under way
            for _ in range(6):
                gpu.step()
        most = max(most, len(library.alive))
    assert most < 60


def test_one_stream_that_stands_still_keeps_its_own(gpu, library):
    """Others' arrays go all the same."""
    block = Pool(4 * MIB, cuda.Device()).alloc(N)
    still, s = new_stream(gpu), new_stream(gpu)
    gate = []
    gpu.launch(still.handle_, lambda: gate.append(1))
    for _ in range(40):
        block.copy_from(library.array(), stream=still)
    for _ in range(300):
        block.copy_from(library.array(), stream=s)
        assert not gpu.call("cuStreamSynchronize", s.handle_)
    assert not gate
    assert len(library.alive) < 40 + 60


def test_work_of_a_stream_is_asked_for_in_its_order(gpu, library):
    """As long as the earlier is not over, nobody asks for the later."""
    block = Pool(4 * MIB, cuda.Device()).alloc(N)
    busy, other = cuda.Stream(), cuda.Stream()
    for i in range(100):
        block.copy_from(library.array(), stream=busy)
        if i == 0:
            event = busy.record()
    asked = gpu.calls["cuEventQuery"]
    other.synchronize()
    assert gpu.calls["cuEventQuery"] == asked + 1
    while not event.done:
        gpu.step()
    other.synchronize()
    assert len(library.alive) < 100


LOOKS = {
    "synchronize": lambda stream, event, pool, other, block: stream.synchronize(),
    "event": lambda stream, event, pool, other, block: event.synchronize(),
    "done": lambda stream, event, pool, other, block: event.done,
    "stats": lambda stream, event, pool, other, block: pool.stats(),
    "another allocator's": lambda stream, event, pool, other, block: other.stats(),
    "memory": lambda stream, event, pool, other, block: other.alloc(N),
    "a copy that waits": lambda stream, event, pool, other, block: block.copy_to(bytearray(N)),
    "a fill that waits": lambda stream, event, pool, other, block: block.fill(0),
}


@pytest.mark.parametrize("look", [*LOOKS, "a copy", "end"])
def test_what_lets_go_of_it(gpu, library, look):
    pool, s = Pool(4 * MIB, cuda.Device()), cuda.Stream()
    block, other = pool.alloc(N), Pool(4 * MIB, cuda.Device())
    for _ in range(5):
        block.copy_from(library.array(), stream=s)
    event = s.record()
    assert len(library.alive) == 5
    if look == "end":  # which waits
        del block, pool
        assert len(library.alive) == 0
        return
    gpu.drain()
    assert len(library.alive) == 5, "nothing calls back"
    if look == "a copy":
        other.alloc(N).copy_from(library.array(), stream=new_stream(gpu))
        assert len(library.alive) == 1
        return
    LOOKS[look](s, event, pool, other, block)
    assert len(library.alive) == 0


@pytest.mark.parametrize("where", ["device", "pinned"])
def test_a_copy_that_was_not_queued_keeps_nothing(gpu, library, where):
    source = cuda.Device() if where == "device" else cuda.Pinned(huge_pages=None)
    block, s = Pool(4 * MIB, source).alloc(N), new_stream(gpu)
    for call in ("cuMemcpyAsync", "cuStreamWaitEvent")[: 2 if where == "device" else 1]:
        gpu.fails[call] = INVALID_VALUE
        array = library.array()
        with pytest.raises(cuda.CudaError):
            block.copy_from(array, stream=s)
        gpu.fails.clear()
        del array
        cuda.Stream().synchronize()
        assert not library.alive


def test_a_graph_keeps_what_it_copies(gpu, library):
    pool, s = Pool(4 * MIB, cuda.Device(), stream=new_stream(gpu)), new_stream(gpu)
    block, array = pool.alloc(N), library.array()
    gpu.begin_capture(s.handle_)
    block.copy_from(array, stream=s)
    graph = gpu.end_capture(s.handle_)
    del array, block, pool
    gc.collect()
    gpu.drain()
    cuda.Stream().synchronize()
    assert len(library.alive) == 1
    gpu.destroy_graph(graph)
    cuda.Stream().synchronize()
    assert not library.alive


def test_what_ends_may_copy_again(gpu, library):
    """The end of an array runs any code."""
    pool, s = Pool(4 * MIB, cuda.Device()), new_stream(gpu)
    block, ends = pool.alloc(N), []

    def again():
        ends.append(1)
        if len(ends) < 10:
            one = library.array()
            one.on_delete = again
            block.copy_from(one, stream=s)
            gpu.drain()
            pool.stats()

    one = library.array()
    one.on_delete = again
    block.copy_from(one, stream=s)
    del one
    for _ in range(12):
        gpu.drain()
        pool.stats()
    assert len(ends) == 10


def test_threads(gpu, library):
    pool = Pool(4 * MIB, cuda.Device())
    arrays = [[library.array() for _ in range(50)] for _ in range(4)]
    streams = [new_stream(gpu) for _ in range(4)]

    def copy(mine, s):
        with gpu.on(0):
            block = pool.alloc(N)
            while mine:
                block.copy_from(mine.pop(), stream=s)
                gpu.step(), gpu.step()
                pool.stats()

    in_threads(*[partial(copy, *pair) for pair in zip(arrays, streams, strict=True)])
    gpu.drain()
    pool.stats()
    assert not library.alive


@settings(max_examples=max(5, settings.default.max_examples // 4))
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 4)), max_size=60))
def test_nothing_goes_too_early(acts):
    """In any order of streams, progress and looking; and all goes in the end."""
    with a_gpu(leaks=True) as gpu:
        gpu.memory.sizes = 1 << 30, 1 << 30
        library, pool = Library(gpu), Pool(16 * MIB, cuda.Device())
        streams, blocks = [LEGACY, *[new_stream(gpu) for _ in range(3)]], []
        for i, (stream, steps, look) in enumerate(acts):
            block = pool.alloc(N)
            block.copy_from(library.array(1 + i), stream=streams[stream])
            blocks.append(block)
            for k in range(steps):
                gpu.step(k)
            if look == 0:
                pool.stats()
        gpu.drain()
        assert all(set(peek(one.address, N)) == {1 + i} for i, one in enumerate(blocks))
        pool.stats()
        assert not library.alive
        block = None
        blocks.clear()


def test_another_driver_is_asked_nothing():
    with a_gpu(leaks=True) as gpu:
        tensor = Tensor(memory(gpu, nbytes=N), (N,))
        block = Pool(4 * MIB, cuda.Device()).alloc(N)
        block.copy_from(tensor, stream=new_stream(gpu))
    before = tensor.deleted
    with a_gpu():
        cuda.Stream().synchronize()  # which asks that one nothing
        assert tensor.deleted == before


def test_a_measurement_drops_nothing(gpu, library):
    """It has a lock then, for which the code of an object could wait."""
    arena = Bump(MIB, cuda.Device())
    block = arena.alloc(N)
    block.copy_from(library.array(), stream=new_stream(gpu))
    gpu.drain()
    with measure(arena):
        pass
    assert len(library.alive) == 1
    arena.stats()
    assert len(library.alive) == 0
