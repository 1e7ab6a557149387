"""Where large blocks begin: with their pages, or half a page later, if rounding adds as much."""

import pytest
from pool_rules import KIB, MIB, block_of

from arenapy import Pool

PAGE = 4096


@pytest.mark.parametrize("rounding", ["step", "class"])
@pytest.mark.parametrize("nbytes", [40_000, 100_000, 16_000_000, 9 * MIB + 100])
def test_some_blocks_begin_half_a_page_later(nbytes, rounding):
    pool = Pool(rounding=rounding)
    blocks = [pool.alloc(nbytes) for _ in range(6)]
    slack = block_of(nbytes, rounding) - nbytes
    skews = [block.address % PAGE for block in blocks]
    places = [0, PAGE // 2] if slack >= PAGE // 2 else [0]
    assert set(skews) == set(places)
    assert all(skews.count(place) >= 2 for place in places)
    for block in blocks:
        block.fill(1)
    pool.check()


@pytest.mark.parametrize("nbytes", [40 * KIB, MIB, 64 * MIB])
def test_a_block_that_fills_its_pages_begins_with_them(nbytes):
    pool = Pool()
    assert all(pool.alloc(nbytes).address % PAGE == 0 for _ in range(3))


@pytest.mark.parametrize("align", [128, PAGE, 2 * MIB])
def test_an_alignment_is_kept(align):
    pool = Pool()
    blocks = [pool.alloc(n, align) for n in (40_000, 40_000, 5_000_000, 5_000_000)]
    assert all(block.address % align == 0 for block in blocks)


def test_a_larger_request_gets_the_same_block():
    """Its skew is chosen anew, so that any size of its step fits."""
    pool = Pool()
    keep = [pool.alloc(n) for n in (900_000, 900_000)]
    for n in (900_000, 917_504, 900_001, 917_504 - 64):
        assert block_of(n, "step") == 917_504
        pages = keep.pop().address // PAGE
        keep.append(pool.alloc(n))
        assert keep[-1].address // PAGE == pages
        keep[-1].fill(7)
        assert (keep[-1].address + n - 1) // PAGE < pages + 917_504 // PAGE
        pool.check()


def test_what_is_skipped_counts_as_the_blocks():
    pool = Pool(debug=True)
    blocks = [pool.alloc(900_000) for _ in range(3)]
    stats = pool.stats()
    assert stats.allocated_bytes == 3 * 917_504
    found = {info.address: info for info in pool.blocks() if info.state == "live"}
    for block in blocks:
        assert found[block.address // PAGE * PAGE].nbytes == 917_504
