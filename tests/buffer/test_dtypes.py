"""Dtypes, however they are written: arrays are as NumPy's of the same argument, call after call."""

import collections
import ctypes
import gc
import sys
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import arenapy

ROOM = 1 << 20
ALLOCATORS = {
    "bump": lambda: arenapy.Bump(ROOM),
    "pool": arenapy.Pool,
    "slab": lambda: arenapy.Slab(1 << 14, 64),
}
#: The methods that take a dtype; each makes one array of it.
METHODS = {
    "empty": lambda one, shape, dtype, order: one.empty(shape, dtype, order),
    "zeros": lambda one, shape, dtype, order: one.zeros(shape, dtype, order),
    "struct_of_arrays": lambda one, shape, dtype, order: one.struct_of_arrays({"x": dtype}, shape)[
        "x"
    ],
}


class Typed:
    """A class that says what dtype it means, which can change."""

    dtype = np.dtype("f4")


class Float(np.float64):
    pass


class Record(np.void):
    dtype = np.dtype([("x", "<i2"), ("y", ">f4")])


Pair = type("Pair", (tuple,), {})

CODES = [*np.typecodes["All"], "b1", "i1", "u2", "i4", "f2", "f4", "f8", "c8", "c16"]
SIZED = ["S1", "S5", "U1", "U7", "V1", "V12", "M8[ns]", "m8[25s]", "M8[D]"]
UNSIZED_OR_OBJECTS = ["S", "U", "V", "S0", "V0", "O", "i4,O", "(2,)O", [("x", "f4"), ("y", "O")]]
BAD = ["nonsense", "", "f3", b"\xff", 3, 3.5, ["x"], {"x": 1}, (1, 2), ("f4", "f4", 1)]
TYPES = [
    *[np.dtype(code).type for code in np.typecodes["All"]],
    *(bool, int, float, complex, str, bytes, object, memoryview, list, type, type(None)),
    *(np.generic, np.number, np.floating, np.inexact, np.integer, np.flexible, np.character),
    *(np.dtypes.Float64DType, np.dtypes.StringDType, np.dtype, Typed, Float, Record, Pair),
]
OTHERS = [
    None,
    Typed(),
    np.float64(3),
    np.arange(3),
    np.dtypes.StringDType(),
    "i4,f8",
    "3i",
    {},
    "(2,)f4",
    "(2,3)>i2",
    ("f4", (3,)),
    ("u4", [("r", "u1"), ("g", "u1"), ("b", "u1"), ("a", "u1")]),
    [("x", "f4"), ("y", ">i8", (2, 2))],
    [("x", "i4"), ("y", "f4", (0,)), ("z", "f8", (3, 0))],
    [(("a title", "x"), "f4")],
    {"names": ["x", "y"], "formats": ["u1", "f8"], "offsets": [0, 16], "itemsize": 40},
    {"names": ["x", "y"], "formats": ["u4", "u1"], "offsets": [0, 2]},
    np.dtype([]),
    np.dtype([("x", "u1"), ("y", "f8")], align=True),
    np.dtype("f8", metadata={"unit": "m"}),
    np.dtype("i4,f4", metadata={"unit": "m"}),
    np.dtype("f8").newbyteorder(),
    np.dtype("f8").newbyteorder().newbyteorder(),
]


@st.composite
def made(draw):
    """A dtype object: plain, byte-swapped, with a shape, with fields, with metadata."""
    plain = st.sampled_from([*"?bhilqnpBHILQNPefdgFDG", *SIZED]).map(np.dtype)
    swapped = plain.map(lambda one: one.newbyteorder())
    part = plain | swapped
    shapes = st.lists(st.integers(1, 3), min_size=1, max_size=2).map(tuple)
    part = part | st.tuples(part, shapes).map(np.dtype)
    parts = st.lists(part, min_size=1, max_size=4)
    fields = st.tuples(parts, st.booleans()).map(
        lambda drawn: np.dtype([(f"f{i}", one) for i, one in enumerate(drawn[0])], align=drawn[1])
    )
    one = draw(part | fields)
    if draw(st.integers(0, 4)) == 0:
        one = np.dtype(one, metadata={"n": draw(st.integers())})
    return one


spellings = (
    st.sampled_from([*CODES, *SIZED, *UNSIZED_OR_OBJECTS, *BAD, *OTHERS])
    | st.sampled_from(TYPES)
    # (Of a time without a unit, ">M", NumPy's own `empty` forgets the byte order.)
    | st.tuples(st.sampled_from("<>=|"), st.sampled_from([*CODES, *SIZED]))
    .map("".join)
    .filter(lambda one: one[1:] not in ("M", "m"))
    | made()
    | made().map(lambda one: one.str)
    | made().map(lambda one: one.descr if one.names else one.type)
)


