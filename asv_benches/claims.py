"""Numbers that circulate about memory and transfers, measured: which hold here, which do not.

    python asv_benches/claims.py [--commit COMMIT] [--only KEY ...] [--quick]
        [--into asv_benches/figures/claims.json]

What needs a GPU is left out where there is none. docs/claims.md is made of the results file, with a
word about why each holds or not. A claim holds if every figure that it is judged by is what it says
or better; in part if some are.
"""

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

if not __package__:  # run as a script; behind what is installed
    sys.path.append(str(Path(__file__).resolve().parents[1]))

import numpy as np
from rich.console import Console
from rich.table import Table

import arenapy
from arenapy import cuda
from asv_benches.gpu import copies as gpu_copies
from asv_benches.support import native
from asv_benches.support.report import figure
from asv_benches.support.results import Row, has_gpu, stamp, store
from asv_benches.support.rounds import Clocked, Way, enough, turns
from asv_benches.support.sizes import MIB, text

CLAIMED_FAULTS = 15_593
PAGE = 4096
POOL_SIZES = {MIB: 11, 100 * MIB: 352}  # bytes, and how many times as fast a pool is said to be
PIECES = (4 << 10, 64 << 10, MIB)  # bytes of a small transfer
MOVED = 256 * MIB
OFFSETS = (0, 123, 4096)
INCREMENTS = 20_000_000
APART = {"on one cache line": 8, "64 bytes apart": 64, "128 bytes apart": 128}
WAIT = 0.004  # seconds that a timed loop takes


def one_fault_count(way, environment):
    """Page faults of one array of CLAIMED_FAULTS pages that is made and filled, once warm."""
    code = (
        "import numpy as np, arenapy\n"
        "from asv_benches.host.bench_faults import arena_faults, numpy_faults\n"
        f"print({way}({CLAIMED_FAULTS * PAGE}, 20) / 20)"
    )
    root = Path(__file__).resolve().parents[1]
    # The package that is installed comes first, the benchmarks after it.
    code = f"import sys; import arenapy; sys.path.append({str(root)!r})\n{code}"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def faults(quick):
    """Of an array of 61 MiB, each time that it is made."""
    small = {"NUMPY_MADVISE_HUGEPAGE": "0"}
    plain = one_fault_count("numpy_faults", small)
    yield Row("np.empty, without huge pages", plain, "faults", plain >= CLAIMED_FAULTS)
    yield Row("np.empty", one_fault_count("numpy_faults", {}), "faults")
    arena = one_fault_count("arena_faults", {})
    yield Row("arena.empty", arena, "faults", arena == 0)


def current_driver():
    """cuda.bindings' driver, with the first device's context current in this thread."""
    from cuda.bindings import driver

    error, context = driver.cuDevicePrimaryCtxRetain(0)
    assert error == 0, error
    (error,) = driver.cuCtxSetCurrent(context)
    assert error == 0, error
    error, pointer = driver.cuMemAlloc(1)
    assert error == 0, error  # what is timed does not look
    driver.cuMemFree(pointer)
    return driver


def allocations(quick):
    """A pool beside what it takes its memory from: made and dropped at once."""
    names = {"np": np, "pool": arenapy.Pool(), "loops": native.load("c_loops")}
    ways = {
        ("the host's, every page touched", "pool"): Way("touch(empty(n, 'u1'), 4096)",
                                "empty = pool.empty; touch = loops.touch"),
        ("the host's, every page touched", "direct"): Way("touch(empty(n, 'u1'), 4096)",
                                  "empty = np.empty; touch = loops.touch"),
    }  # fmt: skip
    if has_gpu():
        names |= {
            "driver": current_driver(),
            "device": arenapy.Pool(1 << 30, cuda.Device(), 1 << 29),
            "pinned": arenapy.Pool(1 << 30, cuda.Pinned(), 1 << 29),
        }
        ways |= {
            ("a device's", "pool"): Way("alloc(n)", "alloc = device.alloc"),
            ("a device's", "direct"): Way(
                "free(alloc(n)[1])", "alloc = driver.cuMemAlloc; free = driver.cuMemFree"
            ),
            ("pinned", "pool"): Way("alloc(n)", "alloc = pinned.alloc"),
            ("pinned", "direct"): Way(
                "free(alloc(n)[1])", "alloc = driver.cuMemAllocHost; free = driver.cuMemFreeHost"
            ),
        }
    loops = {
        (medium, how, n): way.loop(names | {"n": n}, time.perf_counter)
        for n in POOL_SIZES
        for (medium, how), way in ways.items()
    }
    for loop in loops.values():
        loop.timeit(3)
    runs = {key: min(enough(loop, WAIT), 10_000) for key, loop in loops.items()}
    found = turns(loops, runs, 5 if quick else 21)
    for (medium, how, n), seconds in found.items():
        if how == "direct":
            ratio = seconds / found[medium, "pool", n]
            claimed = POOL_SIZES[n]
            yield Row(f"memory that is {medium}, {text(n)}", ratio, "x", ratio >= claimed)


