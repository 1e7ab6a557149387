"""Pinned memory, which is no device's, exported while there are two. On the simulated driver."""

import ctypes
import gc

import pytest
from capsules import Tensor
from cuda_support import (
    ALLOCATORS,
    SOURCES,
    backwards,
    content,
    graph_of,
    let_wait,
    new_stream,
    only_one,
    reads,
    samples,
    take,
)
from helpers import peek, poke
from test_cuda_foreign import N, memory

from arenapy import Pool, cuda

BLOCKING = 0


def stream_on(gpu, device):
    with gpu.on(device):
        return gpu.got("cuStreamCreate", ctypes.c_void_p, BLOCKING)


@pytest.mark.parametrize("dropped_on", [0, 1])
@pytest.mark.parametrize("exported_on", [0, 1])
@pytest.mark.parametrize("reader", [0, 1])
@pytest.mark.parametrize("name", ALLOCATORS)
def test_a_reader_on_any_device_is_waited_for(gpu, name, reader, exported_on, dropped_on):
    """On a blocking stream, whichever device was current when the interface was read."""
    allocator = only_one(name, SOURCES["pinned"]())
    block = take(allocator)
    block.array(dtype="u1")[:] = 1
    with gpu.on(exported_on):
        assert block.__cuda_array_interface__["stream"] is None
    seen = samples(gpu, stream_on(gpu, reader), block)  # a context that was made later
    with gpu.on(dropped_on):
        del block
        gc.collect()
        if name == "bump":
            allocator.reset()
        try:
            again = take(allocator)
        except MemoryError:
            gpu.drain()
        else:
            assert seen, "it was handed out while a kernel was to read it"
            again.array(dtype="u1")[:] = 2
    gpu.drain()
    assert seen == [{1}]


@pytest.mark.parametrize("writer", [0, 1])
@pytest.mark.parametrize("reader", [0, 1])
@pytest.mark.parametrize("name", ALLOCATORS)
def test_whoever_reads_the_interface_finds_what_was_written(gpu, name, reader, writer):
    """A number for a stream would be one of the reader's device."""
    allocator, stream = only_one(name, SOURCES["pinned"]()), cuda.Stream(writer)
    block = take(allocator)
    block.record_stream(stream)
    address, nbytes = block.address, block.nbytes
    gpu.launch(stream.handle, lambda: ctypes.memset(address, 3, nbytes), [(address, nbytes)])
    assert block.__cuda_array_interface__["stream"] is None
    seen = samples(gpu, stream_on(gpu, reader), block)
    backwards(gpu)
    assert seen == [{3}]


@pytest.mark.parametrize("device", [0, 1])
def test_a_second_reader_while_the_legacy_stream_is_barred(gpu, device):
    """What the first one does cannot be waited for, and the capture is not disturbed."""
    allocator, stream = only_one("pool", SOURCES["pinned"]()), stream_on(gpu, device)
    block = take(allocator)
    assert block.__cuda_array_interface__["stream"] is None
    gpu.begin_capture(stream)
    with pytest.raises(cuda.CudaError, match="while a blocking stream is being captured"):
        _ = block.__cuda_array_interface__
    gpu.destroy_graph(graph_of(gpu, stream))
    assert block.__cuda_array_interface__["stream"] is None


@pytest.mark.parametrize("name", ["object", "integer", "own"])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_block_for_a_stream_of_another_device(gpu, allocator, source, name):
    one = ALLOCATORS[allocator](SOURCES[source]())
    with gpu.on(1):
        s = cuda.Stream(1) if name == "own" else new_stream(gpu)
    for _ in range(2):
        block = one.alloc(64, stream=s.handle_ if name == "integer" else s)
        del block
        gpu.drain()
        assert one.stats().pending_bytes == 0


class NullStream:
    """As torch's default stream of the second device, while the first one is current."""

    device_index = 1

    def __cuda_stream__(self):
        return 0, 0


def test_the_default_stream_of_another_device(gpu):
    """It has the number of this device's, on which a pool's own blocks are reused at once."""
    pool = Pool(1 << 20, cuda.Device())
    block = pool.alloc(4096)
    block.record_stream(NullStream())
    with gpu.on(1):
        gpu.launch(1, None)
    block.release()
    assert pool.stats().pending_bytes == 4096
    gpu.drain()
    assert pool.stats().pending_bytes == 0
    block = pool.alloc(4096)
    block.record_stream(1)
    block.release()
    assert pool.stats().pending_bytes == 0


class Torch(Tensor):
    """As torch does: the consumer's stream, of the tensor's device, waits for the current one."""

    def __init__(self, gpu, stream, address):
        super().__init__(address, (N,), device=(2, 1))
        self.gpu, self.stream = gpu, stream

    def __dlpack__(self, *, stream=None, **arguments):
        if stream != -1:
            with self.gpu.on(1):
                let_wait(self.gpu, stream, self.stream)
        return super().__dlpack__(stream=stream, **arguments)


def into_a_block(block, tensor, stream):
    block.copy_from(tensor, stream=stream)


def by_a_batch(block, tensor, stream):
    cuda.copy_batch([(block, tensor)], stream=stream)


def by_a_buffer(block, tensor, stream):
    block.copy_from(cuda.from_dlpack(tensor, stream=stream), stream=stream)


def out_of_a_block(block, tensor, stream):
    block.copy_to(tensor, stream=stream)


@pytest.mark.parametrize("named", ["nothing", "the legacy stream", "our stream", "an integer"])
@pytest.mark.parametrize("copy", [into_a_block, by_a_batch, by_a_buffer, out_of_a_block])
def test_a_tensor_of_another_device(gpu, copy, named):
    """A number would name another stream there; what its library does with it comes before."""
    address = memory(gpu, "device", 1)
    with gpu.on(1):
        theirs = new_stream(gpu)
    tensor = Torch(gpu, theirs, address)
    block = only_one("slab", cuda.Device()).alloc()[:N]
    stream = {
        "nothing": None,
        "the legacy stream": 1,
        "our stream": cuda.Stream(),
        "an integer": new_stream(gpu).handle_,
    }[named]
    if copy is out_of_a_block:
        block.fill(8)
        seen = reads(gpu, theirs, address, N)
    else:
        gpu.launch(theirs.handle_, lambda: poke(address, N, 5), [(address, N)])
    copy(block, tensor, stream)
    backwards(gpu)
    assert set(seen[0] if copy is out_of_a_block else content(block)) == (
        {9} if copy is out_of_a_block else {5}
    )
    if copy is out_of_a_block:
        assert set(peek(address, N)) == {8}
