"""Files that are written: nothing of a user's is lost, by any command, option or link."""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import arenapy
from arenapy import trace
from arenapy.commands import demo, fuzz, testing
from arenapy.commands import trace as trace_command
from arenapy.commands.advise import command as advise
from arenapy.commands.compare import command as compare
from arenapy.commands.run import command as run
from arenapy.diagnostics.recorder import Recorder
from arenapy.linux import outputs, vm
from arenapy.testing import guided, steps
from arenapy.trace.format import HEADER

pytestmark = pytest.mark.no_sanitizer  # each case is a process

TIMEOUT = 120
OURS = [sys.executable, "-m", "arenapy"]
REPORTS = ("arenapy run", "arenapy compare", "arenapy demo", "arenapy advise")
SCRIPT = b"import numpy as np\nprint('precious')\n"


def events(count=3):
    made = np.zeros(count, trace.EVENT)
    made["operation"], made["thread"] = 1, 1
    return made


#: What each kind of output looks like, made by whoever writes it where that is quick.
FORMER = {
    **{outputs.report(name): json.dumps({"report": name, "x": 1}, indent=2) for name in REPORTS},
    outputs.TRACE: b"arenatrc" + bytes(120),
    outputs.PAGE: (Path(arenapy.__file__).parent / "trace" / "page.html").read_bytes(),
    outputs.STEPS: b'{"arenapy.testing": 1, "machine": "a:b"}\n',
    outputs.CHART: b"\x89PNG\r\n\x1a\n" + bytes(30) + b"tEXtSoftware\0arenapy 0.1.0" + bytes(9),
}
FORMER = {kind: text.encode() if isinstance(text, str) else text for kind, text in FORMER.items()}
#: What may lie in its place by mistake.
PRECIOUS = {
    "script": SCRIPT,
    "table": b"a,b\n1,2\n",
    "json": b'{"report": "mine"}',
    "other json": b'{\n  "precious": [1]\n}\n',
    "nearly ours": b' {\n  "report": "arenapy run"',
    "page": b"<!doctype html>\n<title>mine</title>\n",
    "zeros": bytes(5000),
    "one byte": b"a",
    "mark too late": b"\x89PNG\r\n\x1a\n" + bytes(2000) + b"Software\0arenapy",
}

#: Command lines that write a file, with {} in its place, and its kind. {script} and {trace} exist.
WRITERS = {
    "run --json": (run.main, ["--json", "{}", "{script}"], outputs.report("arenapy run")),
    "run --trace": (run.main, ["--trace", "{}", "{script}"], outputs.TRACE),
    "compare --json": (
        compare.main, ["--json", "{}", "{script}"], outputs.report("arenapy compare"),
    ),
    "demo --json": (demo.main, ["--json", "{}"], outputs.report("arenapy demo")),
    "demo --plot": (demo.main, ["--plot", "{}"], outputs.CHART),
    "demo --gpu --json": (demo.main, ["--gpu", "--json", "{}"], outputs.report("arenapy demo")),
    "trace --html": (trace_command.main, ["{trace}", "--html", "{}"], outputs.PAGE),
    "advise --json": (
        advise.main, ["{trace}", "--json", "{}"], outputs.report("arenapy advise"),
    ),
    "fuzz --save": (fuzz.main, ["a:b", "--save", "{}"], outputs.STEPS),
    "guided --save": (
        testing.main, ["guided", "a:b", "--corpus", "c", "--save", "{}"], outputs.STEPS,
    ),
}  # fmt: skip


class Began(BaseException):
    """The work began: the command line was accepted."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a script and a trace are, and where work that begins raises `Began`."""

    def begin(*arguments, **how):
        raise Began

    for where, name in [
        (os, "execve"), (os, "execv"), (compare, "_measure"), (demo, "_measure_all"),
        (demo, "_run_gpu"), (trace_command, "read"), (advise, "read"), (fuzz, "_search"),
        (testing, "_guided"),
    ]:  # fmt: skip
        monkeypatch.setattr(where, name, begin)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_bytes(SCRIPT)
    trace.Trace(events()).save(tmp_path / "a.trace")
    return tmp_path


