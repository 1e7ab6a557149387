"""Failing calls of the operating system and the C library: how, and what they leave behind.

`faults.c`, compiled here, takes over what our extension modules call; what our Python code calls of
`os` is taken over for as long as it is armed. Every call is noted, so that what was mapped and
allocated and is not any more can be told exactly, whatever else the process does meanwhile.
"""

import contextlib
import ctypes
import importlib.util
import mmap
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
# Not imported for that: fault_first_use fails what the import calls.
PACKAGE = os.path.dirname(os.path.abspath(importlib.util.find_spec("arenapy").origin)) + "/"
AARCH64 = os.uname().machine == "aarch64"
PLAIN, ARMED, FAILED = range(3)
NOTED = 3  # the kind of a function that is never failed
PYTHON = 1000

SYSCALLS = (
    {279: "memfd_create", 284: "mlock2", 235: "mbind", 98: "futex", 283: "membarrier"}
    if AARCH64
    else {319: "memfd_create", 325: "mlock2", 237: "mbind", 202: "futex", 324: "membarrier"}
)
ADVICE = {
    4: "DONTNEED",
    9: "REMOVE",
    10: "DONTFORK",
    14: "HUGEPAGE",
    18: "WIPEONFORK",
    22: "POPULATE_READ",
    23: "POPULATE_WRITE",
    24: "DONTNEED_LOCKED",
}
FCNTL = {1: "GETFD", 1030: "DUPFD_CLOEXEC", 1033: "ADD_SEALS", 36: "OFD_GETLK", 37: "OFD_SETLK"}

#: What else than its name says what a call is: an argument, and its values.
DETAILS = {0: ("syscall", SYSCALLS), 1: ("fcntl", FCNTL), 2: ("madvise", ADVICE)}

#: What Python code of ours calls, by where it finds it.
PYTHON_CALLS = {f"os.{name}": [("os", name)] for name in ("stat", "fstat", "pwrite", "dup")} | {
    "open()": [("builtins", "open"), ("io", "open")]
}


class _Call(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_int32),
        ("state", ctypes.c_int32),
        ("arguments", ctypes.c_long * 4),
        ("result", ctypes.c_long),
    )


class Call(NamedTuple):
    name: str
    state: int
    arguments: tuple[int, ...]
    result: int


class Left(NamedTuple):
    """What somebody has: an operation should leave as much behind as was there before."""

    mapped: tuple[tuple[int, int], ...]
    blocks: int
    descriptors: tuple[str, ...]
    locked: str


def compiled(directory):
    """The library, made in a directory of the caller's."""
    library = Path(directory) / "faults.so"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    command = [*compiler, *flags, "-o", str(library), str(HERE / "faults.c"), "-ldl"]
    subprocess.run(command, check=True)
    return library


