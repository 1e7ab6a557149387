"""``arenapy fuzz``: what it attacks, finds, says, and ends with."""

import contextlib
import ctypes
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path
from types import SimpleNamespace

import crashing
import hypothesis
import numpy as np
import planted_toys
import pytest
from hypothesis import strategies as st

from arenapy.commands.fuzz import MOST_DEATHS, OVER, _search, _show_progress, main
from arenapy.testing import AllocatorMachine
from arenapy.testing.adapters import Adapter, CLibrary, address_of
from arenapy.testing.attack import attack, machine_for
from arenapy.testing.attack import main as attack_main

HERE = Path(__file__).parent


def fuzz(*arguments, **how):
    folders = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-m", "arenapy", "fuzz", *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders), "COLUMNS": "100"},
        **how,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["crashing:bump"],
        ["crashing:Working"],
        ["crashing:pool", "--threads", "2"],
        ["--library", "libc.so.6"],
    ],
)
@pytest.mark.sampled
@pytest.mark.full
def test_nothing_is_found_in_what_is_right(arguments):
    done = fuzz(*arguments, "--examples", "15", "--steps", "20", "--seed", "1")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert done.stdout.endswith("no fault found\n")
    assert "allocate_block" in done.stdout and "rare state" in done.stdout
    assert "--seed 1" in done.stdout


@pytest.mark.full
def test_standard_error_may_be_closed():
    words = ["crashing:bump", "--examples", "5", "--steps", "10"]
    done = fuzz(*words, preexec_fn=lambda: os.close(2))
    assert done.returncode == 0 and done.stdout.endswith("no fault found\n")


@pytest.mark.full
def test_what_is_found_is_made_small_and_kept(tmp_path):
    kept = tmp_path / "kept in a folder.jsonl"
    done = fuzz("crashing:Overlapping", "--seed", "7", "--save", str(kept))
    assert done.returncode == 1
    assert "overlaps block" in done.stdout
    assert len(kept.read_text().splitlines()) < 12
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("again: ")]
    assert shlex.split(said)[1:] == ["python", "-m", "arenapy.testing", "reproduce", str(kept)]
    again = subprocess.run(
        [sys.executable, "-m", "arenapy.testing", "reproduce", str(kept)],
        capture_output=True,
        text=True,
        cwd=HERE,
    )
    assert again.returncode == 1
    assert "overlaps block" in again.stderr


@pytest.mark.long
@pytest.mark.no_sanitizer  # which has its own way to end
def test_a_signal_is_found_and_its_program_made_small(tmp_path):
    done = fuzz("crashing:Killed", "--seed", "5")
    assert done.returncode == 1
    assert "killed by SIGSEGV" in done.stdout
    assert "start(config={})" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "PACKAGE:MAKE_ALLOCATOR"),
        (["a:b", "--library", "c"], "PACKAGE:MAKE_ALLOCATOR"),
        (["crashing"], "package.module:object"),
        (["crashing:no_such"], "no_such"),
        (["no_such_module:f"], "no_such_module"),
        (["crashing:nothing"], "alloc, allocate, malloc"),
        (["--library", "libno_such.so"], "libno_such.so"),
        (["crashing:bump", "--examples", "0"], "from 1 to"),
    ],
)
@pytest.mark.sampled
@pytest.mark.full
def test_wrong_arguments(arguments, named):
    done = fuzz(*arguments)
    assert done.returncode == 2
    assert named in done.stderr and "Traceback" not in done.stderr


