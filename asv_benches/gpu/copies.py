"""How fast bytes get to a device and back: kinds of host memory, small copies, files, a pipeline.

Times of copies are the device's, between two events on the stream that copies; of whole programs
the wall's, which wait for their end. Ways take turns.
"""

import json
import os
import subprocess
import sys
import tempfile
import timeit
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from arenapy import Pool, cuda
from arenapy.cuda.stream import elapsed
from asv_benches.gpu.latency import imported
from asv_benches.support.rounds import Clocked, Line, turns
from asv_benches.support.sizes import KIB, MIB

NBYTES = 1 << 30  # of a large copy
SMALL, COUNT = 4 * KIB, 1024
GIGA = 1e9


def on_the_device(stream, work):
    """A statement for `turns`: seconds on the device of the work that `work` submits."""
    return Clocked(lambda: elapsed(stream, work, 0))


class Foreign:
    """Bytes by address, as a Buffer takes them."""

    def __init__(self, address, nbytes):
        self.__array_interface__ = {
            "data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3,
        }  # fmt: skip


@contextmanager
def of_the_driver(nbytes):
    """Memory of cuMemAllocHost, which cudaMallocHost is; None without cuda.bindings."""
    driver = imported("cuda.bindings.driver")
    error, address = driver.cuMemAllocHost(nbytes)
    assert error == 0, error
    try:
        yield np.asarray(Foreign(int(address), nbytes))
    finally:
        driver.cuMemFreeHost(address)


def large(quick):
    """One copy of a gibibyte at a time."""
    nbytes = NBYTES // 8 if quick else NBYTES
    stream = cuda.Stream()
    device = cuda.Device().region(nbytes).buffer()
    pinned = cuda.Pinned().region(nbytes).buffer()
    with of_the_driver(nbytes) as theirs:
        memory = {
            "Pinned region": pinned,
            "cudaMallocHost": theirs,
            "pageable": np.ones(nbytes, np.uint8),
        }
        loops = {}
        for name, host in memory.items():
            loops[f"{name}, to the device"] = on_the_device(
                stream, lambda host=host: device.copy_from(host, stream=stream)
            )
            loops[f"{name}, from it"] = on_the_device(
                stream, lambda host=host: device.copy_to(host, stream=stream)
            )
        found = turns(loops, 1, 3 if quick else 9)
    for name, seconds in found.items():
        yield Line("copies", name, nbytes / seconds / GIGA, "GB/s")
    for way in ("to the device", "from it"):
        ours, theirs, pageable = (found[f"{name}, {way}"] for name in memory)
        yield Line("copies", f"Pinned / cudaMallocHost, {way}", theirs / ours, "x", 0.98, True)
        if way == "to the device":
            yield Line("copies", f"Pinned / pageable, {way}", pageable / ours, "x", 4, True)


def small(quick):
    """Many copies of 4 KiB: what one costs."""
    stream = cuda.Stream()
    pool = Pool(64 * MIB, cuda.Device())
    pinned = Pool(64 * MIB, cuda.Pinned())
    pairs = [(pool.alloc(SMALL), pinned.alloc(SMALL)) for _ in range(COUNT)]
    one, other = pool.alloc(COUNT * SMALL), pinned.alloc(COUNT * SMALL)

    def one_by_one():
        for target, source in pairs:
            target.copy_from(source, stream=stream)
        stream.synchronize()

    def each_waits():
        for target, source in pairs:
            target.copy_from(source)

    ways = {
        "copy_batch": lambda: cuda.copy_batch(pairs, stream),
        "copy_from with a stream, then one wait": one_by_one,
        "copy_from without a stream": each_waits,
        "one copy of as many bytes": lambda: one.copy_from(other),
    }
    cupy = imported("cupy")
    if cupy is not None:
        memcpy, runtime = cupy.cuda.runtime.memcpyAsync, cupy.cuda.runtime
        addresses = [(target.address, source.address) for target, source in pairs]

        def by_cupy():
            for target, source in addresses:
                memcpy(target, source, SMALL, 1, stream.handle)
            runtime.streamSynchronize(stream.handle)

        ways["CuPy memcpyAsync, then one wait"] = by_cupy
    found = turns({name: timeit.Timer(way) for name, way in ways.items()}, 1, 5 if quick else 21)
    for name, seconds in found.items():
        yield Line("small copies", f"{name}, {COUNT} of 4 KiB", seconds / COUNT * 1e6, "us")


