"""arenapy: arena allocators over prefaulted memory, handed out as zero-copy buffers.

A *source* (:class:`Host`, :class:`Shared`, :class:`File`, :class:`Existing`) makes
*regions*. An *allocator* (:class:`Bump`, :class:`Slab`, :class:`Pool`) divides them into blocks.
The user gets a :class:`Buffer` or an ndarray over a block. arenapy never reuses and never unmaps a
byte that somebody can still see.
"""

import sys

from arenapy._version import __version__

TYPE_CHECKING = False  # without importing typing

# A program may put there what it likes.
_program = list(map(str, getattr(sys, "argv", None) or ()))[:1]
if _program == ["-m"]:
    # ``python -m arenapy`` and the like. Python's own arguments end with the name.
    _program = ["".join(sys.orig_argv[-len(sys.argv) :][:1])]
    if _program[0].startswith("-"):  # -mNAME
        _program = [_program[0].partition("m")[2]]
    if _program[0].partition(".")[0] == "arenapy" and not sys.flags.safe_path:
        # The modules of the current folder, which Python puts first, are the program's that a
        # command runs, and not for us. (In ``python -m package`` whose __init__.py imports this,
        # they are the package's.)
        del sys.path[0]

if TYPE_CHECKING:
    from arenapy import plot, trace
    from arenapy.allocator.allocator import Allocator
    from arenapy.base.sizes import SIZE_CLASSES, size_class
    from arenapy.buffer.buffer import Buffer
    from arenapy.bump.bump import Bump
    from arenapy.bump.core import Mark
    from arenapy.errors import MemoryCorruption, OutOfMemory
    from arenapy.linux.limits import MemoryInfo, memory_info
    from arenapy.measurement import Measurement, measure
    from arenapy.memory.messages import receive, send
    from arenapy.memory.region import Region
    from arenapy.memory.sources import Existing, File, Host, Shared, Source
    from arenapy.numpy_handler.numpy_memory import Handle, handles, numpy_memory
    from arenapy.per_thread import PerThread
    from arenapy.pool.pool import Pool
    from arenapy.slab.slab import Slab
    from arenapy.stats import (
        BlockInfo,
        BumpStats,
        ClassStats,
        Defragmented,
        NumpyMemoryStats,
        PoolStats,
        SlabStats,
    )

__all__ = [
    "SIZE_CLASSES",
    "Allocator",
    "BlockInfo",
    "Buffer",
    "Bump",
    "BumpStats",
    "ClassStats",
    "Defragmented",
    "Existing",
    "File",
    "Handle",
    "Host",
    "Mark",
    "Measurement",
    "MemoryCorruption",
    "MemoryInfo",
    "NumpyMemoryStats",
    "OutOfMemory",
    "PerThread",
    "Pool",
    "PoolStats",
    "Region",
    "Shared",
    "Slab",
    "SlabStats",
    "Source",
    "__version__",
    "handles",
    "measure",
    "memory_info",
    "numpy_memory",
    "plot",
    "receive",
    "send",
    "size_class",
    "trace",
]

# By name, the module of the package that has it, and "" for a module of that name.
_NOW: dict[str, str] = {
    "Allocator": "allocator.allocator",
    "SIZE_CLASSES": "base.sizes",
    "size_class": "base.sizes",
    "Buffer": "buffer.buffer",
    "Bump": "bump.bump",
    "Mark": "bump.core",
    "MemoryCorruption": "errors",
    "OutOfMemory": "errors",
    "Region": "memory.region",
    "Existing": "memory.sources",
    "File": "memory.sources",
    "Host": "memory.sources",
    "Shared": "memory.sources",
    "Source": "memory.sources",
    "Pool": "pool.pool",
    "Slab": "slab.slab",
}
# Half the time of the import would go to names that most programs never use. Each of these is
# imported at its first use instead (PEP 562).
_LATER = {
    "plot": "",
    "trace": "",
    "load_ipython_extension": "commands.notebook",  # %load_ext arenapy
    "MemoryInfo": "linux.limits",
    "memory_info": "linux.limits",
    "Measurement": "measurement",
    "measure": "measurement",
    "receive": "memory.messages",
    "send": "memory.messages",
    "Handle": "numpy_handler.numpy_memory",
    "handles": "numpy_handler.numpy_memory",
    "numpy_memory": "numpy_handler.numpy_memory",
    "PerThread": "per_thread",
    "BlockInfo": "stats",
    "BumpStats": "stats",
    "ClassStats": "stats",
    "Defragmented": "stats",
    "NumpyMemoryStats": "stats",
    "PoolStats": "stats",
    "SlabStats": "stats",
}


def _import(name: str, place: str) -> object:
    import importlib

    module = importlib.import_module(f"{__name__}.{place or name}")
    globals()[name] = value = getattr(module, name) if place else module
    return value


if not TYPE_CHECKING:  # a type checker would take any name for one of these

    def __getattr__(name):
        """Import what a name stands for, once."""
        if name in _LATER:
            return _import(name, _LATER[name])
        if not name.startswith("__"):
            import arenapy._now  # noqa: F401

            if name in globals():
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        """The public names, whether they were used or not; this imports nothing."""
        return sorted(__all__)


# The command ``arenapy run`` becomes another process, which would wait for nothing. Other commands
# import the rest when they start (commands/cli.py), and a program of this name at its first use.
# So does a program under ``arenapy run``, which has its pool (run/startup/sitecustomize.py).
if "".join(_program).rpartition("/")[2] != "arenapy" and "_at_first_use" not in globals():
    import arenapy._now  # noqa: F401
