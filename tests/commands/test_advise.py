"""``arenapy advise``: what is tried, how it is measured, what is said of it."""

import ctypes
import gc
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import alike
import numpy as np
import pytest
from alike import TIMEOUT
from simulated_bindings import bindings

import arenapy
from arenapy import cuda, trace
from arenapy.commands import cli
from arenapy.commands.advise import command as advise
from arenapy.commands.advise import device_process, device_worker, measuring
from arenapy.commands.advise.advice import ROUNDS, choose, lines
from arenapy.commands.advise.measuring import FEWEST, Replays, shortened
from arenapy.commands.advise.settings import (
    NAMES,
    PLAIN_POOL,
    Setting,
    ready_pool,
    settings_for,
    unsuited,
)
from arenapy.commands.compare.verdict import LEAST_ROUNDS
from arenapy.commands.replay import worker
from arenapy.commands.replay.device import HEAPS
from arenapy.commands.replay.loop import MallocHeap, run
from arenapy.commands.replay.program import program
from arenapy.commands.run.command import TRACE_KIND

MIB = 1 << 20
CODES = trace.OPERATIONS
EASY = {"steps": 100, "live": 5 * MIB, "recorded": 2.0, "numpy": False, "program": "work.py",
        "seconds": 30.0}  # fmt: skip


def traced(*calls, kind="made", thread=1):
    """A trace of (operation, address, nbytes)."""
    events = np.zeros(len(calls), trace.EVENT)
    for event, (name, *rest) in zip(events, calls, strict=True):
        event["operation"] = CODES[name]
        event["address"], event["nbytes"] = (*rest, 0)[:2]
    events["thread"] = thread
    return trace.Trace(events, kind)


def queue(n=50, nbytes=1000):
    """Blocks of one size, freed in the order in which they were made, of which ten are live."""
    calls = []
    for i in range(n):
        calls.append(("alloc", i, nbytes))
        if i >= 9:
            calls.append(("free", i - 9))
    return traced(*calls)


# ---- what is tried


def test_settings_suit_the_program():
    found = [str(one) for one in settings_for(program(queue()), NAMES)]
    assert found[:3] == ["malloc", "Pool()", 'Pool(rounding="class")']
    assert "Slab(item_size=1000, count=10)" in found
    assert found[-3:] == ["jemalloc", "mimalloc", "tcmalloc"]
    assert set(NAMES) <= set(worker.PEERS)


def test_an_arena_that_would_hold_too_much_is_not_tried():
    """One block that stays among many that go needs all of their room."""
    calls = [("alloc", 1, 64)]
    for i in range(2, 200):
        calls += [("alloc", i, MIB), ("alloc", 1000 + i, 64), ("free", i)]
    found = program(traced(*calls))
    by_peer = {one.peer: one for one in settings_for(found, NAMES)}
    assert "are live" in unsuited(by_peer["bump"], found, 1)
    assert "are live" in unsuited(by_peer["slab"], found, 1)
    assert unsuited(by_peer["pool"], found, 1) is None


def test_a_bump_is_for_one_thread():
    steps = program(queue())
    (bump,) = settings_for(steps, ["bump"])
    assert unsuited(bump, steps, 1) is None
    assert "3 threads" in unsuited(bump, steps, 3)


@pytest.mark.parametrize(
    ("setting", "numpy", "line"),
    [
        (Setting("malloc"), False, "nothing to change"),
        (Setting("malloc"), True, "nothing to change"),
        (Setting("jemalloc"), True, "LD_PRELOAD=libjemalloc.so.2 python work.py"),
        (PLAIN_POOL, False, "pool = arenapy.Pool()"),
        (PLAIN_POOL, True, "arenapy run work.py"),
        (ready_pool(3 * MIB), False, "pool = arenapy.Pool(initial_bytes=4 << 20)"),
        (ready_pool(1), True, "arenapy run --initial-bytes 2M work.py"),
        (
            Setting("pool", {"rounding": "class"}), True,
            'arenapy.numpy_memory(arenapy.Pool(rounding="class"), threads=True, '
            'libc="keep").install()',
        ),
        (
            Setting("slab", {"item_size": 1000, "count": 3072}), False,
            "slab = arenapy.Slab(item_size=1000, count=3 << 10)",
        ),
        (Setting("bump", {"nbytes": 1 << 30}), False, "arena = arenapy.Bump(nbytes=1 << 30)"),
    ],
)  # fmt: skip
def test_the_line_to_paste(setting, numpy, line):
    assert setting.line(numpy, "work.py") == line
    if line.startswith(("pool", "arena =", "slab")):
        scope = {"arenapy": arenapy}
        if "1 << 30" not in line:
            exec(line, scope)  # it is Python, and makes the allocator
            made = scope[line.split()[0]]
            assert type(made).__name__.lower() == setting.peer


