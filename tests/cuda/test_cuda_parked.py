"""Memory that goes while nobody can wait for the streams that use it. On the simulated driver.

While a blocking stream is captured the legacy default stream can be neither asked nor waited for,
and no captured stream ever can. Memory whose last owner goes then stays until they are done.
"""

import gc

import pytest
from capsules import Array, Tensor
from cuda_machine import Wrapped
from cuda_support import ALLOCATORS, LEGACY, SOURCES, a_gpu, backwards, graph_of, new_stream, reads
from helpers import poke
from simulated_driver import UNKNOWN
from simulated_gpu import RELAXED
from test_cuda_foreign import KINDS, memory

from arenapy import Pool, cuda

N = 4096
OURS, AGAIN = 3, 9


# ---- who still uses it ----


def told_legacy(gpu, buffer, captured):
    buffer.record_stream(LEGACY)
    return LEGACY


def read_by_the_interface(gpu, buffer, captured):
    assert buffer.__cuda_array_interface__["data"]
    return LEGACY


def told_what_is_captured(gpu, buffer, captured):
    buffer.record_stream(captured)
    return captured.handle_


def told_many(gpu, buffer, captured):
    for stream in (new_stream(gpu), captured, LEGACY, new_stream(gpu, 0)):
        buffer.record_stream(stream)
    return LEGACY


USES = (told_legacy, read_by_the_interface, told_what_is_captured, told_many)
EACH_USE = pytest.mark.parametrize("use", USES, ids=[use.__name__ for use in USES])


def in_a_capture(gpu, captured, go):
    gpu.begin_capture(captured.handle_, RELAXED)
    go()
    gc.collect()
    backwards(gpu)
    gpu.destroy_graph(graph_of(gpu, captured))


def settled():
    """Any use of arenapy.cuda that looks for what is over."""
    cuda.Stream().synchronize()


# ---- memory of other libraries ----


@EACH_USE
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["interface", "dlpack"])
def test_borrowed_memory(way, kind, use):
    with a_gpu(leaks=True) as gpu:
        captured = Wrapped(new_stream(gpu, 0).handle_)
        address = memory(gpu, kind, nbytes=N)
        poke(address, N, OURS)
        thing = (
            Array(address, (N,))
            if way == "interface"
            else Tensor(address, (N,), device=KINDS[kind])
        )
        ended = []
        thing.on_delete = lambda: (ended.append(1), poke(address, N, AGAIN))
        buffers = [cuda.asbuffer(thing, stream=new_stream(gpu))]
        del thing
        seen = reads(gpu, use(gpu, buffers[0], captured), address, N)

        def go():
            buffers.clear()
            gc.collect()
            assert not ended, "its library may use it anew"

        in_a_capture(gpu, captured, go)
        assert seen == [bytes([OURS]) * N]
        backwards(gpu)
        settled()
        backwards(gpu)  # events that were made only now
        settled()
        assert ended == [1]


# ---- memory of arenapy ----


@EACH_USE
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("allocator", [*ALLOCATORS, "region"])
def test_memory_of_an_allocator(allocator, source, use):
    with a_gpu() as gpu:
        captured = Wrapped(new_stream(gpu, 0).handle_)
        if allocator == "region":
            buffers = [SOURCES[source]().region(N).buffer()]
        else:
            buffers = [ALLOCATORS[allocator](SOURCES[source]()).alloc(N)]
        address = buffers[0].address
        poke(address, N, OURS)
        seen = reads(gpu, use(gpu, buffers[0], captured), address, N)

        def go():
            buffers.clear()

        in_a_capture(gpu, captured, go)
        assert seen == [bytes([OURS]) * N]
        for _ in range(3):
            backwards(gpu)
            settled()
        if source == "driver pool":
            cuda.DriverPool().region(N)  # which has a list of its own, that such a pool looks at


@pytest.mark.parametrize("n", [1, 7, 40])
def test_much_of_it(n):
    """All comes back, in any order, by whatever looks next; what is still in use does not."""
    with a_gpu() as gpu:
        captured, s = Wrapped(new_stream(gpu, 0).handle_), new_stream(gpu)
        pool = Pool(8 << 20, cuda.Device())
        regions = [SOURCES["pinned"]().region(N).buffer() for _ in range(n)]
        for buffer in regions:
            buffer.record_stream(LEGACY)
            gpu.launch(LEGACY, None, [(buffer.address, N)])
        in_a_capture(gpu, captured, regions.clear)
        del buffer
        gpu.drain()
        pool.stats(), gpu.drain()
        gpu.launch(s.handle_)
        pool.stats()
        assert not gpu.memory.registered


