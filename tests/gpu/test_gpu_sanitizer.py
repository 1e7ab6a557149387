"""Memory that kernels allocate from, under compute-sanitizer, on a real GPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from real_gpu import need_gpu

PROGRAM = Path(__file__).parents[1] / "support/sanitized_kernels.py"
FOUND = 86  # exit status

pytestmark = pytest.mark.full


@pytest.fixture
def sanitizer():
    """The command."""
    need_gpu()
    found = shutil.which(
        "compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin"
    )
    if found is None:
        pytest.skip("needs compute-sanitizer")
    return found


def checked(sanitizer, tool, *plant):
    """(exit status, output) of the program. Calls of the driver that fail are not of interest."""
    ran = subprocess.run(
        [sanitizer, "--tool", tool, "--report-api-errors", "no", "--error-exitcode", str(FOUND),
         sys.executable, str(PROGRAM), *plant],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return ran.returncode, ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("tool", "summary"),
    [
        ("memcheck", "ERROR SUMMARY: 0 errors"),
        ("racecheck", "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"),
        ("synccheck", "ERROR SUMMARY: 0 errors"),
    ],
)
def test_kernels_that_allocate_are_clean(sanitizer, tool, summary):
    code, output = checked(sanitizer, tool)
    assert code == 0, output
    assert "all kernels ran" in output and summary in output, output


def test_a_write_past_the_end_of_an_arena_is_reported(sanitizer):
    code, output = checked(sanitizer, "memcheck", "past")
    assert code == FOUND and "Invalid __global__ write of size 1 bytes" in output, output
    assert "write_past" in output and "ERROR SUMMARY: 0 " not in output, output


def test_a_race_in_shared_memory_is_reported(sanitizer):
    _, output = checked(sanitizer, "racecheck", "race")
    assert "RACECHECK SUMMARY: " in output and "RACECHECK SUMMARY: 0 " not in output, output
