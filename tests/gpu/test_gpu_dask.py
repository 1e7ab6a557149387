"""A cluster of Dask whose two workers share a GPU, each with a Pool of its memory."""

import importlib.util
import os
import signal

import pytest
from dask_cluster import clusters, until

from arenapy import cuda
from arenapy.interop.dask import ArenaPlugin

MIB = 1 << 20
COUNT, ITEMS = 12, 1 << 19  # of float64: 4 MiB each


@pytest.fixture
def cluster():
    with clusters() as make:
        yield make


# ---- what tasks do, in the workers ------------------------------------------------------------


def block(number):
    import cupy

    return cupy.arange(ITEMS, dtype="f8") % 1000 + number


def step(array, other):
    return array * array + other * 3 - array


def total(*arrays):
    return sum(float(array.sum()) for array in arrays)  # of whole numbers: exact


def lie_in(pool, arrays):
    """Whether each array, and one made here, is in a live block of a Pool."""
    import cupy

    arrays = (*arrays, cupy.ones(1000))
    live = [one for one in pool.blocks() if one.state == "live"]
    return [
        any(one.address <= array.data.ptr < one.address + one.nbytes for one in live)
        for array in arrays
    ]


def in_pool(*arrays):
    from distributed import get_worker

    return lie_in(get_worker().plugins["arenapy"].device_pool, arrays)


def checked(dask_worker):
    pool = dask_worker.plugins["arenapy"].device_pool
    pool.check()
    return lie_in(pool, ())


def of_others(dask_worker):
    """What CuPy and RMM allocate from."""
    import cupy

    found = [
        type(cupy.cuda.get_allocator()).__name__,
        type(cupy.get_default_memory_pool()).__name__,
    ]
    try:
        import rmm
    except ImportError:
        return found
    return [*found, type(rmm.mr.get_current_device_resource()).__name__]


# -----------------------------------------------------------------------------------------------


def metrics(client, address):
    workers = client.scheduler_info()["workers"]
    return workers.get(address, {"metrics": {}})["metrics"]


def test_arrays_of_cupy_are_in_the_pools_of_two_workers(cupy, cluster):
    client = cluster(2, memory_limit="4 GiB")
    before = client.run(of_others)
    first, second = client.register_plugin(ArenaPlugin(device=cuda.Device(grow=True)))
    made = client.submit(block, 7, workers=[first])
    assert client.submit(in_pool, made, workers=[first]).result() == [True, True]
    until(lambda: metrics(client, first).get("pool_device_allocated_bytes", 0) >= 8 * ITEMS)
    assert client.submit(in_pool, workers=[second]).result() == [True]
    if importlib.util.find_spec("rmm") is not None:  # what arrives is RMM's
        assert client.submit(in_pool, made, workers=[second]).result() == [True, True]
    assert client.run(checked) == {first: [True], second: [True]}
    client.unregister_worker_plugin("arenapy")
    assert client.run(of_others) == before
    assert client.submit(total, made).result() == float(block(7).sum()), "it outlives its Pool"


def test_a_device_pool_without_a_word(cupy, cluster):
    if cuda.devices()[1:]:
        pytest.skip("it takes one device")
    client = cluster(1)
    client.register_plugin(ArenaPlugin())
    made = client.submit(block, 7)  # imports CuPy
    client.submit(len, made).result()
    assert client.submit(in_pool).result() == [True]
    assert client.submit(total, made).result() == float(block(7).sum())


def test_a_worker_that_is_killed_changes_no_sum(cupy, cluster):
    client = cluster(2, {"distributed.worker.memory.terminate": False}, memory_limit="4 GiB")
    client.register_plugin(ArenaPlugin(device=cuda.Device(grow=True)))
    blocks = client.map(block, range(COUNT), pure=False)
    steps = client.map(step, blocks, blocks[1:] + blocks[:1], pure=False)
    sums = [client.submit(total, *steps[at : at + 4], pure=False) for at in range(0, COUNT, 4)]
    until(lambda: sum(one.done() for one in steps) >= 4)
    os.kill(next(iter(client.run(os.getpid).values())), signal.SIGKILL)
    got = client.gather(sums)
    here = [block(number) for number in range(COUNT)]
    there = [step(here[at], here[(at + 1) % COUNT]) for at in range(COUNT)]
    assert got == [total(*there[at : at + 4]) for at in range(0, COUNT, 4)]
    client.wait_for_workers(2)
    assert [*client.run(checked).values()] == [[True], [True]], "the new one has a Pool, too"
