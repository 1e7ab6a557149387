"""The host's side of memory that kernels allocate from. On the simulated driver: no kernel runs."""

import contextlib
import copy
import ctypes
import gc
import os
import pickle
import struct
import threading

import numpy as np
import pytest
from capsules import Array
from cuda_support import new_stream

import arenapy
from arenapy import cuda

ARENA_AT, SLAB_FIRST = 256, 256  # bytes of the structs


def at(address, form):
    return struct.unpack(form, ctypes.string_at(address, struct.calcsize(form)))


def write(address, form, *values):
    ctypes.memmove(address, struct.pack(form, *values), struct.calcsize(form))


def a_kernel_took(arena, nbytes, overflowed=0, misused=0):
    write(arena.address + 128, "<QQQ", nbytes, overflowed, misused)


def test_the_header_is_there():
    assert "arenapy.cuh" in os.listdir(cuda.include_dir())


def test_what_the_header_reads(gpu):
    arena = cuda.KernelArena(1000)
    assert at(arena.address, "<Q") == (1000,)
    slab = cuda.KernelSlab(24, 100)
    stride, count, first, words = at(slab.address, "<4Q")
    assert (stride, count, words) == (32, 100, 4)
    assert first == 256 + 128
    assert at(slab.address + 128, "<qQQ") == (100, 0, 0)
    assert at(slab.address + 256, "<4I") == (0, 0, 0, 2**32 - 2**4)
    cuda.KernelSlab(1, 64)


@pytest.mark.parametrize("stream", [False, True])
def test_what_kernels_did(gpu, stream):
    arena = cuda.KernelArena(1000)
    s = cuda.Stream() if stream else None
    assert (arena.used(s), arena.overflowed, arena.misused) == (0, 0, 0)
    a_kernel_took(arena, 1 << 40, 7, 3)
    assert (arena.used(s), arena.overflowed, arena.misused) == (1000, 7, 3)
    arena.reset(s)
    assert (arena.used(s), arena.overflowed, arena.misused) == (0, 0, 0)
    slab = cuda.KernelSlab(16, 40)
    write(slab.address + 128, "<q", 30)
    write(slab.address + 256, "<2I", 0x3FF, 2**32 - 2**8)
    assert slab.in_use(s) == 10
    slab.reset(s)
    assert slab.in_use(s) == 0
    assert at(slab.address + 256, "<2I") == (0, 2**32 - 2**8)


def test_a_captured_reset_is_done_at_each_launch(gpu):
    arena, s = cuda.KernelArena(1000), cuda.Stream()
    gpu.begin_capture(s.handle)
    arena.reset(s)
    graph = gpu.end_capture(s.handle)
    for nbytes in (64, 128):
        a_kernel_took(arena, nbytes)
        assert arena.used() == nbytes
        gpu.replay(graph, s.handle)
        assert arena.used(s) == 0
    gpu.destroy_graph(graph)


@pytest.mark.parametrize("name", [cuda.KernelArena.reset, cuda.KernelArena.used])
def test_counters_come_after_streams_that_were_named(gpu, name):
    arena, s = cuda.KernelArena(1 << 20), cuda.Stream()
    name(arena, s)
    gpu.launch(s.handle, lambda: a_kernel_took(arena, 0, 7), [(arena.address, ARENA_AT)])
    assert arena.overflowed == 7


def test_the_stream_of_a_buffer_may_end_with_it(gpu):
    arena, stream = cuda.KernelArena(1 << 20), new_stream(gpu).handle_
    arena.buffer(arena.address + ARENA_AT, 64, stream=stream).release()
    gpu.call("cuStreamDestroy", stream)
    arena.reset()
    assert arena.used() == arena.overflowed == 0
    assert gpu.errors == [], "it is asked about a stream that is gone"


