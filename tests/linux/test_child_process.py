"""Child processes that a signal's exception cannot lose."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest

from arenapy.commands.advise.device_process import DeviceProcess
from arenapy.commands.compare import worker
from arenapy.linux import child_process as module
from arenapy.linux.child_process import child_process
from arenapy.testing import guided

TERMINATE = subprocess.Popen.terminate
FOREVER = [sys.executable, "-c", "import time; time.sleep(600)"]


class Struck(BaseException):
    """What a handler of the test raises."""


@pytest.fixture(params=module.ENDING)
def struck(request):
    """A signal whose handler raises `Struck`."""

    def strike(number, frame):
        raise Struck

    before = signal.signal(request.param, strike)
    yield request.param
    signal.signal(request.param, before)


@pytest.fixture
def started(monkeypatch):
    """The processes that have started; a signal comes before the caller knows of them."""
    found = []
    real = subprocess.Popen

    def start(*arguments, **how):
        found.append(real(*arguments, **how))
        found.strike()
        return found[-1]

    class Found(list):
        strike = staticmethod(lambda: None)

    found = Found()
    monkeypatch.setattr(module.subprocess, "Popen", start)
    return found


def test_a_signal_while_a_process_starts(started, struck):
    started.strike = lambda: signal.raise_signal(struck)
    handler = signal.getsignal(struck)
    with pytest.raises(Struck), child_process(FOREVER):
        pytest.fail("the signal was lost")
    assert started[0].returncode == -signal.SIGKILL
    assert signal.getsignal(struck) is handler


def test_a_signal_while_a_process_does_not_start(struck, monkeypatch):
    def fail(*arguments, **how):
        signal.raise_signal(struck)
        raise OSError("no process")

    monkeypatch.setattr(module.subprocess, "Popen", fail)
    with pytest.raises(Struck), child_process(FOREVER):
        pass


def test_a_signal_while_a_process_runs(started, struck):
    with pytest.raises(Struck), child_process(FOREVER, TERMINATE) as process:
        signal.raise_signal(struck)
    assert started == [process] and process.returncode == -signal.SIGTERM


def test_a_process_that_ends_by_itself(started):
    with child_process([sys.executable, "-c", "print(5)"], stdout=subprocess.PIPE) as process:
        assert process.communicate()[0] == b"5\n"
    assert process.returncode == 0 and process.stdout.closed


def test_a_signal_that_does_nothing_is_none(started):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        started.strike = lambda: signal.raise_signal(signal.SIGHUP)
        with child_process([sys.executable, "-c", ""]) as process:
            assert process.wait() == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def advise(folder):
    with DeviceProcess() as replay:
        replay("pool", folder, seconds=60)


RUNS = {
    "advise": advise,
    "guided": lambda folder: guided._process("no target", folder),
    "guided, a finding": lambda folder: guided._fails([]),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_signal_while_a_process_of_a_command_starts(started, struck, run, tmp_path, monkeypatch):
    monkeypatch.setattr(guided, "environment", lambda steps: {"ARENAPY_STEPS": str(steps)})
    started.strike = lambda: signal.raise_signal(struck)
    with pytest.raises(Struck):
        run(tmp_path)
    ended = started[0].poll() is not None
    started[0].kill()
    started[0].__exit__(None, None, None)
    assert ended


@pytest.mark.parametrize("number", worker.HEEDED)
def test_a_signal_while_the_measured_program_starts(tmp_path, monkeypatch, number):
    started = []
    real = os.posix_spawnp

    def start(*arguments, **how):
        started.append(real(*arguments, **how))
        signal.raise_signal(number)
        return started[-1]

    def stop(*_arguments):
        raise SystemExit

    monkeypatch.setattr(os, "posix_spawnp", start)
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps({
        "command": FOREVER, "environment": {}, "settings": None, "output": None, "errors": None,
        "interval": None, "library": "",
    }))  # fmt: skip
    before = {each: signal.getsignal(each) for each in worker.HEEDED}
    signal.signal(number, stop)  # worker's own keeps later signals off for good
    try:
        with pytest.raises(SystemExit):
            worker.main(str(spec), str(tmp_path / "result"))
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        alive = os.path.exists(f"/proc/{started[0]}")
        with contextlib.suppress(OSError):
            os.kill(started[0], signal.SIGKILL)
    assert not alive
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(worker.HEEDED)
