"""On two real GPUs of one host: several devices behind one object, and copies between them."""

import contextlib
import itertools
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
from real_gpu import content, current_in, done, need_gpu, output_of, two_gpus

from arenapy import OutOfMemory, cuda

KIB, MIB = 1 << 10, 1 << 20
ROUNDS = 10_000
BLOCK = 64 * KIB
POOL = 2 * MIB  # of each device: one block, so that the next one has the memory of the last
SLOW = 20  # microseconds that a kernel waits before it writes
WAYS = {"direct": None, "through the host": False}  # peer_access


@pytest.fixture
def two():
    with two_gpus() as gpus:
        yield gpus


def program(text):
    """What a program prints that begins like this one."""
    return output_of("import arenapy\nfrom arenapy import cuda\n" + textwrap.dedent(text))


def test_a_pool_for_each(two):
    gpus = cuda.Devices([0, 1], max_bytes=64 * MIB)
    for device in gpus.pools:
        block = gpus.alloc(MIB, device=device)
        block.fill(device + 1)
        assert block.device_id == device
        assert (content(block) == device + 1).all()
        with pytest.raises(OutOfMemory):
            gpus.alloc(65 * MIB, device=device)
    with current_in(two[1]):
        assert gpus.alloc(MIB).device_id == 1
    assert gpus.stats().total_allocations == sum(pool.stats().total_allocations for pool in gpus)
    gpus.check()


@pytest.mark.parametrize("way", WAYS)
def test_from_threads_without_a_context(two, way):
    gpus = cuda.Devices([0, 1], max_bytes=256 * MIB, peer_access=WAYS[way])
    wrong = []

    def work(number):
        rng = np.random.default_rng(number)
        for i in range(50):
            data = rng.integers(0, 256, 3 * MIB + i, np.uint8)
            blocks = [gpus.alloc(len(data), device=device) for device in gpus.pools]
            near, far = rng.permutation(2)
            blocks[near].copy_from(data)
            blocks[far].copy_from(blocks[near])
            if not np.array_equal(content(blocks[far]), data):
                wrong.append((number, i))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong
    gpus.check()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("source", [cuda.Device, cuda.DriverPool])
def test_all_bytes_arrive(two, source, way):
    gpus = cuda.Devices([0, 1], source=source, peer_access=WAYS[way])
    rng = np.random.default_rng(3)
    for nbytes in (1, MIB - 1, MIB, 16 * MIB + 12345, 64 * MIB + 1):
        data = rng.integers(0, 256, nbytes, np.uint8)
        for near, far in ((0, 1), (1, 0)):
            a, b = gpus.alloc(nbytes, device=near), gpus.alloc(nbytes, device=far)
            for stream in (None, cuda.Stream(near), cuda.Stream(far), 1):
                a.copy_from(data)
                b.fill(0)
                b.copy_from(a, stream=stream)
                if stream == 1:  # of the target's device
                    with current_in(two[far]):
                        two[far].synchronize()
                elif stream is not None:
                    stream.synchronize()
                assert np.array_equal(content(b), data), (nbytes, near, stream)


