"""The output of ``arenapy compare``: the table, the verdict, its reason, and what to do next.

What lives here: words and layout. What does not: measuring (command.py) and the rule of the verdict
(verdict.py).
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
from arenapy.commands.compare.verdict import CONFIDENCE, WORTH, Verdict, ratio_of, verdict

__all__ = ["Run", "next_step", "reasons", "sentences", "show"]

HEAVIER = 1.2  # times plain's peak: more is said
HEAVIER_BYTES = 64 << 20  # and so much more
BUSY = 0.9  # CPU time / time of a program of one thread that seldom waits, at least
ALIKE = 0.05  # how much that may differ
MANY_FAULTS = 0.1  # a share of the time in the kernel: below it memory is not what takes the time


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the program.

    Attributes
    ----------
    wall, waited : float
        Seconds from the start of Python to the end of the process; of them, those in which the
        main thread waited for a processor.
    cpu, kernel : float
        CPU time of all threads; of it, in the kernel.
    faults : int
        Minor page faults.
    peak_bytes : int
        The most that was resident.
    startup : float or None
        Seconds until NumPy was there, and the pool; None if NumPy was not imported.
    startup_kernel : float or None
        CPU time in the kernel until then.
    prefault, never_used_bytes, blocks, served_bytes : float or None, int or None
        Seconds in which the pool was given memory; bytes it had beyond the peak of its blocks;
        what it handed out. None but under arenapy.
    """

    wall: float
    waited: float
    cpu: float
    kernel: float
    faults: int
    peak_bytes: int
    startup: float | None = None
    startup_kernel: float | None = None
    prefault: float | None = None
    never_used_bytes: int | None = None
    blocks: int | None = None
    served_bytes: int | None = None

    @property
    def time(self) -> float:
        """Of the whole process, as it would have been with a processor at hand."""
        return max(self.wall - self.waited, 1e-6)

    @property
    def steady(self) -> float | None:
        """Of the program itself: without the start and without prefaulting."""
        if self.startup is None:
            return None
        return max(self.time - self.startup - (self.prefault or 0.0), 1e-6)

    @property
    def kernel_share(self) -> float:
        """Of the time after the start, the share that the kernel took."""
        seconds = self.time - (self.startup or 0.0)
        return min(1.0, (self.kernel - (self.startup_kernel or 0.0)) / max(seconds, 1e-6))


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
    _Row("time", lambda run: run.time, _seconds, paired=True),
    _Row("  start-up", lambda run: run.startup, _seconds, paired=True),
    _Row("  prefault", lambda run: run.prefault, _seconds),
    _Row("  steady state", lambda run: run.steady, _seconds, paired=True),
    _Row("CPU time", lambda run: run.cpu, _seconds, paired=True),
    _Row("  in the kernel", lambda run: run.kernel, _seconds),
    _Row("minor faults", lambda run: run.faults, _whole),
    _Row("peak resident", lambda run: run.peak_bytes, _bytes),
    _Row("  never used", lambda run: run.never_used_bytes, _bytes),
)


def _ratio(row: _Row, values: Sequence[float], plain: Sequence[float]) -> str:
    if row.paired and len(values) == len(plain) and min(*values, *plain) > 0:
        return f"{ratio_of(values, plain).estimate:.3f}"
    below = statistics.median(plain)
    return f"{statistics.median(values) / below:.3f}" if below else ""


def _values(runs: Sequence[Run], value: Callable[[Run], float | None]) -> list[float]:
    return [found for run in runs if (found := value(run)) is not None]


def table(runs: Mapping[str, Sequence[Run]], huge: Mapping[str, int]) -> Table:
    """Medians, spreads and ratios; `huge` are bytes of huge pages, seen in the warm-up."""
    shown = Table(box=box.SIMPLE, pad_edge=False)
    for name in "", "way", "median", "lowest to highest", "/ plain":
        shown.add_column(name, justify="left" if name in ("", "way") else "right", no_wrap=True)
    for row in ROWS:
        head = row.name
        plain = _values(runs[PLAIN], row.value)
        for way, found in runs.items():
            values = _values(found, row.value)
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


def is_busy(runs: Mapping[str, Sequence[Run]]) -> bool:
    """True if plain and arenapy keep one processor busy. CPU time then tells what time does."""
    plain, ours = (
        statistics.median(run.cpu / run.time for run in runs[way]) for way in (PLAIN, OURS)
    )
    return all(BUSY < share < 2 - BUSY for share in (plain, ours)) and abs(plain - ours) < ALIKE


def verdict_on(
    runs: Mapping[str, Sequence[Run]],
    way: str = OURS,
    than: str = PLAIN,
    chance: float = 1 - CONFIDENCE,
    *,
    last: bool = True,
) -> Verdict:
    """The verdict on a way over another; `last`: no more rounds follow."""
    name = "cpu" if is_busy(runs) else "time"
    ours, theirs = ([getattr(run, name) for run in runs[one]] for one in (way, than))
    return verdict(ratio_of(ours, theirs, chance), last=last)


