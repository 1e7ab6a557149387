"""No reference cycle through a Buffer, an array or an arena may be uncollectable (section 5), and
chains of them, of any length, end.

Each cycle runs through an object that the arena's memory belongs to: only a collector that sees
from the Buffer through the region to the owner can free it. (An `ndarray` tells the collector
nothing of its base, so memory that refers to a plain array over itself is never freed, whoever
made the array: ``b.a = np.frombuffer(b)`` is enough. Arrays are attacked in the cycles that NumPy
allows.)
"""

import ctypes
import gc
import sys
import weakref

import numpy as np
import pytest
from helpers import exact
from hypothesis import settings

import arenapy
from arenapy import Bump, Existing, Pool, Slab


class Owner(bytearray):
    """Memory that can have attributes, and so be in a cycle with what lies in it."""


class Frame:
    """Any object of a user's program."""


HOLDS = {
    "buffer": lambda arena: arena.alloc(64),
    "survivor": lambda arena: (b := arena.alloc(64), memoryview(b).release(), arena.reset())[0],
    "held buffer": lambda arena: (b := arena.alloc(64), memoryview(b).release())[0],
    "memoryview": lambda arena: memoryview(arena.alloc(64)),
    "slice": lambda arena: arena.alloc(64)[3:9],
    "view": lambda arena: arena.alloc(64).view((4, 2), "f8"),
    "arena": lambda arena: arena,
    "mark": lambda arena: (arena, arena.mark()),
    "mark alone": lambda arena: arena.mark(),
    "stale mark": lambda arena: (arena.mark(), arena.reset())[0],
    "scope": lambda arena: arena.scope(),
    "region": lambda arena: arena.regions,
    "bound method": lambda arena: arena.alloc,
    "released": lambda arena: (b := arena.alloc(64), b.release())[0],
    "closed by a reset": lambda arena: [arena.alloc(64), arena.reset()][0],
    "everything": lambda arena: (arena, arena.alloc_many([8] * 9), arena.mark()),
}


def collected(make):
    """Whether what `make` leaves behind, and returns a weak reference to, is freed."""
    gc.collect()
    gc.disable()
    try:
        reference = make()
        assert reference() is not None, "not a cycle: this test would pass without a collector"
        for _ in range(3):
            gc.collect()
        return reference() is None
    finally:
        gc.enable()


