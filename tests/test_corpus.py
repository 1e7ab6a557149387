"""What coverage has found worth keeping (tests/fuzz_coverage.py) runs on every build."""

from pathlib import Path

import pytest
from fuzz_targets import MACHINES

from arenapy.testing.guided_process import target_of

CORPUS = Path(__file__).parent / "corpus"


@pytest.mark.parametrize("name", MACHINES)
def test_corpus(name):
    inputs = sorted((CORPUS / name).iterdir())
    assert inputs
    machine = type(MACHINES[name].__name__, (MACHINES[name],), {"__module__": "fuzz_targets"})
    run = target_of(machine)
    for path in inputs:
        run(path.read_bytes())
    assert machine.tally.examples == len(inputs), "an input ran no program"
    # Bytes mean something else to another Hypothesis; they must not come to mean nothing.
    assert machine.tally.steps > 2 * len(inputs)
