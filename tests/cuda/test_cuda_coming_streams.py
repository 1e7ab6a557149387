"""Streams that come and go, by any library's object, and Buffers of cuda.core, in any order.

They come by the hundred, too, for one block. A stream that its object does not keep is destroyed
once the blocks that it was named for are released, as its user has to see to; its handle is the
next stream's. Others end with their object.
"""

import gc

import cuda_support
import hypothesis.strategies as st
import pytest
from cuda_acts import Acting
from cuda_machine import StreamMachine, one_of, when_there
from hypothesis.stateful import precondition, rule
from stream_wrappers import KNOWN_OWNERS, NOT_OWNERS, OTHER_OWNERS, destroy, new_handle
from test_cuda_machines import ALLOCATORS, SOURCES, machine, run
from test_cuda_resource import fake_core

from arenapy import OutOfMemory, Pool, cuda

HUNDRED = 100
FEW = 40  # streams
MAX_KEPT = 50  # streams of those that ended, by one block
KINDS = {**KNOWN_OWNERS, **OTHER_OWNERS, **NOT_OWNERS}

ENDING = sorted(KNOWN_OWNERS.keys() - {"torch", "torch.Stream"})  # torch never destroys a stream
#: Nobody else can have the stream then. Objects of cuda.core may share one.
ALONE = sorted({*ENDING} - {"cuda.core"})


class Guest:
    """A stream that is not there from the beginning."""

    def __init__(self, driver, kind):
        self.kind, self.handle = kind, new_handle(driver)
        self.object = KINDS[kind](driver, self.handle)
        self.blocks = []


class ComingMachine(Acting):
    def __init__(self):
        self.guests, self.lent = [], []
        super().__init__()
        self.resource = cuda.memory_resource(self.allocator)

    a_guest = one_of(lambda self: self.guests)

    @rule(kind=st.sampled_from(sorted(KINDS)))
    def come(self, kind):
        self.note("come", kind)
        self.guests.append(Guest(self.driver, kind))

    @when_there(guest=a_guest, nbytes=st.sampled_from(StreamMachine.SIZES))
    def allocate_for(self, guest, nbytes):
        self.note("allocate for", guest.kind, nbytes)
        buffer = self.fresh(nbytes, guest.object)
        if buffer is not None:
            guest.blocks.append(self.written(buffer, guest.handle))

    @when_there(guest=a_guest, block=StreamMachine.a_block)
    def read_by(self, guest, block):
        """Of which the block is told; its user drops it before the stream is destroyed."""
        self.note("read by", guest.kind, block.address)
        self.check(block, guest.handle)
        block.buffer.record_stream(guest.object)
        self.blocks.remove(block)
        guest.blocks.append(block)

    @when_there(guest=a_guest)
    def go(self, guest):
        self.note("go", guest.kind)
        self.guests.remove(guest)
        for block in guest.blocks:
            if not block.buffer.closed:
                self.check(block, guest.handle)
            block.buffer = None
        guest.blocks.clear()
        guest.object = None
        if guest.kind in NOT_OWNERS:
            destroy(self.driver, guest.handle)

    @when_there(block=StreamMachine.a_block, kind=st.sampled_from([*ALONE, None]),
          steps=st.integers(0, 3))  # fmt: skip
    def a_hundred(self, block, kind, steps):
        """Streams that end with their object, each of which reads the same block."""
        self.note("a hundred", block.address, kind, steps)
        before = len(self.driver.stream_handles.things)
        for i in range(HUNDRED):
            if kind is None:
                stream = cuda.Stream()
                handle = stream.handle
            else:
                handle = new_handle(self.driver)
                stream = KINDS[kind](self.driver, handle)
            if i % 10 == 0:
                self.check(block, handle)
            block.buffer.record_stream(stream)
            del stream
            for _ in range(steps):
                self.driver.step(-1)
        assert len(self.driver.stream_handles.things) - before <= MAX_KEPT

    @rule(nbytes=st.sampled_from((256, 40_000, 200_000)), kind=st.sampled_from([*ENDING, None]),
          steps=st.integers(0, 3), last=st.booleans())  # fmt: skip
    def requests(self, nbytes, kind, steps, last):
        """A hundred streams, each of which writes a block, reads it and is gone."""
        self.note("requests", nbytes, kind, steps, last)
        for _ in range(HUNDRED):
            if kind is None:
                stream = cuda.Stream()
                handle = stream.handle
            else:
                handle = new_handle(self.driver)
                stream = KINDS[kind](self.driver, handle)
            buffer = self.fresh(nbytes, stream)
            if buffer is not None:
                self.check(self.written(buffer, handle), handle)
                if self.HOST or not isinstance(self.allocator, Pool):
                    buffer.record_stream(stream)
            del buffer, stream
            for _ in range(steps):
                self.driver.step(-1 if last else 0)

    @precondition(lambda self: hasattr(self.allocator, "reset"))
    @rule(stream=st.none() | StreamMachine.streams)
    def reset(self, stream):
        super().reset(stream)
        for guest in self.guests:
            guest.blocks = [block for block in guest.blocks if not block.buffer.closed]

    @rule(nbytes=st.sampled_from(StreamMachine.SIZES), stream=StreamMachine.streams)
    def lend(self, nbytes, stream):
        """To cuda.core, which holds it whatever is reset."""
        handle = self.handles[stream]
        self.note("lend", nbytes, handle)
        try:
            buffer = self.resource.allocate(nbytes, stream=self.objects[handle])
        except OutOfMemory:
            return
        buffer.address, buffer.nbytes = buffer.handle, buffer.size
        self.lent.append(self.written(buffer, handle))

    @when_there(which=st.integers(0, 9), stream=StreamMachine.streams)
    def take_back(self, which, stream):
        if not self.lent:
            return
        block = self.lent.pop(which % len(self.lent))
        self.note("take back", block.address)
        self.check(block, self.handles[stream])
        block.buffer.close(self.objects[self.handles[stream]])

    def end(self):
        while self.lent:
            self.take_back(0, 0)
        while self.guests:
            self.go(self.guests[0])
        gc.collect()
        super().end()

    def teardown(self):
        try:
            super().teardown()
        finally:
            self.resource = None


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.sampled(full=3)  # every allocator and every source among them
@pytest.mark.full
def test_streams_that_come_and_go(monkeypatch, allocator, source):
    fake_core(monkeypatch)
    host, make = SOURCES[source]
    run(
        machine(f"{allocator}On{source}", host, ALLOCATORS[allocator], make, ComingMachine),
        share=10,
    )


@pytest.mark.parametrize("allocator", cuda_support.ALLOCATORS)
def test_a_stream_for_each_request(gpu, allocator):
    """What ended streams have read keeps a few of them."""
    one, host = cuda_support.ALLOCATORS[allocator](cuda.Device()), bytes(64)
    for _ in range(300):
        stream = cuda.Stream()
        block = one.alloc(64).copy_from(host, stream=stream)
        del block, stream
        gpu.drain()
        assert len(gpu.stream_handles.things) < FEW
