"""On a real GPU: blocks of `cuda.Device(grow=True)` in other processes, which are real ones."""

import contextlib
import gc
import multiprocessing as mp
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from real_gpu import Gpu, content, need_gpu

import arenapy
from arenapy import Bump, Pool, cuda

MIB = 1 << 20

pytestmark = pytest.mark.alone

ALLOCATORS = {
    "bump": lambda **options: Bump(MIB, cuda.Device(grow=True), 1 << 30, **options),
    "pool": lambda **options: Pool(source=cuda.Device(grow=True), **options),
}

#: Receives, says what byte the block is full of, fills it with another one, and waits; or (k) is
#: killed while kernels write to it.
CHILD = """
import socket, sys
sys.path[:0] = sys.argv[2:]
import arenapy
from arenapy import cuda

sock = socket.socket(fileno=int(sys.argv[1]))
received = arenapy.receive(sock)
got = bytearray(received.nbytes)
received.copy_to(got)
sock.sendall(got[:1] if got == got[:1] * len(got) else b"?")
what = sock.recv(1)
stream = cuda.Stream()
if what == b"k":
    for n in range(4000):
        received.fill(n % 2 + 100, stream=stream)
    sock.sendall(b"x")
else:
    received.fill(2, stream=stream)
    stream.synchronize()
    sock.sendall(b"x")
sock.recv(1)
"""


@pytest.fixture(scope="module")
def gpu():
    need_gpu()
    with Gpu() as one:
        yield one


@contextlib.contextmanager
def another():
    here, there = socket.socketpair()
    with here, there:
        support = str(Path(__file__).parents[1] / "support")
        command = [sys.executable, "-c", CHILD, str(there.fileno()), support]
        process = subprocess.Popen(command, pass_fds=[there.fileno()])
        there.close()
        here.settimeout(120)
        try:
            yield process, here
        finally:
            process.kill()
            process.wait()


def filled(block, byte, stream=None):
    block.fill(byte, stream=stream)
    return block


def has(block, byte):
    return bool((content(block) == byte).all())


def settled(allocator):
    if isinstance(allocator, Bump):
        allocator.reset()
        return allocator.stats().pending_bytes == allocator.retired == 0
    return allocator.stats().pending_bytes == 0


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.001)


def free():
    return cuda.memory_info(0).free_bytes


@pytest.mark.parametrize("end", ["exit", "kill"])
@pytest.mark.parametrize("kind", ALLOCATORS)
@pytest.mark.parametrize("nbytes", [1000, 300 * MIB])  # of more pages than one message has
def test_another_process_has_the_same_bytes_until_it_ends(gpu, kind, nbytes, end):
    allocator = ALLOCATORS[kind]()
    before = allocator.alloc(100)
    block = filled(allocator.alloc(nbytes), 1)
    at = block.address
    with another() as (process, sock):
        arenapy.send(sock, block)
        assert sock.recv(9) == b"\1"
        sock.sendall(b"g")
        assert sock.recv(1) == b"x"
        assert has(block, 2)
        del block
        assert not settled(allocator)
        other = filled(allocator.alloc(nbytes), 3)
        assert other.address + nbytes <= at or at + nbytes <= other.address
        allocator.trim()
        if end == "exit":
            sock.sendall(b"g")
            assert process.wait(60) == 0
        else:
            os.kill(process.pid, signal.SIGKILL)
            process.wait(60)
        until(lambda: settled(allocator))
        del other, before
        gc.collect()
        allocator.check()


def test_a_receiver_that_is_killed_writes_no_more(gpu):
    """When its lease has ended, none of the kernels that it had queued is going to run."""
    pool = ALLOCATORS["pool"]()
    for _ in range(3):
        block = filled(pool.alloc(256 * MIB), 1)
        with another() as (process, sock):
            arenapy.send(sock, block)
            assert sock.recv(9) == b"\1"
            del block
            sock.sendall(b"k")
            assert sock.recv(1) == b"x"
            os.kill(process.pid, signal.SIGKILL)
            while not settled(pool):
                pass
            block = filled(pool.alloc(256 * MIB), 7)
            for _ in range(3):
                assert has(block, 7)
                time.sleep(0.1)
            process.wait(60)
        del block


def test_a_block_waits_for_its_streams_before_it_is_sent(gpu):
    stream = cuda.Stream()
    pool = ALLOCATORS["pool"]()
    block = pool.alloc(256 * MIB, stream=stream)
    for n in range(100):
        block.fill(n, stream=stream)
    with another() as (_, sock):
        arenapy.send(sock, block)
        assert sock.recv(9) == bytes([99])


def test_sent_before_and_after_growth_and_trim(gpu):
    pool = ALLOCATORS["pool"]()
    first = filled(pool.alloc(10 * MIB), 1)
    with another() as (_, one), another() as (_, two):
        arenapy.send(one, first)
        large = filled(pool.alloc(500 * MIB), 4)
        arenapy.send(two, large[100 * MIB : 110 * MIB])
        assert one.recv(9) == b"\1" and two.recv(9) == b"\4"
        del large
        pool.trim()
        one.sendall(b"g")
        two.sendall(b"g")
        assert one.recv(1) == two.recv(1) == b"x"
        assert has(first, 2)
        before = free()
        two.sendall(b"g")
        until(lambda: settled(pool))
        assert pool.trim() >= 500 * MIB
        assert free() >= before + 500 * MIB


def work(queue, answers):
    block = queue.get()
    got = bytearray(block.nbytes)
    block.copy_to(got)
    block.fill(9)
    cuda.Stream().synchronize()
    answers.put((set(got[::1000]), block.shape, str(block.dtype)))
    answers.get()


def test_through_multiprocessing(gpu):
    context = mp.get_context("spawn")
    queue, answers = context.Queue(), context.Queue()
    pool = ALLOCATORS["pool"]()
    block = pool.empty((1 << 20, 3), "f4")
    block.copy_from(np.full((1 << 20, 3), 0x08080808, "u4").view("f4"))
    process = context.Process(target=work, args=(queue, answers), daemon=True)
    process.start()
    try:
        queue.put(block)
        found, shape, dtype = answers.get(timeout=120)
        assert (found, shape, dtype) == ({8}, (1 << 20, 3), "float32")
    finally:
        process.kill()
        process.join()
    del block
    until(lambda: settled(pool))


def test_all_of_it_comes_back(gpu):
    gc.collect()
    cuda.Stream().synchronize()
    before = free()
    pool = ALLOCATORS["pool"]()
    kept = []
    here, there = socket.socketpair()
    with here, there:
        for _ in range(20):
            arenapy.send(here, pool.alloc(5 * MIB))
            kept.append(arenapy.receive(there))  # in this process
    del pool, kept
    gc.collect()
    cuda.Stream().synchronize()
    assert free() == before
