"""Who holds a Buffer, and what becomes of it: section 5 of the design, sentence by sentence."""

import threading

import numpy as np
import pytest
from helpers import exact

import arenapy
from arenapy import Bump, Host

PATTERN = bytes(range(100))


@pytest.fixture
def arena():
    return exact(1 << 20)


# Held ------------------------------------------------------------------------------------------


def test_a_reset_closes_what_is_not_held_and_leaves_what_is(arena):
    unheld, held = arena.alloc(10), arena.alloc(10)
    view = memoryview(held)
    arena.reset()
    assert unheld.closed and not held.closed
    view[:] = bytes(10)
    held.fill(1)
    assert held[2:3].nbytes == 1 and bytes(view) == b"\x01" * 10


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


def test_a_reset_amid_a_copy_of_another_thread():
    """The copy is as an export until it returns. Then the block is closed, and its bytes free."""
    arena = Bump(1 << 30, Host(prefault=False))
    block, big = arena.alloc(256 << 20), bytearray(256 << 20)
    address = block.address
    copy = threading.Thread(target=block.copy_from, args=[big])
    copy.start()
    while copy.is_alive() and not arena.stats().held_buffers:
        pass
    amid = copy.is_alive()
    arena.reset()
    if amid and arena.retired:
        with pytest.raises(BufferError, match="a call that has not returned"):
            block.release()
        assert arena.alloc(8).address != address
    copy.join()
    arena.check()
    assert block.closed and not block.held and arena.retired == 0


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
