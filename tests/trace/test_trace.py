"""Traces: what is in the file is what was done, whatever happens to the process and the disk."""

import errno
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial

import numpy as np
import pytest
from children import in_child
from helpers import in_threads
from hypothesis import given
from hypothesis import strategies as st

from arenapy import Bump, Pool, Shared, Slab, trace
from arenapy.base.text import printable
from arenapy.commands.replay.loop import NoHeap, run
from arenapy.commands.replay.program import program
from arenapy.diagnostics.recorder import Recorder
from arenapy.trace.format import HEADER
from arenapy.trace.view import View

PLACES = 10922  # events in one of the recorder's buffers, the clock event at the end included
NAMES = list(trace.OPERATIONS)
MAX_NBYTES = (1 << 48) - 1

WORD = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2**63, 2**64 - 1])
SIZE = st.integers(0, MAX_NBYTES) | st.sampled_from([0, 1, MAX_NBYTES])
CALL = st.tuples(st.sampled_from(NAMES), WORD, SIZE, st.just(0) | WORD).filter(
    lambda call: call[1] + call[2] < 1 << 64 and call[:2] != ("mark", 0)
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.trace"


def started(path, kind="Probe"):
    recorder = Recorder(path, kind)
    recorder.start()
    return recorder


def calls_in(events):
    """Events as the calls that made them."""
    names = {code: name for name, code in trace.OPERATIONS.items()}
    fields = events["operation"], events["address"], events["nbytes"], events["stream"]
    return [(names[code], *rest) for code, *rest in zip(*(f.tolist() for f in fields), strict=True)]


def some_calls(n, seed=1):
    draw = random.Random(seed)
    return [
        (draw.choice(NAMES), draw.getrandbits(63), draw.getrandbits(48), draw.choice([0, 0, 7, 9]))
        for _ in range(n)
    ]


# ---- what is recorded


@given(calls=st.lists(CALL), flushes=st.sets(st.integers(0, 50)))
def test_every_call_is_in_the_file(tmp_path_factory, calls, flushes):
    path = tmp_path_factory.getbasetemp() / "given.trace"
    recorder = started(path)
    for i, call in enumerate(calls):
        recorder.add(*call)
        if i in flushes:
            recorder.flush()
            assert calls_in(trace.load(path).events) == calls[: i + 1]
    recorder.stop()
    found = trace.load(path)
    assert calls_in(found.events) == calls
    assert found.complete
    assert (np.diff(found.events["time"].astype("i8")) >= 0).all()
    assert len(set(found.events["thread"].tolist())) == bool(calls)


@pytest.mark.parametrize("n", [0, 1, *range(PLACES - 3, PLACES + 3), 3 * PLACES])
@pytest.mark.parametrize("stream_at_the_end", [False, True])
def test_buffers_are_exchanged_without_loss(path, n, stream_at_the_end):
    calls = [("alloc", 64 * i, i, 0) for i in range(n)]
    calls += [("free", 1, 2, 3)] * stream_at_the_end
    recorder = started(path)
    for call in calls:
        recorder.add(*call)
    recorder.stop()
    assert calls_in(trace.load(path).events) == calls


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (("alloc", 1, MAX_NBYTES + 1), "more than a trace can store"),
        (("alloc", 2**64 - 100, 100), "beyond the last address"),
        (("mark", 0), "no mark's number"),
    ],
)
def test_what_no_file_can_hold_is_refused(path, call, why):
    recorder = started(path)
    with pytest.raises(ValueError, match=why):
        recorder.add(*call)
    recorder.stop()
    assert len(trace.load(path)) == 0


@pytest.mark.parametrize("kind", ["日本語" * 10, "a" * 40, "a\0b", "\ud800", "\x1b[2J" * 9])
def test_a_kind_that_a_file_cannot_hold_is_cut(path, kind):
    made = trace.synthetic(seed=1, allocations=10)
    trace.Trace(made.events, kind).save(path)
    found = trace.load(path).kind
    assert printable(kind).startswith(found)
    assert len(printable(kind).encode()) < 32 or 28 < len(found.encode()) < 32


def test_the_header_says_what_was_recorded(path):
    before = time.time_ns()
    started(path, "Größe").stop()
    found = trace.load(path)
    assert found.kind == "Größe"
    assert before <= found.started <= time.time_ns()
    assert found.process == os.getpid()
    assert found.clock in ("tsc", "cntvct", "kernel")
    assert path.stat().st_size == HEADER.itemsize


