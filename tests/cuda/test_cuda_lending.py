"""Blocks that other libraries have, too: in any order of what they do and of what streams do.

Unlike the machine's own kernels, a consumer waits for nobody: that what it looks at has been
written is what it was promised.
"""

import hypothesis.strategies as st
import numpy as np
import pytest
from capsules import Consumer
from cuda_machine import StreamMachine, one_of, when_there
from helpers import peek
from hypothesis import event
from test_cuda_machines import ALLOCATORS, SOURCES, machine, run

from arenapy import OutOfMemory


class Lent:
    def __init__(self, consumer, pattern, handle):
        self.consumer, self.pattern, self.handle = consumer, pattern, handle
        self.address = consumer.tensor.data


class LendingMachine(StreamMachine):
    streams, a_block = StreamMachine.streams, StreamMachine.a_block

    def __init__(self):
        self.lent = []
        super().__init__()

    def look(self, address, pattern, handle):
        def run():
            if peek(address, len(pattern)) != pattern:
                self.wrong.append((address, len(pattern), handle))

        self.driver.launch(handle, run, [(address, len(pattern))])

    @when_there(
        block=a_block, stream=streams, new=st.booleans(), copy=st.booleans(), go=st.booleans()
    )
    def lend(self, block, stream, new, copy, go):
        handle = self.handles[stream]
        self.note("lend", block.address, handle, copy)
        try:
            capsule = block.buffer.__dlpack__(
                stream=self.objects[handle], max_version=(1, 0) if new else None, copy=copy
            )
        except OutOfMemory:
            event("no memory for a copy")
            return
        lent = Lent(Consumer(capsule), block.pattern, handle)
        self.look(lent.address, lent.pattern, handle)
        self.lent.append(lent)
        if go:
            self.forget(block)

    @when_there(lent=one_of(lambda self: self.lent))
    def let_go(self, lent):
        """With something queued."""
        self.note("let go", lent.address)
        self.look(lent.address, lent.pattern, lent.handle)
        lent.consumer.delete()
        self.lent.remove(lent)

    @when_there(block=a_block, stream=st.integers(0, 2), go=st.booleans())
    def read_the_interface(self, block, stream, go):
        handle = self.handles[stream]
        self.note("interface", block.address, handle)
        number = block.buffer.__cuda_array_interface__["stream"]
        if number is not None:
            self.order(number, handle)
        if stream == 2:  # which is not blocking
            block.buffer.record_stream(self.objects[handle])
        self.look(block.address, block.pattern, handle)
        if go:
            self.forget(block)

    @when_there(block=a_block)
    def to_the_host(self, block):
        self.note("to the host", block.address)
        assert np.from_dlpack(block.buffer, device="cpu", copy=True).tobytes() == block.pattern

    def forget(self, block, stream=None):
        """One that is lent cannot be released."""
        if stream is not None and any(one.address == block.address for one in self.lent):
            block.buffer.record_stream(stream)
            stream = None
        super().forget(block, stream)

    def end(self):
        while self.lent:
            self.let_go(self.lent[-1])
        super().end()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.sampled
def test_lending(allocator, source):
    host, make = SOURCES[source]
    run(machine(f"{allocator}On{source}", host, ALLOCATORS[allocator], make, LendingMachine))
