"""The pages of figures are made from the results files, and a difference is noticed."""

import copy
import html
import json
import os
import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))  # behind what is installed

from asv_benches.figures import chart
from asv_benches.figures import pages as figures
from asv_benches.support import report
from asv_benches.support import results as files
from asv_benches.support.results import Row
from asv_benches.support.rounds import Line

FILES = {
    "host.json": (figures.sections, figures.TEXT["host"]),
    "numpy.json": (figures.sections, figures.TEXT["numpy"]),
    "gpu.json": (figures.sections, figures.TEXT["gpu"]),
    "claims.json": (figures.claims, figures.TEXT["claims"]),
}


def numbers(found):
    """(what is said of it, the number) of each figure of a section."""
    for line in found.get("lines", []):
        yield line.what, figures.measured(line)
    for row in found.get("rows", []):
        yield row[0], row[1]


def change(results, what, **fields):
    """Another figure in the first section that has it."""
    for found in results.values():
        for i, line in enumerate(found.get("lines", [])):
            if line.what == what:
                found["lines"][i] = line._replace(**fields)
                return


def test_the_sentences_are_what_was_measured():
    made = figures.written_by_hand()
    assert {path.stem for path in made} >= {"README", "numpy", "comparison"}
    for path, text in made.items():
        assert path.read_text() == text, f"run {figures.RUN}: {path.name}"


@pytest.mark.parametrize("name", FILES)
def test_every_figure_is_on_its_page(name):
    make, text = FILES[name]
    results = files.load(name)
    assert results, "there is a results file"
    page = make(text, results)
    assert page in figures.pages().values()
    for section, found in results.items():
        assert found["stamp"]["commit"][:12] in page
        shown = list(numbers(found))
        assert shown, section
        for what, number in shown:
            row = next(line for line in page.splitlines() if line.startswith(f"| {what} |"))
            assert number in page and "|" in row, (section, what)


@pytest.mark.parametrize("name", ["host.json", "gpu.json"])
def test_another_figure_is_another_page(name):
    make, text = FILES[name]
    results = files.load(name)
    before = make(text, results)
    line = next(one for one in results["latency"]["lines"] if one.target)
    change(results, line.what, value=2 * line.value)
    assert make(text, results) != before
    change(results, line.what, kept=False)
    assert "**no**" in make(text, {"latency": results["latency"]})


def test_only_pages_that_are_others_are_written(tmp_path):
    figures.write_pages({"a.md": "1", "b.md": "2"}, tmp_path)
    os.utime(tmp_path / "a.md", (1, 1))
    figures.write_pages({"a.md": "1", "b.md": "3"}, tmp_path)
    assert (tmp_path / "a.md").stat().st_mtime == 1  # or Sphinx would read it again
    assert (tmp_path / "b.md").read_text() == "3"


# ---- the files


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_what_would_be_written_of_it(name, tmp_path):
    """So that a new measurement changes the lines of its own figures."""
    copy = tmp_path / name
    for section, found in files.load(name).items():
        files.store(copy, section, found.pop("stamp"), **found)
    assert copy.read_text() == (files.FOLDER / name).read_text()


def test_a_figure_is_one_line_of_its_file(tmp_path):
    path = tmp_path / "some.json"
    lines = [
        Row.of(Line("a", "met", 100 / 3, "ns", 5, at_least=True, timed=False)),
        Row.of(Line("a", "missed", 123456789.4, "x", 2, timed=False)),
        Row.of(Line("a", "shown", 0.0, "x")),
        Row("said", 2.0, "x", False),
    ]
    files.store(path, "a", {"commit": "1"}, lines=lines)
    files.store(path, "b", {"commit": "2"}, head=["", "x"], rows=[["y", "1"]])
    assert path.read_text().splitlines() == [
        "{", '"a": {', ' "stamp": {"commit": "1"},', ' "lines": [',
        '  ["met", 33.333333, "ns", true, "≥ 5"],', '  ["missed", 123456789, "x", false, "≤ 2"],',
        '  ["shown", 0, "x"],', '  ["said", 2, "x", false]', " ]", "},",
        '"b": {', ' "stamp": {"commit": "2"},', ' "head": ["", "x"],', ' "rows": [',
        '  ["y", "1"]', " ]", "}", "}",
    ]  # fmt: skip
    files.store(path, "b", {"commit": "3"}, head=["", "x"], rows=[["y", "2"]])
    found = json.loads(path.read_text())
    assert found["a"]["stamp"] == {"commit": "1"} and found["b"]["rows"] == [["y", "2"]]


