"""Ten programs (workloads.py) under arenapy's handler, the default and tuned mallocs.

Each rival's process lives from the start of the interpreter to its end, and they take turns, some
steps at a time. The seconds of the whole program are those that its process was given: imports,
data, prefaulting and end included, as a user waits for it. The steady state is the steps alone, in
seconds of the processor; of their page faults, by turns, the median counts. Peak memory is all that
was ever resident, prefaulted and unused included.

What this does not show: programs that wait for disks, for BLAS on many cores, or for each other.
"""

import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

from asv_benches.numpy_programs.rivals import DEFAULT, OURS, Program, Ratios, here
from asv_benches.numpy_programs.workloads import WORKLOADS
from asv_benches.support.rounds import Line, named, samples

TURN = 0.2  # seconds of steps
QUICK_SCALE = 0.1
SLACK = 16 << 20  # bytes: what our peak may be above the default's, or
SHARE = 1.2  # so many times that
LEAST = 0.97  # of the default's speed
PREPARE = (
    "from asv_benches.numpy_programs.workloads import WORKLOADS; steps = Steps(WORKLOADS[{!r}]({}))"
)


@dataclass
class Figures:
    """Of one rival: whole programs, seconds a step, page faults a step, bytes at the peak."""

    program: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    faults: list[float] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)
    checksum: float = 0.0


class Turn:
    """Steps of a program; timeit() as timeit.Timer has it."""

    def __init__(self, program):
        self.program = program
        self.faults = []  # page faults a step, of each turn

    def timeit(self, runs):
        """Seconds of so many steps."""
        before = self.program.value("faults()")
        seconds = self.program.value(f"steps({runs})")
        self.faults.append((self.program.value("faults()") - before) / runs)
        return seconds


def workload(name, rivals, generations, rounds, scale):
    """{rival: Figures} of one workload."""
    found = {rival: Figures() for rival in rivals}
    for _ in range(generations):
        with ExitStack() as stack:
            programs = {rival: stack.enter_context(Program(rival)) for rival in rivals}
            for program in programs.values():
                program.run(PREPARE.format(name, scale))
            # As many steps for each, or the whole programs would not be the same.
            start = time.perf_counter()
            programs[DEFAULT].run("steps.step()")
            runs = max(1, round(TURN / (time.perf_counter() - start)))
            for rival in rivals:
                if rival != DEFAULT:
                    programs[rival].run("steps.step()")
            for program in programs.values():
                program.run(f"steps({runs})")
            turns = {rival: Turn(program) for rival, program in programs.items()}
            for rival, seconds in samples(turns, runs, rounds).items():
                found[rival].step += seconds
            for rival, program in programs.items():
                found[rival].faults.append(statistics.median(turns[rival].faults))
                found[rival].peak.append(program.value("peak()"))
                found[rival].checksum = program.value("steps.checksum")
                program.close()
                found[rival].program.append(program.seconds)
    wanted = found[DEFAULT].checksum
    for rival, one in found.items():
        if not abs(one.checksum - wanted) <= 1e-6 * abs(wanted):
            raise AssertionError(f"{name}: {one.checksum} with {rival}, {wanted} by default")
    return found


def workloads(quick=False):
    """{name: {rival: Figures}}."""
    how = (1, 3, QUICK_SCALE) if quick else (3, 7, 1.0)
    return {name: workload(name, here(), *how) for name in WORKLOADS}


def ratios(figures):
    """(of the steps, of the whole programs)."""
    return (
        Ratios.of({rival: one.step for rival, one in figures.items()}),
        Ratios.of({rival: one.program for rival, one in figures.items()}),
    )


def peaks(figures):
    """{rival: median bytes at the peak}."""
    return {rival: statistics.median(one.peak) for rival, one in figures.items()}


def workload_lines(found):
    """The report's lines about the workloads."""
    for name, figures in found.items():
        step, program = ratios(figures)
        for what, ratio in (("step", step), ("program", program)):
            line = f"{name}, {what}"
            default = f"{line}: default / arenapy"
            yield Line("workloads", default, ratio.default, "x", LEAST, at_least=True)
            yield Line("workloads", f"{line}: best ({ratio.who}) / arenapy", ratio.best)
        peak = peaks(figures)
        limit = max(SHARE, 1 + SLACK / peak[DEFAULT])
        share = peak[OURS] / peak[DEFAULT]
        what = f"{name}: peak memory, arenapy / default"
        yield Line("workloads", what, share, "x", limit, timed=False)
        for rival in (DEFAULT, OURS):
            faults = statistics.median(figures[rival].faults)
            yield Line("workloads", f"{name}: faults a step, {rival}", faults, "faults")


def lines(quick):
    """The report's lines."""
    yield from workload_lines(workloads(quick))


class Workloads:
    """asv: the ten programs, the median of rounds in one process."""

    params = (tuple(WORKLOADS), tuple(here()))
    param_names = ("workload", "memory")
    timeout = 600

    @named("Time per step of a program", "ms")
    def track_step(self, workload, memory):
        """Steady state; NaN if a library that it needs is not here."""
        with Program(memory) as program:
            program.run(PREPARE.format(workload, 1.0))
            return statistics.median(samples({"": Turn(program)}, 1, 9)[""]) * 1e3
