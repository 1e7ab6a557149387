"""`measure`: against a model that keeps the whole history, and in every way that blocks meet.

`Counting` is an allocator of nothing but figures; what holds for it is then asked of real ones.
"""

import contextlib
import copy
import gc
import mmap
import threading
import time
import types
import weakref
from pickle import dumps, loads

import pytest
from helpers import PAGE, Pages
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import arenapy
from arenapy import measurement
from arenapy.allocator.allocator import live_allocators
from arenapy.measurement import measure

MIB = 1 << 20


there = weakref.WeakSet()  # all of these


class Counting:
    """Counts blocks that are not there. `bursts` are what other threads do between two calls."""

    def __init__(self, bursts=()):
        there.add(self)
        self.lock = threading.Lock()
        self.count = self.total = self.live = self.most = 0
        self.bursts = list(bursts)

    def alloc(self, nbytes):
        with self.lock:
            self.count += 1
            self.total += nbytes
            self.live += nbytes
            self.most = max(self.most, self.live)
        return types.SimpleNamespace(release=lambda: self.free(nbytes))

    def free(self, nbytes):
        with self.lock:
            self.live -= nbytes

    def stats(self):
        return types.SimpleNamespace(peak_bytes=self.most)

    def _tally(self):
        with self.lock:
            return self.count, self.total, self.live

    def _exchange_peak(self, new):
        with self.lock:
            before, self.most = self.most, self.live if new is None else new
        if self.bursts:
            self.alloc(self.bursts.pop(0)).release()
        return before

    def __del__(self):
        measurement._note_end(self)


@pytest.fixture(autouse=True)
def counting_is_an_allocator(monkeypatch):
    """Nobody can derive a class from Allocator."""
    monkeypatch.setattr(measurement, "Allocator", (arenapy.Allocator, Counting))
    monkeypatch.setattr(measurement, "live_allocators", lambda: [*live_allocators(), *there])


def live_bytes_of_others(mine):
    """What allocators that earlier tests left behind add to a peak."""
    known = {id(one) for one in mine}
    return sum(one._tally()[2] for one in measurement.live_allocators() if id(one) not in known)


# ---- a model that knows the history ------------------------------------------------------------

SIZES = st.integers(1, 8).map(lambda lines: lines * 64)  # no allocator pads these


class Subject:
    """An allocator and all it ever did: (clock, bytes of the block or 0, live bytes then)."""

    def __init__(self, allocator, clock):
        self.allocator = allocator
        self.blocks = []
        self.live = 0
        self.history = [(clock, 0, 0)]
        self.ended = None

    def figures(self, since):
        """Allocations, bytes and peak from a moment on."""
        if self.ended is not None and self.ended < since:
            return 0, 0, 0
        at_first = [live for clock, _, live in self.history if clock <= since][-1:]
        later = [entry for entry in self.history if entry[0] > since]
        allocated = [nbytes for _, nbytes, _ in later if nbytes]
        return len(allocated), sum(allocated), max(at_first + [live for *_, live in later])


class Block:
    """A measurement, when it began, and the subjects it was given (None: all)."""

    def __init__(self, clock, chosen):
        self.clock = clock
        self.chosen = chosen
        self.others = 0  # bytes that no subject has
        self.measurement = measure(*(one.allocator for one in chosen or ()))

    def covers(self, subject):
        return self.chosen is None or subject in self.chosen


