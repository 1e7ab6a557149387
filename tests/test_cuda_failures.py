"""Each driver call fails, one at a time: nothing leaks, and all goes on."""

import gc
import re

import pytest
from cuda_support import ALLOCATORS, MIB, SOURCES, a_gpu, content, new_stream, slowly_fill
from simulated_driver import INVALID_VALUE, OUT_OF_MEMORY

from arenapy import OutOfMemory, Pool, cuda

#: Whose failure nobody is told, as it is at somebody's end: memory may be lost to the process.
LOSES = {"cuMemFree", "cuMemHostUnregister", "cuMemFreeAsync", "cuMemPoolDestroy"}


def scenario(gpu, allocator, source):
    """A bit of everything, with one allocator; gives what it has left alive."""
    one = ALLOCATORS[allocator](SOURCES[source]())
    s, t = new_stream(gpu), new_stream(gpu)
    a = one.alloc(50_000, stream=s)
    b = one.alloc(50_000)
    a.fill(1, stream=s)
    b.copy_from(a, stream=s)
    b.record_stream(t.handle_)
    slowly_fill(gpu, t, b, 1)
    b.release()
    a.copy_to(bytearray(50_000))
    a.fill(2)
    c = one.alloc(1000, stream=t)
    c.record_stream(s)
    del c
    if allocator == "bump":
        one.reset(stream=s)
    else:
        one.trim()
    return one, a


def calls_of(allocator, source):
    with a_gpu() as gpu:
        before = gpu.calls.copy()
        scenario(gpu, allocator, source)
        gpu.drain()
        gc.collect()
        return gpu.calls - before


@pytest.mark.parametrize(
    ("allocator", "source"),
    [*(("pool", source) for source in SOURCES), ("bump", "device"), ("slab", "pinned")],
)
def test_each_call_can_fail(allocator, source):
    failures = 0
    for name, count in calls_of(allocator, source).items():
        if name in ("cuInit", "cuDeviceGetCount", "cuCtxPopCurrent", "cuStreamCreate", *LOSES):
            continue
        for n in sorted({1, count}):
            result = (OUT_OF_MEMORY, INVALID_VALUE)[n % 2]
            failures += attempt(allocator, source, name, n, result)
    assert failures > 10


def attempt(allocator, source, name, n, result):
    """Was the failure seen?"""
    seen = False
    with a_gpu() as gpu:
        kept = None
        gpu.fail_at(name, n, result)
        try:
            kept = scenario(gpu, allocator, source)
        except (OutOfMemory, cuda.CudaError) as error:
            seen = True
            assert re.search("cu[A-Z]|do not fit|cannot wait", str(error)), error
        gpu.plan.clear()
        gpu.errors.clear()  # such as of an event that could not be recorded
        gpu.drain()
        if kept:
            one, a = kept
            one.check()
            if not a.closed:
                a.fill(3)
                assert set(content(a)) == {3}
            del one, a
        kept = None
    return seen


@pytest.mark.parametrize("name", sorted(LOSES))
def test_a_failure_at_the_end_is_told_nobody(name):
    source = {"cuMemFree": "device", "cuMemHostUnregister": "pinned"}.get(name, "driver pool")
    with a_gpu() as gpu:
        pool = Pool(source=SOURCES[source]())
        pool.alloc(MIB).release()
        gpu.fails[name] = INVALID_VALUE
        del pool
        gc.collect()
        assert gpu.calls[name]
        gpu.fails.clear()
        gpu.memory.registered.clear()
        gpu.memory.used.clear()
