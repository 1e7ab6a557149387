"""A pool whose growth is cut short by Python itself: no memory for an object, no more recursion."""

import pytest
from helpers import GIL

START = """
import sys
from arenapy import Host, Pool, Shared

def source():
    return {source}

def is_whole(pool):
    blocks = [pool.alloc(1 << 19), pool.alloc((1 << 19) - 70_000)]
    del blocks
    pool.check()
"""
SOURCES = ["Host(prefault=False, huge_pages=None)", "Shared(prefault=False, huge_pages=None)"]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.full
def test_at_the_limit_of_recursion(run_script, source):
    run_script(
        START.format(source=source)
        + """
def deep(n):
    return pool.alloc(1 << 19) if n == 0 else deep(n - 1)

refused = 0
for depth in range(150, 200):
    pool = Pool(1 << 20, source())
    sys.setrecursionlimit(200)
    try:
        deep(depth)
    except RecursionError:
        refused += 1
    finally:
        sys.setrecursionlimit(1000)
    is_whole(pool)
assert refused > 1, refused
"""
    )


@pytest.mark.skipif(not GIL, reason="a list that CPython 3.13 has no memory for is freed twice")
def test_without_memory_for_an_object(run_script):
    """Not over Host, whose code in Python has a generator: CPython 3.13 ends the process there."""
    pytest.importorskip("_testcapi")
    run_script(
        START.format(source=SOURCES[1])
        + """
import _testcapi
refused = 0
for k in range(40):
    pool = Pool(1 << 20, source())
    error = None
    _testcapi.set_nomemory(k, k + 1)
    try:
        pool.alloc(1 << 19)
    except (MemoryError, RuntimeError):  # open() has no memory for a lock
        error = True
    finally:
        _testcapi.remove_mem_hooks()
    refused += error is not None
    is_whole(pool)
assert refused > 1, refused
""",
        quiet=False,  # a file whose open() failed half way is told of
    )


@pytest.mark.full
def test_a_list_without_memory_to_grow(run_script):
    """Cython 3.3 freed its items twice: the build hook mends that."""
    pytest.importorskip("_testcapi")
    run_script(
        """
import _testcapi, gc
import arenapy
pool = arenapy.Pool(32 << 20)

def prewarm():
    pool.prewarm({64: 10, 100_000: 3})

prewarm()
refused = 0
for k in range(60):
    _testcapi.set_nomemory(k, k + 1)
    try:
        prewarm()
    except MemoryError:
        refused += 1
    finally:
        _testcapi.remove_mem_hooks()
    pairs = [(i, str(i)) for i in range(100)]
    assert [i for i, _ in pairs] == list(range(100)), "two tuples are in one place"
    pairs = None
    gc.collect()
pool.check()
assert refused > 5, refused
"""
    )
