"""The cost of one call from Python, beside its peers: blocks, arrays, frames, batches.

Every figure has the cost of the loop around the call in it. Results are dropped at once, as
temporaries are, so that a Slab and a Pool hand out the block that came back last. The arena is
reset between rounds, which is not measured: that is how it is used, once for many allocations. All
that is compared takes turns in one run.

What this does not show: blocks that stay (bench_curve), and the memory being used: a block of an
arena is likely to be cold when it is new, one of malloc's as warm as ours where it is recycled, and
faults where it is not (bench_c, bench_faults).
"""

import numpy as np

import arenapy
from asv_benches.support import native
from asv_benches.support.rounds import Line, Way, Ways, enough, medians, timed, turns
from asv_benches.support.sizes import KIB, MIB, text

try:
    import pyarrow
except ImportError:
    pyarrow = None

CALLS = Ways.CALLS
ARENA = CALLS * 64 + (1 << 20)
SIZES = (4 * KIB, 64 * KIB, MIB, 64 * MIB)

OURS = "arena.alloc(64)"
SLAB = "slab.alloc()"
POOL = {nbytes: f"pool.alloc({text(nbytes)})" for nbytes in SIZES}
NOOP = "a method that does nothing"
BYTEARRAY = "bytearray(64)"
EMPTY = "np.empty(64, 'u1')"
ARROW = "pyarrow.allocate_buffer(64)"
PEERS = {
    NOOP: Way("alloc(64)", "alloc = noop.alloc"),
    BYTEARRAY: Way("bytearray(64)"),
    EMPTY: Way("empty(64, 'u1')", "empty = np.empty"),
    ARROW: Way("allocate_buffer(64)", "allocate_buffer = pyarrow.allocate_buffer"),
    "object()": Way("object()"),
}
BLOCKS = {
    OURS: Way("alloc(64)", "arena.reset(); alloc = arena.alloc"),
    SLAB: Way("alloc()", "alloc = slab.alloc"),
    "pool.alloc(64)": Way("alloc(64)", "alloc = pool.alloc"),
    **PEERS,  # among the first eight, which asv's pages show at once
    **{name: Way("alloc(n)", f"alloc = pool.alloc; n = {n}") for n, name in POOL.items()},
}

# Of as many bytes: what malloc maps anew is not yet there.
OTHERS = {
    f"{name}({text(n)})": Way(f"make(n{rest})", f"make = {before}; n = {n}")
    for n in SIZES
    for name, before, rest in (
        ("np.empty", "np.empty", ", 'u1'"),
        ("pyarrow.allocate_buffer", "pyarrow.allocate_buffer", ""),
    )
}

SHAPES = ("(8,), 'f8'", "(1000, 1000), 'f4'")
OUR_ARRAY = f"arena.empty({SHAPES[0]})"
NP_ARRAY = f"np.empty({SHAPES[0]})"
ARRAYS = {OUR_ARRAY: Way(f"empty({SHAPES[0]})", "arena.reset(); empty = arena.empty")} | {
    f"{name}({shape})": Way(f"empty({shape})", f"empty = {name}")
    for shape in SHAPES
    for name in ("pool.empty", "slab.empty", "np.empty")
    if name != "slab.empty" or shape == SHAPES[0]
}

# Arguments that users give for a dtype, other than a string; the first three have a budget.
KINDS = (
    "np.dtype('f8')",
    "np.float64",
    "float",
    "np.dtype('>f8')",
    "np.dtype([('x', 'f4'), ('n', 'i4')])",
)
KINDS_LIMITED = 3
DTYPES = {
    f"{name}((8,), {kind})": Way("empty((8,), kind)", f"{before}; kind = {kind}; empty = {name}")
    for kind in KINDS
    for name, before in (
        ("arena.empty", "arena.reset()"),
        ("pool.empty", "pass"),
        ("slab.empty", "pass"),
        ("np.empty", "pass"),
    )
}
TYPED = {
    "arena.zeros((8,), kind)": Way("zeros((8,), kind)", "arena.reset(); zeros = arena.zeros"),
    "np.zeros((8,), kind)": Way("zeros((8,), kind)", "zeros = np.zeros"),
    "b.view((8,), kind)": Way("view((8,), kind)", "view = block.view"),
    "b.array((8,), kind)": Way("array((8,), kind)", "array = block.array"),
    "np.ndarray((8,), kind, b)": Way("ndarray((8,), kind, block)", "ndarray = np.ndarray"),
    "arena.struct_of_arrays({'x': kind, 'y': kind}, 8)": Way(
        "struct_of_arrays({'x': kind, 'y': kind}, 8)",
        "arena.reset(); struct_of_arrays = arena.struct_of_arrays",
    ),
    "{'x': np.empty(8, kind), 'y': np.empty(8, kind)}": Way(
        "{'x': empty(8, kind), 'y': empty(8, kind)}", "empty = np.empty"
    ),
    "arena.copy(array)": Way("copy(array)", "arena.reset(); copy = arena.copy"),
    "np.array(array)": Way("copy(array)", "copy = np.array"),
}

