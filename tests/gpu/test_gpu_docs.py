"""The programs in the guides about CUDA run as printed: on the simulated driver, and on a GPU."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
from cuda_support import a_gpu
from real_gpu import need_gpu

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("cuda", "streams", "overlap", "kernels", "larger")
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


def test_the_programs_whose_kernels_allocate(cupy, capsys):
    runpy.run_path(str(DOCS / "examples/kernel_rows.py"))["main"](100_000)
    assert "longest: 77031, 351 numbers, the largest is 21933016" in capsys.readouterr().out
    runpy.run_path(str(DOCS / "examples/kernel_table.py"))["main"](1_000_000)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(line.endswith("wrong: 0") for line in lines)


def test_the_reduction_of_a_file_on_a_gpu(cupy, tmp_path):
    values = np.random.default_rng(3).standard_normal(3_000_001, "f4") * 2 - 5
    values.tofile(tmp_path / "data.f4")
    moments = runpy.run_path(str(DOCS / "examples/out_of_core_gpu.py"))["moments"]
    count, *found = moments(str(tmp_path / "data.f4"), 1 << 20)
    assert count == len(values)
    wanted = (values.mean(dtype="f8"), values.std(dtype="f8"), values.max())
    assert found == pytest.approx(wanted, abs=1e-6)
