"""`Pool.grow`: in place into what is free behind a block, or into addresses without memory."""

import contextlib
import threading
from random import Random

import numpy as np
import pytest
from cuda_support import a_gpu, new_stream, slowly_fill
from helpers import PAGE
from sources import Granules, Regions

from arenapy import Host, OutOfMemory, Pool, Shared, cuda

KIB, MIB = 1 << 10, 1 << 20
SOURCES = {
    "host": lambda: Host(prefault=False), "shared": lambda: Shared(prefault=False, grow=True),
    "granules": Granules, "regions": Regions,
}  # fmt: skip


@pytest.fixture(params=SOURCES)
def source(request):
    return SOURCES[request.param]()


def filled(block, byte):
    block[:] = bytes([byte]) * block.nbytes
    return block


def has(block, byte, nbytes):
    return bytes(block[:nbytes]) == bytes([byte]) * nbytes


@pytest.mark.parametrize("kind", ["host", "regions"])
def test_into_what_is_free_behind_it(kind):
    pool = Pool(source=SOURCES[kind](), initial_bytes=16 * MIB)
    block, neighbour, last = (filled(pool.alloc(MIB), i) for i in range(3))
    at = block.address
    del neighbour
    before = pool.stats()
    assert pool.grow(block, 2 * MIB - 2 * PAGE) is block and block.address == at
    assert has(block, 0, MIB) and has(last, 2, MIB)
    stats = pool.stats()
    assert stats.pool_misses == before.pool_misses
    assert stats.reserved_bytes == before.reserved_bytes
    assert stats.active_allocations == before.active_allocations
    filled(block, 7)
    assert has(last, 2, MIB)
    pool.check()
    del block
    assert pool.alloc(2 * MIB - 2 * PAGE).address // PAGE == at // PAGE  # all of it is free
    pool.check()


@pytest.mark.parametrize("kind", [Host, Shared])
def test_into_addresses_without_memory(kind):
    pool = Pool(source=kind(prefault=False, grow=True))
    block = filled(pool.alloc(MIB), 1)
    assert pool.grow(block, 64 * MIB) is block
    assert pool.stats().pool_misses == 2 and has(block, 1, MIB)
    assert 64 * MIB <= pool.stats().reserved_bytes <= 66 * MIB
    pool.check()


@pytest.mark.parametrize("kind", [Host, Shared])
def test_into_a_hole_that_trim_left(kind):
    pool = Pool(source=kind(prefault=False, grow=True))
    blocks = [filled(pool.alloc(4 * MIB), i) for i in range(4)]
    blocks[1] = None
    pool.trim()
    assert pool.grow(blocks[0], 7 * MIB) is blocks[0]
    filled(blocks[0], 9)
    assert has(blocks[2], 2, 4 * MIB)
    pool.check()


def test_a_live_block_behind_it_makes_it_move(source):
    pool = Pool(source=source)
    block, behind = filled(pool.alloc(MIB), 1), filled(pool.alloc(MIB), 2)
    grown = pool.grow(block, 3 * MIB)
    assert grown is not block and block.closed and has(grown, 1, MIB) and has(behind, 2, MIB)
    del block  # held, since it was written to
    assert pool.stats().active_allocations == 2
    pool.check()


def test_small_blocks_grow_within_their_slot():
    pool = Pool()
    block = filled(pool.alloc(100), 3)
    before = pool.stats()
    assert pool.grow(block, 128) is block and pool.stats() == before
    grown = pool.grow(block, 129)
    assert block.closed and grown.nbytes == 129 and has(grown, 3, 100)


def test_exports_stay_where_they_are():
    pool = Pool()
    block = filled(pool.alloc(MIB), 1)
    seen = np.frombuffer(block, "u1")
    assert pool.grow(block, 2 * MIB) is block and len(seen) == MIB
    block[MIB:] = bytes([2]) * MIB
    assert seen.min() == seen.max() == 1
    fence = pool.alloc(MIB)
    with pytest.raises(BufferError, match="live exports"):
        pool.grow(block, 3 * MIB)
    assert block.nbytes == 2 * MIB and not block.closed
    del fence, seen


def test_bytes_that_an_export_keeps_are_not_grown_into():
    """The block behind was released, and an array still sees it."""
    pool = Pool()
    block, behind = pool.alloc(MIB), filled(pool.alloc(MIB), 5)
    seen = np.ndarray((MIB,), "u1", buffer=behind)
    behind.release()
    grown = filled(pool.grow(block, 2 * MIB), 1)
    assert grown is not block and seen.min() == seen.max() == 5
    del behind, seen
    pool.check()


