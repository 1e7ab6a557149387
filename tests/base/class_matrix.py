"""Every class of the extension modules, and every way to call what its objects have.

Run as a program with a group (see `GROUPS`), a file and a number N: of all argument lists it tries
every Nth. Whatever happens, the file has the last call. `test_classes` runs it, since a call that
breaks a promise may end the process.
"""

import contextlib
import copy
import copyreg
import gc
import importlib
import itertools
import mmap
import pickle
import pkgutil
import sys
import tempfile
import warnings
from multiprocessing.reduction import ForkingPickler

import numpy as np
from cuda_support import a_gpu
from helpers import Pages

import arenapy
from arenapy import Bump, Existing, Host, Pool, Shared, Slab, cuda

ROOM = 256 << 10  # bytes of each allocator
NO_PAGES = Host(huge_pages=None, prefault=False)


def modules():
    """All extension modules of the package."""
    for found in pkgutil.walk_packages(arenapy.__path__, "arenapy."):
        if not found.name.endswith(("__main__", "._build")):
            module = importlib.import_module(found.name)
            if (getattr(module, "__file__", None) or "").endswith(".so"):
                yield module


def classes():
    """All their classes but those of Python code."""
    return [
        value
        for module in modules()
        for value in vars(module).values()
        if isinstance(value, type)
        and value.__module__ == module.__name__
        and not value.__flags__ & 1 << 9  # Py_TPFLAGS_HEAPTYPE
    ]


def name_of(cls):
    return f"{cls.__module__}.{cls.__name__}"


# Specimens: functions that make an object, in a state. What they return with it stays alive.


def closed(allocator):
    for region in allocator.regions:
        region.close()
    return allocator


def released(buffer):
    buffer.release()
    return buffer


def held(buffer):
    return buffer, memoryview(buffer)


def reset(arena):
    buffer = arena.alloc(100)
    arena.reset()
    return buffer


def ended_mark(arena):
    outer, inner = arena.mark(), arena.mark()
    arena.reset(outer)
    return inner, arena


def entered(arena):
    scope = arena.scope()
    return scope, scope.__enter__()


def left(arena):
    scope = arena.scope()
    with scope:
        pass
    return scope


def exhausted(listing):
    list(listing)
    return listing


def readonly():
    return Existing(bytes(1000), readonly=True).region()


def received():
    """A window of Shared memory, as another process gets it."""
    from multiprocessing.reduction import ForkingPickler

    return ForkingPickler.loads(ForkingPickler.dumps(Bump(ROOM, Shared()).alloc(500)))


TRACE = tempfile.gettempdir() + "/arenapy-class-matrix.trace"


def recorder():
    return module("diagnostics.recorder").Recorder(TRACE)


def inside(thing, cls):
    """An object of `cls` that a live one keeps, however far down: the collector tells."""
    seen, todo = set(), [thing]
    while todo:
        one = todo.pop()
        if type(one) is cls:
            return one, thing
        if id(one) not in seen and not isinstance(one, type) and type(one).__name__ != "module":
            seen.add(id(one))
            todo += gc.get_referents(one)
    raise LookupError(f"{thing!r} keeps no {cls}")


def received_file():
    """What a Buffer that was sent keeps of its file."""
    buffer = pickle.loads(ForkingPickler.dumps(Bump(ROOM, Shared()).alloc(100)))
    return *(ref() for ref in module("memory.shared")._received.values()), buffer


def bump(**options):
    return Bump(ROOM, NO_PAGES, **options)


def slab(**options):
    return Slab(1000, 100, NO_PAGES, **options)


def pool(**options):
    return Pool(16 << 20, NO_PAGES, **options)


def module(name):
    return importlib.import_module("arenapy." + name)


def stream():
    return cuda.Stream()


def device_pool():
    return Pool(16 << 20, cuda.Device(0))


def growing():
    return Bump(2 << 20, cuda.Device(grow=True), max_bytes=8 << 20)


def lent():
    return module("cuda.backing").lent_region(
        cuda.Device().hooks, 4096, lambda n: cuda.Device().region(n).address, lambda *_: None, id
    )


def used_elsewhere():
    """A Pool with a block that another stream was to use, and one that it still uses."""
    one = device_pool()
    blocks = [one.alloc(1000, stream=stream()), one.alloc(5000)]
    blocks[1].record_stream(stream())
    blocks.pop()
    return one, blocks


