"""Strategies draw what they say, and reach the edges; `FailingSource` fails when it says."""

import math

import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

import arenapy
from arenapy.testing import FailingSource, alignments, shapes_and_dtypes, sizes

PAGE = 4096


@given(st.data(), st.integers(0, 100), st.integers(0, 1 << 20))
def test_sizes_stay_within(data, least, more):
    assert least <= data.draw(sizes(least + more, least=least)) <= least + more


@pytest.mark.full
def test_sizes_reach_the_edges():
    """Within few examples, as a uniform strategy would not."""
    edges, drawn = {0, 1, 63, 64, 65, PAGE - 1, PAGE + 1, 3 * PAGE, 12345, 8 * PAGE}, set()

    @settings(max_examples=1000, derandomize=True, database=None)
    @given(sizes(remaining=[12345]))
    def draw(nbytes):
        drawn.add(nbytes)

    draw()
    assert edges - drawn == set()


@given(alignments(1 << 12))
def test_alignments_are_powers_of_two(align):
    assert align is None or (1 <= align <= 1 << 12 and align & (align - 1) == 0)


def test_requests_without_an_alignment_are_among_them():
    assert find(alignments(64), lambda align: align is None) is None


@pytest.mark.parametrize("most", [1, 1000])
@given(data=st.data())
def test_arrays_fit(most, data):
    shape, dtype = data.draw(shapes_and_dtypes(most))
    assert math.prod(shape) * dtype.itemsize <= most


@pytest.mark.full
def test_arrays_of_all_sorts():
    find(shapes_and_dtypes(), lambda pair: pair[0] == ())
    find(shapes_and_dtypes(), lambda pair: 0 in pair[0] and len(pair[0]) == 3)
    find(shapes_and_dtypes(), lambda pair: pair[1].names is not None)
    find(shapes_and_dtypes(), lambda pair: not pair[1].isnative)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="most=-1"):
        sizes(-1)
    with pytest.raises(ValueError, match="least=5"):
        sizes(4, least=5)
    for most in (0, 3, -4):
        with pytest.raises(ValueError, match="power of two"):
            alignments(most)
    with pytest.raises(ValueError, match="after=-1"):
        FailingSource(after=-1)


def test_a_source_fails_once_and_works_again():
    source = FailingSource(after=2)
    regions = [source.region(4096), source.region(4096)]
    with pytest.raises(arenapy.OutOfMemory, match="region 3: 4096 bytes"):
        source.region(4096)
    regions.append(source.region(4096))
    assert (source.calls, source.failures) == (4, 1)
    assert len({region.address for region in regions}) == 3


def test_a_source_fails_as_told():
    source = FailingSource(error=OSError(5, "no disk"), times=None)
    for _ in range(3):
        with pytest.raises(OSError, match="no disk"):
            source.region(4096)
    assert source.failures == 3
    assert isinstance(source, arenapy.Source)


def test_a_source_takes_its_regions_from_another():
    memory = bytearray(1 << 16)
    source = FailingSource(after=1, source=arenapy.Existing(memory))
    arena = arenapy.Bump(1 << 16, source)
    block = arena.alloc(10)
    block.fill(7)
    assert memory.count(7) == 10
