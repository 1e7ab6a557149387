"""Two threads whose calls exclude each other, made at the same moment.

With a GIL the calls of a round seldom meet. Free-threaded builds run them at once.
"""

import mmap
import time

import pytest
from helpers import in_threads
from sources import Given

from arenapy import Bump, Host, OutOfMemory, Pool, Slab, trace

SECONDS, NBYTES = 0.3, 1 << 16
REFUSALS = (ValueError, BufferError, OutOfMemory)


class Refuses:
    def region(self, nbytes):
        raise OutOfMemory(f"{nbytes} bytes are too many")


class Meeting:
    """Lets two threads go on at once. It spins, so that both are running."""

    def __init__(self):
        self.came = [0, 0]
        self.over = False

    def wait(self, k):
        self.came[k] += 1
        while self.came[1 - k] < self.came[k] and not self.over:
            pass


def attempt(call):
    """(what it returned, what it raised)."""
    try:
        return call(), None
    except REFUSALS as error:
        return None, error


def region():
    return Host(prefault=False).region(NBYTES)


def closed_twice(path):
    one = region()

    def close():
        one.close()
        fresh = mmap.mmap(-1, NBYTES)  # which a second unmapping would take away
        fresh[:] = b"x" * NBYTES
        return fresh

    def verify(first, second):
        assert first[0][:] == second[0][:] == b"x" * NBYTES

    return close, close, verify


def taken_twice(path):
    source = Given(region())

    def verify(first, second):
        assert (first[0] is None) + (second[0] is None) == 1

    return lambda: Bump(NBYTES, source), lambda: Bump(NBYTES, source), verify


def taken_while_it_ends(make):
    def case(path):
        source = Given(region())
        kept = [make(source)]

        def verify(first, second):
            assert (second[0] is None) == (second[1] is not None)

        return kept.clear, lambda: make(source), verify

    return case


def viewed_and_taken(path):
    one = region()
    buffer = one.buffer()

    def verify(first, second):
        assert (first[0] is None) + (second[0] is None) == 1

    return lambda: memoryview(buffer), lambda: Bump(NBYTES, Given(one)), verify


def closed_and_taken(make):
    def case(path):
        one = region()

        def verify(first, second):
            assert first[1] is not None or one.closed
            if one.closed and second[0] is not None:
                with pytest.raises(REFUSALS):
                    second[0].alloc(100)

        return one.close, lambda: make(Given(one)), verify

    return case


def closed_and_ended(make):
    def case(path):
        one = region()
        kept = [make(Given(one))]

        def verify(first, second):
            one.close()
            assert one.closed

        return one.close, kept.clear, verify

    return case


def marked_and_reset(path):
    arena = Bump(NBYTES)

    def mark():
        for _ in range(50):
            arena.mark()

    def reset():
        for _ in range(50):
            arena.reset()

    return mark, reset, lambda first, second: arena.check()


def recorded_twice(path):
    pool = Pool()
    recordings = [trace.record(pool, path / name) for name in "ab"]

    def verify(first, second):
        begun = [
            one for one, (_, error) in zip(recordings, (first, second), strict=True) if not error
        ]
        assert len(begun) == 1
        pool.alloc(100).release()
        begun[0].__exit__(None, None, None)

    return recordings[0].__enter__, recordings[1].__enter__, verify


def grown_and_trimmed(path):
    arena = Bump(4096, Host(grow=True, prefault=False), 64 << 20)

    def grow():
        for _ in range(5):
            arena.reset()
            attempt(lambda: arena.alloc(5 << 20))

    def trim():
        for _ in range(20):
            arena.trim()

    return grow, trim, lambda first, second: arena.check()


def refused_twice(path):
    pool = Pool(source=Refuses())

    def ask():
        for _ in range(20):
            attempt(lambda: pool.alloc(8 << 20))

    return ask, ask, lambda first, second: pool.check()


MAKERS = {
    "bump": lambda source: Bump(NBYTES, source),
    "slab": lambda source: Slab(1024, 4, source),
    "pool": lambda source: Pool(source=source, initial_bytes=NBYTES),
}
CASES = {
    "closed twice": closed_twice,
    "taken twice": taken_twice,
    **{f"taken while a {name} ends": taken_while_it_ends(MAKERS[name]) for name in MAKERS},
    "viewed and taken": viewed_and_taken,
    **{f"closed and taken by a {name}": closed_and_taken(MAKERS[name]) for name in MAKERS},
    **{f"closed while a {name} ends": closed_and_ended(MAKERS[name]) for name in MAKERS},
    "marked and reset": marked_and_reset,
    "recorded twice": recorded_twice,
    "grown and trimmed": grown_and_trimmed,
    "refused twice": refused_twice,
}


@pytest.mark.parametrize("case", CASES)
def test_two_calls_at_once(tmp_path, case):
    meeting, state = Meeting(), {}
    end = time.monotonic() + SECONDS

    def work(k):
        while True:
            if k == 0:
                state["round"] = CASES[case](tmp_path) if time.monotonic() < end else None
            meeting.wait(k)
            calls = state["round"]
            if calls is None:
                return
            meeting.wait(k)
            state[k] = attempt(calls[k])
            meeting.wait(k)
            if k == 0:
                calls[2](state.pop(0), state.pop(1))
                state["round"] = None
            calls = None
            meeting.wait(k)

    def run(k):
        try:
            work(k)
        except BaseException:
            meeting.over, state["round"] = True, None
            raise

    in_threads(lambda: run(0), lambda: run(1))
