"""Counts over all examples of a class of machines, for the summary at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import hypothesis

from arenapy.testing.faults import Finding, kind_of, text_of, worst_first
from arenapy.testing.steps import Program

__all__ = ["NewKind", "Tally"]


class NewKind(BaseException):
    """A search found the first fault of a kind; past Hypothesis, which would repeat the example."""


@dataclass(slots=True)
class Tally:
    """Counts over all examples of one class of machines.

    Attributes
    ----------
    examples : int
    rules : Counter of str
        The number of runs of each rule. Their sum is the number of steps.
    states : Counter of str
        How often each rare state occurred.
    found_at : int or None
        The number of the first example that failed.
    findings : dict of str to Finding
        The smallest program of each kind of fault.
    only : str or None
        The one kind that is looked for. None: all.
    restarts : int
        How often a search began anew because an example could not be repeated.
    watch : callable or None
        Called before each example of a search, which goes on after a fault.

    Notes
    -----
    Thread-safety: written by the thread that runs the machine.

    Examples
    --------
    >>> from arenapy.testing import Tally
    >>> tally = Tally()
    >>> tally.begin()
    >>> tally.examples
    1
    """

    examples: int = 0
    rules: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    found_at: int | None = None
    findings: dict[str, Finding] = field(default_factory=dict, init=False)
    only: str | None = None
    restarts: int = 0
    watch: Callable[[], None] | None = None

    def begin(self) -> None:
        """Count an example."""
        if self.watch is not None:
            self.watch()
        self.examples += 1

    @property
    def worst(self) -> Finding | None:
        """The worst finding, if there is one."""
        return next(iter(worst_first(self.findings.values())), None)

    @property
    def failing(self) -> Program | None:
        """The program of the worst finding."""
        return None if self.worst is None else Program.parse(self.worst.program)

    @property
    def error(self) -> str | None:
        """The message of the worst finding."""
        return None if self.worst is None else self.worst.message

    @property
    def steps(self) -> int:
        """How many steps ran."""
        return self.rules.total()

    def reached(self, state: str) -> None:
        """Count a rare state, also where Hypothesis shows its statistics."""
        self.states[state] += 1
        if hypothesis.currently_in_test_context():
            hypothesis.event(state)

    def set_aside(self, kind: str) -> bool:
        """True if a search knows this kind already, or looks for another."""
        if self.only is not None:
            return kind != self.only
        return self.watch is not None and kind in self.findings

    def failed(self, program: Program, error: BaseException) -> None:
        """Keep the smallest of what failed. A search begins anew after the first of a kind."""
        self.found_at = self.found_at or self.examples
        kind = kind_of(error)
        before = self.findings.get(kind)
        lines = program.lines()
        if before is None or _size(lines) <= _size(before.program):
            self.findings[kind] = Finding(kind, text_of(error), lines)
        if before is None and self.watch is not None:
            raise NewKind(kind) from error


def _size(lines: list[str]) -> tuple[int, int]:
    return len(lines), sum(map(len, lines))
