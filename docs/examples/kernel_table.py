"""Count keys in a hash table on a GPU. Kernels allocate the nodes of the table, and free them.

    python kernel_table.py [N]        # counts N random numbers

One kernel inserts keys, and another kernel removes the rare keys. The next insertions use the
memory of the removed nodes. The program needs a GPU and CuPy.
"""

import sys

import cupy

from arenapy import cuda

BUCKETS = 1 << 16
CODE = """
#include "arenapy.cuh"
typedef unsigned long long u64;
struct node { node* next; u64 key; unsigned count; };

extern "C" __global__
void insert(arenapy::slab* slab, node** heads, u64 buckets, u64* keys, u64 n) {
    u64 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u64* head = (u64*)&heads[keys[i] * 0x9E3779B97F4A7C15ull % buckets];
    node* mine = nullptr;
    for (u64 first = *(volatile u64*)head;;) {
        node* found = (node*)first;
        while (found && *(volatile u64*)&found->key != keys[i])
            found = *(node* volatile*)&found->next;
        if (found) {
            atomicAdd(&found->count, 1);
            arenapy::slab_free(slab, mine);     // another thread was faster. NULL does nothing
            return;
        }
        if (!mine) mine = (node*)arenapy::slab_alloc(slab);
        if (!mine) return;                      // no item left: slab.overflowed counts it
        *mine = node{(node*)first, keys[i], 1};
        __threadfence();                        // write the node before the link to it
        u64 before = atomicCAS(head, first, (u64)mine);
        if (before == first) return;
        first = before;
    }
}

extern "C" __global__
void remove_rare(arenapy::slab* slab, node** heads, u64 buckets, unsigned least) {
    u64 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= buckets) return;
    for (node** link = &heads[i]; *link;) {
        node* one = *link;
        if (one->count >= least) { link = &one->next; continue; }
        *link = one->next;
        arenapy::slab_free(slab, one);
    }
}
"""


def main(n):
    """Insert, remove, insert again."""
    slab = cuda.KernelSlab(24, n)
    module = cupy.RawModule(code=CODE, options=("-I" + cuda.include_dir(),))
    heads = cupy.zeros(BUCKETS, "u8")
    table = (cupy.uint64(slab.address), heads, cupy.uint64(BUCKETS))
    for _ in range(2):
        keys = cupy.random.zipf(1.5, n).astype("u8")
        launch = ((-(-n // 256),), (256,))
        module.get_function("insert")(*launch, (*table, keys, cupy.uint64(n)))
        if slab.overflowed:
            raise SystemExit(f"{slab.overflowed} keys did not fit; make the slab larger")
        inserted = slab.in_use()
        module.get_function("remove_rare")((BUCKETS // 256,), (256,), (*table, cupy.uint32(2)))
        print(f"{inserted} different keys, {slab.in_use()} more than once, wrong: {slab.misused}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
