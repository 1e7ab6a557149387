"""Sources of CUDA memory, and every allocator over each of them."""

import gc
import os

import numpy as np
import pytest
from cuda_support import ALLOCATORS, MIB, SOURCES, content, new_stream
from helpers import in_threads, peek
from simulated_driver import INVALID_VALUE, OUT_OF_MEMORY, UNKNOWN

from arenapy import Bump, OutOfMemory, Pool, Slab, cuda
from arenapy.cuda import backing
from arenapy.linux.limits import memory_info

THRESHOLD = 4  # CU_MEMPOOL_ATTR_RELEASE_THRESHOLD


@pytest.fixture(params=SOURCES)
def source(gpu, request):
    return SOURCES[request.param]()


# Regions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "host", "device_id"),
    [("device", False, 0), ("driver pool", False, 0), ("pinned", True, -1), ("managed", True, 0)],
)
def test_a_region_says_what_it_is(gpu, name, host, device_id):
    region = SOURCES[name]().region(3 * MIB)
    assert region.nbytes == 3 * MIB
    assert region.kind == name.replace("driver pool", "device")
    assert region.device_id == device_id
    assert region.host_accessible is host and region.device_accessible is True
    assert not region.readonly
    region.close()
    gpu.drain()
    assert not gpu.memory.registered and not gpu.memory.used[0]


def test_the_current_context_is_restored(gpu):
    gpu.current.append(0x2000)
    for name, make in SOURCES.items():
        region = make().region(MIB)
        assert gpu.current[-1] == 0x2000, name
        del region
        assert gpu.current[-1] == 0x2000, name
    gpu.current.pop()


def test_several_devices(gpu):
    first, second = cuda.Device(0).region(MIB), cuda.Device(1).region(2 * MIB)
    assert (first.device_id, second.device_id) == (0, 1)
    assert (gpu.memory.used[0], gpu.memory.used[1]) == (MIB, 2 * MIB)
    with pytest.raises(ValueError, match=r"ordinal=2 is not a CUDA device; there are 2"):
        cuda.Device(2).region(MIB)


@pytest.mark.parametrize("make", [cuda.Device, cuda.DriverPool])
def test_out_of_memory_says_what_there_is(gpu, make):
    kept = make().region(60 * MIB)
    with pytest.raises(OutOfMemory, match=r"8 MiB on device 0 \(Simulated 0\).*4 MiB of 64 MiB"):
        make().region(8 * MIB)
    del kept
    gc.collect()
    gpu.drain()
    assert make().region(8 * MIB).nbytes == 8 * MIB


def test_managed_memory_is_bounded_by_what_is_free(gpu):
    with pytest.raises(OutOfMemory, match=r"65 MiB of managed memory.*64 MiB.*oversubscribe=True"):
        cuda.Managed().region(65 * MIB)
    assert gpu.calls["cuMemAllocManaged"] == 0
    gpu.memory.sizes = [128 * MIB, 128 * MIB]
    gpu.memory.others[0] = 64 * MIB
    gpu.memory.sizes[0] = 256 * MIB  # the driver would give it
    assert cuda.Managed(oversubscribe=True).region(65 * MIB).nbytes == 65 * MIB


def test_managed_memory_that_the_host_may_not_touch(gpu):
    gpu.attributes[89] = 0  # no concurrent managed access
    b = Pool(MIB, cuda.Managed()).alloc(100)
    with pytest.raises(BufferError, match=r"managed Buffer of 100 bytes.*copy_to"):
        memoryview(b)
    b.fill(3)
    assert content(b) == b"\3" * 100


@pytest.fixture
def pinned():
    """Bytes that are pinned already: other tests leak some on purpose."""
    gc.collect()
    return backing.pinned_bytes()


def test_pinned_memory_is_a_region_of_the_host(gpu, pinned):
    region = cuda.Pinned(huge_pages=None, guard=True).region(MIB)
    assert list(gpu.memory.registered) == [region.address]
    array = region.buffer().array()
    array[:] = 5
    assert array.sum() == 5 * MIB
    assert backing.pinned_bytes() == pinned + MIB
    del array, region
    assert backing.pinned_bytes() == pinned and not gpu.memory.registered


