"""Pool and Slab through the C interface: several threads without the GIL, and what they may do."""

import ctypes
import gc
import mmap
import os
import signal
import threading
import time

import pytest
from downstream_of_arenapy.traffic import Shop

import arenapy
from arenapy import Host, Pool, Shared, Slab

KIB, MIB = 1 << 10, 1 << 20
THREADS = 4
SIZES = [1, 64, 100, 4 * KIB, 4 * KIB + 1, 32 * KIB, 32 * KIB + 1, MIB, 40 * MIB]


class Regions:
    """A user's source: each region is memory of its own, unmapped when the region is gone."""

    def region(self, nbytes):
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE)
        anchor = ctypes.c_char.from_buffer(memory)
        return arenapy.Region.from_address(ctypes.addressof(anchor), nbytes, owner=anchor)


class Touching:
    """Regions that touch, each above the one before or (not `upwards`) below it."""

    def __init__(self, upwards):
        self.memory = mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE)
        self.anchor = ctypes.c_char.from_buffer(self.memory)
        self.left = [ctypes.addressof(self.anchor), ctypes.addressof(self.anchor) + 32 * MIB]
        self.upwards = upwards

    def region(self, nbytes):
        if self.upwards:
            self.left[0] += nbytes
            start = self.left[0] - nbytes
        else:
            self.left[1] -= nbytes
            start = self.left[1]
        return arenapy.Region.from_address(start, nbytes, owner=self.anchor)


MAKE = {
    "pool": lambda: Pool(),
    "pool by class": lambda: Pool(rounding="class"),
    "pool of regions": lambda: Pool(source=Regions()),
    "limited pool": lambda: Pool(max_bytes=3 * MIB),
    "debug pool": lambda: Pool(debug=True),
    "slab": lambda: Slab(4 * KIB, 64, max_count=1 << 14),
    "packed slab": lambda: Slab(40, 1, align=8, max_count=1 << 12),
    "slab of regions": lambda: Slab(300, 8, Regions(), max_count=1 << 12),
    "debug slab": lambda: Slab(500, 1 << 10, debug=True),
}


@pytest.fixture(params=MAKE)
def allocator(request):
    return MAKE[request.param]()


@pytest.fixture
def limited(request):
    """Whether there may be no memory for a block."""
    return request.node.callspec.params["allocator"] == "limited pool"


def most_of(allocator):
    return allocator.item_size if isinstance(allocator, Slab) else 300 * KIB


def run_all(*targets):
    """Run each target on a thread of its own, and raise what any of them raised."""
    errors, results = [], []

    def guarded(target):
        try:
            results.append(target())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread does not come to its end"
    if errors:
        raise errors[0]
    return results


def all_is_back(allocator, taken):
    """Nothing is live, and every allocation was counted once."""
    allocator.check()
    stats = allocator.stats()
    assert stats.total_allocations == taken
    assert stats.active_allocations == stats.allocated_bytes == stats.pending_bytes == 0
    padding = getattr(stats, "padding_bytes", 0)
    assert stats.idle_bytes + padding == stats.reserved_bytes
    if isinstance(allocator, Pool):
        assert stats.pool_hits + stats.pool_misses == taken
        assert sum(one.total_allocations for one in stats.classes) == taken
        allocator.trim()
        assert allocator.stats().reserved_bytes == 0
    else:
        allocator.trim()
        assert allocator.stats().regions == 1
    allocator.check()


@pytest.mark.parametrize("cells", [0, 1, 60])
def test_threads_trade_blocks_without_the_gil(allocator, limited, cells):
    """Few cells: almost every block is freed by another thread than its own."""
    shop = Shop(allocator, cells)
    aligns = 1 if isinstance(allocator, Slab) else 4 * KIB
    rounds = 2000 if allocator.stats().reserved_bytes == 0 else 20_000
    taken = run_all(
        *[
            lambda seed=seed: shop.trade(seed, rounds, most_of(allocator), aligns, limited)
            for seed in range(1, THREADS + 1)
        ]
    )
    assert shop.drain() <= cells
    all_is_back(allocator, sum(taken))


