"""Clusters of Dask whose workers have a Pool, in worker processes of their own."""

import asyncio
import functools
import os
import pickle
import signal
import sys
import threading
import types

import numpy as np
import pytest
from browser import browser, keep, needs_browser
from dask_cluster import clusters, until
from simulated_driver import simulated

import arenapy
from arenapy import cuda
from arenapy.interop import cupy as arenapy_cupy
from arenapy.interop import dask as arenapy_dask
from arenapy.interop import device_pools
from arenapy.interop import rmm as arenapy_rmm
from arenapy.interop.dask import ArenaPlugin

MIB = 1 << 20
KEPT = "arenapy"  # the plugin's name among a worker's plugins


@pytest.fixture
def distributed():
    return pytest.importorskip("distributed")


@pytest.fixture
def cluster():
    with clusters() as make:
        yield make


# ---- what tasks do, in the workers ------------------------------------------------------------


def pool():
    from distributed import get_worker

    return get_worker().plugins[KEPT].pool


def in_pool(*arrays):
    return [
        where is not None and where.allocator is pool()
        for where in map(arenapy.handles, (*arrays, np.ones(1000)))
    ]


class Actor:
    def array_in_pool(self):
        return arenapy.handles(np.ones(1000)) is not None


async def a_coroutine():
    await asyncio.sleep(0)
    return in_pool()


