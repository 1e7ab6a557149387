"""On a real GPU: what the stream machines of the simulated driver do besides (`cuda_acts`).

Each test has a twin with the safety off, in which the driver is asked for the same by hand: it has
to find corruption. A failure after a copy was queued cannot be made here.
"""

import contextlib

import pytest
from cuda_support import until
from real_gpu import content, done, judge
from test_gpu_graphs import RELAXED, begin, destroy, end, launch

from arenapy import Pool, Slab, cuda

KIB, MIB = 1 << 10, 1 << 20
WORDS = 256 * KIB  # of 4 bytes: 1 MiB
BLOCK = 64 * KIB
LONG = 100_000  # microseconds: a graph is made and launched meanwhile
ROUNDS = 10
SAFETY = pytest.mark.parametrize("safe", [True, False])


@SAFETY
@pytest.mark.parametrize("how", ["copy", "batch", "borrow"])
def test_an_owner_that_exchanges_its_storage(gpu, torch, safe, how):
    """`tensor.data = other`, while the copy of the old one is still to begin."""
    stream, loans = cuda.Stream(), []
    block = Pool(8 * MIB, cuda.Device()).alloc(4 * WORDS)
    for i in range(ROUNDS):
        tensor = torch.full((WORDS,), i, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        gpu.hold(stream)
        if not safe:
            address, nbytes = tensor.data_ptr(), 4 * WORDS
            done(gpu.driver.cuMemcpyDtoDAsync(block.address, address, nbytes, stream.handle))
        elif how == "copy":
            block.copy_from(tensor, stream=stream)
        elif how == "batch":
            cuda.copy_batch([(block, tensor)], stream=stream)
        else:
            loans.append(cuda.asbuffer(tensor, stream=stream))
            loans[0].copy_to(block, stream=stream)
        tensor.data = torch.empty(1, dtype=torch.int32, device="cuda")
        others = [torch.full((WORDS,), ~i, dtype=torch.int32, device="cuda") for _ in range(3)]
        torch.cuda.current_stream().synchronize()
        gpu.let_go()
        gpu.count_wrong(stream, block.address, 4 * WORDS, i)
        stream.synchronize()
        loans.clear()
        del tensor, others
    judge(gpu, safe)


@SAFETY
def test_an_iterable_that_releases_what_it_yielded(gpu, safe):
    """Somebody else would have the bytes before they are copied."""
    slab = Slab(BLOCK, 1, cuda.Device())
    target = Pool(8 * MIB, cuda.Device()).alloc(2 * BLOCK)
    for i in range(ROUNDS):
        block = slab.alloc()
        gpu.write_slowly(1, block.address, BLOCK, i)

        def pairs(block=block):
            yield target[:BLOCK], block
            with contextlib.suppress(BufferError):
                block.release()
            if block.closed:
                gpu.write_slowly(1, slab.alloc().address, BLOCK, ~i)  # noqa: B023
            yield target[BLOCK:], bytes(BLOCK)

        if safe:
            cuda.copy_batch(pairs())
        else:
            address = block.address
            for _ in pairs():
                pass
            done(gpu.driver.cuMemcpyDtoDAsync(target.address, address, BLOCK, 1))
        gpu.count_wrong(1, target.address, BLOCK, i)
        gpu.synchronize()
        del block, pairs
    judge(gpu, safe)


@SAFETY
@pytest.mark.parametrize("how", ["copy", "fill", "dlpack"])
def test_a_graph_of_a_block_whose_earlier_owner_still_writes(gpu, safe, how):
    """On the allocator's own stream; the graph is launched on another one."""
    own, stream = cuda.Stream(), cuda.Stream()
    source = Pool(8 * MIB, cuda.Device()).alloc(BLOCK)
    source.fill(3)
    pool = Pool(2 * MIB, cuda.Device(), 2 * MIB, stream=own)
    for _ in range(3):
        former = pool.alloc(2 * MIB)
        address = former.address
        gpu.write_slowly(own, address, BLOCK, 0xBAD, LONG)
        former.release()
        block = pool.alloc(2 * MIB)
        assert block.address == address
        part, capsule = block[:BLOCK], None
        begin(gpu, stream, RELAXED)
        if not safe:
            done(gpu.driver.cuMemsetD8Async(address, 3, BLOCK, stream.handle))
        elif how == "copy":
            part.copy_from(source, stream=stream)
        elif how == "fill":
            part.fill(3, stream=stream)
        else:
            capsule = part.__dlpack__(stream=stream.handle)
            done(gpu.driver.cuMemsetD8Async(address, 3, BLOCK, stream.handle))
        graph, executable = end(gpu, stream)
        launch(gpu, executable, stream)
        gpu.synchronize()
        gpu.count_wrong(stream, address, BLOCK, 0x03030303)
        gpu.synchronize()
        destroy(gpu, graph, executable)
        del former, part, block, capsule
        # The driver tells of the end of a graph some time after it.
        until(lambda: not pool.stats().pending_bytes)
    judge(gpu, safe)


@SAFETY
def test_borrowed_memory_that_goes_during_a_capture(gpu, cupy, safe):
    """A blocking stream's, which keeps the legacy stream from being asked or waited for."""
    other = cuda.Stream()
    captured = type("Stream", (), {"handle": gpu.stream(blocking=True)})()
    for i in range(3):
        array = cupy.full(WORDS, i, "u4")
        cupy.cuda.Stream.null.synchronize()
        address = array.data.ptr
        buffer = cuda.asbuffer(array) if safe else None
        if safe:
            buffer.record_stream(1)
        gpu.wait(1, LONG)
        gpu.count_wrong(1, address, 4 * WORDS, i)
        begin(gpu, captured, RELAXED)
        del array, buffer
        again = cupy.empty(WORDS, "u4")
        assert (again.data.ptr == address) != safe
        gpu.write_slowly(other, again.data.ptr, 4 * WORDS, ~i)
        other.synchronize()
        graph = done(gpu.driver.cuStreamEndCapture(captured.handle))
        assert int(graph), "the capture was invalidated"
        done(gpu.driver.cuGraphDestroy(graph))
        gpu.synchronize()
        other.synchronize()  # arenapy looks for what is over
        del again
    judge(gpu, safe)


@SAFETY
def test_a_block_that_hundreds_of_streams_used(gpu, safe):
    """It forgets those that have ended, and not what they still do."""
    pool, last = Pool(2 * MIB, cuda.Device(), 2 * MIB), cuda.Stream()
    for i in range(3):
        block = pool.alloc(2 * MIB, stream=last)
        address = block.address
        gpu.write_slowly(last, address, BLOCK, i)
        gpu.synchronize(last)
        for k in range(300):
            stream = cuda.Stream()
            gpu.wait(stream, LONG // 4 if k in (0, 50, 299) else 0)
            gpu.count_wrong(stream, address, BLOCK, i)
            if safe:
                block.record_stream(stream)
            kept = stream
        del block, stream, kept
        block = pool.alloc(2 * MIB, stream=last)
        gpu.write_slowly(last, block.address, BLOCK, ~i)
        gpu.synchronize()
        del block
    judge(gpu, safe)


def test_what_a_graph_wrote_is_there(gpu):
    """The same capture, when nothing is under way: the twin above fails for the right reason."""
    stream = cuda.Stream()
    block = Pool(2 * MIB, cuda.Device()).alloc(BLOCK)
    begin(gpu, stream, RELAXED)
    block.fill(3, stream=stream)
    graph, executable = end(gpu, stream)
    launch(gpu, executable, stream)
    gpu.synchronize()
    assert (content(block) == 3).all()
    destroy(gpu, graph, executable)
