"""Steps: what a machine did, as data that can be printed, kept in a file and done again.

What lives here: `Step` and `Program`, and the file to which a machine writes every step *before* it
runs, so that a crash of the process still says what led to it. What may not: what a step means,
which is the machine's business.

The file is JSON lines: first how the machine is imported, then a step each. It is written with
`os.write`, without a buffer of this process's that a crash would lose, and removed when the process
ends as it should.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arenapy.base.text import printable
from arenapy.linux import outputs

__all__ = ["Program", "Step", "load", "steps_path"]

VERSION = 1


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a machine.

    Attributes
    ----------
    name : str
        The method of the machine.
    arguments : mapping
        Its keyword arguments, as values that JSON can represent.

    Examples
    --------
    >>> from arenapy.testing import Step
    >>> print(Step("allocate_block", {"nbytes": 64, "align": None}))
    allocate_block(nbytes=64, align=None)
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """As the call that it is."""
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.arguments.items())})"

    def line(self) -> str:
        """The step as a line of a file.

        Raises
        ------
        TypeError
            If JSON cannot represent an argument, so that the step could not be replayed.
        """
        try:
            return json.dumps({"step": self.name, "arguments": dict(self.arguments)})
        except TypeError as error:
            raise TypeError(
                f"{self} cannot be written down ({error}): draw numbers, strings, lists and dicts, "
                "and make other objects of them in the rule"
            ) from error

    @classmethod
    def parse(cls, line: str) -> Step:
        """A step from its `line`.

        Raises
        ------
        ValueError
            If it is no such line.
        """
        try:
            found = _of(dict, json.loads(line))
            return cls(_of(str, found.get("step")), _of(dict, found.get("arguments")))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{line!r} is not a line of a step: {error}") from error


def _of(kind: Any, value: Any) -> Any:
    """The value, if it is of this kind."""
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not of type {getattr(kind, '__name__', kind)}")
    return value


@dataclass(frozen=True, slots=True)
class Program:
    """A sequence of steps.

    Attributes
    ----------
    steps : tuple of Step

    Notes
    -----
    Thread-safety: immutable.

    Examples
    --------
    >>> from arenapy.testing import BumpMachine, Program, Step
    >>> program = Program((
    ...     Step("start", {"config": {"nbytes": 4096, "max_bytes": None}}),
    ...     Step("allocate_block", {"nbytes": 100, "align": 64}),
    ...     Step("reset_all"),
    ... ))
    >>> print(program)
    start(config={'nbytes': 4096, 'max_bytes': None})
    allocate_block(nbytes=100, align=64)
    reset_all()
    >>> program.run(BumpMachine)
    3
    >>> Program.parse(program.lines()) == program
    True
    """

    steps: tuple[Step, ...]

    def __str__(self) -> str:
        """A call a line."""
        return "\n".join(map(str, self.steps))

    def __len__(self) -> int:
        """How many steps it has."""
        return len(self.steps)

    def __iter__(self) -> Iterator[Step]:
        """Step by step."""
        return iter(self.steps)

    def lines(self) -> list[str]:
        """Return the steps as lines of text, for a file."""
        return [step.line() for step in self.steps]

    @classmethod
    def parse(cls, lines: Iterable[str]) -> Program:
        """Return the program with these `lines`.

        Raises
        ------
        ValueError
            If a line is not the line of a step.
        """
        return cls(tuple(Step.parse(line) for line in lines))

    def run(self, machine: type[Any], *, echo: bool = False) -> int:
        """Run the steps with a new machine of this class, and check after each step.

        A step that is not possible at its time (a free without a live block) is left out.

        Parameters
        ----------
        machine : class
            A subclass of `AllocatorMachine`.
        echo : bool
            Print every step before it runs.

        Returns
        -------
        int
            The number of steps that ran.

        Raises
        ------
        AssertionError
            If the machine found an error. Unexpected exceptions of the allocator are passed on.
        """
        running = machine()
        running.steers = False  # towards long programs: older Hypothesis finds no end to that
        done = 0
        try:
            for step in self.steps:
                if echo:
                    print(printable(str(step)), flush=True)
                done += running.perform(step)
        finally:
            running.teardown()
        return done


# The file --------------------------------------------------------------------------------------


def steps_path() -> str:
    """The file to which this process writes its steps: ``ARENAPY_STEPS``, or a file named after the
    process.

    Examples
    --------
    >>> import os
    >>> from arenapy.testing import steps_path
    >>> str(os.getpid()) in steps_path() or "ARENAPY_STEPS" in os.environ
    True
    """
    default = os.path.join(tempfile.gettempdir(), f"arenapy-steps-{os.getpid()}.jsonl")
    return os.environ.get("ARENAPY_STEPS") or default


def _descriptor() -> int:
    """The file of this process. What is attacked may close it, and give its number to another."""
    fd, identity = _opened(os.getpid())
    try:
        if os.path.samestat(os.fstat(fd), identity):
            return fd
    except OSError:
        pass
    _opened.cache_clear()
    return _opened(os.getpid())[0]


@functools.lru_cache(maxsize=1)
def _opened(owner: int) -> tuple[int, os.stat_result]:
    path = steps_path()
    outputs.check(path, outputs.STEPS)
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o600)

    named_by_user = bool(os.environ.get("ARENAPY_STEPS"))  # now: it may change before the end

    def remove() -> None:
        # A process that gets here did not crash. Forked children leave the file alone.
        if os.getpid() == owner and not named_by_user and os.path.exists(path):
            os.unlink(path)

    atexit.register(remove)
    if multiprocessing := sys.modules.get("multiprocessing.util"):
        # Its children end without the functions of atexit.
        multiprocessing.Finalize(None, remove, exitpriority=0)
    return fd, os.fstat(fd)


def begin(recipe: Mapping[str, Any]) -> None:
    """Start the file of this process again: `recipe` says which machine the steps are of."""
    fd = _descriptor()
    os.ftruncate(fd, 0)
    os.write(fd, (json.dumps({"arenapy.testing": VERSION, **recipe}) + "\n").encode())


def write_down(step: Step) -> None:
    """Add a step to the file, before it runs."""
    os.write(_descriptor(), (step.line() + "\n").encode())


def load(path: str | os.PathLike[str]) -> tuple[type[Any], Program]:
    """The machine and the program of a file of steps.

    Parameters
    ----------
    path : path
        A file of steps from a machine; see `steps_path`.

    Returns
    -------
    tuple of (class, Program)

    Raises
    ------
    ValueError
        If it is not such a file, or its machine cannot be imported. A last step that was only
        written in part, as on a full disk, is left out.
    OSError
        If it cannot be read.

    Notes
    -----
    Thread-safety: importing has its own lock.

    Examples
    --------
    >>> from arenapy.testing import BumpMachine, Program, Step, load, steps_path
    >>> program = Program((Step("start", {"config": {"nbytes": 4096, "max_bytes": None}}),))
    >>> program.run(BumpMachine)
    1
    >>> machine, again = load(steps_path())
    >>> machine.__name__, again.steps[0] == program.steps[0]
    ('BumpMachine', True)
    """
    with open(os.fspath(path), "rb") as file:  # not the number of an open file
        text = file.read()
    try:
        first, *rest = text.decode().splitlines() or [""]
        if rest and not text.endswith(b"\n"):
            try:
                Step.parse(rest[-1])
            except ValueError:
                del rest[-1]  # the disk was full
        recipe = _of(dict, json.loads(first))
        if (version := recipe.get("arenapy.testing")) != VERSION:
            raise ValueError(f"its version is {version}, and not {VERSION}")
        program = Program.parse(rest)
        name, file = _of(str, recipe.get("machine")), _of(str | None, recipe.get("file"))
        arguments = _of(dict | None, recipe.get("arguments"))
        # The other kinds of faults that the search had set aside.
        allow = [_of(str, kind) for kind in _of(list | None, recipe.get("allow")) or ()]
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a file of steps of arenapy.testing: {error}") from error
    machine = find(name, file)
    if arguments is not None:
        try:
            machine = machine(**arguments)
        except TypeError as error:
            raise ValueError(f"{path}: {name} does not take these arguments: {error}") from error
    if not callable(getattr(machine, "recipe", None)):
        raise ValueError(f"{path}: {name} is not a class of machines, but {machine!r}")
    if allow:
        members = {"allow": (*machine.allow, *allow), "__module__": machine.__module__}
        machine = type(machine.__name__, (machine,), members)
    return machine, program


def find(name: str, file: str | None = None) -> Any:
    """Import the object that ``"package.module:object"`` names. `file` is its module's file.

    Raises
    ------
    ValueError
        There is no such thing, or it was made within a function.
    """
    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path) or name.startswith("."):
        raise ValueError(f"{name!r}: say it as package.module:object")
    if "<locals>" in path:
        raise ValueError(
            f"{name} was made within a function and cannot be imported: move it to the module"
        )
    found: Any = _module(module_name, file)
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise ValueError(f"{name!r}: {found!r} has no {part!r}") from None
    return found


def _module(name: str, file: str | None) -> Any:
    """Import it as the process did that wrote the file; a script or a test file by its path."""
    folders = [os.getcwd()]
    if file is not None and name != "__main__":
        path = Path(file).resolve()
        path = path.parent if path.stem == "__init__" else path  # a package's
        folders.append(str(path.parents[name.count(".")]))
    sys.path.extend(folder for folder in folders if folder not in sys.path)
    try:
        if name != "__main__":
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != name.partition(".")[0]:
            raise  # the module is there, and something that it needs is not
        if file is None:
            raise ValueError(f"there is no module {name!r} ({error})") from error
    if file is None or not os.path.exists(file):
        raise ValueError(f"there is no module {name!r}, and no file {file!r}")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file!r} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look there
    spec.loader.exec_module(module)
    return module