def block(number, nbytes):
    # Whole numbers, whose sum is exact: NumPy adds what came through the network in another order,
    # because it does not lie at a multiple of 8 in its frame.
    return np.random.default_rng(number).integers(0, 1000, nbytes // 8).astype("f8")


def step(array, other):
    return array * array + other * 3 - array


def total(*arrays):
    return sum(float(array.sum()) for array in arrays)


def map_reduce(client, count, nbytes):
    """Futures: blocks, a step on each and its neighbour, the sum of all."""
    blocks = client.map(block, range(count), nbytes=nbytes, pure=False)
    steps = client.map(step, blocks, blocks[1:] + blocks[:1], pure=False)
    sums = [client.submit(total, *steps[at : at + 4], pure=False) for at in range(0, count, 4)]
    return blocks, steps, sums


# ---- what is in the pool ----------------------------------------------------------------------


def test_arrays_of_tasks_and_of_the_network_are_in_the_pool(cluster):
    client = cluster(2)
    before = client.submit(np.ones, 1 << 17).result()  # some threads are there already
    answers = client.register_plugin(ArenaPlugin(max_bytes=64 * MIB))
    assert [answer["status"] for answer in answers.values()] == ["OK", "OK"]
    first, second = answers

    made = client.submit(np.ones, 1 << 17, workers=[first], pure=False)
    assert client.submit(in_pool, made, workers=[first]).result() == [True, True]

    def metrics():
        # A busy scheduler's information may be without a worker for a moment.
        until(lambda: first in client.scheduler_info()["workers"])
        return client.scheduler_info()["workers"].get(first, {"metrics": {}})["metrics"]

    until(lambda: metrics().get("pool_allocated_bytes", 0) >= MIB)
    fetched = client.submit(in_pool, made, workers=[second])  # by gather_dep
    assert fetched.result() == [True, True]
    sent = client.scatter(before, workers=[second])
    assert client.submit(in_pool, sent, workers=[second]).result() == [True, True]
    assert client.submit(a_coroutine).result() == [True]
    assert client.submit(Actor, actor=True).result().array_in_pool().result()

    assert {name for name in metrics() if name.startswith("pool_")} == {
        "pool_allocated_bytes", "pool_idle_bytes", "pool_reserved_bytes", "pool_peak_bytes",
        "pool_trimmed_bytes", "pool_system_bytes",
    }  # fmt: skip
    large = client.submit(np.ones, 16 << 20, workers=[first])  # more than the pool may have
    until(lambda: metrics().get("pool_system_bytes") == 128 * MIB)
    del large

    # A second registration takes the place of the first; an array of the first one lives on.
    client.register_plugin(ArenaPlugin())
    assert client.submit(in_pool, made, workers=[first], pure=False).result() == [False, True]
    client.unregister_worker_plugin(KEPT)
    assert client.run(untouched) == {first: True, second: True}
    assert np.array_equal(made.result(), before)
    until(lambda: (now := metrics()) and "pool_idle_bytes" not in now)


def untouched(dask_worker):
    from distributed import worker
    from distributed.comm import tcp
    from distributed.protocol import utils

    # vars() of the instances: what stands in for methods of their classes.
    replaced = vars(dask_worker).keys() | vars(dask_worker.monitor).keys()
    frames = tcp.host_array is utils.host_array and not hasattr(tcp.host_array, "__wrapped__")
    memory = arenapy.handles(np.ones(1000)) is None
    return (
        frames and memory and isinstance(dask_worker, worker.Worker)
        and not replaced & {"execute", "get_process_memory"} and ArenaPlugin._of_process is None
    )  # fmt: skip


# ---- more than there is memory, and workers that die ------------------------------------------


@pytest.mark.full
def test_more_than_a_worker_may_have_and_a_worker_killed(cluster):
    count, nbytes = 12, 8 * MIB
    # An empty worker has 100 of them. On a busy machine a nanny may see it above its limit for a
    # moment, and end it, too.
    client = cluster(2, {"distributed.worker.memory.terminate": False}, memory_limit=200 * MIB)
    answers = client.register_plugin(ArenaPlugin())
    blocks, steps, sums = map_reduce(client, count, nbytes)
    until(lambda: sum(one.done() for one in steps) >= 4)
    doomed = client.run(os.getpid)
    address = next(iter(doomed))
    os.kill(doomed[address], signal.SIGKILL)
    got = client.gather(sums)
    here = [block(number, nbytes) for number in range(count)]
    there = [step(here[at], here[(at + 1) % count]) for at in range(count)]
    assert got == [total(*there[at : at + 4]) for at in range(0, count, 4)]

    client.wait_for_workers(2)
    now = client.run(lambda dask_worker: dask_worker.plugins[KEPT].pool.stats().total_allocations)
    assert answers.keys() - now.keys() == {address} and len(now) == 2
    assert min(now.values()) > 0, "the new one has a pool, too"
    spilled = client.run(lambda dask_worker: dask_worker.data.spilled_total[1])
    assert sum(spilled.values()) > 0, "it did not need to spill"
    del blocks


LIMIT = 512 * MIB
TERMINATE = "distributed.worker.memory.terminate"
FRACTIONS = {
    "distributed.worker.memory.target": 0.7,
    "distributed.worker.memory.spill": 0.75,
    "distributed.worker.memory.pause": 0.8,
    TERMINATE: False,
    "distributed.worker.memory.monitor-interval": "1h",  # the test says when it looks
}


async def look(dask_worker):
    """Let the worker look at its memory: what it does, and what it has."""
    await dask_worker.memory_manager.memory_monitor(dask_worker)
    plugin = dask_worker.plugins[KEPT]
    return types.SimpleNamespace(
        status=dask_worker.status.name,
        share=dask_worker.monitor.proc.memory_info().rss / LIMIT,
        in_memory=len(getattr(dask_worker.data, "fast", dask_worker.data)),
        on_disk=len(getattr(dask_worker.data, "slow", ())),  # it is a dict if nothing is spilled
        idle=plugin.pool.stats().idle_bytes / LIMIT,
        trimmed=plugin.trimmed_bytes / LIMIT,
    )


def hold_for_a_moment(nbytes):
    np.ones(nbytes // 8)


@pytest.mark.full
def test_idle_memory_is_given_back_before_a_worker_spills_or_pauses(cluster):
    client = cluster(1, FRACTIONS, memory_limit=LIMIT)
    client.register_plugin(ArenaPlugin())

    def seen():
        (one,) = client.run(look).values()
        return one

    kept = [client.submit(block, 0, 40 * MIB)]
    client.submit(hold_for_a_moment, 400 * MIB).result()  # above all limits, if it stayed
    one = seen()
    assert (one.status, one.on_disk) == ("running", 0)
    assert one.trimmed > 0.2 and one.idle > 0.1, "it gives back no more than it has to"
    assert one.share < 0.7

    # What lives is too much: it pauses, spills as much as it has to, and goes on.
    more = int((0.85 - one.share + one.idle) * LIMIT / (16 * MIB))
    kept += client.map(block, range(1, 1 + more), nbytes=16 * MIB)
    client.gather([client.submit(len, array) for array in kept])
    first, second = seen(), seen()
    assert first.status == "paused" and second.status == "running"
    assert 0 < second.on_disk <= 8 < second.in_memory
    assert second.share < 0.7
    sums = [client.submit(total, array).result() for array in kept]
    assert sums[1:] == [total(block(n, 16 * MIB)) for n in range(1, 1 + more)]


@pytest.mark.full
def test_idle_memory_is_given_back_before_a_nanny_ends_its_worker(cluster):
    off = {name: False for name, one in FRACTIONS.items() if isinstance(one, float)}
    client = cluster(1, FRACTIONS | off | {TERMINATE: 0.95}, memory_limit=LIMIT)
    client.register_plugin(ArenaPlugin())
    client.submit(hold_for_a_moment, 400 * MIB).result()
    (one,) = client.run(look).values()
    assert one.trimmed > 0 and one.idle > 0.1
    assert one.share < 0.85


# ---- the dashboard ----------------------------------------------------------------------------

# Bokeh's widgets have shadow trees, which no selector reaches.
TEXTS = """
const texts = [], walk = node => {
    for (const one of node.querySelectorAll("*")) {
        if (one.shadowRoot) walk(one.shadowRoot);
        if (one.matches(".slick-column-name, .slick-cell")) texts.push(one.textContent.trim());
    }
};
walk(document);
return texts;
"""


@pytest.mark.full
@needs_browser
def test_the_dashboard_shows_the_pools_figures(cluster):
    pytest.importorskip("selenium")
    pytest.importorskip("bokeh")
    client = cluster(2)
    answers = client.register_plugin(ArenaPlugin())
    arrays = [client.submit(np.ones, 1 << 20, workers=[one], pure=False) for one in answers]
    client.gather([client.submit(len, one) for one in arrays])

    def allocated():
        workers = client.scheduler_info()["workers"].values()
        return [one["metrics"].get("pool_allocated_bytes", 0) for one in workers]

    until(lambda: min(allocated()) >= 8 * MIB)
    port = client.scheduler_info()["services"]["dashboard"]
    with browser(1800, 1000) as driver:
        driver.get(f"http://127.0.0.1:{port}/workers")
        until(lambda: "pool_allocated_bytes" in driver.execute_script(TEXTS))
        until(lambda: {str(one) for one in allocated()} <= {*driver.execute_script(TEXTS)})
        texts = driver.execute_script(TEXTS)
        assert {"pool_idle_bytes", "pool_reserved_bytes"} <= {*texts}
        assert str(sum(allocated())) in texts  # the line of totals
        keep(driver, "dask-workers")


# ---- bad input --------------------------------------------------------------------------------


def test_no_distributed(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ImportError, match=r"pip install 'arenapy-memory\[dask\]'"):
        ArenaPlugin()


def test_a_distributed_that_is_too_old(monkeypatch):
    old = types.ModuleType("distributed")
    old.__version__, old.comm = "2.30.1", types.ModuleType("distributed.comm")
    old.comm.tcp = types.ModuleType("distributed.comm.tcp")
    for module in (old, old.comm, old.comm.tcp):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(ImportError, match=r"distributed 2\.30\.1 is older than .* --upgrade"):
        ArenaPlugin()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"max_bytes": -1}, ValueError, "max_bytes=-1"),
        ({"max_bytes": "1 GiB"}, TypeError, "max_bytes='1 GiB'"),
        ({"source": "host"}, TypeError, "source='host'"),
        ({"trim_after": -1}, ValueError, "trim_after=-1"),
        ({"source": cuda.Device()}, BufferError, "device"),
        ({"device": 0}, TypeError, "device=0 is neither a source nor a bool"),
    ],
)
def test_options_are_checked_before_a_worker_sees_them(distributed, options, error, text):
    with simulated() as driver, driver.on(0), pytest.raises(error, match=text):
        ArenaPlugin(**options)


