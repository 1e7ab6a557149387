"""A Pool and its regions: when it asks for one, and when it gives one back to have another."""

import threading
import time

import pytest
from helpers import GIL, PAGE, in_threads
from hypothesis import given
from hypothesis import strategies as st
from sources import Regions

from arenapy import Existing, File, OutOfMemory, Pool, measure

MIB = 1 << 20


class InBetween(Regions):
    """Lets somebody else do something while the first region is being made."""

    between = None

    def region(self, nbytes):
        region = super().region(nbytes)
        if self.between is not None:
            between, self.between = self.between, None
            thread = threading.Thread(target=between)
            thread.start()
            thread.join()
        return region


@pytest.mark.parametrize("skew", [1, 64, PAGE - 1])
def test_another_thread_learns_first_that_they_need_a_page_more(skew):
    """This one's region was asked for without it: it has to ask again."""
    source, theirs = InBetween(skew=skew), []
    pool = Pool(64 * MIB, source)
    source.between = lambda: theirs.append(pool.alloc(4 * MIB))
    mine = pool.alloc(4 * MIB)
    assert mine.nbytes == theirs[0].nbytes == 4 * MIB
    mine.fill(1)
    theirs[0].fill(2)
    assert set(bytes(mine)) == {1}
    pool.check()
    calls = source.calls
    other = pool.alloc(4 * MIB)
    assert source.calls == calls + 1, "by now they are all asked for with it"
    del other


class Slow(Regions):
    """The first region comes when the test says so."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.asked, self.go = threading.Event(), threading.Event()

    def region(self, nbytes):
        self.asked.set()
        assert self.go.wait(60)
        return super().region(nbytes)


@pytest.mark.parametrize("take", [lambda pool: pool.alloc(1000), lambda pool: pool.alloc_many([9])])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.full
def test_who_finds_no_room_waits_for_another_thread_that_takes_it_all(take, fails):
    """What that one gets is for both."""
    source = Slow()
    pool, got = Pool(2 * MIB, source), []

    def other():
        try:
            got.append(take(pool))
        except OutOfMemory as error:
            got.append(error)

    first = threading.Thread(target=other)
    first.start()
    assert source.asked.wait(60)
    second = threading.Thread(target=other)
    second.start()
    second.join(0.2)
    assert second.is_alive(), got
    source.failing = fails
    source.go.set()
    first.join()
    second.join()
    assert [isinstance(one, OutOfMemory) for one in got] == [fails, fails]
    pool.check()


def test_a_source_that_allocates_from_the_pool_itself_does_not_wait_for_itself():
    class Again(Regions):
        def region(self, nbytes):
            with pytest.raises(OutOfMemory):
                pool.alloc(1000)
            return super().region(nbytes)

    pool = Pool(2 * MIB, Again())
    start = time.monotonic()
    pool.alloc(1000)
    assert time.monotonic() - start < 5


@pytest.mark.no_sanitizer
@pytest.mark.parametrize("room", [24, 64, 300])
@pytest.mark.full
def test_a_pool_under_a_limit_on_addresses(run_script, room):
    """Its bookkeeping, reserved for the machine's memory, leaves most of the room for blocks."""
    out = run_script(f"""
        import resource
        from pathlib import Path
        import arenapy
        arenapy.Pool(1 << 20).alloc(100)  # import all there is to import
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + ({room} << 20), before[1]))
        pool, blocks = arenapy.Pool(), []
        try:
            while True:
                blocks.append(pool.alloc(4096))
                blocks.append(pool.alloc(10_000))
        except arenapy.OutOfMemory as error:
            print(error)
        resource.setrlimit(resource.RLIMIT_AS, before)
        pool.check()
        print(pool.stats().allocated_bytes >> 20)
    """)
    *error, mib = out.splitlines()
    assert int(mib) >= room * 3 // 4
    assert "ulimit -v" in "".join(error)


@pytest.mark.no_sanitizer
def test_no_address_space_for_a_pool(run_script):
    out = run_script("""
        import resource
        from pathlib import Path
        import arenapy
        arenapy.Pool(1 << 20).alloc(100)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used, used))
        try:
            held = []
            while True:
                held.append(arenapy.Pool())  # what was freed before is used up first
        except MemoryError as error:
            print(type(error).__name__, error)
    """)
    assert out.startswith("MemoryError no address space for the bookkeeping of a pool")
    assert "`ulimit -v`" in out


class Budget(Regions):
    """Has so many bytes for all regions that are there."""

    def __init__(self, most):
        super().__init__()
        self.most, self.large = most, 0

    def region(self, nbytes):
        self.large += nbytes > 64 * MIB
        if sum(self.sizes.values()) + nbytes > self.most:
            raise OutOfMemory(f"{nbytes} bytes are more than this source has left")
        return super().region(nbytes)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12 * 16)), max_size=20))
