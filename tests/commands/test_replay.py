"""Replays: the program is what the trace says, and the figures are those of what was run."""

import ctypes
import json
import os
import pickle
import resource
import subprocess
import sys
import threading

import numpy as np
import pytest
from helpers import exact
from hypothesis import given
from hypothesis import strategies as st

import arenapy
from arenapy import trace
from arenapy.commands.replay import command as replay
from arenapy.commands.replay import worker
from arenapy.commands.replay.loop import BumpHeap, MallocHeap, NoHeap, PoolHeap, resident, run
from arenapy.commands.replay.program import Program, program
from arenapy.commands.replay.worker import PEERS, Peer, make_heap
from arenapy.diagnostics.recorder import Recorder

MIB = 1 << 20
CODES = trace.OPERATIONS
LIBC = ctypes.CDLL("libc.so.6")
MALLOC, FREE = (ctypes.cast(LIBC[name], ctypes.c_void_p).value for name in ("malloc", "free"))
TIMEOUT = 120


def traced(*calls):
    """A trace of (operation, address, nbytes)."""
    events = np.zeros(len(calls), trace.EVENT)
    for event, (name, *rest) in zip(events, calls, strict=True):
        event["operation"] = CODES[name]
        event["address"], event["nbytes"] = (*rest, 0)[:2]
    return trace.Trace(events, "made")


def steps(found):
    """A program as words: '+' and bytes, or '-' and bytes."""
    return [
        f"{'+' if slot >= 0 else '-'}{size}"
        for slot, size in zip(found.slots.tolist(), found.sizes.tolist(), strict=True)
    ]


# ---- programs


@pytest.mark.parametrize(
    ("calls", "expected", "ignored"),
    [
        ([("alloc", 1, 5), ("free", 1, 0), ("alloc", 1, 6)], "+5 -5 +6", 0),
        ([("free", 9, 1), ("alloc", 1, 5), ("free", 2, 5)], "+5", 2),
        ([("alloc", 1, 5), ("alloc", 1, 6), ("free", 1)], "+5 -5 +6 -6", 0),
        ([("alloc", 1, 5), ("alloc", 2, 6), ("reset", 0), ("free", 1)], "+5 +6 -6 -5", 1),
        (
            [("alloc", 1, 5), ("mark", 8), ("alloc", 2, 6), ("alloc", 3, 7), ("reset", 8)],
            "+5 +6 +7 -7 -6",
            0,
        ),
        # The mark of a number is the newest; resetting to an older one ends what came after.
        (
            [("mark", 8), ("alloc", 1, 5), ("mark", 8), ("alloc", 2, 6), ("reset", 8)],
            "+5 +6 -6",
            0,
        ),
        ([("mark", 8), ("alloc", 1, 5), ("mark", 9), ("alloc", 2, 6), ("reset", 8)],
         "+5 +6 -6 -5", 0),
        ([("alloc", 1, 5), ("trim", 0, 4096), ("free", 1, 5)], "+5 -5", 0),
    ],
)  # fmt: skip
def test_programs(calls, expected, ignored):
    found = program(traced(*calls))
    assert steps(found) == expected.split()
    assert found.ignored == ignored


@given(
    st.lists(
        st.tuples(st.just("alloc"), st.integers(1, 9), st.integers(0, 300))
        | st.tuples(st.just("free"), st.integers(1, 9))
        | st.tuples(st.sampled_from(["mark", "reset"]), st.integers(10, 12))
    )
)
def test_any_trace_becomes_a_program_that_can_run(calls):
    """Slots are filled when free and freed when filled, and live() counts what is live."""
    if not any(name == "alloc" for name, *_ in calls):
        with pytest.raises(ValueError, match="no allocation"):
            program(traced(*calls))
        return
    found = program(traced(*calls))
    filled = {}
    for slot, size, live in zip(found.slots, found.sizes, found.live(), strict=True):
        assert -found.count <= slot < found.count
        if slot >= 0:
            assert slot not in filled
            filled[slot] = size
        else:
            assert filled.pop(~slot) == size
        assert live == sum(map(int, filled.values()))
    assert sum(slot >= 0 for slot in found.slots) == sum(name == "alloc" for name, *_ in calls)
    assert run(PoolHeap(arenapy.Pool()), *arguments(found), "first")[1] == len(found)


def arguments(found):
    return found.slots, found.sizes, found.count


def test_a_program_goes_to_another_process_whole(tmp_path):
    found = program(traced(("alloc", 1, 5), ("alloc", 2, 6), ("free", 1), ("free", 7)))
    found.save(tmp_path)
    again = Program.load(tmp_path)
    assert steps(again) == steps(found) == ["+5", "+6", "-5"]
    assert (again.count, again.ignored) == (found.count, found.ignored) == (2, 1)


