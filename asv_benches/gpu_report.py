"""Every figure about GPUs in one run, beside its peers, with the verdict.

    python asv_benches/gpu_report.py [--quick] [--only ...]
        [--into asv_benches/gpu_results.json --commit $(git rev-parse HEAD)]

Needs a GPU; the options are report.py's. gpu_replay.py stores the section that is missing here.
"""

import sys
from pathlib import Path

if not __package__:  # run as a script; behind what is installed
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from asv_benches import gpu_copies, gpu_latency, gpu_pipeline, report

SECTIONS = {
    "latency": gpu_latency.lines,
    "copies": gpu_copies.lines,
    "pipeline": gpu_pipeline.lines,
}

if __name__ == "__main__":
    sys.exit(report.main(SECTIONS, __doc__))
