"""Stream objects of other libraries: whether one owns its stream is known, or it is not relied on.

On the simulated driver, whose handles are used again at once. A stream that is destroyed runs what
it was given; who has its handle next has nothing to do.
"""

import contextlib
import gc
import itertools
import sys
import weakref
from collections import Counter
from pathlib import Path

import pytest
from cuda_support import (
    LEGACY,
    MIB,
    PER_THREAD,
    SOURCES,
    backwards,
    content,
    graph_of,
    sample,
    samples,
    slowly_fill,
)
from helpers import GIL, in_threads
from simulated_gpu import RELAXED
from stream_wrappers import (
    KNOWN_OWNERS,
    NOT_OWNERS,
    OTHER_OWNERS,
    CoreStream,
    OldCoreStream,
    TorchAnyStream,
    core_own,
    destroy,
    new_handle,
)

from arenapy import Bump, OutOfMemory, Pool, Slab, cuda

ALL = {**KNOWN_OWNERS, **OTHER_OWNERS, **NOT_OWNERS}
WAYS = ["allocated", "recorded", "released", "filled", "copied"]
ITEM, ITEMS = 4096, 32


def one_of_many(source):
    """A slab with one free item, so small a part that its release records no event by itself."""
    slab = Slab(ITEM, ITEMS, source)
    return slab, [slab.alloc() for _ in range(ITEMS - 1)]


def used(driver, allocator, way, stream, handle, other):
    """A block, gone by now, that a kernel is going to read, with what it will have seen."""
    block = allocator.alloc(stream=stream if way == "allocated" else None)
    if way in ("filled", "copied"):
        block.fill(1, stream=stream)
        if way == "copied":
            other.copy_from(block, stream=stream)
    else:
        slowly_fill(driver, handle, block, 1)
    seen = samples(driver, handle, block)
    if way == "recorded":
        block.record_stream(stream)
    address = block.address
    block.release(*[stream] * (way == "released"))
    return address, seen


