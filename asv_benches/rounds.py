"""How things are measured here, for asv and report.py alike.

A `Way` is a statement that is run many times, as `timeit` runs it: in a `for` loop that is part of
the result, with the collector off, on names that are local variables. Ways that are compared take
turns in an order that is shuffled anew for each round, and medians over the rounds are compared: a
machine that is slow for a while is slow for all of them. Time is the processor's for this thread,
the kernel's work for it included: waiting for a processor while others run is not a cost of ours.
"""

import random
import statistics
import sysconfig
import time
import timeit
from dataclasses import dataclass

CLOCK = time.thread_time
HAS_GIL = not sysconfig.get_config_var("Py_GIL_DISABLED")


@dataclass(frozen=True)
class Way:
    """A statement, what to run before each round of it (unmeasured), and its operations."""

    statement: str
    before: str = "pass"
    operations: int = 1

    def loop(self, names):
        """What runs the statement: `loop.timeit(n)` gives the seconds of n runs."""
        return timeit.Timer(self.statement, self.before, CLOCK, names)


@dataclass(frozen=True)
class Line:
    """One line of the report. `limit` is None for what is only shown."""

    section: str
    what: str
    value: float
    unit: str = "x"
    limit: float | None = None
    at_least: bool = False
    timed: bool = True

    @property
    def verdict(self):
        """Met, missed or shown; budgets of time hold on builds with a GIL."""
        if self.limit is None or (self.timed and not HAS_GIL):
            return "shown"
        met = self.value >= self.limit if self.at_least else self.value <= self.limit
        return "met" if met else "MISSED"


def medians(ways, names, runs, rounds):
    """Seconds an operation, of each of `ways` (name to Way), after a round for warming up."""
    loops = {name: way.loop(names) for name, way in ways.items()}
    seconds = {name: [] for name in ways}
    for loop in loops.values():
        loop.timeit(runs)
    for _ in range(rounds):
        for name in random.sample(list(ways), len(ways)):
            seconds[name].append(loops[name].timeit(runs))
    return {
        name: statistics.median(seconds[name]) / runs / way.operations for name, way in ways.items()
    }