def test_times_are_those_of_the_kernel(path):
    """Between two readings of the kernel's clock an event has a time that lies between them."""
    recorder = started(path)
    begun = time.monotonic_ns()
    bounds = []
    for pause in (0, 0.05, 0, 0.1):
        time.sleep(pause)
        before = time.monotonic_ns()
        recorder.add("mark", 1)
        bounds.append((before - begun, time.monotonic_ns() - begun))
    recorder.stop()
    # Within a millisecond: between start() and `begun` this process may have waited.
    offset = trace.load(path).events["time"].astype("i8")[0] - bounds[0][0]
    for at, (low, high) in zip(trace.load(path).events["time"].tolist(), bounds, strict=True):
        assert low - 1e6 <= at - offset <= high + 1e6


def test_threads_share_a_recorder(path):
    """All events are there, each thread's in its order under a number of its own."""
    n_threads, each = 4, 2 * PLACES
    recorder = started(path)

    def work(k):
        for i in range(each):
            recorder.add("alloc", k, i, k if i % 64 == 0 else 0)

    in_threads(*(partial(work, k) for k in range(n_threads)))
    recorder.stop()
    events = trace.load(path).events
    assert len(events) == n_threads * each
    assert (np.diff(events["time"].astype("i8")) >= 0).all()
    numbers = set()
    for k in range(n_threads):
        mine = events[events["address"] == k]
        assert mine["nbytes"].tolist() == list(range(each))
        assert mine["stream"].tolist() == [k if i % 64 == 0 else 0 for i in range(each)]
        numbers |= set(mine["thread"].tolist())
    assert len(numbers) == n_threads


@pytest.mark.full
def test_threads_without_the_gil_share_a_recorder(path):
    """The same from C, where they do run at the same time, past many exchanges of buffers."""
    n_threads, each = 3, 100 * PLACES
    slots = np.tile(np.array([0, ~0], "i4"), each // 2)
    recorder = started(path)

    def work(k):
        sizes = np.arange(each, dtype="u8") | np.uint64(k << 40)
        run(NoHeap(), slots, sizes, 1, recorder=recorder)

    in_threads(*(partial(work, k) for k in range(n_threads)))
    recorder.stop()
    events = trace.load(path).events
    assert len(events) == n_threads * each
    allocs = events[events["operation"] == trace.OPERATIONS["alloc"]]
    for k in range(n_threads):
        mine = allocs[allocs["nbytes"] >> np.uint64(40) == k]
        expected = np.arange(0, each, 2) + (k << 40)
        assert np.array_equal(mine["nbytes"], expected)
        assert len(set(mine["thread"].tolist())) == 1


# ---- fork, death, disks


def test_a_forked_child_records_nothing(path, tmp_path):
    recorder = started(path)
    recorder.add("alloc", 1, 1)

    def use():
        recorder.add("alloc", 2, 2)
        assert not recorder.recording
        recorder.flush()
        recorder.stop()
        own = started(tmp_path / "child.trace")
        own.add("alloc", 3, 3)
        own.stop()

    assert in_child(use) == 0
    recorder.add("free", 1, 1)
    recorder.stop()
    assert calls_in(trace.load(path).events) == [("alloc", 1, 1, 0), ("free", 1, 1, 0)]
    assert trace.load(path).complete
    assert calls_in(trace.load(tmp_path / "child.trace").events) == [("alloc", 3, 3, 0)]


@pytest.mark.long
def test_a_fork_amid_recording_leaves_no_lock_behind(path):
    recorder = started(path)
    stop = threading.Event()
    slots = np.tile(np.array([0, ~0], "i4"), 50_000)

    def work():
        while not stop.is_set():
            run(NoHeap(), slots, np.zeros(len(slots), "u8"), 1, recorder=recorder)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(15):
            child = os.fork()
            if child == 0:
                recorder.add("mark", 5)  # would hang
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        thread.join()
    recorder.stop()
    found = trace.load(path)
    assert found.complete
    assert not (found.events["operation"] == trace.OPERATIONS["mark"]).any()


KILLED = """
    import os, signal, sys
    from arenapy.diagnostics.recorder import Recorder
    recorder = Recorder(sys.argv[1])
    recorder.start()
    for i in range({before}):
        recorder.add("alloc", i, i)
    {flush}
    for i in range({after}):
        recorder.add("free", i, i)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("before", "flush", "after", "kept"),
    [(10, "", 0, 0), (10, "recorder.flush()", 10, 10), (PLACES, "", 5, PLACES - 1)],
)
def test_a_killed_process_leaves_what_was_flushed(path, before, flush, after, kept):
    text = textwrap.dedent(KILLED.format(before=before, flush=flush, after=after))
    subprocess.run([sys.executable, "-c", text, path], check=False)
    found = trace.load(path)
    assert found.events["address"].tolist() == list(range(kept))
    assert not found.complete
    assert "cut" in str(found.summary())
    if not kept:
        for use in (View, program):
            with pytest.raises(ValueError, match="no allocation, and it was cut"):
                use(found)


FULL = """
    import errno, resource, sys
    from arenapy.diagnostics.recorder import Recorder
    room, n = int(sys.argv[2]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
    recorder = Recorder(sys.argv[1])
    recorder.start()
    for i in range(n):
        recorder.add("alloc", i, i)
    try:
        recorder.stop()
    except OSError as error:
        assert error.errno == errno.EFBIG, error
        assert f"{recorder.lost} are lost" in str(error), error
        print(recorder.lost)
"""


@pytest.mark.parametrize(
    ("room", "n"), [(128 + 24 * 50 + 11, 100), (128 + 24 * PLACES + 1000, 3 * PLACES)]
)
def test_a_full_disk_is_an_error_at_the_end(path, room, n):
    """The process lives, and the file has every event before; a file size limit stands for it."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FULL), path, str(room), str(n)],
        check=True,
        capture_output=True,
        text=True,
    )
    found = trace.load(path)
    assert not found.complete
    assert path.stat().st_size == room
    assert found.events["address"].tolist() == list(range(n - int(done.stdout)))


CLOSED = """
    import os, sys
    import arenapy
    from arenapy import trace

    path, how, n = sys.argv[1], sys.argv[2], int(sys.argv[3])
    pool = arenapy.Pool()
    recording = trace.record(pool, path)
    recorder = recording.__enter__()
    os.closerange(3, 1024)  # as daemons do
    first = open("user.dat", "w+b", 0)
    if how != "opens none":
        first.write(b"precious" * 1000)
    else:
        first.close()
    for _ in range(n):
        pool.alloc(10)
    if how == "drops":
        del recording, recorder
        pool._record(None)
    else:
        try:
            recording.__exit__(None, None, None)
        except OSError as error:
            assert error.errno == 9 and "closed the trace's descriptor" in str(error), error
        else:
            raise AssertionError("the loss was not told")
    if how != "opens none":
        first.write(b"end")
        first.seek(0)
        assert first.read() == b"precious" * 1000 + b"end"
"""


@pytest.mark.parametrize("how", ["stops", "drops", "opens none"])
@pytest.mark.parametrize("n", [10, 2 * PLACES])
@pytest.mark.full
def test_a_program_that_closes_every_descriptor(path, how, n, tmp_path):
    """Its files may get the number that the trace's descriptor had, and keep their bytes."""
    command = [sys.executable, "-c", textwrap.dedent(CLOSED), path, how, str(n)]
    subprocess.run(command, check=True, cwd=tmp_path)
    assert not trace.load(path).complete


def test_a_file_that_was_cut_is_read_as_far_as_it_goes(path):
    calls = some_calls(20)
    recorder = started(path)
    for call in calls:
        recorder.add(*call)
    recorder.stop()
    whole = path.read_bytes()
    for length in range(HEADER.itemsize, len(whole)):
        path.write_bytes(whole[:length])
        found = trace.load(path)
        assert not found.complete
        assert calls_in(found.events) == calls[: len(found.events)]
    for length in range(HEADER.itemsize):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="no trace"):
            trace.load(path)


