"""Other libraries see memory of arenapy.cuda through __cuda_array_interface__."""

import ctypes
import threading

import pytest
from cuda_order import (
    EACH,
    N,
    backwards,
    pool_of,
    pool_stream,
    reads,
    stream,
)
from helpers import poke
from simulated_driver import simulated

from arenapy import Bump, cuda


@pytest.fixture
def one():
    with simulated() as one, one.on(0):
        one.attributes[91] = 1  # the device sees registered memory at its address
        yield one


# ---- the CUDA array interface ----


def test_what_the_interface_says(one):
    buffer = pool_of("device").alloc(N)
    view = buffer.view((4, -1), "f4")
    assert view.__cuda_array_interface__ == {
        "version": 3,
        "shape": (4, N // 16),
        "typestr": "<f4",
        "data": (view.address, False),
        "strides": None,
        "stream": 1,
    }
    assert buffer.held
    fields = buffer.view((2,), "i4,f4").__cuda_array_interface__
    assert fields["descr"] == [("f0", "<i4"), ("f1", "<f4")] and fields["typestr"] == "|V8"
    buffer.release()
    with pytest.raises(ValueError, match="closed"):
        _ = buffer.__cuda_array_interface__


def test_the_streams_number(one):
    handle = stream(one)
    assert pool_of("device", stream=handle).alloc(N).__cuda_array_interface__["stream"] == handle
    buffer = pool_of("managed").alloc(N)
    buffer.record_stream(handle)
    assert buffer.__cuda_array_interface__["stream"] == 1, "which waits for that"
    buffer = cuda.asbuffer(pool_of("device").alloc(N), 2)
    assert buffer.__cuda_array_interface__["stream"] == 2
    numbers = []

    def elsewhere():
        with one.on(0):
            numbers.append(buffer.__cuda_array_interface__["stream"])

    t = threading.Thread(target=elsewhere)
    t.start()
    t.join()
    assert numbers == [1], "2 would be that thread's"


@pytest.mark.parametrize("source", ["pinned", "managed"])
def test_no_stream_to_wait_for(one, source):
    pool = pool_of(source)
    buffer = pool.alloc(N)
    assert buffer.__cuda_array_interface__["stream"] is None
    other = pool.alloc(N)
    other.fill(3, stream=stream(one))
    assert other.__cuda_array_interface__["stream"] == (1 if source == "managed" else None)
    assert not one.queue, "the host waits, for not all readers do"


@pytest.mark.parametrize("own", ["legacy", "non-blocking"])
@pytest.mark.parametrize("source", ["device", "managed"])
def test_a_reader_that_waits_for_that_stream(one, source, own):
    pool = pool_of(source, stream=1 if own == "legacy" else stream(one))
    buffer = pool.alloc(N)
    buffer[:100].fill(1, stream=stream(one))
    buffer[100:].fill(2, stream=pool_stream(pool, buffer))
    event = one.got("cuEventCreate", ctypes.c_void_p, 2)
    one.call("cuEventRecord", event, buffer.__cuda_array_interface__["stream"])
    theirs = stream(one)
    one.call("cuStreamWaitEvent", theirs, event, 0)
    seen = reads(one, theirs, buffer.address, N)
    backwards(one)
    assert seen == [b"\1" * 100 + b"\2" * (N - 100)]


@EACH
def test_a_reader_on_a_blocking_stream_is_waited_for(one, source):
    own, theirs = stream(one), stream(one, 0)
    pool = pool_of(source, stream=None if source == "pinned" else own)
    buffer = pool.alloc(N)
    address = buffer.__cuda_array_interface__["data"][0]
    poke(address, N, 9)
    seen = reads(one, theirs, address, N)
    del buffer
    for _ in range(8):
        other = pool.alloc(N)
        if source in ("pinned", "managed"):
            poke(other.address, N, 1)
        else:
            other.fill(1, stream=own)
    backwards(one)
    assert seen == [b"\x09" * N]


def test_host_memory_has_no_such_interface(one):
    assert not hasattr(Bump(N).alloc(8), "__cuda_array_interface__")


@pytest.mark.parametrize("source", ["pinned", "managed"])
def test_a_fence_is_no_question_to_the_legacy_stream_alone(one, source):
    """That has done what it was given, but blocking streams have not."""
    pool = pool_of(source)
    buffer = pool.alloc(N)
    assert buffer.__cuda_array_interface__["stream"] is None
    one.launch(stream(one, 0))
    del buffer
    assert pool.stats().pending_bytes == N, "and now there is an event"
    one.drain()
    assert pool.stats().pending_bytes == 0
