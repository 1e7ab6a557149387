"""On a real GPU: captures into graphs, and what is replayed."""

import contextlib
import gc

import numpy as np
import pytest
from cuda_support import until
from real_gpu import content, done

from arenapy import Pool, Slab, cuda

KIB, MIB = 1 << 10, 1 << 20
GLOBAL, THREAD_LOCAL, RELAXED = range(3)  # modes of a capture


def begin(gpu, stream, mode=GLOBAL):
    modes = gpu.driver.CUstreamCaptureMode
    done(gpu.driver.cuStreamBeginCapture(stream.handle, modes(mode)))


def end(gpu, stream):
    graph = done(gpu.driver.cuStreamEndCapture(stream.handle))
    return graph, done(gpu.driver.cuGraphInstantiate(graph, 0))


def launch(gpu, executable, stream):
    done(gpu.driver.cuGraphLaunch(executable, stream.handle))


def destroy(gpu, graph, executable):
    done(gpu.driver.cuGraphDestroy(graph))
    done(gpu.driver.cuGraphExecDestroy(executable))


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_capture_and_replay(gpu, mode):
    """On Buffers allocated before; what is captured is a copy, a kernel, a fill and a copy back."""
    stream, other = cuda.Stream(), cuda.Stream()
    pool = Pool(64 * MIB, cuda.Device())
    staging = Slab(MIB, 4, cuda.Pinned())
    up, down, block, zero = (
        staging.alloc(), staging.alloc(), pool.alloc(MIB, stream=stream), pool.alloc(MIB)
    )  # fmt: skip
    begin(gpu, stream, mode)
    block.copy_from(up, stream=stream)
    gpu.add_to(stream, block.address, MIB, 5)
    zero.fill(0, stream=stream)
    block.copy_to(down, stream=stream)
    beside = pool.alloc(4 * MIB, stream=other)  # a miss: the driver is asked in mid-capture
    beside.fill(9, stream=other)
    with contextlib.suppress(cuda.CudaError):
        stream.synchronize()  # which may spoil the capture
    try:
        graph, executable = end(gpu, stream)
    except AssertionError:  # it was spoilt, as it should be; once more without
        begin(gpu, stream, mode)
        block.copy_from(up, stream=stream)
        gpu.add_to(stream, block.address, MIB, 5)
        block.copy_to(down, stream=stream)
        graph, executable = end(gpu, stream)
    source, target = up.array(dtype="u4"), down.array(dtype="u4")
    for i in range(5):
        source[:] = i
        launch(gpu, executable, stream)
        stream.synchronize()
        assert (target == i + 5).all()
    del source, target
    assert (content(beside) == 9).all()
    destroy(gpu, graph, executable)


def test_what_a_graph_uses_is_parked_until_it_is_gone(gpu):
    stream = cuda.Stream()
    pool = Pool(2 * MIB, cuda.Device(), 2 * MIB)
    block = pool.alloc(2 * MIB)
    address = block.address
    begin(gpu, stream)
    block.fill(3, stream=stream)
    del block
    graph, executable = end(gpu, stream)
    gc.collect()
    assert pool.stats().pending_bytes == 2 * MIB
    with pytest.raises(MemoryError):
        pool.alloc(2 * MIB)
    launch(gpu, executable, stream)
    stream.synchronize()
    assert pool.stats().pending_bytes == 2 * MIB
    destroy(gpu, graph, executable)
    gpu.synchronize()
    until(lambda: not pool.stats().pending_bytes)
    assert pool.alloc(2 * MIB).address == address


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_the_wait_for_a_stream_that_is_gone_spoils_no_capture(gpu, mode):
    """cuMemFree waits for it, and leaves alone a capture that arenapy does not know of."""

    class Closing:
        handle = gpu.stream()

        def __cuda_stream__(self):
            return 0, self.handle

        def close(self):
            done(gpu.driver.cuStreamDestroy(self.handle))
            self.handle = None

    stream, captured = Closing(), gpu.stream()
    slab = Slab(2 * MIB, 1, cuda.Device())
    block = slab.alloc()
    block.record_stream(stream)
    gpu.write_slowly(stream, block.address, block.nbytes, 1, 200_000)
    stream.close()
    done(gpu.driver.cuStreamBeginCapture(captured, gpu.driver.CUstreamCaptureMode(mode)))
    del block
    again = slab.alloc()
    graph = done(gpu.driver.cuStreamEndCapture(captured))
    assert int(graph), "the capture was invalidated"
    done(gpu.driver.cuGraphDestroy(graph))
    other = cuda.Stream()
    gpu.write_slowly(other, again.address, again.nbytes, 2)
    gpu.synchronize()
    gpu.count_wrong(other, again.address, again.nbytes, 2)
    assert gpu.how_many_wrong() == 0, "the stream that is gone wrote after its wait"


@pytest.mark.parametrize("blocking", [False, True])
def test_releases_while_another_stream_is_captured(gpu, blocking):
    """Nothing that arenapy asks about other streams breaks the capture."""

    class Blocking:
        def __init__(self, handle):
            self.handle = handle

        def __cuda_stream__(self):
            return 0, self.handle

    captured = Blocking(gpu.stream(blocking=True)) if blocking else cuda.Stream()
    own, work = cuda.Stream(), cuda.Stream()
    pool = Pool(16 * MIB, cuda.Device(), stream=own)
    pinned = Slab(64 * KIB, 2, cuda.Pinned())
    target = pool.alloc(64 * KIB, stream=captured)
    begin(gpu, captured)
    gpu.add_to(captured, target.address, target.nbytes, 1)
    for i in range(200):
        block = pool.alloc(MIB, stream=work if i % 2 else None)
        gpu.write_slowly(work, block.address, 64 * KIB, i, 20)
        gpu.count_wrong(work, block.address, 64 * KIB, i)
        block.record_stream(work)
        item = pinned.alloc()
        block[: 64 * KIB].copy_to(item, stream=work)
        del block, item
        if i % 50 == 0:
            pool.stats(), pinned.stats(), pool.trim()
    graph, executable = end(gpu, captured)
    launch(gpu, executable, captured)
    gpu.synchronize()
    destroy(gpu, graph, executable)
    assert gpu.how_many_wrong() == 0
    pool.check()


def test_the_legacy_stream_during_a_capture(gpu):
    """While a blocking stream is captured it cannot be used: said, and nothing is broken."""
    handle = gpu.stream(blocking=True)
    pool = Pool(16 * MIB, cuda.Device())
    block = pool.alloc(MIB)
    stream = cuda.Stream()
    begin(gpu, type("S", (), {"handle": handle})())
    try:
        with pytest.raises(cuda.CudaError, match="legacy default stream"):
            pool.alloc(MIB, stream=stream)
        held = pool.alloc(MIB)  # of the pool's own stream: nothing is asked
        del held
        del block
    finally:
        graph = done(gpu.driver.cuStreamEndCapture(handle))
    done(gpu.driver.cuGraphDestroy(graph))
    pool.alloc(MIB, stream=stream).fill(1, stream=stream)
    pool.check()


def test_own_numpy_sees_what_replays_wrote(gpu):
    """A graph that writes managed memory."""
    stream = cuda.Stream()
    memory = cuda.Managed().region(MIB).buffer()
    array = memory.array(dtype="u4")
    array[:] = 0
    begin(gpu, stream)
    gpu.add_to(stream, memory.address, MIB, 2)
    graph, executable = end(gpu, stream)
    for _ in range(3):
        launch(gpu, executable, stream)
    stream.synchronize()
    assert np.all(array == 6)
    destroy(gpu, graph, executable)
