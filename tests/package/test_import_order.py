"""A folder of the package imports only from folders above it.

The order is data. Imports inside functions count, and so do cimports. Entry points (``__main__``,
and ``__init__`` of the package with ``_now``) stand below everything: nothing imports them.
"""

import ast
import re
from pathlib import Path

import pytest

import arenapy

PACKAGE = Path(arenapy.__file__).parent

#: From the top. A name is a folder, or a module beside the folders.
ORDER = (
    "_version",
    "_platform",
    "errors",
    "base",
    "stats",
    "linux",
    "diagnostics",
    "buffer",
    "memory",
    "pickling",
    "allocator",
    "bump",
    "slab",
    "pool",
    "numpy_handler",
    "cuda",
    "interop",
    "measurement",
    "plot",
    "per_thread",
    "debug",
    "trace",
    "testing",
    "commands",
)
ENTRY_POINTS = ("__init__", "_now", "__main__", "_build")
STRING = re.compile(r'("""|\'\'\')(?:\\.|.)*?\1', re.DOTALL)
COMMENT = re.compile(r"#[^\n]*")
FROM = re.compile(r"^[ \t]*from[ \t]+([\w.]+)[ \t]+c?import[ \t]+(\([^)]*\)|[^\n]*)", re.MULTILINE)
PLAIN = re.compile(r"^[ \t]*c?import[ \t]+([\w., \t]+)", re.MULTILINE)


def cython_imports(text, package):
    """The modules that Cython code names in an import or a cimport."""
    text = COMMENT.sub("", STRING.sub("", text))
    for match in FROM.finditer(text):
        module, names = match.groups()
        dots = len(module) - len(module.lstrip("."))
        if dots:
            parts = package.split(".")
            module = ".".join([*parts[: len(parts) - dots + 1], *filter(None, [module[dots:]])])
        for name in re.findall(r"(\w+)(?:[ \t]+as[ \t]+\w+)?", names):
            yield f"{module}.{name}"
    for match in PLAIN.finditer(text):
        yield from (part.split()[0] for part in match[1].split(",") if part.strip())


def python_imports(text, package):
    """The same of Python code."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            start = parts[: len(parts) - node.level + 1] if node.level else []
            module = ".".join([*start, *filter(None, [node.module])])
            yield from (f"{module}.{name.name}" for name in node.names)


def room_of(module):
    """The folder of a module of the package, or the module beside the folders; None: another."""
    parts = module.split(".")
    return parts[1] if parts[0] == "arenapy" and len(parts) > 1 else None


def edges(path, root):
    """The rooms that a file imports from, each with the module that it names."""
    package = ".".join(path.relative_to(root.parent).parent.parts)
    read = python_imports if path.suffix == ".py" else cython_imports
    for module in read(path.read_text(), package):
        room = room_of(module)
        if room in ORDER:
            yield room, module


def against_the_order(root):
    """Every import that names a room which does not stand above the file's own."""
    found = []
    for path in sorted(root.rglob("*.p*")):
        if path.suffix not in (".py", ".pyx", ".pxd") or path.stem in ("__main__", "_build"):
            continue
        parts = path.relative_to(root).parts
        if parts[0].partition(".")[0] in ("__init__", "_now"):
            continue
        own = parts[0].partition(".")[0]
        assert own in ORDER, f"{own} has no place in ORDER"
        for room, module in edges(path, root):
            if ORDER.index(room) > ORDER.index(own):
                found.append(f"{'/'.join(parts)} -> {module}")
    return found


@pytest.mark.full
def test_each_folder_imports_from_above():
    assert not against_the_order(PACKAGE)


def test_every_room_exists():
    rooms = {path.stem for path in PACKAGE.iterdir() if path.is_dir() or path.suffix == ".py"}
    rooms |= {path.stem for path in PACKAGE.glob("*.pyx")}
    assert rooms - {"__pycache__", *ENTRY_POINTS} == set(ORDER)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("base/a.pyx", "from arenapy.linux.vm cimport Mapping"),
        ("base/a.pxd", "from arenapy.pool.core cimport (\n    PoolCore,\n)"),
        ("linux/a.py", "def f():\n    from arenapy import debug"),
        ("linux/a.pyx", "def f():\n    import arenapy.trace.format as f"),
        ("bump/a.py", "from ..slab import core"),
        ("bump/a.pyx", "from ..slab.core cimport SlabCore"),
        ("errors.py", "import os, arenapy.stats"),
    ],
)
def test_an_edge_against_the_order_is_named(tmp_path, file, line):
    root = tmp_path / "arenapy"
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text(f'"""from arenapy.commands import cli"""\n{line}\n')
    [found] = against_the_order(root)
    assert found.startswith(f"{file} -> arenapy.")