class Copies:
    """Seconds on the device of copies between host memory and a block of the device."""

    def __init__(self, nbytes):
        self.stream = cuda.Stream()
        self.device = cuda.Device().region(nbytes).buffer()

    def loop(self, host, piece=None, to_device=True):
        """The statement for `turns`. piece: the size in bytes of each of many copies."""
        parts = [(self.device, host)]
        if piece is not None:
            edges = range(0, host.nbytes, piece)
            parts = [(self.device[i : i + piece], host[i : i + piece]) for i in edges]

        def work():
            for device, part in parts:
                if to_device:
                    device.copy_from(part, stream=self.stream)
                else:
                    device.copy_to(part, stream=self.stream)

        return gpu_copies.on_the_device(self.stream, work)


def pinned_copies(quick):
    """Pinned and pageable memory, both ways."""
    copies = Copies(MOVED)
    memory = {"pinned": cuda.Pinned().region(MOVED).buffer(), "pageable": np.ones(MOVED, "u1")}
    loops = {
        (name, way): copies.loop(host, to_device=way == "to the device")
        for name, host in memory.items()
        for way in ("to the device", "from it")
    }
    found = turns(loops, dict.fromkeys(loops, 1), 5 if quick else 15)
    for (name, way), seconds in found.items():
        if name == "pageable":
            ratio = seconds / found["pinned", way]
            yield Row(f"pageable / pinned, {way}", ratio, "x", ratio >= 2)


def small_copies(quick):
    """One large transfer of pinned memory and as many bytes in pieces."""
    copies = Copies(MOVED)
    pinned = cuda.Pinned().region(MOVED).buffer()
    loops = {piece: copies.loop(pinned, piece) for piece in (*PIECES, MOVED)}
    found = turns(loops, dict.fromkeys(loops, 1), 3 if quick else 7)
    for piece in PIECES:
        ratio = found[piece] / found[MOVED]
        what = f"{text(MOVED)} in pieces of {text(piece)} / at once"
        yield Row(what, ratio, "x", ratio >= 6)


def aligned_copies(quick):
    """Pinned memory that begins on a page, or beside it."""
    for nbytes in (64 << 10, 64 * MIB):
        copies = Copies(nbytes)
        pinned = cuda.Pinned().region(nbytes + max(OFFSETS)).buffer()
        loops = {offset: copies.loop(pinned[offset : offset + nbytes]) for offset in OFFSETS}
        found = turns(loops, dict.fromkeys(loops, 3), 5 if quick else 21)
        for offset in OFFSETS[1:]:
            ratio = found[offset] / found[0]
            yield Row(f"{text(nbytes)} at offset {offset} / at 0", ratio, "x", ratio >= 3)


def pipeline(quick):
    """The demo's: filled, copied, computed."""
    for line in gpu_copies.pipeline(quick):
        kept = line.value >= line.limit if line.limit else None
        yield Row(line.what, line.value, line.unit, kept)


def managed(quick):
    """Managed memory beside explicit copies, and on the device once it is there."""
    for line in gpu_copies.managed(quick):
        judged = line.unit == "x"
        yield Row(line.what, line.value, line.unit, line.value <= 1.2 if judged else None)
    device = cuda.Device().region(MOVED).buffer()
    region = cuda.Managed().region(MOVED).buffer()
    stream = cuda.Stream()
    region.fill(1, stream=stream)  # its pages are on the device from here on
    loops = {
        name: gpu_copies.on_the_device(stream, lambda block=block: block.fill(2, stream=stream))
        for name, block in (("managed", region), ("device", device))
    }
    found = turns(loops, dict.fromkeys(loops, 3), 5 if quick else 21)
    ratio = found["managed"] / found["device"]
    yield Row("a kernel on managed pages that stay / on device memory", ratio, "x", ratio <= 1.2)


