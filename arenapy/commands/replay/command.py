"""``arenapy replay``: a trace against allocators, each in a process of its own.

What lives here: the command, the processes, what their figures mean, the table. What a trace asks
for is in program.py, one run in worker.py, the loop in loop.pyx.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from arenapy.base.text import format_bytes, format_ns, printable
from arenapy.commands.command_line import Parser, console, whole
from arenapy.commands.replay.program import Program, program
from arenapy.commands.replay.worker import PEERS
from arenapy.linux.child_process import child_process, for_late_libraries
from arenapy.linux.limits import check_request
from arenapy.trace import Trace, from_torch, load, synthetic
from arenapy.trace.torch_snapshot import is_pickle

__all__ = ["Result", "add_device", "failure", "main", "read", "replay", "run_worker", "waits"]

#: A Bump or a Slab that needs more than this many times what is ever live is not run.
ROOM = 8

UTF_8 = {"PYTHONIOENCODING": "utf-8"}  # the figures of a worker, whatever the user's text is in
LONGEST_WAIT = 0.5  # seconds

#: Of the allocators that are told how much they will need: why it is more than is ever live.
WHY = {
    "bump": "it frees in reverse order only",
    "slab": "each block has the room of the largest",
}


@dataclass(frozen=True, slots=True)
class Result:
    """How one allocator did. None: not measured, `note` says why.

    Attributes
    ----------
    name : str
        As in ``--with``.
    event_ns : float or None
        Of an allocation or a free in a second pass, the first byte of every block written.
    written_ns : float or None
        In a first pass, every page of every block written: page faults are in it.
    peak_live : int
        The most bytes that the trace had live, as asked for.
    peak_reserved : int or None
        The most bytes that were resident for the allocator in the first pass.
    ratio : float or None
        ``peak_reserved / peak_live``.
    fragmentation : float or None
        At the moment of peak_reserved, the share of it that was in no live block's bytes.
    note : str
    """

    name: str
    event_ns: float | None
    written_ns: float | None
    peak_live: int
    peak_reserved: int | None
    ratio: float | None
    fragmentation: float | None
    note: str


def failure(returncode: int, stderr: str) -> str:
    """Why a process without figures has none.

    Parameters
    ----------
    returncode : int
        As `subprocess` gives it.
    stderr : str
        All that the process has written there.
    """
    if returncode < 0:
        return f"killed by signal {-returncode}"
    return stderr.strip().splitlines()[-1] if stderr.strip() else "failed"


def waits(seconds: float) -> Iterator[float]:
    """Split a time into short waits. Each counts as its own length, however late it ends.

    This process may be stopped meanwhile, as by Ctrl-Z, and so may the one that it waits for.
    """
    while seconds > 0:
        yield min(seconds, LONGEST_WAIT)
        seconds -= LONGEST_WAIT


def _words_of(process: subprocess.Popen[str], seconds: float) -> tuple[str, str]:
    """What a process writes until its end."""
    for wait in waits(seconds):
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=wait)
    raise OSError(f"it did not end within {seconds:.0f} s")


def run_worker(name: str, folder: Path, *words: str, seconds: float = math.inf) -> dict[str, Any]:
    """One process's figures.

    Parameters
    ----------
    name : str
        A key of `PEERS`.
    folder : Path
        Where the program was saved.
    *words : str
        Options of ``arenapy.commands.replay.worker``.
    seconds : float, optional
        The most that it may take.

    Raises
    ------
    OSError
        With the reason why there are no figures.
    """
    environment = PEERS[name].environment
    command = [sys.executable, "-P", "-m", "arenapy.commands.replay.worker", str(folder), name]
    with child_process(
        [*command, *words],
        env={**for_late_libraries(os.environ), **UTF_8, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    ) as process:
        figures, errors = _words_of(process, seconds)
    if process.returncode:
        raise OSError(failure(process.returncode, errors))
    found: dict[str, Any] = json.loads(figures)
    return found


def _measure(name: str, steps: Program, folder: Path) -> Result:
    live = steps.live()
    peak = int(live.max())
    nothing = None, None, peak, None, None, None
    needed = _needed(name, steps, peak)
    if needed > ROOM * peak:
        return Result(
            name,
            *nothing,
            f"not run: needs {format_bytes(needed)}, {format_bytes(needed - peak)} more than is "
            f"ever live, because {WHY[name]}",
        )
    try:
        fast = run_worker(name, folder)
        if name == "loop":
            return Result(name, fast["seconds"] / len(steps) * 1e9, *nothing[1:], "")
        full = run_worker(name, folder, "--written")
    except OSError as error:
        package = PEERS[name].package
        remedy = f"; Debian has it in {package}" if package else ""
        return Result(name, *nothing, f"{error}{remedy}")
    for found in fast, full:
        if found["steps"] < len(steps):
            return Result(
                name, *nothing, f"refused step {found['steps'] + 1} of {len(steps)}: out of memory"
            )
    reserved = full["peak"]
    return Result(
        name,
        fast["seconds"] / len(steps) * 1e9,
        full["seconds"] / len(steps) * 1e9,
        peak,
        reserved,
        reserved / peak if peak else None,
        max(0.0, 1 - int(live[full["at"]]) / reserved) if reserved else None,
        f"needs {format_bytes(needed - peak)} more than is ever live" if needed > peak else "",
    )


def _needed(name: str, steps: Program, peak: int) -> int:
    """Bytes that an allocator is made with, as far as it has to be told."""
    if name == "bump":
        return steps.bump_bytes()
    return steps.slab_bytes() if name == "slab" else peak


def replay(trace: Trace, names: Sequence[str]) -> list[Result]:
    """Replay a trace with allocators.

    Parameters
    ----------
    trace : Trace
    names : sequence of str
        Keys of `arenapy.commands.replay.worker.PEERS`.

    Returns
    -------
    list of Result
        In the order of `names`.

    Raises
    ------
    ValueError
        If a name is not known, or the trace has no allocation.
    OutOfMemory
        If what the trace has live at once is more than this process can have.
    """
    for name in names:
        if name not in PEERS:
            raise ValueError(f"{name!r} is not an allocator that is known here: {', '.join(PEERS)}")
    steps = program(trace)
    check_request(int(steps.live().max()), "a replay", "a smaller trace")
    with tempfile.TemporaryDirectory(prefix="arenapy-replay-") as folder:
        steps.save(Path(folder))
        return [_measure(name, steps, Path(folder)) for name in names]


def table(results: Sequence[Result]) -> Table:
    """Results as a table."""
    shown = Table()
    for name in "", "an event", "pages written", "peak reserved", "/ peak live", "not live":
        shown.add_column(name, justify="right" if name else "left")
    for one in results:
        shown.add_row(
            one.name,
            "" if one.event_ns is None else format_ns(one.event_ns),
            "" if one.written_ns is None else format_ns(one.written_ns),
            "" if one.peak_reserved is None else format_bytes(one.peak_reserved),
            "" if one.ratio is None else f"{one.ratio:.3f}",
            "" if one.fragmentation is None else f"{one.fragmentation:.1%}",
        )
    return shown


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(PEERS)}")
    if not names:
        raise argparse.ArgumentTypeError("name at least one allocator")
    return names


def _parser() -> Parser:
    width = max(map(len, PEERS))
    lines = [f"  {name:<{width}}  {peer.about}" for name, peer in PEERS.items()]
    parser = Parser(
        prog="arenapy replay",
        description="Replay a trace with other allocators, and measure their time and memory.\n"
        "Record a trace with arenapy.trace.record, or use a random one.",
        epilog="\n".join(["allocators:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("file", nargs="?", metavar="FILE", help="a trace, or torch's memory snapshot")
    what.add_argument("--synthetic", type=whole(), metavar="SEED", help="use a random trace")
    add_device(parser)
    parser.add_argument(
        "--with",
        dest="names",
        type=_names,
        default=[name for name in PEERS if name != "loop" and not name.endswith("-eager")],
        metavar="NAME,...",
        help="the allocators (default: all except the loop and the eager ones)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; sizes are in bytes")
    return parser


def add_device(parser: Parser) -> None:
    """Let the user choose a device of a snapshot: `read` takes it."""
    parser.add_argument("--device", type=whole(), metavar="N", help="device, of torch's snapshot")


def read(path: str, device: int | None) -> Trace:
    """The trace of a file, which may be torch's memory snapshot.

    Raises
    ------
    ValueError
        It is none, or a device is named of a trace without devices.
    """
    if is_pickle(path):
        return from_torch(path, device)
    if device is not None:
        raise ValueError(f"--device {device}: {path} is no snapshot of torch, so leave it out")
    return load(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``arenapy replay``; the exit status.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments after ``replay``. None: those of this process.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    seed = options.synthetic
    if seed is not None and options.device is not None:
        parser.error("--device and --synthetic do not go together")
    try:
        trace = read(options.file, options.device) if seed is None else synthetic(seed)
        results = replay(trace, options.names)
    except ValueError as error:
        parser.error(str(error))
    if options.json:
        what = {"trace": asdict(trace.summary()), "results": [asdict(one) for one in results]}
        print(json.dumps(what, indent=2))
    else:
        terminal = console()
        terminal.print(str(trace.summary()))
        terminal.print(table(results))
        for one in results:
            if one.note:
                terminal.print(printable(f"{one.name}: {one.note}"))
    return 0 if any(one.event_ns is not None for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