MARK_RESET = "m = arena.mark(); arena.reset(m)"
LATE = "with arena.scope(): x = arena.empty(8), in a function that x ends with"
WORN = 10_000
WORN_SCOPE = f"with arena.scope(): pass, after {WORN:,} of those"
CROWDED_SCOPE = f"with arena.scope(): pass, beside {WORN:,} arrays that outlived theirs"
MARKS = {
    MARK_RESET: Way(
        "m = mark(); reset(m)", "arena.reset(); mark = arena.mark; reset = arena.reset"
    ),
    "the same, of methods that do nothing": Way(
        "m = mark(); reset(m)", "mark = noop.mark; reset = noop.reset"
    ),
    "the same, with an alloc(64) between": Way(
        "m = mark(); alloc(64); reset(m)",
        "arena.reset(); mark = arena.mark; alloc = arena.alloc; reset = arena.reset",
    ),
    "with arena.scope(): pass": Way("\nwith scope(): pass", "arena.reset(); scope = arena.scope"),
    # No reset: what these leave behind is what is measured.
    LATE: Way("late()"),
    WORN_SCOPE: Way("\nwith scope(): pass", "scope = worn.scope"),
    CROWDED_SCOPE: Way("\nwith scope(): pass", "scope = crowded.scope"),
}

MANY = 1000
MANY_BYTES = 4 * KIB
ONE_CALL = f"pool.alloc_many(sizes), {MANY} of 4 KiB"
MANY_CALLS = f"pool.alloc(n) for n in sizes, {MANY} of 4 KiB"
ONE_CALL_ITEMS = f"slab.alloc_many({MANY})"
MANY_ITEMS = f"slab.alloc(), {MANY} times"
BATCHES = {
    ONE_CALL: Way("alloc_many(sizes)", "alloc_many = pool.alloc_many", MANY),
    MANY_CALLS: Way("[alloc(n) for n in sizes]", "alloc = pool.alloc", MANY),
    ONE_CALL_ITEMS: Way(f"alloc_many({MANY})", "alloc_many = slab.alloc_many", MANY),
    MANY_ITEMS: Way(f"[alloc() for _ in range({MANY})]", "alloc = slab.alloc", MANY),
    f"np.empty(n, 'u1') for n in sizes, {MANY} of 4 KiB": Way(
        "[empty(n, 'u1') for n in sizes]", "empty = np.empty", MANY
    ),
}


def frame_of(arena):
    """The function that LATE describes."""

    def frame():
        with arena.scope():
            x = arena.empty(8)  # noqa: F841

    return frame


def namespace():
    """The names that the statements use; what is not installed is None."""
    worn = arenapy.Bump(1 << 20)
    late = frame_of(worn)
    for _ in range(WORN):
        late()
    crowded = arenapy.Bump(WORN * 256)
    with crowded.scope():  # 99 bytes: so that there is a gap behind each
        outlived = [crowded.empty(99, "u1") for _ in range(WORN)]
    return {
        "worn": worn,
        "crowded": crowded,
        "outlived": outlived,
        "late": late,
        "arena": arenapy.Bump(ARENA),
        "slab": arenapy.Slab(64, 2 * MANY),
        "pool": arenapy.Pool(),
        "sizes": [MANY_BYTES] * MANY,
        "noop": native.load().Noop(),
        "np": np,
        "pyarrow": pyarrow,
        "kind": np.dtype("f8"),
        "block": arenapy.Bump(1 << 16).alloc(64),
        "array": np.arange(8.0),
    }


