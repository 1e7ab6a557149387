"""The staging pipeline of ``arenapy demo --gpu``: its figures as lines of the report."""

import json
import tempfile
from pathlib import Path

from arenapy.demo import main

from .rounds import Line


def lines(quick):
    """Batches a second against what a program without pools and pinned memory does."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "demo.json")
        status = main(["--gpu", "--json", str(file), *(["--quick"] if quick else [])])
        if status:
            raise RuntimeError(f"arenapy demo --gpu ended with status {status}")
        found = json.loads(file.read_text())
    for name, way in found["ways"].items():
        yield Line("pipeline", f"{name}, a batch", way["ms_a_batch"], "ms")
    yield Line("pipeline", "arenapy / plain", found["ways"]["arenapy"]["times_as_fast_as_plain"],
               "x", 2.5, at_least=True)  # fmt: skip
    yield Line("pipeline", "of the copying, kernels ran at the same time",
               100 * found["traced"]["share_of_copying"], "%")  # fmt: skip
