"""A module compiled for another layout of arenapy's structs is refused when it is imported.

Inline functions bake struct layouts into their callers, so the wrong pairing would corrupt memory.
Here the installed .pxd files are copied, another number is written into the copy, and a module is
compiled against that.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from downstream_of_arenapy import use

import arenapy

INSTALLED = Path(arenapy.__file__).parent
STATEMENT = re.compile(r"(ARENAPY_ABI(?: = |_))(\d+)", re.IGNORECASE)

SETUP = """
from Cython.Build import cythonize
from setuptools import Extension, setup

setup(
    name="other",
    script_args=["-q", "build_ext", "--inplace"],
    ext_modules=cythonize([Extension("other", ["other.pyx"])], include_path=["headers"]),
)
"""


def build_against(directory, change):
    """Compile downstream's module against headers whose ABI number went through `change`."""
    headers = directory / "headers" / "arenapy"
    stated = set()
    for pxd in INSTALLED.rglob("*.pxd"):
        copy = headers / pxd.relative_to(INSTALLED)
        copy.parent.mkdir(parents=True, exist_ok=True)
        text = pxd.read_text()
        stated |= {int(number) for _, number in STATEMENT.findall(text)}
        copy.write_text(STATEMENT.sub(lambda m: m[1] + str(change(int(m[2]))), text))
    assert stated == {use.COMPILED_FOR_ABI}
    shutil.copy(Path(use.__file__).with_name("use.pyx"), directory / "other.pyx")
    (directory / "setup.py").write_text(SETUP)
    subprocess.run([sys.executable, "setup.py"], cwd=directory, check=True)


def import_other(directory):
    return subprocess.run(
        [sys.executable, "-c", "import other; print(other.COMPILED_FOR_ABI)"],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(directory)},
        capture_output=True,
        text=True,
    )


def test_same_abi_is_accepted(tmp_path):
    build_against(tmp_path, lambda abi: abi)
    result = import_other(tmp_path)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) == use.COMPILED_FOR_ABI


@pytest.mark.parametrize("step", [1, -1])
def test_other_abi_is_refused(tmp_path, step):
    build_against(tmp_path, lambda abi: abi + step)
    result = import_other(tmp_path)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError:")
    assert "abi" in last.lower()
    assert "arenapy" in last
