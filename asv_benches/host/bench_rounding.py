"""Pool(rounding="step") beside Pool(rounding="class"): time, and memory for the same program.

The program replaces random blocks of mixed sizes, as many in each doubling as in any other. Memory
is what the pool had to reserve for it over what the program had at most, in bytes asked for: what
rounding wastes is in it, and what fragmentation does. Traces with phases and lifetimes, beside
other allocators: bench_replay.
"""

import random

import arenapy
from asv_benches.support import native
from asv_benches.support.rounds import Line, Way, Ways, medians, named, timed
from asv_benches.support.sizes import MIB, mixed

ROUNDINGS = ("step", "class")
SIZES = (64, 8 * MIB)
LIVE = 256
REPLACED = 50_000
CALLS = Ways.CALLS
WAYS = {
    rounding: Way(f"loops.replace_any({rounding}_pool, {rounding}_live, {CALLS})", operations=CALLS)
    for rounding in ROUNDINGS
}


def namespace():
    """The names that the statements use."""
    loops = native.load("pool_loops")
    names = {"loops": loops}
    for rounding in ROUNDINGS:
        pool = arenapy.Pool(source=arenapy.Host(prefault=False), rounding=rounding)
        live = loops.Blocks(LIVE, mixed(*SIZES))
        loops.fill(pool, live)
        names |= {f"{rounding}_pool": pool, f"{rounding}_live": live}
    return names


def reserved_over_live(rounding, replaced):
    """Peak of bytes reserved over peak of bytes asked for."""
    rng = random.Random(0)
    pool = arenapy.Pool(source=arenapy.Host(prefault=False), rounding=rounding)
    sizes = [int(nbytes) for nbytes in mixed(*SIZES, max(LIVE, replaced))]
    wanted = sizes[:LIVE]
    live = [pool.alloc(nbytes) for nbytes in wanted]
    asked = most = sum(wanted)
    for nbytes in sizes[:replaced]:
        slot = rng.randrange(LIVE)
        live[slot] = None
        live[slot] = pool.alloc(nbytes)
        asked += nbytes - wanted[slot]
        wanted[slot] = nbytes
        most = max(most, asked)
    pool.check()
    return pool.stats().reserved_bytes / most  # which only grew: nothing was trimmed


Rounding = timed("Rounding", "C: replace a Pool block by one of another size", WAYS, namespace)


class Reserved:
    """asv: peak reserved over peak asked for."""

    params = ROUNDINGS
    param_names = ("rounding",)
    timeout = 300

    @named("Peak reserved / peak requested, by rounding", "x")
    def track_reserved_over_live(self, rounding):
        """Of 50,000 blocks replaced."""
        return reserved_over_live(rounding, REPLACED)


def lines(quick):
    """The report's lines."""
    found = medians(WAYS, namespace(), 1, 11 if quick else 101)
    for rounding, seconds in found.items():
        yield Line("rounding", f'"{rounding}": free and allocate', seconds * 1e9, "ns")
    yield Line("rounding", '"class" / "step", time', found["class"] / found["step"])
    for rounding in ROUNDINGS:
        ratio = reserved_over_live(rounding, 5_000 if quick else REPLACED)
        yield Line("rounding", f'"{rounding}": peak reserved / peak asked for', ratio, timed=False)