@pytest.mark.full
def test_a_library_that_is_not_a_file(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    done = fuzz("--library", str(tmp_path / "fifo"))
    assert done.returncode == 2
    assert "fifo is not a file" in done.stderr


@pytest.mark.full
@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("name", ["libjemalloc.so.2", "libmimalloc.so.2"])
@pytest.mark.sampled
def test_other_mallocs(name, threads):
    """Nothing in jemalloc; in mimalloc, of some versions, that 256 bytes are not aligned to 256."""
    done = fuzz("--library", name, "--threads", threads, "--examples", "10", "--seed", "2")
    if done.returncode == 2:
        pytest.skip(f"{name} is not there")
    if done.returncode == 1:
        assert "mimalloc" in name and "is not aligned to 256" in done.stdout, done.stdout


def test_sizes_that_ctypes_would_cut():
    libc = CLibrary("libc.so.6")
    for nbytes in (-1, 1 << 64, 1 << 200):
        with pytest.raises(ValueError, match="size_t"):
            libc.alloc(nbytes)
    with pytest.raises(MemoryError):
        libc.alloc(1 << 62)
    block = libc.alloc(1, 4096)
    assert block % 4096 == 0
    libc.free(block)


class Resource:
    """As RMM has it: deallocate(address, nbytes)."""

    def __init__(self):
        self.freed = []

    def allocate(self, nbytes):
        return 4096

    def deallocate(self, address, nbytes):
        self.freed.append((address, nbytes))


class Handed:
    def __init__(self):
        self.closed = False

    def close(self):
        self.closed = True


class Plain:
    remaining = np.int64(7)

    def alloc(self, nbytes, alignment=1):
        return Handed()

    def check(self):
        pass


def test_methods_go_by_their_usual_names():
    resource = Resource()
    adapter = Adapter(resource)
    adapter.free(adapter.allocate(10, None))
    assert resource.freed == [(4096, 10)]
    assert not adapter.aligns and adapter.remaining() is None and adapter.check is None
    plain = Adapter(Plain())
    block = plain.allocate(10, 64)
    plain.free(block)
    assert block[0].closed and plain.aligns and plain.remaining() == 7 and plain.check is not None
    asked = []
    alloc = lambda nbytes, align: asked.append((nbytes, align)) or 1  # noqa: E731
    full = Adapter(SimpleNamespace(alloc=lambda n: SimpleNamespace(ptr=0)))
    with pytest.raises(MemoryError, match="5 bytes were refused"):
        full.allocate(5, None)
    assert full.allocate(0, None)[0].ptr == 0
    required = Adapter(SimpleNamespace(alloc=alloc))
    required.allocate(10, None)
    required.allocate(10, 64)
    assert required.aligns and asked == [(10, 1), (10, 64)]
    with pytest.raises(TypeError, match="alloc, allocate, malloc"):
        Adapter(object())


def test_addresses_go_by_their_usual_names():
    memory = bytearray(10)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert address_of(start) == address_of(memory) == address_of(memoryview(memory)) == start
    assert address_of(type("B", (), {"address": 5})()) == 5
    assert address_of(type("B", (), {"ptr": lambda self: 6})()) == 6
    with pytest.raises(TypeError, match="not an int"):
        address_of(object())


def test_an_allocator_is_named_or_a_library():
    for arguments in ({}, {"target": "a:b", "library": "c"}):
        with pytest.raises(ValueError, match="name an allocator"):
            machine_for(**arguments)


def test_an_allocator_that_cannot_be_made_is_an_error():
    machine = machine_for(library="libc.so.6")

    class Broken(machine):
        @staticmethod
        def new():
            raise RuntimeError("no allocator today")

    found = attack(Broken, examples=3)
    assert str(found.error) == "no allocator today" and len(found.failing) == 1


@pytest.mark.parametrize("made_by", [bytearray, lambda nbytes: np.empty(nbytes, "u1")])
@pytest.mark.parametrize("start", [1, 2])
@pytest.mark.sampled(full=3)  # each start and each maker once
@pytest.mark.full
def test_buffers_of_no_bytes_are_nowhere(made_by, start, monkeypatch):
    monkeypatch.setattr(
        crashing, "made_here", lambda: SimpleNamespace(alloc=made_by), raising=False
    )
    found = attack(machine_for("crashing:made_here"), start=start, examples=20)
    assert found.failing is None, str(found.error)
    assert found.rules["allocate_block"]


@pytest.mark.long
def test_a_class_that_was_mended_is_attacked_anew(monkeypatch):
    monkeypatch.setattr(crashing, "made_here", crashing.Overlapping, raising=False)
    machine = machine_for("crashing:made_here")
    assert attack(machine, start=7).failing is not None
    machine.new = staticmethod(lambda: SimpleNamespace(alloc=bytearray))
    found = attack(machine, start=7, examples=20)
    assert (found.failing, found.error) == (None, None)
    assert found.examples <= 40


@pytest.mark.long
@pytest.mark.no_sanitizer  # under which imports alone may take as long
def test_a_step_that_does_not_end_is_found(tmp_path, monkeypatch, capsys):
    (tmp_path / "hanging.py").write_text(
        "import sys, time\n"
        "calls = []\n"
        "def alloc(nbytes):\n"
        "    calls.append(nbytes)\n"
        "    time.sleep(1000 if len(calls) > 30 else 0)\n"
        "    return bytearray(nbytes)\n"
        "def made():\n"
        "    return sys.modules[__name__]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("arenapy.commands.fuzz.HANGS_AFTER", 10.0)
    assert main(["hanging:made", "--seconds", "60", "--save", "kept.jsonl"]) == 1
    out = capsys.readouterr().out
    assert "a step did not end within 10 s" in out and "allocate" in out
    assert (tmp_path / "kept.jsonl").read_text().count("\n") >= 2


@pytest.mark.full
def test_a_process_that_the_attacked_code_started_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setenv("HELPER", str(tmp_path / "helper"))
    try:
        done = fuzz("crashing:bump_with_a_helper", "--examples", "2", "--steps", "5")
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    finally:
        os.kill(int((tmp_path / "helper").read_text()), signal.SIGKILL)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--examples", "2.5"], "'2.5' is not a whole number"),
        (["--seconds", "nan"], "'nan' is not a number of seconds above 0"),
        (["--seconds", "-3"], "'-3' is not a number of seconds above 0"),
        (["--seconds", "soon"], "'soon' is not a number of seconds"),
        (["--save", "/nowhere/x"], "--save: '/nowhere/x': there is no folder '/nowhere'"),
    ],
)
def test_wrong_values_are_told_before_the_attack(arguments, told, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["crashing:bump", *arguments])
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("content", ["1/0", "def made(:", "raise RuntimeError('no GPU')"])
def test_a_module_that_cannot_be_imported_is_an_error(content, tmp_path, monkeypatch):
    (tmp_path / "broken_target.py").write_text(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="broken_target:made: "):
        machine_for("broken_target:made")
    sys.modules.pop("broken_target", None)


