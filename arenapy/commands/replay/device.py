"""Replays on a GPU's memory: arenapy's allocators and their peers, and the loop that drives them.

What lives here: heaps, behind two calls, `run`, which drives one through a program, and `Watch`,
which sees what it holds. What does not: processes, and what the figures mean (commands/advise and
asv_benches/gpu/replay.py).

Each heap is called as its own users call it from Python; one method call of ours is around every
call. A stream is None, the default stream, or what `native` made of one of arenapy's. Nothing is
written to the memory. Of other packages, whatever is used is imported when a heap is made.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from arenapy.commands.replay.program import Program
from arenapy.trace import OPERATIONS, Trace

__all__ = ["HEAPS", "NOT_INSTALLED", "PEERS", "Heap", "Watch", "run", "script", "streams_of"]

NOT_INSTALLED = "not installed"
MIB = 1 << 20

#: Slot or ~slot, bytes, native stream of each step.
Steps: TypeAlias = Sequence[tuple[int, int, Any]]


class Heap:
    """Nothing: what the replay itself costs."""

    about = "no allocator: the loop"
    package: tuple[str, ...] | None = None  # whose version is shown
    note = ""

    def __init__(self, peak_live: int) -> None:
        pass

    def native(self, stream: Any) -> Any:
        """The stream object of this library for one of arenapy's streams."""
        return stream

    def take(self, nbytes: int, stream: Any) -> Any:
        """Allocate."""
        return 1

    def give(self, block: Any, nbytes: int, stream: Any) -> None:
        """Free."""

    def reserved(self) -> int | None:
        """Bytes that it has of the device now. None: it does not say; the device is asked."""
        return 0

    def close(self) -> None:
        """Give back what would outlive this object. No block is live."""

    @classmethod
    def version(cls) -> str | None:
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
    options: Mapping[str, Any] = {}

    def __init__(self, peak_live: int, **settings: Any) -> None:
        from arenapy import Pool

        self.allocator: Any = Pool(source=self.source(), **{**self.options, **settings})

    def source(self) -> Any:
        """Where it gets memory."""
        from arenapy import cuda

        return cuda.Device()

    def take(self, nbytes: int, stream: Any) -> Any:
        """Allocate."""
        alloc = self.allocator.alloc
        return alloc(nbytes) if stream is None else alloc(nbytes, None, stream)

    def give(self, block: Any, nbytes: int, stream: Any) -> None:
        """Free."""
        block.release()

    def reserved(self) -> int | None:
        """Where there is memory. `stats()` would settle what streams use, and so change it."""
        return sum(int(nbytes) for _, nbytes in self.allocator._reserved())

    @classmethod
    def version(cls) -> str | None:
        """Also of a package that was not installed but is on the path."""
        import arenapy

        return arenapy.__version__


class ArenapyClass(Arenapy):
    """With blocks as large as their class."""

    about = "the same with rounding='class'"
    options = {"rounding": "class"}  # noqa: RUF012  # not changed


class ArenapyDriverPool(Arenapy):
    """Over a memory pool of the driver."""

    about = "arenapy.Pool(source=cuda.DriverPool())"

    def source(self) -> Any:
        """Where it gets memory."""
        from arenapy import cuda

        return cuda.DriverPool()


class ArenapyGrow(Arenapy):
    """Over one range of addresses that grows in place."""

    about = "arenapy.Pool(source=cuda.Device(grow=True))"

    def source(self) -> Any:
        """Where it gets memory."""
        from arenapy import cuda

        return cuda.Device(grow=True)


class ArenapyBump(Arenapy):
    """An arena of the device, which is empty again when nothing is live."""

    about = "arenapy.Bump(source=cuda.Device())"

    def __init__(self, peak_live: int, **settings: Any) -> None:
        from arenapy import Bump

        self.allocator = Bump(source=self.source(), **settings)
        self.live = 0

    def take(self, nbytes: int, stream: Any) -> Any:
        """Allocate."""
        block = super().take(nbytes, stream)
        self.live += 1
        return block

    def give(self, block: Any, nbytes: int, stream: Any) -> None:
        """Free."""
        super().give(block, nbytes, stream)
        self.live -= 1
        if not self.live:
            self.allocator.reset()


class ArenapySlab(Arenapy):
    """A slab of the device."""

    about = "arenapy.Slab(source=cuda.Device())"

    def __init__(self, peak_live: int, **settings: Any) -> None:
        from arenapy import Slab

        self.allocator = Slab(source=self.source(), **settings)


