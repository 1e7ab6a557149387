"""Debug mode and C calls, leaks, threads, forks, and what is said at exit.

C calls are made through the capsules that `cimport` uses: with the GIL (PYFUNCTYPE), so that the
place is a line of Python, or without (CFUNCTYPE).
"""

import contextlib
import ctypes
import gc
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import pytest
from helpers import Pages, c_function, exact, poke
from test_debug import FREED, HERE, freed_block

import arenapy
from arenapy import Bump, Pool, Shared, Slab
from arenapy.debug import live_blocks
from arenapy.errors import MemoryCorruption

MIB = 1 << 20

MINE = os.path.basename(__file__)


class Calls:
    """The C calls of a kind of allocator, for blocks of so many bytes or a Slab's."""

    def __init__(self, kind, gil=False, nbytes=100):
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        if kind == "pool":
            alloc = c_function("pool_alloc", pointer, size, size, gil=gil)
            self.alloc = lambda pool: alloc(pool, nbytes, 64)
            self.free = c_function("pool_free", ctypes.c_int, pointer, gil=gil)
        else:
            self.alloc = c_function("slab_alloc_slow", pointer, gil=gil)
            self.free = c_function("slab_free_slow", ctypes.c_int, pointer, gil=gil)


MAKE = {
    "pool": lambda: Pool(source=Pages(), debug=True),
    "slab": lambda: Slab(100, 32, Pages(), debug=True),
}


LARGE = {"pool": lambda: Pool(debug=True), "slab": lambda: Slab(MIB, 16, debug=True)}


@pytest.fixture(params=MAKE)
def kind(request):
    return request.param


@pytest.mark.parametrize("gil", [False, True])
def test_a_double_free_is_told_with_its_places(kind, gil, capfd):
    allocator, calls = MAKE[kind](), Calls(kind, gil)
    calls.free(allocator, calls.alloc(allocator))  # growth takes the GIL
    block = calls.alloc(allocator)
    assert [live.address for live in live_blocks(allocator)] == [block]
    assert calls.free(allocator, block) == 0
    assert live_blocks(allocator) == []
    assert capfd.readouterr().err == ""
    assert calls.free(allocator, block) == -1
    told = capfd.readouterr().err
    assert told.count("\n") == 1
    assert re.match(rf"arenapy: {kind}_free\({block:#x}\) at ", told)
    places = re.findall(r"\) at (.*): a .*, allocated at (.*) and given back last at (.*)$", told)
    for place in places[0]:
        assert MINE in place.split()[0] if gil else place == "C code", told
    assert "double free" in told and "byte 0 of the block of 100 bytes" in told
    allocator.check()


def test_a_free_of_a_buffers_block_names_its_places(kind, capfd):
    allocator, calls = MAKE[kind](), Calls(kind)
    address = freed_block(allocator)
    assert calls.free(allocator, address) == -1
    told = capfd.readouterr().err
    assert told.count(HERE) >= 2 and "double free" in told


def test_frees_of_no_block_are_told(kind, capfd):
    allocator, calls = MAKE[kind](), Calls(kind)
    block = calls.alloc(allocator)
    assert calls.free(allocator, block + 7) == -1
    assert "byte 7 of the live block of 100 bytes" in capfd.readouterr().err
    assert calls.free(allocator, 4096) == -1
    assert "no block begins there" in capfd.readouterr().err
    assert calls.free(allocator, block) == 0


