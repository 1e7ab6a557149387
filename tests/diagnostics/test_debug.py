"""Debug mode: each kind of bug is planted, and has to be found, named and forgotten again.

A stale pointer is played by `poke`, which writes through an address. What C calls do is in
test_debug_c.py, and random programs in test_debug_machine.py.
"""

import ctypes
import os
import re
import signal
import sys
import threading
import time

import numpy as np
import pytest
from cuda_support import a_gpu, new_stream, slowly_fill
from helpers import GIL, PAGE, Pages, exact, peek, poke
from hypothesis import given
from hypothesis import strategies as st

import arenapy
from arenapy import Bump, Existing, File, Pool, Shared, Slab, cuda
from arenapy.debug import LiveBlock, live_blocks
from arenapy.diagnostics import leaks
from arenapy.errors import MemoryCorruption

FREED = 0xDB
HERE = os.path.basename(__file__)


def of_a_mebibyte(path):
    path.write_bytes(bytes(1 << 20))
    return path


ALLOCATORS = {
    "bump": lambda source=None: Bump(1 << 20, source, debug=True),
    "slab": lambda source=None: Slab(PAGE, 16, source, debug=True),
    "pool": lambda source=None: Pool(source=source, debug=True),
}
SOURCES = {
    "host": lambda tmp_path: None,
    "shared": lambda tmp_path: Shared(),
    "file": lambda tmp_path: File(of_a_mebibyte(tmp_path / "memory"), "r+"),
    "existing": lambda tmp_path: Existing(bytearray(1 << 20)),
    "pages": lambda tmp_path: Pages(),
}


@pytest.mark.parametrize("kind", ALLOCATORS)
@pytest.mark.parametrize("end", ["release", "drop", "reset", "check"])
@pytest.mark.sampled
def test_a_file_that_shrank_is_not_touched(kind, end, run_script, tmp_path):
    path = of_a_mebibyte(tmp_path / "memory")
    run_script(f"""
        import os
        from arenapy import Bump, File, Pool, Slab
        source = File({str(path)!r}, "r+")
        allocator = {{
            "bump": lambda: Bump(1 << 20, source, debug=True),
            "slab": lambda: Slab(4096, 16, source, debug=True),
            "pool": lambda: Pool(source=source, debug=True),
        }}[{kind!r}]()
        blocks = [allocator.alloc(3000) for _ in range(4)]
        blocks.pop(0).release()
        os.truncate({str(path)!r}, 0)
        end = {end!r}
        try:
            if end == "release":
                blocks[-1].release()
            elif end == "check":
                allocator.check()
                raise AssertionError("it was checked")
            elif end == "reset" and {kind!r} == "bump":
                allocator.reset()
        except BufferError as error:
            assert "shrunk" in str(error), error
        blocks.clear()
        del allocator
    """)


@pytest.fixture(params=ALLOCATORS)
def allocator(request):
    return ALLOCATORS[request.param]()


@pytest.fixture(params=["slab", "pool"])
def recycling(request):
    return ALLOCATORS[request.param]()


def line_of(text):
    """The line of this file on which `text` stands, other than in a call of this function."""
    with open(__file__, encoding="utf-8") as file:
        (found,) = [
            number for number, line in enumerate(file, 1) if text in line and "line_of(" not in line
        ]
    return f"{HERE}:{found} in "


def freed_block(allocator, nbytes=100):
    """The address of a block that was given back."""
    block = allocator.alloc(nbytes)  # where freed_block allocates
    address = block.address
    block.release()  # where freed_block gives back
    return address


BORN, GONE = line_of("# where freed_block allocates"), line_of("# where freed_block gives back")


def accused(error, address, byte, reads, nbytes=100, damaged=1):
    """Whether the message tells all there is to tell of the block of `freed_block`."""
    text = str(error.value)
    assert f"byte {byte} of the block of {nbytes} bytes at {address:#x} " in text
    assert f" is {reads:#04x}, and not the {FREED:#x} " in text
    assert f"(damaged bytes: {damaged})" in text
    born, gone = re.search(r"allocated at (.*), and given back last at (.*);", text).groups()
    assert BORN in born and GONE in gone
    return True


