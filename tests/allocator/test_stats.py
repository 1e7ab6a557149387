"""Figures as text, as HTML, as dicts: what is shown is what is there, for any figures."""

import dataclasses
import html
import inspect
import json
import os
import pickle
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

import arenapy
from arenapy import stats
from arenapy.base.text import format_bytes
from arenapy.stats import BlockInfo, BumpStats, ClassStats, Defragmented, PoolStats, SlabStats

SHARES = ("hit_rate", "fragmentation")
COUNTS = st.integers(0, 2**63)
UP_TO = [4096 << i for i in range(20)] + [None]  # any bounds: nothing here knows the real ones


def figures_of(kind, **fixed):
    """Instances of a dataclass of counts."""
    counts = {f.name: COUNTS for f in dataclasses.fields(kind) if f.name not in fixed}
    return st.builds(kind, **counts, **{name: st.just(value) for name, value in fixed.items()})


UNUSED = {f.name: 0 for f in dataclasses.fields(ClassStats)}
classes = st.tuples(
    *(
        st.one_of(
            st.just(ClassStats(**UNUSED | {"index": i, "upper_bound": bound})),
            figures_of(ClassStats, index=i, upper_bound=bound),
        )
        for i, bound in enumerate(UP_TO)
    )
)
pools = classes.flatmap(lambda by_class: figures_of(PoolStats, classes=by_class))
everything = st.one_of(figures_of(BumpStats), figures_of(SlabStats), pools)

KINDS = [BumpStats, SlabStats, PoolStats, ClassStats]


#: What is in bytes and not called so, as documented.
SIZES = {
    BumpStats: {"capacity", "largest_free_extent"},
    SlabStats: {"item_size", "stride"},
    PoolStats: {"largest_free_block"},
}


def shown(kind, name, value):
    if name.endswith("_bytes") or name in SIZES[kind]:
        return format_bytes(value)
    return f"{value:,}"


def rows_of_text(text):
    """(label, value) of the summary, and the cells of the class rows."""
    summary, _, by_class = text.partition("\n\n")
    first, *lines = summary.splitlines()
    rows = [re.fullmatch(r"  (\w+(?: \w+)*) {2,}(\S.*)", line) for line in lines]
    assert all(rows), summary
    return (
        first,
        [row.groups() for row in rows],
        [re.split(r" {2,}", line.strip()) for line in by_class.splitlines()],
    )


