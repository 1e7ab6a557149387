"""``arenapy trace``: what a trace says about memory, in the terminal or as a page."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from arenapy.memory_info import format_bytes
from arenapy.torch_history import is_pickle
from arenapy.trace import from_torch, load
from arenapy.trace_holders import WAYS
from arenapy.trace_page import page
from arenapy.trace_view import MOST_BLOCKS, View

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="arenapy trace",
        description="Say what a trace tells about memory: how much, when, whose, for how long. "
        "With --html as a page with charts that zoom, one file, which needs no network.",
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", help="a trace, or torch's memory snapshot")
    parser.add_argument("--html", metavar="OUT", help="write a page there")
    parser.add_argument(
        "--by", choices=WAYS,
        help="what blocks are told apart by; default: sites, if they were recorded, else sizes",
    )  # fmt: skip
    parser.add_argument(
        "--events", action="store_true", help="count events on the axis of time, not seconds"
    )
    parser.add_argument(
        "--blocks", type=int, default=MOST_BLOCKS, metavar="N",
        help=f"draw so many blocks one by one, and merge the others (default: {MOST_BLOCKS})",
    )  # fmt: skip
    parser.add_argument("--device", type=int, metavar="N", help="whose history, of a snapshot")
    return parser


def _tables(view: View) -> list[Table]:
    """Who holds how much."""
    found = []
    for title, moment in ("at the peak", view.blocks.peak), ("at the end", view.blocks.moments - 1):
        table = Table(title=f"Held {title}", title_justify="left")
        for name in view.groups.way, "blocks", "bytes", "since":
            table.add_column(name, justify="left" if name == view.groups.way else "right")
        for row in view.holders(moment):
            table.add_row(
                escape(row.name), f"{row.blocks:,}", format_bytes(row.nbytes), view.when(row.since)
            )
        if table.row_count:
            found.append(table)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``arenapy trace``; the exit status.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments after ``trace``. None: those of this process.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    if options.blocks < 0:
        parser.error(f"--blocks {options.blocks}: it is a number of blocks")
    try:
        if is_pickle(options.file):
            trace = from_torch(options.file, options.device)
        else:
            trace = load(options.file)
        view = View(trace, options.by, options.events or None, options.blocks)
    except ValueError as error:
        parser.error(str(error))
    console = Console()
    for line in view.sentences():
        console.print(line, highlight=False, markup=False)
    if not options.html:
        for table in _tables(view):
            console.print(table)
        for line in view.notes():
            console.print(line, highlight=False, markup=False)
        return 0
    if os.path.exists(options.html) and os.path.samefile(options.html, options.file):
        parser.error(f"--html {options.html}: that is the trace itself")
    try:
        text = page(view, f"Memory over time: {os.path.basename(options.file)}")
    except ImportError as error:
        print(f"arenapy: {error}", file=sys.stderr)
        return 1
    out = Path(options.html)
    out.write_text(text, encoding="utf-8")
    size = format_bytes(out.stat().st_size)
    console.print(f"{out}: {size}; open it in a browser", highlight=False, markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
