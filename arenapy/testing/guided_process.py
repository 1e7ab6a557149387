"""The process in which ``python -m arenapy.testing guided`` runs programs, and which may crash.

What lives here: an input's way to a program, libFuzzer's loop, and the choice of inputs that are
worth keeping. What may not: the command and its report (guided.py). Figures are written to a file
that both processes map, so that they are there whatever ends this one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings

from arenapy.testing.attack import machine_for
from arenapy.testing.edges import Edges
from arenapy.testing.machine import AllocatorMachine
from arenapy.testing.steps import find
from arenapy.testing.strategies import programs

__all__ = ["HANGS_AFTER", "HEADER", "by_chance", "kept", "machine_named", "target_of"]

# An input that ends too early would run nothing: to Hypothesis, zeros end lists and are first
# choices.
PADDING = bytes(1 << 14)
# Bytes before the edges in the file of figures: two numbers, how many inputs ran, and whether the
# last one has not ended, or failed.
HEADER = 16
HANGS_AFTER = 60  # seconds
NAME = 8  # letters of a file's


def machine_named(name: str) -> type[AllocatorMachine]:
    """The class of machines ``"package.module:name"``, or one for the allocator that this makes.

    Raises
    ------
    ValueError
        It cannot be imported, or does not make an allocator.
    """
    found = find(name)
    if isinstance(found, type) and issubclass(found, AllocatorMachine):
        return found
    return machine_for(name)


def target_of(machine: type[AllocatorMachine]) -> Callable[[bytes], Any]:
    """A function that runs the program that an input stands for.

    Parameters
    ----------
    machine : class
        A subclass of `AllocatorMachine`.

    Returns
    -------
    callable
        Of bytes; it raises what the machine finds. The input comes first in what it draws from, and
        zeros after it.

    Examples
    --------
    >>> from arenapy.testing import BumpMachine
    >>> from arenapy.testing.guided_process import target_of
    >>> class Mine(BumpMachine):
    ...     pass
    >>> run = target_of(Mine)
    >>> run(b""), Mine.tally.examples
    (None, 1)
    """

    @settings(database=None, deadline=None)
    @given(programs(machine))
    def test(program: Any) -> None:
        program.run(machine)

    one_input = test.hypothesis.fuzz_one_input  # type: ignore[attr-defined]

    def run(data: bytes) -> None:
        one_input(data + PADDING)

    return run


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    """SIGALRM ends the process if a program hangs. libFuzzer does that by itself."""
    signal.alarm(HANGS_AFTER)
    try:
        yield
    finally:
        signal.alarm(0)


def kept(
    folder: str | os.PathLike[str], run: Callable[[bytes], Any], edges: Edges
) -> tuple[list[Path], np.ndarray[Any, Any]]:
    """The files of a corpus that reach what smaller ones do not, and what they reach together.

    Parameters
    ----------
    folder : path
    run : callable
        See `target_of`.
    edges : Edges

    Returns
    -------
    tuple of (list of Path, array of bool)
    """
    reached = np.zeros(edges.total, "?")
    chosen = []
    for path in sorted(Path(folder).iterdir(), key=lambda one: (one.stat().st_size, one.name)):
        edges.zero()
        with _time_limit():
            run(path.read_bytes())
        now = edges.read() != 0
        if (now & ~reached).any():
            reached |= now
            chosen.append(path)
    return chosen, reached


def by_chance(
    machine: type[AllocatorMachine],
    seconds: float,
    watch: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Run the programs that Hypothesis makes by itself: what guidance is compared with.

    Parameters
    ----------
    machine : class
        A subclass of `AllocatorMachine`.
    seconds : float
        To go on for.
    watch : callable
        It returns a context manager, which is entered around each program.
    """

    @settings(
        database=None,
        deadline=None,
        phases=[Phase.generate],
        max_examples=100,
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(machine))
    def test(program: Any) -> None:
        with watch(), _time_limit():
            program.run(machine)

    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        test()


def main(argv: Sequence[str]) -> None:
    """``PROCESS JOB LIBFUZZER_OPTION...``; the job is JSON."""
    job = json.loads(argv[1])
    machine = machine_named(job["target"])
    run = target_of(machine)
    numbers = np.memmap(job["figures"], "u8", "w+", shape=(HEADER // 8,))
    numbers[1] = True
    with _time_limit():
        run(b"")  # what is done once, such as imports, is no merit of the first input
    numbers[1] = False
    edges = Edges()
    if not edges.total:
        raise SystemExit(
            f"no extension module that {job['target']} uses counts edges: build it with clang, by "
            "-fsanitize=address,undefined,fuzzer-no-link"
        )
    Path(job["modules"]).write_text(json.dumps(edges.modules), encoding="utf-8")
    seen = np.memmap(job["figures"], "u1", "r+", offset=HEADER, shape=(edges.total,))
    if job["minimize"]:
        numbers[1] = True
        chosen, reached = kept(job["corpus"], run, edges)
        numbers[:] = len(chosen), False
        seen[:] = reached
        for path in Path(job["corpus"]).iterdir():
            if path not in chosen:
                path.unlink()
        for path in chosen:
            path.rename(path.with_name(hashlib.sha1(path.read_bytes()).hexdigest()[:NAME]))
        return

    @contextlib.contextmanager
    def watch() -> Iterator[None]:
        numbers[:] = numbers[0] + 1, True
        edges.zero()  # as libFuzzer does
        try:
            yield
            numbers[1] = False
        finally:
            np.maximum(seen, edges.read(), out=seen)

    if job["by_chance"] is not None:
        try:
            by_chance(machine, job["by_chance"], watch)
        except BaseException:
            numbers[1] = True  # the last program may have passed, and an earlier one not
            raise
        numbers[1] = False  # Hypothesis took the exception of the last program, if it had one
        return

    import atheris

    def one_input(data: bytes) -> None:
        with watch():
            run(data)

    atheris.Setup([argv[0], *argv[2:]], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
