"""Memory that kernels allocate from, on a real GPU: programs of kernels that nobody thought of."""

import itertools
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernels import Kernels
from real_gpu import output_of, why_none

from arenapy import Pool, cuda

ITEM, MOST_PHASES = 48, 6
HEAD = """
#include "arenapy.cuh"
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ u32 mixed(u32 n) { n *= 0x9E3779B1u; n ^= n >> 15; return n * 0x85EBCA77u; }

// Blocks hold the number of who has them in each word.
__device__ void fill(u32* p, u64 nbytes, u32 number) {
    for (u64 k = 0; k < nbytes / 4; k++) p[k] = number;
}
__device__ bool holds(const u32* p, u64 nbytes, u32 number) {
    for (u64 k = 0; k < nbytes / 4; k++) if (((volatile const u32*)p)[k] != number) return false;
    return true;
}
"""
# `had` and `size`: what a thread has of each phase; a phase is a place in them.
BEGIN = """
extern "C" __global__ void run(arenapy::arena* arena, arenapy::slab* slab, u64* had, u64* size,
                               u64 n, u64* wrong) {{
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
"""
PHASE = """
    if ({when}) {{
        u64 at = {phase} * n + i, nbytes = {nbytes};
        u32* p = (u32*){call};
        had[at] = (u64)p;
        size[at] = nbytes;
        if (p) fill(p, nbytes, at);
    }}
"""
GIVE = """
    if ({when}) {{
        u64 at = {phase} * n + i;
        u32* p = (u32*)had[at];
        if (p && !holds(p, size[at], at)) atomicAdd(wrong, 1);
        arenapy::slab_free(slab, p);
        had[at] = 0;
    }}
"""
VERIFY = """
extern "C" __global__ void verify(u64* had, u64* size, u64 n, u64* wrong) {
    u64 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < n && had[at] && !holds((u32*)had[at], size[at], at)) atomicAdd(wrong, 1);
}
// Each item is given back by another thread than the one that took it.
extern "C" __global__ void give_all(arenapy::slab* slab, u64* had, u64 n, u64 step) {
    u64 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u64 at = i * step % n;
    arenapy::slab_free(slab, (void*)had[at]);
    had[at] = 0;
}
"""

whens = st.sampled_from([
    "true", "i % 3 == 1", "i & 8", "(i & 31) > 5", "(i & 31) == i / 32 % 32", "mixed(i) % 7 < 3",
    "mixed(i / 32) % 2", "i % 64 < 32", "i == 0", "false",
])  # fmt: skip
sizes = st.sampled_from(
    ["4", "16", "100", "16 + i % 240", "mixed(i) % 2000", "(i % 5) * 64", "4096"]
)
aligns = st.sampled_from([1, 2, 16, 64, 256, 4096])
bumps = st.tuples(st.just("bump"), whens, sizes, aligns)
takes = st.tuples(st.just("take"), whens)
gives = st.tuples(st.just("give"), whens, st.integers(0, MOST_PHASES - 1))
programs = st.lists(st.one_of(bumps, takes, gives), min_size=1, max_size=MOST_PHASES)


def source_of(program):
    """A kernel of it. An item is given back at most once, and only if this thread took it."""
    text = HEAD + BEGIN.format()
    taken = []
    for phase, (what, when, *rest) in enumerate(program):
        if what == "bump":
            call = f"arenapy::arena_alloc(arena, nbytes, {rest[1]})"
            text += PHASE.format(when=when, phase=phase, nbytes=rest[0], call=call)
        elif what == "take":
            taken.append(phase)
            call = "arenapy::slab_alloc(slab)"
            text += PHASE.format(when=when, phase=phase, nbytes=ITEM, call=call)
        elif taken:
            text += GIVE.format(when=when, phase=taken[rest[0] % len(taken)])
    return text + "}\n" + VERIFY


