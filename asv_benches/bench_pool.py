"""What a block of a Slab or a Pool costs from Python, beside its peers.

Each is made and dropped at once, so that the allocator hands out the block that came back last; the
cost of the loop is in every figure. All that is compared takes turns in one run.

What this does not show: blocks that stay (bench_curve), and memory being used: a block of malloc's
is as warm as ours where it is recycled, and faults where it is not (bench_malloc, bench_faults).
"""

import numpy as np

import arenapy

from .bench_faults import KIB, MIB, text
from .bench_latency import ARROW, BYTEARRAY, EMPTY, pyarrow
from .bench_latency import BLOCKS as PEERS
from .rounds import Line, Way, Ways, enough, medians, turns

SIZES = (4 * KIB, 64 * KIB, MIB, 64 * MIB)
MANY = 1000
MANY_BYTES = 4 * KIB

SLAB = "slab.alloc()"
POOL = {nbytes: f"pool.alloc({text(nbytes)})" for nbytes in SIZES}
BLOCKS = {
    SLAB: Way("alloc()", "alloc = slab.alloc"),
    "pool.alloc(64)": Way("alloc(64)", "alloc = pool.alloc"),
    **{name: Way("alloc(n)", f"alloc = pool.alloc; n = {n}") for n, name in POOL.items()},
    **{name: PEERS[name] for name in (BYTEARRAY, EMPTY, ARROW)},
}

# Of as many bytes: a bytearray is also zeroed, and what malloc maps anew is not yet there.
OTHERS = {
    f"{name}({text(n)})": Way(f"make(n{rest})", f"make = {before}; n = {n}")
    for n in SIZES
    for name, before, rest in (
        ("np.empty", "np.empty", ", 'u1'"),
        ("pyarrow.allocate_buffer", "pyarrow.allocate_buffer", ""),
    )
}

SHAPES = ("(8,), 'f8'", "(1000, 1000), 'f4'")
ARRAYS = {
    f"{name}({shape})": Way(f"empty({shape})", f"empty = {name}")
    for shape in SHAPES
    for name in ("pool.empty", "slab.empty", "np.empty")
    if name != "slab.empty" or shape == SHAPES[0]
}

ONE_CALL = f"pool.alloc_many(sizes), {MANY} of 4 KiB"
MANY_CALLS = f"pool.alloc(n) for n in sizes, {MANY} of 4 KiB"
ONE_CALL_ITEMS = f"slab.alloc_many({MANY})"
MANY_ITEMS = f"slab.alloc(), {MANY} times"
BATCHES = {
    ONE_CALL: Way("alloc_many(sizes)", "alloc_many = pool.alloc_many", MANY),
    MANY_CALLS: Way("[alloc(n) for n in sizes]", "alloc = pool.alloc", MANY),
    ONE_CALL_ITEMS: Way(f"alloc_many({MANY})", "alloc_many = slab.alloc_many", MANY),
    MANY_ITEMS: Way(f"[alloc() for _ in range({MANY})]", "alloc = slab.alloc", MANY),
}


def namespace():
    """The names that the statements use."""
    return {
        "slab": arenapy.Slab(64, 2 * MANY),
        "pool": arenapy.Pool(),
        "sizes": [MANY_BYTES] * MANY,
        "np": np,
        "pyarrow": pyarrow,
    }


class Block(Ways):
    """One block."""

    ways = BLOCKS
    params = tuple(BLOCKS)
    namespace = staticmethod(namespace)

    def time_10_000(self, way):
        """Make and drop."""
        self.loop.timeit(self.runs)


class Array(Ways):
    """An array."""

    ways = ARRAYS
    params = tuple(ARRAYS)
    namespace = staticmethod(namespace)

    def time_10_000(self, way):
        """Make and drop."""
        self.loop.timeit(self.runs)


class Many(Ways):
    """1,000 blocks in one call, or in as many."""

    ways = BATCHES
    params = tuple(BATCHES)
    namespace = staticmethod(namespace)

    def time_10_000(self, way):
        """Make and drop, ten times."""
        self.loop.timeit(self.runs)


def lines(quick):
    """The report's lines."""
    rounds = 51 if quick else 501
    names = namespace()
    here = {name: way for name, way in BLOCKS.items() if name != ARROW or pyarrow}
    found = medians(here, names, Ways.CALLS, rounds)
    others = {
        name: way.loop(names) for name, way in OTHERS.items() if pyarrow or "pyarrow" not in name
    }
    runs = {name: enough(loop, 0.002) for name, loop in others.items()}
    found |= turns(others, runs, rounds // 5)
    found |= medians(ARRAYS, names, Ways.CALLS // 4, rounds)
    found |= medians(BATCHES, names, 4, rounds)
    for name, seconds in found.items():
        yield Line("pool", name, seconds * 1e9, "ns")
    for name, limit in ((SLAB, 0.55), *((name, 0.8) for name in POOL.values())):
        for peer in (BYTEARRAY, EMPTY, ARROW):
            if peer in found:
                ratio = found[name] / found[peer]
                yield Line(
                    "pool", f"{name} / {peer}", ratio, limit=limit if peer == BYTEARRAY else None
                )
    ours = [found[name] for name in POOL.values()]
    yield Line(
        "pool", "pool.alloc, the dearest size / the cheapest", max(ours) / min(ours), limit=1.3
    )
    for shape in SHAPES:
        ratio = found[f"pool.empty({shape})"] / found[f"np.empty({shape})"]
        yield Line("pool", f"pool.empty / np.empty, {shape}", ratio)
    for one, many in ((ONE_CALL, MANY_CALLS), (ONE_CALL_ITEMS, MANY_ITEMS)):
        yield Line("pool", f"{one} / one by one", found[one] / found[many], limit=1.0)
