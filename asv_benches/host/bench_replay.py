"""Traces: what recording an operation costs, and what replays of random traces leave reserved.

Recording is measured three times: in a loop that does nothing else, on a pool, whose short way is
closed while it is recorded, and from Python 20 calls deep, with the callers and without. What
counts is the processor's time, the kernel's for writing the file included. The replays are those of
``arenapy replay``, one process an allocator.
"""

import os
import tempfile

import numpy as np

import arenapy
from arenapy import trace
from arenapy.commands.replay.command import replay
from arenapy.commands.replay.loop import NoHeap, PoolHeap, run
from arenapy.diagnostics.recorder import Recorder
from asv_benches.gpu import traces as gpu_traces
from asv_benches.support.rounds import Line, Way, medians, named, turns

EVENTS = 200_000
NBYTES = 4096
SEEDS = (0, 1, 2)
PEERS = ("jemalloc", "mimalloc")
SHOWN = ("pool-class", "malloc", "tcmalloc", "jemalloc-eager", "mimalloc-eager")
QUICK_ALLOCATIONS = 1_500

RECORDED = "torch training"
TRACES = (*(f"random {seed}" for seed in SEEDS), RECORDED)

# The pool lets go of the recorder of the round before, which has the file.
START = "record(None); recorder = Recorder(path); recorder.start()"
WAYS = {
    "loop": Way("run(heap, slots, sizes, 1)", operations=EVENTS),
    "loop, recorded": Way(
        "run(heap, slots, sizes, 1, recorder=recorder)", START, operations=EVENTS
    ),
    "pool": Way("run(pool_heap, slots, sizes, 1)", "record(None)", operations=EVENTS),
    "pool, recorded": Way(
        "run(pool_heap, slots, sizes, 1)",
        f"{START}; record(recorder)",
        operations=EVENTS,
    ),
    "Python": Way("below(DEPTH, allocate)", "record(None)", operations=EVENTS),
    **{
        f"Python, recorded, {sites} callers": Way(
            "below(DEPTH, allocate)",
            f"record(None); recorder = Recorder(path, '', {sites}); recorder.start(); "
            "record(recorder)",
            operations=EVENTS,
        )
        for sites in (0, 1, 16)
    },
}
DEPTH = 20  # calls around an allocation


def below(depth, function):
    """Call a function from the depth of the stack."""
    if depth:
        below(depth - 1, function)
    else:
        function()


def namespace(path):
    """The names that the ways use. `path` is a file to record into."""
    pool = arenapy.Pool()

    def ask():
        pool.alloc(NBYTES)

    def allocate():
        for _ in range(EVENTS // 2):
            ask()

    return {
        "below": below,
        "allocate": allocate,
        "DEPTH": DEPTH,
        "run": run,
        "heap": NoHeap(),
        "pool_heap": PoolHeap(pool),
        "record": pool._record,
        "slots": np.tile(np.array([0, ~0], "i4"), EVENTS // 2),
        "sizes": np.full(EVENTS, NBYTES, "u8"),
        "Recorder": Recorder,
        "path": path,
    }


def traced(name):
    """One of TRACES."""
    if name == RECORDED:
        return gpu_traces.unpack(gpu_traces.TRAINING)
    return trace.synthetic(int(name.split()[1]))


class Recording:
    """asv: an allocation or a free, recorded or not."""

    params = tuple(WAYS)
    param_names = ("way",)

    def setup(self, way):
        """A file, and a new recording into it."""
        self.folder = tempfile.TemporaryDirectory()
        path = os.path.join(self.folder.name, "asv.trace")
        self.loop = WAYS[way].loop(namespace(path))

    def teardown(self, way):
        """Remove the file."""
        self.folder.cleanup()

    @named("Allocate or free while a trace is recorded", "ns")
    def track_event(self, way):
        """The median of rounds, each with a file of its own if it is recorded."""
        return turns({"": self.loop}, 1, 5)[""] / EVENTS * 1e9


class Replay:
    """asv: traces repeated, each allocator in a process of its own."""

    params = (("pool", "pool-class", "malloc", *PEERS), TRACES)
    param_names = ("allocator", "trace")
    timeout = 600

    def setup(self, allocator, trace):
        """Not what is not here."""
        (self.found,) = replay(traced(trace), [allocator])
        if self.found.ratio is None:
            raise NotImplementedError(self.found.note)

    @named("Peak reserved / peak live of a trace", "x")
    def track_reserved(self, allocator, trace):
        """What rounding, fragmentation and bookkeeping cost in memory."""
        return self.found.ratio

    @named("Time per event of a trace, second pass", "ns")
    def track_event(self, allocator, trace):
        """The first byte of every block written."""
        return self.found.event_ns


def recording_lines(quick):
    """ns an event."""
    with tempfile.TemporaryDirectory() as folder:
        found = medians(
            WAYS, namespace(os.path.join(folder, "report.trace")), 1, 5 if quick else 21
        )
    for name in "loop", "pool":
        cost = (found[f"{name}, recorded"] - found[name]) * 1e9
        yield Line("replay", f"recording an event, {name}", cost, "ns", 60)
    yield Line("replay", "an event of a pool that is not recorded", found["pool"] * 1e9, "ns")
    for sites in 1, 16:
        more = found[f"Python, recorded, {sites} callers"] - found["Python, recorded, 0 callers"]
        what = f"the site of an allocation, {sites} caller{'s' * (sites > 1)}"
        yield Line("replay", what, 2 * more * 1e9, "ns", 400)


def lines(quick):
    """The report's lines."""
    yield from recording_lines(quick)
    for seed in SEEDS[:1] if quick else SEEDS:
        made = trace.synthetic(seed, QUICK_ALLOCATIONS) if quick else trace.synthetic(seed)
        names = ["pool", *PEERS, *(() if quick else SHOWN)]
        found = {one.name: one.ratio for one in replay(made, names) if one.ratio is not None}
        what = f"peak reserved / peak live, seed {seed}"
        for name, ratio in found.items():
            limit = 1.25 if name == "pool" else None
            yield Line("replay", f"{what}, {name}", ratio, "x", limit, timed=False)
        best = min((found[name] for name in PEERS if name in found), default=None)
        if best is not None and "pool" in found:
            what = f"pool / the best of {' and '.join(PEERS)}, seed {seed}"
            yield Line("replay", what, found["pool"] / best, "x", 1.05, timed=False)
