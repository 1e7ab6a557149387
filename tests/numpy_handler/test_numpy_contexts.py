"""Where `numpy_memory` is in force: contexts, functions, tasks, threads; and where it is not.

The handler in force is read from the arrays that are made, `where` says which pool of `pools`.
"""

import contextlib
import contextvars
import ctypes
import gc
import inspect
import itertools
import sys
import threading

import numpy as np
import pytest
from helpers import in_threads
from numpy._core import multiarray
from numpy_arrays import three_pools, where

from arenapy import Pool, handles, numpy_memory
from arenapy.numpy_handler.contexts import get_handler

Thread = threading.Thread


@pytest.fixture
def pools():
    with three_pools() as made:
        yield made


# Nesting -----------------------------------------------------------------------------------------


def test_one_object_is_reusable_and_reentrant(pools):
    memory, other = numpy_memory(pools[0]), numpy_memory(pools[1])
    for _ in range(3):
        with memory as entered, other, memory:
            assert entered is memory and where(pools) == 0
            with other:
                assert where(pools) == 1
            assert where(pools) == 0
        assert where(pools) is None


def test_handlers_of_another_library_between_ours(pools):
    """Here it gives arrays NumPy's own."""
    memory, other = numpy_memory(pools[0]), numpy_memory(pools[1])
    with memory:
        with numpys_own():
            with memory, other:
                assert where(pools) == 1
                memory.install()
                memory.uninstall()
                assert where(pools) == 1
            assert where(pools) is None
            memory.install()
            assert where(pools) is None
            with other:
                assert where(pools) == 1
            memory.uninstall()
            assert where(pools) is None
        assert where(pools) == 0


def test_a_handler_of_another_library_that_ends_before_ours(pools):
    memory, other = numpy_memory(pools[0]), numpy_memory(pools[1])
    with other:
        with numpys_own():
            memory.install()
            memory.__enter__()
        assert where(pools) == 1
        memory.__exit__(None, None, None)
        memory.uninstall()
        assert where(pools) == 1


@contextlib.contextmanager
def numpys_own():
    capsule = ctypes.pythonapi.PyCapsule_GetPointer
    capsule.restype, capsule.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    functions = ctypes.cast(capsule(multiarray._ARRAY_API, None), ctypes.POINTER(ctypes.c_void_p))
    set_handler = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(functions[304])
    before = set_handler(contextvars.Context().run(get_handler))
    try:
        yield
    finally:
        set_handler(before)


def test_policies_nest(pools):
    full = Pool(1 << 20)
    with numpy_memory(full, on_full="error"):
        with numpy_memory(full):
            big = np.empty(2 << 20, "u1")
        with pytest.raises(MemoryError):
            np.empty(2 << 20, "u1")
    assert big.size == 2 << 20


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit, MemoryError])
def test_exceptions_pass_and_the_handler_is_restored(error, pools):
    raised = error("planned")
    with pytest.raises(error) as caught, numpy_memory(pools[0]):
        try:
            with numpy_memory(pools[1]):
                raise raised
        finally:
            assert where(pools) == 0
    assert caught.value is raised and where(pools) is None


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_contexts_left_in_any_order(order, pools):
    """The newest that was not left is in force, whoever leaves."""
    memories = [numpy_memory(pool) for pool in pools]
    entered = []
    for index, memory in enumerate(memories):
        memory.__enter__()
        entered.append(index)
        assert where(pools) == index
    for index in order:
        memories[index].__exit__(None, None, None)
        entered.remove(index)
        assert where(pools) == (entered[-1] if entered else None)


def test_leaving_what_was_not_entered_changes_nothing(pools):
    with numpy_memory(pools[0]):
        numpy_memory(pools[1]).__exit__(None, None, None)
        assert where(pools) == 0


@pytest.mark.no_sanitizer
@pytest.mark.parametrize("threads", [False, True])
def test_leaving_without_memory(threads, run_script):
    run_script(
        f"""
        import os, resource, threading
        import numpy as np
        import arenapy

        start = threading.Thread.start
        memory = arenapy.numpy_memory(arenapy.Pool(4 << 20), threads={threads})
        for _ in range(2):                   # what leaving takes is there again
            memory.__enter__()
            assert arenapy.handles(np.ones(1000)) is not None
            with open("/proc/self/statm") as file:
                used = int(file.read().split()[0]) * 4096
            soft, hard = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), hard))
            kept = None
            for nbytes in range(480, -1, -16):           # nothing of any size is left
                try:
                    while True:
                        kept = kept, bytes(nbytes)
                except MemoryError:
                    pass
            try:
                while True:
                    kept = [kept]
            except MemoryError:
                pass
            try:
                refused = bytes(30_000)
            except MemoryError:
                refused = None
            memory.__exit__(None, None, None)
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
            assert refused is None, "there was memory"
            assert arenapy.handles(np.ones(1000)) is None
            assert threading.Thread.start is start
        os._exit(0)                          # a chain of this length takes its time to end
        """
    )


