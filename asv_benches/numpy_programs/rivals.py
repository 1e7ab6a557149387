"""NumPy programs under different memory: NumPy's default, arenapy's handler, and tuned mallocs.

    with Program("jemalloc", "a = np.ones((500, 500), 'f4')") as program:
        program.loop(Way("c = a * a")).timeit(10)
        program.value("faults_of('c = a * a', 10)")

The rivals are what a user can have by setting environment variables, each tuned for large arrays.
Only arenapy's process imports arenapy. BLAS and OpenMP have one
thread: the allocators are compared, and not how the machine's other processor is doing.
"""

import os
import resource
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

if not __package__:  # run as a script; behind what is installed
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from asv_benches.support.process import Process, library, serve

DEFAULT, OURS = "default", "arenapy"
ALONE = "pool alone"  # ours, and malloc as it is
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
NEVER = 1 << 40  # bytes: a threshold that nothing reaches


@dataclass(frozen=True)
class Rival:
    """A malloc and its settings."""

    malloc: str = "glibc"
    tuning: dict[str, str] = field(default_factory=dict)


RIVALS = {
    DEFAULT: Rival(),
    OURS: Rival(tuning={"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}),  # as `arenapy run` has it
    ALONE: Rival(),
    "jemalloc": Rival(
        "jemalloc",
        {"MALLOC_CONF": "thp:always,dirty_decay_ms:-1,muzzy_decay_ms:-1,oversize_threshold:0"},
    ),
    "mimalloc": Rival(
        "mimalloc", {"MIMALLOC_ALLOW_DECOMMIT": "0", "MIMALLOC_RESERVE_OS_MEMORY": "4GiB"}
    ),
    "tcmalloc": Rival(
        "tcmalloc",
        {
            "TCMALLOC_DISABLE_MEMORY_RELEASE": "1",
            "TCMALLOC_MAX_TOTAL_THREAD_CACHE_BYTES": f"{1 << 30}",
        },
    ),
    "glibc": Rival(
        tuning={
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:"
            f"glibc.malloc.mmap_threshold={NEVER}:glibc.malloc.trim_threshold={NEVER}:"
            f"glibc.malloc.top_pad={64 << 20}"
        }
    ),
}


def here():
    """The rivals that this machine has, but for `ALONE`, which is not one of ours' rivals."""
    return [name for name, rival in RIVALS.items() if library(rival.malloc) and name != ALONE]


class Program(Process):
    """A process with NumPy, and with the memory of one of `RIVALS`."""

    def __init__(self, rival, setup="pass"):
        malloc = RIVALS[rival].malloc
        super().__init__(
            __file__,
            rival,
            library(malloc),
            malloc=malloc,
            tuning=ONE_THREAD | RIVALS[rival].tuning,
        )
        self.run(setup)


@contextmanager
def programs(rivals, setup):
    """{rival: Program}, which start together, and end together."""
    with ExitStack() as stack, ThreadPoolExecutor() as together:
        started = together.map(lambda rival: Program(rival, setup), rivals)
        yield {
            rival: stack.enter_context(program)
            for rival, program in zip(rivals, started, strict=True)
        }


@dataclass(frozen=True)
class Ratios:
    """Our speed-up over each of the rest, and over the best of them, from seconds of each rival."""

    over: dict[str, float]
    best: float
    who: str

    @property
    def default(self):
        """Over NumPy's default."""
        return self.over[DEFAULT]

    @classmethod
    def of(cls, seconds):
        """Of {rival: a list of seconds}: medians are compared."""
        medians = {rival: statistics.median(found) for rival, found in seconds.items()}
        ours = medians.pop(OURS)
        over = {rival: median / ours for rival, median in medians.items()}
        who = min(over, key=over.get)
        return cls(over, over[who], who)


# ---- in the process -----------------------------------------------------------------------


def faults():
    """Minor page faults of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def peak():
    """The most bytes that were ever resident here."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no VmHWM")


class Steps:
    """Runs the steps of a workload, and checks that they always find the same."""

    TOLERANCE = 1e-6  # SIMD loops add up in an order that depends on the alignment

    def __init__(self, step):
        self.step = step
        self.checksum = step()
        self.warm = faults()

    def __call__(self, count):
        """Seconds of the processor, of all threads, for so many steps."""
        start = time.process_time()
        for _ in range(count):
            checksum = self.step()
        seconds = time.process_time() - start
        if not abs(checksum - self.checksum) <= self.TOLERANCE * abs(self.checksum):
            raise AssertionError(f"a step found {checksum}, the first one {self.checksum}")
        return seconds


def install_ours(libc):
    """arenapy's handler in force for this process, as `arenapy run --libc` has it."""
    import arenapy

    return arenapy.numpy_memory(arenapy.Pool(), threads=True, libc=libc).install()


def main(rival, file):
    """Answer, if malloc is in that file."""
    loaded = Path("/proc/self/maps").read_text()
    if file not in loaded:
        sys.exit(f"malloc should come from {file}, which is not loaded")
    memory = install_ours("keep" if rival == OURS else None) if rival in (OURS, ALONE) else None
    import numpy as np

    def faults_of(statement, runs):
        code = compile(statement, "<statement>", "exec")
        for _ in range(2):  # the second one knows what is left over from one
            exec(code, names)
        before = faults()
        for _ in range(runs):
            exec(code, names)
        return faults() - before

    def rate(statement, threads, seconds):
        """Runs a second, by the clock, in so many seconds from when all threads begin.

        Of the last run of a thread, which ends later, the part counts that lies before the end.
        """
        code = compile(statement, "<statement>", "exec")
        starts = []
        ready = threading.Barrier(threads, lambda: starts.append(time.perf_counter()))

        def work(_):
            own, runs, before, now = dict(names), 0, 0.0, 0.0
            ready.wait()
            while now < seconds:
                before = now
                exec(code, own)
                runs += 1
                now = time.perf_counter() - starts[0]
            return runs - (now - seconds) / (now - before)

        if threads == 1:  # the first one, which mallocs may treat otherwise
            return work(0) / seconds
        with ThreadPoolExecutor(threads) as executor:
            return sum(executor.map(work, range(threads))) / seconds

    names = {
        "np": np,
        "os": os,
        "memory": memory,
        "faults": faults,
        "faults_of": faults_of,
        "peak": peak,
        "rate": rate,
        "Steps": Steps,
    }
    serve(names, time.thread_time)


if __name__ == "__main__":
    main(*sys.argv[1:])
