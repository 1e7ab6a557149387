"""Traces from torch's memory history: what counts as what, and what is not a snapshot."""

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arenapy import trace
from arenapy.commands.replay import command as replay
from arenapy.commands.replay.program import program
from arenapy.trace import torch_snapshot as torch_history

MIB = 1 << 20
SIDE = 0x55D0_1234_5680  # a stream's handle
REMEDY = "_record_memory_history"


class Torch:
    """Snapshots of the form that torch 2.11 gives them."""

    def __init__(self, devices=1):
        self.traces = [[] for _ in range(devices)]
        self.time = 1_790_000_000_000_000

    def add(self, action, addr, size, stream=0, device=0, **more):
        self.time += 3
        self.traces[device].append(
            {"action": action, "addr": addr, "size": size, "stream": stream, "time_us": self.time,
             "compile_context": "N/A", "user_metadata": "", "pool_id": (0, 0), "frames": []} | more
        )  # fmt: skip

    def alloc(self, addr, size, stream=0, device=0):
        self.add("segment_alloc", addr & ~(2 * MIB - 1), 2 * MIB, stream, device)
        self.add("alloc", addr, size, stream, device)

    def free(self, addr, size, stream=0, device=0):
        self.add("free_requested", addr, size, stream, device)
        self.add("free_completed", addr, size, stream, device)

    def snapshot(self):
        return {
            "segments": [{"device": 0, "address": 4096, "blocks": [], "frames": []}],
            "device_traces": self.traces,
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False},
        }


def rows(made, *wanted):
    """Events as tuples: of blocks, or those that are wanted."""
    names = {trace.OPERATIONS[name]: name for name in wanted or ("alloc", "free")}
    return [
        (names[event["operation"]], *(int(event[n]) for n in ("address", "nbytes", "stream")))
        for event in made.events
        if event["operation"] in names
    ]


@pytest.fixture
def some():
    """What happens in training: allocations, frees, and all else that torch writes down."""
    torch = Torch()
    torch.alloc(0x7F00_0000_0000, 1000)
    torch.alloc(0x7F00_0000_0400, 5000, SIDE)
    torch.free(0x7F00_0000_0000, 1000)
    torch.add("segment_map", 0x7F00_0020_0000, 2 * MIB)
    torch.add("segment_unmap", 0x7F00_0020_0000, 2 * MIB)
    torch.traces[0].append({"action": "oom", "device_free": 7, "size": 1 << 40, "stream": 0})
    torch.add("snapshot", 0, 0)
    torch.add("annotate", 0x7F00_0000_0400, 5000, user_metadata="from a newer torch")
    torch.add("free_requested", 0x7F00_0000_0400, 5000, SIDE)  # another stream is at work on it
    torch.alloc(0x7F00_0000_0000, 2000)
    torch.add("free_completed", 0x7F00_0000_0400, 5000, SIDE)
    torch.add("segment_free", 0x7F00_0000_0000, 2 * MIB)
    return torch


SOME = [
    ("alloc", 0x7F00_0000_0000, 1000, 0),
    ("alloc", 0x7F00_0000_0400, 5000, SIDE),
    ("free", 0x7F00_0000_0000, 1000, 0),
    ("alloc", 0x7F00_0000_0000, 2000, 0),
    ("free", 0x7F00_0000_0400, 5000, SIDE),
]


def test_allocations_and_completed_frees_are_what_counts(some):
    made = trace.from_torch(some.snapshot())
    assert rows(made) == SOME
    assert made.kind == "torch, device 0" and made.complete
    assert (made.events["thread"] == 1).all()
    # Times are those of torch, in ns.
    assert made.started == (1_790_000_000_000_000 + 3) * 1000
    of_blocks = np.isin(made.events["operation"], [1, 2])
    assert made.events["time"][of_blocks].tolist() == [3000, 9000, 15000, 36000, 39000]
    summary = made.summary()
    assert (summary.streams, summary.earlier, summary.threads) == (1, 0, 1)
    assert program(made).live().max() == 7000


def test_segments_come_and_go(some):
    found = rows(trace.from_torch(some.snapshot()), "grow", "trim")
    assert found == [
        ("grow", 0x7F00_0000_0000, 2 * MIB, 0),
        ("grow", 0x7F00_0000_0000, 2 * MIB, SIDE),
        ("grow", 0x7F00_0020_0000, 2 * MIB, 0),
        ("trim", 0x7F00_0020_0000, 2 * MIB, 0),
        ("grow", 0x7F00_0000_0000, 2 * MIB, 0),
        ("trim", 0x7F00_0000_0000, 2 * MIB, 0),
    ]


