"""numba's memory manager and RMM's resource in a Pool: their own objects, on a simulated driver."""

import ctypes
import gc
import os
import sys
import types

import pytest
from cuda_support import (
    LEGACY,
    PER_THREAD,
    a_gpu,
    backwards,
    new_stream,
    reads,
    slowly_fill,
)  # fmt: skip
from helpers import peek

from arenapy import Host, OutOfMemory, Pool, cuda
from arenapy.interop import cupy as arenapy_cupy
from arenapy.interop import numba as arenapy_numba
from arenapy.interop import rmm as arenapy_rmm

MIB = 1 << 20


@pytest.fixture
def driver():
    with a_gpu(leaks=True) as one:
        yield one


@pytest.fixture
def pool(driver):
    return Pool(16 * MIB, cuda.Device())


def live(pool):
    return [one.address for one in pool.blocks() if one.state == "live"]


# ---- numba -------------------------------------------------------------------------------------


@pytest.fixture
def numba_cuda():
    pytest.importorskip("numba_cuda")
    return pytest.importorskip("numba.cuda")


class Context:
    """As numba's."""

    def __init__(self, device=0):
        self.device = types.SimpleNamespace(id=device)


@pytest.fixture
def context():
    return Context()


@pytest.fixture
def manager(numba_cuda, pool, context):
    return arenapy_numba.manager(pool)(context=context)


def test_a_pointer_and_its_views_keep_a_block(manager, pool, driver):
    pointer = manager.memalloc(1000)
    assert [pointer.device_pointer_value] == live(pool)
    assert (pointer.size, pointer.is_managed) == (1000, True)
    view = pointer.view(100, 300)
    assert view.device_pointer_value == pointer.device_pointer_value + 100
    part = view.view(50)
    del pointer, view
    gc.collect()
    assert len(live(pool)) == 1
    del part
    gc.collect()
    pool.trim()  # which asks; streams say so when they have been given time
    driver.drain()
    pool.trim()
    assert pool.stats().reserved_bytes == 0


@pytest.mark.parametrize("own", [False, True])
def test_numbas_streams_come_after_the_pools_own(numba_cuda, driver, context, own):
    stream = cuda.Stream() if own else None
    pool = Pool(2 * MIB, cuda.Device(), 2 * MIB, stream=stream)
    manager = arenapy_numba.manager(pool)(context=context)
    mine = pool.alloc(2 * MIB)
    slowly_fill(driver, stream.handle if own else LEGACY, mine, 5)
    del mine
    pointer = manager.memalloc(2 * MIB)
    where = types.SimpleNamespace(address=pointer.device_pointer_value, nbytes=2 * MIB)
    user = new_stream(driver, flags=0).handle_
    slowly_fill(driver, user, where, 100)
    backwards(driver)
    assert set(peek(where.address, 2 * MIB)) == {100}


@pytest.mark.parametrize("which", ["legacy", "blocking", "own"])
def test_no_stream_finds_bytes_that_another_one_still_uses(numba_cuda, driver, context, which):
    """numba says of no array which streams use it."""
    own = new_stream(driver) if which == "own" else None
    pool = Pool(2 * MIB, cuda.Device(), 2 * MIB, stream=own)
    manager = arenapy_numba.manager(pool)(context=context)
    user = LEGACY if which == "legacy" else new_stream(driver, flags=0).handle_
    other = new_stream(driver, flags=0).handle_
    for i in range(4):
        pointer = manager.memalloc(2 * MIB)
        where = types.SimpleNamespace(address=pointer.device_pointer_value, nbytes=2 * MIB)
        slowly_fill(driver, user, where, i)
        driver.drain()
        seen = reads(driver, user, where.address, 2 * MIB)
        del pointer, where
        pointer = manager.memalloc(2 * MIB)  # the same bytes: there are no others
        where = types.SimpleNamespace(address=pointer.device_pointer_value, nbytes=2 * MIB)
        slowly_fill(driver, other, where, 100)
        while driver.step(-1):
            pass
        assert seen == [bytes([i]) * (2 * MIB)]
        del pointer, where


