"""State machines for allocators of memory of a GPU: arenapy's, CuPy's, RMM's and cuda.core's.

A kind of allocator says how to make, allocate, address and free, with a stream. `plain` makes of it
a machine whose contents are copies by the host, and `streamed` one whose contents are kernels.
"""

import ctypes
import warnings

from hypothesis import strategies as st

from arenapy import Bump, Pool, Slab, cuda
from arenapy.testing import (
    AllocatorMachine,
    BumpMachine,
    PoolMachine,
    SlabMachine,
    StreamMachine,
    sizes,
)

KIB, MIB = 1 << 10, 1 << 20
LARGE = 8 * MIB  # of a block; some allocators have a way of their own for these

SIZES = sizes(40 * KIB) | st.sampled_from([MIB - 1, MIB, MIB + 1, 3 * MIB, LARGE])


class Kind:
    """An allocator of memory that a GPU sees; `host`: the host sees it, too."""

    host = False
    config = {}  # noqa: RUF012 - one of its configs
    default_align = 256
    alignments = st.none()
    sizes = SIZES
    grows = True
    empty_is_apart = False
    bad_request = None  # asked in a process of its own: test_gpu_testing.py
    refusals = (MemoryError,)
    frees_anywhere = True

    def make_stream(self):
        """One that it takes."""
        return cuda.Stream()


# ---- arenapy ----


class Own(Kind):
    """Over the source that `source` makes."""

    source = cuda.Device
    alignments = st.none() | st.sampled_from([4, 64, 256])  # kernels write words
    empty_is_apart = True
    keeps_home = True

    def allocate(self, state, nbytes, align, stream=None):
        return state.alloc(nbytes, align, stream)

    def address(self, block):
        return block.address

    def free(self, state, block, stream=None):
        block.release(stream)

    def record_stream(self, state, block, stream):
        block.record_stream(stream)

    def bounds(self, state):
        return [(region.address, region.nbytes) for region in state.regions]

    def look(self):
        super().look()
        self.state.check()


class OwnPool(Own):
    configs = st.fixed_dictionaries({"max_mib": st.sampled_from([4, 8, 32])})

    def make(self, max_mib):
        return Pool(max_mib * MIB, self.source())


class UntoldPool(OwnPool):
    """Which is told of no stream: what shows that the machine finds it."""

    record_stream = None
    keeps_home = False

    def allocate(self, state, nbytes, align, stream=None):
        return state.alloc(nbytes, align)

    def free(self, state, block, stream=None):
        block.release()


class OwnSlab(Own):
    configs = st.fixed_dictionaries({"count": st.integers(1, 12), "more": st.integers(0, 12)})
    refusals = (MemoryError, ValueError)  # an item is too small, or not aligned so
    sizes = st.integers(0, 20_000)
    alignments = st.none() | st.sampled_from([4, 64])
    default_align = 64

    def make(self, count, more):
        return Slab(20_000, count, self.source(), max_count=count + more)


class OwnBump(Own):
    configs = st.fixed_dictionaries({"kib": st.sampled_from([64, 256, 20 << 10])})

    def make(self, kib):
        return Bump(kib * KIB, self.source())

    def mark(self, state):
        return state.mark()

    def reset(self, state, mark=None, stream=None):
        state.reset(mark, stream)


def own_kind(kind, source, host=False):
    """Of memory that the host sees, it has its own turns."""
    body = {"source": staticmethod(source), "host": host, "host_sees": host}
    if host:
        body["default_align"] = 64
    return type(kind.__name__, (kind,), body)


# ---- CuPy ----


class CupyPool(Kind):
    """A block is given back to the stream that it was allocated for."""

    default_align = 512
    frees_anywhere = False
    configs = st.fixed_dictionaries({"limit": st.sampled_from([0, 0, MIB, 16 * MIB])})
    config = {"limit": 0}  # noqa: RUF012

    def make(self, limit):
        import cupy

        pool = cupy.cuda.MemoryPool()
        pool.set_limit(limit)
        return pool

    def make_stream(self):
        import cupy

        return cupy.cuda.Stream(non_blocking=True)

    def allocate(self, state, nbytes, align, stream=None):
        if stream is None:
            return [state.malloc(nbytes)]
        with stream:
            return [state.malloc(nbytes)]

    def address(self, block):
        return block[0].ptr

    def free(self, state, block, stream=None):
        block.clear()


class CupyAsyncPool(CupyPool):
    configs = st.just({})
    config = {}  # noqa: RUF012

    def make(self):
        import cupy

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is experimental
            return cupy.cuda.MemoryAsyncPool()


# ---- RMM ----


class Rmm(Kind):
    """`resource(mr)` makes one of the module's resources."""

    def make(self):
        from rmm import mr

        return self.resource(mr)

    def make_stream(self):
        from rmm.pylibrmm.stream import CudaStreamFlags, Stream

        return Stream(flags=CudaStreamFlags.NON_BLOCKING)

    def allocate(self, state, nbytes, align, stream=None):
        given = () if stream is None else (stream,)
        return state.allocate(nbytes, *given), nbytes

    def address(self, block):
        return block[0]

    def free(self, state, block, stream=None):
        state.deallocate(*block, *(() if stream is None else (stream,)))


