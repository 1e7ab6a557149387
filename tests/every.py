"""Every allocator over every host source, for suites that must hold for all of them alike."""

import mmap
import os
import resource

import numpy as np
from sources import Regions
from support import PAGE

from arenapy import Bump, Existing, File, Host, Pool, Shared, Slab

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
SOURCES = {
    "host": lambda directory: Host(),
    "host huge_pages=None": lambda directory: Host(huge_pages=None),
    "host prefault=False": lambda directory: Host(prefault=False),
    "host guard": lambda directory: Host(guard=True),
    "host fork=skip": lambda directory: Host(fork="skip"),
    "host threads": lambda directory: Host(threads=2),
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
#: Those over which an allocator is closed in a forked child.
CLOSED_IN_CHILD = {"host fork=skip", "shared", "shared prefault=False", "file w+", "file r+"}


def lacking(name):
    """Why this machine cannot have the source; None if it can."""
    if name == "host numa_node" and not os.path.exists("/sys/devices/system/node/node0"):
        return "this kernel has no NUMA"
    if name == "host lock":
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        if limit != resource.RLIM_INFINITY and limit < 8 * NBYTES:
            return f"only {limit} bytes may be locked"
    return None


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