def test_what_a_pool_refuses_it_refuses_after_a_trim(steps):
    """Its source is asked again when all that is idle was given back."""
    pool, blocks = Pool(source=Budget(16 * MIB)), []
    for drops, n in steps:
        if drops and blocks:
            blocks.pop(n % len(blocks)).release()
            continue
        try:
            blocks.append(pool.alloc(n * MIB // 16))
        except OutOfMemory:
            pool.trim()
            with pytest.raises(OutOfMemory):
                pool.alloc(n * MIB // 16)
    pool.check()


ONLY = {
    "memory": lambda path: Existing(bytearray(17 * MIB)),
    "file": lambda path: File(path, "r+"),
    "new file": lambda path: File(path, "w+"),
}
REQUESTS = {
    "one": lambda pool: pool.alloc(10 * MIB),
    "many": lambda pool: pool.alloc_many([MIB] * 10),
    "prewarm": lambda pool: pool.prewarm({MIB: 10}),
}


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("only", ONLY)
def test_a_source_of_one_region_gives_all_of_it_again_after_a_trim(tmp_path, only, request_, live):
    path = tmp_path / "file"
    path.write_bytes(bytes(16 * MIB))
    pool = Pool(16 * MIB, ONLY[only](path))
    for _ in range(3):
        small = pool.alloc(1000) if live else None
        REQUESTS[request_](pool)
        del small
        pool.trim()
        assert pool.stats().reserved_bytes == 0


@pytest.mark.skipif(not GIL, reason="a region ends when the thread that made it runs again")
@pytest.mark.parametrize("only", ONLY)
@pytest.mark.parametrize("trims", ["by hand", "after a time"])
def test_threads_do_not_find_the_only_region_of_another_thread_in_their_way(tmp_path, only, trims):
    """One thread gives it back while others ask for it."""
    path = tmp_path / "file"
    path.write_bytes(bytes(16 * MIB))
    pool = Pool(16 * MIB, ONLY[only](path), trim_after=0.0 if trims == "after a time" else None)
    end = time.monotonic() + 0.5

    def work():
        while time.monotonic() < end:
            pool.alloc(100_000).release()
            if trims == "by hand":
                pool.trim()

    in_threads(*[work] * 4)
    pool.check()


@pytest.mark.parametrize("threads", [0, 4])
def test_a_refused_request_asks_the_source_a_few_times(threads):
    """However much memory others let go of meanwhile."""
    source, go_on = Budget(64 * MIB), [True]
    pool = Pool(source=source)

    def work():
        while go_on:
            pool.alloc(3 * MIB).release()

    def ask():
        before, asked = source.calls, []
        try:
            for _ in range(20):
                with pytest.raises(OutOfMemory):
                    pool.alloc(100 * MIB)
                asked.append(source.large)
                source.large = 0
        finally:
            go_on.clear()
        assert max(asked) <= 5, (asked, source.calls - before)

    in_threads(ask, *[work] * threads)


def test_a_source_that_refuses_its_only_region_is_asked_once():
    calls = []

    class Once(Existing):
        def region(self, nbytes):
            calls.append(nbytes)
            if len(calls) > 1:
                raise OutOfMemory("another process has it")
            return super().region(nbytes)

    pool = Pool(source=Once(bytearray(MIB)))
    pool.trim()
    with pytest.raises(OutOfMemory, match="another process has it"):
        pool.alloc(1000)
    assert len(calls) == 2
    pool.check()


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("source", ["Host()", "Host(grow=True)", "Shared(grow=True)"])
def test_a_hopeless_request_takes_no_memory(run_script, source, used):
    run_script(f"""
        import resource
        from arenapy import Host, OutOfMemory, Pool, Shared
        pool = Pool(source={source})
        if {used}:
            pool.alloc(100)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        addresses = [region.nbytes for region in pool.regions]
        for size in (1 << 40, 3 << 40):
            try:
                pool.alloc(size)
            except OutOfMemory:
                pass
            else:
                raise AssertionError(size)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000, "KiB"
        assert [region.nbytes for region in pool.regions] == addresses
    """)


BATCHES = {
    "refused": lambda pool, n: pool.alloc_many([MIB] * n + [90 * MIB]),
    "prewarm": lambda pool, n: pool.prewarm({MIB: n}),
}


@pytest.mark.parametrize("before", [0, 3 * MIB, 20 * MIB])
@pytest.mark.parametrize("n", [0, 3, 30])
@pytest.mark.parametrize("batch", BATCHES)
def test_a_batch_that_is_undone_keeps_the_peak_of_others(batch, n, before):
    """They allocate while it waits for memory."""
    source, others = InBetween(), 0
    pool = Pool(64 * MIB, source)
    kept = pool.alloc(MIB // 2)
    if before:
        pool.alloc(before).release()
    pool.trim()
    source.between = lambda: pool.alloc(4 * MIB).release()
    with measure(pool) as measured:
        try:
            BATCHES[batch](pool, n)
        except OutOfMemory:
            assert batch == "refused"
        if source.between is None:  # it came between
            others = 1
    assert others or not n
    assert pool.stats().peak_bytes == max(4 * MIB * others, before) + kept.nbytes
    assert (measured.allocations, measured.peak) == (others, 4 * MIB * others + kept.nbytes)
