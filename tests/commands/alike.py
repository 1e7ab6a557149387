"""A program by Python itself and under ``arenapy run``, for tests that compare the two.

What `ours` runs is a fork of this process, whose place the program then takes: importing arenapy is
nearly all of the time that our command takes to start, and it is imported here.
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import arenapy
from arenapy.commands.run import command as run

TIMEOUT = 120
MAIN = Path(arenapy.__file__).with_name("__main__.py")  # as the console script
REPORT = "arenapy run: "


def start(command, **how):
    """A finished process, its streams as text unless `how` says otherwise."""
    if "stdin" not in how and "input" not in how:
        how["stdin"] = subprocess.DEVNULL
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **how}
    return subprocess.run(command, timeout=TIMEOUT, check=False, **how)


def plain(line, python=(), **how):
    """``python LINE``."""
    return start([sys.executable, *python, *line], **how)


def ours(line, python=(), *, whole=False, **how):
    """``arenapy run LINE``; `whole`: in a new process, as its users start it."""
    if whole:
        return start([sys.executable, *python, MAIN, "run", *line], **how)
    environment = how.get("env", {**os.environ})
    return start(["none"], preexec_fn=partial(become, python, line, environment), **how)


def become(python, line, environment):
    """What a process that was started as ``python ... -m arenapy run ...`` does."""
    sys.orig_argv[:] = [sys.executable, *python, "-m", "arenapy", "run", *line]
    os.environ.clear()
    os.environ.update(environment)
    os.closerange(3, 1024)  # as `subprocess` would, but for a function like this one
    status = 99
    sys.stdout = os.fdopen(1, "w", closefd=False)  # and not pytest's
    sys.stderr = os.fdopen(2, "w", closefd=False)
    try:
        status = run.main(line)
    except SystemExit as ended:
        status = ended.code
    finally:
        sys.stderr.flush()
        os._exit(status)


def split(errors):
    """Standard error: the program's own, and the report after it."""
    own, found, report = errors.partition(REPORT)
    return own, found + report
