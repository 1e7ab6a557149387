"""Eight threads hand blocks of all three allocators to each other, export and release them at once.

What must hold whoever wins: a view that was granted shows what was written until it goes; a
release that was granted closes the Buffer and hands its bytes to nobody who could be seen by that
view; in the end nothing is lost. It is most telling without the GIL; with it, threads switch as
often as they can.
"""

import contextlib
import queue
import random
import threading
import time

import numpy as np
import pytest
from helpers import GIL, in_threads, peek, poke

import arenapy
from arenapy import Bump, PerThread, Pool, Slab

THREADS = 8
TURNS = 600  # of each thread
MEETINGS = 60 if GIL else 250  # of each team
RACES = 24  # between two meetings
BURST = 150  # blocks: more than what threads keep for themselves
ITEM = 3000  # bytes of the slab's
LARGEST = 40_000  # bytes: small blocks of spans, and large ones
MIB = 1 << 20
VIEWS = [
    memoryview,
    np.asarray,
    np.from_dlpack,
    lambda block: memoryview(block[: len(block)]),
    lambda block: block.__dlpack__(),
    lambda block: np.ndarray(block.nbytes, "u1", buffer=block),  # keeps a reference, no export
]


pytestmark = pytest.mark.usefixtures("frequent_switches")


SEEN = "what somebody sees was handed out again"


class Crew:
    """What the threads share: the allocators, and for each thread what it is to look at or free."""

    def __init__(self):
        self.pool = Pool(64 * MIB)
        self.slab = Slab(ITEM, count=64, max_count=20_000)
        self.arenas = []
        self.arena = PerThread(self.new_arena)
        self.seen = [queue.SimpleQueue() for _ in range(THREADS)]
        self.freed = [queue.SimpleQueue() for _ in range(THREADS)]
        self.views = [queue.SimpleQueue() for _ in range(THREADS)]
        self.bursts = [queue.SimpleQueue() for _ in range(THREADS)]

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

    def burst(self, draw, fill):
        """So many of one size that stores which threads share are filled and emptied."""
        heap, nbytes = draw.choice([(self.slab, ITEM), (self.pool, draw.choice([64, 5000]))])
        blocks = [heap.alloc(nbytes) for _ in range(BURST)]
        for block in blocks[::9]:
            poke(block.address, 16, fill)
        self.bursts[draw.randrange(THREADS)].put((blocks, fill))

    def end_burst(self, blocks, fill):
        for block in blocks[::9]:
            assert peek(block.address, 16) == bytes([fill]) * 16, "another's bytes"

    def look(self, draw, block, fill):
        """Export it, and see that it stays as it is while others release and allocate."""
        make = draw.choice(VIEWS)
        try:
            address, view = block.address, make(block)
        except ValueError:  # closed by then, by a release or, in an arena, by its owner's reset
            assert block.closed
            return False
        expected = bytes([fill]) * block.nbytes
        for _ in range(draw.randint(1, 3)):
            assert peek(address, len(expected)) == expected, SEEN
        if make is not VIEWS[-1]:
            with pytest.raises(BufferError):
                block.release()
            assert not block.closed
        self.views[draw.randrange(THREADS)].put((view, address, expected))
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

    def is_whole(self):
        """All was given back."""
        self.pool.check()
        self.slab.check()
        assert self.pool.stats().active_allocations == 0
        assert self.slab.count == self.slab.stats().active_allocations == 0
        for arena in self.arenas:
            arena.reset()
            arena.check()
            assert arena.used == arena.retired == 0


def take(inbox):
    with contextlib.suppress(queue.Empty):
        return inbox.get_nowait()
    return None


def work(crew, me, seed):
    draw = random.Random(seed * THREADS + me)
    looked, results, kept = 0, [], []
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
        if (item := take(crew.views[me])) is not None:
            kept.append(item)
            del item
        if len(kept) > 5:  # dropped here, where it was neither made nor exported
            view, address, expected = kept.pop(draw.randrange(len(kept)))
            assert peek(address, len(expected)) == expected, SEEN
            del view
        if turn % 32 == me:
            crew.burst(draw, turn * THREADS % 250 + 1)
        if (item := take(crew.bursts[me])) is not None:
            crew.end_burst(*item)
            del item
        if turn % 8 == 0:
            results.append(crew.compute(draw))
            del results[:-3]  # some outlive others
        for x, y, total in results:
            assert y.sum() == total and x[0] == 0
        if turn % 16 == me + THREADS:
            crew.keep_house(draw)
        if turn % 100 == 99:
            crew.arena.get().reset()
    return looked


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.full
def test_eight_threads(seed):
    crew = Crew()
    looked = in_threads(*(lambda me=me: work(crew, me, seed) for me in range(THREADS)))
    assert sum(looked) > THREADS * TURNS // 4  # the others were closed by then
    for inbox in (*crew.seen, *crew.freed, *crew.views, *crew.bursts):
        while take(inbox) is not None:
            pass
    crew.is_whole()


