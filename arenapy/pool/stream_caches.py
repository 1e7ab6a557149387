"""Figures of a pool together with its lanes, the pools of its other streams.

A lane's memory is live blocks of the pool that it belongs to, and figures say what the user has of
it. `lanes` are pairs of a lane and {address: bytes} of what it has taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from arenapy.base.size_classes import size_class

if TYPE_CHECKING:
    from arenapy.pool.pool import Pool
    from arenapy.stats import BlockInfo, ClassStats, PoolStats

Lanes = Sequence[tuple["Pool", dict[int, int]]]
#: The counts of lanes that are gone, and the bytes that they had ever allocated.
Past = tuple["PoolStats", int]

COUNTS = ("total_allocations", "pool_hits", "pool_misses", "splits", "active_allocations")
BYTES = ("allocated_bytes", "pending_bytes", "idle_bytes")


def with_lane_gone(past: Past | None, lane: Pool) -> Past:
    """What lanes without memory had done that are gone, and what one more had."""
    stats, (_, nbytes, _) = replace(lane.stats(), metadata_bytes=0), lane._tally()
    if past is None:
        return stats, nbytes
    before = past[0]
    classes = tuple(
        replace(one, **{name: getattr(one, name) + getattr(other, name) for name in COUNTS})
        for one, other in zip(before.classes, stats.classes, strict=True)
    )
    counts = {name: getattr(before, name) + getattr(stats, name) for name in COUNTS}
    return replace(before, **counts, classes=classes), past[1] + nbytes


def with_lanes(own: PoolStats, lanes: Lanes, past: Past | None) -> PoolStats:
    """The figures of a pool and of its lanes as those of one."""
    lent = [nbytes for _, chunks in lanes for nbytes in chunks.values()]
    stats = [lane.stats() for lane, _ in lanes]
    if past is not None:
        stats.append(past[0])
    return replace(
        own,
        **_added(own, stats, lent),
        metadata_bytes=own.metadata_bytes + sum(s.metadata_bytes for s in stats),
        largest_free_block=max(s.largest_free_block for s in (own, *stats)),
        classes=tuple(
            _class_with(one, [s.classes[one.index] for s in stats], lent) for one in own.classes
        ),
    )


def _class_with(own: ClassStats, others: list[ClassStats], lent: list[int]) -> ClassStats:
    added = _added(own, others, [nbytes for nbytes in lent if size_class(nbytes) == own.index])
    return replace(
        own,
        **added,
        reserved_bytes=sum(added[name] for name in BYTES),
        largest_free_block=max(s.largest_free_block for s in (own, *others)),
    )


def _added(
    own: PoolStats | ClassStats, others: Iterable[PoolStats | ClassStats], lent: list[int]
) -> dict[str, int]:
    added = {
        name: getattr(own, name) + sum(getattr(other, name) for other in others)
        for name in (*COUNTS, *BYTES)
    }
    added["allocated_bytes"] -= sum(lent)
    added["active_allocations"] -= len(lent)
    return added


def blocks_with(own: Iterable[BlockInfo], lanes: Lanes) -> Iterator[BlockInfo]:
    """All blocks by address, those of lanes in the place of what they have taken."""
    inside: dict[int, list[BlockInfo]] = {}
    for lane, chunks in lanes:
        starts = sorted(chunks)
        for block in lane.blocks():
            start = max(at for at in starts if at <= block.address)
            inside.setdefault(start, []).append(block)
    for block in own:
        yield from inside.get(block.address, [block])


def tally_with(own: tuple[int, int, int], lanes: Lanes, past: Past | None) -> tuple[int, int, int]:
    """Allocations ever, their bytes, and live bytes, what lanes have taken not counted twice."""
    allocations, nbytes, live = own
    if past is not None:
        allocations += past[0].total_allocations
        nbytes += past[1]
    for lane, chunks in lanes:
        theirs = lane._tally()
        allocations += theirs[0]
        nbytes += theirs[1]
        live += theirs[2] - sum(chunks.values())
    return allocations, nbytes, live