@pytest.mark.parametrize("memory", [one for one in SOURCES if one != "driver pool"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("who", NOT_OWNERS)
@pytest.mark.sampled
def test_a_handle_that_is_destroyed_and_made_anew(gpu, who, way, memory):
    """The new stream has nothing to do; whoever asked it would take the old one's work for done."""
    allocator, others = one_of_many(SOURCES[memory]())
    handle = new_handle(gpu)
    stream = NOT_OWNERS[who](gpu, handle)
    other = cuda.Device().region(ITEM).buffer()
    address, seen = used(gpu, allocator, way, stream, handle, other)
    destroy(gpu, handle)
    assert new_handle(gpu) == handle
    block = allocator.alloc()
    assert block.address == address
    if memory == "device":
        slowly_fill(gpu, LEGACY, block, 2)
        backwards(gpu)
    else:
        assert seen, "it was handed out while a kernel was to read it"
        block.array(dtype="u1")[:] = 2
    assert seen == [{1}] and sample(content(block)) == {2}
    del block, stream, others
    gc.collect()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("who", {**KNOWN_OWNERS, **OTHER_OWNERS})
def test_an_owner_is_kept_until_its_stream_is_done(gpu, who, way):
    """Though the user drops it at once, and nothing else keeps the stream."""
    allocator, others = one_of_many(cuda.Device())
    handle = new_handle(gpu)
    stream = {**KNOWN_OWNERS, **OTHER_OWNERS}[who](gpu, handle)
    other = cuda.Device().region(ITEM).buffer()
    block = allocator.alloc(stream=stream if way == "allocated" else None)
    gone = weakref.ref(getattr(stream, "_box", stream))  # of cuda.core, whose objects share it
    address = block.address
    if way in ("filled", "copied"):
        block.fill(1, stream=stream)
        if way == "copied":
            other.copy_from(block, stream=stream)
    elif way == "recorded":
        block.record_stream(stream)
    if way == "released":
        block.release(stream)
    del stream, other
    gc.collect()
    # By then there is an event for what was released.
    ended = gone() is None
    assert way == "released" or not ended, "its stream was destroyed under the block"
    assert who.startswith("torch") or gpu.calls["cuStreamDestroy"] == ended
    block.release()
    del block
    again = allocator.alloc()
    assert again.address == address
    gpu.drain()
    again.release()
    assert allocator.stats().pending_bytes == 0
    del allocator, others, again
    gc.collect()
    assert gone() is None, "it is kept for ever"


@pytest.mark.parametrize("who", KNOWN_OWNERS)
def test_a_hit_of_a_known_owner_asks_only_whether_it_captures(gpu, who):
    pool, stream = Pool(16 * MIB, cuda.Device()), KNOWN_OWNERS[who](gpu, new_handle(gpu))
    pool.alloc(5000, stream=stream).release()
    before = gpu.calls.copy()
    for _ in range(10):
        pool.alloc(5000, stream=stream).release()
    asked = gpu.calls - before
    if not GIL and who.startswith("torch"):  # what was named last is not remembered there
        for name in ("cuStreamGetCtx", "cuStreamGetId", "cuCtxGetDevice"):
            assert asked.pop(name) == 10
        asked -= Counter({"cuCtxPushCurrent": 10, "cuCtxPopCurrent": 10, "cuStreamIsCapturing": 10})
    if GIL or who.startswith("torch"):
        assert asked == {"cuStreamIsCapturing": 10}


def test_a_stream_of_cuda_core_that_is_closed_lives_as_long_as_its_blocks(gpu):
    """And no longer. Others may have an object for it. The one that was closed is refused."""
    pool, handle = Pool(16 * MIB, cuda.Device()), new_handle(gpu)
    stream = core_own(gpu, handle)
    others = [core_own(gpu, new_handle(gpu)) for _ in range(5)]
    block = pool.alloc(5000, stream=stream)
    other = CoreStream._init(stream)
    stream.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.alloc(5000, stream=stream)
    address = block.address
    slowly_fill(gpu, handle, block, 1)
    del block
    assert pool.alloc(5000, stream=other).address == address  # the cache of the same stream
    del stream, other
    gpu.drain()
    assert gpu.calls["cuStreamDestroy"] == 0
    for one in others:  # a few are remembered, and new ones make a pool look for those that ended
        pool.alloc(5000, stream=one)
    assert gpu.calls["cuStreamDestroy"] == 1, "the stream is kept for ever"


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("first", ["itself", "another object", "another pool"])
def test_a_stream_that_an_object_named_which_is_gone(gpu, first, captured):
    """Its blocks are its own, and a graph's and other streams' as long as those use them."""
    pool, handle, other = Pool(2 * MIB, cuda.Device(), 2 * MIB), new_handle(gpu), cuda.Stream()
    stream = core_own(gpu, handle)
    staging = Pool(2 * MIB, cuda.Pinned())
    if first == "another pool":
        staging.alloc(64, stream=CoreStream._init(stream))
    elif first == "another object":
        pool.alloc(64).record_stream(CoreStream._init(stream))
    block = pool.alloc(200_000, stream=stream)
    address = block.address
    slowly_fill(gpu, handle, block, 7)
    gpu.drain()
    if captured:
        gpu.begin_capture(handle, RELAXED)
        block.record_stream(stream)
    seen = samples(gpu, handle, block)
    block.record_stream(other)
    slowly_fill(gpu, other.handle, block, 7)
    graph = graph_of(gpu, handle) if captured else None
    waits = gpu.calls["cuEventSynchronize"] + gpu.calls["cuMemFree"]
    del block
    assert gpu.calls["cuEventSynchronize"] + gpu.calls["cuMemFree"] == waits
    taken = []
    if captured:
        for _ in range(30):
            with contextlib.suppress(OutOfMemory):
                while True:
                    taken.append(pool.alloc(200_000, stream=other))
        assert address not in [one.address for one in taken]
    else:
        taken.append(pool.alloc(200_000, stream=other))
    for one in taken:
        one.fill(99, stream=other)
    backwards(gpu)
    if captured:
        gpu.replay(graph, handle)
        gpu.drain()
        gpu.destroy_graph(graph)
    assert seen and all(one == {7} for one in seen)


@pytest.mark.parametrize("who", NOT_OWNERS)
def test_whoever_names_one_of_ours(gpu, who):
    """Our own stream, or another known owner's, by way of another library: it is the same one."""
    pool, own = Pool(16 * MIB, cuda.Device()), cuda.Stream()
    wrapper = NOT_OWNERS[who](gpu, own.handle)
    block = pool.alloc(5000, stream=own)
    address = block.address
    block.release()
    assert pool.alloc(5000, stream=wrapper).address == address
    before = gpu.calls.copy()
    pool.alloc(5000, stream=wrapper).release()
    if GIL:
        assert gpu.calls - before == {"cuStreamIsCapturing": 1}


class Current:
    """Stands for a stream that changes."""

    def __init__(self, *streams):
        self.streams = itertools.cycle(streams)
        self.now = None

    def __cuda_stream__(self):
        return 0, self.now.handle

    def switch(self):
        self.now = next(self.streams)
        return self.now


def test_an_object_whose_stream_changes(gpu):
    """It names what it says, each time."""
    pool = Pool(16 * MIB, cuda.Device())
    current = Current(cuda.Stream(), cuda.Stream(), cuda.Stream())
    seen = []
    for _ in range(9):
        stream = current.switch()
        block = pool.alloc(MIB, stream=current)
        slowly_fill(gpu, stream.handle, block, len(seen) + 1)
        seen.append(samples(gpu, stream.handle, block))
        block.record_stream(current)
        del block
    backwards(gpu)
    assert seen == [[{i + 1}] for i in range(9)]


@pytest.mark.parametrize("who", ALL)
@pytest.mark.parametrize("way", ["recorded", "allocated"])
def test_work_from_before_the_capture_in_which_a_block_goes(gpu, who, way):
    """The handle may be gone when the graph is: then the context is waited for."""
    allocator, others = one_of_many(cuda.Device())
    handle = new_handle(gpu)
    stream = ALL[who](gpu, handle)
    block = allocator.alloc(stream=stream if way == "allocated" else None)
    address = block.address
    if way == "recorded":
        block.record_stream(stream)
    slowly_fill(gpu, handle, block, 1)
    seen = samples(gpu, handle, block)
    gpu.begin_capture(handle)
    del block
    graph = gpu.end_capture(handle)
    with pytest.raises(OutOfMemory):
        allocator.alloc()
    gpu.destroy_graph(graph)
    if who in NOT_OWNERS:
        destroy(gpu, handle)
        assert new_handle(gpu) == handle
    again = allocator.alloc()
    assert again.address == address
    slowly_fill(gpu, LEGACY, again, 2)
    backwards(gpu)
    assert seen == [{1}] and sample(content(again)) == {2}
    del others


# Streams that were closed ---------------------------------------------------------------------


def naming(gpu, stream):
    """Ways to name a stream, each a call."""
    pool = Pool(8 * MIB, cuda.Device())
    block, other = pool.alloc(4096), cuda.Stream()
    return [
        lambda: pool.alloc(4096, stream=stream),
        lambda: block.record_stream(stream),
        lambda: block.fill(1, stream=stream),
        lambda: block.copy_from(bytes(4096), stream=stream),
        lambda: block.__dlpack__(stream=stream),
        lambda: Bump(MIB, cuda.Device()).reset(stream=stream),
        lambda: Pool(MIB, cuda.Device(), stream=stream),
        lambda: other.wait(stream),
        lambda: cuda.asbuffer(block, stream),
        lambda: cuda.copy_batch([(block, bytes(4096))], stream),
        lambda: block.release(stream),
    ]


@pytest.mark.parametrize("kind", [CoreStream, OldCoreStream], ids=["new", "old"])
def test_a_stream_that_is_named_first_after_it_was_closed(gpu, kind):
    """It is no default stream, whatever number it gives."""
    stream = core_own(gpu, new_handle(gpu), kind)
    stream.close()
    for name in naming(gpu, stream):
        with pytest.raises((ValueError, RuntimeError), match="closed"):
            name()


def test_a_default_stream_that_could_be_closed(gpu):
    for number in (0, 1):
        for name in naming(gpu, CoreStream(number)):
            name()


# Default streams of libraries -----------------------------------------------------------------


class Device:
    def __init__(self, device_id):
        self.device_id = device_id


class CoreDefault(CoreStream):
    """Its device is that of the context which was current when it was asked first."""

    device_ = None

    @property
    def device(self):
        if self.device_ is None:
            self.device_ = self.driver.device()
        return Device(self.device_)


@pytest.mark.parametrize("number", [LEGACY, PER_THREAD])
@pytest.mark.parametrize("asked_on", [0, 1])
@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("thread", [False, True])
def test_a_default_stream_of_cuda_core(gpu, number, asked_on, device, thread):
    """It is that of the memory's device, in a thread without a context, too."""
    stream = CoreDefault(number)
    stream.driver = gpu
    with gpu.on(asked_on):
        assert stream.device.device_id == asked_on
    block = Pool(8 * MIB, cuda.Device(device)).alloc(4096)

    def use():
        block.record_stream(stream)
        block.fill(3, stream=stream)

    if thread:
        in_threads(use)
    else:
        use()
    with gpu.on(device):
        slowly_fill(gpu, LEGACY, block, 4)
        block.record_stream(LEGACY)
    backwards(gpu)
    assert sample(content(block)) == {4}


def test_torchs_stream_of_another_device_than_cudas(gpu):
    """Whose number is no handle of the driver's, or raises when it is asked for."""
    pool = Pool(2 * MIB, cuda.Device())
    for kind in ("xpu", "cpu"):
        with pytest.raises(TypeError, match="is not a stream: give an object"):
            pool.alloc(100, stream=TorchAnyStream(3, new_handle(gpu), kind))
    assert pool.alloc(100, stream=TorchAnyStream(0, 0)).nbytes == 100  # its default stream


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", ["numba", "older numba"])
def test_numba_ends_its_streams_at_exit(run_script, name, captured):
    """Also those that a pool keeps; what runs later at exit may still ask that pool."""
    support = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
    run_script(f"""
        import atexit, sys
        sys.path[:0] = {support!r}

        @atexit.register
        def ask():                               # after the finalizers, which register later
            global block
            assert not driver.stream_handles.things
            del block
            assert pool.alloc(2 * MIB) and pool.stats().pending_bytes == 0
            gpu.__exit__(None, None, None)       # which looks for calls with what is gone

        from cuda_support import MIB, a_gpu, slowly_fill
        from simulated_gpu import RELAXED
        from stream_wrappers import KNOWN_OWNERS, new_handle
        from arenapy import Pool, cuda
        gpu = a_gpu(leaks=True)
        driver = gpu.__enter__()
        pool, handle = Pool(2 * MIB, cuda.Device()), new_handle(driver)
        stream = KNOWN_OWNERS[{name!r}](driver, handle)
        block = pool.alloc(5000)
        if {captured}:
            driver.begin_capture(handle, RELAXED)
        block.record_stream(stream)
        if {captured}:
            driver.destroy_graph(driver.end_capture(handle))
        slowly_fill(driver, handle, block, 1)
        driver.memory.unmap.atexit = False       # the device stays
    """)


class Struck:
    """A stream that can be closed, and raises in one of the calls that ask it for its handle."""

    def __init__(self, driver, once_closed=None):
        self.driver, self.handle_ = driver, new_handle(driver)
        self.calls = self.raise_at = 0
        self.error, self.once_closed = None, once_closed

    def close(self):
        destroy(self.driver, self.handle_)
        self.handle_ = 0

    def raise_in(self, call, error):
        self.calls, self.raise_at, self.error = 0, call, error

    def __cuda_stream__(self):
        self.calls += 1
        if self.calls == self.raise_at:
            raise self.error
        if self.handle_ == 0 and self.once_closed:
            raise self.once_closed
        return 0, self.handle_


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("once_closed", [None, ValueError])
def test_a_signal_amid_the_question_whether_a_stream_is_closed(
    gpu, monkeypatch, error, closed, once_closed
):
    """What its handler raises is not lost. In this thread it could strike in the driver's code."""
    block, stream = Pool(8 * MIB, cuda.Device()).alloc(ITEM), Struck(gpu, once_closed)
    block.record_stream(stream)
    if closed:
        stream.close()
    stream.raise_in(1, error)
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda said: reported.append(said.exc_type))
    in_threads(block.release)
    assert reported == [error]


USES = {
    "copied to": lambda block, other, stream: block.copy_from(other, stream=stream),
    "copied from": lambda block, other, stream: block.copy_to(other, stream=stream),
    "filled": lambda block, other, stream: block.fill(7, stream=stream),
    "recorded": lambda block, other, stream: block.record_stream(stream),
}


@pytest.mark.parametrize("use", USES)
def test_an_error_amid_that_question_does_not_hide_a_capture(gpu, use):
    pool, other = Pool(2 * MIB, cuda.Device()), Pool(2 * MIB, cuda.Device()).alloc(ITEM)
    survived = 0
    for call in itertools.count(1):
        stream, block = Struck(gpu), pool.alloc(ITEM)
        gpu.drain()
        gpu.begin_capture(stream.handle_)
        stream.raise_in(call, MemoryError)
        try:
            USES[use](block, other, stream)
        except MemoryError:
            continue  # the caller has it
        graph = graph_of(gpu, stream)
        block.release()
        gpu.drain()
        assert pool.stats().pending_bytes == ITEM, call
        gpu.destroy_graph(graph)
        if stream.calls < call:
            break
        survived += 1
    assert survived
