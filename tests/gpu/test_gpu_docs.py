"""The programs in the guides about CUDA run as printed: on the simulated driver, and on a GPU."""

import re
from pathlib import Path

import pytest
from cuda_support import a_gpu
from real_gpu import need_gpu

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("cuda", "streams", "overlap", "larger")
PROGRAMS = [
    pytest.param(code, id=f"{page} {number}")
    for page in PAGES
    for number, code in enumerate(
        re.findall(r"^```python\n(.*?)^```", (DOCS / f"{page}.md").read_text(), re.DOTALL | re.M)
    )
]


def test_there_are_programs():
    assert {param.id.split()[0] for param in PROGRAMS} == set(PAGES)


@pytest.mark.parametrize("code", PROGRAMS)
def test_on_the_simulated_driver(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with a_gpu():
        exec(compile(code, "a guide", "exec"), {})


@pytest.mark.parametrize("code", PROGRAMS)
def test_on_a_gpu(code, tmp_path, monkeypatch):
    need_gpu()
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "a guide", "exec"), {})
