"""``%load_ext arenapy`` and ``%%arenapy``: a cell's arrays are in a pool, and are reported."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

import arenapy


class Shell:
    """As much of IPython's as the magic needs."""

    def __init__(self):
        self.names = {"np": np}
        self.events, self.at_end = self, []
        self.magics = {}
        self.displayhook = SimpleNamespace()
        self.reports = []
        self.display_formatter = SimpleNamespace(format=lambda shown: ({"": shown}, {}))
        self.display_pub = SimpleNamespace(publish=lambda data, _: self.reports.append(data[""]))

    def register_magic_function(self, function, magic_kind, magic_name):
        self.magics[magic_kind, magic_name] = function

    def register(self, event, function):
        assert event == "post_run_cell"
        self.at_end.append(function)

    def unregister(self, event, function):
        self.at_end.remove(function)

    def showtraceback(self, exc_tuple=None):
        self.names["shown twice"] = True

    def end_cell(self):
        for function in self.at_end[:]:
            function(None)

    def run_cell(self, cell):
        found = SimpleNamespace(error_before_exec=None, error_in_exec=None)
        try:
            exec(cell, self.names)
        except BaseException as error:  # IPython shows it
            self.names["shown"] = found.error_in_exec = error
        return found


@pytest.fixture
def magic():
    """The shell, and a function that runs a cell and gives the report."""
    shell = Shell()
    arenapy.load_ipython_extension(shell)

    def run(line, cell):
        assert shell.magics["cell", "arenapy"](line, cell) is None
        return shell.reports[-1]

    return shell, run


def test_a_cell_has_its_arrays_in_a_pool(magic):
    shell, run = magic
    report = run("", "x = np.empty(1 << 18)\nfor _ in range(9): y = np.empty(9)")
    assert arenapy.handles(shell.names["x"]) is not None
    rows = dict(report.rows)
    assert list(rows) == ["time", "page faults", "served", "peak", "prefault"]
    assert re.fullmatch(r"10 blocks, [78] of them from memory that the pool had", rows["served"])
    # Beside other threads, as pytest-xdist has one, pages come as they are touched.
    assert re.match(r"([4-9] MiB|0 bytes) in 0\.\d+ s", rows["prefault"])
    assert arenapy.handles(np.empty(1 << 18)) is None


def test_a_cell_that_runs_again_finds_the_memory(magic):
    _, run = magic
    run("", "x = np.empty(1 << 18); del x")
    again = dict(run("", "x = np.empty(1 << 18); del x").rows)
    assert again["prefault"].startswith("0 bytes")
    assert again["served"] == "1 block, 1 of them from memory that the pool had"


def test_a_cell_in_a_cell_has_its_own_peak(magic):
    shell, run = magic
    shell.names["run"] = run
    peak = dict(run("", "x = np.empty(1 << 22); del x; run('', 'np.empty(9)')").rows)["peak"]
    assert peak == "32 MiB"


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_cell_that_fails_is_reported_and_fails(magic, error):
    shell, run = magic
    with pytest.raises(error) as raised:
        run("", f"x = np.empty(9)\nraise {error.__name__}")
    assert raised.value is shell.names["shown"]
    shell.showtraceback((error, raised.value, None))
    assert "shown twice" not in shell.names
    shell.end_cell()
    shell.showtraceback((error, raised.value, None))
    assert "shown twice" in shell.names and not shell.at_end
    assert dict(shell.reports[-1].rows)["served"].startswith("1 block,")
    assert arenapy.handles(np.empty(9)) is None


def test_what_somebody_else_has_set_of_the_shell_stays(magic):
    """As rich.traceback.install() does."""
    shell, run = magic
    shell.showtraceback = show = lambda exc_tuple=None: None
    shell.displayhook.quiet = quiet = lambda: True
    shell.displayhook.semicolon_at_end_of_expression = lambda cell: False
    with pytest.raises(ZeroDivisionError):
        run("", "1 / 0")
    shell.end_cell()
    assert shell.showtraceback is show and shell.displayhook.quiet is quiet


def test_the_report_is_a_table_and_lines(magic):
    report = magic[1]("", "")
    assert repr(report).startswith("%%arenapy\n  time         0.0")
    assert report._repr_html_().startswith("<table><tr><th>%%arenapy")


def test_options_are_refused_and_nothing_is_run(magic):
    shell, run = magic
    with pytest.raises(ValueError, match=r"takes no options, and got '-x'"):
        run(" -x", "ran = 1")
    assert "ran" not in shell.names


def test_the_real_ipython(capsys):
    shells = pytest.importorskip("IPython.core.interactiveshell")
    shell = shells.InteractiveShell()
    shell.run_line_magic("load_ext", "arenapy")
    assert shell.run_cell("%%arenapy\nimport numpy as np\nx = np.empty(1 << 18)").success
    output = capsys.readouterr().out
    assert "served       1 block, 0 of them from memory that the pool had" in output
    assert arenapy.handles(shell.user_ns["x"]) is not None
    assert not shell.run_cell("%%arenapy\n1 / 0").success
    assert capsys.readouterr().out.count("division by zero") == 1
    magic = "get_ipython().run_cell_magic('arenapy', '', '1 / 0')"
    shell.run_cell(f"try: {magic}\nexcept ZeroDivisionError as error: saved = error")
    assert capsys.readouterr().out.count("division by zero") == 1
    shell.run_cell("raise saved")
    assert capsys.readouterr().out.count("division by zero") == 1
    assert not shell.run_cell("%%arenapy\ndef f(:").success
    assert capsys.readouterr().out.count("SyntaxError") == 1
    with pytest.warns(UserWarning, match="To exit"):
        assert not shell.run_cell("%%arenapy\nimport sys; sys.exit(3)").success
    assert capsys.readouterr().out.count("SystemExit") == 1
    for cell, shown in ("1234", True), ("1234;", False):
        shell.run_cell(f"%%arenapy\n{cell}", store_history=True)
        assert ("1234" in capsys.readouterr().out) is shown
