"""Buffer, section 5 of the design, sentence by sentence.

The buffer protocol, DLPack and pickling have files of their own.
"""

import ctypes

import numpy as np
import pytest
from helpers import exact, peek, poke, readonly_buffer

import arenapy
from arenapy import Buffer, Bump, Existing, Pool, Slab

MIB = 1 << 20
PATTERN = bytes(range(100))


@pytest.fixture
def arena():
    return exact(1 << 20)


@pytest.fixture
def buffer(arena):
    """A Buffer that holds PATTERN and was never exported."""
    block = arena.alloc(len(PATTERN))
    ctypes.memmove(block.address, PATTERN, len(PATTERN))
    return block


# What it says of itself ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nbytes", "address", "kind", "readonly", "allocator", "held"])
def test_attributes_are_read_only(buffer, name):
    with pytest.raises(AttributeError):
        setattr(buffer, name, 1)


def test_a_buffer_is_not_made_by_hand():
    with pytest.raises(TypeError):
        Buffer()


def test_repr_says_kind_bytes_allocator_and_state(arena, buffer):
    fresh = repr(buffer)
    assert all(word in fresh for word in ("host", "100", "Bump"))
    memoryview(buffer)
    held = repr(buffer)
    assert held != fresh and all(word in held for word in ("host", "100", "Bump"))
    buffer.release()
    closed = repr(buffer)
    assert closed not in (fresh, held) and "closed" in closed.lower() + " released"
    orphan = exact(4096).alloc(10)
    assert "Bump" not in repr(orphan)


def test_repr_says_the_layout_of_what_is_no_row_of_bytes(buffer):
    assert "(5, 5) '<f4'" in repr(buffer.view((5, 5), "f4"))
    assert "(25,) '<f4'" in repr(buffer.view((25,), "f4"))
    assert "(10, 10) '|u1'" in repr(buffer.view((10, 10), "u1"))
    assert "|u1" not in repr(buffer) + repr(buffer[10:20])


def test_repr_does_not_export(buffer):
    repr(buffer), str(buffer), len(buffer), buffer.nbytes, buffer.__dlpack_device__()
    assert not buffer.held


def test_repr_is_short():
    """Sizes with their unit, on one line."""
    arena = exact(64 * MIB)
    block = arena.alloc(3 * MIB // 2)
    assert repr(block).startswith(f"<Buffer host 1.5 MiB at {block.address:#x} of Bump, ")
    assert repr(arena) == "<Bump host 64 MiB, 1.5 MiB used>"
    x = arena.empty(1 << 20, "u1")
    arena.reset()
    assert repr(arena) == "<Bump host 64 MiB, 0 bytes used, 1 MiB retired>"
    del x
    assert repr(arena.regions[0]) == f"<Region host 64 MiB at {arena.regions[0].address:#x}>"
    slab = arenapy.Slab(4096, count=2000)
    item = slab.alloc()
    assert repr(slab) == "<Slab host 2,000 items of 4 KiB, 1 live>"
    del item
    pool = arenapy.Pool(initial_bytes=4 * MIB)
    block = pool.alloc(MIB)
    assert block.nbytes == MIB
    assert repr(pool) == "<Pool host 4 MiB, 1 MiB live, 3 MiB idle>"


# Assigned slices -------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [slice(0, 5), slice(None, 5), slice(-95, -90), slice(95, None)])
@pytest.mark.parametrize("make", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, "u1")])
def test_an_assigned_slice_has_the_bytes_and_no_other_changes(buffer, key, make):
    buffer.fill(1)
    expected = bytearray(b"\1" * 100)
    expected[key] = b"hello"
    buffer[key] = make(b"hello")
    assert bytes(buffer) == expected
    buffer[:][key] = make(b"world")
    expected[key] = b"world"
    assert bytes(buffer) == expected


def test_an_assigned_slice_may_be_of_the_same_buffer(buffer):
    buffer[:] = bytes(range(100))
    buffer[1:] = buffer[:-1]
    assert bytes(buffer) == bytes([0, *range(99)])


