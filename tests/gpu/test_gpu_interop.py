"""On a real GPU: CuPy, torch, JAX, numba-cuda and cuda.core, without a copy, both ways."""

import gc
import weakref

import gpu_machines
import numpy as np
import pytest
from real_gpu import content

from arenapy import Bump, Pool, cuda
from arenapy.cuda import stream_ref

KIB, MIB = 1 << 10, 1 << 20

# Raised in the code of other libraries, with a NumPy that is newer than they are.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The 'generic' unit for NumPy timedelta:DeprecationWarning"
)


@pytest.fixture
def pool(gpu):
    return Pool(64 * MIB, cuda.Device())


@pytest.fixture
def jax(gpu):
    return pytest.importorskip("jax")


@pytest.fixture
def numba_cuda(gpu):
    return pytest.importorskip("numba.cuda")


# ---- to them ----


def test_cupy_takes_a_buffer(pool, cupy):
    block = pool.empty((100, 10), "f4")
    for array in (cupy.asarray(block), cupy.from_dlpack(block)):
        assert array.data.ptr == block.address
        assert array.shape == (100, 10)
        array[:] = 3
        cupy.cuda.get_current_stream().synchronize()
        assert (content(block, "f4") == 3).all()
    address = block.address
    del block
    gc.collect()
    assert float(array.sum()) == 3000
    taken = [pool.alloc(MIB) for _ in range(4)]
    assert all(not one.address <= address < one.address + MIB for one in taken)


def test_torch_takes_a_buffer(pool, torch):
    block = pool.empty((100, 10), "f4")
    for tensor in (torch.from_dlpack(block), torch.as_tensor(block, device="cuda")):
        assert tensor.data_ptr() == block.address
        assert tuple(tensor.shape) == (100, 10)
        tensor.fill_(4)
        torch.cuda.synchronize()
        assert (content(block, "f4") == 4).all()
    del block
    gc.collect()
    assert float(tensor.sum()) == 4000


def test_torch_takes_memory_that_the_host_sees(gpu, torch):
    """Of pinned memory it finds out; it knows no managed memory, but by the array interface."""
    pinned = Pool(8 * MIB, cuda.Pinned()).alloc(4000).view((1000,), "f4")
    managed = Pool(8 * MIB, cuda.Managed()).alloc(4000).view((1000,), "f4")
    for buffer, tensor in (
        (pinned, torch.from_dlpack(pinned)),
        (managed, torch.as_tensor(managed, device="cuda")),
    ):
        assert tensor.data_ptr() == buffer.address
        assert tensor.is_pinned() == (buffer.kind == "pinned")
        tensor.fill_(2)
        torch.cuda.synchronize()
        assert (content(buffer, "f4") == 2).all()


def test_numpy_and_jax_take_pinned_memory(gpu, jax):
    buffer = Pool(8 * MIB, cuda.Pinned()).alloc(4000).view((1000,), "f4")
    buffer.fill(0)
    array = np.from_dlpack(buffer)
    assert array.ctypes.data == buffer.address
    array[:] = 3
    assert float(jax.dlpack.from_dlpack(buffer).sum()) == 3000


def test_jax_takes_a_buffer(pool, jax):
    block = pool.empty((64, 16), "f4")
    block.fill(0)
    array = jax.dlpack.from_dlpack(block)
    assert array.unsafe_buffer_pointer() == block.address
    assert array.shape == (64, 16)
    assert float(array.sum() + 1) == 1.0


def test_numba_takes_a_buffer(pool, numba_cuda):
    block = pool.empty((100,), "f4")
    array = numba_cuda.as_cuda_array(block)
    assert array.device_ctypes_pointer.value == block.address
    array.copy_to_device(np.full(100, 6, "f4"))
    numba_cuda.synchronize()
    assert (content(block, "f4") == 6).all()


# ---- from them ----


def test_from_cupy(gpu, cupy):
    array = cupy.arange(1000, dtype="f4")
    for taken in (cuda.asbuffer(array), cuda.from_dlpack(array)):
        assert taken.address == array.data.ptr
        assert (content(taken, "f4") == np.arange(1000)).all()
    array += 1
    assert (content(cuda.asbuffer(array), "f4") == np.arange(1000) + 1).all()


