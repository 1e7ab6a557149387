"""Copies and fills of CUDA memory, on the simulated driver."""

import ctypes
import gc
import itertools
import weakref

import numpy as np
import pytest
from capsules import Array
from cuda_support import LEGACY, MIB, SOURCES, a_gpu, content, new_stream, slowly_fill
from hypothesis import given
from hypothesis import strategies as st

from arenapy import Bump, Pool, Slab, cuda


def pool_of(name):
    return Pool() if name == "host" else Pool(16 * MIB, SOURCES[name]())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("to", "source"), list(itertools.product(["host", *SOURCES], repeat=2)))
def test_between_any_two_kinds(gpu, to, source, stream):
    s = new_stream(gpu) if stream else None
    if stream and to == source == "host":
        return
    a, b = pool_of(to).alloc(10_000), pool_of(source).alloc(10_000)
    b.copy_from(bytes(range(100)) * 100)
    a.copy_from(b, stream=s)
    if stream:
        gpu.drain()
    assert content(a) == bytes(range(100)) * 100
    a.fill(0)
    b.copy_to(a, stream=s)
    if stream:
        gpu.drain()
    assert content(a) == bytes(range(100)) * 100


def test_dates_for_which_numpy_has_no_buffer(gpu):
    dates, found = np.arange(9).astype("M8[D]"), np.zeros(9, "M8[D]")
    block = Pool(16 * MIB, cuda.Device()).alloc(dates.nbytes)
    block.copy_from(dates)
    block.copy_to(found)
    assert (found == dates).all()


def test_without_one_it_is_done_when_it_returns(gpu):
    pool = Pool(16 * MIB, cuda.Device())
    a, b = pool.alloc(1000), pool.alloc(1000)
    slowly_fill(gpu, LEGACY, b, 5)
    a.copy_from(b)
    assert content(a) == b"\5" * 1000
    slowly_fill(gpu, LEGACY, b, 7)
    b[:10].fill(8)
    assert content(b) == b"\10" * 10 + b"\7" * 990


def test_both_sides_are_held_until_it_is_done(gpu):
    s = new_stream(gpu)
    staging = Slab(MIB, 2, cuda.Pinned(huge_pages=None))
    pool = Pool(4 * MIB, cuda.Device(), 4 * MIB)
    item, block = staging.alloc(), pool.alloc(MIB)
    item.fill(1)
    block.copy_from(item, stream=s)
    where = item.address
    del item, block
    assert staging.stats().pending_bytes and pool.stats().pending_bytes
    other = [staging.alloc()]
    assert other[0].address != where
    other[0].fill(2)
    gpu.drain()
    assert staging.stats().pending_bytes == pool.stats().pending_bytes == 0


def test_a_slice_holds_its_root(gpu):
    s, pool = new_stream(gpu), Pool(4 * MIB, cuda.Device(), 4 * MIB)
    b = pool.alloc(4 * MIB)
    b[100:200].fill(1, stream=s)
    del b
    assert pool.stats().pending_bytes == 4 * MIB
    gpu.drain()


def test_an_array_in_pinned_memory_is_held(gpu):
    s = new_stream(gpu)
    staging = Pool(4 * MIB, cuda.Pinned(huge_pages=None), 4 * MIB)
    block = Pool(8 * MIB, cuda.Device()).alloc(4 * MIB)
    x = staging.empty(4 * MIB, "u1")
    x[:] = 3
    block.copy_from(x, stream=s)
    address = x.ctypes.data
    del x
    gc.collect()
    assert staging.stats().pending_bytes == 4 * MIB
    again = staging.alloc(4 * MIB)  # waits for the stream, as there is nothing else
    assert again.address == address and content(block) == b"\3" * 4 * MIB
    del again
    block.copy_to(bytearray(4 * MIB), stream=s)
    for _ in range(40):  # now and then it is looked whether something is over
        block[:1].copy_from(staging.alloc(1), stream=s)
        gpu.drain()


