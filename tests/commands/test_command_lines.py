"""What all command lines have in common: numbers, and text that a terminal can show.

The options are read off the parsers themselves: a new one is in these tests by itself.
"""

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import arenapy
from arenapy import trace
from arenapy.base.text import printable, printable_lines
from arenapy.commands import cli, demo, fuzz, info, testing
from arenapy.commands import command_line as common
from arenapy.commands.advise import command as advise
from arenapy.commands.compare import command as compare
from arenapy.commands.compare.table import Run
from arenapy.commands.compare.table import show as show_comparison
from arenapy.commands.replay import command as replay
from arenapy.testing import Program, Step

TIMEOUT = 120
ROOT = Path(arenapy.__file__).parents[1]
#: Every program with options, and a complete command line for it: `LINES` has what it needs.
LINES = {
    "run": ["x.py"], "compare": ["x.py"], "trace": ["x.trace"], "advise": ["x.trace"],
    "fuzz": ["a:b"], "replay": ["--synthetic", "1"],
}  # fmt: skip
PROGRAMS = {
    name: (importlib.import_module(module).main, LINES.get(name, []))
    for name, (module, _) in cli.COMMANDS.items()
} | {
    "demo --gpu": (demo.main, ["--gpu"]),
    "guided": (testing.main, ["guided", "a:b", "--corpus", "c"]),
}
#: Numbers as nobody should write them.
ODD = [
    "9" * 400, "9" * 5000, "-" + "9" * 400, "1e400", "0." + "9" * 400, "0", "-0", "-1", "+1", "1.5",
    "nan", "-nan", "inf", "-inf", "infinity", "", " ", "1 ", "0x10", "1_0", "1e3", "٣", "²", "४K",
    "1K", "9" * 30 + "T", "1" + "0" * 39, "K", "1KK", "1\n2", "\x1b[2J", "\x9b31m", "\u202e1",
    "5\udcff", str(2**63), str(2**63 - 1), str(2**64), str(-(2**63)),
]  # fmt: skip


class Parsed(BaseException):
    """The command line was accepted."""


@pytest.fixture
def parsers(monkeypatch):
    """Every parser as it is when its program has parsed a command line, which ends there."""
    found = {}
    real = argparse.ArgumentParser.parse_args

    def parse(self, argv=None, namespace=None):
        found["parser"], found["options"] = self, real(self, argv, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)

    def of(name, *words):
        main, line = PROGRAMS[name]
        words = ("--lock", *words) if name == "run" else words  # without options it has no parser
        with pytest.raises(Parsed):
            main([*line, *words] if line[:1] != ["x.py"] else [*words, *line])
        return found["parser"], found["options"]

    return of


def actions_of(parser):
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                if name == "guided":
                    yield from actions_of(inner)
        else:
            yield action


def numbers(parser):
    """The options that take a number, with their types."""
    return [
        (action.option_strings[0], action.type)
        for action in actions_of(parser)
        if getattr(action.type, "__module__", "") == common.__name__
        or action.type is fuzz._alignment
    ]


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_number_has_bounds(parsers, name):
    """No option has a type that takes whatever Python takes."""
    parser, _ = parsers(name)
    assert isinstance(parser, common.Parser) and not parser.allow_abbrev
    for action in actions_of(parser):
        assert action.type not in (int, float, complex), action
        if action.type is not None and action.option_strings:
            known = action.type.__module__ in (
                common.__name__, replay.__name__, compare.__name__, fuzz.__name__, advise.__name__
            )  # fmt: skip
            assert known, action


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_as_nobody_writes_them(parsers, name, capsys):
    parser, _ = parsers(name)
    main, line = PROGRAMS[name]
    for option, kind in numbers(parser):
        taken = 0
        for text in ODD:
            try:
                main([f"{option}={text}", *line] if line[:1] == ["x.py"] else
                     [*line, f"{option}={text}"])  # fmt: skip
            except Parsed:
                taken += 1
                value = kind(text)
                assert -(2**63) < value < 2**63 and text.isascii()
            except SystemExit as ended:
                assert ended.code == 2
                error = capsys.readouterr().err
                assert all(part.isprintable() for part in error.split("\n"))
                assert len(error.splitlines()[-1]) < 250
        assert 0 < taken < len(ODD) / 2, option


@given(st.text(max_size=30) | st.from_regex(r"[0-9.]{1,45} ?[KMGTkb]?(i?B)?", fullmatch=True))
@example("٣")
@pytest.mark.full
def test_a_size_is_what_it_says_or_refused(text):
    try:
        found = common.size(text)
    except argparse.ArgumentTypeError:
        return
    assert 0 < found < 2**63
    number = text.strip().rstrip("iIbB").rstrip()
    unit = 1
    if number[-1] in "kmgtKMGT":
        unit = 1 << 10 * "KMGT".index(number[-1].upper()) + 10
        number = number[:-1].rstrip()
    whole, _, part = number.partition(".")
    assert found == int(whole) * unit + int(part or 0) * unit // 10 ** len(part)


