"""Other libraries see memory of arenapy.cuda: in which order they use it, and for how long.

By DLPack, and at the end by ``__cuda_array_interface__``.
"""

import gc

import numpy as np
import pytest
from capsules import CPU, IS_COPIED, NEW, OLD, Consumer, capsule_name
from cuda_machine import NON_BLOCKING, Wrapped
from cuda_support import (
    HOST_VISIBLE,
    MIB,
    SOURCES,
    backwards,
    content,
    graph_of,
    new_stream,
    reads,
    slowly_fill,
)
from helpers import in_threads, peek, poke
from stream_wrappers import new_handle

import arenapy
from arenapy import Bump, Pool, Slab, cuda

N = 4096
VERSIONS = [None, (1, 0)]
PLACES = {"device": (2, 0), "driver pool": (2, 0), "pinned": (1, 0), "managed": (13, 0)}
EACH = pytest.mark.parametrize("source", SOURCES)


def pool_of(source, stream=None):
    """Of a stream, if the memory can belong to one."""
    own = None if source in HOST_VISIBLE else stream
    return Pool(4 * MIB, SOURCES[source](), stream=own)


def pool_stream(pool, block):
    """Its own one, by the number that the CUDA array interface gives."""
    return pool.alloc(1).__cuda_array_interface__["stream"]


# ---- DLPack ----


@EACH
@pytest.mark.parametrize("max_version", VERSIONS)
def test_where_it_is(gpu, source, max_version):
    view = pool_of(source).alloc(N).view((4, -1), "f4")
    capsule = view.__dlpack__(max_version=max_version)
    assert capsule_name(capsule) == (NEW if max_version else OLD)
    consumer = Consumer(capsule)
    assert consumer.device == PLACES[source] == view.__dlpack_device__()
    assert consumer.tensor.data == view.address
    assert consumer.tensor.shape[:2] == [4, N // 16] and consumer.tensor.bits == 32
    consumer.delete()


@pytest.mark.parametrize("source", [cuda.Device, cuda.Managed])
def test_on_another_device(gpu, source):
    buffer = Pool(4 * MIB, source(1)).alloc(N)
    consumer = Consumer(buffer.__dlpack__(stream=1))
    assert consumer.device == buffer.__dlpack_device__() and consumer.tensor.device_id == 1
    consumer.delete()


NAMED = ["none", "legacy", "per-thread", "blocking", "non-blocking", "an object"]


def consumers_stream(gpu, name):
    """What `stream=` is, and the handle of what it names."""
    if name in NAMED[:3]:
        return (None, 1, 2)[NAMED.index(name)], (1, 1, 2)[NAMED.index(name)]
    handle = new_handle(gpu, 0 if name == "blocking" else NON_BLOCKING)
    return (Wrapped(handle) if name == "an object" else handle), handle


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("source", ["device", "managed"])
@pytest.mark.parametrize("writer", ["own", "another"])
def test_the_consumer_waits_for_the_streams_of_the_block(gpu, source, name, writer):
    own, other = new_handle(gpu), new_handle(gpu)
    buffer = pool_of(source, stream=own).alloc(N)
    buffer.fill(7, stream=own if writer == "own" else other)
    given, handle = consumers_stream(gpu, name)
    consumer = Consumer(buffer.__dlpack__(stream=given))
    seen = reads(gpu, handle, consumer.tensor.data, N)
    backwards(gpu)
    assert seen == [b"\7" * N]
    consumer.delete()


def test_no_synchronization(gpu):
    buffer = pool_of("device", stream=new_handle(gpu)).alloc(N)
    buffer.fill(7, stream=new_handle(gpu))
    before = gpu.calls.copy()
    consumer = Consumer(buffer.__dlpack__(stream=-1))
    assert gpu.calls == before
    seen = reads(gpu, 1, consumer.tensor.data, N)
    backwards(gpu)
    assert seen == [b"\xa5" * N], "as it was when it was allocated"
    consumer.delete()


@EACH
@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        (0, ValueError, "stream=0 is ambiguous.*pass 1 for the legacy"),
        (-2, ValueError, "-2"),
        (1 << 64, ValueError, "not a handle"),
        ("1", TypeError, "is not a stream"),
        (True, TypeError, "is not a stream"),
        (1.0, TypeError, "is not a stream"),
    ],
)
def test_what_is_no_stream(gpu, source, given, error, says):
    buffer = pool_of(source).alloc(N)
    with pytest.raises(error, match=says):
        buffer.__dlpack__(stream=given)
    assert not buffer.held
    buffer.release()


