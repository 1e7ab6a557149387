"""Signals whose handler raises: at a chosen bytecode of arenapy's Python code, and at any time.

The first are those of `strikes.c`, which makes a signal pending; the interpreter handles it at the
next of those bytecodes at which it handles signals. So every place is reached where one could
strike, and no other one.
"""

import contextlib
import ctypes
import dis
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from faults import PACKAGE

HERE = Path(__file__).parent
MOST = 1 << 20
#: Parts of the names of instructions at whose end, or in whose callee, signals are handled.
HANDLING = ("CALL", "JUMP_BACKWARD", "SEND", "YIELD", "BEFORE_WITH", "LOAD_SPECIAL")
SIMULATED = str(HERE.parent / "support" / "simulated_")


class Struck(KeyboardInterrupt):
    """What the signal's handler raises."""


class _Place(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_size_t),
        ("instruction", ctypes.c_int32),
        ("returned", ctypes.c_int32),
    )


def compiled(directory):
    """The library, made in a directory of the caller's."""
    library = Path(directory) / "strikes.so"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*compiler, *flags, "-o", str(library), str(HERE / "strikes.c")], check=True)
    return library


class Handler:
    """Raises at SIGINT, while it is entered."""

    def __init__(self, later=None):
        self.arrived = False
        self.later = later

    def __call__(self, _number, frame):
        while self.later is not None and frame is not None:
            if frame.f_code.co_filename.startswith(SIMULATED):
                self.later()  # a real driver is no Python code, in which it could strike
                return
            frame = frame.f_back
        self.arrived = True
        raise Struck

    def __enter__(self):
        self.before = signal.signal(signal.SIGINT, self)
        return self

    def __exit__(self, *_details):
        signal.signal(signal.SIGINT, self.before)


def _trace_bytecodes():
    """Python 3.12 traces none unless a frame has asked for it before the tracing begins."""
    sys._getframe().f_trace_opcodes = True


class Strikes:
    """The library at work, in the main thread.

    Struck is the code of a package and, since a Python function may be struck at its very first
    bytecode if its caller is, that of a file that uses it.
    """

    def __init__(self, library, package=PACKAGE, user=HERE / "strike_operations.py"):
        self._library = ctypes.PyDLL(str(library))
        self._library.strikes_end.restype = ctypes.c_int64
        self._library.strikes_places.restype = ctypes.POINTER(_Place)
        begin = self._library.strikes_begin
        begin.argtypes = [ctypes.c_char_p] * 2 + [ctypes.c_int] + [ctypes.c_int64] * 2
        self._files = os.fsencode(package), os.fsencode(user)
        self._passed = 0  # places
        _trace_bytecodes()

    @contextlib.contextmanager
    def at(self, first=-1, second=-1):
        """A signal arrives at the places of these numbers, from 0."""
        with Handler(self._library.strikes_later) as handler:
            self._library.strikes_begin(*self._files, signal.SIGINT, first, second)
            try:
                yield handler
            finally:
                self._passed = self._library.strikes_end()

    def places(self):
        """{(file, function, instruction, whether it returned): number}, of what was passed last.

        Those at whose end the interpreter handles signals. Of what a loop repeats, the first time.
        """
        assert self._passed <= MOST, "more places than there is room for"
        first = {}
        places = self._library.strikes_places()
        for i in range(self._passed):
            one = places[i]
            first.setdefault((one.code, one.instruction, one.returned), i)
        found = {}
        for (address, instruction, returned), i in first.items():
            code = ctypes.cast(address, ctypes.py_object).value
            name = dis.opname[code.co_code[instruction]]
            if returned or any(part in name for part in HANDLING):
                place = os.path.basename(code.co_filename), code.co_qualname, instruction, returned
                found.setdefault(place, i)
        return found


@contextlib.contextmanager
def after(seconds):
    """A real signal arrives once they have passed, if what is inside lasts as long."""
    with Handler() as handler:
        before = signal.signal(signal.SIGALRM, handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            yield handler
        finally:
            # In this order: one that arrived meanwhile is handled before the first line is done.
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