def frame(line):
    return {"filename": "train.py", "line": line, "name": "step"}


STACKS = [[frame(1), frame(7)], [frame(2)], [frame(1), frame(7)], []]
ODD = [None, "frames", [5], [{}], [{"filename": "x", "line": "?", "name": "y"}]]


def test_stacks_become_sites(tmp_path):
    torch = Torch()
    for number, frames in enumerate(STACKS + ODD, 1):
        torch.add("alloc", number << 20, 10, frames=frames)
        torch.add("free_completed", number << 20, 10, frames=[frame(9)])
    made = trace.from_torch(torch.snapshot())
    made.save(tmp_path / "a.trace")
    for found in made, trace.load(tmp_path / "a.trace"):
        seen = [found.sites[number] for number in found.events["site"].tolist()]
        expected = [tuple(tuple(f.values()) for f in frames) for frames in STACKS] + [()] * len(ODD)
        assert seen[::2] == expected
        assert seen[1::2] == [()] * len(expected)
        assert len(found.sites) == 3


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_file_and_what_is_saved_of_it(tmp_path, some, protocol):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(some.snapshot(), protocol))
    assert torch_history.is_pickle(path)
    for name in path, str(path):
        assert rows(trace.from_torch(name)) == SOME
    made = trace.from_torch(path)
    made.save(tmp_path / "torch.trace")
    again = trace.load(tmp_path / "torch.trace")
    assert np.array_equal(again.events, made.events)
    assert (again.kind, again.started) == (made.kind, made.started)
    assert not torch_history.is_pickle(tmp_path / "torch.trace")


def test_blocks_from_before_the_history_are_counted_and_not_replayed(some):
    torch = Torch()
    torch.free(0x1000, 64)
    torch.alloc(0x1000, 128)
    torch.free(0x1000, 128)
    torch.free(0x9000, 256)
    made = trace.from_torch(torch.snapshot())
    assert made.summary().earlier == 2
    assert "2 frees of blocks from before" in str(made.summary())
    steps = program(made)
    assert (len(steps), steps.ignored) == (2, 2)
    assert "from before" not in str(trace.from_torch(some.snapshot()).summary())


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 7), st.integers(1, 1 << 30))),
    st.sampled_from([0, 1, 2, SIDE, 2**64 - 1]),
)
def test_any_history_is_what_was_live(calls, stream):
    """Against a dict: the bytes that are live after every step, and the frees from before."""
    torch, live, known, lives, earlier = Torch(), set(range(4)), {}, [], 0
    for wants, slot, nbytes in calls:
        address = (slot + 1) << 20
        if wants and slot not in live:
            torch.alloc(address, nbytes, stream)
            live.add(slot)
            known[slot] = nbytes
            lives.append(sum(known.values()))
        elif not wants and slot in live:
            torch.free(address, known.get(slot, 5), stream)
            live.remove(slot)
            if known.pop(slot, None) is None:
                earlier += 1
            else:
                lives.append(sum(known.values()))
    if not lives and not earlier:
        with pytest.raises(ValueError, match=REMEDY):
            trace.from_torch(torch.snapshot())
        return
    made = trace.from_torch(torch.snapshot())
    assert made.summary().earlier == earlier
    assert (made.events["stream"] == stream).all()
    if lives:
        assert program(made).live().tolist() == lives


def test_old_snapshots_have_no_times(some):
    for entry in some.traces[0]:
        entry.pop("time_us", None)
    made = trace.from_torch(some.snapshot())
    assert rows(made) == SOME
    assert made.started == 0 and not made.events["time"].any()


def test_times_never_go_back(some):
    some.traces[0][-2]["time_us"] -= 20
    times = trace.from_torch(some.snapshot()).events["time"]
    assert (times[1:] >= times[:-1]).all()


def test_the_device_is_the_one_with_a_history_or_the_one_named():
    torch = Torch(3)
    torch.alloc(0x1000, 10, device=1)
    assert trace.from_torch(torch.snapshot()).kind == "torch, device 1"
    torch.alloc(0x1000, 20, device=2)
    torch.add("snapshot", 0, 0, device=0)
    with pytest.raises(ValueError, match=r"devices \[1, 2\]: choose one"):
        trace.from_torch(torch.snapshot())
    assert rows(trace.from_torch(torch.snapshot(), 2)) == [("alloc", 0x1000, 20, 0)]
    for device in 0, 3, -1, "1":
        with pytest.raises(ValueError, match=r"device=.*has the history of devices \[1, 2\]"):
            trace.from_torch(torch.snapshot(), device)


# ---- what is not a snapshot


