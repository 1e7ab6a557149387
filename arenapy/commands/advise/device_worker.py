"""Allocators of a GPU's memory and one program: one replay for each line on standard input.

    python -m arenapy.commands.advise.device_worker FOLDER

A line is the JSON of the words NAME [--written | --passes N] [...], with the options of
``commands/replay/worker.py``. The answer is a line with the figures of that worker, or with the
error if a package is not installed. The process ends after any other error, since memory may be
lost then.

Each replay makes its allocator, and gives all memory back at its end, so that the next one finds
the device as this one did. Nothing is written to the memory: ``--written`` means that what is held
is read after every allocation, by the allocator's own account and by the device's.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from arenapy import cuda
from arenapy.commands.replay.device import HEAPS, Watch, run, script
from arenapy.commands.replay.program import Program

__all__ = ["main", "measure"]

OURS = {"pool": "arenapy", "bump": "arenapy-bump", "slab": "arenapy-slab"}


def _used() -> int:
    """Bytes of the device that are not free."""
    now = cuda.memory_info(0)
    return now.total_bytes - now.free_bytes


def measure(
    name: str, folder: Path, passes: int | None, settings: Mapping[str, Any]
) -> dict[str, float]:
    """Run it here: seconds and steps, or if `passes` is None also the peak of what was held."""
    steps, streams = Program.load(folder), np.load(folder / "streams.npy")
    live = int(steps.live().max())
    made_streams = [cuda.Stream() for _ in range(streams.max(initial=0))]
    _used()  # the driver has a context from now on
    start = time.perf_counter()
    heap = HEAPS[OURS.get(name, name)](live, **settings)
    seconds = time.perf_counter() - start if name in OURS else 0.0
    lines = script(steps, streams, [None, *map(heap.native, made_streams)])
    if passes is None:
        watch = Watch(heap, _used)
        seconds = run(heap, lines, steps.count, watch)
        heap.close()
        return {
            "seconds": seconds,
            "steps": len(steps),
            "peak": max(watch.most, watch.most_device),
        }
    gc.disable()
    try:
        first = seconds = seconds + run(heap, lines, steps.count)
        for _ in range(passes - 1):
            seconds += run(heap, lines, steps.count)
    finally:
        gc.enable()
    heap.close()
    return {"seconds": seconds, "first": first, "steps": len(steps)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what each line asks for, until there are no more."""
    parser = argparse.ArgumentParser(
        prog="python -m arenapy.commands.advise.device_worker", allow_abbrev=False
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(argv).folder
    request = argparse.ArgumentParser(allow_abbrev=False)
    request.add_argument("name")
    request.add_argument("--written", action="store_true")
    request.add_argument("--passes", type=int)
    request.add_argument("--settings", type=json.loads, default={})
    # The output of a package is no answer.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            options = request.parse_args(json.loads(line))
            gc.collect()
            gc.freeze()  # the modules of large packages would make every collection slow
            try:
                found: dict[str, Any] = measure(
                    options.name, folder, options.passes, options.settings
                )
            except ImportError as error:
                found = {"error": f"not installed: {error}"}
            except Exception as error:  # whatever another package's allocator raises
                print(f"{type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
                return 1
            print(json.dumps(found), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
