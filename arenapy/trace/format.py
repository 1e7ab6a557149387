"""Trace files: their form, read and written as arrays.

What lives here: records, and how events, streams and allocation sites lie in them; docs/traces.md
describes the same for others. What does not: what a trace is good for (trace.py), recording
(recorder.pyx).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from arenapy.base.text import printable
from arenapy.linux import outputs

__all__ = ["EVENT", "HEADER", "OPERATIONS", "RECORD", "Contents", "Frame", "Site", "read", "write"]

#: Operation codes, by name.
OPERATIONS = {"alloc": 1, "free": 2, "mark": 3, "reset": 4, "trim": 5, "grow": 7, "keep": 10}
CLOCK, STREAM, SITE, TEXT = 0, 6, 8, 9  # of records that are no operations
MOST = max(TEXT, *OPERATIONS.values())

#: One event: times are ns since the recording began; threads are numbered from 1.
EVENT = np.dtype(
    [
        ("time", "u8"),
        ("address", "u8"),
        ("nbytes", "u8"),
        ("stream", "u8"),
        ("site", "u4"),
        ("thread", "u2"),
        ("operation", "u1"),
    ]
)

MAGIC = outputs.TRACE.begins
VERSION = 2  # 1 had no sites, no "grow" and no "keep"
CLOCKS = ("kernel", "tsc", "cntvct")
HEADER = np.dtype(
    [
        ("magic", "V8"),
        ("version", "<u4"),
        ("header_nbytes", "<u4"),
        ("event_nbytes", "<u4"),
        ("clock", "<u4"),
        ("started", "<i8"),
        ("ticks", "<u8"),
        ("monotonic", "<u8"),
        ("events", "<u8"),
        ("complete", "<u4"),
        ("process", "<u4"),
        ("kind", "S32"),
        ("reserved", "V32"),
    ]
)
RECORD = np.dtype([("time", "<u8"), ("block", "<u8"), ("size", "<u8")])
TIME_BITS = 56
SIZE_BITS = 48
TEXT_NBYTES = 16  # in a record: its last two words
MAX_FRAMES = 64  # of a site
MAX_DIGITS = 9  # of a line's number
MAX_BYTES = 2**62  # of all events together: sums are numbers of 64 bits

Events: TypeAlias = npt.NDArray[Any]


class Frame(NamedTuple):
    """A line of a program, with its function.

    Attributes
    ----------
    file : str
    line : int
        The line number, or 0 if it is not known.
    function : str
        Its qualified name.

    Examples
    --------
    >>> from arenapy import trace
    >>> frame = trace.Frame("program.py", 12, "load")
    >>> f"{frame.file}:{frame.line}"
    'program.py:12'
    """

    file: str
    line: int
    function: str


#: The callers of an allocation, the innermost first.
Site: TypeAlias = tuple[Frame, ...]


@dataclass(frozen=True, eq=False)
class Contents:
    """The content of a file. `arenapy.trace.Trace` describes each attribute.

    Raises
    ------
    ValueError
        The events are none that an allocator can have had, or a file cannot hold them: an unknown
        operation, a site that there is not, times that go back, sizes beyond all memory.
    TypeError
        The events are not an array of EVENT.
    """

    events: Events
    kind: str = ""
    complete: bool = True
    started: int = 0
    process: int = 0
    clock: str = "kernel"
    sites: tuple[Site, ...] = ((),)

    def __post_init__(self) -> None:
        events = self.events
        if getattr(events, "dtype", None) != EVENT:
            raise TypeError(
                f"events of type {getattr(events, 'dtype', type(events).__name__)}: need an array "
                "of arenapy.trace.EVENT"
            )
        known = np.isin(events["operation"], list(OPERATIONS.values()))
        if not known.all():
            raise ValueError(f"operation {events['operation'][~known][0]} is not known")
        back = events["time"][1:] < events["time"][:-1]
        if back.any():
            raise ValueError(f"at event {int(np.argmax(back)) + 1:,} the time goes back")
        if len(events) and events["time"][-1] >> np.uint64(TIME_BITS):
            raise ValueError(f"a time of {events['time'][-1]} ns is more than a trace can store")
        if (events["site"] >= len(self.sites)).any():
            raise ValueError(f"site {events['site'].max()} of {len(self.sites)} sites")
        if (events["nbytes"] >> np.uint64(SIZE_BITS)).any():
            raise ValueError(f"{events['nbytes'].max()} bytes are more than a trace can store")
        beyond = events["nbytes"] > np.uint64(2**64 - 1) - events["address"]
        if beyond.any():
            at = int(np.argmax(beyond))
            raise ValueError(
                f"at event {at:,} {events['nbytes'][at]} bytes at {events['address'][at]:#x} lie "
                "beyond the last address"
            )
        if events["nbytes"].sum(dtype="f8") > MAX_BYTES:
            raise ValueError("the sizes add up to more bytes than 64-bit numbers can count")


ContentsT = TypeVar("ContentsT", bound=Contents)


def write(path: str | os.PathLike[str], contents: Contents) -> None:
    """Write a file that `read` reads; its clock is the kernel's."""
    events = contents.events
    texts = _text_records(contents.sites)
    has_site, has_stream = events["site"] != 0, events["stream"] != 0
    ends = len(texts) + np.cumsum(1 + has_site + has_stream)
    records = np.zeros(int(ends[-1]) if len(ends) else len(texts), RECORD)
    records[: len(texts)] = texts
    thread = events["thread"].astype("u8") << np.uint64(SIZE_BITS)
    own = ends - 1
    records["time"][own] = events["time"] | _high(events["operation"])
    records["block"][own] = events["address"]
    records["size"][own] = events["nbytes"] | thread
    for some, name, operation, before in (
        (has_stream, "stream", STREAM, 1),
        (has_site, "site", SITE, 1 + has_stream[has_site]),
    ):
        at = own[some] - before
        records["time"][at] = events["time"][some] | _high(np.uint8(operation))
        records["block"][at] = events[name][some]
        records["size"][at] = thread[some]
    header = np.zeros(1, HEADER)
    header["magic"] = np.void(MAGIC)
    header["version"] = VERSION
    header["header_nbytes"] = HEADER.itemsize
    header["event_nbytes"] = RECORD.itemsize
    header["started"] = contents.started
    header["events"] = len(records)
    header["complete"] = contents.complete
    header["process"] = contents.process
    whole = printable(contents.kind).encode()[: HEADER["kind"].itemsize - 1].decode(errors="ignore")
    header["kind"] = whole.encode()
    outputs.write(path, header.tobytes() + records.tobytes(), outputs.TRACE)


