"""Pool's C calls: what pool_free refuses, and figures, with blocks of the fast path alone."""

import ctypes
import random
from bisect import bisect_left

import pytest
from helpers import c_function, in_threads

from arenapy import SIZE_CLASSES, Host, Pool

KIB, MIB = 1 << 10, 1 << 20
SMALL = (64, 192, 320, 512, 576, 1152, 4 * KIB, 4608, 9 * KIB, 32 * KIB)
LARGE = (40 * KIB, 64 * KIB, MIB)

pool_alloc = c_function("pool_alloc", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
pool_free = c_function("pool_free", ctypes.c_int, ctypes.c_void_p)
pool_usable_size = c_function("pool_usable_size", ctypes.c_size_t, ctypes.c_void_p)


@pytest.mark.parametrize("nbytes", SMALL + LARGE)
def test_free_refuses_each_address_that_is_no_live_block(nbytes):
    pool = Pool(source=Host(prefault=False))
    count = 70 if nbytes < 4 * KIB else 9  # more than a span has
    live = {pool_alloc(pool, nbytes, 64) for _ in range(count)}
    before = pool.stats()
    first, last = min(live), max(live)
    near = {at + by for at in live for by in (1, 8, 63, nbytes // 2, nbytes - 1)}
    around = range(first - 8 * KIB, last + nbytes + 8 * KIB, 64 if nbytes <= 32 * KIB else 4 * KIB)
    for at in near.union(around) - live:
        assert pool_free(pool, at) == -1, hex(at - first)
    assert pool.stats() == before
    for at in live:
        assert pool_free(pool, at) == 0
        assert pool_free(pool, at) == -1, "freed twice"
    assert pool.stats().active_allocations == 0
    pool.check()


@pytest.mark.parametrize("nbytes", SMALL)
def test_free_does_not_believe_what_the_map_says_of_a_block_s_inside(nbytes):
    pool = Pool(source=Host(prefault=False))
    # The pages of these spans become one block, and their descriptors describe other spans.
    small = [pool_alloc(pool, nbytes, 64) for _ in range(2 * MIB // nbytes)]
    for at in small:
        pool_free(pool, at)
    pool.trim(1 << 40)  # merges
    large = pool_alloc(pool, MIB, 64)
    other = pool_alloc(pool, 40 * KIB, 64)
    live = {pool_alloc(pool, nbytes, 64) for _ in range(2 * MIB // nbytes)}
    for at in range(large + 64, large + MIB, 64):
        assert pool_free(pool, at) == -1, hex(at - large)
    for at in live:
        assert pool_free(pool, at) == 0
    assert pool_free(pool, large) == pool_free(pool, other) == 0
    pool.check()


def test_figures_are_exact():
    """As a model has them, after each of some thousand calls of one thread."""
    pool = Pool(source=Host(prefault=False))
    draw = random.Random(20)
    blocks, live, peaks = [], [0] * 21, [0] * 21
    count, active, peak = [0] * 21, [0] * 21, 0
    for step in range(6000):
        grow = draw.random() < (0.7 if step % 2000 < 1000 else 0.3)
        if grow or not blocks:
            nbytes = max(int(2 ** draw.uniform(0, 11)) * 64 + draw.randint(-1, 1), 0)
            at = pool_alloc(pool, nbytes, 64)
            size = pool_usable_size(pool, at)
            assert size >= nbytes
            # A block above 32 KiB may begin behind the start of its pages, which are all counted.
            size = -(-size // 4096) * 4096 if size > 32 * KIB - 64 else size
            k = bisect_left(SIZE_CLASSES, size)
            blocks.append((at, size, k))
            count[k] += 1
            active[k] += 1
            live[k] += size
            peaks[k] = max(peaks[k], live[k])
            peak = max(peak, sum(live))
        else:
            at, size, k = blocks.pop(draw.randrange(len(blocks)))
            assert pool_free(pool, at) == 0
            live[k] -= size
            active[k] -= 1
        if step % 97 == 0:
            stats = pool.stats()
            assert [c.total_allocations for c in stats.classes] == count
            assert [c.active_allocations for c in stats.classes] == active
            assert [c.allocated_bytes for c in stats.classes] == live
            assert [c.peak_bytes for c in stats.classes] == peaks
            assert stats.peak_bytes == peak
    pool.check()


def test_figures_add_up_over_threads_that_free_each_other_s_blocks():
    pool = Pool(source=Host(prefault=False))
    sizes = (64, 192, 4 * KIB, 32 * KIB, 40 * KIB)
    made = [[] for _ in range(3)]

    def allocate(i):
        made[i] += [pool_alloc(pool, n, 64) for n in sizes * 100]

    def free(i):
        for at in made[i - 1]:
            assert pool_free(pool, at) == 0

    for _ in range(3):
        in_threads(*[lambda i=i: allocate(i) for i in range(3)])
        stats = pool.stats()
        assert stats.active_allocations == 1500
        assert stats.allocated_bytes == 300 * sum(sizes)
        pool.check()
        in_threads(*[lambda i=i: free(i) for i in range(3)])
        for blocks in made:
            blocks.clear()
        assert pool.stats().active_allocations == pool.stats().allocated_bytes == 0
        pool.check()
    assert pool.stats().total_allocations == 4500
