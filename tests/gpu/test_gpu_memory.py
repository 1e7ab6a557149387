"""On a real GPU: every allocator over every kind of its memory, exhaustion, managed memory."""

import functools
import gc
import itertools

import numpy as np
import pytest
from helpers import in_threads
from real_gpu import Gpu, content, done, need_gpu

import arenapy
from arenapy import Bump, Host, OutOfMemory, Pool, Slab, cuda

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

SOURCES = {
    "device": cuda.Device,
    "driver pool": cuda.DriverPool,
    "pinned": cuda.Pinned,
    "pinned, small pages": lambda: cuda.Pinned(huge_pages=None, guard=True),
    "managed": cuda.Managed,
}
ALLOCATORS = {
    "bump": lambda source: Bump(4 * MIB, source, 16 * MIB),
    "slab": lambda source: Slab(64 * KIB, 16, source, max_count=64),
    "pool": lambda source: Pool(16 * MIB, source),
    "pool by class": lambda source: Pool(16 * MIB, source, rounding="class"),
}


@pytest.fixture(scope="module")
def gpu():
    need_gpu()
    with Gpu() as one:
        yield one


@pytest.fixture(params=SOURCES)
def source(request, gpu):
    return SOURCES[request.param]()


@pytest.fixture(params=ALLOCATORS)
def allocator(request, source):
    return ALLOCATORS[request.param](source)


def most(allocator):
    return 64 * KIB if isinstance(allocator, Slab) else MIB


def test_data_survives(allocator):
    """Round trips by way of copies, with and without streams, to and from kernels."""
    rng = np.random.default_rng(5)
    stream = cuda.Stream()
    held = []
    for i in range(30):
        data = rng.integers(0, 256, int(rng.integers(1, most(allocator) + 1)), np.uint8)
        block = allocator.alloc(len(data), stream=stream if i % 2 else None)
        block.copy_from(data, stream=stream if i % 3 else None)
        held.append((block, data))
        if len(held) > 4:
            one, its = held.pop(int(rng.integers(4)))
            back = np.zeros_like(its)
            one.copy_to(back, stream=stream)
            stream.synchronize()
            assert np.array_equal(back, its)
        if isinstance(allocator, Bump) and len(held) > 3:
            stream.synchronize()
            for one, its in held:
                assert np.array_equal(content(one), its)
            held.clear()
            allocator.reset(stream=stream)
        allocator.check()
    stream.synchronize()
    for one, its in held:
        assert np.array_equal(content(one), its)


def test_kernels_reach_it(gpu, allocator, source):
    block = allocator.alloc(64 * KIB)
    assert block.device_id == (-1 if block.kind == "pinned" else 0)
    gpu.write_slowly(1, block.address, block.nbytes, 0xABCD)
    gpu.synchronize()
    assert (content(block, "u4") == 0xABCD).all()
    if block.kind == "pinned":
        assert (block.array(dtype="u4") == 0xABCD).all()
        block.array(dtype="u4")[:] = 5
        gpu.forget_wrong()
        gpu.count_wrong(1, block.address, block.nbytes, 5)
        gpu.count_wrong(1, block.address, 4, 6)
        assert gpu.how_many_wrong() == 1


def test_exhaustion_is_an_error_that_changes_nothing(allocator):
    stream = cuda.Stream()
    blocks = []
    with pytest.raises(OutOfMemory):
        while True:
            blocks.append(allocator.alloc(most(allocator), stream=stream))
    addresses = sorted(block.address for block in blocks)
    assert all(b - a >= most(allocator) for a, b in itertools.pairwise(addresses))
    allocator.check()
    n = len(blocks)
    blocks.clear()
    if isinstance(allocator, Bump):
        allocator.reset(stream=stream)
    again = [allocator.alloc(most(allocator), stream=stream) for _ in range(n)]
    assert len(again) == n


def allocation_at(gpu, address):
    """How large the driver says the allocation is in which that address lies; 0: in none.

    What is free on the device depends on all that use it.
    """
    error, _, nbytes = gpu.driver.cuMemGetAddressRange(address)
    assert error.name in ("CUDA_SUCCESS", "CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_NOT_FOUND")
    return nbytes if error.name == "CUDA_SUCCESS" else 0


