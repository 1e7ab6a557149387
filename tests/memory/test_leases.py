"""Forks over memory that parent and child both see: the child's bytes are its own until it ends."""

import subprocess
import sys
from pathlib import Path

import hypothesis
import leases
import pytest
from children import another_process

from arenapy import File, Pool, Shared

MIB = 1 << 20
SHARED = {
    "memory": lambda path: Shared(),
    "growing": lambda path: Shared(grow=True),
    "file": lambda path: File(path, "w+"),
}
ASKS = {
    "alloc": lambda pool: (pool.alloc(MIB), pool.alloc(MIB)),
    "alloc_many": lambda pool: pool.alloc_many([MIB] * 2),
    "prewarm": lambda pool: pool.prewarm({MIB: 2}),
}
pytestmark = pytest.mark.sampled(full=2)  # each case is a process that forks many

PROGRAM = Path(__file__).with_name("leases.py")


@pytest.mark.parametrize("source", leases.SOURCES)
def test_a_childs_bytes_are_not_reused_until_it_ends(source):
    thorough = hypothesis.settings().max_examples > 1000
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", PROGRAM, source, *["thorough"] * thorough],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    ran = done.stdout.splitlines()
    assert len(ran) == len(list(leases.cases(source, thorough)))
    assert all("no proc" in line for line in ran if line.startswith("skipped")), ran


@pytest.mark.parametrize("source", leases.SOURCES)
def test_a_region_that_a_child_views_without_an_allocator(source, run_script, tmp_path):
    """An allocator that the parent puts over it later hands none of it out until the child ends."""
    run_script(f"""
        import os, sys
        sys.path.insert(0, {str(PROGRAM.parent)!r})
        import leases, numpy as np
        from types import SimpleNamespace
        from arenapy import Bump

        region = leases.SOURCES[{source!r}]({str(tmp_path)!r}).region(leases.NBYTES)
        view = np.asarray(region.buffer())
        view[:] = leases.CHILDS
        told, tell = os.pipe()
        child = os.fork()
        if not child:
            os.read(told, 1)
            os._exit(0 if (view == leases.CHILDS).all() else 1)
        del view
        arena = Bump(leases.NBYTES, SimpleNamespace(region=lambda nbytes: region))
        arena.check()
        assert leases.take_all(arena) == []
        os.write(tell, b"x")
        assert os.waitpid(child, 0)[1] == 0, "the child's bytes changed"
        arena.check()
        assert len(leases.take_all(arena)) == leases.NBYTES // leases.ITEM
        os._exit(0)  # SharedMemory complains of who views it at exit
    """)


@pytest.mark.parametrize("kind", leases.ALLOCATORS)
def test_many_scattered_blocks_at_a_fork(kind, run_script):
    """It takes no time to speak of, and what was free between them is used again and again."""
    run_script(f"""
        import os, time
        from arenapy import Bump, Pool, Shared, Slab

        MANY, NBYTES = (4000, 8192) if {kind!r} == "pool" else (16000, 64)
        arena = dict(
            bump=lambda: Bump(4 * MANY * NBYTES, Shared()),
            slab=lambda: Slab(NBYTES, 2 * MANY, Shared()),
            pool=lambda: Pool(4 * MANY * NBYTES, Shared()),
        )[{kind!r}]()
        blocks = [arena.alloc(NBYTES) for _ in range(2 * MANY)]
        for block in blocks:
            block.fill(7)
        del block
        if {kind!r} == "bump":
            views = [memoryview(block) for block in blocks[::2]]
            arena.reset()  # what is held lies scattered from here on
        blocks = blocks[::2]
        childs = {{block.address for block in blocks}}

        def used_again():
            taken = []
            while len(taken) < MANY // 2:
                taken.append(arena.alloc(NBYTES))
            addresses = {{block.address for block in taken}}
            taken.clear()
            if {kind!r} == "bump":
                arena.reset()
            return addresses

        told, tell = os.pipe()
        start = time.perf_counter()
        child = os.fork()
        if not child:
            os.close(tell)
            os.read(told, 1)
            os._exit(0 if all(bytes(block) == bytes([7]) * NBYTES for block in blocks) else 1)
        forked = time.perf_counter() - start
        start = time.perf_counter()
        if {kind!r} == "bump":
            views.clear()
        blocks.clear()
        dropped = time.perf_counter() - start
        assert forked < 0.5 and dropped < 2, (forked, dropped)
        assert arena.stats().pending_bytes >= MANY * NBYTES, arena.stats()
        for _ in range(6):
            assert not used_again() & childs
        arena.check()
        os.close(tell)
        assert os.waitpid(child, 0)[1] == 0, "the child's bytes changed"
        taken = [arena.alloc(NBYTES) for _ in range(2 * MANY)]
        assert not arena.stats().pending_bytes
        arena.check()
    """)


