"""Programs that coverage of an allocator's C code leads.

What lives here: running libFuzzer, and its report. What does not: the command line
(``arenapy.commands.testing``). Inputs run in another process
(guided_process.py), under atheris, which is libFuzzer for Python: libFuzzer mutates bytes,
Hypothesis makes a program of them (``fuzz_one_input``), a machine runs it, and bytes that reach new
edges of the extension modules are kept.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from arenapy.linux.child_process import child_process
from arenapy.testing.crashes import smaller
from arenapy.testing.guided_process import HANGS_AFTER, HEADER
from arenapy.testing.steps import Program

__all__ = ["MAX_NUMBER", "Found", "add_inputs", "by_chance", "environment", "guided", "minimize"]

PROCESS = "arenapy.testing.guided_process"
RUNTIME = "asan_with_fuzzer.so"  # atheris brings it: AddressSanitizer and libFuzzer in one
LONGEST = 2048  # bytes of an input: some 50 steps
SMALLER_SECONDS = 60.0
MAX_NUMBER = 2**31 - 1  # that libFuzzer reads
INPUT = re.compile(r"[0-9a-f]{8}|[0-9a-f]{40}")  # names, after the contents
ASAN = "detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=32"
UBSAN = "halt_on_error=1:print_stacktrace=1"


@dataclass(slots=True)
class Found:
    """The results of a run.

    Attributes
    ----------
    executions : int
        Inputs that ran.
    seconds : float
    modules : dict of str to (int, int)
        Of each instrumented module: edges reached, and edges in total.
    files : int
        Of the corpus, afterwards.
    nbytes : int
        Their bytes.
    lines : list of str
        The file of steps of the program that failed, made small; empty if none did.
    output : str
        The output of libFuzzer and the sanitizers.

    Notes
    -----
    Thread-safety: a plain value.

    Examples
    --------
    >>> from arenapy.testing.guided import Found
    >>> found = Found(1000, 2.0, {"core": (70, 100), "check": (5, 10)}, 12, 3456)
    >>> print(found)
    1000 executions in 2.0 s, 500 a second
    75 of 110 edges: core 70/100, check 5/10
    corpus: 12 files, 3456 bytes
    nothing found
    """

    executions: int
    seconds: float
    modules: dict[str, tuple[int, int]]
    files: int
    nbytes: int
    lines: list[str] = field(default_factory=list)
    output: str = ""

    @property
    def reached(self) -> int:
        """Edges reached, of all modules."""
        return sum(reached for reached, _ in self.modules.values())

    @property
    def total(self) -> int:
        """Edges that there are."""
        return sum(total for _, total in self.modules.values())

    def __str__(self) -> str:
        """As the command prints it."""
        rows = sorted(self.modules.items(), key=lambda row: -row[1][0])
        by_module = ", ".join(f"{name} {now}/{total}" for name, (now, total) in rows if now)
        return (
            f"{self.executions} executions in {self.seconds:.1f} s, "
            f"{self.executions / max(self.seconds, 1e-3):.0f} a second\n"
            f"{self.reached} of {self.total} edges: {by_module}\n"
            f"corpus: {self.files} files, {self.nbytes} bytes\n"
            + (f"found:\n{Program.parse(self.lines[1:])}" if self.lines else "nothing found")
        )


def environment(steps: Path | None = None) -> dict[str, str]:
    """The environment of a process with libFuzzer and the sanitizers in it.

    Parameters
    ----------
    steps : Path, optional
        Where it writes its steps.

    Raises
    ------
    RuntimeError
        atheris is not installed.
    """
    spec = importlib.util.find_spec("atheris")
    runtime = Path(spec.origin).parent.parent / RUNTIME if spec and spec.origin else None
    if runtime is None or not runtime.exists():
        raise RuntimeError("needs atheris, with its sanitizers: pip install atheris")
    return {
        **os.environ,
        "LD_PRELOAD": str(runtime),
        "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", ASAN),
        "UBSAN_OPTIONS": os.environ.get("UBSAN_OPTIONS", UBSAN),
        "PYTHONMALLOC": "malloc",
        "PYTHONSAFEPATH": "1",  # a tree that is not instrumented may lie right here
        **({"ARENAPY_STEPS": str(steps)} if steps else {}),
    }


def _process(
    target: str, corpus: str | os.PathLike[str], options: Sequence[str] = (), **job: Any
) -> Found:
    """Run the other process, and read what it left."""
    with tempfile.TemporaryDirectory(prefix="arenapy-guided-") as name:
        folder = Path(name)
        steps = folder / "steps.jsonl"
        left, named = folder / "figures", folder / "modules.json"
        corpus = Path(corpus).absolute()  # the code may go to another folder
        files = {"corpus": str(corpus), "figures": str(left), "modules": str(named)}
        job = {"target": target, "minimize": False, "by_chance": None, **files, **job}
        began = time.monotonic()
        # Not a pipe, which has no end while a process that the attacked code started has it, too.
        line = [sys.executable, "-m", PROCESS, json.dumps(job), *options]
        with (
            (folder / "output").open("wb") as file,
            child_process(
                line, env=environment(steps), stdout=file, stderr=subprocess.STDOUT
            ) as process,
        ):
            status = process.wait()
        seconds = time.monotonic() - began
        output = (folder / "output").read_text(errors="replace")
        figures = np.fromfile(left, "u1") if left.exists() else np.zeros(HEADER, "u1")
        executions, running = map(int, figures[:HEADER].view("u8"))
        has_failed = running or (left.exists() and status not in (0, 1))
        if not (steps.exists() if has_failed else named.exists()):
            raise RuntimeError(f"it ended before the first input:\n{output}")
        modules, start = {}, HEADER
        for module, total in json.loads(named.read_text() if named.exists() else "{}").items():
            modules[module] = int(np.count_nonzero(figures[start : start + total])), total
            start += total
        sizes = [path.stat().st_size for path in corpus.iterdir()]
        found = Found(executions, seconds, modules, len(sizes), sum(sizes), output=output)
        if has_failed:
            found.lines = smaller(steps.read_text().splitlines(), SMALLER_SECONDS, _fails)
        elif status:
            raise RuntimeError(f"it ended with status {status}, and not in a program:\n{output}")
    return found


def _fails(lines: list[str]) -> bool:
    """True if the steps of a file, done again under the sanitizers, find something."""
    with tempfile.TemporaryDirectory(prefix="arenapy-again-") as name:
        path = Path(name) / "again.jsonl"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        with child_process(
            [sys.executable, "-m", "arenapy.testing", "reproduce", str(path)],
            env=environment(Path(name) / "steps.jsonl"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            try:
                return process.wait(timeout=HANGS_AFTER) not in (0, 2)
            except subprocess.TimeoutExpired:
                return True


def guided(
    target: str,
    corpus: str | os.PathLike[str],
    *,
    seconds: float = 60,
    executions: int | None = None,
    seed: int = 0,
) -> Found:
    """Fuzz until something is found, or the time is over.

    Parameters
    ----------
    target : str
        ``"package.module:name"`` of an `AllocatorMachine`, or of what makes an allocator. The
        extension modules behind it are built with clang, by
        ``-fsanitize=address,undefined,fuzzer-no-link``.
    corpus : path
        A folder: inputs that are there run first, what reaches new edges is added.
    seconds : float
        At most; the start not counted.
    executions : int, optional
        At most.
    seed : int
        Of libFuzzer; 0 takes another one every time.

    Returns
    -------
    Found

    Raises
    ------
    RuntimeError
        atheris is not installed, or the target cannot be attacked.

    Notes
    -----
    Thread-safety: the work is done by a process of its own.
    """
    Path(corpus).mkdir(parents=True, exist_ok=True)
    options = [
        str(Path(corpus).absolute()),
        f"-max_total_time={max(round(seconds), 1)}",
        f"-runs={-1 if executions is None else executions}",
        f"-max_len={LONGEST}",
        f"-timeout={HANGS_AFTER}",
        f"-seed={seed}",
        "-rss_limit_mb=4096",
        "-artifact_prefix=" + tempfile.gettempdir() + "/arenapy-guided-",
        "-len_control=0",  # short inputs are programs of no steps
    ]
    return _process(target, corpus, options)


def minimize(target: str, corpus: str | os.PathLike[str]) -> Found:
    """Remove the files of a corpus that reach nothing which smaller ones do not.

    Parameters
    ----------
    target : str
        As in `guided`.
    corpus : path
        A folder.

    Returns
    -------
    Found
        `Found.executions` is the number of files that stay.

    Raises
    ------
    RuntimeError
        As in `guided`; or the folder has files that no run of this module made, and that might be
        removed. `add_inputs` copies them in under names of their own.

    Notes
    -----
    Thread-safety: nobody else may use the folder.
    """
    _refuse_other_files(corpus)
    return _process(target, corpus, minimize=True)


def add_inputs(corpus: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Copy the files of a folder into a corpus, each under the name that its contents give it.

    Parameters
    ----------
    corpus, folder : path
        The corpus is made if it is not there.

    Raises
    ------
    RuntimeError
        As in `minimize`.
    """
    Path(corpus).mkdir(parents=True, exist_ok=True)
    _refuse_other_files(corpus)
    for path in filter(Path.is_file, Path(folder).iterdir()):
        data = path.read_bytes()
        Path(corpus, hashlib.sha1(data).hexdigest()).write_bytes(data)


def _named(path: Path) -> str:
    """The name that its contents give a file, as long as the one that it has."""
    return hashlib.sha1(path.read_bytes()).hexdigest()[: len(path.name)]


def _refuse_other_files(corpus: str | os.PathLike[str]) -> None:
    for path in sorted(Path(corpus).iterdir()):
        if not (INPUT.fullmatch(path.name) and path.is_file() and path.name == _named(path)):
            raise RuntimeError(
                f"{str(path)!r} is not an input that was found here, and minimizing removes files: "
                "keep it elsewhere, or give its folder with --merge to a new --corpus"
            )


def by_chance(target: str, *, seconds: float = 60) -> Found:
    """Run programs that nothing leads, to see what guidance is worth.

    Parameters
    ----------
    target : str
        As in `guided`.
    seconds : float
        To go on for.

    Returns
    -------
    Found
        It has no corpus.

    Raises
    ------
    RuntimeError
        As in `guided`.

    Notes
    -----
    Thread-safety: the work is done by a process of its own.
    """
    with tempfile.TemporaryDirectory(prefix="arenapy-chance-") as nothing:
        return _process(target, nothing, by_chance=seconds)
