"""The programs of docs/ecosystem.md, each on its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = (Path(__file__).parents[2] / "docs/ecosystem.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
LIBRARIES = [re.search(r"interop import (\w+)", program)[1] for program in PROGRAMS]
MODULES = {"numba": "numba.cuda"}


@pytest.mark.parametrize(
    ("library", "program"), list(zip(LIBRARIES, PROGRAMS, strict=True)), ids=LIBRARIES
)
def test_the_guide(gpu, library, program):
    pytest.importorskip(MODULES.get(library, library))
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "arenapy:" not in done.stderr, done.stderr