def test_forks_take_no_descriptor_for_each_region(run_script):
    run_script("""
        import mmap, os, signal, time
        from arenapy import Bump, Existing

        def descriptors():
            return len(os.listdir("/proc/self/fd"))

        memory = memoryview(mmap.mmap(-1, 1 << 20))
        parts = [memory[at : at + 512] for at in range(0, 1 << 20, 512)]
        arenas = [Bump(512, Existing(part)) for part in parts[:200]]
        blocks = [arena.alloc(100) for arena in arenas]
        viewed = [Existing(part, readonly=True).region() for part in parts[200:400]]
        before = descriptors()
        children = [os.fork() or time.sleep(600) for _ in range(3)]
        assert descriptors() <= before + 1, (before, descriptors())
        blocks.clear()
        for child in children:
            for arena in arenas:
                arena.reset()
                assert arena.stats().pending_bytes == 100, arena.stats()
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert all(arena.remaining == 512 for arena in arenas)
        del arenas, viewed
        Existing(parts[300]).region().close()  # nobody sees it any more
        assert descriptors() == before, "the leases' file is there still"
    """)


def test_a_child_that_forks_in_turn(run_script):
    """Its children are not taken for those of the process that forked it."""
    run_script("""
        import os
        from arenapy import Bump, Shared

        arena = Bump(1 << 16, Shared())
        first = arena.alloc(100)
        told, tell = os.pipe()
        child = os.fork()
        if not child:
            os.close(tell)
            own = Bump(1 << 16, Shared())
            block = own.alloc(100)
            if os.fork():
                os._exit(0)
            os.read(told, 1)
            os._exit(0)
        os.waitpid(child, 0)
        second = arena.alloc(100)
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        del first, second
        arena.reset()
        assert arena.stats().pending_bytes == 100, arena.stats()  # what the grandchild sees
        os.close(tell)
    """)


@pytest.mark.parametrize("kind", ["bump", "slab", "pool"])
@pytest.mark.parametrize("memory", ["Shared()", "Existing(mmap.mmap(-1, 1 << 20))"])
def test_a_later_child_does_not_keep_what_only_earlier_ones_see(memory, kind, run_script):
    """A server that forks a child for each request, and always has one."""
    run_script(f"""
        import mmap, os
        from contextlib import nullcontext
        from arenapy import Bump, Existing, Pool, Shared, Slab

        NBYTES, ALIVE = 1000, 3
        source = {memory}
        heap = {{
            "bump": lambda: Bump(1 << 20, source),
            "slab": lambda: Slab(NBYTES, 200, source),
            "pool": lambda: Pool(1 << 20, source, 1 << 20),
        }}[{kind!r}]()
        kept, children, most = [], [], 0
        for request in range(300):
            with heap.scope() if {kind!r} == "bump" else nullcontext():
                arrays = [heap.empty(NBYTES, "u1") for _ in range(5)]
                told, tell = os.pipe()
                child = os.fork()
                if not child:
                    for _, other in [*children, (0, tell)]:
                        os.close(other)
                    os.read(told, 1)         # or the end of the parent
                    os._exit(0)
                os.close(told)
                children.append((child, tell))
                if request % 20 == 0:        # it lives long, in a span of the others
                    kept = [*kept[-4:], arrays[0]]
                del arrays
            if len(children) == ALIVE:
                child, tell = children.pop(0)
                os.close(tell)
                os.waitpid(child, 0)
            most = max(most, heap.stats().pending_bytes)
            heap.check()
        for child, tell in children:
            os.close(tell)
            os.waitpid(child, 0)
        held = 5 if {kind!r} == "bump" else 0    # a scope that ends retires what is kept
        assert most <= (5 * (ALIVE + 1) + held) * 1024, most
        heap.stats()
        assert heap.stats().pending_bytes <= held * 1024, heap.stats()
    """)


FORKER = """
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

/* As a C library runs a program: ctypes has let go of the GIL. */
int forks(int n) {
    int done = 0;
    while (done < n) {
        pid_t child = fork();
        if (child == 0) _exit(0);
        if (child < 0 || waitpid(child, 0, 0) < 0) break;
        done++;
    }
    return done;
}
"""


