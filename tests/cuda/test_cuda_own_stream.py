"""Streams and events of our own: order, waiting, what closing does and does not, and their time."""

import ctypes
import gc
import inspect
import pickle

import pytest
from cuda_machine import Wrapped
from cuda_support import refused_in_a_child
from simulated_driver import INVALID_VALUE, simulated
from simulated_gpu import NON_BLOCKING

import arenapy
from arenapy import cuda
from arenapy.cuda.stream import elapsed

KIB = 1 << 10


class Log(list):
    def of(self, name):
        return lambda: self.append(name)


def test_it_is_one_of_its_device_that_waits_for_nobody(gpu):
    log, stream = Log(), cuda.Stream(1)
    assert stream.device_id == 1
    assert stream.__cuda_stream__() == (0, stream.handle)
    with gpu.on(1):
        gpu.launch(1, log.of("legacy"))
        gpu.launch(stream.handle, log.of("ours"))
        stream.synchronize()
    assert log == ["ours"]
    assert f"{stream.handle:#x} of device 1" in repr(stream)


def test_it_waits_for_streams_of_anybody_and_for_events(gpu):
    log, stream, other = Log(), cuda.Stream(), cuda.Stream()
    theirs = gpu.got("cuStreamCreate", ctypes.c_void_p, NON_BLOCKING)
    gpu.launch(other.handle, log.of("before the event"))
    event = other.record()
    gpu.launch(other.handle, log.of("after the event"))
    gpu.launch(theirs, log.of("theirs"))
    gpu.launch(1, log.of("legacy"))
    assert not event.done
    stream.wait(event)
    stream.wait(Wrapped(theirs))
    stream.wait(1)
    stream.wait(stream)
    assert log == [], "nothing was waited for"
    stream.synchronize()
    assert sorted(log) == ["before the event", "legacy", "theirs"]
    assert event.done
    gpu.drain()


def test_an_event_is_waited_for_alone(gpu):
    log, stream = Log(), cuda.Stream()
    gpu.launch(stream.handle, log.of("before"))
    event = stream.record()
    gpu.launch(stream.handle, log.of("after"))
    event.synchronize()
    assert log == ["before"]


def test_copies_and_blocks_take_it(gpu):
    stream = cuda.Stream()
    pool = arenapy.Pool(1 << 20, cuda.Device())
    block = pool.alloc(KIB, stream=stream)
    block.copy_from(bytes(range(256)) * 4, stream=stream)
    got = bytearray(KIB)
    block.copy_to(got, stream=stream)
    assert got == bytes(range(256)) * 4
    block.release(stream)
    stream.synchronize()
    assert pool.stats().pending_bytes == 0


def test_closing_it_takes_nothing_from_who_waits_for_it(gpu):
    """Its handle is not destroyed, and so not given to another stream, while a block needs it."""
    log = Log()
    pool = arenapy.Pool(1 << 20, cuda.Device())
    with cuda.Stream() as stream:
        handle = stream.handle
        block = pool.alloc(KIB)
        gpu.launch(handle, log.of("ran"), [(block.address, KIB)])
        block.release(stream)
    assert stream.closed
    stream.close()
    del stream, block
    gc.collect()
    assert gpu.calls["cuStreamDestroy"] == 0
    assert pool.stats().pending_bytes == KIB
    assert log == []
    gpu.drain()
    assert pool.stats().pending_bytes == 0
    del pool
    gc.collect()
    assert gpu.calls["cuStreamDestroy"] == 1
    assert cuda.Stream().handle == handle


def test_a_closed_one_takes_no_work(gpu):
    stream = cuda.Stream()
    other = cuda.Stream()
    block = arenapy.Pool(1 << 20, cuda.Device()).alloc(KIB)
    stream.close()
    for use in (
        lambda: stream.handle,
        stream.synchronize,
        stream.record,
        stream.__enter__,
        stream.__cuda_stream__,
        lambda: stream.wait(other),
        lambda: other.wait(stream),
        lambda: block.fill(0, stream=stream),
    ):
        with pytest.raises(ValueError, match=r"<Stream 0x.* of device 0, closed> is closed"):
            use()


def test_its_signature_can_be_read():
    assert str(inspect.signature(cuda.Stream)) == "(device_id=0)"


def test_what_is_no_stream(gpu):
    with pytest.raises(TypeError, match="is not a stream"):
        cuda.Stream().wait("legacy")
    for device_id in (2, -1, 2**40):
        with pytest.raises(ValueError, match=f"ordinal={device_id} is not a CUDA device"):
            cuda.Stream(device_id)
    for device_id in ("0", 0.0, True):
        with pytest.raises(TypeError, match="device_id"):
            cuda.Stream(device_id)
    with pytest.raises(TypeError, match=r"Stream\.record"):
        cuda.Event()
    stream = cuda.Stream()
    for thing in (stream, stream.record()):
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(thing)


def test_one_of_a_driver_that_is_gone():
    with simulated() as first:
        stream = cuda.Stream()
    with simulated():
        del stream  # whose handle is none of this driver's
        gc.collect()
    assert first.calls["cuStreamDestroy"] == 0


def test_time(gpu):
    stream = cuda.Stream()
    block = arenapy.Pool(1 << 20, cuda.Device()).alloc(KIB)

    def work():
        block.fill(1, stream=stream)

    five = elapsed(stream, lambda: [gpu.launch(stream.handle) for _ in range(5)], 0)
    assert five == pytest.approx(6e-6, rel=1e-3), "ticks of the simulation, one a record"
    gpu.fails["cuMemsetD8Async"] = INVALID_VALUE
    with pytest.raises(cuda.CudaError):
        elapsed(stream, work, 0)
    assert not [each for each in gpu.event_handles.things.values() if each.timing]


IN_A_CHILD = {
    "synchronize": lambda pool, stream, event: stream.synchronize(),
    "record": lambda pool, stream, event: stream.record(),
    "wait for an event": lambda pool, stream, event: stream.wait(event),
    "wait for a stream": lambda pool, stream, event: stream.wait(1),
    "done": lambda pool, stream, event: event.done,
    "wait": lambda pool, stream, event: event.synchronize(),
    "alloc": lambda pool, stream, event: pool.alloc(KIB, stream=stream),
    "alloc for another library's": lambda pool, stream, event: pool.alloc(KIB, stream=stream),
    "an allocator": lambda pool, stream, event: arenapy.Slab(1, 1, cuda.Device(), stream=stream),
}


@pytest.mark.parametrize("use", IN_A_CHILD)
def test_a_forked_child_does_not_call_the_driver(gpu, use):
    stream = cuda.Stream()
    event, pool = stream.record(), arenapy.Pool(1 << 21, cuda.Device())
    if "another library" in use:
        stream = Wrapped(gpu.got("cuStreamCreate", ctypes.c_void_p, NON_BLOCKING))
    block = pool.alloc(KIB, stream=stream)
    block.release()
    refused_in_a_child(gpu, lambda: IN_A_CHILD[use](pool, stream, event))
