"""Patterns of use that README and docs show, each as a call that may be repeated for ever.

    python tests/allocator/patterns.py [--calls 1000000] [--seconds 120] [PATTERN ...]

Repeats each and prints a table: microseconds of a call among the first thousand and among the last,
and what has grown from the one to the other, by the call. `--seconds` ends a pattern sooner. What
is compared in test_steady.py is the growth, as it is exact; time is for whoever runs this by hand.
"""

import argparse
import asyncio
import contextlib
import ctypes
import gc
import io
import itertools
import os
import pickle
import random
import struct
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
from bump_model import c_mark, c_reset
from helpers import Pages

import arenapy
from arenapy import Bump, Existing, File, Host, PerThread, Pool, Shared, Slab, trace
from arenapy.debug import live_blocks

KIB = 1 << 10
PLAIN = Host(huge_pages=None, prefault=False)
PATTERNS = {}


def pattern(weight=1, **state):
    """Note a call to repeat, and what makes each of its arguments before the first time.

    `weight`: how many times as long as a scope the call takes; a test makes so many fewer.
    """

    def decorate(call):
        def prepare():
            made = {name: make() for name, make in state.items()}
            return partial(call, **made), *made.values()

        prepare.__name__ = call.__name__
        return prepared(weight)(prepare)

    return decorate


def prepared(weight=1):
    """Note a function that makes a call to repeat, and what it is made of."""

    def decorate(make):
        PATTERNS[make.__name__.replace("_", " ")] = make
        make.weight = weight
        return make

    return decorate