@pytest.mark.parametrize(
    ("offset", "text", "message"),
    [
        (0, b"X", "no trace"),
        (8, b"\x03", "version 3"),
        (HEADER.itemsize + 7, b"\xee", "operation 238"),
    ],
)
def test_other_files_are_refused(path, offset, text, message):
    recorder = started(path)
    recorder.add("alloc", 1, 1)
    recorder.stop()
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(text)
    with pytest.raises(ValueError, match=message) as refusal:
        trace.load(path)
    assert path.name in str(refusal.value)


def test_places_that_cannot_be_recorded_to(tmp_path):
    for place, kind in [
        (tmp_path, IsADirectoryError),
        (tmp_path / "no" / "file", FileNotFoundError),
        ("/dev/full", OSError),
    ]:
        recorder = Recorder(place)
        with pytest.raises(kind):
            recorder.start()
        assert not recorder.recording
    with pytest.raises(OSError, match="not a regular file"):
        Recorder("/dev/null").start()
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(OSError, match="not a regular file"):  # and no waiting for a reader
        Recorder(fifo).start()


def test_recorders_refuse_what_makes_no_sense(path):
    recorder = Recorder(path)
    for call in (recorder.flush, recorder.stop, lambda: recorder.add("alloc", 1)):
        with pytest.raises(ValueError, match="not started"):
            call()
    assert not path.exists()
    recorder.start()
    with pytest.raises(ValueError, match="started before"):
        recorder.start()
    for arguments in [("allocate", 1), ("clock", 1)]:
        with pytest.raises(ValueError, match=arguments[0]):
            recorder.add(*arguments)
    names = ("address", "nbytes", "stream")
    for i, name in enumerate(names):
        for error, wrong in [(ValueError, -1), (ValueError, 2**64), (TypeError, 1.5)]:
            arguments = [1, 1, 1]
            arguments[i] = wrong
            with pytest.raises(error, match=f"^{name}={wrong}: need a"):
                recorder.add("alloc", *arguments)
    with pytest.raises(TypeError, match="address='1': need an int, not str"):
        recorder.add("alloc", "1")
    with pytest.raises(TypeError, match="kind=None: need a str"):
        Recorder(path, None)
    recorder.stop()
    recorder.stop()
    assert len(trace.load(path)) == 0
    for kind in ("x" * 32, "é" * 16, "a\0b"):
        with pytest.raises(ValueError, match="at most 31 bytes"):
            Recorder(path, kind)


