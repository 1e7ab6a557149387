"""Fork, section 4 of the design: whose copy the child has, and what is closed there.

Every program runs in an interpreter of its own, so that no thread of the test run is forked.
"""

import subprocess
import sys

import forked_lines
import pytest

pytestmark = pytest.mark.sampled

PRELUDE = """
import gc, os, sys, threading, traceback
import numpy as np
import arenapy
from arenapy import Bump, Existing, File, Host, Shared

def in_child(function):
    '''Run `function` in a forked child; its exception or crash fails the parent.'''
    child = os.fork()
    if not child:
        try:
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"the child ended with status {status}"

def refuses(call, *errors):
    try:
        call()
    except errors as error:
        assert str(error), "an error without a reason"
        return
    raise AssertionError("accepted")
"""


@pytest.fixture
def program(run_script):
    return lambda source, **how: run_script(PRELUDE + source, **how)


CLOSED = {
    "skip": "Host(fork='skip')",
    "shared": "Shared()",
    "file": "File(path, 'r+')",
}


def test_over_host_memory_the_child_has_its_own_copy(program):
    program("""
arena = Bump(1 << 16, max_bytes=1 << 20)
array = arena.empty(100, "u1"); array[:] = 1
buffer = arena.alloc(100); view = memoryview(buffer); view[:] = b"\\1" * 100
mark = arena.mark()

def child():
    assert (array == 1).all() and bytes(view) == b"\\1" * 100
    array[:] = 2
    view[:] = b"\\2" * 100
    with arena.scope():
        arena.alloc(200_000).fill(3)
    arena.reset(mark)
    arena.reset()
    arena.check()
    assert (array == 2).all() and arena.retired == 200
    assert not buffer.closed

in_child(child)
assert (array == 1).all() and bytes(view) == b"\\1" * 100
assert arena.retired == 0
arena.reset(mark)
arena.check()
""")


def test_a_child_of_a_child(program):
    program("""
arena = Bump(1 << 16)
array = arena.zeros(10)
def grandchild():
    array[:] += 1
    arena.reset()
    assert array.sum() == 20
def child():
    array[:] = 1
    in_child(grandchild)
    assert array.sum() == 10
in_child(child)
assert array.sum() == 0
""")


@pytest.mark.parametrize("kind", CLOSED)
def test_elsewhere_the_allocator_is_closed_in_the_child(program, tmp_path, kind):
    path = tmp_path / "memory"
    path.write_bytes(bytes(1 << 16))
    program(f"""
path = {str(path)!r}
arena = Bump(1 << 16, source={CLOSED[kind]})
array = arena.empty(100, "u1"); array[:] = 1
unheld = arena.alloc(100)
mark = arena.mark()

def child():
    for use in (lambda: arena.alloc(8), lambda: arena.empty(3), lambda: arena.zeros(3),
                lambda: arena.alloc_many([3]), arena.mark, arena.reset, lambda: arena.reset(mark),
                lambda: arena.copy([1]), lambda: arena.grow(unheld, 200),
                lambda: arena.scope().__enter__()):
        refuses(use, ValueError, RuntimeError)

in_child(child)
array[:] += 1
assert (array == 2).all() and not unheld.closed
with arena.scope():
    arena.alloc(100)
arena.reset()
arena.check()
assert arena.retired == 100
""")


@pytest.mark.parametrize("mode", ["w+", "r+"])
def test_a_pool_whose_file_a_child_still_sees(program, tmp_path, mode):
    """Its memory was given back, and cannot be had again before the child ends."""
    path = tmp_path / "memory"
    path.write_bytes(bytes(1 << 20))
    program(f"""
from children import another_process

ends = []                                # calls that end a child

def end_child(nbytes):
    return bool(ends) and not ends.pop()()

pool = arenapy.Pool(
    1 << 20, File({str(path)!r}, {mode!r}), initial_bytes=1 << 20, on_oom=end_child)
with another_process():
    assert pool.trim() == 1 << 20
    refuses(lambda: pool.alloc(100), arenapy.OutOfMemory)
    refuses(lambda: pool.alloc_many([100] * 3), arenapy.OutOfMemory)
    pool.check()
pool.alloc(100).release()
child = another_process()
child.__enter__()
ends.append(lambda: child.__exit__(None, None, None))
pool.trim()
pool.alloc(100).release()
assert not ends
""")


@pytest.mark.parametrize("source", ["Existing(mmap.mmap(-1, 1 << 20))", "File(path, 'r+')"])
def test_a_pool_that_has_given_its_memory_back_is_closed_in_the_child(program, tmp_path, source):
    """Both would ask the source again, and get the same bytes."""
    path = tmp_path / "memory"
    path.write_bytes(bytes(1 << 20))
    program(f"""
import mmap
path = {str(path)!r}
pool = arenapy.Pool(1 << 20, {source})
pool.alloc(100).release()
assert pool.trim() and not pool.regions

def child():
    refuses(lambda: pool.alloc(100), ValueError)
    pool.check()

in_child(child)
assert not bytes(pool.alloc(100)).strip(b"\\0")
pool.check()
""")


