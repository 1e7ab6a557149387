"""What is done while each of its driver calls fails in turn: `OPERATIONS`, by name.

Each is given a simulated driver, makes what it needs and gives an `Act`. What the act makes and
returns is dropped after it. Kernels that are launched run when the driver is drained, or waits.
Those of `cuda_fault_uses` are among them.
"""

import gc
import socket

import cuda_fault_uses  # adds its own
from cuda_fault_acts import (
    OPERATIONS,
    N,
    asserted,
    for_each,
    in_use,
    operation,
    pool_over,
    usable,
)
from cuda_support import (
    ALLOCATORS,
    LEGACY,
    MIB,
    PER_THREAD,
    SOURCES,
    content,
    new_stream,
    only_one,
    slowly_fill,
    take,
)
from injection import Act
from simulated_driver import INVALID_HANDLE, INVALID_VALUE

import arenapy
from arenapy import Bump, Pool, cuda
from arenapy.cuda import driver

__all__ = ["OPERATIONS", "cuda_fault_uses"]


# ---- the driver, and its devices ----


@operation("first use")
def first_use(gpu):
    return Act(lambda: driver.use(gpu.entries), good=lambda result: cuda.devices())


@operation("memory_info, first")
def memory_info(gpu):
    return Act(lambda: cuda.memory_info(1))


@operation("devices")
def devices(gpu):
    return Act(cuda.devices)


@operation("device_heap_limit")
def heap_limit(gpu):
    return Act(
        lambda: cuda.device_heap_limit(MIB), good=lambda limit: asserted(limit == gpu.heap == MIB)
    )


TEXTS = {
    "CUDA_ERROR_INVALID_VALUE (invalid argument)",
    "CUDA_ERROR_INVALID_VALUE (unknown)",
    "unknown (unknown)",
}


@operation("the text of an error")
def text(gpu):
    """One call has failed before the one that is to."""
    cuda.memory_info()

    def act():
        gpu.fail_at("cuMemGetInfo", 1, INVALID_VALUE)
        try:
            cuda.memory_info()
        except cuda.CudaError as error:
            assert error.result == INVALID_VALUE
            return str(error)
        raise AssertionError("it did not fail")

    def good(text):
        assert text.removeprefix("cuMemGetInfo failed: ") in TEXTS

    return Act(act, good=good)


# ---- regions and allocators ----


@for_each(SOURCES, "region of {}")
def region(gpu, source):
    recipe = SOURCES[source]()
    return Act(lambda: recipe.region(MIB), good=lambda region: usable(region.buffer()))


@for_each(SOURCES, "end of a region of {}")
def end_of_region(gpu, source):
    regions = []
    recipe = SOURCES[source]()
    regions.append(recipe.region(MIB))
    return Act(regions.clear, end=lambda: last_look(source, recipe))


def last_look(source, recipe):
    """Now the driver's pool gives back what it could not."""
    if source == "driver pool":
        recipe.trim()


@for_each(SOURCES, "end of a Pool over {}")
def end_of_pool(gpu, source):
    recipe = SOURCES[source]()
    s = new_stream(gpu)
    things = [Pool(MIB, recipe)]
    b = things[0].alloc(N)
    b.record_stream(s)
    slowly_fill(gpu, s, b, 1)
    del b

    def act():
        things.clear()
        gc.collect()

    return Act(act, end=lambda: last_look(source, recipe))


@operation("DriverPool trim")
def trim_driver(gpu):
    source = cuda.DriverPool()
    source.region(MIB).close()
    gpu.drain()
    good = asserted_later(lambda: gpu.memory.used[0] == 0)
    return Act(source.trim, good=good)


def asserted_later(condition):
    def good(result):
        assert condition()

    return good


@operation("end of a DriverPool")
def end_of_driver_pool(gpu):
    things = [cuda.DriverPool()]
    things[0].region(MIB).close()
    things[0].trim()
    return Act(things.clear)


@for_each(ALLOCATORS, "{}()")
def allocator(gpu, name):
    return Act(lambda: ALLOCATORS[name](cuda.Device()), good=lambda one: usable(one.alloc(N)))


@for_each(SOURCES, "pool alloc, first, over {}")
def first_block_of_pool(gpu, source):
    one = pool_over(source)
    return Act(lambda: one.alloc(N), view=lambda: in_use(one), good=usable)


@operation("Pool(stream=)")
def pool_of_a_stream(gpu):
    s = new_stream(gpu)
    return Act(lambda: Pool(MIB, cuda.Device(), stream=s), good=lambda pool: usable(pool.alloc(N)))


@for_each(ALLOCATORS, "{} alloc on another stream")
def other_stream(gpu, name):
    one, s = ALLOCATORS[name](cuda.Device()), new_stream(gpu)
    one.alloc(N).fill(1)
    return Act(lambda: one.alloc(N, stream=s), view=lambda: in_use(one), good=usable)


