"""A state machine for allocators of CUDA memory on the simulated driver.

Every block has a pattern of its own, written when it is allocated (by a kernel on its stream, or
by this processor where the host sees the memory). Kernels on other streams check it, later and in
any order that Hypothesis chooses, also when the Buffer is long gone. If a block's bytes are handed
out again before, their next owner writes another pattern, and the check sees that.
"""

import ctypes
import functools

import hypothesis.strategies as st
import machines
from helpers import peek, poke
from hypothesis import event
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from simulated_driver import simulated

from arenapy import OutOfMemory
from arenapy.cuda.stream_ref import OWNERS

NON_BLOCKING = 1
NOTHING = object()


def one_of(things):
    """A strategy for one of `things(machine)`, or NOTHING.

    What is drawn for it does not depend on how many there are: that may be another thread's to say.
    """
    return st.tuples(st.runner(), st.integers(0, 99)).map(lambda drawn: pick(things, *drawn))


def pick(things, machine, n):
    there = things(machine)
    return there[n % len(there)] if there else NOTHING


def when_there(**arguments):
    """A rule that does nothing if one of its arguments is NOTHING."""

    def add(function):
        @functools.wraps(function)
        def act(self, *given, **drawn):
            if not any(one is NOTHING for one in drawn.values()):
                function(self, *given, **drawn)

        return rule(**arguments)(act)

    return add


class Wrapped:
    """A stream object as libraries have them, of which arenapy knows that it keeps its stream."""

    def __init__(self, handle):
        self.handle_ = handle

    def __cuda_stream__(self):
        return 0, self.handle_


OWNERS[Wrapped.__module__, Wrapped.__qualname__] = lambda stream: True


class Block:
    def __init__(self, buffer, pattern, stream):
        self.buffer = buffer
        self.address, self.nbytes = buffer.address, buffer.nbytes
        self.pattern = bytes([pattern]) * buffer.nbytes
        self.writer = stream  # a handle, or None: this processor


