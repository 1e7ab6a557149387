"""Allocators that end by the garbage collector, which takes the objects of a cycle apart in any
order: it begins with each of them once. For those of CUDA memory see test_cuda_collected.py.
"""

import gc
import os

import pytest
from collecting import clearing, collect_from, function_of
from helpers import GIL

from arenapy import Bump, Existing, Pool, Shared, Slab, trace

N = 1 << 20
ALLOCATORS = {
    "bump": lambda source, **options: Bump(N, source, **options),
    "slab": lambda source, **options: Slab(4096, 64, source, **options),
    "pool": lambda source, **options: Pool(N, source, **options),
}


class Memory(bytearray):
    """It can refer to what lies in it. The collector then sees the allocator and its blocks."""


def test_where_the_function_is():
    names = {name: function_of(kind) for name, kind in (("list", list), ("dict", dict))}
    assert all(names.values()) and names["list"] != names["dict"]
    assert function_of(int) is None
    there = [1]
    clearing(function_of(list))(there)
    assert there == []


def over_memory(allocator, **options):
    memory = Memory(N + 64)
    memory.allocator = ALLOCATORS[allocator](Existing(memory), **options)
    memory.block = memory.allocator.alloc(100)
    return memory


def recorded(allocator, folder):
    """The recording goes on to the end."""
    memory = over_memory(allocator)
    trace.record(memory.allocator, folder / "trace").__enter__()
    memory.later = memory.allocator.alloc(100)
    return memory


def in_debug_mode(allocator, folder):
    return over_memory(allocator, debug=True)


def in_a_scope(allocator, folder):
    memory = over_memory(allocator)
    if allocator == "bump":
        memory.scope = memory.allocator.scope()
        memory.scope.__enter__()
        memory.mark = memory.allocator.mark()
    return memory


def seen_by_a_child(allocator, folder):
    """Of memory that it shares with its parent."""
    one = ALLOCATORS[allocator](Shared())
    block = one.alloc(100)
    child = os.fork()
    if not child:
        os._exit(0)
    del block
    os.waitpid(child, 0)
    return one


MAKE = [recorded, in_debug_mode, in_a_scope, seen_by_a_child]


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("make", MAKE, ids=[make.__name__ for make in MAKE])
@pytest.mark.sampled
@pytest.mark.full
def test_the_collector_may_begin_anywhere(make, allocator, tmp_path):
    collect_from(lambda: make(allocator, tmp_path), 0)  # the first of all makes what stays
    gc.freeze()  # so that each collection is short
    try:
        many = collect_from(lambda: make(allocator, tmp_path), 0)
        assert 0 < many < 100
        for which in range(1, many):
            collect_from(lambda: make(allocator, tmp_path), which)
    finally:
        gc.unfreeze()


@pytest.mark.skipif(not GIL, reason="the collector clears what a region needs before finalizers")
@pytest.mark.parametrize("revived", [False, True])
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_finalizer_closes_the_region(allocator, revived):
    class Store:
        def __init__(self):
            self.allocator, self.itself = ALLOCATORS[allocator](Shared()), self
            self.allocator.alloc(1)

        def __del__(self):
            store.append(self.allocator if revived else self.close())

        def close(self):
            self.allocator.regions[0].close()
            return self.allocator.regions[0].closed

    store = []
    Store()
    gc.collect()
    if revived:
        store[0].alloc(1)
        store[0].regions[0].close()
        with pytest.raises(ValueError, match="closed"):
            store[0].alloc(1)
    else:
        assert store == [True]