@pytest.mark.parametrize("kind", ["slab", "pool"])  # a Bump's is held as by an array
@pytest.mark.parametrize("released", [False, True])
def test_what_a_stream_still_uses_is_given_back_nevertheless(kind, released):
    with a_gpu() as gpu:
        allocator, stream = ALLOCATORS[kind](cuda.Pinned()), new_stream(gpu)
        block = allocator.alloc(100)
        block.record_stream(stream)
        slowly_fill(gpu, stream, block, 1)
        assert len(live_blocks(allocator)) == 1
        if released:
            block.release()
        del block
        assert not live_blocks(allocator)
        gpu.drain()
        allocator.check()
        del allocator


# ---- a write after free -----------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", ALLOCATORS)
@pytest.mark.parametrize(
    "take",
    [
        lambda a: a.alloc(100),
        lambda a: a.alloc(100, 64),
        lambda a: a.alloc_many([100, 100]),
        lambda a: a.empty(100, "u1"),
        lambda a: a.zeros(100, "u1"),
        lambda a: a.copy(np.ones(100, "u1")),
    ],
    ids=["alloc", "aligned", "many", "empty", "zeros", "copy"],
)
def test_a_write_after_free_is_found_by_the_next_allocation(kind, source, take, tmp_path):
    allocator = ALLOCATORS[kind](SOURCES[source](tmp_path))
    address = freed_block(allocator)
    assert set(peek(address, 100)) == {FREED}
    poke(address + 7, 3, 0x41)
    with pytest.raises(MemoryCorruption, match=f"of this {allocator_word(kind)} ") as error:
        take(allocator)
    assert accused(error, address, 7, 0x41, damaged=3)
    # It was given back and filled again; all of it can be used.
    allocator.check()
    assert live_blocks(allocator) == [] and set(peek(address, 100)) == {FREED}
    served = take(allocator)
    assert served is not None
    allocator.check()


def allocator_word(kind):
    return {"bump": "arena"}.get(kind, kind)


def test_check_looks_at_all_free_memory(allocator):
    address = freed_block(allocator)
    allocator.check()
    poke(address + 99, 1, 0)
    with pytest.raises(MemoryCorruption) as error:
        allocator.check()
    assert accused(error, address, 99, 0)
    allocator.check()  # once
    assert set(peek(address, 100)) == {FREED}


@given(
    nbytes=st.integers(1, 3 * PAGE),
    data=st.data(),
    value=st.integers(0, 255).filter(lambda value: value != FREED),
)
def test_every_byte_counts(nbytes, data, value):
    pool = Pool(source=Pages(), debug=True)
    address = freed_block(pool, nbytes)
    first = data.draw(st.integers(0, nbytes - 1))
    length = data.draw(st.integers(1, nbytes - first))
    poke(address + first, length, value)
    with pytest.raises(MemoryCorruption) as error:
        pool.alloc(nbytes)
    assert accused(error, address, first, value, nbytes, length)


def test_a_block_in_the_memory_of_several_names_the_right_one():
    """Freed blocks are merged, and the next one lies across what they were."""
    pool = Pool(256 << 10, Pages(), 256 << 10, debug=True)
    blocks = [pool.alloc(64 << 10) for _ in range(4)]
    addresses = sorted(block.address for block in blocks)
    assert addresses[3] - addresses[0] == 3 * (64 << 10)
    del blocks
    poke(addresses[2] + 5, 1, 1)
    poke(addresses[1] + 6, 1, 2)
    with pytest.raises(MemoryCorruption, match=f"byte 6 .* at {addresses[1]:#x} ") as error:
        pool.alloc(256 << 10)
    assert "damaged bytes: 1" in str(error.value)
    with pytest.raises(MemoryCorruption, match=f"byte 5 .* at {addresses[2]:#x} "):
        pool.alloc(1)  # the other one waited
    assert live_blocks(pool) == []
    assert pool.alloc(256 << 10).nbytes == 256 << 10


