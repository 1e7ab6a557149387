"""What coverage has found worth keeping (tests/testing/fuzz_coverage.py) runs on every build."""

from pathlib import Path

import hypothesis
import pytest
from fuzz_targets import MACHINES

from arenapy.testing.guided_process import target_of

CORPUS = Path(__file__).parent / "corpus"
MADE_WITH = "6.170.15"  # of Hypothesis: to another one the bytes may be other programs, or none


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.sampled
def test_corpus(name):
    inputs = sorted((CORPUS / name).iterdir())
    assert inputs
    machine = type(MACHINES[name].__name__, (MACHINES[name],), {"__module__": "fuzz_targets"})
    run = target_of(machine)
    for path in inputs:
        run(path.read_bytes())
    if hypothesis.__version__ == MADE_WITH:
        assert machine.tally.examples == len(inputs), "an input ran no program"
        assert machine.tally.steps > 2 * len(inputs)
