"""What `fault_operations` has done with allocators, and with NumPy's arrays in them."""

import numpy as np
from injection import MIB, Act, operation, seen

from arenapy import Bump, Host, Pool, Shared, Slab, numpy_memory

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


IN_PLACE = {"source": Host(grow=True)}

bump_act("in place, growing", lambda arena, first, held: arena.alloc(3 * MIB), **IN_PLACE)
bump_act("in place, a batch", lambda arena, *_: arena.alloc_many([MIB // 2] * 5), **IN_PLACE)


def grown(arena, first, held):
    with arena.scope():
        block = arena.alloc(1000)
        # If it cannot grow in place, it moves.
        assert len(arena.grow(block, 2 * MIB)) == 2 * MIB


bump_act("in place, a block", grown, **IN_PLACE)


def in_place(kind, **options):
    """Bumps over one range of addresses."""

    @operation(f"Bump in place, {kind.__name__}, trim")
    def trimmed():
        arena = Bump(MIB, kind(grow=True, **options), 16 * MIB)

        def act():
            with arena.scope():
                arena.alloc(5 * MIB)
            arena.trim()

        return Act(act, view=lambda: (arena.check(), arena.used))

    @operation(f"Bump in place, {kind.__name__}, made")
    def made():
        source = kind(grow=True, **options)
        return Act(lambda: Bump(MIB, source, 16 * MIB), good=lambda arena: arena.check())


in_place(Host)
in_place(Shared, lock=True)


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


@operation("Pool alloc, first")
def pool_first():
    blocks = Pool(max_bytes=64 * MIB)

    def view():  # but for the address space that it has reserved
        blocks.check()
        return figures(blocks), blocks.stats().reserved_bytes

    return Act(lambda: blocks.alloc(100), view=view)


def pool_act(name, use, **options):
    @operation(f"Pool {name}")
    def make():
        blocks = Pool(**({"max_bytes": 256 * MIB} | options))
        held = [blocks.alloc(n) for n in (100, 5000, 100_000, MIB)]
        idle = [blocks.alloc(n) for n in (100, 100, 5000, 100_000, 300_000, MIB)]
        last = blocks.alloc(MIB // 2)  # so that no region is idle, which a refusal gives back
        shown = memoryview(held[2])
        del idle
        made = []

        def act():
            made.append(use(blocks, held))

        def view():
            return (*seen(blocks)[1:], figures(blocks), len(shown), len(held), len(last))

        return Act(act, view=view)


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
    pool_act(f"over Shared in place {_name}", POOL_ACTS[_name], source=Shared(grow=True))
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