@pytest.mark.parametrize(
    ("assign", "error", "remedy"),
    [
        (lambda b: b.__setitem__(0, 5), TypeError, r"memoryview\(buffer\)\[i\] = value"),
        (lambda b: b.__setitem__(slice(0, 5), 7), TypeError, r"\.fill\(7\)"),
        (lambda b: b.__setitem__(slice(0, 5), b"four"), ValueError, "5 bytes.*has 4"),
        (lambda b: b.__setitem__(slice(0, 9, 2), b"hello"), ValueError, "step=2"),
        (lambda b: b.view(dtype="f4").__setitem__(slice(0, 1), np.ones(1, "i4")), TypeError,
         r"array\(\)"),
        (lambda b: b.__setitem__(slice(0, 1), np.array([None])), (TypeError, ValueError), "object"),
        (lambda b: b.__delitem__(slice(0, 1)), (TypeError, NotImplementedError), "delet"),
    ],
)  # fmt: skip
def test_what_cannot_be_assigned_changes_nothing(buffer, assign, error, remedy):
    buffer.fill(3)
    with pytest.raises(error, match=remedy):
        assign(buffer)
    assert bytes(buffer) == b"\3" * 100
    buffer.release()
    with pytest.raises(ValueError, match="closed"):
        buffer[0:5] = b"hello"


# Slices and views ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        slice(None),
        slice(10, 20),
        slice(-10, None),
        slice(None, -95),
        slice(50, 50),
        slice(60, 20),
        slice(0, 1000),
        slice(100, 200),
        slice(3, 90, 1),
    ],
)
def test_slicing_is_what_bytes_would_give(buffer, key):
    part = buffer[key]
    assert isinstance(part, Buffer)
    assert bytes(part) == PATTERN[key] and len(part) == part.nbytes == len(PATTERN[key])
    if part.nbytes:
        assert part.address == buffer.address + range(100)[key][0]
    assert (part.kind, part.device_id, part.readonly) == ("host", buffer.device_id, False)
    assert part.allocator is buffer.allocator


@pytest.mark.parametrize("step", [-1, 2])
def test_a_slice_with_a_step_is_refused_by_name(buffer, step):
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=str(step)):
        buffer[::step]


def test_a_slice_is_zero_copy_and_keeps_its_root(arena, buffer):
    part = buffer[10:20][2:5]
    poke(buffer.address + 12, 3, 255)
    used = arena.used
    del buffer
    assert bytes(part) == b"\xff" * 3
    assert arena.used == used
    # Exported through the slice, the whole root is held over a reset.
    arena.reset()
    assert not part.closed and bytes(part) == b"\xff" * 3
    assert arena.retired == 100


@pytest.mark.parametrize(
    "below",
    [lambda b: b, lambda b: b[3:4], lambda b: b[1:][1:2], lambda b: b.view((25,), "f4")],
)
@pytest.mark.parametrize(
    "export",
    [
        memoryview,
        np.asarray,
        np.from_dlpack,
        lambda b: b.__array_interface__,
        lambda b: b.__dlpack__(),
        lambda b: b.__dlpack__(max_version=(1, 0)),
        bytes,
        lambda b: b.array(),
        lambda b: np.ndarray(b.nbytes, "u1", buffer=b),
    ],
)
def test_any_export_marks_the_root(arena, below, export):
    buffer = arena.alloc(100)
    buffer.copy_from(PATTERN)
    assert not buffer.held
    export(below(buffer))  # dropped at once: "was ever exported" is enough
    assert buffer.held and arena.stats().held_buffers == 1
    arena.reset()
    assert not buffer.closed and arena.retired == 100
    assert peek(buffer.address, 100) == bytes(buffer) == PATTERN
    del buffer
    assert arena.retired == 0