def test_nothing_is_told_where_standard_error_was_closed(tmp_path):
    """A file of the program's has its number."""
    program = """
        import ctypes, helpers, arenapy
        pool = arenapy.Pool(debug=True)
        with open("data", "w") as data:
            assert data.fileno() == 2
            assert helpers.c_function("pool_free", ctypes.c_int, ctypes.c_void_p)(pool, 4096) == -1
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    subprocess.run(["sh", "-c", 'exec "$@" 2>&-', "sh", *command], cwd=tmp_path, check=True)
    assert (tmp_path / "data").read_text() == ""


def test_double_frees_of_bump(capfd):
    arena = exact(1 << 16, debug=True)
    free = c_function("bump_free", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
    address = freed_block(arena)
    assert free(arena, address, 100) == -1
    told = capfd.readouterr().err
    assert told.startswith(f"arenapy: bump_free({address:#x})") and told.count(HERE) >= 2


@pytest.mark.parametrize("nbytes", [2**64 - 4096, 2**64 - 1])
def test_a_size_that_wraps_frees_nothing(nbytes):
    """Else the cursor would move beyond the memory."""
    arena = exact(1 << 16)
    block = arena.alloc(100)
    before = arena.stats()
    free = c_function("bump_free", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
    cursor = block.address + block.nbytes
    assert free(arena, (cursor - nbytes) % 2**64, nbytes) == -1
    assert free(arena, 2**64 - 1, 1) == -1
    assert arena.stats() == before
    arena.check()


def test_nothing_is_told_without_debug_mode(kind, capfd):
    allocator, calls = MAKE[kind](), Calls(kind)
    quiet = Pool(debug=False) if kind == "pool" else Slab(100, 4, debug=False)
    block = calls.alloc(quiet)
    assert calls.free(quiet, block) == 0
    assert calls.free(quiet, block) == -1
    assert capfd.readouterr().err == ""
    del allocator


def test_a_c_call_tells_what_it_finds_once_and_python_raises_it(kind, capfd):
    allocator, calls = MAKE[kind](), Calls(kind)
    first = calls.alloc(allocator)
    calls.free(allocator, first)
    poke(first + 3, 1, 9)
    again = calls.alloc(allocator)
    assert again == first, "a C call cannot raise: it has its block"
    told = capfd.readouterr().err
    assert told.startswith("arenapy: write after free: byte 3 of the block of 100 bytes")
    assert "C code" in told
    second = calls.alloc(allocator)
    assert capfd.readouterr().err == ""
    with pytest.raises(MemoryCorruption, match="byte 3 of the block of 100 bytes") as error:
        allocator.alloc(10)
    assert str(error.value) in told
    assert sorted(live.address for live in live_blocks(allocator)) == sorted([again, second])
    allocator.alloc(10)
    for block in (again, second):
        assert calls.free(allocator, block) == 0


def test_c_calls_of_an_arena_are_nobodys(capfd):
    """They write nothing into the ledger: nobody is accused of what they do with free memory."""
    arena = Bump(1 << 12, Pages(), max_bytes=1 << 20, debug=True)
    alloc = c_function("bump_alloc_slow", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
    free = c_function("bump_free", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
    mark = arena.mark()
    for size in (100, 5000, 100, 200):
        block = alloc(arena, size, 64)  # grows first: then from free memory as it is
        arena.check()
        poke(block, size, 1)
        arena.check()
        assert arena.alloc(64).address >= block + size
        arena.reset(mark)
        arena.check()
    block = alloc(arena, 300, 64)
    poke(block, 300, 1)
    assert free(arena, block, 300) == 0
    assert arena.alloc(300).address == block
    arena.reset()
    assert free(arena, block, 300) == -1
    assert f"of the block of 300 bytes at {block:#x}" in capfd.readouterr().err


# ---- leaks ------------------------------------------------------------------------------------


def test_what_c_code_never_freed_is_a_leak(kind):
    allocator, calls, held = MAKE[kind](), Calls(kind), Calls(kind, gil=True)
    assert calls.free(allocator, calls.alloc(allocator)) == 0  # growth takes the GIL
    blocks = [calls.alloc(allocator), calls.alloc(allocator), held.alloc(allocator)]
    assert calls.free(allocator, blocks.pop(0)) == 0
    buffer = allocator.alloc(10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del allocator
        gc.collect()
    with pytest.warns(ResourceWarning) as seen:
        del buffer
    (warning,) = seen
    text = str(warning.message)
    assert f"a {kind} over host memory is gone" in text
    assert "2 blocks of 200 bytes" in text
    assert "1 block of 100 bytes allocated at C code" in text
    assert re.search(rf"1 block of 100 bytes allocated at \S*{MINE}:\d+ in ", text)


def test_what_python_holds_and_drops_is_none(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        allocator, calls = MAKE[kind](), Calls(kind)
        array = allocator.empty(10, "u1")
        block = calls.alloc(allocator)
        assert calls.free(allocator, block) == 0
        del allocator
        array[:] = 1
        del array
        arena = Bump(1 << 16, debug=True)
        dropped = arena.alloc(10)
        del arena, dropped


def run(program, *, environment=None):
    """What a program says on stderr; it must end well."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "ARENAPY_DEBUG": "1", **(environment or {})},
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_the_summary_at_exit():
    told = run(
        """
        import arenapy
        pool = arenapy.Pool()
        def fill():
            one = pool.alloc(1000)
            return [one, *map(pool.alloc, [100] * 3)]
        kept = fill()
        dropped = fill()
        del dropped
        slab = arenapy.Slab(64, 4)
        lasting = arenapy.Slab(64, 4).alloc()
        clean = arenapy.Pool()
        """
    )
    _, first, second = told.split("arenapy: at exit, ")
    pool, slab = sorted([first, second])
    lines = pool.splitlines()
    assert lines[0].startswith("<Pool host ") and lines[0].endswith(" has 4 blocks of 1300 bytes")
    assert lines[1] == (
        "  1 block of 1000 bytes allocated at <string>:5 in fill, called at <string>:7 in <module>"
    )
    assert lines[2].startswith("  3 blocks of 300 bytes allocated at <string>:6 in fill, ")
    assert slab.startswith("an allocator (slab) that is gone still has 1 block of 64 bytes\n")


def test_no_summary_without_debug_mode_or_of_what_is_freed():
    program = """
        import arenapy
        pool = arenapy.Pool()
        kept = pool.alloc(100)
        """
    assert run(program, environment={"ARENAPY_DEBUG": "0"}) == ""
    assert run(program + "del kept") == ""


