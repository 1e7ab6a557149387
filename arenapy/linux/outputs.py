"""The files that commands and recorders write, and the rule that keeps a user's files safe.

An output may take the place of an output of the same kind, which is known by its first bytes, or of
an empty file. Anything else that exists is refused, before the work begins and again before
writing: a forgotten file name (``arenapy run --json script.py``) must not cost the script.

A whole output goes to a file beside its place, which then takes that place in one step, so that
what was there stays there until the new file is complete. A trace grows while a program runs and is
written where it lies; a lock on it refuses everybody else who would write there.

This module imports nothing of the package: a program without NumPy reports by it, too.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeAlias

from arenapy.linux import vm

__all__ = [
    "CHART",
    "PAGE",
    "STEPS",
    "TRACE",
    "Kind",
    "absolute",
    "begin",
    "check",
    "check_apart",
    "report",
    "write",
]

LOOKED_AT = 1024  # bytes of a file that tell its kind
STANDARD = {1: "standard output", 2: "standard error"}
MAX_LINKS = 40  # from one name to the next, as for the kernel
#: Errors of a folder or a mount in which a file cannot be replaced, but perhaps written.
IN_PLACE = (errno.EACCES, errno.EPERM, errno.EBUSY, errno.EXDEV)
#: Errors of a file system that has no hard links.
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class Kind(NamedTuple):
    """A kind of output, and how to recognize it.

    Attributes
    ----------
    name : str
        For messages.
    begins : bytes
        Its first bytes.
    holds : bytes
        Bytes that are also in the first `LOOKED_AT` of them.
    """

    name: str
    begins: bytes
    holds: bytes = b""


def report(command: str) -> Kind:
    """The JSON of a command: an object whose first key says whose it is."""
    return Kind(f"a report of {command}", b'{\n  "report": "%b"' % command.encode())


TRACE = Kind("a trace", b"arenatrc")
PAGE = Kind("a page of arenapy trace", b"<!doctype html>\n", b'content="arenapy trace">')
STEPS = Kind("a file of steps", b'{"arenapy.testing": ')
CHART = Kind("a chart of arenapy demo", b"\x89PNG\r\n\x1a\n", b"Software\0arenapy")

Path: TypeAlias = str | os.PathLike[str]


def check(path: Path, kind: Kind) -> None:
    """Raise what `write` would, before there is anything to write.

    Parameters
    ----------
    path : path-like
    kind : Kind
        The kind of the output to write.

    Raises
    ------
    FileExistsError
        The present file is neither empty nor of this kind.
    OSError
        The file cannot be written: it is a folder, there is no folder for it, somebody else is
        writing it, this process may not.
    """
    with _held(path, kind):
        pass


def check_apart(named: Mapping[str, Path]) -> None:
    """Refuse two names of one file, by whatever links.

    Parameters
    ----------
    named : mapping
        The purpose of each file, and its path.

    Raises
    ------
    ValueError
        Two are the same file.
    """
    known: dict[object, str] = {}
    for what, path in named.items():
        try:
            found = os.stat(path)
        except OSError:
            key: object = os.path.realpath(absolute(path))
        else:
            if not stat.S_ISREG(found.st_mode):
                continue  # a terminal or a pipe may be both standard input and output
            key = found.st_dev, found.st_ino
        other = known.setdefault(key, what)
        if other != what:
            raise ValueError(f"{what} {os.fspath(path)!r}: {other} is the same file; name another")


def write(path: Path, data: bytes, kind: Kind) -> None:
    """Write a whole output.

    Parameters
    ----------
    path : path-like
    data : bytes
    kind : Kind

    Raises
    ------
    OSError
        As `check`, or it cannot be written. The old file is then still there, unless neither the
        folder nor a mount lets it be replaced.
    """
    try:
        while not _written(path, data, kind):
            pass
    except OSError as error:
        if error.errno is None or error.filename is not None:  # it says which file
            raise
        text = f"{os.fspath(path)!r} cannot be written ({error.strerror}): name another file"
        raise OSError(error.errno, text) from error


def begin(path: Path, kind: Kind) -> vm.Descriptor:
    """A file to be written bit by bit: its descriptor, which holds the lock on it.

    It still has what was there. The caller empties it where no signal's exception can strike.

    Parameters
    ----------
    path : path-like
    kind : Kind

    Returns
    -------
    Descriptor
        Close-on-exec. The lock ends with LOCK_UN, or once no process has the descriptor.

    Raises
    ------
    OSError
        As `check`, or it is not a regular file.
    """
    while True:
        file = vm.open_file(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK)
        fd = file.fileno()
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(f"{os.fspath(path)!r} is not a regular file; name one")
            _examine(fd, path, kind)
            if _is_at(path, found):
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # replaced in between: another file has the name


def _written(path: Path, data: bytes, kind: Kind) -> bool:
    """False: the file that was looked at is not the one that would be replaced."""
    with _held(path, kind) as old:
        place = _place(path)
        if old is None or not _is_at(path, old) or _has_name(place, old):
            try:
                return _replace(place, data, old)
            except OSError as error:
                if old is None or error.errno not in IN_PLACE:
                    raise
        _write_over(path, data)
        return True


@contextmanager
def _held(path: Path, kind: Kind) -> Iterator[os.stat_result | None]:
    """The file that may be replaced, which nobody else writes meanwhile; None: there is none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        folder, name = os.path.split(_place(path))
        if not name:
            raise FileNotFoundError(f"{os.fspath(path)!r} is not a name of a file") from None
        if not os.path.isdir(folder):
            raise FileNotFoundError(
                f"{os.fspath(path)!r}: there is no folder {folder!r}; make it first"
            ) from None
        _check_access(folder, os.W_OK | os.X_OK)
        yield None
        return
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(f"{os.fspath(path)!r} is a directory; name a file")
    _check_access(path, os.W_OK)
    if not stat.S_ISREG(found.st_mode):
        if kind is TRACE:  # a recorder writes its header last
            raise OSError(f"{os.fspath(path)!r} is not a regular file; name one")
        yield found
        return
    with vm.open_file(path, os.O_RDONLY | os.O_NONBLOCK) as file:
        _examine(file.fileno(), path, kind)
        yield found


