"""Buffers: what is exported stays as it is, whoever releases, drops and resets around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from arenapy.buffer.buffer import Buffer
from arenapy.testing.machine import AllocatorMachine
from arenapy.testing.operations import OneOf, operation
from arenapy.testing.own import BumpMachine
from arenapy.testing.ranges import Live

__all__ = ["BufferMachine", "BufferRules"]

EXPORTS: dict[str, Callable[[Any], Any]] = {
    "memoryview": memoryview,
    "asarray": np.asarray,
    "dlpack": np.from_dlpack,
    "slice": lambda buffer: memoryview(buffer[len(buffer) // 2 :]),
}


@dataclass(slots=True)
class Exports:
    """The live exports of a Buffer."""

    objects: list[Any] = field(default_factory=list)
    ever: bool = False


class BufferRules(AllocatorMachine):
    """Rules about `arenapy.Buffer`, as a mixin for the machine of an allocator.

    A Buffer with live exports cannot be released, and survives a reset. A Buffer that was ever
    exported keeps its bytes until the object is gone.

    Notes
    -----
    Thread-safety: one thread runs a machine.

    Examples
    --------
    >>> from arenapy.testing import BufferRules, PoolMachine
    >>> class PoolBuffers(BufferRules, PoolMachine):
    ...     pass
    >>> TestPoolBuffers = PoolBuffers.TestCase
    """

    def survives(self, known: Live) -> bool:
        """Held: exported at some time, and the Buffer is there."""
        return super().survives(known) or (known.extra is not None and known.extra.ever)

    def give_all_back(self, how: str) -> None:
        """Drop all exports, and then all blocks."""
        for known in self.live.values():
            known.extra = None
        super().give_all_back(how)

    @operation("live", which=OneOf("live"), how=st.sampled_from(sorted(EXPORTS)))
    def export(self, which: int, how: str) -> None:
        """Let somebody see a Buffer."""
        known = self.pick_live(which)[1]
        if not isinstance(known.block, Buffer):
            return  # an array is what somebody sees already
        known.extra = known.extra or Exports()
        seen = EXPORTS[how](known.block)
        known.extra.objects.append(seen)
        known.extra.ever = True
        assert known.block.held, "exported, and not held"
        data = np.asarray(seen)
        offset = known.nbytes // 2 if how == "slice" else 0
        assert data.nbytes == known.nbytes - offset
        assert not data.nbytes or data.ctypes.data == known.start + offset, "exported elsewhere"

    @operation("live", which=OneOf("live"))
    def drop_export(self, which: int) -> None:
        """The one who sees a Buffer has seen enough."""
        known = self.pick_live(which)[1]
        if known.extra is not None and known.extra.objects:
            known.extra.objects.pop()

    def give_back(self, serial: int) -> None:
        """Release a Buffer: refused as long as somebody sees it."""
        known = self.live[serial]
        if known.extra is not None and known.extra.objects:
            self.reached("released while exported")
            with self.refused((BufferError,), "a release of an exported buffer", "early-release"):
                self.call(self.free, self.state, known.block)
            return
        block = self.gone(serial)
        self.call(self.free, self.state, block)
        if isinstance(block, Buffer):
            assert block.closed, "released, and not closed"
            self.call(self.free, self.state, block)  # as often as one likes

    @operation("live", which=OneOf("live"))
    def drop_block(self, which: int) -> None:
        """Drop a Buffer, and after it all that was exported."""
        serial, known = self.pick_live(which)
        exports = known.extra
        known.extra = None
        self.gone(serial)
        if exports is not None:
            exports.objects.clear()


class BufferMachine(BufferRules, BumpMachine):
    """Test the Buffers of a `Bump`, with `BufferRules`.

    Notes
    -----
    Thread-safety: one thread runs a machine.

    Examples
    --------
    >>> from arenapy.testing import BufferMachine
    >>> TestBuffers = BufferMachine.TestCase
    """
