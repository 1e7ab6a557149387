"""On a real GPU: threads over one DriverPool, streams whose handles are not their own, cuda.core.

What can be made unsafe has a twin that has to find corruption.
"""

import functools
import time

import pytest
from cuda_support import PER_THREAD, until
from helpers import in_threads
from real_gpu import done, judge

from arenapy import Bump, Pool, cuda

KIB, MIB = 1 << 10, 1 << 20
LONG = 5_000  # microseconds that a kernel waits before it writes
ROUNDS = 20
SECONDS = 4
HANDLES = 64  # that are made until one is used again


# ---- one DriverPool, many threads ----


def test_threads_over_one_driver_pool(gpu):
    """What one gives back is not freed for another one's sake, before its own kernels are done."""
    # It keeps what it gets back, and hands it out at once.
    source, ends = cuda.DriverPool(), time.monotonic() + SECONDS

    def work(k):
        done(gpu.driver.cuCtxPushCurrent(gpu.context))
        stream = cuda.Stream()
        pool = Pool(64 * MIB, source, stream=stream)
        for i in range(1_000_000):
            block = pool.alloc(4 * MIB)
            gpu.write_slowly(stream, block.address, 4 * MIB, k << 24 | i, 300, 32)
            gpu.count_wrong(stream, block.address, 4 * MIB, k << 24 | i, 32)
            del block
            pool.trim()
            if time.monotonic() > ends:
                return

    in_threads(*[functools.partial(work, k) for k in range(4)])
    assert gpu.how_many_wrong() == 0


# ---- streams that do not keep their handle ----


class Says:
    def __init__(self, handle):
        self.number = handle

    def __cuda_stream__(self):
        return 0, self.number


def of_torch(make):
    torch = pytest.importorskip("torch")
    torch.zeros(1, device="cuda")
    return make(torch)


def subclass(base, handle):
    return type("Stream", (base,), {})(handle)


def of_core(handle):
    return pytest.importorskip("cuda.core").Stream.from_handle(handle)


def of_numba(handle):
    return pytest.importorskip("numba.cuda").external_stream(handle)


def of_cupy(handle):
    return pytest.importorskip("cupy").cuda.ExternalStream(handle)


WRAPPERS = {
    "integer": lambda handle: handle,
    "object": Says,
    "cuda.core": of_core,
    "numba": of_numba,
    "CuPy": of_cupy,
    "CuPy subclass": lambda handle: subclass(
        pytest.importorskip("cupy").cuda.ExternalStream, handle
    ),
    "torch": lambda handle: of_torch(lambda torch: torch.cuda.ExternalStream(handle)),
    "torch subclass": lambda handle: of_torch(
        lambda torch: subclass(torch.cuda.ExternalStream, handle)
    ),
    "torch external": lambda handle: of_torch(
        lambda torch: torch.cuda.get_stream_from_external(handle, 0)
    ),
}


def rounds_with_reused_handles(gpu, wrap, safe):
    """Kernels on streams that are destroyed under them, and whose handles others get."""
    other = cuda.Stream()
    pool = Pool(2 * MIB, cuda.Device(), 2 * MIB, stream=other)
    arena = pool.alloc(2 * MIB)  # all of it, in the order of `other`
    del arena
    for i in range(ROUNDS):
        handle = gpu.stream()
        stream = wrap(handle)
        # A small part of all, so that the release alone records no event for who owns its stream.
        block = pool.alloc(64 * KIB)
        address = block.address
        gpu.synchronize()
        gpu.write_slowly(handle, address, 64 * KIB, i, LONG)
        if safe:
            block.record_stream(stream)
        del block
        done(gpu.driver.cuStreamDestroy(handle))
        made = [gpu.stream()]
        while made[-1] != handle and len(made) < HANDLES:
            made.append(gpu.stream())
        if made[-1] != handle:
            pytest.skip("the driver did not use the handle again")
        pool.stats()  # asks the streams
        again = pool.alloc(2 * MIB)
        gpu.write_slowly(other, again.address, 2 * MIB, ~i)
        gpu.wait(other, 2 * LONG)
        gpu.count_wrong(other, again.address, 2 * MIB, ~i)
        del again, stream
        gpu.synchronize()
        for one in made:
            done(gpu.driver.cuStreamDestroy(one))
    return gpu.how_many_wrong()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("who", WRAPPERS)
def test_a_handle_that_is_destroyed_and_used_again(gpu, who):
    assert rounds_with_reused_handles(gpu, WRAPPERS[who], True) == 0


def test_without_the_record_it_is_overwritten(gpu):
    assert rounds_with_reused_handles(gpu, WRAPPERS["integer"], False) > 0


def owners(gpu):
    """Objects of libraries, and whether arenapy is to know that they keep their stream."""
    torch, cupy = pytest.importorskip("torch"), pytest.importorskip("cupy")
    numba, core = pytest.importorskip("numba.cuda"), pytest.importorskip("cuda.core")
    device = core.Device(0)
    device.set_current()
    ours = cuda.Stream()
    return [
        (torch.cuda.Stream(), True),
        (cupy.cuda.Stream(non_blocking=True), True),
        (numba.stream(), True),
        (ours, True),
        (device.create_stream(ours), True),
        (numba.external_stream(ours.handle), True),
        (device.create_stream(), True),
        (core.Stream.from_handle(gpu.stream()), False),
    ]


