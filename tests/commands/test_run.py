"""``arenapy run``: a program does what it does under Python itself, its arrays in a pool."""

import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import textwrap
import time

import alike
import numpy as np
import pytest
from alike import REPORT, TIMEOUT, split
from helpers import GIL

from arenapy import trace
from arenapy.commands.command_line import size
from arenapy.commands.run import report
from arenapy.commands.run.command import huge_heap
from arenapy.commands.run.report import ProgramMemory
from arenapy.errors import OutOfMemory
from arenapy.linux.libc_malloc import foreign_malloc

PLAIN = [sys.executable]
OURS = [sys.executable, "-m", "arenapy", "run"]
MIB = 1 << 20


def run(command, cwd, **how):
    """Our command without its start, which takes longer than most programs here."""
    if command[: len(OURS)] == OURS:
        return alike.ours(command[len(OURS) :], cwd=cwd, **how)
    return alike.start(command, cwd=cwd, **how)


def places(text):
    """Text without addresses, which differ from run to run."""
    return re.sub("0x[0-9a-f]+", "0x", text)


@pytest.fixture
def script(tmp_path):
    def write(source, name="script.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return path

    return write


def assert_alike(cwd, *program, status=None, **how):
    """The same output, errors and status as Python; the report after it. Gives the report."""
    expected, found = run([*PLAIN, *program], cwd, **how), run([*OURS, *program], cwd, **how)
    own, report = split(found.stderr)
    assert (found.returncode, places(found.stdout), places(own)) == (
        expected.returncode, places(expected.stdout), places(expected.stderr),
    )  # fmt: skip
    if status is not None:
        assert found.returncode == status
    return report


def test_nothing_is_left_once_numpy_is_there(script, tmp_path):
    script(
        """
        import sys, numpy
        print(sys.meta_path, vars(numpy.__loader__), type(numpy.__spec__.loader))
        """
    )
    assert_alike(tmp_path, "script.py", status=0)


FINDER = """
import importlib.util
import sys
from importlib.machinery import PathFinder

class Loader:
    __slots__ = ()

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        loaders[module.__name__].exec_module(module)

class OldLoader:
    def __init__(self, loader):
        self.load_module = loader.load_module

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name not in ("numpy", "other"):
            return None
        spec = PathFinder.find_spec(name, path, target)
        loaders[name] = spec.loader
        spec.loader = one if one is not None else OldLoader(spec.loader)
        return spec

class OldFinder:
    def find_module(self, name, path=None):
        return None

loaders = {}
sys.meta_path.insert(sys.meta_path.index(PathFinder), Finder())
"""


@pytest.mark.parametrize(
    ("text", "pool"),
    [
        ("one = Loader(); import numpy, other", True),
        ("one = Loader(); find('numpy'); find('numpy'); import other; seen(); import numpy", True),
        ("one = None; import numpy, other", False),
        ("one = Loader(); sys.meta_path.insert(0, OldFinder()); import numpy", True),
    ],
    ids=["slots", "shared", "old loader", "old finder"],
)
def test_finders_and_loaders_of_the_program(script, tmp_path, text, pool):
    (tmp_path / "other.py").touch()
    seen = "find = importlib.util.find_spec\nseen = lambda: print('numpy' in sys.modules)\n"
    script(
        f"{FINDER}{seen}{text}\nprint(type(numpy.__loader__), type(numpy.__spec__.loader))\n"
        "print(numpy.ones(5))"
    )
    how = {"env": {**os.environ, "PYTHONWARNINGS": "ignore"}}
    assert ("served" in assert_alike(tmp_path, "script.py", status=0, **how)) == pool


def test_numpys_loader_before_it_is_imported(script, tmp_path):
    script(
        """
        import copy
        import importlib.util
        import pickle
        from importlib.machinery import SourceFileLoader
        spec = importlib.util.find_spec("numpy")
        assert isinstance(spec.loader, SourceFileLoader) and spec.loader.name == "numpy"
        print(spec.loader.get_filename("numpy") == spec.origin)
        print(type(pickle.loads(pickle.dumps(spec)).loader), copy.deepcopy(spec).loader.path)
        """
    )
    assert_alike(tmp_path, "script.py", status=0)


@pytest.mark.full
def test_modules_that_come_while_the_report_is_made(script, tmp_path):
    """As threads import them. Here the name of one imports another when it is looked at."""
    script(
        """
        import sys, types, numpy
        class Name(str):
            def partition(self, separator):
                sys.modules[f"made_{len(sys.modules)}"] = types.ModuleType("made")
                return str.partition(self, separator)
        sys.modules[Name("odd")] = types.ModuleType("odd")
        for i in range(9):
            sys.modules[f"more_{i}"] = types.ModuleType("more")
        """
    )
    assert "pool" in assert_alike(tmp_path, "script.py", status=0)


def test_a_file_that_is_not_there(tmp_path):
    assert not assert_alike(tmp_path, "nope.py", status=2)
    assert_alike(tmp_path, "-m", "nothing_of_this_name", status=1)
    assert_alike(tmp_path, "-m", "json.nothing", status=1)
    assert not run([*OURS, "--json", "a.json", "nope.py"], tmp_path).stdout
    assert not (tmp_path / "a.json").exists()


ENDS = {
    "return": "",
    "status": "sys.exit(7)",
    "none": "sys.exit()",
    "text": "sys.exit('why')",
    "large": "sys.exit(300)",
    "error": "def f(): 1 / 0\nf()",
    "chain": "try: 1 / 0\nexcept ZeroDivisionError as e: raise KeyError(3) from e",
    "context": "try: {}[1]\nexcept KeyError: undefined_name",
    "note": "e = ValueError('x'); e.add_note('noted'); raise e",
    "group": "raise ExceptionGroup('two', [ValueError(1), TypeError(2)])",
    "syntax": "exec('a b')",
    "interrupt": "os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(60)",
    "raised interrupt": "raise KeyboardInterrupt",
    "terminated": "os.kill(os.getpid(), signal.SIGTERM)",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "aborted": "os.abort()",
    "exit at once": "os._exit(5)",
    "base": "class Mine(BaseException): pass\nraise Mine",
    "hook": "sys.excepthook = lambda *e: print('hook', e[0], e[2].tb_frame.f_code.co_name,"
    " e[2] is e[1].__traceback__ is sys.last_traceback)\n1 / 0",
    "thread": "threading.Thread(target=lambda: 1 / 0).start()",
    "late thread": "threading.Thread(target=lambda: (__import__('time').sleep(.2),"
    " print('late'))).start()\nraise SystemExit(3)",
    "recursion": "def f(): f()\ntry: f()\nexcept RecursionError as e: print(e)",
    "closed": "sys.stderr.close(); sys.exit(4)",
    "no stderr": "sys.stderr = None; sys.exit(4)",
    "at exit": "atexit.register(lambda: 1 / 0)",
}
SILENT = {"terminated", "killed", "aborted", "exit at once", "closed"}


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.sampled
def test_ends(script, tmp_path, how):
    script(f"import atexit, os, signal, sys, threading\nprint('begun', flush=True)\n{ENDS[how]}")
    report = assert_alike(tmp_path, "script.py")
    assert bool(report) == (how not in SILENT)


@pytest.mark.full
def test_interrupt_from_outside(script, tmp_path):
    script("import time, numpy\ntry:\n    print('on', flush=True); time.sleep(60)\n"
           "finally: print('off')")  # fmt: skip
    found = []
    for command in PLAIN, OURS:
        with subprocess.Popen(
            [*command, "script.py"], cwd=tmp_path, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            assert process.stdout.readline() == "on\n"
            time.sleep(0.3)  # until it sleeps: the traceback says where it was
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=TIMEOUT)
            found.append((process.returncode, output, split(errors)[0]))
    assert found[0] == found[1]
    assert found[1][0] == -signal.SIGINT
    assert split(errors)[1]


@pytest.mark.parametrize("how", [["script.py"], ["-m", "script"]])
def test_a_report_in_a_file_keeps_how_an_interrupted_program_ends(script, tmp_path, how):
    """Python would forget it, for the report imports modules that make code of text."""
    script("raise KeyboardInterrupt")
    done = run([*OURS, "--json", "a.json", *how], tmp_path)
    assert done.returncode == -signal.SIGINT
    assert (tmp_path / "a.json").exists()


@pytest.mark.full
def test_a_prompt_after_an_interrupted_program_ends_as_python_does(script, tmp_path):
    script("raise KeyboardInterrupt")
    plain = [sys.executable, "-i"]
    for start in plain, [*plain, *OURS[1:], "--json", "a.json"]:
        assert run([*start, "script.py"], tmp_path, input="1\n").returncode == 0


@pytest.mark.full
def test_an_interrupt_that_a_console_showed_is_not_the_programs_end(script, tmp_path):
    script("import code\ncode.interact(local=globals())")
    done = run(
        [*OURS, "--json", "a.json", "script.py"], tmp_path, input="raise KeyboardInterrupt\n"
    )
    assert done.returncode == 0
    assert "KeyboardInterrupt" in done.stderr


def test_a_reader_that_goes_away(script, tmp_path):
    script("try: print('x' * 100_000, flush=True)\nexcept BrokenPipeError: raise SystemExit(9)")
    for command in PLAIN, OURS:
        read, write = os.pipe()
        os.close(read)
        done = run([*command, "script.py"], tmp_path, stdout=write, stderr=subprocess.PIPE,
                   capture_output=False)  # fmt: skip
        os.close(write)
        assert done.returncode in (9, 120), command


CHILDREN = """
import multiprocessing as mp, os, pickle, subprocess, sys
import numpy as np

class Point:
    def __init__(self, x): self.x = x
    def __eq__(self, other): return self.x == other.x

def work(point):
    return Point(point.x * 2), float(np.ones(1000).sum())

if __name__ == "__main__":
    print(pickle.loads(pickle.dumps(Point(3))) == Point(3), Point.__module__)
    print(work.__globals__ is sys.modules["__main__"].__dict__)
    with mp.get_context(sys.argv[1]).Pool(2) as pool:
        print([(p.x, s) for p, s in pool.map(work, map(Point, range(5)))])
    process = mp.get_context(sys.argv[1]).Process(target=sys.exit, args=(6,))
    process.start(), process.join()
    print(process.exitcode)
    print(subprocess.run([sys.executable, "-c", "import sys, os; print(sorted(os.environ), "
        "any('arenapy' in name for name in sys.modules))"], capture_output=True, text=True))
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.sampled
@pytest.mark.full
def test_multiprocessing(script, tmp_path, method):
    script(CHILDREN)
    how = {"env": {**os.environ, "PYTHONWARNINGS": "ignore"}}
    report = assert_alike(tmp_path, "script.py", method, status=0, **how)
    assert report.count(REPORT) == 1


def test_a_forked_child_does_not_report(script, tmp_path):
    script(
        """
        import os, sys, numpy as np
        a = np.ones(1 << 20)
        if os.fork() == 0:
            b = a + 1
            sys.exit(3)
        print(os.waitstatus_to_exitcode(os.wait()[1]), a.sum())
        """
    )
    how = {"env": {**os.environ, "PYTHONWARNINGS": "ignore"}}
    report = assert_alike(tmp_path, "script.py", status=0, **how)
    assert report.count(REPORT) == 1


def test_a_time_limit_that_strikes_while_the_pool_comes(script, tmp_path):
    """The program's handler raises it, for which a hook stands here."""
    script("""
        import sys

        def hook(event, args):
            if event == "import" and args[0] == "arenapy.commands.run.report":
                raise TimeoutError("time limit")

        sys.addaudithook(hook)
        try:
            import numpy
        except TimeoutError as error:
            print("caught:", error)
    """)
    done = run([*OURS, "--quiet", "script.py"], tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == ("caught: time limit\n", "", 0)


def test_forked_children_that_import_numpy_first_do_not_record(script, tmp_path):
    script(
        """
        import os
        for _ in range(2):
            if os.fork() == 0:
                import arenapy, numpy
                os._exit(7 if arenapy.handles(numpy.ones(1000)) else 8)
        print(os.waitstatus_to_exitcode(os.wait()[1]), os.waitstatus_to_exitcode(os.wait()[1]))
        import numpy
        kept = numpy.ones(1 << 20)
        """
    )
    done = run([*OURS, "--trace", "a.trace", "script.py"], tmp_path)
    assert (done.returncode, done.stdout) == (0, "7 7\n"), done.stderr
    loaded = trace.load(tmp_path / "a.trace")
    assert loaded.complete and loaded.events["nbytes"].max() == 8 * MIB


# ---- the pool


def figures(tmp_path, *arguments):
    done = run([*OURS, "--quiet", "--json", "figures.json", *arguments], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads((tmp_path / "figures.json").read_text()), done.stdout


@pytest.mark.parametrize("options", [(), ("--quiet",), ("--quiet", "--json", "figures.json")])
@pytest.mark.full
def test_a_trace_that_is_cut_off_is_told(script, tmp_path, options):
    script("""
        import resource, numpy as np
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # stands for a full disk
        for _ in range(20_000):
            np.ones(1000)
    """)
    done = run([*OURS, *options, "--trace", "a.trace", "script.py"], tmp_path)
    assert done.returncode == 0 and not trace.load(tmp_path / "a.trace").complete
    assert re.search(r"the trace .* has the first \d+ records, and \d+ are lost", done.stderr)
    assert done.stderr.count("\n") == 1 or not options


@pytest.mark.parametrize("options", [(), ("--quiet",)])
def test_a_trace_that_the_program_replaces_is_told(script, tmp_path, options):
    script("""
        import os, shutil, numpy as np
        shutil.rmtree("out")
        os.mkdir("out")
        open("out/a.trace", "w").write("mine")
    """)
    (tmp_path / "out").mkdir()
    done = run([*OURS, *options, "--trace", "out/a.trace", "script.py"], tmp_path)
    assert done.returncode == 0
    assert "is another file now: the program replaced the trace" in " ".join(done.stderr.split())
    assert (tmp_path / "out/a.trace").read_text() == "mine"


def test_a_trace_that_is_refused_when_numpy_comes_ends_the_program(script, tmp_path):
    """It was free when the program started. Nothing goes on without the pool."""
    script("""
        open("a.trace", "w").write("precious")
        try:
            import numpy
        except Exception as error:
            print("no NumPy:", error)
        print("without a pool")
    """)
    done = run([*OURS, "--trace", "a.trace", "script.py"], tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert f"'{tmp_path / 'a.trace'}' exists and is not a trace: " in done.stderr
    assert (tmp_path / "a.trace").read_text() == "precious"


def test_figures_are_those_of_the_program(script, tmp_path):
    script(
        """
        import os, numpy as np
        os.chdir("/")
        for _ in range(10):
            a = np.ones(1 << 20)
            del a
        import arenapy
        print(arenapy.handles(np.ones(1 << 20)).region.kind)
        """
    )
    found, output = figures(tmp_path, "script.py")
    assert output == "host\n"
    nbytes = 8 << 20
    assert 11 * nbytes <= found["served_bytes"] < 12 * nbytes
    assert nbytes <= found["pool"]["peak_bytes"] < 2 * nbytes
    assert found["pool"]["total_allocations"] >= 11
    assert found["pool"]["hit_rate"] == pytest.approx(
        found["pool"]["pool_hits"] / found["pool"]["total_allocations"]
    )
    # Without a GIL the memory comes as it is touched, so that no thread waits for another one.
    assert found["prefault_bytes"] >= nbytes if GIL else found["prefault_bytes"] == 0
    assert 0 < found["prefault_seconds"] < found["seconds"]
    assert found["peak_reserved_bytes"] - found["pool"]["peak_bytes"] == found["never_used_bytes"]
    assert found["fell_back"]["system_allocations"] == found["fell_back"]["lazy_allocations"] == 0
    assert found["unreached_threads"] == []


def test_figures_are_named_as_in_the_stats():
    """The report has them without the dataclasses, whose import would make a program end later."""
    options = {"max_bytes": None, "initial_bytes": 0, "huge_pages": "auto", "lock": False,
               "on_full": "system", "libc": None, "trace": None, "sites": 0}  # fmt: skip
    memory = ProgramMemory(options)
    try:
        kept = [np.ones(size) for size in (10, 1000, 1 << 20, 5 << 20)]
        del kept[1:3]
        found, stats = memory.figures(), memory.pool.stats()
        assert found["fell_back"] == memory.handler.stats().as_dict()
    finally:
        memory.handler.uninstall()
    assert found["pool"] == stats.as_dict()
    assert 0 < stats.fragmentation < 1 and stats.total_allocations >= 4


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OutOfMemory("none of them is reserved"), "none of them is reserved"),
        (KeyboardInterrupt(), "KeyboardInterrupt interrupted the request for memory"),
    ],
)
def test_the_report_has_the_reason_of_a_source_that_refuses(monkeypatch, error, why):
    """As Host has one for huge pages, none of which is reserved."""

    class Refuses:
        def __init__(self, **how):
            pass

        def region(self, nbytes):
            raise error

        def reserve(self, nbytes):
            return None

    monkeypatch.setattr(report, "Host", Refuses)
    for max_bytes in None, 4 * MIB:
        options = {"max_bytes": max_bytes, "initial_bytes": 0, "huge_pages": "2M", "lock": False,
                   "on_full": "system", "libc": None, "trace": None, "sites": 0}  # fmt: skip
        memory = ProgramMemory(options)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                np.ones(1000)
        finally:
            memory.handler.uninstall()
        text = memory.text(memory.figures() | {"minor_faults": 0})
        assert f"to malloc: {why}\n" in text


def test_the_report_imports_nothing(script, tmp_path):
    script("import numpy, sys; print('the end', file=sys.stderr)")
    said = run([*PLAIN, "-X", "importtime", "-m", "arenapy", "run", "script.py"], tmp_path).stderr
    own, report = split(said.partition("the end\n")[2])
    assert "page faults" in report
    assert "import time" not in own


def test_what_fell_back_and_why(script, tmp_path):
    script(
        """
        import _thread, threading, time, numpy as np
        keep = [np.ones(1 << 20) for _ in range(4)]
        zeros = np.zeros(5 << 20)
        _thread.start_new_thread(lambda: time.sleep(60), ())
        threading.Thread(target=lambda: keep.append(np.ones(10)), name="mine").start()
        time.sleep(.1)
        """
    )
    found, _ = figures(tmp_path, "--max-bytes", "20M", "script.py")
    assert found["fell_back"]["system_allocations"] == 2
    assert found["fell_back"]["system_bytes"] == 2 * (8 << 20)
    assert found["fell_back"]["lazy_allocations"] == 1
    assert found["fell_back"]["lazy_bytes"] == 40 * MIB
    assert found["pool"]["reserved_bytes"] <= 20 * MIB
    assert len(found["unreached_threads"]) == 1 and "mine" not in found["unreached_threads"]
    report = run([*OURS, "--max-bytes", "20M", "script.py"], tmp_path).stderr
    assert "2 blocks, 16 MiB, to malloc: the pool was full (--max-bytes is 20 MiB)" in report
    assert "1 block, 40 MiB: large arrays of zeros" in report
    assert "threads, which the pool does not reach: thread " in report


@pytest.mark.parametrize("name", ["None", "property(lambda self: 1 / 0, lambda self, name: None)"])
def test_threads_with_odd_names_are_waited_for(script, tmp_path, name):
    script(
        f"""
        import threading, time

        class Worker(threading.Thread):
            name = {name}

            def run(self):
                threading.main_thread().join()
                time.sleep(0.2)
                print("done")

        Worker().start()
        threading.Thread(target=threading.main_thread().join).start()
        import numpy
        """
    )
    assert_alike(tmp_path, "script.py", status=0)


def test_numpy_again_after_the_finders_were_put_back(script, tmp_path):
    """There is one pool. Another one could not have the same trace."""
    script(
        """
        import importlib, sys, warnings
        from unittest import mock
        warnings.simplefilter("ignore")
        with mock.patch.object(sys, "meta_path", sys.meta_path[:]):
            import numpy
        importlib.reload(numpy)
        """
    )
    done = run([*OURS, "--trace", "t", "script.py"], tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_numpy_that_a_task_imports_is_told(script, tmp_path):
    program = """
        import asyncio

        async def handle():
            import numpy

        async def main():
            await asyncio.create_task(handle())

        asyncio.run(main())
    """
    script(program)
    found, _ = figures(tmp_path, "script.py")
    assert found["unreached_contexts"] and not found["unreached_threads"]
    report = run([*OURS, "script.py"], tmp_path).stderr
    assert "all arrays of other contexts than the one that imported NumPy: import it at" in report
    script("import numpy\n" + textwrap.dedent(program))
    assert not figures(tmp_path, "script.py")[0]["unreached_contexts"]


def test_nearly_all_hits_are_not_all(script, tmp_path):
    script("import numpy as np\nfor _ in range(20_000): np.ones(1000)")
    found, _ = figures(tmp_path, "script.py")
    assert 0.9995 < found["pool"]["hit_rate"] < 1
    assert "hit rate     99.9%" in run([*OURS, "script.py"], tmp_path).stderr


def test_on_full_error(script, tmp_path):
    script("import numpy as np\ntry: np.ones(1 << 20)\nexcept MemoryError: print('none')")
    done = run([*OURS, "--max-bytes", "4M", "--on-full", "error", "script.py"], tmp_path)
    assert (done.returncode, done.stdout) == (0, "none\n")


def test_initial_bytes_are_there_with_numpy(script, tmp_path):
    script("import numpy")
    found, _ = figures(tmp_path, "--initial-bytes", "32M", "--max-bytes", "64M", "script.py")
    assert found["prefault_bytes"] == found["pool"]["reserved_bytes"] == 32 * MIB
    assert found["never_used_bytes"] > 31 * MIB


def test_the_report_comes_last(script, tmp_path):
    script(
        """
        import atexit, sys
        atexit.register(lambda: print("last", np.ones(1 << 20).sum(), file=sys.stderr))
        import numpy as np
        """
    )
    errors = run([*OURS, "script.py"], tmp_path).stderr
    assert errors.startswith("last 1048576.0\narenapy run: NumPy's memory")
    assert "8 MiB" in errors


@pytest.mark.parametrize(
    "program",
    [
        "import arenapy",
        "import arenapy.pool.pool, numpy",
        "import numpy, arenapy",
        "import arenapy.commands.cli",
        "import numpy, arenapy; arenapy.bump.bump.Bump(64); arenapy.slab, arenapy.Slab",
        "import numpy, pickle; from arenapy.pool.pool import Pool;"
        "pickle.loads(pickle.dumps(Pool().alloc(9), 5))",
    ],
)
@pytest.mark.sampled
def test_a_program_that_imports_arenapy(script, tmp_path, program):
    script(
        program + "\nimport arenapy, numpy; print(arenapy.handles(numpy.ones(1000)) is not None)"
    )
    done = run([*OURS, "script.py"], tmp_path)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_threads_that_use_arenapy_first_at_once(script, tmp_path):
    script(
        """
        import threading, numpy, arenapy
        begin, found = threading.Barrier(8), []
        def use():
            begin.wait()
            found.append(arenapy.Pool)
        threads = [threading.Thread(target=use) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(len(found))
        """
    )
    assert_alike(tmp_path, "script.py", status=0)


def test_a_mocked_clock_is_the_program_s_alone(script, tmp_path):
    script(
        """
        import time
        from unittest import mock
        import numpy as np
        with mock.patch("time.perf_counter", side_effect=[10.0, 12.0]), mock.patch(
            "time.process_time", side_effect=[5.0]
        ):
            start = time.perf_counter()
            np.ones(1_000_000)
            print(time.perf_counter() - start, time.process_time())
        """
    )
    assert_alike(tmp_path, "script.py", status=0)


def test_environment_set_before_numpy_has_its_effect(script, tmp_path):
    script(
        """
        import os
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
        import numpy
        print(len(os.listdir("/proc/self/task")))
        """
    )
    assert_alike(tmp_path, "script.py", status=0)


@pytest.mark.parametrize("tunables", [None, "", "glibc.malloc.arena_max=3"])
def test_settings_of_glibc_are_not_seen(script, tmp_path, tunables):
    """Neither by the program, whether it has NumPy or not, nor by its children."""
    script(
        """
        import os, subprocess
        print(os.environ.get("GLIBC_TUNABLES"), flush=True)
        subprocess.run("echo ${GLIBC_TUNABLES-none}", shell=True)
        """
    )
    environment = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    environment |= {} if tunables is None else {"GLIBC_TUNABLES": tunables}
    assert_alike(tmp_path, "script.py", status=0, env=environment)


@pytest.mark.parametrize(
    ("tunables", "wanted"),
    [
        (None, "glibc.malloc.hugetlb=1"),
        ("", "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.arena_max=3", "glibc.malloc.arena_max=3:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_the_users_settings_of_glibc_come_first(tunables, wanted):
    assert huge_heap(tunables) == wanted


@pytest.mark.no_sanitizer
@pytest.mark.parametrize("libc", ["keep", "none"])
@pytest.mark.full
def test_what_malloc_does_is_reported(script, tmp_path, libc):
    script("""
        import numpy
        with open("/proc/self/smaps") as file:
            heap = file.read().partition("[heap]")[2].partition("VmFlags:")[2]
        print(" hg " in heap.splitlines()[0])
    """)
    found, output = figures(tmp_path, "--libc", libc, "script.py")
    assert found["libc_keeps"] == (libc == "keep" and foreign_malloc() is None)
    report = run([*OURS, "--libc", libc, "script.py"], tmp_path).stderr
    assert ("glibc keeps freed memory" in report) == found["libc_keeps"]
    assert ("malloc       unchanged\n" in report) == (libc == "none")
    with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:
        mode = file.read()
    name, version = platform.libc_ver()
    if "[madvise]" in mode and name == "glibc" and tuple(map(int, version.split("."))) >= (2, 35):
        assert output == f"{libc == 'keep'}\n"


def test_a_program_without_numpy(script, tmp_path):
    script("import sys; print('numpy' in sys.modules)")
    found, output = figures(tmp_path, "script.py")
    assert output == "False\n"
    assert found["numpy"] is False
    assert "did not import NumPy" in run([*OURS, "script.py"], tmp_path).stderr


@pytest.mark.parametrize(
    "act",
    [
        "sys.argv[0] = pathlib.Path(sys.argv[0])", "sys.argv = [b'x']", "sys.argv = None",
        "del sys.argv", "del sys.__stderr__",
    ],
)  # fmt: skip
@pytest.mark.sampled
def test_what_the_program_leaves_in_sys(script, tmp_path, act):
    script(f"import sys, pathlib; {act}")
    report = assert_alike(tmp_path, "script.py", status=0)
    assert report.startswith("arenapy run: ") == ("stderr" not in act)
    alike.ours(["--json", "a.json", "script.py"], cwd=tmp_path)
    assert json.loads((tmp_path / "a.json").read_text())["numpy"] is False


NOT_OURS = "arenapy run: the program has its own numpy or finder, so there was no pool\n"


def test_a_program_whose_own_finder_loads_numpy(script, tmp_path):
    script(
        """
        import sys
        from importlib.machinery import PathFinder
        sys.meta_path.insert(0, PathFinder)
        import numpy
        """
    )
    report = assert_alike(tmp_path, "script.py", status=0)
    assert report == NOT_OURS


@pytest.mark.parametrize("name", ["numpy.py", "numpy/__init__.py"])
def test_a_program_with_a_numpy_of_its_own(script, tmp_path, name):
    script("class ndarray: ...", name)
    script("import numpy; print(vars(numpy)['ndarray'])")
    assert assert_alike(tmp_path, "script.py", status=0) == NOT_OURS


@pytest.mark.parametrize("options", [["--initial-bytes", "900T"], ["--max-bytes", "1"]])
@pytest.mark.sampled
def test_a_pool_that_cannot_be_is_said_in_one_line(script, tmp_path, options):
    script("import numpy")
    done = run([*OURS, *options, "script.py"], tmp_path)
    assert done.returncode != 0
    assert done.stderr.startswith("arenapy run: ")
    assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--max-bytes", "4X", "script.py"], "'4X' is not a size"),
        (["--max-bytes", "0", "script.py"], "'0' is not a size"),
        (["--initial-bytes", "2M", "--max-bytes", "1M", "script.py"], "more than --max-bytes"),
        (["--trace", "/dev/full", "script.py"], "'/dev/full' is not a regular file"),
        ([], "SCRIPT"),
        (["-m"], "SCRIPT"),
        (["--nope", "script.py"], "unrecognized arguments: --nope"),
        (["-OO", "script.py"], "this option of Python: python -OO -m arenapy run ..."),
        (["--lock", "-X", "dev", "script.py"], "this option of Python: python -X -m arenapy run"),
    ],
)
def test_wrong_arguments(tmp_path, arguments, named):
    done = run([*OURS, *arguments], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert named in done.stderr.splitlines()[-1]


def test_a_json_file_that_cannot_be_is_refused_first(script, tmp_path):
    script("print('ran')")
    done = run([*OURS, "--json", "no/such/folder.json", "script.py"], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no/such/folder.json" in done.stderr


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4G", 4 << 30), ("512m", 512 << 20), ("1.5 GiB", 3 << 29), ("4096", 4096), ("2kB", 2048)],
)
def test_sizes(text, nbytes):
    assert size(text) == nbytes


def test_arguments_of_many_bytes(tmp_path):
    """As many as a program may have; one variable of the environment has 128 KiB at most."""
    (tmp_path / "script.py").write_text("import sys\nprint(len(sys.argv))\n")
    words = ["x" * 4000] * 60
    done = subprocess.run(
        [sys.executable, "-E", "-m", "arenapy", "run", "--quiet", "script.py", *words],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("61\n", "")


@pytest.mark.parametrize("line", [["script.py", "-m"], ["-m", "this"], ["-"], ["--quiet", "x"]])
def test_the_program_waits_for_no_import_of_ours(line):
    """Until the process becomes the program: neither NumPy, nor what is compiled, nor argparse."""
    code = """
import os, sys
def become(*what):
    print(*set(sys.modules) - before, flush=True)
    os._exit(0)
before, os.execve = set(sys.modules), become
sys.argv[:] = ["/bin/arenapy", "run", *sys.argv[1:]]
from arenapy.commands.cli import main
main()
"""
    done = alike.start([sys.executable, "-c", code, *line])
    modules = set(done.stdout.split())
    assert "arenapy.commands.run.command" in modules, done.stderr
    assert not {name for name in modules if not name.startswith("arenapy")}
    assert not modules & {"arenapy.pool.pool", "arenapy.linux.vm", "arenapy.stats"}


def test_a_program_of_our_name_has_all_names(script, tmp_path):
    """Where the command imports nothing yet, a program finds everything at its first use."""
    script(
        """
        import arenapy
        from arenapy import Slab
        print(arenapy.Bump(4096).alloc(1).nbytes, Slab(64, 1).stats().capacity)
        print(arenapy.size_class(1), arenapy.errors.OutOfMemory is arenapy.OutOfMemory)
        """,
        "arenapy",
    )
    done = alike.start([sys.executable, "arenapy"], cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("1 1\n0 True\n", "")
