"""CuPy's arrays in a Pool on the simulated driver: its own objects, streams of the test's."""

import ctypes
import gc
import os
import sys
import types
from itertools import count

import pytest
from cuda_support import LEGACY, PER_THREAD, a_gpu, new_stream, reads, slowly_fill
from simulated_gpu import RELAXED

import arenapy
from arenapy import Pool, cuda

MIB = 1 << 20

cupy = pytest.importorskip("cupy")

new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class Stream:
    """As CuPy's, whose objects are known to keep their streams. (CuPy cannot make one here.)"""

    def __init__(self, driver):
        self.ptr, self.device_id = new_stream(driver).handle_, 0


Stream.__module__, Stream.__qualname__ = "cupy.cuda.stream", "Stream"


class Current:
    """CuPy's current device and stream."""

    def __init__(self):
        self.device, self.stream, self.object = 0, 0, None

    def use(self, stream):
        self.object, self.stream = stream, stream if isinstance(stream, int) else stream.ptr


@pytest.fixture
def driver():
    with a_gpu(leaks=True) as one:
        yield one


@pytest.fixture
def current(monkeypatch):
    now = Current()
    made = {
        ("cupy_backends.cuda.api.runtime", "getDevice"): (
            b"int (int __pyx_skip_dispatch)",
            ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int)(lambda skip: now.device),
        ),
        ("cupy_backends.cuda.stream", "get_current_stream_ptr"): (
            b"intptr_t (void)",
            ctypes.PYFUNCTYPE(ctypes.c_ssize_t)(lambda: now.stream),
        ),
    }
    for (module, name), (signature, function) in made.items():
        __import__(module)
        capsule = new_capsule(ctypes.cast(function, ctypes.c_void_p), signature, None)
        monkeypatch.setitem(sys.modules[module].__pyx_capi__, name, capsule)
    theirs = types.SimpleNamespace(get_current_stream=lambda: now.object)
    monkeypatch.setitem(sys.modules, "cupy.cuda.stream", theirs)
    now.made = made
    return now


@pytest.fixture
def arenapy_cupy(driver, current):
    from arenapy.interop import cupy as module

    yield module
    cupy.cuda.set_allocator(None)


@pytest.fixture
def pool(driver):
    return Pool(16 * MIB, cuda.Device())


@pytest.mark.parametrize("known", [True, False])
def test_an_array_is_a_block(arenapy_cupy, pool, known):
    """CuPy's objects, made by its classes or here."""
    from arenapy.interop import cupy_blocks

    cupy.cuda.set_allocator(arenapy_cupy.allocator(pool))
    assert cupy_blocks.knows_fields()
    assert cupy_blocks.knows_fields(known) == known
    x = cupy.empty((100, 10), "f4")
    (block,) = [one for one in pool.blocks() if one.state == "live"]
    memory = x.data.mem
    assert type(memory) is cupy.cuda.UnownedMemory
    assert x.data.ptr == memory.ptr == int(memory) == block.address
    assert (memory.size, memory.device_id, x.data.device_id) == (4000, 0, 0)
    part, whole = x[5:], x.data + 400
    assert part.data.ptr == block.address + 200
    assert whole.mem is memory
    del x, whole, memory
    gc.collect()
    assert pool.stats().active_allocations == 1
    del part
    assert pool.stats().active_allocations == 0
    y = cupy.empty((100, 10), "f4")
    assert y.data.ptr == block.address
    del y
    pool.check()


@pytest.mark.parametrize("on", ["legacy", "stream"])
def test_a_forked_child(arenapy_cupy, pool, driver, current, on):
    """Neither way gives it a block, and it frees nothing of the parent's."""
    if on == "stream":
        current.use(Stream(driver))
    cupy.cuda.set_allocator(arenapy_cupy.allocator(pool))
    kept, idle = cupy.empty(MIB, "u1"), cupy.empty(100, "u1")
    at = idle.data.ptr
    del idle
    asked = sum(driver.calls.values())
    child = os.fork()
    if child == 0:
        code = 1
        try:
            cupy.empty(100, "u1")
        except Exception as error:
            code = 0 if "fork" in str(error) else 2
        del kept
        os._exit(code or 3 * (sum(driver.calls.values()) != asked))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.stats().active_allocations == 1
    assert cupy.empty(100, "u1").data.ptr == at
    del kept
    assert pool.stats().active_allocations == 0
    pool.check()


def test_a_region_under_it_cannot_be_closed(arenapy_cupy, driver):
    pool = Pool(4 * MIB, cuda.Device())
    cupy.cuda.set_allocator(arenapy_cupy.allocator(pool))
    x = cupy.empty(100, "u1")
    with pytest.raises(BufferError, match="Buffers that were exported and are alive"):
        pool.regions[0].close()
    assert x.data.ptr == pool.regions[0].address
    cupy.empty(100, "u1")
    pool.check()