class MeasureMachine(RuleBasedStateMachine):
    """Blocks nest and overlap while allocators come, work and go."""

    make = Counting
    sizes = st.integers(1, 8).map(lambda lines: lines * 64)  # no allocator pads these

    def __init__(self):
        super().__init__()
        self.clock = 0
        self.subjects = []  # all that ever were
        self.running = []

    @property
    def alive(self):
        return [one for one in self.subjects if one.ended is None]

    def droppable(self):
        kept = [one for block in self.running for one in block.chosen or ()]
        return [one for one in self.alive if one not in kept]

    def tick(self):
        self.clock += 1
        return self.clock

    @precondition(lambda self: len(self.alive) < 4)
    @rule()
    def new_allocator(self):
        self.subjects.append(Subject(type(self).make(), self.tick()))
        if any(block.chosen is None for block in self.running):
            event("made in a block")

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def allocate(self, data):
        subject = data.draw(st.sampled_from(self.alive))
        nbytes = data.draw(self.sizes)
        subject.blocks.append((subject.allocator.alloc(nbytes), nbytes))
        subject.live += nbytes
        subject.history.append((self.tick(), nbytes, subject.live))

    @precondition(lambda self: any(one.blocks for one in self.alive))
    @rule(data=st.data(), count=st.integers(1, 3))
    def free(self, data, count):
        subject = data.draw(st.sampled_from([one for one in self.alive if one.blocks]))
        for _ in range(min(count, len(subject.blocks))):
            block, nbytes = subject.blocks.pop()
            block.release()
            subject.live -= nbytes
            subject.history.append((self.tick(), 0, subject.live))

    @precondition(lambda self: self.droppable())
    @rule(data=st.data())
    def drop(self, data):
        subject = data.draw(st.sampled_from(self.droppable()))
        subject.ended = self.tick()
        end = weakref.ref(subject.allocator)
        subject.allocator = None
        subject.blocks.clear()
        assert end() is None, "measuring kept an allocator alive"
        if any(block.clock > subject.history[0][0] for block in self.running):
            event("dropped in a block, made before it")

    @rule(data=st.data(), everything=st.booleans())
    def begin(self, data, everything):
        chosen = None
        if not everything and self.alive:
            chosen = data.draw(st.lists(st.sampled_from(self.alive), min_size=1, max_size=3))
        block = Block(self.tick(), chosen)
        gc.disable()  # what others have must not change between the two looks
        try:
            if chosen is None:
                block.others = live_bytes_of_others([one.allocator for one in self.alive])
            assert block.measurement.__enter__() is block.measurement
        finally:
            gc.enable()
        self.running.append(block)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), in_order=st.booleans())
    def end(self, data, in_order):
        block = self.running[-1] if in_order else data.draw(st.sampled_from(self.running))
        if block is not self.running[-1]:
            event("blocks overlap")
        self.running.remove(block)
        assert block.measurement.__exit__(None, None, None) is None
        self.compare(block)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def read(self, data):
        self.compare(data.draw(st.sampled_from(self.running)))

    def compare(self, block):
        figures = [one.figures(block.clock) for one in self.subjects if block.covers(one)]
        assert block.measurement.allocations == sum(one[0] for one in figures)
        assert block.measurement.bytes == sum(one[1] for one in figures)
        assert block.measurement.peak == sum(one[2] for one in figures) + block.others

    @invariant()
    def shows_the_newest_peak(self):
        """An allocator shows the peak of the newest block, and between blocks that of its life."""
        for one in self.alive:
            began = [block.clock for block in self.running if block.covers(one)]
            peak = (
                one.figures(max(began, default=0))[2]
                if began
                else max(live for *_, live in one.history)
            )
            assert one.allocator.stats().peak_bytes == peak

    def teardown(self):
        last = self.running[::-1]
        self.running.clear()
        for block in last:  # first of all: what still ran would disturb the next example
            block.measurement.__exit__(None, None, None)
        for block in last:
            self.compare(block)
        self.shows_the_newest_peak()


class BumpMachine(MeasureMachine):
    make = staticmethod(lambda: arenapy.Bump(MIB, source=Pages()))


class PoolMachine(MeasureMachine):
    make = staticmethod(lambda: arenapy.Pool(source=Pages()))


class SlabMachine(MeasureMachine):
    make = staticmethod(lambda: arenapy.Slab(64, 10_000, source=Pages()))
    sizes = st.just(64)


