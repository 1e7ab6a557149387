"""Figures of a pool together with its stream caches, the pools of its other streams.

A stream cache's memory is live blocks of the pool that it belongs to, and figures say what the user
has of it. `stream_caches` are pairs of a cache and {address: bytes} of what it has taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from arenapy.base.sizes import size_class

if TYPE_CHECKING:
    from arenapy.pool.pool import Pool
    from arenapy.stats import BlockInfo, ClassStats, PoolStats

StreamCaches = Sequence[tuple["Pool", dict[int, int]]]
#: The counts of stream caches that are gone, and the bytes that they had ever allocated.
Past = tuple["PoolStats", int]

COUNTS = ("total_allocations", "pool_hits", "pool_misses", "splits", "active_allocations")
BYTES = ("allocated_bytes", "pending_bytes", "idle_bytes")


def with_cache_gone(past: Past | None, cache: Pool) -> Past:
    """What stream caches without memory had done that are gone, and what one more had."""
    stats, (_, nbytes, _) = replace(cache.stats(), metadata_bytes=0), cache._tally()
    if past is None:
        return stats, nbytes
    before = past[0]
    classes = tuple(
        replace(one, **{name: getattr(one, name) + getattr(other, name) for name in COUNTS})
        for one, other in zip(before.classes, stats.classes, strict=True)
    )
    counts = {name: getattr(before, name) + getattr(stats, name) for name in COUNTS}
    return replace(before, **counts, classes=classes), past[1] + nbytes


def with_stream_caches(own: PoolStats, stream_caches: StreamCaches, past: Past | None) -> PoolStats:
    """The figures of a pool and of its stream caches as those of one."""
    lent = [nbytes for _, chunks in stream_caches for nbytes in chunks.values()]
    stats = [cache.stats() for cache, _ in stream_caches]
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


def blocks_with(own: Iterable[BlockInfo], stream_caches: StreamCaches) -> Iterator[BlockInfo]:
    """All blocks by address, those of stream caches in the place of what they have taken."""
    inside: dict[int, list[BlockInfo]] = {}
    for cache, chunks in stream_caches:
        starts = sorted(chunks)
        for block in cache.blocks():
            start = max(at for at in starts if at <= block.address)
            inside.setdefault(start, []).append(block)
    for block in own:
        yield from inside.get(block.address, [block])


def tally_with(
    own: tuple[int, int, int], stream_caches: StreamCaches, past: Past | None
) -> tuple[int, int, int]:
    """Allocations ever, their bytes, and live bytes, no byte of a stream cache twice."""
    allocations, nbytes, live = own
    if past is not None:
        allocations += past[0].total_allocations
        nbytes += past[1]
    for cache, chunks in stream_caches:
        theirs = cache._tally()
        allocations += theirs[0]
        nbytes += theirs[1]
        live += theirs[2] - sum(chunks.values())
    return allocations, nbytes, live
