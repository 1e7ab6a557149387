"""DLPack, both generations of capsules, read the way a C consumer reads them."""

import ctypes
import gc

import numpy as np
import pytest
from capsules import (
    BOOL,
    COMPLEX,
    CPU,
    FLOAT,
    INT,
    IS_COPIED,
    NEW,
    NONSENSE,
    OLD,
    READ_ONLY,
    UINT,
    Consumer,
    ManagedVersioned,
    capsule_name,
    capsule_pointer,
    tensor_of,
)
from helpers import exact, in_threads, peek, poke, readonly_buffer


class Again:
    """Hands out one and the same capsule at every request."""

    def __init__(self, capsule):
        self.capsule = capsule

    def __dlpack__(self, **_):
        return self.capsule

    def __dlpack_device__(self):
        return CPU


@pytest.fixture
def arena():
    return exact(1 << 16)


@pytest.fixture
def buffer(arena):
    block = arena.alloc(96)
    ctypes.memmove(block.address, bytes(range(96)), 96)
    return block


@pytest.mark.parametrize(
    ("max_version", "name"),
    [(None, OLD), ((0, 8), OLD), ((1, 0), NEW), ((1, 1), NEW), ((2, 0), NEW), ((99, 0), NEW)],
)
def test_max_version_picks_the_capsule(buffer, max_version, name):
    capsule = buffer.__dlpack__(max_version=max_version)
    assert capsule_name(capsule) == name
    if name == NEW:
        managed = ManagedVersioned.from_address(capsule_pointer(capsule, NEW))
        assert managed.major == 1 and managed.flags == 0