def test_from_torch(gpu, torch):
    tensor = torch.arange(1000, dtype=torch.float32, device="cuda")
    for taken in (cuda.asbuffer(tensor), cuda.from_dlpack(tensor)):
        assert taken.address == tensor.data_ptr()
        assert (content(taken, "f4") == np.arange(1000)).all()
    pinned = torch.arange(1000, dtype=torch.float32).pin_memory()
    taken = cuda.from_dlpack(pinned)
    assert taken.address == pinned.data_ptr()
    block = cuda.Device().region(4000).buffer()
    stream = cuda.Stream()
    block.copy_from(taken, stream=stream)
    stream.synchronize()
    assert (content(block, "f4") == np.arange(1000)).all()


def test_from_jax(gpu, jax):
    array = jax.numpy.arange(1000, dtype="f4")
    array.block_until_ready()
    taken = cuda.from_dlpack(array)
    assert taken.address == array.unsafe_buffer_pointer()
    assert (content(taken, "f4") == np.arange(1000)).all()


def test_from_numba(gpu, numba_cuda):
    array = numba_cuda.to_device(np.arange(1000, dtype="f4"))
    taken = cuda.asbuffer(array)
    assert taken.address == array.device_ctypes_pointer.value
    assert (content(taken, "f4") == np.arange(1000)).all()


def test_what_is_taken_lives_on(gpu, cupy):
    array = cupy.zeros(1 << 20, "u1")
    gone = weakref.ref(array)
    taken = cuda.asbuffer(array)
    del array
    gc.collect()
    assert gone() is not None
    del taken
    gc.collect()
    assert gone() is None


# ---- streams of theirs ----


def streams(gpu):
    found = {"arenapy": cuda.Stream(), "handle": gpu.stream(), "legacy": 1, "per thread": 2}
    for name, make in {
        "cupy": lambda: __import__("cupy").cuda.Stream(non_blocking=True),
        "cupy null": lambda: __import__("cupy").cuda.Stream.null,
        "cupy ptds": lambda: __import__("cupy").cuda.Stream.ptds,
        "torch": lambda: __import__("torch").cuda.Stream(),
        "torch default": lambda: __import__("torch").cuda.default_stream(),
        "torch external": lambda: __import__("torch").cuda.ExternalStream(gpu.stream()),
        "numba": lambda: __import__("numba.cuda").cuda.stream(),
        "numba default": lambda: __import__("numba.cuda").cuda.default_stream(),
        "cuda.core": gpu_machines.Core().make_stream,
    }.items():
        try:
            found[name] = make()
        except ImportError:
            continue
    return found


def number(stream):
    if isinstance(stream, int):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        found = stream.__cuda_stream__
        return int((found() if callable(found) else found)[1]) or 1
    for name in ("cuda_stream", "ptr", "handle"):
        value = getattr(stream, name, None)
        if value is not None:
            return int(getattr(value, "value", value) or 0) or 1
    raise AssertionError(stream)


def test_streams_of_every_library(gpu, pool):
    """Slow kernels on each, blocks dropped at once, the next library gets the memory."""
    small = Pool(2 * MIB, cuda.Device(), 2 * MIB)
    found = streams(gpu)
    for i in range(20):
        for j, stream in enumerate(found.values()):
            block = small.alloc(2 * MIB, stream=stream)
            address = block.address
            gpu.write_slowly(number(stream), address, 64 * KIB, 100 * i + j, 20)
            gpu.count_wrong(number(stream), address, 64 * KIB, 100 * i + j)
            del block
    assert gpu.how_many_wrong() == 0
    print(len(found), "kinds of streams:", *found)


def test_a_consumers_stream_is_waited_for(gpu, cupy):
    """DLPack and the array interface: CuPy writes on a stream of its own, the block is dropped."""
    small = Pool(2 * MIB, cuda.Device(), 2 * MIB)
    mine = cuda.Stream()
    theirs = cupy.cuda.Stream(non_blocking=True)
    for i in range(300):
        block = small.alloc(2 * MIB, stream=mine).view((512 * KIB,), "u4")
        gpu.write_slowly(mine, block.address, 64 * KIB, i, 20)
        with theirs:
            array = cupy.from_dlpack(block) if i % 2 else cupy.asarray(block)
            if not i % 2:
                block.record_stream(theirs)
            gpu.count_wrong(theirs.ptr, array.data.ptr, 64 * KIB, i)
            gpu.write_slowly(theirs.ptr, array.data.ptr, 64 * KIB, i + 1, 20)
            gpu.count_wrong(theirs.ptr, array.data.ptr, 64 * KIB, i + 1)
        del array, block
    assert gpu.how_many_wrong() == 0


