"""Bugs planted in toy allocators, each of which is found within 100 examples.

Here with one seed. ``python tests/testing/test_testing_planted.py`` says how many of five runs
found each, and ends with status 1 if one did not.
"""

import sys

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from toys import MACHINES, BumpToy, HeapToy, SlotsToy, planted

EXAMPLES = 100
ONCE = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=False,
    phases=[Phase.generate, Phase.target],
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)


def finds(machine, number):
    """The examples until something was found with this seed; None if nothing was."""
    try:
        run_state_machine_as_test(seed(number)(machine), settings=ONCE)
    except Exception:
        if machine.tally.found_at is None:
            raise  # not found by the machine: something is wrong with the test
        return machine.tally.found_at
    return None


@pytest.mark.parametrize("bug", MACHINES)
@pytest.mark.sampled
def test_a_planted_bug_is_found(bug):
    assert finds(planted(bug), 1)


@pytest.mark.long
@pytest.mark.parametrize("machine", [BumpToy, HeapToy, SlotsToy])
def test_nothing_is_found_where_nothing_is_planted(machine):
    assert finds(type("Right", (machine,), {}), 1) is None


def main(runs=5):
    missed = 0
    for bug in MACHINES:
        found = [finds(planted(bug), number) for number in range(1, runs + 1)]
        missed += found.count(None)
        print(f"{runs - found.count(None)} of {runs}  {bug}: examples {found}", flush=True)
    print(f"{len(MACHINES)} bugs, {runs} runs each, {missed} misses")
    return missed > 0


if __name__ == "__main__":
    sys.exit(main())