# ---- runs


@given(
    st.lists(st.tuples(st.just("alloc"), st.integers(1, 20), st.integers(0, 500)), min_size=1),
    st.randoms(use_true_random=False),
)
def test_a_bump_needs_just_what_is_said(calls, random):
    """It runs in that many bytes, and not in one less."""
    mixed = [call for call in calls for call in (call, ("free", random.randint(1, 20)))]
    found = program(traced(*mixed))
    needed = found.bump_bytes()
    assert run(BumpHeap(exact(needed)), *arguments(found))[1] == len(found)
    if needed > 1:
        assert run(BumpHeap(exact(needed - 1)), *arguments(found))[1] < len(found)


def test_a_bump_starts_over_when_nothing_is_live():
    calls = [("alloc", 1, 100), ("alloc", 2, 100), ("free", 1), ("free", 2), ("alloc", 3, 200)]
    found = program(traced(*calls))
    assert found.bump_bytes() == 128 + 100
    assert run(BumpHeap(exact(228)), *arguments(found))[1] == len(found)


def test_a_replay_asks_for_what_the_program_says():
    """Sizes, order, and which block is freed, seen by a malloc of our own."""
    log, blocks = [], {}

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)
    def take(n):
        block = ctypes.create_string_buffer(n)
        blocks[ctypes.addressof(block)] = block
        log.append(f"+{n}")
        return ctypes.addressof(block)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def give(address):
        block = blocks.pop(address)
        assert block[-1] == b"\1"  # the last byte was written
        log.append(f"-{len(block)}")

    heap = MallocHeap(*(ctypes.cast(call, ctypes.c_void_p).value for call in (take, give)))
    found = program(
        traced(*[("alloc", i, 100 + i) for i in range(9)], *[("free", i * 5 % 9) for i in range(9)])
    )
    seconds, done, peak, at = run(heap, *arguments(found), "pages")
    assert log == steps(found)
    assert (done, peak, at) == (18, 0, 0)
    assert seconds > 0
    assert not blocks
    leaky = program(traced(("alloc", 1, 10), ("alloc", 2, 20), ("free", 1)))
    run(heap, *arguments(leaky), "pages")
    assert not blocks


def test_a_refusal_ends_a_replay():
    found = program(traced(("alloc", 1, 1000), ("alloc", 2, 2000), ("free", 1)))
    assert run(BumpHeap(exact(1024)), *arguments(found))[1] == 1


def test_a_replay_can_be_recorded(tmp_path):
    """What a pool did in a replay is, replayed from its own trace, the same program."""
    found = program(trace.synthetic(3, 500, 4 * MIB, [trace.Phase(1, 256 << 10)]))
    recorder = Recorder(tmp_path / "again.trace", "Pool")
    recorder.start()
    run(PoolHeap(arenapy.Pool()), *arguments(found), recorder=recorder)
    recorder.stop()
    assert steps(program(trace.load(recorder.path))) == steps(found)


def test_runs_that_make_no_sense():
    slots, sizes = np.zeros(1, "i4"), np.ones(1, "u8")
    with pytest.raises(ValueError, match="slot 0 of 0"):
        run(NoHeap(), slots, sizes, 0)
    with pytest.raises(ValueError, match="slot -3 of 2"):
        run(NoHeap(), slots - 3, sizes, 2)
    with pytest.raises(ValueError, match="2 sizes"):
        run(NoHeap(), slots, np.ones(2, "u8"), 1)
    with pytest.raises(ValueError, match="no memory"):
        run(NoHeap(), slots, sizes, 1, "pages")
    with pytest.raises(KeyError):
        run(NoHeap(), slots, sizes, 1, "all")
    with pytest.raises(OSError, match="statm"):
        resident(-1)


# ---- figures

