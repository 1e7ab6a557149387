"""Chunks of large data: each is whole when its consumer gets to it, whatever runs when; what a
stream still uses is not overwritten; and everything ends, however the iteration does."""

import ctypes
import gc
import os
import random
import signal
import sys
import threading
import time
import weakref

import numpy as np
import pytest
from children import in_child
from cuda_machine import Wrapped
from cuda_support import a_gpu, backwards, until
from helpers import peek, poke
from hypothesis import event, given
from hypothesis import strategies as st

import arenapy
from arenapy import cuda
from arenapy.cuda import backing, driver, staging

pytestmark = pytest.mark.no_sanitizer  # it waits for threads, for some seconds at most

KIB = 1 << 10
NON_BLOCKING = 1


@pytest.fixture(autouse=True)
def _nothing_is_left():
    threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
    pinned = backing.pinned_bytes()  # what another file's tests leaked on purpose
    yield
    gc.collect()
    until(lambda: threading.active_count() == threads)  # rich waits for its thread no longer
    assert len(os.listdir("/proc/self/fd")) == fds
    # A thread ends after it was counted, and may leave garbage.
    until(lambda: gc.collect() >= 0 and backing.pinned_bytes() == pinned)


def pattern(nbytes, seed=0):
    """Bytes of which no two pieces are alike."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8).tobytes()


def write(path, data):
    path.write_bytes(data)
    return path


def read(chunk):
    """By the default stream, which the iterator lets wait."""
    got = bytearray(chunk.nbytes)
    chunk.copy_to(got)
    return bytes(got)


def joined(chunks):
    return b"".join(read(chunk) for chunk in chunks)


def copies_queued(gpu, count):
    """What is left of so many copies, once all of them were queued."""
    until(lambda: gpu.calls["cuMemcpyAsync"] == count)
    with gpu.exclusive():  # a copy is counted before it is queued
        return [each for each in gpu.queue if "a copy" in each.what]


def buffer_of(source, data):
    region = source.region(len(data))
    buffer = region.buffer()
    buffer.copy_from(data)
    return buffer


SOURCES = {
    "path": lambda path, data: write(path, data),
    "str": lambda path, data: str(write(path, data)),
    "File": lambda path, data: arenapy.File(write(path, data), "r"),
    "region of a File": lambda path, data: arenapy.File(write(path, data), "r").region(),
    "bytes": lambda path, data: data,
    "array": lambda path, data: np.frombuffer(data, np.uint8).copy(),
    "structured array": lambda path, data: np.frombuffer(data, [("Of", "u1")]),
    "Buffer": lambda path, data: buffer_of(arenapy.Host(), data),
    "pinned Buffer": lambda path, data: buffer_of(cuda.Pinned(mapped=False), data),
    "managed Buffer": lambda path, data: buffer_of(cuda.Managed(), data),
    "Buffer on a device": lambda path, data: buffer_of(cuda.Device(1), data),
}
STAGED = [name for name in SOURCES if name not in
          ("pinned Buffer", "managed Buffer", "Buffer on a device")]  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_every_source(gpu, tmp_path, name):
    data = pattern(70_000)
    source = SOURCES[name](tmp_path / "data", data)
    before = gpu.calls["cuMemHostRegister"]
    sizes = []
    for chunk in cuda.chunks(source, 16 * KIB):
        assert (chunk.kind, chunk.device_id) == ("device", 0)
        begin = sum(sizes)
        assert read(chunk) == data[begin : begin + chunk.nbytes]
        sizes.append(chunk.nbytes)
    assert sizes == [16 * KIB] * 4 + [70_000 - 64 * KIB]
    assert gpu.calls["cuMemHostRegister"] - before == (name in STAGED), "staging, where it helps"
    del chunk, source


# ---- what runs when ----------------------------------------------------------------------


class Consumer:
    """Looks at each chunk by a kernel that runs some time, and then writes over it."""

    def __init__(self, driver, handle):
        self.driver, self.handle = driver, handle
        self.seen, self.wrong = 0, []

    def __call__(self, chunk, expected):
        address, nbytes = chunk.address, chunk.nbytes

        def run():
            self.seen += 1
            if peek(address, nbytes) != expected:
                self.wrong.append(f"chunk {self.seen}")
            ctypes.memset(address, 0xEE, nbytes)

        self.driver.launch(self.handle, run, [(address, nbytes)])


CONSUMERS = ["default", "handle of a blocking one", "object", "ours", "device 0's legacy stream"]


def make_consumer(gpu, name):
    """What `stream=` is to be, and the handle."""
    if name == "default":
        return None, 1
    if name == "device 0's legacy stream":
        return 1, 1
    if name == "ours":
        stream = cuda.Stream()
        return stream, stream.handle
    flags = NON_BLOCKING if name == "object" else 0
    handle = gpu.got("cuStreamCreate", ctypes.c_void_p, flags)
    return (Wrapped(handle) if name == "object" else handle), handle


@given(
    n_items=st.integers(0, 9000),
    chunk_items=st.integers(1, 3000),
    depth=st.integers(1, 4),
    consumer=st.sampled_from(CONSUMERS),
    from_file=st.booleans(),
    pool=st.sampled_from([None, "Slab", "Pool", "managed Pool"]),
    seed=st.integers(0, 1 << 32),
)
def test_chunks_are_whole_whatever_runs_when(
    tmp_path_factory, n_items, chunk_items, depth, consumer, from_file, pool, seed
):
    data = pattern(4 * n_items, seed)
    chunk_bytes = 4 * chunk_items
    if n_items > 60 * chunk_items:
        chunk_bytes *= 60
    chance = random.Random(seed)
    with a_gpu(leaks=True) as gpu:
        stream, handle = make_consumer(gpu, consumer)
        allocator = {
            None: lambda: None,
            "Slab": lambda: arenapy.Slab(chunk_bytes, depth + 1, cuda.Device()),
            "Pool": lambda: arenapy.Pool(4 << 20, cuda.Device()),
            "managed Pool": lambda: arenapy.Pool(4 << 20, cuda.Managed()),
        }[pool]()
        work = Consumer(gpu, handle)
        source = data
        if from_file:
            source = write(tmp_path_factory.getbasetemp() / "chunks", data)
        # Seldom: a chunk is some hundred calls, and what is asked for all the time has been done.
        often = chance.choice((0, 0.01, 0.05, 0.2))
        gpu.before_call = lambda name: chance.random() < often and gpu.step(chance.randrange(8))
        made, begin, kept = 0, 0, []
        for chunk in cuda.chunks(source, chunk_bytes, "i4", depth, pool=allocator, stream=stream):
            assert chunk.dtype == np.dtype("i4")
            assert chunk.shape == (min(chunk_bytes, len(data) - begin) // 4,)
            expected = data[begin : begin + chunk.nbytes]
            work(chunk, expected)
            begin += chunk.nbytes
            made += 1
            kept.append(chunk)
        gpu.before_call = None
        assert begin == len(data)
        assert all(chunk.closed for chunk in kept)
        event(f"{min(made, 5)} chunks")
        del kept
        chunk = None
        gpu.drain()
        assert work.seen == made
        assert not work.wrong
        if allocator is not None:
            assert allocator.stats().allocated_bytes == 0
            gpu.drain()
            assert allocator.stats().pending_bytes == 0
            allocator.check()
        del allocator, stream


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_next_chunks_are_copied_while_one_is_used(gpu, depth):
    data = pattern(10 * KIB)
    chunks = cuda.chunks(data, KIB, depth=depth)
    first = next(chunks)
    until(lambda: gpu.calls["cuMemcpyAsync"] == 1 + depth)
    time.sleep(0.02)
    assert gpu.calls["cuMemcpyAsync"] == 1 + depth, "and no more than that"
    second = next(chunks)
    until(lambda: gpu.calls["cuMemcpyAsync"] == 2 + depth)
    assert first.closed and not second.closed
    chunks.close()


def test_a_forked_child_gets_no_chunk(gpu):
    """And does not wait for a thread that it lacks."""
    data, arena = pattern(10 * KIB), cuda.KernelArena(KIB)
    chunks = cuda.chunks(data, KIB, depth=3)
    next(chunks)
    text = repr(arena)

    def child():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        with pytest.raises(cuda.Unavailable, match="forked"):
            next(chunks)
        assert repr(arena) == text

    assert in_child(child) == 0
    chunks.close()


def test_a_copy_waits_for_the_consumer_of_its_memory_alone(gpu):
    """With two chunks ahead, the second copy is not held up by who works on the first chunk."""
    done = []
    stream = cuda.Stream()
    chunks = cuda.chunks(pattern(6 * KIB), KIB, depth=2, stream=stream)
    chunk = next(chunks)
    gpu.launch(stream.handle, lambda: done.append(1), [(chunk.address, chunk.nbytes)])
    gpu.finish(copies_queued(gpu, 3))
    assert not done
    chunks.close()
    del chunk


def test_a_consumer_waits_for_the_copy_of_its_chunk_alone(gpu):
    stream = cuda.Stream()
    chunks = cuda.chunks(pattern(6 * KIB), KIB, depth=2, stream=stream)
    next(chunks)
    third = copies_queued(gpu, 3)[-1]
    chunk = next(chunks)
    gpu.launch(stream.handle, None, [(chunk.address, chunk.nbytes)])
    stream.synchronize()
    copies_queued(gpu, 4)  # the reading of it waited for no later copy than the one out of its item
    assert not third.done
    chunks.close()
    del chunk


# ---- who keeps what ----------------------------------------------------------------------


def test_what_was_exported_stays(gpu):
    """Like an array of CuPy that lives on: its memory is not used again before it is gone."""
    data = pattern(9 * KIB)
    kept = {}
    for i, chunk in enumerate(cuda.chunks(data, KIB, depth=3)):
        if i == 1:
            kept[i] = chunk.__cuda_array_interface__["data"][0], chunk
        if i == 3:
            kept[i] = chunk.address, chunk.__dlpack__()
    gpu.drain()
    for i, (address, _) in kept.items():
        assert peek(address, KIB) == data[i * KIB : (i + 1) * KIB]
    del chunk, _


@pytest.mark.parametrize("depth", [1, 3])
def test_keeping_the_last_array_is_no_matter(gpu, depth):
    """`x = cupy.asarray(chunk)`: x lives until the next one is there."""
    x, n = None, 0
    for chunk in cuda.chunks(pattern(20 * KIB), KIB, depth=depth):
        chunk.__cuda_array_interface__  # noqa: B018
        x = chunk
        n += 1
    assert n == 20
    del x, chunk


def test_keeping_all_of_it(gpu):
    kept = []
    with pytest.raises(arenapy.OutOfMemory, match=r"arrays made from earlier chunks are kept"):
        for chunk in cuda.chunks(pattern(20 * KIB), KIB, depth=2):
            chunk.__cuda_array_interface__  # noqa: B018
            kept.append(chunk)
    assert len(kept) == 3
    del kept, chunk


def test_a_pool_with_little_room(gpu):
    pool = arenapy.Slab(KIB, 2, cuda.Device())
    data = pattern(20 * KIB)
    assert joined(cuda.chunks(data, KIB, depth=8, pool=pool)) == data
    assert pool.stats().allocated_bytes == 0


def test_a_chunk_that_its_consumer_releases(gpu):
    data, got = pattern(5 * KIB), b""
    for chunk in cuda.chunks(data, KIB):
        got += read(chunk)
        chunk.release()
    assert got == data
    del chunk


# ---- ends --------------------------------------------------------------------------------


def test_an_early_end(gpu, tmp_path):
    path = write(tmp_path / "data", pattern(50 * KIB))
    for _ in cuda.chunks(path, KIB, depth=3):
        break
    chunks = cuda.chunks(path, KIB)
    next(chunks)
    chunks.close()
    assert list(chunks) == []
    cuda.chunks(path, KIB)  # never begun
    with pytest.raises(ZeroDivisionError):
        for _ in cuda.chunks(path, KIB):
            raise ZeroDivisionError
    del _, chunks
    gc.collect()
    gpu.drain()
    assert gpu.memory.used[0] == 0
    assert gpu.calls["cuStreamCreate"] == gpu.calls["cuStreamDestroy"] == 3


@pytest.mark.parametrize("where", [(staging._Path, "read"), (staging._Line, "task")])
def test_the_collector_ends_it_in_a_thread_of_its_own(gpu, tmp_path, monkeypatch, where):
    path = write(tmp_path / "data", pattern(8 * KIB))
    act, dropped = getattr(*where), threading.Event()
    tasks = set(os.listdir("/proc/self/task"))

    def collect_first(*arguments):
        if n_calls := len(calls):
            dropped.wait(60)
            gc.collect()
        calls.append(n_calls)
        return act(*arguments)

    class Reader:
        def __init__(self):
            self.chunks = cuda.chunks(path, KIB, depth=1, progress=self.tell)

        def tell(self, done, total):
            pass

    calls = []
    monkeypatch.setattr(*where, collect_first)
    gc.disable()
    try:
        reader = Reader()
        next(reader.chunks)
        gone = weakref.ref(reader)
        del reader
        dropped.set()
        until(lambda: gone() is None)
    finally:
        gc.enable()
    # Nobody has waited for these threads, which end after Python counts them no more.
    until(lambda: tasks.issuperset(os.listdir("/proc/self/task")))


def test_a_file_that_gets_shorter(gpu, tmp_path):
    path = write(tmp_path / "data", pattern(8 * KIB))
    chunks = cuda.chunks(path, KIB, depth=1)
    assert len(next(chunks)) == KIB
    until(lambda: gpu.calls["cuMemcpyAsync"] == 2)
    os.truncate(path, 2 * KIB + 100)
    next(chunks)
    with pytest.raises(EOFError, match=r"had 8192 bytes, and ends after 2148 now"):
        next(chunks)
    assert list(chunks) == []


CALLS = {
    "cuStreamCreate": 1,
    "cuMemAlloc": 1,
    "cuMemHostRegister": 1,
    "cuMemcpyAsync": 3,
    "cuEventCreate": 1,
    "cuEventRecord": 1,
    "cuStreamWaitEvent": 2,
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_fail(gpu, name):
    data = pattern(9 * KIB)
    gpu.fail_at(name, CALLS[name], 1)
    with pytest.raises(cuda.CudaError):
        joined(cuda.chunks(data, KIB))
    gc.collect()
    gpu.drain()
    assert gpu.memory.used[0] == 0
    assert joined(cuda.chunks(data, KIB)) == data


def test_no_memory_on_the_device(gpu):
    gpu.memory.others[0] = gpu.MEMORY[0] - KIB
    with pytest.raises(arenapy.OutOfMemory, match="1 KiB of 64 MiB are free"):
        next(cuda.chunks(pattern(9 * KIB), KIB))


def test_without_cuda(tmp_path, monkeypatch):
    driver.use(None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    chunks = cuda.chunks(write(tmp_path / "data", b"12345678"), 4)
    with pytest.raises(cuda.Unavailable):
        next(chunks)
    assert list(cuda.chunks(b"", 4)) == [], "nothing is asked for then"


@pytest.mark.full
def test_the_interpreter_ends_in_the_middle(run_script):
    """Suspended, with a thread at work: nothing waits for ever, nothing is said."""
    run_script("""
        from simulated_driver import SimulatedDriver
        from arenapy import cuda
        from arenapy.cuda import driver
        one = SimulatedDriver()
        driver.use(one.entries)
        chunks = cuda.chunks(bytes(1 << 20), 1 << 12, depth=3)
        first = next(chunks)
        again = cuda.chunks(bytes(1 << 20), 1 << 12, depth=3)
        next(again)
    """)


# ---- options -----------------------------------------------------------------------------


def test_progress(gpu):
    told = []
    for _ in cuda.chunks(pattern(2500), 1000, progress=lambda *two: told.append(two)):
        pass
    assert told == [(1000, 2500), (2000, 2500), (2500, 2500)]
    told.clear()
    chunks = cuda.chunks(pattern(2500), 1000, progress=lambda *two: told.append(two))
    next(chunks)
    next(chunks)
    chunks.close()
    assert told == [(1000, 2500)], "of what was done with"


def test_progress_that_raises(gpu):
    def refuse(done, total):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        joined(cuda.chunks(pattern(2500), 1000, progress=refuse))


def test_a_bar(gpu, capsys):
    joined(cuda.chunks(bytes(3 << 20), 1 << 20, progress=True))
    assert "3.0/3.0 MiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((b"12345678", 0), ValueError, "nbytes=0"),
        ((b"12345678", 4, None, 0), ValueError, "depth=0"),
        ((b"12345678", 6, "i4"), ValueError, "chunk_bytes 6 bytes, .*not a multiple of the 4"),
        ((b"1234567", 4, "i4"), ValueError, "source has 7 bytes, .*not a multiple of the 4"),
        ((b"12345678", 4, "S0"), ValueError, "not a multiple of the 0"),
        ((b"12345678", 8, "O"), TypeError, "Python objects"),
        ((np.array([None, 1]), 8), TypeError, "Python objects"),
        ((np.zeros((4, 4))[:, :2], 8), BufferError, "not C-contiguous"),
        ((object(), 4), TypeError, "this object is not a path"),
        (("/", 4), ValueError, "not a regular file"),
        (("/no/such/file", 4), FileNotFoundError, "no/such"),
    ],
)  # fmt: skip
def test_what_cannot_be(arguments, error, text):
    with pytest.raises(error, match=text):
        cuda.chunks(*arguments)


def test_pools_that_cannot_be(gpu):
    for pool, error, text in (
        (arenapy.Bump(1 << 20, cuda.Device()), TypeError, "not a Pool or Slab"),
        (arenapy.Pool(1 << 20), BufferError, "host memory"),
        (arenapy.Pool(1 << 20, cuda.Pinned(mapped=False)), BufferError, "pinned memory"),
        (arenapy.Pool(1 << 20, cuda.Device(1)), ValueError, "device 1, and device_id=0"),
        (arenapy.Slab(100, 4, cuda.Device()), ValueError, "items of 100 bytes"),
    ):
        with pytest.raises(error, match=text):
            cuda.chunks(bytes(1000), 200, pool=pool)
    with pytest.raises(TypeError, match="progress=3"):
        cuda.chunks(bytes(1000), 200, progress=3)


@pytest.mark.parametrize("tell", ["recorded", "filled", "copied"])
@pytest.mark.parametrize("kind", ["device", "pinned", "managed", "array"])
def test_what_its_source_was_told_of_comes_first(gpu, kind, tell):
    """The stream that copies is its own, which nobody else can order."""
    sources = {"device": cuda.Device(), "managed": cuda.Managed()}
    source = sources.get(kind, cuda.Pinned(huge_pages=None, mapped=False))
    whole = source.region(4096).buffer()
    whole.fill(1)
    stream, other = cuda.Stream(), cuda.Device().region(4096).buffer()
    other.fill(2)
    gpu.drain()
    if tell == "recorded":
        address = whole.address
        gpu.launch(stream.handle, lambda: poke(address, 4096, 2), [(address, 4096)])
        whole.record_stream(stream)
    elif tell == "filled":
        whole.fill(2, stream=stream)
    else:
        whole.copy_from(other, stream=stream)
    got = []
    for chunk in cuda.chunks(whole.array(dtype="u1") if kind == "array" else whole, 1024):
        backwards(gpu)
        got.append(read(chunk))
    assert set(b"".join(got)) == {2}