class Faults:
    """The library at work. `noting` is to be inside of what is looked at, `armed` of what fails."""

    def __init__(self, library):
        self._library = ctypes.PyDLL(str(library))
        self._library.faults_name.restype = ctypes.c_char_p
        self._library.faults_calls.restype = ctypes.c_uint64
        self._library.faults_arm.argtypes = [
            *(ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_int64, ctypes.c_int, ctypes.c_int)
        ]
        self.functions = []
        while name := self._library.faults_name(len(self.functions)):
            self.functions.append(name.decode())
        self._python = list(PYTHON_CALLS)
        self._kept = set()
        self.install()

    def install(self):
        """Also in modules that were loaded since."""
        missing = self._library.faults_install(PACKAGE.encode())
        assert not missing, f"no {self.functions[missing - 1]} in this C library"

    def fallible(self):
        """The C functions that it fails."""
        kind = self._library.faults_kind
        return [name for i, name in enumerate(self.functions) if kind(i) != NOTED]

    @contextlib.contextmanager
    def noting(self, install=True):
        if install:
            self.install()
        self._library.faults_note(1)
        try:
            yield
        finally:
            self._library.faults_note(0)

    @contextlib.contextmanager
    def armed(self, call=None, nth=0, error=0, lasts=False):
        """Fail the nth call of this name, from 0, or (lasts) from that one on; by default none."""
        with contextlib.ExitStack() as stack:
            for which, places in enumerate(PYTHON_CALLS.values()):
                for place, name in places:
                    module = sys.modules.get(place)  # not imported for that, as above
                    if module is None:
                        continue
                    real = getattr(module, name)
                    stack.callback(setattr, module, name, real)
                    setattr(module, name, self._failing(which, real))
            self._library.faults_arm(*self._numbers(call), nth, error, lasts)
            stack.callback(self._library.faults_disarm)
            yield

    def _numbers(self, call):
        """A function, which of its arguments to look at, and what that is."""
        if call is None:
            return -1, -1, 0
        if call in PYTHON_CALLS:
            return PYTHON + self._python.index(call), -1, 0
        for which, (name, of) in DETAILS.items():
            for number, detail in of.items():
                if call in (f"{name}({detail})", detail):
                    return self._function(name), which, number
        return self._function(call), -1, 0

    def _function(self, name):
        return self.functions.index(name if name in self.functions else name + "64")

    def _failing(self, which, real):
        library = self._library

        def call(*arguments, **options):
            error = library.faults_python(which)
            if error:
                raise OSError(error, os.strerror(error), *arguments[:1])
            return real(*arguments, **options)

        return call

    def calls(self):
        """All that was noted, in order."""
        first = ctypes.POINTER(_Call)()
        n = self._library.faults_calls(ctypes.byref(first))
        assert n < 1 << 16, "more calls than there is room for"
        return [self._call(first[i]) for i in range(n)]

    def armed_calls(self):
        """Those that could have been failed."""
        return [call for call in self.calls() if call.state != PLAIN]

    def _call(self, noted):
        arguments = tuple(noted.arguments)
        if noted.function >= PYTHON:
            return Call(self._python[noted.function - PYTHON], noted.state, arguments, 0)
        name = self.functions[noted.function].removesuffix("64")
        for which, (function, of) in DETAILS.items():
            if function == name:
                detail = of.get(arguments[which] & 0xFFFFFFFF, "?")
                name = detail if name == "syscall" else f"{name}({detail})"
        return Call(name, noted.state, arguments, noted.result)

    def left(self, forgive=False):
        """What is there at this point, of what was mapped and allocated since noting began.

        A mapping whose munmap was made to fail is there for ever; `forgive` it, and unmap it.
        """
        mapped, blocks = [], set()
        for name, state, arguments, result in self.calls():
            if name == "mmap" and state != FAILED and result != -1:
                mapped = [*_without(mapped, result, arguments[1]), (result, result + arguments[1])]
            elif name == "munmap":
                if state == FAILED and forgive:
                    assert not _libc.munmap(ctypes.c_void_p(arguments[0]), arguments[1])
                if state != FAILED or forgive:
                    mapped = _without(mapped, *arguments[:2])
            elif name in ("malloc", "calloc", "posix_memalign") and state != FAILED:
                blocks.add(result)
            elif name == "realloc" and state != FAILED:
                blocks.discard(arguments[0])
                blocks.add(result)
            elif name == "free":
                blocks.discard(arguments[0])
        return Left(_joined(mapped), len(blocks - {0}), _descriptors(), _locked())

    def wrong(self):
        """What was given back, since noting began, that was not there, or somebody else's."""
        found, mapped = [], []
        for name, state, arguments, result in self.calls():
            if state == FAILED:
                continue
            if name == "mmap" and result != -1:
                stop = result + _in_pages(arguments[1])
                mapped = [*_without(mapped, result, arguments[1]), (result, stop)]
            elif name == "munmap":
                left = _without(mapped, *arguments[:2])
                if _nbytes(mapped) - _nbytes(left) < _in_pages(arguments[1]):
                    found.append(f"munmap of {arguments[1]} bytes at {arguments[0]:#x}: not ours")
                mapped = left
            elif name == "close" and result != 0:
                found.append(f"close of {arguments[0]}, which was not open")
        return found


_libc = ctypes.CDLL(None)
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _without(ranges, start, nbytes):
    """The ranges less whole pages from `start` on."""
    stop = start + _in_pages(nbytes)
    left = []
    for a, b in ranges:
        left += [part for part in ((a, min(b, start)), (max(a, stop), b)) if part[0] < part[1]]
    return left


def _in_pages(nbytes):
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _nbytes(ranges):
    return sum(stop - start for start, stop in ranges)


def _joined(ranges):
    joined = []
    for a, b in sorted(ranges):
        if joined and joined[-1][1] == a:
            a = joined.pop()[0]
        joined.append((a, b))
    return tuple(joined)


def _descriptors():
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.append(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
    return tuple(sorted(found))


def _locked():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line for line in lines if line.startswith("VmLck:"))