def test_taking_a_slice_or_view_is_no_export(arena, buffer):
    part, view = buffer[1:5], buffer.view((10, 10), "u1")
    assert not buffer.held
    arena.reset()
    assert buffer.closed and part.closed and view.closed


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((100,), "u1"),
        ((25,), "f4"),
        ((5, 5), "<i4"),
        ((2, 5, 5), "i2"),
        ((10, 1), "V10"),
        (100, "i1"),
        ((), "V100"),
        ((0, 7), "f8"),
    ],
)
def test_view_has_that_shape_and_type(buffer, shape, dtype):
    peer = np.empty(shape, dtype)
    view = buffer[: peer.nbytes].view(shape, dtype)
    assert isinstance(view, Buffer) and view.address == buffer.address
    got = np.asarray(view)
    assert got.dtype == np.asarray(memoryview(peer)).dtype and got.shape == peer.shape
    assert view.nbytes == got.nbytes
    assert got.tobytes() == PATTERN[: got.nbytes]
    interface = view.__array_interface__
    assert interface["shape"] == got.shape and interface["typestr"] == got.dtype.str


def test_array_is_a_zero_copy_ndarray(buffer):
    array = buffer.array((5, 5), "f4")
    assert type(array) is np.ndarray and array.dtype == "f4" and array.shape == (5, 5)
    assert array.ctypes.data == buffer.address and array.flags.writeable
    assert buffer.held
    array[:] = 1
    assert peek(buffer.address, 100) == np.ones(25, "f4").tobytes()


def test_one_length_may_be_left_open_and_a_prefix_is_enough(buffer):
    assert buffer.view((5, -1), "f4").__array_interface__["shape"] == (5, 5)
    assert buffer.array(-1, "i2").shape == (50,)
    assert buffer.array((3, 2), "u1").tobytes() == PATTERN[:6]


def test_a_view_is_sliced_along_its_first_dimension(buffer):
    view = buffer.view((5, 5), "i4")
    assert len(view) == 5 and view.nbytes == 100
    part = view[1:3]
    assert part.address == buffer.address + 20 and np.asarray(part).shape == (2, 5)


@pytest.mark.parametrize("make", ["view", "array"])
@pytest.mark.parametrize(
    "shape", [(26,), (2**40, 2**40), (-2,), (-1, -1), (3, -1), (2**62,), (2**64,)]
)
def test_a_shape_that_does_not_fit_is_refused(buffer, make, shape):
    with pytest.raises(ValueError, match="shape"):
        getattr(buffer, make)(shape, "f4")
    assert not buffer.held


@pytest.mark.parametrize("make", ["view", "array"])
@pytest.mark.parametrize("dtype", ["O", "i4,O"])
def test_object_dtypes_are_refused_with_the_reason(buffer, make, dtype):
    with pytest.raises((ValueError, TypeError), match=r"(?i)object"):
        getattr(buffer, make)((2,), dtype)


# Contents --------------------------------------------------------------------------------------


def test_fill(buffer):
    buffer.fill(255)
    buffer[10:20].fill(1)
    assert peek(buffer.address, 100) == b"\xff" * 10 + b"\x01" * 10 + b"\xff" * 80
    assert not buffer.held


@pytest.mark.parametrize("nbytes", [100, 1 << 20])
@pytest.mark.parametrize("make", [Slab, Bump, Pool, "existing"])
def test_moving_bytes_is_no_export(make, nbytes):
    """Nobody sees them afterwards: they are free at once, and a strict scope may end."""
    blocks = [new_block(make, nbytes) for _ in range(2)]
    a, b = blocks
    a.fill(1)
    a.copy_from(bytes(nbytes))
    a.copy_to(bytearray(nbytes))
    a.copy_to(b)
    a.copy_from(b[:])
    a[1:] = b[1:]
    b.copy_to(a.view((nbytes,), "u1"))
    assert not a.held and not b.held
    memoryview(b).release()
    a.copy_from(b)
    assert b.held and not a.held
    a.release()
    assert a.closed