@pytest.mark.parametrize("way", WAYS)
def test_dropped_while_it_is_copied(two, way):
    """Both ends at once, and others get their memory: no byte of a copy is theirs."""
    gpus = cuda.Devices([0, 1], max_bytes=POOL, initial_bytes=POOL, peer_access=WAYS[way])
    copied = BLOCK if way == "direct" else MIB  # smaller copies the driver makes
    streams = [cuda.Stream(device) for device in gpus.pools]
    others = [cuda.Stream(device) for device in gpus.pools]
    for i in range(ROUNDS):
        near = i % 2
        far = 1 - near
        on = streams[near] if i % 4 < 2 else streams[far]
        source = gpus.alloc(POOL, device=near, stream=streams[near])
        with current_in(two[near]):
            two[near].write_slowly(streams[near], source.address, copied, i, SLOW if i % 3 else 0)
        target = gpus.alloc(POOL, device=far, stream=streams[far])
        on.wait(streams[far if on is streams[near] else near])
        target[:copied].copy_from(source[:copied], stream=on)
        if on is not streams[far]:
            streams[far].wait(on)
        address = target.address
        with current_in(two[far]):
            two[far].count_wrong(streams[far], address, copied, i)
        del source, target
        for device in (near, far):
            again = gpus.alloc(POOL, device=device, stream=others[device])
            with current_in(two[device]):
                two[device].write_slowly(others[device], again.address, copied, ~i)
            del again
    for gpu in two:
        with current_in(gpu):
            assert gpu.how_many_wrong() == 0
    gpus.check()
    gpus.stats()
    assert gpus.stats().pending_bytes == 0


@pytest.mark.parametrize("end", ["source", "target"])
def test_a_copy_of_which_nobody_was_told_is_overwritten(two, end):
    """The twin of the test above, which the driver's call alone makes: it finds corruption."""
    gpus = cuda.Devices([0, 1], max_bytes=POOL, initial_bytes=POOL)
    if gpus.refused:
        pytest.skip("the driver would wait on the host for a stream that is held")
    stream = cuda.Stream(1)
    n = 20
    for i in range(n):
        source, target = gpus.alloc(POOL, device=0), gpus.alloc(POOL, device=1)
        addresses = {"source": source.address, "target": target.address}
        with current_in(two[0]):
            two[0].write_slowly(1, source.address, BLOCK, i)
            two[0].synchronize()
        with current_in(two[1]):
            two[1].hold(stream)
            done(two[1].driver.cuMemcpyPeerAsync(
                target.address, two[1].context, source.address, two[0].context, BLOCK,
                stream.handle,
            ))  # fmt: skip
        if end == "source":
            with current_in(two[1]):
                two[1].count_wrong(stream, target.address, BLOCK, i)
            del source
        else:
            del target
        device = 0 if end == "source" else 1
        again = gpus.alloc(POOL, device=device)
        assert again.address == addresses[end]
        with current_in(two[device]):
            two[device].write_slowly(1, again.address, BLOCK, ~i)
            two[device].synchronize(1)
        two[1].let_go()
        stream.synchronize()
        if end == "target":
            with current_in(two[1]):
                two[1].count_wrong(1, again.address, BLOCK, ~i)
                two[1].synchronize()
        source = target = again = None
    with current_in(two[1]):
        assert two[1].how_many_wrong() == n * BLOCK // 4


@pytest.mark.parametrize("way", WAYS)
def test_random_programs(two, way):
    """Many blocks on both devices, copied from one to the other; each holds its pattern."""
    gpus = cuda.Devices([0, 1], max_bytes=64 * MIB, peer_access=WAYS[way])
    rng = np.random.default_rng(20)
    streams = [[cuda.Stream(i) for _ in range(2)] for i in gpus.pools]
    live = []
    for i in range(5000):
        if live and rng.random() < 0.5:
            block, value, nbytes, its = live.pop(rng.integers(len(live)))
            device = block.device_id
            with current_in(two[device]):
                two[device].count_wrong(its, block.address, nbytes, value)
            far = 1 - device
            if rng.random() < 0.5:
                s = streams[far][rng.integers(2)]
                with contextlib.suppress(OutOfMemory):
                    target = gpus.alloc(nbytes, device=far, stream=s)
                    s.wait(its)
                    target.copy_from(block, stream=s)
                    live.append((target, value, nbytes, s))
                    target = None
            block.release(its)
            block = None
            continue
        device = int(rng.integers(2))
        s = streams[device][rng.integers(2)]
        nbytes = int(2 ** rng.uniform(8, 22)) // 4 * 4
        try:
            block = gpus.alloc(nbytes, device=device, stream=s)
        except OutOfMemory:
            live.clear()
            continue
        with current_in(two[device]):
            slow = SLOW if rng.random() < 0.3 else 0
            two[device].write_slowly(s, block.address, nbytes, i, slow)
        live.append((block, i, nbytes, s))
        if i % 500 == 0:
            gpus.check()
    block = None
    live.clear()
    for gpu in two:
        with current_in(gpu):
            assert gpu.how_many_wrong() == 0
    gpus.check()


