"""The installed wheel holds what the source tree has, and nothing that building it left behind."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import arenapy

INSTALLED = Path(arenapy.__file__).parent
SUFFIXES = {".py", ".pyi", ".pxd", ".typed", ".html", ".gz", ".md"}


@pytest.fixture(scope="module")
def source():
    """The package in the source tree, which whoever built the wheel names."""
    return Path(os.environ["ARENAPY_SOURCE"])


def test_is_not_the_source_tree(source):
    assert not INSTALLED.samefile(source)


def test_every_source_file_is_shipped(source):
    wanted = {
        path.relative_to(source)
        for path in source.rglob("*")
        if path.suffix in SUFFIXES and "__pycache__" not in path.parts
    }
    assert {Path("py.typed"), Path("trace/page.html")} <= wanted
    assert {path for path in wanted if not (INSTALLED / path).is_file()} == set()


def test_every_extension_module_is_shipped(source):
    for pyx in source.rglob("*.pyx"):
        pattern = str(pyx.relative_to(source).with_suffix("")) + ".*.so"
        assert len(list(INSTALLED.glob(pattern))) == 1, pyx


def test_generated_c_is_not_shipped():
    assert not [path for path in INSTALLED.rglob("*") if path.suffix in {".c", ".o"}]


def test_metadata():
    found = metadata.metadata("arenapy-memory")
    assert found["Version"] == arenapy.__version__
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Requires-Python"] == ">=3.11"


def test_build_hook_refuses_other_platforms():
    """In one sentence, and before anything is compiled."""
    program = f"""
import os, runpy
from setuptools import Distribution
os.uname = lambda: os.uname_result(("Linux", "host", "6.1", "#1", "riscv64"))
hook = runpy.run_path({str(INSTALLED / "_build.py")!r})["build_ext"]
hook(Distribution()).finalize_options()
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert "PlatformError" in last
    assert "x86-64 and aarch64 only" in last
    assert "riscv64" in last