@pytest.mark.parametrize("when", ["cuEventQuery", "while it drops"])
def test_a_buffer_that_another_thread_lets_go_of_forbids_no_reset(gpu, when):
    """It looks at finished work just then, so `reset` cannot."""
    arena, stream = cuda.KernelArena(1 << 20), cuda.Stream()
    pool = arenapy.Pool(2 << 20, cuda.Device())
    block, done = pool.alloc(64), []
    window = arena.buffer(arena.address + ARENA_AT, 64)
    slow, array = Array(window.address, (64,)), Array(window.address, (64,))
    array.keeps = window
    block.copy_from(slow, stream=stream)
    block.copy_from(array, stream=stream)
    thread = threading.Thread(target=lambda: done.append(arena.reset()))

    def meanwhile(name=when):
        if name == when and thread.ident is None:
            thread.start()
            thread.join(0.002)

    slow.on_delete = meanwhile if when == "while it drops" else None
    del window, array, slow
    gpu.drain()
    gpu.before_call = meanwhile
    pool.stats()
    thread.join()
    assert done == [None]


def test_a_buffer_that_only_finished_work_keeps_forbids_no_reset(gpu):
    arena, s, pinned = (
        cuda.KernelArena(1 << 20),
        cuda.Stream(),
        arenapy.Pool(2 << 20, cuda.Pinned()),
    )
    block = arena.buffer(arena.address + ARENA_AT, 64, stream=s)
    block.copy_to(pinned.alloc(64), stream=s)
    gpu.begin_capture(s.handle)  # of something else
    del block
    gpu.destroy_graph(gpu.end_capture(s.handle))
    gpu.drain()
    with contextlib.suppress(BufferError):  # it asks the stream for an event
        arena.reset(s)
    gpu.drain()
    arena.reset(s)
    assert arena.used(s) == 0


def test_a_buffer_forbids_a_reset(gpu):
    arena = cuda.KernelArena(1 << 20)
    a_kernel_took(arena, 64)
    block = arena.buffer(arena.address + ARENA_AT, 64)
    block.fill(5)
    part = block[16:32]
    del block
    with pytest.raises(BufferError, match="1 Buffers over parts of <KernelArena 1 MiB at"):
        arena.reset()
    assert arena.used() == 64
    address = part.address
    found = bytearray(16)
    part.copy_to(found)
    assert found == b"\5" * 16
    del arena
    other = cuda.KernelArena(1 << 20)
    assert not other.address <= address < other.address + (1 << 20)
    part.copy_to(found)
    assert found == b"\5" * 16


def test_a_buffer_keeps_its_memory_through_a_second_init(gpu):
    arena = cuda.KernelArena(1 << 20)
    block = arena.buffer(arena.address + ARENA_AT, 64)
    block.fill(5)
    arena.__init__(1 << 16)
    found = bytearray(64)
    block.copy_to(found)  # the simulated driver reports a copy of freed memory
    assert found == b"\5" * 64


@pytest.mark.parametrize(
    ("make", "again"),
    [
        (lambda: cuda.KernelArena(1 << 20), (10, arenapy.Host())),
        (lambda: cuda.KernelArena(1 << 20), (1 << 50,)),
        (lambda: cuda.KernelSlab(64, 100), (32, 10, arenapy.Host())),
        (lambda: cuda.KernelSlab(64, 100), (32, 1 << 50)),
    ],
)
def test_a_second_init_that_fails_changes_nothing(gpu, make, again):
    one = make()
    before = dict(vars(one)), repr(one)
    with pytest.raises((ValueError, arenapy.OutOfMemory)):
        one.__init__(*again)
    assert (dict(vars(one)), repr(one)) == before
    assert one.buffer(one.address + one._end - 64, 64).nbytes == 64


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_is_not_copied(gpu, how):
    """A copy of managed memory would be memory of the host, which no kernel can use."""
    for one in (cuda.KernelArena(1 << 10, cuda.Managed()), cuda.KernelSlab(64, 10, cuda.Managed())):
        with pytest.raises(TypeError, match=f"a {type(one).__name__} is not copied"):
            how(one)


@pytest.mark.parametrize(
    "make", [lambda: cuda.KernelArena(1000), lambda: cuda.KernelSlab(64, 32)], ids=["arena", "slab"]
)
def test_a_buffer_in_garbage_forbids_a_reset_to_its_finalizers(gpu, make):
    memory, refused = make(), []

    class Node:
        def __del__(self):
            with pytest.raises(BufferError, match="in use"):
                memory.reset()
            refused.append(self.block.nbytes)

    node = Node()
    node.itself, node.block = node, memory.buffer(memory.address + memory._first, 64)
    del node
    gc.collect()
    assert refused == [64]
    memory.reset()


