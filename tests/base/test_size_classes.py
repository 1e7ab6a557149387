"""The 21 size classes: the table of the design, and how large the blocks within a class are."""

import numpy as np
import pytest
from pool_rules import (
    BOUNDS,
    CLASSES,
    COARSE,
    COARSE_ABOVE,
    FINE,
    FINE_UP_TO,
    KIB,
    MIB,
    block_of,
    class_of,
    interesting_sizes,
    step_of,
)
from sources import Regions

import arenapy
from arenapy import Pool

LARGEST = BOUNDS[-1]
#: Sizes that are worth a block each; class 20 by a few of its own.
SIZES = [*interesting_sizes(LARGEST + 1), LARGEST + COARSE, LARGEST + COARSE + 1, 3 * LARGEST]


def test_the_table_has_the_bounds_of_the_design():
    assert arenapy.SIZE_CLASSES == (
        4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10,
        512 << 10, 768 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20,
        32 << 20, 64 << 20, 128 << 20, 256 << 20, 384 << 20, 512 << 20, None,
    )  # fmt: skip
    assert isinstance(arenapy.SIZE_CLASSES, tuple) and len(arenapy.SIZE_CLASSES) == 21 == CLASSES
    assert [*arenapy.SIZE_CLASSES[:-1]] == BOUNDS


@pytest.mark.parametrize("index", range(len(BOUNDS)))
def test_a_bound_is_the_last_size_of_its_class(index):
    bound = BOUNDS[index]
    below = BOUNDS[index - 1] if index else -1
    assert arenapy.size_class(bound) == index
    assert arenapy.size_class(bound - 1) == index
    assert arenapy.size_class(bound + 1) == index + 1
    assert arenapy.size_class(below + 1) == index
    assert arenapy.size_class((below + 1 + bound) // 2) == index


@pytest.mark.parametrize(
    ("nbytes", "index"),
    [(0, 0), (1, 0), (LARGEST + 1, 20), (1 << 40, 20), (2**63 - 1, 20), (np.int64(8192), 1)],
)
def test_from_nothing_to_everything(nbytes, index):
    answer = arenapy.size_class(nbytes)
    assert answer == index and type(answer) is int


def test_every_size_has_the_class_of_the_table():
    for nbytes in SIZES:
        assert arenapy.size_class(nbytes) == class_of(nbytes), nbytes


@pytest.mark.parametrize("nbytes", [-1, -(2**63), 2**63, 2**64 - 1, 2**64, 10**30])
def test_sizes_out_of_range(nbytes):
    with pytest.raises(ValueError, match=str(nbytes)):
        arenapy.size_class(nbytes)


@pytest.mark.parametrize("nbytes", [1.5, "64", None, b"64", [64], 64j, object()])
def test_sizes_that_are_no_integers(nbytes):
    with pytest.raises(TypeError):
        arenapy.size_class(nbytes)


# The arithmetic of the model, which the rest of the tests of Pool lean on --------------------


def test_the_model_wastes_no_more_than_the_design_allows():
    for nbytes in SIZES[1:]:
        block = step_of(nbytes)
        assert block >= nbytes and step_of(block) == block
        assert class_of(block) == class_of(nbytes), "every step lies in one class"
        if nbytes <= FINE_UP_TO:
            assert block - nbytes < FINE
        elif nbytes <= COARSE_ABOVE:
            assert (block - nbytes) * 8 < nbytes
        else:
            assert block - nbytes < COARSE


# What a pool makes of them -------------------------------------------------------------------


def live_block(pool, buffer):
    """The one live block that has the Buffer's bytes."""
    (found,) = [
        block
        for block in pool.blocks()
        if block.state == "live"
        and block.address <= buffer.address
        and buffer.address + buffer.nbytes <= block.address + block.nbytes
    ]
    return found


def live_by_class(pool):
    """{class: (blocks, bytes)} of the classes that have live blocks, as the figures say."""
    return {
        figures.index: (figures.active_allocations, figures.allocated_bytes)
        for figures in pool.stats().classes
        if figures.active_allocations
    }


@pytest.mark.parametrize("rounding", ["step", "class"])
@pytest.mark.parametrize("index", range(CLASSES))
@pytest.mark.sampled
def test_each_block_is_as_large_as_its_size_says(index, rounding):
    pool = Pool(source=Regions(), rounding=rounding)
    for nbytes in SIZES:
        if class_of(nbytes) != index:
            continue
        buffer = pool.alloc(nbytes)
        block = live_block(pool, buffer)
        expected = block_of(nbytes, rounding)
        assert (block.nbytes, block.size_class) == (expected, index), nbytes
        assert buffer.nbytes == nbytes
        assert live_by_class(pool) == {index: (1, expected)}
        assert pool.stats().allocated_bytes == expected
        buffer.release()
        assert live_by_class(pool) == {}
    counted = [figures.total_allocations for figures in pool.stats().classes]
    assert counted[index] == pool.stats().total_allocations > 2
    assert sum(counted) == counted[index]


def test_the_classes_of_the_figures_are_those_of_the_table():
    stats = Pool(source=Regions()).stats()
    assert [figures.index for figures in stats.classes] == list(range(21))
    assert tuple(figures.upper_bound for figures in stats.classes) == arenapy.SIZE_CLASSES


def test_blocks_of_a_class_are_all_alike_under_the_literal_rule():
    pool = Pool(source=Regions(), rounding="class")
    for index, bound in enumerate(BOUNDS[:12]):
        lower = BOUNDS[index - 1] + 1 if index else 0
        first, second = pool.alloc(lower), pool.alloc(bound)
        assert live_block(pool, first).nbytes == live_block(pool, second).nbytes == bound
        where = live_block(pool, first).address
        first.release()
        first = pool.alloc(bound - 1)
        assert live_block(pool, first).address == where, "any block of the class serves the class"


def test_above_the_last_bound_the_literal_rule_takes_the_next_2_mib():
    pool = Pool(source=Regions(), rounding="class")
    for nbytes in (LARGEST + 1, LARGEST + 2 * MIB, LARGEST + 2 * MIB + 1):
        with pool.alloc(nbytes) as buffer:
            assert live_block(pool, buffer).nbytes == -(-nbytes // (2 * MIB)) * 2 * MIB


@pytest.mark.parametrize("nbytes", [1, 65, 513, 4 * KIB + 1, 33 * KIB, MIB + 1])
def test_a_step_serves_every_size_within_it(nbytes):
    """A block goes back to its step, and not only to the exact size that it was asked for."""
    pool = Pool(source=Regions())
    step = step_of(nbytes)
    buffer = pool.alloc(nbytes)
    where = live_block(pool, buffer).address
    buffer.release()
    buffer = pool.alloc(step)
    assert live_block(pool, buffer).address == where
    buffer.release()


def test_alignment_never_puts_a_block_into_a_smaller_class():
    pool = Pool(source=Regions())
    for log2 in range(22):
        for nbytes in (0, 1, 100, 4096, 4097, 40_000, 300_000):
            buffer = pool.alloc(nbytes, 1 << log2)
            assert buffer.address % (1 << log2) == 0
            block = live_block(pool, buffer)
            most = step_of(nbytes + (1 << log2))
            assert step_of(nbytes) <= block.nbytes <= max(most, step_of(nbytes))
            assert class_of(nbytes) <= block.size_class <= class_of(most)