TestCounting = MeasureMachine.TestCase
TestBump = BumpMachine.TestCase
TestPool = PoolMachine.TestCase
TestSlab = SlabMachine.TestCase
# The logic is tried on Counting; these map memory.
fewer = settings(max_examples=max(settings().max_examples // 5, 1))
TestBump.settings = TestPool.settings = TestSlab.settings = fewer


# ---- single properties -------------------------------------------------------------------------


def test_figures_are_read_during_and_after():
    one, two = Counting(), Counting()
    first = one.alloc(100)
    with measure(one, two, one) as m:
        assert (m.allocations, m.bytes, m.peak) == (0, 0, 100), "what was live counts once"
        first.release()
        two.alloc(30)
        assert (m.allocations, m.bytes, m.peak) == (1, 30, 130)
        one.alloc(200).release()
    final = (m.allocations, m.bytes, m.peak, m.faults, m.seconds)
    assert final[:3] == (2, 230, 230)
    one.alloc(1000)
    assert (m.allocations, m.bytes, m.peak, m.faults, m.seconds) == final


def test_an_exception_passes_and_ends_all_blocks():
    one = Counting()
    one.alloc(500).release()
    with pytest.raises(ZeroDivisionError), measure(one) as outer, measure() as inner:
        one.alloc(40)
        raise ZeroDivisionError
    one.alloc(2)
    assert (outer.bytes, inner.bytes, outer.peak) == (40, 40, 40)
    assert one.stats().peak_bytes == 500


def test_a_generator_that_is_closed_ends_its_block():
    one = Counting()
    one.alloc(500).release()

    def work():
        with measure(one) as m:
            one.alloc(7)
            yield m

    generator = work()
    m = next(generator)
    assert one.stats().peak_bytes == 7
    generator.close()
    assert one.stats().peak_bytes == 500 and m.peak == 7


@pytest.mark.parametrize("bursts", [[9], [1, 9], [9, 1], [1, 2, 9], [5, 6, 7, 8, 9]])
def test_no_peak_is_lost_to_other_threads(bursts):
    """Each exchange of the peak is followed by a burst that is over before the next one."""
    one = Counting()
    with measure(one) as m:
        one.bursts = list(bursts)
        while one.bursts:
            assert m.peak in (0, *bursts)
        assert m.peak == max(bursts)
        one.bursts = list(bursts)  # and now while the block ends
    happened = [*bursts, *bursts[: len(bursts) - len(one.bursts)]]
    assert len(happened) > len(bursts)
    assert one.stats().peak_bytes == max(happened)


def test_an_allocator_that_comes_and_goes_is_counted():
    gc.collect()  # what others have must not change
    before = live_bytes_of_others([])
    with measure() as m:
        for nbytes in (100, 200):
            one = Counting()
            one.alloc(nbytes).release()
            del one
    assert (m.allocations, m.bytes, m.peak - before) == (2, 300, 300)


def test_blocks_in_threads_overlap():
    """Each thread knows what it allocated itself; together they know the whole."""
    one = Counting()
    barrier = threading.Barrier(4)
    sure = []

    def work(seed):
        barrier.wait()
        for step in range(200):
            with measure(one) as m:
                nbytes = 1 + (seed * 7919 + step * 104729) % 1000
                one.alloc(nbytes).release()
            sure.append(m.peak >= nbytes and m.bytes >= nbytes and m.allocations >= 1)

    with measure(one) as whole:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sure == [True] * 800
    assert (whole.allocations, whole.bytes) == (800, one.total)
    assert one.stats().peak_bytes == whole.peak >= 1000 - 5


def test_seconds_and_faults():
    fresh = mmap.mmap(-1, 64 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    fresh.madvise(mmap.MADV_NOHUGEPAGE)
    with measure() as m:
        before = m.faults
        for page in range(64):
            fresh[page * PAGE] = 1
        assert m.faults - before >= 64
        begun = time.perf_counter()
        while time.perf_counter() - begun < 0.01:
            pass
        assert m.seconds >= 0.01
    assert m.faults >= 64 and 0.01 <= m.seconds < 60


def test_warm_memory_has_no_faults():
    arena = arenapy.Bump(4 * MIB)
    least = 1000
    for _ in range(5):  # the interpreter has faults of its own, now and then
        with measure(arena) as m:
            arena.empty(2 * MIB, "u1")[:] = 1
        least = min(least, m.faults)
        arena.reset()
    assert least < 2 * MIB // PAGE // 50


def test_it_is_used_once():
    one = Counting()
    m = measure(one)
    with pytest.raises(RuntimeError, match=r"write `with arenapy\.measure\(\) as m:`"):
        _ = m.faults
    assert "not begun" in repr(m) and "not begun" in m._repr_html_()
    with m:
        one.alloc(1)
        with pytest.raises(RuntimeError, match="already begun; call measure"):
            m.__enter__()
        assert "running" in repr(m) and "running" in m._repr_html_()
    assert "1 allocations of 1 bytes" in repr(m) and "running" not in repr(m)
    assert "<td>bytes allocated</td><td>1 bytes</td>" in m._repr_html_()
    with pytest.raises(RuntimeError, match="already begun"), m:
        pass
    assert m.allocations == 1


def test_an_end_before_the_beginning():
    pool = arenapy.Pool()
    m = measure(pool)
    with pytest.raises(RuntimeError, match="nothing is measured yet"), contextlib.ExitStack() as s:
        s.push(m)  # and not enter_context()
    with m:
        pool.alloc(1000)
    assert m.allocations == 1


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda m: loads(dumps(m))])
@pytest.mark.parametrize("all_there_are", [False, True])
def test_a_copy_has_the_figures_so_far(copied, all_there_are):
    pool = arenapy.Pool()
    with pytest.raises(RuntimeError, match="nothing is measured yet"):
        copied(measure(pool))
    with measure(*[] if all_there_are else [pool]) as m:
        kept = [pool.alloc(1000)]
        copy = copied(m)
        assert copy.peak >= 1000 and "running" not in repr(copy)
        seen = copy.peak, copy.seconds, copy.allocations, copy.bytes, copy.faults
        kept.append(pool.alloc(1000))
    assert seen == (copy.peak, copy.seconds, copy.allocations, copy.bytes, copy.faults)
    assert repr(copied(m)) == repr(m)
    with pytest.raises(RuntimeError, match="already begun"), copy:
        pass


@pytest.mark.parametrize(
    "make", [arenapy.Pool, lambda: arenapy.Slab(4096, count=512)], ids=["pool", "slab"]
)
@pytest.mark.parametrize("all_there_are", [False, True])
def test_a_peak_that_is_reset_is_the_block_s(make, all_there_are):
    one = make()
    with measure(*[] if all_there_are else [one]) as m:
        with measure(one) as inner:
            del [one.alloc(4096) for _ in range(256)][:]
            one.reset_peak()
            one.alloc(4096)
        with measure(one) as late:
            one.alloc(4096)
    assert m.peak >= inner.peak == one.stats().peak_bytes == MIB
    assert late.peak == 4096
    one.reset_peak()
    assert one.stats().peak_bytes == 0


def test_a_measurement_that_is_kept_keeps_no_allocator():
    one = Counting()
    gone = weakref.ref(one)
    with measure(one) as m:
        one.alloc(5)
    del one
    assert gone() is None and m.bytes == 5


@pytest.mark.parametrize("wrong", [None, 5, b"pool", Counting, arenapy.PerThread(Counting)])
def test_something_else_is_refused(wrong):
    with pytest.raises(TypeError, match="is not an allocator; give a Bump"):
        measure(Counting(), wrong)


def test_an_allocator_that_fails_to_begin_leaves_the_others_alone():
    class Failing(Counting):
        def _tally(self):
            raise MemoryError("planned")

    one, failing = Counting(), Failing()
    one.alloc(100).release()
    with measure(one) as outer:
        one.alloc(10).release()
        with pytest.raises(MemoryError, match="planned"), measure(one, failing):
            raise AssertionError("it began")
        assert one.stats().peak_bytes == 10
    assert outer.peak == 10 and one.stats().peak_bytes == 100


def test_fork_while_another_thread_measures(run_script):
    run_script("""
        import os, signal, threading
        import arenapy
        from arenapy.measurement import measure
        arena = arenapy.Bump(1 << 16)
        stop = threading.Event()
        def busy():
            while not stop.is_set():
                with measure(arena) as m:
                    m.peak
        thread = threading.Thread(target=busy)
        thread.start()
        for _ in range(20):
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                mine = arenapy.Bump(1 << 16)
                with measure(mine) as m:
                    mine.alloc(64)
                os._exit(0 if (m.allocations, m.peak) == (1, 64) else 1)
            assert os.waitpid(child, 0)[1] == 0
        stop.set()
        thread.join()
    """)


def test_a_child_ends_what_other_threads_measured(run_script):
    run_script("""
        import os, threading
        import arenapy
        pool, begun, over = arenapy.Pool(), threading.Event(), threading.Event()
        pool.alloc(1 << 20)
        def other():
            global theirs
            with arenapy.measure(pool) as theirs:
                pool.alloc(1000)
                begun.set()
                over.wait()
        thread = threading.Thread(target=other)
        thread.start()
        begun.wait()
        with arenapy.measure(pool) as mine:
            child = os.fork()
            pool.alloc(100_000)
        if child == 0:
            assert pool.stats().peak_bytes >= 1 << 20
            assert theirs.allocations == mine.allocations == 1
            assert theirs.faults > 0 and mine.faults > 0
            os._exit(0)
        over.set()
        thread.join()
        assert os.waitpid(child, 0)[1] == 0
        assert theirs.allocations == 2 and mine.allocations == 1
        assert pool.stats().peak_bytes >= 1 << 20
    """)


def test_a_fork_does_not_wait_for_who_measures(run_script):
    """Who holds the lock may wait for one that a fork takes. The child has another lock."""
    run_script("""
        import os, signal, threading
        import arenapy
        from arenapy import measurement
        pool, held, over = arenapy.Pool(), threading.Event(), threading.Event()
        def busy():
            with measurement._lock:
                held.set()
                over.wait()
        thread = threading.Thread(target=busy)
        thread.start()
        held.wait()
        signal.alarm(20)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            with arenapy.measure():
                del pool
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        over.set()
        thread.join()
    """)


def test_no_python_code_runs_within_measure(run_script):
    """There a signal's handler could run, or another thread, and find the lock taken."""
    run_script("""
        import sys
        import arenapy
        from arenapy import measure
        pool, dropped, ran = arenapy.Pool(), [arenapy.Bump(4096)], []
        def trace(frame, event, argument):
            ran.append(frame.f_code)
        with measure(pool), measure() as m:
            sys.settrace(trace)
            m.peak, m.seconds, measure(pool)
            with measure(pool, *dropped):
                pool.reset_peak()
            dropped.clear()
            sys.settrace(None)
        assert ran == [], ran
    """)


def test_finalizers_of_others_do_not_run_within_measure(run_script):
    """One waits for a lock whose owner ends an allocator, which takes the lock of measure."""
    run_script("""
        import gc, signal, threading
        import arenapy
        lock, over, arenas = threading.RLock(), threading.Event(), {}
        class Session:
            def __init__(self):
                self.me = self
            def __del__(self):
                with lock:
                    pass
        def end_some():
            i = 0
            while not over.is_set():
                with lock:
                    arenas[i] = arenapy.Bump(4096)
                    arenas.pop(i - 20, None)
                i += 1
                over.wait(0.0001)
        kept = [arenapy.Bump(4096) for _ in range(100)]
        gc.set_threshold(100)
        signal.alarm(30)
        thread = threading.Thread(target=end_some)
        thread.start()
        for _ in range(500):
            Session()
            with arenapy.measure() as m:
                m.peak
        over.set()
        thread.join()
        assert gc.isenabled()
        gc.disable()
        with arenapy.measure() as m:
            m.peak
        assert not gc.isenabled()
    """)


@pytest.mark.parametrize("measured", ["each", "all"])
@pytest.mark.full
def test_collections_of_garbage_that_measure(measured, monkeypatch):
    """Blocks begin and end, and allocators are made, in the middle of what `measure` does."""
    unraisable = []
    monkeypatch.setattr("sys.unraisablehook", unraisable.append)
    running, kept, failed = [], [arenapy.Bump(PAGE)], []
    memory = bytearray(1 << 16)

    def measure_too(phase, info):
        if phase == "start" or len(kept) > 100:
            return
        gc.disable()  # a collection in this one would begin no other
        try:
            if len(running) < 4:
                one = measure() if measured == "all" or not kept else measure(*kept[-2:])
                running.append(one.__enter__())
            else:
                running.pop(0).__exit__(None, None, None)
            if len(kept) < 20:
                kept.append(arenapy.Bump(PAGE))
        except Exception as error:
            failed.append(error)
        finally:
            gc.enable()

    gc.callbacks.append(measure_too)
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        count = 0
        with measure() as outer:
            for i in range(100):
                one = arenapy.Bump(PAGE, arenapy.Existing(memory)) if i % 2 else kept[-1]
                one.alloc(8)
                with measure(one) as inner:
                    one.alloc(16)
                count += 2
                assert (inner.allocations, inner.bytes) == (1, 16)
                if i % 2 == 0:
                    one.reset()
                del one
    finally:
        gc.callbacks.remove(measure_too)
        gc.set_threshold(*before)
        for one in running:
            one.__exit__(None, None, None)
    assert not failed and not unraisable
    assert outer.allocations == count
    assert not measurement._running
