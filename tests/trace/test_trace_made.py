"""Traces that nobody recorded: saved, summed up, and made from a seed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arenapy import trace

MAX_NBYTES = (1 << 48) - 1
WORD = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2**63, 2**64 - 1])
SIZE = st.integers(0, MAX_NBYTES) | st.sampled_from([0, 1, MAX_NBYTES])
EVENT = st.tuples(
    st.sampled_from(list(trace.OPERATIONS.values())),
    WORD,
    SIZE,
    st.just(0) | WORD,
    st.integers(0, 2**56 - 1),
    st.integers(0, 2**16 - 1),
).filter(lambda row: row[1] + row[2] < 1 << 64)


@given(rows=st.lists(EVENT))
def test_save_and_load(tmp_path_factory, rows):
    path = tmp_path_factory.getbasetemp() / "saved.trace"
    rows.sort(key=lambda row: row[4])  # times never go back
    events = np.zeros(len(rows), trace.EVENT)
    names = ("operation", "address", "nbytes", "stream", "time", "thread")
    for event, row in zip(events, rows, strict=True):
        for name, value in zip(names, row, strict=True):
            event[name] = value
    made = trace.Trace(events, "made", started=5, process=6)
    made.save(path)
    found = trace.load(path)
    assert np.array_equal(found.events, events)
    assert (found.kind, found.complete, found.started, found.process) == ("made", True, 5, 6)


def test_a_cut_trace_stays_cut_when_saved(tmp_path):
    path = tmp_path / "a.trace"
    trace.Trace(np.zeros(0, trace.EVENT), complete=False).save(path)
    assert not trace.load(path).complete


def test_summary():
    events = np.zeros(4, trace.EVENT)
    events["operation"] = [1, 1, 2, 4]
    events["nbytes"] = [10, 30, 10, 0]
    events["thread"] = [1, 2, 2, 1]
    events["stream"] = [0, 0, 8, 9]
    events["time"] = [0, 1, 2, 3_000_000_000]
    found = trace.Trace(events, "Pool").summary()
    assert found.operations == {
        "alloc": 2,
        "free": 1,
        "mark": 0,
        "reset": 1,
        "trim": 0,
        "grow": 0,
        "keep": 0,
    }
    assert (found.threads, found.streams, found.seconds) == (2, 2, 3.0)
    assert (found.allocated_bytes, found.smallest, found.largest) == (40, 10, 30)
    assert "2 alloc, 1 free, 1 reset" in str(found)
    nothing = trace.Trace(events[:0]).summary()
    assert (nothing.smallest, nothing.largest, nothing.seconds) == (0, 0, 0.0)


@pytest.mark.parametrize("seed", range(4))
def test_synthetic_traces_are_what_they_are_said_to_be(seed):
    live_bytes = 1 << 30
    found = trace.synthetic(seed, 6000, live_bytes)
    events = found.events
    assert np.array_equal(events, trace.synthetic(seed, 6000, live_bytes).events)
    is_alloc = events["operation"] == trace.OPERATIONS["alloc"]
    signed = np.where(is_alloc, 1, -1) * events["nbytes"].astype("i8")
    live = np.cumsum(signed)
    assert live[-1] == 0 and live.min() == 0
    assert live_bytes / 2 < live.max() <= live_bytes
    # Every block is freed once, as large as it was, and after it was allocated.
    starts, ends = events[is_alloc], events[~is_alloc]
    assert len(np.unique(starts["address"])) == 6000
    order = np.argsort(ends["address"])
    assert np.array_equal(np.sort(starts["address"]), ends["address"][order])
    assert np.array_equal(starts["nbytes"], ends["nbytes"][order])
    assert (np.flatnonzero(~is_alloc)[order] > np.flatnonzero(is_alloc)).all()
    # Log-uniform: the logarithms have the mean and the spread of a uniform distribution.
    for half, phase in zip((0, 1), trace.PHASES[:: -1 if seed % 2 else 1], strict=True):
        logs = np.log(starts["nbytes"][half * 3000 : half * 3000 + 3000].astype(float))
        low, high = np.log([phase.smallest, phase.largest])
        assert low - 0.02 <= logs.min() and logs.max() <= high
        assert abs(logs.mean() - (low + high) / 2) < 0.05 * (high - low)
        assert abs(logs.std() - (high - low) / 12**0.5) < 0.05 * (high - low)


def test_lifetimes_are_exponential():
    """Where nothing is cut short: the mean is as meant, and the deviation equals it."""
    phase = trace.Phase(1000, 1000)
    events = trace.synthetic(0, 20_000, 1 << 20, [phase]).events
    is_alloc = events["operation"] == trace.OPERATIONS["alloc"]
    serial = np.cumsum(is_alloc)
    starts, ends = events["address"][is_alloc], events["address"][~is_alloc]
    born = dict(zip(starts.tolist(), serial[is_alloc].tolist(), strict=True))
    lives = [
        end - born[address]
        for address, end in zip(ends.tolist(), serial[~is_alloc].tolist(), strict=True)
        if born[address] < 15_000
    ]
    expected = (1 << 20) / 2 / 1000
    assert abs(np.mean(lives) / expected - 1) < 0.05
    assert abs(np.std(lives) / expected - 1) < 0.05


def test_synthetic_traces_that_make_no_sense():
    with pytest.raises(ValueError, match="live_bytes=5"):
        trace.synthetic(0, 10, 5)
    with pytest.raises(ValueError, match="allocations=1 in 2 phases"):
        trace.synthetic(0, 1)
