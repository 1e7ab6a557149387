"""Runs one operation of `fault_operations` with one of its calls failed, and looks at the ruins."""

import errno
import gc
import inspect
import sys
from collections import Counter
from typing import NamedTuple
from unittest import mock

from fault_operations import OPERATIONS
from faults import FAILED, PYTHON_CALLS

EHWPOISON = 133
#: In ERRORS: from that call on all of them fail, as they do once memory is used up.
LASTS = "ENOMEM, lasting"
POPULATE = ("ENOMEM", LASTS, "EHWPOISON", "EINVAL", "EINTR", "EAGAIN")

#: What a call may fail with, as its manual page says.
ERRORS = {
    "mmap": ("ENOMEM", LASTS, "EACCES"),
    "munmap": ("ENOMEM", LASTS),
    "mprotect": ("ENOMEM", LASTS, "EACCES"),
    "madvise(DONTNEED)": ("EAGAIN", "EINVAL", "ENOMEM"),
    "madvise(DONTNEED_LOCKED)": ("EAGAIN", "EINVAL"),
    "madvise(DONTFORK)": ("EAGAIN", "ENOMEM"),
    "madvise(HUGEPAGE)": ("EAGAIN", "EINVAL", "ENOMEM"),
    "madvise(WIPEONFORK)": ("EINVAL", "ENOMEM"),
    "madvise(POPULATE_READ)": POPULATE,
    "madvise(POPULATE_WRITE)": POPULATE,
    "mlock2": ("ENOMEM", "EPERM", "EAGAIN", "ENOSYS"),
    "munlock": ("ENOMEM",),
    "mbind": ("ENOMEM", "EPERM", "EINVAL", "ENOSYS"),
    "membarrier": ("EPERM", "ENOSYS"),
    "memfd_create": ("ENOMEM", "EMFILE", "ENFILE", "ENOSYS"),
    "ftruncate": ("EINTR", "ENOMEM", "EFBIG"),
    "fcntl(ADD_SEALS)": ("EPERM", "EBUSY"),
    "fcntl(OFD_GETLK)": ("EINTR", "EINVAL"),
    "fcntl(OFD_SETLK)": ("EINTR", "ENOLCK"),
    "open": ("EINTR", "EMFILE", "ENOENT"),
    "fstat": ("EIO",),
    "ioctl": ("EINTR", "EINVAL", "ENOTTY"),
    "pread": ("EINTR", "EIO"),
    "write": ("EINTR", "ENOSPC", "EIO"),
    "malloc": ("ENOMEM", LASTS),
    "calloc": ("ENOMEM", LASTS),
    "realloc": ("ENOMEM", LASTS),
    "strdup": ("ENOMEM", LASTS),
    "pthread_create": ("EAGAIN",),
    "pthread_key_create": ("EAGAIN",),
    "pthread_setspecific": ("ENOMEM",),
    "__register_atfork": ("ENOMEM",),
    "os.open": ("EACCES", "EMFILE"),
    "os.stat": ("EACCES",),
    "os.fstat": ("EIO",),
    "os.ftruncate": ("EFBIG", "EIO"),
    "os.posix_fallocate": ("ENOSPC", "EOPNOTSUPP"),
    "os.write": ("ENOSPC",),
    "os.pwrite": ("EIO",),
    "os.dup": ("EMFILE",),
    "open()": ("EMFILE", "EACCES"),
}


class Outcome(NamedTuple):
    """What came of it."""

    error: str  # name of the exception's type; "" if there was none
    text: str
    errno: int | None
    problems: tuple[str, ...]  # what should not have happened
    failed: bool  # whether the call was made at all
    calls: list[str]  # all that was made


def number(name):
    if name is None:
        return 0
    name = name.partition(",")[0]
    return EHWPOISON if name == "EHWPOISON" else getattr(errno, name)


def made(name, directory):
    make = OPERATIONS[name]
    return make(directory) if inspect.signature(make).parameters else make()


def calls_of(faults, name, directory):
    """The calls that the operation makes if nothing fails: how many of which name."""
    attempt(faults, name, directory)  # what is done the first time only, is not done again
    outcome = attempt(faults, name, directory)
    assert not outcome.error and not outcome.problems, outcome
    return Counter(outcome.calls)


def attempt(faults, name, directory, call=None, nth=0, error=None):
    """The outcome of the operation with that call failed."""
    problems, untold = [], []
    with faults.noting(), mock.patch.object(sys, "unraisablehook", untold.append):
        before = faults.left()
        act = made(name, directory)
        view = act.view()
        result, raised, text, number_of = None, "", "", None
        try:
            with faults.armed(call, nth, number(error), error == LASTS):
                result = act.act()
        except BaseException as caught:
            raised, text = type(caught).__name__, str(caught)
            number_of = getattr(caught, "errno", None)
        calls = faults.armed_calls()
        failed = [one.name for one in calls if one.state == FAILED]
        assert set(failed) <= {call}, failed
        try:
            now = act.view()
            if raised:
                if now != view:
                    problems.append(f"changed: {view} -> {now}")
                result = act.act()
            act.good(result)
            act.view()
            act.end()
        except BaseException as caught:
            problems.append(f"afterwards: {type(caught).__name__}: {caught}")
        python = act.python
        result = act = view = now = None
        gc.collect()
        if "debug" not in name:  # whose check at a block's end has nobody to tell
            problems += [f"told nobody: {one.exc_value!r} {one.err_msg}" for one in untold]
        untold.clear()
        after = faults.left(forgive=True)
        problems += [
            f"left {what}: {one} -> {other}"
            for what, one, other in zip(before._fields, before, after, strict=True)
            if one != other
        ]
    names = [one.name for one in calls if python or one.name not in PYTHON_CALLS]
    return Outcome(raised, text, number_of, tuple(problems), bool(failed), names)
