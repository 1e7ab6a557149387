"""The C functions that torch calls: blocks by device and stream, without Buffers and the GIL."""

import ctypes
import os
import random
import threading
import weakref
from typing import ClassVar

import pytest
from cuda_machine import StreamMachine, Wrapped
from helpers import in_threads
from hypothesis.stateful import run_state_machine_as_test
from simulated_driver import UNKNOWN, simulated
from simulated_gpu import RELAXED

from arenapy import OutOfMemory, Pool, cuda
from arenapy.interop import raw_blocks
from arenapy.interop import torch as arenapy_torch

MIB = 1 << 20
LEGACY = 1  # torch's default stream, by the handle 0

library = ctypes.CDLL(raw_blocks.__file__)
alloc = library.arenapy_interop_alloc
alloc.restype = ctypes.c_void_p
alloc.argtypes = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
free = library.arenapy_interop_free
free.restype = None
free.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
record_stream = library.arenapy_interop_record_stream
record_stream.restype = None
record_stream.argtypes = (ctypes.c_void_p, ctypes.c_void_p)


class RawBuffer:
    """A tensor's memory: freed with the stream that it was allocated for, when it is dropped."""

    def __init__(self, nbytes, handle):
        self.address, self.nbytes, self.handle = alloc(nbytes, 0, handle), nbytes, handle
        if not self.address:
            raise OutOfMemory(nbytes)

    def record_stream(self, stream):
        record_stream(self.address, handle_of(stream))

    release = record_stream  # it is dropped next

    def drop(self):
        if self.address:
            free(self.address, self.nbytes, 0, self.handle)
            self.address = None

    __del__ = drop


def handle_of(stream):
    return stream if isinstance(stream, int) else stream.handle_


class Served:
    """A Pool as the machines use an allocator."""

    def __init__(self, pool):
        self.out = weakref.WeakSet()
        self.check, self.stats, self.trim = pool.check, pool.stats, pool.trim

    def alloc(self, nbytes, stream=None):
        buffer = RawBuffer(nbytes, 0 if stream is None else handle_of(stream))
        self.out.add(buffer)
        return buffer


class RawMachine(StreamMachine):
    """Kernels on any streams. The objects of two streams keep them, as torch's do."""

    OPTIONS: ClassVar = {}

    def make(self):
        self.by_device = {0: Pool(4 * MIB, cuda.Device(), **self.OPTIONS)}
        raw_blocks.serve(self.by_device, lambda device, handle: self.objects[handle or LEGACY])
        return Served(self.by_device[0])

    def copy(self, block, stream, keep):
        """There is no Buffer to copy."""

    def end(self):
        try:
            super().end()
        finally:
            for buffer in list(self.allocator.out):  # in a cycle with a traceback
                buffer.drop()

    def teardown(self):
        try:
            super().teardown()
        finally:
            raw_blocks.withdraw(self.by_device)
            del self.by_device


@pytest.mark.parametrize("options", [{}, {"trim_after": 0}, {"debug": True}])
def test_streams(options):
    run_state_machine_as_test(type("Raw", (RawMachine,), {"OPTIONS": options}))


@pytest.fixture
def driver():
    with simulated() as one, one.on(0):
        yield one


@pytest.fixture
def serve():
    served = []

    def begin(pool, named=lambda device, handle: handle or LEGACY):
        by_device = {0: pool}
        raw_blocks.serve(by_device, named)
        served.append(by_device)
        return pool

    yield begin
    for by_device in served:
        raw_blocks.withdraw(by_device)


def test_no_memory(driver, serve, capfd):
    """Without torch nothing raises its exception; the message says what the Pool's would."""
    pool = serve(Pool(4 * MIB, cuda.Device()))
    blocks = [alloc(2 * MIB, 0, 0) for _ in range(2)]
    assert all(blocks)
    assert alloc(2 * MIB, 0, 0) is None
    assert "2097152 bytes do not fit into the pool" in capfd.readouterr().err
    for block in blocks:
        free(block, 2 * MIB, 0, 0)
    assert pool.stats().allocated_bytes == 0
    free(alloc(2 * MIB, 0, 0), 2 * MIB, 0, 0)
    pool.check()