def planted(name, folder):
    """The name of a module that has the toy."""
    if name != "Slab":
        return "planted_toys"
    (folder / "planted_slab.pyx").write_text("# cython: language_level=3\n" + planted_toys.SLAB)
    command = [sys.executable, "-m", "cython", "planted_slab.pyx"]
    subprocess.run(command, cwd=folder, check=True)
    include = f"-I{sysconfig.get_path('include')}"
    made = ["gcc", "-shared", "-fPIC", "-O1", include, "planted_slab.c", "-o", "planted_slab.so"]
    subprocess.run(made, cwd=folder, check=True)
    return "planted_slab"


TOYS = ["FreeList", *(pytest.param(name, marks=pytest.mark.full) for name in ("Arena", "Slab"))]


@pytest.mark.no_sanitizer
@pytest.mark.parametrize("name", TOYS)
def test_the_planted_bug_is_the_first_line(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    target = f"{planted(name, tmp_path)}:{name}"
    few = ("--seed", "1", "--examples", "25", "--steps", "25", "--shrink", "0.5")
    done = fuzz(target, *few)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("found: overlap: ")
    assert "also found: " in done.stdout and "Flaky" not in done.stdout + done.stderr
    kinds = re.findall("^also found: ([a-z-]+):", done.stdout, re.MULTILINE)
    allowed = fuzz(target, *few, "--allow", ",".join(kinds))
    assert allowed.stdout.startswith("found: overlap: ")
    assert "also found" not in allowed.stdout


@pytest.mark.parametrize("name", TOYS)
def test_the_planted_bug_is_first_under_pytest(name, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    machine = machine_for(f"{planted(name, tmp_path)}:{name}")
    machine.TestCase.settings = hypothesis.settings(
        max_examples=30, stateful_step_count=25, database=None, derandomize=True
    )
    with pytest.raises(AssertionError) as caught:
        machine.TestCase("runTest").runTest()
    assert str(caught.value).startswith("overlap: ")
    assert "empty-shared: " in str(caught.value) or "negative: " in str(caught.value)


def test_two_empty_blocks_at_one_address_are_no_overlap():
    class Shared(AllocatorMachine):
        alignments = st.none()
        bad_request = None
        sizes = st.just(0)

        def make(self):
            return ctypes.create_string_buffer(8)

        def allocate(self, state, nbytes, align):
            return ctypes.addressof(state)

        def address(self, block):
            return block

    found = attack(Shared, examples=10)
    assert list(found.findings) == ["empty-shared"] and "two empty blocks" in found.error
    assert len(found.failing) <= 3  # the start, and two requests
    Shared.allow = ("empty-shared",)
    assert not attack(Shared, examples=10).findings


@pytest.mark.full
def test_an_impossible_size_stays_impossible_when_a_program_shrinks():
    class Wrapping(AllocatorMachine):
        alignments = st.none()

        def make(self):
            return []

        def allocate(self, state, nbytes, align):
            if nbytes < 0:
                raise MemoryError
            state.append(ctypes.create_string_buffer(nbytes + 1 if nbytes < sys.maxsize else 1))
            return state[-1]

        def address(self, block):
            return ctypes.addressof(block)

    found = attack(Wrapping, examples=20).findings["oversize"]
    step = json.loads(found.program[-1])
    assert step["step"] == "allocate_impossible" and step["arguments"]["nbytes"] >= sys.maxsize


def test_the_message_says_which_alignment_to_set():
    class Ignoring(AllocatorMachine):
        def make(self):
            return []

        def allocate(self, state, nbytes, align):
            if nbytes < 0 or nbytes > 1 << 20:
                raise MemoryError
            state.append(ctypes.create_string_buffer(nbytes + 64 + len(state) % 3))
            return ctypes.addressof(state[-1])

        def address(self, block):
            return block

    found = attack(Ignoring, examples=10)
    assert set(found.findings) == {"misaligned"}
    assert "alignments = " in found.error and "--max-align" in found.error


class Clock:
    """The time, which passes when a test says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def slow(target, clock):
    """A machine whose programs take a second each."""

    class Slow(machine_for(target)):
        def make(self):
            clock.now += 1
            return super().make()

    return Slow


@pytest.mark.parametrize("seconds", [0, 10])
@pytest.mark.full
def test_shrinking_ends_in_time(seconds):
    clock = Clock()
    began = []

    def watch(tally):
        if tally.watch is None and not began:
            began.append(clock.now)

    machine = slow("crashing:Overlapping", clock)
    found = attack(machine, start=7, examples=60, shrink=seconds, watch=watch, clock=clock)
    assert set(found.findings) == {"overlap", "empty-shared"}
    # Each program runs once, however short the time is.
    assert clock.now - began[0] == max(seconds, len(found.findings))


@pytest.mark.full
def test_more_time_makes_a_program_smaller():
    def length(seconds):
        clock = Clock()
        machine = slow("crashing:Overlapping", clock)
        found = attack(machine, start=7, examples=60, shrink=seconds, clock=clock)
        return len(str(found.failing))

    assert length(0) > length(200)


@pytest.mark.full
def test_an_attack_ends_in_time():
    clock = Clock()
    found = attack(slow("crashing:bump", clock), seconds=30, clock=clock)
    assert (found.examples, clock.now) == (30, 30.0)


STEPS = ["{}", *['{"step": "free_block", "arguments": {}}'] * 50]


class Processes:
    """Processes that run for as long as they may, or end by themselves as listed."""

    def __init__(self, monkeypatch, *ends):
        self.clock, self.ends, self.limits = Clock(), list(ends), []
        monkeypatch.setattr("arenapy.testing.crashes.crashes", self.crashes)

    def crashes(self, lines):
        self.clock.now += 1
        return lines == STEPS  # so the time for smaller programs is used up

    def run(self, job, folder):
        limits = job["attack"]
        self.limits.append((limits["seconds"], limits["shrink"]))
        file = folder / "report.json"
        report = json.loads(file.read_text()) if file.exists() else {"findings": []}
        status, seconds, searching = self.ends.pop(0) if self.ends else (0, 0, False)
        report |= {"examples": report.get("examples", 0) + 1, "searching": searching}
        file.write_text(json.dumps(report))
        if status == 0 and not searching:
            (folder / OVER).write_text("0")
        self.clock.now += seconds
        return status, STEPS, f"process {len(self.limits)}"

    def search(self, folder, seconds=None, allow=()):
        job = {"attack": {"seconds": seconds, "shrink": 10}, "machine": {"allow": list(allow)}}
        status, found, _, words = _search(job, folder, self.run, self.clock)
        return status, [one["kind"] for one in found["findings"]], words


def test_processes_after_a_crash_share_the_time(tmp_path, monkeypatch):
    """The first program takes half of the time for shrinking."""
    processes = Processes(monkeypatch, *[(-11, 30, True)] * 3)
    assert processes.search(tmp_path, seconds=100) == (0, ["crash"], "process 1")
    assert processes.limits == [(100, 10), (65, 5), (35, 5), (5, 5)]
    assert json.loads((tmp_path / "report.json").read_text())["found_at"] == 2


def test_an_allowed_crash_takes_no_time(tmp_path, monkeypatch):
    processes = Processes(monkeypatch, (-11, 30, True))
    assert processes.search(tmp_path, seconds=100, allow=["crash"]) == (0, [], "process 2")
    assert processes.limits == [(100, 10), (70, 10)]


@pytest.mark.parametrize("searching", [True, False])
def test_a_process_that_ends_by_itself_is_a_death(tmp_path, monkeypatch, searching):
    processes = Processes(monkeypatch, (0, 1, searching))
    assert processes.search(tmp_path)[1] == ["crash"] * searching


@pytest.mark.parametrize(("calls", "status"), [(1, 0), (4, 0), (4, 2), (4, os.EX_IOERR)])
def test_an_allocator_that_ends_the_process_is_found(tmp_path, monkeypatch, calls, status):
    text = f"""
        import itertools, os

        calls = itertools.count(1)

        class Ending:
            def alloc(self, nbytes):
                if next(calls) == {calls}:
                    os.write(2, b"arena: map cannot be written: disk full\\n")
                    os._exit({status})
                raise MemoryError
    """
    (tmp_path / "ending.py").write_text(textwrap.dedent(text))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = fuzz("ending:Ending", "--examples", "20", "--max-align", "1", "--shrink", "1")
    assert done.returncode == 1, done.stdout
    assert f"the process ended by itself, with status {status}" in done.stdout


def test_the_end_of_an_attack_is_that_of_a_program(tmp_path, monkeypatch):
    """And no finding, whatever it is."""
    text = """
        import atexit, ctypes, os, sys

        atexit.register(os.kill, os.getpid(), 9)
        atexit.register(ctypes.CDLL(None).fflush, None)
        atexit.register(sys.stdout.flush)
        atexit.register(open, "ended", "w")
        ctypes.CDLL(None).printf(b"words of C\\n")
        print("words of Python")

        class Talking:
            def alloc(self, nbytes):
                raise MemoryError
    """
    (tmp_path / "talking.py").write_text(textwrap.dedent(text))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    monkeypatch.chdir(tmp_path)
    done = fuzz("talking:Talking", "--examples", "2", "--max-align", "1")
    assert done.returncode == 0, done.stdout
    assert "words of C\n" in done.stdout and "words of Python\n" in done.stdout
    assert (tmp_path / "ended").exists()


def test_without_a_time_the_last_death_ends_the_search(tmp_path, monkeypatch):
    processes = Processes(monkeypatch, *[(-11, 1, True)] * 1000)
    processes.ends[MOST_DEATHS:] = []
    assert processes.search(tmp_path)[1] == ["crash"]
    assert [seconds for seconds, _ in processes.limits] == [None] * MOST_DEATHS + [0.0]


def test_without_a_time_a_hang_ends_the_search(tmp_path, monkeypatch):
    processes = Processes(monkeypatch, (-11, 1, True), (None, 60, True))
    assert processes.search(tmp_path)[1] == ["hang", "crash"]
    assert processes.limits == [(None, 10), (None, 5), (0.0, 5)]


def test_a_crash_while_shrinking_is_the_last(tmp_path, monkeypatch):
    processes = Processes(monkeypatch, (-11, 1, False))
    assert processes.search(tmp_path) == (-11, ["crash"], "process 1")


def test_a_smaller_program_that_crashes_is_no_further_kind(tmp_path, monkeypatch):
    """Another process goes on, in half of the time, and tries each program in a child."""
    (tmp_path / "report.json").write_text('{"findings": [{"kind": "overlap"}]}')
    processes = Processes(monkeypatch, (-11, 1, False))
    assert processes.search(tmp_path) == (0, ["overlap"], "process 2")
    assert processes.limits == [(None, 10), (0.0, 5)]


def test_an_exception_without_a_text_is_a_fault():
    class Mute(Exception):
        def __str__(self):
            raise ValueError("no text")

    class Broken(AllocatorMachine):
        def make(self):
            return None

        def allocate(self, state, nbytes, align):
            raise Mute

        def address(self, block):
            return 0

    found = attack(Broken, examples=5, shrink=0)
    assert list(found.findings) == ["Mute"] and "has no text" in found.error


@pytest.mark.parametrize("text", ["", "a text"])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.full
def test_a_program_is_made_small_whatever_the_exception_says(text, apart):
    class Broken(AllocatorMachine):
        alignments = st.none()

        def make(self):
            return ctypes.create_string_buffer(1 << 20), [0]

        def allocate(self, state, nbytes, align):
            memory, cursor = state
            if nbytes > 100:
                raise KeyError if text == "" else RuntimeError(text)
            cursor[0] += 100
            return ctypes.addressof(memory) + cursor[0] % (1 << 19)

        def address(self, block):
            return block

    found = attack(Broken, examples=20, shrink=5, apart=apart)
    assert "did not show it again" not in found.error
    assert [step.name for step in found.failing.steps] == ["start", "allocate_block"]


@pytest.mark.parametrize("end", ["crash", "hang"])
@pytest.mark.full
def test_programs_are_made_smaller_in_children(end, monkeypatch, tmp_path):
    """Although each one that asks for a byte crashes or hangs. None of them leaves anything."""
    monkeypatch.setattr("arenapy.testing.search.TRY_SECONDS", 0.2)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    parent, before = os.getpid(), len(os.listdir("/proc/self/fd"))

    class Shared(AllocatorMachine):
        alignments = st.none()
        sizes = st.integers(1, 100)
        bad_request = None

        def make(self):
            return ctypes.create_string_buffer(100)

        def allocate(self, state, nbytes, align):
            if nbytes == 1 and os.getpid() != parent:
                os.kill(os.getpid(), signal.SIGKILL if end == "crash" else signal.SIGSTOP)
            return ctypes.addressof(state)

        def address(self, block):
            return block

    found = attack(Shared, examples=5, shrink=10, apart=True)
    assert list(found.findings) == ["overlap"] and "overlaps block 1" in found.error
    assert len(found.failing) <= 3 and '"nbytes": 1,' not in str(found.failing.lines())
    assert found.failing.lines() and "[1, " not in str(found.failing.lines())
    assert {file.name for file in tmp_path.iterdir()} <= {f"arenapy-steps-{parent}.jsonl"}

    def late(descriptors, *_):
        raise KeyboardInterrupt

    monkeypatch.setattr("select.select", late)
    with pytest.raises(KeyboardInterrupt):
        attack(Shared, examples=5, shrink=10, apart=True)
    with contextlib.suppress(ChildProcessError):  # another test may have left a child that runs
        ended = os.WEXITED | os.WSTOPPED | os.WNOHANG
        assert os.waitid(os.P_ALL, 0, ended) is None
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # the file of steps


def test_a_report_that_cannot_be_written_is_said_in_one_line(capfd, tmp_path):
    machine = {"target": None, "library": "libc.so.6", "threads": 1, "allow": [], "max_align": 1}
    limits = {"examples": 2, "steps": 5, "seconds": None, "shrink": 1.0, "start": 1}
    folder = tmp_path / "missing"
    job = json.dumps({"machine": machine, "attack": limits})
    assert attack_main([job, str(folder / "report.json")]) == os.EX_IOERR
    said = capfd.readouterr().err
    assert said.startswith(f"{folder} cannot be written: [Errno 2] ") and said.count("\n") == 1


def test_what_may_be_allowed_is_checked(capsys):
    with pytest.raises(SystemExit):
        main(["crashing:bump", "--allow", "negativ"])
    assert "no kind of fault 'negativ'" in capsys.readouterr().err


@pytest.mark.no_sanitizer
@pytest.mark.full
def test_a_crash_is_one_kind_of_finding():
    """The search goes on after it. The report shows the stack."""
    few = ("--examples", "25", "--steps", "20", "--shrink", "1")
    done = fuzz("crashing:KilledAtTimes", "--seed", "3", *few)
    assert done.returncode == 1
    assert done.stdout.startswith("found: crash: killed by SIGSEGV")
    assert "also found: overlap: " in done.stdout and "25 programs" in done.stdout
    assert "in malloc" in done.stderr and "Segmentation fault" in done.stderr
    allowed = fuzz("crashing:KilledAtTimes", "--seed", "3", "--allow", "crash", *few)
    assert allowed.stdout.startswith("found: overlap: ") and "crash" not in allowed.stdout


def test_progress_is_for_terminals(monkeypatch, capsys, tmp_path):
    report = tmp_path / "report.json"
    report.write_text('{"examples": 12, "findings": [{"kind": "overlap"}]}')
    _show_progress(report, 3.0)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    _show_progress(report, 3.0)
    assert "12 programs, 3 s: overlap" in capsys.readouterr().err
