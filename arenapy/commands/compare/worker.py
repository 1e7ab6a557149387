"""One run of a command, measured: what ``arenapy compare`` starts for each.

    python -I -S arenapy/commands/compare/worker.py SPEC RESULT

A small process on its own, because a child's peak of resident memory begins with that of the
process which starts it. SPEC is a file of JSON: `command`, `environment`, `settings` (what
run/startup/sitecustomize.py is told; None: nothing), `output` and `errors` (files; None: where this
process's go), `interval` (None, or seconds between two looks at the huge pages of the command) and
`library` (that should be mapped). RESULT is a file for the figures, or for the `error` if the
command cannot be started.

CPU time, page faults and peak are the kernel's account of the command (`wait4`): with them come
those of its own children that it has waited for, the largest peak of any one of them. `waited` is
the time in which the main thread could have run and had no processor.
"""

import json
import os
import signal
import sys
import time

__all__ = ["main"]

HUGE = ("AnonHugePages:", "Private_Hugetlb:", "Shared_Hugetlb:")
CREATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
HEEDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE = 2.0  # seconds for a program to end by SIGTERM
PR_SET_PDEATHSIG = 1


def _huge_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith(HUGE))


def _watch(pid: int, interval: float, library: str) -> tuple[int, bool]:
    """The most huge pages in bytes that were seen until the end, and whether the library was."""
    most, loaded = 0, not library
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        try:
            most = max(most, _huge_bytes(pid))
            if not loaded:
                with open(f"/proc/{pid}/maps") as file:
                    loaded = library in file.read()
        except OSError:  # it has just ended, or may not be looked at
            pass
        time.sleep(interval)
    return most, loaded


def _waited(pid: int) -> float:
    """The seconds that a process which has ended waited for a processor, if the kernel knows."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except OSError:
        return 0.0


def _end(pid: int) -> None:
    """End the program and its group by SIGTERM, or by SIGKILL if it does not end by that."""
    os.killpg(pid, signal.SIGTERM)
    late = time.monotonic() + PATIENCE
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is None:
        if time.monotonic() > late:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.01)


def _stop(number: int, frame: object) -> None:
    # The end has begun. One that came already has its handler called: Python complains of SIG_IGN.
    for later in HEEDED:
        signal.signal(later, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, HEEDED)
    raise SystemExit(128 + number)


def main(spec_file: str, result: str) -> None:
    """Run a command, and write what was measured. SystemExit, from a signal, ends it too."""
    with open(spec_file) as file:
        spec = json.load(file)
    actions: list[tuple[object, ...]] = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
    for descriptor, name in (1, spec["output"]), (2, spec["errors"]):
        if name is not None:
            actions.append((os.POSIX_SPAWN_OPEN, descriptor, name, CREATE, 0o600))
    if spec["settings"] is not None:
        spec["environment"]["ARENAPY_RUN"] = ascii({**spec["settings"], "pid": os.getpid()})
    found: dict[str, object] = {}
    pid = 0
    try:
        # No signal comes between the start of the program and the end of the assignment.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, HEEDED)
        start = time.perf_counter()
        pid = os.posix_spawnp(
            spec["command"][0],
            spec["command"],
            spec["environment"],
            file_actions=actions,
            # Or signals that it sends to its group would end us. (The leader of a session could not
            # make a group itself.)
            setpgroup=0,
            setsigmask=mask,
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores them, a shell does not
        )
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if spec["interval"]:
            found["huge_bytes"], found["loaded"] = _watch(pid, spec["interval"], spec["library"])
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        end, found["waited"] = time.perf_counter(), _waited(pid)
        _, status, usage = os.wait4(pid, 0)
    except SystemExit:
        try:
            if pid:
                _end(pid)
        except OSError:  # it had ended
            pass
        raise
    except OSError as error:  # it could not be started
        found["error"] = str(error)
    else:
        found |= {
            "start": start,
            "wall": end - start,
            "cpu": usage.ru_utime + usage.ru_stime,
            "kernel": usage.ru_stime,
            "faults": usage.ru_minflt,
            "peak_bytes": usage.ru_maxrss << 10,
            "status": os.waitstatus_to_exitcode(status),
        }
    with open(result, "w") as file:
        json.dump(found, file)


def _heed_signals() -> None:
    for number in HEEDED:
        if signal.getsignal(number) != signal.SIG_IGN:  # as of a shell's background job
            signal.signal(number, _stop)


def _end_with_parent() -> None:
    """Get SIGTERM when the process that started this one ends, even if it is killed."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    _heed_signals()
    _end_with_parent()
    main(*sys.argv[1:])
