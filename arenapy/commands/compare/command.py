"""``arenapy compare``: is a program faster with its NumPy arrays in a pool?

What lives here: the command, the rounds, what a failing program leads to. What does not: the ways
(variants.py), one run (worker.py), the rule of the verdict (verdict.py), the
table and the sentences (table.py).

Every run is a fresh process. The first one of each way is not timed: it warms the caches of files,
and it alone is watched for huge pages, because looking at them stops the program for a moment. Then
in every round each way has its turn, in an order that is shuffled and, in the next round, reversed,
so that a machine that becomes slower or faster favours nobody. There are rounds until the verdict
is sure, or the time is spent.

A program starts here as it does under ``arenapy run``, without the process of that command: what is
measured is what the two lines in the program would cost. In all ways the start notes when NumPy was
there.
"""

from __future__ import annotations

import argparse
import copy
import json
import marshal
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn

from arenapy.base.text import printable_lines
from arenapy.commands.command_line import (
    Parser,
    check_outputs,
    console,
    seconds,
    signal_name,
    whole,
)
from arenapy.commands.compare.table import (
    Run,
    next_step,
    reasons,
    sentences,
    show,
    verdict_on,
)
from arenapy.commands.compare.variants import OURS, OURS_ALONE, PLAIN, WAYS
from arenapy.commands.compare.verdict import CONFIDENCE, chance_of, next_look
from arenapy.commands.run import command as run
from arenapy.linux import outputs
from arenapy.linux.child_process import child_process
from arenapy.linux.libc_malloc import foreign_malloc

__all__ = ["Comparison", "Failed", "main"]

CHILD = Path(__file__).with_name("worker.py")
SECONDS, MAX_ROUNDS = 50.0, 1_000_000
OF_POOL = ("prefault", "never_used_bytes", "blocks", "served_bytes")
FEWEST = 3  # rounds, however long they take
LOOK_EVERY = 0.005  # seconds
LAST_LINES = 20  # of the errors of a program that fails
REPORT = outputs.report("arenapy compare")


class Options(run.Options):
    """The options of the command, before any is given."""

    rounds: int | None = None
    seconds = SECONDS
    others: Sequence[str] = ()
    show_output = False


class Failed(Exception):
    """A run did not end with status 0; the text says which, and what it wrote."""


