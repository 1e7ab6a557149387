"""What other code does while a call of arenapy.cuda is under way. On the simulated driver.

Such a call lets other code run at many points: whenever it calls the driver, without the GIL, and
whenever it asks an object of the user for its stream, its interface, its capsule or the next pair.
Each operation here is done once for each point that it has. There, a Buffer of it is let go and
somebody else gets its bytes, if they are free.
"""

import contextlib
import itertools
import threading

import pytest
from capsules import Array, Consumer, Tensor
from cuda_machine import Wrapped
from cuda_support import HOST_VISIBLE, MIB, SOURCES, a_gpu, backwards, new_stream
from helpers import GIL, peek, poke

from arenapy import Bump, OutOfMemory, Pool, Slab, cuda
from arenapy.cuda.stream_ref import OWNERS

N = 4096
OURS, THEIRS = 3, 9
MAX_POINTS = 100

#: Of one block each.
ALLOCATORS = {
    "bump": lambda source, **options: Bump(N, source, **options),
    "slab": lambda source, **options: Slab(N, 1, source, **options),
    "pool": lambda source, **options: Pool(2 * MIB, source, 2 * MIB, **options),
}


class Points:
    """`act` is called at the n-th point of what is done within `during`."""

    def __init__(self):
        self.act, self.left = None, 0

    def __call__(self, *name):
        self.left -= 1
        if self.left == 0 and self.act:
            act, self.act = self.act, None
            act()

    @contextlib.contextmanager
    def during(self, gpu, n, act):
        gpu.before_call, self.act, self.left = self, act, n
        try:
            yield
        finally:
            gpu.before_call = self.act = None


class Named(Wrapped):
    """A stream object, which says so in code of its own."""

    def __init__(self, handle, point):
        super().__init__(handle)
        self.point = point

    def __cuda_stream__(self):
        self.point()
        return super().__cuda_stream__()


class AskedArray(Array):
    @property
    def __cuda_array_interface__(self):
        self.point()
        return self.described


class AskedTensor(Tensor):
    def __dlpack_device__(self):
        self.point()
        return super().__dlpack_device__()

    def __dlpack__(self, **arguments):
        self.point()
        return super().__dlpack__(**arguments)


class Scene:
    """Two blocks, of an allocator each, and streams."""

    def __init__(self, gpu, allocator, source, stream):
        self.gpu, self.host = gpu, source in HOST_VISIBLE
        self.point = Points()
        self.own = Named(new_stream(gpu).handle_, self.point)
        options = {} if self.host else {"stream": self.own}
        make = ALLOCATORS[allocator]
        self.allocators = [make(SOURCES[source](), **options) for _ in range(2)]
        self.blocks = [self.take(i) for i in range(2)]
        for block in self.blocks:
            poke(block.address, N, OURS)
        streams = {"own": self.own, "other": Named(new_stream(gpu).handle_, self.point), None: None}
        self.stream = streams[stream]
        self.other = cuda.Device().region(N).buffer()
        poke(self.other.address, N, OURS)
        self.victims, self.kept = [], []

    def take(self, i):
        one = self.allocators[i]
        return one.alloc(2 * MIB if isinstance(one, Pool) else N)

    def let_go(self, i, how):
        one, block = self.allocators[i], self.blocks[i]
        with contextlib.suppress(BufferError):  # it is in use
            one.reset() if how == "reset" else block.release()
        del block
        with contextlib.suppress(OutOfMemory):
            victim = self.take(i)
            if self.host:
                poke(victim.address, N, THEIRS)
            else:
                address = victim.address
                self.gpu.launch(self.own.handle_, lambda: poke(address, N, THEIRS), [(address, N)])
            self.victims.append(victim)


# ---- operations ----

OPERATIONS = {}


def operation(function):
    OPERATIONS[function.__name__] = function
    return function


@operation
def copies_a_block(scene):
    target, source = scene.blocks
    target.copy_from(source, stream=scene.stream)


