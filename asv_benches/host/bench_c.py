"""The cost of the C calls: loops compiled as a user's would be, beside four mallocs.

*The arena.* The compiler inlines bump_alloc. In the plain loop it may do what it likes as long as
every pointer is made; "opaque" stands for a caller whose other code the compiler cannot see
through, where the cursor goes through memory each time. No block is touched, and arenas are reset
between rounds.

*Slab and Pool*, with 64 blocks live, in two orders: each slot is freed and filled again before the
next one, or all 64 are freed and then all are filled. "Touched" is with the first byte of each
block written. Mallocs are preloaded into processes of their own (workers.py), which take turns with
ours; every loop is compiled from the same lines. The pool of 64 MiB blocks takes 4 GiB of memory.

What this does not show: other sizes at the same time (bench_curve), other threads (bench_threads).
"""

from contextlib import ExitStack

import arenapy
from asv_benches.support import native
from asv_benches.support.process import installed
from asv_benches.support.rounds import Line, Way, enough, medians, named, timed, turns
from asv_benches.support.sizes import KIB, MIB, text
from asv_benches.support.workers import OURS, Worker

# ---- an arena -----------------------------------------------------------------------------

CALLS = 100_000
PLAIN = "bump_alloc(64)"
OPAQUE = "bump_alloc(64), opaque"
MARK_RESET = "bump_mark + bump_reset"
MARK_ALLOC_RESET = "bump_mark + bump_alloc + bump_reset"
WAYS = {
    PLAIN: Way("loops.alloc(arena, calls, 64, 64)", "arena.reset()", CALLS),
    OPAQUE: Way("loops.alloc_and_store(arena, calls, 64, 64)", "arena.reset()", CALLS),
    MARK_RESET: Way("loops.mark_reset(arena, calls)", "arena.reset()", CALLS),
    MARK_ALLOC_RESET: Way("loops.mark_alloc_reset(arena, calls)", "arena.reset()", CALLS),
}
ARENA_LIMITS = {PLAIN: 2, MARK_RESET: 5}


def namespace():
    """The names that the statements use."""
    return {"arena": arenapy.Bump(64 * CALLS), "loops": native.load(), "calls": CALLS}


Arena = timed("Arena", "C calls of an arena", WAYS, namespace)


def lines(quick):
    """The report's lines on an arena."""
    found = medians(WAYS, namespace(), 1, 51 if quick else 501)
    for name, seconds in found.items():
        yield Line("C calls", name, seconds * 1e9, "ns", ARENA_LIMITS.get(name))


# ---- Slab and Pool, beside mallocs --------------------------------------------------------

LIVE = 64
RUN = 0.001  # seconds in one call, beside which that call from Python (5 µs) is nothing
ORDERS = {"slot by slot": "replace", "all at once": "fill_and_empty"}
# The limits that are promised, in nanoseconds: {touched: limit}.
CASES = {
    64: ("slab", f"arenapy.Slab(64, {2 * LIVE})", {True: 8}),
    4 * KIB: ("pool", "arenapy.Pool()", {False: 20}),
    64 * KIB: ("pool", "arenapy.Pool()", {False: 20}),
    MIB: ("pool", "arenapy.Pool()", {False: 20, True: 30}),
    64 * MIB: ("pool", "arenapy.Pool()", {False: 20, True: 30}),
}


def prepared(process, order, touched):
    """The loop of one figure in a process, a run of which takes long enough; its operations."""

    def passes(n):
        return process.loop(Way(f"loops.{ORDERS[order]}(heap, live, {n}, {touched})"))

    n = enough(passes(1), RUN)
    n = enough(passes(n), RUN) * n
    return passes(n), LIVE * n


def worker(malloc, nbytes):
    """A process with 64 live blocks of that size."""
    heap = f"heap = {CASES[nbytes][1]}; " if malloc == OURS else ""
    setup = f"{heap}live = loops.Blocks({LIVE}, sizes({nbytes})); loops.fill(heap, live)"
    return Worker(malloc, setup)


def measure(mallocs, nbytes, rounds):
    """{(malloc, order, touched): seconds of an allocation and a free}."""
    found = {}
    with ExitStack() as stack:
        workers = {malloc: stack.enter_context(worker(malloc, nbytes)) for malloc in mallocs}
        for order in ORDERS:
            for touched in (False, True):
                ready = {m: prepared(workers[m], order, touched) for m in mallocs}
                loops = {malloc: loop for malloc, (loop, _) in ready.items()}
                for malloc, seconds in turns(loops, dict.fromkeys(mallocs, 1), rounds).items():
                    found[malloc, order, touched] = seconds / ready[malloc][1]
    return found


class Malloc:
    """asv: the median of rounds in a worker."""

    params = ((OURS, *installed()), tuple(map(text, CASES)), tuple(ORDERS), ("no", "yes"))
    param_names = ("allocator", "block", "order", "touched")
    timeout = 300

    @named("C alloc + free, 64 live blocks", "ns")
    def track_alloc_free(self, allocator, block, order, touched):
        """Of a Slab for 64 bytes, of a Pool for more."""
        nbytes = next(nbytes for nbytes in CASES if text(nbytes) == block)
        with worker(allocator, nbytes) as process:
            loop, operations = prepared(process, order, touched == "yes")
            seconds = turns({"": loop}, 1, 51)[""]
        return seconds / operations * 1e9


def malloc_lines(quick):
    """The report's lines on Slab, Pool and mallocs."""
    mallocs = [OURS, *installed()]
    for nbytes, (name, _, limits) in CASES.items():
        found = measure(mallocs, nbytes, 15 if quick else 101)
        for (malloc, order, touched), seconds in found.items():
            ours = malloc == OURS
            what = f"{text(nbytes)}, {order}{', touched' * touched}: {name if ours else malloc}"
            yield Line("malloc", what, seconds * 1e9, "ns", limits.get(touched) if ours else None)
