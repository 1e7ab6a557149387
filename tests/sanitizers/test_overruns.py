"""A C user's overrun within a region is reported where arenapy is built for a sanitizer.

Such a build is recognized by what it calls (AddressSanitizer), or named by the environment variable
ARENAPY_SANITIZER: ``address`` or ``valgrind``; then nothing is skipped. docs/crashes.md has the
commands.
"""

import importlib.util
import os
import platform
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Not imported: that takes a process in which the sanitizer runs.
PACKAGE = Path(importlib.util.find_spec("arenapy").origin).parent
TREE = PACKAGE.parent
# The compiler that made this build: their runtimes do not mix.
COMPILER = os.environ.get("CC", "gcc")
RUNTIME = f"libclang_rt.asan-{platform.machine()}.so" if "clang" in COMPILER else "libasan.so"
FLAGS = {
    "address": "-fsanitize=address -fno-omit-frame-pointer -g -O1",
    "valgrind": "-DARENAPY_VALGRIND -g -O1",
}


def kind_of_build():
    named = os.environ.get("ARENAPY_SANITIZER")
    if named:
        return named
    module = PACKAGE / "allocator" / f"allocator_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    return "address" if b"__asan_poison_memory_region" in module.read_bytes() else None


KIND = kind_of_build()
if KIND is None:
    pytest.skip("arenapy is not built for a sanitizer", allow_module_level=True)


def names():
    """The programs, without importing what is not built yet."""
    text = "".join((HERE / name).read_text() for name in ("overruns.py", "allowed.py"))
    found = re.findall(r"^@program\ndef (\w+)", text, re.MULTILINE)
    assert len(found) > 10
    return found


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The directory of the extension module, built with the flags of this build."""
    folder = tmp_path_factory.mktemp("overrun")
    source = folder / "overrun.c"
    module = folder / f"overrun{sysconfig.get_config_var('EXT_SUFFIX')}"
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    translate = [sys.executable, "-m", "cython", "-o", str(source), str(HERE / "overrun.pyx")]
    subprocess.run(translate, check=True, cwd=TREE, env=environment)
    include = f"-I{sysconfig.get_path('include')}"
    compiler = [COMPILER, "-shared", "-fPIC", "-w", include, *FLAGS[KIND].split()]
    subprocess.run([*compiler, str(source), "-o", str(module)], check=True, env=environment)
    return folder


def run_all(built, how):
    """What became of each program: (target, exit status, what was said of its process, of all)."""
    environment = {**os.environ, "PYTHONMALLOC": "malloc"}
    environment["PYTHONPATH"] = os.pathsep.join([str(built), str(TREE)])
    command = [sys.executable, str(HERE / "run.py"), how]
    if KIND == "valgrind":
        suppressions = f"--suppressions={TREE / '.ci' / 'valgrind.supp'}"
        options = ["--error-exitcode=9", "--leak-check=no", "--undef-value-errors=no"]
        command = ["valgrind", *options, suppressions, *command]
    else:
        named = [COMPILER, f"-print-file-name={RUNTIME}"]
        runtime = subprocess.run(named, check=True, capture_output=True, text=True).stdout.strip()
        # Its reports go to stderr, and not where CI looks for those of other tests.
        options = "detect_leaks=0:halt_on_error=1:symbolize=0:exitcode=9"
        environment.update(LD_PRELOAD=runtime, ASAN_OPTIONS=options)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    results = {}
    for line in done.stdout.splitlines():
        name, pid, target, status = line.split()
        said = [text for text in done.stderr.splitlines() if text.startswith(f"=={pid}==")]
        results[name] = (int(target), int(status), "\n".join(said), done.stderr)
    return results


@pytest.fixture(scope="session")
def written(built):
    return run_all(built, "write")


@pytest.fixture(scope="session")
def read(built):
    return run_all(built, "read")


@pytest.fixture(scope="session")
def control(built):
    return run_all(built, "control")


def reported(said, access):
    """The address that the report is of; None: there is no such report."""
    if KIND == "valgrind":
        found = re.search(rf"Invalid {access} of size 1(?:.*\n)*?.*Address 0x([0-9a-f]+)", said)
    else:
        found = re.search(r"AddressSanitizer: use-after-poison on address 0x([0-9a-f]+)", said)
    return found and int(found[1], 16)


@pytest.mark.parametrize("name", names())
def test_a_write_is_reported(written, name):
    target, status, said, stderr = written[name]
    if name.startswith("allowed_"):
        assert (target, status) == (0, 0), stderr
    else:
        assert target
        assert status == 9, said or stderr
        assert reported(said, "write") == target


@pytest.mark.parametrize("name", [name for name in names() if not name.startswith("allowed_")])
def test_a_read_is_reported(read, name):
    target, status, said, stderr = read[name]
    assert target
    assert status == 9, said or stderr
    assert reported(said, "read") == target


@pytest.mark.parametrize("name", names())
def test_the_control_is_silent(control, name):
    target, status, said, stderr = control[name]
    assert (target, status) == (0, 0), said or stderr
    assert reported(said, "write") is None
