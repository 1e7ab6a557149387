"""What every allocator over every source does alike: one suite, from sections 4 to 8, 11.

`allocator` is over each source whose arrays are NumPy's, `host_visible` over those that the host
sees, `anywhere` over all: see `every`.
"""

import ctypes
import gc
import itertools
import pickle
import threading

import numpy as np
import pytest
from every import (
    ALLOCATORS,
    EVERYWHERE,
    HOST_VISIBLE,
    ITEM,
    MAKERS,
    NBYTES,
    REUSING,
    SOURCES,
    address_of,
    adds_up,
    fill_up,
    kind_of,
    lacking,
    peek,
    poke,
    using,
    view,
)
from helpers import PAGE

from arenapy import Buffer, Bump, OutOfMemory, Pool, Slab

SIZES = [0, 1, 7, 63, 64, 65, 100, 500, 512, 513, PAGE - 1, PAGE, PAGE + 1, ITEM - 1, ITEM]


def in_use(request, tmp_path):
    """The source of a parameter, while its driver is there."""
    if reason := lacking(request.param):
        pytest.skip(reason)
    with using(request.param):
        yield MAKERS[request.param](tmp_path)
        if request.param.startswith("gpu "):
            # What pytest keeps could not go back once a simulated driver has taken over.
            request.node.funcargs.clear()
            gc.collect()


@pytest.fixture(params=SOURCES)
def source(request, tmp_path):
    yield from in_use(request, tmp_path)


@pytest.fixture(params=HOST_VISIBLE)
def host_visible_source(request, tmp_path):
    yield from in_use(request, tmp_path)


@pytest.fixture(params=EVERYWHERE)
def any_source(request, tmp_path):
    yield from in_use(request, tmp_path)


@pytest.fixture(params=ALLOCATORS)
def name(request):
    return request.param


@pytest.fixture
def allocator(name, source):
    return ALLOCATORS[name](source)


@pytest.fixture
def host_visible(name, host_visible_source):
    return ALLOCATORS[name](host_visible_source)


@pytest.fixture
def anywhere(name, any_source):
    return ALLOCATORS[name](any_source)


@pytest.fixture(params=REUSING)
def reusing(request, any_source):
    """An allocator that takes blocks back in any order."""
    return ALLOCATORS[request.param](any_source)


def in_regions(allocator, address, nbytes):
    return any(r.address <= address and address + nbytes <= r.address + r.nbytes
               for r in allocator.regions)  # fmt: skip


# Handing out ---------------------------------------------------------------------------------


def test_blocks_lie_in_the_sources_memory_and_say_what_they_are(anywhere, request):
    kind = kind_of(request.node.callspec.params["any_source"])
    align = 256 if kind in ("device", "managed") else 64
    blocks = []
    for nbytes in SIZES:
        block = anywhere.alloc(nbytes)
        assert isinstance(block, Buffer) and block.nbytes == len(block) == nbytes
        assert in_regions(anywhere, block.address, max(nbytes, 1))
        assert block.address % align == 0, "the default alignment"
        assert block.allocator is anywhere
        assert block.kind == anywhere.kind == kind
        assert not (block.readonly or block.closed or block.held)
        blocks.append(block)
    for block in blocks:
        block.release()
    adds_up(anywhere)


def test_live_blocks_are_disjoint_and_keep_their_contents(anywhere):
    blocks = [anywhere.alloc(nbytes) for nbytes in SIZES]
    blocks += anywhere.alloc_many(SIZES[::-1])
    for fill, block in enumerate(blocks, 1):
        block.fill(fill)
    taken = sorted((block.address, block.address + max(block.nbytes, 1)) for block in blocks)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(taken))
    for fill, block in enumerate(blocks, 1):
        assert peek(block.address, block.nbytes) == bytes([fill]) * block.nbytes
    adds_up(anywhere)


def test_alignments(anywhere, name):
    most = 7 if name == "slab" else 13  # an item is aligned as the slab was made: see test_slab.py
    for nbytes, log2 in itertools.product([0, 1, 100, PAGE, ITEM], range(most)):
        block = anywhere.alloc(nbytes, 1 << log2)
        assert block.address % (1 << log2) == 0
        poke(block.address, nbytes, log2)
        assert anywhere.alloc(nbytes, align=1 << log2).address != block.address
        block.release()
        if name == "bump":
            anywhere.reset()
    adds_up(anywhere)


