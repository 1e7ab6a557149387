"""What is done while signals' exceptions strike: what `fault_operations` has, and contexts.

`OPERATIONS` has both, by name.
"""

import threading

import every
import numpy as np
from fault_allocators import figures
from fault_operations import OPERATIONS as FAULT_OPERATIONS
from helpers import in_threads
from injection import MIB, Act

from arenapy import Bump, PerThread, Pool, measure, numpy_memory, trace
from arenapy.linux.libc_malloc import keepers

__all__ = ["OPERATIONS"]

OPERATIONS = dict(FAULT_OPERATIONS)
del OPERATIONS["fork"]  # a child that is struck would go on with the tests


def operation(name):
    def add(function):
        assert name not in OPERATIONS
        OPERATIONS[name] = function
        return function

    return add


# ---- allocators over every source of the host's ------------------------------------------


def allocator_operation(source, kind):
    @operation(f"{kind} over {source}")
    def make(directory):
        one = every.HOST_SOURCES[source](directory)

        def act():
            allocator = every.ALLOCATORS[kind](one)
            block = allocator.alloc(100)
            del block
            allocator.check()
            del allocator

        return Act(act)


for _source in every.HOST_SOURCES:
    # The tests' own sources have weak references' callbacks, in which Python loses exceptions.
    if every.lacking(_source) is None and not _source.startswith("user"):
        for _kind in ("bump", "slab", "pool"):
            allocator_operation(_source, _kind)


@operation("close of an allocator's region")
def close():
    def act():
        arena = Bump(MIB)
        arena.alloc(10)
        arena.regions[0].close()

    return Act(act)


# ---- files that were there ----------------------------------------------------------------


@operation("record over a trace")
def recorded_again(directory):
    path = directory / "trace"
    path.unlink(missing_ok=True)
    blocks = Pool(4 * MIB, initial_bytes=MIB)

    def act():
        with trace.record(blocks, path):
            blocks.alloc(100).release()

    def view():
        """The earlier one, or what the new one begins with."""
        assert len(trace.load(path))

    act()
    return Act(act, view=view)


# ---- contexts ----------------------------------------------------------------------------


@operation("scopes")
def scopes():
    arena = Bump(MIB)

    def act():
        with arena.scope():
            held = arena.empty(100)
            with arena.scope():
                arena.alloc(100)
        del held

    return Act(act, view=lambda: (arena.check(), arena.reset(), arena.used))


@operation("scopes, by thread")
def per_thread():
    arenas = PerThread(lambda: Bump(MIB))

    def act():
        with arenas.scope():
            arenas.empty(100)

    return Act(act, view=lambda: (arenas.check(), arenas.reset(), arenas.used))


def handler_operation(name, use, **options):
    """Something done with a `numpy_memory`; afterwards the array of a thread is not the pool's."""

    @operation(f"handler, {name}")
    def make():
        blocks = Pool(max_bytes=16 * MIB)
        memory = numpy_memory(blocks, **options)
        of_the_process = threading.Thread.start, keepers()

        def view():
            made = [np.ones(100), *in_threads(lambda: np.ones(100))]
            blocks.check()
            assert figures(blocks)[1] == 0
            assert memory.unreached() == numpy_memory(Pool()).unreached(), "a thread has it still"
            assert of_the_process == (threading.Thread.start, keepers())
            del made

        return Act(lambda: use(memory) and None, view=view)


def entered(memory):
    with memory:
        np.ones(100)


def nested(memory):
    with memory, numpy_memory(memory.pool), memory:
        np.ones(100)


def decorated(memory):
    memory(np.ones)(100)


def generated(memory):
    def numbers():
        yield np.ones(100).sum()
        yield np.ones(100).sum()

    list(memory(numbers)())


def started(memory):
    with memory:
        in_threads(lambda: np.ones(100))


for _name, _use in {
    "entered": entered,
    "nested": nested,
    "decorated": decorated,
    "generated": generated,
}.items():
    handler_operation(_name, _use)
    handler_operation(f"{_name}, for threads", _use, threads=True)
    handler_operation(f"{_name}, libc keeps", _use, libc="keep")
handler_operation("thread started", started, threads=True)


@operation("measured")
def measured():
    arena = Bump(MIB)

    def act():
        with measure(arena):
            arena.alloc(100)

    return Act(act, view=arena.check)