def test_given_back_memory_is_the_devices_again(gpu):
    """Regions go when their allocator and its blocks have gone."""
    pool = Pool(2 * GIB, cuda.Device(), GIB)
    block = pool.alloc(100 * MIB)
    address = block.address
    assert allocation_at(gpu, address) == GIB
    del pool
    gc.collect()
    assert allocation_at(gpu, address) == GIB
    del block
    gc.collect()
    assert allocation_at(gpu, address) == 0


@pytest.mark.alone
def test_out_of_device_memory_and_recovery(gpu):
    before = cuda.memory_info().free_bytes
    total = cuda.memory_info().total_bytes
    with pytest.raises(OutOfMemory, match=r"on device 0 \(NVIDIA.*are free"):
        Bump(2 * total, cuda.Device())
    pool = Pool(2 * total, cuda.Device())
    blocks = []
    with pytest.raises(OutOfMemory, match="largest free block"):
        while True:
            blocks.append(pool.alloc(8 * GIB))
    assert len(blocks) * 8 * GIB > before - 16 * GIB
    small = pool.alloc(MIB)
    small.fill(3)
    assert (content(small) == 3).all()
    pool.check()
    blocks.pop()
    blocks.append(pool.alloc(8 * GIB))
    del small
    blocks.clear()
    pool.trim()
    assert pool.stats().reserved_bytes == 0
    assert cuda.memory_info().free_bytes >= before


def test_the_driver_waits_when_it_frees_less_than_a_page(gpu):
    """Regions rely on it: they end while streams may still write them."""
    driver, stream = gpu.driver, cuda.Stream()
    first, _ = done(driver.cuMemAlloc(64 << 10)), done(driver.cuMemAlloc(64 << 10))
    gpu.write_slowly(stream, int(first), 64 << 10, 1, 300_000)
    assert int(driver.cuStreamQuery(stream.handle)[0]) != 0
    done(driver.cuMemFree(first))
    assert int(driver.cuStreamQuery(stream.handle)[0]) == 0


def test_pinning_is_bounded(gpu):
    with pytest.raises(OutOfMemory, match="max_ram_fraction"):
        Bump(64 * MIB, cuda.Pinned(max_ram_fraction=1e-6))


@pytest.mark.alone
def test_the_drivers_pool_keeps_and_gives_back(gpu):
    source = cuda.DriverPool()
    region = source.region(512 * MIB)
    before = cuda.memory_info().free_bytes
    region.close()
    del region
    assert cuda.memory_info().free_bytes == before
    source.trim()
    assert cuda.memory_info().free_bytes >= before + 512 * MIB


def test_managed_memory_moves(gpu):
    memory = cuda.Managed().region(64 * MIB).buffer()
    array = memory.array(dtype="u4")
    array[:] = 1
    stream = cuda.Stream()
    for advice in ("read_mostly", "preferred_location", "accessed_by"):
        cuda.Managed.advise(memory, advice, 0)
    cuda.prefetch(memory, 0, stream)
    gpu.add_to(stream, memory.address, memory.nbytes, 41)
    cuda.prefetch(memory, -1, stream)
    stream.synchronize()
    assert (array == 42).all()


def test_managed_memory_is_bounded_by_what_is_free(gpu):
    with pytest.raises(OutOfMemory, match="oversubscribe"):
        cuda.Managed().region(2 * cuda.memory_info().total_bytes)


def test_the_current_context_is_left_alone(gpu):
    """In a thread that has none, and in this one that has."""
    from cuda.bindings import driver

    def current():
        return int(done(driver.cuCtxGetCurrent()))

    def work():
        found.append(current())
        pool = Pool(64 * MIB, cuda.Device())
        block = pool.alloc(MIB)
        block.fill(1)
        found.append(current())

    found = []
    in_threads(work)
    assert found == [0, 0]
    before = current()
    work()
    assert current() == before != 0


