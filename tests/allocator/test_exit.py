"""No order of teardown at interpreter exit crashes, prints or hangs.

Each program leaves Buffers where the interpreter tears down at its own pace: in module globals, in
cycles, in atexit, in thread locals, with threads that still run.
"""

import itertools

import pytest

pytestmark = [pytest.mark.sampled(full=3), pytest.mark.no_sanitizer]  # each case is a process

PRELUDE = """
import atexit, builtins, ctypes, gc, os, queue, sys, threading, types
import numpy as np
import arenapy
from arenapy import Bump, Existing, Host, Pool, Shared, Slab
"""

MAKE = {
    "bump": "keeper = Bump(1 << 20)",
    "bump, growing": "keeper = Bump(4096, max_bytes=1 << 20)",
    "bump, existing": "keeper = Bump(1 << 20, Existing(bytearray(1 << 20)))",
    "bump, shared": "keeper = Bump(1 << 20, Shared())",
    "pool": "keeper = Pool()",
    "pool, limited": "keeper = Pool(8 << 20, initial_bytes=1 << 20, on_oom=lambda n: False)",
    "pool, shared": "keeper = Pool(source=Shared())",
    "pool, existing": "keeper = Pool(source=Existing(bytearray(1 << 20)))",
    "pool, timed": "keeper = Pool(trim_after=0.001, trim_thread=True)",
    "slab": "keeper = Slab(4096, 32, max_count=1 << 10)",
    "slab, shared": "keeper = Slab(4096, 1024, Shared())",
    "slab, existing": "keeper = Slab(4096, 200, Existing(bytearray(1 << 20)))",
}
HOLD = """
buffer = keeper.alloc(100)
view = memoryview(keeper.alloc(100))
array = keeper.empty((5, 5), "f4")
part = keeper.alloc(100)[3:7]
seen = np.ndarray((10,), "u1", buffer=keeper.alloc(10))
tensor = np.from_dlpack(keeper.alloc(64))
capsule = keeper.alloc(64).__dlpack__(max_version=(1, 0))
many = keeper.alloc_many([10] * 20)
grown = keeper.alloc_many([4000] * 30)
keeper.alloc(300).release()
region = keeper.regions[0]
mark = scope = None
if isinstance(keeper, Bump):
    mark, scope = keeper.mark(), keeper.scope()
    scope.__enter__()
"""
NAMES = [
    "buffer", "view", "array", "part", "seen", "tensor", "capsule", "many", "mark", "scope",
    "region", "keeper",
]  # fmt: skip

every_kind = pytest.mark.parametrize("make", MAKE)


@pytest.fixture
def program(run_script, make):
    """Run a program that has what `HOLD` has, of what `MAKE` makes."""
    return lambda source="", **how: run_script(PRELUDE + MAKE[make] + HOLD + source, **how)


@pytest.fixture
def bare(run_script):
    """Run one that has nothing of that."""
    return lambda source: run_script(PRELUDE + source)


@every_kind
def test_module_globals(program):
    program()


@pytest.mark.parametrize("make", ["bump, growing", "pool", "slab"])
@pytest.mark.parametrize("order", ["keeper first", "keeper last", "shuffled"])
def test_explicit_orders(program, order):
    names = {"keeper first": NAMES[::-1], "keeper last": NAMES, "shuffled": NAMES[5:] + NAMES[:5]}
    program("".join(f"del {name}\n" for name in names[order]))


@pytest.mark.parametrize("make", ["bump", "pool", "slab"])
@pytest.mark.parametrize(
    "pair", list(itertools.permutations(["keeper", "array", "capsule", "many"], 2))
)
@pytest.mark.sampled
@pytest.mark.full
def test_globals_cleared_in_an_odd_order(program, pair):
    """Module globals that start with one underscore go first: rename to choose the order."""
    first, second = pair
    program(f"""
_first = {first}
zz_last = {second}
del {first}, {second}
sys.modules['elsewhere'] = module = types.ModuleType('elsewhere')
module.kept = [_first, module]
""")


@every_kind
def test_modules_torn_out_from_under_live_buffers(program):
    program("""
for name in [name for name in sys.modules if name.split('.')[0] in ('arenapy', 'numpy')]:
    del sys.modules[name]
del arenapy, np, Bump, Existing, Host, Pool, Shared, Slab
gc.collect()
""")


