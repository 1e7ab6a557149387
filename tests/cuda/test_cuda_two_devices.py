"""Pinned memory, which is no device's, exported while there are two. On the simulated driver."""

import ctypes
import gc

import pytest
from cuda_support import (
    ALLOCATORS,
    SOURCES,
    backwards,
    graph_of,
    new_stream,
    only_one,
    samples,
    take,
)

from arenapy import cuda

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
