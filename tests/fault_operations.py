"""What is done while each of its calls fails in turn: `OPERATIONS`, by name.

Each makes what it needs and gives an `Act`. What the act makes and returns is dropped after it.
"""

import contextlib
import copy
import gc
import os
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any
from unittest import mock

import numpy as np

from arenapy import (
    Bump,
    Existing,
    File,
    Host,
    PerThread,
    Pool,
    Shared,
    Slab,
    numpy_memory,
    trace,
    vm,
)
from arenapy.reservation import reserve

MIB = 1 << 20
OPERATIONS = {}


def nothing():
    return None


@dataclass
class Act:
    """Something that calls the system."""

    act: Callable[[], Any]
    #: Checks what it acts on and gives what is the same after a call that raised.
    view: Callable[[], Any] = nothing
    #: Whether what Python code of ours calls is to fail too: many files below /proc are read.
    python: bool = False
    #: Makes sure that what came back is what was asked for.
    good: Callable[[Any], Any] = lambda result: None
    #: Called at the end, before everything is dropped.
    end: Callable[[], Any] = nothing


def operation(name):
    def add(function):
        assert name not in OPERATIONS
        OPERATIONS[name] = function
        return function

    return add


def seen(allocator):
    """What an allocator says of itself, after its own check."""
    allocator.check()
    stats = allocator.stats()
    return stats, [(region.address, region.nbytes) for region in allocator.regions]


def writable(nbytes):
    """A result of that size which can be used to the last byte."""

    def good(result):
        buffer = result.buffer() if hasattr(result, "huge_fraction") else result
        array = np.frombuffer(buffer, "u1")
        assert len(array) == nbytes
        array[:] = 1

    return good


# ---- regions -----------------------------------------------------------------------------

REGIONS = {
    "Host": (Host(), 3 * MIB),
    "Host small": (Host(), 5000),
    "Host huge_pages=None": (Host(huge_pages=None), MIB),
    "Host prefault=False": (Host(prefault=False), 3 * MIB),
    "Host lock": (Host(lock=True), MIB),
    "Host numa_node": (Host(numa_node=0), MIB),
    "Host guard": (Host(guard=True), 3 * MIB),
    "Host fork=skip": (Host(fork="skip"), 3 * MIB),
    "Host threads": (Host(threads=3), 5 * MIB),
    "Host all": (Host(lock=True, numa_node=0, guard=True, fork="skip"), 3 * MIB),
    "Shared": (Shared(), 3 * MIB),
    "Shared all": (Shared(lock=True, numa_node=0), MIB),
    "Shared prefault=False": (Shared(prefault=False), MIB),
}
IN_FULL = {"Host", "Shared"}


def region_operation(name, source, nbytes):
    @operation(f"region of {name}")
    def make():
        return Act(lambda: source.region(nbytes), python=name in IN_FULL, good=writable(nbytes))

    @operation(f"close {name}")
    def close():
        region = source.region(nbytes)
        return Act(region.close)


for _name, (_source, _nbytes) in REGIONS.items():
    region_operation(_name, _source, _nbytes)


def file_operation(mode):
    @operation(f"region of File {mode}")
    def make(directory):
        path = directory / "file"
        if mode != "w+":
            path.write_bytes(bytes(100_000))
        source = File(path, mode)
        path.with_name("other").unlink(missing_ok=True)
        return Act(
            lambda: source.region(100_000),
            python=True,
            view=lambda: path.exists() and path.stat().st_size if mode != "w+" else None,
            good=lambda region: bytes(memoryview(region.buffer())[-1:]),
        )


for _mode in ("r", "r+", "c", "w+"):
    file_operation(_mode)


@operation("region of Existing")
def existing():
    source = Existing(bytearray(5000))
    return Act(source.region, python=True)


@operation("use of a file's region")
def use_of_file(directory):
    path = directory / "file"
    path.write_bytes(bytes(100_000))
    region = File(path, "r+").region()
    buffer = region.buffer()
    return Act(lambda: (region.buffer(), memoryview(buffer), bytes(buffer)))


@operation("huge_fraction")
def huge_fraction():
    region = Host().region(2 * MIB)
    return Act(lambda: region.huge_fraction, python=True)


@operation("can_scan_pages, can_populate")
def can():
    return Act(lambda: (vm.can_scan_pages(), vm.can_populate()))


# ---- reservations ------------------------------------------------------------------------