@pytest.mark.parametrize("max_version", [None, (1, 0)])
@pytest.mark.parametrize(
    ("shape", "dtype", "code", "bits"),
    [
        ((96,), "u1", UINT, 8),
        ((24,), "f4", FLOAT, 32),
        ((3, 4), "f8", FLOAT, 64),
        ((2, 3, 2), "c8", COMPLEX, 64),
        ((6,), "c16", COMPLEX, 128),
        ((96,), "?", BOOL, 8),
        ((48,), "i2", INT, 16),
        ((12,), "u8", UINT, 64),
        ((48,), "f2", FLOAT, 16),
        ((0, 4), "f4", FLOAT, 32),
        ((), "f4", FLOAT, 32),
    ],
)
def test_the_tensor_says_what_the_view_is(buffer, max_version, shape, dtype, code, bits):
    nbytes = np.empty(shape, dtype).nbytes
    view = buffer[:nbytes].view(shape, dtype)
    capsule = view.__dlpack__(max_version=max_version)
    tensor = tensor_of(capsule)
    assert (tensor.device_type, tensor.device_id) == CPU == view.__dlpack_device__()
    assert (tensor.code, tensor.bits, tensor.lanes) == (code, bits, 1)
    assert tensor.ndim == len(shape) and tuple(tensor.shape[: len(shape)]) == shape
    assert tensor.data + tensor.byte_offset == view.address or 0 in shape
    if tensor.strides and 0 not in shape:
        itemsize = np.dtype(dtype).itemsize
        want = tuple(stride // itemsize for stride in np.empty(shape, dtype).strides)
        assert tuple(tensor.strides[: len(shape)]) == want


def test_a_plain_buffer_is_a_tensor_of_bytes(buffer):
    tensor = tensor_of(buffer[8:].__dlpack__(max_version=(1, 0)))
    assert (tensor.code, tensor.bits, tensor.ndim, tensor.shape[0]) == (UINT, 8, 1, 88)


@pytest.mark.parametrize("dtype", [*np.typecodes["AllInteger"], *"?efdgFDG", "M8[s]", "m8[s]"])
def test_the_types_are_those_that_numpy_exports(buffer, dtype):
    """A long double is none of them: on x86 it has 80 bits, and DLPack's floats are IEEE's."""
    view = buffer[: 2 * np.dtype(dtype).itemsize].view((2,), dtype)
    try:
        np.zeros(2, dtype).__dlpack__()
    except BufferError:
        with pytest.raises(BufferError, match="DLPack has no type for"):
            view.__dlpack__(max_version=(1, 0))
        assert not buffer.held
    else:
        assert np.from_dlpack(view).dtype == dtype


@pytest.mark.parametrize("dtype", ["V8", "i4,f4", "S4"])
def test_types_that_dlpack_does_not_have_are_refused(buffer, dtype):
    view = buffer[: 2 * np.dtype(dtype).itemsize].view((2,), dtype)
    with pytest.raises(BufferError):
        view.__dlpack__(max_version=(1, 0))
    assert not buffer.held


def test_foreign_byte_order_is_refused(buffer):
    with pytest.raises(BufferError):
        buffer.view((12,), np.dtype("f8").newbyteorder()).__dlpack__(max_version=(1, 0))


def test_round_trip_by_address(buffer):
    array = np.from_dlpack(buffer.view((4, 3), "f8"))
    assert array.ctypes.data == buffer.address
    assert array.shape == (4, 3) and array.dtype == "f8"
    array[1, 1] = 5
    assert np.frombuffer(peek(buffer.address, 96), "f8")[4] == 5
    assert array.flags.writeable


@pytest.mark.parametrize("max_version", [None, (1, 0)])
def test_copies(buffer, max_version):
    same = buffer.__dlpack__(max_version=max_version, copy=False)
    assert tensor_of(same).data == buffer.address
    other = buffer.__dlpack__(max_version=max_version, copy=True)
    tensor = tensor_of(other)
    assert not buffer.address <= tensor.data < buffer.address + 96
    if max_version:
        assert ManagedVersioned.from_address(capsule_pointer(other, NEW)).flags == IS_COPIED
    poke(buffer.address, 96, 0)
    assert peek(tensor.data, 96) == bytes(range(96))


def test_a_copy_does_not_keep_the_buffer_from_being_released(buffer):
    other = np.from_dlpack(buffer, copy=True)
    buffer.release()
    assert other.tobytes() == bytes(range(96))


@pytest.mark.parametrize("copy", [None, False, True])
def test_the_device_asked_for(buffer, copy):
    assert np.from_dlpack(buffer, device="cpu", copy=copy).tobytes() == bytes(range(96))
    buffer.__dlpack__(dl_device=CPU, copy=copy)
    for device in ((2, 0), (13, 0), (1, 1)):
        with pytest.raises(BufferError):
            buffer.__dlpack__(dl_device=device, copy=copy)


@pytest.mark.parametrize(
    ("keyword", "value"), [(key, value) for key, values in NONSENSE.items() for value in values]
)
@pytest.mark.parametrize("rest", [{}, {"max_version": (1, 0)}, {"copy": True}])
def test_nonsense_is_refused_by_its_name(buffer, keyword, value, rest):
    with pytest.raises((ValueError, BufferError)) as caught:
        buffer.__dlpack__(**{**rest, keyword: value})
    assert f"{keyword}=" in str(caught.value)
    assert repr(value) in str(caught.value) or repr(tuple(value)) in str(caught.value)
    assert not buffer.held
    buffer.release()


def test_an_unknown_keyword_is_refused(buffer):
    with pytest.raises(TypeError, match="no_such"):
        buffer.__dlpack__(no_such=1)
    assert not buffer.held


@pytest.mark.parametrize("pair", [(1, 0), [1, 0], np.array([1, 0]), (True, False), (np.int8(1), 0)])
def test_whole_numbers_of_any_kind_are_a_pair(buffer, pair):
    for keyword in ("dl_device", "max_version"):
        buffer.__dlpack__(**{keyword: pair})


def test_read_only_needs_a_versioned_capsule():
    buffer = readonly_buffer(b"abcd")
    for max_version in (None, (0, 8)):
        with pytest.raises(BufferError, match=r"(?i)read-?only"):
            buffer.__dlpack__(max_version=max_version)
    capsule = buffer.__dlpack__(max_version=(1, 0))
    assert ManagedVersioned.from_address(capsule_pointer(capsule, NEW)).flags == READ_ONLY
    array = np.from_dlpack(buffer)
    assert not array.flags.writeable and array.tobytes() == b"abcd"
    copied = buffer.__dlpack__(max_version=(1, 0), copy=True)
    assert ManagedVersioned.from_address(capsule_pointer(copied, NEW)).flags == IS_COPIED


@pytest.mark.parametrize("max_version", [None, (1, 0)])
def test_a_capsule_never_consumed_lets_go(arena, buffer, max_version):
    capsule = buffer.__dlpack__(max_version=max_version)
    with pytest.raises(BufferError):
        buffer.release()
    del capsule
    buffer.release()
    del buffer


@pytest.mark.parametrize("max_version", [None, (1, 0)])
def test_a_capsule_alone_holds_the_block(arena, max_version):
    block = arena.alloc(64)
    poke(block.address, 64, 9)
    address = block.address
    capsule = block[8:].__dlpack__(max_version=max_version)
    del block
    arena.reset()
    assert arena.retired == 64
    assert arena.alloc(64).address != address
    assert peek(tensor_of(capsule).data, 56) == b"\x09" * 56
    del capsule
    assert arena.retired == 0


@pytest.mark.parametrize("max_version", [None, (1, 0)])
@pytest.mark.parametrize("order", ["capsule first", "tensor first"])
def test_a_consumed_capsule_lets_go_exactly_once(arena, max_version, order):
    block = arena.alloc(64)
    capsule = block.__dlpack__(max_version=max_version)
    consumer = Consumer(capsule)
    del block
    arena.reset()
    if order == "capsule first":
        del capsule  # renamed, so its destructor must leave the tensor alone
        gc.collect()
        assert arena.retired == 64
        consumer.delete()
    else:
        consumer.delete()
        assert arena.retired == 0
        del capsule
    assert arena.retired == 0 and arena.stats().held_buffers == 0
    arena.check()


@pytest.mark.parametrize("max_version", [None, (1, 0)])
def test_consumed_twice_is_an_error_and_no_double_free(arena, max_version):
    block = arena.alloc(64)
    again = Again(block.__dlpack__(max_version=max_version))
    first = np.from_dlpack(again)
    with pytest.raises((ValueError, RuntimeError, BufferError)):
        np.from_dlpack(again)
    poke(first.ctypes.data, 64, 3)
    del block, again
    arena.reset()
    assert arena.retired == 64 and (first == 3).all()
    del first
    assert arena.retired == 0


@pytest.mark.parametrize("max_version", [None, (1, 0)])
def test_the_deleter_runs_on_any_thread_without_the_gil(arena, max_version):
    consumers = []
    for _ in range(50):
        consumers.append(Consumer(arena.alloc(64).__dlpack__(max_version=max_version)))
    arena.reset()
    assert arena.retired == 50 * 64
    in_threads(*(consumer.delete for consumer in consumers))
    assert arena.retired == 0 and arena.remaining == arena.capacity
    arena.check()


def test_the_deleter_runs_after_the_arena_is_gone(arena):
    box = [exact(4096)]
    consumer = Consumer(box[0].alloc(64).__dlpack__(max_version=(1, 0)))
    box.clear()
    poke(consumer.tensor.data, 64, 1)
    consumer.delete()


def test_arrays_of_an_arena_travel_too(arena):
    array = arena.empty((3, 4), "f4", order="F")
    array[:] = np.arange(12).reshape(3, 4)
    other = np.from_dlpack(array)
    assert other.ctypes.data == array.ctypes.data
    del array
    arena.reset()
    poke(arena.alloc(48).address, 48, 0)
    assert (other == np.arange(12).reshape(3, 4)).all()


def test_a_callback_that_exports_amid_the_first_export(run_script):
    """Nothing is imported then, which would be half there when the callback wants it."""
    run_script("""
        import os, signal, sys
        import numpy as np
        import arenapy

        block = arenapy.Pool().alloc(64)

        def first_export(strike):
            calls = 0

            def profile(frame, event, argument):
                nonlocal calls
                calls += 1
                if calls == strike:
                    np.from_dlpack(block)

            sys.setprofile(profile)
            np.from_dlpack(block)
            sys.setprofile(None)
            return calls >= strike

        strike, again = 1, True
        while again:
            child = os.fork()
            if not child:
                signal.alarm(20)
                os._exit(0 if first_export(strike) else 3)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert status in (0, 3), (strike, status)
            strike, again = strike + 1, status == 0
        assert strike > 3
    """)
