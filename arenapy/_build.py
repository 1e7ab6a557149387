"""The build hook that pyproject.toml names: what its tables cannot say.

setuptools loads this file by its path, so nothing here may import the package, which is not built
yet. What lives here: the platform check, the flags and Cython directives that every extension
module shares, NumPy's headers for the one module that may see them, and where generated files go.
"""

import contextlib
import gc
import hashlib
import importlib.metadata
import os
import runpy
import shutil
import sysconfig
from pathlib import Path
from typing import Any

from Cython.Build import cythonize
from setuptools.command.build_ext import build_ext as _build_ext
from setuptools.command.sdist import sdist as _sdist
from setuptools.errors import PlatformError

HERE = Path(__file__).parent
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
NUMPY_MODULES = {
    "arenapy.buffer.ndarray",
    "arenapy.numpy_handler.contexts",
    "arenapy.numpy_handler.handler",
}

# An allocation, a free, an export and a recorded event run these, so they are compiled with -O3.
# The rest makes system calls, checks or reports. It gets -Og, which takes less than half as long.
HOT = {
    f"arenapy.{folder}.{module}"
    for folder, modules in {
        "allocator": "allocator allocator_core",
        "base": "abi interval_set sizes thread_slot",
        "buffer": "block buffer dlpack ndarray",
        "bump": "bump core",
        "commands.replay": "loop",
        "cuda": "driver fence ordering resource stream_ref",
        "diagnostics": "call_sites recorder",
        "interop": "cupy_blocks raw_blocks",
        "numpy_handler": "handler",
        "pool": "c_api core page_heap pool stream_cache thread_cache",
        "slab": "core slab",
    }.items()
    for module in modules.split()
}

# These follow CFLAGS on the compiler's command line, so an optimization level chosen there is left
# alone. Hidden visibility: modules call each other through Cython's capsules, never by symbol.
COMPILE_ARGS = ["-fvisibility=hidden"]
LINK_ARGS = []
CHOSEN_LEVEL = "-O" in os.environ.get("CFLAGS", "")
if "-g" not in os.environ.get("CFLAGS", ""):
    # CPython's own flags may ask for debug information, which is five sixths of the installed
    # package, and for warnings about generated code, which take 6 % of the time.
    COMPILE_ARGS += ["-g0", "-Wno-all", "-Wno-sign-compare"]
    LINK_ARGS.append("-Wl,--strip-all")

DIRECTIVES: dict[str, Any] = {
    "language_level": 3,
    # Indices of lists and tuples are checked (C arrays are not): while a call runs code of the
    # user, that code can find the call's own lists through the collector, and shorten them.
    "boundscheck": True,
    "wraparound": False,
    "freethreading_compatible": True,
    # No method that sets the fields of an object from outside, and no None where a method expects
    # an object of a class: both would be a crash (see sealed.pyx).
    "auto_pickle": False,
    "allow_none_for_extension_args": False,
    # Plain method descriptors: CPython calls them faster than Cython's own function objects. The
    # embedded signature is in the form that help() and inspect.signature() read.
    "binding": False,
    "embedsignature": True,
    "embedsignature.format": "clinic",
}

# Cython 3.3 frees an item of a comprehension twice if there is no memory for its list to grow: the
# helper gives the item up, and so does the error path of its caller. Here the helper keeps it then.
FREED_TWICE = """PyList_Append(list, x);
    Py_DECREF(x);
"""
FREED_ONCE = """PyList_Append(list, x);
    if (likely(result == 0)) Py_DECREF(x);
"""


