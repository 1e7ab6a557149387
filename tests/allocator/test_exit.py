"""No order of teardown at interpreter exit crashes, prints or hangs.

Each program leaves buffers where the interpreter tears down at its own pace: in module globals, in
cycles, in atexit, in thread locals, with threads that still run.
"""

import itertools

import pytest

pytestmark = [pytest.mark.sampled(full=3), pytest.mark.no_sanitizer]  # each case is a process

PRELUDE = """
import atexit, ctypes, gc, sys, threading, types
import numpy as np
import arenapy
from arenapy import Bump, Existing, Host
"""

MAKE = {
    "host": "arena = Bump(1 << 16)",
    "growing": "arena = Bump(4096, max_bytes=1 << 20)\nfiller = arena.alloc(100_000)",
    "existing": "memory = bytearray(1 << 16)\narena = Bump(1 << 16, source=Existing(memory))",
    "shared": "arena = Bump(1 << 16, source=arenapy.Shared())",
}
HOLD = """
buffer = arena.alloc(100)
view = memoryview(arena.alloc(100))
array = arena.empty((5, 5), "f4")
part = arena.alloc(100)[3:7]
seen = np.ndarray((10,), "u1", buffer=arena.alloc(10))
tensor = np.from_dlpack(arena.alloc(64))
capsule = arena.alloc(64).__dlpack__(max_version=(1, 0))
mark = arena.mark()
scope = arena.scope()
scope.__enter__()
region = arena.regions[0]
"""
NAMES = [
    "buffer",
    "view",
    "array",
    "part",
    "seen",
    "tensor",
    "capsule",
    "mark",
    "scope",
    "region",
    "arena",
]


@pytest.mark.parametrize("make", MAKE)
def test_module_globals(run_script, make):
    run_script(PRELUDE + MAKE[make] + HOLD)


@pytest.mark.parametrize("order", ["arena first", "arena last", "shuffled"])
def test_explicit_orders(run_script, order):
    names = {"arena first": NAMES[::-1], "arena last": NAMES, "shuffled": NAMES[5:] + NAMES[:5]}
    deletes = "\n".join(f"del {name}" for name in names[order])
    run_script(PRELUDE + MAKE["growing"] + HOLD + deletes)


@pytest.mark.parametrize("pair", list(itertools.permutations(["arena", "array", "capsule"], 2)))
def test_globals_cleared_in_an_odd_order(run_script, pair):
    """Module globals that start with one underscore go first: rename to choose the order."""
    first, second = pair
    run_script(
        PRELUDE
        + MAKE["host"]
        + HOLD
        + f"_first = {first}; zz_last = {second}; del {first}, {second}\n"
        + "sys.modules['elsewhere'] = module = types.ModuleType('elsewhere')\n"
        + "module.kept = [_first, module]\n"
    )


def test_modules_torn_out_from_under_live_buffers(run_script):
    run_script(
        PRELUDE
        + MAKE["host"]
        + HOLD
        + """
for name in [name for name in sys.modules if name.split('.')[0] in ('arenapy', 'numpy')]:
    del sys.modules[name]
del arenapy, np, Bump, Existing, Host
gc.collect()
"""
    )


def test_cycles(run_script):
    run_script(
        PRELUDE
        + """
class Owner(bytearray):
    pass
class Loud:
    def __init__(self, *held): self.held = held; self.me = self
    def __del__(self):
        for thing in self.held:
            len(thing)
for _ in range(10):
    owner = Owner(1 << 14)
    arena = Bump(1 << 14, source=Existing(owner))
    owner.content = [arena, arena.alloc(9), memoryview(arena.alloc(9)), arena.mark(), owner]
    loud = Loud(arena.alloc(4), arena.empty(4))
    gc.disable()
"""
    )


def test_use_in_atexit(run_script):
    out = run_script(
        PRELUDE
        + MAKE["host"]
        + HOLD
        + """
def late():
    with arena.scope():
        arena.empty(10)[:] = 1
        arena.alloc(5).release()
    arena.reset()
    arena.check()
    print("late", array.sum() is not None, arena.retired > 0)
atexit.register(late)
"""
    )
    assert out == "late True True\n"


def test_use_in_finalizers_during_shutdown(run_script):
    """Allocating, releasing and resetting while modules are already being cleared."""
    run_script(
        PRELUDE
        + MAKE["growing"]
        + HOLD
        + """
class Late:
    def __init__(self, *things): self.things = things
    def __del__(self):
        arena, array, buffer = self.things
        with arena.scope():
            arena.alloc(50_000)
        array[:] = 2
        buffer.release()
        arena.reset()
late = Late(arena, array, buffer)
late.cycle = late
sys.late = Late(arena, array, buffer)
import builtins
builtins.late = Late(arena, array, buffer)
"""
    )


def test_thread_locals(run_script):
    run_script(
        PRELUDE
        + """
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
"""
    )


@pytest.mark.parametrize("busy", ["asleep", "allocating", "dropping", "consuming"])
def test_daemon_threads(run_script, busy):
    body = {
        "asleep": "stay.wait()",
        "allocating": "\n".join(
            [
                "arena = Bump(1 << 16)",
                "    while True:",
                "        with arena.scope():",
                "            arena.empty(10)[:] = 1; memoryview(arena.alloc(9))",
            ]
        ),
        "dropping": "\n".join(
            [
                "arena = Bump(1 << 20)",
                "    while True:",
                "        arena.reset(); kept = [arena.empty(9) for _ in range(50)]; kept.clear()",
            ]
        ),
        "consuming": "\n".join(
            [
                "arena = Bump(1 << 20)",
                "    while True:",
                "        arena.reset()",
                "        np.from_dlpack(arena.alloc(5)); arena.alloc(9).__dlpack__()",
            ]
        ),
    }[busy]
    run_script(
        PRELUDE
        + MAKE["host"]
        + HOLD
        + f"""
stay, ready = threading.Event(), threading.Barrier(4)
def work(array, view):
    held = array, view, np.ndarray(5, "u1", buffer=view)
    ready.wait()
    {body}
for _ in range(3):
    threading.Thread(target=work, args=(array, view), daemon=True).start()
ready.wait()
"""
    )


def test_the_wrong_thread_at_exit(run_script):
    """The last reference dies on another thread, after the main thread has finished."""
    run_script(
        PRELUDE
        + """
import time
arena = Bump(1 << 16)
def late(box):
    threading.main_thread().join()
    array, view = box
    array[:] = 1
    box.clear()
    del array, view
threading.Thread(target=late, args=([arena.empty(10), memoryview(arena.alloc(9))],)).start()
"""
    )


def test_sys_exit_inside_scopes(run_script):
    run_script(
        PRELUDE
        + MAKE["host"]
        + """
with arena.scope(), arena.scope():
    kept = arena.empty(9)
    sys.exit(0)
"""
    )


def test_exit_in_a_forked_child(run_script):
    run_script(
        PRELUDE
        + MAKE["growing"]
        + HOLD
        + """
import os
if os.fork():
    assert os.wait()[1] == 0
"""
    )


def test_a_consumer_deletes_its_tensor_during_finalization(run_script):
    """A C library may keep a tensor past the end of the interpreter's modules."""
    run_script(
        PRELUDE
        + """
import builtins
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
"""
    )


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