def test_two_workers_in_one_process(cluster):
    client = cluster(2, processes=False)
    with pytest.raises(RuntimeError, match="give each worker a process"):
        client.register_plugin(ArenaPlugin())
    assert client.submit(lambda: 1 + 1).result() == 2
    client.unregister_worker_plugin(KEPT)
    assert all(client.run(untouched).values())


def a_worker():
    manager = types.SimpleNamespace(
        memory_limit=None, memory_target_fraction=0.6, memory_spill_fraction=0.7,
        memory_pause_fraction=0.8,
    )  # fmt: skip
    monitor = types.SimpleNamespace(get_process_memory=lambda: 0)
    return types.SimpleNamespace(
        execute=lambda: 1, monitor=monitor, memory_manager=manager, metrics={}
    )


def of_process():
    """What of this process a plugin changes."""
    from distributed.comm import tcp
    from distributed.protocol import utils

    return tcp.host_array, utils.host_array, threading.Thread.start, ArenaPlugin._of_process


def test_what_others_changed_meanwhile_stays_theirs(distributed, monkeypatch):
    from distributed.comm import tcp

    worker, plugin, before = a_worker(), ArenaPlugin(), of_process()
    execute, memory = worker.execute, worker.monitor.get_process_memory
    plugin.setup(worker)
    theirs = types.SimpleNamespace(execute=lambda: 2, host_array=lambda nbytes: None)
    worker.metrics.pop("pool_idle_bytes")
    worker.execute = theirs.execute
    monkeypatch.setattr(tcp, "host_array", theirs.host_array)
    plugin.teardown(worker)
    assert (worker.execute, tcp.host_array) == (theirs.execute, theirs.host_array)
    assert (worker.monitor.get_process_memory, worker.metrics) == (memory, {})
    assert of_process()[1:] == before[1:]
    monkeypatch.setattr(tcp, "host_array", before[0])

    worker.execute = execute  # what was an attribute of its own is one again
    plugin.setup(worker)
    assert worker.execute is not execute
    plugin.teardown(worker)
    assert (worker.execute, of_process()) == (execute, before)


