"""Every performance promise in one run: measured, beside its peers, with the verdict.

    python asv_benches/report.py [--quick] [--json FILE] [--only SECTION ...]
        [--into asv_benches/host_results.json --commit $(git rev-parse HEAD)]

Rounds of what is compared follow each other in random order within this one process. Run it on an
idle machine; the load is printed, as are the processor and the versions. The exit status is 1 if
a promise is not kept. `--into` stores what is measured in a results file, of which figures.py makes
the documentation's tables; sections that are not measured stay there as they were.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path

if not __package__:  # run as a script; behind what is installed
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from asv_benches import (
    bench_c,
    bench_curve,
    bench_export,
    bench_faults,
    bench_latency,
    bench_layout,
    bench_lifetime,
    bench_numpy,
    bench_prefault,
    bench_replay,
    bench_rounding,
    bench_threads,
    bench_workloads,
    numpy_traces,
)
from asv_benches.rounds import Line
from asv_benches.stored import stamp, store


def prefault_lines(quick):
    """bench_prefault's figures as lines of the report."""
    found = bench_prefault.medians(bench_prefault.SIZE, 3 if quick else 15)
    for way, seconds in found.items():
        yield Line("prefault", f"1 GiB, {way}", seconds * 1e3, "ms")
    best = min(bench_prefault.PEERS, key=found.get)
    one, two = (found[way] for way in bench_prefault.WAYS)
    yield Line("prefault", f"{best} / 1 thread", found[best] / one, "x", 1.0, at_least=True)
    limit = 1.3 if len(os.sched_getaffinity(0)) >= 2 else None
    yield Line("prefault", "1 thread / 2 threads", one / two, "x", limit, at_least=True)


SECTIONS = {
    "latency": bench_latency.lines,
    "c": bench_c.lines,
    "pool": bench_latency.pool_lines,
    "malloc": bench_c.malloc_lines,
    "export": bench_export.lines,
    "curve": bench_curve.lines,
    "threads": bench_threads.lines,
    "rounding": bench_rounding.lines,
    "faults": bench_faults.lines,
    "layout": bench_layout.lines,
    "lifetime": bench_lifetime.lines,
    "prefault": prefault_lines,
    "replay": bench_replay.lines,
    "numpy": bench_numpy.lines,
    "workloads": bench_workloads.lines,
    "traces": numpy_traces.lines,
}


def figure(value):
    """Three digits, or all of a whole number."""
    return f"{value:.0f}" if value == int(value) or value >= 100 else f"{value:.3g}"


def as_data(lines):
    """For a file."""
    return [dataclasses.asdict(line) | {"verdict": line.verdict} for line in lines]


def show(console, section, lines):
    """One section as a table."""
    table = Table(title=section, title_justify="left", title_style="bold")
    for name, justify in (("", "left"), ("measured", "right"), ("target", "right"), ("", "left")):
        table.add_column(name, justify=justify)
    for line in lines:
        sense = "≥" if line.at_least else "≤"
        target = "" if line.limit is None else f"{sense} {line.limit:g} {line.unit}"
        style = {"met": "green", "MISSED": "bold red"}.get(line.verdict, "dim")
        value = f"{figure(line.value)} {line.unit}" if line.value < float("inf") else "out of room"
        table.add_row(line.what, value, target, line.verdict, style=style)
    console.print(table)


def main(sections=SECTIONS, about=__doc__):
    """Run, print, store, and say by the exit status whether all is met."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds: to see that it runs")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    parser.add_argument("--into", type=Path, metavar="FILE", help="a results file")
    parser.add_argument("--commit", default="unknown", help="what is measured, for its stamp")
    parser.add_argument("--only", nargs="+", choices=sections, default=list(sections))
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 110)
    machine = stamp(options.commit)
    console.print(", ".join(f"{name} {value}" for name, value in machine.items() if value))
    found = []
    start = time.perf_counter()
    for section in options.only:
        lines = list(sections[section](options.quick))
        show(console, section, lines)
        found += lines
        if options.into:
            store(options.into, section, machine, {"lines": as_data(lines)})
    missed = [line for line in found if line.verdict == "MISSED"]
    promises = [line for line in found if line.limit is not None]
    seconds = time.perf_counter() - start
    console.print(
        f"{len(promises) - len(missed)} of {len(promises)} promises kept, {seconds:.0f} s, "
        f"load at the end {os.getloadavg()[0]:.1f}"
    )
    if options.json:
        text = json.dumps({"machine": machine, "lines": as_data(found)}, indent=1)
        Path(options.json).write_text(text)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
