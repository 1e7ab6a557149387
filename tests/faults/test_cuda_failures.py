"""Every driver call that arenapy makes fails, one at a time: `driver.ENTRIES` says which there are.

`cuda_fault_operations` says what is done, `cuda_fault_runner` how one call of it is failed, and
`cuda_fault_table` what comes of it. After each failure the allocator passes its check, a call that
raised changed nothing, the same done again succeeds, and the driver has nothing left but what the
table says.
"""

from collections import Counter

import pytest
from cuda_fault_operations import OPERATIONS
from cuda_fault_runner import attempt
from cuda_fault_table import (
    EXCHANGE,
    NEVER_CALLED,
    RESULTS,
    TABLE,
    name_of,
    outcomes_of,
    problems_of,
)
from injection import is_one_of, row_of

from arenapy.cuda import driver

#: Calls that all operations make by the hundred: the first and the last are failed.
EVERYWHERE = ("cuCtxPopCurrent", EXCHANGE)

#: Of what all tests here have failed, and called, for the one that asks whether all was.
failed, called = Counter(), Counter()
rows_used = set()


def failures_of(name, calls):
    """(call, which of them, a result) ...: both results of what is called once."""
    results = list(RESULTS)
    for call, count in calls.items():
        few = call in EVERYWHERE or name.startswith("a bit of everything")
        for nth in {1, count} if few else range(1, count + 1):
            for result in results if count == 1 else [results[nth % 2]]:
                yield call, nth, result


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.sampled
@pytest.mark.full
def test_each_call_can_fail(name):
    usual = attempt(name)
    assert not (usual.error or usual.problems or usual.misused), usual
    assert usual.calls, "it calls nothing"
    assert {what for what, count in usual.left.items() if count} <= {"streams"}  # the test's own
    called.update(usual.calls)
    wrong = []
    for call, nth, result in failures_of(name, usual.calls):
        i = row_of(TABLE, name, name_of(call, nth), result)
        assert i is not None, f"the table has no row for {call} {nth} {result}"
        rows_used.add(i)
        if not TABLE[i].outcomes:
            continue
        outcome = attempt(name, call, nth, RESULTS[result][0])
        failed[call] += outcome.failed
        called.update(outcome.calls)
        problems = problems_of(outcome, usual.left, TABLE[i])
        if not is_one_of(outcomes_of(TABLE[i], result), outcome.error, outcome.text):
            problems.append(f"{outcome[:2]} and not one of {TABLE[i].outcomes}")
        if outcome.result not in (0, RESULTS[result][0]) and not TABLE[i].misuse:
            problems.append(f"its result is {outcome.result}")
        wrong += [f"{call} {nth} {result}: {problem}" for problem in problems]
    assert not wrong, "\n".join(wrong)


@pytest.mark.long
def test_nothing_is_left_out(request):
    """Each entry point was failed, or is never called; each row says what came of some failure."""
    run = [item.name for item in request.session.items if item.path == request.path]
    if len(run) <= len(OPERATIONS):  # this one, too
        pytest.skip("only some of the operations were run")
    entries = {name for name, _ in driver.ENTRIES}
    assert not {*called} & {*NEVER_CALLED}
    assert {*called} == {*+failed} == entries - {*NEVER_CALLED}
    assert {*NEVER_CALLED} <= entries
    assert [row for i, row in enumerate(TABLE) if i not in rows_used] == []
    print(sum(failed.values()), "failures:", dict(failed))