class Tables(HTMLParser):
    """Tables as lists of rows of cells; anything but tables is refused."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tables = []
        self.open = []
        self.feed(text)
        self.close()
        assert self.open == [], "a tag is not closed"

    def handle_starttag(self, tag, attributes):
        assert tag in ("table", "tr", "th", "td") and not attributes
        self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        else:
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        assert self.open[-1] in ("th", "td")
        self.tables[-1][-1][-1] += data


@given(everything)
def test_text_and_html_show_every_figure(figures):
    title, rows, by_class = rows_of_text(str(figures))
    assert title == type(figures).__name__
    names = [f.name for f in dataclasses.fields(figures) if f.name != "classes"]
    names += [name for name in SHARES if hasattr(figures, name)]
    assert [label.replace(" ", "_") for label, _ in rows] == names
    for name, (_, value) in zip(names, rows, strict=True):
        if name not in SHARES:  # of these in test_shares
            assert value == shown(type(figures), name, getattr(figures, name)), name
    used = [one for one in getattr(figures, "classes", ()) if one.total_allocations
            or one.reserved_bytes]  # fmt: skip
    assert [row[0] for row in by_class[1:]] == [str(one.index) for one in used]
    for row, one in zip(by_class[1:], used, strict=True):
        cells = dict(zip(by_class[0], row, strict=True))
        assert cells["up to"] == (
            "no bound" if one.upper_bound is None else format_bytes(one.upper_bound)
        )
        assert cells["allocations"] == f"{one.total_allocations:,}"
        for column in ("allocated", "pending", "idle", "peak"):
            assert cells[column] == format_bytes(getattr(one, f"{column}_bytes"))
    tables = Tables(figures._repr_html_()).tables
    assert tables[0] == [[title, ""], *map(list, rows)]
    assert tables[1:] == ([by_class] if by_class else [])


@given(everything)
def test_dict_is_plain_and_whole(figures):
    plain = figures.as_dict()
    assert json.loads(json.dumps(plain)) == plain
    for name in SHARES:
        assert plain.pop(name, None) == getattr(figures, name, None)
    by_class = plain.get("classes")
    if by_class is not None:
        for one, source in zip(by_class, figures.classes, strict=True):
            assert [one.pop(name) for name in SHARES] == [getattr(source, n) for n in SHARES]
            assert ClassStats(**one) == source
        plain["classes"] = figures.classes
    assert type(figures)(**plain) == figures


@given(everything)
def test_a_prompt_shows_the_table_of_a_class_a_line(figures):
    if isinstance(figures, ClassStats):
        assert repr(figures).startswith(f"<ClassStats {figures.index}, ")
        assert "\n" not in repr(figures)
        assert f" {format_bytes(figures.allocated_bytes)} allocated>" in repr(figures)
    else:
        assert repr(figures) == str(figures)
        assert "\n" in repr(figures)


@given(everything)
def test_figures_pickle_and_hash(figures):
    assert pickle.loads(pickle.dumps(figures)) == figures
    assert hash(figures) == hash(dataclasses.replace(figures))


def pool(**figures):
    return PoolStats(
        **{f.name: 0 for f in dataclasses.fields(PoolStats)} | {"classes": ()} | figures
    )


@pytest.mark.parametrize(
    ("figures", "hit_rate", "fragmentation"),
    [
        ({}, 0.0, 0.0),
        ({"total_allocations": 4, "pool_hits": 3}, 0.75, 0.0),
        ({"total_allocations": 4, "pool_hits": 4}, 1.0, 0.0),
        ({"idle_bytes": 100, "largest_free_block": 100}, 0.0, 0.0),
        ({"idle_bytes": 100, "largest_free_block": 25}, 0.0, 0.75),
    ],
)
def test_shares(figures, hit_rate, fragmentation):
    whole = pool(**figures)
    assert (whole.hit_rate, whole.fragmentation) == (hit_rate, fragmentation)
    assert f"{hit_rate:.1%}" in str(whole) and f"{fragmentation:.1%}" in str(whole)
    one = ClassStats(**UNUSED | figures)
    assert (one.hit_rate, one.fragmentation) == (hit_rate, fragmentation)


def test_nearly_all_is_not_shown_as_all():
    text = str(pool(total_allocations=10**6, pool_hits=10**6 - 1))
    assert re.search(r"hit rate +99\.9%", text)


@pytest.mark.parametrize("kind", [*KINDS, BlockInfo, Defragmented])
def test_frozen_slotted_and_documented(kind):
    figures = kind(**{f.name: 0 for f in dataclasses.fields(kind)} | (
        {"classes": ()} if kind is PoolStats else {}
    ))  # fmt: skip
    name = dataclasses.fields(kind)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(figures, name, 1)
    assert not hasattr(figures, "__dict__")
    section = re.search(r"\nAttributes\n-+\n(.*)", inspect.getdoc(kind), re.DOTALL)[1]
    entries = re.findall(r"^(\w.*) : ", section, re.MULTILINE)
    named = [name for entry in entries for name in entry.split(", ")]
    expected = [f.name for f in dataclasses.fields(kind)]
    expected += [name for name in SHARES if hasattr(kind, name)]
    assert sorted(named) == sorted(expected)


@pytest.mark.full
def test_text_is_the_same_everywhere():
    """No colours, no wrapping, ASCII: whatever the terminal, the notebook and the locale."""
    program = "import arenapy; print(arenapy.Bump(1 << 20).stats())"
    outputs = set()
    for environment in (
        {"COLUMNS": "20", "TERM": "dumb"},
        {"COLUMNS": "300", "FORCE_COLOR": "1", "TERM": "xterm-256color"},
        {"NO_COLOR": "1", "PYTHONIOENCODING": "ascii:strict"},
    ):
        done = subprocess.run(
            [sys.executable, "-c", program], env=os.environ | environment,
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        outputs.add(done.stdout)
    (text,) = outputs
    assert text.isascii() and "\x1b" not in text
    assert not [line for line in text.splitlines() if line != line.rstrip()]


def test_html_is_escaped(monkeypatch):
    monkeypatch.setattr(stats, "format_bytes", lambda nbytes: "<b>&")
    text = arenapy.Bump(1 << 16).stats()._repr_html_()
    assert "<b>" not in text and html.escape("<b>&") in text
