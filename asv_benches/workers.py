"""Processes that have one malloc each, and run loops that are compiled from the same lines.

They take turns with each other and with this one (process.py). A worker refuses to start if its
malloc is not in the library that it should be in: a library that is not installed would be ignored
by the loader.

    worker = Worker("jemalloc", "live = loops.Blocks(64, sizes(4096))")
    worker.loop(Way("loops.fill(heap, live)")).timeit(1)
"""

import sys
from pathlib import Path

if not __package__:  # run as a script; behind what is installed
    sys.path.append(str(Path(__file__).resolve().parents[1]))

import numpy as np

import arenapy
from asv_benches import native
from asv_benches.process import MALLOCS, Process, installed, library, serve
from asv_benches.rounds import CLOCK

__all__ = ["MALLOCS", "OURS", "Worker", "installed", "library", "mixed", "sizes"]

OURS = "arenapy"


class Worker(Process):
    """A process with `malloc`; or with OURS, which is glibc's too."""

    def __init__(self, malloc, setup="pass"):
        native.load("pool_loops")  # compiled once, and not by five at a time
        name = "glibc" if malloc == OURS else malloc
        super().__init__(__file__, library(name), malloc=name)
        self.run(setup)


def sizes(*nbytes):
    """An array of sizes, as the loops want them."""
    return np.array(nbytes, "u8")


def mixed(least, most, count=4096, seed=0):
    """So many random sizes, as many of them in each doubling as in any other."""
    logarithms = np.random.default_rng(seed).uniform(np.log(least), np.log(most), count)
    return np.exp(logarithms).astype("u8")


def main(file):
    """Answer, if malloc is in that file."""
    loops = native.load("pool_loops")
    heap = loops.Malloc()
    if Path(heap.file).name != file:
        sys.exit(f"malloc comes from {heap.file}, and not from {file}")
    names = {
        "arenapy": arenapy,
        "np": np,
        "loops": loops,
        "heap": heap,
        "sizes": sizes,
        "mixed": mixed,
    }
    serve(names, CLOCK)


if __name__ == "__main__":
    main(sys.argv[1])