def check_file(path: str | os.PathLike[str]) -> None:
    """ValueError for a pipe, which would be waited for, or a device, which may have no end."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ValueError(
            f"{os.fspath(path)!r} is a pipe or a device, and a trace needs a file with a length: "
            "save it to a file first"
        )


def read(path: str | os.PathLike[str], make: type[ContentsT]) -> ContentsT:
    """Read a file. The errors are those of `arenapy.trace.load`."""
    name = os.fspath(path)
    check_file(path)
    with open(path, "rb") as file:
        text = file.read(HEADER.itemsize)
        if text[: len(MAGIC)] != MAGIC or len(text) < HEADER.itemsize:
            raise ValueError(f"{name!r} contains no trace: it does not begin like a trace file")
        header = np.frombuffer(text, HEADER)[0]
        if not 1 <= header["version"] <= VERSION:
            raise ValueError(
                f"{name!r} is a trace of version {header['version']}, and this arenapy reads "
                f"versions 1 to {VERSION}: use the arenapy that recorded it, or a newer one"
            )
        found = os.fstat(file.fileno()).st_size - HEADER.itemsize
        records = np.fromfile(file, RECORD, max(0, found) // RECORD.itemsize)
    try:
        return _contents(header, records, make)
    except ValueError as error:
        raise ValueError(f"{name!r} is damaged: {error}") from None


def _contents(header: Any, records: Events, make: type[ContentsT]) -> ContentsT:
    """The content that header and records stand for. ValueError if no recorder writes such ones."""
    for field, size in ("header_nbytes", HEADER.itemsize), ("event_nbytes", RECORD.itemsize):
        if header[field] != size:
            raise ValueError(f"{field} is {header[field]} and not {size}")
    if header["clock"] >= len(CLOCKS):
        raise ValueError(f"clock {header['clock']} is not known")
    operation = (records["time"] >> np.uint64(TIME_BITS)).astype("u1")
    if len(records) and operation.max() > MOST:
        raise ValueError(f"operation {operation.max()} is not known")
    is_event = np.isin(operation, list(OPERATIONS.values()))
    kept = records[is_event]
    events = np.zeros(len(kept), EVENT)
    events["time"] = _nanoseconds(header, records, operation, kept["time"])
    events["address"] = kept["block"]
    events["nbytes"] = kept["size"] & np.uint64((1 << SIZE_BITS) - 1)
    events["thread"] = kept["size"] >> np.uint64(SIZE_BITS)
    events["operation"] = operation[is_event]
    number = np.cumsum(is_event)  # of the event that follows a record that is none
    for field, code in ("stream", STREAM), ("site", SITE):
        before = np.flatnonzero(operation == code)
        before = before[number[before] < len(events)]
        most = np.iinfo(EVENT[field]).max
        events[field][number[before]] = np.minimum(records["block"][before], most)
    numbers, sites = _sites(records[operation == TEXT])
    events["site"][events["site"] >= len(numbers)] = 0  # its text was cut off
    events["site"] = numbers[events["site"]]
    return make(
        events,
        printable(header["kind"].decode(errors="replace")),
        bool(header["complete"] and len(records) == header["events"]),
        int(header["started"]),
        int(header["process"]),
        CLOCKS[header["clock"]],
        sites,
    )


def _high(operation: npt.NDArray[np.uint8] | np.uint8) -> npt.NDArray[np.uint64] | np.uint64:
    return operation.astype("u8") << np.uint64(TIME_BITS)


def _nanoseconds(
    header: Any, records: Events, operation: npt.NDArray[Any], times: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Ticks as ns since the beginning: between two clock records the clock runs evenly."""
    ticks = times & np.uint64((1 << TIME_BITS) - 1)
    if CLOCKS[header["clock"]] == "kernel":
        return ticks
    clocks = records[operation == CLOCK]
    at = np.append(0, clocks["time"].astype("i8"))
    ns = np.append(0, (clocks["block"] - header["monotonic"]).astype("i8"))
    if (np.diff(at) < 0).any() or (np.diff(ns) < 0).any():
        raise ValueError("its clock goes back")
    found: npt.NDArray[Any] = np.interp(ticks.astype("i8"), at, ns).astype("u8")
    return found


