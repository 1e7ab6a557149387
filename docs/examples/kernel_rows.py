"""Write rows of different lengths on a GPU. Each thread of the kernel allocates its own row.

    python kernel_rows.py [N]

The rows are the Collatz sequences of 1 to N. The program needs a GPU and CuPy. If the kernel could
not allocate, the program would need two kernels (one counts, one writes), or as much memory for
every row as for the longest one.
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
    if (!row) return;                       // no memory left: arena.overflowed counts it
    u64 x = i + 1;
    for (unsigned k = 0; k < steps; k++, x = x % 2 ? 3 * x + 1 : x / 2) row[k] = x;
}
"""


def main(n):
    """Write all rows in one launch, and look at the longest one."""
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
    del row  # or arena.reset() would be refused
    arena.reset()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