def meant(argument):
    """NumPy's dtype for it, or the class of what is raised, by what NumPy says alone."""
    try:
        dtype = np.dtype(argument)
    except Exception as error:
        return type(error)
    if dtype.hasobject:
        return TypeError
    if dtype.itemsize == 0 and dtype.kind in "SUV" and dtype.names is None:
        return ValueError
    return dtype


def facts(dtype):
    """All that tells a dtype from others, `==` does not."""
    return (
        dtype,
        type(dtype),
        dtype.str,
        dtype.byteorder,
        dtype.itemsize,
        dtype.alignment,
        dtype.isalignedstruct,
        dtype.names,
        dtype.descr if dtype.names and not overlaps(dtype) else None,
        None if dtype.fields is None else dict(dtype.fields),
        None if dtype.metadata is None else dict(dtype.metadata),
    )


def overlaps(dtype):
    """Whether fields do, of which `descr` has no words."""
    try:
        return dtype.descr is None
    except ValueError:
        return True


def same(array, peer):
    """Both are alike in everything but where they are."""
    assert type(array) is np.ndarray
    assert facts(array.dtype) == facts(peer.dtype)
    assert array.shape == peer.shape
    # Of no bytes NumPy has strides of 0 if the memory is its own, and others if it is not.
    assert array.nbytes == 0 or array.strides == peer.strides
    for flag in ("C_CONTIGUOUS", "F_CONTIGUOUS", "ALIGNED", "WRITEABLE", "WRITEBACKIFCOPY"):
        assert array.flags[flag] == peer.flags[flag], flag
    assert not array.flags.owndata
    assert array.ctypes.data % 64 == 0


@pytest.fixture(scope="module", params=ALLOCATORS)
def one(request):
    return ALLOCATORS[request.param]()


def check(one, shape, argument, order):
    """Every method that takes a dtype does with this one as NumPy does."""
    expected = meant(argument)
    for name, make in METHODS.items():
        order = "C" if name == "struct_of_arrays" else order
        if isinstance(expected, type):
            with pytest.raises(expected):
                make(one, shape, argument, order)
            continue
        peer = np.empty(shape, expected, order)
        array = make(one, shape, argument, order)
        same(array, peer)
        if isinstance(argument, np.dtype) and expected.subdtype is None:
            assert array.dtype is argument
        if name == "zeros":
            assert not any(ctypes.string_at(array.ctypes.data, array.nbytes))
        array[...] = np.zeros((), array.dtype)
    peer = None if isinstance(expected, type) else np.empty(shape, expected)
    block = one.alloc(1 << 12)
    for make in (block.view, block.array):
        if argument is None:  # there it is bytes
            assert make(4, None).dtype == np.uint8
        elif isinstance(expected, type):
            with pytest.raises(expected):
                make(shape, argument)
        elif expected.subdtype is not None:
            with pytest.raises(ValueError, match="its own shape"):
                make(shape, argument)
        else:
            assert facts(make(shape, argument).dtype) == facts(expected)
            same(np.asarray(block.array(shape, argument)), peer)
    if peer is not None:
        same(one.copy(peer), peer)


def check_all(one, arguments, shapes, order):
    """A few arguments in turn, some again: what one means says nothing of the others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's own, about arguments
        for i, argument in enumerate(arguments):
            check(one, shapes[i % len(shapes)], argument, order)
            if isinstance(one, arenapy.Bump):
                one.reset()


def test_arrays_are_as_numpys_of_every_argument(one):
    arguments = [*CODES, *TYPES, *OTHERS, *SIZED, *UNSIZED_OR_OBJECTS, *BAD]
    check_all(one, arguments * 2, [(2, 3)], "F")


@given(
    st.lists(spellings, min_size=1, max_size=6).flatmap(lambda few: st.permutations(few * 2)),
    st.lists(st.lists(st.integers(0, 3), max_size=3).map(tuple), min_size=1, max_size=3),
    st.sampled_from("CF"),
)
def test_arrays_are_as_numpys_of_the_same_argument(one, arguments, shapes, order):
    check_all(one, arguments, shapes, order)


@pytest.mark.parametrize("argument", BAD, ids=repr)
def test_the_error_is_numpys_own(one, argument):
    with pytest.raises((TypeError, ValueError, SyntaxError)) as expected:
        np.dtype(argument)
    for _ in range(2):
        for make in METHODS.values():
            with pytest.raises(type(expected.value)) as caught:
                make(one, (2,), argument, "C")
            assert str(caught.value) == str(expected.value)


@pytest.mark.parametrize("argument", [object, np.object_, "O", np.dtype("O"), "i4,O", "(2,)O"])
def test_objects_are_refused_each_time(one, argument):
    for _ in range(3):
        with pytest.raises(TypeError, match="holds references to Python objects"):
            one.empty(2, argument)


@pytest.mark.parametrize("argument", [str, bytes, np.void, "S", "U0", np.dtype("S"), np.dtype("V")])
def test_no_size_is_refused_each_time_by_name(one, argument):
    for _ in range(3):
        with pytest.raises(ValueError, match="has no size") as caught:
            one.empty(2, argument)
        assert f"dtype={argument!r}" in str(caught.value)


@pytest.mark.parametrize("itemsize", [-1002, 64, 2064])
def test_a_size_that_overflows_is_refused(one, itemsize):
    """NumPy adds the sizes of fields up in a C int: the last one's are negative, or small again."""
    last = (itemsize + 2) % (1 << 31)
    sizes = [2147483647] * (1 if itemsize < 0 else 2) + [last]
    dtype = np.dtype(
        {"names": list("abc"[: len(sizes)]), "formats": [f"V{size}" for size in sizes]}
    )
    if itemsize > 0:
        assert dtype.itemsize == itemsize
    for nested in (dtype, np.dtype([("x", dtype), ("y", "f4")]), np.dtype((dtype, (2,)))):
        for make in (one.empty, one.alloc(4096).view, one.alloc(4096).array):
            for _ in range(2):
                with pytest.raises(ValueError, match="is too large"):
                    make(3, nested)


