"""Page faults: how many loops take once they are warm, and what not taking them saves.

An iteration enters a scope, makes one array and writes all of it. The name of the array outlives
the scope, as in most programs, so that two of them are alive at times: the arena has twice the
room. A pool and a slab are used with mixed sizes, the last few arrays kept. NumPy's
own arrays, shown beside, fault when malloc returns and takes memory by the call.

What this does not show: the price of prefaulting, paid once; see bench_prefault.
"""

import itertools
import random
from collections import deque

import numpy as np

import arenapy
from asv_benches.support import native
from asv_benches.support.instruments import page_faults
from asv_benches.support.rounds import Line, Way, medians, named, timed
from asv_benches.support.sizes import KIB, MIB, text

SIZES = tuple(4 * KIB << 2 * i for i in range(9))  # 4 KiB to 256 MiB
ITERATIONS = 1_000
PEER_ITERATIONS = 20
WARM_UP = 3  # iterations: the interpreter's own memory, malloc's thresholds
MIXED_ITERATIONS = 10_000
MIXED_WARM_UP = 1_000
MIXED = (64, 4 * MIB)
KEPT = 8
TOUCHED = 64 * MIB
PAGE = 4 * KIB

TOUCH = {
    "arena.empty(64 MiB) + touch": Way(
        "touch(empty(n, 'u1'), 4096)", "arena.reset(); empty = arena.empty; touch = loops.touch"
    ),
    "np.empty(64 MiB) + touch": Way(
        "touch(empty(n, 'u1'), 4096)", "empty = np.empty; touch = loops.touch"
    ),
}


def total_faults(step, iterations, warm_up=WARM_UP):
    """Minor faults of so many calls of `step`, which is given the number of the call."""
    numbers = itertools.count()
    return round(
        page_faults(lambda: step(next(numbers)), repeat=iterations, warmup=warm_up) * iterations
    )


def arena_faults(nbytes, iterations):
    """Minor faults of so many iterations with an arena."""
    arena = arenapy.Bump(2 * nbytes)
    array = None

    def step(i):
        nonlocal array
        with arena.scope():
            array = arena.empty(nbytes, "u1")
            array.fill(i & 255)

    faults = total_faults(step, iterations)
    assert array[0] == array[-1] == (WARM_UP + iterations - 1) & 255
    return faults


def numpy_faults(nbytes, iterations):
    """The same with arrays of NumPy's own."""
    array = None

    def step(i):
        nonlocal array
        array = np.empty(nbytes, "u1")
        array.fill(i & 255)

    return total_faults(step, iterations)


def mixed_faults(empty, iterations, largest=MIXED[1]):
    """Minor faults of iterations that make and write an array of another size each."""
    rng = random.Random(0)
    least, most = MIXED[0], largest
    sizes = [int(least * (most / least) ** rng.random()) for _ in range(iterations)]
    sizes[:: iterations // 10] = [most] * len(sizes[:: iterations // 10])
    kept = deque(maxlen=KEPT)

    def step(i):
        array = empty(sizes[i % iterations], "u1")
        array.fill(i & 255)
        kept.append(array)

    faults = total_faults(step, iterations, MIXED_WARM_UP)
    assert kept[-1][0] == kept[-1][-1] == (MIXED_WARM_UP + iterations - 1) & 255
    return faults


def mixed_makers():
    """{name: (empty, size of the largest array)}."""
    room = 2 * (KEPT + 2) * MIXED[1]
    return {
        "pool": (arenapy.Pool(initial_bytes=room).empty, MIXED[1]),
        "slab": (arenapy.Slab(64 * KIB, KEPT + 2).empty, 64 * KIB),
        "np.empty": (np.empty, MIXED[1]),
    }


def namespace():
    """The names that the statements use."""
    return {
        "arena": arenapy.Bump(TOUCHED),
        "loops": native.load(),
        "np": np,
        "n": TOUCHED,
    }


class Faults:
    """asv: minor faults of an iteration; none is what is promised."""

    params = (("arena", "np.empty"), tuple(map(text, SIZES[::2])))
    param_names = ("memory", "array")
    timeout = 600

    @named("Page faults of a scope with one written array", "faults")
    def track_array(self, memory, array):
        """Of 20 iterations."""
        count = arena_faults if memory == "arena" else numpy_faults
        nbytes = next(nbytes for nbytes in SIZES if text(nbytes) == array)
        return count(nbytes, PEER_ITERATIONS) / PEER_ITERATIONS


class MixedFaults:
    """asv: 10,000 arrays, the last few kept."""

    params = ("pool", "slab", "np.empty")
    param_names = ("allocator",)
    timeout = 300

    @named("Page faults of 10,000 arrays of mixed sizes", "faults")
    def track_mixed(self, allocator):
        """Allocate, write all, drop."""
        empty, largest = mixed_makers()[allocator]
        return mixed_faults(empty, MIXED_ITERATIONS, largest)


FirstTouch = timed(
    "FirstTouch", "Allocate 64 MiB and write to each page", TOUCH, namespace, 1, unit="ms"
)


def lines(quick):
    """The report's lines."""
    iterations = 100 if quick else ITERATIONS
    for nbytes in SIZES:
        faults = arena_faults(nbytes, iterations)
        what = f"{iterations} iterations of {text(nbytes)}"
        yield Line("faults", what, faults, "faults", 0, timed=False)
    for nbytes in SIZES:
        faults = numpy_faults(nbytes, PEER_ITERATIONS) / PEER_ITERATIONS
        yield Line("faults", f"np.empty of {text(nbytes)}, an iteration", faults, "faults")
    for name, (empty, largest) in mixed_makers().items():
        count = MIXED_ITERATIONS // 10 if quick else MIXED_ITERATIONS
        faults = mixed_faults(empty, count, largest)
        what = f"{count} arrays of mixed sizes to {text(largest)}, {name}"
        limit = None if name == "np.empty" else 0
        yield Line("faults", what, faults, "faults", limit, timed=False)
    names = namespace()
    found = medians(TOUCH, names, 1, 11 if quick else 51)
    for name, seconds in found.items():
        yield Line("faults", name, seconds * 1e3, "ms")
    ours, theirs = found.values()
    yield Line(
        "faults", "np.empty(64 MiB) + touch / arena's", theirs / ours, "x", 20, at_least=True
    )
