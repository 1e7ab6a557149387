"""Programs that end the process: made smaller, each try in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from arenapy.linux.child_process import child_process, for_late_libraries

__all__ = ["crashes", "smaller"]

PATIENCE = 60.0  # seconds of one try: a program that hangs does not crash


def crashes(lines: list[str]) -> bool:
    """Say whether the steps of a file end the process by a signal when they run again.

    Parameters
    ----------
    lines : list of str
        A file of steps. The first line says how the machine is imported. Each other line is a step.

    Returns
    -------
    bool

    Notes
    -----
    Thread-safety: may be used from any thread.

    Examples
    --------
    >>> import json
    >>> from arenapy.testing.attack import machine_for
    >>> from arenapy.testing.crashes import crashes
    >>> header = {"arenapy.testing": 1, **machine_for(library="libc.so.6").recipe()}
    >>> crashes([json.dumps(header), '{"step": "start", "arguments": {"config": {}}}'])
    False
    """
    with tempfile.TemporaryDirectory(prefix="arenapy-crash-") as folder:
        path = os.path.join(folder, "steps.jsonl")
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
        command = [sys.executable, "-m", "arenapy.testing", "reproduce", path]
        environment = {
            **for_late_libraries(os.environ),
            "ARENAPY_STEPS": os.path.join(folder, "again.jsonl"),
        }
        # Not pipes, which may have no end: a process that the steps start has them, too.
        nowhere = subprocess.DEVNULL
        with child_process(command, env=environment, stdout=nowhere, stderr=nowhere) as process:
            try:
                return process.wait(timeout=PATIENCE) < 0
            except subprocess.TimeoutExpired:
                return False


def smaller(
    lines: list[str],
    seconds: float = 60.0,
    still: Callable[[list[str]], bool] = crashes,
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """As few of the steps as still crash.

    Parameters
    ----------
    lines : list of str
        A file of steps. The first two, the import and the start, stay.
    seconds : float
        The time after which no further try begins.
    still : callable
        Whether fewer lines do it, too.
    clock : callable
        Returns the time in seconds.

    Returns
    -------
    list of str

    Notes
    -----
    Thread-safety: may be used from any thread.

    Examples
    --------
    >>> from arenapy.testing.crashes import smaller
    >>> smaller(["import", "start", "a", "b", "c", "d"], still=lambda lines: "c" in lines)
    ['import', 'start', 'c']
    """
    end = clock() + seconds
    head, steps = lines[:2], lines[2:]
    part = max(len(steps) // 2, 1)
    while steps:
        index, before = 0, len(steps)
        while index < len(steps):
            if clock() >= end:
                return head + steps
            fewer = steps[:index] + steps[index + part :]
            if still(head + fewer):
                steps = fewer
            else:
                index += part
        if part == 1 and len(steps) == before:
            break
        part = max(part // 2, 1)
    return head + steps
