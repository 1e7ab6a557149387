"""What is done while each of its calls fails in turn: `OPERATIONS`, by name.

Each makes what it needs and gives an `Act`. What the act makes and returns is dropped after it.
Those of `fault_allocators` are among them.
"""

import contextlib
import copy
import gc
import mmap
import multiprocessing
import os
import pickle
import socket
import threading
from functools import partial
from multiprocessing import reduction
from unittest import mock

import fault_allocators  # adds its own
import numpy as np
from injection import MIB, OPERATIONS, Act, operation
from kernel_view import resident

import arenapy
from arenapy import (
    Bump,
    Existing,
    File,
    Host,
    OutOfMemory,
    PerThread,
    Pool,
    Region,
    Shared,
    Slab,
    trace,
)
from arenapy.commands.replay import loop
from arenapy.linux import vm
from arenapy.memory import reservation as reservations
from arenapy.memory.reservation import reserve

__all__ = ["OPERATIONS", "fault_allocators"]


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


@operation("region of File w+, over a file")
def renewed(directory):
    path = directory / "file"
    before = b"x" * 50_000
    path.write_bytes(before)
    source = File(path, "w+")

    def view():
        """It is as it was or as it was to be; empty of the old size if the disk fails last."""
        assert path.read_bytes() in (before, bytes(100_000), bytes(50_000))

    return Act(lambda: source.region(100_000), python=True, view=view)


@operation("region of Existing")
def existing():
    source = Existing(bytearray(5000))
    return Act(source.region, python=True)


@operation("region of Existing, mapped")
def existing_mapped(directory):
    path = directory / "file"
    path.write_bytes(bytes(100_000))
    with path.open("r+b") as file:
        source = Existing(mmap.mmap(file.fileno(), 100_000))
    return Act(source.region, python=True)


@operation("region refused")
def refused():
    source = Existing(bytearray(5000))
    region = source.region()

    def act():
        with contextlib.suppress(OutOfMemory):
            source.region()

    return Act(act, view=lambda: region.nbytes)


@operation("region of a sparse File")
def sparse(directory):
    path = directory / "file"
    path.write_bytes(b"")
    os.truncate(path, 100_000)
    return Act(File(path, "r+").region, python=True)


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


@operation("unlock")
def unlock():
    region = Host(lock=True).region(MIB)
    return Act(lambda: vm.unlock(region.address, MIB))


@operation("fault in, read-only")
def read_only(directory):
    path = directory / "file"
    path.write_bytes(bytes(100_000))
    region = File(path).region()
    return Act(lambda: vm.prefault(region.address, region.nbytes, writable=False))


# ---- reservations ------------------------------------------------------------------------


@operation("reserve")
def reservation():
    return Act(lambda: reserve(Host(numa_node=0, guard=True, fork="skip"), 4 * MIB))


def commit_operation(name, host):
    @operation(f"commit {name}")
    def commit():
        reservations.AHEAD = 0  # so that each part takes a call of mprotect
        reserved = reserve(host, 6 * MIB)
        reserved.commit(0, 2 * MIB)
        done = []

        def act():
            reserved.commit(2 * MIB, 2 * MIB)
            done.append(1)

        there = partial(resident, reserved.region.address, 6 * MIB)
        return Act(act, view=there, end=lambda: done or act())

    @operation(f"decommit {name}")
    def decommit():
        reserved = reserve(host, 6 * MIB)
        reserved.commit(0, 4 * MIB)
        return Act(lambda: reserved.decommit(2 * MIB, 2 * MIB))


for _name, _host in {"Host": Host(), "Host lock": Host(lock=True)}.items():
    commit_operation(_name, _host)


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


@operation("send a Shared array")
def send_array():
    blocks = Pool(max_bytes=8 * MIB, source=Shared())
    array = blocks.zeros((50, 100))
    return Act(lambda: receive(array[::2, ::-1]), view=blocks.check, python=True)


@operation("bundle of descriptors")
def bundle():
    files = [vm.memfd(b"one", 4096) for _ in range(70)]
    return Act(lambda: vm.unbundled(vm.bundle(files).fileno()))


def sending_operation(name, connected):
    @operation(f"send over {name}")
    def send_over():
        blocks = Pool(max_bytes=8 * MIB, source=Shared())
        array = blocks.zeros((50, 100))

        def act():
            here, there = connected()
            with here, there:
                arenapy.send(here, array)
                return arenapy.receive(there)

        return Act(act, view=blocks.check, python=True)


sending_operation("a Unix socket", socket.socketpair)
sending_operation("a Connection", multiprocessing.Pipe)


@operation("use of leased memory")
def leased():
    blocks = Pool(max_bytes=8 * MIB, source=Shared())
    items = Slab(4096, 10, source=Shared())
    sent = [blocks.alloc(5000), items.alloc()]
    received = [receive(block) for block in sent]
    addresses = [block.address for block in sent]

    def act():
        sent.clear()
        return [blocks.alloc(5000), *items.alloc_many(8)]

    def good(result):
        assert not {block.address for block in result} & set(addresses)

    return Act(
        act,
        view=lambda: (blocks.check(), items.check(), [one.nbytes for one in received]),
        good=good,
    )


@operation("use of leased memory by a Bump")
def leased_and_reset():
    arena = Bump(MIB, Shared())
    blocks = [arena.alloc(64) for _ in range(100)]
    addresses = {block.address for block in blocks}
    reads, writes = os.pipe()
    child = os.fork()  # which sees them
    if not child:
        os.close(writes)
        os.read(reads, 1)
        os._exit(0)
    os.close(reads)

    def act():
        with contextlib.suppress(ValueError):  # it hands out none any more, as it said before
            arena.reset()

    def end():
        """What comes afterwards, with memory or without, does not see what others see."""
        with contextlib.suppress(ValueError):
            for _ in range(20):
                assert arena.alloc(64).address not in addresses
        os.close(writes)
        os.waitpid(child, 0)

    return Act(act, view=lambda: (arena.check(), len(blocks)), end=end)


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


@operation("replay")
def replay():
    blocks = Pool(max_bytes=4 * MIB)
    del blocks.alloc_many([100, 5000])[:]
    heap = loop.PoolHeap(blocks)
    slots, sizes = np.array([0, 1, -1], "i4"), np.array([100, 5000, 0], "u8")

    def act():
        with open("/proc/self/statm", "rb") as statm:
            loop.run(heap, slots, sizes, 2, statm=statm.fileno())

    return Act(act)


class SeenByChildren:
    """A source of memory that is no file's."""

    def region(self, nbytes):
        memory = mmap.mmap(-1, nbytes)
        start = np.frombuffer(memory, "u1").ctypes.data
        return Region.from_address(start, nbytes, owner=memory, fork="closed")


@operation("fork")
def fork():
    """Also the child's calls fail; it says by its status how it went."""
    blocks = Pool(max_bytes=4 * MIB, source=Shared())
    arena = Bump(MIB, source=Host(fork="skip"))
    items = Slab(4096, 100, source=SeenByChildren())
    kept = [blocks.alloc(100), arena.alloc(100), *items.alloc_many(100)[::2]]  # scattered

    def act():
        child = os.fork()
        if not child:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

    return Act(act, view=lambda: (blocks.check(), arena.check(), items.check(), len(kept)))
