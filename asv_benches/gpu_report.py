"""Every figure about GPUs in one run, beside its peers, with the verdict.

    python asv_benches/gpu_report.py --commit $(git rev-parse HEAD) [--quick] [--only ...]
        [--into asv_benches/gpu_results.json] [--trace FILE ...]

Needs a GPU. What is measured goes into the results file, under its section, stamped with the
machine, the driver and the commit; sections that are not measured stay as they were. gpu_tables.py
makes the documentation's tables of that file. The exit status is 1 if a promise is not kept.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

if not __package__:  # run as a script; behind what is installed
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from rich.console import Console

from arenapy import cuda
from asv_benches import gpu_copies, gpu_latency, gpu_pipeline
from asv_benches.report import machine, show

RESULTS = Path(__file__).with_name("gpu_results.json")
SECTIONS = {
    "latency": gpu_latency.lines,
    "copies": gpu_copies.lines,
    "pipeline": gpu_pipeline.lines,
}
PEERS = ("cuda-bindings", "cuda-core", "cupy-cuda13x", "torch", "rmm-cu13")


def stamp(commit):
    """What the figures depend on."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    drivers = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    found = machine() | {
        "gpu": cuda.memory_info().name,
        "driver": drivers[0],
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    for name in PEERS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def main():
    """Run, print, store; the exit status says whether all is met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", required=True, help="what is measured, for the stamp")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: to see that it runs")
    parser.add_argument("--into", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    options = parser.parse_args()
    console = Console(width=110)
    about = stamp(options.commit)
    console.print(", ".join(f"{name} {value}" for name, value in about.items()))
    stored = json.loads(options.into.read_text()) if options.into.exists() else {}
    kept = True
    for section in options.only:
        lines = list(SECTIONS[section](options.quick))
        show(console, section, lines)
        kept = kept and not any(line.verdict == "MISSED" for line in lines)
        stored[section] = {
            "stamp": about,
            "lines": [dataclasses.asdict(line) | {"verdict": line.verdict} for line in lines],
        }
        options.into.write_text(json.dumps(stored, indent=1) + "\n")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