def test_a_size_that_overflows_to_none_is_refused(one):
    dtype = np.dtype([(name, f"V{1 << 30}") for name in "abcd"])
    assert dtype.itemsize == 0
    with pytest.raises(ValueError, match="is too large"):
        one.empty(3, [("x", dtype, (1,)), ("y", "f4")])


def test_a_dtype_that_was_changed_is_looked_at_again(one):
    dtype = np.dtype("u1,u1")
    assert one.empty(3, dtype).nbytes == 6
    far = {"f0": (np.dtype("u1"), 0), "f1": (np.dtype("V64"), 1 << 20)}
    dtype.__setstate__((3, "|", None, ("f0", "f1"), far, 2, 1, 16))
    for make in (one.empty, one.alloc(4096).view, one.alloc(4096).array):
        with pytest.raises(ValueError, match="is too large"):
            make(3, dtype)


@pytest.mark.parametrize("bases", [(), (np.void,), (np.float64,)], ids=repr)
def test_a_class_may_change_what_it_means(one, bases):
    changing = type("Changing", bases, {})
    for code in ("f4", ">i8", "S3", "f4", "O"):
        changing.dtype = np.dtype(code)
        for _ in range(3):
            check(one, (2,), changing, "C")
    assert bases or meant(changing) is TypeError


def test_names_of_fields_may_change(one):
    dtype = np.dtype("i4,f4")
    for argument in (dtype, "i4,f4"):
        assert one.empty(2, argument).dtype.names == ("f0", "f1")
    one.empty(2, "i4,f4").dtype.names = ("x", "y")
    dtype.names = ("a", "b")
    assert one.empty(2, dtype).dtype.names == ("a", "b")
    assert one.alloc(64).view(2, dtype).dtype.names == ("a", "b")
    assert one.empty(2, "i4,f4").dtype.names == ("f0", "f1")


def test_a_dtype_that_comes_to_hold_objects_is_refused(one):
    """As unpickling may do to a dtype that is not NumPy's own."""
    dtype = np.dtype("V8")
    one.empty(2, dtype)
    dtype.__setstate__(np.dtype([("x", "O")]).__reduce__()[2])
    assert dtype.hasobject
    with pytest.raises(TypeError):
        one.empty(2, dtype)


@pytest.mark.no_sanitizer  # its quarantine lets no address come again
def test_an_argument_at_an_address_that_another_one_had(one):
    """Many strings and dtypes are made and dropped, so that addresses come again."""
    addresses = collections.Counter()
    for i in range(3000):
        argument = f"S{i % 97 + 1}"
        addresses[id(argument)] += 1
        assert one.empty((), argument).dtype.itemsize == i % 97 + 1
        argument = np.dtype(f"V{i % 89 + 1}")
        addresses[id(argument)] += 1
        assert one.empty((), argument).dtype is argument
        if isinstance(one, arenapy.Bump):
            one.reset()
    assert max(addresses.values()) > 1


def test_what_is_remembered_is_bounded(one):
    """Arguments that come again are counted once; others take their place."""
    argument = "".join(["f", "8"])
    dtypes = [argument, float, np.float64, np.dtype("f8"), np.dtype(">f8"), np.dtype("i4,f4")]
    before = [sys.getrefcount(argument) for argument in dtypes]
    for argument in dtypes * 100:
        one.empty((), argument)
    # Of a dtype also what the table has for the other names of it.
    after = [sys.getrefcount(argument) for argument in dtypes]
    assert all(a - b <= len(dtypes) for a, b in zip(after, before, strict=True))
    gc.collect()
    blocks = sys.getallocatedblocks()
    for i in range(2000):
        one.empty((), f"V{i + 1}")
        if isinstance(one, arenapy.Bump):
            one.reset()
    gc.collect()
    assert sys.getallocatedblocks() - blocks < 1000
