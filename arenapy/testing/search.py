"""A search for every kind of fault: it goes on after the first, and makes the programs small.

What lives here: rounds of Hypothesis over a class of machines, and shrinking within a limit of
time. Hypothesis never sees a failure, so it neither repeats nor shrinks one: an allocator whose
memory begins elsewhere each time would fail otherwise then.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import Phase, seed, settings
from hypothesis.errors import Flaky, Unsatisfiable
from hypothesis.stateful import run_state_machine_as_test

from arenapy.linux import outputs
from arenapy.testing.crashes import smaller
from arenapy.testing.faults import Finding, kind_of, varies, worst_first
from arenapy.testing.steps import VERSION, Program
from arenapy.testing.tally import NewKind, Tally

__all__ = ["SHRINK_SECONDS", "report", "search"]

SHRINK_SECONDS = 30.0
AFTER_FIRST = 200  # more examples after the first finding; a profile may have a million
SEED = "_hypothesis_internal_use_seed"  # where `seed` puts it


class _Enough(BaseException):
    """All examples have run."""


def search(
    machine: type[Any],
    options: settings,
    *,
    seconds: float | None = None,
    start: int | None = None,
    shrink: float = SHRINK_SECONDS,
    watch: Callable[[Tally], None] | None = None,
) -> Tally:
    """Run examples until enough have run, and keep a small program for each kind of fault.

    Without `seconds` it ends sooner after a first finding, at twice as many examples as that took
    and 200 more.

    Parameters
    ----------
    machine : class
        A subclass of `AllocatorMachine`.
    options : hypothesis.settings
    seconds : float, optional
        Run for about this time, and not for ``options.max_examples``.
    start : int, optional
        The seed. None: as `options` and Hypothesis choose.
    shrink : float
        The most seconds in which programs are made smaller, all together.
    watch : callable, optional
        Called with the tally before each example.

    Returns
    -------
    Tally
    """
    tally = machine.tally = Tally()  # a class may be searched again, after it was mended
    end = None if seconds is None else time.monotonic() + seconds
    most = options.max_examples

    def over() -> bool:
        nonlocal most
        if end is not None:
            return time.monotonic() >= end
        if tally.findings and most == options.max_examples:
            most = min(most, 2 * tally.examples + AFTER_FIRST)
        return tally.examples >= most

    def look() -> None:
        if watch is not None:
            watch(tally)
        if over():
            raise _Enough

    tally.watch = look
    phases = [phase for phase in options.phases if phase in (Phase.generate, Phase.target)]
    before = vars(machine).get(SEED)
    try:
        while not over():
            if start is not None:
                seed(start)(machine)
            start = (start or 0) + 1
            count = options.max_examples if end is None else 100
            rounds = settings(options, max_examples=count, phases=phases)
            try:
                run_state_machine_as_test(machine, settings=rounds)
            except (NewKind, _Enough):
                continue
            except Flaky:
                tally.restarts += 1
                continue
            except Unsatisfiable:
                if not tally.findings:
                    raise
                break  # every example ends by a fault that is known
            if end is None:
                break
    finally:
        tally.watch = None
        if before is not None:
            setattr(machine, SEED, before)
        elif SEED in vars(machine):
            delattr(machine, SEED)
    _make_small(machine, tally, shrink)
    if watch is not None:
        watch(tally)
    return tally


def _make_small(machine: type[Any], tally: Tally, seconds: float) -> None:
    """The programs of all findings, the worst first; each gets an equal part of what is left."""
    end = time.monotonic() + seconds
    findings = worst_first(tally.findings.values())
    try:
        for index, finding in enumerate(findings):
            until = time.monotonic() + (end - time.monotonic()) / (len(findings) - index)
            machine.tally = Tally(only=finding.kind)  # not to be counted
            _shrink(machine, finding, until)
    finally:
        machine.tally = tally


def _shrink(machine: type[Any], finding: Finding, until: float) -> None:
    """Leave out steps, then make the arguments of the rest smaller."""

    def fails(lines: list[str]) -> bool:
        try:
            Program.parse(lines[1:]).run(machine)
        except Exception as error:
            if kind_of(error) == finding.kind:
                finding.program, finding.message = lines[1:], str(error)
                return True
        return False

    if not fails(["", *finding.program]):
        finding.message += " (the same steps did not show it again)"
        return
    before: list[str] = []
    while finding.program != before and time.monotonic() < until:
        before = finding.program
        smaller(["", *before], until - time.monotonic(), fails)
        for index in range(len(finding.program)):
            _shrink_step(finding, index, machine.smallest, until, fails)


def _shrink_step(
    finding: Finding, index: int, least: int, until: float, fails: Callable[[list[str]], bool]
) -> None:
    """Replace a step by simpler ones as long as one of them still fails."""
    found = True
    while found and time.monotonic() < until:
        found = False
        for arguments in _simpler(json.loads(finding.program[index])["arguments"], least):
            step = {**json.loads(finding.program[index]), "arguments": arguments}
            lines = ["", *finding.program]
            lines[index + 1] = json.dumps(step)
            if fails(lines):
                found = True
                break
            if time.monotonic() >= until:
                return


def _simpler(arguments: dict[str, Any], least: int) -> Iterator[dict[str, Any]]:
    """Arguments with one value simpler. Others than those of these names have limits of their own,
    which a simpler value may break.
    """
    for name, value in arguments.items():
        if name == "nbytes":
            yield from ({**arguments, name: one} for one in _sizes(value, least))
        elif name == "align":
            yield from ({**arguments, name: one} for one in _aligns(value))
        elif name == "which" and value:
            yield {**arguments, name: 0}
        elif name == "requests":
            for at, (nbytes, align) in enumerate(value):
                yield {**arguments, name: value[:at] + value[at + 1 :]}
                others = [[one, align] for one in _sizes(nbytes, least)]
                others += [[nbytes, one] for one in _aligns(align)]
                for one in others:
                    yield {**arguments, name: [*value[:at], one, *value[at + 1 :]]}


def _sizes(nbytes: int, least: int) -> list[int]:
    return [one for one in (least, 1, nbytes // 2, nbytes - 1) if least <= one < nbytes]


def _aligns(align: int | None) -> list[int | None]:
    return [] if align is None else [None, *(one for one in (1, align // 2) if 1 <= one < align)]


def report(tally: Tally, machine: type[Any]) -> str:
    """What a failing test says: all findings, the worst first, and a file to repeat the worst."""
    parts = []
    for finding in worst_first(tally.findings.values()):
        parts.append(f"{finding}\n{Program.parse(finding.program)}")
        if len(parts) == 1:
            others = [kind for kind in tally.findings if kind != finding.kind]
            header = {"arenapy.testing": VERSION, **machine.recipe(), "allow": others}
            lines = [json.dumps(header), *finding.program]
            path = os.path.join(tempfile.gettempdir(), f"arenapy-found-{machine.__name__}.jsonl")
            outputs.write(path, ("\n".join(lines) + "\n").encode(), outputs.STEPS)
            parts.append(f"again: python -m arenapy.testing reproduce {path}")
    return "\n\n".join(filter(None, [*parts, varies(tally.restarts, tally.examples)]))
