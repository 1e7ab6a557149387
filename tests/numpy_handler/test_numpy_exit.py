"""Odd lifetimes of arrays under `numpy_memory`: each in a process, which must end in good order.

As test_exit.py: a crash, a message or a status that is not 0 fails.
"""

import itertools

import pytest

pytestmark = [pytest.mark.sampled(full=3), pytest.mark.no_sanitizer]  # each case is a process

PRELUDE = """
import atexit, builtins, contextvars, gc, os, queue, sys, threading, traceback, types, weakref
import numpy as np
import arenapy
from arenapy import Existing, Host, Pool, Shared, handles, numpy_memory

def ramp(n):
    return np.arange(n, dtype="i4") * 3 + 1

def well(array):
    '''Whether an array of `ramp` has what it had.'''
    return (array == np.arange(array.size) * 3 + 1).all()
"""

MAKE = {
    "host": "pool = Pool()",
    "limited": "pool = Pool(1 << 20, Host(prefault=False), 1 << 20)",
    "hooked": "pool = Pool(8 << 20, on_oom=lambda nbytes: False)",
    "shared": "pool = Pool(64 << 20, Shared())",
    "existing": "pool = Pool(source=Existing(bytearray(1 << 20)), initial_bytes=1 << 19)",
    "timed": "pool = Pool(trim_after=0.001, trim_thread=True)",
}
#: Of every kind: the pool's, a view, objects, strings with an arena, libc's or the pool's, lazy.
HOLD = """
with numpy_memory(pool) as memory:
    array = ramp(1000)
    view = ramp(500)[10:20]
    things = np.array([[1], "two", array, pool, None], object)
    texts = np.array(["short", "long " * 100, ""], np.dtypes.StringDType())
    large = np.ones(300_000)
    zeros = np.zeros(5 << 20)
    empty = np.empty((0, 3))
    context = contextvars.copy_context()
found = handles(array)
region = found.region
buffer = pool.alloc(100)
"""
NAMES = [
    "array", "view", "things", "texts", "large", "zeros", "empty", "context", "found", "region",
    "buffer", "memory", "pool",
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


@every_kind
def test_installed_and_never_uninstalled(program):
    program("numpy_memory(pool, threads=True).install()\nx = ramp(9)")


@pytest.mark.parametrize("policy", ["system", "error"])
@pytest.mark.parametrize("make", ["host"])
def test_the_end_of_the_program_inside_a_context(program, policy):
    program(f"""
def generator():
    with numpy_memory(pool, on_full={policy!r}):
        yield ramp(100)
suspended = generator()
kept = next(suspended)
with numpy_memory(pool):
    more = ramp(1000)
    sys.exit(0)
""")


@pytest.mark.parametrize("make", ["host", "shared"])
@pytest.mark.parametrize("order", ["pool first", "pool last", "shuffled"])
def test_explicit_orders(program, order):
    names = {"pool first": NAMES[::-1], "pool last": NAMES, "shuffled": NAMES[5:] + NAMES[:5]}
    program("".join(f"del {name}; gc.collect()\n" for name in names[order]))


@pytest.mark.parametrize("make", ["host"])
@pytest.mark.parametrize("pair", list(itertools.permutations(["pool", "array", "context"], 2)))
def test_globals_cleared_in_an_odd_order(program, pair):
    """Module globals that start with one underscore go first: rename to choose the order."""
    first, second = pair
    program(f"""
_first = {first}
zz_last = {second}
del {first}, {second}
sys.modules['elsewhere'] = module = types.ModuleType('elsewhere')
module.kept = [_first, module, things]
""")


@every_kind
def test_modules_torn_out_from_under_live_arrays(program):
    program("""
for name in [name for name in sys.modules if name.split('.')[0] in ('arenapy', 'numpy')]:
    del sys.modules[name]
del arenapy, np, Existing, Host, Pool, Shared, handles, numpy_memory
gc.collect()
""")


@every_kind
def test_arrays_outlive_context_and_pool(program):
    program("""
gone = weakref.ref(pool)
del pool, memory, context, found, buffer, things
gc.collect()
assert gone() is None, "an array keeps the pool"
assert handles(array).allocator is None
for _ in range(3):
    assert well(array) and (view == np.arange(10, 20) * 3 + 1).all()
    assert texts.tolist() == ["short", "long " * 100, ""] and (large == 1).all()
    array[:] = ramp(1000)
    del large
    large = np.ones(300_000)
""")


@every_kind
def test_resize_after_the_pool_is_gone(program):
    """Nothing is left that could grow the pool: what it has no room for is libc's."""
    program("""
del pool, memory, context, found, buffer, things
gc.collect()
for n in (1200, 100, 50_000, 3_000_000, 7, 0, 20_000):
    kept = array.copy()
    array.resize(n, refcheck=False)
    same = min(kept.size, n)
    assert (array[:same] == kept[:same]).all() and not array[same:].any()
    array[:] = ramp(n)
texts[1] = "other " * 500
texts.resize(9, refcheck=False)
assert texts.tolist() == ["short", "other " * 500, *[""] * 7]
zeros.resize(10, refcheck=False)
assert not zeros.any()
""")


def test_resize_after_the_pool_is_gone_where_libc_is_not_wanted(bare):
    bare("""
pool = Pool()
with numpy_memory(pool, on_full="error"):
    array = ramp(1000)
del pool
gc.collect()
try:
    array.resize(1 << 22, refcheck=False)
except MemoryError:
    pass
else:
    assert handles(array), "libc's, although that was not wanted"
assert well(array[:1000])
array.resize(500, refcheck=False)
assert well(array)
""")


@every_kind
def test_cycles(bare, make):
    bare(f"""
gc.disable()
class Loud:
    def __init__(self, *held): self.held = held; self.me = self
    def __del__(self):
        for thing in self.held:
            len(thing)
class Tagged(np.ndarray): pass
for _ in range(5):
    {MAKE[make]}
    with numpy_memory(pool):
        cycle = np.empty(3, object)
        cycle[:] = [cycle, pool, numpy_memory(pool)]
        tagged = ramp(100).view(Tagged)
        tagged.me, tagged.pool, tagged.context = tagged, pool, contextvars.copy_context()
        loud = Loud(ramp(10), np.zeros(3))
""")


def test_a_source_in_a_cycle_with_an_array_is_collectable(bare):
    """An array keeps the memory, and nothing of the user's that leads back to the array."""
    bare("""
class Source:
    def __init__(self): self.inner = Host(prefault=False)
    def region(self, nbytes): return self.inner.region(nbytes)
    def hook(self, nbytes): return False
gone = []
for policy in ("system", "error"):
    source = Source()
    source.pool = Pool(source=source, on_oom=source.hook)
    source.memory = numpy_memory(source.pool, on_full=policy, threads=True)
    with source.memory:
        source.array = ramp(1000)
    gone.append(weakref.ref(source))
    kept = source.array
    del source
gc.collect()
assert [one() for one in gone] == [None, None]
assert well(kept)
""")


@every_kind
def test_use_in_atexit(program):
    out = program("""
def late():
    assert well(array) and not zeros[::1000].any()
    before = pool.stats().active_allocations
    with memory:
        made = [ramp(n) for n in (1, 1000, 20_000)]
        assert all(map(well, made))
        made[0].resize(500, refcheck=False)
    del made
    print("late", before - pool.stats().active_allocations)
    pool.check()
atexit.register(late)
del texts, large, things
""")
    assert out == "late 0\n"


@every_kind
def test_use_in_finalizers_during_shutdown(program):
    """Arrays come, grow and go while modules are already being cleared."""
    program("""
class Late:
    def __init__(self, *things): self.things = things
    def __del__(self):
        memory, array, contents = self.things
        assert array.tobytes() == contents
        with memory:
            kept = [array.copy() for _ in range(40)]
            kept[0].resize(100_000, refcheck=False)
            big = kept[0].repeat(3)
        del kept[::2]
        memory.pool.check()
        memory.install()
things = memory, array, array.tobytes()
late = Late(*things)
late.cycle = late
sys.late = Late(*things)
builtins.late = Late(*things)
""")


@every_kind
@pytest.mark.parametrize("what", ["array", "context", "texts", "zeros", "large"])
@pytest.mark.full
def test_the_capsule_dies_last(program, what):
    """Long after the pool, in what the interpreter clears at its very end."""
    program(f"""
sys.kept = builtins.kept = kept = {what}
kept_for_ever = [kept]
kept_for_ever.append(kept_for_ever)
del array, view, things, texts, large, zeros, empty, context, pool, memory, region, found, buffer
gc.collect()
gc.freeze()
""")


DAEMONS = {
    "asleep": "stay.wait()",
    "allocating": "while True: ramp(1000); np.zeros(50)",
    "growing": "while True: kept = [ramp(9000) for _ in range(30)]; kept.clear()",
    "resizing": "mine = ramp(10)\n    while True: mine = np.append(mine, mine)[:5000]",
    "reading text": "while True: np.fromstring(' 1.5' * 3000, sep=' ')",
    "falling back": "while True: np.empty(300_000)[::1000] = 1",
    "trimming": "while True: ramp(1000); pool.trim(); pool.stats()",
    "passing on": "while True: handover.put(ramp(50)); handover.get()",
}


@pytest.mark.parametrize("make", ["host", "limited", "timed"])
@pytest.mark.parametrize("busy", DAEMONS)
@pytest.mark.full
def test_daemon_threads(program, busy):
    program(f"""
stay, ready, handover = threading.Event(), threading.Barrier(4), queue.Queue()
def work():
    held = array[3:]
    ready.wait()
    {DAEMONS[busy]}
with numpy_memory(pool, threads=True):
    for _ in range(3):
        threading.Thread(target=work, daemon=True).start()
    ready.wait()
    stay.wait(0.05)
""")


@every_kind
def test_a_thread_that_runs_on_after_the_main_one(program):
    """It has the last references to arrays, the handler and the pool."""
    program("""
def late(box):
    threading.main_thread().join()
    array, memory = box
    box.clear()
    assert well(array) and handles(ramp(10))
    array.resize(2000, refcheck=False)
    with memory:
        assert well(ramp(5000))
    memory.pool.check()
    del array, memory
    gc.collect()
    ramp(100)
box = [array, memory]
with numpy_memory(pool, threads=True):
    threading.Thread(target=late, args=(box,)).start()
del array, memory, pool, things, context, found, buffer
""")
