"""How things are measured here, for asv and report.py alike.

A `Way` is a statement that is run many times, as `timeit` runs it: in a `for` loop that is part of
the result, with the collector off, on names that are local variables. Ways that are compared take
turns in an order that is shuffled anew for each round, and medians over the rounds are compared: a
machine that is slow for a while is slow for all of them. Time is the processor's for this thread,
the kernel's work for it included: waiting for a processor while others run is not a cost of ours.
"""

import hashlib
import random
import re
import statistics
import sysconfig
import time
import timeit
from dataclasses import dataclass
from typing import ClassVar

CLOCK = time.thread_time
HAS_GIL = not sysconfig.get_config_var("Py_GIL_DISABLED")


@dataclass(frozen=True)
class Way:
    """A statement, what to run before each round of it (unmeasured), and its operations."""

    statement: str
    before: str = "pass"
    operations: int = 1

    def missing(self, names):
        """Of the names that it uses, those that are None: what is not installed."""
        code = f"{self.before}\n{self.statement}"
        return [
            name
            for name, value in names.items()
            if value is None and re.search(rf"\b{name}\b", code)
        ]

    def loop(self, names, clock=CLOCK):
        """An object that runs the statement: `loop.timeit(n)` gives the seconds of n runs."""
        return timeit.Timer(self.statement, self.before, clock, names)


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


class Ways:
    """A benchmark of asv that times a call of each of `ways`. `timed` makes classes of it."""

    CALLS = 10_000
    ROUNDS = 15
    PER_SECOND: ClassVar[dict[str, float]] = {"ns": 1e9, "ms": 1e3}
    param_names = ("way",)
    timeout = 300
    timer = CLOCK
    ways: ClassVar[dict[str, Way]]

    @staticmethod
    def namespace():
        """The names that the statements use; what is not installed is None."""
        raise NotImplementedError

    def setup(self, way):
        """New allocators."""
        names = self.namespace()
        way = self.ways[way]
        for name in way.missing(names):
            raise NotImplementedError(f"{name} is not installed")
        self.loop, self.operations = way.loop(names, self.timer), way.operations

    def call(self, unit):
        """The time of a call: the median of rounds of at least `CALLS` calls."""
        runs = max(1, self.CALLS // self.operations)
        seconds = turns({"": self.loop}, runs, self.ROUNDS)[""]
        return seconds / self.operations * self.PER_SECOND[unit]


def timed(name, pretty_name, ways, namespace, calls=Ways.CALLS, timer=CLOCK, unit="ns"):
    """An asv class of that name: a graph with a line for each of `ways`, in this unit a call.

    A round has at least so many calls. asv's own `time_` would show the time of a round.
    """

    def track_call(self, way):
        """Run them."""
        return self.call(unit)

    track_call.pretty_name, track_call.unit = pretty_name, unit
    return type(
        name,
        (Ways,),
        {
            "__doc__": f"asv: {pretty_name}.",
            "ways": ways,
            "CALLS": max(calls, *(way.operations for way in ways.values())),
            "params": tuple(ways),
            "namespace": staticmethod(namespace),
            "timer": staticmethod(timer),
            "track_call": track_call,
            "version": version(ways),
        },
    )


def version(what):
    """For asv, which keeps results of the same version only: another text, another version."""
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def named(pretty_name, unit=None, **more):
    """Name a benchmark in asv's pages, where the function's name would be shown."""

    def decorate(function):
        function.pretty_name = pretty_name
        if unit is not None:
            function.unit = unit
        for name, value in more.items():
            setattr(function, name, value)
        return function

    return decorate


class Clocked:
    """A loop of a function that says itself how many seconds it took; as timeit.Timer has it."""

    def __init__(self, seconds):
        self.seconds = seconds

    def timeit(self, runs):
        """Seconds of so many runs."""
        return sum(self.seconds() for _ in range(runs))


def samples(loops, runs, rounds):
    """Seconds a run of each of `loops` (name to what has timeit()) in each round.

    `runs` is a number for all, or one for each in a dict. One round before is a warm-up.
    """
    if not isinstance(runs, dict):
        runs = dict.fromkeys(loops, runs)
    seconds = {name: [] for name in loops}
    for name, loop in loops.items():
        loop.timeit(runs[name])
    for _ in range(rounds):
        for name in random.sample(list(loops), len(loops)):
            seconds[name].append(loops[name].timeit(runs[name]) / runs[name])
    return seconds


def turns(loops, runs, rounds):
    """Median seconds a run of each of `loops`, as `samples` has them."""
    found = samples(loops, runs, rounds)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def medians(ways, names, runs, rounds):
    """Seconds an operation, of each of `ways` (name to Way)."""
    found = turns({name: way.loop(names) for name, way in ways.items()}, runs, rounds)
    return {name: found[name] / way.operations for name, way in ways.items()}


def enough(loop, seconds):
    """So many runs take about that long; at least one."""
    runs = 1
    while True:
        took = loop.timeit(runs)
        if took >= seconds / 4:
            return max(1, round(runs * seconds / took))
        runs *= 4