def test_figures_as_torch_asks_for_them(driver, serve):
    pool = serve(Pool(max_bytes=8 * MIB, source=cuda.Device()))
    arenapy_torch._reset_peak(0)
    before = arenapy_torch._memory_stats(0)["num_ooms"]
    free(alloc(4 * MIB, 0, 0), 4 * MIB, 0, 0)
    reserved = pool.stats().reserved_bytes
    pool.trim()
    assert alloc(100 * MIB, 0, 0) is None
    stats = arenapy_torch._memory_stats(0)
    assert stats["num_ooms"] - before == 1
    assert stats["allocated_bytes"]["all"]["peak"] == 4 * MIB
    assert reserved >= 4 * MIB
    assert stats["reserved_bytes"]["all"] == {
        "current": 0, "peak": reserved, "allocated": 0, "freed": 0
    }  # fmt: skip
    arenapy_torch._reset_peak(0)
    assert arenapy_torch._memory_stats(0)["reserved_bytes"]["all"]["peak"] == 0


def test_a_device_without_a_pool(driver, serve, capfd):
    serve(Pool(4 * MIB, cuda.Device()))
    assert alloc(64, 3, 0) is None
    assert "no pool was given for device 3, only for [0]" in capfd.readouterr().err


def test_a_forked_child(driver, serve, capfd):
    """Neither way gives it a block, and it frees nothing of the parent's."""
    pool = serve(Pool(4 * MIB, cuda.Device()))
    kept, idle, large = alloc(64, 0, 0), alloc(64, 0, 0), alloc(MIB, 0, 0)
    free(idle, 64, 0, 0)
    child = os.fork()
    if child == 0:
        free(kept, 64, 0, 0)
        free(large, MIB, 0, 0)
        os._exit(2 * (alloc(64, 0, 0) is not None) + (alloc(MIB, 0, 0) is not None))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    said = capfd.readouterr().err
    assert "forked" in said
    assert "not a live block" not in said, "the parent's blocks are dropped without a word"
    assert pool.stats().active_allocations == 2
    assert alloc(64, 0, 0) == idle
    free(idle, 64, 0, 0)
    free(large, MIB, 0, 0)
    free(kept, 64, 0, 0)
    assert pool.stats().active_allocations == 0
    pool.check()


def test_a_pool_in_use_is_not_closed(driver, serve):
    """The process keeps it, and its regions do not close: the library has addresses in them."""
    pool = serve(Pool(4 * MIB, cuda.Device()))
    block = alloc(64, 0, 0)
    with pytest.raises(BufferError):
        pool.regions[0].close()
    free(block, 64, 0, 0)
    with pytest.raises(BufferError):
        pool.regions[0].close()
    pool.check()


def test_nothing_is_no_block(driver, serve):
    pool = serve(Pool(4 * MIB, cuda.Device()))
    assert alloc(0, 0, 0) is None
    free(None, 0, 0, 0)
    assert pool.stats().total_allocations == 0


def test_what_is_no_block_is_refused(driver, serve, capfd):
    pool = serve(Pool(4 * MIB, cuda.Device()))
    block = alloc(64, 0, 0)
    free(block, 64, 0, 0)
    free(block, 64, 0, 0)
    assert "is not a live block of a pool in use" in capfd.readouterr().err
    free(alloc(64, 0, 0) + 8, 64, 0, 0)
    assert "is not a live block of a pool in use" in capfd.readouterr().err
    assert pool.stats().active_allocations == 1
    pool.check()