def test_more_pinned_memory_than_allowed(gpu):
    with pytest.raises(OutOfMemory, match=r"max_ram_fraction=1e-06 of .*larger fraction"):
        cuda.Pinned(max_ram_fraction=1e-6).region(64 * MIB)
    assert gpu.calls["cuMemHostRegister"] == 0


def test_pinned_memory_that_the_device_sees_elsewhere(gpu):
    gpu.attributes[91] = 0
    with pytest.raises(ValueError, match=r"mapped=True.*mapped=False"):
        cuda.Pinned(huge_pages=None).region(MIB)
    assert cuda.Pinned(huge_pages=None, mapped=False).region(MIB).kind == "pinned"


def test_memory_that_cannot_be_registered_is_not_kept(gpu, pinned):
    before = len(os.listdir("/proc/self/map_files")) if os.access("/proc/self/map_files", 1) else 0
    gpu.fails["cuMemHostRegister"] = OUT_OF_MEMORY
    with pytest.raises(OutOfMemory, match="cuMemHostRegister"):
        cuda.Pinned(huge_pages=None).region(MIB)
    gpu.fails.clear()
    assert backing.pinned_bytes() == pinned
    if before:
        assert len(os.listdir("/proc/self/map_files")) <= before


def test_the_drivers_pool(gpu):
    source = cuda.DriverPool(release_threshold=1 << 20)
    regions = [source.region(2 * MIB) for _ in range(3)]
    assert gpu.calls["cuMemPoolCreate"] == 1
    regions.clear()
    gpu.drain()
    gpu.call("cuStreamSynchronize", 1)  # when the driver looks at it
    assert 0 < gpu.memory.used[0] < 6 * MIB, "the driver keeps some"
    source.trim()
    assert gpu.memory.used[0] == 0
    with pytest.raises(ValueError, match="keep_bytes=-1"):
        source.trim(-1)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: cuda.Device(-1), ValueError, "ordinal=-1"),
        (lambda: cuda.Device("0"), TypeError, "ordinal='0'"),
        (lambda: cuda.Managed(0, oversubscribe=1), TypeError, "oversubscribe=1"),
        (lambda: cuda.Pinned(max_ram_fraction=0), ValueError, "max_ram_fraction=0"),
        (lambda: cuda.Pinned(max_ram_fraction=2), ValueError, "max_ram_fraction=2"),
        (lambda: cuda.Pinned(portable="yes"), TypeError, "portable='yes'"),
        (lambda: cuda.Pinned(huge_pages="4M"), ValueError, "huge_pages='4M'"),
        (lambda: cuda.DriverPool(0, -5), ValueError, "release_threshold=-5"),
    ],
)
def test_options_that_cannot_be(make, error, text):
    with pytest.raises(error, match=text):
        make()


# Allocators ----------------------------------------------------------------------------------


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_bytes_go_there_and_back(gpu, source, allocator):
    one = ALLOCATORS[allocator](source)
    s = new_stream(gpu)
    for n in (0, 1, 100, 4096, 60_000):
        given = np.random.default_rng(n).integers(0, 256, n, dtype="u1")
        b = one.alloc(n)
        assert b.address % (64 if b.kind == "pinned" else 256) == 0
        assert b.copy_from(given) is b
        got = np.zeros(n, "u1")
        assert b.copy_to(got) is got
        assert np.array_equal(got, given)
        c = one.alloc(n, stream=s)
        c.copy_from(b, stream=s)
        c.copy_to(got, stream=s)
        gpu.drain()
        assert np.array_equal(got, given)
        c.fill(7, stream=s)
        gpu.drain()
        assert content(c) == b"\7" * n
        c.fill(8)
        assert content(c) == b"\10" * n
        one.check()


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_arrays(gpu, source, allocator):
    one = ALLOCATORS[allocator](source)
    zeros = one.zeros((10, 20), "i4")
    x = one.copy(np.arange(6.0).reshape(2, 3))
    fields = one.struct_of_arrays({"a": "f4", "b": "u1"}, 100)
    gpu.drain()
    if isinstance(source, cuda.Pinned):
        assert isinstance(zeros, np.ndarray) and not zeros.any() and x.sum() == 15
        return
    assert zeros.shape == (10, 20) and zeros.dtype == np.int32 and content(zeros) == bytes(800)
    got = np.empty((2, 3))
    assert x.copy_to(got).sum() == 15
    assert [(f.shape, f.dtype) for f in fields.values()] == [((100,), "f4"), ((100,), "u1")]
    assert fields["b"].address >= fields["a"].address + 400
    with pytest.raises(ValueError, match=r"order='F'.*pass 'C'"):
        one.empty((2, 3), order="F")


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_the_hosts_view(gpu, source, allocator):
    b = ALLOCATORS[allocator](source).alloc(100)
    if b.kind == "device":
        with pytest.raises(BufferError, match="cannot be read by the host; copy it with copy_to"):
            memoryview(b)
        with pytest.raises(AttributeError, match="not on the host"):
            _ = b.__array_interface__
    else:
        np.frombuffer(b, "u1")[:] = 9
        assert content(b) == b"\11" * 100


