"""A Pool over a source of the user's that reserves addresses: what the pool asks of it."""

import os
from pathlib import Path

import pytest
from helpers import PAGE, poke
from sources import GRANULE, Granules, GranulesReserved, Regions

import arenapy
from arenapy import Bump, Host, Pool, Region
from arenapy.linux import limits, vm

MIB = 1 << 20


class Strict(GranulesReserved):
    """A part gets memory while it has none, and loses it while it has some."""

    def __init__(self, nbytes):
        super().__init__(nbytes)
        self.during_decommit = None

    def commit(self, offset, nbytes):
        assert not self.there & self.part(offset, nbytes)
        super().commit(offset, nbytes)

    def decommit(self, offset, nbytes, stream=None):
        assert stream is None and self.there >= self.part(offset, nbytes)
        if self.during_decommit:
            self.during_decommit()
        super().decommit(offset, nbytes)


class StrictSource(Granules):
    def reserve(self, nbytes):
        self.reservation = Strict(-(-nbytes // GRANULE) * GRANULE)
        return self.reservation


@pytest.fixture
def source():
    return StrictSource()


def test_memory_goes_back_to_the_source_and_comes_again(source):
    pool = Pool(64 * MIB, source)
    for _ in range(3):
        blocks = [pool.alloc(MIB) for _ in range(8)]
        for block in blocks:
            poke(block.address, MIB, 7)
        reserved = pool.stats().reserved_bytes
        assert len(source.reservation.there) * GRANULE == reserved >= 8 * MIB
        del block, blocks[1::2]
        pool.trim()
        assert len(source.reservation.there) * GRANULE == pool.stats().reserved_bytes < reserved
        del blocks
        pool.trim()
        assert not source.reservation.there
        pool.check()


def test_what_the_source_does_not_take_back_stays(source):
    def refuse():
        raise MemoryError("not now")

    pool = Pool(64 * MIB, source)
    pool.alloc(MIB).release()
    source.reservation.during_decommit = refuse
    assert pool.trim() == 0 and pool.stats().idle_bytes >= MIB
    pool.check()
    source.reservation.during_decommit = None
    assert pool.trim() >= MIB and pool.stats().idle_bytes == 0


def test_a_fork_while_the_source_takes_memory_back(source):
    """Both go on: the child in what it then has, with bookkeeping that is whole."""
    pool = Pool(64 * MIB, source)
    kept = pool.alloc(MIB)
    poke(kept.address, MIB, 5)
    pool.alloc(4 * MIB).release()
    child = []

    def fork():
        child.append(os.fork())

    source.reservation.during_decommit = fork
    pool.trim()
    source.reservation.during_decommit = None
    failed = True
    try:
        pool.check()
        for _ in range(3):
            block = pool.alloc(8 * MIB)
            poke(block.address, 8 * MIB, 9)
            assert not kept.address <= block.address < kept.address + MIB
            del block
            pool.trim()
            pool.check()
        failed = False
    finally:
        if child[0] == 0:
            os._exit(failed)
    assert os.waitpid(child[0], 0)[1] == 0


class TwoRegions:
    """Its region is another one at each look."""

    def __init__(self, nbytes, page_size):
        self.regions = []
        for size, page in ((nbytes, PAGE), (MIB, page_size)):
            mapping = vm.reserve(size, align=MIB)
            self.regions.append(
                Region.from_address(mapping.address, size, page_size=page, mapping=mapping)
            )
        self.looks = 0

    @property
    def region(self):
        self.looks += 1
        return self.regions[self.looks > 1]

    def commit(self, offset, nbytes):
        vm.commit(self.regions[0].address + offset, nbytes)

    def decommit(self, offset, nbytes, stream=None):
        vm.decommit(self.regions[0].address + offset, nbytes)


@pytest.mark.parametrize("page_size", [1000, PAGE, 2 * MIB])
@pytest.mark.parametrize("kind", [Pool, Bump])
def test_the_region_that_was_checked_is_the_one_that_is_used(kind, page_size):
    class Source:
        grow = True

        def region(self, nbytes):
            return Host().region(nbytes)

        def reserve(self, nbytes):
            self.made = TwoRegions(nbytes, page_size)
            return self.made

    source = Source()
    allocator = Pool(8 * MIB, source) if kind is Pool else Bump(PAGE, source, 8 * MIB)
    block = allocator.alloc(4 * MIB)
    (region,) = allocator.regions
    assert region is source.made.regions[0]
    assert region.address <= block.address < region.address + region.nbytes
    poke(block.address, 4 * MIB, 3)
    assert not source.made.regions[1].closed
    assert arenapy.handles(allocator.empty(100)).region is region
    allocator.check()


@pytest.mark.parametrize("source", [Host, Regions])
def test_what_growth_counts(source):
    """For the report of `arenapy run`."""
    pool = Pool(source=source())
    blocks = [pool.alloc(3 * MIB) for _ in range(5)]
    reserved = pool.stats().reserved_bytes
    blocks.clear()
    pool.trim()
    nbytes, seconds, cpu_seconds, peak, refusal = pool._growth()
    assert nbytes == peak == reserved >= 15 * MIB and refusal is None
    assert seconds > 0 and cpu_seconds >= 0


def test_a_pool_leaves_addresses_to_others(monkeypatch):
    pool = Pool()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    monkeypatch.setattr(limits, "ADDRESSES", pages * PAGE + 32 * (400 << 20))
    pool.alloc(MIB).release()
    later = [Pool() for _ in range(20)]  # which reserve addresses for bookkeeping alone
    later[0].alloc(MIB).release()
    assert 400 * MIB >= pool.regions[0].nbytes > later[0].regions[0].nbytes == 256 * MIB
    blocks = [pool.alloc(nbytes * MIB) for nbytes in (200, 50, 100, 300)]
    assert sum(region.nbytes for region in pool.regions) < 1 << 30
    for block in blocks:
        poke(block.address, 1, 1)
    pool.check()
