"""Stream objects that somebody closes: the driver crashes on the handle of a stream that is gone.

The simulated driver says so (`errors`, of which there may be none in the end) whenever a handle is
used that is nobody's. So no stream is made after one was closed: it would get the same handle.
"""

import contextlib
import gc
import threading

import pytest
from cuda_machine import Wrapped
from cuda_support import (
    LEGACY,
    MIB,
    backwards,
    content,
    new_stream,
    only_one,
    sample,
    samples,
    slowly_fill,
    take,
)
from helpers import in_threads

from arenapy import Bump, OutOfMemory, Pool, Slab, cuda
from arenapy.cuda.stream_ref import OWNERS


class Raises(Wrapped):
    """As those of cuda.core: what has no handle any more says so."""

    def __init__(self, driver, handle):
        super().__init__(handle)
        self.driver = driver

    def __cuda_stream__(self):
        if self.handle_ is None:
            raise RuntimeError("the stream is closed")
        return 0, self.handle_

    def close(self):
        assert self.driver.call("cuStreamDestroy", self.handle_) == 0
        self.handle_ = None


class SaysNone(Raises):
    def __cuda_stream__(self):
        return 0, self.handle_


class SaysLegacy(Raises):
    """Its handle is 0 then, which would name a stream that there is."""

    def __cuda_stream__(self):
        return 0, self.handle_ or 0


class SaysAnother(Raises):
    """It is made to stand for another stream."""

    other = None

    def __cuda_stream__(self):
        return 0, self.handle_ or self.other


KINDS = {"raises": Raises, "None": SaysNone, "legacy": SaysLegacy, "another": SaysAnother}


@pytest.fixture(params=KINDS)
def closing(gpu, request):
    """A stream that can be closed. The other one is there before, for its handle is its own."""
    other = new_stream(gpu)
    stream = KINDS[request.param](gpu, new_stream(gpu).handle_)
    stream.other, stream.keep = other.handle_, other
    return stream


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["recorded", "named"])
def test_its_work_is_done_before_its_blocks_are_used_again(gpu, reusing, closing, when, how):
    """Released before it is closed, or after."""
    b = take(reusing)
    b.fill(1)
    gpu.drain()
    address = b.address
    seen = samples(gpu, closing, b)
    if how == "recorded":
        b.record_stream(closing)
    if when == "before":
        b.release(*[closing] * (how == "named"))
    elif how == "named":
        b.record_stream(closing)
    closing.close()
    b.release()
    del b
    again = take(reusing)
    assert again.address == address
    slowly_fill(gpu, LEGACY, again, 2)
    backwards(gpu)
    assert seen == [{1}] and sample(content(again)) == {2}
    again.release()
    gpu.drain()
    assert reusing.stats().pending_bytes == 0
    reusing.check()
    assert not gpu.errors


@pytest.mark.parametrize("how", ["recorded", "named"])
@pytest.mark.parametrize("make", [Bump, Pool])
def test_its_block_moves_to_grow(gpu, closing, make, how):
    """With what the stream has written, though nobody can wait for the stream alone any more."""
    one = make(8 * MIB, cuda.Device())
    b = one.alloc(MIB, stream=closing if how == "named" else None)
    behind = one.alloc(4096)
    slowly_fill(gpu, closing, b, 1)
    if how == "recorded":
        b.record_stream(closing)
    closing.close()
    grown = one.grow(b, 3 * MIB)
    assert b.closed and grown.nbytes == 3 * MIB
    backwards(gpu)
    assert sample(content(grown)[:MIB]) == {1}
    one.check()
    assert not gpu.errors
    del behind


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_frame_of_a_bump(gpu, closing, when):
    arena = Bump(MIB, cuda.Device())
    b = arena.alloc(MIB)
    address = b.address
    b.fill(1)
    gpu.drain()
    b.record_stream(closing)
    seen = samples(gpu, closing, b)
    if when == "before":
        b.release()
        arena.reset()
    closing.close()
    del b
    arena.reset()
    again = arena.alloc(MIB)
    assert again.address == address
    slowly_fill(gpu, LEGACY, again, 2)
    backwards(gpu)
    assert seen == [{1}] and sample(content(again)) == {2}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("who", ["own", "another"])
def test_its_lane_in_a_pool(gpu, closing, when, who):
    """Which has memory that nothing waits for yet."""
    pool, other = Pool(8 * MIB, cuda.Device()), closing.keep
    b = pool.alloc(7 * MIB, stream=closing)
    b.fill(1, stream=closing)
    seen = samples(gpu, closing, b)
    if when == "before":
        b.release()
    closing.close()
    b.release()
    del b
    again = pool.alloc(7 * MIB, stream=other if who == "another" else None)
    slowly_fill(gpu, other if who == "another" else LEGACY, again, 2)
    backwards(gpu)
    assert seen == [{1}] and sample(content(again)) == {2}
    again.release()
    del again
    pool.stats()
    pool.check()
    del pool
    gc.collect()
    assert not gpu.errors