def test_a_driver_that_fails_at_the_end():
    """What cannot be waited for stays, too."""
    with a_gpu() as gpu:
        buffer = SOURCES["pinned"]().region(N).buffer()
        s = new_stream(gpu)
        buffer.record_stream(s)
        seen = reads(gpu, s.handle_, buffer.address, N)
        poke(buffer.address, N, OURS)
        gpu.fails = dict.fromkeys(("cuEventRecord", "cuEventSynchronize", "cuStreamQuery"), 1)
        del buffer
        gc.collect()
        gpu.fails = {}
        backwards(gpu)
        assert seen == [bytes([OURS]) * N]
        settled()
        backwards(gpu)
        settled()


# ---- integers: from the release on, what they name may be gone ----


@pytest.mark.parametrize("what", ["borrowed", "pinned", "a copy whose event failed"])
def test_an_integer_whose_stream_goes_after_the_release(what):
    """It was captured, or the driver failed, when its event would have been recorded."""
    with a_gpu(leaks=True) as gpu:
        handle, other = new_stream(gpu).handle_, cuda.Stream()
        address = memory(gpu, "device", nbytes=N)
        array = Array(address, (N,))
        if what == "borrowed":
            buffers = [cuda.asbuffer(array)]
        elif what == "pinned":
            buffers = [SOURCES["pinned"]().region(N).buffer()]
        else:
            pool = Pool(2 << 20, cuda.Device(), 2 << 20)  # whose end would wait
            buffers = [pool.alloc(N)]

            def before(name):
                if name == "cuMemcpyAsync":
                    gpu.fails = {"cuEventRecord": UNKNOWN}

            gpu.before_call = before
            buffers[0].copy_from(array, stream=handle)
            gpu.before_call, gpu.fails = None, {}
        ended = []
        array.on_delete = lambda: ended.append(1)
        del array
        if what != "a copy whose event failed":
            buffers[0].record_stream(handle)
            gpu.launch(handle, None, [(buffers[0].address, N)])
            gpu.begin_capture(handle, RELAXED)
            buffers.clear()
            gc.collect()
            gpu.destroy_graph(graph_of(gpu, Wrapped(handle)))
        buffers.clear()
        gc.collect()
        assert gpu.call("cuStreamDestroy", handle) == 0
        other.synchronize(), other.synchronize()
        assert not gpu.errors
        if what != "pinned":
            assert ended == [1]
        assert not gpu.memory.registered


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("left", ["nothing", "a Buffer"])
def test_an_allocators_integer_whose_stream_goes_after_it(captured, left):
    """A Buffer that was released keeps the core, and not the user's stream."""
    with a_gpu(leaks=True) as gpu:
        handle = new_stream(gpu).handle_
        source = cuda.DriverPool()
        other = ALLOCATORS["bump"](source)
        pool = Pool(2 << 20, source, 2 << 20, stream=handle)
        buffers = [pool.alloc(N)]
        buffers[0].release()
        if left == "nothing":
            buffers.clear()
        if captured:
            gpu.begin_capture(handle, RELAXED)
        del pool
        gc.collect()
        if captured:
            gpu.destroy_graph(graph_of(gpu, Wrapped(handle)))
        assert gpu.call("cuStreamDestroy", handle) == 0
        del other
        gc.collect()
        buffers.clear()
        gc.collect()
        source.trim()
        assert not gpu.errors
        assert gpu.memory.used[0] == 0


def test_an_integer_of_two_allocators(gpu):
    """What the other one's user does on it counts on."""
    handle = new_stream(gpu).handle_
    source = cuda.DriverPool()
    pools = [Pool(2 << 20, cuda.Device(), 2 << 20, stream=handle) for _ in range(2)]
    region = source.region(N)
    pools.pop()
    gc.collect()
    gpu.launch(handle, None, [(region.address, N)])
    del region
    gc.collect()
    backwards(gpu)
    assert not gpu.errors


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_nobody_closes_or_uses_what_a_graph_has(allocator, source):
    """A region that somebody kept of an allocator that is gone."""
    with a_gpu(leaks=True) as gpu:
        stream = Wrapped(new_stream(gpu).handle_)
        made = ALLOCATORS[allocator](SOURCES[source]())
        block = made.alloc(N)
        address = block.address
        (region,) = [r for r in made.regions if r.address <= address < r.address + r.nbytes]
        gpu.begin_capture(stream.handle_, RELAXED)
        block.fill(OURS, stream=stream)
        graph = graph_of(gpu, stream)
        del block, made
        gc.collect()
        with pytest.raises(BufferError, match="streams still use"):
            region.close()
        with pytest.raises(ValueError, match="belonged to an allocator that is gone"):
            region.buffer()
        gpu.replay(graph, stream.handle_)
        gpu.drain()
        assert not gpu.errors
        gpu.destroy_graph(graph)
        settled()
        region.close()
