"""Allocation through the libraries' own front doors: from a Pool, and from their own allocators.

Each line: microseconds of a call and of dropping what it made, medians of rounds in which both
allocators take turns.
"""

import statistics
import time

import arenapy
from arenapy import cuda

SIZES = (1000, 100_000, 4 << 20)
ROUNDS = 31
CALLS = 500


def cupy_empty(pool):
    import cupy

    from arenapy.interop import cupy as arenapy_cupy

    def on(allocator, stream):
        def make(nbytes):
            empty = cupy.empty
            with stream, cupy.cuda.using_allocator(allocator):
                start = time.perf_counter()
                for _ in range(CALLS):
                    empty(nbytes, "u1")
                return time.perf_counter() - start

        return make

    ours, theirs = arenapy_cupy.allocator(pool), cupy.cuda.MemoryPool().malloc
    for name, stream in {
        "": cupy.cuda.Stream.null,
        " on a stream": cupy.cuda.Stream(non_blocking=True),
        " on the per-thread stream": cupy.cuda.Stream.ptds,
    }.items():
        yield f"cupy.empty{name}", on(ours, stream), on(theirs, stream)


def cupy_pinned(pool):
    import cupy

    from arenapy.interop import cupy as arenapy_cupy

    def on(allocator):
        def make(nbytes):
            cupy.cuda.set_pinned_memory_allocator(allocator)
            alloc = cupy.cuda.alloc_pinned_memory
            start = time.perf_counter()
            for _ in range(CALLS):
                alloc(nbytes)
            return time.perf_counter() - start

        return make

    ours = arenapy_cupy.pinned_allocator(arenapy.Pool(source=cuda.Pinned()))
    yield "cupy.cuda.alloc_pinned_memory", on(ours), on(cupy.cuda.PinnedMemoryPool().malloc)


def numba_device_array(pool):
    from numba import cuda as numba_cuda

    from arenapy.interop import numba as arenapy_numba

    context = numba_cuda.current_context()
    theirs = context.memory_manager
    ours = arenapy_numba.manager(pool)(context=context)
    ours.initialize()

    def on(manager):
        def make(nbytes):
            array = numba_cuda.device_array
            context.memory_manager = manager
            start = time.perf_counter()
            for _ in range(CALLS):
                array(nbytes, "u1")
            return time.perf_counter() - start

        return make

    yield "numba.cuda.device_array", on(ours), on(theirs)
    context.memory_manager = theirs


def rmm_buffer(pool):
    import rmm

    from arenapy.interop import rmm as arenapy_rmm

    def on(resource):
        def make(nbytes):
            buffer = rmm.DeviceBuffer
            rmm.mr.set_current_device_resource(resource)
            start = time.perf_counter()
            for _ in range(CALLS):
                buffer(size=nbytes)
            return time.perf_counter() - start

        return make

    ours = arenapy_rmm.resource(pool)
    plain = rmm.mr.CudaMemoryResource()
    yield "rmm.DeviceBuffer, beside its pool", on(ours), on(rmm.mr.PoolMemoryResource(plain))
    yield (
        "rmm.DeviceBuffer, beside its asynchronous resource",
        on(ours), on(rmm.mr.CudaAsyncMemoryResource()),
    )  # fmt: skip
    rmm.mr.set_current_device_resource(plain)


def core_allocate(pool):
    from cuda.core import Device

    device = Device(0)
    device.set_current()
    stream = device.create_stream()

    def on(resource, stream):
        def make(nbytes):
            start = time.perf_counter()
            for _ in range(CALLS):
                resource.allocate(nbytes, stream=stream)
            return time.perf_counter() - start

        return make

    ours, theirs = cuda.memory_resource(pool), device.memory_resource
    yield "cuda.core allocate", on(ours, stream), on(theirs, stream)
    default = device.default_stream
    yield "cuda.core allocate on the default stream", on(ours, default), on(theirs, default)


def report():
    """A line for each call and size."""
    for front in (cupy_empty, cupy_pinned, numba_device_array, rmm_buffer, core_allocate):
        pool = arenapy.Pool(source=cuda.Device())
        try:
            for name, *both in front(pool):
                for nbytes in SIZES:
                    found = [[], []]
                    for i in range(ROUNDS + 1):
                        for make, times in zip(both, found, strict=True):
                            seconds = make(nbytes)
                            if i:  # the first round warms up
                                times.append(1e6 * seconds / CALLS)
                    ours, theirs = map(statistics.median, found)
                    print(
                        f"{name}, {nbytes} bytes: {ours:.3f} us, its own {theirs:.3f} us, "
                        f"{ours / theirs:.2f}",
                        flush=True,
                    )
        except ImportError as error:
            print(f"{front.__name__}: {error}")


if __name__ == "__main__":
    report()
