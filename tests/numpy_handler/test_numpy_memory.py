"""`numpy_memory` and `handles`: what arrays are made of, and where their blocks go."""

import mmap
import os
import pickle
import resource
import signal
import sys
import threading
from unittest.mock import Mock

import numpy as np
import pytest
from helpers import GIL
from kernel_view import resident
from numpy._core.multiarray import get_handler_name
from numpy_arrays import (
    ALIGN,
    MAKERS,
    MIB,
    POOLS,
    address_of,
    empty,
    is_ours,
    live,
    owner_of,
    raw,
    same,
    small_pool,
    values,
)  # fmt: skip
from simulated_memory import PROT_NONE, libc
from sources import Only, Regions

import arenapy
from arenapy import File, Host, OutOfMemory, Pool, handles, numpy_memory
from arenapy.linux import vm
from arenapy.memory import reservation

MAP_FIXED_NOREPLACE = 0x100000
TOUCHED_BY_GROWTH = (
    "arenapy.linux.vm.prefault",
    "arenapy.linux.limits._contents",
    "arenapy.memory.reservation.monotonic",
)

LAZY = 32 * MIB  # zeros of this much come when they are touched
POLICIES = ["system", "error"]


@pytest.fixture(params=POOLS)
def every_pool(request, tmp_path):
    return POOLS[request.param](tmp_path)


@pytest.fixture
def pool():
    return Pool()


def system_figures(memory):
    stats = memory.stats()
    return stats.system_allocations, stats.system_bytes, stats.system_live


