"""Replays on allocators of device memory: their traces, their figures, and what is said of them."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from cuda_support import a_gpu
from simulated_memory import OUT_OF_MEMORY

import arenapy
from arenapy import trace
from arenapy.commands.replay import device as gpu_heaps
from arenapy.commands.replay.program import program

sys.path.append(str(Path(__file__).parents[2]))  # behind what is installed

from asv_benches.gpu import growth
from asv_benches.gpu import replay as gpu_replay
from asv_benches.gpu import traces as gpu_traces

MIB = 1 << 20
SIDE = 0x5000


def traced(*calls):
    """A trace of (operation, address, nbytes, stream)."""
    events = np.zeros(len(calls), trace.EVENT)
    for event, (name, *rest) in zip(events, calls, strict=True):
        event["operation"] = trace.OPERATIONS[name]
        event["address"], event["nbytes"], event["stream"] = (*rest, 0, 0)[:3]
    return trace.Trace(events, "made")


class Pages(gpu_heaps.Heap):
    """Pages of 1000 bytes for every block; they are kept, and not shared."""

    def __init__(self, fails_at=None):
        self.kept, self.live, self.calls = {}, {}, []
        self.fails_at = fails_at

    def take(self, nbytes, stream):
        pages = -(-nbytes // 1000)
        if len(self.calls) == self.fails_at:
            raise MemoryError("full")
        self.calls.append(("take", nbytes, stream))
        idle = self.kept.setdefault(pages, [])
        block = idle.pop() if idle else object()
        self.live[block] = pages
        return block

    def give(self, block, nbytes, stream):
        self.calls.append(("give", nbytes, stream))
        self.kept[self.live.pop(block)].append(block)

    def reserved(self):
        idle = sum(pages * len(blocks) for pages, blocks in self.kept.items())
        return 1000 * (idle + sum(self.live.values()))


MADE = traced(
    ("alloc", 1, 500), ("alloc", 2, 1500, SIDE), ("free", 1), ("alloc", 3, 2500), ("free", 2),
    ("alloc", 4, 900, SIDE + 8), ("free", 3), ("alloc", 2, 1900),
)  # fmt: skip


def measured(made, heap, **more):
    steps, streams = program(made), gpu_replay.streams_of(made)
    return gpu_replay.measure(heap, steps, streams, [None, *map(str, range(1, 9))], **more)


def test_the_figures_are_those_of_the_heap():
    found = measured(MADE, Pages(), device_used=iter(range(100, 200)).__next__)
    assert found["peak_live"] == 4000  # blocks 2 and 3
    assert found["peak_reserved"] == 1000 + 2000 + 3000
    assert found["ratio"] == found["later_ratio"] == 6000 / 4000
    # It was read at first, and when the reserved figure changed: thrice.
    assert found["device_ratio"] == 3 / 4000
    assert found["live_at_peak"] == 1
    assert found["event_ns"] > 0


def test_blocks_are_allocated_and_freed_on_the_streams_of_their_allocations():
    heap = Pages()
    measured(MADE, heap)
    first = heap.calls[: len(heap.calls) // (1 + gpu_replay.TIMED_PASSES)]
    assert first == [
        ("take", 500, None), ("take", 1500, "1"), ("give", 500, None), ("take", 2500, None),
        ("give", 1500, "1"), ("take", 900, "2"), ("give", 2500, None), ("take", 1900, None),
        *sorted([("give", 900, "2"), ("give", 1900, None)], key=first[8:].index),
    ]  # fmt: skip
    assert heap.calls == first * (1 + gpu_replay.TIMED_PASSES)
    assert not heap.live


def test_streams_are_numbered():
    made = traced(("alloc", 1, 1, 70), ("free", 1, 1, 99), ("alloc", 2, 1), ("alloc", 3, 1, 60))
    assert gpu_replay.streams_of(made).tolist() == [2, 0, 1]
    assert gpu_replay.streams_of(traced(("alloc", 1, 1))).tolist() == [0]


def test_a_heap_that_does_not_say_is_judged_by_the_device():
    class Silent(Pages):
        def reserved(self):
            return None

    heap = Silent()
    found = measured(MADE, heap, device_used=lambda: 50 + Pages.reserved(heap))
    assert found["peak_reserved"] == 6000
    assert found["ratio"] == found["device_ratio"] == 1.5


def test_a_heap_that_refuses(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(gpu_heaps.HEAPS, "loop", lambda peak_live: Pages(fails_at=3))
    steps = program(MADE)
    steps.save(tmp_path)
    np.save(tmp_path / "streams.npy", np.zeros(5, int))
    gpu_replay.child("loop", tmp_path)
    assert json.loads(capsys.readouterr().out) == {"note": "failed: MemoryError: full"}


@pytest.mark.parametrize("name", ["torch", "cupy", "rmm"])
@pytest.mark.full
def test_what_is_not_there_is_said(tmp_path, name):
    if gpu_heaps.HEAPS[name].version() != gpu_heaps.NOT_INSTALLED:
        pytest.skip(f"{name} is installed")
    results = gpu_replay.replay(MADE, [name, "loop"])
    assert results[name]["note"].startswith(
        f"missing: ModuleNotFoundError: No module named '{name}"
    )
    assert results["loop"]["peak_live"] == 4000
    assert results["loop"]["peak_reserved"] == 0


@pytest.mark.parametrize(
    ("ratios", "kept", "words"),
    [
        ({"arenapy": 1.2, "torch": 1.2, "rmm": 1.5, "cupy": 1.3}, True, "kept: arenapy 1.200"),
        ({"arenapy": 1.2, "torch": 1.1, "rmm": 1.5, "cupy": 1.3}, False, "torch 1.100 is less"),
        ({"arenapy": 1.2, "torch": 1.1, "rmm": 1.5, "cupy": 1.3}, False, "MISSED"),
        ({"arenapy": 1.2, "torch": 1.3, "rmm": 1.5}, False, "NOT SHOWN"),
        ({"arenapy": 1.2, "torch": 1.3, "rmm": 1.5}, False, "cupy was not run"),
        ({"arenapy": 1.2, "torch": 1.1}, False, "MISSED"),
        ({"torch": 1.3, "rmm": 1.5, "cupy": 1.2}, False, "arenapy was not run"),
    ],
)
def test_the_verdict(ratios, kept, words):
    missing = {name: {"note": "missing"} for name in gpu_heaps.HEAPS if name not in ratios}
    for said, of_device in (("ratio", "device_ratio"), ("device_ratio", "ratio")):
        # The larger account counts, whosever it is.
        results = missing | {name: {said: x, of_device: x / 2} for name, x in ratios.items()}
        says_the(results, kept, words)


def says_the(results, kept, words):
    found = gpu_replay.verdict(results)
    assert found[0] == kept
    assert words in found[1]


def test_what_the_results_file_has_of_a_trace():
    """The larger account, and in brackets what the allocator says, if that is less."""
    results = {
        "arenapy": {"ratio": 1.02863, "device_ratio": 1.02863},
        "cupy": {"ratio": 1.135, "device_ratio": 1.168},
        "torch": {"ratio": 1.2, "device_ratio": 1.1},
        "rmm": {"note": "missing"},
        "rmm-arena": {"ratio": 2.0, "device_ratio": 2.0},
        "loop": {"ratio": 0.0, "device_ratio": 0.0},
    }
    found = gpu_replay.stored([{"trace": "made", "kept": False, "results": results}])
    assert found["head"][:-1] == ["", "arenapy", "cupy", "torch", "rmm"]
    assert found["rows"] == [["made", "1.029", "1.168 (1.135)", "1.200", "", "**no**"]]


def test_the_command(tmp_path, capsys):
    MADE.save(tmp_path / "made.trace")
    out = tmp_path / "figures.json"
    command = ["--with", "loop", "--file", str(tmp_path / "made.trace"), "--json", str(out)]
    assert gpu_replay.main(command) == 1
    assert "NOT SHOWN" in capsys.readouterr().out
    found = json.loads(out.read_text())
    (one,) = found["traces"]
    assert one["trace"] == "made.trace" and not one["kept"]
    assert one["results"]["loop"]["peak_live"] == 4000
    assert found["machine"]["arenapy"] == arenapy.__version__
    with pytest.raises(SystemExit, match="no trace is called 'none'"):
        gpu_replay.main(["--quick", "--trace", "none"])
    with pytest.raises(SystemExit):
        gpu_replay.main(["--with", "malloc"])
    assert "'malloc' is none of" in capsys.readouterr().err


@pytest.mark.parametrize("call", ["cuDevicePrimaryCtxRetain", "cuMemGetInfo"])
def test_a_device_whose_memory_others_have(call):
    """Not even its name can be had, and the figures of "loop" need none."""
    with a_gpu() as gpu:
        gpu.fails[call] = OUT_OF_MEMORY
        assert "OUT_OF_MEMORY" in gpu_replay.machine()["device"]


@pytest.mark.parametrize("name", ["arenapy", "arenapy-class", "arenapy-driver-pool"])
def test_arenapys_pools(name, tmp_path):
    """On the simulated driver, whose free memory tells the same as the pool."""
    made = gpu_traces.random_trace(3, gpu_traces.uniform(MIB), 60, 20 * MIB)
    steps, streams = program(made), gpu_replay.streams_of(made)
    streams[::3] = 1
    steps.save(tmp_path)
    np.save(tmp_path / "streams.npy", streams)
    with a_gpu():
        found = gpu_replay.in_this_process(name, tmp_path)
    assert found["peak_live"] == steps.live().max()
    assert found["later_ratio"] >= found["ratio"] == found["device_ratio"] >= 1
    assert found["event_ns"] > 0


# ---- traces


@pytest.mark.parametrize("sizes", gpu_traces.SIZES)
def test_random_traces(sizes):
    made = gpu_traces.random_trace(5, sizes, 2000, 512 * MIB)
    assert np.array_equal(made.events, gpu_traces.random_trace(5, sizes, 2000, 512 * MIB).events)
    assert not np.array_equal(
        made.events, gpu_traces.random_trace(6, sizes, 2000, 512 * MIB).events
    )
    steps, summary = program(made), made.summary()
    assert (summary.operations["alloc"], summary.earlier, steps.ignored) == (2000, 0, 0)
    assert len(steps) == len(made)
    live = steps.live()
    assert live.min() >= 0 and live.max() < 512 * MIB
    is_alloc = made.events["operation"] == trace.OPERATIONS["alloc"]
    assert len(np.unique(made.events["address"][is_alloc])) == 2000


def test_a_random_trace_allocates_in_73_of_100_steps_while_there_is_room():
    made = gpu_traces.random_trace(0, gpu_traces.uniform(1000), 20_000)
    is_alloc = made.events["operation"] == trace.OPERATIONS["alloc"]
    until = int(np.flatnonzero(is_alloc)[-1])
    assert abs(is_alloc[:until].mean() - 0.73) < 0.01
    assert abs(made.events["nbytes"].astype(float).mean() - 500) < 10


def test_sizes():
    random = np.random.default_rng(0)
    drawn = gpu_traces.SIZES["log-normal"](random, 100_000)
    assert drawn.min() >= 1 and drawn.max() <= gpu_traces.LARGEST_LOG_NORMAL
    assert abs(np.median(drawn) / (256 << 10) - 1) < 0.05
    assert abs(np.log(drawn[drawn > 1]).std() / 2.5 - 1) < 0.05


@pytest.mark.parametrize("streams", [[0, 0, 0], [0, 900, 900], [900, 800, 900]])
def test_packed_traces(tmp_path, streams):
    """Addresses and streams become numbers that are told apart as before; the rest stays."""
    made = traced(
        ("alloc", 1 << 40, 7, streams[0]), ("alloc", 1 << 41, 1 << 40, streams[1]),
        ("free", 1 << 40, 7, streams[2]),
    )  # fmt: skip
    made.events["time"] = [5000, 5000, 9000]
    made.events["thread"] = 1
    gpu_traces.pack(made, tmp_path / "a.npz")
    found = gpu_traces.unpack(tmp_path / "a.npz")
    for name in "time", "nbytes", "operation", "thread":
        assert np.array_equal(found.events[name], made.events[name]), name
    assert found.kind == "made"
    assert len(np.unique(found.events["address"])) == 2
    assert found.events["address"][0] == found.events["address"][2] != 0
    numbers = dict(zip(streams, found.events["stream"].tolist(), strict=True))
    assert [numbers[one] for one in streams] == found.events["stream"].tolist()
    assert sorted(numbers.values()) == list(
        range(0 if 0 in numbers else 1, len(numbers) + (0 not in numbers))
    )
    assert numbers.get(0, 0) == 0


def test_who_runs_out_keeps_no_block():
    lines = gpu_heaps.script(program(MADE), gpu_replay.streams_of(MADE), [None] * 9)
    assert growth.ran_out(Pages(), lines) is None
    heap = Pages(fails_at=3)
    assert growth.ran_out(heap, lines) == 3
    assert len(heap.calls) == 3 + 1 and not heap.live


def test_only_a_range_that_grows_serves_growing_blocks_within_the_limit():
    for kept in (gpu_traces.SMALL, gpu_traces.MEDIUM):
        made = gpu_traces.growing_sequences(kept=kept)
        with a_gpu() as gpu:
            gpu.memory.sizes = gpu.MEMORY = (16 << 30, 1 << 30)
            gpu.memory.fresh = None
            ours = growth.figures("arenapy-grow", made, lambda: gpu.memory.used[0])
            regions = growth.figures("arenapy", made, lambda: gpu.memory.used[0])
        assert ours["ran_out"] is None and ours["ratio"] < 1.04
        assert 0 < regions["ran_out"] < len(made.events) and regions["ratio"] > 1.15


def test_what_is_compared():
    found = gpu_traces.traces(quick=True)
    assert set(gpu_traces.SIZES) <= set(found)
    assert set(gpu_replay.PEERS) < set(gpu_heaps.HEAPS)
    found |= gpu_traces.made_to_fragment(quick=True)
    for made in found.values():
        assert program(made).live().max() < 20 << 30
    if gpu_traces.TRAINING.exists():
        assert gpu_traces.TRAINING.stat().st_size < 300_000
        training = found["torch training"]
        assert training.kind.startswith("torch") and training.summary().earlier == 0
