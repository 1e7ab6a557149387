"""The exception of a signal's handler, as `KeyboardInterrupt`, strikes wherever it can.

`strike_operations` says what is done meanwhile. Wherever it strikes, it comes out; nothing is
unmapped or closed twice, nothing stays behind, no context stays in force, and the same done again
succeeds.
"""

import pickle
import random
import time
import types
import weakref
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import faults as faults_library
import pytest
import strikes as strikes_library
from hypothesis import settings
from simulated_hip import MIB, simulated_hip
from strike_operations import OPERATIONS
from strike_runner import CUDA_OPERATIONS, attempt, cuda_attempt

from arenapy import Pool, Shared, numpy_memory
from arenapy.interop import hip
from arenapy.memory import shared

EXAMPLES = settings.default.max_examples
LONG = EXAMPLES >= 1000
# A few places of many in the quick profiles. Nothing is owned where limits are only read.
EACH = max(1, 50 // EXAMPLES)
READING = "memory_info.py"

pytestmark = [
    pytest.mark.no_sanitizer,  # it maps and allocates for itself by what is noted here
]


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    return faults_library.Faults(faults_library.compiled(tmp_path_factory.mktemp("faults")))


@pytest.fixture(scope="module")
def strikes(tmp_path_factory):
    return strikes_library.Strikes(strikes_library.compiled(tmp_path_factory.mktemp("strikes")))


#: Places that were struck in some operation.
done = set()


def targets(strikes):
    """Where to strike of what was passed last: everywhere, or (quicker) where nothing did yet."""
    places = strikes.places()
    if LONG:
        return sorted(places.values())
    new = [place for place in places if place not in done and place[0] != READING]
    done.update(new)
    return [places[place] for place in new[random.Random(len(done)).randrange(EACH) :: EACH]]


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.sampled
@pytest.mark.full
def test_a_signal_at_every_bytecode(faults, strikes, tmp_path, name):
    faults.install()
    attempt(faults, name, tmp_path, strikes.at())  # what is done the first time only
    assert attempt(faults, name, tmp_path, strikes.at()) == (False, [])
    wrong = []
    for number in targets(strikes):
        struck, problems = attempt(faults, name, tmp_path, strikes.at(number))
        wrong += [f"at {number}: {problem}" for problem in problems or [] if problem]
        if not struck and not problems:
            wrong.append(f"at {number}: nothing struck")
    assert not wrong, "\n".join(wrong)


CUDA_REGIONS = [name for name in CUDA_OPERATIONS if name.startswith("region of ")]


@pytest.mark.parametrize("name", CUDA_REGIONS)
@pytest.mark.full
def test_a_signal_while_a_driver_gives_memory(strikes, name):
    cuda_attempt(name, strikes.at())
    struck, problems, left = cuda_attempt(name, strikes.at())
    assert (struck, problems) == (False, [])
    wrong = []
    for number in targets(strikes):
        _, problems, now = cuda_attempt(name, strikes.at(number))
        problems += [] if now == left else [f"left {left} -> {now}"]
        wrong += [f"at {number}: {problem}" for problem in problems]
    assert not wrong, "\n".join(wrong)


def hip_region():
    hip.Device(1).region(MIB)


def hip_pinned():
    hip.Pinned().region(MIB)


def hip_pool():
    pool = Pool(8 * MIB, hip.Device(1))
    pool.alloc(100)
    pool.trim()


def hip_copy():
    hip.copy(Pool(8 * MIB, hip.Device(1)).alloc(5), b"hello")


@pytest.mark.parametrize("act", [hip_region, hip_pinned, hip_pool, hip_copy])
@pytest.mark.full
def test_a_signal_while_hip_works(tmp_path, act):
    """Memory is freed, the device is current that was so before, and the exception is not lost."""
    library = strikes_library.compiled(tmp_path)
    strikes = strikes_library.Strikes(library, user=Path(__file__))

    def attempt(strike):
        with simulated_hip() as runtime, strike:
            try:
                act()
            except strikes_library.Struck:
                return True
            finally:
                assert not runtime.ranges and runtime.current == 0
        return False

    attempt(strikes.at())
    assert not attempt(strikes.at())
    places = [number for place, number in strikes.places().items() if place[0] == "hip.py"]
    assert len(places) > 5
    for number in sorted(places):
        assert attempt(strikes.at(number)), f"at {number} nothing struck"


@pytest.mark.full
def test_two_signals(faults, strikes, tmp_path):
    """The second one strikes while the first one's exception is on its way."""
    chosen = random.Random(5)
    wrong = []
    for name in chosen.sample(sorted(OPERATIONS), min(EXAMPLES // 8, len(OPERATIONS))):
        faults.install()
        attempt(faults, name, tmp_path, strikes.at())
        numbers = sorted(strikes.places().values())
        for first in chosen.sample(numbers, min(EXAMPLES // 20, len(numbers))):
            second = first + chosen.randrange(1, 60)
            _, problems = attempt(faults, name, tmp_path, strikes.at(first, second))
            wrong += [f"{name} at {first}, {second}: {problem}" for problem in problems]
    assert not wrong, "\n".join(wrong)


#: They wait for threads of their own, which go on if the wait is struck.
WAITING = {"PerThread", "handler, thread started"}


def test_real_signals(faults, tmp_path):
    """At random times, also while the kernel works."""
    chosen = random.Random()
    wrong, arrived = [], 0
    lasts = dict.fromkeys(OPERATIONS, 0.0)
    end = time.monotonic() + min(EXAMPLES / 50, 300)
    faults.install()
    # Python's `multiprocessing` loses a descriptor that is struck just after its `os.dup`.
    names = sorted(name for name in OPERATIONS.keys() - WAITING if not name.startswith("send"))
    # Few examples may strike nothing; but if nothing ever strikes, this ends and fails.
    while time.monotonic() < end or (not arrived and time.monotonic() < end + 60):
        name = chosen.choice(names)
        if not lasts[name]:
            attempt(faults, name, tmp_path, strikes_library.after(0))
            began = time.perf_counter()
            attempt(faults, name, tmp_path, strikes_library.after(0))
            lasts[name] = time.perf_counter() - began
        seconds = chosen.uniform(1e-6, lasts[name])
        struck, problems = attempt(faults, name, tmp_path, strikes_library.after(seconds))
        arrived += struck
        wrong += [f"{name} after {seconds}: {problem}" for problem in problems]
    assert not wrong, "\n".join(wrong)
    assert arrived


def test_callbacks_of_weak_references_are_no_python_code():
    """A signal's exception in one of them would be lost, and with it what the callback does."""
    pool = Pool(trim_after=3600, trim_thread=True)
    with numpy_memory(pool):
        received = pickle.loads(ForkingPickler.dumps(Pool(source=Shared()).alloc(100)))
        (file,) = (reference() for reference in shared._received.values())
        for watched in (pool, file):
            callbacks = [ref.__callback__ for ref in weakref.getweakrefs(watched)]
            assert any(callbacks)
            assert not any(isinstance(one, types.FunctionType) for one in callbacks), callbacks
    del file, received, watched
    assert not shared._received