@operation("reserve")
def reservation():
    return Act(lambda: reserve(Host(numa_node=0, guard=True, fork="skip"), 4 * MIB))


def commit_operation(name, host):
    def states(reserved):
        return lambda: [vm_state(reserved.region.address + at) for at in (0, 2 * MIB)]

    @operation(f"commit {name}")
    def commit():
        reserved = reserve(host, 6 * MIB)
        reserved.commit(0, 2 * MIB)
        done = []

        def act():
            reserved.commit(2 * MIB, 2 * MIB)
            done.append(1)

        return Act(act, view=states(reserved), end=lambda: done or act())

    @operation(f"decommit {name}")
    def decommit():
        reserved = reserve(host, 6 * MIB)
        reserved.commit(0, 4 * MIB)
        return Act(lambda: reserved.decommit(2 * MIB, 2 * MIB))


def vm_state(address):
    """Whether a page may be written to."""
    with open("/proc/self/maps", encoding="utf-8") as lines:
        for line in lines:
            start, stop = (int(word, 16) for word in line.split()[0].split("-"))
            if start <= address < stop:
                return line.split()[1]
    return None


for _name, _host in {"Host": Host(), "Host lock": Host(lock=True)}.items():
    commit_operation(_name, _host)


# ---- Bump --------------------------------------------------------------------------------


@operation("Bump()")
def bump():
    return Act(lambda: Bump(MIB, max_bytes=4 * MIB), good=seen)


def bump_act(name, use, **options):
    """Something done with an arena that has two blocks, one of them held."""

    @operation(f"Bump {name}")
    def make():
        arena = Bump(MIB, max_bytes=16 * MIB, **options)
        first = arena.alloc(1000)
        held = memoryview(arena.alloc(1000))
        made = []

        def act():
            made.append(use(arena, first, held))

        def view():
            counts = (
                seen(arena) if not options else arena.check()
            )  # debug checks after the counting
            return counts, arena.used, len(held)

        return Act(act, view=view)


