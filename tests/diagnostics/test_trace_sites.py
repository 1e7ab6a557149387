"""Allocation sites: the lines that ask for memory, in the file and read from it again."""

import ctypes
import functools
import gc
import os
import signal
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import arenapy
from arenapy import trace
from arenapy.commands.replay.loop import NoHeap, run
from arenapy.diagnostics.recorder import Recorder
from arenapy.trace import Frame
from arenapy.trace.format import HEADER, RECORD

MIB = 1 << 20
HERE = __file__


@pytest.fixture
def path(tmp_path):
    return tmp_path / "sites.trace"


def line(text):
    """The number of the one line of this file that ends so."""
    lines = Path(HERE).read_text().splitlines()
    (found,) = (number for number, one in enumerate(lines, 1) if one.endswith(text))
    return found


def allocations(path):
    """The site of each allocation."""
    found = trace.load(path)
    is_alloc = found.events["operation"] == trace.OPERATIONS["alloc"]
    return [found.sites[number] for number in found.events["site"][is_alloc].tolist()]


def inner(allocator):
    return allocator.alloc(64)  # the innermost


def outer(allocator):
    return inner(allocator)  # the one around it


class Holder:
    def method(self, allocator):
        return [outer(allocator) for _ in range(2)]  # a method


INNER = Frame(HERE, line("# the innermost"), "inner")
OUTER = Frame(HERE, line("# the one around it"), "outer")


@pytest.mark.parametrize(
    "make", [lambda: arenapy.Bump(MIB), lambda: arenapy.Slab(64, 10), arenapy.Pool]
)
@pytest.mark.parametrize("sites", [0, 1, 2, 3])
def test_the_callers_of_an_allocation(path, make, sites):
    allocator = make()
    with trace.record(allocator, path, sites=sites):
        outer(allocator)
        inner(allocator)
    first, second = allocations(path)
    me = "test_the_callers_of_an_allocation"
    assert first[:2] == (INNER, OUTER)[:sites]
    assert [frame.function for frame in first[2:]] == [me] * (sites == 3)
    assert second[:1] == (INNER,)[:sites]
    assert [frame.function for frame in second[1:2]] == [me] * (sites > 1)
    assert {len(first), len(second)} == {sites}
    assert trace.load(path).sites[0] == ()
    assert len(trace.load(path).sites) == (1, 2, 3, 3)[sites]


def test_a_finalizer_that_allocates_amid_a_new_site(path):
    """Up to 3.11 the collector may run where a new call stack is written down."""

    class Cycle:
        def __init__(self):
            self.me = self

        def __del__(self):
            ask()

    pool, asks, kept = arenapy.Pool(), [], []
    for n in range(300):
        names = {"pool": pool}
        exec(compile(f"def ask():\n    pool.alloc({n})", f"file{n}.py", "exec"), names)
        asks.append(names["ask"])
    thresholds, enabled = gc.get_threshold(), gc.isenabled()
    gc.collect()
    gc.set_threshold(3, 1000, 1000)
    try:
        with trace.record(pool, path, sites=1):
            for n, ask in enumerate(asks):
                gc.disable()
                for _ in range(5):
                    Cycle()
                kept.append([[] for _ in range(n % 7)])  # where the collector begins
                gc.enable()
                ask()
    finally:
        gc.set_threshold(*thresholds)
        gc.collect()
        if not enabled:
            gc.disable()
    found = trace.load(path)
    events = found.events[found.events["operation"] == trace.OPERATIONS["alloc"]]
    for nbytes, site in zip(events["nbytes"].tolist(), events["site"].tolist(), strict=True):
        assert found.sites[site][0].file == f"file{nbytes}.py"


def test_a_method_has_its_class_in_its_name(path):
    pool = arenapy.Pool()
    with trace.record(pool, path, sites=4):
        kept = Holder().method(pool)
    names = [[frame.function for frame in site] for site in allocations(path)]
    assert [one[:2] for one in names] == [["inner", "outer"]] * 2
    assert any("Holder.method" in name for name in names[0])
    del kept


def test_every_block_of_alloc_many_has_its_site(path):
    pool = arenapy.Pool()
    with trace.record(pool, path, sites=1):
        pool.alloc_many([1, 2, 3])  # many
    assert allocations(path) == [(Frame(HERE, line("# many"), sys._getframe().f_code.co_name),)] * 3


def test_arrays_of_numpy_have_sites(path):
    """Also those that NumPy's own Python code makes: its frames are on the stack, and then ours."""
    pool = arenapy.Pool()
    with trace.record(pool, path, sites=8), arenapy.numpy_memory(pool):
        ones = np.ones(5000)  # plain
        wide = np.tile(ones, 3)  # by NumPy's Python code
    found = allocations(path)
    lines = {frame.line for site in found for frame in site if frame.file == HERE}
    assert {line("# plain"), line("# by NumPy's Python code")} <= lines
    assert any("numpy" in site[0].file for site in found)
    del wide


