"""Which tests reach next to nothing in the compiled modules that others do not reach, too?

    python tests/redundant.py tests/pool tests/cuda ... > .ci/redundant.txt
    python tests/redundant.py --record FILE ...    # keep what was measured
    python tests/redundant.py --again FILE         # and choose from it once more

Two steps of CI run the tests of the compiled modules once more, slowly: under sanitizers, and by
other versions of Python. In the tier quick they leave out what this lists.

It builds the modules into build/edges with clang's counters of edges, runs the tests in one
process, and notes of each test function what it costs and which edges it reaches, in its children,
too. Then it looks at the dearest first: a test is left out if it reaches fewer than WORTH edges for
each of its seconds that no test reaches which stays. What takes less than LEAST stays, whatever it
reaches. So does every state machine and every test that starts threads: they find what depends on
the order of steps, of which edges tell nothing. Threads of child processes are not seen: take such
tests out of the list by hand. The end names the modules of edges that are lost.

The list is of arguments for pytest: `pytest @.ci/redundant.txt`. What it does not name runs, and so
does a new test.
"""

import argparse
import collections
import json
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
WATCH = ROOT / "tests" / "support" / "watch"
BUILD = ROOT / "build" / "edges"
FLAGS = "-fsanitize-coverage=inline-8bit-counters -DARENAPY_ASSERT -g0 -O0 -w"
#: What the counters want when a module is loaded; sanitizers have one of their own.
RUNTIME = "void __sanitizer_cov_8bit_counters_init(char *first, char *end) {}"
LEAST = 0.04  # seconds of processors
WORTH = 4  # edges for a second


@dataclass
class Test:
    """A test function, whatever its parameters."""

    seconds: float = 0.0
    order: bool = False  # of steps matters: it started threads, or ran a state machine
    edges: dict = field(default_factory=dict)  # module: one bit for each

    def add(self, seconds, order, edges):
        self.seconds += seconds
        self.order |= order
        for module, reached in edges.items():
            if isinstance(reached, bytes):
                reached = np.frombuffer(reached, "u1") != 0
            self.edges[module] = reached | self.edges.get(module, False)


def build():
    """The instrumented package's folder, and the library without which its modules do not load."""
    BUILD.mkdir(parents=True, exist_ok=True)
    runtime = BUILD / "runtime.so"
    subprocess.run(
        ["clang", "-shared", "-fPIC", "-x", "c", "-", "-o", str(runtime)],
        input=RUNTIME, text=True, check=True,
    )  # fmt: skip
    environment = {**os.environ, "CC": "clang", "LDSHARED": "clang -shared", "CFLAGS": FLAGS}
    command = [sys.executable, "-c", "from setuptools import setup; setup()", "-q", "build"]
    command += ["--build-lib", str(BUILD / "lib"), "--build-temp", str(BUILD / "temp")]
    subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr, check=True)
    return BUILD / "lib", runtime


def table_of(package):
    """Path: module, offset of its counters, how many; see `watch/sitecustomize.py`."""
    from arenapy.testing.edges import counters_in

    table = {}
    for path in sorted(package.rglob("*.so")):
        found = counters_in(path)
        if found is not None:
            module = path.relative_to(package).as_posix().partition(".")[0]
            table[str(path)] = [module, *found]
    return table


def measure(arguments):
    """Run tests. {function: Test}"""
    lib, runtime = build()
    tests = {}
    with tempfile.TemporaryDirectory(prefix="arenapy-edges.") as folder:
        Path(folder, "table").write_text(json.dumps(table_of(lib / "arenapy")), encoding="utf-8")
        environment = {
            **os.environ,
            "ARENAPY_EDGES": folder,
            "LD_PRELOAD": str(runtime),
            "PYTHONPATH": os.pathsep.join([str(WATCH), str(lib)]),
        }
        command = [sys.executable, "-P", "-m", "pytest", "-q", "-n", "0", "-p", "edges_of_tests"]
        command += ["-m", "not no_sanitizer"]
        done = subprocess.run(
            [*command, *arguments], cwd=ROOT, env=environment, stdout=sys.stderr, check=False
        )
        if done.returncode:
            print("not all tests passed: see what these reach now", file=sys.stderr)
        for path in Path(folder).glob("*.reached"):
            for name, noted in pickle.loads(path.read_bytes()).items():
                tests.setdefault(name, Test()).add(*noted)
    return tests


def redundant(tests):
    """Names of those to leave out, and how many edges of each module nothing reaches then."""
    reached = {}  # module: how many tests that stay reach each edge
    for test in tests.values():
        for module, edges in test.edges.items():
            reached[module] = reached.get(module, 0) + edges.astype("i4")
    left_out, lost = [], collections.Counter()
    for name, test in sorted(tests.items(), key=lambda item: -item[1].seconds):
        if test.seconds < LEAST:
            break
        # What pytest deselects is named by how it begins.
        same = any(other != name and other.startswith(name) for other in tests)
        if test.order or same:
            continue
        own = {
            module: int((reached[module][edges] == 1).sum()) for module, edges in test.edges.items()
        }
        if sum(own.values()) <= WORTH * test.seconds:
            left_out.append(name)
            lost.update(own)
            for module, edges in test.edges.items():
                reached[module] -= edges
    return left_out, +lost


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", type=Path, metavar="FILE")
    parser.add_argument("--again", type=Path, metavar="FILE")
    options, arguments = parser.parse_known_args()
    if options.again:
        noted = pickle.loads(options.again.read_bytes())
        tests = {name: Test(*values) for name, values in noted.items()}
    else:
        tests = measure(arguments)
    if options.record:
        noted = {name: (test.seconds, test.order, test.edges) for name, test in tests.items()}
        options.record.write_bytes(pickle.dumps(noted))
    left_out, lost = redundant(tests)
    spent = sum(test.seconds for test in tests.values())
    saved = sum(tests[name].seconds for name in left_out)
    print(
        f"left out: {len(left_out)} of {len(tests)} tests, {saved:.0f} s of {spent:.0f} s, "
        f"{lost.total()} edges",
        file=sys.stderr,
    )
    for module, count in lost.most_common():
        print(f"    {count} edges of {module}", file=sys.stderr)
    for name in sorted(left_out):
        print(f"--deselect={name}")


if __name__ == "__main__":
    main()
