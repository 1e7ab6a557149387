"""An allocator as cuda.core's MemoryResource: with the real cuda.core where it is installed, which
needs no driver for memory of the host, and with a fake of it for memory that streams use."""

import contextlib
import ctypes
import gc
import importlib.util
import itertools
import os
import sys
import types
import weakref

import pytest
from cuda_machine import Wrapped
from helpers import poke
from simulated_gpu import NON_BLOCKING

import arenapy
from arenapy import cuda

KIB = 1 << 10


class FakeBuffer:
    """As cuda.core's: gives its memory back, to the resource that it keeps, when it is closed."""

    def __init__(self, ptr, size, mr, stream):
        self.handle, self.size, self.memory_resource, self.stream = ptr, size, mr, stream

    @classmethod
    def from_handle(cls, ptr, size, mr=None, owner=None, *, stream=None):
        return cls(ptr, size, mr, stream)

    def close(self, stream=None):
        if self.memory_resource is not None:
            mr, self.memory_resource = self.memory_resource, None
            mr.deallocate(self.handle, self.size, stream=stream or self.stream)

    def __del__(self):
        self.close()


class FakeResource:
    def allocate(self, size, *, stream):
        raise NotImplementedError

    deallocate = allocate
    is_device_accessible = is_host_accessible = property(lambda self: 1 // 0)


def has_cuda_core():
    with contextlib.suppress(ImportError):
        return importlib.util.find_spec("cuda.core") is not None
    return False


@pytest.fixture(params=["fake", "real"])
def core(request, monkeypatch):
    if request.param == "real":
        if not has_cuda_core():
            pytest.skip("cuda.core is not installed")
        import cuda.core

        return cuda.core
    return fake_core(monkeypatch)


def fake_core(monkeypatch):
    core = types.ModuleType("cuda.core")
    core.MemoryResource, core.Buffer = FakeResource, FakeBuffer
    package = types.ModuleType("cuda")
    package.core = core
    monkeypatch.setitem(sys.modules, "cuda", package)
    monkeypatch.setitem(sys.modules, "cuda.core", core)
    return core


ALLOCATORS = {
    "Pool": lambda source: arenapy.Pool(1 << 20, source),
    "Slab": lambda source: arenapy.Slab(8 * KIB, 16, source),
    "Bump": lambda source: arenapy.Bump(1 << 20, source),
}


@pytest.mark.parametrize("name", ALLOCATORS)
def test_memory_of_the_host(core, name):
    allocator = ALLOCATORS[name](arenapy.Host())
    resource = cuda.memory_resource(allocator)
    assert isinstance(resource, core.MemoryResource)
    assert resource.is_host_accessible
    assert not resource.is_device_accessible
    assert not resource.is_managed
    assert resource.device_id == -1
    sizes = [1000, 0, 0, 5000]
    buffers = [resource.allocate(size, stream=None) for size in sizes]
    assert [buffer.size for buffer in buffers] == sizes
    assert len({int(buffer.handle) for buffer in buffers}) == 4
    assert isinstance(buffers[0], core.Buffer)
    assert len(live(allocator)) == 4
    poke(int(buffers[3].handle), 5000, 7)
    buffers[1].close()
    del buffers[0]
    gc.collect()
    assert len(resource._blocks) == 2
    buffers.clear()
    gc.collect()
    assert not resource._blocks
    if name != "Bump":
        assert allocator.stats().allocated_bytes == 0
    allocator.check()


def live(allocator):
    if isinstance(allocator, arenapy.Bump):
        return range(allocator.stats().total_allocations)
    return [block for block in allocator.blocks() if block.state == "live"]


def test_nothing_keeps_itself_alive(core):
    """Neither a cycle nor a list of its own buffers: what nobody has is gone at once."""
    pool = arenapy.Pool(1 << 20)
    gone = weakref.ref(pool)
    resource = cuda.memory_resource(pool)
    buffer = resource.allocate(100, stream=None)
    del pool, resource
    assert gone() is not None
    del buffer
    assert gone() is None


def test_a_forked_child(gpu, monkeypatch):
    """It gets no memory, and an error that says why; the parent's is as it was."""
    fake_core(monkeypatch)
    pool = arenapy.Pool(1 << 20, cuda.Device())
    resource = cuda.memory_resource(pool)
    buffer = resource.allocate(100, stream=1)
    child = os.fork()
    if child == 0:
        try:
            resource.allocate(100, stream=1)
        except (ValueError, cuda.Unavailable) as error:
            os._exit("fork" not in str(error))
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    buffer.close()
    assert pool.stats().active_allocations == 0


def test_one_class_for_all(core):
    a, b = (cuda.memory_resource(arenapy.Pool(1 << 20)) for _ in range(2))
    assert type(a) is type(b)
    assert a is not b


@pytest.mark.parametrize(
    ("source", "device", "host", "managed", "device_id"),
    [
        (cuda.Device(1), True, False, False, 1),
        (cuda.Managed(), True, True, True, 0),
        (cuda.Pinned(mapped=False), False, True, False, -1),
    ],
    ids=["Device", "Managed", "Pinned"],
)
def test_what_it_says_of_its_memory(gpu, monkeypatch, source, device, host, managed, device_id):
    fake_core(monkeypatch)
    resource = cuda.memory_resource(arenapy.Pool(1 << 20, source))
    assert resource.is_device_accessible is device
    assert resource.is_host_accessible is host
    assert resource.is_managed is managed
    assert resource.device_id == device_id


def test_streams_order_it(gpu, monkeypatch):
    """A block is given back once the stream of its deallocation has done what it was given."""
    fake_core(monkeypatch)
    pool = arenapy.Pool(1 << 20, cuda.Device())
    resource = cuda.memory_resource(pool)
    first, second = (
        Wrapped(gpu.got("cuStreamCreate", ctypes.c_void_p, NON_BLOCKING)) for _ in range(2)
    )
    buffer = resource.allocate(4 * KIB, stream=first)
    assert buffer.stream is first
    gpu.launch(first.handle_, None, [(buffer.handle, 4 * KIB)])
    gpu.launch(second.handle_, None, [(buffer.handle, 4 * KIB)])
    buffer.close(second)
    for stream in (first, second):
        assert pool.stats().pending_bytes == 4 * KIB
        gpu.call("cuStreamSynchronize", stream.handle_)
    assert pool.stats().pending_bytes == 0
    gpu.begin_capture(first.handle_)
    handles = set()
    for _ in range(2):  # blocks of the graph, which share memory
        buffer = resource.allocate(4 * KIB, stream=first)
        handles.add(buffer.handle)
        buffer.close(first)
    assert len(handles) == 1
    graph = gpu.end_capture(first.handle_)
    assert pool.stats().pending_bytes >= 4 * KIB
    gpu.destroy_graph(graph)
    assert pool.stats().pending_bytes == 0
    assert not resource._blocks


def test_another_object_for_its_stream_costs_no_event_more(gpu, monkeypatch):
    """cuda.core makes one for each deallocation, and says of none whether it owns its stream."""

    class Named:
        def __init__(self, handle):
            self.handle = handle

        def __cuda_stream__(self):
            return 0, self.handle

    fake_core(monkeypatch)
    pool = arenapy.Pool(1 << 20, cuda.Device())
    resource = cuda.memory_resource(pool)
    first, other = (gpu.got("cuStreamCreate", ctypes.c_void_p, NON_BLOCKING) for _ in range(2))
    events = {}
    for name, handle in {"its own": first, "another": other}.items():
        buffer = resource.allocate(4 * KIB, stream=Named(first))
        for one in {first, handle}:
            gpu.launch(one, None, [(buffer.handle, 4 * KIB)])
        before = gpu.calls["cuEventRecord"]
        buffer.close(Named(handle))
        events[name] = gpu.calls["cuEventRecord"] - before
        for one in {first, handle}:
            assert pool.stats().pending_bytes == 4 * KIB
            gpu.call("cuStreamSynchronize", one)
        assert pool.stats().pending_bytes == 0
    assert events == {"its own": 1, "another": 2}


SOURCES = {
    "host": arenapy.Host,
    "device": cuda.Device,
    "driver pool": cuda.DriverPool,
    "pinned": lambda: cuda.Pinned(huge_pages=None),
    "managed": cuda.Managed,
}


def reset_to_the_start(allocator):
    allocator.reset()


def reset_to_a_mark(allocator):
    allocator.reset(allocator.mark())
    allocator.reset()


def leave_a_scope(allocator):
    with allocator.scope():
        allocator.alloc(100)
    allocator.reset(stream=1) if allocator.kind != "host" else allocator.reset()


def close_its_region(allocator):
    with pytest.raises(BufferError, match="drop them first"):
        allocator.regions[0].close()


def trim_it(allocator):
    if not isinstance(allocator, arenapy.Bump):
        allocator.trim()


WAYS = [reset_to_the_start, reset_to_a_mark, leave_a_scope, close_its_region, trim_it]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", ALLOCATORS)
@pytest.mark.sampled
def test_nobody_gets_what_cuda_core_has(gpu, monkeypatch, name, source, way):
    """Two Buffers of cuda.core that are alive never have a byte in common."""
    core = fake_core(monkeypatch)
    gpu.attributes[91] = 1  # the device sees registered memory at its address
    if name != "Bump" and way not in (close_its_region, trim_it):
        return  # there is no reset
    allocator = ALLOCATORS[name](SOURCES[source]())
    resource = cuda.memory_resource(allocator)
    # What a stream other than the own one was named for is held anyway.
    stream = 1 if source in ("device", "driver pool") else None
    buffers = [resource.allocate(KIB, stream=stream) for _ in range(3)]
    buffers.pop(1).close()
    for _ in range(3):
        way(allocator)
        buffers.append(resource.allocate(KIB, stream=stream))
        starts = sorted(buffer.handle for buffer in buffers)
        assert all(a + KIB <= b for a, b in itertools.pairwise(starts))
        assert all(isinstance(buffer, core.Buffer) for buffer in buffers)
        allocator.check()
    for buffer in buffers:
        poke(buffer.handle, KIB, 1)  # it is mapped
    buffers.clear()
    del buffer
    gc.collect()
    gpu.drain()
    if name == "Bump":
        allocator.reset()
        assert allocator.used == 0
    else:
        assert allocator.stats().allocated_bytes == allocator.stats().pending_bytes == 0
    assert not resource._blocks


@pytest.mark.parametrize("name", ["Pool", "Slab"])
def test_a_region_can_be_closed_when_cuda_core_has_nothing(core, name):
    """What is given back is no longer counted, and neither is what could not be handed out."""
    allocator = ALLOCATORS[name](arenapy.Host())
    resource = cuda.memory_resource(allocator)
    resource.allocate(KIB, stream=None).close()
    with pytest.raises(ValueError, match="is not a block"):
        resource.deallocate(1, KIB, stream=None)
    buffer = resource.allocate(KIB, stream=None)
    with pytest.raises(BufferError, match="drop them first"):
        allocator.regions[0].close()
    buffer.close()
    allocator.regions[0].close()


def test_a_strict_reset_names_what_cuda_core_has(core):
    arena = arenapy.Bump(1 << 20, strict=True)
    buffer = cuda.memory_resource(arena).allocate(KIB, stream=None)
    with pytest.raises(BufferError, match="1 blocks are held"):
        arena.reset()
    buffer.close()
    arena.reset()


def test_a_deallocation_that_fails(gpu, monkeypatch):
    """Nobody can tell then what its stream still does: the block is not handed out again."""
    fake_core(monkeypatch)
    slab = arenapy.Slab(KIB, 1, cuda.Device())
    resource = cuda.memory_resource(slab)
    stream = cuda.Stream()
    buffer = resource.allocate(KIB, stream=stream)
    gpu.launch(stream.handle, None, [(buffer.handle, KIB)])
    stream.close()
    with pytest.raises(ValueError, match="closed"):
        buffer.close(stream)
    gc.collect()
    with pytest.raises(arenapy.OutOfMemory):
        slab.alloc()
    assert slab.stats().active_allocations == 1


def test_what_goes_wrong(gpu, monkeypatch):
    fake_core(monkeypatch)
    pool = arenapy.Slab(KIB, 2, cuda.Device())
    resource = cuda.memory_resource(pool)
    buffers = [resource.allocate(KIB, stream=1) for _ in range(2)]
    with pytest.raises(arenapy.OutOfMemory):
        resource.allocate(KIB, stream=1)
    with pytest.raises(ValueError, match="0x123 is not a block of <Slab"):
        resource.deallocate(0x123, KIB, stream=1)
    buffers.pop().close()
    monkeypatch.setattr(FakeBuffer, "from_handle", lambda *_, **__: 1 // 0)
    failing = cuda.memory_resource(pool)
    with pytest.raises(ZeroDivisionError):
        failing.allocate(KIB, stream=1)
    assert pool.stats().active_allocations == len(resource._blocks) == 1
    assert not failing._blocks
    with pytest.raises(TypeError, match="is not an allocator"):
        cuda.memory_resource(cuda.Device())


def test_a_buffer_that_gives_back_before_it_fails(monkeypatch):
    """The block may be another Buffer's by then."""
    core = fake_core(monkeypatch)
    pool = arenapy.Pool(1 << 20)
    others = []

    def from_handle(ptr, size, mr=None, owner=None, *, stream=None):
        made = FakeBuffer(ptr, size, mr, stream)
        if others:
            return made
        others.append(None)  # before the call below comes here
        made.close()
        others[0] = mr.allocate(size, stream=stream)
        assert others[0].handle == ptr
        raise KeyboardInterrupt

    monkeypatch.setattr(core.Buffer, "from_handle", from_handle)
    resource = cuda.memory_resource(pool)
    with pytest.raises(KeyboardInterrupt):
        resource.allocate(KIB, stream=None)
    mine = resource.allocate(KIB, stream=None)
    assert mine.handle != others[0].handle and pool.stats().active_allocations == 2
    others[0].close()
    mine.close()
    assert pool.stats().active_allocations == 0
    pool.check()


def test_without_cuda_core(monkeypatch):
    for broken in (None, types.ModuleType("cuda.core")):
        monkeypatch.setitem(sys.modules, "cuda.core", broken)
        with pytest.raises(cuda.Unavailable, match=r"pip install 'cuda-core"):
            cuda.memory_resource(arenapy.Pool(1 << 20))
