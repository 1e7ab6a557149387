"""What is kept by thread: new threads take it over, and it ends with the last that needs it.

On free-threaded builds threads also keep Buffers of their own.
"""

import ctypes
import gc
import queue
import subprocess
import threading
import weakref

import pytest
from helpers import in_threads, poke
from kernel_view import is_mapped

from arenapy import Bump, Host, Pool, Region, Slab

HEAPS = {
    "slab": lambda source: Slab(4096, 512, source=source, max_count=1 << 14),
    "pool": lambda source: Pool(source=source, initial_bytes=2 << 20),
}
SLOTS = 64  # at most so many threads have a cache of their own


class Known:
    """Host memory, of which the test knows where it lies."""

    def __init__(self):
        self.addresses = []

    def region(self, nbytes):
        region = Host(prefault=False).region(nbytes)
        self.addresses.append(region.address)
        return region

    def mapped(self):
        """How many of its regions are mapped."""
        return sum(map(is_mapped, self.addresses))


@pytest.mark.parametrize("heap", HEAPS)
def test_threads_that_come_and_go_leave_few_caches(heap):
    allocator = HEAPS[heap](Known())

    def work():
        blocks = [allocator.alloc(100) for _ in range(200)]
        for block in blocks:
            block.fill(1)

    # A thread that was joined may not quite have ended, and keeps its number until then.
    in_threads(work, work, work)
    before = allocator.stats().metadata_bytes
    for _ in range(24):
        in_threads(work)
    assert allocator.stats().metadata_bytes == before
    allocator.check()


@pytest.mark.parametrize("heap", HEAPS)
@pytest.mark.parametrize("threads", [3, 11, SLOTS + 9])
def test_more_threads_than_caches(heap, threads):
    allocator = HEAPS[heap](Known())

    def work(number):
        for turn in range(20):
            blocks = [allocator.alloc(100 + turn) for _ in range(5)]
            for block in blocks:
                poke(block.address, block.nbytes, number)
            assert all(bytes(block) == bytes([number]) * block.nbytes for block in blocks[1:])
            blocks[0].release()
        return blocks

    kept = in_threads(*[lambda number=number: work(number) for number in range(threads)])
    assert allocator.stats().active_allocations == 4 * threads
    for number, blocks in enumerate(kept):
        assert all(bytes(block) == bytes([number]) * block.nbytes for block in blocks[1:])
    allocator.check()
    del kept, blocks
    assert allocator.stats().active_allocations == 0
    allocator.check()


@pytest.mark.parametrize("heap", HEAPS)
@pytest.mark.parametrize("threads", [1, 4, 11])
@pytest.mark.parametrize("last", ["allocator", "blocks here", "blocks elsewhere", "array"])
@pytest.mark.sampled
def test_the_memory_goes_with_the_last_that_needs_it(heap, threads, last):
    source = Known()
    allocator = HEAPS[heap](source)

    def work():
        for _ in range(3):  # the third time from what the first left
            blocks = [allocator.alloc(1000) for _ in range(9)]
        return blocks

    shares = in_threads(*[work] * threads)
    blocks = [block for share in shares for block in share]
    del shares
    assert source.mapped() == len(source.addresses) > 0
    if last == "array":
        blocks = [block.array() for block in blocks]
    if last == "allocator":
        del blocks
        assert source.mapped()
        del allocator
    else:
        gone = weakref.ref(allocator)
        del allocator
        assert gone() is None
        halves = [blocks[::2], blocks[1::2]]
        del blocks
        halves[0][0][:10].view().fill(7) if last != "array" else halves[0][0].fill(7)
        if last == "blocks elsewhere":
            in_threads(halves[0].clear, halves[1][1:].clear)
            assert source.mapped()
            in_threads(halves[1].clear)
        else:
            del halves[0]
            assert source.mapped()
            del halves
    gc.collect()
    assert source.mapped() == 0


@pytest.mark.parametrize("heap", HEAPS)
def test_a_thread_that_only_drops_and_then_allocates(heap):
    source = Known()
    allocator = HEAPS[heap](source)
    (blocks,) = in_threads(lambda: [allocator.alloc(100) for _ in range(30)])
    came = threading.Event()

    def successor():
        allocator.alloc(100).release()
        came.set()

    def work():
        came.wait()
        blocks.clear()  # which ends them here: the thread that made them is gone
        return [allocator.alloc(100) for _ in range(40)]

    mine, _ = in_threads(work, successor)
    allocator.check()
    allocator = None
    assert source.mapped()
    mine[-1].fill(1)
    del mine
    assert source.mapped() == 0