# ---- how it is measured


def test_a_long_program_is_shortened_to_what_there_is_time_for():
    steps = program(queue(5000, 40_000))
    assert shortened(steps, 30, 1) == (steps, 1)
    part, passes = shortened(steps, 0.01, 1)
    assert passes == 1
    assert 1 <= len(part) < len(steps) / 10
    assert part.slots.tolist() == steps.slots[: len(part)].tolist()
    assert len(shortened(steps, 0.01, 2)[0]) < len(part)
    assert len(shortened(steps, 1e-9, 1)[0]) == 1


def test_a_repeated_program_is_not_run_as_often(tmp_path):
    """As often as there is time for, but twice, and the rest takes as long as the later passes."""
    steps = program(queue())
    whole, passes = shortened(steps, 30, 10**6)
    assert whole is steps and 2 < passes < 10**6
    assert shortened(program(queue(5000, 40_000)), 0.01, 10**6)[1] == 2
    assert shortened(steps, 30, 3)[1] == 3
    made = Replays(
        steps, settings_for(steps, ["malloc", "slab"]), tmp_path,
        threads=1, seconds=0.01, passes=3, repeat=1000,
        worker=lambda *a, seconds: {"seconds": 10.0, "first": 8.0, "steps": 91, "peak": MIB},
    )  # fmt: skip
    list(made.warm_up())
    list(made.rounds())
    assert set(made.times["malloc"]) == {8.0 + 999 * 1.0}


class Worker:
    """In place of processes: seconds and bytes of each setting, by its name."""

    def __init__(self, seconds, peaks=None, fails=None):
        self.seconds, self.peaks, self.fails = seconds, peaks or {}, fails or {}
        self.calls = []

    def __call__(self, peer, folder, *words, seconds):
        settings = json.loads(words[words.index("--settings") + 1]) if "--settings" in words else {}
        name = str(Setting(peer, settings))
        self.calls.append((name, words[0]))
        if name in self.fails:
            raise OSError(self.fails[name])
        found = self.seconds.get(name, 1.0)
        return {"steps": 91 - (found < 0), "seconds": found, "peak": self.peaks.get(name, 5 * MIB)}


def replays(tmp_path, worker, seconds=1000.0):
    steps = program(queue())
    assert len(steps) == 91
    made = Replays(
        steps, settings_for(steps, NAMES), tmp_path,
        threads=1, seconds=seconds, passes=1, repeat=1, worker=worker,
    )  # fmt: skip
    for _ in made.warm_up():
        pass
    for _ in made.rounds():
        pass
    return made


def test_a_pool_that_grew_says_how_much_to_prefault(tmp_path):
    made = replays(tmp_path, Worker({}, {"Pool()": 7 * MIB}))
    assert "Pool(initial_bytes=8 << 20)" in made.settings
    assert made.settings["Pool(initial_bytes=8 << 20)"].prefault == 8 * MIB


def test_turns_and_losers(tmp_path):
    """All have three rounds, and those that lost them no more; malloc is in all rounds."""
    made = replays(tmp_path, Worker({"Pool()": 0.9, "mimalloc": 0.92}))
    counts = {name: len(times) for name, times in made.times.items()}
    assert counts.pop("malloc") == counts.pop("Pool()") == counts.pop("mimalloc") == ROUNDS
    assert len(counts) > 3 and set(counts.values()) == {FEWEST}
    slow = {name: 2.0 for name in made.times if name != "malloc"} | {"Pool()": 1.5}
    counts = {name: len(times) for name, times in replays(tmp_path, Worker(slow)).times.items()}
    assert counts.pop("malloc") == counts.pop("Pool()") == ROUNDS  # to be sure of it
    assert set(counts.values()) == {FEWEST}


def test_the_time_is_kept(tmp_path):
    """Six rounds are made in any case, and no more when the time is spent."""
    made = replays(tmp_path, Worker({}), seconds=1e-9)
    assert set(map(len, made.times.values())) == {LEAST_ROUNDS}


def test_one_disturbed_round_does_not_stand_in_the_way(tmp_path):
    """Of six rounds it does, and then there are more."""

    class Disturbed(Worker):
        def __call__(self, peer, *words, seconds):
            found = super().__call__(peer, *words, seconds=seconds)
            timed = sum(word == "--passes" and name == "Pool()" for name, word in self.calls)
            return found | {"seconds": 9.0} if peer == "pool" and timed == 5 else found

    made = replays(tmp_path, Disturbed({"Pool()": 0.3}), seconds=1e-9)
    assert LEAST_ROUNDS < len(made.times["malloc"]) == len(made.times["Pool()"])
    assert choose(made.times, made.held).name == "Pool()"