def access(address):
    """Of the mapping that begins there, as /proc/self/maps has it, or None."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return next((line.split()[1] for line in maps if line.startswith(f"{address:x}-")), None)


def make_dirty(pool, nbytes=8 * MIB):
    """Leave free blocks of many sizes that are full of ones."""
    for size in (64, 500, 4000, 9000, 33_000, nbytes):
        blocks = [pool.alloc(size) for _ in range(9 if size < 40_000 else 2)]
        for block in blocks:
            block.fill(255)
            block.release()


# What arrays are like ----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 7, 64, 500, 5000, 150_001])
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.sampled
def test_contents_are_as_with_numpys_own_memory(name, n):
    n = min(n, 20_000) if name.startswith(("from", "objects", "strings")) else n
    pool = Pool()
    make_dirty(pool)
    expected = MAKERS[name](n, 3)
    with numpy_memory(pool, on_full="error"):
        array = MAKERS[name](n, 3)
    assert same(array, expected)
    assert is_ours(array) and not is_ours(expected)
    assert address_of(owner_of(array)) % ALIGN == 0
    del array
    assert live(pool) == 0


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.sampled
def test_every_pool_serves_every_array(name, every_pool):
    expected = [MAKERS[name](n, n) for n in (0, 3, 2000)]
    make_dirty(every_pool, 40_000)
    with numpy_memory(every_pool, on_full="error"):
        arrays = [MAKERS[name](n, n) for n in (0, 3, 2000)]
    for array, other in zip(arrays, expected, strict=True):
        assert same(array, other) and handles(array).allocator is every_pool
        assert address_of(owner_of(array)) % ALIGN == 0
    del array, arrays
    assert live(every_pool) == 0


def test_the_handlers_name_and_version(pool):
    assert get_handler_name() == "default_allocator"
    with numpy_memory(pool):
        assert get_handler_name() == "arenapy"
        array = np.empty(3)
    assert get_handler_name() == "default_allocator"
    assert get_handler_name(array) == "arenapy"
    assert np._core.multiarray.get_handler_version(array) == 1


@pytest.mark.parametrize("nbytes", [33_000, 160_000, 5 * MIB])
@pytest.mark.parametrize("make", [np.empty, np.zeros])
def test_of_the_two_freed_last_the_one_made_later_serves_first(make, nbytes):
    pool = Pool(source=Host(prefault=False))
    with numpy_memory(pool):
        arrays = [make(nbytes, "u1") for _ in range(4)]
        oldest, older, newer, newest = map(address_of, arrays)
        for index in (3, 0, 2, 1):  # older last
            arrays[index] = None
        arrays += [make(nbytes, "u1") for _ in range(4)]
        served = [address_of(array) for array in arrays[4:]]
        assert served == [newer, older, newest, oldest], "newest was freed before oldest"
        del arrays
        assert live(pool) == 0
    blocks = [pool.alloc(nbytes) for _ in range(2)]
    last = blocks[0].address
    blocks.pop().release()
    blocks.pop().release()
    assert pool.alloc(nbytes).address == last, "a pool's own is the one freed last"
    pool.check()


@pytest.mark.parametrize("dtype", ["u1", "i2", "f8", "c16", "S3", "V5", "M8[s]", object, "T"])
@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 4096, 4097, 33_000, MIB, 5 * MIB])
@pytest.mark.sampled
def test_zeros_are_zero_on_recycled_memory(dtype, nbytes, pool):
    make_dirty(pool)
    count = nbytes // np.dtype(dtype).itemsize
    plain = np.zeros(count, dtype)
    hits = pool.stats().pool_hits
    with numpy_memory(pool):
        for _ in range(3):
            array = np.zeros(count, dtype)
            assert same(array, plain)
            if dtype is not object:
                assert not any(raw(array))
            ctypes_fill(array)
    assert pool.stats().pool_hits >= hits + 3, "memory was not recycled: nothing was tested"


def ctypes_fill(array):
    if not array.dtype.hasobject and array.dtype.kind != "T":
        array.view("u1")[:] = 255


@pytest.mark.parametrize("dtype", [object, "T", [("x", "i4"), ("y", object)]])
def test_empty_arrays_of_objects_are_zeroed(dtype, pool):
    """NumPy asks for their memory with calloc, and drops whatever it finds there."""
    make_dirty(pool)
    plain = np.empty(100_000, dtype)
    with numpy_memory(pool):
        for count in (1, 50, 5000, 100_000):
            array = np.empty(count, dtype)
            assert array.tolist() == plain[:count].tolist()


# Resizing ----------------------------------------------------------------------------------------

SIZES = [0, 1, 8, 63, 64, 65, 100, 511, 513, 4000, 4096, 33_000, 70_000, MIB, 20 * MIB]


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("where", ["pool", "system", "lazy"])
def test_resize_keeps_what_there_is_and_zeros_the_rest(nbytes, where):
    pool = small_pool(64 * MIB if where == "pool" else MIB)
    size = {"pool": 5000, "system": 2 * MIB, "lazy": LAZY}[where]
    make_dirty(pool, 70_000)
    kept = values(1250, 5).view("u1")
    for begin in (size, 4999):
        with numpy_memory(pool):
            array = np.zeros(begin, "u1")
            array[: kept.size - 1] = kept[:-1]
            array[-1] = 77
            before = bytes(array[: min(begin, 30_000)])
            array.resize(nbytes, refcheck=False)
        assert bytes(array[:30_000]) == before[:nbytes].ljust(min(nbytes, 30_000), b"\0")
        assert not nbytes >= begin or array[begin - 1] == 77
        assert not array[max(begin, 1) :].any()
        assert address_of(array) % ALIGN == 0
        del array
    assert live(pool) == 0


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("threads", [False, True])
def test_a_pool_grows_amid_a_function_of_numpy_without_other_code(
    threads, interrupted, monkeypatch
):
    """Not even what a profiler sees. Before the main thread has made more ready, that is."""
    pool, seen, kept, done = Pool(), [], [], threading.Event()
    memory = numpy_memory(pool, on_full="error")
    if interrupted:  # once before, beyond what was ready
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(vm, "prefault", Mock(side_effect=KeyboardInterrupt))
            pool.alloc(300 * MIB)
    thread = threading.Thread(target=done.wait)
    if threads:
        thread.start()
    try:
        with memory:
            sys.setprofile(lambda frame, event, argument: seen.append(frame.f_code.co_filename))
            for _ in range(16):
                kept.append(np.empty(2 * MIB, "u1"))
            sys.setprofile(None)
    finally:
        done.set()
    if threads:
        thread.join()
    assert not [name for name in seen if "arenapy" in name and "tests" not in name]
    assert len(kept) == 16 and all(map(is_ours, kept)) and pool.stats().reserved_bytes >= 32 * MIB
    for array in kept:
        array[:] = 1
    assert pool._growth()[4] is None  # nothing was refused last
    pool.check()


def alloc(pool):
    pool.alloc(MIB).release()


@pytest.mark.parametrize("first", [numpy_memory, alloc])
@pytest.mark.parametrize("second", [numpy_memory, alloc])
def test_two_that_ask_at_once_reserve_addresses_once(first, second):
    """The source stands for the second one's thread."""

    class Meanwhile(Host):
        def reserve(self, nbytes):
            asked.append(nbytes)
            if len(asked) == 1:
                second(pool)
            return super().reserve(nbytes)

    asked = []
    pool = Pool(source=Meanwhile())
    first(pool)
    assert len(asked) == 2 and len(pool.regions) == 1
    pool.check()


