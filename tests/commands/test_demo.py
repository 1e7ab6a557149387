"""``arenapy demo`` end to end, and the parts that its figures rest on."""

import hashlib
import io
import json
import math
import os
import platform
import pty
import re
import subprocess
import sys
import tracemalloc
from collections import Counter
from importlib.resources import files
from statistics import median

import matplotlib.image
import numpy as np
import pytest
from rich.console import Console

import arenapy
from arenapy.commands import cli, demo
from arenapy.commands.demo import chart, measuring, report, ways, workloads
from arenapy.linux import outputs

COMMAND = [sys.executable, "-m", "arenapy", "demo"]
QUIET = {name: value for name, value in os.environ.items()
         if name not in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS")}  # fmt: skip
TIMEOUT = 300
TINY = ["demo", "--quick", "--sizes", "40", "--rounds", "2"]
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")
#: Below what malloc learns to keep, and above what any malloc keeps: 34 MiB arrays.
SIZES = [500, 1000, 3000]
NAMES = ["digits network", *(f"N = {n}" for n in SIZES)]
WAYS = ["plain NumPy", "arena", "preallocated"]


def numbers(value):
    """Every number anywhere in a JSON document."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


# --- end to end --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """It takes seconds, so all tests that want it are of one tier: the demo runs once in CI."""
    folder = tmp_path_factory.mktemp("demo")
    done = subprocess.run(
        [*COMMAND, "--quick", "--sizes", *map(str, SIZES),
         "--json", folder / "figures.json", "--plot", folder / "chart.png"],
        capture_output=True, text=True, env=QUIET, timeout=TIMEOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done, json.loads((folder / "figures.json").read_text()), folder / "chart.png"


@pytest.mark.full
@pytest.mark.long
def test_output_is_plain_text_in_80_columns(whole_run):
    done, _, _ = whole_run
    assert not CONTROL.search(done.stdout + done.stderr)
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "…" not in done.stdout, "a cell was cut off"


@pytest.mark.full
def test_the_tables_show_what_the_json_says(whole_run):
    done, figures, _ = whole_run
    times, rest = done.stdout.split("An iteration: ")
    costs, _ = rest.split("Prefault: ")
    rows = iter(re.findall(r"^ +(.*\S) +([\d,]+\.\d{3}) +([\d,.]+)( .*)?$", times, re.MULTILINE))
    for workload in figures["workloads"]:
        for way in WAYS:
            measured = workload["ways"][way]
            label, ms, faults, _ = next(rows)
            shown = float(faults.replace(",", ""))
            head = workload["name"] if way == WAYS[0] else ""
            assert label.split() == [*head.split(), *way.split()]
            assert ms == f"{measured['ms']:,.3f}"
            assert shown == pytest.approx(measured["minor_faults"], abs=0.5)
        paid = workload["paid_after_iterations"]
        paid = "never" if paid is None else f"{paid:,} iteration"
        assert re.search(rf"^ +{workload['name']} .* {paid}s? *$", costs, re.MULTILINE)
    assert next(rows, None) is None
    assert "computed the same bits" in done.stdout


@pytest.mark.full
def test_the_json_is_complete_and_consistent(whole_run):
    _, figures, _ = whole_run
    assert figures["schema"] == 1
    assert figures["arenapy"] == arenapy.__version__
    assert figures["identical"] is True
    assert figures["rounds"] == demo.QUICK_ROUNDS
    assert [workload["name"] for workload in figures["workloads"]] == NAMES
    after = [workload["name"] for workload in figures["workloads_after"]]
    assert after == ["digits network", "N = 500", "N = 1000"]
    assert all(math.isfinite(number) for number in numbers(figures))
    for workload in figures["workloads"] + figures["workloads_after"]:
        assert workload["iterations_per_round"] >= 1
        assert workload["prefault_ms"] > 0
        assert workload["comparisons"] == 2 * (figures["rounds"] + 1)
        assert list(workload["ways"]) == WAYS
        for way in workload["ways"].values():
            assert way["ms"] == median(way["rounds_ms"]) > 0
            assert way["minor_faults"] == median(way["rounds_minor_faults"]) >= 0
            assert len(way["rounds_ms"]) == len(way["rounds_minor_faults"]) == figures["rounds"]
        plain, arena = (workload["ways"][name] for name in WAYS[:2])
        assert plain["times_as_fast_as_plain"] == 1
        assert arena["times_as_fast_as_plain"] == plain["ms"] / arena["ms"]
        if workload["gain"]:
            paid = workload["paid_after_iterations"]
            saved = plain["ms"] - arena["ms"]
            assert (paid - 1) * saved < workload["prefault_ms"] <= paid * saved * (1 + 1e-9)
        else:
            assert workload["paid_after_iterations"] is None


@pytest.mark.full
def test_an_arena_does_not_fault_where_numpy_does(whole_run):
    _, figures, _ = whole_run
    # Each array is new to the process.
    largest = figures["workloads"][-1]["ways"]
    assert largest["plain NumPy"]["minor_faults"] > 20
    for workload in figures["workloads"]:
        assert workload["ways"]["arena"]["minor_faults"] < 1, workload["name"]


@pytest.mark.full
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc learns otherwise")
def test_malloc_learns_and_plain_numpy_then_stops_faulting(whole_run):
    done, figures, _ = whole_run
    before, after = (
        {workload["name"]: workload["ways"]["plain NumPy"]["minor_faults"] for workload in part}
        for part in (figures["workloads"], figures["workloads_after"])
    )
    assert before["N = 1000"] > 20
    assert after["N = 1000"] < 10
    assert "once malloc keeps such memory" in done.stdout or all(
        workload["gain"] for workload in figures["workloads_after"]
    )


@pytest.mark.full
def test_the_accuracy_is_shown(whole_run):
    done, figures, _ = whole_run
    accuracy = figures["workloads"][0]["accuracy"]
    assert 0.5 < accuracy < 1  # a busy machine trains it little
    assert f"reads {accuracy:.1%} of the digits" in done.stdout
    assert {workload["accuracy"] for workload in figures["workloads"][1:]} == {None}


@pytest.mark.full
def test_the_chart_is_a_picture_with_the_three_colours_in_it(whole_run):
    *_, path = whole_run
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    outputs.check(path, outputs.CHART)  # so that the next one may be written over it
    outputs.check(path.with_name("figures.json"), outputs.report("arenapy demo"))
    picture = matplotlib.image.imread(path)
    height, width, _ = picture.shape
    assert width > 1000
    assert height > 600
    pixels = np.round(picture[..., :3] * 255).astype(int).reshape(-1, 3)
    for colour in chart.COLOURS:
        wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        assert (pixels == wanted).all(axis=1).sum() > 1000


@pytest.mark.full
def test_progress_goes_to_the_terminal_and_not_into_the_output():
    master, terminal = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "arenapy", *TINY, "--rounds", "1"],
        stdout=subprocess.PIPE, stderr=terminal, text=True, env=QUIET | {"TERM": "xterm"},
    ) as process:  # fmt: skip
        os.close(terminal)
        drawn = b""
        try:
            while part := os.read(master, 1 << 16):
                drawn += part
        except OSError:
            pass  # how Linux says that the other side has gone
        output = process.stdout.read()
    os.close(master)
    assert process.returncode == 0
    assert not CONTROL.search(output)
    assert "N = 40" in output
    assert b"\x1b[" in drawn
    assert b"12/12" in drawn  # 3 ways, 2 workloads, each measured twice
    assert "computed the same bits: 16 comparisons" in output


# --- the check that all three compute the same -------------------------------------------------


@pytest.mark.parametrize("way", [ways.Plain, ways.Arena, ways.Preallocated])
@pytest.mark.parametrize(("workload", "clean"), [("digits", 0), ("loop", 0), ("digits", 9)])
@pytest.mark.full
def test_one_wrong_bit_in_one_way_fails(way, workload, clean, monkeypatch, capsys, tmp_path):
    kinds = {"digits": workloads.Network, "loop": workloads.Temporaries}
    honest, steps = way.step, Counter()

    def sabotaged(self, job):
        arrays = honest(self, job)
        steps["done"] += isinstance(job, kinds[workload])
        if isinstance(job, kinds[workload]) and steps["done"] > clean:
            arrays[-1].view("u4").flat[-1] ^= 1  # the last bit of the last number
        return arrays

    monkeypatch.setattr(way, "step", sabotaged)
    monkeypatch.setattr(measuring, "MAX_BLOCK_MS", 1e9)  # as many iterations on a busy machine
    assert cli.main([*TINY, "--json", str(tmp_path / "figures.json")]) == 1
    out, err = capsys.readouterr()
    assert "computed other bits" in err
    assert {"digits": "digits network", "loop": "N = 40"}[workload] in err
    assert ("before the first round" in err) == (clean == 0)
    assert "time, ms" not in out, "figures were shown that mean nothing"
    assert not any(tmp_path.iterdir())


@pytest.mark.full
def test_unsabotaged_the_same_command_succeeds(capsys):
    assert cli.main(TINY) == 0
    assert "computed the same bits: 24 comparisons" in capsys.readouterr().out


# --- the workloads -----------------------------------------------------------------------------


def garbage(shape, dtype):
    """Memory as an arena hands it out: full of what was there before."""
    return np.full(shape, np.nan, dtype)


@pytest.fixture(scope="module")
def digits():
    return workloads.Digits()


@pytest.mark.parametrize("n", [1, 2, 7, 63, 255, 256, 500])
def test_the_loop_is_spelled_alike(n):
    loop = workloads.Temporaries(n)
    a, b = loop._a, loop._b
    (plain,), (placed,) = loop.plain(), loop.placed(garbage)
    assert plain.dtype == placed.dtype == np.float32
    assert plain.tobytes() == placed.tobytes()
    np.testing.assert_allclose(plain, a.astype("f8") * b + a - b / 2.0, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_the_network_is_spelled_alike(digits):
    plain, placed = digits.start(), digits.start()
    for _ in range(40):
        for one, other in zip(plain.plain(), placed.placed(garbage), strict=True):
            assert one.tobytes() == other.tobytes()
    assert np.isfinite(plain.w1).all()


def test_the_network_descends_the_gradient(digits):
    """Each step moves the weights against the slope of the loss, found by differences."""
    network = digits.start()
    x, y = digits.images[:100].astype("f8"), digits.targets[:100]
    before = [np.array(w, "f8") for w in (network.w1, network.b1, network.w2, network.b2)]

    def loss(w1, b1, w2, b2):
        z = np.tanh(x @ w1 + b1) @ w2 + b2
        z -= z.max(axis=1, keepdims=True)
        return -np.mean(np.sum(y * (z - np.log(np.exp(z).sum(axis=1, keepdims=True))), axis=1))

    network.plain()
    for place, after in enumerate((network.w1, network.b1, network.w2, network.b2)):
        at = np.unravel_index(np.argmax(np.abs(after - before[place])), after.shape)
        slope = 0.0
        for sign in (1, -1):
            moved = [w.copy() for w in before]
            moved[place][at] += sign * 1e-5
            slope += sign * loss(*moved) / 2e-5
        stepped = after[at] - before[place][at]
        assert stepped == pytest.approx(-network.rate * slope, rel=1e-3)


@pytest.mark.full
def test_the_network_learns_to_read(digits):
    network = digits.start()
    assert network.accuracy() < 0.3
    for _ in range(300):
        network.plain()
    assert network.accuracy() > 0.88


def test_the_loop_uses_as_many_arrays_as_numpy_does():
    """Temporary elision leaves two arrays of the four; the placed spelling must not use fewer."""
    loop = workloads.Temporaries(500)
    loop.plain()
    tracemalloc.start()
    try:
        loop.plain()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    by_hand = ways.Preallocated()
    with by_hand.scope():
        by_hand.step(loop)
    placed = sum(array.nbytes for array in by_hand.arrays)
    assert placed == 2 * loop.array_bytes(500)
    assert placed <= peak < 1.1 * placed


def test_preallocated_hands_out_the_same_arrays_again(digits):
    by_hand, job = ways.Preallocated(), digits.start()
    with by_hand.scope():
        by_hand.step(job)
    first = [array.ctypes.data for array in by_hand.arrays]
    assert len(set(first)) == len(first) > 10
    with by_hand.scope():
        by_hand.step(job)
    assert [array.ctypes.data for array in by_hand.arrays] == first


def time_nine(way, job):
    return measuring._time_block(way, job, 9)


@pytest.mark.parametrize("once", [measuring._digest, time_nine])
def test_an_iteration_leaves_nothing_in_the_arena(once, digits):
    bump = arenapy.Bump(8 << 20)
    arena = ways.Arena(bump)
    for job in (digits.start(), workloads.Temporaries(300)):
        for _ in range(3):
            once(arena, job)
            assert (bump.used, bump.retired) == (0, 0)
    assert bump.peak >= 2 * workloads.Temporaries.array_bytes(300)


# --- the data ----------------------------------------------------------------------------------


def test_the_digits_are_the_published_ones():
    images, labels = workloads.load_digits()
    assert images.shape == (1797, 64)
    assert (images.min(), images.max()) == (0, 1)
    assert np.array_equal(images * 16, np.round(images * 16))
    # Images per class of optdigits.tes, as its description at the source lists them.
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_the_data_ships_with_its_source_and_licence():
    folder = files("arenapy.commands.demo")
    notice = (folder / "digits.md").read_text()
    for fact in ("Alpaydin", "Kaynak", "CC BY 4.0", "https://doi.org/10.24432/C50P49"):
        assert fact in notice
    assert hashlib.sha256((folder / "digits.csv.gz").read_bytes()).hexdigest() in notice


# --- what is said about the figures ------------------------------------------------------------


def result(plain, arena, prefault=10.0, faults=0.0, **more):
    def timing(name, ms, faults=0):
        return measuring.Timing(name, list(ms), [faults] * len(ms))

    figures = {"name": "N = 7", "iterations": 5, "planned_iterations": 5, "arena_bytes": 1 << 20}
    return measuring.Result(
        **(figures | more),
        prefault_ms=prefault,
        plain=timing(WAYS[0], plain, faults),
        arena=timing(WAYS[1], arena),
        preallocated=timing(WAYS[2], arena),
    )


def said(*results, later=(), width=80):
    console = Console(file=io.StringIO(), width=width)
    report.show(console, report.Report(3, 31 << 20, results, later))
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("plain", "arena", "gain", "paid"),
    [
        ([4, 4, 4, 4], [1.5, 1.5, 1.5, 1.5], True, 4),  # 10 / 2.5
        ([4, 4, 4, 4], [1, 1, 1, 1], True, 4),  # 3.3 iterations: in the fourth
        ([4, 4, 4, 4], [1, 1, 1, 9], True, 4),
        ([4, 4, 4, 4], [1, 1, 9, 9], False, None),  # half of the rounds: chance
        ([4, 4, 4, 4], [3.9, 3.9, 3.9, 3.9], False, None),  # two and a half percent: noise
        ([4, 4, 4, 4], [4, 4, 4, 4], False, None),
        ([4, 4, 4, 4], [5, 5, 5, 5], False, None),
        ([40, 40, 40, 40], [1, 1, 1, 1], True, 1),
    ],
)
def test_gain_and_when_it_has_paid(plain, arena, gain, paid):
    found = result(plain, arena)
    assert (found.gain, found.paid_after) == (gain, paid)


def test_no_gain_is_said_plainly():
    slower, same, gain = (result([4] * 3, [ms] * 3, faults=9) for ms in (5, 4, 2))
    text = said(slower)
    assert "N = 7: no gain.\n" in text
    assert "1.25x slower" in text
    assert "never" in text
    assert "the same" in said(same)
    assert "N = 7: no gain.\n" in said(same)
    text = said(gain)
    assert "no gain" not in text
    assert "2.00x faster" in text
    assert "5 iterations" in text
    later = said(gain, later=[result([4] * 3, [4] * 3)])
    told = "N = 7: no gain once malloc keeps such memory; plain NumPy does not fault either."
    assert told in later


@pytest.mark.parametrize("width", [80, 120])
def test_large_figures_fit(width):
    ms = [123456.789] * 3, [12345.678] * 3
    big = result(*ms, prefault=1e5, faults=1e7, name="N = 100000", arena_bytes=1 << 40)
    text = said(big, width=width)
    assert "123,456.789" in text
    assert "10,000,000" in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width


def test_noise_is_called_noise():
    text = said(result([4] * 6, [1] * 4 + [9] * 2))
    assert "4.00x faster" in text
    assert "N = 7: no gain; faster in 4 of 6 rounds, which is noise.\n" in text
    assert "never" in text


def test_a_busy_machine_is_named():
    text = said(result([4] * 3, [2] * 3, planned_iterations=150))
    assert "N = 7 to 5 of 150 iterations" in text
    assert "OPENBLAS_NUM_THREADS" not in text  # the loop uses no BLAS
    network = result([4] * 3, [2] * 3, planned_iterations=150, name="net", accuracy=0.9)
    assert "OPENBLAS_NUM_THREADS=1" in said(network)
    assert "shortened" not in said(result([4] * 3, [2] * 3))


# --- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--sizes", "0"], "'0' is not a whole number from 1 to"),
        (["--sizes", "500", "-5"], "'-5'"),
        (["--sizes", "1.5"], "'1.5'"),
        (["--sizes", "x"], "'x'"),
        (["--sizes"], "--sizes"),
        (["--rounds", "0"], "'0'"),
        (["--plot", "chart.pdf"], "chart.pdf must end in .png"),
        (["--plot", "no/such/chart.png"], "no/such"),
        (["--json", "no/such/figures.json"], "no/such"),
        (["--json", "/"], "'/' is a directory"),
        (["--gpu", "--batches", "0"], "'0' is not a whole number from 1 to"),
        (["--gpu", "--batch-bytes", "x"], "'x'"),
        (["--gpu", "--batch-bytes", "1000"], "1000 is not a multiple of 16384"),
        (["--gpu", "--sizes", "500"], "--sizes is for the demo without --gpu"),
        (["--gpu", "--plot", "chart.png"], "--plot is for the demo without --gpu"),
        (["--gpu", "--json", "no/such/figures.json"], "no/such"),
        (["--batches", "5"], "--batches is for the demo with --gpu"),
        (["--batch-bytes", "16384"], "--batch-bytes is for the demo with --gpu"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_measured(arguments, named, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["demo", *arguments])
    out, err = capsys.readouterr()
    assert out == ""
    assert named in err


def test_more_than_the_machine_has_is_refused_up_front(capsys):
    assert cli.main(["demo", "--sizes", "500", str(10**9)]) == 1
    err = capsys.readouterr().err
    assert f"N = {10**9}" in err
    assert "--sizes" in err


@pytest.mark.parametrize("error", [arenapy.OutOfMemory("none left"), MemoryError("none left")])
def test_running_out_of_memory_is_one_line(error, monkeypatch, capsys):
    def fail(nbytes):
        raise error

    monkeypatch.setattr(measuring, "Bump", fail)
    assert cli.main(TINY) == 1
    err = capsys.readouterr().err
    assert err.startswith("arenapy demo: none left")
    assert err.count("\n") == 1


def test_without_matplotlib_it_says_what_to_install(tmp_path):
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from arenapy.commands.cli import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *TINY, "--plot", "chart.png"],
        capture_output=True, text=True, env=QUIET, timeout=TIMEOUT, cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert "--plot needs matplotlib" in done.stderr
    assert "python -m pip install matplotlib" in done.stderr
    assert "Traceback" not in done.stderr
    assert not any(tmp_path.iterdir())