@every_kind
def test_cycles(bare, make):
    bare(f"""
gc.disable()
class Source:
    def __init__(self): self.inner = Host()
    def region(self, nbytes): return self.inner.region(nbytes)
class Owner(bytearray): pass
class Loud:
    def __init__(self, *held): self.held = held; self.me = self
    def __del__(self):
        for thing in self.held:
            len(thing)
for _ in range(5):
    {MAKE[make]}
    kept = [keeper, keeper.alloc(9), memoryview(keeper.alloc(9)), keeper.empty(3)]
    kept.append(kept)
    loud = Loud(keeper.alloc(4), keeper.empty(4))
    owner = Owner(1 << 14)
    arena = Bump(1 << 14, Existing(owner))
    owner.content = [arena, arena.alloc(9), memoryview(arena.alloc(9)), arena.mark(), owner]
    for kind in (
        lambda s: Bump(1 << 12, s), lambda s: Pool(source=s),
        lambda s: Slab(64, 4, s, max_count=8),
    ):
        source = Source()
        own = kind(source)  # which keeps its source, and so itself
        source.user, source.blocks = own, own.alloc_many([64] * 5)
""")


@pytest.mark.parametrize("make", ["pool", "pool, limited", "pool, existing", "slab"])
def test_use_in_atexit(program):
    out = program("""
def late():
    before = keeper.stats().active_allocations
    keeper.empty(10)[:] = 1
    keeper.alloc(5).release()
    many.clear()
    keeper.trim()
    keeper.check()
    print("late", before - keeper.stats().active_allocations)
atexit.register(late)
""")
    assert out == "late 20\n"


@pytest.mark.parametrize("make", ["bump", "bump, growing"])
def test_use_of_an_arena_in_atexit(program):
    out = program("""
def late():
    with keeper.scope():
        keeper.empty(10)[:] = 1
        keeper.alloc(5).release()
    keeper.reset()
    keeper.check()
    print("late", array.sum() is not None, keeper.retired > 0)
atexit.register(late)
""")
    assert out == "late True True\n"


@every_kind
def test_use_in_finalizers_during_shutdown(program):
    """Allocating, releasing, trimming and resetting while modules are already being cleared."""
    program("""
class Late:
    def __init__(self, *things): self.things = things
    def __del__(self):
        keeper, array, buffer, mark = self.things
        kept = [keeper.alloc(4000) for _ in range(40)]
        array[:] = 2
        buffer.release()
        del kept[::2]
        (keeper.reset if mark else keeper.trim)()
        keeper.check()
late = Late(keeper, array, buffer, mark)
late.cycle = late
sys.late = Late(keeper, array, buffer, mark)
builtins.late = Late(keeper, array, buffer, mark)
""")


@pytest.mark.parametrize("source", ["Host()", "Host(grow=True)", "Shared()", "Shared(grow=True)"])
@pytest.mark.sampled
def test_growth_while_nothing_can_be_imported(bare, source):
    out = bare(f"""
class Late:
    def __init__(self, allocator): self.allocator = allocator
    def __del__(self): print(len(self.allocator.empty(3 << 20, "u1")))
source = arenapy.{source}
made = [Pool(64 << 20, source), Slab(4 << 20, 1, source, max_count=9), Bump(4096, source, 64 << 20)]
kept = builtins.kept = [one.empty(100, "u1") for one in made]
builtins.late = [Late(one) for one in made]
del made
""")
    assert out == "3145728\n" * 3


def test_thread_locals(bare):
    bare("""
local = threading.local()
arenas = arenapy.PerThread(lambda: Bump(1 << 16))
ready, stay = threading.Barrier(4), threading.Event()
def work():
    local.arena = Bump(1 << 16)
    local.kept = local.arena.empty(10), memoryview(local.arena.alloc(5))
    local.mine = arenas.get(), arenas.alloc(9), arenas.empty(3)
    ready.wait()
    stay.wait()
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
ready.wait()
local.mine = arenas.get(), arenas.alloc(9), arenas.empty(3)
""")


DAEMONS = {
    "asleep": "stay.wait()",
    "allocating": "while True: keeper.alloc(1000).fill(1)",
    "growing": "while True: kept = [keeper.alloc(4000) for _ in range(30)]; kept.clear()",
    "arrays": "while True: keeper.empty(10)[:] = 1; memoryview(keeper.alloc(9))",
    "many": "while True: kept = keeper.alloc_many([10] * 30); del kept",
    "consuming": "while True: np.from_dlpack(keeper.alloc(5)); keeper.alloc(9).__dlpack__()",
    "trimming": "while True: keeper.alloc(4000); keeper.trim(); keeper.stats()",
    "passing on": "while True: handover.put(keeper.alloc(50)); handover.get()",
}
#: With an arena of the thread's own.
ARENAS = {
    "asleep": "stay.wait()",
    "allocating": "with arena.scope(): arena.empty(10)[:] = 1; memoryview(arena.alloc(9))",
    "dropping": "arena.reset(); kept = [arena.empty(9) for _ in range(50)]; kept.clear()",
    "consuming": "arena.reset(); np.from_dlpack(arena.alloc(5)); arena.alloc(9).__dlpack__()",
}
BUSY = [*itertools.product(DAEMONS.values(), ["pool", "pool, timed", "slab"])]
BUSY += [
    (f"arena = Bump(1 << 20)\n    while True:\n        {body}", "bump") for body in ARENAS.values()
]


