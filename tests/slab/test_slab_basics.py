"""What is the implementation's own in a Slab: batches, the bitmap, parts by address, packing."""

import gc
import itertools
import os
import random
import signal
import threading
import weakref
from functools import partial

import pytest
from children import another_process, in_child
from helpers import PAGE, in_threads, peek, poke
from hypothesis import given
from hypothesis import strategies as st
from sources import Adjacent, Regions

import arenapy

CALLS = 64  # items that leave a part for the stack at once; sizes around it are the edges


@given(
    item_size=st.integers(0, 300) | st.sampled_from([4096, 5000, 3 << 20]),
    align=st.none() | st.integers(0, 12).map(lambda n: 1 << n),
    count=st.sampled_from([1, 2, CALLS - 1, CALLS, CALLS + 1, 2 * CALLS + 1]),
    skew=st.sampled_from([0, 1, 64]),
)
def test_items_fill_the_stride_in_order_of_address(item_size, align, count, skew):
    slab = arenapy.Slab(item_size, count, Regions(skew), align)
    step = align or 64
    assert slab.stride == max(-(-item_size // step), 1) * step
    items = [slab.alloc() for _ in range(count)]
    addresses = [item.address for item in items]
    assert addresses[0] % step == 0
    assert addresses == [addresses[0] + i * slab.stride for i in range(count)]
    assert slab.count == slab.capacity == count
    with pytest.raises(arenapy.OutOfMemory):
        slab.alloc()
    slab.check()


@pytest.mark.parametrize("count", [1, CALLS - 1, CALLS, CALLS + 1, 1000])
def test_reuse_is_last_in_first_out_also_beyond_a_batch(count):
    slab = arenapy.Slab(8, count, align=8)
    items = slab.alloc_many(count)
    order = list(range(count))
    random.Random(count).shuffle(order)
    freed = []
    for i in order:
        freed.append(items[i].address)
        items[i].release()
    assert [slab.alloc_many(1)[0].address for _ in range(3)] == [freed[-1]] * 3
    again = [slab.alloc() for _ in range(count)]
    assert [item.address for item in again] == freed[::-1]
    slab.check()


@pytest.mark.parametrize("upwards", [True, False])
def test_many_parts_in_any_order_of_addresses(upwards):
    """A double release is told, and a trim frees just what has no live item, in any part."""
    slab = arenapy.Slab(100, 1, Adjacent(upwards=upwards), max_count=200)
    items = [slab.alloc() for _ in range(200)]
    assert len(slab.regions) == 9 and slab.capacity == 200
    slab.check()
    before = [(region.address, region.nbytes) for region in slab.regions]
    kept = [items[0], items[100]]  # of the first and the eighth region
    items.clear()
    slab.check()
    freed = slab.trim()
    assert freed == sum(nbytes for i, (_, nbytes) in enumerate(before) if i not in (0, 7))
    assert [region.address for region in slab.regions] == [before[0][0], before[7][0]]
    assert slab.capacity == 1 + 64 and slab.count == 2
    slab.check()
    assert all(not item.closed for item in kept)
    items = [slab.alloc() for _ in range(198)]
    slab.check()
    assert slab.capacity == 200
    kept.clear()
    items.clear()
    slab.trim()
    assert slab.capacity == 1 and len(slab.regions) == 1
    slab.check()


def test_trim_keeps_what_was_never_handed_out_in_the_first_region():
    source = Regions()
    slab = arenapy.Slab(64, 1000, source, max_count=3000)
    assert slab.trim() == 0 and slab.capacity == 1000
    items = slab.alloc_many(1001)
    assert source.calls == 2 and slab.capacity == 2000
    items.pop().release()
    assert slab.trim() > 0 and slab.capacity == 1000 and len(source.sizes) == 1
    slab.check()
    assert len(slab.alloc_many(0)) == 0


def test_items_that_do_not_fit_between_two_alignments_are_asked_for_with_room():
    for skew in (1, 8, 63):
        source = Regions(skew)
        slab = arenapy.Slab(64, 10, source)
        assert source.calls == 1 and slab.capacity == 10
        assert slab.alloc().address % 64 == 0
        assert 0 <= slab.stats().padding_bytes <= 63
    slab = arenapy.Slab(PAGE, 3, arenapy.Host(huge_pages=None), 2 << 20)
    assert all(item.address % (2 << 20) == 0 for item in slab.alloc_many(3))


def test_existing_memory_must_have_all_items():
    memory = bytearray(10 * 64 + 63)
    slab = arenapy.Slab(64, 10, arenapy.Existing(memory))
    assert len(slab.alloc_many(10)) == 10
    for view in (memoryview(bytearray(641))[1:], memoryview(bytearray(648))[8:]):
        with pytest.raises(ValueError, match=r"count=10 .* 64 bytes"):
            arenapy.Slab(64, 10, arenapy.Existing(view))
    with pytest.raises(arenapy.OutOfMemory, match="639"):
        arenapy.Slab(64, 10, arenapy.Existing(bytearray(639)))
    packed = arenapy.Slab(64, 10, arenapy.Existing(memoryview(bytearray(641))[1:]), align=1)
    assert len(packed.alloc_many(10)) == 10


def test_a_source_that_has_no_more_than_the_items():
    """It need not have the room to skip to an alignment, if its memory is aligned."""

    class Exact:
        def __init__(self):
            self.inner = Regions()

        def region(self, nbytes):
            if nbytes > 640:
                raise arenapy.OutOfMemory(f"{nbytes} bytes are more than 640")
            return self.inner.region(nbytes)

    assert arenapy.Slab(64, 10, Exact()).capacity == 10


def test_a_source_with_little_left_is_asked_for_fewer():
    class Little:
        def __init__(self):
            self.inner, self.asked = Regions(), []

        def region(self, nbytes):
            self.asked.append(nbytes)
            if len(self.asked) > 1 and nbytes > 5 * 64:
                raise arenapy.OutOfMemory(f"{nbytes} bytes are more than are left")
            return self.inner.region(nbytes)

    source = Little()
    slab = arenapy.Slab(64, 16, source, max_count=100)
    items = slab.alloc_many(17)
    assert slab.capacity == 20, "16 and 8 items were refused, and 4 were not"
    slab.check()
    before = slab.stats(), slab.regions
    source.asked += [0] * 10
    source.inner.failing = True
    with pytest.raises(arenapy.OutOfMemory, match="planned failure"):
        slab.alloc_many(4)
    assert (slab.stats(), slab.regions) == before and len(items) == 17
    source.inner.failing = False
    assert len(slab.alloc_many(70)) == 70, "by further regions"
    slab.check()


def test_alloc_many_that_fails_half_way_gives_new_regions_back():
    source = Regions(fail_on=range(4, 100))
    slab = arenapy.Slab(64, 4, source, max_count=1000)
    held = slab.alloc_many(2)
    before = slab.stats()
    with pytest.raises(arenapy.OutOfMemory, match="planned failure"):
        slab.alloc_many(100)
    assert slab.stats() == before and len(source.sizes) == 1 and len(held) == 2
    calls = source.calls
    with pytest.raises(arenapy.OutOfMemory, match="max_count=1000"):
        slab.alloc_many(999)
    assert source.calls == calls and slab.stats() == before
    slab.check()


class Within(Regions):
    """Whenever it is asked for a region, up to `depth` calls deep, it runs `act` first."""

    act = None
    deep = depth = 0

    def region(self, nbytes):
        if self.act and self.deep < self.depth:
            self.deep += 1
            try:
                self.act()
            finally:
                self.deep -= 1
        return super().region(nbytes)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_source_that_uses_the_slab_it_grows(depth, many):
    """As finalizers and signal handlers do: what grows within a growth counts to max_count."""
    source, items, refused = Within(), [], []

    def take():
        try:
            items.extend(slab.alloc_many(3) if many else [slab.alloc()])
        except arenapy.OutOfMemory as error:
            refused.append(str(error))

    slab = arenapy.Slab(64, 1, source, max_count=60)
    source.act, source.depth = take, depth
    while not refused:
        take()
        slab.check()
    assert len({item.address for item in items}) == len(items) == 60
    assert slab.capacity == 60 == slab.count
    assert all("it has reached its limit" in why for why in refused)
    source.act = None
    items.clear()
    slab.trim()
    slab.check()
    assert slab.capacity == 1 == len(slab.regions)
    assert len(slab.alloc_many(60)) == 60


def test_a_source_that_asks_the_slab_without_end():
    source = Within()
    slab = arenapy.Slab(64, 1, source, max_count=1 << 20)
    item = slab.alloc()
    source.act, source.depth = slab.alloc, 1 << 20
    with pytest.raises(RecursionError):
        slab.alloc()
    source.act = None
    assert slab.count == 1
    assert slab.alloc().address != item.address
    slab.check()


def test_finalizers_that_use_the_slab_that_grows():
    """Host's code makes garbage that the collector looks for: a __del__ runs in it."""
    slab = arenapy.Slab(64, 4, max_count=10_000)
    items, before, refused = [], gc.get_threshold(), []

    class Node:
        def __init__(self):
            self.me = self

        def __del__(self):
            try:
                items.append(slab.alloc())
            except arenapy.OutOfMemory as error:
                refused.append(error)

    gc.set_threshold(20, 1, 1)
    try:
        for _ in range(200):
            Node()
            items.append(slab.alloc())
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert not refused
    assert len({item.address for item in items}) == slab.count == 400
    slab.check()


@pytest.mark.full
def test_collections_within_a_growth_that_use_the_slab():
    """Wherever growth makes an object: as before 3.12, where the collector runs at once.

    A region has one item: the tuple of regions is soon too long for the interpreter's free lists.
    """

    class Small(Regions):
        def region(self, nbytes):
            if nbytes > 64:
                raise arenapy.OutOfMemory("too much")
            return super().region(nbytes)

    before = gc.get_threshold()
    refused = []

    def act(phase, info):
        try:
            if phase == "start" and slab is not None and len(items) < 500:
                items.append(slab.alloc())
        except arenapy.OutOfMemory as error:
            refused.append(error)

    slab = None
    gc.callbacks.append(act)
    try:
        for threshold in range(1, 30):
            items, source = [], Small()
            slab = arenapy.Slab(64, 1, source, max_count=2000)
            gc.set_threshold(threshold)
            for _ in range(60):
                items.append(slab.alloc())
            gc.set_threshold(0)
            slab.check()
            assert len({item.address for item in items}) == len(items) == slab.count
            assert len(source.sizes) == len(slab.regions)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(act)
    assert not refused


def test_threads_that_find_it_full_wait_for_the_one_that_grows():
    """None is refused as long as max_count is not reached, and nothing grows too far."""

    class Slow(Regions):
        def region(self, nbytes):
            if self.calls:
                threading.Event().wait(0.02)
            return super().region(nbytes)

    slab = arenapy.Slab(64, 1, Slow(), max_count=256)
    items = []

    def work():
        for _ in range(32):
            items.append(slab.alloc())

    in_threads(*[work] * 8)
    assert len({item.address for item in items}) == 256 == slab.capacity
    assert slab.source.calls == 9, "each time it was full, one thread asked the source"
    slab.check()


def test_an_item_that_another_process_lets_go_of_ends_the_wait():
    entered, served, kept = threading.Event(), threading.Event(), []

    class Slow(arenapy.Shared):
        def region(self, nbytes):
            if kept:
                entered.set()
                assert served.wait(60)
            return super().region(nbytes)

    slab = arenapy.Slab(4096, 2, Slow(), max_count=16)
    kept += slab.alloc_many(2)
    with another_process():
        kept.pop().release()
        assert slab.stats().pending_bytes == 4096
        thread = threading.Thread(target=lambda: kept.append(slab.alloc()))
        thread.start()
        entered.wait()
        waiting = threading.Thread(target=lambda: (kept.append(slab.alloc()), served.set()))
        waiting.start()
        assert not served.wait(0.1)
    in_time = served.wait(5)
    served.set()
    waiting.join()
    thread.join()
    assert in_time and len(kept) == slab.count == 3
    slab.check()


@pytest.mark.full
def test_a_thread_that_the_growing_one_waits_for_is_refused():
    entered, lock = threading.Event(), threading.RLock()

    class Locked(Regions):
        def region(self, nbytes):
            if self.calls:
                entered.set()
            with lock:
                return super().region(nbytes)

    slab = arenapy.Slab(64, 1, Locked(), max_count=16)
    items = [slab.alloc()]
    with lock:
        thread = threading.Thread(target=lambda: items.append(slab.alloc()))
        thread.start()
        entered.wait()
        with pytest.raises(arenapy.OutOfMemory, match="may wait for this one in its source"):
            slab.alloc()
    thread.join()
    items.append(slab.alloc())
    assert len(items) == slab.count == 3
    slab.check()


def test_a_signal_ends_the_wait_for_a_thread_that_grows():
    entered, struck = threading.Event(), threading.Event()

    class Slow(Regions):
        def region(self, nbytes):
            if self.calls:
                entered.set()
                assert struck.wait(60)
            return super().region(nbytes)

    def strike(*_):
        struck.set()
        raise KeyError("struck")

    slab = arenapy.Slab(64, 1, Slow(), max_count=16)
    items = [slab.alloc()]
    thread = threading.Thread(target=lambda: items.append(slab.alloc()))
    before = signal.signal(signal.SIGUSR1, strike)
    try:
        thread.start()
        entered.wait()
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(KeyError, match="struck"):
            slab.alloc()
    finally:
        struck.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert len(items) == slab.count == 2
    slab.check()


def test_threads_that_pass_items_on():
    slab = arenapy.Slab(64, 16, max_count=1 << 14)  # enough if one thread takes no turns
    shared = [[] for _ in range(4)]

    def work(me):
        draw = random.Random(me)
        for number in range(3000):
            item = slab.alloc()
            poke(item.address, 8, me * 50 + number % 50)
            shared[draw.randrange(4)].append((item, me * 50 + number % 50))
            mine = shared[me]
            while len(mine) > draw.randrange(100):
                item, fill = mine.pop()
                assert peek(item.address, 8) == bytes([fill]) * 8
                del item

    in_threads(*(partial(work, i) for i in range(4)))
    slab.check()
    stats = slab.stats()
    assert stats.active_allocations == sum(map(len, shared))
    assert stats.total_allocations == 12_000
    shared.clear()
    assert slab.count == 0
    slab.check()


def test_a_peak_is_remembered_through_refills_and_spills():
    slab = arenapy.Slab(64, 1000)
    for live in (1000, 300):
        blocks = [slab.alloc() for _ in range(live)]
        blocks.clear()
        assert slab.stats().peak_bytes == 64 * live
        slab.reset_peak()


def test_the_peak_can_be_exchanged():
    slab = arenapy.Slab(100, 100)
    assert slab._tally() == (0, 0, 0) and slab._exchange_peak(None) == 0
    items = slab.alloc_many(70)
    del items[10:]
    assert slab._tally() == (70, 70 * 128, 10 * 128)
    assert slab._exchange_peak(None) == 70 * 128 and slab.stats().peak_bytes == 10 * 128
    assert slab._exchange_peak(40 * 128) == 10 * 128 and slab.stats().peak_bytes == 40 * 128
    items += slab.alloc_many(31)
    assert slab._exchange_peak(0) == 41 * 128 == slab.stats().peak_bytes
    slab.check()


def test_debug_fills_what_is_given_back():
    slab = arenapy.Slab(100, 3, debug=True)
    item = slab.alloc()
    item.fill(7)
    address = item.address
    item.release()
    assert peek(address, 100) == bytes([0xDB]) * 100
    assert slab.alloc().address == address


def test_ages_are_of_64_neighbours():
    slab = arenapy.Slab(64, 2 * CALLS)
    items = slab.alloc_many(2 * CALLS)
    ages = [info.age for info in slab.blocks()]
    assert ages == [CALLS] * CALLS + [0] * CALLS
    items[0].release()
    assert [age for age, _ in itertools.groupby(info.age for info in slab.blocks())] == [0, 1]


def test_the_slab_is_gone_with_its_last_item_but_its_memory_not_before():
    source = Regions()
    slab = arenapy.Slab(64, 4, source, max_count=8)
    items = slab.alloc_many(8)
    gone = weakref.ref(slab)
    del slab
    assert gone() is None and len(source.sizes) == 2
    poke(items[-1].address, 64, 1)
    items.clear()
    assert not source.sizes


@pytest.mark.parametrize("fork", ["inherit", "skip"])
def test_a_forked_child(fork):
    slab = arenapy.Slab(64, 4, arenapy.Host(fork=fork), max_count=64)
    items = slab.alloc_many(3)

    def use():
        if fork == "inherit":
            items.extend(slab.alloc_many(20))
            slab.check()
            return slab.count == 23
        with pytest.raises(ValueError, match="fork"):
            slab.alloc()
        items.clear()
        return True

    assert in_child(use) == 0
    assert slab.count == 3
    slab.check()


BAD = [
    (lambda: arenapy.Slab(-1, 4), ValueError, "item_size=-1"),
    (lambda: arenapy.Slab("8", 4), TypeError, "item_size='8'"),
    (lambda: arenapy.Slab(8, 0), ValueError, "count=0"),
    (lambda: arenapy.Slab(8, 2**31 + 1), ValueError, "count=2147483649"),
    (lambda: arenapy.Slab(8, 1.5), TypeError, "count=1.5"),
    (lambda: arenapy.Slab(8, 4, max_count=3), ValueError, "max_count=3"),
    (lambda: arenapy.Slab(8, 4, max_count=2**40), ValueError, f"max_count={2**40}"),
    (lambda: arenapy.Slab(8, 4, align=3), ValueError, "align=3"),
    (lambda: arenapy.Slab(8, 4, align=4 << 20), ValueError, "align="),
    (lambda: arenapy.Slab(1 << 62, 4), ValueError, str(1 << 62)),
    (lambda: arenapy.Slab((1 << 63) - 1, 1), ValueError, str((1 << 63) - 1)),
    (lambda: arenapy.Slab(1 << 34, 1, max_count=2**31), ValueError, str(1 << 34)),
    (lambda: arenapy.Slab(8, 4, stream=1), ValueError, "stream=1"),
    (lambda: arenapy.Slab(8, 4).alloc(9), ValueError, "nbytes=9"),
    (lambda: arenapy.Slab(8, 4).alloc(8, 128), ValueError, "align=128.* aligned to 64"),
    (lambda: arenapy.Slab(8, 4, align=8).empty(1), ValueError, "align=64.* aligned to 8"),
    (lambda: arenapy.Slab(8, 4).alloc(stream=1), ValueError, "stream=1"),
    (lambda: arenapy.Slab(8, 4).alloc_many(-1), ValueError, "-1"),
    (lambda: arenapy.Slab(8, 4).alloc_many([8, 9]), ValueError, "nbytes=9"),
    (lambda: arenapy.Slab(8, 4).alloc_many(2**62), arenapy.OutOfMemory, str(2**62)),
    (lambda: arenapy.Slab(8, 4).alloc_many(None), TypeError, "None"),
]


@pytest.mark.parametrize(("call", "kind", "named"), BAD)
def test_bad_input_is_named(call, kind, named):
    with pytest.raises(kind, match=named):
        call()
