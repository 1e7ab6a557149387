"""Functions for numba-cuda's kernels that allocate from a KernelArena or a KernelSlab.

What lives here: `arenapy.cuh` as numba's device functions. What does not: the host's side
(arenapy.cuda.kernel_memory).
"""

import importlib
from pathlib import Path
from typing import Any

from arenapy.cuda.kernel_memory import include_dir
from arenapy.interop.device_pools import library

__all__ = ["functions"]

OLDEST = (0, 20)
TYPES = (
    ("arena_alloc", "uint64(uint64, uint64, uint64)"),
    ("slab_alloc", "uint64(uint64)"),
    ("slab_free", "uint64(uint64, uint64)"),
)

# numba's functions return a status, and their value through the first argument.
SOURCE = """
extern "C" __device__ int arenapy_arena_alloc(
    unsigned long long* result, unsigned long long arena, unsigned long long nbytes,
    unsigned long long align) {
    *result = (unsigned long long)arenapy::arena_alloc((arenapy::arena*)arena, nbytes, align);
    return 0;
}
extern "C" __device__ int arenapy_slab_alloc(unsigned long long* result, unsigned long long slab) {
    *result = (unsigned long long)arenapy::slab_alloc((arenapy::slab*)slab);
    return 0;
}
extern "C" __device__ int arenapy_slab_free(
    unsigned long long* result, unsigned long long slab, unsigned long long item) {
    arenapy::slab_free((arenapy::slab*)slab, (void*)item);
    *result = 0;
    return 0;
}
"""


def functions() -> tuple[Any, Any, Any]:
    """Return device functions for kernels of numba-cuda, which allocate while they run.

    Returns
    -------
    arena_alloc
        ``arena_alloc(arena, nbytes, align)`` returns an address. `arena` is the `address` of a
        `KernelArena`. Addresses are uint64, and 0 stands for NULL.
    slab_alloc
        ``slab_alloc(slab)`` returns the address of an item. `slab` is the `address` of a
        `KernelSlab`.
    slab_free
        ``slab_free(slab, item)`` gives an item back.

    Raises
    ------
    ImportError
        If there is no numba-cuda, or it is too old. The message says what to install.

    Notes
    -----
    Call it once, at the top of your module. numba compiles each kernel for the functions that the
    kernel names. Thread-safety: may be called from any thread.

    Examples
    --------
    >>> from arenapy.interop import numba_kernels
    >>> arena_alloc, _, _ = numba_kernels.functions()                    # doctest: +SKIP
    >>> # @numba.cuda.jit
    >>> # def kernel(arena, out): out[numba.cuda.grid(1)] = arena_alloc(arena, 64, 16)
    >>> arena = cuda.KernelArena(1 << 20)
    >>> kernel[1, 32](arena.address, out)                                # doctest: +SKIP
    """
    library("numba_cuda", OLDEST)
    numba_cuda = importlib.import_module("numba.cuda")
    header = (Path(include_dir()) / "arenapy.cuh").read_text()
    code = numba_cuda.CUSource(header + SOURCE)
    alloc, take, give = (
        numba_cuda.declare_device(f"arenapy_{name}", types, link=code) for name, types in TYPES
    )
    return alloc, take, give
