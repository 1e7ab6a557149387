"""The content of a trace's page: everything but the drawing.

What lives here: the axis of time, curves at a number of moments that can be drawn, the map, the
tables, and the sentences that sum all of it up. What does not: colours and HTML (page.py).
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from arenapy.base.text import format_bytes
from arenapy.trace.holders import (
    Groups,
    Holder,
    Lifetimes,
    format_ns,
    grouped,
    holders,
    label,
    lifetimes,
    place,
)
from arenapy.trace.map import Axis, Image, axis, chosen, image
from arenapy.trace.timeline import Blocks, Reserved, blocks, reserved
from arenapy.trace.trace import Trace, no_allocation

__all__ = ["Curves", "View"]

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]

MAX_GROUPS = 7  # that have a colour of their own
LEAST_SHARE = 0.002  # of the area of all blocks; less is hardly seen
MAX_ROWS = 12  # of a table
BINS = 1500  # of the curves: pixels of a wide screen
MAX_RANGES = 20_000  # of reserved memory, on the map
MAX_BLOCKS = 20_000  # that are drawn one by one, unless told
UNITS = {"s": 1e9, "ms": 1e6, "µs": 1e3, "ns": 1.0}
OVERLAP = 1.001  # a share of a cell that disjoint blocks cannot cover

SITES_OF_TORCH = "torch.cuda.memory._record_memory_history(stacks='python')"
SITES = "arenapy run --trace FILE --sites, or arenapy.trace.record(allocator, file, sites=16)"


class Curves(NamedTuple):
    """Bytes over time.

    Attributes
    ----------
    x : ndarray of float64
        On the axis of time.
    live : ndarray of int64
        A row for each group; a column holds until the next one.
    reserved : ndarray of int64 or None
    """

    x: Floats
    live: Ints
    reserved: Ints | None


class View:
    """A trace as it is shown.

    Parameters
    ----------
    trace : Trace
        With at least one allocation.
    way : str, optional
        The property that groups blocks, of `holders.WAYS`; by default sites, if there are any,
        else sizes.
    by_events : bool, optional
        Whether the axis of time counts events; by default only if the trace has no times.
    most_blocks : int
        How many blocks are drawn one by one.

    Raises
    ------
    ValueError
        If the trace has no allocation, or `way` is not known.
    """

    def __init__(
        self,
        trace: Trace,
        way: str | None = None,
        by_events: bool | None = None,
        most_blocks: int = MAX_BLOCKS,
    ) -> None:
        self.trace = trace
        self.blocks: Blocks = blocks(trace)
        if not len(self.blocks):
            raise no_allocation(trace, "show")
        self.times = trace.events["time"].astype("f8")  # ns
        self.is_timed = bool(self.times[-1] > self.times[0])
        self.by_events = not self.is_timed if by_events is None else by_events
        self.has_sites = bool((self.blocks.site != 0).any())
        self.groups: Groups = grouped(
            self.blocks, trace.sites, way or ("site" if self.has_sites else "size")
        )
        self._most_blocks = most_blocks

    # ---- time

    @cached_property
    def unit(self) -> str:
        """Of the axis of time."""
        if self.by_events:
            return "events"
        total = self.times[-1]
        return next((unit for unit, size in UNITS.items() if total >= size), "ns")

    @cached_property
    def x(self) -> Floats:
        """Each moment on the axis of time, and the end."""
        if self.by_events:
            return np.arange(len(self.times) + 1, dtype="f8")
        return np.append(self.times, self.times[-1]) / UNITS[self.unit]

    @cached_property
    def left(self) -> Floats:
        """Where each block begins, on the axis of time."""
        return self.x[self.blocks.start]

    @cached_property
    def right(self) -> Floats:
        """Where it ends."""
        return self.x[self.blocks.end]

    @cached_property
    def ages(self) -> Floats:
        """How long each block lived, in ns; in events, if there are no times."""
        if not self.is_timed:
            return (self.blocks.end - self.blocks.start).astype("f8")
        ends = np.append(self.times, self.times[-1])
        return np.asarray(ends[self.blocks.end] - ends[self.blocks.start])

    def age_text(self, age: float) -> str:
        """For people."""
        return format_ns(age) if self.is_timed else f"{age:,.0f} events"

    def when(self, moment: int) -> str:
        """A moment, for people."""
        if not self.is_timed:
            return f"event {moment:,}"
        return format_ns(float(self.times[moment]))

    # ---- curves

    @cached_property
    def reserved(self) -> Reserved | None:
        """The memory that the allocator had. None if the trace does not tell about all of it."""
        found = reserved(self.trace)
        if found is None or (found.at(np.arange(self.blocks.moments)) < self.blocks.live).any():
            return None
        return found

    @property
    def mapped(self) -> Reserved | None:
        """The reserved memory as the map draws it: all of it, or None if it has too many ranges."""
        had = self.reserved
        return None if had is None or len(had.address) > MAX_RANGES else had

    @cached_property
    def moments(self) -> Ints:
        """Where curves are drawn: the peak of each part of the time, and where it ends."""
        n = self.blocks.moments
        if n <= 2 * BINS:
            return np.arange(n)
        edges = np.linspace(self.x[0], self.x[n - 1], BINS + 1)
        bounds = np.unique(np.append(np.searchsorted(self.x[:n], edges[:-1]), n))
        live = self.blocks.live
        peaks = [
            first + int(np.argmax(live[first:last]))
            for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        ]
        return np.unique(np.append(peaks, bounds[1:] - 1))

    @cached_property
    def colours(self) -> Groups:
        """Groups that have a colour: those of the largest areas first, or of sizes ascending."""
        if self.groups.ordered:
            return self.groups
        areas = (self.right - self.left + 1e-9) * self.blocks.nbytes
        score = np.bincount(self.groups.of, areas, len(self.groups.names))
        return self.groups.largest(score, MAX_GROUPS, LEAST_SHARE)

    @cached_property
    def curves(self) -> Curves:
        """The bytes that the blocks of each colour hold over time, to the end."""
        at = self.moments
        live = self.blocks.live_by(self.colours.of, len(self.colours.names), at)
        had = None if self.reserved is None else self.reserved.at(at)
        return Curves(
            np.append(self.x[at], self.x[-1]),
            np.concatenate([live, live[:, -1:]], axis=1),
            None if had is None else np.append(had, had[-1]),
        )

    @cached_property
    def layers(self) -> Ints:
        """Colours from the bottom of the curves to the top: the steady ones first."""
        live = self.curves.live
        if self.groups.ordered:
            return np.arange(len(live))
        return np.argsort(np.abs(np.diff(live)).sum(axis=1) / np.maximum(live.max(axis=1), 1))

    # ---- the map

    @cached_property
    def axis(self) -> Axis:
        """Of addresses."""
        return axis(self.blocks.address, self.blocks.nbytes)

    @cached_property
    def bottom(self) -> Floats:
        """Where each block begins, on the axis of addresses."""
        return self.axis.place(self.blocks.address)

    @cached_property
    def top(self) -> Floats:
        """Where it ends."""
        return self.bottom + self.blocks.nbytes

    @cached_property
    def drawn(self) -> Ints:
        """The blocks that are drawn one by one."""
        return chosen(self.blocks, self.left, self.right, self.axis.height, self._most_blocks)

    @cached_property
    def merged(self) -> Image | None:
        """A picture of all others; None if there are none."""
        others = np.ones(len(self.blocks), bool)
        others[self.drawn] = False
        return self._image(others) if others.any() else None

    def _image(self, some: npt.NDArray[np.bool_]) -> Image:
        left, right, bottom, top = (
            side[some] for side in (self.left, self.right, self.bottom, self.top)
        )
        bounds = float(self.left[0]), float(self.x[-1]), self.axis.height
        return image(left, right, bottom, top, bounds)

    @cached_property
    def overlaps(self) -> bool:
        """True if blocks lie over each other. Then addresses are names here, and not places."""
        return bool(self._image(np.ones(len(self.blocks), bool)).share.max() > OVERLAP)

    # ---- tables and sentences

    def holders(self, moment: int) -> list[Holder]:
        """The largest holders at a moment."""
        return holders(self.blocks, self.groups, self.trace.sites, moment, MAX_ROWS)

    @cached_property
    def place_names(self) -> list[str]:
        """A short name of each site of the trace."""
        return [label(place(site)) for site in self.trace.sites]

    @cached_property
    def lifetimes(self) -> Lifetimes:
        """A histogram."""
        return lifetimes(self.ages, self.blocks.is_freed)

    def figures(self) -> list[tuple[str, str]]:
        """The numbers of the trace, each with what it is."""
        found = self.blocks
        peak, last = int(found.live[found.peak]), int(found.live[-1])
        said = [(format_bytes(peak), "live at the peak")]
        if self.reserved is not None:
            had = int(self.reserved.at(np.array([found.peak]))[0])
            said.append((format_bytes(had), "reserved at the peak"))
        said.append((format_bytes(last), "not freed at the end"))
        said.append((f"{len(found):,}", "allocations"))
        if self.is_timed:
            said.append((format_ns(float(self.times[-1])), "recorded"))
        return said

    def sentences(self) -> list[str]:
        """The most important facts, for the head of the page."""
        found, summary = self.blocks, self.trace.summary()
        counts: Any = summary.operations
        when = ""
        if self.trace.started:
            began = datetime.fromtimestamp(self.trace.started / 1e9, UTC)
            when = f", recorded on {began:%Y-%m-%d at %H:%M} UTC"
        length = f" in {format_ns(summary.seconds * 1e9)}" if self.is_timed else ""
        said = [
            f"{self.trace.kind or 'A trace'}{when}: {_count(counts['alloc'], 'allocation')} "
            f"of {format_bytes(summary.allocated_bytes)} in all{length}, "
            f"by {_count(summary.threads, 'thread')}"
            + (f" and {_count(summary.streams, 'stream')}" if summary.streams else "")
            + ".",
            self._peak(),
        ]
        kept = found.at(found.moments - 1)
        if kept.any():
            nbytes = format_bytes(int(found.nbytes[kept].sum()))
            first = self.holders(found.moments - 1)[0]
            said.append(
                f"At the end, {_count(int(kept.sum()), 'block')} ({nbytes}) "
                f"{'were' if kept.sum() != 1 else 'was'} not freed. "
                f"{format_bytes(first.nbytes)} of this is from {first.name}."
            )
        else:
            said.append("At the end, all blocks were freed.")
        ages = self.ages[found.is_freed]
        if len(ages):
            half, most = (self.age_text(float(one)) for one in np.quantile(ages, [0.5, 0.9]))
            said.append(
                f"Half of the freed blocks lived at most {half}, and 90% lived at most {most}."
            )
        return said

    def _peak(self) -> str:
        found, peak = self.blocks, self.blocks.peak
        live = int(found.live[peak])
        text = (
            f"The peak was {format_bytes(live)} in {_count(int(found.at(peak).sum()), 'block')}, "
            f"at {self.when(peak)}."
        )
        if self.reserved is not None:
            had = int(self.reserved.at(np.array([peak]))[0])
            text += f" At that time {format_bytes(had)} were reserved"
            if had:
                text += f", and {1 - live / had:.1%} of this was in no block"
            text += "."
        first = self.holders(peak)[0]
        if live:
            text += f" {first.nbytes / live:.0%} of the peak is from {first.name}."
        return text

    def notes(self) -> list[str]:
        """Remarks about missing, omitted and merged data."""
        found, said = self.blocks, []
        if not self.trace.complete:
            said.append("The recording did not end properly, so its last events are missing.")
        if found.earlier:
            said.append(
                f"Not shown: {_count(found.earlier, 'free')} of blocks that were allocated before "
                "the recording began."
            )
        if not self.has_sites:
            how = SITES_OF_TORCH if self.trace.kind.startswith("torch") else SITES
            said.append(
                f"The trace does not say which code allocated the blocks. To record it: {how}."
            )
        if not self.is_timed:
            said.append("The trace has no times. The time axis counts events instead.")
        if self.overlaps:
            said.append(
                "Blocks overlap on the map, because the addresses in this trace are only names of "
                "blocks, not places in memory."
            )
        if self.merged is not None:
            others = len(found) - len(self.drawn)
            area = (self.right - self.left) * found.nbytes
            share = 1 - float(area[self.drawn].sum() / area.sum()) if area.sum() else 0.0
            said.append(
                f"The map shows the {len(self.drawn):,} blocks with the largest rectangles one by "
                f"one. It merges {_count(others, 'other')} into the grey background ({share:.2g} "
                "of the area of all blocks). The darker a place is, the more of it they cover."
            )
        if self.reserved is not None and self.mapped is None:
            said.append(
                "The map does not show reserved memory, because it has too many ranges "
                f"({len(self.reserved.address):,})."
            )
        if len(self.moments) < found.moments:
            said.append(
                f"The curve of memory over time shows {len(self.moments):,} of {found.moments:,} "
                "moments. They include the peak of every interval."
            )
        return said


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