@EACH
@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("thread", ["this", "another"])
def test_what_a_consumer_has_queued_when_it_lets_go(gpu, source, name, thread):
    """The bytes are nobody else's until that is done."""
    pool = pool_of(source, stream=new_handle(gpu) if source != "pinned" else None)
    given, handle = consumers_stream(gpu, name)
    buffer = pool.alloc(N)
    address = buffer.address
    consumer = Consumer(buffer.__dlpack__(stream=given))
    del buffer
    gpu.drain()
    poke(address, N, 9)
    seen = reads(gpu, handle, address, N)
    if thread == "this":
        consumer.delete()
    else:
        in_threads(consumer.delete)
    pool.check()
    others = [pool.alloc(N) for _ in range(8)]
    for other in others:
        if source in ("pinned", "managed"):
            poke(other.address, N, 1)
        else:
            other.fill(1, stream=pool_stream(pool, other))
    backwards(gpu)
    assert seen == [b"\x09" * N]
    del others, other
    pool.trim()
    gpu.drain()  # events of fences
    pool.trim()
    assert pool.stats().pending_bytes == 0


def test_a_consumer_without_synchronization_is_fenced_on_the_legacy_stream(gpu):
    own, theirs = new_handle(gpu), new_handle(gpu, 0)
    pool = pool_of("device", stream=own)
    consumer = Consumer(pool.alloc(N).__dlpack__(stream=-1))
    address = consumer.tensor.data
    poke(address, N, 9)
    seen = reads(gpu, theirs, address, N)
    consumer.delete()
    for _ in range(8):
        pool.alloc(N).fill(1, stream=own)
    backwards(gpu)
    assert seen == [b"\x09" * N]


def test_release_while_a_consumer_has_it(gpu):
    buffer = pool_of("device").alloc(N)
    consumer = Consumer(buffer[8:].__dlpack__(stream=1))
    with pytest.raises(BufferError, match="1 live exports"):
        buffer.release()
    consumer.delete()
    buffer.release()
    assert buffer.closed
    with pytest.raises(ValueError, match="closed"):
        buffer.__dlpack__()


def test_host_memory_takes_no_stream(gpu):
    for given in (1, -1, 0):
        with pytest.raises(ValueError, match="takes stream=None"):
            Bump(N).alloc(8).__dlpack__(stream=given)


def test_an_array_of_nothing_has_no_address(gpu):
    view = pool_of("device").alloc(N)[:0].view((0, 3), "f4")
    assert not Consumer(view.__dlpack__(max_version=(1, 0))).tensor.data
    assert view.__cuda_array_interface__["data"] == (0, False)


# ---- to the host, and copies ----


