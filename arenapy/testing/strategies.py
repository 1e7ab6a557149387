"""Strategies: what to ask an allocator for, weighted to where mistakes are made.

A size that is a little more or less than a power of two, a page, a size class or what is left finds
more in a hundred examples than a uniform one does in a million.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from arenapy.base.sizes import SIZE_CLASSES
from arenapy.testing.operations import operations
from arenapy.testing.steps import Program, Step

if TYPE_CHECKING:
    from arenapy.testing.machine import AllocatorMachine

__all__ = ["alignments", "programs", "shapes_and_dtypes", "sizes"]

PAGE = mmap.PAGESIZE
TINY, SMALL = 32, 300  # smaller than a header; smaller than a page
AROUND = 2  # bytes on either side of an edge
DTYPES = ("u1", "?", "<i2", ">f4", "f8", "c16", "S3", "U2", "M8[ns]", [("a", "u1"), ("b", "<f8")])


def _edges(most: int, classes: Iterable[int | None], remaining: Iterable[int]) -> list[int]:
    """Sizes at which something changes, the smallest first."""
    powers = (1 << log2 for log2 in range(most.bit_length()))
    pages = (count * PAGE for count in range(1, 5))
    named = (edge for edge in classes if edge is not None)
    return sorted({edge for edge in (*powers, *pages, *named, *remaining, most) if edge <= most})


def sizes(
    most: int = 8 * PAGE,
    *,
    least: int = 0,
    classes: Iterable[int | None] = SIZE_CLASSES,
    remaining: Iterable[int] = (),
) -> st.SearchStrategy[int]:
    """Sizes of requests in bytes.

    Parameters
    ----------
    most : int
        The largest.
    least : int
        The smallest.
    classes : iterable of int or None
        Edges of the allocator's size classes. By default those of `arenapy.Pool`.
    remaining : iterable of int
        Remaining or total bytes of the allocator.

    Returns
    -------
    strategy of int
        Sizes from `least` to `most`: small ones, sizes within two bytes of an edge, and any.

    Raises
    ------
    ValueError
        If `least` is negative, or more than `most`.

    Notes
    -----
    Thread-safety: strategies are immutable.

    Examples
    --------
    >>> from hypothesis import find
    >>> from arenapy.testing import sizes
    >>> find(sizes(1000), lambda nbytes: nbytes > 64)
    65
    """
    if not 0 <= least <= most:
        raise ValueError(f"least={least}, most={most}: need 0 <= least <= most")
    edges = _edges(most, classes, remaining) or [0]
    near = st.builds(int.__add__, st.sampled_from(edges), st.integers(-AROUND, AROUND))
    inside = near.map(lambda nbytes: min(max(nbytes, least), most))
    ends = (min(max(end, least), most) for end in (TINY, SMALL, most))
    tiny, small, any_size = (st.integers(least, end) for end in ends)
    return st.one_of(tiny, small, inside, any_size)


def alignments(most: int = PAGE) -> st.SearchStrategy[int | None]:
    """Alignments: none, and powers of two, small ones more often.

    Parameters
    ----------
    most : int
        The largest, a power of two.

    Returns
    -------
    strategy of int or None
        None stands for a request without an alignment.

    Raises
    ------
    ValueError
        If `most` is not a power of two.

    Notes
    -----
    Thread-safety: strategies are immutable.

    Examples
    --------
    >>> from hypothesis import find
    >>> from arenapy.testing import alignments
    >>> find(alignments(4096), lambda align: align is not None and align > 1000)
    1024
    """
    if most < 1 or most & (most - 1):
        raise ValueError(f"most={most}: need a power of two")
    top = most.bit_length() - 1
    small = st.integers(0, min(8, top))
    return st.none() | st.one_of(small, st.integers(0, top)).map(lambda log2: 1 << log2)


def shapes_and_dtypes(
    most: int = 8 * PAGE, *, dtypes: Sequence[Any] = DTYPES, most_dims: int = 3
) -> st.SearchStrategy[tuple[tuple[int, ...], np.dtype[Any]]]:
    """Shapes and dtypes of arrays of at most `most` bytes.

    Parameters
    ----------
    most : int
        Bytes of the largest array.
    dtypes : sequence of dtype
        The dtypes to choose from. The default includes structured, unaligned and foreign-endian
        ones.
    most_dims : int
        The largest number of dimensions. Scalars and empty arrays are included.

    Returns
    -------
    strategy of tuple of (tuple of int, dtype)

    Notes
    -----
    Thread-safety: strategies are immutable.

    Examples
    --------
    >>> from hypothesis import find
    >>> from arenapy.testing import shapes_and_dtypes
    >>> find(shapes_and_dtypes(), lambda pair: len(pair[0]) == 2 and pair[0][1] > 3)
    ((0, 4), dtype('uint8'))
    """

    def shapes(dtype: np.dtype[Any]) -> st.SearchStrategy[tuple[tuple[int, ...], np.dtype[Any]]]:
        items = most // max(dtype.itemsize, 1)
        side = st.one_of(st.integers(0, 5), st.integers(0, max(items, 1)))
        dims = st.lists(side, max_size=most_dims).map(tuple)
        fitting = dims.filter(lambda shape: math.prod(shape) <= items)
        return st.tuples(fitting, st.just(dtype))

    return st.sampled_from([np.dtype(one) for one in dtypes]).flatmap(shapes)


def programs(machine: type[AllocatorMachine], *, most: int = 50) -> st.SearchStrategy[Program]:
    """Whole programs for a class of machines, as data to print, keep, replay and mutate.

    For a fuzzer with its own bytes, wrap a function that runs the program in
    ``given(programs(Mine))``, and use its ``hypothesis.fuzz_one_input``.

    Parameters
    ----------
    machine : class
        A subclass of `AllocatorMachine`. Its strategies must not need a running machine.
    most : int
        The largest number of steps.

    Returns
    -------
    strategy of Program

    Notes
    -----
    Thread-safety: strategies are immutable.

    Examples
    --------
    >>> from hypothesis import given, settings
    >>> from arenapy.testing import SlabMachine, programs
    >>> @settings(max_examples=5, database=None)
    ... @given(programs(SlabMachine))
    ... def test(program):
    ...     program.run(SlabMachine)
    >>> test()
    """
    known = operations(machine)
    first = known.pop("start").steps(machine, "start")
    others: list[st.SearchStrategy[Step]] = [told.steps(machine, n) for n, told in known.items()]
    return st.builds(
        lambda start, rest: Program((start, *rest)),
        first,
        st.lists(st.one_of(others), max_size=most),
    )
