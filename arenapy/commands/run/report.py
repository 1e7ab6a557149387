"""The memory of a program under ``arenapy run``: its pool, and what is said of it at the end.

What lives here: the pool as the options want it, its figures, the report. What does not: running
the program (startup/sitecustomize.py), and the command line (run.py).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

# As every program has them, before there is a Buffer (arenapy/__init__.py).
import arenapy.buffer.dlpack
import arenapy.pickling  # noqa: F401
from arenapy._version import __version__
from arenapy.base.text import format_bytes, printable
from arenapy.diagnostics.recorder import Recorder, Recording
from arenapy.linux.libc_malloc import foreign_malloc
from arenapy.memory.sources import Host
from arenapy.numpy_handler.numpy_memory import numpy_memory
from arenapy.pool.pool import Pool

__all__ = ["ProgramMemory"]


class ProgramMemory:
    """The pool of a program, in force from when this is made.

    Parameters
    ----------
    options : mapping
        ``max_bytes``, ``initial_bytes``, ``huge_pages``, ``lock``, ``on_full``, ``libc``: as for
        `Pool`, `Host` and `numpy_memory`; ``trace`` (a file or None), ``sites``: as for
        `trace.record`; ``trace_stays``: whether the report names the trace.

    Raises
    ------
    OutOfMemory, OSError, ValueError
        As these do.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        source = Host(huge_pages=options["huge_pages"], lock=options["lock"])
        self.pool = Pool(
            options["max_bytes"], source=source, initial_bytes=options["initial_bytes"]
        )
        self.recording = self._begin_trace(options["trace"], options["sites"])
        self.trace = self.recording.path if self.recording and options["trace_stays"] else None
        self._file = os.stat(self.trace) if self.trace is not None else None
        self.traced = ""  # for the report
        self.handler = numpy_memory(
            self.pool, on_full=options["on_full"], threads=True, libc=options["libc"]
        ).install()
        self._unreached: set[str] = set()
        self._pid = os.getpid()
        with contextlib.suppress(RuntimeError):  # the exit handlers are running already
            # Before it waits for threads, which end by that.
            threading._register_atexit(self.see_threads)  # type: ignore[attr-defined]

    def _begin_trace(self, path: str | None, sites: int) -> Recorder | None:
        if path is None:
            return None
        from arenapy.commands.run.command import TRACE_KIND  # not at every start

        return Recording(self.pool, path, sites, TRACE_KIND).__enter__()

    def end_trace(self) -> bool:
        """Stop recording. False: the trace is not complete, and `traced` says why."""
        if self.recording is not None:
            try:
                self.recording.stop()
                if self.trace is not None and self._file is not None:
                    found = os.stat(self.trace)
                    if not os.path.samestat(found, self._file):
                        self.traced = (
                            f"{printable(self.trace)} is another file now: the program replaced "
                            "the trace"
                        )
                        return False
                    size = format_bytes(found.st_size)
                    self.traced = f"{printable(self.trace)}, {size}; see arenapy trace"
            except OSError as error:
                self.traced = printable(str(error))
                return False
        return True

    def see_threads(self) -> None:
        """Note which threads run now and do not have the pool.

        Never raises: Python would not wait for the program's threads.
        """
        if os.getpid() == self._pid:
            with contextlib.suppress(Exception):  # what the program did to its threads
                self._unreached.update(self.handler.unreached())

    def _misses_contexts(self) -> bool:
        """True if this thread has the pool, but in another context than the present one.

        So it is at the end of a program that imports NumPy in a task, which has its own context.
        """
        name = np._core.multiarray.get_handler_name()  # type: ignore[attr-defined]
        return name != "arenapy" and threading.current_thread().name not in self._unreached

    def figures(self) -> dict[str, Any]:
        """The figures so far, as plain data. Sizes are bytes."""
        self.see_threads()
        prefault_bytes, prefault_seconds, _, peak_reserved, _ = self.pool._growth()
        # Not stats(): the program's end would wait for the import of the dataclasses.
        pool = _with_shares(self.pool._figures())
        pool["classes"] = [_with_shares(one) for one in pool["classes"]]
        return {
            "arenapy": __version__,
            "numpy_version": np.__version__,
            "served_bytes": self.pool._tally()[1],
            "prefault_seconds": prefault_seconds,
            "prefault_bytes": prefault_bytes,
            "peak_reserved_bytes": peak_reserved,
            "never_used_bytes": max(0, peak_reserved - pool["peak_bytes"]),
            "libc_keeps": self.handler.libc is not None and foreign_malloc() is None,
            "fell_back": self.handler._figures(),
            "unreached_threads": sorted(self._unreached),
            "unreached_contexts": self._misses_contexts(),
            "trace": self.trace,
            "pool": pool,
        }

    def measured(self) -> dict[str, Any]:
        """The figures for ``arenapy compare``, which are ready at once. The peak begins anew."""
        blocks, nbytes, _ = self.pool._tally()
        _, seconds, cpu_seconds, peak_reserved, _ = self.pool._growth()
        return {
            "blocks": blocks,
            "served_bytes": nbytes,
            # Of a request that waits for a processor, not the wait.
            "prefault": min(seconds, cpu_seconds),
            "never_used_bytes": max(0, peak_reserved - self.pool._exchange_peak(None)),
        }

    def text(self, figures: Mapping[str, Any]) -> str:
        """The report, in lines."""
        pool = figures["pool"]
        blocks = _count(pool["total_allocations"], "block")
        lines = [
            ("served", f"{blocks}, {format_bytes(figures['served_bytes'])}"),
            ("hit rate", _share(pool["hit_rate"])),
            (
                "peak",
                f"{format_bytes(pool['peak_bytes'])} in blocks, "
                f"{format_bytes(figures['peak_reserved_bytes'])} reserved",
            ),
            (
                "prefault",
                f"{format_bytes(figures['prefault_bytes'])} in {figures['prefault_seconds']:.3f} s",
            ),
            ("page faults", f"{figures['minor_faults']:,} minor, of the whole process"),
            ("malloc", self._malloc(figures)),
            *(("fell back", line) for line in self._fell_back(figures)),
            *([("trace", self.traced)] if self.traced else []),
        ]
        return "arenapy run: NumPy's memory from a pool\n" + "".join(
            f"  {name:<11}  {text}\n" for name, text in lines
        )

    def _malloc(self, figures: Mapping[str, Any]) -> str:
        """The treatment of memory from malloc, in words."""
        if figures["libc_keeps"]:
            return "glibc keeps freed memory"
        if self.handler.libc is None:
            return "unchanged"
        return f"unchanged: {printable(foreign_malloc() or '')} is not glibc's"

    def _fell_back(self, figures: Mapping[str, Any]) -> list[str]:
        """Lines about allocations that the pool did not serve, with the reason."""
        found, lines = figures["fell_back"], []
        if found["system_allocations"]:
            limit = self.pool.max_bytes
            full = "memory ran out" if limit is None else f"--max-bytes is {format_bytes(limit)}"
            why = f"the pool was full ({full}), or arrays were resized"
            lines.append(
                f"{_count(found['system_allocations'], 'block')}, "
                f"{format_bytes(found['system_bytes'])}, to malloc: "
                f"{printable(self.pool._growth()[4] or why)}"
            )
        if found["lazy_allocations"]:
            lines.append(
                f"{_count(found['lazy_allocations'], 'block')}, "
                f"{format_bytes(found['lazy_bytes'])}: large arrays of zeros, left to the system"
            )
        if figures["unreached_threads"]:
            names = ", ".join(map(printable, figures["unreached_threads"]))
            lines.append(f"all arrays of these threads, which the pool does not reach: {names}")
        if figures["unreached_contexts"]:
            lines.append(
                "all arrays of other contexts than the one that imported NumPy: import it at the "
                "top of the program, and not in a task"
            )
        return lines or ["nothing"]


def _with_shares(found: dict[str, Any]) -> dict[str, Any]:
    """The figures of a pool or of a class with those that follow from them, as in `as_dict()`."""
    requests, idle = found["total_allocations"], found["idle_bytes"]
    return found | {
        "hit_rate": found["pool_hits"] / requests if requests else 0.0,
        "fragmentation": 1 - found["largest_free_block"] / idle if idle else 0.0,
    }


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _share(value: float) -> str:
    return f"{value if value == 1 else min(value, 0.999):.1%}"  # nearly all is not all