def test_housekeeping_meets_traffic(allocator):
    """One thread gives memory back and looks at everything, while others allocate and free."""
    shop = Shop(allocator, 40)
    taken = []
    before = allocator.stats().total_allocations

    def trade(seed):
        taken.append(shop.trade(seed, 0, most_of(allocator), 1, True))

    def keep_house():
        try:
            # On a busy machine until there was traffic: each trim makes the next trade wait for a
            # growth, which wants the GIL.
            end = time.monotonic() + 0.5
            late = end + 30
            while time.monotonic() < end or (
                allocator.stats().total_allocations <= before + 200 and time.monotonic() < late
            ):
                allocator.trim()
                allocator.check()
                stats = allocator.stats()
                assert 0 <= stats.allocated_bytes <= stats.peak_bytes
                assert stats.allocated_bytes <= stats.reserved_bytes
                listed = [(info.address, info.nbytes) for info in allocator.blocks()]
                assert listed == sorted(listed)
                ends = [address + nbytes for address, nbytes in listed]
                assert all(end <= start for end, (start, _) in zip(ends, listed[1:], strict=False))
        finally:
            shop.stop()

    run_all(*[lambda seed=seed: trade(seed) for seed in range(1, THREADS)], keep_house)
    shop.drain()
    assert sum(taken) > 100
    all_is_back(allocator, sum(taken))


def test_python_and_c_meet(allocator, limited):
    """Blocks by `alloc` on some threads, by C calls on others, of one allocator."""
    shop = Shop(allocator, 8)
    counts = []

    def python(seed):
        kept, count = [], 0
        for number in range(1500):
            try:
                block = allocator.alloc(24 + number * seed % (most_of(allocator) - 23))
            except arenapy.OutOfMemory:
                assert limited
                continue
            count += 1
            array = block.array()
            array[:24] = seed
            kept.append(array)
            if len(kept) > 10:
                assert (kept.pop(number % 10)[:24] == seed).all()
        assert all((array[:24] == seed).all() for array in kept)
        counts.append(count)

    def c(seed):
        counts.append(shop.trade(seed, 5000, most_of(allocator), 1, limited))

    run_all(*[lambda s=s: (python if s % 2 else c)(s) for s in range(1, THREADS + 1)])
    shop.drain()
    gc.collect()
    all_is_back(allocator, sum(counts))


@pytest.mark.parametrize("source", [Regions, lambda: Host(prefault=False)])
def test_a_live_block_is_found_while_regions_come_and_go(source):
    """Which region a pointer is in is looked up while another thread inserts and removes some."""
    pool = Pool(source=source())
    shop = Shop(pool, 4)
    kept = [pool.alloc(100)]
    taken = []

    def come_and_go():
        try:
            for _ in range(150):
                kept.extend(pool.alloc(3 * MIB) for _ in range(50))
                del kept[1:]
                pool.trim()
        finally:
            shop.stop()

    run_all(lambda: taken.append(shop.trade(1, 0, 4 * KIB, 1, True)), come_and_go)
    shop.drain()
    kept.clear()
    all_is_back(pool, 1 + 150 * 50 + taken[0])


# One thread ----------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("rounding", ["step", "class"])
def test_a_double_free_is_refused_and_changes_nothing(nbytes, rounding):
    pool = Pool(rounding=rounding)
    shop = Shop(pool)
    neighbours = [shop.take_one(nbytes), shop.take_one(nbytes)]
    block = shop.take_one(nbytes)
    assert shop.usable_size(block) >= nbytes
    assert shop.give_one(block) == 0
    before = pool.stats()
    assert shop.give_one(block) == -1 and shop.usable_size(block) == 0
    assert pool.stats() == before
    pool.check()
    assert shop.take_one(nbytes) == block != shop.take_one(nbytes), "it is in no list twice"
    assert [shop.give_one(one) for one in neighbours] == [0, 0]
    pool.check()
    pool.trim()
    assert [shop.give_one(one) for one in neighbours] == [-1, -1], "nor after its memory went"


