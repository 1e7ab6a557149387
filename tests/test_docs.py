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
            assert "`" in by or "](" in by, row
            shown += 1
    assert shown > 20


def test_every_page_is_in_the_contents():
    index = (ROOT / "docs/index.md").read_text()
    for page in DOCS:
        if page.stem != "index":
            assert re.search(rf"^{page.stem}$", index, re.M), page.name
