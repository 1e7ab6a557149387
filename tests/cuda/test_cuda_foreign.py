"""Arrays of other libraries as Buffers, and as sides of copies; see capsules for the libraries."""

import ctypes
import gc
import mmap
import os
import weakref

import hypothesis.strategies as st
import numpy as np
import pytest
from capsules import CPU, NONSENSE, READ_ONLY, Array, Consumer, OldTensor, Tensor
from cuda_machine import NON_BLOCKING
from cuda_support import a_gpu, backwards, reads
from helpers import peek, poke
from hypothesis import given
from simulated_driver import INVALID_VALUE
from stream_wrappers import new_handle

from arenapy import Pool, cuda

N = 4096


def memory(gpu, kind="device", device=0, nbytes=N):
    """Another library's; it is never freed."""
    with gpu.on(device):
        if kind == "pinned":
            pages = mmap.mmap(-1, nbytes)
            gpu.keep = [*getattr(gpu, "keep", []), pages]
            address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
            assert not gpu.call("cuMemHostRegister", address, nbytes, 0)
        elif kind == "managed":
            address = gpu.got("cuMemAllocManaged", ctypes.c_uint64, nbytes, 1)
        else:
            address = gpu.got("cuMemAlloc", ctypes.c_uint64, nbytes)
    poke(address, nbytes, 9)
    return address


KINDS = {"device": (2, 0), "managed": (13, 0), "pinned": (3, 0)}
EACH = pytest.mark.parametrize("kind", KINDS)


def by_interface(gpu, kind="device", **fields):
    return Array(memory(gpu, kind), (N,), **fields)


def by_dlpack(gpu, kind="device", **fields):
    return Tensor(memory(gpu, kind), (N,), device=KINDS[kind], **fields)


WAYS = pytest.mark.parametrize("make", [by_interface, by_dlpack])


# ---- what they are ----


