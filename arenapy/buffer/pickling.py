"""Plain pickles of Buffers: copies. (Sharing with another process is arenapy.memory.shared's.)"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from arenapy.buffer.buffer import Buffer, View

__all__ = ["layout_of", "rebuilt_by", "reduce_buffer"]

_rebuild: list[Callable[..., Buffer]] = []  # one: see `rebuilt_by`


def rebuilt_by(rebuild: Callable[..., Buffer]) -> None:
    """Name the function that makes a Buffer of a pickle. It needs regions, which Buffers do not."""
    _rebuild[:] = [rebuild]


def layout_of(buffer: Buffer) -> tuple[Any, Any] | None:
    """The (shape, dtype) of a typed view, None for plain bytes."""
    return (buffer.shape, buffer.dtype) if isinstance(buffer, View) else None


def reduce_buffer(buffer: Buffer, protocol: int) -> tuple[Any, ...]:
    """The value of ``Buffer.__reduce_ex__``: the bytes, out of band if the pickler can."""
    try:
        flat = buffer.view()
        memory = memoryview(flat)
    except BufferError as error:
        if buffer.device_id < 0:
            raise
        raise BufferError(
            f"{error}. multiprocessing and arenapy.send() share it, without a copy, if it is of a "
            "Bump or Pool over cuda.Device(grow=True)"
        ) from error
    # Not of the memoryview: CPython before 3.13 crashes when it collects one that is exported.
    data = pickle.PickleBuffer(flat) if protocol >= 5 else memory.tobytes()
    return _rebuild[0], (data, layout_of(buffer), buffer.readonly)