def test_lines_become_the_cells_of_a_table():
    lines = [
        Line("a", "pool, random: 10 live", 28.283, "ns"),
        Line("a", "pool, random: 1,000 / 10", 4.8387, "x", 20, timed=False),
        Line("a", "slab: share", 1.0, "1"),
        Line("a", "slab: 1,000 / 10", 30.0, "x", 20, timed=False),
    ]
    found, table = report.as_table(iter(lines))
    assert found == lines
    assert table == {
        "head": ["", "10 live", "1,000 / 10", "share"],
        "rows": [
            ["pool, random", "28.3 ns", "4.84 x (≤ 20: met)", ""],
            ["slab", "", "30 x (≤ 20: MISSED)", "1"],
        ],
    }
    shown = figures.rows_of(table)
    assert shown["pool, random: 1,000 / 10"] == "4.84 times" and shown["slab: share"] == "1"


# ---- figures elsewhere


def test_the_readme_shows_the_results_and_their_ratios():
    results = files.load("host.json")
    text = (figures.ROOT / "README.md").read_text()
    made = figures.readme(figures.TEXT["readme"], text, results)
    assert made == text
    other = copy.deepcopy(results)
    change(other, "arena.alloc(64)", value=1234.0)
    change(other, "bytearray(64)", value=2468.0)
    changed = figures.readme(figures.TEXT["readme"], text, other)
    assert (
        re.search(r"\| 1,234 ns +\|", changed) and "`bytearray(64)`: 2,468 ns | 0.50 |" in changed
    )
    assert changed.partition(figures.BEGIN)[0] == text.partition(figures.BEGIN)[0]
    assert changed.partition(figures.END)[2] == text.partition(figures.END)[2]


def test_a_figure_in_a_sentence_is_of_its_row():
    rows = figures.every_row()
    (page, section), found = next((at, found) for at, found in rows.items() if at[1])
    row, shown = next(iter(found.items()))
    text = f'It is [1 or so]({page}.md#{section} "{row}"), [elsewhere]({page}.md#{section}).'
    made = figures.in_text(text, rows)
    assert made == text.replace("1 or so", shown)
    assert figures.in_text(made, rows) == made
    with pytest.raises(SystemExit, match="no results say"):
        figures.in_text(text.replace(row, "no such row"), rows)
    row, shown = next(iter(rows["gpu.json", None].items()))
    text = f'It is [1 or so](asv_benches/figures/gpu.json "{row}").'
    assert figures.in_text(text, rows) == text.replace("1 or so", shown)


def test_no_figure_of_a_results_file_stands_in_a_page_by_hand():
    """A link whose text has a number names the row that the number is of."""
    for page in [*figures.DOCS.glob("*.md"), figures.ROOT / "README.md"]:
        by_hand = re.findall(
            r"\[[^][]*\d[^][]*\]\((?:(?:\w+_figures|claims)\.md|asv_benches/figures)[^ ()]*\)",
            page.read_text(),
        )
        assert page.name in figures.pages() or not by_hand, page.name


def test_a_stamp_that_all_sections_share_is_given_once():
    make, text = FILES["numpy.json"]
    results = files.load("numpy.json")
    stamp = next(iter(results.values()))["stamp"]  # sections may be measured one by one
    for found in results.values():
        found["stamp"] = stamp | {"commit": "0123456789ab"}
    assert make(text, results).count("0123456789ab") == 1
    next(iter(results.values()))["stamp"]["commit"] = "ba9876543210"
    assert make(text, results).count("0123456789ab") == len(results) - 1


def test_a_check_names_the_page_that_differs(monkeypatch, capsys):
    page = figures.DOCS / "numpy.md"
    monkeypatch.setattr(sys, "argv", ["pages.py", "--check"])
    monkeypatch.setattr(figures, "written_by_hand", lambda: {page: page.read_text()})
    assert figures.main() == 0
    monkeypatch.setattr(figures, "written_by_hand", lambda: {page: page.read_text() + "more"})
    assert figures.main() == 1
    assert "numpy.md is not what the results say" in capsys.readouterr().out


def test_code_that_has_changed_since_is_named(monkeypatch, tmp_path):
    assert figures.changed_since("no such commit", ["."]) is None
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    assert figures.changed_since("HEAD", ["."]) is None, "no repository"


def test_every_claim_has_a_reason_and_a_verdict():
    claims = pytest.importorskip("asv_benches.claims")
    assert set(claims.CLAIMS) == set(figures.TEXT["claims"]["why"])
    one = Row("x", 1.0, "x", True)
    other = Row("y", 1.0, "x", False)
    shown = Row("z", 1.0, "x")
    assert claims.verdict([one, shown]) == "holds"
    assert claims.verdict([one, other]) == "holds in part"
    assert claims.verdict([other, shown]) == "does not hold"
    for key, found in files.load("claims.json").items():
        assert claims.verdict(found["lines"]) == found["verdict"], key


def test_the_chart_shows_what_was_measured():
    drawn = chart.CHART.read_text()
    (said,) = re.findall(r"<dc:description>(.*?)</dc:description>", drawn, re.S)
    assert json.loads(html.unescape(said)) == chart.values(), "run asv_benches/figures/chart.py"
    assert f"{min(chart.values().values()):.2g} µs" in drawn
