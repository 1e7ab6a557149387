"""RMM's buffers in a Pool, on a real GPU."""

import gc
import threading

import pytest

from arenapy import OutOfMemory, Pool, cuda
from arenapy.interop import rmm as arenapy_rmm

MIB = 1 << 20


@pytest.fixture
def rmm(gpu):
    return pytest.importorskip("rmm")


@pytest.fixture
def pool(rmm):
    """A Pool that RMM's current resource takes from."""
    pool = Pool(source=cuda.Device())
    before = rmm.mr.get_current_device_resource()
    rmm.mr.set_current_device_resource(arenapy_rmm.resource(pool))
    yield pool
    rmm.mr.set_current_device_resource(before)


def test_buffers_are_in_the_pool(rmm, pool):
    one = rmm.DeviceBuffer.to_device(bytes(range(250)) * 4)
    (block,) = [other for other in pool.blocks() if other.state == "live"]
    assert block.address == one.ptr
    two = one.copy()
    assert two.tobytes() == bytes(range(250)) * 4
    two.resize(5 * MIB)
    assert two.tobytes()[:1000] == bytes(range(250)) * 4
    del one, two
    gc.collect()
    assert pool.stats().active_allocations == 0
    pool.check()


def test_no_memory(rmm):
    small = arenapy_rmm.resource(Pool(64 * MIB, cuda.Device()))
    with pytest.raises(MemoryError, match="max_bytes=67108864"):
        rmm.DeviceBuffer(size=100 * MIB, mr=small)
    assert rmm.DeviceBuffer(size=MIB, mr=small).size == MIB


@pytest.mark.parametrize("kind", ["default", "per thread", "blocking", "non-blocking"])
def test_streams(rmm, gpu, kind):
    """Kernels write a buffer slowly, it is dropped, and its bytes are another one's."""
    from rmm.pylibrmm.stream import CudaStreamFlags, Stream

    class PerThread:
        def __cuda_stream__(self):
            return 0, 2

    made = {
        "default": lambda: rmm.pylibrmm.stream.DEFAULT_STREAM,
        "per thread": lambda: Stream(PerThread()),
        "blocking": Stream,
        "non-blocking": lambda: Stream(flags=CudaStreamFlags.NON_BLOCKING),
    }[kind]
    streams = [made() for _ in range(2)]
    small = arenapy_rmm.resource(Pool(2 * MIB, cuda.Device(), 2 * MIB))
    for i in range(200):
        stream = streams[i % 2]
        handle = stream.__cuda_stream__()[1] or 1
        buffer = rmm.DeviceBuffer(size=2 * MIB, stream=stream, mr=small)
        gpu.write_slowly(handle, buffer.ptr, 64 << 10, i, 20)
        gpu.count_wrong(handle, buffer.ptr, 64 << 10, i)
        del buffer
    assert gpu.how_many_wrong() == 0


def test_threads(rmm, pool):
    wrong = []

    def work(number):
        try:
            for i in range(300):
                data = bytes([number]) * (1000 + i)
                if rmm.DeviceBuffer.to_device(data).tobytes() != data:
                    wrong.append((number, i))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong, wrong[:3]
    assert pool.stats().active_allocations == 0


def test_behind_rmms_own_pool(rmm):
    pool = Pool(source=cuda.Device())
    front = rmm.mr.PoolMemoryResource(arenapy_rmm.resource(pool), initial_pool_size=16 * MIB)
    buffer = rmm.DeviceBuffer(size=MIB, mr=front)
    assert pool.stats().allocated_bytes >= 16 * MIB
    del buffer
    del front
    gc.collect()
    assert pool.stats().allocated_bytes == 0


@pytest.mark.parametrize("kind", ["CudaMemoryResource", "CudaAsyncMemoryResource", "pool"])
def test_rmms_memory_as_a_source(rmm, gpu, kind):
    """Kernels of ours write slowly, the Pool ends, and RMM has the bytes for kernels of its own."""
    upstream = rmm.mr.CudaMemoryResource()
    resource = (
        rmm.mr.PoolMemoryResource(upstream, 64 * MIB) if kind == "pool" else getattr(rmm.mr, kind)()
    )
    stream = cuda.Stream()
    for i in range(50):
        pool = Pool(source=arenapy_rmm.Source(resource), stream=stream)
        block = pool.alloc(32 * MIB)
        assert (block.kind, block.device_id) == ("device", 0)
        gpu.write_slowly(stream, block.address, 64 << 10, 0xBAD, 20_000)
        del block, pool
        gc.collect()
        buffer = rmm.DeviceBuffer(size=32 * MIB, mr=resource)
        gpu.write_slowly(1, buffer.ptr, 64 << 10, i)
        gpu.count_wrong(1, buffer.ptr, 64 << 10, i)
        del buffer
    assert gpu.how_many_wrong() == 0
    small = rmm.mr.LimitingResourceAdaptor(resource, MIB)
    with pytest.raises(OutOfMemory, match="of RMM's LimitingResourceAdaptor were refused"):
        Pool(source=arenapy_rmm.Source(small)).alloc(8 * MIB)
