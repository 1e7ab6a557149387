"""``arenapy demo --gpu``: the pipeline on a simulated device, and the parts its figures rest on."""

import io
import json
import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_gpu import need_gpu
from rich.console import Console
from simulated_bindings import bindings, simulated_checksum

import arenapy
from arenapy import cuda
from arenapy.commands import cli
from arenapy.commands.demo import gpu_kernel, gpu_measuring, gpu_report, gpu_ways
from arenapy.commands.demo.gpu_device import Gpu
from arenapy.commands.demo.gpu_measuring import Alone, Pipeline, Traced, WayTiming, rounds_for
from arenapy.commands.demo.gpu_overlap import common, length

NBYTES = 2 * gpu_ways.ROW_BYTES
TINY = ["demo", "--gpu", "--quick", "--batches", "20", "--batch-bytes", str(NBYTES)]
NAMES = ["plain", "pinned anew", "arenapy"]


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(gpu_measuring, "checksum", simulated_checksum)
    monkeypatch.setattr(gpu_measuring, "RISE_SECONDS", 0)
    with bindings(monkeypatch) as one:
        yield one


def filled(number, nbytes=NBYTES):
    words = np.empty(nbytes // 4, np.uint32)
    gpu_ways.fill(words, number)
    return words


# --- end to end --------------------------------------------------------------------------------


def test_the_whole_command_on_a_simulated_device(fake, capsys, tmp_path):
    path = tmp_path / "figures.json"
    assert cli.main([*TINY, "--rounds", "2", "--json", str(path)]) == 0
    out, err = capsys.readouterr()
    assert err == f"figures: {path}\n"
    assert max(map(len, out.splitlines())) <= 80
    assert "Simulated 0, driver CUDA 12.8." in out.replace("\n", " ")
    figures = json.loads(path.read_text())
    assert (figures["schema"], figures["demo"]) == (1, "gpu")
    assert (figures["batches"], figures["batch_bytes"], figures["runs"]) == (20, NBYTES, 2)
    assert figures["arenapy"] == arenapy.__version__
    assert list(figures["ways"]) == NAMES
    assert [way["batches"] for way in figures["ways"].values()] == [20, 2, 20]
    # Two runs of each way and a traced one of arenapy, against the first run of plain.
    assert figures["checksums_compared"] == 20 + 2 * 2 + 2 * 20 + 20
    assert figures["checksums_computed_by_numpy"] == 3
    for name, way in figures["ways"].items():
        assert len(way["runs_seconds"]) == len(way["runs_minor_faults"]) == 2
        assert way["ms_a_batch"] == pytest.approx(1e3 * way["seconds"] / way["batches"])
        row = re.search(rf"^ +{re.escape(name)} +(.*)$", out.split("GB/s")[1], re.MULTILINE)
        shown = f"{way['batches']} {way['seconds']:,.3f} {way['ms_a_batch']:,.3f}"
        assert " ".join(row[1].split()).startswith(shown)
    assert len(figures["traced"]["copies_ms"]) == len(figures["traced"]["kernels_ms"]) == 20
    flat = " ".join(out.split())
    assert all(" ".join(sentence.split()) in flat for sentence in figures["verdict"])


def test_one_run_and_default_batches(fake, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr("arenapy.commands.demo.gpu.run", lambda *what: asked.append(what) or 0)
    assert cli.main(["demo", "--gpu"]) == 0
    assert cli.main(["demo", "--gpu", "--quick"]) == 0
    assert cli.main(["demo", "--gpu", "--quick", "--batches", "7", "--rounds", "5"]) == 0
    assert asked == [(1000, 8 << 20, 3, None), (100, 8 << 20, 1, None), (7, 8 << 20, 5, None)]


def test_the_pipeline_takes_memory_once(fake):
    """However many batches; plain takes some for each."""

    def taken(way, batches):
        calls = fake.simulated.calls
        before = calls["cuMemAlloc"], calls["cuMemHostRegister"]
        way.run(batches, range(50))
        batches.gpu.synchronize()
        return calls["cuMemAlloc"] - before[0], calls["cuMemHostRegister"] - before[1]

    with Gpu() as gpu:
        batches = gpu_ways.Batches(gpu, NBYTES, 50)
        assert taken(gpu_ways.Pooled(NBYTES), batches) == (0, 0)
        assert taken(gpu_ways.Plain(), batches) == (50, 0)
        assert taken(gpu_ways.Pinned(), batches) == (50, 50)
        batches = None  # before the device is gone


@pytest.mark.parametrize("way", [gpu_ways.Plain, gpu_ways.Pinned, gpu_ways.Pooled])
@pytest.mark.full
def test_one_wrong_bit_in_one_way_fails(way, fake, monkeypatch, capsys, tmp_path):
    honest = way.run

    def sabotaged(self, batches, numbers, *noted):
        honest(self, batches, numbers, *noted)
        if batches.rounds:  # not while it is calibrated
            batches.gpu.synchronize()
            batches._sums[4:8].fill(0xFF)  # of batch 1

    monkeypatch.setattr(way, "run", sabotaged)
    assert cli.main([*TINY, "--json", str(tmp_path / "figures.json")]) == 1
    out, err = capsys.readouterr()
    assert err.startswith("arenapy demo: ")
    assert err.count("\n") == 1
    assert "against plain" not in out, "figures were shown that mean nothing"
    assert not any(tmp_path.iterdir())
    # All others differ from plain's, of which the first run is what they are compared with.
    assert ("pinned anew, run 1 of 1" in err) == (way is not gpu_ways.Pooled)
    assert "first batch 1 " in err


def test_a_kernel_that_is_wrong_everywhere_fails(fake, capsys):
    fake.spoil = lambda found: found + 1
    assert cli.main(TINY) == 1
    assert "and NumPy 0x" in capsys.readouterr().err


def test_a_traced_run_is_compared_too(fake, monkeypatch, capsys):
    original = gpu_measuring._Measurement.trace

    def trace(self, count):
        fake.spoil = lambda found: 0
        return original(self, count)

    monkeypatch.setattr(gpu_measuring._Measurement, "trace", trace)
    assert cli.main(TINY) == 1
    assert "arenapy, traced: 20 of 20 batches" in capsys.readouterr().err


@settings(max_examples=15)  # each is a whole pipeline
@given(st.integers(0, 1 << 32))
def test_checksums_are_right_in_any_order(seed):
    """Whatever of the queued work a device does first, batches are never mixed up."""
    chosen = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch, bindings(patch) as fake:

        def progress(name):
            for _ in range(chosen.choice((0, 0, 1, 3))):
                fake.simulated.step(chosen.choice((0, 1, 2, -1)))

        with Gpu() as gpu:
            batches, pooled = gpu_ways.Batches(gpu, NBYTES, 12), gpu_ways.Pooled(NBYTES)
            batches.rounds = 1
            batches.forget()
            fake.simulated.before_call = progress
            pooled.run(batches, range(12))
            fake.simulated.before_call = None
            while fake.simulated.step(chosen.choice((0, -1))):
                pass
            gpu.synchronize()
            found = batches.sums().tolist()
            del batches, pooled
    assert found == [gpu_kernel.checksum(filled(number), 1) for number in range(12)]


# --- what goes wrong ---------------------------------------------------------------------------


def test_without_cuda_it_is_one_line(monkeypatch, capsys):
    def unavailable():
        raise cuda.Unavailable("CUDA needs cuda-python, which is not installed: pip install it")

    monkeypatch.setattr(cuda, "memory_info", unavailable)
    assert cli.main(["demo", "--gpu"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == ("arenapy demo: CUDA needs cuda-python, which is not installed: pip install it\n")


@pytest.mark.parametrize(
    ("name", "result", "named"),
    [
        ("cuMemHostRegister", 1, "CUDA_ERROR_INVALID_VALUE"),
        ("cuMemAlloc", 2, "cuMemAlloc of "),
        ("cuStreamCreate", 400, "CUDA_ERROR_INVALID_HANDLE"),
        ("cuEventElapsedTime", 400, "cuEventElapsedTime failed: CUDA_ERROR_INVALID_HANDLE"),
    ],
)
def test_what_the_driver_refuses_is_one_line(name, result, named, fake, capsys):
    fake.simulated.fails[name] = result
    assert cli.main(TINY) == 1
    err = capsys.readouterr().err
    assert err.startswith("arenapy demo: ")
    assert named in err
    assert err.count("\n") == 1


def test_errors_of_the_bindings_have_the_drivers_name(fake):
    with Gpu() as gpu:
        fake.simulated.fails["cuMemAlloc"] = 2
        with pytest.raises(cuda.CudaError, match=r"cuMemAlloc failed: .*OUT_OF_MEMORY") as caught:
            gpu.allocate(64)
        assert (caught.value.result, caught.value.name) == (2, "CUDA_ERROR_OUT_OF_MEMORY")
        fake.simulated.fails["cuMemAlloc"] = 12345
        with pytest.raises(cuda.CudaError, match=r"cuMemAlloc failed: unknown \(unknown\)"):
            gpu.allocate(64)


# --- what is computed --------------------------------------------------------------------------


def test_every_row_of_every_batch_is_another_one():
    rows = [row.tobytes() for number in range(3) for row in filled(number).reshape(-1, 4096)]
    assert len(set(rows)) == len(rows) == 6


def test_fill_writes_all_of_it_and_the_same_again():
    for number in (0, 999):
        assert np.array_equal(filled(number), filled(number))
        words = np.zeros(NBYTES // 4, np.uint32)
        gpu_ways.fill(words, number)
        step = int(gpu_ways.ROW_STEP)
        for at in (0, 1, 4095, 4096, 8191):
            row = number * 2 + at // 4096
            expected = (int(gpu_ways.PATTERN[at % 4096]) + row * step) % 2**32
            assert words[at] == expected


def by_hand(words, rounds):
    total = 0
    for place, word in enumerate(words.tolist()):
        mixed = word ^ place * gpu_kernel.PLACE % 2**32
        for _ in range(rounds):
            mixed ^= mixed >> gpu_kernel.SHIFT
            mixed = mixed * gpu_kernel.FACTOR % 2**32
        total += mixed
    return total % 2**32


@pytest.mark.parametrize("size", [1, 33, gpu_kernel.CHUNK, gpu_kernel.CHUNK + 5])
@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_the_checksum_is_what_it_says(size, rounds):
    words = np.random.default_rng(size).integers(0, 1 << 32, size, dtype=np.uint32)
    assert gpu_kernel.checksum(words, rounds) == by_hand(words, rounds)


def test_the_checksum_sees_a_bit_and_a_place():
    words = filled(1)
    right = gpu_kernel.checksum(words, 2)
    words[-1] ^= 1
    assert gpu_kernel.checksum(words, 2) != right
    words[-1] ^= 1
    words[[0, 4096]] = words[[4096, 0]]
    assert gpu_kernel.checksum(words, 2) != right


# --- what is made of the times -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("copies", "kernels", "both"),
    [
        ([], [(0, 1)], 0),
        ([(0, 2)], [(1, 3)], 1),
        ([(0, 1)], [(1, 2)], 0),
        ([(0, 9)], [(1, 2), (3, 5), (8, 12)], 4),
        ([(4, 6), (0, 2)], [(1, 5)], 2),
        ([(0, 4), (2, 6)], [(3, 5)], 2),  # of copies that overlap one another, once
        ([(0, 1), (1, 2)], [(0, 2)], 2),
    ],
)
def test_what_overlaps(copies, kernels, both):
    assert common(copies, kernels) == common(kernels, copies) == both
    assert Traced(copies, kernels).both == both


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda s: tuple(sorted(s))))


@given(spans, spans)
def test_what_overlaps_by_counting(some, others):
    def moments(those):
        return {moment for start, end in those for moment in range(start, end)}

    assert length(some) == len(moments(some))
    assert common(some, others) == len(moments(some) & moments(others))


@pytest.mark.parametrize(
    ("wanted", "few", "many", "rounds"),
    [
        (10.0, (10, 2.0), (110, 12.0), 90),  # 0.1 a round, 1 beside them
        (0.5, (10, 2.0), (110, 12.0), 1),  # a kernel without rounds takes longer
        (22.0, (10, 2.0), (110, 12.0), 210),
        (1e9, (10, 2.0), (110, 12.0), gpu_measuring.MAX_ROUNDS),
        (10.0, (10, 2.0), (110, 2.0), 110),  # nothing can be told
        (10.0, (10, 2.0), (110, 1.0), 110),
    ],
)
def test_rounds_are_on_the_line(wanted, few, many, rounds):
    assert rounds_for(wanted, few, many) == rounds


def pipeline(plain=2.0, pooled=0.5, alone=(0.4, 0.2, 0.45), both=(0.0, 1.0), **more):
    """As measured with these milliseconds a batch; the first copy takes from 0 to 1."""
    ways = [
        WayTiming(name, batches, [ms * batches / 1e3], [0])
        for name, batches, ms in zip(NAMES, (100, 10, 100), (plain, 5.0, pooled), strict=True)
    ]
    figures = {
        "device": "NVIDIA H200", "driver_version": 13010, "batches": 100, "nbytes": 8 << 20,
        "runs": 1, "rounds": 900, "pace_ms": 0.45, "setup_ms": 10.0, "checked": 3, "compared": 310,
    } | more  # fmt: skip
    return Pipeline(
        alone=Alone(*alone), plain=ways[0], pinned=ways[1], pooled=ways[2],
        traced=Traced([(0.0, 1.0)], [both]), **figures,
    )  # fmt: skip


def said(found, width=80):
    console = Console(file=io.StringIO(), width=width)
    gpu_report.show(console, found)
    return console.file.getvalue()


def test_a_gain_and_what_it_cost():
    first, second, third = gpu_report.verdict(pipeline())
    assert "4.00x as fast as plain" in first
    assert "took 10.0 ms, paid back after 7 batches." in first  # 10 / 1.5
    assert "0.500 ms, 1.11x of computing alone, the longest stage: the others are hidden" in second
    assert third == "Copies and kernels ran at the same time for 100% of the copying " \
        "(events, 1 batches)."  # fmt: skip


@pytest.mark.parametrize("pooled", [2.0, 1.95, 3.0])
def test_no_gain_is_said_plainly(pooled):
    first = gpu_report.verdict(pipeline(pooled=pooled))[0]
    assert first.startswith("No gain: ")
    assert f"{2 / pooled:.2f}x" in first
    assert "paid back" not in first


def test_what_hides_what():
    assert "of filling alone" in gpu_report.verdict(pipeline(alone=(0.48, 0.2, 0.1)))[1]
    partly = gpu_report.verdict(pipeline(pooled=0.8))[1]
    assert "1.78x of computing alone, the longest stage, and 76% of one after the other" in partly
    nothing = gpu_report.verdict(pipeline(pooled=1.2))[1]
    assert nothing.endswith("no less than one after the other: nothing is hidden.")


def test_no_overlap_is_said_plainly():
    assert "for 83% of" in gpu_report.verdict(pipeline(both=(0.17, 5.0)))[2]
    assert gpu_report.verdict(pipeline(both=(0.95, 2.0)))[2].startswith("Copies and kernels hardly")
    assert Traced([], []).share == 0


def test_when_it_has_paid():
    assert pipeline().paid_after == 7
    assert pipeline(setup_ms=0.1).paid_after == 1
    assert pipeline(pooled=2.5).paid_after is None
    assert gpu_report.figures(pipeline(pooled=2.5))["paid_after_batches"] is None


def test_ways_are_compared_by_batch():
    found = pipeline()
    assert found.speedup(found.pinned) == pytest.approx(0.4)
    text = said(found)
    assert re.search(r"pinned anew +10 +0\.050 +5\.000 +1\.68 +2\.50x slower", text)
    assert re.search(r"arenapy +100 +0\.050 +0\.500 +16\.78 +4\.00x faster", text)
    assert "the same" in said(pipeline(pooled=2.0))


@pytest.mark.parametrize("width", [80, 120])
def test_large_figures_fit(width):
    big = pipeline(plain=1234.567, pooled=123.456, nbytes=1000 << 20, alone=(1e4, 1e4, 1e4))
    text = said(big, width)
    assert re.search(r"123\.457 +1,234\.567 ", text)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width


def test_the_median_of_the_runs_counts():
    timing = WayTiming("plain", 10, [3.0, 1.0, 2.0], [100, 50, 70])
    assert (timing.median_seconds, timing.ms, timing.faults_a_batch) == (2.0, 200.0, 7.0)


# --- a real GPU --------------------------------------------------------------------------------


def test_the_demo_on_a_real_gpu(tmp_path, capsys):
    """Equal results and a status; times are for people to read."""
    need_gpu()
    path = tmp_path / "figures.json"
    assert cli.main(["demo", "--gpu", "--quick", "--json", str(path)]) == 0, capsys.readouterr().err
    figures = json.loads(path.read_text())
    assert figures["identical"] is True
    assert figures["checksums_compared"] == 10 + 100 + 100
    assert figures["checksums_computed_by_numpy"] == 3
    assert len(figures["traced"]["copies_ms"]) == 100


def test_the_kernel_on_a_real_gpu():
    """Sizes that are no multiple of a warp or of the grid, and no rounds."""
    need_gpu()
    with Gpu() as gpu:
        for size, rounds in ((1, 0), (33, 1), (100_003, 7), (3_000_001, 2)):
            words = np.random.default_rng(size).integers(0, 1 << 32, size, dtype=np.uint32)
            into = cuda.Device().region(4).buffer()
            into.fill(0)
            address = gpu.allocate(words.nbytes)
            gpu.copy_in(address, words)
            gpu.launch(None, address, words.nbytes, rounds, into.address)
            gpu.synchronize()
            gpu.free(address)
            found = np.empty(1, np.uint32)
            into.copy_to(found)
            assert found[0] == gpu_kernel.checksum(words, rounds)