def test_leaving_what_was_not_entered_changes_nothing_for_threads(run_script):
    """In a process of its own, since a failure would reach every later test."""
    run_script(
        """
        from concurrent.futures import ThreadPoolExecutor
        import numpy as np, threading
        from arenapy import Pool, handles, numpy_memory

        memory, start = numpy_memory(Pool(), threads=True), threading.Thread.start
        memory.__exit__(None, None, None)
        with memory, ThreadPoolExecutor(1) as executor:
            assert handles(executor.submit(np.empty, 3).result())
        assert threading.Thread.start is start
        """
    )


# install and uninstall ---------------------------------------------------------------------------


def test_uninstall_inside_a_context_does_not_end_it(pools):
    memory = numpy_memory(pools[0]).install()
    with numpy_memory(pools[1]):
        memory.uninstall()
        assert where(pools) == 1
    assert where(pools) is None


def test_install_inside_a_context_is_what_remains(pools):
    with numpy_memory(pools[1]):
        memory = numpy_memory(pools[0]).install()
    try:
        assert where(pools) == 0
    finally:
        memory.uninstall()


def test_uninstall_is_refused_where_nothing_is_installed(pools):
    memory = numpy_memory(pools[0])
    with pytest.raises(ValueError, match="not installed"):
        memory.uninstall()
    assert memory.install() is memory
    with pytest.raises(ValueError, match="already installed"):
        memory.install()
    assert where(pools) == 0
    memory.uninstall()
    with pytest.raises(ValueError, match="not installed"):
        memory.uninstall()
    with memory, pytest.raises(ValueError, match="not installed"):
        memory.uninstall()


def test_two_installed(pools):
    first, second = (numpy_memory(pool).install() for pool in pools[:2])
    assert where(pools) == 1
    first.uninstall()
    assert where(pools) == 1
    second.uninstall()


# Functions ---------------------------------------------------------------------------------------


def test_a_function(pools):
    @numpy_memory(pools[0])
    def work(a, *, b=2):
        """Say where."""
        if b == 0:
            raise ZeroDivisionError
        return a, b, where(pools)

    assert work(1, b=3) == (1, 3, 0) and where(pools) is None
    assert work.__name__ == "work" and work.__doc__ == "Say where."
    assert work.__wrapped__(1)[2] is None
    with pytest.raises(ZeroDivisionError):
        work(1, b=0)
    assert where(pools) is None


def test_a_recursive_function(pools):
    @numpy_memory(pools[0])
    def outer(n):
        assert where(pools) == 0
        return (*inner(n - 1), where(pools)) if n else ()

    @numpy_memory(pools[1])
    def inner(n):
        assert where(pools) == 1
        return (*outer(n - 1), where(pools)) if n else ()

    assert outer(5) == (0, 1) * 2 + (0,)


def test_methods_and_classes(pools):
    class Worker:
        @numpy_memory(pools[0])
        def method(self):
            return self, where(pools)

        @staticmethod
        @numpy_memory(pools[1])
        def static():
            return where(pools)

        @classmethod
        @numpy_memory(pools[2])
        def of_class(cls):
            return cls, where(pools)

    worker = Worker()
    assert worker.method() == (worker, 0)
    assert worker.static() == 1 and Worker.of_class() == (Worker, 2)


def test_a_generator_has_it_only_while_it_runs(pools):
    closed = []

    @numpy_memory(pools[0])
    def numbers():
        try:
            got = yield where(pools)
            while got is not None:
                try:
                    got = yield (got, where(pools))
                except KeyError as error:
                    got = yield (error.args[0], where(pools))
            return where(pools)
        finally:
            closed.append(where(pools))

    assert inspect.isgeneratorfunction(numbers)
    generator = numbers()
    assert next(generator) == 0 and where(pools) is None
    assert generator.send("a") == ("a", 0) and where(pools) is None
    with numpy_memory(pools[1]):
        assert generator.throw(KeyError("b")) == ("b", 0)
        assert where(pools) == 1
        assert generator.send("c") == ("c", 0)
    assert where(pools) is None
    with pytest.raises(StopIteration) as stop:
        next(generator)
    assert stop.value.value == 0 and closed == [0]
    generator = numbers()
    next(generator)
    generator.close()
    assert closed == [0, 0] and where(pools) is None
    generator = numbers()
    next(generator)
    with pytest.raises(ZeroDivisionError):
        generator.throw(ZeroDivisionError)
    assert closed == [0, 0, 0] and where(pools) is None
    generator = numbers()
    next(generator)
    del generator
    gc.collect()
    assert closed == [0] * 4 and where(pools) is None


def test_interleaved_generators(pools):
    def numbers(index):
        for _ in range(5):
            assert where(pools) == index
            yield index

    made = [numpy_memory(pool)(numbers)(index) for index, pool in enumerate(pools)]
    for _ in range(5):
        for index in (2, 0, 1):
            assert next(made[index]) == index and where(pools) is None
    del made


def test_yield_from_and_a_nested_generator(pools):
    @numpy_memory(pools[1])
    def inner():
        yield where(pools)
        return where(pools)

    @numpy_memory(pools[0])
    def outer():
        result = yield from inner()
        yield where(pools), result

    assert list(outer()) == [1, (0, 1)] and where(pools) is None


