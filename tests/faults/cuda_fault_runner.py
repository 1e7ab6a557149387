"""Runs one operation of `cuda_fault_operations` with one call failed, and looks at the ruins."""

import gc
from collections import Counter
from contextlib import contextmanager
from typing import NamedTuple

import injection
from cuda_fault_operations import OPERATIONS
from cuda_support import a_gpu
from simulated_gpu import GLOBAL

from arenapy import cuda
from arenapy.cuda import backing


class Outcome(NamedTuple):
    """What came of it."""

    error: str  # name of the exception's type; "" if there was none
    text: str
    result: int  # what the exception says that the driver has returned
    problems: list[str]  # what should not have happened
    misused: list[str]  # what the driver complained of
    failed: bool  # whether the call was made at all
    calls: Counter  # all that were made
    left: dict[str, int]  # what is still there when everything is dropped


def lost_events(gpu):
    """How many nobody has, nor keeps for the next one: as many more are made for as many new ones.

    To be asked when all that had events is gone.
    """
    there = Counter(one.context for one in gpu.event_handles.things.values())
    taken = []
    for context, count in there.items():
        stream = cuda.Stream(context // 0x1000 - 1)
        taken += [stream.record() for _ in range(count)]
    return len(gpu.event_handles.things) - sum(there.values())


def left(gpu):
    """What the driver still has."""
    return {
        "memory": sum(gpu.memory.used.values()),
        "registered": len(gpu.memory.registered),
        "pinned bytes": backing.pinned_bytes(),
        "streams": len(gpu.stream_handles.things),
        "events": lost_events(gpu),
        "pools": len(gpu.pool_handles.things),
        "graphs": len(gpu.graph_handles.things),
        "objects": len(gpu.object_handles.things),
        "kept": getattr(gpu, "kept", 0),
        "modes": sum(mode != GLOBAL for mode in gpu.capture_modes.values()),
    }


def attempt(name, call=None, nth=1, result=0):
    """The outcome of the operation with its n-th call of that name failed; then it is done again.

    Without a name nothing fails, and it is done twice all the same.
    """
    make = OPERATIONS[name]
    with a_gpu(leaks=True, version=make.version) as gpu:
        act = make(gpu)
        seen = {}

        @contextmanager
        def failing():
            seen["before"] = gpu.calls.copy()
            if call:
                gpu.fail_at(call, nth, result)
            yield

        def end_failing():
            before = seen["before"]
            seen["calls"] = gpu.calls - before
            seen["failed"] = bool(call) and (call, before[call] + nth) not in gpu.plan
            gpu.plan.clear()
            # That could not be left; the first one is the test's own.
            seen["contexts"] = len(gpu.current) - 1
            gpu.current[1:] = []
            gpu.drain()

        done = injection.attempt(act, failing(), end_failing, twice=True)
        act = None
        gc.collect()
        gpu.drain()
        gc.collect()
        misused, gpu.errors = gpu.errors, []
        remains = {**left(gpu), "contexts": seen["contexts"]}
    return Outcome(
        done.error,
        done.text,
        done.number or 0,
        done.problems,
        misused,
        seen["failed"],
        seen["calls"],
        remains,
    )