def sentences(runs: Mapping[str, Sequence[Run]], chance: float = 1 - CONFIDENCE) -> list[str]:
    """The verdict, in words: of every way over plain, then of arenapy over each other way."""
    pairs = [(way, PLAIN) for way in runs if way != PLAIN]
    pairs += [(OURS, way) for way in runs if way not in (PLAIN, OURS)]
    lines = []
    for way, than in pairs:
        said = verdict_on(runs, way, than, chance)
        name = way if than == PLAIN else f"{way} instead of {than}"
        lines.append(f"{name}: {said.word}: {said.reason}.")
    return lines


def _medians(runs: Mapping[str, Sequence[Run]], name: str) -> list[float]:
    """Of plain and of arenapy; empty if one has no such figure."""
    both = [_values(runs[way], lambda run: getattr(run, name)) for way in (PLAIN, OURS)]
    return [statistics.median(values) for values in both] if all(both) else []


def _prefault(runs: Mapping[str, Sequence[Run]]) -> float:
    return statistics.median(_values(runs[OURS], lambda run: run.prefault) or [0.0])


def reasons(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """Why: page faults, time in the kernel, the phases, memory."""
    faults, kernel, shares, peaks = (
        _medians(runs, name) for name in ("faults", "kernel", "kernel_share", "peak_bytes")
    )
    lines = [
        "The verdict compares CPU time, because one processor is busy all the time."
        if is_busy(runs)
        else "The verdict compares the elapsed time, less the waits of the main thread for a "
        "processor.",
        f"Page faults: {faults[0]:,.0f} -> {faults[1]:,.0f}. "
        "Time in the kernel, which includes page faults: "
        f"{kernel[0]:.2f} s -> {kernel[1]:.2f} s, or {shares[0]:.0%} -> {shares[1]:.0%} of the "
        "time after the start.",
    ]
    startup, steady = _medians(runs, "startup"), _medians(runs, "steady")
    if startup:
        lines.append(
            f"Start-up: {_seconds(startup[0])} -> {_seconds(startup[1])}, importing arenapy. "
            f"Prefaulting: {_seconds(_prefault(runs))}. "
            f"Steady state: {_seconds(steady[0])} -> {_seconds(steady[1])}."
        )
    if peaks[1] - peaks[0] > HEAVIER_BYTES and peaks[1] > HEAVIER * peaks[0]:
        lines.append(f"Peak memory is higher: {_bytes(peaks[1])} instead of {_bytes(peaks[0])}.")
    return lines


def next_step(
    runs: Mapping[str, Sequence[Run]],
    said: Verdict,
    program: str,
    seconds: float,
    pool: Sequence[str] = (),
    others: Sequence[str] = (),
) -> str:
    """The command that the user should type next, and why.

    Parameters
    ----------
    runs, said
        The figures, and the verdict about them.
    program : str
        The words of the program on a command line.
    seconds : float
        The time that this comparison had, or took.
    pool, others : sequence of str
        Its options for the pool, and the ways of ``--with``.
    """
    in_pool = " ".join([*pool, program])
    again = f"--with {','.join(others)} {in_pool}" if others else in_pool
    startup, steady = _medians(runs, "startup"), _medians(runs, "steady")
    if not startup:
        return (
            "The program did not import NumPy in its own process, so the pool served nothing. "
            "Compare the program that does the work."
        )
    if not said.final:
        return f"To be surer: arenapy compare --seconds {max(4 * seconds, 1):.0f} {again}"
    if said.word in ("worth it", "a little faster"):
        step = f"Next: arenapy run {in_pool}"
        if pool:
            return step
        return (
            f"{step}; or write into the program, before its first array: import arenapy; "
            'arenapy.numpy_memory(arenapy.Pool(), threads=True, libc="keep").install()'
        )
    gain, cost = steady[0] - steady[1], startup[1] - startup[0] + _prefault(runs)
    if gain > WORTH * steady[0]:
        longer = cost / gain
        return (
            f"The steady state is {gain / steady[0]:.0%} faster, and the start costs "
            f"{_seconds(max(cost, 0.0))} once. Next: arenapy compare with an input that takes at "
            f"least {max(2.0, 2 * longer):.0f} times as long."
        )
    slower = said.word == "not worth it" and steady[1] > steady[0] * (1 + WORTH)
    if slower and "--libc" not in pool:
        return f"Next: arenapy compare --libc none {again}"
    if statistics.median(run.kernel_share for run in runs[PLAIN]) < MANY_FAULTS:
        return (
            "The program spends little time on memory. Next, find where it spends its time: "
            f"python -m cProfile -s tottime {program}"
        )
    return f"Next, to see which memory the pool did not serve, and why: arenapy run {in_pool}"


def show(
    console: Console,
    runs: Mapping[str, Sequence[Run]],
    huge: Mapping[str, int],
    notes: Mapping[str, str],
    lines: Sequence[str],
) -> None:
    """Print the table, what could not be compared and why, and `lines` under it."""
    console.print(table(runs, huge))
    for way, note in notes.items():
        console.print(printable(f"{way}: not compared: {note}"), soft_wrap=True)
    for line in lines:
        console.print(printable(line), soft_wrap=True)