@for_each(SOURCES, "alloc of memory in use, over {}")
def waiting_block(gpu, source):
    """The only block has to come back first."""
    one, s = only_one("pool", SOURCES[source]()), new_stream(gpu)

    def use():
        b = take(one)
        b.record_stream(s)
        slowly_fill(gpu, s, b, 1)
        b.release()

    use()
    return Act(lambda: take(one), good=usable, view=lambda: in_use(one)[:-1])


@operation("slab alloc of memory in use, by integers")
def waiting_item(gpu):
    one = only_one("slab", cuda.Device())
    s = new_stream(gpu)
    b = take(one)
    b.record_stream(s.handle_)
    b.record_stream(PER_THREAD)
    slowly_fill(gpu, s, b, 1)
    b.release()
    return Act(lambda: take(one), good=usable, view=lambda: in_use(one)[:-1])


@for_each(SOURCES, "release, over {}")
def release(gpu, source):
    return released(gpu, source, [new_stream(gpu), new_stream(gpu).handle_, LEGACY])


@operation("release by an integer")
def release_by_an_integer(gpu):
    return released(gpu, "device", [new_stream(gpu).handle_])


def released(gpu, source, streams):
    one = pool_over(source)

    def act():
        done = []
        b = one.alloc(N)
        for s in streams:
            b.record_stream(s)
            work = [(b.address, b.nbytes)]
            gpu.launch(getattr(s, "handle_", s), lambda: done.append(1), work)
        b.release()
        pending = one.stats().pending_bytes
        assert len(done) == len(streams) or pending, "it is free, and kernels are to use it"

    return Act(act, view=lambda: in_use(one))


@operation("pool trim")
def trim(gpu):
    one, s = pool_over("device"), new_stream(gpu)
    b = one.alloc(N)
    b.record_stream(s)
    slowly_fill(gpu, s, b, 1)
    b.release()
    return Act(one.trim, view=lambda: in_use(one))


# ---- memory that grows in place ----


def growing_pool():
    pool = Pool(32 * MIB, cuda.Device(grow=True))
    return pool, pool.alloc(MIB)


@operation("growing pool alloc, first")
def first_of_growing(gpu):
    one = Pool(32 * MIB, cuda.Device(grow=True))
    return Act(lambda: one.alloc(5 * MIB), view=lambda: in_use(one), good=usable)


@operation("growing pool alloc")
def growth(gpu):
    one, kept = growing_pool()
    return Act(
        lambda: one.alloc(5 * MIB), view=lambda: in_use(one), good=usable, end=lambda: usable(kept)
    )


@operation("growing pool trim")
def trim_growing(gpu):
    one, kept = growing_pool()
    done = []

    def act():
        b = one.alloc(5 * MIB)
        gpu.launch(LEGACY, lambda: done.append(1), [(b.address, b.nbytes)])
        b.release()
        before = one.stats().reserved_bytes
        one.trim()
        assert done or one.stats().reserved_bytes == before, "unmapped under a kernel"

    return Act(act, view=lambda: in_use(one), end=lambda: usable(kept))


@operation("sent block of a growing pool")
def sending(gpu):
    """And received, in this process."""
    one, kept = growing_pool()
    usable(kept)

    def act():
        here, there = socket.socketpair()
        with here, there:
            arenapy.send(here, kept)
            received = arenapy.receive(there)
        received.fill(8)
        gpu.drain()
        assert content(received) == content(kept)

    return Act(act, view=lambda: in_use(one), end=lambda: usable(kept))


@operation("end of a growing Pool")
def end_of_growing(gpu):
    things = list(growing_pool())

    def act():
        if things:
            slowly_fill(gpu, LEGACY, things[1], 1)
        things.clear()
        gc.collect()

    def end():
        """What could not be given back is given back when the next one is made."""
        growing_pool()
        gc.collect()
        growing_pool()

    return Act(act, end=end)


@operation("growing bump alloc and trim")
def growing_bump(gpu):
    one = Bump(MIB, cuda.Device(grow=True), 32 * MIB)

    def act():
        with one.scope():
            usable(one.alloc(5 * MIB))
        one.trim()

    return Act(act, view=lambda: in_use(one), end=lambda: usable(one.alloc(5 * MIB)))


@operation("bump reset")
def reset(gpu):
    one, s = ALLOCATORS["bump"](cuda.Device()), new_stream(gpu)
    b = one.alloc(N, stream=s)
    b.release()
    return Act(
        lambda: one.reset(stream=s), view=lambda: in_use(one), end=lambda: usable(one.alloc(N))
    )


@operation("a stream that somebody has destroyed")
def last_resort(gpu):
    """Only the context can tell then what it has done."""
    one, s = only_one("pool", cuda.Device()), new_stream(gpu)

    def act():
        done = []
        b = take(one)
        b.record_stream(s)
        gpu.launch(s.handle_, lambda: done.append(1), [(b.address, b.nbytes)])
        gpu.fail_at("cuEventRecord", 1, INVALID_HANDLE)
        b.release()
        pending = one.stats().pending_bytes
        assert done or pending, "it is free, and a kernel is to use it"

    return Act(act, view=lambda: in_use(one), end=lambda: usable(take(one)))