def test_numbas_out_of_memory_with_our_figures(manager, numba_cuda):
    with pytest.raises(numba_cuda.cudadrv.driver.CudaAPIError, match="bytes do not fit") as raised:
        manager.memalloc(100 * MIB)
    assert raised.value.code == 2


def test_a_device_without_a_pool(numba_cuda, pool):
    manager = arenapy_numba.manager(pool)(context=Context(1))
    with pytest.raises(RuntimeError, match=r"current device is 1, .* only for \[0\]"):
        manager.memalloc(100)


def test_what_numba_asks(manager, numba_cuda, pool, monkeypatch):
    assert manager.interface_version == 1
    assert isinstance(manager, numba_cuda.HostOnlyCUDAMemoryManager)
    asked = types.SimpleNamespace(cuMemGetInfo=lambda: (10 * MIB, 64 * MIB))
    monkeypatch.setattr(numba_cuda.cudadrv.driver, "driver", asked)
    manager.initialize()
    assert manager.deallocations.memory_capacity == 64 * MIB
    pool.alloc(1000).release()
    idle = pool.stats().idle_bytes
    assert idle > 0
    assert manager.get_memory_info() == (10 * MIB + idle, 64 * MIB)
    with pytest.raises(NotImplementedError, match="has no IPC handles"):
        manager.get_ipc_handle(None)


def test_the_driver_is_asked_once_how_large_the_device_is(manager, numba_cuda, monkeypatch):
    """numba calls initialize() for each array, and the question takes longer than all else."""
    asked = []
    of_driver = types.SimpleNamespace(cuMemGetInfo=lambda: asked.append(1) or (MIB, 64 * MIB))
    monkeypatch.setattr(numba_cuda.cudadrv.driver, "driver", of_driver)
    for _ in range(3):
        manager.initialize()
        manager.memalloc(1000)
    assert len(asked) == 1


def test_use_reaches_contexts_that_exist(numba_cuda, pool, context, monkeypatch):
    module = numba_cuda.cudadrv.driver
    without = types.SimpleNamespace(primary_context=None)
    devices = {0: types.SimpleNamespace(primary_context=context), 1: without}
    asked = types.SimpleNamespace(cuMemGetInfo=lambda: (0, 64 * MIB), devices=devices)
    monkeypatch.setattr(module, "driver", asked)
    monkeypatch.setattr(module, "_memory_manager", None)
    arenapy_numba.use(pool)
    assert module._memory_manager.pools == {0: pool}
    assert type(context.memory_manager) is module._memory_manager
    assert context.memory_manager.memalloc(100).device_pointer_value in live(pool)


def test_in_the_environment(numba_cuda, driver, monkeypatch):
    """As numba asks for the plugin that NUMBA_CUDA_MEMORY_MANAGER names."""
    asked = types.SimpleNamespace(get_device_count=lambda: 2)
    monkeypatch.setattr(numba_cuda.cudadrv.driver, "driver", asked)
    plugin = arenapy_numba._numba_memory_manager
    assert sorted(plugin.pools) == [0, 1]
    assert plugin(context=Context(1)).memalloc(100).size == 100
    with pytest.raises(AttributeError, match="no attribute 'managers'"):
        _ = arenapy_numba.managers


# ---- RMM ---------------------------------------------------------------------------------------


@pytest.fixture
def rmm():
    return pytest.importorskip("rmm")


@pytest.fixture
def stream_of(rmm):
    """RMM's object for a handle."""

    class Named:
        def __init__(self, handle):
            self.handle = handle

        def __cuda_stream__(self):
            return 0, self.handle

    from rmm.pylibrmm.stream import Stream

    return lambda handle: Stream(Named(handle))


@pytest.mark.parametrize("handle", [0, LEGACY, PER_THREAD])
def test_a_resource(rmm, stream_of, pool, driver, handle):
    resource = arenapy_rmm.resource(pool)
    address = resource.allocate(1000, stream_of(handle))
    assert [address] == live(pool)
    resource.deallocate(address, 1000, stream_of(handle))
    driver.drain()
    pool.trim()
    assert pool.stats().reserved_bytes == 0