@pytest.mark.parametrize(("busy", "make"), BUSY)
@pytest.mark.full
def test_daemon_threads(program, busy):
    program(f"""
stay, ready, handover = threading.Event(), threading.Barrier(4), queue.Queue()
def work(array, view):
    held = array, view, np.ndarray(5, "u1", buffer=view)
    ready.wait()
    {busy}
for _ in range(3):
    threading.Thread(target=work, args=(array, view), daemon=True).start()
ready.wait()
stay.wait(0.05)
""")


@every_kind
def test_the_last_reference_dies_on_another_thread(run_script, make):
    """After the main thread has finished."""
    run_script(
        PRELUDE
        + MAKE[make]
        + """
def late(box):
    threading.main_thread().join()
    array, view, keeper = box
    array[:] = 1
    box.clear()
    del array, view
    keeper.alloc(100).fill(2)
    keeper.check()
box = [keeper.empty(10), memoryview(keeper.alloc(9)), keeper]
threading.Thread(target=late, args=(box,)).start()
del keeper
"""
    )


def test_sys_exit_inside_scopes(run_script):
    run_script(
        PRELUDE
        + MAKE["bump"]
        + """
with keeper.scope(), keeper.scope():
    kept = keeper.empty(9)
    sys.exit(0)
"""
    )


@pytest.mark.parametrize("make", ["bump, growing", "pool", "pool, limited", "slab"])
def test_exit_in_a_forked_child(program):
    """Both processes end in an orderly way, with all that the parent held."""
    program("""
if os.fork():
    assert os.wait()[1] == 0
else:
    keeper.alloc(200).fill(1)
    del buffer, many
""")


@pytest.mark.parametrize("make", ["bump, shared", "pool, shared", "slab, shared"])
def test_exit_of_a_child_that_only_sees_the_memory(program):
    program("""
if os.fork():
    assert os.wait()[1] == 0
    array[:] = 1
    keeper.alloc(100).fill(1)
    keeper.check()
""")


def test_a_consumer_deletes_its_tensor_during_finalization(bare):
    """A C library may keep a tensor past the end of the interpreter's modules."""
    bare("""
class Managed(ctypes.Structure):
    _fields_ = [("tensor", ctypes.c_char * 48), ("context", ctypes.c_void_p),
                ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p))]
pointer = ctypes.pythonapi.PyCapsule_GetPointer
pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
rename = ctypes.pythonapi.PyCapsule_SetName
rename.argtypes = (ctypes.py_object, ctypes.c_char_p)
class Consumer:
    used = b"used_dltensor"
    def __init__(self, capsule):
        self.at = pointer(capsule, b"dltensor")
        self.delete = Managed.from_address(self.at).deleter
        rename(capsule, self.used)
    def __del__(self):
        self.delete(self.at)
builtins.kept = consumer = Consumer(Bump(1 << 12).alloc(64).__dlpack__())
consumer.cycle = consumer
sys.last = Consumer(Bump(1 << 12).alloc(64).__dlpack__())
""")


def test_a_thread_that_ends_with_the_interpreter_while_it_grows_a_slab(run_script):
    """Who allocates later does not wait for it."""
    run_script("""
        import builtins, threading, time
        from arenapy import Host, OutOfMemory, Slab

        growing = threading.Event()

        class Source:
            def region(self, nbytes):
                if threading.current_thread() is not threading.main_thread():
                    growing.set()
                    time.sleep(1000)
                return Host(huge_pages=None).region(nbytes)

        slab = Slab(64, 10, Source(), max_count=1000)
        kept = [slab.alloc() for _ in range(10)]
        threading.Thread(target=slab.alloc, daemon=True).start()
        growing.wait()

        class Late:
            def __init__(self):
                self.slab, self.refused = slab, OutOfMemory

            def __del__(self):
                try:
                    self.slab.alloc()
                except self.refused:
                    pass

        builtins.late = Late()
    """)


@pytest.mark.full
def test_the_trimming_thread_ends_with_its_pool(bare):
    """And keeps neither the pool nor the process."""
    bare("""
import time, weakref
pool = Pool(trim_after=0.5, trim_thread=True)
pool.alloc(1 << 20).release()
assert pool.stats().total_allocations == 1
end = time.monotonic() + 20
while pool.stats().reserved_bytes and time.monotonic() < end:
    time.sleep(0.01)
assert pool.stats().reserved_bytes == 0, "nobody used it, and it was not trimmed"
gone = weakref.ref(pool)
names = [thread.name for thread in threading.enumerate()]
assert names.count("arenapy-trim") == 1
while gone() is not None and time.monotonic() < end:
    pool = None
    time.sleep(0.01)
assert gone() is None
while threading.active_count() > 1 and time.monotonic() < end:
    time.sleep(0.01)
assert threading.active_count() == 1
""")
