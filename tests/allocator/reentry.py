"""User code in the middle of a call: every door it can come in by, and what it may do there.

Run as a program with a file and a number N (of all pairs of acts, every Nth): the file has what was
done last. `test_reentry` runs it, since a broken promise may end the process.
"""

import contextlib
import ctypes
import gc
import itertools
import mmap
import sys
import threading

import numpy as np
from helpers import MAX_ALIGN, peek, poke, round_up

import arenapy
from arenapy import Bump, Pool, Region, Slab

ITEM = 4096


class Wrong(Exception):
    """A promise was broken."""


class Owner:
    """Of a region's memory, which is unmapped with it."""

    def __init__(self, world, nbytes):
        self.world = world
        self.backing = mmap.mmap(-1, nbytes + MAX_ALIGN)
        self.anchor = (ctypes.c_char * len(self.backing)).from_buffer(self.backing)
        self.start = round_up(ctypes.addressof(self.anchor), MAX_ALIGN)

    def __del__(self):
        self.world.enter("owner")


class Source:
    def __init__(self, world):
        self.world = world

    def region(self, nbytes):
        self.world.enter("source")
        owner = Owner(self.world, nbytes)
        return Region.from_address(owner.start, nbytes, owner=owner)


ALLOCATORS = {
    "bump": lambda world, **more: Bump(8 * ITEM, Source(world), max_bytes=32 * ITEM, **more),
    "strict bump": lambda world: ALLOCATORS["bump"](world, strict=True),
    "bump, debug": lambda world: ALLOCATORS["bump"](world, debug=True),
    "slab": lambda world, **more: Slab(ITEM, 8, Source(world), max_count=64, **more),
    "slab, debug": lambda world: ALLOCATORS["slab"](world, debug=True),
    "pool": lambda world, **more: Pool(
        4 << 20, Source(world), 8 * ITEM, on_oom=lambda nbytes: world.enter("on_oom"), **more
    ),
    "pool, debug": lambda world: ALLOCATORS["pool"](world, debug=True),
}


class World:
    """An allocator, arrays in it whose bytes are known, and blocks that nobody holds."""

    def __init__(self, kind):
        self.act = None
        self.entered = 0
        self.only = None
        self.allocator = ALLOCATORS[kind](self)
        self.arrays, self.made = [], []
        self.mark = self.allocator.mark() if isinstance(self.allocator, Bump) else None
        self.hold()
        self.target = self.allocator.alloc(2000)
        self.target.fill(0x55)
        self.hold()
        self.blocks = [self.allocator.alloc(100) for _ in range(2)]

    def hold(self):
        array = self.allocator.empty(1000, "u1")
        array[:] = byte = 1 + len(self.arrays) % 200
        self.arrays.append((array, byte))

    def enter(self, door):
        """User code runs: it does its act, once."""
        act = self.act
        if act is None or (self.only is not None and door != self.only):
            return False
        self.act = None
        self.entered += 1
        return bool(act(self))

    def look(self):
        """What somebody holds is as it was, and nothing else lies there."""
        ranges = []
        for array, byte in self.arrays:
            if not (array == byte).all():
                raise Wrong(f"a held array of {byte} has {set(array.tolist())}")
            ranges.append((array.ctypes.data, array.ctypes.data + array.nbytes))
        for one in {id(one): one for one in self.made}.values():  # a block may grow in place twice
            if isinstance(one, np.ndarray):
                ranges.append((one.ctypes.data, one.ctypes.data + one.nbytes))
            elif not one.closed:
                ranges.append((one.address, one.address + one.nbytes))
        ranges = sorted(pair for pair in ranges if pair[0] < pair[1])
        for one, other in itertools.pairwise(ranges):
            if one[1] > other[0]:
                raise Wrong(f"{one} and {other} overlap")

    def end(self):
        """Write everywhere that one may; then see that all is as it was."""
        self.act = None
        self.look()
        for one in self.made:
            if isinstance(one, np.ndarray):
                one.view("u1").reshape(-1)[:] = 0xEE
            elif not one.closed:
                poke(one.address, one.nbytes, 0xEE)
        filled = []
        with contextlib.suppress(MemoryError, ValueError):
            for _ in range(8 if self.allocator.debug else 60):  # debug mode looks at everything
                filled.append(self.allocator.alloc(2000))
                filled[-1].fill(0xDD)
        self.look()
        self.allocator.check()
        filled.clear()
        self.target = None
        self.blocks.clear()
        self.made.clear()
        gc.collect(0)
        self.look()
        self.allocator.check()
        for array, byte in self.arrays:
            array[:] = byte
        self.look()


