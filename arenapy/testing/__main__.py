"""``python -m arenapy.testing``: ``reproduce`` a file of steps, or fuzz ``guided`` by coverage."""

import faulthandler
import sys
from collections.abc import Sequence

from arenapy import outputs
from arenapy.command_line import Parser, check_outputs
from arenapy.testing import guided
from arenapy.testing.steps import load


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m arenapy.testing``; the exit status: 0 if nothing was found.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments. None: those of this process.
    """
    parser = Parser(prog="python -m arenapy.testing")
    commands = parser.add_subparsers(dest="command", required=True)
    again = commands.add_parser("reproduce", help="do the steps of a file again")
    again.add_argument("file", metavar="FILE", help="what a machine left behind")
    guided.add_arguments(commands.add_parser("guided", help="fuzz, led by coverage of C code"))
    options = parser.parse_args(argv)
    if options.command == "guided":
        check_outputs(parser, {"--save": (options.save, outputs.STEPS)})
        return guided.run(options)
    try:
        machine, program = load(options.file)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    faulthandler.enable()
    try:
        done = program.run(machine, echo=True)
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 1
    print(f"nothing found in {done} of {len(program)} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
