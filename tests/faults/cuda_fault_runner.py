"""Runs one operation of `cuda_fault_operations` with one call failed, and looks at the ruins."""

import gc
import sys
from collections import Counter
from typing import NamedTuple
from unittest import mock

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
    problems, untold = [], []
    make, version = OPERATIONS[name]
    with (
        mock.patch.object(sys, "unraisablehook", untold.append),
        a_gpu(leaks=True, version=version) as gpu,
    ):
        act = make(gpu)
        view = act.view()
        before = gpu.calls.copy()
        if call:
            gpu.fail_at(call, nth, result)
        value, error = None, None
        try:
            value = act.act()
        except Exception as caught:
            error = caught.with_traceback(None)
            error.__context__ = None  # its frames keep what they had
        calls, failed = (
            gpu.calls - before,
            bool(call) and (call, before[call] + nth) not in gpu.plan,
        )
        gpu.plan.clear()
        contexts = len(gpu.current) - 1  # that could not be left; the first one is the test's own
        gpu.current[1:] = []
        try:
            gpu.drain()
            if error is None:
                act.good(value)
                value = None
                gc.collect()
            now = act.view()
            if error is not None and now != view:
                problems.append(f"changed: {view} -> {now}")
            value = act.act()
            act.good(value)
            value = None
            act.view()
            act.end()
        except Exception as caught:
            problems.append(f"afterwards: {type(caught).__name__}: {caught}")
        act = view = now = value = None
        gc.collect()
        gpu.drain()
        gc.collect()
        problems += [f"told nobody: {one.exc_value!r} {one.err_msg}" for one in untold]
        untold.clear()
        misused, gpu.errors = gpu.errors, []
        remains = {**left(gpu), "contexts": contexts}
    kind, text = (type(error).__name__, str(error)) if error else ("", "")
    return Outcome(
        kind, text, getattr(error, "result", 0), problems, misused, failed, calls, remains
    )