def test_threads(gpu):
    """Each with a stream of its own, all from one pool; what one allocates another drops."""
    pool = Pool(2 * GIB, cuda.Device())
    passed = [[] for _ in range(4)]

    def body(me):
        rng = np.random.default_rng(me)
        stream = cuda.Stream()
        with Gpu() as mine:
            for i in range(500):
                nbytes = int(rng.integers(1, 256)) * KIB
                block = pool.alloc(nbytes, stream=stream)
                mine.write_slowly(stream, block.address, nbytes, i, i % 7)
                mine.count_wrong(stream, block.address, nbytes, i)
                passed[(me + 1) % 4].append(block)
                del block
                if len(passed[me]) > 5:
                    passed[me].pop()
            assert mine.how_many_wrong() == 0

    in_threads(*[functools.partial(body, me) for me in range(4)])
    passed.clear()
    pool.check()


def test_memory_info(gpu):
    (info, *_) = cuda.devices()
    assert info.name.startswith("NVIDIA")
    assert 0 < info.free_bytes <= info.total_bytes
    heap = cuda.device_heap_limit()
    assert heap > 0
    assert cuda.device_heap_limit(2 * heap) >= 2 * heap
    cuda.device_heap_limit(heap)


def test_info_shows_it(gpu, capsys):
    from arenapy.commands.cli import main

    main(["info"])
    assert "NVIDIA" in capsys.readouterr().out


def test_numpy_memory_over_pinned_memory(gpu):
    """Ordinary arrays of a program are then pinned."""
    pool = Pool(64 * MIB, cuda.Pinned())
    with arenapy.numpy_memory(pool):
        array = np.arange(1 << 20, dtype="f4") * 2
    at = array.ctypes.data
    assert any(region.address <= at < region.address + region.nbytes for region in pool.regions)
    target = cuda.Device().region(array.nbytes).buffer()
    stream = cuda.Stream()
    target.copy_from(array, stream=stream)
    stream.synchronize()
    assert np.array_equal(content(target, "f4"), array)


def test_host_memory_to_and_from_everything(gpu):
    sources = [Host(), cuda.Device(), cuda.DriverPool(), cuda.Pinned(), cuda.Managed()]
    regions = [source.region(MIB).buffer() for source in sources]
    stream = cuda.Stream()
    for i, one in enumerate(regions):
        for j, other in enumerate(regions):
            if one is other:
                continue
            pattern = 5 * i + j
            one.fill(pattern)
            other.fill(255)
            if one.kind == other.kind == "host":
                continue
            other.copy_from(one, stream=None if i < j else stream)
            stream.synchronize()
            assert (content(other) == pattern).all(), (one.kind, other.kind)


def test_exit_with_everything_alive(run_script, gpu):
    """Nothing is called once the interpreter ends, and nothing crashes."""
    run_script("""
        import numpy as np
        import arenapy
        from arenapy import cuda

        pools = [arenapy.Pool(64 << 20, source()) for source in
                 (cuda.Device, cuda.DriverPool, cuda.Pinned, cuda.Managed)]
        stream = cuda.Stream()
        blocks = [pool.alloc(1 << 20, stream=stream) for pool in pools]
        for block in blocks:
            block.fill(1, stream=stream)
        event = stream.record()
        class Late:
            def __del__(self):
                blocks.clear()
        late = Late()
        late.me = late
    """)


def test_fork(run_script, gpu):
    """CUDA memory is closed in a child, which says so, and ends well."""
    run_script("""
        import os
        import arenapy
        from arenapy import cuda

        pool = arenapy.Pool(64 << 20, cuda.Device())
        block = pool.alloc(1 << 20)
        pinned = arenapy.Slab(4096, 8, cuda.Pinned())
        item = pinned.alloc()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                pool.alloc(1)
            except (ValueError, cuda.Unavailable):
                status = 0
            del block, item
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        block.fill(7)
        got = bytearray(1 << 20)
        block.copy_to(got)
        assert got == bytes([7]) * (1 << 20)
    """)