@pytest.mark.parametrize("allocated_on", ["the one that reads", "legacy"])
def test_in_the_order_of_rmms_streams(rmm, stream_of, driver, allocated_on):
    """Given back on a stream that still reads; allocated for another one that writes."""
    resource = arenapy_rmm.resource(Pool(2 * MIB, cuda.Device(), 2 * MIB))
    one, two = new_stream(driver).handle_, new_stream(driver).handle_
    for i in range(4):
        first = LEGACY if allocated_on == "legacy" else one
        address = resource.allocate(2 * MIB, stream_of(first))
        where = types.SimpleNamespace(address=address, nbytes=2 * MIB)
        slowly_fill(driver, one, where, i)
        driver.drain()
        seen = reads(driver, one, address, 2 * MIB)
        resource.deallocate(address, 2 * MIB, stream_of(one))
        address = resource.allocate(2 * MIB, stream_of(two))
        slowly_fill(driver, two, where, 100)
        while driver.step(-1):
            pass
        assert seen == [bytes([i]) * (2 * MIB)]
        resource.deallocate(address, 2 * MIB, stream_of(two))


def test_rmms_out_of_memory_with_our_figures(rmm, pool):
    with pytest.raises(MemoryError, match="104857600 bytes do not fit into the pool"):
        arenapy_rmm.resource(pool).allocate(100 * MIB)


def test_as_an_upstream(rmm, pool):
    limited = rmm.mr.LimitingResourceAdaptor(arenapy_rmm.resource(pool), 4 * MIB)
    address = limited.allocate(MIB)
    ctypes.memset(address, 1, MIB)
    assert [address] == live(pool)
    limited.deallocate(address, MIB)
    assert live(pool) == []


@pytest.fixture
def lender(pool):
    """RMM's resource, whose memory is a Pool's: what it has lent is live there."""
    return arenapy_rmm.resource(pool)


def test_rmms_resource_as_a_source(rmm, pool, lender, driver):
    ours = Pool(8 * MIB, arenapy_rmm.Source(lender), MIB)
    block = ours.alloc(1000)
    (start,) = live(pool)
    assert start <= block.address < start + MIB and (block.kind, block.device_id) == ("device", 0)
    more = ours.alloc(4 * MIB)
    assert len(live(pool)) == len(ours.regions) == 2
    del more
    driver.drain()
    ours.trim()
    assert live(pool) == [start]
    del block, ours
    gc.collect()
    assert live(pool) == []


class Lender:
    """What a resource of RMM lends, by address; `seen`: what was there when it came back."""

    def __init__(self, rmm, source):
        self.pool, self.blocks, self.seen = Pool(16 * MIB, source), {}, []
        self.source = arenapy_rmm.Source(rmm.mr.CallbackMemoryResource(self.lend, self.take))

    def lend(self, nbytes, stream):
        block = self.pool.alloc(nbytes)
        self.blocks[block.address] = block
        return block.address

    def take(self, address, nbytes, stream):
        self.seen.append(ctypes.string_at(address, nbytes))
        self.blocks.pop(address).release()


def test_it_comes_back_when_streams_are_done(rmm, driver):
    lender, stream = Lender(rmm, cuda.Device()), new_stream(driver)
    ours = Pool(source=lender.source, stream=stream)
    block = ours.alloc(2 * MIB)
    slowly_fill(
        driver, stream.handle_, types.SimpleNamespace(address=block.address, nbytes=2 * MIB), 7
    )
    assert len(lender.blocks) == 1
    del block, ours
    gc.collect()
    assert lender.seen == [bytes([7]) * 2 * MIB] and not lender.blocks


def test_a_source_without_memory(rmm, pool, lender):
    ours = Pool(source=arenapy_rmm.Source(lender))
    with pytest.raises(OutOfMemory, match=r"100 MiB of RMM's Callback.*do not fit into the pool"):
        ours.alloc(100 * MIB)
    ours.check()
    assert live(pool) == []


@pytest.mark.parametrize("other", [cuda.Managed(), cuda.Device(1)])
def test_memory_of_another_place(rmm, driver, other):
    place = f"{other.hooks.kind} memory of device {other.ordinal}"
    lender = Lender(rmm, other)
    with pytest.raises(ValueError, match=f"gave {place}, and"):
        Pool(source=lender.source, initial_bytes=MIB)
    assert len(lender.seen) == 1 and not lender.blocks


