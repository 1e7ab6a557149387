"""Locks between all processes that test on one machine."""

import contextlib
import fcntl
import tempfile
from pathlib import Path


@contextlib.contextmanager
def locked(name, how):
    """Hold the lock of a name, `fcntl.LOCK_SH` or `fcntl.LOCK_EX`."""
    with open(Path(tempfile.gettempdir(), f"arenapy-tests-{name}"), "w") as file:
        fcntl.flock(file, how)
        yield
