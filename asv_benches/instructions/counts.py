"""Instructions of one call, by valgrind's callgrind: figures that a busy machine does not blur.

    python asv_benches/instructions/counts.py [--annotate WAY ...] [--lines N] [--json FILE]

Each statement runs some hundred times in one process, and twice as often again; the difference is
what the runs cost and not the starting. The loop around a statement counts, as it does in the
benchmarks. --annotate shows in which functions the instructions of one way are. bench_instructions
shows the counts over commits, regressions.py compares two commits.

What this does not show: time. An instruction that waits for memory counts as much as any other, and
the kernel's do not count at all.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a script; behind what is installed
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import numpy as np

import arenapy
from asv_benches.host import bench_c, bench_export, bench_latency
from asv_benches.support import native
from asv_benches.support.rounds import Way
from asv_benches.support.sizes import KIB, MIB, mixed, sizes, text

RUNS = 512
C_RUNS = 8192
LEAST_RUNS = 4  # of a statement of many operations: what happens in one run of two is noise
LIVE = bench_c.LIVE
CHURN = (64, 256 * KIB)
EVENTS = 1_000
WARM_REPLAYS = 48  # until a heap has grown to what the trace needs


@dataclass(frozen=True)
class Group:
    """Ways that are shown in one graph, and what their statements use."""

    title: str
    ways: dict[str, Way]
    names: Callable[[], dict]
    gate: tuple[str, ...]  # whose count is watched from commit to commit
    in_c: bool = False  # the statement runs `calls` times by itself
    runs: int = RUNS

    def runs_of(self, way):
        """How often a statement that counts as so many operations runs."""
        return max(LEAST_RUNS, self.runs // way.operations)


# ---- calls in C ---------------------------------------------------------------------------

SLAB = "slab_alloc + slab_free"
POOL = {n: f"pool_alloc + pool_free, {text(n)}" for n in (64, 4 * KIB, MIB, 64 * MIB)}
MALLOC = {n: f"malloc + free, {text(n)}" for n in (64, 4 * KIB)}
RANDOM = "pool_alloc + pool_free, random sizes"
UNLOCKED = f"{SLAB}, without locks"
REPLACE = f"loops.replace({{heap}}, {{heap}}_live, calls // {LIVE}, False)"
C_CALLS = {
    SLAB: Way(REPLACE.format(heap="slab")),
    **{name: Way(REPLACE.format(heap=f"pool_{nbytes}")) for nbytes, name in POOL.items()},
    RANDOM: Way("loops.replace_any(churn, churn_live, calls)"),
    **{name: Way(REPLACE.format(heap=f"malloc_{nbytes}")) for nbytes, name in MALLOC.items()},
}
LOCKS = {
    UNLOCKED: Way(f"unlocked.replace(slab, unlocked_live, calls // {LIVE}, False)"),
    "a look at a flag": Way("loops.look(calls, True)"),
    "the loop around it": Way("loops.look(calls, False)"),
}


def lazy():
    """Memory whose pages nobody touches, so that no kernel has to find any."""
    return arenapy.Host(prefault=False)


def heaps():
    """A Slab, Pools and mallocs with 64 live blocks each, and one Pool of many sizes."""
    loops = native.load("pool_loops")
    made = {"slab": (arenapy.Slab(64, 4 * LIVE), 64)}
    made |= {f"pool_{n}": (arenapy.Pool(source=lazy()), n) for n in POOL}
    made |= {f"malloc_{n}": (loops.Malloc(), n) for n in MALLOC}
    names = {"loops": loops}
    for name, (heap, nbytes) in made.items():
        names |= {name: heap, f"{name}_live": loops.Blocks(LIVE, sizes(nbytes))}
        loops.fill(heap, names[f"{name}_live"])
    churn, live = arenapy.Pool(source=lazy()), loops.Blocks(8 * LIVE, mixed(*CHURN))
    loops.fill(churn, live)
    loops.replace_any(churn, live, 20_000)  # as it is after a while
    return names | {"churn": churn, "churn_live": live}


def unlocked_heaps():
    """The same slab from loops that were compiled without locks."""
    names = heaps()
    names["unlocked"] = native.load("pool_loops", "ARENAPY_UNLOCKED")
    names["unlocked_live"] = names["unlocked"].Blocks(LIVE, sizes(64))
    names["unlocked"].fill(names["slab"], names["unlocked_live"])
    return names


# ---- memory of a device -------------------------------------------------------------------

STREAMS = {
    "pool.alloc(n), of a device": Way("alloc(n)", "alloc = pool.alloc; n = 4096"),
    "pool.alloc(n, stream=s)": Way(
        "alloc(n, stream=s)", "alloc = pool.alloc; n = 4096; s = stream"
    ),
}


def simulated_device():
    """A pool of the tests' simulated driver, of which a hit calls one function: that is in C."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))
    import simulated_driver
    import simulated_memory

    from arenapy import cuda

    simulated_memory.RESERVED = 1 << 33  # valgrind has no room for more
    driver = simulated_driver.SimulatedDriver()
    _, signature = driver.entries["cuStreamIsCapturing"]
    driver.entries["cuStreamIsCapturing"] = native.load().NOT_CAPTURING, signature
    cuda.driver.use(driver.entries)
    pool, stream = arenapy.Pool(MIB, cuda.Device(), MIB), cuda.Stream()
    return {"pool": pool, "stream": stream, "driver": driver}


