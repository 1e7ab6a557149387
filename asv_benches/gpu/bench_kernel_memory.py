"""Allocations of kernels a second, beside the device's own malloc and free.

    python asv_benches/gpu/bench_kernel_memory.py [--quick]

A million threads allocate once each, and do nothing else. "each its size" is 16 to 256 bytes, by
thread. `malloc` is CUDA's, in the same kernel, with a heap of 2 GiB. "and free" gives the memory
back in the same kernel. Times are those of events around the kernel; rounds take turns, and a rate
is of the median.

What this does not show: how memory is used afterwards, or how full memory slows the search.
"""

import argparse
import statistics
import sys
from pathlib import Path

if not __package__:  # run as a script; behind what is installed
    sys.path.append(str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from kernels import Kernels
from real_gpu import Gpu, done

from arenapy import Pool, cuda
from asv_benches.support.rounds import Line

N = 1 << 20
HEAP = 2 << 30  # bytes, of the device's malloc
BUMPS = 10e9  # a second
BUMP_RATIO, SLAB_RATIO = 50, 20  # of malloc's rate

KERNEL = """
#include "arenapy.cuh"
typedef unsigned long long u64;
extern "C" __global__ void k(arenapy::arena* a, arenapy::slab* s, u64* out, u64 n, u64 most) {{
    u64 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u64 nbytes = most ? most : 16 + i * 16 % 256;
    void* p = {alloc};
    if (!p) atomicAdd(out, 1);
    {free};
}}
"""
# Each in a module of its own: the driver prepares the heap for each kernel of one that has malloc.
WAYS = {
    "bump": KERNEL.format(alloc="arenapy::arena_alloc(a, nbytes)", free=""),
    "slab": KERNEL.format(alloc="arenapy::slab_alloc(s)", free=""),
    "slab and free": KERNEL.format(alloc="arenapy::slab_alloc(s)", free="arenapy::slab_free(s, p)"),
    "malloc": KERNEL.format(alloc="malloc(nbytes)", free=""),
    "malloc and free": KERNEL.format(alloc="malloc(nbytes)", free="free(p)"),
}


class Timed:
    """Kernels, and how long they take by the device's own clock."""

    def __init__(self, gpu):
        self.driver = gpu.driver
        self.kernels = {name: Kernels(source) for name, source in WAYS.items()}
        self.events = [done(gpu.driver.cuEventCreate(0)) for _ in range(2)]
        self.out = Pool(source=cuda.Device()).alloc(8)

    def allocations(self, name, n, arena, slab, nbytes):
        """How many a second; all of them have to succeed."""
        self.out.fill(0)
        arena.reset()
        slab.reset()
        first, last = self.events
        done(self.driver.cuEventRecord(first, 0))
        self.kernels[name].launch("k", n, arena.address, slab.address, self.out.address, n, nbytes)
        done(self.driver.cuEventRecord(last, 0))
        done(self.driver.cuEventSynchronize(last))
        failed = bytearray(8)
        self.out.copy_to(failed)
        assert not any(failed), f"{name}: requests were refused"
        return n / done(self.driver.cuEventElapsedTime(first, last)) * 1e3


def lines(quick):
    """All figures."""
    cuda.device_heap_limit(HEAP)
    with Gpu() as gpu:
        timed = Timed(gpu)
        for nbytes in (16, 64, 256, 0):
            arena = cuda.KernelArena(N * (nbytes or 256))
            slab = cuda.KernelSlab(nbytes or 256, 2 * N)
            rates = {name: [] for name in WAYS if name != "malloc"}
            for _ in range(3 if quick else 15):
                for name, found in rates.items():
                    found.append(timed.allocations(name, N, arena, slab, nbytes))
            rate = {name: statistics.median(found[1:]) for name, found in rates.items()}
            # Once: nothing gives back what it takes.
            rate["malloc"] = timed.allocations("malloc", N // 8, arena, slab, nbytes)
            yield from shown(f"{nbytes} bytes" if nbytes else "each its size", rate)


def shown(text, rate):
    """Rates, and ratios with their limits."""
    for name, value in rate.items():
        yield Line("kernels", f"{name}, {text}", value / 1e9, "G/s")
    yield Line("kernels", f"bump, {text}, is enough", rate["bump"] / 1e9, "G/s", BUMPS / 1e9,
               at_least=True)  # fmt: skip
    yield Line("kernels", f"bump / malloc, {text}", rate["bump"] / rate["malloc"], "x", BUMP_RATIO,
               at_least=True)  # fmt: skip
    yield Line("kernels", f"slab and free / malloc and free, {text}",
               rate["slab and free"] / rate["malloc and free"], "x", SLAB_RATIO,
               at_least=True)  # fmt: skip


def main():
    """Print every line; the exit status says whether all that is promised holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds: to see that it runs")
    options = parser.parse_args()
    missed = False
    for line in lines(options.quick):
        judged = "" if line.limit is None else f"  ({line.limit} or more: {line.verdict})"
        print(f"{line.what:52}{line.value:12.4f} {line.unit}{judged}", flush=True)
        missed |= line.verdict == "MISSED"
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
