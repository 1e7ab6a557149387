"""`numpy_memory` and threads: which ones it reaches, and what it says of the others."""

import asyncio
import contextlib
import contextvars
import copy
import gc
import inspect
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
from helpers import GIL
from numpy._core.multiarray import get_handler_name
from numpy_arrays import empty, same, three_pools, where

from arenapy import Pool, handles, numpy_memory

Thread = threading.Thread
#: Free-threaded builds from 3.14 on start a thread in a copy of the context.
INHERITS = getattr(sys.flags, "thread_inherit_context", 0)


@pytest.fixture
def pools():
    with three_pools() as made:
        yield made


def unreached(memory, strangers):
    """The threads of this test that it does not reach; other tests may have left some behind."""
    return [name for name in memory.unreached() if name not in strangers]


@pytest.fixture
def strangers():
    """The threads of other tests and of pytest itself: nobody has the handler of this pool."""
    return {*numpy_memory(Pool()).unreached()} - {"MainThread"}


def in_thread(function, *args):
    """What `function` gives in a thread; an exception there is raised here."""
    box = []

    def run():
        try:
            box.append((True, function(*args)))
        except BaseException as error:
            box.append((False, error))

    thread = Thread(target=run)
    thread.start()
    thread.join()
    ((good, value),) = box
    if not good:
        raise value
    return value


class Waiting(Thread):
    """A thread that waits until `let_go`."""

    def __init__(self, name):
        super().__init__(name=name, daemon=True)
        self.ready, self.go = threading.Event(), threading.Event()

    def run(self):
        self.ready.set()
        self.go.wait()

    def __enter__(self):
        self.start()
        self.ready.wait()
        return self

    def __exit__(self, *_):
        self.go.set()
        self.join()


def test_a_thread_begins_with_numpys_own(pools):
    with numpy_memory(pools[0]):
        assert in_thread(where, pools) == (0 if INHERITS else None)
        with ThreadPoolExecutor(1) as executor:
            assert executor.submit(where, pools).result() == (0 if INHERITS else None)


def test_threads_of_a_context(pools):
    with numpy_memory(pools[0], threads=True):
        assert in_thread(where, pools) == 0
        with ThreadPoolExecutor(3) as executor:
            assert set(executor.map(lambda _: where(pools), range(20))) == {0}
        assert in_thread(in_thread, where, pools) == 0, "a thread's thread"
    assert in_thread(where, pools) is None


def test_threads_of_nested_contexts(pools):
    with numpy_memory(pools[0], threads=True):
        with numpy_memory(pools[1], threads=True):
            assert in_thread(where, pools) == 1
        assert in_thread(where, pools) == 0
        with numpy_memory(pools[1]):  # this one says nothing about threads
            assert in_thread(where, pools) in (0, 1)
            assert where(pools) == 1


def test_threads_of_what_is_installed(pools):
    memory = numpy_memory(pools[0], threads=True).install()
    try:
        assert in_thread(where, pools) == 0
        assert in_thread(in_thread, where, pools) == 0
        with numpy_memory(pools[1], threads=True):
            assert in_thread(where, pools) == 1
        assert asyncio.run(asyncio.to_thread(where, pools)) == 0
    finally:
        memory.uninstall()
    assert in_thread(where, pools) is None


def test_install_reaches_threads_that_other_threads_start(pools, strangers):
    """Those that ran before have no handler, but what they start now has."""
    begun, go, seen = threading.Event(), threading.Event(), []

    def early():
        begun.set()
        go.wait()
        seen.extend([where(pools), in_thread(where, pools)])

    thread = Thread(target=early, name="early")
    thread.start()
    begun.wait()
    memory = numpy_memory(pools[0], threads=True).install()
    try:
        assert unreached(memory, strangers) == ["early"]
        go.set()
        thread.join()
    finally:
        memory.uninstall()
    assert seen == [None, 0]


def test_a_context_does_not_reach_threads_that_others_start(pools):
    """It is this context's own."""
    begun, go, seen = threading.Event(), threading.Event(), []

    def early():
        begun.set()
        go.wait()
        seen.append(in_thread(where, pools))

    thread = Thread(target=early)
    thread.start()
    begun.wait()
    with numpy_memory(pools[0], threads=True):
        go.set()
        thread.join()
    assert seen == [None]


def test_subclasses_timers_and_their_results(pools):
    seen = []

    class Mine(Thread):
        def run(self):
            seen.append(where(pools))

    with numpy_memory(pools[0], threads=True):
        for thread in (Mine(), threading.Timer(0, lambda: seen.append(where(pools)))):
            thread.start()
            thread.join()
    assert seen == [0, 0]