def test_a_second_plugin_returns_what_the_first_keeps(distributed):
    worker, plugins = a_worker(), [ArenaPlugin(), ArenaPlugin()]
    worker.memory_manager.memory_limit = 1 << 20
    kept = []
    for plugin in plugins:
        plugin.setup(worker)
        kept.append(plugin.pool.alloc(16 << 20))
        worker.monitor.get_process_memory()
        if plugin is plugins[0]:
            plugin.teardown(worker)
            assert plugin.pool.stats().idle_bytes == 0
    kept.clear()
    assert plugins[0].pool.stats().idle_bytes >= 16 << 20
    plugins[1]._rss = lambda: 1 << 30
    worker.monitor.get_process_memory()
    assert [plugin.pool.stats().idle_bytes for plugin in plugins] == [0, 0]
    assert plugins[1].trimmed_bytes >= 32 << 20
    plugins[1].teardown(worker)


def test_a_worker_that_lacks_something_has_no_plugin(distributed):
    worker, before = a_worker(), of_process()
    execute, worker.metrics = worker.execute, ()
    with pytest.raises((TypeError, AttributeError)):
        ArenaPlugin().setup(worker)
    assert (worker.execute, of_process()) == (execute, before)


@pytest.fixture
def cupy(monkeypatch):
    """A stand-in for CuPy, whose allocator arenapy replaces."""
    module = types.ModuleType("cupy")
    module.__version__ = "14.2.0"
    module.cuda = types.SimpleNamespace(get_allocator=lambda: module.served)
    module.cuda.set_allocator = functools.partial(setattr, module, "served")
    module.served = module._default_memory_pool = "CuPy's"
    module.get_default_memory_pool = lambda: types.SimpleNamespace(malloc="CuPy's")
    monkeypatch.setitem(sys.modules, "rmm", None)
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(arenapy_cupy, "allocator", lambda pool: pool)
    monkeypatch.setattr(device_pools, "library", lambda name, oldest: sys.modules[name])
    return module


@pytest.fixture
def rmm(monkeypatch, cupy):
    """A stand-in for RMM, whose resource arenapy replaces."""
    module = types.ModuleType("rmm")
    module.__spec__, module.__version__ = object(), "26.10.0"
    served = {0: "RMM's"}
    module.mr = types.SimpleNamespace(
        CudaMemoryResource=str,
        get_per_device_resource=served.get,
        set_per_device_resource=served.__setitem__,
    )
    monkeypatch.setitem(sys.modules, "rmm", module)
    monkeypatch.setattr(arenapy_rmm, "resource", lambda pool: pool)
    return served


def test_rmm_takes_from_the_pool_of_the_device(distributed, rmm):
    with simulated() as driver, driver.on(0):
        worker, plugin = a_worker(), ArenaPlugin(device=cuda.Device())
        plugin.setup(worker)
        assert rmm == {0: plugin.device_pool}
        plugin.teardown(worker)
        assert rmm == {0: "RMM's"}


