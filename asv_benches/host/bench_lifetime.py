"""Arrays that outlive their scope: how much room an arena needs for them.

A loop that keeps the array of the last iteration while it makes the next one has two alive at a
time: no allocator can do with less than 2F, F being the largest size. With varying sizes, what the
older one leaves behind may be too small for the next: 3F. The arenas here have exactly that room
and may not grow, so that a loop that needs more ends in OutOfMemory.
"""

import random

import arenapy
from asv_benches.support.rounds import Line, named

F = 1 << 20
ITERATIONS = 100_000
FRAMES = 10_000
KEPT = 1000  # bytes kept of each frame


def reach(bound, sizes):
    """The most of the arena that was ever used, in F, in a loop of arrays of `sizes`."""
    arena = arenapy.Bump(bound * F)
    base = arena.regions[0].address
    most = 0
    array = None
    for nbytes in sizes:
        with arena.scope():
            array = arena.empty(nbytes, "u1")
            array[0] = array[-1] = 1
            # Right after the allocation two arrays are alive.
            most = max(most, array.__array_interface__["data"][0] + nbytes - base)
    del array
    arena.check()
    arena.reset()
    assert arena.remaining == arena.capacity
    return most / F


def equal(n):
    """Sizes of F each."""
    return [F] * n


def varying(n):
    """Any sizes up to F, F itself among them."""
    rng = random.Random(0)
    return [F if rng.random() < 0.1 else rng.randint(1, F) for _ in range(n)]


def sawtooth(n):
    """Sizes that grow a little each time, so that no gap is ever large enough, then start again."""
    return [F * (i % 64 + 1) // 64 for i in range(n)]


LOOPS = {"equal sizes": (2, equal), "varying sizes": (3, varying), "growing sizes": (3, sawtooth)}


def kept_bytes(frames):
    """A small array kept of each frame: bytes not given back / bytes kept, and room used / F."""
    arena = arenapy.Bump(8 * F, max_bytes=1 << 36)
    rng = random.Random(0)
    kept = []
    for i in range(frames):
        with arena.scope():
            before = arena.empty(rng.randint(1, F), "u1")
            small = arena.empty(KEPT, "u1")
            after = arena.empty(rng.randint(1, F), "u1")
            before[-1] = after[0] = 1
            small.fill(i & 255)
            kept.append(small)
            del before, after, small
    assert all((array == i & 255).all() for i, array in enumerate(kept))
    arena.reset()
    lost = arena.capacity - arena.remaining
    return lost / sum(array.nbytes for array in kept), arena.capacity / F


class Lifetime:
    """asv: room used by 10,000 iterations, in F, the largest size."""

    params = tuple(LOOPS)
    param_names = ("loop",)
    timeout = 300

    @named("Arena size for arrays that outlive their scope", "F")
    def track_reach(self, loop):
        """Fails where the bound does not do."""
        bound, sizes = LOOPS[loop]
        return reach(bound, sizes(ITERATIONS // 10))


class Kept:
    """asv: a small array kept of each of 1,000 frames."""

    timeout = 300

    @named("Bytes that stay used per byte of live arrays", "1")
    def track_bytes_over_kept_bytes(self):
        """1 if nothing else is kept."""
        return kept_bytes(FRAMES // 10)[0]


def lines(quick):
    """The report's lines."""
    n = 5_000 if quick else ITERATIONS
    for name, (bound, sizes) in LOOPS.items():
        try:
            value = reach(bound, sizes(n))
        except arenapy.OutOfMemory:
            value = float("inf")
        what = f"{n} iterations, {name}, room used"
        yield Line("lifetime", what, value, "F", bound, timed=False)
    frames = 1_000 if quick else FRAMES
    lost, room = kept_bytes(frames)
    what = f"bytes not free / bytes kept, {frames} frames"
    yield Line("lifetime", what, lost, "x", 1.0, timed=False)
    yield Line("lifetime", f"room used by {frames} frames, each keeping {KEPT} bytes", room, "F")
