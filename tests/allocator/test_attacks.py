"""What an attack on the first version found: each of these broke a promise once."""

import contextlib
import gc
import os
import time
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import numpy as np
import pytest
from children import in_child
from helpers import Pages

import arenapy
from arenapy import Bump, Existing, File, Host, Region, Shared
from arenapy.linux import vm


def through_pickle(thing):
    """As multiprocessing would send it, here within one process."""
    return ForkingPickler.loads(ForkingPickler.dumps(thing))


def settle(arena, pending):
    """Wait for multiprocessing's helper thread to close its copies."""
    deadline = time.monotonic() + 30
    while arena.stats().pending_bytes > pending and time.monotonic() < deadline:
        time.sleep(0.005)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)])
def test_all_leases_count_in_whatever_order_they_were_taken(order):
    arena = Bump(1 << 20, source=Shared())
    blocks = [arena.alloc(4096) for _ in range(3)]
    received = [through_pickle(blocks[i]) for i in order]
    del blocks
    arena.reset()
    assert arena.stats().pending_bytes == 3 * 4096
    arena.check()
    arena.zeros(arena.stats().largest_free_extent, "u1")[:] = 7
    for buffer in received:
        buffer.fill(1)
        assert bytes(buffer) == bytes([1]) * 4096
    del received, buffer
    settle(arena, 0)
    arena.reset()
    assert arena.remaining == arena.capacity


def test_many_leases_that_end_at_a_reset_with_many_survivors():
    arena = Bump(1 << 22, source=Shared())
    sent, kept = [], []
    for _ in range(40):
        sent.append(through_pickle(arena.alloc(64)))
        kept.append(memoryview(arena.alloc(64)))
    arena.reset()
    sent.clear()
    for _ in range(400):
        kept.append(memoryview(arena.alloc(64)))
    settle(arena, 0)
    arena.reset()
    arena.check()
    assert arena.retired == 64 * len(kept)


def test_a_received_region_does_not_close_under_its_buffers():
    region = through_pickle(Shared().region(1 << 16))
    held, unheld = memoryview(region.buffer(0, 100)), region.buffer(200, 100)
    with pytest.raises(BufferError):
        region.close()
    held[0] = 2
    held.release()
    del held
    gc.collect()
    region.close()
    assert unheld.closed
    with pytest.raises(ValueError, match="closed"):
        memoryview(unheld)


def test_a_child_sees_closed_what_the_parent_closed():
    arena = Bump(1 << 16, source=Shared())
    buffer = arena.alloc(100)
    arena.regions[0].close()
    assert buffer.closed
    assert in_child(lambda: buffer.closed) == 0


def test_an_arena_is_gone_in_the_child_if_one_of_its_regions_is():
    class Mixed:
        first = True

        def region(self, nbytes):
            source = Host() if self.first else Host(fork="skip")
            self.first = False
            return source.region(nbytes)

    arena = Bump(4096, source=Mixed(), max_bytes=1 << 20)
    arena.alloc(4096)
    buffer = arena.alloc(4096)
    assert in_child(lambda: buffer.closed) == 0


def test_buffers_of_a_region_end_when_an_allocator_takes_it():
    region = Host().region(1 << 16)
    before = region.buffer(0, 100)
    arena = Bump(1 << 16, source=SimpleNamespace(region=lambda nbytes: region))
    array = arena.zeros(10)
    assert before.closed
    with pytest.raises(ValueError, match="closed"):
        before.fill(255)
    assert not array.any()


def test_leases_from_before_the_allocator_count():
    region = Shared().region(1 << 16)
    buffer = region.buffer(0, 4096)
    received = through_pickle(buffer)
    received.fill(5)
    del buffer
    gc.collect()
    arena = Bump(1 << 16, source=SimpleNamespace(region=lambda nbytes: region))
    arena.check()
    assert arena.stats().pending_bytes == 4096
    arena.zeros(arena.stats().largest_free_extent, "u1")
    assert bytes(received) == bytes([5]) * 4096


def test_only_the_maker_of_a_region_allocates_from_it():
    arena = Bump(1 << 16, source=Shared())
    received = through_pickle(arena.regions[0])
    with pytest.raises(ValueError, match="process that sent it"):
        Bump(1 << 16, source=SimpleNamespace(region=lambda nbytes: received))


def test_growth_undone_while_an_owner_runs_code():
    class Owner:
        def __init__(self, memory):
            self.memory = memory

        def __del__(self):
            if arena is not None and arena.remaining > 1000:
                kept.append(arena.empty(100, "u1"))

    class Owning:
        def region(self, nbytes):
            inner = Host(prefault=False).region(nbytes)
            return Region.from_address(inner.address, nbytes, owner=Owner(inner))

    kept = []
    arena = None
    arena = Bump(4096, source=Owning(), max_bytes=1 << 16)
    for _ in range(3):
        with pytest.raises(MemoryError):
            arena.alloc_many([3000] * 100)
        arena.check()
        for array in kept:
            array[:] = 1
    assert arena.capacity <= 1 << 16
    del array
    kept.clear()
    arena = None


