"""Two threads at one allocator: handing over from one to the other, and both at once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from hypothesis import strategies as st

from arenapy.testing.machine import AllocatorMachine
from arenapy.testing.operations import operation
from arenapy.testing.ranges import Live, fill_of

__all__ = ["TwoThreadMachine"]

SWITCH = 1e-5  # seconds between switches in a race; the interpreter's own is 5e-3
PATIENCE = 60.0  # seconds until a race that hangs is a failure
RACERS = 2


class TwoThreadMachine(AllocatorMachine):
    """An `AllocatorMachine` whose hooks run in two threads.

    Steps run one after the other, but not in the same thread: one thread may free the blocks of the
    other. In the step `race`, both allocate and free at the same time, and then free each other's
    blocks. The step leaves no blocks behind, so that its timing changes no later choice.

    Notes
    -----
    Thread-safety: `allocate` and `free` are called from two threads at once.

    Examples
    --------
    >>> from arenapy.testing import PoolMachine, TwoThreadMachine
    >>> class TwoAtAPool(TwoThreadMachine, PoolMachine):
    ...     pass
    >>> TestTwoAtAPool = TwoAtAPool.TestCase
    """

    def __init__(self) -> None:
        super().__init__()
        self.turn = 0
        self.workers = [ThreadPoolExecutor(1) for _ in range(RACERS)]

    def call(self, hook: Any, *arguments: Any) -> Any:
        """Call a hook in the thread whose turn it is."""
        return self.workers[self.turn].submit(hook, *arguments).result()

    def teardown(self) -> None:
        """End the threads."""
        try:
            super().teardown()
        finally:
            for worker in self.workers:
                worker.shutdown()

    @operation()
    def other_thread(self) -> None:
        """From here on, the other thread."""
        self.turn = 1 - self.turn

    @operation(
        "free", plans=st.lists(st.lists(st.integers(0, 2000), max_size=6), min_size=2, max_size=2)
    )
    def race(self, plans: list[list[int]]) -> None:
        """Both threads at once: allocate; then free what the other allocated."""
        self.reached("a race")
        interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH)
        try:
            found = self.at_once([partial(self.allocate_all, plans[i], i) for i in range(RACERS)])
            mine = [[self.admit_raced(*one) for one in blocks] for blocks in found]
            self.contents_survive()
            # Past `gone`: in which order they were served must not decide what comes later.
            others = [[self.live.pop(one).block for one in serials] for serials in reversed(mine)]
            self.at_once([partial(self.free_all, blocks) for blocks in others])
        finally:
            sys.setswitchinterval(interval)

    def at_once(self, tasks: list[Callable[[], Any]]) -> list[Any]:
        """Run a task in each thread at the same time; what they return."""
        barrier = threading.Barrier(len(tasks), timeout=PATIENCE)

        def run(task: Callable[[], Any]) -> Any:
            barrier.wait()
            return task()

        running = [w.submit(run, task) for w, task in zip(self.workers, tasks, strict=True)]
        return [one.result(PATIENCE) for one in running]

    def allocate_all(self, plan: list[int], racer: int) -> list[tuple[Any, int, int]]:
        """In a thread: allocate and fill; every other block goes at once, to keep things moving."""
        kept = []
        for index, drawn in enumerate(plan):
            nbytes = max(self.smallest, drawn)
            try:
                block = self.allocate(self.state, nbytes, None)
            except self.refusals:
                continue
            fill = fill_of(racer + RACERS * index)
            known = Live(block, self.start_of(block), nbytes, fill, nbytes)
            self.fill_here(known)
            if index % 2:
                self.free(self.state, block)
            else:
                kept.append((block, nbytes, fill))
        return kept

    def fill_here(self, known: Live) -> None:
        """Fill a block in the thread that is running, whose turn it need not be."""
        if self.write is not None:
            self.write(known.block, 0, bytes([known.fill]) * known.nbytes)

    def admit_raced(self, block: Any, nbytes: int, fill: int) -> int:
        """Take a block into the model that is filled already: what it reads is to be seen."""
        known = self.take_in(block, nbytes, None)
        known.fill = fill
        self.serial += 1
        self.live[self.serial] = known
        return self.serial

    def free_all(self, blocks: list[Any]) -> None:
        """In a thread: give blocks back."""
        while blocks:
            self.free(self.state, blocks.pop())