def test_no_buffer_while_a_reset_is_under_way(gpu):
    """A reset has seen that there is none; then its memory may be handed out again."""
    arena = cuda.KernelArena(1 << 20)
    seen = []

    class Meddling:
        def __cuda_stream__(self):
            if not seen:
                with pytest.raises(BufferError, match="is being reset now") as refused:
                    arena.buffer(arena.address + ARENA_AT, 64)
                seen.append(refused)  # which keeps the frames of the call
            return 0, 1

    arena.reset(Meddling())
    assert len(seen) == 1
    arena.reset()
    block = arena.buffer(arena.address + ARENA_AT, 64)
    with pytest.raises(BufferError, match="are in use") as kept:
        arena.reset()
    del block
    assert arena.buffer(arena.address + ARENA_AT, 64).nbytes == 64 and kept.tb is not None


def test_an_address_of_numpy(gpu):
    arena = cuda.KernelArena(1000)
    assert arena.buffer(np.uint64(arena.address + ARENA_AT), 64).nbytes == 64


def test_after_the_buffer_is_gone(gpu):
    arena = cuda.KernelArena(1 << 20)
    s = cuda.Stream()
    block = arena.buffer(arena.address + ARENA_AT, 64, stream=s)
    block.fill(1, stream=s)
    del block
    arena.reset(s)


@pytest.mark.parametrize("address", [0, ARENA_AT - 1, ARENA_AT + 1000 - 63, 1 << 62, -1])
def test_a_buffer_outside(gpu, address):
    arena = cuda.KernelArena(1000)
    with pytest.raises(ValueError, match="are not inside the memory, which is from 0x"):
        arena.buffer(arena.address + address, 64)


def test_the_bitmap_is_not_memory(gpu):
    slab = cuda.KernelSlab(64, 10)
    with pytest.raises(ValueError, match="not inside"):
        slab.buffer(slab.address + SLAB_FIRST, 64)
    assert slab.buffer(slab.address + SLAB_FIRST + 128, 640).nbytes == 640


@pytest.mark.parametrize(
    ("make", "kind", "says"),
    [
        (lambda: cuda.KernelArena(0), ValueError, "nbytes=0: give at least 1"),
        (lambda: cuda.KernelArena(-1), ValueError, "nbytes=-1"),
        (lambda: cuda.KernelArena(1.5), TypeError, "nbytes=1.5: need an int"),
        (lambda: cuda.KernelArena(True), TypeError, "nbytes=True"),
        (lambda: cuda.KernelArena(1 << 63), (ValueError, arenapy.OutOfMemory), "bytes"),
        (lambda: cuda.KernelSlab(0, 1), ValueError, "nbytes=0"),
        (lambda: cuda.KernelSlab(1, 0), ValueError, "count=0"),
        (lambda: cuda.KernelSlab(16, 1 << 60), (ValueError, arenapy.OutOfMemory), "bytes"),
        (lambda: cuda.KernelArena(10, arenapy.Host()), ValueError, "gives host memory"),
        (lambda: cuda.KernelArena(10, cuda.Pinned()), ValueError, "gives pinned memory"),
        (lambda: cuda.KernelArena(10).buffer("0", 1), TypeError, "address='0'"),
        (lambda: cuda.KernelArena(10).buffer(0, "1"), TypeError, "nbytes='1'"),
        (lambda: cuda.KernelArena(10).reset("s"), TypeError, "is not a stream"),
    ],
)
def test_bad_input(gpu, make, kind, says):
    with pytest.raises(kind, match=says):
        make()


def test_managed_memory(gpu):
    arena = cuda.KernelArena(1 << 16, cuda.Managed())
    block = arena.buffer(arena.address + ARENA_AT, 400)
    block.fill(0)
    assert (np.asarray(block) == 0).all()
