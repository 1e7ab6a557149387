"""Streams that come and go: what a pool reserves, and what a stream never seen before costs.

    python asv_benches/gpu/report.py --only streams [--quick]

on a machine that has a GPU; who is not installed is left out. Each of 3,000 streams takes a block
of 1 MiB, fills it, drops it and is gone. Then 200 streams that stay take a block of 256 bytes each.
CuPy and torch do the same on streams of their own. Those of torch come from a pool of 32, which it
never destroys, so it shows what reuse costs, and not what streams that come do.

Time is what an allocation and its drop on a new stream take beyond the stream. The fill is in the
count of what is reserved only: it is the device's time.
"""

import gc
import statistics
import time

import arenapy
from arenapy import cuda
from asv_benches.gpu.latency import imported
from asv_benches.support.rounds import Line
from asv_benches.support.sizes import MIB

REQUESTS = 3000
STAYING = 200
SMALL = 256


class Ours:
    name = "arenapy.Pool"

    def __init__(self):
        self.pool = arenapy.Pool(4 << 30, cuda.Device())
        self.stream = cuda.Stream

    def take(self, nbytes, stream):
        return self.pool.alloc(nbytes, stream=stream)

    def fill(self, block, nbytes, stream):
        block.fill(1, stream=stream)

    def reserved(self):
        return self.pool.stats().reserved_bytes

    def metadata(self):
        return self.pool.stats().metadata_bytes


class Cupy:
    name = "CuPy"

    def __init__(self):
        self.cupy = imported("cupy")
        if self.cupy is None:
            raise ImportError("cupy")
        self.pool = self.cupy.cuda.MemoryPool()

    def stream(self):
        return self.cupy.cuda.Stream(non_blocking=True)

    def take(self, nbytes, stream):
        with stream:
            return self.pool.malloc(nbytes)

    def fill(self, block, nbytes, stream):
        block.memset_async(1, nbytes, stream)

    def reserved(self):
        return self.pool.total_bytes()


class Torch:
    name = "torch"

    def __init__(self):
        self.torch = imported("torch")
        if self.torch is None or not self.torch.cuda.is_available():
            raise ImportError("torch")
        self.torch.cuda.empty_cache()
        self.before = self.torch.cuda.memory_reserved()

    def stream(self):
        return self.torch.cuda.Stream()

    def take(self, nbytes, stream):
        with self.torch.cuda.stream(stream):
            return self.torch.empty(nbytes, dtype=self.torch.uint8, device="cuda")

    def fill(self, block, nbytes, stream):
        with self.torch.cuda.stream(stream):
            block.fill_(1)

    def reserved(self):
        return self.torch.cuda.memory_reserved() - self.before


LIMITS = {"reserved": 64.0, "metadata": 1.0, "time": 20.0, "staying": 4.0}


def one_after_another(peer, n):
    """The most bytes that were reserved."""
    most = 0
    for i in range(n):
        stream = peer.stream()
        block = peer.take(MIB, stream)
        peer.fill(block, MIB, stream)
        del block, stream
        if i % 50 == 0:
            most = max(most, peer.reserved())
    return max(most, peer.reserved())


def seconds(peer, n, use):
    """For each of n streams, with a block taken and dropped or without."""
    start = time.perf_counter()
    for _ in range(n):
        stream = peer.stream()
        if use:
            peer.take(MIB, stream)
        del stream
    return (time.perf_counter() - start) / n


def staying(peer):
    """Bytes that are reserved for streams that have used one small block each."""
    before, streams = peer.reserved(), [peer.stream() for _ in range(STAYING)]
    for stream in streams:
        peer.fill(peer.take(SMALL, stream), SMALL, stream)
    return peer.reserved() - before


def lines(quick):
    """Every figure, ours beside the budgets."""
    for kind in (Ours, Cupy, Torch):
        try:
            peer = kind()
        except ImportError:
            continue
        limits = LIMITS if kind is Ours else {}
        gc.collect()
        most = one_after_another(peer, REQUESTS)
        what = f"{peer.name}, {REQUESTS} streams one after another"
        yield Line("streams", f"{what}, reserved", most / MIB, "MiB", limits.get("reserved"))
        if kind is Ours:
            metadata = peer.metadata() / MIB
            yield Line("streams", f"{what}, metadata", metadata, "MiB", limits["metadata"])
        rounds = [
            seconds(peer, 200, True) - seconds(peer, 200, False) for _ in range(5 if quick else 21)
        ]
        what = f"{peer.name}, a block on a new stream"
        yield Line("streams", what, statistics.median(rounds) * 1e6, "us", limits.get("time"))
        what = f"{peer.name}, {STAYING} streams of {SMALL} bytes, reserved"
        yield Line("streams", what, staying(kind()) / MIB, "MiB", limits.get("staying"))
