"""``python -m arenapy`` is the ``arenapy`` command."""

import sys

from arenapy.cli import main

if __name__ == "__main__":
    sys.exit(main())