class Comparison:
    """Runs of one program in some ways.

    Parameters
    ----------
    options : Options
    ways : sequence of str
        Keys of `WAYS`, `PLAIN` first.
    folder : Path
        For what the runs write.

    Attributes
    ----------
    runs : dict
        By way, a `Run` for every round so far.
    huge : dict
        By way, the most bytes in huge pages that were seen in the warm-up.
    notes : dict
        By way, why it is not compared.
    chance : float
        To be wrong, of the last verdict.
    """

    def __init__(self, options: Options, ways: Sequence[str], folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.notes = {way: note for way in ways if (note := WAYS[way].missing())}
        self.ways = [way for way in ways if way not in self.notes]
        self.runs: dict[str, list[Run]] = {way: [] for way in self.ways}
        self.huge: dict[str, int] = {}
        self.chance = 1 - CONFIDENCE
        self.began = time.monotonic()

    def warm_up(self) -> Iterator[str]:
        """Run each way once; says which one comes. A malloc that is not used is dropped."""
        for way in list(self.ways):
            yield way
            found = self._run(way, LOOK_EVERY)
            self.huge[way] = found["huge_bytes"]
            if not found["loaded"]:
                self.notes[way] = f"{WAYS[way].library()} was preloaded and is not in the process"
                self.ways.remove(way)
                del self.runs[way], self.huge[way]

    def rounds(self) -> Iterator[str]:
        """Run each way until the verdict is sure; says which one comes."""
        order, number = list(self.ways), 0
        while self._goes_on(number):
            if number % 2:
                order.reverse()
            else:
                random.shuffle(order)
            for way in order:
                yield way
                found = self._run(way)
                self.runs[way].append(_as_run(found))
            number += 1

    def _goes_on(self, rounds: int) -> bool:
        """True if there is another round. Notes how sure the verdict is."""
        if self.options.rounds is not None:
            return rounds < self.options.rounds
        spent = time.monotonic() - self.began
        ends = rounds >= FEWEST and spent * (rounds + 2) / (rounds + 1) > self.options.seconds
        look = at = 0
        while at < rounds:
            look, at = look + 1, next_look(at)
        if rounds and (at == rounds or ends):
            self.chance = chance_of(look, last=ends)
            ends = ends or verdict_on(self.runs, chance=self.chance, last=False).final
        return not ends and rounds < MAX_ROUNDS

    def _run(self, way: str, interval: float | None = None) -> dict[str, Any]:
        """Run the program once, and return the figures."""
        spec_file, errors, marks = (self.folder / name for name in ("spec.json", "errors", "marks"))
        for file in errors, marks:
            file.unlink(missing_ok=True)
        shown = self.options.show_output
        options = copy.copy(self.options)
        options.libc = "none" if way == OURS_ALONE else options.libc
        command, environment, settings = run.start_of(
            options, WAYS[way].environment(), pool=way in (OURS, OURS_ALONE)
        )
        spec = {
            "command": command,
            "environment": environment,
            "settings": {**settings, "measured": str(marks)},
            "output": None if shown else os.devnull,
            "errors": None if shown else str(errors),
            "interval": interval,
            "library": WAYS[way].library() or "",
        }
        spec_file.write_text(json.dumps(spec))  # a word of a command may have 128 KiB at most
        line = [sys.executable, "-I", "-S", str(CHILD), str(spec_file), "/dev/stdin"]
        with open(os.memfd_create("result"), "w+b") as result:  # the folder may be full
            # By SIGTERM it ends the program that it measures. It also gets that if we are killed;
            # a signal that kills our process group must not kill it, too. In a session of its own,
            # no terminal stops the program when that asks it.
            with child_process(
                line, subprocess.Popen.terminate, stdin=result, start_new_session=True
            ) as worker:
                if worker.wait():
                    how = _how(worker.returncode)
                    raise OSError(f"the process that measures the program ended: {how}")
            found: dict[str, Any] = json.load(result)
        if "error" in found:
            raise OSError(found["error"])
        if found["status"]:
            written = errors.read_text(errors="replace") if errors.exists() else ""
            raise Failed(_failure(way, found["status"], written))
        # None of a program without NumPy, or if the folder is full; and not the last one of a
        # program that ends by os._exit.
        try:
            found["marks"] = marshal.loads(marks.read_bytes())
        except (FileNotFoundError, EOFError, ValueError, TypeError):
            found["marks"] = []
        return found


def _as_run(found: dict[str, Any]) -> Run:
    """The figures of a run, as the table wants them."""
    ready = next((mark for mark in found["marks"] if mark["when"] == "ready"), None)
    taken = {field.name: found[field.name] for field in fields(Run) if field.name in found}
    if ready is not None:
        last = found["marks"][-1]
        taken |= {name: last[name] for name in OF_POOL if name in last}
        taken["startup"] = max(ready["now"] - found["start"] - ready["waited"], 1e-6)
        taken["startup_kernel"] = ready["kernel"]
    return Run(**taken)


def _how(status: int) -> str:
    return f"status {status}" if status > 0 else f"killed by {signal_name(-status)}"


def _failure(way: str, status: int, errors: str) -> str:
    lines = errors.splitlines()[-LAST_LINES:]
    return "\n".join([f"the program failed ({way}): {_how(status)}", *lines])


def _ways(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    others = [name for name in WAYS if name not in (PLAIN, OURS)]
    for name in names:
        if name not in others:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(others)}")
    return list(dict.fromkeys(names))


def _can_be_read_again(program: str) -> bool:
    path = Path(program)
    return program != "-" and (path.is_file() or path.is_dir() or not path.exists())


def _parser() -> Parser:
    width = max(map(len, WAYS))
    lines = [f"  {name:<{width}}  {way.about}" for name, way in WAYS.items()]
    parser = Parser(
        prog="arenapy compare",
        usage="%(prog)s [options] SCRIPT|-m MODULE [arguments]",
        description="Run a program several times, with and without arenapy run. Say whether it is\n"
        "faster with arenapy, why, and what to do next. Its standard input is empty.",
        epilog="\n".join(["ways:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--seconds", type=seconds, metavar="SECONDS",
        help=f"stop after this time if the verdict is not sure earlier (default: {SECONDS:.0f})",
    )  # fmt: skip
    parser.add_argument(
        "-n", dest="rounds", type=whole(1, MAX_ROUNDS), metavar="ROUNDS",
        help="run each way exactly this many times",
    )  # fmt: skip
    parser.add_argument(
        "--with", dest="others", type=_ways, metavar="NAME,...",
        help="also compare with these ways",
    )  # fmt: skip
    parser.add_argument("--show-output", action="store_true", help="show the output of the program")
    parser.add_argument("--json", metavar="FILE", help="also write all runs to this file, in bytes")
    run.add_pool_options(parser)
    run.add_program(parser)
    return parser


def _measure(comparison: Comparison) -> None:
    """All runs, with a progress display on standard error if that is a terminal."""
    terminal = console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn()
    disable = not terminal.is_terminal or comparison.options.show_output
    limit = comparison.options.rounds
    with Progress(*columns, console=terminal, transient=True, disable=disable) as progress:
        task = progress.add_task("", total=limit or comparison.options.seconds)
        for step in comparison.warm_up():
            progress.update(task, description=f"warm-up: {step}")
        for step in comparison.rounds():
            rounds = len(comparison.runs[PLAIN])
            spent = rounds if limit else time.monotonic() - comparison.began
            progress.update(task, description=f"round {rounds + 1}: {step}", completed=spent)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``arenapy compare``; the exit status: 1 if the program fails.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments after ``compare``. None: those of this process.

    Raises
    ------
    OSError
        The file of ``--json`` cannot be written.
    """
    parser, options = _parser(), Options()
    run.parse_program(parser, argv, options)
    program = None if options.module else options.program
    check_outputs(parser, {"--json": (options.json, REPORT)}, {"SCRIPT": program})
    if not options.module and not _can_be_read_again(options.program):
        parser.error(f"{options.program!r} can be read only once; name a file or a folder")
    with tempfile.TemporaryDirectory(prefix="arenapy-compare-") as folder:
        keeps = options.libc == "keep" and foreign_malloc() is None
        others = [way for way in options.others if way != OURS_ALONE or keeps]
        comparison = Comparison(options, [PLAIN, OURS, *others], Path(folder))
        try:
            _measure(comparison)
        except Failed as failed:
            print(printable_lines(f"arenapy compare: {failed}"), file=sys.stderr)
            return 1
    spent = time.monotonic() - comparison.began
    runs, said = comparison.runs, verdict_on(comparison.runs, chance=comparison.chance)
    lines = [
        *sentences(runs, comparison.chance),
        *reasons(runs),
        next_step(
            runs,
            said,
            shlex.join(run.program_words(options)),
            max(options.seconds, spent),  # a few rounds are made, however long they take
            run.pool_words(options),
            options.others,
        ),
    ]
    if options.json is not None:
        found = {
            "report": "arenapy compare",
            "word": said.word,
            "runs": {way: [asdict(one) for one in found] for way, found in runs.items()},
            "huge_bytes": comparison.huge,
            "not_compared": comparison.notes,
            "verdict": lines,
        }
        outputs.write(options.json, (json.dumps(found, indent=2) + "\n").encode(), REPORT)
    show(console(), runs, comparison.huge, comparison.notes, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
