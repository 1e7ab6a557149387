"""What `arenapy.interop.torch` refuses, without torch or with a stand-in for it."""

import sys
import types

import pytest
from simulated_driver import simulated

import arenapy
from arenapy import cuda
from arenapy.interop import raw_blocks
from arenapy.interop import torch as arenapy_torch

MIB = 1 << 20


@pytest.fixture
def driver():
    with simulated() as one, one.on(0):
        yield one


def stand_in(monkeypatch, version="2.11.0", built=True):
    torch = types.ModuleType("torch")
    torch.__version__, torch.__file__ = version, "/nowhere/torch/__init__.py"
    torch.backends = types.SimpleNamespace(cuda=types.SimpleNamespace(is_built=lambda: built))
    plugged = types.SimpleNamespace(allocator=lambda: None)
    memory = types.SimpleNamespace(CUDAPluggableAllocator=lambda *given: plugged)
    torch.cuda = types.SimpleNamespace(memory=memory)
    torch._C = types.SimpleNamespace(_cuda_memoryStats=None)
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


class DeviceOfAUser:
    """A source whose memory says that it is a device's."""

    def region(self, nbytes):
        region = arenapy.Host().region(nbytes)
        return arenapy.Region.from_address(
            region.address, nbytes, kind="device", device_id=0, owner=region
        )


@pytest.mark.parametrize("call", [arenapy_torch.use, arenapy_torch.mem_pool])
@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (lambda: object(), TypeError, "is not a Pool; give arenapy.Pool"),
        (lambda: arenapy.Slab(64, 4), TypeError, "is not a Pool"),
        (lambda: arenapy.Pool(MIB), ValueError, "is over host memory"),
        (lambda: arenapy.Pool(4 * MIB, cuda.Managed()), ValueError, "is over managed memory"),
        (lambda: arenapy.Pool(MIB, DeviceOfAUser(), MIB), ValueError, "streams do not order"),
    ],
)
def test_what_is_no_pool_of_a_device(driver, call, given, error, text):
    with pytest.raises(error, match=text):
        call(given())
    assert raw_blocks.pools_in_use() == {}


def test_two_pools_or_none(driver):
    with pytest.raises(TypeError, match="no pool was given"):
        arenapy_torch.use()
    with pytest.raises(ValueError, match="two pools are given for device 0"):
        arenapy_torch.use(*(arenapy.Pool(4 * MIB, cuda.Device()) for _ in range(2)))


def test_the_pools_of_several_devices(driver, monkeypatch):
    """Each serves the device that torch names."""
    gpus = cuda.Devices()
    served = []
    monkeypatch.setattr(arenapy_torch, "_serve", lambda torch, pools: served.append(pools))
    monkeypatch.setattr(arenapy_torch, "_allocator", object())
    torch = stand_in(monkeypatch)
    torch.cuda.memory.change_current_allocator = lambda allocator: None
    arenapy_torch.use(*gpus)
    assert served == [{0: gpus[0], 1: gpus[1]}]
    with pytest.raises(ValueError, match="two pools are given for device 1"):
        arenapy_torch.use(*gpus, arenapy.Pool(4 * MIB, cuda.Device(1)))


def test_no_torch(driver, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match="pip install torch"):
        arenapy_torch.use(arenapy.Pool(4 * MIB, cuda.Device()))


def test_a_torch_that_does_not_do(driver, monkeypatch):
    pool = arenapy.Pool(4 * MIB, cuda.Device())
    stand_in(monkeypatch, version="2.5.1")
    with pytest.raises(ImportError, match=r"torch 2.5.1 is older than 2.6"):
        arenapy_torch.use(pool)
    stand_in(monkeypatch, built=False)
    with pytest.raises(ImportError, match="was built without CUDA"):
        arenapy_torch.use(pool)
    stand_in(monkeypatch)  # without the libraries in which its exceptions are
    with pytest.raises(ImportError, match="does not have the function that raises its errors"):
        arenapy_torch.use(pool)
    assert raw_blocks.pools_in_use() == {}


def test_another_pool(driver, monkeypatch):
    stand_in(monkeypatch)
    first, second = ({0: arenapy.Pool(4 * MIB, cuda.Device())} for _ in range(2))
    raw_blocks.serve(first, lambda device, handle: 1)
    try:
        with pytest.raises(RuntimeError, match="a program has one Pool for each device"):
            arenapy_torch.use(second[0])
        assert raw_blocks.pools_in_use() == first
    finally:
        raw_blocks.withdraw(first)