def test_a_context_that_fails_harms_nothing_on_the_other_device():
    """In a program of its own: a kernel traps on device 1, after which its context is lost.

    What the driver still does for device 0 is its own affair. It refused more memory here.
    """
    need_gpu(2)
    program("""
        from cuda.bindings import driver as cu
        gpus = cuda.Devices([0, 1], peer_access=False)
        here = [gpus.alloc(1 << 20, device=0) for _ in range(3)]
        there = gpus.alloc(1 << 20, device=1)
        s = cuda.Stream(1)
        there.copy_from(here[0], stream=s)
        here[1].copy_from(there, stream=s)
        context = cu.cuDevicePrimaryCtxRetain(1)[1]
        cu.cuCtxPushCurrent(context)
        head = b".version 7.0\\n.target sm_70\\n.address_size 64\\n"
        code = head + b".visible .entry f()\\n{\\n    trap;\\n    ret;\\n}\\n\\0"
        error, module = cu.cuModuleLoadData(code)
        assert error == 0, error
        function = cu.cuModuleGetFunction(module, b"f")[1]
        cu.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, s.handle, 0, 0)
        assert cu.cuStreamSynchronize(s.handle)[0] != 0
        cu.cuCtxPopCurrent()
        try:
            there.fill(1)
        except cuda.CudaError as error:
            print(error)
        else:
            raise SystemExit("device 1 works")
        del here[1:], there
        for nbytes in (1 << 20, 8 << 20):            # what is idle; more
            try:
                block = gpus.alloc(nbytes, device=0)
                block.copy_from(bytes([7]) * nbytes)
                back = bytearray(nbytes)
                block.copy_to(back)
            except cuda.CudaError as error:
                print(nbytes, error)
            else:
                print(nbytes, "served")
                assert back == bytes([7]) * nbytes
        gpus.check()
        assert gpus.stats().active_allocations <= 2
    """)


# ---- other libraries ----


def test_cupy_on_two(two):
    cupy = pytest.importorskip("cupy")
    gpus = cuda.Devices([0, 1])
    arrays = []
    for device in gpus.pools:
        with cupy.cuda.Device(device):
            array = cupy.asarray(gpus.alloc(4 * MIB, device=device).view(dtype="f4"))
            array[...] = device + 1
            arrays.append(array)
    for array, device in zip(arrays, gpus.pools, strict=True):
        assert array.device.id == device
        with cupy.cuda.Device(device):
            assert float(array.sum()) == (device + 1) * MIB
    block = gpus.alloc(4 * MIB, device=1)
    block.copy_from(arrays[0])
    assert (content(block, "f4") == 1).all()


def test_cupys_arrays_on_two():
    need_gpu(2)
    pytest.importorskip("cupy")
    pytest.importorskip("arenapy.interop.cupy")
    program("""
        import cupy
        from arenapy.interop import cupy as arenapy_cupy
        gpus = cuda.Devices([0, 1])
        arenapy_cupy.use(*gpus)
        arrays = []
        for device in (0, 1):
            with cupy.cuda.Device(device):
                arrays.append(cupy.full(1 << 20, device + 1, "f4"))
                used = cupy.get_default_memory_pool().used_bytes()
                assert used == gpus[device].stats().allocated_bytes == 4 << 20
        with cupy.cuda.Device(1):
            there = cupy.asarray(arrays[0])
            assert there.device.id == 1
            assert float((there + arrays[1]).sum()) == 3 << 20
            del there
        arrays.clear()
        gpus.check()
        for device in (0, 1):
            with cupy.cuda.Device(device):
                cupy.cuda.get_current_stream().synchronize()
        assert gpus.stats().allocated_bytes == 0
    """)


