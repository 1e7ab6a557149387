"""Python imports this before the program of ``arenapy run``: the pool will come with NumPy.

``arenapy run SCRIPT`` becomes ``python SCRIPT``, with this folder first in PYTHONPATH. Python
imports a module ``sitecustomize`` before it looks at the program, and so finds this one. The rest
is Python's own business: where modules come from, what ``__main__`` is, how the program is read,
how it ends, what a traceback shows. ``arenapy compare`` starts programs so, too, without a pool as
well, to learn when NumPy was there.

What lives here: taking back what brought this module here, so that neither the program nor its
child processes can tell; waiting for NumPy; the report at the end. What does not: the pool and the
figures (report.py), the command line (command.py).

At once this imports only what is built into Python: the program may have modules of the same names
as the standard library's, and a program without NumPy pays nothing. NumPy, and arenapy, which needs
it, come when the program imports NumPy: what the program sets before that (``OMP_NUM_THREADS``,
say) has its effect. A forked child does not report, nor record.
"""

import _thread
import marshal
import os
import sys
import time

# The parts of importlib that are frozen into Python: the module is another import.
from _frozen_importlib import (
    BuiltinImporter,
    FrozenImporter,
    module_from_spec,
    spec_from_loader,
)
from _frozen_importlib_external import PathFinder, spec_from_file_location

TYPE_CHECKING = False  # without importing typing
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

__all__ = ["AfterImport", "Session"]

FOLDER = os.path.dirname(__file__)
PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(FOLDER)))
OPTIONS = "ARENAPY_RUN"  # the environment variable; command.py writes it
# Why a trace cannot be written, without an errno; see linux/outputs.
REFUSED_FILE = (
    BlockingIOError, FileExistsError, FileNotFoundError, IsADirectoryError, PermissionError
)  # fmt: skip


