"""Bad input: the exact error of section 11, naming the value, and nothing changed."""

import copy
import ctypes
import os
import pickle

import numpy as np
import pytest
from helpers import PAGE, Pages, exact, unchanged_view

import arenapy
from arenapy import Bump, Existing, File, Host, OutOfMemory, Pool, Shared, Slab, trace


@pytest.fixture
def arena():
    arena = exact(1 << 16)
    arena.alloc(100)
    return arena


def refuse(arena, errors, call, *names):
    """`call` raises one of `errors`, says each of `names`, and leaves the arena as it was."""
    before = unchanged_view(arena)
    with pytest.raises(errors) as caught:
        call()
    assert unchanged_view(arena) == before
    for name in names:
        assert str(name) in str(caught.value), f"{caught.value!r} does not say {name}"
    arena.check()


NEGATIVE_OR_OVERFLOWING = [-1, -64, -(2**63), 2**63, 2**64 - 1, 2**64, 10**30, -(10**30)]


@pytest.mark.parametrize("nbytes", NEGATIVE_OR_OVERFLOWING)
def test_sizes_out_of_range(arena, nbytes):
    refuse(arena, ValueError, lambda: arena.alloc(nbytes), nbytes)
    refuse(arena, ValueError, lambda: arena.alloc(nbytes, 64), nbytes)
    refuse(arena, ValueError, lambda: arena.alloc_many([1, nbytes]), nbytes)
    block = arena.alloc(1)
    refuse(arena, ValueError, lambda: arena.grow(block, nbytes), nbytes)
    assert not block.closed


def test_data_in_the_place_of_a_size(arena):
    """The message has its type, and not all of the data."""
    refuse(arena, TypeError, lambda: arena.alloc(b"12"), "nbytes=b'12' is of type bytes")
    for make in (arena.alloc, Bump, Pool):
        with pytest.raises(TypeError, match=r"=<1048576 items> is of type bytes; give"):
            make(bytes(1 << 20))


def test_only_blocks_of_a_bump_or_pool_grow(arena):
    item = Slab(4096, count=1).alloc()
    whole = Host().region(4096).buffer()
    for other in (item, whole):
        with pytest.raises(ValueError, match="not a block of a Bump or Pool"):
            other.grow(8192)
        assert not other.closed
    block = arena.alloc(16)
    refuse(arena, ValueError, lambda: block[:8].grow(16), "not a block of this")
    block.release()
    refuse(arena, ValueError, lambda: block.grow(16), "released")


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: Bump(), r"Bump\(1 << 20\)"),
        (lambda: Slab(), r"Slab\(4096, count=64\)"),
        (lambda: Slab(1000), r"Slab\(1000, count=64\)"),
        (lambda: arenapy.Source(), r"Host\(\)"),
    ],
)
def test_a_missing_argument_is_named_with_one_that_does(make, remedy):
    with pytest.raises(TypeError, match=remedy):
        make()


@pytest.mark.parametrize("nbytes", [1.5, "64", None, b"64", [64], 64j, object()])
def test_sizes_that_are_no_integers(arena, nbytes):
    refuse(arena, TypeError, lambda: arena.alloc(nbytes))
    refuse(arena, TypeError, lambda: arena.alloc_many([nbytes]))
    with pytest.raises(TypeError):
        Bump(nbytes, source=Pages())


def test_integers_of_every_kind_are_sizes(arena):
    assert arena.alloc(np.int64(7)).nbytes == 7
    assert arena.alloc(True).nbytes == 1
    assert arena.alloc(8, np.uint8(128)).address % 128 == 0


@pytest.mark.parametrize("align", [3, 0, -1, -64, 48, 65, 4 << 20, 2**63, 2**64, 10**30])
def test_alignments_are_powers_of_two_up_to_2_mib(arena, align):
    refuse(arena, ValueError, lambda: arena.alloc(8, align), align)
    refuse(arena, ValueError, lambda: arena.alloc(0, align=align), align)


@pytest.mark.parametrize("align", [64.0, "64", [64]])
def test_alignments_that_are_no_integers(arena, align):
    refuse(arena, TypeError, lambda: arena.alloc(8, align))


@pytest.mark.parametrize("make", ["empty", "zeros"])
@pytest.mark.parametrize(
    "shape",
    [
        (-1,),
        -1,
        (3, -2),
        (2**40, 2**40),
        (2**63,),
        2**63,
        (2**62, 2),
        (10**30,),
        (2**32, 2**32, 0, -1),
        (1,) * 65,
    ],
)
def test_shapes_out_of_range(arena, make, shape):
    refuse(arena, ValueError, lambda: getattr(arena, make)(shape, "f8"))