# ---- NumPy, traces, what is made once -----------------------------------------------------

HANDLER = {
    f"{what}: {memory}": Way(statement, f"use({memory == 'arenapy'}); {before}")
    for memory in ("arenapy", "default")
    for what, statement, before in (
        ("np.empty((8,))", "empty((8,))", "empty = np.empty"),
        ("np.zeros((1000,))", "zeros((1000,))", "zeros = np.zeros"),
        ("a * 2 + 1, 100 elements", "a * 2 + 1", "pass"),
    )
}
HEAPS = ("pool", "malloc", "mimalloc", "loop")
REPLAYS = {
    f"an event of a random trace: {heap}": Way(
        f"run({heap}, slots, sizes, count)", operations=2 * EVENTS
    )
    for heap in HEAPS
}
MADE = {
    "Bump(65536)": Way("Bump(65536, source)", "Bump = arenapy.Bump"),
    "Slab(64, 100)": Way("Slab(64, 100, source)", "Slab = arenapy.Slab"),
    "Pool().alloc(100)": Way("Pool(1 << 24, source).alloc(100)", "Pool = arenapy.Pool"),
    "mmap(-1, 65536)": Way("mmap(-1, 65536)", "from mmap import mmap"),
}
WHOLE = {  # what looks at all of a pool
    "pool.check()": Way("check()", "check = pool.check"),
    "pool.stats()": Way("stats()", "stats = pool.stats"),
    "pool is full: np.empty((100,))": Way("with memory: empty((100,))", "empty = np.empty"),
    "default: np.empty((100,))": Way("empty((100,))", "empty = np.empty"),
}


def full_pool():
    """A pool without room."""
    pool = arenapy.Pool(8 * MIB, lazy())
    return {
        "np": np,
        "pool": pool,
        "memory": arenapy.numpy_memory(pool),
        "block": pool.alloc(8 * MIB),
    }


def handler():
    """NumPy, and what turns the handler on and off."""
    memory = arenapy.numpy_memory(arenapy.Pool())
    inside = [False]

    def use(ours):
        if ours != inside[0]:
            memory.install() if ours else memory.uninstall()
            inside[0] = ours

    # On a cache line, as the handler's arrays are: a SIMD loop's instructions depend on it.
    a = arenapy.Bump(1 << 16).copy(np.arange(100.0))
    return {"np": np, "use": use, "a": a}


def replays():
    """Heaps that repeat the same trace."""
    from arenapy import trace
    from arenapy.commands.replay.loop import run
    from arenapy.commands.replay.program import program
    from arenapy.commands.replay.worker import make_heap

    steps = program(trace.synthetic(0, EVENTS))
    names = {"run": run, "slots": steps.slots, "sizes": steps.sizes, "count": steps.count}
    for heap in HEAPS:
        try:
            names[heap] = make_heap(heap, steps)
        except OSError:  # that library is not here
            names[heap] = None
            continue
        for _ in range(WARM_REPLAYS):
            run(names[heap], steps.slots, steps.sizes, steps.count)
    return names


def makers():
    """The names that the code which makes allocators uses."""
    return {"arenapy": arenapy, "source": lazy()}


def ours(ways):
    """Names of what is arenapy's, by what the name says."""
    return tuple(
        name for name in ways if re.match(r"(arena|slab|pool|m = arena|with arena)\b", name)
    )


