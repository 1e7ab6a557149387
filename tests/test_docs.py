"""What the documentation points to is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_every_file_and_test_it_names_is_there(page):
    text = page.read_text()
    for name, _, test in re.findall(r"`((?:tests|asv_benches|\.ci)/[\w./]+\.\w+)(::(\w+))?`", text):
        assert (ROOT / name).exists(), name
        if test:
            assert re.search(rf"^\s*def {test}\(", (ROOT / name).read_text(), re.M), test


def test_every_claim_of_the_comparison_that_is_ours_says_what_shows_it():
    rows = [line for line in (ROOT / "docs/comparison.md").read_text().splitlines() if "|" in line]
    shown = 0
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if set(row) <= set("| -") or not cells[0]:
            continue
        ours, by = cells[1], cells[-1]
        if ours.startswith("-") or ours == "none":
            assert not by, row
        else:
            assert "evidence.md#test_" in by or "_figures.md#" in by, row
            shown += 1
    assert shown > 20


def test_every_page_is_in_the_contents():
    index = (ROOT / "docs/index.md").read_text()
    for page in DOCS:
        if page.stem != "index":
            assert re.search(rf"^{page.stem}$", index, re.M), page.name


def test_every_test_that_a_table_leads_to_is_on_the_page_and_no_other():
    linked = {name for page in DOCS for name in re.findall(r"evidence\.md#(\w+)", page.read_text())}
    page = (ROOT / "docs/evidence.md").read_text()
    shown = re.findall(
        r"^### (\w+)\n\n```\{literalinclude\} \.\./(\S+)\n:pyobject: (\w+)$", page, re.M
    )
    assert len(shown) == page.count("###") == len(linked) > 40
    for heading, path, name in shown:
        assert heading == name and name in linked, heading
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.M), name