class AfterImport:
    """A finder that finds nothing: calls `then()` once all of `names` that began have ended.

    arenapy imports NumPy; if it is the program that imports arenapy, then both have to be there.
    It takes itself away when it is no longer needed, and changes no loader.
    """

    def __init__(self, names: tuple[str, ...], then: "Callable[[], object]") -> None:
        self.names = names
        self.then = then
        self.under_way = 0

    def find_spec(
        self, name: str, path: "Any" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """The spec that the other finders find, with a loader that calls us when it has ended."""
        if name not in self.names:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is not self and find is not None:
                spec: ModuleSpec | None = find(name, path, target)
                if spec is not None:
                    self._wait_for(spec)
                    return spec
        return None

    def _wait_for(self, spec: "ModuleSpec") -> None:
        """A loader that Python runs in an old way is left alone, and so is a spec of odd kind."""
        loader: Any = spec.loader
        if type(loader) is not _Telling and hasattr(loader, "exec_module"):
            try:  # noqa: SIM105  # contextlib is not built in
                spec.loader = _Telling(loader, self)  # type: ignore[assignment]
            except Exception:
                pass

    def load(self, loader: "Any", module: "ModuleType") -> None:
        self.under_way += 1
        try:
            loader.exec_module(module)
        finally:
            self.under_way -= 1
        if not self.under_way and self.names and self in sys.meta_path:
            self.names = ()  # the program may put back a list with this in it
            _remove_finders(lambda finder: finder is self)
            self.then()


class _Telling:
    """A module's loader that calls us when it has ended. While it runs, nothing is left of this.

    A loader may be that of many modules, and of a class that allows no other attributes. So it is
    not changed.
    """

    def __init__(self, loader: "Any", finder: AfterImport) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> "Any":
        return getattr(self._loader, name)

    def __reduce_ex__(self, protocol: "Any") -> "Any":
        return self._loader.__reduce_ex__(protocol)

    @property  # type: ignore[misc]
    def __class__(self) -> "Any":
        return type(self._loader)

    def exec_module(self, module: "ModuleType") -> None:
        for where, name in (getattr(module, "__spec__", None), "loader"), (module, "__loader__"):
            if getattr(where, name, None) is self:
                setattr(where, name, self._loader)
        self._finder.load(self._loader, module)


# Python takes the frames of imports off a traceback, and knows them by their file.
for _one in AfterImport.load, _Telling.exec_module:
    _one.__code__ = _one.__code__.replace(co_filename="<frozen importlib._bootstrap>")


class _InThisThread:
    """A finder that finds modules on `path` for the thread that made it, and for it alone.

    Other threads find the modules that are `hidden` from this one, and that they have imported.
    """

    def __init__(self, path: list[str], hidden: "dict[str, ModuleType]") -> None:
        self.path = path
        self.hidden = hidden
        self.thread = os.getpid(), _thread.get_ident()  # a forked child has other threads
        self.found: set[str] = set()

    def find_spec(
        self, name: str, path: "Any" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if (os.getpid(), _thread.get_ident()) != self.thread:
            loader: Any = self
            return spec_from_loader(name, loader) if name in self.hidden else None
        if path is not None:  # a package's
            return None
        spec = (
            BuiltinImporter.find_spec(name)
            or FrozenImporter.find_spec(name)
            or PathFinder.find_spec(name, self.path)
        )
        if spec is not None:
            self.found.add(name)
        return spec

    def create_module(self, spec: "ModuleSpec") -> "ModuleType":
        module = self.hidden[spec.name]
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: "ModuleType") -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state  # the import has put its own there


class Session:
    """One program: its pool, once there is one, and what is said at the end."""

    def __init__(self, options: "dict[str, Any]") -> None:
        self.options = options
        self.path = sys.path[:]
        self.memory: Any = None  # a report.ProgramMemory
        self.refused = False  # it cannot be, which was said
        self.marks: list[dict[str, Any]] = []
        self.clock = time.perf_counter
        self.began = self.clock()
        self.faults = _minor_faults()

    def begin(self) -> None:
        """NumPy is there: from now on its arrays are in a pool."""
        if "numpy" in sys.modules and not any(map(_is_numpys_core, sys.modules.copy())):
            return  # another module has this name
        try:
            if self.options["pool"]:
                self.memory = self.apart(self._memory)
            self._measured("ready")
        except (ImportError, MemoryError, OSError, ValueError) as error:
            if (
                isinstance(error, OSError)
                and not isinstance(error, REFUSED_FILE)
                and (error.errno is None or isinstance(error, TimeoutError))
            ):  # of a signal's handler; see base/system_errors, which may not be there
                raise
            self.refused = True
            raise SystemExit(f"arenapy run: {error}") from None

    def _memory(self) -> object:
        _import_arenapy()
        from arenapy._platform import require_numpy

        require_numpy()
        from arenapy.commands.run.report import ProgramMemory

        # A forked child that imports NumPy gets a pool, too. The trace is the program's.
        trace = self.options["trace"] if self._in_program() else None
        return ProgramMemory({**self.options, "trace": trace})

    def _in_program(self) -> bool:
        """False in a forked child."""
        return bool(os.getpid() == self.options["pid"])

    def report(self) -> None:
        """Say what there is to say. Never changes how the process ends."""
        if not self._in_program():
            return
        if self.options["measured"] is not None:
            self._measured("ended")
            return
        # The program has ended: what the report imports is no reason to begin.
        _remove_finders(lambda finder: isinstance(finder, AfterImport))
        try:
            self.apart(self._report)
        except Exception as error:  # a closed or full file, or what the program did to `sys`
            _say(f"the report is not complete: {error}")
        if _interrupted():
            # Python has noted that, to end by SIGINT, and forgets it at any exec() of a text, as
            # those of `typing`, which the report imports.
            try:  # noqa: SIM105  # contextlib is not built in
                exec("raise KeyboardInterrupt")
            except KeyboardInterrupt:
                pass

    def _measured(self, when: str) -> None:
        """Write down what was measured, for ``arenapy compare``; what fails is left out."""
        if self.options["measured"] is None or not self._in_program():
            return
        memory = self.memory.measured() if self.memory is not None else {}
        found = {**memory, "when": when, "now": self.clock(), "kernel": os.times().system}
        try:
            with open("/proc/self/schedstat", "rb") as file:
                found["waited"] = int(file.read().split()[1]) / 1e9
        except OSError:  # a kernel without it
            found["waited"] = 0.0
        self.marks.append(found)
        try:
            with open(self.options["measured"], "wb") as file:
                file.write(marshal.dumps(self.marks))
        except OSError:
            pass

    def _report(self) -> None:
        minor_faults = _minor_faults
        # First: what follows may want a descriptor, and there is none.
        if self.memory is not None and not self.memory.end_trace() and not self.options["report"]:
            _say(self.memory.traced)  # a report has it
        if not self.options["report"] and self.options["json"] is None:
            return
        if self.memory is not None:
            from arenapy.linux.vm import minor_faults
        figures = {
            "report": "arenapy run",
            "program": list(map(str, getattr(sys, "argv", None) or ()))[:1],
            "seconds": self.clock() - self.began,
            "minor_faults": minor_faults() - self.faults,
            "numpy": self.memory is not None,
        }
        text = "arenapy run: the program did not import NumPy, so there was no pool\n"
        if "numpy" in sys.modules:
            text = "arenapy run: the program has its own numpy or finder, so there was no pool\n"
        if self.memory is not None:
            figures |= self.memory.figures()
            text = self.memory.text(figures)
        errors = None if self.refused else getattr(sys, "__stderr__", None)
        try:
            if self.options["json"] is not None:
                import json

                _import_arenapy()
                from arenapy.linux import outputs

                data = (json.dumps(figures, indent=2) + "\n").encode()
                outputs.write(self.options["json"], data, outputs.report("arenapy run"))
        finally:
            if self.options["report"] and errors is not None and not errors.closed:
                errors.write(text)
                errors.flush()

    def apart(self, act: "Callable[[], Any]") -> "Any":
        """`act()`, whose imports are those of an interpreter without this program.

        A module of the program's may have the name of one of the standard library's. It is out of
        sight meanwhile; and one that is imported now and that the program has its own of is
        forgotten afterwards, so that the program gets its own.

        Other threads of the program import meanwhile, and find what they find without us. There is
        one exception: if a thread now imports a module of the program's that has the name of a
        module which arenapy needs from the standard library, either of them may get the other's.
        """
        known = sys.modules.copy()
        tops = {_top(name) for name in known} & sys.stdlib_module_names
        tops = {top for top in tops if self._is_of_program(top)}
        hidden = {name: module for name, module in known.items() if _top(name) in tops}
        for name in hidden:
            sys.modules.pop(name, None)
        before, finder = set(sys.modules), _InThisThread(self.path, hidden)
        _set_finders([finder, *sys.meta_path])
        try:
            return act()
        finally:
            _remove_finders(lambda one: one is finder)
            own = [folder for folder in sys.path if folder not in self.path]
            forgotten = {top for top in finder.found if top in tops or _finds(top, own)}
            for name in set(sys.modules) - before:
                if _top(name) in forgotten:
                    sys.modules.pop(name, None)
            sys.modules.update(hidden)

    def _is_of_program(self, name: str) -> bool:
        """True if a module comes from a folder in which the interpreter alone does not look.

        Also if it comes from nowhere: the program put something in its place, perhaps None.
        """
        module = sys.modules.get(name)
        spec, file = getattr(module, "__spec__", None), getattr(module, "__file__", None)
        if getattr(spec, "origin", None) in ("built-in", "frozen"):
            return False
        if not isinstance(file, str):
            return True
        folder, base = os.path.split(file)
        if base.startswith("__init__."):
            folder = os.path.dirname(folder)
        return folder not in self.path


def _interrupted() -> bool:
    """True if the program has ended by a KeyboardInterrupt."""
    if sys.flags.inspect or os.environ.get("PYTHONINSPECT"):
        return False  # what was typed afterwards decides
    error = getattr(sys, "last_value", None)
    trace = getattr(error, "__traceback__", None)
    # One that a console of the program's has shown came through the console's frames.
    return type(error) is KeyboardInterrupt and (trace is None or trace.tb_frame.f_back is None)


def _say(text: str) -> None:
    """Write a line to the process's standard error, whatever the program did to `sys.stderr`."""
    if getattr(sys, "__stderr__", None) is None:
        return  # it was closed, and a file of the program's may have its number
    try:  # noqa: SIM105  # contextlib is not built in
        os.write(2, f"arenapy run: {text}\n".encode(errors="replace"))
    except OSError:
        pass


def _remove_finders(these: "Callable[[object], bool]") -> None:
    _set_finders([finder for finder in sys.meta_path if not these(finder)])


def _set_finders(finders: "list[Any]") -> None:
    """Keep the list if another module has it (`from sys import meta_path`), and nobody reads it.

    Who reads a list that becomes shorter skips an item.
    """
    now = sys.meta_path
    if type(now) is list and _others_have(now) and not _thread._count() and not _is_read(now):
        now[:] = finders
    else:
        sys.meta_path = finders


def _others_have(one: object) -> bool:
    of_a_module: dict[str, list[Any]] = {"": []}
    another = of_a_module[""]
    return sys.getrefcount(one) > sys.getrefcount(another) + 1  # `now`


def _is_read(one: "list[Any]") -> bool:
    """True if there is an iterator over it, in a loop of importlib's, say."""
    import gc  # seldom needed, and built in

    iterators = type(iter(one)), type(reversed(one))
    return any(isinstance(other, iterators) for other in gc.get_referrers(one))


def _top(name: str) -> str:
    return name.partition(".")[0]


def _is_numpys_core(name: str) -> bool:
    return name.startswith("numpy.") and name.endswith("core._multiarray_umath")


def _finds(name: str, path: list[str]) -> bool:
    """True if there is a module of this name on the path."""
    return PathFinder.find_spec(name, path) is not None


def _import_arenapy() -> None:
    """Import this very package, wherever the program looks for its own modules."""
    if "arenapy" in sys.modules:
        return
    path = os.path.join(PACKAGE, "__init__.py")
    spec = spec_from_file_location("arenapy", path, submodule_search_locations=[PACKAGE])
    assert spec is not None and spec.loader is not None
    sys.modules["arenapy"] = module_from_spec(spec)
    vars(sys.modules["arenapy"])["_at_first_use"] = True
    try:
        spec.loader.exec_module(sys.modules["arenapy"])
    except BaseException:
        del sys.modules["arenapy"]
        raise


def _minor_faults() -> int:
    """Of this process, as `resource` has it, which is not built in."""
    with open("/proc/self/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[7])


def _leave_no_trace() -> "dict[str, Any] | None":
    """Put back what brought this module here. The options; None: this is not the program."""
    sys.path.remove(FOLDER)
    sys.path_importer_cache.pop(FOLDER, None)
    del sys.modules["sitecustomize"]
    text = os.environ.pop(OPTIONS, None)
    if text is None:
        return None  # a subinterpreter
    options: dict[str, Any] = eval(text)
    for name, value in options["environment"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if options["pid"] != (os.getpid() if options["measured"] is None else os.getppid()):
        return None  # a process that a .pth file started
    options["pid"] = os.getpid()
    if options["flags"]:
        sys.orig_argv[: options["line_words"]] = options["python"]
        _set_flags(options["flags"])
    return options


def _set_flags(values: dict[str, int]) -> None:
    """Set `sys.flags` as -E and -I do. Python runs without them, as they would hide PYTHONPATH."""
    before, known = set(sys.modules), set(sys.path_importer_cache)
    import ctypes

    set_item = ctypes.pythonapi.PyStructSequence_SetItem
    set_item.argtypes = ctypes.py_object, ctypes.c_ssize_t, ctypes.py_object
    set_item.restype = None
    for name, value in values.items():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))  # the item that sys.flags owns
        set_item(sys.flags, type(sys.flags).__match_args__.index(name), value)
    for name in set(sys.modules) - before:
        if not name.startswith("_"):
            del sys.modules[name]
    for folder in set(sys.path_importer_cache) - known:
        del sys.path_importer_cache[folder]


def _begin() -> None:
    options = _leave_no_trace()
    if options is None:
        return
    import atexit

    session = Session(options)
    atexit.register(session.report)  # the first one in: after all those of the program
    if "numpy" in sys.modules:
        session.begin()
    else:
        sys.meta_path.insert(0, AfterImport(("numpy", "arenapy"), session.begin))


if __name__ == "sitecustomize":  # and not imported as a module of arenapy's
    _begin()

    # This machine's own; if there is none, Python expects this error.
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
