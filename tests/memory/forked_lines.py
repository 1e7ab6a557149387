"""A program that a signal's handler forks at each line of a call: forked_lines.py CASE WAY

The child waits until its parent has the memory and has filled it. Then it goes on in the copied
call (WAY returns), or leaves it by an exception (WAY ends). Its parent's bytes must not change.
"""

import os
import sys
import tempfile
from pathlib import Path

import arenapy
from arenapy import Bump, File, Pool, Shared, trace
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
    "recording": lambda: recorded,
    "report": lambda: written,
}


class AtLine:
    """Forks at one line of the package, counted from the beginning of a call."""

    def __init__(self, line, way):
        self.left, self.way = line, way
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
                    if self.way == "ends":
                        raise SystemExit
                os.close(reader)
        return self


def strike(case, line, way):
    """False: the call has no such line."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        if case in ("old file", "file to change"):
            path.write_bytes(bytes(NBYTES if case == "file to change" else 3))
        act = CASES[case]()
        at_line = AtLine(line, way)
        try:
            sys.settrace(at_line)
            made = act(path)
        except BaseException:
            if at_line.child == 0:
                os._exit(3)  # and leaves the folder alone
            raise
        finally:
            sys.settrace(None)
        if at_line.child is None:
            return False
        if not callable(made):
            made[:] = 7 if at_line.child else 9
        if at_line.child == 0:
            os._exit(0)
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
    case, way = sys.argv[1:]
    line = 0
    while strike(case, line, way):
        line += 1
    print(line)


if __name__ == "__main__":
    main()