@pytest.mark.parametrize("nbytes", SIZES)
def test_what_is_no_block_is_refused(nbytes):
    pool, other = Pool(), Pool()
    shop = Shop(pool)
    block = shop.take_one(nbytes)
    elsewhere = other.alloc(nbytes)
    region = pool.regions[0]
    wrong = [0, 1, block + 1, block - 1, block + 64, block + max(nbytes, 64) // 2 + 1, block - 64,
             elsewhere.address, id(pool), region.address - 1, region.address + region.nbytes,
             2**64 - 1]  # fmt: skip
    before = pool.stats()
    for address in wrong:
        assert shop.give_one(address) == -1, hex(address - block)
        assert shop.usable_size(address) == 0
    assert pool.stats() == before
    assert shop.give_one(block) == 0
    pool.check()


@pytest.mark.parametrize("nbytes", SIZES)
def test_usable_size_is_the_blocks(nbytes):
    pool = Pool()
    shop = Shop(pool)
    block = shop.take_one(nbytes)
    (info,) = [info for info in pool.blocks() if info.state == "live"]
    skipped = block - info.address
    assert 0 <= skipped < 4096 and shop.usable_size(block) == info.nbytes - skipped >= nbytes
    assert info.nbytes == pool.stats().allocated_bytes
    ctypes.memset(block, 1, min(info.nbytes, MIB))
    assert shop.give_one(block) == 0
    pool.check()


@pytest.mark.parametrize("align", [1, 2, 64, 128, 4 * KIB, 8 * KIB, 64 * KIB, 2 * MIB])
@pytest.mark.parametrize("nbytes", SIZES)
def test_alignment(nbytes, align):
    pool = Pool()
    shop = Shop(pool)
    blocks = [shop.take_one(nbytes, align) for _ in range(3)]
    assert all(block and block % align == 0 for block in blocks)
    pool.check()
    assert shop.give_all(blocks) == 3
    pool.check()


def test_impossible_requests_are_null():
    pool = Pool()
    shop = Shop(pool)
    before = pool.stats()
    for nbytes in (2**63 - 1, 2**63, 2**64 - 1, 1 << 50):
        assert shop.take_one(nbytes) == 0
    for align in (0, 3, 65, 4 << 20, 2**63):
        assert align == 0 or shop.take_one(64, align) == 0
    after = pool.stats()
    assert after.total_allocations == before.total_allocations == after.active_allocations == 0
    pool.check()


def test_a_limit_is_null_and_calls_no_hook():
    called = []
    pool = Pool(4 * MIB, on_oom=lambda nbytes: called.append(nbytes) or False)
    shop = Shop(pool)
    blocks = shop.take_all(100 * KIB)
    whole = max(map(shop.usable_size, blocks))  # of one that begins with its pages
    assert len(blocks) == 4 * MIB // whole > 30 and not called
    assert shop.take_one(4 * MIB + 1) == 0
    for block in blocks:
        assert shop.give_checked(block) == 0
    pool.check()
    assert shop.take_one(3 * MIB), "it is all merged again"


def test_slab_double_frees_and_strangers():
    for align, size in ((None, 100), (8, 24), (1, 3), (4096, 5000)):
        slab = Slab(size, 5, align=align, max_count=11)
        shop = Shop(slab)
        items = [shop.take_one(size) for _ in range(11)]
        assert all(items) and len(set(items)) == 11 and shop.take_one(size) == 0
        assert slab.count == 11 and slab.capacity == 11
        stray = items[3] + (1 if slab.stride > 1 else 0)
        strangers = [0, 1, stray, id(slab), 2**64 - 1, max(items) + slab.stride]
        assert [shop.give_one(one) for one in strangers if one not in items] == [-1] * 6
        assert shop.give_one(items[4]) == 0
        before = slab.stats()
        assert shop.give_one(items[4]) == -1 and slab.stats() == before
        slab.check()
        assert shop.take_one(size) == items[4] and shop.take_one(size) == 0
        assert shop.give_all(items) == 11 and shop.give_all(items) == 0
        slab.check()
        assert slab.count == 0 and slab.stats().total_allocations == 12


