"""``arenapy run --advise``: run and record a program, then say which allocator it should use.

The program is a child here, which `arenapy run` otherwise becomes. It has the terminal and all
descriptors, and its exit status is that of the command. NumPy is imported here when it has ended.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from arenapy.base.text import printable_lines
from arenapy.commands.run.command import Options, command, program_words

__all__ = ["run_and_advise"]

HEEDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def run_and_advise(options: Options, *, report: bool, json_file: str | None) -> int:
    """Run a program, and print advice on standard error; the program's exit status.

    Parameters
    ----------
    options : Options
        Of ``arenapy run``.
    report, json_file
        As for `command`.

    Raises
    ------
    OSError
        The program cannot be started.
    """
    with (
        tempfile.TemporaryDirectory(prefix="arenapy-run-") as folder,
        _ends_of_children_seen() as ignored,
        _group_witness() as witness,
    ):
        file = options.trace or os.path.join(folder, "program.trace")
        before = _state(file)
        error, write = os.pipe()  # closed where the program starts
        # Until `_wait` knows what to do with a signal.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, HEEDED)
        pid = os.fork()
        if pid == 0:
            try:
                for number in HEEDED:  # as of the program that is to start
                    if signal.getsignal(number) != signal.SIG_IGN:
                        signal.signal(number, signal.SIG_DFL)
                if ignored:
                    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                words, environment = command(
                    options, report=report, json_file=json_file, trace=file, sites=options.sites
                )
                os.execve(words[0], words, environment)
            except OSError as failed:
                os.write(write, str(failed).encode(errors="replace"))
            finally:
                os._exit(127)  # and never this process's own exit
        os.close(write)
        for number in signal.sigpending() & {*HEEDED}:  # the program lacks it if it came before
            signal.sigtimedwait([number], 0)
            _whole_group_got(number, witness)
            os.kill(pid, number)
        status = _wait(pid, mask, witness)
        with open(error) as failure:
            if text := failure.read():
                raise OSError(text)
        if status < 0 or status == 128 + signal.SIGINT:
            return 128 - status if status < 0 else status
        _say(_advice(file if _state(file) != before else None, options))
    return status


def _say(lines: list[str]) -> None:
    """On the process's standard error, if it can be written: the status is the program's."""
    if sys.__stderr__ is not None:  # else another file may have its number
        with suppress(OSError):
            os.write(2, "".join(f"{line}\n" for line in lines).encode(errors="replace"))


def _state(file: str) -> tuple[int, int] | None:
    """Time of the last change and size of a file, to see later if it was written. None: no file."""
    try:
        found = os.stat(file)
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size


def _advice(file: str | None, options: Options) -> list[str]:
    """Lines for the terminal. `file` is None if the program has recorded nothing."""
    if file is None:
        return ["arenapy run: no advice: the program did not import NumPy"]
    from arenapy.commands.advise.command import advise, show
    from arenapy.trace import load

    try:
        found = advise(load(file), words=shlex.join(program_words(options)))
    except (MemoryError, OSError, ValueError) as error:
        return [printable_lines(f"arenapy run: no advice: {error}")]
    return ["arenapy advise", *(f"  {line}" for line in show(found))]


@contextmanager
def _ends_of_children_seen() -> Iterator[bool]:
    """Let this process wait for children. Gives whether SIGCHLD was ignored, which forbids it."""
    ignored = signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    if ignored:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield ignored
    finally:
        if ignored:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)


@contextmanager
def _group_witness() -> Iterator[socket.socket]:
    """A process that knows which signals the whole process group got. See `_whole_group_got`."""
    link, its_link = socket.socketpair()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, HEEDED)
    pid = os.fork()
    if pid == 0:
        try:
            link.close()
            while number := its_link.recv(1):
                its_link.send(bytes([signal.sigtimedwait(number, 0) is not None]))
        finally:
            os._exit(0)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    its_link.close()
    try:
        yield link
    finally:
        link.close()
        os.waitpid(pid, 0)


def _whole_group_got(number: int, witness: socket.socket) -> bool:
    """True if a signal that came was sent to the process group, and not to this process alone."""
    try:
        witness.send(bytes([number]), socket.MSG_NOSIGNAL)
        return witness.recv(1) == b"\1"
    except OSError:  # it was killed
        return False


def _wait(pid: int, mask: set[int], witness: socket.socket) -> int:
    """The exit status of a child, which alone ends by Ctrl-C and what this process is sent.

    Meanwhile the signal mask is `mask`.
    """
    came: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        came.append(number)
        if len(came) > 1:  # this interrupted itself, and goes on
            return
        while came:
            with suppress(ProcessLookupError):  # it has ended
                apart = os.getpgid(pid) != os.getpgrp()  # it has left the group
                if apart or not _whole_group_got(came[0], witness):
                    os.kill(pid, came[0])
            del came[0]

    before = {number: signal.getsignal(number) for number in HEEDED}
    for number in HEEDED:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
