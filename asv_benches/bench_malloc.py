"""The C calls of Slab and Pool beside four mallocs: an allocation and a free, with 64 blocks live.

Two orders: each slot is freed and filled again before the next one, or all 64 are freed and then
all are filled. "Touched" is with the first byte of each block written. Mallocs are preloaded into
processes of their own (workers.py), which take turns with ours; every loop is compiled from the
same lines. The pool of 64 MiB blocks takes 4 GiB of memory.

What this does not show: other sizes at the same time (bench_curve), other threads (bench_threads).
"""

from contextlib import ExitStack

from .bench_faults import KIB, MIB, text
from .rounds import Line, Way, enough, turns
from .workers import OURS, Worker, installed

LIVE = 64
RUN = 0.001  # seconds in one call, beside which that call from Python (5 µs) is nothing
ORDERS = {"slot by slot": "replace", "all at once": "fill_and_empty"}
# What is promised in nanoseconds, {touched: limit}.
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
    """asv: nanoseconds of an allocation and a free, the median of rounds in a worker."""

    params = ((OURS, *installed()), tuple(CASES), tuple(ORDERS), (False, True))
    param_names = ("allocator", "nbytes", "order", "touched")
    timeout = 300
    unit = "ns"

    def track_alloc_free(self, allocator, nbytes, order, touched):
        """With 64 live."""
        with worker(allocator, nbytes) as process:
            loop, operations = prepared(process, order, touched)
            seconds = turns({"": loop}, 1, 51)[""]
        return seconds / operations * 1e9


def lines(quick):
    """The report's lines."""
    mallocs = [OURS, *installed()]
    for nbytes, (name, _, limits) in CASES.items():
        found = measure(mallocs, nbytes, 15 if quick else 101)
        for (malloc, order, touched), seconds in found.items():
            ours = malloc == OURS
            what = f"{text(nbytes)}, {order}{', touched' * touched}: {name if ours else malloc}"
            yield Line("malloc", what, seconds * 1e9, "ns", limits.get(touched) if ours else None)
