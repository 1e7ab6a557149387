"""Every allocator over every source, for suites that must hold for all of them alike.

CUDA memory is there twice: "simulated ...", by a driver made of Python functions, and "gpu ...", of
a real one, where there is one. HIP's pinned memory is there by a simulated runtime alone. `using` a
source is to be inside its driver, and `peek` and `poke` then see its bytes, wherever they are.
"""

import contextlib
import mmap
import os
import resource
from dataclasses import replace

import helpers
import numpy as np
from cuda_support import SAME_POINTER
from helpers import PAGE
from real_gpu import Gpu, done, why_none
from simulated_driver import simulated
from simulated_hip import simulated_hip
from sources import Regions

from arenapy import Bump, Existing, File, Host, Pool, Shared, Slab, cuda
from arenapy.interop import hip

NBYTES = 1 << 19  # of each allocator
ITEM = 2 * PAGE  # bytes of a Slab's item, and the most that the suites ask for at once
FILE_BYTES = 4 << 20  # of a file or object that is there before


def existing_file(directory):
    path = directory / "memory"
    with path.open("wb") as file:
        file.truncate(FILE_BYTES)
    return path


def anonymous_memory():
    return mmap.mmap(-1, FILE_BYTES, flags=mmap.MAP_PRIVATE)


#: name: a source, given a directory of its own
HOST_SOURCES = {
    "host": lambda directory: Host(),
    "host huge_pages=None": lambda directory: Host(huge_pages=None),
    "host prefault=False": lambda directory: Host(prefault=False),
    "host guard": lambda directory: Host(guard=True),
    "host fork=skip": lambda directory: Host(fork="skip"),
    "host threads": lambda directory: Host(threads=2),
    "host grow": lambda directory: Host(grow=True),
    "host numa_node": lambda directory: Host(numa_node=0),
    "host lock": lambda directory: Host(lock=True),
    "shared": lambda directory: Shared(),
    "shared prefault=False": lambda directory: Shared(prefault=False),
    "file w+": lambda directory: File(directory / "memory", "w+"),
    "file r+": lambda directory: File(existing_file(directory), "r+"),
    "file c": lambda directory: File(existing_file(directory), "c"),
    "existing bytearray": lambda directory: Existing(bytearray(FILE_BYTES)),
    "existing array": lambda directory: Existing(np.zeros(FILE_BYTES // 8)),
    "existing mmap": lambda directory: Existing(anonymous_memory()),
    "user": lambda directory: Regions(),
    "user, odd by 64": lambda directory: Regions(skew=64),
    "user, odd by 1": lambda directory: Regions(skew=1),
}
CUDA_SOURCES = {
    "pinned": lambda directory: cuda.Pinned(),
    "managed": lambda directory: cuda.Managed(),
    "device": lambda directory: cuda.Device(),
    "growing device": lambda directory: cuda.Device(grow=True),
    "driver pool": lambda directory: cuda.DriverPool(),
}
MAKERS = {
    **HOST_SOURCES,
    **{f"simulated {name}": make for name, make in CUDA_SOURCES.items()},
    **{f"gpu {name}": make for name, make in CUDA_SOURCES.items()},
    "simulated hip pinned": lambda directory: hip.Pinned(),
}


def cuda_sources(*names):
    return [f"{driver} {name}" for name in names for driver in ("simulated", "gpu")]


#: Those whose arrays are NumPy's; those that the host sees; all of them.
SOURCES = [*HOST_SOURCES, "simulated hip pinned", *cuda_sources("pinned")]
HOST_VISIBLE = [*SOURCES, *cuda_sources("managed")]
EVERYWHERE = [*HOST_VISIBLE, *cuda_sources("device", "growing device", "driver pool")]


def lacking(name):
    """Why this machine cannot have the source; None if it can."""
    if name.startswith("gpu "):
        return why_none()
    if name == "host numa_node" and not os.path.exists("/sys/devices/system/node/node0"):
        return "this kernel has no NUMA"
    if name == "host lock":
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        if limit != resource.RLIM_INFINITY and limit < 8 * NBYTES:
            return f"only {limit} bytes may be locked"
    return None


def kind_of(name):
    """Of the memory of a source."""
    driver, _, what = name.partition(" ")
    if driver in ("simulated", "gpu"):
        return what.replace("driver pool", "device").replace("growing device", "device")
    return driver.rstrip(",").replace("user", "host")


# Where the bytes are -------------------------------------------------------------------------

here = [helpers]  # the last one: the place of what is in use


class Simulated:
    """Memory of a simulated device is in this process."""

    def __init__(self, driver):
        self.wait = driver.drain

    def peek(self, address, nbytes):
        self.wait()
        return helpers.peek(address, nbytes)

    def poke(self, address, nbytes, byte):
        self.wait()
        helpers.poke(address, nbytes, byte)


class Real:
    """Memory of a device is copied and set by its driver, around arenapy."""

    def __init__(self, gpu, kind):
        self.gpu, self.cu, self.on_device = gpu, gpu.driver, kind == "device"

    def peek(self, address, nbytes):
        self.gpu.synchronize()
        if not self.on_device:
            return helpers.peek(address, nbytes)
        found = np.empty(nbytes, "u1")
        if nbytes:
            done(self.cu.cuMemcpyDtoH(found.ctypes.data, address, nbytes))
        return found.tobytes()

    def poke(self, address, nbytes, byte):
        self.gpu.synchronize()
        if not self.on_device:
            helpers.poke(address, nbytes, byte)
        elif nbytes:
            done(self.cu.cuMemsetD8(address, byte, nbytes))
            self.gpu.synchronize()


@contextlib.contextmanager
def using(name):
    """With the driver that a source needs."""
    with contextlib.ExitStack() as stack:
        place = here[-1]
        if name.startswith("simulated hip"):
            stack.enter_context(simulated_hip(leaks=True))
        elif name.startswith("simulated "):
            driver = stack.enter_context(simulated())
            stack.enter_context(driver.on(0))
            driver.attributes[SAME_POINTER] = 1
            place = Simulated(driver)
        elif name.startswith("gpu "):
            place = Real(stack.enter_context(Gpu()), kind_of(name))
        here.append(place)
        try:
            yield
        finally:
            here.pop()


def peek(address, nbytes):
    """The bytes at `address`, read without an export."""
    return here[-1].peek(address, nbytes)


def poke(address, nbytes, byte):
    """Write `byte` over `nbytes` bytes at `address`, without an export."""
    here[-1].poke(address, nbytes, byte)


def address_of(array):
    """Of an ndarray, or of the Buffer that stands for one on a device."""
    return array.ctypes.data if isinstance(array, np.ndarray) else array.address


#: name: an allocator of about NBYTES bytes that does not grow
ALLOCATORS = {
    "bump": lambda source: Bump(NBYTES, source),
    "slab": lambda source: Slab(ITEM, NBYTES // ITEM, source),
    "pool": lambda source: Pool(NBYTES, source, NBYTES),
    "pool by class": lambda source: Pool(NBYTES, source, NBYTES, rounding="class"),
}
REUSING = ["slab", "pool", "pool by class"]  # they take blocks back in any order


HANDED_OUT = [
    "total_allocations", "pool_hits", "pool_misses", "splits", "active_allocations",
    "allocated_bytes", "pending_bytes", "peak_bytes",
]  # fmt: skip


def adds_up(allocator):
    """`check()`, and the identity of the figures; the figures."""
    allocator.check()
    stats = allocator.stats()
    if isinstance(allocator, Bump):
        parts = ("live_bytes", "free_bytes", "retired_bytes", "pending_bytes", "padding_bytes")
        whole = stats.capacity
    else:
        parts = ("allocated_bytes", "pending_bytes", "idle_bytes")
        parts += ("padding_bytes",) * isinstance(allocator, Slab)
        whole = stats.reserved_bytes
    values = [getattr(stats, part) for part in parts]
    assert sum(values) == whole and min(values) >= 0, stats
    return stats


def view(allocator):
    """All that an allocator says about itself; a refused call must leave it equal."""
    regions = [(region.address, region.nbytes) for region in allocator.regions]
    stats = adds_up(allocator)
    if isinstance(allocator, Bump):  # its tables have grown, perhaps, in search of room
        stats = replace(stats, metadata_bytes=0)
    if not isinstance(allocator, Pool):
        return stats, regions
    # What is free in a pool may have been merged or given back, in search of room.
    live = sorted(info.address for info in allocator.blocks() if info.state == "live")
    return live, [[getattr(part, name) for name in HANDED_OUT] for part in (stats, *stats.classes)]


def fill_up(allocator, nbytes):
    """Blocks of `nbytes` bytes until there is no more."""
    blocks = []
    try:
        while True:
            blocks.append(allocator.alloc(nbytes))
    except MemoryError:
        return blocks