def test_what_others_allocate_from_since_stays(distributed, cupy, rmm):
    with simulated() as driver, driver.on(0):
        worker, plugin = a_worker(), ArenaPlugin(device=cuda.Device())
        plugin.setup(worker)
        cupy.served, rmm[0] = "another", "another"
        plugin.teardown(worker)
        assert (cupy.served, cupy._default_memory_pool, rmm[0]) == ("another", "CuPy's", "another")


def test_a_resource_that_rmm_refuses(distributed, rmm, monkeypatch):
    def refuse(ordinal, resource):
        raise RuntimeError("no")

    with simulated() as driver, driver.on(0):
        worker, before = a_worker(), of_process()
        execute = worker.execute
        monkeypatch.setattr(sys.modules["rmm"].mr, "set_per_device_resource", refuse)
        with pytest.raises(RuntimeError, match="no"):
            ArenaPlugin(device=cuda.Device()).setup(worker)
        assert (worker.execute, worker.metrics, of_process()) == (execute, {}, before)
        assert sys.modules["cupy"].served == "CuPy's"


def test_a_pool_of_the_device(distributed, cupy):
    with simulated() as driver, driver.on(0):
        plugin = pickle.loads(pickle.dumps(ArenaPlugin(device=cuda.Device())))
        worker, before = a_worker(), of_process()
        plugin.setup(worker)
        pool = plugin.device_pool
        assert pool.kind == "device"
        assert cupy.served is cupy._default_memory_pool is pool
        block = pool.alloc(1 << 20)
        assert worker.metrics["pool_device_allocated_bytes"](worker) == block.nbytes
        plugin.teardown(worker)
        assert (cupy.served, cupy._default_memory_pool) == ("CuPy's", "CuPy's")
        assert (plugin.device_pool, worker.metrics, of_process()) == (None, {}, before)


def a_task(worker):
    """Let the worker run one, in which nothing happens."""
    assert worker.execute() == 1


@pytest.fixture
def one_device(monkeypatch):
    monkeypatch.setattr(arenapy_dask, "device_count", lambda: 1)


@pytest.mark.parametrize("already", [True, False])
def test_a_worker_with_one_device_has_a_pool_of_it_once_it_has_cupy(
    distributed, rmm, one_device, monkeypatch, already
):
    module = sys.modules["cupy"]
    with simulated():
        worker, plugin = a_worker(), pickle.loads(pickle.dumps(ArenaPlugin()))
        execute, before = worker.execute, of_process()
        monkeypatch.setitem(sys.modules, "cupy", module if already else None)
        plugin.setup(worker)
        assert plugin.device_pool is None
        a_task(worker)
        assert (plugin.device_pool is not None) == already
        monkeypatch.setitem(sys.modules, "cupy", module)
        module.__spec__ = types.SimpleNamespace(
            _initializing=not already
        )  # another thread is at it
        a_task(worker)
        assert (plugin.device_pool is not None) == already
        module.__spec__._initializing = False
        a_task(worker)
        pool = plugin.device_pool
        assert module.served is module._default_memory_pool is rmm[0] is pool
        assert worker.metrics["pool_device_reserved_bytes"](worker) == 0
        a_task(worker)
        assert plugin.device_pool is pool
        plugin.teardown(worker)
        assert (module.served, module._default_memory_pool, rmm) == (
            "CuPy's",
            "CuPy's",
            {0: "RMM's"},
        )
        assert (worker.execute, worker.metrics, of_process()) == (execute, {}, before)


@pytest.mark.parametrize("case", ["two devices", "no driver", "an allocator", "False"])
def test_a_worker_without_a_pool_of_a_device(distributed, cupy, monkeypatch, case):
    if case == "an allocator":
        cupy.served = "the program's"

    def device_count():
        if case == "no driver":
            raise cuda.Unavailable("no driver")
        return 2 if case == "two devices" else 1

    monkeypatch.setattr(arenapy_dask, "device_count", device_count)
    with simulated():
        worker, plugin = a_worker(), ArenaPlugin(device=case != "False")
        plugin.setup(worker)
        a_task(worker)
        assert (plugin.device_pool, cupy._default_memory_pool) == (None, "CuPy's")
        assert not [name for name in worker.metrics if "device" in name]
        plugin.teardown(worker)