def test_a_threads_exception_is_reported_as_ever(pools, monkeypatch):
    reports = []
    monkeypatch.setattr(threading, "excepthook", lambda args: reports.append(args.exc_value))
    raised = ValueError("planned")

    def run():
        raise raised

    with numpy_memory(pools[0], threads=True):
        thread = Thread(target=run)
        thread.start()
        thread.join()
        assert reports == [raised] and where(pools) == 0


def test_start_says_what_it_always_said(pools):
    with numpy_memory(pools[0], threads=True):
        thread = Thread(target=int)
        with pytest.raises(RuntimeError):
            thread.join()
        thread.start()
        with pytest.raises(RuntimeError, match="once"):
            thread.start()
        thread.join()
        with pytest.raises(RuntimeError, match="once"):
            thread.start()
        assert Thread.start.__name__ == "start"
    assert "run" not in vars(thread)


def test_a_threads_own_run_stays_when_it_cannot_start(pools, monkeypatch):
    ran = []
    thread = Thread()
    thread.run = lambda: ran.append(1)
    with numpy_memory(pools[0], threads=True), monkeypatch.context() as patch:
        name = "_start_joinable_thread" if sys.version_info >= (3, 13) else "_start_new_thread"
        patch.setattr(threading, name, lambda *args, **more: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            thread.start()
    thread.start()
    thread.join()
    assert ran == [1]


def test_a_threads_own_run_is_covered(pools):
    seen = []
    thread = Thread()
    thread.run = own = lambda: seen.append(where(pools))
    with numpy_memory(pools[0], threads=True):
        thread.start()
    thread.join()
    assert seen == [0] and thread.run is own


def test_a_thread_that_runs_has_its_own_fields(pools):
    """A program may copy it, to start another one like it, or save what it has."""
    seen = []

    class Step(Thread):
        number = 0

        def run(self):
            seen.append((self.number, where(pools), "run" in vars(self)))
            if self.number < 2 and len(seen) < 5:
                after = copy.copy(self)
                Thread.__init__(after)
                after.number += 1
                after.start()
                after.join()

    with numpy_memory(pools[0], threads=True):
        in_thread(lambda: None)
        thread = Step()
        thread.start()
        thread.join()
    assert seen == [(0, 0, False), (1, 0, False), (2, 0, False)]


def wrap_run(patch):
    """Wrap `start` as Sentry does: a thread's `run` becomes a function that takes the thread."""
    original = Thread.start

    def start(self):
        run = getattr(self.run, "__func__", self.run)
        self.run = lambda *_: run(threading.current_thread())
        original(self)

    patch.setattr(Thread, "start", start)


@pytest.mark.parametrize("first", [True, False])
def test_another_wrapper_of_run(pools, monkeypatch, first):
    memory = numpy_memory(pools[0], threads=True)
    with contextlib.ExitStack() as until:
        if first:
            wrap_run(until.enter_context(monkeypatch.context()))
        until.enter_context(memory)
        if not first:
            wrap_run(until.enter_context(monkeypatch.context()))
        assert in_thread(where, pools) == 0
        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(where, [pools] * 4)) == [0] * 4


class Refusing(Thread):
    def __setattr__(self, name, value):
        if name == "run":
            raise RuntimeError("set nothing")
        super().__setattr__(name, value)


class Hiding(Thread):
    def __getattribute__(self, name):
        if name == "__dict__":
            raise ValueError("hidden")
        return super().__getattribute__(name)


@pytest.mark.parametrize("kind", [Refusing, Hiding])
def test_a_thread_that_refuses_runs_without(pools, kind):
    seen = []
    with numpy_memory(pools[0], threads=True):
        thread = kind(target=lambda: seen.append(where(pools)))
        Thread.start(self=thread)
        thread.join()
    assert seen == [None]


def test_a_thread_whose_run_cannot_be_set_runs_without(pools):
    ran = []

    class Fixed(threading.Thread):
        @property
        def run(self):
            return lambda: ran.append(get_handler_name())

    with numpy_memory(pools[0], threads=True):
        thread = Fixed()
        thread.start()
        thread.join()
    assert ran == ["default_allocator"]


def test_threads_and_what_they_ran_are_freed(pools):
    class Thing:
        pass

    gc.disable()
    try:
        with numpy_memory(pools[0], threads=True):
            thing = Thing()
            gone = weakref.ref(thing)
            thread = Thread(target=lambda thing=thing: None)
            thread.start()
            thread.join()
            ended = weakref.ref(thread)
            del thing, thread
            assert gone() is None and ended() is None
    finally:
        gc.enable()


def test_a_thread_outlives_the_context_that_started_it(pools):
    begun, go, seen = threading.Event(), threading.Event(), []

    def work():
        seen.append(where(pools))
        begun.set()
        go.wait()
        seen.append(where(pools))
        seen.append(empty(1000, 5))

    with numpy_memory(pools[0], threads=True):
        thread = Thread(target=work)
        thread.start()
        begun.wait()
    assert where(pools) is None
    go.set()
    thread.join()
    array = seen.pop()
    assert seen == [0, 0] and same(array, empty(1000, 5))
    assert handles(array).allocator is pools[0]


