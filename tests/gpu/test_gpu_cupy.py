"""CuPy's arrays in a Pool, on a real GPU."""

import gc
import subprocess
import sys
import textwrap
import threading

import pytest

from arenapy import Pool, cuda
from arenapy.interop import cupy as arenapy_cupy

MIB = 1 << 20


@pytest.fixture
def pool(gpu, cupy):
    return Pool(source=cuda.Device())


@pytest.fixture
def allocator(pool, cupy):
    """The whole process's for the test, since a thread's own would not be other threads'."""
    before = cupy.cuda.get_allocator()
    ours = arenapy_cupy.allocator(pool)
    cupy.cuda.set_allocator(ours)
    yield ours
    cupy.cuda.set_allocator(before)


@pytest.fixture
def burn(cupy):
    """A kernel that waits for so many clocks, then sets all bytes."""
    code = r"""
    extern "C" __global__ void burn(unsigned char *at, long long n, int value, long long clocks) {
        long long start = clock64();
        while (clock64() - start < clocks) {}
        long long step = gridDim.x * blockDim.x;
        for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
            at[i] = value;
    }
    """
    kernel = cupy.RawKernel(code, "burn")

    def launch(array, value, clocks=1_000_000):
        kernel((64,), (256,), (array, cupy.int64(array.nbytes), cupy.int32(value),
                               cupy.int64(clocks)))  # fmt: skip

    return launch


def test_the_fields_of_cupys_objects_are_known(allocator, cupy):
    """So this version of CuPy has the quick way."""
    from arenapy.interop import cupy_blocks

    assert cupy_blocks.knows_fields(), cupy.__version__


def test_arrays_are_in_the_pool(allocator, pool, cupy):
    x = cupy.arange(1 << 20)
    (block,) = [one for one in pool.blocks() if one.state == "live"]
    assert block.address == x.data.ptr
    assert int(x.sum()) == (1 << 20) * ((1 << 20) - 1) // 2
    assert (cupy.asnumpy(x)[::1000] == range(0, 1 << 20, 1000)).all()
    y = cupy.sort(cupy.random.random(100_000))
    assert bool((y[1:] >= y[:-1]).all())
    m = cupy.random.random((300, 300))
    assert float(cupy.abs(cupy.linalg.inv(m) @ m - cupy.eye(300)).max()) < 1e-6
    assert float(cupy.abs(cupy.fft.ifft(cupy.fft.fft(m)) - m).max()) < 1e-9
    del x, y, m
    gc.collect()
    pool.check()


def test_out_of_memory_is_cupys(gpu, cupy):
    small = Pool(64 * MIB, cuda.Device())
    with cupy.cuda.using_allocator(arenapy_cupy.allocator(small)):
        kept = cupy.zeros(20 * MIB, "u1")
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError, match=r"max_bytes=67108864"):
            cupy.zeros(100 * MIB, "u1")
        assert int(cupy.ones(20 * MIB, "u1").sum() + kept.sum()) == 20 * MIB


@pytest.mark.parametrize("kind", ["non-blocking", "blocking", "null", "per thread"])
def test_freed_in_the_order_of_the_stream(allocator, pool, cupy, burn, kind):
    """An array is dropped while its stream still writes, and its bytes are used again at once."""
    stream = {
        "non-blocking": lambda: cupy.cuda.Stream(non_blocking=True),
        "blocking": cupy.cuda.Stream,
        "null": lambda: cupy.cuda.Stream.null,
        "per thread": lambda: cupy.cuda.Stream.ptds,
    }[kind]()
    wrong = 0
    with stream:
        for i in range(100):
            x = cupy.empty(MIB, "u1")
            burn(x, i % 100 + 100)
            y = x.copy()
            del x
            burn(cupy.empty(MIB, "u1"), 1, 0)
            wrong += (y != i % 100 + 100).sum()
            del y
    stream.synchronize()
    assert int(wrong) == 0
    pool.check()


def test_another_stream_gets_bytes_when_they_are_done_with(gpu, cupy, burn):
    """A pool with room for few arrays: those of one stream go to the other one."""
    small = Pool(8 * MIB, cuda.Device(), 8 * MIB)
    with cupy.cuda.using_allocator(arenapy_cupy.allocator(small)):
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
        wrong = []
        for i in range(150):
            with streams[i % 3]:
                x = cupy.empty(2 * MIB, "u1")
                burn(x, i % 200)
                wrong.append(int((x != i % 200).sum()) if i % 7 == 0 else 0)
                burn(x, i % 200, 300_000)
                del x
        for stream in streams:
            stream.synchronize()
        assert not any(wrong)
    small.check()


def test_streams_come_and_go(allocator, pool, cupy):
    for i in range(300):
        with cupy.cuda.Stream(non_blocking=bool(i % 2)):
            x = cupy.full(100_000, i)
            assert int(x[-1]) == i
            del x
    cupy.cuda.Device().synchronize()
    pool.trim()
    pool.check()