HOST = [
    bump,
    slab,
    pool,
    lambda: bump(max_bytes=4 * ROOM, strict=True, debug=True),
    lambda: slab(max_count=500, debug=True),
    lambda: pool(debug=True, trim_after=0.001, on_oom=lambda nbytes: False),
    lambda: Bump(ROOM, Pages(skew=64)),
    lambda: closed(bump()),
    lambda: closed(slab()),
    lambda: closed(pool(initial_bytes=1 << 20)),
    lambda: bump().alloc(1000),
    lambda: bump().alloc(0),
    lambda: held(bump().alloc(1000)),
    lambda: released(bump().alloc(1000)),
    lambda: reset(bump()),
    lambda: slab().alloc(),
    lambda: held(pool().alloc(1 << 20)),
    lambda: released(pool().alloc(100)),
    lambda: Host().region(ROOM).buffer(),
    lambda: readonly().buffer(10, 100),
    received,
    lambda: bump().alloc(1000)[10:30],
    lambda: bump().alloc(1000).view((2, 5), "f4"),
    lambda: pool().alloc(1000).view((), [("x", "i2"), ("y", ">f8")]),
    lambda: released(slab().alloc(1000)[::]),
    lambda: reset(bump()),
    lambda: Host().region(ROOM),
    lambda: Existing(bytearray(ROOM)).region(),
    lambda: (lambda arena: (arena.regions[0], arena))(bump()),
    lambda: Shared().region(ROOM),
    readonly,
    lambda: inside(received(), arenapy.Region),
    lambda: closed(bump()).regions[0],
    lambda: (lambda arena: (arena.mark(), arena))(bump()),
    lambda: bump().mark(),
    lambda: ended_mark(bump()),
    lambda: bump().scope(),
    lambda: entered(bump()),
    lambda: left(bump()),
    recorder,
    lambda: arenapy.trace.record(bump(), TRACE),
    lambda: module("linux.vm").map_memory(ROOM),
    lambda: module("linux.vm").open_file("/dev/null", 0),
    lambda: module("linux.vm").renewal(module("linux.vm").open_file("/dev/null", 0)),
    lambda: inside(readonly(), module("memory.claims").Claim),
    lambda: inside(arenapy.numpy_memory(pool()), module("numpy_handler.contexts").PoolHandler),
    lambda: pool().blocks(),
    lambda: slab().blocks(),
    lambda: exhausted(pool(initial_bytes=1 << 20).blocks()),
    lambda: exhausted(slab().blocks()),
    lambda: module("commands.replay.loop").NoHeap(),
    lambda: module("commands.replay.loop").BumpHeap(bump()),
    lambda: module("commands.replay.loop").PoolHeap(pool()),
    lambda: module("commands.replay.loop").SlabHeap(slab()),
    lambda: module("commands.replay.loop").MallocHeap(64, 64),
    lambda: module("numpy_handler.handler").Counts(),
    lambda: module("pool.core").BlockBatch(3),
    lambda: module("diagnostics.call_sites").CallStacks(5),
    lambda: module("diagnostics.ledger").Ledger("heap"),
    lambda: inside(pool(debug=True), module("diagnostics.ledger").Ledger),
    lambda: inside(pool(), module("pool.core").PoolCore),
    lambda: inside(pool(), module("pool.memory").PoolMemory),
    lambda: inside(slab(), module("slab.core").SlabCore),
    lambda: inside(bump(), module("bump.core").BumpCore),
    lambda: inside(Bump(ROOM, Host(grow=True), max_bytes=4 * ROOM), module("bump.growth").InPlace),
    received_file,
]
CUDA = [
    stream,
    lambda: (lambda one: (one, one.close()))(stream()),
    lambda: stream().record(),
    device_pool,
    lambda: Bump(ROOM, cuda.Managed()),
    lambda: Slab(1000, 100, cuda.Pinned(huge_pages=None)),
    used_elsewhere,
    lambda: closed(device_pool()),
    lambda: device_pool().alloc(1000),
    lambda: device_pool().empty((3, 4), "f4"),
    lambda: Bump(ROOM, cuda.Managed()).empty(100, "c16"),
    lambda: Bump(ROOM, cuda.Pinned(huge_pages=None)).alloc(100),
    lambda: Bump(ROOM, cuda.Device()).scope(),
    lambda: cuda.Device().region(1 << 20),
    lambda: cuda.Pinned(huge_pages=None).region(ROOM),
    lambda: inside(device_pool(), module("cuda.copies").CudaMemory),
    lambda: inside(device_pool().alloc(100), module("cuda.backing").DeviceBacking),
    lambda: inside(Bump(ROOM, cuda.Pinned()), module("cuda.backing").PinnedBacking),
    lambda: inside(Bump(1 << 20, cuda.DriverPool()), module("cuda.backing").PooledBacking),
    lambda: inside(Bump(1 << 20, cuda.DriverPool()), module("cuda.backing").DriverPoolHandle),
    lambda: inside(lent(), module("cuda.backing").LentBacking),
    lambda: inside(growing(), module("cuda.backing").DeviceReservation),
    lambda: inside(growing(), module("cuda.backing").GrownBacking),
    lambda: inside(growing(), module("cuda.backing").Addresses),
    lambda: inside(used_elsewhere()[0], module("pool.stream_cache").StreamCache),
    lambda: inside(used_elsewhere()[0], module("pool.stream_cache").StreamCaches),
    lambda: inside(stream().record(), module("cuda.fence").EventFence),
    lambda: inside(used_elsewhere()[0], module("cuda.stream_ref").StreamRef),
]