@operation
def copies_slices(scene):
    target, source = (block[: N // 2] for block in scene.blocks)
    target.copy_from(source, stream=scene.stream)


@operation
def copies_to_the_host(scene):
    got = bytearray(N)
    scene.blocks[0][:N].copy_to(got, stream=scene.stream)
    return got


@operation
def copies_from_an_interface(scene):
    array = AskedArray(scene.other.address, (N,))
    array.point = scene.point
    scene.blocks[0][:N].copy_from(array, stream=scene.stream)


@operation
def copies_from_dlpack(scene):
    tensor = AskedTensor(scene.other.address, (N,))
    tensor.point = scene.point
    scene.blocks[0][:N].copy_from(tensor, stream=scene.stream)


@operation
def copies_a_batch(scene):
    def pairs():
        target, source = scene.blocks
        for half in (slice(0, N // 2), slice(N // 2, N)):
            yield target[half], source[half]
            scene.point()

    cuda.copy_batch(pairs(), stream=scene.stream)


@operation
def fills(scene):
    scene.blocks[0].fill(OURS, stream=scene.stream)


@operation
def fills_a_slice(scene):
    scene.blocks[0][: N // 2].fill(OURS, stream=scene.stream)


@operation
def prefetches(scene):
    """Of managed memory."""
    cuda.prefetch(scene.blocks[0], 0, stream=scene.stream)
    cuda.prefetch(scene.blocks[0][: N // 2], -1, stream=scene.stream)


@operation
def lends(scene):
    """To a consumer, which writes."""
    block = scene.blocks[0]
    stream = scene.stream.handle_ if scene.stream else 1
    consumer = Consumer(block.__dlpack__(stream=stream))
    scene.kept.append(consumer)
    address = consumer.tensor.data
    scene.gpu.launch(stream, lambda: poke(address, N, OURS), [(address, N)])


@operation
def is_read_by_the_interface(scene):
    block = scene.blocks[0]
    address = block.__cuda_array_interface__["data"][0]
    stream = new_stream(scene.gpu, 0)
    scene.gpu.launch(stream.handle_, lambda: poke(address, N, OURS), [(address, N)])


def attempt(gpu, scene, operate, n, which, how):
    """Once, with something done at the n-th point; False: there is no such point."""
    got, reached = None, []

    def act():
        reached.append(n)
        scene.let_go(which, how)

    try:
        with scene.point.during(gpu, n, act):
            got = operate(scene)
    except (BufferError, ValueError):
        pass  # it was closed before anything was queued
    backwards(gpu)
    assert not got or set(got) == {OURS}, "it copied what is somebody else's"
    for victim in scene.victims:
        assert set(peek(victim.address, N)) == {THEIRS}, f"point {n}: somebody else's bytes"
    for one in scene.kept:
        if isinstance(one, Consumer):
            one.delete()
    block = scene.blocks[1 - which]
    assert block.closed or set(peek(block.address, N)) == {OURS}
    return reached


@pytest.mark.parametrize(
    ("allocator", "source"),
    [("bump", "device"), ("slab", "device"), ("pool", "device"), ("slab", "pinned")],
)
@pytest.mark.parametrize("operate", OPERATIONS.values(), ids=list(OPERATIONS))
@pytest.mark.sampled
@pytest.mark.full
def test_a_buffer_that_is_let_go_meanwhile(operate, allocator, source):
    if operate is prefetches:
        source = "managed"
    sides = (0, 1) if operate in (copies_a_block, copies_slices, copies_a_batch) else (0,)
    ways = ["release", *["reset"] * (allocator == "bump")]
    with a_gpu() as gpu:
        for stream, which, how in itertools.product(("own", "other", None), sides, ways):
            for n in range(1, MAX_POINTS):
                if not attempt(gpu, Scene(gpu, allocator, source, stream), operate, n, which, how):
                    break
            assert n < MAX_POINTS - 1


# ---- code of the user that waits for a lock of the user ----


class Waits(Wrapped):
    """A stream that waits for a lock of its own, when it ends or is asked for its handle."""

    def __init__(self, gpu, when):
        super().__init__(new_stream(gpu).handle_)
        self.when, self.armed = when, False
        self.lock, self.inside = threading.Lock(), threading.Event()

    def close(self):
        pass

    def wait(self, when):
        if self.armed and self.when == when:
            self.armed = False
            self.inside.set()
            with self.lock:
                pass

    def __cuda_stream__(self):
        self.wait("asked")
        return super().__cuda_stream__()

    def __del__(self):
        self.wait("ends")


OWNERS[Waits.__module__, Waits.__qualname__] = lambda stream: True


def a_last_reference(gpu, s):
    """It goes when statistics are made, while somebody else waits for a block."""
    slab = Slab(N, 2, cuda.Device())
    blocks, other = [slab.alloc(), slab.alloc()], new_stream(gpu)
    for block, one in zip(blocks, (s, other), strict=True):
        block.record_stream(one)
        gpu.launch(one.handle_)
    for _ in range(4):  # an allocator keeps those that it named last
        blocks[1].record_stream(new_stream(gpu))
    blocks.clear()
    gpu.step(), gpu.step(1)  # the kernel on `s`, and the event after it
    return slab.stats, lambda: [slab.alloc(), slab.alloc()]


def memory_given_back(gpu, s):
    """The driver's pool asks the streams that are known, while somebody else makes one."""
    slab, regions = Slab(N, 2, cuda.Device(), stream=s), [cuda.DriverPool().region(N)]

    def act():
        regions.clear()
        return slab

    return act, cuda.Stream


@pytest.mark.skipif(not GIL, reason="what a thread drops may end in the one that made it")
@pytest.mark.parametrize(
    ("when", "make"), [("ends", a_last_reference), ("asked", memory_given_back)]
)
def test_a_user_who_holds_a_lock_is_not_waited_for(gpu, when, make):
    s = Waits(gpu, when)
    lock, inside = s.lock, s.inside
    acts = make(gpu, s)
    s.armed = True
    del s

    def run(act):
        with gpu.on(0):
            act()

    threads = [threading.Thread(target=run, args=(act,), daemon=True) for act in acts]
    with lock:
        threads[0].start()
        assert inside.wait(10)
        threads[1].start()
        threads[1].join(3)
        waits = threads[1].is_alive()
    for thread in threads:
        thread.join()
    assert not waits
