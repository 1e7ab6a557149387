"""torch's history of its allocator, as columns: what `arenapy.trace.from_torch` reads.

What lives here: telling a snapshot of torch's from anything else, and which of its entries are
allocations and frees. What does not: traces. torch is not needed: a snapshot is dicts, lists and
numbers, and its file a pickle of those. One that names a class or a function is refused, since it
could run anything.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import re
import reprlib
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from arenapy.base.text import printable
from arenapy.trace.format import Frame, Site, check_file

__all__ = ["History", "Snapshot", "history", "is_pickle"]

#: The result of ``torch.cuda.memory._snapshot()``, or the file of ``_dump_snapshot()``.
Snapshot: TypeAlias = Mapping[str, Any] | str | os.PathLike[str]

#: Operations by torch's actions. Other actions are about the recording itself, or say
#: "free_requested": the block is not free then if other streams use it.
ACTIONS = {
    "alloc": "alloc",
    "free_completed": "free",
    "segment_alloc": "grow",
    "segment_map": "grow",
    "segment_free": "trim",
    "segment_unmap": "trim",
}
OF_BLOCKS = ("alloc", "free_completed")
MAX_FRAMES = 64  # of a site
MAX_LINE = 10**9 - 1
MAX_BITS_SHOWN = 128
#: The most of each number that a trace has room for.
MOST = {"addr": 2**64 - 1, "size": 2**48 - 1, "stream": 2**64 - 1, "time_us": 2**63 - 1}
MAX_NS = 2**56 - 1  # since the first
REMEDY = "call torch.cuda.memory._record_memory_history() before the work, _snapshot() after it"


@dataclass(frozen=True, eq=False, slots=True)
class History:
    """Allocations, frees and segments of one device, in torch's order.

    Attributes
    ----------
    device : int
    started : int
        ns since 1970; 0: not known.
    operations : list of str
    numbers : list of int
        Places in `sites`.
    sites : tuple of tuple of Frame
    columns : dict of str to ndarray of uint64
        ``addr``, ``size``, ``stream``, and ``time_us`` since the first, which never goes back.
    """

    device: int
    started: int
    operations: list[str]
    numbers: list[int]
    sites: tuple[Site, ...]
    columns: dict[str, npt.NDArray[np.uint64]]


#: Operations of a pickle by the bytes that follow: their number, or the width of a count of bytes.
FIXED = {
    0: b"N\x88\x89]ael)t\x85\x86\x87}dsu\x8f\x90\x9102(1\x94\x93Rbo\x81\x92Q\x97\x98",
    1: b"Khq\x82\x80",
    2: b"M\x83",
    4: b"Jj\x84",
    8: b"G\x95",
}
COUNTED = {b"\x8a": 1, b"U": 1, b"C": 1, b"\x8c": 1, b"\x8b": 4, b"T": 4, b"B": 4, b"X": 4}
COUNTED |= {b"\x8e": 8, b"\x96": 8, b"\x8d": 8}
LINES = b"ILSVFgP"


class _Plain(pickle.Unpickler):
    """An unpickler of plain data: it refuses every class and function."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and a snapshot is plain data")


def is_pickle(path: str | os.PathLike[str]) -> bool:
    """True if a file begins as pickles of protocol 2 and later do. A pipe is not read: False."""
    if stat.S_ISFIFO(os.stat(path).st_mode):
        return False
    with open(path, "rb") as file:
        return file.read(1) == pickle.PROTO


@functools.cache
def _run() -> re.Pattern[bytes]:
    """Most operations, as many as follow one another, with short strings."""
    fixed = [b"[%s].{%d}" % (re.escape(codes), n) for n, codes in FIXED.items()]
    short = b"|".join(re.escape(bytes([n])) + b".{%d}" % n for n in range(256))
    return re.compile(b"(?:%s|\\x8c(?:%s))*+" % (b"|".join(fixed), short), re.DOTALL)


def _check_sizes(text: bytes) -> None:
    """Refuse a pickle that says it has more than its bytes can be.

    Python's unpickler allocates what a length says, and for each number of a memorized object an
    array that goes up to it, of 64 GiB for a file of 9 bytes. It reads the same operations in the
    same order, and raises an error at those that are unknown here.
    """
    at = 0
    while True:
        at = _run().match(text, at).end()  # type: ignore[union-attr]  # it may be empty
        code = text[at : at + 1]
        at += 1
        if code in COUNTED:
            size = COUNTED[code]
            at += size + int.from_bytes(text[at : at + size], "little")
            number = 0
        elif code == b"r":
            number = int.from_bytes(text[at : at + 4], "little")
            at += 4
        elif code and code in b"p" + LINES:
            end = text.find(b"\n", at) + 1 or len(text) + 1
            number = int(text[at : end - 1]) if code == b"p" else 0
            at = end
        else:
            return
        if max(at, number) > len(text):
            raise ValueError(f"its {len(text)} bytes say that there are {max(at, number)} or more")


