"""Instructions of one call, by valgrind's callgrind: figures that a busy machine does not blur.

    python asv_benches/instructions.py [--annotate WAY] [--lines N]

Each statement of bench_latency, bench_pool, bench_c and bench_malloc runs a few thousand times in
one process, and twice as often again; the difference is what the runs cost and not the starting.
The loop around a statement counts, as it does in the benchmarks. --annotate shows in which
functions the instructions of one way are, with its peers. The last figures are what share of a hit
is spent on locks, of which one is taken to allocate and one to free: what the loop over a slab
saves if it is compiled without.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

if not __package__:  # run as a script; behind what is installed
    sys.path.append(str(Path(__file__).resolve().parents[1]))

import arenapy
from asv_benches import bench_c, bench_latency, bench_malloc, bench_pool, native
from asv_benches.bench_faults import text
from asv_benches.rounds import Way
from asv_benches.workers import sizes

RUNS = 64 * bench_malloc.LIVE
REPLACE = "pool_loops.replace({heap}, {heap}_live, calls // 64, False)"
SLAB = "slab_alloc + slab_free"
UNLOCKED = f"{SLAB}, without locks"
POOL = {nbytes: f"pool_alloc + pool_free, {text(nbytes)}" for nbytes in bench_pool.SIZES}
LOOK = "a look at a flag"
LOOP = "the loop around it"
IN_C = {
    SLAB: Way(REPLACE.format(heap="slab")),
    UNLOCKED: Way("unlocked.replace(slab, unlocked_live, calls // 64, False)"),
    **{name: Way(REPLACE.format(heap=f"pool_{nbytes}")) for nbytes, name in POOL.items()},
    LOOK: Way("pool_loops.look(calls, True)"),
    LOOP: Way("pool_loops.look(calls, False)"),
    **bench_c.WAYS,
}
WAYS = {
    **bench_latency.BLOCKS,
    **bench_latency.ARRAYS,
    **bench_latency.MARKS,
    **bench_latency.EXPORTS,
    **bench_pool.BLOCKS,
    **bench_pool.ARRAYS,
    **IN_C,
}
# What is promised as a ratio of times has one of instructions too.
RATIOS = [
    (bench_latency.OURS, bench_latency.NOOP),
    (bench_latency.OURS, bench_latency.BYTEARRAY),
    (bench_latency.OURS, bench_latency.EMPTY),
    (bench_latency.OUR_ARRAY, bench_latency.NP_ARRAY),
    *((ours, bench_latency.BYTEARRAY) for ours in (bench_pool.SLAB, *bench_pool.POOL.values())),
]


def namespace():
    """The names that the statements use."""
    loops = native.load("pool_loops")
    heaps = {"slab": arenapy.Slab(64, 4 * bench_malloc.LIVE)} | {
        f"pool_{nbytes}": arenapy.Pool(source=arenapy.Host(prefault=False)) for nbytes in POOL
    }
    names = {"loops": native.load(), "pool_loops": loops} | heaps
    for heap, nbytes in zip(heaps, (64, *POOL), strict=True):
        names[f"{heap}_live"] = loops.Blocks(bench_malloc.LIVE, sizes(nbytes))
        loops.fill(names[heap], names[f"{heap}_live"])
    unlocked = names["unlocked"] = native.load("pool_loops", "ARENAPY_UNLOCKED")
    names["unlocked_live"] = unlocked.Blocks(bench_malloc.LIVE, sizes(64))
    unlocked.fill(heaps["slab"], names["unlocked_live"])
    return bench_latency.namespace() | bench_pool.namespace() | names


def child():
    """Under callgrind: run everything, and dump the counts of each piece under its name."""
    names = namespace()
    loops = names["loops"]
    for way, (name, what) in enumerate(WAYS.items()):
        if name == bench_latency.ARROW and bench_latency.pyarrow is None:
            continue
        in_c = name in IN_C
        loop = what.loop(names)
        for count in (1, 2):
            names["calls"] = RUNS * count
            runs = 1 if in_c else RUNS * count
            loop.timeit(runs)  # everything that happens once
            loops.begin_counting()
            loop.timeit(runs)
            loops.end_counting(f"way {way} {count}".encode())


def run(directory):
    """{(way, count): dump file} of a run under callgrind."""
    command = [
        "valgrind",
        "--tool=callgrind",
        "--instr-atstart=no",
        "--error-exitcode=9",
        f"--callgrind-out-file={directory}/out",
        sys.executable,
        __file__,
        "--child",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"callgrind failed ({done.returncode}):\n{done.stderr[-3000:]}")
    dumps = {}
    for path in Path(directory).glob("out.*"):
        trigger = re.search(
            r"^desc: Trigger: Client Request: way (\d+) (\d+)$", path.read_text(), re.MULTILINE
        )
        if trigger:
            dumps[int(trigger[1]), int(trigger[2])] = path
    return dumps


def total(path):
    """Instructions of one dump."""
    return int(re.search(r"^(?:summary|totals): (\d+)", path.read_text(), re.MULTILINE)[1])


def annotate(path, runs, lines):
    """Instructions a run of each function, the largest first."""
    text = subprocess.run(
        ["callgrind_annotate", "--threshold=100", "--auto=no", str(path)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for line in text.splitlines():
        entry = re.match(r"\s*([\d,]+) \([^)]*\)\s+(.*)", line)
        if not entry or "PROGRAM TOTALS" in line:
            continue
        each = int(entry[1].replace(",", "")) / runs
        if each < 0.5 or lines == 0:
            return
        where = re.sub(r"\S*/([^/\s]+:)", r"\1", entry[2])
        print(f"    {each:7.1f}  {where}")
        lines -= 1


def main():
    """Count, print, and annotate what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--annotate", nargs="+", choices=WAYS, default=[], metavar="WAY")
    parser.add_argument("--lines", type=int, default=12)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child()
        return
    if not native.load().can_count:
        sys.exit("c_loops was compiled without valgrind/callgrind.h; install valgrind's headers")
    with tempfile.TemporaryDirectory() as directory:
        dumps = run(directory)
        counts = {}
        for way, name in enumerate(WAYS):
            if (way, 2) not in dumps:
                continue
            counts[name] = (total(dumps[way, 2]) - total(dumps[way, 1])) / RUNS
            print(f"{counts[name]:8.1f}  {name}")
            if name in options.annotate:
                annotate(dumps[way, 2], 2 * RUNS, options.lines)
    for ours, peer in RATIOS:
        print(f"{counts[ours] / counts[peer]:8.2f}  {ours} / {peer}")
    locks = counts[SLAB] - counts[UNLOCKED]
    for name in (*POOL.values(), *bench_pool.POOL.values()):
        print(f"{locks / counts[name]:8.1%}  locks of {name}")
    locks -= 2 * (counts[LOOK] - counts[LOOP])  # a slab's say also whether there is more to do
    for name in (SLAB, bench_pool.SLAB):
        print(f"{locks / counts[name]:8.1%}  locks of {name}")


if __name__ == "__main__":
    main()
