"""What a class of machines has done so far, in all its examples: for the summary at the end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import hypothesis

from arenapy.testing.steps import Program

__all__ = ["Tally"]


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
    failing : Program or None
        The smallest program that failed.
    error : BaseException or None
        The exception of the failing program.

    Notes
    -----
    Thread-safety: written by the thread that runs the machine.
    """

    examples: int = 0
    rules: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    found_at: int | None = None
    failing: Program | None = None
    error: BaseException | None = None

    @property
    def steps(self) -> int:
        """How many steps ran."""
        return self.rules.total()

    def reached(self, state: str) -> None:
        """Count a rare state, also where Hypothesis shows its statistics."""
        self.states[state] += 1
        if hypothesis.currently_in_test_context():
            hypothesis.event(state)

    def failed(self, program: Program, error: BaseException) -> None:
        """Keep the smallest of what failed."""
        self.found_at = self.found_at or self.examples
        if self.failing is None or _size(program) <= _size(self.failing):
            self.failing, self.error = program, error


def _size(program: Program) -> tuple[int, int]:
    return len(program), len(str(program))
