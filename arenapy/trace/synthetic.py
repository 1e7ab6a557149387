"""The steps of a made-up trace, which `arenapy.trace.synthetic` draws from a seed.

What lives here: sizes, lifetimes, and the order of allocations and frees that follows from them.
What does not: traces.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arenapy.memory.host_request import SIZE_LIMIT, checked_index
from arenapy.trace.format import SIZE_BITS

__all__ = ["PHASES", "Phase", "draw"]

MOST = 1 << SIZE_BITS  # what an event has room for


@dataclass(frozen=True, slots=True)
class Phase:
    """Part of a synthetic trace: sizes log-uniform between two bounds, in bytes.

    Parameters
    ----------
    smallest, largest : int
        Bytes of the smallest and the largest allocation of the phase.

    Raises
    ------
    ValueError, TypeError
        If they are not sizes that a trace can store, the smallest first.

    Examples
    --------
    >>> from arenapy import trace
    >>> small = trace.Phase(64, 4096)
    >>> trace.synthetic(1, 100, phases=[small]).summary().largest <= 4096
    True
    """

    smallest: int
    largest: int

    def __post_init__(self) -> None:
        """Refuse what a trace has no room for."""
        smallest = checked_index("smallest", self.smallest)
        if not 0 < smallest <= checked_index("largest", self.largest) < MOST:
            raise ValueError(f"{self!r}: need 0 < smallest <= largest < {MOST}")

    @property
    def mean(self) -> float:
        """Bytes of the average block."""
        if self.smallest == self.largest:
            return float(self.largest)
        return (self.largest - self.smallest) / float(np.log(self.largest / self.smallest))


#: Half of the allocations of `arenapy.trace.synthetic` each.
PHASES = (Phase(64, 64 << 20), Phase(64, 2 << 20))


def draw(
    seed: int, allocations: int, live_bytes: int, phases: Sequence[Phase]
) -> list[tuple[bool, int, int]]:
    """(whether it allocates, number of the block, bytes) of each step; see `trace.synthetic`."""
    if checked_index("seed", seed) < 0:
        raise ValueError(f"seed={seed}: give 0 or more")
    if not (phases and len(phases) <= checked_index("allocations", allocations) < MOST):
        raise ValueError(
            f"allocations={allocations} in {len(phases)} phases: give at least one for each phase, "
            f"and less than {MOST}"
        )
    largest = max(phase.largest for phase in phases)
    if not largest <= checked_index("live_bytes", live_bytes) < SIZE_LIMIT:
        raise ValueError(
            f"live_bytes={live_bytes}: need room for the largest block of the phases, which has "
            f"{largest} bytes, and less than 2**63"
        )
    random = np.random.default_rng(seed)
    ordered = list(phases)[:: -1 if seed % 2 else 1]
    bounds = np.linspace(0, allocations, len(ordered) + 1).astype(int)
    out: list[tuple[bool, int, int]] = []
    ends: list[tuple[float, int, int]] = []  # (when, number, nbytes) of live blocks
    live = 0
    for phase, begin, end in zip(ordered, bounds, bounds[1:], strict=False):
        low, high = np.log([phase.smallest, phase.largest])
        sizes = np.exp(random.uniform(low, high, end - begin)).astype("u8")
        lifetimes = random.exponential(live_bytes / 2 / phase.mean, end - begin)
        for number, nbytes, lifetime in zip(
            range(begin, end), sizes.tolist(), lifetimes.tolist(), strict=True
        ):
            while ends and (ends[0][0] <= number or live + nbytes > live_bytes):
                _, ended, size = heapq.heappop(ends)
                live -= size
                out.append((False, ended, size))
            heapq.heappush(ends, (number + lifetime, number, nbytes))
            live += nbytes
            out.append((True, number, nbytes))
    while ends:
        _, ended, size = heapq.heappop(ends)
        out.append((False, ended, size))
    return out
