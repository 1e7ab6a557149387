"""``arenapy run X`` is ``python X``: whatever X is and however Python is started, as far as X sees.

Each probe is done twice, in two copies of the same folder, and must print the same, end the same,
and leave the same files. All that may differ is written down here: the report after the program's
own errors, and our finder in ``sys.meta_path`` until NumPy is there.
"""

import contextlib
import os
import py_compile
import re
import select
import shutil
import subprocess
import sys
import textwrap
import threading
import zipfile
from pathlib import Path

import pytest
from alike import MAIN, TIMEOUT, ours, plain, split

from arenapy.commands.run import command as run

pytestmark = pytest.mark.sampled

#: Prints what a program can know of how it was started. Plain modules only: any may be shadowed.
SEES = r"""
import os, sys
early = sorted(set(sys.modules) - {"atexit", "_ctypes", "_struct"})  # ours; two after -E and -I
def frames():
    frame, found = sys._getframe(), []
    while frame:
        found.append((frame.f_code.co_filename, frame.f_code.co_name))
        frame = frame.f_back
    return found
def depth(n=0):
    try: return depth(n + 1)
    except RecursionError: return n
print(sys.argv, sys.orig_argv, sys.flags, sys.warnoptions, sys._xoptions)
print(open("/proc/self/cmdline").read().split("\0") if not sys.flags.ignore_environment else "")
print(sys.path, sorted(sys.path_importer_cache))
print([str(finder) for finder in sys.meta_path if type(finder).__name__ != "AfterImport"])
print(len([0 for finder in sys.meta_path if type(finder).__name__ == "AfterImport"]) < 2)
print(frames(), depth(), early, sys.excepthook, sys.gettrace(), sys.stdin.encoding)
for name, value in sorted(vars(sys.modules["__main__"]).items()):
    print(name, type(value), "" if " at 0x" in repr(value) else repr(value))
print(__name__, vars(sys.modules["__main__"]) is globals(), __spec__ and __spec__.name)
print(sorted((k, v) for k, v in os.environ.items() if k not in ("_", "SHLVL")))
print(sorted(os.listdir("/proc/self/fd")), os.getcwd() == os.environ.get("PWD"))
import warnings, traceback, signal, threading
warnings.warn("at the top", stacklevel=1); warnings.warn("above it", stacklevel=2)
traceback.print_stack()
handled = signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD
print([signal.getsignal(number) for number in handled])
print(signal.pthread_sigmask(signal.SIG_BLOCK, []), threading.enumerate())
print(os.getpgrp() == os.getpid(), os.nice(0), sys.stdout.line_buffering, sys.stdout.write_through)
if "fail" in sys.argv: raise ValueError("as asked")
"""

SEES_ONCE = SEES.partition("import warnings")[0]  # these would read the program again
FAILS = "def f():\n    raise ValueError('as asked')\nf()\n"


def sees(folder):
    for name in "script.py", "no_extension", "with space ü.py", "-minus.py", "-", "package/sub.py":
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(SEES)
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "__main__.py").write_text(SEES)
    (folder / "link.py").symlink_to("package/sub.py")
    with zipfile.ZipFile(folder / "app.pyz", "w") as file:
        file.writestr("__main__.py", SEES)
    py_compile.compile(str(folder / "script.py"), str(folder / "compiled.pyc"), "script.py")
    os.mkfifo(folder / "fifo")


def places(text):
    """Text without what differs from process to process."""
    return re.sub("0x[0-9a-f]{6,}|started [0-9]+", "0x", text)


