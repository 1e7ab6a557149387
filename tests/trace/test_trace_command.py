"""``arenapy trace`` and ``arenapy run --trace``: what is printed, written and refused."""

import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from trace_programs import Torch, many_blocks, record_program

from arenapy import trace
from arenapy.commands.trace import main
from arenapy.trace import page as trace_page
from arenapy.trace.holders import place

TIMEOUT = 120


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return record_program(tmp_path_factory.mktemp("program"))


def run(*arguments, cwd=None):
    command = [sys.executable, "-m", "arenapy", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT)


def said(capsys):
    return " ".join(capsys.readouterr().out.split())


def test_a_program_is_recorded_with_its_sites(recorded, capsys):
    """Of the arrays that are kept: each quarter as large as its own, which the loop made."""
    made = trace.load(recorded)
    assert made.kind == "Pool, NumPy" and made.complete
    functions = {place(site).function for site in made.sites[1:]}
    assert {"load", "smooth", "remember"} <= functions
    assert any(site and site[0].function == "full" for site in made.sites)  # NumPy's own
    stack = next(site for site in made.sites if site and site[0].function == "remember")
    assert [os.path.basename(frame.file) for frame in stack] == ["program.py"] * 2
    assert stack[-1].function == "<module>"
    assert main([str(recorded)]) == 0
    text = said(capsys)
    assert "program.py:13 remember │ 7 │" in text
    assert "not freed. 7 MiB of this is from program.py:13 remember" in text


def test_the_report_names_the_trace(tmp_path):
    (tmp_path / "script.py").write_text("import numpy; x = numpy.ones(10000)")
    done = run("run", "--trace", "a.trace", "--json", "a.json", "script.py", cwd=tmp_path)
    path = str(tmp_path / "a.trace")
    assert f"  trace        {path}, " in done.stderr
    assert json.loads((tmp_path / "a.json").read_text())["trace"] == path
    assert trace.load(path).complete
    assert trace.load(path).sites == ((),)
    done = run("run", "--json", "a.json", "script.py", cwd=tmp_path)
    assert "trace" not in done.stderr
    assert json.loads((tmp_path / "a.json").read_text())["trace"] is None


def test_runs_that_cannot_be_recorded(tmp_path):
    (tmp_path / "script.py").write_text("import numpy; print('ran')")
    done = run("run", "--trace", "no/a.trace", "script.py", cwd=tmp_path)
    assert done.returncode == 2 and "there is no folder" in done.stderr and done.stdout == ""
    assert "Traceback" not in done.stderr
    done = run("run", "--sites", "script.py", cwd=tmp_path)
    assert done.returncode == 2 and "--trace FILE" in done.stderr


def test_a_full_disk_costs_the_trace_and_not_the_program(tmp_path):
    """A limit on the size of files stands for the disk."""
    (tmp_path / "script.py").write_text(
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "import numpy\n"
        "for n in range(20000): numpy.ones(1000 + n % 50)\n"
        "print('ran')"
    )
    done = run("run", "--trace", "a.trace", "script.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    assert "are lost; record less" in done.stderr
    assert "hit rate" in done.stderr
    assert not trace.load(tmp_path / "a.trace").complete


def test_a_program_without_a_free_descriptor_keeps_its_trace(tmp_path):
    (tmp_path / "script.py").write_text(
        "import numpy, os\n"
        "for n in range(1000): numpy.ones(1000 + n % 50)\n"
        "try:\n"
        "    while True: os.open('/dev/null', os.O_RDONLY)\n"
        "except OSError: pass\n"
    )
    done = run("run", "--trace", "a.trace", "script.py", cwd=tmp_path)
    assert done.returncode == 0 and "hit rate" in done.stderr, done.stderr
    found = trace.load(tmp_path / "a.trace")
    assert found.complete and len(found.events) > 1000


def test_a_snapshot_of_torch(tmp_path, capsys):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(Torch().snapshot()))
    assert main([str(path)]) == 0
    text = said(capsys)
    assert "torch, device 0, recorded on" in text
    assert "45 allocations" in text and "1 stream." in text
    assert "At that time 22 MiB were reserved, and" in text
    assert "train.py:0 step" in text
    with pytest.raises(SystemExit):
        main([str(path), "--device", "3"])
    assert "device=3" in capsys.readouterr().err
    for way, expected in ("stream", f"stream {Torch.SIDE:#x}"), ("thread", "thread 1"):
        assert main([str(path), "--by", way]) == 0
        assert ("no stream" if way == "stream" else expected) in said(capsys)


