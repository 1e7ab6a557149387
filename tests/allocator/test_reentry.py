"""User code that comes in the middle of a call, and frees, takes, resets, trims and closes there.

Sizes, shapes, dtypes, buffers, sources, hooks and the collector all run it; see reentry.py.
"""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import Pages
from hypothesis import settings
from reentry import DOORS

from arenapy import Bump, OutOfMemory, measure

EVERY = max(1, 6400 // settings().max_examples)


@pytest.mark.full
def test_nothing_that_is_held_changes(tmp_path):
    program = Path(__file__).with_name("reentry.py")
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", program, tmp_path / "last", str(EVERY)],
        capture_output=True,
        text=True,
        timeout=3600,
        cwd=tmp_path,
    )
    last = (tmp_path / "last").read_text().strip()
    assert done.returncode == 0, f"at {last}\n{done.stderr[-3000:]}"
    entered = {line[7:]: int(line[:6]) for line in done.stdout.splitlines()}
    assert list(entered) == list(DOORS)
    later = {"copy_from", "copy_to"} if sys.version_info < (3, 12) else set()
    assert {door for door, times in entered.items() if not times} == later


AUDITED = """
import sys
import arenapy

seen = None
sys.addaudithook(lambda event, arguments: seen is not None and seen.append(event))
pool = arenapy.Pool()
with arenapy.measure(pool):
    pool.alloc(1000)
seen = []
with arenapy.measure(pool) as one, arenapy.measure():
    pool.alloc(1000)
    one.peak
with arenapy.measure():
    del pool
assert not seen, seen
"""


def test_no_audit_hook_runs_where_allocators_are_looked_up():
    """It may run any code. (The event of `id()` is new in Python 3.12.)"""
    subprocess.run([sys.executable, "-c", AUDITED], check=True, timeout=60)


def test_a_late_failure_counts_what_user_code_allocated():
    class Source:
        calls = 0

        def region(self, nbytes):
            self.calls += 1
            if self.calls == 2:
                self.kept = arena.alloc(1000)
            if self.calls == 3:
                raise OutOfMemory("no")
            return Pages().region(nbytes)

    arena = Bump(4096, source=Source(), max_bytes=1 << 20)
    with measure(arena) as found, contextlib.suppress(OutOfMemory):
        arena.alloc_many([5000, 500_000])
    assert (found.allocations, found.bytes, arena.used) == (1, 1000, 1000)
    arena.reset()
    arena.check()


def test_a_refused_call_does_not_undo_what_user_code_did():
    arena = Bump(4096, source=Pages(), max_bytes=1 << 16)
    kept = []

    def sizes():
        kept.append(arena.zeros(8000, "u1"))
        yield 64
        yield 1 << 30

    try:
        arena.alloc_many(sizes())
    except MemoryError:
        pass
    else:
        raise AssertionError
    stats = arena.stats()
    assert stats.total_allocations == stats.held_buffers == 1
    assert stats.peak_bytes >= arena.used >= 8000
    arena.check()