def test_exhaustion_and_recovery(gpu):
    pool = Pool(source=cuda.Device())
    kept = [pool.alloc(20 * MIB) for _ in range(3)]
    with pytest.raises(OutOfMemory, match=r"20971520 bytes do not fit.*no more \(cuMemAlloc of"):
        pool.alloc(20 * MIB)
    pool.check()
    kept.pop()
    assert pool.alloc(20 * MIB).nbytes == 20 * MIB
    kept.clear()
    assert pool.defragment().bytes >= 60 * MIB
    assert pool.stats().reserved_bytes == 0 and gpu.memory.used[0] == 0
    bump = Bump(40 * MIB, cuda.Device(), max_bytes=100 * MIB)
    bump.alloc(40 * MIB)
    with pytest.raises(OutOfMemory):
        bump.alloc(40 * MIB)
    bump.check()
    slab = Slab(MIB, 8, cuda.Device(), max_count=1000)
    items = slab.alloc_many(8)
    with pytest.raises(OutOfMemory):
        while True:
            items.append(slab.alloc())
    slab.check()


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_forked_child_has_none_of_it(gpu, source, allocator):
    one = ALLOCATORS[allocator](source)
    b = one.alloc(100)
    b.record_stream(1)
    child = os.fork()
    if not child:
        status = 1
        try:
            with pytest.raises(ValueError, match=r"forked|stayed with the parent"):
                one.alloc(100)
            with pytest.raises(ValueError, match=r"forked|stayed with the parent"):
                b.copy_to(bytearray(100))
            with pytest.raises(cuda.Unavailable, match="spawn"):
                cuda.Device().region(MIB)
            gpu.before_call = lambda name: os._exit(2)
            del b, one
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    b.fill(1)


def test_pinned_memory_of_two_threads_counts_as_one(gpu):
    """Each is within the limit, and both are not."""
    part = 1.5 * MIB / memory_info().total
    before = backing.pinned_bytes() / memory_info().total
    source = cuda.Pinned(huge_pages=None, max_ram_fraction=before + part)
    made, refused = [], []

    def other():
        try:
            made.append(source.region(MIB))
        except OutOfMemory as error:
            refused.append(str(error))

    def once(name):
        if name == "cuMemHostRegister":
            gpu.before_call = None
            in_threads(other)

    gpu.before_call = once
    made.append(source.region(MIB))
    assert len(made) == len(refused) == 1
    made.clear()
    gpu.fail_at("cuMemHostRegister", 1, INVALID_VALUE)
    with pytest.raises(cuda.CudaError):
        source.region(MIB)
    with pytest.raises(OutOfMemory):
        source.region(2 * MIB)
    assert source.region(MIB).nbytes == MIB, "what failed is not counted"


@pytest.mark.parametrize("call", ["cuMemHostUnregister", "cuCtxPushCurrent"])
def test_memory_that_stays_pinned_stays_mapped(gpu, call):
    """The driver would take what is mapped there next for the old pages."""
    region = cuda.Pinned(huge_pages=None).region(MIB)
    address = region.address
    gpu.fail_at(call, 1, UNKNOWN)
    del region
    assert gpu.memory.registered
    cuda.Pinned(huge_pages=None).region(MIB)  # lies elsewhere
    assert peek(address, 1) == b"\0"
    assert gpu.call("cuMemHostUnregister", address) == 0