def test_another_wrapper_of_start_survives(pools):
    calls, original = [], Thread.start
    memory = numpy_memory(pools[0], threads=True)
    memory.install()
    ours = Thread.start

    def theirs(self):
        calls.append(self)
        ours(self)

    Thread.start = theirs
    try:
        assert in_thread(where, pools) == 0 and len(calls) == 1
        memory.uninstall()
        assert Thread.start is theirs, "not ours to take away"
        assert in_thread(where, pools) is None and len(calls) == 2
        with memory:
            assert in_thread(where, pools) == 0
        assert Thread.start is theirs
        assert in_thread(where, pools) is None and len(calls) == 4
    finally:
        Thread.start = original


def test_another_wrapper_of_start_that_is_taken_away_late(pools):
    """So ours comes back when nobody wants it. It is used again, and is the only one."""
    original, memory = Thread.start, numpy_memory(pools[0], threads=True)
    for _ in range(3):
        with memory:
            ours = Thread.start
            Thread.start = lambda self, ours=ours: ours(self)
        Thread.start = ours
        assert ours.__wrapped__ is original
        assert in_thread(where, pools) is None
    with memory:
        assert in_thread(where, pools) == 0
    assert Thread.start is original


def test_start_is_a_function(pools):
    """A mock that is made after it is a method. One that is made after another callable is not."""
    thread = Thread(target=print)
    with numpy_memory(pools[0], threads=True):
        assert inspect.isfunction(Thread.start)
        assert inspect.signature(Thread.start) == inspect.signature(Thread.start.__wrapped__)
        with mock.patch("threading.Thread.start", autospec=True) as start:
            thread.start()
        start.assert_called_once_with(thread)


def test_start_is_ours_only_while_it_is_wanted(pools):
    start = Thread.start
    with numpy_memory(pools[0]):
        assert Thread.start is start
    memory, other = (numpy_memory(pool, threads=True) for pool in pools[:2])
    with memory:
        assert Thread.start is not start
        other.install()
    assert Thread.start is not start
    with contextlib.suppress(ZeroDivisionError), memory:
        raise ZeroDivisionError
    assert in_thread(where, pools) == 1
    other.uninstall()
    assert Thread.start is start


def test_many_threads_enter_and_leave(pools):
    """One object in all threads at once, which must not know each other."""
    memories = [numpy_memory(pool, threads=index == 2) for index, pool in enumerate(pools)]
    barrier = threading.Barrier(6)

    def work(seed):
        barrier.wait()
        for n in range(60):
            index = (seed + n) % 3
            with memories[index]:
                array = empty(10 + n * seed, n)
                assert where(pools) == index
                with memories[(index + 1) % 3]:
                    assert where(pools) == (index + 1) % 3
                assert where(pools) == index
            assert where(pools) is None
            assert same(array, empty(10 + n * seed, n))

    with ThreadPoolExecutor(6) as executor:
        list(executor.map(work, range(6)))


def test_start_is_ours_while_other_threads_enter_and_leave(pools):
    """Also without a GIL, where a thread waits for the lock of a class that another one changes."""
    start, over = Thread.start, False

    def enter_and_leave(pool):
        memory = numpy_memory(pool, threads=True)
        for _ in range(10_000 if GIL else 200_000):
            with memory:
                assert Thread.start is not start

    def change_a_class():
        while not over:
            Changed.value = 1

    class Changed:
        pass

    with ThreadPoolExecutor(4) as executor:
        changes = [executor.submit(change_a_class) for _ in range(2)]
        try:
            list(executor.map(enter_and_leave, pools[:2]))
        finally:
            over = True
    assert [one.result() for one in changes] == [None, None]
    assert Thread.start is start


def test_a_finalizer_may_wait_for_a_thread_that_enters(pools):
    """It runs wherever a thread allocates, before CPython 3.12: in no lock, then."""
    memory = numpy_memory(pools[0], threads=True)
    lock, over, waited = threading.Lock(), False, []

    class Garbage:
        def __init__(self):
            self.itself = self

        def __del__(self):
            waited.append(lock.acquire(timeout=3))
            lock.release()

    def enter():
        while not over:
            with lock, memory:
                pass

    threshold = gc.get_threshold()
    with ThreadPoolExecutor(1) as executor:
        entering = executor.submit(enter)
        gc.set_threshold(7)
        try:
            for _ in range(300):
                Garbage()
                with memory:
                    pass
        finally:
            gc.set_threshold(*threshold)
            over = True
    assert entering.result() is None
    gc.collect()
    assert all(waited) and len(waited) == 300