class Driver(Heap):
    """The driver itself, a call for each block, which waits for the device."""

    about = "cuMemAlloc and cuMemFree"

    def __init__(self, peak_live: int) -> None:
        self.driver = importlib.import_module("cuda.bindings.driver")
        self._call("cuInit", 0)
        self.device = self._call("cuDeviceGet", 0)
        self._call("cuCtxPushCurrent", self._call("cuDevicePrimaryCtxRetain", self.device))

    def _call(self, name: str, *arguments: object) -> Any:
        error, *values = getattr(self.driver, name)(*arguments)
        if int(error):
            raise MemoryError(f"{name} failed: error {int(error)} of the driver")
        return values[0] if values else None

    def take(self, nbytes: int, stream: Any) -> Any:
        """Allocate."""
        return self._call("cuMemAlloc", max(1, nbytes))

    def give(self, block: Any, nbytes: int, stream: Any) -> None:
        """Free."""
        self._call("cuMemFree", block)

    def reserved(self) -> int | None:
        """It does not say."""
        return None

    def close(self) -> None:
        """Its context is no longer the current one."""
        self._call("cuCtxPopCurrent")
        self._call("cuDevicePrimaryCtxRelease", self.device)


class Torch(Heap):
    """torch's caching allocator, as torch.cuda.caching_allocator_alloc calls it."""

    about = "torch's caching allocator"
    package = ("torch",)

    def __init__(self, peak_live: int) -> None:
        torch = importlib.import_module("torch")
        torch.cuda.init()
        torch.cuda.set_device(0)
        self.empty_cache = torch.cuda.empty_cache
        self.stats = torch._C._cuda_memoryStats
        self.alloc = torch._C._cuda_cudaCachingAllocator_raw_alloc
        self.delete = torch._C._cuda_cudaCachingAllocator_raw_delete

    def native(self, stream: Any) -> Any:
        """Its handle."""
        return stream.handle

    def take(self, nbytes: int, stream: Any) -> Any:
        """Allocate."""
        return self.alloc(nbytes, stream or 0)

    def give(self, block: Any, nbytes: int, stream: Any) -> None:
        """Free."""
        self.delete(block)

    def reserved(self) -> int | None:
        """The bytes that torch.cuda.memory_reserved returns."""
        return int(self.stats(0)["reserved_bytes"]["all"]["current"])

    def close(self) -> None:
        """All of torch has one cache."""
        self.empty_cache()


class TorchExpandable(Torch):
    """With segments that grow in place."""

    about = "the same with expandable_segments:True"

    def __init__(self, peak_live: int) -> None:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # before the import
        super().__init__(peak_live)


class Cupy(Heap):
    """CuPy's pool; a block is freed when it is dropped."""

    about = "cupy.cuda.MemoryPool()"
    package = ("cupy-cuda13x", "cupy-cuda12x", "cupy")

    def __init__(self, peak_live: int) -> None:
        self.cupy = importlib.import_module("cupy")
        self.pool = self.cupy.cuda.MemoryPool()
        self.cupy.cuda.Device(0).use()

    def native(self, stream: Any) -> Any:
        """A stream of CuPy's with the same handle."""
        make = getattr(self.cupy.cuda.Stream, "from_external", None)  # since CuPy 14
        return make(stream) if make else self.cupy.cuda.ExternalStream(stream.handle)

    def take(self, nbytes: int, stream: Any) -> Any:
        """Allocate."""
        if stream is None:
            return self.pool.malloc(nbytes)
        with stream:
            return self.pool.malloc(nbytes)

    def reserved(self) -> int | None:
        """Used and free."""
        return int(self.pool.total_bytes())

    def close(self) -> None:
        """Its free blocks."""
        self.pool.free_all_blocks()


class Rmm(Heap):
    """RMM's pool, which begins small: as it comes it takes half of the device at once."""

    about = "rmm.mr.PoolMemoryResource, initial_pool_size=1 MiB"
    package = ("rmm-cu13", "rmm-cu12", "rmm")

    def __init__(self, peak_live: int) -> None:
        rmm = importlib.import_module("rmm")
        importlib.import_module("rmm.mr")
        self.counted = rmm.mr.StatisticsResourceAdaptor(rmm.mr.CudaMemoryResource())
        self.pool = self.resource(rmm.mr, peak_live)

    def resource(self, mr: Any, peak_live: int) -> Any:
        """The memory resource that is measured."""
        return mr.PoolMemoryResource(self.counted, initial_pool_size=MIB)

    def native(self, stream: Any) -> Any:
        """A stream of RMM's for the same."""
        return importlib.import_module("rmm.pylibrmm.stream").Stream(stream)

    def take(self, nbytes: int, stream: Any) -> Any:
        """Allocate."""
        if stream is None:
            return self.pool.allocate(nbytes)
        return self.pool.allocate(nbytes, stream)

    def give(self, block: Any, nbytes: int, stream: Any) -> None:
        """Free."""
        if stream is None:
            self.pool.deallocate(block, nbytes)
        else:
            self.pool.deallocate(block, nbytes, stream)

    def reserved(self) -> int | None:
        """The bytes that it has from its upstream resource."""
        return int(self.counted.allocation_counts.current_bytes)

    def close(self) -> None:
        """The pool goes before the streams on which it was used."""
        self.pool = None


