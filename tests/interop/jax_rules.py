"""The rules of docs/ecosystem.md for JAX, with its backend of the host."""

import gc
import weakref

import numpy as np
import pytest

from arenapy import Pool, cuda

jax = pytest.importorskip("jax")
if jax.default_backend() != "cpu":
    pytest.skip("JAX uses a device here; see tests/gpu", allow_module_level=True)

MIB = 1 << 20


@pytest.fixture
def pool():
    return Pool(64 * MIB)


def floats(pool, count, value=0.0):
    block = pool.alloc(4 * count).view((count,), "f4")
    block.array()[:] = value
    return block


def test_an_array_shares_a_block(pool):
    block = floats(pool, 1000, 1)
    x = jax.dlpack.from_dlpack(block)
    assert x.unsafe_buffer_pointer() == block.address
    block.array()[:] = 2  # what the guide says not to do: JAX takes arrays for constant
    assert float(x[0]) == 2
    del block
    gc.collect()
    assert pool.stats().active_allocations == 1
    del x
    gc.collect()
    assert pool.stats().active_allocations == 0


def test_what_copies(pool):
    block = floats(pool, 1000, 1)
    shared = jax.dlpack.from_dlpack(block)
    copies = [
        jax.numpy.array(shared, copy=True),
        jax.numpy.asarray(block),
        jax.dlpack.from_dlpack(block[1:]),  # JAX wants 64 bytes of alignment
    ]
    block.array()[:] = 2
    assert [float(x[0]) for x in copies] == [1, 1, 1]


def test_a_donated_block(pool):
    """JAX may not use the array any more; the block is its owner's, and goes when nobody has it."""
    block = floats(pool, 1 << 20, 3)
    x = jax.dlpack.from_dlpack(block)
    y = jax.jit(lambda x: x * 2, donate_argnums=0)(x)
    assert x.is_deleted()
    with pytest.raises(RuntimeError, match="deleted"):
        x.sum()
    assert float(y[-1]) == 6
    shares = y.unsafe_buffer_pointer() == block.address
    assert (block.array() == (6 if shares else 3)).all()
    del block
    gc.collect()
    assert pool.stats().active_allocations == int(shares)
    del y
    gc.collect()
    assert pool.stats().active_allocations == 0


def test_a_block_is_nobody_elses_while_a_computation_reads_it(pool):
    work = jax.jit(lambda x: jax.numpy.sort(jax.numpy.sin(x)) + x)
    wrong = 0
    for i in range(20):
        block = floats(pool, 1 << 20, i)
        y = work(jax.dlpack.from_dlpack(block))
        del block
        other = floats(pool, 1 << 20, -1)
        wrong += not np.allclose(np.asarray(y), np.sin(np.float32(i)) + i, atol=1e-4)
        del other
    assert not wrong


def test_a_buffer_shares_an_array():
    x = jax.numpy.arange(1000, dtype="f4")
    buffer = cuda.from_dlpack(x)
    assert buffer.address == x.unsafe_buffer_pointer()
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert (buffer.array() == np.arange(1000)).all()
    assert gone() is None  # but its memory is there
    buffer.release()


def test_a_shared_array_is_not_donated():
    """JAX then copies, so the Buffer's bytes stay as they are."""
    x = jax.numpy.arange(1 << 20, dtype="f4")
    buffer = cuda.from_dlpack(x)
    y = jax.jit(lambda x: x * 2, donate_argnums=0)(x)
    assert float(y[5]) == 10
    assert y.unsafe_buffer_pointer() != buffer.address
    assert (buffer.array() == np.arange(1 << 20)).all()