def in_a_thread(work):
    """Call it in a thread, and wait until the system has ended that: `join` returns before."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    while os.path.exists(f"/proc/self/task/{thread.native_id}"):
        time.sleep(0.0001)


def bump(nbytes=256 * KIB, **options):
    return Bump(nbytes, PLAIN, **options)


def pool(**options):
    return Pool(source=PLAIN, **options)


def slab(**options):
    return Slab(64, 100, PLAIN, **options)


def dice():
    return random.Random(0)


# ---- Bump: scopes and marks ----------------------------------------------------------------


@pattern(arena=bump)
def scope_with_a_block(arena):
    with arena.scope():
        arena.alloc(100)


@pattern(arena=bump)
def scope_whose_array_is_dropped_in_it(arena):
    with arena.scope():
        x = arena.empty(100)
        del x


@pattern(arena=bump)
def scope_whose_array_ends_with_the_function(arena):
    with arena.scope():
        x = arena.empty(100)  # noqa: F841


@pattern(arena=bump, out=dict)
def scope_whose_array_is_kept_in_a_dict(arena, out):
    with arena.scope():
        out["k"] = arena.empty(100)


@pattern(arena=bump)
def scope_left_by_an_exception(arena):
    with contextlib.suppress(KeyError), arena.scope():
        x = arena.empty(100)  # noqa: F841
        raise KeyError


@pattern(arena=bump)
def scopes_in_scopes_whose_arrays_outlive_them(arena):
    with arena.scope():
        x = arena.empty(10)  # noqa: F841
        with arena.scope():
            y = arena.empty(100)  # noqa: F841
            with arena.scope():
                z = arena.empty(1000)  # noqa: F841


@prepared()
def scope_beside_arrays_that_stay():
    arena = bump(1 << 20)
    kept = [arena.empty(100) for _ in range(100)]
    with arena.scope():
        kept += [arena.empty(100) for _ in range(100)]
    rng = dice()

    def call():
        with arena.scope():
            kept[rng.randrange(200)] = arena.empty(rng.randrange(200))

    return call, arena


@pattern(arena=bump)
def mark_and_reset(arena):
    mark = arena.mark()
    x = arena.empty(100)  # noqa: F841
    arena.alloc(10)
    arena.reset(mark)


@prepared()
def one_mark_reset_to_again():
    arena = bump()
    mark = arena.mark()
    kept = [None]

    def call():
        arena.alloc(10)
        kept[0] = arena.empty(100)
        arena.reset(mark)

    return call, arena


@pattern(arena=bump)
def marks_that_are_only_dropped(arena):
    mark = arena.mark()
    x = arena.empty(100)
    inner = arena.mark()
    del mark, x, inner


@pattern(arena=bump, order=lambda: itertools.cycle(itertools.permutations(range(3))))
def marks_nested_and_dropped_in_any_order(arena, order):
    marks, arrays = [], []
    for n in (10, 100, 30):
        marks.append(arena.mark())
        arrays.append(arena.empty(n))
    arena.reset(marks[1])
    arena.reset(marks[0])
    for i in next(order):
        arrays[i] = marks[i] = None


@pattern(arena=bump, kept=lambda: [None])
def marks_in_c(arena, kept):
    mark = c_mark(arena)
    kept[0] = arena.empty(100)
    inner = c_mark(arena)
    x = arena.empty(10)  # noqa: F841
    c_reset(arena, inner)
    c_reset(arena, mark)


@pattern(arena=bump, kept=lambda: [None])
def reset_of_everything(arena, kept):
    arena.alloc(100)
    kept[0] = arena.empty(100)
    arena.reset()


@pattern(arena=lambda: bump(strict=True))
def a_strict_arena_that_refuses(arena):
    mark = arena.mark()
    x = arena.empty(100)
    with contextlib.suppress(BufferError):
        arena.reset(mark)
    del x
    arena.reset(mark)


@pattern(arena=lambda: bump(4 * KIB))
def an_arena_without_room(arena):
    with contextlib.suppress(MemoryError), arena.scope():
        x = arena.empty(100)  # noqa: F841
        arena.empty(1000)


@pattern(5, arena=lambda: bump(4 * KIB, max_bytes=1 << 20))
def an_arena_that_grows_by_regions(arena):
    with arena.scope():
        x = [arena.empty(n) for n in (10, 400, 2000)]  # noqa: F841


# ---- Buffers -------------------------------------------------------------------------------


@pattern(arena=bump)
def a_buffer_that_grows(arena):
    block = arena.alloc(100)
    block = arena.grow(block, 1000)
    arena.alloc(8)
    block = arena.grow(block, 2000)
    del block
    arena.reset()


@pattern(2, arena=bump, pool=pool, slab=slab)
def blocks_of_one_call(arena, pool, slab):
    with arena.scope():
        arena.alloc_many([10, 100, 1000])
    pool.alloc_many([10, 5000, 100_000])
    slab.alloc_many(20)
    with contextlib.suppress(MemoryError):
        slab.alloc_many(101)


@pattern(2, arena=bump, kept=dict)
def struct_of_arrays(arena, kept):
    with arena.scope():
        kept.update(arena.struct_of_arrays({"x": "f4", "y": "f8", "alive": "?"}, 100))


@pattern(2, arena=bump, pool=pool, a=lambda: np.arange(100.0).reshape(10, 10))
def copies_and_zeros(arena, pool, a):
    with arena.scope():
        x = arena.copy(a), arena.zeros((10, 10)), pool.copy(a.T), pool.zeros(9)  # noqa: F841


@pattern(2, arena=bump, pool=pool, kept=list)
def slices_and_views_that_stay(arena, pool, kept):
    with arena.scope():
        for block in (arena.alloc(400), pool.alloc(400)):
            part = block[100:200]
            kept[:] = (*kept[-4:], part.view((5, 5), "f4"), memoryview(part), block[10:][10:])


@pattern(2, arena=bump, pool=pool)
def buffers_in_place(arena, pool):
    for allocator in (arena, pool):
        with allocator.alloc(4096) as block:
            io.BytesIO(b"header").readinto(block)
            struct.pack_into("<I", block, 8, 42)
            block.fill(0)
        block = allocator.alloc(100)
        block.release()
        block.release()
    arena.reset()


@pattern(2, arena=bump, pool=pool)
def dlpack(arena, pool):
    with arena.scope():
        for block in (arena.alloc(400), pool.alloc(400)):
            tensor = np.from_dlpack(block.view((10, 10), "f4"))
            tensor[:] = 1
            block.__dlpack__()
            block.__dlpack__(max_version=(1, 0))


@pattern(2, arena=bump, pool=pool)
def array_interfaces_and_handles(arena, pool):
    with arena.scope():
        for block in (arena.alloc(400), pool.alloc(400)):
            x = np.asarray(block)
            assert block.__array_interface__["version"] == 3
            arenapy.handles(x[10:])
            np.ndarray((10,), "u1", buffer=block)


@pattern(300, arena=bump)
def pickling(arena):
    with arena.scope():
        block, x = arena.alloc(100), arena.empty(100)
        pickle.loads(pickle.dumps(block))
        apart = []
        data = pickle.dumps([block, x], protocol=5, buffer_callback=apart.append)
        pickle.loads(data, buffers=apart)


# ---- Slab ----------------------------------------------------------------------------------


@pattern(slab=slab, kept=lambda: [None] * 50, rng=dice)
def items(slab, kept, rng):
    kept[rng.randrange(50)] = slab.alloc()
    slab.empty(8)


@pattern(100, slab=lambda: Slab(64, 100, PLAIN, max_count=2000))
def a_slab_that_grows_and_is_trimmed(slab):
    kept = [slab.alloc() for _ in range(1000)]
    del kept[::2]
    slab.trim()
    kept.clear()
    slab.trim()


# ---- Pool ----------------------------------------------------------------------------------


@pattern(pool=pool, kept=lambda: [None] * 50, rng=dice)
def blocks_of_all_sizes(pool, kept, rng):
    kept[rng.randrange(50)] = pool.alloc(int(2 ** (rng.random() * 20)))
    pool.empty(8)


@prepared(3)
def blocks_of_all_sizes_in_few_bytes():
    """Hits, splits, trims and refusals; what a hook frees."""
    kept = [None] * 50
    pool = Pool(1 << 20, PLAIN, on_oom=lambda nbytes: bool(kept.__setitem__(0, None)))
    rng = dice()

    def call():
        with contextlib.suppress(MemoryError):
            kept[rng.randrange(50)] = pool.alloc(int(2 ** (rng.random() * 18)))

    return call, pool


@pattern(100, pool=pool)
def a_pool_that_is_prewarmed_and_trimmed(pool):
    pool.prewarm({64 * KIB: 10, 100: 10})
    kept = [pool.alloc(64 * KIB) for _ in range(20)]
    del kept[::2]
    pool.defragment()
    pool.trim(256 * KIB)
    kept.clear()
    pool.trim()


@pattern(100, pool=lambda: Pool(source=Pages()))
def a_pool_of_regions_that_come_and_go(pool):
    kept = [pool.alloc(3 << 20), pool.alloc(5 << 20)]
    kept.clear()
    pool.trim()


@pattern(100, pool=lambda: pool(trim_after=1e-4))
def a_pool_that_trims_by_itself(pool):
    kept = [pool.alloc(n) for n in (100, 10_000, 1 << 20)]  # noqa: F841


@pattern(3, pool=lambda: pool(rounding="class"))
def a_pool_by_classes(pool):
    kept = [pool.alloc(n) for n in (100, 5000, 100_000)]  # noqa: F841


# ---- what an allocator says ----------------------------------------------------------------


@prepared(100)
def figures():
    arena, pool, slab = bump(), Pool(source=PLAIN), Slab(64, 100, PLAIN)
    x, y, z = arena.empty(8), pool.empty(8), slab.empty(8)

    def call():
        for allocator in (arena, pool, slab):
            repr(allocator), str(allocator.stats()), allocator.stats().as_dict()
            allocator.check()
        pool.blocks(), slab.blocks(), pool.reset_peak(), slab.reset_peak()
        assert x is not y is not z

    return call, arena, pool, slab


@pattern(30, arena=bump, pool=pool)
def measurements(arena, pool):
    with arenapy.measure(arena) as m, arenapy.measure(pool, arena), arenapy.measure():
        pool.empty(100)
        with arena.scope():
            arena.empty(100)
    assert m.allocations == 1


# ---- threads -------------------------------------------------------------------------------


@pattern(arena=lambda: PerThread(bump))
def an_arena_for_each_thread(arena):
    with arena.scope():
        x = arena.empty(100)  # noqa: F841


@prepared(300)
def threads_that_end():
    arena, pool = PerThread(bump), Pool(source=PLAIN)
    kept = []

    def work():
        with arena.scope():
            kept[:] = (*kept[-3:], arena.empty(100), pool.empty(100))

    def call():
        in_a_thread(work)

    return call, pool


# ---- NumPy ---------------------------------------------------------------------------------


@prepared(5)
def numpy_memory_for_a_call():
    pool = Pool(source=PLAIN)
    memory = arenapy.numpy_memory(pool)
    kept = {}

    def call():
        with memory:
            kept["x"] = np.ones(100) * 2
        with arenapy.numpy_memory(pool, on_full="error"):
            np.ones(10_000)

    return call, pool


@prepared(10)
def numpy_memory_around_functions():
    pool = Pool(source=PLAIN)
    memory = arenapy.numpy_memory(pool)

    @memory
    def function():
        return np.ones(100) * 2

    @memory
    def generator():
        yield np.ones(100)
        yield np.ones(1000)

    def call():
        function()
        for x in generator():
            x += 1
        next(generator())  # not to its end

    return call, pool


@prepared(300)
def numpy_memory_in_tasks():
    pool = Pool(source=PLAIN)
    memory = arenapy.numpy_memory(pool)

    @memory
    async def task():
        await asyncio.sleep(0)
        return np.ones(100)

    async def main():
        with memory:
            await asyncio.gather(task(), task())

    def call():
        asyncio.run(main())

    return call, pool


@pattern(5, pool=pool)
def numpy_memory_installed(pool):
    memory = arenapy.numpy_memory(pool).install()
    np.ones(100)
    memory.uninstall()


@prepared(300)
def numpy_memory_of_threads():
    pool = Pool(source=PLAIN)
    memory = arenapy.numpy_memory(pool, threads=True)

    def call():
        with memory:
            in_a_thread(lambda: np.ones(100))

    return call, pool


@prepared(300)
def numpy_memory_installed_in_threads_that_end():
    pool = Pool(source=PLAIN)

    def work():
        arenapy.numpy_memory(pool).install()
        np.ones(100)

    def call():
        in_a_thread(work)

    return call, pool


@pattern(300, kept=lambda: [None])
def numpy_memory_of_a_pool_that_ends(kept):
    with arenapy.numpy_memory(Pool(source=PLAIN)):
        kept[0] = np.ones(100)


# ---- sources and regions -------------------------------------------------------------------


@pattern(100, kept=list)
def allocators_that_end(kept):
    arena, slab, pool = bump(), Slab(64, 100, PLAIN), Pool(1 << 20, PLAIN)
    kept[:] = [arena.empty(10), slab.empty(8), pool.empty(10)]


@pattern(50)
def regions():
    region = PLAIN.region(64 * KIB)
    x = np.asarray(region.buffer(100, 1000))
    del x
    region.close()
    PLAIN.region(64 * KIB).buffer()


@pattern(300, memory=lambda: bytearray(64 * KIB))
def existing_memory(memory):
    arena = Bump(64 * KIB, Existing(memory))
    with arena.scope():
        x = arena.empty(100)  # noqa: F841


@pattern(300, path=lambda: Path(tempfile.mkdtemp()) / "data")
def mapped_files(path):
    x = Bump(64 * KIB, File(path, "w+")).empty(100)
    del x
    np.asarray(File(path).region(4 * KIB).buffer()).sum()


@pattern(100)
def shared_memory():
    x = Bump(64 * KIB, Shared()).empty(100)  # noqa: F841


def receive(connection):
    while True:
        data = connection.recv_bytes()
        if not data:
            return
        block = pickle.loads(data)
        block.fill(7)
        del block
        connection.send_bytes(b"done")


@prepared(2000)
def blocks_sent_to_another_process():
    arena, pool = Bump(64 * KIB, Shared()), Pool(1 << 20, Shared())
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(theirs,), daemon=True)
    process.start()

    def call():
        with arena.scope():
            for block in (arena.alloc(100), pool.alloc(100)):
                ours.send_bytes(ForkingPickler.dumps(block))
                assert ours.recv_bytes() == b"done"

    return call, arena, pool


@pattern(2000, arena=bump, pool=pool)
def forks(arena, pool):
    with arena.scope():
        x = arena.empty(100), pool.empty(100)  # noqa: F841
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)


# ---- recordings, debug mode ----------------------------------------------------------------


@pattern(
    300,
    arena=bump,
    pool=pool,
    slab=slab,
    path=lambda: Path(tempfile.mkdtemp()) / "trace",
    sites=lambda: itertools.cycle([0, 4]),
)
def recordings(arena, pool, slab, path, sites):
    for allocator in (arena, pool, slab):
        with trace.record(allocator, path, sites=next(sites)):
            x = allocator.empty(8)  # noqa: F841


@prepared(3)
def within_a_recording():
    arena = bump()
    recording = trace.record(arena, Path(tempfile.mkdtemp()) / "trace")
    recording.__enter__()

    def call():
        with arena.scope():
            x = arena.empty(100)  # noqa: F841

    return call, arena, recording


@pattern(
    20,
    arena=lambda: bump(debug=True),
    pool=lambda: pool(debug=True),
    slab=lambda: slab(debug=True),
    rng=dice,
)
def debug_mode(arena, pool, slab, rng):
    with arena.scope():
        n = rng.randrange(1, 8)
        x = [one.empty(n) for one in (arena, pool, slab)]  # noqa: F841
        live_blocks(arena)


# ---- what grows ----------------------------------------------------------------------------


class Mallinfo(ctypes.Structure):
    """mallinfo2, see its manual page."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
        "fordblks", "keepcost",
    ))  # fmt: skip