def test_arrays(allocator):
    array = allocator.empty((10, 20), np.float32)
    assert array.shape == (10, 20) and array.dtype == "f4" and array.flags.c_contiguous
    assert array.flags.writeable and array.ctypes.data % 64 == 0
    assert isinstance(array.base, Buffer) and array.base.allocator is allocator
    assert array.base.held and in_regions(allocator, array.ctypes.data, array.nbytes)
    for make in (allocator.empty, allocator.zeros):
        assert make((3, 4), "f8", "F").flags.f_contiguous
        assert make([2, np.int64(2)], np.dtype("i2,f8")).dtype.names == ("f0", "f1")
    assert allocator.empty(0).size == 0 and allocator.empty(()).shape == ()
    original = np.arange(100, dtype="i4").reshape(10, 10)
    odd = np.array("text"), np.arange(20)[::-3], np.zeros((0, 3), "f4")
    for given in (original, original.T, original[::2, ::3], [1, 2, 3], 5, *odd):
        copied = allocator.copy(given)
        assert np.array_equal(copied, given) and copied.shape == np.shape(given)
        assert copied.dtype == np.asarray(given).dtype and copied.flags.writeable
        assert in_regions(allocator, copied.ctypes.data, copied.nbytes)
    adds_up(allocator)


def test_zeros_is_zero_on_recycled_memory_too(anywhere, name):
    blocks = fill_up(anywhere, PAGE)
    assert len(blocks) > 10
    for block in blocks:
        poke(block.address, PAGE, 0xFF)
    blocks.clear()
    del block
    if name == "bump":
        anywhere.reset()
    for nbytes in (1, 100, 1000, PAGE, ITEM):
        array = anywhere.zeros(nbytes, "u1")
        assert peek(address_of(array), nbytes) == bytes(nbytes)
        array = anywhere.zeros((nbytes // 8, 2), "f4")
        assert not any(peek(address_of(array), array.nbytes))


def test_fields_of_struct_of_arrays_start_on_cache_lines_of_their_own(allocator):
    arrays = allocator.struct_of_arrays({"x": "f4", "id": "i8", "flag": "?"}, 33)
    assert list(arrays) == ["x", "id", "flag"]
    lines = set()
    for number, array in enumerate(arrays.values()):
        assert array.shape == (33,) and array.ctypes.data % 64 == 0
        mine = set(range(array.ctypes.data // 64, (array.ctypes.data + array.nbytes - 1) // 64 + 1))
        assert not mine & lines
        lines |= mine
        array[:] = number
    assert [set(array.tolist()) for array in arrays.values()] == [{0.0}, {1}, {True}]
    assert allocator.struct_of_arrays({"none": "f4"}, 0)["none"].shape == (0,)
    kept = arrays.pop("id")
    arrays.clear()
    others = fill_up(allocator, 512)
    for block in others:
        poke(block.address, 512, 0xFF)
    assert (kept == 1).all(), "one field keeps the block"


# Seeing and holding --------------------------------------------------------------------------

HOLDS = {
    "memoryview": memoryview,
    "array": np.asarray,
    "ctypes": lambda b: (ctypes.c_char * b.nbytes).from_buffer(b),
    "tensor": np.from_dlpack,
    "capsule": lambda b: b.__dlpack__(max_version=(1, 0)),
    "ndarray": lambda b: np.ndarray(b.nbytes, "u1", buffer=b),
    "view of a slice": lambda b: memoryview(b[10:20]),
    "interface": lambda b: (b, b.__cuda_array_interface__),
    "slice": lambda b: b[10:20],
    "typed view": lambda b: b.view((10,), "f4"),
    "buffer": lambda b: b,
}
NOT_HELD = ["slice", "typed view", "buffer"]  # only alive
ON_DEVICE = ["capsule", "interface", *NOT_HELD]


@pytest.mark.sampled
def test_what_somebody_can_see_is_not_handed_out_again(anywhere, name):
    kept, ways = [], HOLDS
    if anywhere.kind in ("device", "managed"):
        ways = {how: HOLDS[how] for how in ON_DEVICE}
    elif anywhere.kind != "pinned":
        ways = {how: HOLDS[how] for how in HOLDS if how != "interface"}
    for fill, (how, hold) in enumerate(ways.items(), 1):
        if name == "bump" and how in NOT_HELD:
            continue  # a reset closes those
        block = anywhere.alloc(40)
        poke(block.address, 40, fill)
        kept.append((block.address, fill, hold(block)))
        del block
    for _ in range(3):
        others = fill_up(anywhere, 40)
        for other in others:
            poke(other.address, 40, 0xFF)
        starts = {other.address for other in others}
        del others, other
        if name == "bump":
            anywhere.reset()
        for start, fill, _ in kept:
            assert not starts & set(range(start - 39, start + 40))
            assert peek(start, 40) == bytes([fill]) * 40
        adds_up(anywhere)


def test_slices_share_their_roots_bytes(anywhere):
    block = anywhere.alloc(100)
    part = block[10:30][5:]
    assert part.nbytes == 15 and part.address == block.address + 15
    part.fill(3)
    assert peek(block.address + 15, 15) == b"\3" * 15


def test_dlpack(allocator):
    block = allocator.alloc(64)
    view = block.view((4, 4), "i4")
    tensor = np.from_dlpack(view)
    tensor[:] = 5
    assert tensor.ctypes.data == block.address and block.__dlpack_device__() == (1, 0)
    assert bytes(block) == b"\5\0\0\0" * 16
    with pytest.raises(BufferError):
        block.release()


def test_plain_pickle_copies_and_protocol_5_does_not(host_visible):
    block = host_visible.alloc(1000)
    block.fill(9)
    copied = pickle.loads(pickle.dumps(block))
    parts = []
    stream = pickle.dumps(block, 5, buffer_callback=parts.append)
    with parts[0].raw() as raw:
        assert np.frombuffer(raw, "u1").ctypes.data == block.address and len(stream) < 900
    again = pickle.loads(stream, buffers=parts)
    assert bytes(again) == b"\t" * 1000
    del parts, raw, again
    block.fill(1)
    assert bytes(copied) == b"\t" * 1000 and copied.allocator is None
    with pytest.raises(TypeError):
        pickle.dumps(host_visible)


# Giving back ---------------------------------------------------------------------------------


def test_release(host_visible):
    block = host_visible.alloc(100)
    part = block[1:5]
    view = memoryview(part)
    before = adds_up(host_visible)
    with pytest.raises(BufferError):
        block.release()
    assert not block.closed and not part.closed and adds_up(host_visible) == before
    view[:] = b"good"
    view.release()
    block.release()
    assert block.closed and part.closed
    block.release()
    for use in (
        lambda: memoryview(block), lambda: block[1:], lambda: part.fill(1), lambda: block.address,
        lambda: block.copy_from(b"x"), lambda: np.asarray(part), lambda: block.array(),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="closed"):
            use()
    with host_visible.alloc(10) as again:
        again.fill(1)
    assert again.closed
    adds_up(host_visible)


@pytest.mark.parametrize("way", ["release", "drop", "drop an array", "with", "other thread"])
@pytest.mark.sampled
def test_what_was_given_back_serves_again(reusing, way):
    before = adds_up(reusing)
    addresses = set()
    for number in range(300):
        block = reusing.empty(ITEM, "u1") if way == "drop an array" else reusing.alloc(ITEM)
        address = address_of(block)
        addresses.add(address)
        poke(address, ITEM, number % 251)
        if way == "release":
            block.release()
        elif way == "with":
            with block:
                pass
        elif way == "other thread":
            box = [block]
            del block
            thread = threading.Thread(target=box.clear)
            thread.start()
            thread.join()
            continue
        del block
    after = adds_up(reusing)
    assert after.allocated_bytes == after.active_allocations == after.pending_bytes == 0
    assert after.total_allocations == 300
    assert after.reserved_bytes == before.reserved_bytes
    if way != "other thread":
        assert len(addresses) == 1, "the block freed last serves first"


def test_the_figures_of_blocks_that_come_and_go(reusing):
    blocks = [reusing.alloc(1000) for _ in range(20)]
    full = adds_up(reusing)
    each = full.allocated_bytes // 20
    assert each >= 1000 and full.allocated_bytes == 20 * each == full.peak_bytes
    del blocks[::2]
    half = adds_up(reusing)
    assert half.active_allocations == 10 and half.allocated_bytes == 10 * each
    assert half.idle_bytes == full.idle_bytes + 10 * each
    assert half.peak_bytes == full.peak_bytes and half.total_allocations == 20
    assert sum(info.state == "live" for info in reusing.blocks()) == 10
    blocks.clear()
    assert adds_up(reusing).allocated_bytes == 0


def test_memory_lives_as_long_as_somebody_sees_it(name, source):
    allocator = ALLOCATORS[name](source)
    buffer, array = allocator.alloc(100), allocator.zeros(50)
    view = memoryview(buffer)
    del allocator
    gc.collect()
    assert buffer.allocator is None and array.base.allocator is None
    array[:] = 1
    view[:] = b"x" * 100
    assert (array == 1).all() and bytes(buffer) == b"x" * 100
    view.release()
    buffer.release()


# The end of memory ---------------------------------------------------------------------------


def test_exhaustion_is_an_error_that_changes_nothing(anywhere, name):
    blocks = fill_up(anywhere, ITEM)
    assert len(blocks) > NBYTES // ITEM // 3
    before = view(anywhere)
    for call in (
        lambda: anywhere.alloc(ITEM),
        lambda: anywhere.empty(ITEM, "u1"),
        lambda: anywhere.zeros(ITEM // 8),
        lambda: anywhere.alloc_many([ITEM] * 3),
        lambda: anywhere.copy(np.zeros(ITEM, "u1")),
    ):
        with pytest.raises(OutOfMemory) as caught:
            call()
        assert view(anywhere) == before
    option = {"bump": "max_bytes", "slab": "max_count"}.get(name, "max_bytes")
    assert option in str(caught.value), "the message says what to turn"
    blocks.pop().release()
    assert anywhere.alloc(ITEM).nbytes == ITEM, "what was given back serves"


def test_alloc_many_that_fails_late_changes_nothing(anywhere):
    anywhere.alloc(10).release()
    kept = anywhere.alloc(100)
    before = view(anywhere)
    with pytest.raises(OutOfMemory):
        anywhere.alloc_many([ITEM] * (8 * NBYTES // ITEM))
    with pytest.raises(ValueError, match="-1"):
        anywhere.alloc_many([1, 2, -1])
    with pytest.raises(TypeError):
        anywhere.alloc_many([1, "2"])

    def sizes():
        yield 64
        raise KeyError("an iterator that fails")

    with pytest.raises(KeyError):
        anywhere.alloc_many(sizes())
    assert view(anywhere) == before
    assert not kept.closed and anywhere.alloc_many([]) == []
    assert len(anywhere.alloc_many(iter((1, 2)))) == 2


IMPOSSIBLE = {
    "alloc": lambda allocator, n: allocator.alloc(n),
    "align": lambda allocator, n: allocator.alloc(8, n),
    "empty": lambda allocator, n: allocator.empty(n, "u1"),
    "alloc_many": lambda allocator, n: allocator.alloc_many([n]),
}


def test_impossible_sizes_and_alignments(anywhere):
    before = view(anywhere)
    for nbytes, call in itertools.product(
        [-1, -(2**63), 2**63, 2**64, 10**30], IMPOSSIBLE.values()
    ):
        with pytest.raises(ValueError, match=str(nbytes)):
            call(anywhere, nbytes)
    assert view(anywhere) == before


# Regions -------------------------------------------------------------------------------------


def test_closing_the_regions_closes_the_allocator(host_visible):
    block, kept = host_visible.alloc(8), host_visible.alloc(8)
    held = memoryview(kept)
    with pytest.raises(BufferError):
        host_visible.regions[0].close()
    held.release()
    del held, kept
    if isinstance(host_visible, Bump):
        host_visible.reset()
        block = host_visible.alloc(8)
    (region,) = host_visible.regions
    region.close()
    assert block.closed and region.closed
    uses = [
        lambda: host_visible.alloc(8), lambda: host_visible.empty(3), lambda: host_visible.zeros(3),
        lambda: host_visible.alloc_many([3]), lambda: memoryview(block), lambda: block.fill(0),
        lambda: block.address,
    ]  # fmt: skip
    if isinstance(host_visible, Bump):
        uses += [host_visible.mark, host_visible.reset, lambda: host_visible.grow(block, 16)]
    for use in uses:
        with pytest.raises(ValueError, match="closed"):
            use()
    block.release()
    adds_up(host_visible)


def test_a_region_belongs_to_one_allocator(anywhere):
    class Again:
        def region(self, nbytes):
            return anywhere.regions[0]

    for make in (
        lambda: Bump(PAGE, Again()),
        lambda: Slab(64, 8, Again()),
        lambda: Pool(None, Again(), PAGE),
    ):
        with pytest.raises(ValueError, match="allocator"):
            make()
    adds_up(anywhere)
