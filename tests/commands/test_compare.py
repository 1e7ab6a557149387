"""``arenapy compare``: the rule of the verdict, what a run is measured by, and what is said."""

import dataclasses
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import textwrap

import pytest

from arenapy.commands.compare import command as compare
from arenapy.commands.compare import variants as compare_ways
from arenapy.commands.compare.table import Run, next_step, reasons, sentences, verdict_on
from arenapy.commands.compare.verdict import (
    LEAST_ROUNDS,
    _rank,
    chance_of,
    next_look,
    ratio_of,
    verdict,
)
from arenapy.commands.compare.worker import main as measure_child
from arenapy.commands.run import command as run_command
from arenapy.linux.libc_malloc import foreign_malloc

COMMAND = [sys.executable, "-m", "arenapy", "compare"]
TIMEOUT = 120
MIB = 1 << 20


def run(cwd, *arguments, **how):
    return subprocess.run(
        [*COMMAND, *arguments], cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT, **how
    )


@pytest.fixture
def script(tmp_path):
    def write(source, name="script.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(source))
        return path

    return write


# ---- the rule


@pytest.mark.parametrize("rounds", range(1, 15))
def test_the_interval_is_the_sign_tests(rounds):
    """By all signs that there are: as many ratios are left out as 5 % allow, and no more."""
    sums = [sum(signs) for signs in itertools.product((0, 1), repeat=rounds)]
    rank = _rank(rounds)
    assert 2 * sum(below < rank for below in sums) <= 0.05 * len(sums)
    assert 2 * sum(below < rank + 1 for below in sums) > 0.05 * len(sums)
    assert (rank > 0) == (rounds >= LEAST_ROUNDS)


def test_a_ratio_that_is_always_the_same():
    found = ratio_of([2.0, 4.0, 3.0, 1.0, 6.0, 5.0], [1.0, 2.0, 1.5, 0.5, 3.0, 2.5])
    assert (found.estimate, found.low, found.high) == pytest.approx((2, 2, 2))


def test_six_rounds_have_all_their_ratios_in_the_interval():
    ratios = [0.7, 0.9, 0.8, 1.1, 0.85, 0.75]
    found = ratio_of(ratios, [1.0] * 6)
    assert (found.low, found.high) == pytest.approx((0.7, 1.1))
    assert verdict(found).word == "undecided"


def scattered(generator, ratio, noise, rounds=10, drift=0.0):
    """Times without and with, both scattered and on a machine that becomes slower."""
    pairs = []
    for number in range(rounds):
        slow = 1 + drift * number
        pairs.append([slow * factor * generator.lognormvariate(0, noise) for factor in (1, ratio)])
    return [list(times) for times in zip(*pairs, strict=True)]


@pytest.mark.parametrize(
    ("ratio", "noise", "word"),
    [(0.8, 0.03, "worth it"), (1.2, 0.03, "not worth it"), (0.99, 0.001, "a little faster")],
)
@pytest.mark.parametrize("drift", [0, 0.2])
def test_a_clear_difference_is_found(ratio, noise, word, drift):
    generator = random.Random(1)
    for _ in range(50):
        plain, ours = scattered(generator, ratio, noise, drift=drift)
        found = ratio_of(ours, plain)
        assert verdict(found).word == word
        assert found.low < found.estimate < found.high
        assert found.estimate == pytest.approx(ratio, rel=4 * noise)


@pytest.mark.parametrize("rounds", [6, 10, 15])
def test_no_difference_is_noise_as_often_as_is_said(rounds):
    generator, trials = random.Random(2), 1000
    covered = found = 0
    for _ in range(trials):
        plain, ours = scattered(generator, 1, 0.1, rounds, drift=0.1)
        ratio = ratio_of(ours, plain)
        covered += ratio.low <= 1 <= ratio.high
        found += verdict(ratio).word in ("no difference", "undecided")
    assert covered == found
    assert 0.94 <= covered / trials <= 0.99  # 95 % or, with few rounds, the next there is


def test_one_outlier_changes_no_verdict():
    plain = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 1.01, 0.99, 1.0]
    ours = [time * 0.8 for time in plain]
    ours[3] *= 50
    assert verdict(ratio_of(ours, plain)).word == "worth it"


