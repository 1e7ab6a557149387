"""What the documentation points to is there, and its programs run.

Examples with a prompt are doctests, which Sphinx runs; test_gpu_docs.py has the guides about CUDA.
"""

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "docs"))

import evidence_page

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
ELSEWHERE = (
    "cuda",
    "streams",
    "overlap",
    "kernels",
    "larger",
    "ecosystem",
)  # test_gpu_{docs,ecosystem}.py
NEEDED = ("matplotlib", "torch", "dask", "distributed", "aiohttp", "uvicorn", "pyarrow")
PROGRAMS = [
    pytest.param(code, id=f"{page.stem} {number}")
    for page in DOCS
    if page.stem not in ELSEWHERE
    for number, code in enumerate(
        re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.M)
    )
]


@pytest.mark.parametrize("code", PROGRAMS)
@pytest.mark.full
def test_programs_run_as_printed(code, tmp_path):
    needed = [name for name in NEEDED if re.search(rf"^ *(import|from) {name}\b", code, re.M)]
    needed += ["matplotlib"] * ("arenapy.plot" in code)
    for name in needed:
        if not importlib.util.find_spec(name):
            pytest.skip(f"needs {name}")
    if "torch.cuda" in code and not importlib.import_module("torch").cuda.is_available():
        pytest.skip("needs a GPU")
    strict = [] if needed else ["-W", "error"]  # of others' warnings it is not the judge
    (tmp_path / "program.py").write_text(code)
    done = subprocess.run(
        [sys.executable, *strict, "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_the_cython_template_compiles(tmp_path):
    """To C, against what is installed; .ci/run's step downstream builds and runs it."""
    if not importlib.util.find_spec("Cython"):
        pytest.skip("needs Cython")
    source = ROOT / "docs/cython_template/running_median/median.pyx"
    done = subprocess.run(
        [sys.executable, "-m", "cython", "-3", "-Werror", source, "-o", tmp_path / "median.c"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_every_file_of_the_cython_template_is_shown():
    folder = ROOT / "docs/cython_template"
    shown = re.findall(
        r"^```\{literalinclude\} cython_template/(\S+)$", (ROOT / "docs/c_api.md").read_text(), re.M
    )
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {*shown} == {path for path in there if "__pycache__" not in path}


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
    linked = evidence_page.linked()
    page = evidence_page.page()
    shown = re.findall(
        r"^### (\w+)\n\n```\{literalinclude\} \.\./(\S+)\n:pyobject: (\w+)$", page, re.M
    )
    assert {heading for heading, _, _ in shown} == linked.keys()
    assert len(shown) == page.count("###") == len(linked) > 40
    for heading, path, name in shown:
        assert heading == name and path.endswith(f"{linked[name]}.py" if linked[name] else ".py")
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.M), name


def test_a_table_that_leads_to_no_test_or_to_two_is_an_error(tmp_path):
    """And the file in a link says which of two."""
    docs, tests = tmp_path / "docs", tmp_path / "tests"
    for path, text in {
        docs / "a.md": "[test](evidence.md#test_it), [test](evidence.md#test_other)",
        tests / "bump" / "test_a.py": "def test_it():\n    pass\n",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with pytest.raises(ValueError, match=r"not once: \['test_other'\]"):
        evidence_page.page(docs, tests)
    (tests / "test_b.py").write_text("def test_it(a):\n    pass\n\ndef test_other():\n    pass\n")
    with pytest.raises(ValueError, match=r"not once: \['test_it'\]"):
        evidence_page.page(docs, tests)
    (docs / "b.md").write_text('[test](evidence.md#test_it "bump/test_a")')
    page = evidence_page.page(docs, tests)
    assert "../tests/bump/test_a.py\n:pyobject: test_it\n" in page
    assert page.count(":pyobject:") == 2


@pytest.mark.parametrize("module", ["arenapy", "arenapy.cuda", "arenapy.testing"])
def test_everything_public_is_in_the_reference(module):
    pytest.importorskip("hypothesis")
    text = "".join((ROOT / f"docs/{page}.md").read_text() for page in ("reference", "debugging"))
    described = set(re.findall(r":: (arenapy[\w.]*)", text))
    own = {f"{module}.{name}" for name in importlib.import_module(module).__all__}
    figures = {f"arenapy.{name}" for name in importlib.import_module("arenapy.stats").__all__}
    modules = {"arenapy.plot", "arenapy.testing.asv"}
    unversioned = {name for name in own if not name.rpartition(".")[2].startswith("_")}
    assert unversioned - figures - modules <= described
