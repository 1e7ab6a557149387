"""Common parts of the command lines: the parser, numbers, files, text for the terminal.

What lives here: what must be alike in all commands. What does not: any option. A number that an
option takes has bounds, so that what a user types is refused by name and never overflows later.
"""

from __future__ import annotations

import argparse
import re
import signal
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from arenapy.base.text import printable_lines
from arenapy.linux import outputs

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "MOST", "Parser", "check_outputs", "console", "seconds", "signal_name", "size", "whole",
]  # fmt: skip

MOST = 2**63 - 1  # of a number
MAX_SECONDS = 1e9
SIZE = re.compile(r"([0-9]+)(?:\.([0-9]+))?\s*([KMGT]?)(?:i?B)?", re.IGNORECASE | re.ASCII)
PYTHONS = {f"-{letter}" for letter in "bBdEiIOPqRsuvWxX"}  # Python's options
SHOWN = 40  # characters of a wrong argument that a message repeats


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviations, and whose messages a terminal can show."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and end with status 2."""
        unknown, found, words = message.partition("unrecognized arguments: ")
        if found and not unknown and words[:2] in PYTHONS:
            word = words.split()[0]
            message += f"; for this option of Python: python {word} -m {self.prog} ..."
        super().error(printable_lines(message))


def console(**how: Any) -> Console:
    """A console that shows text as it is: brackets, colons and digits mean nothing to it."""
    from rich.console import Console  # not for commands that print nothing

    return Console(markup=False, emoji=False, highlight=False, **how)


def whole(least: int = 0, most: int = MOST) -> Callable[[str], int]:
    """The type of an option that is a whole number within bounds."""

    def number(text: str) -> int:
        try:
            value = int(text) if text.isascii() else None  # longer than 4300 digits: ValueError
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{_shown(text)} is not a whole number from {least} to {_bound(most)}"
            )
        return value

    return number


def seconds(text: str) -> float:
    """The type of an option that is a time."""
    try:
        value = float(text) if text.isascii() else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{_shown(text)} is not a number of seconds above 0, {MAX_SECONDS:.0f} at most"
        )
    return value


def size(text: str) -> int:
    """Bytes: ``4G``, ``512M``, ``1.5 GiB``, ``4096``. Units are powers of 1024.

    Raises
    ------
    argparse.ArgumentTypeError
        It is none, or 0, or beyond `MOST`.
    """
    match = SIZE.fullmatch(text.strip()) if len(text) <= SHOWN else None
    nbytes = 0
    if match:
        shift = 10 * " KMGT".index(match[3].upper() or " ")
        part = match[2] or "0"
        nbytes = (int(match[1]) << shift) + (int(part) << shift) // 10 ** len(part)
    if not 0 < nbytes <= MOST:
        raise argparse.ArgumentTypeError(f"{_shown(text)} is not a size; say 512M or 4G")
    return nbytes


def check_outputs(
    parser: argparse.ArgumentParser,
    written: Mapping[str, tuple[outputs.Path | None, outputs.Kind]],
    read: Mapping[str, outputs.Path | None] | None = None,
) -> None:
    """End with status 2 unless every file of the command line can be written, and costs nothing.

    Parameters
    ----------
    parser : ArgumentParser
    written : mapping
        By option, the file, None if it was not given, and what it will be.
    read : mapping, optional
        Other files that the command line names.
    """
    for option, (path, kind) in written.items():
        if path is not None:
            try:
                outputs.check(path, kind)
            except (OSError, ValueError) as error:
                parser.error(f"{option}: {error}")
    files = {option: path for option, (path, _) in written.items()} | dict(read or {})
    try:
        outputs.check_apart({what: path for what, path in files.items() if path is not None})
    except (OSError, ValueError) as error:
        parser.error(str(error))


def signal_name(number: int) -> str:
    """As people know it: SIGABRT; signal 35, which is one of those without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _bound(most: int) -> str:
    return "2**63 - 1" if most == MOST else str(most)


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")
