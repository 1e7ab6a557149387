"""Eight threads hand blocks of all three allocators to each other, export and release them at once.

What must hold whoever wins: a view that was granted shows what was written until it goes; a
release that was granted closes the Buffer and hands its bytes to nobody who could be seen by that
view; in the end nothing is lost. It is most telling without the GIL; with it, threads switch as
often as they can.
"""

import contextlib
import queue
import random
import sys

import numpy as np
import pytest
from support import in_threads, poke

import arenapy
from arenapy import Bump, PerThread, Pool, Slab

THREADS = 8
TURNS = 600  # of each thread
ITEM = 3000  # bytes of the slab's
LARGEST = 40_000  # bytes: small blocks of spans, and large ones
MIB = 1 << 20
VIEWS = [
    memoryview,
    np.asarray,
    np.from_dlpack,
    lambda block: memoryview(block[: len(block)]),
    lambda block: np.ndarray(block.nbytes, "u1", buffer=block),  # keeps a reference, no export
]


@pytest.fixture(autouse=True)
def frequent_switches():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


class Crew:
    """What the threads share: the allocators, and for each thread what it is to look at or free."""

    def __init__(self):
        self.pool = Pool(64 * MIB)
        self.slab = Slab(ITEM, count=64, max_count=20_000)
        self.arenas = []
        self.arena = PerThread(self.new_arena)
        self.seen = [queue.SimpleQueue() for _ in range(THREADS)]
        self.freed = [queue.SimpleQueue() for _ in range(THREADS)]

    def new_arena(self):
        arena = Bump(MIB, max_bytes=16 * MIB)
        self.arenas.append(arena)
        return arena

    def allocate(self, draw, number):
        """(Buffer, what it is filled with): filled by address, so that it was never exported."""
        name = draw.choice(["pool", "pool", "slab", "arena"])
        nbytes = draw.randint(1, ITEM if name == "slab" else LARGEST)
        allocator = self.arena.get() if name == "arena" else getattr(self, name)
        block = allocator.alloc(nbytes)
        fill = number % 250 + 1
        poke(block.address, nbytes, fill)
        return block, fill

    def pass_on(self, draw, block, fill):
        """One thread is to look at it, and perhaps another one to release it meanwhile."""
        first, second = draw.sample(range(THREADS), 2)
        if draw.random() < 0.6:
            self.freed[second].put(block)
        self.seen[first].put((block, fill))

    def look(self, draw, block, fill):
        """Export it, and see that it stays as it is while others release and allocate."""
        make = draw.choice(VIEWS)
        try:
            view = make(block)
        except ValueError:  # closed by then, by a release or, in an arena, by its owner's reset
            assert block.closed
            return False
        expected = bytes([fill]) * block.nbytes
        for _ in range(draw.randint(1, 3)):
            assert bytes(view) == expected, "what somebody sees was handed out again"
        if make is not VIEWS[-1]:
            with pytest.raises(BufferError):
                block.release()
            assert not block.closed
        assert bytes(view) == expected
        return True

    def compute(self, draw):
        """NumPy's own temporaries, in the pool."""
        n = draw.randint(1, 3000)
        with arenapy.numpy_memory(self.pool):
            x = np.arange(n, dtype="f8")
            y = np.sort((x * 2 + 1)[::-1])
        return x, y, float(n * n)

    def keep_house(self, draw):
        what = draw.randrange(5)
        if what == 0:
            self.pool.trim(draw.randrange(4 * MIB))
        elif what == 1:
            self.pool.defragment()
        elif what == 2:
            self.slab.trim()
        elif what == 3:
            stats = self.pool.stats()
            assert stats.active_allocations >= 0 and stats.allocated_bytes <= stats.reserved_bytes
        else:
            self.pool.check()
            self.slab.check()


def take(inbox):
    with contextlib.suppress(queue.Empty):
        return inbox.get_nowait()
    return None


def work(crew, me, seed):
    draw = random.Random(seed * THREADS + me)
    looked, results = 0, []
    for turn in range(TURNS):
        crew.pass_on(draw, *crew.allocate(draw, turn * THREADS + me))
        if (block := take(crew.freed[me])) is not None:
            with contextlib.suppress(BufferError):
                block.release()
                assert block.closed
            del block
        if (item := take(crew.seen[me])) is not None:
            looked += crew.look(draw, *item)
            del item
        if turn % 8 == 0:
            results.append(crew.compute(draw))
            del results[:-3]  # some outlive others
        for x, y, total in results:
            assert y.sum() == total and x[0] == 0
        if turn % 16 == me:
            crew.keep_house(draw)
        if turn % 100 == 99:
            crew.arena.get().reset()
    return looked


@pytest.mark.parametrize("seed", [1, 2])
def test_eight_threads(seed):
    crew = Crew()
    looked = in_threads(*(lambda me=me: work(crew, me, seed) for me in range(THREADS)))
    assert sum(looked) > THREADS * TURNS // 4  # the others were closed by then
    for inbox in (*crew.seen, *crew.freed):
        while take(inbox) is not None:
            pass
    crew.pool.check()
    crew.slab.check()
    assert crew.pool.stats().active_allocations == 0
    assert crew.slab.count == 0
    for arena in crew.arenas:
        arena.reset()
        arena.check()
        assert arena.used == arena.retired == 0
