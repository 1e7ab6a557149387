"""Every figure about GPUs in one run, beside its peers, with the verdict.

    python asv_benches/gpu/report.py [--quick] [--only ...]
        [--into asv_benches/figures/gpu.json --commit $(git rev-parse HEAD)]

Needs a GPU; the options are those of host/report.py. replay.py stores the section that is missing
here.
"""

import sys
from pathlib import Path

if not __package__:  # run as a script; behind what is installed
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from asv_benches.gpu import copies, latency, streams
from asv_benches.support import report

SECTIONS = {
    "latency": latency.lines,
    "copies": copies.lines,
    "pipeline": copies.pipeline,
    "streams": streams.lines,
}

if __name__ == "__main__":
    sys.exit(report.main(SECTIONS, __doc__))
