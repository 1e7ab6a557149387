"""The staging pipeline in three ways: fill a batch on the CPU, copy it, have a kernel compute.

All of them fill with the same function, launch the same kernel and leave the checksum of each batch
on the device; where the memory is, and who waits for whom, is the only difference.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from arenapy import Pool, Slab, cuda
from arenapy.buffer.buffer import Buffer

from .gpu_device import Gpu

__all__ = ["DEPTH", "ROW_BYTES", "Batches", "Pinned", "Plain", "Pooled", "Way", "fill"]

WORD = 4
ROW = 4096  # words that are filled at once; a batch has whole rows
ROW_BYTES = ROW * WORD
POOL_STEP, POOL_SPARE = 8, 2 << 20  # a pool's block is at most an eighth larger; it grows by 2 MiB
ROW_STEP = np.uint32(0x85EBCA6B)
DEPTH = 4  # batches under way: one is filled, one copied, one computed, and one to spare

PATTERN = np.random.default_rng(1998).integers(0, 1 << 32, ROW, dtype=np.uint32)

Words = NDArray[np.uint32]
#: A context that notes a piece of work on a stream: ``with noted("copy", stream): ...``
Noted = Callable[[str, cuda.Stream], AbstractContextManager[object]]


def fill(words: Words, number: int) -> None:
    """Write batch `number`: a pattern, to which each row of each batch adds another number."""
    rows = words.reshape(-1, ROW)
    starts = np.arange(number * len(rows), (number + 1) * len(rows)).astype(np.uint32)
    starts *= ROW_STEP
    np.add(PATTERN, starts[:, None], out=rows)


class Batches:
    """The work of all ways: batches of equal size, rounds of the kernel, memory for the checksums.

    Attributes
    ----------
    rounds : int
        Rounds of the kernel for each word.
    """

    def __init__(self, gpu: Gpu, nbytes: int, most: int) -> None:
        self.gpu = gpu
        self.nbytes = nbytes
        self.most = most
        self.rounds = 0
        self._sums = cuda.Device().region(most * WORD).buffer()  # one of each batch

    def launch(self, stream: cuda.Stream | None, address: int, number: int) -> None:
        """Have batch `number`, which is at `address`, computed."""
        into = self._sums.address + number % self.most * WORD
        self.gpu.launch(stream, address, self.nbytes, self.rounds, into)

    def forget(self) -> None:
        """Set all checksums to zero."""
        self._sums.fill(0)

    def sums(self) -> Words:
        """Return the checksums; the device has to be done."""
        found = np.empty(self.most, np.uint32)
        self._sums.copy_to(found)
        return found


class Way(Protocol):
    """One of the three."""

    @property
    def name(self) -> str:
        """Its name in the table."""

    def run(self, batches: Batches, numbers: Iterable[int]) -> None:
        """Do these batches; the device may still be at work on the last ones."""


class Plain:
    """No allocator: new memory on both sides for each batch, and one thing after the other."""

    name = "plain"

    def run(self, batches: Batches, numbers: Iterable[int]) -> None:
        gpu, nbytes = batches.gpu, batches.nbytes
        for number in numbers:
            words = np.empty(nbytes // WORD, np.uint32)
            fill(words, number)
            address = gpu.allocate(nbytes)
            gpu.copy_in(address, words)
            batches.launch(None, address, number)
            gpu.synchronize()
            gpu.free(address)
            del words


class Pinned:
    """Memory is pinned for each batch, so that the copy is fast, and nothing is kept."""

    name = "pinned anew"

    def run(self, batches: Batches, numbers: Iterable[int]) -> None:
        gpu, nbytes, source = batches.gpu, batches.nbytes, cuda.Pinned(mapped=False)
        for number in numbers:
            item = source.region(nbytes).buffer()
            fill(item.array(dtype=np.uint32), number)
            address = gpu.allocate(nbytes)
            gpu.copy_in(address, item.array(dtype=np.uint32))
            batches.launch(None, address, number)
            gpu.synchronize()
            gpu.free(address)
            del item  # and its region with it


def _unnoted(what: str, stream: cuda.Stream) -> AbstractContextManager[object]:
    return nullcontext()


class Pooled:
    """A slab of pinned items, a pool of the device, a stream for copies and one for kernels.

    Nobody waits here. An item and a block are dropped as soon as their work was given to a stream;
    the allocators hand them out again once the streams have done with them. A slab without a free
    item waits for one, which keeps the CPU from running ahead. A pool without a free block lets the
    stream that copies wait for the one that computes, and the CPU goes on.
    """

    name = "arenapy"

    def __init__(self, nbytes: int) -> None:
        self.copying, self.computing = cuda.Stream(), cuda.Stream()
        self.staging = Slab(nbytes, DEPTH, cuda.Pinned(mapped=False))
        # Limited, so that the stream that copies waits for a block and does not get a new one.
        most = DEPTH * (nbytes + nbytes // POOL_STEP) + POOL_SPARE
        self.pool = Pool(most, cuda.Device(), stream=self.copying)
        self.pool.prewarm({nbytes: DEPTH})

    def run(self, batches: Batches, numbers: Iterable[int], noted: Noted = _unnoted) -> None:
        """Run the batches as the other ways do. `noted` gets what each stream does."""
        copying, computing = self.copying, self.computing
        for number in numbers:
            item = self.staging.alloc()
            fill(item.array(dtype=np.uint32), number)
            block = self.pool.alloc(batches.nbytes)
            with noted("copy", copying):
                block.copy_from(item, stream=copying)
            computing.wait(copying)
            block.record_stream(computing)
            with noted("kernel", computing):
                batches.launch(computing, block.address, number)
            # Not while the next one is filled: until then they are this function's, not free.
            del item, block

    def items(self) -> list[Buffer]:
        """All of its pinned memory, once no stream uses it."""
        return self.staging.alloc_many(DEPTH)