def command(name, path):
    main, line, _ = WRITERS[name]
    names = {"{}": str(path), "{script}": "script.py", "{trace}": "a.trace"}
    return main([names.get(word, word) for word in line])


def everything(folder):
    """What is in a folder: names, links and bytes."""
    return {
        path: os.readlink(path) if path.is_symlink() else path.is_file() and path.read_bytes()
        for path in folder.rglob("*")
    }


def refused(folder, name, path, capsys):
    """The error of a command that ends before it does anything."""
    before = everything(folder)
    with pytest.raises(SystemExit) as ended:
        command(name, path)
    assert ended.value.code == 2
    assert everything(folder) == before
    return capsys.readouterr().err


def test_former_outputs_are_known_by_what_their_writers_write(tmp_path):
    """And by nothing else: each is one of its kind only."""
    for kind, text in FORMER.items():
        (tmp_path / "a").write_bytes(text)
        for other in FORMER:
            if other == kind:
                outputs.check(tmp_path / "a", other)
            else:
                with pytest.raises(FileExistsError, match=other.name):
                    outputs.check(tmp_path / "a", other)


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_no_former_output_is_refused_first(folder, name, capsys):
    kind = WRITERS[name][2]
    others = [text for other, text in FORMER.items() if other != kind]
    for text in [*PRECIOUS.values(), *others]:
        Path("x.png").write_bytes(text)
        assert f"'x.png' exists and is not {kind.name}" in refused(folder, name, "x.png", capsys)
        Path("x.png").unlink()


@pytest.mark.parametrize("name", WRITERS)
def test_a_script_is_found_behind_links(folder, name, capsys):
    Path("soft.png").symlink_to("script.py")
    os.link("script.py", "hard.png")
    Path("twice.png").symlink_to("soft.png")
    for path in "soft.png", "hard.png", "twice.png", "./soft.png", str(folder / "hard.png"):
        assert Path(path).name in refused(folder, name, path, capsys)


@pytest.mark.parametrize("name", WRITERS)
def test_places_that_cannot_be_written(folder, name, capsys):
    Path("loop.png").symlink_to("loop.png")
    Path("astray.png").symlink_to("missing/../script.py")
    for path in (
        ".", "no/such.png", "script.py/x.png", "loop.png", "x" * 300 + ".png", "", "new/",
        "missing/../script.py", "missing/../new.png", "astray.png",
    ):  # fmt: skip
        refused(folder, name, path, capsys)


@pytest.mark.parametrize("name", [name for name in WRITERS if WRITERS[name][2] is outputs.TRACE])
def test_a_trace_is_a_regular_file(folder, name, capsys):
    os.mkfifo("pipe")
    for path in "pipe", "/dev/null":
        assert "is not a regular file; name one" in refused(folder, name, path, capsys)


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_free_or_a_former_output_is_taken(folder, name):
    kind = WRITERS[name][2]
    Path("empty.png").touch()
    Path("former.png").write_bytes(FORMER[kind])
    Path("soft.png").symlink_to("former.png")
    Path("dangling.png").symlink_to("new.png")
    ends = ()
    paths = ["new.png", "empty.png", "former.png", "soft.png", "dangling.png"]
    if kind not in (outputs.TRACE, outputs.CHART):
        os.mkfifo("pipe.png")
        ends = os.pipe()  # what a shell makes of >(jq)
        paths += ["pipe.png", "/dev/null", f"/dev/fd/{ends[1]}"]
    before = everything(folder)
    for path in paths:
        with pytest.raises(Began):
            command(name, path)
        assert everything(folder) == before, "something was written too early"
    for end in ends:
        os.close(end)


# ---- two names of one file

