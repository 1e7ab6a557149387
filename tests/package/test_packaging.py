"""What the tree and the installed package promise as a whole."""

import ast
import importlib
import importlib.metadata
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

import arenapy
from arenapy._platform import require_supported

ROOT = Path(__file__).parents[2]
PACKAGE = Path(arenapy.__file__).parent

#: What a user may not have installed, or should not wait for at `import arenapy`.
NOT_AT_IMPORT = [
    "matplotlib", "hypothesis", "multiprocessing", "rich", "html", "pathlib",
    "arenapy.plot", "arenapy.trace", "arenapy.stats", "arenapy.measurement", "arenapy.cuda",
    "arenapy.numpy_handler", "arenapy.linux.outputs",
]  # fmt: skip

TOP_LEVEL = {
    "CHANGELOG.md", "LICENSE", "README.md", "arenapy", "asv_benches", "docs", "pyproject.toml",
    "tests",
}  # fmt: skip
BUILD_PRODUCTS = {"build", "dist", "arenapy_memory.egg-info"}


#: Each in a fork of a process that has imported nothing but NumPy; prints those that fail.
IMPORT_EACH = """
import importlib, os, sys, traceback
import numpy
for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            importlib.import_module(name)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(name)
"""


def importable_modules():
    """Every module of the package but the build hook (setuptools) and the command's entry."""
    names = (module.name for module in pkgutil.walk_packages(arenapy.__path__, "arenapy."))
    return [name for name in names if not name.endswith(("._build", ".__main__"))]


def test_top_level():
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert found - BUILD_PRODUCTS == TOP_LEVEL


def test_version_is_stated_once():
    assert importlib.metadata.version("arenapy-memory") == arenapy.__version__
    newest = re.search(r"^## \[?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert newest[1] == arenapy.__version__


def test_every_pyx_is_built_and_has_a_stub():
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = tomllib.load(file)["tool"]["setuptools"]["ext-modules"]
    sources = {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.pyx")}
    assert {source for extension in listed for source in extension["sources"]} == sources
    assert not [source for source in sources if not (ROOT / source).with_suffix(".pyi").exists()]


def test_the_modules_compiled_for_speed_exist():
    """A renamed one would silently be compiled as the others are."""
    hook = ast.parse((ROOT / "arenapy" / "_build.py").read_text())
    hot = next(node for node in hook.body if ast.unparse(node).startswith("HOT = "))
    namespace = {}
    exec(ast.unparse(hot), namespace)
    assert namespace["HOT"]
    for name in namespace["HOT"]:
        assert (ROOT / name.replace(".", "/")).with_suffix(".pyx").exists(), name


def test_public_names_exist_and_are_documented():
    assert arenapy.__all__
    for name in arenapy.__all__:
        value = getattr(arenapy, name)
        if not name.startswith("__"):
            assert value.__doc__, name


def test_no_public_pxd_mentions_numpy():
    """Its headers and import_array() would be forced on every downstream package."""
    for pxd in PACKAGE.rglob("*.pxd"):
        code = re.sub(r"#.*", "", pxd.read_text())
        assert not re.search(r"c?import[^\n]*numpy", code), pxd


def test_import_is_lean():
    program = (
        f"import numpy, sys; there = [*sys.modules]; import arenapy; "
        f"print([m for m in {NOT_AT_IMPORT!r} if m in sys.modules and m not in there])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert result.stdout.strip() == "[]"


def test_what_is_imported_later_is_there_from_the_start():
    """The names in `dir` are the public ones, each is made at its first use, and no other is."""
    program = """
import sys, arenapy
before = [*sys.modules]
assert dir(arenapy) == sorted(arenapy.__all__)
assert [*sys.modules] == before, "dir imports nothing"
assert "plot" not in vars(arenapy)
for name in arenapy.__all__:
    assert getattr(arenapy, name) is getattr(arenapy, name) is vars(arenapy)[name], name
import arenapy.measurement  # a module must not take a function's name
with arenapy.measure() as m:
    pass
try:
    arenapy.nothing
except AttributeError as error:
    assert "'arenapy' has no attribute 'nothing'" in str(error)
else:
    raise AssertionError("a name of nothing")
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.long
def test_every_module_imports_on_its_own():
    """No module relies on another of ours having been imported before it."""
    one_thread = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # so that it may fork
    command = [sys.executable, "-W", "error", "-c", IMPORT_EACH, *importable_modules()]
    done = subprocess.run(command, env=one_thread, check=True, capture_output=True, text=True)
    assert not done.stdout, done.stderr


@pytest.mark.parametrize(
    ("attribute", "value", "named"),
    [
        ("sys.platform", "darwin", "darwin"),
        ("sys.platform", "win32", "win32"),
        ("os.uname", lambda: SimpleNamespace(machine="riscv64"), "riscv64"),
        ("sys.maxsize", 2**31 - 1, "32-bit"),
    ],
)
def test_other_platforms_are_refused_in_one_sentence(monkeypatch, attribute, value, named):
    monkeypatch.setattr(attribute, value)
    with pytest.raises(ImportError, match=named) as refusal:
        require_supported()
    text = str(refusal.value)
    assert "x86-64 and aarch64 only" in text
    assert text.count(".") == 1
    assert "\n" not in text


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_supported_platforms_are_accepted(monkeypatch, machine):
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine=machine))
    require_supported()


def test_import_refuses_other_platforms_before_loading_anything_compiled():
    program = """
import os, sys, types
os.uname = lambda: types.SimpleNamespace(machine="riscv64")
try:
    import arenapy
except ImportError as error:
    assert "aarch64 only" in str(error), error
    assert not [m for m in sys.modules.values() if getattr(m, "__file__", None)
                and m.__name__.startswith("arenapy") and m.__file__.endswith(".so")]
else:
    raise AssertionError("imported")
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    "act", ["import arenapy", "from arenapy import Pool", "import arenapy.cuda"]
)
def test_an_old_numpy_is_refused_in_one_sentence(act):
    program = f"""
import sys, types
numpy = sys.modules["numpy"] = types.ModuleType("numpy")
numpy.__version__ = "1.26.4"
try:
    {act}
except ImportError as error:
    assert "needs NumPy 2.0 or newer, and this is NumPy 1.26.4: " in str(error), error
else:
    raise AssertionError("imported")
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_source_tree_says_that_it_is_not_built(tmp_path):
    """A clone hides the installed package from a Python that starts in it."""
    unbuilt = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "arenapy", tmp_path / "arenapy", ignore=unbuilt)

    def last_line(*flags):
        command = [sys.executable, *flags, "-c", "import arenapy"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        return done.stderr.splitlines()[-1] if done.returncode else ""

    (tmp_path / "pyproject.toml").touch()
    message = last_line()
    assert message.startswith("ImportError: You are importing arenapy from its source tree, ")
    assert message.endswith(f"{sys.executable} -m pip install -e {tmp_path}")
    assert not last_line("-P")
    # An installed package that is incomplete names the missing file.
    (tmp_path / "pyproject.toml").unlink()
    assert last_line().startswith("ModuleNotFoundError: No module named 'arenapy.")
