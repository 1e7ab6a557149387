"""``arenapy compare``: is a program faster with its NumPy arrays in a pool?

What lives here: the command, the rounds, what a failing program leads to. What does not: the ways
(variants.py), one run (worker.py), the rule of the verdict (verdict.py), the
table (table.py).

Every run is a fresh process. The first one of each way is not timed: it warms the caches of files,
and it alone is watched for huge pages, because looking at them stops the program for a moment. Then
in every round each way has its turn, in an order that is shuffled and, in the next round, reversed,
so that a machine that becomes slower or faster favours nobody.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import arenapy
from arenapy.base.text import printable_lines
from arenapy.commands.command_line import Parser, check_outputs, console, signal_name, whole
from arenapy.commands.compare.table import Run, sentences, show
from arenapy.commands.compare.variants import OURS, OURS_ALONE, PLAIN, WAYS
from arenapy.commands.compare.verdict import LEAST_ROUNDS
from arenapy.commands.run import command as run
from arenapy.linux import outputs
from arenapy.linux.libc_malloc import foreign_malloc

__all__ = ["Comparison", "Failed", "main"]

CHILD = Path(__file__).with_name("worker.py")
MAIN = Path(arenapy.__file__).with_name("__main__.py")
ROUNDS, MAX_ROUNDS = 10, 1_000_000
LOOK_EVERY = 0.005  # seconds
LAST_LINES = 20  # of the errors of a program that fails
REPORT = outputs.report("arenapy compare")


class Options(run.Options):
    """The options of the command, before any is given."""

    rounds = ROUNDS
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
    """

    def __init__(self, options: Options, ways: Sequence[str], folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.notes = {way: note for way in ways if (note := WAYS[way].missing())}
        self.ways = [way for way in ways if way not in self.notes]
        self.runs: dict[str, list[Run]] = {way: [] for way in self.ways}
        self.huge: dict[str, int] = {}

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
        """Run each way as often as there are rounds; says which one comes."""
        order = list(self.ways)
        for number in range(self.options.rounds):
            if number % 2:
                order.reverse()
            else:
                random.shuffle(order)
            for way in order:
                yield way
                found = self._run(way)
                self.runs[way].append(
                    Run(
                        found["wall"],
                        found["cpu"],
                        found["faults"],
                        found["peak_bytes"],
                        found.get("prefault_seconds"),
                        found.get("never_used_bytes"),
                    )
                )

    def _command(self, way: str) -> list[str]:
        options = self.options
        program = run.program_words(options)
        python = run.interpreter()
        if way not in (OURS, OURS_ALONE):
            return [*python, *program]
        pool = ["--initial-bytes", str(options.initial_bytes)] if options.initial_bytes else []
        pool += ["--max-bytes", str(options.max_bytes)] if options.max_bytes else []
        pool += ["--huge-pages", options.huge_pages, "--on-full", options.on_full]
        pool += ["--libc", options.libc if way == OURS else "none"]
        pool += ["--lock"] * options.lock
        figures = str(self.folder / "figures.json")
        ours = [str(MAIN), "run", "--quiet", "--json", figures, *pool, *program]
        return [*python, *ours]

    def _run(self, way: str, interval: float | None = None) -> dict[str, Any]:
        """What was measured of one run."""
        spec_file, result, errors, figures = (
            self.folder / name for name in ("spec.json", "result.json", "errors", "figures.json")
        )
        for file in result, errors, figures:
            file.unlink(missing_ok=True)
        shown = self.options.show_output
        spec = {
            "command": self._command(way),
            "environment": WAYS[way].environment(),
            "output": None if shown else os.devnull,
            "errors": None if shown else str(errors),
            "interval": interval,
            "library": WAYS[way].library() or "",
        }
        spec_file.write_text(json.dumps(spec))  # a word of a command may have 128 KiB at most
        command = [sys.executable, "-I", "-S", str(CHILD), str(spec_file), str(result)]
        with subprocess.Popen(command) as worker:
            try:
                if worker.wait():
                    raise subprocess.CalledProcessError(worker.returncode, command)
            except BaseException:
                worker.terminate()  # it ends the program that it measures
                raise
        found: dict[str, Any] = json.loads(result.read_text())
        if found["status"]:
            written = errors.read_text(errors="replace") if errors.exists() else ""
            raise Failed(_failure(way, found["status"], written))
        if figures.exists():  # a program that ends by os._exit leaves none
            found |= json.loads(figures.read_text())
        return found


def _failure(way: str, status: int, errors: str) -> str:
    how = f"status {status}" if status > 0 else f"killed by {signal_name(-status)}"
    lines = errors.splitlines()[-LAST_LINES:]
    return "\n".join([f"the program failed ({way}): {how}", *lines])


def _ways(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    others = [name for name in WAYS if name not in (PLAIN, OURS, OURS_ALONE)]
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
        description="Run a program by turns as it is and under arenapy run, and say whether that "
        "is worth it. Its standard input is empty.",
        epilog="\n".join(["ways:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-n", dest="rounds", type=whole(1, MAX_ROUNDS), metavar="ROUNDS",
        help=f"how often each way is run (default: {ROUNDS}; a verdict needs {LEAST_ROUNDS})",
    )  # fmt: skip
    parser.add_argument(
        "--with", dest="others", type=_ways, metavar="NAME,...",
        help="other mallocs to compare with, too",
    )  # fmt: skip
    parser.add_argument("--show-output", action="store_true", help="do not discard its output")
    parser.add_argument("--json", metavar="FILE", help="write all runs there, too; sizes are bytes")
    run.add_pool_options(parser)
    run.add_program(parser)
    return parser


def _measure(comparison: Comparison) -> None:
    """All runs, with a progress display on standard error if that is a terminal."""
    terminal = console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    disable = not terminal.is_terminal or comparison.options.show_output
    with Progress(*columns, console=terminal, transient=True, disable=disable) as progress:
        task = progress.add_task("", total=len(comparison.ways) * (comparison.options.rounds + 1))
        for step in comparison.warm_up():
            progress.update(task, description=f"warm-up: {step}")
            progress.advance(task)
        for step in comparison.rounds():
            progress.update(task, description=step)
            progress.advance(task)


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
        ours = [OURS, OURS_ALONE] if keeps else [OURS]
        comparison = Comparison(options, [PLAIN, *ours, *options.others], Path(folder))
        try:
            _measure(comparison)
        except Failed as failed:
            print(printable_lines(f"arenapy compare: {failed}"), file=sys.stderr)
            return 1
    show(console(), comparison.runs, comparison.huge, comparison.notes)
    if options.json is not None:
        found = {
            "report": "arenapy compare",
            "runs": {way: [asdict(run) for run in runs] for way, runs in comparison.runs.items()},
            "huge_bytes": comparison.huge,
            "not_compared": comparison.notes,
            "verdict": sentences(comparison.runs),
        }
        outputs.write(options.json, (json.dumps(found, indent=2) + "\n").encode(), REPORT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