def test_what_is_no_source(driver):
    with pytest.raises(TypeError, match="has no method 'allocate'; give a resource"):
        arenapy_rmm.Source(object())
    with pytest.raises(ValueError, match="ordinal=-1: devices are counted from 0"):
        arenapy_rmm.Source(types.SimpleNamespace(allocate=len, deallocate=len), -1)


class Resource:
    """A resource in the manner of RMM's, without RMM: the memory of Regions."""

    def __init__(self, driver, make):
        self.driver, self.make = driver, make
        self.lent, self.back = {}, []

    def allocate(self, nbytes):
        region = self.make(nbytes)
        self.lent[region.address] = region
        return region.address

    def deallocate(self, address, nbytes):
        self.back.append((ctypes.string_at(address, nbytes), self.driver.device()))
        del self.lent[address]


def test_what_is_refused_goes_back(driver):
    """Also if the driver does not know the address at all."""
    resource = Resource(driver, Host().region)
    with pytest.raises((ValueError, TypeError, BufferError, cuda.CudaError)):
        arenapy_rmm.Source(resource).region(1000)
    gc.collect()
    assert not resource.lent and len(resource.back) == 1


@pytest.mark.parametrize("ordinal", [0, 1])
def test_a_region_waits_for_streams_beside_small_allocations(driver, ordinal):
    """It comes back on its device, which may not be the current one."""
    driver.small_frees_wait = False
    resource = Resource(driver, cuda.Device(ordinal).region)
    source = arenapy_rmm.Source(resource, ordinal)
    kept, region = source.region(MIB), source.region(MIB)
    with driver.on(ordinal):
        stream = new_stream(driver)
    slowly_fill(driver, stream, types.SimpleNamespace(address=region.address, nbytes=MIB), 7)
    del region
    gc.collect()
    assert [(set(found), device) for found, device in resource.back] == [({7}, ordinal)]
    assert driver.device() == 0
    driver.drain()
    del kept


def test_a_source_in_a_forked_child(rmm, driver):
    lender = Lender(rmm, cuda.Device())
    region = lender.source.region(MIB)
    child = os.fork()
    if child == 0:
        del region
        gc.collect()
        os._exit(len(lender.seen))  # whoever lent it is not asked
    assert os.waitpid(child, 0)[1] == 0
    del region
    assert len(lender.seen) == 1


@pytest.mark.parametrize("library", ["numba", "rmm"])
def test_a_forked_child(request, library, pool, driver):
    """It gets no block, and frees nothing of the parent's."""
    if library == "numba":
        allocate = request.getfixturevalue("manager").memalloc
    else:
        resource = arenapy_rmm.resource(request.getfixturevalue("rmm") and pool)
        allocate = resource.allocate
    kept = allocate(MIB)
    asked = sum(driver.calls.values())
    child = os.fork()
    if child == 0:
        code = 1
        try:
            allocate(100)
        except Exception as error:
            code = 0 if "fork" in str(error) else 2
        if library == "rmm":
            resource.deallocate(kept, MIB)
        del kept
        os._exit(code or 3 * (sum(driver.calls.values()) != asked))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.stats().active_allocations == 1
    if library == "rmm":
        resource.deallocate(kept, MIB)
    del kept
    gc.collect()
    assert pool.stats().active_allocations == 0
    pool.check()


# ---- these and CuPy ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        arenapy_cupy.allocator, arenapy_cupy.use,
        arenapy_numba.manager, arenapy_numba.use,
        arenapy_rmm.resource,
    ],
)  # fmt: skip
def test_what_is_refused(driver, make, monkeypatch):
    with pytest.raises(TypeError, match="is not a Pool"):
        make(object())
    with pytest.raises(ValueError, match="is over host memory"):
        make(Pool(MIB))
    for name in ("cupy", "numba_cuda", "rmm"):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(__version__="0.1.0"))
    with pytest.raises(ImportError, match=r"0.1.0 is older than .*: pip install"):
        make(Pool(MIB, cuda.Device()))
    for name in ("cupy", "numba_cuda", "rmm"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="which is not installed: pip install"):
        make(Pool(MIB, cuda.Device()))
