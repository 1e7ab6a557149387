"""Hypothesis profiles, and a fixture that runs a program in a fresh interpreter.

``HYPOTHESIS_PROFILE`` picks a profile: ``dev`` (the default), ``ci`` (the same examples on every
run, and a blob that reproduces a failure), ``quick`` (the same with few examples), ``few`` (with
hardly any, for valgrind), ``long`` (many more and longer programs) or ``fuzz`` (still more, with a
database of its own in ``.hypothesis/fuzz``, from which the next run goes on).
"""

import collections
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

# A shell's background job ignores it, and so would the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "dev", max_examples=100, deadline=None, suppress_health_check=SLOW_IS_FINE, phases=PHASES
)
settings.register_profile(
    "ci", settings.get_profile("dev"), max_examples=40, derandomize=True, print_blob=True
)
settings.register_profile("quick", settings.get_profile("ci"), max_examples=20)
settings.register_profile("few", settings.get_profile("ci"), max_examples=3)
settings.register_profile(
    "long", settings.get_profile("dev"), max_examples=5000, stateful_step_count=100, print_blob=True
)
settings.register_profile(
    "fuzz",
    settings.get_profile("long"),
    max_examples=10_000,
    database=DirectoryBasedExampleDatabase(".hypothesis/fuzz"),
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


SAMPLE = 3  # of each test that is marked `sampled`, one case of this many runs


def pytest_addoption(parser):
    parser.addoption(
        "--all", action="store_true", help="also slow tests, and every case of sampled ones"
    )


def pytest_collection_modifyitems(config, items):
    if config.getoption("--all"):
        return
    cases = collections.Counter()
    chosen, left_out = [], []
    for item in items:
        test = item.path, item.originalname
        later = item.get_closest_marker("slow") is not None or (
            item.get_closest_marker("sampled") is not None and cases[test] % SAMPLE > 0
        )
        (left_out if later else chosen).append(item)
        cases[test] += 1
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = chosen


def pytest_report_header():
    trace = os.path.join(tempfile.gettempdir(), f"arenapy-machine-{os.getpid()}.trace")
    return f"a crash inside a state machine leaves its steps in {trace}"


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
