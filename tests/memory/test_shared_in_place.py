"""`Shared(grow=True)`: one region that grows and shrinks while other processes see parts of it."""

import contextlib
import ctypes
import gc
import os
import signal
import socket
from multiprocessing.reduction import ForkingPickler

import pytest
from helpers import PAGE, peek, poke
from hypothesis import event, example, given
from hypothesis import strategies as st

import arenapy
from arenapy import Bump, Pool, Shared
from arenapy.linux import vm

MIB = 1 << 20
MOST = 16 * MIB
#: With one small block, so that each has its region.
ALLOCATORS = {
    "bump": lambda: Bump(PAGE, Shared(grow=True), MOST),
    "pool": lambda: Pool(MOST, Shared(grow=True), initial_bytes=PAGE),
}


def in_memory(allocator):
    """Bytes of the one region that are in memory, whichever process has taken them."""
    (region,) = allocator.regions
    return os.fstat(region.fd).st_blocks * 512


def reserved(allocator):
    return allocator.capacity if isinstance(allocator, Bump) else allocator.stats().reserved_bytes


@pytest.mark.parametrize("kind", ALLOCATORS)
def test_it_grows_in_place_and_gives_memory_back_for_all_processes(kind):
    allocator = ALLOCATORS[kind]()
    (region,) = allocator.regions
    view = ForkingPickler.loads(ForkingPickler.dumps(region))  # as another process maps it
    before = in_memory(allocator)
    blocks = [allocator.alloc(MIB) for _ in range(14)]
    for i, block in enumerate(blocks):
        block[:] = bytes([i]) * MIB
    assert allocator.regions == (region,) and in_memory(allocator) >= 14 * MIB
    assert blocks[13].address - blocks[0].address == 13 * MIB  # side by side across growth
    blocks = {i: blocks[i] for i in (0, 13)}
    held = [memoryview(block) for block in blocks.values()]
    del block
    if kind == "bump":
        allocator.reset()
    assert allocator.trim() >= 10 * MIB
    assert in_memory(allocator) <= before + 6 * MIB
    assert in_memory(allocator) - reserved(allocator) < 2 * MIB
    assert all(bytes(block) == bytes([i]) * MIB for i, block in blocks.items())
    assert allocator.alloc(8 * MIB).nbytes == 8 * MIB and allocator.regions == (region,)
    allocator.check()
    for one in held:
        one.release()
    assert not view.closed


def test_a_child_does_not_see_what_has_no_memory():
    """Or what is filled and freed later would wait for its end."""
    arena = Bump(PAGE, Shared(grow=True), MOST)
    low, gone, top = arena.zeros(100, "u1"), arena.zeros(15 * MIB, "u1"), arena.zeros(100, "u1")
    arena.reset()
    del gone
    assert arena.trim() >= 12 * MIB
    child = os.fork()
    if not child:
        signal.pause()
    try:
        for _ in range(20):
            with arena.scope():
                arena.zeros(4 * MIB, "u1")
        assert arena.stats().pending_bytes < PAGE and not low.any() and not top.any()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


# ---- any order of all that happens ------------------------------------------------------------

SIZES = [100, 3 * PAGE, 40 << 10, 500_000, MIB, 3 * MIB]
INDEX = st.integers(0, 30)
ACTS = st.one_of(
    st.tuples(st.just("alloc"), st.sampled_from(SIZES)),
    st.tuples(st.just("alloc"), st.sampled_from(SIZES)),
    st.tuples(st.sampled_from(["drop", "send", "forget", "kill"]), INDEX),
    st.tuples(st.just("grow"), INDEX, st.sampled_from(SIZES)),
    st.tuples(st.sampled_from(["receive", "fork", "trim", "reset"])),
)
CHILDREN = 2  # at once


class Child:
    """A forked process that has the blocks that are live now, and says whether they changed."""

    def __init__(self, blocks):
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            with contextlib.suppress(BaseException):
                kept = [(block.address, block.nbytes, byte) for block, byte in blocks]
                while theirs.recv(1):
                    good = all(ctypes.string_at(at, n) == bytes([byte]) * n for at, n, byte in kept)
                    theirs.send(b"y" if good else b"n")
            os._exit(0)
        theirs.close()
        self.socket = ours

    def sees_its_bytes(self):
        self.socket.send(b"?")
        return self.socket.recv(1) == b"y"

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.socket.close()


def fill(block, byte):
    """By an export, so that a reset does not close it."""
    with memoryview(block) as view:
        view[:] = bytes([byte]) * block.nbytes


