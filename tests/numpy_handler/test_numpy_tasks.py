"""`numpy_memory` in coroutines, async generators, asyncio's tasks and copied contexts."""

import asyncio
import contextlib
import contextvars
import functools
import gc
import inspect
import sys
import threading
import types
import weakref
from unittest.mock import Mock

import numpy as np
import pytest
from numpy_arrays import three_pools, where

from arenapy import Pool, handles, numpy_memory


@pytest.fixture
def pools():
    with three_pools() as made:
        yield made


def test_a_coroutine(pools):
    @numpy_memory(pools[0])
    async def work(value):
        before = where(pools)
        await asyncio.sleep(0)
        return value, before, where(pools)

    async def main():
        assert await work(3) == (3, 0, 0)
        assert where(pools) is None

    assert inspect.iscoroutinefunction(work)
    asyncio.run(main())


def test_a_generator_that_is_a_coroutine(pools):
    @numpy_memory(pools[0])
    @types.coroutine
    def work():
        yield
        return where(pools)

    async def main():
        assert await work() == 0

    asyncio.run(main())


def test_what_can_be_awaited_can_be_once_decorated(pools):
    class Step:
        @types.coroutine
        def __call__(self):
            yield
            return where(pools)

    for step in Step(), functools.partial(Step.__call__, Step()):

        async def main(step=step):
            return await numpy_memory(pools[0])(step)()

        assert asyncio.run(main()) == 0


def test_an_inner_context_stays_in_force_in_a_coroutine(pools):
    @numpy_memory(pools[0])
    async def work():
        with numpy_memory(pools[1]):
            await asyncio.sleep(0)
            inside = where(pools)
        await asyncio.sleep(0)
        return inside, where(pools)

    assert asyncio.run(work()) == (1, 0)


@types.coroutine
def pause():
    yield


@pytest.mark.parametrize("kind", ["coroutine", "async generator"])
@pytest.mark.parametrize("same", [True, False])
def test_what_is_dropped_in_another_context_ends_itself_alone(pools, kind, same):
    memory = numpy_memory(pools[0])

    @memory
    async def work():
        await pause()

    @memory
    async def numbers():
        await pause()
        yield

    def begin():
        suspended = [work()] if kind == "coroutine" else [generator := numbers(), anext(generator)]
        suspended[-1].send(None)
        return suspended

    suspended = contextvars.copy_context().run(begin)
    with memory if same else numpy_memory(pools[1]):
        suspended.clear()
        assert where(pools) == (0 if same else 1)
    assert where(pools) is None


def test_what_is_thrown_into_a_generator_keeps_no_array():
    pool = Pool(max_bytes=64 << 20)

    @numpy_memory(pool, on_full="error")
    def work():
        array = np.ones(1 << 20)
        yield array.nbytes

    for _ in range(20):
        generator = work()
        next(generator)
        with pytest.raises(KeyError):
            generator.throw(KeyError())
        del generator
    assert pool.stats().allocated_bytes == 0


def test_a_generator_says_at_its_close_what_it_returns(pools):
    @numpy_memory(pools[0])
    def work():
        try:
            yield
        except GeneratorExit:
            return where(pools)

    generator = work()
    next(generator)
    assert generator.close() == (0 if sys.version_info >= (3, 13) else None)


def test_a_suspended_generator_keeps_neither_what_it_took_nor_what_it_gave(pools):
    @numpy_memory(pools[0])
    def numbers(array):
        del array
        yield np.ones(3)

    @numpy_memory(pools[0])
    async def async_numbers(array):
        del array
        yield np.ones(3)

    async def main():
        arrays = [np.ones(3), np.ones(3)]
        taken = [weakref.ref(array) for array in arrays]
        generators = numbers(arrays[0]), async_numbers(arrays[1])
        given = [weakref.ref(next(generators[0])), weakref.ref(await anext(generators[1]))]
        arrays.clear()
        return [reference() is None for reference in taken + given]

    assert asyncio.run(main()) == [True] * 4


def test_an_event_loop_that_ends_closes_an_async_generator_once(pools):
    """It knows the decorated one, which closes the other one."""
    kept, closed = [], []

    @numpy_memory(pools[0])
    async def numbers():
        try:
            yield 1
        finally:
            await asyncio.sleep(0.01)
            closed.append(where(pools))

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: closed.append(context))
        hooks = sys.get_asyncgen_hooks()
        for _ in range(3):
            kept.append(numbers())
            await anext(kept[-1])
        assert sys.get_asyncgen_hooks() == hooks

    asyncio.run(main())
    assert closed == [0, 0, 0]


