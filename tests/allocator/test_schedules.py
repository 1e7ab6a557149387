"""Schedules: which thread does what, and when, drawn by Hypothesis and carried out by real threads.

A schedule is a list of rounds. In a round of one thread, all is known: what must be served, where,
and what the figures are afterwards. In a round of several they start at a barrier and race, and
what is left is what holds in whatever order they ran: sums, bounds, and that nobody's bytes change.
"""

import gc
import itertools
import queue
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from helpers import GIL, PAGE, peek, poke
from hypothesis import event, given
from hypothesis import strategies as st
from pool_rules import KIB, MIB, block_of
from sources import Regions

from arenapy import Host, OutOfMemory, Pool, Slab

THREADS = 3
ENDS = 64  # bytes at each end of a block that are written and read
SIZES = [0, 1, 64, 65, 1000, 4 * KIB, 4 * KIB + 1, 32 * KIB, 32 * KIB + 1, 100 * KIB, MIB]
COUNT, MAX_COUNT, ITEM = 4, 24, 100  # of the Slabs
# Without a GIL, threads have peaks of their own, whose sum may be more than there ever was at once.
EXACT = GIL


pytestmark = pytest.mark.usefixtures("frequent_switches")


@pytest.fixture(scope="module")
def crew():
    """Threads that are told what to do one by one."""
    threads = [ThreadPoolExecutor(1) for _ in range(THREADS)]
    yield threads
    for thread in threads:
        thread.shutdown()


MAKE = {
    "pool": lambda: Pool(source=Host(prefault=False)),
    "pool by class": lambda: Pool(source=Host(prefault=False), rounding="class"),
    "pool of regions": lambda: Pool(source=Regions()),
    "slab": lambda: Slab(ITEM, COUNT, max_count=MAX_COUNT),
    "slab of regions": lambda: Slab(ITEM, COUNT, Regions(), max_count=MAX_COUNT),
}

OPERATIONS = st.one_of(
    st.tuples(st.just("take"), st.sampled_from(SIZES)),
    st.tuples(st.just("take"), st.sampled_from(SIZES)),
    st.tuples(st.just("take many"), st.lists(st.sampled_from(SIZES), max_size=5)),
    st.tuples(st.sampled_from(["drop", "release"]), st.integers(0, 20)),
    st.tuples(st.sampled_from(["drop", "release"]), st.integers(0, 20)),
    st.tuples(st.sampled_from(["trim", "look", "reset peak"]), st.none()),
)
#: {thread: operation}, mostly of one thread
ROUNDS = st.one_of(
    st.dictionaries(st.integers(0, THREADS - 1), OPERATIONS, min_size=1, max_size=1),
    st.dictionaries(st.integers(0, THREADS - 1), OPERATIONS, min_size=1, max_size=1),
    st.dictionaries(st.integers(0, THREADS - 1), OPERATIONS, min_size=2, max_size=THREADS),
)


def start_of(address, size):
    """Where the pages of a large block begin; where in the first one it does is the pool's."""
    return address // PAGE * PAGE if size > 32 * KIB else address


@dataclass(eq=False)
class Live:
    buffer: object
    address: int
    nbytes: int
    size: int
    fill: int

    @property
    def start(self):
        return start_of(self.address, self.size)