def test_what_is_left_of_a_block_is_still_its_own():
    pool = Pool(256 << 10, Pages(), 256 << 10, debug=True)
    big = pool.alloc(256 << 10)
    address = big.address
    del big
    small = [pool.alloc(64 << 10) for _ in range(2)]
    assert {block.address - address for block in small} == {0, 64 << 10}
    for byte in (128 << 10, 200 << 10, (256 << 10) - 1):
        poke(address + byte, 1, 1)
        with pytest.raises(MemoryCorruption, match=rf"byte {byte} of the block of {256 << 10} b"):
            pool.check()
    assert len(live_blocks(pool)) == 2


def test_another_call_raises_what_was_found():
    """Several were found by one call: the others come with whatever is called next."""
    pool = Pool(source=Pages(), debug=True)
    held = memoryview(pool.alloc(8))
    addresses = sorted(block.address for block in pool.alloc_many([5000] * 3))
    for address in addresses:
        poke(address, 1, 1)
    for call in (pool.check, lambda: held.obj.fill(1), lambda: held.obj.copy_from(b"12345678")):
        with pytest.raises(MemoryCorruption, match=f"{addresses.pop(0):#x}"):
            call()
    held.obj.fill(2)


def test_a_reset_gives_back_and_a_stale_array_is_found():
    arena = exact(1 << 16, debug=True)
    with arena.scope():
        address = arena.alloc(100).address  # where the scope allocates
    poke(address + 1, 1, 7)
    with pytest.raises(MemoryCorruption) as error:
        arena.alloc(10)
    assert arena.used == 0, "a refused allocation leaves nothing"
    assert line_of("# where the scope allocates") in str(error.value)
    assert arena.alloc(10).address == address


def test_trimmed_and_regrown_memory_is_not_accused():
    pool = Pool(debug=True, max_bytes=8 << 20)
    for round_ in range(3):
        block = pool.alloc(4 << 20)
        block.fill(round_)
        del block
        assert pool.trim() > 0
        pool.check()
    slab = Slab(PAGE, 1, Pages(), max_count=4, debug=True)
    for round_ in range(3):
        items = slab.alloc_many(4)
        for item in items:
            item.fill(round_)
        del items, item
        slab.trim()
        slab.check()


def test_a_region_at_the_address_of_an_older_one_is_new():
    memory = bytearray(4 << 20)

    class Again:
        """The same memory, whenever nobody has it."""

        def region(self, nbytes):
            return arenapy.Region.from_address(
                ctypes.addressof(ctypes.c_char.from_buffer(memory)), nbytes, owner=memory
            )

    pool = Pool(source=Again(), debug=True)
    for _ in range(3):
        del_me = pool.alloc(100)
        del del_me
        assert pool.trim() > 0
        memory[:] = bytes(len(memory))
    assert pool.alloc(100) is not None


def test_what_was_never_handed_out_is_left_alone(tmp_path):
    """A file that is there already keeps its bytes, but for those of blocks given back."""
    path = tmp_path / "data"
    path.write_bytes(b"x" * (1 << 16))
    pool = Pool(source=File(path, "r+"), debug=True)
    block = pool.alloc(64)
    assert peek(block.address, 64) == b"x" * 64
    block.release()
    pool.check()
    del pool
    assert path.read_bytes().count(b"x") == (1 << 16) - 64


# ---- places, live blocks ----------------------------------------------------------------------


