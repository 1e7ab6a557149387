"""``arenapy advise``: which allocator a recorded program should use, and how large.

What lives here: the command line, and the order of the work. What does not: which settings are
tried (settings.py), how they are measured (measuring.py), which one is advised (advice.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn

from arenapy.base.text import printable
from arenapy.commands.advise.advice import choose, lines
from arenapy.commands.advise.device_process import DeviceProcess
from arenapy.commands.advise.measuring import EVENT_SECONDS, Replays, shortened
from arenapy.commands.advise.settings import (
    BASELINE,
    DEVICE_BASELINE,
    DEVICE_NAMES,
    NAMES,
    OF_NUMPY,
    settings_for,
)
from arenapy.commands.command_line import Parser, check_outputs, console, seconds, whole
from arenapy.commands.compare.verdict import LEAST_ROUNDS
from arenapy.commands.replay.command import add_device, read, run_worker
from arenapy.commands.replay.device import streams_of
from arenapy.commands.replay.program import program, save_array
from arenapy.commands.run.command import TRACE_KIND
from arenapy.linux import outputs
from arenapy.linux.limits import check_request
from arenapy.trace import Trace

__all__ = ["advise", "main", "show"]

SECONDS = 30.0
TORCH_SECONDS, DRIVER_SECONDS = 5e-6, 100e-6  # of an event: a call from Python; one that waits
ALL_NAMES = tuple(dict.fromkeys([*NAMES, *DEVICE_NAMES]))
MAX_PASSES = 1_000_000
REPORT = outputs.report("arenapy advise")


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in ALL_NAMES:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(ALL_NAMES)}")
    if not names:
        raise argparse.ArgumentTypeError("name at least one allocator")
    return names


def _parser() -> Parser:
    parser = Parser(
        prog="arenapy advise",
        description="Replay a trace with several allocators and settings, and print five lines: "
        "which one to use, how to use it, how much time it saves, how much memory it holds, and "
        "how sure this is.",
    )
    parser.add_argument("file", metavar="FILE", help="a trace, or torch's memory snapshot")
    add_device(parser)
    parser.add_argument(
        "--seconds", type=seconds, default=SECONDS, metavar="SECONDS",
        help=f"how long to measure (default: {SECONDS:.0f}); at least {LEAST_ROUNDS} rounds",
    )  # fmt: skip
    parser.add_argument(
        "--repeat", type=whole(1, MAX_PASSES), default=1, metavar="N",
        help="the program does N times what was recorded (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--with", dest="names", type=_names, metavar="NAME,...",
        help=f"try only these: {', '.join(ALL_NAMES)} (default: all that suit the trace)",
    )  # fmt: skip
    parser.add_argument(
        "--json", metavar="OUT", help="also write all figures to this file; sizes are in bytes"
    )
    return parser


def advise(
    trace: Trace,
    *,
    names: Sequence[str] | None = None,
    seconds: float = SECONDS,
    repeat: int = 1,
    words: str = "SCRIPT",
) -> dict[str, Any]:
    """Measure, and choose.

    Parameters
    ----------
    trace : Trace
    names : sequence of str, optional
        Of `ALL_NAMES`. By default those that suit the trace.
    seconds : float
        How long to measure.
    repeat : int
        How often the program does what was recorded.
    words : str
        The words of the program, for the line to paste.

    Returns
    -------
    dict
        The data that ``--json`` writes.

    Raises
    ------
    ValueError
        If the trace has no allocation, or a name does not suit it.
    OutOfMemory
        If what the trace has live at once is more than this process can have.
    OSError
        If the baseline could not be measured, or there is no GPU for a trace of a GPU's memory.
    """
    steps, summary = program(trace), trace.summary()
    numpy, device = trace.kind == TRACE_KIND, ", device" in trace.kind
    known: Sequence[str] = OF_NUMPY if numpy else NAMES
    baseline, event_seconds = BASELINE, EVENT_SECONDS
    if device:
        known, baseline, event_seconds = _on_a_device(trace)
    else:
        check_request(int(steps.live().max()), "a replay", "a smaller trace")
    for name in names or ():
        if name != baseline and name not in known:
            raise ValueError(
                f"{name!r} cannot be tried with a trace of {trace.kind}: choose among "
                f"{', '.join(known)}"
            )
    tried = [baseline, *(name for name in known if name in (names or known) and name != baseline)]
    part, passes = shortened(steps, seconds, repeat, event_seconds)
    with (
        tempfile.TemporaryDirectory(prefix="arenapy-advise-") as folder,
        DeviceProcess() as device_process,
    ):
        if device:
            save_array(Path(folder) / "streams.npy", streams_of(trace))
        replays = Replays(
            part, settings_for(part, tried, device), Path(folder),
            threads=summary.threads, seconds=seconds, passes=passes, repeat=repeat,
            worker=device_process if device else run_worker,
        )  # fmt: skip
        _measure(replays)
    advice = choose(replays.times, replays.held)
    said = lines(
        advice, replays.settings, replays.times, replays.held,
        steps=len(part) * repeat, live=int(part.live().max()),
        recorded=summary.seconds if len(part) == len(steps) else 0.0,
        numpy=numpy, program=words, seconds=max(seconds, replays.spent()),
    )  # fmt: skip
    return {
        "report": "arenapy advise",
        "use": advice.name,
        "word": advice.word,
        "line": dict(said)["paste"],
        "prefault_bytes": replays.settings[advice.name].prefault,
        "ratio": None if advice.ratio is None else asdict(advice.ratio),
        "as_good": advice.as_good,
        "steps": len(part),
        "steps_of_the_trace": len(steps),
        "repeat": repeat,
        "passes": passes,
        "live_bytes": int(part.live().max()),
        "settings": [
            {
                "name": name,
                "peer": one.peer,
                "arguments": dict(one.arguments),
                "prefault_bytes": one.prefault,
            }
            for name, one in replays.settings.items()
        ],
        "held_bytes": replays.held,
        "seconds": replays.times,
        "not_compared": replays.notes,
        "advice": dict(said),
    }


def _on_a_device(trace: Trace) -> tuple[Sequence[str], str, float]:
    """Of a trace of a GPU's memory: names to try, the baseline, and the seconds of an event."""
    from arenapy import cuda

    try:
        why = "" if cuda.devices() else "there is none"
    except (cuda.Unavailable, cuda.CudaError) as error:
        why = str(error)
    if why:
        raise OSError(f"this trace is of a GPU's memory, and its replays need a GPU: {why}")
    if trace.kind.startswith("torch") and importlib.util.find_spec("torch") is not None:
        names = [name for name in DEVICE_NAMES if name != DEVICE_BASELINE]
        return names, "torch", TORCH_SECONDS
    return DEVICE_NAMES, DEVICE_BASELINE, DRIVER_SECONDS


