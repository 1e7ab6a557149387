"""``arenapy demo --gpu``: a staging pipeline with and without allocators, measured on a device.

`gpu_ways` says what is compared, `gpu_kernel` what is computed, `gpu_device` calls the driver,
`gpu_measuring` and `gpu_overlap` measure, `gpu_report` shows. This file is the command: its order,
its progress, its errors.
"""

import sys
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from arenapy import cuda
from arenapy.base.text import printable, printable_lines
from arenapy.commands.command_line import console

from . import gpu_report as report
from .gpu_device import Gpu
from .gpu_measuring import Pipeline, measure
from .measuring import ResultsDiffer
from .report import write_json

__all__ = ["run"]

WAYS = 3
OTHER_STEPS = 3  # calibrating, tracing, checking


def run(batches: int, nbytes: int, runs: int, json: Path | None) -> int:
    """Measure the pipeline, show what was found, and return the exit status."""
    terminal = console()
    try:
        device = cuda.memory_info().name  # fails here where there is none, before anything is shown
        report.show_intro(terminal)
        found = _measured(device, batches, nbytes, runs)
    except (cuda.Unavailable, cuda.CudaError, ResultsDiffer, MemoryError) as error:
        print(printable_lines(f"arenapy demo: {error}"), file=sys.stderr)
        return 1
    if json is not None:
        write_json(json, report.figures(found))
    report.show(terminal, found)
    if json is not None:
        print(f"figures: {printable(str(json))}", file=sys.stderr)
    return 0


def _measured(device: str, batches: int, nbytes: int, runs: int) -> Pipeline:
    terminal = console(stderr=True)
    # Drawn between the steps: a thread of its own would compute while we measure.
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        console=terminal, auto_refresh=False, transient=True, disable=not terminal.is_terminal,
    ) as progress:  # fmt: skip
        task = progress.add_task("", total=WAYS * runs + OTHER_STEPS)
        done = -1  # a step is shown when it begins

        def step(what: str) -> None:
            nonlocal done
            done += 1
            progress.update(task, completed=done, description=f"{what:<12}", refresh=True)

        with Gpu() as gpu:
            return measure(gpu, device, batches, nbytes, runs, step)
