"""The cost of a block of CUDA memory in Python, beside its peers: made and dropped at once.

The cost of the loop is in every figure. All that is compared takes turns in one run; time is the
wall's, since a driver may wait.

What this does not show: blocks that stay (replay), growth, and what kernels do meanwhile.
"""

import importlib
import time

import arenapy
from arenapy import cuda
from asv_benches.support.rounds import Line, Way, enough, turns
from asv_benches.support.sizes import KIB, MIB, text

SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 100 * MIB)
PINNED_SIZES = (4 * KIB, MIB, 100 * MIB)
ROOM = 1 << 30  # bytes of each allocator, which no way needs more of
ITEM = 4 * KIB

OURS = {
    "arenapy.Pool": Way("alloc(n)", "alloc = pool.alloc"),
    "arenapy.Pool, stream object": Way("alloc(n, stream=s)", "alloc = pool.alloc; s = stream"),
}
#: Of one size only: what their time does not depend on.
SMALL = {
    "arenapy.Pool, stream of cuda.core": Way(
        "alloc(n, stream=s)", "alloc = pool.alloc; s = core_stream"
    ),
    "arenapy.Pool, stream of CuPy": Way(
        "alloc(n, stream=s)", "alloc = pool.alloc; s = cupy_stream"
    ),
    "arenapy.Pool, stream of torch": Way(
        "alloc(n, stream=s)", "alloc = pool.alloc; s = torch_stream"
    ),
    "arenapy.Slab": Way("alloc()", "alloc = slab.alloc"),
    "arenapy.Bump": Way("alloc(n)", "bump.reset(); alloc = bump.alloc"),
    "cuda.core over arenapy.Pool": Way(
        "allocate(n, stream=s).close()", "allocate = ours_in_core.allocate; s = core_stream"
    ),
}
PEERS = {
    "CuPy MemoryPool.malloc": Way("malloc(n)", "malloc = cupy_pool.malloc"),
    "cupy.empty": Way("empty(n, 'u1')", "empty = cupy.empty"),
    "torch.empty": Way(
        "empty(n, dtype=u1, device='cuda')", "empty = torch.empty; u1 = torch.uint8"
    ),
    "torch caching_allocator_alloc": Way(
        "delete(alloc(n, 0, 0))",
        "alloc = torch.cuda.caching_allocator_alloc; delete = torch.cuda.caching_allocator_delete",
    ),
    "RMM PoolMemoryResource": Way(
        "free(alloc(n, s), n, s)",
        "alloc = rmm_pool.allocate; free = rmm_pool.deallocate; s = rmm_stream",
    ),
    "RMM ArenaMemoryResource": Way(
        "free(alloc(n, s), n, s)",
        "alloc = rmm_arena.allocate; free = rmm_arena.deallocate; s = rmm_stream",
    ),
    "RMM CudaAsyncMemoryResource": Way(
        "free(alloc(n, s), n, s)",
        "alloc = rmm_async.allocate; free = rmm_async.deallocate; s = rmm_stream",
    ),
    "cuda.core DeviceMemoryResource": Way(
        "allocate(n, stream=s).close()", "allocate = core_resource.allocate; s = core_stream"
    ),
    "cuMemAllocAsync, cuMemFreeAsync": Way(
        "free(alloc(n, 0)[1], 0)",
        "alloc = driver.cuMemAllocAsync; free = driver.cuMemFreeAsync",
    ),
    "cuMemAlloc, cuMemFree": Way(
        "free(alloc(n)[1])", "alloc = driver.cuMemAlloc; free = driver.cuMemFree"
    ),
}
PINNED = {
    "arenapy.Pool over Pinned": Way("alloc(n)", "alloc = pinned.alloc"),
    "CuPy PinnedMemoryPool": Way("malloc(n)", "malloc = cupy_pinned.malloc"),
    "torch.empty(pin_memory=True)": Way(
        "empty(n, dtype=u1, pin_memory=True)", "empty = torch.empty; u1 = torch.uint8"
    ),
    "cuMemAllocHost, cuMemFreeHost": Way(
        "free(alloc(n)[1])", "alloc = driver.cuMemAllocHost; free = driver.cuMemFreeHost"
    ),
}
#: Made on one stream, used by the other one, dropped; then the other way round.
PING_PONG = {
    "arenapy.Pool": Way(
        "x = alloc(n, stream=a); x.record_stream(b); del x; "
        "x = alloc(n, stream=b); x.record_stream(a); del x",
        "alloc = pool.alloc; a = stream; b = stream_b",
        2,
    ),
    "torch": Way(
        "turn(a); x = empty(n, dtype=u1, device='cuda'); x.record_stream(b); del x; "
        "turn(b); x = empty(n, dtype=u1, device='cuda'); x.record_stream(a); del x",
        "turn = torch.cuda.set_stream; empty = torch.empty; u1 = torch.uint8; "
        "a = torch_stream; b = torch_stream_b",
        2,
    ),
}


def imported(name):
    """A module; None: it is not there, or does not work here."""
    try:
        return importlib.import_module(name)
    except Exception:
        return None