class Inherits(threading.Thread):
    """It has no `start` of its own."""


@pytest.mark.parametrize("kind", [Inherits, lambda **_: None])
def test_another_class_of_threads(pools, monkeypatch, kind):
    """Whatever is in its place is left as it was."""
    monkeypatch.setattr(threading, "Thread", kind)
    start = getattr(kind, "start", None)
    with numpy_memory(pools[0], threads=True):
        if kind is Inherits:
            reached = []
            thread = threading.Thread(target=lambda: reached.append(where(pools)))
            thread.start()
            thread.join()
            assert reached == [0]
    assert getattr(kind, "start", None) is start


@pytest.mark.parametrize("of_class", [None, Thread.start])
def test_a_descriptor_in_place_of_start(pools, monkeypatch, of_class):
    start, started = Thread.start, []

    class Counts:
        def __get__(self, thread, kind=None):
            return of_class if thread is None else lambda: started.append(start(thread))

    descriptor = Counts()
    monkeypatch.setattr(Thread, "start", descriptor)
    with numpy_memory(pools[0], threads=True):
        assert in_thread(where, pools) == 0
    assert len(started) == 1 and vars(Thread)["start"] is descriptor


def test_what_wraps_start_may_wait_for_a_thread_that_enters(pools, monkeypatch):
    memory, start = numpy_memory(pools[0], threads=True), Thread.start
    threads, entered = [], []

    def enter():
        with memory:
            entered.append(where(pools))

    class Proxy:
        def __get__(self, thread, kind=None):
            return self if thread is None else lambda: start(thread)

        def __call__(self, thread):
            start(thread)

        def __getattr__(self, name):
            if not threads:
                threads.append(Thread(target=enter))
                start(threads[0])
                threads[0].join(3)
            return getattr(start, name)

    monkeypatch.setattr(Thread, "start", Proxy())
    with memory:
        assert entered == [0]
        assert in_thread(where, pools) == 0


# unreached ---------------------------------------------------------------------------------------


def test_unreached_names_threads_that_began_before(pools):
    before = set(numpy_memory(pools[0]).unreached())
    with Waiting("early"), numpy_memory(pools[0], threads=True) as memory:
        with Waiting("late"):
            assert set(memory.unreached()) == {"early"} | (before - {"MainThread"})
            assert set(numpy_memory(pools[1]).unreached()) >= {"early", "late", "MainThread"}
        assert memory.unreached().count("late") == 0


def test_unreached_after_leaving_names_this_thread(pools):
    memory = numpy_memory(pools[0])
    assert "MainThread" in memory.unreached()
    with memory:
        assert "MainThread" not in memory.unreached()
        with memory:
            pass
        assert "MainThread" not in memory.unreached()
    assert "MainThread" in memory.unreached()


@pytest.mark.skipif(INHERITS, reason="threads inherit the context here")
def test_unreached_without_threads(pools, strangers):
    with numpy_memory(pools[0]) as memory, Waiting("new"):
        assert unreached(memory, strangers) == ["new"]


def test_unreached_asks_for_the_handler_and_not_for_the_object(pools):
    """Two objects of one pool and policy are one handler."""
    with numpy_memory(pools[0]):
        assert "MainThread" not in numpy_memory(pools[0], threads=True).unreached()
        assert "MainThread" in numpy_memory(pools[1]).unreached()


def test_unreached_names_an_executor_that_began_before(pools, strangers):
    with ThreadPoolExecutor(1, thread_name_prefix="workers") as executor:
        executor.submit(int).result()
        with numpy_memory(pools[0], threads=True) as memory:
            assert unreached(memory, strangers) == ["workers_0"]
            assert executor.submit(where, pools).result() is None
            with ThreadPoolExecutor(1, thread_name_prefix="later") as later:
                assert later.submit(where, pools).result() == 0
                assert unreached(memory, strangers) == ["workers_0"]


def test_unreached_knows_a_thread_that_took_it_itself(pools, strangers):
    with ThreadPoolExecutor(1, initializer=numpy_memory(pools[0]).install) as executor:
        assert executor.submit(where, pools).result() == 0
        with numpy_memory(pools[0]) as memory:
            assert unreached(memory, strangers) == []


def test_unreached_is_not_fooled_by_a_thread_that_ended(pools):
    """Its identity is soon another's."""
    memory = numpy_memory(pools[0])
    for _ in range(10):
        in_thread(memory.install)
        with Waiting("plain"):
            assert "plain" in memory.unreached()


@pytest.mark.skipif(INHERITS, reason="threads inherit the context here")
def test_a_variable_is_not_inherited_by_threads():
    """What the tests above expect of a new thread is what this interpreter does."""
    variable = contextvars.ContextVar("variable", default=1)
    variable.set(2)
    assert in_thread(variable.get) == 1
