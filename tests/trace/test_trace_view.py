"""What a trace's page says: groups, tables, histogram, sentences, against block after block."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_trace_blocks import CODES, traced

import arenapy
from arenapy import trace
from arenapy.trace import Frame
from arenapy.trace.holders import format_ns, grouped, holders, label, lifetimes, place
from arenapy.trace.timeline import blocks
from arenapy.trace.view import BINS, MAX_GROUPS, MAX_ROWS, View

SITES = ((), *(((Frame(f"/src/part{n}.py", n, f"f{n}"), Frame("/src/main.py", 1, "m")))
               for n in range(1, 30)))  # fmt: skip

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["alloc", "alloc", "alloc", "free"]),
        st.integers(1, 30),  # address
        st.integers(0, 1 << 20) | st.sampled_from([4096, 4097, 1 << 28, (1 << 28) + 1]),
        st.integers(0, 29),  # site
        st.integers(1, 3),  # thread
        st.sampled_from([0, 0, 7, 9]),  # stream
        st.integers(0, 1000),  # ns since the last event
    ),
    min_size=1,
    max_size=50,
)


def made(rows, sites=SITES):
    events = np.zeros(len(rows), trace.EVENT)
    now = 0
    for event, (name, address, nbytes, site, thread, stream, ns) in zip(events, rows, strict=True):
        now += ns
        event["operation"], event["time"] = CODES[name], now
        event["address"], event["nbytes"] = address << 40, nbytes
        event["thread"], event["stream"] = thread, stream
        event["site"] = site if name == "alloc" else 0
    return trace.Trace(events, "Pool", sites=sites)


def some_alloc(rows):
    return any(name == "alloc" for name, *_ in rows)


@given(EVENTS.filter(some_alloc), st.sampled_from(["site", "size", "thread", "stream"]))
def test_groups_have_every_block_once(rows, way):
    made_ = made(rows)
    found = blocks(made_)
    groups = grouped(found, made_.sites, way)
    for moment in range(found.moments):
        held = groups.bytes_at(found, moment)
        assert held.sum() == found.live[moment]
    names = [groups.names[of] for of in groups.of.tolist()]
    for name, site, n, thread, stream in zip(
        names, found.site.tolist(), found.nbytes.tolist(), found.thread.tolist(),
        found.stream.tolist(), strict=True,
    ):  # fmt: skip
        if way == "site":
            assert name == (f"part{site}.py:{site} f{site}" if site else label(place(())))
        elif way == "thread":
            assert name == f"thread {thread}"
        elif way == "stream":
            assert name == (f"stream {stream:#x}" if stream else "no stream")
        else:
            bounds = {"4 KiB": 4096, "64 KiB": 65536, "1 MiB": 1 << 20, "256 MiB": 1 << 28}
            most = bounds.get(name.removeprefix("blocks up to "), math.inf)
            least = max((b for b in [-1, *bounds.values()] if b < most), default=-1)
            assert name.endswith("above 256 MiB") or least < n <= most
    # Few colours: those of the highest scores, and all others in one.
    most = 3
    score = groups.bytes_at(found, found.peak)
    few = groups.largest(score, most)
    assert len(few.names) == min(len(groups.names), most + 1)
    assert (
        sorted(few.bytes_at(found, found.peak).tolist()[:most], reverse=True)
        == sorted(score.tolist(), reverse=True)[:most]
    )
    assert few.bytes_at(found, found.peak).sum() == score.sum()
    # Neither do those have one that are hardly seen.
    half = groups.largest(score, 100, 0.5)
    named = [name for name in half.names if not name.endswith(" others")]
    large = int((score >= 0.5 * score.sum()).sum())
    assert len(named) in (max(1, large), len(groups.names))
    assert half.bytes_at(found, found.peak).sum() == score.sum()


@given(EVENTS.filter(some_alloc))
def test_holders_are_those_of_a_loop(rows):
    made_ = made(rows)
    found = blocks(made_)
    groups = grouped(found, made_.sites, "site")
    for moment in (found.peak, found.moments - 1):
        count, held, since = Counter(), Counter(), defaultdict(list)
        for site, n, start, end in zip(
            found.site.tolist(), found.nbytes.tolist(), found.start.tolist(), found.end.tolist(),
            strict=True,
        ):  # fmt: skip
            if start <= moment < end:
                count[site] += 1
                held[site] += n
                since[site].append(start)
        for most in (100, 2):
            listed = holders(found, groups, made_.sites, moment, most)
            named = [row for row in listed if row.group >= 0]
            assert len(named) == min(most, len(count))
            assert [row.nbytes for row in named] == sorted(held.values(), reverse=True)[:most]
            for row in named:
                site = made_.sites.index(row.site)
                assert row.name == label(place(row.site))
                assert (row.blocks, row.nbytes) == (count[site], held[site])
                assert row.since == min(since[site])
            assert sum(row.nbytes for row in listed) == sum(held.values())
            assert sum(row.blocks for row in listed) == sum(count.values())


def test_the_stack_of_a_holder_is_that_of_most_bytes():
    sites = ((), (Frame("a.py", 1, "f"), Frame("b.py", 2, "g")), (Frame("a.py", 1, "f"),))
    rows = [("alloc", n, size, site, 1, 0, 1) for n, (size, site) in enumerate([(5, 1), (6, 2)], 1)]
    made_ = made(rows, sites)
    found = blocks(made_)
    (row,) = holders(found, grouped(found, sites, "site"), sites, 1, 5)
    assert (row.name, row.blocks, row.nbytes, row.site) == ("a.py:1 f", 2, 11, sites[2])


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["/v/site-packages/numpy/core.py", "/home/x.py"], 1),
        (
            [
                "/usr/lib/dist-packages/arenapy/commands/run/command.py",
                "<frozen importlib>",
                "/home/x.py",
            ],
            2,
        ),
        ([arenapy.errors.__file__, "/home/x.py"], 1),  # a checkout
        (["/home/numpy/x.py", "/home/y.py"], 0),  # somebody's own folder of that name
        (["/v/site-packages/pandas/x.py", "/home/y.py"], 0),
        (["/v/site-packages/torch/nn/x.py", "/home/y.py"], 1),
        (["<string>", "/home/y.py"], 0),
        (["/v/site-packages/numpy/a.py", "/v/site-packages/numpy/b.py"], 0),
    ],
)
def test_a_site_is_known_by_its_innermost_line_outside_of_numpy(files, expected):
    site = tuple(Frame(file, 1, "f") for file in files)
    assert place(site) is site[expected]


@given(st.lists(st.tuples(st.floats(0, 1e12), st.booleans()), max_size=50))
def test_lifetimes_are_counted_once(pairs):
    ages, freed = np.array([a for a, _ in pairs]), np.array([f for _, f in pairs], bool)
    found = lifetimes(ages, freed)
    assert (found.freed.sum(), found.kept.sum()) == (freed.sum(), (~freed).sum())
    assert (np.diff(found.edges) > 0).all()
    assert np.allclose(np.log10(found.edges[[0, -1]]) % 1, 0)
    for low, high, n_freed, n_kept in zip(
        found.edges, found.edges[1:], found.freed, found.kept, strict=False
    ):
        there = [f for a, f in pairs if low * (1 + 1e-9) <= max(a, 1) < high * (1 - 1e-9)]
        near = [f for a, f in pairs if low * (1 - 1e-9) <= max(a, 1) < high * (1 + 1e-9)]
        assert there.count(True) <= n_freed <= near.count(True)
        assert there.count(False) <= n_kept <= near.count(False)


@pytest.mark.parametrize(
    ("ns", "text"),
    [(0, "0 ns"), (12, "12 ns"), (999.9, "1 µs"), (1500, "1.5 µs"), (2e6, "2 ms"),
     (1.234e9, "1.23 s"), (5e12, "5,000 s")],
)  # fmt: skip
def test_times_for_people(ns, text):
    assert format_ns(ns) == text


# ---- the view


@given(EVENTS.filter(some_alloc), st.booleans(), st.integers(0, 20))
def test_a_view_shows_all_of_a_small_trace(rows, by_events, most):
    view = View(made(rows), by_events=by_events or None, most_blocks=most)
    found = view.blocks
    curves = view.curves
    assert curves.live.sum(axis=0)[:-1].tolist() == found.live.tolist()
    assert curves.live.shape[0] == len(view.colours.names) <= MAX_GROUPS + 1
    assert curves.x[-1] == view.x[-1] and (np.diff(curves.x) >= 0).all()
    assert (view.left <= view.right).all()
    assert len(view.drawn) == min(most, len(found))
    # What is drawn and what is merged make the whole, in bytes times their time.
    area = float(((view.right - view.left) * found.nbytes).sum())
    one_by_one = float(((view.right - view.left) * found.nbytes)[view.drawn].sum())
    merged = 0.0
    if view.merged is not None:
        shown = view.merged
        cell = (shown.right - shown.left) * shown.height / shown.share.size
        merged = float(shown.share.sum()) * cell
    assert math.isclose(one_by_one + merged, area, rel_tol=1e-6, abs_tol=1e-6)
    assert (view.merged is None) == (most >= len(found))
    assert any("merges" in note for note in view.notes()) == (most < len(found))
    for group in range(len(view.colours.names)):
        assert (view.colours.of == group).any()


@given(EVENTS.filter(some_alloc))
def test_rectangles_of_a_valid_trace_do_not_overlap(rows):
    """Addresses are farther apart here than blocks are large."""
    view = View(made(rows))
    assert not view.overlaps
    boxes = list(zip(view.left, view.right, view.bottom, view.top, strict=True))
    for i, (l1, r1, b1, t1) in enumerate(boxes):
        for l2, r2, b2, t2 in boxes[:i]:
            assert r1 <= l2 or r2 <= l1 or t1 <= b2 or t2 <= b1


def test_the_curve_of_a_long_trace_has_every_peak():
    made_ = trace.synthetic(2, 40_000)
    view = View(made_)
    live = view.blocks.live
    assert len(view.moments) <= 2 * BINS < len(live)
    drawn = view.curves.live.sum(axis=0)
    assert drawn.max() == live.max()
    assert drawn[:-1].tolist() == live[view.moments].tolist()
    # In every interval of the axis the highest moment is among those that are drawn.
    edges = np.linspace(view.x[0], view.x[len(live) - 1], BINS + 1)
    bins = np.searchsorted(edges, view.x[: len(live)], "right")
    for part in np.unique(bins)[::37]:
        there = np.flatnonzero(bins == part)
        assert live[np.intersect1d(there, view.moments)].max() == live[there].max()
    assert any(f"{len(view.moments):,} of {len(live):,} moments" in note for note in view.notes())


def test_names_that_are_no_places_are_told():
    assert View(trace.synthetic(0, 100)).overlaps
    assert any("only names of blocks" in note for note in View(trace.synthetic(0, 100)).notes())


def test_reserved_memory_that_is_not_all_is_not_shown():
    """Blocks outside of what is known to be reserved: the recording of it began too late."""
    calls = [("grow", 0x1000, 0x1000), ("alloc", 0x1000, 64), ("alloc", 0x9000, 0x2000)]
    assert View(traced(calls)).reserved is None
    assert View(traced(calls[:2])).reserved.nbytes.tolist() == [0x1000]
    assert dict(map(reversed, View(traced(calls[:2])).figures()))["reserved at the peak"] == "4 KiB"


def test_what_is_said():
    rows = [
        ("alloc", 1, 3 << 20, 1, 1, 0, 1_000_000),
        ("alloc", 2, 1 << 20, 2, 2, 7, 1_000_000),
        ("free", 1, 0, 0, 1, 0, 5_000_000),
        ("free", 5, 0, 0, 1, 0, 0),
    ]
    view = View(made(rows))
    said = " ".join(view.sentences())
    for text in (
        "Pool: 2 allocations of 4 MiB in all in 7 ms, by 2 threads and 1 stream.",
        "The peak was 4 MiB in 2 blocks, at 2 ms. 75% of the peak is from part1.py:1 f1.",
        "At the end, 1 block (1 MiB) was not freed. 1 MiB of this is from part2.py:2 f2.",
        "Half of the freed blocks lived at most 6 ms, and 90% lived at most 6 ms.",
    ):
        assert text in said
    assert view.notes() == [
        "Not shown: 1 free of blocks that were allocated before the recording began."
    ]
    assert view.figures() == [
        ("4 MiB", "live at the peak"), ("1 MiB", "not freed at the end"), ("2", "allocations"),
        ("7 ms", "recorded"),
    ]  # fmt: skip
    freed = View(made([*rows, ("free", 2, 0, 0, 1, 0, 1)]))
    assert "At the end, all blocks were freed." in freed.sentences()


@pytest.mark.parametrize(("kind", "how"), [("Pool", "--sites"), ("torch, device 0", "stacks=")])
def test_how_to_record_sites_is_said(kind, how):
    events = made([("alloc", 1, 5, 0, 1, 0, 1)]).events
    (note,) = (n for n in View(trace.Trace(events, kind)).notes() if "which code" in n)
    assert how in note


def test_a_cut_trace_and_one_without_times_are_told():
    events = made([("alloc", 1, 5, 1, 1, 0, 0)] * 2).events
    notes = View(trace.Trace(events, complete=False, sites=SITES)).notes()
    assert any("last events are missing" in note for note in notes)
    assert any("no times" in note for note in notes)
    assert View(trace.Trace(events, sites=SITES)).unit == "events"


def test_views_that_cannot_be():
    with pytest.raises(ValueError, match="no allocation"):
        View(traced([]))
    with pytest.raises(ValueError, match="no allocation"):
        View(traced([("free", 1), ("grow", 1, 5)]))
    with pytest.raises(ValueError, match="'colour' is not a way"):
        View(traced([("alloc", 1, 5)]), "colour")


def test_tables_are_short_and_whole():
    rows = [("alloc", n, n, n, 1, 0, 1) for n in range(1, 30)]
    view = View(made(rows))
    listed = view.holders(view.blocks.peak)
    assert len(listed) == MAX_ROWS + 1
    assert listed[-1].name == f"{29 - MAX_ROWS} others"
    assert sum(row.nbytes for row in listed) == view.blocks.live.max() == sum(range(1, 30))
