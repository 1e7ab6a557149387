"""The ways that ``arenapy compare`` knows of running a program, and which of them are here.

What lives here: the libraries of other mallocs, and the settings that make them good at large
arrays. What does not: running and measuring.
"""

from __future__ import annotations

import ctypes.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["OURS", "OURS_ALONE", "PLAIN", "WAYS", "Way"]

PLAIN, OURS, OURS_ALONE = "plain", "arenapy", "pool-alone"

#: Variables that change a malloc from outside. An alternative has only its own.
TUNING = ("LD_PRELOAD", "GLIBC_TUNABLES", "MALLOC_", "MIMALLOC_", "TCMALLOC_")

NEVER = 1 << 40  # bytes: a threshold that nothing reaches
TOP_PAD = 64 << 20  # bytes by which glibc's heap grows


@dataclass(frozen=True, slots=True)
class Way:
    """A way of running a program.

    Attributes
    ----------
    about : str
        For the help.
    libraries : tuple of str
        One of which is preloaded, the first one that is installed.
    settings : mapping
        Environment variables.
    package : str
        Debian's, which has it.
    """

    about: str
    libraries: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    package: str = ""

    def library(self) -> str | None:
        """The file name of its library; None: none is needed, or installed."""
        return next(filter(None, map(ctypes.util.find_library, self.libraries)), None)

    def missing(self) -> str | None:
        """Why it cannot be used here, if it cannot."""
        if not self.libraries or self.library():
            return None
        return f"not installed; Debian has it in {self.package}"

    def environment(self) -> dict[str, str]:
        """Of the program: this process's, and for an alternative no other malloc's settings."""
        if not self.libraries and not self.settings:
            return dict(os.environ)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(TUNING)}
        library = self.library()
        return kept | dict(self.settings) | ({"LD_PRELOAD": library} if library else {})


#: By the name that ``--with`` takes; the first two are compared anyway.
WAYS = {
    PLAIN: Way("without arenapy, in the present environment"),
    OURS: Way("under arenapy run"),
    OURS_ALONE: Way("under arenapy run --libc none"),
    "jemalloc": Way(
        "preloaded, with huge pages, returns nothing to the system",
        ("jemalloc",),
        {"MALLOC_CONF": "thp:always,dirty_decay_ms:-1,muzzy_decay_ms:-1,oversize_threshold:0"},
        "libjemalloc2",
    ),
    "mimalloc": Way("preloaded", ("mimalloc",), package="libmimalloc2.0"),
    "tcmalloc": Way("preloaded", ("tcmalloc", "tcmalloc_minimal"), package="libtcmalloc-minimal4"),
    "glibc-tuned": Way(
        "malloc of the C library, with huge pages, returns nothing to the system",
        settings={
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:"
            f"glibc.malloc.mmap_threshold={NEVER}:glibc.malloc.trim_threshold={NEVER}:"
            f"glibc.malloc.top_pad={TOP_PAD}"
        },
    ),
}
