"""``python -m arenapy.testing``: ``reproduce`` a file of steps, or fuzz ``guided`` by coverage."""

import argparse
import faulthandler
import os
import shlex
import sys
from collections.abc import Sequence

from arenapy.base.text import printable, printable_lines
from arenapy.commands.command_line import Parser, check_outputs, seconds, whole
from arenapy.linux import outputs
from arenapy.linux.child_process import LATE, for_late_libraries
from arenapy.testing import guided
from arenapy.testing.steps import load

__all__ = ["main"]

COUNTS_EDGES = "undefined symbol: __sancov"


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m arenapy.testing``; the exit status: 0 if nothing was found.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments. None: those of this process.
    """
    parser = Parser(prog="python -m arenapy.testing")
    commands = parser.add_subparsers(dest="command", required=True)
    again = commands.add_parser("reproduce", help="repeat the steps of a file, to find a crash")
    again.add_argument("file", metavar="FILE", help="a file of steps from a state machine")
    _add_guided(commands.add_parser("guided", help="fuzz, guided by coverage of C code"))
    options = parser.parse_args(argv)
    if options.command == "guided":
        check_outputs(parser, {"--save": (options.save, outputs.STEPS)})
        return _guided(options)
    try:
        machine, program = load(options.file)
    except (ImportError, OSError, ValueError) as error:
        if "static TLS" in str(error) and LATE not in os.environ.get("GLIBC_TUNABLES", ""):
            os.execve(sys.executable, sys.orig_argv, for_late_libraries(os.environ))
        # Modules that were built for `guided` need its runtime.
        if COUNTS_EDGES in str(error) and guided.RUNTIME not in os.environ.get("LD_PRELOAD", ""):
            try:
                environment = guided.environment()
            except RuntimeError as missing:
                parser.error(f"{error}: {missing}")
            os.execve(sys.executable, sys.orig_argv, environment)
        if isinstance(error, ImportError):
            raise
        parser.error(str(error))
    faulthandler.enable()
    try:
        done = program.run(machine, echo=True)
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 1
    print(f"no fault found in {done} of {len(program)} steps")
    return 0


def _add_guided(parser: argparse.ArgumentParser) -> None:
    """Give a parser the options of `guided`."""
    parser.add_argument("target", metavar="PACKAGE:MACHINE", help="a machine, or an allocator")
    parser.add_argument("--corpus", required=True, metavar="DIR", help="folder of inputs to extend")
    parser.add_argument("--seconds", type=seconds, default=60, help="run for this time (60)")
    parser.add_argument(
        "--executions", type=whole(1, guided.MAX_NUMBER), help="limit of the inputs to run"
    )
    parser.add_argument(
        "--seed", type=whole(0, guided.MAX_NUMBER), default=0,
        help="seed of libFuzzer; 0 means a new one each time",
    )  # fmt: skip
    parser.add_argument("--by-chance", action="store_true", help="run random programs, to compare")
    parser.add_argument("--merge", metavar="DIR", action="append", default=[], help="add its files")
    parser.add_argument("--minimize", action="store_true", help="only minimize the corpus")
    parser.add_argument("--save", metavar="FILE", help="write the failing program to this file")
    parser.add_argument("--verbose", action="store_true", help="also print the output of libFuzzer")


def _guided(options: argparse.Namespace) -> int:
    """Run `guided`; its exit status."""
    try:
        for folder in options.merge:
            guided.add_inputs(options.corpus, folder)
        if options.minimize or options.merge:
            found = guided.minimize(options.target, options.corpus)
        elif options.by_chance:
            found = guided.by_chance(options.target, seconds=options.seconds)
        else:
            found = guided.guided(
                options.target,
                options.corpus,
                seconds=options.seconds,
                executions=options.executions,
                seed=options.seed,
            )
    except (OSError, RuntimeError) as error:
        print(printable_lines(str(error)), file=sys.stderr)
        return 2
    if options.verbose or found.lines:
        print(printable_lines(found.output))
    print(printable_lines(str(found)))
    if found.lines and options.save:
        outputs.write(options.save, ("\n".join(found.lines) + "\n").encode(), outputs.STEPS)
        print(printable(f"again: python -m arenapy.testing reproduce {shlex.quote(options.save)}"))
    return int(bool(found.lines))
