"""Arrays of other libraries that get other storage, or give theirs up, while it is in use.

What keeps a storage is different with each library: another tensor of it (torch), its capsule of
DLPack (JAX), or nothing but the array, which then has to leave it alone. On the simulated driver.
"""

import weakref

import pytest
from capsules import Tensor
from cuda_machine import Wrapped
from cuda_support import MIB, backwards, graph_of, new_stream
from helpers import peek, poke
from test_cuda_between_calls import MAX_POINTS, Points
from test_cuda_foreign import memory

from arenapy import Pool, cuda

N = 4096
OURS, OTHERS, FREED = 3, 5, 0xEE


class Storage:
    """Whose memory is somebody else's at once when it ends."""

    def __init__(self, gpu, byte):
        self.gpu = gpu
        self.address = memory(gpu, nbytes=N)
        poke(self.address, N, byte)

    def __del__(self):
        if not self.gpu.closed:
            poke(self.address, N, FREED)


class Held:
    """What a capsule keeps, until its deleter is called."""

    def __init__(self, *things):
        self.things = things

    def capsule(self, address):
        tensor = Tensor(address, (N,))
        tensor.on_delete = self.things_end
        return tensor.capsule()

    def things_end(self):
        self.things = ()


class Library:
    """An array; `point` is called by each of its methods. `made`: their work on its storage."""

    def __init__(self, gpu, storage, point, stream=None):
        self.gpu, self.storage, self.point, self.stream = gpu, storage, point, stream
        self.asked = []

    def swap(self):
        self.storage = Storage(self.gpu, OTHERS)

    def described(self):
        self.point()
        return {"shape": (N,), "typestr": "|u1", "data": (self.storage.address, False),
                "version": 3, "stream": self.stream}  # fmt: skip

    def kept_by_capsule(self):
        return self.storage

    def __dlpack_device__(self):
        self.point()
        return 2, 0

    def __dlpack__(self, *, stream=None, max_version=None):
        self.point()
        self.asked.append(stream)
        held = Held(self.kept_by_capsule())
        return held.capsule(self.storage.address)


class Dlpack(Library):
    """As cuda.core's."""


class Both(Library):
    """As JAX's, which can give it up."""

    __cuda_array_interface__ = property(Library.described)


class Torch(Both):
    """Its capsule keeps the tensor, and whatever storage that has."""

    def kept_by_capsule(self):
        return self

    def detach(self):
        self.point()
        other = type(self)(self.gpu, self.storage, self.point)
        other.asked = self.asked
        return other


class Refusing(Torch):
    """A tensor whose type DLPack has not."""

    def __dlpack__(self, **arguments):
        self.point()
        raise BufferError("no such type")


class Copying(Torch):
    """Its capsule is one of a copy."""

    def __dlpack__(self, **arguments):
        self.point()
        copy = Storage(self.gpu, OTHERS)
        return Held(copy).capsule(copy.address)


LIBRARIES = (Dlpack, Both, Torch, Refusing, Copying)
EACH = pytest.mark.parametrize("library", LIBRARIES, ids=[one.__name__ for one in LIBRARIES])


def copies_from(block, array, stream):
    block.copy_from(array, stream=stream)


def copies_a_batch(block, array, stream):
    cuda.copy_batch([(block, array)], stream=stream)


def borrows(block, array, stream):
    buffer = cuda.asbuffer(array, stream=stream)
    buffer.copy_to(block, stream=stream)
    return buffer


@EACH
@pytest.mark.parametrize("operate", [copies_from, copies_a_batch, borrows])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.sampled
def test_the_storage_is_kept_until_it_is_read(gpu, library, operate, named):
    """At each point of the call, and when it has returned, it has another one."""
    pool = Pool(4 * MIB, cuda.Device())
    for n in range(1, MAX_POINTS):
        block, s = pool.alloc(N), new_stream(gpu)
        point, reached = Points(), []
        array = library(gpu, Storage(gpu, OURS), point)

        def act(array=array, reached=reached):
            reached.append(n)  # noqa: B023
            array.swap()

        with point.during(gpu, n, act):
            kept = operate(block, array, s if named else None)
        array.swap()
        backwards(gpu)
        assert set(peek(block.address, N)) in ({OURS}, {OTHERS}), f"point {n}"
        if kept is not None:
            assert set(peek(kept.address, N)) in ({OURS}, {OTHERS}), f"point {n}"
        del block, kept, array, act
        if not reached:
            return
    raise AssertionError("there is no end of it")


@EACH
def test_it_is_kept_no_longer(gpu, library):
    pool, s = Pool(4 * MIB, cuda.Device()), new_stream(gpu)
    block = pool.alloc(N)
    array = library(gpu, Storage(gpu, OURS), Points())
    gone = weakref.ref(array.storage)
    block.copy_from(array, stream=s)
    del array
    assert gone() is not None
    gpu.drain()
    pool.stats()
    assert gone() is None
    array = library(gpu, Storage(gpu, OURS), Points())
    gone = weakref.ref(array.storage)
    buffer = cuda.asbuffer(array)
    del array
    assert gone() is not None
    del buffer
    assert gone() is None


@pytest.mark.parametrize("library", [Both, Torch])
@pytest.mark.parametrize("says", [None, "its own", "another"])
def test_who_waits_for_the_library(gpu, library, says):
    """It is told the stream unless its interface names one, which that stream waits for."""
    s, theirs = new_stream(gpu), new_stream(gpu)
    block = Pool(4 * MIB, cuda.Device()).alloc(N)
    stream = {None: None, "its own": s.handle_, "another": theirs.handle_}[says]
    array = library(gpu, Storage(gpu, OURS), Points(), stream)
    if library is Torch:
        array.detach = None  # which forgets the stream
    block.copy_from(array, stream=s)
    assert array.asked == [s.handle_ if says is None else -1]


@pytest.mark.parametrize("library", [Dlpack, Both, Torch, Refusing])
def test_in_a_capture_nobody_is_asked_to_wait(gpu, library):
    """What the library would do to that end makes the capture invalid."""
    s = Wrapped(new_stream(gpu).handle_)
    pool = Pool(4 * MIB, cuda.Device(), stream=new_stream(gpu))
    block = pool.alloc(N)
    array = library(gpu, Storage(gpu, OURS), Points())
    gpu.begin_capture(s.handle_)
    block.copy_from(array, stream=s)
    graph = graph_of(gpu, s)
    assert array.asked == [-1] or library is Refusing
    array.swap()
    for _ in range(2):
        poke(block.address, N, 0)
        gpu.replay(graph, s.handle_)
        gpu.drain()
        assert set(peek(block.address, N)) == {OURS}, "the graph's, as long as that is there"
    gpu.destroy_graph(graph)


@pytest.mark.parametrize("operate", [copies_from, copies_a_batch])
def test_a_call_that_is_refused_says_why(gpu, operate):
    """The end of a library's capsule may clear an exception that is on its way."""
    captured = new_stream(gpu, 0)
    block = Pool(4 * MIB, cuda.Device()).alloc(N)
    array = Both(gpu, Storage(gpu, OURS), Points())
    gpu.begin_capture(captured.handle_)
    with pytest.raises(cuda.CudaError, match="legacy default stream"):
        operate(block, array, captured)
    gpu.destroy_graph(graph_of(gpu, captured))