@pytest.fixture(scope="session")
def forker(tmp_path_factory):
    directory = tmp_path_factory.mktemp("forker")
    source, library = directory / "forker.c", directory / "forker.so"
    source.write_text(FORKER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@pytest.mark.parametrize("kind", leases.ALLOCATORS)
@pytest.mark.parametrize("source", leases.SOURCES)
@pytest.mark.sampled
@pytest.mark.full
def test_c_code_forks_while_another_thread_allocates(source, kind, forker, run_script, tmp_path):
    """Without the GIL, at any moment: no two blocks overlap, and in the end all memory is free."""
    run_script(f"""
        import ctypes, gc, os, sys, threading, time
        sys.path.insert(0, {str(PROGRAM.parent)!r})
        import leases

        library = ctypes.CDLL({str(forker)!r})
        allocator = leases.ALLOCATORS[{kind!r}](leases.SOURCES[{source!r}]({str(tmp_path)!r}))
        bump = {kind!r} == "bump"
        forks, stop = [0], time.monotonic() + 1.5

        def fork():
            while time.monotonic() < stop:
                forks[0] += library.forks(1)

        def some(n):
            blocks = []
            try:
                for _ in range(n):
                    blocks.append(allocator.alloc(64))
                blocks += allocator.alloc_many([64] * n)
            except MemoryError:
                pass
            return blocks

        def apart(blocks):
            at = sorted([block.address for block in blocks] + [a.ctypes.data for a in arrays])
            assert all(q - p >= 64 for p, q in zip(at, at[1:])), "two blocks overlap"

        thread = threading.Thread(target=fork)
        thread.start()
        arrays = []
        while time.monotonic() < stop:
            if not bump:
                blocks = some(10)
                arrays = [block.array() for block in blocks[::3]]
                apart(blocks[1::3] + blocks[2::3])
                continue
            with allocator.scope():
                apart(some(100))
                blocks = some(5)
                arrays = arrays[-3:] + [block.array() for block in blocks[::2]]
                apart(blocks[1::2])
                if len(blocks) > 1:
                    blocks[-1].release()
                del blocks
            allocator.check()
        thread.join()
        assert forks[0] > 5, forks
        del arrays
        blocks = None
        gc.collect()
        assert allocator.stats().pending_bytes == 0
        if bump:
            allocator.reset()
        allocator.check()
        free = len(leases.take_all(allocator)), leases.NBYTES // leases.ITEM
        assert free[0] == free[1] or {kind!r} == "pool" and free[0] > free[1] // 2, free
        allocator.check()
        os._exit(0)  # SharedMemory complains of who views it at exit
    """)


@pytest.mark.parametrize("kind", leases.ALLOCATORS)
@pytest.mark.parametrize("source", leases.SOURCES)
@pytest.mark.full
def test_a_fork_while_the_source_makes_a_region(source, kind, run_script, tmp_path):
    """The child has it, and nothing in it: the parent allocates there; in the child it may not."""
    run_script(f"""
        import os, sys
        sys.path.insert(0, {str(PROGRAM.parent)!r})
        import leases

        inner = leases.SOURCES[{source!r}]({str(tmp_path)!r})
        told, tell = os.pipe()

        class Forks:
            def region(self, nbytes):
                region = inner.region(nbytes)
                self.child = os.fork()
                return region

        forks = Forks()
        try:
            allocator = leases.ALLOCATORS[{kind!r}](forks)
            if not forks.child:
                os._exit(1)
        except ValueError as error:
            os._exit(0 if not forks.child and "forked child" in str(error) else 2)
        assert len(leases.take_all(allocator)) == leases.NBYTES // leases.ITEM
        allocator.check()
        assert os.waitpid(forks.child, 0)[1] == 0
        os._exit(0)  # SharedMemory complains of who views it at exit
    """)


def test_what_is_known_of_ended_children_is_forgotten(run_script):
    run_script("""
        import os
        from arenapy import Bump, Shared

        arena = Bump(1 << 20, Shared())
        kept = [arena.alloc(64).array() for _ in range(1000)]
        del kept[::2]
        arena.reset()
        before, grown = arena.stats().metadata_bytes, []
        for _ in range(40):
            child = os.fork()
            if not child:
                os._exit(0)
            os.waitpid(child, 0)
            grown.append(arena.stats().metadata_bytes)
        assert grown[0] - before >= 500 * 16  # of one child
        assert grown[-1] == grown[1], grown
        lives = os.fork()
        if not lives:
            os.read(os.pipe()[0], 1)
        for _ in range(3):
            child = os.fork()
            if not child:
                os._exit(0)
            os.waitpid(child, 0)
        del kept
        arena.check()
        assert arena.stats().pending_bytes == 500 * 64, arena.stats()  # of who lives
        os.kill(lives, 9)
        os.waitpid(lives, 0)
        assert arena.stats().pending_bytes == 0, arena.stats()
    """)


@pytest.mark.parametrize("source", SHARED)
@pytest.mark.parametrize("ask", ASKS.values(), ids=list(ASKS))
def test_whoever_asks_gets_what_children_have_left(ask, source, tmp_path):
    pool = Pool(max_bytes=2 * MIB, source=SHARED[source](tmp_path / "file"))
    for _ in range(3):
        blocks = pool.alloc(MIB), pool.alloc(MIB)
        with another_process():
            del blocks
        ask(pool)
        assert pool.stats().reserved_bytes == 2 * MIB
