"""The README's tour runs as printed, and is as short as it says."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_tour_runs_as_printed():
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    statements = [line for line in code.splitlines() if line.strip()]
    assert 20 <= len(statements) <= 25
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr


def test_every_file_it_names_is_there():
    text = README.read_text()
    for name in re.findall(r"`((?:docs|arenapy|asv_benches)/[\w./]*|[A-Z]+\.md)`", text):
        assert (README.parent / name).exists(), name
    for name in re.findall(r"\]\(((?!http)[^)# ]+)", text):
        assert (README.parent / name).exists(), name
    for name in re.findall(r"python (asv_benches/[\w/]+\.py)", text):
        assert (README.parent / name).exists(), name