@pytest.mark.parametrize("device", [0, 1])
@EACH
def test_by_the_array_interface(gpu, kind, device):
    address = memory(gpu, kind, device)
    view = cuda.asbuffer(Array(address, (4, N // 16), "<f4"))
    assert (view.kind, view.address, view.nbytes) == (kind, address, N)
    assert (view.shape, view.dtype) == ((4, N // 16), np.dtype("f4"))
    assert view.device_id == (-1 if kind == "pinned" else device)
    assert view.allocator is None and not view.readonly
    assert view.__cuda_array_interface__["data"] == (address, False)


@EACH
@pytest.mark.parametrize("version", [None, (1, 0), (1, 7)])
@pytest.mark.parametrize("take", [cuda.from_dlpack, cuda.asbuffer])
def test_by_dlpack(gpu, kind, version, take):
    address = memory(gpu, kind)
    tensor = Tensor(address, (4, N // 16), "f4", KINDS[kind], version)
    view = take(tensor)
    assert (view.kind, view.address, view.nbytes) == (kind, address, N)
    assert (view.shape, view.dtype) == ((4, N // 16), np.dtype("f4"))
    assert view.__dlpack_device__() == ((1, 0) if kind == "pinned" else KINDS[kind])
    part = view[1:]
    del view
    gc.collect()
    assert tensor.deleted == 0
    del part
    assert tensor.deleted == tensor.capsules == 1


def test_by_dlpack_on_the_host_without_a_driver():
    bytes_ = bytearray(range(100))
    tensor = Tensor(ctypes.addressof(ctypes.c_char.from_buffer(bytes_)), (100,), "u1", CPU)
    view = cuda.from_dlpack(tensor)
    assert view.kind == "existing" and view.array().tobytes() == bytes_
    view.fill(1)
    assert bytes_ == b"\1" * 100 and tensor.asked == [{"stream": None, "max_version": (1, 0)}]
    with pytest.raises(ValueError, match="on the host, where streams"):
        cuda.from_dlpack(tensor, stream=1)
    del view
    assert tensor.deleted == 1


def test_a_structure(gpu):
    array = Array(memory(gpu), (N // 8,), "|V8", descr=[("a", "<f4"), ("b", "<i4")])
    assert cuda.asbuffer(array).dtype == np.dtype([("a", "f4"), ("b", "i4")])


def test_an_offset(gpu):
    address = memory(gpu)
    assert cuda.from_dlpack(Tensor(address, (10,), byte_offset=64)).address == address + 64


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
def test_nothing(gpu, shape):
    for thing in (Array(0, shape, "<f4", strides=(4,) * len(shape)), Tensor(0, shape, "f4")):
        view = cuda.asbuffer(thing)
        assert view.nbytes == 0 and view.shape == shape
        assert view.__cuda_array_interface__["data"] == (0, False)
    del view
    assert thing.deleted == 1


@given(
    shape=st.lists(st.integers(0, 4), max_size=4),
    dtype=st.sampled_from(["u1", "i2", "f4", "c16", "?"]),
    steps=st.lists(st.sampled_from([1, 1, 1, 2, -1]), min_size=4, max_size=4),
    axes=st.permutations(range(4)),
    swap=st.booleans(),
)
def test_what_numpy_has_in_c_order_is_taken_and_nothing_else(shape, dtype, steps, axes, swap):
    with a_gpu(leaks=True) as gpu:
        base = np.empty(shape, dtype)
        array = base[(..., *(slice(None, None, step) for step in steps[: base.ndim]))]
        if swap:
            array = array.transpose([axis for axis in axes if axis < array.ndim])
        address = memory(gpu, nbytes=max(base.nbytes, 1))
        start = address + array.ctypes.data - base.ctypes.data
        elements = [stride // base.itemsize for stride in array.strides]
        things = (
            Array(start, array.shape, array.dtype.str, strides=array.strides),
            Tensor(start, array.shape, dtype, strides=elements),
        )
        for thing in things:
            if array.flags.c_contiguous:
                view = cuda.asbuffer(thing)
                assert (view.shape, view.dtype) == (array.shape, array.dtype)
                assert array.size == 0 or view.address == start
                del view
            else:
                with pytest.raises(BufferError, match=r"not C-contiguous.*contiguous copy"):
                    cuda.asbuffer(thing)
        gc.collect()
        assert things[1].deleted == 1


# ---- what is refused ----


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"version": (2, 0)}, "speaks DLPack 2.0"),
        ({"code": 4, "bits": 16}, "type 4 with 16 bits.*view of it as integers"),
        ({"bits": 4}, "4 bits"),
        ({"code": 2, "bits": 8}, "type 2 with 8 bits"),
        ({"lanes": 4}, "4 lanes"),
        ({"ndim": 65}, "65 dimensions"),
        ({"ndim": -1}, "-1 dimensions"),
        ({"device_type": 10}, "device 10"),
        ({"strides": [2]}, "not C-contiguous"),
        ({"device": (10, 0)}, r"\(10, 0\).*copy it"),
    ],
)
@pytest.mark.parametrize("old", [False, True])
def test_a_tensor_that_is_refused_is_given_back(gpu, fields, says, old):
    version = {"version": None} if old else {}
    tensor = Tensor(memory(gpu), (N,), **{**version, **fields})
    with pytest.raises(BufferError, match=says):
        cuda.from_dlpack(tensor)
    gc.collect()
    assert tensor.deleted == tensor.capsules == ("device" not in fields)


@pytest.mark.parametrize("shape", [(-1,), (1 << 40, 1 << 40)])
def test_a_shape_that_cannot_be(gpu, shape):
    tensor = Tensor(memory(gpu), shape)
    for thing in (tensor, Array(memory(gpu), shape)):
        with pytest.raises(BufferError, match="says that"):
            cuda.asbuffer(thing)
    assert tensor.deleted == 1


def test_a_used_capsule(gpu):
    tensor = Tensor(memory(gpu), (N,))
    capsule = tensor.capsule()
    tensor.capsule = lambda: capsule
    view = cuda.from_dlpack(tensor)
    with pytest.raises(BufferError, match="not an unused DLPack capsule"):
        cuda.from_dlpack(tensor)
    del view
    assert tensor.deleted == 1


def test_a_device_that_is_not_there(gpu):
    tensor = Tensor(memory(gpu), (N,), device_id=7)
    with pytest.raises(ValueError, match="ordinal=7"):
        cuda.from_dlpack(tensor)
    assert tensor.deleted == 1


NO_INTERFACE = [
    5, "interface", [], {}, {"data": 5}, {"data": (1, 2, 3)}, {"data": (-1, False)},
    {"data": (1 << 70, False)}, {"data": ("x", False)}, {"shape": 5}, {"shape": ("a",)},
    {"shape": (None,)}, {"shape": (1 << 70,)}, {"typestr": 5}, {"typestr": "nonsense"},
    {"typestr": None}, {"strides": 5}, {"strides": (1, 2)}, {"strides": ("x",)},
    {"typestr": "|V4", "descr": 5},
]  # fmt: skip


@pytest.mark.parametrize("wrong", NO_INTERFACE)
def test_an_interface_that_is_none(gpu, wrong):
    class Producer:
        pass

    thing = Producer()
    thing.__cuda_array_interface__ = wrong
    if isinstance(wrong, dict):
        whole = {"data": (memory(gpu), False), "shape": (N,), "typestr": "|u1", "version": 3}
        thing.__cuda_array_interface__ = wrong and {**whole, **wrong}
    with pytest.raises(BufferError) as caught:
        cuda.asbuffer(thing)
    assert "Producer" in str(caught.value)


@pytest.mark.parametrize("device", [5, None, "cpu", (), (1,), (1, 2, 3), ("a", "b"), (1.5, 0)])
def test_a_device_that_is_no_pair(gpu, device):
    tensor = Tensor(memory(gpu), (N,), device=(2, 0))
    tensor.device = device
    with pytest.raises(ValueError, match=r"Tensor\.__dlpack_device__\(\)=.* is not a pair"):
        cuda.from_dlpack(tensor)
    assert not tensor.asked


@pytest.mark.parametrize("capsule", [None, 5, b"x", object(), (1, 0)])
def test_what_is_no_capsule(gpu, capsule):
    tensor = Tensor(memory(gpu), (N,))
    tensor.capsule = lambda: capsule
    with pytest.raises(BufferError, match="not an unused DLPack capsule"):
        cuda.from_dlpack(tensor)


@pytest.mark.parametrize("keyword", NONSENSE)
@pytest.mark.parametrize("make", [cuda.Device, cuda.Managed, cuda.Pinned])
def test_nonsense_is_refused_on_a_device_too(gpu, make, keyword):
    for value in NONSENSE[keyword]:
        try:
            Pool(8 << 20, make()).alloc(N).__dlpack__(**{keyword: value})
        except (TypeError, ValueError, BufferError) as error:
            given = repr(value) in str(error) or repr(tuple(value)) in str(error)
            assert f"{keyword}=" in str(error) and given
        else:
            assert value in (-1, 1, (2, 0)), (keyword, value)  # there are such streams and devices


def test_what_is_no_array(gpu):
    with pytest.raises(TypeError, match="neither __cuda_array_interface__ nor __dlpack__"):
        cuda.asbuffer(b"123")
    with pytest.raises(TypeError, match="has no __dlpack__"):
        cuda.from_dlpack(Array(memory(gpu), (N,)))
    with pytest.raises(BufferError, match="masked"):
        cuda.asbuffer(by_interface(gpu, mask=object()))


@WAYS
def test_a_driver_that_fails(gpu, make):
    thing = make(gpu)
    gpu.fails = dict.fromkeys(("cuPointerGetAttribute", "cuEventCreate"), INVALID_VALUE)
    if make is by_dlpack:
        gpu.fails["cuStreamGetCtx"] = INVALID_VALUE
    with pytest.raises(cuda.CudaError):
        cuda.asbuffer(thing, stream=new_handle(gpu))
    gpu.fails = {}
    gone = weakref.ref(thing)
    if make is by_dlpack:
        assert thing.deleted == thing.capsules
    del thing
    assert gone() is None


def test_read_only(gpu):
    for thing in (by_interface(gpu, readonly=True), by_dlpack(gpu, flags=READ_ONLY)):
        view = cuda.asbuffer(thing)
        assert view.readonly and view.__cuda_array_interface__["data"][1]
        for change in (lambda v: v.fill(0), lambda v: v.copy_from(bytes(N))):
            with pytest.raises(BufferError, match="read-only"):
                change(view)
        assert peek(view.address, N) == b"\x09" * N
        with pytest.raises(BufferError, match="read-only"):
            Pool(1 << 20, cuda.Device()).alloc(N).copy_to(thing)


# ---- which stream waits for which ----


@pytest.mark.parametrize("mine", [None, "theirs", "other"])
@EACH
def test_the_stream_waits_for_the_producers(gpu, kind, mine):
    theirs, other = new_handle(gpu), new_handle(gpu)
    given = {None: None, "theirs": theirs, "other": other}[mine]
    address = memory(gpu, kind)
    gpu.launch(theirs, lambda: poke(address, N, 7), [(address, N)])
    view = cuda.asbuffer(Array(address, (N,), stream=theirs), stream=given)
    seen = reads(gpu, given or 1, address, N)
    third = new_handle(gpu)
    target = Pool(1 << 20, cuda.Device()).alloc(N)
    target.copy_from(view, stream=third)
    backwards(gpu)
    assert seen == [b"\7" * N] and peek(target.address, N) == b"\7" * N


@pytest.mark.parametrize("how", ["copied out", "to pinned", "by pinned", "copied in", "filled"])
@pytest.mark.parametrize("mine", [None, "other"])
@EACH
def test_a_call_without_a_stream_waits_for_the_producers(gpu, kind, mine, how):
    """Also where this processor copies or fills, and no stream does."""
    theirs = new_handle(gpu)
    address = memory(gpu, kind)
    gpu.launch(theirs, lambda: poke(address, N, 7), [(address, N)])
    array = Array(address, (N,), stream=theirs)
    view = cuda.asbuffer(array, stream=None if mine is None else new_handle(gpu))
    pinned, seen = Pool(1 << 20, cuda.Pinned(huge_pages=None)).alloc(N), bytearray(N)
    if how == "copied in":
        view.copy_from(b"\5" * N)
    elif how == "filled":
        view.fill(5)
    elif how == "copied out":
        view.copy_to(seen)
    elif how == "to pinned":
        view.copy_to(pinned)
    else:
        pinned.copy_from(view)
    backwards(gpu)
    if how in ("copied in", "filled"):
        assert peek(address, N) == b"\5" * N
    else:
        assert (seen if how == "copied out" else peek(pinned.address, N)) == b"\7" * N


@pytest.mark.parametrize("mine", [None, 1, 2, "a handle"])
@pytest.mark.parametrize("kind", ["device", "managed"])
def test_the_producer_is_told_the_stream(gpu, kind, mine):
    given = new_handle(gpu) if mine == "a handle" else mine
    for type_ in (Tensor, OldTensor):
        tensor = type_(memory(gpu, kind), (N,), device=KINDS[kind])
        cuda.from_dlpack(tensor, given)
        assert [asked["stream"] for asked in tensor.asked] == [given or 1]
        assert tensor.deleted == 1


def test_a_producer_of_pinned_memory_is_told_none(gpu):
    tensor = by_dlpack(gpu, "pinned")
    cuda.from_dlpack(tensor, new_handle(gpu))
    assert tensor.asked == [{"stream": None, "max_version": (1, 0)}]


# ---- for how long it is theirs ----


def used_by(how, gpu, view, on):
    """Something reads it on a stream of which it is told in this way; what that sees."""
    address = view.address
    if how == "copy":
        target = Pool(1 << 20, cuda.Device()).alloc(N)
        view.copy_to(target, stream=on)
        return target
    if how == "dlpack":
        consumer = Consumer(view.__dlpack__(stream=on))
        seen = reads(gpu, on, address, N)
        consumer.delete()
    elif how == "interface":
        number = view.__cuda_array_interface__["stream"]
        assert (number is None) == (view.kind == "pinned"), "which is no device's"
        seen = reads(gpu, on, address, N)
    else:
        if how == "record":
            view.record_stream(on)
        seen = reads(gpu, on, address, N)
    return seen


HOW = ["copy", "dlpack", "interface", "record", "its own"]


@pytest.mark.parametrize(
    ("how", "own"),
    [(how, own) for how in HOW for own in ("this one", "another")][:-1],  # "its own" is not another
)
@WAYS
@EACH
def test_it_is_kept_until_the_streams_are_done(gpu, make, kind, how, own):
    """The library writes to it as soon as it is given back."""
    on = new_handle(gpu, 0 if how == "interface" else NON_BLOCKING)
    thing = make(gpu, kind)
    view = cuda.asbuffer(thing, stream=on if own == "this one" else new_handle(gpu))
    address = view.address
    given_back = []
    thing.on_delete = lambda: (poke(address, N, 1), given_back.append(address))
    gone = weakref.ref(thing)
    seen = used_by(how, gpu, view, on)
    if make is by_interface:
        del thing
    gc.collect()
    assert not given_back
    del view
    assert given_back == [address]
    backwards(gpu)
    assert (seen if isinstance(seen, list) else [peek(seen.address, N)]) == [b"\x09" * N]
    if make is by_interface:
        assert gone() is None


def test_the_default_stream_counts_once_it_was_used(gpu):
    thing = by_interface(gpu)
    address = thing.described["data"][0]
    thing.on_delete = lambda: poke(address, N, 1)
    view = cuda.asbuffer(thing)
    target = Pool(1 << 20, cuda.Device()).alloc(N)
    view.copy_to(target, stream=1)
    del thing, view
    backwards(gpu)
    assert peek(target.address, N) == b"\x09" * N


def test_nothing_is_waited_for_without_need(gpu):
    gpu.launch(1)
    tensor = by_dlpack(gpu)
    del tensor.asked[:]
    cuda.from_dlpack(tensor)
    assert tensor.deleted == 1 and gpu.queue


def test_a_cycle_is_collected(gpu):
    thing = by_interface(gpu)
    thing.buffer = cuda.asbuffer(thing)
    gone = weakref.ref(thing)
    del thing
    gc.collect()
    assert gone() is None


def test_a_forked_child_gives_nothing_back(gpu):
    tensor = by_dlpack(gpu)
    view = cuda.from_dlpack(tensor)
    child = os.fork()
    if child == 0:
        del view
        os._exit(tensor.deleted)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    del view
    assert tensor.deleted == 1


@pytest.mark.parametrize("max_version", [None, (1, 0)])
def test_there_and_back(gpu, max_version):
    """A Buffer's own capsule makes a Buffer, which holds the first one."""
    pool = Pool(1 << 20, cuda.Device())
    block = pool.alloc(N).view((-1, 4), "i8")

    class Old:
        def __dlpack__(self, stream):
            return block.__dlpack__(stream=stream, max_version=max_version)

        __dlpack_device__ = block.__dlpack_device__

    again = cuda.from_dlpack(Old())
    assert (again.address, again.shape, again.dtype) == (block.address, block.shape, block.dtype)
    with pytest.raises(BufferError, match="live exports"):
        pool.check()
        block.release()
    del again
    block.release()


# ---- copies ----


@EACH
@pytest.mark.parametrize("inward", [True, False])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("type_", [Tensor, OldTensor])
def test_copies_of_what_has_dlpack_alone(gpu, kind, inward, named, type_):
    own, s = new_handle(gpu), new_handle(gpu)
    tensor = type_(memory(gpu, kind), (4, N // 16), "f4", KINDS[kind])
    address = tensor.address
    block = Pool(1 << 20, cuda.Device(), stream=own).alloc(N)
    block.fill(3)
    given_back = []
    tensor.on_delete = lambda: (given_back.append(peek(address, N)), poke(address, N, 1))
    if inward:
        block.copy_from(tensor, stream=s if named else None)
    else:
        block.copy_to(tensor, stream=s if named else None)
    assert tensor.deleted == (not named)
    told = None if kind == "pinned" else s if named else own
    assert [asked["stream"] for asked in tensor.asked] == [told]
    backwards(gpu)
    assert tensor.deleted == (not named), "it is seen when something is looked for"
    del block
    assert tensor.deleted == 1
    assert given_back == [(b"\x09" if inward else b"\3") * N]


@pytest.mark.parametrize("source", [cuda.Device, lambda: cuda.Pinned(huge_pages=None)])
def test_copies_of_a_tensor_on_the_host(gpu, source):
    bytes_ = bytearray(range(250))
    tensor = Tensor(ctypes.addressof(ctypes.c_char.from_buffer(bytes_)), (250,), "u1", CPU)
    block = Pool(1 << 20, source()).alloc(250)
    for s in (None, new_handle(gpu)):
        poke(block.address, 250, 0)
        block.copy_from(tensor, stream=s)
        gpu.drain()
        assert peek(block.address, 250) == bytes_
        bytes_.reverse()
    block.copy_to(tensor)
    assert bytes_ == peek(block.address, 250)
    readonly = Tensor(tensor.address, (250,), "u1", CPU, flags=READ_ONLY)
    with pytest.raises(BufferError, match="read-only"):
        block.copy_to(readonly)
    assert readonly.deleted == 1


def test_copies_that_cannot_be(gpu):
    block = Pool(1 << 20, cuda.Device()).alloc(N)
    with pytest.raises(TypeError, match="neither a buffer nor __cuda_array_interface__ nor"):
        block.copy_from(object())
    tensor = Tensor(memory(gpu), (N - 1,))
    with pytest.raises(ValueError, match="slice the larger one"):
        block.copy_from(tensor)
    assert tensor.deleted == 1
    with pytest.raises(BufferError, match="not C-contiguous"):
        block.copy_from(Tensor(memory(gpu), (N,), strides=[2]))
    with pytest.raises(BufferError, match="read-only"):
        block.copy_to(by_dlpack(gpu, flags=READ_ONLY))


class Odd:
    """A stream, it says."""

    def __init__(self, value):
        self.value = value

    def __cuda_stream__(self):
        return self.value


@pytest.mark.parametrize("value", [(), (0,), [0], (0, 1, 2), None, 5, (0, None)])
def test_a_stream_that_is_no_pair(gpu, value):
    block = Pool(8 << 20, cuda.Device()).alloc(N)
    with pytest.raises(TypeError, match=r"Odd\.__cuda_stream__ gives .* not a pair"):
        block.record_stream(Odd(value))


@pytest.mark.parametrize("closed", [(), (0,), None])
def test_a_stream_that_is_no_pair_any_more(gpu, closed):
    """As a sign that it was closed."""
    stream = Odd((0, new_handle(gpu)))
    stream.close = lambda: None
    block = Pool(8 << 20, cuda.Device()).alloc(N)
    block.record_stream(stream)
    stream.value = closed
    block.fill(1)
    del block


@pytest.mark.parametrize("device", [(), (2,), None, ("a", "b")])
def test_a_side_of_a_copy_whose_device_is_no_pair(gpu, device):
    tensor = Tensor(memory(gpu), (N,), device=(2, 0))
    tensor.device = device
    with pytest.raises(ValueError, match=r"Tensor\.__dlpack_device__\(\)=.* is not a pair"):
        Pool(8 << 20, cuda.Device()).alloc(N).copy_from(tensor)
