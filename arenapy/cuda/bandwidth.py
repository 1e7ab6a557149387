"""How fast copies between host and device are here, and what makes some of them slow.

What lives here: the measurement, its table, and what is said about it, which follows from the
figures alone. What does not: the copies.

Times are the device's, between two events on the stream that copies, so what a copy waits for on
the host is in them. Of several runs the fastest counts: what else a machine does only adds.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from arenapy.base.text import format_bytes, html_row
from arenapy.buffer.buffer import Buffer
from arenapy.cuda.copies import copy_batch
from arenapy.cuda.device import memory_info
from arenapy.cuda.sources import Device, Pinned
from arenapy.cuda.stream import Stream, elapsed
from arenapy.memory.host_request import checked_index, checked_size
from arenapy.stats import _grid

__all__ = ["Bandwidth", "CopySpeed", "bandwidth"]

MIB = 1 << 20
GIGA = 1e9
MICRO = 1e-6
OFFSETS = (123, 4096)  # bytes into a page
SMALL = 4096  # bytes of a small copy
MAX_SMALL = 1024  # of those, in one run
SLOW = 0.8  # less than this part of what pinned memory has is called slow
COLUMNS = ("memory of the host", "a copy", "copies", "to the device", "from it", "us a copy")


@dataclass(frozen=True, slots=True)
class CopySpeed:
    """The time of copies of one kind.

    Attributes
    ----------
    memory : str
        The kind of host memory and of copy.
    nbytes : int
        Bytes of each copy.
    copies : int
        The number of copies that were timed together.
    to_device_seconds, from_device_seconds : float
        The time of all of them, in the fastest run.

    Examples
    --------
    >>> from arenapy import cuda
    >>> pinned = cuda.bandwidth(nbytes=1 << 20).pinned
    >>> pinned.nbytes, pinned.to_device > 0
    (1048576, True)
    """

    memory: str
    nbytes: int
    copies: int
    to_device_seconds: float
    from_device_seconds: float

    @property
    def to_device(self) -> float:
        """Bytes a second to the device."""
        return _rate(self.nbytes * self.copies, self.to_device_seconds)

    @property
    def from_device(self) -> float:
        """Bytes a second from the device."""
        return _rate(self.nbytes * self.copies, self.from_device_seconds)


@dataclass(frozen=True, slots=True, repr=False)
class Bandwidth:
    """The result of :func:`bandwidth`. A prompt and notebooks show it as a table.

    Attributes
    ----------
    device_id : int
        Ordinal of the device.
    name : str
        The driver's name of the device.
    pageable, pinned : CopySpeed
        One large copy, from and to ordinary memory and pinned memory.
    offsets : tuple of CopySpeed
        The same in pinned memory, for several offsets in a page.
    small : CopySpeed
        Many small copies in pinned memory.

    Examples
    --------
    >>> from arenapy import cuda
    >>> speed = cuda.bandwidth(nbytes=1 << 20)   # at a prompt, its name alone shows a table
    >>> speed.small.copies
    256
    """

    device_id: int
    name: str
    pageable: CopySpeed
    pinned: CopySpeed
    offsets: tuple[CopySpeed, ...]
    small: CopySpeed

    @property
    def rows(self) -> tuple[CopySpeed, ...]:
        """All measured copies: pageable, pinned, at each offset, small."""
        return (self.pageable, self.pinned, *self.offsets, self.small)

    @property
    def verdict(self) -> str:
        """Sentences that name the slow copies, and the remedy."""
        found = []
        if self._is_slow(self.pageable):
            found.append(
                f"Pageable memory is slow, {self._compared(self.pageable)}: the driver copies it "
                "into pinned memory of its own first, or back. Keep such data in cuda.Pinned, "
                "or read it through cuda.chunks."
            )
        for row in filter(self._is_slow, self.offsets):
            found.append(
                f"{row.memory.capitalize()} a page, copies are slow, {self._compared(row)}: let "
                "them begin at the start of a page."
            )
        if self._is_slow(self.small):
            seconds = max(self.small.to_device_seconds, self.small.from_device_seconds)
            each = seconds / self.small.copies
            instead = int(each * min(self.pinned.to_device, self.pinned.from_device))
            found.append(
                f"Copies of {format_bytes(self.small.nbytes)} are slow, "
                f"{self._compared(self.small)}: each takes {each / MICRO:.1f} us, in which a large "
                f"copy moves {format_bytes(instead)}. Combine them into larger copies."
            )
        if not found:
            found.append(f"Nothing is slow: all copies have {SLOW:.0%} of pinned memory's speed.")
        return " ".join(found)

    def _is_slow(self, row: CopySpeed) -> bool:
        return (
            row.to_device < SLOW * self.pinned.to_device
            or row.from_device < SLOW * self.pinned.from_device
        )

    def _compared(self, row: CopySpeed) -> str:
        best = self.pinned
        return (
            f"{_gigabytes(row.to_device)} to the device and {_gigabytes(row.from_device)} from it "
            f"({_part(row.to_device, best.to_device)} and "
            f"{_part(row.from_device, best.from_device)} of large pinned copies)"
        )

    def _table(self) -> list[list[str]]:
        return [
            [
                row.memory,
                format_bytes(row.nbytes),
                f"{row.copies:,}",
                _gigabytes(row.to_device),
                _gigabytes(row.from_device),
                f"{max(row.to_device_seconds, row.from_device_seconds) / row.copies / MICRO:,.1f}",
            ]
            for row in self.rows
        ]

    def _title(self) -> str:
        return f"Copies between the host and device {self.device_id} ({self.name})"

    def __repr__(self) -> str:
        """Lay out a table of plain text, the same on every terminal."""
        table = _grid([[*COLUMNS], *self._table()], left=1)
        return f"{self._title()}\n{table}\n{self.verdict}"

    def _repr_html_(self) -> str:
        """Lay out a table for a notebook."""
        rows = [html_row("th", COLUMNS), *(html_row("td", row) for row in self._table())]
        title, verdict = html.escape(self._title()), html.escape(self.verdict)
        return f"<p>{title}</p><table>{''.join(rows)}</table><p>{verdict}</p>"


def bandwidth(device_id: int = 0, nbytes: int = 64 * MIB, repeat: int = 5) -> Bandwidth:
    """Measure copies between host and device, and say which are slow here, and why.

    Parameters
    ----------
    device_id : int
        Ordinal of the device.
    nbytes : int
        Bytes of a large copy, at least 4096. The measurement takes this much device memory, pinned
        memory and ordinary memory.
    repeat : int
        The number of runs of each kind, after a warm-up run. The result is the fastest run.

    Returns
    -------
    Bandwidth

    Raises
    ------
    Unavailable
        If there is no driver, no device or no cuda-python.
    OutOfMemory
        If there is not enough memory, or it may not be pinned.
    ValueError, TypeError
        If `device_id` is not a device, or `nbytes` or `repeat` is too small.
    CudaError
        If the driver refused.

    Notes
    -----
    It makes about `repeat` times 12 copies of `nbytes`. Thread-safety: may be called from any
    thread. Other copies at the same time make it slower.

    Examples
    --------
    >>> from arenapy import cuda
    >>> cuda.bandwidth(nbytes=1 << 20, repeat=1).pageable.copies
    1
    """
    nbytes = checked_size(nbytes)
    if nbytes < SMALL:
        raise ValueError(f"nbytes={nbytes}: need at least {SMALL}")
    repeat = checked_index("repeat", repeat)
    if repeat < 1:
        raise ValueError(f"repeat={repeat}: need at least one run")
    info = memory_info(device_id)
    stream = Stream(device_id)
    block = Device(device_id).region(nbytes).buffer()
    pinned = Pinned(mapped=False).region(nbytes + max(OFFSETS)).buffer()
    pageable = np.ones(nbytes, np.uint8)
    pieces = [slice(at, at + SMALL) for at in range(0, nbytes - SMALL + 1, SMALL)][:MAX_SMALL]

    def timed(memory: str, pairs: list[tuple[Buffer, object]]) -> CopySpeed:
        """Of copies between a Buffer of the device and memory of the host."""
        back = [(host, device) for device, host in pairs]
        return CopySpeed(
            memory,
            pairs[0][0].nbytes,
            len(pairs),
            fastest(lambda: copy_batch(pairs, stream)),
            fastest(lambda: copy_batch(back, stream)),
        )

    def fastest(work: Callable[[], None]) -> float:
        elapsed(stream, work, device_id)
        return min(elapsed(stream, work, device_id) for _ in range(repeat))

    return Bandwidth(
        device_id,
        info.name,
        timed("pageable", [(block, pageable)]),
        timed("pinned", [(block, pinned[:nbytes])]),
        tuple(
            timed(f"pinned, {offset} bytes in", [(block, pinned[offset : offset + nbytes])])
            for offset in OFFSETS
        ),
        timed("pinned, small copies", [(block[piece], pinned[piece]) for piece in pieces]),
    )


def _rate(nbytes: int, seconds: float) -> float:
    return nbytes / seconds if seconds > 0 else float("inf")


def _gigabytes(rate: float) -> str:
    return f"{rate / GIGA:.3g} GB/s"


def _part(rate: float, best: float) -> str:
    return f"{rate / best:.0%}" if best < float("inf") else "unknown part"