class StreamMachine(RuleBasedStateMachine):
    """Subclasses say how to `make()` the allocator; `HOST`: does the host see its memory?"""

    HOST = False
    SIZES = (1, 255, 256, 4096, 40_000, 100_000, 1 << 20)

    def __init__(self):
        super().__init__()
        machines.forget_notes()
        self.guard = simulated()
        self.driver = self.guard.__enter__()
        self.driver.memory.others[0] = 0
        self.context = self.driver.on(0)
        self.context.__enter__()
        self.handles = [1, *map(self.new_handle, (0, NON_BLOCKING, NON_BLOCKING))]
        self.objects = {1: 1, **{handle: self.wrapped(handle) for handle in self.handles[1:3]}}
        self.objects[self.handles[3]] = self.handles[3]  # a plain integer
        self.allocator = self.make()
        self.blocks = []
        self.patterns = 0
        self.wrong = []

    def new_handle(self, flags):
        return self.driver.got("cuStreamCreate", ctypes.c_void_p, flags)

    def wrapped(self, handle):
        """The object that names a stream."""
        return Wrapped(handle)

    def note(self, *what):
        machines.note(what)

    def make(self):
        raise NotImplementedError

    # ---- what a kernel does ----

    def write(self, block, stream):
        address, pattern = block.address, block.pattern
        self.driver.launch(
            stream,
            lambda: ctypes.memmove(address, pattern, len(pattern)),
            [(address, block.nbytes)],
        )
        block.writer = stream

    def order(self, before, stream):
        """What a stream is given from now on comes after what another one was given."""
        if before in (None, stream):
            return
        mark = self.driver.got("cuEventCreate", ctypes.c_void_p, 2)
        assert self.driver.call("cuEventRecord", mark, before) == 0
        assert self.driver.call("cuStreamWaitEvent", stream, mark, 0) == 0
        assert self.driver.call("cuEventDestroy", mark) == 0

    def check(self, block, stream):
        """In the order of what wrote it, which is its user's affair."""
        address, pattern = block.address, block.pattern
        self.order(block.writer, stream)

        def run():
            if peek(address, len(pattern)) != pattern:
                self.wrong.append((address, len(pattern), stream))

        self.driver.launch(stream, run, [(address, block.nbytes)])

    # ---- rules ----

    streams = st.integers(0, 3)
    a_block = one_of(lambda self: self.blocks)

    @rule(nbytes=st.sampled_from(SIZES), stream=st.none() | streams, mine=st.booleans())
    def allocate(self, nbytes, stream, mine):
        handle = None if stream is None else self.handles[stream]
        self.note("allocate", nbytes, handle)
        try:
            buffer = self.allocator.alloc(
                nbytes, stream=None if handle is None else self.objects[handle]
            )
        except OutOfMemory:
            event("out of memory")
            return
        self.patterns = self.patterns % 255 + 1
        block = Block(buffer, self.patterns, None)
        if self.HOST and mine:
            poke(block.address, nbytes, self.patterns)
        else:
            self.write(block, handle or 1)
            if self.HOST and handle is None:
                buffer.record_stream(1)
        self.blocks.append(block)

    @when_there(block=a_block, stream=streams, record=st.booleans())
    def read(self, block, stream, record):
        """By a kernel, of which the Buffer is told, now or when it is released."""
        handle = self.handles[stream]
        self.note("read", block.address, handle, record)
        self.check(block, handle)
        if record:
            block.buffer.record_stream(self.objects[handle])
            self.forget(block)
        else:
            self.forget(block, self.objects[handle])

    def forget(self, block, stream=None):
        self.blocks.remove(block)
        if stream is not None:
            block.buffer.release(stream)
        block.buffer = None

    @when_there(block=a_block, stream=streams)
    def record(self, block, stream):
        """And go on using it."""
        handle = self.handles[stream]
        self.note("record", block.address, handle)
        self.check(block, handle)
        block.buffer.record_stream(self.objects[handle])

    @when_there(block=a_block, stream=st.none() | streams, keep=st.booleans())
    def copy(self, block, stream, keep):
        """By arenapy, which knows the stream that way."""
        self.note("copy", block.address, stream, keep)
        if stream is None:
            if not self.HOST or block.writer is None:
                got = bytearray(block.nbytes)
                if block.writer not in (None, 1):
                    self.driver.call("cuStreamSynchronize", block.writer)
                block.buffer.copy_to(got)
                assert bytes(got) == block.pattern
            return
        handle = self.handles[stream]
        self.order(block.writer, handle)
        try:
            other = self.allocator.alloc(block.nbytes, stream=self.objects[handle])
        except OutOfMemory:
            return
        other.copy_from(block.buffer, stream=self.objects[handle])
        copied = Block(other, 0, handle)
        copied.pattern = block.pattern
        self.check(copied, handle)
        if keep:
            self.blocks.append(copied)

    @when_there(block=a_block)
    def drop(self, block):
        self.note("drop", block.address)
        self.forget(block)

    @precondition(lambda self: hasattr(self.allocator, "reset"))
    @rule(stream=st.none() | streams)
    def reset(self, stream):
        """What nobody holds is free, once a stream that is named has done with it."""
        self.note("reset", stream)
        if stream is None:
            self.allocator.reset()
        else:
            for block in self.blocks:
                self.check(block, self.handles[stream])
            self.allocator.reset(stream=self.objects[self.handles[stream]])
        self.blocks = [block for block in self.blocks if not block.buffer.closed]

    @rule(k=st.integers(0, 7), n=st.integers(1, 5))
    def progress(self, k, n):
        self.note("progress", k, n)
        for _ in range(n):
            self.driver.step(k)

    @rule(which=st.sampled_from(["stats", "trim"]))
    def housekeeping(self, which):
        self.note(which)
        if hasattr(self.allocator, which):
            getattr(self.allocator, which)()

    @invariant()
    def nothing_is_overwritten(self):
        assert not self.wrong, self.wrong
        assert not self.driver.errors, self.driver.errors

    @invariant()
    def bookkeeping_holds(self):
        self.allocator.check()

    def teardown(self):
        try:
            self.end()
        finally:
            self.blocks.clear()
            del self.allocator
            self.context.__exit__(None, None, None)
            self.guard.__exit__(None, None, None)

    def end(self):
        """All is still as it was written, and nothing waits for ever."""
        for block in self.blocks:
            self.check(block, block.writer or 1)
        self.driver.drain()
        self.nothing_is_overwritten()
        self.blocks.clear()
        self.driver.drain()  # events of releases
        for _ in range(len(self.handles) + 1):  # a block that many streams used: one by one
            self.allocator.stats()
            self.driver.drain()  # events of fences
        assert self.allocator.stats().pending_bytes == 0