# What user code does there -----------------------------------------------------------------------


def close_regions(world):
    for region in world.allocator.regions:
        with contextlib.suppress(BufferError):
            region.close()


def close_all(world):
    """Nobody holds anything: then it can be closed under the call."""
    world.arrays.clear()
    gc.collect(0)
    close_regions(world)


def reset(world):
    if isinstance(world.allocator, Bump):
        with contextlib.suppress(BufferError):
            world.allocator.reset()


def reset_to_mark(world):
    if isinstance(world.allocator, Bump):
        with contextlib.suppress(BufferError, ValueError):
            world.allocator.reset(world.mark)


def release(world):
    with contextlib.suppress(BufferError):
        world.target.release()


def release_all(world):
    release(world)
    world.blocks.clear()
    return True


def hold_target(world):
    with contextlib.suppress(ValueError):
        world.target_view = memoryview(world.target)


def allocate(world):
    with contextlib.suppress(MemoryError, ValueError):
        world.made.append(world.allocator.alloc(500))


def allocate_much(world):
    with contextlib.suppress(MemoryError, ValueError):
        for _ in range(12):
            world.made.append(world.allocator.empty(ITEM, "u1"))


def hold_more(world):
    with contextlib.suppress(MemoryError, ValueError):
        world.hold()


def scope(world):
    if isinstance(world.allocator, Bump):
        with contextlib.suppress(MemoryError, ValueError, BufferError), world.allocator.scope():
            world.hold()


def trim(world):
    if not isinstance(world.allocator, Bump):
        with contextlib.suppress(ValueError):
            world.allocator.trim()
    return True


def grow(world):
    if isinstance(world.allocator, Bump) and world.blocks:
        with contextlib.suppress(MemoryError, ValueError, BufferError):
            world.made.append(world.allocator.grow(world.blocks[-1], 5000))


def ask(world):
    world.allocator.stats()
    world.allocator.check()
    repr((world.allocator, world.target, world.blocks))
    gc.collect(1)


def list_objects(world):
    """As a memory profiler does: what is open can be read, and lists of Buffers can be changed."""
    own = {id(world.blocks), id(world.made)}
    for one in gc.get_objects():
        if isinstance(one, arenapy.Buffer) and not one.closed:
            if not one.address:
                raise Wrong(f"{one!r} is open, and has no memory")
            peek(one.address, one.nbytes)
        elif type(one) is list and one and isinstance(one[-1], arenapy.Buffer):
            under_way = one[-1].closed or not one[-1].address
            if under_way and id(one) not in own:
                one.clear()


def change_lists(world):
    """Those that a call keeps its arguments in, as gc.get_referrers would find them."""
    for one in gc.get_objects():
        if type(one) is not list or not one:
            continue
        if any(isinstance(item, Number) for item in one):
            one.clear()
        elif type(one[-1]) is tuple and any(isinstance(item, np.dtype) for item in one[-1]):
            one.append(("wild", np.dtype("u1"), 1 << 40, 8))


def in_a_thread(world):
    thread = threading.Thread(target=lambda: (release_all(world), allocate(world)))
    thread.start()
    thread.join()


def fail(world):
    raise ZeroDivisionError


ACTS = [
    close_regions, close_all, reset, reset_to_mark, release, release_all, hold_target, allocate,
    allocate_much, hold_more, scope, trim, grow, ask, in_a_thread, list_objects, change_lists, fail,
]  # fmt: skip


# The doors ---------------------------------------------------------------------------------------


class Number:
    """Its value is asked of user code."""

    def __init__(self, world, value):
        self.world, self.value = world, value

    def __index__(self):
        self.world.enter("__index__")
        return self.value

    __int__ = __index__