@pytest.mark.parametrize("make", ["Bump(1 << 16)", "Pool()", "Slab(64, 4)"])
def test_no_summary_of_a_closed_region(make):
    told = run(
        f"""
        import arenapy
        allocator = arenapy.{make}
        kept, dropped = allocator.alloc(60), allocator.alloc(60)
        for region in allocator.regions:
            region.close()
        del dropped
        """
    )
    assert told == ""


def test_a_forked_child_speaks_of_its_own_allocators_only():
    told = run(
        """
        import os, sys, arenapy
        pool = arenapy.Pool()
        kept = pool.alloc(100)
        if os.fork() == 0:
            mine = arenapy.Pool()
            also = mine.alloc(7)
            more = pool.alloc(9)       # of a copy of the parent's
            pool.check()
            sys.exit()
        assert os.wait()[1] == 0
        """
    )
    assert told.count("at exit") == 2
    assert "1 block of 7 bytes" in told and "1 block of 100 bytes" in told and "9 b" not in told


def test_many_places_are_told_by_their_bytes():
    told = run(
        """
        import arenapy
        pool = arenapy.Pool()
        lines = "\\n".join(f"kept.append(pool.alloc({n}))" for n in range(1, 31))
        kept = []
        exec(compile(lines, "many.py", "exec"))
        """
    )
    shown = re.findall(r"1 block of (\d+) bytes allocated at many.py:(\d+) in", told)
    assert shown == [(str(n), str(n)) for n in range(30, 20, -1)]
    assert "and at 20 other places" in told


@pytest.mark.no_sanitizer  # a long count; other tests run the same code there
def test_places_run_out_gracefully():
    told = run(
        """
        import arenapy
        from arenapy.debug import live_blocks
        slab = arenapy.Slab(64, 1)
        code = compile("kept = slab.alloc(64)", "x.py", "exec")
        for n in range(66_000):
            exec(code.replace(co_filename=f"{n}.py"), {"slab": slab})
        kept = slab.alloc()
        (live,) = live_blocks(slab)
        assert live.place == "a place too many to tell", live.place
        del kept
        """
    )
    assert told == ""


# ---- other threads and processes --------------------------------------------------------------


def test_nothing_is_filled_once_its_region_is_closed(kind):
    """By C threads, whose blocks do not keep it: its addresses may be somebody else's by then."""
    for _ in range(10):
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # late frees are refused, with a line
            allocator, calls = LARGE[kind](), Calls(kind, nbytes=MIB)

            def in_c(allocator=allocator, calls=calls):
                while True:
                    calls.free(allocator, calls.alloc(allocator))

            for _ in range(3):
                threading.Thread(target=in_c, daemon=True).start()
            time.sleep(0.01)
            with contextlib.suppress(BufferError):  # its memory grows just now
                for region in allocator.regions:
                    region.close()
            time.sleep(0.01)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


def test_threads_are_not_accused(kind, monkeypatch):
    """C calls without the GIL, Python calls and checks at once: every block is sound."""
    allocator, calls = MAKE[kind](), Calls(kind)
    failed, unraisable = [], []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)

    def in_c():
        for _ in range(300):
            block = calls.alloc(allocator)
            if block:
                poke(block, 100, 1)
                if calls.free(allocator, block) != 0:
                    failed.append("free refused")

    def in_python():
        for _ in range(100):
            try:
                block = allocator.alloc(100)
                block.fill(2)
                del block
                allocator.check()
            except arenapy.OutOfMemory:
                pass
            except Exception as error:
                failed.append(error)

    threads = [threading.Thread(target=work) for work in (in_c, in_c, in_python, in_python)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == [] and unraisable == []
    assert live_blocks(allocator) == []


def test_a_fork_finds_the_ledger_whole():
    run(
        """
        import os, threading, arenapy
        pools = [arenapy.Pool(), arenapy.Slab(100, 8), arenapy.Bump(1 << 20)]
        stop = False
        def work():
            while not stop:
                for pool in pools[:2]:
                    pool.alloc(100).fill(1)
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            if os.fork() == 0:
                for pool in pools:
                    pool.alloc(100).fill(3)
                    pool.check()
                os._exit(0)
            assert os.wait()[1] == 0
        stop = True
        for thread in threads:
            thread.join()
        pools[2].reset()
        """
    )


def test_memory_that_another_process_has_is_filled_when_it_lets_go():
    slab = Slab(100, 4, Shared(), debug=True)
    block = slab.alloc()
    address = block.address
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"x")
        os.read(done[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    block.fill(5)
    block.release()
    assert ctypes.string_at(address, 100) == b"\x05" * 100, "the child sees it"
    assert live_blocks(slab) == []
    slab.check()
    os.write(done[1], b"x")
    assert os.waitpid(child, 0)[1] == 0
    assert slab.stats().pending_bytes == 0
    assert ctypes.string_at(address, 100) == bytes([FREED]) * 100
    slab.check()
    for end in (*ready, *done):
        os.close(end)