class Both:
    """The two ways, each in a folder of its own that is made alike."""

    def __init__(self, folder):
        self.folder = folder

    def alike(
        self, make, line, python=(), env=None, *, unset=(), text=None, stdin=None, status=0,
        whole=False,
    ):  # fmt: skip
        """Do it in both ways, compare, and return standard output.

        `whole`: start our command as its users do, because its own process matters.
        """
        whole = whole or any(re.match("-[^-]*[EI]", word) for word in python)
        found = []
        folder = self.folder / "x"
        for way, how in (plain, {}), (ours, {"whole": whole}):
            folder.mkdir()
            make(folder)
            found.append(self.one(way, folder, line, python, env, unset, text, stdin, **how))
            found[-1].append(sorted(path.name for path in folder.rglob("*")))
            shutil.rmtree(folder)
        expected, mine = found
        for some, others in zip(mine[1:3], expected[1:3], strict=True):
            assert some.splitlines() == others.splitlines()
        assert mine == expected
        if status is not None:
            assert expected[0] == status, expected
        return expected[1]

    def one(self, way, folder, line, python, env, unset, text, stdin, **how):
        environment = {**os.environ, "PWD": str(folder), **(env or {})}
        for variable in unset:
            environment.pop(variable, None)
        environment = {k: v.replace("HERE", str(folder)) for k, v in environment.items()}
        feeder = None
        with contextlib.ExitStack() as stack:
            if stdin is not None:
                how["stdin"] = stack.enter_context(open(folder / stdin))
            elif text is not None:
                how["input"] = text
            if "fifo" in line:
                feeder = threading.Thread(target=(folder / "fifo").write_text, args=[SEES_ONCE])
                feeder.start()
            done = way(line, python, cwd=folder, env=environment, **how)
        if feeder is not None:
            feeder.join()
        own, report = split(done.stderr)
        assert way is not plain or not report
        return [done.returncode, places(done.stdout), places(own)]


@pytest.fixture
def both(tmp_path):
    return Both(tmp_path)


#: Ways to name a program: the line, and standard input.
WAYS = {
    "script": ["script.py", "-x", "--", "-m", "", "--json", "y"],
    "dot": ["./package/../script.py"],
    "no extension": ["no_extension"],
    "odd name": ["with space ü.py", "arg ü"],
    "link": ["link.py"],
    "compiled": ["compiled.pyc"],
    "minus": ["--", "-minus.py", "-x"],
    "a file named -": ["./-"],
    "folder": ["package", "a"],
    "zip": ["app.pyz", "a"],
    "package": ["-m", "package", "-x"],
    "module": ["-m", "package.sub", "--", "-m"],
    "fifo": ["fifo", "a"],
    "- from a pipe": ["-", "a", "-b"],
    "- from a file": ["-"],
    "/dev/stdin from a pipe": ["/dev/stdin", "a"],
    "/dev/stdin from a file": ["/dev/stdin"],
}


@pytest.mark.parametrize("way", ["folder", "zip", "package", "module", "compiled"])
def test_a_failure_looks_the_same_however_a_program_is_named(both, way):
    assert both.alike(sees, [*WAYS[way], "fail"], status=1)


@pytest.mark.parametrize("way", WAYS)
def test_what_a_program_sees_however_it_is_named(both, way):
    how = {}
    if "pipe" in way:
        how["text"] = SEES
    elif "from a file" in way:
        how["stdin"] = "script.py"
    assert "frames" in both.alike(sees, WAYS[way], **how)


#: Python's own options and its environment.
STARTS = {
    "-O": (["-O"], {}),
    "-I": (["-I"], {"PYTHONPATH": "HERE/x", "PYTHONWARNINGS": "error"}),
    "-E": (["-E"], {"PYTHONPATH": "HERE/x", "PYTHONDEVMODE": "1", "PYTHONUNBUFFERED": "1"}),
    "-IBsW": (["-IBsWdefault", "-X", "utf8"], {"PYTHONHASHSEED": "5"}),
    "-P": (["-P", "-u"], {}),
    "-ubb": (["-ubb", "-W", "always", "-Xdev"], {}),
    "-OOs": (["-OOsq", "-X", "int_max_str_digits=5000", "-X", "tracemalloc"], {}),
    "not frozen": (["-X", "frozen_modules=off", "--check-hash-based-pycs", "always"], {}),
    "path": ([], {"PYTHONPATH": "HERE/x::HERE/package", "PYTHONSAFEPATH": "1"}),
    "empty path": ([], {"PYTHONPATH": ""}),
    "variables": (
        [], {"PYTHONDEVMODE": "1", "PYTHONWARNINGS": "default", "PYTHONOPTIMIZE": "2",
             "PYTHONUNBUFFERED": "1", "PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": ""},
    ),
    "C locale": ([], {"LC_ALL": "C"}),
    "inspect": (["-i"], {}),
}  # fmt: skip


