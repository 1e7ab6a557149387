"""Processes that answer questions, so that rounds of all of them follow each other in any order.

A malloc library is measured as its users have it, preloaded into a process of its own. Such a
process waits until it is asked to run something, and answers with what it found. Statements, and
the imports for them, are elsewhere: workers.py (loops in C), rivals.py (NumPy programs).
"""

import ctypes.util
import functools
import json
import os
import subprocess
import sys
import time
import timeit

MALLOCS = {
    "glibc": "c",
    "mimalloc": "mimalloc",
    "jemalloc": "jemalloc",
    "tcmalloc": "tcmalloc_minimal",
}

# Variables that change a malloc from outside. A process has only those that it is given.
TUNING = ("LD_PRELOAD", "GLIBC_TUNABLES", "MALLOC_", "MIMALLOC_", "TCMALLOC_", "NUMPY_MADVISE")


@functools.cache
def library(malloc):
    """The file name of a malloc library; None if it is not installed."""
    return ctypes.util.find_library(MALLOCS[malloc])


def installed():
    """The mallocs that are here."""
    return [malloc for malloc in MALLOCS if library(malloc)]


def environment(malloc, tuning):
    """This process's environment, but with that malloc and that tuning and no other."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(TUNING)}
    if malloc != "glibc":
        kept["LD_PRELOAD"] = library(malloc)
    return kept | tuning


class Loop:
    """A Way in a process; timeit() as timeit.Timer has it."""

    def __init__(self, process, way):
        self.process = process
        self.way = way

    def timeit(self, runs):
        """Seconds of so many runs."""
        return self.process.ask("time", self.way.statement, self.way.before, runs)


class Process:
    """A Python script that calls `serve`. `seconds`: that it was given, from its start to its end.

    Only one is ever at work, so that its own seconds are what it would take alone.
    """

    def __init__(self, script, *arguments, malloc="glibc", tuning=None):
        self.seconds = 0.0
        start = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(malloc, tuning or {}),
            text=True,
        )
        self.value("None")  # it has started
        self.seconds = time.perf_counter() - start

    def ask(self, *question):
        """The answer; what went wrong there is on the standard error stream."""
        start = time.perf_counter()
        print(json.dumps(question), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        self.seconds += time.perf_counter() - start
        if not answer:
            raise RuntimeError(f"a worker ended with status {self.process.wait()}")
        return json.loads(answer)

    def run(self, statement):
        """Run a statement there."""
        self.ask("run", statement)

    def value(self, expression):
        """The value of an expression in that process."""
        return self.ask("value", expression)

    def loop(self, way):
        """An object that runs the statement of a Way in that process."""
        return Loop(self, way)

    def close(self):
        """Wait for its end."""
        start = time.perf_counter()
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.seconds += time.perf_counter() - start

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if not self.process.stdout.closed:
            self.close()


def serve(names, clock):
    """Answer until there is nothing more to answer."""

    @functools.cache
    def timer(statement, before):
        return timeit.Timer(statement, before, clock, names)

    for line in sys.stdin:
        what, statement, *rest = json.loads(line)
        answer = None
        if what == "run":
            exec(statement, names)
        elif what == "value":
            answer = eval(statement, names)
        else:
            answer = timer(statement, rest[0]).timeit(rest[1])
        print(json.dumps(answer), flush=True)