LINKS = {
    "same": lambda path: path,
    "dot": lambda path: f"./{path}",
    "absolute": os.path.abspath,
    "around": lambda path: f"../{Path.cwd().name}/{path}",
    "soft": lambda path: Path("soft.png").symlink_to(path) or "soft.png",
    "hard": lambda path: os.link(path, "hard.png") or "hard.png",
}
PAIRS = {
    "run --json --trace": (run.main, ["--json", "{a}", "--trace", "{b}", "script.py"]),
    "run --json SCRIPT": (run.main, ["--json", "{b}", "{a}"]),
    "run --trace SCRIPT": (run.main, ["--trace", "{b}", "{a}"]),
    "compare --json SCRIPT": (compare.main, ["--json", "{b}", "{a}"]),
    "demo --json --plot": (demo.main, ["--json", "{a}", "--plot", "{b}"]),
    "trace --html FILE": (trace_command.main, ["{a}", "--html", "{b}"]),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("exists", [True, False])
def test_one_file_by_two_names_is_refused(folder, pair, link, exists, capsys):
    if exists:
        Path("a.png").touch()
    elif link == "hard":
        pytest.skip("there is nothing to link to")
    main, line = PAIRS[pair]
    other = LINKS[link]("a.png")
    before = everything(folder)
    with pytest.raises(SystemExit) as ended:
        main([word.format(a="a.png", b=other) for word in line])
    assert ended.value.code == 2
    assert "is the same file" in capsys.readouterr().err
    assert everything(folder) == before


def test_two_names_of_two_files_are_not_refused(folder):
    Path("a").touch()
    Path("soft").symlink_to("b")
    for names in ("a", "b"), ("c", "d"), ("a", "soft"), ("/dev/null", "/dev/null"):
        outputs.check_apart(dict(enumerate(names)))


def test_a_program_of_no_name_that_exists_is_not_compared_with_files(folder):
    """``-`` and modules."""
    for line in ["-"], ["-m", "json"]:
        with pytest.raises(Began):
            run.main(["--json", "json", *line])


# ---- writing


@given(old=st.binary(max_size=50) | st.none(), new=st.binary(max_size=50))
def test_a_whole_output_replaces_its_former_one(tmp_path_factory, old, new):
    kind = outputs.Kind("a thing", b"ours")
    folder = tmp_path_factory.mktemp("whole")
    path = folder / "a"
    if old is not None:
        path.write_bytes(b"ours" + old)
        path.chmod(0o640)
    outputs.write(path, b"ours" + new, kind)
    assert path.read_bytes() == b"ours" + new
    assert os.listdir(folder) == ["a"]
    if old is not None:
        assert path.stat().st_mode & 0o777 == 0o640
    outputs.write(path, b"else", kind)  # it is the caller's to write what the kind says
    with pytest.raises(FileExistsError):
        outputs.write(path, b"ours", kind)


def test_links_stay_links(tmp_path):
    (tmp_path / "soft").symlink_to("real")
    for text in b"arenatrc 1", b"arenatrc 2":
        outputs.write(tmp_path / "soft", text, outputs.TRACE)
        assert (tmp_path / "soft").is_symlink()
        assert (tmp_path / "real").read_bytes() == text
    assert sorted(os.listdir(tmp_path)) == ["real", "soft"]


def test_a_file_without_a_name(tmp_path, run_script):
    run_script(f"""
    import os
    from arenapy.linux import outputs

    with open({str(tmp_path / "gone")!r}, "w+b") as file:
        os.unlink(file.name)
        for text in b"arenatrc 1", b"arenatrc 2":
            outputs.write(f"/dev/fd/{{file.fileno()}}", text, outputs.TRACE)
            assert os.pread(file.fileno(), 100, 0) == text
    """)
    assert os.listdir(tmp_path) == ["script.py"]


@pytest.mark.parametrize("path", ["new", "former", "soft", "dangling"])
@pytest.mark.full
def test_dots_after_a_link_are_the_kernels(folder, path):
    """A run writes the file that was checked, and not one of the folder in which the link is."""
    (folder / "in" / "deep").mkdir(parents=True)
    Path("link").symlink_to("in/deep")
    Path("in/former").write_bytes(FORMER[outputs.TRACE])
    Path("in/soft").symlink_to("former")
    Path("in/dangling").symlink_to("deep/../new")
    for name in "new", "former", "soft", "dangling":
        Path(name).write_bytes(b"arenatrc of another program")
    before = {name: Path(name).read_bytes() for name in os.listdir() if os.path.isfile(name)}
    line = [*OURS, "run", "--quiet", "--trace", f"link/../{path}", "script.py"]
    subprocess.run(line, check=True, timeout=TIMEOUT, capture_output=True)
    assert {name: Path(name).read_bytes() for name in before} == before
    assert len(trace.load(f"in/{path}")) == 0 and os.path.getsize(f"in/{path}") == HEADER.itemsize
    assert Path("in/soft").is_symlink() and Path("in/dangling").is_symlink()


FAILURES = [
    (name, error)
    for name in ("open_file", "fchmod", "replace")
    for error in (OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "broken"), KeyboardInterrupt())
]