def test_orders_are_reversed_so_that_nobody_is_favoured(tmp_path):
    worker = Worker({})
    made = replays(tmp_path, worker)
    timed = [name for name, word in worker.calls if word == "--passes"]
    n = len(made.times)
    for i in range(0, ROUNDS, 2):
        assert timed[i * n : (i + 1) * n] == timed[(i + 1) * n : (i + 2) * n][::-1]
    assert len({tuple(timed[i * n : (i + 1) * n]) for i in range(0, ROUNDS, 2)}) > 1


@pytest.mark.parametrize("name", ["mimalloc", "Pool()"])
def test_one_that_fails_is_left_out_with_the_reason(tmp_path, name):
    made = replays(tmp_path, Worker({}, fails={name: "no such library"}))
    assert made.notes[name] == "no such library"
    assert name not in made.settings and name not in made.times
    made = replays(tmp_path, Worker({name: -1.0}))
    assert made.notes[name] == "refused step 91 of 91: out of memory"


class Killed(Worker):
    """At its `turn` malloc is killed, or all others are."""

    def __init__(self, turn, others=False):
        super().__init__({})
        self.turn, self.others = turn, others

    def __call__(self, peer, *words, seconds):
        found = super().__call__(peer, *words, seconds=seconds)
        name = self.calls[-1][0]
        turn = sum(one == name for one, _ in self.calls)
        if (name == "malloc") != self.others and turn == self.turn:
            raise OSError("gone")
        return found


@pytest.mark.parametrize("turn", [1, 2, 1 + FEWEST, 2 + FEWEST])
def test_without_a_baseline_there_is_no_advice(tmp_path, turn):
    """Whether it is killed as the first of all or in a round."""
    with pytest.raises(OSError, match="malloc was not measured: gone"):
        replays(tmp_path, Killed(turn))


@pytest.mark.parametrize("turn", [2, 1 + FEWEST])
def test_only_the_baseline_is_left(tmp_path, turn):
    made = replays(tmp_path, Killed(turn, others=True))
    found = choose(made.times, made.held)
    assert (found.name, found.other, set(made.times)) == ("malloc", None, {"malloc"})


def test_no_peer_is_there(tmp_path):
    """Only malloc could be measured: it is kept, and nothing is claimed."""
    names = [str(one) for one in settings_for(program(queue()), NAMES)]
    made = replays(tmp_path, Worker({}, fails=dict.fromkeys(names[1:], "none")))
    found = choose(made.times, made.held)
    assert (found.name, found.other, found.ratio) == ("malloc", None, None)
    said = dict(lines(found, made.settings, made.times, made.held, **EASY))
    assert said["use"] == "keep malloc"
    assert said["gain"] == "not known: no other allocator was measured"


# ---- what is advised


def noisy(base, n=15, spread=0.02):
    """Times that differ from round to round, for all settings alike."""
    return [base * (1 + spread * (i % 5 - 2)) for i in range(n)]


@pytest.mark.parametrize(
    ("times", "held", "expected", "word"),
    [
        # The fastest.
        ({"malloc": 4.0, "pool": 2.0, "slab": 1.0}, {}, "slab", "sure"),
        # As fast within 3 %: the one that holds less, or the first.
        ({"malloc": 4.0, "pool": 1.0, "slab": 0.99}, {"pool": 50 * MIB}, "slab", "sure"),
        ({"malloc": 4.0, "pool": 1.0, "slab": 0.99}, {}, "pool", "sure"),
        ({"malloc": 4.0, "pool": 1.05, "slab": 0.99}, {}, "slab", "sure"),
        # Malloc is as good, or better.
        ({"malloc": 1.0, "pool": 0.98, "slab": 2.0}, {"malloc": 90 * MIB}, "malloc", "sure"),
        ({"malloc": 1.0, "pool": 1.5, "slab": 2.0}, {}, "malloc", "sure"),
    ],
)
def test_the_rule(times, held, expected, word):
    rounds = {name: noisy(base) for name, base in times.items()}
    found = choose(rounds, dict.fromkeys(times, MIB) | held)
    assert (found.name, found.word) == (expected, word)


def test_one_that_was_not_in_all_rounds_is_not_advised():
    times = {"malloc": noisy(4.0), "pool": noisy(2.0), "slab": noisy(1.0, 3)}
    assert choose(times, dict.fromkeys(times, MIB)).name == "pool"


def test_few_rounds_are_not_sure():
    times = {"malloc": noisy(4.0, 3), "pool": noisy(2.0, 3)}
    found = choose(times, dict.fromkeys(times, MIB))
    assert (found.name, found.word) == ("pool", "probable")
    settings = {"malloc": Setting("malloc"), "pool": PLAIN_POOL}
    said = dict(lines(found, settings, times, dict.fromkeys(times, MIB), **EASY))
    assert said["sure"].startswith("probably: pool took 0.50 to 0.50 of the time of malloc in 3")
    assert "--seconds 60" in said["sure"]


