"""Slab's C calls: which addresses slab_free takes, of items in several regions."""

import ctypes
import random

import pytest
from helpers import c_function
from sources import Adjacent, Regions

from arenapy import Slab

slab_alloc = c_function("slab_alloc_slow", ctypes.c_void_p)
slab_free = c_function("slab_free_slow", ctypes.c_int, ctypes.c_void_p)
SOURCES = {
    "apart": Regions,
    "upwards": lambda: Adjacent(1 << 20),
    "downwards": lambda: Adjacent(1 << 20, upwards=False),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("nbytes", [8, 24, 64, 200])
def test_free_takes_each_live_item_and_no_other_address(nbytes, source):
    slab = Slab(nbytes, 4, SOURCES[source](), 8, max_count=64)
    live = [slab_alloc(slab) for _ in range(64)]
    assert len(slab.regions) > 2 and slab.stats().active_allocations == 64
    random.Random(nbytes).shuffle(live)
    first, last = min(live), max(live)
    near = {at + by for at in live for by in (-nbytes, -1, 1, nbytes // 2, nbytes)}
    for at in near.union({8, first - 4096, last + 4096}).difference(live):
        assert slab_free(slab, at) == -1
    for at in live:
        assert slab_free(slab, at) == 0
        assert slab_free(slab, at) == -1, "freed twice"
    assert slab.stats().active_allocations == 0
    slab.check()
