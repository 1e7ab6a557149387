"""Work that a device did at the same time, by timed events: spans of copies and of kernels.

The spans are the device's own: from when a stream has reached a piece of work until it is done.
Neither stream shares its engine with the other, so a span holds no waiting for somebody else's work
of the same kind.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from arenapy import cuda

from .gpu_device import Gpu

__all__ = ["Notes", "Span", "common", "length"]

Span = tuple[float, float]


def length(spans: Iterable[Span]) -> float:
    """Return how long anything of this went on; what overlaps counts once."""
    return sum(end - start for start, end in _merged(spans))


def common(some: Iterable[Span], others: Iterable[Span]) -> float:
    """Return for how long something of both went on at the same time."""
    left, right = list(_merged(some)), list(_merged(others))
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


def _merged(spans: Iterable[Span]) -> Iterator[Span]:
    """The same time in spans that neither touch nor overlap, in order."""
    current: Span | None = None
    for start, end in sorted(spans):
        if current is not None and start <= current[1]:
            current = (current[0], max(current[1], end))
            continue
        if current is not None:
            yield current
        current = (start, end)
    if current is not None:
        yield current


class Notes:
    """Notes when the streams of a run were at what; all times are milliseconds since `start`.

    Parameters
    ----------
    gpu : Gpu
        Its events are used.
    stream : Stream
        On which the run is taken to start.
    """

    def __init__(self, gpu: Gpu, stream: cuda.Stream) -> None:
        self._gpu = gpu
        self._start = gpu.record(stream)
        self._events: list[tuple[str, Any, Any]] = []

    @contextmanager
    def noted(self, what: str, stream: cuda.Stream) -> Iterator[None]:
        """Note what the stream is given meanwhile."""
        start = self._gpu.record(stream)
        yield
        self._events.append((what, start, self._gpu.record(stream)))

    def spans(self, what: str) -> Sequence[Span]:
        """Return when the device was at that; it has to be done."""
        since = self._gpu.milliseconds
        return [
            (since(self._start, start), since(self._start, end))
            for name, start, end in self._events
            if name == what
        ]