@given(st.text() | st.integers().map(str), st.integers(), st.integers(0, 10))
def test_a_whole_number_lies_within_its_bounds(text, least, room):
    try:
        found = common.whole(least, least + room)(text)
    except argparse.ArgumentTypeError:
        with contextlib.suppress(ValueError):  # no number at all
            assert not (text.isascii() and least <= int(text) <= least + room)
        return
    assert least <= found <= least + room and found == int(text)


# ---- text for terminals

HOSTILE = st.text(
    st.characters() | st.sampled_from("\x1b\x9b\x07\x00\n\r\t\u202e\u2028\udcff[]:\\"), max_size=30
)


@given(HOSTILE)
def test_printable_text_is_one_line_that_can_be_shown_and_told_apart(text):
    shown = printable(text)
    assert shown.isprintable() and shown.encode().decode() == shown
    if text.isprintable():
        assert shown == text
    lines = printable_lines(text).split("\n")
    assert all(line.isprintable() for line in lines)
    assert len(lines) == text.count("\n") + 1


NASTY = "a\x1b[2J\x9b31m\x07\n\r\u202eb\udcff[red]:smile:{x}%s"  # a name of a file, too


def clean(text):
    """Whether it is lines that can be shown."""
    return all(line.isprintable() for line in text.replace("\t", " ").split("\n"))


