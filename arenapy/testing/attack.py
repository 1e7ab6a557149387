"""Attack an allocator without writing a class: what ``arenapy fuzz`` runs, in a process of its own.

What lives here: the machine over an adapter, and the rounds of examples with it. What may not: the
command line and the report (arenapy/commands/fuzz.py), which outlive a crash of this process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from arenapy.testing.adapters import Adapter, CLibrary, address_of, explained
from arenapy.testing.crashes import smaller
from arenapy.testing.machine import AllocatorMachine
from arenapy.testing.steps import Program, find
from arenapy.testing.strategies import PAGE, alignments
from arenapy.testing.tally import Tally
from arenapy.testing.threads import TwoThreadMachine

__all__ = ["AdapterMachine", "attack", "machine_for"]

MODULE = "arenapy.testing.attack"  # also where this is __main__
EXIT_USAGE = 2
ROUND = 100  # examples between two looks at the clock
SMALLER_SECONDS = 10.0
C_ALIGN = 8  # what malloc() aligns even a byte to, in the libraries that are attacked


class AdapterMachine(AllocatorMachine):
    """Attack what an `Adapter` can be made of.

    Notes
    -----
    Thread-safety: one thread runs a machine.
    """

    grows = True  # what `remaining` means is its own business
    refusals = (MemoryError, ValueError)  # also of what no block of it is, or is aligned to
    arguments: ClassVar[dict[str, Any]] = {}

    def make(self) -> Any:
        """An adapter to a new allocator."""
        adapter = Adapter(self.new())
        self.mark = None if adapter.mark is None else lambda state: state.mark()
        self.reset = None if adapter.reset is None else self.reset_adapter
        self.remaining = None if adapter.remaining() is None else lambda state: state.remaining()
        return adapter

    @staticmethod
    def new() -> Any:
        """A new allocator."""
        raise NotImplementedError

    def allocate(self, state: Any, nbytes: int, align: int | None) -> Any:
        """(block, bytes)."""
        return state.allocate(nbytes, align)

    def address(self, block: Any) -> int:
        """By the block's usual names."""
        found = address_of(block[0])
        if not found:  # a buffer of no bytes is nowhere, and none is apart from another
            self.empty_is_apart = False
        return found

    def free(self, state: Any, block: Any) -> None:
        """Free it, or drop it."""
        state.free(block)

    @staticmethod
    def reset_adapter(state: Any, mark: Any = None) -> None:
        """To a mark, or to the start."""
        state.reset() if mark is None else state.reset(mark)

    def look(self) -> None:
        """Also the allocator's own ``check()``."""
        super().look()
        if self.state.check is not None:
            self.call(self.state.check)

    @classmethod
    def recipe(cls) -> dict[str, Any]:
        """The arguments of `machine_for`."""
        return {"machine": f"{MODULE}:machine_for", "arguments": cls.arguments}


def machine_for(
    target: str | None = None, library: str | None = None, threads: int = 1
) -> type[AllocatorMachine]:
    """A class of machines that attacks what is named.

    Parameters
    ----------
    target : str, optional
        ``"package.module:make_allocator"``: a callable without arguments.
    library : str, optional
        A C library instead.
    threads : {1, 2}

    Returns
    -------
    class

    Raises
    ------
    ValueError
        It cannot be imported or loaded, does not make an allocator, or both or none are named.

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
        "alignments": st.none() | alignments(PAGE) if first.aligns else st.none(),
        "default_align": C_ALIGN if library is not None else 1,
        "arguments": {"target": target, "library": library, "threads": threads},
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
) -> Tally:
    """Run examples until one fails, or enough have run.

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

    Returns
    -------
    Tally
        The counts. `Tally.failing` is the smallest failing program, or None.

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
        max_examples=examples if seconds is None else ROUND,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        print_blob=False,
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
        phases=[phase for phase in Phase if phase is not Phase.explain],
        suppress_health_check=list(HealthCheck),
    )
    end = time.monotonic() + (seconds or 0)
    machine.tally = Tally()  # a class may be attacked again, after it was mended
    try:
        while True:
            run_state_machine_as_test(seed(start)(machine), settings=options)
            start += 1
            if time.monotonic() >= end:
                return machine.tally
    except Exception as error:
        if machine.tally.failing is None:
            machine.tally.error = error  # before the first step: it cannot be attacked at all
            raise
        machine.tally.failing = fewer_steps(machine, machine.tally.failing, type(error))
        return machine.tally


def fewer_steps(
    machine: type[AllocatorMachine], program: Program, error: type[BaseException]
) -> Program:
    """As few steps as still fail in the same way: Hypothesis makes arguments smaller, and stops
    at a step that does nothing if others were chosen because of it.
    """
    tally, machine.tally = machine.tally, Tally()  # not to be counted

    def fails(lines: list[str]) -> bool:
        try:
            Program.parse(lines[1:]).run(machine)
        except Exception as again:
            return type(again) is error
        return False

    try:
        lines = ["", *program.lines()]
        return (
            Program.parse(smaller(lines, SMALLER_SECONDS, fails)[1:]) if fails(lines) else program
        )
    finally:
        machine.tally = tally


def main(argv: Sequence[str]) -> int:
    """Run one attack as JSON says, write what it found as JSON."""
    job, report = argv
    told = json.loads(job)
    try:
        machine = machine_for(**told["machine"])
    except ValueError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    tally = attack(machine, **told["attack"])
    failing = None if tally.failing is None else tally.failing.lines()
    found = {
        "examples": tally.examples,
        "rules": tally.rules,
        "states": tally.states,
        "failing": failing,
        "error": "" if tally.error is None else f"{type(tally.error).__name__}: {tally.error}",
    }
    with open(report, "w", encoding="utf-8") as file:
        json.dump(found, file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
