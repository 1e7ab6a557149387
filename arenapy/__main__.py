"""``python -m arenapy`` is the ``arenapy`` command; so is this file, run by its path."""

import os
import sys

if not __package__:
    if not sys.flags.safe_path:
        del sys.path[0]  # this folder, whose modules would hide the standard library's
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from arenapy.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
