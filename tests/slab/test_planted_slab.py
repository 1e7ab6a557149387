"""Bugs that were planted in the sources of Slab, one at a time, and that other tests missed.

Each test failed with its bug and passes without.
"""

import pytest
from children import another_process
from helpers import PAGE, poke
from sources import Regions

from arenapy import OutOfMemory, Shared, Slab


def test_a_region_with_a_pending_item_is_not_given_back():
    slab = Slab(PAGE, 2, Shared(), max_count=4)
    first = slab.alloc_many(2)
    second = slab.alloc()
    assert len(slab.regions) == 2
    with another_process():
        del second
        assert slab.stats().pending_bytes == PAGE
        assert slab.trim() == 0 and len(slab.regions) == 2
        slab.check()
    assert slab.trim() > 0 and len(slab.regions) == 1
    slab.check()
    assert slab.stats().pending_bytes == 0 and slab.count == 2
    del first


def test_what_another_process_let_go_of_serves_again():
    """Without anybody asking for figures in between."""
    slab = Slab(PAGE, 2, Shared())
    items = slab.alloc_many(2)
    with another_process():
        items.clear()
        with pytest.raises(OutOfMemory, match="2 pending"):
            slab.alloc()
    assert slab.alloc().nbytes == PAGE
    slab.check()


@pytest.mark.parametrize("many", [False, True])
def test_the_last_item_is_served_and_none_beyond(many):
    for count, most in [(1, 2), (3, 4), (4, 5), (5, 64), (5, 65), (64, 65)]:
        source = Regions()
        slab = Slab(64, count, source, max_count=most)
        items = slab.alloc_many(most) if many else [slab.alloc() for _ in range(most)]
        assert slab.capacity == slab.count == most
        calls = source.calls
        for call in (slab.alloc, lambda slab=slab: slab.alloc_many(1)):
            with pytest.raises(OutOfMemory, match=f"max_count={most}"):
                call()
        assert source.calls == calls, "it may not have more, and the source was asked"
        for item in items:
            poke(item.address, 64, 1)
        slab.check()


def test_sizes_and_alignments_are_checked_on_every_way():
    """The first call makes a Buffer, others take one that was dropped."""
    slab = Slab(100, 4)
    for _ in range(3):
        for refused in (lambda: slab.alloc(101), lambda: slab.alloc(1 << 40)):
            with pytest.raises(ValueError, match="100 bytes of an item"):
                refused()
        with pytest.raises(ValueError, match="align=128"):
            slab.alloc(100, 128)
        slab.alloc(100).release()
        del refused
    assert slab.count == 0


def test_items_are_used_in_the_order_of_growth():
    slab = Slab(64, 3, Regions(), max_count=100)
    items = [slab.alloc() for _ in range(7)]
    ends = [(region.address, region.address + region.nbytes) for region in slab.regions]
    regions = [[a <= item.address < b for a, b in ends].index(True) for item in items]
    assert regions == [0, 0, 0, 1, 1, 1, 2]
    slab.check()


def test_a_trimmed_region_takes_its_items_along():
    """Those that were used, those that never were, and the place in the list of regions."""
    source = Regions()
    slab = Slab(64, 4, source, max_count=1000)
    for _ in range(5):
        items = slab.alloc_many(200)
        assert slab.capacity >= 200
        del items[3:]
        assert slab.trim() > 0
        assert slab.capacity == 4 and len(source.sizes) == 1
        slab.check()
        items += slab.alloc_many(1)
        assert len({item.address for item in items}) == 4
        with pytest.raises(OutOfMemory):
            slab.alloc_many(997)
        slab.check()
        items.clear()
    assert slab.stats().reserved_bytes == sum(region.nbytes for region in slab.regions)
