"""A call without stream= that cannot wait for what it has queued. On the simulated driver.

The device does the work all the same, so both sides stay whose they are until it has.
"""

import contextlib
import gc
import weakref

import pytest
from capsules import Array
from cuda_support import LEGACY, MIB, SOURCES, backwards, content, new_stream, slowly_fill
from helpers import poke

from arenapy import OutOfMemory, Slab, cuda

N = 4096


def refused(gpu, stream):
    gpu.fail_at("cuStreamSynchronize", 1, 999)


def captured_meanwhile(gpu, stream):
    """By another thread: the driver refuses to wait, and the capture is spoiled."""

    def hook(name):
        if name == "cuStreamSynchronize":
            gpu.before_call = None
            gpu.begin_capture(stream.handle_)

    gpu.before_call = hook


def two_pairs(x, other):
    half = x.nbytes // 2
    yield other[:half], x[:half]
    yield other[half:], x[half:]


WAITING = {
    "copy_to": lambda x, other: x.copy_to(other),
    "copy_from": lambda x, other: other.copy_from(x),
    "batch": lambda x, other: cuda.copy_batch(two_pairs(x, other)),
    "slice": lambda x, other: x[10:].copy_to(other[10:]),
}


def a_copy_that_fails(gpu, way, fail, target):
    """Both sides; the copy is queued, and the stream that has it is the target's, if it has one."""
    s1, s2 = new_stream(gpu), new_stream(gpu)
    xs = Slab(MIB, 1, cuda.Device(), stream=s1)
    others = Slab(MIB, 1, SOURCES[target](), stream=s2 if target == "device" else None)
    x, other = xs.alloc(), others.alloc()
    poke(x.address, MIB, 2)
    on = s2 if target == "device" else s1
    gpu.launch(on.handle_, lambda: None, [(x.address, MIB)])
    fail(gpu, on)
    with pytest.raises(cuda.CudaError):
        WAITING[way](x, other)
    gpu.before_call = None
    if fail is captured_meanwhile:
        gpu.end_capture(on.handle_)
        gpu.errors.clear()
    return s1, xs, others, x, other


@pytest.mark.parametrize("fail", [refused, captured_meanwhile])
@pytest.mark.parametrize("way", WAITING)
def test_the_target_of_a_copy_that_cannot_be_waited_for_is_kept(gpu, way, fail):
    _, _xs, others, _x, other = a_copy_that_fails(gpu, way, fail, "pinned")
    del other
    with contextlib.suppress(OutOfMemory):
        after = others.alloc()
        poke(after.address, MIB, 9)
        backwards(gpu)
        assert set(content(after)) == {9}, "the copy wrote to its next owner"


@pytest.mark.parametrize("fail", [refused, captured_meanwhile])
@pytest.mark.parametrize("way", WAITING)
def test_the_source_of_a_copy_that_cannot_be_waited_for_is_kept(gpu, way, fail):
    s1, xs, _others, x, other = a_copy_that_fails(gpu, way, fail, "device")
    copied = slice(10 if way == "slice" else 0, None)
    del x
    with contextlib.suppress(OutOfMemory):
        slowly_fill(gpu, s1, xs.alloc(), 9)
    backwards(gpu)
    assert set(content(other)[copied]) == {2}, "it read what the next owner has written"


@pytest.mark.parametrize("fail", [refused, captured_meanwhile])
@pytest.mark.parametrize("way", ["copy_from", "batch"])
def test_another_library_s_array_is_kept_as_well(gpu, way, fail):
    stream, memory = new_stream(gpu), cuda.Device().region(N).buffer()
    x = Slab(N, 1, cuda.Device(), stream=stream).alloc()
    array = Array(memory.address, (N,))
    seen = weakref.ref(array)
    gpu.launch(stream.handle_, lambda: None, [(x.address, N)])
    fail(gpu, stream)
    with pytest.raises(cuda.CudaError):
        if way == "batch":
            cuda.copy_batch([(x, array)])
        else:
            x.copy_from(array)
    gpu.before_call = None
    if fail is captured_meanwhile:
        gpu.end_capture(stream.handle_)
        gpu.errors.clear()
    del array
    gc.collect()
    assert seen() is not None, "it was let go while the device is at work on it"
    for _ in range(2):
        cuda.Stream().synchronize()
        gpu.drain()
    cuda.Stream().synchronize()
    assert seen() is None, "it was kept for ever"


def test_an_array_that_was_filled_is_kept_as_well(gpu):
    memory = cuda.Device().region(N).buffer()
    array = Array(memory.address, (N,))
    seen = weakref.ref(array)
    buffer = cuda.asbuffer(array)
    gpu.launch(LEGACY, lambda: None, [(memory.address, N)])
    refused(gpu, None)
    with pytest.raises(cuda.CudaError):
        buffer.fill(1)
    del array, buffer
    gc.collect()
    assert seen() is not None or not gpu.queue, "it was let go while the device is at work on it"