@pytest.mark.parametrize("max_bytes", [None, 2 << 20])
def test_a_thread_keeps_its_cache_when_others_grow_unless_the_limit_is_near(max_bytes):
    pool = Pool(max_bytes=max_bytes)
    mine = pool.alloc(1 << 20)
    ask, answer = queue.Queue(), queue.Queue()

    def other():
        while ask.get():
            block = pool.alloc(1 << 20)
            address = block.address
            block.release()
            answer.put(address)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        ask.put(True)
        theirs = answer.get(timeout=60)
        before = pool.stats().reserved_bytes
        more = pool.alloc(1 << 20)
        if max_bytes:
            assert more.address == theirs and pool.stats().reserved_bytes == before
        else:
            assert more.address != theirs and pool.stats().reserved_bytes > before
            ask.put(True)
            assert answer.get(timeout=60) == theirs
    finally:
        ask.put(False)
        thread.join()
    del mine, more
    pool.check()


@pytest.mark.parametrize("heap", HEAPS)
def test_an_allocator_ends_while_threads_drop_its_blocks(heap):
    for _ in range(30):
        source = Known()
        allocator = HEAPS[heap](source)
        shares = [[allocator.alloc(100) for _ in range(40)] for _ in range(3)]
        shares += in_threads(*[lambda a=allocator: [a.alloc(100) for _ in range(40)]] * 3)
        holder = [allocator]
        del allocator
        in_threads(holder.clear, *[share.clear for share in shares])
        gc.collect()
        assert source.mapped() == 0


class Changing:
    """A source whose first region is of the system, and further ones of an object of a user's."""

    calls = 0

    def region(self, nbytes):
        self.calls += 1
        if self.calls == 1:
            return Host(prefault=False).region(nbytes)
        keep = ctypes.create_string_buffer(nbytes)
        keep.source = self
        return Region.from_address(ctypes.addressof(keep), nbytes, owner=keep)


def last_of(allocator, sizes):
    return [allocator.alloc(nbytes) for nbytes in sizes][-1]


GROWING = {
    "pool": lambda source: last_of(Pool(source=source), [1 << 20] * 3),
    "pool, many": lambda source: Pool(source=source).alloc_many([1 << 20] * 9)[-1],
    "slab": lambda source: last_of(Slab(64, 4, source=source, max_count=8), [64] * 5),
    "slab, many": lambda source: Slab(64, 4, source=source, max_count=8).alloc_many(5)[-1],
    "bump": lambda source: last_of(Bump(4096, source=source, max_bytes=1 << 20), [64, 8000]),
}


@pytest.mark.parametrize("growing", GROWING)
def test_the_collector_sees_what_brings_a_users_memory_in(growing):
    def make():
        source = Changing()
        source.content = GROWING[growing](source)
        assert source.calls >= 2
        return weakref.ref(source)

    gone = make()
    assert gone() is not None, "not a cycle"
    gc.collect()
    assert gone() is None


def test_the_collector_sees_blocks_from_before_the_memory_was_a_users():
    def make():
        source = Changing()
        pool = Pool(source=source)
        blocks = [pool.alloc(100) for _ in range(20)]  # for reuse, they and their memory
        blocks = [pool.alloc(1 << 20)]
        while source.calls == 1:
            blocks.append(pool.alloc(1 << 20))  # the last of them brings the user's memory in
        pool.alloc(100).release()
        blocks += [pool.alloc(1 << 20), pool.alloc(100)]
        source.content = blocks[-3:]
        del blocks, pool
        for _ in range(5):
            gc.collect()
        assert [len(block) for block in source.content] == [1 << 20, 1 << 20, 100]
        source.content[0].fill(3)
        return weakref.ref(source)

    for _ in range(5):
        gone = make()
        gc.collect()
        assert gone() is None