class Program:
    """An allocator, whoever sees bytes of it, and what each is to see."""

    def __init__(self, kind):
        self.allocator = ALLOCATORS[kind]()
        self.blocks = []  # (Buffer, the byte that it is full of)
        self.under_way = []  # of those messages
        self.received = []  # (Buffer, byte)
        self.children = []
        self.ours, self.theirs = socket.socketpair()
        self.byte = 0

    def act(self, name, *arguments):
        event(name)
        with contextlib.suppress(MemoryError):
            getattr(self, name)(*arguments)

    def alloc(self, nbytes):
        self.byte = self.byte % 255 + 1
        block = self.allocator.alloc(nbytes)
        fill(block, self.byte)
        self.blocks.append((block, self.byte))

    def drop(self, i):
        if self.blocks:
            del self.blocks[i % len(self.blocks)]

    def send(self, i):
        if self.blocks and len(self.under_way) < 20:
            block, byte = self.blocks[i % len(self.blocks)]
            arenapy.send(self.ours, block)
            self.under_way.append(byte)

    def receive(self):
        if self.under_way:
            self.received.append((arenapy.receive(self.theirs), self.under_way.pop(0)))

    def forget(self, i):
        if self.received:
            del self.received[i % len(self.received)]

    def grow(self, i, nbytes):
        if self.blocks:
            i %= len(self.blocks)
            block, byte = self.blocks[i]
            block = self.allocator.grow(block, max(nbytes, block.nbytes))
            fill(block, byte)
            self.blocks[i] = block, byte

    def fork(self):
        if len(self.children) < CHILDREN:
            self.children.append(Child(self.blocks))

    def kill(self, i):
        if self.children:
            self.children.pop(i % len(self.children)).kill()

    def reset(self):
        if isinstance(self.allocator, Bump):
            self.allocator.reset()  # what is held survives

    def trim(self):
        self.allocator.trim()

    def is_right(self):
        for block, byte in self.blocks + self.received:
            assert peek(block.address, block.nbytes) == bytes([byte]) * block.nbytes
        assert all(child.sees_its_bytes() for child in self.children)
        self.allocator.check()
        # Nothing is in memory that the allocator does not know of, and what it has is there.
        assert 0 <= in_memory(self.allocator) - reserved(self.allocator) < 2 * MIB

    def close(self):
        for child in self.children:
            child.kill()
        self.ours.close()
        self.theirs.close()


def around(look, leave):
    """Somebody looks at a block that the owner drops: it trims, allocates, and so on again."""
    alloc = ("alloc", MIB)
    again = [("reset",), ("trim",), alloc, alloc, alloc]
    acts = [alloc, alloc, *look, ("drop", 0), ("grow", 0, 3 * MIB), ("drop", 0), *again]
    return [*acts, ("drop", 0), ("drop", 0), *again, leave, *again]


@pytest.mark.parametrize("kind", ALLOCATORS)
@example(acts=around([("send", 0), ("receive",)], ("forget", 0)))
@example(acts=around([("send", 0)], ("receive",)))
@example(acts=around([("fork",)], ("kill", 0)))
@example(acts=around([("send", 1), ("receive",), ("fork",)], ("forget", 0)))
@given(acts=st.lists(ACTS, max_size=40))
def test_whoever_sees_bytes_sees_them_unchanged(kind, acts):
    program = Program(kind)
    try:
        for act in acts:
            program.act(*act)
            program.is_right()
        # When nobody looks any more, all of it comes back.
        program.close()
        program.children.clear()
        program.blocks.clear()
        program.received.clear()
        gc.collect()
        program.reset()
        program.allocator.trim()
        assert in_memory(program.allocator) <= 2 * MIB
        assert not program.allocator.stats().pending_bytes
    finally:
        program.close()


# ---- one by one ---------------------------------------------------------------------------------


def test_a_received_region_takes_no_memory_that_it_had_not():
    pool = ALLOCATORS["pool"]()
    block = pool.alloc(MIB)
    block[:] = b"\7" * MIB
    before = in_memory(pool)
    region = ForkingPickler.loads(ForkingPickler.dumps(pool.regions[0]))
    assert region.nbytes == MOST and in_memory(pool) == before < MOST
    at = block.address - pool.regions[0].address
    assert peek(region.address + at, MIB) == b"\7" * MIB


def test_a_received_region_without_holes_has_its_pages():
    arena = Bump(MIB, Shared(grow=True, huge_pages=None), 8 * MIB)
    region = ForkingPickler.loads(ForkingPickler.dumps(arena.regions[0]))
    before = vm.minor_faults()
    poke(region.address, MIB, 1)
    assert vm.minor_faults() - before < MIB // PAGE // 2