class build_ext(_build_ext):  # type: ignore[misc]
    """Cythonize and compile on all cores, and again only what a change touches."""

    parallel: int | None

    def finalize_options(self) -> None:
        """Refuse other platforms; give builds in place a build directory that stays."""
        try:
            runpy.run_path(str(HERE / "_platform.py"))["require_supported"]()
        except ImportError as error:
            raise PlatformError(str(error)) from None
        if self.editable_mode or self.inplace:
            # setuptools would use a temporary one, and so compile everything every time.
            stays = Path("build", f"editable-{sysconfig.get_config_var('SOABI')}")
            self.build_lib = str(stays / "lib")
            self.build_temp = str(stays / "temp")
        super().finalize_options()

    def build_extensions(self) -> None:
        """Turn .pyx into .c, out of the source tree, then compile."""
        for extension in self.extensions:
            level = [] if CHOSEN_LEVEL else ["-O3" if extension.name in HOT else "-Og"]
            extension.extra_compile_args = COMPILE_ARGS + level + extension.extra_compile_args
            extension.extra_link_args = LINK_ARGS + extension.extra_link_args
            if extension.name in NUMPY_MODULES:
                add_numpy(extension)
        self.parallel = self.parallel or CORES
        self.cythonize()
        # Other flags make other objects, which their dates do not say.
        flags = os.environ.get("CFLAGS", "")
        noted = Path(self.build_temp, "cflags")
        if not noted.exists() or noted.read_text() != flags:
            self.force = True
        noted.unlink(missing_ok=True)  # until all are compiled
        # The longest first: then all cores end at about the same time.
        self.extensions.sort(key=compile_time, reverse=True)
        super().build_extensions()
        noted.parent.mkdir(parents=True, exist_ok=True)
        noted.write_text(flags)

    def cythonize(self) -> None:
        """Replace each extension's sources by the generated ones, current with every .pxd."""
        generated = Path("build", f"cython-{importlib.metadata.version('cython')}")
        kept = kept_translation(generated.name)
        if kept is not None and kept.exists():
            shutil.copytree(kept, generated, dirs_exist_ok=True)
            for extension in self.extensions:
                extension.sources = [
                    str(generated / Path(source).with_suffix(".c")) for source in extension.sources
                ]
            return
        hook_changed = any(
            c_file.stat().st_mtime < Path(__file__).stat().st_mtime
            for c_file in generated.rglob("*.c")
        )
        gc.set_threshold(200_000)  # Cython's trees are large: collecting takes a third of its time
        translated = cythonize(
            self.extensions,
            build_dir=str(generated),
            compiler_directives=DIRECTIVES,
            force=self.force or hook_changed,
            nthreads=CORES,
        )
        for extension, new in zip(self.extensions, translated, strict=True):
            correct(Path(new.sources[0]))
            extension.sources = new.sources
            extension.depends = [*new.depends, __file__]
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            part = kept.with_name(f"{kept.name}.{os.getpid()}")
            shutil.copytree(generated, part)
            with contextlib.suppress(OSError):  # another build was quicker
                part.rename(kept)


class sdist(_sdist):  # type: ignore[misc]
    """A source distribution with everything that a clone has, so that it can be tested."""

    def make_distribution(self) -> None:
        """Add what setuptools does not know to be part of the sources."""
        self.filelist.include("CHANGELOG.md")
        for directory in ("asv_benches", "docs", "tests"):
            for pattern in ("*.c", "*.json", "*.md", "*.npz", "*.py", "*.pyx", "*.toml"):
                self.filelist.recursive_include(directory, pattern)
        self.filelist.recursive_include("tests/testing/corpus", "*")
        for product in ("asv_benches/.asv", "docs/_build", "tests/downstream/build"):
            self.filelist.prune(product)
        super().make_distribution()


def kept_translation(cython: str) -> Path | None:
    """Where builds of the same sources in several trees share their C files, if they are to.

    Cython's own cache is for one path of Cython, and each of pip's isolated builds has another.
    """
    folder = os.environ.get("ARENAPY_TRANSLATED")
    if folder is None:
        return None
    digest = hashlib.sha256()
    for source in sorted([*HERE.rglob("*.pyx"), *HERE.rglob("*.pxd"), Path(__file__)]):
        digest.update(f"{source.relative_to(HERE)} {source.stat().st_size} ".encode())
        digest.update(source.read_bytes())
    return Path(folder, f"{cython}-{digest.hexdigest()[:16]}")


def correct(c_file: Path) -> None:
    """Mend what Cython gets wrong."""
    code = c_file.read_text(encoding="utf-8")
    if FREED_TWICE in code:
        c_file.write_text(code.replace(FREED_TWICE, FREED_ONCE), encoding="utf-8")


def compile_time(extension: Any) -> int:
    """How long one extension takes to compile, in no unit: hot ones take about twice as long."""
    size = sum(os.path.getsize(source) for source in extension.sources)
    return size * (1 + (extension.name in HOT))


def add_numpy(extension: Any) -> None:
    """Give one extension NumPy's headers, for an ABI that every supported NumPy has."""
    import numpy

    extension.include_dirs.append(numpy.get_include())
    extension.define_macros += [
        ("NPY_TARGET_VERSION", "NPY_2_0_API_VERSION"),
        ("NPY_NO_DEPRECATED_API", "NPY_2_0_API_VERSION"),
    ]
