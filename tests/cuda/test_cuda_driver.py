"""The CUDA driver without a GPU: what is asked of it, what it says, and how that is told."""

import ctypes
import gc
import os
import pickle
import signal
import sys
import threading
import types

import pytest
from simulated_driver import INVALID_VALUE, SimulatedDriver, simulated

import arenapy
from arenapy import cuda
from arenapy.cuda import driver


@pytest.fixture
def one():
    with simulated() as one:
        yield one


def fake_cuda_python(monkeypatch, capi):
    """`from cuda.bindings import cydriver` finds this."""
    cydriver = types.ModuleType("cuda.bindings.cydriver")
    cydriver.__pyx_capi__ = capi
    bindings = types.ModuleType("cuda.bindings")
    bindings.cydriver = cydriver
    package = types.ModuleType("cuda")
    package.bindings = bindings
    for module in (package, bindings, cydriver):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_without_cuda_python(monkeypatch):
    driver.use(None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    for call in (cuda.memory_info, cuda.devices, cuda.device_heap_limit):
        with pytest.raises(
            cuda.Unavailable, match=r"cuda-python.*pip install .arenapy-memory\[cuda"
        ):
            call()


def test_a_cuda_python_of_another_interface(monkeypatch):
    driver.use(None)
    fake_cuda_python(monkeypatch, {})
    with pytest.raises(cuda.Unavailable, match=r"cuInit of the installed cuda-python is nothing"):
        cuda.memory_info()


@pytest.mark.parametrize("name", [name for name, _ in driver.ENTRIES if "_12" not in name])
def test_another_signature_is_refused(name):
    entries = SimulatedDriver().entries
    entries[name] = (entries[name][0], "CUresult (short)")
    if name in driver.CHANGED:  # it must be one of two
        entries.pop(name)
    try:
        with pytest.raises(cuda.Unavailable, match=name):
            driver.use(entries)
    finally:
        driver.use(None)


def test_either_signature_of_what_changed_will_do():
    both = dict(driver.ENTRIES)
    for name in ("cuMemAdvise", "cuMemPrefetchAsync"):
        fake = SimulatedDriver()
        fake.entries[name] = (fake.entries[name][0], both[name + "_12"])
        driver.use(fake.entries)
        assert cuda.memory_info().total_bytes
        driver.use(None)


def test_no_device():
    fake = SimulatedDriver()
    fake.fails["cuInit"] = 100
    with pytest.raises(cuda.Unavailable, match="sees no device"):
        driver.use(fake.entries)
    driver.use(None)


def test_memory_of_each_device(one):
    assert cuda.memory_info(1) == cuda.DeviceMemory(1, "Simulated 1", 64 << 20, 128 << 20)
    assert [info.total_bytes for info in cuda.devices()] == list(one.MEMORY)
    assert one.calls["cuDevicePrimaryCtxRetain"] == 2, "once for each"
    assert one.calls["cuCtxPushCurrent"] == one.calls["cuCtxPopCurrent"] == 3


def test_what_allocators_here_have_of_it(one):
    """Reserved, and in blocks; of streams' own pools, too; pinned memory is the host's."""
    mib = 1 << 20
    others = cuda.memory_info()
    pool = arenapy.Pool(16 * mib, cuda.Device(), 4 * mib)
    slab = arenapy.Slab(mib, 2, cuda.DriverPool())
    bump = arenapy.Bump(mib, cuda.Managed())
    pinned = arenapy.Slab(mib, 2, cuda.Pinned(mapped=False))
    blocks = [pool.alloc(mib), slab.alloc(), bump.alloc(1000), pinned.alloc()]
    info = cuda.memory_info()
    assert info.reserved_bytes - others.reserved_bytes == (4 + 2 + 1) * mib
    assert info.allocated_bytes - others.allocated_bytes == 2 * mib + 1000
    assert cuda.memory_info(1).reserved_bytes == 0
    blocks.clear()
    assert cuda.memory_info().allocated_bytes <= others.allocated_bytes + 1000
    del pool, slab, bump
    gc.collect()
    assert cuda.memory_info().reserved_bytes == others.reserved_bytes


def test_the_heap_of_kernels(one):
    assert cuda.device_heap_limit() == 8 << 20
    assert cuda.device_heap_limit((1 << 20) + 1) == (1 << 20) + 4096
    assert cuda.device_heap_limit(0, device_id=1) == 0


@pytest.mark.parametrize("device_id", [-1, 2, 300, 2**31, 2**63, -(2**70)])
def test_no_such_device(one, device_id):
    for call in (cuda.memory_info, lambda i: cuda.device_heap_limit(device_id=i)):
        with pytest.raises(ValueError, match=f"={device_id} is not a CUDA device; there are 2"):
            call(device_id)


def test_what_is_no_ordinal_and_no_size(one):
    with pytest.raises(TypeError, match=r"device_id='0' is not an ordinal"):
        cuda.memory_info("0")
    with pytest.raises(ValueError, match="-1"):
        cuda.device_heap_limit(-1)
    with pytest.raises(TypeError):
        cuda.device_heap_limit("1")
    assert one.heap == 8 << 20


def test_what_an_error_has(one):
    """Which call and result is told; the rest of each call is in tests/faults."""
    one.fails["cuMemGetInfo"] = INVALID_VALUE
    with pytest.raises(cuda.CudaError, match=r"cuMemGetInfo failed: .*invalid argument") as caught:
        cuda.memory_info()
    error = caught.value
    assert (error.result, error.name) == (1, "CUDA_ERROR_INVALID_VALUE")
    assert not one.current
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.result, again.name) == (str(error), error.result, error.name)


def test_a_fork_during_the_first_use(monkeypatch):
    """The child is told so, and does not wait for a thread that it does not have."""
    driver.use(None)
    other = SimulatedDriver()
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = (
        ctypes.py_object,
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
    )
    kept = {name: signature.encode() for name, (_, signature) in other.entries.items()}
    fake_cuda_python(
        monkeypatch,
        {name: new(address, kept[name], None) for name, (address, _) in other.entries.items()},
    )
    inside, go = threading.Event(), threading.Event()

    def before(name):
        if name == "cuInit":
            inside.set()
            go.wait(20)

    other.before_call = before
    thread = threading.Thread(target=cuda.memory_info)
    try:
        thread.start()
        assert inside.wait(20)
        child = os.fork()
        if child == 0:
            signal.alarm(5)
            try:
                cuda.memory_info()
            except cuda.Unavailable as error:
                os._exit("forked" not in str(error))
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        go.set()
        thread.join()
        driver.use(None)
        other.close()