def test_dropping_everything_in_the_child_leaves_the_parent_alone(program):
    program("""
arenas = [Bump(1 << 16), Bump(1 << 16, source=Host(fork="skip")), Bump(1 << 16, source=Shared()),
          Bump(1 << 16, source=Existing(bytearray(1 << 16)))]
arrays = [arena.empty(100, "u1") for arena in arenas]
for array in arrays:
    array[:] = 7
def child():
    arrays.clear()
    arenas.clear()
    gc.collect()
in_child(child)
for arena, array in zip(arenas, arrays, strict=True):
    assert (array == 7).all()
    arena.alloc(100).fill(1)
    arena.reset()
    arena.check()
""")


@pytest.mark.full
def test_the_child_of_a_busy_program_is_not_locked(program):
    program(
        """
stop = threading.Event()
shared = Bump(1 << 20)
def work():
    arena = Bump(1 << 16)
    while not stop.is_set():
        with arena.scope():
            arena.empty(10)[:] = 1
            shared.alloc(8)
            shared.empty(9)
            shared.reset()
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
def child():
    fresh = Bump(1 << 16)
    with fresh.scope():
        fresh.empty(100)[:] = 1
    fresh.check()
    shared.alloc(8)
    shared.reset()
    shared.check()
try:
    for _ in range(20):
        in_child(child)
finally:
    stop.set()
    for thread in threads:
        thread.join()
""",
        quiet=False,
    )


def test_the_childs_exit_runs_every_finalizer(program):
    program("""
arena = Bump(1 << 16, source=Host(fork="skip"))
array = arena.empty(100)
cycle = [array, arena, memoryview(arena.alloc(9))]
cycle.append(cycle)
child = os.fork()
if not child:
    sys.exit(0)  # an orderly exit, with all that the parent held
assert os.waitpid(child, 0)[1] == 0
array[:] = 1
""")


def test_multiprocessing_fork(program):
    program("""
import multiprocessing
arena = Bump(1 << 16)
array = arena.empty(10); array[:] = 3
def work(pipe):
    pipe.send(float(array.sum()))
    arena.reset()
context = multiprocessing.get_context("fork")
here, there = context.Pipe()
process = context.Process(target=work, args=(there,))
process.start()
assert here.recv() == 30
process.join()
assert process.exitcode == 0
""")


GROWING = """
from arenapy import Pool
MIB = 1 << 20

class Slow:
    # Waits, or forks, where memory comes from.
    hook = None
    def asked(self):
        if self.hook is not None:
            self.hook()

class Room:
    def __init__(self, source, inner):
        self.source, self.inner, self.region = source, inner, inner.region
    def commit(self, offset, nbytes):
        self.source.asked()
        self.inner.commit(offset, nbytes)
    def decommit(self, offset, nbytes, stream=None):
        self.inner.decommit(offset, nbytes, stream)

class Rooms(Slow):
    def region(self, nbytes):
        raise AssertionError("it reserves")
    def reserve(self, nbytes):
        return Room(self, Host(prefault=False).reserve(nbytes))

class Regions(Slow):
    def region(self, nbytes):
        self.asked()
        return Host(prefault=False).region(nbytes)

def use(pool, mibs):
    pool.alloc(mibs * MIB).fill(1)
    pool.check()
"""

START = """
source = {kind}()
pool = Pool(6 * MIB, source)
kept = pool.alloc(100)
pool.trim()
"""


@pytest.mark.parametrize("kind", ["Rooms", "Regions"])
def test_what_another_thread_was_getting_is_nobodys_in_the_child(run_script, kind):
    run_script(
        PRELUDE
        + GROWING
        + START.format(kind=kind)
        + """
reached, go = threading.Event(), threading.Event()
def wait():
    reached.set()
    go.wait()
source.hook = wait
thread = threading.Thread(target=lambda: use(pool, 2), daemon=True)
thread.start()
reached.wait()
def child():
    source.hook = None
    use(pool, 4)         # more than there would be beside what the thread was getting
    pool.trim()
    pool.check()
in_child(child)
source.hook = None
go.set()
thread.join()
use(pool, 4)
pool.trim()
pool.check()
""",
        quiet=False,
    )


@pytest.mark.parametrize(
    "made",
    [
        "Pool(1 << 24, Host(), Forking(1 << 20))",
        "Pool(1 << 24, Host(), 1 << 20, Forking(5))",
        "arenapy.Slab(Forking(64), 10)",
        "arenapy.Slab(64, 10, max_count=Forking(20))",
        "Bump(Forking(1 << 16))",
        "Bump(1 << 16, max_bytes=Forking(1 << 20))",
    ],
)
def test_a_fork_amid_a_constructor(program, made):
    """An assertion build knows the order of its locks by then."""
    program(
        """
from arenapy import Pool
class Forking:
    def __init__(self, value):
        self.value = value
    def __index__(self):
        in_child(lambda: Pool(1 << 24).alloc(10).fill(1))
        return self.value
    __float__ = lambda self: float(self.__index__())
one = """
        + made
        + """
in_child(lambda: one.alloc(10).fill(1))
one.alloc(10).fill(1)
one.check()
"""
    )


