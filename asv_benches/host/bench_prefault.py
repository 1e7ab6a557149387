"""Getting 1 GiB ready for use: our prefault against the usual ways, each from a new mapping.

The kernel zeroes every page, whoever asks; what differs is how often it is entered and how large
the pages are. A virtual machine's host faults too when memory is used that was not for a while, and
that can take longer than all else: so as much memory is faulted in and given back, unmeasured, just
before each run, ways follow each other in random order, and medians are compared.

What this does not show: other sizes, other memory (shared, hugetlbfs), fragmented memory.
"""

import ctypes
import mmap
import os
import time
from functools import partial

from arenapy.linux import vm
from asv_benches.support.rounds import Clocked, Line, named, turns
from asv_benches.support.sizes import MIB

THP_SIZE = 2 * MIB
SIZE = 1024 * MIB
PEERS = ("MAP_POPULATE", "touch each page", "MADV_HUGEPAGE, memset")
WAYS = {"prefault, 1 thread": 1, "prefault, 2 threads": 2}
MAP_POPULATE = getattr(mmap, "MAP_POPULATE", 0x8000)

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def prepare(way, nbytes):
    """Do the part that is not measured: make a mapping. None if mapping is what is measured."""
    with vm.map_memory(nbytes, align=THP_SIZE) as mapping:
        vm.advise(mapping.address, nbytes, mmap.MADV_HUGEPAGE)
        vm.prefault(mapping.address, nbytes)  # so that the host has these pages
    if way == "MAP_POPULATE":
        return None
    mapping = vm.map_memory(nbytes, align=THP_SIZE)
    if way != "touch each page":
        vm.advise(mapping.address, nbytes, mmap.MADV_HUGEPAGE)
    return mapping


def carry_out(way, nbytes, mapping):
    """Do the part that is measured, and return a call that unmaps the memory."""
    if way == "MAP_POPULATE":
        address = libc.mmap(
            None,
            nbytes,
            mmap.PROT_READ | mmap.PROT_WRITE,
            mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_POPULATE,
            -1,
            0,
        )
        return partial(libc.munmap, address, nbytes)
    address = mapping.address
    if way == "touch each page":
        # In C, without the interpreter between two touches: prefault's own fallback.
        vm.prefault(address, nbytes, threads=1)
    elif way in WAYS:
        vm.prefault(address, nbytes, threads=WAYS[way])
    else:
        ctypes.memset(address, 0, nbytes)
    return mapping.unmap


def measure(way, nbytes):
    """Seconds of one run."""
    mapping = prepare(way, nbytes)
    if way == "touch each page":
        vm.inject_populate_error(22)  # EINVAL: as on a kernel that cannot populate
    try:
        start = time.perf_counter()
        unmap = carry_out(way, nbytes, mapping)
        seconds = time.perf_counter() - start
    finally:
        vm.inject_populate_error(0)
    unmap()
    return seconds


class Prefault:
    """asv: one way each; asv's own rounds take the place of ours."""

    params = (*PEERS, *WAYS)
    param_names = ("way",)
    timeout = 300
    number = 1
    repeat = (3, 10, 30.0)
    warmup_time = 0.5

    def setup(self, way):
        """A new mapping for each call (asv calls it before each when number is 1)."""
        self.unmap = None
        self.mapping = prepare(way, SIZE)
        if way == "touch each page":
            vm.inject_populate_error(22)

    @named("Prefault 1 GiB")
    def time_one_gib(self, way):
        """Fault all of it in."""
        if self.unmap is not None:  # the warm-up calls again without setup
            self.teardown(way)
            self.setup(way)
        self.unmap = carry_out(way, SIZE, self.mapping)

    def teardown(self, way):
        """Give it back."""
        vm.inject_populate_error(0)
        if self.unmap is not None:
            self.unmap()
        elif self.mapping is not None:
            self.mapping.unmap()
        self.unmap = self.mapping = None


def lines(quick):
    """The report's lines."""
    loops = {way: Clocked(partial(measure, way, SIZE)) for way in (*PEERS, *WAYS)}
    found = turns(loops, 1, 3 if quick else 15)
    for way, seconds in found.items():
        yield Line("prefault", f"1 GiB, {way}", seconds * 1e3, "ms")
    best = min(PEERS, key=found.get)
    one, two = (found[way] for way in WAYS)
    yield Line("prefault", f"{best} / 1 thread", found[best] / one, "x", 1.0, at_least=True)
    limit = 1.3 if len(os.sched_getaffinity(0)) >= 2 else None
    yield Line("prefault", "1 thread / 2 threads", one / two, "x", limit, at_least=True)