def test_live_blocks_and_their_places(allocator):
    def outer():
        return inner()

    def inner():
        return allocator.alloc(70)  # where inner allocates

    block = outer()
    (live,) = live_blocks(allocator)
    assert live == LiveBlock(block.address, 70, live.place)
    frames = live.place.split(", called at ")
    assert len(frames) == 3
    assert line_of("# where inner allocates") + "inner" in frames[0] and "in outer" in frames[1]
    assert line_of("# where inner allocates") in repr(block)
    block.release()
    assert "closed (allocated at" in repr(block)
    assert live_blocks(allocator) == []


def test_frames_of_arenapy_are_no_places(allocator):
    """Those of any of its folders: what the user reads begins with the user's own line."""
    inside = os.path.join(os.path.dirname(arenapy.__file__), "pool", "some.py")
    names = {}
    exec(compile("def alloc(one): return one.alloc(70)", inside, "exec"), names)
    block = names["alloc"](allocator)  # the line that asked
    (live,) = live_blocks(allocator)
    assert "some.py" not in live.place
    assert line_of("# the line that asked") in live.place.split(", ")[0]
    block.release()


def test_live_blocks_of_arrays_and_many(allocator):
    array = allocator.empty(30, "u1")
    many = allocator.alloc_many([10, 20])
    assert sorted(block.nbytes for block in live_blocks(allocator)) == [10, 20, 30]
    assert {block.address for block in live_blocks(allocator)} == {
        array.ctypes.data,
        *(buffer.address for buffer in many),
    }
    del array
    many.pop().release()
    assert [block.nbytes for block in live_blocks(allocator)] == [10]


def test_grown_blocks_are_followed():
    arena = exact(1 << 16, debug=True)
    block = arena.alloc(10)
    grown = arena.grow(block, 1000)
    assert grown is block
    assert [(live.address, live.nbytes) for live in live_blocks(arena)] == [(block.address, 1000)]
    arena.alloc(1)
    moved = arena.grow(block, 2000)
    assert moved is not block
    assert [live.nbytes for live in live_blocks(arena)] == [1, 2000]
    arena.reset()
    assert live_blocks(arena) == []


def test_a_block_dropped_on_another_thread_is_gone_there(recycling):
    held = [recycling.alloc(100)]
    address = held[0].address

    def drop_there():
        held.clear()  # where another thread drops

    thread = threading.Thread(target=drop_there)
    thread.start()
    thread.join()
    assert live_blocks(recycling) == []
    poke(address, 1, 1)
    with pytest.raises(MemoryCorruption) as error:
        recycling.check()
    place = f"{__file__[: -len(HERE)]}{line_of('# where another thread drops')}"
    if not GIL:
        place = ""  # an object that another thread drops ends where its own thread runs next
    assert f"back last at {place}" in str(error.value)


def test_buffer_errors_say_where_the_block_was_allocated(allocator):
    block = allocator.alloc(100)  # where the exported one is
    place = re.escape(line_of("# where the exported one is"))
    with memoryview(block), pytest.raises(BufferError, match=place):
        block.release()


def test_errors_of_a_closed_block_name_its_own_place(recycling):
    closed = recycling.alloc(100)  # where the closed one was
    address = closed.address
    closed.release()
    other = recycling.alloc(100)
    assert other.address == address
    with pytest.raises(ValueError, match=re.escape(line_of("# where the closed one was"))):
        closed.fill(1)


def test_a_strict_reset_says_where_survivors_were_allocated():
    arena = exact(1 << 16, strict=True, debug=True)
    array = arena.empty(10)  # where the survivor is
    with pytest.raises(BufferError, match=re.escape(line_of("# where the survivor is"))):
        arena.reset()
    del array
    arena.reset()


def test_only_allocators_in_debug_mode_have_a_ledger():
    with pytest.raises(ValueError, match="debug=True"):
        live_blocks(Pool(debug=False))
    with pytest.raises(TypeError, match="not an allocator"):
        live_blocks(3)