# ---- sites: a line of text each, in the order of their numbers, from 1 on


def _text_records(sites: tuple[Site, ...]) -> Events:
    lines = []
    for site in sites[1:]:
        fields = [str(field) for frame in site for field in frame]
        line = "\t".join(map(printable, fields)).encode(errors="backslashreplace") + b"\n"
        lines.append(line.ljust(-(-len(line) // TEXT_NBYTES) * TEXT_NBYTES, b"\0"))
    words = np.frombuffer(b"".join(lines), "<u8").reshape(-1, 2)
    records = np.zeros(len(words), RECORD)
    records["time"] = _high(np.uint8(TEXT))
    records["block"], records["size"] = words.T
    return records


def _sites(records: Events) -> tuple[npt.NDArray[np.uint32], tuple[Site, ...]]:
    """The place of each number, and what is there. Two stacks may differ in no line."""
    words = np.stack([records["block"], records["size"]], axis=1)
    lines = words.tobytes().replace(b"\0", b"").decode(errors="replace").split("\n")
    known: dict[Site, int] = {(): 0}
    found = [known.setdefault(tuple(_frames(line)), len(known)) for line in lines[:-1]]
    return np.array([0, *found], "u4"), tuple(known)


def _frames(line: str) -> Iterator[Frame]:
    fields = line.split("\t", 3 * MAX_FRAMES)[: 3 * MAX_FRAMES]
    for file, number, function in zip(fields[::3], fields[1::3], fields[2::3], strict=False):
        known = number.isdecimal() and len(number) <= MAX_DIGITS
        yield Frame(printable(file), int(number) if known else 0, printable(function))
