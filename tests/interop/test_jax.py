"""JAX's rules: in a process of their own, as a process that has imported JAX must not fork."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest


def test_the_rules():
    if importlib.util.find_spec("jax") is None:
        pytest.skip("needs jax")
    rules = Path(__file__).with_name("jax_rules.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(rules)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    if done.returncode == 5 or " skipped" in done.stdout.splitlines()[-1]:
        pytest.skip(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout[-5000:]