@pytest.mark.parametrize("of_numpy", [False, True])
def test_only_growth_amid_numpys_functions_leaves_pages_to_be_touched(of_numpy, monkeypatch):
    """Another thread's such growth is under way, for which the source is at work."""
    pool, begun, go_on = Pool(), threading.Event(), threading.Event()
    memory = numpy_memory(pool)
    hole, kept = pool.alloc(8 * MIB), pool.alloc(2 * MIB)
    hole.release()
    assert pool.trim() >= 8 * MIB  # it is accessible, and the next growth is there
    prefault = vm.prefault

    def slowly(address, nbytes, **how):
        if nbytes >= 300 * MIB:
            begun.set()
            go_on.wait(60)
        else:
            prefault(address, nbytes, **how)

    def work():
        with memory:
            np.empty(300 * MIB, "u1")

    monkeypatch.setattr(vm, "prefault", slowly)
    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert begun.wait(60)
        with memory:
            block = np.empty(8 * MIB, "u1") if of_numpy else pool.empty(8 * MIB, "u1")
        assert resident(block.ctypes.data, block.nbytes) == (0 if of_numpy else block.nbytes)
        assert kept.address == block.ctypes.data + 8 * MIB
    finally:
        go_on.set()
        thread.join()


@pytest.mark.parametrize("place", TOUCHED_BY_GROWTH)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_time_limit_amid_growth_is_not_lost(place, policy, monkeypatch):
    """A signal's handler may raise it anywhere, and it is an OSError."""
    monkeypatch.setattr(reservation, "MOMENT", 0)  # the limits are looked at anew
    pool = Pool()
    memory = numpy_memory(pool, on_full=policy)
    monkeypatch.setattr(place, Mock(side_effect=TimeoutError("time limit")))
    with pytest.raises(TimeoutError, match="time limit"):
        if place == "arenapy.memory.reservation.monotonic":
            numpy_memory(Pool())
        with memory:
            np.empty(300 * MIB, "u1")


@pytest.mark.skipif(not GIL, reason="NumPy itself fails here without a GIL")
@pytest.mark.parametrize("recycles", [False, True])
@pytest.mark.parametrize("debug", [False, True])
def test_an_array_of_a_list_that_another_thread_changes(recycles, debug):
    """With NumPy's own memory it is made between two of the thread's changes."""
    items, kept, stop = [0.0] * 50_000, [], threading.Event()
    pool = Pool(debug=debug)

    def change():
        while not stop.is_set():
            items.append(1.0)
            if len(items) > 100_000:
                del items[50_000:]

    thread = threading.Thread(target=change)
    thread.start()
    try:
        with numpy_memory(pool, on_full="error"):
            if recycles:  # idle pieces that are too small
                kept = [np.empty(100_000, "u1") for _ in range(400)]
                del kept[::2]
            before = len(kept)
            for _ in range(100):
                kept.append(np.array(items))
    finally:
        stop.set()
        thread.join()
    assert len(kept) == before + 100


