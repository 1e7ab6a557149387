"""``python -m arenapy.testing reproduce FILE``: do again what a machine did before it crashed."""

import argparse
import faulthandler
import sys
from collections.abc import Sequence

from arenapy.testing.steps import load


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m arenapy.testing``; the exit status: 0 if nothing was found.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments. None: those of this process.
    """
    parser = argparse.ArgumentParser(prog="python -m arenapy.testing", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    again = commands.add_parser("reproduce", help="do the steps of a file again")
    again.add_argument("file", metavar="FILE", help="what a machine left behind")
    options = parser.parse_args(argv)
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
