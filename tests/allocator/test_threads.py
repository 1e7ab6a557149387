"""Threads: buffers may die anywhere, and misuse of one arena by many is slow and never unsafe."""

import copy
import pickle
import queue
import random
import threading

import numpy as np
import pytest
from helpers import exact, in_threads, peek, poke

from arenapy import PerThread

pytestmark = pytest.mark.usefixtures("frequent_switches")


HOLDS = [
    memoryview,
    np.asarray,
    np.from_dlpack,
    lambda b: b.__dlpack__(),
    lambda b: b[1:9].array((8,), "u1"),
    lambda b: np.ndarray(b.nbytes, "u1", buffer=b),
]


def test_buffers_die_on_other_threads_while_the_owner_allocates():
    arena = exact(1 << 20)
    handover = queue.SimpleQueue()
    rounds = 4000

    def owner():
        draw = random.Random(1)
        for number in range(rounds):
            with arena.scope():
                block = arena.alloc(draw.randint(16, 2000))
                poke(block.address, block.nbytes, number % 251)
                held = draw.choice(HOLDS)(block)
                handover.put((held, block.address, block.nbytes, number % 251))
                del block, held
            while handover.qsize() > 100:
                threading.Event().wait(0.001)
            if number % 100 == 0:
                arena.check()
        for _ in range(3):
            handover.put(None)

    def killer():
        kept = []
        while (item := handover.get()) is not None:
            _, address, nbytes, fill = item
            assert peek(address, nbytes) == bytes([fill]) * nbytes
            kept.append(item)
            del item
            if len(kept) > 20:
                assert all(peek(a, n) == bytes([f]) * n for _, a, n, f in kept)
                kept.clear()

    in_threads(owner, killer, killer, killer)
    arena.reset()
    arena.check()
    assert arena.retired == 0 and arena.remaining == arena.capacity


def test_one_arena_misused_by_many_threads_never_overlaps():
    arena = exact(8 << 20)

    def user(seed):
        draw = random.Random(seed)
        kept = []
        for _ in range(1500):
            nbytes = draw.randint(0, 500)
            array = arena.empty(nbytes, "u1")
            array[:] = seed
            kept.append(array)
            if draw.random() < 0.02:
                arena.reset()  # everybody's arrays are held: nothing goes from under anyone
            if draw.random() < 0.5:
                kept.pop(draw.randrange(len(kept)))
            if draw.random() < 0.05:
                assert all((array == seed).all() for array in kept)
        assert all((array == seed).all() for array in kept)

    in_threads(*(lambda seed=seed: user(seed) for seed in range(1, 5)))
    arena.check()
    arena.reset()
    assert arena.retired == 0 and arena.remaining == arena.capacity


def test_an_arena_dropped_by_one_thread_while_others_hold_its_buffers():
    for _ in range(50):
        box = [exact(1 << 16)]
        arrays = [box[0].empty(100, "u1") for _ in range(4)]

        def user(index, arrays=arrays):
            array = arrays[index]
            arrays[index] = None
            for value in range(20):
                array[:] = value
                assert (array == value).all()

        in_threads(box.clear, *(lambda i=i: user(i) for i in range(4)))


def test_per_thread_arenas_do_not_meet():
    arenas = PerThread(lambda: exact(1 << 16))
    mine = arenas.get()
    assert arenas.get() is mine is arenas.alloc(0).allocator
    mine.reset()
    seen, barrier = [], threading.Barrier(4)

    def user():
        seen.append(arenas.get())
        barrier.wait()
        for _ in range(500):
            with arenas.scope():
                array = arenas.empty(50)
                array[:] = threading.get_ident()
                assert (array == threading.get_ident()).all()
        assert arenas.get() in seen and arenas.used == arenas.get().used
        arenas.get().check()

    in_threads(*[user] * 4)
    assert len({id(arena) for arena in [mine, *seen]}) == 5
    assert mine.used == 0


def test_a_thread_that_ends_takes_its_arena_along_but_not_its_arrays():
    arenas = PerThread(lambda: exact(1 << 16))
    arrays = []

    def user():
        arrays.append(arenas.empty(100, "u1"))
        arrays[0][:] = 9

    in_threads(user)
    assert (arrays[0] == 9).all()
    assert arrays[0].base.allocator is None


def test_code_that_runs_in_the_factory_uses_the_arena_that_the_thread_keeps():
    made, marks = [], []

    def factory():
        made.append(exact(1 << 16))
        if len(made) == 1:  # as a finalizer or a signal's handler would
            marks.append(arenas.mark())
        return made[-1]

    arenas = PerThread(factory)
    arenas.alloc(10)
    arenas.reset(marks[0])
    assert arenas.get() is made[1]


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
def test_per_thread_arenas_are_not_copied(act):
    with pytest.raises(TypeError, match="PerThread is not copied"):
        act(PerThread(exact))