@pytest.mark.parametrize("given", [None, "theirs"])
@pytest.mark.parametrize("copy", [None, True])
@pytest.mark.parametrize("max_version", VERSIONS)
def test_device_memory_to_the_host(gpu, given, copy, max_version):
    """It is all there when the capsule is."""
    own, other, theirs = new_handle(gpu), new_handle(gpu), new_handle(gpu)
    buffer = pool_of("device", stream=own).alloc(N)
    buffer[:100].fill(1, stream=own)
    buffer[100:200].fill(2, stream=other)
    slowly_fill(gpu, theirs, buffer[200:300], 3)
    consumer = Consumer(
        buffer.view((2, -1), "i2").__dlpack__(
            dl_device=CPU,
            copy=copy,
            max_version=max_version,
            stream=theirs if given else None,
        )
    )
    assert consumer.device == CPU and consumer.tensor.shape[:2] == [2, N // 4]
    last = 3 if given else 0xA5
    got = peek(consumer.tensor.data, 300)
    assert got == b"\1" * 100 + b"\2" * 100 + bytes([last]) * 100
    if max_version:
        assert consumer.flags == IS_COPIED
    buffer.release()
    consumer.delete()


@pytest.mark.parametrize("source", ["device", "managed"])
def test_the_host_cannot_have_it_in_place(gpu, source):
    gpu.attributes[89] = 0  # the host may not look at managed memory while the device works
    buffer = pool_of(source).alloc(N)
    with pytest.raises(BufferError, match=r"copy=False.*copy_to"):
        buffer.__dlpack__(dl_device=CPU, copy=False)
    assert not buffer.held
    buffer.fill(5)
    assert np.from_dlpack(buffer, device="cpu").tobytes() == b"\5" * N


@pytest.mark.parametrize("source", ["pinned", "managed"])
@pytest.mark.parametrize("copy", [None, False])
def test_the_host_has_it_in_place(gpu, source, copy):
    """It waits for the streams that the block knows of; no stream is told of it."""
    s = Wrapped(new_handle(gpu))
    pool = pool_of(source)
    buffer = pool.alloc(N)
    buffer.fill(7, stream=s)
    array = np.from_dlpack(buffer, device="cpu", copy=copy)
    assert array.ctypes.data == buffer.address and (array == 7).all()
    gpu.launch(1)
    del array, buffer
    gc.collect()
    assert pool.stats().pending_bytes == 0


def test_numpy_takes_pinned_memory_as_it_is(gpu):
    pool = pool_of("pinned")
    buffer = pool.alloc(N)
    array = np.from_dlpack(buffer.view((-1,), "f4"))
    assert array.ctypes.data == buffer.address and array.flags.writeable
    gpu.launch(1)  # of which NumPy may have been told: it may have passed the array on
    del array, buffer
    assert pool.stats().pending_bytes >= N, "and now there is an event"
    gpu.drain()
    assert pool.stats().pending_bytes == 0


def test_pinned_memory_for_who_names_no_stream(gpu):
    """It is the host's, which sees it as soon as it has it: streams are waited for."""
    pool, s = pool_of("pinned"), Wrapped(new_handle(gpu))
    buffer = pool.alloc(N)
    assert buffer.__dlpack_device__() == (1, 0)
    buffer.fill(7, stream=s)
    gpu.launch(1)  # nobody named it
    consumer = Consumer(buffer.__dlpack__(max_version=(1, 0)))
    assert consumer.device == (1, 0) and consumer.tensor.data == buffer.address
    assert peek(buffer.address, N) == b"\7" * N
    assert gpu.queue, "more was waited for than what the block knows of"
    consumer.delete()
    gpu.drain()


@pytest.mark.parametrize("given", ["theirs", 1, 2])
def test_pinned_memory_for_who_names_a_stream(gpu, given):
    """It knows of streams, and so of pinned memory; the host waits for nothing."""
    pool, s, theirs = pool_of("pinned"), Wrapped(new_handle(gpu)), new_handle(gpu)
    on = theirs if given == "theirs" else given
    buffer = pool.alloc(N)
    slowly_fill(gpu, 1, buffer, 0)
    gpu.drain()
    buffer.fill(7, stream=s)
    consumer = Consumer(buffer.__dlpack__(stream=on, max_version=(1, 0)))
    assert consumer.device == (3, 0) and consumer.tensor.data == buffer.address
    assert peek(buffer.address, N) == bytes(N), "nobody waited"
    seen = reads(gpu, on, buffer.address, N)
    consumer.delete()
    del buffer
    assert pool.stats().pending_bytes
    backwards(gpu)
    assert seen == [b"\7" * N], "their stream waited"
    pool.stats(), gpu.drain()
    assert pool.stats().pending_bytes == 0


@pytest.mark.parametrize("on", ["legacy", "blocking"])
def test_pinned_memory_that_was_passed_on(gpu, on):
    """Whoever has it as the host's may have given it to a stream, and does not say so."""
    pool = pool_of("pinned")
    buffer = pool.alloc(N)
    consumer = Consumer(buffer.__dlpack__())
    address = buffer.address
    poke(address, N, 5)
    seen = reads(gpu, 1 if on == "legacy" else new_handle(gpu, 0), address, N)
    consumer.delete()
    del buffer
    again = pool.alloc(N)
    assert again.address != address, "it was handed out while a kernel may read it"
    assert pool.stats().pending_bytes
    backwards(gpu)
    assert seen == [b"\5" * N]
    assert pool.stats().pending_bytes == 0


def test_pinned_memory_by_its_own_name(gpu):
    """Who asks for it as what it is gets it as that, on a stream or not."""
    buffer = pool_of("pinned").alloc(N)
    for options in ({}, {"stream": 1}, {"stream": -1}):
        consumer = Consumer(buffer.__dlpack__(dl_device=(3, 0), max_version=(1, 0), **options))
        assert consumer.device == (3, 0) and consumer.tensor.data == buffer.address
        consumer.delete()
    consumer = Consumer(buffer.__dlpack__(dl_device=(1, 0), max_version=(1, 0)))
    assert consumer.device == (1, 0) and consumer.tensor.data == buffer.address
    consumer.delete()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("given", [None, -1, "theirs"])
@pytest.mark.parametrize("max_version", VERSIONS)
def test_a_copy_where_it_is(gpu, source, given, max_version):
    own, other, theirs = new_handle(gpu), new_handle(gpu), new_handle(gpu)
    pool = pool_of(source, stream=None if source == "pinned" else own)
    buffer = pool.alloc(N)
    buffer.fill(1, stream=own)
    if given != -1:
        buffer[:100].fill(2, stream=other)
    live = pool.stats().active_allocations
    consumer = Consumer(
        buffer.view((4, -1), "f4").__dlpack__(
            stream=theirs if given == "theirs" else given, copy=True, max_version=max_version
        )
    )
    pinned = source == "pinned" and given is not None  # it knows of streams
    assert consumer.device == ((3, 0) if pinned else PLACES[source])
    assert consumer.tensor.shape[:2] == [4, N // 16]
    assert consumer.tensor.data != buffer.address
    if max_version:
        assert consumer.flags == IS_COPIED
    assert pool.stats().active_allocations == live + 1
    on = {None: 1, -1: own, "theirs": theirs}[given]
    seen = reads(gpu, on, consumer.tensor.data, N)
    buffer.fill(9, stream=other)
    buffer.release()
    if source in ("pinned", "managed"):  # of the host, which has waited already
        assert peek(consumer.tensor.data, N) == first_bytes(given) + b"\1" * (N - 100)
    del buffer
    gpu.call("cuStreamSynchronize", on)
    assert seen == [first_bytes(given) + b"\1" * (N - 100)]
    backwards(gpu)
    consumer.delete()
    gpu.drain()
    pool.trim()
    assert pool.stats().active_allocations == live - 1
    pool.check()


def first_bytes(given):
    return (b"\1" if given == -1 else b"\2") * 100


def test_a_copy_of_what_has_no_allocator(gpu):
    buffer = cuda.Device().region(N).buffer()
    with pytest.raises(BufferError, match=r"has no allocator.*copy it to a Buffer of one"):
        buffer.__dlpack__(copy=True)
    assert not buffer.held
    assert np.from_dlpack(buffer, device="cpu", copy=True).tobytes() == b"\xa5" * N


def test_a_copy_for_which_there_is_no_memory(gpu):
    block = Slab(N, 1, cuda.Device()).alloc()
    with pytest.raises(BufferError, match="has no allocator"):
        block.__dlpack__(copy=True)
    slab = Slab(N, 1, cuda.Device())
    block = slab.alloc()
    with pytest.raises(arenapy.OutOfMemory):
        block.__dlpack__(copy=True)
    assert not block.held


def test_managed_memory_for_a_library_that_knows_devices_alone(gpu):
    buffer = pool_of("managed").alloc(N)
    consumer = Consumer(buffer.__dlpack__(dl_device=(2, 0), copy=False, stream=1))
    assert consumer.device == (2, 0) and consumer.tensor.data == buffer.address
    consumer.delete()


@EACH
@pytest.mark.parametrize("copy", [None, False, True])
def test_where_it_cannot_go(gpu, source, copy):
    buffer = pool_of(source).alloc(N)
    for where in ((2, 1), (13, 1), (1, 1), (10, 0), (3, 1)):
        with pytest.raises(BufferError, match=r"dl_device=\(\d+, \d\) is not where"):
            buffer.__dlpack__(dl_device=where, copy=copy)
    assert not buffer.held


# ---- graphs ----


@pytest.mark.parametrize("interface", ["dlpack", "cai"])
def test_a_consumer_that_is_being_captured(gpu, interface):
    """Nothing outside is waited for, and the block is the graph's as long as that is there."""
    theirs = new_handle(gpu)
    pool = pool_of("device", stream=new_handle(gpu))
    buffer = pool.alloc(N)
    buffer.fill(1, stream=theirs)
    gpu.begin_capture(theirs)
    if interface == "dlpack":
        consumer = Consumer(buffer.__dlpack__(stream=theirs))
        gpu.launch(theirs, None, [(buffer.address, N)])
        consumer.delete()
    else:
        assert buffer.__cuda_array_interface__["stream"]
        buffer.record_stream(theirs)
    del buffer
    graph = graph_of(gpu, theirs)
    gpu.drain()
    assert pool.stats().pending_bytes >= N
    gpu.destroy_graph(graph)
    pool.trim()
    gpu.drain()  # the event of who did not name a stream
    assert pool.stats().pending_bytes == 0


@pytest.mark.parametrize("stream", [None, -1])
def test_pinned_memory_that_is_asked_for_as_such_is_waited_for(gpu, stream):
    """Without a stream this thread waits; -1 says that nobody is to."""
    slab, s = Slab(4096, 1, SOURCES["pinned"]()), new_stream(gpu)
    b = slab.alloc()
    b.fill(3)
    b.record_stream(s)
    slowly_fill(gpu, s, b, 7)
    capsule = b.__dlpack__(max_version=(1, 0), dl_device=(3, 0), stream=stream)
    assert set(content(b)) == {7 if stream is None else 3}
    del capsule


# ---- the CUDA array interface ----


def test_what_the_interface_says(gpu):
    buffer = pool_of("device").alloc(N)
    view = buffer.view((4, -1), "f4")
    assert view.__cuda_array_interface__ == {
        "version": 3,
        "shape": (4, N // 16),
        "typestr": "<f4",
        "data": (view.address, False),
        "strides": None,
        "stream": 1,
    }
    assert buffer.held
    fields = buffer.view((2,), "i4,f4").__cuda_array_interface__
    assert fields["descr"] == [("f0", "<i4"), ("f1", "<f4")] and fields["typestr"] == "|V8"
    buffer.release()
    with pytest.raises(ValueError, match="closed"):
        _ = buffer.__cuda_array_interface__


def test_the_streams_number(gpu):
    handle = new_handle(gpu)
    assert pool_of("device", stream=handle).alloc(N).__cuda_array_interface__["stream"] == handle
    buffer = pool_of("managed").alloc(N)
    buffer.record_stream(handle)
    assert buffer.__cuda_array_interface__["stream"] == 1, "which waits for that"
    buffer = cuda.asbuffer(pool_of("device").alloc(N), 2)
    assert buffer.__cuda_array_interface__["stream"] == 2
    numbers = []

    def elsewhere():
        with gpu.on(0):
            numbers.append(buffer.__cuda_array_interface__["stream"])

    in_threads(elsewhere)
    assert numbers == [1], "2 would be that thread's"


@pytest.mark.parametrize("source", ["pinned", "managed"])
def test_no_stream_to_wait_for(gpu, source):
    pool = pool_of(source)
    buffer = pool.alloc(N)
    assert buffer.__cuda_array_interface__["stream"] is None
    other = pool.alloc(N)
    other.fill(3, stream=new_handle(gpu))
    assert other.__cuda_array_interface__["stream"] == (1 if source == "managed" else None)
    assert not gpu.queue, "the host waits, for not all readers do"


@EACH
def test_a_reader_on_a_blocking_stream_is_waited_for(gpu, source):
    own, theirs = new_handle(gpu), new_handle(gpu, 0)
    pool = pool_of(source, stream=None if source == "pinned" else own)
    buffer = pool.alloc(N)
    address = buffer.__cuda_array_interface__["data"][0]
    poke(address, N, 9)
    seen = reads(gpu, theirs, address, N)
    del buffer
    for _ in range(8):
        other = pool.alloc(N)
        if source in ("pinned", "managed"):
            poke(other.address, N, 1)
        else:
            other.fill(1, stream=own)
    backwards(gpu)
    assert seen == [b"\x09" * N]


def test_host_memory_has_no_such_interface(gpu):
    assert not hasattr(Bump(N).alloc(8), "__cuda_array_interface__")


@pytest.mark.parametrize("source", ["pinned", "managed"])
def test_a_fence_is_no_question_to_the_legacy_stream_alone(gpu, source):
    """That has done what it was given, but blocking streams have not."""
    pool = pool_of(source)
    buffer = pool.alloc(N)
    assert buffer.__cuda_array_interface__["stream"] is None
    gpu.launch(new_handle(gpu, 0))
    del buffer
    assert pool.stats().pending_bytes == N, "and now there is an event"
    gpu.drain()
    assert pool.stats().pending_bytes == 0
