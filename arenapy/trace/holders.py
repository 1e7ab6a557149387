"""The holders of a trace's memory: its blocks in groups, and sentences about them.

What lives here: groups of blocks by site, size, thread or stream, how much each holds at a moment,
how long blocks lived. What does not: drawing (page.py). Which line of a call stack a site is
known by is decided here, too: the innermost one that is not of NumPy, torch or this package.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from arenapy.base.text import format_bytes
from arenapy.trace.format import Frame, Site
from arenapy.trace.timeline import Blocks

__all__ = [
    "WAYS",
    "Groups",
    "Holder",
    "Lifetimes",
    "format_ns",
    "grouped",
    "holders",
    "label",
    "lifetimes",
    "place",
]

Ints: TypeAlias = npt.NDArray[np.int64]

#: The properties that tell blocks apart.
WAYS = ("site", "size", "thread", "stream")
SIZES = tuple(1 << bits for bits in (12, 16, 20, 24, 26, 28))  # upper bounds, the last has none
UNKNOWN = Frame("", 0, "not known: no Python code was running")
LIBRARIES = re.compile(
    r"-packages[/\\](?:arenapy|numpy|torch)[/\\]|^<(?:frozen|__array_function__)"
)
#: The folders of arenapy and NumPy, which may be anywhere.
PACKAGES = tuple(
    os.path.join(folder, "")
    for folder in (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(np.__file__))
)
PER_DECADE = 4  # bars of the histogram


def place(site: Site) -> Frame:
    """The line that a call stack is known by."""
    for frame in site:
        if not (LIBRARIES.search(frame.file) or frame.file.startswith(PACKAGES)):
            return frame
    return site[0] if site else UNKNOWN


def label(frame: Frame) -> str:
    """A place in few letters."""
    if not frame.file:
        return frame.function
    return f"{os.path.basename(frame.file)}:{frame.line} {frame.function}"


@dataclass(frozen=True, eq=False, slots=True)
class Groups:
    """Blocks, told apart in one way.

    Attributes
    ----------
    way : str
        One of `WAYS`.
    of : ndarray of int64
        The group of each block, a place in `names`.
    names : list of str
    ordered : bool
        Whether the groups have an order, as sizes do.
    """

    way: str
    of: Ints
    names: list[str]
    ordered: bool = False

    def bytes_at(self, found: Blocks, moment: int) -> Ints:
        """The bytes that each group holds at a moment."""
        there = found.at(moment)
        held = np.zeros(len(self.names), "i8")
        np.add.at(held, self.of[there], found.nbytes[there])
        return held

    def largest(self, score: npt.NDArray[Any], most: int, share: float = 0.0) -> Groups:
        """The groups of the highest scores, in that order, and a last one of all others.

        Those with less than a share of all scores are others, too.
        """
        order = np.argsort(-score, kind="stable")
        kept = min(most, max(1, int(np.count_nonzero(score >= share * score.sum()))))
        if kept >= len(order) - 1:  # nothing, or one that has a name
            kept = len(order)
        new = np.full(len(order), kept)
        new[order[:kept]] = np.arange(kept)
        names = [self.names[one] for one in order[:kept].tolist()]
        if kept < len(order):
            names.append(f"{len(order) - kept} others")
        return Groups(self.way, new[self.of], names, self.ordered)


def grouped(found: Blocks, sites: Sequence[Site], way: str) -> Groups:
    """The groups of a trace's blocks, those of sizes ascending.

    Raises
    ------
    ValueError
        If `way` is none of `WAYS`.
    """
    if way == "size":
        names = [f"blocks up to {format_bytes(bound)}" for bound in SIZES]
        names.append(f"blocks above {format_bytes(SIZES[-1])}")
        present, of = np.unique(np.searchsorted(SIZES, found.nbytes), return_inverse=True)
        return Groups(way, of, [names[one] for one in present.tolist()], ordered=True)
    if way == "site":
        known: dict[Frame, int] = {}
        present, of = np.unique(found.site, return_inverse=True)
        numbers = [known.setdefault(place(sites[one]), len(known)) for one in present.tolist()]
        return Groups(way, np.array(numbers, "i8")[of], [label(frame) for frame in known])
    if way == "thread":
        values, of = np.unique(found.thread, return_inverse=True)
        return Groups(way, of, [f"thread {value}" for value in values.tolist()])
    if way == "stream":
        streams, of = np.unique(found.stream, return_inverse=True)
        return Groups(way, of, [f"stream {s:#x}" if s else "no stream" for s in streams.tolist()])
    raise ValueError(f"{way!r} is not a way to group blocks; choose one of {', '.join(WAYS)}")


class Holder(NamedTuple):
    """A group at one moment.

    Attributes
    ----------
    name : str
    group : int
        Its place among all groups; -1: all that are not listed.
    blocks, nbytes : int
        How many it holds.
    since : int
        The moment of its oldest block.
    site : tuple of Frame
        The call stack that most of the bytes come from.
    """

    name: str
    group: int
    blocks: int
    nbytes: int
    since: int
    site: Site


def holders(
    found: Blocks, groups: Groups, sites: Sequence[Site], moment: int, most: int
) -> list[Holder]:
    """The largest holders at a moment, in descending order; the last one is all others together."""
    there = found.at(moment)
    of, nbytes, start = groups.of[there], found.nbytes[there], found.start[there]
    held, count = np.zeros((2, len(groups.names)), "i8")
    since = np.full(len(groups.names), found.moments, "i8")
    np.add.at(held, of, nbytes)
    np.add.at(count, of, 1)
    np.minimum.at(since, of, start)
    order = [one for one in np.argsort(-held, kind="stable").tolist() if count[one]]
    rows = [
        Holder(
            groups.names[one],
            one,
            int(count[one]),
            int(held[one]),
            int(since[one]),
            _main_site(found.site[there][of == one], nbytes[of == one], sites),
        )
        for one in order[:most]
    ]
    rest = order[most:]
    if rest:
        name = f"{len(rest)} others"
        sums = int(count[rest].sum()), int(held[rest].sum()), int(since[rest].min())
        rows.append(Holder(name, -1, *sums, ()))
    return rows


def _main_site(numbers: Ints, nbytes: Ints, sites: Sequence[Site]) -> Site:
    return sites[int(np.argmax(np.bincount(numbers, nbytes + 1e-9)))]


# ---- how long blocks lived


class Lifetimes(NamedTuple):
    """A histogram of lifetimes on a logarithmic axis.

    Attributes
    ----------
    edges : ndarray of float64
        One more than bars.
    freed, kept : ndarray of int64
        Blocks that were freed after so long, and that were live at the end and so old.
    """

    edges: npt.NDArray[np.float64]
    freed: Ints
    kept: Ints


def lifetimes(ages: npt.NDArray[np.float64], is_freed: npt.NDArray[np.bool_]) -> Lifetimes:
    """A histogram of ages, of whole decades; what is below 1 counts as 1."""
    bars = np.floor(np.log10(np.maximum(ages, 1)) * PER_DECADE).astype("i8")
    first, last = (int(bars.min()), int(bars.max()) + 1) if len(bars) else (0, 1)
    first, last = first // PER_DECADE * PER_DECADE, -(-last // PER_DECADE) * PER_DECADE
    edges = 10.0 ** (np.arange(first, last + 1) / PER_DECADE)
    freed, kept = (
        np.bincount(bars[some] - first, minlength=last - first) for some in (is_freed, ~is_freed)
    )
    return Lifetimes(edges, freed, kept)


def format_ns(ns: float) -> str:
    """A time with its unit, for people."""
    for unit, size in ("s", 1e9), ("ms", 1e6), ("µs", 1e3):
        if ns >= size * 0.9995:
            return f"{ns / size:.3g} {unit}" if ns < 1000 * size else f"{ns / size:,.0f} {unit}"
    return f"{ns:.3g} ns"
