"""What replay.py asks for device memory: arenapy's pools and their peers, behind two calls.

Each is called as its own users call it from Python; one method call of ours is around every call. A
stream is None, the default stream, or what `native` made of one of arenapy's.
"""

import importlib.metadata
import os

from asv_benches.support.sizes import MIB

NOT_INSTALLED = "not installed"


class Heap:
    """Nothing: what the replay itself costs."""

    about = "no allocator: the loop"
    package = None  # whose version is shown
    note = ""

    def __init__(self, peak_live):
        pass

    def native(self, stream):
        """What stands for one of arenapy's streams here."""
        return stream

    def take(self, nbytes, stream):
        """Allocate."""
        return 1

    def give(self, block, nbytes, stream):
        """Free."""

    def reserved(self):
        """Bytes that it has of the device now. None: it does not say; the device is asked."""
        return 0

    @classmethod
    def version(cls):
        """Of the package."""
        if cls.package is None:
            return None
        for name in cls.package:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return NOT_INSTALLED


class Arenapy(Heap):
    """arenapy.Pool over memory of the device."""

    about = "arenapy.Pool(source=cuda.Device())"
    options: dict = {}  # noqa: RUF012

    def __init__(self, peak_live):
        import arenapy

        self.pool = arenapy.Pool(source=self.source(), **self.options)

    def source(self):
        """Where it gets memory."""
        from arenapy import cuda

        return cuda.Device()

    def take(self, nbytes, stream):
        """Allocate."""
        return self.pool.alloc(nbytes) if stream is None else self.pool.alloc(nbytes, None, stream)

    def give(self, block, nbytes, stream):
        """Free."""
        block.release()

    def reserved(self):
        """Of all regions."""
        return sum(region.nbytes for region in self.pool.regions)

    @classmethod
    def version(cls):
        """Also of a package that was not installed but is on the path."""
        import arenapy

        return arenapy.__version__


class ArenapyClass(Arenapy):
    """With blocks as large as their class."""

    about = "the same with rounding='class'"
    options = {"rounding": "class"}  # noqa: RUF012


class ArenapyDriverPool(Arenapy):
    """Over a memory pool of the driver."""

    about = "arenapy.Pool(source=cuda.DriverPool())"

    def source(self):
        """Where it gets memory."""
        from arenapy import cuda

        return cuda.DriverPool()


class ArenapyGrow(Arenapy):
    """Over one range of addresses that grows in place."""

    about = "arenapy.Pool(source=cuda.Device(grow=True))"

    def source(self):
        """Where it gets memory."""
        from arenapy import cuda

        return cuda.Device(grow=True)


class Torch(Heap):
    """torch's caching allocator, as torch.cuda.caching_allocator_alloc calls it."""

    about = "torch's caching allocator"
    package = ("torch",)

    def __init__(self, peak_live):
        import torch

        torch.cuda.init()
        torch.cuda.set_device(0)
        self.stats = torch._C._cuda_memoryStats
        self.alloc = torch._C._cuda_cudaCachingAllocator_raw_alloc
        self.delete = torch._C._cuda_cudaCachingAllocator_raw_delete

    def native(self, stream):
        """Its handle."""
        return stream.handle

    def take(self, nbytes, stream):
        """Allocate."""
        return self.alloc(nbytes, stream or 0)

    def give(self, block, nbytes, stream):
        """Free."""
        self.delete(block)

    def reserved(self):
        """What torch.cuda.memory_reserved says."""
        return self.stats(0)["reserved_bytes"]["all"]["current"]


class TorchExpandable(Torch):
    """With segments that grow in place."""

    about = "the same with expandable_segments:True"

    def __init__(self, peak_live):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # before the import
        super().__init__(peak_live)


class Cupy(Heap):
    """CuPy's pool; a block is freed when it is dropped."""

    about = "cupy.cuda.MemoryPool()"
    package = ("cupy-cuda13x", "cupy-cuda12x", "cupy")

    def __init__(self, peak_live):
        import cupy

        self.cupy = cupy
        self.pool = cupy.cuda.MemoryPool()
        cupy.cuda.Device(0).use()

    def native(self, stream):
        """A stream of CuPy's with the same handle."""
        return self.cupy.cuda.ExternalStream(stream.handle)

    def take(self, nbytes, stream):
        """Allocate."""
        if stream is None:
            return self.pool.malloc(nbytes)
        with stream:
            return self.pool.malloc(nbytes)

    def reserved(self):
        """Used and free."""
        return self.pool.total_bytes()


class Rmm(Heap):
    """RMM's pool, which begins small: as it comes it takes half of the device at once."""

    about = "rmm.mr.PoolMemoryResource, initial_pool_size=1 MiB"
    package = ("rmm-cu13", "rmm-cu12", "rmm")

    def __init__(self, peak_live):
        import rmm

        self.counted = rmm.mr.StatisticsResourceAdaptor(rmm.mr.CudaMemoryResource())
        self.pool = self.resource(rmm.mr, peak_live)

    def resource(self, mr, peak_live):
        """What allocates."""
        return mr.PoolMemoryResource(self.counted, initial_pool_size=MIB)

    def native(self, stream):
        """A stream of RMM's for the same."""
        from rmm.pylibrmm.stream import Stream

        return Stream(stream)

    def take(self, nbytes, stream):
        """Allocate."""
        if stream is None:
            return self.pool.allocate(nbytes)
        return self.pool.allocate(nbytes, stream)

    def give(self, block, nbytes, stream):
        """Free."""
        if stream is None:
            self.pool.deallocate(block, nbytes)
        else:
            self.pool.deallocate(block, nbytes, stream)

    def reserved(self):
        """What went through its upstream."""
        return self.counted.allocation_counts.current_bytes


class RmmArena(Rmm):
    """RMM's arena. What it holds is what it was told to take: time only."""

    about = "rmm.mr.ArenaMemoryResource"
    note = "takes its arena at once, here twice the peak live: not compared"

    def resource(self, mr, peak_live):
        """What allocates."""
        return mr.ArenaMemoryResource(
            self.counted, arena_size=2 * peak_live // MIB * MIB + 256 * MIB
        )


class RmmAsync(Rmm):
    """The driver's pool, through RMM."""

    about = "rmm.mr.CudaAsyncMemoryResource, initial_pool_size=1 MiB"

    def resource(self, mr, peak_live):
        """What allocates."""
        return mr.CudaAsyncMemoryResource(initial_pool_size=MIB)

    def reserved(self):
        """It does not say."""


#: By the name that ``--with`` takes.
HEAPS = {
    "arenapy": Arenapy,
    "arenapy-class": ArenapyClass,
    "arenapy-driver-pool": ArenapyDriverPool,
    "arenapy-grow": ArenapyGrow,
    "torch": Torch,
    "torch-expandable": TorchExpandable,
    "cupy": Cupy,
    "rmm": Rmm,
    "rmm-arena": RmmArena,
    "rmm-async": RmmAsync,
    "loop": Heap,
}

#: Whose peak reserved arenapy's is to be no more than.
PEERS = ("torch", "rmm", "cupy")