class Sequence:
    def __init__(self, world, *items):
        self.world, self.items = world, items

    def __iter__(self):
        for item in self.items:
            yield item
            self.world.enter("__iter__")

    def __len__(self):
        self.world.enter("__len__")
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


class Fields(dict):
    def __init__(self, world, **items):
        super().__init__(**items)
        self.world = world

    def items(self):
        for pair in super().items():
            yield pair
            self.world.enter("items")


class Typed:
    """A dtype by its attribute."""

    def __init__(self, world):
        self.world = world

    @property
    def dtype(self):
        self.world.enter("dtype")
        return np.dtype("f4")


class ArrayLike:
    def __init__(self, world):
        self.world = world

    def __array__(self, dtype=None, copy=None):
        self.world.enter("__array__")
        return np.arange(300)


class Bytes:
    """A buffer that is made by Python code, since 3.12."""

    def __init__(self, world, nbytes):
        self.world, self.memory = world, bytearray(nbytes)

    def __buffer__(self, flags):
        self.world.enter("__buffer__")
        return memoryview(self.memory)

    def __release_buffer__(self, view):
        self.world.enter("__release_buffer__")


def used_up(world):
    """Until the source has to be asked: it is the door."""
    world.only = "source"
    made = []
    with contextlib.suppress(MemoryError):
        while world.act is not None:
            made.append(world.allocator.alloc(1500))
    return made


def many_grown(world):
    world.only = "source"
    return world.allocator.alloc_many([1500] * 40)


def out_of_memory(world):
    world.only = "on_oom"
    return world.allocator.alloc(4 << 20 if isinstance(world.allocator, Pool) else 1 << 21)


def grown(world):
    """A block that has to move, to memory that the source is asked for."""
    act, world.act = world.act, None
    world.blocks.append(world.allocator.alloc(100))
    world.act, world.only = act, "source"
    return world.allocator.grow(world.target, 9 * ITEM)


def dropped_region(world):
    """One that grew, and is given back: the end of its owner is the door."""
    act, world.act = world.act, None
    some = [world.allocator.alloc(ITEM) for _ in range(16)]
    world.act, world.only = act, "owner"
    some.clear()
    (reset if isinstance(world.allocator, Bump) else trim)(world)


def failed_many(world):
    return world.allocator.alloc_many([100, Number(world, 200), 1 << 40])


def collected(world):
    """The collector's callbacks, whenever it runs."""
    before = gc.get_threshold()
    gc.callbacks.append(entered := lambda phase, info: world.enter("gc"))
    gc.set_threshold(1)
    try:
        made = [world.allocator.alloc(100), world.allocator.empty(100), *more(world)]
        world.target[3:9].view((2,), "u1")
        memoryview(world.target)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(entered)
    return made


def more(world):
    if isinstance(world.allocator, Bump):
        with world.allocator.scope():
            yield world.allocator.alloc(50)
    yield from world.allocator.alloc_many([10, 20])


def many(count):
    return lambda w: w.allocator.alloc_many(Sequence(w, *[100] * count))


def of(method, *given):
    """A call of the allocator, or of the target, with user code among its arguments."""
    return lambda w: getattr(w.allocator, method)(*(one(w) for one in given))


def on(method, *given):
    return lambda w: getattr(w.target, method)(*(one(w) for one in given))


def number(value):
    return lambda w: Number(w, value)


def plain(value):
    return lambda w: value


