"""Attack an allocator without writing a class: what ``arenapy fuzz`` runs, in a process of its own.

What lives here: the machine over an adapter, and the rounds of examples with it. What may not: the
command line and the report (arenapy/commands/fuzz.py), which outlive a crash of this process.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import json
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, ClassVar

from hypothesis import HealthCheck, Verbosity, settings
from hypothesis import strategies as st

from arenapy.testing.adapters import Adapter, CLibrary, address_of, explained
from arenapy.testing.faults import Finding, check_kinds, worst_first
from arenapy.testing.machine import AllocatorMachine
from arenapy.testing.search import SHRINK_SECONDS, search
from arenapy.testing.steps import find
from arenapy.testing.strategies import PAGE, alignments
from arenapy.testing.tally import Tally
from arenapy.testing.threads import TwoThreadMachine

__all__ = ["AdapterMachine", "attack", "machine_for"]

MODULE = "arenapy.testing.attack"  # also where this is __main__
OVER = ".over"
ROUND = 100  # examples by default
C_ALIGN = 8  # what malloc() aligns even a byte to, in the libraries that are attacked


class AdapterMachine(AllocatorMachine):
    """Test any allocator whose methods have usual names: see `machine_for`.

    Notes
    -----
    Thread-safety: one thread runs a machine.

    Examples
    --------
    >>> from arenapy.testing.attack import AdapterMachine, machine_for
    >>> issubclass(machine_for(library="libc.so.6"), AdapterMachine)
    True
    """

    grows = True  # what `remaining` means is its own business
    refusals = (MemoryError, ValueError)  # also of what no block of it is, or is aligned to
    arguments: ClassVar[dict[str, Any]] = {}

    def make(self) -> Any:
        """Return an adapter to a new allocator."""
        adapter = Adapter(self.new())
        self.mark = None if adapter.mark is None else lambda state: state.mark()
        self.reset = None if adapter.reset is None else self.reset_adapter
        self.remaining = None if adapter.remaining() is None else lambda state: state.remaining()
        return adapter

    @staticmethod
    def new() -> Any:
        """Return a new allocator."""
        raise NotImplementedError

    def allocate(self, state: Any, nbytes: int, align: int | None) -> Any:
        """Return (block, bytes)."""
        return state.allocate(nbytes, align)

    def address(self, block: Any) -> int:
        """Return the address, which the block has under a usual name."""
        found = address_of(block[0])
        if not found:  # a buffer of no bytes is nowhere, and none is apart from another
            self.empty_is_apart = False
        return found

    def free(self, state: Any, block: Any) -> None:
        """Free the block, or drop it if the allocator has no method for that."""
        state.free(block)

    @staticmethod
    def reset_adapter(state: Any, mark: Any = None) -> None:
        """Reset to a mark, or to the start."""
        state.reset() if mark is None else state.reset(mark)

    def look(self) -> None:
        """Call the allocator's own ``check()``, too."""
        super().look()
        if self.state.check is not None:
            self.call(self.state.check)

    @classmethod
    def recipe(cls) -> dict[str, Any]:
        """Return the arguments of `machine_for`."""
        return {"machine": f"{MODULE}:machine_for", "arguments": cls.arguments}


def machine_for(
    target: str | None = None,
    library: str | None = None,
    threads: int = 1,
    allow: Sequence[str] = (),
    max_align: int = PAGE,
) -> type[AllocatorMachine]:
    """Return a class of machines that tests the named allocator or library.

    Parameters
    ----------
    target : str, optional
        ``"package.module:make_allocator"``: a callable without arguments.
    library : str, optional
        A C library instead.
    threads : {1, 2}
    allow : sequence of str
        The kinds of faults that are no failure.
    max_align : int
        The largest alignment to request, a power of two. 1: request none.

    Returns
    -------
    class

    Raises
    ------
    ValueError
        It cannot be imported or loaded, does not make an allocator, both or none are named, or
        there is no such kind of fault.

    Examples
    --------
    >>> from arenapy.testing import Program, Step
    >>> from arenapy.testing.attack import machine_for
    >>> steps = Step("start", {"config": {}}), Step("allocate_block", {"nbytes": 9, "align": None})
    >>> Program(steps).run(machine_for(library="libc.so.6"))
    2
    """
    if (target is None) == (library is None):
        raise ValueError("name an allocator, or a library")
    check_kinds(allow)
    if library is not None:
        with explained(library):
            loaded = CLibrary(library)
        new: Any = lambda: loaded  # noqa: E731
    else:
        with explained(str(target)):
            new = find(str(target))
    with explained(str(target or library)):
        first = Adapter(new())
    bases = (TwoThreadMachine, AdapterMachine) if threads > 1 else (AdapterMachine,)
    body = {
        "new": staticmethod(new),
        "alignments": alignments(max_align) if first.aligns and max_align > 1 else st.none(),
        "default_align": C_ALIGN if library is not None else 1,
        "allow": tuple(allow),
        "arguments": {
            "target": target,
            "library": library,
            "threads": threads,
            "allow": list(allow),
            "max_align": max_align,
        },
        "__module__": MODULE,
    }
    return type("Attacked", bases, body)


