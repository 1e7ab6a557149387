"""``%%arenapy`` in a notebook: a cell with its arrays in a pool, and a report under it.

What lives here: the magic and its report. What does not: the pool. IPython is never imported: it
imports this when the user types ``%load_ext arenapy``, and hands itself over.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from arenapy.base.text import format_bytes, html_table
from arenapy.linux.vm import minor_faults
from arenapy.measurement import measure
from arenapy.numpy_handler.numpy_memory import numpy_memory
from arenapy.pool.pool import Pool

__all__ = ["CellReport", "load_ipython_extension"]


class CellReport:
    """The report of a pool about one cell: a table in a notebook, lines at a terminal.

    Attributes
    ----------
    rows : list of tuple of str
        Names, and what is said of each.
    """

    def __init__(self, rows: list[tuple[str, str]]) -> None:
        self.rows = rows

    def __repr__(self) -> str:
        return "\n".join(["%%arenapy", *(f"  {name:<11}  {text}" for name, text in self.rows)])

    def _repr_html_(self) -> str:
        return html_table("%%arenapy", self.rows)


class _Cells:
    """The cells of one session: they share a pool, so that a cell that runs again finds it warm."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.pool = Pool()
        self.memory = numpy_memory(self.pool)

    def run(self, line: str, cell: str) -> None:
        """Run a cell with its arrays in a pool, and report. A cell that fails does so here."""
        if line.strip():
            raise ValueError(
                f"%%arenapy takes no options, and got {line.strip()!r}; leave them out"
            )
        before, lacked = self.pool.stats(), self.memory.stats()
        prefaulted, seconds, *_ = self.pool._growth()
        faults, start = minor_faults(), time.perf_counter()
        with measure(self.pool) as measured, self.memory, _semicolon_of(self.shell, cell):
            result = self.shell.run_cell(cell)  # shows its value, or how it fails
        took, faults = time.perf_counter() - start, minor_faults() - faults
        after, lacks = self.pool.stats(), self.memory.stats()
        prefaulted_then, seconds_then, *_ = self.pool._growth()
        blocks = after.total_allocations - before.total_allocations
        hits = after.pool_hits - before.pool_hits
        rows = [
            ("time", f"{took:.3f} s"),
            ("page faults", f"{faults:,} minor"),
            ("served", f"{_blocks(blocks)}, {hits:,} of them from memory that the pool had"),
            ("peak", format_bytes(measured.peak)),
            (
                "prefault",
                f"{format_bytes(prefaulted_then - prefaulted)} in {seconds_then - seconds:.3f} s",
            ),
        ]
        if fell_back := lacks.system_allocations - lacked.system_allocations:
            rows.append(
                (
                    "fell back",
                    f"{_blocks(fell_back)} to malloc: memory ran out, or arrays were resized",
                )
            )
        self.shell.display_pub.publish(*self.shell.display_formatter.format(CellReport(rows)))
        error = result.error_before_exec or result.error_in_exec
        if error is not None:
            _show_no_more(self.shell, error)
            raise error


@contextmanager
def _semicolon_of(shell: Any, cell: str) -> Iterator[None]:
    """Meanwhile a semicolon at the end of `cell` silences its value, as that of a cell does.

    IPython looks for one in its history, which has the line that called us.
    """
    hook = shell.displayhook
    own = vars(hook).get("quiet")
    if hasattr(hook, "semicolon_at_end_of_expression"):  # not in old versions
        hook.quiet = lambda: hook.semicolon_at_end_of_expression(cell)
    try:
        yield
    finally:
        _put_back(hook, "quiet", own)


def _put_back(one: Any, name: str, own: Any) -> None:
    """The attribute that it had of its own; None: it had the one of its class."""
    vars(one).pop(name, None)
    if own is not None:
        setattr(one, name, own)


def _show_no_more(shell: Any, error: BaseException) -> None:
    """Let IPython show nothing of an exception until the cell under way has ended."""
    own, show = vars(shell).get("showtraceback"), shell.showtraceback

    def show_others(exc_tuple: Any = None, *arguments: Any, **options: Any) -> None:
        if (exc_tuple or sys.exc_info())[1] is not error:
            show(exc_tuple, *arguments, **options)

    def ended(*_: object) -> None:
        shell.events.unregister("post_run_cell", ended)
        _put_back(shell, "showtraceback", own)

    shell.showtraceback = show_others
    shell.events.register("post_run_cell", ended)


def _blocks(number: int) -> str:
    return f"{number:,} block{'' if number == 1 else 's'}"


def load_ipython_extension(shell: Any) -> None:
    """Add the magic ``%%arenapy``; IPython calls this for ``%load_ext arenapy``.

    Parameters
    ----------
    shell : InteractiveShell
    """
    cells = _Cells(shell)

    def arenapy(line: str, cell: str) -> None:
        """Run a cell with the data of its NumPy arrays in a pool, and report."""
        cells.run(line, cell)

    shell.register_magic_function(arenapy, magic_kind="cell", magic_name="arenapy")