def test_max_bytes_holds_if_the_source_grows_the_arena_itself():
    class Reentrant:
        busy = False

        def region(self, nbytes):
            if arena is not None and not self.busy:
                self.busy = True
                arena.alloc(6000)
                self.busy = False
            return Host().region(nbytes)

    arena = None
    arena = Bump(4096, source=Reentrant(), max_bytes=1 << 14)
    arena.alloc(4096)
    with contextlib.suppress(MemoryError):
        arena.alloc(5000)
    assert arena.capacity <= 1 << 14
    arena.check()


def test_growth_takes_less_if_twice_is_not_to_be_had():
    class Poor:
        def region(self, nbytes):
            if nbytes > 1 << 14:
                raise arenapy.OutOfMemory(f"{nbytes} is too much")
            return Pages().region(nbytes)

    arena = Bump(1 << 14, source=Poor(), max_bytes=1 << 20)
    arena.alloc(1 << 14)
    assert arena.alloc(100).nbytes == 100


def test_a_shrunk_file_is_refused_before_its_bytes_are_touched(tmp_path):
    path = tmp_path / "memory"
    arena = Bump(1 << 16, source=File(path, "w+"))
    os.truncate(path, 0)
    for make in (lambda: arena.empty(100), lambda: arena.zeros(100)):
        with pytest.raises(BufferError, match="shrunk"):
            make()


def test_growing_keeps_the_alignment_asked_for():
    arena = Bump(1 << 23)
    block = arena.alloc(4096, 1 << 20)
    arena.alloc(1)
    assert arena.grow(block, 8192).address % (1 << 20) == 0
    small = arena.alloc(10)
    arena.alloc(1)
    used = arena.used
    arena.grow(small, 100)
    assert arena.used - used < 8192, "a common block is not aligned like a rare one"


def test_a_reset_while_a_block_moves_is_an_error_and_not_foreign_bytes():
    class Resetting:
        armed = False

        def region(self, nbytes):
            if self.armed:
                self.armed = False
                arena.reset()
                arena.alloc(1 << 12).fill(9)
            return Pages().region(nbytes)

    source = Resetting()
    arena = Bump(1 << 14, source=source, max_bytes=1 << 20)
    block = arena.alloc(1 << 12)
    block.fill(1)
    arena.alloc(1)
    source.armed = True
    with pytest.raises(ValueError, match="closed"):
        arena.grow(block, 1 << 15)
    arena.check()


def test_field_names_changed_by_one_user_are_not_seen_by_another():
    arena = Bump(1 << 16)
    first = arena.empty(3, "i4,i4")
    first.dtype.names = ("a", "b")
    assert arena.empty(3, "i4,i4").dtype.names == np.empty(3, "i4,i4").dtype.names


def test_a_closed_arena_adds_up_and_says_why():
    arena = Bump(4096, source=Pages(), max_bytes=1 << 16)
    arena.alloc(4096)
    arena.alloc(100)
    arena.regions[1].close()
    with pytest.raises(ValueError, match="closed"):
        arena.alloc(1)
    s = arena.stats()
    assert s.live_bytes + s.free_bytes + s.padding_bytes + s.retired_bytes == s.capacity
    arena.check()


def test_memory_borrowed_from_what_a_child_does_not_have():
    block = Bump(1 << 21, source=Host(fork="skip")).alloc(1 << 20)
    arena = Bump(1 << 20, source=Existing(block))
    arena.zeros(10)

    def refused():
        with pytest.raises(ValueError, match="fork"):
            arena.zeros(10)

    assert in_child(refused) == 0


def test_sizes_are_not_asked_of_what_has_none():
    arena = Bump(1 << 16)
    with pytest.raises(TypeError, match="5"):
        arena.alloc_many(5)
    with pytest.raises(ValueError, match=r"1\.5"):
        arena.alloc(8).fill(1.5)
    with pytest.raises(BufferError, match="bytes"):
        arena.alloc(100).copy_to(bytes(100))


def test_growth_into_a_users_object_makes_buffers_collectable():
    class Owner(bytearray):
        pass

    class Mixed:
        def __init__(self):
            self.regions = [
                Host(prefault=False).region(4096),
                Region.from_address(vm.address_of(memoryview(owner)), len(owner), owner=owner),
            ]

        def region(self, nbytes):
            return self.regions.pop(0)

    owner = Owner(1 << 16)
    arena = Bump(4096, source=Mixed(), max_bytes=1 << 15)
    for _ in range(3):
        arena.alloc(64).release()  # dead Buffers are kept for reuse
    arena.alloc(4096 - 64)
    arena.alloc(5000)
    buffer = arena.alloc(64)
    assert gc.is_tracked(buffer)