def test_owners_are_known(gpu):
    """Their blocks come from a cache of their stream: the same bytes, though it is at work."""
    for stream, known in owners(gpu):
        pool = Pool(64 * MIB, cuda.Device())
        block = pool.alloc(64 * KIB, stream=stream)
        address = block.address
        handle = stream.__cuda_stream__()[1] if hasattr(stream, "__cuda_stream__") else None
        handle = getattr(stream, "cuda_stream", handle)
        gpu.write_slowly(handle, address, 64 * KIB, 1, LONG)
        del block
        again = pool.alloc(64 * KIB, stream=stream)
        assert (again.address == address) == known, stream
        gpu.synchronize()


# ---- cuda.core ----


@pytest.mark.parametrize("way", ["reset", "scope", "mark"])
def test_two_buffers_of_cuda_core_have_no_byte_in_common(gpu, core, way):
    stream, on = core.LEGACY_DEFAULT_STREAM, 1  # the arena's own: what others use is held anyway
    for i in range(ROUNDS):
        arena = Bump(MIB, cuda.Device())
        resource = cuda.memory_resource(arena)
        one = resource.allocate(64 * KIB, stream=stream)
        gpu.write_slowly(on, int(one.handle), 64 * KIB, i)
        if way == "scope":
            with arena.scope():
                pass
        arena.reset(*[arena.mark()] * (way == "mark"))
        arena.reset()
        two = resource.allocate(64 * KIB, stream=stream)
        gpu.write_slowly(on, int(two.handle), 64 * KIB, ~i)
        gpu.count_wrong(on, int(one.handle), 64 * KIB, i)
        gpu.count_wrong(on, int(two.handle), 64 * KIB, ~i)
        one.close()
        two.close()
    assert gpu.how_many_wrong() == 0


@pytest.mark.parametrize("name", ["LEGACY_DEFAULT_STREAM", "PER_THREAD_DEFAULT_STREAM"])
def test_a_default_stream_in_a_thread_without_a_context(gpu, core, name):
    pool = Pool(8 * MIB, cuda.Device())

    def work():
        block = pool.alloc(MIB, stream=getattr(core, name))
        block.fill(1, stream=getattr(core, name))
        block.record_stream(getattr(core, name))

    in_threads(work)


def test_a_stream_that_was_closed_lives_as_long_as_its_blocks(gpu, core):
    """cuda.core destroys a stream with the last object that shares it, of which arenapy has one."""
    device = core.Device(0)
    device.set_current()
    for i in range(ROUNDS):
        pool = Pool(64 * MIB, cuda.Device())
        stream = device.create_stream()
        handle, block = int(stream.handle), pool.alloc(MIB, stream=stream)
        gpu.write_slowly(handle, block.address, MIB, i, LONG)
        stream.close()
        made = [gpu.stream() for _ in range(4)]
        assert handle not in made
        gpu.count_wrong(handle, block.address, MIB, i)
        del block, stream
        gpu.synchronize()
        for one in made:
            done(gpu.driver.cuStreamDestroy(one))
    assert gpu.how_many_wrong() == 0


def test_caches_of_threads_default_streams(gpu):
    """Threads come and go. What one kept for its default stream is another one's afterwards."""
    pool = Pool(16 * MIB, cuda.Device())

    def work(k):
        done(gpu.driver.cuCtxPushCurrent(gpu.context))
        for i in range(ROUNDS):
            block = pool.alloc(MIB, stream=PER_THREAD)
            gpu.write_slowly(PER_THREAD, block.address, MIB, k << 8 | i, 50)
            gpu.count_wrong(PER_THREAD, block.address, MIB, k << 8 | i)
            del block

    for round_ in range(8):
        in_threads(*[functools.partial(work, 4 * round_ + k) for k in range(4)])
    assert gpu.how_many_wrong() == 0
    for _ in range(3):
        gpu.synchronize()
        pool.trim()
    assert pool.stats().reserved_bytes == 0


def test_a_stream_that_was_closed_is_refused(gpu, core):
    stream = core.Device(0).create_stream()
    block = Pool(8 * MIB, cuda.Device()).alloc(MIB)
    stream.close()
    with pytest.raises((ValueError, RuntimeError), match="closed"):
        block.record_stream(stream)


# ---- blocks that move, and caches of streams ----


@pytest.mark.parametrize("source", [cuda.Device, cuda.DriverPool, cuda.Pinned, cuda.Managed])
@pytest.mark.parametrize("safe", [True, False])
def test_a_block_that_moves_to_grow(gpu, source, safe):
    stream, after = cuda.Stream(), gpu.stream()
    arena = Bump(16 * MIB, source())
    for i in range(ROUNDS):
        block = arena.alloc(MIB)
        gpu.synchronize()
        gpu.write_slowly(stream, block.address, MIB, i + 1, LONG)
        if safe:
            block.record_stream(stream)
        behind = arena.alloc(1)
        block = arena.grow(block, 2 * MIB)
        gpu.synchronize(1)
        gpu.count_wrong(after, block.address, MIB, i + 1)
        gpu.synchronize()
        del block, behind
        arena.reset()
    judge(gpu, safe)


def test_time_takes_what_streams_keep(gpu):
    pool = Pool(None, cuda.Device(), trim_after=1, trim_thread=True)
    for _ in range(8):
        pool.alloc(4 * MIB, stream=cuda.Stream()).release()
    assert pool.stats().reserved_bytes >= 4 * MIB  # a stream's handle may come again
    until(lambda: not pool.stats().reserved_bytes)


def test_streams_come_and_go(gpu):
    pool = Pool(None, cuda.Device())
    for i in range(400):
        stream = cuda.Stream()
        block = pool.alloc(64 * KIB, stream=stream)
        gpu.write_slowly(stream, block.address, 64 * KIB, i, 20)
        gpu.count_wrong(stream, block.address, 64 * KIB, i)
        del block, stream
    assert gpu.how_many_wrong() == 0
    assert pool.stats().reserved_bytes < 400 * MIB
    pool.check()