@pytest.mark.parametrize(("name", "error"), FAILURES)
def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch, name, error):
    path = tmp_path / "a"
    path.write_bytes(b"arenatrc old")
    where = vm if name == "open_file" else os
    real = getattr(where, name)

    def fail(*arguments, **how):
        if name == "open_file" and not arguments[1] & os.O_CREAT:
            return real(*arguments, **how)
        raise error

    monkeypatch.setattr(where, name, fail)
    with pytest.raises(type(error)):
        outputs.write(path, b"arenatrc new", outputs.TRACE)
    monkeypatch.undo()
    assert path.read_bytes() == b"arenatrc old"
    assert os.listdir(tmp_path) == ["a"]


def test_an_audit_hook_that_forbids_to_open_leaves_what_was_there(tmp_path, run_script):
    path = tmp_path / "a"
    path.write_bytes(b"arenatrc old")
    run_script(f"""
    import os, sys
    from pathlib import Path
    from arenapy.linux import outputs

    def forbid(event, arguments):
        global allowed
        if event == "open":
            allowed -= 1
            if allowed == -1:
                raise PermissionError("forbidden")

    allowed, refused = 100, 0
    sys.addaudithook(forbid)
    before = os.listdir("/proc/self/fd")
    for allowed in range(5):
        try:
            outputs.write({str(path)!r}, b"arenatrc new", outputs.TRACE)
        except PermissionError:
            refused += 1
            assert os.listdir("/proc/self/fd") == before
            assert Path({str(path)!r}).read_bytes() == b"arenatrc old"
        else:
            break
    assert refused > 1
    """)
    assert sorted(os.listdir(tmp_path)) == ["a", "script.py"]


