"""The process of ``arenapy run``: a program as Python itself would run it, and a report at its end.

    python arenapy/run_program.py OPTIONS SCRIPT|MODULE [args]

What lives here: being `python SCRIPT`. OPTIONS is JSON, made by run.py. What does not: the pool and
the figures (run_report.py).

This file is run by its path in a fresh interpreter, and imports the standard library only. NumPy,
and arenapy, which needs it, come when the program imports NumPy: what the program sets before that
(``OMP_NUM_THREADS``, say) has its effect, and a program without NumPy pays nothing.

Nothing is exported to child processes, and a forked child does not report. An exception leaves by
the way it would have, through the interpreter's own end, with our frames taken off its traceback.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # the folder of this file, whose names are not for everybody

import atexit
import builtins
import contextlib
import importlib.util
import io
import json
import os
import pkgutil
import resource
import runpy
import time
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec, SourceFileLoader, SourcelessFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Any

__all__ = ["AfterImport", "Session", "main"]

EXIT_CANNOT_OPEN = 2  # as Python has it


class AfterImport:
    """A finder that finds nothing: calls `then()` once all of `names` that began have ended.

    arenapy imports NumPy; if it is the program that imports arenapy, then both have to be there.
    It takes itself away when it is no longer needed, and leaves nothing behind in the loaders.
    """

    def __init__(self, names: tuple[str, ...], then: Callable[[], object]) -> None:
        self.names = names
        self.then = then
        self.under_way = 0

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the other finders find, with a loader that tells."""
        if name not in self.names:
            return None
        for finder in sys.meta_path:
            if finder is not self:
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    self._tell(spec.loader)
                    return spec
        return None

    def _tell(self, loader: Any) -> None:
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            self.under_way += 1
            try:
                run(module)
            finally:
                self.under_way -= 1
            if not self.under_way and self in sys.meta_path:
                sys.meta_path.remove(self)
                self.then()

        loader.exec_module = exec_module


class Session:
    """One program: its pool, once there is one, and what is said at the end."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.pid = os.getpid()
        self.memory: Any = None  # a run_report.ProgramMemory
        self.began = time.perf_counter()
        self.faults = _minor_faults()

    def begin(self) -> None:
        """NumPy is there: from now on its arrays are in a pool."""
        try:
            _import_arenapy(self.options["package"])
            from arenapy.run_report import ProgramMemory

            self.memory = ProgramMemory(self.options)
        except (ImportError, MemoryError, OSError, ValueError) as error:
            raise SystemExit(f"arenapy run: {error}") from None

    def program_ended(self) -> None:
        """The program's own code has ended; threads and exit handlers may go on."""
        if self.memory is not None and os.getpid() == self.pid:
            self.memory.see_threads()

    def report(self) -> None:
        """Say what there is to say. Never changes how the process ends."""
        if os.getpid() != self.pid:
            return
        try:
            seconds = time.perf_counter() - self.began
            figures = {
                "program": sys.argv[:1],
                "seconds": seconds,
                "minor_faults": _minor_faults() - self.faults,
                "numpy": self.memory is not None,
            }
            text = "arenapy run: the program did not import NumPy, so there was no pool\n"
            if self.memory is not None:
                self.memory.end_trace()
                figures |= self.memory.figures()
                text = self.memory.text(figures)
            errors = sys.__stderr__
            if self.options["report"] and errors is not None and not errors.closed:
                errors.write(text)
                errors.flush()
            if self.options["json"]:
                with open(self.options["json"], "w", encoding="utf-8") as file:
                    json.dump(figures, file, indent=2)
                    file.write("\n")
        except (OSError, ValueError) as error:  # a closed or full file
            with contextlib.suppress(OSError):
                os.write(2, f"arenapy run: no report: {error}\n".encode(errors="replace"))


def _minor_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _import_arenapy(package: str) -> None:
    """That of this file, wherever the program looks for its own modules."""
    if "arenapy" in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        "arenapy", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["arenapy"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules["arenapy"]
        raise


# ---- as Python does it


def _new_main() -> ModuleType:
    """A ``__main__`` that has what Python gives it, and nothing of this file."""
    old = vars(sys.modules["__main__"])
    new = ModuleType("__main__")
    vars(new)["__builtins__"] = builtins
    if "__annotations__" in old and sys.version_info < (3, 14):
        new.__annotations__ = {}
    sys.modules["__main__"] = new
    return new


def _read_code(path: str) -> tuple[CodeType, type]:
    """A script's code, and what would have loaded it; it may be a ``.pyc``."""
    try:
        with io.open_code(path) as file:
            code = pkgutil.read_code(file)
            if code is not None:
                return code, SourcelessFileLoader
            file.seek(0)
            source = file.read()
    except OSError as error:
        print(
            f"arenapy run: can't open file {path!r}: [Errno {error.errno}] {error.strerror}",
            file=sys.stderr,
        )
        raise SystemExit(EXIT_CANNOT_OPEN) from None
    return compile(source, path, "exec", dont_inherit=True), SourceFileLoader


def _absolute(path: str) -> str:
    """As Python has it in ``__file__``: as it was said, after the current folder."""
    return os.path.join(os.getcwd(), path)


def _run_script(script: str) -> None:
    path = _absolute(script)
    namespace = vars(_new_main())
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    code, loader = _read_code(path)
    namespace.update(__file__=path, __cached__=None, __loader__=loader("__main__", path))
    if sys.version_info >= (3, 15):
        del namespace["__cached__"]
    exec(code, namespace)


def _run_module(module: str) -> None:
    _new_main()
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    sys.argv[0] = "-m"  # as long as the module is looked for
    runpy._run_module_as_main(module)  # type: ignore[attr-defined]


def _run_folder(folder: str) -> None:
    """A folder or a zip file with a ``__main__.py``."""
    _new_main()
    sys.path.insert(0, _absolute(folder))
    runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]


def _frames_of(error: BaseException) -> TracebackType | None:
    """Its traceback without what is of this file."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    return traceback


def run(program: str, module: bool) -> None:
    """Run it as ``__main__``; its exceptions pass, and are shown without the frames of this."""
    try:
        if module:
            _run_module(program)
        elif pkgutil.get_importer(program) is not None:
            _run_folder(program)
        else:
            _run_script(program)
    except SystemExit:
        raise
    except BaseException as error:
        hook, traceback = sys.excepthook, _frames_of(error)

        def without_us(
            kind: type[BaseException], value: BaseException, _: TracebackType | None
        ) -> None:
            sys.excepthook = hook
            sys.last_traceback = value.__traceback__ = traceback
            hook(kind, value, traceback)

        sys.excepthook = without_us
        raise


def main() -> None:
    """Run the program of the command line."""
    options, program = json.loads(sys.argv[1]), sys.argv[2]
    sys.argv[:] = sys.argv[2:]
    sys.orig_argv[:] = [*options["python"], *["-m"] * options["module"], *sys.argv]
    session = Session(options)
    atexit.register(session.report)  # the first one in: after all those of the program
    sys.meta_path.insert(0, AfterImport(("numpy", "arenapy"), session.begin))
    try:
        run(program, options["module"])
    finally:
        session.program_ended()


if __name__ == "__main__":
    main()
