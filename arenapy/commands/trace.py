"""``arenapy trace``: what a trace says about memory, in the terminal or as a page."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from arenapy.base.text import format_bytes, printable
from arenapy.commands.command_line import Parser, check_outputs, console, whole
from arenapy.commands.replay.command import add_device, read
from arenapy.linux import outputs
from arenapy.trace.holders import WAYS
from arenapy.trace.page import page
from arenapy.trace.view import MAX_BLOCKS, View

__all__ = ["main"]


def _parser() -> Parser:
    parser = Parser(
        prog="arenapy trace",
        description="Show the memory in a trace: how much, when, for how long, and which code "
        "allocated it. --html writes a page with charts, as one file that needs no network.",
    )
    parser.add_argument("file", metavar="FILE", help="a trace, or torch's memory snapshot")
    parser.add_argument("--html", metavar="OUT", help="write the page to this file")
    parser.add_argument(
        "--by", choices=WAYS,
        help="how to group the blocks (default: by site if sites were recorded, else by size)",
    )  # fmt: skip
    parser.add_argument(
        "--events", action="store_true", help="let the time axis count events instead of seconds"
    )
    parser.add_argument(
        "--blocks", type=whole(), default=MAX_BLOCKS, metavar="N",
        help=f"draw N blocks separately, and merge the others (default: {MAX_BLOCKS})",
    )  # fmt: skip
    add_device(parser)
    return parser


def _tables(view: View) -> list[Table]:
    """Tables of the holders, at the peak and at the end."""
    found = []
    for title, moment in (
        ("In use at the peak", view.blocks.peak),
        ("Never freed", view.blocks.moments - 1),
    ):
        table = Table(title=title, title_justify="left")
        for name in view.groups.way, "blocks", "bytes", "since":
            table.add_column(name, justify="left" if name == view.groups.way else "right")
        for row in view.holders(moment):
            table.add_row(
                Text(row.name), f"{row.blocks:,}", format_bytes(row.nbytes), view.when(row.since)
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
    check_outputs(parser, {"--html": (options.html, outputs.PAGE)}, {"FILE": options.file})
    try:
        trace = read(options.file, options.device)
        view = View(trace, options.by, options.events or None, options.blocks)
    except ValueError as error:
        parser.error(str(error))
    written = None
    if options.html is not None:
        name = printable(os.path.basename(options.file))
        try:
            text = page(view, f"Memory over time: {name}").encode()
        except ImportError as error:
            print(f"arenapy: {error}", file=sys.stderr)
            return 1
        outputs.write(options.html, text, outputs.PAGE)
        written = f"{printable(options.html)}: {format_bytes(len(text))}; open it in a browser"
    terminal = console()
    for line in view.sentences():
        terminal.print(line)
    if written is not None:
        terminal.print(written)
        return 0
    for table in _tables(view):
        terminal.print(table)
    for line in view.notes():
        terminal.print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