def test_ordinary_memory_is_done_with_when_it_returns(gpu):
    s, block = new_stream(gpu), Pool(4 * MIB, cuda.Device()).alloc(100)
    given = bytearray(b"a" * 100)
    block.copy_from(given, stream=s)
    given[:] = b"b" * 100
    given.clear()  # not exported any more
    got = bytearray(100)
    block.copy_to(got, stream=s)
    assert got == b"a" * 100
    got.clear()


def test_the_first_use_by_a_stream_comes_after_the_own_one(gpu):
    """Whoever had these bytes before may be at work on them in the own stream."""
    pool, s = Pool(2 * MIB, cuda.Device(), 2 * MIB), new_stream(gpu)
    before = pool.alloc(2 * MIB)
    slowly_fill(gpu, LEGACY, before, 1)
    del before
    b = pool.alloc(2 * MIB)
    b.fill(2, stream=s)
    while gpu.step(1):
        pass
    assert set(content(b)) == {2}


@pytest.mark.parametrize("busy", [False, True])
def test_an_owner_that_has_done_its_work_costs_no_event(gpu, busy):
    own, s = cuda.Stream(), cuda.Stream()
    block = Pool(4 * MIB, cuda.Device(), stream=own).alloc(1000)
    source = Pool(4 * MIB, cuda.Device(), stream=s).alloc(1000)
    source.fill(1, stream=s)
    gpu.drain()
    if busy:
        block.fill(2, stream=own)
    events = gpu.calls["cuEventRecord"]
    block.copy_from(source, stream=s)
    assert gpu.calls["cuEventRecord"] - events == busy
    while gpu.step(1):
        pass
    assert set(content(block)) == {1}


@pytest.mark.parametrize("peers", [set(), {(0, 1), (1, 0)}])
def test_across_devices(gpu, peers):
    gpu.peers = peers
    a = Pool(4 * MIB, cuda.Device(0)).alloc(1000)
    b = Pool(4 * MIB, cuda.Device(1)).alloc(1000)
    b.fill(9)
    a.copy_from(b)
    assert content(a) == b"\11" * 1000
    assert gpu.calls["cuMemcpyPeerAsync"] == 1
    b.copy_from(a)
    assert bool(gpu.enabled) == bool(peers)


def test_arrays_of_other_libraries(gpu):
    address = gpu.got("cuMemAlloc", ctypes.c_uint64, 4096)
    ctypes.memset(address, 4, 4096)
    s, theirs = new_stream(gpu), new_stream(gpu)
    b = Pool(4 * MIB, cuda.Device()).alloc(4000)
    gpu.launch(theirs.handle_, lambda: ctypes.memset(address, 5, 4096), [(address, 4096)])
    b.copy_from(Array(address, (10, 100), "<f4", stream=theirs.handle_), stream=s)
    gpu.drain()
    assert content(b) == b"\5" * 4000, "it came before what its producer had queued"
    b.fill(6)
    b.copy_to(Array(address, (1000,), "<f4", strides=(4,)))
    assert ctypes.string_at(address, 4001) == b"\6" * 4000 + b"\5"
    for wrong, text in (
        (Array(address, (1000,), "<f4", readonly=True), "Array is read-only"),
        (Array(address, (500,), "<f4", strides=(8,)), "not C-contiguous"),
        (Array(address, (10,), "<f4"), "slice the larger one"),
    ):
        with pytest.raises((BufferError, ValueError), match=text):
            b.copy_to(wrong)
    gpu.call("cuMemFree", address)


def test_what_cannot_be_copied_changes_nothing(gpu):
    s = new_stream(gpu)
    b = Pool(4 * MIB, cuda.Device()).alloc(1000)
    b.fill(1)
    for stream in (None, s):
        with pytest.raises(ValueError, match=r"1000 bytes.*bytearray has 999.*slice the larger"):
            b.copy_from(bytearray(999), stream=stream)
        with pytest.raises(BufferError, match="bytes is read-only; pass a writable object"):
            b.copy_to(bytes(1000), stream=stream)
        for copy in (b.copy_from, b.copy_to):
            with pytest.raises(TypeError, match="holds Python objects"):
                copy(np.array([None] * 125), stream=stream)
        with pytest.raises(BufferError, match="not contiguous"):
            b.copy_from(np.zeros(2000, "u1")[::2], stream=stream)
        with pytest.raises(TypeError, match="int is not a Buffer"):
            b.copy_from(5, stream=stream)
        for value in (-1, 256, "x", None):
            with pytest.raises(ValueError, match="is not a byte"):
                b.fill(value, stream=stream)
    with pytest.raises(TypeError, match="stream='x' is not a stream"):
        b.copy_from(bytes(1000), stream="x")
    other = Pool(4 * MIB, cuda.Device()).alloc(1000)
    other.release()
    for call in (b.copy_from, b.copy_to, other.copy_from):
        with pytest.raises(ValueError, match="closed"):
            call(other)
    gpu.drain()
    assert content(b) == b"\1" * 1000
    assert not b.closed


