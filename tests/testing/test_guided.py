"""Fuzzing led by coverage: the parts that need neither clang nor atheris.

What needs both is run by hand: tests/testing/fuzz_coverage.py.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import textwrap
import time

import numpy as np
import pytest
from fuzz_targets import Bumps

from arenapy.testing import __main__ as command
from arenapy.testing import guided, guided_process
from arenapy.testing.edges import Edges, counters_in
from arenapy.testing.guided_process import by_chance, kept, machine_named, target_of

# What the compiler makes of a function with three edges.
WATCHED = """
__attribute__((section("__sancov_cntrs"), used)) static unsigned char counters[3];
void turn(int which) { counters[which]++; }
"""
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")


@pytest.fixture
def watched(tmp_path):
    source, made = tmp_path / "watched.c", tmp_path / "watched.so"
    source.write_text(WATCHED)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", made, source], check=True)
    return made


@needs_gcc
def test_edges_are_read_and_zeroed_where_they_lie(watched):
    assert counters_in(watched)[1] == 3
    library = ctypes.CDLL(str(watched))
    edges = Edges()
    assert edges.modules["watched"] == 3 and edges.total >= 3
    edges.zero()
    before = edges.read()
    library.turn(1)
    library.turn(1)
    assert sorted(edges.read()[edges.read() != before]) == [2]
    edges.zero()
    assert not edges.read().any()


def test_what_is_no_such_file_has_no_edges(tmp_path):
    (tmp_path / "text").write_text("text")
    assert counters_in(tmp_path / "text") is None


class FourEdges:
    """Each byte of an input is an edge that it reaches."""

    total = 4

    def __init__(self):
        self.counters = np.zeros(4, "u1")

    def zero(self):
        self.counters[:] = 0

    def read(self):
        return self.counters.copy()

    def run(self, data):
        self.counters[list(data)] += 1


def test_a_corpus_keeps_what_smaller_files_do_not_reach(tmp_path):
    for name, data in ("a", b"\0\1\2"), ("b", b"\0"), ("c", b"\1"), ("d", b"\0\1"):
        (tmp_path / name).write_bytes(data)
    edges = FourEdges()
    chosen, reached = kept(tmp_path, edges.run, edges)
    assert [path.name for path in chosen] == ["b", "c", "a"]
    assert reached.tolist() == [True, True, True, False]


def test_a_corpus_stays_if_no_module_counts_edges(tmp_path, monkeypatch):
    class NoEdges(FourEdges):
        total, modules = 0, {}

    monkeypatch.setattr(guided_process, "Edges", NoEdges)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a").write_bytes(b"\1")
    job = {
        "target": "fuzz_targets:Bumps", "corpus": str(corpus), "minimize": True,
        "modules": str(tmp_path / "modules"), "figures": str(tmp_path / "figures"),
    }  # fmt: skip
    with pytest.raises(SystemExit, match="fuzzer-no-link"):
        guided_process.main(["process", json.dumps(job)])
    assert [path.name for path in corpus.iterdir()] == ["a"]


class Wrong(Bumps):
    def address(self, block):
        return super().address(block) & ~1023


def test_an_input_runs_a_program_and_raises_what_it_finds():
    run = target_of(Wrong)
    with pytest.raises(AssertionError, match=r"overlaps|outside|lies"):
        for byte in range(256):
            run(bytes([byte]) * 200)
    assert Wrong.tally.steps > 0


def test_a_target_is_a_machine_or_makes_an_allocator():
    assert machine_named("fuzz_targets:Bumps") is Bumps
    assert (
        machine_named("test_guided:an_allocator").arguments["target"] == "test_guided:an_allocator"
    )
    with pytest.raises(ValueError, match="no module"):
        machine_named("no_such_module:thing")


def an_allocator():
    import arenapy

    return arenapy.Pool()


def test_without_atheris_the_command_says_what_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    arguments = ["guided", "fuzz_targets:Bumps", "--corpus", str(tmp_path / "corpus")]
    assert command.main(arguments) == 2
    assert "pip install atheris" in capsys.readouterr().err


@needs_gcc
@pytest.mark.parametrize("fault", ["os._exit(0)", "os._exit(3)", "raise RuntimeError"])
@pytest.mark.parametrize("calls", [1, 1000], ids=["first program", "later"])
@pytest.mark.full
def test_a_fault_that_shows_once_is_found(watched, tmp_path, monkeypatch, fault, calls):
    text = f"""
        import ctypes, itertools, os

        from arenapy.testing import BumpMachine

        ctypes.CDLL({str(watched)!r})
        calls = itertools.count(1)

        class Ending(BumpMachine):
            def allocate(self, state, nbytes, align):
                if next(calls) == {calls}:
                    {fault}
                return super().allocate(state, nbytes, align)
    """
    (tmp_path / "ending.py").write_text(textwrap.dedent(text))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(
        guided, "environment", lambda steps: {**os.environ, "ARENAPY_STEPS": str(steps)}
    )
    monkeypatch.setattr(guided, "SMALLER_SECONDS", 1.0)
    found = guided.by_chance("ending:Ending", seconds=60)
    assert found.seconds < 60 and found.lines
    assert "nbytes" in found.lines[-1] or "requests" in found.lines[-1]


@needs_gcc
@pytest.mark.full
def test_a_process_that_fails_after_its_programs_found_nothing(watched, tmp_path, monkeypatch):
    (tmp_path / "failing.py").write_text(
        "import atexit, ctypes, os\n"
        "from arenapy.testing import BumpMachine as Mine\n"
        f"ctypes.CDLL({str(watched)!r})\n"
        "atexit.register(os._exit, 1)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(guided, "environment", lambda steps: {**os.environ})
    with pytest.raises(RuntimeError, match="status 1, and not in a program"):
        guided.by_chance("failing:Mine", seconds=0.1)


def test_the_code_may_go_to_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = []
    monkeypatch.setattr(guided, "_process", lambda target, corpus, options: told.extend(options))
    guided.guided("a:b", "corpus")
    assert str(tmp_path / "corpus") in told


@pytest.mark.parametrize("run", ["by_chance", "kept"])
@pytest.mark.full
def test_a_program_that_hangs_is_ended(run, tmp_path, monkeypatch):
    monkeypatch.setattr(guided_process, "HANGS_AFTER", 1)

    class Hanging(Bumps):
        def allocate(self, state, nbytes, align):
            time.sleep(1000)

    (tmp_path / "input").write_bytes(b"")
    pid = os.fork()
    if pid == 0:
        try:
            if run == "by_chance":
                by_chance(Hanging, 1000, contextlib.nullcontext)
            else:
                kept(tmp_path, target_of(Hanging), FourEdges())
        finally:
            os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGALRM


@pytest.mark.full
def test_programs_by_chance_run_until_the_time_is_over():
    entered = []

    @contextlib.contextmanager
    def watch():
        entered.append(Bumps.tally.examples)
        yield

    by_chance(Bumps, 0.01, watch)
    assert len(entered) == 100
    assert entered == sorted(set(entered)), "a program ran outside"
