"""What tests of CUDA memory on the simulated driver share."""

import contextlib
import ctypes
import gc

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


def content(buffer):
    """Its bytes now: what a simulated device has is in this process."""
    return peek(buffer.address, buffer.nbytes)


def only_one(name, source, **options):
    if name == "slab":
        return Slab(MIB, 1, source, **options)
    return Pool(2 * MIB, source, 2 * MIB, **options)


def take(allocator):
    """The one block: all of a slab's item, or of a pool."""
    return allocator.alloc(MIB if isinstance(allocator, Slab) else 2 * MIB)
