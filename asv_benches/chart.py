"""The chart of README.md, drawn from the results file: docs/_static/speed.svg.

    python asv_benches/chart.py

The figures that it shows stand in the description of the file, too, where
tests/benches/test_figures.py compares them with the results. Needs matplotlib.
"""

import json
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "gpu_results.json"
CHART = HERE.parent / "docs" / "_static" / "speed.svg"
SIZE = "1 MiB"
#: What the bars are called: the lines of the results.
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
    lines = json.loads(RESULTS.read_text())["latency"]["lines"]
    found = {line["what"]: line["value"] for line in lines if line["section"] == "latency"}
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
    stamp = json.loads(RESULTS.read_text())["latency"]["stamp"]
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
