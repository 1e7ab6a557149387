"""What an attack on the first Pool found: each of these broke a promise once."""

import ctypes
import gc
import os
import socket
import threading
import time
import weakref

import pytest
from children import another_process
from helpers import c_function, in_threads

import arenapy
from arenapy import Existing, Host, OutOfMemory, Pool, Region, Shared
from arenapy.linux import vm

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


pool_alloc = c_function("pool_alloc", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
pool_free = c_function("pool_free", ctypes.c_int, ctypes.c_void_p)
TAKE_OVER = """
    import ctypes, mmap, sys, threading, time
    import arenapy
    sys.setswitchinterval(5)
    libc = ctypes.PyDLL(None)                # keeps the GIL: nobody gets in between
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    FIXED_NOREPLACE, NORESERVE, FILLED = 0x100000, 0x4000, 16 << 20

    def take_over(region):
        '''Close a region, and map the same addresses for something else at once.'''
        region.close()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | FIXED_NOREPLACE | NORESERVE
        at = libc.mmap(region.address, region.nbytes, 3, flags, -1, 0)
        assert at == region.address
        libc.memset(at, 90, FILLED)
        return at

    def verify(at):
        assert ctypes.string_at(at, FILLED).count(90) == FILLED, "lost"
"""


def test_a_pool_that_could_not_be_made_is_measured(run_script):
    run_script("""
        import arenapy
        with arenapy.measure():
            try:
                arenapy.Pool(max_bytes=-1)
            except ValueError:
                pass
    """)


def test_a_pool_whose_source_refused_to_be_asked_says_so(run_script):
    run_script("""
        import arenapy

        class Source:
            def region(self, nbytes):
                return arenapy.Host().region(nbytes)

            @property
            def reserve(self):
                raise RuntimeError

        try:
            arenapy.Pool(source=Source())
        except RuntimeError:
            pass
    """)


def test_a_closed_pool_gives_nothing_back_by_time(run_script):
    run_script(
        TAKE_OVER
        + """
    pool = arenapy.Pool(max_bytes=64 << 20, trim_after=0.01)
    pool.alloc(1 << 20)
    at = take_over(pool.regions[0])
    for _ in range(5):
        time.sleep(0.02)
        try:
            pool.alloc(100)
        except ValueError:
            pass
    verify(at)
    """
    )


@pytest.mark.full
def test_a_region_is_not_closed_under_a_thread_that_fills_it(run_script):
    run_script(
        TAKE_OVER
        + """
    pool = arenapy.Pool(max_bytes=2 << 30)
    pool.alloc(64)

    def grow():
        try:
            pool.alloc(1 << 30)
        except Exception:
            pass

    thread = threading.Thread(target=grow)
    thread.start()
    time.sleep(0.01)
    at = None
    try:
        at = take_over(pool.regions[0])
    except BufferError:                      # as good
        pass
    thread.join()
    if at is not None:
        verify(at)
    """
    )


def test_room_is_made_by_a_region_larger_than_what_is_missing():
    pool = Pool(max_bytes=4 * MIB, source=Shared())
    pool.alloc(3 * MIB)
    pool.alloc(7 * MIB // 2)
    pool.check()


@pytest.mark.parametrize("nbytes", [GIB, 5 * GIB, 1 << 44, 1 << 45, (1 << 46) - 1])
def test_a_request_beyond_the_limit_changes_nothing(nbytes):
    pool = Pool(max_bytes=MIB)
    pool.alloc(100)
    before = len(pool.regions), pool.stats().metadata_bytes
    for k in range(3):
        with pytest.raises(OutOfMemory):
            pool.alloc(nbytes - k)
    assert (len(pool.regions), pool.stats().metadata_bytes) == before


@pytest.mark.parametrize("max_bytes", [1 << 44, 1 << 45, 1 << 62])
def test_a_limit_that_is_never_reached(max_bytes):
    pool = Pool(max_bytes=max_bytes)
    pool.alloc(100)
    pool.check()


class Slow:
    """A source during whose work other threads run."""

    def region(self, nbytes):
        time.sleep(0.05)
        return Host().region(nbytes)


def test_threads_together_keep_the_limit():
    pool = Pool(max_bytes=4 * MIB, source=Slow())
    got = []

    def work():
        try:
            got.append(pool.alloc(3 * MIB))
        except OutOfMemory as error:
            got.append(error)

    in_threads(*[work] * 6)
    assert pool.stats().reserved_bytes <= pool.max_bytes


def test_no_more_of_a_region_is_used_than_the_limit():
    class Generous:
        def region(self, nbytes):
            return Host().region(max(nbytes, 8 * MIB))

    pool = Pool(max_bytes=MIB, source=Generous())
    pool.alloc(10)
    assert pool.stats().reserved_bytes <= MIB
    assert Pool(max_bytes=MIB, source=Existing(bytearray(8 * MIB))).stats().reserved_bytes <= MIB


@pytest.mark.no_sanitizer
def test_prewarming_beyond_the_limit_takes_no_memory(run_script):
    run_script("""
        import resource, arenapy
        from pathlib import Path
        has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (has + (1 << 30), has + (1 << 30)))
        for count in (10**8, 10**12):
            try:
                arenapy.Pool(max_bytes=1 << 20).prewarm({64: count})
            except arenapy.OutOfMemory:
                pass
            else:
                raise AssertionError
    """)


@pytest.mark.parametrize("seconds", [1e11, 1e300, float("inf")])
def test_a_trimming_thread_that_waits_for_ever(seconds, monkeypatch):
    died = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    pool = Pool(1 << 22, trim_after=seconds, trim_thread=True)
    (thread,) = [one for one in threading.enumerate() if one.name == "arenapy-trim"]
    pool.alloc(1 << 20).release()
    thread.join(0.1)
    assert thread.is_alive() and not died
    assert pool.stats().idle_bytes >= 1 << 20
    del pool
    gc.collect()
    thread.join(10)
    assert not thread.is_alive() and not died


def test_the_collector_ends_a_pool_in_its_trimming_thread(run_script):
    """Which waited for itself then, and nothing was collected ever after."""
    run_script("""
        import gc, threading, time, weakref
        from arenapy import Pool

        class Owner:
            pass

        def in_a_cycle(**kept):
            owner = Owner()
            owner.itself, owner.kept = owner, kept
            return weakref.ref(owner)

        gc.set_threshold(1)
        for _ in range(20):
            gc.disable()
            in_a_cycle(pool=Pool(1 << 22, trim_after=0.004, trim_thread=True))
            gc.enable()
            time.sleep(0.02)                 # the next to allocate is that thread
        gc.disable()
        owner = in_a_cycle()
        gc.collect()
        assert owner() is None
        deadline = time.monotonic() + 10
        while threading.active_count() > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert threading.active_count() == 1
    """)


@pytest.mark.parametrize("nbytes", [100, 10_000, 100_000])
def test_memory_beside_a_block_in_use_gets_old(nbytes):
    """It is merged with that block's each time that this is freed."""
    pool = Pool(1 << 28, trim_after=0.1)
    blocks = [pool.alloc(1 << 20) for _ in range(50)]
    del blocks
    until = time.monotonic() + 20
    while pool.stats().reserved_bytes > 10 << 20:
        assert time.monotonic() < until, f"{pool} kept what was not used"
        pool.alloc(nbytes).release()
        time.sleep(0.01)


@pytest.mark.parametrize("nbytes", [100, 4000, 32768, 40_000, MIB])
def test_what_was_freed_just_now_stays(nbytes):
    pool = Pool(trim_after=0.5)
    blocks = [pool.alloc(nbytes) for _ in range(10 * MIB // nbytes)]
    pool.alloc(nbytes).release()  # long before them
    time.sleep(0.6)
    blocks.clear()
    before = pool.stats().reserved_bytes
    pool.alloc(nbytes).release()  # a look
    assert pool.stats().reserved_bytes >= before - 2 * MIB


def test_what_a_new_thread_prewarms_stays():
    """It has freed nothing itself, and others have."""
    pool = Pool(trim_after=0.2)
    until = time.monotonic() + 0.4
    while time.monotonic() < until:
        pool.alloc(100_000).release()

    def work():
        pool.prewarm({MIB: 20})
        before = pool.stats().reserved_bytes
        pool.alloc(100).release()  # a look
        assert pool.stats().reserved_bytes >= before

    in_threads(work)


def test_ages_are_told_by_time():
    """With `trim_after`. Those by operations go round within minutes."""
    pool = Pool(trim_after=600.0)
    pool.alloc(MIB).release()
    for _ in range(10_000):
        pool.alloc(40_000).release()
    blocks = [pool.alloc(40_000) for _ in range(500)]
    assert max(block.age for block in pool.blocks()) <= 1
    del blocks


def test_a_block_is_as_old_as_its_own_free():
    """And not as the last one that its thread freed: another one may have been at work since."""
    pool = Pool(trim_after=0.2)
    block = pool.alloc(1 << 20)
    in_threads(lambda: [pool.alloc(100_000).release() or time.sleep(0.0005) for _ in range(1000)])
    block.release()
    ages = {one.nbytes: one.age for one in pool.blocks()}
    assert ages[1 << 20] == 0, ages


def test_what_receivers_let_go_of_gets_old():
    pool = Pool(1 << 28, Shared(grow=True), trim_after=0.1, trim_thread=True)
    used = lambda: os.fstat(pool.regions[0].fd).st_blocks * 512  # noqa: E731
    here, there = socket.socketpair()
    with here, there:
        received = []
        for _ in range(20):
            arenapy.send(here, pool.alloc(1 << 20))
            received.append(arenapy.receive(there))
        time.sleep(0.5)  # the pool has looked before they go
        assert used() >= 20 << 20
        del received
        until = time.monotonic() + 20
        while used() > 4 << 20:
            assert time.monotonic() < until, f"{used()} bytes stay"
            time.sleep(0.05)


def test_trim_after_works_over_every_source():
    pool = Pool(source=Shared(), trim_after=0.05)
    blocks = [pool.alloc(3 * MIB) for _ in range(4)]
    pool.alloc(64)
    del blocks
    deadline = time.monotonic() + 10
    while pool.stats().idle_bytes >= 3 * MIB and time.monotonic() < deadline:
        time.sleep(0.02)
        pool.alloc(64)
    assert pool.stats().idle_bytes < 3 * MIB


class Owner:
    """Weakly referable."""


def test_the_first_buffer_over_a_users_object_is_collected_too():
    class Source:
        def region(self, nbytes):
            mapping = vm.map_memory(nbytes)
            self.last = Owner()
            return Region.from_address(mapping.address, nbytes, owner=self.last, mapping=mapping)

    source = Source()
    pool = Pool(source=source)
    block = pool.alloc(100 * KIB)
    source.last.cycle = block
    gone = weakref.ref(source.last)
    del block, pool, source
    gc.collect()
    assert gone() is None


def test_a_hosts_own_region_method_is_asked():
    class Counted(Host):
        asked = 0

        def region(self, nbytes):
            Counted.asked += 1
            return super().region(nbytes)

    Pool(source=Counted()).alloc(10)
    assert Counted.asked


def test_arrays_over_memory_that_the_host_cannot_read_are_refused(run_script):
    run_script("""
        import arenapy
        from arenapy.linux import reserved_space as vm_reserve

        class Device:
            def region(self, nbytes):
                mapping = vm_reserve.reserve(nbytes)
                return arenapy.Region.from_address(
                    mapping.address, nbytes, kind="device", device_id=0, host_accessible=False,
                    device_accessible=True, mapping=mapping)

        pool = arenapy.Pool(source=Device())
        try:
            pool.zeros(10)
        except BufferError:
            pass
    """)


def test_allocating_does_not_look_at_every_pending_block():
    pool = Pool(source=Shared())
    pool.alloc(64)
    times = []
    for n in (10, 3000):
        blocks = [pool_alloc(pool, 64, 64) for _ in range(n)]
        with another_process():
            for block in blocks:
                pool_free(pool, block)
            times.append(min(timed(pool) for _ in range(20)))
    assert times[1] < 20 * times[0] + 1e-4


def timed(pool):
    start = time.perf_counter()
    pool.alloc(64)
    return time.perf_counter() - start
