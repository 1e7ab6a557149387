"""All figures of NumPy on arena memory, in one run, as tables.

    python asv_benches/numpy_table.py [--quick] [--json FILE] [--only PART ...]
        [--into asv_benches/numpy_results.json --commit $(git rev-parse HEAD)]

`--into` stores the tables in a results file, of which figures.py makes docs/numpy_figures.md; parts
that are not measured stay there as they were. Speed-ups are the other's time divided by arenapy's:
above 1, arenapy is faster. Run it on an idle machine, which is named in the first line. The exit
status is 1 if a promise is not kept.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from pathlib import Path

if not __package__:  # run as a script; behind what is installed
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from asv_benches import bench_numpy, bench_workloads, numpy_traces
from asv_benches.report import figure, show
from asv_benches.rivals import DEFAULT, OURS, Ratios
from asv_benches.stored import machine, stamp, store

MIB = 1 << 20


def expression_table(found):
    """Milliseconds, speed-ups (medians, best rounds), page faults."""
    rivals = list(next(iter(found.values())))
    head = ["N", *(f"{rival}, ms" for rival in rivals)]
    head += ["over default", "over the best", "fastest rounds", "faults: default", "arenapy"]
    rows, means = [], []
    for n, figures in found.items():
        ratio = Ratios.of({rival: one.seconds for rival, one in figures.items()})
        least = Ratios.of({rival: [min(one.seconds)] for rival, one in figures.items()})
        means.append((ratio.default, ratio.best, least.best))
        rows.append(
            [
                str(n),
                *(figure(statistics.median(one.seconds) * 1e3) for one in figures.values()),
                f"{ratio.default:.2f}",
                f"{ratio.best:.2f} ({ratio.who})",
                f"{least.best:.2f} ({least.who})",
                *(figure(figures[rival].faults) for rival in (DEFAULT, OURS)),
            ]
        )
    means = [f"{bench_numpy.geometric_mean(column):.2f}" for column in zip(*means, strict=True)]
    rows.append(["geometric mean", *[""] * len(rivals), *means, "", ""])
    return head, rows


def empty_table(found):
    """Nanoseconds of np.empty, and its drop."""
    rows = []
    for n, seconds in found.items():
        default, ours = seconds[DEFAULT] * 1e9, seconds[OURS] * 1e9
        rows.append([f"`np.empty(({n},))`", figure(default), figure(ours), f"{ours / default:.2f}"])
    return ["", "default, ns", "arenapy, ns", "arenapy / default"], rows


def workload_table(found):
    """Speed-ups of steps and of whole programs, page faults, peak memory."""
    head = ["", "a step, ms: default", "arenapy", "over default", "over the best"]
    head += ["program, s: default", "arenapy", "over default", "over the best"]
    head += ["faults a step: default", "arenapy", "peak, MiB: default", "arenapy", "least"]
    rows = []
    for name, figures in found.items():
        cells = [name.replace("_", " ")]
        both = (DEFAULT, OURS)
        for what, unit, ratio in zip(
            ("step", "program"), (1e3, 1), bench_workloads.ratios(figures), strict=True
        ):
            for rival in both:
                cells.append(figure(statistics.median(getattr(figures[rival], what)) * unit))
            cells += [f"{ratio.default:.2f}", f"{ratio.best:.2f} ({ratio.who})"]
        cells += [figure(statistics.median(figures[rival].faults)) for rival in both]
        peaks = bench_workloads.peaks(figures)
        cells += [f"{peaks[rival] / MIB:.0f}" for rival in both]
        rows.append([*cells, f"{min(peaks.values()) / MIB:.0f}"])
    return head, rows


def trace_table(found):
    """Peak reserved over peak live, and what of it was in no live block."""
    names = [one.name for one in next(iter(found.values()))]
    rows = []
    for program, results in found.items():
        cells = [program, f"{results[0].peak_live / MIB:.0f}"]
        for one in results:
            known = one.ratio is not None and one.fragmentation is not None
            cells.append(f"{one.ratio:.3f} ({one.fragmentation:.1%})" if known else "not here")
        rows.append(cells)
    return ["reserved / live (in no block)", "peak live, MiB", *names], rows


#: What is measured, the lines of it, and {title: table}.
PARTS = {
    "expression": (
        bench_numpy.expressions,
        bench_numpy.expression_lines,
        expression_table,
        "`c = a*b + a - b/2`, N x N float32, steady state",
    ),
    "empty": (
        bench_numpy.empties,
        bench_numpy.empty_lines,
        empty_table,
        "Empty arrays of float64, made and dropped",
    ),
    "workloads": (
        bench_workloads.workloads,
        bench_workloads.workload_lines,
        workload_table,
        "Ten programs",
    ),
    "traces": (
        numpy_traces.traces,
        numpy_traces.trace_lines,
        trace_table,
        "Memory reserved for recorded programs",
    ),
}


def rich_table(title, head, rows):
    """For a terminal."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for i, name in enumerate(head):
        table.add_column(name, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    return table


def main():
    """Measure, print, and say by the exit status whether all is met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small: to see that it runs")
    parser.add_argument("--json", metavar="FILE", help="write all samples there too")
    parser.add_argument("--into", type=Path, metavar="FILE", help="a results file")
    parser.add_argument("--commit", default="unknown", help="what is measured, for its stamp")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    console = Console()
    about = machine()
    print(", ".join(f"{name} {value}" for name, value in about.items()) + "\n", flush=True)
    kept, lines = {}, []
    for part in options.only:
        measure, promised, table, title = PARTS[part]
        kept[part] = measure(options.quick)
        found = list(promised(kept[part]))
        lines += found
        head, rows = table(kept[part])
        console.print(rich_table(title, head, rows))
        show(console, part, [line for line in found if line.limit is not None])
        if options.into:
            store(options.into, part, stamp(options.commit), {"head": head, "rows": rows})
    if options.json:
        text = json.dumps({"machine": about, **kept}, indent=1, default=dataclasses.asdict)
        Path(options.json).write_text(text)
    missed = [line for line in lines if line.verdict == "MISSED"]
    for line in missed:
        print(f"missed: {line.what}: {figure(line.value)}, {line.limit:g}", file=sys.stderr)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
