"""A Pool of many regions beside one that grows in place: memory for the same program.

The program makes batches of blocks, each batch larger than the one before, and beside each block a
small one that stays. So no region becomes free entirely, and no hole is large enough for the next
batch. The figure is the most that the pool had to reserve, by the most that was live. Nothing
is written, so that none of it is faulted in. On a device: asv_benches/gpu/replay.py, with
--trace "growing sequences".
"""

import arenapy
from arenapy.commands.replay.program import program
from asv_benches.gpu.traces import growing_sequences
from asv_benches.support.rounds import Line, named
from asv_benches.support.sizes import MIB

LAZY = {"prefault": False, "huge_pages": None}


class Regions:
    """A source without addresses to grow in, as most are."""

    def region(self, nbytes):
        """Memory of the host."""
        return arenapy.Host(**LAZY).region(nbytes)


SOURCES = {
    "further regions": Regions,
    "in place": lambda: arenapy.Host(grow=True, **LAZY),
}


def reserved_over_live(name, first):
    """Peak reserved over peak live."""
    steps = program(growing_sequences(first=first))
    pool = arenapy.Pool(source=SOURCES[name]())
    blocks = [None] * steps.count
    most = 0
    for slot, nbytes in zip(steps.slots.tolist(), steps.sizes.tolist(), strict=True):
        if slot >= 0:
            blocks[slot] = pool.alloc(nbytes)
            most = max(most, pool.stats().reserved_bytes)
        else:
            blocks[~slot] = None
    pool.check()
    return most / int(steps.live().max())


class Reserved:
    """asv: peak reserved over peak live."""

    params = tuple(SOURCES)
    param_names = ("growth",)
    timeout = 300

    @named("Peak reserved / peak live, growing batches", "x")
    def track_reserved_over_live(self, growth):
        """Of 192 blocks, half of which stay."""
        return reserved_over_live(growth, 64 * MIB)


def lines(quick):
    """The report's lines."""
    for name in SOURCES:
        ratio = reserved_over_live(name, (8 if quick else 64) * MIB)
        yield Line("growth", f'"{name}": peak reserved / peak live', ratio, timed=False)
