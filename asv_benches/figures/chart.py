"""The chart of README.md, drawn from the results file: docs/_static/speed.svg.

    python asv_benches/figures/chart.py

The figures that it shows stand in the file's description too, where a test compares them with the
results. Needs matplotlib.
"""

import json
import sys
from pathlib import Path

if not __package__:  # run as a script; behind what is installed
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from asv_benches.support.results import load

CHART = Path(__file__).resolve().parents[2] / "docs" / "_static" / "speed.svg"
SIZE = "1 MiB"
#: Names of the bars, and their lines in the results.
BARS = {
    "arenapy": "arenapy.Pool",
    "CuPy pool": "CuPy MemoryPool.malloc",
    "RMM arena": "RMM ArenaMemoryResource",
    "cudaMallocAsync": "cuMemAllocAsync, cuMemFreeAsync",
    "cuda.core": "cuda.core DeviceMemoryResource",
    "torch": "torch caching_allocator_alloc",
    "RMM pool": "RMM PoolMemoryResource",
    "cudaMalloc": "cuMemAlloc, cuMemFree",
}
OURS, OTHERS, INK = "#0072b2", "#b8b8b8", "#222222"  # told apart by the colour-blind, and in grey


def values():
    """{bar: microseconds}, fastest first."""
    found = {}
    for line in load("gpu.json")["latency"]["lines"]:
        found.setdefault(line.what, line.value)
    bars = {bar: found[f"{name}, {SIZE}"] for bar, name in BARS.items()}
    return dict(sorted(bars.items(), key=lambda item: item[1]))


def draw():
    """Write the chart."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "arenapy"  # the same bytes each time
    mpl.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    shown = values()
    stamp = load("gpu.json")["latency"]["stamp"]
    figure, axes = pyplot.subplots(figsize=(8, 3.4), layout="constrained")
    names = list(shown)[::-1]
    colours = [OURS if name == "arenapy" else OTHERS for name in names]
    axes.barh(names, [shown[name] for name in names], color=colours)
    for place, name in enumerate(names):
        axes.text(shown[name] * 1.12, place, f"{shown[name]:.2g} µs", va="center", color=INK)
    axes.set_xscale("log")
    axes.set_xlim(0.01, 4 * max(shown.values()))
    axes.set_xticks([])
    axes.minorticks_off()
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(left=False, labelcolor=INK)
    axes.set_title(
        f"To get {SIZE} of GPU memory from Python, and give it back (log scale; {stamp['gpu']})",
        loc="left", fontsize=11, color=INK,
    )  # fmt: skip
    CHART.parent.mkdir(exist_ok=True)
    figure.savefig(CHART, metadata={"Date": None, "Description": json.dumps(shown)})


if __name__ == "__main__":
    draw()