def test_too_few_rounds():
    said = verdict(ratio_of([0.1] * 5, [1.0] * 5))
    assert (said.word, said.final) == ("probably worth it", False)
    assert str(LEAST_ROUNDS) in said.reason
    assert verdict(ratio_of([1.1] * 5, [1.0] * 5)).word == "probably not worth it"
    assert verdict(ratio_of([0.99, 1.0, 1.02], [1.0] * 3)).word == "probably no difference"
    assert verdict(ratio_of([0.1, 0.1, 1.1], [1.0] * 3)).word == "undecided"


def test_no_gain_is_said_at_the_end_alone():
    """Of twelve ratios the third is the bound; the sign test of a single look leaves two out."""
    ratios = [0.9, 0.95, 0.98, 0.99, 0.99, 1.0, 1.02, 1.03, 1.04, 1.06, 1.2, 1.3]
    found = ratio_of(ratios, [1.0] * 12, chance_of(3))
    assert (found.low, found.least) == (0.9, 0.98)
    assert verdict(found).word == "undecided"
    said = verdict(found, last=True)
    assert (said.word, said.final) == ("no gain", True)
    assert said.reason.endswith("1.0% longer, and surely no 3% less (95% sure: -2.0% or more)")
    gains = ratio_of([ratio - 0.011 for ratio in ratios], [1.0] * 12, chance_of(3))
    assert verdict(gains, last=True).word == "undecided"
    assert verdict(ratio_of([0.98, 1.0, 1.1], [1.0] * 3), last=True).word == "probably no gain"
    assert verdict(ratio_of([0.96, 1.0, 1.1], [1.0] * 3), last=True).word == "undecided"


@pytest.mark.parametrize("ratio", [0.97, 1.0])
def test_all_that_is_said_is_wrong_in_five_percent_at_most(ratio):
    """A gain of 3 % is not denied, and where there is no difference no direction is claimed."""
    generator, trials, wrong = random.Random(5), 400, 0
    false = {"worth it", "a little faster"} if ratio == 1 else {"no gain", "no difference"}
    false |= {"not worth it", "a little slower"}
    for _ in range(trials):
        plain, ours = scattered(generator, ratio, 0.05, rounds=30)
        look = at = 0
        while (at := next_look(at)) <= 30:
            look += 1
            said = verdict(ratio_of(ours[:at], plain[:at], chance_of(look)))
            if said.final:
                break
        else:
            said = verdict(ratio_of(ours, plain, chance_of(look + 1, last=True)), last=True)
        wrong += said.word in false
    assert wrong / trials <= 0.05


def test_all_looks_together_take_five_percent():
    chances = [chance_of(look) for look in range(1, 1000)]
    assert sum(chances) == pytest.approx(0.05, abs=1e-4)
    for look in range(1, 9):
        assert sum(chances[: look - 1]) + chance_of(look, last=True) == pytest.approx(0.05)
    assert _rank(LEAST_ROUNDS, chance_of(1)) == 1


def test_who_looks_often_is_not_wrong_more_often():
    generator, trials, wrong = random.Random(3), 400, 0
    for _ in range(trials):
        plain, ours = scattered(generator, 1, 0.1, rounds=60)
        look = at = 0
        while (at := next_look(at)) <= 60:
            look += 1
            found = ratio_of(ours[:at], plain[:at], chance_of(look))
            if not found.low <= 1 <= found.high:
                wrong += 1
                break
    assert wrong / trials <= 0.05


def test_no_difference_is_said_once_the_interval_is_narrow():
    generator = random.Random(4)
    plain, ours = scattered(generator, 1, 0.01, rounds=40)
    said = verdict(ratio_of(ours, plain))
    assert (said.word, said.final) == ("no difference", True)
    small = verdict(ratio_of([time * 0.98 for time in plain], plain))
    assert (small.word, small.final) == ("a little faster", True)


@pytest.mark.parametrize("times", [([], []), ([1.0], []), ([0.0], [1.0]), ([1.0], [-1.0])])
def test_what_is_no_pair_of_times(times):
    with pytest.raises(ValueError, match=r"need pairs|have to be positive"):
        ratio_of(*times)


