"""``arenapy fuzz``: attack an allocator, or the malloc of a C library, without writing a class.

What lives here: the command and its report. The attack runs in another process, which may crash;
its steps are in a file by then, and a new process goes on. Hypothesis is needed there and for
nothing else, so this module is imported without it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import mmap
import os
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
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
from arenapy.linux import outputs
from arenapy.linux.child_process import child_process, for_late_libraries
from arenapy.testing.faults import Finding, check_kinds, varies, worst_first

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["main"]

EXIT_FOUND = 1
HANGS_AFTER = 60.0  # seconds: a step that lasts longer is a failure
ENDS_WITHIN = 10.0  # seconds, after the search
ABORT_SECONDS = 5.0  # in which a process that hangs writes its stack
LONGEST_LINE = 79
LAST_WORDS = 60  # lines of the process's standard error
MOST_DEATHS = 40  # of processes, without --seconds: each costs the start of another one
REPORT = "report.json"
OVER = REPORT + ".over"  # the status of a search that has ended
ATTACK = ("examples", "steps", "seconds", "shrink")
PAGE = mmap.PAGESIZE
MAX_STEPS = 1_000_000_000


def _kinds(text: str) -> list[str]:
    kinds = text.split(",")
    try:
        check_kinds(kinds)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return kinds


def _alignment(text: str) -> int:
    number = whole(1, PAGE)(text)
    if number.bit_count() != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a power of two up to {PAGE}")
    return number


def _parser() -> Parser:
    parser = Parser(
        prog="arenapy fuzz",
        description="Test an allocator with random programs. Blocks must not overlap, must be "
        "aligned and keep their contents, and a refused request must change nothing. Each kind of "
        "fault is listed with a small program that shows it, the worst first. The exit status is "
        "1 if there was a fault.",
        epilog="MAKE_ALLOCATOR() returns an object with a method alloc, allocate or malloc, which "
        "is called with (nbytes[, align]). A block is an int, or has .address or a buffer. It is "
        "freed by free(block), by its own release(), or by dropping it. mark(), reset([mark]), "
        "remaining and check() are used if the object has them.",
    )
    parser.add_argument(
        "target", nargs="?", metavar="PACKAGE:MAKE_ALLOCATOR", help="a function without arguments"
    )
    parser.add_argument("--library", metavar="SO", help="test malloc and free of a C library")
    count = whole(1, MAX_STEPS)
    parser.add_argument("--examples", type=count, default=100, help="number of programs (100)")
    parser.add_argument("--steps", type=count, default=50, help="limit of steps in a program (50)")
    parser.add_argument("--seconds", type=seconds, help="run for this time instead of --examples")
    parser.add_argument(
        "--threads", type=whole(1, 2), default=1, metavar="1|2", help="number of threads (1)"
    )
    parser.add_argument("--seed", type=whole(-MOST), help="run the same programs again")
    parser.add_argument(
        "--allow", type=_kinds, default=[], metavar="KIND,...",
        help="kinds of faults to ignore, such as negative,oversize,empty-shared",
    )  # fmt: skip
    parser.add_argument(
        "--max-align", type=_alignment, default=PAGE, metavar="N",
        help=f"the largest alignment to request ({PAGE}); 1 means none",
    )  # fmt: skip
    parser.add_argument(
        "--shrink", type=seconds, default=30.0, metavar="SECONDS",
        help="limit of the time to make programs smaller (30)",
    )  # fmt: skip
    parser.add_argument("--save", metavar="FILE", help="write the failing program to this file")
    return parser


def _attack(job: dict[str, Any], folder: Path) -> tuple[int | None, list[str], str]:
    """(exit status, the file of steps, standard error) of one process that attacks.

    The process goes on with the report in the folder, if there is one. The status is None if a step
    did not end: the process was killed.
    """
    report, over, written = folder / REPORT, folder / OVER, folder / "steps.jsonl"
    written.unlink(missing_ok=True)
    line = [sys.executable, "-P", "-m", "arenapy.testing.attack", json.dumps(job), str(report)]
    environment = {**for_late_libraries(os.environ), "ARENAPY_STEPS": str(written)}
    # Not a pipe, which has no end while a process that the attacked code started has it, too. Nor a
    # file in the folder, which may be full.
    with (
        open(os.memfd_create("errors"), "w+b") as errors,
        child_process(line, env=environment, stderr=errors) as process,
    ):
        hangs, ended = False, 0.0
        began = time.monotonic()
        seen, since = -1, began
        while process.returncode is None:
            try:
                process.wait(timeout=1)
            except subprocess.TimeoutExpired:
                _show_progress(report, time.monotonic() - began)
                # Each step is written before it runs.
                now = written.stat().st_mtime_ns if written.exists() else -1
                if now != seen:
                    seen, since = now, time.monotonic()
                elif over.exists():  # and the process ends, if children of the code let it
                    ended = ended or time.monotonic()
                    if time.monotonic() - ended > ENDS_WITHIN:
                        process.kill()
                elif time.monotonic() - since > HANGS_AFTER and not hangs:
                    hangs = True
                    process.send_signal(signal.SIGABRT)  # faulthandler writes the stack
                    since = time.monotonic() - HANGS_AFTER + ABORT_SECONDS
                elif time.monotonic() - since > HANGS_AFTER:
                    process.kill()
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip()
    if _has_terminal():
        print(end="\r\x1b[K", file=sys.stderr, flush=True)
    lines = written.read_text().splitlines() if written.exists() else []
    return None if hangs else process.returncode, lines, said


def _search(
    job: dict[str, Any],
    folder: Path,
    run: Callable[[dict[str, Any], Path], tuple[int | None, list[str], str]] = _attack,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[int | None, dict[str, Any], str, str]:
    """(exit status, report, header of a file of steps, standard error) of a whole attack.

    A crash or a hang is set aside like every other fault, and a new process goes on. Without
    --seconds, the last death or a hang ends the search: one more process makes programs smaller.
    If a smaller program of a fault ends the process, that is no fault of another kind: another
    process runs each smaller program in a child.
    """
    limits, allow, report = job["attack"], job["machine"]["allow"], folder / REPORT
    end = None if limits["seconds"] is None else clock() + limits["seconds"]
    header = words = ""
    shown = set(allow)  # kinds that need no other program
    deaths = 0
    while True:
        status, lines, said = run(job, folder)
        found = json.loads(report.read_text()) if report.exists() else {}
        header = header or "".join(lines[:1])
        over = folder / OVER
        if over.exists():
            return int(over.read_text()), found, header, words or said
        full = status == os.EX_IOERR and f"{folder} cannot be written: " in said
        if full or (status is not None and status >= 0 and not lines):
            return status, found, header, words or said
        deaths += 1
        kind = "hang" if status is None else "crash"
        searching = bool(lines) and found.get("searching", False)
        if searching:
            found["examples"] += 1  # that one has not been counted
        elif found.get("findings") and not limits.get("apart"):
            limits |= {"seconds": 0.0, "shrink": limits["shrink"] / 2, "apart": True}
            continue
        if kind not in shown:
            began = clock()
            message, program, again = _death(status, lines, limits["shrink"] / 2, clock)
            limits["shrink"] = max(0.0, limits["shrink"] - (clock() - began))
            others = [one for one in found.get("findings", ()) if one["kind"] != kind]
            found["findings"] = [asdict(Finding(kind, message, program)), *others]
            found["found_at"] = found.get("found_at") or found.get("examples")
            words = said
            shown.update([kind] if again else [])
        if not searching:
            return status, found, header, words or said
        report.write_text(json.dumps(found))
        if end is not None:
            limits["seconds"] = max(0.0, end - clock())
        elif kind == "hang" or deaths == MOST_DEATHS:
            limits["seconds"] = 0.0


def _has_terminal() -> bool:
    """False, too, if standard error is closed."""
    return sys.stderr is not None and sys.stderr.isatty()


def _show_progress(report: Path, passed: float) -> None:
    """One line on a terminal, which the next one replaces."""
    if not _has_terminal() or not report.exists():
        return
    found = json.loads(report.read_text())
    kinds = ", ".join(one["kind"] for one in found["findings"]) or "no fault found"
    told = f"{found['examples']} programs, {passed:.0f} s: {kinds}"
    print(f"\r\x1b[K{printable(told)[:LONGEST_LINE]}", end="", file=sys.stderr, flush=True)


def _tables(found: dict[str, Any]) -> Table:
    shown = Table()
    for name in "step", "times", "rare state", "times":
        shown.add_column(name, justify="right" if name == "times" else "left")
    columns = [sorted(found[key].items(), key=lambda one: -one[1]) for key in ("rules", "states")]
    for row in range(max(map(len, columns))):
        cells = [rows[row] if row < len(rows) else ("", "") for rows in columns]
        shown.add_row(*(Text(printable(str(cell))) for pair in cells for cell in pair))
    return shown


def _show_findings(
    terminal: Console, findings: Sequence[Finding], header: str, save: str | None
) -> None:
    """The worst first; a file of its program."""
    from arenapy.testing.steps import Program

    if not header:
        save = None
    if findings and save is not None:
        recipe = json.loads(header)
        recipe["allow"] = [other.kind for other in findings[1:]]
        lines = [json.dumps(recipe), *findings[0].program]
        outputs.write(save, ("\n".join(lines) + "\n").encode(), outputs.STEPS)
    for index, one in enumerate(findings):
        terminal.print(printable(f"{'also ' if index else ''}found: {one}"), soft_wrap=True)
        program = str(Program.parse(one.program)) if one.program else "before the first step"
        terminal.print(printable_lines(program), soft_wrap=True)
        if save is not None and not index:
            again = f"again: python -m arenapy.testing reproduce {shlex.quote(save)}"
            terminal.print(printable(again), soft_wrap=True)


def _death(
    status: int | None, lines: list[str], shrink: float, clock: Callable[[], float]
) -> tuple[str, list[str], bool]:
    """(message, small program, whether the program shows it again) of a crash or a hang."""
    if status is None:
        return f"a step did not end within {HANGS_AFTER:.0f} s", lines[1:], True
    if status >= 0:
        return f"the process ended by itself, with status {status}", lines[1:], True
    from arenapy.testing import crashes, search

    message = f"killed by {signal_name(-status)}"
    header, program = lines[:1], lines[1:]
    if not program:
        return message, [], True

    def crashes_again(program: list[str]) -> bool:
        return crashes.crashes(header + program)

    until = clock() + shrink
    if crashes_again(program):
        return message, search.shrink(program, crashes_again, until, clock=clock), True
    message += "; the same steps alone do not crash: an earlier program, or chance, is part of it"
    return message, program, False


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
    machine = ("target", "library", "threads", "allow", "max_align")
    job = {
        "machine": {name: getattr(options, name) for name in machine},
        "attack": {name: getattr(options, name) for name in ATTACK},
    }
    job["attack"]["start"] = start
    terminal = console()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="arenapy-fuzz-") as folder:
        status, found, header, errors = _search(job, Path(folder))
    if status == os.EX_USAGE and not found:
        parser.error(errors)
    findings = worst_first([Finding(**one) for one in found.get("findings", ())])
    if not findings and (not found or (status is not None and status > 0)):
        print(printable_lines(errors) or f"the attack ended with status {status}", file=sys.stderr)
        return EXIT_FOUND
    _show_findings(terminal, findings, header, options.save)
    if errors:
        words = [one for one in errors.splitlines() if not one.startswith("Extension modules:")]
        print(printable_lines("\n".join(words[-LAST_WORDS:])), file=sys.stderr)
    if found.get("rules"):
        terminal.print(_tables(found))
        if told := varies(found["restarts"], found["examples"]):
            terminal.print(told, soft_wrap=True)
        terminal.print(
            f"{found['examples']} programs, {sum(found['rules'].values())} steps in "
            f"{time.monotonic() - began:.1f} s; --seed {start}"
        )
    else:
        terminal.print(f"--seed {start}")
    if findings:
        return EXIT_FOUND
    terminal.print("no fault found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