@pytest.mark.parametrize("heap", HEAPS)
@pytest.mark.sampled
def test_a_child_goes_on_without_the_other_threads(heap, run_script):
    make = "Slab(4096, 1024)" if heap == "slab" else "Pool()"
    run_script(f"""
import os, threading
from arenapy import Pool, Slab
heap = {make}
stop = threading.Event()
kept = []

def work():
    kept.append(heap.alloc(100))
    while not stop.is_set():
        blocks = [heap.alloc(100) for _ in range(50)]
        del blocks

threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
for thread in threads:
    thread.start()
while len(kept) < 3:
    pass
for _ in range(20):
    child = os.fork()
    if not child:
        heap.check()
        more = [heap.alloc(100) for _ in range(400)]
        del more
        later = threading.Thread(target=lambda: [heap.alloc(100) for _ in range(9)])
        later.start()
        later.join()
        kept.clear()
        heap = None
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
for thread in threads:
    thread.join()
heap.check()
""")


@pytest.mark.parametrize(
    ("make", "nbytes", "kept"),  # so many free blocks does a thread keep at most
    [
        (lambda: Slab(4096, 512, max_count=1 << 14), 4096, 128),
        (Pool, 4096, 64),
        (lambda: Pool(max_bytes=1 << 30), 1 << 20, 256),
    ],
    ids=["slab", "pool, small", "pool, large"],
)
def test_one_thread_allocates_what_another_drops(make, nbytes, kept):
    allocator = make()
    batch = 200
    waiting, done = queue.SimpleQueue(), queue.SimpleQueue()
    reserved = []

    def consumer():
        while waiting.get():
            done.put(True)

    def producer():
        for turn in range(40):
            blocks = [allocator.alloc(nbytes) for _ in range(batch)]
            for number, block in enumerate(blocks):
                poke(block.address, 8, number)
            assert all(bytes(block[:8]) == bytes([n]) * 8 for n, block in enumerate(blocks))
            waiting.put(blocks)
            del blocks, block  # the last references are in the queue
            done.get()
            if turn in (10, 39):  # not each time: stats() adds up what caches have counted
                reserved.append(allocator.stats().reserved_bytes)
        waiting.put(None)

    in_threads(producer, consumer)
    stats = allocator.stats()
    assert stats.total_allocations == 40 * batch
    assert stats.active_allocations == 0
    assert abs(stats.peak_bytes - batch * nbytes) <= 2 * kept * nbytes
    assert reserved[0] == reserved[1]
    allocator.check()
    allocator.trim()  # what is in all caches and depots, too
    allocator.check()
    assert isinstance(allocator, Slab) or allocator.stats().reserved_bytes == 0


LATE = r"""
#include <pthread.h>
#include <stddef.h>
#include <unistd.h>

static volatile int go;
/* Registered before arenapy's: it is called when arenapy has taken its locks. */
static void before(void) { go = 1; usleep(200000); }
void prepare(void) { pthread_atfork(before, NULL, NULL); }
/* Without the GIL: the first use of a pool by a second thread, amid a fork. */
void *late(void *(*alloc)(void *, size_t, size_t), void *pool) {
    while (!go) usleep(100);
    return alloc(pool, 100, 64);
}
"""


def test_a_fork_while_another_thread_waits_for_a_lock_of_this_one(run_script, tmp_path):
    """The lock is as that thread left it: as if it was about to be taken away."""
    source, library = tmp_path / "late.c", tmp_path / "late.so"
    source.write_text(LATE)
    subprocess.run(["cc", "-shared", "-fPIC", "-pthread", "-o", library, source], check=True)
    run_script(f"""
        import ctypes, os, signal, threading
        late = ctypes.CDLL({str(library)!r})
        late.prepare()

        import arenapy
        from arenapy.pool import c_api

        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        name = ctypes.pythonapi.PyCapsule_GetName
        name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
        capsule = c_api.__pyx_capi__["pool_alloc"]
        late.late.argtypes = [ctypes.c_void_p, ctypes.py_object]
        late.late.restype = ctypes.c_void_p

        pool = arenapy.Pool(max_bytes=1 << 20)
        pool.alloc(100).release()
        found = []
        alloc = pointer(capsule, name(capsule))
        thread = threading.Thread(target=lambda: found.append(late.late(alloc, pool)))
        thread.start()
        child = os.fork()
        if not child:
            signal.alarm(10)                 # which ends it, if it waits
            pool.alloc(100).release()
            pool.check()
            more = threading.Thread(target=lambda: pool.alloc(100).release())
            more.start()
            more.join()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        thread.join()
        assert found[0]
        pool.check()
    """)