def test_counting_events(recorded, capsys):
    assert main([str(recorded), "--events"]) == 0
    assert "recorded" in said(capsys)


@pytest.mark.parametrize("form", ["torch", "own"])
def test_files_that_are_no_trace(tmp_path, capsys, form):
    path = tmp_path / "bad"
    path.write_bytes(pickle.dumps({"a": 1}) if form == "torch" else b"not a trace")
    with pytest.raises(SystemExit) as ended:
        main([str(path), "--html", str(tmp_path / "out.html")])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "bad" in error or "device_traces" in error
    assert not (tmp_path / "out.html").exists()


@pytest.mark.parametrize("command", ["trace", "replay"])
def test_a_pipe_is_no_file(tmp_path, recorded, command):
    """Not that it is not a trace, nor that the trace is empty; and nobody waits for its writer."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    done = run(command, pipe)
    assert done.returncode == 2 and "is a pipe or a device" in done.stderr
    reader, writer = os.pipe()
    with open(reader, "rb"), open(writer, "wb") as file:
        file.write(recorded.read_bytes()[:4096])
        file.flush()
        with pytest.raises(ValueError, match="is a pipe or a device"):
            trace.load(f"/dev/fd/{reader}")
    for path in (pipe, "/dev/zero"):
        with pytest.raises(ValueError, match="is a pipe or a device"):
            trace.from_torch(path)


def test_what_else_is_refused(tmp_path, recorded, capsys):
    empty = tmp_path / "empty.trace"
    trace.Trace(np.zeros(0, trace.EVENT)).save(empty)
    for arguments, text in [
        ([empty], "no allocation"),
        ([recorded, "--by", "colour"], "'colour'"),
        ([recorded, "--blocks", "-1"], "--blocks: '-1'"),
        ([recorded, "--html", recorded], "is not a page"),
        ([], "FILE"),
    ]:
        with pytest.raises(SystemExit) as ended:
            main([str(one) for one in arguments])
        assert ended.value.code == 2
        assert text in capsys.readouterr().err
    before = recorded.read_bytes()
    done = run("trace", tmp_path / "none")
    assert done.returncode == 1 and done.stderr.startswith("arenapy: [Errno 2]")
    assert recorded.read_bytes() == before


def test_without_bokeh_it_is_said_what_to_install(tmp_path, recorded, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "bokeh.embed", None)
    out = tmp_path / "out.html"
    assert main([str(recorded), "--html", str(out)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("arenapy: a page needs Bokeh")
    assert "pip install bokeh" in error and ".[html]" in error
    assert not out.exists()
    assert main([str(recorded)]) == 0


def test_names_from_a_trace_are_not_taken_for_markup(tmp_path, capsys):
    events = np.zeros(1, trace.EVENT)
    events["operation"], events["nbytes"], events["site"] = 1, 5, 1
    name = "[red]<script>alert(1)</script>"
    made = trace.Trace(events, name[:20], sites=((), (trace.Frame(f"/x/{name}.py", 3, name),)))
    made.save(tmp_path / "a.trace")
    assert main([str(tmp_path / "a.trace")]) == 0
    assert "[red]<script>" in said(capsys)


@pytest.mark.full
def test_bokeh_is_not_imported_for_text(recorded):
    program = (
        "import sys; from arenapy.commands.cli import main; main(['trace', sys.argv[1]]);"
        "print([name for name in sys.modules if name.startswith('bokeh')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, recorded], capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert trace_page.NO_BOKEH


def test_many_blocks_are_told(tmp_path, capsys):
    many_blocks(tmp_path / "many.trace", 30_000)
    assert main([str(tmp_path / "many.trace")]) == 0
    text = said(capsys)
    assert "The map shows the 20,000 blocks with the largest rectangles one by one." in text
    assert "merges 10,000 others" in text
