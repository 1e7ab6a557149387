"""One allocator and one program, in a process of its own: what ``arenapy replay`` starts.

    python -m arenapy.commands.replay.worker FOLDER NAME [--written | --passes N] [--settings JSON]

FOLDER holds a program. Either it is run twice, the first byte of every block written, and the
second pass is timed: the allocator at its speed. Or (``--written``) once, every page of every block
written, and resident memory is read after every allocation: what the allocator holds on to. Or
(``--passes``) as often as is said, every page of every block written, and everything is timed, the
making of the allocator too: what a program waits for.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from arenapy.commands.replay.loop import (
    BumpHeap,
    Heap,
    MallocHeap,
    NoHeap,
    PoolHeap,
    SlabHeap,
    resident,
    run,
)
from arenapy.commands.replay.program import Program

__all__ = ["PEERS", "Peer", "main", "make_heap", "measure", "measure_all"]

SPEED_PASSES = 2


@dataclass(frozen=True, slots=True)
class Peer:
    """Something that allocates.

    Attributes
    ----------
    about : str
        For the help.
    library : str
        A library to load beside the malloc of the process. "": libc, or none is needed.
    symbols : tuple of str
        Its malloc and free.
    environment : mapping
        Set in the process that runs it.
    package : str
        Debian's, which has it.
    """

    about: str
    library: str = ""
    symbols: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    package: str = ""


MALLOC = "malloc", "free"
JEMALLOC = "libjemalloc.so.2", MALLOC
MIMALLOC = "libmimalloc.so.2", ("mi_malloc", "mi_free")

#: By the name that ``--with`` takes. The eager ones give freed pages back at once; as they come,
#: jemalloc does so after 10 s and mimalloc after 25 ms or less.
PEERS = {
    "bump": Peer("arenapy.Bump, reset when nothing is live"),
    "slab": Peer("arenapy.Slab, with items of the size of the largest block"),
    "pool": Peer("arenapy.Pool"),
    "pool-class": Peer("arenapy.Pool(rounding='class')"),
    "malloc": Peer("malloc of the C library", "libc.so.6", MALLOC),
    "jemalloc": Peer("with its default settings", *JEMALLOC, package="libjemalloc2"),
    "jemalloc-eager": Peer(
        "returns pages at once",
        *JEMALLOC,
        {"MALLOC_CONF": "dirty_decay_ms:0,muzzy_decay_ms:0"},
        "libjemalloc2",
    ),
    "mimalloc": Peer("with its default settings", *MIMALLOC, package="libmimalloc2.0"),
    "mimalloc-eager": Peer(
        "returns pages at once",
        *MIMALLOC,
        dict.fromkeys(
            ["MIMALLOC_PURGE_DELAY", "MIMALLOC_DECOMMIT_DELAY", "MIMALLOC_SEGMENT_DECOMMIT_DELAY"],
            "0",
        ),
        "libmimalloc2.0",
    ),
    "tcmalloc": Peer(
        "with its default settings",
        "libtcmalloc_minimal.so.4",
        ("tc_malloc", "tc_free"),
        package="libtcmalloc-minimal4",
    ),
    "loop": Peer("no allocator: the time of the replay itself"),
}


def arguments_for(name: str, program: Program) -> Mapping[str, Any]:
    """The arguments of an allocator that has to be told what the program needs."""
    if name == "bump":
        return {"nbytes": program.bump_bytes()}
    if name == "slab":
        return dict(zip(("item_size", "count"), program.slab_items(), strict=True))
    return {}


def make_heap(name: str, program: Program, settings: Mapping[str, Any] | None = None) -> Heap:
    """The allocator of this name, ready to run the program.

    Parameters
    ----------
    name : str
        A key of `PEERS`.
    program : Program
    settings : mapping, optional
        The arguments of an allocator of arenapy's. By default a Bump and a Slab have what the
        program needs.

    Raises
    ------
    OSError
        If the library is not there.
    OutOfMemory
        If memory that is got at once cannot be had.
    """
    peer = PEERS[name]
    settings = settings or arguments_for(name, program)
    match name:
        case "loop":
            return NoHeap()
        case "bump":
            from arenapy.bump.bump import Bump

            return BumpHeap(Bump(**settings))
        case "slab":
            from arenapy.slab.slab import Slab

            return SlabHeap(Slab(**settings))
        case "pool" | "pool-class":
            from arenapy.pool.pool import Pool

            rounding: Literal["class", "step"] = "class" if name == "pool-class" else "step"
            return PoolHeap(Pool(**{"rounding": rounding, **settings}))
    library = ctypes.CDLL(peer.library)
    malloc, free = (ctypes.cast(library[symbol], ctypes.c_void_p).value for symbol in peer.symbols)
    assert malloc is not None and free is not None
    return MallocHeap(malloc, free)


def measure(
    name: str, program: Program, written: bool, settings: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """Run it here: seconds, steps done, peak of resident bytes and the step of it."""
    touch: Literal["nothing", "first", "pages"]
    settings = settings or arguments_for(name, program)  # which leaves memory resident
    touch = "pages" if written else "nothing" if name == "loop" else "first"
    with open("/proc/self/statm") as file:
        statm = file.fileno()
        if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
            trim(0)  # what malloc has free and resident would not be counted
        before = resident(statm)
        heap = make_heap(name, program, settings)
        at_once = resident(statm) - before
        for _ in range(1 if written else SPEED_PASSES):
            seconds, steps, peak, at = run(
                heap,
                program.slots,
                program.sizes,
                program.count,
                touch,
                statm if written else -1,
            )
            if steps < len(program):
                break
    # A malloc may give out what Python has freed, which was resident before.
    peak = max(at_once + peak, int(program.live().max()))
    return {"seconds": seconds, "steps": steps, "peak": peak, "at": at}


def measure_all(
    name: str, program: Program, passes: int, settings: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """Run it here: seconds of making the allocator and of all passes, and of the first one alone.

    The time is that of all threads on the processor: what others do meanwhile does not count, and
    a prefault by several threads is no faster than by one.
    """
    settings = settings or arguments_for(name, program)
    start = time.process_time()
    heap = make_heap(name, program, settings)
    # A program has its malloc from the start.
    total = first = 0.0 if PEERS[name].library else time.process_time() - start
    steps_of = program.slots, program.sizes, program.count
    for i in range(passes):
        seconds, steps, _, _ = run(heap, *steps_of, touch="pages", cpu=True)
        total += seconds
        first = first if i else total
        if steps < len(program):
            break
    return {"seconds": total, "first": first, "steps": steps}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print the figures as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m arenapy.commands.replay.worker", allow_abbrev=False
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("name", choices=PEERS)
    parser.add_argument("--written", action="store_true")
    parser.add_argument("--passes", type=int)
    parser.add_argument("--settings", type=json.loads)
    options = parser.parse_args(argv)
    gc.disable()
    program, settings = Program.load(options.folder), options.settings
    try:
        if options.passes is not None:
            found = measure_all(options.name, program, options.passes, settings)
        else:
            found = measure(options.name, program, options.written, settings)
    except (MemoryError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
