"""The lock that costs its owner nothing: one at a time, also while it changes hands."""

import ctypes
import os
import platform
import threading
import time

import pytest
from downstream_of_arenapy.turns import Turns

REGISTER = 16  # MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED
NUMBER = {"x86_64": 324, "aarch64": 283}[platform.machine()]  # of the system call


def run(turns, pauses, seconds):
    """`take_turns` on a thread for each pause, of which the first one may own the lock; what they
    return."""
    results = [None] * len(pauses)

    def one(k):
        results[k] = turns.take_turns(pauses[k])

    threads = [threading.Thread(target=one, args=(k,)) for k in range(len(pauses))]
    for thread in threads:
        thread.start()
        while not turns.count:
            time.sleep(0.001)
    time.sleep(seconds)
    turns.stop()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a thread waits for ever"
    return results


@pytest.fixture(params=["one processor", "all processors"])
def processors(request):
    """On one, an owner is always suspended while others run."""
    before = os.sched_getaffinity(0)
    if request.param == "one processor":
        os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    "pauses",
    [
        (0,),
        (0, 20_000),
        (0, 300_000),
        (0, 20_000, 300_000),
        (0, 0),
        (0, 0, 2_000_000),
        (20_000,) * 3,
    ],
    ids=str,
)
def test_one_at_a_time(processors, pauses):
    turns = Turns()
    results = run(turns, pauses, 0.5)
    assert turns.broken == 0
    assert turns.count == sum(n for n, _ in results)
    assert all(n for n, _ in results)


@pytest.mark.skipif(ctypes.CDLL(None).syscall(NUMBER, REGISTER, 0, 0) != 0, reason="no membarrier")
def test_who_is_alone_owns_it_and_has_it_back():
    turns = Turns()
    ((n, owned),) = run(turns, [0], 0.1)
    assert owned == n - 1  # the first time makes it the owner
    turns = Turns()
    (n, owned), (visits, _) = run(turns, [0, 20_000_000], 0.5)
    assert visits > 2
    assert n / 2 < owned <= n - 4096


def test_a_fork_within_the_process_of_an_owner():
    turns = Turns()
    before = threading.Thread(target=run, args=(turns, [0], 0.1))
    before.start()
    before.join()
    child = os.fork()
    if child == 0:
        again = Turns()
        results = run(again, [0, 20_000], 0.3)
        os._exit(0 if again.broken == 0 and again.count == sum(n for n, _ in results) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