@pytest.mark.parametrize("align", [256, 1 << 14, 2 * MIB])
@pytest.mark.parametrize("nbytes", [100, 40 * KIB, MIB])
@pytest.mark.sampled
def test_a_block_that_moves_keeps_its_alignment(source, nbytes, align):
    pool = Pool(source=source)
    skew = [pool.alloc(3 * 64 * KIB + PAGE)]  # so that no place is aligned by chance
    for i in range(4):
        block = filled(pool.alloc(nbytes, align), 1)
        skew.append(pool.alloc(MIB + (i + 1) * PAGE))
        for factor in (10, 20):
            block = pool.grow(block, factor * nbytes)
            assert block.address % align == 0 and has(block, 1, nbytes)
            skew.append(pool.alloc(64 * KIB + PAGE))
    # A Buffer object that is used again asks for no more than it is to.
    del block
    block = filled(pool.alloc(nbytes), 2)
    skew.append(pool.alloc(MIB))
    assert has(pool.grow(block, 10 * nbytes), 2, nbytes)
    pool.check()


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda pool: (pool.alloc(100)[:50], 60), ValueError),
        (lambda pool: (Pool().alloc(100), 200), ValueError),
        (lambda pool: (pool.alloc(100), 99), ValueError),
        (lambda pool: (pool.alloc(100), -1), ValueError),
        (lambda pool: (pool.alloc(100), "5"), TypeError),
        (lambda pool: (None, 5), TypeError),
    ],
)
def test_what_is_no_growth_is_refused(make, error):
    pool = Pool()
    block, nbytes = make(pool)
    before = pool.stats()
    with pytest.raises(error):
        pool.grow(block, nbytes)
    assert pool.stats() == before


def test_a_released_block_is_refused():
    pool = Pool()
    block = pool.alloc(MIB)
    block.release()
    with pytest.raises(ValueError, match="released"):
        pool.grow(block, 2 * MIB)


def test_the_limit_holds(source):
    pool = Pool(4 * MIB, source)
    block = filled(pool.alloc(3 * MIB), 1)
    before = pool.stats()
    with pytest.raises(OutOfMemory):
        pool.grow(block, 5 * MIB)
    after = pool.stats()
    assert has(block, 1, 3 * MIB) and after.allocated_bytes == before.allocated_bytes
    assert after.reserved_bytes <= 4 * MIB
    pool.check()


def test_another_threads_free_blocks_are_grown_into():
    pool = Pool(source=Regions(), initial_bytes=8 * MIB)
    block, behind = pool.alloc(MIB), pool.alloc(MIB)
    gone = [behind]
    del behind
    thread = threading.Thread(target=gone.clear)  # into that thread's cache
    thread.start()
    thread.join()
    assert pool.grow(block, 2 * MIB - 2 * PAGE) is block
    pool.check()


def test_in_debug_mode_and_shared():
    for pool in (Pool(debug=True), Pool(source=Shared())):
        block = filled(pool.alloc(MIB), 1)
        block = filled(pool.grow(block, 1500 * KIB), 2)
        block.release()
        pool.check()
        assert pool.alloc(100).nbytes == 100


def test_a_stream_of_another_pool_is_refused():
    with a_gpu() as gpu:
        pool, other = Pool(source=cuda.Device()), Pool(source=cuda.Device())
        lent = other.alloc(MIB, stream=new_stream(gpu))
        with pytest.raises(ValueError, match="not a block of this pool"):
            pool.grow(lent, 2 * MIB)
        assert not lent.closed
        del lent, pool, other
        gpu.drain()
        assert gpu.errors == []


def test_on_a_device():
    with a_gpu() as gpu:
        pool = Pool(source=cuda.Device(grow=True))
        block = pool.alloc(3 * MIB)
        block.fill(1)
        created = gpu.calls["cuMemCreate"]
        assert pool.grow(block, 20 * MIB) is block and gpu.calls["cuMemCreate"] == created + 8
        s = new_stream(gpu)
        block.record_stream(s)
        slowly_fill(gpu, s, block, 2)
        grown = pool.grow(block, 40 * MIB)  # what is free behind it is not yet free for s
        assert grown is not block and block.closed
        lent = pool.alloc(MIB, stream=s)
        assert pool.grow(lent, 2 * MIB).nbytes == 2 * MIB and lent.closed
        pool.check()
        del block, grown, lent, pool
        gpu.drain()
        assert gpu.errors == []


@pytest.mark.full
def test_blocks_that_grow_at_the_end_do_not_make_the_pool_grow_for_ever():
    random, pool, kept = Random(1), Pool(source=Host(prefault=False)), []
    for _ in range(40_000):
        block = pool.alloc(random.choice([100, 40_000, 300_000]))
        kept.append(block.grow(block.nbytes + 70_000))
        del block
        if len(kept) > 8:
            del kept[random.randrange(8)]
    stats = pool.stats()
    assert stats.reserved_bytes <= 2 * stats.peak_bytes + 2 * MIB
    pool.check()


@pytest.mark.parametrize("source", ["host", "shared", "granules"])
def test_blocks_that_are_seen_and_grow_do_not_make_the_pool_grow_for_ever(source):
    random, pool = Random(1), Pool(16 << 30, source=SOURCES[source]())
    for _ in range(1000):
        block = pool.alloc(random.randrange(50_000, 200_000))
        with memoryview(block), contextlib.suppress(BufferError):
            for _ in range(8):
                pool.grow(block, block.nbytes + random.randrange(20_000, 200_000))
        del block
    stats = pool.stats()
    assert stats.reserved_bytes <= 2 * stats.peak_bytes + 2 * MIB
    pool.check()
