"""Who holds a Buffer, and what becomes of it: section 5 of the design, sentence by sentence."""

import ctypes
import threading

import numpy as np
import pytest
from helpers import exact, poke

import arenapy
from arenapy import Buffer, Bump

PATTERN = bytes(range(100))


@pytest.fixture
def arena():
    return exact(1 << 20)


# Held ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "export",
    [
        memoryview,
        np.asarray,
        np.from_dlpack,
        lambda b: b.__dlpack__(max_version=(1, 0)),
        lambda b: b.__dlpack__(),
        lambda b: b.__array_interface__,
        bytes,
        lambda b: b.array((100,), "u1"),
        lambda b: np.ndarray(100, "u1", buffer=b),
    ],
)
def test_held_is_ever_exported_while_the_object_lives(arena, export):
    buffer = arena.alloc(100)
    ctypes.memmove(buffer.address, PATTERN, 100)
    export(buffer)
    assert buffer.held
    assert arena.stats().held_buffers == 1
    arena.reset()
    assert not buffer.closed and arena.retired == 100
    assert bytes(buffer) == PATTERN
    del buffer
    assert arena.retired == 0


def test_a_reset_closes_what_is_not_held_and_leaves_what_is(arena):
    unheld, held = arena.alloc(10), arena.alloc(10)
    view = memoryview(held)
    arena.reset()
    assert unheld.closed and not held.closed
    view[:] = bytes(10)
    held.fill(1)
    assert held[2:3].nbytes == 1 and bytes(view) == b"\x01" * 10


def test_arrays_of_empty_have_the_buffer_as_base(arena):
    array = arena.empty((4, 4), "f4")
    assert isinstance(array.base, Buffer) and array.base.held
    part = array[1:, 2]
    del array
    arena.reset()
    assert arena.retired == 64
    block = arena.alloc(arena.stats().largest_free_extent, 1)
    part[:] = 3
    poke(block.address, block.nbytes, 0)
    assert (part == 3).all()
    del part
    assert arena.retired == 0


@pytest.mark.parametrize("kind", ["host", "existing"])
def test_default_alignment_is_64(kind):
    source = None if kind == "host" else arenapy.Existing(bytearray(1 << 16))
    arena = Bump(1 << 16, source=source) if source else Bump(1 << 16)
    for nbytes in (1, 3, 64, 65, 100, 0):
        assert arena.alloc(nbytes).address % 64 == 0
        assert arena.empty(nbytes, "u1").ctypes.data % 64 == 0


# Dying -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", ["buffer", "view"])
def test_buffers_may_die_on_any_thread(arena, last):
    box = [arena.alloc(128)]
    box.append(memoryview(box[0]))
    arena.reset()
    assert arena.retired == 128
    del box[0 if last == "view" else 1]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert arena.retired == 0 and arena.remaining == arena.capacity
    arena.check()


def test_a_region_is_unmapped_when_its_last_buffer_is_gone():
    arena = exact(4096)
    (region,) = arena.regions
    view = memoryview(arena.alloc(16))
    view[:] = b"x" * 16
    with pytest.raises(BufferError):
        region.close()
    del arena
    assert not region.closed and bytes(view) == b"x" * 16


def test_closing_a_region_with_buffers_that_were_ever_exported_raises():
    region = arenapy.Host(huge_pages=None).region(1 << 16)
    buffer = region.buffer(64, 128)
    assert (buffer.address, buffer.nbytes) == (region.address + 64, 128)
    assert buffer.allocator is None
    np.ndarray((128,), "u1", buffer=buffer)  # gone already, and no export is live
    with pytest.raises(BufferError):
        region.close()
    assert not region.closed and bytes(buffer[0:1]) == b"\0"
    del buffer
    region.close()
    assert region.closed
    with pytest.raises(ValueError, match="closed"):
        region.buffer()
    region.close()