def test_sentences_say_who_is_faster_and_what_it_takes():
    def runs(wall, peak):
        return [Run(wall * (1 + at / 1000), 0.0, 0.1, 0.1, 1, peak) for at in range(8)]

    all_runs = {
        "plain": runs(1, 100 * MIB), "arenapy": runs(0.5, 300 * MIB), "mimalloc": runs(0.4, 1)
    }  # fmt: skip
    said = sentences(all_runs)
    assert said[0].startswith("arenapy: worth it: the program takes 50.0% less time")
    assert said[1].startswith("mimalloc: worth it: the program takes 60.0% less")
    assert said[2].startswith(
        "arenapy instead of mimalloc: not worth it: the program takes 25.0% longer"
    )
    assert len(said) == 3
    assert "Peak memory is higher: 300 MiB instead of 100 MiB" in reasons(all_runs)[-1]
    less = {"plain": runs(1, 100 * MIB), "arenapy": runs(1.2, 110 * MIB)}
    assert not any("Peak memory" in line for line in reasons(less))


def made_up_runs(**changes):
    """Eight runs of plain and of arenapy, which differ as is said: (plain's, arenapy's)."""
    usual = {
        "wall": (1.0, 1.0), "waited": (0.0, 0.0), "cpu": (0.5, 0.5), "kernel": (0.3, 0.1),
        "faults": (98_638, 12_379), "peak_bytes": (MIB, MIB), "startup": (0.1, 0.12),
        "startup_kernel": (0.0, 0.0), "prefault": (None, 0.02),
    } | changes  # fmt: skip
    return {
        way: [Run(**{name: both[at] for name, both in usual.items()})] * 8
        for at, way in enumerate(("plain", "arenapy"))
    }


def test_a_processor_that_is_kept_busy_is_judged_by_cpu_time():
    """On a busy machine it scatters less; of threads or of waiting it says nothing."""
    busy = made_up_runs(wall=(1.0, 1.0), cpu=(1.0, 0.96))
    assert "CPU time" in reasons(busy)[0]
    assert sentences(busy)[0].startswith("arenapy: worth it: the program takes 4.0% less")
    for cpu in (2.0, 1.9), (0.5, 0.4), (1.0, 0.93):
        other = made_up_runs(wall=(1.0, 1.0), cpu=cpu)
        assert "elapsed time, less the waits" in reasons(other)[0]
        assert sentences(other)[0].startswith("arenapy: no difference")


def test_the_wait_for_a_processor_is_not_the_programs_time():
    runs = made_up_runs(wall=(3.0, 1.0), waited=(2.0, 0.0))
    assert sentences(runs)[0].startswith("arenapy: no difference")


def test_reasons_name_faults_and_phases():
    said = reasons(made_up_runs())
    assert said[1].startswith(
        "Page faults: 98,638 -> 12,379. Time in the kernel, which includes page faults: 0.30 s -> "
        "0.10 s, or "
    )
    assert "33% -> 11% of the time after the start" in said[1]
    assert said[2] == (
        "Start-up: 100.0 ms -> 120.0 ms, importing arenapy. Prefaulting: 20.0 ms. "
        "Steady state: 900.0 ms -> 860.0 ms."
    )


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"wall": (1.0, 0.8)}, "Next: arenapy run x.py"),
        ({"startup": (None, None)}, "did not import NumPy"),
        ({"wall": (0.3, 0.32), "startup": (0.1, 0.2)}, "with an input that takes at least 2 times"),
        ({"wall": (1.0, 1.4), "startup": (0.1, 0.1)}, "arenapy compare --libc none x.py"),
        ({"kernel": (0.01, 0.01), "wall": (1.0, 1.04)}, "python -m cProfile -s tottime x.py"),
    ],
)
def test_the_next_step(changes, wanted):
    runs = made_up_runs(**changes)
    said = verdict_on(runs)
    assert wanted in next_step(runs, said, "x.py", 30.0)
    unsure = dataclasses.replace(said, final=False)
    if changes.get("startup") != (None, None):
        assert next_step(runs, unsure, "x.py", 30.0).endswith("compare --seconds 120 x.py")
        assert "--seconds 1 x.py" in next_step(runs, unsure, "x.py", 0.01)


