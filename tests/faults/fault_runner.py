"""Runs one operation of `fault_operations` with one of its calls failed, and looks at the ruins."""

import gc
from collections import Counter
from typing import NamedTuple

from fault_operations import OPERATIONS
from fault_table import ERRORS, LASTS, number
from faults import FAILED, PYTHON_CALLS
from injection import attempt as attempt_of
from injection import made

THOROUGH = ("region", "commit", "decommit", "reserve", "send")  # closest to the system


class Outcome(NamedTuple):
    """What came of it."""

    error: str  # name of the exception's type; "" if there was none
    text: str
    errno: int | None
    problems: tuple[str, ...]  # what should not have happened
    failed: bool  # whether the call was made at all
    calls: list[str]  # all that was made


def calls_of(faults, name, directory):
    """The calls that the operation makes if nothing fails: how many of which name."""
    attempt(faults, name, directory)  # what is done the first time only, is not done again
    outcome = attempt(faults, name, directory)
    assert not outcome.error and not outcome.problems, outcome
    return Counter(outcome.calls)


def errors_of(name, call, nth):
    """What the call fails with: all it may; what is like others that fail, once with the rest."""
    errors = ERRORS[call]
    if nth == 0 or name.startswith(THOROUGH):
        return errors
    return [error for error in errors if error in (errors[0], LASTS)]


def attempt(faults, name, directory, call=None, nth=0, error=None):
    """The outcome of the operation with that call failed."""
    with faults.noting():
        before = faults.left()
        act, calls = made(OPERATIONS[name], directory), []
        python = act.python
        done = attempt_of(
            act,
            faults.armed(call, nth, number(error), error == LASTS),
            lambda: calls.extend(faults.armed_calls()),
            quiet="debug" in name,  # whose check at a block's end has nobody to tell
        )
        act = None
        gc.collect()
        failed = [one.name for one in calls if one.state == FAILED]
        assert set(failed) <= {call}, failed
        after = faults.left(forgive=True)
    left = [
        f"left {what}: {one} -> {other}"
        for what, one, other in zip(before._fields, before, after, strict=True)
        if one != other
    ]
    names = [one.name for one in calls if python or one.name not in PYTHON_CALLS]
    return Outcome(done.error, done.text, done.number, (*done.problems, *left), bool(failed), names)