CONTROL = bench_latency.NOOP  # no commit of ours changes its count
GROUPS = {
    "Block": Group(
        "a block from Python",
        bench_latency.BLOCKS,
        bench_latency.namespace,
        (*ours(bench_latency.BLOCKS), CONTROL),
    ),
    "Array": Group(
        "an array", bench_latency.ARRAYS, bench_latency.namespace, ours(bench_latency.ARRAYS)
    ),
    "Dtype": Group(
        "an array, by kind of dtype",
        bench_latency.DTYPES | bench_latency.TYPED,
        bench_latency.namespace,
        ours(bench_latency.DTYPES | bench_latency.TYPED),
    ),
    "Frame": Group(
        "a scope", bench_latency.MARKS, bench_latency.namespace, ours(bench_latency.MARKS)
    ),
    "Batch": Group(
        "each block of a batch",
        bench_latency.BATCHES,
        bench_latency.namespace,
        ours(bench_latency.BATCHES),
    ),
    "Export": Group(
        "a view of a block",
        bench_export.EXPORTS | bench_export.EXCHANGES,
        bench_export.namespace,
        ("memoryview(b)", "np.asarray(b)", "b.array()", "b[64:128]", bench_export.DLPACK),
    ),
    "Arena": Group(
        "a C call of an arena",
        bench_c.WAYS,
        bench_c.namespace,
        tuple(bench_c.WAYS),
        True,
        C_RUNS,
    ),
    "Heap": Group(
        "an allocation and a free in C",
        C_CALLS,
        heaps,
        (SLAB, *POOL.values(), RANDOM),
        True,
        C_RUNS,
    ),
    "Stream": Group("a block of a device", STREAMS, simulated_device, tuple(STREAMS)),
    "Handler": Group(
        "a NumPy array",
        HANDLER,
        handler,
        tuple(name for name in HANDLER if name.endswith("arenapy")),
    ),
    "Whole": Group("all of a pool", WHOLE, full_pool, tuple(WHOLE)[:3], runs=LEAST_RUNS),
    "Replay": Group("an event of a trace", REPLAYS, replays, tuple(REPLAYS)[:1]),
    "Made": Group(
        "making and dropping an allocator", MADE, makers, tuple(MADE)[:3], runs=LEAST_RUNS
    ),
}
EXTRA = {"Locks": Group("locks", LOCKS, unlocked_heaps, (), True, C_RUNS)}
# Ratios of times that are promised; each has a ratio of instructions, too.
RATIOS = [
    (bench_latency.OURS, bench_latency.NOOP),
    (bench_latency.OURS, bench_latency.BYTEARRAY),
    (bench_latency.OURS, bench_latency.EMPTY),
    (bench_latency.OUR_ARRAY, bench_latency.NP_ARRAY),
    *(
        (name, bench_latency.BYTEARRAY)
        for name in (bench_latency.SLAB, *bench_latency.POOL.values())
    ),
]

# ---- in the process that is counted -------------------------------------------------------


def child(groups, gate, stir=0):
    """Under callgrind: run everything, and dump the counts of each piece under its name."""
    kept = [bytes(48 + 16 * (i % 28)) for i in range(1_000 * stir)]  # see `run`
    loops = native.load()
    absent = {}
    for key in groups:
        group = (GROUPS | EXTRA)[key]
        try:
            names = group.names()
        except Exception as error:
            absent |= dict.fromkeys(group.ways, repr(error))
            continue
        for way, (name, what) in enumerate(group.ways.items()):
            if (gate and name not in group.gate) or name in absent:
                continue
            if missing := what.missing(names):
                absent[name] = f"{', '.join(missing)}: not installed"
                continue
            try:
                for times in (1, 2):
                    names["calls"] = group.runs * times
                    loop = what.loop(names)
                    runs = 1 if group.in_c else group.runs_of(what) * times
                    loop.timeit(runs)  # everything that happens once
                    loops.begin_counting()
                    loop.timeit(runs)
                    loops.end_counting(f"{key} {way} {times}".encode())
            except Exception as error:  # an older arenapy has no such thing
                absent[name] = repr(error)
    print(json.dumps({"arenapy": arenapy.__file__, "absent": absent, "kept": len(kept)}))


# ---- outside of it ------------------------------------------------------------------------


@dataclass
class Counts:
    """Instructions by the name of the way, the reason for each way without any, and the package."""

    found: dict[str, float]
    absent: dict[str, str]
    arenapy: str


def can_count():
    """Why nothing can be counted here, or None."""
    try:
        subprocess.run(["valgrind", "--version"], capture_output=True, check=True)
    except OSError:
        return "valgrind is not installed"
    if not native.load().can_count:
        return "c_loops was compiled without valgrind/callgrind.h: install valgrind's headers"
    return None


def bare_environment(path):
    """Nothing that another run would do otherwise: where dicts put what, who preloads what."""
    kept = {name: os.environ[name] for name in ("HOME", "PATH", "TMPDIR") if name in os.environ}
    return kept | {"PYTHONHASHSEED": "0"} | ({"PYTHONPATH": str(path)} if path else {})