@pytest.mark.parametrize("make", ["empty", "zeros"])
@pytest.mark.parametrize("shape", ["abc", 1.5, (1.5,), None, (None,), ("3",)])
def test_shapes_that_are_none(arena, make, shape):
    refuse(arena, (TypeError, ValueError), lambda: getattr(arena, make)(shape, "f8"))


@pytest.mark.parametrize("shape", [np.int32, int, np.array([2, 3.5]), [[1, 2]]], ids=str)
def test_a_shape_that_is_none_is_named(arena, shape):
    with pytest.raises(TypeError, match="shape="):
        arena.empty(shape)
    with pytest.raises(TypeError, match="shape="):
        arena.alloc(100).view(shape)


def test_a_shape_may_be_an_array(arena):
    assert arena.empty(np.array([2, 3])).shape == (2, 3)
    assert arena.empty(np.array(4)).shape == (4,)
    assert arena.alloc(24).view(np.array([2, -1])).shape == (2, 12)


def test_a_shape_that_overflows_only_with_its_zero(arena):
    """NumPy refuses it too, so no consumer could represent it."""
    refuse(arena, ValueError, lambda: arena.empty((0, 2**40, 2**40), "f8"))


@pytest.mark.parametrize("dtype", ["O", object, "i4,O", [("x", "f4"), ("y", "O")], "(2,)O"])
def test_object_dtypes_are_refused_with_the_reason(arena, dtype):
    for call in (
        lambda: arena.empty(3, dtype),
        lambda: arena.zeros(3, dtype),
        lambda: arena.struct_of_arrays({"x": dtype}, 3),
        lambda: arena.copy(np.empty(3, dtype)),
    ):
        refuse(arena, (TypeError, ValueError), call, "object")


def test_a_string_dtype_that_owns_memory_is_refused(arena):
    dtype = np.dtypes.StringDType()
    refuse(arena, (TypeError, ValueError), lambda: arena.empty(3, dtype))
    refuse(arena, (TypeError, ValueError), lambda: arena.copy(np.array(["a"], dtype)))


@pytest.mark.parametrize("dtype", ["nonsense", 3, b"\xff", ["x"]])
def test_dtypes_that_are_none(arena, dtype):
    refuse(arena, (TypeError, ValueError), lambda: arena.empty(3, dtype))


@pytest.mark.parametrize("order", ["X", "", "CF", 3, b"C", "é"])
def test_orders(arena, order):
    refuse(arena, (TypeError, ValueError), lambda: arena.empty((3, 3), "f4", order))


@pytest.mark.parametrize(
    ("fields", "count", "errors"),
    [
        ({"x": "f4"}, -1, ValueError),
        ({"x": "f4"}, 2**62, ValueError),
        ({"x": "f4"}, 1.5, TypeError),
        ({"x": "nonsense"}, 1, (TypeError, ValueError)),
        ({}, 3, ValueError),
        ("xy", 3, (TypeError, ValueError)),
        ({"x": "f4", "y": "f8"}, 1 << 20, OutOfMemory),
    ],
)
def test_struct_of_arrays(arena, fields, count, errors):
    refuse(arena, errors, lambda: arena.struct_of_arrays(fields, count))


def test_exhaustion_says_what_was_asked_what_was_there_and_what_to_do(arena):
    free = arena.remaining
    refuse(arena, OutOfMemory, lambda: arena.alloc(1 << 20), 1 << 20, "max_bytes")
    refuse(arena, OutOfMemory, lambda: arena.empty(1 << 20, "u1"), 1 << 20)
    refuse(arena, MemoryError, lambda: arena.alloc(free + 1), free + 1)
    refuse(arena, OutOfMemory, lambda: arena.zeros(1 << 20))
    refuse(arena, OutOfMemory, lambda: arena.copy(np.zeros(1 << 16)))
    refuse(arena, (OutOfMemory, ValueError), lambda: arena.alloc(2**63 - 1))
    assert issubclass(OutOfMemory, MemoryError)


@pytest.mark.parametrize(
    "make", [lambda s: Pool(source=s, initial_bytes=4096), lambda s: Slab(64, 9, s, max_count=99)]
)
def test_a_source_that_says_nothing(make):
    class Terse:
        regions = 1

        def region(self, nbytes):
            self.regions -= 1
            if self.regions < 0:
                raise MemoryError
            return Host().region(nbytes)

    full = make(Terse())
    with pytest.raises(OutOfMemory, match=r"its source has no more \(MemoryError\)"):
        blocks = [full.alloc(64) for _ in range(100)]  # noqa: F841