def test_naming_it_again(gpu, reusing, closing):
    """It is what it says that it is now, and not what it was when it was named last."""
    b = take(reusing)
    b.record_stream(closing)
    closing.close()
    if isinstance(closing, SaysAnother):
        b.fill(1, stream=closing)
        gpu.drain()
        assert sample(content(b)) == {1}
        b.release(closing)
    else:
        for use in (b.record_stream, b.release, lambda s: b.fill(1, stream=s),
                    lambda s: reusing.alloc(1, stream=s)):  # fmt: skip
            with pytest.raises((RuntimeError, TypeError, ValueError)):
                use(closing)
        assert not b.closed
        b.release()
    gpu.drain()
    assert reusing.stats().pending_bytes == 0


@pytest.mark.parametrize("name", ["slab", "pool"])
def test_an_own_stream_that_is_closed(gpu, closing, name):
    """Nobody can wait for it any more, which is an error of who named it, and no crash."""
    own, other = closing, closing.keep
    one = (
        Slab(MIB, 2, cuda.Device(), stream=own)
        if name == "slab"
        else Pool(4 * MIB, cuda.Device(), stream=own)
    )
    b = one.alloc(MIB)
    b.record_stream(other)
    slowly_fill(gpu, own, b, 1)
    own.close()
    with pytest.raises(cuda.CudaError, match="was closed"):
        one.alloc(MIB, stream=other)
    b.release()
    one.stats()
    one.check()
    gpu.drain()
    assert one.stats().pending_bytes == 0
    assert one.alloc(MIB).nbytes == MIB
    del b, one
    gc.collect()
    assert not gpu.errors


@pytest.mark.parametrize("name", ["slab", "pool"])
def test_an_own_stream_that_is_closed_at_the_limit(gpu, closing, name):
    """It cannot be told to wait for another one, so the caller waits."""
    other = closing.keep
    one = only_one(name, cuda.Device(), stream=closing)
    b = take(one)
    b.record_stream(other)
    seen = samples(gpu, other, b)
    closing.close()
    del b
    take(one)
    assert seen, "it was handed out while a stream reads it"
    assert one.stats().pending_bytes == 0
    assert not gpu.errors


def test_memory_of_the_drivers_pool(gpu, closing):
    """Which goes back after all streams that are known, and of which one cannot be asked."""
    slab, source = Slab(MIB, 1, cuda.Device()), cuda.DriverPool()
    b = slab.alloc()
    b.record_stream(closing)
    slowly_fill(gpu, closing, b, 1)
    region = source.region(2 * MIB)
    closing.close()
    del region
    source.trim()
    assert gpu.memory.used[0] == slab.stats().reserved_bytes, "it was never given back"
    del b
    gpu.drain()
    assert slab.stats().pending_bytes == 0


def test_an_own_stream_is_not_closed_by_arenapy(gpu):
    """One of cuda.Stream is not to be given work any more, but is there to the last."""
    own, other = cuda.Stream(), new_stream(gpu)
    pool = Pool(4 * MIB, cuda.Device(), stream=own)
    b = pool.alloc(MIB)
    slowly_fill(gpu, own.handle, b, 1)
    own.close()
    b = pool.alloc(MIB, stream=other)  # waits for it all the same
    slowly_fill(gpu, other, b, 2)
    backwards(gpu)
    assert sample(content(b)) == {2}


class Asking(Wrapped):
    """Its code runs whenever it is asked for its handle, and waits for a thread of its user."""

    asked = None

    def __cuda_stream__(self):
        if self.asked and threading.current_thread() is threading.main_thread():
            self.asked()
        return super().__cuda_stream__()

    def close(self):
        raise NotImplementedError


OWNERS[Asking.__module__, Asking.__qualname__] = lambda stream: True


@pytest.mark.parametrize("name", ["slab", "pool"])
@pytest.mark.parametrize("which", ["own", "recorded"])
def test_its_code_runs_while_nobody_waits_for_this_thread(gpu, name, which):
    stream, other = Asking(new_stream(gpu).handle_), new_stream(gpu)
    own, recorded = (stream, other) if which == "own" else (other, stream)
    one, stuck, asked = only_one(name, cuda.Device(), stream=own), [], []

    def use():
        with contextlib.suppress(OutOfMemory):  # the block may be on its way back still
            take(one).release()

    def another_thread():
        asked.append(1)
        thread = threading.Thread(target=use, daemon=True)
        thread.start()
        thread.join(3)
        stuck.append(thread.is_alive())

    b = take(one)
    b.record_stream(recorded)
    slowly_fill(gpu, recorded, b, 1)
    stream.asked = another_thread
    b.release()
    take(one).release()
    stream.asked = None
    assert asked and not any(stuck)


@pytest.mark.no_sanitizer  # a long count; other tests run the same code there
def test_streams_that_end_while_others_are_looked_up(gpu, frequent_switches):
    """All that are known are looked at when a stream is named first in its capture."""
    streams = [cuda.Stream() for _ in range(1000)]
    block = Pool(4 * MIB, cuda.Device(), stream=streams[0]).alloc(4096)
    captured, ends = new_stream(gpu), threading.Event()
    gpu.begin_capture(captured.handle_)

    def name():
        try:
            with gpu.on(0):
                for _ in range(1500):
                    block.record_stream(captured.handle_)
        finally:
            ends.set()

    def come_and_go():
        with gpu.on(0):
            while not ends.is_set():
                others = [cuda.Stream() for _ in range(50)]
                while others and not ends.is_set():
                    others.pop()  # it ends
                    block.record_stream(LEGACY)

    try:
        in_threads(name, come_and_go)
    finally:
        gpu.destroy_graph(gpu.end_capture(captured.handle_))