def made_by_hand():
    """Objects that Python code could make without the package's help: see `WAYS`."""
    for cls in classes():
        for words, way in WAYS.items():
            yield f"{name_of(cls)} {words}", lambda cls=cls, way=way: way(cls)


def derived(cls, **body):
    return type("Derived", (cls,), body)


WAYS = {
    "called": lambda cls: cls(),
    "called by its type": lambda cls: type.__call__(cls),
    "called with a number": lambda cls: cls(ROOM),
    "called with numbers": lambda cls: cls(8, 8),
    "by __new__": lambda cls: cls.__new__(cls),
    "by __new__ with a number": lambda cls: cls.__new__(cls, ROOM),
    "by __new__ of object": lambda cls: object.__new__(cls),
    "by __new__ of its base": lambda cls: cls.__base__.__new__(cls),
    "by copyreg": lambda cls: copyreg.__newobj__(cls),
    "by copyreg of old": lambda cls: copyreg._reconstructor(cls, object, None),
    "derived": lambda cls: derived(cls)(),
    "derived, with a number": lambda cls: derived(cls)(ROOM),
    "derived, by __new__": lambda cls: (lambda new: new.__new__(new))(derived(cls)),
    "derived, not initialized": lambda cls: derived(cls, __init__=lambda self: None)(),
    "derived, by a metaclass": lambda cls: type(type)("Meta", (type,), {})("D", (cls,), {})(),
}


def named(specimens):
    return ((f"specimen {number}", make) for number, make in enumerate(specimens))


@contextlib.contextmanager
def a_driver():
    with a_gpu(leaks=True) as driver:
        yield driver
        driver.errors.clear()  # numbers that are no streams were given as such


#: name: (what it needs, (words, how to make an object) of all objects)
GROUPS = {
    "by hand": (a_driver, made_by_hand),
    "host": (contextlib.nullcontext, lambda: named(HOST)),
    "cuda": (a_driver, lambda: named(CUDA)),
}

#: Nobody sees an object of these, and only a derived class has one.
NEVER_SEEN = {
    "arenapy.allocator.allocator.Allocator", "arenapy.buffer.block.CountShard",
    "arenapy.buffer.block.Block",
    "arenapy.buffer.block.MemoryOwner", "arenapy.cuda.backing.Leaving", "arenapy.cuda.copies.Side",
    "arenapy.cuda.foreign.Exported", "arenapy.cuda.foreign.Window", "arenapy.cuda.peers.Relay",
    "arenapy.interop.cupy_blocks.Allocator", "arenapy.interop.cupy_blocks.Kept",  # without CuPy
    "arenapy.interop.cupy_blocks.PinnedAllocator", "arenapy.interop.cupy_blocks.PinnedMemory",
    "arenapy.interop.hip_calls.Memory",  # without HIP
    "arenapy.cuda.foreign.Foreign", "arenapy.cuda.foreign.Taken", "arenapy.cuda.ordering.Batch",
    "arenapy.cuda.ordering.Ordering", "arenapy.cuda.ordering.Queues", "arenapy.cuda.fence.Retained",
    "arenapy.cuda.stream_ref.OwnStream", "arenapy.cuda.fence.GraphFence",
    "arenapy.cuda.backing.LastPage", "arenapy.cuda.sharing.LeaseFence",
    "arenapy.cuda.stream_ref.Named", "arenapy.cuda.resource.HandedOut",
    "arenapy.cuda.stream_ref.WeakValues",
    "arenapy.cuda.fence.Fence", "arenapy.cuda.ordering.Parked",
    "arenapy.pool.thread_cache.ThreadCaches", "arenapy.buffer.block.StreamHooks",
    "arenapy.numpy_handler.contexts.Context", "arenapy.numpy_handler.contexts.Entry",
    "arenapy.numpy_handler.contexts.Presence", "arenapy.numpy_handler.contexts.Starts",
    "arenapy.numpy_handler.contexts.Turn",
    "arenapy.pool.page_heap.Pages",
    "arenapy.memory.region.Backing", "arenapy.allocator.allocator_core.AllocatorCore",
    "arenapy.commands.replay.loop.Heap", "arenapy.pool.page_heap.Segments",
    "arenapy.slab.core.Items", "arenapy.bump.core.Arena",
}  # fmt: skip


def specimen(make):
    made = make()
    return made if isinstance(made, tuple) else (made, None)