def test_an_async_generator_that_the_collector_finds(pools):
    """The one inside, too, in the same collection."""
    closed = []

    @numpy_memory(pools[0])
    async def numbers():
        try:
            yield 1
        finally:
            await asyncio.sleep(0)
            closed.append(where(pools))

    async def main():
        cycle = [generator := numbers()]
        cycle.append(cycle)
        await anext(generator)
        del cycle, generator
        gc.collect()
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert closed == [0]


@pytest.mark.parametrize("awaits", [False, True])
@pytest.mark.parametrize("decorated", [False, True])
def test_an_async_generator_whose_wrapper_a_signal_ended(pools, decorated, awaits, monkeypatch):
    """What a handler raises amid the wrapper's own code, for which `_turn` stands here."""
    closed, memory = [], numpy_memory(pools[0])

    async def numbers():
        try:
            yield 1
            raise KeyError("as the signal does")
        finally:
            if awaits:
                await asyncio.sleep(0)
            closed.append(1)

    async def main():
        generator = memory(numbers)() if decorated else numbers()
        await anext(generator)
        if decorated:
            monkeypatch.setattr(numpy_memory, "_turn", Mock(side_effect=KeyError))
        try:
            await anext(generator)
        except KeyError:
            pass
        else:
            raise AssertionError
        del generator
        gc.collect()
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert closed == [1]


@pytest.mark.parametrize("decorated", [True, False])
def test_a_generator_that_goes_on_after_its_close(pools, decorated):
    """Decorated it does what it does."""

    def numbers():
        for number in range(9):
            with contextlib.suppress(*[GeneratorExit][: number < 2]):
                yield number

    async def async_numbers():
        for number in range(9):
            with contextlib.suppress(*[GeneratorExit][: number < 2]):
                yield number

    if decorated:
        numbers, async_numbers = map(numpy_memory(pools[0]), (numbers, async_numbers))
    generator = numbers()
    assert next(generator) == 0 and generator.throw(GeneratorExit) == 1
    with pytest.raises(RuntimeError, match="ignored GeneratorExit"):
        generator.close()
    assert next(generator) == 3
    generator.close()

    async def main():
        generator = async_numbers()
        assert await anext(generator) == 0 and await generator.athrow(GeneratorExit) == 1
        with pytest.raises(RuntimeError, match="ignored GeneratorExit"):
            await generator.aclose()

    asyncio.run(main())


def test_an_object_with_an_asynchronous_call(pools):
    class Handler:
        async def __call__(self):
            await asyncio.sleep(0)
            return where(pools)

    assert asyncio.run(numpy_memory(pools[0])(Handler())()) == 0


def test_methods_of_all_kinds(pools):
    class Owner:
        @numpy_memory(pools[0])
        @staticmethod
        def static():
            return where(pools)

        @numpy_memory(pools[1])
        @classmethod
        def of_class(cls):
            return cls, where(pools)

        @numpy_memory(pools[2])
        @classmethod
        async def task(cls):
            return cls, where(pools)

    for owner in Owner, Owner():
        assert (owner.static(), owner.of_class()) == (0, (Owner, 1))
        assert asyncio.run(owner.task()) == (Owner, 2)


@pytest.mark.parametrize("wrong", [None, 5, Pool])
def test_what_is_no_function_is_not_decorated(pools, wrong):
    with pytest.raises(TypeError, match="is not a function"):
        numpy_memory(pools[0])(wrong)


def test_tasks_do_not_meet(pools):
    async def work(index, first, then):
        with numpy_memory(pools[index]):
            for _ in range(5):
                first.set()
                await then.wait()
                await asyncio.sleep(0)
                assert where(pools) == index
        assert where(pools) is None

    async def main():
        a, b = asyncio.Event(), asyncio.Event()
        await asyncio.gather(work(0, a, b), work(1, b, a))
        assert where(pools) is None

    asyncio.run(main())


