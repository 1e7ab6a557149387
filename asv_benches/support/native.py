"""Compiles c_loops.pyx and pool_loops.pyx against the installed arenapy, on first use.

A result is kept in .asv/native, by a key of whatever it depends on: the interpreter, the loops,
and all of arenapy's .pxd files, since inline functions bake their struct layouts in.
"""

import functools
import hashlib
import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

import arenapy

HERE = Path(__file__).parent
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


def key(source, macros):
    """A hash of everything that the compiled module depends on, for its file name."""
    digest = hashlib.sha256(f"{sys.version} {macros}".encode())
    digest.update(arenapy.__version__.encode())
    for path in [source, *sorted(Path(arenapy.__file__).parent.rglob("*.pxd"))]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def build(source, target, macros):
    """Compile into directory `target`, as arenapy itself is compiled."""
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension

    from arenapy._build import COMPILE_ARGS, DIRECTIVES

    # A copy, since Cython looks for .pxd files beside the package that a source file is in, and
    # here that is arenapy's source tree and not what is installed.
    copy = shutil.copy(source, target)
    extension = Extension(
        source.stem,
        [copy],
        define_macros=[(macro, "1") for macro in macros],
        extra_compile_args=[*COMPILE_ARGS, "-g"],
    )
    modules = cythonize(
        [extension],
        compiler_directives=DIRECTIVES,
        include_path=[str(Path(arenapy.__file__).parents[1])],
        quiet=True,
    )
    command = Distribution({"ext_modules": modules}).get_command_obj("build_ext")
    command.build_lib = str(target)
    command.build_temp = str(target / "temp")
    command.ensure_finalized()
    command.run()


@functools.cache
def load(name="c_loops", *macros):
    """The compiled module, with macros that are defined in it."""
    source = HERE / f"{name}.pyx"
    store = HERE.parent / ".asv" / "native"
    home = store / key(source, macros)
    if not home.exists():
        store.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=store) as temporary:
            build(source, Path(temporary), macros)
            try:
                os.rename(temporary, home)
            except OSError:  # another process was first
                if not home.exists():
                    raise
            else:
                os.mkdir(temporary)  # for the context manager to remove
    spec = importlib.util.spec_from_file_location(name, home / f"{name}{SUFFIX}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
