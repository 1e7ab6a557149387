"""arenapy: arena allocators over prefaulted memory, handed out as zero-copy buffers.

A *source* (:class:`Host`, :class:`Shared`, :class:`File`, :class:`Existing`) makes
*regions*; an *allocator* (:class:`Bump`) carves them up; what the user holds is a
:class:`Buffer` or an ndarray over one. A byte that somebody can still see is never handed out
again and never unmapped.
"""

from arenapy._platform import require_supported

require_supported()

from arenapy._version import __version__  # noqa: E402
from arenapy.allocator import Allocator  # noqa: E402
from arenapy.buffer import Buffer  # noqa: E402
from arenapy.bump import Bump  # noqa: E402
from arenapy.errors import OutOfMemory  # noqa: E402
from arenapy.mark import Mark  # noqa: E402
from arenapy.memory_info import MemoryInfo, memory_info  # noqa: E402
from arenapy.per_thread import PerThread  # noqa: E402
from arenapy.region import Region  # noqa: E402
from arenapy.source import Existing, File, Host, Shared, Source  # noqa: E402
from arenapy.stats import BumpStats  # noqa: E402

__all__ = [
    "Allocator",
    "Buffer",
    "Bump",
    "BumpStats",
    "Existing",
    "File",
    "Host",
    "Mark",
    "MemoryInfo",
    "OutOfMemory",
    "PerThread",
    "Region",
    "Shared",
    "Source",
    "__version__",
    "memory_info",
]
