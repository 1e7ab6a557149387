"""Results files: the figures that the pages of docs/ show, on which machine and at which commit.

A file has sections. Each has a stamp, and either `lines`, which are Rows, or a table: `head` and
`rows`, which are cells as the page shows them. A row is one line of the file, so that a new
measurement is a difference that people can read. Samples are not kept: a command makes them again.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np

from arenapy import cuda

FOLDER = Path(__file__).resolve().parents[1] / "figures"
PEERS = ("pyarrow", "cuda-bindings", "cuda-core", "cupy-cuda13x", "torch", "rmm-cu13")
DIGITS = 8  # of a figure; the pages show three


class Row(NamedTuple):
    """A figure. `kept` says whether it is what was promised; None: nothing was."""

    what: str
    value: float
    unit: str = "x"
    kept: bool | None = None
    target: str = ""

    @classmethod
    def of(cls, line):
        """Of a Line of a report."""
        target = "" if line.limit is None else f"{'≥' if line.at_least else '≤'} {line.limit:g}"
        kept = {"met": True, "MISSED": False}.get(line.verdict)
        return cls(line.what, line.value, line.unit, kept, target)

    def stored(self):
        """The line as the file has it: rounded, and without empty cells at its end."""
        value = rounded(self.value)
        cells = [self.what, value, self.unit, self.kept, self.target]
        return cells if self.target else cells[:4] if self.kept is not None else cells[:3]


def rounded(value):
    """To DIGITS digits, or to a whole number that has more."""
    value = round(value) if abs(value) >= 10**DIGITS else float(f"{value:.{DIGITS}g}")
    return int(value) if value == int(value) else value


def load(name):
    """{section: what was measured} of a file in `figures/`, its lines as Rows; empty: no such."""
    path = FOLDER / name
    found = json.loads(path.read_text()) if path.exists() else {}
    for section in found.values():
        if "lines" in section:
            section["lines"] = [Row(*cells) for cells in section["lines"]]
    return found


def store(path, section, about, **content):
    """Put a section into a results file, whose other sections stay as they are."""
    stored = json.loads(path.read_text()) if path.exists() else {}
    if "lines" in content:
        content["lines"] = [row.stored() for row in content["lines"]]
    stored[section] = {"stamp": about} | content
    path.write_text(as_text(stored))


def as_text(stored):
    """JSON with a line for each field of a section, and one for each row of its table."""

    def field(value):
        if isinstance(value, list) and value and isinstance(value[0], list):
            return "[\n  " + ",\n  ".join(dump(row) for row in value) + "\n ]"
        return dump(value)

    def dump(value):
        return json.dumps(value, ensure_ascii=False)

    sections = (
        f"{dump(name)}: {{\n"
        + ",\n".join(f" {dump(key)}: {field(value)}" for key, value in found.items())
        + "\n}"
        for name, found in stored.items()
    )
    return "{\n" + ",\n".join(sections) + "\n}\n"


def machine():
    """The machine and the versions that the figures depend on."""
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def has_gpu():
    """True if there is a device that can be used."""
    try:
        return bool(cuda.devices())
    except cuda.Unavailable:
        return False


def stamp(commit):
    """The machine, its GPU if it has one, the peers that are here, the commit and the day."""
    found = machine()
    if has_gpu():
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        drivers = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
        found |= {"gpu": cuda.memory_info().name, "driver": drivers[0]}
    for name in PEERS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return found | {"commit": commit, "date": today}