def _examine(fd: int, path: Path, kind: Kind) -> None:
    """Lock a regular file, and refuse it if something would be lost."""
    name, found, is_standard = os.fspath(path), os.fstat(fd), False
    for number, what in STANDARD.items():
        with suppress(OSError):
            is_standard = os.path.samestat(found, os.fstat(number))
        if is_standard:
            raise FileExistsError(f"{name!r} is the {what} of this process; name another file")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(
            f"{name!r} is in use by another recording: wait for it, or name another file"
        ) from None
    except OSError:
        pass  # a file system without locks
    start = os.pread(fd, LOOKED_AT, 0)
    if start and not (start.startswith(kind.begins) and kind.holds in start):
        raise FileExistsError(
            f"{name!r} exists and is not {kind.name}: name another file, or remove it first"
        )


def absolute(path: Path) -> str:
    """The same file's name from the root.

    Unlike ``os.path.abspath`` it leaves ".." in the name, which may follow a link to a folder.
    """
    name = os.fsdecode(path)
    try:
        return name if os.path.isabs(name) else os.path.join(os.getcwd(), name)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{name!r}: the current folder was removed; go to another"
        ) from None


def _place(path: Path) -> str:
    """Where a file of this name is, or would be made: its absolute name, and that of no link.

    As the kernel finds it. ``os.path.realpath`` also finds "file" under the name "missing/../file".
    """
    place = absolute(path)
    for _ in range(MAX_LINKS):
        try:
            link = os.readlink(place)
        except OSError:  # it is no link, or not there
            break
        place = os.path.join(os.path.dirname(place), link)
    return place


def _has_name(place: str, found: os.stat_result) -> bool:
    """False of a pipe, a terminal and /dev/null, and of an unlinked file that /dev/fd leads to."""
    return stat.S_ISREG(found.st_mode) and _is_at(place, found)


def _is_at(path: Path, found: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path), found)
    except OSError:
        return False


def _check_access(path: Path, mode: int) -> None:
    if not os.access(path, mode):
        raise PermissionError(f"{os.fspath(path)!r} may not be written by this process")


def _replace(place: str, data: bytes, old: os.stat_result | None) -> bool:
    """Put a new file in the place of an old one, or of none; False: another is there by now."""
    beside = os.path.join(os.path.dirname(place), f".arenapy-{os.urandom(8).hex()}")
    opened: list[vm.Descriptor] = []
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with vm.open_file(beside, flags, opened=opened) as file:
            if old is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode))
            at = 0
            while at < len(data):  # not at the file's position, which a forked child shares
                at += os.pwrite(file.fileno(), memoryview(data)[at:], at)
        if old is None:
            return _appear(beside, place, data)
        if not _is_at(place, old):
            return False
        os.replace(beside, place)
        return True
    finally:
        with suppress(OSError):  # it has taken the place
            if opened and opened[0].made:
                os.unlink(beside)


def _appear(beside: str, place: str, data: bytes) -> bool:
    """Give a file a name that none has; unlike a rename, a link replaces nothing."""
    try:
        os.link(beside, place)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        try:
            with open(place, "xb") as file:
                file.write(data)
        except FileExistsError:
            return False
    return True


def _write_over(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
