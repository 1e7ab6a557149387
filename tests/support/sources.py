"""Sources that a test can look into: where regions lie, which one fails, whether they are gone.

All are lazily mapped private memory, so that the 21st size class costs address space only.
"""

import ctypes
import mmap
import threading
import weakref

from helpers import MAX_ALIGN, round_up

import arenapy
from arenapy.linux import vm

LAZY = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)

#: Sources of one region that grows and shrinks in place.
IN_PLACE = [
    *(
        arenapy.Host(huge_pages=None, prefault=False, grow=True, **options)
        for options in ({}, {"guard": True}, {"fork": "skip"})
    ),
    arenapy.Shared(huge_pages=None, prefault=False, grow=True),
]


def lazy_map(nbytes):
    """(the first multiple of 2 MiB, what keeps the memory mapped) of room for `nbytes` bytes."""
    backing = mmap.mmap(-1, nbytes + MAX_ALIGN, flags=LAZY)
    anchor = (ctypes.c_char * len(backing)).from_buffer(backing)
    return round_up(ctypes.addressof(anchor), MAX_ALIGN), anchor


class Regions:
    """A source of exactly the bytes asked for, `skew` bytes after a multiple of 2 MiB.

    The memory is unmapped when the region is gone, so a byte read too late is a crash. `fail_on`
    names calls (from 1) that raise `OutOfMemory`, and `failing` makes all of them. `failures`
    counts the calls that raised. `sizes` are the bytes of the regions that are still there.
    """

    def __init__(self, skew=0, fail_on=()):
        self.skew = skew
        self.fail_on = frozenset(fail_on)
        self.failing = False
        self.calls = self.failures = 0
        self.sizes = {}
        self.lock = threading.Lock()  # two threads may find an allocator full at once

    def region(self, nbytes):
        with self.lock:
            self.calls += 1
            call = self.calls
            fails = self.failing or call in self.fail_on
            self.failures += fails
        if fails:
            raise arenapy.OutOfMemory(f"planned failure of region {call} ({nbytes} bytes)")
        start, owner = self.place(nbytes)
        self.sizes[call] = nbytes
        weakref.finalize(owner, self.sizes.pop, call).atexit = False
        return arenapy.Region.from_address(start, nbytes, owner=owner)

    def place(self, nbytes):
        start, owner = lazy_map(nbytes + self.skew)
        return start + self.skew, owner


class Owner:
    """What a region of `Adjacent` keeps alive: the memory that all of them share."""

    def __init__(self, memory):
        self.memory = memory


class Adjacent(Regions):
    """Regions that touch, each above the one before or (not `upwards`) below it."""

    def __init__(self, nbytes=1 << 30, upwards=True, fail_on=()):
        super().__init__(0, fail_on)
        start, self.memory = lazy_map(nbytes)
        self.free = [start, start + nbytes]
        self.upwards = upwards

    def place(self, nbytes):
        if self.free[1] - self.free[0] < nbytes:
            raise arenapy.OutOfMemory(f"{nbytes} bytes are more than this source has left")
        if self.upwards:
            self.free[0] += nbytes
            start = self.free[0] - nbytes
        else:
            self.free[1] -= nbytes
            start = self.free[1]
        return start, Owner(self.memory)


class Only:
    """A source that has one region of at most `nbytes` bytes, and then no more."""

    def __init__(self, nbytes):
        self.left = nbytes
        self.inner = Regions()

    def region(self, nbytes):
        if nbytes > self.left:
            raise arenapy.OutOfMemory(f"{nbytes} bytes were asked for, and {self.left} are left")
        self.left = 0
        return self.inner.region(nbytes)


GRANULE = 16 << 10


class Given:
    """A source of one region, for whoever asks."""

    def __init__(self, region):
        self.one = region

    def region(self, nbytes):
        return self.one


class Granules:
    """A source that reserves addresses, whose memory comes and goes by 16 KiB.

    A device does so by 2 MiB. Here a part must have no memory when it gets some.
    """

    grow = True

    def reserve(self, nbytes):
        return GranulesReserved(round_up(nbytes, GRANULE))

    def region(self, nbytes):
        return arenapy.Host(huge_pages=None, prefault=False).region(nbytes)


class GranulesReserved:
    def __init__(self, nbytes):
        self.mapping = vm.reserve(nbytes, align=GRANULE)
        self.nbytes, self.page_size = nbytes, GRANULE
        self.there = set()  # granules that have memory
        self.region = arenapy.Region.from_address(
            self.mapping.address, nbytes, page_size=GRANULE, mapping=self.mapping
        )

    def part(self, offset, nbytes):
        assert nbytes > 0 and (offset | nbytes) % GRANULE == 0 and offset + nbytes <= self.nbytes
        return set(range(offset // GRANULE, (offset + nbytes) // GRANULE))

    def commit(self, offset, nbytes):
        vm.commit(self.region.address + offset, nbytes)
        self.there |= self.part(offset, nbytes)

    def decommit(self, offset, nbytes, stream=None):
        vm.decommit(self.region.address + offset, nbytes)
        self.there -= self.part(offset, nbytes)
