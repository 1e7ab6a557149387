"""Where the time of `numba.cuda.device_array` goes, with numba's memory manager and with ours.

    python asv_benches/gpu/numba_parts.py

Each line is a median of rounds, in microseconds of one call. `initialize` is the method that numba
calls for each array; `memalloc` allocates and drops. The last lines are calls that a memory manager
may make. The driver's calls are made through numba's own bindings.
"""

import statistics
import time
from functools import partial

import arenapy
from arenapy import cuda
from arenapy.interop import numba as arenapy_numba

SIZES = (1000, 4 << 20)
ROUNDS = 21
CALLS = 200


def microseconds(call):
    """Median time of a call."""
    found = []
    for i in range(ROUNDS + 1):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        if i:  # the first round warms up
            found.append(1e6 * (time.perf_counter() - start) / CALLS)
    return statistics.median(found)


def report():
    """A line for each part."""
    from numba import cuda as numba_cuda

    driver = numba_cuda.cudadrv.driver.driver
    context = numba_cuda.current_context()
    pool = arenapy.Pool(source=cuda.Device())
    managers = {
        "numba": context.memory_manager,
        "arenapy": arenapy_numba.manager(pool)(context=context),
    }
    for nbytes in SIZES:
        for name, manager in managers.items():
            manager.initialize()
            context.memory_manager = manager
            parts = {
                "device_array": partial(numba_cuda.device_array, nbytes, "u1"),
                "memalloc": partial(manager.memalloc, nbytes),
                "initialize": manager.initialize,
            }
            for part, call in parts.items():
                print(f"{name}, {nbytes} bytes, {part}: {microseconds(call):.2f}", flush=True)
        time_of_block = microseconds(partial(pool.alloc, nbytes))
        print(f"Pool.alloc, {nbytes} bytes: {time_of_block:.2f}", flush=True)
    context.memory_manager = managers["numba"]
    for name, call in {
        "cuMemGetInfo": driver.cuMemGetInfo,
        "pool.stats()": pool.stats,
        "current_context()": numba_cuda.current_context,
    }.items():
        print(f"{name}: {microseconds(call):.2f}", flush=True)


if __name__ == "__main__":
    report()
