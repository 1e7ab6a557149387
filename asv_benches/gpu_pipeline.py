"""The staging pipeline of ``arenapy demo --gpu``: its figures as lines of the report."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from .rounds import Line


def lines(quick):
    """Batches a second against what a program without pools and pinned memory does."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "demo.json")
        # In a process of its own: other libraries' streams share the device's queues with ours.
        command = [sys.executable, "-m", "arenapy", "demo", "--gpu", "--json", str(file)]
        subprocess.run([*command, *(["--quick"] if quick else [])], check=True)
        found = json.loads(file.read_text())
    for name, way in found["ways"].items():
        yield Line("pipeline", f"{name}, a batch", way["ms_a_batch"], "ms")
    yield Line("pipeline", "arenapy / plain", found["ways"]["arenapy"]["times_as_fast_as_plain"],
               "x", 2.5, at_least=True)  # fmt: skip
    yield Line("pipeline", "of the copying, kernels ran at the same time",
               100 * found["traced"]["share_of_copying"], "%")  # fmt: skip