bump_act("alloc", lambda arena, first, held: arena.alloc(100))
bump_act("export", lambda arena, first, held: memoryview(first))
bump_act("alloc, growing", lambda arena, first, held: arena.alloc(3 * MIB))
bump_act("empty, growing", lambda arena, first, held: arena.empty(3 * MIB, "u1"))
bump_act("alloc_many", lambda arena, first, held: arena.alloc_many([10] * 50 + [20]))
bump_act("alloc_many, growing", lambda arena, first, held: arena.alloc_many([MIB // 2] * 5))
bump_act("empty", lambda arena, first, held: arena.empty(100))
bump_act("zeros", lambda arena, first, held: arena.zeros((10, 10), "f4"))
bump_act("copy", lambda arena, first, held: arena.copy(np.arange(10)))
bump_act("struct_of_arrays", lambda arena, *_: arena.struct_of_arrays({"x": "f4", "y": "u1"}, 9))
bump_act("mark", lambda arena, first, held: [arena.mark() for _ in range(100)])
bump_act("grow", lambda arena, first, held: arena.grow(first, 2 * MIB))
bump_act("check", lambda arena, first, held: arena.check())
bump_act("debug alloc", lambda arena, first, held: arena.alloc(100), debug=True)


@operation("Bump reset with survivors")
def survivors():
    arena = Bump(MIB)
    blocks = [arena.alloc(1000) for _ in range(300)]
    held = [memoryview(block) for block in blocks[::2]]
    return Act(arena.reset, view=lambda: (arena.check(), [len(one) for one in held]))


# ---- Slab --------------------------------------------------------------------------------


@operation("Slab()")
def slab():
    return Act(lambda: Slab(4096, 100, max_count=1000), good=seen)


def slab_act(name, use, live=98, **options):
    @operation(f"Slab {name}")
    def make():
        items = Slab(4096, 100, max_count=10_000, **options)
        held = [items.alloc() for _ in range(live)]
        seen_one = memoryview(held[0])
        made = []

        def act():
            made.append(use(items, held))

        def view():
            counts = (
                seen(items) if not options else items.check()
            )  # debug checks after the counting
            return counts, items.stats().active_allocations, len(seen_one), len(held)

        return Act(act, view=view)


slab_act("alloc", lambda items, held: items.alloc())
slab_act("export", lambda items, held: memoryview(held[1]))
slab_act("alloc, growing", lambda items, held: items.alloc(), live=100)
slab_act("alloc_many", lambda items, held: items.alloc_many(3))
slab_act("alloc_many, growing", lambda items, held: items.alloc_many(300))
slab_act("empty", lambda items, held: items.empty(100))
slab_act("zeros", lambda items, held: items.zeros(100))
slab_act("release, alloc", lambda items, held: held.pop(5).release() or held.append(items.alloc()))
slab_act("check", lambda items, held: items.check())
slab_act("debug alloc", lambda items, held: items.alloc(), debug=True)


@operation("Slab trim")
def slab_trim():
    items = Slab(4096, 100, max_count=10_000)
    blocks = [items.alloc() for _ in range(500)]
    del blocks[10:]
    return Act(items.trim, view=lambda: (items.check(), len(blocks)))


# ---- Pool --------------------------------------------------------------------------------


@operation("Pool()")
def pool():
    return Act(lambda: Pool(max_bytes=64 * MIB), good=seen)


@operation("Pool() over Shared")
def pool_shared():
    return Act(lambda: Pool(max_bytes=64 * MIB, source=Shared()), good=seen)


def pool_act(name, use, **options):
    @operation(f"Pool {name}")
    def make():
        blocks = Pool(**({"max_bytes": 256 * MIB} | options))
        held = [blocks.alloc(n) for n in (100, 5000, 100_000, MIB)]
        idle = [blocks.alloc(n) for n in (100, 100, 5000, 100_000, 300_000, MIB, MIB)]
        shown = memoryview(held[2])
        del idle
        made = []

        def act():
            made.append(use(blocks, held))

        return Act(act, view=lambda: (*seen(blocks)[1:], figures(blocks), len(shown), len(held)))


def figures(blocks):
    """Of a pool, what no failure changes; it may merge what is idle, or give it back."""
    stats = blocks.stats()
    return stats.active_allocations, stats.allocated_bytes, stats.pending_bytes


POOL_ACTS = {
    "alloc": lambda blocks, held: blocks.alloc(100),
    "alloc, large": lambda blocks, held: blocks.alloc(100_000),
    "export": lambda blocks, held: memoryview(held[0]),
    "alloc, growing": lambda blocks, held: blocks.alloc(5 * MIB),
    "alloc, growing by many": lambda blocks, held: blocks.alloc_many([4096] * 700),
    "alloc_many": lambda blocks, held: blocks.alloc_many([100] * 20),
    "alloc_many, growing": lambda blocks, held: blocks.alloc_many([3 * MIB] * 3),
    "empty": lambda blocks, held: blocks.empty(100),
    "zeros, growing": lambda blocks, held: blocks.zeros(5 * MIB, "u1"),
    "copy": lambda blocks, held: blocks.copy(np.arange(1000)),
    "prewarm": lambda blocks, held: blocks.prewarm({MIB: 5, 100: 1000}),
    "release": lambda blocks, held: held.pop().release(),
    "trim": lambda blocks, held: blocks.trim(),
    "defragment": lambda blocks, held: blocks.defragment(),
    "blocks": lambda blocks, held: blocks.blocks() and None,
    "check": lambda blocks, held: blocks.check(),
}
for _name, _use in POOL_ACTS.items():
    pool_act(_name, _use)
for _name in ("alloc, growing", "trim", "defragment"):
    pool_act(f"over Shared {_name}", POOL_ACTS[_name], source=Shared())
    pool_act(f"locked {_name}", POOL_ACTS[_name], source=Host(lock=True), max_bytes=64 * MIB)
    pool_act(f"fork=skip {_name}", POOL_ACTS[_name], source=Host(fork="skip", guard=True))
pool_act("debug alloc", POOL_ACTS["alloc"], debug=True)


# ---- NumPy's memory ----------------------------------------------------------------------


def numpy_act(name, use, **options):
    @operation(f"NumPy {name}")
    def make():
        blocks = Pool(max_bytes=64 * MIB)
        with numpy_memory(blocks, **options):
            small, array = np.ones(1000), np.ones(100_000)

        def act():
            with numpy_memory(blocks, **options):
                return use(small.copy(), array)

        return Act(act, view=lambda: (figures(blocks), blocks.check(), array.sum(), small.sum()))


numpy_act("malloc", lambda small, array: np.empty(100_001))
numpy_act("malloc, growing", lambda small, array: np.empty(5 * MIB, "u1"))
numpy_act("malloc, libc's", lambda small, array: np.empty(80 * MIB, "u1"))
numpy_act("malloc, no libc", lambda small, array: np.empty(5 * MIB, "u1"), on_full="error")
numpy_act("calloc", lambda small, array: np.zeros(100))
numpy_act("calloc, lazy", lambda small, array: np.zeros(40 * MIB, "u1"))
numpy_act("calloc, no pages", lambda small, array: np.zeros(5 * MIB, "u1"))
numpy_act("realloc", lambda small, array: small.resize(3000, refcheck=False))
numpy_act("realloc, growing", lambda small, array: small.resize(3 * MIB, refcheck=False))


@operation("NumPy memory, installed")
def numpy_installed():
    blocks = Pool(max_bytes=64 * MIB)

    def act():
        with numpy_memory(blocks):
            return np.ones(10)

    return Act(act, view=blocks.check)


# ---- sharing, pickling, DLPack -----------------------------------------------------------


@operation("send a Shared Buffer")
def send():
    blocks = Pool(max_bytes=8 * MIB, source=Shared())
    block = blocks.alloc(5000)
    return Act(lambda: receive(block), view=blocks.check, python=True)


@operation("send a Shared Region")
def send_region():
    region = Shared().region(5000)
    return Act(lambda: receive(region).buffer(), python=True)


class Handed:
    """In place of multiprocessing's handle, which takes another thread or process to open."""

    fd = -1

    def __init__(self, fd):
        self.fd = os.dup(fd)

    def detach(self):
        fd, self.fd = self.fd, -1
        return fd

    def __del__(self):
        if self.fd >= 0:
            os.close(self.fd)


def receive(thing):
    """What a receiver makes of it, were this process one."""
    with mock.patch.object(reduction, "DupFd", Handed):
        make, arguments = reduction.ForkingPickler._extra_reducers[type(thing)](thing)
        return make(*arguments)


@operation("pickle a Buffer")
def pickled():
    blocks = Pool(max_bytes=4 * MIB)
    block = blocks.alloc(1000)
    return Act(lambda: pickle.loads(pickle.dumps(block, 5)), view=blocks.check)


@operation("copy a Buffer")
def copied():
    arena = Bump(MIB)
    block = arena.alloc(1000)
    return Act(lambda: copy.copy(block), view=arena.check)


@operation("DLPack")
def dlpack():
    arena = Bump(MIB)
    block = arena.alloc(800).view((10, 10), "f8")
    return Act(lambda: np.from_dlpack(block), view=arena.check)


@operation("region's Buffer, exported")
def region_export():
    region = Host().region(MIB)
    return Act(lambda: memoryview(region.buffer()))


# ---- threads, traces, replay -------------------------------------------------------------


@operation("PerThread")
def per_thread():
    arenas = PerThread(lambda: Bump(MIB))

    def act():
        failures = []

        def body():
            try:
                arenas.get().alloc(10)
                arenas.get().check()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        gc.collect()
        if failures:
            raise failures.pop()

    return Act(act)


def trace_operation(name, act_on, python=True, sites=0):
    @operation(f"trace {name}")
    def make(directory):
        blocks = Pool(max_bytes=4 * MIB)
        blocks.alloc(100).release()
        return Act(
            lambda: act_on(blocks, directory / "trace", sites), view=blocks.check, python=python
        )


def recorded(blocks, path, sites):
    with trace.record(blocks, path, sites=sites) as recorder:
        for _ in range(10):
            blocks.alloc(100).release()
        recorder.flush()


trace_operation("record", recorded)
trace_operation("record sites", recorded, sites=3)


@operation("trace, while recording")
def while_recording(directory):
    blocks = Pool(max_bytes=4 * MIB)
    blocks.alloc(100).release()
    recording = trace.record(blocks, directory / "trace")
    recording.__enter__()
    stopped = []

    def act():
        for _ in range(6000):  # more than a buffer of events
            blocks.alloc(100).release()
        return blocks.alloc(1)

    def end():
        with contextlib.suppress(OSError):
            recording.__exit__(None, None, None)

    return Act(act, view=lambda: (blocks.check(), len(stopped)), end=end)


@operation("fork")
def fork():
    """Also the child's calls fail; it says by its status how it went."""
    blocks = Pool(max_bytes=4 * MIB, source=Shared())
    arena = Bump(MIB, source=Host(fork="skip"))
    kept = [blocks.alloc(100), arena.alloc(100)]

    def act():
        child = os.fork()
        if not child:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

    return Act(act, view=lambda: (blocks.check(), arena.check(), len(kept)))
