"""The cost of an allocation with 10 to 1,000,000 live blocks of mixed sizes.

Two orders: a random block is replaced by one of another size, or the last 64 are freed and
allocated again, the last one first. A call that looks at a block that it did not just use pays for
the caches when there are many; nothing may cost more because it looks at all of them. That no
call does shows in the worst single call, of pools that are filled, emptied in random order, and
filled with larger blocks, for which the smaller ones must have been merged. Each worst call is the
worst of what was the least of several repetitions: a machine that was busy is not in it. What
grows with the number of blocks would be 1,000 times as dear with 1,000,000 as with 1,000.

What this does not show: memory being used. Pages are faulted in on first use here, and blocks are
not touched; bytearrays are, since Python zeroes them.
"""

import random
from contextlib import ExitStack

import numpy as np

import arenapy
from asv_benches.support import native
from asv_benches.support.process import installed
from asv_benches.support.rounds import Line, Way, enough, medians, named, turns
from asv_benches.support.sizes import KIB, mixed
from asv_benches.support.workers import OURS, Worker

COUNTS = tuple(10**i for i in range(1, 7))
FEW, MANY = 1_000, 10_000  # by then, all that happens has happened
SMALL = (64, 8 * KIB)  # bytes, log-uniform: slots in shared pages
LARGE = (33 * KIB, 128 * KIB)  # blocks with pages of their own
KINDS = {"small": SMALL, "large": LARGE}
STEPS = ("fill", "free", "refill")
GROWTH = 20  # of the cost, where linear growth were 1,000
WORST_GROWTH = 20  # of the worst call from MANY blocks on, where linear growth were 100
LAST = 64
POOL = "arenapy.Pool(source=arenapy.Host(prefault=False))"
HEAPS = {
    "pool": (POOL, SMALL),
    "pool, large": (POOL, LARGE),
    "slab": ("arenapy.Slab(64, {count} + 64, source=arenapy.Host(prefault=False))", (64, 65)),
}
CALLS = 6_400
ORDERS = {
    "random": Way(f"loops.replace_any(heap, live, {CALLS})", operations=CALLS),
    "last first": Way(f"loops.replace_last(heap, live, {CALLS})", operations=CALLS),
}
REPETITIONS = 5


def worker(name, count):
    """A process with so many live blocks, of one of HEAPS or of a malloc."""
    heap, (least, most) = HEAPS.get(name, ("heap", SMALL))
    return Worker(
        OURS if name in HEAPS else name,
        f"heap = {heap.format(count=count)}; "
        f"live = loops.Blocks({count}, mixed({least}, {most})); loops.fill(heap, live)",
    )


def in_c(names, count, rounds):
    """{(name, order): seconds of a free and an allocation}."""
    found = {}
    with ExitStack() as stack:
        workers = {name: stack.enter_context(worker(name, count)) for name in names}
        for order, way in ORDERS.items():
            loops = {name: process.loop(way) for name, process in workers.items()}
            for name, seconds in turns(loops, 1, rounds).items():
                found[name, order] = seconds / way.operations
    return found


def python_ways(count):
    """Names, and Ways by (name, order), for so many live Python objects."""
    rng = random.Random(0)
    drawn = [int(n) for n in mixed(*SMALL)]
    pool = arenapy.Pool(source=arenapy.Host(prefault=False))
    names = {
        "pairs": [(rng.randrange(count), rng.choice(drawn)) for _ in range(CALLS)],
        "last": [rng.choice(drawn) for _ in range(LAST)],
    }
    ways = {}
    for i, (name, make) in enumerate((("pool.alloc", pool.alloc), ("bytearray", bytearray))):
        names |= {f"make{i}": make, f"live{i}": [make(rng.choice(drawn)) for _ in range(count)]}
        before = f"make = make{i}; live = live{i}; append = live.append; pop = live.pop"
        for order, statement, operations in (
            ("random", "for i, n in pairs: live[i] = make(n)", CALLS),
            ("last first", "for _ in last: pop()\nfor n in last: append(make(n))", LAST),
        ):
            if order == "random" or count > LAST:
                ways[name, order] = Way(f"\n{statement}", before, operations)
    return names, ways


def in_python(count, rounds):
    """{(name, order): seconds of a drop and an allocation}."""
    names, ways = python_ways(count)
    found = {}
    for order in ORDERS:
        some = {key: way for key, way in ways.items() if key[1] == order}
        runs = {key: enough(way.loop(names), 0.0005) for key, way in some.items()}
        found |= medians(some, names, runs, rounds)
    return found