@pytest.mark.parametrize("start", STARTS)
def test_what_a_program_sees_however_python_is_started(both, start):
    python, env = STARTS[start]
    assert both.alike(sees, ["script.py", "a"], python, env)


@pytest.mark.parametrize("env", [{}, {"LC_CTYPE": "C"}, {"LC_CTYPE": "POSIX"}], ids=str)
def test_what_a_program_sees_without_a_locale(both, env):
    """Python then changes LC_CTYPE, for its children, too: our own process must not have."""
    unset = {"LANG", "LC_ALL", "LC_CTYPE"} - env.keys()
    assert both.alike(sees, ["script.py", "a"], env=env, unset=unset, whole=True)


def test_without_site_it_is_refused(tmp_path):
    """There is no place for the pool to come from; and nothing is run."""
    (tmp_path / "script.py").write_text("print('ran')")
    paths = os.pathsep.join([str(Path(run.__file__).parents[1]), *sys.path[1:]])
    done = subprocess.run(
        [sys.executable, "-S", "-m", "arenapy", "run", "script.py"], cwd=tmp_path, text=True,
        capture_output=True, timeout=TIMEOUT, check=False, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "") and "omit -S" in done.stderr


# ---- names of the standard library's


def shadowed(*names):
    """A folder where every one of these is a module, or a package, of the program's own."""

    def make(folder):
        for at, name in enumerate(names):
            path = folder / (f"{name}.py" if at % 2 else f"{name}/__init__.py")
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"marker = {name!r}; print('mine', {name!r}, __file__)")

    return make


