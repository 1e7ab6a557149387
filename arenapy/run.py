"""``arenapy run``: a program with the data of its NumPy arrays in a pool.

What lives here: the command line, and its options that ``arenapy compare`` has, too. What does not:
the program's process, which takes the place of this one (run_program.py).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["add_pool_options", "add_program", "main", "parse_size"]

PACKAGE = Path(__file__).resolve().parent
HUGE_PAGES = {"auto": "auto", "2M": "2M", "1G": "1G", "none": None}
SITES = 16  # callers that --sites notes: through libraries, into the program
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes: ``4G``, ``512M``, ``1.5 GiB``, ``4096``. Units are powers of 1024.

    Raises
    ------
    argparse.ArgumentTypeError
        It is none, or 0.
    """
    match = SIZE.fullmatch(text.strip())
    nbytes = (
        int(float(match[1]) * (1 << 10 * " KMGT".index(match[2].upper() or " "))) if match else 0
    )
    if nbytes <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; say 512M or 4G")
    return nbytes


def add_pool_options(parser: argparse.ArgumentParser) -> None:
    """Add what the pool shall be like."""
    parser.add_argument(
        "--max-bytes", type=parse_size, metavar="SIZE", help="the most that the pool holds: 4G"
    )
    parser.add_argument(
        "--initial-bytes", type=parse_size, default=0, metavar="SIZE",
        help="fault in so much at once, when NumPy is imported",
    )  # fmt: skip
    parser.add_argument(
        "--huge-pages", choices=HUGE_PAGES, default="auto",
        help="2M and 1G: pages that were reserved in hugetlbfs (default: auto, transparent ones)",
    )  # fmt: skip
    parser.add_argument("--lock", action="store_true", help="never swap the pool out")
    parser.add_argument(
        "--on-full", choices=("system", "error"), default="system",
        help="when the pool is full: use malloc, or raise MemoryError (default: system)",
    )  # fmt: skip


def add_program(parser: argparse.ArgumentParser) -> None:
    """Add the program; all that follows it is its own."""
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument("program", metavar="SCRIPT", help="a Python program, or with -m a module")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="its arguments")


def check_pool_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse what cannot be before anything is run."""
    if options.max_bytes is not None and options.initial_bytes > options.max_bytes:
        parser.error(
            f"--initial-bytes {options.initial_bytes} is more than --max-bytes {options.max_bytes}"
        )


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The options of a command that runs a program; the file of ``--json`` can be written."""
    options = parser.parse_args(argv)
    check_pool_options(parser, options)
    if getattr(options, "sites", False) and not options.trace:
        parser.error("--sites are written into a trace; give --trace FILE")
    if options.json:
        options.json = os.path.abspath(options.json)
        with open(options.json, "a"):  # now, and not when the program has run for hours
            pass
    return options


def interpreter() -> list[str]:
    """The Python of this process, with its flags."""
    return [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]


def command(
    options: argparse.Namespace,
    *,
    report: bool,
    json_file: str | None,
    trace: str | None = None,
    sites: bool = False,
) -> list[str]:
    """The command line that runs a program in the pool that `options` want."""
    python = interpreter()
    settings: dict[str, Any] = {
        "package": str(PACKAGE),
        "python": python,
        "module": options.module,
        "max_bytes": options.max_bytes,
        "initial_bytes": options.initial_bytes,
        "huge_pages": HUGE_PAGES[options.huge_pages],
        "lock": options.lock,
        "on_full": options.on_full,
        "report": report,
        "json": json_file,
        "trace": trace and os.path.abspath(trace),
        "sites": SITES if sites else 0,
    }
    program = [str(PACKAGE / "run_program.py"), json.dumps(settings), options.program]
    return [*python, *program, *options.arguments]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="arenapy run",
        usage="%(prog)s [options] SCRIPT|-m MODULE [arguments]",
        description="Run a program as Python would, the data of its NumPy arrays in a pool of "
        "memory that was faulted in beforehand, and report at its end on standard error.",
        allow_abbrev=False,
    )
    add_pool_options(parser)
    parser.add_argument(
        "--json", metavar="FILE", help="write the figures there, too; sizes are bytes"
    )
    parser.add_argument(
        "--trace", metavar="FILE", help="record what the pool does, for arenapy trace and replay"
    )
    parser.add_argument(
        "--sites", action="store_true", help="with --trace: note which code asks for memory, too"
    )
    parser.add_argument("--quiet", action="store_true", help="no report on standard error")
    add_program(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``arenapy run``; the program takes the place of this process, so this does not return.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments after ``run``. None: those of this process.

    Raises
    ------
    OSError
        The file of ``--json`` cannot be written.
    """
    options = parse(_parser(), argv)
    line = command(
        options,
        report=not options.quiet,
        json_file=options.json,
        trace=options.trace,
        sites=options.sites,
    )
    sys.stdout.flush()
    os.execv(line[0], line)


if __name__ == "__main__":
    sys.exit(main())