def test_blocks_of_a_graph(driver, serve):
    """The quick way does not ask the driver, so it is not taken while a graph is captured, nor for
    what the graph has afterwards."""
    pool = serve(Pool(4 * MIB, cuda.Device()))
    stream = cuda.Stream()
    handle = stream.__cuda_stream__()[1]
    raw_blocks.withdraw({0: pool})
    raw_blocks.serve({0: pool}, lambda device, handle: stream if handle else LEGACY)
    free(alloc(64, 0, handle), 64, 0, handle)
    free(alloc(64, 0, 0), 64, 0, 0)
    driver.begin_capture(handle, RELAXED)
    library.arenapy_interop_capture_begins(0)
    address, beside = alloc(64, 0, handle), alloc(64, 0, 0)
    free(address, 64, 0, handle)
    kept = alloc(64, 0, handle)
    assert kept == address
    library.arenapy_interop_capture_ends(0)
    graph = driver.end_capture(handle)
    assert graph
    other = alloc(64, 0, handle)
    assert len({kept, other, beside}) == 3
    free(other, 64, 0, handle), free(beside, 64, 0, 0), free(kept, 64, 0, handle)
    assert pool.stats().active_allocations == 0
    assert pool.stats().pending_bytes
    driver.destroy_graph(graph)
    driver.drain(), pool.stats(), driver.drain()
    assert pool.stats().pending_bytes == 0
    pool.check()


@pytest.mark.parametrize("recorded", ["in the capture", "also before", "twice"])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("named", ["object", "integer"])
def test_a_block_that_a_capture_uses_is_the_graphs(driver, serve, named, own, recorded):
    """It was allocated before, and is freed after the capture."""
    captured, other = (driver.got("cuStreamCreate", ctypes.c_void_p, 1) for _ in range(2))
    stream = captured if own else other
    objects = {handle: Wrapped(handle) for handle in (captured, other)}
    pool = Pool(2 * MIB, cuda.Device(), 2 * MIB)
    serve(pool, lambda device, handle: objects[handle] if named == "object" else handle)
    block = alloc(2 * MIB, 0, stream)
    if recorded == "also before":
        record_stream(block, captured)
    driver.begin_capture(captured, RELAXED)
    for _ in range(2 if recorded == "twice" else 1):
        record_stream(block, captured)
    graph = driver.end_capture(captured)
    free(block, 2 * MIB, 0, stream)
    driver.drain()
    assert pool.stats().pending_bytes == 2 * MIB
    assert alloc(2 * MIB, 0, stream) is None
    driver.destroy_graph(graph)
    driver.drain()
    again = alloc(2 * MIB, 0, stream)
    assert again == block
    free(again, 2 * MIB, 0, stream)


@pytest.mark.parametrize("call", ["cuStreamIsCapturing", "cuStreamGetCtx", "cuCtxPushCurrent"])
def test_a_use_that_could_not_be_noted(driver, serve, call, capfd):
    """Nobody knows who uses the block, so it is never free again."""
    pool = serve(Pool(2 * MIB, cuda.Device(), 2 * MIB))
    block = alloc(2 * MIB, 0, 0)
    stream = driver.got("cuStreamCreate", ctypes.c_void_p, 1)
    driver.fails[call] = UNKNOWN
    record_stream(block, stream)
    del driver.fails[call]
    failed = "record_stream of the block" in capfd.readouterr().err
    free(block, 2 * MIB, 0, 0)
    driver.drain()
    assert failed
    assert pool.stats().pending_bytes == 2 * MIB
    assert alloc(2 * MIB, 0, 0) is None


def test_a_block_of_rmms_whose_release_fails(driver):
    """It is not free, and may be given back again."""
    pool = Pool(4 * MIB, cuda.Device())
    allocate, deallocate = raw_blocks.rmm_callbacks(pool, LEGACY)
    address = allocate(64, Wrapped(0))
    stream = Wrapped(driver.got("cuStreamCreate", ctypes.c_void_p, 1))
    driver.fails["cuStreamGetCtx"] = UNKNOWN
    with pytest.raises(cuda.CudaError):
        deallocate(address, 64, stream)
    del driver.fails["cuStreamGetCtx"]
    assert pool.stats().active_allocations == 1
    deallocate(address, 64, stream)
    assert pool.stats().active_allocations == 0


def test_a_recording_has_the_blocks(driver, serve, tmp_path):
    import arenapy.trace

    pool = serve(Pool(4 * MIB, cuda.Device()))
    free(alloc(4096, 0, 0), 4096, 0, 0)
    with arenapy.trace.record(pool, tmp_path / "t.trace"):
        free(alloc(4096, 0, 0), 4096, 0, 0)
    events = arenapy.trace.load(tmp_path / "t.trace").events
    assert [event["operation"] for event in events[-2:]] == [1, 2]
    assert events[-1]["address"] == events[-2]["address"]