BATCHES = {
    "bump": lambda: Bump(4096).alloc_many([8] * 3),
    "slab": lambda: Slab(64, 100).alloc_many(3),
    "pool": lambda: Pool().alloc_many([8] * 3),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_list_of_blocks_in_a_cycle(kind):
    """While it is filled, the collector does not know it; afterwards it has to."""

    def cycle():
        frame = Frame()
        blocks = BATCHES[kind]()
        blocks.append((frame, blocks))
        return weakref.ref(frame)

    assert collected(cycle)


@pytest.mark.parametrize("kind", HOLDS)
def test_memory_that_refers_to_what_lies_in_it(kind):
    def make():
        owner = Owner(1 << 14)
        owner.content = HOLDS[kind](Bump(1 << 14, source=Existing(owner)))
        return weakref.ref(owner)

    assert collected(make)


class Tagged(np.ndarray):
    """An array that can refer to things, as a user's subclass does."""


@pytest.mark.parametrize(
    "make_array",
    [
        lambda arena: arena.empty(8),
        lambda arena: arena.zeros(8)[2:4],
        lambda arena: np.asarray(arena.alloc(64)),
        lambda arena: np.from_dlpack(arena.alloc(64)),
        lambda arena: np.ndarray((64,), "u1", buffer=arena.alloc(64)),
        lambda arena: arena.struct_of_arrays({"x": "f4", "y": "f8"}, 3)["y"],
    ],
)
def test_arrays_in_a_cycle(make_array):
    arena = exact(1 << 14)

    def make():
        frame = Frame()
        frame.array = make_array(arena).view(Tagged)
        frame.array.frame = frame
        frame.arena = arena
        return weakref.ref(frame)

    assert collected(make)
    arena.reset()
    assert arena.remaining == arena.capacity


def test_an_open_scope_in_a_cycle():
    def make():
        owner = Owner(1 << 14)
        arena = Bump(1 << 14, source=Existing(owner))
        scope = arena.scope()
        scope.__enter__()
        owner.content = (scope, arena.alloc(8))
        return weakref.ref(owner)

    assert collected(make)


def test_a_source_in_a_cycle_with_its_arena():
    class Source:
        def region(self, nbytes):
            keep = ctypes.create_string_buffer(nbytes)
            keep.source = self  # the region's owner leads back here
            return arenapy.Region.from_address(ctypes.addressof(keep), nbytes, owner=keep)

    def make():
        source = Source()
        arena = Bump(1 << 12, source=source, max_bytes=1 << 14)
        source.content = (arena, arena.alloc(5000))
        return weakref.ref(source)

    assert collected(make)


def test_a_region_whose_owner_holds_its_buffer():
    def make():
        keep = ctypes.create_string_buffer(256)
        frame = Frame()
        frame.keep = keep
        region = arenapy.Region.from_address(ctypes.addressof(keep), 256, owner=frame)
        frame.content = (region, region.buffer(), memoryview(region.buffer(3, 5)))
        return weakref.ref(frame)

    assert collected(make)


def test_user_objects_in_a_cycle_with_buffers():
    """The memory is free again: its arena sees the survivors of the cycle go."""
    arena = exact(1 << 16)

    def make():
        frame = Frame()
        frame.parts = [arena.empty(8), memoryview(arena.alloc(64)), arena.alloc(64), frame]
        return weakref.ref(frame)

    assert collected(make)
    arena.reset()
    assert arena.retired == 0 and arena.remaining == arena.capacity


def test_an_arena_is_freed_without_the_collector():
    """Buffers, marks and scopes make no cycle of their own: memory goes as soon as it can."""
    owner = Owner(1 << 14)
    gc.disable()
    try:
        arena = Bump(1 << 14, source=Existing(owner))
        with arena.scope():
            content = [arena.alloc(9), arena.empty(9), arena.mark()]
        with pytest.raises(BufferError):
            owner.append(0)  # exported by Existing
        del arena, content
        owner.append(0)
    finally:
        gc.enable()


def test_the_collector_may_run_at_any_moment():
    """Half-built objects are never seen: collections between all allocations of a busy loop."""
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        arena = exact(1 << 16)
        for _ in range(300):
            with arena.scope():
                cycle = [arena.alloc(8), arena.empty(3), memoryview(arena.alloc(5))]
                cycle.append(cycle)
        del cycle
        gc.collect()
        arena.check()
        arena.reset()
        assert arena.remaining == arena.capacity
    finally:
        gc.set_threshold(*thresholds)


#: What a link of a chain has on top of a region, whose owner is the link before.
LINKS = {
    "region": "region(o)",
    "buffer": "region(o).buffer()",
    "view": "region(o).buffer().view()",
    "slice of a view": "region(o).buffer().view()[1:]",
    "views of views": "(o if isinstance(o, Buffer) else region(o).buffer()).view()",
    "array": "region(o).buffer().array()",
    "memoryview": "memoryview(region(o).buffer())",
    "interface": "np.asarray(region(o).buffer())",
    "DLPack": "np.from_dlpack(region(o).buffer())",
    "capsule": "region(o).buffer().__dlpack__()",
    "arena": "arena(o)",
    "block": "arena(o).alloc(64)",
    "array of an arena": "arena(o).empty(8)",
    "mark": "arena(o).mark()",
    "scope": "arena(o).scope()",
    "list": "region([o])",
}


@pytest.mark.parametrize("place", ["in a thread with little stack", "in the main thread"])
@pytest.mark.full
def test_a_chain_of_any_length_ends(place, run_script):
    """Each link ends the one before, and is no frame on the stack."""
    links = 4000 if "thread" in place else 200_000
    # CPython 3.13 itself nests 10,000 deep before it unlinks in a loop, on whatever stack there is.
    little = 8 << 20 if sys.version_info[:2] == (3, 13) else 256 << 10
    long = settings().max_examples > 1000
    kinds = LINKS if long or "thread" in place else {"region": LINKS["region"]}
    run_script(f"""
        import ctypes, threading
        import numpy as np
        from arenapy import Buffer, Bump, Region

        memory = ctypes.create_string_buffer(8192)
        start = -(-ctypes.addressof(memory) // 4096) * 4096

        def region(owner):
            return Region.from_address(start, 4096, owner=owner)

        class Source:
            def __init__(self, owner):
                self.owner = owner

            def region(self, nbytes):
                return region(self.owner)

        def arena(owner):
            return Bump(4096, Source(owner))

        def drop(chain):
            chain.clear()

        for link in {list(kinds.values())}:
            link = eval("lambda o: " + link)
            o = None
            for _ in range({links}):
                o = link(o)
            chain = [o]
            del o
            if "main" in {place!r}:
                drop(chain)
                continue
            threading.stack_size({little})
            thread = threading.Thread(target=drop, args=(chain,))
            thread.start()
            thread.join()
    """)


def test_cycles_through_a_pickle_whose_bytes_are_not_in_it(run_script):
    """The collector takes what lies between the Buffer and the memory that it was pickled from."""
    run_script(
        """
        import gc, pickle
        import arenapy

        pool = arenapy.Pool()
        gc.disable()
        for _ in range(100):
            frames = []
            data = pickle.dumps(pool.alloc(100), 5, buffer_callback=frames.append)
            cycle = [pickle.loads(data, buffers=frames)]
            cycle.append(cycle)
        del frames, cycle
        gc.collect()
        assert pool.stats().active_allocations == 0
        """
    )