def test_a_pool_of_a_thread_ends_while_the_main_thread_waits():
    """The pool has asked the main thread, which runs no bytecode, to make more memory ready."""
    ended = []

    def work():
        pool = Pool()
        with numpy_memory(pool):
            arrays = [np.empty(2 * MIB) for _ in range(10)]
        assert all(map(is_ours, arrays))
        address = pool.regions[0].address
        del arrays, pool
        ended.append(access(address) is None)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended == [True]


@pytest.mark.parametrize("when", ["begin", "later"])
def test_a_region_that_is_closed_while_more_is_made_ready(when, monkeypatch):
    """What is mapped there afterwards is somebody else's, and is not made accessible."""
    pool, mapped = Pool(max_bytes=1 << 30), []

    def close():
        if not mapped:
            region = pool.regions[0]
            region.close()
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
            mapped.append((region.address, region.nbytes))
            assert libc.mmap(*mapped[0], PROT_NONE, flags, -1, 0) == region.address
        return 0.0

    def work():
        with memory:
            arrays = [np.empty(50 * MIB, "u1") for _ in range(3)]
        assert all(map(is_ours, arrays)) and not mapped

    if when == "later":
        memory = numpy_memory(pool)
        monkeypatch.setattr(reservation, "monotonic", close)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    else:
        monkeypatch.setattr(reservation, "monotonic", close)
        numpy_memory(pool)
    [(address, nbytes)] = mapped
    assert access(address) == "---p"
    libc.munmap(address, nbytes)


def test_nothing_else_runs_while_an_array_is_resized():
    """NumPy has made sure that nobody else sees the block. A source that is asked could show it."""
    seen = []

    class Seeing(Regions):
        def region(self, nbytes):
            seen.append(nbytes)
            return super().region(nbytes)

    pool = Pool(max_bytes=64 * MIB, source=Seeing())
    memory = numpy_memory(pool)
    with memory:
        array = np.ones(1000)
        asked = len(seen)
        array.resize(5 * MIB, refcheck=False)
        assert len(seen) == asked and memory.stats().system_live == 1
        assert array[:1000].sum() == 1000 == array.sum()
        del array
    assert memory.stats().system_live == 0 == live(pool)


@pytest.mark.parametrize("nbytes", [1, 64, 100, 512, 4096, 33_000, 70_000])
def test_resize_stays_in_its_block(nbytes, pool):
    """Sizes around that of the block, and beside it others that must not be touched."""
    with numpy_memory(pool):
        arrays = [np.full(nbytes, n, "u1") for n in range(9)]
        room = handles(arrays[4]).nbytes
        for n in (room - 1, room, room + 1, room + 63, room + 64):
            arrays[4].resize(nbytes, refcheck=False)
            arrays[4].resize(n, refcheck=False)
            arrays[4][:] = 4
            assert handles(arrays[4]).nbytes >= n
    assert all((array == n).all() for n, array in enumerate(arrays))


def test_resize_out_of_a_full_pool_and_back():
    pool = small_pool()
    memory = numpy_memory(pool)
    with memory:
        array = np.full(1000, 7, "u1")
        assert handles(array)
        array.resize(2 * MIB, refcheck=False)
        assert handles(array) is None and live(pool) == 0 and memory.stats().system_live == 1
        assert (array[:1000] == 7).all() and not array[1000:].any()
        array.resize(500, refcheck=False)
        assert (array == 7).all() and array.size == 500
    del array
    assert live(pool) == 0 and memory.stats().system_live == 0