def loaded_by(statement):
    """The names of the standard library's files that a statement imports."""
    code = (
        f"import sys; before = set(sys.modules)\n{statement}\n"
        "print(*{name.partition('.')[0] for name, module in sys.modules.items()"
        " if name not in before and getattr(module, '__file__', None)"
        " and name.partition('.')[0] in sys.stdlib_module_names})"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_a_program_has_its_own_modules_without_numpy(both):
    """Whatever Python has not imported by then may be shadowed; the report needs json."""
    names = sorted({"json", "re", "enum", "random", "resource", "time", "contextlib", "marshal",
                    "atexit", "typing", "collections", "threading", "os",
                    "pkgutil", "argparse", "functools", "signal", "types", "fcntl", "struct",
                    "ctypes", "errno", "secrets", "subprocess", "pathlib",
                    "dataclasses"})  # fmt: skip
    script = "import sys\n" + "".join(
        f"import {name}; print({name!r}, getattr({name}, 'marker', None))\n" for name in names
    )

    def make(folder):
        shadowed(*names)(folder)
        (folder / "script.py").write_text(script)

    for options in [], ["-E"]:
        found = both.alike(make, ["script.py"], options)
        assert found.count("mine") > 20
    ours = both.folder / "x"
    ours.mkdir()
    make(ours)
    done = subprocess.run(
        [sys.executable, MAIN, "run", "--json", "f", "script.py"], cwd=ours, capture_output=True,
        text=True, check=True, timeout=TIMEOUT,
    )  # fmt: skip
    assert "no report" not in done.stderr
    assert '"report": "arenapy run"' in (ours / "f").read_text()


@pytest.mark.parametrize("when", ["before", "after", "both"])
@pytest.mark.full
def test_a_program_has_its_own_modules_with_numpy(both, when):
    """Those that NumPy does not need: each may come before NumPy, after it, or both."""
    needed = loaded_by("import numpy, numpy.random")
    names = sorted((loaded_by("import arenapy.commands.run.report, json, threading") - needed)
                   | {"json", "resource", "copy", "html", "statistics", "csv"})  # fmt: skip
    assert len(names) > 8
    lines = [
        f"import {name}; print({name!r}, getattr({name}, 'marker', None), {name}.__file__)"
        for name in names
    ]
    numpy = ["import numpy", "print(numpy.ones(1000).sum())"]
    program = {"before": lines + numpy, "after": numpy + lines, "both": lines + numpy + lines}

    def make(folder):
        shadowed(*names)(folder)
        (folder / "script.py").write_text("\n".join(program[when]))

    found = both.alike(make, ["script.py"])
    assert found.count("mine") >= len(names) - 2  # what is built in cannot be shadowed


def test_modules_that_the_program_took_out_of_the_path_again(both):
    def make(folder):
        (folder / "elsewhere").mkdir()
        shadowed("html", "copy")(folder / "elsewhere")
        (folder / "elsewhere" / "html" / "entities.py").write_text("print('mine, too')")
        (folder / "script.py").write_text(
            "import sys\nsys.path.insert(0, 'elsewhere'); import html; del sys.path[0]\n"
            "import numpy, copy, html.entities\nprint(html.marker, copy.__file__)"
        )

    assert "mine, too" in both.alike(make, ["script.py"])


THREADS = """
import html, sys, threading, queue
sys.path.insert(0, "elsewhere")
done = []

def meanwhile(event, arguments):
    if event == "import" and arguments[0] == "arenapy.commands":  # ours are being imported
        thread()

def thread():
    if not done:
        done.append(True)
        one = threading.Thread(target=work)
        one.start()
        one.join(60)

def work():
    import own, html.entities, statistics
    import html as again
    print(again is html, html.__spec__.origin, html.entities.marker)
    found.extend([again, html.entities, statistics])
    sys.path.append("late")

found = []
sys.addaudithook(meanwhile)
import numpy
thread()
import html.entities, statistics
print(html is found[0], html.entities is found[1], statistics is found[2], sys.path[-1])
"""


def test_other_threads_have_the_program_s_modules_while_the_pool_begins(both):
    def make(folder):
        shadowed("html", "statistics", "colorsys")(folder)
        (folder / "html" / "entities.py").write_text("marker = 'mine, too'")
        (folder / "elsewhere").mkdir()
        (folder / "elsewhere" / "own.py").touch()
        (folder / "script.py").write_text(THREADS)

    found = both.alike(make, ["script.py"])
    assert found.endswith("True True True late\n"), found


def test_a_finder_goes_while_another_thread_looks_for_a_module(both):
    """A list that becomes shorter makes who reads it skip an item: here PathFinder."""

    def make(folder):
        (folder / "own.py").touch()
        (folder / "script.py").write_text("""
import sys, threading
began, goes_on = threading.Event(), threading.Event()

class Slow(list):
    def __iter__(self):
        for at, finder in enumerate(list.__iter__(self)):
            yield finder
            if at == len(self) - 2 and threading.current_thread() is thread:
                began.set()
                goes_on.wait(60)

sys.meta_path = Slow(sys.meta_path)
thread = threading.Thread(target=lambda: __import__("own"))
thread.start()
began.wait()
import numpy
goes_on.set()
thread.join()
print("own" in sys.modules)
""")

    assert both.alike(make, ["script.py"]) == "True\n"


@pytest.mark.parametrize("name", ["mmap", "queue", "dataclasses", "json"])
@pytest.mark.parametrize("instead", ["None", "types.ModuleType('instead')", "mock.MagicMock()"])
def test_a_module_that_the_program_has_put_something_else_for(both, name, instead):
    def make(folder):
        (folder / "script.py").write_text(f"""
import sys, types
from unittest import mock
sys.modules["{name}"] = put = {instead}
import numpy
print(numpy.ones(2), sys.modules["{name}"] is put)
""")

    assert both.alike(make, ["script.py"]) == "[1. 1.] True\n"


def test_the_list_of_finders_stays_the_same_list(both):
    def make(folder):
        (folder / "script.py").write_text("""
from sys import meta_path
import numpy

class Finder:
    def find_spec(name, path=None, target=None):
        print("asked for", name)

meta_path.append(Finder)
try:
    import nowhere
except ImportError as error:
    print(error)
""")

    assert "asked for nowhere" in both.alike(make, ["script.py"])


def test_numpy_amid_a_loop_over_the_finders(both):
    def make(folder):
        (folder / "script.py").write_text("""
import importlib.metadata, sys
from sys import meta_path

class Distribution(importlib.metadata.Distribution):
    def read_text(self, name):
        return "Name: mine\\nVersion: 1\\n" if name == "METADATA" else None

    def locate_file(self, path):
        return path

class Finder:
    def find_spec(name, path=None, target=None):
        pass

    def find_distributions(context):
        return [Distribution()]

meta_path.append(Finder)
names = []
for one in importlib.metadata.distributions():
    import numpy
    names.append(one.metadata["Name"])
print(names[-1])
""")

    assert both.alike(make, ["script.py"]) == "mine\n"


def test_a_finder_that_imports_numpy(both):
    """The import that asked it goes on with the finder that follows."""

    def make(folder):
        (folder / "own.py").touch()
        (folder / "script.py").write_text("""
import sys
from importlib.machinery import PathFinder

class Finder:
    def find_spec(name, path=None, target=None):
        if name == "own":
            import numpy

sys.meta_path.insert(sys.meta_path.index(PathFinder), Finder)
import own
""")

    both.alike(make, ["script.py"])


def test_a_program_without_numpy_is_not_told_of_ours(both):
    """A failing import of NumPy looks as it does in Python."""

    def make(folder):
        (folder / "numpy").mkdir()
        (folder / "numpy" / "__init__.py").write_text("def f(): 1 / 0\nimport os\nf()")
        (folder / "script.py").write_text("def g():\n    import numpy\ng()")

    both.alike(make, ["script.py"], status=1)


# ---- what else is run at the start

CUSTOM = {
    "prints": "print('customized', __name__, __file__, sys.path)",
    "fails to import": "import no_such_module",
    "fails": "raise ValueError('mine')",
    "a module of its name": "raise ImportError('x', name='sitecustomize')",
    "imports numpy": "import numpy",
    "changes the path": "sys.path.insert(0, 'x'); sys.path.append('y')",
    "starts python": "import subprocess\nif 'INNER' not in os.environ:\n"
    "    subprocess.run([sys.executable, '-c', 'import os; print(sorted(os.environ))'],"
    " env={**os.environ, 'INNER': ''})",
    "at exit": "import atexit; atexit.register(print, 'last of all')",
}


@pytest.mark.parametrize("how", CUSTOM)
@pytest.mark.parametrize("name", ["sitecustomize", "usercustomize"])
def test_the_own_customization_of_a_machine(both, name, how):
    if name == "usercustomize" and how not in ("prints", "fails"):
        pytest.skip("Python treats them alike")

    def make(folder):
        (folder / "site").mkdir()
        # The process of the command line is one of Python's, too.
        code = textwrap.indent(CUSTOM[how], "    ")
        (folder / "site" / f"{name}.py").write_text(
            f"import os, sys\nif 'run' not in sys.orig_argv:\n{code}"
        )
        (folder / "script.py").write_text(
            "import sys; print(sys.modules.get('sitecustomize'), sys.path)"
        )

    both.alike(make, ["script.py"], env={"PYTHONPATH": "HERE/site"}, status=None)


@pytest.mark.parametrize("python", [[], ["-E"]])
def test_a_long_path(both, python):
    """A variable of the environment has 128 KiB at most, and ours has this one in it."""

    def make(folder):
        (folder / "script.py").write_text(
            "import os, sys; print(os.environ['PYTHONPATH'], len(sys.path))"
        )

    path = os.pathsep.join(f"/nowhere/{at:09}" for at in range(6000))
    assert path[-9:] in both.alike(make, ["script.py"], python, {"PYTHONPATH": path})


CHILDREN = r"""
import os, subprocess, sys
sys.stdout.flush()
code = "import os, sys; print(sorted(os.environ.items()), sys.path, sorted(sys.modules))"
subprocess.run([sys.executable, "-c", code])
if len(sys.argv) == 1:
    os.execv(sys.executable, [sys.executable, sys.argv[0], "again"])
"""
INTERPRETERS = r"""
import sys, importlib
for name in "_xxsubinterpreters", "_interpreters":
    try: inner = importlib.import_module(name)
    except ImportError: continue
    one = inner.create()
    inner.run_string(one, "import sys, os; print(sys.path, sys.meta_path, 'atexit' in sys.modules,"
                     " os.environ.get('ARENAPY_RUN'), os.environ.get('PYTHONPATH'), flush=True)")
    inner.destroy(one)
    break
"""


@pytest.mark.parametrize("source", [CHILDREN, INTERPRETERS], ids=["children", "subinterpreters"])
@pytest.mark.parametrize("python", [[], ["-E"]])
def test_nothing_is_handed_on(both, source, python):
    def make(folder):
        (folder / "script.py").write_text(source)

    assert both.alike(make, ["script.py"], python, {"PYTHONPATH": "HERE/x"})


# ---- how a program is read, and how it ends

SOURCES = {
    "syntax": b"print(1)\na b\n",
    "indentation": b"if 1:\nx = 1\n",
    "no UTF-8": b"# \xff\nprint(1)\n",
    "cookie": b"# coding: latin-1\nprint('\xe4', ascii('\xe4'))\n",
    "wrong cookie": b"# coding: nothing\nprint(1)\n",
    "mark": b"\xef\xbb\xbfprint('marked')\n",
    "null": b"print(1)\0\n",
    "carriage returns": b"print(1)\rprint(2)\r\nprint('''a\r\nb''')\n",
    "no newline": b"print(1)",
    "empty": b"",
    "future": b"from __future__ import annotations\ndef f(x: y): pass\nprint(f.__annotations__)\n",
    "fails": FAILS.encode(),
    "exits": b"import sys; sys.exit('why')",
}


@pytest.mark.parametrize("stdin", [False, True], ids=["script", "stdin"])
@pytest.mark.full
def test_how_a_program_is_read(both, stdin):
    """All sources at once: a process starts each in its turn, by the line that is left to it."""
    for source in SOURCES.values():
        folder = both.folder / "sources"
        folder.mkdir()

        def make(folder, source=source):
            (folder / "script.py").write_bytes(source)

        if stdin:
            both.alike(make, ["-"], stdin="script.py", status=None)
        else:
            both.alike(make, ["script.py"], status=None)
        folder.rmdir()


ENDS = {
    "handlers and threads": """
        import atexit, threading, time, sys
        atexit.register(print, "first in, last out")
        ended = threading.Event()
        thread = threading.Thread(
            target=lambda: (ended.wait(), time.sleep(.2), print("thread")))
        thread.start()
        threading._register_atexit(print, "before threads")
        class Late:
            def __del__(self): print("deleted", sys and sys.is_finalizing())
        late = Late()
        import numpy
        atexit.register(print, "last in, first out")
        print("end of main")
        ended.set()
    """,
    "fault": """
        import faulthandler, os, sys
        faulthandler.enable(file=sys.stdout)
        def f(): os.abort()
        f()
    """,
    "stack on demand": """
        import faulthandler, sys, signal
        def f(): faulthandler.dump_traceback(sys.stdout)
        f()
        import numpy
        f()
    """,
    "unraisable": """
        class Bad:
            def __del__(self): raise ValueError("in del")
        Bad()
        sys = 3
    """,
    "in numpy's import": """
        import threading, sys
        threading.stack_size(1 << 20)
        sys.setrecursionlimit(200)
        import numpy
        print(numpy.__name__, sys.getrecursionlimit())
    """,
    "reads": """
        import sys
        print(input(), sys.stdin.readline(), sys.stdin.read())
    """,
}


@pytest.mark.parametrize("how", ENDS)
def test_how_a_program_ends(both, how):
    def make(folder):
        (folder / "script.py").write_text(textwrap.dedent(ENDS[how]))

    both.alike(make, ["script.py"], text="one\ntwo\nthree\nfour", status=None)


@pytest.mark.parametrize(("closed", "told"), [("0<&-", "None\n"), (">&-", "")])
def test_a_standard_file_that_is_closed(both, closed, told):
    def make(folder):
        (folder / "script.py").write_text("import sys, numpy; print(sys.stdin)")
        (folder / "run.sh").write_text(f'exec "$@" {closed}')

    found = []
    ours = ["-m", "arenapy", "run", "--quiet"]
    for start in [], ours, [*ours, "--trace", "../a.trace"]:
        folder = both.folder / "x"
        folder.mkdir()
        make(folder)
        done = subprocess.run(
            ["sh", "run.sh", sys.executable, *start, "script.py"], cwd=folder, text=True,
            capture_output=True, timeout=TIMEOUT, check=False,
        )  # fmt: skip
        found.append((done.returncode, done.stdout, done.stderr))
        shutil.rmtree(folder)
    assert found == [(0, told, "")] * 3


def test_a_message_where_standard_error_was_closed(tmp_path):
    """A file of the program's has its number."""
    (tmp_path / "out").mkdir()
    (tmp_path / "script.py").write_text(
        "import os; data = open('data', 'w'); print(data.fileno()); os.rmdir('out')"
    )
    line = [sys.executable, MAIN, "run", "--json", "out/a.json", "script.py"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", *line], cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, timeout=TIMEOUT, check=True,
    )  # fmt: skip
    assert done.stdout == "2\n" and (tmp_path / "data").read_text() == ""


def at_a_terminal(line, cwd, typed):
    """What a terminal shows."""
    import pty

    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.environ |= {"PYTHON_BASIC_REPL": "1", "TERM": "dumb", "PYTHONSTARTUP": ""}
        os.execv(sys.executable, [sys.executable, *line])
    shown = b""
    with contextlib.suppress(OSError):  # the other side is closed
        for text in typed:
            while not shown.endswith(b">>> ") and select.select([fd], [], [], TIMEOUT)[0]:
                shown += os.read(fd, 1 << 16)
            os.write(fd, text.encode())
            shown += b"|"
        while True:
            shown += os.read(fd, 1 << 16)
    os.close(fd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode()


@pytest.mark.full
def test_a_session_at_a_terminal(tmp_path):
    typed = ["1 + 1\n", "import numpy, sys\n", "1 / 0\n", "sys.exit(4)\n"]
    found = [
        at_a_terminal(line, tmp_path, typed) for line in (["-"], ["-m", "arenapy", "run", "-"])
    ]
    plain, ours = found
    assert plain[0] == ours[0] == 4
    assert split(ours[1])[0].strip() == plain[1].strip()
    assert "NumPy's memory from a pool" in ours[1]


# ---- what is handed to Python


@pytest.mark.parametrize(
    ("line", "flags"),
    [
        (["-m", "arenapy"], []),
        (["-mx"], []),
        (["-Im", "x"], ["-I"]),
        (["-I", "-Bum", "x", "-O"], ["-I", "-Bu"]),
        (["-W", "error", "-Xdev", "-X", "utf8", "/bin/arenapy"],
         ["-W", "error", "-Xdev", "-X", "utf8"]),
        (["-BWerror", "-c", "code", "-O"], ["-BWerror"]),
        (["-EW", "a::m.C", "script", "-I"], ["-EW", "a::m.C"]),
        (["--check-hash-based-pycs", "never", "-s", "script", "-O"],
         ["--check-hash-based-pycs", "never", "-s"]),
        (["--", "-script", "-O"], []),
        (["-"], []),
        ([], []),
    ],
)  # fmt: skip
def test_options_of_python_are_handed_on(monkeypatch, line, flags):
    monkeypatch.setattr(sys, "orig_argv", ["python", *line])
    assert run.interpreter() == [sys.executable, *flags]


def test_a_folder_that_cannot_be_in_a_path_is_refused(monkeypatch):
    """Without a word, the program would run without a pool."""
    monkeypatch.setattr(run, "STARTUP", f"/some{os.pathsep}where/startup")
    with pytest.raises(OSError, match=r"/some:where/startup.* without ':'"):
        run.start_of(run._read(["script.py"]), {})


@pytest.mark.parametrize(
    ("line", "left"),
    [
        (["-I"], []), (["-E"], []), (["-IB"], ["-B"]), (["-BEs"], ["-Bs"]),
        (["-EWerror::E"], ["-Werror::E"]), (["-IW", "E"], ["-W", "E"]), (["-Xdev"], ["-Xdev"]),
        (["--check-hash-based-pycs", "never", "-I"], ["--check-hash-based-pycs", "never"]),
    ],
)  # fmt: skip
def test_options_that_would_hide_us_are_not(line, left):
    assert run._seeing_environment(["python", *line]) == ["python", *left]