BIG = 64 * MIB
ONE_BIG = traced(
    ("alloc", 1, BIG), ("free", 1), ("alloc", 2, BIG // 2), ("free", 2), ("alloc", 3, 64)
)


@pytest.mark.no_sanitizer
@pytest.mark.parametrize("name", ["bump", "pool", "malloc"])
@pytest.mark.sampled
def test_resident_memory_is_what_the_allocator_holds(name):
    (found,) = replay.replay(ONE_BIG, [name])
    assert found.note == ""
    assert found.peak_live == BIG
    assert BIG <= found.peak_reserved <= BIG + 4 * MIB
    assert found.ratio == found.peak_reserved / BIG
    assert found.fragmentation == 1 - BIG / found.peak_reserved
    assert found.event_ns > 0 and found.written_ns > 0


@pytest.mark.parametrize(("name", "size"), [("bump", "bump_bytes"), ("slab", "slab_items")])
def test_what_python_needs_is_not_the_allocators(monkeypatch, name, size):
    """The size of the allocator takes some lists to find out: they are resident before."""
    order = []

    def note(where, what):
        found = getattr(where, what)
        monkeypatch.setattr(where, what, lambda *given: order.append(what) or found(*given))

    note(Program, size)
    note(worker, "resident")
    worker.measure(name, program(ONE_BIG), written=True)
    assert order == [size, "resident", "resident"]


@pytest.mark.no_sanitizer
def test_nobody_holds_less_than_is_live(tmp_path):
    """A small malloc may get what Python had, which was resident before."""
    program(traced(*[("alloc", i, 1000) for i in range(20)])).save(tmp_path)
    assert replay.run_worker("malloc", tmp_path, "--written")["peak"] >= 20_000


@pytest.mark.no_sanitizer
@pytest.mark.parametrize("name", ["bump", "pool"])
def test_of_memory_that_stays_the_moment_with_the_most_live_counts(name):
    calls = [("alloc", 1, MIB), ("free", 1)]
    calls += [("alloc", i, MIB) for i in range(2, 66)] + [("free", i) for i in range(2, 66)]
    (found,) = replay.replay(traced(*calls), [name])
    assert found.fragmentation == pytest.approx(1 - 64 * MIB / found.peak_reserved)


@pytest.mark.parametrize("encoding", ["utf-16", "cp037"])
def test_the_encoding_of_the_users_text_does_not_matter(tmp_path, monkeypatch, encoding):
    program(traced(("alloc", 0, 9), ("free", 0))).save(tmp_path)
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    assert replay.run_worker("malloc", tmp_path)["steps"] == 2


@pytest.mark.no_sanitizer
def test_the_peak_is_found_where_it_is(tmp_path):
    """With blocks of 64 MiB from malloc, which come from and go to the kernel one by one."""
    calls = [("alloc", i, BIG) for i in range(3)]
    calls += [("free", i) for i in range(3)] + [("alloc", 9, BIG), ("free", 9)]
    found = program(traced(*calls))
    found.save(tmp_path)
    result = replay.run_worker("malloc", tmp_path, "--written")
    assert result["steps"] == len(found)
    assert result["at"] == 2
    assert 3 * BIG <= result["peak"] <= 3 * BIG + 2 * MIB


def test_the_first_byte_costs_no_memory():
    """Without writing, blocks of malloc are not resident: pages are what was written."""
    found = program(ONE_BIG)
    with open("/proc/self/statm") as file:
        peak = run(MallocHeap(MALLOC, FREE), *arguments(found), "first", file.fileno())[2]
    assert peak < BIG // 8


@pytest.mark.parametrize("name", [name for name, peer in PEERS.items() if peer.package])
@pytest.mark.sampled
@pytest.mark.full
def test_other_mallocs(name):
    """They run where the library is, and where it is not the package is named."""
    (found,) = replay.replay(trace.synthetic(1, 400, 32 * MIB, [trace.Phase(64, MIB)]), [name])
    try:
        ctypes.CDLL(PEERS[name].library)
    except OSError as error:
        if "static TLS" not in str(error):
            assert PEERS[name].package in found.note
            assert found.event_ns is None
            return
    assert found.note == ""
    assert 0.9 < found.ratio < 10


def test_a_wait_counts_its_own_length_however_late_it_ends():
    """It may be the end of a stop, as by Ctrl-Z, in which the worker did nothing either."""

    class Process:
        def __init__(self, waits):
            self.left = waits

        def communicate(self, timeout):
            self.left -= 1
            if self.left < 0:
                return "{}", ""
            raise subprocess.TimeoutExpired("worker", 26.0)

    most = len(list(replay.waits(6.1)))
    assert most > 6
    assert replay._words_of(Process(most - 1), 6.1) == ("{}", "")
    with pytest.raises(OSError, match="did not end within 6 s"):
        replay._words_of(Process(most), 6.1)


def test_a_library_that_is_not_there(monkeypatch):
    monkeypatch.setitem(PEERS, "ghost", Peer("none", "libghost.so.9", ("a", "b"), {}, "libghost9"))
    with pytest.raises(OSError, match=r"libghost\.so\.9"):
        make_heap("ghost", program(ONE_BIG))


def test_names_that_are_not_known():
    with pytest.raises(ValueError, match="'best' is not an allocator"):
        replay.replay(ONE_BIG, ["best"])


# ---- the command


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "arenapy", "replay", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


@pytest.fixture
def small(tmp_path):
    """A file with a trace that no arena is good for."""
    path = tmp_path / "small.trace"
    trace.synthetic(2, 2000, 8 * MIB, [trace.Phase(64, MIB), trace.Phase(64, 1 << 14)]).save(path)
    return path


@pytest.mark.full
def test_the_command_as_json(small):
    done = command(small, "--with", "bump,pool,malloc,loop", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["trace"]["operations"]["alloc"] == 2000
    by_name = {one["name"]: one for one in found["results"]}
    assert list(by_name) == ["bump", "pool", "malloc", "loop"]
    assert by_name["bump"]["event_ns"] is None
    assert "more than is ever live" in by_name["bump"]["note"]
    for name in "pool", "malloc":
        assert by_name[name]["peak_live"] == program(trace.load(small)).live().max()
        assert 0 <= by_name[name]["fragmentation"] < 1
    assert 0 < by_name["loop"]["event_ns"] < by_name["malloc"]["event_ns"]


def test_a_full_folder_is_said(tmp_path):
    """Here a limit of the size of files, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "arenapy", "replay", "--synthetic", "1", "--with", "pool"],
        capture_output=True, text=True, env={**os.environ, "TMPDIR": str(tmp_path)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000)),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "arenapy: [Errno 27] File too large\n")


@pytest.mark.full
def test_the_command_for_people(small):
    done = command(small, "--with", "bump,pool")
    assert done.returncode == 0, done.stderr
    assert "2,000 alloc, 2,000 free" in done.stdout
    assert "pool" in done.stdout and "bump: not run" in done.stdout


@pytest.mark.full
def test_a_trace_that_fits_an_arena(tmp_path):
    calls = [("mark", 5)]
    calls += [("alloc", 64 * i, 60) for i in range(1000)] + [("reset", 5)]
    traced(*calls).save(tmp_path / "a.trace")
    done = command(tmp_path / "a.trace", "--with", "bump", "--json")
    (found,) = json.loads(done.stdout)["results"]
    assert found["event_ns"] > 0
    assert "needs" in found["note"]  # 60 bytes take 64


@pytest.mark.full
def test_the_command_refuses(tmp_path, small):
    entry = {"action": "alloc", "addr": 1, "size": 5, "time_us": 1, "stream": 0, "frames": []}
    two_devices = tmp_path / "two.pickle"
    two_devices.write_bytes(pickle.dumps({"segments": [], "device_traces": [[entry], [entry]]}))
    for arguments, status, message in [
        ([tmp_path / "none"], 1, "No such file"),
        ([""], 1, "No such file"),
        ([__file__], 2, "no trace"),
        ([small, "--with", "best"], 2, "'best' is not one of bump"),
        ([small, "--with", ","], 2, "at least one"),
        ([small, "--synthetic", "1"], 2, "not allowed"),
        ([], 2, "required"),
        ([two_devices, "--with", "loop"], 2, "devices [0, 1]: choose one, with device=N or with"),
        ([two_devices, "--with", "loop", "--device", "1"], 0, ""),
        ([small, "--with", "loop", "--device", "1"], 2, "is no snapshot of torch"),
        (["--synthetic", "1", "--device", "1"], 2, "do not go together"),
    ]:
        done = command(*arguments)
        assert done.returncode == status, done.stderr
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    empty = tmp_path / "empty.trace"
    traced().save(empty)
    assert "no allocation" in command(empty).stderr


# ---- what real allocators record


def words(path):
    """The operations on blocks; tests/test_trace_reserved.py has the rest."""
    names = {code: name for name, code in CODES.items() if name not in ("grow", "trim")}
    return [
        (names[event["operation"]], int(event["address"]), int(event["nbytes"]))
        for event in trace.load(path).events
        if event["operation"] in names
    ]


@given(
    st.lists(st.integers(1, 100_000) | st.integers(-8, -1), max_size=30),
    st.sampled_from(["plain", "exported"]),
)
def test_a_pool_records_what_it_does(tmp_path_factory, program_, how):
    """A positive number is allocated; a negative one drops the block that long ago."""
    path = tmp_path_factory.getbasetemp() / "pool.trace"
    pool = arenapy.Pool()
    before = pool.alloc(10)
    expected, live = [], []
    with trace.record(pool, path):
        for n in program_:
            if n > 0:
                block = pool.alloc(n)
                expected.append(("alloc", block.address, n))
                live.append((block.address, n, block if how == "plain" else block.array(n, "u1")))
                del block
            elif len(live) >= -n:
                address, size = live.pop(n)[:2]
                expected.append(("free", address, size))
        expected.append(("free", before.address, 10))
        del before
    after = pool.alloc(5)
    del after, live
    found = words(path)
    assert [word[:2] for word in found] == [word[:2] for word in expected]
    assert [word for word in found if word[0] == "alloc"] == [
        word for word in expected if word[0] == "alloc"
    ]


ROUTES = {
    "alloc": lambda a: a.alloc(1000),
    "alloc_many": lambda a: a.alloc_many([100, 200, 300]),
    "empty": lambda a: a.empty(100, "f8"),
    "zeros": lambda a: a.zeros((3, 5), "f4"),
    "copy": lambda a: a.copy(np.arange(10.0)),
    "struct_of_arrays": lambda a: a.struct_of_arrays({"x": "f4", "y": "f8"}, 100),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("make", [lambda: arenapy.Bump(MIB), arenapy.Pool])
def test_every_route_to_memory_is_recorded(tmp_path, route, make):
    """As many allocations as the allocator counts itself, of as many bytes at least."""
    allocator = make()
    warm_up = ROUTES[route](allocator)
    before = allocator.stats().total_allocations
    with trace.record(allocator, tmp_path / "a.trace"):
        block = ROUTES[route](allocator)
    found = words(tmp_path / "a.trace")
    assert [name for name, *_ in found] == ["alloc"] * len(found)
    assert len(found) == allocator.stats().total_allocations - before > 0
    del warm_up, block


@pytest.mark.parametrize("n_threads", [1, 4])
def test_threads_on_a_pool_never_seem_to_share_a_block(tmp_path, n_threads):
    """In the order of the file a block is freed before it is given to another thread."""
    pool = arenapy.Pool()
    heap = PoolHeap(pool)
    found = program(trace.synthetic(5, 20_000, MIB, [trace.Phase(64, 4096)]))
    threads = [
        threading.Thread(target=run, args=(heap, *arguments(found))) for _ in range(n_threads)
    ]
    with trace.record(pool, tmp_path / "a.trace"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    live = set()
    counts = dict.fromkeys(CODES, 0)
    for name, address, _ in words(tmp_path / "a.trace"):
        counts[name] += 1
        if name == "alloc":
            assert address not in live
            live.add(address)
        elif name == "free":
            live.remove(address)
    assert not live
    assert counts["alloc"] == counts["free"] == n_threads * 20_000


def test_a_bump_records_marks_and_resets(tmp_path):
    arena = arenapy.Bump(MIB)
    with trace.record(arena, tmp_path / "bump.trace"):
        first = arena.alloc(100)
        with arena.scope():
            inner = arena.alloc(200), arena.alloc(300)
        second = arena.alloc(400)
        arena.reset()
    found = words(tmp_path / "bump.trace")
    assert [(name, n) for name, _, n in found if name == "alloc"] == [
        ("alloc", n) for n in (100, 200, 300, 400)
    ]
    replayed = program(trace.load(tmp_path / "bump.trace"))
    assert " ".join(steps(replayed)) == "+100 +200 +300 -300 -200 +400 -400 -100"
    del first, inner, second


def test_what_is_kept_at_the_end_is_still_there(tmp_path):
    arena = arenapy.Bump(MIB)
    with trace.record(arena, tmp_path / "bump.trace"):
        kept, gone = arena.empty(100, "u1"), arena.empty(100, "u1")
        at = kept.ctypes.data
        arena.reset()
        del gone
    found = [one for one in words(tmp_path / "bump.trace") if one[0] == "keep"]
    assert [address for _, address, _ in found] == [at]


@pytest.mark.parametrize("make", [lambda: arenapy.Bump(MIB), arenapy.Pool])
def test_one_recording_at_a_time(tmp_path, make):
    allocator = make()
    path = tmp_path / "a.trace"
    with trace.record(allocator, path):
        block = allocator.alloc(100)
        with pytest.raises(ValueError, match="already"), trace.record(allocator, path):
            raise AssertionError("entered")
    assert words(path)[0][0] == "alloc"
    with trace.record(allocator, path):
        pass
    assert words(path) == []
    assert trace.load(path).kind == type(allocator).__name__
    del block


def test_a_forked_child_does_not_record_into_its_parents_file(tmp_path):
    pool = arenapy.Pool()
    with trace.record(pool, tmp_path / "a.trace"):
        pool.alloc(1000)
        child = os.fork()
        if child == 0:
            for _ in range(100):
                pool.alloc(2000)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        pool.alloc(3000)
    found = [n for name, _, n in words(tmp_path / "a.trace") if name == "alloc"]
    assert found == [1000, 3000]
