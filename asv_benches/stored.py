"""Results files: what was measured, on which machine, at which commit; a section each."""

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path

import numpy as np

import arenapy
from arenapy import cuda

PEERS = ("pyarrow", "cuda-bindings", "cuda-core", "cupy-cuda13x", "torch", "rmm-cu13")


def machine():
    """What the figures depend on."""
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
        "arenapy": arenapy.__version__,
        "load": os.getloadavg()[0],
    }


def has_gpu():
    """Whether there is a device that can be used."""
    try:
        return bool(cuda.devices())
    except cuda.Unavailable:
        return False


def stamp(commit):
    """The machine, its GPU if it has one, peers, the commit and the day."""
    found = machine()
    if has_gpu():
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        drivers = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
        found |= {"gpu": cuda.memory_info().name, "driver": drivers[0]}
    for name in PEERS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return found | {"commit": commit, "date": today}


def store(path, section, about, content):
    """Put a section into a results file, whose other sections stay as they are."""
    stored = json.loads(path.read_text()) if path.exists() else {}
    stored[section] = {"stamp": about} | content
    path.write_text(json.dumps(stored, indent=1) + "\n")