def test_nothing(arenapy_cupy, pool):
    cupy.cuda.set_allocator(arenapy_cupy.allocator(pool))
    x = cupy.empty(0)
    assert (x.data.ptr, x.data.mem.size, x.data.device_id) == (0, 0, 0)


def test_objects_are_counted_right(arenapy_cupy, pool):
    """None, which the fields had before, and all that is made."""
    from arenapy.interop import cupy_blocks

    allocator = arenapy_cupy.allocator(pool)
    nones = sys.getrefcount(None)
    for _ in range(2000):
        allocator(1000)
    gc.collect()
    assert abs(sys.getrefcount(None) - nones) < 500
    counts = []
    for known in (True, False):
        cupy_blocks.knows_fields(known)
        pointer = allocator(1000)
        memory = pointer.mem
        owner = memory._owner
        counts.append([sys.getrefcount(one) for one in (pointer, memory, owner)])
    assert counts[0] == counts[1]


def test_its_out_of_memory_with_our_figures(arenapy_cupy, pool):
    cupy.cuda.set_allocator(arenapy_cupy.allocator(pool))
    kept = cupy.empty(MIB, "u1")
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError, match="20971520 bytes do not fit into"):
        cupy.empty(20 * MIB, "u1")
    assert kept.data.ptr
    assert cupy.empty(MIB, "u1").data.ptr


def test_arrays_in_cycles_are_collected_first(arenapy_cupy, pool):
    cupy.cuda.set_allocator(arenapy_cupy.allocator(pool))
    gc.disable()
    try:
        cycle = [cupy.empty(10 * MIB, "u1")]
        cycle.append(cycle)
        del cycle
        assert cupy.empty(10 * MIB, "u1").data.ptr
    finally:
        gc.enable()


def test_figures(arenapy_cupy, pool):
    allocator = arenapy_cupy.allocator(pool)
    x = allocator(5 * MIB)
    assert allocator.used_bytes() == 5 * MIB
    assert allocator.total_bytes() == pool.stats().reserved_bytes
    assert allocator.free_bytes() == allocator.total_bytes() - 5 * MIB
    assert allocator.get_limit() == 16 * MIB
    del x
    assert allocator.n_free_blocks() > 0
    allocator.free_all_blocks()
    assert (allocator.total_bytes(), allocator.n_free_blocks()) == (0, 0)
    with pytest.raises(RuntimeError, match="max_bytes"):
        allocator.set_limit(size=100)


def test_use(arenapy_cupy, pool, monkeypatch):
    monkeypatch.setattr(cupy, "_default_memory_pool", cupy._default_memory_pool)
    arenapy_cupy.use(pool)
    x = cupy.empty(MIB, "u1")
    assert cupy.get_default_memory_pool().used_bytes() == MIB
    del x
    assert cupy.get_default_memory_pool().used_bytes() == 0


def test_bytes_come_back_in_the_order_of_their_stream(arenapy_cupy, pool, driver, current):
    """An array's bytes are its stream's at once, and another's when that is done."""
    allocator = arenapy_cupy.allocator(Pool(4 * MIB, cuda.Device(), 4 * MIB))
    one, two = Stream(driver), Stream(driver)
    current.use(one)
    x = allocator(2 * MIB)
    address = x.ptr
    slowly_fill(driver, one.ptr, types.SimpleNamespace(address=address, nbytes=2 * MIB), 7)
    driver.drain()
    del x
    x = allocator(2 * MIB)
    assert x.ptr == address
    seen = reads(driver, one.ptr, address, 2 * MIB)
    del x
    current.use(two)
    taken = [allocator(2 * MIB) for _ in range(2)]
    for pointer in taken:
        where = types.SimpleNamespace(address=pointer.ptr, nbytes=2 * MIB)
        slowly_fill(driver, two.ptr, where, 9)
    while driver.step(-1):
        pass
    assert seen == [bytes([7]) * (2 * MIB)]


def test_a_handle_that_another_stream_gets(arenapy_cupy, pool, driver, current):
    """Streams come and go; the driver gives their handles again. Few are kept, and no more."""
    allocator = arenapy_cupy.allocator(pool)
    for i in count():
        stream = Stream(driver)
        current.use(stream)
        x = allocator(1000)
        seen = reads(driver, stream.ptr, x.ptr, 1000)
        del x
        driver.drain()
        assert len(seen) == 1
        if i == 50:
            break
    kept = [one for one in gc.get_objects() if isinstance(one, Stream)]
    assert len(kept) <= 10