def counting(distance, atomic):
    """Seconds of an increment, of two threads on processors of their own that count at once."""
    loops = native.load("c_loops")
    words = arenapy.Bump(1 << 20).empty(1 << 12, "u8")
    cpus = sorted(os.sched_getaffinity(0))
    barrier = threading.Barrier(2)
    took = [0.0, 0.0]

    def work(i):
        os.sched_setaffinity(threading.get_native_id(), {cpus[-i]})  # the first, the last
        barrier.wait()
        start = time.perf_counter()
        loops.count_up(words[i * distance // 8 :], INCREMENTS, atomic)
        took[i] = time.perf_counter() - start

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(took) / INCREMENTS


def false_sharing(quick):
    """Two threads that count, each in a word of its own."""
    for atomic in (False, True):
        loops = {name: Clocked(partial(counting, one, atomic)) for name, one in APART.items()}
        medians = turns(loops, 1, 3 if quick else 9)
        kind = "atomic increments" if atomic else "increments"
        for name, seconds in medians.items():
            yield Row(f"{kind}, {name}", seconds * 1e9, "ns")
        ratio = medians["on one cache line"] / medians["128 bytes apart"]
        yield Row(f"{kind}, one line / 128 bytes apart", ratio, "x", ratio >= 10)


def driver_allocations(quick):
    """The driver's own calls."""
    driver = current_driver()
    ways = {"cudaMalloc": ("cuMemAlloc", "cuMemFree"),
            "cudaMallocHost": ("cuMemAllocHost", "cuMemFreeHost")}  # fmt: skip
    for name, (alloc, free) in ways.items():
        alloc, free = getattr(driver, alloc), getattr(driver, free)
        for nbytes in (MIB, 100 * MIB, 1024 * MIB):
            took = []
            for _ in range(5 if quick else 15):
                start = time.perf_counter()
                error, pointer = alloc(nbytes)
                took.append(time.perf_counter() - start)
                assert error == 0, error
                free(pointer)
            ms = float(np.median(took)) * 1e3
            kept = 1 <= ms <= 10 if name == "cudaMalloc" else None
            yield Row(f"{name}, {text(nbytes)}", ms, "ms", kept)


@dataclass(frozen=True)
class Claim:
    """A statement of the documentation, and the function that measures it."""

    said: str
    measure: Callable
    gpu: bool = True


CLAIMS = {
    "faults": Claim(
        "A pre-faulted arena takes no page fault where plain allocation takes 15,593.", faults,
        False,
    ),
    "pool": Claim(
        "A pool is 11 times as fast as allocating at 1 MB, and 352 times at 100 MB.", allocations,
        False,
    ),
    "pinned": Claim("Pinned memory is copied 2 to 3 times as fast as pageable.", pinned_copies),
    "small": Claim("One large transfer is 6 times as fast as many small ones.", small_copies),
    "aligned": Claim("Aligned transfers are 3 times as fast.", aligned_copies),
    "pipeline": Claim("A pipeline through pinned memory is 2.5 times as fast.", pipeline),
    "managed": Claim("Managed memory costs 10 to 20 %.", managed),
    "sharing": Claim("False sharing makes threads 10 to 100 times slower.", false_sharing, False),
    "cudaMalloc": Claim("cudaMalloc takes 1 to 10 ms.", driver_allocations),
}  # fmt: skip


def verdict(figures):
    """In words."""
    judged = [one.kept for one in figures if one.kept is not None]
    return "holds" if all(judged) else "holds in part" if any(judged) else "does not hold"


def main():
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", default="unknown", help="what is measured, for the stamp")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: to see that it runs")
    parser.add_argument("--into", type=Path, metavar="FILE", help="store the figures there")
    parser.add_argument("--only", nargs="+", choices=CLAIMS, default=list(CLAIMS))
    options = parser.parse_args()
    console = Console()
    gpu = has_gpu()
    for key in options.only:
        claim = CLAIMS[key]
        if claim.gpu and not gpu:
            console.print(f"{claim.said} Not looked at: there is no GPU.", style="yellow")
            continue
        figures = list(claim.measure(options.quick))
        words = verdict(figures)
        table = Table(title=f"{claim.said} {words}", title_justify="left", title_style="bold")
        for name, justify in (("", "left"), ("measured", "right"), ("as said", "left")):
            table.add_column(name, justify=justify)
        for one in figures:
            as_said = {None: "", True: "yes", False: "no"}[one.kept]
            table.add_row(one.what, f"{figure(one.value)} {one.unit}", as_said)
        console.print(table)
        if options.into:
            about = stamp(options.commit)
            store(options.into, key, about, said=claim.said, verdict=words, lines=figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
