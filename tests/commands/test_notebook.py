"""``%load_ext arenapy`` and ``%%arenapy``: a cell's arrays are in a pool, and are reported."""

import re

import numpy as np
import pytest

import arenapy


class Shell:
    """As much of IPython's as the magic needs."""

    def __init__(self):
        self.names = {"np": np}
        self.magics = {}

    def register_magic_function(self, function, magic_kind, magic_name):
        self.magics[magic_kind, magic_name] = function

    def run_cell(self, cell):
        try:
            exec(cell, self.names)
        except Exception as error:  # IPython shows it
            self.names["shown"] = error


@pytest.fixture
def magic():
    shell = Shell()
    arenapy.load_ipython_extension(shell)
    return shell, shell.magics["cell", "arenapy"]


def test_a_cell_has_its_arrays_in_a_pool(magic):
    shell, run = magic
    report = run("", "x = np.empty(1 << 18)\nfor _ in range(9): y = np.empty(9)")
    assert arenapy.handles(shell.names["x"]) is not None
    rows = dict(report.rows)
    assert list(rows) == ["time", "page faults", "served", "peak", "prefault"]
    assert re.fullmatch(r"10 blocks, [78] of them from memory that the pool had", rows["served"])
    assert re.match(r"[4-9] MiB in 0\.\d+ s", rows["prefault"])
    assert arenapy.handles(np.empty(1 << 18)) is None


def test_a_cell_that_runs_again_finds_the_memory(magic):
    _, run = magic
    run("", "x = np.empty(1 << 18); del x")
    again = dict(run("", "x = np.empty(1 << 18); del x").rows)
    assert again["prefault"].startswith("0 bytes")
    assert again["served"] == "1 block, 1 of them from memory that the pool had"


def test_a_cell_that_fails_is_reported(magic):
    shell, run = magic
    report = run("", "x = np.empty(9)\n1 / 0")
    assert isinstance(shell.names["shown"], ZeroDivisionError)
    assert dict(report.rows)["served"].startswith("1 block,")
    assert arenapy.handles(np.empty(9)) is None


def test_the_report_is_a_table_and_lines(magic):
    report = magic[1]("", "")
    assert repr(report).startswith("%%arenapy\n  time         0.0")
    assert report._repr_html_().startswith("<table><tr><th>%%arenapy")


def test_options_are_refused_and_nothing_is_run(magic):
    shell, run = magic
    with pytest.raises(ValueError, match=r"takes no options, and got '-x'"):
        run(" -x", "ran = 1")
    assert "ran" not in shell.names


def test_the_real_ipython():
    shells = pytest.importorskip("IPython.core.interactiveshell")
    shell = shells.InteractiveShell()
    shell.run_line_magic("load_ext", "arenapy")
    report = shell.run_cell_magic("arenapy", "", "import numpy as np\nx = np.empty(1 << 18)")
    assert dict(report.rows)["served"] == "1 block, 0 of them from memory that the pool had"
    assert arenapy.handles(shell.user_ns["x"]) is not None