def test_a_failed_resize_keeps_the_array():
    pool = small_pool()
    with numpy_memory(pool, on_full="error"):
        array = empty(1000, 4)
        with pytest.raises(MemoryError):
            array.resize(MIB, refcheck=False)
        another = empty(1000, 4)
        assert same(array, another) and live(pool) == 2
    del array, another
    assert live(pool) == 0


# Where blocks go ---------------------------------------------------------------------------------


def test_a_pool_with_live_arrays_cannot_be_taken_apart(pool):
    with numpy_memory(pool):
        array = empty(1000, 1)
    with pytest.raises(BufferError):
        handles(array).region.close()
    assert same(array, empty(1000, 1))


def test_a_trace_has_numpys_blocks(pool, tmp_path):
    with numpy_memory(pool), arenapy.trace.record(pool, tmp_path / "trace"):
        kept = np.empty(1000)
        for _ in range(10):
            np.empty(300)
    trace = arenapy.trace.load(tmp_path / "trace")
    codes = arenapy.trace.OPERATIONS
    allocs = trace.events[trace.events["operation"] == codes["alloc"]]
    frees = trace.events[trace.events["operation"] == codes["free"]]
    assert sorted(allocs["nbytes"]) == [2400] * 10 + [8000]
    assert len(frees) == 10 and address_of(kept) in allocs["address"]


# When the pool is full ---------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_full_pool(policy):
    pool = small_pool()
    memory = numpy_memory(pool, on_full=policy)
    with memory:
        fits = empty(1000, 1)
        before = pool.stats().as_dict()
        if policy == "error":
            for make in (np.empty, np.zeros, np.ones):
                with pytest.raises(MemoryError):
                    make(2 * MIB, "u1")
            assert system_figures(memory) == (0, 0, 0)
        else:
            big = [make(2 * MIB, "u1") for make in (np.empty, np.zeros, np.ones)]
            assert system_figures(memory) == (3, 6 * MIB, 3)
            assert not any(raw(big[1])) and set(raw(big[2])) == {1}
            for one in big:
                assert is_ours(one) and handles(one) is None and address_of(one) % ALIGN == 0
            del one, big[1]
            assert system_figures(memory) == (3, 6 * MIB, 2)
        after = pool.stats().as_dict()
        assert after["active_allocations"] == before["active_allocations"]
        again = empty(1000, 2)
    assert handles(again).allocator is pool
    assert same(fits, empty(1000, 1)) and same(again, empty(1000, 2))
    big = fits = again = None
    assert live(pool) == 0 and memory.stats().system_live == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_source_that_fails(policy):
    source = Regions()
    pool = Pool(source=source)
    memory = numpy_memory(pool, on_full=policy)
    source.failing = True
    with memory:
        if policy == "error":
            with pytest.raises(MemoryError):
                np.empty(MIB)
        else:
            assert same(empty(MIB, 1), empty(MIB, 1))
            assert memory.stats().system_allocations >= 1 and source.failures
        source.failing = False
        assert handles(np.empty(MIB)).allocator is pool


def test_an_error_of_the_source_is_raised_after_numpy_is_done():
    """A callback must not leave an exception behind, whatever it is; the main thread gets it."""

    class Broken:
        calls = 0

        def region(self, nbytes):
            self.calls += 1
            raise ZeroDivisionError("planned")

    source = Broken()
    with pytest.raises(ZeroDivisionError, match="planned"):
        numpy_memory(Pool(source=source))  # it asks what memory that is
    source.region = Mock(side_effect=OutOfMemory("planned"))
    memory = numpy_memory(Pool(source=source))
    del source.region
    with memory:
        with pytest.raises(ZeroDivisionError, match="planned"):
            np.ones(100)
        with pytest.raises(ZeroDivisionError) as info:
            try:
                raise KeyError("mine")
            except KeyError:
                np.ones(100)
        assert isinstance(info.value.__context__, KeyError)
    assert source.calls == 3 and memory.stats().system_allocations >= 2