def test_a_heartbeat_under_way_sees_the_metrics_that_it_began_with(distributed, cupy, one_device):
    """distributed awaits between two of them, and closes the worker if they change."""
    with simulated():
        worker, plugin = a_worker(), ArenaPlugin()
        worker.metrics = {"one": 1, "two": 2}
        for change in (plugin.setup, a_task, plugin.teardown):
            before = list(worker.metrics)
            under_way = iter(worker.metrics)
            first = next(under_way)
            change(worker)
            assert [first, *under_way] == before
        assert worker.metrics == {"one": 1, "two": 2}


class Lazy(types.ModuleType):
    """A module that imports itself when it is asked for something."""

    def __getattribute__(self, name):
        raise ImportError(f"asked for {name}")


def test_a_module_that_imports_itself_is_left_alone(distributed, one_device, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", Lazy("cupy"))
    worker, plugin = a_worker(), ArenaPlugin()
    plugin.setup(worker)
    a_task(worker)
    assert plugin.device_pool is None
    plugin.teardown(worker)


def test_a_plugin_that_was_taken_back_serves_no_device(distributed, cupy, one_device, monkeypatch):
    with simulated():
        worker, plugin = a_worker(), ArenaPlugin()
        monkeypatch.setitem(sys.modules, "cupy", None)
        plugin.setup(worker)
        ours = worker.execute
        worker.execute = lambda: ours()  # somebody else's, which stays
        plugin.teardown(worker)
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        a_task(worker)
        assert (plugin.device_pool, cupy.served, worker.metrics) == (None, "CuPy's", {})


def test_a_resource_of_the_program_stays(distributed, cupy, rmm, one_device):
    rmm[0] = resource = object()
    with simulated():
        worker, plugin = a_worker(), ArenaPlugin()
        plugin.setup(worker)
        a_task(worker)
        assert cupy.served is plugin.device_pool is not None
        assert rmm == {0: resource}
        plugin.teardown(worker)


def test_a_task_runs_without_the_pool_that_rmm_refuses(
    distributed, cupy, rmm, one_device, monkeypatch, caplog
):
    def refuse(ordinal, resource):
        raise RuntimeError("no")

    with simulated():
        worker, plugin = a_worker(), ArenaPlugin()
        plugin.setup(worker)
        monkeypatch.setattr(sys.modules["rmm"].mr, "set_per_device_resource", refuse)
        a_task(worker)
        assert "The worker goes on without a Pool of device memory" in caplog.text
        assert (plugin.device_pool, cupy.served) == (None, "CuPy's")
        plugin.teardown(worker)


def test_a_device_without_cupy(distributed, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with simulated() as driver, driver.on(0):
        worker, before = a_worker(), of_process()
        execute = worker.execute
        with pytest.raises(ImportError, match=r"arenapy\.interop\.cupy needs cupy"):
            ArenaPlugin(device=cuda.Device()).setup(worker)
        assert (worker.execute, worker.metrics, of_process()) == (execute, {}, before)


@pytest.mark.parametrize(
    ("limit", "target", "spill", "pause", "terminate", "lowest"),
    [
        (1000, 0.6, 0.7, 0.8, 0.95, 600),
        (1000, False, 0.7, 0.8, 0.95, 700),
        (1000, False, False, 0.8, 0.9, 765),
        (1000, False, False, 0.8, False, 800),
        (1000, False, False, False, 0.9, 765),
        (1000, False, False, False, False, None),
        (1000, False, False, False, None, None),
        (None, 0.6, 0.7, 0.8, 0.95, None),
    ],
)
def test_the_lowest_limit(distributed, limit, target, spill, pause, terminate, lowest):
    import dask

    manager = types.SimpleNamespace(
        memory_limit=limit, memory_target_fraction=target, memory_spill_fraction=spill,
        memory_pause_fraction=pause,
    )  # fmt: skip
    with dask.config.set({TERMINATE: terminate}):
        assert arenapy_dask._lowest_limit(manager) == lowest


def test_a_heartbeat_looks_at_the_pool_once(distributed, monkeypatch):
    worker, plugin = a_worker(), ArenaPlugin()
    plugin.setup(worker)
    try:
        looks = []
        stats = plugin.pool.stats
        monkeypatch.setattr(
            plugin,
            "pool",
            types.SimpleNamespace(stats=lambda: looks.append(1) or stats(), trim=lambda: 0),
        )
        for _ in range(2):
            del looks[:]
            figures = {name: figure(worker) for name, figure in worker.metrics.items()}
            assert looks == [1]
            assert figures["pool_reserved_bytes"] >= figures["pool_allocated_bytes"] >= 0
    finally:
        plugin.teardown(worker)