def run(directory, groups, gate=False, path=None, stir=0):
    """Counts and {name: dump file} of one run under callgrind, of the arenapy that `path` has.

    Runs that are repeated find the same, but for what the interpreter's own allocator does now and
    then, which depends on what the process has allocated before: `stir` makes that another.
    """
    command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--error-exitcode=9"]
    command += [f"--callgrind-out-file={directory}/out", sys.executable, __file__, "--child"]
    command += [*groups, *["--gate"] * gate, f"--stir={stir}"]
    environment = bare_environment(path)
    # Compile beforehand what is compiled on first use: bytecode, and the loops in C.
    subprocess.run([sys.executable, __file__, "--prepare"], check=True, env=environment)
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"callgrind failed ({done.returncode}):\n{done.stderr[-3000:]}")
    said = json.loads(done.stdout.splitlines()[-1])
    totals, dumps = {}, {}
    for file in Path(directory).glob("out.*"):
        text = file.read_text()
        trigger = re.search(
            r"^desc: Trigger: Client Request: (\w+) (\d+) (\d)$", text, re.MULTILINE
        )
        if trigger:
            total = re.search(r"^(?:summary|totals): (\d+)", text, re.MULTILINE)
            totals[trigger[1], int(trigger[2]), int(trigger[3])] = int(total[1])
            dumps[trigger[1], int(trigger[2])] = file
    found = {}
    for key in groups:
        group = (GROUPS | EXTRA)[key]
        for way, (name, what) in enumerate(group.ways.items()):
            if (key, way, 2) in totals and name not in said["absent"]:
                each = group.runs if group.in_c else group.runs_of(what) * what.operations
                more = totals[key, way, 2] - totals[key, way, 1]
                if more <= 0:
                    said["absent"][name] = "twice as many runs cost no more: it was not warm"
                    continue
                found[name] = more / each
                dumps[name] = dumps.pop((key, way))
    return Counts(found, said["absent"], said["arenapy"]), dumps


def count(groups=tuple(GROUPS), gate=False, path=None, stir=0):
    """Counts of one run."""
    with tempfile.TemporaryDirectory() as directory:
        return run(directory, groups, gate, path, stir)[0]


def annotate(path, lines):
    """Print the share of each function in a dump, the largest first."""
    text = subprocess.run(
        ["callgrind_annotate", "--threshold=100", "--auto=no", str(path)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for line in text.splitlines():
        entry = re.match(r"\s*[\d,]+ \(\s*([\d.]+%)\)\s+(.*)", line)
        if entry and "PROGRAM TOTALS" not in line and lines > 0:
            where = re.sub(r"\S*/([^/\s]+:)", r"\1", entry[2])
            print(f"    {entry[1]:>7}  {where}")
            lines -= 1


def print_locks(counts):
    """Print the share of locks in a hit, which takes one lock to allocate and one to free."""
    locks = counts[SLAB] - counts[UNLOCKED]
    for name in (*POOL.values(), *bench_latency.POOL.values()):
        print(f"{locks / counts[name]:8.1%}  locks of {name}")
    # A slab's say also whether there is more to do.
    locks -= 2 * (counts["a look at a flag"] - counts["the loop around it"])
    for name in (SLAB, bench_latency.SLAB):
        print(f"{locks / counts[name]:8.1%}  locks of {name}")


def main():
    """Count, print, and annotate what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--annotate", nargs="+", default=[], metavar="WAY")
    parser.add_argument("--lines", type=int, default=12)
    parser.add_argument("--json", metavar="FILE", help="write the counts there too")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--gate", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--prepare", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--stir", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.prepare:
        for name in "c_loops", "pool_loops":
            native.load(name)
        return
    if options.child:
        child(options.child, options.gate, options.stir)
        return
    if reason := can_count():
        sys.exit(reason)
    groups = GROUPS | EXTRA
    with tempfile.TemporaryDirectory() as directory:
        counts, dumps = run(directory, tuple(groups))
        for group in groups.values():
            print(f"\n{group.title}:")
            for name in group.ways:
                said = f"{counts.found[name]:8.1f}" if name in counts.found else "       -"
                print(f"{said}  {name}{f' ({why})' if (why := counts.absent.get(name)) else ''}")
                if name in options.annotate and name in dumps:
                    annotate(dumps[name], options.lines)
    print()
    for ours_, peer in RATIOS:
        print(f"{counts.found[ours_] / counts.found[peer]:8.2f}  {ours_} / {peer}")
    print_locks(counts.found)
    if options.json:
        Path(options.json).write_text(json.dumps(counts.found, indent=1))


if __name__ == "__main__":
    main()
