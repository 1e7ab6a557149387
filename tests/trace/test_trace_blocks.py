"""Blocks of traces: lifetimes, live bytes and reserved memory, against loops over the events."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import arenapy
from arenapy import trace
from arenapy.trace.timeline import blocks, reserved

MIB = 1 << 20
CODES = trace.OPERATIONS
MOST = 2**64 - 1


def traced(calls):
    """A trace of (operation, address, nbytes)."""
    events = np.zeros(len(calls), trace.EVENT)
    for event, (name, *rest) in zip(events, calls, strict=True):
        event["operation"] = CODES[name]
        event["address"], event["nbytes"] = (*rest, 0)[:2]
    return trace.Trace(events, "made")


ADDRESS = st.integers(1, 6)
CALLS = st.lists(
    st.tuples(st.just("alloc"), ADDRESS, st.integers(0, 300))
    | st.tuples(st.just("free"), ADDRESS)
    | st.tuples(st.sampled_from(["mark", "reset"]), st.integers(10, 12))
    | st.tuples(st.just("reset"), st.just(0))
    | st.tuples(st.just("trim"), ADDRESS, st.integers(0, 300)),
    max_size=60,
)


def simply(calls):
    """(address, bytes, start, end) of each block, one event after the other; and earlier frees."""
    made, last, marks, earlier = [], {}, {}, 0
    for now, (name, number, *rest) in enumerate(calls):
        if name == "alloc":
            if number in last and made[last[number]][3] is None:
                made[last[number]][3] = now
            last[number] = len(made)
            made.append([number, rest[0], now, None])
        elif name == "free":
            if number in last:  # also after a reset: then it was held
                made[last.pop(number)][3] = now
            else:
                earlier += 1
        elif name == "mark":
            marks[number] = len(made)
        elif name == "reset":
            for block in made[marks.get(number, 0) :]:
                if block[3] is None:
                    block[3] = now
    for block in made:
        if block[3] is None:
            block[3] = len(calls)
    return [tuple(block) for block in made], earlier


def rows(found):
    columns = found.address, found.nbytes, found.start, found.end
    return list(zip(*(column.tolist() for column in columns), strict=True))


@given(CALLS)
def test_lifetimes_are_those_of_a_loop(calls):
    found = blocks(traced(calls))
    expected, earlier = simply(calls)
    assert rows(found) == expected
    assert found.earlier == earlier
    assert found.is_freed.tolist() == [end < len(calls) for *_, end in expected]


@given(CALLS, st.data())
def test_live_bytes_are_those_of_the_blocks_that_are_there(calls, data):
    found = blocks(traced(calls))
    live = [
        sum(n for _, n, start, end in rows(found) if start <= now < end)
        for now in range(len(calls))
    ]
    assert found.live.tolist() == live
    if calls:
        first = int(found.start[0]) if len(found) else 0  # of blocks that all have no bytes
        assert found.peak == (live.index(max(live)) if any(live) else first)
        assert [int(found.nbytes[found.at(now)].sum()) for now in range(len(calls))] == live
    # The same in groups, at some moments.
    groups = np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(found),
                                         max_size=len(found))), "i8")  # fmt: skip
    some = sorted(data.draw(st.sets(st.integers(0, max(0, len(calls) - 1)), max_size=9)))
    if not calls:
        return
    by = found.live_by(groups, 3, np.array(some, "i8"))
    assert by.sum(axis=0).tolist() == [live[now] for now in some]
    for group in range(3):
        mine = [row for row, of in zip(rows(found), groups, strict=True) if of == group]
        assert by[group].tolist() == [
            sum(n for _, n, start, end in mine if start <= now < end) for now in some
        ]


def test_the_area_under_the_curve_is_the_bytes_times_the_lifetimes():
    found = blocks(trace.synthetic(1, 3000))
    assert found.live.sum() == (found.nbytes * (found.end - found.start)).sum()
    assert found.live.max() > found.live[0]


def test_what_outlives_a_reset_lives_until_it_is_freed():
    calls = [("mark", 9), ("alloc", 1, 5), ("alloc", 2, 6), ("reset", 9), ("free", 1)]
    assert [row[3] for row in rows(blocks(traced(calls)))] == [4, 3]
    again = [*calls[:4], ("alloc", 1, 7), ("free", 1)]
    assert [row[3] for row in rows(blocks(traced(again)))] == [3, 3, 5]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4000)), max_size=40))
def test_an_arena_and_its_trace_agree(tmp_path_factory, program):
    """Scopes, held arrays, releases in any order: what the trace says is live is what is live."""
    path = tmp_path_factory.getbasetemp() / "arena.trace"
    arena = arenapy.Bump(MIB)
    held, unheld, scopes = [], [[]], []
    with trace.record(arena, path):
        for what, n in program:
            if what == 0:
                held.append(arena.empty(n, "u1"))
            elif what == 1:
                unheld[-1].append(arena.alloc(n))
            elif what == 2 and len(scopes) < 4:
                scopes.append(arena.scope())
                scopes[-1].__enter__()
                unheld.append([])
            elif scopes:
                unheld.pop()
                scopes.pop().__exit__(None, None, None)
            if held and n % 3 == 0:
                del held[n % len(held)]
        expected = sorted((a.ctypes.data, a.nbytes) for a in held)
        expected += [(b.address, b.nbytes) for part in unheld for b in part]
    found = blocks(trace.load(path))
    live = found.at(found.moments - 1) if found.moments else np.zeros(0, bool)
    there = zip(found.address[live].tolist(), found.nbytes[live].tolist(), strict=True)
    assert sorted(there) == sorted(expected)


REUSING = {
    "pool": lambda: arenapy.Pool(),
    "slab": lambda: arenapy.Slab(4000, 64),
}


@pytest.mark.parametrize("maker", REUSING)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4000)), max_size=40))
@example([(what, n) for what in (0, 1, 2, 1) for n in (1, 2, 3)] + [(3, 0), (3, 5), (4, 1), (4, 2)])
def test_an_allocator_that_reuses_and_its_trace_agree(tmp_path_factory, maker, program):
    """Blocks that are held or not; dropped, released, or let go by their last reader."""
    path = tmp_path_factory.getbasetemp() / "reusing.trace"
    allocator = REUSING[maker]()
    live = []
    with trace.record(allocator, path):
        for what, n in program:
            if what == 0:
                live.append(allocator.empty(n, "u1"))
            elif what == 1:
                live.append(allocator.alloc(n))
            elif what == 2:
                live.append(memoryview(allocator.alloc(n)))
            elif live and what == 3:
                del live[n % len(live)]
            elif live and hasattr(live[n % len(live)], "release"):
                live.pop(n % len(live)).release()
        held = [np.asarray(one) for one in live]
        expected = sorted((one.ctypes.data, one.nbytes) for one in held)
    found = blocks(trace.load(path))
    there = found.at(found.moments - 1) if found.moments else np.zeros(0, bool)
    listed = zip(found.address[there].tolist(), found.nbytes[there].tolist(), strict=True)
    assert sorted(listed) == expected


def test_a_block_that_grows_in_place_ends_and_begins(tmp_path):
    arena = arenapy.Bump(MIB)
    with trace.record(arena, tmp_path / "a.trace"):
        block = arena.alloc(100)
        assert arena.grow(block, 300) is block
    found = blocks(trace.load(tmp_path / "a.trace"))
    assert found.nbytes.tolist() == [100, 300]
    assert found.live.tolist()[-1] == 300


# ---- reserved memory

RANGES = st.lists(
    st.tuples(st.sampled_from(["grow", "grow", "trim"]), st.integers(0, 30), st.integers(0, 12)),
    max_size=30,
)


@given(RANGES, st.sampled_from([0, 2**63, MOST - 50]))
def test_reserved_ranges_are_those_of_a_set(calls, base):
    """One byte after the other: in a set since when it was put there."""
    trace_ = traced([(name, base + at, n) for name, at, n in calls])
    found = reserved(trace_)
    if all(name != "grow" for name, *_ in calls):
        assert found is None
        return
    since, lived = {}, set()
    counts = []
    for now, (name, at, n) in enumerate(calls):
        for byte in range(at, at + n):
            if name == "grow":
                since.setdefault(byte, now)
            elif byte in since:
                lived.add((byte, since.pop(byte), now))
        counts.append(len(since))
    lived |= {(byte, begun, len(calls)) for byte, begun in since.items()}
    seen = [
        (at + i - base, start, end)
        for at, n, start, end in zip(*(column.tolist() for column in found), strict=True)
        for i in range(n)
    ]
    assert len(seen) == len(set(seen))
    assert set(seen) == lived
    assert found.at(np.arange(len(calls))).tolist() == counts


MAKERS = {
    "pool": lambda: arenapy.Pool(),
    "pool that has some": lambda: arenapy.Pool(initial_bytes=5 * MIB),
    "pool of regions": lambda: arenapy.Pool(source=arenapy.Shared()),
    "slab": lambda: arenapy.Slab(MIB, 2, max_count=200),
    "arena": lambda: arenapy.Bump(MIB, max_bytes=1 << 30),
}


def reserved_by(allocator):
    if isinstance(allocator, arenapy.Bump):
        return allocator.capacity
    return allocator.stats().reserved_bytes


@pytest.mark.parametrize("maker", MAKERS)
@given(
    before=st.lists(st.integers(1, 9 * MIB), max_size=3),
    program=st.lists(st.integers(1, 9 * MIB) | st.integers(-6, 0), max_size=12),
)
def test_an_allocator_and_its_trace_agree(tmp_path_factory, maker, before, program):
    """A positive number is allocated, a negative one dropped, 0 trims: as much is reserved."""
    path = tmp_path_factory.getbasetemp() / "reserved.trace"
    allocator = MAKERS[maker]()
    most = MIB if maker == "slab" else 9 * MIB
    live = [allocator.alloc(min(n, most)) for n in before]
    expected = []
    with trace.record(allocator, path) as recorder:
        for n in program:
            if n > 0:
                live.append(allocator.alloc(min(n, most)))
            elif n < 0:
                live[n:] = []
            elif not isinstance(allocator, arenapy.Bump):
                allocator.trim()
            recorder.add("mark", 1)
            expected.append(reserved_by(allocator))
    made = trace.load(path)
    marks = np.flatnonzero(made.events["operation"] == CODES["mark"])
    found = reserved(made)
    assert ([] if found is None else found.at(marks).tolist()) == (
        [] if found is None else expected
    )
    if found is None:
        assert not any(expected)
        return
    # Every block lies in a range that is there.
    for address, nbytes, start, _ in rows(blocks(made)):
        there = (found.start <= start) & (start < found.end)
        starts, ends = found.address[there], (found.address + found.nbytes)[there]
        covered = (starts < address + nbytes) & (ends > address)
        inside = np.minimum(ends[covered], address + nbytes) - np.maximum(starts[covered], address)
        assert int(inside.sum()) == nbytes


def test_growth_that_fails_is_taken_back(tmp_path):
    """An arena whose alloc_many fails has the regions that it had, and the trace says so."""
    arena = arenapy.Bump(MIB, max_bytes=4 * MIB)
    with trace.record(arena, tmp_path / "a.trace"), pytest.raises(arenapy.OutOfMemory):
        arena.alloc_many([MIB, 2 * MIB, 8 * MIB])
    found = reserved(trace.load(tmp_path / "a.trace"))
    assert (found.end - found.start).tolist() != []
    last = np.array([len(trace.load(tmp_path / "a.trace")) - 1])
    assert found.at(last).tolist() == [arena.capacity] == [MIB]


def test_holes_are_not_reserved(tmp_path):
    arena = arenapy.Bump(MIB, arenapy.Host(grow=True), 64 * MIB)
    arrays = [arena.empty(nbytes, "u1") for nbytes in (100, 20 * MIB, 100, 20 * MIB, 100)]
    arena.reset()
    del arrays[1::2]
    arena.trim()
    with trace.record(arena, tmp_path / "a.trace"):
        arena.alloc(6 * MIB)
    found = reserved(trace.load(tmp_path / "a.trace"))
    last = np.array([len(trace.load(tmp_path / "a.trace")) - 1])
    assert found.at(last).tolist() == [arena.capacity] and arena.capacity < 12 * MIB


def test_files_of_version_1_say_nothing_of_it():
    assert reserved(traced([("alloc", 4096, 64), ("trim", 0, 4096)])) is None