@pytest.mark.parametrize(
    ("variable", "argument", "debug"),
    [
        (None, None, False),
        ("", None, False),
        ("0", None, False),
        ("1", None, True),
        ("yes", None, True),
        ("1", False, False),
        (None, True, True),
        ("0", True, True),
    ],
)
def test_who_decides(monkeypatch, variable, argument, debug):
    monkeypatch.delenv("ARENAPY_DEBUG", raising=False)
    if variable is not None:
        monkeypatch.setenv("ARENAPY_DEBUG", variable)
    made = [
        Bump(PAGE, Pages(), debug=argument),
        Slab(64, 4, Pages(), debug=argument),
        Pool(source=Pages(), debug=argument),
    ]
    for allocator in made:
        assert allocator.debug is debug
        address = freed_block(allocator, 64)
        assert (set(peek(address, 64)) == {FREED}) is debug


# ---- check() after every operation ------------------------------------------------------------


@pytest.fixture
def broken(monkeypatch):
    """What is wrong with the bookkeeping, from now on."""
    verdict = []

    def verify(core):
        if verdict:
            raise AssertionError(verdict.pop())

    for module in ("bump", "slab", "pool"):
        monkeypatch.setattr(f"arenapy.{module}.{module}.verify", verify)
    return verdict


OPERATIONS = {
    "alloc": lambda a, b: a.alloc(10),
    "empty": lambda a, b: a.empty(10),
    "alloc_many": lambda a, b: a.alloc_many([10, 10]),
    "release": lambda a, b: b.release(),
    "check": lambda a, b: a.check(),
    "trim": lambda a, b: a.trim() if hasattr(a, "trim") else a.reset(),
    "prewarm": lambda a, b: a.prewarm({64: 2}) if hasattr(a, "prewarm") else a.alloc(1),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", ALLOCATORS)
def test_every_operation_is_checked(broken, kind, operation):
    allocator = ALLOCATORS[kind]()
    block = allocator.alloc(10)
    idle = allocator.alloc(1000)
    del idle
    broken.append("planted")
    with pytest.raises(AssertionError, match="planted"):
        OPERATIONS[operation](allocator, block)
    assert not broken


def test_a_drop_reports_through_the_unraisable_hook(broken, recycling, monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    block = recycling.alloc(10)
    broken.append("planted")
    del block
    (unraisable,) = seen
    assert unraisable.exc_type is AssertionError and "planted" in str(unraisable.exc_value)
    seen.clear()


def test_a_drop_while_an_exception_passes_leaves_it_alone(recycling):
    with pytest.raises(ZeroDivisionError):
        [recycling.alloc(10), recycling.alloc(1 // 0)]
    assert live_blocks(recycling) == []


def test_a_signal_at_a_new_place_is_not_lost():
    """Its text is made in a function that cannot raise."""
    pool = Pool(debug=True)
    pool.alloc(0).release()  # so that it need not ask its source
    strike = ctypes.pythonapi.PyErr_SetInterruptEx  # which returns 0, and runs no handler
    with pytest.raises(KeyboardInterrupt):
        pool.alloc_many(map(strike, [signal.SIGINT]))
        time.sleep(10)
    pool.check()


def test_an_allocator_that_another_thread_makes_meanwhile_is_reported():
    """It is made before each bytecode of what notes another one, as a thread would."""
    kept = [Bump(PAGE, debug=True) for _ in range(3)]
    steps = 0

    def make():
        kept.append(Bump(PAGE, debug=True))

    def trace(frame, event, _argument):
        nonlocal steps
        if frame.f_code.co_filename != leaks.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            steps += 1
            if steps == strike:
                del kept[0]
                thread = threading.Thread(target=make)
                thread.start()
                thread.join()
        return trace

    before = sys.gettrace()
    for strike in range(1, 40):  # beyond the last bytecode
        steps = 0
        sys.settrace(trace)
        try:
            make()
        finally:
            sys.settrace(before)
        assert {ledger.allocator() for ledger in leaks._alive()} >= set(kept), strike
    assert steps > 3