def new_block(make, nbytes):
    if make == "existing":
        return Existing(bytearray(nbytes)).region().buffer()
    return make(nbytes, 1).alloc() if make is Slab else make(2 * nbytes + (2 << 20)).alloc(nbytes)


@pytest.mark.parametrize("value", [-1, 256, 2**64])
def test_fill_takes_a_byte(buffer, value):
    with pytest.raises(ValueError, match=str(value)):
        buffer.fill(value)
    assert peek(buffer.address, 100) == PATTERN


@pytest.mark.parametrize("source", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, "u1")])
def test_copy_from(buffer, source):
    buffer.copy_from(source(PATTERN[::-1]))
    assert peek(buffer.address, 100) == PATTERN[::-1]


def test_copy_to_and_between_buffers(arena, buffer):
    target, other = bytearray(100), arena.alloc(100)
    buffer.copy_to(target)
    other.copy_from(buffer)
    assert target == PATTERN and peek(other.address, 100) == PATTERN
    other.fill(9)
    other.copy_to(buffer)
    assert peek(buffer.address, 100) == b"\x09" * 100
    matrix = np.zeros((10, 10), "u1")
    buffer.copy_to(matrix)
    assert (matrix == 9).all()


def test_copies_of_types_without_a_buffer(arena):
    """NumPy exports no dates, and no types of other packages. It has their bytes."""
    dates = np.arange(6).astype("M8[D]").reshape(2, 3)
    fields = np.zeros(4, [("day", "M8[s]"), ("span", "m8[us]")])
    masked = np.ma.masked_array(dates, dates > dates[0, 1])
    alone = dates[0, 1:2].reshape(())
    for source in dates, np.asfortranarray(dates), fields, alone, masked:
        block = arena.alloc(source.nbytes)
        block.copy_from(source)
        assert peek(block.address, source.nbytes) == np.asarray(source).tobytes("A")
        block.fill(0)
        block[0 : source.nbytes] = source
        target = np.zeros_like(source)
        block.copy_to(target)
        assert (target == source).all()
    dates.flags.writeable = False
    for target in dates, np.zeros(12, "M8[D]")[::2]:
        with pytest.raises(ValueError, match=r"read-only|contiguous"):
            arena.alloc(48).copy_to(target)
    with pytest.raises(TypeError, match="references"):
        arena.alloc(16).copy_from(np.zeros(1, [("day", "M8[s]"), ("thing", object)]))


def test_copying_over_itself_is_a_move(buffer):
    buffer[10:90].copy_from(buffer[0:80])
    assert peek(buffer.address, 100) == PATTERN[:10] + PATTERN[:80] + PATTERN[90:]


@pytest.mark.parametrize("nbytes", [0, 99, 101])
def test_copies_of_another_size_are_refused(buffer, nbytes):
    target = bytearray(b"?" * nbytes)
    with pytest.raises(ValueError, match=str(nbytes)):
        buffer.copy_from(target)
    with pytest.raises(ValueError, match=str(nbytes)):
        buffer.copy_to(target)
    assert target == b"?" * nbytes and peek(buffer.address, 100) == PATTERN


def test_read_only_memory_is_not_written():
    buffer = readonly_buffer(b"abcd")
    assert buffer.readonly and bytes(buffer) == b"abcd"
    for write in (lambda: buffer.fill(0), lambda: buffer.copy_from(b"wxyz")):
        with pytest.raises((BufferError, ValueError, TypeError), match=r"read-?only"):
            write()
    with pytest.raises((BufferError, ValueError)):
        exact(4096).alloc(4).copy_to(buffer)
    assert not buffer.array((4,), "u1").flags.writeable
    assert buffer[1:3].readonly and buffer.view((2,), "u2").readonly
    assert buffer.__array_interface__["data"][1] is True
    assert bytes(buffer) == b"abcd"


# Release ---------------------------------------------------------------------------------------

