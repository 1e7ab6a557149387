"""Output of variable length: each thread of a kernel writes a row of its own length.

Without memory that a kernel allocates from, the program needs two kernels (count, then write) or
room for the longest row in every row. Needs a GPU and CuPy.

    python kernel_rows.py [N]

The rows are Collatz sequences of 1 to N.
"""

import sys

import cupy

from arenapy import cuda

CODE = """
#include "arenapy.cuh"
typedef unsigned long long u64;
extern "C" __global__ void rows(arenapy::arena* arena, u64 n, u64* address, unsigned* length) {
    u64 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned steps = 1;
    for (u64 x = i + 1; x != 1; x = x % 2 ? 3 * x + 1 : x / 2) steps++;
    u64* row = (u64*)arenapy::arena_alloc(arena, 8 * steps);
    address[i] = (u64)row;
    length[i] = steps;
    if (!row) return;                       // the host sees it in arena.overflowed
    u64 x = i + 1;
    for (unsigned k = 0; k < steps; k++, x = x % 2 ? 3 * x + 1 : x / 2) row[k] = x;
}
"""


def main(n):
    """Make all rows in one launch, and look at the longest one."""
    arena = cuda.KernelArena(256 << 20)
    kernel = cupy.RawKernel(CODE, "rows", options=("-I" + cuda.include_dir(),))
    address = cupy.zeros(n, "u8")
    length = cupy.zeros(n, "u4")
    kernel((-(-n // 256),), (256,), (cupy.uint64(arena.address), cupy.uint64(n), address, length))
    if arena.overflowed:
        raise SystemExit(f"{arena.overflowed} rows did not fit; make the arena larger")

    longest = int(length.argmax())
    nbytes = 8 * int(length[longest])
    row = cupy.asarray(arena.buffer(int(address[longest]), nbytes)).view("u8")
    print(f"{n} rows, {arena.used() / 2**20:.1f} MiB")
    print(f"longest: {longest + 1}, {len(row)} numbers, the largest is {int(row.max())}")
    del row  # a reset is refused while something shows the memory
    arena.reset()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