def test_a_full_disk_leaves_what_was_there(tmp_path):
    """A limit on the size of files stands for it."""
    path = tmp_path / "a"
    path.write_bytes(b"arenatrc old")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))
    try:
        with pytest.raises(OSError, match=rf"{path}.*File too large.*another file"):
            outputs.write(path, b"arenatrc" + bytes(1 << 20), outputs.TRACE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert path.read_bytes() == b"arenatrc old"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize(
    ("name", "number"),
    [("open_file", errno.EACCES), ("replace", errno.EBUSY), ("replace", errno.EPERM)],
)
def test_where_files_cannot_be_replaced_they_are_written(tmp_path, monkeypatch, name, number):
    """A folder of somebody else's; a single file that is mounted, as containers have it."""
    path = tmp_path / "a"
    path.write_bytes(b"arenatrc old")
    where = vm if name == "open_file" else os
    inode, real = path.stat().st_ino, getattr(where, name)

    def fail(*arguments, **how):
        if name == "open_file" and not arguments[1] & os.O_EXCL:
            return real(*arguments, **how)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(where, name, fail)
    outputs.write(path, b"arenatrc", outputs.TRACE)
    assert path.read_bytes() == b"arenatrc"
    assert path.stat().st_ino == inode
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("there", [None, b"arenatrc old"])
@pytest.mark.parametrize("comes", [SCRIPT, b"arenatrc other"])
def test_a_file_that_comes_while_an_output_is_written(tmp_path, monkeypatch, comes, there, links):
    """It is looked at, too: as if it had been there from the start."""
    path, other = tmp_path / "a", tmp_path / "other"
    if there is not None:
        path.write_bytes(there)
    other.write_bytes(comes)
    tries = []

    def name(nbytes):
        if not tries:  # the new file is being made beside
            os.rename(other, path)
        tries.append(nbytes)
        return urandom(nbytes)

    def link(*_arguments):
        raise OSError(errno.EPERM, "no links here")

    urandom = os.urandom
    monkeypatch.setattr(os, "urandom", name)
    if not links:
        monkeypatch.setattr(os, "link", link)
    refused = comes == SCRIPT
    with pytest.raises(FileExistsError) if refused else contextlib.nullcontext():
        outputs.write(path, b"arenatrc new", outputs.TRACE)
    assert path.read_bytes() == (SCRIPT if refused else b"arenatrc new")
    assert os.listdir(tmp_path) == ["a"]
    assert len(tries) == (1 if refused else 2)


def test_a_new_file_where_there_are_no_links(tmp_path, monkeypatch):
    def link(*_arguments):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", link)
    outputs.write(tmp_path / "a", b"arenatrc new", outputs.TRACE)
    assert (tmp_path / "a").read_bytes() == b"arenatrc new"
    assert os.listdir(tmp_path) == ["a"]


def test_readers_see_whole_outputs(tmp_path):
    path, done = tmp_path / "a", threading.Event()
    texts = [b"arenatrc" + bytes([n]) * (100_000 * (n + 1)) for n in range(4)]
    path.write_bytes(texts[0])
    seen = []

    def read():
        while not done.is_set():
            seen.append(path.read_bytes() in texts)

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(10):
        for text in texts:
            outputs.write(path, text, outputs.TRACE)
    done.set()
    thread.join()
    assert seen and all(seen)


def test_pipes_and_devices_are_written_as_they_are(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found = []
    thread = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
    thread.start()
    outputs.write(pipe, b"text", outputs.PAGE)
    thread.join()
    assert found == [b"text"]
    outputs.write("/dev/null", b"text", outputs.PAGE)
    with pytest.raises(OSError, match=r"'/dev/full' cannot be written \(No space") as full:
        outputs.write("/dev/full", b"text", outputs.PAGE)
    assert full.value.errno == errno.ENOSPC


@pytest.mark.parametrize(
    ("command", "line"), [(trace_command, ["x"]), (run, ["--json", "x", __file__])]
)
def test_a_folder_that_was_removed(tmp_path, monkeypatch, capsys, command, line):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(SystemExit):
        command.main(line)
    assert "'x': the current folder was removed; go to another" in capsys.readouterr().err


def test_the_file_that_standard_output_goes_to_is_refused(tmp_path):
    (tmp_path / "p.py").write_text("print('precious')")
    for name in "out.txt", "/dev/stdout":
        with open(tmp_path / "out.txt", "wb") as file:
            done = subprocess.run(
                [*OURS, "run", "--json", name, "p.py"], cwd=tmp_path, stdout=file, check=False,
                stderr=subprocess.PIPE, text=True, timeout=TIMEOUT,
            )  # fmt: skip
        assert done.returncode == 2 and "standard output" in done.stderr


# ---- traces and steps


def recorder(path):
    made = Recorder(path, "Probe")
    made.start()
    return made


@pytest.mark.parametrize(
    "write",
    [
        lambda path: trace.record(arenapy.Pool(), path).__enter__(),
        lambda path: trace.Trace(events()).save(path),
        recorder,
    ],
)
def test_traces_are_written_over_traces_only(tmp_path, write):
    path = tmp_path / "a"
    for text in PRECIOUS.values():
        path.write_bytes(text)
        with pytest.raises(FileExistsError, match="is not a trace"):
            write(path)
        assert path.read_bytes() == text
    for text in b"", FORMER[outputs.TRACE]:
        path.write_bytes(text)
        write(path)
        assert len(trace.load(path)) >= 0
    if write is recorder:
        return
    (tmp_path / "soft").symlink_to("a")
    write(tmp_path / "soft")


def test_a_recording_that_cannot_begin_leaves_the_last_one(tmp_path, monkeypatch):
    path = tmp_path / "a.trace"
    trace.Trace(events()).save(path)
    before = path.read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    made = Recorder(path)
    resource.setrlimit(resource.RLIMIT_AS, (now, limit[1]))
    try:
        with pytest.raises(MemoryError):
            made.start()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    assert path.read_bytes() == before


def test_of_recordings_at_once_into_one_file_one_goes_on(tmp_path):
    """Each in a thread, by as many names as there are threads."""
    path = tmp_path / "a.trace"
    path.touch()
    for name in "b", "c":
        (tmp_path / name).symlink_to("a.trace")
    os.link(path, tmp_path / "d")
    for turn in range(20):
        barrier, entered, refusals = threading.Barrier(4), [], []

        def body(name, barrier=barrier, entered=entered, refusals=refusals, turn=turn):
            pool = arenapy.Pool()
            barrier.wait()
            try:
                with trace.record(pool, tmp_path / name):
                    entered.append(name)
                    barrier.wait(TIMEOUT)
                    kept = [pool.alloc(n) for n in range(turn)]
                    del kept
            except BlockingIOError as error:
                refusals.append(str(error))
                barrier.wait(TIMEOUT)

        threads = [threading.Thread(target=body, args=(name,)) for name in ("a.trace", *"bcd")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(entered), len(refusals)) == (1, 3)
        assert all("is in use by another recording" in text for text in refusals)
        found = trace.load(path)
        assert found.complete and found.summary().operations["alloc"] == turn


RECORDING = """
import os, sys, time
from arenapy.diagnostics.recorder import Recorder
recorder = Recorder("a.trace")
recorder.start()
recorder.add("alloc", 1, 1)
{act}
print("on", flush=True)
sys.stdin.read()
"""
HELD = {
    "recording": ("", True),
    "stopped": ("recorder.stop()", False),
    "dropped": ("del recorder", False),
    "stopped, and a child lives": ("os.fork() or time.sleep(60); recorder.stop()", False),
    "dropped, and a child lives": ("os.fork() or time.sleep(60); del recorder", False),
    "stopped by a child": ("os.fork() or (recorder.stop(), os._exit(0)); os.wait()", True),
    "dropped by a child": (
        "if not os.fork():\n    del recorder\n    os._exit(0)\nos.wait()", True,
    ),
    "failed": (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (150, -1))\n"
        "for n in range(30000): recorder.add('free', 1, 1)", True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", HELD)
@pytest.mark.sampled
def test_another_process_may_not_record_meanwhile(tmp_path, how):
    act, held = HELD[how]
    with subprocess.Popen(
        [sys.executable, "-c", RECORDING.format(act=act)], cwd=tmp_path, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout.readline() == "on\n"
            before = (tmp_path / "a.trace").read_bytes()
            for write in recorder, lambda path: trace.Trace(events()).save(path):
                with pytest.raises(BlockingIOError) if held else contextlib.nullcontext():
                    write(tmp_path / "a.trace")
            assert ((tmp_path / "a.trace").read_bytes() == before) == held
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    recorder(tmp_path / "a.trace").stop()  # a process that is killed leaves no lock behind


def test_a_file_that_was_replaced_is_not_recorded_into_unseen(tmp_path, monkeypatch):
    """Somebody saves a trace between opening the file and locking it."""
    path = tmp_path / "a.trace"
    trace.Trace(events()).save(path)
    real, turns = vm.open_file, itertools.count()

    def late(*arguments, **how):
        file = real(*arguments, **how)
        if next(turns) == 0:
            monkeypatch.setattr(vm, "open_file", real)
            trace.Trace(events(5)).save(path)
            monkeypatch.setattr(vm, "open_file", late)
        return file

    monkeypatch.setattr(vm, "open_file", late)
    made = recorder(path)
    monkeypatch.undo()
    made.add("alloc", 1, 1)
    made.stop()
    assert len(trace.load(path)) == 1


def test_steps_are_written_over_steps_only(tmp_path, monkeypatch):
    path = tmp_path / "precious.py"
    path.write_bytes(SCRIPT)
    monkeypatch.setenv("ARENAPY_STEPS", str(path))
    steps._opened.cache_clear()
    try:
        with pytest.raises(FileExistsError, match="is not a file of steps"):
            steps.begin({"machine": "a:b"})
        assert path.read_bytes() == SCRIPT
        path.unlink()
        for _ in range(2):
            steps.begin({"machine": "a:b"})
            os.close(steps._descriptor())
            steps._opened.cache_clear()
    finally:
        steps._opened.cache_clear()


@pytest.mark.parametrize("option", [["--minimize"], ["--merge", "other"]])
@pytest.mark.parametrize("mine", ["thesis.txt", "20261130", "deadbeef" * 5])
def test_a_folder_that_is_no_corpus_is_not_minimized(tmp_path, mine, option, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    named = hashlib.sha1(b"precious").hexdigest()[:8]  # as an input is
    for name in f"corpus/{named}", f"corpus/{mine}", "other/notes.txt":
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(b"precious")
    before = everything(tmp_path)
    monkeypatch.setattr(guided, "_process", lambda *a, **k: pytest.fail("it began"))
    assert testing.main(["guided", "a:b", "--corpus", "corpus", *option]) == 2
    assert mine in capsys.readouterr().err
    assert everything(tmp_path) == before


def test_merging_writes_over_no_input(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = hashlib.sha1(b"1").hexdigest()[:8]
    for name, text in ("c/" + named, b"1"), ("other/" + named, b"2"), ("other/seed", b"3"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(text)
    seen = {}

    def process(target, corpus, **job):
        seen.update(everything(Path(corpus)))
        raise RuntimeError("no atheris")

    monkeypatch.setattr(guided, "_process", process)
    assert testing.main(["guided", "a:b", "--corpus", "c", "--merge", "other"]) == 2
    assert sorted(seen.values()) == [b"1", b"2", b"3"]


# ---- whole commands


def ours(cwd, *line):
    return subprocess.run(
        [*OURS, *line], cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )


@pytest.mark.full
def test_a_run_writes_its_own_former_outputs_and_no_others(tmp_path):
    (tmp_path / "work.py").write_text(
        "import sys, numpy as np\nx = np.ones(1000)\n"
        "if sys.argv[1:]: open(sys.argv[1], 'w').write('precious')"
    )
    written = ["--json", "a.json", "--trace", "a.trace"]
    for _ in range(2):
        done = ours(tmp_path, "run", *written, "work.py")
        assert done.returncode == 0, done.stderr
        assert json.loads((tmp_path / "a.json").read_text())["report"] == "arenapy run"
        assert trace.load(tmp_path / "a.trace").complete
    # The program makes a file of this name after the command line was looked at.
    (tmp_path / "a.json").unlink()
    done = ours(tmp_path, "run", *written, "work.py", "a.json")
    assert (tmp_path / "a.json").read_text() == "precious"
    assert (
        f"the report is not complete: {str(tmp_path / 'a.json')!r} exists and is not" in done.stderr
    )
    assert done.returncode == 0
    before = everything(tmp_path)
    done = ours(tmp_path, "run", "--json", "work.py", "a.json")
    assert done.returncode == 2 and "'work.py' exists and is not a report" in done.stderr
    assert everything(tmp_path) == before