def _read(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    check_file(path)
    text = Path(path).read_bytes()
    try:
        _check_sizes(text)
        found = _Plain(io.BytesIO(text)).load()
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise ValueError(f"{os.fspath(path)!r} is not a snapshot of torch's: {error}") from error
    if not isinstance(found, Mapping):
        raise ValueError(f"{os.fspath(path)!r} is not a snapshot of torch's: {_kind(found)}")
    return found


def _kind(one: object) -> str:
    """Why it is none, for one that is no dict."""
    if isinstance(one, list):
        return "a list, as of torch.cuda.memory_snapshot(), has no history; " + REMEDY
    return f"it is {type(one).__name__}, and should be the dict of torch.cuda.memory._snapshot()"


def history(snapshot: Snapshot, device: int | None) -> History:
    """Read a snapshot. The errors are those of `arenapy.trace.from_torch`."""
    if isinstance(snapshot, str | os.PathLike):
        snapshot = _read(snapshot)
    elif not isinstance(snapshot, Mapping):
        raise TypeError(f"snapshot: {_kind(snapshot)}")
    traces = snapshot.get("device_traces")
    if not isinstance(traces, list | tuple):
        raise ValueError(f"the snapshot has no list of 'device_traces', so no history; {REMEDY}")
    found = [_relevant(trace, ordinal) for ordinal, trace in enumerate(traces)]
    there = [
        ordinal
        for ordinal, entries in enumerate(found)
        if any(entry["action"] in OF_BLOCKS for entry in entries)
    ]
    device = _chosen(there, device)
    entries = found[device]
    columns = {
        name: np.array([_number(entry, name, device) for entry in entries], "u8")
        for name in ("addr", "size", "stream")
    }
    started = 0
    columns["time_us"] = np.zeros(len(entries), "u8")
    if all("time_us" in entry for entry in entries):  # torch 2.0 has no times
        times = np.array([_number(entry, "time_us", device) for entry in entries], "u8")
        started = int(times[0]) * 1000
        columns["time_us"] = np.maximum.accumulate(times) - times[0]
        if columns["time_us"][-1] > MAX_NS // 1000 or started >= 2**63:
            raise ValueError(f"device {device}: times from {times.min()} to {times.max()} us")
    operations = [ACTIONS[entry["action"]] for entry in entries]
    known: dict[Site, int] = {(): 0}
    numbers = [known.setdefault(_site(entry), len(known)) for entry in entries]
    return History(device, started, operations, numbers, tuple(known), columns)


def _site(entry: Mapping[str, Any]) -> Site:
    """The call stack of an allocation. Empty if torch did not record one, or in an unknown form."""
    frames = entry.get("frames")
    if entry["action"] != "alloc" or not isinstance(frames, list | tuple):
        return ()
    try:
        return tuple(
            Frame(_text(frame["filename"]), _line(frame["line"]), _text(frame["name"]))
            for frame in frames[:MAX_FRAMES]
        )
    except (KeyError, TypeError):
        return ()


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} in place of a name")
    return printable(value)


def _line(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{type(value).__name__} in place of a line")
    return value if 0 < value <= MAX_LINE else 0


def _relevant(trace: Any, device: int) -> list[Mapping[str, Any]]:
    """The entries that count."""
    if not isinstance(trace, list | tuple):
        raise ValueError(f"device_traces[{device}] is {type(trace).__name__}, and no list")
    for number, entry in enumerate(trace):
        if not (isinstance(entry, Mapping) and isinstance(entry.get("action"), str)):
            raise ValueError(f"device_traces[{device}][{number}] is not an entry with an 'action'")
    return [entry for entry in trace if entry["action"] in ACTIONS]


def _chosen(there: list[int], device: int | None) -> int:
    """The device that is meant, of those that have a history."""
    if not there:
        raise ValueError(f"the snapshot has no allocations of any device; {REMEDY}")
    if device is None:
        if len(there) > 1:
            raise ValueError(
                f"the snapshot has the history of devices {there}: choose one, with device=N or "
                "with --device N"
            )
        return there[0]
    if device not in there:
        raise ValueError(f"device={device!r}: the snapshot has the history of devices {there}")
    return device


def _number(entry: Mapping[str, Any], name: str, device: int) -> int:
    value = entry.get(name)
    if not isinstance(value, int) or not 0 <= value <= MOST[name]:
        is_long = isinstance(value, int) and value.bit_length() > MAX_BITS_SHOWN
        shown = "..." if is_long else reprlib.repr(value)
        raise ValueError(
            f"device {device}, {entry['action']!r}: {name}={shown} is not a number from 0 to "
            f"{MOST[name]}"
        )
    return value