def test_the_next_step_has_the_options_of_the_pool():
    line = ["--max-bytes", "1.5G", "--initial-bytes", "1000", "--huge-pages", "none", "--lock"]
    line += ["--on-full", "error", "--libc", "none"]
    options = run_command._read([*line, "x.py"])
    pool = run_command.pool_words(options)
    again = run_command._read([*pool, "x.py"])
    assert vars(again) == vars(options) and "1536M" in pool
    assert run_command.pool_words(run_command._read(["--on-full", "system", "x.py"])) == []
    words = " ".join(pool)
    runs = made_up_runs(wall=(1.0, 0.8))
    step = next_step(runs, verdict_on(runs), "x.py", 30.0, pool)
    assert step == f"Next: arenapy run {words} x.py"
    unsure = dataclasses.replace(verdict_on(runs), final=False)
    step = next_step(runs, unsure, "x.py", 30.0, pool, ["jemalloc", "tcmalloc"])
    assert step.endswith(f"compare --seconds 120 --with jemalloc,tcmalloc {words} x.py")
    runs = made_up_runs(wall=(1.0, 1.4), startup=(0.1, 0.1))
    assert "compare" not in next_step(runs, verdict_on(runs), "x.py", 30.0, pool)


# ---- one run


def child(tmp_path, source, **how):
    spec = {"command": [sys.executable, "-c", textwrap.dedent(source)], "output": os.devnull,
            "environment": dict(os.environ), "errors": str(tmp_path / "errors"),
            "interval": None, "library": "", "settings": None, **how}  # fmt: skip
    (tmp_path / "spec").write_text(json.dumps(spec))
    files = [str(tmp_path / name) for name in ("spec", "r")]
    worker = [sys.executable, "-I", "-S", str(compare.CHILD), *files]
    subprocess.run(worker, check=True, timeout=TIMEOUT)
    return json.loads((tmp_path / "r").read_text())


TOUCH = """
import mmap
memory = mmap.mmap(-1, {nbytes}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise({advice})
for at in range(0, {nbytes}, 4096): memory[at] = 1
"""


@pytest.mark.no_sanitizer
@pytest.mark.full
def test_what_a_run_is_measured_by(tmp_path):
    nothing = child(tmp_path, "pass")
    assert nothing["status"] == 0
    touched = child(tmp_path, TOUCH.format(nbytes=64 * MIB, advice="mmap.MADV_NOHUGEPAGE"))
    pages = 64 * MIB // os.sysconf("SC_PAGE_SIZE")
    assert pages <= touched["faults"] - nothing["faults"] < 1.05 * pages
    assert 60 * MIB < touched["peak_bytes"] - nothing["peak_bytes"] < 72 * MIB
    asleep = child(tmp_path, "import time; time.sleep(0.5)")
    assert asleep["wall"] > 0.5 > asleep["cpu"]
    busy = child(tmp_path, "import time\nwhile time.process_time() < 0.5: pass")
    assert 0.5 <= busy["cpu"] <= busy["wall"] + 0.01


def test_a_peak_is_not_that_of_who_started_it(tmp_path):
    keep = bytearray(200 * MIB)  # resident here
    assert child(tmp_path, "pass")["peak_bytes"] < 100 * MIB
    assert len(keep) == 200 * MIB


@pytest.mark.full
def test_children_that_were_waited_for_count(tmp_path):
    busy = "import time\nwhile time.process_time() < 0.4: pass"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    found = child(tmp_path, start)
    assert found["cpu"] >= 0.4


def test_how_a_run_ended(tmp_path):
    assert child(tmp_path, "raise SystemExit(7)")["status"] == 7
    assert child(tmp_path, "import os; os.abort()")["status"] == -signal.SIGABRT


