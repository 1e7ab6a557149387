"""Traces for tests of the command and the page: of a program, of torch, of many blocks."""

import subprocess
import sys
import textwrap

import numpy as np

from arenapy import trace

MIB = 1 << 20

PROGRAM = """
    import numpy as np

    kept = []

    def load(n):
        return np.full(n << 17, 1.0)

    def smooth(x):
        return (x[1:] + x[:-1]) / 2

    def remember(x):
        kept.append(x[::4].copy())

    for n in range(1, 8):
        x = load(n)
        for _ in range(3):
            x = smooth(x)
        remember(x)
"""


def record_program(folder):
    """A trace with sites, by ``arenapy run``, of a program that forgets to forget."""
    script, found = folder / "program.py", folder / "program.trace"
    script.write_text(textwrap.dedent(PROGRAM))
    command = [sys.executable, "-m", "arenapy", "run", "--quiet", "--trace", found, "--sites"]
    subprocess.run([*command, script], check=True, timeout=120)
    return found


class Torch:
    """A snapshot of torch's, with stacks, two segments far apart, and two streams."""

    LOW, HIGH, SIDE = 0x7F00_0000_0000, 0x7F9C_0000_0000, 0x55D0_1234_5680

    def __init__(self):
        self.entries, self.time = [], 1_790_000_000_000_000
        for address, size, stream in (self.LOW, 20, 0), (self.HIGH, 2, self.SIDE):
            self.add("segment_alloc", address, size * MIB, stream)
        for n in range(40):
            low = self.LOW + n % 10 * 2 * MIB
            if n >= 10:
                self.add("free_requested", low, MIB)
                self.add("free_completed", low, MIB)
            self.add("alloc", low, MIB + n, line=n % 3)
            if n % 8 == 0:
                self.add("alloc", self.HIGH, 4096, self.SIDE, line=9)
                self.add("free_completed", self.HIGH, 4096, self.SIDE)

    def add(self, action, addr, size, stream=0, line=0):
        self.time += 50
        frames = [{"filename": "/v/site-packages/torch/nn.py", "line": 1, "name": "call"},
                  {"filename": "/home/train.py", "line": line, "name": "step"}]  # fmt: skip
        self.entries.append({"action": action, "addr": addr, "size": size, "stream": stream,
                             "time_us": self.time, "frames": frames})  # fmt: skip

    def snapshot(self):
        return {"segments": [], "device_traces": [self.entries]}


def many_blocks(path, count):
    """A valid trace of so many blocks, without sites: 64 places, each used again and again."""
    events = np.zeros(2 * count, trace.EVENT)
    number = np.arange(count)
    events["operation"] = np.tile([1, 2], count)
    events["address"] = np.repeat((number % 64 << 20) + 4096, 2)
    events["nbytes"] = np.repeat(1 + number * 7919 % MIB, 2)
    events["time"] = np.arange(2 * count) * 1000 + np.tile([0, 900], count)
    events["thread"] = 1
    trace.Trace(events, "Pool").save(path)