def test_torch_works_on_a_stream_of_its_own(gpu, torch):
    small = Pool(2 * MIB, cuda.Device(), 2 * MIB)
    side = torch.cuda.Stream()
    for i in range(200):
        block = small.alloc(2 * MIB, stream=side).view((512 * KIB,), "i4")
        with torch.cuda.stream(side):
            tensor = torch.from_dlpack(block)
            torch.cuda._sleep(30_000)
            tensor.fill_(i)
            gpu.count_wrong(side.cuda_stream, block.address, MIB, i)
        del tensor, block
    assert gpu.how_many_wrong() == 0


def test_torch_captures_a_graph_over_our_memory(gpu, torch):
    pool = Pool(16 * MIB, cuda.Device())
    block = pool.empty((1024,), "f4")
    block.fill(0)
    tensor = torch.from_dlpack(block)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.add_(1)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert (content(block, "f4") == 3).all()


def test_a_block_does_not_keep_each_object_that_named_torchs_stream(torch, pool):
    block = pool.empty((1024,), "i4")
    side = torch.cuda.Stream()
    for i in range(100):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            block.fill(i, stream=torch.cuda.current_stream())  # a new object each time
        graph.replay()
        external = torch.cuda.ExternalStream(side.cuda_stream)
        block.record_stream(external)
        del graph, external
        torch.cuda.synchronize()
    assert (content(block, "u1") == 99).all()
    gc.collect()
    named = (torch.cuda.Stream, torch.cuda.ExternalStream)
    assert sum(type(one) in named for one in gc.get_objects()) < 60


# ---- cuda.core ----


def test_cuda_core_allocates_from_a_pool(gpu, core):
    stream = core.Device(0).create_stream()
    pool = Pool(64 * MIB, cuda.Device())
    resource = cuda.memory_resource(pool)
    buffer = resource.allocate(MIB, stream=stream)
    assert buffer.size == MIB
    assert buffer.is_device_accessible
    assert not buffer.is_host_accessible
    gpu.write_slowly(number(stream), int(buffer.handle), MIB, 77)
    other = resource.allocate(MIB, stream=stream)
    other.copy_from(buffer, stream=stream)
    stream.sync()
    gpu.count_wrong(1, int(other.handle), MIB, 77)
    assert gpu.how_many_wrong() == 0
    assert pool.stats().active_allocations == 2 or pool.stats().allocated_bytes >= 2 * MIB
    buffer.close(stream)
    other.close()
    stream.sync()
    gc.collect()
    assert pool.stats().pending_bytes == 0
    assert not resource._blocks


def test_the_fields_of_cuda_cores_streams_are_known(core, pool):
    """Else each allocation would call the stream for its handle. (They are not read without the
    GIL.)"""
    pool.alloc(KIB, stream=core.Device(0).create_stream())
    assert stream_ref.knows_core_fields()


def test_cuda_core_under_kernels(gpu, core):
    """The safety holds through the facade."""
    streams = [core.Device(0).create_stream() for _ in range(2)]
    resource = cuda.memory_resource(Pool(2 * MIB, cuda.Device(), 2 * MIB))
    for i in range(1000):
        stream = streams[i % 2]
        buffer = resource.allocate(2 * MIB, stream=stream)
        gpu.write_slowly(number(stream), int(buffer.handle), 64 * KIB, i, 20)
        gpu.count_wrong(number(stream), int(buffer.handle), 64 * KIB, i)
        buffer.close()
    assert gpu.how_many_wrong() == 0


def test_cuda_core_buffers_are_buffers_to_us(core):
    device = core.Device(0)
    stream = device.create_stream()
    theirs = device.memory_resource.allocate(4 * KIB, stream=stream)
    taken = cuda.from_dlpack(theirs)
    taken.fill(9, stream=stream)
    stream.sync()
    assert taken.address == int(theirs.handle)
    assert (content(taken) == 9).all()


def test_a_mapped_pinned_buffer_in_place(gpu, cupy):
    """A kernel of CuPy reads and writes pinned memory where it is."""
    arena = Bump(4 * MIB, cuda.Pinned())
    buffer = arena.alloc(4 * KIB)
    buffer.array(dtype="u4")[:] = 1
    memory = cupy.cuda.UnownedMemory(buffer.address, buffer.nbytes, buffer)
    array = cupy.ndarray((KIB,), "u4", cupy.cuda.MemoryPointer(memory, 0))
    array += 5
    cupy.cuda.get_current_stream().synchronize()
    assert (buffer.array(dtype="u4") == 6).all()
