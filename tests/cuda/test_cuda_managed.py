"""Prefetches and advice reach the driver, in the words of CUDA 12 and of CUDA 13."""

from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_driver import INVALID_VALUE, simulated

import arenapy
from arenapy import cuda
from arenapy.cuda.copies import ADVICE

KIB = 1 << 10
MIB = 1 << 20
CALLS = ("cuMemAdvise", "cuMemPrefetchAsync")


@contextmanager
def cuda_of(version):
    """A simulated driver as the cuda-python of that version shows it."""
    with simulated(version) as one, one.on(0):
        one.memory.others = [0, 0]
        yield one


@pytest.fixture(params=[12, 13])
def one(request):
    with cuda_of(request.param) as one:
        yield one


@pytest.fixture
def block(one):
    return arenapy.Pool(4 * MIB, cuda.Managed()).alloc(8 * KIB)


@pytest.mark.parametrize(("device_id", "place"), [(0, (1, 0)), (1, (1, 1)), (-1, (2, 0))])
def test_prefetch(one, block, device_id, place):
    cuda.prefetch(block, device_id)
    assert one.advised == [("cuMemPrefetchAsync", block.address, 8 * KIB, 0, *place)]
    assert not one.queue, "it is done"


def test_prefetch_of_a_part_on_a_stream(one, block):
    stream = cuda.Stream()
    cuda.Managed.prefetch(block[KIB : 3 * KIB], 1, stream)
    assert one.advised == [("cuMemPrefetchAsync", block.address + KIB, 2 * KIB, 0, 1, 1)]
    assert len(one.queue) == 1
    stream.synchronize()
    assert not one.queue


def test_a_prefetch_holds_the_block(one):
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
    with cuda_of(version) as one:
        block = arenapy.Pool(4 * MIB, cuda.Managed()).alloc(8 * KIB)[start : start + n]
        cuda.Managed.advise(block, advice, device_id)
        place = (2, 0) if device_id == -1 else (1, device_id)
        said = ("cuMemAdvise", block.address, block.nbytes, ADVICE[advice], *place)
        assert one.advised == ([said] if block.nbytes else [])


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
def test_other_memory(one, source):
    block = arenapy.Pool(4 * MIB, source).alloc(KIB)
    for call in (
        lambda: cuda.prefetch(block, 0),
        lambda: cuda.advise(block, "read_mostly"),
    ):
        with pytest.raises(BufferError, match=rf"{block.kind} memory.*copy_to.*cuda\.Managed"):
            call()


def test_what_cannot_be(one, block):
    with pytest.raises(TypeError, match="bytearray is no Buffer"):
        cuda.prefetch(bytearray(8), 0)
    for device_id in (2, -2, 2**40):
        with pytest.raises(ValueError, match=f"ordinal={device_id} is no CUDA device"):
            cuda.prefetch(block, device_id)
        with pytest.raises(ValueError, match=f"ordinal={device_id} is no CUDA device"):
            cuda.advise(block, "accessed_by", device_id)
    with pytest.raises(TypeError, match="device_id='host'"):
        cuda.prefetch(block, "host")
    with pytest.raises(ValueError, match=r"advice='often' is none of 'read_mostly', "):
        cuda.advise(block, "often")
    with pytest.raises(TypeError, match="is no stream"):
        cuda.prefetch(block, 0, stream="s")
    block.release()
    for call in (lambda: cuda.prefetch(block, 0), lambda: cuda.advise(block, "read_mostly")):
        with pytest.raises(ValueError, match="closed"):
            call()
    assert not one.advised


def test_a_driver_that_refuses(one, block):
    for name in one.functions.keys() & {*CALLS, *(f"{name}_12" for name in CALLS)}:
        one.fails[name] = INVALID_VALUE
    with pytest.raises(cuda.CudaError, match="cuMemPrefetchAsync failed"):
        cuda.prefetch(block, 0)
    with pytest.raises(cuda.CudaError, match="cuMemAdvise failed"):
        cuda.advise(block, "read_mostly")
    one.fails.clear()
    cuda.prefetch(block, 0)
