"""`arenapy.testing.asv`: what asv itself does not see, counted rightly and with units."""

import ctypes
import math
import subprocess
import sys
import textwrap
import types

import numpy as np
import pytest

import arenapy
from arenapy.linux import vm
from arenapy.testing import asv
from arenapy.testing.asv import (
    MemorySuite,
    allocated_peak_bytes,
    hit_rate,
    page_faults,
    peak_bytes,
    tracked,
)

MIB = 1 << 20
LARGE = 64 * MIB
SLACK = 4 * MIB  # of the kernel's account of what is resident


def malloc_and_touch(nbytes):
    """Memory of C's, used and freed; Python has no object of that size."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    address = libc.malloc(nbytes)
    ctypes.memset(address, 1, nbytes)
    libc.free(address)


@pytest.mark.no_sanitizer
def test_peak_bytes_sees_memory_of_c_that_is_gone_when_the_call_returns():
    """asv's mem_ benchmarks ask for the size of what is returned, which is nothing here."""
    malloc_and_touch(1)
    assert malloc_and_touch(1) is None
    assert LARGE - SLACK < peak_bytes(lambda: malloc_and_touch(LARGE)) < LARGE + SLACK


@pytest.mark.no_sanitizer
def test_the_peak_of_a_call_is_not_that_of_the_process():
    malloc_and_touch(2 * LARGE)
    assert peak_bytes(lambda: malloc_and_touch(LARGE // 4)) < LARGE // 4 + SLACK
    held = np.ones(LARGE, "u1")
    assert peak_bytes(lambda: None) < SLACK
    assert held[0] == 1


@pytest.mark.no_sanitizer
def test_memory_that_nobody_touches_is_not_in_the_peak():
    assert peak_bytes(lambda: np.empty(LARGE, "u1")) < SLACK


def test_where_the_kernel_does_not_reset_peaks(monkeypatch, tmp_path):
    class Nothing(MemorySuite):
        def work(self):
            pass

    monkeypatch.setattr(asv, "_CLEAR_REFS", tmp_path / "not" / "there")
    with pytest.raises(NotImplementedError, match="cannot be written"):
        peak_bytes(lambda: None)
    assert math.isnan(Nothing().track_peak_bytes())


@pytest.mark.no_sanitizer
def test_page_faults_are_counted_by_the_call_and_not_while_warming_up():
    size = 1 << 20
    calls = []

    def touch():
        calls.append(len(calls))
        with vm.map_memory(size) as mapping:
            ctypes.memset(mapping.address, 1, size)

    pages = size // vm.PAGE_SIZE
    assert pages <= page_faults(touch, repeat=10, warmup=2) < 1.1 * pages
    assert len(calls) == 12
    only_first = iter([touch])
    assert page_faults(lambda: next(only_first, int)(), repeat=10, warmup=1) < pages / 10


@pytest.mark.parametrize("wrong", [{"repeat": 0}, {"warmup": -1}])
def test_nothing_to_count_is_refused(wrong):
    with pytest.raises(ValueError, match="at least 1 and 0"):
        page_faults(int, **wrong)


def test_the_peak_of_an_allocator_is_that_of_the_call():
    pool = arenapy.Pool()
    pool.alloc(8 * MIB).release()
    kept = pool.alloc(MIB)
    assert allocated_peak_bytes(pool, lambda: pool.alloc(2 * MIB)) == 3 * MIB
    kept.release()
    with pytest.raises(TypeError, match="not an allocator"):
        allocated_peak_bytes(bytearray, int)


def test_hits_of_a_call():
    pool = arenapy.Pool()
    made = []
    assert hit_rate(pool, lambda: made.append(pool.alloc(MIB))) == 0
    made.clear()
    assert hit_rate(pool, lambda: pool.alloc(MIB), repeat=5) == 1
    assert math.isnan(hit_rate(pool, int))
    # Of two allocations of which one has to be new.
    held = pool.alloc(MIB)
    more = arenapy.Pool()
    more.alloc(64 * MIB).release()

    def both():
        made.extend([more.alloc(64 * MIB), more.alloc(64 * MIB)])

    assert hit_rate(more, both) == 0.5
    held.release()
    with pytest.raises(TypeError, match="not a Pool"):
        hit_rate(arenapy.Slab(64, 8), int)


def test_tracked_gives_units_and_keeps_the_function():
    def track_it():
        return 1

    assert tracked("faults", "It", timeout=3)(track_it) is track_it
    assert (track_it.unit, track_it.pretty_name, track_it.timeout) == ("faults", "It", 3)
    assert not hasattr(tracked("bytes")(lambda: 1), "pretty_name")


# ---- suites


class Pooled(MemorySuite):
    params = (1, 3)
    param_names = ("blocks",)
    repeat = 4

    def setup(self, blocks):
        self.pool = arenapy.Pool()
        self.calls = 0

    def allocator(self, blocks):
        return self.pool

    def work(self, blocks):
        self.calls += 1
        return [self.pool.alloc(MIB) for _ in range(blocks)]


def benchmarks(cls):
    return {name for name in dir(cls) if name.startswith("track_")}


def test_the_base_class_has_no_benchmarks_of_its_own():
    """asv runs those of every class that a module imports."""
    assert benchmarks(MemorySuite) == set()

    class NoAllocator(MemorySuite):
        track_peak_bytes = None

    assert benchmarks(NoAllocator) == {"track_page_faults", "track_peak_bytes"}
    assert NoAllocator.track_peak_bytes is None
    with pytest.raises(NotImplementedError, match="NoAllocator defines no work"):
        NoAllocator().track_page_faults()


def test_what_a_parent_removed_or_has_is_inherited():
    class Parent(MemorySuite):
        track_peak_bytes = None

        def track_page_faults(self):
            return 42

    class Mixin:
        track_peak_bytes = None

    class Child(Parent):
        def work(self):
            pass

    class Mixed(Mixin, MemorySuite):
        pass

    class Named(Pooled):
        pass

    assert Child.track_peak_bytes is Mixed.track_peak_bytes is None
    assert Child().track_page_faults() == 42
    assert Named.track_hit_rate.pretty_name.startswith("Named: ")


def test_a_suite_tracks_with_its_parameters():
    for blocks in Pooled.params:
        suite = Pooled()
        suite.setup(blocks)
        assert suite.track_allocated_peak_bytes(blocks) == blocks * MIB
        assert suite.track_hit_rate(blocks) == 1
        assert suite.calls == 1 + 1 + 4
        assert suite.track_page_faults(blocks) >= 0
        assert suite.track_peak_bytes(blocks) < SLACK
    assert benchmarks(Pooled) == {
        "track_page_faults", "track_peak_bytes", "track_allocated_peak_bytes", "track_hit_rate",
    }  # fmt: skip


def test_hits_of_what_has_none():
    class Arena(MemorySuite):
        def allocator(self):
            return arenapy.Bump(1 << 16)

        def work(self):
            pass

    assert math.isnan(Arena().track_hit_rate())


def test_asv_finds_the_benchmarks_and_their_units(monkeypatch, tmp_path):
    discovery = pytest.importorskip("asv_runner.discovery")
    module = types.ModuleType("suites.bench_pool")
    module.MemorySuite, module.Pooled = MemorySuite, Pooled
    monkeypatch.setattr(discovery, "disc_modules", lambda *_, **__: [module])
    found = {one.name: one for one in discovery.disc_benchmarks(str(tmp_path / "suites"))}
    units = {name: one.unit for name, one in found.items()}
    assert units == {
        "bench_pool.Pooled.track_allocated_peak_bytes": "bytes",
        "bench_pool.Pooled.track_hit_rate": "1",
        "bench_pool.Pooled.track_page_faults": "faults",
        "bench_pool.Pooled.track_peak_bytes": "bytes",
    }
    one = found["bench_pool.Pooled.track_allocated_peak_bytes"]
    assert one.pretty_name == "Pooled: bytes of live blocks at the peak"
    assert one.param_names == ["blocks"]
    one.set_param_idx(1)
    one.do_setup()
    assert one.run(*one._current_params) == 3 * MIB


def test_neither_hypothesis_nor_asv_is_needed():
    code = """
    import sys
    sys.modules["asv"] = sys.modules["asv_runner"] = None
    class Nothing:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name.partition(".")[0] == "hypothesis":
                raise ModuleNotFoundError(name)
    import importlib.util
    finder = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *a: None if name == "hypothesis" else finder(name, *a)
    sys.meta_path.insert(0, Nothing)
    from arenapy.testing.asv import page_faults
    assert page_faults(int) == 0
    try:
        from arenapy.testing import AllocatorMachine
    except ModuleNotFoundError as error:
        print(error)
    import arenapy.testing
    try:
        arenapy.testing.nonsense
    except AttributeError as error:
        print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "arenapy.testing.AllocatorMachine needs Hypothesis: pip install hypothesis",
        "module 'arenapy.testing' has no attribute 'nonsense'",
    ]