def test_an_array_becomes_smaller_in_a_full_pool():
    """Where there is no room to move to, it keeps all of its block."""
    pool = Pool(max_bytes=8 << 20)
    with numpy_memory(pool, on_full="error"):
        array = np.ones(6 << 20, "u1")
        with pytest.raises(MemoryError):
            np.ones(3 << 20, "u1")
        array.resize(5 << 19, refcheck=False)
    assert array.nbytes == 5 << 19 and array.all()


@pytest.mark.parametrize("step", [100, 4000, 100_000])
def test_an_array_that_grows_in_a_full_pool_is_seldom_moved(step):
    """Each move copies all of it: one for each step would take quadratic time."""
    memory, steps = numpy_memory(Pool(mmap.PAGESIZE)), 1000
    with memory:
        array = np.zeros(step, "u1")
        for i in range(2, steps + 1):
            array.resize(i * step, refcheck=False)
            array[-step:] = i & 127
    assert all((array[i * step : (i + 1) * step] == i + 1 & 127).all() for i in range(1, steps))
    assert memory.stats().system_bytes < 20 * array.nbytes


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("error", [SystemExit, TimeoutError, KeyboardInterrupt, MemoryError])
def test_what_a_signals_handler_raises_during_growth_is_not_lost(policy, error):
    """But an error that says that there is no memory is what NumPy then says."""

    class Interrupted(Regions):
        armed = False

        def region(self, nbytes):
            if self.armed:
                signal.raise_signal(signal.SIGALRM)
            return super().region(nbytes)

    def handler(number, frame):
        raise error

    source = Interrupted()
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with numpy_memory(Pool(source=source), on_full=policy):
            source.armed = True
            if error is MemoryError and policy == "system":
                np.ones(8 * MIB)
            else:
                with pytest.raises(error):
                    np.ones(8 * MIB)
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pool_over_a_file_that_shrank(policy, tmp_path):
    path = tmp_path / "memory"
    pool = Pool(4 * MIB, File(path, "w+"), 4 * MIB)
    with numpy_memory(pool, on_full=policy) as memory:
        kept = np.ones(1000)
        del kept
        os.truncate(path, 100)
        for make in (np.ones, np.zeros, lambda n: np.array([1.5]).repeat(n)):
            if policy == "error":
                with pytest.raises(MemoryError):
                    make(5000)
            else:
                array = make(5000)
                assert handles(array) is None
                array[:] = 7
    assert memory.stats().system_live == (policy == "system")
    assert handles(np.ones(10)) is None
    os.truncate(path, 4 * MIB)
    with numpy_memory(pool):
        assert handles(np.ones(5000)).allocator is pool


def test_the_hook_is_asked_and_may_help():
    """`on_oom` is a call of Python's: NumPy's thread takes the GIL for it, or does not call it."""
    kept = []

    def hook(nbytes):
        return bool(kept) and bool(kept.clear() or True)

    pool = Pool(MIB, Host(prefault=False), MIB, on_oom=hook)
    kept.append(pool.alloc(900_000))
    with numpy_memory(pool, on_full="system") as memory:
        array = empty(50_000, 1)
    assert same(array, empty(50_000, 1))
    assert (handles(array) is None) == (memory.stats().system_live == 1)


@pytest.mark.parametrize("same", [False, True])
def test_arrays_of_code_that_runs_while_a_pool_grows(same):
    """A handler of a signal may make some, for which the source stands here."""

    class Interrupted(Regions):
        def region(self, nbytes):
            if armed:
                with numpy_memory(other, on_full="error"):
                    arrays.append(np.ones(MIB))
            return super().region(nbytes)

    arrays, armed = [], []
    pool = Pool(source=Interrupted())
    other = pool if same else Pool()
    with numpy_memory(pool, on_full="error"):
        armed.append(1)
        arrays.append(np.ones(8 * MIB))
    assert len(arrays) == 2 and [array.sum() for array in arrays] == [MIB, 8 * MIB]
    assert handles(arrays[0]) is None and handles(arrays[1]).allocator is pool