@dataclass
class Schedule:
    """An allocator, and what is known of it."""

    allocator: object
    live: list = field(default_factory=list)
    total: int = 0
    peak: int = 0
    fills: object = field(default_factory=lambda: itertools.cycle(range(1, 256)))
    freed: tuple = ()  # (thread, size, address) of the round before, if that was all of it

    def __post_init__(self):
        self.is_slab = isinstance(self.allocator, Slab)

    @property
    def allocated(self):
        return sum(block.size for block in self.live)

    def size_of(self, nbytes):
        if self.is_slab:
            return self.allocator.stride
        return block_of(nbytes, self.allocator.rounding)

    # What threads do: a list of Buffers that were taken, None if that was refused.

    def take(self, sizes, many):
        if self.is_slab:
            sizes = [min(size, ITEM) for size in sizes]
        try:
            taken = self.allocator.alloc_many(sizes) if many else [self.allocator.alloc(*sizes)]
        except OutOfMemory:
            return None
        assert [buffer.nbytes for buffer in taken] == sizes
        return taken

    def give(self, block, release):
        buffer, block.buffer = block.buffer, None
        if release:
            buffer.release()
            assert buffer.closed
        return []

    def keep_house(self, what):
        if what == "trim":
            self.allocator.trim()
        elif what == "reset peak":
            self.allocator.reset_peak()
        else:
            self.allocator.check()
            listed = [(info.address, info.nbytes) for info in self.allocator.blocks()]
            assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(listed))
            stats = self.allocator.stats()
            assert stats.allocated_bytes <= stats.peak_bytes
        return []

    # Rounds

    def carry_out(self, crew, operations):
        """Let threads do something each, at once, and compare what they leave with the model."""
        barrier = threading.Barrier(len(operations))
        jobs, wanted, going = {}, 0, []
        before = self.allocated
        for thread, (what, argument) in operations.items():
            if what in ("take", "take many"):
                sizes = argument if what == "take many" else [argument]
                wanted += len(sizes)
                jobs[thread] = lambda s=sizes, w=what: self.take(s, w == "take many")
            elif what in ("drop", "release") and self.live:
                block = self.live.pop(argument % len(self.live))
                self.is_whole(block)
                # What is dropped may end in the thread that made it.
                where = thread if EXACT or what == "release" else None
                going.append((where, block.size, block.start))
                jobs[thread] = lambda b=block, w=what: self.give(b, w == "release")
            else:
                jobs[thread] = lambda w=what: self.keep_house(w)

        def job(thread):
            barrier.wait(30)
            return jobs[thread]()

        futures = {thread: crew[thread].submit(job, thread) for thread in jobs}
        results = {thread: future.result(60) for thread, future in futures.items()}
        del futures
        if not EXACT:  # an object that another thread drops ends where its own thread runs next
            for thread in crew:
                thread.submit(int).result(60)
        self.admit(results, operations, wanted, going, before)
        if len(operations) > 1:
            event("a race")

    def admit(self, results, operations, wanted, going, before):
        alone = len(operations) == 1
        resets = any(what == "reset peak" for what, _ in operations.values())
        for thread, taken in results.items():
            if taken is None:
                event("refused")
                room = MAX_COUNT - len(self.live) - wanted
                assert self.is_slab and room - (0 if alone else len(going)) < 0, "there was room"
                wanted -= len(operations[thread][1]) if operations[thread][0] == "take many" else 1
                continue
            if alone and taken and self.freed and operations[thread][0] == "take":
                there, size, address = self.freed
                if (there, size) == (thread, self.size_of(taken[0].nbytes)):
                    event("freed last, served first")
                    assert start_of(taken[0].address, size) == address, "last in, first out"
            for buffer in taken:
                fill, nbytes = next(self.fills), buffer.nbytes
                self.live.append(Live(buffer, buffer.address, nbytes, self.size_of(nbytes), fill))
                for at, length in self.ends(self.live[-1]):
                    poke(at, length, fill)
                self.total += 1
        results.clear()
        self.freed = going[0] if alone and going else ()
        most = before + sum(block.size for block in self.live[len(self.live) - wanted :])
        self.figures_are_right(alone, resets, before, most if wanted else before)

    def figures_are_right(self, alone, resets, before, most):
        allocator, allocated = self.allocator, self.allocated
        allocator.check()
        stats = allocator.stats()
        assert stats.total_allocations == self.total
        assert stats.active_allocations == len(self.live)
        assert stats.allocated_bytes == allocated and stats.pending_bytes == 0
        if alone:
            self.peak = allocated if resets else max(self.peak, allocated)
            least = most = self.peak
        else:
            least = allocated if resets else max(self.peak, allocated)
            most = max(self.peak, most)
        assert least <= stats.peak_bytes
        assert stats.peak_bytes <= most or not EXACT
        self.peak = stats.peak_bytes
        listed = sorted(info.address for info in allocator.blocks() if info.state == "live")
        mine = sorted(self.live, key=lambda block: block.start)
        assert listed == [block.start for block in mine]
        assert all(a.start + a.size <= b.start for a, b in itertools.pairwise(mine))
        if self.is_slab:
            assert allocator.count == len(self.live) <= allocator.capacity <= MAX_COUNT
        else:
            assert stats.pool_hits + stats.pool_misses == self.total
            assert stats.allocated_bytes + stats.idle_bytes == stats.reserved_bytes
        for block in self.live:
            self.is_whole(block)

    def ends(self, block):
        length = min(block.nbytes, ENDS)
        return [(block.address, length), (block.address + block.nbytes - length, length)]

    def is_whole(self, block):
        for at, length in self.ends(block):
            assert peek(at, length) == bytes([block.fill]) * length, "another's bytes"


