"""A program: fails what is called at the import of arenapy or when something is first used.

Each failure is in a forked child that has not imported it yet; it prints a line of JSON: the call,
which, the error, whether it was failed, and the exception that followed with its text. The library
of `faults.c` is given. What is called again later is no concern of this program's.
"""

import ctypes
import json
import os
import sys
import threading
from pathlib import Path

import numpy as np
from fault_table import ERRORS, LASTS, number
from faults import FAILED, PACKAGE, Faults

FIRST = ("strdup", "pthread_key_create", "pthread_setspecific", "__register_atfork", "membarrier")


def use():
    import arenapy
    import arenapy.cuda.driver

    pool = arenapy.Pool(max_bytes=4 << 20)
    blocks = [pool.alloc(100) for _ in range(10)]
    thread = threading.Thread(target=lambda: blocks.append(pool.alloc(100)))
    thread.start()
    thread.join()
    checked = arenapy.Pool(max_bytes=4 << 20, debug=True)
    block = checked.alloc(100)
    address = block.address
    block.release()
    ctypes.memset(address, 1, 1)
    try:
        checked.check()
        raise AssertionError("a write to free memory was not found")
    except arenapy.MemoryCorruption as error:
        assert "allocated at" in str(error) or "free" in str(error), error
    ctypes.memset(address, 0, 0)
    child = os.fork()
    if not child:
        blocks.append(pool.alloc(100))
        pool.check()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    pool.check()
    assert len({one.address for one in blocks}) == 11
    return np.asarray(blocks[0])


def attempt(faults, call=None, nth=0, error=None):
    exception = text = ""
    with faults.noting():
        try:
            with faults.armed(call, nth, number(error), error == LASTS):
                use()
        except BaseException as caught:
            exception, text = type(caught).__name__, str(caught)
        calls = faults.armed_calls()
    return exception, text, calls


def in_child(function, *arguments):
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        with os.fdopen(writer, "w") as file:
            json.dump(function(*arguments), file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return json.loads(text) if status == 0 else ("killed", f"status {status}", [])


def main():
    for path in sorted(Path(PACKAGE).rglob("*.so")):
        ctypes.CDLL(str(path))  # mapped, and not run yet
    faults = Faults(sys.argv[1])
    assert "arenapy" not in sys.modules
    exception, text, calls = in_child(attempt, faults)
    assert not exception, (exception, text)
    names = [name for name, *_ in calls]
    for call in FIRST:
        for nth in range(names.count(call)):
            for error in ERRORS[call]:
                exception, text, made = in_child(attempt, faults, call, nth, error)
                failed = any(state == FAILED for _, state, *_ in made) or exception == "killed"
                print(json.dumps([call, nth, error, failed, exception, text]), flush=True)


main()