def test_a_source_may_use_numpy_itself():
    """Growing asks the source, which allocates under the handler that is growing."""

    class Busy:
        inner = Regions()

        def region(self, nbytes):
            assert np.arange(1000).sum() == 499_500
            return self.inner.region(nbytes)

    pool = Pool(source=Busy())
    with numpy_memory(pool):
        arrays = [empty(200_000, n) for n in range(5)]
    assert all(same(array, empty(200_000, n)) for n, array in enumerate(arrays))
    assert handles(arrays[-1]).allocator is pool
    del arrays
    assert live(pool) == 0


def test_a_source_with_one_region_and_no_more():
    pool = Pool(source=Only(2 * MIB))
    with numpy_memory(pool) as memory:
        arrays = [empty(10_000, n) for n in range(60)]
    assert all(same(array, empty(10_000, n)) for n, array in enumerate(arrays))
    ours = sum(handles(array) is not None for array in arrays)
    assert 0 < ours < 60 and memory.stats().system_live == 60 - ours
    del arrays
    assert live(pool) == 0 and memory.stats().system_live == 0


# Large zeros -------------------------------------------------------------------------------------


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.no_sanitizer
@pytest.mark.parametrize("policy", POLICIES)
def test_large_zeros_come_when_they_are_touched(policy):
    pool = small_pool()
    memory = numpy_memory(pool, on_full=policy)
    with memory:
        np.zeros(LAZY, "u1")
        begun = faults()
        array = np.zeros(16 * LAZY, "u1")
        assert faults() - begun < 100, "512 MiB were touched"
    stats = memory.stats()
    assert (stats.lazy_allocations, stats.lazy_live) == (2, 1)
    assert stats.lazy_bytes == 17 * LAZY and stats.system_allocations == 0
    assert handles(array) is None and is_ours(array) and address_of(array) % ALIGN == 0
    assert not array[:: 1 << 14].any()
    array[[0, -1]] = 3, 4
    assert array[0] == 3 and array[-1] == 4 and not array[1:100].any()
    del array
    assert memory.stats().lazy_live == 0 and live(pool) == 0


def test_zeros_that_are_not_so_large_are_the_pools(pool):
    with numpy_memory(pool) as memory:
        array = np.zeros(LAZY // 2, "u1")
    assert handles(array).allocator is pool and memory.stats().lazy_allocations == 0


@pytest.mark.no_sanitizer  # it asks malloc for more than there is
def test_an_impossible_calloc_is_a_memory_error(pool):
    with numpy_memory(pool):
        for make in (np.zeros, np.empty):
            with pytest.raises(MemoryError):
                make(2**62, "u1")
            with pytest.raises(ValueError, match=r"too big|dimension"):
                make((2**40, 2**40), "f8")
    assert live(pool) == 0


def test_a_pool_whose_region_was_closed_frees_no_array_of_libcs():
    """Others have its addresses then, malloc first of all."""
    pool = Pool(1 << 30, Host(huge_pages=None, prefault=False))
    memory = numpy_memory(pool)
    with memory:
        np.ones(MIB)
        (region,) = pool.regions
        start, end = region.address, region.address + region.nbytes
        region.close()
        array = np.empty((1 << 30) - MIB, "u1")  # which fits nowhere above
        assert start <= array.ctypes.data < end
        assert handles(array) is None
        array[:MIB] = 7
        array.resize(MIB, refcheck=False)
        assert handles(array) is None
        assert (array == 7).all()
        del array
        assert memory.stats().system_live == 0
    with pytest.raises(ValueError, match="a region of this pool was closed"), numpy_memory(pool):
        pass


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_it_is_not_pickled(pool, protocol):
    with pytest.raises(TypeError, match="not pickled; in the other process, make one over a Pool"):
        pickle.dumps(numpy_memory(pool), protocol)