@pytest.mark.parametrize("arguments", [(), (1, 2, 3, 4), ("x",)])
def test_argument_counts(arena, arguments):
    refuse(arena, TypeError, lambda: arena.alloc(*arguments))
    refuse(arena, TypeError, lambda: arena.alloc(8, nonsense=3))
    refuse(arena, TypeError, lambda: arena.alloc(nbytes=8, aline=3))


def test_keywords_work(arena):
    assert arena.alloc(nbytes=8, align=128).address % 128 == 0
    assert arena.alloc(8, stream=None).nbytes == 8
    assert arena.empty(shape=(2,), dtype="f4", order="C").nbytes == 8


# Constructors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", NEGATIVE_OR_OVERFLOWING)
def test_arenas_of_impossible_sizes(nbytes):
    with pytest.raises(ValueError, match=str(nbytes)):
        Bump(nbytes, source=Pages())


@pytest.mark.parametrize("max_bytes", [-1, 100, PAGE - 1, 2**64, "x"])
def test_limits_below_the_first_region(max_bytes):
    with pytest.raises((ValueError, TypeError)):
        Bump(PAGE, source=Pages(), max_bytes=max_bytes)


OBJECTS = {
    "objects": lambda: np.array([None] * 8),
    "a field": lambda: np.zeros(4, [("x", "f8"), ("y", "O")]),
    "a field of a field": lambda: np.zeros(4, [("x", [("y", "O")])]),
    "ctypes": lambda: (ctypes.py_object * 8)(*[None] * 8),
    # A name that has a colon, as names in a format do not: what follows it looks like one.
    "colon": lambda: with_fields(("x:", ctypes.c_int64), ("y", ctypes.py_object)),
    "colons": lambda: with_fields(("x:q", ctypes.c_int64), ("q:z", ctypes.py_object)),
    "colon first": lambda: with_fields((":x", ctypes.c_int64), ("y", ctypes.py_object)),
}


def with_fields(*fields):
    kind = type("Fields", (ctypes.Structure,), {"_fields_": fields})
    one = (kind * 4)()
    for struct in one:
        setattr(struct, fields[-1][0], [1])
    return one


@pytest.mark.parametrize("objects", OBJECTS)
def test_references_to_objects_are_no_bytes(arena, objects):
    one = OBJECTS[objects]()
    before = bytes(one) if isinstance(one, ctypes.Array) else one.tobytes()
    block = arena.alloc(len(before))
    block.fill(0x41)
    for call in (
        lambda: Existing(one),
        lambda: Existing(one, readonly=True),
        lambda: block.copy_to(one),
        lambda: block.copy_from(one),
    ):
        refuse(arena, TypeError, call, "Python objects", "astype")
    assert bytes(block) == b"A" * len(before)
    after = bytes(one) if isinstance(one, ctypes.Array) else one.tobytes()
    assert after == before


def test_a_field_may_have_any_name(arena):
    one = np.zeros(4, [("O", "f8"), ("Offset", "i4")])
    block = arena.alloc(one.nbytes)
    block.fill(1)
    block.copy_to(one)
    assert one.tobytes() == bytes(block) and Existing(one).region().nbytes == one.nbytes


# Regions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [
        (-1, 1),
        (0, PAGE + 1),
        (PAGE, 1),
        (PAGE + 1, 0),
        (0, -1),
        (2**63, 1),
        (1, 2**63),
        (2**64, None),
        (1, 2**64 - 1),
    ],
)
def test_a_region_views_only_what_it_has(offset, nbytes):
    region = Pages().region(PAGE)
    with pytest.raises(ValueError, match=r"offset|nbytes"):
        region.buffer(offset, nbytes)
    assert region.buffer().nbytes == PAGE and region.buffer(PAGE).nbytes == 0


def test_a_closed_region_is_refused():
    region = Pages().region(PAGE)
    region.close()
    assert region.closed

    class Source:
        def region(self, nbytes):
            return region

    with pytest.raises(ValueError, match="closed"):
        region.buffer()
    with pytest.raises(ValueError, match="closed"):
        Bump(PAGE, source=Source())


def test_regions_of_nonsense():
    for address, nbytes in ((-1, 8), (0, 8), (4096, -1), (2**64, 8), (2**64 - 4, 8), ("x", 8)):
        with pytest.raises((ValueError, TypeError)):
            arenapy.Region.from_address(address, nbytes)


