"""What every allocator does with a source that is none, cannot be one, or is more than it needs."""

import gc
from contextlib import ExitStack
from unittest import mock

import numpy as np
import pytest
from every import ALLOCATORS, ITEM, NBYTES, REUSING, adds_up, fill_up
from helpers import PAGE, poke

from arenapy import Existing, File, Host, OutOfMemory, Shared, memory_info

#: What tests of programs replace, while arrays are made.
MOCKED = [
    *("builtins.open", "io.open", "os.access", "os.listdir", "os.open", "os.read", "os.stat"),
    *("os.path.dirname", "os.path.exists", "os.path.isdir", "os.path.join", "os.path.normpath"),
    *("os.cpu_count", "os.sched_getaffinity", "os.sysconf"),
    *("time.monotonic", "time.perf_counter", "time.process_time", "time.time"),
]


@pytest.fixture(params=ALLOCATORS)
def name(request):
    return request.param


@pytest.mark.parametrize("what", ["file", "existing"])
def test_read_only_memory_is_refused_with_the_reason_and_the_remedy(name, tmp_path, what):
    path = tmp_path / "data"
    path.write_bytes(bytes(2 * NBYTES))
    source = File(path) if what == "file" else Existing(bytes(2 * NBYTES), readonly=True)
    with pytest.raises(ValueError, match="read-only") as caught:
        ALLOCATORS[name](source).alloc(8)
    assert any(remedy in str(caught.value) for remedy in ("r+", "buffer(", "readonly", "writable"))
    assert source.region().buffer()[:10].readonly, "the source was left as it was"


@pytest.mark.parametrize("source", [Host, Shared])
def test_mocks_of_a_program_are_not_called(name, source):
    memory_info()  # some names are imported at their first use
    with ExitStack() as stack:
        mocks = [stack.enter_context(mock.patch(mocked)) for mocked in MOCKED]
        block = ALLOCATORS[name](source()).alloc(8)
        info = memory_info()
    assert not any(one.mock_calls for one in mocks)
    assert block.nbytes == 8 and info.available > 0


def test_memory_of_an_array_without_a_buffer(name):
    """NumPy exports no dates."""
    dates = np.zeros(2 * NBYTES // 8, "M8[s]")
    block = ALLOCATORS[name](Existing(dates)).alloc(ITEM)
    block.fill(1)
    assert dates.view("u1").sum() == ITEM and repr(Existing(dates)).count(f"{dates.nbytes} bytes")


def test_an_object_that_is_too_small_is_refused(name):
    memory = bytearray(NBYTES // 4)
    with pytest.raises(OutOfMemory, match=str(len(memory))):
        ALLOCATORS[name](Existing(memory)).alloc(ITEM)
    gc.collect()
    memory.append(0)  # nothing keeps it exported


def test_of_a_larger_object_only_what_was_asked_for_is_used(name):
    memory = bytearray(3 * NBYTES)
    allocator = ALLOCATORS[name](Existing(memory))
    blocks = fill_up(allocator, PAGE)
    for block in blocks:
        poke(block.address, PAGE, 1)
    reserved = sum(region.nbytes for region in allocator.regions)
    assert NBYTES <= reserved <= NBYTES + ITEM
    assert not any(memory[reserved:])
    with pytest.raises(BufferError):
        memory.append(0)
    blocks.clear()
    del block, allocator
    gc.collect()
    memory.append(0)


@pytest.mark.parametrize("source", [3, "host", object(), bytearray(9), Host])
def test_what_is_no_source(name, source):
    with pytest.raises(TypeError, match="region"):
        ALLOCATORS[name](source).alloc(8)


def test_a_region_with_too_few_bytes_is_refused(name):
    class Mean:
        def region(self, nbytes):
            return Host().region(nbytes // 2)

    with pytest.raises(ValueError, match="gave only"):
        ALLOCATORS[name](Mean())


def test_bytes_another_process_may_see_are_pending_and_not_reused():
    from multiprocessing.reduction import ForkingPickler

    for name in REUSING:
        allocator = ALLOCATORS[name](Shared())
        block = allocator.alloc(PAGE)
        size = adds_up(allocator).allocated_bytes
        block.fill(5)
        received = ForkingPickler.loads(ForkingPickler.dumps(block))
        start = block.address
        del block
        stats = adds_up(allocator)
        assert (stats.allocated_bytes, stats.pending_bytes) == (0, size)
        assert [info.state for info in allocator.blocks() if info.address == start] == ["pending"]
        for other in fill_up(allocator, PAGE):
            poke(other.address, PAGE, 0xFF)
        assert bytes(received) == b"\5" * PAGE
