"""What a test knows of an allocator's `Buffer`s: who sees them, and which of them are closed.

Held means: a live export, or ever exported while the Buffer object is alive. The model knows three
kinds of export. LIVE ones forbid `release()`; a REFERENCE keeps the Buffer object and nothing else;
for the rest (UNSURE) the contract leaves open which of the two it is, and both are accepted.
"""

import ctypes
import gc
from dataclasses import dataclass, field

import numpy as np
from helpers import in_threads
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import rule
from machines import AllocatorMachine, Block, choice, needs, step

import arenapy

LIVE, REFERENCE, UNSURE = "live", "reference", "unsure"
EXPORTS = {
    "memoryview": (LIVE, memoryview),
    "asarray": (LIVE, np.asarray),
    "ctypes": (LIVE, lambda b: (ctypes.c_char * b.nbytes).from_buffer(b)),
    "frombuffer": (LIVE, lambda b: np.frombuffer(b, "u1") if b.nbytes else memoryview(b)),
    "from_dlpack": (LIVE, np.from_dlpack),
    "capsule": (LIVE, lambda b: b.__dlpack__(max_version=(1, 0))),
    "old capsule": (LIVE, lambda b: b.__dlpack__()),
    "ndarray": (REFERENCE, lambda b: np.ndarray((b.nbytes,), "u1", buffer=b)),
    "array": (UNSURE, lambda b: b.array((b.nbytes,), "u1")),
}


@dataclass(eq=False)
class SeenBlock(Block):
    """`handles` are Buffers, the root first, `exports` are (kind, object)."""

    root: object = None  # while the root Buffer is among the handles
    exports: list = field(default_factory=list)
    exported: bool = False
    released: bool = False
    orphan: bool = False  # its allocator is gone

    def has(self, kind):
        return any(kind == exported for exported, _ in self.exports)


class ExportingMachine(AllocatorMachine):
    """Attack an allocator of Buffers: `kind_of_block` is what its model knows of one."""

    kind_of_block = SeenBlock

    # Hooks -----------------------------------------------------------------------------------

    def allocate(self, allocator, nbytes, align):
        return allocator.alloc(nbytes) if align is None else allocator.alloc(nbytes, align)

    def address(self, block):
        return block.address

    # The model -------------------------------------------------------------------------------

    def admit(self, handle, nbytes, align, start=None):
        """Take in a Buffer, or an array or dict of arrays, which hold theirs from birth."""
        serial = super().admit(handle, nbytes, align, start)
        plain = self.live[serial]
        block = self.kind_of_block(plain.start, plain.nbytes, plain.fill, plain.handles)
        if isinstance(handle, arenapy.Buffer):
            assert handle.nbytes == len(handle) == nbytes
            assert not handle.held and not handle.closed
            block.root = handle
        else:
            block.handles, block.exports, block.exported = [], [(UNSURE, handle)], True
        self.live[serial] = block
        return serial

    def dropped(self, serial, other_thread=False):
        """Something of the block was dropped: see whether it was the last."""
        block = self.live[serial]
        if not (block.handles or block.exports):
            self.gone(serial, other_thread)

    def drop_everything(self, serial, other_thread):
        block = self.live[serial]
        block.root = None

        def drop():
            block.exports.clear()
            block.handles.clear()

        if other_thread:
            in_threads(drop)
        drop()
        self.dropped(serial, other_thread)

    def make_another(self):
        """Drop the allocator, whose blocks stay, and make a new one."""
        self.allocator = None
        handles = [handle for block in self.live.values() for handle in block.handles]
        if any(handle.allocator is not None for handle in handles):
            gc.collect()  # a traceback may keep it, or (free-threaded) a count not yet merged
        for block in self.live.values():
            block.orphan = True
            assert block.released or all(handle.allocator is None for handle in block.handles)
        self.allocator = self.make(**self.config)

    # Invariants ------------------------------------------------------------------------------

    def handles_say_what_they_are(self):
        for block in self.live.values():
            for handle in block.handles:
                assert handle.closed == block.released
                assert block.released or handle.allocator is (
                    None if block.orphan else self.allocator
                )
            if block.root is not None and not block.released:
                assert block.root.held == block.exported
                assert block.root.address == block.start

    # Rules: seeing ---------------------------------------------------------------------------

    def open_handles(self, serial):
        return [] if self.live[serial].released else self.live[serial].handles

    @needs("live")
    @rule(serial=choice("live"), kind=st.sampled_from(sorted(EXPORTS)), which=st.integers(0, 3))
    @step
    def export(self, serial, kind, which):
        handles = self.open_handles(serial)
        if not handles:
            return
        handle = handles[which % len(handles)]
        how, call = EXPORTS[kind]
        exported = call(handle)
        block = self.live[serial]
        block.exports.append((how, exported))
        block.exported = True
        if handle is not block.root:
            event("an export below the root")

    @needs("live")
    @rule(
        serial=choice("live"), which=st.integers(0, 3), ends=st.tuples(*[st.integers(-50, 50)] * 2)
    )
    @step
    def slice(self, serial, which, ends):
        handles = self.open_handles(serial)
        if not handles or len(handles) > 4:
            return
        handle = handles[which % len(handles)]
        part = handle[slice(*ends)]
        row = handle.nbytes // max(1, len(handle))  # a view is sliced along its first dimension
        start, stop, _ = slice(*ends).indices(len(handle))
        assert part.nbytes == max(0, stop - start) * row
        assert not part.nbytes or part.address == handle.address + start * row
        handles.append(part)

    # Rules: letting go -----------------------------------------------------------------------

    @needs("live")
    @rule(serial=choice("live"), which=st.integers(0, 5))
    @step
    def drop_export(self, serial, which):
        exports = self.live[serial].exports
        if exports:
            del exports[which % len(exports)]
            self.dropped(serial)

    @needs("live")
    @rule(serial=choice("live"), which=st.integers(0, 5))
    @step
    def drop_handle(self, serial, which):
        block = self.live[serial]
        if block.handles:
            if block.handles[which % len(block.handles)] is block.root:
                block.root = None
            del block.handles[which % len(block.handles)]
            self.dropped(serial)

    @needs("live")
    @rule(serial=choice("live"), other_thread=st.booleans())
    @step
    def drop_all(self, serial, other_thread):
        self.drop_everything(serial, other_thread)
