"""Threads: what they cost each other.

Two threads that write neighbouring items of a slab, which have cache lines of their own by default
or share one if packed. And how many allocations and frees a second 1, 2 and 4 threads get done
together, from Python and in C, each with its own blocks, or each freeing what any of them
allocated. Each thread has a processor of its own. Times are of the clock, from when the first
begins until the last is done. Rounds are short, and the best counts: other work on the machine can
only take from them, and is not always there.

Without a GIL, also how much more two threads get done than one, beside what a loop of Python's own
gains: one and two threads take turns, and medians are compared, of rounds in which both ran at the
same time. There, times are the processor's for each thread: what others take is not in them.

What this does not show: more threads than cores.
"""

import os
import random
import statistics
import threading
import time
import timeit
from typing import NamedTuple

import arenapy
from asv_benches.support import native
from asv_benches.support.process import installed
from asv_benches.support.rounds import HAS_GIL, Line, enough, named
from asv_benches.support.sizes import KIB, MIB, mixed
from asv_benches.support.workers import OURS, Worker

CPUS = sorted(os.sched_getaffinity(0))
CPUS = CPUS[::2] + CPUS[1::2]  # two threads of one core, which share its caches, come last
THREADS = [n for n in (1, 2, 4, 8) if n <= len(CPUS)]
ROUNDS = 101
ASV_ROUNDS = 15
WRITES = 2_000_000
CALLS = 100_000  # of each thread, in C
PYTHON_CALLS = 20_000
LIVE = 64
SHARED = 4096
HEAPS = {"slab": "arenapy.Slab(64, 1 << 14)", "pool": "arenapy.Pool()"}
#: Of what size. A slab has items of one size, and stands where that is the size.
OWN = {
    "own blocks": 4 * KIB,
    "own blocks of 64 bytes": 64,
    "own blocks of 64 KiB": 64 * KIB,
    "own blocks of 1 MiB": MIB,
}
WORK = (*OWN, "each other's blocks")
STATEMENTS = {
    "slab.alloc()": "alloc()",
    "pool.alloc(4 KiB)": "alloc(4096)",
    "pool.alloc(1 MiB)": "alloc(1048576)",
    "bytearray(64)": "alloc(64)",
}
LOOP = "a loop of Python's own"
SCALING_ROUNDS = 101
SCALING_SECONDS = 0.002  # of a round: less than the turns that programs get
MAX_TRIES = 10  # for each round that counts
NEAR_LINEAR = 0.8  # of what the loop gains; on a busy machine figures differ by a tenth
#: The statement that makes `alloc` in each thread, and the statement that each thread runs.
SCALING = {
    LOOP: ("alloc = None", "n = 0\nfor _ in range(100): n ^= 1"),
    "a Bump of each": (
        "alloc, reset = arena.alloc, arena.reset",
        "for _ in range(100): alloc(64)\nreset()",
    ),
    "one Slab": ("alloc = slab.alloc", "for _ in range(100): alloc()"),
    "one Pool, 4 KiB": ("alloc = pool.alloc", "for _ in range(100): alloc(4096)"),
    "one Pool, 1 MiB": ("alloc = pool.alloc", "for _ in range(100): alloc(1048576)"),
    "bytearray(64)": ("alloc = bytearray", "for _ in range(100): alloc(64)"),
}


def together(tasks):
    """Seconds from when the first of the tasks begins, a thread each, until the last is done."""
    spans = at_once([lambda task=task: task for task in tasks])
    return max(span.end for span in spans) - min(span.start for span in spans)


class Span(NamedTuple):
    """When a thread began and was done, and how long it had a processor meanwhile."""

    start: float
    end: float
    used: float


