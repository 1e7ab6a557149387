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
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import numpy as np

import arenapy
from asv_benches.support import native
from asv_benches.support.process import Process, library, serve
from asv_benches.support.rounds import CLOCK
from asv_benches.support.sizes import mixed, sizes

OURS = "arenapy"


class Worker(Process):
    """A process with `malloc`; or with OURS, which is glibc's too."""

    def __init__(self, malloc, setup="pass"):
        native.load("pool_loops")  # compiled once, and not by five at a time
        name = "glibc" if malloc == OURS else malloc
        super().__init__(__file__, library(name), malloc=name)
        self.run(setup)


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
