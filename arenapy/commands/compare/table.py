"""What ``arenapy compare`` says: the table, and the verdict under it.

What lives here: words and layout. What does not: measuring (compare.py) and the rule of the
verdict (verdict.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from arenapy.base.text import format_bytes, printable
from arenapy.commands.compare.variants import OURS, PLAIN
from arenapy.commands.compare.verdict import ratio_of, verdict

__all__ = ["Run", "show"]

HEAVIER = 1.2  # times plain's peak: more is said
HEAVIER_BYTES = 64 << 20  # and so much more


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the program.

    Attributes
    ----------
    wall, cpu : float
        Seconds, the start of Python and prefaulting included; CPU time of all threads.
    faults : int
        Minor page faults.
    peak_bytes : int
        The most that was resident.
    prefault, never_used_bytes : float or None, int or None
        Seconds in which the pool was given memory; bytes it had beyond the peak of its blocks.
        None but under arenapy.
    """

    wall: float
    cpu: float
    faults: int
    peak_bytes: int
    prefault: float | None = None
    never_used_bytes: int | None = None


def _seconds(value: float) -> str:
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.3f} s"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _bytes(value: float) -> str:
    return format_bytes(round(value))


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    value: Callable[[Run], float | None]
    text: Callable[[float], str]
    paired: bool = False  # its ratio is of times, round by round


ROWS = (
    _Row("wall time", lambda run: run.wall, _seconds, paired=True),
    _Row("  of it prefault", lambda run: run.prefault, _seconds),
    _Row("CPU time", lambda run: run.cpu, _seconds, paired=True),
    _Row("minor faults", lambda run: run.faults, _whole),
    _Row("peak resident", lambda run: run.peak_bytes, _bytes),
    _Row("  never used", lambda run: run.never_used_bytes, _bytes),
)


def _ratio(row: _Row, values: Sequence[float], plain: Sequence[float]) -> str:
    if row.paired and min(*values, *plain) > 0:
        return f"{ratio_of(values, plain).estimate:.3f}"
    below = statistics.median(plain)
    return f"{statistics.median(values) / below:.3f}" if below else ""


def table(runs: Mapping[str, Sequence[Run]], huge: Mapping[str, int]) -> Table:
    """Medians, spreads and ratios; `huge` are bytes of huge pages, seen in the warm-up."""
    shown = Table(box=box.SIMPLE, pad_edge=False)
    for name in "", "way", "median", "lowest to highest", "/ plain":
        shown.add_column(name, justify="left" if name in ("", "way") else "right", no_wrap=True)
    for row in ROWS:
        head = row.name
        plain = [value for run in runs[PLAIN] if (value := row.value(run)) is not None]
        for way, found in runs.items():
            values = [value for run in found if (value := row.value(run)) is not None]
            if values:
                shown.add_row(
                    head,
                    way,
                    row.text(statistics.median(values)),
                    f"{row.text(min(values))} to {row.text(max(values))}",
                    _ratio(row, values, plain) if plain and way != PLAIN else "",
                )
                head = ""
        if not head:
            shown.add_section()
    for at, (way, nbytes) in enumerate(huge.items()):
        shown.add_row("" if at else "huge pages", way, _bytes(nbytes), "in the warm-up", "")
    return shown


def sentences(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """The verdict, in words."""
    walls = {way: [run.wall for run in found] for way, found in runs.items()}
    lines = []
    for way in runs:
        if way != PLAIN:
            said = verdict(ratio_of(walls[way], walls[PLAIN]))
            lines.append(f"{way}: {said.word}: {said.reason}.")
    for way in runs:
        if way not in (PLAIN, OURS):
            said = verdict(ratio_of(walls[OURS], walls[way]))
            lines.append(f"{OURS} instead of {way}: {said.word}: {said.reason}.")
    peaks = {way: statistics.median(run.peak_bytes for run in runs[way]) for way in (PLAIN, OURS)}
    more = peaks[OURS] - peaks[PLAIN]
    if more > HEAVIER_BYTES and peaks[OURS] > HEAVIER * peaks[PLAIN]:
        lines.append(
            f"It takes more memory: a peak of {_bytes(peaks[OURS])} instead of "
            f"{_bytes(peaks[PLAIN])}."
        )
    return lines


def show(
    console: Console,
    runs: Mapping[str, Sequence[Run]],
    huge: Mapping[str, int],
    notes: Mapping[str, str],
) -> None:
    """Print the table, what could not be compared and why, and the verdict."""
    console.print(table(runs, huge))
    for way, note in notes.items():
        console.print(printable(f"{way}: not compared: {note}"), soft_wrap=True)
    for line in sentences(runs):
        console.print(line, soft_wrap=True)
