"""Forks over memory that parent and child both see: the child's bytes are its own until it ends."""

import subprocess
import sys
from pathlib import Path

import leases
import pytest
from hypothesis import settings

pytestmark = pytest.mark.sampled

PROGRAM = Path(__file__).with_name("leases.py")


@pytest.mark.parametrize("source", leases.SOURCES)
def test_a_childs_bytes_are_not_reused_until_it_ends(source):
    thorough = settings().max_examples > 1000
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
