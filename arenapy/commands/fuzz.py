"""``arenapy fuzz``: attack an allocator, or the malloc of a C library, without writing a class.

What lives here: the command and its report. The attack runs in another process, which may crash;
its steps are in a file by then. Hypothesis is needed there and for nothing else, so this module is
imported without it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from arenapy.base.text import printable, printable_lines
from arenapy.commands.command_line import (
    MOST,
    Parser,
    check_outputs,
    console,
    seconds,
    signal_name,
    whole,
)
from arenapy.commands.replay.command import LATE
from arenapy.linux import outputs

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["main"]

EXIT_FOUND = 1
EXIT_USAGE = 2
HANGS_AFTER = 60.0  # seconds: a step that lasts longer is a failure
TRIES_SECONDS = 60.0  # to make a crash smaller
MAX_STEPS = 1_000_000_000


def _parser() -> Parser:
    parser = Parser(
        prog="arenapy fuzz",
        description="Attack an allocator with random programs: that blocks do not overlap, are "
        "aligned, keep their contents, that a refusal changes nothing. The status is 1 if "
        "something was found, and the smallest program that shows it is printed.",
        epilog="make_allocator() returns an object with alloc, allocate or malloc, called with "
        "(nbytes[, align]). A block is an int, has .address or a buffer, and goes back by "
        "free(block), by its own release() or by being dropped. mark(), reset([mark]), remaining "
        "and check() are used if they are there.",
    )
    parser.add_argument(
        "target", nargs="?", metavar="PACKAGE:MAKE_ALLOCATOR", help="a callable without arguments"
    )
    parser.add_argument("--library", metavar="SO", help="malloc, aligned_alloc and free of this")
    count = whole(1, MAX_STEPS)
    parser.add_argument("--examples", type=count, default=100, help="programs (100)")
    parser.add_argument("--steps", type=count, default=50, help="of a program, at most (50)")
    parser.add_argument("--seconds", type=seconds, help="go on for so long instead of --examples")
    parser.add_argument("--threads", type=whole(1, 2), default=1, metavar="1|2")
    parser.add_argument("--seed", type=whole(-MOST), help="the same programs again")
    parser.add_argument("--save", metavar="FILE", help="write the program that fails to a file")
    return parser


def _attack(job: dict[str, Any], folder: Path) -> tuple[int | None, dict[str, Any], list[str], str]:
    """(exit status, what was found, the file of steps, standard error) of the other process.

    The status is None if a step did not end: the process was killed.
    """
    report, written = folder / "report.json", folder / "steps.jsonl"
    tunables = ":".join(filter(None, [os.environ.get("GLIBC_TUNABLES"), LATE]))
    # Not a pipe, which has no end while a process that the attacked code started has it, too.
    errors = folder / "errors"
    with errors.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "arenapy.testing.attack", json.dumps(job), str(report)],
            env={**os.environ, "ARENAPY_STEPS": str(written), "GLIBC_TUNABLES": tunables},
            stderr=file,
        )
    hangs = False
    seen, since = -1, time.monotonic()
    try:
        while process.returncode is None:
            try:
                process.wait(timeout=1)
            except subprocess.TimeoutExpired:
                # Each step is written before it runs.
                now = written.stat().st_mtime_ns if written.exists() else -1
                if now != seen:
                    seen, since = now, time.monotonic()
                elif time.monotonic() - since > HANGS_AFTER:
                    hangs = True
                    process.kill()
    finally:
        process.kill()
        process.wait()
    found = json.loads(report.read_text()) if report.exists() else {}
    lines = written.read_text().splitlines() if written.exists() else []
    said = errors.read_text(errors="replace").strip()
    return None if hangs else process.returncode, found, lines, said


def _tables(found: dict[str, Any]) -> Table:
    shown = Table()
    for name in "step", "times", "rare state", "times":
        shown.add_column(name, justify="right" if name == "times" else "left")
    columns = [sorted(found[key].items(), key=lambda one: -one[1]) for key in ("rules", "states")]
    for row in range(max(map(len, columns))):
        cells = [rows[row] if row < len(rows) else ("", "") for rows in columns]
        shown.add_row(*(Text(printable(str(cell))) for pair in cells for cell in pair))
    return shown


def _show_program(terminal: Console, lines: Sequence[str], save: str | None) -> None:
    from arenapy.testing.steps import Program

    if not lines:
        terminal.print("before the first step")
        return
    program = Program.parse(lines[1:])
    terminal.print(printable_lines(str(program)), soft_wrap=True)
    if save is not None:
        outputs.write(save, ("\n".join(lines) + "\n").encode(), outputs.STEPS)
        again = f"again: python -m arenapy.testing reproduce {save}"
        terminal.print(printable(again), soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``arenapy fuzz``; the exit status.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments after ``fuzz``. None: those of this process.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    if (options.target is None) == (options.library is None):
        parser.error("name PACKAGE:MAKE_ALLOCATOR, or --library SO")
    if importlib.util.find_spec("hypothesis") is None:
        print("arenapy fuzz needs Hypothesis: pip install hypothesis", file=sys.stderr)
        return EXIT_FOUND
    check_outputs(parser, {"--save": (options.save, outputs.STEPS)})
    start = secrets.randbits(32) if options.seed is None else options.seed
    job = {
        "machine": {name: getattr(options, name) for name in ("target", "library", "threads")},
        "attack": {name: getattr(options, name) for name in ("examples", "steps", "seconds")},
    }
    job["attack"]["start"] = start
    terminal = console()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="arenapy-fuzz-") as folder:
        status, found, lines, errors = _attack(job, Path(folder))
    if status == EXIT_USAGE:
        parser.error(errors)
    if status is None:
        terminal.print(f"found: a step did not end within {HANGS_AFTER:.0f} s; --seed {start}")
        _show_program(terminal, lines, options.save)
        return EXIT_FOUND
    if status < 0:
        return _report_crash(terminal, -status, lines, options.save, start)
    if status or not found:
        print(printable_lines(errors) or f"the attack ended with status {status}", file=sys.stderr)
        return EXIT_FOUND
    if errors:
        print(printable_lines(errors), file=sys.stderr)
    terminal.print(_tables(found))
    terminal.print(
        f"{found['examples']} programs, {sum(found['rules'].values())} steps in "
        f"{time.monotonic() - began:.1f} s; --seed {start}"
    )
    if found["failing"] is None:
        terminal.print("nothing found")
        return 0
    terminal.print(printable(f"found: {found['error']}"), soft_wrap=True)
    _show_program(terminal, [lines[0], *found["failing"]], options.save)
    return EXIT_FOUND


def _report_crash(
    terminal: Console, number: int, lines: list[str], save: str | None, start: int
) -> int:
    """What the process was doing when a signal ended it, made as small as the time allows."""
    from arenapy.testing.crashes import crashes, smaller

    terminal.print(f"found: killed by {signal_name(number)}; --seed {start}")
    if lines and crashes(lines):
        lines = smaller(lines, TRIES_SECONDS)
    elif lines:
        terminal.print(
            "the same steps do not do it again: an earlier program is part of it, or luck"
        )
    _show_program(terminal, lines, save)
    return EXIT_FOUND


if __name__ == "__main__":
    sys.exit(main())
