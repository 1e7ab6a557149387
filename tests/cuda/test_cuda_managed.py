"""Prefetches and advice reach the driver, in the words of CUDA 12 and of CUDA 13."""

import re

import pytest
from cuda_support import MIB, a_gpu
from hypothesis import given
from hypothesis import strategies as st

import arenapy
from arenapy import cuda
from arenapy.cuda.copies import ADVICE

KIB = 1 << 10


@pytest.fixture(params=[12, 13])
def gpu(request):
    with a_gpu(True, request.param) as gpu:
        yield gpu


@pytest.fixture
def block(gpu):
    return arenapy.Pool(4 * MIB, cuda.Managed()).alloc(8 * KIB)


@pytest.mark.parametrize(("device_id", "place"), [(0, (1, 0)), (1, (1, 1)), (-1, (2, 0))])
def test_prefetch(gpu, block, device_id, place):
    cuda.prefetch(block, device_id)
    assert gpu.advised == [("cuMemPrefetchAsync", block.address, 8 * KIB, 0, *place)]
    assert not gpu.queue, "it is done"


def test_prefetch_of_a_part_on_a_stream(gpu, block):
    stream = cuda.Stream()
    cuda.Managed.prefetch(block[KIB : 3 * KIB], 1, stream)
    assert gpu.advised == [("cuMemPrefetchAsync", block.address + KIB, 2 * KIB, 0, 1, 1)]
    assert len(gpu.queue) == 1
    stream.synchronize()
    assert not gpu.queue


def test_a_prefetch_holds_the_block(gpu):
    """Its region is not given back below it."""
    pool = arenapy.Pool(4 * MIB, cuda.Managed())
    stream = cuda.Stream()
    block = pool.alloc(8 * KIB)
    cuda.prefetch(block, 1, stream=stream)
    block.release()
    assert pool.stats().pending_bytes == 8 * KIB
    stream.synchronize()
    assert pool.stats().pending_bytes == 0


@given(
    advice=st.sampled_from(sorted(ADVICE)), device_id=st.integers(-1, 1),
    version=st.sampled_from([12, 13]), start=st.integers(0, 8 * KIB), n=st.integers(0, 8 * KIB),
)  # fmt: skip
def test_advice(advice, device_id, version, start, n):
    with a_gpu(True, version) as gpu:
        block = arenapy.Pool(4 * MIB, cuda.Managed()).alloc(8 * KIB)[start : start + n]
        cuda.Managed.advise(block, advice, device_id)
        place = (2, 0) if device_id == -1 else (1, device_id)
        said = ("cuMemAdvise", block.address, block.nbytes, ADVICE[advice], *place)
        assert gpu.advised == ([said] if block.nbytes else [])


def test_the_numbers_are_the_drivers():
    assert list(ADVICE.values()) == [1, 2, 3, 4, 5, 6]
    assert all(
        number % 2 == 1 and ADVICE["unset_" + name] == number + 1
        for name, number in ADVICE.items()
        if not name.startswith("unset_")
    )


@pytest.mark.parametrize(
    "source", [cuda.Device(), cuda.Pinned(mapped=False), arenapy.Host()], ids=lambda s: repr(s)[:6]
)
def test_other_memory(gpu, source):
    block = arenapy.Pool(4 * MIB, source).alloc(KIB)
    for call in (
        lambda: cuda.prefetch(block, 0),
        lambda: cuda.advise(block, "read_mostly"),
    ):
        with pytest.raises(BufferError, match=rf"{block.kind} memory.*copy_to.*cuda\.Managed"):
            call()


def test_what_cannot_be(gpu, block):
    with pytest.raises(TypeError, match="bytearray is not a Buffer"):
        cuda.prefetch(bytearray(8), 0)
    for device_id in (2, -2, 2**40):
        with pytest.raises(ValueError, match=f"ordinal={device_id} is not a CUDA device"):
            cuda.prefetch(block, device_id)
        with pytest.raises(ValueError, match=f"ordinal={device_id} is not a CUDA device"):
            cuda.advise(block, "accessed_by", device_id)
    with pytest.raises(TypeError, match="device_id='host'"):
        cuda.prefetch(block, "host")
    with pytest.raises(ValueError, match=r"advice='often' is not one of 'read_mostly', "):
        cuda.advise(block, "often")
    with pytest.raises(TypeError, match="is not a stream"):
        cuda.prefetch(block, 0, stream="s")
    block.release()
    for call in (lambda: cuda.prefetch(block, 0), lambda: cuda.advise(block, "read_mostly")):
        with pytest.raises(ValueError, match="closed"):
            call()
    assert not gpu.advised


@pytest.mark.parametrize("advice", [[], {}, None, 1, "read"])
def test_no_such_advice(gpu, block, advice):
    with pytest.raises(
        ValueError, match=re.escape(f"advice={advice!r} is not one of 'read_mostly'")
    ):
        cuda.advise(block, advice)
