"""The figures of allocators, as frozen dataclasses. All sizes are in bytes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BumpStats"]


@dataclass(frozen=True, slots=True)
class BumpStats:
    """The figures of a Bump at one moment.

    ``live_bytes + free_bytes + retired_bytes + pending_bytes + padding_bytes == capacity``.

    Attributes
    ----------
    capacity : int
        Bytes of all regions.
    live_bytes : int
        Of blocks handed out since the marks that still stand, and not moved back over. A
        Buffer that was dropped without ever being exported counts until the next reset.
    free_bytes : int
        Of all free extents together.
    largest_free_extent : int
        The largest request that succeeds without growth, at alignment 1.
    retired_bytes : int
        Of held blocks that outlived a reset.
    pending_bytes : int
        That nobody here sees but another process does.
    padding_bytes : int
        Lost to alignment, and one for each 0-byte block.
    peak_bytes : int
        The most that live and padding bytes were together.
    held_buffers : int
        Buffers that were ever exported and are alive.
    marks : int
        Positions that marks refer to.
    regions : int
        Regions, the first and those added by growth.
    total_allocations : int
        Blocks ever handed out.
    """

    capacity: int
    live_bytes: int
    free_bytes: int
    largest_free_extent: int
    retired_bytes: int
    pending_bytes: int
    padding_bytes: int
    peak_bytes: int
    held_buffers: int
    marks: int
    regions: int
    total_allocations: int