class Run:
    """A program on the device, launched as often as one likes."""

    def __init__(self, program, threads, arena, slab, kernels=None):
        self.program, self.threads, self.arena, self.slab = program, threads, arena, slab
        self.kernels = kernels or Kernels(source_of(program))
        self.n = threads * len(program)
        device = Pool(source=cuda.Device())
        self.had, self.size = device.alloc(8 * self.n), device.alloc(8 * self.n)
        self.wrong = device.alloc(8)
        for one in (self.had, self.size, self.wrong):
            one.fill(0)

    def launch(self):
        self.kernels.launch(
            "run", self.threads, self.arena.address, self.slab.address, self.had.address,
            self.size.address, self.threads, self.wrong.address,
        )  # fmt: skip
        self.kernels.launch(
            "verify", self.n, self.had.address, self.size.address, self.n, self.wrong.address
        )

    def values(self, buffer):
        found = np.empty(buffer.nbytes // 8, np.uint64)
        buffer.copy_to(found)
        return found.astype(np.int64)

    def blocks(self, what):
        """(address, bytes, alignment) of each block that the threads have."""
        had = self.values(self.had).reshape(-1, self.threads)
        size = self.values(self.size).reshape(-1, self.threads)
        found = []
        for phase, (kind, _, *rest) in enumerate(self.program):
            if kind == what:
                here = had[phase] != 0
                align = max(rest[1], 16) if kind == "bump" else 16
                found += [
                    (a, n, align) for a, n in zip(had[phase][here], size[phase][here], strict=True)
                ]
        return found

    def check(self):
        assert self.values(self.wrong)[0] == 0, "a block was overwritten"
        arena, slab = self.arena, self.slab
        bumped = sorted(self.blocks("bump"))
        start = arena.address + 256
        for address, nbytes, align in bumped:
            assert start <= address <= start + arena._size - nbytes, "outside"
            assert address % align == 0, "not aligned"
        for (a, n, _), (b, _, _) in itertools.pairwise(bumped):
            assert a + max(n, 1) <= b, "two blocks overlap"
        used = sum(-(-max(n, 1) // 16) * 16 + align - 16 for _, n, align in bumped)
        assert arena.used() == used if not arena.overflowed else used <= arena.used()
        taken = [a for a, _, _ in self.blocks("take")]
        assert len(set(taken)) == len(taken), "an item was handed out twice"
        first = slab.address + slab._first
        assert all(a >= first and (a - first) % ITEM == 0 for a in taken)
        assert all((a - first) // ITEM < slab._count for a in taken), "outside"
        assert slab.in_use() == len(taken)
        assert slab.misused == arena.misused == 0


def run_program(program, threads, capacity, items, kernels=None):
    arena, slab = cuda.KernelArena(capacity), cuda.KernelSlab(ITEM, items)
    one = Run(program, threads, arena, slab, kernels)
    one.launch()
    one.check()
    return one


def give_all(one):
    """By other threads, in a later kernel."""
    step = next(step for step in (7919, 7, 11, 13, 1) if np.gcd(step, one.n) == 1)
    one.kernels.launch("give_all", one.n, one.slab.address, one.had.address, one.n, step)
    assert one.slab.in_use() == 0
    assert one.slab.misused == 0


@given(
    program=programs,
    threads=st.sampled_from([1, 31, 32, 33, 256, 1000, 5000]),
    capacity=st.sampled_from([1, 1000, 1 << 16, 64 << 20]),
    items=st.sampled_from([1, 31, 32, 33, 1000, 100_000]),
)
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # a current context
)
def test_any_kernel(gpu, program, threads, capacity, items):
    one = run_program(program, threads, capacity, items)
    if all(kind != "bump" for kind, *_ in program):
        give_all(one)
        one.launch()  # the same memory, once more
        one.check()


#: Whole warps and parts of them, with more requests than there is room for.
HEAVY = [
    ("take", "true"),
    ("bump", "true", "16 + i % 40", 16),
    ("give", "i % 3 == 1", 0),
    ("bump", "i & 8", "16", 16),
    ("give", "mixed(i) % 7 < 3", 0),
    ("take", "i % 64 < 40"),
]
#: No lost bit that stays set: a search for an item that is promised would not end. A kernel that
#: does not end slows all other programs on the GPU.
PLANTS = {
    "the bump is no atomic addition": (
        "if (all && detail::lane() == 0) at = atomicAdd(&a->used, all);",
        "if (all && detail::lane() == 0) { at = a->used; *(volatile u64*)&a->used = at + all; }"),
    "nor is that of one thread": (
        "at = atomicAdd(&a->used, want);",
        "at = *(volatile u64*)&a->used; *(volatile u64*)&a->used = at + want;"),
    "a warp sets bits without an atomic": (
        "got = bits & ~atomicOr(&bitmap[word], bits);",
        "{ got = bits & ~bitmap[word]; *(volatile u32*)&bitmap[word] |= bits; }"),
    "a lane has its neighbour's place": (
        "at += before;",
        "at += detail::lane() % 2 && before >= want ? before - want : before;"),
    "an end that is 16 bytes too late": ("want > size - at)", "want > size - at + 16)"),
}  # fmt: skip


def test_a_heavy_one(gpu):
    kernels = Kernels(source_of(HEAVY))
    for _ in range(20):
        run_program(HEAVY, 200_000, 8 << 20, 240_000, kernels)


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_races_are_found(gpu, plant, tmp_path):
    old, new = PLANTS[plant]
    header = (Path(cuda.include_dir()) / "arenapy.cuh").read_text()
    assert header.count(old) == 1
    (tmp_path / "arenapy.cuh").write_text(header.replace(old, new))
    program = [one for one in HEAVY if one[0] != "give"]
    kernels = Kernels(source_of(program), tmp_path)
    with pytest.raises(AssertionError):
        for _ in range(20):
            run_program(program, 200_000, 8 << 20, 240_000, kernels)


def test_a_full_arena_and_a_reset_in_stream_order(gpu):
    arena, slab = cuda.KernelArena(64 * 1000), cuda.KernelSlab(ITEM, 10)
    s = cuda.Stream()
    one = Run([("bump", "true", "64", 16)], 1500, arena, slab)
    arguments = (
        arena.address, slab.address, one.had.address, one.size.address, 1500, one.wrong.address,
    )  # fmt: skip
    one.kernels.launch("run", 1500, *arguments, stream=s)
    assert (arena.used(s), arena.overflowed) == (64 * 1000, 500)
    assert len(one.blocks("bump")) == 1000
    for _ in range(3):
        arena.reset(s)
        one.kernels.launch("run", 1500, *arguments, stream=s)
    assert (arena.used(s), arena.overflowed) == (64 * 1000, 500)
    assert np.count_nonzero(one.values(one.had)) == 1000


MISUSES = """
extern "C" __global__ void misuse(arenapy::arena* a, arenapy::slab* s, u64 how, u64* out) {
    void* p = arenapy::slab_alloc(s);
    if (how == 0) { arenapy::slab_free(s, p); arenapy::slab_free(s, p); }
    if (how == 1) arenapy::slab_free(s, (char*)p + 4);
    if (how == 2) arenapy::slab_free(s, s);
    if (how == 3) arenapy::slab_free(s, (void*)~0ull);
    if (how == 4) out[0] = (u64)arenapy::arena_alloc(a, 16, 48);
    if (how == 5) out[0] = (u64)arenapy::arena_alloc(a, 16, 0);
    if (how == 6) out[0] = (u64)arenapy::arena_alloc(a, ~0ull, 16);
    if (how == 7) out[0] = (u64)arenapy::arena_alloc(a, 16, 1ull << 63);
    if (how == 8) arenapy::slab_free(s, nullptr);
}
"""


@pytest.mark.parametrize("how", range(9))
def test_misuse_has_no_effect(gpu, how):
    arena, slab = cuda.KernelArena(1000), cuda.KernelSlab(ITEM, 100)
    out = Pool(source=cuda.Device()).alloc(8)
    out.fill(255)
    Kernels(HEAD + MISUSES).launch("misuse", 1, arena.address, slab.address, how, out.address)
    assert slab.in_use() == (256 - 156 if how else 0)
    if how in (4, 5, 6, 7):
        found = np.empty(1, np.uint64)
        out.copy_to(found)
        assert found[0] == 0
    wrong = (arena.misused, arena.overflowed, slab.misused)
    full = 100  # of 256 threads, as many have an item
    expected = {0: (0, 0, None), 4: (256, 0, 0), 5: (256, 0, 0), 6: (0, 256, 0), 7: (0, 256, 0),
                8: (0, 0, 0)}.get(how, (0, 0, None))  # fmt: skip
    assert wrong[:2] == expected[:2]
    if expected[2] is not None:
        assert wrong[2] == expected[2]
    else:
        assert wrong[2] >= full
    slab.reset()
    assert slab.in_use() == 0


ROW = """
extern "C" __global__ void rows(arenapy::arena* arena, u64* out, u64 n) {
    u64 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u64 count = mixed(i) % 20;
    u32* p = (u32*)arenapy::arena_alloc(arena, 4 * count);
    for (u64 k = 0; p && k < count; k++) p[k] = i;
    out[2 * i] = (u64)p;
    out[2 * i + 1] = count;
}
"""


def test_the_host_sees_what_a_kernel_made(gpu):
    arena = cuda.KernelArena(1 << 20)
    out = Pool(source=cuda.Device()).alloc(16 * 1000)
    Kernels(HEAD + ROW).launch("rows", 1000, arena.address, out.address, 1000)
    found = np.empty((1000, 2), np.uint64)
    out.copy_to(found)
    for i, (address, count) in enumerate(found.tolist()):
        if count:
            row = np.empty(count, np.uint32)
            arena.buffer(address, 4 * count).copy_to(row)
            assert (row == i).all()
    kept = arena.buffer(int(found[0, 0]), 4)
    with pytest.raises(BufferError, match="1 Buffers"):
        arena.reset()
    del kept
    arena.reset()
    assert arena.used() == 0


CODE = """
#include "arenapy.cuh"
__device__ void work(arenapy::arena* arena, arenapy::slab* slab) {
    int* p = (int*)arenapy::arena_alloc(arena, 16);
    int* q = (int*)arenapy::slab_alloc(slab);
    if (p) p[0] = 1;
    if (q && threadIdx.x % 2) arenapy::slab_free(slab, q);
}
extern "C" __global__ void k(arenapy::arena* arena, arenapy::slab* slab) { work(arena, slab); }
"""
START = f"""
from arenapy import cuda
arena = cuda.KernelArena(1 << 20)
slab = cuda.KernelSlab(64, 1000)
code = '''{CODE}'''
folder = "-I" + cuda.include_dir()
"""
END = """
assert (arena.used(), slab.in_use(), arena.overflowed) == (64 * 16, 32, 0)
"""


def test_cupy():
    pytest.importorskip("cupy")
    output_of(START + """
import cupy
kernel = cupy.RawKernel(code, "k", options=(folder,))
kernel((1,), (64,), (cupy.uint64(arena.address), cupy.uint64(slab.address)))
""" + END)  # fmt: skip


@pytest.mark.usefixtures("core")
def test_cuda_core():
    output_of(START + """
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch
device = Device()
device.set_current()
stream = device.create_stream()
options = ProgramOptions(arch=f"sm_{device.arch}", include_path=cuda.include_dir())
kernel = Program(code, "c++", options=options).compile("cubin").get_kernel("k")
launch(stream, LaunchConfig(grid=1, block=64), kernel, arena.address, slab.address)
stream.sync()
""" + END)  # fmt: skip


@pytest.mark.usefixtures("torch")
def test_torch():
    """torch passes an integer as 32 bits, so the addresses are in a tensor."""
    output_of(START + """
import torch
code += '''
extern "C" __global__ void at(void** address) {
    work((arenapy::arena*)address[0], (arenapy::slab*)address[1]);
}
'''
addresses = torch.tensor([arena.address, slab.address], device="cuda")
kernel = torch.cuda._compile_kernel(code, "at", cuda_include_dirs=[cuda.include_dir()])
kernel((1, 1, 1), (64, 1, 1), (addresses,))
torch.cuda.synchronize()
""" + END)  # fmt: skip


def the_nvcc():
    """The compiler; without one, the test is skipped."""
    found = shutil.which("nvcc", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
    if found is None:
        pytest.skip("needs nvcc")
    return found


#: A C++ function that starts the kernel.
RUN = """
void run(unsigned long long arena, unsigned long long slab) {
    k<<<1, 64>>>((arenapy::arena*)arena, (arenapy::slab*)slab);
}
"""


@pytest.mark.full
@pytest.mark.usefixtures("torch")
def test_torch_with_nvcc(tmp_path):
    the_nvcc()
    if not shutil.which("ninja"):
        pytest.skip("needs ninja")
    output_of(START + f"""
from torch.utils.cpp_extension import load_inline
declared = '''
#include <pybind11/pybind11.h>
void run(unsigned long long arena, unsigned long long slab);
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {{ m.def("run", &run); }}
'''
made = load_inline(
    "inline_kernel", cpp_sources=declared, cuda_sources=code + '''{RUN}''',
    extra_include_paths=[cuda.include_dir()], no_implicit_headers=True,
    build_directory={str(tmp_path)!r},
)
made.run(arena.address, slab.address)
""" + END)  # fmt: skip


@pytest.mark.full
def test_nvcc(tmp_path):
    """It compiles without a warning everywhere, and runs where there is a GPU."""
    has_gpu = why_none() is None
    source, library = tmp_path / "k.cu", tmp_path / "k.so"
    source.write_text(CODE + f'extern "C" {{ {RUN} }}')
    subprocess.run(
        [the_nvcc(), "-Werror", "all-warnings", f"-arch={'native' if has_gpu else 'sm_90'}",
         f"-I{cuda.include_dir()}", "-shared", "-Xcompiler", "-fPIC", str(source),
         "-o", str(library)],
        check=True,
    )  # fmt: skip
    if has_gpu:
        output_of(START + f"""
import ctypes
addresses = ctypes.c_uint64(arena.address), ctypes.c_uint64(slab.address)
ctypes.CDLL({str(library)!r}).run(*addresses)
""" + END)  # fmt: skip


def test_numba():
    pytest.importorskip("numba.cuda")
    output_of("""
import warnings
warnings.simplefilter("ignore")
import numpy as np
if not hasattr(np, "row_stack"):
    np.row_stack = np.vstack
from numba import cuda as numba_cuda
from arenapy import cuda
from arenapy.interop import numba_kernels
arena_alloc, slab_alloc, slab_free = numba_kernels.functions()
arena = cuda.KernelArena(1 << 20)
slab = cuda.KernelSlab(64, 1000)

@numba_cuda.jit
def k(arena, slab, out):
    i = numba_cuda.grid(1)
    out[i] = arena_alloc(arena, 16, 16)
    item = slab_alloc(slab)
    if i % 2:
        slab_free(slab, item)

out = numba_cuda.device_array(64, "u8")
k[1, 64](arena.address, slab.address, out)
found = out.copy_to_host()
assert len(set(found.tolist())) == 64
""" + END)  # fmt: skip
