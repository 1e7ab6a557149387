"""``arenapy advise``: which allocator a recorded program should use, and how large.

What lives here: the command line, and the order of the work. What does not: which settings are
tried (settings.py), how they are measured (measuring.py), which one is advised (advice.py).
"""

from __future__ import annotations

import argparse
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
from arenapy.commands.advise.measuring import Replays, shortened
from arenapy.commands.advise.settings import BASELINE, NAMES, OF_NUMPY, settings_for
from arenapy.commands.command_line import Parser, check_outputs, console, seconds, whole
from arenapy.commands.replay.command import read
from arenapy.commands.replay.program import program
from arenapy.commands.run.command import TRACE_KIND
from arenapy.linux import outputs
from arenapy.linux.limits import check_request
from arenapy.trace import Trace

__all__ = ["advise", "main", "show"]

SECONDS = 30.0
MAX_PASSES = 1_000_000
REPORT = outputs.report("arenapy advise")


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in NAMES:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(NAMES)}")
    if not names:
        raise argparse.ArgumentTypeError("name at least one allocator")
    return names


def _parser() -> Parser:
    parser = Parser(
        prog="arenapy advise",
        description="Replay a trace with several allocators and settings, and say in five lines "
        "which to use, what it gains and holds, and how sure that is.",
    )
    parser.add_argument("file", metavar="FILE", help="a trace, or torch's memory snapshot")
    parser.add_argument(
        "--seconds", type=seconds, default=SECONDS, metavar="SECONDS",
        help=f"how long to measure (default: {SECONDS:.0f}); three rounds are made in any case",
    )  # fmt: skip
    parser.add_argument(
        "--repeat", type=whole(1, MAX_PASSES), default=1, metavar="N",
        help="the program does N times what was recorded (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--with", dest="names", type=_names, metavar="NAME,...",
        help=f"try only these: {', '.join(NAMES)} (default: all that suit the trace)",
    )  # fmt: skip
    parser.add_argument(
        "--json", metavar="OUT", help="write all figures there, too; sizes are bytes"
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
        Of `NAMES`. By default those that suit the trace.
    seconds : float
        How long to measure.
    repeat : int
        How often the program does what was recorded.
    words : str
        The words of the program, for the line to paste.

    Returns
    -------
    dict
        What ``--json`` writes.

    Raises
    ------
    ValueError
        If the trace has no allocation.
    OutOfMemory
        If what the trace has live at once is more than this process can have.
    OSError
        If malloc could not be measured.
    """
    steps = program(trace)
    check_request(int(steps.live().max()), "a replay", "a smaller trace")
    numpy = trace.kind == TRACE_KIND
    names = names or (OF_NUMPY if numpy else NAMES)
    tried = [BASELINE, *(name for name in NAMES if name in names and name != BASELINE)]
    part = shortened(steps, seconds, repeat)
    summary = trace.summary()
    with tempfile.TemporaryDirectory(prefix="arenapy-advise-") as folder:
        replays = Replays(
            part, settings_for(part, tried), Path(folder),
            threads=summary.threads, seconds=seconds, passes=repeat,
        )  # fmt: skip
        _measure(replays)
    advice = choose(replays.times, replays.held)
    said = lines(
        advice, replays.settings, replays.times, replays.held,
        steps=len(part) * repeat, live=int(part.live().max()),
        recorded=summary.seconds if len(part) == len(steps) else 0.0,
        numpy=numpy, program=words, seconds=seconds,
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
            read(options.file), names=options.names, seconds=options.seconds, repeat=options.repeat
        )
    except ValueError as error:
        parser.error(str(error))
    print(*show(found), sep="\n")
    if options.json is not None:
        outputs.write(options.json, (json.dumps(found, indent=2) + "\n").encode(), REPORT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
