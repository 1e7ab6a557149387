"""Buffers out of pickles. Pickles name this module, so it keeps its name and its place."""

from __future__ import annotations

from typing import Any

from arenapy.buffer.buffer import Buffer
from arenapy.buffer.pickling import rebuilt_by
from arenapy.memory.sources import region_of, viewed

__all__ = ["rebuild_buffer"]


def rebuild_buffer(data: Any, layout: tuple[Any, Any] | None, readonly: bool) -> Buffer:
    """Make a Buffer over the unpickled bytes, which it then owns."""
    with memoryview(data) as memory:
        nbytes = memory.nbytes
        if nbytes == 0 or (memory.readonly and not readonly):
            data = bytearray(memory) or bytearray(1)
    # Others may view the same bytes: what was pickled out of band is loaded as often as one likes.
    with viewed(data, readonly) as view:
        region = region_of(view, view.nbytes, readonly, False, "an unpickled Buffer")
    buffer = region.buffer(0, nbytes)
    return buffer if layout is None else buffer.view(*layout)


rebuilt_by(rebuild_buffer)