def streaming(quick):
    """A file through a device arena of a tenth of its size."""
    nbytes = (512 if quick else 4096) * MIB
    chunk = nbytes // 64
    with tempfile.NamedTemporaryFile(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as file:
        block = np.random.default_rng(1).integers(0, 256, 64 * MIB, np.uint8)
        for _ in range(nbytes // len(block)):
            file.write(block)
        file.flush()
        pool = Pool(6 * chunk, cuda.Device(), 6 * chunk)

        def by_chunks():
            for _ in cuda.chunks(file.name, chunk, pool=pool):
                pass

        def by_hand():
            with open(file.name, "rb") as source:
                while data := source.read(chunk):
                    pool.alloc(len(data)).copy_from(data)

        loops = {"cuda.chunks": timeit.Timer(by_chunks), "read and copy": timeit.Timer(by_hand)}
        found = turns(loops, 1, 2 if quick else 5)
    for name, seconds in found.items():
        yield Line("big files", f"{name}, {nbytes // MIB} MiB", nbytes / seconds / GIGA, "GB/s")
    yield Line("big files", "cuda.chunks / read and copy",
               found["read and copy"] / found["cuda.chunks"], "x")  # fmt: skip


def managed(quick):
    """One kernel (a fill, of all the bytes) on what the host has just written, three ways."""
    nbytes = (128 if quick else 1024) * MIB
    stream = cuda.Stream()
    region = cuda.Managed().region(nbytes).buffer()
    array = region.array(dtype="u1")
    pinned = cuda.Pinned().region(nbytes).buffer()
    staged = pinned.array(dtype="u1")
    device = cuda.Device().region(nbytes).buffer()

    def demand():
        array[:] = 1
        stream_time(lambda: region.fill(2, stream=stream))
        return int(array[::4096].sum())

    def prefetched():
        array[:] = 1

        def work():
            cuda.prefetch(region, 0, stream)
            region.fill(2, stream=stream)
            cuda.prefetch(region, -1, stream)

        stream_time(work)
        return int(array[::4096].sum())

    def explicit():
        staged[:] = 1

        def work():
            device.copy_from(pinned, stream=stream)
            device.fill(2, stream=stream)
            device.copy_to(pinned, stream=stream)

        stream_time(work)
        return int(staged[::4096].sum())

    def stream_time(work):
        work()
        stream.synchronize()

    right = 2 * len(array[::4096])
    for way in (demand, prefetched, explicit):
        assert way() == right, way
    loops = {
        "managed, pages on demand": timeit.Timer(demand),
        "managed, prefetched both ways": timeit.Timer(prefetched),
        "explicit pinned copies": timeit.Timer(explicit),
    }
    found = turns(loops, 1, 2 if quick else 5)
    for name, seconds in found.items():
        yield Line("managed", f"{name}, {nbytes // MIB} MiB", seconds * 1e3, "ms")
    for name in list(found)[:2]:
        yield Line("managed", f"{name} / explicit copies",
                   found[name] / found["explicit pinned copies"], "x")  # fmt: skip


def pipeline(quick):
    """Of ``arenapy demo --gpu``: beside a program without pools and pinned memory."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "demo.json")
        # In a process of its own: other libraries' streams share the device's queues with ours.
        # -P: the source tree, where this may be run, does not shadow the package.
        command = [sys.executable, "-P", "-m", "arenapy", "demo", "--gpu", "--json", str(file)]
        subprocess.run([*command, *(["--quick"] if quick else [])], check=True)
        found = json.loads(file.read_text())
    for name, way in found["ways"].items():
        yield Line("pipeline", f"{name}, a batch", way["ms_a_batch"], "ms")
    yield Line("pipeline", "arenapy / plain", found["ways"]["arenapy"]["times_as_fast_as_plain"],
               "x", 2.5, at_least=True)  # fmt: skip
    yield Line("pipeline", "of the copying, kernels ran at the same time",
               100 * found["traced"]["share_of_copying"], "%")  # fmt: skip


def lines(quick):
    """Every figure of this file."""
    for part in (large, small, streaming, managed):
        yield from part(quick)