# At the same moment ---------------------------------------------------------------------------


class Race:
    """One Buffer and a slice of it, never exported or once, and what became of them."""

    def __init__(self, draw, allocator, number):
        self.allocator = allocator
        self.nbytes = draw.choice([1, 64, ITEM])
        self.fill = number % 250 + 1
        self.block = allocator.alloc(self.nbytes)
        poke(self.block.address, self.nbytes, self.fill)
        if draw.random() < 0.5:
            memoryview(self.block).release()
        self.both = [self.block, self.block[: draw.randint(1, self.nbytes)]]
        self.views = [None, None]
        self.released = [False, False]

    def export(self, which, keep):
        """A view that stays, or two that go at once."""
        with contextlib.suppress(ValueError):
            if keep:
                self.views[which] = memoryview(self.both[which])
            else:
                memoryview(self.both[which])
                np.from_dlpack(self.both[which])

    def release(self, which, wait):
        with contextlib.suppress(BufferError):
            for _ in range(wait):
                pass
            self.both[which].release()
            self.released[which] = True

    def judge(self):
        """What is granted: an export or a release, and never both; returns whether an export."""
        other = self.allocator.alloc(self.nbytes)  # not where somebody sees something
        poke(other.address, self.nbytes, 255)
        of_block, of_part = self.views
        for view in (of_block, of_part):
            if view is not None:
                assert bytes(view) == bytes([self.fill]) * len(view), SEEN
        block, part = self.both
        block_released, part_released = self.released
        assert block.closed == block_released
        assert part.closed == (block_released or part_released)
        assert not (block_released and (of_block or of_part)), "exported and released"
        assert not (part_released and of_part), "a slice exported and released"
        exports = (of_block is not None) + (of_part is not None)
        assert not block.held or block_released or f"held, {exports} live" in repr(block)
        return of_block is not None


class Team:
    """Four threads that all want something of the same Buffers at once."""

    def __init__(self):
        self.arrived = [0] * 4
        self.broken = False
        self.races = []

    def meet(self, me):
        """Wait for the others by looking, so that all go on as soon as the last is here."""
        self.arrived[me] += 1
        while min(self.arrived) < self.arrived[me]:
            if self.broken:
                raise threading.BrokenBarrierError
            time.sleep(0)  # lets others run


def run(team, me, seed, allocators):
    """0 makes, drops and judges, and exports the blocks; 1 the slices; 2 and 3 release them."""
    draw, granted = random.Random(seed), 0
    try:
        for number in range(MEETINGS):
            if me == 0:
                team.races = [Race(draw, allocators.get(), number + i) for i in range(RACES)]
            waits = [draw.randrange(20) for _ in range(RACES)]
            team.meet(me)
            for race, wait in zip(team.races, waits, strict=True):
                if me < 2:
                    race.export(me, wait % 2)
                else:
                    race.release(me - 2, wait)
            race = None
            team.meet(me)
            if me == 0:
                granted += sum([race.judge() for race in team.races])
                team.races = None  # with the views, one of which was made elsewhere
                if isinstance(allocators.get(), Bump):
                    allocators.get().reset()
        return granted
    except threading.BrokenBarrierError:
        return granted  # another one failed, and says why
    except BaseException:
        team.broken = True
        raise


@pytest.mark.parametrize("name", ["pool", "slab", "arena"])
def test_a_release_at_the_moment_of_an_export(name):
    crew = Crew()
    teams = [Team(), Team()]
    allocator = crew.arena if name == "arena" else PerThread(lambda: getattr(crew, name))
    granted = in_threads(
        *(
            lambda team=team, me=me, seed=seed: run(team, me, seed * 4 + me, allocator)
            for seed, team in enumerate(teams)
            for me in range(4)
        )
    )
    assert 0 < sum(granted) < MEETINGS * RACES * len(teams), (
        "one side always won: nothing was raced"
    )
    crew.is_whole()