def namespace():
    """The names that the statements use; what is not installed is None."""
    cupy, torch, rmm, core, driver = map(
        imported, ("cupy", "torch", "rmm", "cuda.core", "cuda.bindings.driver")
    )
    pool = arenapy.Pool(ROOM, cuda.Device(), ROOM // 2)
    names = {
        "pool": pool,
        "slab": arenapy.Slab(ITEM, 1024, cuda.Device()),
        "bump": arenapy.Bump(ROOM, cuda.Device()),
        "pinned": arenapy.Pool(ROOM, cuda.Pinned(), ROOM // 2),
        "stream": cuda.Stream(),
        "stream_b": cuda.Stream(),
        "cupy": cupy,
        "torch": torch,
        "driver": driver,
    }
    libraries = {"cupy": cupy, "torch": torch, "rmm": rmm, "core": core}
    for make in (of_cupy, of_torch, of_rmm, of_core):
        names |= make(pool, libraries)
    return names


def of_cupy(pool, libraries):
    """CuPy's pools, which are its defaults, and a stream."""
    cupy = libraries["cupy"]
    if cupy is None:
        return dict.fromkeys(("cupy_pool", "cupy_pinned", "cupy_stream"))
    return {
        "cupy_pool": cupy.get_default_memory_pool(),
        "cupy_pinned": cupy.get_default_pinned_memory_pool(),
        "cupy_stream": cupy.cuda.Stream(non_blocking=True),
    }


def of_torch(pool, libraries):
    """Streams of torch."""
    torch = libraries["torch"]
    if torch is None:
        return dict.fromkeys(("torch_stream", "torch_stream_b"))
    return {"torch_stream": torch.cuda.Stream(), "torch_stream_b": torch.cuda.Stream()}


def of_rmm(pool, libraries):
    """RMM's resources."""
    rmm = libraries["rmm"]
    if rmm is None:
        return dict.fromkeys(("rmm_pool", "rmm_arena", "rmm_async", "rmm_stream"))
    of_driver = rmm.mr.CudaMemoryResource()
    return {
        "rmm_pool": rmm.mr.PoolMemoryResource(of_driver, initial_pool_size=ROOM),
        "rmm_arena": rmm.mr.ArenaMemoryResource(of_driver, arena_size=ROOM),
        "rmm_async": rmm.mr.CudaAsyncMemoryResource(initial_pool_size=ROOM),
        "rmm_stream": rmm.pylibrmm.stream.DEFAULT_STREAM,
    }


def of_core(pool, libraries):
    """cuda.core's resource and ours for it."""
    core = libraries["core"]
    if core is None:
        return dict.fromkeys(("core_resource", "core_stream", "ours_in_core"))
    device = core.Device(0)
    device.set_current()
    return {
        "core_resource": device.memory_resource,
        "core_stream": device.create_stream(),
        "ours_in_core": cuda.memory_resource(pool),
    }


def measured(wanted, names, rounds):
    """Median seconds an operation of ways, by name and size, whose names are all there."""
    loops, runs, operations = {}, {}, {}
    for (name, nbytes), way in wanted.items():
        if any(value is None and key in way.before for key, value in names.items()):
            continue
        loop = way.loop(names | {"n": nbytes}, time.perf_counter)
        loop.timeit(10)
        loops[name, nbytes], operations[name, nbytes] = loop, way.operations
        runs[name, nbytes] = min(enough(loop, 0.004), 20_000)
    found = turns(loops, runs, rounds)
    return {key: seconds / operations[key] for key, seconds in found.items()}


LIMITS = {  # microseconds
    "arenapy.Pool": 0.06,
    "arenapy.Pool, stream object": 0.10,
    "arenapy.Bump": 0.045,
    "arenapy.Pool over Pinned": 0.06,
}


def lines(quick):
    """Every figure, beside the budgets."""
    names = namespace()
    rounds = 5 if quick else 41
    wanted = {(name, n): way for n in SIZES for name, way in (OURS | PEERS).items()}
    wanted |= {(name, SIZES[0]): way for name, way in SMALL.items()}
    found = measured(wanted, names, rounds)
    for (name, n), seconds in sorted(found.items(), key=lambda item: item[0][1]):
        yield Line("latency", f"{name}, {text(n)}", seconds * 1e6, "us", LIMITS.get(name))
    wanted = {(name, n): way for n in PINNED_SIZES for name, way in PINNED.items()}
    for (name, n), seconds in measured(wanted, names, rounds).items():
        yield Line("pinned", f"{name}, {text(n)}", seconds * 1e6, "us", LIMITS.get(name))
    found = measured({(name, MIB): way for name, way in PING_PONG.items()}, names, rounds)
    for (name, n), seconds in found.items():
        yield Line("ping-pong", f"{name}, used on another stream, {text(n)}", seconds * 1e6, "us")
    if ("torch", MIB) in found:
        ratio = found["arenapy.Pool", MIB] / found["torch", MIB]
        yield Line("ping-pong", "arenapy.Pool / torch, used on another stream", ratio, "x", 0.5)