@pytest.mark.parametrize("name", MAKE)
@given(rounds=st.lists(ROUNDS, min_size=5, max_size=40))
def test_a_schedule_of_threads(crew, name, rounds):
    schedule = Schedule(MAKE[name]())
    for operations in rounds:
        schedule.carry_out(crew, operations)
    # All goes back, on whichever thread, and serves as one piece again.
    for number in range(len(schedule.live)):
        schedule.carry_out(crew, {number % THREADS: ("drop", number)})
    schedule.allocator.trim()
    stats = schedule.allocator.stats()
    assert stats.reserved_bytes - getattr(stats, "padding_bytes", 0) == (
        COUNT * schedule.allocator.stride if schedule.is_slab else 0
    )


# Free running --------------------------------------------------------------------------------

HOLD = [
    lambda buffer: buffer,
    memoryview,
    lambda buffer: buffer.array(),
    lambda buffer: buffer[1:],
]


@pytest.mark.parametrize("name", MAKE)
def test_blocks_with_cookies_go_through_a_queue(name):
    """Makers and takers on threads of their own, and one that looks and gives memory back."""
    allocator = MAKE[name]()
    is_slab = isinstance(allocator, Slab)
    handover = queue.Queue(6)
    errors, taken, done = [], [], threading.Event()
    each, makers = 400, 2

    def guarded(target, *arguments):
        try:
            target(*arguments)
        except BaseException as error:
            errors.append(error)
            done.set()

    def put(thing):
        while not done.is_set():
            try:
                return handover.put(thing, timeout=0.1)
            except queue.Full:
                continue

    def maker(seed):
        draw = random.Random(seed)
        for number in range(each):
            nbytes = draw.randint(2, ITEM) if is_slab else 2 + int(10 ** draw.uniform(0, 5.3))
            cookie = seed << 16 | number
            pair = allocator.alloc_many([nbytes, 2]) if number % 7 == 0 else None
            block = pair.pop(0) if pair else allocator.alloc(nbytes)
            fill = cookie * 31 % 251 + 1
            for at, length in ends(block.address, nbytes):
                poke(at, length, fill)
            taken.append(2 if pair else 1)
            put((draw.choice(HOLD)(block), block.address, nbytes, fill))
            del block, pair
        put(None)

    def taker():
        kept = []
        while not done.is_set():
            try:
                item = handover.get(timeout=0.1)
            except queue.Empty:
                continue
            if item is None:
                return
            kept.append(item)
            del item
            if len(kept) > 3:
                _, address, nbytes, fill = kept.pop(0)
                for at, length in ends(address, nbytes):
                    assert peek(at, length) == bytes([fill]) * length
                del _

    def housekeeper():
        while not done.wait(0.002):
            allocator.trim()
            allocator.check()
            stats = allocator.stats()
            assert stats.allocated_bytes <= min(stats.peak_bytes, stats.reserved_bytes)

    threads = [
        threading.Thread(target=guarded, args=(maker, seed)) for seed in range(1, 1 + makers)
    ]
    threads += [threading.Thread(target=guarded, args=(taker,)) for _ in range(makers)]
    house = threading.Thread(target=guarded, args=(housekeeper,))
    for thread in [*threads, house]:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread does not come to its end"
    done.set()
    house.join(60)
    assert not errors, errors
    gc.collect()
    allocator.check()
    stats = allocator.stats()
    assert stats.active_allocations == 0 and stats.total_allocations == sum(taken)


def ends(address, nbytes):
    length = min(nbytes, ENDS)
    return [(address, length), (address + nbytes - length, length)]
