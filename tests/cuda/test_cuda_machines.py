"""Bytes that a stream is at work on are nobody else's: every allocator, every kind of memory."""

import pytest
from cuda_acts import Acting
from hypothesis import settings

from arenapy import Bump, Pool, Slab, cuda

MIB = 1 << 20


def machine(name, host, allocator, source, base=Acting):
    def make(self):
        self.driver.attributes[91] = 1  # the device sees registered memory at its address
        return allocator(source())

    return type(name, (base,), {"HOST": host, "make": make})


def run(kind, share=4):
    """A quarter of a profile's examples, ten if it has as many: there is one for each pair."""
    case = kind.TestCase
    most = settings.default.max_examples
    most = max(min(10, most), most // share)
    case.settings = settings(case.settings, max_examples=most)
    case("runTest").runTest()


ALLOCATORS = {
    "Pool": lambda source: Pool(4 * MIB, source),
    "GrowingPool": lambda source: Pool(16 * MIB, source, trim_after=0),
    "Slab": lambda source: Slab(1 << 20, 2, source, max_count=6),
    "Bump": lambda source: Bump(4 * MIB, source),
}
SOURCES = {
    "Device": (False, cuda.Device),
    "GrowingDevice": (False, lambda: cuda.Device(grow=True)),
    "DriverPool": (False, cuda.DriverPool),
    "Pinned": (True, lambda: cuda.Pinned(huge_pages=None)),
    "Managed": (True, cuda.Managed),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.sampled
def test_streams(allocator, source):
    host, make = SOURCES[source]
    run(machine(f"{allocator}On{source}", host, ALLOCATORS[allocator], make))
