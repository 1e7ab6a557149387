"""Programs that PyInstaller freezes."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

PROGRAM = """
import multiprocessing
import arenapy

def fill(x):
    x[:] = 3

if __name__ == "__main__":
    multiprocessing.freeze_support()
    x = arenapy.Pool(source=arenapy.Shared()).zeros(2)
    child = multiprocessing.get_context("spawn").Process(target=fill, args=(x,))
    child.start()
    child.join()
    with arenapy.numpy_memory(arenapy.Pool()), arenapy.measure():
        print(x + 1)
    with arenapy.trace.record(arenapy.Slab(64, count=9), "a.trace"):
        pass
    print(str(arenapy.trace.load("a.trace").summary()).partition(":")[0])
"""


@pytest.fixture
def hook():
    """The file that the entry point leads to."""
    module, _, name = PROJECT["entry-points"]["pyinstaller40"]["hook-dirs"].partition(":")
    (folder,) = getattr(importlib.import_module(module), name)()
    return Path(folder, "hook-arenapy.py")


def test_the_hook_has_what_compiled_modules_import(hook):
    code = next(
        node.value
        for node in ast.parse(hook.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "STANDARD_LIBRARY"
    )
    listed = eval(ast.unparse(code))
    line = re.compile(r"^ *(?:from ([\w.]+) import|import ([\w.]+))", re.MULTILINE)
    found = {
        module.partition(".")[0]
        for path in ROOT.glob("arenapy/**/*.pyx")
        for words in line.findall(path.read_text())
        for module in words
    }
    assert found & sys.stdlib_module_names - {"__future__"} <= {
        module.partition(".")[0] for module in listed
    }


@pytest.mark.long
def test_a_frozen_program_runs(hook, tmp_path):
    pytest.importorskip("PyInstaller")
    (tmp_path / "app.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "PyInstaller", "--additional-hooks-dir", hook.parent, "app.py"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    done = subprocess.run(["dist/app/app"], cwd=tmp_path, check=True, capture_output=True)
    assert done.stdout == b"[4. 4.]\nSlab\n"
