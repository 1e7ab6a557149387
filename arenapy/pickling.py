"""Plain pickles of Buffers: copies. (Sharing with another process is arenapy.shared's.)"""

from __future__ import annotations

import pickle
from typing import Any

from arenapy.buffer import Buffer, View

__all__ = ["rebuild_buffer", "reduce_buffer"]


def layout_of(buffer: Buffer) -> tuple[Any, Any] | None:
    """The (shape, dtype) of a typed view, None for plain bytes."""
    return (buffer.shape, buffer.dtype) if isinstance(buffer, View) else None


def reduce_buffer(buffer: Buffer, protocol: int) -> tuple[Any, ...]:
    """What ``Buffer.__reduce_ex__`` returns: the bytes, out of band where the pickler asks."""
    flat = memoryview(buffer.view())
    data = pickle.PickleBuffer(flat) if protocol >= 5 else flat.tobytes()
    return rebuild_buffer, (data, layout_of(buffer), buffer.readonly)


def rebuild_buffer(data: Any, layout: tuple[Any, Any] | None, readonly: bool) -> Buffer:
    """Make a Buffer over the unpickled bytes, which it then owns."""
    from arenapy.source import region_of, viewed

    memory = memoryview(data)
    nbytes = memory.nbytes
    if nbytes == 0 or (memory.readonly and not readonly):
        memory = memoryview(bytearray(memory) or bytearray(1))
    # Others may view the same bytes: what was pickled out of band is loaded as often as one likes.
    region = region_of(
        viewed(memory, readonly), memory.nbytes, readonly, False, "an unpickled Buffer"
    )
    buffer = region.buffer(0, nbytes)
    return buffer if layout is None else buffer.view(*layout)
