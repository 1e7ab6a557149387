"""One handler for each pool and policy, and nothing left behind by a context."""

import dataclasses
import functools
import gc
import sys
import tracemalloc

import numpy as np
import pytest
from numpy_arrays import MIB, live, small_pool
from sources import Regions

from arenapy import Pool, numpy_memory


@pytest.fixture
def pool():
    return Pool()


def test_attributes(pool):
    memory = numpy_memory(pool)
    assert memory.pool is pool and memory.on_full == "system" and memory.threads is False
    memory = numpy_memory(pool, on_full="error", threads=True)
    assert memory.on_full == "error" and memory.threads is True
    assert repr(pool) in repr(memory)


def test_stats_are_of_the_pool_and_policy():
    pool, other = small_pool(), small_pool()
    with numpy_memory(pool):
        kept = np.empty(2 * MIB, "u1")
    assert numpy_memory(pool).stats().system_allocations == 1
    assert numpy_memory(pool).stats() == numpy_memory(pool, threads=True).stats()
    assert numpy_memory(pool, on_full="error").stats().system_allocations == 0
    assert numpy_memory(other).stats().system_allocations == 0
    stats = numpy_memory(pool).stats()
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.system_live = 0
    assert "system live" in str(stats)
    del kept
    assert stats.system_live == 1 and numpy_memory(pool).stats().system_live == 0


def settled(work):
    """How many objects and bytes of Python's `work` leaves behind, after it was done once."""
    work()
    gc.collect()
    tracemalloc.start()
    try:
        objects, (nbytes, _) = len(gc.get_objects()), tracemalloc.get_traced_memory()
        blocks = sys.getallocatedblocks()
        work()
        gc.collect()
        return (
            len(gc.get_objects()) - objects,
            tracemalloc.get_traced_memory()[0] - nbytes,
            sys.getallocatedblocks() - blocks,
        )
    finally:
        tracemalloc.stop()


def contexts(pool, count):
    memory = numpy_memory(pool)
    for _ in range(count):
        with memory, numpy_memory(pool, on_full="error"):
            np.empty(9)


def threaded(pool, count):
    for _ in range(count):
        numpy_memory(pool, threads=True).install().uninstall()


@pytest.mark.parametrize("work", [contexts, threaded])
@pytest.mark.full
def test_contexts_leave_nothing_behind(work, pool):
    """10,000 of them; a leak of one object each would be 10,000, chance is a handful."""
    objects, nbytes, blocks = settled(functools.partial(work, pool, 10_000))
    assert max(objects, blocks) < 100 and nbytes < 50_000
    assert live(pool) == 0


def test_there_is_one_capsule_for_each_pool_and_policy(pool):
    """Arrays keep it: a capsule for each context would be one for each array."""
    numpy_memory(pool), numpy_memory(pool, on_full="error")
    gc.collect()
    blocks = sys.getallocatedblocks()
    memories = [numpy_memory(pool) for _ in range(1000)]
    each = (sys.getallocatedblocks() - blocks) / 1000
    assert each < 3.5, "more than the object, its dict of threads and its place in the list"
    del memories


@pytest.mark.full
def test_pools_that_were_used_are_freed():
    """With their regions, and with what was made for them."""

    def work():
        for _ in range(150):
            source = Regions()
            pool = Pool(source=source)
            with numpy_memory(pool), numpy_memory(pool, on_full="error"):
                array = np.ones(1000)
            del pool
            assert source.sizes, "freed under an array"
            assert array.sum() == 1000
            del array
            assert not source.sizes, "not freed with its last array"

    # What a leak leaves behind it leaves each time; what else happens in the process, now and then.
    found = [settled(work) for _ in range(3)]
    assert min(max(objects, blocks) for objects, _, blocks in found) < 100, found
