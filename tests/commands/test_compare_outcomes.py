"""``arenapy compare`` over ten programs: its verdict is that of a measurement by hand.

The truth is measured here, without anything of the command: each program and the same with the two
documented lines at its top take turns, and the median of the ratios of their times says which is
faster. Ratios of runs next to each other scatter less than the ratio of two medians.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAMS = sorted(Path(__file__).with_name("outcomes").glob("*.py"))
TWO_LINES = (
    'import arenapy\narenapy.numpy_memory(arenapy.Pool(), threads=True, libc="keep").install()\n'
)
ROUNDS = 15
WORTH = 0.03  # a smaller difference is none
MARGIN = 0.02  # how unsure the measurement by hand is on a busy machine
#: The verdicts that are right, by the truth.
RIGHT = {
    "faster": {"worth it", "probably worth it"},
    "slower": {"not worth it", "probably not worth it"},
    "same": {
        "no difference", "probably no difference", "no gain", "probably no gain", "a little faster",
        "a little slower",
    },
}  # fmt: skip


def seconds_of(program):
    """The time of a run, without that in which it waited for a processor."""
    start = time.perf_counter()
    pid = os.posix_spawn(
        sys.executable, [sys.executable, str(program)], os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )  # fmt: skip
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    wall = time.perf_counter() - start
    waited = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return wall - waited


def by_hand(program, folder):
    """What the two lines do to a program: the ratio of times."""
    with_lines = folder / program.name
    with_lines.write_text(TWO_LINES + program.read_text())
    found = {program: [], with_lines: []}
    for number in range(ROUNDS + 1):
        for one in sorted(found, reverse=number % 2):
            found[one].append(seconds_of(one))
    ratios = [ours / plain for plain, ours in zip(*found.values(), strict=True)]
    return statistics.median(ratios[1:])  # without the first round, which warms caches


def truths(ratio):
    """The words for a ratio; two of them near the limit."""
    found = {"same"} if abs(ratio - 1) < WORTH + MARGIN else set()
    if ratio < 1 - WORTH + MARGIN:
        found.add("faster")
    return found | ({"slower"} if ratio > 1 + WORTH - MARGIN else set())


def test_the_truth_near_the_limit_has_two_words():
    assert [truths(ratio) for ratio in (0.94, 0.96, 1.0, 1.04, 1.06)] == [
        {"faster"}, {"faster", "same"}, {"same"}, {"same", "slower"}, {"slower"}
    ]  # fmt: skip


def by_command(program, folder):
    """The verdict of the command, its ratio, and how long it took."""
    file = folder / f"{program.stem}.json"
    start = time.perf_counter()
    line = [sys.executable, "-m", "arenapy", "compare", "--json", file, program]
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
    spent = time.perf_counter() - start
    found = json.loads(file.read_text())
    return found["word"], found["verdict"][0], spent


@pytest.mark.long
@pytest.mark.no_sanitizer
def test_ten_programs(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    lines, right, turned, times = [], 0, 0, []
    for program in PROGRAMS:
        ratio = by_hand(program, tmp_path)
        truth = truths(ratio)
        word, sentence, spent = by_command(program, tmp_path)
        said = {one for one in RIGHT if word in RIGHT[one]}
        is_right = bool(said & truth)
        right += is_right
        turned += not is_right and said | truth >= {"faster", "slower"}
        times.append(spent)
        lines.append(
            f"{program.stem}: by hand {ratio:.3f}, {' or '.join(sorted(truth))}; {sentence} "
            f"{spent:.0f} s"
            f"{'' if is_right else '  WRONG'}"
        )
        print(lines[-1], flush=True)
    table = "\n".join(lines)
    assert len(PROGRAMS) == 10
    assert turned == 0, table
    assert right >= 9, table
    assert statistics.median(times) < 40, table
