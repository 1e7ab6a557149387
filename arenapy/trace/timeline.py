"""The blocks of a trace: when each was allocated and freed, and how much was live when.

What lives here: lifetimes, live bytes, and what the allocator had from its source. All of it is
arrays, a million events take about a second. What does not: how it is drawn (map.py) and
told (holders.py, page.py), what a replay does (commands/replay/program.py).

Moments are numbers of events: "at moment i" is after event i. A block is live at the moments from
its `start` on and before its `end`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from arenapy.trace.format import OPERATIONS
from arenapy.trace.trace import Trace

__all__ = ["Blocks", "Reserved", "blocks", "reserved"]

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Blocks:
    """Every block of a trace, in the order of allocation: arrays, one place a block.

    Attributes
    ----------
    address, stream : ndarray of uint64
    nbytes, start, end : ndarray of int64
        Moments; blocks that were never freed end at `moments`.
    site, thread : ndarray of int64
        As in the events.
    moments : int
        How many there are: events of the trace.
    earlier : int
        Frees of blocks whose allocation is not in the trace.
    """

    address: npt.NDArray[np.uint64]
    nbytes: Ints
    start: Ints
    end: Ints
    site: Ints
    thread: Ints
    stream: npt.NDArray[np.uint64]
    moments: int
    earlier: int

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def is_freed(self) -> npt.NDArray[np.bool_]:
        """For each block, True if it was freed before the trace ends."""
        return self.end < self.moments

    @cached_property
    def live(self) -> Ints:
        """Bytes that are live at each moment."""
        change = np.zeros(self.moments + 1, "i8")
        np.add.at(change, self.start, self.nbytes)
        np.subtract.at(change, self.end, self.nbytes)
        return np.cumsum(change)[:-1]

    @cached_property
    def peak(self) -> int:
        """The first moment with the most live bytes; if no block has any, when the first began."""
        if not self.live.any():
            return int(self.start[0]) if len(self) else 0
        return int(np.argmax(self.live))

    def at(self, moment: int) -> npt.NDArray[np.bool_]:
        """Which are live."""
        return (self.start <= moment) & (moment < self.end)

    def live_by(self, groups: Ints, count: int, moments: Ints) -> Ints:
        """Bytes that are live at ascending moments, a row for each of `count` groups."""
        change = np.zeros((count, len(moments) + 1), "i8")
        np.add.at(change, (groups, np.searchsorted(moments, self.start)), self.nbytes)
        np.subtract.at(change, (groups, np.searchsorted(moments, self.end)), self.nbytes)
        return np.cumsum(change, axis=1)[:, :-1]


def blocks(trace: Trace) -> Blocks:
    """The blocks of a trace.

    A free or another allocation at the same address ends a block. A reset ends those that were
    allocated since its mark, but for those that are freed later, or kept at the end of the
    recording: somebody held them.
    """
    events: Any = trace.events
    alloc, free, keep = (OPERATIONS[name] for name in ("alloc", "free", "keep"))
    of_blocks = np.flatnonzero(np.isin(events["operation"], (alloc, free, keep)))
    order = of_blocks[np.argsort(events["address"][of_blocks], kind="stable")]
    is_alloc = events["operation"][order] == alloc
    same = events["address"][order][1:] == events["address"][order][:-1]
    after = np.full(len(events), len(events), "i8")  # the next event at an event's address
    after[order[:-1][same]] = order[1:][same]
    known = np.zeros(len(order), bool)  # whether a free has its allocation
    known[1:] = same & is_alloc[:-1]
    start = np.sort(order[is_alloc])
    end = after[start]
    reset = _reset_ends(events, start)
    by = np.append(events["operation"], alloc)[end]
    end = np.where(by == free, end, np.where(by == keep, len(events), np.minimum(end, reset)))
    own = events[start]
    return Blocks(
        own["address"],
        own["nbytes"].astype("i8"),
        start,
        end,
        own["site"].astype("i8"),
        own["thread"].astype("i8"),
        own["stream"],
        len(events),
        int(np.count_nonzero((events["operation"][order] == free) & ~known)),
    )


def _reset_ends(events: Any, start: Ints) -> Ints:
    """The moment of the first reset that a block is allocated under, `len(events)`: there is none.

    Blocks that no reset has ended so far are a stack of ranges; a reset takes from its top.
    """
    ends = np.full(len(start), len(events), "i8")
    codes = OPERATIONS["mark"], OPERATIONS["reset"]
    marks: dict[int, int] = {}  # by number: how many blocks there were
    stack: list[tuple[int, int]] = []
    seen = 0
    at = np.flatnonzero(np.isin(events["operation"], codes))
    for moment, code, number, count in zip(
        at.tolist(),
        events["operation"][at].tolist(),
        events["address"][at].tolist(),
        np.searchsorted(start, at).tolist(),
        strict=True,
    ):
        if code == OPERATIONS["mark"]:
            marks[number] = count
            continue
        since = marks.get(number, 0) if number else 0
        stack.append((seen, count))
        seen = count
        while stack and stack[-1][1] > since:
            first, last = stack.pop()
            ends[max(first, since) : last] = moment
            if first < since:
                stack.append((first, since))
    return ends


# ---- what came from the source


class Reserved(NamedTuple):
    """Ranges of memory that the allocator had, a place in each array for every range.

    Attributes
    ----------
    address, nbytes : ndarray of uint64
    start, end : ndarray of int64
        Moments, as for `Blocks`.
    """

    address: npt.NDArray[np.uint64]
    nbytes: npt.NDArray[np.uint64]
    start: Ints
    end: Ints

    def at(self, moments: Ints) -> Ints:
        """Bytes at ascending moments."""
        change = np.zeros(len(moments) + 1, "i8")
        nbytes = self.nbytes.astype("i8")
        np.add.at(change, np.searchsorted(moments, self.start), nbytes)
        np.subtract.at(change, np.searchsorted(moments, self.end), nbytes)
        return np.cumsum(change)[:-1]


def reserved(trace: Trace) -> Reserved | None:
    """The memory that the allocator had; None if the trace does not tell."""
    events: Any = trace.events
    grow = OPERATIONS["grow"]
    at = np.flatnonzero(np.isin(events["operation"], (grow, OPERATIONS["trim"])))
    ranges = _Ranges()
    for moment, code, address, nbytes in zip(
        at.tolist(),
        events["operation"][at].tolist(),
        events["address"][at].tolist(),
        events["nbytes"][at].tolist(),
        strict=True,
    ):
        (ranges.add if code == grow else ranges.remove)(address, address + nbytes, moment)
    if not (events["operation"][at] == grow).any():
        return None
    ranges.remove(0, 1 << 65, len(events))
    rows = np.array([row for row in ranges.ended if row[0] < 1 << 64], dtype=object).reshape(-1, 4)
    start, nbytes, first, last = rows.T
    return Reserved(start.astype("u8"), nbytes.astype("u8"), first.astype("i8"), last.astype("i8"))


class _Ranges:
    """Disjoint ranges of addresses, each since a moment."""

    def __init__(self) -> None:
        self.starts: list[int] = []  # ascending
        self.rest: list[tuple[int, int]] = []  # end and since
        self.ended: list[tuple[int, int, int, int]] = []  # start, bytes, since, until

    def _cut(self, at: int) -> int:
        """Let no range lie on both sides of an address; the place of the first one behind it."""
        place = bisect_left(self.starts, at)
        if place:
            end, since = self.rest[place - 1]
            if end > at:
                self.rest[place - 1] = at, since
                self.starts.insert(place, at)
                self.rest.insert(place, (end, since))
        return place

    def remove(self, start: int, end: int, now: int) -> None:
        """End the ranges between two addresses. There may be none."""
        first = self._cut(start)
        last = self._cut(end)
        for at, (stop, since) in zip(self.starts[first:last], self.rest[first:last], strict=True):
            self.ended.append((at, stop - at, since, now))
        del self.starts[first:last], self.rest[first:last]

    def add(self, start: int, end: int, now: int) -> None:
        """Begin a range between two addresses. Parts that exist already stay as they are."""
        place = bisect_right(self.starts, start)
        if place:
            start = max(start, self.rest[place - 1][0])
        while start < end:
            stop = min(end, self.starts[place]) if place < len(self.starts) else end
            if start < stop:
                self.starts.insert(place, start)
                self.rest.insert(place, (stop, now))
                place += 1
            if place == len(self.starts):
                return
            start = self.rest[place][0]
            place += 1
