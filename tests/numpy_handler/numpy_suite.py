"""NumPy's own tests with arenapy's handler in force; what does not pass, with the default one too.

    python tests/numpy_handler/numpy_suite.py               all of them
    python tests/numpy_handler/numpy_suite.py --most        those that allocate most, in minutes
    python tests/numpy_handler/numpy_suite.py --quick       of these, half: without DEAR
    python tests/numpy_handler/numpy_suite.py numpy.fft ... these modules
    python tests/numpy_handler/numpy_suite.py pandas.tests.reshape sklearn.svm ...  of others
    python tests/numpy_handler/numpy_suite.py --in FOLDER PATH ...  tests that no wheel has
    python tests/numpy_handler/numpy_suite.py --debug ...   over a pool in debug mode

Any library whose wheel has its tests is named like this, NumPy's neighbours in site-packages. The
wheels of Pillow and OpenCV have none, so FOLDER is in the sources of the installed version: the
unpacked sdist of Pillow, with the path Tests, or `opencv/modules/python/test` of OpenCV's, with the
path `.`. `.ci/run other_suites` runs a part of the tests of each.

A test that passes with the default allocator and does not with the handler fails the run. So does a
handler that served next to nothing, and a run that did not get to the end. Needs pytest >= 8.2 and
hypothesis; with meson and ninja, NumPy's tests of memory policies are built and run too.

The file is also the plugin of pytest that puts the handler in force and writes down each outcome as
it comes, so that a crash leaves the name of the test that it happened in.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy._core.multiarray import get_handler_name

ALL = ["numpy._core", "numpy.lib", "numpy.ma", "numpy.fft", "numpy.linalg", "numpy.random"]
MOST = {
    "numpy._core": [
        "multiarray", "mem_policy", "mem_overlap", "multithreading", "records", "stringdtype",
        "strings", "shape_base", "nditer", "ufunc", "regression", "indexing", "item_selection",
        "dlpack", "array_coercion", "memmap", "einsum", "api", "scalarbuffer",
    ],
    "numpy.lib": ["io", "loadtxt", "format", "shape_base", "arraypad", "function_base"],
    "numpy.ma": ["core", "extras", "mrecords"],
    "numpy.fft": ["pocketfft", "helper"],
    "numpy.linalg": ["linalg", "regression"],
    "numpy.random": ["generator_mt19937"],
}  # fmt: skip
#: Half of their time, and no edge of our modules that neither the others nor our own tests reach.
DEAR = {"nditer", "strings", "stringdtype", "ufunc", "function_base", "core"}
NAMES = {"default": "default_allocator", "pool": "arenapy", "debug": "arenapy"}
MAX_MEMORY = "4 GB"  # of one test, in NumPy's words
KEPT = 1 << 30  # bytes that the pool may keep idle from one test to the next
SHOWN = 5  # failures that are printed whole


# The plugin --------------------------------------------------------------------------------------


def pytest_addoption(parser):
    parser.addoption("--memory", choices=NAMES, required=True)
    parser.addoption("--outcomes", type=Path, required=True)


def pytest_configure(config):
    memory, path = config.getoption("--memory"), config.getoption("--outcomes")
    config.pluginmanager.register(Watch(memory, path.open("w", buffering=1)))


class Watch:
    """Keeps the handler in force in every test, and writes a line of JSON for all that happens."""

    def __init__(self, memory, file):
        self.file = file
        self.name = NAMES[memory]
        self.pool = self.memory = None
        self.left = []  # tests that ended under another handler than they began
        if memory != "default":
            import arenapy

            self.pool = arenapy.Pool(debug=memory == "debug")
            self.memory = arenapy.numpy_memory(self.pool, threads=True).install()

    def say(self, **what):
        print(json.dumps(what), file=self.file)

    def pytest_runtest_logstart(self, nodeid):
        self.say(begun=nodeid)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.say(test=report.nodeid, outcome=report.outcome, text=report.longreprtext)

    def pytest_runtest_logfinish(self, nodeid):
        if self.pool is not None and self.pool.stats().idle_bytes > KEPT:
            self.pool.trim(KEPT)
        if get_handler_name() != self.name:
            self.left.append(nodeid)
            if self.memory is not None:
                self.memory.uninstall()
                self.memory.install()

    def pytest_sessionfinish(self):
        figures = {"left": self.left, "served": 0, "system": 0, "lazy": 0}
        if self.memory is not None:
            stats = self.memory.stats()
            figures["served"] = self.pool.stats().total_allocations
            figures["system"] = stats.system_allocations
            figures["lazy"] = stats.lazy_allocations
            self.memory.uninstall()
            gc.collect()
            self.pool.check()
        self.say(**figures)


# The runner --------------------------------------------------------------------------------------


class Run:
    """One run of the tests in a process of its own, and what it wrote down."""

    def __init__(self, memory, selection, directory, folder=None):
        self.elsewhere = folder is not None  # a library whose tests may make few arrays
        outcomes, log = directory / f"{memory}.outcomes", directory / f"{memory}.log"
        # An empty configuration: that of a project around the environment is not NumPy's.
        (directory / "pytest.ini").write_text("[pytest]\n")
        command = [
            sys.executable, "-X", "faulthandler", "-m", "pytest", "-q", "-p", "numpy_suite",
            "-p", "no:cacheprovider", "-c", str(directory / "pytest.ini"),
            f"--rootdir={folder or PACKAGES}", f"--memory={memory}",
            f"--outcomes={outcomes}", f"--basetemp={directory / 'files'}", *selection,
        ]  # fmt: skip
        # Tests that need more are left out of both runs, whatever else the machine is doing.
        environment = {"NPY_AVAILABLE_MEM": MAX_MEMORY, **os.environ}
        path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        begun = time.monotonic()
        with log.open("w") as file:
            done = subprocess.run(
                command,
                cwd=folder or directory,
                env={**environment, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.memory, self.status, self.seconds = memory, done.returncode, time.monotonic() - begun
        self.log = log.read_text(errors="replace").splitlines()
        self.order, self.outcome, self.texts, self.figures = [], {}, {}, {}
        for line in outcomes.read_text().splitlines() if outcomes.exists() else ():
            self.read(json.loads(line))

    def read(self, line):
        match line:
            case {"begun": name}:
                self.order.append(name)
            case {"test": name, "outcome": outcome, "text": text}:
                if self.outcome.get(name) != "failed":
                    self.outcome[name] = outcome
                    self.texts[name] = text
            case _:
                self.figures = line

    def count(self, outcome):
        return sum(one == outcome for one in self.outcome.values())

    def __str__(self):
        counts = ", ".join(f"{self.count(o)} {o}" for o in ("passed", "failed", "skipped"))
        figures = self.figures
        line = f"{self.memory:8}{counts} in {self.seconds:.0f} s"
        if self.memory != "default" and figures:
            line += (
                f"\n{'':8}blocks of arrays: {figures['served']:,} from the pool, "
                f"{figures['lazy']:,} large zeros mapped lazily, {figures['system']:,} from libc"
            )
        return line

    def complaint(self):
        """Why this is no run to compare with; None if it is."""
        if self.status not in (0, 1) or not self.figures:
            last = self.order[-1] if self.order else "no test"
            return f"ended with status {self.status} after {last}\n" + "\n".join(self.log[-60:])
        if not self.order:
            return "there were no tests"
        least = 1 if self.elsewhere else len(self.order)
        if self.memory != "default" and self.figures["served"] < least:
            return f"served {self.figures['served']} blocks in {len(self.order)} tests: was it on?"
        return None


def suspects(ours):
    """The tests that did not pass, or left another handler in force."""
    return [name for name in ours.order if ours.outcome.get(name) != "passed"] + [
        name for name in ours.figures.get("left", ()) if ours.outcome.get(name) == "passed"
    ]


def compare(default, ours):
    """What is wrong with `ours`, as lines; none if nothing is. `default` ran its suspects."""
    wrong = [f"{run.memory}: {run.complaint()}" for run in (default, ours) if run.complaint()]
    worse = [
        name
        for name, outcome in ours.outcome.items()
        if outcome != "passed" and default.outcome.get(name) == "passed"
    ]
    for number, name in enumerate(worse):
        wrong.append(f"{ours.outcome[name]} with the handler only: {name}")
        if number < SHOWN:
            wrong.append(ours.texts[name])
    left = set(ours.figures.get("left", ())) - set(default.figures.get("left", ()))
    wrong += [f"left another handler in force, with ours only: {name}" for name in sorted(left)]
    return wrong


def main():
    """Run, compare, print, and end with status 1 if the handler does worse."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", action="store_true", help="a subset, without the slow tests")
    parser.add_argument("--quick", action="store_true", help="half of --most")
    parser.add_argument("--debug", action="store_true", help="over a pool with debug=True")
    parser.add_argument("--in", type=Path, dest="folder", help="where the tests are")
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="numpy.fft, say; else all")
    options = parser.parse_args()
    modules, folder = options.modules or ALL, options.folder and options.folder.resolve()
    selection = modules if folder else ["--pyargs", *modules]
    if options.most or options.quick:
        left_out = DEAR if options.quick else ()
        some = [
            f"{package}.tests.test_{name}"
            for package, names in MOST.items()
            for name in names
            if name not in left_out
        ]
        selection = ["-m", "not slow", "--pyargs", *(options.modules or some)]
    with tempfile.TemporaryDirectory(prefix="numpy-suite.") as directory:
        directory = Path(directory)
        ours = Run("debug" if options.debug else "pool", selection, directory, folder)
        print(ours, flush=True)
        wrong = [f"{ours.memory}: {ours.complaint()}"] if ours.complaint() else []
        again = suspects(ours)
        if again and not wrong:
            arguments = directory / "suspects"
            arguments.write_text("".join(f"{(folder or PACKAGES) / name}\n" for name in again))
            default = Run("default", [f"@{arguments}"], directory, folder)
            print(default, flush=True)
            wrong = compare(default, ours)
    print("\n".join(wrong) or "nothing fails that passes with the default allocator")
    return bool(wrong)


HERE = Path(__file__).parent
PACKAGES = Path(np.__file__).parents[1]

if __name__ == "__main__":
    sys.exit(main())
