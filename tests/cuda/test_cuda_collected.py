"""Allocators and regions that end by the garbage collector while streams use their memory.

The collector takes the objects of a cycle apart in any order. So in each case here, it begins with
each of them once.
"""

import ctypes
import gc

import pytest
from capsules import Tensor
from collecting import collect_from
from cuda_machine import Wrapped
from cuda_support import LEGACY, MIB, SOURCES, a_gpu, graph_of, new_stream, slowly_fill
from stream_wrappers import CupyStream

from arenapy import Bump, Pool, cuda
from arenapy.interop import raw_blocks, rmm

N = 4096
EACH_SOURCE = {**SOURCES, "growing device": lambda: cuda.Device(grow=True)}


def pool_with_an_event(gpu, source):
    """The stream is an integer, so the release of the block records an event."""
    pool, s = Pool(MIB, source()), new_stream(gpu)
    block = pool.alloc(N)
    block.record_stream(s.handle_)
    slowly_fill(gpu, s, block, 1)
    return pool


def pool_with_a_stream(gpu, source):
    """The event is still to be recorded."""
    pool, s = Pool(MIB, source()), cuda.Stream()
    block = pool.alloc(N)
    block.record_stream(s)
    slowly_fill(gpu, s.handle, block, 1)
    return pool


def pool_of_a_stream(gpu, source):
    """Memory that the host can access has no own stream."""
    s = cuda.Stream()
    own = None if source().region(N).host_accessible else s
    pool = Pool(MIB, source(), stream=own)
    block = pool.alloc(N, stream=s)
    slowly_fill(gpu, s.handle, block, 1)
    return pool


def pool_and_its_stream(gpu, source):
    """The stream is destroyed with an object that is garbage as well."""
    s = CupyStream(gpu, new_stream(gpu).handle_)
    pool = Pool(MIB, source())
    block = pool.alloc(N, stream=s)
    slowly_fill(gpu, s.ptr, block, 1)
    return pool, s


def bump_and_its_own_stream(gpu, source):
    s = CupyStream(gpu, new_stream(gpu).handle_)
    own = None if source().region(N).host_accessible else s
    arena = Bump(MIB, source(), stream=own)
    block = arena.alloc(N)
    block.record_stream(s)
    slowly_fill(gpu, s.ptr, block, 1)
    return arena, s


def pool_with_a_graph(gpu, source):
    pool, s = Pool(MIB, source()), new_stream(gpu)
    gpu.begin_capture(s.handle_)
    block = pool.alloc(N, stream=s)
    slowly_fill(gpu, s, block, 1)
    gpu.replay(graph_of(gpu, s), s.handle_)
    return pool


def region(gpu, source):
    one, s = source().region(MIB), new_stream(gpu)
    block = one.buffer(0, N)
    block.record_stream(s.handle_)
    slowly_fill(gpu, s, block, 1)
    return one


class Both(Tensor):
    """An array with DLPack and the array interface, as those of CuPy."""

    @property
    def __cuda_array_interface__(self):
        return {"shape": self.shape, "typestr": "|u1", "data": (self.address, False), "version": 3}


def array_of_another_library(gpu, source):
    """It is used anew at once when its library may have it. (Its memory is always a device's.)"""
    address = gpu.got("cuMemAlloc", ctypes.c_uint64, N)
    array, s = Both(address, (N,)), new_stream(gpu)
    block = cuda.asbuffer(array)
    block.record_stream(s)
    slowly_fill(gpu, s, block, 1)

    def reuse():
        if gpu.uses(address, N):
            gpu.errors.append("another array got its bytes while a kernel was to use them")

    array.on_delete = reuse
    return block


class InterfaceAlone:
    """As numba's arrays. What it has in its attributes goes if the collector takes it apart."""

    def __init__(self, address, on_end):
        self.__cuda_array_interface__ = {
            "shape": (N,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip
        self.on_end = on_end

    def __del__(self):
        self.on_end()


def array_without_dlpack(gpu, source):
    address, s = gpu.got("cuMemAlloc", ctypes.c_uint64, N), new_stream(gpu)

    def end():
        if gpu.uses(address, N):
            gpu.errors.append("its library may use its bytes while a kernel was to use them")

    block = cuda.asbuffer(InterfaceAlone(address, end))
    block.record_stream(s)
    slowly_fill(gpu, s, block, 1)
    return block


class Lender:
    """As RMM's CallbackMemoryResource."""

    def __init__(self, gpu):
        self.gpu = gpu
        self.allocate, self.free = raw_blocks.rmm_callbacks(Pool(4 * MIB, cuda.Device()), LEGACY)

    def deallocate(self, address, nbytes, stream=None):
        if self.gpu.uses(address, nbytes):
            self.gpu.errors.append("the memory was given back while a kernel was to use it")
        self.free(address, nbytes, Wrapped(LEGACY))


def pool_over_lent_memory(gpu, source):
    lender = Lender(gpu)
    lend = lender.allocate
    lender.allocate = lambda nbytes, stream=None: lend(nbytes, Wrapped(LEGACY))
    pool, s = Pool(2 * MIB, rmm.Source(lender)), new_stream(gpu)
    block = pool.alloc(N)
    block.record_stream(s)
    slowly_fill(gpu, s, block, 1)
    return pool


MAKE = [
    pool_with_an_event,
    pool_with_a_stream,
    pool_of_a_stream,
    pool_and_its_stream,
    bump_and_its_own_stream,
    pool_with_a_graph,
    region,
    array_of_another_library,
    array_without_dlpack,
    pool_over_lent_memory,
]


def problems(make, source, which):
    """What is wrong if the collector begins with one of the objects; how many there are."""
    with a_gpu(leaks=True) as gpu:
        many = collect_from(lambda: make(gpu, EACH_SOURCE[source]), which)
        gpu.drain()
        found = gpu.errors[:]
        gpu.errors.clear()
    return found, many


@pytest.mark.parametrize("source", EACH_SOURCE)
@pytest.mark.parametrize("make", MAKE, ids=[make.__name__ for make in MAKE])
@pytest.mark.sampled
@pytest.mark.full
def test_the_collector_may_begin_anywhere(make, source):
    problems(make, source, 0)  # the first of all makes what stays
    gc.collect()
    gc.freeze()  # so that each collection is short
    try:
        found, many = problems(make, source, 0)
        assert not found and 0 < many < 100
        for which in range(1, many):
            assert not problems(make, source, which)[0], which
    finally:
        gc.unfreeze()
