"""Every performance promise of the host in one run: measured, beside its peers, with the verdict.

    python asv_benches/host/report.py [--quick] [--only SECTION ...]
        [--into asv_benches/figures/host.json --commit $(git rev-parse HEAD)]

Rounds of what is compared follow each other in random order within this one process. Run it on an
idle machine; the load is printed, as are the processor and the versions. The exit status is 1 if
a promise is not kept. `--into` stores what is measured in a results file, of which the pages of
docs/ are made; sections that are not measured stay there as they were.
"""

import sys
from pathlib import Path

if not __package__:  # run as a script; behind what is installed
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from asv_benches.host import (
    bench_c,
    bench_curve,
    bench_export,
    bench_faults,
    bench_growth,
    bench_latency,
    bench_layout,
    bench_lifetime,
    bench_prefault,
    bench_replay,
    bench_rounding,
    bench_threads,
)
from asv_benches.numpy_programs import bench_numpy, bench_workloads, traces
from asv_benches.support import report

SECTIONS = {
    "latency": bench_latency.lines,
    "c": bench_c.lines,
    "pool": bench_latency.pool_lines,
    "malloc": lambda quick: report.as_table(bench_c.malloc_lines(quick)),
    "export": bench_export.lines,
    "curve": lambda quick: report.as_table(bench_curve.lines(quick)),
    "threads": lambda quick: report.as_table(bench_threads.lines(quick)),
    "rounding": bench_rounding.lines,
    "growth": bench_growth.lines,
    "faults": bench_faults.lines,
    "layout": lambda quick: report.as_table(bench_layout.lines(quick)),
    "lifetime": bench_lifetime.lines,
    "prefault": bench_prefault.lines,
    "replay": bench_replay.lines,
    "numpy": bench_numpy.lines,
    "workloads": bench_workloads.lines,
    "traces": traces.lines,
}

if __name__ == "__main__":
    sys.exit(report.main(SECTIONS, __doc__))