Block = timed("Block", "Allocate and free a small block", BLOCKS, namespace)
LargeBlock = timed(
    "LargeBlock",
    "Allocate and free a larger block",
    {n: BLOCKS[n] for n in POOL.values()} | OTHERS,
    namespace,
)
Array = timed("Array", "Allocate and free an array", ARRAYS, namespace)
Dtype = timed("Dtype", "Allocate and free an array, by kind of dtype", DTYPES, namespace)
Typed = timed("Typed", "Allocate and free an array of one dtype object", TYPED, namespace)
Frame = timed("Frame", "Enter and leave a scope", MARKS, namespace)
Batch = timed("Batch", "Allocate many blocks, in one call or one by one", BATCHES, namespace)


def lines(quick):
    """The report's lines on an arena."""
    rounds = 51 if quick else 501
    names = namespace()
    blocks = {name: BLOCKS[name] for name in (OURS, *PEERS) if name != ARROW or pyarrow}
    arrays = {name: ARRAYS[name] for name in (OUR_ARRAY, NP_ARRAY)} | DTYPES
    found = {}
    # Ways that are compared take turns; others need not.
    for group in (blocks, arrays, MARKS):
        found |= medians(group, names, CALLS, rounds)
        for name in group:
            ns = found[name] * 1e9
            yield Line("latency", name, ns, "ns", 80 if name == MARK_RESET else None)
    for peer, limit in ((NOOP, 1.5), (BYTEARRAY, 0.5), (EMPTY, 0.4), (ARROW, None)):
        if peer in found:
            yield Line("latency", f"{OURS} / {peer}", found[OURS] / found[peer], "x", limit)
    yield Line("latency", f"{OUR_ARRAY} / {NP_ARRAY}", found[OUR_ARRAY] / found[NP_ARRAY], "x", 1.0)
    for i, kind in enumerate(KINDS):
        limit = 0.9 if i < KINDS_LIMITED else None
        peer = found[f"np.empty((8,), {kind})"]
        for ours in ("arena", "pool", "slab"):
            ratio = found[f"{ours}.empty((8,), {kind})"] / peer
            yield Line("latency", f"{ours}.empty / np.empty, {kind}", ratio, limit=limit)


def pool_lines(quick):
    """The report's lines on a Slab and a Pool."""
    rounds = 51 if quick else 501
    names = namespace()
    compared = [name for name in (BYTEARRAY, EMPTY, ARROW) if name != ARROW or pyarrow]
    here = {name: BLOCKS[name] for name in (SLAB, "pool.alloc(64)", *POOL.values(), *compared)}
    arrays = {name: way for name, way in ARRAYS.items() if name != OUR_ARRAY}
    batches = {name: BATCHES[name] for name in (ONE_CALL, MANY_CALLS, ONE_CALL_ITEMS, MANY_ITEMS)}
    found = medians(here, names, CALLS, rounds)
    others = {name: way.loop(names) for name, way in OTHERS.items() if not way.missing(names)}
    runs = {name: enough(loop, 0.002) for name, loop in others.items()}
    found |= turns(others, runs, rounds // 5)
    found |= medians(arrays, names, CALLS // 4, rounds)
    found |= medians(batches, names, 4, rounds)
    for name, seconds in found.items():
        yield Line("pool", name, seconds * 1e9, "ns")
    for name, limit in ((SLAB, 0.55), *((name, 0.8) for name in POOL.values())):
        for peer in compared:
            ratio = found[name] / found[peer]
            yield Line(
                "pool", f"{name} / {peer}", ratio, limit=limit if peer == BYTEARRAY else None
            )
    ours = [found[name] for name in POOL.values()]
    yield Line(
        "pool", "pool.alloc, the slowest size / the quickest", max(ours) / min(ours), limit=1.3
    )
    for shape in SHAPES:
        ratio = found[f"pool.empty({shape})"] / found[f"np.empty({shape})"]
        yield Line("pool", f"pool.empty / np.empty, {shape}", ratio)
    for one, many in ((ONE_CALL, MANY_CALLS), (ONE_CALL_ITEMS, MANY_ITEMS)):
        yield Line("pool", f"{one} / one by one", found[one] / found[many], limit=1.0)
