"""A program that a signal's handler forks at lines of a call: forked_lines.py CASE WAY FIRST STEP

The child waits until its parent has the memory and has filled it. Then it goes on in the copied
call (WAY returns), or leaves it by an exception (WAY ends). Its parent's bytes must not change. If
the memory is copied, the child's handler allocates, and the child's bytes must not change either.
"""

import os
import sys
import tempfile
import traceback
from pathlib import Path

import arenapy
from arenapy import Bump, File, Host, Pool, Shared, trace
from arenapy.linux import outputs

MIB = 1 << 20
PACKAGE = str(Path(arenapy.__file__).parent)
ONLY_READS = "limits.py"
NBYTES = 3 * MIB


def trimmed(arena):
    arena.empty(4 * NBYTES, "u1")
    if isinstance(arena, Bump):
        arena.reset()

    def act(_path):
        arena.trim()
        return arena.empty(4 * NBYTES, "u1")

    return act


def grown(arena):
    return lambda _path: arena.empty(NBYTES, "u1")


class Copied:
    """A call of an arena over memory that a child has a copy of."""

    def __init__(self, arena, call):
        self.arena, self.call, self.arrays = arena, call, []

    def __call__(self, _path):
        self.call()
        return self.check

    def use(self):
        for _ in range(6):
            try:
                array = self.arena.empty(5 * MIB, "u1")
            except MemoryError:  # it is growing just now
                return
            self.arrays.append(array)
            array[:] = len(self.arrays)

    def check(self):
        self.use()
        for number, array in enumerate(self.arrays, 1):
            assert (array == number).all(), f"{(array != number).sum()} bytes changed"
        self.arena.check()


def copied_growth(arena):
    return Copied(arena, lambda: arena.empty(20 * MIB, "u1"))


def recorded(path):
    recorder = trace.Recorder(path)
    recorder.start()
    for number in range(1000):
        recorder.add("alloc", 4096 + number, 1)

    def check():
        recorder.stop()
        assert len(trace.load(path)) == 1000

    return check


def written(path):
    data = b'{"report": "run"}'
    outputs.write(path, data, outputs.report("run"))

    def check():
        assert path.read_bytes() == data

    return check


CASES = {
    "region": lambda: lambda _path: Bump(NBYTES, Shared()).empty(NBYTES, "u1"),
    "growth": lambda: grown(Bump(4096, Shared(grow=True), 64 * MIB)),
    "growth of a pool": lambda: grown(Pool(64 * MIB, Shared(grow=True))),
    "trim": lambda: trimmed(Bump(4096, Shared(grow=True), 64 * MIB)),
    "trim of a pool": lambda: trimmed(Pool(64 * MIB, Shared(grow=True))),
    "new file": lambda: lambda path: Bump(NBYTES, File(path, "w+")).empty(NBYTES, "u1"),
    "old file": lambda: lambda path: Bump(NBYTES, File(path, "w+")).empty(NBYTES, "u1"),
    "file to change": lambda: lambda path: Bump(NBYTES, File(path, "r+")).empty(NBYTES, "u1"),
    "copied growth": lambda: copied_growth(Bump(8 * MIB, Host(grow=True), 256 * MIB)),
    "copied growth of a pool": lambda: copied_growth(Pool(256 * MIB)),
    "recording": lambda: recorded,
    "report": lambda: written,
}


class AtLine:
    """Forks at one line of the package, counted from the beginning of a call."""

    def __init__(self, line, way, use):
        self.left, self.way, self.use = line, way, use
        self.child = self.pipe = None

    def __call__(self, frame, event, _argument):
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE) or name.endswith(ONLY_READS) or self.child is not None:
            return None
        if event == "line":
            self.left -= 1
            if self.left < 0:
                reader, self.pipe = os.pipe()
                self.child = os.fork()
                if self.child == 0:
                    os.close(self.pipe)
                    os.read(reader, 1)  # the end of the file
                    self.use()
                    if self.way == "ends":
                        raise SystemExit
                os.close(reader)
        return self


def leave(act, status):
    """End the child."""
    try:
        if isinstance(act, Copied):
            act.check()
    except BaseException:
        traceback.print_exc()
        status = 1
    os._exit(status)  # and leaves the folder alone


def strike(case, line, way):
    """False: the call has no such line."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        if case in ("old file", "file to change"):
            path.write_bytes(bytes(NBYTES if case == "file to change" else 3))
        act = CASES[case]()
        at_line = AtLine(line, way, act.use if isinstance(act, Copied) else lambda: None)
        try:
            sys.settrace(at_line)
            made = act(path)
        except BaseException:
            if at_line.child == 0:
                leave(act, 3)
            raise
        finally:
            sys.settrace(None)
        if at_line.child is None:
            return False
        if not callable(made):
            made[:] = 7 if at_line.child else 9
        if at_line.child == 0:
            leave(act, 0)
        os.close(at_line.pipe)
        status = os.waitstatus_to_exitcode(os.waitpid(at_line.child, 0)[1])
        assert status in (0, 3), f"line {line}: the child ended with {status}"
        if "file" in case:
            assert path.stat().st_size == NBYTES, f"line {line}: {path.stat().st_size} bytes"
        if callable(made):
            made()
        else:
            assert (made == 7).all(), f"line {line}: {(made != 7).sum()} bytes changed"
        return True


def main():
    case, way = sys.argv[1:3]
    line, step = map(int, sys.argv[3:])
    while strike(case, line, way):
        line += step
    print(line)


if __name__ == "__main__":
    main()
