"""Small kernels on memory that kernels allocate from, for a run under compute-sanitizer.

    python sanitized_kernels.py [past | race]

`past` plants a write past the end of an arena, `race` a race in shared memory. Few threads run:
compute-sanitizer slows a kernel by orders of magnitude.
"""

import ast
import sys
from pathlib import Path

import numpy as np
from kernels import Kernels
from real_gpu import Gpu, content

from arenapy import Pool, cuda

EXAMPLES = Path(__file__).parents[2] / "docs/examples"
THREADS, ITEM = 300, 48  # whole warps, and a part of one
KERNELS = """
#include "arenapy.cuh"
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ void fill(u32* p, u64 nbytes, u32 value) {
    for (u64 k = 0; p && k < nbytes / 4; k++) p[k] = value;
}
__device__ u64 bytes_of(u64 i) { return 4 + i * 37 % 200; }

// Together, in parts of warps, and more than there is room for.
extern "C" __global__ void bump(arenapy::arena* arena, u64 n) {
    u64 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u64 nbytes = bytes_of(i);
    fill((u32*)arenapy::arena_alloc(arena, nbytes), nbytes, i);
    if (i % 3 == 1) fill((u32*)arenapy::arena_alloc(arena, nbytes, 256), nbytes, i);
    if (i % 64 < 32) fill((u32*)arenapy::arena_alloc(arena, 16), 16, i);
}

// Threads exchange their items, and give back what they got from another thread.
extern "C" __global__ void exchange(arenapy::slab* slab, u64* had, u64 n, u64 nbytes) {
    u64 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    for (u64 turn = 0; turn < 4; turn++) {
        u32* mine = (u32*)arenapy::slab_alloc(slab);
        fill(mine, nbytes, i);
        u32* theirs = (u32*)atomicExch(&had[(i + 97 * turn) % n], (u64)mine);
        fill(theirs, nbytes, i);
        arenapy::slab_free(slab, theirs);
        if (i % 5 == turn) arenapy::slab_free(slab, arenapy::slab_alloc(slab));
    }
}
extern "C" __global__ void give_all(arenapy::slab* slab, u64* had, u64 n, u64 step) {
    u64 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    arenapy::slab_free(slab, (void*)had[i * step % n]);
    had[i * step % n] = 0;
}

extern "C" __global__ void write_past(arenapy::arena* arena) {
    if (threadIdx.x) return;
    u64 size = arena->size;
    char* p = (char*)arenapy::arena_alloc(arena, size);
    if (p) p[size] = 1;
}
extern "C" __global__ void race(u64* out) {
    __shared__ volatile u64 cell[256];
    cell[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = cell[(threadIdx.x + 32) % 256];
}
"""


def zeros(n, itemsize=8):
    made = Pool(source=cuda.Device()).alloc(n * itemsize)
    made.fill(0)
    return made


def arenas(kernels):
    """One in which all fits, and one that is full."""
    roomy, tight = cuda.KernelArena(1 << 20), cuda.KernelArena(5000)
    for arena in (roomy, tight):
        kernels.launch("bump", THREADS, arena.address, THREADS)
        assert arena.used() > 0 and arena.misused == 0
    assert roomy.overflowed == 0 < tight.overflowed
    tight.reset()
    kernels.launch("bump", THREADS, tight.address, THREADS)


def slabs(kernels):
    """One in which all fits, and one that is full. A later kernel gives the items back."""
    for count in (3 * THREADS, 33):
        slab, had = cuda.KernelSlab(ITEM, count), zeros(THREADS)
        for _ in range(2):
            kernels.launch("exchange", THREADS, slab.address, had.address, THREADS, ITEM)
            kernels.launch("give_all", THREADS, slab.address, had.address, THREADS, 7)
            assert (slab.in_use(), slab.misused) == (0, 0)
        assert (slab.overflowed == 0) == (count > 33)


def code_of(example):
    """The kernels of a program in the documentation, which itself needs CuPy."""
    for one in ast.parse((EXAMPLES / f"{example}.py").read_text()).body:
        if isinstance(one, ast.Assign) and one.targets[0].id == "CODE":
            return ast.literal_eval(one.value)
    raise AssertionError(f"{example}.py has no CODE")


def rows():
    """The rows of a kernel, docs/examples/kernel_rows.py."""
    arena, address, length = cuda.KernelArena(1 << 20), zeros(THREADS), zeros(THREADS, 4)
    Kernels(code_of("kernel_rows")).launch(
        "rows", THREADS, arena.address, THREADS, address.address, length.address
    )
    assert arena.overflowed == 0 and content(length, "u4")[26] == 112  # Collatz, from 27


def table():
    """The hash table of a kernel, docs/examples/kernel_table.py."""
    buckets = 64
    slab, heads, keys = cuda.KernelSlab(24, THREADS), zeros(buckets), zeros(THREADS)
    keys.copy_from((np.arange(THREADS, dtype="u8") ** 2 % 101).tobytes())
    kernels = Kernels(code_of("kernel_table"))
    for _ in range(2):
        kernels.launch(
            "insert", THREADS, slab.address, heads.address, buckets, keys.address, THREADS
        )
        assert slab.in_use() == 51  # squares modulo 101
        kernels.launch("remove_rare", buckets, slab.address, heads.address, buckets, 4)
        assert slab.misused == 0 < slab.in_use() < 51


def main(plant=None):
    """Run all, or what is planted."""
    with Gpu() as gpu:
        kernels = Kernels(KERNELS)
        if plant == "past":
            arena = cuda.KernelArena(4096)
            kernels.launch("write_past", 1, arena.address)
        elif plant == "race":
            out = zeros(256)
            kernels.launch("race", 256, out.address)
        else:
            arenas(kernels)
            slabs(kernels)
            rows()
            table()
        gpu.synchronize()
    print("all kernels ran")


if __name__ == "__main__":
    main(*sys.argv[1:])