TORCH = """
    import torch
    from arenapy.interop import torch as arenapy_torch
    gpus = cuda.Devices([0, 1])
    arenapy_torch.use(*gpus)
"""


def test_torch_on_two():
    need_gpu(2)
    pytest.importorskip("torch")
    program(
        TORCH
        + """
    x = torch.arange(1 << 20, device="cuda:0")
    y = x.to("cuda:1")
    for device, tensor in ((0, x), (1, y)):
        (block,) = [one for one in gpus[device].blocks() if one.state == "live"]
        assert block.address == tensor.data_ptr()
        assert torch.cuda.memory_allocated(device) == gpus[device].stats().allocated_bytes
    assert torch.equal(y.cpu(), torch.arange(1 << 20))
    for i in range(500):
        z = torch.full((1 << 18,), i, device=f"cuda:{i % 2}")
        w = z.to(f"cuda:{1 - i % 2}", non_blocking=True)
        del z
        torch.full((1 << 18,), -1, device=f"cuda:{i % 2}")
        assert bool((w == i).all()), i
    del x, y, w, tensor
    gpus.check()
    assert gpus.stats().active_allocations == 0
    """
    )


def test_nccl_in_one_process():
    need_gpu(2)
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_nccl_available():
        pytest.skip("torch has no NCCL")
    program(
        """
    import os
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    """
        + TORCH
        + """
    import torch.cuda.nccl as nccl
    for n in (1000, 1 << 20, 16 << 20):
        tensors = [torch.full((n,), float(i + 1), device=f"cuda:{i}") for i in range(2)]
        nccl.all_reduce(tensors)
        for i, tensor in enumerate(tensors):
            assert bool((tensor == 3).all()), (n, i)
    assert gpus[0].stats().total_allocations and gpus[1].stats().total_allocations
    gpus.check()
    """
    )


WORKER = """
import os, sys
os.environ["NCCL_NVLS_ENABLE"] = "0"
rank, file = int(sys.argv[1]), sys.argv[2]
import arenapy, torch
import torch.distributed as dist
from arenapy import cuda
from arenapy.interop import torch as arenapy_torch
gpus = cuda.Devices([rank])
arenapy_torch.use(*gpus)
torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method=f"file://{file}", rank=rank, world_size=2)
for i in range(200):
    x = torch.full((1 << 20,), float(rank + i), device=f"cuda:{rank}")
    dist.all_reduce(x)
    total = x * 1
    del x
    torch.full((1 << 20,), -1.0, device=f"cuda:{rank}")
    assert bool((total == 2 * i + 1).all()), i
del total
work = [
    dist.all_reduce(torch.full((1 << 18,), 1.0, device="cuda"), async_op=True) for _ in range(50)
]
for one in work:
    one.wait()
torch.cuda.synchronize()
dist.destroy_process_group()
gpus.check()
assert gpus.stats().total_allocations > 200
print("ok")
"""


def test_nccl_in_two_processes(tmp_path):
    need_gpu(2)
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_nccl_available():
        pytest.skip("torch has no NCCL")
    file = tmp_path / "rendezvous"
    children = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(file)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [one.communicate(timeout=240) for one in children]
    finally:
        for one in children:
            one.kill()
    for (out, err), one in zip(outputs, children, strict=True):
        assert one.returncode == 0, err
        assert out.strip().endswith("ok")


def test_the_benchmark_runs():
    need_gpu(2)
    from asv_benches.gpu import bench_devices

    if cuda.Devices([0, 1]).refused:
        pytest.skip("no device reaches the other one's memory")
    lines = list(itertools.islice(bench_devices.direct(quick=True), 8))
    assert lines and all(line.value > 0 for line in lines)
