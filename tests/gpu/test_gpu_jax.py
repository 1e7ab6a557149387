"""The rules of docs/ecosystem.md for JAX, on a real GPU."""

import gc
import time

import numpy as np
import pytest
from real_gpu import content

from arenapy import Pool, cuda

MIB = 1 << 20


@pytest.fixture
def jax(gpu):
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX uses no GPU")
    return jax


def floats(pool, count, value):
    block = pool.alloc(4 * count).view((count,), "f4")
    block.copy_from(np.full(count, value, "f4"))
    return block


def test_an_array_shares_a_block(gpu, jax):
    pool = Pool(64 * MIB, cuda.Device())
    block = floats(pool, 1000, 1)
    x = jax.dlpack.from_dlpack(block)
    assert x.unsafe_buffer_pointer() == block.address
    assert float(x.sum()) == 1000
    assert jax.numpy.array(x, copy=True).unsafe_buffer_pointer() != block.address
    del block
    gc.collect()
    assert pool.stats().active_allocations == 1
    assert float(x.sum()) == 1000


def test_a_donated_block(gpu, jax):
    """If JAX puts the result there, the block lives until that is gone."""
    pool = Pool(64 * MIB, cuda.Device())
    block = floats(pool, 1 << 20, 3)
    address = block.address
    x = jax.dlpack.from_dlpack(block)
    y = jax.jit(lambda x: x * 2, donate_argnums=0)(x)
    y.block_until_ready()
    assert x.is_deleted()
    shares = y.unsafe_buffer_pointer() == address
    print("the result of a donated array", "is" if shares else "is not", "in the block")
    assert (content(block, "f4") == (6 if shares else 3)).all()
    del block, x
    gc.collect()
    taken = [floats(pool, 1 << 20, -1) for _ in range(4)]
    assert (np.asarray(y) == 6).all()
    assert not shares or address not in [one.address for one in taken]


def test_a_block_is_nobody_elses_while_a_computation_reads_it(gpu, jax):
    """Room for four blocks: each is dropped with its computation under way."""
    results, end = [], time.monotonic() + 60

    def wait_for_jax(nbytes):
        """JAX's own threads let go of a block, some time after the computation is done."""
        jax.block_until_ready(results)
        time.sleep(0.001)
        return time.monotonic() < end

    pool = Pool(16 * MIB, cuda.Device(), 16 * MIB, on_oom=wait_for_jax)
    work = jax.jit(lambda x: jax.numpy.sort(jax.numpy.sin(x)) + x)
    for i in range(40):
        block = floats(pool, 1 << 20, i)
        results.append(work(jax.dlpack.from_dlpack(block)))
        del block
        floats(pool, 1 << 20, -1)
    for i, y in enumerate(results):
        assert np.allclose(np.asarray(y), np.sin(np.float32(i)) + i, atol=1e-3), i
    pool.check()


def test_a_shared_array_is_not_donated(gpu, jax):
    x = jax.numpy.arange(1 << 20, dtype="f4")
    x.block_until_ready()
    buffer = cuda.from_dlpack(x)
    assert buffer.address == x.unsafe_buffer_pointer()
    with pytest.raises(jax.errors.JaxRuntimeError, match="external reference"):
        jax.jit(lambda x: x * 2, donate_argnums=0)(x)
    assert (content(buffer, "f4") == np.arange(1 << 20)).all()


def test_a_buffer_keeps_an_arrays_memory(gpu, jax):
    x = jax.numpy.arange(1 << 20, dtype="f4")
    x.block_until_ready()
    buffer = cuda.from_dlpack(x)
    del x
    gc.collect()
    others = [jax.numpy.full(1 << 20, -1.0, "f4") for _ in range(8)]
    for one in others:
        one.block_until_ready()
    assert (content(buffer, "f4") == np.arange(1 << 20)).all()