@pytest.mark.full
def test_huge_pages_and_libraries_are_seen(tmp_path):
    source = TOUCH.format(nbytes=64 * MIB, advice="mmap.MADV_{}") + "import time; time.sleep(0.3)"
    how = {"interval": 0.01, "library": "libc.so.6"}
    without = child(tmp_path, source.format("NOHUGEPAGE"), **how)
    assert without["loaded"]
    assert not child(tmp_path, "import time; time.sleep(0.2)", interval=0.01,
                     library="libnone.so")["loaded"]  # fmt: skip
    with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:
        if "[never]" in file.read():
            pytest.skip("no transparent huge pages here")
    huge = child(tmp_path, source.format("HUGEPAGE"), **how)
    assert huge["huge_bytes"] >= without["huge_bytes"] + 32 * MIB


def test_the_child_is_callable_here(tmp_path):
    """What runs in a process of its own is an ordinary function."""
    spec = {"command": [sys.executable, "-c", "print(input())"], "environment": {},
            "output": str(tmp_path / "o"), "errors": str(tmp_path / "e"),
            "interval": None, "settings": None}  # fmt: skip
    (tmp_path / "spec").write_text(json.dumps(spec))
    measure_child(str(tmp_path / "spec"), str(tmp_path / "r"))
    assert json.loads((tmp_path / "r").read_text())["status"] == 1
    assert "EOFError" in (tmp_path / "e").read_text()


# ---- the rounds


def test_a_forked_child_that_imports_numpy_is_not_the_program(script, tmp_path):
    path = script("""
        import os
        if os.fork() == 0:
            import numpy
            os._exit(0)
        os.wait()
        os._exit(0)  # the program leaves no figures of its own
    """)
    options = compare.Options()
    options.program, options.arguments = str(path), []
    comparison = compare.Comparison(options, [compare.OURS], tmp_path)
    assert comparison._run(compare.OURS)["marks"] == []


def test_a_program_that_cannot_be_started_is_said_in_one_line(script, tmp_path):
    script("import numpy")
    path = "/" + "x" * (128 << 10)
    path = path[: (128 << 10) - len("PYTHONPATH=") - 2]  # as long as a variable may be
    done = run(tmp_path, "-n", "1", "script.py", env={**os.environ, "PYTHONPATH": path})
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("arenapy: [Errno 7] ")
    assert done.stderr.count("\n") == 1, done.stderr


def test_a_process_that_measures_and_is_killed_is_said_in_one_line(script, tmp_path):
    script("import os, signal; os.kill(os.getppid(), signal.SIGKILL)")
    done = run(tmp_path, "-n", "1", "script.py")
    said = "arenapy: the process that measures the program ended: killed by SIGKILL\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