@pytest.mark.parametrize("each", [1, 12])
def test_threads_name_streams_of_one_block(driver, serve, each):
    """At once, on a free-threaded build. It is not free before all of them are done."""
    handles = [driver.got("cuStreamCreate", ctypes.c_void_p, 1) for _ in range(2 * each)]
    objects = {handle: Wrapped(handle) for handle in handles}
    pool = serve(Pool(4 * MIB, cuda.Device()), lambda device, handle: objects.get(handle, LEGACY))
    for _ in range(300):
        block = alloc(4096, 0, 0)

        def name(some, block=block):
            for handle in some:
                record_stream(block, handle)

        in_threads(lambda: name(handles[:each]), lambda: name(handles[each:]))
        done = []
        for handle in handles:
            driver.launch(handle, lambda done=done: done.append(True), [(block, 4096)])
        free(block, 4096, 0, 0)
        while len(done) < len(handles):
            assert pool.stats().pending_bytes, "a stream still uses it"
            driver.step()
        driver.drain()
        assert pool.stats().pending_bytes == 0
    pool.check()


@pytest.mark.parametrize("kept", [False, True])
def test_threads_without_the_gil(driver, serve, kept):
    """ctypes calls without it. Each thread's blocks have its bytes until it frees them, and others
    free some of them."""
    stream = driver.got("cuStreamCreate", ctypes.c_void_p, 1)
    objects = {stream: Wrapped(stream)}
    pool = serve(Pool(64 * MIB, cuda.Device()), lambda device, handle: objects.get(handle, LEGACY))
    handle = stream if kept else 0
    given, wrong = [], []
    lock = threading.Lock()

    def work(number):
        rng = random.Random(number)
        mine = []
        for i in range(1500):
            nbytes = rng.choice((256, 4096, 40_000, 300_000))
            block = alloc(nbytes, 0, handle)
            pattern = bytes([number]) * 64
            ctypes.memmove(block, pattern, 64)
            mine.append((block, nbytes, pattern))
            if len(mine) > 20:
                block, nbytes, pattern = mine.pop(rng.randrange(len(mine)))
                if ctypes.string_at(block, 64) != pattern:
                    wrong.append(block)
                if i % 3:
                    free(block, nbytes, 0, handle)
                else:
                    with lock:
                        given.append((block, nbytes))
                        block, nbytes = given.pop(0)
                    free(block, nbytes, 0, handle)
        for block, nbytes, _ in mine:
            free(block, nbytes, 0, handle)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for block, nbytes in given:
        free(block, nbytes, 0, handle)
    assert not wrong
    assert pool.stats().active_allocations == 0
    pool.check()


def test_a_signals_exception_is_raised_after_the_call(driver, serve):
    def named(device, handle):
        if device not in struck:
            struck.append(device)
            raise KeyboardInterrupt
        return LEGACY

    struck = []
    pool = serve(Pool(4 * MIB, cuda.Device()), named)
    with pytest.raises(KeyboardInterrupt):
        assert not alloc(64, 0, 0)
        for _ in range(1000):  # until the interpreter looks
            pass
    free(alloc(64, 0, 0), 64, 0, 0)
    pool.check()


def test_a_block_of_rmms_is_not_free_if_its_stream_could_not_be_named(driver):
    """Not even in the order of the stream that it was allocated for."""

    class Stream:
        def __cuda_stream__(self):
            raise KeyboardInterrupt

    pool = Pool(4 * MIB, cuda.Device())
    allocate, deallocate = raw_blocks.rmm_callbacks(pool, LEGACY)
    address = allocate(64, Wrapped(0))
    with pytest.raises(KeyboardInterrupt):
        deallocate(address, 64, Stream())
    assert pool.stats().active_allocations == 1
    deallocate(address, 64, Wrapped(0))
    assert pool.stats().active_allocations == 0


def test_one_thing_is_no_pool():
    with pytest.raises(TypeError):
        raw_blocks.serve({0: object()}, None)
    assert raw_blocks.pools_in_use() == {}
