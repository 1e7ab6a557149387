"""A search for every kind of fault: it goes on after the first, and makes the programs small.

What lives here: rounds of Hypothesis over a class of machines, and shrinking within a limit of
time. Hypothesis never sees a failure, so it neither repeats nor shrinks one: an allocator whose
memory begins elsewhere each time would fail otherwise then.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import tempfile
import time
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from hypothesis import Phase, seed, settings
from hypothesis.errors import Flaky, Unsatisfiable
from hypothesis.stateful import run_state_machine_as_test

from arenapy.linux import outputs
from arenapy.linux.child_process import signals_later
from arenapy.testing.crashes import smaller
from arenapy.testing.faults import (
    ENDS_THE_PROCESS,
    Finding,
    kind_of,
    text_of,
    varies,
    worst_first,
)
from arenapy.testing.operations import operations
from arenapy.testing.steps import VERSION, Program
from arenapy.testing.tally import NewKind, Tally

__all__ = ["SHRINK_SECONDS", "report", "search", "shrink"]

SHRINK_SECONDS = 30.0
FAILED = b"failed: "  # what a child writes before a message, which may be empty
TRY_SECONDS = 5.0  # in a child, after which a program hangs
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
    shrink_seconds: float = SHRINK_SECONDS,
    watch: Callable[[Tally], None] | None = None,
    before: Tally | None = None,
    apart: bool = False,
    clock: Callable[[], float] = time.monotonic,
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
    shrink_seconds : float
        The most seconds in which programs are made smaller, all together.
    watch : callable, optional
        Called with the tally before each example, before programs are made smaller, and after each
        of these.
    before : Tally, optional
        The tally of a search that this one continues.
    apart : bool
        Run each smaller program in a forked child, which may crash or hang.
    clock : callable
        Returns the time in seconds.

    Returns
    -------
    Tally
    """
    # A new one: a class may be searched again, after it was mended.
    tally = machine.tally = Tally() if before is None else before
    end = None if seconds is None else clock() + seconds

    def over() -> bool:
        if end is not None:
            return clock() >= end
        most = options.max_examples
        if tally.found_at is not None:
            most = min(most, 2 * tally.found_at + AFTER_FIRST)
        return tally.examples >= most

    def look() -> None:
        if watch is not None:
            watch(tally)
        if over():
            raise _Enough

    tally.watch = look
    phases = [phase for phase in options.phases if phase in (Phase.generate, Phase.target)]
    own_seed = vars(machine).get(SEED)
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
        if own_seed is not None:
            setattr(machine, SEED, own_seed)
        elif SEED in vars(machine):
            delattr(machine, SEED)
    if watch is not None:
        watch(tally)
    for _ in _make_small(machine, tally, shrink_seconds, clock, apart):
        if watch is not None:
            watch(tally)
    return tally


def _make_small(
    machine: type[Any], tally: Tally, seconds: float, clock: Callable[[], float], apart: bool
) -> Iterator[None]:
    """The programs of all findings, the worst first; each gets an equal part of what is left.

    Those that end the process are made smaller by who started it.
    """
    end = clock() + seconds
    findings = [one for one in tally.findings.values() if one.kind not in ENDS_THE_PROCESS]
    for index, finding in enumerate(worst_first(findings)):
        now = clock()
        until = now + (end - now) / (len(findings) - index)
        machine.tally = Tally(only=finding.kind)  # not to be counted
        try:
            _shrink(machine, finding, until, clock, apart)
        finally:
            machine.tally = tally
        yield


def _shrink(
    machine: type[Any], finding: Finding, until: float, clock: Callable[[], float], apart: bool
) -> None:
    """Replace the program of a finding by a small one."""

    def fails_here(program: list[str]) -> bool:
        try:
            Program.parse(program).run(machine)
        except Exception as error:
            if kind_of(error) == finding.kind:
                finding.message = text_of(error)
                return True
        return False

    def fails_in_child(program: list[str]) -> bool:
        receiving = sending = child = -1
        try:
            with signals_later():  # for good in the child, which never leaves this block
                receiving, sending = os.pipe()
                child = os.fork()
                if not child:
                    try:
                        # Not the stacks of its crashes.
                        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                        # Nobody reads its steps, and one that crashes removes no file.
                        os.environ["ARENAPY_STEPS"] = f"/proc/self/fd/{os.memfd_create('steps')}"
                        if fails_here(program):
                            os.write(sending, FAILED + finding.message.encode(errors="replace"))
                    finally:
                        os._exit(0)
            os.close(sending)
            sending = -1
            ready, _, _ = select.select([receiving], [], [], TRY_SECONDS)
            said = os.read(receiving, select.PIPE_BUF) if ready else b""
        finally:
            if child > 0:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            for descriptor in receiving, sending:
                if descriptor >= 0:
                    os.close(descriptor)
        if "ARENAPY_STEPS" in os.environ:  # whose changes say that this process is alive
            Path(os.environ["ARENAPY_STEPS"]).touch()
        if said:
            finding.message = said.removeprefix(FAILED).decode(errors="replace")
        return bool(said)

    fails = fails_in_child if apart else fails_here
    if fails(finding.program):
        fixed = {
            name
            for name in operations(machine)
            if not getattr(machine, name).__module__.startswith("arenapy.testing.")
        }
        finding.program = shrink(finding.program, fails, until, machine.smallest, clock, fixed)
    else:
        finding.message += " (the same steps did not show it again)"