def each_call(count, kind):
    """{step: nanoseconds of each call}, the least of some repetitions."""
    loops = native.load("pool_loops")
    order = np.random.default_rng(0).permutation(count).astype("u8")
    larger = max(1, count // 8)
    found = {
        step: np.full(calls, 2**63, "u8")
        for step, calls in zip(STEPS, (count, count, larger), strict=True)
    }
    fill, free, refill = found.values()
    for _ in range(REPETITIONS):
        pool = arenapy.Pool(source=arenapy.Host(prefault=False))
        live = loops.Blocks(count, mixed(*kind))
        loops.timed_fill(pool, live, fill)
        loops.timed_empty(pool, live, order, free)
        live = loops.Blocks(larger, mixed(kind[0] * 8, kind[1] * 8))
        loops.timed_fill(pool, live, refill)
        loops.empty(pool, live)
        pool.check()
    return found


def metadata(count, kind):
    """Bytes of bookkeeping a block, with so many live."""
    loops = native.load("pool_loops")
    pool = arenapy.Pool(source=arenapy.Host(prefault=False))
    live = loops.Blocks(count, mixed(*kind))
    loops.fill(pool, live)
    nbytes = pool.stats().metadata_bytes / count
    loops.empty(pool, live)
    return nbytes


class Curve:
    """asv: a free and an allocation in C."""

    params = ((*HEAPS, *installed()), COUNTS[::2], tuple(ORDERS))
    param_names = ("allocator", "live", "order")
    timeout = 600

    @named("C free + alloc, by number of live blocks", "ns")
    def track_alloc_free(self, allocator, live, order):
        """The median of rounds in a worker."""
        return in_c([allocator], live, 21)[allocator, order] * 1e9


class PythonCurve:
    """asv: a drop and an allocation from Python."""

    params = (COUNTS[::2], tuple(ORDERS), ("pool.alloc", "bytearray"))
    param_names = ("live", "order", "allocator")
    timeout = 600

    @named("Python free + alloc, by number of live blocks", "ns")
    def track_alloc_drop(self, live, order, allocator):
        """Both take turns; one is kept."""
        return in_python(live, 21).get((allocator, order), float("nan")) * 1e9


class EachCall:
    """asv: the slowest single call, and bytes of bookkeeping a block."""

    params = (COUNTS[3:], tuple(KINDS))
    param_names = ("live", "sizes")
    timeout = 600

    @named("Slowest single Pool call", "ns")
    def track_worst_call(self, live, sizes):
        """Of filling, freeing and filling again."""
        found = each_call(live, KINDS[sizes])
        return max(int(calls.max()) for calls in found.values())

    @named("Bookkeeping memory of a Pool per block", "bytes")
    def track_metadata(self, live, sizes):
        """With all of them live."""
        return metadata(live, KINDS[sizes])


def lines(quick):
    """The report's lines."""
    rounds = 11 if quick else 51
    counts = COUNTS[:-1] if quick else COUNTS
    curve = {}
    for count in counts:
        found = in_c([*HEAPS, *installed()], count, rounds) | in_python(count, rounds)
        for (name, order), seconds in found.items():
            curve[name, order, count] = seconds
    for name, order in dict.fromkeys(key[:2] for key in curve):
        for count in counts:
            if (name, order, count) in curve:
                ns = curve[name, order, count] * 1e9
                yield Line("curve", f"{name}, {order}: {count:,} live", ns, "ns")
        growth = curve[name, order, counts[-1]] / curve[name, order, FEW]
        limit = GROWTH if name in HEAPS or name == "pool.alloc" else None
        yield Line("curve", f"{name}, {order}: {counts[-1]:,} / {FEW:,}", growth, limit=limit)
    for kind, sizes in KINDS.items():
        calls = {count: each_call(count, sizes) for count in counts[2:]}
        for step in STEPS:
            for count, found in calls.items():
                mean, worst = found[step].mean(), found[step].max() / 1e3
                yield Line("curve", f"{kind}, {step}, mean call: {count:,} live", mean, "ns")
                yield Line("curve", f"{kind}, {step}, worst call: {count:,} live", worst, "µs")
            growth = calls[counts[-1]][step].max() / calls[MANY][step].max()
            what = f"{kind}, {step}, worst call: {counts[-1]:,} / {MANY:,}"
            yield Line("curve", what, growth, limit=WORST_GROWTH)
        nbytes = metadata(counts[-1], sizes)
        yield Line("curve", f"{kind}, metadata: {counts[-1]:,} live", nbytes, "bytes/block")
