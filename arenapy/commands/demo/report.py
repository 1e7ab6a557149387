"""The report of the demo: the tables, the sentences under them, and the same as JSON."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from arenapy._version import __version__
from arenapy.linux import outputs

from .measuring import GAIN_AT_LEAST, PREFAULT_REPEATS, Result, Timing

__all__ = ["Report", "conditions", "figures", "show", "show_intro", "write_json"]

SCHEMA = 1
REPORT = outputs.report("arenapy demo")
MIB = 1 << 20
FEW_FAULTS = 10  # below this a decimal is worth showing

INTRO = """\
Most large arrays that NumPy makes are new to the process. The kernel finds a page for every 4 KiB \
of them when it is first written, a minor page fault, and takes them all back when the array is \
freed. An arena has faulted its memory in beforehand, and hands it out again and again.

The same arithmetic, with its temporaries in three places:
"""

PLACES = (
    ("plain NumPy", "c = a * b + ...", "NumPy allocates and frees them"),
    ("arena", "out=arena.empty(shape)", "arena.scope() gives all back at once"),
    ("preallocated", "out=made_before", "by hand, before the loop: the limit"),
)

BUSY = "Slow here, so rounds were shortened: {shortened}. Is the machine busy?"
BUSY_BLAS = """ \
OPENBLAS_NUM_THREADS=1 keeps the network's matrix products from waiting for threads."""

LEARNT = """\
The same again, after an array of {mib} MiB was freed. From that malloc learns to keep memory for \
all arrays up to this size, so a program that has handled a large array is here:
"""


@dataclass(frozen=True)
class Report:
    """All that one run of the demo measured.

    `results` are in order of size: no workload comes after one with larger arrays. `later` repeats
    the ones that malloc can learn to serve without the kernel, after that.
    """

    rounds: int
    learnt_bytes: int
    results: Sequence[Result]
    later: Sequence[Result]


def conditions() -> str:
    """Return what the figures depend on, in one line."""
    return (
        f"arenapy {__version__}, NumPy {np.__version__}, "
        f"{platform.python_implementation()} {platform.python_version()}, "
        f"{platform.system()} {platform.release()}, {len(os.sched_getaffinity(0))} CPUs"
    )


def show_intro(console: Console) -> None:
    """Print what is about to be compared."""
    console.print(Text(INTRO))
    places = Table(box=None, show_header=False, padding=(0, 2, 0, 1))
    for place in PLACES:
        places.add_row(*(Text(cell, no_wrap=True) for cell in place))
    console.print(places)
    console.print()