def test_generators_with_a_context_of_their_own(pools):
    """As with `numpy.errstate` it reaches the caller; when they end, nothing is left of it."""

    def numbers(index):
        with numpy_memory(pools[index]):
            yield where(pools)
            yield where(pools)

    first, second = numbers(0), numbers(1)
    assert next(first) == 0 and where(pools) == 0
    assert next(second) == 1 and where(pools) == 1
    assert next(first) == 1
    assert next(first, None) is None and where(pools) == 1
    second.close()
    assert where(pools) is None
    with numpy_memory(pools[2]):
        third = numbers(0)
        next(third)
    assert where(pools) == 0
    del third
    gc.collect()
    assert where(pools) is None


def test_arrays_of_a_generator_outlive_it(pools):
    @numpy_memory(pools[0])
    def chunks():
        for n in range(5):
            yield np.full(1000, n)

    arrays = list(chunks())
    gc.collect()
    for n, array in enumerate(arrays):
        assert (array == n).all() and handles(array).allocator is pools[0]


def test_an_object_is_made_once():
    """What it was entered with is what it leaves."""
    pool, start = Pool(1 << 20), threading.Thread.start
    with numpy_memory(pool, threads=True) as memory:
        with pytest.raises(TypeError, match="initialized already"):
            memory.__init__(Pool(1 << 20), threads=False)
        assert memory.pool is pool
    assert threading.Thread.start is start


# Garbage -----------------------------------------------------------------------------------------


@pytest.mark.full
def test_garbage_that_leaves_is_not_collected_while_another_one_enters(run_script):
    """Before Python 3.12 `ContextVar.set` may collect it, and then use what its end has freed."""
    run_script(
        """
        import contextvars
        import gc
        from arenapy import Pool, numpy_memory
        memory = numpy_memory(Pool(1 << 20))

        @memory
        def numbers():
            yield 1
            yield 2

        def leave_unfinished():
            others = [contextvars.ContextVar("other") for _ in range(40)]
            for one in others:  # so that the variables are a tree
                one.set(None)
            gc.enable()
            for threshold in range(1, 60):
                gc.set_threshold(threshold)
                unfinished = [numbers()]
                next(unfinished[0])
                unfinished.append(unfinished)
                del unfinished
                with memory:
                    pass
            gc.disable()  # what others set is theirs to guard

        gc.disable()
        for _ in range(1000):
            contextvars.Context().run(leave_unfinished)
        """,
        env={"PYTHONMALLOC": "debug"},
    )


def test_no_list_of_a_call_is_to_be_found(run_script):
    """Before Python 3.12 an allocation may collect garbage, whose callbacks find all lists."""
    run_script("""
        import gc
        import arenapy, numpy as np
        m = arenapy.numpy_memory(arenapy.Pool(1 << 20))
        m.__enter__(); m.__exit__(None, None, None)
        known, on = {id(one) for one in gc.get_objects()}, False

        def change(phase, info):
            for one in gc.get_objects() if on else ():
                if type(one) is list and id(one) not in known and one:
                    if type(one[0]).__name__ == "Entry":
                        one[:] = [1 << 40] * len(one)

        gc.callbacks.append(change)
        gc.set_threshold(1, 1, 1)
        on = True
        m.__enter__()
        m.__enter__()
        m.__exit__(None, None, None)
        m.__exit__(None, None, None)
        on = False
        assert not arenapy.handles(np.empty(1000))
    """)


@pytest.mark.parametrize("install", [False, True])
@pytest.mark.parametrize("options", [{}, {"threads": True}, {"libc": "keep", "threads": True}])
def test_what_enters_and_leaves_calls_no_function_of_python(options, install):
    """There a signal could strike, or another thread go on."""
    memory = numpy_memory(Pool(), **options)
    called = []

    def note(frame, event, _):
        if event == "call":
            called.append(frame.f_code)

    def body():
        collects = gc.isenabled()
        gc.disable()  # finalizers may be Python's
        sys.setprofile(note)
        try:
            memory._install() if install else memory.__enter__()
            memory._uninstall() if install else memory.__exit__(None, None, None)
        finally:
            sys.setprofile(None)
            if collects:
                gc.enable()

    body()
    in_threads(body)
    body()
    assert called == []


@pytest.mark.parametrize("options", [{}, {"threads": True}])
def test_without_memory_for_an_object(run_script, options):
    """It is entered as a whole or not at all, and left."""
    pytest.importorskip("_testcapi")
    run_script(f"""
        import _testcapi, threading
        import numpy as np
        from arenapy import Pool, handles, numpy_memory

        start, refused = threading.Thread.start, 0
        memory = numpy_memory(Pool(max_bytes=1 << 20), **{options})
        with memory:
            np.ones(3)
        for k in range(1, 40):
            error = False
            _testcapi.set_nomemory(k, k + 1)
            try:
                with memory:
                    pass
            except MemoryError:
                error = True
            finally:
                _testcapi.remove_mem_hooks()
            refused += error
            assert handles(np.ones(3)) is None, k
            assert threading.Thread.start is start, k
        assert refused > 1, refused
    """)