def test_a_task_inherits_and_keeps_what_it_inherited(pools):
    async def work(started, go):
        started.set()
        await go.wait()
        seen = [where(pools)]
        with numpy_memory(pools[1]):
            seen.append(where(pools))
        return [*seen, where(pools)]

    async def main():
        started, go = asyncio.Event(), asyncio.Event()
        with numpy_memory(pools[0]):
            task = asyncio.create_task(work(started, go))
            await started.wait()
        assert where(pools) is None
        go.set()
        assert await task == [0, 1, 0]

    asyncio.run(main())


def test_a_task_that_is_cancelled(pools):
    ended = []

    async def work(started):
        try:
            with numpy_memory(pools[0]):
                started.set()
                await asyncio.sleep(1000)
        finally:
            ended.append(where(pools))

    async def main():
        started = asyncio.Event()
        task = asyncio.create_task(work(started))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == [None] and where(pools) is None

    asyncio.run(main())


def test_an_async_generator_has_it_only_while_it_runs(pools):
    closed = []

    @numpy_memory(pools[0])
    async def numbers():
        try:
            got = yield where(pools)
            while got is not None:
                await asyncio.sleep(0)
                try:
                    got = yield (got, where(pools))
                except KeyError as error:
                    got = yield (error.args[0], where(pools))
        finally:
            await asyncio.sleep(0)
            closed.append(where(pools))

    async def main():
        generator = numbers()
        assert await anext(generator) == 0 and where(pools) is None
        assert await generator.asend("a") == ("a", 0) and where(pools) is None
        with numpy_memory(pools[1]):
            assert await generator.athrow(KeyError("b")) == ("b", 0)
            assert where(pools) == 1
        with pytest.raises(StopAsyncIteration):
            await anext(generator)
        assert closed == [0] and where(pools) is None
        generator = numbers()
        await anext(generator)
        await generator.aclose()
        assert closed == [0, 0] and where(pools) is None
        assert [value async for value in numbers()] == [0]
        assert closed == [0, 0, 0] and where(pools) is None

    assert inspect.isasyncgenfunction(numbers)
    asyncio.run(main())


def test_an_async_context_that_is_left_in_another_task(pools):
    """Nothing of it is in the context that leaves, and nothing is changed there."""

    async def numbers():
        with numpy_memory(pools[0]):
            yield where(pools)

    async def main():
        generator = numbers()
        assert await asyncio.create_task(take(generator)) == 0
        assert where(pools) is None
        with numpy_memory(pools[1]):
            await generator.aclose()
            assert where(pools) == 1
        assert where(pools) is None

    async def take(generator):
        return await anext(generator)

    asyncio.run(main())


def test_to_thread_inherits(pools):
    async def main():
        with numpy_memory(pools[0]):
            assert await asyncio.to_thread(where, pools) == 0
            first = await asyncio.to_thread(np.full, 1000, 3)
            assert handles(first).allocator is pools[0]

            def inside():
                with numpy_memory(pools[1]):
                    return where(pools)

            assert await asyncio.to_thread(inside) == 1
            assert where(pools) == 0
        assert await asyncio.to_thread(where, pools) is None
        assert (first == 3).all()

    asyncio.run(main())


def test_copy_context(pools):
    here = functools.partial(where, pools)
    with numpy_memory(pools[0]):
        inside = contextvars.copy_context()

        def nested():
            with numpy_memory(pools[1]):
                return here(), contextvars.copy_context()

        seen, nested_context = inside.run(nested)
        assert seen == 1
    assert here() is None
    assert inside.run(here) == 0 and nested_context.run(here) == 1
    memory = numpy_memory(pools[2])
    inside.run(memory.__enter__)
    assert inside.run(here) == 2 and here() is None
    memory.__exit__(None, None, None)  # not where it was entered
    assert inside.run(here) == 2 and here() is None
    inside.run(memory.__exit__, None, None, None)
    assert inside.run(here) == 0


def test_a_context_that_is_gone_keeps_no_pool():
    pool = Pool()
    with numpy_memory(pool):
        context = contextvars.copy_context()
        array = context.run(np.ones, 100)
    freed = threading.Event()

    class Told:
        def __del__(self):
            freed.set()

    context.run(contextvars.ContextVar("told").set, Told())
    del context
    gc.collect()
    assert freed.is_set() and handles(array).allocator is pool
    del pool
    gc.collect()
    assert handles(array).allocator is None and array.sum() == 100
