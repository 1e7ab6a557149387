"""All figures of NumPy on arena memory, in one run, as tables.

    python asv_benches/numpy_programs/report.py [--quick] [--only PART ...]
        [--into asv_benches/figures/numpy.json --commit $(git rev-parse HEAD)]

The options are those of host/report.py. Speed-ups are the other's time divided by arenapy's: above
1, arenapy is faster. The exit status is 1 if a promise is not kept.
"""

import statistics
import sys
from pathlib import Path

if not __package__:  # run as a script; behind what is installed
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from rich import print as rich_print
from rich.table import Table

from asv_benches.numpy_programs import bench_libc, bench_numpy, bench_workloads, table, traces
from asv_benches.numpy_programs.rivals import ALONE, DEFAULT, OURS, Ratios
from asv_benches.support import report
from asv_benches.support.report import figure
from asv_benches.support.sizes import MIB


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


def libc_table(found):
    """Milliseconds, speed-ups, page faults."""
    rivals = list(next(iter(found.values())))
    head = ["", *(f"{rival}, ms" for rival in rivals)]
    head += ["over default", "over pool alone", "over the best"]
    head += ["faults: default", "pool alone", "arenapy"]
    rows = []
    for name, figures in found.items():
        ratio, alone = bench_libc.ratios(figures)
        rows.append(
            [
                name,
                *(figure(statistics.median(one.seconds) * 1e3) for one in figures.values()),
                f"{ratio.default:.2f}",
                f"{alone:.2f}",
                f"{ratio.best:.2f} ({ratio.who})",
                *(figure(figures[rival].faults) for rival in (DEFAULT, ALONE, OURS)),
            ]
        )
    return head, rows


def wide_table(found):
    """How many times as fast as the default everything is; means of what is faster than what."""
    rivals = [rival for rival in table.here() if rival != DEFAULT]
    others = [rival for rival in rivals if rival != OURS]
    head = ["over default", "default, ms", *rivals, "arenapy over the best"]
    rows = []
    for name, seconds in found.items():
        medians = {rival: statistics.median(one) for rival, one in seconds.items()}
        ratio = Ratios.of(seconds)
        cells = [f"{medians[DEFAULT] / medians[rival]:.2f}" for rival in rivals]
        best = f"{ratio.best:.2f} ({ratio.who})"
        rows.append([name, figure(medians[DEFAULT] * 1e3), *cells, best])
    means, slower = table.summary(found)
    over = [f"{means[rival]:.3f}" for rival in (DEFAULT, *others, "the best")]
    rows.append(["geometric mean, arenapy over each", "", *over])
    fewest = min(len(one) for seconds in found.values() for one in seconds.values())
    said = "; ".join(slower) or "none"
    rows.append([f"below {table.LEAST} of the default: {said}", *[""] * (len(head) - 1)])
    rows.append([f"samples of a row, at least: {fewest}", *[""] * (len(head) - 1)])
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


def section(measure, promised, table, title):
    """A function for report.main, which prints a table and returns the report's lines."""

    def run(quick):
        found = measure(quick)
        head, rows = table(found)
        shown = Table(title=title, title_justify="left", title_style="bold")
        for i, name in enumerate(head):
            shown.add_column(name, justify="right" if i else "left")
        for row in rows:
            shown.add_row(*row)
        rich_print(shown)
        promises = [line for line in promised(found) if line.limit is not None]
        return promises, {"head": head, "rows": rows}

    return run


SECTIONS = {
    "table": section(
        table.rows, table.row_lines, wide_table, "Beside every malloc, how many times the default"
    ),
    "expression": section(
        bench_numpy.expressions,
        bench_numpy.expression_lines,
        expression_table,
        "`c = a*b + a - b/2`, N x N float32, steady state",
    ),
    "empty": section(
        bench_numpy.empties,
        bench_numpy.empty_lines,
        empty_table,
        "Empty arrays of float64, made and dropped",
    ),
    "workloads": section(
        bench_workloads.workloads,
        bench_workloads.workload_lines,
        workload_table,
        "Ten programs",
    ),
    "libc": section(
        bench_libc.calls,
        bench_libc.call_lines,
        libc_table,
        "What takes its memory from malloc, steady state",
    ),
    "traces": section(
        traces.traces, traces.trace_lines, trace_table, "Memory reserved for recorded programs"
    ),
}

if __name__ == "__main__":
    sys.exit(report.main(SECTIONS, __doc__))
