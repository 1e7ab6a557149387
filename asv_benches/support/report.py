"""Common parts of the commands `report.py`: lines with a verdict, printed and stored."""

import argparse
import os
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from asv_benches.support.results import Row, stamp, store


def figure(value):
    """Three digits, or all of a whole number."""
    return f"{value:,.0f}" if value == int(value) or value >= 100 else f"{value:.3g}"


def show(console, section, lines):
    """One section as a table."""
    table = Table(title=section, title_justify="left", title_style="bold")
    for name, justify in (("", "left"), ("measured", "right"), ("target", "right"), ("", "left")):
        table.add_column(name, justify=justify)
    for line in lines:
        target = Row.of(line).target
        style = {"met": "green", "MISSED": "bold red"}.get(line.verdict, "dim")
        value = f"{figure(line.value)} {line.unit}" if line.value < float("inf") else "out of room"
        table.add_row(
            line.what, value, f"{target} {line.unit}" if target else "", line.verdict, style=style
        )
    console.print(table)


def as_table(lines):
    """(lines, the table that is stored of them): a line called "row: column" is a cell of it."""
    lines, rows = list(lines), {}
    for line in lines:
        row, _, column = line.what.rpartition(": ")
        target = Row.of(line).target
        judged = f" ({target}: {line.verdict})" if target else ""
        unit = "" if line.unit == "1" else f" {line.unit}"
        rows.setdefault(row, {})[column] = f"{figure(line.value)}{unit}{judged}"
    columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
    table = [[row, *(cells.get(column, "") for column in columns)] for row, cells in rows.items()]
    return lines, {"head": ["", *columns], "rows": table}


def options_of(about, sections):
    """The options of a command that measures `sections`."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less of all: to see that it runs")
    parser.add_argument("--into", type=Path, metavar="FILE", help="a results file")
    parser.add_argument("--commit", default="unknown", help="what is measured, for its stamp")
    parser.add_argument("--only", nargs="+", choices=sections, default=list(sections))
    return parser.parse_args()


def main(sections, about):
    """Run, print, store, and say by the exit status whether all is met.

    sections : {name: what gives its lines, or (lines, the fields that are stored in their place)}
    """
    options = options_of(about, sections)
    console = Console(width=None if sys.stdout.isatty() else 110)
    machine = stamp(options.commit)
    said = machine | {"load": f"{os.getloadavg()[0]:.1f}"}
    console.print(", ".join(f"{name} {value}" for name, value in said.items()))
    promises, missed = [], []
    start = time.perf_counter()
    for section in options.only:
        found = sections[section](options.quick)
        lines, content = found if isinstance(found, tuple) else (list(found), None)
        show(console, section, lines)
        promises += [line for line in lines if line.limit is not None]
        missed += [line for line in lines if line.verdict == "MISSED"]
        if options.into:
            content = content or {"lines": [Row.of(line) for line in lines]}
            store(options.into, section, machine, **content)
    seconds = time.perf_counter() - start
    console.print(
        f"{len(promises) - len(missed)} of {len(promises)} promises kept, {seconds:.0f} s, "
        f"load at the end {os.getloadavg()[0]:.1f}"
    )
    return bool(missed)
