"""Failing one call of an operation: what the system's calls and the driver's have in common.

An *operation* is a function that makes what it needs and gives an `Act`. A `Row` of a table says
which exception follows when one of its calls fails. `attempt` does the act with a call that fails,
then once more without, and says what should not have happened.
"""

import gc
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

MIB = 1 << 20
OPERATIONS = {}


def nothing():
    return None


@dataclass
class Act:
    """Something that calls the system."""

    act: Callable[[], Any]
    #: Checks what it acts on and gives what is the same after a call that raised.
    view: Callable[[], Any] = nothing
    #: Whether what Python code of ours calls is to fail too: many files below /proc are read.
    python: bool = False
    #: Makes sure that what came back is what was asked for.
    good: Callable[[Any], Any] = lambda result: None
    #: Called at the end, before everything is dropped.
    end: Callable[[], Any] = nothing


def operation(name, operations=OPERATIONS, **options):
    """Adds a function to those by name, with attributes if there are options."""

    def add(function):
        assert name not in operations
        operations[name] = function
        vars(function).update(options)
        return function

    return add


def made(make, directory):
    """The Act of an operation of `fault_operations`; one that needs a directory says so."""
    return make(directory) if inspect.signature(make).parameters else make()


def seen(allocator):
    """What an allocator says of itself, after its own check."""
    from arenapy import Bump

    allocator.check()
    stats = allocator.stats()
    if isinstance(allocator, Bump):  # its tables may have grown
        stats = replace(stats, metadata_bytes=0)
    return stats, [(region.address, region.nbytes) for region in allocator.regions]


class Row(NamedTuple):
    """Patterns of names, and what follows. The first row that fits counts."""

    operations: str
    calls: str
    errors: str
    outcomes: tuple[str, ...]  # "exception: a part of its text"; "" for none
    leaves: frozenset[str] = frozenset()  # what is left behind, on purpose; "?": or not
    misuse: str = ""  # a pattern of what the driver may complain of


FINE = ""  # an outcome: no exception
ANY = ".*"


def row_of(table, operation, call, error):
    """The number of the row that says what comes of it; None if none does."""
    for i, row in enumerate(table):
        pairs = ((row.operations, operation), (row.calls, call), (row.errors, error))
        if all(re.fullmatch(pattern, name) for pattern, name in pairs):
            return i
    return None


def is_one_of(outcomes, error, text):
    """Whether the name of an exception's type and its text are among a row's outcomes."""
    pairs = (outcome.partition(": ") for outcome in outcomes)
    return any(name == error and part in text for name, _, part in pairs)


class Done(NamedTuple):
    """What came of an act in which a call failed. The exception is gone, with all that it kept."""

    error: str  # name of the exception's type; "" if there was none
    text: str
    number: int | None  # `errno`, or the result of the driver
    problems: list[str]  # what should not have happened


def attempt(act, failing, end_failing, *, twice=False, quiet=False):
    """Do it while `failing`, a context; then again, if it raised or `twice`.

    `end_failing` is called between the two. A call that raised must have changed nothing, and the
    same done again succeeds. With `quiet`, exceptions that nobody can be told of are no problem.
    """
    problems, untold = [], []
    with mock.patch.object(sys, "unraisablehook", untold.append):
        view, result, error, text, number = act.view(), None, "", "", None
        try:
            with failing:
                result = act.act()
        except BaseException as caught:
            error, text = type(caught).__name__, str(caught)
            number = getattr(caught, "errno", getattr(caught, "result", None))
        try:
            end_failing()
            if not error:
                act.good(result)
                result = None
                gc.collect()
            now = act.view()
            if error and now != view:
                problems.append(f"changed: {view} -> {now}")
            if error or twice:
                act.good(act.act())
            act.view()
            act.end()
        except BaseException as caught:
            problems.append(f"afterwards: {type(caught).__name__}: {caught}")
        act = result = view = now = None
        gc.collect()
        if not quiet:
            problems += [f"told nobody: {one.exc_value!r} {one.err_msg}" for one in untold]
        untold.clear()
    return Done(error, text, number, problems)
