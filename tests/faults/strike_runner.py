"""Runs one operation while a signal's exception strikes, and looks at the ruins."""

import contextvars
import gc
import sys
import threading
from unittest import mock

from cuda_fault_operations import OPERATIONS as CUDA_OPERATIONS
from cuda_fault_runner import left
from cuda_support import a_gpu
from injection import made
from strike_operations import OPERATIONS
from strikes import Struck

from arenapy import measure
from arenapy.linux import libc_malloc
from arenapy.numpy_handler import contexts as numpy_context

#: They cannot be done again once they are done, and a signal may strike just after that.
ONCE = {"Bump grow", "Pool release"}


def in_force():
    """What contexts change beyond the objects at hand."""
    return {
        "NumPy's handler": numpy_context.get_handler(),
        "Thread.start": threading.Thread.start,
        "libc keeps": libc_malloc.keepers(),
        "threads": threading.active_count(),
        "measurements": len(sys.modules[measure.__module__]._running),
    }


def lost(untold):
    """Exceptions that nobody was told of; a file that is closed by its last reference is fine."""
    return [f"told nobody: {a.exc_value!r}" for a in untold if a.exc_type is not ResourceWarning]


def attempt(faults, name, directory, strike):
    """(whether the signal's exception came out, what should not have happened).

    `strike` is the context in which a signal arrives.
    """
    start = threading.Thread.start
    try:  # in a context of its own: what stays in force in it has no further effect
        return contextvars.copy_context().run(_attempt, faults, name, directory, strike)
    finally:
        threading.Thread.start = start


def under(strike, act, problems):
    """Do it while the signal comes. Did the exception of the signal end it?"""
    error = None
    try:
        with strike as handler:
            try:
                act.act()
            except Exception as caught:
                error = f"{type(caught).__name__}: {caught}"
            str(error)  # a call, at which what is pending strikes
    except Struck:
        return True
    if handler.arrived or error:
        problems.append(f"the signal's exception is lost: {error}")
    return False


def cuda_attempt(name, strike):
    """The same of an operation of `cuda_fault_operations`; and what the driver still has."""
    problems, untold = [], []
    make = CUDA_OPERATIONS[name]
    with (
        mock.patch.object(sys, "unraisablehook", untold.append),
        a_gpu(leaks=True, version=make.version) as gpu,
    ):
        act = make(gpu)
        act.view()
        struck = under(strike, act, problems)
        try:
            gpu.drain()
            act.view()
            act.good(act.act())
            act.view()
            act.end()
        except BaseException as caught:
            problems.append(f"afterwards: {type(caught).__name__}: {caught}")
        act = None
        gc.collect()
        gpu.drain()
        gc.collect()
        problems += lost(untold)
        problems += gpu.errors
        untold.clear()
        gpu.errors = []
        return struck, problems, left(gpu)


def _attempt(faults, name, directory, strike):
    problems, untold = [], []
    with faults.noting(install=False), mock.patch.object(sys, "unraisablehook", untold.append):
        before = faults.left()
        act = made(OPERATIONS[name], directory)
        act.view()
        there = in_force()
        struck = under(strike, act, problems)
        now = in_force()
        problems += [f"left in force: {key}" for key, one in there.items() if one != now[key]]
        try:
            act.view()
            if name not in ONCE:
                act.good(act.act())
            act.view()
            act.end()
        except BaseException as caught:
            problems.append(f"afterwards: {type(caught).__name__}: {caught}")
        act = there = now = None
        problems += lost(untold)
        untold.clear()
        after = faults.left()
        if after != before:  # garbage, perhaps
            gc.collect()
            after = faults.left()
        problems += [
            f"left {what}: {one} -> {other}"
            for what, one, other in zip(before._fields, before, after, strict=True)
            if one != other
        ]
        problems += faults.wrong()
    if problems:
        gc.collect()  # what this attempt left is not to be given back in another one
    return struck, problems
