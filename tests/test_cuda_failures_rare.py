"""Driver calls of captures and of two devices fail one at a time: nothing leaks, all goes on."""

import gc

import pytest
from cuda_support import MIB, a_gpu, content, new_stream
from simulated_driver import INVALID_VALUE, OUT_OF_MEMORY

from arenapy import OutOfMemory, Pool, cuda

#: What a test's own use of the driver calls, or what was done before the allocators are there.
OTHERS = {"cuInit", "cuDeviceGetCount", "cuCtxPopCurrent", "cuStreamCreate", "cuMemFree"}
#: Whose failure is forgotten on purpose, at some places or at all: others go on without.
QUIET = {"cuThreadExchangeStreamCaptureMode", "cuStreamIsCapturing"}


def in_a_capture(gpu, pools):
    """A block is used by two nodes of a graph and dropped."""
    s = new_stream(gpu)
    block = pools[0].alloc(MIB)
    gpu.begin_capture(s.handle_)
    try:
        block.fill(3, stream=s)
        block.record_stream(s)
        block.release()
    finally:
        del block
        if graph := gpu.end_capture(s.handle_):  # none: a failure has made the capture invalid
            gpu.destroy_graph(graph)


def between_devices(gpu, pools):
    """A block of one device is copied to another one's, and back."""
    here, there = (pool.alloc(50_000) for pool in pools)
    here.fill(7)
    there.copy_from(here)
    here.fill(0)
    here.copy_from(there)
    assert set(content(here)) == {7}


SCENARIOS = [in_a_capture, between_devices]


def pools_of(gpu):
    gpu.peers = {(0, 1), (1, 0)}
    return [Pool(4 * MIB, cuda.Device(ordinal)) for ordinal in (0, 1)]


def calls_of(scenario):
    with a_gpu() as gpu:
        pools = pools_of(gpu)
        before = gpu.calls.copy()
        scenario(gpu, pools)
        gpu.drain()
        assert [pool.stats().pending_bytes for pool in pools] == [0, 0]
        del pools
        return gpu.calls - before


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_each_call_can_fail(scenario):
    calls = calls_of(scenario)
    seen = set()
    for name in calls.keys() - OTHERS:
        for n in {1, calls[name]}:
            if fails(scenario, name, n, (OUT_OF_MEMORY, INVALID_VALUE)[n % 2]):
                seen.add(name)
    assert calls.keys() - OTHERS - QUIET <= seen, "nobody was told of some"


def fails(scenario, name, n, result):
    """Was the failure seen? Afterwards the same works, in the same pools."""
    seen = False
    with a_gpu() as gpu:
        pools = pools_of(gpu)
        gpu.fail_at(name, n, result)
        try:
            scenario(gpu, pools)
        except (OutOfMemory, cuda.CudaError) as error:
            seen = True
            assert " fail" in str(error) or "do not fit" in str(error), error
        gpu.plan.clear()
        gpu.errors.clear()
        gpu.drain()
        gc.collect()
        for pool in pools:
            pool.check()
        scenario(gpu, pools)
        gpu.drain()
        for pool in pools:
            pool.check()
            assert pool.stats().active_allocations == 0
        del pools, pool
    return seen