def binning(mr):
    """Sizes up to 64 KiB from bins, larger ones from a pool."""
    pool = mr.PoolMemoryResource(mr.CudaMemoryResource(), 16 * MIB, 64 * MIB)
    return mr.BinningMemoryResource(pool, 12, 16)


RMM = {
    "cuda": lambda mr: mr.CudaMemoryResource(),
    "async": lambda mr: mr.CudaAsyncMemoryResource(initial_pool_size=16 * MIB),
    "pool": lambda mr: mr.PoolMemoryResource(mr.CudaMemoryResource(), MIB, 64 * MIB),
    "arena": lambda mr: mr.ArenaMemoryResource(mr.CudaMemoryResource(), 256 * MIB),
    "fixed size": lambda mr: mr.FixedSizeMemoryResource(mr.CudaMemoryResource(), MIB, 8),
    "binning": binning,
    "limiting": lambda mr: mr.LimitingResourceAdaptor(mr.CudaMemoryResource(), 16 * MIB),
    "pool over managed": lambda mr: mr.PoolMemoryResource(
        mr.ManagedMemoryResource(), MIB, 64 * MIB
    ),
}


def rmm_kind(name):
    body = {"resource": staticmethod(RMM[name]), "host": "managed" in name}
    if name == "fixed size":
        body["sizes"] = st.integers(0, MIB) | st.sampled_from([MIB - 1, MIB])
        body["refusals"] = (Exception,)  # of what is larger than a block
    return type("Rmm", (Rmm,), body)


# ---- cuda.core ----


class Core(Kind):
    """`resource(core)` makes one of the module's resources."""

    smallest = 1
    sizes = sizes(40 * KIB, least=1) | st.sampled_from([MIB - 1, MIB, MIB + 1, 3 * MIB, LARGE])

    def make(self):
        from cuda import core

        core.Device(0).set_current()
        self.refusals = (MemoryError, core_error())
        return self.resource(core)

    def make_stream(self):
        from cuda import core

        device = core.Device(0)
        device.set_current()
        return device.create_stream()

    def allocate(self, state, nbytes, align, stream=None):
        return state.allocate(nbytes, stream=self.default() if stream is None else stream)

    def default(self):
        """The default stream, as an object."""
        from cuda import core

        return core.Device(0).default_stream

    def address(self, block):
        return int(block.handle)

    def free(self, state, block, stream=None):
        block.close(self.default() if stream is None else stream)


def core_error():
    from cuda.core._utils.cuda_utils import CUDAError

    return CUDAError


def core_device(core):
    return core.DeviceMemoryResource(0, core.DeviceMemoryResourceOptions(max_size=64 * MIB))


def core_pinned(core):
    return core.PinnedMemoryResource(core.PinnedMemoryResourceOptions(max_size=64 * MIB))


def core_managed(core):
    return core.ManagedMemoryResource(core.ManagedMemoryResourceOptions())


CORE = {
    "device": core_device,
    "default": lambda core: core.Device(0).memory_resource,
    "pinned": core_pinned,
    "legacy pinned": lambda core: core.LegacyPinnedMemoryResource(),
    "managed": core_managed,
    "arenapy": lambda core: cuda.memory_resource(Pool(64 * MIB, cuda.Device())),
}


def core_kind(name):
    host = name in ("pinned", "legacy pinned", "managed")
    return type("Core", (Core,), {"resource": staticmethod(CORE[name]), "host": host})


# ---- machines ----


class Contents:
    """By copies, in the order of the default stream; by this processor where it sees the memory."""

    gpu = None
    host = False

    def write(self, block, offset, data):
        if self.host:
            self.gpu.synchronize()
            ctypes.memmove(self.address(block) + offset, data, len(data))
        else:
            self.gpu.upload(self.address(block) + offset, data)

    def read(self, block, offset, nbytes):
        if self.host:
            self.gpu.synchronize()
            return ctypes.string_at(self.address(block) + offset, nbytes)
        return self.gpu.download(self.address(block) + offset, nbytes)


class PlainBump(Contents, BumpMachine):
    """arenapy.testing's, with all their rules. A class attribute says the source."""


class PlainSlab(Contents, SlabMachine):
    pass


class PlainPool(Contents, PoolMachine):
    """A device's memory comes by 2 MiB."""

    configs = st.fixed_dictionaries(
        {
            "max_bytes": st.none() | st.integers(1, 8).map(lambda n: 2 * n * MIB),
            "rounding": st.sampled_from(["step", "class"]),
            "fail_after": st.none(),
        }
    )


class Streamed(StreamMachine):
    """Contents are kernels, on streams that are made once."""

    gpu = None

    def make_streams(self):
        return self.gpu.streams_for(type(self), self.make_stream)


def plain(kind, gpu, name):
    return type(name, (kind, Contents, AllocatorMachine), {"gpu": gpu, "__module__": __name__})


def streamed(kind, gpu, name):
    return type(name, (kind, Streamed), {"gpu": gpu, "__module__": __name__})


def kinds(package):
    """(name, kind) of a package, each."""
    return {
        "cupy": [("MemoryPool", CupyPool), ("MemoryAsyncPool", CupyAsyncPool)],
        "rmm": [(name, rmm_kind(name)) for name in RMM],
        "cuda.core": [(name, core_kind(name)) for name in CORE],
    }[package]
