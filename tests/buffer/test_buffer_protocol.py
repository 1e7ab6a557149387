"""PEP 3118 in every combination of flags, PEP 688, and the consumers that work in place."""

import collections.abc
import copy
import ctypes
import io
import itertools
import pickle
import socket
import struct
import sys

import numpy as np
import pytest
from helpers import exact, peek, poke, readonly_buffer
from hypothesis import given
from hypothesis import strategies as st

BITS = {
    "WRITABLE": 0x1,
    "FORMAT": 0x4,
    "ND": 0x8,
    "STRIDES": 0x10,
    "C_CONTIGUOUS": 0x20,
    "F_CONTIGUOUS": 0x40,
    "ANY_CONTIGUOUS": 0x80,
    "INDIRECT": 0x100,
}
# PyBUF_READ alone, which is no request: since 3.13 PyObject_GetBuffer refuses it itself.
READ = 0x100
ALL_FLAGS = [
    flags
    for n in range(len(BITS) + 1)
    for chosen in itertools.combinations(BITS.values(), n)
    if (flags := sum(chosen)) != READ
]


class PyBuffer(ctypes.Structure):
    """The C struct Py_buffer."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.POINTER(ctypes.c_ssize_t)),
        ("internal", ctypes.c_void_p),
    ]


def get_buffer(exporter, flags):
    """What PyObject_GetBuffer answers, as a dict, or the type of the error."""
    view = PyBuffer()
    get = ctypes.pythonapi.PyObject_GetBuffer
    get.argtypes = [ctypes.py_object, ctypes.POINTER(PyBuffer), ctypes.c_int]
    try:
        get(exporter, ctypes.byref(view), flags)
    except (BufferError, ValueError) as error:
        return type(error)
    answer = {name: getattr(view, name) for name in ("len", "itemsize", "readonly", "ndim")}
    answer["format"] = view.format and view.format.lstrip(b"@")
    for name in ("shape", "strides", "suboffsets"):
        field = getattr(view, name)
        answer[name] = tuple(field[: view.ndim]) if field else None
    answer["buf"] = view.buf
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))
    return answer


SHAPES = [
    ((100,), "u1"),
    ((25,), "f4"),
    ((5, 5), "i4"),
    ((2, 5, 10), "u1"),
    ((1, 100), "i1"),
    ((0,), "f8"),
    ((), "f8"),
]


@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
@pytest.mark.parametrize("writable", [True, False])
def test_every_combination_of_flags(shape, dtype, writable):
    array = np.zeros(shape, dtype)
    buffer = exact(4096).alloc(100) if writable else readonly_buffer(bytes(100))
    view = buffer[: array.nbytes].view(shape, dtype)
    array.flags.writeable = writable
    for flags in ALL_FLAGS:
        got = get_buffer(view, flags)
        peers = [get_buffer(array, flags), get_buffer(memoryview(array), flags)]
        refused = [isinstance(peer, type) for peer in peers]
        if isinstance(got, type):
            assert any(refused), f"flags {flags:#x} refused, and granted by both peers"
            assert got is BufferError
            continue
        assert not all(refused), f"flags {flags:#x} granted, and refused by both peers"
        assert got["buf"] == view.address
        for name, peer in itertools.product(got, peers):
            if name != "buf" and not isinstance(peer, type):
                allowed = [p[name] for p in peers if not isinstance(p, type)]
                assert got[name] in allowed, f"flags {flags:#x}: {name} {got[name]}, not {allowed}"


@pytest.mark.parametrize("nbytes", [0, 1, 100])
def test_a_plain_buffer_is_bytes(nbytes):
    buffer = exact(4096).alloc(nbytes)
    peer = bytearray(nbytes)
    for flags in ALL_FLAGS:
        # bytearray ignores contradictory requests; where memoryview refuses, we may too.
        ours, theirs = get_buffer(buffer, flags), get_buffer(peer, flags)
        if isinstance(ours, type):
            assert isinstance(get_buffer(memoryview(peer), flags), type), f"flags {flags:#x}"
            continue
        assert ours.pop("buf") == buffer.address
        theirs.pop("buf")
        strict = flags & BITS["STRIDES"] and not flags & BITS["ND"]
        assert ours == theirs or strict, f"flags {flags:#x}: {ours}, not {theirs}"
    view = memoryview(buffer)
    assert (view.format, view.itemsize, view.ndim, view.shape, view.strides) == (
        "B",
        1,
        1,
        (nbytes,),
        (1,),
    )
    assert view.c_contiguous and view.f_contiguous and not view.readonly
    assert view.obj is buffer


LEAVES = [
    "i1", "u1", "<i2", ">i2", "<u4", ">i4", "i8", "f2", "<f4", ">f8", "g", "c8", ">c16", "G", "?",
    "S1", "S5", "U1", ">U3", "V3",
]  # fmt: skip


@st.composite
def structs(draw, depth=2):
    """A dtype of fields at any distance, with any padding at the end, nested and in arrays."""
    parts = st.sampled_from(LEAVES).map(np.dtype)
    if depth:
        parts |= structs(depth - 1)
    fields, end = {}, 0
    for name in draw(st.lists(st.sampled_from(["x", "y", "a name", "é"]), min_size=1, unique=True)):
        item = draw(parts)
        if shape := draw(st.sampled_from([(), (), (2,), (1, 3)])):
            item = np.dtype((item, shape))
        start = end + draw(st.sampled_from([0, 0, 1, 3, 8]))
        end = start + item.itemsize
        fields[name] = (item, start)
    if draw(st.booleans()):
        return np.dtype([(name, item) for name, (item, _) in fields.items()], align=True)
    return np.dtype(
        {
            "names": list(fields),
            "formats": [item for item, _ in fields.values()],
            "offsets": [start for _, start in fields.values()],
            "itemsize": end + draw(st.sampled_from([0, 0, 1, 12])),
        }
    )


@given(structs())
def test_a_struct_says_every_byte(dtype):
    """NumPy reads the format as the same type, whose own format of it may be another one."""
    buffer = exact(1 << 16).alloc(3 * dtype.itemsize)
    poke(buffer.address, buffer.nbytes, 0x31)
    view = buffer.view((3,), dtype)
    for array in (np.asarray(view), np.asarray(memoryview(view)), view.array()):
        assert array.dtype == dtype and array.dtype.itemsize == dtype.itemsize
        assert array.ctypes.data == buffer.address and array.shape == (3,)
    assert memoryview(view).itemsize == dtype.itemsize
    assert memoryview(view).tobytes() == bytes([0x31]) * buffer.nbytes


@pytest.mark.parametrize("name", ["a:b", "a\0b"])
def test_a_name_that_no_format_can_say(name):
    view = exact(4096).alloc(60).view((5,), [(name, "i4"), ("c", "f8")])
    with pytest.raises(BufferError, match="no code in the buffer protocol"):
        memoryview(view)
    for array in np.asarray(view), view.array():
        assert array.dtype.names == (name, "c") and array.dtype.itemsize == 12


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("padding", [1, 2, 4097, 1 << 30])
def test_padding_is_a_count(padding, before):
    """NumPy reads a letter for each byte in quadratic time."""
    offsets, size = ([0, 4 + padding], 8 + padding) if before else ([0, 4], 8 + padding)
    dtype = np.dtype({"names": "ab", "formats": ["i4"] * 2, "offsets": offsets, "itemsize": size})
    view = exact(4096).alloc(64).view((0,), dtype)
    assert np.asarray(view).dtype == view.array().dtype == dtype
    assert memoryview(view).itemsize == size
    assert len(memoryview(view).format) < 40


@pytest.mark.parametrize("dtype", LEAVES)
def test_a_plain_type_has_numpys_own_format(dtype):
    view = exact(4096).alloc(96).view((), dtype)
    assert memoryview(view).format == memoryview(np.empty((), dtype)).format


@pytest.mark.parametrize(
    "dtype",
    [
        "M8[s]", [("when", "M8[ns]"), ("x", "f4")], [("a:b", "i4")],
        [("empty", "S0"), ("x", ">i4")], [("x", "f8"), ("empty", "U0")],
    ],
)  # fmt: skip
def test_a_type_without_a_format_comes_by_the_array_interface(dtype):
    view = exact(4096).alloc(96).view((2,), dtype)
    with pytest.raises(BufferError, match=r"no code in the buffer protocol; use array\(\)"):
        memoryview(view)
    assert not view.held
    assert np.asarray(view).dtype == np.dtype(dtype) == view.array().dtype


@pytest.mark.parametrize("offsets", [[0, 2], [4, 0]])
def test_fields_that_no_protocol_has_words_for(offsets):
    dtype = np.dtype(
        {"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": offsets, "itemsize": 8}
    )
    view = exact(4096).alloc(96).view((2,), dtype)
    with pytest.raises(ValueError, match=r"overlap or are out of order; use array\(\)") as caught:
        np.asarray(view)
    assert str(dtype) in str(caught.value) and not view.held
    assert view.array().dtype == dtype


def test_a_refused_export_is_no_export():
    buffer = readonly_buffer(bytes(8))
    assert get_buffer(buffer, BITS["WRITABLE"]) is BufferError
    assert not buffer.held
    buffer.release()


def test_unreleased_exports_are_counted_each():
    buffer = exact(4096).alloc(64)
    views = [memoryview(buffer) for _ in range(300)]
    while views:
        with pytest.raises(BufferError):
            buffer.release()
        views.pop()
    buffer.release()


def test_pep_688():
    buffer = exact(4096).alloc(16)
    if sys.version_info < (3, 12):
        assert not hasattr(buffer, "__buffer__") and not buffer.held
        return
    assert isinstance(buffer, collections.abc.Buffer)
    view = buffer.__buffer__(0)
    assert isinstance(view, memoryview) and len(view) == 16 and buffer.held
    with pytest.raises(BufferError):
        buffer.release()


# In place --------------------------------------------------------------------------------------


def test_recv_into():
    buffer = exact(4096).alloc(16)
    left, right = socket.socketpair()
    with left, right:
        left.sendall(b"0123456789")
        assert right.recv_into(buffer) == 10
        left.sendall(b"ab")
        assert right.recv_into(buffer[14:]) == 2
    assert peek(buffer.address, 10) == b"0123456789" and peek(buffer.address + 14, 2) == b"ab"


def test_readinto_and_write(tmp_path):
    buffer = exact(4096).alloc(16)
    path = tmp_path / "data"
    path.write_bytes(b"x" * 8 + b"y" * 8)
    with path.open("rb", buffering=0) as file:
        assert file.readinto(buffer[8:]) == 8
        assert file.readinto(buffer[:8]) == 8
    assert peek(buffer.address, 16) == b"y" * 8 + b"x" * 8
    target = io.BytesIO()
    target.write(buffer)
    assert target.getvalue() == b"y" * 8 + b"x" * 8


def test_struct_and_frombuffer():
    buffer = exact(4096).alloc(32)
    struct.pack_into("<dI", buffer, 8, 1.5, 7)
    assert struct.unpack_from("<dI", buffer, 8) == (1.5, 7)
    array = np.frombuffer(buffer, "<f8", 1, 8)
    assert array[0] == 1.5 and array.ctypes.data == buffer.address + 8
    array[0] = 2.5
    assert struct.unpack_from("<d", buffer, 8) == (2.5,)


class OnlyInterface:
    """An exporter of nothing but the array interface, as a consumer of it sees us."""

    def __init__(self, buffer):
        self.buffer = buffer
        self.__array_interface__ = buffer.__array_interface__


def test_an_array_made_through_the_interface_alone_keeps_its_memory():
    arena = exact(4096)
    array = np.asarray(OnlyInterface(arena.alloc(64)))
    array[:] = 7
    arena.reset()
    poke(arena.alloc(64).address, 64, 0)
    assert (array == 7).all()


def test_host_memory_has_no_cuda_interface():
    assert not hasattr(exact(4096).alloc(64), "__cuda_array_interface__")


# Pickling --------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("nbytes", [0, 1, 5000])
def test_plain_pickle_copies_the_bytes(protocol, nbytes):
    buffer = exact(1 << 16).alloc(nbytes)
    poke(buffer.address, nbytes, 77)
    other = pickle.loads(pickle.dumps(buffer, protocol))
    poke(buffer.address, nbytes, 1)
    assert bytes(other) == b"M" * nbytes and not memoryview(other).readonly
    assert other.kind == "existing"


def test_a_view_comes_back_with_shape_and_type():
    view = exact(4096).alloc(32).view((2, 2), "f8")
    np.asarray(view)[:] = [[1, 2], [3, 4]]
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        other = np.asarray(pickle.loads(pickle.dumps(view, protocol)))
        assert other.dtype == "f8" and other.tolist() == [[1, 2], [3, 4]]


def test_a_slice_pickles_its_own_bytes_only():
    buffer = exact(1 << 16).alloc(20_000)
    poke(buffer.address, 20_000, 1)
    stream = pickle.dumps(buffer[10:20], 5)
    assert len(stream) < 5000 and bytes(pickle.loads(stream)) == b"\x01" * 10


def test_deepcopy_is_a_copy():
    buffer = exact(4096).alloc(8)
    poke(buffer.address, 8, 1)
    other = copy.deepcopy(buffer)
    poke(buffer.address, 8, 2)
    assert bytes(other) == b"\x01" * 8


def test_a_closed_buffer_does_not_pickle():
    buffer = exact(4096).alloc(8)
    buffer.release()
    with pytest.raises(ValueError, match="closed"):
        pickle.dumps(buffer, 5)
