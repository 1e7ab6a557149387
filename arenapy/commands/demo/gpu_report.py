"""The report on the pipeline: the tables, the sentences under them, and the same as JSON.

Every sentence follows from figures alone.
"""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from arenapy.base.text import format_bytes

from .gpu_measuring import Pipeline, WayTiming
from .gpu_ways import DEPTH
from .measuring import GAIN_AT_LEAST
from .report import conditions

__all__ = ["figures", "show", "show_intro", "verdict"]

MILLISECONDS = 1e3
GIGA = 1e9
NEAR = 1.15  # within this of its longest stage, a pipeline is called as fast as that
OVERLAP_AT_LEAST = 0.1  # less is called hardly any

INTRO = """\
A staging pipeline, as in training: a batch is filled on the CPU, copied to the device, and a \
kernel computes a checksum of it. The same fill, the same kernel, in three ways:
"""

PLACES = (
    ("plain", "new memory on both sides for each batch, one thing after the other"),
    ("pinned anew", "the same, with memory that is pinned for each batch"),
    ("arenapy", f"a Slab of {DEPTH} pinned items, a Pool of the device, two streams"),
)

TIMES = """\
From the first fill until the device is done, median of {runs} run{s}. GB/s: of the batches. \
The kernel does {rounds:,} rounds on each word, chosen so that it takes about as long as filling \
and copying a batch in the pipeline did without it, {pace:.3f} ms.
{conditions}; {device}, driver {driver}.
"""

ALONE = (
    "Pinned memory, nothing beside it. The longest stage is what no pipeline can be faster than.\n"
)

SAME = """\
All three computed the same bits: {compared:,} checksums compared with plain, {checked} of plain \
with NumPy, no difference."""


def show_intro(console: Console) -> None:
    """Print what is about to be compared."""
    console.print(Text(INTRO))
    places = Table(box=None, show_header=False, padding=(0, 2, 0, 1))
    for name, what in PLACES:
        places.add_row(Text(name, no_wrap=True), Text(what))
    console.print(places)
    console.print()


def show(console: Console, found: Pipeline) -> None:
    """Print the tables and what they mean."""
    console.print(_times(found))
    caption = TIMES.format(
        runs=found.runs,
        s="s" if found.runs > 1 else "",
        rounds=found.rounds,
        pace=found.pace_ms,
        conditions=conditions(),
        device=found.device,
        driver=_version(found.driver_version),
    )
    console.print(Text(caption, style="dim"))
    console.print(_stages(found))
    console.print(Text(ALONE, style="dim"))
    for sentence in verdict(found):
        console.print(Text(sentence))
    console.print(Text(SAME.format(compared=found.compared, checked=found.checked)))


def _times(found: Pipeline) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(f"{format_bytes(found.nbytes)} a batch", no_wrap=True)
    for heading in ("batches", "seconds", "ms a batch", "GB/s", "against plain"):
        table.add_column(heading, justify="right", no_wrap=True)
    for timing in found.timings:
        table.add_row(
            Text(timing.name),
            Text(f"{timing.batches:,}"),
            Text(f"{timing.median_seconds:,.3f}"),
            Text(f"{timing.ms:,.3f}"),
            Text(f"{_rate(found, timing) / GIGA:,.2f}"),
            Text("") if timing is found.plain else Text(compared(found.speedup(timing))),
            style="bold" if timing is found.pooled else "",
        )
    return table


def _stages(found: Pipeline) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("ms a batch", no_wrap=True)
    rows = [*found.alone.stages.items(), ("one after the other", found.alone.total)]
    for name, _ in rows:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row(Text("alone"), *(Text(f"{ms:,.3f}") for _, ms in rows))
    return table


def compared(speedup: float) -> str:
    """Say how fast something is against plain."""
    shown = f"{max(speedup, 1 / speedup):.2f}x"
    if shown == "1.00x":
        return "the same"
    return f"{shown} {'faster' if speedup > 1 else 'slower'}"


def verdict(found: Pipeline) -> list[str]:
    """Say what the figures mean."""
    speedup, ms, alone = found.speedup(found.pooled), found.pooled.ms, found.alone
    sentences = []
    if speedup >= GAIN_AT_LEAST:
        paid = found.paid_after
        sentences.append(
            f"With arenapy the pipeline is {speedup:.2f}x as fast as plain. Setting it up took "
            f"{found.setup_ms:,.1f} ms, paid back after {paid:,} batch{'es' if paid != 1 else ''}."
        )
    else:
        sentences.append(
            f"No gain: with arenapy the pipeline is {speedup:.2f}x as fast as plain, and setting "
            f"it up took {found.setup_ms:,.1f} ms."
        )
    longest = alone.stages[alone.longest]
    above = f"A batch takes {ms:,.3f} ms, {ms / longest:.2f}x of {alone.longest} alone"
    if ms <= longest * NEAR:
        above += ", the longest stage: the others are hidden behind it."
    elif ms < alone.total:
        above += f", the longest stage, and {ms / alone.total:.0%} of one after the other."
    else:
        above += " and no less than one after the other: nothing is hidden."
    sentences.append(above)
    traced = found.traced
    share = f"{traced.share:.0%} of the copying (events, {len(traced.copies)} batches)."
    if traced.share >= OVERLAP_AT_LEAST:
        sentences.append(f"Copies and kernels ran at the same time for {share}")
    else:
        sentences.append(f"Copies and kernels hardly ran at the same time: for {share}")
    return sentences


def _rate(found: Pipeline, timing: WayTiming) -> float:
    return found.nbytes * timing.batches / timing.median_seconds


def _version(number: int) -> str:
    """Of the CUDA that the driver speaks."""
    return f"CUDA {number // 1000}.{number % 1000 // 10}"


def figures(found: Pipeline) -> dict[str, Any]:
    """Everything measured, as JSON has it."""
    alone, traced = found.alone, found.traced
    return {
        "demo": "gpu",
        "device": found.device,
        "driver_version": found.driver_version,
        "batches": found.batches,
        "batch_bytes": found.nbytes,
        "runs": found.runs,
        "depth": DEPTH,
        "rounds_a_word": found.rounds,
        "identical": True,  # a difference ends the demo before this is written
        "checksums_compared": found.compared,
        "checksums_computed_by_numpy": found.checked,
        "pace_ms": found.pace_ms,
        "setup_ms": found.setup_ms,
        "paid_after_batches": found.paid_after,
        "alone_ms": {
            "fill": alone.fill,
            "copy": alone.copy,
            "kernel": alone.kernel,
            "one_after_the_other": alone.total,
            "longest": alone.longest,
        },
        "ways": {
            timing.name: {
                "batches": timing.batches,
                "seconds": timing.median_seconds,
                "ms_a_batch": timing.ms,
                "bytes_a_second": _rate(found, timing),
                "times_as_fast_as_plain": found.speedup(timing),
                "minor_faults_a_batch": timing.faults_a_batch,
                "runs_seconds": timing.seconds,
                "runs_minor_faults": timing.faults,
            }
            for timing in found.timings
        },
        "traced": {
            "batches": len(traced.copies),
            "copying_ms": traced.copying,
            "computing_ms": traced.computing,
            "both_ms": traced.both,
            "share_of_copying": traced.share,
            "copies_ms": [list(span) for span in traced.copies],
            "kernels_ms": [list(span) for span in traced.kernels],
        },
        "verdict": verdict(found),
    }