USES = [
    memoryview,
    bytes,
    np.asarray,
    lambda b: b[0:1],
    lambda b: b.view((1,), "u1"),
    lambda b: b.array((1,), "u1"),
    lambda b: b.fill(0),
    lambda b: b.copy_from(bytes(100)),
    lambda b: b.copy_to(bytearray(100)),
    lambda b: b.__dlpack__(),
    lambda b: b.__array_interface__,
    lambda b: b.__enter__(),
]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("how", ["release", "reset", "with"])
def test_any_use_of_a_closed_buffer_raises_value_error(arena, buffer, use, how):
    part = buffer[0:100]
    if how == "release":
        buffer.release()
    elif how == "with":
        with buffer as same:
            assert same is buffer
    else:
        arena.reset()
    for handle in (buffer, part):
        assert handle.closed
        with pytest.raises(ValueError, match="closed: it was released, or its frame was reset"):
            use(handle)


@pytest.mark.parametrize(
    "export",
    [
        memoryview,
        np.asarray,
        np.from_dlpack,
        lambda b: memoryview(b[3:5]),
        lambda b: b.__dlpack__(),
        lambda b: np.frombuffer(b[5:6], "u1"),
        lambda b: np.from_dlpack(b.view((5, 5), "f4")),
    ],
)
def test_release_with_live_exports_raises_and_changes_nothing(arena, buffer, export):
    alive = export(buffer)
    before = arena.stats(), arena.used
    with pytest.raises(BufferError) as caught:
        buffer.release()
    assert hex(buffer.address) in str(caught.value) or "100" in str(caught.value)
    assert (arena.stats(), arena.used) == before and not buffer.closed
    del alive, caught
    buffer.release()
    assert buffer.closed


def test_a_second_release_does_not_free_a_newer_block(arena, buffer):
    buffer.release()
    newer = arena.alloc(100)
    buffer.release()
    last = arena.alloc(100)
    assert abs(last.address - newer.address) >= 100 and not newer.closed


def test_release_of_a_slice_closes_that_slice_only(arena, buffer):
    part, other = buffer[0:50], buffer[50:]
    used = arena.used
    part.release()
    assert part.closed and not buffer.closed and not other.closed
    assert arena.used == used and bytes(other) == PATTERN[50:]
    with pytest.raises(ValueError, match="closed"):
        memoryview(part)


def test_with_live_exports_leaving_the_block_raises(buffer):
    with pytest.raises(BufferError), buffer:
        view = memoryview(buffer)
    assert not buffer.closed and bytes(view) == PATTERN


def test_with_does_not_mask_an_exception(buffer):
    with pytest.raises(KeyError), buffer:
        view = memoryview(buffer)
        raise KeyError
    assert bytes(view) == PATTERN


def test_exported_bytes_go_back_when_the_buffer_object_is_gone(arena):
    buffer = arena.alloc(100)
    ctypes.memmove(buffer.address, PATTERN, 100)
    # np.ndarray(buffer=) keeps a reference and no export: the case an export count misses.
    seen = np.ndarray((100,), "u1", buffer=buffer)
    buffer.release()
    assert buffer.closed
    arena.reset()
    others = [arena.alloc(100, 1) for _ in range(arena.remaining // 100)]
    for other in others:
        poke(other.address, 100, 0)
    assert seen.tobytes() == PATTERN
    assert not any(
        o.address < seen.ctypes.data + 100 and seen.ctypes.data < o.address + 100 for o in others
    )
    del buffer, seen, other, others
    arena.reset()
    assert arena.remaining == arena.capacity


def test_a_released_slice_of_a_held_block_is_closed_to_everybody(buffer):
    view = memoryview(buffer)
    part = buffer[10:20]
    part.release()
    exports = memoryview, np.from_dlpack, lambda b: b.array(), lambda b: b[1:], bytes
    for export in exports:
        with pytest.raises(ValueError, match=r"released|closed"):
            export(part)
    assert view.nbytes == 100 and len(buffer[10:20]) == 10