def shrink(
    program: list[str],
    fails: Callable[[list[str]], bool],
    until: float,
    least: int = 0,
    clock: Callable[[], float] = time.monotonic,
    fixed: Collection[str] = (),
) -> list[str]:
    """Leave out steps, then make the arguments of the rest smaller, as long as it fails.

    Parameters
    ----------
    program : list of str
        Steps, as lines of a file of steps.
    fails : callable
        Whether another program fails, too.
    until : float
        The time of `clock` after which no further try begins.
    least : int
        The smallest size to request.
    clock : callable
        Returns the time in seconds.
    fixed : collection of str
        Names of steps whose arguments stay: only its author knows which others a step may have.

    Returns
    -------
    list of str
    """
    before: list[str] = []
    while program != before and clock() < until:
        before = program
        left = until - clock()
        program = smaller(["", *program], left, lambda lines: fails(lines[1:]), clock)[1:]
        for index in range(len(program)):
            if json.loads(program[index])["step"] in fixed:
                continue
            while step := _simpler_step(program, index, least, fails, until, clock):
                program = [*program[:index], step, *program[index + 1 :]]
    return program


def _simpler_step(
    program: list[str],
    index: int,
    least: int,
    fails: Callable[[list[str]], bool],
    until: float,
    clock: Callable[[], float],
) -> str | None:
    """A simpler step with which the program still fails."""
    step = json.loads(program[index])
    for arguments in _simpler(step["arguments"], least):
        if clock() >= until:
            return None
        line = json.dumps({**step, "arguments": arguments})
        if fails([*program[:index], line, *program[index + 1 :]]):
            return line
    return None


def _simpler(arguments: dict[str, Any], least: int) -> Iterator[dict[str, Any]]:
    """Arguments with one value simpler: of the machine's own names, as others have limits that a
    simpler value may break.
    """
    for name, value in arguments.items():
        if name == "align":
            yield from ({**arguments, name: one} for one in _aligns(value))
        elif name == "which" and value:
            yield {**arguments, name: 0}
        elif name == "nbytes":
            yield from ({**arguments, name: one} for one in _sizes(value, least))
        elif name == "requests":
            others = [value[:at] + value[at + 1 :] for at in range(len(value))]
            for change in _aligns_of, _sizes_of:
                for at, request in enumerate(value):
                    others += [
                        [*value[:at], one, *value[at + 1 :]] for one in change(request, least)
                    ]
            yield from ({**arguments, name: one} for one in others)


def _aligns_of(request: list[Any], least: int) -> list[list[Any]]:
    return [[request[0], one] for one in _aligns(request[1])]


def _sizes_of(request: list[Any], least: int) -> list[list[Any]]:
    return [[one, request[1]] for one in _sizes(request[0], least)]


def _sizes(nbytes: int, least: int) -> list[int]:
    """Smaller sizes: the least ones, and others ever nearer, so that a few tries find a limit."""
    nearer = [nbytes - (nbytes >> bit) for bit in range(1, max(nbytes, 0).bit_length() + 1)]
    return [one for one in dict.fromkeys([least, 1, *nearer, nbytes - 1]) if least <= one < nbytes]


def _aligns(align: int | None) -> list[int | None]:
    return [] if align is None else [None, *(one for one in (1, align // 2) if 1 <= one < align)]


def report(tally: Tally, machine: type[Any]) -> str:
    """The message of a failing test: all findings, worst first, and a file to repeat the worst."""
    parts = []
    for finding in worst_first(tally.findings.values()):
        parts.append(f"{finding}\n{Program.parse(finding.program)}")
        if len(parts) == 1:
            others = [kind for kind in tally.findings if kind != finding.kind]
            header = {"arenapy.testing": VERSION, **machine.recipe(), "allow": others}
            lines = [json.dumps(header), *finding.program]
            # Another class of this name, and another user, have another file.
            whose = zlib.crc32(json.dumps([machine.recipe(), os.getuid()]).encode())
            name = f"arenapy-found-{machine.__name__}-{whose:08x}.jsonl"
            path = os.path.join(tempfile.gettempdir(), name)
            try:
                outputs.write(path, ("\n".join(lines) + "\n").encode(), outputs.STEPS)
                parts.append(f"again: python -m arenapy.testing reproduce {shlex.quote(path)}")
            except OSError as error:
                parts.append(f"no file to reproduce it: {error}")
    return "\n\n".join(filter(None, [*parts, varies(tally.restarts, tally.examples)]))