def attack(
    machine: type[AllocatorMachine],
    *,
    examples: int = ROUND,
    steps: int = 50,
    seconds: float | None = None,
    start: int = 0,
    shrink: float = SHRINK_SECONDS,
    watch: Callable[[Tally], None] | None = None,
    before: Tally | None = None,
    apart: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Tally:
    """Run random examples, and list each kind of fault that they show.

    Parameters
    ----------
    machine : class
        A subclass of `AllocatorMachine`.
    examples : int
        The number of examples. Ignored if `seconds` is given.
    steps : int
        The most steps of an example.
    seconds : float, optional
        Run for about this time.
    start : int
        The seed.
    shrink : float
        The most seconds in which failing programs are made smaller.
    watch : callable, optional
        Called with the tally before each example, before programs are made smaller, and after each
        of these.
    before : Tally, optional
        The tally of an attack that this one continues.
    apart : bool
        Run each smaller program in a forked child, which may crash or hang. Memory of a GPU cannot
        be used there.
    clock : callable
        Returns the time in seconds.

    Returns
    -------
    Tally
        The counts. `Tally.findings` has the smallest failing program of each kind of fault, and
        `Tally.failing` that of the worst, or None.

    Notes
    -----
    Thread-safety: one attack at a time on one class.

    Examples
    --------
    >>> from arenapy.testing import BumpMachine
    >>> from arenapy.testing.attack import attack
    >>> class Mine(BumpMachine):
    ...     pass
    >>> attack(Mine, examples=5).failing is None
    True
    """
    options = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    return search(
        machine, options, seconds=seconds, start=start, shrink_seconds=shrink, watch=watch,
        before=before, apart=apart, clock=clock,
    )  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Run one attack as JSON says, or go on with the one that left a report; write what it found.

    The report is written before each example: a crash leaves what was found so far. At the end it
    writes its status beside it: what the process does afterwards is no finding.
    """
    job, report = argv
    told = json.loads(job)
    try:
        machine = machine_for(**told["machine"])
    except ValueError as error:
        print(error, file=sys.stderr)
        _say_over(report, os.EX_USAGE)
        return os.EX_USAGE
    before = _read(report) if os.path.exists(report) else Tally()
    status = 0
    told["attack"]["start"] += before.examples  # other programs
    faulthandler.enable()
    try:
        try:
            attack(
                machine, **told["attack"], before=before, watch=lambda tally: _write(report, tally)
            )
        except OSError:
            raise
        except BaseException:
            traceback.print_exc()
            status = os.EX_SOFTWARE
        _say_over(report, status)
    except OSError as error:  # and none of the allocator's, which are findings
        print(f"{os.path.dirname(report)} cannot be written: {error}", file=sys.stderr)
        return os.EX_IOERR
    return status


def _say_over(report: str, status: int) -> None:
    with open(report + OVER + ".new", "w", encoding="utf-8") as file:
        file.write(str(status))
    os.replace(report + OVER + ".new", report + OVER)


def _write(report: str, tally: Tally) -> None:
    found = {
        "examples": tally.examples,
        "rules": tally.rules,
        "states": tally.states,
        "restarts": tally.restarts,
        "found_at": tally.found_at,
        "searching": tally.watch is not None,  # and not making programs smaller
        "findings": [asdict(one) for one in worst_first(tally.findings.values())],
    }
    with open(report + ".new", "w", encoding="utf-8") as file:
        json.dump(found, file)
    os.replace(report + ".new", report)


def _read(report: str) -> Tally:
    with open(report, encoding="utf-8") as file:
        found = json.load(file)
    counts = Counter(found["rules"]), Counter(found["states"])
    tally = Tally(found["examples"], *counts, found["found_at"], restarts=found["restarts"])
    tally.findings.update((one["kind"], Finding(**one)) for one in found["findings"])
    return tally


def _end(code: int) -> None:
    """The search is over, whatever the attacked code still has: threads to wait for, or timers."""
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):
            stream.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(code)


if __name__ == "__main__":
    _end(main(sys.argv[1:]))