@pytest.mark.parametrize("upwards", [True, False])
@pytest.mark.parametrize("name", ["slab", "pool"])
def test_where_regions_touch_each_side_is_known(name, upwards):
    """What begins one past the end of a region is the first of another one."""
    size, count = (64, 256) if name == "slab" else (2 * MIB, 8)
    source = Touching(upwards)
    if name == "slab":
        allocator = Slab(size, 64, source, align=1, max_count=count)
    else:
        allocator = Pool(source=source)
    shop = Shop(allocator)
    blocks = sorted(shop.take_one(size) for _ in range(count))
    assert blocks == list(range(blocks[0], blocks[0] + count * size, size)), "all of them touch"
    assert allocator.stats().regions == (3 if name == "slab" else 8)
    for order in (blocks, blocks[::-1], blocks[::2] + blocks[1::2]):
        for block in order:
            assert shop.give_one(block) == 0
            assert shop.give_one(block) == -1
        assert shop.give_one(blocks[0] - size) == shop.give_one(blocks[-1] + size) == -1
        allocator.check()
        assert sorted(shop.take_one(size) for _ in range(count)) == blocks
    assert shop.give_all(blocks) == count


def test_one_past_the_last_item_there_is_none():
    """Not even where that is beyond what the bitmap has: the counts fill its pages."""
    for count in (64, 128, 8192, 8192 + 64, 16384 + 8192):
        slab = Slab(64, count, align=1, max_count=2 * count)
        shop = Shop(slab)
        items = [shop.take_one(64) for _ in range(2 * count)]
        ends = [max(items[:count]) + 64, max(items[count:]) + 64]
        for known in (items[0], items[-1]):
            for end in ends:
                assert shop.give_one(known) == 0, "from now on its region is looked at first"
                assert end in items or shop.give_one(end) == -1
                assert shop.take_one(64) == known
        slab.check()
        assert shop.give_all(items) == 2 * count


@pytest.mark.parametrize("make", [lambda: Pool(source=Shared()), lambda: Slab(8192, 4, Shared())])
def test_a_block_that_another_process_sees_is_freed_once(make):
    """Given back it is pending, and no longer live: a second free of it is refused."""
    allocator = make()
    shop = Shop(allocator)
    block = shop.take_one(8192)
    size = allocator.stats().allocated_bytes
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.read(read, 1)
        os._exit(0)
    try:
        assert shop.give_one(block) == 0
        stats = allocator.stats()
        assert (stats.allocated_bytes, stats.pending_bytes) == (0, size)
        assert shop.give_one(block) == -1, "a double free"
        assert allocator.stats() == stats
    finally:
        os.write(write, b"x")
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)
    stats = allocator.stats()
    assert stats.allocated_bytes == stats.pending_bytes == stats.active_allocations == 0
    allocator.check()


# Fork ----------------------------------------------------------------------------------------


def in_child(call, seconds=30):
    """Run `call` in a forked child, which has so long: a lock nobody holds is never released."""
    child = os.fork()
    if not child:
        status = 1
        try:
            signal.alarm(seconds)
            call()
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("name", ["pool", "pool of regions", "limited pool", "slab"])
def test_a_fork_amid_traffic_without_the_gil(name):
    allocator = MAKE[name]()
    shop = Shop(allocator, 20)
    errors = []

    def trade(seed):
        try:
            shop.trade(seed, 0, most_of(allocator), 1, True)
        except BaseException as error:
            errors.append(error)

    def child():
        allocator.check()
        shop.drain()  # a copy of what the threads left there; they are not in this process
        mine = Shop(allocator, 5)
        block = allocator.alloc(1000 if isinstance(allocator, Pool) else 40)
        block.fill(1)
        assert mine.trade(9, 2000, most_of(allocator), 1, True) > 0
        mine.drain()
        del block
        allocator.trim()
        allocator.check()

    threads = [threading.Thread(target=trade, args=(seed,)) for seed in range(1, THREADS)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(25):
            in_child(child)
    finally:
        shop.stop()
        for thread in threads:
            thread.join()
    assert not errors, errors
    shop.drain()
    allocator.check()
    assert allocator.stats().active_allocations == 0


@pytest.mark.parametrize("source", [Shared, lambda: Host(fork="skip")])
@pytest.mark.parametrize("make", [lambda s: Pool(source=s), lambda s: Slab(64, 100, s)])
def test_where_the_child_has_no_memory_its_calls_are_refused(make, source):
    allocator = make(source())
    shop = Shop(allocator)
    block = shop.take_one(64)
    assert shop.take_one(64)

    def child():
        assert shop.take_one(64) == 0
        assert shop.give_one(block) == -1

    in_child(child)
    assert shop.give_one(block) == 0
    allocator.check()