def show(console: Console, report: Report) -> None:
    """Print the tables and what they mean."""

    def caption(text: str) -> None:
        console.print(Text(text + "\n", style="dim"))

    console.print(_times(report.results))
    caption(
        f"An iteration: medians of {report.rounds} rounds, in each of which the three took turns "
        f"in shuffled order.\n{conditions()}."
    )
    console.print(_costs(report.results))
    caption(
        "Prefault: making an arena as large as one iteration needs, median of "
        f"{PREFAULT_REPEATS}. Saved: by each iteration, against plain NumPy."
    )
    shortened = [
        result for result in report.results if result.iterations < result.planned_iterations
    ]
    if shortened:
        names = (
            f"{result.name} to {result.iterations} of {result.planned_iterations} iterations"
            for result in shortened
        )
        network = any(result.accuracy is not None for result in shortened)
        caption(BUSY.format(shortened=", ".join(names)) + (BUSY_BLAS if network else ""))
    _show_no_gain(console, report.results, "")
    console.print(Text(LEARNT.format(mib=report.learnt_bytes // MIB)))
    console.print(_times(report.later))
    _show_no_gain(console, report.later, " once malloc keeps such memory")
    for result in report.results:
        if result.accuracy is not None:
            reads = f"The network reads {result.accuracy:.1%} of the digits it was not trained on."
            console.print(Text(reads))
    comparisons = sum(result.comparisons for result in (*report.results, *report.later))
    same = f"All three computed the same bits: {comparisons:,} comparisons, no difference."
    console.print(Text(same))


def _show_no_gain(console: Console, results: Sequence[Result], when: str) -> None:
    """Say of each workload that did not gain that it did not, and why if the figures say so."""
    without = [result for result in results if not result.gain]
    for result in without:
        if result.speedup(result.arena) >= GAIN_AT_LEAST:
            rounds = len(result.arena.rounds_ms)
            why = f"; faster in {result.rounds_won} of {rounds} rounds, which is noise."
        elif result.plain.faults < 1:
            why = "; plain NumPy does not fault either."
        else:
            why = "."
        console.print(Text.assemble((f"{result.name}: no gain{when}", "yellow"), why))
    if without:
        console.print()


def _times(results: Sequence[Result]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("workload", no_wrap=True)
    table.add_column("temporaries in", no_wrap=True)
    for heading in ("time, ms", "page faults", "against plain"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        for timing in result.timings:
            first = timing is result.plain
            table.add_row(
                Text(result.name if first else ""),
                Text(timing.name),
                Text(f"{timing.ms:,.3f}"),
                Text(_faults(timing.faults)),
                Text("") if first else _against_plain(result, timing),
                style="bold" if timing is result.arena else "",
                end_section=timing is result.preallocated,
            )
    return table


def _faults(faults: float) -> str:
    return f"{faults:,.1f}" if 0 < faults < FEW_FAULTS else f"{faults:,.0f}"


def _against_plain(result: Result, timing: Timing) -> Text:
    speedup = result.speedup(timing)
    shown = f"{max(speedup, 1 / speedup):.2f}x"
    if shown == "1.00x":
        return Text("the same")
    if speedup > 1:
        return Text(f"{shown} faster", "green" if timing is result.arena and result.gain else "")
    return Text(f"{shown} slower", "yellow" if timing is result.arena else "")


def _costs(results: Sequence[Result]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("workload", no_wrap=True)
    for heading in ("arena, MiB", "prefault, ms", "saved, ms", "paid back after"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            Text(result.name),
            Text(f"{result.arena_bytes / MIB:,.1f}"),
            Text(f"{result.prefault_ms:,.1f}"),
            Text(f"{result.plain.ms - result.arena.ms:,.3f}"),
            _paid_back(result.paid_after),
        )
    return table


def _paid_back(iterations: int | None) -> Text:
    if iterations is None:
        return Text("never", style="yellow")
    return Text(f"{iterations:,} iteration{'s' if iterations > 1 else ''}", style="green")


def write_json(path: Path, found: dict[str, Any]) -> None:
    """Write figures to `path`, after what they depend on."""
    whole = {
        "report": "arenapy demo",
        "schema": SCHEMA,
        "arenapy": __version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpus": len(os.sched_getaffinity(0)),
        **found,
    }
    text = json.dumps(whole, indent=2, allow_nan=False) + "\n"
    outputs.write(path, text.encode(), REPORT)


def figures(report: Report) -> dict[str, Any]:
    """Everything measured, round by round, as JSON has it."""
    return {
        "rounds": report.rounds,
        "identical": True,  # a difference ends the demo before this is written
        "workloads": [_workload(result) for result in report.results],
        "after_freeing_bytes": report.learnt_bytes,
        "workloads_after": [_workload(result) for result in report.later],
    }


def _workload(result: Result) -> dict[str, Any]:
    return {
        "name": result.name,
        "iterations_per_round": result.iterations,
        "arena_bytes": result.arena_bytes,
        "prefault_ms": result.prefault_ms,
        "gain": result.gain,
        "paid_after_iterations": result.paid_after,
        "accuracy": result.accuracy,
        "digest": result.digest,
        "comparisons": result.comparisons,
        "ways": {
            timing.name: {
                "ms": timing.ms,
                "minor_faults": timing.faults,
                "times_as_fast_as_plain": result.speedup(timing),
                "rounds_ms": timing.rounds_ms,
                "rounds_minor_faults": timing.rounds_faults,
            }
            for timing in result.timings
        },
    }
