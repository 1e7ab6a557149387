"""What tests of CUDA memory on the simulated driver share."""

import contextlib
import ctypes
import gc
import os
import time

from cuda_machine import Wrapped
from helpers import peek
from simulated_driver import simulated

from arenapy import Bump, Pool, Slab, cuda

MIB = 1 << 20
LEGACY, PER_THREAD, NON_BLOCKING = 1, 2, 1
SAME_POINTER = 91  # an attribute: the device sees registered memory at the host's address

SOURCES = {
    "device": cuda.Device,
    "driver pool": cuda.DriverPool,
    "pinned": lambda: cuda.Pinned(huge_pages=None),
    "managed": cuda.Managed,
}
HOST_VISIBLE = ["pinned", "managed"]
ALLOCATORS = {
    "bump": lambda source, **options: Bump(MIB, source, **options),
    "slab": lambda source, **options: Slab(64 << 10, 16, source, **options),
    "pool": lambda source, **options: Pool(4 * MIB, source, **options),
}


@contextlib.contextmanager
def a_gpu(leaks=False, version=13):
    """A device of 64 MiB and one of 128, all free, the first one's context current.

    All of it has to be free again at the end, unless something still lives then.
    """
    with simulated(version) as driver, driver.on(0):
        driver.memory.others = [0, 0]
        driver.attributes[SAME_POINTER] = 1
        yield driver
        driver.drain()
        gc.collect()
        driver.drain()
    if not leaks:
        assert not any(driver.memory.used.values()), "device memory was never given back"
        assert not driver.memory.registered, "memory is still registered"


def new_stream(driver, flags=NON_BLOCKING):
    return Wrapped(driver.got("cuStreamCreate", ctypes.c_void_p, flags))


def slowly_fill(driver, stream, buffer, byte):
    """A kernel that writes when the test lets it run."""
    address, nbytes = buffer.address, buffer.nbytes
    driver.launch(
        getattr(stream, "handle_", stream),
        lambda: ctypes.memset(address, byte, nbytes),
        [(address, nbytes)],
    )


def backwards(driver):
    """What was given last runs first, as far as it may: what waits for too little is seen."""
    while driver.step(-1):
        pass


def reads(driver, stream, address, nbytes):
    """A kernel; the list has what it saw once it has run."""
    seen = []
    driver.launch(
        getattr(stream, "handle_", stream),
        lambda: seen.append(peek(address, nbytes)),
        [(address, nbytes)],
    )
    return seen


def sample(data):
    """Which bytes a large block has, without a look at all of them."""
    return set(data[::512])


def samples(driver, stream, block):
    """As `reads`, of a block: a sample of it."""
    seen, address, nbytes = [], block.address, block.nbytes
    driver.launch(
        getattr(stream, "handle_", stream),
        lambda: seen.append(sample(peek(address, nbytes))),
        [(address, nbytes)],
    )
    return seen


def let_wait(driver, stream, other):
    """By an event, as a user's program does."""
    event = driver.got("cuEventCreate", ctypes.c_void_p, 2)
    assert driver.call("cuEventRecord", event, getattr(other, "handle_", other)) == 0
    assert driver.call("cuStreamWaitEvent", getattr(stream, "handle_", stream), event, 0) == 0


def graph_of(driver, stream):
    """The graph of a capture, which ends here and which nothing may have made invalid."""
    graph = driver.end_capture(getattr(stream, "handle_", stream))
    assert graph, "the capture was invalidated"
    return graph


def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.001)


def refused_in_a_child(driver, call):
    """A forked child is told so, and its driver is not called."""
    child = os.fork()
    if child == 0:
        before = driver.calls.total()
        try:
            call()
        except cuda.Unavailable as error:
            os._exit(driver.calls.total() > before or "forked" not in str(error))
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def content(buffer):
    """Its bytes now: what a simulated device has is in this process."""
    return peek(buffer.address, buffer.nbytes)


def only_one(name, source, **options):
    if name == "bump":
        return Bump(MIB, source, **options)
    if name == "slab":
        return Slab(MIB, 1, source, **options)
    return Pool(2 * MIB, source, 2 * MIB, **options)


def take(allocator):
    """The one block: all of a slab's item, of a pool or a bump."""
    return allocator.alloc(2 * MIB if isinstance(allocator, Pool) else MIB)
