"""`handles`: which pool, region and block an array's memory is in; and what neither name takes."""

import dataclasses
import gc
import mmap

import numpy as np
import pytest
from every import anonymous_memory
from numpy._core.multiarray import get_handler_name
from numpy.lib.stride_tricks import as_strided, sliding_window_view
from numpy_arrays import MIB, POOLS, address_of, empty, live, same
from sources import Regions

from arenapy import Bump, Host, Pool, Region, Slab, handles, numpy_memory


@pytest.fixture(params=POOLS)
def every_pool(request, tmp_path):
    return POOLS[request.param](tmp_path)


@pytest.fixture
def pool():
    return Pool()


# handles -----------------------------------------------------------------------------------------


def test_handles_says_which_block(every_pool):
    with numpy_memory(every_pool):
        arrays = [np.empty(n) for n in (1, 100, 1000, 5000, 60_000)]
    blocks = [info for info in every_pool.blocks() if info.state == "live"]
    for array in arrays:
        found = handles(array)
        assert found.allocator is every_pool
        assert found.region in every_pool.regions
        assert found.region.address <= found.address
        assert found.address + found.nbytes <= found.region.address + found.region.nbytes
        assert found.address + found.offset == address_of(array)
        assert found.nbytes >= found.offset + array.nbytes
        end = found.address + found.nbytes
        (block,) = [b for b in blocks if b.address <= found.address < b.address + b.nbytes]
        blocks.remove(block)  # which may begin within its first page
        assert end == block.address + block.nbytes
    assert not blocks


def test_handles_of_views(pool):
    with numpy_memory(pool):
        array = np.arange(10_000).reshape(100, 100)
    whole = handles(array)
    views = [array[5:], array[3, 7], array.T, array[::-1], array.view("u1")[:, 3:], array.real]
    views += [np.frombuffer(array, "u1"), np.asarray(memoryview(array)[1:]), array.ravel()[9:]]
    views += [sliding_window_view(array, (3, 3))[1, 2], as_strided(array, (3,), (8,))]
    for view in map(np.asarray, views):
        found = handles(view)
        if not np.shares_memory(view, array):  # a scalar that was copied
            assert found is None
            continue
        assert dataclasses.replace(found, offset=0) == dataclasses.replace(whole, offset=0)
        assert found.offset == address_of(view) - whole.address
    assert handles(array.view(np.matrix)).address == whole.address
    assert handles(array.copy()) is None


ALLOCATORS = {
    "bump": lambda: Bump(MIB, max_bytes=8 * MIB),
    "slab": lambda: Slab(8192, 10),
    "pool": Pool,
}
ARRAYS = {
    "empty": lambda allocator: allocator.empty(100),
    "zeros": lambda allocator: allocator.zeros((10, 10)),
    "view": lambda allocator: allocator.empty(200)[50:150],
    "asarray": lambda allocator: np.asarray(allocator.alloc(800)),
    "frombuffer": lambda allocator: np.frombuffer(allocator.alloc(800), "f8"),
    "of a memoryview": lambda allocator: np.asarray(memoryview(allocator.alloc(900))[50:850]),
    "of a slice": lambda allocator: np.asarray(allocator.alloc(900)[50:850]),
    "ndarray": lambda allocator: np.ndarray(100, "f8", buffer=allocator.alloc(800)),
}


@pytest.mark.parametrize("make_array", ARRAYS)
@pytest.mark.parametrize("make", ALLOCATORS)
def test_handles_of_arrays_over_buffers(make, make_array):
    allocator = ALLOCATORS[make]()
    array = ARRAYS[make_array](allocator)
    found = handles(array)
    assert found.allocator is allocator and found.region in allocator.regions
    assert found.region.address <= found.address
    assert found.address + found.nbytes <= found.region.address + found.region.nbytes
    assert found.address + found.offset == address_of(array)
    assert found.offset + array.nbytes <= found.nbytes
    region = found.region.address
    del allocator, found
    found = handles(array)
    assert found.allocator is None and found.region.address == region
    assert found.address + found.offset == address_of(array)


