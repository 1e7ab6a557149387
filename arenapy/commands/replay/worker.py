"""One allocator and one program, in a process of its own: what ``arenapy replay`` starts.

    python -m arenapy.commands.replay.worker FOLDER NAME [--written]

FOLDER holds a program. Either it is run twice, the first byte of every block written, and the
second pass is timed: the allocator at its speed. Or (``--written``) once, every page of every block
written, and resident memory is read after every allocation: what the allocator holds on to.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from arenapy.commands.replay.loop import BumpHeap, Heap, MallocHeap, NoHeap, PoolHeap, resident, run
from arenapy.commands.replay.program import Program

__all__ = ["PEERS", "Peer", "main", "make_heap", "measure"]

SPEED_PASSES = 2


@dataclass(frozen=True, slots=True)
class Peer:
    """Something that allocates.

    Attributes
    ----------
    about : str
        For the help.
    library : str
        What is loaded, beside the malloc of the process. "": libc, or none is needed.
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


def make_heap(name: str, program: Program) -> Heap:
    """What `name` stands for, ready to run the program.

    Raises
    ------
    OSError
        If the library is not there.
    OutOfMemory
        If memory that is got at once cannot be had.
    """
    peer = PEERS[name]
    match name:
        case "loop":
            return NoHeap()
        case "bump":
            from arenapy.bump.bump import Bump

            return BumpHeap(Bump(program.bump_bytes()))
        case "pool" | "pool-class":
            from arenapy.pool.pool import Pool

            return PoolHeap(Pool(rounding="class" if name == "pool-class" else "step"))
    library = ctypes.CDLL(peer.library)
    malloc, free = (ctypes.cast(library[symbol], ctypes.c_void_p).value for symbol in peer.symbols)
    assert malloc is not None and free is not None
    return MallocHeap(malloc, free)


def measure(name: str, program: Program, written: bool) -> dict[str, float]:
    """Run it here: seconds, steps done, peak of resident bytes and the step of it."""
    touch: Literal["nothing", "first", "pages"]
    touch = "pages" if written else "nothing" if name == "loop" else "first"
    with open("/proc/self/statm") as file:
        statm = file.fileno()
        before = resident(statm)
        heap = make_heap(name, program)
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
    return {"seconds": seconds, "steps": steps, "peak": at_once + peak, "at": at}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print the figures as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m arenapy.commands.replay.worker", allow_abbrev=False
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("name", choices=PEERS)
    parser.add_argument("--written", action="store_true")
    options = parser.parse_args(argv)
    gc.disable()
    try:
        found = measure(options.name, Program.load(options.folder), options.written)
    except (MemoryError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
