"""Programs of NumPy's, under handlers that nest, over pools that fill up and go away, on threads.

The model keeps of every array a twin that NumPy's own memory holds, and knows which pool it came
from; what is asked of `handles`, of the pools' figures and of `numpy_memory.stats` follows from it.
"""

import contextlib
import contextvars
import gc
import threading
import weakref
from dataclasses import dataclass

import numpy as np
from every import adds_up
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from machines import choice, needs, step
from numpy._core.multiarray import get_handler_name
from numpy_arrays import ALIGN, MAKERS, MIB, address_of, is_ours, owner_of, same, values
from sources import Regions

from arenapy import Pool, handles, numpy_memory

CLEAN = contextvars.copy_context()  # NumPy's own handler is in force here, whatever we do
SIZES = st.one_of(st.integers(0, 70), st.integers(0, 3000), st.sampled_from([512, 4096, 40_000]))
MOST = 400_000  # bytes of an array that grows
POLICIES = ("system", "error")
INNER = st.none() | st.tuples(st.integers(0, 1), st.sampled_from(POLICIES))
SEEDS, BOOLEANS = st.integers(0, 99), st.booleans()

#: From an array to another one, the same for equal arrays.
CHANGES = {
    "copy": lambda array: array.copy(),
    "twice": lambda array: np.concatenate([array.ravel(), array.ravel()]),
    "every other": lambda array: array.ravel()[::2].copy(),
    "sorted": lambda array: np.sort(array.ravel()) if array.dtype.kind in "iuf" else array.copy(),
    "as bytes": lambda array: (
        np.frombuffer(array.tobytes(), "u1")[::-1].copy()
        if array.dtype.kind in "iuf"
        else array.copy()
    ),
    "view": lambda array: array[1:],
    "whole view": lambda array: array[...],
    "reversed view": lambda array: array[::-1],
}


def plainly(function, *args):
    """What a function gives with NumPy's own memory."""
    return CLEAN.run(function, *args)


class Place:
    """A pool, its handlers and its source; the pool may be gone before what it served."""

    def __init__(self, nbytes, rounding):
        self.source = Regions()
        self.pool = Pool(nbytes, self.source, rounding=rounding)
        self.reference = weakref.ref(self.pool)
        self.memories = {policy: numpy_memory(self.pool, on_full=policy) for policy in POLICIES}

    def fallen_back(self):
        stats = [memory.stats() for memory in self.memories.values()]
        return sum(one.system_live + one.lazy_live for one in stats)


@dataclass(eq=False)
class Array:
    """One that somebody holds, what it must be, and where it was made (None: NumPy's)."""

    array: np.ndarray
    twin: np.ndarray
    place: Place | None
    policy: str


