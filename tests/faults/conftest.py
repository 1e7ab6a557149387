"""In a test of this folder, no garbage of other tests is collected, and no other thread calls."""

import gc
import os

import pytest
from cuda_support import until

from arenapy import Pool


def threads():
    return len(os.listdir("/proc/self/task"))


@pytest.fixture(autouse=True, scope="session")
def no_other_thread():
    """The first allocator makes a thread for one call of the system, which is not to be noted."""
    before = threads()
    Pool()
    until(lambda: threads() <= before)


@pytest.fixture(autouse=True)
def only_our_garbage():
    """Other tests' garbage would give memory back, and run Python code, in the middle of a test.

    What is mapped and closed is noted here, and a signal that strikes the callback of a weak
    reference is lost, since Python prints what such a callback raises.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()
