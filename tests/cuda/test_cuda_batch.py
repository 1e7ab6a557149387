"""Many copies as one: all are checked before the first, all are done after the last."""

import ctypes

import numpy as np
import pytest
from capsules import Array
from cuda_machine import Wrapped
from cuda_support import a_gpu
from helpers import peek, readonly_buffer
from hypothesis import given
from hypothesis import strategies as st
from simulated_driver import INVALID_VALUE
from simulated_gpu import NON_BLOCKING

import arenapy
from arenapy import cuda

KIB = 1 << 10
MIB = 1 << 20


@pytest.fixture
def pool(gpu):
    return arenapy.Pool(8 << 20, cuda.Device())


def test_nothing_to_do(gpu):
    cuda.copy_batch([])
    cuda.copy_batch(iter(()), stream=1)
    assert not gpu.calls["cuStreamSynchronize"]


def test_many_with_one_wait(gpu, pool):
    sources = [np.full(100 + i, i, np.uint8) for i in range(50)]
    blocks = [pool.alloc(source.nbytes) for source in sources]
    back = [bytearray(source.nbytes) for source in sources]
    before = gpu.calls["cuStreamSynchronize"]
    cuda.copy_batch(zip(blocks, sources, strict=True))
    assert gpu.calls["cuStreamSynchronize"] - before == 1
    cuda.copy_batch(list(zip(back, blocks, strict=True)))
    assert back == [source.tobytes() for source in sources]
    assert gpu.calls["cuMemcpyAsync"] == 100


def test_it_is_done_when_it_returns_and_not_before_with_a_stream(gpu, pool):
    pinned = arenapy.Pool(1 << 20, cuda.Pinned(mapped=False)).alloc(KIB)
    blocks = [pool.alloc(KIB) for _ in range(3)]
    pinned.copy_from(b"\1" * KIB)
    cuda.copy_batch([(block, pinned) for block in blocks])
    assert all(peek(block.address, KIB) == b"\1" * KIB for block in blocks)
    stream = cuda.Stream()
    pinned.copy_from(b"\2" * KIB)
    cuda.copy_batch([(block, pinned) for block in blocks], stream)
    assert all(peek(block.address, KIB) == b"\1" * KIB for block in blocks)
    stream.synchronize()
    assert all(peek(block.address, KIB) == b"\2" * KIB for block in blocks)


def test_both_sides_are_held_until_the_stream_has_done_it(gpu):
    pinned = arenapy.Pool(1 << 20, cuda.Pinned(mapped=False))
    device = arenapy.Pool(1 << 20, cuda.Device())
    stream = cuda.Stream()
    source, target = pinned.alloc(4 * KIB), device.alloc(4 * KIB)
    other_pinned = arenapy.Pool(1 << 20, cuda.Pinned(mapped=False))
    registered = other_pinned.empty(KIB, "u1")
    other = device.alloc(KIB)
    kept = [registered.ctypes.data]
    cuda.copy_batch([(target, source), (other, registered)], stream)
    del source, target, other, registered
    for pool, nbytes in ((pinned, 4 * KIB), (other_pinned, KIB), (device, 5 * KIB)):
        assert pool.stats().pending_bytes == nbytes
    peek(kept[0], KIB)  # still mapped
    gpu.drain()
    for pool in (pinned, device):
        assert pool.stats().pending_bytes == 0


def test_a_frame_that_is_reset_amid_a_batch(gpu):
    """A block of it that was pinned is closed, and its bytes come back, when the call returns."""
    arena = arenapy.Bump(MIB, cuda.Device())
    blocks = [arena.alloc(KIB)]
    address = blocks[0].address

    def pairs():
        yield blocks[0], b"\1" * KIB
        arena.reset()
        assert "1 KiB retired" in repr(arena)
        blocks.append(arena.alloc(KIB))
        yield blocks[1], b"\2" * KIB

    cuda.copy_batch(pairs())
    assert blocks[0].closed and blocks[1].address != address
    assert peek(address, KIB) == b"\1" * KIB
    assert peek(blocks[1].address, KIB) == b"\2" * KIB
    assert "retired" not in repr(arena)
    arena.check()


def test_in_order(gpu, pool):
    a, b, c = (pool.alloc(KIB) for _ in range(3))
    cuda.copy_batch([(a, b"\7" * KIB), (b, a), (c, b)])
    assert peek(c.address, KIB) == b"\7" * KIB