def test_threads(allocator, pool, cupy):
    wrong = []

    def work(number):
        try:
            with cupy.cuda.Stream(non_blocking=True):
                for i in range(200):
                    arrays = [cupy.full(n, number * 1000 + i) for n in (100, 5000, 300_000)]
                    wrong.extend([(number, i) for x in arrays
                                  if int((x != number * 1000 + i).sum())])  # fmt: skip
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong, wrong[:3]
    cupy.cuda.Device().synchronize()
    assert pool.stats().active_allocations == 0
    pool.check()


def test_a_capture(allocator, cupy):
    x = cupy.zeros(1000)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x += 1  # compiled before the capture
        stream.synchronize()
        stream.begin_capture()
        x += 1
        graph = stream.end_capture()
        for _ in range(3):
            graph.launch(stream)
        stream.synchronize()
    assert float(x[0]) == 4


@pytest.mark.parametrize("blocking", [False, True])
def test_arrays_that_are_made_in_a_capture(allocator, pool, cupy, blocking):
    """1,000 launches, while the default stream makes arrays of the same size and fills them."""
    stream = cupy.cuda.Stream(non_blocking=not blocking)
    x = cupy.zeros(1 << 16)
    for graph in (None, True):  # compiled before the capture
        cupy.cuda.Device().synchronize()
        with stream:
            if graph:
                stream.begin_capture()
            y = (x + 1) * 2 - 3
            z = y + x
            x += 1
            if graph:
                graph = stream.end_capture()
    x[:] = 0
    cupy.cuda.Device().synchronize()
    wrong = cupy.zeros((), "i8")
    for i in range(1000):
        with stream:
            graph.launch(stream)
            wrong += (y != 2 * i - 1).sum() + (z != 3 * i - 1).sum()
        others = [cupy.full(1 << 16, -9.0) for _ in range(4)]
        del others
        if i % 250 == 0:
            pool.trim(), pool.check()
    cupy.cuda.Device().synchronize()
    assert int(wrong) == 0
    del y, z, graph
    cupy.cuda.Device().synchronize()
    pool.check()


def test_pinned_memory(gpu, cupy):
    pinned = Pool(source=cuda.Pinned())
    from cupy import _default_pinned_memory_pool as before

    cupy.cuda.set_pinned_memory_allocator(arenapy_cupy.pinned_allocator(pinned))
    try:
        import cupyx

        host = cupyx.empty_pinned((1000,), "i4")
        assert pinned.stats().active_allocations == 1
        host[:] = 5
        assert int(cupy.asarray(host).sum()) == 5000
        x = cupy.arange(1 << 20)
        assert (cupy.asnumpy(x) == range(1 << 20)).all()
        for i in range(50):
            assert int(cupy.asarray([i] * 1000).sum()) == 1000 * i
        del host
        cupy.cuda.Device().synchronize()
        cupy.asarray([1])
        assert pinned.stats().active_allocations <= 2
    finally:
        cupy.cuda.set_pinned_memory_allocator(before.malloc)


def test_use_in_a_program_with_torch(gpu, cupy):
    """One Pool for both libraries."""
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent("""
            import arenapy
            from arenapy import cuda
            from arenapy.interop import cupy as arenapy_cupy
            from arenapy.interop import torch as arenapy_torch
            pool = arenapy.Pool(source=cuda.Device())
            arenapy_cupy.use(pool)
            arenapy_torch.use(pool)
            import cupy, torch
            x = cupy.arange(1000, dtype="f4")
            y = torch.ones(1000, device="cuda")
            assert cupy.get_default_memory_pool().used_bytes() == pool.stats().allocated_bytes
            assert torch.cuda.memory_allocated() == pool.stats().allocated_bytes
            assert pool.stats().active_allocations == 2
            assert float((torch.from_dlpack(x) + y).sum()) == 500500
            for i in range(100):
                with cupy.cuda.Stream(non_blocking=True):
                    assert int(cupy.full(1000, i).sum()) == 1000 * i
                with torch.cuda.stream(torch.cuda.Stream()):
                    assert int(torch.full((1000,), i, device="cuda").sum()) == 1000 * i
            del x, y
            torch.cuda.synchronize()
            cupy.get_default_memory_pool().free_all_blocks()
            assert pool.stats().allocated_bytes == 0
            pool.check()
        """)],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "arenapy:" not in done.stderr, done.stderr


def test_figures_in_a_program_that_ends(gpu, cupy):
    """Arrays that live to the end do no harm then."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent("""
            import arenapy
            from arenapy import cuda
            from arenapy.interop import cupy as arenapy_cupy
            import cupy
            arenapy_cupy.use(arenapy.Pool(source=cuda.Device()))
            kept = [cupy.zeros(1000), cupy.zeros(1 << 20)]
            with cupy.cuda.Stream(non_blocking=True):
                kept.append(cupy.zeros(1 << 20))
            kept.append(kept)
            assert cupy.get_default_memory_pool().used_bytes() >= 16 << 20
        """)],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
