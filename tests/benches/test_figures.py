"""The pages of figures are made from the results files, and a difference is noticed."""

import copy
import html
import json
import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))  # behind what is installed

from asv_benches import chart, figures

PAGES = {
    "host_results.json": (figures.sections, figures.TEXT["host"]),
    "numpy_results.json": (figures.sections, figures.TEXT["numpy"]),
    "gpu_results.json": (figures.sections, figures.TEXT["gpu"]),
    "claims_results.json": (figures.claims, figures.TEXT["claims"]),
}


def numbers(found):
    """(what is said of it, the number) of each figure of a section."""
    for line in found.get("lines", []) + found.get("figures", []):
        yield line["what"], figures.measured(line)
    for row in found.get("rows", []):
        yield row[0], row[1]
    for trace in found.get("traces", []):
        yield trace["trace"], f"{trace['results']['arenapy']['ratio']:.3f}"


def test_the_pages_are_what_was_measured():
    made = figures.pages()
    assert {path.stem for path in made} >= {"README", "host_figures", "numpy_figures", "claims"}
    for path, text in made.items():
        assert path.read_text() == text, f"run asv_benches/figures.py: {path.name}"


@pytest.mark.parametrize("name", PAGES)
def test_every_figure_is_on_its_page(name):
    make, text = PAGES[name]
    results = figures.results_of(name)
    assert results, "there is a results file"
    page = make(text, results)
    for section, found in results.items():
        assert found["stamp"]["commit"][:12] in page
        shown = list(numbers(found))
        assert shown, section
        for what, number in shown:
            row = next(line for line in page.splitlines() if line.startswith(f"| {what} |"))
            assert number in page and "|" in row, (section, what)


@pytest.mark.parametrize("name", ["host_results.json", "gpu_results.json"])
def test_another_figure_is_another_page(name):
    make, text = PAGES[name]
    results = figures.results_of(name)
    before = make(text, results)
    line = next(one for one in results["latency"]["lines"] if one["limit"])
    line["value"] *= 2
    assert make(text, results) != before
    line["verdict"] = "MISSED"
    assert "**no**" in make(text, {"latency": results["latency"]})


def test_the_readme_shows_the_results_and_their_ratios():
    results = figures.results_of("host_results.json")
    text = (figures.ROOT / "README.md").read_text()
    made = figures.readme(figures.TEXT["readme"], text, results)
    assert made == text
    other = copy.deepcopy(results)
    line = next(x for x in other["latency"]["lines"] if x["what"] == "arena.alloc(64)")
    peer = next(x for x in other["latency"]["lines"] if x["what"] == "bytearray(64)")
    line["value"], peer["value"] = 1234.0, 2468.0
    changed = figures.readme(figures.TEXT["readme"], text, other)
    assert (
        re.search(r"\| 1,234 ns +\|", changed) and "`bytearray(64)`: 2,468 ns | 0.50 |" in changed
    )
    assert changed.partition(figures.BEGIN)[0] == text.partition(figures.BEGIN)[0]
    assert changed.partition(figures.END)[2] == text.partition(figures.END)[2]


def test_a_figure_in_a_sentence_is_of_its_row():
    rows = figures.every_row()
    (page, section), found = next((at, found) for at, found in rows.items() if found)
    row, shown = next(iter(found.items()))
    text = f'It is [1 or so]({page}.md#{section} "{row}"), [elsewhere]({page}.md#{section}).'
    made = figures.in_text(text, rows)
    assert made == text.replace("1 or so", shown)
    assert figures.in_text(made, rows) == made
    with pytest.raises(SystemExit, match="no results say"):
        figures.in_text(text.replace(row, "no such row"), rows)


def test_no_figure_of_a_results_file_stands_in_a_page_by_hand():
    """A link whose text has a number names the row that the number is of."""
    for page in [*figures.DOCS.glob("*.md"), figures.ROOT / "README.md"]:
        if page not in figures.GENERATED:
            by_hand = re.findall(
                r"\[[^][]*\d[^][]*\]\((?:docs/)?(?:\w+_figures|claims)\.md[^ ()]*\)",
                page.read_text(),
            )
            assert not by_hand, page.name


def test_a_stamp_that_all_sections_share_is_given_once():
    make, text = PAGES["numpy_results.json"]
    results = figures.results_of("numpy_results.json")
    for found in results.values():
        found["stamp"]["commit"] = "0123456789ab"
    assert make(text, results).count("0123456789ab") == 1
    next(iter(results.values()))["stamp"]["commit"] = "ba9876543210"
    assert make(text, results).count("0123456789ab") == len(results) - 1


def test_a_check_names_the_page_that_differs(monkeypatch, capsys):
    page = figures.DOCS / "gpu_figures.md"
    monkeypatch.setattr(sys, "argv", ["figures.py", "--check"])
    monkeypatch.setattr(figures, "pages", lambda: {page: page.read_text()})
    assert figures.main() == 0
    monkeypatch.setattr(figures, "pages", lambda: {page: page.read_text() + "more"})
    assert figures.main() == 1
    assert "gpu_figures.md is not what the results say" in capsys.readouterr().out


def test_code_that_has_changed_since_is_named(monkeypatch, tmp_path):
    assert figures.changed_since("no such commit", ["."]) is None
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    assert figures.changed_since("HEAD", ["."]) is None, "no repository"


def test_every_claim_has_a_reason_and_a_verdict():
    claims = pytest.importorskip("asv_benches.claims")
    assert set(claims.CLAIMS) == set(figures.TEXT["claims"]["why"])
    one = claims.Figure("x", 1.0, "x", True)
    other = claims.Figure("y", 1.0, "x", False)
    shown = claims.Figure("z", 1.0, "x")
    assert claims.verdict([one, shown]) == "holds"
    assert claims.verdict([one, other]) == "holds in part"
    assert claims.verdict([other, shown]) == "does not hold"
    stored = figures.results_of("claims_results.json")
    for key, found in stored.items():
        kept = [claims.Figure(**one) for one in found["figures"]]
        assert claims.verdict(kept) == found["verdict"], key


def test_the_chart_shows_what_was_measured():
    drawn = chart.CHART.read_text()
    (said,) = re.findall(r"<dc:description>(.*?)</dc:description>", drawn, re.S)
    assert json.loads(html.unescape(said)) == chart.values(), "run asv_benches/chart.py"
    assert f"{min(chart.values().values()):.2g} µs" in drawn
