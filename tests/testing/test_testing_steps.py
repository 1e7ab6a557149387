"""Steps as data: programs, the file that a crash leaves behind, and doing it again."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from crashing import Crashing, Inner, TwoAtAPool, Wrong
from hypothesis import given, settings
from hypothesis.stateful import run_state_machine_as_test
from toys import BumpToy, HeapToy, SlotsToy, planted

from arenapy.testing import (
    BufferMachine,
    BumpMachine,
    PoolMachine,
    Program,
    SlabMachine,
    Step,
    load,
    operations,
    programs,
    steps_path,
)
from arenapy.testing import __main__ as command
from arenapy.testing.attack import attack
from arenapy.testing.crashes import crashes, smaller
from arenapy.testing.faults import Finding
from arenapy.testing.search import report
from arenapy.testing.tally import Tally

HERE = Path(__file__).parent
A_START = Step("start", {"config": {}})


def reproduce(path, folder):
    """Do the steps of a file again, as somebody would from another directory."""
    return subprocess.run(
        [sys.executable, "-m", "arenapy.testing", "reproduce", str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env={**os.environ, "ARENAPY_STEPS": str(folder / "again.jsonl")},
    )


def as_file(path, machine, *steps):
    first = {"arenapy.testing": 1, **machine.recipe()}
    path.write_text("\n".join([json.dumps(first), *Program(steps).lines()]) + "\n")
    return path


@pytest.mark.parametrize("machine", [BumpMachine, SlabMachine, PoolMachine, BufferMachine, BumpToy])
@pytest.mark.sampled
def test_programs_are_drawn_printed_parsed_and_run(machine):
    seen = set()

    @settings(max_examples=25)
    @given(programs(machine))
    def test(program):
        assert Program.parse(program.lines()) == program
        assert program.steps[0].name == "start"
        assert str(program).count("\n") == len(program) - 1
        assert 1 <= program.run(machine) <= len(program)
        seen.update(step.name for step in program)

    test()
    assert len(seen) > 5
    assert seen <= set(operations(machine))


@pytest.mark.full
def test_a_fuzzer_may_bring_its_own_bytes():
    machine, found = planted("overlap by one byte"), 0

    @given(programs(machine))
    def test(program):
        program.run(machine)

    for number in range(200):
        try:
            test.hypothesis.fuzz_one_input(bytes([number * 7 % 256, number]) * 400)
        except AssertionError:
            found += 1
    assert found


def test_rules_that_are_switched_off_are_in_no_program():
    assert {"push_mark", "allocate_zeroed", "refill"} <= set(operations(BumpToy))
    assert not {"free_block", "free_twice", "race"} & set(operations(BumpToy))
    assert {"race", "other_thread", "free_every"} <= set(operations(SlotsToy))
    assert "push_mark" not in operations(HeapToy)


def test_a_step_that_cannot_be_done_is_left_out():
    steps = [
        Step("reset_to_mark", {"which": 3}),
        Step("start", {"config": {"nbytes": 4096}}),
        Step("start", {"config": {"nbytes": 64}}),
        Step("overwrite", {"which": 2, "fill": 7}),
        Step("allocate_block", {"nbytes": 10, "align": None}),
        Step("overwrite", {"which": 2, "fill": 7}),
    ]
    assert Program(tuple(steps)).run(BumpToy) == 3


def test_a_step_that_there_is_not_is_an_error():
    for name in ("no_such_thing", "look"):
        with pytest.raises(ValueError, match=name):
            Program((Step(name, {}),)).run(BumpToy)


@pytest.mark.full
def test_what_cannot_be_written_down_is_refused_by_name():
    with pytest.raises(TypeError, match=r"odd\(what=b'bytes'\)"):
        run_state_machine_as_test(Wrong, settings=settings(max_examples=20, database=None))


def test_the_file_has_every_step_before_it_runs():
    program = Program((A_START, Step("allocate_block", {"nbytes": 3, "align": None})))
    program.run(Crashing)
    if "ARENAPY_STEPS" not in os.environ:
        assert str(os.getpid()) in steps_path()
    machine, again = load(steps_path())
    assert again == program
    assert machine is Crashing


def test_a_file_with_the_number_of_the_steps_is_not_written_to(run_script, tmp_path):
    """As when what is attacked makes a daemon of itself."""
    (tmp_path / "precious").write_text("precious")
    run_script("""