class Number:
    """What only `__index__` makes a number."""

    def __index__(self):
        return 7


def arguments(one):
    """Argument lists, for a method of `one`: none fits all, and each fits some."""
    other = bump()
    values = [
        None, 0, 1, -1, 40, 1 << 40, 1 << 70, 2.5, True, "x", "cpu", b"abcd", bytearray(1000), [],
        [3, 5], (2, 3), {"x": "f4"}, {64: 2}, slice(2, 9), object(), Number(), Exception, one,
        other, other.alloc(10), other.mark(), other.regions[0], other.scope(), np.zeros(125),
    ]  # fmt: skip
    yield ()
    yield from ((value,) for value in values)
    yield from itertools.product([None, 0, 5, "u1", (2, 2), one], [None, 1, "f4", other, one])
    yield from ((value,) * 3 for value in (None, 3, one))
    yield (1, 8, "C")
    yield from ((value,) * 4 for value in (None, 1))


ODD = {
    "repr": repr, "str": str, "hash": hash, "bool": bool, "len": len, "list": list, "dir": dir,
    "int": int, "equal": lambda one: one == one, "less": lambda one: one < one,
    "item": lambda one: one[0], "slice": lambda one: one[1:3], "steps": lambda one: one[::2],
    "items": lambda one: one[1, 2], "set item": lambda one: one.__setitem__(0, 1),
    "memoryview": memoryview, "bytes": bytes, "asarray": np.asarray, "dlpack": np.from_dlpack,
    "with": lambda one: one.__enter__() and one.__exit__(None, None, None),
    "copy": copy.copy, "deepcopy": copy.deepcopy, "sizeof": sys.getsizeof,
    "pickle": lambda one: pickle.loads(pickle.dumps(one, 2)),
    "pickle 5": lambda one: pickle.loads(pickle.dumps(one, 5)),
    "reduce": lambda one: one.__reduce__(), "state": lambda one: one.__getstate__(),
    "set state": lambda one: one.__setstate__((None,) * 9),
    "another class": lambda one: setattr(one, "__class__", arenapy.Buffer),
    "attribute": lambda one: setattr(one, "anything", 1), "vars": vars,
    "init": lambda one: one.__init__(), "init 1": lambda one: one.__init__(ROOM),
    "another": lambda one: type(one)(), "collect": lambda one: gc.collect(0),
}  # fmt: skip


def members(one):
    """The names of all that the classes of an object define."""
    names = dict.fromkeys(name for cls in type(one).__mro__[:-1] for name in vars(cls))
    return [name for name in names if name not in ("__new__", "__doc__", "__pyx_vtable__")]


def looks(one):
    """(words, what may be done with one object, one after the other)"""
    for name in members(one):
        yield f"get .{name}", lambda one, name=name: getattr(one, name)
        yield f"set .{name}", lambda one, name=name: setattr(one, name, None)
        yield f"delete .{name}", lambda one, name=name: delattr(one, name)
    yield from ODD.items()


def acts(one, every):
    """(words, what is done with an object like this one, each with one of its own)"""
    for number, name in enumerate(members(one)):
        if not callable(getattr(type(one), name, None)):
            continue
        for given in itertools.islice(arguments(one), number % every, None, every):
            again = [a is one for a in given]
            words = tuple("itself" if same else a for same, a in zip(again, given, strict=True))
            yield (
                f".{name}{words!r}"[:300],
                lambda this, name=name, given=given, again=again: getattr(this, name)(
                    *(this if same else a for same, a in zip(again, given, strict=True))
                ),
            )


def survive(act, one):
    """It may raise, but not what only a mistake in C raises."""
    try:
        act(one)
    except SystemError:
        raise
    except Exception:
        pass


def attack(group, label, every):
    """Do everything; how many calls that were, of how many objects that there are."""
    place, specimens = GROUPS[group]
    done = objects = 0
    with place() as driver:
        for words, make in specimens():
            label(words)
            try:
                one, kept = specimen(make)
            except (TypeError, ValueError):
                continue
            objects += 1
            what = f"{name_of(type(one))} ({words})"
            for words, act in looks(one):
                label(f"{what}: {words}")
                survive(act, one)
                done += 1
            for words, act in acts(one, every):
                this, kept = specimen(make)
                label(f"{what}: {words}")
                survive(act, this)
                del this, kept
                if driver:  # the memory of what is gone is free once its streams are done
                    driver.drain()
                done += 1
    return done, objects


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with open(sys.argv[2], "wb+") as file:
        file.truncate(1000)
        last = mmap.mmap(file.fileno(), 1000)

        def label(words):
            last[:] = words.encode("ascii", "replace")[:1000].ljust(1000)

        print(*attack(sys.argv[1], label, int(sys.argv[3])))
