"""How ``arenapy advise`` measures: each setting in processes of its own, by turns.

What lives here: the share of the program that is replayed, the processes, the rounds. What does
not: which settings there are (settings.py), what the figures mean (advice.py).

The first process of each setting measures its memory. Then in every round each setting has its
turn, in an order that is shuffled and, in the next round, reversed, so that a machine that becomes
slower or faster favours nobody. A process makes the allocator, repeats the program, and writes
every page of every block, as the program did. All of that is in its time on the processor, which
counts. After a few rounds, a setting that lost all of them is left out, so that there are more
rounds for the others. The baseline stays, and so does the fastest of the others.

Replays of a GPU's memory are all in one process (device_process.py), and their time is elapsed
time. They make the allocator in every round, too.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from arenapy.commands.advise.advice import ROUNDS, choose
from arenapy.commands.advise.settings import PLAIN_POOL, Setting, ready_pool, unsuited
from arenapy.commands.compare.verdict import LEAST_ROUNDS, WORTH
from arenapy.commands.replay.command import run_worker
from arenapy.commands.replay.program import Program

__all__ = ["EVENT_SECONDS", "FEWEST", "Replays", "shortened"]

FEWEST = 4  # rounds of all settings
#: Of the time that there is, one pass may take this share, as far as that is known beforehand.
SHARE = 1 / 60
EVENT_SECONDS, PAGE_SECONDS = 100e-9, 250e-9  # of a malloc: a call, and a page that it faults in
PAGE = 4096
PATIENCE = 20  # times what a pass may take
START_SECONDS = 20.0  # of a process, on a machine that is busy

#: Runs one setting once: `run_worker` and its arguments.
Run = Callable[..., dict[str, Any]]


def shortened(
    program: Program, seconds: float, repeat: int, event_seconds: float = EVENT_SECONDS
) -> tuple[Program, int]:
    """The part of a program, from its beginning, that there is time for, and how often it is run.

    Parameters
    ----------
    program : Program
    seconds : float
        Of all replays together.
    repeat : int
        How often the program does what was recorded. From the second time on, it takes the same.
    event_seconds : float
        Of an allocation or a free by the slowest allocator, but for page faults.
    """
    pages = np.where(program.slots >= 0, program.sizes // PAGE + 1, 0)
    costs = np.cumsum(event_seconds + PAGE_SECONDS * pages.astype("f8"))
    passes = min(repeat, max(2, int(seconds * SHARE / costs[-1])))
    n = int(np.searchsorted(costs, seconds * SHARE / passes, side="right"))
    return (program if n >= len(program) else program.first(max(1, n))), passes


class Replays:
    """Replays of one program with some settings.

    Parameters
    ----------
    program : Program
    settings : sequence of Setting
        In the order of preference. The first one is the baseline, which is never left out.
    folder : Path
        For the processes.
    threads : int
        Of the program.
    seconds : float
        Of all replays together; as many rounds as can be sure are made in any case.
    passes, repeat : int
        How often each process runs the program, and how often the program does that.
    worker : callable, optional
        In place of `run_worker`.

    Attributes
    ----------
    settings : dict
        By name, what is compared, in the order of preference.
    times : dict
        By name, the seconds of every round in which a setting had its turn.
    held : dict
        By name, the most bytes that a setting held.
    notes : dict
        By name, why a setting is not compared.
    baseline : str
        The name of the first setting.
    """

    def __init__(
        self,
        program: Program,
        settings: Sequence[Setting],
        folder: Path,
        *,
        threads: int,
        seconds: float,
        passes: int,
        repeat: int,
        worker: Run = run_worker,
    ) -> None:
        self.program, self.seconds = program, seconds
        self.passes, self.repeat = passes, repeat
        self.folder, self.worker = folder, worker
        self.baseline = str(settings[0])
        self.settings: dict[str, Setting] = {}
        self.times: dict[str, list[float]] = {}
        self.held: dict[str, int] = {}
        self.notes: dict[str, str] = {}
        self.began = time.monotonic()
        for setting in settings:
            why = unsuited(setting, program, threads)
            if why:
                self.notes[str(setting)] = why
            else:
                self.settings[str(setting)] = setting
        program.save(folder)

    def spent(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.began

    def warm_up(self) -> Iterator[str]:
        """Measure the memory of each setting; says which one comes.

        Raises
        ------
        OSError
            If the baseline has no figures.
        """
        waiting = list(self.settings.values())
        self.settings = {}
        while waiting:
            setting = waiting.pop(0)
            name = str(setting)
            yield name
            result = self._run(setting, "--written")
            if result is not None:
                self.settings[name] = setting
                self.held[name] = int(result["peak"])
                if name == str(PLAIN_POOL):
                    waiting.insert(0, ready_pool(self.held[name], setting.device))
        if self.baseline not in self.settings:
            raise self._not_measured()
        self.times = {name: [] for name in self.settings}

    def rounds(self) -> Iterator[str]:
        """Time the settings until the time is spent; says which one comes.

        Raises
        ------
        OSError
            If a process of the baseline has no figures.
        """
        order, number, longest = list(self.settings), 0, 0.0
        while number < ROUNDS and len(order) > 1:
            start = time.monotonic()
            is_late = number and self.spent() + longest > self.seconds
            if is_late and number >= self._fewest():
                break
            if number % 2:
                order.reverse()
            else:
                random.shuffle(order)
            for name in list(order):
                yield name
                result = self._run(self.settings[name], "--passes", str(self.passes))
                if result is None and name == self.baseline:
                    raise self._not_measured()
                if result is None:
                    order.remove(name)
                    del self.times[name]
                else:
                    self.times[name].append(self._whole(result))
            number += 1
            longest = time.monotonic() - start
            if number == FEWEST and len(order) > 1:
                medians = {name: statistics.median(self.times[name]) for name in order}
                del medians[self.baseline]
                stays = self.baseline, min(medians, key=medians.__getitem__)
                order = [name for name in order if name in stays or not self._lost(name)]

    def _not_measured(self) -> OSError:
        return OSError(f"{self.baseline} was not measured: {self.notes.get(self.baseline)}")

    def _fewest(self) -> int:
        """Rounds to make in any case: more if a disturbed one may be all that stands in the way."""
        undecided = choose(self.times, self.held).word == "undecided"
        return 2 * LEAST_ROUNDS if undecided else LEAST_ROUNDS

    def _whole(self, result: Mapping[str, float]) -> float:
        """Seconds of all repetitions, of which a process makes some."""
        if self.passes == self.repeat:
            return result["seconds"]
        later = (result["seconds"] - result["first"]) / (self.passes - 1)
        return result["first"] + later * (self.repeat - 1)

    def _lost(self, name: str) -> bool:
        """True if another setting was faster in every round, by more than `WORTH`."""
        own = self.times[name]
        return any(
            all(mine > (1 + WORTH) * its for mine, its in zip(own, times, strict=True))
            for other, times in self.times.items()
            if other != name
        )

    def _run(self, setting: Setting, *words: str) -> dict[str, Any] | None:
        """The figures of a process; None if it has none, which is noted."""
        limit = START_SECONDS + PATIENCE * self.seconds * SHARE
        arguments = ("--settings", json.dumps(dict(setting.arguments))) if setting.arguments else ()
        try:
            found = self.worker(setting.peer, self.folder, *words, *arguments, seconds=limit)
        except OSError as error:
            self.notes[str(setting)] = str(error)
            return None
        if found["steps"] < len(self.program):
            self.notes[str(setting)] = (
                f"refused step {found['steps'] + 1} of {len(self.program)}: out of memory"
            )
            return None
        return found