def test_handles_after_the_pool_is_gone():
    pool = Pool()
    with numpy_memory(pool):
        array = empty(1000, 1)
    before = handles(array)
    assert before.allocator is pool
    region = before.region
    del pool, before
    gc.collect()
    found = handles(array)
    assert found.allocator is None and found.region == region
    assert found.address + found.offset == address_of(array) and same(array, empty(1000, 1))


def test_handles_of_other_peoples_memory(tmp_path):
    for array in (
        np.empty(100), np.empty(0), np.array(3), np.frombuffer(b"abc", "u1"),
        np.memmap(tmp_path / "file", "u1", "w+", shape=10), np.asarray(mmap.mmap(-1, 100)),
        np.empty(3, object), np.broadcast_to(np.arange(3), (2, 3)),
    ):  # fmt: skip
        assert handles(array) is None


@pytest.mark.parametrize("thing", [None, 3, [1], b"abc", memoryview(b"a"), np.float64(3)])
def test_handles_of_what_is_no_array(thing):
    with pytest.raises(TypeError, match="ndarray") as error:
        handles(thing)
    assert repr(thing) in str(error.value)


# Bad input ---------------------------------------------------------------------------------------


def device(nbytes):
    keep = anonymous_memory()
    where = address_of(np.frombuffer(keep, "u1"))
    return Region.from_address(
        where, nbytes, kind="device", device_id=0, host_accessible=False, owner=keep
    )


class Device:
    def region(self, nbytes):
        return device(nbytes)


def refuses(error, match, call):
    with pytest.raises(error, match=match) as raised:
        call()
    assert get_handler_name() == "default_allocator"
    return str(raised.value)


@pytest.mark.parametrize("thing", [None, 3, np, Pool, Host()])
def test_only_a_pool_will_do(thing):
    text = refuses(TypeError, "Pool", lambda: numpy_memory(thing))
    assert repr(thing) in text


def test_another_allocator_is_refused():
    for thing in (Bump(1 << 16), Slab(64, 4)):
        refuses(TypeError, "Pool", lambda thing=thing: numpy_memory(thing))


@pytest.mark.parametrize("policy", ["", "System", None, 1, "raise"])
def test_another_policy_is_refused(pool, policy):
    text = refuses(ValueError, "system.*error", lambda: numpy_memory(pool, on_full=policy))
    assert repr(policy) in text


def test_keywords_only(pool):
    refuses(TypeError, "positional", lambda: numpy_memory(pool, "system"))


@pytest.mark.parametrize("initial", [0, MIB])
def test_memory_that_the_host_cannot_access_is_refused(initial):
    pool = Pool(4 * MIB, Device(), initial)
    text = refuses(BufferError, "host", lambda: numpy_memory(pool))
    assert "device" in text
    assert live(pool) == 0


def test_a_pool_that_turns_out_to_be_elsewhere_serves_no_array():
    """Its first region is the host's, and its next is not."""

    class Mixed:
        calls = 0

        def region(self, nbytes):
            self.calls += 1
            return Regions().region(nbytes) if self.calls == 1 else device(nbytes)

    pool = Pool(source=Mixed(), initial_bytes=MIB)
    arrays = {}
    refused = 0
    with numpy_memory(pool):
        for n in range(10):
            try:
                arrays[n] = empty(30_000, n)
            except ValueError as error:
                assert "regions of one kind" in str(error)
                refused += 1
    assert arrays and refused
    for n, array in arrays.items():
        assert same(array, empty(30_000, n))
        found = handles(array)
        assert found is None or found.region.kind == "host"


class Endless:
    """Its base is itself, or a new one each time."""

    def __init__(self, same):
        self.same, self.data = same, np.zeros(8, "u1")
        self.__array_interface__ = self.data.__array_interface__

    @property
    def base(self):
        return self if self.same else Endless(False)


@pytest.mark.parametrize("same", [True, False])
def test_bases_without_an_end(same):
    assert handles(np.asarray(Endless(same))) is None