@pytest.mark.parametrize("handle", [0, LEGACY, PER_THREAD])
def test_default_streams(arenapy_cupy, pool, driver, current, handle):
    current.use(handle)
    allocator = arenapy_cupy.allocator(pool)
    x = allocator(1000)
    assert pool.stats().active_allocations == 1
    del x
    driver.drain()
    pool.trim()
    assert pool.stats().reserved_bytes == 0


def test_a_pool_of_another_stream(arenapy_cupy, driver, current):
    stream = Stream(driver)
    pool = Pool(16 * MIB, cuda.Device(), stream=stream)
    allocator = arenapy_cupy.allocator(pool)
    for now in (stream, 0, PER_THREAD, Stream(driver)):
        current.use(now)
        x = allocator(1000)
        assert x.ptr
        del x
    driver.drain()
    pool.check()


def test_arrays_of_a_captured_stream_belong_to_the_graph(arenapy_cupy, pool, driver, current):
    """Those that are dropped in the capture share memory."""
    allocator = arenapy_cupy.allocator(pool)
    stream = Stream(driver)
    current.use(stream)
    x = allocator(1000)
    del x
    driver.begin_capture(stream.ptr, RELAXED)
    assert len({allocator(1000).ptr for _ in range(5)}) == 1
    x = allocator(1000)
    graph = driver.end_capture(stream.ptr)
    assert graph
    assert allocator(1000).ptr != x.ptr
    del x
    assert pool.stats().pending_bytes
    driver.destroy_graph(graph)
    driver.drain()
    assert pool.stats().pending_bytes == 0


def test_another_device(arenapy_cupy, pool, driver, current):
    allocator = arenapy_cupy.allocator(pool)
    current.device = 1
    with pytest.raises(RuntimeError, match=r"current device is 1, .* only for \[0\]"):
        allocator(1000)
    with pytest.raises(RuntimeError, match="current device is 1"):
        allocator.used_bytes()
    both = arenapy_cupy.allocator(pool, Pool(16 * MIB, cuda.Device(1)))
    x = both(1000)
    assert x.device_id == 1
    current.device = 0
    assert both(1000).device_id == 0


def test_an_array_outlives_all(arenapy_cupy, driver, current):
    x = arenapy_cupy.allocator(Pool(16 * MIB, cuda.Device()))(1000)
    gc.collect()
    ctypes.memset(x.ptr, 1, 1000)
    assert ctypes.string_at(x.ptr, 1000) == b"\1" * 1000


def test_pinned_memory(arenapy_cupy, driver):
    pool = Pool(16 * MIB, cuda.Pinned(huge_pages=None))
    allocate = arenapy_cupy.pinned_allocator(pool)
    memory = allocate(1000)
    assert type(memory) is cupy.cuda.PinnedMemoryPointer
    (block,) = [one for one in pool.blocks() if one.state == "live"]
    assert memory.ptr == block.address
    assert memory.size() == 1000
    view = memoryview(memory).cast("B")
    view[:4] = (1).to_bytes(4, "little")
    assert ctypes.string_at(memory.ptr, 1) == b"\1"
    del memory
    assert pool.stats().active_allocations == 1
    view.release()
    del view
    assert pool.stats().active_allocations == 0
    assert allocate(0).ptr == 0


def test_what_is_no_pool(arenapy_cupy, driver):
    with pytest.raises(TypeError, match="no pool was given"):
        arenapy_cupy.allocator()
    with pytest.raises(ValueError, match="is over host memory"):
        arenapy_cupy.allocator(Pool(MIB))
    with pytest.raises(ValueError, match="is over device memory, which is not pinned"):
        arenapy_cupy.pinned_allocator(Pool(4 * MIB, cuda.Device()))
    with pytest.raises(TypeError, match="is not a Pool"):
        arenapy_cupy.pinned_allocator(arenapy.Slab(64, 4))


def test_no_cupy_or_an_old_or_another_one(pool, monkeypatch, current):
    from arenapy.interop import cupy as module

    monkeypatch.setitem(sys.modules["cupy_backends.cuda.stream"].__pyx_capi__,
                        "get_current_stream_ptr", new_capsule(1, b"long (void)", None))  # fmt: skip
    with pytest.raises(ImportError, match=r"is not known to .*get_current_stream_ptr is long"):
        module.allocator(pool)
    monkeypatch.setattr(cupy, "__version__", "12.3.0")
    with pytest.raises(ImportError, match=r"cupy 12.3.0 is older than 13.0"):
        module.allocator(pool)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match="which is not installed: pip install cupy-cuda13x"):
        module.allocator(pool)
