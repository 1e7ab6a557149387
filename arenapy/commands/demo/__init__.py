"""``arenapy demo``: what an arena is good for, measured on this machine.

`workloads` says what is computed, `ways` where its temporaries live, `measuring` how it is timed
and checked, `report` and `chart` how it is shown; `gpu` is the demo on a device. This file is the
command: its options, its order, its exit status.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from arenapy.base.text import printable
from arenapy.commands.command_line import Parser, check_outputs, console, whole
from arenapy.errors import OutOfMemory
from arenapy.linux import outputs
from arenapy.linux.limits import check_request

from . import report
from .measuring import Result, ResultsDiffer, measure
from .workloads import Digits, Network, Temporaries, Workload

__all__ = ["main"]

SIZES = (500, 1000, 2000, 3000, 4000)
ROUNDS, QUICK_ROUNDS = 11, 3
WAYS = 3
ARRAYS_ALIVE = 10  # N x N arrays: two operands, and the temporaries of three ways, at most
QUICK_SHARE = 10  # --quick does a tenth of the iterations
BATCHES, QUICK_BATCHES = 1000, 100
BATCH_BYTES = 8 << 20
GPU_RUNS, QUICK_GPU_RUNS = 3, 1
MAX_SIZE, MAX_ROUNDS, MAX_BATCH_BYTES = 1 << 31, 1_000_000, 1 << 48

#: When a block that came straight from the kernel is freed, glibc's malloc keeps blocks up to its
#: size from then on (M_MMAP_THRESHOLD in mallopt(3), 32 MiB at most). The sizes freed before are
#: therefore part of a measurement: we go through the sizes in ascending order, then teach malloc
#: with a block of this size and go once more through those that it has now learnt.
LEARNT_BYTES = 31 << 20

NO_MATPLOTLIB = """\
--plot needs matplotlib, which cannot be imported ({error}). Install it:
  python -m pip install matplotlib