def test_every_kind_of_side(gpu, pool):
    data = np.arange(KIB).astype("u1")
    host = arenapy.Pool(1 << 20).copy(data)
    kept = pool.alloc(KIB)
    theirs = Array(kept.address, (KIB,))
    managed = arenapy.Pool(1 << 20, cuda.Managed()).alloc(KIB)
    other = arenapy.Pool(1 << 20, cuda.Device(1)).alloc(KIB)
    got = bytearray(KIB)
    view = pool.alloc(2 * KIB)[KIB:]
    cuda.copy_batch(
        [(view, host), (theirs, view), (managed, theirs), (other, managed), (got, other)],
        stream=Wrapped(gpu.got("cuStreamCreate", ctypes.c_void_p, NON_BLOCKING)),
    )
    assert got == data.tobytes()


WRONG = {
    "size": (lambda pool: (pool.alloc(KIB), bytes(KIB - 1)), ValueError, "has 1024 bytes and"),
    "read-only": (lambda pool: (bytes(KIB), pool.alloc(KIB)), BufferError, "bytes is read-only"),
    "read-only Buffer": (
        lambda pool: (readonly_buffer(bytes(KIB)), pool.alloc(KIB)), BufferError, "is read-only",
    ),
    "read-only array": (
        lambda pool: (Array(pool.alloc(KIB).address, (KIB,), readonly=True), pool.alloc(KIB)),
        BufferError, "Array is read-only",
    ),
    "not contiguous": (
        lambda pool: (pool.alloc(KIB), np.zeros(2 * KIB, "u1")[::2]), BufferError, "contiguous",
    ),
    "no memory": (lambda pool: (pool.alloc(KIB), 3), TypeError, "int is not a Buffer"),
    "no pair": (lambda pool: (pool.alloc(KIB), bytes(KIB), 3), TypeError, "is not a pair"),
    "no pair at all": (lambda pool: 3, TypeError, "3 is not a pair"),
    "overlapping": (lambda pool: overlapping(pool.alloc(2 * KIB)), ValueError, "overlap"),
    "closed": (lambda pool: (closed(pool), bytes(KIB)), ValueError, "is closed"),
    "of the host": (
        lambda pool: (arenapy.Pool(1 << 20).alloc(KIB), bytes(KIB)),
        ValueError, "neither the target",
    ),
    "of others": (lambda pool: (bytearray(KIB), bytes(KIB)), ValueError, "neither the target"),
}  # fmt: skip


def overlapping(block):
    return block[:KIB], block[100 : KIB + 100]


def closed(pool):
    block = pool.alloc(KIB)
    block.release()
    return block


@given(
    what=st.sampled_from(sorted(WRONG)), before=st.integers(0, 3), after=st.integers(0, 2),
    stream=st.sampled_from([None, 1]),
)  # fmt: skip
def test_one_that_cannot_be(what, before, after, stream):
    """It is named, and nothing was copied."""
    make, error, text = WRONG[what]
    with a_gpu(leaks=True) as gpu:
        pool = arenapy.Pool(8 << 20, cuda.Device())
        right = [(pool.alloc(KIB), bytes(KIB)) for _ in range(before + after)]
        pairs = [*right[:before], make(pool), *right[before:]]
        with pytest.raises(error, match=rf"pairs\[{before}\]: .*{text}"):
            cuda.copy_batch(pairs, stream)
        assert not gpu.calls["cuMemcpyAsync"]
        cuda.copy_batch(right, stream)


@pytest.mark.parametrize("stream", [None, 1])
def test_a_copy_that_fails(gpu, pool, stream):
    """Nothing of it goes on afterwards, unless it was given to a stream."""
    pinned = arenapy.Pool(1 << 20, cuda.Pinned(mapped=False)).alloc(KIB)
    pairs = [(pool.alloc(KIB), pinned) for _ in range(4)]
    gpu.fail_at("cuMemcpyAsync", 3, INVALID_VALUE)
    with pytest.raises(cuda.CudaError, match="cuMemcpyAsync failed"):
        cuda.copy_batch(pairs, stream)
    queued = [each for each in gpu.queue if "a copy" in each.what]
    assert len(queued) == (0 if stream is None else 2)
    cuda.copy_batch(pairs, stream)
