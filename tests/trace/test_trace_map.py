"""The map of a trace: no address lost, no two blocks on top of each other, every byte accounted."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arenapy.trace.map import CELLS, axis, chosen, image
from arenapy.trace.timeline import Blocks

MIB = 1 << 20
MOST = 2**64 - 1


def extents(rows):
    address, nbytes = zip(*rows, strict=True) if rows else ((), ())
    return np.array(address, "u8"), np.array(nbytes, "i8")


BASES = st.sampled_from([0, 4096, 1 << 33, 0x7F00_0000_0000, 2**63, MOST - (1 << 20)])
ROWS = st.lists(
    st.tuples(st.tuples(BASES, st.integers(0, 1 << 19)).map(sum), st.integers(0, 1 << 19)),
    max_size=12,
)


@given(ROWS)
def test_every_address_has_its_place(rows):
    """Bytes keep their order and, within a block, their distances; far gaps are cut."""
    address, nbytes = extents(rows)
    found = axis(address, nbytes)
    used = [(a, min(a + n, MOST)) for a, n in rows if n]
    if not used:
        assert found.height == 0
        assert found.place(address).tolist() == [0] * len(rows)
        return
    bottom = found.place(np.array([a for a, _ in used], "u8"))
    top = found.place(np.array([b for _, b in used], "u8"))
    assert (top - bottom).tolist() == [b - a for a, b in used]
    assert bottom.min() == 0 and top.max() == found.height
    ends = sorted({end for pair in used for end in pair})
    places = found.place(np.array(ends, "u8"))
    assert (np.diff(places) > 0).all()  # what is apart stays apart, in order
    # All bytes that are used, and gaps that take no more than these; those that are cut, a quarter.
    total, last, gaps = 0, 0, []
    for begin, end in sorted(used):
        gaps.append(max(begin - last, 0))
        total += max(end - max(begin, last), 0)
        last = max(last, end)
    small = 0
    for gap in sorted(gaps[1:]):
        small += gap if small + gap <= total else 0
    assert total + small <= found.height <= total + small + total / 4 + len(used)


@given(ROWS, st.lists(st.integers(0, MOST), max_size=10))
def test_places_never_go_back(rows, others):
    """Also those of addresses that no block has: of memory that was reserved and never used."""
    found = axis(*extents(rows))
    places = found.place(np.array(sorted(others), "u8"))
    assert (np.diff(places) >= 0).all()
    assert ((places >= 0) & (places <= found.height)).all()


@st.composite
def disjoint(draw):
    """Blocks as an allocator makes them: at one moment no two at the same address."""
    live, rows, now = {}, [], 0.0
    for slot in draw(st.lists(st.integers(0, 5), max_size=40)):
        now += draw(st.floats(0.01, 3))
        if slot in live:
            rows.append((slot << 20, *live.pop(slot), now))
        else:
            live[slot] = draw(st.integers(1, MIB)), now
    rows += [(slot << 20, n, start, now) for slot, (n, start) in live.items()]
    return rows, now


@given(disjoint())
def test_an_image_has_all_bytes_for_all_their_time(made):
    """The sum of all cells is the area of the blocks, and no cell is more than full."""
    rows, last = made
    address, nbytes = extents([row[:2] for row in rows])
    left, right = (np.array([row[i] for row in rows]) for i in (2, 3))
    found = axis(address, nbytes)
    bottom = found.place(address)
    top = bottom + nbytes
    shown = image(left, right, bottom, top, (0.0, last, found.height))
    assert shown.share.shape == CELLS[::-1]
    assert shown.share.min() >= 0
    assert shown.share.max(initial=0) <= 1 + 1e-6
    cell = (last / CELLS[0]) * (found.height / CELLS[1])
    area = float(((right - left) * nbytes).sum())
    assert math.isclose(shown.share.sum() * cell, area, rel_tol=1e-6, abs_tol=1e-3)
    # In any row of cells, and in any column: the part of the area that lies there.
    for axis_, low, high, other, size in (
        (1, bottom, top, right - left, found.height / CELLS[1]),
        (0, left, right, nbytes, last / CELLS[0]),
    ):
        sums = shown.share.sum(axis=axis_) * cell
        for place in range(0, len(sums), 97):
            within = np.minimum(high, (place + 1) * size) - np.maximum(low, place * size)
            expected = float((np.maximum(within, 0) * other).sum())
            assert math.isclose(sums[place], expected, rel_tol=1e-6, abs_tol=area * 1e-9 + 1e-6)


def test_the_image_is_as_large_as_ever_for_blocks_beyond_its_bounds():
    ends = np.array([1.0, 1e19, 1e300])
    found = image(-ends, ends, -ends, ends, (0.0, 10.0, 100.0))
    assert found.share.shape == CELLS[::-1] and found.share.max() == 3


def test_blocks_that_lie_over_each_other_are_seen():
    one = np.array([0.0, 0.0]), np.array([10.0, 10.0]), np.array([0.0, 0.0]), np.array([8.0, 8.0])
    shown = image(*one, (0.0, 10.0, 8.0))
    assert np.allclose(shown.share, 2)


def some_blocks(nbytes, left, right):
    n = len(nbytes)
    zeros = np.zeros(n, "i8")
    return Blocks(
        np.arange(n, dtype="u8") << np.uint64(32), np.array(nbytes, "i8"), zeros, zeros + 1,
        zeros, zeros, zeros.astype("u8"), 2, 0,
    ), np.array(left, "f8"), np.array(right, "f8")  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 99), st.floats(0, 9), st.floats(0, 9)), max_size=30),
       st.integers(0, 30))  # fmt: skip
def test_what_is_drawn_looks_at_least_as_large_as_what_is_not(rows, most):
    rows = [(n, min(a, b), max(a, b)) for n, a, b in rows]
    found, left, right = some_blocks(*(zip(*rows, strict=True) if rows else ((), (), ())))
    height = float(found.nbytes.sum())
    some = chosen(found, left, right, height, most)
    assert len(some) == min(most, len(rows))
    assert (np.diff(some) > 0).all()
    width = (right.max() - left.min() if rows else 0) or 1.0
    seen = np.maximum((right - left) * 1000 / width, 1) * np.maximum(
        found.nbytes * 500 / (height or 1.0), 1
    )
    rest = np.setdiff1d(np.arange(len(rows)), some)
    if len(rest) and len(some):
        assert seen[some].min() >= seen[rest].max() * (1 - 1e-12)


@pytest.mark.parametrize("pages", [1, 1000])
def test_an_axis_of_many_spans_is_mostly_blocks(pages):
    """Far apart, however many: the gaps never take the map."""
    address = np.arange(pages, dtype="u8") << np.uint64(40)
    found = axis(address, np.full(pages, 4096))
    assert len(found.start) == pages
    assert 4096 * pages <= found.height <= 4096 * pages * 1.27