def entry(**changes):
    return {"action": "alloc", "addr": 4096, "size": 1, "stream": 0, "time_us": 1} | changes


@pytest.mark.parametrize(
    ("snapshot", "text"),
    [
        ({}, "no list of 'device_traces'"),
        ({"device_traces": None}, "no list of 'device_traces'"),
        ({"device_traces": "alloc"}, "no list of 'device_traces'"),
        ({"device_traces": []}, REMEDY),
        ({"device_traces": [[], []]}, REMEDY),
        ({"device_traces": [[{"action": "snapshot"}]]}, REMEDY),
        ({"device_traces": [5]}, r"device_traces\[0\] is int"),
        ({"device_traces": [[entry(), 5]]}, r"device_traces\[0\]\[1\] is not an entry"),
        ({"device_traces": [[], [{"addr": 5}]]}, r"device_traces\[1\]\[0\] is not an entry"),
        ({"device_traces": [[entry(action=7)]]}, r"device_traces\[0\]\[0\] is not an entry"),
        ({"device_traces": [[entry(addr=-1)]]}, "'alloc': addr=-1 is not a number"),
        ({"device_traces": [[entry(addr=2**64)]]}, "addr=18446744073709551616 is not a number"),
        ({"device_traces": [[entry(size=2**48)]]}, "size=281474976710656 is not a number"),
        ({"device_traces": [[entry(size=None)]]}, "size=None is not a number"),
        ({"device_traces": [[entry(size=1.5)]]}, "size=1.5 is not a number"),
        ({"device_traces": [[entry(stream="x")]]}, "stream='x' is not a number"),
        ({"device_traces": [[entry(time_us=-1)]]}, "time_us=-1 is not a number"),
        ({"device_traces": [[entry(time_us=1), entry(time_us=2**55)]]}, "times from 1 to"),
        ({"device_traces": [[entry(time_us=2**62)]]}, "times from"),
        ({"device_traces": [[{"action": "free_completed"}]]}, "'free_completed': addr=None"),
    ],
)
def test_what_is_wrong_with_a_dict(snapshot, text):
    with pytest.raises(ValueError, match=text):
        trace.from_torch(snapshot)


@pytest.mark.parametrize(
    ("snapshot", "text"),
    [([{}], "a list, as of torch.cuda.memory_snapshot"), (None, "NoneType"), (5, "int")],
)  # fmt: skip
def test_what_is_no_dict(tmp_path, snapshot, text):
    with pytest.raises(TypeError, match=text):
        trace.from_torch(snapshot)
    (tmp_path / "other.pickle").write_bytes(pickle.dumps(snapshot))
    with pytest.raises(ValueError, match=f"is not a snapshot of torch's: .*{text}"):
        trace.from_torch(tmp_path / "other.pickle")


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_file_runs_nothing(tmp_path, some, protocol):
    made = tmp_path / "made"
    found = some.snapshot() | {"more": Hostile(str(made))}
    path = tmp_path / "hostile.pickle"
    path.write_bytes(pickle.dumps(found, protocol))
    with pytest.raises(ValueError, match=r"is not a snapshot .*names posix\.mkdir"):
        trace.from_torch(path)
    assert not made.exists()
    pickle.loads(path.read_bytes())
    assert made.exists(), "it would have"


def test_a_file_that_was_cut(tmp_path):
    torch = Torch()
    torch.alloc(0x1000, 10)
    text = pickle.dumps(torch.snapshot())
    path = tmp_path / "cut.pickle"
    for n in range(len(text)):
        path.write_bytes(text[:n])
        with pytest.raises(ValueError, match=r"cut\.pickle' is not a snapshot"):
            trace.from_torch(path)


def test_other_files(tmp_path):
    path = tmp_path / "a.trace"
    trace.synthetic(0, 10).save(path)
    with pytest.raises(ValueError, match="is not a snapshot"):
        trace.from_torch(path)
    with pytest.raises(FileNotFoundError):
        trace.from_torch(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        torch_history.is_pickle(tmp_path / "none")
    (tmp_path / "empty").touch()
    assert not torch_history.is_pickle(tmp_path / "empty")


def test_replay_takes_a_snapshot(tmp_path, some, capsys):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(some.snapshot()))
    assert replay.main([str(path), "--with", "pool", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trace"]["operations"]["alloc"] == 3
    assert found["results"][0]["peak_live"] == 7000
    path.write_bytes(pickle.dumps({"device_traces": []}))
    with pytest.raises(SystemExit):
        replay.main([str(path), "--with", "pool"])
    assert REMEDY in capsys.readouterr().err


def test_torch_is_not_needed():
    source = Path(torch_history.__file__).read_text()
    assert "import torch" not in source
