"""One allocator of a GPU's memory and one program, in a process of its own.

    python -m arenapy.commands.advise.device_worker FOLDER NAME [--written | --passes N] [...]

The options and the figures are those of ``commands/replay/worker.py``. Nothing is written to the
memory: ``--written`` means that what is held is read after every allocation, by the allocator's own
account and by the device's.
"""

from __future__ import annotations

import argparse
import gc
import json
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
        return {
            "seconds": seconds,
            "steps": len(steps),
            "peak": max(watch.most, watch.most_device),
        }
    gc.collect()
    gc.disable()
    try:
        first = seconds = seconds + run(heap, lines, steps.count)
        for _ in range(passes - 1):
            seconds += run(heap, lines, steps.count)
    finally:
        gc.enable()
    return {"seconds": seconds, "first": first, "steps": len(steps)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print the figures as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m arenapy.commands.advise.device_worker", allow_abbrev=False
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("--written", action="store_true")
    parser.add_argument("--passes", type=int)
    parser.add_argument("--settings", type=json.loads, default={})
    options = parser.parse_args(argv)
    try:
        found = measure(options.name, options.folder, options.passes, options.settings)
    except ImportError as error:
        print(f"not installed: {error}", file=sys.stderr)
        return 1
    except Exception as error:  # whatever another package's allocator raises
        print(f"{type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
        return 1
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