@given(st.data())
def test_random_copies(data):
    """Sequences of copies between kinds on two streams that take turns, against a model."""
    with a_gpu() as gpu:
        names = ["host", *SOURCES]
        buffers = {name: pool_of(name).alloc(4096) for name in names}
        model = {name: bytearray(4096) for name in names}
        for buffer in buffers.values():
            buffer.fill(0)
        streams = [None, new_stream(gpu), new_stream(gpu, 0)]
        for _ in range(data.draw(st.integers(1, 12))):
            to, source = data.draw(st.permutations(names))[:2]
            start, at = data.draw(st.integers(0, 4000)), data.draw(st.integers(0, 4000))
            n = data.draw(st.integers(0, 96))
            stream = data.draw(st.sampled_from(streams))
            byte = data.draw(st.integers(0, 255))
            if byte % 2:
                buffers[to][at : at + n].copy_from(buffers[source][start : start + n], stream)
                model[to][at : at + n] = model[source][start : start + n]
            else:
                stream = None if to == "host" else stream
                buffers[to][at : at + n].fill(byte, stream)
                model[to][at : at + n] = bytes([byte]) * n
            if stream is not None:
                gpu.call("cuStreamSynchronize", stream.handle_)
        for name in names:
            assert content(buffers[name]) == bytes(model[name]), name
        del buffer
        buffers.clear()


def test_a_bump_is_not_kept_from_its_reset(gpu):
    arena = Bump(MIB, cuda.Device())
    b = arena.alloc(1000)
    b.copy_from(bytes(1000))
    del b
    arena.reset()
    assert arena.stats().retired_bytes == 0


def test_a_capture_keeps_what_it_copies_from(gpu):
    """Ordinary memory too: each launch reads it."""
    s, b = new_stream(gpu), Pool(4 * MIB, cuda.Device()).alloc(100)
    given = bytearray(b"a" * 100)
    gpu.begin_capture(s.handle_)
    b.copy_from(given, stream=s)
    with pytest.raises(BufferError):
        given.clear()  # exported
    gpu.destroy_graph(gpu.end_capture(s.handle_))


def test_what_overlaps(gpu):
    b = Pool(4 * MIB, cuda.Device()).alloc(1000)
    with pytest.raises(ValueError, match="overlap"):
        b[:600].copy_from(b[400:])
    b.fill(1)
    b[:500].copy_from(b[500:])


class Frame(bytearray):
    """It has a buffer of its own, and an attribute `base` that is something else."""


@pytest.mark.parametrize("other", ["a block", "a part of it"])
def test_what_only_says_that_it_is_a_view_is_kept(gpu, other):
    """Its bytes are not those of the block that it names, and somebody has pinned them."""
    block = Pool(4 * MIB, cuda.Device()).alloc(4096)
    named = Bump(MIB, cuda.Pinned(huge_pages=None)).alloc(4096)
    frame = Frame(b"\5" * 4096)
    frame.base = named if other == "a block" else named[64:]
    address = ctypes.addressof(ctypes.c_char.from_buffer(frame))
    assert gpu.call("cuMemHostRegister", address, 4096, 0) == 0
    gone = []
    weakref.finalize(frame, gone.append, 1)
    stream = cuda.Stream()
    block.copy_from(frame, stream=stream)
    del frame
    gc.collect()
    assert gpu.queue and not gone, "the device is still to read it"
    stream.synchronize()
    assert gone and content(block) == b"\5" * 4096
    assert gpu.call("cuMemHostUnregister", address) == 0
