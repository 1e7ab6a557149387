"""A C user's overrun within a region is reported where arenapy is built for a sanitizer.

Such a build is recognized by what it calls (AddressSanitizer), or named by the environment variable
ARENAPY_SANITIZER: ``address`` or ``valgrind``; then nothing is skipped. docs/crashes.md has the
commands.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import arenapy.regions

HERE = Path(__file__).parent
FLAGS = {
    "address": "-fsanitize=address -fno-omit-frame-pointer -g -O1",
    "valgrind": "-DARENAPY_VALGRIND -g -O1",
}


def kind_of_build():
    named = os.environ.get("ARENAPY_SANITIZER")
    if named:
        return named
    found = b"__asan_poison_memory_region" in Path(arenapy.regions.__file__).read_bytes()
    return "address" if found else None


KIND = kind_of_build()
if KIND is None:
    pytest.skip("arenapy is not built for a sanitizer", allow_module_level=True)
sys.path.insert(0, str(HERE))


def names():
    """The programs, without importing what is not built yet."""
    found = re.findall(r"^@program\ndef (\w+)", (HERE / "overruns.py").read_text(), re.MULTILINE)
    assert len(found) > 10
    return found


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The directory of the extension module, built with the flags of this build."""
    folder = tmp_path_factory.mktemp("overrun")
    source = folder / "overrun.c"
    command = [sys.executable, "-m", "cython", "-3", "-I", str(HERE), "-o", str(source)]
    where = Path(arenapy.__file__).parents[1]
    subprocess.run([*command, str(HERE / "overrun.pyx")], check=True, cwd=where)
    module = folder / f"overrun{sysconfig.get_config_var('EXT_SUFFIX')}"
    include = sysconfig.get_path("include")
    compiler = [shutil.which("gcc"), "-shared", "-fPIC", "-w", f"-I{include}", *FLAGS[KIND].split()]
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    subprocess.run([*compiler, str(source), "-o", str(module)], check=True, env=environment)
    return folder


def run_all(built, how):
    """What became of each program: (target, exit status, what was said of its process, of all)."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(built), str(Path(arenapy.__file__).parents[1]), environment.get("PYTHONPATH", "")]
    )
    command = [sys.executable, str(HERE / "overruns.py"), how]
    if KIND == "valgrind":
        environment["PYTHONMALLOC"] = "malloc"
        supp = Path(arenapy.__file__).parents[1] / ".ci" / "valgrind.supp"
        command = [
            "valgrind", "--error-exitcode=9", "--leak-check=no", "--undef-value-errors=no",
            f"--suppressions={supp}", *command,
        ]  # fmt: skip
    else:
        # Not the file that CI looks into for reports of other tests.
        environment["ASAN_OPTIONS"] = "detect_leaks=0:halt_on_error=1:symbolize=0:exitcode=9"
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