class NumpyMachine(RuleBasedStateMachine):
    """Drive NumPy; see the module's docstring."""

    def __init__(self):
        super().__init__()
        self.serial = 0
        self.live = {}
        self.entered = []  # (place, policy), the newest last
        self.places = [Place(None, "step"), Place(MIB // 8, "step")]
        self.past = []

    @property
    def here(self):
        """The place and policy in force."""
        return self.entered[-1] if self.entered else (None, "system")

    def admit(self, array, twin, like=None):
        """Take a new array into the model; with `like`, it shows that one's memory."""
        place, policy = (like.place, like.policy) if like else self.here
        self.serial += 1
        self.live[self.serial] = Array(array, twin, place, policy)

    @contextlib.contextmanager
    def within(self, inner):
        """Under the handler `inner`, an index and a policy, if it is not None."""
        if inner is None:
            yield
            return
        place, policy = self.places[inner[0]], inner[1]
        with place.memories[policy]:
            self.entered.append((place, policy))
            yield
            assert self.entered.pop() == (place, policy)

    def attempt(self, function, *args, on_thread=False):
        """What a function gives under the handler in force; None if that has no room."""
        place, policy = self.here
        memory = place and place.memories[policy]
        try:
            return self.threaded(memory, function, *args) if on_thread else function(*args)
        except MemoryError:
            event("refused")
            assert policy == "error" and place.pool.max_bytes, f"refused under {policy!r}"
            return None

    @staticmethod
    def threaded(memory, function, *args):
        """The same on another thread; an array that it gives is handed over."""
        box = []

        def run():
            try:
                assert get_handler_name() == "default_allocator"
                if memory is None:
                    box.append(function(*args))
                else:
                    with memory:
                        box.append(function(*args))
                assert get_handler_name() == "default_allocator"
            except BaseException as error:
                box.insert(0, error)

        thread = threading.Thread(target=CLEAN.copy().run, args=(run,))
        thread.start()
        thread.join()
        value = box.pop(0)
        if not isinstance(value, BaseException):
            return value
        try:
            raise value
        finally:
            del value  # whose traceback has this frame: a cycle that would keep arrays

    # Rules: which handler ----------------------------------------------------------------------

    @precondition(lambda self: len(self.entered) < 5)
    @rule(index=choice("places"), policy=st.sampled_from(POLICIES))
    @step
    def enter(self, index, policy):
        place = self.places[index]
        place.memories[policy].__enter__()
        self.entered.append((place, policy))

    @needs("entered")
    @rule(index=choice("entered"))
    @step
    def leave(self, index):
        """Any of them; the newest of its kind goes."""
        one = self.entered[index]
        last = max(at for at, other in enumerate(self.entered) if other == one)
        if last != len(self.entered) - 1:
            event("left out of order")
        del self.entered[last]
        one[0].memories[one[1]].__exit__(None, None, None)

    @rule(index=st.integers(0, 1), rounding=st.sampled_from(["step", "class"]))
    @step
    def another_pool(self, index, rounding):
        """The old one goes, as far as no context that was entered has it."""
        old = self.places[index]
        self.places[index] = Place(old.pool.max_bytes, rounding)
        self.past.append(old)

    # Rules: arrays -----------------------------------------------------------------------------

    @rule(name=st.sampled_from(sorted(MAKERS)), n=SIZES, seed=SEEDS, inner=INNER, other=BOOLEANS)
    @step
    def make(self, name, n, seed, inner, other):
        with self.within(inner):
            array = self.attempt(MAKERS[name], n, seed, on_thread=other)
            if array is not None:
                self.admit(array, plainly(MAKERS[name], n, seed))

    @rule(n=SIZES, count=st.integers(1, 8), inner=INNER)
    @step
    def make_several(self, n, count, inner):
        with self.within(inner):
            for seed in range(count):
                array = self.attempt(values, n, seed)
                if array is not None:
                    self.admit(array, plainly(values, n, seed))

    @needs("live")
    @rule(serial=choice("live"), how=st.sampled_from(sorted(CHANGES)), inner=INNER, other=BOOLEANS)
    @step
    def change(self, serial, how, inner, other):
        one = self.live[serial]
        if not one.array.ndim or one.array.nbytes > MOST:
            return
        with self.within(inner):
            array = self.attempt(CHANGES[how], one.array, on_thread=other)
            if array is not None:
                like = one if owner_of(array) is owner_of(one.array) else None
                self.admit(array, plainly(CHANGES[how], one.twin), like)

    @property
    def resizable(self):
        """Arrays that nobody has a view of, and that are none of others."""
        owners = [id(owner_of(one.array)) for one in self.live.values()]
        return {
            serial: one
            for serial, one in self.live.items()
            if one.array.base is None and owners.count(id(one.array)) == 1
        }

    @needs("resizable")
    @rule(serial=choice("resizable"), n=SIZES, other=BOOLEANS)
    @step
    def resize(self, serial, n, other):
        """An array is resized under its own handler, whichever is in force."""
        one = self.live[serial]
        before = plainly(one.twin.copy)

        def resize(array):
            array.resize((n,), refcheck=False)

        try:
            self.threaded(None, resize, one.array) if other else resize(one.array)
        except MemoryError:
            event("a resize was refused")
            assert one.policy == "error" and same(one.array, before)
        else:
            plainly(resize, one.twin)

    @needs("live")
    @rule(serial=choice("live"), seed=SEEDS)
    @step
    def overwrite(self, serial, seed):
        """And with it, all views of the same memory."""
        one = self.live[serial]
        if one.array.dtype.kind in "iufc":
            new = plainly(lambda: (values(one.twin.size, seed) % 100).reshape(one.twin.shape))
            for array in (one.array, one.twin):
                array[...] = new

    # Rules: going ------------------------------------------------------------------------------

    @needs("live")
    @rule(serial=choice("live"), other=BOOLEANS)
    @step
    def drop(self, serial, other):
        box = [self.live.pop(serial)]
        if other:
            self.threaded(None, box.clear)

    @needs("live")
    @rule(start=st.integers(0, 2), by=st.integers(1, 3))
    @step
    def drop_many(self, start, by):
        for serial in sorted(self.live)[start::by]:
            del self.live[serial]

    @rule(index=choice("places"), defragment=BOOLEANS)
    @step
    def trim(self, index, defragment):
        pool = self.places[index].pool
        if defragment:
            pool.defragment()
        else:
            pool.trim()

    # Invariants --------------------------------------------------------------------------------

    @invariant()
    def contents_are_as_they_should_be(self):
        for serial, one in self.live.items():
            assert plainly(same, one.array, one.twin), f"array {serial} of {one.twin.dtype}"

    @invariant()
    def the_newest_handler_is_in_force(self):
        place, _ = self.here
        assert get_handler_name() == ("default_allocator" if place is None else "arenapy")
        array = self.attempt(np.empty, 3)
        found = None if array is None else handles(array)
        assert found is None or found.allocator is place.pool

    @invariant()
    def blocks_are_where_they_should_be(self):
        blocks, fallen_back = {}, {}
        for one in self.live.values():
            owner = owner_of(one.array)
            found = handles(one.array)
            assert is_ours(one.array) == (one.place is not None)
            if one.place is None:
                assert found is None
                continue
            assert address_of(owner) % ALIGN == 0
            if found is None:
                gone = one.place.reference() is None
                assert one.policy == "system" and (gone or one.place.pool.max_bytes)
                fallen_back.setdefault(one.place, set()).add(address_of(owner))
                continue
            assert found.allocator is one.place.reference()
            assert found.address == address_of(owner)
            assert found.offset + one.array.nbytes <= found.nbytes or min(one.array.strides) < 0
            blocks.setdefault(one.place, {})[found.address] = found.nbytes
        for place in [*self.places, *self.past]:
            here = blocks.get(place, {})
            assert place.fallen_back() == len(fallen_back.get(place, ()))
            assert adds_up(place.pool).active_allocations == len(here)
            ends = 0
            for address in sorted(here):
                assert address >= ends, "two arrays share bytes"
                ends = address + here[address]

    @invariant()
    def pools_that_nobody_has_are_gone(self):
        """Their arrays stay."""
        for place in [*self.past]:
            if not any(place is one for one, _ in self.entered):
                self.past.remove(place)
                self.let_go(place)

    def let_go(self, place):
        place.memories.clear()
        place.pool = None
        if place.reference() is not None:
            gc.collect()
        assert place.reference() is None, "something keeps a pool that nobody has"
        mine = [one for one in self.live.values() if one.place is place]
        if mine:
            event("arrays outlive their pool")
        served = any(handles(one.array) for one in mine)
        assert bool(place.source.sizes) >= served, "memory that an array has is gone"

    def teardown(self):
        while self.entered:
            place, policy = self.entered.pop()
            place.memories[policy].__exit__(None, None, None)
        assert get_handler_name() == "default_allocator"
        self.live.clear()
        for place in [*self.places, *self.past]:
            assert adds_up(place.pool).active_allocations == 0 == place.fallen_back()
            place.pool.trim()
            assert place.pool.stats().reserved_bytes == 0
            self.let_go(place)
            assert not place.source.sizes, "regions are left"


class TestNumpyMemory(NumpyMachine.TestCase):
    settings = settings(max_examples=max(5, settings().max_examples // 3))