import os
from arenapy.testing import BumpMachine, Program, Step, load, steps_path
program = Program((Step("start", {"config": {"nbytes": 4096, "max_bytes": None}}),))
program.run(BumpMachine)
os.closerange(3, 100)
files = [os.open("precious", os.O_RDWR) for _ in range(20)]
program.run(BumpMachine)
assert load(steps_path())[1].steps[0] == program.steps[0]
""")
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.long
@pytest.mark.no_sanitizer  # which has its own way to end
def test_a_segfault_leaves_a_file_that_crashes_again(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"],
        cwd=_test_file(tmp_path),
        env={**os.environ, "ARENAPY_STEPS": str(tmp_path / "steps.jsonl")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode < 0, done.stdout
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    again = reproduce(tmp_path / "steps.jsonl", elsewhere)
    assert again.returncode == done.returncode
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert again.stdout.splitlines() == [str(Step.parse(line)) for line in lines[1:]]
    assert "Segmentation fault" in again.stderr
    fewer = smaller(lines)
    assert len(fewer) <= 3 and crashes(fewer)


def _test_file(folder):
    tests = folder / "tests"
    tests.mkdir()
    text = (HERE / "crashing.py").read_text() + "\n\nTestCrashing = Crashing.TestCase\n"
    (tests / "test_it.py").write_text(text)
    return tests


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.full
def test_a_child_of_multiprocessing_that_ends_removes_its_file(method, tmp_path):
    (tmp_path / "program.py").write_text(
        "import multiprocessing, sys, arenapy.testing as t\n"
        "step = t.Step('start', {'config': {'nbytes': 4096, 'max_bytes': None}})\n"
        "def work(): print(t.Program((step,)).run(t.BumpMachine), flush=True)\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context(sys.argv[1]).Process(target=work)\n"
        "    child.start(), child.join()\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "ARENAPY_STEPS"}
    with tempfile.TemporaryDirectory() as folder:  # a name that the socket of forkserver can have
        done = subprocess.run(
            [sys.executable, "program.py", method], cwd=tmp_path, capture_output=True, text=True,
            check=True, env={**environment, "TMPDIR": folder},
        )  # fmt: skip
        assert done.stdout == "1\n", done.stderr
        assert [path for path in Path(folder).iterdir() if path.suffix == ".jsonl"] == []


@pytest.mark.full
def test_a_file_of_a_failure_fails_again(tmp_path):
    machine = BumpToy
    path = as_file(
        tmp_path / "steps",
        machine,
        Step("start", {"config": {"nbytes": 64}}),
        Step("allocate_block", {"nbytes": 10, "align": 1}),
    )
    done = reproduce(path, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("no fault found in 2 of 2 steps\n")


@pytest.mark.parametrize("machine", [Inner.Nested, TwoAtAPool])
@pytest.mark.sampled
@pytest.mark.full
def test_machines_are_found_where_they_are(machine, tmp_path):
    config = {"max_bytes": None, "rounding": "step", "fail_after": None}
    steps = [Step("start", {"config": config}), Step("allocate_block", {"nbytes": 1, "align": 1})]
    path = as_file(tmp_path / "steps", machine, *steps)
    done = reproduce(path, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["a_package", "a_package.part", "a_package.part.machines"])
@pytest.mark.full
def test_a_machine_of_a_package_is_found_by_its_file(module, tmp_path):
    """Also in an __init__.py, where the package is on no path."""
    path = tmp_path / "src" / module.replace(".", "/")
    file = path.with_suffix(".py") if module.endswith("machines") else path / "__init__.py"
    file.parent.mkdir(parents=True)
    depth = module.count(".") + (file.stem == "__init__")
    (tmp_path / "src/a_package/sizes.py").write_text("LARGEST = 7\n")
    file.write_text(
        f"from {'.' * depth}sizes import LARGEST\n"
        "from arenapy.testing import BumpMachine\n"
        "class Mine(BumpMachine):\n    bound = LARGEST\n"
    )
    first = {"arenapy.testing": 1, **BumpMachine.recipe()}
    first |= {"machine": f"{module}:Mine", "file": str(file)}
    step = Step("start", {"config": {"nbytes": 4096, "max_bytes": None}})
    again = tmp_path / "steps"
    again.write_text("\n".join([json.dumps(first), *Program((step,)).lines()]) + "\n")
    done = reproduce(again, tmp_path)
    assert done.returncode == 0, done.stderr


class Loaded(Exception):
    """A process becomes another one."""


@pytest.mark.parametrize("runtime", [True, False])
@pytest.mark.parametrize("recipe", [
    {"machine": "counting:Mine"},
    {"machine": "arenapy.testing.attack:machine_for", "arguments": {"target": "counting:make"}},
], ids=["machine", "allocator"])  # fmt: skip
def test_modules_that_count_edges_get_their_runtime(recipe, runtime, tmp_path, monkeypatch, capsys):
    """`guided` prints the command, and found the program with that runtime loaded."""
    library = tmp_path / "asan_with_fuzzer.so"
    file = tmp_path / "atheris" / "__init__.py"
    file.parent.mkdir()
    file.write_text("")
    if runtime:
        library.write_text("")
    (tmp_path / "counting.py").write_text(
        "raise ImportError('core.so: undefined symbol: __sancov_lowest_stack')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("LD_PRELOAD", raising=False)

    def execve(program, line, environment):
        raise Loaded(environment["LD_PRELOAD"])

    monkeypatch.setattr("os.execve", execve)
    first = {"arenapy.testing": 1, "file": str(tmp_path / "counting.py"), **recipe}
    again = tmp_path / "steps"
    again.write_text("\n".join([json.dumps(first), *Program((A_START,)).lines()]) + "\n")
    with pytest.raises(Loaded if runtime else SystemExit, match=str(library) if runtime else "2"):
        command.main(["reproduce", str(again)])
    if not runtime:
        said = capsys.readouterr().err
        assert "__sancov_lowest_stack" in said and "pip install atheris" in said
    monkeypatch.setenv("LD_PRELOAD", str(library))
    with pytest.raises(SystemExit if "arguments" in recipe else ImportError):
        command.main(["reproduce", str(again)])


@pytest.mark.full
def test_a_machine_made_in_a_function_says_so(tmp_path):
    class Local(BumpToy):
        pass

    done = reproduce(as_file(tmp_path / "steps", Local, A_START), tmp_path)
    assert done.returncode == 2
    assert "made within a function" in done.stderr


@pytest.mark.parametrize(
    "text", ["", "nonsense", "{}", '{"arenapy.testing": 9}', "[1]", "[" * 5000], ids=len
)
def test_other_files_are_refused(text, tmp_path):
    path = tmp_path / "other"
    path.write_text(text)
    with pytest.raises(ValueError, match="other is not a file of steps"):
        load(path)


def test_a_file_of_bytes_is_refused(tmp_path):
    path = tmp_path / "other"
    path.write_bytes(b"\x80" * 10)
    with pytest.raises(ValueError, match="other is not a file of steps"):
        load(path)


def test_a_step_that_was_cut_off_is_left_out(tmp_path):
    path = tmp_path / "steps"
    whole = as_file(path, BumpMachine, A_START).read_text()
    for end in ('{"step": "allocate_bl', ""):
        path.write_text(whole + end)
        assert load(path) == (BumpMachine, Program((A_START,)))
    path.write_text(whole.removesuffix("\n"))  # by an editor
    assert load(path) == (BumpMachine, Program((A_START,)))


@pytest.mark.parametrize("line", ['{"a": 1}', "[]", "nonsense", 1, None])
def test_a_line_that_is_no_step(line):
    with pytest.raises(ValueError, match="is not a line of a step"):
        Program.parse([line])


@pytest.mark.long
def test_a_leak_is_found_at_the_end_of_a_program():
    machine = planted("loses the last extent")
    program = attack(machine, start=1).failing
    steps = tuple(step for step in program if step.name != "refill")
    with pytest.raises(AssertionError, match="emptied"):
        Program(steps).run(machine)
    try:
        raise KeyError
    except KeyError:  # while something else is handled, too
        with pytest.raises(AssertionError, match="emptied"):
            Program(steps).run(machine)


@pytest.mark.long
def test_the_smallest_program_is_small():
    """Two blocks are all that most of these bugs take."""
    for bug in ("overlap by one byte", "alignment ignored", "wraps at the end"):
        found = attack(planted(bug), start=3)
        assert len(found.failing) <= 4, str(found.failing)
        assert found.steps > len(found.failing)


@pytest.mark.full
@pytest.mark.parametrize("profile", ["full", "quick", "long", "fuzz"])
@pytest.mark.sampled
def test_a_failure_prints_how_to_see_it_again(profile, tmp_path):
    text = (
        "from toys import planted\n\nclass It(planted('overlap by one byte')):\n    pass\n\n"
        "TestIt = It.TestCase\n"
    )
    (tmp_path / "test_it.py").write_text(text)
    (tmp_path / "conftest.py").write_text((HERE.parent / "conftest.py").read_text())
    folders = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"],
        cwd=tmp_path,
        env={**os.environ, "HYPOTHESIS_PROFILE": profile, "PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1, done.stdout
    assert "overlap: [0x" in done.stdout and "start(config=" in done.stdout
    file = re.search(r"testing reproduce (\S+)", done.stdout)[1]
    with pytest.raises(AssertionError, match="overlaps block"):
        machine, program = load(file)
        program.run(machine)


def test_each_class_and_user_has_a_file_of_what_was_found(tmp_path, monkeypatch):
    """And where none can be written, the fault is told all the same."""

    def told(machine, *steps):
        tally = Tally()
        tally.findings["overlap"] = Finding("overlap", "two blocks", list(Program(steps).lines()))
        return report(tally, machine)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for steps in [A_START], [A_START, A_START]:
        file = re.search(r"testing reproduce (\S+)", told(BumpMachine, *steps))[1]
        assert len(load(file)[1].steps) == len(steps)
    assert len(list(tmp_path.iterdir())) == 1
    told(type("BumpMachine", (BumpMachine,), {"__module__": "another"}), A_START)
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    told(BumpMachine, A_START)
    assert len(list(tmp_path.iterdir())) == 3
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    message = told(BumpMachine, A_START)
    assert "two blocks" in message and "no file to reproduce it: " in message


GOOD = {"arenapy.testing": 1, "machine": "arenapy.testing:BumpMachine"}


@pytest.mark.parametrize(
    ("recipe", "step"),
    [
        ({"machine": None}, None),
        ({"machine": 5}, None),
        ({"machine": "os:path"}, None),
        ({"machine": "..a:b"}, None),
        ({"arguments": 5}, None),
        ({"arguments": {"x": 1}}, None),
        ({"allow": 5}, None),
        ({"allow": [5]}, None),
        ({"file": 5}, None),
        ({}, {"step": "start", "arguments": []}),
        ({}, {"step": 5, "arguments": {}}),
        ({}, {"step": "start"}),
        ({}, []),
    ],
)
def test_a_damaged_file_of_steps(tmp_path, recipe, step):
    path = tmp_path / "steps.jsonl"
    lines = [GOOD | recipe, *([] if step is None else [step])]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    with pytest.raises(ValueError, match=r"steps\.jsonl|package\.module"):
        load(path)