try:
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo
except AttributeError:  # not glibc
    mallinfo = Mallinfo


@dataclass(frozen=True)
class Held:
    """What the process has at one moment."""

    heap: int  # bytes of malloc's blocks
    objects: int  # blocks of Python's allocator
    metadata: int  # bytes, as the allocators say
    reserved: int
    maps: int
    files: int
    resident: int  # bytes

    @classmethod
    def now(cls, allocators):
        """After a collection."""
        for _ in range(2):
            gc.collect()
        info = mallinfo()
        stats = [allocator.stats() for allocator in allocators]
        objects = sys.getallocatedblocks()
        return cls(
            info.uordblks + info.hblkhd,
            objects,
            sum(one.metadata_bytes for one in stats),
            sum(getattr(one, "reserved_bytes", 0) or getattr(one, "capacity", 0) for one in stats),
            Path("/proc/self/maps").read_bytes().count(b"\n"),
            len(os.listdir("/proc/self/fd")),
            int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE"),
        )


def made(name):
    """(the call of a pattern, its allocators)."""
    call, *rest = PATTERNS[name]()
    return call, [one for one in rest if hasattr(one, "check")]


def thousand(call, calls):
    """Microseconds of a call."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="part of a name")
    options = parser.parse_args()
    print(f"{'':48} {'calls':>10} {'first':>9} {'last':>9}  grown by the call: "
          "heap, objects, metadata, resident; in all: maps, files")  # fmt: skip
    for name in PATTERNS:
        if options.patterns and not any(part in name for part in options.patterns):
            continue
        call, allocators = made(name)
        batch = max(10, min(1000, options.calls // 10))
        thousand(call, max(batch // 10, 3))
        first = thousand(call, batch)
        before = Held.now(allocators)
        done, until = 0, time.perf_counter() + options.seconds
        while done < options.calls and time.perf_counter() < until:
            last = thousand(call, batch)
            done += batch
        last = min(thousand(call, batch) for _ in range(3))
        after = Held.now(allocators)
        grown = [(getattr(after, what) - getattr(before, what)) / done
                 for what in ("heap", "objects", "metadata", "resident")]  # fmt: skip
        shown = " ".join(f"{value:8.3f}" for value in grown)
        more = f"{after.maps - before.maps:5} {after.files - before.files:5}"
        print(f"{name:48} {done:10,} {first:9.3g} {last:9.3g}  {shown} {more}", flush=True)


if __name__ == "__main__":
    main()