@pytest.fixture
def nasty(tmp_path, monkeypatch):
    """A folder with traces whose every name is hostile, below names that are."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / NASTY
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "200")
    name = NASTY + ".trace"
    events = np.zeros(4, trace.EVENT)
    events["operation"], events["nbytes"], events["site"] = 1, 5, [1, 2, 3, 0]
    events["address"], events["thread"] = [64, 128, 192, 256], 1
    sites = [(trace.Frame(f"x{n}y.py", 3, f"f{n}g"),) for n in range(3)]
    trace.Trace(events, "x0y", sites=((), *sites)).save(name)
    data = Path(name).read_bytes()
    for n, char in enumerate([b"\x1b", b"\x9b", b"\x07"]):
        data = data.replace(b"x%dy" % n, b"x" + char + b"y").replace(b"f%dg" % n, b"\x1b]0")
    Path(name).write_bytes(data)
    return name


def test_what_a_trace_says_is_printable_and_told_apart(nasty):
    found = trace.load(nasty)
    texts = [found.kind, *(text for site in found.sites for one in site for text in one[::2])]
    assert all(text.isprintable() for text in texts)
    assert "x\\x1by" in found.kind
    assert len(set(found.sites)) == 4


@pytest.mark.full
def test_no_command_prints_what_a_terminal_obeys(nasty, capsys, monkeypatch):
    """In-process: every command that reads a trace, on a terminal or not."""
    for line in (
        ["trace", nasty], ["trace", nasty, "--by", "size"], ["trace", nasty + NASTY],
        ["trace", nasty, "--html", nasty], ["trace", nasty, "--html", NASTY + "/x"],
        ["replay", nasty, "--with", "loop"], ["replay", nasty + NASTY], ["replay", "--with", NASTY],
        ["run", "--json", nasty, "x.py"], ["run", "--trace", NASTY + "/x", "x.py"],
        ["compare", "--json", nasty, "x.py"], ["compare", "--with", NASTY, "x.py"],
        ["advise", nasty + NASTY], ["advise", nasty, "--with", NASTY],
        ["advise", nasty, "--json", nasty],
        ["demo", "--json", nasty], ["demo", "--plot", nasty + "x"], ["fuzz", NASTY],
        ["fuzz", "a:b", "--save", nasty], [NASTY], ["--" + NASTY], ["info", NASTY],
        ["demo", "--" + NASTY], ["run", "--max-bytes", NASTY, "x.py"],
    ):  # fmt: skip
        try:
            status = cli.main(line)
        except SystemExit as ended:
            status = ended.code
        out, err = capsys.readouterr()
        assert clean(out) and clean(err), (line, out, err)
        assert out or err
        assert (status == 0) == (line[0] in ("trace", "replay") and not err), (line, err)
    for argv in ["reproduce", NASTY], ["reproduce", nasty], ["guided", NASTY, "--corpus", NASTY]:
        try:
            testing.main(argv)
        except SystemExit as ended:
            assert ended.code == 2
        out, err = capsys.readouterr()
        assert clean(out) and clean(err), (argv, out, err)


def test_text_is_shown_as_it_is(nasty, capsys):
    """Brackets are no markup, and colons no pictures."""
    assert cli.main(["trace", nasty]) == 0
    os.rename(nasty, "[red]:smile:[bold].trace")
    with pytest.raises(SystemExit):
        cli.main(["trace", "[red]:smile:[bold].trace", "--html", "[red]:smile:[bold].trace"])
    assert "[red]:smile:[bold].trace" in capsys.readouterr().err


def test_what_a_program_says_is_printable(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    say = f"print({NASTY!r}.encode(errors='surrogatepass')); raise ValueError({NASTY!r})"
    (tmp_path / "x.py").write_text(f"import sys; sys.stderr.reconfigure(errors='replace'); {say}")
    assert compare.main(["-n", "1", "x.py"]) == 1
    out, err = capsys.readouterr()
    assert clean(out) and clean(err) and "ValueError" in err
    runs = {way: [Run(1.0, 0.0, 1.0, 0.0, 1, 1)] for way in ("plain", "arenapy")}
    show_comparison(common.console(), runs, {"plain": 1}, {"tcmalloc": NASTY}, [NASTY])
    assert clean(capsys.readouterr().out)
    found = {
        "rules": {NASTY: 1}, "states": {NASTY: 2}, "examples": 1, "restarts": 0, "findings": [],
    }  # fmt: skip
    lines = ['{"arenapy.testing": 1}', Step(NASTY, {NASTY: NASTY, "n": 1}).line()]
    for failing in None, lines[1:]:
        one = {"kind": "overlap", "message": NASTY, "program": failing}
        found["findings"] = [one] if failing else []
        monkeypatch.setattr(
            fuzz, "_search", lambda *a, failing=failing: (0, {**found}, lines[0], NASTY)
        )
        assert fuzz.main(["a:b", "--save", "s"]) == bool(failing)
        out, err = capsys.readouterr()
        assert clean(out) and clean(err), (out, err)
    Program.parse(lines[1:])
    monkeypatch.setattr(fuzz, "_search", lambda *a: (7, {}, lines[0], NASTY))
    assert fuzz.main(["a:b"]) == 1
    assert clean(capsys.readouterr().err)


def test_names_of_threads_are_printable_in_the_report(tmp_path):
    (tmp_path / "x.py").write_text(
        "import threading, time\n"
        f"thread = threading.Thread(target=time.sleep, args=(60,), daemon=True, name={NASTY!r})\n"
        "thread.start()\nimport numpy"
    )
    done = subprocess.run(
        [sys.executable, "-m", "arenapy", "run", "--trace", NASTY, "--json", "j", "x.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and clean(done.stderr)
    assert "threads, which the pool does not reach: a\\x1b[2J" in done.stderr
    assert json.loads((tmp_path / "j").read_text())["unreached_threads"] == [NASTY]


def test_facts_of_the_machine_are_printable(capsys, monkeypatch):
    fact = info.Fact(NASTY, NASTY, NASTY, NASTY, NASTY)
    monkeypatch.setattr(info, "facts", lambda: [fact])
    assert info.main([]) == 0
    assert clean(capsys.readouterr().out)


def test_errors_of_the_package_are_printable(capsys, monkeypatch):
    def fail(argv):
        raise arenapy.OutOfMemory(NASTY)

    monkeypatch.setattr(info, "main", fail)
    assert cli.main(["info"]) == 1
    assert clean(capsys.readouterr().err)


FAILING = """
import ctypes

class Overlapping:
    def __init__(self):
        self.memory = ctypes.create_string_buffer(1 << 16)

    def alloc(self, nbytes):
        return ctypes.addressof(self.memory)

    def free(self, block):
        pass
"""


@pytest.mark.parametrize(
    "line",
    [
        "compare -n 1 --json", "trace w.trace --html", "advise w.trace --seconds 1 --json",
        "fuzz failing:Overlapping --max-align 1 --examples 20 --seed 1 --shrink 1 --save",
        "run --json",
    ],
)  # fmt: skip
@pytest.mark.parametrize("gone", ["reader", "full"])
@pytest.mark.sampled(full=3)
def test_files_are_written_before_what_nobody_reads(tmp_path, line, gone):
    (tmp_path / "failing.py").write_text(FAILING)
    (tmp_path / "w.py").write_text("import numpy")
    pool = arenapy.Pool()
    with trace.record(pool, tmp_path / "w.trace"):
        pool.alloc(100).release()
    if gone == "reader":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open("/dev/full", os.O_WRONLY)
    words = [*line.split(), "written", *(["w.py"] if line.startswith(("compare", "run")) else [])]
    streams = {"stderr" if words[0] == "run" else "stdout": writer}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    try:
        subprocess.run(
            [sys.executable, "-m", "arenapy", *words], cwd=tmp_path, env=environment,
            timeout=TIMEOUT, check=False, **streams,
        )  # fmt: skip
    finally:
        os.close(writer)
    assert (tmp_path / "written").stat().st_size