@pytest.mark.parametrize("rounds", [12, ROUNDS])
def test_one_that_is_faster_in_half_of_the_rounds_is_not_advised(rounds):
    times = {"malloc": [1.0] * rounds, "pool": [0.5, 1.4] * (rounds // 2)}
    found = choose(times, dict.fromkeys(times, MIB))
    assert (found.name, found.word) == ("malloc", "undecided")
    settings = {"malloc": Setting("malloc"), "pool": PLAIN_POOL}
    said = dict(lines(found, settings, times, dict.fromkeys(times, MIB), **EASY))
    begin = f"undecided: 95% sure, in {rounds} rounds: pool takes 0.50 to 1.40"
    assert said["sure"].startswith(begin)
    assert ("--seconds" in said["sure"]) == (rounds < ROUNDS)


def test_the_five_lines():
    times = {"malloc": noisy(4.0), "pool": noisy(1.0), "mimalloc": noisy(1.01)}
    held = {"malloc": 9 * MIB, "pool": 8 * MIB, "mimalloc": 8 * MIB}
    settings = {
        "malloc": Setting("malloc"), "pool": ready_pool(8 * MIB), "mimalloc": Setting("mimalloc"),
    }  # fmt: skip
    found = choose(times, held)
    said = lines(found, settings, times, held, **EASY | {"steps": 10**6})
    assert said == [
        ("use", "pool: 8 MiB prefaulted at the start"),
        ("paste", "pool = arenapy.Pool(initial_bytes=8 << 20)"),
        (
            "gain",
            "pool takes 0.25 of the time of malloc: 1.0 µs instead of 4.0 µs for an operation, "
            "3 s less in total; the recording took 2 s",
        ),
        ("holds", "8 MiB at its peak, for blocks of 5 MiB; malloc held 9 MiB"),
        (
            "sure",
            "95% sure, in 15 rounds: pool takes 0.25 to 0.25 of the time of malloc; as fast, "
            "within 3%: mimalloc",
        ),
    ]
    times["malloc"] = noisy(0.5)
    found = choose(times, held)
    said = dict(lines(found, settings, times, held, **EASY | {"steps": 10**6}))
    assert said["use"] == "keep malloc" and said["paste"] == "nothing to change"
    assert said["gain"] == (
        "none: malloc takes 500.0 ns for an operation, and pool, the fastest alternative, takes "
        "1.0 µs"
    )


# ---- the command


def command(*arguments, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "arenapy", "advise", *map(str, arguments)],
        capture_output=True, text=True, timeout=TIMEOUT, cwd=cwd, check=False,
    )  # fmt: skip


@pytest.fixture
def small(tmp_path):
    queue().save(tmp_path / "small.trace")
    return tmp_path / "small.trace"


@pytest.mark.no_sanitizer
def test_the_command(small, tmp_path, monkeypatch, capsys):
    out = tmp_path / "advice.json"
    done = command(small, "--seconds", "0.1", "--with", "slab", "--json", out)
    assert done.returncode == 0, done.stderr
    words = [line.split()[0] for line in done.stdout.splitlines()]
    assert words == ["use", "paste", "gain", "holds", "sure"]
    found = json.loads(out.read_text())
    assert next(iter(found)) == "report" and found["report"] == "arenapy advise"
    assert found["use"] in found["seconds"] and found["live_bytes"] == 10_000
    assert list(found["held_bytes"]) == ["malloc", "Slab(item_size=1000, count=10)"]
    assert min(map(min, found["seconds"].values())) > 0
    assert found["advice"]["use"] in done.stdout
    monkeypatch.setattr(advise, "run_worker", Worker({"Pool()": 0.5}))
    again = in_process(capsys, small, "--with", "pool,slab", "--json", out)
    assert again == (0, "")  # an earlier report is replaced
    found = json.loads(out.read_text())
    assert found["use"] == "Pool()"
    assert set(found["held_bytes"]) == {
        "malloc", "Pool()", "Pool(initial_bytes=6 << 20)", 'Pool(rounding="class")',
        "Slab(item_size=1000, count=10)",
    }  # fmt: skip


def in_process(capsys, *arguments):
    """The status, and what is on standard error."""
    try:
        status = advise.main([str(one) for one in arguments])
    except SystemExit as ended:
        status = ended.code
    return status, capsys.readouterr().err


def test_what_cannot_be_is_refused(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(advise, "_measure", lambda replays: pytest.fail("it was measured"))
    traced().save(tmp_path / "empty.trace")
    traced(("free", 1, 5), ("trim", 1, 5)).save(tmp_path / "none.trace")
    (tmp_path / "damaged.trace").write_bytes(small.read_bytes()[:20] + b"\xff" * 200)
    (tmp_path / "text").write_text("not a trace")
    mine = tmp_path / "mine.py"
    mine.write_text("x = 1")
    of_numpy = tmp_path / "numpy.trace"
    traced(("alloc", 1, 5), kind=TRACE_KIND).save(of_numpy)
    for arguments, message in [
        ([tmp_path / "empty.trace"], "no allocation"),
        ([tmp_path / "none.trace"], "no allocation"),
        ([tmp_path / "damaged.trace"], "damaged.trace"),
        ([tmp_path / "text"], "no trace"),
        ([small, "--with", "best"], "'best' is not one of malloc"),
        ([small, "--with", ","], "at least one"),
        ([small, "--repeat", "0"], "'0' is not a whole number"),
        ([small, "--seconds", "0"], "'0' is not a number of seconds"),
        ([small, "--json", mine], "is not a report of arenapy advise"),
        ([small, "--json", small], "is not a report of arenapy advise"),
        ([of_numpy, "--with", "pool,bump"], "'bump' cannot be tried with a trace of Pool, NumPy"),
        ([small, "--with", "torch"], "'torch' cannot be tried with a trace of made: choose amo"),
        ([], "required"),
    ]:
        status, error = in_process(capsys, *arguments)
        assert status == 2 and message in error, (arguments, error)
    assert mine.read_text() == "x = 1"
    with pytest.raises(OSError, match="No such file"):
        advise.main([str(tmp_path / "nothing")])


def test_a_part_of_a_trace_is_told(monkeypatch):
    found = {"advice": {"use": "Pool()"}, "steps": 50, "steps_of_the_trace": 200}
    assert advise.show(found)[1].startswith("part   only the first 25.0% of the trace")
    assert len(advise.show(found | {"steps": 200})) == 1


@pytest.mark.parametrize("name", ["pool", "malloc"])
def test_a_worker_times_all_passes_and_the_making(monkeypatch, name):
    """The making of a malloc is not timed, since a program has its malloc from the start."""
    passes = []
    monkeypatch.setattr(worker, "run", lambda *a, **b: (passes.append((a, b)) or 100.0, 91, 0, 0))
    monkeypatch.setattr(worker.time, "process_time", iter([5.0, 12.0]).__next__)
    found = worker.measure_all(name, program(queue()), 3)
    making = 7.0 if name == "pool" else 0.0
    assert found == {"seconds": making + 300, "first": making + 100, "steps": 91}
    assert len(passes) == 3
    assert all(how == {"touch": "pages", "cpu": True} for _, how in passes)


def test_the_time_of_a_replay_may_be_the_processors():
    """A malloc that sleeps takes time by the wall alone."""
    blocks = []

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)
    def take(n):
        time.sleep(0.2)
        blocks.append(ctypes.create_string_buffer(n))
        return ctypes.addressof(blocks[-1])

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def give(address):
        blocks.clear()

    heap = MallocHeap(*(ctypes.cast(call, ctypes.c_void_p).value for call in (take, give)))
    steps = program(traced(("alloc", 1, 10), ("free", 1)))
    arguments = heap, steps.slots, steps.sizes, steps.count
    assert run(*arguments)[0] >= 0.2
    assert run(*arguments, cpu=True)[0] < 0.2


def test_a_worker_takes_settings(tmp_path, capsys):
    program(queue()).save(tmp_path)
    for words in (["--passes", "3"], ["--written"]):
        for name, settings in [("slab", {"item_size": 1000, "count": 10}), ("bump", {}),
                               ("pool", {"initial_bytes": 2 * MIB}), ("malloc", {})]:  # fmt: skip
            more = ["--settings", json.dumps(settings)] if settings else []
            assert worker.main([str(tmp_path), name, *words, *more]) == 0
            found = json.loads(capsys.readouterr().out)
            assert found["steps"] == 91 and found["seconds"] > 0, name
    small = ["--settings", json.dumps({"item_size": 999, "count": 10})]
    assert worker.main([str(tmp_path), "slab", "--passes", "1", *small]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 0


# ---- traces of a GPU's memory


GPU_PEERS = ("torch", "cupy", "rmm")
SIMULATED = """
import sys
import pytest
from simulated_bindings import bindings
from arenapy.commands.advise import device_worker

with open({starts!r}, "a") as file:
    print("start", file=file)
with pytest.MonkeyPatch.context() as patch, bindings(patch):
    for name in {peers}:
        patch.setitem(sys.modules, name, None)  # they would ask for a driver that is none
    sys.exit(device_worker.main(sys.argv[1:]))
"""
ANSWERS = """
import json, os, sys, time
for line in sys.stdin:
    name, *words = json.loads(line)
    if name == "hangs":
        time.sleep(1000)
    elif name == "killed":
        os.kill(os.getpid(), 9)
    elif name == "fails":
        sys.exit("first line\\nMemoryError: full")
    found = {"error": "not installed: it"} if name == "missing" else {"pid": os.getpid()}
    print(json.dumps(found | {"words": [sys.argv[1:], words]}), flush=True)
"""


def in_this_process(name, folder, *words, seconds):
    """As a process of its own, which would not see what the test has changed."""
    settings = json.loads(words[words.index("--settings") + 1]) if "--settings" in words else {}
    passes = int(words[1]) if words[0] == "--passes" else None
    try:
        return device_worker.measure(name, folder, passes, settings)
    except ImportError as error:
        raise OSError(str(error)) from None


def started(monkeypatch, tmp_path, source):
    """From now on, device processes run this program."""
    (tmp_path / "program.py").write_text(source)
    command = [sys.executable, str(tmp_path / "program.py")]
    monkeypatch.setattr(device_process, "COMMAND", command)


def device_queue(kind):
    made = queue(50, 1 << 16)
    made.events["stream"][::7] = 77
    return trace.Trace(made.events, kind)


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(measuring, "ROUNDS", FEWEST)
    for name in GPU_PEERS:
        monkeypatch.setitem(sys.modules, name, None)
    with bindings(monkeypatch) as one:
        yield one


@pytest.mark.full
def test_a_trace_of_a_gpu_is_replayed_on_one(gpu, monkeypatch, tmp_path):
    """All settings and rounds are in one process: starting one takes longer than a replay."""
    started(
        monkeypatch, tmp_path, SIMULATED.format(starts=str(tmp_path / "starts"), peers=GPU_PEERS)
    )
    found = advise.advise(device_queue("Pool, device"))
    assert (tmp_path / "starts").read_text() == "start\n"
    assert list(found["seconds"]) == [
        "driver", "Pool()", "Pool(initial_bytes=2 << 20)", 'Pool(rounding="class")',
        "Slab(item_size=64 << 10, count=10)",
    ]  # fmt: skip
    assert "are live" in found["not_compared"]["Bump(nbytes=3200 << 10)"]
    for name in GPU_PEERS:
        assert f"not installed: import of {name} halted" in found["not_compared"][name]
    held = found["held_bytes"]
    assert held["driver"] >= found["live_bytes"] == 10 << 16
    assert held["Slab(item_size=64 << 10, count=10)"] >= 10 << 16
    assert held["Pool(initial_bytes=2 << 20)"] >= 2 * MIB
    assert min(map(min, found["seconds"].values())) > 0


def test_what_became_of_a_device_process(monkeypatch, tmp_path):
    """One that has ended is replaced by another, and why it ended is said."""
    started(monkeypatch, tmp_path, ANSWERS)
    with device_process.DeviceProcess() as run_in:

        def answer(name, seconds=TIMEOUT):
            return run_in(name, tmp_path, "--passes", "2", seconds=seconds)

        first = answer("pool")
        assert first["words"] == [[str(tmp_path)], ["--passes", "2"]]
        with pytest.raises(OSError, match=r"^not installed: it$"):
            answer("missing")
        assert answer("pool") == first  # in the same process
        seen = {first["pid"]}
        for name, why, seconds in [
            ("killed", "killed by signal 9", TIMEOUT),
            ("fails", "MemoryError: full", TIMEOUT),
            ("hangs", "it did not end within 0 s", 0.1),
        ]:
            with pytest.raises(OSError, match=f"^{why}$"):
                answer(name, seconds)
            seen.add(answer("pool")["pid"])
        assert len(seen) == 4
        last = answer("pool")["pid"]
    with pytest.raises(ProcessLookupError):
        os.kill(last, 0)


def test_a_device_process_that_does_not_start(monkeypatch, tmp_path):
    started(monkeypatch, tmp_path, "import no_such_module")
    with device_process.DeviceProcess() as run_in:
        for _ in range(2):
            with pytest.raises(OSError, match=r"^ModuleNotFoundError: No module named"):
                run_in("pool", tmp_path, "--written", seconds=TIMEOUT)


class Missing:
    def __init__(self, peak_live):
        os.write(1, b"no answer\n")  # as a package may that is imported
        raise ImportError("no such package")


class Full:
    def __init__(self, peak_live):
        raise MemoryError("full\nand more")


def test_a_device_worker_goes_on_unless_memory_may_be_lost(gpu, monkeypatch, tmp_path, capfd):
    program(queue()).save(tmp_path)
    np.save(tmp_path / "streams.npy", np.zeros(50, int))
    monkeypatch.setitem(HEAPS, "missing", Missing)
    monkeypatch.setitem(HEAPS, "full", Full)
    names = "driver", "missing", "pool", "full", "pool"
    requests = [json.dumps([name, "--passes", "2"]) + "\n" for name in names]
    monkeypatch.setattr(sys, "stdin", requests)
    stdout, frozen = os.dup(1), gc.get_freeze_count()
    try:
        assert device_worker.main([str(tmp_path)]) == 1
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        if not frozen:
            gc.unfreeze()
    out, errors = capfd.readouterr()
    first, second, third = map(json.loads, out.splitlines())
    assert first["steps"] == third["steps"] == 91
    assert second == {"error": "not installed: no such package"}
    assert errors == "no answer\nMemoryError: full\n"


def test_other_packages_give_back_their_memory(monkeypatch):
    """Before the next setting has its turn. arenapy's allocators do so when they are dropped."""
    calls = []

    def call(*arguments):
        calls.append("called")

    cuda = SimpleNamespace(init=int, set_device=int, empty_cache=call)
    raw = dict.fromkeys(
        ["_cuda_memoryStats", "_cuda_cudaCachingAllocator_raw_alloc",
         "_cuda_cudaCachingAllocator_raw_delete"], int,
    )  # fmt: skip
    torch = SimpleNamespace(cuda=cuda, _C=SimpleNamespace(**raw))
    monkeypatch.setitem(sys.modules, "torch", torch)
    HEAPS["torch"](0).close()
    assert len(calls) == 1
    pool = SimpleNamespace(free_all_blocks=call)
    device = SimpleNamespace(use=int)
    cupy = SimpleNamespace(
        cuda=SimpleNamespace(MemoryPool=lambda: pool, Device=lambda ordinal: device)
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    HEAPS["cupy"](0).close()
    assert len(calls) == 2


@pytest.mark.parametrize("installed", [False, True])
def test_torch_is_the_baseline_of_its_own_traces(gpu, monkeypatch, installed):
    """If it is there; here, where it fails, there is no advice then."""
    monkeypatch.setattr(advise, "DeviceProcess", lambda: nullcontext(in_this_process))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed or None)
    if installed:
        with pytest.raises(OSError, match="torch was not measured"):
            advise.advise(device_queue("torch, device 0"))
    else:
        assert next(iter(advise.advise(device_queue("torch, device 0"))["seconds"])) == "driver"


def test_an_arena_of_a_gpu_starts_over_when_nothing_is_live(gpu, tmp_path):
    # The second block begins at a multiple of 256. At one of 64, both would have 2 << 16 bytes.
    pair = [("alloc", 1, (1 << 16) - 100), ("alloc", 2, (1 << 16) + 64), ("free", 1), ("free", 2)]
    steps = program(traced(*pair * 10))
    steps.save(tmp_path)
    np.save(tmp_path / "streams.npy", np.zeros(20, int))
    (setting,) = settings_for(steps, ["bump"], device=True)
    settings = setting.arguments
    assert settings["nbytes"] == (2 << 16) + 4096
    found = device_worker.measure("bump", tmp_path, 2, settings)
    assert found["steps"] == 40 and 0 < found["first"] < found["seconds"]
    assert device_worker.measure("bump", tmp_path, None, settings)["peak"] >= 2 << 16


def test_without_a_gpu_it_says_so(monkeypatch, tmp_path, capsys):
    """At once: nothing is measured."""
    monkeypatch.setattr(cuda, "devices", list)
    with pytest.raises(OSError, match="its replays need a GPU: there is none"):
        advise.advise(device_queue("torch, device 0"))

    def fail():
        raise cuda.Unavailable("no driver")

    monkeypatch.setattr(cuda, "devices", fail)
    device_queue("torch, device 0").save(tmp_path / "a.trace")
    assert cli.main(["advise", str(tmp_path / "a.trace")]) == 1
    error = capsys.readouterr().err
    assert error == (
        "arenapy: this trace is of a GPU's memory, and its replays need a GPU: no driver\n"
    )


def test_a_recording_says_what_memory_it_is_of(gpu, tmp_path):
    pool = arenapy.Pool(source=cuda.Device())
    with trace.record(pool, tmp_path / "a.trace"):
        pool.alloc(100).release()
    assert trace.load(tmp_path / "a.trace").kind == "Pool, device"
    with trace.record(arenapy.Pool(), tmp_path / "b.trace"):
        pass
    assert trace.load(tmp_path / "b.trace").kind == "Pool"


@pytest.mark.parametrize(
    ("peer", "line"),
    [
        ("pool", "pool = arenapy.Pool(initial_bytes=4 << 20, source=cuda.Device())"),
        ("driver", "nothing to change"),
        ("cupy", "cupy.cuda.set_allocator(cupy.cuda.MemoryPool().malloc)"),
    ],
)
def test_lines_for_a_gpu(peer, line):
    setting = ready_pool(3 * MIB, True) if peer == "pool" else Setting(peer, device=True)
    assert setting.line() == line
    assert "reserved" in setting.prefaulted() and "prefault" not in setting.prefaulted()


# ---- run --advise


def run_advised(tmp_path, source, *options, **how):
    (tmp_path / "work.py").write_text(textwrap.dedent(source))
    return alike.ours(["--advise", *options, "work.py"], cwd=tmp_path, **how)


def test_run_and_advise(tmp_path, monkeypatch):
    """The processes of tests fork this one, which here measures nothing."""

    class Measured(Worker):
        def __call__(self, *words, seconds):
            return {**super().__call__(*words, seconds=seconds), "steps": 10**9}

    monkeypatch.setattr(advise, "run_worker", Measured({"malloc": 2.0}))
    source = """
        import numpy as np, sys
        for _ in range(100):
            x = np.ones(200_000)
        print("done")
        sys.exit(3)
    """
    done = run_advised(tmp_path, source, "--trace", "a.trace")
    assert (done.returncode, done.stdout) == (3, "done\n")
    own, report = alike.split(done.stderr)
    assert own == ""
    report, found, advice = report.partition("arenapy advise\n")
    assert found and "  trace " in report
    lines = [line.split() for line in advice.splitlines()]
    assert [words[0] for words in lines] == ["use", "paste", "gain", "holds", "sure"]
    assert lines[1][1:] == ["arenapy", "run", "work.py"]
    assert "slab" not in advice.lower() and "bump" not in advice.lower()  # they are not for NumPy
    made = trace.load(tmp_path / "a.trace")
    assert made.kind == "Pool, NumPy" and made.complete


def test_a_trace_that_goes_with_the_advice_is_not_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(advise, "run_worker", Worker({"malloc": 2.0}))
    done = run_advised(tmp_path, "import numpy", "--json", "a.json")
    assert "arenapy run: NumPy's memory" in done.stderr and "  trace " not in done.stderr
    assert json.loads((tmp_path / "a.json").read_text())["trace"] is None


def test_a_program_without_numpy_has_no_advice(tmp_path):
    queue().save(tmp_path / "a.trace")  # of another program
    done = run_advised(tmp_path, "print(1)", "--trace", "a.trace")
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert done.stderr.endswith("arenapy run: no advice: the program did not import NumPy\n")


def test_a_program_that_cannot_be_started_is_said_in_one_line(tmp_path):
    path = ("/" + "x" * (128 << 10))[: (128 << 10) - len("PYTHONPATH=") - 2]  # as long as may be
    env = {**os.environ, "PYTHONPATH": path}
    done = run_advised(tmp_path, "import numpy", whole=True, env=env)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("arenapy: [Errno 7] ")
    assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("errors", ["2>&-", "2>/dev/full"])
def test_advice_that_cannot_be_written_changes_nothing(tmp_path, errors):
    (tmp_path / "work.py").write_text("print(1)")
    line = f"{shlex.quote(sys.executable)} -m arenapy run --quiet --advise work.py {errors}"
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (0, "1\n")


def test_a_program_that_is_killed_has_no_advice(tmp_path):
    done = run_advised(tmp_path, "import os; os.kill(os.getpid(), 15)")
    assert (done.returncode, done.stderr) == (128 + 15, "")


@pytest.mark.parametrize("leaves", [False, True])
def test_signals_reach_the_program(tmp_path, leaves):
    """Those of the group once, as Ctrl-C, and those of the command. The program alone obeys.

    If it `leaves` the group, what the group gets is passed on to it.
    """
    (tmp_path / "work.py").write_text(
        ("import os; os.setpgrp()\n" if leaves else "")
        + textwrap.dedent("""
        import signal, sys, time
        def obey(number, frame):
            print(number, flush=True)
            if number == signal.SIGQUIT:
                sys.exit(7)
        for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT:
            signal.signal(number, obey)
        print("on", flush=True)
        while True:
            time.sleep(0.01)
    """)
    )
    command = [sys.executable, "-m", "arenapy", "run", "--advise", "--quiet", "work.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        end = threading.Timer(TIMEOUT / 4, os.killpg, (process.pid, signal.SIGKILL))
        end.start()
        assert process.stdout.readline() == "on\n"
        for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTERM:
            if not leaves:
                process.send_signal(signal.SIGSTOP)
            os.killpg(process.pid, number)
            assert process.stdout.readline() == f"{int(number)}\n"
            process.send_signal(signal.SIGCONT)
            time.sleep(0.1)  # it may be passed on
        for number in signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT:
            process.send_signal(number)
            assert process.stdout.readline() == f"{int(number)}\n"
        assert process.wait(TIMEOUT) == 7
        end.cancel()
