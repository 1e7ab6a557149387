"""The ``arenapy`` command: finding subcommands, and ending as a Unix command should."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

import arenapy
from arenapy import trace
from arenapy.commands import cli

COMMAND = [sys.executable, "-m", "arenapy"]
QUIET = {name: value for name, value in os.environ.items()
         if name not in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS")}  # fmt: skip
TIMEOUT = 120
A_LONG_TIME = ["demo", "--rounds", "1000"]


def run(*arguments):
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, env=QUIET, timeout=TIMEOUT
    )


@pytest.fixture
def command(monkeypatch):
    """Make a function the subcommand ``probe``."""

    def install(function):
        module = types.ModuleType("arenapy_test_probe")
        module.main = function
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(cli.COMMANDS, "probe", (module.__name__, "a probe"))

    return install


def test_version():
    done = run("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"arenapy {arenapy.__version__}\n"


@pytest.mark.parametrize("words", [["-m", "package"], ["-mpackage", "-m"], ["-B", "-mpackage.sub"]])
def test_a_package_that_imports_arenapy_keeps_its_folder(tmp_path, words):
    """`python -m package` imports the package first, with the arguments that a command has."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("import arenapy\n")
    for name in "__main__", "sub":
        (tmp_path / "package" / f"{name}.py").write_text("import beside; print(beside.X)\n")
    (tmp_path / "beside.py").write_text("X = 7\n")
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "7\n", "")


@pytest.mark.parametrize("words", [["-m", "arenapy"], ["-marenapy"]])
def test_a_folder_with_modules_named_like_pythons(tmp_path, words):
    for name in "json", "numpy":
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of the folder')\n")
    done = subprocess.run(
        [sys.executable, *words, "info"],
        cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_info_says_something_without_control_codes():
    done = run("info")
    assert (done.returncode, done.stderr) == (0, "")
    assert "huge" in done.stdout.lower()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", done.stdout)


@pytest.mark.full
def test_help_names_every_command():
    done = run("--help")
    assert done.returncode == 0
    for name, (_, summary) in cli.COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(summary)}$", done.stdout, re.MULTILINE)
        assert run(name, "--help").stdout.startswith(f"usage: arenapy {name}")


@pytest.mark.parametrize("words", [[], ["--"]])
@pytest.mark.sampled
def test_no_command_prints_the_help_and_fails(words):
    done = run(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == run("--help").stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["nope"], "'nope'"), (["--nope"], "--nope"), (["demo", "--nope"], "--nope")],
)
@pytest.mark.sampled
def test_wrong_arguments_are_named(arguments, named):
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert named in done.stderr.splitlines()[-1]


def test_subcommands_are_imported_when_asked_for():
    program = (
        "import sys, arenapy.commands.cli; "
        "heavy = {'rich', 'matplotlib', 'arenapy.commands.demo', 'arenapy.commands.info'}\n"
        "print(*heavy & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT, check=True
    )
    assert done.stdout == "\n"


def test_arguments_and_status_pass_through(command):
    seen = []
    command(lambda argv: seen.append(argv) or 7)
    assert cli.main(["probe", "--option", "-x", "--", "--version"]) == 7
    assert seen == [["--option", "-x", "--", "--version"]]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError("too much"), "too much"),
        (MemoryError(), "MemoryError"),
        (OSError("no such thing"), "no such thing"),
    ],
)
def test_failures_are_one_line(command, capsys, error, says):
    def fail(argv):
        raise error

    command(fail)
    assert cli.main(["probe"]) == 1
    assert capsys.readouterr() == ("", f"arenapy: {says}\n")


def test_a_bug_is_not_hidden(command):
    command(lambda argv: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["probe"])


def test_a_caller_in_python_keeps_its_signal_handlers(command):
    command(lambda argv: 0)
    before = signal.getsignal(signal.SIGPIPE)
    assert cli.main(["probe"]) == 0
    assert signal.getsignal(signal.SIGPIPE) is before


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["run", "--quiet", "--advise"], 3, "ignored: True"),
        (["compare", "-n", "1"], 1, "the program failed (plain): status 3"),
    ],
)
def test_an_inherited_sigchld_that_is_ignored(tmp_path, words, status, says):
    """As of a shell's ``trap '' CHLD``: the kernel would keep no child's status."""
    program = tmp_path / "work.py"
    program.write_text(
        "import signal\n"
        "print('ignored:', signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN)\n"
        "raise SystemExit(3)\n"
    )
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        process = subprocess.Popen(
            [*COMMAND, *words, program], text=True, env=QUIET,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGCHLD, before)
    output, _ = process.communicate(timeout=TIMEOUT)
    assert says in output and process.returncode == status


def test_interrupt_is_quiet_and_130(command, capsys):
    def interrupted(argv):
        raise KeyboardInterrupt

    command(interrupted)
    assert cli.main(["probe"]) == 130
    assert capsys.readouterr() == ("", "")


def test_ctrl_c_ends_a_running_demo():
    program = (  # Python ignores SIGINT where its parent did, as for a background job of a shell
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from arenapy.commands.cli import main; sys.exit(main())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, *A_LONG_TIME],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=QUIET,
    ) as process:  # fmt: skip
        process.stdout.readline()  # the introduction: it is running
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, errors) == (130, "")