or, in a clone of arenapy, with the extra of this package: python -m pip install '.[plot]'"""


def _parser() -> Parser:
    parser = Parser(
        prog="arenapy demo",
        description="Train a small network on handwritten digits, and run a loop with N x N "
        "float32 temporaries. The temporaries are in plain NumPy, in an arena, and in "
        "preallocated buffers. Show the time, the page faults and when the arena has paid for "
        "itself. Check that all three compute the same bits. With --gpu, run a staging pipeline "
        "instead (fill, copy, kernel), with and without arenapy.",
        epilog="Exit status: 0, or 1 if the results differ, memory runs out or there is no GPU.",
    )
    parser.add_argument(
        "--sizes", nargs="+", type=whole(1, MAX_SIZE), metavar="N",
        help=f"sizes of the N x N loop (default: {' '.join(map(str, SIZES))})",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=whole(1, MAX_ROUNDS), metavar="R",
        help=f"rounds for the median (default: {ROUNDS}, with --quick {QUICK_ROUNDS}; with "
        f"--gpu {GPU_RUNS} and {QUICK_GPU_RUNS})",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="take seconds, with noisier figures")
    parser.add_argument("--json", metavar="FILE", help="also write every figure as JSON")
    parser.add_argument("--plot", metavar="FILE", help="also draw a chart, as PNG")
    gpu = parser.add_argument_group("the pipeline on a GPU")
    gpu.add_argument("--gpu", action="store_true", help="run the pipeline; needs cuda-python")
    gpu.add_argument(
        "--batches", type=whole(1, MAX_ROUNDS), metavar="N",
        help=f"number of batches (default: {BATCHES}, with --quick {QUICK_BATCHES})",
    )  # fmt: skip
    gpu.add_argument(
        "--batch-bytes", type=whole(1, MAX_BATCH_BYTES), metavar="BYTES",
        help=f"bytes of a batch (default: {BATCH_BYTES}, 8 MiB)",
    )  # fmt: skip
    return parser


def _refuse_mixed(parser: Parser, options: Namespace) -> None:
    """Refuse options of the one demo for the other: they would do nothing."""
    if options.gpu:
        names, where = ("sizes", "plot"), "without --gpu"
    else:
        names, where = ("batches", "batch_bytes"), "with --gpu"
    for name in names:
        if getattr(options, name) is not None:
            parser.error(f"--{name.replace('_', '-')} is for the demo {where}")


def _run_gpu(parser: Parser, options: Namespace) -> int:
    from . import gpu, gpu_ways  # imported where used: arenapy.cuda is not small

    nbytes = options.batch_bytes or BATCH_BYTES
    if nbytes % gpu_ways.ROW_BYTES:
        parser.error(f"--batch-bytes: {nbytes} is not a multiple of {gpu_ways.ROW_BYTES}")
    batches = options.batches or (QUICK_BATCHES if options.quick else BATCHES)
    runs = options.rounds or (QUICK_GPU_RUNS if options.quick else GPU_RUNS)
    return gpu.run(batches, nbytes, runs, options.json and Path(options.json))


def main(argv: Sequence[str]) -> int:
    """Run ``arenapy demo`` with the arguments `argv` and return the exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    _refuse_mixed(parser, options)
    written = {"--json": (options.json, report.REPORT), "--plot": (options.plot, outputs.CHART)}
    check_outputs(parser, written)
    if options.gpu:
        return _run_gpu(parser, options)
    if options.plot is not None:
        if not options.plot.lower().endswith(".png"):
            parser.error(f"--plot writes PNG, so {options.plot} must end in .png")
        try:
            from . import chart
        except ImportError as error:
            print("arenapy demo:", NO_MATPLOTLIB.format(error=error), file=sys.stderr)
            return 1
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    terminal = console()
    report.show_intro(terminal)
    try:
        measured = _measure_all(
            sorted(set(options.sizes or SIZES)), rounds, QUICK_SHARE if options.quick else 1
        )
    except ResultsDiffer as error:
        print(f"arenapy demo: {error}", file=sys.stderr)
        return 1
    except MemoryError as error:
        remedy = "" if isinstance(error, OutOfMemory) else ". Choose smaller --sizes."
        print(f"arenapy demo: {error}{remedy}", file=sys.stderr)
        return 1
    if options.json is not None:
        report.write_json(Path(options.json), report.figures(measured))
    if options.plot is not None:
        chart.save(Path(options.plot), measured.results, report.conditions())
    report.show(terminal, measured)
    if options.json is not None:
        print(f"figures: {printable(options.json)}", file=sys.stderr)
    if options.plot is not None:
        print(f"chart: {printable(options.plot)}", file=sys.stderr)
    return 0


def _teach_malloc() -> None:
    np.empty(LEARNT_BYTES, "u1")  # and freed: that is the lesson


def _measure_all(sizes: Sequence[int], rounds: int, share: int) -> report.Report:
    """Measure every workload, one after the other, behind a progress bar on standard error.

    One at a time, so that the memory needed is that of the largest and not of all. `sizes` ascend,
    so that malloc meets no size after a larger one (see `LEARNT_BYTES`).
    """
    needed = ARRAYS_ALIVE * Temporaries.array_bytes(sizes[-1])
    check_request(needed, f"The demo with N = {sizes[-1]}", "choose smaller --sizes")
    small = [n for n in sizes if Temporaries.array_bytes(n) <= LEARNT_BYTES]
    blocks = WAYS * rounds * (2 + len(sizes) + len(small))
    terminal = console(stderr=True)
    # Drawn by us between the blocks: a thread of its own would fault and compute while we measure.
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=terminal, auto_refresh=False, transient=True, disable=not terminal.is_terminal,
    ) as progress:  # fmt: skip
        task = progress.add_task("", total=blocks)

        def one(workload: Workload) -> Result:
            progress.update(task, description=f"{workload.name:<14}", refresh=True)
            iterations = max(1, workload.iterations // share)
            result, job = measure(
                workload, rounds, iterations, lambda: progress.update(task, advance=1, refresh=True)
            )
            if isinstance(job, Network):
                result.accuracy = job.accuracy()
            return result

        first = [one(Digits()), *(one(Temporaries(n)) for n in sizes)]
        _teach_malloc()
        later = [one(Digits()), *(one(Temporaries(n)) for n in small)]
    return report.Report(rounds, LEARNT_BYTES, first, later)