class Mixed:
    """Its first region is plain memory, the others are not."""

    def __init__(self, **other):
        self.other, self.calls = other, 0

    def region(self, nbytes):
        self.calls += 1
        if self.calls == 1:
            return Pages().region(nbytes)
        address = Pages().region(nbytes).address
        return arenapy.Region.from_address(address, nbytes, **{"kind": "host", **self.other})


GROWING = {
    "bump": lambda source: Bump(PAGE, source, max_bytes=1 << 20),
    "slab": lambda source: Slab(PAGE, 1, source, max_count=100),
    "pool": lambda source: Pool(1 << 24, source),
}


@pytest.mark.parametrize("kind", GROWING)
@pytest.mark.parametrize(
    "other",
    [{"host_accessible": False}, {"device_accessible": True}, {"device_id": 1}, {"kind": "other"}],
    ids=str,
)
def test_all_regions_of_an_allocator_are_of_one_kind(kind, other):
    source = Mixed(**other)
    allocator = GROWING[kind](source)
    size = {"bump": 8 * PAGE, "slab": PAGE, "pool": 4 << 20}[kind]
    kept = []
    if kind != "bump":
        kept.append(allocator.alloc(size))
    before = allocator.stats()
    for call in (lambda: allocator.alloc(size), lambda: allocator.alloc_many([size] * 2)):
        with pytest.raises(ValueError, match="of one kind"):
            call()
    assert source.calls > 1 and len(allocator.regions) == 1
    assert allocator.stats() == before
    allocator.check()


# Everything else -------------------------------------------------------------------------------


def test_stats_and_check_take_nothing(arena):
    refuse(arena, TypeError, lambda: arena.stats(1))
    refuse(arena, TypeError, lambda: arena.check(1))
    assert arena.check() is None


@pytest.mark.parametrize("name", ["used", "peak", "remaining", "retired", "capacity", "regions"])
def test_figures_are_read_only(arena, name):
    with pytest.raises(AttributeError):
        setattr(arena, name, 1)


def test_an_arena_does_not_pickle_or_copy(arena):
    for call in (
        lambda: pickle.dumps(arena),
        lambda: copy.deepcopy(arena),
        lambda: pickle.dumps(arena.regions[0]),
    ):
        with pytest.raises(TypeError):
            call()


def test_the_errors_name_no_path_of_the_build(arena):
    with pytest.raises(ValueError, match="-1") as caught:
        arena.alloc(-1)
    assert os.sep not in str(caught.value)


HUGE = 10**30


@pytest.mark.parametrize(
    ("call", "errors", "names"),
    [
        (lambda: Host(threads=HUGE), ValueError, ["threads", HUGE]),
        (lambda: arenapy.Region.from_address(PAGE, 8, fd=HUGE), ValueError, ["fd", HUGE]),
        (lambda: arenapy.Region.from_address(PAGE, 8, fd="a"), TypeError, ["fd", "a"]),
        (lambda: arenapy.Region.from_address(PAGE, 8, device_id=HUGE), ValueError, ["device_id"]),
        (lambda: arenapy.Region.from_address(PAGE, 8, device_id="a"), TypeError, ["device_id"]),
        (lambda: arenapy.Region.from_address(PAGE, 8, file_offset=HUGE), ValueError, ["offset"]),
        (lambda: trace.record(Pool(), "x", sites=HUGE), ValueError, ["sites", HUGE]),
        (lambda: trace.record(Pool(), "x", sites="a"), TypeError, ["sites", "a"]),
        (lambda: trace.record(3, "x"), TypeError, ["3 is not an allocator"]),
        (lambda: Pool(trim_after="abc"), TypeError, ["trim_after", "abc"]),
        (lambda: Pool(trim_after=10**400), ValueError, ["trim_after"]),
        (lambda: Pool(trim_after=-1), ValueError, ["trim_after"]),
        (lambda: Pool(trim_after=float("nan")), ValueError, ["trim_after"]),
        (lambda: Bump(PAGE).empty(3, "f4", np.array(["C", "F"])), TypeError, ["order"]),
        (lambda: File("a\0b"), ValueError, ["path", "NUL"]),
        (lambda: File(b"a\0b"), ValueError, ["path", "NUL"]),
        (lambda: File("\ud800"), ValueError, ["path", "ud800"]),
        (lambda: Shared("\ud800"), ValueError, ["name", "ud800"]),
        (lambda: arenapy.numpy_memory(Pool(), threads="no"), TypeError, ["threads", "no"]),
    ],
)
def test_the_error_names_the_argument(call, errors, names):
    with pytest.raises(errors) as caught:
        call()
    for name in names:
        assert str(name) in str(caught.value)
