"""The process in which ``arenapy advise`` replays a program on a GPU, one setting after the other.

What lives here: the process, seen from outside. What does not: the replays (device_worker.py).

One process runs all settings. A process that imports torch or CuPy and makes a CUDA context takes
seconds to start, which is more than a replay takes. Processes that lived beside each other would
each keep a context, whose memory the replays then lack.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from arenapy.commands.replay.command import UTF_8, failure, waits
from arenapy.linux.child_process import child_process

__all__ = ["COMMAND", "DeviceProcess"]

#: The command to start, without its argument: the folder of the program.
COMMAND = [sys.executable, "-P", "-m", "arenapy.commands.advise.device_worker"]


class DeviceProcess:
    """Replays in one process, which starts at the first one; another one starts if it ends."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._ending = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    def __call__(self, name: str, folder: Path, *words: str, seconds: float) -> dict[str, Any]:
        """One setting's figures.

        Parameters
        ----------
        name, folder, *words, seconds
            As for `run_worker`.

        Raises
        ------
        OSError
            With the reason why there are no figures.
        """
        if self._process is None:
            errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
            self._errors = self._ending.enter_context(errors)
            self._process = self._ending.enter_context(child_process(
                [*COMMAND, str(folder)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
                env={**os.environ, **UTF_8}, encoding="utf-8",
            ))  # fmt: skip
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and its output says so
            process.stdin.write(json.dumps([name, *words]) + "\n")
            process.stdin.flush()
        if not any(select.select([process.stdout], [], [], wait)[0] for wait in waits(seconds)):
            self.end()
            raise OSError(f"it did not end within {seconds:.0f} s")
        line = process.stdout.readline()
        if not line:
            status = process.wait()
            self._errors.seek(0)
            said = self._errors.read()
            self.end()
            raise OSError(failure(status, said))
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise OSError(found["error"])
        return found

    def end(self) -> None:
        """End the process."""
        self._process = None
        with contextlib.suppress(BrokenPipeError):  # of what it has not read
            self._ending.close()