def test_code_without_the_interpreter_has_no_site(path):
    """A loop in C that lets the GIL go; and the next allocation of Python has its own."""
    recorder = Recorder(path, "Probe", 4)
    recorder.start()
    slots = np.array([0, 1, ~0, ~1], "i4")
    run(NoHeap(), slots, np.ones(4, "u8"), 2, recorder=recorder)
    recorder.add("alloc", 1, 1)  # Python
    recorder.stop()
    first, second, third = allocations(path)
    assert first == second == ()
    assert third[0].line == line("# Python")


def test_only_allocations_have_sites(path):
    recorder = Recorder(path, "Probe", 4)
    recorder.start()
    for name in trace.OPERATIONS:
        recorder.add(name, 1, 1)
    recorder.stop()
    events = trace.load(path).events
    assert (events["site"] != 0).tolist() == [name == "alloc" for name in trace.OPERATIONS]


def test_a_stream_and_a_site(path):
    recorder = Recorder(path, "Probe", 1)
    recorder.start()
    recorder.add("alloc", 1, 1, 77)
    recorder.add("alloc", 2, 1)
    recorder.stop()
    events = trace.load(path).events
    assert events["stream"].tolist() == [77, 0]
    assert (events["site"] > 0).all()


def test_threads_have_their_own_stacks(path):
    """At once, past many exchanges of buffers: every event has what its own thread runs."""
    pool = arenapy.Pool()
    n, each = 4, 20_000
    space = {}
    for k in range(n):
        exec(f"def thread_{k}(pool):\n    for _ in range({each}): pool.alloc({k + 1})", space)
    with trace.record(pool, path, sites=2):
        threads = [threading.Thread(target=space[f"thread_{k}"], args=(pool,)) for k in range(n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = trace.load(path)
    assert found.complete
    is_alloc = found.events["operation"] == trace.OPERATIONS["alloc"]
    for k in range(n):
        mine = found.events[is_alloc & (found.events["nbytes"] == k + 1)]
        assert len(mine) == each
        functions = {found.sites[site][0].function for site in np.unique(mine["site"])}
        assert functions == {f"thread_{k}"}


def test_a_forked_child_writes_no_text(path):
    pool = arenapy.Pool()
    with trace.record(pool, path, sites=2):
        child = os.fork()
        if child == 0:
            inner(pool)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        outer(pool)
    assert allocations(path) == [(INNER, OUTER)]


def test_names_that_would_break_a_line(path):
    recorder = Recorder(path, "Probe", 1)
    recorder.start()
    names = ["a\tb\nc\0d.py".replace("\0", "\x01"), "größe.py", "bad\udcff.py", "", "x" * 1000]
    for name in names:
        code = compile("def ask(add):\n    add('alloc', 1, 1)", name, "exec")
        space = {}
        exec(code, space)
        space["ask"](recorder.add)
    recorder.stop()
    files = [site[0].file for site in allocations(path)]
    assert files == ["a?b?c?d.py", "größe.py", "bad\\udcff.py", "", "x" * 1000]


def test_import_machinery_and_runners_are_not_callers(path):
    recorder = Recorder(path, "Probe", 8)
    recorder.start()
    nest = "def f(then):\n    then()"
    calls = lambda: recorder.add("alloc", 1, 1)  # noqa: E731
    for name in ("one.py", "<frozen importlib._bootstrap>", "two.py", "<frozen runpy>"):
        space = {}
        exec(compile(nest, name, "exec"), space)
        calls = (lambda f, then: lambda: f(then))(space["f"], calls)
    calls()
    recorder.stop()
    (site,) = allocations(path)
    files = [frame.file for frame in site if frame.file != HERE]
    assert files == ["one.py", "two.py"]


def test_what_is_no_caller_does_not_count(path):
    """Neither in a trace nor in debug mode."""
    recorder = Recorder(path, "Probe", 3)
    recorder.start()
    nest = "def f(then):\n    return then()"
    slab = arenapy.Slab(64, 1, debug=True)
    calls = lambda: (recorder.add("alloc", 1, 1), slab.alloc())  # noqa: E731
    machinery = ["<frozen runpy>", "<frozen importlib._bootstrap>"] * 3
    for name in ["three.py", *machinery, "two.py", "one.py"]:
        space = {}
        exec(compile(nest, name, "exec"), space)
        calls = functools.partial(space["f"], calls)
    _, block = calls()
    recorder.stop()
    (site,) = allocations(path)
    assert [os.path.basename(frame.file) for frame in site] == [
        os.path.basename(HERE), "three.py", "two.py"
    ]  # fmt: skip
    assert "three.py" in repr(block) and "two.py" in repr(block)


@pytest.mark.no_sanitizer  # a long count; other tests run the same code there
@pytest.mark.full
def test_more_stacks_than_are_told_apart(path):
    """65,536 of them; what comes later has no site, and those that are known keep theirs."""
    most = 1 << 16
    recorder = Recorder(path, "Probe", 1)
    recorder.start()

    def ask():
        recorder.add("alloc", 1, 1)

    code = ask.__code__
    asking = [
        types.FunctionType(code.replace(co_firstlineno=n), globals(), closure=ask.__closure__)
        for n in range(1, most + 11)
    ]
    for one in [*asking, *asking[:5]]:
        one()
    recorder.stop()
    found = trace.load(path)
    lines = [site[0].line if site else 0 for site in allocations(path)]
    assert lines == [*range(2, most + 2), *[0] * 10, *range(2, 7)]
    assert len(found.sites) == most + 1


def test_a_signal_at_a_new_stack_is_not_lost(path):
    """Its text is made in a function that cannot raise."""
    pool = arenapy.Pool()
    pool.alloc(0).release()  # so that it need not ask its source
    strike = ctypes.pythonapi.PyErr_SetInterruptEx  # which returns 0, and runs no handler
    with trace.record(pool, path, sites=4), pytest.raises(KeyboardInterrupt):
        pool.alloc_many(map(strike, [signal.SIGINT]))
        time.sleep(10)
    assert trace.load(path).complete


def test_sites_that_make_no_sense(path):
    for sites in (-1, 65):
        with pytest.raises(ValueError, match=f"sites={sites}"):
            trace.record(arenapy.Pool(), path, sites=sites)
    with pytest.raises(TypeError):
        Recorder(path, "Probe", "1")
    assert not path.exists()


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="no allocation starts the collector there")
def test_looking_at_the_stack_does_not_collect(path):
    """An allocation may come from where no other code may run: so no garbage is collected in it."""
    recorder = Recorder(path, "Probe", 8)
    recorder.start()
    add = recorder.add
    before = gc.get_threshold()
    seen = []

    def watch(phase, info):
        seen.append(phase)

    def ask(depth):
        if depth:
            return ask(depth - 1)  # each one makes a frame into an object when it is looked at
        gc.set_threshold(1)
        add("alloc", 1, 1)
        found = len(seen)
        gc.set_threshold(*before)
        return found

    gc.callbacks.append(watch)
    try:
        assert ask(5) == 0
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(watch)
    assert gc.isenabled()
    recorder.stop()
    assert len(allocations(path)[0]) == 8


# ---- files

PRINTABLE = st.text(
    st.characters(exclude_categories=["C", "Z"]) | st.just(" "), max_size=20
)  # as `str.isprintable` has it
FRAME = st.builds(
    Frame,
    PRINTABLE,
    st.integers(0, 10_000),
    PRINTABLE,
)
SITES = st.lists(st.lists(FRAME, min_size=1, max_size=4).map(tuple), unique=True, max_size=6)


@given(SITES, st.data())
def test_sites_are_saved_and_loaded(tmp_path_factory, sites, data):
    path = tmp_path_factory.getbasetemp() / "saved-sites.trace"
    events = np.zeros(8, trace.EVENT)
    events["operation"] = 1
    place = st.integers(0, len(sites))
    events["site"] = [data.draw(place) for _ in events]
    events["stream"] = [data.draw(st.sampled_from([0, 5])) for _ in events]
    made = trace.Trace(events, sites=((), *sites))
    made.save(path)
    found = trace.load(path)
    assert found.sites == made.sites
    assert np.array_equal(found.events, events)


def test_a_file_that_was_cut_has_the_sites_before(path):
    pool = arenapy.Pool()
    with trace.record(pool, path, sites=2):
        outer(pool)
        inner(pool)
    whole = path.read_bytes()
    expected = allocations(path)
    for length in range(HEADER.itemsize, len(whole), 5):
        path.write_bytes(whole[:length])
        found = allocations(path)
        assert all(site in (one, ()) for site, one in zip(found, expected, strict=False))
    path.write_bytes(whole)
    assert allocations(path) == expected and all(expected)


def test_stacks_that_differ_in_no_line_are_one_site(path):
    pool = arenapy.Pool()
    with trace.record(pool, path, sites=1):
        kept = pool.alloc(1), pool.alloc(2)
    assert len(set(allocations(path))) == 1
    assert len(trace.load(path).sites) == 2
    del kept


def test_files_of_version_1_are_read(path):
    """Written out by hand, as docs/traces.md describes them."""
    header = np.zeros(1, HEADER)
    header["magic"], header["version"] = np.void(b"arenatrc"), 1
    header["header_nbytes"], header["event_nbytes"] = 128, 24
    header["complete"], header["events"], header["kind"] = 1, 4, b"Pool"
    records = np.zeros(4, RECORD)
    words = [(1, 5, 0x1000, 100), (6, 6, 77, 0), (2, 7, 0x1000, 0), (5, 9, 0, 4096)]
    for record, (operation, at, block, size) in zip(records, words, strict=True):
        record["time"] = operation << 56 | at
        record["block"], record["size"] = block, 1 << 48 | size
    path.write_bytes(header.tobytes() + records.tobytes())
    found = trace.load(path)
    assert found.complete and found.kind == "Pool" and found.sites == ((),)
    names = "time", "address", "nbytes", "stream", "site", "thread", "operation"
    assert found.events[list(names)].tolist() == [
        (5, 0x1000, 100, 0, 0, 1, 1),
        (7, 0x1000, 0, 77, 0, 1, 2),
        (9, 0, 4096, 0, 0, 1, 5),
    ]