def at_once(makers):
    """The Span of each task, on threads that begin when the last of them has a processor.

    Before that each makes its own, of one of `makers`.
    """
    if len(makers) > len(CPUS):
        raise RuntimeError(
            f"this needs {len(makers)} processors, and the process may use {len(CPUS)}: run it on "
            "a larger machine, or without taskset"
        )
    barrier = threading.Barrier(len(makers))
    arrived, spans = [], []

    def body(make, cpu):
        os.sched_setaffinity(0, {cpu})  # of this thread, which ends with it
        task = make()
        barrier.wait()
        arrived.append(cpu)
        while len(arrived) < len(makers):
            pass
        start, used = time.perf_counter(), time.thread_time()
        task()
        spans.append(Span(start, time.perf_counter(), time.thread_time() - used))

    threads = [threading.Thread(target=body, args=pair) for pair in zip(makers, CPUS, strict=False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(spans) == len(makers)
    return spans


def beside_each_other(spans):
    """True if nearly all was done while the others ran too."""
    longest = max(span.end - span.start for span in spans)
    common = min(span.end for span in spans) - max(span.start for span in spans)
    return common >= longest * 0.7


def neighbours(align):
    """Two items beside each other of a slab of 8-byte items, in the same cache line if packed."""
    slab = arenapy.Slab(8, 64, align=align)
    first, second = sorted((slab.alloc() for _ in range(2)), key=lambda item: item.address)
    assert second.address - first.address == slab.stride
    assert (first.address // 64 == second.address // 64) == (slab.stride < 64)
    return first, second


def writing(align, writes=WRITES):
    """Seconds of two threads that write neighbours."""
    loops = native.load("pool_loops")
    return together([lambda item=item: loops.write(item, writes) for item in neighbours(align)])


def isolation(rounds):
    """Seconds of a write: (isolated, packed), medians of rounds that take turns.

    Not the best: where the threads did not run at the same time, nothing was to be seen.
    """
    found = [(writing(None), writing(8)) for _ in range(rounds)]
    return [statistics.median(seconds) / WRITES for seconds in zip(*found, strict=True)]


def rate_in_c(heap, threads, work):
    """Allocations and frees a second of so many threads in C."""
    loops = native.load("pool_loops")
    if work in OWN:
        size = OWN[work]
        own = [loops.Blocks(LIVE, mixed(size, size + 1)) for _ in range(threads)]
        for live in own:
            loops.fill(heap, live)
        tasks = [lambda live=live: loops.replace(heap, live, CALLS // LIVE, False) for live in own]
        took = together(tasks)
        for live in own:
            loops.empty(heap, live)
    else:
        shared = loops.Blocks(SHARED, mixed(64, 8 * KIB))
        loops.fill(heap, shared)
        draws = [loops.Blocks(1, mixed(64, 8 * KIB), i + 1) for i in range(threads)]
        took = together(
            [lambda live=live: loops.exchange(heap, shared, live, CALLS) for live in draws]
        )
        loops.empty(heap, shared)
    return threads * CALLS / took


def rates_in_c(malloc, heap, work, rounds, threads=THREADS):
    """{threads: the best rate}."""
    with Worker(malloc, f"from asv_benches.host import bench_threads; heap = {heap}") as process:
        rate = "bench_threads.rate_in_c(heap, {}, {!r})"
        found = [[process.value(rate.format(n, work)) for n in threads] for _ in range(rounds)]
    return dict(zip(threads, map(max, zip(*found, strict=True)), strict=True))


def rates_in_python(name, rounds, threads=THREADS):
    """{threads: the best rate of calls from Python}."""
    allocs = {
        "slab": lambda: arenapy.Slab(64, 1 << 10).alloc,
        "pool": lambda: arenapy.Pool().alloc,
        "bytearray": lambda: bytearray,
    }
    alloc = allocs[name.partition(".")[0].partition("(")[0]]()
    owner = getattr(alloc, "__self__", None)

    def task():
        # A bound method of its own: threads would take turns at the count of one that is shared.
        bound = owner.alloc if owner is not None else alloc
        timer = timeit.Timer(STATEMENTS[name], "alloc = bound", globals={"bound": bound})
        timer.timeit(PYTHON_CALLS)

    return {n: max(n * PYTHON_CALLS / together([task] * n) for _ in range(rounds)) for n in threads}


def scaling(rounds):
    """{(way, threads): operations a second of the processors, in as many rounds that count}."""
    shared = {"slab": arenapy.Slab(64, 1 << 10), "pool": arenapy.Pool()}
    arenas = arenapy.PerThread(lambda: arenapy.Bump(1 << 20))

    def loop(way):
        """In a thread of its own, whose first call makes what each thread has for itself."""
        setup, statement = SCALING[way]
        names = shared | {"arena": arenas.get()} if "arena" in setup else shared
        # A bound method of its own, see above.
        timer = timeit.Timer(statement, setup, globals=names)
        timer.timeit(1)
        return timer

    def task(way):
        timer = loop(way)
        return lambda: timer.timeit(runs[way])

    runs = {way: enough(loop(way), SCALING_SECONDS) for way in SCALING}
    found = {(way, n): [] for way in SCALING for n in (1, 2)}
    for _ in range(rounds * MAX_TRIES):
        missing = [key for key, rates in found.items() if len(rates) < rounds]
        for way, n in random.sample(missing, len(missing)):
            spans = at_once([lambda way=way: task(way)] * n)
            if beside_each_other(spans):
                found[way, n].append(sum(100 * runs[way] / span.used for span in spans))
    return found


class Isolation:
    """asv: two threads, each with a processor of its own."""

    params = ("isolated", "packed")
    param_names = ("items",)
    timeout = 300

    @named("Two threads write to neighbouring Slab items", "ns")
    def track_write(self, items):
        """The median of some rounds."""
        return isolation(ASV_ROUNDS)[self.params.index(items)] * 1e9


class Threads:
    """asv: a processor for each thread."""

    params = ((*HEAPS, *installed()), WORK, THREADS)
    param_names = ("allocator", "work", "threads")
    timeout = 300

    @named("C alloc + free, sum of all threads", "M/s")
    def track_rate(self, allocator, work, threads):
        """The best of some rounds."""
        malloc = OURS if allocator in HEAPS else allocator
        rates = rates_in_c(malloc, HEAPS.get(allocator, "heap"), work, ASV_ROUNDS, (threads,))
        return rates[threads] / 1e6


class PythonThreads:
    """asv: a processor for each thread."""

    params = (tuple(STATEMENTS), THREADS)
    param_names = ("statement", "threads")
    timeout = 300

    @named("Python alloc + free, sum of all threads", "M/s")
    def track_rate(self, statement, threads):
        """The best of some rounds."""
        return rates_in_python(statement, ASV_ROUNDS, (threads,))[threads] / 1e6


def rate_lines(name, rates, limit=None):
    """Each rate, and how often that of one thread."""
    for n, rate in rates.items():
        yield Line("threads", f"{name}: {n} thread{'s' * (n > 1)}", rate / 1e6, "M/s")
    for n in THREADS[1:]:
        gain = rates[n] / rates[1]
        yield Line("threads", f"{name}: {n} threads / 1", gain, "x", limit, True, False)


def scaling_lines(rounds):
    """Rates, what a second thread adds, and how much of that a loop of Python's own gains."""
    found = scaling(rounds)
    fewest = min(map(len, found.values()))
    yield Line("threads", "rounds: of one and two threads", fewest, "", 1, True, False)
    if not fewest:
        return  # so busy a machine never has two processors for us
    rates = {key: statistics.median(values) for key, values in found.items()}
    for way in SCALING:
        gain = rates[way, 2] / rates[way, 1]
        yield Line("threads", f"{way}: 1 thread", rates[way, 1] / 1e6, "M/s")
        yield Line("threads", f"{way}: 2 threads", rates[way, 2] / 1e6, "M/s")
        yield Line("threads", f"{way}: 2 threads / 1", gain, "x")
        if way != LOOP:
            limit = None if way.startswith("bytearray") else NEAR_LINEAR
            gain /= rates[LOOP, 2] / rates[LOOP, 1]
            yield Line("threads", f"{way}: gain / the loop's", gain, "x", limit, True, False)


def lines(quick):
    """The report's lines."""
    rounds = 11 if quick else ROUNDS
    for name in STATEMENTS:
        ours = not name.startswith("bytearray")
        # With a GIL only one thread runs at a time, and nothing can grow.
        yield from rate_lines(
            name, rates_in_python(name, rounds), 1.2 if ours and not HAS_GIL else None
        )
    for work in WORK:
        for name in (*HEAPS, *installed()):
            if name == "slab" and OWN.get(work, 64) > 4 * KIB:
                continue  # a slab has one size, so larger ones are the same again
            malloc = OURS if name in HEAPS else name
            rates = rates_in_c(malloc, HEAPS.get(name, "heap"), work, rounds)
            yield from rate_lines(f"C, {work}, {name}", rates)
    if len(CPUS) >= 2:
        isolated, packed = isolation(rounds)
        for name, seconds in (("isolated", isolated), ("packed", packed)):
            yield Line("threads", f"write to {name} items: 2 threads", seconds * 1e9, "ns")
        yield Line(
            "threads", "packed / isolated: 2 threads", packed / isolated, "x", 2, at_least=True
        )
        if not HAS_GIL:  # with one there is nothing to gain
            yield from scaling_lines(5 if quick else SCALING_ROUNDS)