class RmmArena(Rmm):
    """RMM's arena. It holds as much as it was told to take: time only."""

    about = "rmm.mr.ArenaMemoryResource"
    note = "takes its arena at once, here twice the peak live: not compared"

    def resource(self, mr: Any, peak_live: int) -> Any:
        """The memory resource that is measured."""
        return mr.ArenaMemoryResource(
            self.counted, arena_size=2 * peak_live // MIB * MIB + 256 * MIB
        )


class RmmAsync(Rmm):
    """The driver's pool, through RMM."""

    about = "rmm.mr.CudaAsyncMemoryResource, initial_pool_size=1 MiB"

    def resource(self, mr: Any, peak_live: int) -> Any:
        """The memory resource that is measured."""
        return mr.CudaAsyncMemoryResource(initial_pool_size=MIB)

    def reserved(self) -> int | None:
        """It does not say."""
        return None


#: By the name that ``--with`` takes.
HEAPS: dict[str, type[Heap]] = {
    "arenapy": Arenapy,
    "arenapy-class": ArenapyClass,
    "arenapy-driver-pool": ArenapyDriverPool,
    "arenapy-grow": ArenapyGrow,
    "arenapy-bump": ArenapyBump,
    "arenapy-slab": ArenapySlab,
    "driver": Driver,
    "torch": Torch,
    "torch-expandable": TorchExpandable,
    "cupy": Cupy,
    "rmm": Rmm,
    "rmm-arena": RmmArena,
    "rmm-async": RmmAsync,
    "loop": Heap,
}

#: The peers whose peak reserved memory is the limit for arenapy's.
PEERS = ("torch", "rmm", "cupy")


def streams_of(made: Trace) -> npt.NDArray[np.int64]:
    """The stream of each allocation of a trace, as a number from 1; 0: the default stream."""
    allocations = made.events[made.events["operation"] == OPERATIONS["alloc"]]
    used = np.unique(allocations["stream"])
    numbers = np.searchsorted(used[used != 0], allocations["stream"])
    return np.asarray(numbers + (allocations["stream"] != 0), "i8")


def script(steps: Program, streams: npt.NDArray[np.int64], native: Sequence[Any]) -> Steps:
    """(slot or ~slot, bytes, native stream) of each step; blocks are freed on their own stream."""
    of_slot: dict[int, Any] = {}
    numbers = iter(streams.tolist())
    out = []
    for slot, nbytes in zip(steps.slots.tolist(), steps.sizes.tolist(), strict=True):
        if slot >= 0:
            of_slot[slot] = native[next(numbers)]
        out.append((slot, nbytes, of_slot[max(slot, ~slot)]))
    return out


def run(
    heap: Heap, lines: Steps, count: int, after: Callable[[int], object] | None = None
) -> float:
    """One pass; seconds. Blocks that are live at its end are freed, untimed."""
    take, give = heap.take, heap.give
    blocks: list[Any] = [None] * count
    sizes: dict[int, tuple[int, Any]] = {}
    start = time.perf_counter()
    if after is None:
        for slot, nbytes, stream in lines:
            if slot >= 0:
                blocks[slot] = take(nbytes, stream)
            else:
                give(blocks[~slot], nbytes, stream)
                blocks[~slot] = None
    else:
        for step, (slot, nbytes, stream) in enumerate(lines):
            if slot >= 0:
                blocks[slot] = take(nbytes, stream)
                after(step)
            else:
                give(blocks[~slot], nbytes, stream)
                blocks[~slot] = None
    seconds = time.perf_counter() - start
    for slot, nbytes, stream in lines:
        sizes[max(slot, ~slot)] = nbytes, stream
    for slot, block in enumerate(blocks):
        if block is not None:
            give(block, *sizes[slot])
    return seconds


class Watch:
    """The most that was reserved, by the allocator's own account and by the device's."""

    def __init__(self, heap: Heap, device_used: Callable[[], int]) -> None:
        self.heap = heap
        self.device_used = device_used
        self.base = device_used()
        self.before: int | None = None
        self.most = self.most_device = self.at = 0

    def __call__(self, step: int) -> None:
        """Read what has changed."""
        now = self.heap.reserved()
        if now is None or now != self.before:
            self.before = now
            device = self.device_used() - self.base
            self.most_device = max(self.most_device, device)
            if now is None:
                now = device
            if now > self.most:
                self.most, self.at = now, step