def _measure(replays: Replays) -> None:
    """All replays, with a progress display on standard error if that is a terminal."""
    terminal = console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn()
    shown = Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal)
    with shown as progress:
        task = progress.add_task("", total=replays.seconds)
        for name in replays.warm_up():
            progress.update(task, description=f"memory: {name}", completed=replays.spent())
        for name in replays.rounds():
            progress.update(task, description=f"time: {name}", completed=replays.spent())


def show(found: dict[str, Any]) -> list[str]:
    """The five lines, and another one if only a part was replayed."""
    said = [f"{word:<6} {printable(text)}" for word, text in found["advice"].items()]
    if found["steps"] < found["steps_of_the_trace"]:
        share = found["steps"] / found["steps_of_the_trace"]
        said.append(
            f"part   only the first {share:.1%} of the trace was replayed, because all of it takes "
            "too long; give more --seconds"
        )
    return said


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``arenapy advise``; the exit status.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments after ``advise``. None: those of this process.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    check_outputs(parser, {"--json": (options.json, REPORT)}, {"FILE": options.file})
    try:
        found = advise(
            read(options.file, options.device),
            names=options.names, seconds=options.seconds, repeat=options.repeat,
        )  # fmt: skip
    except ValueError as error:
        parser.error(str(error))
    if options.json is not None:
        outputs.write(options.json, (json.dumps(found, indent=2) + "\n").encode(), REPORT)
    print(*show(found), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
