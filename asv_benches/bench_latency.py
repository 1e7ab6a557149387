"""What one call from Python costs, beside its peers.

Every figure has the cost of the loop around the call in it. Results are dropped at once, as
temporaries are. The arena is reset between rounds, which is not measured: that is how it is used,
once for many allocations.

What this does not show: the memory being used. A block of an arena is likely to be cold when it is
new, one of malloc's to be warm; see bench_faults for memory that was never touched.
"""

import numpy as np

import arenapy

from . import native
from .rounds import Line, Way, Ways, medians

try:
    import pyarrow
except ImportError:
    pyarrow = None

CALLS = Ways.CALLS
ARENA = CALLS * 64 + (1 << 20)

OURS = "arena.alloc(64)"
NOOP = "a method that does nothing"
BYTEARRAY = "bytearray(64)"
EMPTY = "np.empty(64, 'u1')"
ARROW = "pyarrow.allocate_buffer(64)"
BLOCKS = {
    OURS: Way("alloc(64)", "arena.reset(); alloc = arena.alloc"),
    NOOP: Way("alloc(64)", "alloc = noop.alloc"),
    BYTEARRAY: Way("bytearray(64)"),
    EMPTY: Way("empty(64, 'u1')", "empty = np.empty"),
    ARROW: Way("allocate_buffer(64)", "allocate_buffer = pyarrow.allocate_buffer"),
    "object()": Way("object()"),
}

OUR_ARRAY = "arena.empty((8,), 'f8')"
NP_ARRAY = "np.empty((8,), 'f8')"
ARRAYS = {
    OUR_ARRAY: Way("empty((8,), 'f8')", "arena.reset(); empty = arena.empty"),
    NP_ARRAY: Way("empty((8,), 'f8')", "empty = np.empty"),
}

MARK_RESET = "m = arena.mark(); arena.reset(m)"
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
}

EXPORTS = {
    "memoryview(b)": Way("memoryview(b)", "b = arena.alloc(64)"),
    "memoryview(bytearray)": Way("memoryview(b)", "b = bytearray(64)"),
    "np.asarray(b)": Way("asarray(b)", "b = arena.alloc(64); asarray = np.asarray"),
    "np.frombuffer(b)": Way(
        "frombuffer(b, 'u1')", "b = arena.alloc(64); frombuffer = np.frombuffer"
    ),
    "b.array()": Way("array()", "array = arena.alloc(64).array"),
    "memoryview(arena.alloc(64))": Way(
        "memoryview(alloc(64))", "arena.reset(); alloc = arena.alloc"
    ),
}


def namespace():
    """The names that the statements use."""
    arena = arenapy.Bump(ARENA)
    return {"arena": arena, "noop": native.load().Noop(), "np": np, "pyarrow": pyarrow}


class Block(Ways):
    """64 bytes."""

    ways = BLOCKS
    params = tuple(BLOCKS)
    namespace = staticmethod(namespace)

    def time_10_000(self, way):
        """Make and drop."""
        self.loop.timeit(self.runs)


class Array(Ways):
    """An array of 64 bytes."""

    ways = ARRAYS
    params = tuple(ARRAYS)
    namespace = staticmethod(namespace)

    def time_10_000(self, way):
        """Make and drop."""
        self.loop.timeit(self.runs)


class MarkReset(Ways):
    """A frame with little or nothing in it."""

    ways = MARKS
    params = tuple(MARKS)
    namespace = staticmethod(namespace)

    def time_10_000(self, way):
        """Mark and go back."""
        self.loop.timeit(self.runs)


class Export(Ways):
    """What looking at a block costs."""

    ways = EXPORTS
    params = tuple(EXPORTS)
    namespace = staticmethod(namespace)

    def time_10_000(self, way):
        """Export and drop."""
        self.loop.timeit(self.runs)


def lines(quick):
    """The report's lines."""
    rounds = 51 if quick else 501
    names = namespace()
    blocks = {name: way for name, way in BLOCKS.items() if name != ARROW or pyarrow}
    found = {}
    # What is compared takes turns; what is not need not.
    for group in (blocks, ARRAYS, MARKS, EXPORTS):
        found |= medians(group, names, CALLS, rounds)
        for name in group:
            ns = found[name] * 1e9
            yield Line("latency", name, ns, "ns", 80 if name == MARK_RESET else None)
    for peer, limit in ((NOOP, 1.5), (BYTEARRAY, 0.5), (EMPTY, 0.4), (ARROW, None)):
        if peer in found:
            yield Line("latency", f"{OURS} / {peer}", found[OURS] / found[peer], "x", limit)
    yield Line("latency", f"{OUR_ARRAY} / {NP_ARRAY}", found[OUR_ARRAY] / found[NP_ARRAY], "x", 1.0)
