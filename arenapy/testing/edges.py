"""Edges: what ran of extension modules that clang built to be watched.

``-fsanitize=fuzzer-no-link`` gives every edge of a module's code a counter of 8 bits, all in one
section of the file. libFuzzer goes by them and prints only their sum; here they are read where they
lie, so that edges can be told by module. Linux on 64 bits.
"""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Edges", "counters_in"]

SECTION = b"__sancov_cntrs"
ELF64 = b"\x7fELF\x02"
HEADER = "<16sHHIQQQIHHHHHH"
SECTION_HEADER = "<IIQQQQIIQQ"


def counters_in(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Where the counters of a shared object are: (offset in memory, how many), None if it has none.

    Parameters
    ----------
    path : path
        Of the file.

    Returns
    -------
    tuple of (int, int) or None

    Notes
    -----
    Thread-safety: may be used from any thread.

    Examples
    --------
    >>> import arenapy.bump.core
    >>> from arenapy.testing.edges import counters_in
    >>> counters_in(arenapy.bump.core.__file__) is None  # as it is installed by default
    True
    """
    content = Path(path).read_bytes()
    if content[:5] != ELF64:
        return None
    header = struct.unpack_from(HEADER, content)
    start, size, count, names = header[6], *header[11:14]
    rows = [struct.unpack_from(SECTION_HEADER, content, start + size * i) for i in range(count)]
    for row in rows:
        name = rows[names][4] + row[0]
        if content[name : name + len(SECTION) + 1] == SECTION + b"\0":
            return row[3], row[5]
    return None


class Edges:
    """The counters of the modules that are loaded when this is made.

    Attributes
    ----------
    modules : dict of str to int
        How many edges each module has.
    total : int
        How many there are.

    Notes
    -----
    Thread-safety: what runs in other threads is counted, too.

    Examples
    --------
    >>> from arenapy.testing.edges import Edges
    >>> edges = Edges()
    >>> edges.total == sum(edges.modules.values())
    True
    """

    def __init__(self) -> None:
        self.modules: dict[str, int] = {}
        self._counters: list[np.ndarray[Any, Any]] = []
        for path, base in _loaded().items():
            found = counters_in(path)
            if found is not None:
                offset, count = found
                name = os.path.basename(path).partition(".")[0]
                memory = (ctypes.c_uint8 * count).from_address(base + offset)
                self.modules[name] = self.modules.get(name, 0) + count
                self._counters.append(np.ctypeslib.as_array(memory))
        self.total = sum(self.modules.values())

    def read(self) -> np.ndarray[Any, Any]:
        """All counters, as they are now: one that is 0 stands for an edge that did not run."""
        return np.concatenate([np.empty(0, "u1"), *self._counters])

    def zero(self) -> None:
        """Start again. libFuzzer does so before each input."""
        for counters in self._counters:
            counters[:] = 0


def _loaded() -> dict[str, int]:
    """Shared objects of this process, and where each one starts."""
    found: dict[str, int] = {}
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and ".so" in fields[5]:
                found.setdefault(fields[5].rstrip("\n"), int(fields[0].partition("-")[0], 16))
    return {path: start for path, start in found.items() if os.path.exists(path)}
