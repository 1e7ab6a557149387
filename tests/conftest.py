"""How much is run (``--tier``), and fixtures that run a program in a fresh interpreter.

``pytest --tier quick`` (the default) touches every feature in minutes. ``full`` also runs what is
marked so, all cases of ``sampled`` tests, and more examples; CI runs it. ``long`` runs everything.
``HYPOTHESIS_PROFILE`` chooses the number of examples alone: it is a tier, or ``fuzz``, which keeps
a database in ``.hypothesis/fuzz`` and goes on from it.
"""

import ast
import collections
import fcntl
import gc
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.database import DirectoryBasedExampleDatabase

# Tests, and the programs that they start, import helpers from here.
SUPPORT = str(Path(__file__).parent / "support")
sys.path.insert(0, SUPPORT)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SUPPORT, os.environ.get("PYTHONPATH")]))

SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
PHASES = [phase for phase in Phase if phase is not Phase.explain]  # it triples a failing run
if "ARENAPY_UNSHRUNK" in os.environ:  # for mutants: that they fail is enough
    PHASES.remove(Phase.shrink)

# A shell's background job and nohup ignore these, and so would the programs that tests end.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The same examples on every run: what a change broke fails, and nothing else.
settings.register_profile(
    "quick",
    max_examples=5,
    derandomize=True,
    print_blob=True,
    deadline=None,
    suppress_health_check=SLOW_IS_FINE,
    phases=PHASES,
)
settings.register_profile("full", settings.get_profile("quick"), max_examples=20)
settings.register_profile(
    "long",
    settings.get_profile("quick"),
    max_examples=5000,
    stateful_step_count=100,
    derandomize=False,
)
settings.register_profile(
    "fuzz",
    settings.get_profile("long"),
    max_examples=10_000,
    database=DirectoryBasedExampleDatabase(".hypothesis/fuzz"),
)

TIERS = ["quick", "full", "long"]
SAMPLE = 8  # of a test that is marked ``sampled``, one case of this many runs in the tier quick
FEW = 12  # cases of it run all in the tier full; of more, one of 3, or of a prime that follows


def pytest_addoption(parser):
    parser.addoption("--tier", choices=TIERS, default="quick", help="how much is run")
    parser.addoption(
        "--once",
        type=Path,
        metavar="FILE",
        help="leave out the tests that FILE names, and write there those that passed; a test with "
        "examples is not noted, since another tier has more of them",
    )


def pytest_configure(config):
    tier = config.getoption("--tier")
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", tier))
    file = config.getoption("--once")
    if file and not hasattr(config, "workerinput"):  # in the process that has all reports
        config.pluginmanager.register(Once(file))


class Once:
    """Notes the tests that passed."""

    def __init__(self, file):
        self.file, self.passed = file, set()

    def pytest_runtest_logreport(self, report):
        if report.failed or "examples" in report.keywords:
            self.passed.discard(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    def pytest_sessionfinish(self):
        with self.file.open("a") as file:
            file.writelines(f"{nodeid!r}\n" for nodeid in sorted(self.passed))


def pytest_collection_modifyitems(config, items):
    tier = config.getoption("--tier")
    later = TIERS[TIERS.index(tier) + 1 :]
    once = config.getoption("--once")
    known = once.read_text().splitlines() if once and once.exists() else []
    passed = set(map(ast.literal_eval, known))
    all_cases = collections.Counter((item.path, item.originalname) for item in items)
    cases = collections.Counter()
    chosen, left_out = [], []
    for item in items:
        test = item.path, item.originalname
        sampled = item.get_closest_marker("sampled")
        step = 1
        if sampled and tier == "quick":
            step = SAMPLE
        elif sampled and tier == "full":
            step = sampled.kwargs.get("full") or step_of(all_cases[test])
        if examples(item):
            item.keywords["examples"] = True  # a report has no more of its test
        left = cases[test] % step or any(map(item.get_closest_marker, later))
        left = left or item.nodeid in passed
        (left_out if left else chosen).append(item)
        cases[test] += 1
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = chosen


def step_of(count):
    """The tier full runs one of how many cases: with a common divisor, some values of a parameter
    would never be among them."""
    return 1 if count <= FEW else next(n for n in (3, 5, 7, 11, 13, 17) if count % n)


def examples(item):
    """May the number of a test's cases depend on the tier?

    A module that imports ``settings`` by name may look at it in any of its tests. One that imports
    ``hypothesis`` has only those that are Hypothesis's own.
    """
    return hasattr(item.module, "settings") or getattr(item.function, "is_hypothesis_test", False)


def pytest_terminal_summary(terminalreporter):
    """A line for each reason to skip."""
    reasons = collections.Counter(
        report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        for report in terminalreporter.stats.get("skipped", [])
    )
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")


def pytest_report_header():
    trace = os.path.join(tempfile.gettempdir(), f"arenapy-machine-{os.getpid()}.trace")
    return f"a crash inside a state machine leaves its steps in {trace}"


@pytest.fixture
def hugetlb():
    """The machine's reserved huge pages: no test of another process uses them or counts them."""
    from turns import locked

    with locked("hugetlb", fcntl.LOCK_EX):
        yield


@pytest.fixture(autouse=True, scope="module")
def young_garbage():
    """Collecting garbage looks at what a module's own tests made: by the end of the suite, all that
    Hypothesis and the modules keep makes a `gc.collect()` cost a tenth of a second, and a whole one
    under AddressSanitizer."""
    gc.collect()
    gc.freeze()


# Since 3.12 a fork warns if some library's thread (OpenBLAS's, say) happens to run at that moment.
WARNINGS = ["-W", "error::ResourceWarning", "-W", "ignore:This process:DeprecationWarning"]


@pytest.fixture
def run_script(tmp_path):
    """Run source text in a fresh interpreter; a crash, a message or a nonzero status fails."""

    def run(source, *, quiet=True, timeout=120, flags=(), env=None):
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(source))
        done = subprocess.run(
            [sys.executable, "-X", "faulthandler", *WARNINGS, *flags, str(script)],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=tmp_path,
            env={**os.environ, **(env or {})},
        )
        report = f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == 0, report
        if quiet:
            assert not done.stderr, report
        return done.stdout

    return run


@pytest.fixture
def populate_error():
    """Make faulting in fail, until the test ends."""
    from arenapy.linux import vm

    yield vm.inject_populate_error
    vm.inject_populate_error(0)


@pytest.fixture
def frequent_switches():
    """Many more switches between threads than the interpreter's own."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture
def gpu():
    """A simulated driver; see cuda_support, which most tests do without."""
    from cuda_support import a_gpu

    with a_gpu(leaks=True) as driver:  # pytest keeps what fixtures made
        yield driver


@pytest.fixture(params=["slab", "pool"])
def reusing(gpu, request):
    """An allocator of one block at a time, over a device."""
    from cuda_support import only_one

    from arenapy import cuda

    return only_one(request.param, cuda.Device())