def test_signals_act_as_ever_until_all_is_imported(tmp_path):
    """An import may lose the exception of a signal handler, as NumPy's does."""
    (tmp_path / "probe.py").write_text(
        "from signal import *\n"
        "found = [getsignal(number) for number in (SIGTERM, SIGHUP)]\n"
        "def main(argv):\n"
        "    found.extend(getsignal(number) for number in (SIGTERM, SIGHUP))\n"
        "    return [one == SIG_DFL for one in found] != [True, True, False, False]\n"
    )
    program = (
        "import sys; from arenapy.commands import cli\n"
        "cli.COMMANDS['probe'] = 'probe', 'a probe'; sys.exit(cli.main())"
    )
    subprocess.run([sys.executable, "-c", program, "probe"], cwd=tmp_path, check=True, env=QUIET)


@pytest.mark.parametrize("first", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("second", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.full
def test_a_second_signal_leaves_no_file_either(tmp_path, first, second):
    """Here it strikes as the folder is about to be removed."""
    (tmp_path / "probe.py").write_text(
        "import signal, tempfile\n"
        "class Folder(tempfile.TemporaryDirectory):\n"
        "    def cleanup(self):\n"
        f"        signal.raise_signal(signal.{second})\n"
        "        super().cleanup()\n"
        "def main(argv):\n"
        "    with Folder():\n"
        f"        signal.raise_signal(signal.{first})\n"
    )
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from arenapy.commands import cli\n"
        "cli.COMMANDS['probe'] = 'probe', 'a probe'; sys.exit(cli.main())"
    )
    (tmp_path / "temporary").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", program, "probe"], cwd=tmp_path, capture_output=True, text=True,
        env={**QUIET, "TMPDIR": str(tmp_path / "temporary")}, timeout=TIMEOUT,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (128 + signal.Signals[first], "")
    assert not list((tmp_path / "temporary").iterdir())


#: Command lines that last, and a word of the child process that they have then.
WITH_CHILD = {
    "compare": (["compare", "work.py"], "work.py"),
    "fuzz": (["fuzz", "--library", "libc.so.6", "--seconds", "100"], "arenapy.testing.attack"),
    "replay": (["replay", "work.trace"], "arenapy.commands.replay.worker"),
    "advise": (["advise", "work.trace"], "arenapy.commands.replay.worker"),
    "run": (["run", "--advise", "--quiet", "work.py"], "arenapy.commands.replay.worker"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("name", WITH_CHILD)
def test_a_signal_leaves_no_process_and_no_file(tmp_path, name, number):
    """As `kill` sends it to the command alone, or to all when a terminal is closed."""
    arenapy.trace.synthetic(0, 100_000).save(tmp_path / "work.trace")
    source = "import numpy as np\nfor n in range(20_000):\n    np.ones(1000 + n)\n"
    (tmp_path / "work.py").write_text(source)
    folder = tmp_path / "temporary"
    folder.mkdir()
    words, child = WITH_CHILD[name]
    with subprocess.Popen(
        [*COMMAND, *words], cwd=tmp_path, env={**QUIET, "TMPDIR": str(folder)},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        end = time.monotonic() + TIMEOUT
        while not any(child in line for line in others(process.pid, folder)):
            assert process.poll() is None and time.monotonic() < end, process.stderr.read()
            time.sleep(0.05)
        process.send_signal(number)
        _, errors = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, errors) == (128 + number, "")
    assert not others(process.pid, folder) and not list(folder.iterdir())


def others(leader, folder):
    """The command lines of the processes with a temporary folder, but that of their leader."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            environment = Path("/proc", pid, "environ").read_bytes()
            if int(pid) != leader and b"TMPDIR=%b\0" % os.fsencode(folder) in environment:
                found.append(
                    Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode()
                )
    return found


@pytest.mark.parametrize("arguments", [["info"], A_LONG_TIME])
@pytest.mark.sampled
def test_a_reader_that_goes_away(arguments):
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [*COMMAND, *arguments], stdout=write, stderr=subprocess.PIPE, env=QUIET, timeout=TIMEOUT
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


@pytest.mark.full
def test_a_terminal_without_the_micro_sign(tmp_path):
    pool = arenapy.Pool()
    with trace.record(pool, tmp_path / "w.trace"):
        pool.alloc(100).release()
    done = subprocess.run(
        [*COMMAND, "replay", str(tmp_path / "w.trace"), "--with", "pool"], capture_output=True,
        env={**QUIET, "PYTHONIOENCODING": "ascii"}, timeout=TIMEOUT,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert b" us" in done.stdout or b" ns" in done.stdout


def test_a_command_that_cannot_be_imported_says_why_in_one_line():
    done = subprocess.run(
        [*COMMAND, "fuzz", "arenapy:Pool"], capture_output=True, text=True, timeout=TIMEOUT,
        env={**QUIET, "PYTHONOPTIMIZE": "2"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("arenapy: ") and done.stderr.count("\n") == 1


def test_a_full_disk_is_noticed():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "info"], stdout=full, stderr=subprocess.PIPE, text=True, env=QUIET,
            timeout=TIMEOUT,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("arenapy: [Errno 28]")
    assert done.stderr.count("\n") == 1


def test_a_command_whose_output_is_closed():
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -m arenapy info >&-', sys.executable],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