def test_a_dropped_recorder_has_written_what_it_had(path):
    recorder = started(path)
    recorder.add("alloc", 1, 2)
    del recorder
    assert calls_in(trace.load(path).events) == [("alloc", 1, 2, 0)]


# ---- record()


class Fake:
    """An allocator's side of the protocol."""

    def __init__(self):
        self.recorder = None

    def _record(self, recorder, ended=None):
        if recorder is not None and self.recorder is not None:
            raise ValueError("recording already")
        self.recorder = recorder

    def _reserved(self):
        return [(4096, 8192)]


def test_record_attaches_and_detaches(path):
    allocator = Fake()
    with trace.record(allocator, path) as recorder:
        assert allocator.recorder is recorder
        recorder.add("alloc", 1, 2)
    assert allocator.recorder is None
    assert not recorder.recording
    assert trace.load(path).kind == "Fake"
    assert calls_in(trace.load(path).events) == [("grow", 4096, 8192, 0), ("alloc", 1, 2, 0)]


def test_a_recording_that_cannot_begin_detaches(tmp_path):
    allocator = Fake()
    with pytest.raises(IsADirectoryError), trace.record(allocator, tmp_path):
        raise AssertionError("entered")
    assert allocator.recorder is None


def test_a_failed_end_does_not_mask_an_exception(path, monkeypatch):
    def full(*_arguments):
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(KeyError) as raised, trace.record(Fake(), path):
        monkeypatch.setattr(os, "pwrite", full)
        raise KeyError("mine")
    assert any("full" in note for note in raised.value.__notes__)
    with pytest.raises(OSError, match="full"), trace.record(Fake(), path):
        pass


SHARED = {
    "bump": lambda: Bump(1 << 20, Shared()),
    "pool": lambda: Pool(1 << 20, Shared()),
    "slab": lambda: Slab(64, 100, Shared()),
}


@pytest.mark.parametrize("maker", SHARED)
def test_a_recording_ends_after_a_region(path, maker):
    allocator = SHARED[maker]()
    with trace.record(allocator, path) as recorder:
        allocator.alloc(10)
        for region in allocator.regions:
            region.close()
    assert not recorder.recording
    assert trace.load(path).complete


@pytest.mark.parametrize("maker", SHARED)
def test_a_recording_ends_in_a_forked_child(path, maker):
    """There as well as here, where it is complete."""
    allocator = SHARED[maker]()
    recording = trace.record(allocator, path)
    with recording:
        allocator.alloc(10)
        assert in_child(lambda: recording.__exit__(None, None, None)) == 0
    assert [event[0] for event in calls_in(trace.load(path).events)][:2] == ["grow", "alloc"]
    assert trace.load(path).complete


@pytest.mark.parametrize("maker", [lambda: Bump(1 << 20), Pool, lambda: Slab(64, 100)])
def test_a_forked_child_makes_a_recording_of_its_own(path, maker, tmp_path):
    """The one that it inherits records nothing there."""
    allocator = maker()
    recording = trace.record(allocator, path)

    def use():
        with trace.record(allocator, tmp_path / "child.trace"):
            allocator.alloc(20)
            with pytest.raises(ValueError, match="already being recorded"):
                trace.record(allocator, tmp_path / "other.trace").__enter__()
            recording.__exit__(None, None, None)  # as an exception leaves both: not this one
            allocator.alloc(30)

    with recording:
        allocator.alloc(10)
        assert in_child(use) == 0
    for file, n in (path, 1), (tmp_path / "child.trace", 2):
        loaded = trace.load(file)
        assert loaded.complete and loaded.summary().operations["alloc"] == n


def test_a_recording_that_was_not_entered_ends_no_other_one(tmp_path):
    pool = Pool()
    one, other = (trace.record(pool, tmp_path / name) for name in "ab")
    with pytest.raises(ValueError, match="not entered"):
        one.__exit__(None, None, None)
    with one:
        pool.alloc(10)
        with pytest.raises(ValueError, match="not entered"):
            other.__exit__(None, None, None)
        pool.alloc(20)
    with other, pytest.raises(ValueError, match="not entered"):
        one.__exit__(None, None, None)
    assert trace.load(tmp_path / "a").summary().operations["alloc"] == 2
