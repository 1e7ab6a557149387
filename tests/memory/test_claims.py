"""Who has which bytes: regions over what was there before, in this process and in others."""

import contextlib
import copy
import ctypes
import fcntl
import gc
import itertools
import mmap
import os
import pickle
import struct
import subprocess
import sys
from functools import partial
from multiprocessing import shared_memory
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import numpy as np
import pytest
from children import another_process
from every import HOST_SOURCES, ITEM
from helpers import in_threads
from hypothesis import event, given
from hypothesis import strategies as st

from arenapy import Bump, Existing, File, Host, OutOfMemory, Pool, Shared, Slab, handles
from arenapy.linux import vm
from arenapy.memory import sources
from arenapy.memory.claims import claim, in_file

NBYTES = 1 << 16
CONTENT = bytes(range(256)) * (NBYTES // 256)
NOWHERE = 1 << 63  # no file is on such a device

# ---- the registry against a list ------------------------------------------------------------

# Mostly views, of which many meet; a few that nobody else may have are asked among them.
spans = st.tuples(
    st.integers(0, 1), st.integers(0, 60), st.integers(1, 30), st.sampled_from([False] * 5 + [True])
).map(lambda t: (NOWHERE + t[0], 3, t[1], t[1] + t[2] ** 2 // 30 + 1, t[3]))
steps = st.one_of(
    st.tuples(st.just("claim"), st.lists(spans, min_size=1, max_size=3), st.booleans()),
    st.tuples(st.just("drop"), st.integers(0, 1000)),
)


def together(one, other):
    """May both be there?"""
    same = one[:2] == other[:2] and one[2] < other[3] and other[2] < one[3]
    return not (same and (one[4] or other[4]))


@given(st.lists(steps, max_size=60))
def test_the_registry_knows_what_meets(program):
    live = []
    for step in program:
        if step[0] == "drop":
            if live:
                live.pop(step[1] % len(live))
            continue
        _, wanted, anyway = step
        taken = [span for _, spans in live for span in spans]
        fits = anyway or all(together(*pair) for pair in itertools.product(wanted, taken))
        fits = fits and (
            anyway or all(itertools.starmap(together, itertools.combinations(wanted, 2)))
        )
        try:
            live.append((claim(wanted, "a test", anyway=anyway), wanted))
        except OutOfMemory:
            assert not fits, (wanted, taken)
            event("refused")
        else:
            assert fits, (wanted, taken)
    for device, at in itertools.product(range(2), range(0, 100)):  # what one alone reaches, too
        wanted = (NOWHERE + device, 3, at, at + 1, True)
        fits = all(together(wanted, span) for _, spans in live for span in spans)
        with contextlib.nullcontext() if fits else pytest.raises(OutOfMemory):
            claim([wanted], "one byte")
    live.clear()
    for device in range(2):
        claim([(NOWHERE + device, 3, 0, 1 << 63, True)], "nothing is left behind")


def test_a_hundred_thousand_viewers_are_found_at_once():
    """Also where they lie in order, which is how memory is handed out."""
    views = [claim([(NOWHERE, 7, 64 * i, 64 * i + 60, False)], "a view") for i in range(100_000)]
    for i in range(0, 100_000, 1000):
        with pytest.raises(OutOfMemory):
            claim([(NOWHERE, 7, 64 * i + 59, 64 * i + 62, True)], "over one")
        claim([(NOWHERE, 7, 64 * i + 60, 64 * i + 64, True)], "between two")
    del views[::2]
    claim([(NOWHERE, 7, 64 * 10, 64 * 11, True)], "where one was")


def test_claims_from_many_threads():

    def work(number):
        for i in range(2000):
            with claim([(NOWHERE, 8, 100 * number, 100 * number + 50, True)], "mine"):
                kept = claim([(NOWHERE, 8, 1000, 1000 + i % 7 + 1, False)], "everybody's")
        del kept

    in_threads(*(partial(work, k) for k in range(4)))
    claim([(NOWHERE, 8, 0, 1 << 63, True)], "nothing is left behind")


# ---- one file, by every way to it -------------------------------------------------------------


def mapped(path, access):
    with open(path, "rb" if access == mmap.ACCESS_READ else "r+b") as file:
        return mmap.mmap(file.fileno(), NBYTES, access=access)


def unpickled(obj):
    """A Buffer over the object's own bytes, as unpickling makes it."""
    frames = []
    data = pickle.dumps(Bump(NBYTES * 2).alloc(NBYTES), 5, buffer_callback=frames.append)
    return pickle.loads(data, buffers=[obj])


def linked(path, link):
    other = path.with_name("another name")
    other.unlink(missing_ok=True)
    link(path, other)
    return other


def again(source):
    """A source that is equal, but not the same."""
    return copy.deepcopy(pickle.loads(pickle.dumps(source)))


#: name: (what makes a region of the file, whether it may be written to)
FILE_WAYS = {
    "r": (lambda path: File(path).region(NBYTES), False),
    "c": (lambda path: File(path, "c").region(NBYTES), False),
    "r+": (lambda path: File(path, "r+").region(NBYTES), True),
    "r+ copied": (lambda path: again(File(os.fsencode(path), "r+")).region(NBYTES // 2), True),
    "r+ by a symbolic link": (lambda path: File(linked(path, os.symlink), "r+").region(), True),
    "r by a hard link": (lambda path: File(linked(path, os.link)).region(), False),
    "w+": (lambda path: File(path, "w+").region(NBYTES), True),
    "mmap": (lambda path: Existing(mapped(path, mmap.ACCESS_WRITE)).region(), True),
    "mmap, read-only": (
        lambda path: Existing(mapped(path, mmap.ACCESS_READ), readonly=True).region(), False,
    ),
    "mmap, copied on write": (
        lambda path: Existing(mapped(path, mmap.ACCESS_COPY)).region(), False,
    ),
    "memmap": (lambda path: Existing(np.memmap(path, mode="r+")[:100]).region(), True),
    "unpickled": (lambda path: unpickled(mapped(path, mmap.ACCESS_WRITE)), False),
}  # fmt: skip


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "data.bin"
    path.write_bytes(CONTENT)
    return path


@pytest.mark.parametrize("first", FILE_WAYS)
def test_one_file_by_two_ways(path, first):
    for second in FILE_WAYS:
        path.write_bytes(CONTENT)
        one, writes = FILE_WAYS[first]
        other, also_writes = FILE_WAYS[second]
        kept = one(path)
        if first == "w+":
            assert path.read_bytes() == bytes(NBYTES)
        before = path.read_bytes(), os.stat(path).st_blocks
        if writes or also_writes:
            with pytest.raises(OutOfMemory, match=r"already has a region.*Drop"):
                other(path)
            assert (path.read_bytes(), os.stat(path).st_blocks) == before, (first, second)
        else:
            other(path)
        del kept
        gc.collect()
        other(path)
        gc.collect()


def test_an_allocator_of_another_part_of_the_file_goes_together(path):
    page = mmap.ALLOCATIONGRANULARITY
    first = File(path, "r+").region(page)
    with open(path, "r+b") as file:
        second = mmap.mmap(file.fileno(), page, offset=page)
        third = mmap.mmap(file.fileno(), 2 * page)
    region = Existing(second).region()
    with pytest.raises(OutOfMemory):
        Existing(third).region()
    assert first.nbytes == region.nbytes == page


def test_memory_that_maps_the_same_bytes_twice_is_refused(path):
    """A ring buffer that is mapped twice in a row: an allocator would hand each byte out twice."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    ring = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    start = np.frombuffer(ring, "u1").ctypes.data
    half = 2 * mmap.PAGESIZE
    with open(path, "r+b") as file:
        for at in (start, start + half):
            fixed = mmap.MAP_SHARED | 0x10
            assert (
                libc.mmap(at, half, mmap.PROT_READ | mmap.PROT_WRITE, fixed, file.fileno(), 0) == at
            )
    with pytest.raises(OutOfMemory):
        Existing(ring).region()
    assert Existing(ring, readonly=True).region().nbytes == 2 * half
    assert Existing(memoryview(ring)[:half]).region().nbytes == half


# ---- one object's memory ---------------------------------------------------------------------

#: name: (what makes a region of an object's memory, byte 99 too; whether it may be written to)
OBJECT_WAYS = {
    "whole": (lambda obj: Existing(obj).region(), True),
    "first bytes": (lambda obj: Existing(obj).region(100), True),
    "last bytes of those": (lambda obj: Existing(memoryview(obj)[99:300]).region(), True),
    "array": (lambda obj: Existing(np.frombuffer(obj, "f4")[20:30]).region(), True),
    "array of the array": (
        lambda obj: Existing(np.frombuffer(obj, "u1")[::1].reshape(-1, 8)[:13]).region(), True,
    ),
    "ctypes": (lambda obj: Existing((ctypes.c_char * 100).from_buffer(obj)).region(), True),
    "read-only": (lambda obj: Existing(obj, readonly=True).region(), False),
    "read-only view": (lambda obj: Existing(memoryview(obj).toreadonly(), True).region(), False),
    "unpickled": (unpickled, False),
    "unpickled view": (lambda obj: unpickled(pickle.PickleBuffer(obj)), False),
}  # fmt: skip


@pytest.mark.parametrize("first", OBJECT_WAYS)
@pytest.mark.parametrize("kind", ["bytearray", "mmap", "SharedMemory"])
def test_one_object_by_two_ways(first, kind):
    if kind == "bytearray":
        obj = bytearray(CONTENT)
    elif kind == "mmap":
        obj = mmap.mmap(-1, NBYTES)
    else:
        memory = shared_memory.SharedMemory(create=True, size=NBYTES)
        memory.unlink()
        obj = memory.buf
    one, writes = OBJECT_WAYS[first]
    for other, also_writes in OBJECT_WAYS.values():
        kept = one(obj)
        if writes or also_writes:
            with pytest.raises(OutOfMemory, match=r"already has a region.*Drop"):
                other(obj)
        else:
            other(obj)
        del kept
        gc.collect()
        other(obj)
    gc.collect()
    if kind == "SharedMemory":
        obj.release()
        memory.close()


def test_parts_of_an_object_that_do_not_meet_go_together():
    view = memoryview(bytearray(300))
    regions = [Existing(view[at : at + 100]).region() for at in (200, 0, 100)]
    with pytest.raises(OutOfMemory):
        Existing(view[99:101]).region()
    del regions[1]
    assert Existing(view[:100]).region().nbytes == 100


def test_two_attachments_of_named_memory():
    one = shared_memory.SharedMemory(create=True, size=NBYTES)
    two = shared_memory.SharedMemory(one.name)
    one.unlink()
    region = Existing(one.buf).region()
    with pytest.raises(OutOfMemory):
        Existing(two.buf).region()
    del region
    region = Existing(two.buf).region()
    del region
    one.close()
    two.close()


@pytest.mark.parametrize("allocator", [Bump, lambda n, source: Pool(n, source, n)])
def test_what_was_handed_out_keeps_the_claim(allocator):
    """Not the allocator does: an array that outlives it."""
    memory = bytearray(1 << 16)
    array = allocator(1 << 15, Existing(memory)).empty(10)
    gc.collect()
    with pytest.raises(OutOfMemory):
        Existing(memory).region()
    del array
    assert Existing(memory).region().nbytes == len(memory)


# ---- Shared memory by its descriptor ---------------------------------------------------------


def test_shared_memory_has_no_second_allocator():
    region = Shared().region(NBYTES)
    name = f"/proc/self/fd/{region.fd}"
    by_hand = mmap.mmap(region.fd, NBYTES)
    ways = [
        lambda: File(name, "r+").region(),
        lambda: File(name).region(),
        lambda: File(name, "w+").region(NBYTES),
        lambda: Existing(by_hand).region(),
        lambda: Existing(by_hand, readonly=True).region(),
    ]
    received = ForkingPickler.loads(ForkingPickler.dumps(region))
    for way in ways:
        with pytest.raises(OutOfMemory):
            way()
    name = f"/proc/self/fd/{received.fd}"
    del region
    gc.collect()
    with pytest.raises(OutOfMemory):  # another process may allocate from it
        File(name, "r+").region()
    with pytest.raises(OutOfMemory):
        Existing(by_hand).region()
    del received
    gc.collect()
    assert Existing(by_hand).region().nbytes == NBYTES


# ---- what came from elsewhere is viewed -------------------------------------------------------


ELSEWHERE = {
    "unpickled": lambda: unpickled(bytearray(NBYTES)),
    "unpickled, an mmap": lambda: unpickled(mmap.mmap(-1, NBYTES)),
    "received": lambda: received(Bump(1 << 16, Shared()).alloc(NBYTES)),
    "received, a part of a region": lambda: received(Shared().region(NBYTES)).buffer(0, 4096),
}
MAKERS = [
    lambda source: Bump(4096, source),
    lambda source: Slab(64, 8, source),
    lambda source: Pool(None, source, 4096),
]


def received(sent):
    return pickle.loads(ForkingPickler.dumps(sent))


@pytest.mark.parametrize("way", ELSEWHERE)
@pytest.mark.parametrize("make", MAKERS)
def test_nobody_allocates_from_what_came_from_elsewhere(way, make):
    array = ELSEWHERE[way]().array()
    array[:] = 7
    region = handles(array).region
    with pytest.raises(ValueError, match=r"but not allocated from|only that one allocates"):
        make(SimpleNamespace(region=lambda nbytes: region))
    assert (array == 7).all()
    assert region.buffer(0, 100).array()[99] == 7, "it is viewed as before"


# ---- what cannot be known ----------------------------------------------------------------------

NO_DESCRIPTOR = """
import mmap, os
from arenapy import Bump, Existing, File, Pool

path = "file"
with open(path, "wb") as file:
    file.truncate(1 << 20)
with open(path, "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 1 << 20)
full = []
try:
    while True:
        full.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
"""


def test_memory_of_a_file_that_cannot_be_seen_is_refused(run_script):
    run_script(
        NO_DESCRIPTOR
        + """
for readonly in (False, True):
    try:
        Existing(mapped, readonly=readonly).region()
    except OSError as error:
        assert "cannot find the file" in str(error), error
    else:
        raise AssertionError("File(path) would have the same bytes")
arena = Bump(1 << 16, Existing(bytearray(1 << 16)))  # it is on the heap
pool = Pool()
pool.alloc(1 << 26).array()[:] = 1                   # memory needs no descriptor
for one in full:
    os.close(one)
arena = Bump(1 << 16, Existing(mapped))
"""
    )


def test_a_file_whose_name_is_longer_than_a_path_may_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(25):
        os.mkdir("d" * 200)
        os.chdir("d" * 200)
    with open("file", "w+b") as file:
        file.truncate(1 << 16)
        one, other = mmap.mmap(file.fileno(), 1 << 16), mmap.mmap(file.fileno(), 1 << 16)
    arena = Bump(1 << 16, Existing(one))
    with pytest.raises(OutOfMemory, match="already has a region"):
        Bump(1 << 16, Existing(other))
    del arena


# ---- one allocator in a Buffer of another ----------------------------------------------------


def outer_buffers(directory):
    for name, make in HOST_SOURCES.items():
        yield name, lambda make=make, name=name: make(directory / name.replace(" ", ""))


@pytest.mark.parametrize("name", HOST_SOURCES)
def test_allocators_within_allocators(name, tmp_path):
    outer = Bump(1 << 19, HOST_SOURCES[name](tmp_path))
    block = outer.alloc(1 << 17)
    for inside in (block, block[1 << 12 :], outer.empty(1 << 14, "f8")):
        inner = Pool(1 << 16, Existing(inside), 1 << 16)
        with pytest.raises(OutOfMemory, match="already has a region"):
            Existing(np.asarray(inside)).region()
        array = inner.empty(ITEM // 4, "u1")
        innermost = Slab(64, 16, Existing(array))
        with pytest.raises(OutOfMemory, match="already has a region"):
            Existing(array).region()
        item = innermost.alloc()
        assert array.ctypes.data <= item.address < array.ctypes.data + array.nbytes
        innermost.check()
        inner.check()
        del array, innermost, item, inner
        gc.collect()
        assert Existing(inside).region().nbytes == memoryview(inside).nbytes
    outer.check()


def test_a_view_of_what_an_allocator_has_is_refused():
    memory = bytearray(1 << 14)
    arena = Bump(1 << 13, Existing(memory))
    with pytest.raises(OutOfMemory):
        unpickled(memory)
    block = arena.alloc(100)
    frames = []
    data = pickle.dumps(block, 5, buffer_callback=frames.append)
    views = [pickle.loads(data, buffers=frames) for _ in range(2)]
    block.fill(7)
    assert all(bytes(view) == bytes([7]) * 100 for view in views)
    with pytest.raises(OutOfMemory):
        Bump(50, Existing(block))
    del views
    frames.clear()
    gc.collect()
    assert Bump(50, Existing(block)).capacity == 50


def received_twice(block):
    data = [ForkingPickler.dumps(block) for _ in range(2)]
    return [pickle.loads(one) for one in data]


def mapped_twice(directory):
    with open(directory / "file", "w+b") as file:
        file.truncate(NBYTES)
        return [mmap.mmap(file.fileno(), NBYTES) for _ in range(2)]


#: Buffers of regions that have the same bytes.
SEVERAL = {
    "received": lambda _: received_twice(Bump(NBYTES, Shared()).alloc(NBYTES)),
    "received, in place": lambda _: received_twice(Pool(source=Shared(grow=True)).alloc(NBYTES)),
    "sent, and received": lambda _: [
        block := Pool(source=Shared()).alloc(NBYTES), *received_twice(block)
    ],
    "a region and a Buffer": lambda _: [
        region := Shared().region(NBYTES), received(region).buffer(), received(region.buffer())
    ][1:],
    "unpickled": lambda _: [unpickled(m) for m in [mmap.mmap(-1, NBYTES, mmap.MAP_PRIVATE)] * 2],
    "unpickled, a shared object": lambda _: [unpickled(m) for m in [mmap.mmap(-1, NBYTES)] * 2],
    "unpickled, two maps of a file": lambda path: [unpickled(m) for m in mapped_twice(path)],
    "unpickled, of what was received": lambda _: [
        unpickled(one) for one in received_twice(Bump(NBYTES, Shared()).alloc(NBYTES))
    ],
}  # fmt: skip


@pytest.mark.parametrize("way", SEVERAL)
@pytest.mark.parametrize("make", MAKERS)
def test_one_allocator_inside_the_same_bytes_of_several_regions(way, make, tmp_path):
    buffers = SEVERAL[way](tmp_path)
    for one in buffers:
        inner = make(Existing(one[4096:12288]))
        for other in buffers:
            with pytest.raises(OutOfMemory, match="already has a region"):
                Existing(other[4096:]).region()
            with pytest.raises(OutOfMemory, match="already has a region"):
                Existing(other, readonly=True).region()
            assert Existing(other[:4096]).region().nbytes == 4096
            assert Existing(other[12288:]).region().nbytes > 0
        block = inner.alloc() if isinstance(inner, Slab) else inner.alloc(64)
        assert Bump(64, Existing(block)).capacity == 64, "and one inside that"
        del inner, block
        gc.collect()
    views = [Existing(one, readonly=True).region() for one in buffers]
    assert len(views) == len(buffers)


def test_addresses_of_files_are_known():
    region = Shared().region(3 * mmap.PAGESIZE)
    start, end = region.address, region.address + region.nbytes
    assert in_file(start, end)
    assert in_file(start + 1, end - 1)
    assert not in_file(start, end + mmap.PAGESIZE)
    assert not in_file(start - 1, end)
    del region
    assert not in_file(start, end)
    assert not in_file(Host().region(100).address, 1)


# ---- what is asked of the kernel ---------------------------------------------------------------


def test_both_ways_to_ask_for_mappings_agree(path):
    with open(path, "r+b") as file:
        shared = mmap.mmap(file.fileno(), NBYTES)
        private = mmap.mmap(file.fileno(), NBYTES, access=mmap.ACCESS_COPY)
    heap, anonymous = np.zeros(1 << 22, "u1"), mmap.mmap(-1, NBYTES)
    memory = Shared().region(NBYTES)
    objects = [shared, private, heap, anonymous, bytearray(100), memory.buffer()]
    for obj, seen in zip(objects, [True, False, False, True, False, True], strict=True):
        array = np.frombuffer(obj, "u1")[17:-1]
        found = vm.areas(array.ctypes.data, array.nbytes)
        assert found == vm.read_areas(array.ctypes.data, array.nbytes)
        assert sum(size for *_, size, _ in found) == array.nbytes
        assert {area[0] for area in found} == {seen}
        if obj is shared or obj is private:
            status = os.stat(path)
            assert found[0][2:] == (status.st_ino, 17, array.nbytes, os.fsencode(path))
    libc = ctypes.CDLL(None, use_errno=True)
    array = np.frombuffer(anonymous, "u1")  # several mappings: each page but the first
    for at in range(mmap.PAGESIZE, NBYTES, 2 * mmap.PAGESIZE):
        assert libc.mprotect(ctypes.c_void_p(array.ctypes.data + at), mmap.PAGESIZE, 1) == 0
    found = vm.areas(array.ctypes.data, NBYTES)
    assert found == vm.read_areas(array.ctypes.data, NBYTES)
    assert len(found) == NBYTES // mmap.PAGESIZE
    assert [area[3] for area in found] == list(range(0, NBYTES, mmap.PAGESIZE))


def test_an_old_kernel_is_asked_another_way(path, monkeypatch):
    monkeypatch.setattr(vm, "areas", vm.read_areas)
    test_one_file_by_two_ways(path, "r+")
    test_one_object_by_two_ways("array", "mmap")


def test_memory_of_a_device_is_no_file():
    """All of its mappings may have one inode and offset; they are not the same bytes."""
    with open("/dev/zero", "r+b") as device:
        pages = [mmap.mmap(device.fileno(), NBYTES, mmap.MAP_PRIVATE) for _ in range(2)]
    regions = [Existing(page).region() for page in pages]
    assert regions[0].address != regions[1].address


@pytest.mark.parametrize("other", [None, os.mkdir, os.mkfifo])
def test_a_file_whose_name_is_another_ones_now(tmp_path, other):
    """The kernel names a mapping of a deleted file by what may be there, too."""
    path = tmp_path / "deleted"
    path.write_bytes(CONTENT)
    with open(path, "r+b") as file:
        pages = [mmap.mmap(file.fileno(), NBYTES) for _ in range(2)]
    path.unlink()
    if other is not None:
        other(f"{path} (deleted)")
    region = Existing(pages[0]).region()
    with pytest.raises(OutOfMemory):
        Existing(pages[1]).region()
    del region


def test_a_segment_of_system_v(run_script):
    """The first one of a namespace has number 0."""
    run_script("""
        import ctypes, os
        from arenapy import Existing, OutOfMemory
        NEWIPC, NEWUSER, CREATE = 0x8000000, 0x10000000, 0o1600
        libc = ctypes.CDLL(None, use_errno=True)
        libc.shmat.restype = ctypes.c_void_p
        libc.unshare(NEWIPC) == 0 or libc.unshare(NEWIPC | NEWUSER)  # else the numbers go on
        for _ in range(2):
            segment = libc.shmget(0, 1 << 16, CREATE)
            starts = [libc.shmat(segment, None, 0) for _ in range(2)]
            views = [(ctypes.c_char * (1 << 16)).from_address(start) for start in starts]
            region = Existing(views[0]).region()
            try:
                Existing(views[1]).region()
                raise AssertionError(f"segment {segment} twice")
            except OutOfMemory:
                libc.shmctl(segment, 0, None)
            del region
    """)


# ---- other processes -------------------------------------------------------------------------

OTHER = """
import os, sys
from arenapy import File
kept = None
for line in sys.stdin:
    command, _, path = line.strip().partition(" ")
    if command == "drop":
        kept = None
        print("dropped")
    elif command == "close":
        os.closerange(3, 100)
        print("closed")
    else:
        try:
            kept = File(path, command).region(4096)
            print("mapped")
        except BlockingIOError as error:
            assert error.filename == path and "another process" in str(error), error
            print("refused")
    sys.stdout.flush()
"""


@pytest.fixture
def other():
    with subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def ask(command, path=""):
            process.stdin.write(f"{command} {path}\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        ask.kill = process.kill
        ask.wait = process.wait
        yield ask
        process.stdin.close()


MODES = ["r", "c", "r+", "w+"]


@pytest.mark.full
def test_one_file_in_two_processes(path, other):
    for here, there in itertools.product(MODES, MODES):
        path.write_bytes(CONTENT)
        region = File(path, here).region(4096)
        before = path.read_bytes()
        answer = other(there, path)
        assert answer == ("mapped" if {here, there} <= {"r", "c"} else "refused"), (here, there)
        assert path.read_bytes() == before
        del region
        other("drop")
        assert other(there, path) == "mapped"
        before = path.read_bytes()
        if not {here, there} <= {"r", "c"}:
            with pytest.raises(BlockingIOError, match="another process"):
                File(path, here).region(4096)
        assert path.read_bytes() == before
        other("drop")


def test_a_shared_lock_on_all_of_a_file_hides_nobody(path, other):
    """Of two locks that conflict, F_OFD_GETLK names one: here the program's."""
    assert other("r", path) == "mapped"
    with open(path, "r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_SH)
        for mode in ("r+", "w+"):
            with pytest.raises(BlockingIOError):
                File(path, mode).region(4096)
    assert path.read_bytes() == CONTENT
    other("drop")


def test_the_lock_of_a_process_that_closes_descriptors_or_is_killed(path, other):
    assert other("r+", path) == "mapped"
    assert other("close") == "closed"
    with pytest.raises(BlockingIOError):
        File(path, "r").region()
    other.kill()
    other.wait()
    assert File(path, "r+").region().nbytes == NBYTES


@pytest.mark.parametrize("mode", MODES)
def test_files_are_locked_beyond_their_bytes(path, mode):
    """A program that locks the bytes it works on, from the first one on, never meets this lock."""
    region = File(path, mode).region(4096)
    with open(path, "r+b") as file:
        assert vm.first_lease(file.fileno(), 0, 1 << 62) is None
        assert vm.first_lease(file.fileno(), 1 << 62, 1) == (1 << 62, 1)
        del region
        assert vm.first_lease(file.fileno(), 0, (1 << 63) - 1) is None


@pytest.mark.parametrize("mode", MODES)
def test_locks_on_a_files_bytes_do_not_matter(path, mode):
    with open(path, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        fcntl.lockf(file, fcntl.LOCK_EX, NBYTES)
        region = File(path, mode).region(4096)
        fcntl.lockf(file, fcntl.LOCK_UN)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, NBYTES)
        del region


@pytest.mark.parametrize("kind", [fcntl.LOCK_SH, fcntl.LOCK_EX])
@pytest.mark.parametrize("mode", MODES)
def test_a_lock_on_all_of_a_file_refuses_it(path, mode, kind):
    """Not mapped without a lock of ours, which the next process would not see."""
    with open(path, "r+b") as file:
        fcntl.lockf(file, kind)  # all of it, to the end of any file
        if kind == fcntl.LOCK_SH and mode in ("r", "c"):
            region = File(path, mode).region(4096)
            fcntl.lockf(file, fcntl.LOCK_UN)
            assert vm.first_lease(file.fileno(), 0, (1 << 63) - 1) == (1 << 62, 1)  # ours
            del region
        else:
            with pytest.raises(BlockingIOError, match="this process itself has locked all") as e:
                File(path, mode).region(4096)
            assert e.value.filename == str(path)
            assert "use fcntl.flock(file, fcntl.LOCK_EX) instead" in str(e.value)
        assert path.read_bytes() == CONTENT
        fcntl.lockf(file, fcntl.LOCK_UN)
        assert File(path, mode).region(4096).nbytes == 4096


def test_whose_lock_on_all_of_a_file_refuses_it(path):
    script = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
fcntl.lockf(file, fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        process.stdout.readline()
        with pytest.raises(BlockingIOError, match=f"process {process.pid} has locked all of it"):
            File(path).region()
        process.stdin.close()
    with open(path, "r+b") as file:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hh4xqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0))
        with pytest.raises(BlockingIOError, match="a program has locked all of it"):
            File(path).region()
    assert File(path, "r+").region().nbytes == NBYTES


def test_a_lock_on_all_of_a_file_that_ends_soon_is_waited_for(path, monkeypatch):
    with open(path, "r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        monkeypatch.setattr(sources.time, "sleep", lambda seconds: file.close())
        assert File(path, "r+").region().nbytes == NBYTES


@pytest.mark.parametrize("ends", [False, True])
def test_a_forked_child_keeps_the_claim(ends, run_script, path):
    """Of memory that both see, when the parent has dropped all that it had there."""
    run_script(f"""
        import gc, mmap, os, signal
        from arenapy import Bump, Existing, File, OutOfMemory
        path, ends = {str(path)!r}, {ends}
        memory = mmap.mmap(-1, 1 << 16)
        makers = [lambda: File(path, "r+"), lambda: Existing(memory)]
        arrays = [Bump(1 << 14, make()).empty(10) for make in makers]
        told, go = os.pipe()
        child = os.fork()
        if not child:
            os.close(go)
            os.closerange(20, 100)
            os.read(told, 1)
            # The parent may still allocate there: this process never does.
            del arrays
            for make in makers:
                try:
                    make().region(4096)
                    os._exit(1)
                except OutOfMemory as error:
                    assert "forked from" in str(error)
            os._exit(0)
        del arrays
        gc.collect()
        for make in makers:
            try:
                Bump(1 << 14, make())
            except OutOfMemory as error:
                assert "forked child" in str(error), error
            else:
                raise AssertionError("handed out again")
        if ends:
            os.write(go, b"x")
        else:
            os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == (0 if ends else -9), status
        for make in makers:
            Bump(1 << 14, make()).check()
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) <= 6, os.listdir("/proc/self/fd")
    """)


def test_a_read_only_view_in_a_forked_child(run_script):
    """The parent may not write there either, once it has dropped its own view."""
    run_script("""
        import gc, mmap, os
        import numpy as np
        from arenapy import Bump, Existing, OutOfMemory

        memory = mmap.mmap(-1, 1 << 16)
        view = np.asarray(Existing(memory, readonly=True).region().buffer())
        told, go = os.pipe()
        child = os.fork()
        if not child:
            os.read(told, 1)
            os._exit(int(view.any()))
        del view
        gc.collect()
        try:
            Bump(1 << 16, Existing(memory)).empty(60_000, "u1")[:] = 1
        except OutOfMemory as error:
            assert "forked child" in str(error), error
        os.write(go, b"x")
        assert os.waitpid(child, 0)[1] == 0, "what the child sees has changed"
        Bump(1 << 16, Existing(memory)).check()
    """)


def test_memory_that_a_child_does_not_get(run_script):
    run_script("""
        import ctypes, gc, mmap, os
        import numpy as np
        from arenapy import Bump, Existing, Host
        private = mmap.mmap(-1, 1 << 16, flags=mmap.MAP_PRIVATE)
        private.madvise(mmap.MADV_DONTFORK)
        outer = Bump(1 << 18, Host(fork="skip"))
        arenas = [Bump(1 << 14, Existing(private)), Bump(1 << 14, Existing(outer.alloc(1 << 15)))]
        blocks = [arena.alloc(100) for arena in arenas]
        child = os.fork()
        if not child:
            for arena, block in zip(arenas, blocks, strict=True):
                for use in (lambda: arena.alloc(8), lambda: memoryview(block), lambda: block[:2]):
                    try:
                        use()
                        os._exit(1)
                    except ValueError:
                        pass
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for arena in arenas:
            arena.alloc(100).fill(1)
            arena.check()
    """)


@pytest.mark.parametrize(
    "make",
    [lambda path: Shared(), lambda path: Shared(grow=True), lambda path: File(path, "w+")],
    ids=["memory", "growing", "file"],
)
@pytest.mark.parametrize("inner", ["allocator", "pickle"])
@pytest.mark.parametrize("look", ["alloc", "alloc_many", "prewarm", "stats"])
def test_a_block_under_another_region_goes_when_the_child_has_ended(look, inner, make, tmp_path):
    """The claim of the other region keeps it as long as the child lives."""
    pool = Pool(8 << 20, make(tmp_path / "file"))
    block = pool.alloc(6 << 20)
    if inner == "allocator":
        other = Bump(1 << 20, Existing(block)).alloc(100)
    else:
        frames = []
        data = pickle.dumps(block, 5, buffer_callback=frames.append)
        other = pickle.loads(data, buffers=frames)
        del frames
    with another_process():
        del other, block
        assert pool.stats().reserved_bytes >= 6 << 20
        assert pool.stats().active_allocations + bool(pool.stats().pending_bytes) == 1
    if look == "alloc":
        pool.alloc(6 << 20).release()
    elif look == "stats":
        assert pool.stats().active_allocations == 0
    pool.prewarm({6 << 20: 1}) if look == "prewarm" else pool.alloc_many([6 << 20])