def test_a_full_folder_for_temporary_files(script, tmp_path):
    """The figures arrive, but for the marks: the program cannot write them."""
    path = script("import numpy, resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))")
    options = compare.Options()
    options.program, options.arguments = str(path), []
    comparison = compare.Comparison(options, [compare.OURS], tmp_path)
    found = comparison._run(compare.OURS)
    assert found["marks"] == [] and found["wall"] > 0


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A Comparison whose runs are made up; gives the ways in the order they were run."""

    def make(ways, rounds=None, times=()):
        options = compare.Options()
        options.rounds = rounds
        comparison = compare.Comparison(options, ways, tmp_path)
        order = []

        def made_up(way, interval=None):
            order.append(way)
            taken = dict(times).get(way, 1.0)
            return {"wall": taken, "waited": 0.0, "cpu": taken, "kernel": 0.0, "faults": 1,
                    "peak_bytes": 1, "huge_bytes": 0, "loaded": way != "mimalloc",
                    "marks": []}  # fmt: skip

        monkeypatch.setattr(comparison, "_run", made_up)
        return comparison, order

    return make


def test_every_way_has_its_turn_in_every_round(made):
    comparison, order = made(["plain", "arenapy", "glibc-tuned"], 8)
    assert list(comparison.warm_up()) == ["plain", "arenapy", "glibc-tuned"]
    order.clear()
    assert list(comparison.rounds()) == order
    rounds = [order[at : at + 3] for at in range(0, 24, 3)]
    assert all(sorted(one) == ["arenapy", "glibc-tuned", "plain"] for one in rounds)
    assert all(one == other[::-1] for one, other in zip(rounds[::2], rounds[1::2], strict=True))
    assert {way: len(runs) for way, runs in comparison.runs.items()} == dict.fromkeys(rounds[0], 8)


@pytest.mark.parametrize(("ratio", "rounds"), [(0.5, 6), (1.0, 6), (2.0, 6)])
def test_rounds_end_when_the_verdict_is_sure(made, ratio, rounds):
    comparison, _ = made(["plain", "arenapy"], times={"plain": 1.0, "arenapy": ratio})
    list(comparison.rounds())
    assert len(comparison.runs["plain"]) == rounds


def test_rounds_end_when_the_time_is_spent(made, monkeypatch):
    """As many as fit into it, and three at least."""
    clock = itertools.count()
    monkeypatch.setattr(compare.time, "monotonic", lambda: next(clock) * 10.0)
    comparison, _ = made(["plain", "arenapy"], times={"plain": 1.0, "arenapy": 0.5})
    comparison.options.seconds = 60.0
    list(comparison.rounds())
    assert len(comparison.runs["plain"]) == 5
    comparison, _ = made(["plain", "arenapy"], times={"plain": 1.0, "arenapy": 0.5})
    comparison.options.seconds = 1.0
    list(comparison.rounds())
    assert len(comparison.runs["plain"]) == 3


def test_a_malloc_that_is_not_installed_or_not_loaded_is_said(made, monkeypatch):
    monkeypatch.setattr(
        compare_ways.ctypes.util, "find_library",
        lambda name: "libmimalloc.so" if name == "mimalloc" else None,
    )  # fmt: skip
    comparison, _ = made(["plain", "arenapy", "jemalloc", "mimalloc", "tcmalloc"], 1)
    assert comparison.ways == ["plain", "arenapy", "mimalloc"]
    list(comparison.warm_up())
    assert comparison.ways == list(comparison.runs) == ["plain", "arenapy"]
    assert "libjemalloc2" in comparison.notes["jemalloc"]
    assert "libtcmalloc-minimal4" in comparison.notes["tcmalloc"]
    assert "libmimalloc.so was preloaded and is not" in comparison.notes["mimalloc"]


def test_environments(monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    monkeypatch.setenv("KEPT", "yes")
    monkeypatch.setattr(compare_ways.ctypes.util, "find_library", "lib{}.so".format)
    plain, tuned, jemalloc = (
        compare_ways.WAYS[way].environment() for way in ("plain", "glibc-tuned", "jemalloc")
    )
    assert plain == dict(os.environ) == compare_ways.WAYS["arenapy"].environment()
    for one in tuned, jemalloc:
        assert one["KEPT"] == "yes" and "MALLOC_ARENA_MAX" not in one
    assert "glibc.malloc.hugetlb=1" in tuned["GLIBC_TUNABLES"] and "LD_PRELOAD" not in tuned
    assert jemalloc["LD_PRELOAD"] == "libjemalloc.so"
    assert jemalloc["MALLOC_CONF"].startswith("thp:always,")


# ---- the command


@pytest.mark.full
def test_a_comparison(script, tmp_path):
    script(
        """
        import sys, numpy as np
        assert sys.argv[1:] == ["-n", "7"] and not sys.stdin.read()
        print("told"), print("complained", file=sys.stderr)
        for _ in range(3): a = np.ones(1 << 20)
        """
    )
    others = "pool-alone,glibc-tuned,tcmalloc"
    options = ["-n", "2", "--json", "found.json", "--with", others]
    found = run(tmp_path, *options, "script.py", "-n", "7", input="not for it")
    assert (found.returncode, found.stderr) == (0, "")
    rows = (
        "time",
        "start-up",
        "prefault",
        "steady state",
        "CPU time",
        "in the kernel",
        "faults",
        "peak resident",
        "never used",
        "huge pages",
    )
    for said in *rows, "/ plain", "in 2 rounds; 6 are needed":
        assert said in found.stdout, said
    assert "told" not in found.stdout
    figures = json.loads((tmp_path / "found.json").read_text())
    assert {"plain", "arenapy", "glibc-tuned"} <= set(figures["runs"])
    assert ("pool-alone" in figures["runs"]) == (foreign_malloc() is None)
    assert ("tcmalloc" in figures["runs"]) != ("tcmalloc" in figures["not_compared"])
    assert all(len(runs) == 2 for runs in figures["runs"].values())
    for way, runs in figures["runs"].items():
        for one in runs:
            assert one["wall"] > 0 and one["cpu"] > 0 and one["peak_bytes"] > 8 * MIB
            assert (one["prefault"] is None) == (way not in ("arenapy", "pool-alone"))
            assert one["prefault"] is None or 0 < one["prefault"] < one["wall"]
            assert 0 < one["startup"] < one["wall"]
    shown = run(tmp_path, "-n", "1", "--libc", "none", "--show-output", "script.py", "-n", "7")
    assert shown.stdout.count("told") == shown.stderr.count("complained") == 4


@pytest.mark.full
@pytest.mark.parametrize(
    ("source", "phases"),
    [
        (
            "import numpy, os, time\n"
            "if os.fork() == 0: numpy.ones(9)\n"
            "else: os.wait(); time.sleep(0.3); os._exit(0)",
            True,
        ),
        ("import subprocess, sys; subprocess.run([sys.executable, '-c', 'import numpy'])", False),
    ],
)
def test_phases_are_those_of_the_program(script, tmp_path, source, phases):
    """Its children have their own, and NumPy is there however it ends."""
    script(source)
    done = run(tmp_path, "-n", "1", "--json", "found.json", "script.py")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    for [one] in found["runs"].values():
        assert (one["startup"] is not None) == phases
        if "sleep" in source:
            assert one["startup"] + 0.3 < one["wall"]
    assert ("did not import NumPy" in done.stdout) != phases
    assert "arenapy run" not in done.stderr


@pytest.mark.full
def test_a_program_that_is_compared_sees_nothing_of_it(script, tmp_path, monkeypatch):
    for name in [name for name in os.environ if "ARENAPY" in name]:
        monkeypatch.delenv(name)
    script("import os, sys; print([name for name in os.environ if 'ARENAPY' in name], sys.path)")
    shown = run(tmp_path, "-n", "1", "--show-output", "script.py").stdout
    lines = [line for line in shown.splitlines() if line.startswith("[]")]
    assert len(lines) == 4 and len(set(lines)) == 1 and "startup" not in lines[0]


@pytest.mark.sampled
@pytest.mark.parametrize("libc", ["keep", "none"])
@pytest.mark.full
def test_both_ways_of_libc(script, tmp_path, libc):
    script("import numpy\nfrom arenapy.linux import libc_malloc as libc\nprint(libc.keepers())")
    found = run(tmp_path, "-n", "1", "--show-output", "--libc", libc, "script.py")
    assert found.returncode == 0, found.stderr
    keeps = libc == "keep" and foreign_malloc() is None
    lines = found.stdout.splitlines()
    kept, not_kept = lines.count("1"), lines.count("0")  # of the warm-up and the round
    assert (kept, not_kept) == (2 * keeps, 4 - 2 * keeps)


@pytest.mark.full
def test_a_module(script, tmp_path):
    script("import sys; assert sys.argv[1:] == ['--with', 'x'], sys.argv", "mine.py")
    assert run(tmp_path, "-n", "1", "-m", "mine", "--with", "x").returncode == 0


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("print('x'); raise ValueError('as asked')", ["status 1", "ValueError: as asked"]),
        ("raise SystemExit(3)", ["status 3"]),
        ("import os; os.abort()", ["killed by SIGABRT"]),
        ("import os; os.kill(os.getpid(), 35)", ["killed by signal 35"]),
        ("import sys; sys.exit('why')", ["status 1", "why"]),
    ],
)
@pytest.mark.sampled
def test_a_program_that_fails(script, tmp_path, source, said):
    script(source)
    found = run(tmp_path, "-n", "2", "script.py")
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.startswith("arenapy compare: the program failed (plain): ")
    assert all(text in found.stderr for text in said)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_command_alone(script, tmp_path, number):
    """As `kill` sends it: the program ends as well, and no file is left."""
    path = script("""
        import os, time

        os.write(1, b"%d\\n" % os.getpid())
        time.sleep(600)
    """)
    program = (  # Python ignores SIGINT where its parent did
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from arenapy.commands.cli import main; sys.exit(main())"
    )
    folder = tmp_path / "temporary"
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", program, "compare", "--show-output", path],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    ) as process:  # fmt: skip
        lines = iter(process.stdout.readline, "")
        child = int(next(line for line in lines if line.strip().isdigit()))
        process.send_signal(number)
        _, errors = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, errors) == (128 + number, "")
    assert not os.path.exists(f"/proc/{child}") and not list(folder.iterdir())


@pytest.mark.parametrize(
    "begin",
    [
        "from arenapy.commands.compare.worker import _heed_signals as heed",
        "from arenapy.commands.cli import _end_by_signals as heed",
    ],
)
def test_signals_that_come_together(begin):
    """As from a terminal, and from the command that ends its child: no complaint of Python's."""
    program = f"""
        import os, signal

        {begin}

        def wait_for_its_end():
            heed()
            try:
                os.write(ready, b"x")
                while True:
                    pass
            finally:
                for _ in range(1000):  # cleans up
                    os.getpid()

        for spent in range(30):
            begun, ready = os.pipe()
            child = os.fork()
            if child == 0:
                wait_for_its_end()
            os.read(begun, 1)
            os.kill(child, signal.SIGINT)
            for _ in range(spent):
                pass
            os.kill(child, signal.SIGTERM)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert status in (128 + signal.SIGINT, 128 + signal.SIGTERM), status
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True,
        timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("kill", [os.kill, os.killpg])
def test_no_program_outlives_the_command(script, tmp_path, number, kill):
    """Neither one that ignores SIGTERM, nor one whose command is killed."""
    path = script("""
        import os, signal, time

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(1, b"%d\\n" % os.getpid())
        time.sleep(600)
    """)
    with subprocess.Popen(
        [*COMMAND, "--show-output", path], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)}, start_new_session=True,
    ) as process:  # fmt: skip
        child = int(next(iter(process.stdout.readline, "")))
        kill(process.pid, number)
        process.stdout.read()  # until nobody has it
        assert process.wait(TIMEOUT) == (-number if number == signal.SIGKILL else 128 + number)
    assert not os.path.exists(f"/proc/{child}")


def test_a_program_that_signals_its_process_group(script, tmp_path):
    """As it ends its workers. It may make the group. In another session, no terminal stops it."""
    script(f"""
        import os, signal, subprocess
        assert os.getsid(0) != {os.getsid(0)}
        os.setpgrp()
        signal.signal(signal.SIGTERM, lambda *_: None)
        worker = subprocess.Popen(["sleep", "60"])
        os.killpg(0, signal.SIGTERM)
        assert worker.wait() == -signal.SIGTERM
    """)
    found = run(tmp_path, "-n", "1", "script.py", process_group=0)
    assert found.returncode == 0, found.stderr


@pytest.mark.full
def test_a_program_that_fails_only_in_the_pool(script, tmp_path):
    script("import numpy, sys; sys.exit('arenapy' in sys.modules)")
    found = run(tmp_path, "-n", "2", "script.py")
    assert found.returncode == 1
    assert "the program failed (arenapy): status 1" in found.stderr


@pytest.mark.full
def test_options_of_the_pool_arrive(script, tmp_path):
    script("import numpy as np\nnp.ones(1 << 20)")
    found = run(tmp_path, "-n", "1", "--max-bytes", "4M", "--on-full", "error", "script.py")
    assert "the program failed (arenapy)" in found.stderr and "MemoryError" in found.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["-n", "0", "x.py"], "'0' is not a whole number from 1"),
        (["-n", "many", "x.py"], "'many'"),
        (["--with", "jemalloc,nomalloc", "x.py"], "'nomalloc' is none of pool-alone, jemalloc"),
        (["--with", "plain", "x.py"], "'plain'"),
        ([], "SCRIPT"),
    ],
)
@pytest.mark.sampled
@pytest.mark.full
def test_wrong_arguments(tmp_path, arguments, named):
    found = run(tmp_path, *arguments)
    assert (found.returncode, found.stdout) == (2, "")
    assert named in found.stderr.splitlines()[-1]
