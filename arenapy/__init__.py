"""arenapy: arena allocators over prefaulted memory, handed out as zero-copy buffers.

A *source* (:class:`Host`, :class:`Shared`, :class:`File`, :class:`Existing`) makes
*regions*. An *allocator* (:class:`Bump`, :class:`Slab`, :class:`Pool`) divides them into blocks.
The user gets a :class:`Buffer` or an ndarray over a block. arenapy never reuses and never unmaps a
byte that somebody can still see.
"""

import importlib
import sys
from typing import TYPE_CHECKING

if getattr(sys, "argv", [""])[:1] == ["-m"] and not sys.flags.safe_path:
    # ``python -m arenapy`` and the like: the modules of the current folder, which Python puts
    # first, are the program's that a command runs, and not for us. (In ``python -m package`` whose
    # __init__.py imports this, they are the package's. Python's own arguments end with the name.)
    _named = "".join(sys.orig_argv[-len(sys.argv) :][:1])
    if _named.startswith("-"):  # -mNAME
        _named = _named.partition("m")[2]
    if _named.partition(".")[0] == "arenapy":
        del sys.path[0]

from arenapy._platform import explain_source_tree, require_supported

require_supported()

try:
    from arenapy import pickling as _pickling  # noqa: F401  # it teaches Buffers to be pickled
except ModuleNotFoundError as _error:
    explain_source_tree(_error)
    raise

# Now, as Buffer needs it at its first export, where a callback may interrupt it and export, too.
from arenapy.buffer import dlpack as _dlpack  # noqa: E402, F401  # isort: skip
from arenapy._version import __version__  # noqa: E402
from arenapy.allocator.allocator import Allocator  # noqa: E402
from arenapy.base.sizes import SIZE_CLASSES, size_class  # noqa: E402
from arenapy.buffer.buffer import Buffer  # noqa: E402
from arenapy.bump.bump import Bump  # noqa: E402
from arenapy.bump.core import Mark  # noqa: E402
from arenapy.errors import MemoryCorruption, OutOfMemory  # noqa: E402
from arenapy.memory.region import Region  # noqa: E402
from arenapy.memory.sources import Existing, File, Host, Shared, Source  # noqa: E402
from arenapy.pool.pool import Pool  # noqa: E402
from arenapy.slab.slab import Slab  # noqa: E402

if TYPE_CHECKING:
    from arenapy import plot, trace
    from arenapy.linux.limits import MemoryInfo, memory_info
    from arenapy.measurement import Measurement, measure
    from arenapy.memory.messages import receive, send
    from arenapy.numpy_handler.numpy_memory import Handle, handles, numpy_memory
    from arenapy.per_thread import PerThread
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

# Half the time of the import would go to what most programs never use. It is imported at its first
# use instead (PEP 562): a module of the package, or a name and the module that has it.
_LATER = {
    "plot": None,
    "trace": None,
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

if not TYPE_CHECKING:  # a type checker would take any name for one of these

    def __getattr__(name):
        """Import what a name stands for, once."""
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f"{__name__}.{_LATER[name] or name}")
        value = module if _LATER[name] is None else getattr(module, name)
        globals()[name] = value
        return value

    def __dir__():
        """The public names, whether they were used or not; this imports nothing."""
        return sorted(__all__)
