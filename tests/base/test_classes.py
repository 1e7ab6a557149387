"""One rule for all classes: nobody gets an object half made (see arenapy/base/sealed.pyx)."""

import copyreg
import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
from class_matrix import GROUPS, NEVER_SEEN, WAYS, classes, name_of, specimen
from helpers import GIL, Pages
from hypothesis import settings

import arenapy
from arenapy import Bump, Pool, Slab
from arenapy.allocator.allocator import live_allocators
from arenapy.diagnostics.ledger import Ledger

ALL = classes()
#: Whoever calls these gets a whole object.
CALLED = {
    "arenapy.bump.bump.Bump", "arenapy.slab.slab.Slab", "arenapy.pool.pool.Pool",
    "arenapy.cuda.stream.Stream", "arenapy.cuda.backing.DriverPoolHandle",
    "arenapy.diagnostics.call_sites.CallStacks",
    "arenapy.diagnostics.ledger.Ledger", "arenapy.pool.core.BlockBatch",
    "arenapy.numpy_handler.handler.Counts", "arenapy.numpy_handler.contexts.PoolHandler",
    "arenapy.pool.memory.PoolMemory", "arenapy.diagnostics.recorder.Recorder",
    "arenapy.diagnostics.recorder.Recording", "arenapy.commands.replay.loop.BumpHeap",
    "arenapy.commands.replay.loop.MallocHeap", "arenapy.commands.replay.loop.NoHeap",
    "arenapy.commands.replay.loop.PoolHeap", "arenapy.commands.replay.loop.SlabHeap",
}  # fmt: skip
#: Every Nth of all lists of arguments.
EVERY = max(1, 4800 // settings().max_examples)


def test_all_classes_are_known():
    assert {name_of(cls) for cls in ALL} >= CALLED | NEVER_SEEN
    assert len(ALL) > 50


#: `numpy_memory`, which is Python code, is derived from it.
BASE_OF_PYTHON = "arenapy.numpy_handler.contexts.Context"


@pytest.mark.parametrize("cls", [c for c in ALL if name_of(c) != BASE_OF_PYTHON], ids=name_of)
def test_the_rule(cls):
    for way in (
        lambda: type("Derived", (cls,), {}),
        lambda: type(type)("M", (type,), {})("D", (cls,), {}),
    ):
        with pytest.raises(TypeError, match="not an acceptable base type"):
            way()
    for base in cls.__mro__[:-1]:
        assert "__init__" not in vars(base), "what __new__ makes is not whole"
        for name in ("__setstate__", "__setstate_cython__", "__reduce_cython__"):
            assert name not in vars(base), "others can set the fields of an object"
    with pytest.raises(TypeError, match="not safe"):
        object.__new__(cls)
    with pytest.raises(TypeError, match="not safe"):
        copyreg._reconstructor(cls, object, None)
    if name_of(cls) in CALLED:
        return
    for given in ((), (1,), (None, 2, 3), ("x",) * 5):
        for way in (
            cls,
            lambda *some: type.__call__(cls, *some),
            lambda *some: cls.__new__(cls, *some),
        ):
            with pytest.raises(TypeError) as caught:
                way(*given)
            assert any(word in str(caught.value) for word in ("internal", "made by", "make"))
    with pytest.raises(TypeError):
        cls.__new__(cls, option=1)


def test_each_class_has_a_specimen():
    """So that a new one is attacked, too."""
    seen = set()
    for group in ("host", "cuda"):
        place, specimens = GROUPS[group]
        with place():
            for _, make in specimens():
                seen |= {name_of(cls) for cls in type(specimen(make)[0]).__mro__}
    assert {name_of(cls) for cls in ALL} - seen == NEVER_SEEN - seen


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.sampled
@pytest.mark.full
def test_every_call_of_every_object(group, tmp_path):
    """Each may raise, and none ends the process."""
    program = Path(__file__).with_name("class_matrix.py")
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", program, group, tmp_path / "last", str(EVERY)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
    )
    last = (tmp_path / "last").read_text("ascii").strip()
    assert done.returncode == 0, f"at {last}\n{done.stderr}"
    calls, objects = map(int, done.stdout.split())
    assert objects > 20 and calls > 20 * objects
    assert "Traceback" not in done.stderr and "ignored in" not in done.stderr, done.stderr


def test_ways_are_ways():
    """Of a class that is not arenapy's, all of them give an object."""

    class Plain:
        def __init__(self, *numbers):
            pass

    assert all(isinstance(way(Plain), Plain) for way in WAYS.values())


# Nobody sees an allocator before it is whole ------------------------------------------------------

MAKERS = {
    "bump": lambda source, **options: Bump(1 << 16, source, **options),
    "slab": lambda source, **options: Slab(100, 100, source, **options),
    "pool": lambda source, **options: Pool(1 << 22, source, 1 << 16, **options),
}


def visible():
    """The allocators that code which is called in between could get hold of."""
    gc.collect(0)
    found = [one for one in gc.get_objects() if isinstance(one, (arenapy.Allocator, Ledger))]
    found += [one.allocator() for one in found if isinstance(one, Ledger) and one.allocator]
    return {id(one) for one in [*found, *live_allocators()] if isinstance(one, arenapy.Allocator)}


class Looking(Pages):
    """Looks for allocators whenever it is asked for memory; then it may fail."""

    def __init__(self, fails):
        super().__init__()
        self.fails = fails
        self.seen = set()

    def region(self, nbytes):
        self.seen |= visible()
        if self.fails:
            raise ZeroDivisionError
        return super().region(nbytes)


@pytest.mark.skipif(not GIL, reason="without a GIL the collector looks at all objects")
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_an_allocator_is_seen_when_it_is_whole(name, debug, fails):
    before = visible()
    source = Looking(fails)
    one = None
    try:
        one = MAKERS[name](source, debug=debug)
    except ZeroDivisionError:
        assert fails
    assert source.calls or fails
    assert source.seen <= before
    if one is not None:
        assert visible() - before == {id(one)} and gc.is_tracked(one)
        gone = weakref.ref(one)
        del one
        assert gone() is None
    assert visible() <= before


def test_a_fork_after_all_these_finds_nothing_that_is_gone():
    """What a base class noted of itself when it was made alone has ended with it."""
    gc.collect()
    child = os.fork()
    if not child:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