DOORS = {
    "alloc": of("alloc", number(700)),
    "alloc aligned": of("alloc", plain(700), number(64)),
    "empty": of("empty", number(50)),
    "empty, shape": of("empty", lambda w: (3, Number(w, 4), Number(w, 5))),
    "empty, sequence": of("empty", lambda w: Sequence(w, 3, 4)),
    "empty, dtype": of("empty", plain(9), Typed),
    "zeros": of("zeros", number(200), Typed),
    "copy": of("copy", ArrayLike),
    "alloc_many": many(3),
    "alloc_many, growing": many(20),
    "alloc_many, numbers": lambda w: w.allocator.alloc_many([Number(w, 10)] * 3),
    "alloc_many, failing": failed_many,
    "struct_of_arrays": lambda w: w.allocator.struct_of_arrays(Fields(w, x="f4", y="u1"), 20),
    "struct_of_arrays, n": lambda w: w.allocator.struct_of_arrays({"x": Typed(w)}, Number(w, 20)),
    "grow": lambda w: w.allocator.grow(w.target, Number(w, 3000)),
    "slice": lambda w: w.target[Number(w, 3) : Number(w, 1500)],
    "view": on("view", lambda w: (Number(w, 10),), Typed),
    "view, sequence": on("view", lambda w: Sequence(w, 10, 2)),
    "array": on("array", number(400), Typed),
    "fill": on("fill", number(7)),
    "copy_from": on("copy_from", lambda w: Bytes(w, 2000)),
    "copy_to": on("copy_to", lambda w: Bytes(w, 2000)),
    "__dlpack__": lambda w: w.target.__dlpack__(dl_device=Sequence(w, 1, Number(w, 0))),
    "__dlpack__, version": lambda w: w.target.__dlpack__(max_version=Sequence(w, Number(w, 1), 0)),
    "trim": of("trim", number(0)),
    "prewarm": of("prewarm", lambda w: {500: Number(w, 10)}),
    "region's buffer": lambda w: w.allocator.regions[0].buffer(Number(w, 0), Number(w, 10)),
    "source": used_up,
    "source, for grow": grown,
    "source, for many": many_grown,
    "on_oom": out_of_memory,
    "owner": dropped_region,
    "collector": collected,
}


def made_by(result):
    """The Buffers and arrays of what a call gave."""
    if isinstance(result, dict):
        result = list(result.values())
    if isinstance(result, (list, tuple)):
        return [one for one in result if isinstance(one, (arenapy.Buffer, np.ndarray))]
    return [result] if isinstance(result, (arenapy.Buffer, np.ndarray)) else []


IN_THE_TARGET = {"slice", "view", "view, sequence", "array", "copy_from", "fill"}


def attempt(kind, door, acts):
    """One call, in the middle of which user code does the acts. Was it entered?"""
    world = World(kind)

    def both(world):
        verdict = None
        for act in acts:
            verdict = act(world)
            world.look()
        return verdict

    world.act = both
    result = None
    try:
        result = DOORS[door](world)
    except Wrong:
        raise
    except (ArithmeticError, AttributeError, BufferError, MemoryError, TypeError, ValueError):
        pass  # the caller's to see; what matters is what is left behind
    finally:
        world.act = None
    if door not in IN_THE_TARGET:  # else its bytes are the target's, or were
        world.made += made_by(result)
    del result
    world.end()
    world.arrays.clear()
    world.allocator = None  # whose source has the world: the collector cannot see that cycle
    return world.entered


#: Of these one in so many: the bookkeeping of a pool is dear to make, and to look at.
SHARE = {"pool": 3, "pool, debug": 12}


def attack(label, every):
    """All of them; how often user code came in by each door."""
    entered = dict.fromkeys(DOORS, 0)
    orders = [(act,) for act in ACTS]
    orders += list(itertools.product(ACTS, ACTS))[::every]
    for kind in ALLOCATORS:
        # The tier quick leaves out most of the rest, too: each act by some of the doors.
        share = SHARE.get(kind, 1) * max(1, every // 400) if every > 1 else 1
        for number, door in enumerate(DOORS):
            gc.freeze()  # `list_objects` looks at what comes now: all else is half of the time
            for acts in orders[number % share :: share]:
                label(f"{kind}: {door}: {', '.join(act.__name__ for act in acts)}")
                entered[door] += attempt(kind, door, acts)
    return entered


if __name__ == "__main__":
    sys.unraisablehook = lambda info: None  # what a finalizer raises is its own
    with open(sys.argv[1], "wb+") as file:
        file.truncate(1000)
        last = mmap.mmap(file.fileno(), 1000)

        def label(words):
            last[:] = words.encode()[:1000].ljust(1000)

        for door, times in attack(label, int(sys.argv[2])).items():
            print(f"{times:6} {door}")
