"""Threads that release, trim and allocate between any two calls of the driver.

Each has a stream of its own, on which it writes and reads what it has, and says so where a user
has to. What is freed or handed out too early is seen by kernels: they read another pattern, or
touch memory that the driver has back.
"""

import gc
import itertools
import threading

import pytest
from capsules import Array
from cuda_support import (
    ALLOCATORS as ENDING,
)
from cuda_support import (
    HOST_VISIBLE,
    MIB,
    PER_THREAD,
    a_gpu,
    backwards,
    content,
    new_stream,
    slowly_fill,
)
from cuda_turns import Turns
from helpers import peek, poke
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cuda_foreign import memory

from arenapy import OutOfMemory, Pool, Slab, cuda

BLOCK = 64 << 10
SAMPLE = 512  # bytes between those that are compared

#: One for each thread, of its own or the same for all, over one source.
ALLOCATORS = {
    "own pools": lambda source, stream: Pool(8 * MIB, source, stream=stream),
    "own slabs": lambda source, stream: Slab(BLOCK, 2, source, max_count=8, stream=stream),
    "a pool": lambda source, stream: Pool(8 * MIB, source),
    "a slab": lambda source, stream: Slab(BLOCK, 2, source, max_count=8),
}
SOURCES = {
    "device": cuda.Device,
    "driver pool": lambda: cuda.DriverPool(release_threshold=0),
    "pinned": lambda: cuda.Pinned(huge_pages=None),
    "managed": cuda.Managed,
}
EACH = [
    (name, source)
    for name in ALLOCATORS
    for source in SOURCES
    if name.startswith("a ") or source not in HOST_VISIBLE  # which belongs to no stream
]

ACTS = ["take", "take", "drop", "drop and trim", "drop and trim", "trim", "look", "record"]
PROGRAMS = st.lists(st.sampled_from([*ACTS, "trim source"]), max_size=6).map(
    lambda acts: ["take", *acts, "drop and trim"]
)
#: As it comes; or each thread goes on for the same number of calls.
ORDER = st.one_of(
    st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=1, max_size=40),
    st.integers(0, 40).map(lambda n: [0] * n + [1]),
)


class Worker:
    """What one thread does."""

    def __init__(self, driver, source, allocator, stream, patterns, wrong):
        self.driver, self.source, self.allocator = driver, source, allocator
        self.stream, self.patterns, self.wrong = stream, patterns, wrong
        self.blocks = []

    def program(self, acts):
        for act in acts:
            getattr(self, act.replace(" ", "_"))()

    def take(self):
        try:
            block = self.allocator.alloc(BLOCK, stream=self.stream)
        except OutOfMemory:
            return
        pattern = next(self.patterns)
        self.launch(block, lambda address: poke(address, BLOCK, pattern))
        self.blocks.append((block, pattern))
        self.read(block, pattern)

    def read(self, block, pattern):
        wrong = self.wrong  # the driver keeps the last kernel of each stream, and not us with it

        def look(address):
            if set(peek(address, BLOCK)[::SAMPLE]) != {pattern}:
                wrong.append((hex(address), pattern))

        self.launch(block, look)

    def launch(self, block, what):
        address = block.address
        self.driver.launch(self.stream.handle, lambda: what(address), [(address, BLOCK)])

    def drop(self):
        if self.blocks:
            self.read(*self.blocks[0])
            del self.blocks[0]

    def drop_and_trim(self):
        self.drop()
        self.trim()

    def trim(self):
        self.allocator.trim()

    def record(self):
        """As nobody has to: it is the stream that it was allocated for."""
        for block, _ in self.blocks:
            block.record_stream(self.stream)

    def look(self):
        self.allocator.stats()

    def trim_source(self):
        if isinstance(self.source, cuda.DriverPool):
            self.source.trim()


def threads(name, source, programs, order):
    """Run the programs; nothing that a thread's kernels saw was another's."""
    with a_gpu() as driver:
        wrong = []
        made = SOURCES[source]()
        streams = [cuda.Stream() for _ in programs]
        shared = name.startswith("a ")
        one = ALLOCATORS[name](made, None) if shared else None
        patterns = itertools.count(1)
        workers = [
            Worker(driver, made, one or ALLOCATORS[name](made, stream), stream,
                   patterns, wrong)
            for stream in streams
        ]  # fmt: skip
        Turns(driver, order).run(
            *[lambda w=w, p=p: w.program(p) for w, p in zip(workers, programs, strict=True)]
        )
        for worker in workers:
            worker.allocator.check()
        backwards(driver)
        assert not driver.errors, driver.errors
        assert not wrong
        del workers, one, worker
        gc.collect()
        if source == "driver pool":
            made.trim()


@pytest.mark.parametrize(("name", "source"), EACH)
@pytest.mark.full
def test_threads(name, source):
    @settings(max_examples=max(10, settings.default.max_examples // 4))
    @given(programs=st.lists(PROGRAMS, min_size=2, max_size=3), order=ORDER)
    def run(programs, order):
        threads(name, source, programs, order)

    run()


@pytest.mark.parametrize("way", ["copy_to", "copy_from", "fill", "batch"])
def test_an_array_on_the_default_stream_of_another_thread(gpu, way):
    """Work for it goes to the legacy stream, which comes after that one; not to this thread's."""
    memory = cuda.Device().region(4096).buffer()
    memory.fill(1)
    taken = []

    def other():
        with gpu.on(0):
            taken.append(cuda.asbuffer(Array(memory.address, (4096,)), stream=PER_THREAD))
            slowly_fill(gpu, PER_THREAD, memory, 7)
            ready.set()
            go.wait(60)

    ready, go = threading.Event(), threading.Event()
    thread = threading.Thread(target=other)
    thread.start()
    assert ready.wait(60)
    buffer, got = taken.pop(), bytearray(4096)
    if way == "copy_to":
        buffer.copy_to(got)
    elif way == "copy_from":
        buffer.copy_from(b"\t" * 4096)
    elif way == "fill":
        buffer.fill(9)
    else:
        cuda.copy_batch([(got, buffer)])
    gpu.drain()
    go.set()
    thread.join()
    if way in ("copy_to", "batch"):
        assert set(got) == {7}
    else:
        assert set(content(memory)) == {9}
    del buffer


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", ENDING)
def test_a_region_is_closed_while_its_allocator_ends(gpu, name, source):
    """The allocator waits for a stream then, so that the other thread goes on."""
    held, stream = [ENDING[name](SOURCES[source]())], new_stream(gpu)
    block = held[0].alloc() if name == "slab" else held[0].alloc(BLOCK)
    region = held[0].regions[0]
    slowly_fill(gpu, stream.handle_, block, 1)
    block.record_stream(stream)
    del block
    kept = Pool(4 * MIB, cuda.Device()).alloc(BLOCK)  # of which the closing looks at the work
    kept.copy_from(Array(memory(gpu, nbytes=BLOCK), (BLOCK,)), stream=new_stream(gpu))
    waits, inside, ended = threading.Event(), threading.Event(), threading.Event()

    def close():
        waits.wait(5)
        with gpu.on(0):
            region.close()
        inside.set()

    closes = threading.Thread(target=close)

    def between(name):
        if threading.current_thread() is not closes and "Synchronize" in name:
            waits.set()
            inside.wait(1)
        elif threading.current_thread() is closes and not inside.is_set():
            inside.set()
            ended.wait(1)

    gpu.before_call = between
    closes.start()
    held.clear()
    ended.set()
    closes.join()
    gpu.before_call = None
    assert waits.is_set(), "the allocator waited"
    assert region.closed