@pytest.mark.parametrize("kind", ["Rooms", "Regions"])
def test_a_source_that_forks_serves_both_processes(run_script, kind):
    run_script(
        PRELUDE
        + GROWING
        + START.format(kind=kind)
        + """
children = []
def fork():
    source.hook = None
    children.append(os.fork())
source.hook = fork
use(pool, 2)
use(pool, 4)
pool.trim()
pool.check()
if not children[0]:
    os._exit(0)
assert os.waitpid(children[0], 0)[1] == 0
"""
    )


def test_what_a_child_does_not_get_is_nobody_elses_there(run_script):
    run_script("""
        import mmap, os
        from arenapy import Existing, Host, Region
        MIB = 1 << 20
        private = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE)
        private.madvise(mmap.MADV_DONTFORK)
        mine = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE)
        mine.madvise(mmap.MADV_DONTFORK)
        start = Existing(mine).region().address
        regions = [
            Existing(memoryview(private)[100:-100]).region(),
            Region.from_address(start, 64 * MIB, owner=mine, fork="skip"),
            Host(huge_pages=None, fork="skip").region(64 * MIB),
        ]
        child = os.fork()
        if not child:
            memory = Host(huge_pages=None, prefault=False)
            regions += [memory.region(MIB) for _ in range(300)]
            spans = sorted((region.address, region.address + region.nbytes) for region in regions)
            apart = all(a[1] <= b[0] for a, b in zip(spans, spans[1:]))
            os._exit(0 if apart and regions[0].closed else 1)
        assert os.waitpid(child, 0)[1] == 0
    """)


def test_what_descendants_do_not_get_is_found_by_few_calls(run_script):
    """A call for each page of a TiB would take minutes, in each of them."""
    run_script("""
        import mmap, os
        from arenapy import Existing, Region
        TIB = 1 << 40
        flags = mmap.MAP_PRIVATE | 0x4000                  # MAP_NORESERVE
        mine = mmap.mmap(-1, TIB, flags=flags)
        start = Existing(mine).region().address
        mine.madvise(mmap.MADV_DONTFORK, 0, TIB // 2)       # the child has the other half
        region = Region.from_address(start, TIB, owner=mine, fork="skip")
        for generation in range(3):
            child = os.fork()
            if child:
                break
        status = os.waitpid(child, 0)[1] if child else 0
        os._exit(status or not (region.closed or generation == 0))
    """)


def test_the_place_of_a_closed_region_is_free_in_a_child(run_script):
    run_script("""
        import os
        from arenapy import Host
        region = Host(huge_pages=None, fork="skip").region(64 << 20)
        start, end = region.address, region.address + region.nbytes
        region.close()
        child = os.fork()
        if not child:
            with open("/proc/self/maps") as maps:
                spans = [[int(at, 16) for at in line.split()[0].split("-")] for line in maps]
            os._exit(any(a < end and b > start for a, b in spans))
        assert os.waitpid(child, 0)[1] == 0
    """)


@pytest.mark.no_sanitizer
@pytest.mark.parametrize("way", ["ends", "returns"])
@pytest.mark.parametrize("case", forked_lines.CASES)
def test_a_handler_may_fork_at_any_line(case, way, request):
    """Neither what the child undoes, nor its going on, changes what its parent has."""
    # Each way has lines of its own, but for the tier long.
    lines = ["0", "1"]
    if request.config.getoption("--tier") != "long":
        lines = [str(["ends", "returns"].index(way)), "3"]
    command = [sys.executable, forked_lines.__file__, case, way, *lines]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20, "it was a call of Python code"


def test_a_new_thread_is_not_taken_for_one_that_the_parent_had(run_script):
    """A thread is known by the number that the C library gives it, which comes again."""
    run_script("""
import os, threading
from arenapy import Host, OutOfMemory, Pool

MIB = 1 << 20
plain, at_work, go = Host(), threading.Event(), threading.Event()

class Slow:
    def region(self, nbytes):
        if threading.current_thread().name == "slow":
            at_work.set()
            go.wait()
            raise OutOfMemory("no more")
        return plain.region(nbytes)

pool = Pool(16 * MIB, Slow())
pool.alloc(MIB).release()

def grow(nbytes, got):
    try:
        got.append(pool.alloc(nbytes).nbytes)
    except OutOfMemory:
        got.append(None)

def slow(nbytes):
    thread = threading.Thread(target=grow, args=(nbytes, []), name="slow")
    thread.start()
    at_work.wait()
    return thread

first = slow(12 * MIB)
child = os.fork()
if child == 0:
    code = 1
    try:
        at_work.clear()
        may_ask, got = threading.Event(), []
        same = threading.Thread(target=lambda: may_ask.wait() and grow(10 * MIB, got))
        same.start()
        assert same.ident == first.ident, "the C library gives each thread another number"
        another = slow(12 * MIB)
        may_ask.set()
        same.join(0.2)
        go.set()
        same.join()
        another.join()
        assert got == [10 * MIB], got
        pool.check()
        code = 0
    finally:
        os._exit(code)
status = os.waitpid(child, 0)[1]
go.set()
first.join()
pool.check()
assert status == 0, status
""")
