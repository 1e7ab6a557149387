"""``python -m arenapy.testing``."""

import sys

from arenapy.commands.testing import main

if __name__ == "__main__":
    sys.exit(main())
