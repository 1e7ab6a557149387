"""The demo's figures as a picture. The only module that imports matplotlib."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from arenapy._version import __version__
from arenapy.linux import outputs

from .measuring import Result

__all__ = ["save"]

COLOURS = ("#9aa0a6", "#1a73e8", "#c6dafc")
BAR = 0.26
INCHES_A_WORKLOAD = 0.72
ROOM_FOR_LABELS = 4
FAULTS_LINEAR_BELOW = 1  # the logarithmic scale starts here, so that zero has a place


def save(path: Path, results: Sequence[Result], conditions: str) -> None:
    """Write a PNG with the times and the faults of `results` side by side."""
    figure = Figure(figsize=(11, 1.9 + INCHES_A_WORKLOAD * len(results)), layout="constrained")
    times, faults = figure.subplots(1, 2, sharey=True)
    rows = np.arange(len(results))
    for place, colour in enumerate(COLOURS):
        timings = [result.timings[place] for result in results]
        at = rows + (place - 1) * BAR
        ms = [timing.ms for timing in timings]
        counts = [timing.faults for timing in timings]
        relative = [value / result.plain.ms for value, result in zip(ms, results, strict=True)]
        bars = times.barh(at, relative, BAR * 0.9, color=colour, label=timings[0].name)
        times.bar_label(bars, [f"{value:,.3f}" for value in ms], padding=3, fontsize=8)
        bars = faults.barh(at, counts, BAR * 0.9, color=colour)
        faults.bar_label(bars, [f"{value:,.0f}" for value in counts], padding=3, fontsize=8)
    times.set_yticks(rows, [result.name for result in results])
    times.invert_yaxis()
    times.margins(x=0.12)
    times.set_xlabel("time of an iteration, plain NumPy = 1 (milliseconds at the bars)")
    most = max(timing.faults for result in results for timing in result.timings)
    faults.set_xscale("symlog", linthresh=FAULTS_LINEAR_BELOW)
    faults.set_xlim(0, ROOM_FOR_LABELS * max(most, FAULTS_LINEAR_BELOW))
    faults.set_xlabel("minor page faults of an iteration (logarithmic)")
    for axes in (times, faults):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("NumPy temporaries in three places")
    figure.legend(loc="outside lower center", ncols=len(COLOURS), frameon=False)
    figure.text(0.995, 0.005, conditions, ha="right", va="bottom", fontsize=6, color="#5f6368")
    picture = io.BytesIO()
    made_by = {"Software": f"arenapy {__version__}"}
    figure.savefig(picture, format="png", dpi=150, metadata=made_by)
    outputs.write(path, picture.getvalue(), outputs.CHART)
